"""Implementations that are wrong in one way in which callers use them, and right ones that come near: tests/laws/test_uses.py."""

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.pools.domain import POOL_VIEWS
from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from properties.words.domain import VIEWS
from verify.adapters.gdn.layer import GatedDeltaNet
from verify.zoo.base import Chunkwise, Serving
from verify.zoo.wrong_histories import ServesAgain
from verify.zoo.wrong_paths import Mutant
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


class SectionsOfInference(Chunkwise):
    """The same where q requires no gradient, as a function of one tensor has no gradients for its parts."""

    def run(self, x: Inputs) -> Any:
        return super().run(x if x.q.requires_grad else in_order(x))


class BlocksOfValues(Serving):
    """Blocks of 64 channels of values, each of which is stored before the next one has its memory."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        blocks = zip(x.v.split(64, -1), x.pool.split(64, -1), strict=True)
        return torch.cat([super(BlocksOfValues, self).run(x.replaced(v=v, pool=pool))[0] for v, pool in blocks], -1), x.pool


class BlocksOfHeads(Serving):
    """Blocks of 32 value heads, each of which is stored before the next one has its memory."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        each = x.v.shape[2] // x.q.shape[2]
        x = x.replaced(q=x.q.repeat_interleave(each, 2), k=x.k.repeat_interleave(each, 2))
        names = ("q", "k", "v", "g", "beta")
        blocks = zip(*(x[name].split(32, 2) for name in names), x.pool.split(32, 1), strict=True)
        runs = (x.replaced(**dict(zip((*names, "pool"), block, strict=True))) for block in blocks)
        return torch.cat([super(BlocksOfHeads, self).run(one)[0] for one in runs], 2), x.pool


class WorkspaceBeforeItIsThere(Chunkwise):
    """Calls without gradients have a workspace for each shape, which is noted before its memory is there."""

    domain = dataclasses.replace(Chunkwise.domain, threads=False)

    def __init__(self) -> None:
        self.spaces: dict[torch.Size, Tensor | None] = {}

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        if torch.is_grad_enabled() and o.requires_grad:
            return o, *rest
        if o.shape not in self.spaces:
            self.spaces[o.shape] = None
            with torch.inference_mode(mode=False):
                self.spaces[o.shape] = torch.empty(o.shape)
        space = self.spaces[o.shape]
        assert space is not None
        return space.data.copy_(o).to(o.dtype, copy=True), *rest


class SumsThatAreCleared(Chunkwise):
    """Calls without gradients add their outputs to zeros, which they leave behind as zeros for the next call of the shape."""

    domain = dataclasses.replace(Chunkwise.domain, threads=False)

    def __init__(self) -> None:
        self.sums: dict[Any, Tensor] = {}

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        if torch.is_grad_enabled() and o.requires_grad:
            return o, *rest
        key = o.shape, o.dtype, x.v.shape
        if key not in self.sums:
            with torch.inference_mode(mode=False):
                self.sums[key] = torch.zeros(o.shape)
        sums = self.sums[key].data.add_(o)
        o = sums.to(o.dtype, copy=True)
        sums.zero_()
        return o, *rest


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


class TokensInPlace(Serving):
    """Each token of a request is stored in a slot of float32 before the next one has its memory."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        if x.cu_seqlens is not None or x.accepted is not None or x.pool.dtype != torch.float32:
            return super().run(x)
        each, outputs = ("q", "k", "v", "g", "beta"), []
        for token in range(x.v.shape[1]):
            begins = x.has_initial_state if token == 0 or x.has_initial_state is None else torch.ones_like(x.has_initial_state)
            one = x.replaced(**{name: x[name][:, token : token + 1] for name in each}, has_initial_state=begins)
            outputs.append(super().run(one)[0])
        return torch.cat(outputs, 1), x.pool


class SlotsInHalf(Serving):
    """Right: slots may be of float16, where a number over 65,504 is stored as infinity."""

    domain = dataclasses.replace(Serving.domain, state_dtypes=("fp16",))


class ClearsSlotsFirst(SlotsInHalf):
    """What a request begins from is read, its slot is cleared, and only then its tokens are computed."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state = super().read(x, request, slot).clone()
        x.pool[slot] = 0
        return state


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
