"""Implementations that are wrong only in what a check has at a fixed place: tests/laws/test_fixed_places.py says where."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.norm import EPS
from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from properties.rules.domain import Domain
from properties.traces.case import Batch, Sizes
from verify.adapters.gdn.pool import Progress
from verify.zoo.base import Chunkwise, Layered, Serving
from verify.zoo.modules import Conv, ConvMasked, GatedNorm, L2Norm
from verify.zoo.wrong_calls import LinearAttention
from verify.zoo.wrong_histories import ServesAgain
from verify.zoo.wrong_recompute import ConvOneFunction, Gradients, LayerOfRecomputes, Recomputes
from verify.zoo.wrong_traces import Serves

# Memory


class ScratchInValues(Recomputes):
    """The forward of a call with gradients uses v as scratch memory, and the backward puts the numbers of v back."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        ctx.originals, ctx.clean = tensors, [t.detach().clone() for t in tensors]
        place = ctx.names.index("v")
        ctx.scratch = tensors[place].detach() if any(ctx.needs_input_grad) else torch.zeros(0)

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().rule(x)

    def kept(self, ctx: Any) -> list[Tensor]:
        ctx.scratch.data.copy_(ctx.clean[ctx.names.index("v")]) if ctx.scratch.numel() else None
        return [t.clone() for t in ctx.clean]

    def function(self) -> type[torch.autograd.Function]:
        return _Scribbles


class _Scribbles(Recomputes().function()):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rule: Recomputes, x: Inputs, names: tuple[str, ...], *tensors: Tensor) -> Any:
        answer = Recomputes().function().forward(ctx, rule, x, names, *tensors)  # type: ignore[attr-defined]
        ctx.scratch.data.neg_()
        return answer


# Ways to call


class SavedStrides(Recomputes):
    """The backward reads saved tensors with the strides that they had in the forward."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.strides = [t.stride() for t in tensors]

    def kept(self, ctx: Any) -> list[Tensor]:
        return [t.as_strided(t.shape, stride) for t, stride in zip(super().kept(ctx), ctx.strides, strict=True)]


class BiasWithTheWeight(ConvOneFunction):
    """The gradient of the bias is computed beside that of the weight: zeros where the weight needs none."""

    def needed(self, gradients: Gradients, needs: tuple[bool, ...]) -> Gradients:
        if len(needs) > 2 and needs[2] and not needs[1] and gradients[2] is not None:
            gradients[2] = torch.zeros_like(gradients[2])
        return super().needed(gradients, needs)


class OffsetsBySum(Conv):
    """Offsets on the host are kept by their number, their last one and their sum."""

    kept: ClassVar[dict[tuple[int, ...], list[tuple[int, int]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            return super().boundaries(x)
        key = (len(x.cu_seqlens), int(x.cu_seqlens[-1]), int(x.cu_seqlens.sum()))
        return self.kept.setdefault(key, super().boundaries(x))


class _Scaled(torch.autograd.Function):
    """Rows times their saved scales, of which autograd knows no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        return scale * (dy - y * (dy * y).sum(-1, keepdim=True)), None


