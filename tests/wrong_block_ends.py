"""Wrong serving engines that err at the ends of the blocks of their cache, for any number of tokens in a block."""

from collections.abc import Sequence

from torch import Tensor

from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from properties.traces.events import PADDING
from verify.zoo.wrong_traces import Serves


class Blocks(Serves):
    """Right: an engine that knows where the blocks of its cache end."""

    block = 64

    def ends(self, start: int, count: int) -> bool:
        """Whether a row of `count` tokens after `start` ends a block exactly."""
        return count > 0 and (start + count) % self.block == 0

    def passes(self, start: int, count: int) -> bool:
        """Whether a row of `count` tokens after `start` goes on behind the end of a block."""
        return start // self.block < (start + count) // self.block and not self.ends(start, count)


class WindowOfADraft(Blocks):
    """A draft of which two or more tokens are accepted across the end of a block keeps the window of a token before."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.starts: Sequence[int] = ()

    def verify(self, batch: Batch) -> Tensor:
        self.starts = batch.starts
        return super().verify(batch)

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit(accepted)
        for row, start, count in zip(self.drafted, self.starts, accepted, strict=True):
            if count > 1 and self.passes(start, count):
                self.windows[row.slot] = row.line[:, count - 1 : count - 1 + self.sizes.width - 1]


class PromptThatFills(Blocks):
    """A prompt that ends where a block ends loses its window."""

    def prefill(self, batch: Batch) -> Tensor:
        o = super().prefill(batch)
        for request, start, count in zip(batch.requests, batch.starts, batch.lengths, strict=True):
            if request != PADDING and self.ends(start, count):
                self.windows[self.owned[request]] = 0
        return o


class DecodeThatBegins(Blocks):
    """A decode whose token is the first one of a block begins with an empty window."""

    def decode(self, batch: Batch) -> Tensor:
        for request, start in zip(batch.requests, batch.starts, strict=True):
            if request != PADDING and start and start % self.block == 0:
                self.windows[self.owned[request]] = 0
        return super().decode(batch)


def of_block(kind: type[Blocks], tokens: int) -> type[Blocks]:
    """The class of an engine whose blocks have so many tokens."""
    return type(f"{kind.__name__}{tokens}", (kind,), {"block": tokens, "domain": TraceDomain(block=tokens)})
