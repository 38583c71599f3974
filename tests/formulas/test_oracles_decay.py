"""Products that decay (oracles/rule/decay.py) equal those of all pairs, however strong the decay is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracles.rule import decay
from tests.judging import relative
from tests.together import for_each

# Products that decay

Pair = tuple[Tensor, Tensor]


def products(x: Tensor, y: Tensor, total: Tensor) -> Tensor:
    """sum_c x_ic y_jc exp(G_ic - G_jc) at and below the diagonal: the exponentials of all pairs, as they are."""
    x, y, total = torch.broadcast_tensors(x, y, total)
    rows = [
        torch.stack([(x[..., i, :] * y[..., j, :] * (total[..., i, :] - total[..., j, :]).exp()).sum(-1) for j in range(i + 1)], -1)
        for i in range(x.shape[-2])
    ]
    return torch.stack([torch.nn.functional.pad(row, (0, x.shape[-2] - row.shape[-1])) for row in rows], -2)


def decaying(tokens: int, channels: int, seed: int, strongest: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 1, 1, T, 3] and y, G [1, 1, 2, T, ...]: two kinds of products, two value heads of a key head."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2, 1, 1, tokens, 3, generator=generator, dtype=torch.float64) * 2 - 1
    y = torch.rand(1, 1, 1, tokens, 3, generator=generator, dtype=torch.float64) * 2 - 1
    steps = torch.rand(1, 1, 2, tokens, channels, generator=generator, dtype=torch.float64)
    return x, y, (-strongest * steps**4).cumsum(-2)


def worst_product(tokens: int, channels: int, seed: int, strongest: float) -> float:
    """The largest error of the products and of their gradients, over the largest entry."""
    x, y, total = (tensor.requires_grad_() for tensor in decaying(tokens, channels, seed, strongest))
    want = products(x, y, total)
    got, factor = decay.decayed(x.detach(), y.detach(), total.detach())
    dp = torch.rand(want.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).tril()
    dx, dy, dtotal = torch.autograd.grad(want, (x, y, total), dp)
    gradients = dx, dy, dtotal.flip(-2).cumsum(-2).flip(-2)  # of g, of which G is the sum
    slopes = decay.decayed_backward(dp, x.detach(), y.detach(), total.detach(), got, factor)
    parts = {
        "P": got,
        **{name: one.sum_to_size(gradient.shape) for name, one, gradient in zip("xyg", slopes, gradients, strict=True)},
    }
    return max(relative(parts, {"P": want.detach(), **dict(zip("xyg", gradients, strict=True))}).values())


@pytest.mark.slow
@for_each("channels", [1, 3])
@for_each("tokens", [1, 2, 8, 32])
def test_products_that_decay_are_those_of_all_pairs_however_strong_the_decay(channels: int, tokens: int) -> None:
    for strongest in (0.0, 0.1, 5.0):
        assert worst_product(tokens, channels, tokens, strongest) <= 1e-14
    assert worst_product(tokens, channels, tokens, 1e3) <= 1e-11, "G of thousands, from another"


def overflowing(total: Tensor, size: int) -> Pair:
    """exp(G_i) on one side and exp(-G_j) on the other."""
    low, high = decay.halves(total, size)
    return high.exp(), (-low).exp()


def from_the_later_half(total: Tensor, size: int) -> Pair:
    """Rows decay from the first token of their own half, columns to the last of theirs."""
    low, high = decay.halves(total, size)
    return (high - high[..., :1, :]).exp(), (low[..., -1:, :] - low).exp()


@pytest.mark.parametrize(("wrong", "strongest"), [(overflowing, 1e3), (from_the_later_half, 0.1)])
def test_wrong_decays_of_halves_are_rejected(
    wrong: Callable[[Tensor, int], Pair], strongest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst_product(16, 3, 1, strongest) <= 1e-11
    monkeypatch.setattr(decay, "decays", wrong)
    assert worst_product(16, 3, 1, strongest) > 1e-3


@for_each("tokens", [1, 2, 4, 16, 64])
def test_squares_and_diagonal_cover_the_lower_triangle_once(tokens: int) -> None:
    tags = torch.arange(tokens**2).reshape(tokens, tokens)
    seen = tags.diagonal().tolist()
    for size in decay.sizes(tokens):
        squares = decay.squares(tags, size)
        assert squares.data_ptr() >= tags.data_ptr()
        assert squares.shape == (tokens // (2 * size), size, size)
        low, high = (part.reshape(-1, size).tolist() for part in decay.halves(torch.arange(tokens).unsqueeze(-1), size))
        want = [[[row * tokens + column for column in columns] for row in rows] for columns, rows in zip(low, high, strict=True)]
        assert squares.tolist() == want, "later rows, earlier columns"
        seen += squares.flatten().tolist()
    assert sorted(seen) == tags[decay.lower(tokens, tags.device)].tolist()
