"""The functions of the layer between its projections, in plain torch. Autograd makes the backward.

16-bit inputs are computed in float32, and the result of each function is rounded once to the inputs' dtype, as in fused kernels.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor

CHUNK = 64
L2_EPS = 1e-6


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """silu of the causal depthwise convolution of x [B, T, C] with weight [C, W] and bias [C].

    `lengths` are the tokens of the sequences along B T, which do not mix.
    """
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
    """The log-decay g = -exp(A_log) softplus(a + dt_bias), in float32, and beta = sigmoid(b), in b's dtype.

    With allow_neg_eigval, beta is doubled.
    """
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
    """o [B, T, HV, V] of the gated delta rule, chunkwise and in float32, with scale K ** -0.5.

    q and k are [B, T, H, K], v is [B, T, HV, V], g and beta are [B, T, HV]. `lengths` are the tokens of the sequences along B T;
    each starts from a state of zeros. The chunks of all sequences are computed side by side; then the first chunks of all sequences
    pass their states to the second ones, and so on. With `deterministic`, nothing is added in an order that may change. Otherwise
    the backward of one gather is torch's index_add, which is atomic on a GPU.
    """
    if not v.numel():
        return v
    size = min(CHUNK, max(lengths))
    place, counts = _chunks(lengths, size)
    place, rows = place.to(v.device), sum(counts) * size

    def chunked(x: Tensor) -> Tensor:
        """[B, T, heads, width] as [chunks, HV, size, width]. Places without a token are zero, which leaves states unchanged."""
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
    # Masked before exp, since the difference is positive above the diagonal, where exp may overflow.
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
        state = state[: len(u)]  # the states of sequences that have a chunk in this step
        fresh = u - w @ state
        outputs.append(read @ state + attention @ fresh)
        state = fade * state + write.mT @ fresh
    o = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    gathered: Tensor = _Gathered.apply(o, place) if deterministic else o.index_select(0, place)
    return gathered.view_as(v).to(v.dtype)


def _chunks(lengths: Sequence[int], size: int) -> tuple[Tensor, list[int]]:
    """The place of each token in chunks of `size`, and how many sequences have a first chunk, a second one, and so on.

    The first chunks of all sequences come first, then the second ones. Among each, the sequences with the most chunks come first.
    """
    needed = [-(-length // size) for length in lengths]
    ranking = sorted(range(len(lengths)), key=lambda sequence: -needed[sequence])
    counts = [sum(chunks > step for chunks in needed) for step in range(max(needed))]
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    rank = torch.empty(len(lengths), dtype=torch.int64).scatter_(0, torch.tensor(ranking), torch.arange(len(lengths)))
    length = torch.tensor(lengths)
    position = torch.arange(sum(lengths)) - torch.repeat_interleave(length.cumsum(0) - length, length)
    chunk = starts[position // size] + torch.repeat_interleave(rank, length)
    return chunk * size + position % size, counts


class _Gathered(torch.autograd.Function):
    """Gathers distinct rows of x. The backward copies them back, where the backward of index_select would add them."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, index: Tensor) -> Tensor:
        ctx.back = x.shape, index  # type: ignore[attr-defined]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        shape, index = ctx.back  # type: ignore[attr-defined]
        return gradients[0].new_zeros(shape).index_copy(0, index, gradients[0]), None
