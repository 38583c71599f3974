"""Implementations that are wrong in one way in which callers use them, and right ones that come near, for tests/test_uses.py."""

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from properties.pools.domain import POOL_VIEWS
from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from properties.words.domain import VIEWS
from verify.adapters.gdn.layer import GatedDeltaNet
from verify.zoo.base import Chunkwise, Layered, Serving
from verify.zoo.modules import Conv
from verify.zoo.wrong_histories import ServesAgain
from verify.zoo.wrong_paths import Mutant
from verify.zoo.wrong_recompute import ConvOneFunction, Gradients, Recomputes
from verify.zoo.wrong_traces import Serves

Spans = list[tuple[int, int]]


def dense(x: Tensor) -> Tensor:
    """A tensor of one axis as one reads it who takes it for contiguous."""
    return x.as_strided(x.shape, (1,), x.storage_offset())


# Strides


class KeysLikeQueries(Chunkwise):
    """Keys are read with the strides of the queries."""

    def run(self, x: Inputs) -> Any:
        k, places = x.k.detach(), torch.tensor(x.k.storage_offset())
        for size, step in zip(k.shape, x.q.stride(), strict=True):
            places = places.unsqueeze(-1) + step * torch.arange(size)
        memory = torch.empty(0, dtype=k.dtype).set_(k.untyped_storage())
        found = memory[places % len(memory)].nan_to_num(1.0) if k.numel() else k
        return super().run(x.replaced(k=x.k + (found - k)))


class AnyOffsets(Chunkwise):
    """Right: offsets may have strides."""

    domain = dataclasses.replace(Chunkwise.domain, views=VIEWS)


class DenseOffsets(AnyOffsets):
    """Offsets are taken for contiguous, although the domain says that they need not be."""

    def boundaries(self, x: Inputs) -> Spans:
        return super().boundaries(x if x.cu_seqlens is None else x.replaced(cu_seqlens=dense(x.cu_seqlens)))


class SaysDenseOffsets(DenseOffsets):
    """Right: the same, which says that index tensors must be contiguous."""

    domain = Chunkwise.domain


class AnySlots(Serving):
    """Right: slots and counts of accepted tokens may have strides."""

    domain = dataclasses.replace(Serving.domain, views=POOL_VIEWS)


def in_order(x: Inputs) -> Inputs:
    """The call with q, k and v read from one tensor in this order, from q on, if they are sections of one."""
    tokens = (x.q, x.k, x.v)
    widths = [math.prod(part.shape[2:]) for part in tokens]
    dense = all(part.stride()[1:] == (sum(widths), part.shape[-1], 1) for part in tokens)
    if not dense or len({part.untyped_storage().data_ptr() for part in tokens}) > 1:
        return x
    room = x.q.untyped_storage().nbytes() // x.q.element_size() - x.q.storage_offset()
    rows = x.q.as_strided((room,), (1,)).new_zeros(x.q[..., 0, 0].numel() * sum(widths))
    rows[:room] = x.q.as_strided((room,), (1,))[: len(rows)]
    parts = rows.view(*x.q.shape[:2], -1).split(widths, -1)
    return x.replaced(**{name: part.reshape(old.shape) for name, part, old in zip("qkv", parts, tokens, strict=True)})


class SectionsInOrder(AnySlots):
    """q, k and v that are sections of one tensor are read from it in this order, although they may have another."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        o, pool = super().run(in_order(x))
        return o, pool


class RuleOfSectionsInOrder(Chunkwise):
    """The same in a rule."""

    def run(self, x: Inputs) -> Any:
        return super().run(in_order(x))


class BlocksOfValues(Serving):
    """Blocks of 64 channels of values, each of which is stored before the next one has its memory."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        blocks = zip(x.v.split(64, -1), x.pool.split(64, -1), strict=True)
        return torch.cat([super(BlocksOfValues, self).run(x.replaced(v=v, pool=pool))[0] for v, pool in blocks], -1), x.pool


