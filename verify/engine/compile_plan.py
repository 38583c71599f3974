"""Plans: the examples that a check of compiled kernels will run, drawn from few compile keys, on a GPU compiled ahead by others.

A case with a new compile key takes 6 s or more, a case with a compiled key 20 ms. So the palette has few keys, drawn from the
check's seed. Other processes compile what a case of each law and key launches before the checking worker reaches it. Their compiled
kernels are in Triton's cache, where the worker finds them. Their answers are ignored.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

from properties.books import book_of
from properties.domain import Domain
from properties.far_views import is_far
from properties.history_laws import order_of
from properties.laws import Law
from properties.palette import draw_palette, kernels_of, key_of
from properties.path_domain import PathDomain, with_forms
from properties.strategies import Example
from verify.engine.drawing import Enough, of_law
from verify.execution.run import Run
from verify.findings.known import NO_DEFECTS, KnownDefects
from verify.gpu.compiled_keys import Notes
from verify.process.messages import Compile, LeftOut, Question
from verify.process.worker import Worker, WorkerLost

SIZE = 8
REACH = 4  # lengths up to 512, about a thousand tokens in a case
FORWARD = ("recall",)
LONG = ("oracle", "history")  # the first has four times the cases, and a case of the other makes up to six calls
COMPILE_S = 300.0  # how long the first case of a key may take


@dataclasses.dataclass
class Planned:
    """A law's examples, in order, and for each compile key and variant the future of its compilation."""

    examples: list[Example]
    compiled: dict[Any, concurrent.futures.Future[None]]

    def wait(self, example: Example) -> None:
        """Wait until the kernels of the example are compiled, if a process compiles them."""
        if self.compiled and (under_way := self.compiled.get(_key(example))) is not None:
            _await(under_way)


class Compilers:
    """Processes that compile ahead: each runs the lines that it is given, and its answers are ignored."""

    def __init__(self, workers: list[Worker], first: Question | None, notes: Notes | None = None) -> None:
        """Send `first` to all workers at once, so that their imports are done when there is something to compile.

        If `notes` of an earlier check name compiled keys, `first` is sent only when there is something to compile, because starting
        processes slow the checking worker down.
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

    def prepare(self, run: Run, key: Any, left_out: LeftOut = ()) -> concurrent.futures.Future[None] | None:
        """A future that ends when the kernels of a run, whose compile key is `key`, are compiled.

        `left_out` are the configurations that its draw may not take. None if the key was compiled before, if there are no compiling
        processes, or if they were closed.
        """
        words = (run.law, run.products, run.tune, key, *left_out)
        if not self._workers or self.notes.has(*words):
            return None
        with contextlib.suppress(RuntimeError):  # it was closed
            self._start()
            return self._pool.submit(self._compile, Compile(str(run), left_out), words)
        return None

    def close(self) -> None:
        """End the processes. Threads that wait for a compilation go on."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _compile(self, question: Compile, words: tuple[Any, ...]) -> None:
        if self._ask(question):
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
            pass  # the checking worker will run into the same failure and report it
        finally:
            with self._lock:
                self._idle.append(worker)
        return False


