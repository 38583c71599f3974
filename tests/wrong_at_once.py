"""Implementations of thousands of packed sequences, right ones and wrong ones from a late sequence on."""

from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.zoo.base import Chunkwise
from verify.zoo.modules import Conv


def starts_of(x: Inputs) -> tuple[Tensor, Tensor]:
    """The first token and the length of each packed sequence."""
    return x.cu_seqlens[:-1].long(), x.cu_seqlens.diff().long()


class ConvAtOnce(Adapter):
    """A packed convolution that gathers the inputs of each tap for all tokens."""

    algorithm = "pointwise"
    domain = ModuleDomain("causal_conv1d", batched=False, backward=False, dtypes=("fp32",))
    together: ClassVar[int] = 2**31

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        starts, lengths = starts_of(x)
        taps = x.weight.shape[1]
        state = x.x.new_zeros(len(lengths), x.x.shape[2], taps) if x.state is None else x.state
        state = self.initial(state).mT
        ends = starts + taps * (1 + torch.arange(len(lengths)))  # of the states, each of which lies before its sequence
        row = torch.repeat_interleave(lengths)
        place = torch.arange(x.x.shape[1]) + taps * (1 + row)
        line = x.x.new_empty(taps * len(lengths) + x.x.shape[1], x.x.shape[2])
        line[place] = x.x[0]
        line[(ends[:, None] - taps + torch.arange(taps)).flatten()] = state.flatten(0, 1)
        window = torch.arange(1 - taps, 1)
        y = torch.einsum("twd,dw->td", line[place[:, None] + window], x.weight)
        y = y if x.bias is None else y + x.bias
        y = torch.nn.functional.silu(y) if x.activation == "silu" else y
        final = line[(ends + lengths - 1)[:, None] + window].mT
        return y[None], final if x.output_final_state else None

    def initial(self, state: Tensor) -> Tensor:
        """The initial states, those of the first sequences again for each further `together` ones."""
        return state[torch.arange(len(state)) % self.together]


class ConvInLaunches(ConvAtOnce):
    """Programs, one for a packed sequence, are launched 65,535 at a time, each with the first states."""

    together = 2**16 - 1


class RuleAtOnce(Adapter):
    """A packed gated delta rule that computes the same token of all sequences at once."""

    algorithm = "recurrent"
    domain = Domain(batched=False, backward=False, dtypes=("fp32",), grouped_heads=False)
    together: ClassVar[int] = 2**31

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        starts, lengths = starts_of(x)
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if x.qk_norm else t for t in (x.q[0], x.k[0]))
        scale = q.shape[-1] ** -0.5 if x.scale is None else x.scale
        v, g, beta = x.v[0], x.g[0].float(), x.beta[0].float()
        shape = (len(lengths), v.shape[1], q.shape[2], v.shape[2])
        state = x.q.new_zeros(shape) if x.state is None else self.initial(x.state)
        o = torch.zeros_like(v)
        for step in range(int(lengths.max())):
            going = lengths > step
            at = starts[going] + step
            decayed = state[going] * g[at].exp()[..., None, None]
            change = beta[at][..., None] * (v[at] - torch.einsum("nhk,nhkv->nhv", k[at], decayed))
            new = decayed + torch.einsum("nhk,nhv->nhkv", k[at], change)
            state = state.index_copy(0, going.nonzero().squeeze(-1), new)
            o[at] = scale * torch.einsum("nhk,nhkv->nhv", q[at], new)
        return o[None], state if x.output_final_state else None

    def initial(self, state: Tensor) -> Tensor:
        """The initial states, those of the first sequences again for each further `together` ones."""
        return state[torch.arange(len(state)) % self.together]


class RuleInLaunches(RuleAtOnce):
    """Programs, one for a packed sequence, are launched 65,535 at a time, each with the first states."""

    together = 2**16 - 1


class RuleOf12Bits(RuleAtOnce):
    """Numbers of packed sequences have 12 bits."""

    together = 2**12


def numbered_in_blocks(x: Inputs, row: int) -> int:
    """A packed sequence's number, counted in blocks of 1,024: wrongly from that of the block before, not of all before."""
    return row if x.cu_seqlens is None or row < 1024 else 1024 + row % 1024


class ConvCarryOfOneBlock(Conv):
    """Initial states are read by such a number."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, numbered_in_blocks(x, row))


class CarryOfOneBlock(Chunkwise):
    """The same for a rule."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, numbered_in_blocks(x, row))
