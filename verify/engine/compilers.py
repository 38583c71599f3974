"""Processes that compile ahead what the cases of a check will launch, and in what order they do it."""

import collections
import contextlib
import dataclasses
import enum
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from verify.gpu.compiled_keys import Notes
from verify.process.messages import Compile, Question
from verify.process.worker import Worker, WorkerLost

COMPILE_S = 300.0  # how long the first case of a key may take


class Need(enum.IntEnum):
    """Who needs what a process compiles."""

    LATER = 0
    BY_LAW = 1  # a law whose cases run
    BY_WORKER = 2  # a worker that waits for it


@dataclasses.dataclass(eq=False)
class Compilation:
    """What a process compiles: the kernels of a run. Runs of one `family` share most of their kernels.

    If it is `shared`, several processes may compile one run: each passes over the kernels that another one compiles.
    """

    question: Compile
    family: Hashable
    words: tuple[Any, ...]
    shared: bool = False
    need: Need = Need.LATER
    helpers: int = 0
    _done: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        """Whether the kernels are compiled or cannot be."""
        return self._done.is_set()

    def wait(self, need: Need = Need.BY_WORKER) -> None:
        """Let it come as early as who needs it says, and wait until it is done."""
        self.need = max(self.need, need)
        self._done.wait()

    def end(self) -> None:
        """Let nobody wait any longer."""
        self._done.set()


class Pending(Protocol):
    """What a worker can wait for: a `Compilation`, or those of all ranks."""

    need: Need

    @property
    def done(self) -> bool: ...
    def wait(self, need: Need = Need.BY_WORKER) -> None: ...


class Compiler(Protocol):
    """What a plan asks to compile: `Compilers`, or those of all ranks."""

    def prepare(self, question: Compile, family: Hashable, *words: Any, shared: bool = False) -> Pending | None: ...
    def hurry(self, pending: Pending) -> None: ...
    def close(self) -> None: ...
    def versions(self, words: str) -> None: ...


class Compilers:
    """Processes that compile ahead: each runs the lines that it is given, and its answers are ignored.

    What a worker waits for comes first, then what the laws need that have begun. Among these, a family comes first that few other
    processes compile, because processes of one family wait for each other's kernels at the end. A process that finds nothing to
    begin shares what others compile: the last runs have many kernels of their own, and workers wait for them.
    """

    def __init__(self, workers: Sequence[Worker], first: Question | None, notes: Notes | None = None) -> None:
        """Send `first` to all workers at once, so that their imports are done when there is something to compile.

        If `notes` of an earlier check name compiled keys, `first` is sent only when there is something to compile, because starting
        processes slow the checking worker down.
        """
        self._workers, self._idle, self._lock = workers, list(workers), threading.Lock()
        self._closed, self._first, self.notes = threading.Event(), first, notes or Notes()
        self._pending: list[Compilation] = []
        self._begun: list[Compilation] = []
        self._under_way = collections.Counter[Hashable]()
        self._pool = ThreadPoolExecutor(max(1, len(workers)))
        if workers and not self.notes.any:
            self._start()

    def _start(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            for _ in self._workers:
                self._pool.submit(self._ask, first)

    def versions(self, words: str) -> None:
        """Say what else the kernels depend on."""
        self.notes.versions = words

    def prepare(self, question: Compile, family: Hashable, *words: Any, shared: bool = False) -> Compilation | None:
        """Have the kernels of a run compiled. `words` say what they depend on; for `shared` see `Compilation`.

        None if they were compiled before, if there are no compiling processes, or if they were closed.
        """
        if not self._workers or self.notes.has(*words):
            return None
        compilation = Compilation(question, family, words, shared)
        with self._lock:
            self._pending.append(compilation)
        try:
            self._start()
            self._pool.submit(self._compile_next)
        except RuntimeError:  # it was closed
            return None
        return compilation

    def hurry(self, pending: Pending) -> None:
        """Let every process compile a part of it at once, and wait until it is done."""
        if isinstance(pending, Compilation) and pending.shared:
            with contextlib.suppress(RuntimeError):  # it was closed
                for _ in self._workers[1:]:
                    self._pool.submit(self._help, pending)
        pending.wait()

    def close(self) -> None:
        """End the processes. Threads that wait for a compilation go on."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for compilation in self._pending:
                compilation.end()
        for worker in self._workers:
            worker.close()

    def _compile_next(self) -> None:
        with self._lock:
            compilation = min(self._pending, key=lambda one: (-one.need, self._under_way[one.family]))
            self._pending.remove(compilation)
            self._begun.append(compilation)
            self._under_way[compilation.family] += 1
        try:
            if self._ask(compilation.question):
                self.notes.add(*compilation.words)
        finally:
            with self._lock:
                self._begun.remove(compilation)
                self._under_way[compilation.family] -= 1
            compilation.end()
        self._share()

    def _help(self, compilation: Compilation) -> None:
        if not compilation.done:
            compilation.helpers += 1
            self._ask(compilation.question)

    def _share(self) -> None:
        """While nothing waits to be begun, compile what other processes have begun: first what fewest processes compile."""
        joined = set[Compilation]()
        while True:
            with self._lock:
                others = [one for one in self._begun if one.shared and one not in joined]
                if self._pending or not others:
                    return
                compilation = min(others, key=lambda one: (one.helpers, -one.need))
                compilation.helpers += 1
            joined.add(compilation)
            self._ask(compilation.question)

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


class _Together:
    """The compilations of several ranks."""

    def __init__(self, several: Sequence[Compilation]) -> None:
        self._several = several

    @property
    def need(self) -> Need:
        return max(one.need for one in self._several)

    @need.setter
    def need(self, need: Need) -> None:
        for one in self._several:
            one.need = need

    @property
    def done(self) -> bool:
        return all(one.done for one in self._several)

    def wait(self, need: Need = Need.BY_WORKER) -> None:
        self.need = max(self.need, need)
        for one in self._several:
            one.wait(need)


class OfRanks:
    """Processes that compile ahead for ranks: the n-th of `ranks` has those that stand in for rank n.

    A rank may launch other kernels than its neighbours: the first one gets no state, and the last one passes none on.
    """

    def __init__(self, ranks: Sequence[Compilers]) -> None:
        self._ranks = ranks

    def prepare(self, question: Compile, family: Hashable, *words: Any, shared: bool = False) -> _Together | None:
        """As `Compilers.prepare`, for every rank."""
        prepared = [one.prepare(question, family, rank, *words, shared=shared) for rank, one in enumerate(self._ranks)]
        compilations = [one for one in prepared if one is not None]
        return _Together(compilations) if compilations else None

    def hurry(self, pending: Pending) -> None:
        """Wait until it is done. The processes of each rank go on as they do."""
        pending.wait()

    def close(self) -> None:
        """End the processes."""
        for one in self._ranks:
            one.close()

    def versions(self, words: str) -> None:
        """As `Compilers.versions`."""
        for one in self._ranks:
            one.versions(words)
