"""Norms: the L2 norm of queries and keys, and the gated RMSNorm of the delta rule's output, alone or with the projection after it.

    y = x / sqrt(sum(x^2) + eps)                                    l2norm: eps inside the root
    y = x / max(sqrt(sum(x^2)), eps)                                l2norm with form "max": eps is the least norm
    y = weight x / sqrt(mean(x^2) + eps) silu(z)                    gated_rms_norm: norm before gate
    y = linear (weight x / sqrt(mean(x^2) + eps) silu(z)) + bias    norm_gate_linear

The first two work over the last axis, in each head separately. norm_gate_linear has one head: its mean is over all D channels of
a token, which the matrix `linear` [E, D] then projects. silu(z) = z sigmoid(z). The gated norm may have sigmoid(z) as its gate.
It may have a residual, which is added to x first, and may return the sum x + residual too. eps must be above 0, because a row of
zeros would otherwise be 0 / 0.

With form "max", a row shorter than eps becomes x / eps, so its gradient is dx = dy / eps. A longer row becomes x / |x|, whose
gradient is across x. The gradient jumps where |x| = eps; there we take that of x / |x|, as torch's clamp does. A row of zeros has
dx = dy / eps, and with eps inside the root dx = dy / sqrt(eps).
"""

import dataclasses
import math

import torch
from torch import Tensor

from oracles.arithmetic.rounding import SINGLE, Arithmetic, summed
from oracles.gates import rounded_sigmoid, rounded_silu, shared, sigmoid
from oracles.operation import Inputs, Operation, Port, at_least_one

EPS = 1e-6
GATINGS = ("silu", "sigmoid")
NORM_FORMS = ("inside", "max")  # eps is inside the root, or is the least norm
RSTD_BITS = SINGLE - 1  # more than one rounding: a sum, a root and a division, or two products


