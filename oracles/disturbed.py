"""The delta rules in the arithmetic of the two classes of algorithm that kernels use, many runs at once.

`recurrent` and `chunkwise` round where such algorithms round (oracles/rounding.py), forward and in a backward of their own; without
rounding, tests/test_oracles.py proves both equal to the definition. tests/test_rounding.py proves of `recurrent` that its runs
spread as those of the definition do that rounds every element at every step, which takes as many steps as there are tokens.

What rounds alike is rounded at once, at two places or three: at the sizes of a case, time is the number of calls. Such tensors are
stacked along axis -3, or lie side by side along the last.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oracles.chunkwise import inverted, substituted
from oracles.decay import decays, halves, sizes, squares
from oracles.rounding import EXACT, FUNCTION_BITS, SINGLE, Arithmetic, summed
from oracles.segments import Form, Segment, rule

STEPS = 64  # tokens of the recurrence computed at once
SHORTEST = 16  # tokens of the shortest chunk, as of implementations' matrix units
_GRAPH = {"cpu": 2**29, "cuda": 2**30}  # numbers of a segment: what has more is computed again backward instead of kept
FLOAT64 = EXACT - 5  # bits of a float64 sum over a chunk
_KEPT = 2**20  # numbers of all runs: what calls of a shape share is kept up to that
NARROW = torch.float32  # for chunkwise runs of half precision
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
) -> tuple[Tensor, Tensor]:
    """The definition, for many runs: o [runs, T, HV, V] and final states [runs, N, HV, K, V] of sequences that follow each other.

    q, k [runs, T, HV, K], v [runs, T, HV, V], g [runs, T, HV, 1 or K], beta [runs, T, HV, 1], state [runs, N, HV, K, V].

    Recurrent and decode kernels keep float32 throughout: the decay, the state after its decay and after its update, what is
    written to it, and the two sums over K round, every step. Where tokens repeat, the same errors are written again and again.

    A run so disturbed is nearly the definition on other numbers: a key that recalls, one that is written, a query, and for the
    fractions e_t that channel k of a state loses or gains at each step, the decay exp(g + e). So it is computed in chunks: with
    E = cumsum(e), tiny, exp(G_i - G_j + E_i - E_j) goes into the operands, exp(E) k and exp(-E) k.

    Such errors are those of a whole row of the state, shared by the values' channels, and might cancel in sums over them where an
    implementation's do not. Values' channels never meet in a state: in every other pair of runs, half of them, others in each, are
    computed with errors of other sign.

    A backward that sums its states again from stored corrected values (`summed_again`) never corrects what these err by: its
    states S + D drift from those of forward, where D decays like S and takes up each value's error with its key. In calls so
    large that they have several segments, D begins anew in each.
    """
    form = _Recurrent(scale, dataclasses.replace(arithmetic, axis=1))
    return _rule(form, (q, k, v, g, beta), state, lengths, [_short(length, STEPS) for length in lengths])


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
    """The chunkwise form, for many runs; shapes as `recurrent`. Sequences shorter than a chunk have one of fewer tokens.

    `channels` says that an implementation decays each channel of the key on its own, be there only one.
    Padding tokens have k = v = g = beta = 0: they decay nothing and write nothing, so the final state is the right one.
    """
    channels = channels or g.shape[-1] > 1
    sizes = [_short(length, chunk) for length in lengths]
    if channels:  # products that decay by channel are taken in halves of halves
        sizes = [1 << (size - 1).bit_length() for size in sizes]
    form = _Chunkwise(scale, dataclasses.replace(arithmetic, axis=1), channels)
    return _rule(form, (q, k, v, g, beta), state, lengths, sizes)


def _short(length: int, chunk: int) -> int:
    """The tokens in the chunks of a sequence: no more than a power of two that has them all, so that little is padded."""
    return min(chunk, max(SHORTEST, 1 << max(length - 1, 0).bit_length()))


def _rule(
    form: Form, tokens: tuple[Tensor, ...], state: Tensor, lengths: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The rule of tokens and states that have the runs first: for the form they come after chunks and sequences."""
    first = tuple(x.transpose(0, 1) for x in (*tokens, state))
    o, final = rule(form, first[:-1], first[-1], tuple(lengths), tuple(sizes))
    return o.transpose(0, 1), final.transpose(0, 1)


