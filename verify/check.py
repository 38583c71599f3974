"""Checking: Hypothesis draws cases, workers run them, a broken one is kept, shrunk and explained."""

import concurrent.futures
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from oracles.counter import mix_words
from properties.books import book_named, book_of
from properties.laws import Law
from properties.palette import key_of
from properties.paths import PATH_LAWS, PathDomain
from properties.strategies import Example
from verify import device as devices
from verify import early, known
from verify.adapter import BUILT_IN, AdapterError
from verify.climb import climb, climbed
from verify.drawing import batches, seeded
from verify.examples import Examples
from verify.known import NO_DEFECTS, Known, KnownDefects
from verify.notes import Notes
from verify.outcome import FailureKind, Finding, Outcome, Verdict
from verify.plan import COMPILE_S, Compilers, Plan, has_keys, in_order
from verify.ranks import RankGroup, TorchrunGroup
from verify.run import Run
from verify.shrink import Shrunk, shrink
from verify.store import Store
from verify.together import LAW as POOLS
from verify.worker import Worker, WorkerLost

SHRINK_RUNS, SHRINK_S = 120, 60.0
BATCH, TRUTHS = 16, 4  # runs in one question to ranks: where they are short, and where their oracles take a while
POOLED = 64  # runs in one question to a GPU's worker where their bounds are made together; if it is lost, all are asked alone
Asked = Worker | RankGroup | TorchrunGroup  # what runs a case: one process, or ranks that answer as one


@dataclasses.dataclass(frozen=True)
class Profile:
    """How much to check: `examples` a law (four times as many of the oracle's), and whether the default seed is fixed.

    `climbs`: half of the examples of laws that are judged by bounds are those that a climb of error over bound comes to.
    """

    name: str
    examples: int
    fixed_seed: bool = True
    climbs: bool = False

    def examples_of(self, law: str) -> int:
        """How many cases a law is asked about: the oracle law covers the widest space and has most."""
        return self.examples * (4 if law == "oracle" else 1)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("least", 2),
        Profile("few", 5),
        Profile("quick", 32),
        Profile("ci", 200),
        Profile("gpu", 200),
        Profile("soak", 3000, fixed_seed=False, climbs=True),
    )
}
FAULTS = 3  # cases in a row in which gdn-verify fails in the same way: asking about more decides nothing
ENOUGH = 5  # cases that could see, or all that were drawn if fewer: under it a law is unknown


@dataclasses.dataclass
class LawReport:
    """What is known of one law: the verdict, how many cases came to what, and the broken run, shrunk."""

    law: str
    adapter: str
    verdict: Verdict
    kind: str = ""
    says: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    reason: str = ""
    run: str = ""
    first_run: str = ""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    neighbours: list[str] = dataclasses.field(default_factory=list)
    otherwise: list[str] = dataclasses.field(default_factory=list)  # what the adapter might say of itself, and it would hold
    shrunk: bool = True
    known: list[str] = dataclasses.field(default_factory=list)
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    regimes: dict[str, int] = dataclasses.field(default_factory=dict)
    seed: int = 0
    remembered: bool = False  # broken by a run that broke it in an earlier check
    under: str = ""  # what `repeat` needs besides the line to see it
    fault: str = ""  # where gdn-verify itself failed: the exception, file, line and function
    fault_run: str = ""  # the first run in which it did
    versions: str = ""
    one_by_one: dict[str, int] = dataclasses.field(default_factory=dict)  # interpreted launches: "kernel: why", how many
    kernel_s: float = 0.0
    oracle_s: float = 0.0
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = dataclasses.asdict(self)
        data["findings"] = [finding.to_json() for finding in self.findings]
        return data


@dataclasses.dataclass(frozen=True)
class Described:
    """What a worker says of an adapter."""

    spec: str
    domain: Any  # of the book's kind
    algorithm: str
    versions: str
    device: str = ""
    products: str = "ieee"

    def products_of(self, example: Example, device: str) -> str:
        """How the implementation multiplies float32 matrices in a run on a device, which of a path may depend on its choices."""
        if device == "cpu" or not getattr(self.domain, "tf32", ()):
            return "ieee" if device == "cpu" else self.products
        words = example.case.words()
        chosen = {f"{name}={words[name]}" for name, _ in self.domain.choices} | {example.variant}
        return "tf32" if chosen & {*self.domain.tf32} else self.products