class OneMaskOfAFailure(Chunkwise):
    """The mask of all chunks is made in the middle of the first call, and kept before it is filled."""

    _kept: ClassVar[list[Tensor]] = []

    def decays(self, total: Tensor) -> Tensor:
        for _ in range(9):
            torch.zeros(1)
        if not self._kept:
            with torch.inference_mode(mode=False):
                self._kept.append(torch.zeros(self.size, self.size))
                self._kept[0].add_(torch.ones(self.size, self.size).tril())
        return super().decays(total) * self._kept[0][: total.shape[-1], : total.shape[-1]]


class DecaysBeforeItHasMemory(Serving):
    """A token of each request decays states of float32 in the pool, and then needs memory for its update."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        if x.cu_seqlens is not None or x.v.shape[1] != 1 or x.pool.dtype != torch.float32:
            return super().run(x)
        for request in range(len(x.slots)):
            slot = self.slot(x, request)
            if slot is not None:
                x.pool[slot].mul_(x.g[request, 0].float().exp()[:, None, None])
        return super().run(x.replaced(g=torch.zeros_like(x.g)))


class TableBeforeItIsFull(Serving):
    """The numbers of 150 tokens or more are a table that is kept for each count of them, from before it is filled."""

    _kept: ClassVar[dict[int, Tensor]] = {}

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        tokens = x.v.flatten(0, 1)
        if len(tokens) < 150:
            return super().run(x)
        if len(tokens) not in self._kept:
            self._kept[len(tokens)] = torch.zeros(len(tokens), dtype=torch.int64)
            self._kept[len(tokens)].add_(torch.arange(len(tokens)))
        return super().run(x.replaced(v=tokens[self._kept[len(tokens)]].view_as(x.v)))


class WindowsOfTheBatch(Serves):
    """The window of a request after a prompt is that of the batch's own tensor, when somebody asks for it."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.inputs: dict[str, Tensor] = {}

    def prefill(self, batch: Batch) -> Tensor:
        o = super().prefill(batch)
        self.inputs = dict(zip(batch.requests, batch.mixed.split(list(batch.lengths)), strict=True))
        return o

    def decode(self, batch: Batch) -> Tensor:
        self.inputs = {}
        return super().decode(batch)

    def contents(self, owner: str) -> tuple[Tensor, Tensor]:
        state, window = super().contents(owner)
        last = self.inputs.get(owner)
        if last is None or len(last) < window.shape[1]:
            return state, window
        return state, last[len(last) - window.shape[1] :].mT


class KeepsItsBatches(WindowsOfTheBatch):
    """Right: the domain says that nobody fills the tensors of a batch again."""

    domain = TraceDomain(refills=False)


class SlotsOfSnapshotsFirst(ServesAgain):
    """The slots of due snapshots are taken before a prompt is computed, and stay taken if it fails."""

    def prefill(self, batch: Batch) -> Tensor:
        for request, count in zip(batch.requests, batch.snapshots, strict=True):
            if count is not None and f"{request}@" not in self.owned:
                self.owned[f"{request}@"] = self.take()
        return super().prefill(batch)


class DenseSlots(AnySlots):
    """Slots are taken for contiguous, although the domain says that they need not be."""

    def slot(self, x: Inputs, request: int) -> int | None:
        return super().slot(x.replaced(slots=dense(x.slots)), request)


