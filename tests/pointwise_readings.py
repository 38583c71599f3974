"""Right implementations of the convolution, the gates and the norms, which `WRONG` and `STORED` make wrong by their options."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor

from oracles.operation import Inputs, sequences
from tests.judging import Implementation, Results

# Implementations, and how to read them wrong


def runs_of(x: Inputs) -> list[tuple[int, int]]:
    ends = [0, *itertools.accumulate(sequences(x, "x"))]
    return list(itertools.pairwise(ends))


def without_gradient_at(parameter: Tensor, tokens: int, lost: int | None) -> Tensor:
    """[tokens, ...]: the parameter for each token, whose gradient does not hear of token `lost`."""
    rows = parameter.expand(tokens, *parameter.shape)
    if lost is None:
        return rows
    here = (torch.arange(tokens) == lost).reshape(-1, *[1] * parameter.ndim)
    return torch.where(here, rows.detach(), rows)


def convolve(
    x: Inputs,
    wide: torch.dtype | None = None,
    *,
    flips: bool = False,
    mixes: bool = False,
    first_column: int = 1,
    forgets: bool = False,
    drops_bias: bool = False,
    early_silu: bool = False,
    lost: int | None = None,
    stores: torch.dtype | None = None,
    late_state: bool = False,
) -> Results:
    """The convolution in `wide` (float32), one sequence at a time, taps summed last to first."""
    wide = wide or torch.float32
    tokens, weight, width = x.x.to(wide).flatten(0, 1), x.weight.to(wide), x.weight.shape[-1]
    outputs, finals = [], []
    for row, (start, end) in enumerate(runs_of(x)):
        state = tokens.new_zeros(tokens.shape[-1], width) if x.state is None else x.state[row].to(wide)
        before = state[:, first_column : first_column + width - 1].mT
        if mixes:
            before = torch.cat([before, tokens[:start]])[len(before) + start - (width - 1) :]
        line = torch.cat([before, tokens[start:end]])
        taps = weight.flip(-1) if flips else weight
        y = torch.zeros_like(tokens[start:end])
        for tap in reversed(range(width)):
            y = y + without_gradient_at(taps[:, tap], end - start, lost) * line[tap : tap + end - start]
        y = F.silu(y) if early_silu and x.activation == "silu" else y
        y = y if x.bias is None or drops_bias else y + x.bias.to(wide)
        y = y.to(stores).to(wide) if stores else y
        outputs.append(F.silu(y) if x.activation == "silu" and not early_silu else y)
        columns = torch.zeros_like(state) if forgets else state
        final = torch.cat([columns, tokens[start:end].mT], -1)
        finals.append(final[:, -width - 1 : -1] if late_state else final[:, -width:])
    dtype = x.x.dtype
    y = torch.cat(outputs).reshape(x.x.shape)
    return {"y": y.to(dtype), "final_state": torch.stack(finals).to(dtype)}


def torch_convolve(x: Inputs) -> Results:
    """By torch's convolution, stored in the inputs' dtype, and a silu of its own: what transformers does.

    In float32, as GPUs sum: of half-precision inputs torch on a CPU may sum dx in half precision, 12 times over the bound.
    """
    outputs, tokens, (channels, width) = [], x.x.flatten(0, 1), x.weight.shape
    finals = []
    for row, (start, end) in enumerate(runs_of(x)):
        state = tokens.new_zeros(channels, width) if x.state is None else x.state[row]
        line = torch.cat([state, tokens[start:end].mT], -1)
        y = line[:, width:]
        if end > start:
            bias = None if x.bias is None else x.bias.float()
            y = F.conv1d(line[None, :, 1:].float(), x.weight.float().unsqueeze(1), bias, groups=channels)[0].to(line.dtype)
        outputs.append((F.silu(y) if x.activation == "silu" else y).mT)
        finals.append(line[:, -width:])
    return {"y": torch.cat(outputs).reshape(x.x.shape), "final_state": torch.stack(finals)}


def naive_softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), x from 20 up: what released kernels do, in float32."""
    return torch.where(x <= 20, (1 + x.clamp(max=20).exp()).log(), x)


def gate(
    x: Inputs,
    soft: Callable[[Tensor], Tensor] = naive_softplus,
    *,
    late_bias: bool = False,
    grows: bool = False,
    raw_A: bool = False,
    once: bool = False,
    drops_bias: bool = False,
    lost: int | None = None,
    stores: torch.dtype | None = None,
) -> Results:
    """The gates in float32, the sigmoid by its exponential."""
    a, tokens = x.a.float().flatten(0, 1), x.a.shape[0] * x.a.shape[1]
    A = x.A_log.float() if raw_A else x.A_log.float().exp()
    A = without_gradient_at(A, tokens, lost)
    bias = 0.0 if x.dt_bias is None or drops_bias else without_gradient_at(x.dt_bias.float(), tokens, lost)
    speed = soft(a) + bias if late_bias else soft(a + bias)
    speed = speed.to(stores).float() if stores else speed
    g = (A.unsqueeze(-1) if a.ndim == 3 else A) * speed
    small = (-x.b.float().abs()).exp()
    beta = torch.where(x.b >= 0, 1, small) / (1 + small)
    beta = beta * 2 if x.allow_neg_eigval and not once else beta
    return {"g": (g if grows else -g).reshape(x.a.shape), "beta": beta.to(x.b.dtype)}


