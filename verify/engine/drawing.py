"""Drawing: Hypothesis draws examples of a strategy, in the calling thread or ahead of it in another one."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase

AHEAD = 64  # at most so many examples are drawn ahead, because a drawing thread takes time from the threads that run cases


class Enough(BaseException):
    """Ends the drawing of examples. A BaseException, because Hypothesis would take an Exception for a failure and shrink it."""


def seeded(strategy: Any, seed: int, examples: int, look: Callable[[Any], None]) -> None:
    """Pass `examples` different examples of a strategy to `look`, or fewer if the strategy has fewer. The seed decides which."""
    seen: set[Any] = set()
    if examples == 0:
        return

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2 * examples,  # a quarter of Hypothesis' draws are repetitions
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def drive(example: Any) -> None:
        if example not in seen:
            look(example)
            seen.add(example)
        if len(seen) == examples:
            raise Enough  # Hypothesis would go on to max_examples

    try:
        drive()
    except Enough:
        if len(seen) < examples:  # raised by look
            raise


def batches(strategy: Any, seed: int, examples: int, most: int) -> Iterator[list[Any]]:
    """The examples of `seeded`, in lists of at most `most`, while a thread draws up to AHEAD examples in advance.

    A list ends early if no further example is drawn yet. An exception in the drawing thread is raised here.
    """
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
        except BaseException as error:  # raised in the caller, as if the caller had drawn
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
    """A thread that draws for several callers, one after another.

    When Hypothesis first draws in a thread, it goes through all objects of the process, which takes 0.2 s in a large process. A new
    thread for each law would pay that each time, so threads are reused. They are daemons, because a thread whose caller has left
    goes on until its next example.
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
os.register_at_fork(after_in_child=_IDLE.clear)  # a child process has none of its parent's threads


def _in_a_thread(draw: Callable[[], None]) -> None:
    try:
        drawer = _IDLE.pop()
    except IndexError:
        drawer = _Drawer()
    drawer.asked.put(draw)
