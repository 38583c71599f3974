"""Reports as lines of text for people. This module decides no verdict and prints nothing."""

import collections
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from verify.execution.line import Run
from verify.findings.blocks import BLOCKS, block_lines
from verify.findings.law_report import ENOUGH, LawReport
from verify.findings.text_table import text_table
from verify.process.outcome import Finding, Outcome, Verdict

LONGEST = 160  # characters of a case that a broken case is compared with: nobody reads one with 130 requests
WIDTH = 116  # columns of the lines that list what a broken case holds with
ENDLESS = 1e6  # a larger ratio of error to tolerance is printed as "over 1e+06"
NOT_ALWAYS = {
    "no": "does not repeat in a fresh process: it may depend on time, memory or the number of calls",
    "after others": "only after other runs in the same process: alone in a fresh process, the case holds",
    "only afresh": "only in a fresh process: the case held when it was run again in the process that found it",
}
WORDS = {
    Verdict.HOLDS: "HOLDS",
    Verdict.BROKEN: "BROKEN",
    Verdict.UNKNOWN: "UNKNOWN",
    Verdict.UNSUPPORTED: "unsupported",
    Verdict.BLIND: "blind",
    Verdict.KNOWN: "known",
}


HEAD = f"{'verdict':<11} {'law':<10}{'cases':>10}  {'error/tolerance':<16} the law in words"  # over the columns of `law_line`


def law_line(report: LawReport) -> str:
    """One line: verdict, law, number of cases that could see, the largest error divided by its tolerance, the law in words.

    If gdn-verify itself failed, lines about that follow.
    """
    counts = report.counts
    if report.cut_short:
        return "\n".join([_cut_line(report), *_fault_lines(report)])
    holds = counts.get(Verdict.HOLDS, 0)
    seen = holds or sum(counts.values())
    cases = f"{seen:4d} cases" if counts else " " * 10
    worst = _worst(report) if report.verdict is Verdict.HOLDS else ""
    says = report.reason if report.verdict in (Verdict.UNSUPPORTED, Verdict.UNKNOWN) else report.says
    line = f"{WORDS[report.verdict]:<11} {report.law:<10}{cases}  {worst:<16} {says}"
    return "\n".join([line + _others(report), *_fault_lines(report)])


class LawTexts:
    """The text of each law of a check: the report of a broken law, or a line, the first of which has the head of its columns.

    `width` and `marks` are as for `failure`.
    """

    def __init__(self, width: int, marks: str) -> None:
        self._width, self._marks, self._head = width, marks, [HEAD]

    def __call__(self, report: LawReport) -> str:
        """The text of a law; empty if the report of another one says the same."""
        if report.verdict is Verdict.BROKEN:
            return failure(report, self._width, self._marks)
        head, self._head = self._head, []
        return "\n".join([*head, law_line(report)])


def _cut_line(report: LawReport) -> str:
    """The line of a law that was cut short: how many of its cases were run, and the largest error so far."""
    worst = f", worst {text}" if (text := _worst(report)) else ""
    reason = f": {report.reason}" if report.verdict is Verdict.UNKNOWN else ""
    cases = f"{sum(report.counts.values()):4d} of {report.planned} cases"
    return f"{'cut short':<11} {report.law:<10}{cases}{worst}{reason}{_others(report)}"


def _worst(report: LawReport) -> str:
    """The largest error divided by its tolerance, and its output; empty for a law that compares bits."""
    if report.kind != "truth" or not any(report.ratios.values()):
        return ""
    name = max(report.ratios, key=lambda output: report.ratios[output])
    return f"{report.ratios[name]:.2f} {name}"


def _others(report: LawReport) -> str:
    """The counts of cases that did not count for the law, in parentheses."""
    verdicts = (Verdict.BLIND, Verdict.KNOWN, Verdict.UNSUPPORTED)
    words = [f"{report.counts[verdict]} {verdict}" for verdict in verdicts if report.counts.get(verdict)]
    return f" ({', '.join(words)})" if words else ""


def _fault_lines(report: LawReport) -> list[str]:
    """Lines that tell where gdn-verify itself failed and in which run; none if it did not fail."""
    return [f"  failed       {report.fault}", f"  repeat       {_fault_command(report)}"] if report.fault else []


def fault_notice(reports: Sequence[LawReport]) -> str:
    """The last line of a check in which gdn-verify itself failed: whose fault it is and what to report. Otherwise empty."""
    failed = [report for report in reports if report.fault]
    if not failed:
        return ""
    first = failed[0]
    return (
        f"This is a fault of gdn-verify and says nothing about {first.adapter}: please report {first.fault}, with the versions "
        f"({first.versions}) and this command: {_fault_command(first)}"
    )


def one_by_one(reports: Sequence[LawReport]) -> list[str]:
    """Lines about the kernels whose programs could not be interpreted together, with the reasons. None if all could be."""
    launches: collections.Counter[str] = collections.Counter()
    for report in reports:
        launches.update(report.one_by_one)
    lines = [f"  {kernel} ({count} launches)" for kernel, count in sorted(launches.items())]
    return ["kernels whose programs could not run together, so that races in them may be missed:", *lines] if lines else []


