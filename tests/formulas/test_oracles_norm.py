"""The norm of keys and queries is right to a few roundings, and commutes with repeating heads."""

import decimal
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.norm import EPS, NORM_FORMS, Normalised, l2norm
from oracles.rule.gated_delta import repeat_heads
from tests.oracle_forms import floored, mean_eps
from tests.together import for_each

# The norm and the heads


def by_decimals(row: Sequence[float], eps: float = EPS, form: str = "inside") -> list[Fraction]:
    """x / sqrt(sum(x^2) + eps) or x / max(|x|, eps) to 60 digits."""
    with decimal.localcontext(decimal.Context(prec=60)):
        squares = sum((Decimal(x) ** 2 for x in row), Decimal(0))
        root = max(squares.sqrt(), Decimal(eps)) if form == "max" else (squares + Decimal(eps)).sqrt()
        return [Fraction(Decimal(x) / root) for x in row]


def ulps_off(norm: Callable[[Tensor], Tensor], row: Sequence[float], eps: float = EPS, form: str = "inside") -> float:
    """The largest error of an entry in units of 2^-53 of it."""
    got = norm(torch.tensor(row, dtype=torch.float64)).tolist()
    pairs = zip(got, by_decimals(row, eps, form), strict=True)
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


FORMS = [(eps, form) for eps in (1e-5, 1e-6, 1e-12) for form in NORM_FORMS]


def normalised(x: Tensor, eps: float, form: str) -> Tensor:
    """The norm as the rules call it."""
    y: Tensor = Normalised.apply(x, Arithmetic.exact(), "k", eps, 1, None, form)
    return y


@pytest.mark.parametrize(("eps", "form"), FORMS)
@given(row=ROWS)
@example(row=[0.0] * 7)
@example(row=[3e-7, -4e-7])
@example(row=[1e-6])
@example(row=[2e-12, 0.0, 1e-12])
def test_every_form_equals_60_digits_to_a_few_roundings(eps: float, form: str, row: list[float]) -> None:
    limit = 4 + len(row) / 2
    assert ulps_off(lambda x: l2norm(x, eps, form), row, eps, form) <= limit
    assert ulps_off(lambda x: normalised(x, eps, form), row, eps, form) <= limit


def gradient(norm: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(norm(leaf), leaf, dy)
    return dx


def by_differences(x: Tensor, dy: Tensor, eps: float, form: str) -> Tensor:
    """The gradient of sum(dy y) by central differences, whose steps are a small part of the row or of what eps adds to it."""
    step = 1e-5 * max(float(x.norm()), eps if form == "max" else eps**0.5)
    rows = torch.eye(len(x), dtype=torch.float64) * step
    return torch.stack([((l2norm(x + row, eps, form) - l2norm(x - row, eps, form)) * dy).sum() / (2 * step) for row in rows])


LENGTHS = (0.0, 1e-3, 0.3, 0.999, 1.001, 4.0, 1e5)  # of rows, in units of the length where eps matters


def gradient_cases(eps: float, form: str) -> Iterator[tuple[Tensor, Tensor]]:
    root = eps if form == "max" else eps**0.5
    generator = torch.Generator().manual_seed(7)
    for width in (1, 2, 9):
        for length in LENGTHS:
            x, dy = torch.rand(2, width, generator=generator, dtype=torch.float64) - 0.5
            yield x / x.norm() * length * root, dy


@for_each(("eps", "form"), FORMS)
def test_gradient_of_every_form_is_that_of_autograd_and_of_differences(eps: float, form: str) -> None:
    torch_form = {
        "inside": lambda x: x / (x.square().sum(-1, keepdim=True) + eps).sqrt(),
        "max": lambda x: torch.nn.functional.normalize(x, dim=-1, eps=eps),
    }[form]
    for x, dy in gradient_cases(eps, form):
        got = gradient(lambda x: normalised(x, eps, form), x, dy)
        size = float(got.abs().max() + dy.abs().max() / max(float(x.norm()), eps))
        torch.testing.assert_close(got, gradient(torch_form, x, dy), rtol=0.0, atol=1e-13 * size)
        torch.testing.assert_close(got, by_differences(x, dy, eps, form), rtol=0.0, atol=1e-8 * size)


@for_each("eps", [1e-5, 1e-6, 1e-12])
def test_gradient_of_a_zero_row_and_at_eps_is_as_stated(eps: float) -> None:
    zero, dy = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(gradient(lambda x: normalised(x, eps, "max"), zero, dy), dy / eps)
    torch.testing.assert_close(gradient(lambda x: normalised(x, eps, "inside"), zero, dy), dy / eps**0.5)
    at = torch.tensor([eps, 0.0, 0.0], dtype=torch.float64)
    across = torch.tensor([0.0, -2.0, 0.5], dtype=torch.float64) / eps
    torch.testing.assert_close(gradient(lambda x: normalised(x, eps, "max"), at, dy), across)
    torch.testing.assert_close(gradient(lambda x: torch.nn.functional.normalize(x, dim=-1, eps=eps), at, dy), across)


def test_differences_reject_a_gradient_across_short_rows() -> None:
    """The gradient of x / |x| for a row shorter than eps, which is x / eps."""
    x, dy = torch.tensor([6e-7, 7e-7], dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64)
    want, y = by_differences(x, dy, 1e-6, "max"), x / 1e-6
    across = (dy - y * (y * dy).sum()) / 1e-6
    torch.testing.assert_close(gradient(lambda x: normalised(x, 1e-6, "max"), x, dy), want, rtol=1e-8, atol=0.0)
    assert float((across - want).abs().max()) > 0.5 * float(want.abs().max())


def test_rows_about_as_long_as_eps_get_a_tolerance_for_either_gradient() -> None:
    """A float32 kernel may find such a row shorter or longer than eps. Some disturbed run decides in the other way."""
    eps, dy = 1e-6, torch.tensor([1.0, 0.5], dtype=torch.float64)
    x = torch.tensor([[eps * (1 + 2.0**-26), 0.0]] * 9, dtype=torch.float64).unsqueeze(1)
    arithmetic = Arithmetic.of("recurrent", "fp32")
    dx = gradient(lambda x: Normalised.apply(x, arithmetic, "k", eps, 1, None, "max"), x, dy.expand_as(x))[:, 0, 0]
    assert float(dx[0]) == 0.0, "run 0 is exact: the row is longer than eps"
    assert {bool(abs(one * eps - 1) < 1e-6) for one in dx[1:]} == {True, False}


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="form must be one of inside, max, got 'outside'"):
        l2norm(torch.ones(2), 1e-6, "outside")


@given(group=st.integers(1, 4), heads=st.integers(1, 3), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_norm_commutes_with_repeating_heads_exactly(group: int, heads: int, width: int, seed: int) -> None:
    x = torch.rand(2, heads, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e-3
    repeated = repeat_heads(x, heads * group)
    assert torch.equal(l2norm(repeated), repeat_heads(l2norm(x), heads * group))
    assert all(torch.equal(repeated[:, head], x[:, head // group]) for head in range(heads * group))
    assert torch.equal(repeat_heads(x.mT, heads * group, axis=-1), repeated.mT)
    if heads > 1 and group > 1:
        assert not torch.equal(repeated, x.repeat(1, group, 1)), "tiled heads are another mapping"
