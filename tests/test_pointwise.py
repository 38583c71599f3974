"""The convolution, the gates and the norms: equal to their definitions, their gradients gradients, their bounds sound and sharp.

Every proof is shown to reject a wrong reading, and so is every bound: `convolve`, `gate`, `normalise` and `rms_gate` are
implementations that can be read wrong in the ways that `WRONG` lists.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from oracles import bound
from oracles.bound import _evaluate, bounds, truth
from oracles.conv import CAUSAL_CONV1D, definition, update, with_oldest, without_oldest
from oracles.gates import GDN_GATE, KDA_GATE, shared, sigmoid, softplus
from oracles.norm import EPS, GATED_RMS_NORM, L2NORM, NORM_GATE_LINEAR, Normalised, gated_rms_norm, l2norm, norm_gate_linear
from oracles.operation import Inputs, Operation, gradient_name, sequences
from oracles.rounding import Arithmetic
from tests import wrong_backward
from tests.judging import Implementation, Results, evaluate, gradcheck, remainders, taylor_order, worst

OPERATIONS = {
    operation.name: operation for operation in (CAUSAL_CONV1D, GDN_GATE, KDA_GATE, L2NORM, GATED_RMS_NORM, NORM_GATE_LINEAR)
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXACT = Arithmetic.exact()


# Calls


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform in (-1, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


SHAPES: dict[str, tuple[dict[str, Any], ...]] = {  # few, so that the disturbed runs' grids are made once
    "causal_conv1d": (
        {"lengths": (20,), "D": 6, "W": 4},
        {"lengths": (9, 0, 2, 30), "packed": True, "D": 5, "W": 4},
        {"lengths": (1, 1, 1), "D": 7, "W": 4, "bias": False},
        {"lengths": (2, 25), "packed": True, "D": 4, "W": 3, "state": False},
        {"lengths": (40,), "D": 3, "W": 1},
        {"lengths": (12, 12), "D": 4, "W": 2, "bias": False},
    ),
    "gdn_gate": ({"B": 2, "T": 17, "HV": 3}, {"B": 1, "T": 60, "HV": 2, "bias": False}, {"B": 1, "T": 1, "HV": 8}),
    "kda_gate": (
        {"B": 2, "T": 7, "HV": 3, "K": 4},
        {"B": 1, "T": 30, "HV": 2, "K": 5, "bias": False},
        {"B": 1, "T": 1, "HV": 2, "K": 16},
    ),
    "l2norm": ({"B": 2, "T": 9, "H": 2, "K": 8}, {"B": 1, "T": 20, "H": 3, "K": 1}, {"B": 1, "T": 3, "H": 1, "K": 128}),
    "gated_rms_norm": (
        {"B": 2, "T": 9, "HV": 2, "V": 8},
        {"B": 1, "T": 20, "HV": 3, "V": 1, "bias": False},
        {"B": 1, "T": 5, "HV": 2, "V": 64},
    ),
    "norm_gate_linear": (
        {"B": 2, "T": 9, "D": 8, "E": 5},
        {"B": 1, "T": 20, "D": 1, "E": 1, "bias": False},
        {"B": 1, "T": 5, "D": 64, "E": 3},
    ),
}


def drawn(name: str, seed: int, dtype: torch.dtype) -> tuple[Inputs, Results]:
    """A call of operation `name` and cotangents of its outputs: shapes in turn, options and hard values by the seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[name][seed % len(SHAPES[name])]
    make = functools.partial(rand, generator)
    coin = torch.randint(0, 2, (4,), generator=generator, dtype=torch.bool).tolist()
    if name == "causal_conv1d":
        lengths, channels, width = shape["lengths"], shape["D"], shape["W"]
        batch = (1, sum(lengths)) if shape.get("packed") else (len(lengths), lengths[0])
        x = make(*batch, channels) * torch.tensor([1.0, 30.0, 0.02, 0.0])[torch.arange(batch[1]) // 3 % 4, None]
        state = make(len(lengths), channels, width) if shape.get("state", True) else None
        inputs = Inputs(
            x=3 * x if coin[0] else x,
            weight=make(channels, width),
            bias=2 * make(channels) if shape.get("bias", True) else None,
            state=state,
            cu_seqlens=offsets(lengths) if shape.get("packed") else None,
            activation="silu" if coin[1] else None,
            output_final_state=True,
        )
        directions = {"y": make(*batch, channels), "final_state": make(len(lengths), channels, width)}
    elif name in ("gdn_gate", "kda_gate"):
        heads, last = shape["HV"], ((shape["K"],) if "K" in shape else ())
        rows = (shape["B"], shape["T"], heads)
        reach = torch.tensor([1.0, 10.0, 100.0])[torch.randint(0, 3, rows, generator=generator)]
        inputs = Inputs(
            a=make(*rows, *last) * (reach.unsqueeze(-1) if last else reach),
            b=make(*rows) * reach,
            A_log=make(heads) * 3,
            dt_bias=4 * make(heads, *last) if shape.get("bias", True) else None,
            allow_neg_eigval=coin[0],
        )
        directions = {"g": make(*rows, *last), "beta": make(*rows)}
    else:
        full = tuple(size for axis, size in shape.items() if axis not in ("bias", "E"))
        scale = torch.tensor([1.0, 1e-3, 50.0, 1e-4, 0.0])[torch.randint(0, 5, (*full[:-1], 1), generator=generator)]
        values = {"x": make(*full) * scale, "eps": (1e-6, 1e-5)[coin[0]]}
        if name != "l2norm":
            values |= {"z": make(*full) * (20 if coin[1] else 2), "weight": make(full[-1]) * 2 if shape.get("bias", True) else None}
        out = shape.get("E", full[-1])
        if name == "norm_gate_linear":
            values |= {"linear": make(out, full[-1]) / 8, "bias": make(out) if shape.get("bias", True) else None}
        inputs, directions = Inputs(**values), {"y": make(*full[:-1], out)}
    return cast(OPERATIONS[name], inputs, directions, dtype)


def cast(operation: Operation, inputs: Inputs, directions: Results, dtype: torch.dtype) -> tuple[Inputs, Results]:
    """The call in `dtype`, and in float32 where a port says so even of half-precision calls."""

    def kind(name: str) -> torch.dtype:
        return torch.float32 if name == "fp32" and dtype != torch.float64 else dtype

    tensors = {port.name: inputs[port.name].to(kind(port.dtype)) for port in operation.inputs if inputs.get(port.name) is not None}
    return inputs.replaced(**tensors), {
        name: direction.to(kind(operation.port(name).dtype)) for name, direction in directions.items()
    }


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


def telling(name: str, dtype: torch.dtype) -> tuple[Inputs, Results]:
    """A call on which every wrong reading shows: a sequence shorter than W between others, eps that matters, all arguments."""
    make = functools.partial(rand, torch.Generator().manual_seed(11))
    if name == "causal_conv1d":
        inputs = Inputs(
            x=make(1, 21, 5),
            weight=make(5, 4),
            bias=make(5),
            state=make(3, 5, 4),
            cu_seqlens=torch.tensor([0, 8, 10, 21]),
            activation="silu",
            output_final_state=True,
        )
        directions = {"y": make(1, 21, 5), "final_state": make(3, 5, 4)}
    elif name in ("gdn_gate", "kda_gate"):
        last = (4,) if name == "kda_gate" else ()
        inputs = Inputs(
            a=3 * make(2, 10, 3, *last),
            b=3 * make(2, 10, 3),
            A_log=1 + make(3),
            dt_bias=make(3, *last),
            allow_neg_eigval=True,
        )
        directions = {"g": make(2, 10, 3, *last), "beta": make(2, 10, 3)}
    else:
        x = make(2, 10, 2, 8) * torch.tensor([1.0, 1e-3, 3e-4, 1e-2, 10.0]).repeat(2)[:, None, None]
        if name == "norm_gate_linear":
            more = {"z": 2 * make(2, 10, 8), "weight": make(8), "linear": make(6, 8), "bias": make(6)}
            inputs, directions = Inputs(x=x[:, :, 0], eps=1e-6, **more), {"y": make(2, 10, 6)}
            return cast(OPERATIONS[name], inputs, directions, dtype)
        more = {"z": 2 * make(2, 10, 2, 8), "weight": make(8)} if name == "gated_rms_norm" else {}
        inputs, directions = Inputs(x=x, eps=1e-6, **more), {"y": make(2, 10, 2, 8)}
    return cast(OPERATIONS[name], inputs, directions, dtype)


def named(parameter: object) -> str:
    """The identity of a parameter in a test's name: its words."""
    return parameter if isinstance(parameter, str) else ""


# The convolution is its definition


def whole_numbers(lengths: tuple[int, ...], packed: bool, seed: int, **kinds: Any) -> tuple[Inputs, Results]:  # noqa: FBT001
    """A call of small integers in float64, where sums are exact in any order, and cotangents alike."""
    generator = torch.Generator().manual_seed(seed)
    channels, width = kinds["channels"], kinds["width"]

    def some(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).double()

    batch = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    inputs = Inputs(
        x=some(*batch, channels),
        weight=some(channels, width),
        bias=some(channels) if kinds["bias"] else None,
        state=some(len(lengths), channels, width) if kinds["state"] else None,
        cu_seqlens=offsets(lengths) if packed else None,
        activation=kinds["activation"],
        output_final_state=True,
    )
    return inputs, {"y": some(*batch, channels), "final_state": some(len(lengths), channels, width)}


def by_definition(x: Inputs) -> Results:
    """Every sequence by itself, token by token."""
    tokens, outputs, finals = x.x.flatten(0, 1), [], []
    for row, (start, end) in enumerate(runs_of(x)):
        state = torch.zeros_like(x.weight) if x.state is None else x.state[row]
        y, final = definition(tokens[start:end], state, x.weight, x.bias, x.activation)
        outputs.append(y)
        finals.append(final)
    return {"y": torch.cat(outputs).reshape(x.x.shape), "final_state": torch.stack(finals)}


KINDS = st.fixed_dictionaries(
    {
        "channels": st.integers(1, 3),
        "width": st.integers(1, 5),
        "bias": st.booleans(),
        "state": st.booleans(),
        "activation": st.sampled_from([None, "silu"]),
    }
)
LENGTHS = st.one_of(
    st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple), st.just(True)),
    st.tuples(st.builds(lambda length, batch: (length,) * batch, st.integers(0, 7), st.integers(1, 3)), st.just(False)),
)
WIDE_KINDS = {"channels": 3, "width": 4, "bias": True, "state": True, "activation": None}


