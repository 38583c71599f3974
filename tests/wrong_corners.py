"""Implementations that are wrong where two things meet: two sizes, a view and its order, what is frozen, spare or small.

The laws that show them are in tests/laws: in test_fixed_places.py, test_crowds.py and test_modules.py.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.rules.domain import Domain
from properties.traces.case import Batch
from tests.wrong_options import SumNorm
from tests.wrong_survivors import GatesOfEightCalls
from verify.adapters.gdn.pool import Progress
from verify.zoo.base import Chunkwise, Layered
from verify.zoo.modules import Conv, Gate
from verify.zoo.wrong_gates import StepwiseKda
from verify.zoo.wrong_recompute import Gradients, Recomputes
from verify.zoo.wrong_traces import Serves


class _Copy(torch.autograd.Function):
    """x. A class derived from it says what its gradient is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()


# Orders of axes in memory


class HeadsFirstAreDense(Chunkwise):
    """Values whose heads come first in memory are taken for a dense tensor [B, HV, T, V]."""

    domain = Domain(backward=False)
    outer, inner = 1, 2

    def run(self, x: Inputs) -> Any:
        turned = x.v.transpose(self.outer, self.inner)
        if not 0 < x.v.stride(self.outer) < x.v.stride(self.inner):
            return super().run(x)
        dense = [turned.shape[place + 1 :].numel() for place in range(turned.ndim)]
        return super().run(x.replaced(v=turned.as_strided(turned.shape, dense).transpose(self.outer, self.inner)))


class TokensFirstAreDense(HeadsFirstAreDense):
    """Values whose tokens come first in memory are taken for a dense tensor [T, B, HV, V]."""

    outer, inner = 0, 1


class StrideOfOneToken(Chunkwise):
    """A contiguous batch of single tokens is read by the stride of its tokens."""

    domain = Domain(backward=False)

    def run(self, x: Inputs) -> Any:
        if x.cu_seqlens is None and x.v.shape[1] == 1 and x.v.is_contiguous():
            flat = x.v.as_strided((x.v.shape[0], *x.v.shape[2:]), (x.v.stride(1), *x.v.stride()[2:]))
            x = x.replaced(v=flat.unsqueeze(1))
        return super().run(x)


class StrideOfOneHead(Chunkwise):
    """Contiguous values of one head are taken for zeros if the stride of heads is not the one that an allocator gives."""

    domain = Domain(backward=False)

    def run(self, x: Inputs) -> Any:
        if x.v.shape[2] == 1 and x.v.is_contiguous() and x.v.stride(2) != x.v.shape[3]:
            x = x.replaced(v=torch.zeros_like(x.v))
        return super().run(x)


# What is frozen, or not there


class BetaBesideTheKeys(Recomputes):
    """The gradient of beta is computed beside those of keys and gates, or alone: not beside others if both are frozen."""

    def kept(self, ctx: Any) -> list[Tensor]:
        self.needs = dict(zip(ctx.names, ctx.needs_input_grad[3:], strict=True))
        return super().kept(ctx)

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        gradients, needs = super().back(x, names, tensors, cotangents), self.needs
        others = [need for name, need in needs.items() if name in ("q", "v", "state")]
        if "beta" in names and not (needs["k"] or needs.get("g")) and any(others):
            gradients[names.index("beta")] = torch.zeros_like(tensors[names.index("beta")])
        return gradients


class NothingOfFinalStates(Recomputes):
    """Without an initial state, and without a cotangent of o, all gradients are zeros."""

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        if "state" not in names and (cotangents[0] is None or not cotangents[0].any()):
            return [torch.zeros_like(t) for t in tensors]
        return super().back(x, names, tensors, cotangents)


