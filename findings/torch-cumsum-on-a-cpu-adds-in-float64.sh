#!/bin/sh
# torch 2.13.0 on a CPU: torch.cumsum of float32 adds in float64, and only its results are float32.
#
# The cumulative sum of a gate is where kernels lose digits. For 2^20 numbers of -0.1 in float32,
# numpy.cumsum ends 1,034 from the truth, and so does a loop that adds float32 numbers. torch.cumsum
# ends at the truth: each of its results is the float64 sum, rounded once. The documentation of
# torch.cumsum has a formula, and says of dtype only that the input is converted to it. So a
# reference in torch "in float32" has no error of float32 sums, and neither has a tolerance that was
# measured with it. numpy.sum and torch.sum are near the truth too, since they add in a tree.
#
# Seen on 28 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > sums.py <<'END'
import numpy as np
import torch

gates = torch.full((2**20,), -0.1)
truth = gates.double().cumsum(0)
total = np.float32(0)
for gate in gates.numpy():
    total += gate
for name, sums in (("torch", gates.cumsum(0)), ("numpy", torch.from_numpy(np.cumsum(gates.numpy()))), ("loop", torch.tensor([total]))):
    print(name, f"is off by {abs(sums[-1].double() - truth[-1]):.2g} at the end")
print("the float64 sums, rounded once:", torch.equal(gates.cumsum(0), truth.float()))
END
environment/bin/python sums.py | tee seen
cat > expected <<'END'
torch is off by 0 at the end
numpy is off by 1e+03 at the end
loop is off by 1e+03 at the end
the float64 sums, rounded once: True
END
cmp seen expected