def agree(got: Results, want: Results, *, exactly: bool) -> bool:
    """Equal to the bit, or within 1e-13 of numbers that are of order 1 to 100."""
    assert got.keys() == want.keys()
    pairs = [(got[name], want[name]) for name in want]
    if exactly:
        return all(torch.equal(one, other) for one, other in pairs)
    return all(one.shape == other.shape and torch.allclose(one, other, rtol=1e-13, atol=1e-13) for one, other in pairs)


@settings(max_examples=60)
@given(lengths=LENGTHS, kinds=KINDS, seed=st.integers(0, 2**16))
@example(lengths=((0, 2, 0, 7), True), kinds=WIDE_KINDS, seed=1)
@example(lengths=((0,), False), kinds=WIDE_KINDS, seed=2)
@example(lengths=((5, 1), True), kinds={**WIDE_KINDS, "width": 1}, seed=3)
def test_convolution_is_its_definition_forward_and_backward(
    lengths: tuple[tuple[int, ...], bool], kinds: dict[str, Any], seed: int
) -> None:
    inputs, directions = whole_numbers(*lengths, seed, **kinds)
    CAUSAL_CONV1D.check(inputs)
    want = evaluate(CAUSAL_CONV1D, by_definition, inputs, directions)
    assert agree(truth(CAUSAL_CONV1D, inputs, directions), want, exactly=inputs.activation is None)


