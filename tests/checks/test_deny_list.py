"""The deny-list of `--deny` is in every question whose kernels follow a policy, and counts for that question alone."""

import functools
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from oracles.operation import Inputs
from tests.answering import Answering
from tests.right import Chunkwise
from verify.cli.hosts import read_deny_list
from verify.engine.asking import ask_all, describe
from verify.engine.check import Check
from verify.engine.compile_plan import Plan
from verify.engine.outside import names_of
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.engine.would_hold import would_hold, would_hold_within
from verify.execution.line import Run
from verify.execution.service import typed_answer
from verify.findings import known
from verify.findings.store import Store
from verify.gpu import autotune
from verify.gpu.policies import Denied, write_denied
from verify.process.messages import Data, Launching, Question, Refuse, RunMany, RunOne, parse
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

RIGHT = "tests/right.py:Chunkwise"
LINE = f"law=oracle adapter={RIGHT} lengths=3"
ENTRY = Denied("interpreter", "3.7.1", "copy_kernel", "BLOCK=64", "oracle", LINE, "o is off")


class Hearing(Answering):
    """Keeps the questions that it gets."""

    def __init__(self, ratio: float) -> None:
        super().__init__(lambda run: ratio)
        self.questions: list[Question] = []

    def ask(self, question: Question, deadline_s: float | None = None) -> Data:
        self.questions.append(question)
        return super().ask(question, deadline_s)


class SaysWhatIsDenied(Chunkwise):
    def run(self, x: Inputs) -> Any:
        raise (KeyError if ENTRY.config in [entry.config for entry in autotune._active.denied] else TypeError)


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_all_questions_of_a_check_have_it(ratio: float, tmp_path: pathlib.Path) -> None:
    """Those of a law that breaks too: its smaller cases, and those that look for declarations."""
    worker: Any = Hearing(ratio)
    settings = Settings(RIGHT, ["oracle", "cut"], PROFILES["few"], denied=[ENTRY])
    with Check(settings, [worker], Store(str(tmp_path))) as check:
        check.run()
        check.ask_outside(names_of(check.describe().domain)[0])
    launching = [question for question in worker.questions if isinstance(question, Launching)]
    assert {type(question) for question in launching} >= {RunOne}
    assert len(launching) > 5
    assert all(question.denied == [ENTRY.to_json()] for question in launching)


def test_questions_about_several_lines_and_compilations_have_it() -> None:
    defects, questions, run = known.of(RIGHT, denied=[ENTRY]), list[Launching](), Run.parse(LINE)
    compilers = SimpleNamespace(prepare=lambda question, *_, **__: questions.append(question))
    plan: Any = SimpleNamespace(_defects=defects.on("a card"), _compilers=compilers)
    plan._words = functools.partial(Plan._words, plan)
    Plan._prepare(plan, run)
    worker: Any = Hearing(0.5)
    list(ask_all([run, run], worker, Store(), defects.deny_list))
    assert RunMany in map(type, worker.questions)
    for question in (*questions, *worker.questions):
        assert question.denied == [ENTRY.to_json()]
        assert parse(question.to_json()) == question


def test_runs_that_look_for_declarations_have_it() -> None:
    worker: Any = Hearing(2.0)
    defects, described, run = known.of(RIGHT, denied=[ENTRY]).deny_list, describe(RIGHT, worker), Run.parse(LINE)
    would_hold(described, [run], worker, Store(), defects=defects)
    rounding = len(worker.questions)
    raised = Outcome(Verdict.BROKEN, [Finding("call", FailureKind.RAISED, "raised ValueError")])
    would_hold_within(described, [Run.parse(LINE.replace("=3", "=0"))], raised, worker, Store(), defects=defects)
    runs = [question for question in worker.questions if isinstance(question, RunOne)]
    assert len(worker.questions) > rounding > 2
    assert all(question.denied == [ENTRY.to_json()] for question in runs)


def test_a_worker_denies_what_the_question_says_and_no_more() -> None:
    gpu, triton = autotune.here()
    here, elsewhere = ({**ENTRY.to_json(), "gpu": name, "triton": triton} for name in (gpu, "another card"))
    for denied, raised in (([here], "KeyError"), ([], "TypeError"), ([elsewhere], "TypeError"), ([elsewhere, here], "KeyError")):
        question = Refuse(f"{__file__}:SaysWhatIsDenied", "g of another length", "7", denied=denied)
        assert typed_answer(question.to_json()).to_json()["did"] == f"refuses ({raised})"


def test_an_entry_that_is_none_is_an_illegal_question() -> None:
    question = Refuse(f"{__file__}:SaysWhatIsDenied", "g of another length", "7", denied=[{"gpu": "none"}])
    assert "a denied configuration must have" in typed_answer(question.to_json()).to_json()["error"]


def test_the_file_is_read_once_and_a_new_one_is_empty(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deny.jsonl"
    assert read_deny_list(None) == read_deny_list(str(path), new=True) == []
    write_denied(path, [ENTRY])
    assert read_deny_list(str(path)) == read_deny_list(str(path), new=True) == [ENTRY]
