#!/bin/sh
# torch 2.13.0 on a CPU: which notation repeats heads decides in which format their gradients add.
#
# A key head that 1,000 value heads read can be repeated with expand, repeat_interleave or gather, and
# with an index or index_select. The forward numbers are the same bits. In bfloat16 the gradient of
# 1,000 ones is 1,000 with the first three. With an index it is 256, because each addition is rounded to
# 8 bits, and 256 + 1 is 256. index_select stops there too, but reaches 1,000 if the heads are the
# first of two axes. index_add and index_put stop at 256 and scatter_add does not. float16 stops at
# 2,048 of 5,000 in the same places.
#
# Seen on 30 November 2026 with Python 3.11.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > heads.py <<'END'
import torch


def gradient(repeated, dtype, count):
    k = torch.ones(1, 1, 1, 8, dtype=dtype, requires_grad=True)  # [B, T, H, K]
    repeated(k, torch.zeros(count, dtype=torch.long)).backward(torch.ones(1, 1, count, 8, dtype=dtype))
    return k.grad[0, 0, 0, 0].item()


NOTATIONS = {
    "expand": lambda k, index: k.expand(-1, -1, len(index), -1).clone(),
    "repeat_interleave": lambda k, index: k.repeat_interleave(len(index), 2),
    "gather": lambda k, index: k.gather(2, index[None, None, :, None].expand(1, 1, -1, 8)),
    "index": lambda k, index: k[:, :, index],
    "index_select": lambda k, index: k.index_select(2, index),
    "index_select of the first axis": lambda k, index: k[0, 0].index_select(0, index)[None, None],
}
for name, repeated in NOTATIONS.items():
    print(name, gradient(repeated, torch.bfloat16, 1000), gradient(repeated, torch.float16, 5000))
zero, places, ones = torch.zeros(1).bfloat16(), torch.zeros(1000, dtype=torch.long), torch.ones(1000).bfloat16()
print("index_add", zero.index_add(0, places, ones).item())
print("index_put", zero.index_put((places,), ones, accumulate=True).item())
print("scatter_add", zero.scatter_add(0, places, ones).item())
END
environment/bin/python heads.py | tee seen
cat > expected <<'END'
expand 1000.0 5000.0
repeat_interleave 1000.0 5000.0
gather 1000.0 5000.0
index 256.0 2048.0
index_select 256.0 2048.0
index_select of the first axis 1000.0 5000.0
index_add 256.0
index_put 256.0
scatter_add 1000.0
END
cmp seen expected