def kept_promises(reports: Sequence[LawReport]) -> list[str]:
    """A line about the promises to the bit that the domain does not make, and that every case of a law kept; or nothing."""
    names = [
        promise
        for report in reports
        if report.verdict is Verdict.HOLDS and not report.cut_short
        for promise, count in report.kept.items()
        if count >= ENOUGH and not report.unkept.get(promise)
    ]
    return [f"kept to the bit, though not promised: {', '.join(names)}"] if names else []


def repeat_command(report: LawReport, *runs: str) -> str:
    """The command that runs lines of a law again, in one process."""
    return " ".join(["gdn-verify repeat", *([report.under] if report.under else []), *(f'"{run}"' for run in runs)])


def _fault_command(report: LawReport) -> str:
    """The command that shows a fault of gdn-verify again: the run in which it came, or the law if it came between runs."""
    if report.fault_run:
        return repeat_command(report, report.fault_run)
    return f"gdn-verify check {report.adapter} --law {report.law} --seed {report.seed}"


def failure(report: LawReport, width: int = WIDTH, marks: str = BLOCKS) -> str:
    """A complete bug report of a broken law. Empty if the report of another law says the same.

    The lines that list what it holds with are at most `width` columns wide. `marks` draw the picture of the first finding that has
    one (verify/findings/blocks.py); without them there is none.
    """
    if report.same_as:
        return ""
    lines = [f"BROKEN   {report.law} · {report.adapter} · {report.says}"]
    if report.laws_at_once:
        laws = len(report.laws_at_once)
        lines = [f"BROKEN   {report.adapter} · the call fails in the first case of each of the {laws} laws that were checked"]
    lines += finding_lines(report.findings)
    lines += _where_lines(report.findings, width, marks) if marks else []
    lines += [
        f"  tags         {line}" for line in (*report.tags, report.tags_run and repeat_command(report, report.tags_run)) if line
    ]
    if ratios := _ratio_line(report):
        lines.append(ratios)
    if neighbours := [case for case in report.neighbours if len(case) <= LONGEST]:
        lines += textwrap.wrap(
            "; ".join(neighbours),
            width,
            initial_indent="  holds with   ",
            subsequent_indent="               ",
            break_on_hyphens=False,
        )
    if report.otherwise:
        lines.append(
            f"  would hold   if the adapter declared {'; or '.join(report.otherwise)}; only its author knows whether that is true"
        )
    if report.fails_too:
        lines.append(f"  fails too    {'; '.join(report.fails_too)}")
    lines += [f"  resembles    a known defect of {title}" for title in report.resembles]
    if report.repeats in NOT_ALWAYS:
        lines.append(f"  repeats      {NOT_ALWAYS[report.repeats]}")
    if not report.shrunk:
        limit = f" of {report.limit}" if report.limit else ""
        lines.append(f"  shrinking    stopped at its limit{limit}; a smaller case may exist")
    lines.append(f"  versions     {report.versions}")
    cases = sum(report.counts.values())
    found = "in an earlier check, and run first in this one" if report.remembered else f"in case {report.found_case or cases}"
    if (broken := report.counts.get(Verdict.BROKEN, 0)) > 1:
        found += f", the worst of {broken} broken cases of {cases}"
    found += f", as {report.first_run}" if report.first_run != report.run else ""
    lines.append(f"  found        {found}")
    lines.append(f"  repeat       {repeat_command(report, *report.after, report.run)}")
    lines += _fault_lines(report)
    return "\n".join(lines)


def _where_lines(findings: Sequence[Finding], width: int, marks: str) -> list[str]:
    """The picture of the first finding that has one: where its output is off."""
    for finding in findings:
        if lines := block_lines(finding, width, marks):
            return [f"  {'' if number else 'where':<12} {line}" for number, line in enumerate(lines)]
    return []


def _ratio_line(report: LawReport) -> str:
    """The outputs that fail and by how many tolerances, in the smallest case and in the found one; or nothing."""
    if report.first_run in ("", report.run) or not any(math.isfinite(finding.ratio) for finding in report.first_findings):
        return ""
    smallest, found = (
        ", ".join(_ratio(finding) for finding in most) for most in map(_worst_of_each, (report.findings, report.first_findings))
    )
    return f"  failing      here {smallest}; in the found case {found} (error / allowed)"


def _worst_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """For each output that fails, its worst finding."""
    worst: dict[str, Finding] = {}
    for finding in findings:
        name = finding.port
        worst[name] = max(worst.get(name, finding), finding, key=lambda one: one.ratio)
    return list(worst.values())


def _ratio(finding: Finding) -> str:
    """An output with its ratio of error to tolerance, or with the way in which it fails."""
    number = f"{finding.ratio:.2f}" if finding.ratio < ENDLESS else f"over {ENDLESS:g}"
    return f"{finding.port} {number if math.isfinite(finding.ratio) else finding.way}"


