#!/bin/sh
# mlx 0.32.4, CPU: mx.fast.gated_delta_update rounds a float32 decay to the dtype of the queries.
#
# The decay, gamma, is given in linear space, here as 0.999 in float32, and the state is float32 too.
# With float32 queries, 500 tokens that write nothing leave 0.606 of the state, as they should. With
# bfloat16 queries they leave all of it, because 0.999 becomes 1: such a head never forgets. With
# float16 queries they leave 0.6135. The dtype of gamma makes no difference, and nothing is said.
#
# Seen on 27 November 2026 with Python 3.11.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q 'mlx[cpu]==0.32.4'
cat > forget.py <<'END'
import mlx.core as mx

mx.set_default_device(mx.cpu)
tokens, width = 500, 32
gamma = mx.full((1, tokens, 1), 0.999, dtype=mx.float32)
state = mx.ones((1, 1, width, width), dtype=mx.float32)
for name in ("float32", "bfloat16", "float16"):
    zeros = mx.zeros((1, tokens, 1, width), dtype=getattr(mx, name))
    _, final = mx.fast.gated_delta_update(zeros, zeros, zeros, gamma, zeros[..., 0], state)
    print(f"{name} queries: {final[0, 0, 0, 0].item():.4f} of the state is left, 0.999**500 is {0.999**500:.4f}")
END
environment/bin/python forget.py | tee seen.txt
grep -q '^float32 queries: 0.6064 of' seen.txt
grep -q '^bfloat16 queries: 1.0000 of' seen.txt
grep -q '^float16 queries: 0.6135 of' seen.txt
