"""Adapters of functions that have parameters which their domains leave out. The functions are in this file."""

import itertools
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.interface import Unsupported
from verify.zoo.base import Layered

Answer = tuple[Tensor, Tensor | None]


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: list[int], states: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The gated delta rule on [T, H, *], for sequences that begin at `starts`."""
    rows, ends = [], []
    for (start, end), first in zip(itertools.pairwise(starts), states, strict=True):
        state = first
        for t in range(start, end):
            state = g[t].exp()[:, None, None] * state
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + beta[t][:, None, None] * torch.einsum("hk,hv->hkv", k[t], error)
            rows.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
        ends.append(state)
    return torch.stack(rows), torch.stack(ends)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_norm: bool = False,  # noqa: FBT001, FBT002
) -> Answer:
    """A right one: it takes everything that it has a parameter for."""
    if qk_norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    sequences = len(cu_seqlens) - 1 if cu_seqlens is not None else len(q)
    shape = (sequences, v.shape[2], k.shape[-1], v.shape[-1])
    states = q.new_zeros(shape) if initial_state is None else initial_state
    if cu_seqlens is not None:
        o, ends = recurrence(q[0], k[0], v[0], g[0], beta[0], cu_seqlens.tolist(), states, scale)
        return o[None], ends
    rows = [recurrence(*x, [0, q.shape[1]], first[None], scale) for *x, first in zip(q, k, v, g, beta, states, strict=True)]
    return torch.stack([o for o, _ in rows]), torch.cat([end for _, end in rows])


def ignores_offsets(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **more: Any
) -> Answer:
    """A wrong one: it takes offsets and runs from one sequence into the next."""
    del cu_seqlens
    return plain(q, k, v, g, beta, **more)


def ignores_what_it_reads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **more: Any) -> Answer:
    """A wrong one: its offsets are no parameter by name, but it reads them."""
    more.pop("cu_seqlens", None)
    return plain(q, k, v, g, beta)


def ignores_states(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None) -> Answer:
    """A wrong one: it begins with zeros."""
    del initial_state
    return plain(q, k, v, g, beta)


def refuses(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Answer:
    """One that refuses what it cannot do."""
    if cu_seqlens is not None:
        raise NotImplementedError("packed sequences come later")
    return plain(q, k, v, g, beta)


def values_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,  # noqa: FBT001, FBT002
) -> Answer:
    """A right one whose states may have the values' axis first."""
    first = None if initial_state is None else initial_state.mT if state_v_first else initial_state
    o, end = plain(q, k, v, g, beta, first)
    return o, end.mT if state_v_first and end is not None else end


def forgets_to_turn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,  # noqa: FBT001, FBT002
) -> Answer:
    """A wrong one: with the values' axis first, it returns the final state with the keys' axis first, in a view that hides it."""
    o, end = values_first(q, k, v, g, beta, initial_state, state_v_first)
    return o, end.mT.reshape(end.shape) if state_v_first and end is not None else end


def always_wrong(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Answer:
    """One that is wrong inside its domain too."""
    del cu_seqlens
    o, end = plain(q, k, v, g, beta)
    return 2 * o, end


def nothing_else(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Answer:
    """One that has no further parameter."""
    return plain(q, k, v, g, beta)


def layer(hidden: Tensor, others: Inputs, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A right layer, whose mask has zeros where a row is padding."""
    pads = None if attention_mask is None else tuple((attention_mask == 0).sum(1).tolist())
    return Layered().run(others.replaced(hidden=hidden, pads=pads))


def takes_padding(
    hidden: Tensor, others: Inputs, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A right layer, whose mask has ones where a row is padding."""
    return layer(hidden, others, None if padding_mask is None else 1 - padding_mask)


def ignores_masks(
    hidden: Tensor, others: Inputs, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A wrong layer: padding is computed like any token."""
    del attention_mask
    return layer(hidden, others)


NARROW = Domain(
    dtypes=("fp32",),
    gate_dtypes=("fp32",),
    grouped_heads=False,
    packed=False,
    nothing=False,
    initial_state=False,
    qk_norm=False,
    scale=False,
    backward=False,
    key_dims=(1, 16),
    value_dims=(1, 16),
    longest=70,
)


class Narrow(Adapter):
    """Base of adapters with a narrow domain, which pass the least that a call needs."""

    algorithm = "recurrent"
    domain = NARROW
    api: Any = plain

    def run(self, x: Inputs) -> Answer:
        answer: Answer = globals()[type(self).api.__name__](x.q, x.k, x.v, x.g, x.beta)
        return answer


class Right(Narrow):
    """Everything that the domain leaves out is right."""


class Compiled(Right):
    """The same, of an implementation that compiles every new shape."""

    compiles = True


class IgnoresOffsets(Narrow):
    """Packed sequences are accepted and wrong."""

    api = ignores_offsets


class IgnoresWhatItReads(Narrow):
    """Packed sequences are accepted and wrong."""

    api = ignores_what_it_reads


class IgnoresStates(Narrow):
    """An initial state is accepted and wrong."""

    api = ignores_states


class Refuses(Narrow):
    """Packed sequences are refused."""

    api = refuses


class ValuesFirst(Narrow):
    """Its other layout is right."""

    api = values_first


class ForgetsToTurn(Narrow):
    """Its other layout is accepted and wrong."""

    api = forgets_to_turn


class AlwaysWrong(Narrow):
    """It is wrong inside its domain too."""

    api = always_wrong


class NothingElse(Narrow):
    """It has no parameter for anything else."""

    api = nothing_else


class ItselfRefuses(IgnoresOffsets):
    """The adapter refuses packed sequences in front of the function."""

    def run(self, x: Inputs) -> Answer:
        if x.cu_seqlens is not None:
            raise Unsupported("no packed sequences here")
        return super().run(x)


class OneByOne(IgnoresOffsets):
    """The adapter calls the function for each sequence, so offsets are none of its business."""

    def run(self, x: Inputs) -> Answer:
        if x.cu_seqlens is None:
            return super().run(x)
        parts = [
            ignores_offsets(*(t[:, start:end] for t in (x.q, x.k, x.v, x.g, x.beta)))
            for start, end in itertools.pairwise(x.cu_seqlens.tolist())
        ]
        return torch.cat([o for o, _ in parts], 1), None


class HandsOn(Narrow):
    """The adapter itself passes the offsets."""

    def run(self, x: Inputs) -> Answer:
        return plain(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens)


class MaskedLayer(Adapter):
    """A mask is right."""

    algorithm = Layered.algorithm
    domain = LayerDomain(dtypes=("fp32",), attention_mask=False, backward=False, widths=(4, 8))
    api: Any = layer

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return layer(x.hidden, x.replaced(pads=None))


class MaskedByOnes(MaskedLayer):
    """A mask with ones where a row is padding is right."""

    api = takes_padding

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return takes_padding(x.hidden, x.replaced(pads=None))


class IgnoresMasks(MaskedLayer):
    """A mask is accepted and wrong."""

    api = ignores_masks

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return ignores_masks(x.hidden, x.replaced(pads=None))


class Everything(Narrow):
    """Its domain leaves out nothing that it takes."""

    domain = Domain(dtypes=("fp32",), grouped_heads=False, backward=False, key_dims=(1, 16), value_dims=(1, 16), longest=70)

    def run(self, x: Inputs) -> Answer:
        return plain(x.q, x.k, x.v, x.g, x.beta, x.state, x.cu_seqlens, x.scale, x.qk_norm)
