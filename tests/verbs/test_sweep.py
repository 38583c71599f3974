"""Sweeps: a configuration that is wrong is found, alone, with its smallest case; where none is, nothing is said."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.example import Example
from verify.cli import exits
from verify.cli import main as cli
from verify.engine import sweep
from verify.engine.asking import describe
from verify.engine.sweep import CASES, KEYS, LAWS, Sweep, Swept, examples_of
from verify.findings.store import Store
from verify.gpu.policies import read_denied
from verify.process.worker import Worker

pytestmark = pytest.mark.interpreted

CASE = Case(lengths=(40,), key_dim=8, value_dim=8, backward=False)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """Two workers for the sweeps of the same two kernels: a sweep knows all that its workers have launched."""
    with Worker(60.0) as one, Worker(60.0) as other:
        yield [one, other]


def swept(name: str, tmp_path: pathlib.Path, workers: list[Worker], *more: Case, seed: int = 1) -> Swept:
    described = describe(f"tests/autotuned.py:{name}", workers[0])
    examples = [("oracle", Example(CASE)), ("memory", Example(CASE)), *(("oracle", Example(case)) for case in more)]
    return Sweep(described, workers, Store(str(tmp_path)), seed=seed, device="cpu", examples=examples).run()


@pytest.mark.slow
def test_a_wrong_configuration_is_found_with_its_smallest_case(tmp_path: pathlib.Path, workers: list[Worker]) -> None:
    result = swept("WrongAt64", tmp_path, workers[:1])
    assert {kernel.rpartition(".")[2]: len(configs) for kernel, configs in result.known.items()} == {
        "copy_kernel": 6,
        "again_kernel": 2,
    }
    assert result.ran == {kernel: set(configs) for kernel, configs in result.known.items()}
    picks = [pick for fault in result.faults for pick in fault.policy.picks]
    assert len(result.faults) == len(picks) == 2  # both with blocks of 64
    assert all(kernel.endswith("copy_kernel") and config.startswith("BLOCK=64:") for kernel, config in picks)
    for fault in result.faults:
        assert sum(fault.run.example.case.lengths) * fault.run.example.case.value_dim in range(66, 80)
        (denied,) = fault.denied("interpreter", "3.7.1")
        assert (denied.law, denied.run) == ("oracle", str(fault.run))
    records = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert {"swept"} <= {record["stage"] for record in records}
    text = "\n".join(result.lines())
    assert "copy_kernel: 6 of 6 configurations ran" in text
    assert "gdn-verify repeat" in text


@pytest.mark.slow
def test_right_configurations_are_all_run_and_none_is_blamed(tmp_path: pathlib.Path, workers: list[Worker]) -> None:
    result = swept("Copied", tmp_path, workers)
    assert (result.faults, result.undecided) == ([], [])
    assert sum(map(len, result.ran.values())) == 8


@pytest.mark.slow
def test_a_case_that_fails_whatever_the_configurations_is_listed_apart_and_hides_none(
    tmp_path: pathlib.Path, workers: list[Worker]
) -> None:
    result = swept("WrongWhateverFrom41", tmp_path, workers, dataclasses.replace(CASE, lengths=(50,)))
    assert result.ran == {kernel: set(configs) for kernel, configs in result.known.items()}
    named = [fault for fault in result.faults if fault.policy.picks]
    assert {config.split(":")[0] for fault in named for _, config in fault.policy.picks} == {"BLOCK=64"}
    (other,) = [fault for fault in result.faults if not fault.policy.picks]
    assert other.run.example.case.lengths == (41,)
    assert other.denied("interpreter", "3.7.1") == []
    assert "WRONG    all configurations: this case fails with those that each of 6 numbers" in "\n".join(result.lines())


@pytest.mark.slow
def test_what_is_not_autotuned_cannot_be_swept(tmp_path: pathlib.Path) -> None:
    with Worker(60.0) as worker:
        described = describe("tests/right.py:Chunkwise", worker)
        sweep = Sweep(described, [worker], Store(str(tmp_path)), device="cpu", examples=[("oracle", Example(CASE))])
        with pytest.raises(ValueError, match="a sweep needs autotuned kernels"):
            sweep.run()


@pytest.mark.slow
def test_the_command_prints_the_sweep_and_keeps_a_deny_list(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the cases that it draws without a GPU, but for their sizes: interpreted, those take most of a minute."""
    drawn, small = sweep.examples_of, {"lengths": (33,), "packed": False, "key_dim": 8, "value_dim": 8}

    def shorter(*arguments: Any) -> Iterator[tuple[str, Example]]:
        for law, example in drawn(*arguments):
            yield law, dataclasses.replace(example, case=dataclasses.replace(example.case, **small))

    monkeypatch.setattr(sweep, "examples_of", shorter)
    monkeypatch.setattr("verify.engine.explaining.SHRINK_RUNS", 0)  # other tests look for the smallest case
    deny = tmp_path / "deny.jsonl"
    words = ["check", "tests/autotuned.py:WrongAt64", "--tune", "sweep", "--device", "cpu", "--workers", "1", "--seed", "1"]
    words += ["--deny", str(deny), "--findings", str(tmp_path / "f"), "--json", str(tmp_path / "out")]
    assert cli.main(words) == exits.BROKEN
    out = capsys.readouterr().out
    assert "WRONG    " in out
    assert "2 wrong of " in out
    assert {denial.config.split(":")[0] for denial in read_denied(deny)} == {"BLOCK=64"}
    assert json.loads((tmp_path / "out").read_text())["faults"]
    # With the list nothing wrong is drawn, whatever the number.
    line = "law=oracle adapter=tests/autotuned.py:WrongAt64 lengths=40 key_dim=8 value_dim=8 backward=no tune="
    for tune in (1, 2):  # 1 drew a wrong one
        assert cli.main(["repeat", f"{line}{tune}", "--deny", str(deny), "--findings", str(tmp_path / "f")]) == exits.HOLDS


