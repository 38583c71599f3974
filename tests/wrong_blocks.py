"""Faults that are planted in the adapter of vLLM's blocks, as adapters of their own."""

from collections.abc import Sequence

from torch import Tensor

from properties.traces.case import Batch, Sizes
from properties.traces.events import PADDING
from verify.adapters.base import Engine
from verify.adapters.vllm_pool import BlockEngine, Pool, Rows


class KeepsDrafts(BlockEngine):
    """Goes on from the last token of a draft, accepted or not (vllm 39273)."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit([self.sizes.drafts if request != PADDING else 0 for request in self.drafted])


class ForgetsAccepted(BlockEngine):
    """Sets the accepted tokens to 1, as for a request that joins the batch (vllm 47123)."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit([min(count, 1) for count in accepted])


class ForgetsTheAbsent(BlockEngine):
    """Sets the accepted tokens of a request to 1 if it is left out of a step, as for a request that joins the batch."""

    def step(self, batch: Batch, *, drafts: bool = False) -> Tensor:
        o = super().step(batch, drafts=drafts)
        self.accepted |= dict.fromkeys(self.accepted.keys() - {*batch.requests}, 1)
        return o


class DecodesPrompts(BlockEngine):
    """Takes prompts of one token for decodes, which go on from what the block holds (vllm 36917)."""

    def prefilling(self, rows: Rows) -> list[bool]:
        return [more and count > 1 for more, count in zip(super().prefilling(rows), rows.counts, strict=True)]


class StaleTail(BlockEngine):
    """Gives padding rows the blocks of the first row, as a table that is not filled behind its rows (vllm 33326, 39064)."""

    def table(self, rows: Rows, padding: int) -> list[list[int]]:
        table = super().table(rows, padding)
        return [*table[: len(rows.places)], *[table[0]] * padding]


class PlainDecodes(BlockEngine):
    """Takes decodes without drafts for plain decodes, which begin at the first block (vllm 40738)."""

    def draft_lengths(self, prefilling: Sequence[bool], counts: Sequence[int], *, drafts: bool) -> list[int]:
        return [length or -1 for length in super().draft_lengths(prefilling, counts, drafts=drafts)]


class LeaksDrafts(BlockEngine):
    """Gives back the first block of a request alone (sglang 20182)."""

    def free(self, request: str) -> None:
        self.tables[request] = self.tables[request][:1]
        super().free(request)


def adapter(kind: type[BlockEngine]) -> type[Pool]:
    """The class of an adapter that opens an engine of a kind."""

    class Wrong(Pool):
        def open(self, sizes: Sizes) -> Engine:
            return kind(sizes)

    return Wrong


Drafts, Accepted, Absent, Prompts, Tail, Decodes, Leaks = map(
    adapter, (KeepsDrafts, ForgetsAccepted, ForgetsTheAbsent, DecodesPrompts, StaleTail, PlainDecodes, LeaksDrafts)
)
