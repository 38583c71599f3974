"""Wrong engines and paths that are right up to a usual limit, and wrong just over it."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.paths.domain import PathDomain
from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from tests.wrong_just_over import in_pairs
from verify.adapters.base import PathAdapter
from verify.adapters.gdn.pool import EPS, Progress
from verify.ranks.collectives import Place, gather_from
from verify.zoo.base import Chunkwise
from verify.zoo.wrong_traces import Serves

# Traces


class ServedPairsOfValueHeads(Serves):
    """Two value heads at a time, with one load of their key."""

    def normed(self, x: Tensor) -> Tensor:
        heads, value_heads = self.sizes.heads, self.sizes.value_heads
        chosen = super().normed(x).unflatten(-2, (2, value_heads))
        first = in_pairs(heads, value_heads) * (value_heads // heads)
        return chosen[..., first, :].flatten(-3, -2)


class EpsOfEach64Keys(Serves):
    """The squares of a key are added in blocks of 64 channels, and the eps of the norm with each of them."""

    def normed(self, x: Tensor) -> Tensor:
        eps = -(-x.shape[-1] // 64) * EPS
        x = x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
        return x.repeat_interleave(self.sizes.value_heads // self.sizes.heads, -2)


class StagedByRow(Serves):
    """States for the snapshots of prompts lie in a buffer, in places that are counted over decodes too."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        super().save(batch, rows)
        due = [place for place, count in enumerate(batch.snapshots) if count is not None]
        prompts = [place for place in due if not batch.starts[place]]
        staged = [rows[place].states[batch.snapshots[place] or 0] for place in prompts]
        for number, place in enumerate(due):
            if place in prompts:
                state = staged[number] if number < len(staged) else torch.zeros_like(staged[0])
                self.states[self.owned[f"{batch.requests[place]}@"]] = state.to(self.states.dtype)


class StepsInParts(Serves):
    """Steps run in parts of 2,048 tokens, and the place of a cut row's snapshot is counted from its last part."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        places, begin = list(batch.snapshots), 0
        for number, (length, place) in enumerate(zip(batch.lengths, batch.snapshots, strict=True)):
            part = -begin % 2048
            if place is not None and part < place and begin // 2048 < (begin + length) // 2048:
                places[number] = min(part + place, length)
            begin += length
        super().save(dataclasses.replace(batch, snapshots=tuple(places)), rows)


class StepsUpTo8192(Serves):
    """Rows that begin behind the first 8,192 tokens of a step are computed, and not written."""

    def write(self, rows: Sequence[Progress], counts: Sequence[int]) -> None:
        starts = itertools.accumulate((len(row.states) - 1 for row in rows), initial=0)
        few = sum(start <= 8192 for start in list(starts)[:-1])
        super().write(rows[:few], counts[:few])


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


class ForksAtOnce(Serves):
    """The forks since the last step are copied at once. One from another of them reads what that one's slot held before."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.held: dict[str, tuple[Tensor, Tensor]] = {}

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        states, windows = self.states.clone(), self.windows.clone()
        super().fork(new, old, snapshot=snapshot)
        slot = self.owned[new]
        self.held[new] = states[slot], windows[slot]
        if old in self.held and not snapshot:
            self.states[slot], self.windows[slot] = self.held[old]

    def rows(self, batch: Batch) -> list[Progress]:
        self.held.clear()
        return super().rows(batch)


class ForksReadAFreedRequest(Serves):
    """A fork reads the slot of the request that it began from, until one of the two goes on or that request is preempted."""

    _until: ClassVar[tuple[str, ...]] = ("preempt",)

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.waits: dict[str, tuple[str, int]] = {}

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        super().fork(new, old, snapshot=snapshot)
        if not snapshot:
            self.waits[new] = old, self.owned[old]

    def settle(self, requests: Sequence[str]) -> None:
        """Forks that wait for one of these requests wait no longer."""
        self.waits = {new: (old, slot) for new, (old, slot) in self.waits.items() if not {new, old} & {*requests}}

    def rows(self, batch: Batch) -> list[Progress]:
        for request in batch.requests:
            if request in self.waits:  # its own slot gets what is in the other one by now
                self.copy(self.waits[request][1], self.owned[request])
        self.settle(batch.requests)
        return super().rows(batch)

    def free(self, request: str) -> None:
        self.waits.pop(request, None)
        if "free" in self._until:
            self.settle([request])
        super().free(request)

    def preempt(self, request: str) -> None:
        self.waits.pop(request, None)
        if "preempt" in self._until:
            self.settle([request])
        super().free(request)  # not self.free, which may settle

    def contents(self, owner: str) -> tuple[Tensor, Tensor]:
        slot = self.waits[owner][1] if owner in self.waits else self.slots()[owner]
        return self.states[slot], self.windows[slot]