class StatesForGradients(Recomputes):
    """Without an initial state, a backward stores gradients over what a second one reads."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.over = False

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors, place = super().kept(ctx), ctx.names.index("v")
        if ctx.over and "state" not in ctx.names:
            tensors[place] = torch.zeros_like(tensors[place])
        ctx.over = True
        return tensors


class StatesAloneInWhatWasThere(Recomputes):
    """Without a gradient of q and without a loss of o, the cotangents of o are what was in their memory."""

    def kept(self, ctx: Any) -> list[Tensor]:
        self.needs = dict(zip(ctx.names, ctx.needs_input_grad[3:], strict=True))
        return super().kept(ctx)

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        loss, *others = cotangents
        if not self.needs["q"] and (loss is None or not loss.any()):
            loss = torch.ones_like(tensors[names.index("v")])
        return super().back(x, names, tensors, (loss, *others))


# Losses of some tokens


class ChunksWithALoss(Recomputes):
    """Without a loss of the states, a chunk of 64 tokens without a loss has no gradient, also before others."""

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        gradients, loss = super().back(x, names, tensors, cotangents), cotangents[0]
        if loss is None or any(other is not None and other.any() for other in cotangents[1:]):
            return gradients
        live = torch.cat([part.any().expand(part.shape[1]) for part in loss.split(64, 1)])
        found = dict(zip(names, gradients, strict=True))
        found |= {name: t * live.view(-1, *[1] * (t.ndim - 2)) for name, t in found.items() if name != "state" and t is not None}
        return [*found.values()]


class BeginsAtTheLastLoss(Recomputes):
    """The scan of the backward begins at the last token with a loss, behind which no state's cotangent comes."""

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        loss, states = cotangents
        if states is not None and loss is not None and loss.any() and not loss[:, -1].any():
            states = torch.zeros_like(states)
        return super().back(x, names, tensors, (loss, states))


class HeadsWithALoss(Recomputes):
    """Where some heads have a loss of o, those without one lose that of their final states."""

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        loss, states = cotangents
        if states is not None and loss is not None and loss.any():
            states = states * (loss != 0).any(-1).flatten(0, 1).any(0).view(-1, 1, 1)
        return super().back(x, names, tensors, (loss, states))


class GradientsByAddress(Recomputes):
    """A graph that is used again knows its cotangents by address and version."""

    def kept(self, ctx: Any) -> list[Tensor]:
        self.graph = ctx
        return super().kept(ctx)

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        key = [t is not None and (t.data_ptr(), t._version) for t in cotangents]
        if getattr(self.graph, "known", None) != key:
            self.graph.known, self.graph.found = key, super().back(x, names, tensors, cotangents)
        return [None if t is None else t.clone() for t in self.graph.found]


# What is kept by its contents, and what is alike


class DecaysByKeys(Chunkwise):
    """The decays of the last call with these keys and betas are taken again, as was right for a rule without decays."""

    domain = Domain(backward=False)

    def run(self, x: Inputs) -> Any:
        key = [t.to(torch.float32).numpy().tobytes() for t in (x.k, x.beta)]
        if getattr(self, "known", None) != key:
            self.known, self.decays = key, x.g.clone()
        return super().run(x.replaced(g=self.decays))


class _AllChannels(_Copy):
    """x, every channel of which gets the gradient of all channels together."""

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0].sum(-1, keepdim=True).expand_as(cotangents[0])


class KdaOfOneDecay(StepwiseKda):
    """A decay that all channels share goes to the rule of one decay, whose gradient is that of all channels."""

    def run(self, x: Inputs) -> Any:
        shared = x.g is not None and x.g.stride(-1) == 0 and x.g.shape[-1] > 1
        return super().run(x.replaced(g=_AllChannels.apply(x.g)) if shared else x)


class IdleChunksDoNotDecay(Chunkwise):
    """Chunks of 64 tokens without beta leave the state as it is, if others have one."""

    domain = Domain(backward=False, packed=False)

    def run(self, x: Inputs) -> Any:
        idle = torch.cat([~part.any(1, keepdim=True).expand_as(part) for part in x.beta.split(64, 1)], 1)
        return super().run(x.replaced(g=torch.where(idle & ~idle.all(), 0.0, x.g).to(x.g.dtype)))


