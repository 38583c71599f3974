"""Shrinking: find the smallest case that still fails, by making the case simpler word by word.

Hypothesis draws the cases, but its shrinker is not used, for three reasons:

- A line may come from anywhere (another host, a colleague, a file) and must shrink without the engine that drew it.
- Every candidate costs one run of the kernel: half a second if it is interpreted, many seconds for a new compile key on a GPU. So
  there must be few candidates, in a good order.
- The candidates of the last pass all hold. They are the neighbours in a report, which show what triggers the failure.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from properties.books import book_of
from properties.cases.line import text_of
from properties.laws import Law
from properties.smaller import Changes, below
from properties.strategies import Example

DATA = ("values", "gate", "beta", "scale", "eps")  # words that decide which numbers a case has, and not what is computed
ORDINARY = {"values": "ordinary", "beta": "ordinary", "scale": "default"}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
SHORT = 8  # no kernel has blocks of fewer tokens
NONE: Mapping[str, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The smallest failing example found, and its neighbours: examples that are one step simpler and hold.

    `runs` is the number of candidates that were run. `finished` is false if the limit ended the search. `others` are changes of
    words that were fixed, with which the example fails too.
    """

    example: Example
    neighbours: tuple[tuple[str, str], ...]
    runs: int
    finished: bool
    others: tuple[str, ...] = ()


def shrink(
    example: Example,
    law: Law,
    fails: Callable[[Example], bool | None],
    more: Callable[[int], bool],
    fixed: Collection[str] = (),
    domain: Any = None,
    least: Mapping[str, int] = NONE,
) -> Shrunk:
    """The smallest example found for which `fails` is true. `fails` returns None for an undecided candidate.

    `more(runs)` returns whether to spend another run. One aspect after another is made as simple as possible, and the pass over all
    aspects repeats until none gets simpler. Going back to the first aspect after every success would test its threshold again each
    time, and would take three times as many runs.

    Candidates outside the `domain` are not run. The words in `fixed` keep their values. The sizes in `least` (see `sizes`) stay
    above these numbers. If a candidate does not fail with another value of a word or a width, this value is never taken later: it
    prevents the failure of a complex case, so it prevents this failure in simpler cases too, and a failure with it would show
    another defect.
    """
    seen: dict[Example, bool | None] = {}
    neighbours: list[tuple[str, str]] = []
    found, progress, refused = example.case, True, set[str]()
    while progress:
        progress, neighbours = False, []
        for aspect, shape in _aspects(law, example, domain):
            moved = True
            while moved:
                moved, passing = False, list[tuple[str, str]]()
                for what, candidate in aspect(example):
                    if any(getattr(candidate.case, name, None) != getattr(found, name, None) for name in fixed):
                        continue
                    if any(size <= least[name] for name, size in sizes(candidate.case).items() if name in least):
                        continue
                    if candidate not in seen:
                        if not more(len(seen)):
                            return Shrunk(example, tuple(dict.fromkeys(neighbours + passing)), len(seen), False)
                        seen[candidate] = fails(candidate)
                    if seen[candidate] and what not in refused:
                        example, moved, progress = candidate, True, True
                        break
                    refused |= set() if shape else {what}
                    if seen[candidate] is False:
                        passing.append((what, "holds"))
            neighbours += passing
    return Shrunk(example, tuple(dict.fromkeys(neighbours)), len(seen), True)


def restored(law: Law, small: Example, found: Example) -> Iterator[tuple[set[str], Example]]:
    """The small example with one word at the value that it has in the found one, for every word in which the two differ.

    Some words are only legal together, such as several lengths with packed=yes. They are restored together. The seed is left as it
    is, because with other numbers a failure may vanish by chance.
    """
    case, old = small.case, found.case
    differ = [field.name for field in dataclasses.fields(old) if getattr(case, field.name) != getattr(old, field.name)]
    for name in differ:
        for names in ({name}, *({name, other} for other in differ if other != name)) if name != "seed" else ():
            example = _changed(law, small, {word: getattr(old, word) for word in names})
            if example is not None:
                yield names, example
                break


def sizes(case: Any) -> dict[str, int]:
    """The sizes of a case: the number of sequences, the longest one, and the width of the convolution. Larger ones may hold."""
    lengths = getattr(case, "lengths", ())
    found = {"lengths": max(lengths), "sequences": len(lengths)} if lengths else {}
    return found | ({"conv_width": case.conv_width} if hasattr(case, "conv_width") else {})


def between(law: Law, small: Example, found: Example, domain: Any = None) -> Iterator[tuple[str, int, tuple[Example, ...]]]:
    """Examples like the small one, with one of its `sizes` larger, but smaller than in the found one.

    Each item is the name, the largest size, and the examples. They have two neighbouring lengths, one number of sequences or one
    width of a convolution. If both lengths hold, small sizes show another defect than large ones. One length says less, because
    the last block of a sequence may be complete or not. Examples outside the domain are omitted.
    """
    case, most, step = small.case, sizes(found.case), getattr(domain, "length_step", 1)
    for name, size in sizes(case).items():
        for values in _pairs(size, most[name], step) if name == "lengths" else [(value,) for value in _above(size, most[name])]:
            examples = []
            for value in values:
                change: dict[str, Any] = {name: value}
                if name == "sequences":
                    change = {"lengths": (case.lengths * value)[:value]}
                elif name == "lengths":
                    change = {"lengths": tuple(value if length == size else length for length in case.lengths)}
                example = _changed(law, small, change, domain)
                examples += [example] if example is not None and _inside(law, example, domain) else []
            if len(examples) == len(values):
                yield name, values[-1], tuple(examples)


