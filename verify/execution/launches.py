"""Finds the kernel launches of a call that give different numbers when repeated, or with other autotune configurations.

The implementation of a line is called several times on the same inputs, and once with each further tuning word. Around every launch
of a Triton kernel, copies of its tensors are kept.

- A launch that reads the same bits and writes different ones is not deterministic.
- If a launch differs between two configurations by more than rounding explains, it is wrong with one of them.
- If the device is lost after a launch, the launch reads or writes memory that it must not.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from verify.adapters.base import Adapter
from verify.adapters.registry import AdapterError
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import AdapterFault, OutOfMemory, short
from verify.execution.judging import adapter_of, following
from verify.execution.line import Run
from verify.gpu import device as devices
from verify.process.messages import LaunchReport

APART = 0.02  # in parts of a tensor's norm: more than rounding in any dtype changes the output of one kernel
SHOWN = ("num_warps", "num_stages", "BT", "BK", "BV", "BC")


@dataclasses.dataclass
class KernelLaunch:
    """One launch of a kernel with its configuration.

    `read` has the tensors before the launch, `wrote` those that it changed, as they were after it, by the names of its arguments.
    """

    kernel: str
    config: dict[str, Any]
    read: dict[str, Tensor]
    wrote: dict[str, Tensor]

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.config.items())])


class DeviceLost(Exception):
    """The device was lost during a call. The message names the launch."""


class Recorder:
    """Records the launches of Triton kernels inside `recording`: the last one, and, while `on`, what each launch read and wrote.

    Triton's errors for a configuration that does not fit pass through, so that a tuner can skip the configuration. Launches must be
    blocking in this process; otherwise a launch may be blamed for an earlier one.
    """

    def __init__(self, device: str) -> None:
        self.device, self.on, self.count, self.last = device, False, 0, ""
        self.launches: list[KernelLaunch] = []

    def begin(self, *, on: bool) -> None:
        """Begin to record a call, or begin again."""
        self.on, self.count, self.last, self.launches = on, 0, "", []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is launched inside."""
        from triton.runtime.jit import JITFunction

        plain: Callable[..., Any] = JITFunction.run
        recorder = self

        def run(kernel: Any, *values: Any, **named: Any) -> Any:
            return plain(kernel, *values, **named) if named.get("warmup") else recorder._launched(plain, kernel, values, named)

        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = plain

    def _launched(self, plain: Callable[..., Any], kernel: Any, values: Sequence[Any], named: dict[str, Any]) -> Any:
        launch = KernelLaunch(kernel.__name__, {name: named[name] for name in SHOWN if name in named}, {}, {})
        self.last = f"launch {self.count}, {launch}"
        tensors = dict[str, Tensor]()
        if self.on:
            arguments = [*zip(kernel.arg_names, values, strict=False), *named.items()]
            tensors = {name: x for name, x in arguments if isinstance(x, Tensor)}
        before = {name: x.clone() for name, x in tensors.items()}
        try:
            result = plain(kernel, *values, **named)
        except Exception as error:
            if devices.lost(self.device):
                raise DeviceLost(f"{self.last}: {short(error)}") from error
            raise
        self.count += 1
        if self.on:
            changed = {name for name, x in tensors.items() if not _same(x, before[name])}
            launch.read = before
            launch.wrote = {name: tensors[name].clone() for name in changed}
            self.launches.append(launch)
        return result


class _Bench(AdapterBench):
    """A bench that records every call from its first launch, including a second try after memory ran out."""

    recorder: Recorder
    recorded = False

    def call_implementation(self, *arguments: Any, **options: Any) -> Any:
        """Compute outputs and gradients, as the base class does, with a new recording."""
        self.recorder.begin(on=self.recorded)
        return super().call_implementation(*arguments, **options)


