"""Faults that are planted in the adapter of SGLang's pool, as adapters of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from properties.traces.case import Batch, Sizes
from properties.traces.events import PADDING
from verify.adapters.base import Engine
from verify.adapters.sglang_pool import MambaEngine, Pool


class KeepsDrafts(MambaEngine):
    """Commits the whole draft, as before a commit of accepted steps existed (vllm 39273)."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit([self.sizes.drafts if count else 0 for count in accepted])


class ClearsNothing(MambaEngine):
    """Admits requests without clearing their slots (sglang 26941)."""

    def admit(self, requests: Sequence[str]) -> None:
        self.owned |= {request: int(self.take()) for request in requests}


class LastSlotIsPadding(MambaEngine):
    """Padding rows have the index of the last slot, which is live (sglang 20915)."""

    def indices(self, batch: Batch) -> Tensor:
        slots = [self.owned[request] if request != PADDING else self.sizes.slots for request in batch.requests]
        return torch.tensor(slots, dtype=torch.int32, device=self.device)


class ChunkBefore(MambaEngine):
    """Snapshots are one chunk early in h (sglang 33515)."""

    def track(self, batch: Batch, mask: list[bool], indices: Tensor, targets: Tensor, h: Tensor) -> None:
        super().track(batch, mask, indices, targets, h.roll(1, 1))


class SwapsStatesAlone(MambaEngine):
    """What is swapped out has no window (sglang 22493)."""

    def swap(self, request: str) -> None:
        super().swap(request)
        self.windows[self.owned[request]] = 0


def adapter(kind: type[MambaEngine]) -> type[Pool]:
    """The class of an adapter that opens an engine of a kind."""

    class Wrong(Pool):
        def open(self, sizes: Sizes) -> Engine:
            return kind(sizes)

    return Wrong


Drafts, Clears, Padding, Chunks, Swaps = map(
    adapter, (KeepsDrafts, ClearsNothing, LastSlotIsPadding, ChunkBefore, SwapsStatesAlone)
)
