"""An L2 norm whose float32 sum begins with eps: right where squares are far below eps, and another eps is not."""

import dataclasses

import pytest
import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.norm import Normalised
from oracles.tolerance import bound
from properties.rules.case import Case
from tests import right
from tests.together import for_each

SMALL = Case((99,), key_dim=192, value_dim=1, packed=True, gate="saturated", values="small", qk_norm=True, backward=False)
CASES = [
    dataclasses.replace(SMALL, key_dim=width, dtype=dtype, gate=gate, seed=width)
    for width in (64, 128, 192, 512)
    for dtype in ("bf16", "fp16", "fp32")
    for gate in ("saturated", "1000")
]


class LargerEps(right.BeginsWithEps):
    """eps is 1e-5."""

    eps = 1e-5


class NearEps(right.BeginsWithEps):
    """eps is one part in a thousand too large."""

    eps = 1.001e-6


class EpsOutside(right.BeginsWithEps):
    """eps is added to the norm, not to its square."""

    def normalised(self, x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True).sqrt() + self.eps)


def error_of(implementation: right.Recurrent, case: Case, runs: int = 4) -> float:
    """The largest error over its tolerance from so many runs."""
    x = case.inputs()
    o, state = implementation.run(x)
    bounds = bound.bounds(case.spec, x, None, "recurrent", "ieee", None, runs)
    found = {"o": o} if state is None else {"o": o, "final_state": state}
    return max(
        float(((found[name].double() - entry.value).norm(dim=-1) / entry.allowed).max())
        for name, entry in bounds.items()
        if name in found
    )


@for_each("case", CASES)
def test_a_sum_that_begins_with_eps_is_right(case: Case) -> None:
    assert error_of(right.BeginsWithEps(), case) < 1
    assert error_of(right.BeginsWithEps(), case, 16) < 1


@pytest.mark.parametrize("wrong", [LargerEps, NearEps, EpsOutside])
def test_another_eps_is_wrong_there(wrong: type[right.BeginsWithEps]) -> None:
    for case in CASES[::5]:
        assert error_of(wrong(), case, 16) > 1, str(case)


def test_it_breaks_without_a_run_that_adds_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arithmetic, "in_order", ())
    assert max(error_of(right.BeginsWithEps(), case, 16) for case in CASES) > 1


def allowed(case: Case) -> dict[str, Tensor]:
    x = case.inputs()
    cotangents = case.cotangents() if case.backward else None
    return {name: entry.allowed for name, entry in bound.bounds(case.spec, x, cotangents, "recurrent").items()}


@for_each("values", ["ordinary", "zero_rows", "scaled", "correlated", "small"])
def test_no_tolerance_moves_where_squares_exceed_eps(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((70,), key_dim=192, value_dim=2, values=values, qk_norm=True, seed=5)
    with_order = allowed(case)
    monkeypatch.setattr(Arithmetic, "in_order", ())
    same = {name: torch.equal(rows, with_order[name]) for name, rows in allowed(case).items()}
    assert all(same.values()) is (values != "small"), same


def test_only_rows_whose_squares_are_below_eps_are_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic, x = Arithmetic.of("recurrent", "fp32", runs=3), torch.zeros(3, 4, 256, dtype=torch.float64)
    x[:, 1], x[:, 2], x[:, 3] = 2e-5, 7e-5, 1.0  # squares that add up to 1e-7, to 1.25e-6 and to 256
    ordered = Normalised.apply(x, arithmetic, "k")
    monkeypatch.setattr(Arithmetic, "in_order", ())
    assert (ordered != Normalised.apply(x, dataclasses.replace(arithmetic), "k")).any(-1).nonzero().tolist() == [[1, 1]]
