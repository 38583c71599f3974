#!/bin/sh
# mlx 0.32.4 on a CPU: cumsum rounds each of its sums to the input's format, sum does not.
#
# The last entry of cumsum should be what sum gives. For 1,000 ones in bfloat16 sum gives 1,000 and
# cumsum ends at 256; for 5,000 in float16 they are 5,000 and 2,048. PyTorch and JAX end at 1,000 and
# 5,000. Log decays of a chunk are added with cumsum: 128 gates of -3.296875 sum up to -422, and cumsum
# says -446.
#
# Seen on 30 November 2026 with Python 3.11.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q mlx==0.32.4 mlx-cpu==0.32.4 torch==2.13.0 numpy==2.4.6
cat > sums.py <<'END'
import mlx.core as mx
import torch

for name, count in (("bfloat16", 1000), ("float16", 5000)):
    x, y = mx.ones(count, dtype=getattr(mx, name)), torch.ones(count, dtype=getattr(torch, name))
    print(name, "mlx: sum", x.sum().item(), "cumsum", mx.cumsum(x)[-1].item(), "| torch: cumsum", y.cumsum(0)[-1].item())
gates = mx.full((128,), -3.3, dtype=mx.bfloat16)
print("128 gates of", gates[0].item(), "sum", gates.sum().item(), "cumsum", mx.cumsum(gates)[-1].item())
END
environment/bin/python sums.py | tee seen
cat > expected <<'END'
bfloat16 mlx: sum 1000.0 cumsum 256.0 | torch: cumsum 1000.0
float16 mlx: sum 5000.0 cumsum 2048.0 | torch: cumsum 5000.0
128 gates of -3.296875 sum -422.0 cumsum -446.0
END
cmp seen expected
