"""Pairs of words: which values of two words come together in an example.

Most faults that need more than one condition need two (D. R. Kuhn, D. R. Wallace and A. M. Gallo, "Software fault interactions and
implications for software testing", IEEE Transactions on Software Engineering 30(6), 2004). So a check of few cases should have as
many pairs as it can (verify/engine/drawing.py).
"""

import bisect
import itertools

from properties.words.example import Example

Trait = tuple[str, object]  # the name of a word, and its value or the class of its value

CLASSES = (1, 2, 4, 16, 64, 256)  # the least number of each class of numbers, after that of 0


def traits_of(example: Example) -> list[Trait]:
    """Return what an example's law and case say, word by word.

    A number stands for its class, and lengths for the classes of their count, the longest and the shortest one. Words that identify
    a case, such as its seed, are left out.
    """
    case = example.case
    found: list[Trait] = [("variant", example.variant), *case.further_traits()]
    for name, word in case.WORDS.items():
        value = getattr(case, name)
        if isinstance(value, tuple):
            numbers = {"count": len(value), "longest": max(value, default=0), "shortest": min(value, default=0)}
            found += [(f"{name} {part}", _class_of(number)) for part, number in numbers.items()]
        elif isinstance(value, int) and not isinstance(value, bool):
            found += [(name, _class_of(value))] if name != "seed" else []
        elif not isinstance(value, str) or word.choices or word.key:
            found.append((name, value))
    return found


def pairs_of(example: Example) -> set[tuple[Trait, Trait]]:
    """Return the pairs of an example's traits."""
    return {*itertools.combinations(traits_of(example), 2)}


def _class_of(number: int) -> int:
    return bisect.bisect_right(CLASSES, number)