def report_of(run: Run, calls: int, beside: Sequence[str]) -> LaunchReport:
    """Call the implementation of a run several times and report the launches that differ.

    The implementation is called `calls` times as the line says, and once with each tuning word in `beside`, with the picks of the
    line. If memory runs out before anything is found, the report has a `reason` and nothing else. AdapterError for a parallel path.
    """
    adapter = adapter_of(run.adapter)
    if not isinstance(adapter, Adapter):
        raise AdapterError(f"adapter {run.adapter} is a parallel path, but launches are compared for kernels on one process")
    recorder, found, first = Recorder(run.device), list[str](), list[KernelLaunch]()
    asked = [("", run, 0.0), *others(run, calls, beside)]
    try:
        with recorder.recording():
            while asked:
                words, other, apart = asked.pop(0)
                try:
                    launches = _called(adapter, other, recorder)
                except AdapterFault as fault:
                    stopped = fault.__cause__
                    what = str(stopped) if isinstance(stopped, DeviceLost) else f"{fault}, after {recorder.last or 'no launch'}"
                    found.append(f"{words}: {what}" if words else what)
                    if not words or devices.lost(run.device):
                        break
                else:
                    found += [f"{words}: {difference}" for difference in parted(first, launches, apart)] if words else []
                    first = first or launches
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        reason = f"out of memory, with the tensors of every launch kept: {error}"
        if not found:
            return LaunchReport(reason=reason)
        found.append(f"{words}: {reason}")
    kernels, lost = {launch.kernel for launch in first}, bool(devices.lost(run.device))
    left = [words for words, _, _ in asked]
    return LaunchReport(len(first), len(kernels), found, left, lost)


def others(run: Run, calls: int, beside: Sequence[str]) -> Iterator[tuple[str, Run, float]]:
    """The calls that a run's first call is compared with: each in words, as a run, and with the distance that is allowed."""
    for _ in range(calls - 1):
        yield "called again", run, 0.0
    for tune in beside:
        picks = "".join(run.tune.partition(",")[1:]) if tune.isdecimal() else ""
        yield f"beside tune={tune}", dataclasses.replace(run, tune=tune + picks), APART


def _called(adapter: Adapter, run: Run, recorder: Recorder) -> list[KernelLaunch]:
    """The launches of one call of a run's implementation, after another call that compiles and tunes."""
    case = run.example.case
    bench = _Bench(adapter, None, case, run.products, run.device)
    bench.recorder = recorder
    inputs, cotangents = bench.call(case)
    with following(run.tune):
        for bench.recorded in (False, True):
            bench.run(inputs, cotangents)
    return recorder.launches


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal, where NaN equals NaN."""
    return bool(_alike(one, other).all())


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def parted(one: list[KernelLaunch], other: list[KernelLaunch], apart: float) -> Iterator[str]:
    """In words, the launches that read the same and wrote tensors more than `apart` (in parts of their norm) from each other."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.kernel != b.kernel:
            yield f"launch {index}: {a.kernel} here, {b.kernel} there"
            return
        if any(distance(a.read[name], b.read[name]) > apart for name in a.read.keys() & b.read.keys()):
            continue
        # A tensor that only one of the two launches changed is, in the other one, as it was before the launch.
        one_after, other_after = ({**launch.read, **launch.wrote} for launch in (a, b))
        names = (a.wrote.keys() | b.wrote.keys()) & one_after.keys() & other_after.keys()
        off = {name: distance(one_after[name], other_after[name]) for name in sorted(names)}
        if words := ", ".join(f"{name} by {value:.3g} of its norm" for name, value in off.items() if not value <= apart):
            yield f"launch {index}, {a} beside {'the same' if str(a) == str(b) else b}: {words}"
    if len(one) != len(other):
        yield f"{len(one)} launches here, {len(other)} there"


def distance(one: Tensor, other: Tensor) -> float:
    """The distance of two tensors in parts of the second one's norm; 0 if their shapes differ, which cannot be compared.

    Where one has a NaN or an infinity and the other does not, the distance is infinite. Where both have the same one, it is 0.
    """
    if one.shape != other.shape:
        return 0.0
    off = (one.double() - other.double()).masked_fill(_alike(one, other), 0.0)
    if not bool(off.isfinite().all()):
        return math.inf
    whole = float(torch.where(other.isfinite(), other, 0).double().norm())
    return float(off.norm()) / (whole or 1.0)
