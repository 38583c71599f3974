"""A check says when it could not decide: by a failure of ours, by an oracle that is slow, or because cases were blind."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from oracles.tolerance import bound
from properties.laws.law import Blind
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.laws import LAWS
from properties.words.example import Example
from tests.answering import Answering
from tests.checking import FEW, RIGHT, checked
from tests.commands import Command
from verify.cli.exits import UNDECIDED, exit_code
from verify.engine import asking, law_check
from verify.engine.asking import ask
from verify.engine.check import Check
from verify.engine.compile_plan import Plan
from verify.engine.compilers import Compilers
from verify.engine.profiles import BASE, PROFILES, Profile
from verify.engine.state import Settings
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings import report as text
from verify.findings.law_report import ENOUGH
from verify.findings.store import Store
from verify.process.messages import Question, RunOne
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Worker

NOBODY = Compilers([], None)
HERE, THERE = "RuntimeError at verify/bench/path_bench.py:7 in f", "RuntimeError at verify/bench/path_bench.py:9 in f"


class Failing(Answering):
    """gdn-verify fails in every case of its runs that `wrong` says."""

    def __init__(self, wrong: Callable[[int], str]) -> None:
        super().__init__()
        self.wrong = wrong

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        answer = super().ask(question, deadline_s)
        if isinstance(question, RunOne) and (fault := self.wrong(len(self.asked))):
            return Outcome(Verdict.UNKNOWN, reason="gdn-verify failed: RuntimeError: mixed", fault=fault).to_json()
        return answer


@pytest.mark.parametrize("error", [ValueError("no truth today"), AssertionError(), ZeroDivisionError("0 rows")])
def test_oracle_that_raises_is_unknown_and_not_the_kernels_fault(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(bound, "bounds", fail)
    # The numbers are of this test alone, since a process keeps the bounds of a call.
    outcome = execute(Run("oracle", RIGHT, Example(Case((3,), seed=4_294))))
    assert outcome.verdict is Verdict.UNKNOWN
    assert outcome.reason.startswith(f"gdn-verify failed: {type(error).__name__}: ")
    assert re.fullmatch(rf"{type(error).__name__} at verify/bench/memo.py:\d+ in \w+", outcome.fault)
    assert outcome.findings == []


@pytest.mark.slow
def test_a_failure_of_ours_has_its_place_in_a_checkout_behind_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(pathlib.Path(__file__).resolve().parents[2])
    program = (
        "import sys\nsys.path.insert(0, 'link')\n"
        "ours = ('oracles', 'properties', 'verify')\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] in ours]:\n    del sys.modules[name]\n"
        "from oracles.operations import OPERATIONS\nfrom verify.execution.judging import faulted\n"
        "try:\n    OPERATIONS['l2norm'].check(None)\nexcept Exception as error:\n    print(faulted(error).fault)\n"
    )
    with Command([], tmp_path, program=program + "import verify\nprint(verify.__file__)\n") as done:
        out, _ = done.communicate(timeout=60)
    assert re.fullmatch(r"\w+ at oracles/operation.py:\d+ in \w+\n.*/link/verify/__init__.py\n", out), out


@pytest.mark.parametrize(
    ("wrong", "count"),
    [
        (lambda number: HERE, 3),
        (lambda number: HERE if number > 4 else "", 7),
        (lambda number: HERE if number % 3 else "", 5 * BASE),
        (lambda number: (HERE, THERE)[number % 2], 5 * BASE),
    ],
    ids=["always", "from the fifth on", "two in a row", "two by turns"],
)
def test_the_same_failure_of_ours_three_times_in_a_row_ends_the_law(wrong: Callable[[int], str], count: int, store: Store) -> None:
    worker: Any = Failing(wrong)
    (report,) = checked("fla/chunk", ["oracle"], [worker], store, profile=PROFILES["few"])
    assert report.verdict is Verdict.UNKNOWN
    assert len(worker.asked) == count
    assert report.fault == wrong(next(number for number in range(1, 9) if wrong(number)))
    assert report.fault_run in worker.asked
    assert ("the law ended after 3 such cases in a row" in report.reason) is (count < 5 * BASE)
    notice = text.fault_notice([report])
    assert notice.startswith(
        "This is a fault of gdn-verify and says nothing about fla/chunk: please report RuntimeError at verify/"
    )
    assert notice.endswith(f'gdn-verify repeat "{report.fault_run}"')
    line = text.law_line(report)
    assert line.count(report.fault) == 1
    assert f'"{report.fault_run}"' in line


def test_without_a_failure_of_ours_nothing_is_said_of_one(store: Store) -> None:
    worker: Any = Failing(lambda number: "")
    reports = checked("fla/chunk", ["oracle"], [worker], store)
    assert (reports[0].fault, text.fault_notice(reports)) == ("", "")
    assert "\n" not in text.law_line(reports[0])


def test_a_law_that_cannot_be_drawn_is_undecided_and_the_others_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("oracle", "cut"):
        monkeypatch.setitem(
            LAWS, name, dataclasses.replace(LAWS[name], draw=lambda domain: st.integers().filter(lambda number: False))
        )
    worker: Any = Answering()
    reports = {report.law: report for report in checked("fla/chunk", ["oracle", "cut", "pure"], [worker], store)}
    assert [reports[name].verdict for name in ("oracle", "cut", "pure")] == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.HOLDS]
    cut = reports["cut"]
    assert cut.reason.startswith("gdn-verify failed: Unsatisfiable: Unable to satisfy assumptions")
    assert cut.fault.startswith("Unsatisfiable at properties/seeds.py:")
    assert text.law_line(cut).endswith("\n  repeat       gdn-verify check fla/chunk --law cut --seed 0")
    assert text.fault_notice([cut]).endswith("gdn-verify check fla/chunk --law cut --seed 0")
    assert exit_code([*reports.values()]) == UNDECIDED
    plan = Plan(Domain(), ["cut", "pure"], 0, lambda law: 2, lambda law, example: Run(law, "fla/chunk", example), NOBODY)
    assert len(plan.of("pure").examples) == 2
    with pytest.raises(hypothesis.errors.Unsatisfiable):
        plan.of("cut")


def test_a_failure_of_ours_while_a_case_shrinks_leaves_the_law_broken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("min() arg is an empty sequence")

    monkeypatch.setattr(law_check, "explain_repeating", fails)
    worker: Any = Answering(lambda run: 3.0)
    broken, other = checked("fla/chunk", ["pure", "memory"], [worker], store)
    for report in (broken, other):
        assert (report.verdict, report.shrunk) == (Verdict.BROKEN, False)
        assert report.run == report.first_run == worker.asked[0 if report is broken else -1]
        assert "ValueError at " in text.failure(report)
        assert f'repeat       gdn-verify repeat "{report.run}"' in text.failure(report)


def test_blind_law_is_blind_and_an_empty_case_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*_: object) -> Iterator[object]:
        raise Blind("dark here")
        yield

    with monkeypatch.context() as patched:
        patched.setitem(LAWS, "pure", dataclasses.replace(LAWS["pure"], check=blind))
        outcome = execute(Run("pure", RIGHT, Example(Case((3,)))))
    assert (outcome.verdict, outcome.reason) == (Verdict.BLIND, "dark here")


@pytest.mark.slow
def test_oracle_that_is_slow_is_unknown_and_not_a_hang(store: Store) -> None:
    with Worker() as worker:
        worker.ask(RunOne(f"law=oracle adapter={RIGHT} lengths=1"))
        worker.deadline_s = 0.02  # which is about 1 s for so many tokens
        # This law runs the oracle before the kernel.
        slow = Case((30000, 30000), packed=True, key_dim=4, value_dim=4, gate="1000")
        outcome = ask(Run("packed", RIGHT, Example(slow, 0)), worker, store)
    assert outcome.verdict is Verdict.UNKNOWN


@pytest.mark.slow
def test_adapter_that_cannot_be_loaded_again_is_unknown(store: Store, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text("from tests.right import Chunkwise\nclass Kernel(Chunkwise): pass\n")
    run = Run("oracle", f"{file}:Kernel", Example(Case((3,))))
    with Worker() as worker:
        assert ask(run, worker, store).verdict is Verdict.HOLDS
        file.write_text("import nothing_there\n")
        worker.end()
        assert ask(run, worker, store).verdict is Verdict.UNKNOWN


def test_crash_that_does_not_repeat_is_undecided_and_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = Outcome(Verdict.BROKEN, [Finding("call", FailureKind.CRASHED, "crashed: killed by SIGSEGV")])
    answers = iter([crashed, *[Outcome(Verdict.HOLDS, rows=1)] * 100])
    for module in (asking, law_check):
        monkeypatch.setattr(module, "ask", lambda *_, **__: next(answers))
    with Worker() as worker, Check(Settings(RIGHT, ["pure"], Profile("few", 6)), [worker], store) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.UNKNOWN
    assert "SIGSEGV, but not again in a fresh worker" in report.reason
    assert "found once" in (store.folder / "findings.jsonl").read_text()


def blind_at_first(monkeypatch: pytest.MonkeyPatch, blind: int) -> list[str]:
    """Makes the first `blind` cases of a law blind, without a worker. Returns the lines that are run, as they are run."""
    lines = list[str]()

    def outcome(run: Run, *_: object, **__: object) -> Outcome:
        lines.append(str(run))
        return Outcome(Verdict.BLIND if len(lines) <= blind else Verdict.HOLDS)

    monkeypatch.setattr(law_check, "ask", outcome)
    monkeypatch.setattr(law_check, "ask_all", lambda runs, *_: map(outcome, runs))
    return lines


def test_other_cases_are_drawn_in_place_of_blind_ones(workers: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = blind_at_first(monkeypatch, 6)
    (report,) = checked(RIGHT, ["cut"], workers[:1], store)
    assert (report.verdict, report.counts) == (Verdict.HOLDS, {Verdict.BLIND: 6, Verdict.HOLDS: FEW.examples - 6 + ENOUGH})
    assert len({*lines}) == len(lines), "no case is run twice"


def test_least_profile_needs_no_more_than_its_cases(workers: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    blind_at_first(monkeypatch, 1)
    (report,) = checked(RIGHT, ["cut"], workers[:1], store, profile=PROFILES["least"])
    assert (report.verdict, report.counts) == (Verdict.HOLDS, {Verdict.BLIND: 1, Verdict.HOLDS: 2})


def test_cases_in_place_of_blind_ones_end(workers: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = blind_at_first(monkeypatch, 10**6)
    (report,) = checked(RIGHT, ["cut"], workers[:1], store)
    assert report.verdict is Verdict.UNKNOWN
    assert report.reason == f"only 0 of {len(lines)} cases could have shown a defect; a verdict needs {ENOUGH}"
    assert FEW.examples < len(lines) <= (1 + law_check.REPLACEMENTS) * FEW.examples


def test_cases_in_place_of_blind_ones_have_the_compile_keys_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = list[Any]()
    monkeypatch.setattr(law_check, "seeded", lambda strategy, *_, **__: strategies.append(strategy))
    plan: Any = SimpleNamespace(strategy=lambda law, domain: f"a palette's, for {law.name} and {domain}", domain="a GPU's domain")
    described: Any = SimpleNamespace(domain="the adapter's domain")
    common: Any = SimpleNamespace(settings=Settings(RIGHT, device="cuda", profile=FEW), plan=plan, described=described)
    report = SimpleNamespace(counts={Verdict.BLIND: 3})
    check: Any = SimpleNamespace(_state=common, report=report, _drawn=["a"], _blind={"a"}, _examples=8)
    assert law_check.LawCheck._replace_blind(check, LAWS["cut"]) is False
    assert strategies == ["a palette's, for cut and a GPU's domain"]
