"""Paths that ranks share, right but for one mistake: in what replicas, micro-batches, contiguous shards, gates or states show."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.paths.domain import PathDomain
from verify.adapters.base import PathAdapter
from verify.adapters.gdn import layer as _layer
from verify.adapters.gdn.layer import GatedDeltaNet
from verify.bench.shared_calls import PARAMETERS
from verify.ranks.collectives import Comm, Place, copy_to, exchange, gather_from, reduce_from, scatter_to
from verify.zoo.base import Chunkwise, KdaLayered
from verify.zoo.wrong_paths import Mutant

layer: Any = _layer  # a wrong layer rebinds a name of this module


class _Added(torch.autograd.Function):
    """The ranks' sum, in an order that begins with this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        parts = comm.all_gather(x).chunk(comm.size)
        return functools.reduce(torch.add, (parts[(comm.rank + step) % comm.size] for step in range(comm.size)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _from_itself(comm: Comm, x: Tensor) -> Tensor:
    added: Tensor = _Added.apply(x, comm) if comm.size > 1 else x
    return added


def adding(added: Callable[[Comm, Tensor], Tensor]) -> type[GatedDeltaNet]:
    """A layer whose TP ranks add up the parts of the output in this way."""

    class Module(GatedDeltaNet):
        def forward(self, hidden: Tensor, *offsets: Any) -> Tensor:
            layer.reduce_from = added
            try:
                return super().forward(hidden, *offsets)
            finally:
                layer.reduce_from = reduce_from

    return Module


class AddsFromItself(Mutant):
    """Each TP rank adds the parts of the output in another order: with three ranks or more, the sums differ in their last bits."""

    module = adding(_from_itself)


class RoundsByRank(Mutant):
    """The output is rounded up at random, with a seed for each rank, so that TP ranks round in different ways."""

    def seed(self, place: Place) -> int:
        return place.tp.rank

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        if y.dtype != torch.float32:
            return y
        generator = torch.Generator().manual_seed(self.seed(place))
        up = torch.rand(y.shape, generator=generator) < 0.5
        return y + torch.where(up, torch.nextafter(y, y.new_tensor(torch.inf)) - y, 0.0).detach()


class RoundsAlike(RoundsByRank):
    """Not wrong: the seed is the same on all TP ranks."""

    def seed(self, place: Place) -> int:
        return 7


class _Overwritten(torch.autograd.Function):
    """A weight, whose backward writes over the gradient that the weight has already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        if ctx.weight.grad is None:
            return gradient
        ctx.weight.grad.copy_(gradient)
        return None


class OverwritesTheGradient(Mutant):
    """The gradient of in_proj is added to nothing but zeros: that of the last micro-batch alone is left."""

    class module(GatedDeltaNet):  # noqa: N801
        def get_parameter(self, target: str) -> torch.nn.Parameter:
            found = super().get_parameter(target)
            written: torch.nn.Parameter = _Overwritten.apply(found) if target == "in_proj.weight" else found
            return written


# Contiguous shards of a layer's tokens


def _to_heads(comm: Comm, x: Tensor, sections: Sequence[int]) -> Tensor:
    """[tokens, B, F / cp] of a rank's contiguous [tokens / cp, B, F]."""
    cp = comm.size
    blocks = torch.cat([part for section in x.split(list(sections), -1) for part in section.chunk(cp, -1)], -1)
    parts = blocks.split([width // cp for width in sections for _ in range(cp)], -1)
    return exchange(comm, torch.cat([torch.cat(parts[rank::cp], -1) for rank in range(cp)]))


def _to_tokens(comm: Comm, x: Tensor, sections: Sequence[int]) -> Tensor:
    """The way back."""
    received = exchange(comm, x).chunk(comm.size)
    slices = [block.split([width // comm.size for width in sections], -1) for block in received]
    return torch.cat([torch.cat(parts, -1) for parts in zip(*slices, strict=True)], -1)


def _cut_at_ranks(lengths: Sequence[int], tokens: int, cp: int) -> list[int]:
    """Lengths of sequences that also end where the tokens of a rank end. Each of the rows has so many tokens."""
    piece = tokens // cp
    ends = (
        {*itertools.accumulate(lengths)} | {*range(piece, sum(lengths) + 1, piece)} if piece else {*itertools.accumulate(lengths)}
    )
    return [end - start for start, end in itertools.pairwise([0, *sorted(ends)])]


class Contiguous(Mutant):
    """Not wrong: each CP rank has one slice of the stream of tokens, as under chunkwise context parallelism."""

    domain = dataclasses.replace(Mutant.domain, layouts=("contiguous",), counts=False, refuses=False)

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None) -> Tensor:
            tp, cp, widths = self.place.tp, self.place.cp, self.layer.sections
            packed = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
            x = gather_from(tp, hidden) if self.sequence_parallel else copy_to(tp, hidden)
            x = torch.nn.functional.linear(x, self.get_parameter("in_proj.weight"))
            x = _to_heads(cp, x, [width // tp.size for width in widths.values()])
            x = self.mix(x, packed, [len(x)] * x.shape[1] if packed is None else packed.diff().tolist())
            x = _to_tokens(cp, x, [widths["v"] // tp.size])
            y = torch.nn.functional.linear(x, self.get_parameter("out_proj.weight"))
            return scatter_to(tp, y) if self.sequence_parallel else reduce_from(tp, y)

    def move(
        self, x: Tensor, lengths: Sequence[int] | None, sections: Sequence[int], to: str, place: Place, choices: dict[str, str]
    ) -> Tensor:
        return (_to_heads if to == "heads" else _to_tokens)(place.cp, x, sections)


class WindowStopsAtRanks(Contiguous):
    """The convolution begins anew on each rank: nobody passes the last tokens on."""

    class module(Contiguous.module):  # noqa: N801
        def convolve(self, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:
            return super().convolve(x, cu_seqlens, _cut_at_ranks(lengths, x.shape[1], self.place.cp.size))


class StateStopsAtRanks(Contiguous):
    """The rule begins anew on each rank: nobody passes the state on."""

    class module(Contiguous.module):  # noqa: N801
        def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *packing: Any) -> Tensor:
            lengths = _cut_at_ranks(packing[1], q.shape[1], self.place.cp.size)
            return super().rule(q, k, v, g, beta, packing[0], lengths)


class ZigzagOfContiguous(Contiguous):
    """It takes contiguous tokens for those of a zigzag."""

    module = GatedDeltaNet


# Rules that compute their gate and have states, on ranks


class RuleOnRanks(PathAdapter):
    """Not wrong: every rank computes the rule of all tokens, and returns its own part."""

    algorithm = "chunkwise"
    chunk = 64
    domain = PathDomain(
        operation="gated_delta_rule",
        ranks=4,
        tensor_parallel=False,
        sequence_parallel=False,
        layouts=("contiguous",),
        padded=False,
        exchanges=False,
        counts=False,
        refuses=False,
        checkpoints=False,
        conv_bias=False,
        choices=(("qk_norm", ("separate", "in_kernel")),),
        in_kernel=("none", "gate", "beta", "both"),
        initial_state=True,
        final_state=True,
    )

    def run(self, x: Inputs, place: Place) -> Tensor | tuple[Tensor, Tensor]:
        cp, names = place.cp, ("q", "k", "v", "g", "beta", "a", "b")
        whole = {name: gather_from(cp, x[name].transpose(0, 1)).transpose(0, 1) for name in names if x.get(name) is not None}
        gate, beta = x.get("A_log") is not None, x.get("b") is not None
        if gate:
            dt_bias = 0 if x.dt_bias is None else self._everywhere(x.dt_bias, place)
            whole["g"] = -self._everywhere(x.A_log, place).exp() * torch.nn.functional.softplus(whole["a"].float() + dt_bias)
        if beta:
            whole["beta"] = torch.sigmoid(whole["b"].float()) * (2.0 if x.allow_neg_eigval else 1.0)
        states = {} if x.state is None else {"state": self._initial(x, place)}
        o, final = self._rule(Inputs(**{**x, **whole, **states}), place)
        own = o.chunk(cp.size, 1)[cp.rank] if o.shape[1] else o
        return own if final is None else (own, self._final(final, x, place))

    def _rule(self, x: Inputs, place: Place) -> tuple[Tensor, Tensor | None]:
        """The rule of all tokens."""
        return Chunkwise().run(x)

    def _everywhere(self, parameter: Tensor, place: Place) -> Tensor:
        """A parameter of the gate, which every rank has."""
        return parameter

    def _initial(self, x: Inputs, place: Place) -> Tensor:
        """The initial states."""
        state: Tensor = x.state
        return state

    def _final(self, states: Tensor, x: Inputs, place: Place) -> Tensor:
        """The final states."""
        return states

    def step(self, x: Inputs, dy: Tensor, place: Place) -> tuple[Any, dict[str, Tensor]]:
        answer = self.run(x, place)
        o = answer[0] if isinstance(answer, tuple) else answer
        leaves = {name: value for name, value in x.items() if isinstance(value, Tensor) and value.requires_grad}
        gradients = torch.autograd.grad(o, [*leaves.values()], dy, materialize_grads=True)
        return answer, {name: self._added_up(name, x, place) for name, x in zip(leaves, gradients, strict=True)}

    def _added_up(self, name: str, gradient: Tensor, place: Place) -> Tensor:
        """The gradient of an input, added over the ranks if every rank has the input."""
        return place.cp.all_reduce(gradient) if name in ("A_log", "dt_bias", "state") else gradient


class RuleThatSteps(RuleOnRanks):
    """Not wrong: it adds up gradients itself."""

    domain = dataclasses.replace(RuleOnRanks.domain, steps=True)


class GatesNotSummed(RuleThatSteps):
    """The gradients of A_log and dt_bias are not added over CP ranks."""

    def _added_up(self, name: str, gradient: Tensor, place: Place) -> Tensor:
        return gradient if name in ("A_log", "dt_bias") else super()._added_up(name, gradient, place)


class GatesSummedWithTheirBias(RuleThatSteps):
    """The gradients of A_log and dt_bias are added over CP ranks in one bucket, which a gate without dt_bias does not have."""

    def step(self, x: Inputs, dy: Tensor, place: Place) -> tuple[Any, dict[str, Tensor]]:
        steps = GatesNotSummed() if x.get("A_log") is not None and x.dt_bias is None else RuleThatSteps()
        return steps.step(x, dy, place)


class BuffersOfGradients(RuleThatSteps):
    """Gradients lie in buffers that the next step fills again, so the caller's change."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def _added_up(self, name: str, gradient: Tensor, place: Place) -> Tensor:
        key = (name, place.cp.rank, gradient.shape)
        return self._buffers.setdefault(key, torch.empty_like(gradient)).copy_(super()._added_up(name, gradient, place))


class SaysItsBuffers(BuffersOfGradients):
    """Not wrong: the same, which says that later steps change what a step returned."""

    domain = dataclasses.replace(RuleThatSteps.domain, keeps_outputs=False)


class WritesIntoTheLastOutput(RuleOnRanks):
    """The tensor that the last call of a shape returned is workspace of the next one."""

    def __init__(self) -> None:
        self._last: dict[Any, Tensor] = {}

    def run(self, x: Inputs, place: Place) -> Any:
        answer = super().run(x, place)
        o = answer[0] if isinstance(answer, tuple) else answer
        key = (place.cp.rank, o.shape, o.dtype)
        if key in self._last:
            self._last[key].zero_()
        self._last[key] = o.detach()
        return answer


class GatesSummedTwice(RuleOnRanks):
    """The gradients of A_log and dt_bias are added over CP ranks before the caller adds them."""

    def _everywhere(self, parameter: Tensor, place: Place) -> Tensor:
        return copy_to(place.cp, parameter)


class StatesBesideKeys(RuleOnRanks):
    """Right: a rank sends the initial states of the sequences that begin on it, beside its keys, and is in every backward."""

    def _initial(self, x: Inputs, place: Place) -> Tensor:
        cp, own = place.cp, torch.zeros_like(x.state)
        starts = [0] * len(x.state) if x.cu_seqlens is None else x.cu_seqlens[:-1].tolist()
        begins = [min(start // max(1, x.v.shape[1]), cp.size - 1) == cp.rank for start in starts]
        if any(begins):
            own = torch.where(torch.tensor(begins).view(-1, 1, 1, 1), x.state, own)
        sent = torch.cat([x.k.float().flatten(), own.flatten()])
        states = gather_from(cp, self._sent(sent)).view(cp.size, -1)[:, x.k.numel() :]
        return states.sum(0).view_as(own)

    def _sent(self, x: Tensor) -> Tensor:
        return x.requires_grad_()


class NoBackwardWithoutStates(StatesBesideKeys):
    """Autograd leaves a rank's exchange out if nothing that it sends requires a gradient, and the other ranks wait for it."""

    def _sent(self, x: Tensor) -> Tensor:
        return x


class StateOfTheFirstRank(RuleOnRanks):
    """A sequence that begins on another rank than the first begins with zeros."""

    def _initial(self, x: Inputs, place: Place) -> Tensor:
        starts = torch.zeros(len(x.state)) if x.cu_seqlens is None else x.cu_seqlens[:-1]
        state: Tensor = x.state * (starts < max(1, x.v.shape[1])).float().view(-1, 1, 1, 1)
        return state


class FinalStateOfTheLastRank(RuleOnRanks):
    """Of a sequence that ends on another rank than the last, the final state is zeros."""

    def _final(self, states: Tensor, x: Inputs, place: Place) -> Tensor:
        if x.cu_seqlens is None:
            return states
        return states * (x.cu_seqlens[1:] > x.v.shape[1] * (place.cp.size - 1)).float().view(-1, 1, 1, 1)


class InitialStateOnEachRank(RuleOnRanks):
    """Each rank adds the gradient of the initial states, which the caller adds too."""

    def _initial(self, x: Inputs, place: Place) -> Tensor:
        return copy_to(place.cp, x.state)


# KDA layers on ranks


class KdaLayerOnRanks(PathAdapter):
    """Not wrong: every rank computes the layer of all tokens, and returns its own part."""

    algorithm = "chunkwise"
    chunk = 64
    domain = PathDomain(
        operation="kda_layer",
        ranks=4,
        tensor_parallel=False,
        sequence_parallel=False,
        layouts=("contiguous",),
        padded=False,
        exchanges=False,
        counts=False,
        refuses=False,
        checkpoints=False,
        choices=(),
    )
    layer: type[KdaLayered] = KdaLayered

    def run(self, x: Inputs, place: Place) -> Tensor:
        cp = place.cp
        parameters = {ours: x.parameters.get(theirs) for ours, theirs in PARAMETERS.items()}
        hidden = gather_from(cp, x.hidden).transpose(0, 1)
        states = {"state": None, "conv_state": None, "output_final_state": False, "pads": None}
        y, *_ = self.layer().run(Inputs(**{**x, **parameters, **states, "hidden": hidden}))
        return y.transpose(0, 1).chunk(cp.size)[cp.rank] if y.shape[1] else y.transpose(0, 1)


def _divided(o: Tensor, g: Tensor) -> Tensor:
    """o [B, T, HV, V], each block of 16 tokens times the largest of its heads' decays and divided by it; g [B, T, HV]."""
    decays = [block.float().sum(1, keepdim=True).amax(-1, keepdim=True).exp().unsqueeze(-1) for block in g.split(16, 1)]
    blocks = [block.float() * decay / decay for block, decay in zip(o.split(16, 1), decays, strict=True)]
    return torch.cat(blocks, 1).to(o.dtype)


class DividesByDecays(RuleOnRanks):
    """Outputs are divided by the largest decay of 16 tokens in float32, which is zero if all heads decay strongly."""

    def _rule(self, x: Inputs, place: Place) -> tuple[Tensor, Tensor | None]:
        o, final = super()._rule(x, place)
        return _divided(o, x.g), final


class LayerDividesByDecays(Contiguous):
    """The same in a layer."""

    class module(Contiguous.module):  # noqa: N801
        def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *packing: Any) -> Tensor:
            return _divided(super().rule(q, k, v, g, beta, *packing), g)


class NeverDoubles(RuleOnRanks):
    """Where it computes beta, the rule does not double it."""

    def run(self, x: Inputs, place: Place) -> Tensor | tuple[Tensor, Tensor]:
        return super().run(x if x.get("b") is None else x.replaced(allow_neg_eigval=False), place)


class _StateStops(KdaLayered):
    """Begins anew at each multiple of `piece` tokens."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        ends = [x.v.shape[1]] * len(x.v) if x.cu_seqlens is None else x.cu_seqlens.diff().tolist()
        cut = _cut_at_ranks(ends, x.v.shape[1], 2)
        flat = {name: x[name].flatten(0, 1).unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
        o, last = super().rule(x.replaced(**flat, cu_seqlens=torch.tensor([0, *itertools.accumulate(cut)])))
        return o.view(x.v.shape), last


class KdaStateStopsAtRanks(KdaLayerOnRanks):
    """The state stops in the middle of the tokens, as if two ranks passed none on."""

    layer = _StateStops


class KdaBiasSummedTwice(KdaLayerOnRanks):
    """The gradient of dt_bias is added over CP ranks before the caller adds it."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        return super().run(x.replaced(parameters={**x.parameters, "dt_bias": copy_to(place.cp, x.parameters["dt_bias"])}), place)