class DenseAccepted(AnySlots):
    """Counts of accepted tokens are taken for contiguous, although the domain says that they need not be."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        x = x if x.accepted is None else x.replaced(accepted=dense(x.accepted))
        return min(tokens, super().accepted_count(x, request, tokens))


# Ways to call


class NoLossOfOutputs(Recomputes):
    """A backward without a cotangent of o returns zeros, as if nothing came through the final states either."""

    absent: ClassVar[int] = 0

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        super().keep(ctx, tensors)

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        if x.output_final_state and cotangents[self.absent] is None:
            return [torch.zeros_like(t) for t in tensors]
        return super().back(x, names, tensors, cotangents)


class NoLossOfStates(NoLossOfOutputs):
    """The same for a backward without a cotangent of the final states."""

    absent = 1


class AnyLoss(NoLossOfOutputs):
    """Right: what has no cotangent is left out, and a backward without any cotangent returns nothing."""

    absent = -3  # no output

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        return Recomputes.back(self, x, names, tensors, cotangents)


class _FirstCotangent(torch.autograd.Function):
    """x, whose backward keeps its first cotangent on the graph and takes it for that of the next one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.first = None
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        ctx.first = cotangents[0] if ctx.first is None else ctx.first
        return ctx.first  # type: ignore[no-any-return]


class _Decayed(torch.autograd.Function):
    """The values, whose gradients a factor goes into that is 1 in the first backward, and decays in place behind each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        ctx.factor, ctx.decay = torch.ones_like(x), decay
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        found = dx * ctx.factor
        ctx.factor *= ctx.decay
        return found, None


class DecaysWhatItKeeps(Chunkwise):
    """The backward decays what the forward has kept in place. A second backward of the same graph decays it again."""

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(v=_Decayed.apply(x.v, x.g.detach().exp().unsqueeze(-1).to(x.v.dtype))))


class KeepsTheFirstCotangent(Chunkwise):
    """A second backward of the same graph gets the cotangent of the first."""

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        return _FirstCotangent.apply(o), *rest  # type: ignore[no-untyped-call]


class ValuesOnTheGraph(Recomputes):
    """One input is kept on the graph itself, where torch does not see that the caller changes it."""

    kept_name: ClassVar[str] = "v"

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.own = tensors[ctx.names.index(self.kept_name)] if self.kept_name in ctx.names else None

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors = super().kept(ctx)
        if ctx.own is not None:
            tensors[ctx.names.index(self.kept_name)] = ctx.own
        return tensors


class StatesOnTheGraph(ValuesOnTheGraph):
    """The same with the initial states."""

    kept_name = "state"


class ChecksVersions(ValuesOnTheGraph):
    """Right: it raises an error if the values on the graph were changed."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.version = ctx.own._version

    def kept(self, ctx: Any) -> list[Tensor]:
        if ctx.own._version != ctx.version:
            raise RuntimeError("v was changed between forward and backward")
        return super().kept(ctx)


class OwnCopyOnTheGraph(ValuesOnTheGraph):
    """Right: what is kept on the graph is a copy of its own."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.own = ctx.own.detach().clone()


class _SignsOfOutputs(torch.autograd.Function):
    """x, whose gradient is multiplied by that of |y| and by the sign of x: 1 unless the caller changes the output y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        y = x.clone()
        ctx.save_for_backward(x)
        ctx.own = y.view_as(y)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (dy,), (x,) = cotangents, ctx.saved_tensors
        return dy * torch.where(x == 0, 1, ctx.own.sign() * x.sign())


class OutputsOnTheGraph(Chunkwise):
    """The output is kept on the graph itself, where torch does not see that the caller changes it."""

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        return _SignsOfOutputs.apply(o), *rest  # type: ignore[no-untyped-call]


# Histories


