"""Runs lines in several places, each with another version of an implementation, and finds the version that changed a verdict."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from verify.adapters.registry import AdapterError
from verify.engine.asking import Described, ask_afresh, describe
from verify.execution.line import Run
from verify.findings import known
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.process.messages import Answer, Failure, Origins, Question, Whence, read
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker, WorkerLost

T = TypeVar("T")
A = TypeVar("A", bound=Answer)
HOLDS, BROKEN, NOT = "holds", "broken", "cannot be asked here"


@dataclasses.dataclass(frozen=True)
class Site:
    """Where workers find an implementation.

    - `name`: a short name, such as "fla-core 0.5.2". `option`: the words that name it on a command line
    - `folders`: where modules are looked for first. At least one module must come from them
    - `shared`: whether several adapters are asked here, of which each takes from the folders what they have, perhaps nothing
    - `environment`, `python`: the variables and the interpreter of the place's workers, by default the one that runs
    - `adapters`: for adapters whose file is another in this place, how they are named here
    - `trouble`: why nothing can be asked in this place, or ""
    """

    name: str
    option: str
    folders: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    python: str | None = None
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    trouble: str = ""
    shared: bool = False

    def worker(self, device: str, deadline_s: float, number: int = 0, *, sequential: bool = False) -> Worker:
        """A worker of this place. On GPUs, workers have them in turn, by their numbers."""
        environment = {**devices.environment(device, number), **self.environment}
        return Worker(deadline_s, environment=environment, python=self.python, sequential=sequential)


@dataclasses.dataclass(frozen=True)
class SiteVerdict:
    """What a line is in a place: HOLDS, BROKEN or NOT.

    `ratio` is the largest error as a multiple of its tolerance, or 0 if no error was measured, and `outputs` are the outputs with
    that error or, if it is broken, all broken ones. `reason` says what failed, or why the line cannot be asked.
    """

    verdict: str
    ratio: float = 0.0
    outputs: tuple[str, ...] = ()
    reason: str = ""

    @property
    def short(self) -> str:
        """The cell in a table."""
        if self.verdict == NOT:
            return "-"
        times = f"{self.ratio:.2g}" if 0 < self.ratio < 1e300 else ""
        words = ["BROKEN", ",".join(self.outputs), f"{times}x" if times else ""] if self.verdict == BROKEN else ["holds", times]
        return " ".join(word for word in (*words, *(self.outputs if self.verdict == HOLDS else ())) if word)

    def to_json(self) -> dict[str, Any]:
        """The cell as plain data."""
        return {**dataclasses.asdict(self), "outputs": [*self.outputs]}


def cell_of(outcome: Outcome) -> SiteVerdict:
    """What an outcome says about its line."""
    ratios = {name: ratio for name, ratio in outcome.ratios.items() if ratio > 0}
    if outcome.verdict is Verdict.HOLDS:
        worst = max(ratios, key=ratios.__getitem__, default="")
        return SiteVerdict(HOLDS, ratios.get(worst, 0.0), (worst,) if worst else ())
    if outcome.verdict is Verdict.BROKEN:
        outputs = tuple(dict.fromkeys(finding.port for finding in outcome.findings))
        first = outcome.findings[0]
        return SiteVerdict(BROKEN, min(outcome.worst, 1e300), outputs, f"{first.place}: {first.what}")
    return SiteVerdict(NOT, reason=outcome.reason or f"the case is {outcome.verdict}")


class SiteWorkers:
    """The processes of one place, one for each device, which start when they are first needed."""

    def __init__(self, place: Site, deadline_s: float, store: Store, number: int = 0, *, sequential: bool = False) -> None:
        self.place, self._deadline_s, self._store, self._number = place, deadline_s, store, number
        self._sequential = sequential
        self._workers: dict[str, Worker] = {}
        self._sure: set[str] = set()  # adapters that import from the place's folders
        self.described: dict[str, Described] = {}
        self.outcomes: dict[Run, Outcome] = {}  # of the lines that could be asked
        self.inside: bool | None = None  # whether modules came from the place's folders; None if that is not known yet
        self._closed = False

    def cell(self, run: Run, declared: dict[str, Any] | None = None) -> SiteVerdict:
        """What a line is here. A crash or a hang is BROKEN, as for `repeat`.

        `declared` replaces what the adapter declares (verify/execution/execute.py).
        """
        if self.place.trouble:
            return SiteVerdict(NOT, reason=self.place.trouble)
        if run.device == "cuda" and not devices.gpus():
            return SiteVerdict(NOT, reason="the line has device=cuda, but torch sees no GPU")
        worker = self.worker(run.device)
        try:
            if run.adapter not in self.described:
                self.described[run.adapter] = describe(self.here(run).adapter, worker)
            defects = known.of(run.adapter).on(self.described[run.adapter].device)
            outcome = ask_afresh(self.here(run), worker, self._store, defects.deny_list, declared=declared)
            cell = cell_of(outcome)
            if cell.verdict != NOT and run.adapter not in self._sure and (wrong := self._elsewhere(worker)):
                return SiteVerdict(NOT, reason=wrong)
        except AdapterError as error:
            return SiteVerdict(NOT, reason=str(error))
        if worker.alive:
            self._sure.add(run.adapter)
        self.outcomes[run] = outcome
        return cell

    def here(self, run: Run) -> Run:
        """The run with the name that its adapter has in this place."""
        return dataclasses.replace(run, adapter=self.place.adapters.get(run.adapter, run.adapter))

    def ask(self, device: str, question: Question, kind: type[A], deadline_s: float | None = None) -> A | str:
        """The answer of a process of this place, or why there is none, in words."""
        try:
            answer = read(kind, self.worker(device).ask(question, *([deadline_s] if deadline_s else [])))
        except WorkerLost as lost:
            return f"{lost.how} ({lost.detail})"
        return answer.error if isinstance(answer, Failure) else answer

    @property
    def versions(self) -> str:
        """The versions of the packages of all adapters that could be loaded here."""
        words = " ".join(described.versions for described in self.described.values()).split()
        return " ".join(dict.fromkeys(f"{name} {version}" for name, version in zip(words[::2], words[1::2], strict=False)))

    def _elsewhere(self, worker: Worker) -> str:
        """Why what ran is not what the place has, or ""."""
        if not (self.place.folders and worker.alive):
            return ""
        with contextlib.suppress(WorkerLost):
            origins = read(Origins, worker.ask(Whence([*self.place.folders])))
            assert not isinstance(origins, Failure), origins
            if origins.elsewhere:
                return f"{origins.elsewhere[0]} was imported, and not that of {self.place.folders[0]}"
            self.inside = origins.inside
            if not (origins.inside or self.place.shared):
                return f"nothing was imported from {self.place.folders[0]}: it lacks what the adapter imports"
        return ""

    def worker(self, device: str) -> Worker:
        """The process that runs lines of a device."""
        if device not in self._workers:
            self._workers[device] = self.place.worker(device, self._deadline_s, self._number, sequential=self._sequential)
            if self._closed:
                self._workers[device].close()
        return self._workers[device]

    def close(self) -> None:
        """End the processes. Any thread may call this."""
        self._closed = True
        for worker in [*self._workers.values()]:
            worker.close()

    def __enter__(self) -> "SiteWorkers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()


def matrix(
    placed: Sequence[SiteWorkers], runs: Sequence[Run], workers: int, tell: Callable[[str, int, int], None]
) -> list[list[SiteVerdict]]:
    """The cells of all lines, place by place. So many places are asked at a time; `tell` is told how many lines one has had."""

    def column(one: SiteWorkers) -> list[SiteVerdict]:
        cells = []
        with one:
            for number, run in enumerate(runs, 1):
                cells.append(one.cell(run))
                tell(one.place.name, number, len(runs))
        return cells

    return everywhere(placed, column, workers)


def everywhere(placed: Sequence[SiteWorkers], act: Callable[[SiteWorkers], T], workers: int) -> list[T]:
    """What `act` returns for each place, so many places at a time. All processes have ended afterwards, also after an error."""
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        return list(pool.map(act, placed))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for one in placed:
            one.close()
        pool.shutdown(wait=True)


@dataclasses.dataclass(frozen=True)
class Change:
    """Where a verdict changes: the last version before, the first after, and those between that cannot be asked."""

    before: int
    after: int
    unknown: tuple[int, ...] = ()


def first_change(count: int, cell: Callable[[int], SiteVerdict]) -> Change:
    """Find by halves where the verdict of versions 0 to count - 1 changes. The first and the last must have other verdicts."""
    low, high, unknown = 0, count - 1, set[int]()
    first = cell(low).verdict
    while rest := [place for place in range(low + 1, high) if place not in unknown]:
        middle = min(rest, key=lambda place: abs(2 * place - low - high))
        found = cell(middle).verdict
        if found == NOT:
            unknown.add(middle)
        elif found == first:
            low = middle
        else:
            high = middle
    return Change(low, high, tuple(sorted(place for place in unknown if low < place < high)))
