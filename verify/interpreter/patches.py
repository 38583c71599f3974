"""Corrections of Triton's CPU interpreter, so that it computes as a GPU does."""

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

from verify.interpreter.memory import OutOfBounds, pointing, span_of, tensors_of

# Wrappers split work among the multiprocessors that the driver reports, and assume one without a driver. With one, the code for
# the second and later parts would never run. With four, parts begin inside blocks of others, as on a device.
MULTIPROCESSORS = 4


SEQUENTIAL = "GDN_VERIFY_INTERPRETER"  # an environment variable; "sequential" makes programs run one after another
TRITONS = ("3.7.1", "3.9.0")  # the versions with which all tests of the interpreter have passed


class UnknownTriton(Exception):
    """A kernel cannot be interpreted: not with the installed version of Triton, or not at all."""


def patch() -> bool:
    """Patch Triton's interpreter so that it computes as a GPU does.

    Returns True if this call patched it, False if it was patched before or the version of Triton is unknown. RuntimeError if Triton
    is already imported for compilation.
    """
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not isinstance(tl.standard._sum_combine, interpreter.InterpretedFunction):
        raise RuntimeError("install() must run before the first import of triton, which already compiles here")  # noqa: TRY004
    os.environ["TRITON_INTERPRET"] = "1"
    if interpreter._patch_lang.__module__ == __name__:
        return False
    # Some versions of torch have no device guard for the CPU, but kernels' wrappers enter one around each launch.
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = contextlib.nullcontext  # type: ignore[attr-defined]
    if triton.__version__ not in TRITONS:
        interpreter.InterpretedFunction.run = _refuse
        triton.runtime.driver.set_active(_RefusingDriver())
        return False
    _patch_language(interpreter, tl)
    _patch_types(interpreter, tl)
    _patch_operands(interpreter, tl)
    _patch_launch(interpreter, tl)
    _patch_access(interpreter)
    _patch_arithmetic(interpreter, tl)
    _patch_reductions(interpreter, tl)
    _patch_driver()
    return True


def _refuse(*_: Any, **__: Any) -> None:
    installed = sys.modules["triton"].__version__
    raise UnknownTriton(f"Triton {installed} is installed, and kernels are interpreted with {' or '.join(TRITONS)} only")


class _RefusingDriver:
    """A Triton driver for unknown versions. It refuses too, because wrappers look at the device before they launch."""

    def __getattr__(self, name: str) -> Any:
        _refuse()


def _widen(bits: Any) -> Any:
    """The float32 values of bfloat16 bit patterns."""
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
    interpreter._patch_attr = lambda owner, name, member, builder, scope: scope.set_attr(
        owner, name, _bind(inspect.unwrap(member), interpreter.interpreter_semantic)
    )
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    bound: dict[int, dict[str, Any]] = {}

    def patch_lang(fn: Any) -> Any:
        """Bind also the builtins that the kernel's module holds under other names."""
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

    def visit_call(self: Any, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) == 2:
            node.args = [node.func, *node.args]
            node.func = ast.copy_location(ast.Name("_gdn_extreme", ast.Load()), node.func)
        return node

    def extreme(function: Any, *arguments: Any) -> Any:
        """Call Triton's minimum or maximum in place of Python's min or max if an argument is a tensor, as the compiler does."""
        plain = {min: tl.minimum, max: tl.maximum}.get(function, function)
        return (plain if any(isinstance(argument, tl.tensor) for argument in arguments) else function)(*arguments)

    interpreter.ASTTransformer.visit_Call = visit_call
    interpreter._gdn_extreme = extreme  # the globals of this module are those of every interpreted function


