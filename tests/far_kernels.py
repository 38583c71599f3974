"""L2 norms and a decode that compute offsets in 64 bits or in 32. tests/laws/test_far_views.py runs them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oracles.operation import Inputs
from properties.laws.far_views import reserved
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from verify.adapters.base import Adapter
from verify.zoo.base import Serving, at_32_bits


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


@triton.jit
def block_kernel(
    x,
    y,
    stride_b,
    stride_t,
    eps,
    T: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
):
    b, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * TOKENS
    begin = first.to(tl.int64) if WIDE else first
    t, k = tl.arange(0, TOKENS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (first + t < T) & (k < K)
    numbers = tl.load(x + b * stride_b + (begin * stride_t + (t * stride_t + k)), mask=inside, other=0).to(tl.float32)
    normed = numbers / tl.sqrt(tl.sum(numbers * numbers, 1)[:, None] + eps)
    tl.store(y + (b * T + first) * K + (t * K + k), normed.to(y.dtype.element_ty), mask=inside)


class BlocksIn64Bits(Adapter):
    """Right. The first of 128 tokens is found in 64 bits, and the others from there in 32."""

    algorithm = "pointwise"
    domain = ModuleDomain("l2norm", backward=False)
    wide = True

    def run(self, x: Inputs) -> Tensor:
        rows = x.x.transpose(1, 2).flatten(0, 1)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        y = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        heads, tokens, width = rows.shape
        grid, sizes = (triton.cdiv(tokens, 128), heads), (tokens, width, triton.next_power_of_2(width), 128)
        if y.numel():
            block_kernel[grid](rows, y, *rows.stride()[:2], x.eps or 1e-6, *sizes, self.wide)
        return y.unflatten(0, (x.x.shape[0], -1)).transpose(1, 2)


class BlocksIn32Bits(BlocksIn64Bits):
    """Wrong for tokens that lie 2^31 elements behind the first."""

    wide = False


class OneStride(Serving):
    """Right. As some kernels do, it reads the stride of tokens alone: the tokens of a batch must all lie equally far apart."""

    domain = PoolDomain(views=("offset", "fused"))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(**{name: self.tokens(x[name]) for name in ("q", "k", "v", "g", "beta")}))

    def tokens(self, x: Tensor) -> Tensor:
        inner = x.shape[2:]
        strides = (x.stride(1), *torch.empty(inner, device="meta").stride())
        return self.held(x.as_strided((x.shape[0] * x.shape[1], *inner), strides, x.storage_offset())).reshape(x.shape)

    def held(self, rows: Tensor) -> Tensor:
        return rows


class OneStrideIn32Bits(OneStride):
    """Wrong for tokens of a batch that lie 2^31 elements behind the first."""

    def held(self, rows: Tensor) -> Tensor:
        return at_32_bits(rows)
