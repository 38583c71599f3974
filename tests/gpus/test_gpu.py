"""What only a GPU can show: faults that cost a worker or a rank, oracles on CPU and GPU, ranks on a GPU, kernel configurations."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oracles.tolerance.bound import Bound, bounds
from verify.cli import exits
from verify.cli import main as cli
from verify.engine.asking import ask
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.process.messages import Compile, RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker
from verify.ranks.group import RankGroup

pytestmark = pytest.mark.gpu

HARM = (
    ("IllegalAccess", "crashed: CUDA error: an illegal memory access was encountered"),
    ("DeviceAssert", "crashed: CUDA error: device-side assert triggered"),
    ("Hang", "hung: no answer within 20 s"),
    ("OutOfMemory", "ran out of memory, with "),
    ("Killed", "crashed: killed by SIGKILL"),
)


@pytest.mark.parametrize(("name", "message"), HARM)
def test_what_a_kernel_does_to_the_device_is_one_verdict(name: str, message: str, tmp_path: pathlib.Path) -> None:
    line = f"law=oracle adapter=tests/gpu_faults.py:{name} device=cuda key_dim=16 value_dim=16 dtype=bf16 lengths="
    store = Store(str(tmp_path / "findings"))
    with Worker(20.0, environment=devices.environment("cuda")) as worker:
        before = ask(Run.parse(line + "32"), worker, store)
        harmed = ask(Run.parse(line + "33"), worker, store)
        after = ask(Run.parse(line + "32"), worker, store)
    assert (before.verdict, harmed.verdict, after.verdict) == (Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS)
    assert harmed.findings[0].what.startswith(message)
    assert before.ratios == after.ratios


def test_what_compiles_ahead_launches_no_kernel_and_compiles_it(tmp_path: pathlib.Path) -> None:
    line = "law=oracle adapter=tests/gpu_faults.py:IllegalAccess device=cuda tune=1 lengths=33 key_dim=16 value_dim=16 dtype=bf16"
    cache = {"TRITON_CACHE_DIR": str(tmp_path)}
    with Worker(120.0, environment={**devices.environment("cuda"), **cache}) as worker:
        assert worker.ask(Compile(line)) == {"spent": False}
        assert [path.name for path in tmp_path.rglob("astray.cubin")] == ["astray.cubin"]
        timed = worker.ask(Compile(line.replace("tune=1", "tune=native")))  # Triton would choose by time, so it is launched
    assert timed == {"spent": True}


def test_the_tolerances_cover_the_arithmetic_of_this_gpu(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "arithmetic.json"
    code = cli.main(["arithmetic", "--device", "cuda", "--ranks", "1", "--json", str(report)])
    measures = json.loads(report.read_text(encoding="utf-8"))["probes"]
    assert {measure["name"]: measure["result"] for measure in measures if not measure["covered"] or measure["error"]} == {}
    assert code in (exits.HOLDS, exits.UNDECIDED)  # undecided: the table of this card may lack a measure


# Streams

STREAMS = (
    ("RuleInAWorkspace", "gpu_faults.py:Rule", "lengths=32 key_dim=16 value_dim=16 dtype=bf16 backward=no"),
    ("NormInAWorkspace", "right_modules.py:GatedNorm", "op=gated_rms_norm lengths=17 width=24 dtype=fp16 backward=no"),
    ("DecodeInAWorkspace", "gpu_faults.py:Decode", "op=decode lengths=1+1+1 dtype=bf16"),
)


@pytest.mark.parametrize(("name", "right", "words"), STREAMS)
def test_memory_that_two_streams_share_is_found_on_two_streams_alone(name: str, right: str, words: str) -> None:
    line = f"law={{}} adapter=tests/{{}} device=cuda {words}"
    verdicts = {
        (law, adapter): execute(Run.parse(line.format(law, adapter))).verdict
        for law in ("oracle", "history variant=streams")
        for adapter in (f"gpu_faults.py:{name}", right)
    }
    assert [where for where, verdict in verdicts.items() if verdict is not Verdict.HOLDS] == [
        ("history variant=streams", f"gpu_faults.py:{name}")
    ]


# Oracles and bounds

CALLS = (
    "law=oracle adapter=tests/right.py:Chunkwise lengths=130 key_dim=24 value_dim=40 dtype=bf16 state=random qk_norm=yes",
    "law=oracle adapter=tests/right.py:Chunkwise lengths=3+0+70 packed=yes heads=2 value_heads=4 dtype=fp16 in_kernel=both",
    "law=oracle adapter=tests/right.py:Recurrent lengths=33 dtype=fp32 gate=saturated state=random",
    "law=oracle adapter=tests/right.py:Chunkwise op=kda lengths=65 dtype=bf16 gate=10 state=random",
    "law=oracle adapter=fla/conv op=causal_conv1d lengths=5+12 packed=yes width=20 dtype=bf16",
    "law=oracle adapter=fla/gated_norm op=gated_rms_norm lengths=17 width=24 dtype=fp16",
    "law=oracle adapter=fla/decode op=decode lengths=1+1+1 dtype=bf16",
    "law=oracle adapter=fla/layer op=gdn_layer lengths=34 heads=2 value_heads=2 dtype=bf16",
)


def computed(line: str, device: str) -> dict[str, Bound]:
    """The truth and the bounds of a line's case, computed on a device."""
    case: Any = Run.parse(line).example.case
    inputs, cotangents = case.inputs(device), case.cotangents(device) if getattr(case, "backward", False) else None
    algorithms = {"causal_conv1d": "pointwise", "gated_rms_norm": "pointwise", "decode": "recurrent"}
    limits = bounds(case.spec_of(inputs), inputs, cotangents, algorithms.get(case.operation, "chunkwise"))
    assert {x.device.type for limit in limits.values() for x in (limit.value, limit.allowed)} == {device}
    return limits