def _patch_types(interpreter: Any, tl: Any) -> None:
    """Cache block types and shapes. Triton builds them anew for every value, but a kernel has only a few dozen different ones."""
    constexpr, np_dtype, block_init = tl.constexpr, interpreter._get_np_dtype, tl.block_type.__init__
    dtype, block_type, tensor, semantic = tl.dtype, tl.block_type, tl.tensor, interpreter.TritonSemantic
    plain_broadcast, plain_handle = semantic.broadcast_impl_value, interpreter.TensorHandle.__post_init__
    np_dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    scalar = constexpr(1), tl.tuple([])
    common: dict[tuple[int, int], tuple[Any, ...]] = {}

    def get_np_dtype(tl_type: Any) -> Any:
        name = tl_type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(tl_type)
        return np_dtypes[name]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([dim.value if isinstance(dim, constexpr) else dim for dim in shape])
        if key not in blocks:
            block_init(self, element_ty, shape)
            constants = constexpr(math.prod(key)), tl.tuple([constexpr(dim) for dim in key])
            blocks[key] = self.shape, self.numel, str(self.shape), constants
        self.element_ty = element_ty
        self.shape, self.numel, text, self.constants = blocks[key]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.constants if isinstance(type, block_type) else scalar

    def init_handle(self: Any) -> None:
        if self.data.itemsize * 8 != getattr(self.dtype, "primitive_bitwidth", 0):  # else the data fit their type
            plain_handle(self)

    scalars = (dtype, tl.pointer_type)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if type(left) is block_type and type(right) is block_type:
            if left.shape is right.shape:
                return lhs, rhs
            key = id(left.shape), id(right.shape)  # of objects that are kept
            if key not in common:
                wide, other = plain_broadcast(self, lhs, rhs)
                if len(left.shape) == len(right.shape):
                    common[key] = wide.type.shape, wide is not lhs, other is not rhs, left.shape, right.shape
                return wide, other
            shape, widens, others = common[key][:3]
            if widens:
                lhs = tensor(self.builder.create_broadcast(lhs.handle, shape), block_type(left.element_ty, shape))
            if others:
                rhs = tensor(self.builder.create_broadcast(rhs.handle, shape), block_type(right.element_ty, shape))
            return lhs, rhs
        if type(left) is not block_type and type(right) is not block_type:
            return lhs, rhs
        if type(left) is block_type and type(right) in scalars:
            wide = block_type(right, left.shape)
            return lhs, tensor(self.builder.create_splat(wide, rhs.handle), wide)
        if type(left) in scalars and type(right) is block_type:
            wide = block_type(left, right.shape)
            return tensor(self.builder.create_splat(wide, lhs.handle), wide), rhs
        return plain_broadcast(self, lhs, rhs)

    broadcast.__wrapped__ = plain_broadcast  # type: ignore[attr-defined]
    constexprs = tl.core._unwrap_if_constexpr
    plain_values = frozenset({int, float, bool, str, type(None), tensor, block_type, dtype, slice})

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain_values else constexprs(value)

    # Casts between float32 and 16-bit floats, and between integers of 32 and 64 bits, are nearly all casts.
    direct = {(one.name, other.name) for one, other in ((tl.float32, tl.float16), (tl.float32, tl.bfloat16), (tl.int32, tl.int64))}
    direct |= {(other, one) for one, other in direct}
    plain_cast = semantic.cast

    def cast(self: Any, value: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = value.dtype, dst_ty.scalar
        if fp_downcast_rounding is not None or (source.name, target.name) not in direct:
            return plain_cast(self, value, dst_ty, fp_downcast_rounding)
        kind = block_type(target, value.type.shape) if type(value.type) is block_type else target
        return tensor(self.builder.cast_impl(value.handle, kind), kind)

    cast.__wrapped__ = plain_cast  # type: ignore[attr-defined]
    semantic.cast = cast
    tl.core._unwrap_if_constexpr = unwrap_if_constexpr
    interpreter._get_np_dtype = get_np_dtype
    semantic.broadcast_impl_value = broadcast
    interpreter.TensorHandle.__post_init__ = init_handle
    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor


def _patch_operands(interpreter: Any, tl: Any) -> None:
    """Short cuts for the operands of binary operations.

    Operands of one type are used as they are, and a Python number becomes the same cached constant every time. That covers nearly
    all operations; Triton derives it anew each time in dozens of steps. All others go through Triton's code, which is in
    `__wrapped__`.
    """
    semantic, interpreter_semantic = interpreter.TritonSemantic, interpreter.interpreter_semantic
    tensor, dtype, pointer, constexpr = tl.tensor, tl.dtype, tl.pointer_type, tl.constexpr
    plain_operands, plain_tensor = semantic.binary_op_type_checking_impl, semantic.to_tensor
    halves = (tl.float16, tl.bfloat16)
    narrow, wide = tl.int32, tl.int64
    numbers: dict[int, Any] = {}
    constants: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def constant(self: Any, beside: Any, number: Any, div_or_mod: Any, first: Any) -> Any:
        """The constant that Triton makes of a number beside a tensor, or None if the tensor would change its type."""
        shape = beside.type.shape if beside.type.is_block() else None
        # repr, because 0.0 and -0.0 are equal but two constants; the builder's type, because blocks have one more axis if all
        # programs run together.
        key = beside.dtype.name, type(number), repr(number), div_or_mod, first, id(shape), type(self.builder)
        if key not in constants:
            like = self.scalar_constant(0, beside.dtype)
            pair = plain_operands(self, *((number, like) if first else (like, number)), False, False, True, div_or_mod)
            operand, partner = pair if first else pair[::-1]
            if partner is like and shape is not None:
                operand = self.broadcast_impl_value(beside, operand)[1]
                operand.handle.data.flags.writeable = False
            constants[key] = operand if partner is like else None, shape
        return constants[key][0]

    def operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: Any = False,  # noqa: FBT002 - Triton's
        allow_rhs_ptr: Any = False,  # noqa: FBT002 - Triton's
        arithmetic_check: Any = True,  # noqa: FBT002 - Triton's
        div_or_mod: Any = False,  # noqa: FBT002 - Triton's
    ) -> Any:
        left, right = type(lhs), type(rhs)
        if left is tensor and right is tensor:
            kind, other = lhs.dtype, rhs.dtype
            if arithmetic_check and (kind is narrow or kind is wide) and (other is narrow or other is wide) and kind is not other:
                return self.broadcast_impl_value(self.cast(lhs, wide), self.cast(rhs, wide))
            same = kind is other and type(kind) is dtype and not (div_or_mod and kind in halves)
            if same or (allow_lhs_ptr and type(kind) is pointer and other.is_int()):
                return self.broadcast_impl_value(lhs, rhs)
        elif left is tensor and (right is int or right is float) and arithmetic_check and type(lhs.dtype) is dtype and rhs == rhs:
            operand = constant(self, lhs, rhs, div_or_mod, False)
            if operand is not None:
                return lhs, operand
        elif right is tensor and (left is int or left is float) and arithmetic_check and type(rhs.dtype) is dtype and lhs == lhs:
            operand = constant(self, rhs, lhs, div_or_mod, True)
            if operand is not None:
                return operand, rhs
        return plain_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def to_tensor(self: Any, x: Any, check_type: Any = True) -> Any:  # noqa: FBT002 - Triton's
        if type(x) is tensor:
            return x
        x = x.value if type(x) is constexpr else x
        if type(x) is not int:
            return plain_tensor(self, x, check_type)
        if x not in numbers:
            numbers[x] = plain_tensor(self, x)
        return numbers[x]

    operands.__wrapped__, to_tensor.__wrapped__ = plain_operands, plain_tensor  # type: ignore[attr-defined]
    semantic.binary_op_type_checking_impl, semantic.to_tensor = operands, to_tensor

    def operator(name: str, *options: Any) -> None:
        meet = getattr(interpreter_semantic, name)

        def forward(self: Any, other: Any) -> Any:
            return meet(self, other.value if type(other) is constexpr else other, *options)

        def backward(self: Any, other: Any) -> Any:
            return meet(other.value if type(other) is constexpr else other, self, *options)

        setattr(tensor, f"__{name}__", forward)
        setattr(tensor, f"__r{name}__", backward)

    def comparison(name: str, called: str) -> None:
        meet = getattr(interpreter_semantic, called)
        setattr(tensor, f"__{name}__", lambda self, other: meet(self, interpreter_semantic.to_tensor(other)))

    for name in ("add", "sub", "mul"):
        operator(name, False)  # without overflow checks, whose results are not used
    for name in ("truediv", "floordiv", "mod"):
        operator(name)
    called = {"lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal", "eq": "equal", "ne": "not_equal"}
    for name, method in called.items():
        comparison(name, method)


