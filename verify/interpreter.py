"""Triton's CPU interpreter, made right enough to run Gated DeltaNet kernels without a GPU."""

import ast
import contextlib
import dataclasses
import inspect
import math
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def install() -> None:
    """The process interprets every Triton kernel, with the arithmetic of the device.

    Call it in a worker process before anything imports triton. Raises RuntimeError where triton is already
    imported for compilation. A second call changes nothing.
    """
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    if not isinstance(tl.standard._sum_combine, interpreter.InterpretedFunction):
        raise RuntimeError("install() must run before the first import of triton, which already compiles here")  # noqa: TRY004
    os.environ["TRITON_INTERPRET"] = "1"
    if interpreter._patch_lang.__module__ == __name__:
        return
    _patch_language(interpreter, tl)
    _patch_types(interpreter, tl)
    _patch_launch(interpreter, tl)
    _patch_arithmetic(interpreter, tl)
    _patch_reductions(interpreter, tl)
    # torch has no device guard for the CPU, and kernels' wrappers enter one around each launch.
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = contextlib.nullcontext  # type: ignore[attr-defined]


def _widen(bits: Any) -> Any:
    """bfloat16 bit patterns as the float32 values they stand for."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def _narrow(values: Any) -> Any:
    """The bfloat16 bit patterns nearest to `values`, ties to even; NaN stays NaN."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


def _patch_language(interpreter: Any, tl: Any) -> None:
    # The interpreter rebinds every builtin of the language at each launch and at each call of a device function.
    # Nothing compiles in this process, so one permanent rebinding serves them all.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    bound: dict[int, dict[str, Any]] = {}

    def patch_lang(fn: Any) -> Any:
        """Builtins that the kernel's module holds under names of its own are bound too."""
        names = fn.__globals__
        if id(names) not in bound:
            bound[id(names)] = names
            aliases = [name for name, value in names.items() if tl.core.is_builtin(value)]
            names.update({name: _bind(names[name], interpreter.interpreter_semantic) for name in aliases})
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang

    def visit_for(self: Any, node: ast.For) -> ast.For:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and "static_range" not in ast.unparse(node.iter):
            name = node.target.id
            node.body[:0] = ast.parse(f"{name} = interpreter_semantic.to_tensor({name}, False)").body
        return node

    # Compiled loop variables are tensors, and kernels call `.to` on them; those of static_range are constants.
    interpreter.ASTTransformer.visit_For = visit_for


