"""The explanation of a broken run: its smallest case, and what the adapter could declare so that the run would hold."""

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oracles.norm import NORM_FORMS
from properties.books import book_of
from properties.laws.law import Law
from properties.layers.case import LayerCase
from properties.layers.domain import LayerDomain
from properties.pools.case import PoolCase
from properties.rules.case import Case, overflows
from properties.rules.domain import Domain
from properties.rules.numbers import NORM_EPS
from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from properties.words.domain import VIEWS
from properties.words.example import Example
from verify.engine.asking import Described, ask, ask_afresh
from verify.engine.likeness import alike, steady
from verify.engine.shrink import DATA, Shrunk, between, one_step, other_numbers, restored, shrink
from verify.execution.line import Run
from verify.findings.known import NO_DEFECTS, KnownDefects
from verify.findings.store import Store
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.process.worker import Worker
from verify.ranks.group import Answering

SHRINK_RUNS, SHRINK_S = 120, 60.0  # the most runs of shrinking, and CPU seconds of the worker: a busy machine changes neither
ON_GPU = 1 / 2  # of these CPU seconds: on a GPU most cases take milliseconds, and a whole check takes three minutes
SPARE = 1 / 8  # of these, as much more for the neighbours of the smallest case, also if shrinking ended at its limit
WALL = 5  # kernels that wait or are compiled take little CPU time: shrinking ends after so many times SHRINK_S in any case
LOST_S, FRESH_S = 2.0, 1.0  # what the end of a worker counts in a run, and what a new process counts
YES, AFRESH, NO = "yes", "only afresh", "no"  # whether a failure repeats
# Words of a case that decide which errors exceed their tolerances, and whether a kernel takes its path for packed sequences.
FIXED = ("dtype", "gate_dtype", "state_dtype", "values", "packed")
PATHS = ("packed",)  # those of them that decide about the path
SHAPES = {"lengths", "trace"}  # words by which a case gets shorter
NEIGHBOURS_LAST = ("sliced", "offset")  # the views whose last axis is contiguous, with stride 1
ONE_TOKEN, FEWEST = "longest = 1", 2  # this limit is tried if the smallest case has two tokens
LONG, LONG_CHUNKS = 128, (256, 512, 1024)  # shorter sequences do not show whether a chunk is longer than 128 tokens


def limit_s(run: Run) -> float:
    """The CPU seconds that shrinking a run may take, and then the seconds that looking for declarations may take."""
    return SHRINK_S if run.device == "cpu" else SHRINK_S * ON_GPU


def would_hold(
    described: Described,
    runs: Sequence[Run],
    worker: Answering,
    store: Store,
    more: Callable[[], bool] = lambda: True,
    others: Callable[[], Sequence[Run]] = list,
    defects: KnownDefects = NO_DEFECTS,
) -> list[str]:
    """Declarations, as text such as "folds = True", each of which alone would bring all these broken runs within their tolerance.

    Only the adapter's author knows whether such a declaration is true. Without a declaration that is true, a right implementation
    gets false alarms. To exclude chance, the runs must also be broken again, twice, without the declaration. With the declaration,
    none of the runs that `others()` returns may be broken: other runs of the law, which a real defect breaks all the same. For
    another norm of q and k, these runs have it in their cases, and neither may the broken runs with rows that are nearly zero be
    broken: with longer rows, several norms give about the same. When `more()` is false, no further run is made.
    """

    def all_verdicts(verdict: Verdict, asked: Sequence[Run], declared: dict[str, Any]) -> bool:
        return all(more() and ask(run, worker, store, declared, defects).verdict is verdict for run in asked)

    def none_broken(asked: Sequence[Run], way: Declaration) -> bool:
        """Whether no run is broken with the declaration. A declaration of products is a word of the run itself."""
        return all(
            more() and ask(way.drawn(way.of(run)), worker, store, way.declared, defects).verdict is not Verdict.BROKEN
            for run in asked
        )

    hold = [way for way in _ways(described, runs) if all_verdicts(Verdict.HOLDS, [way.of(run) for run in runs], way.declared)]
    if not hold or not all_verdicts(Verdict.BROKEN, (*runs, *runs), {}):
        return []
    near = others()
    small = [dataclasses.replace(run, example=_with_small_values(run.example)) for run in runs]
    return [way.words for way in hold if none_broken([*(small if way.norm else ()), *near], way)]


