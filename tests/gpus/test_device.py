"""Devices: what a host without a GPU says, and what becomes of a worker whose GPU a kernel took away."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from properties.rules.case import Case
from properties.words.example import Example
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import AdapterFault
from verify.cli import exits
from verify.cli import main as cli
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.gpu import device as devices
from verify.process.outcome import Outcome
from verify.process.worker import Worker

RIGHT = "tests/right.py:Chunkwise"
LINE = f"law=oracle adapter={RIGHT} device=cuda lengths=3"


def test_a_line_names_its_device_unless_it_is_the_cpu() -> None:
    run = Run.parse(LINE)
    assert run.device == "cuda"
    assert Run.parse(str(run)) == run
    plain = Run.parse(LINE.replace("device=cuda ", ""))
    assert plain.device == "cpu"
    assert "device" not in str(plain)
    with pytest.raises(ValueError, match="device must be one of cpu, cuda, got 'tpu'"):
        Run.parse(LINE.replace("cuda", "tpu"))


@pytest.mark.skipif(devices.gpus() > 0, reason="is about hosts without a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in [
        (["check", RIGHT, "--device", "cuda"], "--device cuda needs a GPU, and torch sees none"),
        (["arithmetic", "--device", "cuda"], "--device cuda needs a GPU, and torch sees none"),
        (["repeat", LINE], "the line has device=cuda, but torch sees no GPU"),
        (["launches", LINE], "the line has device=cuda, but torch sees no GPU"),
    ]:
        assert cli.main(words) == exits.UNDECIDED, words
        out, err = capsys.readouterr()
        assert out == "", words
        assert err.startswith(f"gdn-verify: {message}"), words
        assert len(err.splitlines()) == 1, words


@pytest.mark.skipif(devices.gpus() > 0, reason="is about hosts without a GPU")
def test_a_run_on_a_gpu_that_is_not_there_is_undecided() -> None:
    outcome = execute(Run.parse(LINE))
    assert str(outcome.verdict) == "unknown"
    assert "needs a GPU" in outcome.reason


def test_workers_share_the_gpus_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices.environment("cuda", worker)["CUDA_VISIBLE_DEVICES"] for worker in range(4)] == ["0", "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert [devices.environment("cuda", worker)["CUDA_VISIBLE_DEVICES"] for worker in range(3)] == ["5", "3", "5"]
    assert devices.environment("cpu") == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_what_names_no_device_is_made_on_the_default_one() -> None:
    """The CPU's stand-in for a GPU is the meta device."""
    with devices.default("meta"):
        assert torch.zeros(1).device.type == "meta"
        with devices.default("cpu"):
            assert torch.zeros(1).device.type == "cpu"
        assert Case(lengths=(3,), packed=True, state="random", in_kernel="both").inputs().q.device.type == "meta"
    assert torch.zeros(1).device.type == "cpu"


def test_a_lost_device_is_a_crash_and_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(lengths=(3,))
    bench = AdapterBench(adapter_of(RIGHT), None, case, device="cpu")  # type: ignore[arg-type]
    monkeypatch.setattr(devices, "lost", lambda device: "CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(bench, "call_implementation", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error: an illegal ...")))
    with pytest.raises(AdapterFault) as raised:
        bench.run(case.inputs(), None)
    assert raised.value.finding.what == "crashed: CUDA error: an illegal memory access was encountered"
    assert bench.lost


def test_a_worker_that_is_spent_is_replaced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spent.py").write_text(
        "import os\ndef answer(question):\n    return {'pid': os.getpid(), 'spent': question.get('last', False)}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Worker(20.0, serves="spent:answer") as worker:
        pids = [worker.ask({"last": last})["pid"] for last in (False, True, False, False)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_an_outcome_says_that_its_process_is_spent() -> None:
    run = Run("oracle", RIGHT, Example(Case(lengths=(2,))))
    assert not Outcome.from_json(json.loads(json.dumps(execute(run).to_json()))).spent


@pytest.mark.slow
def test_a_gpu_is_not_seen_by_a_worker_of_the_cpu() -> None:
    program = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **devices.environment("cpu")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_tune_is_a_word_of_the_line() -> None:
    line = f"law=oracle adapter={RIGHT} tune=17,chunk_fwd_kernel_o:BK=64:num_warps=4 lengths=3"
    assert Run.parse(line).tune == "17,chunk_fwd_kernel_o:BK=64:num_warps=4"
    assert Run.parse(str(Run.parse(line))) == Run.parse(line)
    with pytest.raises(ValueError, match="tune must be native or a number"):
        Run.parse(line.replace("17,", "seventeen,"))


def test_a_gpu_is_crowded_where_less_than_half_of_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not devices.crowded("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, crowded in ((49, True), (51, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 100))
        assert devices.crowded("cuda") is crowded


def test_room_is_waited_for_and_then_the_case_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "ROOM_S", 0.2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for crowds, room in (([False], True), ([True, True, False], True), ([True], False)):
        left = list(crowds)
        monkeypatch.setattr(devices, "crowded", lambda device, left=left: left.pop(0) if len(left) > 1 else left[0])
        assert devices.found_room("cuda") is room


def test_memory_is_given_back_where_others_may_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    for reserved, free, back in ((devices.KEPT + 1, 49, 1), (devices.KEPT + 1, 51, 0), (devices.KEPT, 49, 0)):
        calls.clear()
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda reserved=reserved: reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 100))
        devices.tidy()
        assert len(calls) == back
