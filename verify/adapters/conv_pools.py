"""The pool of convolution states of a serving library: made of a case's states, updated in place by a kernel, and read again.

Serving libraries keep the states of all requests in one tensor [P, D, W - 1]. A request has a slot of it. The slots of a call are
neither the first ones nor in the order of its sequences, and the last slot of the pool is one of them. Slot 0 is nobody's: SGLang's
allocator does not hand it out, and vLLM calls it the null block. All other slots are nobody's either, and hold NaN.

For speculative decoding, vLLM's slots have more columns, of which the state is a part: `first` says where it begins.
"""

import dataclasses

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from verify.adapters.serving_kernels import Serving


@dataclasses.dataclass(frozen=True)
class ConvPool:
    """A pool of states [P, D, C], with C of W - 1 or more, the slot of each sequence, int32 [N], and W - 1."""

    states: Tensor
    slots: Tensor
    columns: int

    @classmethod
    def of(
        cls, x: Inputs, *, cleared: bool, channels_last: bool = False, spare: int = 0, first: Tensor | None = None
    ) -> "ConvPool":
        """Return a new pool for the call `x` of a convolution.

        A sequence without an initial state has a slot that the allocator has cleared, or else one that holds NaN, as if another
        request had left it there. A sequence without tokens always has a cleared slot, because kernels do not touch it. With
        `channels_last`, the channels of a column lie side by side in memory, otherwise the columns of a channel. Slots have `spare`
        columns more than a state, which hold NaN; `first` is the first column of each sequence's state, int64 [N], by default 0.
        """
        lengths, (channels, taps) = sequences(x, "x"), x.weight.shape
        count, columns = len(lengths), taps - 1 + spare
        slots = 2 * torch.arange(count, 0, -1, dtype=torch.int32, device=x.x.device)
        shape = (2 * count + 1, columns, channels) if channels_last else (2 * count + 1, channels, columns)
        states = torch.full(shape, float("nan"), dtype=x.x.dtype, device=x.x.device)
        pool = cls(states.mT if channels_last else states, slots, taps - 1)
        here = pool.states[slots.long()]
        if x.state is not None:
            here.scatter_(-1, pool._columns(here, first), x.state.detach())
        else:
            new = torch.tensor([cleared or not length for length in lengths], device=x.x.device)
            here[new] = here[new].scatter(-1, pool._columns(here, first)[new], 0)
        pool.states[slots.long()] = here
        return pool

    def final(self, first: Tensor | None = None) -> Tensor:
        """Return the states after the call, [N, D, W - 1], which begin at the columns `first`, int64 [N], by default 0.

        RuntimeError if the kernel wrote to a slot of no sequence.
        """
        others = torch.ones(len(self.states), dtype=torch.bool, device=self.states.device)
        others[self.slots.long()] = False
        changed = (others & ~self.states.isnan().flatten(1).all(-1)).nonzero().flatten().tolist()
        if changed:
            raise RuntimeError(f"the kernel wrote to slot {changed[0]} of the pool, which no sequence has")
        here = self.states[self.slots.long()]
        return here.gather(-1, self._columns(here, first))

    def _columns(self, here: Tensor, first: Tensor | None) -> Tensor:
        """Return the columns [N, D, W - 1] of the states in their slots `here` [N, D, C]."""
        first = torch.zeros_like(self.slots, dtype=torch.int64) if first is None else first
        places = first.unsqueeze(-1) + torch.arange(self.columns, device=here.device)
        return places.unsqueeze(1).expand(-1, here.shape[1], -1)


def offsets(x: Inputs) -> Tensor:
    """Return where each sequence begins in the tokens of all sequences, and where the last ends: int32 [N + 1]."""
    if x.cu_seqlens is not None:
        starts: Tensor = x.cu_seqlens.to(torch.int32)
    else:
        count, length = x.x.shape[:2]
        starts = torch.arange(count + 1, dtype=torch.int32, device=x.x.device) * length
    return starts


class ServingConv(Serving):
    """Base of adapters of the causal convolutions of a serving library.

    The kernels multiply an input and a weight in the inputs' dtype and add the products in float32. They read the strides of every
    tensor but the bias, whose channels must lie side by side.
    """

    algorithm = "pointwise"
    rounds_products = True
    channels_last = False  # how the pool lies in memory, see `ConvPool.of`

    def prompts(self, x: Inputs, *more: object, **padding: int) -> tuple[Tensor, Tensor]:
        """Call `causal_conv1d_fn` on prompts, packed. A batch is packed here."""
        pool = ConvPool.of(x, cleared=False, channels_last=self.channels_last)
        y = self.module().causal_conv1d_fn(
            x.x.flatten(0, 1).mT,
            x.weight,
            bias(x),
            pool.states,
            offsets(x),
            *more,
            cache_indices=pool.slots,
            has_initial_state=torch.full(pool.slots.shape, x.state is not None, device=x.x.device),
            activation=x.activation,
            **padding,
        )
        return y.mT.reshape(x.x.shape), pool.final()

    def steps(self, x: Inputs, tokens: Tensor, **padding: int) -> tuple[Tensor, Tensor]:
        """Call `causal_conv1d_update` on `tokens`, which are `x.x` or a copy: one token of each request, or a draft of several."""
        pool = ConvPool.of(x, cleared=True, channels_last=self.channels_last)
        single = tokens.shape[1] == 1
        y = self.module().causal_conv1d_update(
            tokens[:, 0] if single else tokens.mT,
            pool.states,
            x.weight,
            bias(x),
            x.activation,
            conv_state_indices=pool.slots,
            **padding,
        )
        return y.unsqueeze(1) if single else y.mT, pool.final()


def bias(x: Inputs) -> Tensor | None:
    """The bias with its channels side by side, or None."""
    return None if x.bias is None else x.bias.contiguous()
