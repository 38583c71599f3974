#!/bin/sh
# torch 2.13.0: under torch.utils.checkpoint, only tensors that are passed by position are protected
# against a change before the backward.
#
# y = sin(x w), x = 1 and w = 0.5, so dy/dx = w cos(x w) = 0.4388. The caller sets w to zero between
# forward and backward. Without a checkpoint, torch raises "modified by an inplace operation". With
# checkpoint(f, x, w, use_reentrant=False) it raises the same. If the same w is passed by keyword, in a
# dict, or by a closure, the forward is run again with the zero, nothing is raised, and dy/dx is 0.
# checkpoint(f, x, w, use_reentrant=True) raises the error too.
#
# A GDN layer that checkpoints the step of each sequence with a dict of its parameters has no error if
# an optimizer changes them before the backward.
#
# Seen on 29 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'END'
import torch
from torch.utils.checkpoint import checkpoint


def f(x, w):
    return (x * w).sin()


calls = {
    "no checkpoint": f,
    "by position": lambda x, w: checkpoint(f, x, w, use_reentrant=False),
    "by position, reentrant": lambda x, w: checkpoint(f, x, w, use_reentrant=True),
    "by keyword": lambda x, w: checkpoint(f, x, w=w, use_reentrant=False),
    "in a dict": lambda x, w: checkpoint(lambda x, d: f(x, d["w"]), x, {"w": w}, use_reentrant=False),
    "by a closure": lambda x, w: checkpoint(lambda x: f(x, w), x, use_reentrant=False),
}


def gradient(call):
    x, w = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5])
    y = call(x, w)
    w.zero_()
    try:
        y.backward()
        return x.grad.item()
    except RuntimeError as error:
        return "RuntimeError" if "inplace" in str(error) else str(error)


found = {name: gradient(call) for name, call in calls.items()}
for name, value in found.items():
    print(f"{name}: {value}")
raise SystemExit([*found.values()] != ["RuntimeError"] * 3 + [0.0] * 3)
END
