"""The variables of programs that run together: parts of them for a group of programs, and their merging afterwards."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl

from verify.interpreter.internals import is_aggregate
from verify.interpreter.memory import pointing
from verify.interpreter.operations import SEMANTIC, BlockPointer, Handle, Unbatchable


class Names(dict[str, Any]):
    """The variables of some programs. A name that is not here is looked up in `outer`, at these programs' `positions` there."""

    def __init__(self, outer: "Names | None" = None, positions: Any = None) -> None:
        super().__init__()
        self.outer, self.positions = outer, positions

    def __missing__(self, name: str) -> Any:
        # No recursion, because a loop adds an outer scope for each turn in which programs left it.
        outer, between = self.outer, [self]
        while outer is not None and not dict.__contains__(outer, name):
            between.append(outer)
            outer = outer.outer
        if outer is None:
            raise KeyError(name)
        positions = between[-1].positions
        for names in between[-2::-1]:
            positions = positions[names.positions]
        value = self[name] = selected(dict.__getitem__(outer, name), positions)
        return value

    def __contains__(self, name: object) -> bool:
        names: Names | None = self
        while names is not None and not dict.__contains__(names, name):
            names = names.outer
        return names is not None


class Frame:
    """Programs that run together and their variables. `programs` are their positions in the launch's slice, in ascending order."""

    def __init__(self, programs: Any, names: Names) -> None:
        self.programs, self.names = programs, names

    def part(self, positions: Any) -> "Frame":
        """The frame of some of the programs."""
        return Frame(self.programs[positions], Names(self.names, positions))

    def positions(self, other: "Frame") -> Any:
        """The positions of another frame's programs in this frame."""
        return np.searchsorted(self.programs, other.programs)


# Values of some of the programs, and of several groups of programs together.


class Parted:
    """A variable that has different types in different groups of programs, or that only some programs have."""

    def __init__(self, parts: list[tuple[Any, Any]]) -> None:
        self.parts = parts  # positions and value of each group

    def _used(self, *_: Any) -> Any:
        raise Unbatchable("a variable that has several types, or that only some programs have")

    __getattr__ = __bool__ = __index__ = __iter__ = __len__ = _used


def selected(value: Any, positions: Any) -> Any:
    """A variable's value for some of the programs that have it."""
    if isinstance(value, Parted):
        found = [(np.isin(positions, group), group, part) for group, part in value.parts]
        parts = [
            (np.flatnonzero(here), selected(part, np.searchsorted(group, positions[here])))
            for here, group, part in found
            if here.any()
        ]
        return _together(parts, len(positions))
    if isinstance(value, tl.tensor):
        handle = _selected_handle(value.handle, positions)
        return value if handle is value.handle else tl.tensor(handle, value.type)
    if isinstance(value, (tuple, tl.tuple)):
        items = [selected(item, positions) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else _like(value, items)
    if is_aggregate(value):
        return _with_fields(value, {name: selected(part, positions) for name, part in vars(value).items()})
    return value


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    """An aggregate of the same type with other fields. Its constructor, which may convert them, is not called."""
    result = object.__new__(type(value))
    vars(result).update(fields)
    return result


def _selected_handle(handle: Any, positions: Any) -> Any:
    if isinstance(handle, BlockPointer):
        return handle.replaced([_selected_handle(scalar, positions) for scalar in handle.scalars()])
    if not isinstance(handle, Handle):
        raise Unbatchable(f"a branch with a {type(handle).__name__}")
    if len(handle.data) == 1:
        return handle
    result = Handle(handle.data[positions], handle.dtype)
    result.shape = handle.shape
    return result


def _like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tl.tuple):
        return tl.tuple(items)
    return tuple(items) if type(value) is tuple else type(value)(*items)


