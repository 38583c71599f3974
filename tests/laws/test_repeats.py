"""Whether the smallest case fails again in a fresh process, as a person will run it, and what a report says if it does not."""

import dataclasses
import json
import pathlib
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checks.test_likeness import Telling, failed, off
from verify.cli.exits import BROKEN, HOLDS
from verify.cli.main import main
from verify.engine import explaining
from verify.engine.check import Check
from verify.engine.law_check import LawCheck
from verify.engine.profiles import Profile
from verify.engine.repeating import Explained, explain_repeating, fewest
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings import report as text
from verify.findings.known import NO_DEFECTS
from verify.findings.law_report import LawReport
from verify.findings.report import laws_that_hold, times
from verify.findings.store import Store
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

SPEC = "tests/right.py:Chunkwise"
FOUND = f"law=oracle adapter={SPEC} lengths=130 key_dim=64 value_dim=32 gate=64 state=random backward=no seed=7"
SAYS = "  repeats      does not repeat in a fresh process: it may depend on time, memory or the number of calls"
WRONG, RIGHT = off(o=40.0), off(o=0.5)


class Processes(Telling):
    """A worker whose answers depend on the process: `tell` gets the run, the lines before it in its process, and the process."""

    def __init__(self, tell: Callable[[Run, list[str], int], Outcome]) -> None:
        super().__init__(lambda run: tell(run, self.before, self.process))
        self.before, self.process = list[str](), 1

    def ask(self, question: Any, deadline_s: float | None = None) -> dict[str, Any]:
        answer = super().ask(question)
        self.before.append(getattr(question, "line", ""))
        return answer

    def end(self) -> None:
        self.before, self.process = [], self.process + 1


def explained(worker: Any, folder: pathlib.Path, found: str = FOUND, outcome: Outcome = WRONG) -> Explained:
    """What is said of a found run in the first process of a worker."""
    return explain_repeating(Run.parse(found), outcome, worker, Store(folder), NO_DEFECTS, threading.Event())


@pytest.mark.parametrize(("device", "limit"), [("", "60 s of CPU time"), ("device=cuda ", "30 s of CPU time")])
def test_shrinking_has_half_the_time_on_a_gpu(tmp_path: pathlib.Path, device: str, limit: str) -> None:
    long = Outcome(Verdict.BROKEN, WRONG.findings, cpu_s=14.0)
    found = FOUND.replace("lengths=", f"{device}lengths=")
    result = explained(Processes(lambda run, before, process: long), tmp_path, found, long)
    assert result.small.limit == limit


def test_a_failure_that_repeats_costs_one_new_process(tmp_path: pathlib.Path) -> None:
    worker = Processes(lambda run, before, process: WRONG if run.example.case.tokens > 7 else RIGHT)
    result = explained(worker, tmp_path)
    assert (result.repeats, result.run.example.case.lengths, worker.process) == ("yes", (8,), 2)
    assert ("lengths=7", "holds") in result.small.neighbours


def test_a_failure_by_chance_is_not_shrunk(tmp_path: pathlib.Path) -> None:
    worker = Processes(lambda run, before, process: RIGHT)
    result = explained(worker, tmp_path)
    assert (result.repeats, str(result.run), result.outcome, result.small.neighbours) == ("no", FOUND, WRONG, ())
    assert (worker.process, len(worker.asked)) == (2, 2), "once where it was found, and once in a fresh process"


def test_a_failure_that_a_fresh_process_alone_shows_is_shrunk_in_fresh_ones(tmp_path: pathlib.Path) -> None:
    worker = Processes(lambda run, before, process: WRONG if process > 1 and not before and run.example.case.tokens > 7 else RIGHT)
    result = explained(worker, tmp_path)
    assert (result.repeats, result.run.example.case.lengths) == ("only afresh", (8,))
    assert ("lengths=7", "holds") in result.small.neighbours


