#!/bin/sh
# triton 3.7.1: tl.sum of float16 adds in float16, although its documentation promises float32.
#
# The documentation of tl.sum says that without `dtype` a float type becomes at least float32. It
# does not: the result and every partial sum have the type of the block, so 4,096 times 32 in
# float16 add up to infinity. With dtype=tl.float32 it is right. But a product of two such blocks is
# float16 too, so tl.sum(a * b, dtype=tl.float32) has lost small products before it adds: 4,096
# products of 0.0001 by 0.0001 add up to 0. Nothing is said.
#
# Seen on 28 November 2026 with Python 3.11, Triton's interpreter on a CPU: inf, 131072.0, and 0.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 triton==3.7.1 numpy==2.4.6
cat > summed.py <<'END'
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, plain, wide, product, N: tl.constexpr):
    block = tl.load(x + tl.arange(0, N))
    one = tl.sum(block)
    tl.static_assert(one.dtype == tl.float16)
    tl.store(plain, one.to(tl.float32))
    tl.store(wide, tl.sum(block, dtype=tl.float32))
    small = block * 0 + 0.0001
    tl.store(product, tl.sum(small.to(tl.float16) * small.to(tl.float16), dtype=tl.float32))


x = torch.full((4096,), 32.0, dtype=torch.float16)
plain, wide, product = (torch.zeros(1) for _ in range(3))
kernel[(1,)](x, plain, wide, product, N=4096)
print("documentation promises float32:", "at least :code:`tl.float32`" in tl.sum.fn.__doc__)
print(f"sum {plain.item()}, with dtype=float32 {wide.item()}, of products {product.item():.3g}")
END
TRITON_INTERPRET=1 environment/bin/python summed.py | tee seen.txt
grep -qx 'documentation promises float32: True' seen.txt
grep -qx 'sum inf, with dtype=float32 131072.0, of products 0' seen.txt
