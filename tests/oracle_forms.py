"""The definition of the delta rules, head by head, the forms in which the oracles compute it, and calls for their tests."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.norm import EPS, l2norm
from oracles.operation import Inputs, gradient_name, sequences
from oracles.operations import RULES
from oracles.rule.gated_delta import definition
from oracles.tolerance import evaluation
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import REMEMBERING, cases

Results = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
TENSORS = ("q", "k", "v", "g", "beta", "state")
# The definition's forms: what `truth` computes in chunks of any size (None: of least work), and at runs = 1 the two classes
# that round; where channels decay apart, chunks are powers of two.
EXACT = (("exact", None), ("exact", 1), ("exact", 16), ("exact", 37), ("exact", 64))
SMALLEST = {"cpu": 1, "cuda": 1}  # bytes: one chunk a segment
FORMS = (*EXACT, ("recurrent", None), ("chunkwise", 16), ("chunkwise", 64), ("chunkwise", 128))


# The definition, applied to every head of every sequence


def floored(x: Tensor) -> Tensor:
    """F.normalize: eps floors the norm."""
    return torch.nn.functional.normalize(x, dim=-1, eps=EPS)


def mean_eps(x: Tensor) -> Tensor:
    """eps is added to the mean of squares."""
    return x * (x.square().sum(-1, keepdim=True) + EPS * x.shape[-1]).rsqrt()


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the contract is read: the rule of one head, its norm and gates, a value head's key head, what a sequence starts from."""

    rule: Rule = definition
    norm: Callable[[Tensor], Tensor] = l2norm
    gate: Callable[[Tensor], Tensor] = lambda g: g
    tiled: bool = False
    leaks: bool = False


RIGHT = Reading()


def by_definition(inputs: Inputs, cotangents: Results, reading: Reading = RIGHT) -> Results:
    """Outputs and gradients in float64, one head of one sequence at a time, differentiated by autograd."""
    leaves = {name: inputs[name].double().requires_grad_() for name in TENSORS if inputs[name] is not None}
    x = dict(leaves)
    if inputs.qk_norm:
        x |= {name: reading.norm(x[name]) for name in ("q", "k")}
    x |= {name: x[name].flatten(0, 1) for name in x if name != "state"}
    x["g"] = reading.gate(x["g"]) if "g" in x else torch.zeros_like(x["beta"])
    (heads, width), (value_heads, value_width) = inputs.q.shape[2:], inputs.v.shape[2:]
    scale = width**-0.5 if inputs.scale is None else inputs.scale
    outputs, finals, start = [], [], 0
    for row, length in enumerate(sequences(inputs, "q")):
        at = slice(start, start + length)
        start += length
        columns, ends = [], []
        for head in range(value_heads):
            key = head % heads if reading.tiled else head // (value_heads // heads)
            state = x["state"][row, head] if "state" in x else torch.zeros(width, value_width, dtype=torch.float64)
            if reading.leaks and row:
                state = state + finals[-1][head]
            keys, values = (x[name][at, key] for name in ("q", "k")), (x[name][at, head] for name in ("v", "g", "beta"))
            o, end = reading.rule(*keys, *values, state, scale)
            columns.append(o)
            ends.append(end)
        outputs.append(torch.stack(columns, 1))
        finals.append(torch.stack(ends))
    result = {"o": torch.cat(outputs).reshape(inputs.v.shape), "final_state": torch.stack(finals)}
    total = sum(((result[name] * cotangent.double()).sum() for name, cotangent in cotangents.items()), torch.zeros(()))
    zeros = [torch.zeros_like(leaf) for leaf in leaves.values()]
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True) if total.requires_grad else zeros
    result |= {gradient_name(name): gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach() for name, tensor in result.items()}


def form(operation: str, inputs: Inputs, cotangents: Results | None, algorithm: str = "exact", chunk: int | None = None) -> Results:
    """Outputs and gradients of one form of the oracle, in exact arithmetic."""
    arithmetic = dataclasses.replace(Arithmetic.exact(), algorithm=algorithm, chunk=chunk)
    return {name: runs[0] for name, runs in evaluation.evaluate(RULES[operation], inputs, cotangents, arithmetic).items()}


def of(operation: str, case: Case) -> Case:
    return dataclasses.replace(case, operation=operation)


# Largest error of a tensor over its largest entry; 650 cases an operation measured, ordinary: no decay beyond 10 tokens, beta up to
# 1, no correlated or repeated tokens, no single channels. With 16 tokens and heads or more 4.0e-15, the classes at runs = 1
# 5.8e-15. Of fewer, the largest entry of dg or dbeta may itself be what is left of a sum whose terms cancel: 5.4e-14.
RELATIVE_LIMIT, FEW_SCALARS_LIMIT = 1e-14, 1e-13


ORDINARY = cases(
    Domain(key_dims=(2, 256)),
    longest=150,
    total=150,
    gate=REMEMBERING,
    beta=("ordinary", "one", "edges"),
    values=("ordinary", "scaled"),
)


def small_tensors(shapes: Sequence[Sequence[int]], seed: int) -> tuple[Tensor, ...]:
    """q, k, v, g, beta, state of these shapes; g is negative."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * 2 - 1 for shape in shapes]
    drawn[3] = -drawn[3].abs()
    return tuple(tensor.requires_grad_() for tensor in drawn)


def packed(tokens: int, count: int, gates: int, seed: int = 0) -> tuple[Tensor, ...]:
    """One key head for two value heads, K = 2 and V = 3, as `chunkwise.delta_rule` takes them."""
    return small_tensors([(tokens, 1, 2), (tokens, 1, 2), (tokens, 2, 3), (tokens, 2, gates), (tokens, 2), (count, 2, 2, 3)], seed)
