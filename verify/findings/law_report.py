"""The report of one law of one adapter after a check."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from verify.execution.line import Run
from verify.process.outcome import Finding, Outcome, Verdict
from verify.process.picture import plain_number
from verify.process.reach import Reach
from verify.reach import statements

ENOUGH = 5  # a law with fewer cases that could see is UNKNOWN, unless all drawn cases could
DECIDED = (Verdict.HOLDS, Verdict.BROKEN, Verdict.KNOWN)  # outcomes of cases that looked at something


@dataclasses.dataclass
class LawReport:
    """The result of one law: its verdict, the count of each outcome, and the broken run after shrinking.

    `ratios` has the largest error divided by the tolerance of each output. Times are in seconds. `planned` is the number of cases
    that the law was to have. It was `cut_short` if the time was up, or the check was stopped, before all of them were run.
    """

    law: str
    adapter: str
    verdict: Verdict
    kind: str = ""
    says: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    reason: str = ""
    run: str = ""
    first_run: str = ""
    found_case: int = 0  # the number of the case that is `first_run`
    first_findings: list[Finding] = dataclasses.field(default_factory=list)  # of `first_run`
    findings: list[Finding] = dataclasses.field(default_factory=list)  # of `run`
    ordinary: list[str] = dataclasses.field(default_factory=list)  # the outputs that fail in `run` with ordinary numbers
    resembles: list[str] = dataclasses.field(default_factory=list)  # known defects that look like `findings`
    same_as: str = ""  # the call fails in the first case of every law, and the report of this law says how
    laws_at_once: list[str] = dataclasses.field(default_factory=list)  # the laws that do so, in the report that says how
    neighbours: list[str] = dataclasses.field(default_factory=list)
    tags: list[str] = dataclasses.field(default_factory=list)  # of a broken `session`: what `tags` says about `run`
    tags_run: str = ""  # the run that it says this about, if that is broken
    fails_too: list[str] = dataclasses.field(default_factory=list)  # changes of `run` with which it fails in the same way
    otherwise: list[str] = dataclasses.field(default_factory=list)  # declarations with which the broken run would hold
    planned: int = 0
    cut_short: bool = False
    shrunk: bool = True
    limit: str = ""  # the limit at which shrinking ended, in words
    # Whether `run` fails in a fresh process: "yes", "only afresh", "after others", "no", or "" if that was not tried.
    repeats: str = ""
    after: list[str] = dataclasses.field(default_factory=list)  # the runs after which it fails there, if not without them
    known: list[str] = dataclasses.field(default_factory=list)
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    sample: dict[str, float] = dataclasses.field(default_factory=dict)  # some lines that hold: the largest error over its tolerance
    regimes: dict[str, int] = dataclasses.field(default_factory=dict)
    seed: int = 0
    remembered: bool = False  # the broken run is a line that broke the law in an earlier check
    under: str = ""  # options that `repeat` needs besides the line
    fault: str = ""  # where gdn-verify itself failed: the exception, file, line and function
    fault_run: str = ""  # the first run with this fault
    versions: str = ""
    one_by_one: dict[str, int] = dataclasses.field(default_factory=dict)  # interpreted launches: "kernel: why", how many
    kernel_s: float = 0.0
    oracle_s: float = 0.0
    wait_s: float = 0.0  # for processes that compile
    started: int = 0  # worker processes that this law started, and the seconds until each had answered once
    start_s: float = 0.0
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # entries of the deny-list, and how many cases each is about
    wall_s: float = 0.0
    shrink_s: float = 0.0  # of `wall_s`, the seconds of shrinking and explaining the broken run
    reach: Reach = dataclasses.field(default_factory=Reach)  # what the decided cases looked at
    kept: dict[str, int] = dataclasses.field(default_factory=dict)  # promises that the domain does not make: cases that kept them
    unkept: dict[str, int] = dataclasses.field(default_factory=dict)  # and cases that did not

    def to_json(self) -> dict[str, Any]:
        """Plain data. Infinity, which JSON lacks, is a string."""
        data = dataclasses.asdict(dataclasses.replace(self, reach=Reach()))
        data["reach"] = self.reach.to_json()
        del data["reach"]["lines"]
        found = statements.statements(self.reach.lines)
        data["reach"]["statements"] = {f"{function.file}:{function.function}": function.to_json() for function in found}
        for name in ("findings", "first_findings"):
            data[name] = [finding.to_json() for finding in getattr(self, name)]
        data["ratios"] = {name: plain_number(ratio) for name, ratio in self.ratios.items()}
        return data

    def count(self, run: Run, outcome: Outcome) -> None:
        """Count the outcome of a case. Errors of a known defect do not enter the law's largest errors."""
        self.counts[outcome.verdict] = self.counts.get(outcome.verdict, 0) + 1
        if outcome.verdict in (Verdict.UNKNOWN, Verdict.UNSUPPORTED) and not self.reason:
            self.reason = outcome.reason
        if outcome.fault and not self.fault:
            self.fault, self.fault_run = outcome.fault, str(run)
        for name, ratio in outcome.ratios.items() if outcome.verdict is not Verdict.KNOWN else ():
            self.ratios[name] = max(ratio, self.ratios.get(name, 0.0))
        case, words = run.example.case, run.example.case.words()
        for name in case.REGIMES:
            key = f"{name}={words[name]}"
            self.regimes[key] = self.regimes.get(key, 0) + 1
        for kernel, launches in outcome.one_by_one.items():
            self.one_by_one[kernel] = self.one_by_one.get(kernel, 0) + launches
        for promise, kept in outcome.kept.items() if outcome.verdict is Verdict.HOLDS else ():
            counts = self.kept if kept else self.unkept
            counts[promise] = counts.get(promise, 0) + 1
        if outcome.verdict in DECIDED:
            self.reach.add(outcome.reach)
        self.kernel_s += outcome.kernel_s
        self.oracle_s += outcome.oracle_s


