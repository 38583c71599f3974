"""The gates and the norms are their formulas, and absent arguments and options are their neutral ones."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.norm import EPS, GATED_RMS_NORM, L2NORM, NORM_GATE_LINEAR, Normalised, gated_rms_norm, l2norm, norm_gate_linear
from oracles.operation import Inputs, gradient_name
from oracles.tolerance.bound import truth
from tests.judging import Implementation, Results
from tests.pointwise_calls import EXACT, OPERATIONS, agree, drawn, telling
from tests.pointwise_readings import WRONG
from tests.together import for_each

# The pointwise operations are their formulas


def in_scalars(name: str, x: Inputs) -> Results:
    """Outputs by Python's own functions, a number at a time."""

    def sig(b: float) -> float:
        return 1 / (1 + math.exp(-b)) if b > 0 else math.exp(b) / (1 + math.exp(b))

    def elementwise(function: Callable[[tuple[int, ...]], float], like: Tensor) -> Tensor:
        flat = [function(index) for index in itertools.product(*map(range, like.shape))]
        return torch.tensor(flat, dtype=torch.float64).reshape(like.shape)

    if name in ("gdn_gate", "kda_gate"):

        def g(i: tuple[int, ...]) -> float:
            a = float(x.a[i]) + (0.0 if x.dt_bias is None else float(x.dt_bias[i[2:]]))
            return -math.exp(float(x.A_log[i[2]])) * (max(a, 0.0) + math.log1p(math.exp(-abs(a))))

        return {"g": elementwise(g, x.a), "beta": elementwise(lambda i: sig(float(x.b[i])) * (2 if x.allow_neg_eigval else 1), x.b)}

    def y(i: tuple[int, ...]) -> float:
        if name == "norm_gate_linear":
            terms = (float(x.linear[i[-1], channel]) * gated((*i[:-1], channel)) for channel in range(x.x.shape[-1]))
            return math.fsum(terms) + (0.0 if x.bias is None else float(x.bias[i[-1]]))
        return gated(i)

    def gated(i: tuple[int, ...]) -> float:
        squares = math.fsum(entry * entry for entry in x.x[i[:-1]].tolist())
        if name == "l2norm":
            return float(x.x[i]) / math.sqrt(squares + x.eps)
        weight, z = (1.0 if x.weight is None else float(x.weight[i[-1]])), float(x.z[i])
        return weight * float(x.x[i]) / math.sqrt(squares / x.x.shape[-1] + x.eps) * z * sig(z)

    like = x.x if name != "norm_gate_linear" else x.x.new_zeros(*x.x.shape[:-1], len(x.linear))
    return {"y": elementwise(y, like)}


POINTWISE = ("gdn_gate", "kda_gate", "l2norm", "gated_rms_norm", "norm_gate_linear")
SCALAR_LIMIT = 12 * 2.0**-53  # 5.9 found of 200 calls each


def off(got: Results, want: Results, reach: Results | None = None) -> float:
    """The greatest error relative to an entry, or to its `reach`; an entry under 2^-1000 counts as that."""
    assert got.keys() == want.keys()
    sizes = reach or want
    return max(float(((got[name] - want[name]).abs() / sizes[name].abs().clamp(min=2.0**-1000)).max()) for name in want)


def reach_of(name: str, x: Inputs) -> Results | None:
    """The summed sizes of the terms of each entry, where terms may cancel."""
    if name != "norm_gate_linear":
        return None
    gated = in_scalars("gated_rms_norm", x)["y"].abs()
    return {"y": gated @ x.linear.abs().mT + (0.0 if x.bias is None else x.bias.abs())}


@pytest.mark.slow
@for_each("name", POINTWISE)
def test_operation_is_its_formula(name: str) -> None:
    for seed in range(12):
        inputs, _ = drawn(name, seed, torch.float64)
        OPERATIONS[name].check(inputs)
        # In float64 a + dt_bias rounds, and softplus then errs by |a| times that.
        exact = inputs.replaced(a=inputs.a.float().double(), dt_bias=None) if "a" in inputs else inputs
        assert off(truth(OPERATIONS[name], exact), in_scalars(name, exact), reach_of(name, exact)) <= SCALAR_LIMIT, seed