@pytest.mark.parametrize("reading", [entry[3] for entry in WRONG if entry[0] == "causal_conv1d"], ids=str)
def test_wrong_reading_of_the_convolution_is_not_the_definition(reading: dict[str, Any]) -> None:
    kinds = {**WIDE_KINDS, "activation": "silu" if "early_silu" in reading else None}
    inputs, directions = whole_numbers((6, 2, 5), True, 4, **kinds)
    want = evaluate(CAUSAL_CONV1D, by_definition, inputs, directions)
    right, wrong = (
        evaluate(CAUSAL_CONV1D, functools.partial(convolve, wide=torch.float64, **options), inputs, directions)
        for options in ({}, reading)
    )
    assert agree(right, want, exactly=False)
    assert not agree(wrong, want, exactly=False)


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), kinds=KINDS, seed=st.integers(0, 2**16))
def test_packed_equals_separate(lengths: tuple[int, ...], kinds: dict[str, Any], seed: int) -> None:
    inputs, directions = whole_numbers(lengths, True, seed, **{**kinds, "activation": None})
    packed = truth(CAUSAL_CONV1D, inputs, directions)
    apart = []
    for row, (start, end) in enumerate(runs_of(inputs)):
        one = inputs.replaced(
            x=inputs.x[:, start:end], state=None if inputs.state is None else inputs.state[row : row + 1], cu_seqlens=None
        )
        toward = {"y": directions["y"][:, start:end], "final_state": directions["final_state"][row : row + 1]}
        apart.append(truth(CAUSAL_CONV1D, one, toward))
    for name, tensor in packed.items():
        pieces = [one[name] for one in apart]
        whole = sum(pieces) if name in ("dweight", "dbias") else torch.cat(pieces, 1 if name in ("y", "dx") else 0)
        assert torch.equal(tensor, whole), name