def times(reports: Iterable[LawReport], processes: int) -> str:
    """Where the seconds of a check went, in brackets. All are sums over the processes.

    Waiting, new workers and shrinking are mentioned from a second on.
    """
    reports = list(reports)
    kernel, oracle, wait, start, shrink = (
        sum(getattr(report, name) for report in reports) for name in ("kernel_s", "oracle_s", "wait_s", "start_s", "shrink_s")
    )
    started = sum(report.started for report in reports)
    parts = [f"kernels {kernel:.0f} s", f"reference and tolerances {oracle:.0f} s"]
    parts += [f"waiting for compilers {wait:.0f} s"] if wait >= 1 else []
    parts += [f"started {started} worker{'s' if started != 1 else ''}, {start:.0f} s"] if start >= 1 else []
    parts += [f"shrinking {shrink:.0f} s"] if shrink >= 1 else []
    return f"({'1 process' if processes == 1 else f'{processes} processes together'}: {', '.join(parts)})"


def laws_that_hold(reports: Iterable[LawReport], laws: int, of: str = "") -> str:
    """How many of so many laws `of` something hold, and how many have each other verdict: "18 of 20 laws hold, 2 unsupported"."""
    counts = collections.Counter(report.verdict for report in reports)
    missing = laws - counts.total()
    holds = counts.pop(Verdict.HOLDS, 0)
    others = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
    others += [f"{missing} not finished"] if missing else []
    head = f"{holds} of {laws} law{'' if laws == 1 else 's'}{of and f' of {of}'} hold{'s' if 1 in (holds, laws) else ''}"
    return ", ".join([head, *others])


def refusal_lines(refusals: Mapping[str, Sequence[str]]) -> list[str]:
    """What an adapter did with illegal input, a line for each thing that it did. None if no illegal input was tried."""
    lines = [f"  {answer}: {'; '.join(names)}" for answer, names in refusals.items()]
    return ["illegal input, reported and not judged:", *lines] if lines else []


COLUMNS = ("cases", "holds", "blind", "broken", "unknown")


def table(reports: Sequence[LawReport]) -> list[str]:
    """A table with a line for each adapter and law: the count of each outcome, and each output's largest error in tolerances.

    An undecided or unsupported law has its reason in place of the errors.
    """
    header = ("adapter", "law", "verdict", *COLUMNS, "greatest error / allowed")
    rows: list[tuple[str, ...]] = []
    for report in reports:
        counts = {str(verdict): count for verdict, count in report.counts.items()}
        numbers = (sum(counts.values()), *(counts.get(name, 0) for name in COLUMNS[1:]))
        worst = sorted(report.ratios.items(), key=lambda item: (-item[1], item[0])) if report.kind == "truth" else []
        ratios = "  ".join(f"{name} {ratio:.2f}" if ratio < ENDLESS else f"{name} over {ENDLESS:g}" for name, ratio in worst)
        last = report.reason if report.verdict in (Verdict.UNKNOWN, Verdict.UNSUPPORTED) else ratios
        rows.append((report.adapter, report.law, str(report.verdict), *map(str, numbers), last))
    return text_table(header, rows, right=range(3, 8))


def outcome_text(run: Run, outcome: Outcome, versions: str) -> str:
    """The report of a repeated run."""
    law = run.the_law
    lines = [f"{WORDS[outcome.verdict]:<8} {run.law} · {run.adapter} · {law.says}"]
    if outcome.reason:
        lines.append(f"  because      {outcome.reason}")
    if outcome.fault:
        lines.append(f"  failed       {outcome.fault}")
    lines += finding_lines(outcome.findings)
    if outcome.verdict is Verdict.HOLDS:
        worst = ", ".join(f"{name} {ratio:.2f}" for name, ratio in outcome.ratios.items())
        lines.append(f"  compared     {outcome.rows} rows" + (f"; worst error / allowed: {worst}" if law.kind == "truth" else ""))
    return "\n".join([*lines, f"  versions     {versions}"])


def finding_lines(findings: list[Finding], most: int = 4) -> list[str]:
    """The lines of one case's findings, each with its worst row and its first wrong row. After `most`, only places are named."""
    lines: list[str] = []
    for finding in findings[:most]:
        lines.append(f"  {finding.place}: {finding.what}" + (f" ({finding.worst})" if finding.worst and not finding.rows else ""))
        lines += [f"    wrote      {line}" for line in finding.wrote]
        if finding.rows:
            lines.append(
                f"    worst row  {finding.worst}: error {finding.error:.3g}, allowed {finding.allowed:.3g} ({finding.origin})"
            )
            lines.append(f"    rows over  {finding.rows_over} of {finding.rows}, the first is {finding.first}")
            where = f"  from channel {finding.begin} on" if finding.begin else ""
            lines.append("    got        " + _numbers(finding.got) + where)
            lines.append("    want       " + _numbers(finding.want))
    if len(findings) > most:
        lines.append(f"  and {len(findings) - most} more: {', '.join(finding.place for finding in findings[most:])}")
    return lines


def _numbers(values: tuple[float, ...]) -> str:
    return "".join(f"{value:<14.7g}" for value in values).rstrip()
