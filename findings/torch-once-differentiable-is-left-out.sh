#!/bin/sh
# torch 2.13.0: a function marked with once_differentiable is differentiated twice, without an error.
#
# f squares its input, and its backward is marked with once_differentiable, so a second derivative
# should be a RuntimeError. Here x = 2 and w = 3. The gradient of f(x w) to x is 2 x w w, whose
# derivative by w is 4 x w = 24. Both backward() and torch.autograd.grad return 12, the part that does
# not lead through f: the mark looks only at the incoming gradient, which is a constant 1.
#
# With f(x w) squared, backward() raises the RuntimeError. torch.autograd.grad(gradient, w) still
# raises nothing, and returns 864 where 3456 is right: it runs only nodes that lead to w, and the node
# with the error leads to nothing.
#
# Seen on 27 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'END'
import torch
from torch.autograd.function import once_differentiable


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def second(loss, how):
    x, w = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(x * w), x, create_graph=True)
    try:
        if how == "backward":
            gradient.backward()
            return w.grad.item()
        return torch.autograd.grad(gradient, w)[0].item()
    except RuntimeError as error:
        return type(error).__name__


losses = {
    "torch.square(x w)": torch.square,
    "f(x w)": Square.apply,
    "torch.square(x w) squared": lambda u: torch.square(u).square(),
    "f(x w) squared": lambda u: Square.apply(u).square(),
}
found = {name: [second(loss, how) for how in ("backward", "grad")] for name, loss in losses.items()}
for name, values in found.items():
    print(f"{name}: backward() {values[0]}, autograd.grad {values[1]}")
raise SystemExit([*found.values()] != [[24.0, 24.0], [12.0, 12.0], [3456.0, 3456.0], ["RuntimeError", 864.0]])
END
