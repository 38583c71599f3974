"""Plans: what a check on a GPU will run, drawn from a palette of compile keys, and compiled ahead by processes beside it.

A new compile key takes 6 s and more, a case of one that is there 20 ms. So the keys are few, drawn from the check's seed, and other
processes run the first case of each law and key before the worker that checks comes to it; what they compile lies in Triton's
cache, where the worker finds it. What they answer is not looked at.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

from oracles.counter import mix_words
from properties.books import book_of
from properties.domain import Domain
from properties.laws import Law
from properties.palette import draw_palette, key_of
from properties.path_domain import PathDomain, with_forms
from properties.strategies import Example
from verify.engine.drawing import Enough
from verify.execution.run import Run
from verify.gpu.compiled_keys import Notes
from verify.process.messages import Compile, Question
from verify.process.worker import Worker, WorkerLost

SIZE = 8
REACH = 4  # lengths up to 512, about a thousand tokens in a case
FORWARD = ("recall",)
COMPILE_S = 300.0  # how long the first case of a key may take
Draw = Callable[[Any, int, int, Callable[[Any], None]], None]


@dataclasses.dataclass
class Planned:
    """A law's examples, in order, and for each key and variant the compilation that is under way."""

    examples: list[Example]
    compiled: dict[Any, concurrent.futures.Future[None]]

    def wait(self, example: Example) -> None:
        """Until the kernels of the example are compiled, if somebody does."""
        if self.compiled and (under_way := self.compiled.get(_key(example))) is not None:
            with contextlib.suppress(concurrent.futures.CancelledError):
                under_way.result()


class Compilers:
    """Processes that compile ahead: each runs what it is given and nobody looks at what it answers."""

    def __init__(self, workers: list[Worker], first: Question | None, notes: Notes | None = None) -> None:
        """`first` is asked of all at once, so that they have imported what they need when there is something to compile.

        With `notes` of an earlier check, not before something is: processes that only start keep the worker waiting.
        """
        self._workers, self._idle, self._lock = workers, list(workers), threading.Lock()
        self._closed, self._first, self.notes = threading.Event(), first, notes or Notes()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, len(workers)))
        if workers and not self.notes.any:
            self._start()

    def _start(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            for _ in self._workers:
                self._pool.submit(self._ask, first)

    def prepare(self, run: Run, key: Any) -> concurrent.futures.Future[None] | None:
        """What ends when the kernels of a run, which go by `key`, are compiled; None if they were before, or nobody compiles."""
        words = (run.law, run.products, run.tune, key)
        if not self._workers or self.notes.has(*words):
            return None
        with contextlib.suppress(RuntimeError):  # it was closed
            self._start()
            return self._pool.submit(self._compile, str(run), words)
        return None

    def close(self) -> None:
        """End them; whoever waits goes on."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _compile(self, line: str, words: tuple[Any, ...]) -> None:
        if self._ask(Compile(line)):
            self.notes.add(*words)

    def _ask(self, question: Question) -> bool:
        """Whether there was an answer."""
        with self._lock:
            worker = self._idle.pop()
        try:
            if not self._closed.is_set():
                worker.ask(question, COMPILE_S)
                return True
        except WorkerLost:
            pass  # the worker that checks will see it too
        finally:
            with self._lock:
                self._idle.append(worker)
        return False


class Plan:
    """The examples of a check's laws, drawn in the order of the laws in a thread of its own, while the first are being run."""

    def __init__(
        self,
        domain: Any,
        laws: Iterable[str],
        seed: int,
        examples_of: Callable[[str], int],
        draw: Draw,
        run_of: Callable[[str, Example], Run],
        compilers: Compilers,
    ) -> None:
        self.domain, laws = on_gpu(domain, seed), list(laws)
        self.palette = draw_palette(self.domain, seed, SIZE, laws) if has_keys(domain) else None
        self._seed, self._examples_of, self._draw, self._run_of = seed, examples_of, draw, run_of
        self._compilers = compilers
        self._thread, self._closed = concurrent.futures.ThreadPoolExecutor(1), threading.Event()
        self._planned = {law: self._thread.submit(self._plan, law) for law in laws}

    def of(self, law: str) -> Planned:
        """The examples of a law: waits until they are drawn. CancelledError if it is closed before."""
        return self._planned[law].result()

    def close(self) -> None:
        """Draw no more."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _plan(self, name: str) -> Planned:
        law = book_of(self.domain).laws[name]
        planned = Planned([], {})
        if law.needs(self.domain) is not None:
            return planned

        def look(example: Example) -> None:
            if self._closed.is_set():
                raise Enough
            planned.examples.append(example)

        try:
            self._draw(self._strategy(law), mix_words(self._seed, name), self._examples_of(name), look)
        except Enough:
            raise concurrent.futures.CancelledError from None
        if self.palette is None:
            return planned
        # Key after key, the cheapest to compile first: it is being run while others are compiled. Those that share bounds stand
        # together.
        planned.examples.sort(key=lambda each: (_cost(each.case), str(key_of(each.case)), getattr(each.case, "scale", "")))
        for example in planned.examples:
            if _key(example) not in planned.compiled:
                under_way = self._compilers.prepare(self._run_of(name, example), _key(example))
                planned.compiled |= {} if under_way is None else {_key(example): under_way}
        return planned

    def _strategy(self, law: Law) -> Any:
        return law.draw(self.domain) if self.palette is None else self.palette.examples(law, self.domain)


def has_keys(thing: Any) -> bool:
    """Whether the cases of a case's or a domain's book say what a compiled kernel depends on."""
    return hasattr(book_of(thing).case, "KEYS")


def on_gpu(domain: Any, seed: int) -> Any:
    """The domain as a GPU is asked about it: longer sequences of a kernel; of a path, few forms that kernels are compiled for."""
    if isinstance(domain, PathDomain):
        return with_forms(domain, seed)
    return dataclasses.replace(domain, reach=REACH) if isinstance(domain, Domain) else domain


def in_order(laws: Iterable[str]) -> list[str]:
    """The laws, those first that have few kernels to compile: forward only, so that something is known soon."""
    return sorted(laws, key=lambda law: law not in FORWARD)


def _cost(case: Any) -> int:
    """How long kernels of a case's key take to compile, as their widths go: which comes before which."""
    widths = [getattr(case, name, 1) for name in ("key_dim", "value_dim", "width")]
    return math.prod(widths) * (2 if case.dtype == "fp32" else 1)


def _key(example: Example) -> Any:
    return key_of(example.case), example.variant
