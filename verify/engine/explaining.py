"""The explanation of a broken run: its smallest case, and what the adapter could declare so that the run would hold."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from properties.laws import Law
from properties.strategies import Example
from verify.engine.asking import Asked, Described, ask, ask_afresh
from verify.engine.likeness import alike, steady
from verify.engine.shrink import DATA, Shrunk, between, other_numbers, restored, shrink, simpler_in
from verify.execution.run import Run
from verify.findings.known import KnownDefects
from verify.findings.store import Store
from verify.process.outcome import FailureKind, Outcome, Verdict

SHRINK_RUNS, SHRINK_S = 120, 60.0
# Words of a case that decide which errors exceed their tolerances, and whether a kernel takes its path for packed sequences.
FIXED = ("dtype", "gate_dtype", "state_dtype", "values", "packed")
PATHS = ("packed",)  # those of them that decide about the path
LONG, LONG_CHUNKS = 128, (256, 512, 1024)  # shorter sequences do not show whether a chunk is longer than 128 tokens


def would_hold(
    described: Described,
    runs: Sequence[Run],
    worker: Asked,
    store: Store,
    more: Callable[[], bool] = lambda: True,
    others: Callable[[], Sequence[Run]] = list,
) -> list[str]:
    """Declarations, as text such as "folds = True", each of which alone would bring all these broken runs within their tolerance.

    Only the adapter's author knows whether such a declaration is true. Without a declaration that is true, a right implementation
    gets false alarms. To exclude chance, the runs must also be broken again, twice, without the declaration. With the declaration,
    none of the runs that `others()` returns may be broken: other runs of the law, which a real defect breaks all the same. When
    `more()` is false, no further run is made.
    """

    def all_verdicts(verdict: Verdict, asked: Sequence[Run], declared: dict[str, Any]) -> bool:
        return all(more() and ask(run, worker, store, declared).verdict is verdict for run in asked)

    def none_broken(asked: Sequence[Run], way: Way) -> bool:
        """Whether no run is broken with the declaration. A declaration of products is a word of the run itself."""
        return all(more() and ask(way.of(run), worker, store, way.declared).verdict is not Verdict.BROKEN for run in asked)

    hold = [way for way in _ways(described, runs) if all_verdicts(Verdict.HOLDS, [way.of(run) for run in runs], way.declared)]
    if not hold or not all_verdicts(Verdict.BROKEN, (*runs, *runs), {}):
        return []
    runs = others()
    return [way.words for way in hold if none_broken(runs, way)]


@dataclasses.dataclass(frozen=True)
class Way:
    """Something that an adapter might declare: in words, as attributes of the adapter, and as words of a run."""

    words: str
    declared: dict[str, Any] = dataclasses.field(default_factory=dict)
    products: str = ""

    def of(self, run: Run) -> Run:
        """The run with what is declared about its products."""
        return dataclasses.replace(run, products=self.products) if self.products else run


def _ways(described: Described, runs: Sequence[Run]) -> list[Way]:
    """What the adapter might declare. LONG_CHUNKS are tried if a sequence is longer than LONG."""
    if described.algorithm == "chunkwise":
        ways = [Way("folds = True", {"folds": True})] if described.domain.operation not in ("kda", "delta_rule") else []
        ways.append(Way("chunk = None", {"chunk": None}))
        longest = max((length for run in runs for length in getattr(run.example.case, "lengths", ())), default=0)
        ways += [Way(f"chunk = {chunk}", {"chunk": chunk}) for chunk in LONG_CHUNKS if longest > LONG]
        if described.products == "ieee" and all(run.device != "cpu" for run in runs):
            ways.append(Way("products = 'tf32'", products="tf32"))
        return ways
    if described.algorithm == "recurrent":
        return [Way("stores = True", {"stores": True}), Way("algorithm = 'chunkwise'", {"algorithm": "chunkwise"})]
    if described.domain.operation == "causal_conv1d" and not described.domain.backward:
        return [Way("rounds_products = True", {"rounds_products": True})]
    return []


def explain(
    law: Law,
    run: Run,
    outcome: Outcome,
    worker: Asked,
    store: Store,
    defects: KnownDefects,
    stopped: threading.Event,
    limit_s: float = SHRINK_S,
    domain: Any = None,
) -> tuple[Shrunk, Outcome]:
    """The smallest example found that fails as the broken run does, and its outcome.

    We do not run candidates outside the `domain`, or candidates that a known defect covers whatever their findings are.
    Candidates whose findings turn out to be a known defect do not count as failures. Candidates that look like a known defect of
    another adapter or version do not count either, unless the found case looks like it too. There are at most SHRINK_RUNS runs,
    in at most `limit_s` seconds. If the found case hangs, no run begins whose deadline is later than that: with the default
    deadline of 120 s, a hang is not shrunk.

    A word's value in the found case cannot prevent the found defect. So if the smallest case holds when a word has its found value
    again, then another defect has taken over, which only the simpler value shows. The same is likely if the case fails in another
    way then, or with an error of another size over its tolerance; but lengths and numbers of another kind change that by
    themselves. We fix this word at its found value and shrink the found case again. If the smallest case holds with a larger size
    (`between`) that is below the found one, then small sizes show another defect than large ones. We shrink the found case again,
    and this size stays larger. If this makes nothing simpler, we keep the smallest case of before.

    The words in FIXED are fixed from the start if errors exceed tolerances: finer dtypes and values of another size show defects
    that the found case cannot have shown. Simpler values of these words are tried on the smallest case alone.
    """
    waits_s = worker.deadline_s if outcome.kind is FailureKind.HUNG else 0.0
    end = time.monotonic() + limit_s - waits_s
    outcomes = {run.example: outcome}
    current = run.example  # the smallest one so far

    def resembled(run: Run, outcome: Outcome) -> set[str]:
        return {defect.title for defect in defects.resembling(run, outcome)}

    found_defects = resembled(run, outcome)

    def verdict_of(example: Example) -> bool | None:
        """Whether an example fails as the broken run does; None if it neither does nor holds."""
        candidate = dataclasses.replace(run, example=example)
        if defects.explain_any(candidate):
            return None
        if example not in outcomes:
            outcomes[example] = ask_afresh(candidate, worker, store, defects)
        if defects.explain(candidate, outcomes[example]):
            return None
        if alike(outcome, run, outcomes[example], candidate):
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

    def more(_: int) -> bool:
        return len(outcomes) <= SHRINK_RUNS and time.monotonic() < end and not stopped.is_set()

    def again(example: Example) -> bool | None:
        return verdict_of(example) if example in outcomes or more(0) else None

    def shows_another(names: set[str], example: Example, small: Example) -> bool:
        """Whether the smallest case with some words as found says that the found defect is not what makes it fail."""
        verdict, there = again(example), outcomes.get(example)
        if verdict is False or there is None or there.verdict is not Verdict.BROKEN or names & {"lengths", *DATA}:
            return verdict is False
        return not steady(outcome, outcomes[small], there)

    fixed = {*FIXED} if outcome.kind is FailureKind.OFF else {*PATHS}
    least: dict[str, int] = {}
    before: Shrunk | None = None  # the result with smaller sizes
    slid = True
    while slid:
        current = run.example
        small = shrink(run.example, law, fails, more, fixed, domain, least)
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
    tried = [(what, again(example)) for what, example in simpler_in(law, small.example, fixed & {*FIXED}, domain)]
    small = dataclasses.replace(
        small,
        neighbours=(*small.neighbours, *((what, "holds") for what, verdict in tried if verdict is False)),
        runs=len(outcomes) - 1,
        others=tuple(what for what, verdict in tried if verdict),
    )
    return small, outcomes[small.example]