def merged(parts: list[tuple[Any, Any]], count: int) -> Any:
    """One value for `count` programs, from the positions and values of groups of them. Unbatchable if they have no common type."""
    values = [value for _, value in parts]
    first = values[0]
    if all(value is first for value in values):
        return first
    plain = [value.value if isinstance(value, tl.constexpr) else value for value in values]
    if not any(isinstance(value, tl.tensor) for value in plain) and all(_equal(value, plain[0]) for value in plain):
        return first
    if all(isinstance(value, (tl.tensor, int, float)) for value in plain):
        values = [SEMANTIC.to_tensor(value) for value in plain]
        if any(str(value.type) != str(values[0].type) for value in values):
            values = _of_one_type(values)
        handles = [(positions, value.handle) for (positions, _), value in zip(parts, values, strict=True)]
        return tl.tensor(_merged_handle(handles, count), values[0].type)
    if all(isinstance(value, (tuple, tl.tuple)) and len(value) == len(first) for value in values):
        groups = [positions for positions, _ in parts]
        columns = zip(*values, strict=True)
        return _like(first, [merged(list(zip(groups, column, strict=True)), count) for column in columns])
    if is_aggregate(first) and all(type(value) is type(first) for value in values):
        fields = {name: [(positions, vars(value)[name]) for positions, value in parts] for name in vars(first)}
        return _with_fields(first, {name: merged(column, count) for name, column in fields.items()})
    raise Unbatchable("a variable that has several types")


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and not isinstance(one, (tuple, tl.tuple)) and bool(one == other)


def _of_one_type(values: list[Any]) -> list[Any]:
    """Integers of several widths, converted to the widest as in compiled kernels. Unbatchable for other types."""
    if not all(value.dtype.is_int() and list(value.shape) == list(values[0].shape) for value in values):
        raise Unbatchable("a variable that has several types")
    widest = max((value.dtype for value in values), key=lambda dtype: dtype.int_bitwidth)
    return [value.to(widest) for value in values]


def _merged_handle(parts: list[tuple[Any, Any]], count: int) -> Any:
    first = parts[0][1]
    if isinstance(first, BlockPointer):
        groups = [positions for positions, _ in parts]
        columns = zip(*[handle.scalars() for _, handle in parts], strict=True)
        return first.replaced([_merged_handle(list(zip(groups, column, strict=True)), count) for column in columns])
    dtype = first.dtype
    if dtype.is_ptr() and any(getattr(handle.dtype, "spans", ()) != getattr(dtype, "spans", ()) for _, handle in parts):
        dtype = pointing(dtype, *[handle for _, handle in parts])
    arrays = [handle.data for _, handle in parts]
    if all(data.size == 1 and data.item() == arrays[0].item() for data in arrays):
        return first
    data = np.empty((count, *np.broadcast_shapes(*[data.shape[1:] for data in arrays])), dtype=arrays[0].dtype)
    for (positions, _), part in zip(parts, arrays, strict=True):
        data[positions] = part
    result = Handle(data, dtype)
    result.shape = first.shape if first.shape is not None else first.data.shape[1:]
    return result


def joined(frame: Frame, parts: Sequence[Frame], assigned: frozenset[str]) -> Frame | None:
    """The frame after its groups of programs have run separately, with the variables they assigned. None if no program is left."""
    if not parts:
        return None
    if len(parts) == 1 and (parts[0] is frame or len(parts[0].programs) < len(frame.programs)):
        return parts[0]
    programs = np.sort(np.concatenate([part.programs for part in parts]))
    whole = frame if len(programs) == len(frame.programs) else frame.part(np.searchsorted(frame.programs, programs))
    for name in assigned:
        values = [(whole.positions(part), part.names[name]) for part in parts if name in part.names]
        if values:
            whole.names[name] = _together(values, len(programs))
    return whole


def _together(parts: list[tuple[Any, Any]], count: int) -> Any:
    """One value for `count` programs, or, if there is none, the value of each group of them."""
    if sum(len(positions) for positions, _ in parts) == count and not any(isinstance(value, Parted) for _, value in parts):
        with contextlib.suppress(Unbatchable):
            return merged(parts, count)
    return Parted(parts)
