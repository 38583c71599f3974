"""The explanation of a broken run: its smallest case, and what the adapter could declare so that the run would hold."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from properties.laws import Law
from properties.strategies import Example
from verify.engine.asking import Asked, Described, ask, ask_afresh
from verify.engine.shrink import Shrunk, shrink
from verify.execution.run import Run
from verify.findings.known import KnownDefects
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict

SHRINK_RUNS, SHRINK_S = 120, 60.0


def would_hold(
    described: Described, runs: Sequence[Run], worker: Asked, store: Store, more: Callable[[], bool] = lambda: True
) -> list[str]:
    """Declarations, as text such as "folds = True", each of which alone would bring all these broken runs within their tolerance.

    Only the adapter's author knows whether such a declaration is true. Without a declaration that is true, a right implementation
    gets false alarms. To exclude chance, the runs must also be broken again, twice, without the declaration. When `more()` is
    false, no further run is made.
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

    elif described.domain.operation == "causal_conv1d" and not described.domain.backward:
        ways.append(("rounds_products = True", runs, {"rounds_products": True}))

    def all_verdicts(verdict: Verdict, asked: Sequence[Run], declared: dict[str, Any]) -> bool:
        return all(more() and ask(run, worker, store, declared).verdict is verdict for run in asked)

    hold = [words for words, asked, declared in ways if all_verdicts(Verdict.HOLDS, asked, declared)]
    return hold if hold and all_verdicts(Verdict.BROKEN, (*runs, *runs), {}) else []


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
    """The smallest example found that fails in the same way as the broken run, and its outcome.

    Candidates that a known defect covers whatever their findings are not run. Candidates whose findings turn out to be a known
    defect do not count as failures. At most SHRINK_RUNS runs are made, in at most `limit_s` seconds.
    """
    start, best = time.monotonic(), outcome

    def fails(example: Example) -> bool | None:
        nonlocal best
        candidate = dataclasses.replace(run, example=example)
        if defects.explain_any(candidate):
            return None
        got = ask_afresh(candidate, worker, store)
        if defects.explain(candidate, got):
            return None
        if got.verdict is Verdict.BROKEN and got.way == outcome.way:
            best = got
            return True
        return False if got.verdict is Verdict.HOLDS else None

    def more(runs: int) -> bool:
        return runs < SHRINK_RUNS and time.monotonic() - start < limit_s and not stopped.is_set()

    return shrink(run.example, law, fails, more), best
