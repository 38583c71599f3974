#!/bin/sh
# torch 2.13.0: FlopCounterMode counts 4,096 or 0 for the same product, as it is written.
#
# The recurrent form of a linear attention reads its state with a key: a vector of 64 times a matrix
# of 64 x 32, which is 4,096 FLOPs. For k @ S the counter says 4,096. For S.T @ k, the same numbers, it
# says 0, and so it does for a batch of matrices times one vector and for a dot product with @, but
# not for these products in torch.einsum. solve_triangular of the chunked form is 0 too. The
# documentation says that the counter counts the FLOPs within its context, and names no operations.
# So two ways to write one layer seem to differ in their work.
#
# Seen on 28 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > count.py <<'END'
import torch
from torch.utils.flop_counter import FlopCounterMode

k, S, lower = torch.ones(64), torch.ones(64, 32), torch.eye(64)
ways = {
    "k @ S": lambda: k @ S,
    "S.T @ k": lambda: S.T @ k,
    "einsum of S and k": lambda: torch.einsum("kv,k->v", S, k),
    "8 matrices @ k": lambda: torch.ones(8, 32, 64) @ k,
    "k @ k": lambda: k @ k,
    "einsum of k and k": lambda: torch.einsum("k,k->", k, k),
    "solve_triangular": lambda: torch.linalg.solve_triangular(lower, S, upper=False),
}
for name, way in ways.items():
    with FlopCounterMode(display=False) as counter:
        way()
    print(name, counter.get_total_flops())
END
environment/bin/python count.py 2> errors.txt | tee seen
cat > expected <<'END'
k @ S 4096
S.T @ k 0
einsum of S and k 4096
8 matrices @ k 0
k @ k 0
einsum of k and k 128
solve_triangular 0
END
cmp seen expected
