"""Paths that ranks share, wrong where heads are shared in one way, or where a rank has many tokens or numbers."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.wrong_ranks import RuleOnRanks, adding
from verify.ranks.collectives import Comm, Place, exchange, reduce_from
from verify.zoo.base import Chunkwise
from verify.zoo.wrong_paths import Mutant

NAMES = ("q", "k", "v", "g", "beta")


class HeadsOnRanks(RuleOnRanks):
    """Not wrong: ranks exchange tokens for heads if they can share those of q and k, or those of v; else each has all tokens."""

    domain = dataclasses.replace(RuleOnRanks.domain, in_kernel=("none",), initial_state=False, final_state=False)

    def run(self, x: Inputs, place: Place) -> Any:
        cp, heads, value_heads = place.cp, x.q.shape[2], x.v.shape[2]
        if value_heads % cp.size or not x.v.numel():
            return super().run(x, place)
        tensors = {name: x[name] for name in NAMES}
        if heads % cp.size:
            tensors |= {name: self.repeated(x[name], value_heads // heads) for name in ("q", "k")}
        o, _ = Chunkwise().run(x.replaced(**{name: self.to_heads(t, cp) for name, t in tensors.items()}))
        blocks = torch.stack([part.contiguous() for part in o.chunk(cp.size, 1)])
        return torch.cat([*exchange(cp, blocks.flatten(0, 1)).unflatten(0, (cp.size, -1))], 2)

    def to_heads(self, x: Tensor, cp: Comm) -> Tensor:
        """[B, T, H / cp, ...] of a rank's [B, T / cp, H, ...]."""
        blocks = torch.stack([part.contiguous() for part in x.chunk(cp.size, 2)])
        received = exchange(cp, blocks.flatten(0, 1)).unflatten(0, (cp.size, -1))
        return torch.cat(self.order([*received], cp), 1)

    def order(self, blocks: list[Tensor], cp: Comm) -> list[Tensor]:
        """What each rank sent, in the order of their tokens."""
        return blocks

    def repeated(self, x: Tensor, count: int) -> Tensor:
        """q or k for each head of v."""
        return x.repeat_interleave(count, 2)


class StepsBackwards(HeadsOnRanks):
    """What a rank receives in step i comes from rank - i, and is put where that of rank + i belongs: the same with two ranks."""

    def order(self, blocks: list[Tensor], cp: Comm) -> list[Tensor]:
        return [blocks[(2 * cp.rank - place) % cp.size] for place in range(cp.size)]


class TilesSharedKeys(HeadsOnRanks):
    """Where ranks share a head of q and k, all of these heads follow each other for each group of heads of v."""

    def repeated(self, x: Tensor, count: int) -> Tensor:
        return x.repeat(1, 1, count, 1)


class SlabsOf1024(RuleOnRanks):
    """A rank's tokens behind the first 1,024 are taken for those before them."""

    domain = dataclasses.replace(RuleOnRanks.domain, in_kernel=("none",))

    def run(self, x: Inputs, place: Place) -> Any:
        if x.v.shape[1] <= 1024:
            return super().run(x, place)
        return super().run(x.replaced(v=torch.cat([x.v[:, :1024], x.v[:, :-1024]], 1)), place)


def _whole_buckets(comm: Comm, x: Tensor) -> Tensor:
    flat, whole = x.flatten(), x.numel() // 16_384 * 16_384
    added = reduce_from(comm, flat[:whole]) if whole else flat
    return (torch.cat([added, flat[whole:]]) if whole else reduce_from(comm, flat)).view_as(x)


class BucketTail(Mutant):
    """Outputs of TP ranks are added in buckets of 16,384 numbers, and what is left behind whole buckets is not added."""

    module = adding(_whole_buckets)
