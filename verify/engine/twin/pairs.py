"""Calls two implementations with the same cases, judges both, and measures and explains their difference."""

import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from oracles.tolerance import bound
from properties.books import book_of
from properties.laws.law import Results, token_output
from properties.laws.promises import PROMISES
from properties.words.example import Example
from verify.engine.across import BROKEN, HOLDS, NOT, SiteVerdict, SiteWorkers, everywhere
from verify.engine.twin.cases import carries, declared_for, suited
from verify.engine.twin.causes import SIDES, Cause, causes_of, changes_of
from verify.engine.twin.measures import Drift, drift_of
from verify.execution.line import Run
from verify.execution.twins import ALONE, EXPLAINED, PARTS, STEPS, TURNED, WAYS, WHOLE, between, read
from verify.process.messages import Way, Went

Tell = Callable[[str, int, int], None]
DEADLINE_S, PATIENT = 240.0, 4096  # for a call in one way; a case of more tokens gets more, in proportion
EXPLAINS = 0.3  # a cause that explains less of the squared difference is not named
# Promises about bits, and the laws that judge them in the books that have these laws.
JUDGED = {**PROMISES, "deterministic": "again", "position_independent": "batch"}
OF_LAYERS = {"split_invariant": "cache", "decode_equals_prefill": "cache", "deterministic": "memory"}


class Relation(enum.StrEnum):
    """What the two are to each other."""

    SAME = "same bits"
    ROUNDING = "both within rounding"
    WRONG = "wrong"
    UNDECIDED = "undecided"


@dataclasses.dataclass(frozen=True)
class Side:
    """The workers of an implementation, and its adapter."""

    workers: SiteWorkers
    spec: str
    domain: Any  # of the calls that twin makes


@dataclasses.dataclass(frozen=True)
class TwinCase:
    """A case of both sides: the lines of their law `oracle`, and the distance of each from the truth in multiples of its tolerance.

    `y` is the output that is compared by token, and `drift` says how far it is apart; it is None if a side returned nothing.
    `unequal` has for each output the share of numbers that differ. `left` has, in words, the ways in which a side was not called.
    `absent` are the sides that returned nothing.
    """

    lines: tuple[str, ...]
    cells: tuple[SiteVerdict, ...]
    y: str
    drift: Drift | None = None
    unequal: dict[str, float] = dataclasses.field(default_factory=dict)
    left: list[str] = dataclasses.field(default_factory=list)
    absent: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A promise about bits that both sides declare, the law that judges it, and what the law is on each side."""

    promise: str
    law: str
    cells: tuple[SiteVerdict, ...]


@dataclasses.dataclass(frozen=True)
class Twins:
    """What was found about two implementations. `causes` explain the difference in the `widest` case, the largest share first."""

    pairs: list[TwinCase]
    promises: list[Kept]
    causes: list[Cause] = dataclasses.field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """The sides with an error over its tolerance, or that break a promise which both declare."""
        cells = [pair.cells for pair in self.pairs] + [kept.cells for kept in self.promises]
        return [side for number, side in enumerate(SIDES) if any(both[number].verdict == BROKEN for both in cells)]

    @property
    def answer(self) -> Relation:
        """What the two are to each other."""
        if self.wrong:
            return Relation.WRONG
        if any(cell.verdict == NOT for pair in self.pairs for cell in pair.cells) or not all(pair.drift for pair in self.pairs):
            return Relation.UNDECIDED
        if any(cell.verdict == NOT for kept in self.promises for cell in kept.cells):
            return Relation.UNDECIDED
        return Relation.ROUNDING if any(any(pair.unequal.values()) for pair in self.pairs) else Relation.SAME

    @property
    def widest(self) -> TwinCase:
        """The case with the largest difference, in which the cause is looked for."""
        return max(self.pairs, key=lambda pair: pair.drift.largest if pair.drift else -1.0)

    def distance(self, number: int) -> SiteVerdict:
        """What the law `oracle` is on one side: the worst of its cases."""
        return max((pair.cells[number] for pair in self.pairs), key=_badness)

    @property
    def cause(self) -> Cause | None:
        """What explains the most, if it explains enough."""
        return self.causes[0] if self.causes and self.causes[0].share >= EXPLAINS else None


def twins(
    sides: Sequence[Side],
    cases: Sequence[Any],
    promises: Sequence[Sequence[Run]],
    runs: tuple[str, str],
    folder: str,
    workers: int,
    tell: Tell,
) -> Twins:
    """Call and judge both sides with each case. The processes have ended afterwards.

    `runs` has the device and the word `tune` of their lines. `promises` are the lines of the laws that judge the promises, for each
    side. Results are written to files in `folder`. So many sides are asked at a time.
    """

    def column(one: SiteWorkers) -> tuple[list[_Case], dict[str, SiteVerdict]]:
        number = [side.workers for side in sides].index(one)
        name, side = SIDES[number], sides[number]
        found = []
        for which, case in enumerate(cases, 1):
            step = functools.partial(tell, f"{name}, case {which}")
            found.append(_called(side, case, runs, os.path.join(folder, f"{number}-{which}"), name, step))
        return found, _worst(one, promises[number], functools.partial(tell, f"{name}, promises"))

    (first, kept), (second, other) = everywhere([side.workers for side in sides], column, workers)
    none = SiteVerdict(NOT, reason="its law has no case")
    judged = [Kept(name, law, (kept.get(law, none), other.get(law, none))) for name, law in shared_promises(sides).items()]
    calls = list(zip(cases, first, second, strict=True))
    found = Twins([_pair(*call) for call in calls], judged)
    widest = found.pairs.index(found.widest)
    causes = list[Cause]()
    if found.widest.unequal.get(found.widest.y):
        tell("causes", 0, 1)
        causes = _causes(*calls[widest])
    return dataclasses.replace(found, causes=causes)


@dataclasses.dataclass(frozen=True)
class _Case:
    """A case of one side: its line, how far it is from the truth, its results in each way, and why there are none in others."""

    line: str
    cell: SiteVerdict
    results: dict[str, Results]
    left: list[str]


def _called(side: Side, case: Any, runs: tuple[str, str], file: str, name: str, tell: Callable[[int, int], None]) -> _Case:
    device, run, declared = runs[0], run_of(side, case, runs), declared_for(case, side.domain)
    found = _Case(str(run), side.workers.cell(run, declared), {}, [])
    left_out = (ALONE, TURNED) * (len(case.lengths) == 1) + (PARTS, STEPS) * (not carries(run.example.case))
    ways = [way for way in WAYS if way not in left_out and found.cell.verdict != NOT]
    for done, way in enumerate(ways, 1):
        question = Way(str(side.workers.here(run)), way, f"{file}-{way}.npz", declared)
        answer = side.workers.ask(device, question, Went, DEADLINE_S * max(1.0, case.tokens / PATIENT))
        tell(done, len(ways))
        if isinstance(answer, Went) and not answer.reason:
            found.results[way] = read(f"{file}-{way}.npz", answer.dtypes)
        else:
            found.left.append(f"{name}, {way}: {answer if isinstance(answer, str) else answer.reason}")
            if way == WHOLE:
                break
    return found


def run_of(side: Side, case: Any, runs: tuple[str, str]) -> Run:
    """The line of a side's law `oracle` for a case. `runs` has its device and its word `tune`."""
    device, tune = runs
    products = side.workers.described[side.spec].products if device == "cuda" else "ieee"
    return Run("oracle", side.spec, Example(suited(case, side.domain)), products, device, tune)