def test_a_sweep_draws_few_keys_with_several_chunks_and_a_backward() -> None:
    drawn = list(examples_of(Domain(), 3))
    assert {law for law, _ in drawn} == set(LAWS)
    assert 2 * (KEYS + 2) <= len(drawn) <= 2 * (KEYS * CASES + 2)
    assert all(example.case.backward and max(example.case.lengths) > 64 for _, example in drawn)
    assert (drawn[0][1].case.key_dim, drawn[0][1].case.value_dim) == (128, 128)
    assert drawn == list(examples_of(Domain(), 3)) != list(examples_of(Domain(), 4))


@pytest.mark.slow
def test_a_failure_that_does_not_come_again_is_undecided_and_not_forgotten(
    tmp_path: pathlib.Path, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "_fails", lambda *_: False)
    result = swept("WrongAt64", tmp_path, workers[:1])
    assert result.faults == []
    assert result.undecided
    assert all(reason.startswith("failed once and not again: law=") for reason in result.undecided)


@pytest.mark.slow
def test_memory_that_workers_share_is_not_a_configuration_s_to_run_out_of(tmp_path: pathlib.Path, workers: list[Worker]) -> None:
    shared = swept("StarvedAt64", tmp_path, workers)
    assert shared.faults == []
    assert any("that other workers share" in reason for reason in shared.undecided)
    alone = swept("StarvedAt64", tmp_path, workers[:1])
    assert {config.split(":")[0] for fault in alone.faults for _, config in fault.policy.picks} == {"BLOCK=64"}


@pytest.mark.slow
def test_a_wrong_configuration_that_always_stands_beside_another_is_found_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.engine.explaining.SHRINK_RUNS", 0)  # other tests look for the smallest case
    with Worker(60.0) as worker:
        for seed in (1, 2):
            result = swept("WrongInBoth", tmp_path, [worker], seed=seed)
            wrong = {(kernel.rpartition(".")[2], config) for fault in result.faults for kernel, config in fault.policy.picks}
            assert {kernel for kernel, _ in wrong} == {"first_kernel", "second_kernel"}, seed
            assert len(wrong) == 3, seed