OF_GRADIENTS = {"lost", "projected", "ungated"}
FORWARD = [entry for entry in WRONG if entry[0] in POINTWISE and not OF_GRADIENTS & entry[3].keys()]


@pytest.mark.slow
@for_each(("name", "wrong", "implementation", "reading"), FORWARD)
def test_wrong_reading_is_not_the_formula(name: str, wrong: str, implementation: Implementation, reading: dict[str, Any]) -> None:
    inputs, _ = telling(name, torch.float64)
    want = in_scalars(name, inputs)
    assert off(truth(OPERATIONS[name], inputs), want, reach_of(name, inputs)) <= SCALAR_LIMIT
    assert off({key: tensor.double() for key, tensor in implementation(inputs, **reading).items()}, want) > 1e-3, wrong


def test_plain_norms_are_the_operations() -> None:
    inputs, _ = drawn("l2norm", 0, torch.float64)
    assert torch.equal(l2norm(inputs.x, inputs.eps), truth(L2NORM, inputs)["y"])
    inputs, _ = drawn("gated_rms_norm", 0, torch.float64)
    for weight in (inputs.weight, None):
        want = truth(GATED_RMS_NORM, inputs.replaced(weight=weight))["y"]
        torch.testing.assert_close(gated_rms_norm(inputs.x, inputs.z, weight, inputs.eps), want, rtol=1e-14, atol=0)
    inputs, _ = drawn("norm_gate_linear", 0, torch.float64)
    for bias in (inputs.bias, None):
        want = truth(NORM_GATE_LINEAR, inputs.replaced(bias=bias))["y"]
        got = norm_gate_linear(inputs.x, inputs.z, inputs.weight, inputs.linear, bias, inputs.eps)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


def test_norm_of_the_delta_rule_is_the_l2norm_operation_to_the_bit() -> None:
    inputs, directions = drawn("l2norm", 0, torch.float64)
    x = inputs.x.unsqueeze(0).requires_grad_()
    y = Normalised.apply(x, EXACT, "k")
    (dx,) = torch.autograd.grad(y, x, directions["y"].unsqueeze(0))
    want = truth(L2NORM, inputs.replaced(eps=EPS), directions)
    assert agree({"y": y[0].detach(), "dx": dx[0]}, want, exactly=True)
    assert not agree({"y": y[0].detach(), "dx": dx[0]}, truth(L2NORM, inputs.replaced(eps=2 * EPS), directions), exactly=True)


@for_each("name", OPERATIONS)
def test_absent_argument_is_the_neutral_one_to_the_bit(name: str) -> None:
    neutral = {"bias": torch.zeros, "dt_bias": torch.zeros, "weight": torch.ones, "state": torch.zeros}
    checked = 0
    inputs, directions = telling(name, torch.float64)
    for port in OPERATIONS[name].inputs:
        if port.optional and inputs.get(port.name) is not None:
            filled = neutral[port.name](inputs[port.name].shape, dtype=torch.float64)
            absent, present = (
                truth(OPERATIONS[name], inputs.replaced(**{port.name: value}), directions) for value in (None, filled)
            )
            assert present.keys() - absent.keys() == {gradient_name(port.name)}
            assert all(torch.equal(absent[key], present[key]) for key in absent)
            checked += 1
    assert checked == {"causal_conv1d": 2, "norm_gate_linear": 2, "l2norm": 0}.get(name, 1)


@for_each(
    ("name", "options"),
    [
        ("causal_conv1d", {"activation": None}),
        ("gdn_gate", {"allow_neg_eigval": False}),
        ("kda_gate", {"allow_neg_eigval": False}),
        ("l2norm", {"eps": EPS}),
        ("gated_rms_norm", {"eps": EPS}),
        ("norm_gate_linear", {"eps": EPS}),
    ],
)
def test_absent_option_is_its_default(name: str, options: dict[str, Any]) -> None:
    inputs, directions = telling(name, torch.float64)
    absent = Inputs(**{key: value for key, value in inputs.items() if key not in (*options, "output_final_state")})
    OPERATIONS[name].check(absent)
    want = truth(OPERATIONS[name], inputs.replaced(**options), directions)
    assert agree(truth(OPERATIONS[name], absent, directions), want, exactly=True)
    if "eps" in options:
        nothing = truth(OPERATIONS[name], inputs.replaced(eps=None), directions)
        assert agree(nothing, want, exactly=True)
