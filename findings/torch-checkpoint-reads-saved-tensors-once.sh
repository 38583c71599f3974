#!/bin/sh
# torch 2.13.0: a backward may read ctx.saved_tensors as often as it likes, except under
# torch.utils.checkpoint.checkpoint(..., use_reentrant=False), where the second read raises.
#
# A custom function y = x^2 keeps x, and its backward reads ctx.saved_tensors once for each of two
# factors. At x = 3 the gradient is 6, in a plain call, under checkpoint(..., use_reentrant=True), and
# with saved-tensor hooks that return what they get. With use_reentrant=False the backward raises
# CheckpointError: the hook that gives a saved tensor back forgets it when it is asked for it.
#
# So a kernel's autograd function passes every gradient test and fails in a model that is trained with
# activation checkpointing. It must unpack ctx.saved_tensors into names once.
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


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


def hooked(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return Square.apply(x)


calls = {
    "plain": Square.apply,
    "reentrant checkpoint": lambda x: checkpoint(Square.apply, x, use_reentrant=True),
    "hooks": hooked,
    "checkpoint": lambda x: checkpoint(Square.apply, x, use_reentrant=False),
}


def gradient(call):
    x = torch.tensor([3.0], requires_grad=True)
    try:
        call(x).backward()
        return x.grad.item()
    except Exception as error:
        return type(error).__name__


found = {name: gradient(call) for name, call in calls.items()}
for name, value in found.items():
    print(f"{name}: {value}")
raise SystemExit([*found.values()] != [6.0, 6.0, 6.0, "CheckpointError"])
END
