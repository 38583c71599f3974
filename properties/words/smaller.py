"""How cases shrink: what each kind of case says of it, and the steps that several kinds share."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from properties.words.line import Line
from properties.words.options import text_of_values, values_of
from properties.words.word import text_of

Changes = Iterator[tuple[str, dict[str, Any]]]  # for each step, its words and the fields that it changes


@dataclasses.dataclass(frozen=True)
class Smaller:
    """How cases of one kind shrink.

    `case` is the class of the cases, whose words have the values to try, the simplest first. `beside` has, for a word that acts
    only together with others, those others: the word gets the value of a larger case only together with them. `telling` yields
    changes that make a case no simpler, but may make it hold and so tell what the failure needs: values of options, and shapes that
    are larger.
    """

    case: type[Line]
    shapes: tuple[Callable[[Any], Changes], ...]
    widths: tuple[str, ...]
    beside: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    telling: tuple[Callable[[Any], Changes], ...] = ()

    @property
    def simplest(self) -> dict[str, tuple[Any, ...]]:
        """The values to try for each option. Last come words that change the size of every error: dtypes, then numbers."""
        words = {name: word.simplest for name, word in self.case.WORDS.items() if word.simplest}
        return dict(sorted(words.items(), key=lambda word: (type(word[1][0]) is int, word[0] in ("backward", "dtype"))))


HEADS = ((1, 1), (1, 2), (2, 2), (2, 4))
FEW, MANY = 8, 32  # of so many items each is looked at alone; of more parts only the first and the last one is left out
BLOCKS = (16, 32, 64)  # sizes of the chunks of most kernels


def fewer_sequences(case: Any) -> Changes:
    """Yield one sequence of all tokens, single sequences, fewer sequences, and neighbours joined."""
    lengths = case.lengths
    if len(lengths) > 1:
        yield of_lengths((sum(lengths),))
        for length in dict.fromkeys((*lengths[:FEW], max(lengths), min(lengths))):
            yield of_lengths((length,))
        for fewer in without_some(lengths):
            yield of_lengths(fewer)
        for gone in range(1, min(len(lengths), FEW)):
            yield of_lengths((*lengths[: gone - 1], lengths[gone - 1] + lengths[gone], *lengths[gone + 1 :]))


def without_some(items: Sequence[Any]) -> Iterator[Any]:
    """Yield the items without a half of them, without a quarter, ..., without one. Of many items, only the first and last ones."""
    size = len(items) // 2
    while size:
        starts = range(0, len(items), size)
        for start in starts if len(starts) <= MANY else (starts[0], starts[-1]):
            if len(left := (*items[:start], *items[start + size :])) > 0:
                yield left
        size //= 2


def unpacked(case: Any) -> Changes:
    """Yield the case as a batch."""
    if case.packed:
        states = {name: "each" for name in ("initial_states", "final_states") if getattr(case, name, "none") != "none"}
        yield "packed=no", {"packed": False, "offsets": "int64", **states}


def shorter_sequences(case: Any) -> Changes:
    """Yield shorter sequences: all of them in proportion, then cut to one length, then one at a time.

    Of over MANY, only the first and the last one come alone.
    """
    lengths = case.lengths
    if case.packed:
        divisor = math.gcd(*lengths) if len(lengths) > 1 else 0
        for part in below(divisor, 1):
            yield of_lengths(tuple(length // divisor * part for length in lengths))
        if len({*lengths} - {0}) > 1 or len(lengths) > 2:  # all of them at once
            for most in below(max(lengths), 1):
                yield of_lengths(tuple(min(length, most) for length in lengths))
        for row in range(len(lengths)) if len(lengths) <= MANY else (0, len(lengths) - 1):
            for shorter in (*below(lengths[row], 0), *blocks_below(lengths[row])):
                yield of_lengths((*lengths[:row], shorter, *lengths[row + 1 :]))
    else:
        for shorter in (*below(lengths[0], 0), *blocks_below(lengths[0])):
            yield of_lengths((shorter,) * len(lengths))


def of_lengths(lengths: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """Return the words of new lengths, and the field that they change."""
    return f"lengths={text_of(lengths)}", {"lengths": lengths}


def fewer_heads(case: Any) -> Changes:
    """Yield fewer heads."""
    for heads, value_heads in HEADS:
        if (value_heads, heads) < (case.value_heads, case.heads):
            yield f"heads={heads} value_heads={value_heads}", {"heads": heads, "value_heads": value_heads}


def fewer_options(case: Any) -> Changes:
    """Yield the case without options of the implementation, and without each of them."""
    values = values_of(case.options)
    without = [{*values} - {name} for name in values]
    for names in [set[str](), *without] if len(values) > 1 else without:
        fewer = text_of_values({name: value for name, value in values.items() if name in names})
        yield f"options={fewer}", {"options": fewer}


def longer_sequences(case: Any) -> Changes:
    """Yield the case with its longest sequences up to the next multiple of a chunk: there, a defect of partial chunks is gone."""
    longest = max(case.lengths)
    for length in next_multiples(longest):
        yield of_lengths(tuple(length if one == longest else one for one in case.lengths))


def next_multiples(length: int) -> list[int]:
    """Return the next multiples of BLOCKS above a length, the smallest first."""
    return sorted({(length // block + 1) * block for block in BLOCKS})


def other_values(**words: tuple[Any, ...]) -> Callable[[Any], Changes]:
    """Return a function that yields the changes to these values, one at a time."""

    def changes(case: Any) -> Changes:
        for name, value in itertools.chain.from_iterable(itertools.product([name], values) for name, values in words.items()):
            if getattr(case, name) != value:
                yield f"{name}={text_of(value)}", {name: value}

    return changes


def blocks_below(length: int) -> Iterator[int]:
    """Yield block sizes below a length: a defect that shows only at multiples of 64 has no threshold to bisect."""
    yield from (block for block in (16, 32, 64, 128) if block < length)


def below(number: int, least: int) -> Iterator[int]:
    """Yield numbers below `number`: first the least ones, then steps that halve, so that few runs find a threshold."""
    if number <= least:
        return
    yield least
    if least + 1 < number:
        yield least + 1
    step = (number - least) // 2
    while step:
        if least + 1 < number - step < number:
            yield number - step
        step //= 2
