#!/bin/sh
# jax 0.10.2 and torch 2.13.0: an int64 tensor becomes int32 without a warning, and 2**40 becomes 0.
#
# Offsets of states in a large pool, or strides in bytes, are int64 in torch. jax.dlpack.from_dlpack
# and jax.numpy.asarray take such a tensor, whose dtype they know, and cut each number to its lowest
# 32 bits. Warnings are errors here, and there is none. With 64-bit types (JAX_ENABLE_X64) both give
# int64.
#
# Seen on 27 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 jax==0.10.2 numpy==2.4.6
cat > offsets.py <<'END'
import warnings

import jax
import jax.numpy as jnp
import torch

warnings.simplefilter("error")
offsets = torch.tensor([5, 2**40])
for take in (jax.dlpack.from_dlpack, jnp.asarray):
    taken = take(offsets)
    print(take.__name__, taken.dtype, taken.tolist())
END
environment/bin/python offsets.py | tee seen.txt
JAX_ENABLE_X64=1 environment/bin/python offsets.py | tee wide.txt
grep -qxF 'from_dlpack int32 [5, 0]' seen.txt
grep -qxF 'asarray int32 [5, 0]' seen.txt
grep -qxF 'from_dlpack int64 [5, 1099511627776]' wide.txt