class StatesOfTheFirst(Chunkwise):
    """If the first packed sequence begins with a state of zeros, no states are read."""

    domain = Domain(backward=False)

    def run(self, x: Inputs) -> Any:
        zeros = x.cu_seqlens is not None and x.state is not None and not x.state[:1].any()
        return super().run(x.replaced(state=torch.zeros_like(x.state)) if zeros else x)


class WindowsOfTheFirst(Conv):
    """The same of a convolution's states."""

    domain = dataclasses.replace(Conv.domain, backward=False)

    def run(self, x: Inputs) -> Any:
        zeros = x.cu_seqlens is not None and x.state is not None and not x.state[:1].any()
        return super().run(x.replaced(state=torch.zeros_like(x.state)) if zeros else x)


class LayerStatesOfTheFirst(Layered):
    """The same of a layer's."""

    domain = LayerDomain(state_gradients=False)

    def run(self, x: Inputs) -> Any:
        zeros = x.cu_seqlens is not None and x.state is not None and not x.state[:1].any()
        none = {name: torch.zeros_like(x[name]) for name in ("state", "conv_state")} if zeros else {}
        return super().run(x.replaced(**none))


class ProgramsInRounds(Chunkwise):
    """264 programs take the packed sequences and heads in turn, and begin with a state of zeros only in the first round."""

    domain = Domain(backward=False)

    def run(self, x: Inputs) -> Any:
        o, final = super().run(x)
        if x.state is None and (programs := final.shape[0] * final.shape[1]) > 264:
            states = torch.zeros_like(final).flatten(0, 1)
            states[264:] = final.flatten(0, 1)[: programs - 264]
            return super().run(x.replaced(state=states.view_as(final)))
        return o, final


class _Tree(torch.autograd.Function):
    """x with each head repeated; the gradient is added up in a tree whose first level alone may be odd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:  # type: ignore[override]
        ctx.count = count
        return x.repeat_interleave(count, 2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        parts = [*cotangents[0].unflatten(2, (-1, ctx.count)).unbind(3)]
        odd = parts.pop() if len(parts) % 2 else 0
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [parts[place] + parts[place + half] for place in range(half)]
        return (parts[0] + odd if parts else odd), None


class TreeOfValueHeads(Chunkwise):
    """Gradients of q and k are added up over the value heads of a key head in a tree whose first level alone may be odd."""

    def run(self, x: Inputs) -> Any:
        count = x.v.shape[2] // x.q.shape[2]
        return super().run(x.replaced(q=_Tree.apply(x.q, count), k=_Tree.apply(x.k, count)) if count > 1 else x)


class GatesOf32Calls(GatesOfEightCalls):
    """Gates are kept in 32 buffers for each shape, in turn."""

    buffers = 32


class BackwardOnTheSecondAxis(Recomputes):
    """The backward has a program for each sequence and head along an axis of its grid that takes 65,535."""

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        v = tensors[names.index("v")]
        if (v.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1) * v.shape[2] > 65_535:
            raise RuntimeError("the second axis of a grid has at most 65,535 programs")
        return super().back(x, names, tensors, cotangents)


class _Halves(_Copy):
    """x, whose gradient passes through float16."""

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0].half().to(cotangents[0].dtype)


class CotangentsInHalf(Chunkwise):
    """Cotangents of bfloat16 outputs are stored in float16, which has three bits more."""

    def run(self, x: Inputs) -> Any:
        o, state = super().run(x)
        return (_Halves.apply(o), state) if o.dtype == torch.bfloat16 else (o, state)  # type: ignore[no-untyped-call]


class _Sums(torch.autograd.Function):
    """x + residual twice: for the norm, and to be returned. The residual has no gradient if the second one has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return x + residual, x + residual

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        of_norm, of_sum = cotangents
        if of_sum is None or of_norm is None:
            return of_norm if of_sum is None else of_sum, of_sum
        return of_norm + of_sum, of_norm + of_sum


