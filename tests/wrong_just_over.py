"""Implementations that are wrong only just over a limit: tests/test_just_over.py says which case of a check shows each of them."""

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
from tests.right_interfaces import FusedGates
from tests.wrong_options import SumNorm
from verify.adapters.base import PathAdapter
from verify.adapters.gdn.pool import Progress
from verify.ranks.collectives import Place, gather_from
from verify.zoo.base import Chunkwise, Layered, Serving
from verify.zoo.modules import Conv, Gate, GatedNorm, KdaGate, L2Norm, NormGateLinear
from verify.zoo.wrong_gates import Stepwise
from verify.zoo.wrong_pools import DraftsInTrees, InBlocks
from verify.zoo.wrong_traces import Serves


def in_pairs(heads: int, value_heads: int) -> Tensor:
    """The key head of each value head, if two value heads that are computed together have that of the first one."""
    pair = 2 if value_heads % 2 == 0 and value_heads > heads else 1
    return torch.arange(value_heads) // pair * pair // (value_heads // heads)


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


class StatesOfLaterLaunches(Chunkwise):
    """Programs of a batch, one for a sequence and a head, are launched 65,535 at a time, each with the first states."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        if x.state is None or x.cu_seqlens is not None:
            return super().initial(x, row)
        programs = row * x.state.shape[1] + torch.arange(x.state.shape[1])
        state: Tensor = x.state.flatten(0, 1)[programs % (2**16 - 1)].float()
        return state


class NumbersOfSequences:
    """A base: the numbers of sequences are in the dtype of the tokens, and the state of a sequence is that of its number."""

    def numbered(self, row: int, dtype: torch.dtype) -> int:
        return int(torch.tensor(row).to(dtype))


class NumbersInBf16(NumbersOfSequences, Chunkwise):
    """A rule that numbers packed sequences so."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row if x.cu_seqlens is None else self.numbered(row, x.q.dtype))


class KeyHeadsOf8Bits(Chunkwise):
    """Of grouped heads, the value heads of the 257th key head read the first one."""

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        wrong = value_heads > x.shape[2]
        return super().repeat(x[:, :, torch.arange(x.shape[2]) % 256] if wrong else x, value_heads)


class TilesOf64ValueHeads(Chunkwise):
    """A program takes 64 value heads, and counts their key heads from the one of its first value head."""

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        ratio, head = value_heads // x.shape[2], torch.arange(value_heads)
        return x[:, :, head // 64 * 64 // ratio + head % 64 // ratio]


class RatiosOf6Bits(Chunkwise):
    """The number of value heads of a key head is a signed number of 7 bits: of 64, the key head belongs to the first 63."""

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        found = super().repeat(x, value_heads)
        ratio = value_heads // x.shape[2]
        return found * (torch.arange(value_heads) % ratio < 63).view(-1, 1) if ratio > 63 else found


class BatchesUpTo128(Chunkwise):
    """Rows of a batch from the 129th on begin from the states of the first ones."""

    _most: ClassVar[int] = 128

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row % self._most if x.cu_seqlens is None else row)


class BatchesOf10Bits(BatchesUpTo128):
    """Rows of a batch from the 1,025th on begin from the states of the first ones."""

    _most = 1024


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


class NormedRowsOf16Bits(Chunkwise):
    """Rows of q and k, tokens times heads, have numbers of 16 bits, and those behind them are not normalised."""

    def normalise(self, x: Tensor) -> Tensor:
        few = (torch.arange(x.shape[:-1].numel()) < 2**16).reshape(*x.shape[:-1], 1)
        return torch.where(few, super().normalise(x), x)


class OneTokenIsTheFirst(Chunkwise):
    """A call of one token takes the way of a decode, where row n has state n. Its token may be that of another packed sequence."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, 0 if x.v.shape[:2].numel() == 1 else row)


class OneTokenEach(Chunkwise):
    """A call with as many tokens as packed sequences takes the way of a decode, where each sequence has one token."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        found, tokens = super().boundaries(x), x.v.shape[1]
        each = x.cu_seqlens is not None and tokens == len(found) > 1
        return [(row, row + 1) for row in range(tokens)] if each else found


