"""What is decided about a published claim: what was claimed, what was measured, and whether the claim is right."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from verify.claims.table import number, spread_text
from verify.claims.timing import Spread

HEAD = ("pull request", "what", "size", "claimed", "measured", "verdict")
RIGHT, WRONG, UNDECIDED = "right", "wrong", "undecided"


@dataclasses.dataclass(frozen=True)
class Ruling:
    """One row: what a pull request claims, and what was measured.

    - `repeat`: the command that repeats the row, or its worst case.
    - `before`, `after`, `ratio`: times before and after, in milliseconds, and their ratios round by round.
    - `lacking`: this host cannot decide, for lack of a GPU or a package. That is no failure.
    """

    claim: int
    what: str
    size: str = ""
    claimed: str = ""
    measured: str = ""
    verdict: str = UNDECIDED
    repeat: str = ""
    before: Spread | None = None
    after: Spread | None = None
    ratio: Spread | None = None
    lacking: bool = False

    @property
    def broken(self) -> bool:
        """Whether the claim is wrong."""
        return self.verdict == WRONG

    @property
    def reason(self) -> str:
        """Why nothing is decided. Empty if something is."""
        return self.measured if self.verdict == UNDECIDED else ""

    def cells(self) -> tuple[str, ...]:
        """The row's cells, in the order of HEAD."""
        return (str(self.claim), self.what, self.size, self.claimed, self.measured, self.verdict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def gain(before: Spread, after: Spread, ratio: Spread) -> str:
    """The times before and after, and their ratio, in words."""
    return f"{spread_text(ratio)} times as fast: {number(before.median)} ms before, {number(after.median)} ms after"


def verdict_on(ratio: Spread, least: float) -> str:
    """Whether a gain of `least` is right: if nearly all rounds had it, it is; if nearly none had it, it is not."""
    return RIGHT if ratio.low >= least else WRONG if ratio.high < least else UNDECIDED


def commands(rows: Sequence[Ruling]) -> str:
    """The commands that repeat the rows, one on a line, each once."""
    return "\n".join(dict.fromkeys(f"repeat {row.claim}: {row.repeat}" for row in rows if row.repeat))