def test_a_failure_that_earlier_calls_decide_has_no_neighbours(tmp_path: pathlib.Path) -> None:
    worker = Processes(lambda run, before, process: WRONG if process == 1 and run.example.case.tokens > 7 else RIGHT)
    result = explained(worker, tmp_path)
    assert (result.repeats, result.run.example.case.lengths) == ("no", (8,)), "small, where earlier calls made it fail"
    assert (result.small.neighbours, result.small.others) == ((), ())


def test_the_found_case_stands_if_it_alone_repeats(tmp_path: pathlib.Path) -> None:
    worker = Processes(lambda run, before, process: WRONG if process == 1 or run.example.case.tokens == 130 else RIGHT)
    result = explained(worker, tmp_path)
    assert (result.repeats, str(result.run), result.small.neighbours) == ("yes", FOUND, ())


def test_what_has_been_confirmed_in_a_fresh_process_is_not_run_there_again(tmp_path: pathlib.Path) -> None:
    crashed = failed(FailureKind.CRASHED, "crashed: exited with code 7")
    worker = Processes(lambda run, before, process: crashed)
    assert explained(worker, tmp_path, outcome=crashed).repeats == "yes"
    assert worker.process == 1


def test_a_report_says_that_its_line_does_not_repeat() -> None:
    report = LawReport("oracle", SPEC, Verdict.BROKEN, run=FOUND, first_run=FOUND, findings=WRONG.findings)
    assert "  repeats  " not in text.failure(report)
    assert "  repeats  " not in text.failure(dataclasses.replace(report, repeats="yes"))
    assert SAYS in text.failure(dataclasses.replace(report, repeats="no")).splitlines()
    assert "only in a fresh process" in text.failure(dataclasses.replace(report, repeats="only afresh"))
    stopped = dataclasses.replace(report, shrunk=False, limit="120 runs")
    assert "  shrinking    stopped at its limit of 120 runs; a smaller case may exist" in text.failure(stopped)


def test_how_many_laws_hold_is_a_sentence() -> None:
    reports = [LawReport(str(verdict), SPEC, verdict) for verdict in (Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS)]
    assert laws_that_hold(reports, 4) == "2 of 4 laws hold, 1 broken, 1 not finished"
    assert laws_that_hold(reports[1:], 2, "1 adapter") == "1 of 2 laws of 1 adapter holds, 1 broken"
    assert laws_that_hold(reports[1:2], 1) == "0 of 1 law holds, 1 broken"
    assert laws_that_hold(reports[:1], 1) == "1 of 1 law holds"
    assert laws_that_hold([], 3) == "0 of 3 laws hold, 3 not finished"


def test_the_summary_has_the_seconds_of_shrinking() -> None:
    report = LawReport("oracle", SPEC, Verdict.BROKEN, kernel_s=2.0, shrink_s=55.3)
    assert times([report], 2) == "(2 processes together: kernels 2 s, reference and tolerances 0 s, shrinking 55 s)"
    assert times([dataclasses.replace(report, shrink_s=0.0, started=1, start_s=9.4, wait_s=3.0)], 1) == (
        "(1 process: kernels 2 s, reference and tolerances 0 s, waiting for compilers 3 s, started 1 worker, 9 s)"
    )


def words(run: Run) -> dict[str, Any]:
    """The words of a run's case."""
    return dict(run.example.case.words())