def torch_gate(x: Inputs) -> Results:
    """By torch's softplus and, in the inputs' dtype, sigmoid: what transformers does."""
    a = x.a.float() if x.dt_bias is None else x.a.float() + x.dt_bias
    A = x.A_log.float().exp()
    beta = x.b.sigmoid()
    return {"g": -(A.unsqueeze(-1) if a.ndim == 4 else A) * F.softplus(a), "beta": beta * 2 if x.allow_neg_eigval else beta}


def normalise(
    x: Inputs, *, mean: bool = False, floors: bool = False, after_root: bool = False, eps: float | None = None, stores: bool = False
) -> Results:
    """The L2 norm in float32, by a division."""
    wide, eps = x.x.float(), x.eps if eps is None else eps
    squares = wide.square().mean(-1, keepdim=True) if mean else wide.square().sum(-1, keepdim=True)
    norm = (
        squares.sqrt().clamp(min=eps) if floors else squares.clamp(min=1e-30).sqrt() + eps if after_root else (squares + eps).sqrt()
    )
    norm = norm.bfloat16().float() if stores else norm
    return {"y": (wide / norm).to(x.x.dtype)}


class _Stored(torch.autograd.Function):
    """The L2 norm whose backward reads y as it was stored: what flash-linear-attention does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, projected: bool) -> Tensor:  # noqa: FBT001
        rstd = (x.float().flip(-1).square().sum(-1, keepdim=True) + eps).rsqrt()
        y = (x.float() * rstd).to(x.dtype)
        ctx.save_for_backward(y, rstd)
        ctx.projected = projected
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        y, rstd = ctx.saved_tensors
        y, dy = y.float(), cotangents[0].float()
        along = (y * dy).sum(-1, keepdim=True) if ctx.projected else 0.0
        return (dy * rstd - along * y * rstd).to(cotangents[0].dtype), None, None


def stored_norm(x: Inputs, *, projected: bool = True) -> Results:
    return {"y": _Stored.apply(x.x, x.eps, projected)}


def rms_gate(
    x: Inputs,
    *,
    sums: bool = False,
    outside: bool = False,
    gate_first: bool = False,
    plus_one: bool = False,
    eps: float | None = None,
    drops_weight: bool = False,
    sigmoid_gate: bool = False,
    lost: int | None = None,
    stores: torch.dtype | None = None,
    keeps: bool = False,
) -> Results:
    """The gated RMSNorm in float32 throughout, summed last to first: what flash-linear-attention does."""
    eps = x.eps if eps is None else eps
    wide, z, shape = x.x.float(), x.z.float(), x.x.shape
    act = torch.sigmoid(z) if sigmoid_gate else z / (1 + (-z).exp())
    wide = wide * act if gate_first else wide
    squares = wide.flip(-1).square().sum(-1, keepdim=True) / (1 if sums else shape[-1])
    y = wide / (squares.clamp(min=1e-30).sqrt() + eps) if outside else wide / (squares + eps).sqrt()
    y = y.to(stores).float() if stores else y
    if x.weight is not None and not drops_weight:
        weight = x.weight.float() + 1 if plus_one else x.weight.float()
        weights = without_gradient_at(weight, shape[0] * shape[1], lost).unflatten(0, shape[:2])
        y = y * (weights.unsqueeze(-2) if wide.ndim == 4 else weights)
    y = y if gate_first else y * act
    return {"y": y if keeps else y.to(x.x.dtype)}


def transformers_rms_gate(x: Inputs) -> Results:
    """The normalised x is rounded to the inputs' dtype, then weighed in it, then gated in float32."""
    y = x.x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + x.eps)).to(x.x.dtype)
    y = y if x.weight is None else x.weight * y
    return {"y": (y * F.silu(x.z.float())).to(x.x.dtype)}


def gate_project(
    x: Inputs,
    *,
    drops_bias: bool = False,
    transposes: bool = False,
    gate_last: bool = False,
    ungated: bool = False,
    lost: int | None = None,
    fused: bool = False,
    **reading: Any,
) -> Results:
    """The gated norm stored in the inputs' dtype and projected by torch's linear; with `fused` it stays in float32."""
    gated = rms_gate(x, keeps=fused, **reading)["y"]
    linear = x.linear.to(gated.dtype)
    if transposes:
        linear = linear.reshape(linear.shape[::-1]).mT
    rows = without_gradient_at(linear, gated.shape[0] * gated.shape[1], lost).unflatten(0, gated.shape[:2])
    y = F.linear(gated, linear) if lost is None else (rows @ gated.unsqueeze(-1)).squeeze(-1)
    if ungated:  # the gradient of the projection is that of the norm without its gate
        bare = rms_gate(x.replaced(z=torch.full_like(x.z, 60.0)), **reading)["y"].detach() / 60
        y = F.linear(gated, linear.detach()) + F.linear(bare, linear) - F.linear(bare, linear.detach())
    y = y if x.bias is None or drops_bias else y + x.bias
    return {"y": (F.silu(y) if gate_last else y).to(x.x.dtype)}


