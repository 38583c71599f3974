"""The gates of the gated delta rule and of KDA, and functions shared with the convolution and the norm.

    g    = -exp(A_log) softplus(a + dt_bias)      log decay, at most 0
    g    = m sigmoid(exp(A_log) (a + dt_bias))    log decay with a lower bound m < 0
    beta = sigmoid(b)                             times 2 with allow_neg_eigval: eigenvalues of the state's map down to -1

Sources: Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464; Kimi Team 2025, arXiv 2510.26692; allow_neg_eigval: Grazzi et al. 2024,
arXiv 2411.12537. In `gdn_gate`, a, g and dt_bias have one number for each head; in `kda_gate`, one for each channel of the key.
A_log and b have one number for each head in both.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oracles.arithmetic.rounding import FUNCTION_BITS, FUNCTION_TERMS, SINGLE, Arithmetic, summed
from oracles.operation import Inputs, Operation, Port, at_least_one, flag


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) to a few roundings, wherever that is a normal number; exp(-x) alone overflows from x = -710 down."""
    return x.clamp(max=0.0).exp() / (1.0 + (-x.abs()).exp())


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)); value and derivative are right to a few roundings.

    F.softplus returns x above 20, which is up to 500,000 ulp off.
    """
    return -torch.nn.functional.logsigmoid(-x)


def shared(parameter: Tensor, shape: torch.Size, arithmetic: Arithmetic, place: str, bits: int = SINGLE) -> Tensor:
    """Expand a parameter, with its runs along axis 0, to `shape`: all tokens share it, and its gradient is a sum over them.

    The sum is taken in float32, of terms that an implementation may have stored in `bits` bits.
    """
    expanded: Tensor = _Shared.apply(parameter, shape, arithmetic, place, bits)
    return expanded


def rounded_sigmoid(x: Tensor, arithmetic: Arithmetic, place: str, bits: int) -> Tensor:
    """Return sigmoid(x) stored in `bits` bits; the backward, y (1 - y), uses y as it was stored."""
    y: Tensor = _Sigmoid.apply(x, arithmetic, place, bits)
    return y


def rounded_silu(x: Tensor, arithmetic: Arithmetic, place: str) -> Tensor:
    """Return x sigmoid(x) in float32."""
    return arithmetic.single(x * rounded_sigmoid(x, arithmetic, f"{place} sigmoid", SINGLE), place)


def of_calls(parameter: Tensor, like: Tensor, calls: Sequence[int] | None, arithmetic: Arithmetic, place: str) -> Tensor:
    """Return the parameter [runs, ...] `shared` by all tokens of `like` [runs, B, T, ...], or with `calls` by those of each call.

    `calls` has the numbers of tokens of several calls that lie side by side along T. The parameter is then [runs, calls, ...], and
    the gradient of each row is the sum over the tokens of its own call, which rounds as often as in that call alone.
    """
    if calls is None:
        return shared(parameter[:, None, None], like.shape, arithmetic, place)
    pairs = zip(parameter.unbind(1), like.split(list(calls), 2), strict=True)
    return torch.cat([shared(row[:, None, None], part.shape, arithmetic, place) for row, part in pairs], 2)


def forward(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return g [runs, B, T, HV] or [runs, B, T, HV, K], shaped as x.a, and beta [runs, B, T, HV].

    x has the runs of `arithmetic` along axis 0.
    """
    return {"g": log_decay(x, arithmetic), "beta": write_strength(x, arithmetic)}


