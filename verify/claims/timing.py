"""Timing: several calls alternately, with the median of each and the range of the middle 80% of its times."""

import abc
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from verify.gpu import device as devices

Call = Callable[[], object]
FIRST_LEAD_MS, MOST_LEAD_MS = 3.0, 8.0
FLUSH_BYTES = 2**28  # more than any GPU's L2 cache holds, so that a call reads from memory, as in a model


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of some measurements, their first and last decile, and their number."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of `values`. ValueError if there are none."""
        if not values:
            raise ValueError("values must hold at least one measurement, got none")
        deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        return cls(statistics.median(values), deciles[0], deciles[-1], len(values))


def ratios(before: Sequence[float], after: Sequence[float]) -> Spread:
    """The ratios of the times before and after, round by round, so that what slows both down in a round cancels."""
    return Spread.of([one / other for one, other in zip(before, after, strict=True)])


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: rounds for about `budget_s` seconds, but `least` to `most` of them, after `warm` rounds of warm-up."""

    budget_s: float
    least: int
    most: int
    warm: int

    def rounds(self, round_ms: float) -> int:
        """The number of rounds, if each takes `round_ms` milliseconds."""
        return max(self.least, min(self.most, int(1e3 * self.budget_s / max(round_ms, 1e-6))))


class Clock(abc.ABC):
    """Measures calls one after another, in milliseconds. `ahead` is called before each call and is not timed."""

    def __init__(self, ahead: Call = lambda: None) -> None:
        self.ahead = ahead

    @abc.abstractmethod
    def times(self, calls: Sequence[Call]) -> list[float]:
        """The milliseconds of each call."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait until the device has finished its work."""

    def first(self, call: Call) -> float:
        """The seconds of a call until the device has finished, including compilation and autotuning."""
        self.settle()
        start = time.perf_counter()
        call()
        self.settle()
        return time.perf_counter() - start


class HostClock(Clock):
    """The wall-clock time on the CPU, for calls whose work all happens there."""

    def times(self, calls: Sequence[Call]) -> list[float]:
        result = []
        for call in calls:
            self.ahead()
            start = time.perf_counter()
            call()
            result.append(1e3 * (time.perf_counter() - start))
        return result

    def settle(self) -> None:
        return


class DeviceClock(Clock):
    """The time between two events on the GPU's stream. The L2 cache is flushed before each call.

    The GPU sleeps until the CPU has launched all kernels of a call, at most MOST_LEAD_MS. So the kernels are timed and not their
    launches, which in a model run ahead of the GPU.
    """

    def __init__(self, device: torch.device, ahead: Call = lambda: None) -> None:
        super().__init__(ahead)
        self.flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def times(self, calls: Sequence[Call]) -> list[float]:
        result: list[float] = []
        leads_ms: dict[Call, float] = {}
        for call in calls:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flushed.zero_()
            devices.hold(min(leads_ms.get(call, FIRST_LEAD_MS), MOST_LEAD_MS))
            self.ahead()
            start.record()
            began = time.perf_counter()
            call()
            leads_ms[call] = 1.5e3 * (time.perf_counter() - began)  # 1.5 times as long as last time
            end.record()
            self.settle()
            result.append(float(start.elapsed_time(end)))
        return result

    def settle(self) -> None:
        torch.cuda.synchronize()


def clock_of(device: torch.device, ahead: Call = lambda: None) -> Clock:
    """The clock of a device."""
    return DeviceClock(device, ahead) if device.type == "cuda" else HostClock(ahead)


def own_device() -> torch.device:
    """The device of this process: its GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def greatest(values: Sequence[float], device: torch.device) -> list[float]:
    """For each number, its largest value over all ranks, if this process is one of several."""
    every = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(every, op=dist.ReduceOp.MAX)
    result: list[float] = every.tolist()
    return result


def by_turns(calls: Mapping[str, Call], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """The milliseconds of each call in each round. Every other round has the reverse order, so that no call always comes first."""
    order = [name for turn in range(rounds) for name in (calls if turn % 2 == 0 else reversed([*calls]))]
    result: dict[str, list[float]] = {name: [] for name in calls}
    for name, took in zip(order, clock.times([calls[name] for name in order]), strict=True):
        result[name].append(took)
    return result


def measured(
    calls: Mapping[str, Call], clock: Clock, effort: Effort, agree: Callable[[float], float] = lambda ms: ms
) -> dict[str, list[float]]:
    """The milliseconds of each call, timed alternately after a warm-up.

    `agree` turns this rank's time of a round into one number for all ranks, because all ranks must run as many rounds.
    """
    by_turns(calls, effort.warm, clock)
    if effort.least == effort.most:
        return by_turns(calls, effort.most, clock)
    round_ms = 1e3 * clock.first(lambda: by_turns(calls, 2, clock)) / 2  # including the time between calls
    return by_turns(calls, effort.rounds(agree(round_ms)), clock)
