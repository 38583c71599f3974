"""Launches: which kernel of a call is the first to give other numbers, in another call or with other configurations.

    python -m benchmarks.launches "law=oracle adapter=fla/chunk device=cuda tune=0 lengths=64" --beside 2,3

The line's implementation is called several times on the same inputs, and once with each of the other words of tuning; after every
launch of a Triton kernel its tensors are kept. A launch that is given the same bits and gives others is not deterministic; one that
with other configurations gives numbers farther away than rounding takes them is wrong in one of the two. An illegal access is told
by the launch after which the device is gone. Exit 1 if any launch stands out, 3 without a GPU.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from verify import device as devices
from verify.adapter import Adapter
from verify.bench import AdapterBench
from verify.run import Run, adapter_of, following

APART = 0.02  # of a tensor's norm: more than rounding in any dtype makes of one kernel's output
SHOWN = ("num_warps", "num_stages", "BT", "BK", "BV", "BC")


@dataclasses.dataclass
class Launch:
    """One launch: the kernel, its configuration, what it read and what it changed, by the names of its arguments."""

    kernel: str
    config: dict[str, Any]
    read: dict[str, Tensor]
    wrote: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.kernel} {' '.join(f'{name}={value}' for name, value in self.config.items())}"


class Recorder:
    """Every launch of a Triton kernel while it is `on`."""

    def __init__(self) -> None:
        from triton.runtime.jit import JITFunction

        self.launches: list[Launch] = []
        self.on = False
        plain: Callable[..., Any] = JITFunction.run
        recorder = self

        def run(kernel: Any, *given: Any, **named: Any) -> Any:
            if not recorder.on or named.get("warmup"):
                return plain(kernel, *given, **named)
            tensors = {
                name: x for name, x in [*zip(kernel.arg_names, given, strict=False), *named.items()] if isinstance(x, Tensor)
            }
            before = {name: x.clone() for name, x in tensors.items()}
            config = {name: named[name] for name in SHOWN if name in named}
            try:
                result = plain(kernel, *given, **named)
                torch.cuda.synchronize()
            except Exception as error:
                print(f"  launch {len(recorder.launches)}, {Launch(kernel.__name__, config, {}, {})}: {error!s:.90}", flush=True)
                os._exit(1)  # the context is gone, and whoever is asked to tidy up would say so again
            changed = {name for name, x in tensors.items() if not _same(x, before[name])}
            read = {name: x for name, x in before.items() if name not in changed}
            recorder.launches.append(Launch(kernel.__name__, config, read, {name: tensors[name].clone() for name in changed}))
            return result

        JITFunction.run = run  # type: ignore[method-assign]

    def of(self, run: Run) -> list[Launch]:
        """The launches of one call of a run's implementation, after one that compiles."""
        adapter, case = adapter_of(run.adapter), run.example.case
        assert isinstance(adapter, Adapter), run
        bench = AdapterBench(adapter, None, case, run.products, run.device)
        inputs, cotangents = bench.call(case)
        with following(run.tune):
            for self.on in (False, True):
                self.launches = []
                bench.run(inputs, cotangents)
        self.on = False
        return self.launches


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, as far as numbers tell: what is none is alike."""
    return torch.equal(torch.nan_to_num(one.float()), torch.nan_to_num(other.float()))


def parted(one: list[Launch], other: list[Launch], apart: float) -> Iterator[str]:
    """The launches that read the same and wrote what lies farther apart than that part of its norm, in words."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.kernel != b.kernel:
            yield f"launch {index}: {a.kernel} here, {b.kernel} there"
            return
        if any(distance(a.read[name], b.read[name]) > apart for name in a.read.keys() & b.read.keys()):
            continue
        off = {name: distance(a.wrote[name], b.wrote[name]) for name in sorted(a.wrote.keys() & b.wrote.keys())}
        if told := ", ".join(f"{name} by {value:.3g} of its norm" for name, value in off.items() if not value <= apart):
            yield f"launch {index}, {a} beside {b}: {told}"


def distance(one: Tensor, other: Tensor) -> float:
    """How far two tensors lie apart, in parts of the second's norm; what no longer has the same shape tells nothing."""
    if one.shape != other.shape:
        return 0.0
    off, whole = (one.double() - other.double()).norm(), other.double().norm()
    return float(off / whole) if float(whole) else float(off)


def main() -> int:
    """Call, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("line")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--beside", default="", help="other numbers that draw configurations; the line's picks stay")
    options = parser.parse_args()
    run = Run.parse(options.line)
    if run.device != "cuda":
        parser.error(f"line must say device=cuda, got device={run.device}")
    if not devices.gpus():
        print("torch sees no GPU", file=sys.stderr)
        return 3
    recorder = Recorder()
    first, found = recorder.of(run), 0
    print(f"{len(first)} launches of {len({launch.kernel for launch in first})} kernels", flush=True)
    others = [("called again", run, 0.0)] * (options.calls - 1)
    for tune in filter(None, options.beside.split(",")):
        picks = "".join(run.tune.partition(",")[1:])
        others.append((f"beside tune={tune}", dataclasses.replace(run, tune=tune + picks), APART))
    for what, other, apart in others:
        for told in parted(first, recorder.of(other), apart):
            print(f"  {what}: {told}", flush=True)
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
