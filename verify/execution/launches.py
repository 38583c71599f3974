"""Launches: which kernel of a call is the first to give other numbers, in another call or with other configurations.

A line's implementation is called several times on the same inputs, and once with each of other words of tuning; after every launch
of a Triton kernel its tensors are kept. A launch that is given the same bits and gives others is not deterministic; one that with
other configurations gives numbers farther away than rounding takes them is wrong in one of the two; one after which the device is
gone reads or writes what it must not.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from verify.adapters.base import Adapter
from verify.adapters.loader import AdapterError
from verify.execution.bench import AdapterBench, AdapterFault, OutOfMemory, short
from verify.execution.judging import adapter_of, following
from verify.execution.run import Run
from verify.gpu import device as devices

APART = 0.02  # of a tensor's norm: more than rounding in any dtype makes of one kernel's output
SHOWN = ("num_warps", "num_stages", "BT", "BK", "BV", "BC")


@dataclasses.dataclass
class Launch:
    """One launch: the kernel, its configuration, its tensors as they were and those it changed, by the names of its arguments."""

    kernel: str
    config: dict[str, Any]
    read: dict[str, Tensor]
    wrote: dict[str, Tensor]

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.config.items())])


class Stopped(Exception):
    """A call took its device away; the words say by which launch."""


class Recorder:
    """The launches of Triton kernels inside `recording`: which is the last, and while it is `on` what each read and wrote.

    What Triton raises of a configuration that does not fit passes through: whoever tunes skips it. The process must launch
    blocking, or a launch is blamed for one before it.
    """

    def __init__(self, device: str) -> None:
        self.device, self.on, self.count, self.last = device, False, 0, ""
        self.launches: list[Launch] = []

    def begin(self, *, on: bool) -> None:
        """A call begins, perhaps again."""
        self.on, self.count, self.last, self.launches = on, 0, "", []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """See what is launched inside."""
        from triton.runtime.jit import JITFunction

        plain: Callable[..., Any] = JITFunction.run
        recorder = self

        def run(kernel: Any, *given: Any, **named: Any) -> Any:
            return plain(kernel, *given, **named) if named.get("warmup") else recorder._launched(plain, kernel, given, named)

        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = plain

    def _launched(self, plain: Callable[..., Any], kernel: Any, given: Sequence[Any], named: dict[str, Any]) -> Any:
        launch = Launch(kernel.__name__, {name: named[name] for name in SHOWN if name in named}, {}, {})
        self.last = f"launch {self.count}, {launch}"
        tensors = dict[str, Tensor]()
        if self.on:
            arguments = [*zip(kernel.arg_names, given, strict=False), *named.items()]
            tensors = {name: x for name, x in arguments if isinstance(x, Tensor)}
        before = {name: x.clone() for name, x in tensors.items()}
        try:
            result = plain(kernel, *given, **named)
        except Exception as error:
            if devices.lost(self.device):
                raise Stopped(f"{self.last}: {short(error)}") from error
            raise
        self.count += 1
        if self.on:
            changed = {name for name, x in tensors.items() if not _same(x, before[name])}
            launch.read = before
            launch.wrote = {name: tensors[name].clone() for name in changed}
            self.launches.append(launch)
        return result


class _Bench(AdapterBench):
    """A bench whose every call, also a second try for lack of memory, is recorded from its first launch."""

    recorder: Recorder
    recorded = False

    def call_implementation(self, *given: Any) -> Any:
        """As the bench's."""
        self.recorder.begin(on=self.recorded)
        return super().call_implementation(*given)


