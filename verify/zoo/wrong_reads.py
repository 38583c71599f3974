"""Wrong implementations that read behind an input, and multiply what they read by zero: NaN there becomes NaN in a result.

They look only at contiguous inputs, which they take as they are. tests/checks/test_guards.py names the laws that detect them.
"""

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.traces.case import Batch
from verify.ranks.collectives import Place
from verify.zoo.base import Chunkwise, Layered, Serving
from verify.zoo.modules import Conv
from verify.zoo.wrong_paths import Mutant
from verify.zoo.wrong_traces import Serves

Answer = tuple[Tensor, Tensor]


def nothing_of(x: Tensor, count: int = 64) -> Tensor:
    """Return zero times the numbers behind a contiguous tensor in memory, added up."""
    x = x.detach()
    end = int(x.storage_offset()) + x.numel()
    count = min(count, x.untyped_storage().nbytes() // x.element_size() - end)
    if not x.is_contiguous() or count < 1:
        return torch.zeros(())
    return (0 * x.as_strided((count,), (1,), end)).float().sum()


class LoadsWholeTiles(Chunkwise, letter="I"):
    """A tile of 64 keys is loaded whole, and the rows behind the last token are multiplied by zero."""

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        q, k = super().keys(x)
        return q, k + nothing_of(x.k).to(k.dtype)


class CotangentTile(Chunkwise, letter="I"):
    """In the backward, the rows behind the last token of the cotangent are multiplied by zero."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return _TileOfCotangent.apply(o), state


class _TileOfCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, o: Tensor) -> Tensor:
        return o.clone()

    @staticmethod
    def backward(ctx: object, do: Tensor) -> Tensor:
        return do + nothing_of(do).to(do.dtype)


class ConvLoadsWholeBlocks(Conv, letter="I"):
    """A block of tokens is loaded whole, and those behind the last one are multiplied by zero."""

    def taps(self, x: Inputs) -> Tensor:
        return super().taps(x) + nothing_of(x.x)


class GatesBehindTheBatch(Serving, letter="I"):
    """A warp loads 32 gates, and those of requests that do not exist are multiplied by zero."""

    def run(self, x: Inputs) -> Answer:
        return super().run(x.replaced(g=x.g + nothing_of(x.g, 32).to(x.g.dtype)))


class HiddenBehind(Layered, letter="I"):
    """The projection of a layer loads whole tiles of hidden states, and multiplies the rows behind them by zero."""

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().project(x + nothing_of(x).to(x.dtype), weight)


class ShardBehind(Mutant, letter="I"):
    """A rank loads whole tiles of its hidden states, and multiplies the rows behind them by zero."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        return super().run(x, place) + nothing_of(x.hidden).to(x.hidden.dtype)


class PromptsBehind(Serves, letter="I"):
    """A prefill loads whole tiles of tokens, and multiplies those behind the batch by zero."""

    def prefill(self, batch: Batch) -> Tensor:
        return super().prefill(batch) + nothing_of(batch.mixed).to(batch.mixed.dtype)