def _above(size: int, most: int) -> list[int]:
    """At most four numbers above `size` and below `most`."""
    powers = [power for power in (*WIDTHS, 128, 256, 512) if size < power < most]
    some = [powers[0], powers[len(powers) // 2], powers[-1]] if powers else []
    return [number for number in dict.fromkeys((*some, most - 1)) if size < number < most]


def _pairs(size: int, most: int, step: int) -> list[tuple[int, int]]:
    """At most four pairs of neighbouring multiples of `step`, above `size` and below `most`.

    The pairs of large numbers begin one `step` above a power of two, because a length that is a multiple of a block often holds.
    """
    starts = [-(-power // step) * step + step * (power >= SHORT) for power in _above(size, most)[:-1]]
    numbers = dict.fromkeys((*starts, most - 2 * step))
    return [(number, number + step) for number in numbers if size < number and number + step < most]


def with_ordinary_numbers(law: Law, example: Example, domain: Any = None) -> Example | None:
    """The example with ordinary values and betas and the default scale, or None if that is not legal or outside the domain."""
    words = {name: getattr(example.case, name, None) for name in ORDINARY}
    change = {name: ORDINARY[name] for name, word in words.items() if isinstance(word, str)}
    ordinary = _changed(law, example, change, domain)
    return ordinary if ordinary is not None and _inside(law, ordinary, domain) else None


def simpler_in(law: Law, example: Example, names: Collection[str], domain: Any = None) -> Iterator[tuple[str, Example]]:
    """The candidates that differ from the example in these words alone."""
    for aspect, _ in _aspects(law, example, domain):
        for what, candidate in aspect(example):
            if {word.partition("=")[0] for word in what.split()} <= {*names}:
                yield what, candidate


def _changed(law: Law, example: Example, change: Mapping[str, Any], domain: Any = None) -> Example | None:
    """The example with some fields of its case changed, and its place moved to where the law can act. None if it is not legal."""
    try:
        changed = dataclasses.replace(example, case=dataclasses.replace(example.case, **change))
        if law.place is not None and example.at is not None and (places := law.place(changed.case)):
            changed = _allowed(law, dataclasses.replace(changed, at=min(max(example.at, places[0]), places[-1])), domain)
        law.accept(changed)
    except ValueError:
        return None
    return changed


def _allowed(law: Law, example: Example, domain: Any) -> Example:
    """The example with its place rounded up to a multiple of the domain's `length_step` if the law may act only there."""
    step = getattr(domain, "length_step", 1)
    if step == 1 or example.at is None or law.outside(domain, example) is None:
        return example
    return dataclasses.replace(example, at=-(-example.at // step) * step)


def other_numbers(case: Any, other: Any) -> bool:
    """Whether two cases differ in a word that decides which numbers a case has."""
    return any(getattr(case, name, None) != getattr(other, name, None) for name in DATA)


Steps = Iterator[tuple[str, Example]]


def _inside(law: Law, example: Example, domain: Any) -> bool:
    """Whether an example lies inside the domain, if there is one."""
    return domain is None or (domain.outside(example.case) or law.outside(domain, example)) is None


def _aspects(law: Law, example: Example, domain: Any) -> list[tuple[Callable[[Example], Steps], bool]]:
    """The aspects of an example that can be made simpler on their own, and whether each is a shape.

    Each yields legal candidates inside the domain with the words that changed, the largest simplification first. Lengths, and the
    tokens at which a law cuts, are rounded up to multiples of the domain's `length_step`. The words of DATA come last, because with
    other numbers other errors exceed their tolerances.
    """
    step = getattr(domain, "length_step", 1)

    def of_case(changes: Callable[[Any], Changes]) -> Callable[[Example], Steps]:
        def steps(example: Example) -> Steps:
            for what, change in changes(example.case):
                if step > 1 and "lengths" in change:
                    lengths = tuple(-(-length // step) * step for length in change["lengths"])
                    what, change = f"lengths={text_of(lengths)}", {**change, "lengths": lengths}
                    if lengths == example.case.lengths:
                        continue
                candidate = _changed(law, example, change, domain)
                if candidate is not None and _inside(law, candidate, domain):
                    yield what, candidate

        return steps

    def place(example: Example) -> Steps:
        if law.place is not None and example.at is not None:
            for at in below(example.at, law.place(example.case)[0]):
                candidate = _allowed(law, dataclasses.replace(example, at=at), domain)
                if candidate != example:
                    yield f"at={candidate.at}", candidate

    def variant(example: Example) -> Steps:
        for name in law.variants[: law.variants.index(example.variant)] if example.variant else ():
            candidate = dataclasses.replace(example, variant=name)
            try:
                law.accept(candidate)
            except ValueError:
                continue
            yield f"variant={name}", candidate

    smaller = book_of(example.case).smaller
    options: list[Callable[[Any], Changes]] = [
        functools.partial(_option, name, smaller.simplest) for name in smaller.simplest if name not in DATA
    ]
    widths = [functools.partial(_width, name) for name in smaller.widths]
    data = [functools.partial(_option, name, smaller.simplest) for name in smaller.simplest if name in DATA]
    words: list[Callable[[Any], Changes]] = [*options, *widths, *data, _seed]
    aspects = [*((of_case(shape), True) for shape in smaller.shapes), *((of_case(word), False) for word in words)]
    return [*aspects, (place, True), (variant, True)]


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
