"""Launches: the first kernel that makes other numbers of the same ones is told, and those that only pass them on are not."""

import math
import pathlib

import pytest
import torch

from verify import cli, launches
from verify import device as devices
from verify.launches import APART, Launch, Stopped, distance, others, parted
from verify.run import Run
from verify.service import answer

LINE = "law=oracle adapter=tests/right.py:Chunkwise device=cuda tune=1,solve:num_warps=2 lengths=3"


def call(*wrong: str, given: float = 1.0) -> list[Launch]:
    """Three launches, each of which reads what the one before wrote; some are off by a tenth from then on."""
    launches, x = [], torch.full((4,), given)
    for name in ("gate", "scores", "output"):
        y = 2.0 * x * (1.1 if name in wrong else 1.0)
        launches.append(Launch(name, {"num_warps": 4}, {"x": x}, {"y": y}))
        x = y
    return launches


@pytest.mark.parametrize(
    ("wrong", "told"), [((), []), (("scores",), ["launch 1, scores"]), (("gate", "output"), ["launch 0, gate"])]
)
def test_the_launch_that_parts_is_told(wrong: tuple[str, ...], told: list[str]) -> None:
    for apart in (0.0, APART):
        found = list(parted(call(*wrong), call(), apart))
        assert [line.partition(" num_warps")[0] for line in found] == told
    assert all("y by 0.1 of its norm" in line for line in found)


def test_what_rounding_makes_is_no_launch_at_fault() -> None:
    one, other = call(), call()
    other[1].wrote["y"] *= 1.0 + 2.0**-9
    assert list(parted(one, other, APART)) == []
    assert len(list(parted(one, other, 0.0))) == 1


def test_another_kernel_ends_the_comparison() -> None:
    one, other = call(), call()
    other[1] = Launch("merged", {}, {}, {})
    assert list(parted(one, other, 0.0)) == ["launch 1: scores here, merged there"]


def test_numbers_that_are_none_lie_apart() -> None:
    one, other = call(), call()
    one[2].wrote["y"][0] = torch.nan
    (told,) = parted(one, other, APART)
    assert told.endswith("y by nan of its norm")
    assert distance(torch.zeros(3), torch.zeros(2)) == 0.0
    assert math.isclose(distance(torch.full((3,), 3.0), torch.full((3,), 2.0)), 0.5)
    assert distance(torch.ones(1), torch.zeros(1)) == 1.0


def test_who_is_compared() -> None:
    """Numbers that draw keep the line's picks; what is called again must have the same bits."""
    run = Run.parse(LINE)
    got = [(words, other.tune, apart) for words, other, apart in others(run, 3, ["7", "native", "7,scores:num_warps=1"])]
    assert got == [
        ("called again", run.tune, 0.0),
        ("called again", run.tune, 0.0),
        ("beside tune=7", "7,solve:num_warps=2", APART),
        ("beside tune=native", "native", APART),
        ("beside tune=7,scores:num_warps=1", "7,scores:num_warps=1", APART),
    ]


def test_calls_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the calls: the second gives other bits in one launch, and that with other configurations never ends."""
    made = iter([call(), call("scores"), call(), call(), Stopped("launch 1, scores num_warps=8: an illegal memory access")])

    def called(*_: object) -> list[Launch]:
        if isinstance(each := next(made), Stopped):
            raise each
        return each

    monkeypatch.setattr(launches, "_called", called)
    line = LINE.replace(" device=cuda", "")
    said = answer({"launches": line, "calls": 4, "beside": ["2"]})
    assert (said["launches"], said["kernels"], said["spent"]) == (3, 3, False)
    again, gone = said["found"]
    assert again.startswith("called again: launch 1, scores num_warps=4 beside scores num_warps=4: y by 0.09")
    assert gone == "launch 1, scores num_warps=8: an illegal memory access"


def test_a_call_that_raises_is_told(tmp_path: pathlib.Path) -> None:
    kernel = tmp_path / "raising.py"
    kernel.write_text(
        "from verify import Adapter, Domain\n"
        "class Raises(Adapter):\n"
        "    domain = Domain()\n"
        "    def run(self, x):\n"
        "        raise IndexError('block 7')\n"
    )
    said = answer({"launches": f"law=oracle adapter={kernel}:Raises lengths=3", "calls": 2, "beside": []})
    assert (said["launches"], said["found"]) == (0, ["before any launch: raised IndexError: block 7"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([LINE.replace(" device=cuda", "")], cli.USAGE, "launches needs a line that says device=cuda, got device=cpu"),
        ([LINE, "--beside", "sweep"], cli.USAGE, "--beside must be a number or native, got sweep"),
        (["law=oracle"], cli.USAGE, ""),
        ([LINE], cli.UNDECIDED, "the line says device=cuda, and torch sees no GPU"),
    ],
)
def test_what_it_needs(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if code == cli.UNDECIDED and devices.gpus():
        pytest.skip("is about hosts without a GPU")
    assert cli.main(["launches", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"gdn-verify: {said}")
    assert len(err.splitlines()) == 1


def test_a_path_has_no_launches_to_tell() -> None:
    said = answer(
        {"launches": "law=parallel adapter=gdn/layer lengths=8 cp=2 heads=2 value_heads=2 backward=no", "calls": 2, "beside": []}
    )
    assert "launches are of kernels on one process" in said["error"]
