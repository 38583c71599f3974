"""Patches of Triton's interpreter: numbers are computed and rounded as on a device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from verify.interpreter.internals import get, propagates_nan, put


def patch_arithmetic() -> None:
    """Compute with bfloat16 and float16 as a device does: in float32, and rounded once."""
    import triton.language as tl

    handle, bf16 = get("interpreter.TensorHandle"), tl.bfloat16
    plain = {name: get(f"InterpreterBuilder.{name}") for name in ("binary_op", "unary_op", "create_fma", "create_dot", "cast_impl")}

    interpreter_dtype = get("interpreter._get_np_dtype")

    def to_float32(value: Any) -> Any:
        return widen(value.data) if value.dtype.scalar == bf16 else value.data.astype(np.float32, copy=False)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar == bf16:
            data = op(widen(lhs.data), widen(rhs.data))
            return handle(data, tl.int1) if data.dtype == np.bool_ else handle(narrow(data), bf16)
        if lhs.data.dtype == rhs.data.dtype == np.bool_:
            # A device adds and subtracts one bit. numpy's sum of two True is True.
            return handle((op(lhs.data.astype(np.int8), rhs.data.astype(np.int8)) & 1).astype(np.bool_), tl.int1)
        result = plain["binary_op"](self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            # Triton labels a comparison with the type of its operands. With that type it would be no mask after a splat.
            result.dtype = tl.int1
        return result

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar == bf16:
            return handle(narrow(op(widen(arg.data))), bf16)
        return plain["unary_op"](self, arg, op)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        kind = z.dtype.scalar
        if kind not in (bf16, tl.float16, tl.float32):
            return plain["create_fma"](self, x, y, z)
        data = fused(*(to_float32(value).astype(np.float64) for value in (x, y, z)))
        return handle(narrow(to_odd_float32(data)) if kind == bf16 else data.astype(interpreter_dtype(kind)), kind)

    def create_clampf(self: Any, value: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        if propagates_nan(propagate_nans):
            return self.ternary_op(value, low, high, np.clip)
        return self.binary_op(self.binary_op(value, low, np.fmax), high, np.fmin)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        # numpy multiplies a transposed view, and a block with its own transpose, by other algorithms with other last bits.
        a, b = (handle(np.ascontiguousarray(x.data), x.dtype) for x in (a, b))
        if a.dtype.scalar not in (bf16, tl.float16):
            return plain["create_dot"](self, a, b, d, *options)
        # Products of 16-bit floats are exact in float32, and tensor cores add them in float32.
        data = np.matmul(to_float32(a), to_float32(b)) + d.data
        return handle(data.astype(d.data.dtype, copy=False), d.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source != bf16 and target != bf16:
            return plain["cast_impl"](self, src, dst_type)
        data = to_float32(src)
        return handle(narrow(data) if target == bf16 else data.astype(interpreter_dtype(target)), target)

    for patch in (binary_op, unary_op, create_fma, create_clampf, create_dot, cast_impl):
        put(f"InterpreterBuilder.{patch.__name__}", patch)
    put("InterpreterBuilder.get_bf16", lambda self, value: handle(narrow([value]), bf16))
    # By default, tl.minimum and tl.maximum return the number if the other operand is NaN.
    put("InterpreterBuilder.create_minnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin))
    put("InterpreterBuilder.create_maxnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax))
    # Each overflow check repeats integer arithmetic in 64 bits, and without debug its result is not used.
    builder = get("interpreter.interpreter_builder")
    options = builder.options
    precisions = dict.fromkeys((*options.allowed_dot_input_precisions, "bf16x3", "bf16x6"))
    builder.options = dataclasses.replace(options, allowed_dot_input_precisions=tuple(precisions), sanitize_overflow=False)


def tree_levels() -> dict[Any, Any]:
    """How to widen and narrow types that a device combines in pairs, in the type itself: every level of the tree rounds."""
    import triton.language as tl

    return {tl.bfloat16: (widen, narrow), tl.float16: (np.asarray, np.asarray)}


def patch_reductions() -> None:
    """Reduce and scan in the order of a device, whose combining tree rounds at every level."""
    import triton.language as tl

    plain_sum, plain_min_max = get("ReduceOps.sum"), get("ReduceOps.min_max")
    levels, handle = tree_levels(), get("interpreter.TensorHandle")

    def tree_sum(self: Any, value: Any) -> Any:
        if value.dtype not in levels:
            # numpy adds in memory order, which differs for transposed blocks.
            value.handle.data = np.ascontiguousarray(value.handle.data)
            return plain_sum(self, value)
        widen, narrow = levels[value.dtype]
        data, axis = value.handle.data, self.axis
        shape = [1 if axis is None or i == axis % data.ndim else size for i, size in enumerate(data.shape)]
        data = data.ravel() if axis is None else np.moveaxis(data, axis, 0)
        while (half := len(data) // 2) > 0:
            pairs = narrow(widen(data[:half]) + widen(data[half : 2 * half]))
            data = np.concatenate([pairs, data[2 * half :]])
        return self.to_tensor(data[0].reshape(shape) if self.keep_dims else data[0], value.dtype)

    def tree_scan(plain: Callable[[Any, Any], Any], op: Any) -> Callable[[Any, Any], Any]:
        def prefixes(self: Any, value: Any) -> Any:
            if value.dtype not in levels:
                return plain(self, value)
            widen, narrow = levels[value.dtype]
            data = np.moveaxis(value.handle.data, self.axis, 0).copy()
            step = 1
            while step < len(data):
                data[step:] = narrow(op(widen(data[:-step]), widen(data[step:])))
                step *= 2
            return [self.to_tensor(np.moveaxis(data, 0, self.axis), value.dtype)]

        return prefixes

    def min_max(self: Any, value: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        # np.fmax and np.fmin give the same numbers, but no warning for a row of NaN; a device gives none either.
        quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
        found = plain_min_max(self, ordered(value), quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)
        if value.dtype != tl.bfloat16 or not val_reduce_op:
            return found
        best = found[0] if isinstance(found, tuple) else found
        narrowed = self.to_tensor(narrow(best.handle.data).reshape([int(dim) for dim in best.shape]), tl.bfloat16)
        return (narrowed, *found[1:]) if isinstance(found, tuple) else narrowed

    def ordered(value: Any) -> Any:
        """The value in a form that numpy can compare: bfloat16, kept as bit patterns, becomes float32."""
        if value.dtype != tl.bfloat16:
            return value
        kind = tl.block_type(tl.float32, value.type.shape) if value.type.is_block() else tl.float32
        return tl.tensor(handle(widen(value.handle.data), tl.float32), kind)

    put("ReduceOps.sum", tree_sum)
    put("ReduceOps.min_max", min_max)
    for name, op in (("cumsum", np.add), ("cumprod", np.multiply)):
        put(f"ScanOps.{name}", tree_scan(get(f"ScanOps.{name}"), op))


def widen(bits: Any) -> Any:
    """The float32 values of bfloat16 bit patterns."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: Any) -> Any:
    """The bfloat16 bit patterns nearest to `values`, ties to even; NaN stays NaN."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


def fused(x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32 numbers, given in float64, so that it rounds once when it is rounded to float32 or a narrower type."""
    product = x * y  # exact
    total = product + z
    part = total - product
    return _to_odd(total, (product - (total - part)) + (z - part))


def to_odd_float32(values: Any) -> Any:
    """Numbers of `fused` in float32, so that they round once when they are rounded to a narrower type."""
    rounded = values.astype(np.float32)
    return _to_odd(rounded, values - rounded)


def _to_odd(rounded: Any, errors: Any) -> Any:
    """Give each number that was rounded an odd last bit: that of its neighbour on the side of the error, if its own is even.

    An odd number is never half way between two numbers of a format with at least two bits fewer, so a second rounding goes to the
    same side as a single one.
    """
    bits = rounded.view(f"i{rounded.itemsize}")
    outwards = (errors > 0) != np.signbit(rounded)
    moved = np.where(outwards, bits + 1, bits - 1)
    return np.where((errors != 0) & (bits % 2 == 0) & np.isfinite(rounded), moved, bits).view(rounded.dtype)
