"""Callables that weigh tokens by their place, right or with a table that an earlier call spoilt, for tests/laws/test_afresh.py.

Calls that come later in the same process are all wrong in the same way, so only a call in a fresh process shows it.
"""

import os
import time
from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify import Adapter, CallDomain


class WeighsPlaces(Adapter):
    """Right: each token times the cosine of its place in its sequence, in float32."""

    domain = CallDomain(inputs={"x": "B T D", "cu_seqlens": "offsets"}, outputs={"y": "B T D"}, sizes={"D": (8,)})

    def run(self, x: Inputs) -> Tensor:
        lengths = [x.x.shape[1]] * len(x.x) if x.cu_seqlens is None else x.cu_seqlens.diff().tolist()
        y = x.x.flatten(0, 1).float() * torch.cat(self.weights(lengths, x.x)).float().unsqueeze(-1)
        return y.to(x.x.dtype).reshape(x.x.shape)

    def weights(self, lengths: list[int], like: Tensor) -> list[Tensor]:
        """The weights of each sequence's tokens."""
        return [self.table(length, like) for length in lengths]

    def table(self, tokens: int, like: Tensor) -> Tensor:
        """The weights [tokens] of the tokens of a sequence."""
        return (torch.arange(tokens) / 9).cos()


class TableOfTheFirstDtype(WeighsPlaces):
    """The table is kept in the dtype of the first call."""

    kept: ClassVar[list[Tensor]] = []

    def table(self, tokens: int, like: Tensor) -> Tensor:
        if not self.kept:
            self.kept.append(super().table(self.domain.longest, like).to(like.dtype))
        return self.kept[0][:tokens]


class TableOfTheFirstMode(WeighsPlaces):
    """The table is made by the first call. If that is under inference_mode, no later call can have gradients."""

    kept: ClassVar[list[Tensor]] = []

    def run(self, x: Inputs) -> Tensor:
        if not self.kept:
            self.kept.append(self.table(self.domain.longest, x.x))
        if x.cu_seqlens is not None:
            return super().run(x)
        return (x.x.float() * self.kept[0][: x.x.shape[1], None]).to(x.x.dtype)


class PlanOfABucket(WeighsPlaces):
    """Lengths up to the same power of two have one plan. It ends where the first call ended, and weighs later tokens by 0."""

    kept: ClassVar[dict[int, Tensor]] = {}

    def table(self, tokens: int, like: Tensor) -> Tensor:
        size = 1 << (tokens - 1).bit_length()
        if size not in self.kept:
            self.kept[size] = torch.cat([super().table(tokens, like), torch.zeros(size - tokens)])
        return self.kept[size][:tokens]


class FilledTooLate(WeighsPlaces):
    """A table is in the cache before it has its numbers, so that it stays zeros if a call fails in between."""

    kept: ClassVar[dict[int, Tensor]] = {}

    def table(self, tokens: int, like: Tensor) -> Tensor:
        if tokens not in self.kept:
            self.kept[tokens] = torch.zeros(tokens)
            self.kept[tokens].copy_(super().table(tokens, like))
        return self.kept[tokens]


class FilledTooLateByBucket(WeighsPlaces):
    """The same of tables that calls of up to the same power of two tokens share. Earlier calls have filled those of up to 256."""

    kept: ClassVar[dict[int, Tensor]] = {2**power: (torch.arange(2**power) / 9).cos() for power in range(9)}

    def weights(self, lengths: list[int], like: Tensor) -> list[Tensor]:
        size = 1 << max(sum(lengths) - 1, 0).bit_length()
        if size not in self.kept:
            self.kept[size] = torch.zeros(size)
            self.kept[size].copy_(self.table(size, like))
        return [self.kept[size][:length] for length in lengths]


class SequencesOf8Bits(WeighsPlaces):
    """The number of a sequence is a byte, so sequence 256 has the weights of the first one."""

    def weights(self, lengths: list[int], like: Tensor) -> list[Tensor]:
        found = super().weights(lengths, like)
        return [torch.cat([found[n % 256], found[n] * 0])[: lengths[n]] for n in range(len(found))]


class NumbersOfSequencesInFp16(WeighsPlaces):
    """The numbers of sequences are in float16, so of two behind the 2,048th the second has the weights of the first."""

    def weights(self, lengths: list[int], like: Tensor) -> list[Tensor]:
        found = super().weights(lengths, like)
        return [found[n] if n < 2**11 or n % 4 in (0, 3) else found[n] * 0 for n in range(len(found))]


class RowsOf8Bits(WeighsPlaces):
    """The number of a row of a batch is a byte, and row 256 has no weights."""

    def weights(self, lengths: list[int], like: Tensor) -> list[Tensor]:
        found = super().weights(lengths, like)
        return [found[n] * (n < 256) for n in range(len(found))] if like.shape[0] > 1 else found


class NoTailWithoutGradients(WeighsPlaces):
    """Without gradients tokens go in blocks of 128, and a last one that is alone is left out."""

    def table(self, tokens: int, like: Tensor) -> Tensor:
        found = super().table(tokens, like)
        alone = tokens > 1 and tokens % 128 == 1 and not (torch.is_grad_enabled() and like.requires_grad)
        return torch.cat([found[:-1], found[-1:] * 0]) if alone else found


class FailsInAChild(WeighsPlaces):
    """Right in this process, and an error, an end or a hang in another one."""

    here: ClassVar[int] = os.getpid()
    way: ClassVar[str] = "raise"

    def table(self, tokens: int, like: Tensor) -> Tensor:
        if os.getpid() != self.here and tokens == 3:
            if self.way == "raise":
                raise ValueError("no table of three places")
            while self.way == "hang":
                time.sleep(1)
            os._exit(7)
        return super().table(tokens, like)


class EndsInAChild(FailsInAChild):
    """The same, which ends the process."""

    way = "exit"


class HangsInAChild(FailsInAChild):
    """The same, which never answers."""

    way = "hang"


class Talks(WeighsPlaces):
    """Right, and prints what it does."""

    def table(self, tokens: int, like: Tensor) -> Tensor:
        print(f"a table of {tokens} places", flush=True)
        os.write(1, b"written past Python\n")
        return super().table(tokens, like)
