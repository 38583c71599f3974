"""Paths that do on rank 1 what a path must not do, before the ranks talk to each other; on the others they are our layer."""

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters.gdn.adapter import GdnLayer
from verify.ranks.collectives import Place


class Fault(GdnLayer):
    """Rank 1 of cp has the fault."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        if place.cp.rank == 1:
            self.fault(x, place)
        return super().run(x, place)

    def fault(self, x: Inputs, place: Place) -> None:
        """What it does."""


class NeedsAGpu(GdnLayer):
    """Not a fault: the layer, which refuses to compute elsewhere than on a GPU."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        if not (x.hidden.is_cuda and all(parameter.is_cuda for parameter in x.parameters.values())):
            raise RuntimeError(f"hidden is on {x.hidden.device}")
        return super().run(x, place)


class _Clears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:  # type: ignore[override]
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (given,), kept = cotangents, cotangents[0].clone()
        given.zero_()
        return kept


class ClearsItsCotangent(Fault):
    """The backward on rank 1 clears the gradient that the caller gave, which others may read."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        return _Clears.apply(y) if place.cp.rank == 1 else y  # type: ignore[no-any-return,no-untyped-call]


class Raises(Fault):
    def fault(self, x: Inputs, place: Place) -> None:
        raise RuntimeError("no such tile")


class Exits(Fault):
    def fault(self, x: Inputs, place: Place) -> None:
        sys.exit(7)


class IsKilled(Fault):
    def fault(self, x: Inputs, place: Place) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class HangsOnTheCPU(Fault):
    def fault(self, x: Inputs, place: Place) -> None:
        time.sleep(1000)


class HangsInACollective(Fault):
    def fault(self, x: Inputs, place: Place) -> None:
        place.cp.all_reduce(torch.ones(3, device=x.hidden.device))
        place.cp.all_reduce(torch.ones(3, device=x.hidden.device))
        place.cp.all_reduce(torch.ones(3, device=x.hidden.device))


class LosesItsGpu(Fault):
    """An index out of range, seen on the device alone: no call works on that GPU any more in this process."""

    def fault(self, x: Inputs, place: Place) -> None:
        if x.hidden.is_cuda:
            torch.zeros(4, device=x.hidden.device)[torch.tensor([7], device=x.hidden.device)]


class PrintsMuch(Fault):
    def fault(self, x: Inputs, place: Place) -> None:
        for _ in range(1000):
            print("x" * 100_000)
