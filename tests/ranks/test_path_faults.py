"""A rank that fails is named in the verdict of its case within its deadline, the next case runs, and nobody is left behind."""

import pathlib
from collections.abc import Iterator

import pytest

from verify.engine.asking import ask, ask_all
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict
from verify.ranks import group as ranks
from verify.ranks.group import RankGroup

pytestmark = pytest.mark.ranks

CASE = "law=parallel adapter={adapter} lengths=8 cp=2 heads=2 value_heads=2 backward=no"
DEADLINE_S = 5.0  # a case takes less than one, and whoever hangs takes all of it


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    with RankGroup(2, deadline_s=DEADLINE_S) as group:
        yield group


def outcome_of(group: RankGroup, tmp_path: pathlib.Path, kind: str) -> Outcome:
    return ask(Run.parse(CASE.format(adapter=f"tests/path_faults.py:{kind}")), group, Store(tmp_path))


@pytest.mark.parametrize(
    ("kind", "excerpts"),
    [
        ("Raises", ("rank 1: call", "raised RuntimeError: no such tile")),
        ("Exits", ("rank 1", "exited with code 7")),
        ("IsKilled", ("rank 1", "killed by SIGKILL")),
        ("HangsOnTheCPU", (f"rank 1 hung: no answer within {DEADLINE_S:g} s", "in fault (path_faults.py")),
        ("HangsInACollective", ("rank", "all_")),
    ],
)
@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_the_next_case_runs(
    two: RankGroup, tmp_path: pathlib.Path, kind: str, excerpts: tuple[str, ...]
) -> None:
    outcome = outcome_of(two, tmp_path, kind)
    assert outcome.verdict is Verdict.BROKEN, outcome
    words = " ".join(f"{finding.place}: {finding.what} {finding.worst}" for finding in outcome.findings)
    for excerpt in excerpts:
        assert excerpt in words
    assert outcome_of(two, tmp_path, "Fault").verdict is Verdict.HOLDS


@pytest.mark.slow
def test_a_cotangent_that_a_rank_changes_is_named_once(two: RankGroup, tmp_path: pathlib.Path) -> None:
    adapter = "tests/path_faults.py:ClearsItsCotangent"
    run = Run.parse(f"law=repeats adapter={adapter} lengths=4 cp=2 heads=2 value_heads=2 deterministic=yes")
    outcome = ask(run, two, Store(tmp_path))
    found = [(finding.place, finding.what) for finding in outcome.findings]
    assert found == [("rank 1: cotangent of y", "was changed by the call")]


@pytest.mark.slow
def test_a_rank_that_prints_much_disturbs_nothing(two: RankGroup, tmp_path: pathlib.Path) -> None:
    assert outcome_of(two, tmp_path, "PrintsMuch").verdict is Verdict.HOLDS


@pytest.mark.slow
def test_runs_put_as_one_question_have_each_its_own_outcome(two: RankGroup, tmp_path: pathlib.Path) -> None:
    kinds = ("Fault", "Raises", "Fault", "Fault")
    runs = [Run.parse(CASE.format(adapter=f"tests/path_faults.py:{kind}")) for kind in kinds]
    outcomes = list(ask_all(runs, two, Store(tmp_path)))
    assert [outcome.verdict for outcome in outcomes] == [Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS, Verdict.HOLDS]
    assert outcomes[1].findings[0].place == "rank 1: call"
