"""What a record says about each law in a few words, for the files that show it elsewhere.

A check that did not end with exit code 0 always has an entry that is broken or undecided: no reader sees such a check as right.
"""

import dataclasses
import re
from collections.abc import Iterator

from verify.findings import report as text
from verify.findings.law_report import LawReport
from verify.findings.records.record import Record
from verify.process.outcome import Verdict

CHECK = "check"  # the name of an entry about the whole check
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)  # forbidden in XML, or unsafe in a text


@dataclasses.dataclass(frozen=True)
class Entry:
    """A law of a check, or the check itself.

    - `name`: the law, or CHECK
    - `skipped`: whether nothing was to be decided, so that the entry is neither right nor wrong
    - `title`: a line that says what is wrong or undecided; of a law that holds, the law in words
    - `text`: the complete report
    - `report`: None if no case of the law was run
    """

    name: str
    verdict: Verdict
    title: str
    text: str
    skipped: bool = False
    report: LawReport | None = None


def cleaned(words: str) -> str:
    """A text without control characters, for XML, Markdown and names. Tabs and line feeds stay."""
    return CONTROL.sub("", words.replace("\r\n", "\n").replace("\r", "\n"))


def one_line(words: str) -> str:
    """The same without line feeds and tabs."""
    return " ".join(cleaned(words).split())


def entries(record: Record) -> list[Entry]:
    """The entries of a record, in the order of its laws."""
    found = [_of_report(report) for report in record.reports]
    found += _not_run(record)
    if record.verdict is Verdict.UNKNOWN and not any(entry.verdict is Verdict.UNKNOWN and not entry.skipped for entry in found):
        code = "the check did not end" if record.end is None else f"the check ended with exit code {record.end.exit_code}"
        code = record.end.lacks[0] if record.end is not None and record.end.lacks else code
        found.append(Entry(CHECK, Verdict.UNKNOWN, code, "\n".join([code, *not_looked_at(record)])))
    return found


def not_looked_at(record: Record) -> list[str]:
    """What is missing of a merged check, and the lines about what no case looked at."""
    return [*record.end.lacks, *record.end.looked_at] if record.end is not None else []


def name_of(record: Record) -> str:
    """The adapter, and the shard if the record is of one."""
    number, count = record.head.shard
    return one_line(record.head.adapter) + (f" shard {number}/{count}" if count > 1 else "")


def _of_report(report: LawReport) -> Entry:
    whole, name = _text(report), one_line(report.law)
    match report.verdict:
        case Verdict.BROKEN:
            return Entry(name, report.verdict, _broken(report), whole, report=report)
        case Verdict.UNKNOWN:
            return Entry(name, report.verdict, one_line(report.reason) or "undecided", whole, report=report)
        case Verdict.UNSUPPORTED:
            return Entry(name, report.verdict, one_line(report.reason) or "unsupported", whole, skipped=True, report=report)
    return Entry(name, report.verdict, one_line(report.says), whole, report=report)


def _text(report: LawReport) -> str:
    if report.verdict is Verdict.BROKEN:
        return cleaned(text.failure(report) or f"{_broken(report)}: its report is that of the law {report.same_as}")
    return cleaned("\n  ".join([text.law_line(report), *report.known]))


def _broken(report: LawReport) -> str:
    """What is wrong in the smallest case, in one line."""
    if not report.findings:
        return one_line(f"broken: {report.says}")
    first = report.findings[0]
    return one_line(f"{first.place}: {first.what}" + (f" ({first.worst})" if first.worst else ""))


def _not_run(record: Record) -> Iterator[Entry]:
    """An entry for each law of which no case was run. It is skipped if the check may end well without the law."""
    begun = {report.law for report in record.reports}
    fine = record.end is not None and record.end.exit_code in (0, 1)
    why = "no case was run" if record.end is not None else "no case was run: the check did not end"
    for law in dict.fromkeys([*record.head.laws, *(record.end.not_run if record.end is not None else ())]):
        if law not in begun:
            yield Entry(one_line(law), Verdict.UNKNOWN, why, why, skipped=fine)
