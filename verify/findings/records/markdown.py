"""Checks as Markdown, for the summary of a pull request.

What an implementation wrote is in fences that are longer than any in it, and in cells whose punctuation is encoded.
"""

import re
from collections.abc import Iterator, Sequence

from verify.findings.records.entries import CHECK, Entry, cleaned, entries, name_of, not_looked_at, one_line
from verify.findings.records.record import Record
from verify.findings.report import ENDLESS, WORDS
from verify.process.outcome import Verdict

MOST_FOLDS, MOST_TEXT = 12, 4000  # GitHub takes 65,536 characters of a comment
PLAIN = re.compile(r"[^A-Za-z0-9 \u00a0-\U0010ffff]")
TITLES = {Verdict.HOLDS: "every law holds", Verdict.BROKEN: "a law is broken", Verdict.UNKNOWN: "undecided"}


def markdown(records: Sequence[Record]) -> str:
    """The summary of some checks."""
    return "\n".join(line for record in records for line in _summary(record)) + "\n"


def _summary(record: Record) -> Iterator[str]:
    head, found = record.head, entries(record)
    yield f"### gdn-verify: {code(name_of(record))}: {TITLES[record.verdict]}"
    yield ""
    where = [f"profile {one_line(head.profile)}", f"seed {head.seed}", one_line(head.versions), one_line(head.device)]
    yield f"{record.cases} cases; {code(', '.join(filter(None, where)))}"
    yield ""
    yield "| law | verdict | cases | largest error / tolerance | what |"
    yield "| --- | --- | ---: | --- | --- |"
    yield from map(_row, found)
    broken = [entry for entry in found if entry.verdict is Verdict.BROKEN and not (entry.report and entry.report.same_as)]
    if told := [[*entry.report.after, entry.report.run] for entry in broken if entry.report is not None and entry.report.run]:
        fewest = min(told, key=lambda runs: (len(runs), len(runs[-1])))
        words = "line that fails" if len(fewest) == 1 else "lines of which the last fails after the others, in one process"
        yield from ["", f"The smallest {words}:", "", *fenced("\n".join(fewest)[:MOST_TEXT])]
    for entry in broken[:MOST_FOLDS]:
        yield from ["", f"<details><summary>{code(entry.name)}: {code(entry.title[:200])}</summary>", ""]
        yield from [*fenced(_short(entry.text)), "", "</details>"]
    if len(broken) > MOST_FOLDS:
        yield from ["", f"{len(broken) - MOST_FOLDS} more laws are broken."]
    if lines := not_looked_at(record):
        yield from ["", "<details><summary>What was looked at, and what was not</summary>", ""]
        yield from [*fenced(_short("\n".join(lines))), "", "</details>"]
    yield ""


def _row(entry: Entry) -> str:
    report = entry.report
    counts = sum(report.counts.values()) if report is not None else 0
    verdict = "not run" if report is None and entry.name != CHECK else WORDS[entry.verdict]
    verdict = f"**{verdict}**" if entry.verdict is Verdict.BROKEN else verdict
    return f"| {code(entry.name)} | {verdict} | {counts or ''} | {_worst(entry)} | {code(entry.title[:300])} |"


def _worst(entry: Entry) -> str:
    """The largest error in tolerances, and its output."""
    ratios = entry.report.ratios if entry.report is not None and entry.report.kind == "truth" else {}
    if not ratios:
        return ""
    name = max(ratios, key=lambda output: ratios[output])
    return code(f"{ratios[name]:.2f} {name}" if ratios[name] < ENDLESS else f"over {ENDLESS:g} {name}")


def code(words: str) -> str:
    """Words as code inside of a line, a cell or a tag. Nothing in them is Markdown or HTML, whatever they are."""
    return f"<code>{PLAIN.sub(lambda found: _entity(found[0]), one_line(words))}</code>"


def _entity(character: str) -> str:
    return character if character in ".,/=+" else f"&#{ord(character)};"


def fenced(words: str) -> list[str]:
    """The lines of a block of code, in a fence that is longer than any run of backticks in it."""
    words = cleaned(words)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", words)), default=0))
    return [f"{fence}text", *words.split("\n"), fence]


def _short(words: str) -> str:
    return words if len(words) <= MOST_TEXT else f"{words[:MOST_TEXT]}\n(cut off here)"
