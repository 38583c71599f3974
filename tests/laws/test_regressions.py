"""Every line of regressions.txt holds: right implementations that were once reported as wrong."""

import itertools
import pathlib

import pytest

from verify.adapters.loader import load
from verify.adapters.packages import installed
from verify.execution.line import Run
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = (ROOT / "tests" / "regressions.txt").read_text().splitlines()
LINES = [line for line in TEXT if line and not line.startswith("#")]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the lines name adapters by their path in it


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
@pytest.mark.slow
def test_line_holds(worker: Worker, line: str) -> None:
    run = Run.parse(line)
    needs = {"fla-core": "fla/"} if run.adapter.startswith("fla/") else load(run.adapter).requires
    if missing := [name for name in needs if installed(name) is None]:
        pytest.skip(f"{run.adapter} needs {missing[0]}: pip install {missing[0]}")
    outcome = Outcome.from_json(worker.ask(RunOne(line)))
    assert outcome.verdict is Verdict.HOLDS, outcome
    assert outcome.rows > 0


def test_every_line_has_a_comment_that_names_its_cause() -> None:
    for before, line in itertools.pairwise(TEXT):
        if line in LINES:
            assert before.startswith("# "), line
    assert len(LINES) == len(set(LINES)) >= 7


def test_every_line_is_in_the_words_that_repeat_prints() -> None:
    for line in LINES:
        assert str(Run.parse(line)) == line
