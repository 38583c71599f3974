"""An implementation that compiles every new shape gets cases of few shapes, on a CPU too."""

import pathlib
from typing import Any

import pytest

from tests.answering import Answering
from verify.adapters.loader import load
from verify.adapters.registry import AdapterError
from verify.engine.check import Check
from verify.engine.profiles import BASE, Profile
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.messages import Describe, Question

LAWS = ["oracle", "cut", "strides"]
RIGHT = f"{pathlib.Path(__file__).resolve().parents[1]}/right.py:Chunkwise"


class Declares(Answering):
    """It says whether it compiles every new shape."""

    def __init__(self, *, compiles: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.compiles = compiles

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        answer = super().ask(question, deadline_s)
        return {**answer, "compiles": self.compiles} if isinstance(question, Describe) else answer


def runs_of(worker: Declares, folder: pathlib.Path) -> list[Run]:
    with Check(Settings(RIGHT, LAWS, Profile("some", 12), seed=3), [worker], Store(folder)) as checking:  # type: ignore[list-item]
        assert all(report.verdict == "holds" for report in checking.run())
        assert {report.law for report in checking.reports} == {*LAWS}
    return [Run.parse(line) for line in worker.asked]


def shapes(runs: list[Run]) -> set[tuple[Any, ...]]:
    cases = [run.example.case for run in runs]
    return {(case.lengths, case.heads, case.value_heads, case.key_dim, case.value_dim, case.dtype) for case in cases}


@pytest.mark.slow
def test_its_cases_have_few_shapes_and_others_many(tmp_path: pathlib.Path) -> None:
    plain, compiled = (runs_of(Declares(compiles=compiles), tmp_path) for compiles in (False, True))
    assert len(plain) == len(compiled) == (2 + BASE) * 12
    assert len(shapes(plain)) > 50
    assert 4 * len(shapes(compiled)) <= len(shapes(plain))
    assert {run.device for run in compiled} == {"cpu"}
    assert max(run.example.case.tokens for run in compiled) <= 1000, "sequences are as long as on a CPU"
    places = {(run.example.case.lengths, run.example.at) for run in compiled if run.law == "cut"}
    assert len(places) == len({lengths for lengths, _ in places}), "a place for each shape: another place is another shape"
    assert len({run.example.case.gate for run in compiled}) > 4
    assert len({run.example.case.seed for run in compiled}) > 40


def test_what_it_declares_is_true_or_false(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text("from tests.right import Chunkwise\nclass Jax(Chunkwise):\n    compiles = 'always'\n")
    with pytest.raises(AdapterError, match="compiles must be True or False, got 'always'"):
        load(f"{file}:Jax")
    file.write_text(file.read_text().replace("'always'", "True"))
    assert load(f"{file}:Jax").compiles is True  # type: ignore[union-attr]
