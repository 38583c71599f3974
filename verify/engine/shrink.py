"""Shrinking: find the smallest case that still fails, by making the case simpler word by word.

Hypothesis draws the cases, but its shrinker is not used, for three reasons:

- A line may come from anywhere (another host, a colleague, a file) and must shrink without the engine that drew it.
- Every candidate costs one run of the kernel: half a second if it is interpreted, many seconds for a new compile key on a GPU. So
  there must be few candidates, in a good order.
- The candidates of the last pass all hold. They are the neighbours in a report, which show what triggers the failure.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from properties.books import book_of
from properties.cases.line import text_of
from properties.laws import Law
from properties.smaller import Changes, below
from properties.strategies import Example

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The smallest failing example found, and its neighbours: examples that are one step simpler and hold.

    `runs` is the number of candidates that were run. `finished` is false if the limit ended the search.
    """

    example: Example
    neighbours: tuple[tuple[str, str], ...]
    runs: int
    finished: bool


def shrink(example: Example, law: Law, fails: Callable[[Example], bool | None], more: Callable[[int], bool]) -> Shrunk:
    """The smallest example found for which `fails` is true. `fails` returns None for an undecided candidate.

    `more(runs)` returns whether to spend another run. One aspect after another is made as simple as possible, and the pass over all
    aspects repeats until none gets simpler. Going back to the first aspect after every success would test its threshold again each
    time, and would take three times as many runs.
    """
    seen: dict[Example, bool | None] = {}
    neighbours: list[tuple[str, str]] = []
    progress = True
    while progress:
        progress, neighbours = False, []
        for aspect in _aspects(law, example):
            moved = True
            while moved:
                moved, passing = False, list[tuple[str, str]]()
                for what, candidate in aspect(example):
                    if candidate not in seen:
                        if not more(len(seen)):
                            return Shrunk(example, tuple(dict.fromkeys(neighbours + passing)), len(seen), False)
                        seen[candidate] = fails(candidate)
                    if seen[candidate]:
                        example, moved, progress = candidate, True, True
                        break
                    if seen[candidate] is False:
                        passing.append((what, "holds"))
            neighbours += passing
    return Shrunk(example, tuple(dict.fromkeys(neighbours)), len(seen), True)


Steps = Iterator[tuple[str, Example]]


def _aspects(law: Law, example: Example) -> list[Callable[[Example], Steps]]:
    """The aspects of an example that can be made simpler on their own.

    Each yields legal candidates with the words that changed, the largest simplification first.
    """

    def of_case(changes: Callable[[Any], Changes]) -> Callable[[Example], Steps]:
        def steps(example: Example) -> Steps:
            for what, change in changes(example.case):
                try:
                    candidate = dataclasses.replace(example, case=dataclasses.replace(example.case, **change))
                    if law.place is not None and example.at is not None and (places := law.place(candidate.case)):
                        candidate = dataclasses.replace(candidate, at=min(max(example.at, places[0]), places[-1]))
                    law.accept(candidate)
                except ValueError:
                    continue
                yield what, candidate

        return steps

    def place(example: Example) -> Steps:
        if law.place is not None and example.at is not None:
            for at in below(example.at, law.place(example.case)[0]):
                yield f"at={at}", dataclasses.replace(example, at=at)

    def variant(example: Example) -> Steps:
        for name in law.variants[: law.variants.index(example.variant)] if example.variant else ():
            candidate = dataclasses.replace(example, variant=name)
            try:
                law.accept(candidate)
            except ValueError:
                continue
            yield f"variant={name}", candidate

    smaller = book_of(example.case).smaller
    changes: list[Callable[[Any], Changes]] = [*smaller.shapes]
    changes += [functools.partial(_option, name, smaller.simplest) for name in smaller.simplest]
    changes += [functools.partial(_width, name) for name in smaller.widths]
    return [*(of_case(change) for change in (*changes, _seed)), place, variant]


def _option(name: str, simplest: Mapping[str, tuple[Any, ...]], case: Any) -> Changes:
    for value in simplest[name]:
        if getattr(case, name) == value:
            return
        yield f"{name}={text_of(value)}", {name: value}


def _width(name: str, case: Any) -> Changes:
    for width in WIDTHS:
        if width < getattr(case, name):
            yield f"{name}={width}", {name: width}


def _seed(case: Any) -> Changes:
    if case.seed:
        yield "seed=0", {"seed": 0}
