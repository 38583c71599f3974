"""Reads and writes of kernels, for all programs of a launch at once. Accesses outside the memory of a tensor raise an error."""

import copy
import ctypes
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verify.interpreter.races import AGAINST, ATOMIC, LOAD, STORE, Shadow, Suspect, Trace

SUSPECTS, PAIRS = 64, 8  # at most so many suspects of a launch, and of one access; the programs of each run again, alone
BYTE = np.dtype(np.uint8)
Span = tuple[int, int]  # the addresses of a tensor's first byte, and of the byte after its last
INNER: dict[int, Span] = {}  # for storages that begin and end with guards, by their first byte: the memory between the guards


class OutOfBounds(Exception):
    """A kernel reads or writes outside the memory of the tensor from which its pointer was made.

    The memory is the tensor's whole storage, so a view may access all of its base tensor. `span` has the addresses of the memory's
    first byte and of the byte after its last. On a GPU such an access may fail, or may return arbitrary values.
    """

    def __init__(self, what: str, span: Span = (0, 0)) -> None:
        super().__init__(what)
        self.span = span


class Untracked(Exception):
    """A pointer whose tensor is not known, such as one that was made from an integer, or memory too large to be watched."""


MOSTBYTES = 2**31  # of memory that is copied to be watched; views far apart reserve more and touch little of it


class Unordered(Exception):
    """An access whose result depends on the order of programs."""


def pointing(dtype: Any, *sources: Any) -> Any:
    """The type of a pointer that may come from any of `sources`. It has the memories of all, or none if one is not known."""
    known = [getattr(source.dtype, "spans", ()) for source in sources]
    dtype = copy.copy(dtype)
    dtype.spans = tuple(dict.fromkeys(itertools.chain(*known))) if all(known) else ()
    dtype.recast = True  # it may point between two elements
    return dtype


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument: the argument itself, the base of a wrapper or descriptor, or the parts of a tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif hasattr(value, "base"):
        yield from tensors_of(value.base)


