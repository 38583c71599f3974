"""Launches: the first kernel that makes other numbers of the same ones is named, and those that only pass them on are not."""

import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from oracles.operation import Inputs
from properties.rules.domain import Domain
from tests.answering import Answering
from verify.cli import exits
from verify.cli import main as cli
from verify.execution import launches
from verify.execution.launches import APART, KernelLaunch, distance, others, parted
from verify.execution.line import Run
from verify.execution.service import answer
from verify.gpu import device as devices
from verify.process.messages import Describe, Launches
from verify.process.worker import Worker, WorkerLost
from verify.zoo.base import Chunkwise

LINE = "law=oracle adapter=tests/right.py:Chunkwise device=cuda tune=1,solve:num_warps=2 lengths=3"


def call(*wrong: str, value: float = 1.0) -> list[KernelLaunch]:
    """Three launches, each of which reads what the one before wrote; some are off by a tenth from then on."""
    launches, x = [], torch.full((4,), value)
    for name in ("gate", "scores", "output"):
        y = 2.0 * x * (1.1 if name in wrong else 1.0)
        launches.append(KernelLaunch(name, {"num_warps": 4}, {"x": x}, {"y": y}))
        x = y
    return launches


def test_the_launch_that_parts_is_named() -> None:
    for wrong, names in [((), []), (("scores",), ["launch 1, scores"]), (("gate", "output"), ["launch 0, gate"])]:
        for apart in (0.0, APART):
            found = list(parted(call(*wrong), call(), apart))
            assert [line.partition(" num_warps")[0] for line in found] == names, wrong
        assert all(line.endswith(" num_warps=4 beside the same: y by 0.1 of its norm") for line in found), wrong


def test_what_rounding_makes_is_no_launch_at_fault() -> None:
    one, other = call(), call()
    other[1].wrote["y"] *= 1.0 + 2.0**-9
    assert list(parted(one, other, APART)) == []
    assert len(list(parted(one, other, 0.0))) == 1


def test_another_kernel_ends_the_comparison() -> None:
    one, other = call(), call()
    other[1] = KernelLaunch("merged", {}, {}, {})
    assert list(parted(one, other, 0.0)) == ["launch 1: scores here, merged there"]


def test_numbers_that_are_none_lie_apart_from_numbers_and_not_from_each_other() -> None:
    one, other = call(), call()
    one[2].wrote["y"][0] = torch.nan
    (line,) = parted(one, other, APART)
    assert line.endswith("y by inf of its norm")
    assert [distance(torch.tensor([1.0, x]), torch.tensor([1.0, x])) for x in (torch.nan, torch.inf)] == [0.0, 0.0]
    assert distance(torch.tensor([torch.inf]), torch.tensor([-torch.inf])) == math.inf
    assert math.isclose(distance(torch.tensor([3.0, torch.nan]), torch.tensor([2.0, torch.nan])), 0.5)
    assert distance(torch.zeros(3), torch.zeros(2)) == 0.0
    assert math.isclose(distance(torch.full((3,), 3.0), torch.full((3,), 2.0)), 0.5)
    assert distance(torch.ones(1), torch.zeros(1)) == 1.0
    assert distance(torch.tensor([2**53 + 1]), torch.tensor([2**53])) == 0.0, "as far as float64 tells"


def test_who_reads_what_is_none_is_not_at_fault() -> None:
    one, other = call(), call("output")
    one[2].read["x"] = torch.full((4,), torch.nan)
    assert list(parted(one, other, APART)) == []


def test_more_launches_than_the_other_has_are_reported() -> None:
    assert list(parted(call(), call()[:2], 0.0)) == ["3 launches here, 2 there"]


def test_a_launch_that_leaves_alone_what_it_should_write_is_reported() -> None:
    one, other = call(), call()
    left = torch.full((4,), torch.nan)
    for sequence, wrote in ((one, True), (other, False)):
        sequence[1].read["y"] = left
        sequence[1].wrote = {"y": sequence[1].wrote["y"]} if wrote else {}
    (line,) = parted(one, other, 0.0)
    assert line.startswith("launch 1, scores")