@settings(max_examples=40)
@given(length=st.integers(0, 9), data=st.data(), kinds=KINDS, seed=st.integers(0, 2**16))
def test_convolution_may_be_cut_anywhere_if_the_state_is_carried_backward_too(
    length: int, data: st.DataObject, kinds: dict[str, Any], seed: int
) -> None:
    at = data.draw(st.integers(0, length))
    inputs, directions = whole_numbers((length,), False, seed, **{**kinds, "state": True, "activation": None})
    whole = truth(CAUSAL_CONV1D, inputs, directions)
    head = inputs.replaced(x=inputs.x[:, :at])
    tail = inputs.replaced(x=inputs.x[:, at:], state=truth(CAUSAL_CONV1D, head)["final_state"])
    after = truth(CAUSAL_CONV1D, tail, {"y": directions["y"][:, at:], "final_state": directions["final_state"]})
    before = truth(CAUSAL_CONV1D, head, {"y": directions["y"][:, :at], "final_state": after["dh0"]})
    joined = {name: torch.cat([before[name], after[name]], 1) for name in ("y", "dx")}
    joined |= {name: before[name] + after[name] for name in whole if name in ("dweight", "dbias")}
    assert agree({**joined, "final_state": after["final_state"], "dh0": before["dh0"]}, whole, exactly=True)


def test_cut_shows_a_state_that_is_not_carried() -> None:
    inputs, _ = whole_numbers((9,), False, 5, **WIDE_KINDS)
    whole = truth(CAUSAL_CONV1D, inputs)
    tail = truth(CAUSAL_CONV1D, inputs.replaced(x=inputs.x[:, 7:]))
    assert not torch.equal(tail["y"], whole["y"][:, 7:])
    assert not torch.equal(tail["final_state"], whole["final_state"])


@settings(max_examples=40)
@given(count=st.integers(1, 4), kinds=KINDS, seed=st.integers(0, 2**16))
def test_update_is_the_convolution_of_one_token(count: int, kinds: dict[str, Any], seed: int) -> None:
    inputs, _ = whole_numbers((1,) * count, False, seed, **{**kinds, "state": True})
    want = truth(CAUSAL_CONV1D, inputs)
    y, state = update(inputs.x[:, 0], inputs.state, inputs.weight, inputs.bias, inputs.activation)
    assert agree({"y": y.unsqueeze(1), "final_state": state}, want, exactly=inputs.activation is None)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_column_0_of_a_state_is_read_by_nothing_but_the_final_state_of_no_tokens(
    lengths: tuple[int, ...], width: int, seed: int
) -> None:
    inputs, directions = whole_numbers(lengths, True, seed, **{**WIDE_KINDS, "width": width})
    got = truth(CAUSAL_CONV1D, inputs, directions)
    short = without_oldest(inputs.state)
    assert short.shape == (len(lengths), 3, width - 1)
    other = truth(CAUSAL_CONV1D, inputs.replaced(state=with_oldest(short)), directions)
    filled = [row for row, length in enumerate(lengths) if length]
    assert torch.equal(other["y"], got["y"])
    assert torch.equal(other["final_state"][filled], got["final_state"][filled])
    assert torch.equal(without_oldest(other["final_state"]), without_oldest(got["final_state"]))
    assert not got["dh0"][filled][..., 0].any()


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