def _patch_types(interpreter: Any, tl: Any) -> None:
    """Every value builds its block type, and its shape as a tuple of constants; a kernel uses a few dozen of them."""
    constexpr, np_dtype, block_init = tl.constexpr, interpreter._get_np_dtype, tl.block_type.__init__
    plain_broadcast = interpreter.TritonSemantic.broadcast_impl_value
    np_dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def get_np_dtype(tl_type: Any) -> Any:
        name = tl_type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(tl_type)
        return np_dtypes[name]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([dim.value if isinstance(dim, constexpr) else dim for dim in shape])
        if key not in blocks:
            block_init(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = blocks[key]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            shapes[key] = constexpr(math.prod(key)), tl.tuple([constexpr(dim) for dim in key])
        self.numel, self.shape = shapes[key]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return plain_broadcast(self, lhs, rhs)

    interpreter._get_np_dtype = get_np_dtype
    interpreter.TritonSemantic.broadcast_impl_value = broadcast
    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor


def _bind(builtin: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return builtin(*args, **kwargs)

    return call


def _patch_launch(interpreter: Any, tl: Any) -> None:
    from triton.runtime.autotuner import Autotuner

    # There is no device to time, so that every configuration ties and the first one that survives pruning wins.
    Autotuner._bench = lambda self, *args, config, **meta: [0.0]

    convert, run = interpreter._implicit_cvt, interpreter.InterpretedFunction.run

    def implicit_cvt(arg: Any) -> Any:
        # A compiled kernel takes a float argument as a float32 scalar. As a Python number it would take the type
        # of the tensor it meets: `scale` times bfloat16 would be rounded twice.
        if isinstance(arg, float):
            return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        if isinstance(arg, bool):
            return tl.tensor(interpreter.TensorHandle(np.array([arg]), tl.int1), tl.int1)
        return convert(arg)

    interpreter._implicit_cvt = implicit_cvt

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if callable(grid) and not warmup:
            # The compiler's launcher hands the caller's own tensors and numbers to the grid.
            known = {name: value for name, value in kwargs.items() if name in self.arg_names}
            grid = grid(inspect.getcallargs(self.fn, *args, **known))
        # Lanes that a mask drops overflow and divide by zero, as they do on a device.
        with np.errstate(all="ignore"):
            run(self, *args, grid=grid if warmup else tuple(grid), warmup=warmup, **kwargs)

    interpreter.InterpretedFunction.run = launch


def _patch_arithmetic(interpreter: Any, tl: Any) -> None:
    builder, handle, bf16 = interpreter.InterpreterBuilder, interpreter.TensorHandle, tl.bfloat16
    plain = {name: getattr(builder, name) for name in ("binary_op", "unary_op", "create_fma", "create_dot", "cast_impl")}

    def to_float32(value: Any) -> Any:
        return _widen(value.data) if value.dtype.scalar == bf16 else value.data.astype(np.float32, copy=False)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar == bf16:
            data = op(_widen(lhs.data), _widen(rhs.data))
            return handle(data, tl.int1) if data.dtype == np.bool_ else handle(_narrow(data), bf16)
        result = plain["binary_op"](self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            # A comparison is labelled with the type of its operands, and is no mask when it is splatted.
            result.dtype = tl.int1
        return result

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar == bf16:
            return handle(_narrow(op(_widen(arg.data))), bf16)
        return plain["unary_op"](self, arg, op)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar not in (bf16, tl.float16):
            return plain["create_fma"](self, x, y, z)
        data = to_float32(x) * to_float32(y) + to_float32(z)
        return handle(_narrow(data) if z.dtype.scalar == bf16 else data.astype(np.float16), z.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar not in (bf16, tl.float16):
            return plain["create_dot"](self, a, b, d, *options)
        # Products of 16-bit floats are exact in float32, where the tensor cores add them.
        data = np.matmul(to_float32(a), to_float32(b)) + d.data
        return handle(data.astype(d.data.dtype, copy=False), d.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source != bf16 and target != bf16:
            return plain["cast_impl"](self, src, dst_type)
        data = to_float32(src)
        return handle(_narrow(data) if target == bf16 else data.astype(interpreter._get_np_dtype(target)), target)

    for patch in (binary_op, unary_op, create_fma, create_dot, cast_impl):
        setattr(builder, patch.__name__, patch)
    builder.get_bf16 = lambda self, value: handle(_narrow([value]), bf16)
    # The default of tl.minimum and tl.maximum returns the number where the other operand is NaN.
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    # Without debug nobody reads the overflow checks, each of which repeats integer arithmetic in 64 bits.
    options = interpreter.interpreter_builder.options
    precisions = dict.fromkeys((*options.allowed_dot_input_precisions, "bf16x3", "bf16x6"))
    interpreter.interpreter_builder.options = dataclasses.replace(
        options, allowed_dot_input_precisions=tuple(precisions), sanitize_overflow=False
    )


def _patch_reductions(interpreter: Any, tl: Any) -> None:
    reduce, scan = interpreter.ReduceOps, interpreter.ScanOps
    plain_sum, plain_min_max = reduce.sum, reduce.min_max
    # A device combines pairs in the type of the tensor, so that each level of the tree rounds.
    levels: dict[Any, Any] = {tl.bfloat16: (_widen, _narrow), tl.float16: (np.asarray, np.asarray)}

    def tree_sum(self: Any, value: Any) -> Any:
        if value.dtype not in levels:
            return plain_sum(self, value)
        widen, narrow = levels[value.dtype]
        data, axis = value.handle.data, self.axis
        kept = [1 if axis is None or i == axis % data.ndim else size for i, size in enumerate(data.shape)]
        data = data.ravel() if axis is None else np.moveaxis(data, axis, 0)
        while (half := len(data) // 2) > 0:
            pairs = narrow(widen(data[:half]) + widen(data[half : 2 * half]))
            data = np.concatenate([pairs, data[2 * half :]])
        return self.to_tensor(data[0].reshape(kept) if self.keep_dims else data[0], value.dtype)

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
        # The same numbers without a warning for a row of NaN, which a device does not give.
        quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
        return plain_min_max(self, value, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    reduce.sum, reduce.min_max = tree_sum, min_max
    scan.cumsum, scan.cumprod = tree_scan(scan.cumsum, np.add), tree_scan(scan.cumprod, np.multiply)
