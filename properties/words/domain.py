"""What the domains of all books share: names of choices, and checks of their fields."""

from collections.abc import Sequence
from typing import Any

from properties.words.line import MAX_TOKENS, MAX_WIDTH

VIEWS = ("sliced", "transposed", "offset", "expanded", "strided")
LARGEST = ("ordinary", "scaled", "large", "great")  # regimes of values, the smallest first; no other regime has larger ones
LEAST_LONGEST = 64  # the least `longest`: laws need lengths on both sides of a block of 16 or 32 tokens
OFFSETS = ("int64", "int32")
LARGE = ("", "chunks", "power", "most", "sequences", "heads")  # what is large in a case (properties/words/sizes.py)


def check_sizes(long: int, chunk: int = 64, large: str = "") -> None:
    """Raise ValueError for a `long` below 0 or above MAX_TOKENS, for a `chunk` below 1, or for a `large` that nothing can be."""
    for name, number, least in (("long", long, 0), ("chunk", chunk, 1)):
        if not isinstance(number, int) or not least <= number <= MAX_TOKENS:
            raise ValueError(f"{name} must be in {least}..{MAX_TOKENS}, got {number!r}")
    if large not in LARGE:
        raise ValueError(f"large must be empty or one of {', '.join(LARGE[1:])}, got {large!r}")


def check_tuples(domain: Any, *fields: tuple[str, Sequence[Any]], least: int = 1) -> None:
    """Raise ValueError for a field, given with its choices, that is not a tuple of `least` or more of these choices."""
    for name, choices in fields:
        values = getattr(domain, name)
        if not isinstance(values, tuple) or len(values) < least or not all(value in choices for value in values):
            raise ValueError(f"{name} must be a tuple of some of {', '.join(map(str, choices))}, got {values!r}")


def check_spans(domain: Any, *names: str, most: int = MAX_WIDTH) -> None:
    """Raise ValueError for a `width_step` below 1, or for a field that is no range with a width of up to `most`."""
    step = domain.width_step
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"width_step must be at least 1, got {step!r}")
    for name in names:
        span = getattr(domain, name)
        if not (isinstance(span, tuple) and len(span) == 2 and all(isinstance(end, int) for end in span)):
            raise ValueError(f"{name} must be a tuple (least, most), got {span!r}")
        if span[0] < 1 or -(-span[0] // step) * step > min(span[1], most):
            raise ValueError(f"{name} must contain a width in steps of {step}, from 1 to {most}, got {span}")


def check_whole(name: str, values: object, most: int) -> None:
    """Raise ValueError for values that are no tuple of whole numbers from 1 to `most`, or that are none."""
    if not (isinstance(values, tuple) and values and all(isinstance(value, int) and 1 <= value <= most for value in values)):
        raise ValueError(f"{name} must be a tuple of whole numbers in 1..{most}, got {values!r}")


def check_widths(name: str, widths: object, span: str, span_left: bool, most: int = MAX_WIDTH) -> None:  # noqa: FBT001
    """Raise ValueError for a list of widths that is wrong, or that stands beside the range which it replaces."""
    if widths != ():
        check_whole(name, widths, most)
    if widths and not span_left:
        raise ValueError(f"{span} and width_step must be left out with {name}, which lists the widths, got {name}={widths}")


def inside(width: int, span: tuple[int, int], step: int) -> bool:
    """Return whether a width is in a range, in steps of `step`."""
    return span[0] <= width <= span[1] and width % step == 0
