"""Implementations that are wrong in one way in which callers use them, and right ones that come near, for tests/test_uses.py."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.pools.domain import POOL_VIEWS
from properties.words.domain import VIEWS
from verify.zoo.base import Chunkwise, Serving
from verify.zoo.wrong_recompute import Gradients, Recomputes

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
