"""Kill tables: which law detects a wrong implementation when it is run alone, and how small the case must get."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from verify.engine.check import Check
from verify.engine.law_check import Settings
from verify.engine.profiles import PROFILES
from verify.execution.run import Run
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker


@dataclasses.dataclass(frozen=True)
class Kill:
    """The law that detects it, and the most that its smallest case may have: tokens of the longest sequence, and sequences."""

    law: str
    tokens: int = 1
    sequences: int = 1


def rows(table: Mapping[Any, Iterable[Kill]]) -> list[Any]:
    """A parameter of pytest for each implementation, a class or its name, and law."""
    named = [(getattr(wrong, "__name__", wrong), kills) for wrong, kills in table.items()]
    return [pytest.param(name, kill, id=f"{name}-{kill.law}") for name, kills in named for kill in kills]


def assert_killed_alone(name: str, kill: Kill, worker: Worker, folder: pathlib.Path) -> LawReport:
    """The report of the law in the default profile: broken, its case small, and both of its lines kept."""
    store = Store(folder)
    with Check(Settings(f"zoo/{name}", [kill.law], PROFILES["quick"]), [worker], store, defects=[]) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.BROKEN, f"{kill.law} lets {name} live: {report.counts}"
    case = Run.parse(report.run).example.case
    assert len(case.lengths) <= kill.sequences, report.run
    assert max(case.lengths) <= kill.tokens, report.run
    findings = (store.folder / "findings.jsonl").read_text()
    assert report.run in findings
    assert report.first_run in findings
    return report