class SavedScale(L2Norm):
    """The backward takes the saved scale of a row for a constant, so that second derivatives lack a part."""

    def run(self, x: Inputs) -> Tensor:
        rows = x.x.float()
        eps = EPS if x.eps is None else x.eps
        return _Scaled.apply(rows, (rows.detach().square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.x.dtype)


class OffsetsOfTheBackward(Recomputes):
    """While the backward runs the rule again, the class keeps its offsets. If that raises, later calls take them."""

    _again: ClassVar[Tensor | None] = None

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        OffsetsOfTheBackward._again = x.cu_seqlens
        gradients = super().back(x, names, tensors, cotangents)
        OffsetsOfTheBackward._again = None
        return gradients

    def rule(self, x: Inputs) -> Any:
        return super().rule(x if self._again is None or x.cu_seqlens is None else x.replaced(cu_seqlens=self._again))


class StatesInTwoBuffers(Chunkwise):
    """Without gradients, final states after one token lie in two buffers in turn: the third call overwrites the first"""

    buffers: ClassVar[dict[Any, list[Tensor]]] = {}

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Any:
        if state is None or x.cu_seqlens is not None or o.shape[1] != 1 or state.requires_grad or torch.is_inference_mode_enabled():
            return super().answer(x, o, state)
        two = self.buffers.setdefault(state.shape, [torch.empty_like(state), torch.empty_like(state)])
        two.reverse()
        return super().answer(x, o, two[0].copy_(state))


class SpansByKey(Chunkwise):
    """Spans are kept for the last offsets, whose key is stored before memory for their lengths is there."""

    key: ClassVar[tuple[int, ...]] = ()
    spans: ClassVar[list[tuple[int, int]]] = []

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None or self.key == tuple(x.cu_seqlens.tolist()):
            return super().boundaries(x) if x.cu_seqlens is None else self.spans
        SpansByKey.key = tuple(x.cu_seqlens.tolist())
        lengths = (x.cu_seqlens[1:] - x.cu_seqlens[:-1]).tolist()
        SpansByKey.spans = [(start, start + length) for start, length in zip(self.key, lengths, strict=False)]
        return self.spans


class ForgetsInitialStates(Recomputes):
    """The first backward frees its copy of the initial states, and a second backward takes zeros."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.freed = False

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors = super().kept(ctx)
        if ctx.freed and "state" in ctx.names:
            tensors[ctx.names.index("state")] = torch.zeros_like(tensors[ctx.names.index("state")])
        ctx.freed = True
        return tensors


class TurnsHeadsTheSecondTime(ForgetsInitialStates):
    """A second backward reads the values of the heads in the opposite order."""

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors, place = Recomputes.kept(self, ctx), ctx.names.index("v")
        tensors[place] = tensors[place].flip(2) if ctx.freed else tensors[place]
        ctx.freed = True
        return tensors


class GatesOfEightCalls(Recomputes):
    """Gates are kept in eight buffers for each shape, in turn, so the ninth later call overwrites those of the first one."""

    domain = Domain(threads=False)
    buffers: ClassVar[int] = 8
    rings: ClassVar[dict[Any, list[Tensor]]] = {}

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        g = tensors[ctx.names.index("g")].detach()
        ring = self.rings.setdefault((self.buffers, g.shape, g.dtype), [torch.empty_like(g) for _ in range(self.buffers)])
        ring.append(ring.pop(0).copy_(g))
        ctx.buffer = ring[-1]

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors = super().kept(ctx)
        tensors[ctx.names.index("g")] = ctx.buffer
        return tensors


class LayerOfEightCalls(LayerOfRecomputes):
    """The gates of its rule are kept in eight buffers for each shape, in turn."""

    domain = LayerDomain(threads=False)

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return GatesOfEightCalls().run(x)


class OffsetsOfEightPackings(Recomputes):
    """Offsets are kept in eight buffers for each number of tokens and sequences. Calls of one packing share a buffer."""

    domain = Domain(threads=False)
    rings: ClassVar[dict[Any, list[Tensor]]] = {}

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        offsets = ctx.x.cu_seqlens
        if offsets is None:
            return
        ring = self.rings.setdefault((len(offsets), int(offsets[-1])), [])
        buffer = next((one for one in ring if torch.equal(one, offsets)), None)
        if buffer is None:
            buffer = torch.empty_like(offsets) if len(ring) < 8 else ring.pop(0)
            ring.append(buffer.copy_(offsets))
        ctx.x = ctx.x.replaced(cu_seqlens=buffer)


# Sizes


class DraftsAsLongAsTheFirst(Serves):
    """In a verification, rows from the 65th on have the number of tokens of the first row: outputs of later tokens stay zeros."""

    def verify(self, batch: Batch) -> Tensor:
        o, first = super().verify(batch), batch.lengths[0]
        real = [row < 64 or token < first for row, length in enumerate(batch.lengths) for token in range(length)]
        return o * torch.tensor(real).view(-1, 1, 1)


class PadsInBf16(ConvMasked):
    """Numbers of padding tokens are in bf16, where 257 is 256: the last token of the padding is taken for a real one."""

    def real(self, tokens: Tensor, pads: tuple[int, ...]) -> Tensor:
        return super().real(tokens, tuple(int(pad) for pad in torch.tensor(pads).bfloat16().tolist()))


class LayerPadsInBf16(Layered):
    """The same in a layer."""

    def run(self, x: Inputs) -> Any:
        return super().run(x if x.pads is None else x.replaced(pads=tuple(map(int, torch.tensor(x.pads).bfloat16().tolist()))))


class HeadsOf16Bits(Chunkwise):
    """The sequence and head number 65,536 and those after it get the outputs of the first ones."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Any:
        if x.cu_seqlens is None and o.shape[0] * o.shape[2] > 2**16:
            rows = o.transpose(1, 2).flatten(0, 1)
            o = rows[torch.arange(len(rows)) % 2**16].unflatten(0, (o.shape[0], -1)).transpose(1, 2)
        return o, state


class TokensOf12Bits(Chunkwise):
    """Tokens from 4,096 on get the outputs of the first ones."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Any:
        return o[:, torch.arange(o.shape[1]) % 2**12] if x.cu_seqlens is None else o, state


class TokensOf16Bits(Chunkwise):
    """Tokens from 65,536 on get the outputs of the first ones."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Any:
        return o[:, torch.arange(o.shape[1]) % 2**16] if x.cu_seqlens is None else o, state


class RowsOf16Bits(GatedNorm):
    """Rows of the norm from 65,535 on, tokens times heads, stay zeros."""

    def run(self, x: Inputs) -> Tensor:
        y = super().run(x)
        return y * (torch.arange(y.shape[:-1].numel()) < 2**16 - 1).reshape(*y.shape[:-1], 1)


class TapsOf16Bits(Conv):
    """Tokens of a convolution from 65,536 on get the outputs of the first ones."""

    def answer(self, x: Inputs, y: Tensor, state: Tensor) -> Any:
        return super().answer(x, y.flatten(0, 1)[torch.arange(y.shape[:2].numel()) % 2**16].reshape(y.shape), state)


class RequestsUpTo1024(Serving):
    """Requests from the 1,025th on are taken for padding."""

    def slot(self, x: Inputs, request: int) -> int | None:
        return super().slot(x, request) if request < 1024 else None


class RowsUpTo16(Serves):
    """Rows from the 17th on that have requests are computed, and not written."""

    most: ClassVar[int] = 16

    def write(self, rows: Sequence[Progress], counts: Sequence[int]) -> None:
        super().write(rows[: self.most], counts[: self.most])


class RowsUpTo64(RowsUpTo16):
    """Rows from the 65th on are not written."""

    most = 64


class SnapshotsByGroup(Serves):
    """Rows are done in groups of 32. A later group takes a snapshot from the row of the first group that has its place."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        super().save(batch, rows)
        for place, (row, request, count) in enumerate(zip(rows, batch.requests, batch.snapshots, strict=True)):
            if count is not None:
                other = rows[place % 32] if place >= 32 else row
                state = other.states[min(count, len(other.states) - 1)]
                self.states[self.owned[f"{request}@"]] = state.to(self.states.dtype)


class TableOfParts(Serves):
    """Snapshots within a row come from a table of the states where parts begin. A row of whole parts counts as one part more."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        super().save(batch, rows)
        first, every = 0, self.sizes.snapshots
        table = [row.states[place] for row in rows for place in range(0, len(row.o), every or 1)]
        for row, request, count in zip(rows, batch.requests, batch.snapshots, strict=True):
            if every and count and count < len(row.o) and not count % every:
                state = table[min(first + count // every, len(table) - 1)]
                self.states[self.owned[f"{request}@"]] = state.to(self.states.dtype)
            first += len(row.o) // (every or 1) + 1


class DraftsOfTheLastEngine(Serves):
    """What a verification has computed is kept for its commit by the process, not by the engine."""

    kept: ClassVar[list[Sequence[Progress]]] = [()]

    def verify(self, batch: Batch) -> Tensor:
        o = super().verify(batch)
        self.kept[0] = self.drafted
        return o

    def commit(self, accepted: Sequence[int]) -> None:
        kept = self.kept[0] if len(self.kept[0]) == len(accepted) else self.drafted
        self.write(kept, accepted)


# Moves of requests


class HostCopyOfTheFirstSwap(Serves):
    """A swap takes a request's copy on the host, if there is one from an earlier swap."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.host: dict[str, tuple[Tensor, Tensor]] = {}

    def admit(self, requests: Sequence[str]) -> None:
        for request in requests:
            self.host.pop(request, None)
        super().admit(requests)

    def swap(self, request: str) -> None:
        slot = self.owned.pop(request)
        state, window = self.host.setdefault(request, (self.states[slot].clone(), self.windows[slot].clone()))
        self.give(slot)
        slot = self.owned[request] = self.take()
        self.states[slot], self.windows[slot] = state, window


class _CleanCopies(HostCopyOfTheFirstSwap):
    """A base: steps that say so make a request's copy on the host an old one."""

    steps: ClassVar[tuple[str, ...]] = ("prefill", "decode", "verify")

    def prefill(self, batch: Batch) -> Tensor:
        return self._step("prefill", batch, super().prefill)

    def decode(self, batch: Batch) -> Tensor:
        return self._step("decode", batch, super().decode)

    def verify(self, batch: Batch) -> Tensor:
        return self._step("verify", batch, super().verify)

    def _step(self, name: str, batch: Batch, step: Callable[[Batch], Tensor]) -> Tensor:
        if name in self.steps:
            for request in batch.requests:
                self.host.pop(request, None)
        return step(batch)


class DraftsLeaveTheCopy(_CleanCopies):
    """A swap copies nothing if the copy on the host is still that of the request. A commit does not say that it no longer is."""

    steps = ("prefill", "decode")


class PromptsLeaveTheCopy(_CleanCopies):
    """The same of a prefill."""

    steps = ("decode", "verify")


class MicrobatchesOf32Rows(ServesAgain):
    """A prefill is taken in parts of 32 rows, each of which is written. If it fails behind the first one, its rows come twice."""

    def prefill(self, batch: Batch) -> Tensor:
        tokens = [*zip(*(x.split(list(batch.lengths)) for x in (batch.mixed, batch.a, batch.b)), strict=True)]
        rows = list[Progress]()
        for first in range(0, len(tokens), 32):
            some = slice(first, first + 32)
            rows += (self.row(self.slot(name), *row) for name, row in zip(batch.requests[some], tokens[some], strict=True))
            self.write(rows[some], batch.lengths[some])
        o = self.outputs(rows)
        self.save(batch, rows)
        return o


class LongAttention(LinearAttention):
    """Right: sequences of up to 300 tokens."""

    domain = dataclasses.replace(LinearAttention.domain, longest=300)


class PositionsInBf16(LongAttention):
    """The mask compares positions in bf16, which has every second one from 256 on: token 256 sees token 257."""

    def mask(self, tokens: int) -> Tensor:
        places = torch.arange(tokens).bfloat16()
        return places.unsqueeze(-1) >= places
