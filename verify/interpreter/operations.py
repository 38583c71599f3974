"""Triton's operations on all programs of a grid at once.

A value of a kernel is one numpy array whose first axis is the programs: `data[i]` is the value of program i. This axis has
length 1 where all programs have the same value. The other axes are the block's. An axis along which a block was broadcast keeps
length 1 until an operation needs its elements; `handle.shape` is then the shape of the block, and otherwise None.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from verify.interpreter.arithmetic import tree_levels
from verify.interpreter.internals import combines, get, pads_with_nan, skips_nan
from verify.interpreter.memory import Memory, pointing

Handle, Builder = get("interpreter.TensorHandle"), get("interpreter.InterpreterBuilder")
Handle.shape = None  # the data has the shape of the block, unless an operation sets this
np_dtype, SEMANTIC = get("interpreter._get_np_dtype"), get("interpreter.interpreter_semantic")


class Unbatchable(Exception):
    """This launch cannot run all programs at once; the message says which operation. The programs run one after another instead."""


class Diverges(Exception):
    """Programs disagree about a value that decides what runs next; `groups` are the positions of those that agree."""

    def __init__(self, groups: list[Any]) -> None:
        super().__init__(f"{len(groups)} groups of programs")
        self.groups = groups


def agreed(data: Any) -> Any:
    """The value that all programs share, as a numpy scalar. Diverges if they disagree."""
    flat = data.reshape(-1)
    if flat.size == 1 or (flat == flat[0]).all():
        return flat[0]
    values, groups = np.unique(flat, return_inverse=True)
    if len(values) == 1:  # NaN
        return flat[0]
    raise Diverges([np.flatnonzero(groups == group) for group in range(len(values))])


def block_shape(handle: Any) -> tuple[int, ...]:
    """The shape of the block, without the axis of programs."""
    shape: tuple[int, ...] = handle.data.shape[1:] if handle.shape is None else handle.shape
    return shape


def full(handle: Any) -> Any:
    """The data with every element of the block; the axis of programs stays as it is."""
    data = handle.data
    if handle.shape is None or data.shape[1:] == handle.shape:
        return data
    return np.ascontiguousarray(np.broadcast_to(data, (data.shape[0], *handle.shape)))


def handle_of(data: Any, dtype: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A handle. `shape` is the block's shape if the data still has axes of length 1 for broadcast ones."""
    handle = Handle(data, dtype)
    if shape is not None and data.shape[1:] != shape:
        handle.shape = shape
    return handle


