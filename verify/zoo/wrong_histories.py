"""Wrong rules that are right in a fresh process: what they keep of one call makes a later call wrong.

tests/test_histories.py names the history that detects each of them. Layers, modules and pools that keep too much are beside the
other wrong layers, modules and pools.
"""

import time
from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.zoo.base import Chunkwise

Answer = tuple[Tensor, Tensor | None]
Key = tuple[object, ...]


class Remembers(Chunkwise):
    """The right rule, from which rules are derived that keep something of a call. Only later calls of a process are then wrong."""

    later_calls = True


class SpansByIdentity(Remembers):
    """The spans of sequences are kept by the identity of cu_seqlens, so offsets that are filled again are not seen."""

    letter = "K"
    incident = (36,)
    seen: ClassVar[dict[int, tuple[Tensor, list[tuple[int, int]]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            return super().boundaries(x)
        tensor, spans = self.seen.setdefault(id(x.cu_seqlens), (x.cu_seqlens, super().boundaries(x)))
        return spans if tensor is x.cu_seqlens else super().boundaries(x)


class SpansByAddress(Remembers):
    """The spans are kept by the address and version of cu_seqlens, which a later tensor has too, once the first one is freed."""

    letter = "K"
    incident = (36,)
    seen: ClassVar[dict[Key, list[tuple[int, int]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            return super().boundaries(x)
        key = (x.cu_seqlens.data_ptr(), x.cu_seqlens._version, x.cu_seqlens.shape, x.q.shape, x.v.shape, x.q.dtype)
        return self.seen.setdefault(key, super().boundaries(x))


class GatesOfTheFirstShape(Remembers):
    """The gates of a call are kept by its shapes and its gate's dtype, and used for later calls of these shapes."""

    letter = "K"
    incident = (36,)
    seen: ClassVar[dict[Key, Tensor]] = {}

    def run(self, x: Inputs) -> Answer:
        key = (x.q.shape, x.v.shape, x.q.dtype, x.g.dtype)
        gates = self.seen.setdefault(key, x.g.detach().clone())
        return super().run(x.replaced(g=x.g + (gates - x.g).detach()))


class ScratchOfTheFirstBatch(Remembers):
    """Memory for the states is allocated for the sequences of the first call of a width, so that later ones find no room."""

    letter = "K"
    rows: ClassVar[dict[Key, int]] = {}

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        if state is None:
            return o, state
        room = self.rows.setdefault((x.q.shape[2:], x.v.shape[2:], x.q.dtype), len(state))
        return o, state * (torch.arange(len(state)) < room).reshape(-1, 1, 1, 1)


class NestedAfterAnError(Remembers):
    """A counter of nested calls is not counted down where a call raises. A nested call leaves its initial states out."""

    letter = "K"
    depth: ClassVar[int] = 0

    def run(self, x: Inputs) -> Answer:
        kind = type(self)
        kind.depth += 1
        result = super().run(x)
        kind.depth -= 1
        return result

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row) * (self.depth == 1)


class ScratchOfAllThreads(Remembers):
    """Rounded operands go through an attribute of the class, which a call in another thread may replace in the meantime."""

    letter = "R"
    scratch: ClassVar[dict[torch.Size, Tensor]] = {}

    def low(self, x: Tensor, like: Tensor) -> Tensor:
        low = super().low(x, like)
        self.scratch[low.shape] = low
        time.sleep(1e-3)  # what happens before the operand is used
        return self.scratch[low.shape]