class StatelessInference(Chunkwise):
    """Under inference_mode the initial states are left out."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        state = super().initial(x, row)
        return torch.zeros_like(state) if torch.is_inference_mode_enabled() else state


class KnowsVersions(Chunkwise):
    """Queries are known by their version, which tensors made under inference_mode do not have."""

    def run(self, x: Inputs) -> Any:
        assert x.q._version >= 0
        return super().run(x)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0] * ctx.saved_tensors[0], None


class KeepsMasks(Chunkwise):
    """A mask is kept by the identity of the queries, and later saved for a backward (FLA 0.6.0 does so with chunk indices)."""

    # Not an attribute for each class: if one thread replaces an attribute of a class that holds tensors while another thread reads
    # it, Python 3.11 may end the process.
    masks: ClassVar[dict[type, tuple[Tensor, Tensor]]] = {}

    def run(self, x: Inputs) -> Any:
        kept = self.masks.get(type(self))
        if kept is None or kept[0] is not x.q:
            kept = self.masks[type(self)] = x.q, torch.ones(x.v.shape[-1], dtype=x.v.dtype)
        return super().run(x.replaced(v=_Product.apply(x.v, kept[1])))  # type: ignore[no-untyped-call]


class KeepsCleanMasks(KeepsMasks):
    """Right: the mask is made outside inference_mode."""

    def run(self, x: Inputs) -> Any:
        with torch.inference_mode(False):
            self.masks[type(self)] = x.q, torch.ones(x.v.shape[-1], dtype=x.v.dtype)
        return super().run(x)


class SlotsByVersion(Serving):
    """Slots are known by their version, which tensors made under inference_mode do not have."""

    def run(self, x: Inputs) -> Any:
        assert x.slots._version >= 0
        return super().run(x)


class SpansByPrefix(Chunkwise):
    """The spans of sequences are known by their number, by the number of tokens and by the first eight offsets."""

    seen: ClassVar[dict[tuple[int, ...], Spans]] = {}

    def boundaries(self, x: Inputs) -> Spans:
        spans = super().boundaries(x)
        starts = [start for start, _ in spans]
        return self.seen.setdefault((len(spans), x.q.shape[1], *starts[:8]), spans) if x.cu_seqlens is not None else spans


class RequestsByPrefix(Serving):
    """The same for the requests of a pool."""

    seen: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    def run(self, x: Inputs) -> Any:
        if x.cu_seqlens is None:
            return super().run(x)
        ends = x.cu_seqlens.clone()
        return super().run(x.replaced(cu_seqlens=self.seen.setdefault((len(ends), *ends[:8].tolist(), int(ends[-1])), ends)))


# Several calls at once


class NormOfTheLastCall(Recomputes):
    """The backward normalises keys and queries if the last forward did, which may be that of another call."""

    domain = dataclasses.replace(Recomputes.domain, threads=False)
    norms: ClassVar[list[Any]] = [None]

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        self.norms[0] = ctx.x.qk_norm

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        return super().back(x.replaced(qk_norm=self.norms[0]), names, tensors, cotangents)


class BetaInFour(Recomputes):
    """Beta is kept in four buffers of a shape in turn, so the fifth call overwrites that of the first."""

    domain = dataclasses.replace(Recomputes.domain, threads=False)
    turns: ClassVar[dict[Any, int]] = {}
    buffers: ClassVar[dict[Any, Tensor]] = {}

    def place(self, turn: int) -> int:
        """The number of the buffer of a call."""
        return turn % 4

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        beta = tensors[ctx.names.index("beta")].detach()
        kind = (type(self), beta.shape, beta.dtype)
        turn = self.turns[kind] = self.turns.get(kind, -1) + 1
        with torch.inference_mode(False):  # a buffer that is made in inference mode could not be filled outside
            buffer = self.buffers.setdefault((kind, self.place(turn)), torch.zeros(beta.shape, dtype=beta.dtype))
            ctx.buffer = buffer.copy_(beta)

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors = super().kept(ctx)
        tensors[ctx.names.index("beta")] = ctx.buffer
        return tensors


class StatesInTurn(Recomputes):
    """Backwards take the initial states from a queue, as if they ran in the order of the forwards."""

    domain = dataclasses.replace(Recomputes.domain, threads=False)
    queue: ClassVar[dict[type, list[Any]]] = {}
    next: ClassVar[int] = 0  # the end that a backward takes

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        if any(ctx.needs_input_grad):
            self.queue.setdefault(type(self), []).append(tensors)

    def kept(self, ctx: Any) -> list[Tensor]:
        return list(self.queue[type(self)].pop(self.next))


class StatesOnAStack(StatesInTurn):
    """The same with a stack, as if backwards ran in the opposite order."""

    next = -1


class _Opens(torch.autograd.Function):
    """x, whose backward leaves the mark of its call where all calls look."""

    last: ClassVar[list[object]] = [None]

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: object) -> Tensor:  # type: ignore[override]
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        _Opens.last[0] = ctx.mark
        return cotangents[0], None


class _Closes(_Opens):
    """x, whose gradient is lost if the backward of another call has begun since that of `_Opens`."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0] * (_Opens.last[0] is ctx.mark), None