def test_a_launch_that_adds_to_what_it_was_given_only_passes_it_on() -> None:
    one, other = call("scores"), call()
    for sequence in (one, other):
        before = sequence[1].wrote["y"]
        sequence[2] = KernelLaunch("output", {}, {"y": before}, {"y": before + 1.0})
    (line,) = parted(one, other, 0.0)
    assert line.startswith("launch 1, scores")


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


class Kernel:
    """A kernel in Triton's place: x doubled; `configured` may change what it does, or raise."""

    __name__ = "doubles"
    arg_names = ("x", "y", "BLOCK")

    def __init__(self, configured: Callable[[int], float] = lambda warps: 2.0) -> None:
        self.configured = configured

    def __call__(self, x: Tensor, num_warps: int) -> Tensor:
        y = torch.full_like(x, torch.nan)
        JITFunction.run(self, x, y, num_warps=num_warps, grid=(1,), warmup=False)
        return y


class Calls(Chunkwise):
    """A right implementation that launches a kernel besides, each time with the next number of warps."""

    domain = Domain(backward=False)

    def __init__(self, kernel: Kernel, warps: Iterable[int]) -> None:
        self.kernel, self.warps = kernel, iter(warps)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        warps = next(self.warps)
        try:
            self.kernel(x.v[0, :, 0, 0].float(), warps)
        except Unfit:
            self.kernel(x.v[0, :, 0, 0].float(), 1)
        return super().run(x)


class Unfit(Exception):
    """A configuration needs more shared memory than there is."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The report on calls of an adapter in a process whose kernels are called as above."""

    def plain(kernel: Kernel, x: Tensor, y: Tensor, **named: Any) -> None:
        y.copy_(x * kernel.configured(named["num_warps"]))

    monkeypatch.setattr(JITFunction, "run", plain)

    line = LINE.replace(" device=cuda tune=1,solve:num_warps=2", "")

    def report(kernel: Kernel, warps: Iterable[int], calls: int = 2) -> dict[str, Any]:
        monkeypatch.setattr(launches, "adapter_of", lambda spec: Calls(kernel, warps))
        report = answer(Launches(line, calls, []).to_json())
        assert JITFunction.run is plain, "nothing is recorded after"
        return report

    return report


def test_launches_are_compared_with_those_of_the_first_call(launched: Callable[..., dict[str, Any]]) -> None:
    """Each call is made twice, and compared once it is compiled."""
    assert launched(Kernel(), itertools.repeat(4)) == {"launches": 1, "kernels": 1, "found": [], "left": [], "spent": False}
    report = launched(Kernel(lambda warps: 2.0 + (warps == 8)), [8, 4, 8, 8, 4, 4], calls=3)
    (line,) = report["found"]
    assert line == "called again: launch 0, doubles num_warps=4 beside doubles num_warps=8: y by 0.333 of its norm"


def test_a_configuration_that_does_not_fit_is_not_one_that_stands_out(launched: Callable[..., dict[str, Any]]) -> None:
    """Whoever tunes skips it, as Triton does."""

    def fits(warps: int) -> float:
        if warps == 8:
            raise Unfit
        return 2.0

    assert launched(Kernel(fits), itertools.repeat(8)) == {"launches": 1, "kernels": 1, "found": [], "left": [], "spent": False}


