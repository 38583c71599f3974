"""Calls that FlashInfer has dumped: right and wrong results, pickled ones, and files that nobody should believe."""

import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.files_kernels import example
from tests.libraries.test_files import hostile
from verify.adapters.tensor_files import write
from verify.cli.exits import BROKEN, UNDECIDED, USAGE
from verify.cli.main import main
from verify.execution.dumps import FUNCTION, judged_dump
from verify.process.outcome import Verdict

LENGTHS = (5, 70)


def call(seed: int = 0) -> dict[str, Any]:
    """Arguments of the function, as FlashInfer takes them."""
    random_numbers = torch.Generator().manual_seed(seed)
    tokens, heads, width = sum(LENGTHS), 2, 16

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random_numbers)

    return {
        "q": draw(tokens, 1, width).bfloat16(),
        "k": torch.nn.functional.normalize(draw(tokens, 1, width), dim=-1).bfloat16(),
        "v": draw(tokens, heads, width).bfloat16(),
        "g": draw(tokens, heads).sigmoid(),
        "beta": draw(tokens, heads).sigmoid(),
        "scale": None,
        "initial_state": draw(2, heads, width, width),
        "output_final_state": True,
        "cu_seqlens": torch.tensor([0, 5, 75]),
        "use_qk_l2norm_in_kernel": False,
    }


def results(x: dict[str, Any]) -> dict[str, Tensor]:
    """The right results of a call, in FlashInfer's layout."""
    tensors = {name: x[name][None] for name in ("q", "k", "v", "beta")} | {"g": x["g"].log()[None]}
    tensors |= {"state": x["initial_state"].mT, "cu_seqlens": x["cu_seqlens"]}
    found = example().rule(tensors, {"qk_norm": "0"})
    return {"result_0": found["o"][0].bfloat16(), "result_1": found["final_state"].mT.contiguous()}


def dump(folder: pathlib.Path, x: dict[str, Any], found: dict[str, Tensor], *, positional: int = 0, name: str = FUNCTION) -> None:
    """Write a call as FlashInfer does, with its first arguments by position."""
    folder.mkdir(parents=True)
    keys = {key: f"arg_{place}" if place < positional else f"kwarg_{key}" for place, key in enumerate(x)}
    write(str(folder / "inputs.safetensors"), {keys[key]: y.contiguous() for key, y in x.items() if isinstance(y, Tensor)}, {})
    write(str(folder / "outputs.safetensors"), found, {})
    about = {"function_name": name, "input_metadata": {keys[key]: y for key, y in x.items() if not isinstance(y, Tensor)}}
    lines = [{**about, "execution_status": "inputs_saved"}, {**about, "execution_status": "completed"}]
    (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_right_results_hold_and_wrong_ones_are_broken(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = call()
    dump(tmp_path / "1_right", x, results(x))
    dump(tmp_path / "2_by_position", x, results(x), positional=5)
    wrong = results(x)
    wrong["result_0"][70, 1] *= 1.5
    dump(tmp_path / "3_one_row", x, wrong)
    dump(tmp_path / "4_layout", x, {**results(x), "result_1": results(x)["result_1"].mT.contiguous()})
    dump(tmp_path / "5_dtype", x, {**results(x), "result_1": results(x)["result_1"].half()})
    dump(tmp_path / "6_other", x, results(x), name="mm_fp4")
    dump(tmp_path / "7_no_state", {**x, "output_final_state": False}, {"result": results(x)["result_0"]})
    (tmp_path / "session.jsonl").write_text("{}\n")
    verdicts = {folder.name: judged_dump(str(folder)) for folder in sorted(tmp_path.iterdir()) if folder.is_dir()}
    assert {name: outcome.verdict for name, outcome in verdicts.items()} == {
        "1_right": Verdict.HOLDS,
        "2_by_position": Verdict.HOLDS,
        "3_one_row": Verdict.BROKEN,
        "4_layout": Verdict.BROKEN,
        "5_dtype": Verdict.BROKEN,
        "6_other": Verdict.UNSUPPORTED,
        "7_no_state": Verdict.HOLDS,
    }
    assert verdicts["3_one_row"].findings[0].worst.startswith("index 0, 70, 1")
    assert {finding.port for finding in verdicts["4_layout"].findings} == {"final_state"}
    assert verdicts["1_right"].ratios.keys() == {"o", "final_state"}
    capsys.readouterr()
    assert main(["judge", str(tmp_path), "--json", "-"]) == BROKEN
    out, err = capsys.readouterr()
    assert [json.loads(line)["dump"] for line in out.splitlines()] == [*verdicts]
    assert "3 holds, 3 broken, 1 unsupported" in err
    assert main(["judge", str(tmp_path), "--law", "oracle"]) == USAGE


def test_pickled_tensors_are_not_read(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = call()
    dump(tmp_path / "d" / "1", x, results(x))
    (tmp_path / "d" / "1" / "inputs.safetensors").rename(tmp_path / "d" / "1" / "inputs.pt")
    assert main(["judge", str(tmp_path / "d")]) == UNDECIDED
    assert "inputs.pt is pickled and is not read: set FLASHINFER_DUMP_SAFETENSORS=1" in capsys.readouterr().out
    assert main(["judge", str(tmp_path)]) == USAGE
    assert "has no calls that FlashInfer has dumped" in capsys.readouterr().err


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "q is None": lambda x: {key: value for key, value in x.items() if key != "q"},
    "scale is {'type'": lambda x: {**x, "scale": {"type": "list", "value": "[]"}},
    "cu_seqlens": lambda x: {**x, "cu_seqlens": torch.tensor([0, 5, 99])},
    "must have": lambda x: {**x, "k": x["k"][:-1]},
}


@pytest.mark.parametrize("words", CHANGES)
def test_an_illegal_call_is_not_judged(words: str, tmp_path: pathlib.Path) -> None:
    dump(tmp_path / "1", CHANGES[words](call()), results(call()))
    outcome = judged_dump(str(tmp_path / "1"))
    assert (outcome.verdict, outcome.fault) == (Verdict.UNKNOWN, ""), outcome
    assert words in outcome.reason or words == "must have", outcome.reason


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_hostile_dumps_are_no_verdict(name: str, count: int, tmp_path: pathlib.Path) -> None:
    dump(tmp_path / "1", call(), results(call()))
    path, chance = tmp_path / "1" / f"{name}.safetensors", random.Random(count)
    data = path.read_bytes()
    for number in range(count):
        path.write_bytes(hostile(data, chance))
        outcome = judged_dump(str(tmp_path / "1"))
        more = b'"more": ' in path.read_bytes()  # further arguments and results are not ours to judge
        assert outcome.verdict is not Verdict.HOLDS or more, (number, path.read_bytes()[:300])
        assert not outcome.fault, (number, outcome.reason, path.read_bytes()[:300])
    (tmp_path / "1" / "metadata.jsonl").write_text("[" * 99_999)
    assert judged_dump(str(tmp_path / "1")).verdict is Verdict.UNKNOWN
