"""Whether a broken run fails again in a new process, alone or after others, and the smallest runs with which it does.

What an implementation keeps of one call can make a later call wrong. Then no single line shows the defect, but a few lines that one
process runs in their order do.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from properties.words.example import Example
from verify.adapters.registry import AdapterError
from verify.engine.asking import ask, ask_afresh
from verify.engine.explaining import Budget, explain, limit_s
from verify.engine.shrink import Shrunk, shrink
from verify.execution.line import Run
from verify.findings.known import KnownDefects
from verify.findings.store import Store
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.process.worker import Worker
from verify.ranks.group import Answering

YES, AFRESH, AFTER, NO = "yes", "only afresh", "after others", "no"  # whether a failure repeats
FACTOR = 8  # first the last one alone, then so many times as many each time: most failures need a recent run
AGAIN = 2  # further processes that must agree, with these runs and without
AFTERWARDS = 1 / 2  # of the CPU time of shrinking, as much more for the runs after which the smallest case fails


@dataclasses.dataclass(frozen=True)
class Explained:
    """The smallest run that fails as a broken run does, its outcome, how it was found, and whether it `repeats`.

    `repeats` is YES if the smallest run fails in a fresh process; AFRESH if it fails there and not in the process that has just run
    it; AFTER if it fails there only when the process has run those in `after` before; NO if it does not fail there; "" if the check
    was stopped before.
    """

    run: Run
    outcome: Outcome
    small: Shrunk
    repeats: str
    after: Sequence[Run] = ()


def explain_repeating(
    run: Run,
    outcome: Outcome,
    worker: Answering,
    store: Store,
    defects: KnownDefects,
    stopped: threading.Event,
    domain: Any = None,
    *,
    before: Sequence[Run] = (),
    needed: Sequence[Run] = (),
    compiled: Callable[[Run], None] = lambda run: None,
) -> Explained:
    """Shrink a broken run (`explain`), and run the smallest case in a fresh process, as a person will who repeats its line.

    A run that does not fail again where it was found is not shrunk there. If it fails in a fresh process, each smaller case is run
    in one. If the smallest case does not fail in a fresh process and the found one does, the found one stands. If neither does, we
    look for the fewest runs `before` it in its process after which it fails in a fresh process, and shrink it and them there.
    Without such runs nothing is shrunk, because each answer would be chance. A law about what a process keeps, and a crash or a
    hang, have been confirmed in a fresh process already, perhaps after the runs that are `needed`. For `compiled` see `explain`.
    """

    def fails(run: Run, *, fresh: bool) -> bool:
        if fresh:
            worker.end()
        return ask(run, worker, store, defects=defects).verdict is Verdict.BROKEN

    arguments = (run.the_law, run, outcome, worker, store, defects, stopped, limit_s(run), domain)

    def after_others(otherwise: Explained) -> Explained:
        runs = needed or after_fewest(run, before, worker, store, defects, stopped)
        if not runs:
            return otherwise
        small, best = explain(*arguments, after=runs, compiled=compiled)
        smallest = dataclasses.replace(run, example=small.example)
        return Explained(smallest, best, small, AFTER, _shrunk(runs, smallest, worker, store, defects, stopped, domain))

    confirmed = outcome.lost or outcome.kind is FailureKind.SANITIZER or (run.the_law.of_process and isinstance(worker, Worker))
    whole = Explained(run, outcome, Shrunk(run.example, (), 0, finished=True), NO)
    if needed:
        return after_others(whole)
    afresh = not confirmed and not stopped.is_set() and not fails(run, fresh=False)
    if afresh and not fails(run, fresh=True):
        return after_others(whole)
    small, best = explain(*arguments, afresh=afresh, compiled=compiled)
    smallest = Explained(dataclasses.replace(run, example=small.example), best, small, AFRESH if afresh else YES)
    if confirmed or afresh:
        return smallest
    if stopped.is_set():
        return dataclasses.replace(smallest, repeats="")
    if fails(smallest.run, fresh=True):
        return smallest
    if smallest.run != run and fails(run, fresh=True):
        return dataclasses.replace(whole, repeats=YES)
    return after_others(dataclasses.replace(smallest, small=dataclasses.replace(small, neighbours=(), others=()), repeats=NO))


def earlier(lines: Iterable[str], run: Run) -> list[Run]:
    """The runs that a process ran before the last time that it ran `run`. `lines` are the last ones that it got, in their order."""
    lines = list(lines)
    last = max((place for place, line in enumerate(lines) if line == str(run)), default=0)
    found = list[Run]()
    for line in lines[:last]:
        with contextlib.suppress(ValueError, AdapterError):  # it was no run
            found.append(Run.parse(line))
    return found


def after_fewest(
    run: Run, before: Sequence[Run], worker: Answering, store: Store, defects: KnownDefects, stopped: threading.Event
) -> list[Run]:
    """The fewest runs found, of those `before` a run in its process, after which it is broken in a fresh process. Perhaps none.

    Chance is not laid on them: the run must also be broken after them in AGAIN further processes, and hold in as many without them.
    """
    budget = Budget(run, limit_s(run), worker.deadline_s, stopped)
    found = fewest(before, lambda runs: _fails_after(runs, run, worker, store, defects, budget))

    def breaks(*after: Run) -> bool:
        return ask_afresh(run, worker, store, defects, always=True, after=after).verdict is Verdict.BROKEN

    certain = found and all(breaks(*found) and not breaks() for _ in range(AGAIN))
    return found if certain else []


def fewest(runs: Sequence[Run], fails: Callable[[Sequence[Run]], bool | None]) -> list[Run]:
    """The fewest of the `runs` found after which something fails, in their order. Empty if it does not fail after all of them.

    `fails(some)` returns whether it fails after these in a new process, and None if no attempts are left. Without any run it does
    not fail. We find by halves the latest place from which on the runs make it fail. The run there is needed: from the next place
    on, it does not fail. We keep this run, and go on with those behind it. So k of n runs take about k log2(n) attempts. Whatever
    `fails` returns, what we return is a list that failed.
    """
    size = 1
    while not fails(runs[-size:]):
        if size >= len(runs):
            return []
        size *= FACTOR
    needed, rest = list[Run](), list(runs[-size:])
    while rest and not (needed and fails(needed)):
        low, high = 0, len(rest)  # after `needed` and rest[low:] it fails, and not after `needed` and rest[high:]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fails([*needed, *rest[middle:]]) else (low, middle)
        needed, rest = [*needed, rest[low]], rest[low + 1 :]
    return needed


def _fails_after(
    runs: Sequence[Run], run: Run, worker: Answering, store: Store, defects: KnownDefects, budget: Budget
) -> bool | None:
    """Whether a run is broken in a fresh process after others; None if there are none, or if the budget is spent."""
    if not runs or not budget.left():
        return None
    outcome = ask_afresh(run, worker, store, defects, always=True, after=runs)
    budget.spend(outcome, fresh=True)
    return outcome.verdict is Verdict.BROKEN and not defects.explain(run, outcome)


def _shrunk(
    runs: Sequence[Run],
    run: Run,
    worker: Answering,
    store: Store,
    defects: KnownDefects,
    stopped: threading.Event,
    domain: Any,
) -> list[Run]:
    """The runs after which a run is broken, each with the smallest example found after which it still is."""
    budget = Budget(run, limit_s(run) * AFTERWARDS, worker.deadline_s, stopped)
    smaller = list(runs)
    for place, one in enumerate(runs):

        def fails(example: Example, place: int = place) -> bool | None:
            there = [*smaller[:place], dataclasses.replace(smaller[place], example=example), *smaller[place + 1 :]]
            return _fails_after(there, run, worker, store, defects, budget)

        example = shrink(one.example, one.the_law, fails, lambda _: budget.left(), domain=domain).example
        smaller[place] = dataclasses.replace(one, example=example)
    return smaller
