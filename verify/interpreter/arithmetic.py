"""Patches of Triton's interpreter: numbers are computed and rounded as on a device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


def patch_arithmetic(interpreter: Any, tl: Any) -> None:
    """Compute with bfloat16 and float16 as a device does: in float32, and rounded once."""
    builder, handle, bf16 = interpreter.InterpreterBuilder, interpreter.TensorHandle, tl.bfloat16
    plain = {name: getattr(builder, name) for name in ("binary_op", "unary_op", "create_fma", "create_dot", "cast_impl")}

    def to_float32(value: Any) -> Any:
        return widen(value.data) if value.dtype.scalar == bf16 else value.data.astype(np.float32, copy=False)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar == bf16:
            data = op(widen(lhs.data), widen(rhs.data))
            return handle(data, tl.int1) if data.dtype == np.bool_ else handle(narrow(data), bf16)
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
        if z.dtype.scalar not in (bf16, tl.float16):
            return plain["create_fma"](self, x, y, z)
        data = to_float32(x) * to_float32(y) + to_float32(z)
        return handle(narrow(data) if z.dtype.scalar == bf16 else data.astype(np.float16), z.dtype.scalar)

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
        return handle(narrow(data) if target == bf16 else data.astype(interpreter._get_np_dtype(target)), target)

    for patch in (binary_op, unary_op, create_fma, create_dot, cast_impl):
        setattr(builder, patch.__name__, patch)
    builder.get_bf16 = lambda self, value: handle(narrow([value]), bf16)
    # By default, tl.minimum and tl.maximum return the number if the other operand is NaN.
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    # Each overflow check repeats integer arithmetic in 64 bits, and without debug its result is not used.
    options = interpreter.interpreter_builder.options
    precisions = dict.fromkeys((*options.allowed_dot_input_precisions, "bf16x3", "bf16x6"))
    interpreter.interpreter_builder.options = dataclasses.replace(
        options, allowed_dot_input_precisions=tuple(precisions), sanitize_overflow=False
    )


def patch_reductions(interpreter: Any, tl: Any) -> None:
    """Reduce and scan in the order of a device, whose combining tree rounds at every level."""
    reduce, scan = interpreter.ReduceOps, interpreter.ScanOps
    plain_sum, plain_min_max = reduce.sum, reduce.min_max
    # A device combines pairs in the tensor's type, so every level of the reduction tree rounds.
    levels: dict[Any, Any] = {tl.bfloat16: (widen, narrow), tl.float16: (np.asarray, np.asarray)}
    reduce.levels = levels

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
        return tl.tensor(interpreter.TensorHandle(widen(value.handle.data), tl.float32), kind)

    reduce.sum, reduce.min_max = tree_sum, min_max
    scan.cumsum, scan.cumprod = tree_scan(scan.cumsum, np.add), tree_scan(scan.cumprod, np.multiply)


def widen(bits: Any) -> Any:
    """The float32 values of bfloat16 bit patterns."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: Any) -> Any:
    """The bfloat16 bit patterns nearest to `values`, ties to even; NaN stays NaN."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)
