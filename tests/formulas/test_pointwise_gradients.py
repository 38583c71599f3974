"""The gradients of the convolution, the gates and the norms are gradients, and wrong ones are rejected."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from oracles.gates import GDN_GATE, sigmoid, softplus
from oracles.operation import Inputs, gradient_name
from oracles.tolerance.bound import truth
from tests import wrong_backward
from tests.judging import gradcheck, remainders, taylor_order
from tests.pointwise_calls import EXACT, OPERATIONS, drawn, telling
from tests.together import for_each

# Gradients


@for_each("name", OPERATIONS)
def test_taylor_remainders_of_the_truth_are_of_second_order(name: str) -> None:
    inputs, directions = telling(name, torch.float64)
    right, found = truth(OPERATIONS[name], inputs, directions), remainders(OPERATIONS[name], inputs, directions)
    assert taylor_order(found, right) > 1.9
    for gradient in (gradient_name(port.name) for port in OPERATIONS[name].inputs if port.name in inputs):
        wrong = {**right, gradient: right[gradient] * 1.01}
        assert taylor_order(found, wrong) < 1.5, gradient


@for_each("name", OPERATIONS)
def test_gradcheck_accepts_every_input(name: str) -> None:
    inputs, _ = drawn(name, 1 if name == "causal_conv1d" else 0, torch.float64)
    assert gradcheck(OPERATIONS[name], inputs)


@pytest.mark.slow
@for_each(("name", "wrong"), [(name, wrong) for name in OPERATIONS for wrong in wrong_backward.OF[name]])
def test_gradcheck_rejects_a_wrong_backward(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, (inputs, _) = OPERATIONS[name], telling(name, torch.float64)
    tokens = [port.name for port in operation.inputs if port.axes.startswith("B T") and port.name in inputs]
    few: dict[str, Any] = {name: inputs[name][:, :2] for name in tokens}
    few |= {"state": inputs.state[:1], "cu_seqlens": None} if name == "causal_conv1d" else {}
    assert gradcheck(operation, inputs.replaced(**few))
    monkeypatch.setattr(*wrong_backward.WRONG[wrong])
    with pytest.raises(GradcheckError, match="Jacobian"):
        gradcheck(operation, inputs.replaced(**few))


def test_slopes_of_sigmoid_and_softplus_are_right_where_one_minus_sigmoid_cancels() -> None:
    x = torch.tensor([-40.0, 0.0, 30.0, 700.0], dtype=torch.float64, requires_grad=True)
    ones, wide = torch.ones_like(x), [-40.0, 0.0, 30.0, 700.0]
    (slope,) = torch.autograd.grad(truth_of_sigmoid(x), x, ones)
    want = [math.exp(-abs(number)) / (1 + math.exp(-abs(number))) ** 2 for number in wide]
    torch.testing.assert_close(slope, torch.tensor(want, dtype=torch.float64), rtol=1e-15, atol=0)
    assert ((torch.sigmoid(x) * (1 - torch.sigmoid(x)))[2] / want[2] - 1).abs() > 1e-5, "y (1 - y) cancels at 30"
    (slope,) = torch.autograd.grad(softplus(x), x, ones)
    torch.testing.assert_close(slope, sigmoid(x.detach()), rtol=1e-15, atol=0)


def truth_of_sigmoid(x: Tensor) -> Tensor:
    """The slope that the oracle's own function has in exact arithmetic."""
    one = Inputs(a=x[None, None, None], b=x[None, None, None], A_log=torch.zeros(1, len(x), dtype=torch.float64))
    return GDN_GATE.forward(one, EXACT)["beta"].flatten()


def test_softplus_of_torch_is_off_above_its_threshold_and_ours_is_not() -> None:
    x = torch.tensor([20.0 + 2.0**-40], dtype=torch.float64)
    want = float(x) + math.log1p(math.exp(-float(x)))
    ulp = 2.0**-48  # of numbers from 16 to 32
    assert abs(float(softplus(x)) - want) <= ulp
    assert abs(float(F.softplus(x)) - want) > 500_000 * ulp