def _with_small_values(example: Example) -> Example:
    return dataclasses.replace(example, case=dataclasses.replace(example.case, values="small")) if _normed(example) else example


def _normed(example: Example) -> bool:
    case = example.case
    return isinstance(case, LayerCase | TraceCase) or (isinstance(case, Case | PoolCase) and case.qk_norm)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Something that an adapter might declare: in words, as attributes of the adapter, and as words of a run or of its case."""

    words: str
    declared: dict[str, Any] = dataclasses.field(default_factory=dict)
    products: str = ""
    norm: bool = False

    def drawn(self, run: Run) -> Run:
        """The run with the words of the declared norm in its case, which then has other numbers if its values are small."""
        case = run.example.case
        if not (self.norm and _normed(run.example)):
            return run
        graded = case.dtype == "fp16" and isinstance(case, Case | LayerCase)
        forward = {"backward": False} if graded and overflows(*self.declared.values()) else {}
        case = dataclasses.replace(case, **self.declared, **forward)
        return dataclasses.replace(run, example=dataclasses.replace(run.example, case=case))

    def of(self, run: Run) -> Run:
        """The run with what is declared about its products."""
        return dataclasses.replace(run, products=self.products) if self.products else run


def _ways(described: Described, runs: Sequence[Run]) -> list[Declaration]:
    """What the adapter might declare. LONG_CHUNKS are tried if a sequence is longer than LONG, and other norms if runs have one."""
    domain = described.domain.of_call
    has_norm = isinstance(domain, LayerDomain | TraceDomain) or (isinstance(domain, Domain) and domain.qk_norm)
    normed = has_norm and all(_normed(run.example) for run in runs)
    return [*(_norms(domain) if normed else ()), *_roundings(described, runs)]  # the more specific first, as the report has them


def _norms(domain: Any) -> Iterator[Declaration]:
    """The norms of q and k that the domain does not have."""
    for form, eps in itertools.product(NORM_FORMS, NORM_EPS):
        if form not in domain.qk_norm_forms or eps not in domain.qk_norm_eps:
            words = [f"qk_norm_eps = {(eps,)}"] * ((eps,) != domain.qk_norm_eps)
            words += [f"qk_norm_forms = {(form,)}"] * ((form,) != domain.qk_norm_forms)
            yield Declaration(f"{' and '.join(words)} in its domain", {"qk_norm_eps": eps, "qk_norm_form": form}, norm=True)


def _roundings(described: Described, runs: Sequence[Run]) -> list[Declaration]:
    if described.algorithm == "chunkwise":
        ways = [Declaration("folds = True", {"folds": True})] if described.domain.operation not in ("kda", "delta_rule") else []
        ways.append(Declaration("chunk = None", {"chunk": None}))
        longest = max((length for run in runs for length in getattr(run.example.case, "lengths", ())), default=0)
        ways += [Declaration(f"chunk = {chunk}", {"chunk": chunk}) for chunk in LONG_CHUNKS if longest > LONG]
        if described.products == "ieee" and all(run.device != "cpu" for run in runs):
            ways.append(Declaration("products = 'tf32'", products="tf32"))
        return ways
    if described.algorithm == "recurrent":
        return [Declaration("stores = True", {"stores": True}), Declaration("algorithm = 'chunkwise'", {"algorithm": "chunkwise"})]
    if described.domain.operation == "causal_conv1d" and not described.domain.backward:
        return [Declaration("rounds_products = True", {"rounds_products": True})]
    return []


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit that a domain might declare.

    - `words` name it. `excludes` says whether it excludes an example.
    - `inside` returns examples like an excluded one that the limit allows. All of them must hold.
    - `fields` are fields of the domain that these examples need.
    - With `raised`, the limit is tried only for calls that raise.
    """

    words: str
    excludes: Callable[[Example], bool]
    inside: Callable[[Example], Sequence[Example]]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    raised: bool = False


