"""The check of one adapter: its laws, distributed over workers."""

import concurrent.futures
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from properties.books import book_of
from properties.traces.domain import TraceDomain
from verify.adapters.registry import BUILT_IN
from verify.engine.asking import Described, ask, describe, interpreted, started, with_sizes
from verify.engine.compile_plan import Plan, in_order
from verify.engine.compilers import COMPILE_S, Compiler, Compilers, OfRanks
from verify.engine.law_check import LawCheck
from verify.engine.outside import ask_outside, names_of
from verify.engine.power import by_power
from verify.engine.state import CheckState, Settings
from verify.engine.under_tags import add_tags
from verify.engine.worker_pool import WorkerPool
from verify.execution.line import Run
from verify.findings import known
from verify.findings.known import Known, KnownDefects
from verify.findings.law_report import LawReport, reach_of
from verify.findings.outside import Answer
from verify.findings.regressions import Examples
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.gpu.compiled_keys import Notes
from verify.process.messages import Describe
from verify.process.outcome import Verdict
from verify.process.reach import Reach
from verify.process.worker import Worker, WorkerLost
from verify.ranks.group import Answering, stand_in

WORKER_BYTES = 2**34  # of a GPU's memory for each worker; large cases take turns (verify/gpu/turns.py)


class Check:
    """A check of some laws of one adapter.

    - `workers` is the number of workers to start, or a sequence of running workers, which the check does not end.
    - `defects` are the known defects; None means those on file here, beside the adapter's file and in the files of the settings.
    - `examples` are lines that broke a law in earlier checks. They are run first, and new failures are added to them.
    - `on_case(law, done, of)` is called after each case and `on_report(report)` after each law, from any thread.

    Reports of laws that were stopped, or ran out of time, before they were decided are in `unfinished`.
    """

    def __init__(
        self,
        settings: Settings,
        workers: int | Sequence[Answering] = 1,
        store: Store | None = None,
        *,
        defects: Iterable[Known] | None = None,
        examples: Examples | None = None,
        on_case: Callable[[str, int, int], None] = lambda law, done, of: None,
        on_report: Callable[[LawReport], None] = lambda report: None,
    ) -> None:
        self.settings, self.store, self.examples = settings, store or Store(), examples
        self.on_case, self.on_report = on_case, on_report
        self.laws = None if settings.laws is None else list(settings.laws)
        self.reports: list[LawReport] = []
        self.unfinished: list[LawReport] = []
        self.cases: list[Any] = []
        self.described: Described | None = None
        self._warning: str | None = None
        defects = known.of(settings.adapter, settings.known, settings.denied) if defects is None else defects
        self.defects = defects if isinstance(defects, KnownDefects) else KnownDefects(defects)
        self._compilers = _compilers(settings)
        self._own = isinstance(workers, int)
        self.workers: list[Answering] = []
        if isinstance(workers, int):
            workers = started(settings.device, workers, settings.deadline_s, sequential=settings.sequential)
        self.workers += workers
        self._plan: Plan | None = None
        self._waiting: list[LawCheck] = []  # laws in whose first case the call failed, while no case of the check gave an answer
        self._stopped = threading.Event()
        self._pool = WorkerPool(self.workers, self._stopped)
        self._outside: dict[str, Answer | None] = {}  # what was asked beside the laws
        self._lock = threading.Lock()

    def __enter__(self) -> "Check":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        if self._own:
            self.stop()
        self.store.close()

    def stop(self) -> None:
        """End every worker and start nothing new. Safe to call from any thread."""
        self._close()
        for worker in self.workers:
            worker.close()

    def _close(self) -> None:
        self._stopped.set()
        self._compilers.close()
        if self._plan is not None:
            self._plan.close()

    @property
    def asked(self) -> list[str]:
        """The names of the laws that the check is about."""
        domain = self.describe().domain
        return self.laws if self.laws is not None else book_of(domain).about(domain.operation)

    def describe(self) -> Described:
        """The adapter's declarations. AdapterError if the adapter cannot be loaded."""
        if self.described is None:
            self.described = describe(self.settings.adapter, self.workers[0])
            self._compilers.versions(f"{self.described.versions}, {self.described.device}")
            self.defects = self.defects.on(self.described.device)
        return self.described

    def warning(self) -> str:
        """A warning if an untested Triton interprets the adapter's kernels. NoInterpreter if this Triton cannot."""
        if self._warning is None:
            self._warning = interpreted(self.describe(), self.settings.device, self.settings.deadline_s)
        return self._warning

    def share_gpus(self, domain: object) -> None:
        """Start more workers on the same GPUs, because the CPU limits how many cases run in a second.

        Do nothing on a CPU, or if the caller of the check passed running workers. Kernels and their reference need memory, so small
        GPUs are not shared; a serving engine's traces are short.
        """
        settings, count = self.settings, len(self.workers)
        if not self._own or settings.device != "cuda":
            return
        room = count * max(1, self.describe().memory // WORKER_BYTES)
        least = settings.engine_workers if isinstance(domain, TraceDomain) else min(settings.gpu_workers, room)
        extra = [Worker(settings.deadline_s, environment=devices.environment("cuda", index)) for index in range(count, least)]
        for worker in extra:  # each takes seconds to start, in which nothing waits for it
            threading.Thread(target=self._begin, args=(worker,), daemon=True).start()
        self.workers += extra
        self._pool.add(extra)

    def _begin(self, worker: Worker) -> None:
        with contextlib.suppress(WorkerLost):  # its first case tells
            worker.ask(Describe(self.settings.adapter))

    def _prepared(self) -> CheckState:
        """What the laws share: the sizes of the cases, and a plan if kernels are compiled. Puts the laws in order."""
        settings = self.settings
        self.described = described = with_sizes(self.describe(), settings.device, large=settings.profile.large)
        domain = described.domain
        if self.laws is None:
            self.laws = book_of(domain).about(domain.operation)
        state = CheckState(
            settings,
            described,
            self.store,
            self.defects,
            self.examples,
            self._stopped,
            self.on_case,
            cases=self.cases,
        )
        if settings.until < math.inf:
            self.laws = by_power(book_of(domain), self.laws)
        if settings.device != "cpu" or described.compiles:
            self.laws = in_order(self.laws)
            state.plan = self._plan = self._planned(state)
        return state

    def drawn(self) -> Iterator[tuple[str, list[Run], int]]:
        """For each law its name, the runs that no outcome decides, and how many further ones are climbed for. No case is run."""
        state = self._prepared()
        laws_of = book_of(state.described.domain).laws
        for law in self.laws or ():
            runs = LawCheck(state, law, self.workers[0]).lines()
            drawn = self.settings.drawn(laws_of[law]) if runs else 0
            yield law, runs, self.settings.profile.examples_of(laws_of[law]) - drawn if runs else 0

    def run(self, *, outside: bool = False) -> list[LawReport]:
        """Run the check: one report for each law, in the order in which the laws were decided.

        With `outside`, what `ask_outside` is about is asked while laws wait for kernels, if kernels are compiled.
        """
        self.warning()
        settings, state = self.settings, self._prepared()
        self.share_gpus(state.described.domain)
        assert self.laws is not None
        # Where kernels are compiled, all laws begin: one that waits for a kernel gives its worker to another. What is asked outside
        # the domain, which needs kernels of its own, gets a worker when no law wants one.
        beside = self.outside if outside and self._plan is not None else []
        at_once = len(self.workers) if self._plan is None else max(1, len(self.laws) + len(beside))
        pool = concurrent.futures.ThreadPoolExecutor(at_once)
        asked = [law for law in self.laws if law not in settings.skip]
        futures = [pool.submit(self._one, state, law, place) for place, law in enumerate(asked)]
        for place, what in enumerate(beside, len(asked)):
            pool.submit(self._ask_beside, what, place)
        told: set[concurrent.futures.Future[LawReport | None]] = set()

        def tell(future: concurrent.futures.Future[LawReport | None]) -> LawReport | None:
            told.add(future)
            if (report := future.result()) is not None:
                self._report(report)
            return report

        try:
            for future in concurrent.futures.as_completed(futures):
                report = tell(future)
                if settings.stop_at_first and report is not None and report.verdict is Verdict.BROKEN:
                    break
        finally:
            if not all(future.done() for future in futures):
                self.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in futures:  # laws that were decided, or broken but not shrunk yet, when the check was stopped
                if future not in told and not future.cancelled() and future.exception() is None:
                    tell(future)
            self._tell_waiting()
        return self.reports

    @property
    def reach(self) -> Reach:
        """What the decided cases looked at, those of unfinished laws too."""
        return reach_of((*self.reports, *self.unfinished))

    @property
    def outside(self) -> list[str]:
        """What may be asked about the domain here, and not in another shard."""
        return [*filter(self.settings.shard.owns, names_of(self.describe().domain))]

    def ask_outside(self, what: str) -> Answer | None:
        """What the implementation does with something that its domain leaves out; None if it is not asked.

        For after `run`, which may have asked already: the first worker is asked.
        """
        return self._outside[what] if what in self._outside else self._asked_outside(what, self.workers[0])

    def _ask_beside(self, what: str, place: int) -> None:
        """Keep the answer for `ask_outside`, which asks again if there is none."""
        if (worker := self._pool.take(place)) is None:
            return
        try:
            if time.monotonic() < self.settings.until:
                answer = self._asked_outside(what, worker)
                if not self._stopped.is_set():
                    self._outside[what] = answer
        finally:
            self._pool.give(worker)

    def _asked_outside(self, what: str, worker: Answering) -> Answer | None:
        settings, described = self.settings, self.describe()
        state = CheckState(settings, described, self.store, self.defects, None, self._stopped, self.on_case)
        few = settings.device != "cpu" or described.compiles
        ask_one = functools.partial(ask, worker=worker, store=self.store, defects=self.defects.deny_list)
        return ask_outside(what, described.domain, settings.seed, state.run_of, ask_one, of_one_key=few)

    def _report(self, report: LawReport) -> None:
        self.reports.append(report)
        self.on_report(report)

    def _tell_waiting(self) -> None:
        """Explain and report the laws that wait. If every law failed at once in the same way, the first of them speaks for all."""
        waiting = self._waiting
        ways = {law.report.findings[0].way for law in waiting}
        decided = [report for report in self.reports if report.verdict is not Verdict.UNSUPPORTED]
        if len(waiting) > 1 and len(ways) == 1 and not decided and not self.unfinished:
            first, *others = waiting
            first.report.laws_at_once = [law.report.law for law in waiting]
            for law in others:
                law.report.same_as = first.report.law
        for law in waiting:
            self._report(law.report if law.report.same_as else _decided(law, law.explain))

    def _planned(self, state: CheckState) -> Plan:
        """The plan of a check whose kernels are compiled: its examples, and on a GPU their compilation while others run."""
        settings, described = state.settings, state.described
        domain = described.domain
        laws_of = book_of(domain).laws
        laws = [law for law in self.laws or () if law in laws_of]  # skipped laws too: the palette's keys depend on all

        def examples_of(law: str) -> int:
            return 0 if law in settings.skip else settings.drawn(laws_of[law])

        return Plan(
            domain,
            laws,
            settings.seed,
            examples_of,
            state.run_of,
            self._compilers,
            adapter=settings.adapter,
            device=settings.device,
            shapes=described.compiles,
            defects=self.defects,
            shard=settings.shard,
        )

    def _report_of(self, law: LawCheck) -> LawReport:
        """The report of a law, with what the law `tags` says where a trace broke the law `session`."""
        report = law.run()
        if not law.waits:
            add_tags(report, self.describe().domain, lambda run: ask(run, law.worker, self.store, defects=self.defects.deny_list))
        return report

    def _one(self, state: CheckState, law: str, place: int) -> LawReport | None:
        if (worker := self._pool.take(place)) is None:
            return None
        law_check = LawCheck(state, law, worker, self._pool if state.plan is not None else None, place)
        try:
            if state.closed:
                return None
            report = _decided(law_check, lambda: self._report_of(law_check))
            if law_check.waits:
                with self._lock:
                    self._waiting.append(law_check)
                return None
            if report.cut_short and not report.counts:
                return None  # it began, and its turn never came
            if report.cut_short or (self._stopped.is_set() and report.verdict is not Verdict.BROKEN):
                self.unfinished.append(report)
                return None
            return report
        except (WorkerLost, concurrent.futures.CancelledError):
            if self._stopped.is_set():
                return None
            raise
        finally:
            if law_check.held:
                self._pool.give(law_check.worker)


def _decided(law: LawCheck, act: Callable[[], LawReport]) -> LawReport:
    """What `act` returns. If gdn-verify itself raises in it, the law's report says so, and the other laws go on."""
    try:
        return act()
    except (WorkerLost, concurrent.futures.CancelledError):
        raise
    except Exception as error:
        return law.failed(error)


def _compilers(settings: Settings) -> Compiler:
    """The processes that compile kernels of drawn examples before these are run. Without a GPU there are none."""
    spec, device = settings.adapter, settings.device

    def some(count: int, **words: str) -> Compilers:
        workers = [Worker(COMPILE_S, environment={**devices.environment(device, place), **words}) for place in range(count)]
        return Compilers(workers, Describe(spec), Notes(spec if spec in BUILT_IN else "", settings.tune))

    if not settings.ranks:
        return some(settings.compilers)
    share = settings.compilers // settings.ranks
    return OfRanks([some(share, **stand_in(rank, settings.ranks)) for rank in range(settings.ranks)])
