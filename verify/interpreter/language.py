"""Patches of Triton's interpreter: the language's functions, types and operands, bound once and cached."""

import ast
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verify.interpreter.internals import get, put

# Functions of the CUDA library that the language has under the same name. Without a compiler, those of the library return None.
OF_THE_LANGUAGE = ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "erf", "abs", "floor", "ceil")


def patch_language() -> None:
    """Bind the language's builtins once, and let loop variables, min and max be what the compiler makes of them.

    The interpreter rebinds every builtin at each launch and at each call of a device function. Nothing compiles in this process, so
    one permanent rebinding serves them all.
    """
    import triton.language as tl
    from triton.language.extra import libdevice

    semantic, is_builtin = get("interpreter.interpreter_semantic"), get("core.is_builtin")

    def patch_attr(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        scope.set_attr(owner, name, _bind(inspect.unwrap(member), semantic))

    put("interpreter._patch_attr", patch_attr)
    get("interpreter._patch_lang")(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    for name in OF_THE_LANGUAGE:
        setattr(libdevice, name, getattr(tl, name))
    bound: dict[int, dict[str, Any]] = {}

    def patch_lang(fn: Any) -> Any:
        """Bind also the builtins that the kernel's module holds under other names."""
        names = fn.__globals__
        if id(names) not in bound:
            bound[id(names)] = names
            aliases = [name for name, value in names.items() if is_builtin(value)]
            names.update({name: _bind(names[name], semantic) for name in aliases})
        return SimpleNamespace(restore=lambda: None)

    put("interpreter._patch_lang", patch_lang)

    def visit_for(self: Any, node: ast.For) -> ast.For:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and "static_range" not in ast.unparse(node.iter):
            name = node.target.id
            node.body[:0] = ast.parse(f"{name} = interpreter_semantic.to_tensor({name}, False)").body
        return node

    # Compiled loop variables are tensors, and kernels call `.to` on them; those of static_range are constants.
    put("ASTTransformer.visit_For", visit_for)

    def visit_assign(self: Any, node: ast.Assign) -> ast.Assign:
        """As Triton's does, but look into the value too. Triton does so since 3.9.

        Of a tuple with more values than names, the first ones are assigned, as the compiler does (`assignTarget` in Triton 3.7.1).
        """
        self.generic_visit(node)
        if len(node.targets) > 1:
            raise ValueError("Multiple assignments are not supported")
        if isinstance(node.value, ast.Tuple) and isinstance(target := node.targets[0], ast.Tuple):
            node.value.elts = node.value.elts[: len(target.elts)]
        converted = ast.parse("interpreter_semantic.to_tensor(value, False)", mode="eval").body
        assert isinstance(converted, ast.Call)
        converted.args[0] = node.value
        node.value = ast.copy_location(converted, node)
        return node

    put("ASTTransformer.visit_Assign", visit_assign)

    def visit_call(self: Any, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) == 2 and not node.keywords:
            node.args = [node.func, *node.args]
            node.func = ast.copy_location(ast.Name("_gdn_extreme", ast.Load()), node.func)
        return node

    def extreme(function: Any, *arguments: Any) -> Any:
        """Call Triton's minimum or maximum in place of Python's min or max if an argument is a tensor, as the compiler does."""
        plain = {min: tl.minimum, max: tl.maximum}.get(function, function)
        return (plain if any(isinstance(argument, tl.tensor) for argument in arguments) else function)(*arguments)

    put("ASTTransformer.visit_Call", visit_call)
    put("interpreter._gdn_extreme", extreme)  # the globals of this module are those of every interpreted function


def _bind(builtin: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return builtin(*args, **kwargs)

    return call


def patch_types() -> None:
    """Cache block types and shapes. Triton builds them anew for every value, but a kernel has only a few dozen different ones."""
    import triton.language as tl

    constexpr, np_dtype, block_init = tl.constexpr, get("interpreter._get_np_dtype"), get("block_type.__init__")
    dtype, block_type, tensor = tl.dtype, tl.block_type, tl.tensor
    plain_broadcast, plain_handle = get("TritonSemantic.broadcast_impl_value"), get("TensorHandle.__post_init__")
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
    constexprs = get("core._unwrap_if_constexpr")
    plain_values = frozenset({int, float, bool, str, type(None), tensor, block_type, dtype, slice})

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain_values else constexprs(value)

    # Casts between float32 and 16-bit floats, and between integers of 32 and 64 bits, are nearly all casts.
    direct = {(one.name, other.name) for one, other in ((tl.float32, tl.float16), (tl.float32, tl.bfloat16), (tl.int32, tl.int64))}
    direct |= {(other, one) for one, other in direct}
    plain_cast = get("TritonSemantic.cast")

    def cast(self: Any, value: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = value.dtype, dst_ty.scalar
        if fp_downcast_rounding is not None or (source.name, target.name) not in direct:
            return plain_cast(self, value, dst_ty, fp_downcast_rounding)
        kind = block_type(target, value.type.shape) if type(value.type) is block_type else target
        return tensor(self.builder.cast_impl(value.handle, kind), kind)

    cast.__wrapped__ = plain_cast  # type: ignore[attr-defined]
    put("TritonSemantic.cast", cast)
    put("core._unwrap_if_constexpr", unwrap_if_constexpr)
    put("interpreter._get_np_dtype", get_np_dtype)
    put("TritonSemantic.broadcast_impl_value", broadcast)
    put("TensorHandle.__post_init__", init_handle)
    put("block_type.__init__", init_block)
    put("tensor.__init__", init_tensor)


def patch_operands() -> None:
    """Short cuts for the operands of binary operations.

    Operands of one type are used as they are, and a Python number becomes the same cached constant every time. That covers nearly
    all operations; Triton derives it anew each time in dozens of steps. All others go through Triton's code, which is in
    `__wrapped__`.
    """
    import triton.language as tl

    semantic = get("interpreter.interpreter_semantic")
    tensor, dtype, pointer, constexpr = tl.tensor, tl.dtype, tl.pointer_type, tl.constexpr
    plain_operands, plain_tensor = get("TritonSemantic.binary_op_type_checking_impl"), get("TritonSemantic.to_tensor")
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
    put("TritonSemantic.binary_op_type_checking_impl", operands)
    put("TritonSemantic.to_tensor", to_tensor)

    def operator(name: str, *options: Any) -> None:
        meet = getattr(semantic, name)

        def forward(self: Any, other: Any) -> Any:
            return meet(self, other.value if type(other) is constexpr else other, *options)

        def backward(self: Any, other: Any) -> Any:
            return meet(other.value if type(other) is constexpr else other, self, *options)

        setattr(tensor, f"__{name}__", forward)
        setattr(tensor, f"__r{name}__", backward)

    def comparison(name: str, called: str) -> None:
        meet = getattr(semantic, called)
        setattr(tensor, f"__{name}__", lambda self, other: meet(self, semantic.to_tensor(other)))

    for name in ("add", "sub", "mul"):
        operator(name, False)  # without overflow checks, whose results are not used
    for name in ("truediv", "floordiv", "mod"):
        operator(name)
    called = {"lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal", "eq": "equal", "ne": "not_equal"}
    for name, method in called.items():
        comparison(name, method)
