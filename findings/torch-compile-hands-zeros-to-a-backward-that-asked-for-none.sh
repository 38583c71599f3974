#!/bin/sh
# torch 2.13.0: under torch.compile, a backward that asked for None gets zeros instead.
#
# A kernel with two outputs, o and a final state, calls ctx.set_materialize_grads(False). Its
# documentation says that the gradient of an unused output is then None, so the backward can take a
# shorter way, or launch another kernel. Without torch.compile it does. With torch.compile the
# backward is traced with a tensor for each gradient, and gets zeros. The backend is "eager" here, so
# no code is generated. So tests of the plain function run another path than compiled training does.
#
# Seen on 28 November 2026 with Python 3.11 on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > unused.py <<'END'
import torch


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, do, dstate):
        return do * 2 + (100 if dstate is None else 3 * dstate)


def loss(x):
    o, state = Kernel.apply(x)
    return o.sum()


for name, function in (("plain", loss), ("compiled", torch.compile(loss, backend="eager", fullgraph=True))):
    x = torch.ones(1, requires_grad=True)
    function(x).backward()
    print(name, "None" if x.grad.item() == 102 else "zeros" if x.grad.item() == 2 else x.grad)
END
environment/bin/python unused.py 2> errors.txt | tee seen
cat > expected <<'END'
plain None
compiled zeros
END
cmp seen expected
