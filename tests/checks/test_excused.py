"""A check with known defects: they are reported, fail nothing and explain nothing else, in each single run too."""

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from properties.paths.laws import PATH_LAWS
from properties.words.example import Example
from tests.checking import RIGHT, checked
from verify.adapters import loader
from verify.adapters.packages import installed
from verify.engine import explaining, law_check
from verify.engine.drawing import seeded
from verify.engine.profiles import Profile
from verify.execution import service
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings.known import Known, KnownDefects
from verify.findings.law_report import ENOUGH
from verify.findings.store import Store
from verify.process.messages import RunOne
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Worker

TORCH = {"torch": (str(installed("torch")),)}


def known(line: str, where: str, **more: object) -> Known:
    run = Run.parse(line)
    words = dict(word.split("=") for word in where.split())
    return dataclasses.replace(Known(run, TORCH, words, "it was so from the start"), **more)  # type: ignore[arg-type]


@pytest.mark.slow
def test_known_defect_is_reported_and_fails_nothing(workers: list[Worker], store: Store) -> None:
    spec = "zoo/AddsStateTwice"
    defect = known(f"law=recall adapter={spec} lengths=2 gate=forever beta=one values=one_hot scale=one", "state=none")
    profile = Profile("more", 40)
    (report,) = checked(spec, ["recall"], workers, store, defects=[defect], profile=profile)
    assert report.verdict is Verdict.HOLDS, report
    assert report.counts[Verdict.KNOWN] > 0
    assert report.counts[Verdict.HOLDS] >= ENOUGH
    (line,) = report.known
    assert line.startswith("known defect, still there: it was so from the start (law=recall ")
    assert not (store.folder / "findings.jsonl").exists()


@pytest.mark.slow
def test_defect_on_file_explains_nothing_beyond_its_words(workers: list[Worker], store: Store) -> None:
    spec = "zoo/AddsStateTwice"
    line = f"law=recall adapter={spec} lengths=2 gate=forever beta=one values=one_hot scale=one"
    for other in (
        known(line, "state=none dtype=fp32 seed=0"),
        known(line, "state=none", versions={"torch": ("0.1",)}),
        known(line.replace("law=recall", "law=oracle"), "state=none"),
    ):
        (report,) = checked(spec, ["recall"], workers, store, defects=[other], profile=Profile("more", 20))
        assert report.verdict is Verdict.BROKEN
        assert not other.explains(Run.parse(report.run))


@pytest.mark.slow
def test_known_defect_that_no_longer_fails_is_said(workers: list[Worker], store: Store) -> None:
    defect = known(f"law=oracle adapter={RIGHT} lengths=3", "seed=0 gate=saturated")
    (report,) = checked(RIGHT, ["oracle"], workers, store, defects=[defect], profile=Profile("one", 1))
    assert report.verdict is Verdict.HOLDS
    (line,) = report.known
    assert line.startswith("known defect NO LONGER FAILS, remove it from known_defects.toml: ")
    elsewhere = dataclasses.replace(defect, somewhere=True)
    (report,) = checked(RIGHT, ["oracle"], workers, store, defects=[elsewhere], profile=Profile("one", 1))
    (line,) = report.known
    assert line.startswith("known defect, not shown on this processor: ")


def test_single_runs_are_judged_with_the_known_defects_that_explain_them(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """Of a broken output the judge measures only what they do not explain, so an outcome without them may look explained."""
    defects, run, passed = KnownDefects(), Run.parse(f"law=pure adapter={RIGHT} lengths=3"), list[object]()

    def answered(run: Run, worker: object, store: Store, defects: object = None, **_: object) -> Outcome:
        passed.append(defects)
        return Outcome(Verdict.HOLDS)

    for module, name in ((law_check, "ask"), (law_check, "ask_afresh"), (explaining, "ask_afresh")):
        monkeypatch.setattr(module, name, answered)
    law: Any = SimpleNamespace(_worker=None, _state=SimpleNamespace(store=store, defects=defects))
    law_check.LawCheck._ask(law, run)
    law_check.LawCheck._ask_afresh(law, run)
    broken = Outcome(Verdict.BROKEN, [Finding("o", FailureKind.OFF, "is off", error=2.0, allowed=1.0)])
    explaining.explain(run.the_law, run, broken, SimpleNamespace(deadline_s=1.0), store, defects, threading.Event())  # type: ignore[arg-type]
    assert len(passed) > 2
    assert all(each is defects for each in passed)


def test_a_run_alone_is_judged_with_what_its_question_excuses(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Any] = []
    monkeypatch.setattr(service, "execute", lambda _, **options: judged.append(options["excused"]) or Outcome(Verdict.HOLDS))
    service._ANSWERS[RunOne](RunOne(f"law=pure adapter={RIGHT} lengths=3", {}, {"dg": 4.0}))
    assert judged == [{"dg": 4.0}]


def test_a_path_is_judged_with_what_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    excused: list[Any] = []
    holds = Outcome(Verdict.HOLDS, rows=1)
    monkeypatch.setattr("verify.execution.paths.judged", lambda *arguments: excused.append(arguments[-1]) or holds)
    examples = list[Example]()
    adapter = loader.load("gdn/layer")
    seeded(PATH_LAWS["parallel"].draw(adapter.domain), 1, 1, examples.append)
    execute(Run("parallel", "gdn/layer", examples[0]), excused={"y": 3.0})
    assert excused
    assert all(outputs == {"y": 3.0} for outputs in excused)