def apart(one: dict[str, Bound], other: dict[str, Bound]) -> tuple[float, float]:
    """The greatest difference of two truths, over what an implementation may err; and the greatest ratio of two allowances."""
    assert one.keys() == other.keys()
    filled = {name: (limit, other[name]) for name, limit in one.items() if limit.allowed.numel()}
    errors = [float((a.value - b.value.cpu()).abs().max() / a.allowed.min()) for a, b in filled.values()]
    ratios = [a.allowed / b.allowed.cpu() for a, b in filled.values()]
    return max(errors), max(float(torch.maximum(ratio, 1 / ratio).max()) for ratio in ratios)


@pytest.mark.parametrize("line", CALLS)
def test_oracle_and_bounds_are_the_same_on_a_cpu_and_on_a_gpu(line: str) -> None:
    error, ratio = apart(computed(line, "cpu"), computed(line, "cuda"))
    assert error < 1e-3
    assert ratio < 1.5


def test_another_seed_and_another_dtype_would_be_seen_to_differ() -> None:
    one, seed, dtype = (computed(line, "cpu") for line in (CALLS[0], f"{CALLS[0]} seed=1", CALLS[0].replace("bf16", "fp16")))
    assert apart(one, seed)[0] > 1
    assert apart(one, dtype)[1] > 1.5


# Ranks

PATH = "law=parallel adapter=tests/path_faults.py:{} device=cuda lengths=8 cp=2 heads=2 value_heads=2"
RANK_FAULTS = (
    ("Raises", ("rank 1: call", "raised RuntimeError: no such tile")),
    ("IsKilled", ("rank 1", "killed by SIGKILL")),
    ("HangsOnTheCPU", ("rank 1 hung: no answer within 20 s", "in fault (path_faults.py")),
    ("LosesItsGpu", ("rank 1: call", "crashed: CUDA error: device-side assert triggered")),
)


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    with RankGroup(2, "nccl", deadline_s=20.0) as group:
        yield group


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("name", "fragments"), RANK_FAULTS)
def test_a_rank_that_fails_over_nccl_is_named_and_the_next_case_runs(
    two: RankGroup, name: str, fragments: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    store = Store(tmp_path)
    outcome = ask(Run.parse(PATH.format(name)), two, store)
    words = " ".join(f"{finding.place}: {finding.what} {finding.worst}" for finding in outcome.findings)
    assert outcome.verdict is Verdict.BROKEN, outcome
    assert [fragment for fragment in fragments if fragment not in words] == [], words
    assert ask(Run.parse(PATH.format("Fault")), two, store).verdict is Verdict.HOLDS


ON_ONE = "adapter=tests/path_faults.py:NeedsAGpu device=cuda cp=2 packed=yes padding=least lengths=3+0+17"
SHARED, COMPILED = "tp=2 sp=yes heads=4 value_heads=8", "dtype=bf16 tune=1 products=tf32 key_dim=64 value_dim=64 conv=fla rule=fla"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Worker]:
    with Worker(120.0, environment=devices.environment("cuda")) as worker:
        yield worker