def test_a_failure_after_others_has_the_fewest_of_them_each_as_small_as_can_be(tmp_path: pathlib.Path) -> None:
    """It fails in float16 after a call in float32 with packed sequences, and then one in bfloat16."""

    def tell(run: Run, before: list[str], process: int) -> Outcome:
        others = [words(Run.parse(line)) for line in before]
        single = next((place for place, one in enumerate(others) if one["dtype"] == "fp32" and one["packed"] == "yes"), len(others))
        half = any(one["dtype"] == "bf16" for one in others[single + 1 :])
        return WRONG if half and words(run)["dtype"] == "fp16" and run.example.case.tokens > 7 else RIGHT

    kinds = ("fp32", "bf16", "fp16", "fp32 packed=yes", "fp16", "bf16", "fp32", "fp16")
    before = [Run.parse(f"law=oracle adapter={SPEC} lengths=90 key_dim=8 value_dim=8 dtype={kind}") for kind in kinds]
    found = Run.parse(FOUND + " dtype=fp16")
    worker: Any = Processes(tell)
    result = explain_repeating(found, WRONG, worker, Store(tmp_path), NO_DEFECTS, threading.Event(), before=before)
    assert (result.repeats, result.run.example.case.lengths) == ("after others", (8,))
    first, second = (words(run) for run in result.after)
    assert (first["dtype"], first["packed"], second["dtype"]) == ("fp32", "yes", "bf16")
    assert max(run.example.case.tokens for run in result.after) <= 1
    assert ("lengths=7", "holds") in result.small.neighbours
    alone = explain_repeating(found, WRONG, worker, Store(tmp_path), NO_DEFECTS, threading.Event(), before=before[:3])
    assert (alone.repeats, alone.after) == ("no", ())


@pytest.mark.parametrize("period", [2, 3])
def test_a_failure_by_chance_is_not_laid_on_earlier_runs(period: int, tmp_path: pathlib.Path) -> None:
    """It fails in some processes, whatever they ran before."""
    worker: Any = Processes(lambda run, before, process: WRONG if process % period == 0 and before else RIGHT)
    before = [Run.parse(f"law=oracle adapter={SPEC} lengths={length} key_dim=8 value_dim=8") for length in range(1, 30)]
    found = Run.parse(FOUND)
    result = explain_repeating(found, WRONG, worker, Store(tmp_path), NO_DEFECTS, threading.Event(), before=before)
    assert (result.repeats, result.after) == ("no", ())


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True), st.integers(61, 90))
def test_the_fewest_runs_are_found_and_in_their_order(needed: list[int], count: int) -> None:
    tried: list[Sequence[Any]] = []
    runs: list[Any] = list(range(count))

    def fails(some: Sequence[Any]) -> bool:
        tried.append(some)
        return {*needed} <= {*some}

    assert fewest(runs, fails) == sorted(needed)
    assert len(tried) <= 4 + len(needed) * 9
    assert all(list(some) == sorted(some) for some in tried)
    assert fewest(runs, lambda some: False) == fewest([], lambda some: True) == []


@pytest.mark.parametrize("most", range(12))
def test_without_more_attempts_what_failed_last_is_the_answer(most: int) -> None:
    tried: list[list[Any]] = []
    runs: list[Any] = list(range(30))

    def fails(some: Sequence[Any]) -> bool | None:
        if len(tried) >= most:
            return None
        if {3, 17} <= {*some}:
            tried.append(list(some))
            return True
        return False

    found = fewest(runs, fails)
    assert found == (tried[-1] if tried else [])


def test_a_report_names_all_lines_that_one_process_runs() -> None:
    report = LawReport("oracle", SPEC, Verdict.BROKEN, run="law=b", first_run="law=c", repeats="after others", after=["law=a"])
    lines = text.failure(report).splitlines()
    assert '  repeat       gdn-verify repeat "law=a" "law=b"' in lines
    assert "  repeats      only after other runs in the same process: alone in a fresh process, the case holds" in lines


@pytest.mark.slow
def test_one_process_runs_several_lines_and_the_last_one_decides(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"law=oracle adapter=tests/wrong_repeats.py:FailsOnce lengths={length} backward=no" for length in (3, 4, 5)]
    assert main(["repeat", lines[-1], "--findings", str(tmp_path)]) == HOLDS
    capfd.readouterr()
    assert main(["repeat", *lines, "--findings", str(tmp_path)]) == BROKEN
    first, second, third = capfd.readouterr().out.splitlines()[:3]
    assert [first, second] == [f"HOLDS    {line}" for line in lines[:2]]
    assert third.startswith("BROKEN   oracle")
    assert main(["repeat", *" ".join(lines).split(), "--json", "--findings", str(tmp_path)]) == BROKEN
    data = json.loads(capfd.readouterr().out)
    assert (data["run"], data["verdict"]) == (lines[-1], "broken")
    assert data["after"] == [{"run": line, "verdict": "holds"} for line in lines[:2]]


