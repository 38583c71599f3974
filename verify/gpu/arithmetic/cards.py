"""What probes measure, the tables of known cards, and how measures are compared with them."""

import dataclasses
import json
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

FOLDER = pathlib.Path(__file__).parent / "cards"
NEAR = 1.25  # numbers by a larger factor apart differ, and so do those that are more than EDGE apart beside it
EDGE = 0.25


@dataclasses.dataclass(frozen=True)
class Measure:
    """What a probe has measured: a number, or words.

    - `limit`: what the tolerances assume, whatever the card: the largest absolute value of a number, or a regular expression that
      the words match. None: anything
    - `concerns`: what relies on it: a row of the table of operations in docs/explanation/rounding.md, and behind a colon the names
      in oracles/arithmetic/rounding.py that model it
    """

    name: str
    value: float | str
    limit: float | str | None
    concerns: str


def share(equal: Tensor) -> str:
    """How many elements of a tensor are true, as whole percent; 0 and 100 mean none and all."""
    percent = 100 * float(equal.double().mean())
    return f"{round(percent) if percent in (0, 100) else min(99, max(1, round(percent)))} %"


@dataclasses.dataclass(frozen=True)
class Card:
    """What was measured on a card: by its name, on a date, by `source`, with these versions."""

    card: str
    date: str
    source: str
    versions: Mapping[str, str]
    measured: Mapping[str, float | str]

    def text(self) -> str:
        """The table as TOML."""
        lines = [f"{name} = {json.dumps(getattr(self, name))}" for name in ("card", "date", "source")]
        lines += ["", "[versions]"]
        lines += [f"{name} = {json.dumps(version)}" for name, version in self.versions.items()]
        lines += ["", "[measured]"]
        lines += [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in self.measured.items()]
        return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measure beside the table of its card.

    `known` is None if the table does not have it. `error` says why a probe has measured nothing.
    """

    name: str
    measured: float | str | None
    known: float | str | None
    limit: float | str | None
    concerns: str
    error: str = ""

    @property
    def covered(self) -> bool:
        """Whether the measure is within what the tolerances assume."""
        if self.limit is None or self.measured is None:
            return True
        if isinstance(self.limit, str):
            return re.fullmatch(self.limit, str(self.measured)) is not None
        return isinstance(self.measured, int | float) and abs(self.measured) <= self.limit

    @property
    def result(self) -> str:
        """In words: failed, not covered, not known, DIFFERS or same."""
        if self.measured is None:
            return f"FAILED: {self.error}"
        if not self.covered:
            limit = f"match {self.limit}" if isinstance(self.limit, str) else f"be {self.limit:g} at most"
            return f"NOT COVERED: it must {limit}"
        if self.known is None:
            return "not known, covered by the tolerances"
        return "same" if near(self.measured, self.known) else "DIFFERS, covered by the tolerances"

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {**dataclasses.asdict(self), "covered": self.covered, "result": self.result}


def read(folder: pathlib.Path = FOLDER) -> dict[str, Card]:
    """The tables of a folder, by the names of their cards. ValueError names a file that is no such table."""
    cards = {}
    for file in sorted(folder.glob("*.toml")):
        try:
            card = Card(**tomllib.loads(file.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, TypeError) as error:
            raise ValueError(f"{file.name} must be the table of a card: {error}") from None
        cards[card.card] = card
    return cards


def near(measured: float | str, known: float | str) -> bool:
    """Whether a measure is the known one: the same words, or a number that is about as large."""
    if isinstance(measured, str) or isinstance(known, str):
        return measured == known
    least, most = sorted((known / NEAR, known * NEAR))
    return least - EDGE <= measured <= most + EDGE


def compared(measures: Sequence[Measure], failed: Mapping[str, str], card: Card | None) -> list[Comparison]:
    """Every measure beside the table, and then the probes that failed, each with its error."""
    known = card.measured if card else {}
    rows = [Comparison(one.name, one.value, known.get(one.name), one.limit, one.concerns) for one in measures]
    return rows + [Comparison(name, None, None, None, "", error) for name, error in failed.items()]
