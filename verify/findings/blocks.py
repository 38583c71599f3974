"""The picture of a finding as a few lines of text: a character for each part, taller where its error is larger."""

import math
from collections.abc import Iterable, Sequence

from verify.process.outcome import Finding

BLOCKS, ASCII = "·▁▂▃▄▅▆▇█", ".12345678"  # within the tolerance, then from just over it to the largest error
NOT_FINITE = "X"
MOST_LINES = 4
MARGIN = 40  # columns of text for what stands before and behind a line of the picture


def level(ratio: float, largest: float, levels: int) -> int:
    """How far an error is over its tolerance, on a logarithmic scale: 0 if it is not over, `levels` if it is the largest one."""
    return max(1, math.ceil(levels * math.log(ratio) / math.log(largest))) if ratio > 1 else 0


def largest_of(values: Iterable[float]) -> float:
    """The largest of the numbers that are finite; at least 1."""
    return max((value for value in values if 1 < value < math.inf), default=1.0)


def block_lines(finding: Finding, width: int, marks: str = BLOCKS) -> list[str]:
    """At most six lines: the picture of a finding, its first and its last place, and a legend. None if it has a single part.

    They have at most about `width` columns. `marks` are BLOCKS or ASCII.
    """
    picture = finding.picture
    if picture is None or picture.parts == 1:
        return []
    columns, strips = _shared(len(picture.columns), max(8, width - MARGIN)), _shared(len(picture.lines), MOST_LINES)
    parts = [[_largest(picture.values[y][x] for y in strip for x in column) for column in columns] for strip in strips]
    largest, texts = largest_of(value for line in parts for value in line), list[str]()
    for strip, line in zip(strips, parts, strict=True):
        text = "".join(_mark(value, largest, marks, exact=finding.exact) for value in line)
        texts.append(f"{text}  {picture.line_name(strip[0], strip[-1])}".rstrip())
    legend = _legend(parts, largest, marks, exact=finding.exact)
    return [*texts, picture.ends, f"{finding.place}: {legend}"]


def _shared(count: int, most: int) -> list[range]:
    """So many places in at most `most` parts of one size."""
    size = -(-count // most)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _largest(values: Iterable[float]) -> float:
    """The largest number; NaN if one of them is."""
    return max(values, key=lambda value: (math.isnan(value), value))


def _mark(value: float, largest: float, marks: str, *, exact: bool) -> str:
    if exact and value == math.inf:
        return marks[-1]
    return marks[level(value, largest, len(marks) - 1)] if math.isfinite(value) else NOT_FINITE


def _legend(parts: Sequence[Sequence[float]], largest: float, marks: str, *, exact: bool) -> str:
    values = [value for line in parts for value in line]
    over = f"{marks[1]} to {marks[-1]} up to {largest:.3g} times" if largest > 1 else ""
    words = [f"{marks[0]} equal", f"{marks[-1]} differs"] if exact else [f"{marks[0]} within the tolerance", over]
    others = ["NaN"] * any(map(math.isnan, values)) + ["infinite"] * (not exact and any(map(math.isinf, values)))
    words.append(f"{NOT_FINITE} {' or '.join(others)}" if others else "")
    return ", ".join(filter(None, words))