def span_of(tensor: torch.Tensor) -> Span:
    """The addresses of the first byte of a tensor's storage, and of the byte after its last; those of INNER if it is there."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return INNER.get(start) or (start, start + storage.nbytes())


def bytes_of(span: Span) -> Any:
    """The memory between two addresses, as a numpy array of bytes."""
    start, end = span
    raw = memoryview((ctypes.c_uint8 * (end - start)).from_address(start)).cast("B")
    return np.frombuffer(raw, dtype=BYTE, count=end - start)


class Rewatch(Exception):
    """A launch stores to memory from which it has loaded unrecorded. It runs again, and then these loads are recorded too."""

    def __init__(self, span: Span) -> None:
        super().__init__("stores to what it has loaded")
        self.span = span


class Memory:
    """The memory of one launch: the loads and stores of its programs, and which programs touched memory that is stored to.

    `programs` are the numbers of the programs that run now, and `suspects` are pairs of programs that may race. Loads from the
    spans in `watched` are recorded from the start. Loads from other spans are recorded after the first store to them; Rewatch is
    raised if that store follows a load.
    """

    by_address = False  # whether a program made a number of a pointer

    def __init__(self, watched: Iterable[Span] = ()) -> None:
        self.programs: Any = np.zeros(1, dtype=np.int64)
        self.suspects: list[Suspect] = []
        self.before: dict[Span, Any] = {}
        self._views: dict[tuple[Span, Any], Any] = {}
        self._shadows: dict[Span, Shadow] = {}
        self.together = 1  # the number of programs in the current slice
        self.largest_block = 1  # in elements
        self.loads = 0
        self._watched, self._loaded = set(watched), set[Span]()
        self._updates: list[tuple[Any, ...]] = []  # atomics of this slice that are not applied yet
        self._updated: set[Span] = set()

    def rollback(self) -> None:
        """Restore the contents that the changed storages had before the launch."""
        for span, before in self.before.items():
            self.view(span, BYTE)[:] = before

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Load the elements at the pointers. Where the mask is False, the value is `other`, or zero."""
        self.loads += 1
        if len(_spans(pointers)) > 1:
            data = np.zeros(1, dtype) if other is None else other
            for part, inside in _by_memory(pointers, mask):
                data = np.where(inside, self.load(part, inside, None, dtype), data)
            return data.astype(dtype, copy=False)
        span, index, mask = self._places(pointers, mask, dtype)
        if index is None:
            return (
                np.zeros_like(mask, dtype)
                if other is None
                else np.broadcast_to(other, np.broadcast_shapes(other.shape, mask.shape))
            )
        self._loaded.add(span)
        if span in self._watched:
            self.loading(span, dtype, *self._chosen(mask, index))
        self._in_order(span)
        data = self.view(span, dtype).take(index)
        if mask is None:
            return data
        return np.where(mask, data, dtype.type(0) if other is None else other).astype(dtype, copy=False)

    def store(self, pointers: Any, value: Any, mask: Any, shape: tuple[int, ...]) -> None:
        """Write the value where the mask is True. If several programs write one element, the last program's value stays."""
        if len(_spans(pointers)) > 1:
            for part, inside in _by_memory(pointers, mask):
                self.store(part, value, inside, shape)
            return
        span, index, mask = self._places(pointers, mask, value.dtype)
        if index is None:
            return
        self._writes(span)
        count = max(len(index), len(value), 1 if mask is None else len(mask))
        index, value = (np.broadcast_to(part, (count, *shape)) for part in (index, value))
        index, programs, value = self._chosen(mask, index, value)
        self.storing(span, value.dtype, index, programs, value)
        self._in_order(span)

    def update(self, pointers: Any, mask: Any, dtype: Any) -> None:
        """Check the addresses of an atomic, and record the update, before the atomic is applied."""
        if len(_spans(pointers)) > 1:
            for part, inside in _by_memory(pointers, mask):
                self.update(part, inside, dtype)
            return
        span, index, mask = self._places(pointers, mask, dtype)
        if index is None:
            return
        self._writes(span)
        self.updating(span, dtype, *self._chosen(mask, index))
        if self.together > 1:
            self._updated.add(span)

    def queue(self, kind: Any, apply: Callable[[Any, Any], Any], places: Any, values: Any, programs: Any) -> None:
        """Keep an atomic until the end of the slice, when `apply(places, values)` is called.

        `programs` has the number of the program of each place.
        """
        self._updates.append((kind, apply, places, values, programs))

    def finish_slice(self) -> None:
        """Apply the atomics of this slice program after program, each program's in its own order, as the reference does."""
        updates, self._updates = self._updates, []
        if len({(kind, values.dtype) for kind, _, _, values, _ in updates}) == 1:
            places, values, programs = (np.concatenate(parts) for parts in list(zip(*updates, strict=True))[2:])
            order = np.argsort(programs, kind="stable")
            updates[0][1](places[order], values[order])
            return
        for program in np.unique(np.concatenate([programs for *_, programs in updates])) if updates else ():
            for _, apply, places, values, programs in updates:
                apply(places[programs == program], values[programs == program])

    def holds(self, data: Any) -> None:
        """Record the size of a block."""
        self.largest_block = max(self.largest_block, data.size // max(1, len(data)))

    def _in_order(self, span: Span) -> None:
        """Unordered if a plain access follows an atomic to the same memory, because the order of programs then matters."""
        if span in self._updated:
            raise Unordered("a plain access after an atomic to the same memory")

    def view(self, span: Span, dtype: Any) -> Any:
        """The memory as a numpy array of a type."""
        key = span, dtype
        if key not in self._views:
            size = (span[1] - span[0]) // dtype.itemsize * dtype.itemsize
            self._views[key] = bytes_of(span)[:size].view(dtype)
        return self._views[key]

    # Accesses to elements, by index. `programs` has the number of the program of each access.

    def loading(self, span: Span, dtype: Any, index: Any, programs: Any) -> None:
        """Record that elements are loaded."""
        shadow, width = self._shadow(span, dtype), dtype.itemsize
        for kind in AGAINST[LOAD]:
            others = shadow.others(kind, index, width, programs)
            if others.any():
                bits, before = _bits(width), self.before[span]
                before = before[: len(before) // width * width].view(bits)
                # Atomics are applied at the end of the slice, so a change by one is not visible yet.
                changed = kind == ATOMIC or self.view(span, bits)[index] != before[index]
                self._suspect(others, programs, (others != 0) & changed)
        shadow.touch(LOAD, index, width, programs)

    def storing(self, span: Span, dtype: Any, index: Any, programs: Any, value: Any) -> None:
        """Write elements and record it."""
        shadow, width = self._shadow(span, dtype), dtype.itemsize
        now, bits = self.view(span, _bits(width)), value.view(_bits(width))
        for kind in AGAINST[STORE]:
            others = shadow.others(kind, index, width, programs)
            if others.any():
                self._suspect(others, programs, (others != 0) & (kind == ATOMIC or now[index] != bits))
        now[index] = bits
        shadow.touch(STORE, index, width, programs)
        lost = now[index] != bits
        if lost.any():
            others = shadow.others(STORE, index, width, programs)
            self._suspect(others, programs, (others != 0) & lost)

    def updating(self, span: Span, dtype: Any, index: Any, programs: Any) -> None:
        """Record that elements are updated atomically."""
        shadow, width = self._shadow(span, dtype), dtype.itemsize
        for kind in AGAINST[ATOMIC]:
            others = shadow.others(kind, index, width, programs)
            self._suspect(others, programs, others != 0)
        shadow.touch(ATOMIC, index, width, programs)

    def _suspect(self, others: Any, programs: Any, where: Any) -> None:
        """Suspect pairs of programs that touch the same elements, at most PAIRS of each access. Not all pairs may conflict."""
        if len(self.suspects) < SUSPECTS and where.any():
            where, others, programs = np.broadcast_arrays(where, others, programs)
            pairs = np.sort(np.stack([others[where] - 1, programs[where]], axis=1), axis=1)
            suspects = [Suspect((int(one), int(other)), place()) for one, other in np.unique(pairs, axis=0)[:PAIRS]]
            self.suspects += [suspect for suspect in suspects if suspect not in self.suspects]

    def _shadow(self, span: Span, dtype: Any) -> Shadow:
        if span not in self._shadows:
            _check_size(span)
            self._shadows[span] = Shadow(span[1] - span[0], dtype.itemsize)
        return self._shadows[span]

    def _writes(self, span: Span) -> None:
        if span not in self._watched:
            if span in self._loaded:
                raise Rewatch(span)
            self._watched.add(span)
        if span not in self.before:
            _check_size(span)
            self.before[span] = self.view(span, BYTE).copy()

    def _chosen(self, mask: Any, index: Any, *values: Any) -> tuple[Any, ...]:
        """The indices where the mask is True, the program of each, and the values there, in the order of the programs."""
        running = len(self.programs)
        count = max(len(index), 1 if mask is None else len(mask))
        if count == 1 and running > 1:  # all programs touch the same elements: two represent all
            parts = [np.repeat(part, 2, axis=0) for part in (index, *values)]
            owners = self.programs[[0, -1]]
            mask = mask if mask is None else np.repeat(mask, 2, axis=0)
        else:
            parts, owners = [index, *values], self.programs
        index = parts[0]
        if mask is not None:
            mask = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, index.shape))
            parts = [np.broadcast_to(part, mask.shape) for part in parts]
            index = parts[0]
        owners = np.broadcast_to(owners.reshape(-1, *[1] * (index.ndim - 1)), index.shape)
        chosen = [parts[0], owners, *parts[1:]]
        return tuple(chosen if mask is None else [part[mask] for part in chosen])

    def _places(self, pointers: Any, mask: Any, dtype: Any) -> tuple[Span, Any, Any]:
        """The memory, the indices into its view, and the mask, which is None if it is True everywhere.

        If some pointers lie outside the memory, indices are 0 where the mask is False, or None if it is False everywhere.
        OutOfBounds if an access leaves the memory; Untracked if an address lies between two elements.
        """
        spans = _spans(pointers)
        (start, end), size = spans[0], dtype.itemsize
        if start % size or (getattr(pointers.dtype, "recast", False) and (pointers.data % np.uint64(size)).any()):
            raise Untracked("an address between two elements")
        index = pointers.data - np.uint64(start)  # before the memory it wraps, and is larger than any index
        if size > 1:
            index >>= np.uint64(size.bit_length() - 1)
        if mask is not None and mask.all():
            mask = None
        self.holds(index)
        last = (end - start) // size - 1
        if not _inside(index, last):
            if mask is not None and not mask.any():
                return spans[0], None, mask
            index = index if mask is None else np.where(mask, index, np.uint64(0))
            if mask is None or not _inside(index, last):
                raise OutOfBounds("accesses memory outside of a tensor", spans[0])
        return spans[0], index.view(np.int64), mask


