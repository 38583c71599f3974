"""Exit codes, and what each means for a verb, as its help prints it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verify.process.outcome import Verdict

if TYPE_CHECKING:
    from verify.findings.law_report import LawReport

HOLDS, BROKEN, USAGE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130


def _told(holds: str, broken: str | None, undecided: str) -> str:
    """The codes with their meanings, one on a line."""
    meanings = {HOLDS: holds, BROKEN: broken, USAGE: "bad usage", UNDECIDED: undecided, INTERRUPTED: "interrupted"}
    return "\n".join(["exit codes:", *(f"  {code:<5}{meaning}" for code, meaning in meanings.items() if meaning)])


EXITS = _told("every law holds", "a law is broken", "undecided, or nothing was compared")
EXITS_OF = {
    "list": _told("the list is printed", None, "gdn-verify itself failed"),
    "draw": _told("the lines are printed", None, "gdn-verify itself failed"),
    "export": _told("the files are written", None, "gdn-verify itself failed"),
    "known": _told("the defect is on file", "the line holds, so nothing was written", "undecided"),
    "launches": _told("all launches agree", "a launch differs, or a call fails", "undecided, or no GPU"),
    "across": _told("every line holds in every place", "a line is broken in a place", "a line cannot be asked in a place"),
    "bisect": _told(
        "the release or revision is found",
        "there is nothing to find: the line is broken with --good, or holds with --bad",
        "some cannot be asked",
    ),
    "compare": _told("nothing is worse", "something became broken, or a promise was lost", "undecided"),
    "twin": _told("same bits, or both within rounding", "a side is wrong, or breaks a promise that both declare", "undecided"),
    "zoo": _told(
        "every animal that was run is killed",
        "one survives, or right code is rejected",
        "a file that --json or --html names could not be written",
    ),
    "claims": _told(
        "every claim that this host can measure is measured, and right",
        "a form or a claim is wrong",
        "nothing is measured, a release is missing, or something failed",
    ),
    "arithmetic": _told(
        "every measure is known for this card, and the tolerances cover it",
        "the tolerances do not cover a measure",
        "a measure is not known for this card, a probe failed, or a file could not be written",
    ),
    "completion": _told("the script is printed", None, "gdn-verify itself failed"),
    "certificate": _told(
        "the certificate is right: the record, the sources and the signature are as they were, and every law held",
        "something differs, or a law was broken",
        "something could not be compared: a source, ssh-keygen or a GPU is missing, or a law was undecided",
    ),
    "new-process": _told("the files are written", None, "gdn-verify itself failed"),
    "fetch": _told("the files are there", None, "they could not be had"),
}


def exit_code(reports: "Sequence[LawReport]", *, all_asked: bool = True) -> int:
    """The exit code of a check: 1 if a law is broken; 3 if one is undecided or was not run, or if none holds; otherwise 0."""
    verdicts = [report.verdict for report in reports]
    if Verdict.BROKEN in verdicts:
        return BROKEN
    return HOLDS if all_asked and Verdict.UNKNOWN not in verdicts and Verdict.HOLDS in verdicts else UNDECIDED