class SpeedsOf1024Sequences(FusedGates):
    """The gradient of A_log has the sums of the first 1,024 packed sequences alone."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.cu_seqlens is None or len(x.cu_seqlens) < 1026:
            return super().run(x)
        late = torch.arange(x.v.shape[1]) >= x.cu_seqlens[1024]
        return super().run(x.replaced(A_log=torch.where(late[:, None], x.A_log.detach(), x.A_log)))


class ChunksOf11Bits(Chunkwise):
    """Numbers of chunks have 11 bits: the outputs of the 2,049th chunk are those of the first one, and so on."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Any:
        o, state = super().sequence(q, k, v, g, beta, state, scale)
        return o[torch.arange(len(o)) % (2**11 * self.size)], state


class PackedChunksOf8Bits(Chunkwise):
    """A word has a packed sequence and its chunk in 8 bits. The 257th chunk is the next sequence's first, written later."""

    def run(self, x: Inputs) -> Any:
        o, state = super().run(x)
        lost = torch.zeros(o.shape[1], dtype=torch.bool)
        for start, end in self.boundaries(x)[:-1] if x.cu_seqlens is not None else ():
            lost[start + 256 * self.size : end] = True
        return o.masked_fill(lost.view(1, -1, 1, 1), 0), state


class StepsOf15Bits(Stepwise):
    """Token 32,768 and those after it get the outputs of the first ones."""

    def run(self, x: Inputs) -> Any:
        o, state = super().run(x)
        return o[:, torch.arange(o.shape[1]) % 2**15], state


class EqualIfTheFirstIsTheMean(Chunkwise):
    """Packed sequences count as a batch of equal lengths if as many times the first length is the number of tokens."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        spans = super().boundaries(x)
        first = spans[0][1] - spans[0][0]
        if first * len(spans) != spans[-1][1]:
            return spans
        return [(row * first, (row + 1) * first) for row in range(len(spans))]


class ConvEqualIfTheLastIsTheMean(Conv):
    """The same of a convolution, with the last length."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        spans = super().boundaries(x)
        last = spans[-1][1] - spans[-1][0]
        return [(row * last, (row + 1) * last) for row in range(len(spans))] if last * len(spans) == spans[-1][1] else spans


class BiasOfAFullBlock(NormGateLinear):
    """Outputs come in blocks of 128. A last block that is not full gets the bias of outputs before it."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        if x.bias is None or len(x.bias) < 128:
            return super().biased(y, x)
        full, rest = len(x.bias) // 128 * 128, len(x.bias) % 128
        return y + torch.cat([x.bias[:full], x.bias[len(x.bias) - 128 :][:rest]]).float()


class WideWorkspace(Stepwise):
    """The products with keys over 128 channels are added in a workspace of 512 value channels."""

    def run(self, x: Inputs) -> Any:
        if x.k.shape[-1] <= 128 or x.v.shape[-1] <= 512:
            return super().run(x)
        o, state = super().run(x)
        low = super().run(x.replaced(q=torch.cat([torch.zeros_like(x.q[..., :128]), x.q[..., 128:]], -1)))[0]
        return torch.cat([o[..., :512], low[..., 512:]], -1), state


class BatchesOf8Bits(Chunkwise):
    """Row 256 of a batch begins from the state of row 0, and so on."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row % 256 if x.cu_seqlens is None else row)


