"""What kernels read and write, for all programs of a launch at once, held to the memory of their tensors."""

import copy
import ctypes
import itertools
from typing import Any

import numpy as np

Span = tuple[int, int]  # the addresses of a tensor's memory: of its first byte, and after its last


class OutOfBounds(Exception):
    """A kernel reads or writes outside of the memory of the tensor that its pointer was made from.

    Memory is the tensor's whole storage: a view may reach what it is a view of. `span` is its first byte's address and the
    one after its last. On a device such an access is an illegal address, or other numbers, on other days.
    """

    def __init__(self, what: str, span: Span = (0, 0)) -> None:
        super().__init__(what)
        self.span = span


class Untracked(Exception):
    """A pointer whose tensor is not known: made from an integer, or from two tensors."""


def pointing(dtype: Any, *sources: Any) -> Any:
    """The type of a pointer that may come from any of some handles: it knows their memories, if all do."""
    known = [getattr(source.dtype, "spans", ()) for source in sources]
    dtype = copy.copy(dtype)
    dtype.spans = tuple(dict.fromkeys(itertools.chain(*known))) if all(known) else ()
    return dtype


class Memory:
    """The memory of one launch: typed views of the tensors' storages, and what they held before the launch."""

    def __init__(self) -> None:
        self._views: dict[tuple[Span, Any], Any] = {}
        self._before: dict[Span, Any] = {}

    def rollback(self) -> None:
        """Put back what the stored-to storages held before the launch."""
        for span, before in self._before.items():
            self._view(span, np.dtype(np.uint8))[:] = before
        self._before.clear()

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """What the pointers point to; `other`, or zero, where the mask is False."""
        span, index, mask = self._places(pointers, mask, dtype)
        data = self._view(span, dtype).take(index)
        if mask is None:
            return data
        return np.where(mask, data, dtype.type(0) if other is None else other).astype(dtype, copy=False)

    def store(self, pointers: Any, value: Any, mask: Any, shape: tuple[int, ...]) -> None:
        """Write the value where the mask is True; of equal places the last program's stays."""
        span, index, mask = self._places(pointers, mask, value.dtype)
        self._keep(span)
        count = max(len(index), len(value), 1 if mask is None else len(mask))
        index, value = (np.broadcast_to(part, (count, *shape)) for part in (index, value))
        if mask is not None:
            mask = np.broadcast_to(mask, (count, *shape))
            index, value = index[mask], value[mask]
        self._view(span, value.dtype)[index] = value

    def before_atomic(self, pointers: Any, mask: Any) -> None:
        """An atomic is about to change what the pointers point to."""
        for span in self._spans(pointers):
            self._keep(span)

    def _spans(self, pointers: Any) -> tuple[Span, ...]:
        spans: tuple[Span, ...] = getattr(pointers.dtype, "spans", ())
        if not spans:
            raise Untracked("a pointer that no tensor is known of")
        return spans

    def _places(self, pointers: Any, mask: Any, dtype: Any) -> tuple[Span, Any, Any]:
        """The memory, the indices into its view (0 where the mask is False), and the mask, None if it is True everywhere."""
        spans = self._spans(pointers)
        if len(spans) > 1:
            raise Untracked("a pointer that may be one of two tensors'")
        (start, end), size = spans[0], dtype.itemsize
        if start % size:
            raise Untracked("memory that begins between two elements")
        index = (pointers.data - np.uint64(start)).view(np.int64)
        if size > 1:
            index >>= size.bit_length() - 1
        if mask is not None and mask.all():
            mask = None
        last = (end - start) // size - 1
        if not _inside(index, last):
            if mask is None:
                raise OutOfBounds("accesses memory outside of a tensor", spans[0])
            index = np.where(mask, index, 0)
            if not _inside(index, last):
                raise OutOfBounds("accesses memory outside of a tensor", spans[0])
        return spans[0], index, mask

    def _view(self, span: Span, dtype: Any) -> Any:
        key = span, dtype
        if key not in self._views:
            start, end = span
            size = dtype.itemsize
            raw = (ctypes.c_uint8 * (end - start)).from_address(start)
            self._views[key] = np.frombuffer(raw, dtype=dtype, count=(end - start) // size)
        return self._views[key]

    def _keep(self, span: Span) -> None:
        if span not in self._before:
            self._before[span] = self._view(span, np.dtype(np.uint8)).copy()


def _inside(index: Any, last: int) -> bool:
    return not index.size or bool(np.minimum.reduce(index, axis=None) >= 0 and np.maximum.reduce(index, axis=None) <= last)
