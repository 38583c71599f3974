"""The page of a check: one self-contained HTML file, made from records alone. It needs the extra `page`.

Everything in a record is data, also what an adapter wrote: jinja2 escapes it, and a policy in the page lets no script run but ours.
"""

import base64
import hashlib
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from verify.findings import report as text
from verify.findings.blocks import largest_of, level
from verify.findings.law_report import LawReport
from verify.findings.records.record import Record
from verify.process.outcome import Finding, Verdict
from verify.process.picture import Picture

NEEDS = "--html needs jinja2, which is not installed: pip install 'gdn-verify[page]'"
FOLDER = pathlib.Path(__file__).parent
LEVELS = 5  # shades of errors over their tolerance
MOST_PICTURES = 2  # for each case
LEAST = -2  # the decade at which plots of errors over tolerances begin
GREATEST = 6  # the last decade that they may have
MOST_MARKS = 8  # groups that are named below a picture


def check() -> None:
    """Check that the page can be made. ValueError, in one line, if jinja2 is missing."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise ValueError(NEEDS) from None


def environment(folder: pathlib.Path) -> Any:
    """What renders the templates of a folder: every value is escaped, and an unknown name is an error."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(records: Sequence[Record]) -> str:
    """The page of some checks. It refers to no other file or address."""
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    verdicts = {record.verdict for record in records}
    overall = next(verdict for verdict in (Verdict.BROKEN, Verdict.UNKNOWN, Verdict.HOLDS) if verdict in verdicts)
    laws = {report.verdict for record in records for report in record.reports}
    template = environment(FOLDER).get_template("page.html.j2")
    rendered: str = template.render(
        checks=[_check(number, record) for number, record in enumerate(records)],
        verdict=overall,
        verdicts=[verdict for verdict in Verdict if verdict in laws],
        words=text.WORDS,
        script=script,
        digest=digest,
    )
    return rendered.encode("utf-8", "replace").decode()  # what a process wrote may be no text


def _check(number: int, record: Record) -> dict[str, Any]:
    """What the template shows of a check."""
    reports, end = record.reports, record.end
    key = {report.law: f"check{number}-law{place}" for place, report in enumerate(reports)}
    return {
        "key": f"check{number}",
        "record": record,
        "facts": _facts(record),
        "verdicts": text.laws_that_hold(reports, len(record.head.laws)),
        "laws": [_law(key, report) for report in reports],
        "plot": plot(reports),
        "regimes": [line.strip().partition(": ") for line in end.regimes] if end else [],
        "looked_at": blocks_of_text(end.looked_at) if end else [],
        "fault": text.fault_notice(reports),
        "one_by_one": text.one_by_one(reports),
    }


def _facts(record: Record) -> dict[str, str]:
    """What was checked, by name. Facts that are not there are left out."""
    head, end = record.head, record.end
    facts = {
        "device": head.device or "CPU",
        "profile": head.profile,
        "seed": str(head.seed),
        "shard": "" if head.shard == (1, 1) else f"{head.shard[0]}/{head.shard[1]}",
        "tune": head.tune,
        "products": head.products,
        "options": head.under,
        "cases": str(record.cases),
        "time": duration(end.wall_s) if end else "",
        "exit code": str(end.exit_code) if end else "",
        "versions": head.versions,
        "gdn-verify": head.gdn_verify,
    }
    return {name: value for name, value in facts.items() if value}


def duration(seconds: float) -> str:
    """A time in words, such as "3.2 s" or "4 min 10 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"


def _law(keys: dict[str, str], report: LawReport) -> dict[str, Any]:
    """A law's row, and its section if it is broken."""
    counts, worst = report.counts, _worst(report)
    others = [f"{counts[verdict]} {verdict}" for verdict in counts if verdict != Verdict.HOLDS and counts[verdict]]
    return {
        "key": keys[report.law],
        "report": report,
        "cases": f"{sum(counts.values())} of {report.planned}" if report.cut_short else str(sum(counts.values())),
        "others": ", ".join(others),
        "worst": worst,
        "over": worst is not None and worst[1] > 1,
        "reason": report.reason if report.verdict in (Verdict.UNKNOWN, Verdict.UNSUPPORTED) else "",
        "text": text.failure(report, marks="") if report.verdict is Verdict.BROKEN else "",
        "same_as": keys.get(report.same_as, ""),
        "cases_shown": _cases(report) if report.verdict is Verdict.BROKEN and not report.same_as else [],
    }


def _worst(report: LawReport) -> tuple[str, float, str] | None:
    """The output with the largest error over its tolerance, the ratio, and the ratio in words. None if bits are compared."""
    if report.kind != "truth" or not any(report.ratios.values()):
        return None
    name = max(report.ratios, key=lambda output: _order(report.ratios[output]))
    return name, _order(report.ratios[name]), ratio_words(report.ratios[name])