class RatiosOf8Bits(Chunkwise):
    """Value head 256 of a key head, and those after it, read zeros."""

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        found = super().repeat(x, value_heads)
        return found * (torch.arange(value_heads) % (value_heads // x.shape[2]) < 256).view(-1, 1)


class SumsOf256Chunks(Chunkwise):
    """The sums of log-decays are kept for 256 chunks of 64 tokens: chunk 256 takes those of chunk 0, and so on."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Any:
        return super().sequence(q, k, v, g[torch.arange(len(g)) % (256 * 64)], beta, state, scale)


class DecaysOf13Bits(Stepwise):
    """Token 8,192 and those after it decay as the first ones."""

    def decay(self, x: Inputs) -> Tensor:
        g = super().decay(x)
        return g[:, torch.arange(g.shape[1]) % 2**13]


class ValuesUpTo512(Chunkwise):
    """Values are read in blocks of 4 channels, and over 512 channels the block that is not full is left out."""

    def run(self, x: Inputs) -> Any:
        o, state = super().run(x)
        seen = torch.arange(o.shape[-1]) < o.shape[-1] // 4 * 4
        return (o * seen if o.shape[-1] > 512 else o), state


# Pools


class SlotsOf16Bits(Serving):
    """Slot 65,536 is taken for slot 0, and so on."""

    def slot(self, x: Inputs, request: int) -> int | None:
        slot = super().slot(x, request)
        return None if slot is None else slot % 2**16


class SlotsOf16BitsWithASign(Serving):
    """Slot 32,768 is taken for slot -32,768, counted from the end of the pool, and so on."""

    def slot(self, x: Inputs, request: int) -> int | None:
        slot = super().slot(x, request)
        return slot if slot is None or slot < 2**15 else (slot + 2**15) % 2**16 - 2**15


class AcceptedOf7Bits(Serving):
    """128 accepted tokens, or more, are taken for none."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        count = super().accepted_count(x, request, tokens)
        return count if x.accepted is None or count < 128 else 0


class DraftsUpTo256(Serving):
    """Requests from the 257th on keep all of their tokens."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return super().accepted_count(x, request, tokens) if request < 256 else tokens


class FreshUpTo1024(Serving):
    """Requests from the 1,025th on never begin anew."""

    def begins(self, x: Inputs, request: int) -> bool:
        return request < 1024 and super().begins(x, request)


class AcceptedOfWholeTiles(Serving):
    """The last accepted token is looked for in its tile of 64, counted from none: a whole number of tiles is in no tile."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        count = super().accepted_count(x, request, tokens)
        return tokens if x.accepted is not None and count and not count % 64 else count


class SinglesAreAccepted(Serving):
    """In a batch of single tokens, one that is rejected is kept all the same."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return 1 if tokens == 1 and x.cu_seqlens is None else super().accepted_count(x, request, tokens)


class NothingToDo(Serving):
    """A call without tokens returns at once, so that requests which begin keep what their slots had."""

    def run(self, x: Inputs) -> Any:
        return super().run(x) if x.v.shape[:2].numel() else (torch.zeros_like(x.v), x.pool)


class AcceptedUpTo64(Serving):
    """Requests from the 65th on keep all of their tokens."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return super().accepted_count(x, request, tokens) if request < 64 else tokens


class PoolHeadsOf7Bits(Serving):
    """The 129th head gets the output of the first one."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        return o[:, :, torch.arange(o.shape[2]) % 128]


class PoolPairsOfValueHeads(Serving):
    """Two value heads at a time, with one load of their key."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        order = in_pairs(x.q.shape[2], x.v.shape[2])
        return super().run(x.replaced(q=x.q[:, :, order], k=x.k[:, :, order]))


class FourOfAKeyHead(Serving):
    """Up to four value heads of a key head at a time, with one load of their key."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        heads = torch.arange(x.v.shape[2])
        ratio = len(heads) // x.q.shape[2]
        together = min(ratio, 4)
        order = heads // together * together // ratio
        return super().run(x.replaced(q=x.q[:, :, order], k=x.k[:, :, order]))


class BlocksOf6Bits(InBlocks):
    """A block of value channels has a number of 6 bits, so that no more than 64 are computed."""

    def programs(self, width: int) -> int:
        return min(super().programs(width), 64)


class LongTrees(DraftsInTrees):
    """A right decode of drafts that are long trees."""

    domain = dataclasses.replace(DraftsInTrees.domain, most_tokens=300)


class ParentsOf7Bits(LongTrees):
    """The parents of a tree's tokens are signed bytes: from the 129th token on a parent is -1, the request's own state."""

    def parent(self, x: Inputs, row: int, token: int) -> int:
        parent = super().parent(x, row, token)
        return parent if parent < 128 or x.get("parents") is None else -1


class TreesInARing(DraftsInTrees):
    """The states of a tree's tokens lie in 64 places. That of the 65th token replaces that of the first one."""

    def parent(self, x: Inputs, row: int, token: int) -> int:
        parent = super().parent(x, row, token)
        return parent + (token - 1 - parent) // 64 * 64


class LaunchesOf16Bits(Serving):
    """Programs, one for a request and a value head, are launched 65,535 at a time. A launch begins with a request's first head."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        programs, most = o.flatten(0, 2), 2**16 - 1
        begins = most // o.shape[2] * o.shape[2]
        return torch.cat([programs[:most], programs[begins:][: max(0, len(programs) - most)]]).view(o.shape)


# Traces


class ServedPairsOfValueHeads(Serves):
    """Two value heads at a time, with one load of their key."""

    def normed(self, x: Tensor) -> Tensor:
        heads, value_heads = self.sizes.heads, self.sizes.value_heads
        chosen = super().normed(x).unflatten(-2, (2, value_heads))
        first = in_pairs(heads, value_heads) * (value_heads // heads)
        return chosen[..., first, :].flatten(-3, -2)


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


# Modules


class GateHeadsUpTo512(Gate):
    """Heads from the 513th on have the speeds of the first ones."""

    def speed(self, x: Inputs) -> Tensor:
        speed = super().speed(x)
        return speed[torch.arange(len(speed)) % 512]


class TailsOfL2(L2Norm):
    """Over 512 channels, squares are added in groups of 4, and those of a group that is not full are left out."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        channels = wide.shape[-1]
        seen = torch.arange(channels) < channels // 4 * 4
        return super().squares(wide * seen if channels > 512 else wide, x)


class TailsOfGatedNorms(TailsOfL2, GatedNorm):
    """The same in a gated norm."""

    domain = GatedNorm.domain


class SquaresUpTo8192(NormGateLinear):
    """The squares of a row are read as one block of 8,192 channels, and those behind it are not added."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return super().squares(wide * (torch.arange(wide.shape[-1]) < 2**13), x)


class ConvTilesOf16Bits(Conv):
    """Tiles of 8 tokens have numbers of 16 bits, and those behind them are not computed."""

    def run(self, x: Inputs) -> Any:
        y, state = super().run(x)
        return y * (torch.arange(y.shape[1]) < 8 * 2**16).view(-1, 1), state


class ConvStatesOf10Bits(Conv):
    """Packed sequence 1,024 begins from the state of the first one, and so on."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row if x.cu_seqlens is None else row % 1024)


class ConvOneTokenIsTheFirst(Conv):
    """A call of one token takes the way of a decode, where row n has state n. Its token may be that of another packed sequence."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, 0 if x.x.shape[:2].numel() == 1 else row)


class ConvBatchesOf10Bits(Conv):
    """Row 1,024 of a batch begins from the state of the first one, and so on."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row % 1024 if x.cu_seqlens is None else row)


class ConvNumbersInBf16(NumbersOfSequences, Conv):
    """Packed sequences are numbered in the dtype of the tokens."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row if x.cu_seqlens is None else self.numbered(row, x.x.dtype))


class ConvStartsOf16Bits(Conv):
    """Packed sequences that begin behind token 65,535 begin from zeros."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        return super().before(x, state * (start < 2**16 or x.cu_seqlens is None), start)


class RowsOf17Bits(GatedNorm):
    """Rows of the norm from 131,072 on, tokens times heads, stay zeros."""

    def run(self, x: Inputs) -> Tensor:
        y = super().run(x)
        return y * (torch.arange(y.shape[:-1].numel()) < 2**17).reshape(*y.shape[:-1], 1)


class ChannelsOf12Bits(Conv):
    """Channels of a convolution from 4,096 on get the weights of the first ones."""

    def taps(self, x: Inputs) -> Tensor:
        return super().taps(x)[torch.arange(len(x.weight)) % 2**12]


class ChannelsUpTo12288(Conv):
    """Channels of a convolution from 12,288 on stay without weights."""

    def taps(self, x: Inputs) -> Tensor:
        return super().taps(x) * (torch.arange(len(x.weight)) < 12_288).unsqueeze(-1)


class BiasUpTo16384(KdaGate):
    """dt_bias is read as one block of 16,384 numbers, and what lies behind it as zeros."""

    def raw(self, x: Inputs) -> Tensor:
        read = torch.arange(x.a.shape[-2:].numel()).reshape(x.a.shape[-2:]) < 2**14
        return super().raw(x if x.dt_bias is None else x.replaced(dt_bias=x.dt_bias * read))


class SumsUpTo512(SumNorm):
    """The sum that is returned has no gradient over 512 channels."""

    def run(self, x: Inputs) -> Any:
        answer = super().run(x)
        if not x.get("returns_sum") or x.x.shape[-1] <= 512:
            return answer
        return answer[0], answer[1].detach() + 0 * answer[1]


class OffsetsOf12Bits(Conv):
    """Offsets over 4,096 are rounded to even numbers, as in a format of 12 bits."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        ends = [0, *(end for _, end in super().boundaries(x))]
        inner = [end // 2 * 2 if end > 2**12 else end for end in ends[:-1]]
        return list(itertools.pairwise([*inner, ends[-1]])) if x.cu_seqlens is not None else super().boundaries(x)


class StatesOfTheLastTile(Conv):
    """The state after a sequence is read from its last 192 tokens or fewer, those of the last tile; what these lack is zeros."""

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        found, there = super().final(state, tokens), len(tokens) % 192 or 192
        return found * (torch.arange(found.shape[-1]) >= found.shape[-1] - there) if len(tokens) > 192 else found


# Layers


class LayerOneTokenIsTheFirst(Layered):
    """A call of one token takes the way of a decode, where row n has state n. Its token may be that of another packed sequence."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        first = x.v.shape[:2].numel() == 1 and x.state is not None
        return super().rule(x.replaced(state=x.state[:1].expand_as(x.state)) if first else x)


class LayerPairsOfValueHeads(Layered):
    """Two value heads at a time, with one load of their key."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        order = in_pairs(x.q.shape[2], x.v.shape[2])
        return super().rule(x.replaced(q=x.q[:, :, order], k=x.k[:, :, order]))


class LayerHeadsUpTo64(Layered):
    """The 65th value head gets the output of the first one."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().rule(x)
        return o[:, :, torch.arange(o.shape[2]) % 64], state


class LayerNumbersInBf16(NumbersOfSequences, Layered):
    """Rows of a batch, and packed sequences, are numbered in the dtype of the tokens."""

    def before(self, x: Inputs, row: int) -> Tensor:
        return super().before(x, self.numbered(row, x.hidden.dtype))


class LayerSequencesOf8Bits(Layered):
    """The convolution of packed sequence 256 begins from the state of the first one, and so on."""

    _of_packed: ClassVar[bool] = True

    def before(self, x: Inputs, row: int) -> Tensor:
        return super().before(x, row % 256 if (x.cu_seqlens is not None) is self._of_packed else row)


class LayerBatchesOf8Bits(LayerSequencesOf8Bits):
    """The same of the rows of a batch."""

    _of_packed = False


class LayerHeadsOf8Bits(Layered):
    """The 257th value head gets the output of the first one."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().rule(x)
        return o[:, :, torch.arange(o.shape[2]) % 256], state


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

    def run(self, x: Inputs, place: Place) -> Tensor:
        rank, tokens = place.cp.rank, x.v.shape[1]
        names = ("q", "k", "v", "g", "beta")
        whole = x.replaced(scale=None, **{name: gather_from(place.cp, x[name].transpose(0, 1)).transpose(0, 1) for name in names})
        first, last = rank * tokens, (rank + 1) * tokens
        o, _ = Chunkwise().run(self.cut(whole, first) if rank else whole)
        return o[:, first:last]

    def cut(self, x: Inputs, first: int) -> Inputs:
        """The call in which packed sequences from number `most` on begin anew with the first token of a rank."""
        ends = [] if x.cu_seqlens is None else x.cu_seqlens.tolist()
        over = [n for n, (start, end) in enumerate(itertools.pairwise(ends)) if n >= self.most and start < first < end]
        if not over:
            return x
        state = x.state if x.state is None else torch.cat([x.state[: over[0] + 1], x.state[over[0] :]])
        return x.replaced(cu_seqlens=torch.tensor(sorted([*ends, first])), state=state)


class MapsOf32Sequences(GathersAll):
    """The states of 32 packed sequences pass from rank to rank. Others begin anew on each rank."""

    most = 32


class MapsOf128Sequences(GathersAll):
    """The same of 128 packed sequences."""

    most = 128


class PathHeadsOf8Bits(GathersAll):
    """The 257th value head gets the output of the first one."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        o = super().run(x, place)
        return o[:, :, torch.arange(o.shape[2]) % 256]


# Domains that allow less


class FewSlots(Serves):
    """A right engine with a pool of 26 slots at most."""

    domain = TraceDomain(most_slots=26)

    def __init__(self, sizes: Sizes | None = None) -> None:
        assert sizes is None or sizes.slots <= 26, sizes
        super().__init__(sizes)