def _worst(one: SiteWorkers, runs: Sequence[Run], tell: Callable[[int, int], None]) -> dict[str, SiteVerdict]:
    """What each law is in its lines: broken if one is, and not asked if none could be."""
    cells: dict[str, list[SiteVerdict]] = {}
    for done, run in enumerate(runs, 1):
        cells.setdefault(run.law, []).append(one.cell(run))
        tell(done, len(runs))
    decided = {law: [cell for cell in of_law if cell.verdict != NOT] or of_law for law, of_law in cells.items()}
    return {law: max(of_law, key=_badness) for law, of_law in decided.items()}


def _badness(cell: SiteVerdict) -> tuple[int, float]:
    return (HOLDS, NOT, BROKEN).index(cell.verdict), cell.ratio


def _pair(case: Any, *sides: _Case) -> TwinCase:
    y, left = token_output(case.spec), [words for side in sides for words in side.left]
    pair = TwinCase(tuple(side.line for side in sides), tuple(side.cell for side in sides), y, left=left)
    if absent := [name for name, side in zip(SIDES, sides, strict=True) if WHOLE not in side.results]:
        return dataclasses.replace(pair, absent=absent)
    one, other = (side.results[WHOLE] for side in sides)
    unequal = {name: float((one[name].double() != other[name].double()).double().mean()) for name in one if name in other}
    inputs = case.inputs("cpu")
    truth = bound.truth(case.spec_of(inputs), inputs)
    return dataclasses.replace(pair, drift=drift_of(one[y], other[y], truth[y]), unequal=unequal)


def _causes(case: Any, *sides: _Case) -> list[Cause]:
    y = token_output(case.spec)
    inputs = between(case.spec, case.inputs("cpu"), 0, min(EXPLAINED, case.lengths[0]))  # later tokens change no earlier output
    truth = bound.truth(case.spec_of(inputs), inputs)
    one, other = (side.results[WHOLE][y][:, :EXPLAINED].double() for side in sides)
    return causes_of(one, other, changes_of(case, inputs, [side.results for side in sides], truth))


def shared_promises(sides: Sequence[Side]) -> dict[str, str]:
    """The promises about bits that both sides declare, and the law that judges each; none for kernels on pools."""
    first, second = (side.domain for side in sides)
    laws = book_of(first).laws
    judged = JUDGED | ({} if "cut" in laws else OF_LAYERS)
    if any(side.workers.described[side.spec].domain is not side.domain for side in sides):
        return {}
    return {
        name: law for name, law in judged.items() if law in laws and getattr(first, name, False) and getattr(second, name, False)
    }