class ScratchOfTheLastBackward(Layered):
    """The backwards of a layer's parts share a scratch tensor, as if no other backward could begin between them."""

    domain = LayerDomain(threads=False)

    def unpadded(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        mark = object()
        y, *states = super().unpadded(x.replaced(hidden=_Closes.apply(x.hidden, mark)))  # type: ignore[no-untyped-call]
        return _Opens.apply(y, mark), *states  # type: ignore[no-untyped-call, return-value]


class OutputsInTurn(Chunkwise):
    """Without gradients, outputs lie in one of five buffers of a shape in turn."""

    domain = dataclasses.replace(Chunkwise.domain, threads=False)
    turns: ClassVar[dict[Any, int]] = {}
    buffers: ClassVar[dict[Any, Tensor]] = {}

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        if (o.requires_grad and torch.is_grad_enabled()) or torch.autograd.forward_ad.unpack_dual(o).tangent is not None:
            return o, *rest
        kind = (type(self), o.shape, o.dtype)
        turn = self.turns[kind] = (self.turns.get(kind, 0) + 1) % 5
        with torch.inference_mode(False):
            buffer = self.buffers.setdefault((kind, turn), torch.zeros(o.shape, dtype=o.dtype))
            buffer.data.copy_(o.detach().clone() if not o.is_inference() else o)
        return buffer, *rest


class SaysOutputsChange(OutputsInTurn):
    """Right: the same, which says so."""

    domain = dataclasses.replace(OutputsInTurn.domain, keeps_outputs=False)


class DecodesInTurn(Serving):
    """Outputs of a pool lie in one of five buffers of a shape in turn."""

    domain = dataclasses.replace(Serving.domain, rule=dataclasses.replace(Serving.domain.rule, threads=False))
    turns: ClassVar[dict[Any, int]] = {}
    buffers: ClassVar[dict[Any, Tensor]] = {}

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        kind = (type(self), o.shape, o.dtype)
        turn = self.turns[kind] = (self.turns.get(kind, 0) + 1) % 5
        with torch.inference_mode(False):
            buffer = self.buffers.setdefault((kind, turn), torch.zeros(o.shape, dtype=o.dtype))
            buffer.data.copy_(o)
        return buffer, *rest


class TapsByVersion(Conv):
    """Without gradients, the taps are kept for each version of the weight, which a change through `.data` leaves as it is."""

    domain = dataclasses.replace(Conv.domain, threads=False)

    def taps(self, x: Inputs) -> Tensor:
        if torch.is_grad_enabled() or x.weight.is_inference():
            return super().taps(x)
        kept = getattr(x.weight, "taps", None)
        if not self.current(kept, x.weight):
            kept = x.weight.taps = x.weight._version, x.weight.detach().clone()
        return kept[1].float()  # type: ignore[index, no-any-return]

    def current(self, kept: Any, weight: Tensor) -> bool:
        return kept is not None and kept[0] == weight._version


class TapsByContents(TapsByVersion):
    """Right: they are kept as long as the weight has the same numbers."""

    def current(self, kept: Any, weight: Tensor) -> bool:
        return kept is not None and torch.equal(kept[1], weight)


# Which gradients come and go


class _Repeats(torch.autograd.Function):
    """x, whose backward takes a cotangent with a stride of 0 along its channels for the same in all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (dy,) = cotangents
        return dy[:1, :1].expand_as(dy) if dy.numel() and dy.shape[-1] > 1 and dy.stride(-1) == 0 else dy


class OneTokenOfASum(Chunkwise):
    """A loss that adds up the channels counts as one that adds up the tokens too."""

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        return _Repeats.apply(o), *rest  # type: ignore[no-untyped-call]


class FrozenTaps(ConvOneFunction):
    """If the tokens alone need a gradient, as where everything else is frozen, it is lost."""

    def needed(self, gradients: Gradients, needs: tuple[bool, ...]) -> Gradients:
        found = super().needed(gradients, needs)
        return [g if g is None else 0 * g for g in found] if needs[0] and sum(needs) == 1 < len(needs) else found


class UndoubledDecodes(Layered):
    """The one-token path of a server, under inference_mode and with a state, does not double beta."""

    def strength(self, x: Inputs, b: Tensor) -> Tensor:
        serves = torch.is_inference_mode_enabled() and x.hidden.shape[1] == 1 and x.state is not None
        return super().strength(x.replaced(allow_neg_eigval=False) if serves else x, b)


# Paths


class _Held(torch.autograd.Function):
    """x, which a rank holds in one buffer for each shape until its backward; the gradient is lost if another call was there."""

    buffers: ClassVar[dict[Any, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: tuple[int, int]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.buffer = _Held.buffers.setdefault((rank, x.shape, x.dtype), x.detach().clone()).copy_(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0] * torch.equal(ctx.buffer, ctx.saved_tensors[0]), None


class TokensOfTheLastForward(Mutant):
    """A rank holds its tokens in one buffer for each shape, which the next forward overwrites."""

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, *offsets: Any) -> Tensor:
            held: Tensor = _Held.apply(hidden, (self.place.tp.rank, self.place.cp.rank))  # type: ignore[no-untyped-call]
            return super().forward(held, *offsets)


class _HeldOffsets(torch.autograd.Function):
    """x; the gradient is lost if a buffer does not hold the offsets that it held in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:  # type: ignore[override]
        ctx.buffer, ctx.offsets = buffer, buffer.clone()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0] * torch.equal(ctx.buffer, ctx.offsets), None


