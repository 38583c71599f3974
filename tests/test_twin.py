"""The verb `twin`: what it says about pairs of tiny implementations, each with one planted difference."""

import dataclasses
import pathlib
from typing import Any

import pytest

from verify.adapters.loader import load
from verify.engine.across import SiteVerdict, SiteWorkers, cell_of
from verify.engine.twin import pairs
from verify.engine.twin.cases import cases_of, comparable
from verify.engine.twin.causes import BATCH, EPS, GATE, SPLIT, STATE
from verify.execution import twins
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.messages import Way

FILE = str(pathlib.Path(__file__).with_name("twin_adapters.py"))
TOKENS = 160


class InProcess(SiteWorkers):
    """Answers in this process."""

    def __init__(self) -> None:
        self.described: dict[str, Any] = {}

    def here(self, run: Run) -> Run:
        return run

    def cell(self, run: Run, declared: dict[str, Any] | None = None) -> SiteVerdict:
        return cell_of(execute(run, declared=declared or {}))

    def ask(self, device: str, question: Any, kind: Any, deadline_s: float | None = None) -> Any:
        assert isinstance(question, Way)
        return twins.went(question)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Described:
    domain: Any
    products: str = "ieee"


def found(trainer: str, server: str, folder: pathlib.Path, tokens: int = TOKENS) -> pairs.Twins:
    """What `twin` finds about two classes of twin_adapters.py."""
    sides = []
    for name in (trainer, server):
        spec, workers = name if "/" in name else f"{FILE}:{name}", InProcess()
        domain = load(spec).domain
        workers.described[spec] = Described(domain)  # type: ignore[assignment]
        sides.append(pairs.Side(workers, spec, comparable(domain)))
    cases = cases_of([side.domain for side in sides], tokens, "cpu", 0)
    return pairs.twins(sides, cases, [[], []], ("cpu", ""), str(folder), 1, lambda *_: None)


@pytest.mark.parametrize(
    ("trainer", "server", "knob", "switch"),
    [
        ("Steps", "Eps", EPS, "server without eps 1e-5 inside"),
        ("Steps", "DeclaredEps", EPS, "server without eps 1e-5 inside"),
        ("HalfState", "Steps", STATE, "trainer without a state in bf16 after each token"),
        ("Steps", "HalfGate", GATE, "server without g in bf16"),
        ("Chunk48", "Parts", SPLIT, "trainer in parts of 64 tokens"),
        ("Chunk48", "InBatches", BATCH, "server each sequence alone"),
    ],
)
def test_a_planted_difference_is_explained(trainer: str, server: str, knob: str, switch: str, tmp_path: pathlib.Path) -> None:
    result = found(trainer, server, tmp_path)
    cause = result.cause
    print(result.answer, result.wrong, result.causes)
    assert cause is not None
    assert (cause.knob, cause.switch) == (knob, switch)
    assert cause.share > 0.9