def l2norm(x: Tensor, eps: float = EPS, form: str = "inside") -> Tensor:
    """Return x * rsqrt(sum(x^2) + eps) over the last axis; each head's vector gets norm 1, or less where eps matters.

    With form "max", return x / max(|x|, eps). ValueError if eps is not a finite number above 0, or for another form.
    """
    _check_eps(eps)
    _check_form(form)
    if form == "max":
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / norm.clamp(min=eps)
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor | None, eps: float = EPS) -> Tensor:
    """Return weight * x * rsqrt(mean(x^2) + eps) * silu(z), shaped as x and z [..., V]; weight is [V], or None for ones.

    ValueError for other shapes, or if eps is not a finite number above 0.
    """
    _check_eps(eps)
    if z.shape != x.shape:
        raise ValueError(f"z must have the shape of x, {tuple(x.shape)}, got {tuple(z.shape)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (z * sigmoid(z))
    return y if weight is None else weight * y


def norm_gate_linear(
    x: Tensor, z: Tensor, weight: Tensor | None, linear: Tensor, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """Return y [..., E]: the projection of gated_rms_norm(x, z, weight, eps) [..., D] by linear [E, D], plus bias [E] or nothing.

    ValueError for other shapes, or if eps is not a finite number above 0.
    """
    gated = gated_rms_norm(x, z, weight, eps)
    if linear.ndim != 2 or linear.shape[1:] != x.shape[-1:]:
        raise ValueError(f"linear must have shape (E, {x.shape[-1]}), got {tuple(linear.shape)}")
    if bias is not None and bias.shape != linear.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(linear.shape[:1])}, got {tuple(bias.shape)}")
    y = gated @ linear.mT
    return y if bias is None else y + bias


class Normalised(torch.autograd.Function):
    """L2 norm whose result y is stored; the backward, rstd (dy - y (y.dy)), uses y and dy as stored and rounds each product.

    dx is the component of dy across x. If there is one channel, or if dy points along x, dx consists of roundings only, so each of
    them has its own place. With the sums divided by `count`, the number of channels, this is the RMS norm.

    `kept` is x before it was stored, if a kernel may compute rstd from that. Then y and rstd do not belong to the same x, and what
    storing changed is in dx.

    With form "max", rstd = 1 / max(|x|, eps). The norm rounds before it is compared with eps, so rows whose norm is eps up to
    rounding get either gradient.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        arithmetic: Arithmetic,
        place: str,
        eps: float = EPS,
        count: int = 1,
        kept: Tensor | None = None,
        form: str = "inside",
    ) -> Tensor:
        squares = (x if kept is None else kept).square().sum(-1, keepdim=True) / count
        if form == "max":
            norm = arithmetic.dither(squares.sqrt(), f"{place} norm", RSTD_BITS)
            rstd, short = norm.clamp(min=eps).reciprocal(), norm < eps
        else:
            total = squares + eps
            rstd, short = (_begun_with_eps(x, squares, eps, total, arithmetic) if count == 1 else total).rsqrt(), None
        rstd = arithmetic.dither(rstd, f"{place} rstd", RSTD_BITS)
        y = arithmetic.dither(arithmetic.dither(x * rstd, f"{place} product", SINGLE), place)
        ctx.save_for_backward(y, rstd)
        ctx.back = arithmetic, place, count, short  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place, count, short = ctx.back  # type: ignore[attr-defined]
        dy = arithmetic.dither(cotangents[0], f"{place} dy")
        along = arithmetic.dither((y * dy).sum(-1, keepdim=True) / count, f"{place} y.dy", summed(y.shape[-1]))
        along = along if short is None else along.masked_fill(short, 0.0)  # the rstd of a short row is a constant
        across = arithmetic.dither(dy * rstd, f"{place} dy rstd", SINGLE) - arithmetic.dither(
            along * y * rstd, f"{place} y rstd", RSTD_BITS
        )
        return across, None, None, None, None, None, None


def _begun_with_eps(x: Tensor, squares: Tensor, eps: float, total: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return squares + eps; in one run of a few as a loop in float32 adds them that begins with eps, where eps is the larger part.

    There all additions round on the grid of eps, and squares of a few bits, such as those of bfloat16, round to one side: the sum
    of 512 errs by up to 485 units of 2^-24 if they are equal, and by up to 55 if they are not. Begun with zero it errs by up to 2.
    Squares that add up to more than eps err alike in both.
    """
    for run in arithmetic.in_order:
        below = (squares.narrow(arithmetic.axis, run, 1) > 0) & (squares.narrow(arithmetic.axis, run, 1) < eps)
        if bool(below.any()):
            added = torch.full_like(below, eps, dtype=torch.float32)
            for channel in x.narrow(arithmetic.axis, run, 1).float().split(1, -1):
                added += channel.square()
            found = total.narrow(arithmetic.axis, run, 1)
            found.copy_(torch.where(below, added.to(total.dtype), found))
    return total


def forward_l2norm(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return y [runs, B, T, H, K], shaped as x.x; x has the runs of `arithmetic` along axis 0."""
    storage = dataclasses.replace(arithmetic, stored=arithmetic.output)
    return {"y": Normalised.apply(arithmetic.input(x.x, "x"), storage, "y", _eps(x))}


def forward_gated_rms_norm(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return the y of `forward_gated_rms_norm_of_sum`."""
    return {"y": forward_gated_rms_norm_of_sum(x, arithmetic)["y"]}


def forward_gated_rms_norm_of_sum(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return y and sum [runs, B, T, HV, V], shaped as x.x and x.z; x has the runs of `arithmetic` along axis 0.

    x may have weight [V], residual [B, T, HV, V] and gating ("silu" or "sigmoid").

    An implementation may keep float32 throughout (flash-linear-attention), or store the normalised x and its product with the
    weight in the inputs' dtype (transformers). The same holds in the backward, where the terms of the weight's gradient may be
    stored too.
    """
    single, storage = (dataclasses.replace(arithmetic, stored=bits) for bits in (SINGLE, arithmetic.output))
    total, kept = arithmetic.input(x.x, "x"), None
    if (residual := x.get("residual")) is not None:
        kept = arithmetic.single(total + arithmetic.input(residual, "residual"), "x + residual")
        total = storage.operand(kept, "sum stored")
    y = Normalised.apply(total, single, "normalised", _eps(x), x.x.shape[-1], kept)
    y = storage.operand(y, "normalised, stored")
    if (weight := x.get("weight")) is not None:
        weight = arithmetic.input(weight, "weight")[:, None, None, None]
        weights = shared(weight, y.shape, arithmetic, "dweight", arithmetic.output)
        y = storage.operand(arithmetic.single(weights * y, "weighed"), "weighed, stored")
    z, gating = arithmetic.input(x.z, "z"), x.get("gating", "silu")
    gate = rounded_silu(z, arithmetic, "silu") if gating == "silu" else rounded_sigmoid(z, arithmetic, "sigmoid", SINGLE)
    return {"y": arithmetic.result(y * gate, "y"), "sum": arithmetic.result(total, "sum")}


def known_gating(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: the function of the gate is one of GATINGS; absent means silu."""
    if (gating := inputs.get("gating", "silu")) not in GATINGS:
        raise ValueError(f"gating must be one of {', '.join(GATINGS)}, got {gating!r}")


def forward_norm_gate_linear(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return y [runs, B, T, E]; x has the runs of `arithmetic` along axis 0.

    x has x, z [B, T, D] and linear [E, D]. It may have weight [D], bias [E] and eps. The gated norm and its cotangent are stored in
    the inputs' dtype, as operands of the products. An implementation may store the product before it adds the bias.
    """
    head = {name: x[name].unsqueeze(3) for name in ("x", "z")}
    gated = forward_gated_rms_norm(Inputs(**head, weight=x.get("weight"), eps=x.get("eps")), arithmetic)["y"].squeeze(3)
    gated = dataclasses.replace(arithmetic, stored=arithmetic.output).use(gated, "d gated norm")
    products = dataclasses.replace(arithmetic, product=min(arithmetic.product, SINGLE))  # sums in float32, in half precision too
    y = products.multiply(gated.flatten(1, 2), arithmetic.input(x.linear, "linear").mT, "linear").unflatten(1, gated.shape[1:3])
    if (bias := x.get("bias")) is not None:
        bias = arithmetic.input(bias, "bias")[:, None, None]
        y = arithmetic.result(y, "product stored") + shared(bias, y.shape, arithmetic, "dbias")
    return {"y": arithmetic.result(y, "y")}


def _eps(x: Inputs) -> float:
    return EPS if x.get("eps") is None else float(x.eps)


def positive_eps(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: eps is a finite number above 0; None or absent means EPS."""
    if (eps := inputs.get("eps")) is not None:
        _check_eps(eps)


def known_norm(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: qk_norm_eps is a finite number above 0, and qk_norm_form one of NORM_FORMS. Absent means EPS inside the root."""
    _check_eps(inputs.get("qk_norm_eps", EPS), "qk_norm_eps")
    _check_form(inputs.get("qk_norm_form", NORM_FORMS[0]), "qk_norm_form")


def norm_of(inputs: Inputs) -> dict[str, object]:
    """Return qk_norm_eps and qk_norm_form of a call, for the call of the rule in it; without those that the call leaves out."""
    return {name: inputs[name] for name in ("qk_norm_eps", "qk_norm_form") if name in inputs}


def _check_form(form: object, name: str = "form") -> None:
    if form not in NORM_FORMS:
        raise ValueError(f"{name} must be one of {', '.join(NORM_FORMS)}, got {form!r}")


def _check_eps(eps: object, name: str = "eps") -> None:
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0.0 < eps < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {eps!r}")


L2NORM = Operation(
    "l2norm",
    (Port("x", "B T H K"),),
    (Port("y", "B T H K"),),
    forward_l2norm,
    (at_least_one("H", "K"), positive_eps),
    ("eps",),
    parallel=("H",),
)
GATED_RMS_NORM = Operation(
    "gated_rms_norm",
    (
        *(Port("x", "B T HV V"), Port("z", "B T HV V"), Port("weight", "V", optional=True, scalar_rows=True)),
        Port("residual", "B T HV V", optional=True),
    ),
    (Port("y", "B T HV V"),),
    forward_gated_rms_norm,
    (at_least_one("HV", "V"), positive_eps, known_gating),
    ("eps", "gating", "returns_sum"),
)
GATED_RMS_NORM_OF_SUM = dataclasses.replace(
    GATED_RMS_NORM, outputs=(*GATED_RMS_NORM.outputs, Port("sum", "B T HV V")), forward=forward_gated_rms_norm_of_sum
)
NORM_GATE_LINEAR = Operation(
    "norm_gate_linear",
    (
        Port("x", "B T D"),
        Port("z", "B T D"),
        Port("weight", "D", optional=True, scalar_rows=True),
        Port("linear", "E D"),
        Port("bias", "E", optional=True, scalar_rows=True),
    ),
    (Port("y", "B T E"),),
    forward_norm_gate_linear,
    (at_least_one("D", "E"), positive_eps),
    ("eps",),
)
