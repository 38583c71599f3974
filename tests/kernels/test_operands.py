"""How operands meet in the interpreter: for every pair of types, numbers and shapes as in Triton itself, errors included."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.alone import answered

SLOW_FIXTURES = ("found",)

pytestmark = pytest.mark.interpreted

WHOLE = (0, 1, -1, 3, 127, 128, 255, 2**31 - 1, -(2**31), 2**31, 2**40, -(2**63), 2**63, True, False)
NUMBERS = (*WHOLE, 0.0, -0.0, 0.5, 1.0, -2.5, 1e-40, 1e300, float("inf"), float("nan"))
SHAPES = ((), (4,), (4, 2), (4, 1), (1, 2), (1, 1), (1,), (2,))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """From a process of its own: interpreting is decided once, when triton is imported."""
    pytest.importorskip("triton")
    return answered("tests.kernels.test_operands")


@pytest.mark.slow
def test_whatever_meets_becomes_what_triton_makes_of_it(found: dict[str, Any]) -> None:
    assert found["meetings"] > 20_000
    assert found["errors"] > 1_000, "what Triton refuses is among them"
    assert found["short"] > 4_000, "so many go the short way"
    assert found["differ"] == []


@pytest.mark.parametrize("name", ["half", "types", "shape", "widens", "errors", "sign"])
def test_a_short_way_that_is_wrong_is_seen(found: dict[str, Any], name: str) -> None:
    assert found["wrong"][name] > 0


def test_operators_of_tensors_are_those_of_the_language(found: dict[str, Any]) -> None:
    assert len(found["operators"]) == 3 * (2 * 6 + 6)
    assert [name for name, same in found["operators"].items() if not same] == []


# In the process that interprets


def answer(_: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    kind = type(semantic)
    operands, broadcast, to_tensor = kind.binary_op_type_checking_impl, kind.broadcast_impl_value, kind.to_tensor
    names = ("int1", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
    types = [getattr(tl, name) for name in names]
    pointer = tl.pointer_type(tl.float32)

    def operand_of(dtype: Any, shape: tuple[int, ...]) -> Any:
        """Values that are all different, as far as the type has so many."""
        bits = np.arange(1, 1 + max(1, int(np.prod(shape)))).reshape(shape or (1,))
        data = bits.astype(np.uint64 if dtype.is_ptr() else interpreter._get_np_dtype(dtype))
        return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)

    def plain(x: Any) -> Any:
        return str(x.type), str(x.handle.dtype), str(x.handle.data.dtype), x.handle.data.shape, x.handle.data.tobytes()

    def outcome(way: Any, *arguments: Any) -> Any:
        try:
            return [plain(operand) for operand in way(semantic, *arguments)]
        except Exception as error:
            return type(error).__name__, str(error)

    def plainly(*arguments: Any) -> Any:
        """Triton's own way throughout."""
        kind.broadcast_impl_value, kind.to_tensor = broadcast.__wrapped__, to_tensor.__wrapped__
        kind.binary_op_type_checking_impl = operands.__wrapped__
        try:
            return outcome(operands.__wrapped__, *arguments)
        finally:
            kind.broadcast_impl_value, kind.to_tensor, kind.binary_op_type_checking_impl = broadcast, to_tensor, operands

    def meetings() -> Iterator[tuple[Any, ...]]:
        tensors = {(dtype.name, shape): operand_of(dtype, shape) for dtype in (*types, pointer) for shape in SHAPES}
        flags = ((False, False, True, False), (True, True, True, False), (False, False, True, True), (False, False, False, False))
        for one, other in itertools.product(tensors.values(), tensors.values()):
            if one.type.scalar == other.type.scalar or (one.type.shape if one.type.is_block() else ()) in ((), (4, 2)):
                for flag in flags[:3]:
                    yield (one, other, *flag)
        for one, number in itertools.product(tensors.values(), NUMBERS):
            for flag in flags:
                yield (one, number, *flag)
                yield (number, one, *flag)

    every = list(meetings())
    want = [plainly(*meeting) for meeting in every]
    longer = 0

    def counting(*arguments: Any) -> Any:
        nonlocal longer
        longer += 1
        return operands.__wrapped__(*arguments)

    closed = dict(zip(operands.__code__.co_freevars, operands.__closure__, strict=True))
    closed["plain_operands"].cell_contents = counting
    got = [outcome(operands, *meeting) for meeting in every for _ in range(2)][1::2]  # the second time constants are there
    closed["plain_operands"].cell_contents = operands.__wrapped__

    def differences(way: Any) -> int:
        return sum(outcome(way, *meeting) != answer for meeting, answer in list(zip(every, want, strict=True))[::7])

    def faults() -> Iterator[tuple[str, Any]]:
        """Wrong short ways."""
        yield "half", lambda self, lhs, rhs, *flags: operands(self, lhs, rhs, *flags[:3], False)
        yield "types", lambda self, lhs, rhs, *flags: broadcast(self, self.to_tensor(lhs), self.to_tensor(rhs))
        yield "errors", lambda self, lhs, rhs, *flags: operands(self, lhs, rhs, True, True, *flags[2:])

        def unwidened(self: Any, lhs: Any, rhs: Any, *flags: Any) -> Any:
            operands(self, lhs, rhs, *flags)
            return lhs, rhs

        def turned(self: Any, lhs: Any, rhs: Any, *flags: Any) -> Any:
            one, other = operands(self, lhs, rhs, *flags)
            return (one, other) if one.type == other.type else (other, one)

        def unsigned(self: Any, lhs: Any, rhs: Any, *flags: Any) -> Any:
            return operands(self, lhs, abs(rhs) if isinstance(rhs, int) else rhs, *flags)

        yield "widens", unwidened
        yield "shape", turned
        yield "sign", unsigned

    return {
        "meetings": len(every),
        "errors": sum(isinstance(answer, tuple) for answer in want),
        "short": len(every) - longer / 2,
        "differ": [str(meeting) for meeting, one, other in zip(every, got, want, strict=True) if one != other][:5],
        "wrong": {name: differences(way) for name, way in faults()},
        "operators": dict(_operators(interpreter, tl, operand_of, plain)),
    }


def _operators(interpreter: Any, tl: Any, tensor_of: Any, plain: Any) -> Iterator[tuple[str, bool]]:
    """Each operator, forwards and backwards, beside the operation of Triton's that it stands for."""
    semantic = interpreter.interpreter_semantic
    called = {"lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal", "eq": "equal", "ne": "not_equal"}
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", *called):
        one = tensor_of(tl.int32, (4, 2))
        other: Any
        for other in (tensor_of(tl.int32, (4, 1)), 3, tl.constexpr(3)):
            number = other.value if isinstance(other, tl.constexpr) else other
            meet, more = getattr(semantic, called.get(name, name)), [True] if name in ("add", "sub", "mul") else []
            forms = {f"__{name}__": (one, number)} | ({} if name in called else {f"__r{name}__": (number, one)})
            for form, pair in forms.items():
                want = meet(*(semantic.to_tensor(operand) if name in called else operand for operand in pair), *more)
                yield f"{form} {type(other).__name__}", plain(getattr(one, form)(other)) == plain(want)