def _most(size: int, k: Tensor, v: Tensor) -> int:
    """The chunks of a segment: those whose graphs have _GRAPH numbers, of which a token has about 60 a channel at its peak.

    Measured at widths 64 and 128: 51 to 67 in either class, and up to a fifth more since operands lie side by side.
    """
    return max(1, _GRAPH.get(k.device.type, _GRAPH["cuda"]) // (60 * size * math.prod(v.shape[1:-1]) * (k.shape[-1] + v.shape[-1])))


@dataclasses.dataclass(frozen=True)
class _Chunkwise:
    """The chunkwise form of q, k, v, g, beta [chunk, runs, HV, C, width]. Every use of an operand stores its own cotangent."""

    scale: float
    arithmetic: Arithmetic
    channels: bool

    def most(self, size: int, k: Tensor, v: Tensor) -> int:
        """As many chunks as there is room for."""
        return _most(size, k, v)

    def dtype(self, x: Tensor) -> torch.dtype:
        """NARROW where operands are coarser: an implementation computes all else in it, and its own roundings are such too."""
        return NARROW if self.arithmetic.first and self.arithmetic.product == EXACT else x.dtype

    def forward(self, segment: Segment, tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor, Any]:
        """o, the states after the segment, and what backward needs."""
        (q, k, v, g, beta), scale, arithmetic, channels = tokens, self.scale, self.arithmetic, self.channels
        dither, chunk, widths = arithmetic.dither, k.shape[-2], (v.shape[-1], k.shape[-1])
        total = dither(g.cumsum(-2), "G", summed(chunk))  # the cumulative gate is a float32 sum
        grown, left = total.exp(), total[..., -1:, :] - total
        # An implementation decays k or V' before it stores them for the state: some runs do one, some the other. Only k can have a
        # decay of each channel.
        after = left.unsqueeze(-3)
        after = (after if channels else arithmetic.choices(after) * after).exp()
        ahead, *behind = after.unbind(-3)

        # The scaled query is stored, where an implementation scales q and not what it reads.
        pair = k.new_empty(*k.shape[:-2], 2, *k.shape[-2:])
        torch.mul(beta, k, out=pair[..., 0, :, :])
        torch.mul(q, scale, out=pair[..., 1, :, :])
        pair = arithmetic.stacked(pair, ("beta k", "scale q"))
        products, decay = _scores(pair, k, total, arithmetic, channels=channels)
        corrections, scores = products.unbind(-3)
        solved, inverse = _inverse(corrections, arithmetic)
        right = torch.cat([v, grown * k], -1)
        start = arithmetic.beside(beta * right, ("beta v", "beta exp(G) k"), widths)
        if arithmetic.product == EXACT:
            both = [inverse @ start]
        else:
            each = arithmetic.stacked(inverse.unsqueeze(-3), ("U = ", "W = "), arithmetic.kept(chunk)).expand(*products.shape)
            both = [a @ b for a, b in zip(each.unbind(-3), start.split(widths, -1), strict=True)]
        given = torch.cat([*both, k * ahead, pair[..., 1, :, :] * grown, scores], -1)
        named = "U", "W", "exp(G_C - G) k", "exp(G) q", "scores"
        given = arithmetic.beside(given, named, (*widths, k.shape[-1], k.shape[-1], chunk))
        whole = grown[..., -1:, :].mT
        if arithmetic.product != EXACT:  # the function's own errors add up from chunk to chunk where nothing coarser drowns them
            whole = dither(whole, "exp(G_C)", FUNCTION_BITS)
        scan = given[..., widths[0] :], whole, behind[0] if behind else None
        o, final, states = _scan(scan, given[..., : widths[0]], state, segment.counts, arithmetic)
        local = k, beta, total, grown, after, pair, products, decay, solved, inverse, right, start
        return o, final, (local, scan, states)

    def backward(self, segment: Segment, made: Any, do: Tensor, dstate: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """The cotangents of the tokens, and of the states before the segment."""
        (k, beta, total, grown, after, pair, products, decay, solved, inverse, right, start), scan, states = made
        scale, arithmetic, channels = self.scale, self.arithmetic, self.channels
        dither, (chunk, depth) = arithmetic.dither, k.shape[-2:]
        widths = right.shape[-1] - depth, depth
        counts = segment.counts
        written, dscan, dstate = _scan_back(scan, states, do, dstate, counts, arithmetic)
        dkeeps, dreads, dscores, spared, dwhole, decayed = dscan

        # U = T (beta v), W = T (beta exp(G) k); from here on what comes by W has the other sign
        given = terms = arithmetic.beside(torch.cat([written, spared], -1), ("U'", "W'"), widths)
        if arithmetic.product != EXACT:
            bits = *(arithmetic.kept(width) for width in widths), *(arithmetic.kept(chunk),) * 2
            both = arithmetic.beside(torch.cat([given, given], -1), USED, widths * 2, bits)
            terms, given = both.split(sum(widths), -1)
        uses = torch.stack([a @ b.mT for a, b in zip(terms.split(widths, -1), start.split(widths, -1), strict=True)], -3)
        by_u, by_w = arithmetic.stacked(uses, ("T in U'", "T in W'")).unbind(-3)
        dstart = arithmetic.beside(inverse.mT @ given, ("beta v'", "beta exp(G) k'"), widths)
        dv, shrunk = (beta * dstart).split(widths, -1)

        # A and q k^T, decayed
        dcorrections, held = _inverse_back(solved, inverse, by_w - by_u, arithmetic)
        dproducts = arithmetic.stacked(torch.stack([dcorrections, dscores], -3), ("dA", "scores'"), (held, arithmetic.stored))
        dpair, dkeys, dtotal = _scores_back(dproducts, pair, k, total, products, decay, arithmetic, channels=channels)
        stored = torch.cat([dpair, dkeys, dreads.unsqueeze(-3), dkeeps.unsqueeze(-3)], -3)
        dpair, dkeys, ends = arithmetic.stacked(stored, STORED).split(2, -3)
        terms = k.new_empty(*k.shape[:-1], depth + sum(widths))
        torch.mul(dpair[..., 0, :, :], k, out=terms[..., :depth])
        torch.mul(dstart, right, out=terms[..., depth:])
        sums = terms @ _columns((depth, *widths), (1.0, 1.0, -1.0), k.dtype, k.device)
        dbeta = arithmetic.beside(sums, DBETA, (1, 1, 1), summed(max(widths))).sum(-1, keepdim=True)

        # exp(G) q, exp(G) k, exp(G_C - G) k
        factors = pair[..., 1, :, :], k, k, k
        of_factors = ends[..., 0, :, :], shrunk, ends[..., 1, :, :], ends[..., 1, :, :]
        uses = torch.empty_like(dpair)
        torch.addcmul(dpair[..., 1, :, :], ends[..., 0, :, :], grown, out=uses[..., 0, :, :])
        torch.mul(ends[..., 1, :, :], after[..., 0, :, :], out=uses[..., 1, :, :])
        dq, dkept = arithmetic.stacked(uses, ("scale q'", "k in S'")).unbind(-3)
        dq = scale * dq
        dk = (dkeys.sum(-3) + dkept).addcmul_(shrunk, grown, value=-1).addcmul_(beta, dpair[..., 0, :, :])

        # exp(G_C - G) passes a gradient to its token's gate and another, summed otherwise, to the chunk's last.
        once, passing = _factors_back(torch.stack(factors, -3), torch.stack(of_factors, -3), decayed, arithmetic, channels=channels)
        passed = after if channels else arithmetic.choices(after) * after
        off, end = (passing * passed.unsqueeze(-3)).sum(-4).unbind(-3)
        dtotal = torch.addcmul(dtotal, once[..., 0, :, :] - once[..., 1, :, :], grown).sub_(off)
        dtotal[..., -1:, :].add_(end.sum(-2, keepdim=True).addcmul_(dwhole.mT, scan[1].mT))
        dg = dither(_later(dither(dtotal, "G'", summed(chunk))), "dg'", summed(chunk))
        return (dq, dk, dv, dg, dbeta), dstate


USED = ("U =  da", "W =  da", "U =  db", "W =  db")
STORED = ("beta k'", "q in scores'", "k in A'", "k in scores'", "exp(G) q'", "exp(G_C - G) k'")
DBETA = ("dbeta A'", "dbeta U'", "dbeta W'")
FACTORS = ("q exp(G) summed", "exp(G) k summed", "k exp(G_C - G) summed", "k exp(G_C - G) summed at the end")
BEHIND = ("V' exp(G_C - G) summed", "V' exp(G_C - G) summed at the end")


def _factors_back(
    x: Tensor, cotangents: Tensor, decayed: tuple[Tensor, Tensor] | None, arithmetic: Arithmetic, *, channels: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the factors of x [..., 4, C, K] (FACTORS) and of V', given with its cotangent in `decayed`, if it has one.

    Those of exp(G), [..., 2, C, width], and those of exp(G_C - G), of k and perhaps V', each to add to its token's gate and to sum
    over the chunk, [..., 1 or 2, 2, C, width]; a number a token, or one a token and channel.

    The gradients are sums of x dy, over a token's channels for the one, and over all tokens of the chunk for the other; their
    terms may cancel, and in sums of another order round otherwise: so the terms' roundings are added, not the sums'.
    """
    chunk, depth = x.shape[-2:]
    if channels:
        terms = arithmetic.stacked(x * cotangents, FACTORS, (summed(1),) * 3 + (summed(chunk),))
        return terms[..., :2, :, :], terms[..., 2:, :, :].unsqueeze(-4)
    assert decayed is not None
    values, of_values = decayed
    widths = (depth,) * 4 + (values.shape[-1],) * 2
    terms = x.new_empty(*x.shape[:-3], chunk, sum(widths))
    torch.mul(x, cotangents, out=_columns_of(terms[..., : 4 * depth], 4))
    twice = values.unsqueeze(-3).expand(*values.shape[:-2], 2, *values.shape[-2:])
    torch.mul(twice, of_values.unsqueeze(-3), out=_columns_of(terms[..., 4 * depth :], 2))
    bits = tuple(summed(width * (chunk if place % 2 and place > 1 else 1)) for place, width in enumerate(widths))
    sums = arithmetic.beside(terms, FACTORS + BEHIND, widths, bits) @ _columns(widths, (1.0,) * 6, x.dtype, x.device)
    sums = sums.mT.unsqueeze(-1)
    return sums[..., :2, :, :], sums[..., 2:, :, :].unflatten(-3, (2, 2))


def _columns_of(x: Tensor, count: int) -> Tensor:
    """A view of tensors [..., C, width] that lie side by side, stacked along axis -3."""
    columns: Tensor = x.unflatten(-1, (count, -1)).movedim(-2, -3)
    return columns


def _scores(pair: Tensor, k: Tensor, total: Tensor, arithmetic: Arithmetic, *, channels: bool) -> tuple[Tensor, Tensor | None]:
    """sum_c x_ic k_jc exp(G_ic - G_jc) at and below the diagonal, else 0, of two stacked x; and exp(G_i - G_j), if a factor.

    Where channels decay on their own, an implementation decays q and k towards some token between them, stores them and multiplies
    (oracles/decay.py); near the diagonal it may multiply first.
    """
    x = arithmetic.stacked(pair, PRODUCTS, arithmetic.kept(k.shape[-1]))
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
    """The cotangents of both x, of k for each, and of G for both together.

    With D the product of scores and cotangents, dG_i = sum_j D_ij - sum_j D_ji, to which the diagonal adds nothing. Kernels take
    it as x_i.dx_i - k_i.dk_i, whose terms are as large as ever where decays are strong and D small: their rounding is added, and
    that of the products dx and dk come from, which differ.
    """
    chunk, depth = k.shape[-2:]
    bits, keys = arithmetic.kept(chunk), k.unsqueeze(-3)
    if decay is not None:
        off = cotangents * products  # nothing above the diagonal
        if arithmetic.step:  # stored once decayed, as it may be, a subnormal step is not decayed with it
            ds = cotangents * decay.unsqueeze(-3)
            stored = arithmetic.stacked(ds, _named("decayed"))
            off.addcmul_(stored - ds, (pair.flatten(-3, -2) @ k.mT).unflatten(-2, (2, -1)))
            each = stored.unsqueeze(-4).expand(*stored.shape[:-3], 2, *stored.shape[-3:])
        else:
            each = cotangents.unsqueeze(-4) * decay.unsqueeze(-3).unsqueeze(-4).expand(*decay.shape[:-2], 2, 1, chunk, chunk)
        each = arithmetic.stacked(each.flatten(-4, -3), _named("dx") + _named("dk"), bits)
        of_x, of_k = each.split(2, -3)
        dx = (of_x.flatten(-3, -2) @ k).unflatten(-2, (2, -1))
        dk = of_k.mT @ pair
        dtotal = (off - off.mT).sum((-3, -1)).unsqueeze(-1)  # what is on the diagonal cancels
    else:
        dp, total = arithmetic.stacked(cotangents, _named("dP")), total.unsqueeze(-3)
        diagonal = dp.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dx, dk, dtotal = diagonal * keys, diagonal * pair, torch.zeros_like(pair)
        for size in sizes(chunk):
            (_, high), (low, _), (dlow, dhigh) = halves(pair, size), halves(keys, size), halves(dtotal, size)
            later, earlier = decays(total, size)
            block = squares(dp, size)
            near, far = (
                arithmetic.stacked(each, _named(f"{name} {size}"), bits, -4) for name, each in (("dx", block), ("dk", block.mT))
            )
            of_high = (near @ arithmetic.stacked(low * earlier, _named(f"earlier {size} dx"), axis=-4)) * later
            of_low = (far @ arithmetic.stacked(high * later, _named(f"later {size} dk"), axis=-4)) * earlier
            halves(dx, size)[1].add_(of_high)
            halves(dk, size)[0].add_(of_low)
            dhigh.add_(high * of_high)
            dlow.sub_(low * of_low)
        dtotal = dtotal.sum(-3)
    if arithmetic.rounds:
        shared = total.shape[-1] == 1 and not channels
        terms = pair.new_empty(*pair.shape[:-3], 4, chunk, depth)
        torch.mul(pair, dx, out=terms[..., :2, :, :])
        torch.mul(keys, dk, out=terms[..., 2:, :, :])
        depth = chunk * depth if shared else chunk
        off = arithmetic.off(terms, _named("x.dx") + _named("k.dk"), arithmetic.kept(depth))
        off = off.unflatten(-3, (2, 2)).sum((-3, -1) if shared else -3, keepdim=True).squeeze(-3)
        dtotal = dtotal - off[..., 0, :, :] + off[..., 1, :, :]
    return dx, dk, dtotal


PRODUCTS = ("A", "q k")


def _named(name: str) -> tuple[str, ...]:
    return tuple(f"{place} {name}" for place in PRODUCTS)


@functools.lru_cache(64)
def _upper(tokens: int, device: torch.device) -> Tensor:
    """True above the diagonal."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


@functools.lru_cache(64)
def _identity(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(tokens, dtype=dtype, device=device)


def _inverse(a: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """T = (I + A)^-1, and as stored; of A what is below the diagonal is used."""
    # A may be stored too; and substitution solves a system that is off by up to n roundings an entry (Higham 2002, theorem
    # 8.5). Blocks of 16 merged by products reach that: with the root of n in its place, dk was once off by 19 sigma.
    # Products of TF32, also of what half precision stores later, truncate both operands: an error of one sign, merge after merge.
    a = arithmetic.dither(a, "A", min(arithmetic.stored, arithmetic.inverse, SINGLE - math.ceil(math.log2(a.shape[-1]))))
    solved = torch.linalg.solve_triangular(a, _identity(a.shape[-1], a.dtype, a.device), upper=False, unitriangular=True)
    return solved, arithmetic.dither(solved, "T")


def _inverse_back(solved: Tensor, inverse: Tensor, cotangent: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, int]:
    """The cotangent of A, -T^T dT T^T below the diagonal, given -dT of T; and the bits that it is to be rounded to.

    What dT has above the diagonal meets zeros of T in all that is below it. An implementation may take T as it was stored, with the
    errors that it had on the way there, or solve again; and it may begin with either product, which may be far larger than the
    other. Some runs take what was stored and begin with the second product, the others solve again and begin with the first.
    """
    stored = min(arithmetic.stored, arithmetic.kept(solved.shape[-1]))
    again = arithmetic.choice(solved)
    left, right = (
        torch.lerp(
            inverse.unsqueeze(-3), arithmetic.stacked(solved.unsqueeze(-3), ("T^T dT", "dT T^T"), stored), again.unsqueeze(-3)
        )
        .mT.expand(*solved.shape[:-2], 2, *solved.shape[-2:])
        .unbind(-3)
    )
    given = arithmetic.dither(cotangent, "dT", stored)
    both = arithmetic.stacked(torch.stack([left @ given, given @ right], -3), ("(T^T dT)", "(dT T^T)"), stored)
    either = torch.lerp(left @ both[..., 1, :, :], both[..., 0, :, :] @ right, again)
    return either.tril_(-1), stored


@functools.lru_cache(64)
def _columns(widths: tuple[int, ...], signs: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What sums the channels of several tensors side by side, with some signs: a column for each [sum of widths, tensors]."""
    columns: Tensor = torch.block_diag(*(torch.full((width, 1), sign) for width, sign in zip(widths, signs, strict=True)))
    return columns.to(device, dtype)


def _scan(
    given: tuple[Tensor, Tensor, Tensor | None], written: Tensor, state: Tensor, counts: list[int], arithmetic: Arithmetic
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The states from chunk to chunk, and what comes of them: o, the states after, and what `_scan_back` needs.

        S stored, V' = U - W S, V' and decayed V' stored       S <- exp(G_C) S + keeps^T V'       o = reads S + scores V'

    W, keeps, reads and scores lie side by side. Decayed V' is V' where only k can decay (`behind` None). Only S, and backward its
    cotangent, go from chunk to chunk, in steps of `counts` sequences; all else is computed for all chunks at once.

    What goes on to another grid is not divided by its own first: one product instead of three. So S is kept on its grid.
    """
    (operands, whole, behind), rough = given, arithmetic.rough
    widths = _widths(operands, state)
    chunk, depth = _summed_tokens(widths[-1], arithmetic), widths[0]
    terms = operands
    if arithmetic.product != EXACT:
        bits = tuple(arithmetic.kept(each) for each in (depth, chunk, depth, chunk))
        terms = arithmetic.beside(operands, ("W S", "k V'", "q S", "scores V'"), widths, bits)
    erases, writes, sides = terms.split((depth, depth, sum(widths[2:])), -1)
    to_fresh, of_fresh = arithmetic.grid(written, ("V'",))
    news, of_kept = written * to_fresh, of_fresh
    onwards: Sequence[Any] = [None] * len(counts)
    if behind is not None:
        onward, of_kept = arithmetic.onward(written, ("V'",), ("exp(G_C - G) V'",))
        onwards = (onward * behind).split_with_sizes(counts)
    rounds = not arithmetic.lossless(SINGLE, state.dtype)
    to_state, of_state = arithmetic.grid(state, ("S'",), bits=SINGLE) if rounds else (None, None)
    to_held, of_held = arithmetic.onward(state, ("S'",), ("S",), bits=(SINGLE, None))
    # What o is a product with: the states before each chunk, and V'.
    source = news.new_empty(*news.shape[:-2], sum(widths[2:]), news.shape[-1])
    held, fresh = source.split(widths[2:], -2)
    kept = fresh if behind is None else torch.empty_like(news)
    steps = *(x.split_with_sizes(counts) for x in (news, erases, writes.mT, whole, held, kept)), onwards
    initial, every, ended = state, [], []
    state = state if to_state is None else state * to_state
    for new, erase, write, all_of, held_of, kept_of, onward in zip(*steps, strict=True):
        ended.append(state[len(new) :])
        state = state[: len(new)]
        torch.mul(rough(state, to_held), of_held, out=held_of)
        news_of = rough(erase @ held_of, to_fresh, plus=new, sign=-1)
        torch.mul(news_of if onward is None else rough(news_of, onward), of_kept, out=kept_of)
        every.append((state, news_of))
        decayed = all_of * state
        if to_state is None:
            state = torch.baddbmm(*(x.flatten(0, -3) for x in (decayed, write, kept_of))).view(decayed.shape)
        else:
            state = rough(write @ kept_of, to_state, SINGLE, decayed)
    if behind is not None:
        torch.mul(_joined([news_of for _, news_of in every]), of_fresh, out=fresh)
    final, before = _joined([state, *(each for each in reversed(ended) if len(each))]), [state for state, _ in every[1:]]
    if of_state is not None:
        final, before = final * of_state, [_joined(before) * of_state] if before else []
    return sides @ source, final, (_joined([initial[: counts[0]], *before]), held, fresh, kept)


def _widths(operands: Tensor, state: Tensor) -> tuple[int, int, int, int]:
    """Those of W, keeps, reads and scores."""
    depth, chunk = state.shape[-2], operands.shape[-2]
    return depth, depth, depth, chunk


def _taken_up(keeps: Tensor, whole: Tensor, missed: Tensor, counts: list[int]) -> Tensor:
    """D before each chunk: D <- exp(G_C) D + keeps^T missed, nothing at first."""
    each, drift = list[Tensor](), None
    for new, all_of in zip((keeps.mT @ missed).split_with_sizes(counts), whole.split_with_sizes(counts), strict=True):
        drift = torch.zeros_like(new) if drift is None else drift[: len(new)]
        each.append(drift)
        drift = torch.addcmul(new, all_of, drift)
    return _joined(each)


def _scan_back(
    given: tuple[Tensor, Tensor, Tensor | None],
    states: Sequence[Tensor],
    do: Tensor,
    ds: Tensor,
    counts: list[int],
    arithmetic: Arithmetic,
) -> tuple[Tensor, tuple[Any, ...], Tensor]:
    """The cotangents of what was written; of keeps, reads, scores, -W, exp(G_C), with V' and the one of it decayed by `behind`;
    and of the states before.

    Given are those of o and of the states after. Every use's cotangent is stored on its own before they are added; a kernel takes
    the gradient of exp(G_C), sum(S dS), from S and dS as it stored them.
    """
    (operands, whole, behind), (before, held, fresh, kept) = given, states
    rough, plain = arithmetic.rough, not arithmetic.rounds or arithmetic.product == EXACT
    widths, width = _widths(operands, before), fresh.shape[-1]
    chunk, depth = _summed_tokens(widths[-1], arithmetic), widths[0]
    erased, keeps, reads, scores = operands.split(widths, -1)
    if plain:
        of_reads = of_scores = do
        both = operands[..., 2 * depth :].mT @ do
    else:
        bits = tuple(arithmetic.kept(each) for each in (chunk, chunk, width, width))
        names = "q S db", "scores V' db", "q S da", "scores V' da"
        to_reads, to_scores, of_reads, of_scores = arithmetic.stacked(do.unsqueeze(-3), names, bits).unbind(-3)
        both = torch.cat([reads.mT @ to_reads, scores.mT @ to_scores], -2)

    # The two uses of S and of V', on the grids of the sums that they go into.
    uses, sums = ("S in o'", "V' in o'"), ("S'", "V''")
    grid, _ = arithmetic.grid(both, uses, widths[2:], -2)
    onward, _ = arithmetic.onward(both, uses, sums, widths[2:], -2)
    read, scored = (rough(both, grid) * onward).split(widths[2:], -2)
    single, rounds = arithmetic.kept(depth), not arithmetic.lossless(SINGLE, ds.dtype)
    to_given, of_given = arithmetic.grid(scored, ("V' in S'",))
    onwards: Sequence[Any] = [None] * len(counts)
    if behind is not None:
        to_given, of_given = arithmetic.grid(scored, ("exp(G_C - G) V''",))
        onward, _ = arithmetic.onward(scored, ("exp(G_C - G) V''",), ("V' in S'",))
        onwards = (onward * behind).split_with_sizes(counts)
    to_fresh, of_fresh = arithmetic.onward(scored, ("V' in S'",), ("V''",))
    into, _ = arithmetic.grid(read, ("S in V''",))
    to_sum, of_sum = arithmetic.onward(read, ("S in V''",), ("S'",))
    if rounds:
        start, of_state = arithmetic.grid(read, ("S''",), bits=SINGLE)
        to_state, _ = arithmetic.onward(read, ("S'",), ("S''",), bits=(None, SINGLE))
        ds = rough(ds, start, SINGLE)
        of_keep = of_state
    if not plain:
        tokens = arithmetic.kept(chunk)
        to_keep, of_keep = arithmetic.onward(read, ("S''",), ("k V' db",), bits=(SINGLE, single))
        to_erase, of_erase = arithmetic.onward(scored, ("V''",), ("W S db",), bits=(None, tokens))

    every, dfinal, ds, written = list[tuple[Tensor, ...]](), ds, ds[:0], torch.empty_like(do)
    steps = *(x.split_with_sizes(counts) for x in (keeps, erased.mT, whole, read, scored, written)), onwards
    for keep, erase, all_of, read_of, scored_of, written_of, onward in reversed(list(zip(*steps, strict=True))):
        if every:
            *_, kept_of, dheld = every[-1]
            decayed = kept_of * ds
            ds = rough(dheld, to_state, SINGLE, decayed) if rounds else decayed.addcmul_(dheld, of_sum)
        ds = _joined([each for each in (ds, dfinal[len(ds) : len(keep)]) if len(each)])
        summed_up = ds if plain else rough(ds, to_keep, single)
        summed_up = summed_up * of_keep if rounds or not plain else summed_up
        dgiven = rough(keep @ summed_up, to_given)
        dkept = dgiven if onward is None else rough(dgiven, onward)
        dfresh = rough(dkept, to_fresh, plus=scored_of)
        term = torch.mul(dfresh, of_fresh, out=written_of) if plain else rough(dfresh, to_erase, tokens) * of_erase
        dheld = rough(rough(erase @ term, into), to_sum, plus=read_of, sign=-1)
        every.append((ds, dgiven, dfresh, all_of, dheld))
    *_, kept_of, dheld = every[-1]
    ds = torch.addcmul(kept_of * (ds * of_state if rounds else ds), dheld, of_sum)
    states_after, dgivens, dfreshes, *_ = (each[::-1] for each in zip(*every, strict=True))
    after = _joined(states_after) * of_state if rounds else _joined(states_after)
    if plain:
        of_keeps, of_erased = after, written
    else:
        torch.mul(_joined(dfreshes), of_fresh, out=written)
        both, tall = torch.cat([after, written], -2), widths[2:]
        of_keeps, of_erased = arithmetic.beside(both, ("k V' da", "W S da"), tall, arithmetic.kept(width), -2).split(tall, -2)
    dkeeps, spared = kept @ of_keeps.mT, of_erased @ held.mT
    ends = arithmetic.stacked(torch.stack([before, after], -3), ("S stored", "dS stored"), arithmetic.memory)
    dwhole = ends[..., 0, :, :] * ends[..., 1, :, :]
    values = None if behind is None else (fresh, _joined(dgivens) * of_given)
    dscan = dkeeps, of_reads @ held.mT, of_scores @ fresh.mT, spared, dwhole.sum_to_size(whole.shape), values
    return written, dscan, ds


def _joined(each: Sequence[Tensor]) -> Tensor:
    return each[0] if len(each) == 1 else torch.cat(tuple(each))


def _summed_tokens(chunk: int, arithmetic: Arithmetic) -> int:
    """How many tokens of a chunk an implementation sums at once: a recurrence carries them in its state, which drifts."""
    return 1 if arithmetic.algorithm == "recurrent" else chunk


def _gathered(x: Tensor, total: Tensor) -> Tensor:
    """x of each channel summed over those that share a gate."""
    return x.sum(-1, keepdim=True) if total.shape[-1] < x.shape[-1] else x


def _later(x: Tensor) -> Tensor:
    """The sum over each token and those after it in its chunk."""
    return (x.mT @ _lower(x.shape[-2], x.dtype, x.device)).mT


@functools.lru_cache(64)
def _lower(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 at and below the diagonal, else 0."""
    return torch.ones(tokens, tokens, dtype=dtype, device=device).tril()


@dataclasses.dataclass(frozen=True)
class _Recurrent:
    """The recurrence in chunks: keys and queries [chunk, runs, HV, halves, C, K], one or two halves of the values' channels."""

    scale: float
    arithmetic: Arithmetic

    def most(self, size: int, k: Tensor, v: Tensor) -> int:
        """As many chunks as there is room for."""
        return _most(size, k, v)

    def dtype(self, x: Tensor) -> torch.dtype:
        """That of x."""
        return x.dtype

    def forward(self, segment: Segment, tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor, Any]:
        """o, the states after the segment, and what backward needs."""
        (q, k, v, g, beta), scale, arithmetic = tokens, self.scale, self.arithmetic
        (chunk, depth), channels = k.shape[-2:], g.shape[-1] > 1
        # Keys as they recall, queries as read, keys as they are written.
        x = torch.stack([k, scale * q, k], -3)
        x = _apart(_rounded(x, ("recalled", "read", "written"), arithmetic), x, arithmetic)
        g = arithmetic.dither(g, "g", SINGLE)
        drift, order, back = None, None, None
        if arithmetic.rounds:
            make = _drifts if arithmetic.runs * chunk * depth <= _KEPT else _drifts.__wrapped__
            slips, lost, drift, order, back = make(arithmetic, chunk, depth, g.shape[-1], v.shape[-1], v.device)
            if (inside := segment.inside(g.ndim)) is not None:
                slips, drift = slips * inside, (lost * inside.unsqueeze(-3)).cumsum(-2).exp()
            g = g + slips
        v, state = (_halves(each, order) for each in (v, state))
        g, beta = g.unsqueeze(-3), beta.unsqueeze(-3)
        drift = g.new_ones(1, 1) if drift is None else drift
        pair, total = x[..., :2, :, :] * drift.unsqueeze(-3), g.cumsum(-2)
        recalls, writes, drifted = pair[..., 0, :, :], x[..., 2, :, :] / drift, drift[..., -1:, :]
        grown, last = total.exp(), total[..., -1:, :]
        left, whole = (last - total).exp() * drifted, grown[..., -1:, :] * drifted
        products, decay = _scores(pair, writes, total, PLAIN, channels=channels)
        right = torch.cat([v, grown * recalls], -1)
        corrections = beta * products[..., 0, :, :]
        inverses = inverted(corrections)
        solved = substituted(corrections, inverses, beta * right)
        written, erased = solved.split((v.shape[-1], depth), -1)
        keeps = left * writes
        operands = torch.cat([erased, keeps, grown * pair[..., 1, :, :], products[..., 1, :, :]], -1)
        scan = operands, whole.mT, None
        o, final, states = _scan(scan, written, state, segment.counts, arithmetic)
        missed = None
        if arithmetic.summed_again < EXACT:
            before, held, fresh, _ = states
            stored = arithmetic.dither(fresh, "corrected values", arithmetic.summed_again)
            missed = stored - fresh
            states = before, held + _taken_up(keeps, whole.mT, missed, segment.counts), stored, stored
        local = (
            beta,
            writes,
            total,
            grown,
            left,
            pair,
            products,
            decay,
            right,
            solved,
            corrections,
            inverses,
            drift,
            order,
            back,
            missed,
        )
        return _whole(o, back), _whole(final, back), (local, scan, states)

    def backward(self, segment: Segment, made: Any, do: Tensor, dstate: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """The cotangents of the tokens, and of the states before the segment."""
        local, scan, states = made
        (
            beta,
            writes,
            total,
            grown,
            left,
            pair,
            products,
            decay,
            right,
            solved,
            corrections,
            inverses,
            drift,
            order,
            back,
            missed,
        ) = local
        scale, arithmetic, channels = self.scale, self.arithmetic, total.shape[-1] > 1
        depth = writes.shape[-1]
        width = right.shape[-1] - depth
        do, dstate = (_halves(each, order) for each in (do, dstate))
        written, dscan, dstate = _scan_back(scan, states, do, dstate, segment.counts, arithmetic)
        dkeeps, dreads, dscores, spared, dwhole, _ = dscan

        dstart = substituted(corrections, inverses, torch.cat([written, -spared], -1), transposed=True)
        dcorrections = dstart @ solved.mT
        if missed is not None:
            dcorrections.add_(dstart[..., :width] @ missed.mT)
        dcorrections = dcorrections.neg_().tril_(-1)
        terms = right * dstart
        terms = arithmetic.beside(terms, ("beta v summed", "beta k summed"), (width, depth), (summed(width), summed(depth)))
        dbeta = (dcorrections * products[..., 0, :, :]).sum(-1, keepdim=True) + terms.sum(-1, keepdim=True)
        dv, dgrown = (beta * dstart).split((width, depth), -1)
        dproducts = torch.stack([beta * dcorrections, dscores], -3)
        dpair, dwrites, dtotal = _scores_back(dproducts, pair, writes, total, products, decay, PLAIN, channels=channels)
        dpair = torch.addcmul(dpair, torch.stack([dgrown, dreads], -3), grown.unsqueeze(-3))
        dwrites = torch.addcmul(dwrites.sum(-3), dkeeps, left)

        _, keeps, reads, _ = scan[0].split((depth, depth, depth, scan[0].shape[-2]), -1)
        kept, all_of = dkeeps * keeps, (dwhole * scan[1]).mT
        # Of k.dk, whose terms cancel in dG, a run in chunks knows what is left only to a float64 rounding. Nor does the truth where
        # each channel decays on its own. The recurrence never forms such sums: its gradients of gates may be smaller, and right.
        known = writes * dwrites
        parts = torch.addcmul(dgrown * right[..., width:], dreads, reads).sub_(kept)
        if arithmetic.rounds:
            parts.sub_(arithmetic.off(known.unsqueeze(-3), ("k.dk",), FLOAT64).squeeze(-3))
        dtotal = dtotal + _gathered(parts, total)
        dtotal[..., -1:, :].add_(_gathered(kept.sum(-2, keepdim=True), total)).add_(_gathered(all_of, total))
        dg = arithmetic.dither(_later(dtotal.sum(-3)), "g'", SINGLE)
        dx = torch.cat([dpair * drift.unsqueeze(-3), (dwrites / drift).unsqueeze(-3)], -3)
        dx = _apart_back(dx, arithmetic)
        dq, dk = scale * dx[..., 1, :, :], dx[..., 0, :, :] + dx[..., 2, :, :]
        return (dq, dk, _whole(dv, back), dg, dbeta.sum(-3)), _whole(dstate, back)


def _rounded(x: Tensor, places: tuple[str, str, str], arithmetic: Arithmetic) -> Tensor:
    """Keys that recall and queries, which give sums over the channels, and keys that are written, each in its own place."""
    sums = summed(x.shape[-1])
    return arithmetic.stacked(x, places, (sums, sums, SINGLE))


def _apart(rounded: Tensor, x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """x as rounded, for each half of the values' channels: in some runs the errors of the second have the other sign."""
    if not arithmetic.rounds:
        return x.unsqueeze(-4)
    return torch.stack([rounded, torch.addcmul(rounded, arithmetic.choice(x), rounded - x, value=-2)], -4)


def _apart_back(dx: Tensor, arithmetic: Arithmetic) -> Tensor:
    if not arithmetic.rounds:
        return dx.squeeze(-4)
    one, other = dx.unbind(-4)
    turned = arithmetic.choice(one)
    rounded = _rounded((one + other).addcmul_(turned, other, value=-2), ("recalled'", "read'", "written'"), arithmetic)
    return torch.addcmul(rounded, turned, other, value=2)


def _halves(x: Tensor, order: Tensor | None) -> Tensor:
    """The two halves of the last axis [..., rows, V], in some order, as [..., 2, rows, V / 2], a zero at the end where V is odd."""
    x = x.unsqueeze(-3)
    if order is None:
        return x
    x = torch.nn.functional.pad(x, (0, 1)) if x.shape[-1] % 2 else x
    shape = *x.shape[:-3], 2, x.shape[-2]
    return x.expand(*shape, -1).gather(-1, order.expand(*shape, -1))


def _whole(x: Tensor, back: Tensor | None) -> Tensor:
    """What `_halves` took apart."""
    if back is None:
        return x.squeeze(-3)
    x = torch.cat(x.unbind(-3), -1)
    return x.gather(-1, back.expand(*x.shape[:-1], -1))


@functools.lru_cache(8)
def _drifts(
    arithmetic: Arithmetic, chunk: int, depth: int, gates: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What all chunks share: what decays err by [1, runs, 1, C, gates], each half's e [1, runs, 1, 2, C, K] and exp of its running
    sum, and each run's order of the values' channels [1, runs, 1, 2, 1, V / 2] and its inverse [1, runs, 1, 1, V].
    """

    def like(*shape: int) -> Tensor:
        return torch.ones(1, arithmetic.runs, *shape, dtype=torch.float64, device=device)

    slips = arithmetic.dither(like(1, chunk, gates), "decay", SINGLE) - 1.0
    once = arithmetic.drift(like(1, 1, chunk, depth), "decayed") + arithmetic.drift(like(1, 1, chunk, depth), "state")
    lost = _apart(once, 0.0 * once, arithmetic).squeeze(-3)
    order = arithmetic.drift(like(1, 1, width), "halves").argsort(-1)
    back, last = order.argsort(-1), order.new_full((1, arithmetic.runs, 1, 1, width % 2), width)
    halves = torch.cat([order, last], -1).unflatten(-1, (2, -1)).movedim(-2, -3)
    return slips, lost, lost.cumsum(-2).exp(), halves, back