@pytest.mark.parametrize("name", POINTWISE)
def test_operation_is_its_formula(name: str) -> None:
    for seed in range(12):
        inputs, _ = drawn(name, seed, torch.float64)
        OPERATIONS[name].check(inputs)
        # In float64 a + dt_bias rounds, and softplus then errs by |a| times that.
        exact = inputs.replaced(a=inputs.a.float().double(), dt_bias=None) if "a" in inputs else inputs
        assert off(truth(OPERATIONS[name], exact), in_scalars(name, exact), reach_of(name, exact)) <= SCALAR_LIMIT, seed


OF_GRADIENTS = {"lost", "projected", "ungated"}
FORWARD = [entry for entry in WRONG if entry[0] in POINTWISE and not OF_GRADIENTS & entry[3].keys()]


@pytest.mark.parametrize(("name", "wrong", "implementation", "reading"), FORWARD, ids=named)
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


@pytest.mark.parametrize("name", OPERATIONS)
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


@pytest.mark.parametrize(
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


# Gradients


@pytest.mark.parametrize("name", OPERATIONS)
def test_taylor_remainders_of_the_truth_are_of_second_order(name: str) -> None:
    inputs, directions = telling(name, torch.float64)
    right, found = truth(OPERATIONS[name], inputs, directions), remainders(OPERATIONS[name], inputs, directions)
    assert taylor_order(found, right) > 1.9
    for gradient in (gradient_name(port.name) for port in OPERATIONS[name].inputs if port.name in inputs):
        wrong = {**right, gradient: right[gradient] * 1.01}
        assert taylor_order(found, wrong) < 1.5, gradient


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradcheck_accepts_every_input(name: str) -> None:
    inputs, _ = drawn(name, 1 if name == "causal_conv1d" else 0, torch.float64)
    assert gradcheck(OPERATIONS[name], inputs)


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name in OPERATIONS for wrong in wrong_backward.OF[name]])
@pytest.mark.slow_after_first
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


# The bounds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_run_0_of_the_disturbed_arithmetic_is_the_truth_and_the_others_are_not(name: str, dtype: str) -> None:
    inputs, directions = telling(name, DTYPES[dtype])
    want = truth(OPERATIONS[name], inputs, directions)
    got = _evaluate(OPERATIONS[name], inputs, directions, Arithmetic.of("pointwise", dtype, runs=3))
    in_order = name != "causal_conv1d"  # whose dx is the same sum in another order
    assert agree({key: runs[0] for key, runs in got.items()}, want, exactly=in_order)
    same = {key for key, runs in got.items() if torch.equal(runs[1], runs[0]) or torch.equal(runs[2], runs[1])}
    assert same == ({"final_state"} if name == "causal_conv1d" else set()), "the final state is copied, everything else rounds"


@pytest.mark.parametrize("name", OPERATIONS)
def test_half_precision_rounds_alike_where_the_layer_calls_it(name: str) -> None:
    inputs, directions = telling(name, torch.bfloat16)
    alone, within = (
        _evaluate(OPERATIONS[name], inputs, directions, Arithmetic.of(algorithm, "bf16", runs=4))
        for algorithm in ("pointwise", "chunkwise")
    )
    assert agree(alone, within, exactly=True)
    single = _evaluate(OPERATIONS[name], inputs, directions, Arithmetic.of("pointwise", "fp32", runs=4))
    assert not agree(alone, single, exactly=True)


