"""Explaining a broken run: its smallest case, and what the adapter might declare so that it would hold."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from properties.laws import Law
from properties.strategies import Example
from verify.engine.asking import Asked, Described, ask
from verify.engine.shrink import Shrunk, shrink
from verify.execution.run import Run
from verify.findings.known import KnownDefects
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict

SHRINK_RUNS, SHRINK_S = 120, 60.0


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
