"""What the proofs of several operations share: an implementation's results, and how far they are from the truth."""

import math
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.operation import Inputs, Operation, gradient_name
from oracles.tolerance.bound import Bound, truth

Results = dict[str, Tensor]
Implementation = Callable[[Inputs], Results]
STEPS = (2.0**-13, 2.0**-14)


def differentiable(operation: Operation, inputs: Inputs) -> list[str]:
    """The inputs of a call that have gradients."""
    return [port.name for port in operation.inputs if port.dtype != "index" and inputs.get(port.name) is not None]


def evaluate(operation: Operation, implementation: Implementation, inputs: Inputs, directions: Results) -> Results:
    """Outputs and gradients of an implementation, in its dtypes, by automatic differentiation."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in differentiable(operation, inputs)}
    outputs = implementation(inputs.replaced(**leaves))
    targets = [name for name in directions if outputs[name].requires_grad]
    gradients = torch.autograd.grad(
        [outputs[name] for name in targets],
        list(leaves.values()),
        [directions[name] for name in targets],
        materialize_grads=True,
    )
    result = {name: output.detach() for name, output in outputs.items()}
    return result | {gradient_name(name): gradient for name, gradient in zip(leaves, gradients, strict=True)}


def relative(got: Results, want: Results) -> dict[str, float]:
    """The largest error of each tensor over its largest entry; what is not a number is infinitely far."""
    assert got.keys() == want.keys()
    assert all(got[name].shape == tensor.shape for name, tensor in want.items())
    filled = {name: tensor for name, tensor in want.items() if tensor.numel()}
    sizes = {name: float(tensor.abs().max()) or 1.0 for name, tensor in filled.items()}
    errors = {name: float((got[name] - tensor).abs().max()) / sizes[name] for name, tensor in filled.items()}
    return {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}


def worst(operation: Operation, limits: dict[str, Bound], got: Results) -> tuple[float, str]:
    """The greatest error / allowed of a row, and its tensor; what is not a number is over."""
    ratios = {"nothing": 0.0}
    assert got.keys() == limits.keys()
    for name, limit in limits.items():
        assert got[name].shape == limit.value.shape, name
        error = got[name].double() - limit.value
        size = error.abs() if operation.port(name).scalar_rows else error.norm(dim=-1)
        if size.numel():
            ratios[name] = float((size / limit.allowed).nan_to_num(nan=math.inf).max())
    name = max(ratios, key=ratios.__getitem__)
    return ratios[name], name


def gradcheck(operation: Operation, inputs: Inputs) -> bool:
    """True: differences of the oracle's outputs agree with its gradients in all inputs. GradcheckError where they do not.

    Gradients are compared along random directions. Where they differ, torch would compute whole Jacobians to name an entry; that is
    slow, so we switch it off.
    """
    indices = {
        port.name: inputs[port.name].unsqueeze(0)
        for port in operation.inputs
        if port.dtype == "index" and inputs.get(port.name) is not None
    }
    names = differentiable(operation, inputs)

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = {name: tensor.unsqueeze(0) for name, tensor in zip(names, tensors, strict=True)}
        return tuple(operation.forward(inputs.replaced(**indices, **values), Arithmetic.exact()).values())

    leaves = [inputs[name].detach().double().clone().requires_grad_() for name in names]
    with mock.patch.object(
        sys.modules["torch.autograd.gradcheck"], "_run_slow_mode_and_get_error", return_value="Jacobians differ", create=True
    ):
        return torch.autograd.gradcheck(outputs, leaves, fast_mode=True)


def remainders(operation: Operation, inputs: Inputs, directions: Results) -> list[tuple[Results, list[float]]]:
    """For some directions d, d and J(x + hd) - J(x) for h and h / 2: the tensors of the call move by a fraction of themselves."""

    def objective(x: Inputs) -> float:
        outputs = truth(operation, x)
        return float(sum((outputs[name] * direction).sum() for name, direction in directions.items()))

    generator, start, result = torch.Generator().manual_seed(1), objective(inputs), []
    for _ in range(3):
        toward = {}
        for name in differentiable(operation, inputs):
            x = inputs[name].double()
            toward[name] = (torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1) * x.abs().clamp(max=1.0)
        moved = [inputs.replaced(**{name: inputs[name] + h * direction for name, direction in toward.items()}) for h in STEPS]
        result.append((toward, [objective(there) - start for there in moved]))
    return result


def taylor_order(found: list[tuple[Results, list[float]]], gradients: Results) -> float:
    """How fast J(x + hd) - J(x) - h <dJ, d> falls with h, summed over the directions: 2 if dJ is the gradient."""
    totals = [0.0, 0.0]
    for toward, differences in found:
        slope = float(sum((gradients[gradient_name(name)] * direction).sum() for name, direction in toward.items()))
        for index, h in enumerate(STEPS):
            totals[index] += abs(differences[index] - h * slope)
    return math.log2(totals[0] / totals[1])
