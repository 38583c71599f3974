"""Launches: which kernel of a call is the first to give other numbers, in another call or with other configurations.

A line's implementation is called several times on the same inputs, and once with each of other words of tuning; after every launch
of a Triton kernel its tensors are kept. A launch that is given the same bits and gives others is not deterministic; one that with
other configurations gives numbers farther away than rounding takes them is wrong in one of the two; one after which the device is
gone reads or writes what it must not.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from verify import device as devices
from verify.adapter import Adapter, AdapterError
from verify.bench import AdapterBench, AdapterFault, OutOfMemory, short
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
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.config.items())])


class Stopped(Exception):
    """A call did not come to its end; the words say after which launch, and why."""


def told(run: Run, calls: int, beside: Sequence[str]) -> dict[str, Any]:
    """How many launches of how many kernels a call of a run has, and in words those that are `found` to stand out; plain data.

    The run's implementation is called `calls` times as the line says, and once with each word of tuning in `beside`; picks of the
    line stay. AdapterError if it is none on one process.
    """
    adapter = adapter_of(run.adapter)
    if not isinstance(adapter, Adapter):
        raise AdapterError(f"adapter {run.adapter}: launches are of kernels on one process, it is a parallel path")
    with _recording() as launched:
        first, found = list[Launch](), list[str]()
        try:
            first = _called(adapter, run, launched)
            for words, other, apart in others(run, calls, beside):
                found += [f"{words}: {each}" for each in parted(first, _called(adapter, other, launched), apart)]
        except Stopped as stopped:
            found.append(str(stopped))
    kernels = {launch.kernel for launch in first}
    return {"launches": len(first), "kernels": len(kernels), "found": found, "spent": bool(devices.lost(run.device))}


def others(run: Run, calls: int, beside: Sequence[str]) -> Iterator[tuple[str, Run, float]]:
    """What a run's first call is compared with: in words, the run, and how far apart numbers may lie."""
    for _ in range(calls - 1):
        yield "called again", run, 0.0
    for tune in beside:
        picks = "".join(run.tune.partition(",")[1:]) if tune.isdecimal() else ""
        yield f"beside tune={tune}", dataclasses.replace(run, tune=tune + picks), APART


@contextlib.contextmanager
def _recording() -> Iterator[list[Launch]]:
    """The launches of Triton kernels inside, as they come."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    plain: Callable[..., Any] = JITFunction.run

    def run(kernel: Any, *given: Any, **named: Any) -> Any:
        if named.get("warmup"):
            return plain(kernel, *given, **named)
        tensors = {name: x for name, x in [*zip(kernel.arg_names, given, strict=False), *named.items()] if isinstance(x, Tensor)}
        before = {name: x.clone() for name, x in tensors.items()}
        launch = Launch(kernel.__name__, {name: named[name] for name in SHOWN if name in named}, {}, {})
        try:
            result = plain(kernel, *given, **named)
            torch.cuda.synchronize()
        except Exception as error:
            raise Stopped(f"launch {len(launches)}, {launch}: {short(error)}") from error
        changed = {name for name, x in tensors.items() if not _same(x, before[name])}
        launch.read = {name: x for name, x in before.items() if name not in changed}
        launch.wrote = {name: tensors[name].clone() for name in changed}
        launches.append(launch)
        return result

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = plain


def _called(adapter: Adapter, run: Run, launches: list[Launch]) -> list[Launch]:
    """The launches of one call of a run's implementation, after one that compiles. Stopped if it does not come to its end."""
    case = run.example.case
    bench = AdapterBench(adapter, None, case, run.products, run.device)
    inputs, cotangents = bench.call(case)
    with following(run.tune):
        for _ in range(2):
            launches.clear()
            try:
                bench.run(inputs, cotangents)
            except (AdapterFault, OutOfMemory) as fault:
                if isinstance(fault.__cause__, Stopped):
                    raise fault.__cause__ from None
                raise Stopped(f"{f'after launch {len(launches) - 1}' if launches else 'before any launch'}: {fault}") from fault
    return list(launches)


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
        if words := ", ".join(f"{name} by {value:.3g} of its norm" for name, value in off.items() if not value <= apart):
            yield f"launch {index}, {a} beside {b}: {words}"


def distance(one: Tensor, other: Tensor) -> float:
    """How far two tensors lie apart, in parts of the second's norm; what no longer has the same shape tells nothing."""
    if one.shape != other.shape:
        return 0.0
    off, whole = (one.double() - other.double()).norm(), other.double().norm()
    return float(off / whole) if float(whole) else float(off)
