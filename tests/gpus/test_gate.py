"""The GPU gate: each judge rejects what it is there for, the record is about the sources, and CONTRIBUTING.md says what it says."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import gate
from tests.gate import FAILED, NOT_RUN, PASSED, Done, Row, Step
from verify.cli import exits
from verify.findings.law_report import LawReport
from verify.findings.records import record
from verify.findings.records.record import End, Head, Record
from verify.gpu import record as gpu_record
from verify.process.outcome import Verdict

HOLDS, BROKEN = Verdict.HOLDS, Verdict.BROKEN
ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAD = Head("fla/chunk", "1.0", "", "", "few", 0, ["oracle"])
PASSES = "<testcase name='test_one[a]'/><testcase name='test_one[b]'/><testcase name='test_two'><skipped/></testcase>"
SKIPPED = "<testcase name='test_two'><skipped/></testcase>"
FAILS = "<testcase name='test_one[a]'/><testcase name='test_one[b]'><failure/></testcase>"


@pytest.fixture
def done(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """A step that has ended, with what it wrote."""
    monkeypatch.setattr(gate, "LOGS", tmp_path)

    def step_result(code: int = 0, out: str = "", *lines: tuple[float, str]) -> Done:
        step = Step("step", "what it shows", (), gate.check)
        if out:
            (tmp_path / "step.out").write_text(out)
        return Done(step, code, 1.0, list(lines))

    return step_result


def laws(*verdicts: Verdict, ended: bool = True) -> str:
    """The record of a check of one law for each verdict, with 5 cases that held and 2 that were blind."""
    reports = [LawReport("oracle", HEAD.adapter, verdict, counts={Verdict.HOLDS: 5, Verdict.BLIND: 2}) for verdict in verdicts]
    lines = record.lines_of(Record(HEAD, reports, End(0, 1.0) if ended else None))
    return "".join(json.dumps(line) + "\n" for line in lines)


def xml(cases: str) -> str:
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>"


def test_a_judge_passes_what_is_good_and_nothing_else(done: Callable[..., Done]) -> None:
    for judge, good, bad in [
        (
            gate.check,
            (0, laws(HOLDS)),
            [
                (1, laws(BROKEN)),
                (3, laws(HOLDS)),
                (0, ""),
                (0, laws(Verdict.UNSUPPORTED)),
                (0, laws(HOLDS, ended=False)),
                (0, laws(HOLDS)[:-20]),
            ],
        ),
        (
            gate.first_verdict(9),
            (0, "", (8.0, "HOLDS x")),
            [(0, "", (9.5, "HOLDS x")), (0, "", (8.0, "x")), (1, "", (8.0, "HOLDS"))],
        ),
        (
            gate.whole,
            (1, laws(HOLDS, BROKEN, Verdict.UNSUPPORTED)),
            [(3, laws(HOLDS)), (0, laws(Verdict.UNKNOWN)), (0, ""), (-9, laws(HOLDS))],
        ),
        (
            gate.steady,
            (0, "", (1.0, "36.0 cases a second: 3.9 s, kernels 1.00, oracle 2.00; 9 holds")),
            [
                (0, ""),
                (0, "", (1.0, "34.0 cases a second: 3.9 s, kernels 1.00, oracle 2.00; 9 holds")),
                (0, "", (1.0, "36.0 cases a second: 4.1 s, kernels 1.00, oracle 2.00; 9 holds")),
                (0, "", (1.0, "36.0 cases a second: 3.9 s, kernels 1.00, oracle 2.00; 8 holds, 1 broken")),
                (1, "", (1.0, "36.0 cases a second: 3.9 s, kernels 1.00, oracle 2.00; 9 holds")),
            ],
        ),
        (
            gate.no_alarm,
            (0, "", (1.0, "0.1 cases a second: 4 s, kernels 1; 9 holds")),
            [
                (0, ""),
                (0, "", (1.0, "0.1 cases a second: 4 s, kernels 1; 8 holds, 1 unknown")),
                (1, "", (1.0, "0.1 cases a second: 4 s, kernels 1; 9 holds")),
            ],
        ),
        (gate.tests, (0, xml(PASSES)), [(1, xml(FAILS)), (0, xml(FAILS)), (3, ""), (2, xml(PASSES)), (0, xml(SKIPPED))]),
        (
            gate.rates,
            (0, json.dumps({"exchange": {"a_second": gate.LAYOUTS}, "parallel": {"a_second": gate.LAYERS}})),
            [
                (0, json.dumps({"exchange": {"a_second": gate.LAYOUTS - 1}, "parallel": {"a_second": gate.LAYERS}})),
                (0, json.dumps({"exchange": {"a_second": gate.LAYOUTS}})),
                (1, ""),
            ],
        ),
    ]:
        assert {row.verdict for row in judge(done(*good))} == {PASSED}, judge
        for arguments in bad:
            (gate.LOGS / "step.out").unlink(missing_ok=True)
            assert FAILED in {row.verdict for row in judge(done(*arguments))}, arguments


def test_a_whole_check_that_takes_too_long_fails(done: Callable[..., Done]) -> None:
    slow = dataclasses.replace(done(0, laws(HOLDS)), seconds=gate.WHOLE_S + 1)
    assert [row.verdict for row in gate.whole(slow)] == [FAILED]


def test_a_row_a_test_function_and_none_for_what_was_skipped(done: Callable[..., Done]) -> None:
    assert [(row.what, row.figure) for row in gate.tests(done(0, xml(PASSES)))] == [("one", "2 of 2")]


def test_cases_are_those_that_held_and_those_of_rates(done: Callable[..., Done]) -> None:
    assert done(0, laws(HOLDS, HOLDS)).cases == 10
    assert done(0, json.dumps({"exchange": {"cases": 30, "a_second": 1.0}, "parallel": {"cases": 4}, "seed": 0})).cases == 34


def test_a_file_that_no_judge_expects_fails_its_row_and_no_other(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOGS", tmp_path)
    wrote = (gate.PYTHON, "-c", "import sys; open(sys.argv[1], 'w').write('<no XML')", "{file}")
    steps = [
        Step("one", "tests on one GPU", wrote, gate.tests),
        Step("two", "first", (gate.PYTHON, "-c", ""), gate.first_verdict(9)),
    ]
    with gate.Gate(tmp_path) as run:
        run.stage([("0", steps)])
    assert [(row.what, row.verdict) for row in run.rows] == [("tests on one GPU", FAILED), ("first", FAILED)]
    assert run.rows[0].figure.startswith("ParseError: ")


def test_every_step_is_named_once_and_sees_cards_that_are_there() -> None:
    for cards in [1, 2, 4]:
        lanes = [lane for stage in gate.lanes(cards) for lane in stage]
        names = [step.name for _, steps in lanes for step in steps]
        assert len(names) == len(set(names)), cards
        assert {int(card) for seen, _ in lanes for card in seen.split(",")} == set(range(cards)), cards
        assert (set(gate.DISTRIBUTED_STEPS) <= set(names)) is (cards > 1), cards


def test_every_file_with_a_test_for_gpus_is_run_by_the_gate() -> None:
    marked = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text()}
    assert marked - {"tests/gpus/test_gate.py"} == set(gate.GPU_TESTS)


# The record

RECORD: dict[str, Any] = {
    "sources": "a" * 64,
    "date": "2026-11-23",
    "complete": True,
    "cards": ["NVIDIA H100", "NVIDIA H100"],
    "versions": {"torch": "2.11.0"},
    "counts": {"distributed cases": 2345},
    "seconds": 321.5,
    "verdicts": [],
}


def test_sources_are_the_contents_of_every_file_and_no_cache(tmp_path: pathlib.Path) -> None:
    files = {"verify/b.toml": b"x = 1\n", "oracles/a.py": b"", "properties/zoo/c.py": b"pass\n"}
    for name, contents in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(contents)
    want = hashlib.sha256(b"".join(name.encode() + b"\0" + files[name] + b"\0" for name in sorted(files))).hexdigest()
    (tmp_path / "verify" / "__pycache__").mkdir()
    (tmp_path / "verify" / "__pycache__" / "b.cpython-311.pyc").write_bytes(b"cache")
    (tmp_path / "README.md").write_text("not a source")
    assert gpu_record.sources(tmp_path) == want
    (tmp_path / "verify" / "b.toml").write_bytes(b"x = 2\n")
    assert gpu_record.sources(tmp_path) != want


def test_the_list_says_whether_the_sources_changed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu_record, "PLACES", (place,))
    assert gpu_record.status() == "no record of a GPU gate: run tox -e gpu in a checkout, on a host with two GPUs"
    gate.written(RECORD, place)
    assert "They have CHANGED since" in gpu_record.status()
    gate.written({**RECORD, "sources": gpu_record.sources()}, place)
    assert gpu_record.status().startswith(
        "The GPU gate (`tox -e gpu`) passed on 2026-11-23 on 2 x NVIDIA H100 in 322 s, with 2,345 "
    )
    assert gpu_record.status().endswith("They have not changed since.")
    place.write_text('{"sources": "a"}')
    assert gpu_record.status() == "gpu.json must be the record of a GPU gate: it has no date"
    for wrong in ({"counts": {"distributed cases": "many"}}, {"earlier": [{}]}, {"earlier": 3}):
        place.write_text(json.dumps({**RECORD, **wrong}))
        assert gpu_record.status().startswith("gpu.json must be the record of a GPU gate: its counts or earlier records are not")
    place.write_text("not JSON")
    assert gpu_record.status().startswith("gpu.json must be the record of a GPU gate: JSONDecodeError: ")


def test_records_of_the_same_sources_on_other_cards_stay(tmp_path: pathlib.Path) -> None:
    place, other = tmp_path / "gpu.json", {**RECORD, "cards": ["NVIDIA H200", "NVIDIA H200"]}
    for written in (RECORD, other, {**RECORD, "date": "2026-11-24"}):
        gate.written(written, place)
    stored_record = gpu_record.read(place)
    assert (stored_record["date"], [entry["cards"][0] for entry in stored_record["earlier"]]) == ("2026-11-24", ["NVIDIA H200"])
    assert "and on 2 x NVIDIA H200" in gpu_record.passed(stored_record)
    gate.written({**RECORD, "complete": False, "cards": ["NVIDIA H100"]}, place)
    assert gpu_record.read(place)["complete"]
    gate.written({**other, "sources": "b" * 64}, place)
    assert "earlier" not in gpu_record.read(place)


def test_contributing_says_what_the_record_says() -> None:
    words = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert gpu_record.passed(gpu_record.read(gpu_record.PLACES[0])) in words


def test_without_a_gpu_the_gate_is_one_line_and_undecided(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate.devices, "gpus", lambda: 0)
    monkeypatch.setattr("sys.argv", ["gate"])
    assert gate.main() == exits.UNDECIDED
    assert capsys.readouterr().err == "gdn-verify: the GPU gate needs a GPU, and torch sees none\n"


def test_a_gate_runs_its_steps_and_records_what_passed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(ended: Done) -> list[Row]:
        return [ended.row(good=ended.code == 0, figure=ended.lines[-1][1], must="0")]

    good = Step("good", "a good step", (gate.PYTHON, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"), judge)
    bad = dataclasses.replace(good, name="bad", what="a bad step", command=(gate.PYTHON, "-c", "print(1); raise SystemExit(4)"))
    monkeypatch.setattr(gate, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(gate.devices, "gpus", lambda: 1)
    monkeypatch.setattr(gate, "host", lambda: {"cards": ["a card"], "versions": {}})
    record = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["gate", "--record", str(record)])
    for steps, code in (((good, bad), 1), ((good,), 0)):
        monkeypatch.setattr(gate, "lanes", lambda count, steps=steps: ((("0", steps if count == 1 else (good, bad)),),))
        assert gate.main() == code
        output = capsys.readouterr()
        assert record.is_file() is (code == 0)
        assert ("FAILED: a bad step: 1" in output.err) is (code == 1)
        assert (NOT_RUN in output.out) is (code == 0)
    stored_record = gpu_record.read(record)
    assert (stored_record["sources"], stored_record["complete"]) == (gpu_record.sources(), False)
    assert [(row["what"], row["verdict"], row["figure"]) for row in stored_record["verdicts"]] == [
        ("a good step", PASSED, "0"),
        ("a bad step", NOT_RUN, "needs two GPUs"),
    ]
