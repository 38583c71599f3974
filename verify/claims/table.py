"""The table of measurements, with a row for each claim and direction: as text, as markdown and as plain data."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

from rich import box
from rich.table import Table
from rich.text import Text

from verify.claims.timing import Spread

HEAD = ("claim", "what", "size", "before", "after", "before / after", "claimed", "answers", "first call, s")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: the measurements before and after a change, in `unit`.

    - `answers`: how the results compare with the truth, in words. `broken`: whether a form is wrong.
    - `first_s`: the seconds of the first calls. `case`: the case that was timed.
    - `reason`: why nothing was measured. With `lacking`, the host has too few GPUs or no SGLang, which is no
      failure.
    """

    claim: int
    what: str
    size: str = ""
    unit: str = "ms"
    before: Spread | None = None
    after: Spread | None = None
    ratio: Spread | None = None
    claimed: str = ""
    answers: str = ""
    broken: bool = False
    first_s: tuple[float, ...] = ()
    note: str = ""
    reason: str = ""
    lacking: bool = False
    case: str = ""

    @property
    def measured(self) -> bool:
        """Whether the row has measurements."""
        return not self.reason

    def cells(self) -> tuple[str, ...]:
        """The row's cells, in the order of HEAD."""
        if self.reason:
            return (str(self.claim), self.what, self.size, "", "", "", self.claimed, f"not measured: {self.reason}", "")
        before, after = (spread_text(spread, self.unit) for spread in (self.before, self.after))
        first = " + ".join(number(seconds) for seconds in self.first_s)
        answers = "; ".join(text for text in (self.answers, self.note) if text)
        return (str(self.claim), self.what, self.size, before, after, spread_text(self.ratio), self.claimed, answers, first)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"measured": self.measured}


def number(x: float) -> str:
    """The number as text with about three digits, never with an exponent."""
    if not math.isfinite(x):
        return str(x)
    digits = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2 if abs(x) >= 1 else 3 if abs(x) >= 0.1 or x == 0 else 4
    return f"{x:,.{digits}f}"


def spread_text(spread: Spread | None, unit: str = "") -> str:
    """The median with its unit, and in brackets the first and last decile if they differ."""
    if spread is None:
        return ""
    middle = number(spread.median) + (f" {unit}" if unit else "")
    return middle if spread.low == spread.high else f"{middle} ({number(spread.low)} to {number(spread.high)})"


def rounds_of(rows: Sequence[Row]) -> str:
    """A line that tells how many rounds were measured; empty if none."""
    spreads = [spread for row in rows for spread in (row.before, row.after) if spread is not None]
    counts = [spread.count for spread in spreads if spread.low != spread.high]
    if not counts:
        return ""
    times = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"median (first to last decile) of {times} rounds, forms by turns; first calls include what is compiled and tuned"


class Printed(Protocol):
    """A row that can be printed. `reason` says why it has nothing that was measured."""

    @property
    def broken(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    def cells(self) -> tuple[str, ...]: ...


def table(rows: Sequence[Printed], head: Sequence[str] = HEAD) -> Table:
    """The table for a terminal."""
    result = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        cells = [Text(cell) for cell in row.cells()]  # Text, because brackets in a cell are no markup
        result.add_row(*cells, style="red" if row.broken else "dim" if row.reason else "")
    return result


def markdown(rows: Sequence[Printed], head: Sequence[str] = HEAD) -> str:
    """The table as markdown."""
    lines = [head, tuple("---" for _ in head), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
