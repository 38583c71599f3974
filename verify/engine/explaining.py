"""The smallest case that fails as a broken run does."""

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from properties.books import book_of
from properties.laws.law import Law
from properties.words.example import Example
from verify.engine.asking import ask_afresh
from verify.engine.likeness import alike, steady
from verify.engine.shrink import DATA, Shrunk, between, one_step, other_numbers, restored, shrink
from verify.execution.line import Run
from verify.findings.known import KnownDefects
from verify.findings.store import Store
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.ranks.group import Answering

SHRINK_RUNS, SHRINK_S = 120, 60.0  # the most runs of shrinking, and CPU seconds of the worker: a busy machine changes neither
ON_GPU = 1 / 2  # of these CPU seconds: on a GPU most cases take milliseconds, and a whole check takes three minutes
SPARE = 1 / 8  # of these, as much more for the neighbours of the smallest case, also if shrinking ended at its limit
# Kernels that wait take little CPU time: shrinking ends after so many times its CPU seconds in any case. On a GPU other processes
# compile, and people wait for the last law.
WALL, WALL_ON_GPU = 5, 2
LOST_S, FRESH_S = 2.0, 1.0  # what the end of a worker counts in a run, and what a new process counts
# Words of a case that decide which errors exceed their tolerances, and whether a kernel takes its path for packed sequences.
FIXED = ("dtype", "gate_dtype", "state_dtype", "values", "packed")
PATHS = ("packed",)  # those of them that decide about the path
SHAPES = {"lengths", "trace"}  # words by which a case gets shorter


def limit_s(run: Run) -> float:
    """The CPU seconds that shrinking a run may take, and then the seconds that looking for declarations may take."""
    return SHRINK_S if run.device == "cpu" else SHRINK_S * ON_GPU


class Budget:
    """What shrinking a run may spend: SHRINK_RUNS runs and `cpu_s` CPU seconds of the worker, and in any case WALL times as many.

    A run that loses the worker counts as LOST_S seconds, or as the deadline if it hangs.
    """

    def __init__(self, run: Run, cpu_s: float, deadline_s: float, stopped: threading.Event) -> None:
        self._runs, self._cpu_s, self._deadline_s, self._stopped = SHRINK_RUNS, cpu_s, deadline_s, stopped
        self._wall_s = cpu_s * (WALL if run.device == "cpu" else WALL_ON_GPU)
        self._spent_runs, self._spent_s, self._hung, self._start = 0, 0.0, False, time.monotonic()

    def spend(self, outcome: Outcome, *, fresh: bool = False) -> None:
        """Count a run, perhaps in a fresh process."""
        hung = outcome.kind is FailureKind.HUNG
        lost_s = self._deadline_s if hung else LOST_S if outcome.lost else 0.0
        self._hung = self._hung or hung
        self._spent_runs += 1
        self._spent_s += outcome.cpu_s + lost_s + FRESH_S * fresh

    def spare(self) -> None:
        """Begin with what is kept for neighbours. What shrinking left is not spent on them."""
        self._runs, self._cpu_s = self._spent_runs + int(SPARE * self._runs), self._spent_s + SPARE * self._cpu_s
        self._start, self._wall_s = time.monotonic(), SPARE * self._wall_s

    def left(self, wait_s: float = 0.0) -> bool:
        """Whether one more run may begin that takes at least `wait_s` seconds."""
        return not self._stopped.is_set() and not self.over(wait_s)

    def over(self, wait_s: float = 0.0) -> str:
        """The limit that is reached, in words, or ""."""
        if self._spent_runs >= self._runs:
            return f"{self._runs} runs"
        if self._spent_s + wait_s >= self._cpu_s:
            return f"{self._cpu_s:g} s" if self._hung or wait_s else f"{self._cpu_s:g} s of CPU time"
        if time.monotonic() - self._start >= self._wall_s:
            return f"{self._wall_s:g} s of waiting"
        return ""


