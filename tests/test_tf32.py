"""Products in TF32: matrix units cut operands off, so that sums of terms of one sign err to one side."""

import dataclasses

import pytest
import torch
from torch import Tensor

from oracles.arithmetic import rounding
from oracles.rule import in_chunks
from oracles.tolerance import bound
from properties.rules.case import Case
from tests import right

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


def expected(a: Tensor) -> Tensor:
    """The expected error of each row of T 1, with T = (I + A)^-1 in TF32, over many runs."""
    arithmetic = rounding.Arithmetic.of("chunkwise", "fp16", "tf32", runs=65)
    exact, *others = in_chunks._inverse(a.expand(65, *a.shape), arithmetic)[0]
    return (torch.stack(others) - exact).sum(-1).square().mean(0).sqrt()


@pytest.mark.parametrize("beta", [1.0, 1.9])
def test_what_merges_of_an_inverse_cut_off_is_expected_also_where_their_sums_cancel(
    beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys are one, so that T has few numbers that are not nearly 0, and each merge adds up to them from larger ones."""
    places = torch.arange(64.0, dtype=torch.float64)
    a = (beta * 0.5 ** ((places[:, None] - places) / 64)).tril(-1)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + a)
    merged = right.Tf32Inverse().solve(a.float(), torch.zeros(1))
    error = (merged.double() - exact).sum(-1).abs()
    assert 0.2 < (error / expected(a))[1:].max() < 2
    monkeypatch.setattr(in_chunks, "MERGED", 64)
    without = (error / expected(a))[1:].max()
    assert without > 4 if beta == 1.0 else without < 2, "errors of A alone cancel as the sums do"


def test_merges_of_operands_that_lose_five_bits_more_are_over_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 times what is expected is allowed (oracles/tolerance/bound.py)."""
    places = torch.arange(64.0, dtype=torch.float64)
    a = (0.5 ** ((places[:, None] - places) / 64)).tril(-1)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + a)
    for bits, over in ((10, False), (5, True)):
        monkeypatch.setattr(right, "_Truncated", truncating(bits))
        merged = right.Tf32Inverse().solve(a.float(), torch.zeros(1))
        assert bool(((merged.double() - exact).sum(-1).abs() / expected(a))[1:].max() > 12) is over
