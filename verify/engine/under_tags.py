"""A broken trace under the law `tags`: where the law `session` names numbers, `tags` names the token whose tag is misplaced."""

import dataclasses
from collections.abc import Callable
from typing import Any

from properties.traces.case import TAG_CHANNELS
from properties.traces.domain import TraceDomain
from properties.traces.laws import TRACE_LAWS, tag_widths
from properties.words.example import Example
from verify.execution.line import Run
from verify.findings.law_report import LawReport
from verify.process.outcome import Outcome, Verdict


def add_tags(report: LawReport, domain: Any, ask: Callable[[Run], Outcome]) -> None:
    """Add to the report of a broken `session` what the law `tags` says about its smallest trace. Other reports stay.

    A trace whose values are too narrow for tags gets the least width that the domain has for them.
    """
    law = TRACE_LAWS["tags"]
    broken = report.law == "session" and report.verdict is Verdict.BROKEN
    if not broken or not isinstance(domain, TraceDomain) or law.needs(domain) is not None:
        return
    run = Run.parse(report.run)
    case = run.example.case
    if case.value_dim < TAG_CHANNELS:
        case = dataclasses.replace(case, value_dim=min(tag_widths(domain)))
    tagged = dataclasses.replace(run, law=law.name, example=Example(case))
    outcome = ask(tagged)
    if outcome.verdict is Verdict.HOLDS:
        report.tags = ["every token is where it belongs, so the numbers that are computed from it are wrong"]
    if outcome.verdict is Verdict.BROKEN:
        report.tags = [finding.what for finding in outcome.findings[:2]]
        report.tags_run = str(tagged)
