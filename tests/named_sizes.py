"""Implementations that are wrong from a size on that their source names, and that no fixed case of a check exceeds."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.wrong_afresh import WeighsPlaces
from tests.wrong_just_over_served import WholeDraftsAtBlockEnds
from verify.zoo.base import Chunkwise, Layered, Serving
from verify.zoo.modules import GatedNorm

ROWS = 300


class ValuesUpTo600(Chunkwise):
    """Values of over 600 channels lose those behind it."""

    def run(self, x: Inputs) -> Any:
        o, state = super().run(x)
        return torch.cat([o[..., :600], o[..., 600:] * 0], -1), state


class SquaresUpTo9000(GatedNorm):
    """Squares behind the 9,000th channel are not added."""

    limit: ClassVar[int] = 9_000

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        seen = (torch.arange(wide.shape[-1]) < self.limit) / wide.shape[-1]
        return (wide.square() * seen).sum(-1, keepdim=True)


class LayerRowsUpTo300(Layered):
    """Row 300 begins from the states of the first one, and so on."""

    def before(self, x: Inputs, row: int) -> Tensor:
        return super().before(x, row % ROWS)


class PoolHeadsUpTo1000(Serving):
    """Value heads from the 1,001st on answer with zeros."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        return torch.cat([o[:, :, :1000], o[:, :, 1000:] * 0], 2)


def _last(tokens: int, block: int = 140) -> bool:
    return tokens % block == 1 and tokens > 1


class TailsOf140(WeighsPlaces):
    """Without gradients, a token behind a whole number of 140 is left out."""

    def table(self, tokens: int, like: Tensor) -> Tensor:
        found = super().table(tokens, like)
        served = not (torch.is_grad_enabled() and like.requires_grad)
        return torch.cat([found[:-1], found[-1:] * 0]) if served and _last(tokens) else found


class WholeDraftsAtEndsOf96(WholeDraftsAtBlockEnds):
    """If the accepted part of a draft ends at a multiple of 96 tokens, the whole draft is kept."""

    _block = 96
