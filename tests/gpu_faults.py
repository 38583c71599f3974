"""What a kernel can do to a GPU, planted in an implementation that is right otherwise: where a case has 33 tokens or more.

They need a GPU; without one they are right.
"""

import os
import signal

import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.right import Chunkwise, Gathered
from verify.zoo.modules import GatedNorm

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

if triton is not None and torch.cuda.is_available():

    @triton.jit
    def astray(x):  # type: ignore[no-untyped-def]
        tl.store(x + (1 << 46), 1.0)

    @triton.jit
    def waits(x):  # type: ignore[no-untyped-def]
        while tl.load(x, volatile=True) == 0.0:
            pass


WORKSPACE: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
SHORT, LONG = 10_000_000, 50_000_000  # cycles, about 6 and 28 ms


class Rule(Chunkwise):
    """The right rule, which makes what it needs where its inputs are."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        with x.q.device:
            return super().run(x)


class Fault(Rule):
    """The right answer, after what `harm` does."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.q.is_cuda and x.q.shape[1] > 32:
            self.harm(x)
        return super().run(x)

    def harm(self, x: Inputs) -> None:
        raise NotImplementedError


class IllegalAccess(Fault):
    """A store far from any tensor: the context is gone."""

    def harm(self, x: Inputs) -> None:
        astray[(1,)](torch.zeros(1, device=x.q.device))


class DeviceAssert(Fault):
    """An index out of range, seen on the device alone."""

    def harm(self, x: Inputs) -> None:
        torch.zeros(4, device=x.q.device)[torch.tensor([7], device=x.q.device)]


class Hang(Fault):
    """A kernel that waits for what nobody writes."""

    def harm(self, x: Inputs) -> None:
        waits[(1,)](torch.zeros(1, device=x.q.device))


class OutOfMemory(Fault):
    """More memory than there is."""

    def harm(self, x: Inputs) -> None:
        torch.empty(2**45, dtype=torch.uint8, device=x.q.device)


class Killed(Fault):
    """The process is killed, as by the host when it is out of memory."""

    def harm(self, x: Inputs) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def through_a_workspace(x: Tensor, cycles: int = SHORT) -> Tensor:
    """The numbers of x, after they waited in memory that all calls share. A call on another stream may overwrite them there."""
    if not x.is_cuda:
        return x
    memory = WORKSPACE.setdefault((x.shape, x.dtype), torch.empty_like(x))
    memory.copy_(x)
    torch.cuda._sleep(cycles)  # the work of a kernel that takes longer
    return memory.clone()


class Decode(Gathered):
    """The right decode kernel, which makes what it needs where its inputs are."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        with x.q.device:
            return super().run(x)


class RuleInAWorkspace(Rule):
    """A rule whose output waits in a workspace of all streams."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        return through_a_workspace(o), state


class NormInAWorkspace(GatedNorm):
    """A norm whose output waits in a workspace of all streams."""

    def run(self, x: Inputs) -> Tensor:
        return through_a_workspace(super().run(x))


class DecodeInAWorkspace(Decode):
    """A decode kernel whose output waits in a workspace of all streams. It reads slots on the host, so that calls overlap less."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        o, pool = super().run(x)
        return through_a_workspace(o, LONG), pool