class Alone(Memory):
    """The memory of a launch in which one program runs alone. It records the program's accesses byte by byte."""

    def __init__(self) -> None:
        super().__init__()
        self.traces: dict[Span, Trace] = {}

    def loading(self, span: Span, dtype: Any, index: Any, programs: Any) -> None:  # noqa: ARG002 - there is one program
        self._trace(span).note(LOAD, index, dtype.itemsize)

    def storing(self, span: Span, dtype: Any, index: Any, programs: Any, value: Any) -> None:  # noqa: ARG002 - as above
        trace = self._trace(span)
        self.view(span, dtype)[index] = value
        trace.note(STORE, index, dtype.itemsize)
        trace.changes |= trace.before != self.view(span, BYTE)

    def updating(self, span: Span, dtype: Any, index: Any, programs: Any) -> None:  # noqa: ARG002 - as above
        self._trace(span).note(ATOMIC, index, dtype.itemsize)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._watched.update(getattr(pointers.dtype, "spans", ()))
        return super().load(pointers, mask, other, dtype)

    def traced(self) -> dict[Span, Trace]:
        """The trace of the program for each memory."""
        for span, trace in self.traces.items():
            trace.after = self.view(span, BYTE).copy()
        return self.traces

    def _trace(self, span: Span) -> Trace:
        if span not in self.traces:
            _check_size(span)
            self.traces[span] = Trace.of(self.view(span, BYTE).copy())
        return self.traces[span]


