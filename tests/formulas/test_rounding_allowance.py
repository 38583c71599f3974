"""What a row is allowed: half from its own disturbance and half from that of its neighbours, and never less than a floor."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.arithmetic.rounding import FP16_STEP
from oracles.operation import Port
from oracles.tolerance.allowance import KAPPA, Rows, allowances, moving_mean
from oracles.tolerance.bound import bounds
from properties.rules.case import Case
from tests.over_bounds import NAMES

# Pooling


def pooled(squares: Tensor, lengths: list[int]) -> Tensor:
    """What rows of one channel [tokens, heads] are allowed whose mean squared disturbance is given; no floor to speak of."""
    batch = squares[None]
    return allowance(Rows(Port("o", "B T HV V"), torch.zeros_like(batch)[..., None], batch, 2.0**-40, 0.0), lengths)[0]


def allowance(rows: Rows, lengths: list[int]) -> Tensor:
    """What the rows of one tensor are allowed."""
    (allowed,) = allowances([rows], lengths)
    return allowed


def test_scale_of_a_row_is_half_its_own_and_half_its_neighbours() -> None:
    squares = torch.zeros(20, 1, dtype=torch.float64)
    squares[10] = 1.0
    peak, near = math.sqrt(0.5 + 0.5 / 9) * KAPPA, math.sqrt(0.5 / 9) * KAPPA
    want = [peak if token == 10 else near if abs(token - 10) <= 4 else 0.0 for token in range(20)]
    torch.testing.assert_close(pooled(squares, [20])[:, 0], torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-11)


def test_pool_ends_at_the_end_of_its_sequence_and_head() -> None:
    squares = torch.zeros(20, 2, dtype=torch.float64)
    squares[9, 0] = 1.0
    apart = pooled(squares, [10, 0, 10])
    assert (apart[10:] < 1e-9).all()
    assert (apart[:, 1] < 1e-9).all()
    assert (apart[5:10, 0] > 1).all()
    torch.testing.assert_close(apart[9, 0], torch.tensor(math.sqrt(0.5 + 0.5 / 5) * KAPPA, dtype=torch.float64))
    assert (pooled(squares, [20])[10:14, 0] > 1).all(), "a pool across the boundary would be seen"


def test_pool_of_small_rows_does_not_suffer_from_large_ones_before() -> None:
    """A difference of running sums would leave them nothing, or what the sums lost."""
    squares = torch.full((40, 1), 1e-20, dtype=torch.float64)
    squares[:10] = 1e6
    allowed = pooled(squares, [40])[:, 0]
    torch.testing.assert_close(allowed[14:], torch.full((26,), KAPPA * 1e-10, dtype=torch.float64), rtol=1e-12, atol=1e-29)


def test_pool_of_a_state_runs_along_its_matrix_only() -> None:
    value, squares = torch.zeros(2, 3, 12, 5, dtype=torch.float64), torch.zeros(2, 3, 12, dtype=torch.float64)
    squares[1, 2, 0] = 1.0
    allowed = allowance(Rows(Port("final_state", "N HV K V", "fp32"), value, squares, 2.0**-40, 0.0), [7, 9])
    assert allowed.shape == (2, 3, 12)
    assert (allowed > 1).nonzero().tolist() == [[1, 2, row] for row in range(5)]


def test_bounds_of_a_sequence_do_not_depend_on_its_neighbours_values() -> None:
    case = Case.parse("lengths=20+30 packed=yes gate=64 dtype=bf16 state=random seed=6")
    inputs, cotangents = case.inputs(), case.cotangents()
    first = torch.arange(50).reshape(1, -1, 1, 1) < 20
    loud = inputs.replaced(v=torch.where(first, 1024 * inputs.v, inputs.v))
    once, twice = (bounds(case.spec, call, cotangents, "chunkwise") for call in (inputs, loud))
    for name in NAMES:
        rows = (slice(1, 2),) if name in ("final_state", "dh0") else (slice(None), slice(20, None))
        assert torch.equal(once[name].allowed[rows], twice[name].allowed[rows]), name
    assert (twice["o"].allowed[:, :20] > 100 * once["o"].allowed[:, :20]).all()


def test_floor_is_two_units_of_the_row_and_holds_where_runs_agree() -> None:
    port, value = Port("o", "B T HV V"), torch.tensor([3.0, 4.0], dtype=torch.float64).expand(1, 5, 1, 2)
    nothing, still = torch.zeros_like(value), torch.zeros(1, 5, 1, dtype=torch.float64)
    allowed = allowance(Rows(port, value, still, 2.0**-7, 0.0), [5])
    torch.testing.assert_close(allowed, torch.full((1, 5, 1), 2 * 2.0**-7 * 5.0, dtype=torch.float64))
    steps = allowance(Rows(port, nothing, still, 2.0**-7, FP16_STEP), [5])
    torch.testing.assert_close(steps, torch.full((1, 5, 1), FP16_STEP * 2**0.5, dtype=torch.float64))
    assert (allowance(Rows(port, nothing, still, 2.0**-7, 0.0), [5]) > 0).all()
    scalars = Port("dg", "B T HV", scalar_rows=True)
    one = torch.full((1, 5, 1), -3.0, dtype=torch.float64)
    torch.testing.assert_close(allowance(Rows(scalars, one, still, 2.0**-7, 0.0), [5]), one.abs() * 2.0**-6)


@settings(max_examples=50)
@given(size=st.integers(0, 40), seed=st.integers(0, 99))
def test_moving_mean_is_the_mean_of_up_to_nine(size: int, seed: int) -> None:
    rows = torch.rand(2, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got = moving_mean(rows)
    assert got.shape == rows.shape
    for place in range(size):
        want = rows[:, max(0, place - 4) : place + 5].mean(-1)
        torch.testing.assert_close(got[:, place], want, rtol=1e-12, atol=1e-14)