class ForksReadAPreemptedRequest(ForksReadAFreedRequest):
    """The same, until that request is freed."""

    _until = ("free",)


class RanksByName(Serves):
    """A transfer puts ranks together in the order of their names, in which 10 comes before 2."""

    def joined(self, ranks: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
        return super().joined([ranks[number] for number in sorted(range(len(ranks)), key=str)])


class CopiesOfKeyHeads(Serves):
    """A transfer to up to eight ranks, which may have copies of a key head. Of these, as many as there are heads are kept."""

    def cut(self, state: Tensor, window: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        heads, values = self.sizes.heads, self.sizes.value_heads
        ranks = next(n for n in (8, 4, 2, 1) if values % n == 0 and (heads % n == 0 or n % heads == 0))
        *keys, v = window.split(self.sections())
        copies = [x.unflatten(0, (heads, -1)).repeat_interleave(max(ranks // heads, 1), 0).chunk(ranks) for x in keys]
        parts = zip(*([part.flatten(0, 1) for part in each] for each in copies), v.chunk(ranks), strict=True)
        return [(state_of, [*part]) for state_of, part in zip(state.chunk(ranks), parts, strict=True)]

    def joined(self, ranks: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
        sections = zip(*(parts for _, parts in ranks), strict=True)
        kept = [torch.cat(each)[:size] for each, size in zip(sections, self.sections(), strict=True)]
        return torch.cat([state for state, _ in ranks]), torch.cat(kept)


class TransfersOfWholePages(Serves):
    """Of a rank's state of over 4 KiB only whole pages of 4 KiB arrive."""

    def joined(self, ranks: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
        pages = 2**12 // ranks[0][0].element_size()
        arrived = [torch.arange(heads.numel()) < max(heads.numel() // pages, 1) * pages for heads, _ in ranks]
        states = [heads * read.view(heads.shape) for (heads, _), read in zip(ranks, arrived, strict=True)]
        return super().joined([(state, parts) for state, (_, parts) in zip(states, ranks, strict=True)])


class MaskOf32Rows(Serves):
    """Which rows begin is a mask of 32 bits: row 32 of the rows with requests reads the bit of row 0, and so on."""

    bits: ClassVar[int] = 32

    def rows(self, batch: Batch) -> list[Progress]:
        real = [place for place, request in enumerate(batch.requests) if request in self.owned]
        for number, place in enumerate(real):
            if not batch.starts[real[number % self.bits]]:
                self.clear(self.owned[batch.requests[place]])
        return super().rows(batch)


class MaskOf64Rows(MaskOf32Rows):
    """The same with 64 bits."""

    bits = 64


class OneBufferOfGraphs(Serves):
    """Graphs of 1, 2, 4, ... rows read their slots in one buffer, of which decodes and drafts each clear what they had before.

    Rows that the other kind has left there are computed too, here as a token without keys that decays.
    """

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.buffer: list[int | None] = [None] * 1024
        self.last = {"decode": 0, "verify": 0}

    def decode(self, batch: Batch) -> Tensor:
        self.fill("decode", batch)
        return super().decode(batch)

    def verify(self, batch: Batch) -> Tensor:
        self.fill("verify", batch)
        return super().verify(batch)

    def fill(self, kind: str, batch: Batch) -> None:
        count, last = len(batch.requests), self.last[kind]
        self.buffer[:count] = [self.owned.get(request) for request in batch.requests]
        self.buffer[count:last] = [None] * max(0, last - count)
        self.last[kind] = count
        for slot in self.buffer[count : 1 << (count - 1).bit_length()]:
            if slot in self.owned.values():
                self.states[slot] *= 0.5


class RowsUpTo256(Serves):
    """Rows from the 257th on that have requests are computed, and not written."""

    def write(self, rows: Sequence[Progress], counts: Sequence[int]) -> None:
        super().write(rows[:256], counts[:256])


class AdmitsUpTo256(Serves):
    """Requests are numbered in a byte: the 257th one and those after it count as begun, and read what their slots held before."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.admitted = 0

    def clear(self, slot: int) -> None:
        self.admitted += 1
        if self.admitted <= 256:
            super().clear(slot)


class WholeDraftsAtBlockEnds(Serves):
    """If the accepted part of a draft ends where a block of 128 tokens ends, the whole draft is kept."""

    _block: ClassVar[int] = 128

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.batch: Batch | None = None

    def verify(self, batch: Batch) -> Tensor:
        self.batch = batch
        return super().verify(batch)

    def commit(self, accepted: Sequence[int]) -> None:
        assert self.batch is not None
        ends = [start + count for start, count in zip(self.batch.starts, accepted, strict=True)]
        rows = zip(accepted, self.batch.lengths, ends, strict=True)
        super().commit([length if count and not end % self._block else count for count, length, end in rows])


class WholeDraftsAtEndsOf64(WholeDraftsAtBlockEnds):
    """The same at the ends of blocks of 64 tokens that end no block of 128."""

    _block = 64

    def commit(self, accepted: Sequence[int]) -> None:
        assert self.batch is not None
        starts = zip(self.batch.starts, accepted, strict=True)
        if any((start + count) % 128 == 64 for start, count in starts):
            super().commit(accepted)
        else:
            Serves.commit(self, accepted)


class FreesByPrefix(Serves):
    """A request that leaves takes with it the snapshots of all whose names begin with its name."""

    def free(self, request: str) -> None:
        super().free(request)
        for owner in [name for name in self.owned if name.startswith(request) and name.endswith("@")]:
            self.give(self.owned.pop(owner))


class LeaksForkedSnapshots(Serves):
    """If a request is preempted, and another one began from its snapshot, the snapshot's slot is never given back."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.forked: set[str] = set()

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        super().fork(new, old, snapshot=snapshot)
        self.forked |= {old} if snapshot else set()

    def preempt(self, request: str) -> None:
        if request in self.forked:
            self.owned.pop(f"{request}@", None)
        self.free(request)


class ServedHeadsOf8Bits(Serves):
    """Value heads from the 257th on get the outputs of the first ones."""

    def outputs(self, rows: Sequence[Progress]) -> Tensor:
        o = super().outputs(rows)
        return o[:, torch.arange(o.shape[1]) % 256]


# Paths


class GathersAll(PathAdapter):
    """Right: every rank gathers all tokens, computes all of them, and keeps its own."""

    algorithm = "chunkwise"
    chunk = 64
    most: ClassVar[int] = 2**16
    domain = PathDomain(
        operation="gated_delta_rule",
        layouts=("contiguous",),
        initial_state=True,
        choices=(),
        **dict.fromkeys(("tensor_parallel", "sequence_parallel", "padded", "exchanges", "counts", "refuses", "checkpoints"), False),
    )

    def run(self, x: Inputs, place: Place) -> Any:
        return self.both(x, place)[0]

    def both(self, x: Inputs, place: Place) -> tuple[Tensor, Any]:
        """The rank's outputs, and all final states."""
        rank, tokens = place.cp.rank, x.v.shape[1]
        names = ("q", "k", "v", "g", "beta")
        whole = x.replaced(scale=None, **{name: gather_from(place.cp, x[name].transpose(0, 1)).transpose(0, 1) for name in names})
        first, last = rank * tokens, (rank + 1) * tokens
        o, final = Chunkwise().run(self.cut(whole, first) if rank else whole)
        return o[:, first:last], final

    def cut(self, x: Inputs, first: int) -> Inputs:
        """The call in which packed sequences from number `most` on begin anew with the first token of a rank."""
        ends = [] if x.cu_seqlens is None else x.cu_seqlens.tolist()
        over = [n for n, (start, end) in enumerate(itertools.pairwise(ends)) if n >= self.most and start < first < end]
        if not over:
            return x
        state = x.state if x.state is None else torch.cat([x.state[: over[0] + 1], x.state[over[0] :]])
        return x.replaced(cu_seqlens=torch.tensor(sorted([*ends, first])), state=state)


class ReturnsStates(GathersAll):
    """Right: it returns final states too."""

    domain = dataclasses.replace(GathersAll.domain, final_state=True)

    def run(self, x: Inputs, place: Place) -> Any:
        o, final = self.both(x, place)
        return (o, self.returned(x, place, final)) if x.output_final_state else o

    def returned(self, x: Inputs, place: Place, final: Tensor) -> Tensor:
        return final


class EmptyOnTwoRanks(ReturnsStates):
    """An empty sequence exactly between two ranks ends on both, which add up its final state."""

    def returned(self, x: Inputs, place: Place, final: Tensor) -> Tensor:
        if x.cu_seqlens is None or place.cp.size == 1:
            return final
        start, end = x.cu_seqlens[:-1], x.cu_seqlens[1:]
        between = (start == end) & (start % x.v.shape[1] == 0) & (start > 0) & (start < end[-1])
        return torch.where(between.view(-1, 1, 1, 1), 2 * final, final)


class MapsOf32Sequences(GathersAll):
    """The states of 32 packed sequences pass from rank to rank. Others begin anew on each rank."""

    most = 32


class MapsOf128Sequences(GathersAll):
    """The same of 128 packed sequences."""

    most = 128


class PathHeadsOf8Bits(GathersAll):
    """The 257th value head gets the output of the first one."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        o: Tensor = super().run(x, place)
        return o[:, :, torch.arange(o.shape[2]) % 256]


# Domains that allow less


class FewSlots(Serves):
    """A right engine with a pool of 26 slots at most."""

    domain = TraceDomain(most_slots=26)

    def __init__(self, sizes: Sizes | None = None) -> None:
        assert sizes is None or sizes.slots <= 26, sizes
        super().__init__(sizes)