def _check_size(span: Span) -> None:
    """Raise Untracked for memory that is too large to be watched."""
    if span[1] - span[0] > MOSTBYTES:
        raise Untracked(f"memory of {(span[1] - span[0]) / 2**30:.0f} GiB")


def _spans(pointers: Any) -> tuple[Span, ...]:
    spans: tuple[Span, ...] = getattr(pointers.dtype, "spans", ())
    if not spans:
        raise Untracked("a pointer that no tensor is known of")
    return spans


def _by_memory(pointers: Any, mask: Any) -> Iterator[tuple[Any, Any]]:
    """For pointers into several memories: the pointers once for each memory, with the mask of those that point into it."""
    rest = (
        np.ones(pointers.data.shape, dtype=bool)
        if mask is None
        else np.broadcast_to(mask, np.broadcast_shapes(mask.shape, pointers.data.shape))
    )
    for span in _spans(pointers):
        inside = rest & (pointers.data >= np.uint64(span[0])) & (pointers.data < np.uint64(span[1]))
        rest = rest & ~inside
        yield SimpleNamespace(data=pointers.data, dtype=SimpleNamespace(spans=(span,), recast=True)), inside
    if rest.any():
        raise OutOfBounds("accesses memory outside of its tensors")


def place() -> str:
    """The file and line of the running kernel, with all folders."""
    frame = sys._getframe()
    ours = os.path.dirname(__file__), os.path.dirname(sys.modules["triton"].__file__ or ""), os.path.dirname(np.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _bits(width: int) -> Any:
    return np.dtype(f"u{width}")


def _inside(index: Any, last: int) -> bool:
    return not index.size or int(np.maximum.reduce(index, axis=None)) <= last
