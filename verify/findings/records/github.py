"""Annotations of checks as workflow commands of GitHub Actions, each a line on stdout.

GitHub shows ten errors and ten warnings of a step at most. So a broken law whose report is that of another law has no line.
"""

from collections.abc import Iterable, Sequence

from verify.findings.records.entries import Entry, entries, one_line
from verify.findings.records.places import place_of
from verify.findings.records.record import Record
from verify.process.outcome import Verdict

MOST = 10


def annotations(records: Sequence[Record]) -> list[str]:
    """The lines about broken and undecided laws. Paths are relative to the working directory."""
    pairs = [(record, entry) for record in records for entry in entries(record)]
    errors = [pair for pair in pairs if pair[1].verdict is Verdict.BROKEN and not (pair[1].report and pair[1].report.same_as)]
    warnings = [pair for pair in pairs if pair[1].verdict is Verdict.UNKNOWN and not pair[1].skipped]
    return [*_lines("error", errors), *_lines("warning", warnings)]


def _lines(command: str, pairs: Sequence[tuple[Record, Entry]]) -> Iterable[str]:
    for record, entry in pairs[:MOST]:
        words = "is broken" if command == "error" else "is undecided"
        properties, place = {"title": f"gdn-verify: {entry.name} {words}, {one_line(record.head.adapter)}"}, place_of(record, entry)
        if place is not None:
            properties = {"file": place[0], "line": str(place[1]), **properties}
        named = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        message = _data(f"{entry.title}\n\n{entry.text}")
        yield f"::{command} {named}::{message}"
    if len(pairs) > MOST:
        yield f"::notice title=gdn-verify::{len(pairs) - MOST} more laws have the same verdict as the {MOST} above"


def _data(words: str) -> str:
    """The message of a command: one line, in which GitHub decodes %25, %0D and %0A."""
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(words: str) -> str:
    """The value of a property of a command."""
    return _data(words).replace(":", "%3A").replace(",", "%2C")
