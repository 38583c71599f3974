"""Kill tables: which law detects a wrong implementation when it is run alone, and how small the case must get."""

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest

from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.laws.law import Law
from properties.words.example import Example
from verify.engine import explaining, law_check
from verify.engine.check import Check
from verify.engine.drawing import batches, of_law, seeded
from verify.engine.profiles import PROFILES, Profile
from verify.engine.repeating import Explained
from verify.engine.shrink import Shrunk, shrink
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

SMALL = dataclasses.replace(PROFILES["quick"], large=False)  # of rows that are not shrunk; large cases take long
SHRUNK = 16  # the case of one row in so many is shrunk, because that takes longer than the rest


class Fewer(Profile):
    """A profile in which a base law gets only twice as many examples as the others."""

    def examples_of(self, law: Law) -> int:
        return self.examples * (2 if law.base else 1)


@dataclasses.dataclass(frozen=True)
class Kill:
    """The law that detects it, and the most that its smallest case may have: tokens of the longest sequence, and sequences.

    `short` says that only short cases show it, so that they are run first. Where few cases of the law can show it, one of `seeds`
    checks with different seeds must detect it. Where many cases of a check do not show it, `shown` has the seed of a check that
    detects it and the place of the example in `_examples`. They are tried first, and what they find is the same as without.
    """

    law: str
    tokens: int = 1
    sequences: int = 1
    shrinks: bool = True
    short: bool = False
    seeds: int = 1
    shown: tuple[int, int] | None = None

    def small(self, case: Any) -> bool:
        """Whether a case is as small as it must get."""
        return len(case.lengths) <= self.sequences and max(case.lengths) <= self.tokens


def rows(table: Mapping[Any, Iterable[Kill]]) -> list[Any]:
    """A parameter of pytest for each implementation, a class or its name, and law."""
    named = [(getattr(wrong, "__name__", wrong), kills) for wrong, kills in table.items()]
    kills = [(name, kill) for name, kills in named for kill in kills]
    return [
        pytest.param(name, dataclasses.replace(kill, shrinks=number % SHRUNK == 0), id=f"{name}-{kill.law}")
        for number, (name, kill) in enumerate(kills)
    ]


@contextlib.contextmanager
def unexplained(runs: int = 0) -> Iterator[None]:
    """A context in which a check shrinks a broken case in at most so many runs, and finds out nothing else about it.

    No worker is started to see whether the case repeats.
    """
    with (
        mock.patch.object(explaining, "SHRINK_RUNS", runs),
        mock.patch.object(explaining, "SPARE", 0.0),
        mock.patch.object(explaining, "between", return_value=[]),
        mock.patch.object(law_check, "explain_repeating", _shrunk_alone),
        mock.patch.object(law_check, "would_hold", return_value=[]),
        mock.patch.object(law_check, "with_ordinary_numbers", return_value=None),
    ):
        yield


def _shrunk_alone(run: Run, outcome: Outcome, *others: Any, **_: Any) -> Explained:
    *arguments, domain = others
    small, best = explaining.explain(run.the_law, run, outcome, *arguments, domain=domain)
    return Explained(dataclasses.replace(run, example=small.example), best, small, "")


def shrunk_until(
    kill: Kill,
    example: Example,
    law: Law,
    fails: Callable[[Example], bool | None],
    more: Callable[[int], bool],
    *others: Any,
) -> Shrunk:
    """What `shrink` returns if it must end at a case that is small enough. `others` are its further arguments."""
    smallest = [example]

    def failing(candidate: Example) -> bool | None:
        if answer := fails(candidate):
            smallest[0] = candidate
        return answer

    return shrink(example, law, failing, lambda runs: more(runs) and not kill.small(smallest[0].case), *others)


@functools.cache
def _examples(law: str, domain: Any, seed: int, count: int) -> list[Example]:
    """The examples that a check draws, those that take long last. Many implementations have one domain, so they are kept."""
    drawn: list[Example] = []
    of_law(book_of(domain).laws[law], domain, seed, count, drawn.append)
    return sorted(drawn, key=_takes_long)


def _takes_long(example: Example) -> tuple[bool, int]:
    """Whether the dtype is a half one, in which few errors are so large that no second look is needed; and the case's size."""
    case = example.case
    numbers = case.tokens * math.prod(getattr(case, name, 1) for name in ("value_heads", "key_dim", "value_dim", "width", "hidden"))
    return case.dtype != "fp32", (numbers > 2**13) + (numbers > 2**16)


@contextlib.contextmanager
def quick_first(kill: Kill) -> Iterator[None]:
    """A context in which a check runs the examples that it draws in another order, and one at a time."""

    def ordered(check: law_check.LawCheck, law: Law, count: int, most: int) -> Iterator[list[Example]]:
        state = check._state
        seed = state.settings.seed
        examples = _examples(law.name, state.described.domain, seed, count)
        if kill.short:
            examples = sorted(examples, key=lambda x: x.case.tokens)
        if kill.shown is not None and kill.shown[0] == seed:
            first = examples[kill.shown[1] % len(examples)]
            examples = sorted(examples, key=lambda x: x is not first)
        yield from ([x] for x in examples)

    with mock.patch.object(law_check.LawCheck, "_batches", ordered):
        yield


@contextlib.contextmanager
def small_ones(fits: Callable[[Any], bool]) -> Iterator[None]:
    """A context in which a check draws only cases that fit, unless all of those were blind."""

    def drawn(check: law_check.LawCheck, law: Law, count: int, most: int) -> Iterator[list[Example]]:
        state = check._state
        strategy = law.draw(state.described.domain).filter(lambda example: fits(example.case))
        yield from batches(functools.partial(seeded, strategy, mix_words(state.settings.seed, law.name), count), most)

    with mock.patch.object(law_check.LawCheck, "_batches", drawn):
        yield


def assert_killed_alone(spec: str, kill: Kill, worker: Worker, folder: pathlib.Path) -> LawReport:
    """The report of the law in the default profile: broken, its case small, and both of its lines kept.

    `spec` is an adapter, or the name of one in the zoo. Where the case is not shrunk, no case is large
    (tests/checks/test_sizes.py is about those), and those that take long come last.

    Shrinking begins at the first broken case that is drawn. It ends when the case is small enough. What else gets simpler, whether
    larger cases hold, and what an adapter might declare, is tested elsewhere.
    """
    store, adapter = Store(folder), spec if ":" in spec else f"zoo/{spec}"
    profile = PROFILES["quick"] if kill.shrinks else SMALL
    with (
        mock.patch.object(explaining, "shrink", functools.partial(shrunk_until, kill)),
        unexplained(explaining.SHRINK_RUNS if kill.shrinks else 0),
        contextlib.nullcontext() if kill.shrinks else quick_first(kill),
    ):
        for seed in sorted(range(kill.seeds), key=lambda seed: kill.shown is not None and seed != kill.shown[0]):
            with Check(Settings(adapter, [kill.law], profile, seed), [worker], store, defects=[]) as check:
                (report,) = check.run()
            if report.verdict is Verdict.BROKEN:
                break
    assert report.verdict is Verdict.BROKEN, f"{kill.law} lets {spec} live: {report.counts}"
    assert not kill.shrinks or kill.small(Run.parse(report.run).example.case), report.run
    findings = (store.folder / "findings.jsonl").read_text()
    assert report.run in findings
    assert report.first_run in findings
    return report
