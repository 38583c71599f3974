"""Where the rows of a comparison are off, as a small map: at most 48 places along it, by 16 across it."""

import dataclasses
import math
from typing import Any

MOST_COLUMNS, MOST_LINES = 48, 16
DIGITS = 3


@dataclasses.dataclass(frozen=True)
class Picture:
    """The largest error over its tolerance in each part of a comparison.

    - `along`: what is counted from left to right: "token", "key row", "channel" or "head"
    - `across`: what is counted from top to bottom: "head" or "channel", or "" if there is one line
    - `group`: what the places along are in: "sequence", "slot" or "row of the batch", or "" if all are in one
    - `columns`: of each column its group, and the first and the last place along it; the group is -1 if it has places of several
    - `lines`: of each line the first and the last place across it
    - `values`: for each line a number for each column, also NaN and infinity. Where bits are compared, parts that differ are
      infinite or NaN, and others 0
    """

    along: str
    across: str
    group: str
    columns: tuple[tuple[int, int, int], ...]
    lines: tuple[tuple[int, int], ...]
    values: tuple[tuple[float, ...], ...]

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.lines) * len(self.columns)

    @property
    def ends(self) -> str:
        """The first and the last place along it, in words."""
        (first_group, first, _), (last_group, _, last) = self.columns[0], self.columns[-1]
        begin, end = self._place(first_group, first, first), self._place(last_group, last, last)
        return begin if begin == end else f"from {begin} to {end}"

    def column_name(self, column: int) -> str:
        """A column in words, such as "sequence 1, tokens 4 to 7"."""
        return self._place(*self.columns[column])

    def line_name(self, line: int, last: int | None = None) -> str:
        """A line, or several up to `last`, in words, such as "heads 0 to 3"; "" if nothing is counted from top to bottom."""
        place, end = self.lines[line][0], self.lines[line if last is None else last][1]
        return span(self.across, place, end) if self.across else ""

    def _place(self, group: int, first: int, last: int) -> str:
        return (f"{self.group} {group}, " if self.group and group >= 0 else "") + span(self.along, first, last)

    def to_json(self) -> dict[str, Any]:
        """The picture as plain data. NaN and infinity, which JSON lacks, are strings."""
        return {**vars(self), "values": [[plain_number(value) for value in line] for line in self.values]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Picture":
        """The picture from the data of `to_json`."""
        values = tuple(tuple(map(float, line)) for line in data["values"])
        places = {name: tuple(tuple(place) for place in data[name]) for name in ("columns", "lines")}
        return cls(**{**data, **places, "values": values})


def span(word: str, first: int, last: int) -> str:
    """Places in words: "token 4" or "tokens 4 to 7"."""
    return f"{word} {first}" if first == last else f"{word}s {first} to {last}"


def rounded(ratio: float) -> float:
    """A ratio of error to tolerance in three digits. One that is over 1 stays so."""
    if not math.isfinite(ratio):
        return ratio
    short = float(f"{ratio:.{DIGITS}g}")
    return max(short, 1.01) if ratio > 1 else short


def plain_number(value: float) -> float | str:
    """A number as JSON can have it: NaN and infinity are strings."""
    return value if math.isfinite(value) else str(value)