class Plan:
    """The examples of a check's laws, drawn law by law in a separate thread while the first examples already run."""

    def __init__(
        self,
        domain: Any,
        laws: Iterable[str],
        seed: int,
        examples_of: Callable[[str], int],
        run_of: Callable[[str, Example], Run],
        compilers: Compilers,
        *,
        adapter: str = "",
        device: str = "cuda",
        shapes: bool = False,
        defects: KnownDefects = NO_DEFECTS,
    ) -> None:
        """With `shapes`, kernels are compiled for every new shape, so that examples have few lengths too.

        The lines of `defects` are compiled first, since laws begin with them.
        """
        self.domain, laws = domain if device == "cpu" else on_gpu(domain, seed), list(laws)
        self._gpu = device != "cpu"
        palette = draw_palette(self.domain, seed, SIZE, laws) if has_keys(domain) else None
        self.palette = dataclasses.replace(palette, shapes=shapes) if palette is not None else None
        self._seed, self._examples_of, self._run_of = seed, examples_of, run_of
        self._compilers, self._defects = compilers, defects
        lines = [defect.run for law in laws for defect in defects.shown_by(adapter, law, device)]
        self._known = {run: under_way for run in lines if (under_way := self._prepare(run)) is not None}
        self._thread, self._closed = concurrent.futures.ThreadPoolExecutor(1), threading.Event()
        self._planned = {law: self._thread.submit(self._plan, law) for law in laws}

    def of(self, law: str) -> Planned:
        """The examples of a law. Waits until they are drawn; CancelledError if the plan is closed before."""
        return self._planned[law].result()

    def close(self) -> None:
        """Stop drawing."""
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
            of_law(law, self.domain, self._seed, self._examples_of(name), look, self.strategy)
        except Enough:
            raise concurrent.futures.CancelledError from None
        if self.palette is None:
            return planned
        # Sorted by compile key, the cheapest to compile first: its cases run while other keys are compiled. Cases whose tolerances
        # can be computed in one call are neighbours.
        planned.examples.sort(key=lambda entry: (_cost(entry.case), str(key_of(entry.case)), getattr(entry.case, "scale", "")))
        first = dict[Any, Example]()
        for example in planned.examples:
            # Tensors that are far apart take gigabytes, which the checking worker needs.
            if not is_far(example.variant) and _fuller(example, first.get(_key(example))):
                first[_key(example)] = example
        for key, example in first.items():
            under_way = self._prepare(self._run_of(name, example))
            planned.compiled |= {} if under_way is None else {key: under_way}
        return planned

    def _prepare(self, run: Run) -> concurrent.futures.Future[None] | None:
        return self._compilers.prepare(run, _key(run.example), self._defects.left_out(run))

    def await_known(self, run: Run) -> None:
        """Wait until the kernels of a known defect's line are compiled, if a process compiles them."""
        if run in self._known:
            _await(self._known[run])

    def strategy(self, law: Law, domain: Any) -> Any:
        """The strategy for examples of a law and a domain. On a GPU their compile keys are those of the palette."""
        law = law.on_gpu() if self._gpu else law
        return law.draw(domain) if self.palette is None else self.palette.examples(law, domain)


def has_keys(thing: Any) -> bool:
    """Whether the cases of this case's or domain's book have compile keys."""
    return hasattr(book_of(thing).case, "KEYS")


def on_gpu(domain: Any, seed: int) -> Any:
    """The domain from which cases for a GPU are drawn: rules get longer sequences, paths get few forms that need compilation."""
    if isinstance(domain, PathDomain):
        return with_forms(domain, seed)
    return dataclasses.replace(domain, reach=REACH) if isinstance(domain, Domain) else domain


def in_order(laws: Iterable[str]) -> list[str]:
    """The laws, with forward-only laws first: they have fewer kernels to compile, so the first results come sooner.

    Laws that take long come next, so that no worker is left with one at the end.
    """
    return sorted(laws, key=lambda law: (law not in FORWARD, law not in LONG))


def _cost(case: Any) -> int:
    """A number that orders compile keys by their compile time, estimated from the widths; float32 counts twice."""
    widths = [getattr(case, name, 1) for name in ("key_dim", "value_dim", "width")]
    return math.prod(widths) * (2 if case.dtype == "fp32" else 1)


def _fuller(example: Example, other: Example | None) -> bool:
    """Whether an example launches kernels that an earlier one with its compile key does not: those of tokens, or of gradients."""
    return other is None or _launches(example) > _launches(other)


def _launches(example: Example) -> tuple[bool, bool]:
    case = example.case
    return any(getattr(case, "lengths", (1,))), getattr(case, "backward", False)


def _await(under_way: concurrent.futures.Future[None]) -> None:
    with contextlib.suppress(concurrent.futures.CancelledError):
        under_way.result()


def _key(example: Example) -> Any:
    return kernels_of(example.case), example.variant, order_of(example)