@pytest.mark.parametrize(("name", "repeats"), [("FailsOnce", "after others"), ("FailsFirst", "only afresh")])
@pytest.mark.slow_after_first
def test_a_check_breaks_the_law_and_says_so(
    name: str, repeats: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 8)  # each starts a process
    settings = Settings(f"tests/wrong_repeats.py:{name}", ["oracle"], Profile("some", 5, large=False))
    with Check(settings, 1, Store(tmp_path), defects=[]) as check:
        (report,) = check.run()
    assert (report.verdict, report.repeats) == (Verdict.BROKEN, repeats)
    data = json.loads(json.dumps(report.to_json()))
    assert (data["repeats"], len(data["after"]) > 0) == (repeats, repeats == "after others")
    assert 0 < data["shrink_s"] <= data["wall_s"]


@pytest.mark.slow
def test_what_a_fresh_process_does_not_repeat_after_earlier_cases_either_is_undecided(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONE_PROCESS", str(tmp_path / "there"))
    settings = Settings("tests/wrong_repeats.py:BreaksInOneProcess", ["history"], Profile("few", 12))
    with Check(settings, 1, Store(tmp_path), defects=[]) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.UNKNOWN
    assert "not again in a fresh worker" in report.reason


@pytest.mark.slow
def test_what_a_fresh_process_repeats_after_earlier_cases_is_broken(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 5)  # each makes 130 calls
    settings = Settings("tests/wrong_repeats.py:BreaksInTheEnd", ["history"], Profile("few", 12))
    with Check(settings, 1, Store(tmp_path), defects=[]) as check:
        (report,) = check.run()
    assert (report.verdict, report.repeats) == (Verdict.BROKEN, "after others")
    assert report.after


@pytest.mark.parametrize(
    ("variant", "again", "verdict"),
    [
        ("threads", [Verdict.HOLDS, Verdict.HOLDS, Verdict.BROKEN], Verdict.BROKEN),
        ("streams", [Verdict.HOLDS] * 3, Verdict.UNKNOWN),
        ("others", [Verdict.HOLDS, Verdict.BROKEN], Verdict.UNKNOWN),
    ],
)
def test_a_failure_that_depends_on_timing_gets_several_fresh_processes(
    variant: str, again: list[Verdict], verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(again)
    monkeypatch.setattr(LawCheck, "_ask_afresh", lambda *_: Outcome(next(answers)))
    monkeypatch.setattr(LawCheck, "_keep", lambda *_: None)
    law_check: Any = LawCheck.__new__(LawCheck)
    law_check._worker = types.SimpleNamespace(ran=[], deadline_s=1.0)
    law_check._state = types.SimpleNamespace(
        defects=types.SimpleNamespace(explain=lambda *_: False), store=None, stopped=threading.Event()
    )
    law_check._before = {}
    broken = Outcome(Verdict.BROKEN, findings=[Finding("o", FailureKind.OFF, "is off")])
    run = Run.parse(f"law=history variant={variant} adapter=tests/laws/test_repeats.py:Chunkwise lengths=4")
    assert law_check._confirmed(run, broken).verdict is verdict


def test_a_failure_that_a_known_defect_explains_needs_no_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LawCheck, "_ask_afresh", lambda *_: pytest.fail("a new process takes seconds on a GPU"))
    law_check: Any = LawCheck.__new__(LawCheck)
    law_check._worker, law_check._before = types.SimpleNamespace(ran=[]), {}
    law_check._state = types.SimpleNamespace(defects=types.SimpleNamespace(explain=lambda *_: types.SimpleNamespace(kernel="")))
    broken = Outcome(Verdict.BROKEN, findings=[Finding("dg", FailureKind.OFF, "is off")])
    run = Run.parse("law=history variant=others adapter=tests/laws/test_repeats.py:Chunkwise lengths=4")
    assert law_check._confirmed(run, broken).verdict is Verdict.KNOWN
