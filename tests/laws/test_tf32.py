"""Products in TF32: matrix units cut operands off, so that sums of terms of one sign err to one side."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.arithmetic import rounding
from oracles.rule import in_chunks, scores
from oracles.tolerance import bound
from properties.rules.case import Case
from tests import right
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict

# Keys and values of one sign, and a state that grows for long: what is cut off adds up over all tokens.
GROWING = Case((1024,), key_dim=64, value_dim=32, values="one_signed", qk_norm=True, backward=False, seed=3)
BETA = 0.002


def truncating(bits: int) -> type[torch.autograd.Function]:
    """A function that cuts numbers off after so many stored bits, forward and backward."""

    class Truncated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
            return (x.float().contiguous().view(torch.int32) & ~((1 << (23 - bits)) - 1)).view(torch.float32)

        @staticmethod
        def backward(ctx: object, *cotangents: Tensor) -> Tensor:
            return Truncated.forward(ctx, cotangents[0])

    return Truncated


def error(monkeypatch: pytest.MonkeyPatch, bits: int, runs: int) -> float:
    """The largest error of an output over its tolerance from so many runs, of a kernel whose operands keep so many bits."""
    monkeypatch.setattr(right, "_Truncated", truncating(bits))
    return error_of(right.Tf32(), runs)


def error_of(implementation: right.Chunkwise, runs: int) -> float:
    x = GROWING.inputs()
    x = x.replaced(beta=torch.full_like(x.beta, BETA))
    o, _ = implementation.run(x)
    (of_o,) = (entry for name, entry in bound.bounds(GROWING.spec, x, None, "chunkwise", "tf32", 64, runs).items() if name == "o")
    return float(((o.double() - of_o.value).norm(dim=-1) / of_o.allowed).max())


def test_values_of_one_sign_have_one_sign_and_nearly_parallel_keys() -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        x = dataclasses.replace(GROWING, dtype=dtype, lengths=(9,)).inputs()
        for tensor in (x.q, x.k, x.v):
            assert (tensor >= 0).all()
        k = torch.nn.functional.normalize(x.k.double(), dim=-1)[0, :, 0]
        assert (k @ k.mT).min() > 0.6


@pytest.mark.slow
def test_what_a_matrix_unit_cuts_off_is_inside_the_tolerance_also_where_it_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(monkeypatch, 10, 4) < 0.4
    monkeypatch.setattr(rounding, "CUT", 0.0)
    assert error(monkeypatch, 10, 4) > 0.7, "without runs that cut, the bias takes most of the tolerance"


@pytest.mark.slow
def test_operands_of_two_bits_less_are_over_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(monkeypatch, 8, 4) > 1
    assert error(monkeypatch, 8, 64) > 1


@pytest.mark.slow
def test_so_are_those_of_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.1 < error_of(right.Hopper(), 4) < 0.4
    monkeypatch.setattr(right.Hopper, "bits", 8)
    assert error_of(right.Hopper(), 64) > 1


def sums_of(x: Tensor) -> Tensor:
    """Sums of x [..., C, C] that cancel where keys repeat: over its rows, its columns, and the rows up to each."""
    return torch.stack([x.sum(-1), x.sum(-2), x.sum(-1).cumsum(-1)])


def expected(a: Tensor, *, coarse: bool = False) -> Tensor:
    """The expected error of each of the sums of T = (I + A)^-1 in TF32, over many runs."""
    arithmetic = rounding.Arithmetic.of("chunkwise", "fp16", "tf32", runs=65)
    arithmetic = bound._coarser(arithmetic) if coarse else arithmetic
    exact, *others = in_chunks._inverse(a.expand(65, *a.shape), arithmetic)[0]
    return sums_of(torch.stack(others) - exact).square().mean(1).sqrt()


def of_one_key(beta: float, gate: float, square: float = 1.0) -> Tensor:
    """A of tokens whose keys are one key, and its square is `square`."""
    places = torch.arange(64.0, dtype=torch.float64)
    return (beta * square * 0.5 ** ((places[:, None] - places) * gate)).tril(-1)


def beyond(beta: float, gate: float, square: float = 1.0) -> Tensor:
    """How many expected errors the sums err by in `right.Tf32Inverse`."""
    a = of_one_key(beta, gate, square)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + a)
    merged = right.Tf32Inverse().solve(a.float(), torch.zeros(1))
    return sums_of(merged.double() - exact).abs() / expected(a).clamp(min=1e-6)


MADE = [
    (1.0, 1 / 64, 1.0),
    (1.9, 1 / 64, 1.0),
    (1.3, 1 / 64, 1.0),
    (1.3, 1 / 10, 1.0),
    (1.8271, 0.0, 1.0003),
    (0.7, 1 / 10, 1.0003),
]


@pytest.mark.parametrize(("beta", "gate", "square"), MADE)
def test_what_merges_of_an_inverse_cut_off_is_expected_also_where_sums_cancel(beta: float, gate: float, square: float) -> None:
    """T has few numbers that are not nearly 0 then, or many whose sums are, and merges add up to them from larger ones."""
    assert 0.2 < beyond(beta, gate, square).max() < 3


def test_errors_of_a_alone_cancel_as_the_sums_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_chunks, "MERGED", 64)
    assert max(float(beyond(*made).max()) for made in MADE) > 12


@pytest.mark.parametrize("place", [0, 1], ids=["T", "D"])
def test_errors_of_one_operand_do_not_stand_for_those_of_the_other(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = rounding.Arithmetic.stacked

    def without(self: rounding.Arithmetic, x: Tensor, places: tuple[str, ...], *more: Any) -> Tensor:
        rounded = stacked(self, x, places, *more)
        if "T in merges" in places:
            rounded = rounded.clone()
            rounded[..., place, :, :] = x[..., place, :, :]
        return rounded

    monkeypatch.setattr(rounding.Arithmetic, "stacked", without)
    assert max(float(beyond(*made).max()) for made in MADE) > 5


def test_operands_of_merges_lose_one_bit_more_in_coarse_runs() -> None:
    a = of_one_key(1.0, 1 / 64)
    more = expected(a, coarse=True).square().sum().sqrt() / expected(a).square().sum().sqrt()
    assert 1.6 < float(more) < 2.5


def test_merges_of_operands_that_lose_five_bits_more_are_over_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 times what is expected is allowed (oracles/tolerance/bound.py)."""
    monkeypatch.setattr(right, "_Truncated", truncating(5))
    assert beyond(1.0, 1 / 64).max() > 12


@pytest.mark.slow
def test_dg_errs_to_one_side_where_tokens_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in chunk_bwd_kernel_dqkwg of flash-linear-attention: q dq - k dk has whole q and k, and dq and dk have TF32 operands."""
    words = "heads=2 value_heads=2 key_dim=32 value_dim=64 gate=mixed beta=two values=small state=random in_kernel=gate seed=60523"
    run = Run.parse(f"law=strides variant=expanded adapter=tests/right.py:Tf32GatesInside products=tf32 lengths=9106 {words}")
    outcome = execute(run)
    assert (outcome.verdict, outcome.ratios["dA_log"] < 0.2) == (Verdict.HOLDS, True)
    monkeypatch.setattr(scores, "TF32_BITS", 0)
    monkeypatch.setattr(bound, "CLEAR", 2.0)  # more runs take longer, and find the same
    assert {finding.port for finding in execute(run).findings} == {"dA_log", "ddt_bias"}
