"""What the proofs of several operations share: an implementation's results, and how far they are from the truth."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracles.bound import Bound
from oracles.operation import Inputs, Operation, gradient_name

Results = dict[str, Tensor]
Implementation = Callable[[Inputs], Results]


def evaluate(operation: Operation, implementation: Implementation, inputs: Inputs, directions: Results) -> Results:
    """Outputs and gradients of an implementation, in its dtypes, by automatic differentiation."""
    names = [port.name for port in operation.inputs if port.dtype != "index" and inputs.get(port.name) is not None]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
    outputs = implementation(inputs.replaced(**leaves))
    targets = [name for name in directions if outputs[name].requires_grad]
    gradients = torch.autograd.grad(
        [outputs[name] for name in targets],
        list(leaves.values()),
        [directions[name] for name in targets],
        materialize_grads=True,
    )
    result = {name: each.detach() for name, each in outputs.items()}
    return result | {gradient_name(name): each for name, each in zip(leaves, gradients, strict=True)}


def relative(got: Results, want: Results) -> dict[str, float]:
    """The largest error of each tensor over its largest entry; what is not a number is infinitely far."""
    assert got.keys() == want.keys()
    assert all(got[name].shape == each.shape for name, each in want.items())
    filled = {name: each for name, each in want.items() if each.numel()}
    sizes = {name: float(each.abs().max()) or 1.0 for name, each in filled.items()}
    errors = {name: float((got[name] - each).abs().max()) / sizes[name] for name, each in filled.items()}
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
