"""Implementations that are wrong only just over a limit.

tests/laws/test_just_over.py says which case of a check shows each of them.
"""

import itertools
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.right_interfaces import FusedGates
from verify.zoo.base import Chunkwise, Layered
from verify.zoo.wrong_gates import Stepwise


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


class NormsOfEachValueHead(Chunkwise):
    """Where rows have one token, q and k are normalised in place for each value head of their key head."""

    def run(self, x: Inputs) -> Any:
        if x.qk_norm and x.cu_seqlens is None and x.q.shape[1] == 1:
            for _ in range(x.v.shape[2] // x.q.shape[2] - 1):
                x = x.replaced(q=self.normalise(x.q), k=self.normalise(x.k))
        return super().run(x)


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