def started(device: str, count: int, deadline_s: float) -> list[Worker]:
    """That many workers of a device, one at least; the first is that which began with the command, if it has it."""
    environments = [devices.environment(device, each) for each in range(max(1, count))]
    return [early.take(each, deadline_s) or Worker(deadline_s, environment=each) for each in environments]


def describe(spec: str, worker: Asked) -> Described:
    """The adapter's declarations, asked in a worker. AdapterError if it cannot be had, even if importing it kills the worker."""
    try:
        said = worker.ask({"describe": spec})
    except WorkerLost as lost:
        if lost.how == "failed to start":
            raise AdapterError(f"the ranks failed to start: {lost.detail}") from None
        raise AdapterError(f"adapter {spec}: importing it {lost.how}: {lost.detail}; {_last_line(lost.tail)}") from None
    if "error" in said:
        raise AdapterError(said["error"])
    domain = book_named(said["book"]).domain.from_json(said["domain"])
    if isinstance(domain, PathDomain) and not isinstance(worker, Worker):
        domain = dataclasses.replace(domain, ranks=worker.size, exchange_ranks=worker.size)
    return Described(spec, domain, said["algorithm"], said["versions"], said["device"], said["products"])


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it wrote nothing"


def ask(run: Run, worker: Asked, store: Store, declared: dict[str, Any] | None = None) -> Outcome:
    """The outcome of a run in a worker: a crash or a hang is a finding like any other. The run is on disk while it lasts."""
    store.begin(str(run))
    try:
        answer = worker.ask({"run": str(run), **({"declared": declared} if declared else {})})
        return Outcome(Verdict.UNKNOWN, reason=answer["error"]) if "error" in answer else Outcome.from_json(answer)
    except WorkerLost as lost:
        if lost.how == "closed":
            return Outcome(Verdict.UNKNOWN, reason="the worker was closed")
        if not lost.in_kernel:
            what = "the oracle did not finish" if lost.how == "hung" else f"the ranks {lost.how}"
            return Outcome(Verdict.UNKNOWN, reason=f"{what}: {lost.detail}")
        last = _last_line(lost.tail) if lost.how == "crashed" else ""
        return Outcome(Verdict.BROKEN, [Finding("call", FailureKind(lost.how), f"{lost.how}: {lost.detail}", last)])
    finally:
        store.end()


def ask_all(runs: Sequence[Run], worker: Asked, store: Store, defects: KnownDefects = NO_DEFECTS) -> Iterator[Outcome]:
    """The outcomes of runs, put as one question. What has no outcome then, or may be broken, is asked alone.

    What `defects` explain is not, and nobody looks closer at how much it is over its bound: that takes longer than all else.
    """
    outcomes: list[dict[str, Any]] = []
    excused = [defects.excused(run) for run in runs]
    if len(runs) > 1 or any(excused):
        store.begin("\n".join(map(str, runs)))
        try:
            question = {"runs": [str(run) for run in runs], **({"excused": excused} if any(excused) else {})}
            outcomes = worker.ask(question).get("outcomes", [])
        except WorkerLost:
            outcomes = []  # by which run is seen when they are asked alone
        finally:
            store.end()
    for index, run in enumerate(runs):
        outcome = Outcome.from_json(outcomes[index]) if index < len(outcomes) and "verdict" in outcomes[index] else None
        if outcome is None or (outcome.verdict in (Verdict.BROKEN, Verdict.UNKNOWN) and not defects.explain(run, outcome)):
            outcome = ask(run, worker, store)
        yield outcome


def most_at_once(law: Law, worker: Asked, device: str) -> int:
    """How many runs of a law are put in one question.

    Exchanges take ranks a few milliseconds, as kernels do a GPU. Interpreted kernels and simulated ranks take longer.
    """
    if not isinstance(worker, Worker):
        return BATCH if law.kind == "exact" else TRUTHS
    if device == "cpu" or PATH_LAWS.get(law.name) is law:
        return 1
    return POOLED if law.name == POOLS else BATCH


def of_one_key(examples: Iterable[Example], most: int) -> Iterator[list[Example]]:
    """The examples in their order, in lists of at most `most`, each of one compile key: none waits for another key's kernels.

    Cases of paths have no keys, and all count as one.
    """
    for _, same in itertools.groupby(examples, lambda example: key_of(example.case) if has_keys(example.case) else None):
        while batch := list(itertools.islice(same, most)):
            yield batch