def would_hold_within(
    described: Described,
    runs: Sequence[Run],
    outcome: Outcome,
    worker: Answering,
    store: Store,
    more: Callable[[], bool] = lambda: True,
    others: Callable[[], Sequence[Run]] = list,
    defects: KnownDefects = NO_DEFECTS,
) -> list[str]:
    """Limits of the domain, as text such as "nothing = False", each of which alone would exclude all these broken runs.

    The same runs as the limit allows them must hold, and of the runs that `others()` returns none that the limit allows may be
    broken. Only the adapter's author knows whether the limit is meant.
    """
    domain = described.domain.of_call
    raised = outcome.kind is FailureKind.RAISED
    known = _limits(domain, pool=domain is not described.domain) if isinstance(domain, Domain) else ()
    limits = [limit for limit in known if raised or not limit.raised]
    if min(max(getattr(run.example.case, "lengths", (0,))) for run in runs) != FEWEST:  # a single run of more tokens is no reason
        limits = [limit for limit in limits if limit.words != ONE_TOKEN]
    limits = [limit for limit in limits if all(limit.excludes(run.example) for run in runs)]

    def verdicts(asked: Sequence[Run], limit: Limit) -> list[Verdict]:
        declared = {"domain": limit.fields} if limit.fields else {}
        return [ask(run, worker, store, declared, defects).verdict if more() else Verdict.UNKNOWN for run in asked]

    def holds(limit: Limit) -> bool:
        asked = [
            dataclasses.replace(run, example=example)
            for run in runs
            for example in limit.inside(run.example)
            if _accepted(run.the_law, example)
        ]
        return bool(asked) and {*verdicts(asked, limit)} == {Verdict.HOLDS}

    limits = [limit for limit in limits if holds(limit)]
    near = others() if limits else []
    return [
        f"{limit.words} in its domain"
        for limit in limits
        if not {Verdict.BROKEN, Verdict.UNKNOWN} & {*verdicts([run for run in near if not limit.excludes(run.example)], limit)}
    ]


def _accepted(law: Law, example: Example) -> bool:
    try:
        law.accept(example)
    except ValueError:
        return False
    return True


def _with_words(example: Example, **words: Any) -> list[Example]:
    """The example with other words of its case; nothing if these are not legal."""
    try:
        return [dataclasses.replace(example, case=dataclasses.replace(example.case, **words))]
    except ValueError:
        return []


def _limits(domain: Domain, *, pool: bool) -> Iterator[Limit]:
    """The limits that a domain of rules, or of the rule of a pool, might declare and does not."""

    def without_tokens(example: Example) -> bool:
        return not sum(example.case.lengths)

    def other_views(example: Example) -> bool:
        return example.variant in {*VIEWS, "far_heads"} - {*NEIGHBOURS_LAST}

    def doubled_inside(example: Example) -> bool:
        return example.case.beta == "two" and example.case.in_kernel in ("beta", "both")

    def one_dtype(example: Example) -> bool:
        return example.case.in_kernel in ("gate", "both") and example.case.parameter_dtype != "mixed"

    def several_tokens(example: Example) -> bool:
        longest: int = max(example.case.lengths)
        return longest > 1

    def with_tokens(example: Example) -> list[Example]:
        return _with_words(example, lengths=(domain.length_step,) * len(example.case.lengths))

    def in_these_views(example: Example) -> list[Example]:
        return [dataclasses.replace(example, variant=how) for how in NEIGHBOURS_LAST]

    def beta_given(example: Example) -> list[Example]:
        return _with_words(example, in_kernel={"beta": "none", "both": "gate"}[example.case.in_kernel])

    def single_tokens(example: Example) -> list[Example]:
        return _with_words(example, lengths=tuple(min(length, 1) for length in example.case.lengths))

    if domain.nothing and not pool:
        yield Limit("nothing = False", without_tokens, with_tokens)
    if domain.views is True and not pool:
        yield Limit(f"views = {NEIGHBOURS_LAST}", other_views, in_these_views)
    if domain.negative_eigenvalues is True and {*domain.in_kernel} & {"none", "gate"}:
        yield Limit("negative_eigenvalues = ('given',)", doubled_inside, beta_given)
    if "mixed" not in domain.parameter_dtypes:
        fields = {"parameter_dtypes": ("mixed",)}
        mixed = functools.partial(_with_words, parameter_dtype="mixed")
        yield Limit("parameter_dtypes = ('mixed',)", one_dtype, mixed, fields, raised=True)
    if domain.longest is None and domain.length_step == 1 and not pool:
        yield Limit(ONE_TOKEN, several_tokens, single_tokens, raised=True)