def test_gradient_of_a_shared_parameter_errs_by_its_terms_and_not_by_its_sum() -> None:
    arithmetic = Arithmetic.of("pointwise", "fp32", runs=9)
    parameter = torch.ones(9, 1, 3, dtype=torch.float64, requires_grad=True)
    terms = rand(torch.Generator().manual_seed(2), 1, 500, 3).expand(9, 500, 3)
    terms = torch.cat([terms, -terms], 1)  # they cancel: the sum is zero, and what float32 makes of it is not
    (gradient,) = torch.autograd.grad(shared(parameter, terms.shape, arithmetic, "d"), parameter, terms)
    assert (gradient[0].abs() < 1e-12).all()
    spread = gradient[1:].square().mean(0).sqrt()
    reach = (
        terms[0].square().sum(0).sqrt() * 1000**0.5
    )  # the terms are rounded by this many times 2^-24, of which 0.4 is the spread
    assert ((spread > 0.2 * 2.0**-24 * reach) & (spread < 2.0 * 2.0**-24 * reach)).all(), spread / reach * 2.0**24


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.slow
def test_bounds_hold_for_right_implementations(name: str, record_property: Callable[[str, object], None]) -> None:
    found: dict[str, tuple[float, str, int]] = {}
    for seed in range(200):
        dtype = tuple(DTYPES)[seed // 7 % 3]
        inputs, directions = drawn(name, seed, DTYPES[dtype])
        limits = bounds(OPERATIONS[name], inputs, directions, "pointwise")
        for right, implementation in RIGHT[name].items():
            ratio, where = worst(OPERATIONS[name], limits, evaluate(OPERATIONS[name], implementation, inputs, directions))
            found[f"{right} {dtype}"] = max(found.get(f"{right} {dtype}", (0.0, "", 0)), (ratio, where, seed))
    line = "; ".join(f"{label} {ratio:.2f} ({where}, {seed})" for label, (ratio, where, seed) in found.items())
    record_property(f"error / allowed, {name}", line)
    print(f"{name}: error / allowed at most {line}")
    assert len(found) == 6
    assert max(ratio for ratio, _, _ in found.values()) <= 1.0, line
    assert min(ratio for ratio, _, _ in found.values()) > 0.01, f"a bound a hundred times too wide: {line}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "wrong", "implementation", "reading"), WRONG, ids=lambda parameter: parameter if isinstance(parameter, str) else ""
)
@pytest.mark.slow_after_first
def test_bound_rejects_a_wrong_implementation(
    name: str, wrong: str, implementation: Implementation, reading: dict[str, Any], dtype: str
) -> None:
    operation = OPERATIONS[name]
    inputs, directions = telling(name, DTYPES[dtype])
    limits = bounds(operation, inputs, directions, "pointwise")
    assert worst(operation, limits, evaluate(operation, implementation, inputs, directions))[0] <= 1.0
    ratio, _ = worst(operation, limits, evaluate(operation, functools.partial(implementation, **reading), inputs, directions))
    assert ratio > 5.0, f"{wrong}: {ratio}"


@pytest.mark.parametrize(("name", "implementation", "reading"), STORED, ids=named)
def test_bound_rejects_what_was_stored_in_bfloat16_on_the_way_of_a_float32_call(
    name: str, implementation: Implementation, reading: dict[str, Any]
) -> None:
    operation = OPERATIONS[name]
    inputs, directions = telling(name, torch.float32)
    limits = bounds(operation, inputs, directions, "pointwise")
    got = evaluate(operation, functools.partial(implementation, **reading), inputs, directions)
    assert worst(operation, limits, got)[0] > 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_bound_rejects_zeros_one_zeroed_row_and_a_shift_by_a_token(name: str, dtype: str) -> None:
    operation = OPERATIONS[name]
    inputs, directions = telling(name, DTYPES[dtype])
    limits = bounds(operation, inputs, directions, "pointwise")
    right = {key: limit.value for key, limit in limits.items()}
    assert worst(operation, limits, right)[0] == 0.0
    for key, value in right.items():
        largest = value.flatten(0, -2) if not operation.port(key).scalar_rows and value.ndim > 1 else value.flatten()
        row = int(largest.flatten(1).norm(dim=1).argmax()) if largest.ndim > 1 else int(largest.abs().argmax())
        zeroed = largest.clone()
        zeroed[row] = 0.0
        token = 1 if value.ndim > 2 and operation.port(key).axes.startswith("B T") else 0
        for wrong in (torch.zeros_like(value), zeroed.reshape(value.shape), value.roll(1, token)):
            assert worst(operation, limits, {**right, key: wrong})[0] > 1.0, key


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.parallel])
def test_call_may_be_cut_along_its_parallel_axes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, directions = telling(name, torch.float32)
    whole = bounds(OPERATIONS[name], inputs, directions, "pointwise")
    monkeypatch.setattr(bound, "_BATCH", {"cpu": 1})
    cut = bounds(OPERATIONS[name], inputs, directions, "pointwise")
    assert agree(
        {key: limit.value for key, limit in cut.items()}, {key: limit.value for key, limit in whole.items()}, exactly=False
    )


