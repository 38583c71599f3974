"""The delta rules with the roundings of the two classes of algorithm that kernels use, many runs at once.

`recurrent` and `chunkwise` round where such algorithms round (oracles/rounding.py), forward and in a backward of their own. Without
rounding, tests/test_oracles.py shows that both equal the definition. tests/test_rounding.py shows that the runs of `recurrent`
spread like runs of the definition that round every element at every step, which would take as many steps as there are tokens.

At the sizes of a case, the number of calls decides the time. So tensors that round in the same way at two or three places are
rounded in one call: they are stacked along axis -3, or lie side by side along the last axis.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracles.chunkwise import inverted, substituted
from oracles.decay import decays, halves, sizes, squares
from oracles.room import fitting
from oracles.rounding import EXACT, FUNCTION_BITS, SINGLE, Arithmetic, summed
from oracles.segments import Form, Segment, rule

STEPS = 64  # tokens of the recurrence that are computed at once
_PADDED = 96  # padding by this many tokens, or by a quarter, costs less than computing chunks of another size separately
SHORTEST = 16  # tokens of the shortest chunk, as matrix units need them
_GRAPH = {"cpu": 2**32, "cuda": 2**34}  # bytes of a segment; in a call of several, the backward computes all but the last again
FLOAT64 = EXACT - 5  # bits of a float64 sum over a chunk
_KEPT = 2**20  # up to so many numbers, in all runs, what calls of one shape share is cached
NARROW = torch.float32  # dtype of chunkwise runs in half precision and TF32
PLAIN = Arithmetic.exact()


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    arithmetic: Arithmetic,
    lengths: Sequence[int],
    *,
    linear: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the definition in many runs: o [runs, T, HV, V] and final states [runs, N, HV, K, V] of consecutive sequences.

    q, k [runs, T, HV, K], v [runs, T, HV, V], g [runs, T, HV, 1 or K], beta [runs, T, HV, 1], state [runs, N, HV, K, V].

    Recurrent and decode kernels keep float32 throughout. At every step they round the decay, the state after its decay and after
    its update, the correction that is written, and the two sums over K. Where tokens repeat, the same errors are written again and
    again.

    A run with these errors is nearly the definition on other numbers: one key that recalls, another key that is written, a query,
    and the decay exp(g + e), where e_t is the fraction that channel k of a state loses or gains at step t. So it is computed in
    chunks. With E = cumsum(e), which is tiny, exp(G_i - G_j + E_i - E_j) goes into the operands as exp(E) k and exp(-E) k.

    These errors affect a whole row of the state and are shared by the channels of the values. In sums over these channels they
    might cancel where an implementation's errors do not. Channels of the values never mix in a state. So in every other pair of
    runs, half of them (a different half in each run) are computed with errors of opposite sign.

    An implementation may write beta k v^T and beta k (k^T S)^T separately. Then the cotangents of beta k, dS v and -dS (S^T k), and
    their sums with k, round separately; their errors stay large where the correction v - S^T k is small. Where the correction is
    not small, these errors are those of dS (v - S^T k), which are modelled anyway. Where it is small, both are as large as those of
    dS v. So the errors of dS v are added.

    A backward that sums its states again from stored corrected values (`summed_again`) never corrects the errors of these values.
    Its states S + D drift from those of the forward: D decays like S, and adds each value's error with its key. In calls so large
    that they have several segments, D begins at zero in each.

    `linear` says that an implementation takes the decay itself: g is the exact logarithm of a number that it need not compute. Then
    the decay does not round, only the state after it.
    """
    form = _Recurrent(scale, dataclasses.replace(arithmetic, axis=1), linear)
    return _rule(form, (q, k, v, g, beta), state, lengths, alike(lengths, [_short(length, STEPS) for length in lengths]))


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    arithmetic: Arithmetic,
    lengths: Sequence[int],
    chunk: int = 64,
    *,
    channels: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the chunkwise form in many runs; shapes as in `recurrent`. Sequences shorter than a chunk have a smaller chunk.

    `channels` says that an implementation decays each channel of the key separately, even if there is only one.
    Padding tokens have k = v = g = beta = 0: they decay nothing and write nothing, so the final state is right.
    """
    channels = channels or g.shape[-1] > 1
    sizes = [_short(length, chunk) for length in lengths]
    if channels:  # products that decay by channel need powers of two (oracles/decay.py)
        sizes = [1 << (size - 1).bit_length() for size in sizes]
    if arithmetic.narrow:  # otherwise the bits that sums over a chunk keep depend on its size
        sizes = alike(lengths, sizes)
    form = _Chunkwise(scale, dataclasses.replace(arithmetic, axis=1), channels)
    return _rule(form, (q, k, v, g, beta), state, lengths, sizes)


def _short(length: int, chunk: int) -> int:
    """Return the tokens in the chunks of a sequence: at most the least power of two that holds the sequence, to limit padding."""
    return min(chunk, max(SHORTEST, 1 << max(length - 1, 0).bit_length()))


def alike(lengths: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the chunk sizes, some replaced by larger ones among them if that adds little padding.

    Chunks of one size are computed at once.
    """
    of_size = {size: [length for length, chunk in zip(lengths, sizes, strict=True) if chunk == size] for size in sizes}

    def padded(size: int, taken: int) -> int:
        return sum(-(-length // taken) * taken for length in of_size[size])

    most, taken, larger = max(_PADDED, sum(padded(size, size) for size in of_size) // 4), dict[int, int](), max(sizes, default=1)
    for size in sorted(of_size, reverse=True):
        more = padded(size, larger) - padded(size, size)
        larger, most = (larger, most - more) if more <= most else (size, most)
        taken[size] = larger
    return [taken[size] for size in sizes]


def _rule(
    form: Form, tokens: tuple[Tensor, ...], state: Tensor, lengths: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Apply the rule to tokens and states with the runs first; the form has the runs after chunks and sequences."""
    first = tuple(x.transpose(0, 1) for x in (*tokens, state))
    o, final = rule(form, first[:-1], first[-1], tuple(lengths), tuple(sizes))
    return o.transpose(0, 1), final.transpose(0, 1)


def _most(size: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> int:
    """Return the chunks of a segment: as many as fit with their graphs into _GRAPH bytes of a dtype.

    At its peak, a graph has 51 to 67 numbers for each token and channel (measured at widths 64 and 128, in either class); 60 are
    assumed.
    """
    chunk_bytes = 60 * dtype.itemsize * size * math.prod(v.shape[1:-1]) * (k.shape[-1] + v.shape[-1])
    return max(1, fitting(_GRAPH.get(k.device.type, _GRAPH["cuda"]), k.device) // chunk_bytes)


class _Scan(NamedTuple):
    """What takes the states from chunk to chunk, or the cotangents of these tensors; `behind` is None if only k decays."""

    keeps: Tensor
    reads: Tensor
    scores: Tensor
    erased: Tensor
    whole: Tensor
    behind: Any


class _States(NamedTuple):
    """For each chunk: the state before it, as computed and as stored; V' as it is read, and as it is kept for the state."""

    before: Tensor
    stored: Tensor
    fresh: Tensor
    addend: Tensor


class _OfChunkwise(NamedTuple):
    """What the chunkwise backward needs of its forward, in addition to the scan."""

    k: Tensor
    beta: Tensor
    total: Tensor
    grown: Tensor
    ahead: Tensor
    pair: Tensor
    products: Tensor
    decay: Tensor | None
    solved: Tensor
    inverse: Tensor
    right: Tensor
    start: Tensor


class _OfRecurrent(NamedTuple):
    """What the backward of the recurrence needs of its forward, in addition to the scan."""

    beta: Tensor
    writes: Tensor
    total: Tensor
    grown: Tensor
    left: Tensor
    pair: Tensor
    products: Tensor
    decay: Tensor | None
    right: Tensor
    solved: Tensor
    inverses: list[Tensor]
    drift: Tensor
    order: Tensor | None
    back: Tensor | None
    missed: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Chunkwise:
    """The chunkwise form of q, k, v, g, beta [chunk, runs, HV, C, width]; every use of an operand stores its own cotangent."""

    scale: float
    arithmetic: Arithmetic
    channels: bool

    def most(self, size: int, k: Tensor, v: Tensor) -> int:
        """Return as many chunks as memory allows."""
        return _most(size, k, v, self.dtype(k))

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return NARROW if operands are coarser: an implementation then computes everything else in float32 and rounds so too."""
        return NARROW if self.arithmetic.first and self.arithmetic.narrow else x.dtype

    def forward(self, segment: Segment, tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return o, the states after the segment, and what the backward needs."""
        (q, k, v, g, beta), scale, arithmetic, channels = tokens, self.scale, self.arithmetic, self.channels
        dither, chunk, widths = arithmetic.dither, k.shape[-2], (v.shape[-1], k.shape[-1])
        sums = g.cumsum(-2)
        total = dither(sums, "G", summed(chunk))  # the cumulative gate is a float32 sum
        # An implementation may sum a chunk's gates a second time for G_C, in another order than in the cumulative sum. Both sums
        # have the same terms, so their errors may be equally large, but they are not the same: G_C - G does not cancel them.
        end = dither(sums[..., -1:, :], "G_C", summed(chunk))
        grown, left = total.exp(), end - total
        ahead, behind = left.exp(), None
        if not channels:
            # An implementation decays either k or V' before it stores them for the state; some runs do one, some the other. With a
            # separate decay for each channel, only k can be decayed.
            share = arithmetic.choice(total)
            ahead, behind = (share * left).exp(), ((1.0 - share) * left).exp()

        # The scaled query is stored, because an implementation may scale q instead of the output.
        pair = arithmetic.stacked(_products((k, beta), (q, scale)), ("beta k", "scale q"))
        products, decay = _scores(pair, k, total, arithmetic, channels=channels)
        corrections, scores = products.unbind(-3)
        solved, inverse = _inverse(corrections, arithmetic)
        right = _beside(v, grown, k)
        start = arithmetic.beside(beta * right, ("beta v", "beta exp(G) k"), widths)
        if arithmetic.product == EXACT:
            both = inverse @ start
        else:
            inverses = arithmetic.stacked(inverse.unsqueeze(-3), ("U = ", "W = "), arithmetic.product_bits(chunk)).expand(
                *products.shape
            )
            both = torch.cat([a @ b for a, b in zip(inverses.unbind(-3), start.split(widths, -1), strict=True)], -1)
        written, erased = arithmetic.beside(both, ("U", "W"), widths).split(widths, -1)
        reads, keeps = dither(pair[..., 1, :, :] * grown, "exp(G) q"), dither(k * ahead, "exp(G_C - G) k")
        whole = end.exp().mT
        if arithmetic.product != EXACT:  # errors of exp itself add up from chunk to chunk if no coarser errors hide them
            whole = dither(whole, "exp(G_C)", FUNCTION_BITS)
        scan = _Scan(keeps, reads, dither(scores, "scores"), erased, whole, behind)
        o, final, states = _scan(scan, written, state, segment.counts, arithmetic)
        of = _OfChunkwise(k, beta, total, grown, ahead, pair, products, decay, solved, inverse, right, start)
        return o, final, (of, scan, states)

    def backward(self, segment: Segment, tape: Any, do: Tensor, dstate: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the cotangents of the tokens, and of the states before the segment."""
        of, scan, states = tape
        scale, arithmetic, channels = self.scale, self.arithmetic, self.channels
        dither, (chunk, depth) = arithmetic.dither, of.k.shape[-2:]
        widths = of.right.shape[-1] - depth, depth
        counts = segment.counts
        written, dscan, dstate = _scan_back(scan, states, do, dstate, counts, arithmetic, widths[0])

        # U = T (beta v), W = T (beta exp(G) k)
        cotangents = arithmetic.beside(torch.cat([written, dscan.erased], -1), ("U'", "W'"), widths)
        uses = [
            arithmetic.terms(cotangent, f"{name} =  da", cotangent.shape[-1]) @ other.mT
            for name, cotangent, other in zip("UW", cotangents.split(widths, -1), of.start.split(widths, -1), strict=True)
        ]
        dinverse = arithmetic.stacked(torch.stack(uses, -3), ("T in U'", "T in W'")).sum(-3)
        if arithmetic.product != EXACT:
            cotangents = arithmetic.beside(cotangents, ("U =  db", "W =  db"), widths, arithmetic.product_bits(chunk))
        dstart = arithmetic.beside(of.inverse.mT @ cotangents, ("beta v'", "beta exp(G) k'"), widths)
        dv, dgrown = (of.beta * dstart).split(widths, -1)

        # A and q k^T, decayed
        dcorrections = _inverse_back(of.solved, of.inverse, dinverse, arithmetic)
        dproducts = torch.stack([dcorrections, dither(dscan.scores, "scores'")], -3)
        dpair, dkeys, dtotal = _scores_back(
            dproducts, of.pair, of.k, of.total, of.products, of.decay, arithmetic, channels=channels
        )
        stored = torch.cat([dpair, dkeys, dscan.reads.unsqueeze(-3), dscan.keeps.unsqueeze(-3)], -3)
        dpair, dkeys, ends = arithmetic.stacked(stored, STORED).split(2, -3)
        sums = [(dpair[..., 0, :, :] * of.k).sum(-1), *((terms.sum(-1)) for terms in (dstart * of.right).split(widths, -1))]
        dbeta = arithmetic.stacked(torch.stack(sums, -2).unsqueeze(-1), DBETA, summed(max(widths))).sum(-3)

        # exp(G) q, exp(G_C - G) k, exp(G) k
        dread, dkeep = ends.unbind(-3)
        once, again = _factors_back(((of.pair[..., 1, :, :], dread), (of.k, dkeep), (of.k, dgrown)), of.total, FACTORS, arithmetic)
        ends = _products((dread, of.grown), (dkeep, of.ahead))
        ends[..., 0, :, :].add_(dpair[..., 1, :, :])
        dq, dkept = arithmetic.stacked(ends, ("scale q'", "k in S'")).unbind(-3)
        dq = scale * dq
        dk = torch.addcmul(torch.addcmul(dkept + dkeys.sum(-3), dgrown, of.grown), of.beta, dpair[..., 0, :, :])

        # exp(G_C - G) passes a gradient to its token's gate, and another one, summed in another order, to the chunk's last gate.
        share = None if channels else arithmetic.choice(of.total)
        passed = of.ahead if share is None else share * of.ahead
        dtotal = torch.addcmul(dtotal, once[..., 0, :, :] + once[..., 2, :, :], of.grown)
        dtotal.addcmul_(once[..., 1, :, :], passed, value=-1)
        end = (again * passed).sum(-2, keepdim=True).addcmul_(dscan.whole.mT, scan.whole.mT)
        if share is not None:
            passed = (1.0 - share) * scan.behind
            dtotal.addcmul_(dscan.behind[0], passed, value=-1)
            end.add_((dscan.behind[1] * passed).sum(-2, keepdim=True))
        dtotal[..., -1:, :].add_(end)
        dg = dither(_later(dither(dtotal, "G'", summed(chunk))), "dg'", summed(chunk))
        return (dq, dk, dv, dg, dbeta), dstate


STORED = ("beta k'", "q in scores'", "k in A'", "k in scores'", "exp(G) q'", "exp(G_C - G) k'")
DBETA = ("dbeta A'", "dbeta U'", "dbeta W'")
FACTORS = ("q exp(G)", "k exp(G_C - G)", "exp(G) k")


def _products(*pairs: tuple[Tensor, Tensor | float]) -> Tensor:
    """Return the products of the pairs, stacked along axis -3; each is computed in place."""
    shapes = (other.shape for _, other in pairs if isinstance(other, Tensor))
    shape = torch.broadcast_shapes(pairs[0][0].shape, *shapes)
    result = pairs[0][0].new_empty(*shape[:-2], len(pairs), *shape[-2:])
    for place, (x, other) in zip(result.unbind(-3), pairs, strict=True):
        torch.mul(x, other, out=place)
    return result


def _beside(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return x and a * b, side by side along the last axis."""
    width, shape = x.shape[-1], torch.broadcast_shapes(x.shape[:-1], a.shape[:-1], b.shape[:-1])
    result = x.new_empty(*shape, width + b.shape[-1])
    result[..., :width] = x
    torch.mul(a, b, out=result[..., width:])
    return result


def _factors_back(
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
    terms = _products(*pairs, *([pairs[second]] if arithmetic.rounds else []))
    if arithmetic.rounds:
        named = *(f"{place} summed" for place in places), f"{places[second]} summed at the end"
        bits = (summed(width),) * len(places) + (summed(chunk * width),)
        terms = arithmetic.stacked(terms, named, bits)
    sums = terms.sum(-1, keepdim=True) if shared else terms
    return sums[..., : len(places), :, :], sums[..., -1 if arithmetic.rounds else second, :, :]


def _scores(pair: Tensor, k: Tensor, total: Tensor, arithmetic: Arithmetic, *, channels: bool) -> tuple[Tensor, Tensor | None]:
    """Return sum_c x_ic k_jc exp(G_ic - G_jc) at and below the diagonal, else 0, for two stacked x; and the factor exp(G_i - G_j).

    The second result is None if channels decay separately. An implementation then decays q and k towards some token between them,
    stores them and multiplies (oracles/decay.py); near the diagonal it may multiply first.
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


def _scores_back(
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


@functools.lru_cache(64)
def _identity(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(tokens, dtype=dtype, device=device)


def _inverse(a: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Return T = (I + A)^-1, and T as stored; only the part of A below the diagonal is used."""
    # A may be stored too, and substitution solves a system that is off by up to n roundings an entry (Higham 2002, theorem 8.5).
    # Blocks of 16 that are merged by products reach that: with the root of n in place of n, dk was once off by 19 sigma.
    # TF32 products, which are also used where half precision stores the result, truncate both operands: an error of one sign,
    # merge after merge.
    a = arithmetic.dither(a, "A", min(arithmetic.stored, arithmetic.inverse, SINGLE - math.ceil(math.log2(a.shape[-1]))))
    solved = torch.linalg.solve_triangular(a, _identity(a.shape[-1], a.dtype, a.device), upper=False, unitriangular=True)
    return solved, arithmetic.dither(solved, "T")


def _inverse_back(solved: Tensor, inverse: Tensor, cotangent: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return the cotangent of A: -T^T dT T^T below the diagonal, with dT the cotangent of T.

    An implementation may use T as stored, with the errors from computing it, or solve again. It may begin with either product, and
    one of them may be far larger than the other. Some runs use the stored T and begin with the second product; the others solve
    again and begin with the first.
    """
    stored = min(arithmetic.stored, arithmetic.product_bits(solved.shape[-1]))
    again = arithmetic.choice(solved)
    left, right = (
        torch.lerp(
            inverse.unsqueeze(-3), arithmetic.stacked(solved.unsqueeze(-3), ("T^T dT", "dT T^T"), stored), again.unsqueeze(-3)
        )
        .mT.expand(*solved.shape[:-2], 2, *solved.shape[-2:])
        .unbind(-3)
    )
    dinverse = arithmetic.dither(cotangent.tril(), "dT", stored)
    first = arithmetic.dither(left @ dinverse, "(T^T dT)", stored) @ right
    second = left @ arithmetic.dither(dinverse @ right, "(dT T^T)", stored)
    either = torch.lerp(second, first, again)
    return arithmetic.dither(either.tril_(-1).neg_(), "dA", stored)


def _scan(scan: _Scan, written: Tensor, state: Tensor, counts: list[int], arithmetic: Arithmetic) -> tuple[Tensor, Tensor, _States]:
    """Compute the states from chunk to chunk; return o, the states after, and what `_scan_back` needs.

        S stored, V' = U - W S, V' and decayed V' stored       S <- exp(G_C) S + keeps^T V'       o = reads S + scores V'

    Decayed V' is V' if only k can decay (`behind` is None). Only S, and in the backward its cotangent, goes from chunk to chunk, in
    steps of `counts` sequences. Everything else is computed for all chunks at once.
    """
    keeps, behind = scan.keeps, scan.behind
    dither, rough, chunk, depth = arithmetic.dither, arithmetic.rough, _summed_tokens(keeps, arithmetic), keeps.shape[-1]
    terms = arithmetic.terms
    erases, writes = terms(scan.erased, "W S", depth).split(counts), terms(keeps.mT, "k V'", chunk).split(counts)
    # A number that goes to another grid is not first divided by its own grid: one product instead of three.
    grid, back = arithmetic.grid(written, "V'")
    apart = back
    onwards: Sequence[Any] = [None] * len(counts)
    if behind is not None:
        then, apart = arithmetic.grid(written, "exp(G_C - G) V'")
        onwards = _onward(back, behind, then).split(counts)
    every, ended = [], []
    for news, erase, write, onward, all_of in zip(
        written.split(counts), erases, writes, onwards, scan.whole.split(counts), strict=True
    ):
        ended.append(state[len(news) :])
        state = state[: len(news)]
        memory = dither(state, "S")
        fresh = rough(news - erase @ memory, grid)
        decayed = (fresh if onward is None else rough(fresh, onward)) * apart
        every.append((state, memory, fresh, decayed))
        state = dither(torch.addcmul(write @ decayed, all_of, state), "S'", SINGLE)
    before, memory, fresh, decayed = (_joined(column) for column in zip(*every, strict=True))
    fresh = decayed if behind is None else fresh * back
    o = terms(scan.reads, "q S", depth) @ memory + terms(scan.scores, "scores V'", chunk) @ fresh
    return o, _joined([state, *(part for part in reversed(ended) if len(part))]), _States(before, memory, fresh, decayed)


def _correction_states(scan: _Scan, missed: Tensor, counts: list[int]) -> Tensor:
    """Return D before each chunk: D <- exp(G_C) D + keeps^T missed, zero at first."""
    drifts, drift = list[Tensor](), None
    for new, all_of in zip((scan.keeps.mT @ missed).split(counts), scan.whole.split(counts), strict=True):
        drift = torch.zeros_like(new) if drift is None else drift[: len(new)]
        drifts.append(drift)
        drift = torch.addcmul(new, all_of, drift)
    return _joined(drifts)


def _onward(back: Tensor, behind: Tensor, grid: Tensor) -> Tensor:
    """Return the factor that takes numbers on one grid, not yet divided by it, to their decayed values on another grid."""
    return back * grid * behind


def _scan_back(
    scan: _Scan,
    states: _States,
    do: Tensor,
    ds: Tensor,
    counts: list[int],
    arithmetic: Arithmetic,
    width: int,
) -> tuple[Tensor, _Scan, Tensor]:
    """Return the cotangents of what was written, of `scan`, and of the states before, from those of o and of the states after.

    Sums over the values' channels have `width` terms. The cotangent of every use is stored separately before they are added. A
    kernel computes the gradient of exp(G_C), sum(S dS), from S and dS as it stored them.
    """
    keeps, behind = scan.keeps, scan.behind
    dither, rough, terms = arithmetic.dither, arithmetic.rough, arithmetic.terms
    chunk, depth = _summed_tokens(keeps, arithmetic), keeps.shape[-1]
    read = dither(scan.reads.mT @ terms(do, "q S db", chunk), "S in o'")
    scored = dither(scan.scores.mT @ terms(do, "scores V' db", chunk), "V' in o'")
    grid, back = then, apart = arithmetic.grid(scored, "V' in S'")
    onwards: Sequence[Any] = [None] * len(counts)
    if behind is not None:
        grid, back = arithmetic.grid(scored, "exp(G_C - G) V''")
        onwards = _onward(back, behind, then).split(counts)
    into, out_of = arithmetic.grid(read, "S in V''")
    every = []
    dfinal, ds = ds, ds[:0]
    steps = *(x.split(counts) for x in (keeps, scan.erased, scan.whole, read, scored)), onwards
    for keep, erase, all_of, read_of, scored_of, onward in reversed(list(zip(*steps, strict=True))):
        ds = _joined([part for part in (ds, dfinal[len(ds) : len(keep)]) if len(part)])
        ds = dither(ds, "S''", SINGLE)
        dgiven = rough(keep @ terms(ds, "k V' db", depth), grid)
        dkept = dgiven if onward is None else rough(dgiven, onward)
        dfresh = dither(torch.addcmul(scored_of, dkept, apart), "V''")
        dheld = rough(erase.mT @ terms(dfresh, "W S db", chunk), into)
        every.append((ds, dgiven, dfresh))
        ds = torch.addcmul(dither(torch.addcmul(read_of, dheld, out_of, value=-1), "S'"), all_of, ds)
    after, dgiven, dfresh = (_joined(column[::-1]) for column in zip(*every, strict=True))
    dkeeps = states.addend @ terms(after, "k V' da", width).mT
    dreads, dscores = (terms(do, f"{place} da", width) @ x.mT for place, x in (("q S", states.stored), ("scores V'", states.fresh)))
    derased = torch.neg(terms(dfresh, "W S da", width) @ states.stored.mT)
    dwhole = dither(states.before, "S stored", arithmetic.memory) * dither(after, "dS stored", arithmetic.memory)
    dwhole = dwhole.sum_to_size(scan.whole.shape)
    dbehind = None
    if behind is not None:
        dgiven = dgiven * back
        parts = _factors_back(((states.fresh, dgiven),), behind, ("V' exp(G_C - G)",), arithmetic)
        dbehind = parts[0].squeeze(-3), parts[1]
    return dfresh, _Scan(dkeeps, dreads, dscores, derased, dwhole, dbehind), ds


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _summed_tokens(x: Tensor, arithmetic: Arithmetic) -> int:
    """Return how many tokens an implementation sums at once; a recurrence carries them in its state, which drifts instead."""
    return 1 if arithmetic.algorithm == "recurrent" else x.shape[-2]


def _gathered(x: Tensor, total: Tensor) -> Tensor:
    """Return x summed over the channels that share a gate."""
    return x.sum(-1, keepdim=True) if total.shape[-1] < x.shape[-1] else x


def _later(x: Tensor) -> Tensor:
    """Return, for each token, the sum over it and the tokens after it in its chunk."""
    return x.flip(-2).cumsum(-2).flip(-2)


@dataclasses.dataclass(frozen=True)
class _Recurrent:
    """The recurrence in chunks: keys and queries [chunk, runs, HV, halves, C, K]; values' channels are in one or two halves."""

    scale: float
    arithmetic: Arithmetic
    linear: bool = False

    def most(self, size: int, k: Tensor, v: Tensor) -> int:
        """Return as many chunks as memory allows."""
        return _most(size, k, v, self.dtype(k))

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of x."""
        return x.dtype

    def forward(self, segment: Segment, tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return o, the states after the segment, and what the backward needs."""
        (q, k, v, g, beta), scale, arithmetic = tokens, self.scale, self.arithmetic
        (chunk, depth), channels = k.shape[-2:], g.shape[-1] > 1
        # Queries that read, keys that recall, and keys that are written.
        x = torch.stack([scale * q, k, k], -3)
        x = _apart(_rounded(x, ("read", "recalled", "written"), arithmetic), x, arithmetic)
        g = g if self.linear else arithmetic.dither(g, "g", SINGLE)
        drift, order, back = q.new_ones(1, 1), None, None
        if arithmetic.rounds:
            make = _drifts if arithmetic.runs * chunk * depth <= _KEPT else _drifts.__wrapped__
            slips, lost, order, back = make(arithmetic, chunk, depth, g.shape[-1], v.shape[-1], v.device)
            if (inside := segment.inside(g.ndim)) is not None:
                slips, lost = slips * inside, lost * inside.unsqueeze(-3)
            g, drift = g if self.linear else g + slips, lost.cumsum(-2).exp()
        v, state = (_halves(tensor, order) for tensor in (v, state))
        g, beta = g.unsqueeze(-3), beta.unsqueeze(-3)
        reads, recalls, writes = x.unbind(-3)
        writes, drifted = writes / drift, drift[..., -1:, :]
        pair, total = _products((recalls, drift), (reads, drift)), g.cumsum(-2)
        grown, last = total.exp(), total[..., -1:, :]
        left, whole = (last - total).exp() * drifted, grown[..., -1:, :] * drifted
        products, decay = _scores(pair, writes, total, PLAIN, channels=channels)
        right = _beside(v, grown, pair[..., 0, :, :])
        corrections = beta * products[..., 0, :, :]
        inverses = inverted(corrections)
        solved = substituted(corrections, inverses, beta * right)
        written, erased = solved.split((v.shape[-1], depth), -1)
        scan = _Scan(left * writes, grown * pair[..., 1, :, :], products[..., 1, :, :], erased, whole.mT, None)
        o, final, states = _scan(scan, written, state, segment.counts, arithmetic)
        missed = None
        if arithmetic.summed_again < EXACT:
            before, memory, fresh, _ = states
            stored = arithmetic.dither(fresh, "corrected values", arithmetic.summed_again)
            missed = stored - fresh
            states = _States(before, memory + _correction_states(scan, missed, segment.counts), stored, stored)
        of = _OfRecurrent(
            beta, writes, total, grown, left, pair, products, decay, right, solved, inverses, drift, order, back, missed
        )
        return _whole(o, back), _whole(final, back), (of, scan, states)

    def backward(self, segment: Segment, tape: Any, do: Tensor, dstate: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the cotangents of the tokens, and of the states before the segment."""
        of, scan, states = tape
        scale, arithmetic, channels = self.scale, self.arithmetic, of.total.shape[-1] > 1
        depth = of.writes.shape[-1]
        width = of.right.shape[-1] - depth
        half = width if of.back is not None else (width + 1) // 2  # terms of sums that are rounded, with halves and without
        do, dstate = (_halves(tensor, of.order) for tensor in (do, dstate))
        values = of.right[..., :width]
        if arithmetic.rounds:  # values beside corrected values, so that dS v comes with the gradient of the keys that write
            before, memory, fresh, _ = states
            beside = torch.cat([fresh, values], -2)
            states = _States(before, memory, beside, beside)
        written, dscan, dstate = _scan_back(scan, states, do, dstate, segment.counts, arithmetic, half)
        dkeeps, dscores = dscan.keeps, dscan.scores

        corrections = of.beta * of.products[..., 0, :, :]
        dstart = substituted(corrections, of.inverses, torch.cat([written, dscan.erased], -1), transposed=True)
        dcorrections = dstart @ of.solved.mT
        if of.missed is not None:
            dcorrections.add_(dstart[..., :width] @ of.missed.mT)
        dcorrections = dcorrections.neg_().tril_(-1)
        terms = of.right * dstart
        terms = arithmetic.beside(terms, ("beta v summed", "beta k summed"), (width, depth), (summed(half), summed(depth)))
        dbeta = (dcorrections * of.products[..., 0, :, :]).sum(-1, keepdim=True) + terms.sum(-1, keepdim=True)
        dv, dgrown = (of.beta * dstart).split((width, depth), -1)
        apart = None
        if arithmetic.rounds:
            (dkeeps, of_states), (dscores, of_scores) = dkeeps.chunk(2, -2), dscores.chunk(2, -1)
            of_products = torch.stack([(dv @ values.mT).neg_().tril_(-1), of_scores], -3)
            of_keys = torch.addcmul(
                _written(of_products, of.pair, of.writes, of.total, of.products, of.decay), of_states, of.left
            )  # dS v
            apart = arithmetic.dither(of_keys, "dS v", summed(2 * half)).sub_(of_keys)
            terms = arithmetic.dither(of.writes * (of_keys + apart), "k dS v summed", summed(depth))
            dbeta = dbeta + terms.addcmul_(of.writes, of_keys, value=-1).sum(-1, keepdim=True)
        dproducts = torch.stack([of.beta * dcorrections, dscores], -3)
        dpair, dwrites, dtotal = _scores_back(
            dproducts, of.pair, of.writes, of.total, of.products, of.decay, PLAIN, channels=channels
        )
        for cotangent, reached in zip(dpair.unbind(-3), (dgrown, dscan.reads), strict=True):
            cotangent.addcmul_(reached, of.grown)
        dwrites = dwrites.sum(-3) + dkeeps * of.left

        keep_terms, all_of = dkeeps * scan.keeps, (dscan.whole * scan.whole).mT
        # Terms of k.dk cancel in dG. A run in chunks knows the rest only up to a float64 rounding, and so does the truth if
        # channels decay separately. The recurrence never forms these sums, so its gradients of gates may be smaller and right.
        known = of.writes * dwrites
        parts = dgrown * of.right[..., width:] + dscan.reads * scan.reads - keep_terms
        if arithmetic.rounds:
            parts = parts + (arithmetic.dither(known, "k.dk", FLOAT64) - known)
        dtotal = dtotal + _gathered(parts, of.total)
        dtotal[..., -1:, :].add_(_gathered(keep_terms.sum(-2, keepdim=True), of.total) + _gathered(all_of, of.total))
        dg = arithmetic.dither(_later(dtotal.sum(-3)), "g'", SINGLE)
        if apart is not None:  # after dG, which has no such errors: the recurrence never forms the k.dk that dG uses here
            dwrites = torch.addcmul(dwrites, of.beta, apart)
        dx = torch.stack([dpair[..., 1, :, :] * of.drift, dpair[..., 0, :, :] * of.drift, dwrites / of.drift], -3)
        dx = _apart_back(dx, arithmetic)
        dq, dk = scale * dx[..., 0, :, :], dx[..., 1:, :, :].sum(-3)
        return (dq, dk, _whole(dv, of.back), dg, dbeta.sum(-3)), _whole(dstate, of.back)


def _written(cotangents: Tensor, pair: Tensor, writes: Tensor, total: Tensor, products: Tensor, decay: Tensor | None) -> Tensor:
    """Return the gradient of keys from `_scores_back` without rounding, for both x together."""
    if decay is None:
        return _scores_back(cotangents, pair, writes, total, products, decay, PLAIN, channels=True)[1].sum(-3)
    return ((cotangents * decay.unsqueeze(-3)).mT @ pair).sum(-3)


def _rounded(x: Tensor, places: tuple[str, str, str], arithmetic: Arithmetic) -> Tensor:
    """Round queries and keys that recall, which give sums over the channels, and keys that are written, each in its own place."""
    sums = summed(x.shape[-1])
    return arithmetic.stacked(x, places, (sums, sums, SINGLE))


def _apart(rounded: Tensor, x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return x as rounded for each half of the values' channels; in some runs the errors of the second half have opposite sign."""
    if not _parts(arithmetic):
        return rounded.unsqueeze(-4)
    return torch.stack([rounded, torch.addcmul(x, 2.0 * arithmetic.choice(x) - 1.0, rounded - x)], -4)


def _apart_back(dx: Tensor, arithmetic: Arithmetic) -> Tensor:
    places = ("read'", "recalled'", "written'")
    if not _parts(arithmetic):
        return _rounded(dx.squeeze(-4), places, arithmetic)
    one, other = dx.unbind(-4)
    sign = 2.0 * arithmetic.choice(one) - 1.0
    rounded = _rounded(torch.addcmul(one, sign, other), places, arithmetic)
    return torch.addcmul(rounded, 1.0 - sign, other)


def _parts(arithmetic: Arithmetic) -> bool:
    """Whether values' channels are in halves; a single odd run, whose grids have one s for all channels, may do without."""
    return arithmetic.rounds and not (arithmetic.uniform and all(arithmetic.ways))


def _halves(x: Tensor, order: Tensor | None) -> Tensor:
    """Return the two halves of the last axis [..., rows, V], in some order, as [..., 2, rows, V / 2].

    If V is odd, a zero is added at the end.
    """
    x = x.unsqueeze(-3)
    if order is None:
        return x
    x = torch.nn.functional.pad(x, (0, 1)) if x.shape[-1] % 2 else x
    shape = *x.shape[:-3], 2, x.shape[-2]
    return x.expand(*shape, -1).gather(-1, order.expand(*shape, -1))


def _whole(x: Tensor, back: Tensor | None) -> Tensor:
    """Undo `_halves`."""
    if back is None:
        return x.squeeze(-3)
    x = torch.cat(x.unbind(-3), -1)
    return x.gather(-1, back.expand(*x.shape[:-1], -1))


@functools.lru_cache(8)
def _drifts(
    arithmetic: Arithmetic, chunk: int, depth: int, gates: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return what all chunks share: errors of the decay, drifts of the state, and the orders of the values' channels.

    The errors of what decays are [1, runs, 1, C, gates], and e of each half is [1, runs, 1, 2, C, K]. If there are halves, each run
    has an order of the values' channels [1, runs, 1, 2, 1, V / 2] and its inverse [1, runs, 1, 1, V]; otherwise these are None.
    """

    def like(*shape: int) -> Tensor:
        return torch.ones(1, arithmetic.runs, *shape, dtype=torch.float64, device=device)

    slips = arithmetic.dither(like(1, chunk, gates), "decay", SINGLE) - 1.0
    once = arithmetic.drift(like(1, 1, chunk, depth), "decayed") + arithmetic.drift(like(1, 1, chunk, depth), "state")
    lost = _apart(once, 0.0 * once, arithmetic).squeeze(-3)
    if not _parts(arithmetic):
        return slips, lost, None, None
    order = arithmetic.drift(like(1, 1, width), "halves").argsort(-1)
    back, last = order.argsort(-1), order.new_full((1, arithmetic.runs, 1, 1, width % 2), width)
    return slips, lost, torch.cat([order, last], -1).unflatten(-1, (2, -1)).movedim(-2, -3), back