def left_out(reports: Iterable[LawReport]) -> list[str]:
    """A line for each entry of the deny-list that changed the draw of a case."""
    counts: collections.Counter[str] = collections.Counter()
    for report in reports:
        counts.update(report.left_out)
    return [f"not drawn      {denial}; in {count} case{'s' if count > 1 else ''}" for denial, count in counts.items()]


def reach_of(reports: Iterable[LawReport]) -> Reach:
    """What the decided cases of several laws looked at."""
    reach = Reach()
    for report in reports:
        reach.add(report.reach)
    return reach


def overall(counts: dict[str, int], reason: str = "", planned: int | None = None) -> tuple[Verdict, str]:
    """The verdict of a law from its counts, and the reason if it is not HOLDS.

    A law holds if no case is broken or undecided and at least ENOUGH cases, or `planned` cases if these are fewer, could see the
    defect. `planned` is the number of cases to draw, without those in place of blind ones. By default, it is the number in
    `counts`.
    """
    if counts.get(Verdict.BROKEN):
        return Verdict.BROKEN, reason
    if undecided := counts.get(Verdict.UNKNOWN):
        return Verdict.UNKNOWN, f"{undecided} of {sum(counts.values())} cases undecided: {reason}"
    holds, drawn = counts.get(Verdict.HOLDS, 0), sum(counts.values())
    could, least = holds + counts.get(Verdict.KNOWN, 0), min(ENOUGH, drawn if planned is None else planned)
    if holds and could >= least:
        return Verdict.HOLDS, ""
    if not drawn:
        return Verdict.UNKNOWN, "no case was run"
    if counts.get(Verdict.UNSUPPORTED) == drawn:
        return Verdict.UNKNOWN, f"no case of the domain was supported: {reason}"
    if not holds and could:
        return Verdict.UNKNOWN, f"all {could} cases that could see a defect show a known one; a verdict needs one that holds"
    few = f"{could} of {drawn} cases could have shown a defect" if could < drawn else f"{drawn} cases were run"
    return Verdict.UNKNOWN, f"only {few}; a verdict needs {least}"