def explain(
    law: Law,
    run: Run,
    outcome: Outcome,
    worker: Answering,
    store: Store,
    defects: KnownDefects,
    stopped: threading.Event,
    most_s: float = SHRINK_S,
    domain: Any = None,
    *,
    afresh: bool = False,
    after: Sequence[Run] = (),
    compiled: Callable[[Run], None] = lambda run: None,
) -> tuple[Shrunk, Outcome]:
    """The smallest example found that fails as the broken run does, and its outcome.

    We do not run candidates outside the `domain`, or candidates that a known defect covers whatever their findings are.
    Candidates whose findings turn out to be a known defect do not count as failures. Candidates that look like a known defect of
    another adapter or version do not count either, unless the found case looks like it too. There are at most SHRINK_RUNS runs,
    in at most `most_s` CPU seconds of the worker. If the found case hangs, no run begins whose deadline is later than that: with
    the default deadline of 120 s, a hang is not shrunk. With `afresh`, each run has a new process; with `after`, one that runs
    these first. `compiled` is called with each run before it is made, and may compile its kernels.

    A word's value in the found case cannot prevent the found defect. So if the smallest case holds when a word has its found value
    again, then another defect has taken over, which only the simpler value shows. The same is likely if the case fails in another
    way then, or with a much smaller error over its tolerance; but lengths, widths and numbers of another kind change that by
    themselves. We fix this word at its found value and shrink the found case again. If the smallest case holds with a larger size
    (`between`) that is below the found one, then small sizes show another defect than large ones. We shrink the found case again,
    and this size stays larger. If this makes nothing simpler, we keep the smallest case of before.

    A case with few tokens may fail in fewer outputs than the found one, by chance. So the smallest case is at last made shorter
    as long as its first output that failed there fails.

    The words in FIXED are fixed from the start if errors exceed tolerances: finer dtypes and values of another size show defects
    that the found case cannot have shown. Simpler values of these words are tried on the smallest case alone, as are values that
    are no simpler but tell what the failure needs, in a few runs that are kept for this.
    """
    waits_s = worker.deadline_s if outcome.kind is FailureKind.HUNG else 0.0
    budget = Budget(run, most_s, worker.deadline_s, stopped)
    afresh = afresh or bool(after)
    fresh = afresh or run.the_law.of_process
    outcomes = {run.example: outcome}
    current = run.example  # the smallest one so far

    def resembled(run: Run, outcome: Outcome) -> set[str]:
        return {defect.title for defect in defects.resembling(run, outcome)}

    found_defects = resembled(run, outcome)

    def verdict_of(example: Example, *, every: bool = True) -> bool | None:
        """Whether an example fails as the broken run does (`alike`); None if it neither does nor holds."""
        candidate = dataclasses.replace(run, example=example)
        if defects.explain_any(candidate):
            return None
        if example not in outcomes:
            compiled(candidate)
            outcomes[example] = ask_afresh(candidate, worker, store, defects, always=afresh, after=after)
            budget.spend(outcomes[example], fresh=fresh)
        if defects.explain(candidate, outcomes[example]):
            return None
        if alike(outcome, run, outcomes[example], candidate, every=every):
            return True if resembled(candidate, outcomes[example]) <= found_defects else None
        return False if outcomes[example].verdict is Verdict.HOLDS else None

    def fails(example: Example) -> bool | None:
        nonlocal current
        if not (verdict := verdict_of(example)):
            return verdict
        if other_numbers(current.case, example.case) and not steady(outcome, outcomes[current], outcomes[example]):
            return None
        current = example
        return True

    def again(example: Example) -> bool | None:
        return verdict_of(example) if example in outcomes or budget.left(waits_s) else None

    def shows_another(names: set[str], example: Example, small: Example) -> bool:
        """Whether the smallest case with some words as found says that the found defect is not what makes it fail."""
        verdict, there = again(example), outcomes.get(example)
        by_chance = {*SHAPES, *DATA, *book_of(small.case).smaller.widths}  # they change the size of an error, whatever the defect
        if verdict is False or there is None or there.verdict is not Verdict.BROKEN or names & by_chance:
            return verdict is False
        return not steady(outcome, there, outcomes[small], falls=True)

    fixed = {*FIXED} if outcome.kind is FailureKind.OFF else {*PATHS}
    least: dict[str, int] = {}
    before: Shrunk | None = None  # the result with smaller sizes
    slid = True
    while slid:
        current = run.example
        small = shrink(run.example, law, fails, lambda _: budget.left(waits_s), fixed, domain, least)
        if before is not None and small.finished and small.example == run.example:
            small = before
            break
        changed = next(
            (names for names, example in restored(law, small.example, run.example) if shows_another(names, example, small.example)),
            set[str](),
        )
        # Two failures that raise the same error in the same place count as one defect.
        middle = between(law, small.example, run.example, domain) if outcome.kind is FailureKind.OFF else ()
        apart = [(name, size) for name, size, examples in middle if all(again(example) is False for example in examples)]
        slid = bool(changed or apart)
        before = small if apart and not changed else None
        fixed, least = fixed | changed, least | dict(apart)
    if small.finished:
        others = {field.name for field in dataclasses.fields(small.example.case)} - SHAPES
        some = functools.partial(verdict_of, every=False)
        small = shrink(small.example, law, some, lambda _: budget.left(waits_s), others, domain, least)
    limit = "" if small.finished else budget.over(waits_s)
    budget.spare()
    aspects = [*one_step(law, small.example, domain)]
    for _, example in itertools.chain.from_iterable(_in_turns(aspects)):
        again(example)
    verdicts = {what: again(example) for aspect in aspects for what, example in aspect if example in outcomes}
    small = dataclasses.replace(
        small,
        neighbours=tuple((what, "holds") for what, verdict in verdicts.items() if verdict is False),
        runs=len(outcomes) - 1,
        limit=limit,
        others=tuple(what for what, verdict in verdicts.items() if verdict and _words_in(what) <= fixed & {*FIXED}),
    )
    return small, outcomes[small.example]


def _in_turns(aspects: Sequence[Sequence[tuple[str, Example]]]) -> Iterator[list[tuple[str, Example]]]:
    """The first candidates of each aspect, then the second ones, and so on."""
    for candidates in itertools.zip_longest(*aspects):
        yield [candidate for candidate in candidates if candidate is not None]


def _words_in(what: str) -> set[str]:
    return {word.partition("=")[0] for word in what.split()}
