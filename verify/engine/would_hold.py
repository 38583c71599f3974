"""What an adapter could declare so that broken runs would hold: other roundings, another norm of q and k, a limit of its domain."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oracles.norm import NORM_FORMS
from properties.laws.law import Law
from properties.laws.views import ARRANGED
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
from verify.engine.asking import Described, ask
from verify.execution.line import Run
from verify.findings.known import NO_DEFECTS, KnownDefects
from verify.findings.store import Store
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.ranks.group import Answering

NEIGHBOURS_LAST = ("sliced", "offset")  # the views whose last axis is contiguous, with stride 1
ONE_TOKEN, FEWEST = "longest = 1", 2  # this limit is tried if the smallest case has two tokens
LONG, LONG_CHUNKS = 128, (256, 512, 1024)  # shorter sequences do not show whether a chunk is longer than 128 tokens


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
        on_cpu = [run.device == "cpu" for run in runs]
        if described.products == "ieee" and not any(on_cpu):
            ways.append(Declaration("products = 'tf32'", products="tf32"))
        if described.products == "tf32" and all(on_cpu):  # there the declaration does not count: the interpreter has no TF32
            ways.append(Declaration("products = 'tf32' on a CPU too, as --products tf32 does", products="tf32"))
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
        return example.variant in {*VIEWS, *ARRANGED, "far_heads"} - {*NEIGHBOURS_LAST}

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
