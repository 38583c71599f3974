"""Data races between the programs of one launch.

Programs of a grid run in no order. Where two of them touch the same bytes, one writes, and no atomic stands between, what the launch
leaves depends on which came first. Running one program after another hides that. Here all programs run together, and `Shadow`
knows for each element which programs loaded, stored and atomically updated it. What it suspects is looked at again with each of two
programs alone (`conflict`), so that equal writes and values that nobody changed are no race.
"""

import dataclasses
from typing import Any

import numpy as np

LOAD, STORE, ATOMIC = "read", "write", "update"
# With which earlier accesses of another program an access races.
AGAINST = {LOAD: (STORE, ATOMIC), STORE: (LOAD, STORE, ATOMIC), ATOMIC: (LOAD, STORE)}


class Race(Exception):
    """Two programs of a launch touch the same bytes, one of them writes, and nothing orders them. `place` is the kernel's line."""

    def __init__(self, what: str, place: str) -> None:
        super().__init__(what)
        self.place = place


@dataclasses.dataclass(frozen=True)
class Suspect:
    """Two programs that may race, by their numbers, and the kernel's line that touched what the other had touched."""

    programs: tuple[int, int]
    place: str


class Shadow:
    """Which programs touched each element of a memory: for each kind of access two of them, as 1 + their number, or 0."""

    def __init__(self, size: int, granule: int) -> None:
        self.size, self.granule = size, granule  # in bytes
        self._marks: dict[str, tuple[Any, Any]] = {}

    def elements(self, index: Any, width: int) -> tuple[Any, int]:
        """Where elements of `width` bytes lie in the shadow, and how many of its granules each has."""
        if width < self.granule:
            ratio = self.granule // width
            self._marks = {kind: (np.repeat(one, ratio), np.repeat(two, ratio)) for kind, (one, two) in self._marks.items()}
            self.granule = width
        return index * (width // self.granule), width // self.granule

    def touched_by_others(self, kind: str, index: Any, width: int, program: Any) -> Any:
        """For each access a program besides its own that touched its bytes in that way before, as 1 + its number, or 0."""
        if kind not in self._marks:
            return np.zeros(1, dtype=np.int32)
        first, ratio = self.elements(index, width)
        found: Any = 0
        for step in range(ratio):
            one, two = (marks[first + step] for marks in self._marks[kind])
            found = np.maximum(found, np.where(one == program + 1, two, one))
        return found

    def touch(self, kind: str, index: Any, width: int, program: Any) -> None:
        """Note an access of each index by its program."""
        first, ratio = self.elements(index, width)
        if kind not in self._marks:
            count = -(-self.size // self.granule)
            self._marks[kind] = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
        one, two = self._marks[kind]
        mine = np.broadcast_to(program + 1, index.shape).astype(np.int32)
        for step in range(ratio):
            at = first + step
            held = one[at]
            one[at] = np.where(held == 0, mine, held)  # of several programs at one place one stays
            other = (one[at] != mine) & (two[at] == 0)
            two[at[other]] = mine[other]


@dataclasses.dataclass
class Trace:
    """What one program alone does to a memory, byte by byte: what it reads of what was there, writes, and updates atomically."""

    before: Any
    reads: Any
    writes: Any
    updates: Any
    after: Any

    @classmethod
    def of(cls, before: Any) -> "Trace":
        """Of a memory that nobody has touched yet."""
        return cls(before, *(np.zeros(len(before), dtype=bool) for _ in range(3)), before)

    def note(self, kind: str, index: Any, width: int) -> None:
        """An access to elements of `width` bytes."""
        places = (index.reshape(-1, 1) * width + np.arange(width)).reshape(-1)
        if kind == LOAD:
            self.reads[places] |= ~self.writes[places]
        else:
            (self.writes if kind == STORE else self.updates)[places] = True


def conflict(one: Trace, other: Trace) -> tuple[str, str, int] | None:
    """What two programs alone do to the same byte that cannot both be right, and the byte; None if all is one in any order."""
    changes = [each.writes & (each.after != each.before) for each in (one, other)]
    for did, does, bytes_ in (
        (STORE, STORE, one.writes & other.writes & (one.after != other.after)),
        (LOAD, STORE, one.reads & changes[1]),
        (STORE, LOAD, changes[0] & other.reads),
        (ATOMIC, STORE, one.updates & changes[1]),
        (STORE, ATOMIC, changes[0] & other.updates),
        (ATOMIC, LOAD, one.updates & other.reads),
        (LOAD, ATOMIC, one.reads & other.updates),
    ):
        if bytes_.any():
            return did, does, int(np.flatnonzero(bytes_)[0])
    return None
