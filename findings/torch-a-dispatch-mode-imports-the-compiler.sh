#!/bin/sh
# torch 2.13.0: the first operation inside a TorchDispatchMode imports torch's compiler.
#
# A mode that passes every operation on, as a counter of FLOPs or a logger does, has nothing to do with
# torch.compile, and nothing is compiled. Still its first operation imports torch._dynamo and all that
# this needs: hundreds of modules, for seconds of CPU time on a slow core. The import comes from the
# wrapper that switches the compiler off for the mode's __torch_dispatch__. A program that measures its
# first call, or starts many short processes, pays it there.
#
# Seen on 28 November 2026 with Python 3.11 on a CPU: 823 modules, 3 s. Exits with 0 while this is so,
# and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'END'
import sys
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PassesOn(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def imported(what, act):
    before, start = len(sys.modules), time.process_time()
    act()
    print(f"{what}: {len(sys.modules) - before} modules imported, {time.process_time() - start:.1f} s of CPU time")
    return "torch._dynamo" in sys.modules


def add():
    return torch.ones(2) + 1


def add_in_a_mode():
    with PassesOn():
        add()


plain = imported("an addition", add)
first = imported("an addition in a mode", add_in_a_mode)
imported("another one", add_in_a_mode)
raise SystemExit(plain or not first)
END
