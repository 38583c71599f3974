"""Calls an implementation with something that its domain leaves out, and says whether it refuses that or gets it right."""

from collections.abc import Callable
from typing import Any

from properties.books import book_of
from properties.words.outside import OUTSIDE, outside_of
from verify.adapters.base import Adapter
from verify.adapters.process_adapter import ProcessAdapter
from verify.bench.handing import WAYS, Handing
from verify.process.outcome import FailureKind, Outcome, Verdict

REFUSED, NOT_ASKED = "refused: ", "not asked: "  # how the reason of an unsupported outcome begins
BOOKS = ("rules", "modules", "layers")
# What a wrong result looks like. Another shape, or no gradient, may be what the implementation promises for such a call.
WRONG = (FailureKind.OFF, FailureKind.NOT_FINITE, FailureKind.DIFFERS, FailureKind.NOT_A_NUMBER)


def outside(what: str, adapter: Any, execute: Callable[[Adapter], Outcome]) -> Outcome:
    """The outcome of a case that has `what`, which the domain of the adapter leaves out. `execute` executes it for an adapter.

    Every way to hand the argument on is tried until one of them is right. The outcome HOLDS if one is, and is BROKEN if none is and
    one was accepted with a wrong result. Otherwise it is UNSUPPORTED, with a reason that says that the implementation refused it or
    was not asked, or UNKNOWN.
    """
    if reason := _not_outside(what, adapter):
        return Outcome(Verdict.UNSUPPORTED, reason=f"{NOT_ASKED}{reason}")
    outcomes: list[Outcome] = []
    for way in range(len(WAYS[what])):
        handing = Handing(adapter, OUTSIDE[what].domain(adapter.domain), what, way)
        outcomes.append(_told(execute(handing.adapter), handing))
        if outcomes[-1].verdict is Verdict.HOLDS or outcomes[-1].spent:
            break
    return min(outcomes, key=_rank)


def _not_outside(what: str, adapter: Any) -> str:
    """Why nobody can be asked, or ""."""
    if book_of(adapter.domain).name not in BOOKS:
        return "only rules, modules and layers are asked"
    if isinstance(adapter, ProcessAdapter):
        return "a program is not asked, since it has no parameters"
    return "" if what in outside_of(adapter.domain) else f"the domain has {what}"


def _rank(outcome: Outcome) -> int:
    """The place of an outcome among those of all ways: the least one counts."""
    if outcome.verdict in (Verdict.HOLDS, Verdict.BROKEN):
        return 0 if outcome.verdict is Verdict.HOLDS else 1
    if outcome.verdict is Verdict.UNSUPPORTED:
        return 2 if outcome.reason.startswith(REFUSED) else 4
    return 3


def _told(outcome: Outcome, handing: Handing) -> Outcome:
    """The outcome of one way, where an error is a refusal."""
    findings = outcome.findings
    if handing.not_asked:
        return Outcome(Verdict.UNSUPPORTED, reason=f"{NOT_ASKED}{handing.not_asked}", spent=outcome.spent)
    if handing.raised:
        reason = f"{REFUSED}{findings[0].what.removeprefix('raised ') if findings else outcome.reason}"
        return Outcome(Verdict.UNSUPPORTED, reason=reason, spent=outcome.spent)
    if outcome.verdict is Verdict.HOLDS and not handing.returned:
        return Outcome(Verdict.UNSUPPORTED, reason=f"{NOT_ASKED}the function under test was not called", spent=outcome.spent)
    wrong = [finding for finding in findings if finding.kind in WRONG]
    if findings and len(wrong) < len(findings):
        reason = f"the result is not judged: {findings[0].place} {findings[0].what}"
        return Outcome(Verdict.UNKNOWN, reason=reason, spent=outcome.spent)
    return outcome
