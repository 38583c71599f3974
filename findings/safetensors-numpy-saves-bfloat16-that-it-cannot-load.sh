#!/bin/sh
# safetensors 0.8.0 and numpy 2.4.6: what safetensors.numpy saves, it cannot always load, or loads with other numbers.
#
# An array of ml_dtypes.bfloat16 is saved as BF16, which PyTorch reads. safetensors.numpy.load of the
# same bytes raises KeyError: 'BF16'. A transposed array, or every second column of one, is saved
# without a word, and comes back with the right shape and the numbers in the order of memory. So
# arrays must be made contiguous before they are saved, and 16-bit files must be read as integers.
#
# Seen on 28 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0
cat > store.py <<'END'
import ml_dtypes
import numpy as np
from safetensors.numpy import load, save

half = np.arange(4, dtype=np.float32).astype(ml_dtypes.bfloat16)
stored = save({"x": half})
print("stored as", "BF16" if b'"dtype":"BF16"' in stored else stored[:60])
try:
    print("loaded", load(stored)["x"])
except KeyError as error:
    print("KeyError", error)
y = np.arange(6, dtype=np.float32).reshape(2, 3)
for x in (y.T, y[:, ::2]):
    print(x.tolist(), "comes back as", load(save({"y": x}))["y"].tolist())
END
environment/bin/python store.py | tee seen
cat > expected <<'END'
stored as BF16
KeyError 'BF16'
[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] comes back as [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
[[0.0, 2.0], [3.0, 5.0]] comes back as [[0.0, 1.0], [2.0, 3.0]]
END
cmp seen expected
