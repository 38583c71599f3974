"""The record of a check: one object before the laws, one for each law, and one at the end, each a line of JSON.

Whatever shows a check elsewhere (a merged verdict, JUnit, annotations, a summary, a page, a certificate) is made from records
alone.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from verify.findings.law_report import LawReport
from verify.findings.outside import Answer
from verify.process.outcome import Verdict
from verify.process.reach import Reach

SCHEMA = 1  # goes up whenever a reader of the last form would misread the new one
CHECK, LAW, END = "check", "law", "end"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Head:
    """What a check was asked, and where it ran.

    - `gdn_verify`: our version
    - `versions`, `device`: the packages under test in words, and the name of the GPU or ""
    - `laws`: the names of the laws that are to be checked
    - `shard`: the number of the shard and how many there are, such as (2, 8); (1, 1) is the whole check
    - `under`: options that `repeat` needs besides a line, such as "--ranks 2"
    - `declares`: lines about what the adapter declares
    - `omits`: parameters and functions that the adapter leaves out, each with the reason
    """

    adapter: str
    gdn_verify: str
    versions: str
    device: str
    profile: str
    seed: int
    laws: list[str]
    tune: str = ""
    products: str = ""
    under: str = ""
    shard: tuple[int, int] = (1, 1)
    declares: list[str] = dataclasses.field(default_factory=list)
    omits: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class End:
    """How a check ended. A check fills it in while it prints.

    - `exit_code`: of the command, for this check alone
    - `not_run`: the laws of which no case was run; of a merged check, those that a shard did not run
    - `lacks`: of a merged check, what of it is missing, a line each: shards that are not there, or that never ended
    - `refusals`: for each thing that the adapter did with illegal input, the inputs in words
    - `gaps`: the regimes, as `name=value`, that no case had although the domain allows them
    - `regimes`, `looked_at`, `left_out`, `causes`: the lines that the check printed about these
    - `outside`: what the adapter did with calls just outside its domain
    - `reach`: what all decided cases looked at
    """

    exit_code: int
    wall_s: float
    interrupted: bool = False
    not_run: list[str] = dataclasses.field(default_factory=list)
    lacks: list[str] = dataclasses.field(default_factory=list)
    refusals: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    gaps: list[str] = dataclasses.field(default_factory=list)
    regimes: list[str] = dataclasses.field(default_factory=list)
    looked_at: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    causes: list[str] = dataclasses.field(default_factory=list)
    outside: list[Answer] = dataclasses.field(default_factory=list)
    reach: Reach = dataclasses.field(default_factory=Reach)


@dataclasses.dataclass(frozen=True)
class Record:
    """One check. `end` is None if the check never ended: it was killed, or its disk was full."""

    head: Head
    reports: Sequence[LawReport]
    end: End | None

    @property
    def verdict(self) -> Verdict:
        """BROKEN if a law is broken, HOLDS if the check ended with exit code 0, otherwise UNKNOWN."""
        if any(report.verdict is Verdict.BROKEN for report in self.reports):
            return Verdict.BROKEN
        return Verdict.HOLDS if self.end is not None and self.end.exit_code == 0 else Verdict.UNKNOWN

    @property
    def cases(self) -> int:
        """The number of cases that were run."""
        return sum(sum(report.counts.values()) for report in self.reports)

    def ended(self, exit_code: int) -> "Record":
        """The same record, whose check has this exit code."""
        assert self.end is not None
        return dataclasses.replace(self, end=dataclasses.replace(self.end, exit_code=exit_code))


def head_line(head: Head) -> dict[str, Any]:
    """The object of a check's beginning."""
    return {"schema": SCHEMA, "record": CHECK, **dataclasses.asdict(head)}


def law_line(report: LawReport) -> dict[str, Any]:
    """The object of a law."""
    return {"schema": SCHEMA, "record": LAW, **report.to_json()}


def end_line(end: End) -> dict[str, Any]:
    """The object of a check's end."""
    data = dataclasses.asdict(dataclasses.replace(end, reach=Reach()))
    return {"schema": SCHEMA, "record": END, **data, "reach": end.reach.to_json()}


def lines_of(record: Record) -> list[dict[str, Any]]:
    """The objects of a record, in their order."""
    end = [] if record.end is None else [end_line(record.end)]
    return [head_line(record.head), *map(law_line, record.reports), *end]


def read(place: str) -> list[Record]:
    """Read the checks of a file that `--json` wrote, in their order. ValueError names the file, the line and what is wrong."""
    try:
        with open(place, encoding="utf-8") as file:
            return list(_records(place, file))
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{place} is no record of a check: it is not UTF-8") from None


@dataclasses.dataclass
class _Begun:
    """A record that is being read."""

    head: Head
    reports: list[LawReport] = dataclasses.field(default_factory=list)
    end: End | None = None

    def record(self) -> Record:
        return Record(self.head, self.reports, self.end)


def _records(place: str, lines: Iterable[str]) -> Iterator[Record]:
    begun: _Begun | None = None
    for number, line in enumerate(lines, 1):
        where = f"{place}, line {number}"
        data = _object(where, line)
        part = data.pop("record")
        if part == CHECK:
            if begun is not None:
                yield begun.record()
            begun = _Begun(_made(where, Head, data))
        elif begun is None or begun.end is not None:
            raise ValueError(f"{where} has no check before it: the record is cut off at its beginning")
        elif part == END:
            begun.end = _made(where, End, data)
        else:
            begun.reports.append(_made(where, LawReport, data))
    if begun is None:
        raise ValueError(f"{place} has no record of a check")
    yield begun.record()


def _object(where: str, line: str) -> dict[str, Any]:
    """The object of a line. ValueError for what no check of this release wrote."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is no JSON: the record may be cut off") from None
    if not isinstance(data, dict) or data.get("record") not in (CHECK, LAW, END):
        raise ValueError(f"{where} is no part of a check's record: its record must be check, law or end")
    if data.pop("schema", None) != SCHEMA:
        raise ValueError(f"{where} has another schema than {SCHEMA}: another release of gdn-verify wrote it")
    return data


def _made(where: str, kind: type[T], data: dict[str, Any]) -> T:
    """An object of a line as its class. ValueError, which names what is wrong, if the line does not fit the class.

    What a single law looked at is left out: that of the whole check is in its end.
    """
    reach = data.pop("reach", None)
    try:
        made = msgspec.convert(data, kind, strict=False)  # numbers that JSON lacks are strings
        return dataclasses.replace(made, reach=Reach.from_json(reach)) if isinstance(made, End) else made
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # msgspec's error is a ValueError
        raise ValueError(f"{where} is no part of a check's record: {error}") from None
