"""Data races between the programs of one launch.

The programs of a grid run in no order. Two programs of one launch race if both access the same bytes, at least one changes them,
and the result depends on which program runs first. Running one program after another hides that.

A `Shadow` notes which programs touch each element while all programs run together. What it finds is only suspected, since
two programs may write the same value, or write over what neither reads. Therefore each of the two programs runs once more
alone, and `conflicts` compares what they do to each byte. A program that reads what the other writes then runs a third time,
after the other. If it writes what it wrote before, it did not use what it read, and there is no race.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

LOAD, STORE, ATOMIC = "read", "write", "update"
# An access conflicts with these earlier accesses of another program.
AGAINST = {LOAD: (STORE, ATOMIC), STORE: (LOAD, STORE, ATOMIC), ATOMIC: (LOAD, STORE)}


_accepted = False  # whether races are accepted at present


@contextlib.contextmanager
def accepted(*, if_: bool = True) -> Iterator[None]:
    """A context in which races raise no error: programs share bytes whose values do not matter, such as a pool's padding slot."""
    global _accepted
    before, _accepted = _accepted, if_
    try:
        yield
    finally:
        _accepted = before


def are_accepted() -> bool:
    """Whether races are accepted. A launch with a race then runs one program after another."""
    return _accepted


class Race(Exception):
    """Two programs of a launch access the same bytes, and the result depends on their order.

    `source` is the file and line of one of the accesses, with all folders, and `place` is the same without folders.
    """

    def __init__(self, what: str, source: str) -> None:
        super().__init__(what)
        self.source, self.place = source, os.path.basename(source)


@dataclasses.dataclass(frozen=True)
class Suspect:
    """Two programs that may race: their numbers in the grid, in ascending order, and the kernel's file and line that showed it."""

    programs: tuple[int, int]
    place: str


class Shadow:
    """Which programs touched each element of a memory of `size` bytes.

    For each kind of access two different programs are kept, as 1 + their number, or 0. Of two different programs, at least one is
    not the program that now accesses the element. An element is `granule` bytes, the smallest width of an access so far.
    """

    def __init__(self, size: int, granule: int) -> None:
        self._size, self._granule = size, granule
        self._marks: dict[str, tuple[Any, Any]] = {}

    def others(self, kind: str, index: Any, width: int, programs: Any) -> Any:
        """For each access a program other than its own that touched its bytes before, as 1 + the number, or 0 if there is none.

        `index` counts elements of `width` bytes; `programs` are the numbers of the programs that touch them now.
        """
        if kind not in self._marks:
            return np.zeros(1, dtype=np.int32)
        found: Any = 0
        for place in self._places(index, width):
            first, second = (marks[place] for marks in self._marks[kind])
            found = np.maximum(found, np.where(first == programs + 1, second, first))
        return found

    def touch(self, kind: str, index: Any, width: int, programs: Any) -> None:
        """Record that programs touch elements."""
        places = self._places(index, width)
        if kind not in self._marks:
            count = -(-self._size // self._granule)
            self._marks[kind] = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
        first, second = self._marks[kind]
        marks = np.broadcast_to(programs + 1, index.shape).astype(np.int32)
        for place in places:
            # If several programs touch a place for the first time, one of them is kept.
            first[place] = np.where(first[place] == 0, marks, first[place])
            others = (first[place] != marks) & (second[place] == 0)
            second[place[others]] = marks[others]

    def _places(self, index: Any, width: int) -> list[Any]:
        """The indices of the elements' granules in the marks: one array for the first granule of each element, and so on."""
        if width < self._granule:
            ratio = self._granule // width
            self._marks = {kind: (np.repeat(one, ratio), np.repeat(two, ratio)) for kind, (one, two) in self._marks.items()}
            self._granule = width
        ratio = width // self._granule
        if ratio == 1:
            return [index]
        return [index * ratio + step for step in range(ratio)]


@dataclasses.dataclass
class Trace:
    """What one program alone does to a memory, byte by byte.

    `reads` are bytes that it reads before it writes them, `writes` and `updates` are bytes that it writes and updates atomically.
    `changes` are bytes that at some time had another value than in `before`. `before` and `after` are the memory's contents.
    """

    before: Any
    reads: Any
    writes: Any
    updates: Any
    changes: Any
    after: Any

    @classmethod
    def of(cls, before: Any) -> "Trace":
        """The trace of a program that has not touched the memory yet."""
        nothing = np.zeros(len(before), dtype=bool)
        return cls(before, nothing, nothing.copy(), nothing.copy(), nothing.copy(), before)

    def note(self, kind: str, index: Any, width: int) -> None:
        """Record an access to elements of `width` bytes."""
        places = (index.reshape(-1, 1) * width + np.arange(width)).reshape(-1)
        if kind == LOAD:
            self.reads[places] |= ~self.writes[places]
        elif kind == STORE:
            self.writes[places] = True
        else:
            self.updates[places] = True


def conflicts(one: Trace, other: Trace) -> Iterator[tuple[str, str, int]]:
    """Pairs of accesses of two programs to one byte whose order may matter: the access of each, and the byte.

    Writes of equal values do not conflict, and a write that leaves the value unchanged conflicts with no read.
    """
    for did, does, both in (
        (STORE, STORE, one.writes & other.writes & (one.after != other.after)),
        (ATOMIC, STORE, one.updates & other.writes),
        (STORE, ATOMIC, one.writes & other.updates),
        (ATOMIC, LOAD, one.updates & other.reads),
        (LOAD, ATOMIC, one.reads & other.updates),
        (LOAD, STORE, one.reads & other.changes),
        (STORE, LOAD, one.changes & other.reads),
    ):
        if both.any():
            yield did, does, int(np.flatnonzero(both)[0])


def writes_the_same(one: Trace, other: Trace) -> bool:
    """Whether two runs of a program write the same bytes with the same values, and update the same bytes."""
    same = np.array_equal(one.writes, other.writes) and np.array_equal(one.updates, other.updates)
    return same and np.array_equal(one.after[one.writes], other.after[other.writes])
