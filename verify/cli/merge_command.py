"""The verb `merge`: the shards of a check as one verdict."""

import sys
from typing import TextIO

from verify.cli.exits import BROKEN, HOLDS, UNDECIDED, exit_code
from verify.cli.output import JsonLines
from verify.cli.outputs import check_outputs, write_outputs
from verify.cli.terminal import marks_of, print_line, width_of
from verify.cli.verb_options import MergeOptions
from verify.findings import outside
from verify.findings import report as text
from verify.findings.records.merging import merged
from verify.findings.records.record import Record, lines_of, read
from verify.process.outcome import Verdict
from verify.reach import report as reach_report


def act(options: MergeOptions) -> int:
    """Merge the records, print what the whole check would have printed, and return the exit code that it would have had."""
    check_outputs(options)
    checks = merged((place, record) for place in options.record for record in read(place))
    out = sys.stderr if options.json == "-" else sys.stdout
    codes, records = list[int](), list[Record]()
    with JsonLines(options.json) as lines:
        for check in checks:
            code = _code(options, check)
            record = check.ended(code)
            _print(record, len(options.record), out)
            for line in lines_of(record):
                lines(line)
            codes.append(code)
            records.append(record)
        written = write_outputs(options, records)
        worst = max(codes, key=lambda code: (code == 1, code))
        return lines.code(worst if written or worst != HOLDS else UNDECIDED)


def _code(options: MergeOptions, record: Record) -> int:
    """The exit code of one check."""
    end, reports = record.end, record.reports
    assert end is not None
    missed = bool(end.not_run) or any(report.cut_short for report in reports)
    code = exit_code(reports, all_asked=not end.lacks and (options.budget_ok or not missed))
    if options.strict_domain and outside.wrong(end.outside):
        return BROKEN
    gaps = options.strict_reach and reach_report.gaps_of(end.reach, record.head.omits)
    return UNDECIDED if code == HOLDS and gaps else code


def _print(record: Record, files: int, out: TextIO) -> None:
    head, end = record.head, record.end
    assert end is not None
    print_line(f"{head.adapter}  {head.versions}  profile {head.profile}, seed {head.seed}, merged from {files} records", out)
    print_line("\n".join(head.declares), out)
    texts = text.LawTexts(width_of(out, text.WIDTH), marks_of(out))
    for report in record.reports:
        print_line("\n  ".join(filter(None, [texts(report), *report.known])), out)
    regimes = ["cases by regime:", *end.regimes] if end.regimes else []
    for part in (
        regimes,
        text.refusal_lines(end.refusals),
        end.looked_at,
        end.left_out,
        end.causes,
        outside.lines(end.outside),
        end.lacks,
    ):
        if part:
            print_line("\n".join(part), out)
    if end.not_run:
        print_line(f"not run in every shard: {', '.join(end.not_run)}", out)
    verdicts = text.laws_that_hold(record.reports, len(head.laws))
    print_line(f"{verdicts}; {record.cases} cases; the longest shard took {end.wall_s:.0f} s", out)
    if kept := text.kept_promises(record.reports):
        print_line("\n".join(kept), out)
    if end.exit_code == UNDECIDED and not end.lacks and Verdict.UNKNOWN not in {report.verdict for report in record.reports}:
        print_line("undecided: not all that was asked for was run or looked at", out)
