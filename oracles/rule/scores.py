"""Products of queries and keys inside a chunk, decayed and disturbed, and their backward. Both classes of algorithm use them."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from oracles.arithmetic.rounding import TF32_BITS, Arithmetic, summed
from oracles.rule.decay import decays, halves, sizes, squares


def stacked_products(*pairs: tuple[Tensor, Tensor | float]) -> Tensor:
    """Return the products of the pairs, stacked along axis -3; each is computed in place."""
    shapes = (other.shape for _, other in pairs if isinstance(other, Tensor))
    shape = torch.broadcast_shapes(pairs[0][0].shape, *shapes)
    result = pairs[0][0].new_empty(*shape[:-2], len(pairs), *shape[-2:])
    for place, (x, other) in zip(result.unbind(-3), pairs, strict=True):
        torch.mul(x, other, out=place)
    return result


def side_by_side(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return x and a * b, side by side along the last axis."""
    width, shape = x.shape[-1], torch.broadcast_shapes(x.shape[:-1], a.shape[:-1], b.shape[:-1])
    result = x.new_empty(*shape, width + b.shape[-1])
    result[..., :width] = x
    torch.mul(a, b, out=result[..., width:])
    return result


def factors_back(
    pairs: Sequence[tuple[Tensor, Tensor]], total: Tensor, places: tuple[str, ...], arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the factors of each x, from pairs (x, dy), stacked, and one more of them for sums over the chunk.

    That one belongs to the second factor, or to the only one. A factor has one number for each token, or one for each token and
    channel. The gradients are sums of x dy: the first ones over a token's channels, the other one over all tokens of the chunk too.
    Their terms may cancel, and sums in another order round differently. So the roundings of the terms are added, not those of the
    sums.
    """
    (chunk, width), shared, second = pairs[0][0].shape[-2:], total.shape[-1] == 1, 1 % len(places)
    width = width if shared else 1
    terms = stacked_products(*pairs, *([pairs[second]] if arithmetic.rounds else []))
    if arithmetic.rounds:
        named = *(f"{place} summed" for place in places), f"{places[second]} summed at the end"
        bits = (summed(width),) * len(places) + (summed(chunk * width),)
        terms = arithmetic.stacked(terms, named, bits)
    sums = terms.sum(-1, keepdim=True) if shared else terms
    return sums[..., : len(places), :, :], sums[..., -1 if arithmetic.rounds else second, :, :]


def decayed_scores(
    pair: Tensor, k: Tensor, total: Tensor, arithmetic: Arithmetic, *, channels: bool
) -> tuple[Tensor, Tensor | None]:
    """Return sum_c x_ic k_jc exp(G_ic - G_jc) at and below the diagonal, else 0, for two stacked x; and the factor exp(G_i - G_j).

    The second result is None if channels decay separately. An implementation then decays q and k towards some token between them,
    stores them and multiplies (oracles/rule/decay.py); near the diagonal it may multiply first.
    """
    x = arithmetic.stacked(pair, PRODUCTS, arithmetic.product_bits(k.shape[-1]))
    if not channels:
        decay = torch.exp((total - total.mT).masked_fill(_upper(k.shape[-2], k.device), -torch.inf))
        products = (x.flatten(-3, -2) @ k.mT).unflatten(-2, (2, -1))
        return products * decay.unsqueeze(-3), decay
    k, total = k.unsqueeze(-3), total.unsqueeze(-3)
    products = x.new_zeros(*x.shape[:-1], x.shape[-2])
    products.diagonal(dim1=-2, dim2=-1).copy_((x * k).sum(-1))
    for size in sizes(x.shape[-2]):
        later, earlier = decays(total, size)
        high = arithmetic.stacked(halves(x, size)[1] * later, _named(f"later {size}"), axis=-4)
        low = arithmetic.stacked(halves(k, size)[0] * earlier, _named(f"earlier {size}"), axis=-4)
        squares(products, size).copy_(high @ low.mT)
    return products, None


def decayed_scores_back(
    cotangents: Tensor,
    pair: Tensor,
    k: Tensor,
    total: Tensor,
    products: Tensor,
    decay: Tensor | None,
    arithmetic: Arithmetic,
    *,
    channels: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of both x, of k for each x, and of G for both x together.

    With D the product of scores and cotangents, dG_i = sum_j D_ij - sum_j D_ji, to which the diagonal adds nothing. Kernels compute
    it as x_i.dx_i - k_i.dk_i, whose terms stay large where decays are strong and D is small. So the rounding of these terms is
    added, and that of the products from which dx and dk come, which differ.
    """
    chunk, depth = k.shape[-2:]
    bits, keys = arithmetic.product_bits(chunk), k.unsqueeze(-3)
    if decay is not None:
        ds = cotangents * decay.unsqueeze(-3)
        off = (cotangents * products).tril_(-1)
        if arithmetic.step:  # an implementation may store the decayed cotangents; a subnormal step then does not decay with them
            stored = arithmetic.stacked(ds, _named("decayed"))
            plain = (pair.flatten(-3, -2) @ k.mT).unflatten(-2, (2, -1))
            off.add_(((stored - ds) * plain).tril_(-1))
            ds = stored
        of_x = of_k = ds
        if arithmetic.rounds:
            both = torch.cat([ds, ds], -3)
            of_x, of_k = arithmetic.stacked(both, _named("dx") + _named("dk"), bits).split(2, -3)
        dx = (of_x.flatten(-3, -2) @ k).unflatten(-2, (2, -1))
        dk = of_k.mT @ pair
        dtotal = (off.sum(-1) - off.sum(-2)).unsqueeze(-1)
        if arithmetic.product <= TF32_BITS:
            # As operands of dx and dk, k and x lose bits that they have in x.dx - k.dk. So its terms do not cancel.
            dx = of_x @ arithmetic.stacked(keys, _named("k in dx"), bits)
            dk = of_k.mT @ arithmetic.stacked(pair, _named("x in dk"), bits)
            dtotal = dtotal + (pair * (dx - ds @ keys) - keys * (dk - ds.mT @ pair)).sum(-1, keepdim=True)
    else:
        dp, total = arithmetic.stacked(cotangents, _named("dP")), total.unsqueeze(-3)
        diagonal = dp.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dx, dk, dtotal = diagonal * keys, diagonal * pair, torch.zeros_like(pair)
        for size in sizes(chunk):
            (_, high), (low, _), (dlow, dhigh) = halves(pair, size), halves(keys, size), halves(dtotal, size)
            later, earlier = decays(total, size)
            block = squares(dp, size)
            near, far = (
                arithmetic.stacked(matrix, _named(f"{name} {size}"), bits, -4) for name, matrix in (("dx", block), ("dk", block.mT))
            )
            of_high = (near @ arithmetic.stacked(low * earlier, _named(f"earlier {size} dx"), axis=-4)) * later
            of_low = (far @ arithmetic.stacked(high * later, _named(f"later {size} dk"), axis=-4)) * earlier
            halves(dx, size)[1].add_(of_high)
            halves(dk, size)[0].add_(of_low)
            dhigh.add_(high * of_high)
            dlow.sub_(low * of_low)
    if arithmetic.rounds:
        shared = total.shape[-1] == 1 and not channels
        terms = dx.new_empty(*dx.shape[:-3], 4, *dx.shape[-2:])
        torch.mul(pair, dx, out=terms[..., :2, :, :])
        torch.mul(keys, dk, out=terms[..., 2:, :, :])
        depth = chunk * depth if shared else chunk
        errors = arithmetic.stacked(terms, _named("x.dx") + _named("k.dk"), arithmetic.product_bits(depth)).sub_(terms)
        errors = errors.sum(-1, keepdim=True) if shared else errors
        dtotal = dtotal + errors[..., :2, :, :] - errors[..., 2:, :, :]
    return dx, dk, dtotal.sum(-3)


PRODUCTS = ("A", "q k")


def _named(name: str) -> tuple[str, ...]:
    return tuple(f"{place} {name}" for place in PRODUCTS)


@functools.lru_cache(64)
def _upper(tokens: int, device: torch.device) -> Tensor:
    """Return a mask that is true above the diagonal."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def gathered(x: Tensor, total: Tensor) -> Tensor:
    """Return x summed over the channels that share a gate."""
    return x.sum(-1, keepdim=True) if total.shape[-1] < x.shape[-1] else x


def sums_from(x: Tensor) -> Tensor:
    """Return, for each token, the sum over it and the tokens after it in its chunk."""
    return x.flip(-2).cumsum(-2).flip(-2)
