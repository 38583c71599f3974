"""What the layer computes between its projections, in plain torch: forward by hand, backward by autograd.

16-bit inputs are computed in float32 and each function's result is rounded once to the inputs' dtype, as fused kernels do.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor

CHUNK = 64
L2_EPS = 1e-6


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """silu(causal depthwise convolution) of x [B, T, C] by weight [C, W]; sequences of `lengths` along B T do not mix."""
    tokens = x.float().flatten(0, 1)
    start = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    position = torch.arange(len(tokens)) - torch.repeat_interleave(start, torch.tensor(lengths))
    position = position.unsqueeze(-1).to(x.device)
    total = tokens * weight[:, -1].float()
    for back in range(1, min(weight.shape[-1], len(tokens))):
        earlier = F.pad(tokens[:-back], (0, 0, back, 0))
        total = total + torch.where(position >= back, earlier, 0.0) * weight[:, -1 - back].float()
    if bias is not None:
        total = total + bias.float()
    return F.silu(total).to(x.dtype).view_as(x)


def l2norm(x: Tensor) -> Tensor:
    """x * rsqrt(sum(x^2) + eps) over the last axis."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, allow_neg_eigval: bool) -> tuple[Tensor, Tensor]:
    """The log decay g, in float32, and beta, in b's dtype."""
    g = -A_log.exp() * F.softplus(a.float() + dt_bias)
    beta = torch.sigmoid(b.float()) * (2.0 if allow_neg_eigval else 1.0)
    return g, beta.to(b.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) * silu(z) over the last axis."""
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight.float() * normed * F.silu(z.float())).to(x.dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], *, qk_norm: bool, deterministic: bool
) -> Tensor:
    """o [B, T, HV, V] of q, k [B, T, H, K], v [B, T, HV, V], g, beta [B, T, HV], chunkwise, float32; scale K ** -0.5.

    Sequences of `lengths` along B T each start from a state of zeros. Chunks of all sequences are computed beside each other; then
    the first chunks of all sequences carry their states to the second ones, and so on. `deterministic`: nothing is added in an
    order that may change; else one gather goes back as torch's index_add, atomic on a GPU.
    """
    if not v.numel():
        return v
    size = min(CHUNK, max(lengths))
    place, counts = _chunks(lengths, size)
    place, rows = place.to(v.device), sum(counts) * size

    def chunked(x: Tensor) -> Tensor:
        """[B, T, heads, width] as [chunks, HV, size, width]; what no token fills is zero, and moves nothing."""
        flat = x.float().flatten(0, 1)
        padded: Tensor = flat.new_zeros(rows, *flat.shape[1:]).index_copy(0, place, flat)
        heads: Tensor = padded.repeat_interleave(v.shape[2] // x.shape[2], 1).unflatten(0, (-1, size))
        return heads.transpose(1, 2)

    q, k = q.float(), k.float()
    if qk_norm:
        q, k = l2norm(q), l2norm(k)
    q, k, v_, g, beta = (chunked(x) for x in (q * q.shape[-1] ** -0.5, k, v, g.unsqueeze(-1), beta.unsqueeze(-1)))
    decay = g.cumsum(2)
    lower = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    # Masked before exp: above the diagonal the difference is positive, and exp may overflow.
    between = (decay - decay.mT).masked_fill(~lower, -torch.inf).exp()
    system = torch.eye(size, device=v.device) + (beta * between * (k @ k.mT)).tril(-1)
    both = torch.cat([beta * v_, beta * decay.exp() * k], -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    parts = (
        *solved.split([v.shape[-1], k.shape[-1]], -1),
        decay.exp() * q,
        between * (q @ k.mT),
        (decay[:, :, -1:] - decay).exp() * k,
        decay[:, :, -1:].exp(),
    )
    state = solved.new_zeros(counts[0], v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for u, w, read, attention, write, fade in zip(*(part.split(counts) for part in parts), strict=True):
        state = state[: len(u)]  # those of sequences that have a chunk here
        fresh = u - w @ state
        outputs.append(read @ state + attention @ fresh)
        state = fade * state + write.mT @ fresh
    o = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    gathered: Tensor = _Gathered.apply(o, place) if deterministic else o.index_select(0, place)
    return gathered.view_as(v).to(v.dtype)


def _chunks(lengths: Sequence[int], size: int) -> tuple[Tensor, list[int]]:
    """Where each token stands in chunks of `size`, and how many sequences have a first chunk, a second one, ...

    The first chunks of all sequences come first, then the second ones; the sequences with the most chunks come first in each.
    """
    needed = [-(-length // size) for length in lengths]
    ranking = sorted(range(len(lengths)), key=lambda sequence: -needed[sequence])
    counts = [sum(each > step for each in needed) for step in range(max(needed))]
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    rank = torch.empty(len(lengths), dtype=torch.int64).scatter_(0, torch.tensor(ranking), torch.arange(len(lengths)))
    length = torch.tensor(lengths)
    position = torch.arange(sum(lengths)) - torch.repeat_interleave(length.cumsum(0) - length, length)
    chunk = starts[position // size] + torch.repeat_interleave(rank, length)
    return chunk * size + position % size, counts


class _Gathered(torch.autograd.Function):
    """Distinct rows of x; backward puts them back, where index_select's own adds them."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, index: Tensor) -> Tensor:
        ctx.back = x.shape, index  # type: ignore[attr-defined]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        shape, index = ctx.back  # type: ignore[attr-defined]
        return gradients[0].new_zeros(shape).index_copy(0, index, gradients[0]), None