RIGHT: dict[str, dict[str, Implementation]] = {
    "causal_conv1d": {"taps last to first": convolve, "conv1d": torch_convolve},
    "gdn_gate": {"naive softplus": gate, "transformers": torch_gate},
    "kda_gate": {"naive softplus": gate, "transformers": torch_gate},
    "l2norm": {"division": normalise, "y as stored": stored_norm},
    "gated_rms_norm": {"float32": rms_gate, "transformers": transformers_rms_gate},
    "norm_gate_linear": {"stored": gate_project, "float32": functools.partial(gate_project, fused=True)},
}
BFLOAT = torch.bfloat16
WRONG: list[tuple[str, str, Implementation, dict[str, Any]]] = [
    ("causal_conv1d", "flipped taps", convolve, {"flips": True}),
    ("causal_conv1d", "sequences mix", convolve, {"mixes": True}),
    ("causal_conv1d", "the oldest W - 1 columns", convolve, {"first_column": 0}),
    ("causal_conv1d", "final state of zeros and inputs", convolve, {"forgets": True}),
    ("causal_conv1d", "final state without the last input", convolve, {"late_state": True}),
    ("causal_conv1d", "no bias", convolve, {"drops_bias": True}),
    ("causal_conv1d", "silu before the bias", convolve, {"early_silu": True}),
    ("causal_conv1d", "dweight without a token", convolve, {"lost": 1}),
    ("gdn_gate", "softplus before the bias", gate, {"late_bias": True}),
    ("gdn_gate", "no minus", gate, {"grows": True}),
    ("gdn_gate", "A as its logarithm", gate, {"raw_A": True}),
    ("gdn_gate", "beta not doubled", gate, {"once": True}),
    ("gdn_gate", "no bias", gate, {"drops_bias": True}),
    ("gdn_gate", "dA_log without a token", gate, {"lost": 1}),
    ("kda_gate", "softplus before the bias", gate, {"late_bias": True}),
    ("kda_gate", "no minus", gate, {"grows": True}),
    ("kda_gate", "dA_log without a token", gate, {"lost": 1}),
    ("l2norm", "mean of squares", normalise, {"mean": True}),
    ("l2norm", "eps floors the norm", normalise, {"floors": True}),
    ("l2norm", "eps after the root", normalise, {"after_root": True}),
    ("l2norm", "eps ten times as large", normalise, {"eps": 1e-5}),
    ("l2norm", "dx not projected", stored_norm, {"projected": False}),
    ("gated_rms_norm", "sum of squares", rms_gate, {"sums": True}),
    ("gated_rms_norm", "eps after the root", rms_gate, {"outside": True}),
    ("gated_rms_norm", "eps ten times as large", rms_gate, {"eps": 1e-5}),
    ("gated_rms_norm", "gate before the norm", rms_gate, {"gate_first": True}),
    ("gated_rms_norm", "weight + 1", rms_gate, {"plus_one": True}),
    ("gated_rms_norm", "no weight", rms_gate, {"drops_weight": True}),
    ("gated_rms_norm", "sigmoid for silu", rms_gate, {"sigmoid_gate": True}),
    ("gated_rms_norm", "dweight without a token", rms_gate, {"lost": 1}),
    ("norm_gate_linear", "sum of squares", gate_project, {"sums": True}),
    ("norm_gate_linear", "sigmoid for silu", gate_project, {"sigmoid_gate": True}),
    ("norm_gate_linear", "no bias", gate_project, {"drops_bias": True}),
    ("norm_gate_linear", "linear read as its transpose", gate_project, {"transposes": True}),
    ("norm_gate_linear", "silu after the projection too", gate_project, {"gate_last": True}),
    ("norm_gate_linear", "dlinear of the norm without gate", gate_project, {"ungated": True}),
    ("norm_gate_linear", "dlinear without a token", gate_project, {"lost": 4}),
]
STORED: list[tuple[str, Implementation, dict[str, Any]]] = [
    ("causal_conv1d", convolve, {"stores": BFLOAT}),
    ("gdn_gate", gate, {"stores": BFLOAT}),
    ("kda_gate", gate, {"stores": BFLOAT}),
    ("l2norm", normalise, {"stores": True}),
    ("gated_rms_norm", rms_gate, {"stores": BFLOAT}),
    ("norm_gate_linear", gate_project, {"stores": BFLOAT}),
]
