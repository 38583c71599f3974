"""Outputs and gradients of the delta rules: their names, what an implementation returns, and which are over their bounds."""

import functools

import torch
from torch import Tensor

from oracles.operation import gradient_name
from oracles.tolerance.bound import Bound, bounds
from properties.laws.law import pairs_of
from properties.rules.case import Case
from tests import right
from verify.bench.places import where
from verify.execution.judge import judge

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0")
LINE = "lengths=70+9+0+1 packed=yes heads=2 value_heads=4 value_dim=24 state=random qk_norm=yes seed=3"


def names(operation: str) -> tuple[str, ...]:
    return tuple(name for name in NAMES if (operation, name) != ("delta_rule", "dg"))


def answered(implementation: right.Chunkwise, case: Case) -> dict[str, Tensor]:
    """Outputs and gradients of an implementation, each in the dtype in which it comes."""
    inputs, cotangents = case.inputs(), case.cotangents()
    leaves = {name: inputs[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "state") if inputs[name] is not None}
    results = dict(zip(("o", "final_state"), implementation.run(inputs.replaced(**leaves)), strict=True))
    targets = [name for name, result in results.items() if result.requires_grad and result.numel()]
    gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if targets:
        arguments = [results[name] for name in targets], list(leaves.values()), [cotangents[name] for name in targets]
        gradients = torch.autograd.grad(*arguments, allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        results[gradient_name(name)] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


@functools.lru_cache(8)
def limits_of(case: Case, algorithm: str, chunk: int | None) -> dict[str, Bound]:
    return bounds(case.spec, case.inputs(), case.cotangents(), algorithm, chunk=chunk)


def broken(implementation: right.Chunkwise, case: Case) -> set[str]:
    """The outputs and gradients that have a row over its bound, looked at twice as the judge does."""
    limits = limits_of(case, implementation.algorithm, implementation.chunk)
    results = answered(implementation, case)
    return {
        finding.output
        for finding in judge(pairs_of({name: results[name] for name in limits}, limits), functools.partial(where, case)).findings
    }