def told(run: Run, calls: int, beside: Sequence[str]) -> dict[str, Any]:
    """How many launches of how many kernels a call of a run has, and in words those that are `found` to stand out; plain data.

    The run's implementation is called `calls` times as the line says, and once with each word of tuning in `beside`; picks of the
    line stay. Calls that were not made, since the first failed or the device or its memory was gone, are `left`. Where memory ran
    out before anything was found there is a `reason` and nothing else. AdapterError if the implementation is none on one process.
    """
    adapter = adapter_of(run.adapter)
    if not isinstance(adapter, Adapter):
        raise AdapterError(f"adapter {run.adapter}: launches are of kernels on one process, it is a parallel path")
    recorder, found, first = Recorder(run.device), list[str](), list[Launch]()
    asked = [("", run, 0.0), *others(run, calls, beside)]
    try:
        with recorder.recording():
            while asked:
                words, other, apart = asked.pop(0)
                try:
                    launches = _called(adapter, other, recorder)
                except AdapterFault as fault:
                    stopped = fault.__cause__
                    what = str(stopped) if isinstance(stopped, Stopped) else f"{fault}, after {recorder.last or 'no launch'}"
                    found.append(f"{words}: {what}" if words else what)
                    if not words or devices.lost(run.device):
                        break
                else:
                    found += [f"{words}: {each}" for each in parted(first, launches, apart)] if words else []
                    first = first or launches
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        reason = f"out of memory, with the tensors of every launch kept: {error}"
        if not found:
            return {"reason": reason}
        found.append(f"{words}: {reason}")
    kernels, lost = {launch.kernel for launch in first}, bool(devices.lost(run.device))
    left = [words for words, _, _ in asked]
    return {"launches": len(first), "kernels": len(kernels), "found": found, "left": left, "spent": lost}


def others(run: Run, calls: int, beside: Sequence[str]) -> Iterator[tuple[str, Run, float]]:
    """What a run's first call is compared with: in words, the run, and how far apart numbers may lie."""
    for _ in range(calls - 1):
        yield "called again", run, 0.0
    for tune in beside:
        picks = "".join(run.tune.partition(",")[1:]) if tune.isdecimal() else ""
        yield f"beside tune={tune}", dataclasses.replace(run, tune=tune + picks), APART


def _called(adapter: Adapter, run: Run, recorder: Recorder) -> list[Launch]:
    """The launches of one call of a run's implementation, after one that compiles and tunes."""
    case = run.example.case
    bench = _Bench(adapter, None, case, run.products, run.device)
    bench.recorder = recorder
    inputs, cotangents = bench.call(case)
    with following(run.tune):
        for bench.recorded in (False, True):
            bench.run(inputs, cotangents)
    return recorder.launches


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal, where what is none is alike."""
    return bool(_alike(one, other).all())


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def parted(one: list[Launch], other: list[Launch], apart: float) -> Iterator[str]:
    """The launches that read the same and wrote what lies farther apart than that part of its norm, in words."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.kernel != b.kernel:
            yield f"launch {index}: {a.kernel} here, {b.kernel} there"
            return
        if any(distance(a.read[name], b.read[name]) > apart for name in a.read.keys() & b.read.keys()):
            continue
        # What only one of them changed is in the other what it was.
        one_after, other_after = ({**each.read, **each.wrote} for each in (a, b))
        names = (a.wrote.keys() | b.wrote.keys()) & one_after.keys() & other_after.keys()
        off = {name: distance(one_after[name], other_after[name]) for name in sorted(names)}
        if words := ", ".join(f"{name} by {value:.3g} of its norm" for name, value in off.items() if not value <= apart):
            yield f"launch {index}, {a} beside {'the same' if str(a) == str(b) else b}: {words}"
    if len(one) != len(other):
        yield f"{len(one)} launches here, {len(other)} there"


def distance(one: Tensor, other: Tensor) -> float:
    """How far two tensors lie apart, in parts of the second's norm; what no longer has the same shape tells nothing.

    Numbers beside what is none lie infinitely far apart, and what is none alike nowhere.
    """
    if one.shape != other.shape:
        return 0.0
    off = (one.double() - other.double()).masked_fill(_alike(one, other), 0.0)
    if not bool(off.isfinite().all()):
        return math.inf
    whole = float(torch.where(other.isfinite(), other, 0).double().norm())
    return float(off.norm()) / (whole or 1.0)
