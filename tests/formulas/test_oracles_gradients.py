"""The gradients of the oracles are gradients, by Taylor remainders and by differences."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.norm import EPS, Normalised, l2norm
from oracles.operation import Inputs, gradient_name
from oracles.operations import RULES
from oracles.rule import chunkwise, disturbed
from oracles.tolerance.bound import truth
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from tests.oracle_forms import SMALLEST, TENSORS, Results, of, packed, small_tensors
from tests.together import for_each

# Gradients


def objective(case: Case, inputs: Inputs, cotangents: Results) -> float:
    """The sum of all outputs times their cotangents."""
    outputs = truth(case.spec, inputs)
    return float(sum((outputs[name] * cotangent.double()).sum() for name, cotangent in cotangents.items()))


def taylor_order(case: Case, gradients: Results, directions: int = 3) -> float:
    """How fast J(x + hd) - J(x) - h <dJ, d> falls with h, summed over random directions in all inputs: 2 if dJ is the gradient."""
    inputs, cotangents = case.inputs(), case.cotangents()
    generator = torch.Generator().manual_seed(case.seed)
    x = {name: inputs[name].double() for name in TENSORS if inputs[name] is not None}
    start = objective(case, inputs, cotangents)
    remainders = [0.0, 0.0]
    for _ in range(directions):
        toward = {}
        for name, tensor in x.items():
            size = min(float(tensor.abs().max()), 1.0) or 1.0
            toward[name] = (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1) * size
        slope = float(sum((gradients[gradient_name(name)] * direction).sum() for name, direction in toward.items()))
        for index, h in enumerate((2.0**-14, 2.0**-15)):
            there = objective(case, inputs.replaced(**{name: x[name] + h * toward[name] for name in x}), cotangents)
            remainders[index] += abs(there - start - h * slope)
    return math.log2(remainders[0] / remainders[1])


SMOOTH = cases(Domain(key_dims=(2, 256)), longest=40, total=60, beta=("ordinary", "one", "two", "edges")).filter(
    lambda case: case.tokens and not (case.qk_norm and case.values == "zero_rows")  # the norm turns within sqrt(EPS) of zero
)


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=10)
@given(case=SMOOTH)
@example(case=Case.parse("lengths=70+9 packed=yes heads=2 value_heads=4 gate=64 state=random qk_norm=yes seed=1"))
@example(case=Case.parse("lengths=66 gate=saturated beta=two values=correlated state=random seed=2"))
@pytest.mark.slow_after_first
def test_taylor_remainders_of_the_truth_are_of_second_order(operation: str, case: Case) -> None:
    case = of(operation, case)
    assert taylor_order(case, truth(case.spec, case.inputs(), case.cotangents())) > 1.9


@pytest.mark.slow
@for_each("norm", ["inside", "max", "inside qk_norm_eps=1e-12", "max qk_norm_eps=1e-12", "inside qk_norm_eps=1e-5"])
@for_each("values", ["small", "ordinary"])
def test_taylor_remainders_are_of_second_order_with_every_norm(norm: str, values: str) -> None:
    """Rows of `small` are shorter than eps in the form max, and other rows are longer."""
    case = Case.parse(f"lengths=9+20 packed=yes value_heads=2 state=random values={values} qk_norm=yes qk_norm_form={norm} seed=6")
    right = truth(case.spec, case.inputs(), case.cotangents())
    assert taylor_order(case, right) > 1.9
    assert taylor_order(case, {**right, "dk": 1.01 * right["dk"]}) < 1.5


def unprojected(case: Case) -> Tensor:
    """dk that forgets that the norm of k moves with k."""
    inputs = case.inputs()
    q, k = (inputs[name].double() for name in ("q", "k"))
    flat = truth(case.spec, inputs.replaced(q=l2norm(q), k=l2norm(k), qk_norm=False), case.cotangents())
    return flat["dk"] * (k.square().sum(-1, keepdim=True) + EPS).rsqrt()


WRONG_GRADIENTS: dict[str, Callable[[Case, Results], Results]] = {
    "dk not projected": lambda case, right: {"dk": unprojected(case)},
    "no dh0": lambda case, right: {"dh0": torch.zeros_like(right["dh0"])},
    "dbeta one percent off": lambda case, right: {"dbeta": right["dbeta"] * (1 + 1e-2)},
    "dq of the other head": lambda case, right: {"dq": right["dq"].flip(2)},
    "a row of dv lost": lambda case, right: {"dv": right["dv"] * (torch.arange(20) != 7).reshape(1, -1, 1, 1)},
}
WRONG_GATES = {"dg late by one token": lambda case, right: {"dg": right["dg"].roll(1, 1)}}
WRONG_CHANNEL_GATES = {
    "channels of dg reversed": lambda case, right: {"dg": right["dg"].flip(-1)},
    "dg shared out evenly": lambda case, right: {"dg": right["dg"].mean(-1, keepdim=True).expand_as(right["dg"])},
}
WRONG_GRADIENTS_OF = {
    "delta_rule": WRONG_GRADIENTS,
    "gated_delta_rule": {**WRONG_GRADIENTS, **WRONG_GATES},
    "kda": {**WRONG_GRADIENTS, **WRONG_GATES, **WRONG_CHANNEL_GATES},
}


@pytest.mark.slow
@for_each(("operation", "wrong"), [(operation, wrong) for operation in RULES for wrong in WRONG_GRADIENTS_OF[operation]])
def test_taylor_remainders_reject_a_wrong_gradient(operation: str, wrong: str) -> None:
    case = Case.parse(f"op={operation} lengths=20 heads=2 value_heads=4 gate=10 state=random qk_norm=yes seed=4")
    right = truth(case.spec, case.inputs(), case.cotangents())
    assert taylor_order(case, right) > 1.9
    assert taylor_order(case, {**right, **WRONG_GRADIENTS_OF[operation][wrong](case, right)}) < 1.5


@pytest.mark.slow
@for_each(("gates", "chunk"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 4)])
@for_each("lengths", [(1,), (3, 0, 2)])
def test_gradcheck_accepts_the_truth(lengths: tuple[int, ...], gates: int, chunk: int) -> None:
    x = packed(sum(lengths), len(lengths), gates)
    assert torch.autograd.gradcheck(lambda *x: chunkwise.delta_rule(*x, 0.7, list(lengths), chunk), x)


@pytest.mark.parametrize("gates", [1, 2])
@pytest.mark.slow
def test_gradcheck_rejects_a_truth_whose_states_carry_no_gradient(gates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunkwise._Call.backward

    def drops_the_state(*arguments: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        tokens, dstate = right(*arguments)
        return tokens, torch.zeros_like(dstate)

    monkeypatch.setattr(chunkwise._Call, "backward", drops_the_state)
    monkeypatch.setattr(chunkwise, "_SEGMENT", SMALLEST)  # one chunk a segment: the state's gradient is carried between them
    x = packed(3, 1, gates)
    assert not torch.autograd.gradcheck(lambda *x: chunkwise.delta_rule(*x, 0.7, [3], 2), x, raise_exception=False)
    monkeypatch.setattr(chunkwise._Call, "backward", right)
    assert torch.autograd.gradcheck(lambda *x: chunkwise.delta_rule(*x, 0.7, [3], 2), x)


@for_each("gates", [1, 2])
@for_each("tokens", [1, 2, 5])
@pytest.mark.slow
def test_gradcheck_accepts_both_classes(tokens: int, gates: int) -> None:
    exact = Arithmetic.exact()
    lengths = [tokens, 0, 1]
    heads = 2 if tokens == 1 else 1  # one entry at a time is moved, and heads are alike
    x = small_tensors([*((1, tokens + 1, heads, width) for width in (2, 2, 3, gates, 1)), (1, 3, heads, 2, 3)], tokens)
    assert torch.autograd.gradcheck(lambda *x: disturbed.recurrent(*x, 0.7, exact, lengths), x)
    assert torch.autograd.gradcheck(lambda *x: disturbed.chunkwise(*x, 0.7, exact, lengths, 2), x)
    assert torch.autograd.gradcheck(lambda *x: disturbed.chunkwise(*x, 0.7, exact, lengths, 2, restarts=((1,),) * len(lengths)), x)


def test_some_gradients_alone_are_those_of_all_and_without_any_there_is_no_graph() -> None:
    x = packed(9, 3, 2)
    directions = torch.ones(9, 2, 3, dtype=torch.float64), torch.ones(3, 2, 2, 3, dtype=torch.float64)
    outputs = chunkwise.delta_rule(*x, 0.7, [4, 0, 5], 4)
    whole = torch.autograd.grad(outputs, x, directions)
    for index, leaf in enumerate(x):
        alone = [other.detach() for other in x]
        alone[index] = leaf
        got = chunkwise.delta_rule(*alone, 0.7, [4, 0, 5], 4)
        assert all(torch.equal(one, other) for one, other in zip(got, outputs, strict=True))
        assert torch.equal(torch.autograd.grad(got, leaf, directions)[0], whole[index])
    plain = chunkwise.delta_rule(*(tensor.detach() for tensor in x), 0.7, [4, 0, 5], 4)
    assert not any(output.requires_grad for output in plain)
    assert all(torch.equal(one, other) for one, other in zip(plain, outputs, strict=True))


class Unprojected(torch.autograd.Function):
    """The L2 norm, whose backward forgets that the norm moves."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return l2norm(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return cotangents[0] * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def test_gradcheck_accepts_the_norm_and_rejects_one_without_projection() -> None:
    x = (packed(3, 1, 1)[0].detach() * 1e-2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: Normalised.apply(x, Arithmetic.exact(), "k"), x)
    assert not torch.autograd.gradcheck(Unprojected.apply, x, raise_exception=False)
