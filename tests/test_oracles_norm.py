"""The norm of keys and queries is right to a few roundings, and commutes with repeating heads."""

import decimal
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.gated_delta import repeat_heads
from oracles.norm import EPS, Normalised, l2norm
from oracles.rounding import Arithmetic
from tests.oracle_forms import floored, mean_eps

# The norm and the heads


def by_decimals(row: Sequence[float]) -> list[Fraction]:
    """x / sqrt(sum(x^2) + eps) to 60 digits."""
    with decimal.localcontext(decimal.Context(prec=60)):
        root = (sum((Decimal(x) ** 2 for x in row), Decimal(0)) + Decimal(EPS)).sqrt()
        return [Fraction(Decimal(x) / root) for x in row]


def ulps_off(norm: Callable[[Tensor], Tensor], row: Sequence[float]) -> float:
    """The largest error of an entry in units of 2^-53 of it."""
    got = norm(torch.tensor(row, dtype=torch.float64)).tolist()
    pairs = zip(got, by_decimals(row), strict=True)
    return max(float(abs(Fraction(one) - fraction) / abs(fraction)) * 2.0**53 if fraction else abs(one) for one, fraction in pairs)


ROWS = st.builds(
    lambda entries, exponent: [n * 2.0 ** (exponent - 8) for n in entries],
    st.lists(st.integers(-255, 255), min_size=1, max_size=64),
    st.integers(-30, 6),
)


@settings(max_examples=200)
@given(row=ROWS)
@example(row=[0.0] * 7)
@example(row=[1e-4] * 128)
@example(row=[1e-200, 0.0, 3.0])
def test_norm_equals_60_digits_to_a_few_roundings(row: list[float]) -> None:
    limit = 4 + len(row) / 2  # a sum of squares, a root, a reciprocal and a product; 2 measured up to 64 entries
    assert ulps_off(l2norm, row) <= limit
    assert ulps_off(lambda x: Normalised.apply(x, Arithmetic.exact(), "k"), row) <= limit


@pytest.mark.parametrize("wrong", [mean_eps, floored])
def test_wrong_place_of_eps_is_rejected(wrong: Callable[[Tensor], Tensor]) -> None:
    row = [1e-3, -2e-3, 5e-4]
    assert ulps_off(l2norm, row) <= 4
    assert ulps_off(wrong, row) > 1e6


@given(group=st.integers(1, 4), heads=st.integers(1, 3), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_norm_commutes_with_repeating_heads_exactly(group: int, heads: int, width: int, seed: int) -> None:
    x = torch.rand(2, heads, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e-3
    repeated = repeat_heads(x, heads * group)
    assert torch.equal(l2norm(repeated), repeat_heads(l2norm(x), heads * group))
    assert all(torch.equal(repeated[:, head], x[:, head // group]) for head in range(heads * group))
    assert torch.equal(repeat_heads(x.mT, heads * group, axis=-1), repeated.mT)
    if heads > 1 and group > 1:
        assert not torch.equal(repeated, x.repeat(1, group, 1)), "tiled heads are another mapping"
