#!/bin/sh
# torch 2.13.0 and jax 0.10.2: after JAX is installed, torch.einsum of three operands gives other numbers.
#
# JAX needs the package opt_einsum, and torch.einsum takes its order of contraction from this package
# wherever it can be imported. The documentation of torch.einsum says so, as a matter of speed and
# memory. Here (q k) v is infinite in float16, because a score is 90,000. With JAX installed, and
# not imported, torch computes q (k v), which is 351.5. Where nothing overflows, the results round
# elsewhere. So a reference that is written with einsum depends on what else is installed.
# torch.backends.opt_einsum.enabled = False restores the order from left to right.
#
# Seen on 28 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > attend.py <<'END'
import torch

q, k, v = (torch.full((4, 1), number, dtype=torch.float16) for number in (300.0, 300.0, 2.0**-10))
y = torch.einsum("td,sd,sv->tv", q, k, v)
print("opt_einsum", torch.backends.opt_einsum.is_available(), y.flatten().tolist())
END
environment/bin/python attend.py | tee seen
environment/bin/pip install -q jax==0.10.2 jaxlib==0.10.2
environment/bin/python attend.py | tee -a seen
cat > expected <<'END'
opt_einsum False [inf, inf, inf, inf]
opt_einsum True [351.5, 351.5, 351.5, 351.5]
END
cmp seen expected
