#!/bin/sh
# torch 2.13.0 and numpy 2.4.6: through DLPack, a view with torch's negative bit arrives with the other sign.
#
# The imaginary part of a conjugate is such a view: no number is computed, and a bit says that each
# must be negated. x.numpy() refuses it. DLPack has no place for the bit, and the exporter does not
# refuse: NumPy's from_dlpack and torch's own give the numbers with the other sign. resolve_neg()
# before the exchange makes it right.
#
# Seen on 28 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > exchange.py <<'END'
import numpy as np
import torch

x = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
print("torch", x.tolist(), "negative bit", x.is_neg())
try:
    x.numpy()
except RuntimeError as error:
    print("numpy()", str(error).split(".")[0])
print("numpy.from_dlpack", np.from_dlpack(x).tolist())
print("torch.from_dlpack", torch.from_dlpack(x).tolist())
print("after resolve_neg", np.from_dlpack(x.resolve_neg()).tolist())
END
environment/bin/python exchange.py | tee seen
cat > expected <<'END'
torch [-2.0, 4.0] negative bit True
numpy() Can't call numpy() on Tensor that has negative bit set
numpy.from_dlpack [2.0, -4.0]
torch.from_dlpack [2.0, -4.0]
after resolve_neg [-2.0, 4.0]
END
cmp seen expected