def _bind(builtin: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return builtin(*args, **kwargs)

    return call


def _patch_launch(interpreter: Any, tl: Any) -> None:
    from triton.runtime.autotuner import Autotuner

    # There is no device to time. All configurations tie, and the first one that survives pruning wins.
    Autotuner._bench = lambda self, *args, config, **meta: [0.0]

    convert, run = interpreter._implicit_cvt, interpreter.InterpretedFunction.run

    def implicit_cvt(arg: Any) -> Any:
        # A compiled kernel takes a float argument as a float32 scalar. A Python number would get the type of the tensor that it
        # is combined with, and `scale` times bfloat16 would be rounded twice.
        if isinstance(arg, float):
            return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        if isinstance(arg, bool):
            return tl.tensor(interpreter.TensorHandle(np.array([arg]), tl.int1), tl.int1)
        return convert(arg)

    interpreter._implicit_cvt = implicit_cvt

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if callable(grid) and not warmup:
            # As the compiler's launcher does, pass the caller's own tensors and numbers to the grid function.
            known = {name: value for name, value in kwargs.items() if name in self.arg_names}
            grid = grid(inspect.getcallargs(self.fn, *args, **known))
        try:
            # Lanes that a mask drops overflow and divide by zero, as they do on a device.
            with np.errstate(all="ignore"):
                run(self, *args, grid=grid if warmup else tuple(grid), warmup=warmup, **kwargs)
        except (interpreter.InterpreterError, OutOfBounds) as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OutOfBounds):
                cause = cause.__cause__
            if cause is None:
                raise
            arguments = inspect.getcallargs(self.fn, *args, **{name: kwargs[name] for name in self.arg_names if name in kwargs})
            raise _named_stray(cause, self.fn.__name__, arguments) from None

    interpreter.InterpretedFunction.run = launch


