"""A parallel path of one's own: a causal convolution whose tokens context-parallel ranks share.

    gdn-verify check examples/path_adapter.py:OwnConvolution

Each rank has a contiguous piece of the tokens. A convolution of width W looks back W - 1 tokens, so
each rank receives the last W - 1 tokens of the rank before it. The ranks are simulated in one process;
with `--ranks 2` they are two processes.
"""

import torch
from torch import Tensor

from verify import PathAdapter, PathDomain


class AllGather(torch.autograd.Function):
    """The tensors of all ranks along axis 0. In the backward pass each rank gets the sum of its gradients."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.all_gather(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.comm.reduce_scatter(gradient), None


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, cp) -> Tensor:
    """The output [tokens, D] of this rank's tokens x [tokens, D], before the activation, in float32."""
    tokens, reach = len(x), weight.shape[-1] - 1
    before = x.new_zeros(reach, x.shape[-1])
    if cp.size > 1 and reach:
        ends = AllGather.apply(x[-reach:].contiguous(), cp).unflatten(0, (cp.size, reach))
        # Rank 0 needs no tokens, but it must join the collective in the backward pass too.
        before = ends[cp.rank - 1] if cp.rank else before + 0 * ends[0]
    padded = torch.cat([before, x]).float()
    place = cp.rank * tokens + torch.arange(tokens, device=x.device)  # in the whole call
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1]
    y = torch.zeros(x.shape, device=x.device)
    for tap in range(reach + 1):
        back = reach - tap  # how many tokens this tap looks back
        same_sequence = (place - back >= starts).unsqueeze(-1)
        y = y + torch.where(same_sequence, padded[tap : tap + tokens], 0.0) * weight[:, tap].float()
    return y if bias is None else y + bias.float()


class OwnConvolution(PathAdapter):
    """The convolution above; it is called with packed sequences and has no exchange, checkpoint or tensor parallelism."""

    algorithm = "pointwise"
    domain = PathDomain(
        operation="causal_conv1d",
        ranks=4,
        layouts=("contiguous",),
        least_piece=3,  # a rank can pass on only tokens that it has: W - 1 <= 3
        tensor_parallel=False,
        sequence_parallel=False,
        batched=False,
        padded=False,
        exchanges=False,
        counts=False,
        refuses=False,
        checkpoints=False,
        choices=(),
    )

    def run(self, x, place):
        y = convolution(x.x[0], x.weight, x.bias, x.cu_seqlens, place.cp)
        y = torch.nn.functional.silu(y) if x.activation else y
        return y.to(x.x.dtype).unsqueeze(0)
