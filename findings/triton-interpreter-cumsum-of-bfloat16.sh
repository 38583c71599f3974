#!/bin/sh
# Triton 3.9.0, CPU interpreter: tl.cumsum of bfloat16 adds bit patterns, and tl.maximum drops a NaN.
#
# Triton's interpreter (TRITON_INTERPRET=1) keeps bfloat16 as 16-bit integers. In 3.7.1, tl.cumsum of
# four ones gives 1, 2, 3, 4. In 3.9.0 it gives 1, 1.7e38, -0.25, -4.25e37: the sums of the integers
# 0x3f80, read as bfloat16. And tl.maximum of 1 and NaN is NaN in 3.7.1, and 1 in 3.9.0. Neither
# version says anything.
#
# Seen on 27 November 2026 with Python 3.11 and torch 2.13.0 on a CPU. torch may ask for another
# Triton; the interpreter needs of torch only its tensors.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > kernels.py <<'END'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def sums_kernel(x, sums, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(sums + i, tl.cumsum(tl.load(x + i), 0))


@triton.jit
def maximum_kernel(x, y, largest, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(largest + i, tl.maximum(tl.load(x + i), tl.load(y + i)))


ones, sums = torch.ones(4, dtype=torch.bfloat16), torch.empty(4, dtype=torch.bfloat16)
sums_kernel[(1,)](ones, sums, n=4)
x, y, largest = torch.tensor([1.0, 5.0]), torch.tensor([float("nan"), 2.0]), torch.empty(2)
maximum_kernel[(1,)](x, y, largest, n=2)
print(f"cumsum {[float(f'{value:.3g}') for value in sums.tolist()]}, maximum {largest.tolist()}")
END
for version in 3.7.1 3.9.0; do
    environment/bin/pip install -q "triton==$version" 2> /dev/null
    echo "$version: $(environment/bin/python kernels.py)" | tee -a found.txt
done
cat > expected.txt <<'END'
3.7.1: cumsum [1.0, 2.0, 3.0, 4.0], maximum [nan, 5.0]
3.9.0: cumsum [1.0, 1.7e+38, -0.25, -4.25e+37], maximum [1.0, 5.0]
END
cmp found.txt expected.txt
