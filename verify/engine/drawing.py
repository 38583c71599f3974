"""Drawing: Hypothesis gives examples of a strategy, in the thread that asks for them or ahead of it in another."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase

AHEAD = 64  # examples that are drawn before they are asked: a thread that draws takes time from those that ask


class Enough(BaseException):
    """There is nothing more to ask. Hypothesis takes an Exception for a failure, and would shrink it."""


def seeded(strategy: Any, seed: int, examples: int, look: Callable[[Any], None]) -> None:
    """Give `look` that many different examples of a strategy (fewer if it has no more), the same ones for the same seed."""
    seen: set[Any] = set()
    if examples == 0:
        return

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2 * examples,  # a quarter of the seeds that Hypothesis draws are repetitions
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def drive(example: Any) -> None:
        if len(seen) < examples and example not in seen:
            seen.add(example)
            look(example)

    drive()


def batches(strategy: Any, seed: int, examples: int, most: int) -> Iterator[list[Any]]:
    """The examples that `seeded` gives, drawn AHEAD in a thread while wanted: lists of those at hand, of at most `most`."""
    drawn: queue.Queue[Any] = queue.Queue(AHEAD)
    failed: list[BaseException] = []
    end, left = object(), threading.Event()

    def put(example: Any) -> None:
        while not left.is_set():
            with contextlib.suppress(queue.Full):
                drawn.put(example, timeout=0.5)
                return
        raise Enough

    def draw() -> None:
        try:
            seeded(strategy, seed, examples, put)
        except BaseException as error:  # the caller's, as if it had drawn
            failed.append(error)
        finally:
            with contextlib.suppress(Enough):
                put(end)

    batch: list[Any] = []
    try:
        _in_a_thread(draw)
        while (example := drawn.get()) is not end:
            batch.append(example)
            if len(batch) == most or drawn.empty():
                yield batch
                batch = []
    finally:
        left.set()
    if batch:
        yield batch
    if failed:
        raise failed[0]


class _Drawer(threading.Thread):
    """A thread that draws for whoever asks, one after another.

    Hypothesis looks through all objects of the process when it first draws in a thread, which takes 0.2 s of a large one: a new
    thread for each law would pay that each time. Daemons, since what is left early goes on drawing until its next example.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self.asked.get()()
            _IDLE.append(self)


_IDLE: list[_Drawer] = []
os.register_at_fork(after_in_child=_IDLE.clear)  # a child has none of its parent's threads


def _in_a_thread(draw: Callable[[], None]) -> None:
    try:
        drawer = _IDLE.pop()
    except IndexError:
        drawer = _Drawer()
    drawer.asked.put(draw)
