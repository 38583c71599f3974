"""Oracles whose outputs are right and whose gradients are not: what proves gradients must reject each when run alone."""

from typing import Any

import torch
from torch import Tensor

from oracles import conv, gates, norm
from oracles.rule import chunkwise

Gradients = tuple[Tensor | None, ...]
SOFTPLUS = gates.softplus
RULE, SHARED, WINDOWS = chunkwise._Call.backward, gates._Shared.backward, conv._Windows.backward


def slope_of_one(x: Tensor) -> Tensor:
    return x + (SOFTPLUS(x) - x).detach()


def sigmoid_alone(ctx: Any, dy: Tensor) -> Gradients:
    _, y, _ = ctx.saved_tensors
    return dy * y, None, None, None


def loses_a_row(ctx: Any, terms: Tensor) -> Gradients:
    """Without the first row along axis 1: a token of the convolution, the batch's first row of the other operations."""
    rows = torch.arange(terms.shape[1]).reshape(-1, *[1] * (terms.ndim - 2))
    return SHARED(ctx, terms.where(rows > 0, 0.0))


def late(ctx: Any, dy: Tensor) -> Gradients:
    dline, dweight, _ = WINDOWS(ctx, dy)
    return dline.roll(1, 1), dweight, None


def loses_a_tap(ctx: Any, dy: Tensor) -> Gradients:
    dline, dweight, _ = WINDOWS(ctx, dy)
    return dline, dweight * (torch.arange(dweight.shape[-1]) > 0), None


def unprojected(ctx: Any, dy: Tensor) -> Gradients:
    _, rstd = ctx.saved_tensors
    return dy * rstd, None, None, None, None, None, None


def drops_the_state(*arguments: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    tokens, dstate = RULE(*arguments)
    return tokens, torch.zeros_like(dstate)


WRONG: dict[str, tuple[object, str, Any]] = {
    "softplus": (gates, "softplus", slope_of_one),
    "sigmoid": (gates._Sigmoid, "backward", sigmoid_alone),
    "parameter": (gates._Shared, "backward", loses_a_row),
    "dx": (conv._Windows, "backward", late),
    "dweight": (conv._Windows, "backward", loses_a_tap),
    "norm": (norm.Normalised, "backward", unprojected),
    "state": (chunkwise._Call, "backward", drops_the_state),
}
GATES = ("softplus", "sigmoid", "parameter")
OF: dict[str, tuple[str, ...]] = {
    "causal_conv1d": ("sigmoid", "parameter", "dx", "dweight"),
    "gdn_gate": GATES,
    "kda_gate": GATES,
    "l2norm": ("norm",),
    "gated_rms_norm": ("sigmoid", "parameter", "norm"),
    "norm_gate_linear": ("sigmoid", "parameter", "norm"),
}
