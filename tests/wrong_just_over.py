"""Implementations that are wrong only just over a limit: tests/test_just_over.py says which case of a check shows each of them."""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from verify.adapters.gdn.pool import Progress
from verify.zoo.base import Chunkwise, Layered, Serving
from verify.zoo.modules import Conv, GatedNorm
from verify.zoo.wrong_gates import Stepwise
from verify.zoo.wrong_traces import Serves

# Rules


class EqualPast1024(Chunkwise):
    """Sequences from the 1,025th on are cut as if they all had the same length."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        found = super().boundaries(x)
        first, count = 1024, len(found) - 1024
        if x.cu_seqlens is None or count <= 0:
            return found
        start, end = found[first][0], found[-1][1]
        cuts = [start + (end - start) * number // count for number in range(count + 1)]
        return [*found[:first], *itertools.pairwise(cuts)]


class KeyHeadsOf8Bits(Chunkwise):
    """Of grouped heads, the value heads of the 257th key head read the first one."""

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        wrong = value_heads > x.shape[2]
        return super().repeat(x[:, :, torch.arange(x.shape[2]) % 256] if wrong else x, value_heads)


class RatiosOf6Bits(Chunkwise):
    """The number of value heads of a key head is a signed number of 7 bits: of 64, the key head belongs to the first 63."""

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        found = super().repeat(x, value_heads)
        ratio = value_heads // x.shape[2]
        return found * (torch.arange(value_heads) % ratio < 63).view(-1, 1) if ratio > 63 else found


class BatchesUpTo128(Chunkwise):
    """Rows of a batch from the 129th on begin from the states of the first ones."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row % 128 if x.cu_seqlens is None else row)


class SecondLongOfABatch(Chunkwise):
    """If rows of a batch have over 1,024 tokens, all begin from the state of the first one."""

    _of_packed: ClassVar[bool] = False

    def initial(self, x: Inputs, row: int) -> Tensor:
        spans = [end - start for start, end in self.boundaries(x)]
        long = [place for place, tokens in enumerate(spans) if tokens > 1024]
        wrong = row in long and (x.cu_seqlens is not None) is self._of_packed
        return super().initial(x, long[0] if wrong else row)


class SecondLongPacked(SecondLongOfABatch):
    """If packed sequences have over 1,024 tokens, they begin from the state of the first of them."""

    _of_packed = True


class ChunksOf32UpTo1024(Chunkwise):
    """In chunks of 32 tokens, the 1,025th chunk and those after it are skipped."""

    chunk = 32
    size = 32

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Any:
        o, state = super().sequence(q, k, v, g, beta, state, scale)
        return o * (torch.arange(len(o)) < 1024 * self.size).view(-1, 1, 1), state


class StepsOf15Bits(Stepwise):
    """Token 32,768 and those after it get the outputs of the first ones."""

    def run(self, x: Inputs) -> Any:
        o, state = super().run(x)
        return o[:, torch.arange(o.shape[1]) % 2**15], state


# Pools


class FreshUpTo1024(Serving):
    """Requests from the 1,025th on never begin anew."""

    def begins(self, x: Inputs, request: int) -> bool:
        return request < 1024 and super().begins(x, request)


class AcceptedUpTo64(Serving):
    """Requests from the 65th on keep all of their tokens."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return super().accepted_count(x, request, tokens) if request < 64 else tokens


class PoolHeadsOf7Bits(Serving):
    """The 129th head gets the output of the first one."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        return o[:, :, torch.arange(o.shape[2]) % 128]


# Traces


class RowsUpTo128(Serves):
    """Rows from the 129th on that have requests are computed, and not written."""

    def write(self, rows: Sequence[Progress], counts: Sequence[int]) -> None:
        super().write(rows[:128], counts[:128])


class SlotsOf7Bits(Serves):
    """Rows read the slot of which the last 7 bits are those of their own."""

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        return super().read(slot % 128 if slot >= 0 else slot)


class RoomFor96PaddingRows(Serves):
    """A table of rows has 96 more rows than the pool has slots, and rows behind it are not written."""

    def write(self, rows: Sequence[Progress], counts: Sequence[int]) -> None:
        most = self.sizes.slots + 96
        super().write(rows[:most], counts[:most])


class PositionsOf8Bits(Serves):
    """A request of exactly 256 tokens is taken for a new one when it decodes."""

    most: ClassVar[int] = 256

    def decode(self, batch: Batch) -> Tensor:
        for request, start in zip(batch.requests, batch.starts, strict=True):
            if self.wrong(start):
                self.clear(self.owned[request])
        return super().decode(batch)

    def wrong(self, start: int) -> bool:
        return start == self.most


class PositionsUpTo512(PositionsOf8Bits):
    """A request of over 512 tokens is taken for a new one when it decodes."""

    most = 512

    def wrong(self, start: int) -> bool:
        return start > self.most


class ForkReadsTheSnapshot(Serves):
    """A fork reads its snapshot's slot until its own first step. A snapshot that is taken again is another one by then."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.waits: dict[int, int] = {}

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        super().fork(new, old, snapshot=snapshot)
        if snapshot:
            self.waits[self.owned[new]] = self.owned[f"{old}@"]

    def contents(self, owner: str) -> tuple[Tensor, Tensor]:
        slot = self.waits.get(self.slots()[owner], self.slots()[owner])
        return self.states[slot], self.windows[slot]

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        return super().read(self.waits.pop(slot, slot))

    def give(self, slot: int) -> None:
        for waiting in [new for new, source in self.waits.items() if source == slot]:
            self.copy(slot, waiting)
            del self.waits[waiting]
        self.waits.pop(slot, None)
        super().give(slot)


class RanksByName(Serves):
    """A transfer puts ranks together in the order of their names, in which 10 comes before 2."""

    def joined(self, ranks: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
        return super().joined([ranks[number] for number in sorted(range(len(ranks)), key=str)])


# Modules


class RowsOf17Bits(GatedNorm):
    """Rows of the norm from 131,072 on, tokens times heads, stay zeros."""

    def run(self, x: Inputs) -> Tensor:
        y = super().run(x)
        return y * (torch.arange(y.shape[:-1].numel()) < 2**17).reshape(*y.shape[:-1], 1)


class ChannelsOf12Bits(Conv):
    """Channels of a convolution from 4,096 on get the weights of the first ones."""

    def taps(self, x: Inputs) -> Tensor:
        return super().taps(x)[torch.arange(len(x.weight)) % 2**12]


class OffsetsOf12Bits(Conv):
    """Offsets over 4,096 are rounded to even numbers, as in a format of 12 bits."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        ends = [0, *(end for _, end in super().boundaries(x))]
        inner = [end // 2 * 2 if end > 2**12 else end for end in ends[:-1]]
        return list(itertools.pairwise([*inner, ends[-1]])) if x.cu_seqlens is not None else super().boundaries(x)


# Layers


class LayerHeadsUpTo64(Layered):
    """The 65th value head gets the output of the first one."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().rule(x)
        return o[:, :, torch.arange(o.shape[2]) % 64], state


# Domains that allow less


class FewSlots(Serves):
    """A right engine with a pool of 26 slots at most."""

    domain = TraceDomain(most_slots=26)

    def __init__(self, sizes: Sizes | None = None) -> None:
        assert sizes is None or sizes.slots <= 26, sizes
        super().__init__(sizes)
