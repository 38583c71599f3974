#!/bin/sh
# jax 0.10.2 on a CPU: inside a callback of JAX, NumPy, torch and Python's own floats lose small numbers.
#
# jax.pure_callback calls a Python function from a JAX program, for example a reference in NumPy. JAX's
# page of gotchas says that JAX itself may take subnormal numbers for zero. The documentation of
# callbacks has no word on this, so one expects NumPy's own results. But the function runs in a thread
# of XLA, in which the processor takes such numbers for zero, whoever computes: 1e-310 * 1.0 of plain
# Python is 0.0, and exp(-88) is 0 in NumPy and torch. Called outside, the same function keeps them.
# So a reference agrees with JAX inside a callback, and differs from JAX outside.
#
# Seen on 28 November 2026 with Python 3.11 on x86-64.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > small.py <<'END'
import jax
import numpy as np
import torch

one = 1.0


def host(x):
    numbers = 1e-310 * one, np.exp(np.float32(-88)), torch.tensor(-88.0).exp()
    print(*(f"{number:.1e}" for number in numbers))
    return np.asarray(x)


host(one)
result = jax.ShapeDtypeStruct((), np.float32)
jax.jit(lambda x: jax.pure_callback(host, result, x))(np.float32(one)).block_until_ready()
host(one)
END
environment/bin/python small.py | tee seen
cat > expected <<'END'
1.0e-310 6.1e-39 6.1e-39
0.0e+00 0.0e+00 0.0e+00
1.0e-310 6.1e-39 6.1e-39
END
cmp seen expected
