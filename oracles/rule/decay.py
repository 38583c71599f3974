"""Products that decay with distance: P_ij = sum_c x_ic y_jc exp(G_ic - G_jc) for i >= j, and 0 above the diagonal.

G decreases along i, so every exponent is at most zero and nothing overflows. If a token has one G for all channels, the exponential
is a factor of the whole product. If each channel has its own G, the exponential must go into the operands, where exp(-G_j) alone
would overflow. So the lower triangle is divided into squares: for s = 1, 2, 4, ..., the rows of the later half and the columns of
the earlier half of every 2 s tokens. With r the last token of the earlier half,

    exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j),      j <= r < i

where both exponents are again at most zero. The squares of all s and the diagonal cover each i >= j once.
"""

import torch
from torch import Tensor


def decayed(x: Tensor, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return P [..., C, C] and, if all channels share G, its factor exp(G_i - G_j), otherwise None.

    x, y are [..., C, K]. `total` is G, [..., C, 1] or [..., C, K]; in the latter case C must be a power of two.
    """
    if total.shape[-1] == 1:
        factor = (total - total.mT).masked_fill_(~lower(x.shape[-2], x.device), -torch.inf).exp_()
        return (x @ y.mT) * factor, factor
    shape = torch.broadcast_shapes(x.shape, y.shape, total.shape)
    x, y = x.expand(shape), y.expand(shape)
    product = x.new_zeros(*shape[:-1], shape[-2])
    product.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1))
    for size in sizes(shape[-2]):
        later, earlier = decays(total, size)
        squares(product, size).copy_((halves(x, size)[1] * later) @ (halves(y, size)[0] * earlier).mT)
    return product, None


def decayed_backward(
    dp: Tensor, x: Tensor, y: Tensor, total: Tensor, product: Tensor, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of x, y and g, where G = cumsum(g), from `dp`, those of P; shapes are broadcast with G.

    Only dp at and below the diagonal is used. With D the product of dP and P, channel by channel, dG_i = sum_j D_ij - sum_j D_ji,
    to which the diagonal adds nothing, and

        dg_t = sum_{i >= t} dG_i = sum_{i >= t > j} D_ij

    The second form omits the terms that cancel in the first, so it loses no precision where g_t is strong and little passes it. It
    is used if all channels share G. There x and y may have one group of heads (axis -3) for several of G, and get the sum over
    these.
    """
    if factor is not None:
        passing = (dp * product).tril_(-1).cumsum(-1).tril_(-1).sum(-2)[..., :-1]
        ds = dp * factor
        ds = ds.sum(-3, keepdim=True) if x.shape[-3] == 1 else ds
        return ds @ y, ds.mT @ x, torch.nn.functional.pad(passing, (1, 0)).unsqueeze(-1)
    shape = torch.broadcast_shapes(x.shape, y.shape, total.shape)
    x, y = x.expand(shape), y.expand(shape)
    diagonal = dp.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dx, dy, dtotal = diagonal * y, diagonal * x, x.new_zeros(shape)
    for size in sizes(shape[-2]):
        (_, high), (low, _), (dlow, dhigh) = halves(x, size), halves(y, size), halves(dtotal, size)
        later, earlier = decays(total, size)
        block = squares(dp, size)
        of_high, of_low = (block @ (low * earlier)) * later, (block.mT @ (high * later)) * earlier
        halves(dx, size)[1].add_(of_high)
        halves(dy, size)[0].add_(of_low)
        dhigh.add_(high * of_high)
        dlow.sub_(low * of_low)
    return dx, dy, dtotal.flip(-2).cumsum(-2).flip(-2)


def lower(tokens: int, device: torch.device) -> Tensor:
    """Return a mask that is true at and below the diagonal."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


def sizes(tokens: int) -> list[int]:
    """Return the sides of the squares that cover a triangle of `tokens` tokens, a power of two."""
    return [1 << power for power in range((tokens - 1).bit_length())]


def halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the earlier and the later `size` of every 2 * size rows of x [..., C, K], as views [..., C / 2 size, size, K]."""
    low, high = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return low, high


def decays(total: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return exp(G_i - G_r) of the later halves and exp(G_r - G_j) of the earlier halves."""
    low, high = halves(total, size)
    between = low[..., -1:, :]
    return (high - between).exp(), (between - low).exp()


def squares(product: Tensor, size: int) -> Tensor:
    """Return the squares of later rows and earlier columns of [..., C, C], as a view [..., C / 2 size, size, size]."""
    parts = product.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))  # [..., m, 2, s, m, 2, s]
    lower_left: Tensor = parts.select(-5, 1).select(-2, 0).diagonal(dim1=-4, dim2=-2)
    return lower_left.movedim(-1, -3)