# Contracts

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("causal_conv1d", {"weight": torch.zeros(1, 4)}, r"weight must have D = 5 like .*, got shape \(1, 4\) for \[D, W\]"),
    ("causal_conv1d", {"weight": torch.zeros(5, 1, 4)}, r"weight must have axes \[D, W\], got shape \(5, 1, 4\)"),
    ("causal_conv1d", {"weight": torch.zeros(5, 0), "state": None}, r"W must be at least 1, got 0"),
    ("causal_conv1d", {"bias": torch.zeros(1)}, r"bias must have D = 5 like .*, got shape \(1,\)"),
    ("causal_conv1d", {"state": torch.zeros(3, 5, 3)}, r"state must have W = 4 like .*, got shape \(3, 5, 3\)"),
    ("causal_conv1d", {"state": torch.zeros(2, 5, 4)}, r"state must have N = 3, one per sequence, got shape \(2, 5, 4\)"),
    ("causal_conv1d", {"cu_seqlens": torch.tensor([0, 8, 20])}, r"cu_seqlens must end at the token count 21, got 20"),
    ("causal_conv1d", {"x": torch.zeros(2, 21, 5)}, r"cu_seqlens needs B = 1, .* got B = 2"),
    (
        "causal_conv1d",
        {"x": torch.zeros(1, 21, 5, dtype=torch.int64)},
        r"x must be floating point of 16, 32 or 64 bits, got torch.int64",
    ),
    ("causal_conv1d", {"x": None}, r"x must be a tensor, got NoneType"),
    ("causal_conv1d", {"activation": "swish"}, r"activation must be None or 'silu', got 'swish'"),
    ("causal_conv1d", {"output_final_state": 1}, r"output_final_state must be True or False, got 1"),
    ("gdn_gate", {"A_log": torch.zeros(1)}, r"A_log must have HV = 3 like .*, got shape \(1,\)"),
    ("gdn_gate", {"dt_bias": torch.zeros(1)}, r"dt_bias must have HV = 3 like .*, got shape \(1,\)"),
    ("gdn_gate", {"b": torch.zeros(2, 1, 3)}, r"b must have T = 10 like .*, got shape \(2, 1, 3\)"),
    ("gdn_gate", {"allow_neg_eigval": "yes"}, r"allow_neg_eigval must be True or False, got 'yes'"),
    ("kda_gate", {"dt_bias": torch.zeros(12)}, r"dt_bias must have axes \[HV, K\], got shape \(12,\)"),
    ("kda_gate", {"dt_bias": torch.zeros(3, 1)}, r"dt_bias must have K = 4 like .*, got shape \(3, 1\)"),
    ("kda_gate", {"a": torch.zeros(2, 10, 3, 0), "dt_bias": None}, r"K must be at least 1, got 0"),
    ("l2norm", {"eps": 0.0}, r"eps must be a finite number above 0, got 0.0"),
    ("l2norm", {"eps": math.nan}, r"eps must be a finite number above 0, got nan"),
    ("l2norm", {"eps": math.inf}, r"eps must be a finite number above 0, got inf"),
    ("l2norm", {"eps": True}, r"eps must be a finite number above 0, got True"),
    ("l2norm", {"eps": "1e-6"}, r"eps must be a finite number above 0, got '1e-6'"),
    ("l2norm", {"x": torch.zeros(2, 10, 2, 0)}, r"K must be at least 1, got 0"),
    ("gated_rms_norm", {"z": torch.zeros(2, 10, 1, 8)}, r"z must have HV = 2 like .*, got shape \(2, 10, 1, 8\)"),
    ("gated_rms_norm", {"weight": torch.zeros(1)}, r"weight must have V = 8 like .*, got shape \(1,\)"),
    ("gated_rms_norm", {"eps": -1e-6}, r"eps must be a finite number above 0, got -1e-06"),
    ("norm_gate_linear", {"z": torch.zeros(2, 10, 1)}, r"z must have D = 8 like .*, got shape \(2, 10, 1\)"),
    ("norm_gate_linear", {"linear": torch.zeros(6, 1)}, r"linear must have D = 8 like .*, got shape \(6, 1\)"),
    ("norm_gate_linear", {"bias": torch.zeros(1)}, r"bias must have E = 6 like .*, got shape \(1,\)"),
    ("norm_gate_linear", {"linear": torch.zeros(0, 8), "bias": None}, r"E must be at least 1, got 0"),
]


