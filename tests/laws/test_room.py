"""What the oracle takes of a GPU's memory, on GPUs of several sizes that are not there."""

import contextlib

import pytest
import torch

from oracles.arithmetic import room
from oracles.arithmetic.rounding import Arithmetic
from oracles.operation import Inputs
from oracles.operations import RULES
from oracles.rule import chunkwise, in_chunks, in_steps, scan
from oracles.tolerance import evaluation
from verify.execution import execute
from verify.execution.line import Run
from verify.gpu import turns
from verify.process.outcome import Verdict


def test_what_fits_is_in_proportion_to_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with more takes no more than was measured, and what is no GPU has no such limit."""
    sizes = {"cuda:0": room.H200, "cuda:1": room.H200 // 4, "cuda:2": 2 * room.H200, "cuda:3": 1}
    monkeypatch.setattr(room, "memory", lambda device: sizes[str(device)])
    assert [room.fitting(1000, torch.device(name)) for name in (*sizes, "cpu", "meta")] == [1000, 250, 1000, 1, 1000, 1000]


def test_segments_pieces_and_runs_at_once_are_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (torch.empty(8, 4, 2, 64, device="meta") for _ in range(2))
    recurrent, halves = Arithmetic.of("recurrent", "fp32", runs=16), Arithmetic.of("chunkwise", "bf16", runs=16)
    forms = in_steps.Recurrent(1.0, recurrent), in_chunks.Chunkwise(1.0, halves, channels=False), chunkwise._Call(1.0)
    shapes = {"q": (16, 128), "k": (16, 128), "v": (32, 128), "g": (32,), "beta": (32,)}
    large = Inputs(**{name: torch.empty(1, 2**13, *shape, device="meta") for name, shape in shapes.items()})

    def taken() -> tuple[list[int], int]:
        pieces = evaluation.pieces_of(RULES["gated_delta_rule"], large, 4)
        return [*(form.most(64, k, v) for form in forms), 16 // pieces], evaluation.at_once(large, recurrent, 4)

    whole, runs = taken()
    for module in (scan, chunkwise, evaluation):
        monkeypatch.setattr(module, "fitting", lambda most, _: most // 4)
    part, fewer = taken()
    assert [round(one / other) for one, other in zip(whole, part, strict=True)] == [4, 4, 4, 4]
    assert (runs, fewer) == (evaluation._FEW, evaluation._FEWEST)


def test_a_narrow_case_counts_as_wide_as_the_matrices_of_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of one channel need the same scores as heads of 64: with their tensors alone, such a case would be a small one."""
    needs = list[int]()

    def turn(device: str, need: int) -> contextlib.AbstractContextManager[None]:
        needs.append(need)
        return contextlib.nullcontext()

    monkeypatch.setattr(execute, "turn", turn)
    for heads, width in ((32, 1), (32, 8), (1, 8)):
        sizes = f"heads={heads} value_heads={heads} key_dim={width} value_dim={width}"
        run = Run.parse(f"law=oracle adapter=tests/right.py:Chunk128 lengths=1100 packed=yes {sizes} backward=no seed=1")
        assert execute.execute(run).verdict is Verdict.HOLDS
    narrow, wider, one = needs
    assert narrow > turns.LARGE > 32 * one / 2
    assert narrow <= wider < 1.1 * narrow
    assert one < turns.LARGE / 16