def _order(ratio: float) -> float:
    return math.inf if math.isnan(ratio) or ratio >= 1e300 else ratio


def ratio_words(ratio: float) -> str:
    """A ratio of error to tolerance in words."""
    if _order(ratio) == math.inf:
        return "not finite"
    return f"{ratio:.{2 if ratio < 100 else 0}f}" if ratio < text.ENDLESS else f"over {text.ENDLESS:g}"


def _cases(report: LawReport) -> list[dict[str, Any]]:
    """The smallest and the found case of a broken law: name, command, findings and pictures."""
    cases = [("Smallest case", [*report.after, report.run], report.findings)]
    if report.first_run not in ("", report.run):
        cases.append(("Found case", [report.first_run], report.first_findings))
    return [
        {
            "name": name,
            "command": text.repeat_command(report, *runs),
            "findings": findings,
            "pictures": [drawing for finding in findings if (drawing := drawing_of(finding))][:MOST_PICTURES],
        }
        for name, runs, findings in cases
    ]


def blocks_of_text(lines: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Printed lines with labels, such as "looked at", as pairs of a label and its texts. Lines that were wrapped are joined."""
    result: list[tuple[str, list[str]]] = []
    for line in lines:
        words = line.strip()
        label, _, rest = line.partition("  ")
        if line[:1] != " " and rest:
            result.append((label, [rest.strip()]))
        elif not result:
            result.append(("", [words]))
        elif len(line) - len(line.lstrip()) > 4:
            result[-1][1][-1] += f" {words}"
        else:
            result[-1][1].append(words)
    return result


def plot(reports: Sequence[LawReport]) -> dict[str, Any]:
    """For each output the largest error over its tolerance under each law that judges by tolerances, on a logarithmic scale.

    Places are percentages of the width. Empty if there is no such law.
    """
    laws: dict[str, dict[str, float]] = {}
    for report in reports:
        for output, ratio in report.ratios.items() if report.kind == "truth" else ():
            laws.setdefault(output, {})[report.law] = _order(ratio)
    greatest = max((ratio for ratios in laws.values() for ratio in ratios.values() if ratio < math.inf), default=1.0)
    last = min(GREATEST, max(1, math.ceil(math.log10(max(greatest, 1.0)) + 0.01)))

    def place(ratio: float) -> float:
        decade = math.log10(ratio) if 0 < ratio < math.inf else LEAST if ratio == 0 else last
        return 100 * (min(max(decade, LEAST), last) - LEAST) / (last - LEAST)

    strips = [
        {
            "output": output,
            "largest": max(ratios.values()),
            "words": ratio_words(max(ratios.values())),
            "end": place(max(ratios.values())),
            "dots": [(place(ratio), f"{law}: {ratio_words(ratio)}", ratio) for law, ratio in ratios.items()],
        }
        for output, ratios in sorted(laws.items(), key=lambda item: -max(item[1].values()))
    ]
    decades = [(place(10.0**decade), f"{10.0**decade:g}") for decade in range(LEAST, last + 1)]
    return {"strips": strips, "decades": decades, "one": place(1.0)} if strips else {}


def drawing_of(finding: Finding) -> dict[str, Any] | None:
    """The picture of a finding as paths in units of its parts, by the class of their colour. None if it has a single part."""
    picture = finding.picture
    if picture is None or picture.parts == 1:
        return None
    largest = largest_of(value for line in picture.values for value in line)
    paths: dict[str, list[str]] = {}
    for y, line in enumerate(picture.values):
        for x, value in enumerate(line):
            if name := _shade(value, largest, exact=finding.exact):
                paths.setdefault(name, []).append(f"M{x} {y}h1v1h-1z")
    return {
        "finding": finding,
        "picture": picture,
        "paths": {name: "".join(parts) for name, parts in paths.items()},
        "lines": [picture.line_name(line).removeprefix(picture.across + " ") for line in range(len(picture.lines))],
        "marks": _marks(picture),
        "largest": f"{largest:.3g}" if largest > 1 else "",
        "label": f"where {finding.place} is off, {picture.ends}",
    }


def _shade(value: float, largest: float, *, exact: bool) -> str:
    """The class of a part's colour; "" for one that is right."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "differs" if exact else "infinite"
    shade = level(value, largest, LEVELS)
    return f"over{shade}" if shade else ""


def _marks(picture: Picture) -> list[tuple[float, str]]:
    """Where groups begin, in per cent of the width, and their names. Only a few have names."""
    starts = [
        (column, group)
        for column, (group, _, _) in enumerate(picture.columns)
        if picture.group and group >= 0 and (column == 0 or picture.columns[column - 1][0] != group)
    ]
    named = -(-len(starts) // MOST_MARKS)
    width = len(picture.columns)
    return [(100 * column / width, str(group) if place % named == 0 else "") for place, (column, group) in enumerate(starts)]