class Check:
    """A check of some laws of one adapter. `on_case(law, done, of)` and `on_report` are told as it goes, from any thread.

    `workers` is how many to start, or workers that are there already, which are left alive. Without `laws`, all that can be asked
    about what the adapter does, less those to `skip`. `examples` are asked first, and told what breaks. After `until`, a time of
    time.monotonic(), no case begins; what was under way then, or when it was stopped, is in `unfinished`.
    """

    def __init__(
        self,
        spec: str,
        laws: Iterable[str] | None = None,
        profile: Profile = PROFILES["quick"],
        seed: int = 0,
        workers: int | Sequence[Asked] = 1,
        store: Store | None = None,
        *,
        stop_at_first: bool = False,
        deadline_s: float = 120.0,
        products: str | None = None,
        device: str = "cpu",
        tune: str = "",
        compilers: int = 0,
        on_case: Callable[[str, int, int], None] = lambda law, done, of: None,
        on_report: Callable[[LawReport], None] = lambda report: None,
        defects: Iterable[Known] | None = None,
        climbs: bool | None = None,
        examples: Examples | None = None,
        skip: Collection[str] = (),
        until: float = math.inf,
        under: str = "",
    ) -> None:
        self.spec, self.profile, self.seed = spec, profile, seed
        self.climbs = profile.climbs if climbs is None else climbs
        self.examples, self.skip, self.until, self.under = examples, skip, until, under
        self.products, self.device, self.tune = products, device, tune
        ahead = [Worker(COMPILE_S, environment=devices.environment(device, each)) for each in range(compilers)]
        self._compilers = Compilers(ahead, {"describe": spec}, Notes(spec if spec in BUILT_IN else "", tune))
        self._plan: Plan | None = None
        self.laws = None if laws is None else list(laws)
        self.store, self.stop_at_first = store or Store(), stop_at_first
        self.on_case, self.on_report = on_case, on_report
        self._own = isinstance(workers, int)
        self.workers: list[Asked] = []
        self.workers += self._started(workers, deadline_s) if isinstance(workers, int) else workers
        self.reports: list[LawReport] = []
        self.unfinished: list[LawReport] = []
        self.cases: list[Any] = []
        self.defects = known.load() if defects is None else KnownDefects(defects)
        self._stopped = threading.Event()
        self._free = list(self.workers)
        self._lock = threading.Lock()
        self.described: Described | None = None

    def __enter__(self) -> "Check":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._compilers.close()
        if self._plan is not None:
            self._plan.close()
        if self._own:
            self.stop()
        self.store.close()

    def stop(self) -> None:
        """End every worker and let nothing new begin; safe from any thread."""
        self._stopped.set()
        self._compilers.close()
        if self._plan is not None:
            self._plan.close()
        for worker in self.workers:
            worker.close()

    def _started(self, workers: int, deadline_s: float) -> list[Worker]:
        return started(self.device, workers, deadline_s)

    def describe(self) -> Described:
        """The adapter's declarations. AdapterError if it cannot be had."""
        if self.described is None:
            self.described = describe(self.spec, self.workers[0])
            self._compilers.notes.versions = f"{self.described.versions}, {self.described.device}"
        return self.described

    def run(self) -> list[LawReport]:
        """A report a law, in the order in which they were decided."""
        domain = self.describe().domain
        if self.laws is None:
            self.laws = book_of(domain).about(domain.operation)
        if self.device != "cpu":
            self.laws = in_order(self.laws)
            self._plan = self._planned(domain)
        pool = concurrent.futures.ThreadPoolExecutor(len(self.workers))
        futures = [pool.submit(self._one, law) for law in self.laws if law not in self.skip]
        told: set[concurrent.futures.Future[LawReport | None]] = set()

        def tell(future: concurrent.futures.Future[LawReport | None]) -> LawReport | None:
            told.add(future)
            if (report := future.result()) is not None:
                self.reports.append(report)
                self.on_report(report)
            return report

        try:
            for future in concurrent.futures.as_completed(futures):
                report = tell(future)
                if self.stop_at_first and report is not None and report.verdict is Verdict.BROKEN:
                    break
        finally:
            if not all(future.done() for future in futures):
                self.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in futures:  # what was decided, or broken and not yet shrunk, when the check was stopped
                if future not in told and not future.cancelled() and future.exception() is None:
                    tell(future)
        return self.reports

    def _planned(self, domain: Any) -> Plan:
        """What is drawn for a GPU, whose kernels are compiled meanwhile."""
        laws_of = book_of(domain).laws
        laws = [law for law in self.laws or () if law in laws_of]  # those to skip too: keys are chosen for all

        def examples_of(law: str) -> int:
            return 0 if law in self.skip else self._drawn(laws_of[law])

        return Plan(domain, laws, self.seed, examples_of, seeded, self._run, self._compilers)

    def _drawn(self, law: Law) -> int:
        """How many of a law's examples are drawn, not climbed for."""
        examples = self.profile.examples_of(law.name)
        return examples - (climbed(examples, law.kind) if self.climbs else 0)

    def _run(self, law: str, example: Example) -> Run:
        return Run(law, self.spec, example, self._products_of(example), self.device, self.tune)

    def _products_of(self, example: Example) -> str:
        return self.products or self.describe().products_of(example, self.device)

    def _one(self, law: str) -> LawReport | None:
        with self._lock:
            worker = self._free.pop()
        try:
            if self._over:
                return None
            report = self.check_law(law, worker)
            if self._over and report.verdict is not Verdict.BROKEN:
                self.unfinished.append(report)
                return None
            return report
        except WorkerLost:
            if self._stopped.is_set():
                return None
            raise
        finally:
            with self._lock:
                self._free.append(worker)

    def check_law(self, name: str, worker: Asked) -> LawReport:
        """The report of one law, cases run by `worker`."""
        described, start = self.describe(), time.monotonic()
        report = LawReport(name, self.spec, Verdict.UNKNOWN, seed=self.seed, versions=described.versions, under=self.under)
        law = book_of(described.domain).laws.get(name)
        if law is None:
            report.verdict, report.reason = Verdict.UNSUPPORTED, "it is about other things than this adapter's operation"
            return report
        report.kind, report.says = law.kind, law.says
        if reason := law.needs(described.domain):
            report.verdict, report.reason = Verdict.UNSUPPORTED, reason
            return report
        self._known(law, worker, report)
        broken = self._remembered(law, worker, report) or self._draw(law, worker, report)
        if broken is not None:
            self._explain(law, worker, report, *broken)
        else:
            report.verdict, report.reason = overall(report.counts, report.reason)
        report.wall_s = time.monotonic() - start
        return report

    def _known(self, law: Law, worker: Asked, report: LawReport) -> None:
        """Run the lines on file for this law, and say whether each still fails."""
        for defect in self.defects.shown_by(self.spec, law.name, self.device):
            still = ask(defect.run, worker, self.store).verdict is Verdict.BROKEN
            gone = (
                "known defect, not on this processor" if defect.somewhere else "known defect NO LONGER FAILS, take it off the file"
            )
            report.known.append(f"{'known defect, still there' if still else gone}: {defect.reason} ({defect.run})")

    def _remembered(self, law: Law, worker: Asked, report: LawReport) -> tuple[Run, Outcome] | None:
        """Ask what broke the law in earlier checks; None if nothing of it does any more. They are not counted as drawn."""
        for run in self.examples.of(self.spec, law.name, self.device) if self.examples is not None else ():
            if self._over:
                return None
            if run.products != self._products_of(run.example):  # it was said otherwise of the implementation then
                continue
            outcome = self._confirmed(run, ask(run, worker, self.store), worker, report)
            if outcome.verdict is Verdict.BROKEN:
                report.remembered = True
                self._count(report, run, outcome)
                self._keep(report, run, outcome, "found")
                return run, outcome
            if outcome.verdict is Verdict.HOLDS and self.examples is not None:
                self.examples.drop(run)
        return None

    @property
    def _over(self) -> bool:
        """Whether no case may begin any more."""
        return self._stopped.is_set() or time.monotonic() >= self.until

    def _draw(self, law: Law, worker: Asked, report: LawReport) -> tuple[Run, Outcome] | None:
        """Draw and run cases until one is broken, and climb from the best of them; None if none is."""
        assert self.described is not None
        examples, drawn, done = self.profile.examples_of(law.name), self._drawn(law), 0
        scores: dict[Example, float] = {}
        broken: list[tuple[Run, Outcome]] = []
        faults: list[str] = []  # one after the other, all the same

        def settled(run: Run, outcome: Outcome) -> bool:
            """What became of a run is counted; whether it was the last."""
            nonlocal done
            if self._stopped.is_set() and outcome.verdict is not Verdict.BROKEN:
                return True
            outcome = self._confirmed(run, outcome, worker, report)
            done += 1
            scores[run.example] = max(outcome.ratios.values(), default=0.0) if outcome.verdict is Verdict.HOLDS else 0.0
            self.cases.append(run.example.case)
            self._count(report, run, outcome)
            self.on_case(law.name, done, examples)
            if outcome.verdict is Verdict.BROKEN:
                self._keep(report, run, outcome, "found")
                broken.append((run, outcome))
            faults[:] = [*(fault for fault in faults if fault == outcome.fault), outcome.fault] if outcome.fault else []
            if len(faults) == FAULTS and done < examples:
                report.reason += f"; the law ended after {FAULTS} such cases in a row"
            return bool(broken) or self._over or len(faults) == FAULTS

        for batch in self._batches(law, drawn, most_at_once(law, worker, self.device)):
            runs = [self._run(law.name, example) for example in batch]
            if any(settled(*each) for each in zip(runs, ask_all(runs, worker, self.store, self.defects), strict=True)):
                return broken[0] if broken else None

        def score(example: Example) -> float | None:
            run = self._run(law.name, example)
            return None if settled(run, ask(run, worker, self.store)) else scores[example]

        if drawn < examples:
            same_key = self._plan is not None and self._plan.palette is not None
            domain, seed = self.described.domain if self._plan is None else self._plan.domain, mix_words(self.seed, law.name)
            climb(law, domain, dict(scores), seed, examples - drawn, score, same_key=same_key)
        return broken[0] if broken else None

    def _batches(self, law: Law, examples: int, most: int) -> Iterator[list[Example]]:
        """The law's examples in lists of at most `most`; of a plan, once their kernels are compiled."""
        assert self.described is not None
        if self._plan is None:
            yield from batches(law.draw(self.described.domain), mix_words(self.seed, law.name), examples, most)
            return
        planned = self._plan.of(law.name)
        for batch in of_one_key(planned.examples, most):
            for example in batch:
                planned.wait(example)
            yield batch

    def _confirmed(self, run: Run, outcome: Outcome, worker: Asked, report: LawReport) -> Outcome:
        """The outcome, or what it comes to: unknown if a lost worker is not lost again, known if it is on file.

        So too what a sanitizer said, which may have been late and about the case before.
        """
        said = outcome.kind is FailureKind.SANITIZER
        if (outcome.lost or said) and ask(run, worker, self.store).verdict is not Verdict.BROKEN:
            # An earlier case may have written out of bounds, or the host killed it: this case is not shown to be at fault.
            self._keep(report, run, outcome, "found once")
            where = "in a fresh worker" if outcome.lost else "when it was asked again"
            reason = f"{outcome.findings[0].what}, but not again {where}: {run}"
            return Outcome(Verdict.UNKNOWN, reason=reason)
        if self.defects.explain(run, outcome):
            outcome.verdict = Verdict.KNOWN
        return outcome

    @staticmethod
    def _count(report: LawReport, run: Run, outcome: Outcome) -> None:
        report.counts[outcome.verdict] = report.counts.get(outcome.verdict, 0) + 1
        if outcome.verdict in (Verdict.UNKNOWN, Verdict.UNSUPPORTED) and not report.reason:
            report.reason = outcome.reason
        if outcome.fault and not report.fault:
            report.fault, report.fault_run = outcome.fault, str(run)
        for name, ratio in outcome.ratios.items() if outcome.verdict is not Verdict.KNOWN else ():
            report.ratios[name] = max(ratio, report.ratios.get(name, 0.0))
        case, words = run.example.case, run.example.case.words()
        for name in case.REGIMES:
            key = f"{name}={words[name]}"
            report.regimes[key] = report.regimes.get(key, 0) + 1
        for kernel, launches in outcome.one_by_one.items():
            report.one_by_one[kernel] = report.one_by_one.get(kernel, 0) + launches
        report.kernel_s += outcome.kernel_s
        report.oracle_s += outcome.oracle_s

    def _explain(self, law: Law, worker: Asked, report: LawReport, run: Run, outcome: Outcome) -> None:
        report.verdict, report.first_run = Verdict.BROKEN, str(run)
        small, best = explain(law, run, outcome, worker, self.store, self.defects, self._stopped)
        smallest = dataclasses.replace(run, example=small.example)
        report.run, report.findings, report.shrunk = str(smallest), best.findings, small.finished
        report.neighbours = [what for what, _ in small.neighbours]
        self._keep(report, smallest, best, "shrunk")
        if self.described is not None and best.kind is FailureKind.OFF and isinstance(worker, Worker):
            end = time.monotonic() + SHRINK_S

            def more() -> bool:
                return not self._over and time.monotonic() < end

            report.otherwise = otherwise(self.described, (smallest, run), worker, self.store, more)

    def _keep(self, report: LawReport, run: Run, outcome: Outcome, stage: str) -> None:
        findings = [finding.to_json() for finding in outcome.findings]
        self.store.keep(
            {
                "stage": stage,
                "run": str(run),
                "law": report.law,
                "versions": report.versions,
                "seed": self.seed,
                "findings": findings,
            }
        )
        if self.examples is not None and stage != "found once":
            self.examples.add(run)