def _named_stray(stray: OutOfBounds, kernel: str, arguments: dict[str, Any]) -> OutOfBounds:
    """The same error with the names of the kernel and the argument, and with a traceback that ends at the kernel's line."""
    names = [name for name, value in arguments.items() if stray.span in map(span_of, tensors_of(value))]
    told = OutOfBounds(f"{kernel} {stray} the memory of {' or '.join(names) or 'a tensor'}", stray.span)
    ours = (__file__, os.path.dirname(inspect.getfile(sys.modules["triton"])))
    at = kernels = stray.__traceback__
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith(ours):
            kernels = at
        at = at.tb_next
    if kernels is not None:
        kernels.tb_next = None
    return told.with_traceback(stray.__traceback__)


def _patch_access(interpreter: Any) -> None:
    """Check that every access stays in the memory that its pointer was made from.

    The type of a pointer carries this memory through all arithmetic. What lies between two tensors, or after the last one, is
    chance. So an error names the tensor that the access left, not the place that it reached. Pointers made from integers are not
    checked.
    """
    builder, convert = interpreter.InterpreterBuilder, interpreter._implicit_cvt
    accesses = ("masked_load", "masked_store", "atomic_rmw", "atomic_cas")
    plain = {name: getattr(builder, f"create_{name}") for name in (*accesses, "bitcast", "select", "cat", "join")}

    def implicit_cvt(arg: Any) -> Any:
        result = convert(arg)
        if hasattr(arg, "data_ptr"):
            result.handle.dtype.spans = tuple(map(span_of, tensors_of(arg)))
            width = max(1, result.handle.dtype.element_ty.primitive_bitwidth // 8)
            result.handle.dtype.recast = arg.data_ptr() % width != 0  # such an argument may be a view that starts inside an element
        return result

    def check_inside(pointers: Any, mask: Any, verb: str) -> None:
        spans, data = getattr(pointers.dtype, "spans", ()), pointers.data
        if not spans or not data.size:
            return
        width = max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)
        start, end = spans[0]
        if data.size == 1:
            low = high = data.item()
        else:
            low, high = np.minimum.reduce(data, axis=None), np.maximum.reduce(data, axis=None)
        if start <= low and high <= end - width:
            return
        if mask is not None:
            data = data[np.broadcast_to(np.asarray(mask.data, dtype=bool), data.shape)]
        # Byte offsets from the start of each memory; negative before it.
        into = {span: (data - np.uint64(span[0])).view(np.int64) for span in spans}
        left = {span: np.maximum(-at, at - (span[1] - span[0] - width)) for span, at in into.items()}
        astray = np.minimum.reduce(list(left.values())) > 0
        if not astray.any():
            return
        span = min(spans, key=lambda memory: left[memory][astray].max())
        far = left[span][astray].argmax()
        side = "before" if into[span][astray][far] < 0 else "after"
        count, distance = int(astray.sum()), -(-int(left[span][astray][far]) // width)
        raise OutOfBounds(f"{verb} {count} element{'s' * (count > 1)} up to {distance} {side}", span)

    def create_masked_load(self: Any, pointers: Any, mask: Any, *others: Any, **options: Any) -> Any:
        check_inside(pointers, mask, "loads")
        return plain["masked_load"](self, pointers, mask, *others, **options)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        check_inside(pointers, mask, "stores")
        return plain["masked_store"](self, pointers, value, mask, *options)

    def create_atomic_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        check_inside(pointers, mask, "updates")
        return plain["atomic_rmw"](self, op, pointers, value, mask, *options)

    def create_atomic_cas(self: Any, pointers: Any, *others: Any) -> Any:
        check_inside(pointers, None, "updates")
        return plain["atomic_cas"](self, pointers, *others)

    def retyped(handle: Any, *sources: Any) -> Any:
        """The handle, with the memories of all `sources` if it holds pointers."""
        if handle.dtype.is_ptr():
            handle.dtype = pointing(handle.dtype, *sources)
        return handle

    def create_bitcast(self: Any, source: Any, dst_type: Any) -> Any:
        return retyped(plain["bitcast"](self, source, dst_type), source)

    def create_select(self: Any, cond: Any, lhs: Any, rhs: Any) -> Any:
        return retyped(plain["select"](self, cond, lhs, rhs), lhs, rhs)

    def create_cat(self: Any, lhs: Any, rhs: Any) -> Any:
        return retyped(plain["cat"](self, lhs, rhs), lhs, rhs)

    def create_join(self: Any, lhs: Any, rhs: Any) -> Any:
        return retyped(plain["join"](self, lhs, rhs), lhs, rhs)

    interpreter._implicit_cvt = implicit_cvt
    patches: list[Any] = [create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas]
    for patch in (*patches, create_bitcast, create_select, create_cat, create_join):
        setattr(builder, patch.__name__, patch)


class _NoDevice:
    """A Triton driver that reports the number of multiprocessors and nothing else."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": MULTIPROCESSORS})

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"kernels are interpreted, and there is no device that has {name}")


def _patch_driver() -> None:
    import triton

    triton.runtime.driver.set_active(_NoDevice())


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
            # Triton labels a comparison with the type of its operands. With that type it would be no mask after a splat.
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
        return handle(_narrow(data) if target == bf16 else data.astype(interpreter._get_np_dtype(target)), target)

    for patch in (binary_op, unary_op, create_fma, create_dot, cast_impl):
        setattr(builder, patch.__name__, patch)
    builder.get_bf16 = lambda self, value: handle(_narrow([value]), bf16)
    # By default, tl.minimum and tl.maximum return the number if the other operand is NaN.
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    # Each overflow check repeats integer arithmetic in 64 bits, and without debug its result is not used.
    options = interpreter.interpreter_builder.options
    precisions = dict.fromkeys((*options.allowed_dot_input_precisions, "bf16x3", "bf16x6"))
    interpreter.interpreter_builder.options = dataclasses.replace(
        options, allowed_dot_input_precisions=tuple(precisions), sanitize_overflow=False
    )


def _patch_reductions(interpreter: Any, tl: Any) -> None:
    reduce, scan = interpreter.ReduceOps, interpreter.ScanOps
    plain_sum, plain_min_max = reduce.sum, reduce.min_max
    # A device combines pairs in the tensor's type, so every level of the reduction tree rounds.
    levels: dict[Any, Any] = {tl.bfloat16: (_widen, _narrow), tl.float16: (np.asarray, np.asarray)}
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
        narrowed = self.to_tensor(_narrow(best.handle.data).reshape([int(dim) for dim in best.shape]), tl.bfloat16)
        return (narrowed, *found[1:]) if isinstance(found, tuple) else narrowed

    def ordered(value: Any) -> Any:
        """The value in a form that numpy can compare: bfloat16, kept as bit patterns, becomes float32."""
        if value.dtype != tl.bfloat16:
            return value
        kind = tl.block_type(tl.float32, value.type.shape) if value.type.is_block() else tl.float32
        return tl.tensor(interpreter.TensorHandle(_widen(value.handle.data), tl.float32), kind)

    reduce.sum, reduce.min_max = tree_sum, min_max
    scan.cumsum, scan.cumprod = tree_scan(scan.cumsum, np.add), tree_scan(scan.cumprod, np.multiply)