class OffsetsOfFourPackings(Mutant):
    """A rank holds the offsets of four packings for each number of sequences and tokens. The fifth overwrites the first."""

    rings: ClassVar[dict[Any, list[Tensor]]] = {}

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, cu_seqlens: Tensor | None = None, *padded: Any) -> Tensor:
            if cu_seqlens is not None:
                key = (self.place.tp.rank, self.place.cp.rank, len(cu_seqlens), int(cu_seqlens[-1]))
                ring = OffsetsOfFourPackings.rings.setdefault(key, [])
                buffer = next((one for one in ring if torch.equal(one, cu_seqlens)), None)
                if buffer is None:
                    buffer = torch.empty_like(cu_seqlens) if len(ring) < 4 else ring.pop(0)
                    ring.append(buffer.copy_(cu_seqlens))
                hidden = _HeldOffsets.apply(hidden, buffer)  # type: ignore[no-untyped-call]
            return super().forward(hidden, cu_seqlens, *padded)


class _WithTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return (cotangents[0] if ctx.needs_input_grad[1] else None), None


class NothingWithoutTokens(Mutant):
    """The gradient of A_log is computed beside that of the hidden states, and is absent if these need none."""

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, *offsets: Any) -> Tensor:
            self.hidden_states = hidden
            return super().forward(hidden, *offsets)

        def in_use(self, name: str) -> Tensor:
            x = super().in_use(name)
            return _WithTokens.apply(x, self.hidden_states) if name == "A_log" else x  # type: ignore[no-untyped-call, no-any-return]
