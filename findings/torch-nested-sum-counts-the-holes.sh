#!/bin/sh
# torch 2.13.0: sum() and mean() of a nested tensor count the rows that belong to no sequence.
#
# A packed batch in padded slots is torch.nested.nested_tensor_from_jagged(values, offsets, lengths),
# a nested tensor with holes, as its documentation calls it. Its sequences are 1, 2 and 5, 6, 7 here,
# and its numel() is 5. But sum() is 55, the sum of all ten values, and mean() is 5.5. A NaN in a hole
# is found by isnan().any(), and sum().backward() sends gradients into the holes. Sums over the
# sequences (dim=1) are refused for such a tensor. So a loss, or a check for NaN, covers padding.
#
# Seen on 28 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > holes.py <<'END'
import torch

values = torch.arange(1.0, 11.0).requires_grad_()
packed = torch.nested.nested_tensor_from_jagged(values[:, None], torch.tensor([0, 4, 10]), torch.tensor([2, 3]))
print("sequences", [rows.flatten().tolist() for rows in packed.unbind()], "numel", packed.numel())
print("sum", packed.sum().item(), "of sequences", sum(rows.sum() for rows in packed.unbind()).item())
packed.sum().backward()
print("mean", packed.mean().item(), "gradient", values.grad.int().tolist())
END
environment/bin/python holes.py 2> errors.txt | tee seen
cat > expected <<'END'
sequences [[1.0, 2.0], [5.0, 6.0, 7.0]] numel 5
sum 55.0 of sequences 21.0
mean 5.5 gradient [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
END
cmp seen expected
