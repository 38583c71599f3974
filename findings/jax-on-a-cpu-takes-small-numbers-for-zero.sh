#!/bin/sh
# jax 0.10.2 on a CPU: numbers below 2^-126 are zero in every operation, also where they are inputs.
#
# exp(-88) is 6.1e-39 in NumPy and 0 in JAX. 2^-100 times 2^-30 is 0, and so is 1e-40 times 1. An
# array that prints 1e-40 equals 0 and is not greater than 0. A reference in NumPy or PyTorch keeps
# such numbers, so a decay of a strong gate differs: one side forgets all, and the other does not.
#
# Seen on 28 November 2026 with Python 3.11.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > small.py <<'END'
import jax.numpy as jnp
import numpy as np

x = np.float32(-88.0)
print(f"exp(-88): NumPy {np.exp(x):.2g}, JAX {float(jnp.exp(x)):.2g}")
print("2^-100 * 2^-30:", float(jnp.float32(2.0**-100) * jnp.float32(2.0**-30)))
small = jnp.asarray(np.float32(1e-40))
print("holds", np.asarray(small), "times 1:", float(small * 1), "equals 0:", bool(small == 0), "over 0:", bool(small > 0))
END
environment/bin/python small.py | tee seen
cat > expected <<'END'
exp(-88): NumPy 6.1e-39, JAX 0
2^-100 * 2^-30: 0.0
holds 1e-40 times 1: 0.0 equals 0: True over 0: False
END
cmp seen expected