@pytest.mark.parametrize(
    "line",
    [
        f"law=parallel {ON_ONE} {SHARED}",
        f"law=parallel {ON_ONE} {SHARED} {COMPILED} qk_norm=in_kernel",
        f"law=same variant=thd_all_to_all=fused {ON_ONE} {SHARED}",
        f"law=repeats {ON_ONE} {SHARED} deterministic=yes",
        "law=exchange variant=heads adapter=gdn/layer device=cuda cp=4 heads=4 value_heads=4 lengths=16 thd_all_to_all=fused",
        f"law=refused variant=length {ON_ONE} heads=2 value_heads=2".replace("padding=least ", "").replace("3+0+17", "4+0+8"),
    ],
)
def test_simulated_ranks_compute_on_the_gpu(gpu: Worker, line: str) -> None:
    outcome = Outcome.from_json(gpu.ask(RunOne(line)))
    assert outcome.verdict is Verdict.HOLDS, (outcome.reason, outcome.fault, outcome.findings)


def test_a_wrong_path_is_found_on_simulated_ranks_of_a_gpu(gpu: Worker) -> None:
    line = "law=parallel adapter=zoo/NoSumOverTp device=cuda tp=2 heads=2 value_heads=2 lengths=4"
    here, there = execute(Run.parse(line.replace(" device=cuda", ""))), Outcome.from_json(gpu.ask(RunOne(line)))
    assert (here.verdict, there.verdict) == (Verdict.BROKEN, Verdict.BROKEN)
    assert {finding.output for finding in here.findings} == {finding.output for finding in there.findings}


@pytest.mark.gpu(2)
def test_a_line_of_a_gpu_is_repeated_over_nccl(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "law=parallel adapter=gdn/layer device=cuda lengths=8 cp=2 heads=2 value_heads=2"
    assert cli.main(["repeat", line, "--ranks", "2", "--json", "--findings", str(tmp_path)]) == exits.HOLDS
    report = json.loads(capsys.readouterr().out)
    assert (report["run"], report["verdict"]) == (line, "holds")
    assert report["rows"] > 0


# CUDA graphs


@pytest.mark.parametrize(
    ("name", "verdict"), [("Captured", "holds"), ("SlotsOfTheFirstStep", "broken"), ("SlotsOnTheHost", "broken")]
)
def test_a_call_is_replayed_from_a_graph(name: str, verdict: str) -> None:
    case = "op=decode lengths=1+1+1 packed=yes state=random padding_slot=0 spare=3"  # with spare slots, two cases have other slots
    line = f"law=refill adapter=tests/right.py:{name} device=cuda {case}"
    with Worker(60.0, environment=devices.environment("cuda")) as worker:
        outcome = Outcome.from_json(worker.ask(RunOne(line)))
    assert outcome.verdict.value == verdict, outcome


# Configurations


def test_a_pinned_configuration_is_the_one_that_runs() -> None:
    line = "law=oracle adapter=tests/autotuned.py:WrongAt64 device=cuda lengths=40 key_dim=8 value_dim=8 backward=no tune=1,"
    lines = [f"{line}copy_kernel:BLOCK={block}:num_warps=4:num_stages=3" for block in (16, 64, 256)]
    with Worker(60.0, environment=devices.environment("cuda")) as worker:
        verdicts = [Outcome.from_json(worker.ask(RunOne(line))).verdict for line in lines]
    assert verdicts == [Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS]


def test_a_sweep_finds_the_wrong_configurations_and_no_other(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "tests/autotuned.py:WrongAt64", "--tune", "sweep", "--device", "cuda", "--workers", "2", "--seed", "1"]
    deny, findings = tmp_path / "deny.jsonl", tmp_path / "findings"
    assert cli.main([*words, "--deny", str(deny), "--findings", str(findings)]) == exits.BROKEN
    assert "2 wrong of 8 configurations of 2 kernels" in capsys.readouterr().out
    assert {json.loads(line)["config"].split(":")[0] for line in deny.read_text().splitlines()} == {"BLOCK=64"}
