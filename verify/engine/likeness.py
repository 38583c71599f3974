"""Whether a smaller case fails as the found one does. Otherwise shrinking could pass from the found defect to another one."""

import re

from verify.execution.line import Run
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

SHARE = 1 / 3  # a smaller case has at least this share of the found case's ratio of error to tolerance,
ENOUGH = 8.0  # or at least this ratio: nothing like it comes from rounding, and smaller cases err by less
LARGE = 1000.0  # of a ratio that one step must not change no more than this counts
# Failures whose place in the code stays the same while a case shrinks. For the others, the place is a place in the results.
PLACED = (FailureKind.RAISED, FailureKind.RACE)


def alike(found: Outcome, found_run: Run, outcome: Outcome, run: Run, *, every: bool = True) -> bool:
    """Whether the outcome of a case that was made simpler is the failure of the found case.

    - The first output that failed in the found case fails in the same way: kind of failure, exception and place in the code.
    - No other output fails than in the found case, and none fails in another way than there. If `every`, all outputs that failed
      there fail, as far as the smaller case has them: without a backward it has no gradients.
    - The error of that first output over its tolerance is at least ENOUGH, or SHARE of what it is in the found case.
    - If both cases have the same mesh, the first output fails on some rank on which it failed in the found case.
    """
    if outcome.verdict is not Verdict.BROKEN or not found.findings:
        return False
    first, ways = found.findings[0], _ways(found)
    same = [finding for finding in outcome.findings if _place(finding) == _place(first)]
    if first.ranks and _mesh(run) == _mesh(found_run):
        same = [finding for finding in same if {*finding.ranks} & {*first.ranks}]
    largest = max(finding.ratio for finding in found.findings if _place(finding) == _place(first))
    return (
        bool(same)
        and max(finding.ratio for finding in same) >= min(SHARE * largest, ENOUGH)
        and all(way(finding) in ways.get(finding.port, ()) for finding in outcome.findings)
        and not (every and {*ways} & ({*outcome.ratios} - {finding.port for finding in outcome.findings}))
    )


def steady(found: Outcome, before: Outcome, after: Outcome, *, falls: bool = False) -> bool:
    """Whether one step left the error of the first output that failed about as large as before, over its tolerance.

    With `falls` it may have become smaller: with fewer rows, the worst one is less bad.
    """
    first = _place(found.findings[0])
    ratios = [
        min(max((finding.ratio for finding in outcome.findings if _place(finding) == first), default=0.0), LARGE)
        for outcome in (before, after)
    ]
    return (falls or SHARE * ratios[0] <= ratios[1]) and ratios[1] <= ratios[0] / SHARE


def way(finding: Finding) -> str:
    """How and where in the code an output fails, without the numbers of a message, which change with the sizes of a case."""
    place = finding.worst if finding.kind in PLACED else ""
    return f"{finding.kind} {re.sub(r'[0-9]+', '#', finding.detail)} {place}".rstrip()


def _place(finding: Finding) -> tuple[str, str]:
    return finding.port, way(finding)


def _ways(outcome: Outcome) -> dict[str, set[str]]:
    """For each output that failed, how it failed."""
    ways: dict[str, set[str]] = {}
    for finding in outcome.findings:
        ways.setdefault(finding.port, set()).add(way(finding))
    return ways


def _mesh(run: Run) -> tuple[int, int]:
    """How many ranks a case has along each axis of its mesh: one, unless it is the case of a path."""
    case = run.example.case
    return getattr(case, "tp", 1), getattr(case, "cp", 1)