def test_plain_functions_refuse_shapes_that_would_broadcast() -> None:
    x, state, weight, bias = torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(3, 4), torch.ones(3)
    update(x, state, weight, bias)
    for wrong, message in (
        ((x, state[:1], weight, bias), r"state must have shape \(2, 3, 4\) for x of \(2, 3\), got \(1, 3, 4\)"),
        ((x, state, weight[:1], bias), r"weight must have shape \(3, 4\) for x of \(2, 3\), got \(1, 4\)"),
        ((x, state, weight, bias[:1]), r"bias must have shape \(3,\) for x of \(2, 3\), got \(1,\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            update(*wrong)
    gated_rms_norm(x, x, bias)
    with pytest.raises(ValueError, match=r"^z must have the shape of x, \(2, 3\), got \(2, 1\)$"):
        gated_rms_norm(x, x[:, :1], bias)
    with pytest.raises(ValueError, match=r"^weight must have shape \(3,\), got \(1,\)$"):
        gated_rms_norm(x, x, bias[:1])


DEFINITIONS: list[tuple[Callable[[], object], str]] = [
    (lambda: update(*COLUMNS, None, "relu"), "activation must be None or 'silu', got 'relu'"),
    (
        lambda: definition(torch.ones(0, 2), torch.ones(2, 3), torch.ones(2, 4), None),
        "state must have shape (2, 4) for x of (2,)",
    ),
    (lambda: definition(torch.ones(2), *COLUMNS[1:], None), "x must be [T, D], got shape (2,)"),
    (lambda: update(*COLUMNS[:2], torch.ones(4), None), "x must be [..., D] and weight [D, W], got shapes (2,) and (4,)"),
    (lambda: l2norm(torch.ones(2), math.nan), "eps must be a finite number above 0, got nan"),
    (lambda: l2norm(torch.ones(2), torch.ones(2)), "eps must be a finite number above 0, got tensor([1., 1.])"),  # type: ignore[arg-type]
    (
        lambda: norm_gate_linear(torch.ones(2), torch.ones(2), None, torch.ones(3, 1)),
        "linear must have shape (E, 2), got (3, 1)",
    ),
    (
        lambda: norm_gate_linear(torch.ones(2), torch.ones(2), None, torch.ones(3, 2), torch.ones(1)),
        "bias must have shape (3,), got (1,)",
    ),
    (lambda: gated_rms_norm(torch.ones(2), torch.ones(2), None, -1e-6), "eps must be a finite number above 0, got -1e-06"),
]
COLUMNS = torch.ones(2), torch.ones(2, 4), torch.ones(2, 4)


@pytest.mark.parametrize(("call", "message"), DEFINITIONS)
def test_definitions_refuse_what_they_would_broadcast_or_ignore(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize(("name", "wrong", "message"), REFUSED, ids=named)
def test_illegal_input_is_refused(name: str, wrong: dict[str, Any], message: str) -> None:
    inputs, _ = telling(name, torch.float32)
    OPERATIONS[name].check(inputs)
    with pytest.raises(ValueError, match=f"^{message}"):
        OPERATIONS[name].check(inputs.replaced(**wrong))