class SumWithoutItsNorm(SumNorm):
    """Without a weight, the residual has no gradient from y where the sum that is returned has no cotangent."""

    domain = dataclasses.replace(SumNorm.domain, dtypes=("fp32",))

    def run(self, x: Inputs) -> Any:
        if x.weight is not None or not x.get("returns_sum"):
            return super().run(x)
        of_norm, of_sum = _Sums.apply(x.x, x.residual)  # type: ignore[no-untyped-call]
        return super().run(x.replaced(x=of_norm, residual=None, returns_sum=False)), of_sum


# Two sizes


class ValuesLeftOut(Chunkwise):
    """Values that `left(x)` names are taken for zeros."""

    domain = Domain(backward=False)

    def left(self, x: Inputs) -> Tensor | None:
        raise NotImplementedError

    def run(self, x: Inputs) -> Any:
        left = self.left(x)
        return super().run(x if left is None else x.replaced(v=x.v.masked_fill(left, 0)))

    def spans(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The lengths of a packed call, and each token's place in its sequence."""
        lengths = x.cu_seqlens.diff()
        return lengths, torch.arange(x.v.shape[1]) - x.cu_seqlens[:-1].repeat_interleave(lengths)


class MeanOfManyDecodes(ValuesLeftOut):
    """From 32 packed sequences on, whose mean has at most 16 tokens, a sequence is taken to have 16 at most."""

    def left(self, x: Inputs) -> Tensor | None:
        if x.cu_seqlens is None or len(x.cu_seqlens) < 33 or x.v.shape[1] > 16 * (len(x.cu_seqlens) - 1):
            return None
        return (self.spans(x)[1] >= 16).view(1, -1, 1, 1)


class LaunchesByTheMean(ValuesLeftOut):
    """From 512 tokens and keys of 32 channels on, the number of launches of 256 tokens follows from the mean length."""

    def left(self, x: Inputs) -> Tensor | None:
        if x.cu_seqlens is None or x.v.shape[1] < 512 or x.k.shape[3] < 32:
            return None
        mean = -(-x.v.shape[1] // (len(x.cu_seqlens) - 1))
        return (self.spans(x)[1] >= -(-mean // 256) * 256).view(1, -1, 1, 1)


class WideBlocksOfFullGrids(ValuesLeftOut):
    """From 132 programs on there is one block of 128 channels of values."""

    def left(self, x: Inputs) -> Tensor | None:
        rows = x.v.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
        return torch.arange(x.v.shape[3]) >= 128 if rows * x.v.shape[2] >= 132 and x.v.shape[3] > 128 else None


class HeadsOfLongTiles(ValuesLeftOut):
    """From 128 tokens on, programs take 64 heads."""

    def left(self, x: Inputs) -> Tensor | None:
        return (torch.arange(x.v.shape[2]) >= 64).view(-1, 1) if x.v.shape[1] >= 128 else None


class EqualSequencesAsABatch(Chunkwise):
    """Three or more packed sequences of the same number of whole chunks become a batch, which gets no initial states."""

    domain = Domain(backward=False)

    def run(self, x: Inputs) -> Any:
        lengths = [] if x.cu_seqlens is None else x.cu_seqlens.diff().tolist()
        equal = len(lengths) > 2 and len({*lengths}) == 1 and lengths[0] > 0 and lengths[0] % 64 == 0
        return super().run(x.replaced(state=None) if equal else x)


class StatesOfKeyHeads(Chunkwise):
    """A call without tokens returns a state for each key head."""

    domain = Domain(backward=False)

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Any:
        return o, state if state is None or o.shape[1] else state[:, : x.q.shape[2]]


class PartsOfManyHeads(Gate):
    """Over 64 heads and 16 tokens, the decays of a token go into its sum twice where blocks meet."""

    domain = ModuleDomain("gdn_gate", backward=False)

    def decay(self, x: Inputs) -> Tensor:
        g, (tokens, heads) = super().decay(x), x.a.shape[1:]
        return torch.where(torch.arange(heads) == 64, 2 * g, g) if tokens > 16 else g


class TileOfItsFirstSequence(Conv):
    """From 128 tokens and 256 channels on, a tile of 64 tokens belongs to the sequence of its first token."""

    domain = ModuleDomain("causal_conv1d", backward=False)

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        earlier = x.x.flatten(0, 1)[: start + 1][-x.weight.shape[-1] : -1].float()
        wide = x.cu_seqlens is not None and x.x.shape[1] >= 128 and x.x.shape[2] >= 256
        right = super().before(x, state, start)
        return earlier if wide and start % 64 and len(earlier) == len(right) else right


class DecodesInGroupsOf16(Layered):
    """The gates of a decode take heads in groups of 16, and those of the last group that is not full are those before them."""

    domain = LayerDomain(backward=False)

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        g = super().decay(x, a)
        if x.hidden.shape[1] > 1 or g.shape[-1] < 17 or not (last := g.shape[-1] % 16):
            return g
        return torch.cat([g[..., :-last], g[..., -16:][..., :last]], -1)


# Whole numbers


class NotQuiteWhole(Conv):
    """A bias of 2^-24 is added to every output."""

    domain = ModuleDomain("causal_conv1d", backward=False)

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return super().activated(y, x) + 2.0**-24


class Fourier(Conv):
    """Right: windows and filter are multiplied in Fourier space in float64."""

    domain = ModuleDomain("causal_conv1d", backward=False)

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        width = x.weight.shape[-1]
        if not count:
            return super().windows(line, x, count)
        parts = torch.fft.rfft(line.unfold(0, width, 1).double(), n=2 * width)
        taps = torch.fft.rfft(x.weight.double().flip(-1), n=2 * width)
        return torch.fft.irfft(parts * taps, n=2 * width)[..., width - 1].float()


# Decays, widths and moves of layers and engines


class LayerOfFactors(Layered):
    """Decays in 16 tokens are quotients of exponentials, which are infinite for a sum under -88."""

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        g = super().decay(x, a)
        sums = torch.cat([part.cumsum(1) for part in g.split(16, 1)], 1) if g.shape[1] else g
        return g + 0 * sums.neg().exp()


class QuotientsOfDecays(Serves):
    """The decay of a token is the quotient of two products, both of which are 0 where decays are strong."""

    def decay(self, a: Tensor) -> Tensor:
        products = super().decay(a).cumprod(0)
        return torch.cat([products[:1], products[1:] / products[:-1]])


class DraftsOf64Values(Serves):
    """A commit writes the first 64 value channels."""

    def commit(self, accepted: Sequence[int]) -> None:
        before = self.states[..., 64:].clone()
        super().commit(accepted)
        self.states[..., 64:] = before


class PaddingHasAToken(Serves):
    """A padding row of no tokens is taken for one of a token, so that the rows behind it begin a token late."""

    def rows(self, batch: Batch) -> list[Progress]:
        more = [int(not real and not length) for real, length in zip(batch.real, batch.lengths, strict=True)]
        lengths = tuple(length + one for length, one in zip(batch.lengths, more, strict=True))
        tensors = {"mixed": batch.mixed, "a": batch.a, "b": batch.b}
        late = {name: torch.cat([x, x.new_zeros(sum(more), *x.shape[1:])]) for name, x in tensors.items()}
        found = super().rows(dataclasses.replace(batch, lengths=lengths, **late))
        return [dataclasses.replace(row, o=row.o[one:]) for row, one in zip(found, more, strict=True)]


class ForksOfDraftsComeLater(Serves):
    """Who begins from a request behind its draft gets the state when it goes on, though that request may have left."""

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        source = self.owned[old]
        if snapshot or source not in {row.slot for row in self.drafted}:
            super().fork(new, old, snapshot=snapshot)
            return
        self.owned[new] = self.take()
        self.later = {**getattr(self, "later", {}), new: source}

    def rows(self, batch: Batch) -> list[Progress]:
        later = getattr(self, "later", {})
        for request in {*batch.requests} & later.keys():
            self.copy(later.pop(request), self.owned[request])
        return super().rows(batch)
