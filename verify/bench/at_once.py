"""Calls at the same time: each in a thread of its own, or on a CUDA stream of its own."""

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from properties.laws.law import Results
from verify.gpu import device as devices
from verify.process.stacks import Mark, marked

TIMES = 3  # how often calls run at the same time
HOLD_MS = 50.0  # for which a GPU waits, so that calls on several streams are launched before the first one runs
STALL_S = 0.1  # after which a thread no longer waits for another one, which may wait for a lock
Turns = Sequence[Sequence[Callable[[], Results]]]  # for each call, the functions that make it


@marked(Mark.IMPLEMENTATION)
def in_threads(turns: Turns, device: str) -> list[tuple[int, Results]]:
    """Run the turns of every call in a thread of its own. Returns the number of the call and the results of each turn.

    On a CPU, in all turns but the first, the threads begin each operation together. Without that, most calls here end before
    Python lets another thread run.
    """
    start = threading.Barrier(len(turns))
    steps = [threading.Barrier(len(turns)) for _ in turns[0][1:]]

    def run(number: int) -> list[tuple[int, Results]]:
        start.wait()
        first, *later = turns[number]
        results = [(number, first())]
        for call, step in zip(later, steps, strict=True):
            with Lockstep(step) if device == "cpu" else contextlib.nullcontext():
                results.append((number, call()))
        return results

    with concurrent.futures.ThreadPoolExecutor(len(turns)) as pool:
        return [result for results in pool.map(run, range(len(turns))) for result in results]


@marked(Mark.IMPLEMENTATION)
def on_streams(turns: Turns, device: str) -> list[tuple[int, Results]]:
    """Launch the turns of every call on a CUDA stream of its own, without waiting in between.

    The first turns run on the current stream, one after another: they compile, and make what an adapter keeps. Then the device
    waits until the host has launched the others, or the kernels of a call would end before the next call is launched.
    """
    for first, *_ in turns:
        first()
    devices.settle(device)
    results: list[tuple[int, Results]] = []
    current, streams = torch.cuda.current_stream(), _two_streams()
    devices.hold(HOLD_MS)
    for stream in streams:
        stream.wait_stream(current)
    try:
        for calls in zip(*(later for _, *later in turns), strict=True):
            for number, (call, stream) in enumerate(zip(calls, streams, strict=True)):
                with torch.cuda.stream(stream):
                    results.append((number, call()))
    finally:  # after an error too: what the streams still use must not be given to others
        for stream in streams:
            current.wait_stream(stream)
    return results


class Lockstep(TorchDispatchMode):
    """A context in which a thread begins each operation of torch that is no view when the others begin their next one.

    Once a thread leaves its context, or waits for another one, all go on alone.
    """

    def __init__(self, step: threading.Barrier) -> None:
        super().__init__()
        self.step = step

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.step.abort()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in FailingOperation."""
        return False

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for the others, and run the operation."""
        if not (self.step.broken or getattr(function, "is_view", False)):
            with contextlib.suppress(threading.BrokenBarrierError):
                self.step.wait(STALL_S)
        return function(*args, **(kwargs or {}))


@functools.cache
def _two_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The two streams of this process. Torch's allocator keeps memory for every stream that ever was."""
    return torch.cuda.Stream(), torch.cuda.Stream()
