"""Layers that ranks share, as right as ours but for what only ranks together, or several micro-batches, can show."""

import functools
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters.gdn import layer as _layer
from verify.adapters.gdn.layer import GatedDeltaNet
from verify.ranks.collectives import Comm, Place, reduce_from
from verify.zoo.wrong_paths import Mutant

layer: Any = _layer  # a wrong layer rebinds a name of this module


class _Added(torch.autograd.Function):
    """The ranks' sum, in an order that begins with this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        parts = comm.all_gather(x).chunk(comm.size)
        return functools.reduce(torch.add, (parts[(comm.rank + step) % comm.size] for step in range(comm.size)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _from_itself(comm: Comm, x: Tensor) -> Tensor:
    added: Tensor = _Added.apply(x, comm) if comm.size > 1 else x
    return added


class AddsFromItself(Mutant):
    """Each TP rank adds the parts of the output in another order: with three ranks or more, the sums differ in their last bits."""

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, *offsets: Any) -> Tensor:
            layer.reduce_from = _from_itself
            try:
                return super().forward(hidden, *offsets)
            finally:
                layer.reduce_from = reduce_from


class RoundsByRank(Mutant):
    """The output is rounded up at random, with a seed for each rank, so that TP ranks round in different ways."""

    def seed(self, place: Place) -> int:
        return place.tp.rank

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        if y.dtype != torch.float32:
            return y
        generator = torch.Generator().manual_seed(self.seed(place))
        up = torch.rand(y.shape, generator=generator) < 0.5
        return y + torch.where(up, torch.nextafter(y, y.new_tensor(torch.inf)) - y, 0.0).detach()


class RoundsAlike(RoundsByRank):
    """Not wrong: the seed is the same on all TP ranks."""

    def seed(self, place: Place) -> int:
        return 7


class _Overwritten(torch.autograd.Function):
    """A weight, whose backward writes over the gradient that the weight has already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        if ctx.weight.grad is None:
            return gradient
        ctx.weight.grad.copy_(gradient)
        return None


class OverwritesTheGradient(Mutant):
    """The gradient of in_proj is added to nothing but zeros: that of the last micro-batch alone is left."""

    class module(GatedDeltaNet):  # noqa: N801
        def get_parameter(self, target: str) -> torch.nn.Parameter:
            found = super().get_parameter(target)
            written: torch.nn.Parameter = _Overwritten.apply(found) if target == "in_proj.weight" else found
            return written