@dataclasses.dataclass(frozen=True)
class Explained:
    """The smallest run that fails as a broken run does, its outcome, how it was found, and whether it `repeats`.

    `repeats` is YES if the smallest run fails in a fresh process; AFRESH if it fails there and not in the process that has just run
    it; NO if it does not fail there; "" if the check was stopped before.
    """

    run: Run
    outcome: Outcome
    small: Shrunk
    repeats: str


def explain_repeating(
    run: Run,
    outcome: Outcome,
    worker: Answering,
    store: Store,
    defects: KnownDefects,
    stopped: threading.Event,
    domain: Any = None,
) -> Explained:
    """Shrink a broken run (`explain`), and run the smallest case in a fresh process, as a person will who repeats its line.

    A run that does not fail again where it was found is not shrunk there. If it fails in a fresh process, each smaller case is run
    in one. Otherwise nothing is shrunk, because each answer would be chance. If the smallest case does not fail in a fresh process
    and the found one does, the found one stands. A law about what a process keeps, and a crash or a hang, have been confirmed in a
    fresh process already.
    """

    def fails(run: Run, *, fresh: bool) -> bool:
        if fresh:
            worker.end()
        return ask(run, worker, store, defects=defects).verdict is Verdict.BROKEN

    confirmed = outcome.lost or outcome.kind is FailureKind.SANITIZER or (run.the_law.of_process and isinstance(worker, Worker))
    whole = Explained(run, outcome, Shrunk(run.example, (), 0, finished=True), NO)
    afresh = not confirmed and not stopped.is_set() and not fails(run, fresh=False)
    if afresh and not fails(run, fresh=True):
        return whole
    small, best = explain(run.the_law, run, outcome, worker, store, defects, stopped, limit_s(run), domain, afresh=afresh)
    smallest = Explained(dataclasses.replace(run, example=small.example), best, small, AFRESH if afresh else YES)
    if confirmed or afresh:
        return smallest
    if stopped.is_set():
        return dataclasses.replace(smallest, repeats="")
    if fails(smallest.run, fresh=True):
        return smallest
    if smallest.run != run and fails(run, fresh=True):
        return dataclasses.replace(whole, repeats=YES)
    return dataclasses.replace(smallest, small=dataclasses.replace(small, neighbours=(), others=()), repeats=NO)


class Budget:
    """What shrinking may spend: `runs` runs and `cpu_s` CPU seconds of the worker, and in any case WALL times as many seconds.

    A run that loses the worker counts as LOST_S seconds, or as the deadline if it hangs.
    """

    def __init__(self, runs: int, cpu_s: float, deadline_s: float, stopped: threading.Event) -> None:
        self._runs, self._cpu_s, self._deadline_s, self._stopped = runs, cpu_s, deadline_s, stopped
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

    def left(self, wait_s: float = 0.0) -> bool:
        """Whether one more run may begin that takes at least `wait_s` seconds."""
        return not self._stopped.is_set() and not self.over(wait_s)

    def over(self, wait_s: float = 0.0) -> str:
        """The limit that is reached, in words, or ""."""
        if self._spent_runs >= self._runs:
            return f"{self._runs} runs"
        if self._spent_s + wait_s >= self._cpu_s:
            return f"{self._cpu_s:g} s" if self._hung or wait_s else f"{self._cpu_s:g} s of CPU time"
        if time.monotonic() - self._start >= WALL * self._cpu_s:
            return f"{WALL * self._cpu_s:g} s of waiting"
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
) -> tuple[Shrunk, Outcome]:
    """The smallest example found that fails as the broken run does, and its outcome.

    We do not run candidates outside the `domain`, or candidates that a known defect covers whatever their findings are.
    Candidates whose findings turn out to be a known defect do not count as failures. Candidates that look like a known defect of
    another adapter or version do not count either, unless the found case looks like it too. There are at most SHRINK_RUNS runs,
    in at most `most_s` CPU seconds of the worker. If the found case hangs, no run begins whose deadline is later than that: with
    the default deadline of 120 s, a hang is not shrunk. With `afresh`, each run has a new process.

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
    budget = Budget(SHRINK_RUNS, most_s, worker.deadline_s, stopped)
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
            outcomes[example] = ask_afresh(candidate, worker, store, defects, always=afresh)
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
