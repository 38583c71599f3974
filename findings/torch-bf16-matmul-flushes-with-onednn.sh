#!/bin/sh
# torch 2.13.0 on a CPU with AVX-512 BF16: whether a product of bfloat16 matrices takes subnormal
# numbers for zero depends on their size.
#
# a is full of 2^-130, which bfloat16 and float32 hold as subnormal numbers, and b of 2^30, so every
# number of a b is n 2^-100. For n = 16 torch returns it, and for n = 64 it returns 0: larger products
# go to oneDNN, whose instruction (VDPBF16PS) takes subnormal operands for zero. A matrix times a
# vector still counts them at n = 64. With torch.backends.mkldnn.flags(enabled=False) all are right.
#
# A chunk of a delta rule whose keys decay to e^-88 before they meet large values has another state
# on such a CPU than in float32, and another one for small heads than for large heads.
#
# Seen on 29 November 2026 with Python 3.11. Without AVX-512 BF16 this says so and exits with 2.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
grep -q avx512_bf16 /proc/cpuinfo || { echo "this CPU has no avx512_bf16"; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'END'
import torch


def parts(n):
    """What of n 2^-100 is there: of a matrix times a matrix, and of a matrix times a vector."""
    a = torch.full((n, n), 2.0**-130, dtype=torch.bfloat16)
    b = torch.full((n, n), 2.0**30, dtype=torch.bfloat16)
    want = n * 2.0**-100
    return (a @ b)[0, 0].item() / want, (a @ b[:, 0])[0].item() / want


found = {n: parts(n) for n in (16, 64)}
with torch.backends.mkldnn.flags(enabled=False):
    found["64 without oneDNN"] = parts(64)
for name, value in found.items():
    print(f"n = {name}: matrix {value[0]}, vector {value[1]}")
raise SystemExit([*found.values()] != [(1.0, 1.0), (0.0, 1.0), (1.0, 1.0)])
END