def otherwise(
    described: Described, runs: Sequence[Run], worker: Asked, store: Store, more: Callable[[], bool] = lambda: True
) -> list[str]:
    """What an adapter might say of itself so that none of these broken runs is over its bound: one thing each, in words.

    Whether it is so, its author knows: who forgets to say it gets alarms of a right implementation. Nothing else may change: where
    a run holds with another word, it must be broken without it, twice. While there is `more` time, that is.
    """
    shared_decay = described.domain.operation not in ("kda", "delta_rule")
    ways: list[tuple[str, Sequence[Run], dict[str, Any]]] = []
    if described.algorithm == "chunkwise":
        ways += [("folds = True", runs, {"folds": True})] if shared_decay else []
        ways.append(("chunk = None", runs, {"chunk": None}))
        if described.products == "ieee" and all(run.device != "cpu" for run in runs):
            ways.append(("products = 'tf32'", [dataclasses.replace(run, products="tf32") for run in runs], {}))
    elif described.algorithm == "recurrent":
        ways += [("stores = True", runs, {"stores": True}), ("algorithm = 'chunkwise'", runs, {"algorithm": "chunkwise"})]

    def come_to(verdict: Verdict, asked: Sequence[Run], declared: dict[str, Any]) -> bool:
        return all(more() and ask(run, worker, store, declared).verdict is verdict for run in asked)

    hold = [words for words, asked, declared in ways if come_to(Verdict.HOLDS, asked, declared)]
    return hold if hold and come_to(Verdict.BROKEN, (*runs, *runs), {}) else []


