"""Exit codes."""

from collections.abc import Sequence

from verify.findings.law_report import LawReport
from verify.process.outcome import Verdict

HOLDS, BROKEN, USAGE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130
EXITS = "exit: 0 every law holds   1 a law is broken   2 bad usage   3 undecided, or nothing was compared   130 interrupted"
TOLD = "exit: 0 all launches agree   1 a launch differs, or a call fails   2 bad usage   3 undecided, or no GPU   130 interrupted"


class NoGpu(Exception):
    """The command needs a GPU, and there is none."""


def exit_code(reports: Sequence[LawReport], *, all_asked: bool = True) -> int:
    """The exit code of a check: 1 if a law is broken; 3 if one is undecided or was not run, or if none holds; otherwise 0."""
    verdicts = [report.verdict for report in reports]
    if Verdict.BROKEN in verdicts:
        return BROKEN
    return HOLDS if all_asked and Verdict.UNKNOWN not in verdicts and Verdict.HOLDS in verdicts else UNDECIDED
