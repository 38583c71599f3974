"""Shrinking: find the smallest case that still fails, by making the case simpler word by word.

Hypothesis draws the cases, but its shrinker is not used, for three reasons:

- A line may come from anywhere (another host, a colleague, a file) and must shrink without the engine that drew it.
- Every candidate costs one run of the kernel: half a second if it is interpreted, many seconds for a new compile key on a GPU. So
  there must be few candidates, in a good order.
- The candidates of the last pass all hold. They are the neighbours in a report, which show what triggers the failure.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from properties.books import book_of
from properties.laws.law import Law
from properties.words.example import Example
from properties.words.smaller import Changes, below
from properties.words.word import text_of

DATA = ("values", "gate", "beta", "scale", "eps")  # words that decide which numbers a case has, and not what is computed
ORDINARY = {"values": "ordinary", "beta": "ordinary", "scale": "default"}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
SHORT, CHUNK = 8, 64  # no kernel has chunks of fewer tokens, and few have longer ones
SEEDS = 4  # of so many other seeds a similar case has the numbers
NONE: Mapping[str, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The smallest failing example found, and its neighbours: examples that are one step simpler and hold.

    `runs` is the number of candidates that were run. `finished` is false if a limit ended the search, which `limit` says in words.
    `others` are changes of words that were fixed, with which the example fails too.
    """

    example: Example
    neighbours: tuple[tuple[str, str], ...]
    runs: int
    finished: bool
    others: tuple[str, ...] = ()
    limit: str = ""


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

    Some words are only legal together, such as several lengths with packed=yes, and some act only together (`Smaller.beside`), such
    as a trace and the slots for its requests. They are restored together. The seed is left as it is, because with other numbers a
    failure may vanish by chance.
    """
    case, old, beside = small.case, found.case, book_of(found.case).smaller.beside
    differ = [field.name for field in dataclasses.fields(old) if getattr(case, field.name) != getattr(old, field.name)]
    for name in differ:
        needed = {name, *beside.get(name, ())}
        for names in (needed, *({*needed, other} for other in differ if other not in needed)) if name != "seed" else ():
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

    Each item is the name, the largest size, and the examples. If all of them hold, small sizes show another defect than large ones.
    One size alone says less, since a defect may depend on the remainder: whether the last chunk of a sequence is full, or the last
    group of sequences. So lengths of an item include the remainders of the found lengths, and two neighbours; numbers of sequences
    and widths of a convolution are two neighbours. Examples outside the domain are omitted. An empty sequence stays empty if the
    found case has one too: as a longer sequence it would not be what fails.
    """
    case, most, step = small.case, sizes(found.case), _step(domain)
    for name, size in sizes(case).items():
        if name == "lengths" and size == 0 in found.case.lengths:
            continue
        for values in _alike_lengths(size, found.case.lengths, step) if name == "lengths" else _neighbours(size, most[name]):
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
    """At most three powers of two above `size` and below `most`."""
    powers = [power for power in (*WIDTHS, 128, 256, 512, 1024, 2048) if size < power < most]
    return [*dict.fromkeys((powers[0], powers[len(powers) // 2], powers[-1]))] if powers else []


def _neighbours(size: int, most: int) -> list[tuple[int, ...]]:
    """At most four pairs of neighbouring numbers above `size` and below `most`, or the only number between them."""
    if most - size == 2:
        return [(size + 1,)]
    numbers = dict.fromkeys((*_above(size, most), most - 2))
    return [(number, number + 1) for number in numbers if size < number < most - 1]


def _alike_lengths(size: int, found: tuple[int, ...], step: int) -> list[tuple[int, ...]]:
    """At most four tuples of lengths above `size` and below the longest found one, multiples of `step`, in increasing order.

    From SHORT on, a tuple has a length with the remainder, modulo a chunk, of each found length (of at most three), and the
    neighbour of the largest. Chunks are at most CHUNK long.
    """
    most = max(found)
    chunk = next((power for power in reversed(WIDTHS) if SHORT <= power <= CHUNK and 2 * power <= most), 1)
    remainders = [*dict.fromkeys(length % chunk for length in (most, min(found), *found) if length)][:3]
    tuples: dict[tuple[int, ...], None] = {}
    for power in (*_above(size, most), most - 1 - chunk):
        if power < SHORT or chunk == 1:
            values = {power, power + step}
        else:
            values = {power + (remainder - power) % chunk for remainder in remainders}
            values.add(max(values) + step)
        lengths = tuple(sorted({-(-value // step) * step for value in values}))
        if size < lengths[0] and lengths[-1] < most and len(lengths) > 1:
            tuples[lengths] = None
    return [*tuples]


def with_ordinary_numbers(law: Law, example: Example, domain: Any = None) -> Example | None:
    """The example with ordinary values and betas and the default scale, or None if that is not legal or outside the domain."""
    words = {name: getattr(example.case, name, None) for name in ORDINARY}
    change = {name: ORDINARY[name] for name, word in words.items() if isinstance(word, str)}
    ordinary = _changed(law, example, change, domain)
    return ordinary if ordinary is not None and _inside(law, ordinary, domain) else None


def similar(law: Law, example: Example, domain: Any = None) -> Iterator[Example]:
    """Examples inside the domain with the words of a case but for one: other seeds, then other words that decide its numbers."""
    case = example.case
    seeds: list[tuple[str, Any]] = [("seed", (case.seed + number) % 2**32) for number in range(1, SEEDS + 1)]
    words = [[(name, value) for value in case.CHOICES.get(name, ())] for name in (*DATA, "state", "dtype")]
    for name, value in (*seeds, *(pair for turn in itertools.zip_longest(*words) for pair in turn if pair is not None)):
        changed = _changed(law, example, {name: value}, domain) if getattr(case, name, value) != value else None
        if changed is not None and _inside(law, changed, domain):
            yield changed


def one_step(law: Law, example: Example, domain: Any = None) -> Iterator[list[tuple[str, Example]]]:
    """The candidates that differ from the example in one step, for each aspect: simpler ones, then those of `Smaller.telling`."""
    for aspect, _ in _aspects(law, example, domain):
        yield [*aspect(example)]
    for telling in book_of(example.case).smaller.telling:
        yield [*_of_case(telling, law, domain)(example)]


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


def _step(domain: Any) -> int:
    """The number of tokens of which every length is a multiple; 1 without a domain."""
    return 1 if domain is None else domain.length_step


def _allowed(law: Law, example: Example, domain: Any) -> Example:
    """The example with its place rounded up to a multiple of the domain's `length_step` if the law may act only there."""
    step = _step(domain)
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
    of_case = functools.partial(_of_case, law=law, domain=domain)

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


def _of_case(changes: Callable[[Any], Changes], law: Law, domain: Any) -> Callable[[Example], Steps]:
    """A function that yields the legal candidates inside the domain that come from changes of an example's case."""
    step = _step(domain)

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