def test_the_launch_that_takes_the_device_away_is_named(
    launched: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    def strays(warps: int) -> float:
        if warps == 8:
            lost.append("an illegal memory access")
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")
        return 2.0

    monkeypatch.setattr(devices, "lost", lambda device: lost[0] if lost else None)
    report = launched(Kernel(strays), [4, 4, 8], calls=3)
    assert report["found"] == ["called again: launch 0, doubles num_warps=8: CUDA error: an illegal memory access was encountered"]
    assert (report["left"], report["spent"], report["launches"]) == (["called again"], True, 1)
    report = launched(Kernel(strays), [8], calls=2)
    assert report["found"] == ["launch 0, doubles num_warps=8: CUDA error: an illegal memory access was encountered"]
    assert report["left"] == ["called again"]


def test_a_call_that_raises_is_reported_and_the_others_are_made(launched: Callable[..., dict[str, Any]]) -> None:
    def raises(warps: int) -> float:
        if warps == 8:
            raise IndexError("block 7")
        return 2.0

    report = launched(Kernel(raises), [4, 4, 8, 4, 4], calls=3)
    assert report["found"] == ["called again: raised IndexError: block 7, after launch 0, doubles num_warps=8"]
    assert report["left"] == []


def test_lack_of_memory_hides_nothing_that_was_found(
    launched: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing takes memory too."""
    far, seen = launches.distance, list[int]()

    def starves(one: Tensor, other: Tensor) -> float:
        seen.append(1)
        if len(seen) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return far(one, other)

    monkeypatch.setattr(launches, "distance", starves)
    report = launched(Kernel(lambda warps: 2.0 + (warps == 8)), [4, 4, 8, 8, 4, 4, 4, 4], calls=4)
    first, second = report["found"]
    assert first.startswith("called again: launch 0, doubles")
    assert second == "called again: out of memory, with the tensors of every launch kept: CUDA out of memory"
    assert report["left"] == ["called again"]


def test_lack_of_memory_decides_nothing(launched: Callable[..., dict[str, Any]]) -> None:
    def starves(warps: int) -> float:
        raise torch.OutOfMemoryError(f"CUDA out of memory with {warps} warps")

    report = launched(Kernel(starves), itertools.repeat(4))
    assert report == {"reason": "out of memory, with the tensors of every launch kept: CUDA out of memory with 4 warps"}


def test_a_path_has_no_launches_to_report() -> None:
    line = "law=parallel adapter=gdn/layer lengths=8 cp=2 heads=2 value_heads=2 backward=no"
    report = answer(Launches(line, 2, []).to_json())
    assert "launches are compared for kernels on one process" in report["error"]


@pytest.mark.parametrize(
    ("report", "code", "out", "err"),
    [
        ({"launches": 3, "kernels": 2, "found": [], "left": [], "spent": False}, exits.HOLDS, "3 launches of 2 kernels\n", ""),
        (
            {"launches": 3, "kernels": 2, "found": ["called again: launch 0"], "left": ["beside tune=2"], "spent": False},
            exits.BROKEN,
            "3 launches of 2 kernels\n  called again: launch 0\n  not called: beside tune=2\n",
            "",
        ),
        (
            {"launches": 0, "kernels": 0, "found": ["launch 0"], "left": [], "spent": False},
            exits.BROKEN,
            "0 launches of 0 kernels\n  launch 0\n",
            "",
        ),
        (
            {"launches": 0, "kernels": 0, "found": [], "left": [], "spent": False},
            exits.UNDECIDED,
            "0 launches of 0 kernels\n",
            "gdn-verify: no Triton kernel was launched\n",
        ),
        ({"reason": "out of memory"}, exits.UNDECIDED, "", "gdn-verify: out of memory\n"),
        ({"error": "adapter x: gone"}, exits.USAGE, "", "gdn-verify: adapter x: gone\n"),
        (None, exits.UNDECIDED, "", "gdn-verify: crashed: killed by SIGKILL; the launch is not known\n"),
    ],
)
def test_what_the_command_says(
    report: dict[str, Any] | None,
    code: int,
    out: str,
    err: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ask(self: Worker, question: Launches | Describe, deadline_s: float | None = None) -> dict[str, Any]:
        if isinstance(question, Describe):
            return Answering().ask(question)
        assert question == Launches(str(Run.parse(LINE)), 4, ["2"])
        assert deadline_s == 5 * 120
        assert self._environment["CUDA_LAUNCH_BLOCKING"] == "1"
        if report is None:
            raise WorkerLost("crashed", "killed by SIGKILL", "")
        return report

    monkeypatch.setattr(devices, "gpus", lambda: 1)
    monkeypatch.setattr(Worker, "ask", ask)
    assert cli.main(["launches", LINE, "--beside", "2"]) == code
    assert capsys.readouterr() == (out, err)
    assert cli.main(["launches", LINE, "--beside", "2", "--json"]) == code
    if report is not None and "error" not in report:
        assert json.loads(capsys.readouterr().out) == {"run": str(Run.parse(LINE)), **report}