def explain(
    law: Law,
    run: Run,
    outcome: Outcome,
    worker: Asked,
    store: Store,
    defects: KnownDefects,
    stopped: threading.Event,
    limit_s: float = SHRINK_S,
) -> tuple[Shrunk, Outcome]:
    """The smallest example found that fails as the broken run does, and what it came to.

    What is a known defect whatever is found is not run, and what turns out to be one does not count.
    """
    start, best = time.monotonic(), outcome

    def fails(example: Example) -> bool | None:
        nonlocal best
        candidate = dataclasses.replace(run, example=example)
        if defects.whatever(candidate):
            return None
        got = ask(candidate, worker, store)
        if defects.explain(candidate, got):
            return None
        if got.verdict is Verdict.BROKEN and got.way == outcome.way:
            best = got
            return True
        return False if got.verdict is Verdict.HOLDS else None

    def more(runs: int) -> bool:
        return runs < SHRINK_RUNS and time.monotonic() - start < limit_s and not stopped.is_set()

    return shrink(run.example, law, fails, more), best


def overall(counts: dict[str, int], reason: str = "") -> tuple[Verdict, str]:
    """HOLDS if nothing is broken or undecided and enough cases could see; otherwise why not."""
    if counts.get(Verdict.BROKEN):
        return Verdict.BROKEN, reason
    if undecided := counts.get(Verdict.UNKNOWN):
        return Verdict.UNKNOWN, f"{undecided} undecided: {reason}"
    holds, drawn = counts.get(Verdict.HOLDS, 0), sum(counts.values())
    could = holds + counts.get(Verdict.KNOWN, 0)
    if holds and could >= min(ENOUGH, drawn):
        return Verdict.HOLDS, ""
    if not drawn:
        return Verdict.UNKNOWN, "no case was run"
    if counts.get(Verdict.UNSUPPORTED) == drawn:
        return Verdict.UNKNOWN, f"no case of the domain was supported: {reason}"
    return Verdict.UNKNOWN, f"only {could} of {drawn} cases could see what the law is about, {min(ENOUGH, drawn)} are needed"
