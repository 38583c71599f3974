"""Calls at the same time: each in a thread of its own, or on a CUDA stream of its own."""

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Sequence

import torch

from properties.laws.law import Results
from verify.gpu import device as devices
from verify.process.stacks import Mark, marked

TIMES = 3  # how often calls run at the same time
HOLD_MS = 50.0  # for which a GPU waits, so that calls on several streams are launched before the first one runs
Turns = Sequence[Sequence[Callable[[], Results]]]  # for each call, the functions that make it


@marked(Mark.IMPLEMENTATION)
def in_threads(turns: Turns) -> list[tuple[int, Results]]:
    """Run the turns of every call in a thread of its own. Returns the number of the call and the results of each turn."""
    start = threading.Barrier(len(turns))

    def run(number: int) -> list[tuple[int, Results]]:
        start.wait()
        return [(number, call()) for call in turns[number]]

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


@functools.cache
def _two_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The two streams of this process. Torch's allocator keeps memory for every stream that ever was."""
    return torch.cuda.Stream(), torch.cuda.Stream()