class GridBuilder(Builder):  # type: ignore[misc, valid-type]
    """The builder that Triton's frontend calls for each operation of the language. It acts on all running programs.

    `coordinates` are the running programs' ids along the three axes of the grid. `effects` counts the stores and atomics so far.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.options = get("interpreter.interpreter_builder").options
        self.coordinates: Sequence[Any] = ()
        self.effects = 0
        self.memory = memory

    # programs

    def create_get_program_id(self, axis: int) -> Any:
        return Handle(self.coordinates[axis], tl.int32)

    # shapes

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        shape = tuple(ret_ty.shape)
        data = arg.data.reshape(arg.data.shape[0], *[1] * len(shape)).astype(np_dtype(arg.dtype), copy=False)
        return handle_of(data, arg.dtype.scalar, shape)

    def create_unsplat(self, arg: Any) -> Any:
        return handle_of(arg.data.reshape(arg.data.shape[0], -1)[:, 0].astype(np_dtype(arg.dtype), copy=False), arg.dtype.scalar)

    def create_broadcast(self, arg: Any, shape: Any) -> Any:
        return handle_of(arg.data, arg.dtype.scalar, tuple(shape))

    def create_expand_dims(self, arg: Any, axis: int) -> Any:
        shape = block_shape(arg)
        data = arg.data[(slice(None),) * (axis + 1) + (None,)]
        return handle_of(data, arg.dtype.scalar, (*shape[:axis], 1, *shape[axis:]))

    def create_reshape(self, arg: Any, shape: Any, allow_reorder: bool) -> Any:  # noqa: FBT001 - Triton's
        return handle_of(full(arg).reshape(arg.data.shape[0], *shape), arg.dtype.scalar)

    def create_trans(self, arg: Any, perm: Any) -> Any:
        shape = block_shape(arg)
        data = np.transpose(arg.data, (0, *[axis + 1 for axis in perm]))
        return handle_of(data, arg.dtype.scalar, tuple(shape[axis] for axis in perm))

    def create_make_range(self, ret_ty: Any, start: int, stop: int) -> Any:
        return Handle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_cat(self, lhs: Any, rhs: Any) -> Any:
        return self._joined(lhs, rhs, lambda parts: np.concatenate(parts, axis=1))

    def create_join(self, lhs: Any, rhs: Any) -> Any:
        return self._joined(lhs, rhs, lambda parts: np.stack(parts, axis=-1))

    def _joined(self, lhs: Any, rhs: Any, join: Callable[[list[Any]], Any]) -> Any:
        return Handle(join(_together(full(lhs), full(rhs))), _pointing(lhs.dtype.scalar, lhs, rhs))

    def create_split(self, val: Any) -> Any:
        data = full(val)
        return tuple(Handle(data[..., part], val.dtype.scalar) for part in (0, 1))

    def create_gather(self, src: Any, indices: Any, axis: int) -> Any:
        values, places = _together(full(src), full(indices))
        axis = axis % (values.ndim - 1) + 1
        return Handle(np.take_along_axis(values, places, axis=axis), src.dtype.scalar)

    def create_histogram(self, *_: Any) -> Any:
        raise Unbatchable("tl.histogram")

    # products

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right = Handle(full(a), a.dtype), Handle(full(b), b.dtype)
        result = super().create_dot(left, right, d, *options)
        self.memory.holds(result.data)
        return result

    # memory

    def create_load(self, ptr: Any, *options: Any) -> Any:
        return self._load(ptr, None, None)

    def create_store(self, ptr: Any, val: Any, *options: Any) -> None:
        self._store(ptr, val, None)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *options: Any) -> Any:
        return self._load(ptrs, mask.data, None if other is None else other.data)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *options: Any) -> None:
        self._store(ptrs, value, mask.data)

    def _load(self, pointers: Any, mask: Any, other: Any) -> Any:
        element = pointers.get_element_ty()
        return handle_of(self.memory.load(pointers, mask, other, np_dtype(element)), element, block_shape(pointers))

    def _store(self, pointers: Any, value: Any, mask: Any) -> None:
        self.effects += 1
        self.memory.store(pointers, value.data, mask, block_shape(pointers))

    def create_atomic_rmw(self, rmw: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        self.effects += 1
        programs = len(self.memory.programs)
        shape = (programs, *block_shape(ptr))
        parts = [handle_of(np.ascontiguousarray(np.broadcast_to(part.data, shape)), part.dtype) for part in (ptr, val, mask)]
        self.memory.update(parts[0], parts[2].data, np_dtype(ptr.get_element_ty()))

        def apply(places: Any, values: Any) -> Any:
            """Update places one after another."""
            every = Handle(np.ones(places.shape, dtype=bool), tl.int1)
            pointers = Handle(places, ptr.dtype)
            return super(GridBuilder, self).create_atomic_rmw(rmw, pointers, Handle(values, val.dtype), every, sem, scope)

        if self.memory.together == 1:
            return super().create_atomic_rmw(rmw, *parts, sem, scope)
        pointers, values, mask = (part.data for part in parts)
        owners = np.broadcast_to(self.memory.programs.reshape(-1, *[1] * (mask.ndim - 1)), shape)
        self.memory.queue(rmw, apply, pointers[mask], values[mask], owners[mask])
        return Ordered(val.dtype.scalar)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        raise Unbatchable("tl.atomic_cas")

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        width = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        steps = offset.data.astype(np.int64, copy=False) * width
        return handle_of(ptr.data + steps.view(np.uint64), ptr.dtype, block_shape(ptr))

    # block pointers

    def create_make_block_ptr(self, base: Any, shape: Any, strides: Any, offsets: Any, block: Any, order: Any) -> Any:
        return BlockPointer(base, shape, strides, list(offsets), block, order)

    def create_advance(self, ptr: Any, offsets: Any) -> Any:
        moved = [
            Handle((old.data + by.data).astype(old.data.dtype, copy=False), old.dtype)
            for old, by in zip(ptr.offsets, offsets, strict=True)
        ]
        return BlockPointer(ptr.base, ptr.shape, ptr.strides, moved, ptr.block_shape, ptr.order)

    def create_tensor_pointer_load(self, ptr: Any, boundary_check: Any, padding: Any, *options: Any) -> Any:
        pointers, mask = ptr.materialize_pointers(boundary_check)
        element = pointers.get_element_ty()
        nan = pads_with_nan(padding)
        if nan is None:
            raise Unbatchable(f"padding option {padding}")
        other = np.full((1, *[1] * len(ptr.block_shape)), float("nan"), dtype=np_dtype(element)) if nan else None
        return self._load(pointers, mask, other)

    def create_tensor_pointer_store(self, ptr: Any, value: Any, boundary_check: Any, *options: Any) -> None:
        pointers, mask = ptr.materialize_pointers(boundary_check)
        self._store(pointers, value, mask)

    def create_make_tensor_descriptor(self, *_: Any) -> Any:
        raise Unbatchable("tl.make_tensor_descriptor")

    def create_descriptor_load(self, *_: Any, **__: Any) -> Any:
        raise Unbatchable("a tensor descriptor")

    create_descriptor_store = create_descriptor_gather = create_descriptor_scatter = create_descriptor_load

    def create_print(self, *_: Any) -> None:
        raise Unbatchable("tl.device_print")

    def create_dot_scaled(self, *_: Any) -> Any:
        raise Unbatchable("tl.dot_scaled")

    def create_atomic_poll(self, *_: Any) -> Any:
        raise Unbatchable("an atomic load, store or wait")

    create_atomic_load = create_atomic_store = create_atomic_poll


class BlockPointer:
    """A block pointer for each program. Base, shape, strides and offsets are handles of scalars."""

    def __init__(self, base: Any, shape: Any, strides: Any, offsets: list[Any], block_shape: Any, order: Any) -> None:
        self.base, self.shape, self.strides, self.offsets = base, shape, strides, offsets
        self.block_shape, self.order = block_shape, order

    def scalars(self) -> list[Any]:
        """Base, shape, strides and offsets in one list."""
        return [self.base, *self.shape, *self.strides, *self.offsets]

    def replaced(self, scalars: Sequence[Any]) -> "BlockPointer":
        """The block pointer with another base, shape, strides and offsets, given in one list."""
        axes = len(self.block_shape)
        shape, strides, offsets = (list(scalars[1 + axes * part : 1 + axes * (part + 1)]) for part in range(3))
        return BlockPointer(scalars[0], shape, strides, offsets, self.block_shape, self.order)

    def materialize_pointers(self, boundary_check: Any) -> tuple[Any, Any]:
        """The pointers [programs, block], and the mask of those inside the checked dimensions, or None."""
        count = len(self.block_shape)
        size = max(1, self.base.get_element_ty().primitive_bitwidth // 8)
        along = [[1] * axis + [-1] + [1] * (count - 1 - axis) for axis in range(count)]
        scalar = [1] * count
        pointers, mask = self.base.data.reshape(-1, *scalar), None
        for axis, length in enumerate(self.block_shape):
            steps = np.arange(length).reshape(1, *along[axis])
            offset = self.offsets[axis].data.reshape(-1, *scalar) + steps
            pointers = pointers + (size * offset * self.strides[axis].data.reshape(-1, *scalar)).astype(np.uint64)
            if axis in boundary_check:
                inside = (offset < self.shape[axis].data.reshape(-1, *scalar)) & (offset >= 0)
                mask = inside if mask is None else mask & inside
        return handle_of(pointers, self.base.dtype.scalar, tuple(self.block_shape)), mask


class Ordered:
    """The result of an atomic, or a value computed from one. It depends on the order of programs: reading it raises Unbatchable."""

    shape = None

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    @property
    def data(self) -> Any:
        raise Unbatchable("the value that an atomic returns")


def _together(*parts: Any) -> list[Any]:
    """The arrays, broadcast to one length of the axis of programs."""
    count = max(len(part) for part in parts)
    return [np.broadcast_to(part, (count, *part.shape[1:])) for part in parts]


def _pointing(dtype: Any, *sources: Any) -> Any:
    """The type of pointers that may come from any of `sources`; other types are returned unchanged."""
    return pointing(dtype, *sources) if dtype.is_ptr() else dtype


def _elementwise(name: str) -> Callable[..., Any]:
    plain = get(f"InterpreterBuilder.{name}")

    def call(self: Any, *arguments: Any) -> Any:
        if self.effects and any(isinstance(argument, Ordered) for argument in arguments):
            return Ordered(arguments[-1].dtype if hasattr(arguments[-1], "dtype") else arguments[-1].scalar)
        result = plain(self, *arguments)
        if arguments[0].dtype.is_ptr() and not result.dtype.is_ptr():
            self.memory.by_address = True
        self.memory.holds(result.data)
        shape = block_shape(arguments[0])
        if result.data.shape[1:] != shape:
            result.shape = shape
        return result

    return call


# The elementwise operations. Numpy broadcasts their data when it must; only the block's shape is set here.
_ELEMENTWISE = (
    "binary_op", "unary_op", "ternary_op", "cast_impl", "create_fp_to_fp", "create_bitcast", "create_idiv", "create_ashr",
    "create_umulhi", "create_select", "create_fma", "create_fabs", "create_erf", "create_rsqrt", "create_ptr_to_int",
    "create_int_to_ptr",
)  # fmt: skip
for _name in _ELEMENTWISE:
    setattr(GridBuilder, _name, _elementwise(_name))


# reductions

# How to widen and narrow the data of types whose arithmetic in numpy does not round as on a device.
_WIDENED = tree_levels()
# If several elements are the largest, the index is that of the first.
_EXTREMES: dict[Any, tuple[Any, Any]] = {
    combines("_elementwise_max"): (np.fmax.reduce, None),
    combines("_elementwise_min"): (np.fmin.reduce, None),
    combines("_argmax_combine_tie_break_left"): (np.max, np.argmax),
    combines("_argmin_combine_tie_break_left"): (np.min, np.argmin),
}
if skips_nan():
    for _ties in ("left", "fast"):
        _EXTREMES[combines(f"_argmax_combine_tie_break_{_ties}")] = np.fmax.reduce, np.nanargmax
        _EXTREMES[combines(f"_argmin_combine_tie_break_{_ties}")] = np.fmin.reduce, np.nanargmin
_SUM, _PRODUCT = combines("_sum_combine"), combines("_prod_combine")


def reduced(values: tuple[Any, ...], axis: int | None, combine: Any, *, keep_dims: bool) -> tuple[Any, ...]:
    """`tl.reduce` of tensors along an axis of the block, or of all elements."""
    shape = block_shape(values[0].handle)
    if axis is None:
        arrays = [full(value.handle).reshape(len(value.handle.data), -1) for value in values]
        at, left = 1, (1,) * len(shape) if keep_dims else ()
    else:
        arrays = [full(value.handle) for value in values]
        at = axis % len(shape) + 1
        left = (*shape[: at - 1], *([1] if keep_dims else []), *shape[at:])
    kinds = [value.dtype for value in values]
    if combine == _SUM:
        results = [_sum(arrays[0], at, kinds[0])]
    elif combine in _EXTREMES:
        best, where = _EXTREMES[combine]
        widen, narrow = _WIDENED.get(kinds[0], (np.asarray, np.asarray))
        data = widen(arrays[0])
        results = [narrow(best(data, axis=at))]
        if where is not None:
            results, kinds = [*results, where(data, axis=at)], [kinds[0], tl.int32]
    else:
        results = _folded(arrays, at, kinds, combine)
    return tuple(_tensor(data.reshape(len(data), *left), kind) for data, kind in zip(results, kinds, strict=False))


def _sum(data: Any, at: int, kind: Any) -> Any:
    widening = _WIDENED.get(kind)
    if widening is None:
        return np.sum(np.ascontiguousarray(data), axis=at)  # as when programs run one after another
    widen, narrow = widening
    data = np.moveaxis(data, at, 0)
    while (half := len(data) // 2) > 0:
        pairs = narrow(widen(data[:half]) + widen(data[half : 2 * half]))
        data = np.concatenate([pairs, data[2 * half :]])
    return data[0]


def _folded(arrays: list[Any], at: int, kinds: list[Any], combine: Any) -> list[Any]:
    """Combine the elements along an axis one after another, with any function."""
    slices = [np.moveaxis(data, at, 0) for data in _together(*arrays)]
    so_far = [part[0] for part in slices]
    for i in range(1, len(slices[0])):
        so_far = _combined(combine, so_far, [part[i] for part in slices], kinds)
    return so_far


def _combined(combine: Any, left: list[Any], right: list[Any], kinds: list[Any]) -> list[Any]:
    # The function combines scalars, so every element is treated as a program.
    scalars = [_tensor(data.reshape(-1), kind) for data, kind in zip((*left, *right), (*kinds, *kinds), strict=True)]
    try:
        results = combine.fn(*scalars)
    except Diverges:
        raise Unbatchable("a reduction whose function decides") from None
    results = results if isinstance(results, (tuple, tl.tuple)) else (results,)
    combined = []
    for result, first, kind in zip(results, left, kinds, strict=True):
        value = SEMANTIC.to_tensor(result).handle.data
        combined.append(np.broadcast_to(value, first.size).reshape(first.shape).astype(np_dtype(kind), copy=False))
    return combined


def scanned(values: tuple[Any, ...], axis: int, combine: Any, *, reverse: bool) -> tuple[Any, ...]:
    """`tl.associative_scan` of tensors along an axis of the block."""
    arrays = [full(value.handle) for value in values]
    at = axis % (arrays[0].ndim - 1) + 1
    arrays = [np.flip(data, axis=at) for data in arrays] if reverse else arrays
    kinds = [value.dtype for value in values]
    op = {_SUM: np.add, _PRODUCT: np.multiply}.get(combine)
    if op is None:
        slices = [np.moveaxis(data, at, 0) for data in _together(*arrays)]
        so_far: list[list[Any]] = []
        for i in range(len(slices[0])):
            here = [part[i] for part in slices]
            so_far.append(_combined(combine, so_far[-1], here, kinds) if so_far else here)
        results = [np.stack(parts, axis=at) for parts in zip(*so_far, strict=True)]
    else:
        results = [_prefixes(op, arrays[0], at, kinds[0])]
    results = [np.flip(data, axis=at) for data in results] if reverse else results
    return tuple(_tensor(data, kind) for data, kind in zip(results, kinds, strict=False))


def _prefixes(op: Any, data: Any, at: int, kind: Any) -> Any:
    widening = _WIDENED.get(kind)
    if widening is None:
        return (np.cumsum if op is np.add else np.cumprod)(data, axis=at)
    widen, narrow = widening
    data = np.moveaxis(data, at, 0).copy()
    step = 1
    while step < len(data):
        data[step:] = narrow(op(widen(data[:-step]), widen(data[step:])))
        step *= 2
    return np.moveaxis(data, 0, at)


def _tensor(data: Any, kind: Any) -> Any:
    shape = data.shape[1:]
    data = data.astype(np_dtype(kind), copy=False)
    return tl.tensor(Handle(data, kind.scalar), tl.block_type(kind, list(shape)) if shape else kind)


def transposed(tensor: Any) -> Any:
    """`tensor.T`."""
    shape = list(tensor.type.shape)
    if len(shape) != 2:
        raise Unbatchable(f".T of a block of {len(shape)} axes")
    handle = handle_of(tensor.handle.data.swapaxes(1, 2), tensor.handle.dtype, (shape[1], shape[0]))
    return tl.tensor(handle, tl.block_type(tensor.dtype, shape[::-1]))


def truth(tensor: Any) -> bool:
    """`bool(tensor)`. A block with several elements is always True, as in Triton's interpreter. Diverges if programs disagree."""
    if tensor.type.is_block() and math.prod(tensor.type.shape) != 1:
        return True
    return bool(agreed(tensor.handle.data != 0))


def number(tensor: Any) -> int:
    """`int(tensor)` and `range(tensor)`."""
    return int(agreed(tensor.handle.data))