def log_decay(x: Inputs, arithmetic: Arithmetic) -> Tensor:
    """Return g, shaped as x.a, from x.a, x.A_log and perhaps x.dt_bias and x.lower_bound.

    If x has `calls`, A_log and dt_bias have one row for each call (see `of_calls`).
    """
    a, channels, calls = arithmetic.input(x.a, "a"), x.a.ndim == 5, x.get("calls")
    if (dt_bias := x.get("dt_bias")) is not None:
        dt_bias = arithmetic.gradient(dt_bias, "ddt_bias", arithmetic.bias)
        a = a + of_calls(dt_bias, a, calls, arithmetic, "dt_bias")
    a = arithmetic.single(a, "a + dt_bias")
    A_log = arithmetic.single(arithmetic.gradient(x.A_log, "dA_log", arithmetic.parameter), "A_log")
    speed = arithmetic.single(A_log.exp(), "exp(A_log)", FUNCTION_TERMS)
    speed = of_calls(speed.unsqueeze(-1) if channels else speed, a, calls, arithmetic, "d exp(A_log)")
    if (lower_bound := x.get("lower_bound")) is not None:
        steep = arithmetic.single(speed * a, "exp(A_log) (a + dt_bias)")
        return arithmetic.single(lower_bound * rounded_sigmoid(steep, arithmetic, "bounded gate", SINGLE), "g")
    soft = softplus(a)
    # Released kernels compute log(1 + exp(a)) in float32, which errs by at least 2^-24 however small the logarithm is.
    above = 1.0 + soft.detach()
    soft = soft + (arithmetic.dither(above, "1 + exp(a)", FUNCTION_BITS) - above)
    soft = arithmetic.single(soft, "softplus", FUNCTION_TERMS)
    return arithmetic.single(-speed * soft, "g")


def write_strength(x: Inputs, arithmetic: Arithmetic) -> Tensor:
    """Return beta, shaped as x.b; x may have allow_neg_eigval."""
    beta = rounded_sigmoid(arithmetic.input(x.b, "b"), arithmetic, "beta", arithmetic.output)
    return 2.0 * beta if x.get("allow_neg_eigval") else beta


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        parameter: Tensor,
        shape: torch.Size,
        arithmetic: Arithmetic,
        place: str,
        bits: int,
    ) -> Tensor:
        ctx.back = parameter.shape, arithmetic, place, bits  # type: ignore[attr-defined]
        return parameter.expand(shape)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        shape, arithmetic, place, bits = ctx.back  # type: ignore[attr-defined]
        (terms,) = cotangents
        left = summed(terms.numel() // max(shape.numel(), 1))
        total = arithmetic.dither(terms, place, min(bits, left)).sum_to_size(shape)
        # If the terms have one sign, the roundings of the partial sums are as large as this; rounding the terms gives less.
        return arithmetic.dither(total, f"{place} total", left), None, None, None, None


class _Sigmoid(torch.autograd.Function):
    """y = sigmoid(x), and its derivative from the stored y.

    With y + e stored, (y + e)(1 - y - e) = sigmoid(x) sigmoid(-x) + e (1 - 2 y - e). This form is exact if e is zero.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, arithmetic: Arithmetic, place: str, bits: int) -> Tensor:
        x = arithmetic.dither(x, f"{place} x", SINGLE)
        y = sigmoid(x)
        stored = arithmetic.dither(arithmetic.flushed(arithmetic.dither(y, f"{place} function", FUNCTION_BITS)), place, bits)
        ctx.save_for_backward(x, y, stored)
        ctx.back = arithmetic, place  # type: ignore[attr-defined]
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, None, None, None]:
        x, y, stored = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place = ctx.back  # type: ignore[attr-defined]
        slope = y * sigmoid(-x) + (stored - y) * (1.0 - y - stored)
        return cotangents[0] * arithmetic.dither(slope, f"{place} slope", FUNCTION_BITS), None, None, None


def negative_bound(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: the lower bound of a log-decay is None or a finite number below 0."""
    bound = inputs.get("lower_bound")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not -math.inf < bound < 0):
        raise ValueError(f"lower_bound must be None or a finite number below 0, got {bound!r}")


def _operation(name: str, channels: str) -> Operation:
    scalar = not channels
    return Operation(
        name,
        (
            Port("a", f"B T HV{channels}", scalar_rows=scalar),
            Port("b", "B T HV", scalar_rows=True),
            Port("A_log", "HV", "parameter", scalar_rows=True),
            Port("dt_bias", f"HV{channels}", "bias", optional=True, scalar_rows=scalar),
        ),
        (Port("g", f"B T HV{channels}", "fp32", scalar_rows=scalar), Port("beta", "B T HV", scalar_rows=True)),
        forward,
        (at_least_one("HV", *channels.split()), flag("allow_neg_eigval"), negative_bound),
        ("allow_neg_eigval", "lower_bound", "calls"),
        parallel=("HV",),
    )


GDN_GATE = _operation("gdn_gate", "")
KDA_GATE = _operation("kda_gate", " K")
