"""The L2 norm of rows in any strides, by a kernel that computes offsets in 64 bits or in 32 (run by tests/test_far_views.py)."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oracles.operation import Inputs
from properties.far_views import reserved
from properties.module_domain import ModuleDomain
from verify.adapters.base import Adapter


@triton.jit
def norm_kernel(
    x,
    y,
    stride_b,
    stride_t,
    stride_h,
    stride_k,
    eps,
    T: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0)
    b, t, h = row // (T * H), row // H % T, row % H
    if WIDE:
        b, t, h = b.to(tl.int64), t.to(tl.int64), h.to(tl.int64)
    k = tl.arange(0, BLOCK)
    numbers = tl.load(x + b * stride_b + t * stride_t + h * stride_h + k * stride_k, mask=k < K, other=0).to(tl.float32)
    normed = numbers / tl.sqrt(tl.sum(numbers * numbers) + eps)
    tl.store(y + row * K + k, normed.to(y.dtype.element_ty), mask=k < K)


class OffsetsIn64Bits(Adapter):
    """Right."""

    algorithm = "pointwise"
    domain = ModuleDomain("l2norm", backward=False)
    wide = True

    def run(self, x: Inputs) -> Tensor:
        rows: Any = x.x
        y = self.memory(rows)
        batch, tokens, heads, width = rows.shape
        if y.numel():
            sizes = (tokens, heads, width, triton.next_power_of_2(width))
            norm_kernel[(batch * tokens * heads,)](rows, y, *rows.stride(), x.eps or 1e-6, *sizes, self.wide)
        return y

    def memory(self, rows: Tensor) -> Tensor:
        return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


class StoresToLargeMemory(OffsetsIn64Bits):
    """Right. Its output is a part of memory of 3 GiB, of which it touches little."""

    def memory(self, rows: Tensor) -> Tensor:
        return reserved(3 * 2**30, rows.device).view(rows.dtype)[: rows.numel()].view(rows.shape)


class OffsetsIn32Bits(OffsetsIn64Bits):
    """Wrong for tokens, heads and rows of a batch that lie 2^31 elements behind the first."""

    wide = False
