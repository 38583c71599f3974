"""Implementations whose output passes through an autotuned kernel: right in every configuration, or wrong in some."""

from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.operation import Inputs
from tests.right import Chunkwise


@triton.autotune([triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 64, 256) for warps in (1, 4)], key=["n"])
@triton.jit
def copy_kernel(x, y, n, wrong: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    if wrong == BLOCK:
        value = tl.where(i == 65, 0.0, value)  # one number of the second block
    tl.store(y + i, value, mask=i < n)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 128)], key=["n"])
@triton.jit
def again_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, o: Tensor, wrong: int) -> Tensor:
        o = o.contiguous()
        once, twice, n = torch.empty_like(o), torch.empty_like(o), o.numel()
        if n:
            copy_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](o, once, n, wrong)
            again_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](once, twice, n)
        return twice

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, None]:
        return cotangents[0], None


class Copied(Chunkwise):
    """Right in every configuration."""

    wrong: ClassVar[int] = 0

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        with x.q.device:
            o, state = super().run(x)
        return _Copied.apply(o, self.wrong), state  # type: ignore[no-untyped-call]


class WrongAt64(Copied):
    """Wrong where the first kernel's block is 64."""

    wrong = 64


class WrongWhateverFrom41(WrongAt64):
    """Wrong from 41 tokens on, whatever the configurations, and before that where the first kernel's block is 64."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        return (o.neg() if o.shape[1] > 40 else o), state


class StarvedAt64(Copied):
    """Runs out of memory where the first kernel's block is 64."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        answer = super().run(x)
        if copy_kernel.best_config.kwargs["BLOCK"] == 64:
            raise MemoryError("no room")
        return answer


@triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 64)], key=["n"])
@triton.jit
def first_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + (BLOCK // 64), mask=i < n)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 32, 64, 128)], key=["n"])
@triton.jit
def second_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + (BLOCK // 64), mask=i < n)


class WrongInBoth(Chunkwise):
    """Wrong from blocks of 64 on: one configuration of the first kernel, two of the second, whose list is twice as long."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        with x.q.device:
            o, state = super().run(x)
        once, twice, n = torch.empty_like(o), torch.empty_like(o), o.numel()
        if n:
            first_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](o.contiguous(), once, n)
            second_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](once, twice, n)
        return twice, state
