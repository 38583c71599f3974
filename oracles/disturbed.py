"""The delta rules in the arithmetic of the two classes of algorithm that kernels use, many runs at once.

`recurrent` and `chunkwise` round where such algorithms round (oracles/rounding.py); their run 0 is exact, and
tests/test_oracles.py proves it equal to the definition.
"""

import math

import torch
from torch import Tensor

from oracles.decay import decayed, decays, halves, sizes, squares
from oracles.rounding import SINGLE, Arithmetic, summed


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """The definition, batched: q, k [runs, ..., T, K], v [..., T, V], g [..., T, 1 or K], beta [..., T, 1], state [..., K, V].

    Recurrent and decode kernels keep float32 throughout: the decay, the state after its decay and after its update, what is
    written to it, and the two sums over K round, every step. Where tokens repeat, the same errors are written again and again.
    """
    depth, rows = q.shape[-1], []
    decay = arithmetic.single(arithmetic.single(g, "g").exp(), "decay")
    steps = (x.unbind(-2) for x in (q, k, v, decay, beta))
    for q_t, k_t, v_t, decay_t, beta_t in zip(*steps, strict=True):
        state = arithmetic.carried(decay_t.unsqueeze(-1) * state, "decayed")
        recalled = torch.einsum("...k,...kv->...v", k_t, arithmetic.single(state, "recalled", depth))
        update = arithmetic.single(beta_t * (v_t - recalled), "update")
        written = arithmetic.single(k_t.unsqueeze(-1) * update.unsqueeze(-2), "written")
        state = arithmetic.carried(state + written, "state")
        rows.append(torch.einsum("...k,...kv->...v", q_t, arithmetic.single(state, "read", depth)))
    return scale * torch.stack(rows, -2) if rows else torch.zeros_like(v), state


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    arithmetic: Arithmetic,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The chunkwise form, batched; shapes as `recurrent`, T any number of tokens (a last short chunk is padded).

    Padding tokens have k = v = g = beta = 0: they decay nothing and write nothing, so the final state is the right one.
    """
    tokens, depth = q.shape[-2], q.shape[-1]
    if tokens == 0:
        return torch.zeros_like(v), state
    padding = -tokens % chunk
    q, k, v, g, beta = (torch.nn.functional.pad(x, (0, 0, 0, padding)).unflatten(-2, (-1, chunk)) for x in (q, k, v, g, beta))
    betas = [arithmetic.sums(beta, f"dbeta {part}", max(v.shape[-1], depth)) for part in ("A", "U", "W")]

    # The cumulative gate is a float32 sum, forward and (reversed) backward.
    total = arithmetic.single(arithmetic.sums(g, "dg", chunk).cumsum(-2), "G", chunk)
    grown, end = total.exp(), total[..., -1:, :]
    whole = end.exp().mT
    # An implementation decays k or V' before it stores them for the state: some runs do one, some the other.
    share = arithmetic.choice(total) if g.shape[-1] == 1 else torch.ones_like(total)
    ahead, behind = (_left(total, end, each) for each in (share, 1.0 - share))

    operand, use, multiply = arithmetic.operand, arithmetic.use, arithmetic.multiply
    scored: type[_Scores] | type[_ChannelScores] = _Scores if g.shape[-1] == 1 else _ChannelScores
    corrections: Tensor = scored.apply(operand(betas[0] * k, "beta k"), use(k, "k in A"), total, arithmetic, "A").tril(-1)
    solved: Tensor = _Inverse.apply(corrections, arithmetic)
    written = operand(multiply(use(solved, "T in U"), operand(betas[1] * v, "beta v"), "U = "), "U")
    k_grown = _Times.apply(k, grown, None, arithmetic, "exp(G) k")
    erased = operand(multiply(use(solved, "T in W"), operand(betas[2] * k_grown, "beta exp(G) k"), "W = "), "W")
    q = operand(scale * q, "scale q")  # stored, where an implementation scales q and not what it reads
    scores = operand(scored.apply(use(q, "q in scores"), use(k, "k in scores"), total, arithmetic, "q k"), "scores")
    reads = operand(_Times.apply(q, grown, None, arithmetic, "q exp(G)"), "exp(G) q")
    keeps = operand(_Times.apply(use(k, "k in S"), *ahead, arithmetic, "k exp(G_C - G)"), "exp(G_C - G) k")

    rows = []
    pieces = (x.unbind(-3) for x in (keeps, reads, scores, written, erased, whole, *behind))
    for keeps_c, reads_c, scores_c, written_c, erased_c, whole_c, *behind_c in zip(*pieces, strict=True):
        held = operand(state, "S")
        fresh = operand(written_c - multiply(erased_c, use(held, "S in V'"), "W S"), "V'")
        rows.append(multiply(reads_c, use(held, "S in o"), "q S") + multiply(scores_c, use(fresh, "V' in o"), "scores V'"))
        kept: Tensor = _Decayed.apply(whole_c, state, arithmetic)
        given = use(fresh, "V' in S")
        if g.shape[-1] == 1:  # a decay of each channel of the key can only be k's
            given = operand(_Times.apply(given, *behind_c, arithmetic, "V' exp(G_C - G)"), "exp(G_C - G) V'")
        state = arithmetic.single(kept + multiply(keeps_c.mT, given, "k V'"), "S'")
    return torch.cat(rows, -2)[..., :tokens, :], state


def _left(total: Tensor, end: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """exp(share (G_C - G)), twice: one for the gradient of G, one for that of G_C."""
    return (share * (end.detach() - total)).exp(), (share * (end - total.detach())).exp()


class _Times(torch.autograd.Function):
    """x times a factor a token (or a token and channel), which may be given twice, for two ways its gradient is summed.

    The gradients are sums of x dy, over a token's channels for the one, and over all tokens of the chunk for the other; their
    terms may cancel, and in sums of another order round otherwise: so the terms' roundings are added, not the sums'.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        factor: Tensor,
        again: Tensor | None,
        arithmetic: Arithmetic,
        place: str,
    ) -> Tensor:
        ctx.save_for_backward(x, factor)
        ctx.back = arithmetic, place, again is not None  # type: ignore[attr-defined]
        return x * factor

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place, twice = ctx.back  # type: ignore[attr-defined]
        chunk, width = x.shape[-2], x.shape[-1] // factor.shape[-1]
        terms = x * cotangents[0]
        once = arithmetic.dither(terms, f"{place} summed", summed(width)).sum_to_size(factor.shape)
        again = arithmetic.dither(terms, f"{place} summed at the end", summed(chunk * width)).sum_to_size(factor.shape)
        return cotangents[0] * factor, once, again if twice else None, None, None


class _Scores(torch.autograd.Function):
    """(x k^T) decay, where decay_ij = exp(G_i - G_j) at and below the diagonal, else 0.

    With D the product of scores and cotangents, dG_i = sum_j D_ij - sum_j D_ji, to which the diagonal adds nothing. Kernels take
    it as x_i.dx_i - k_i.dk_i, whose terms are as large as ever where decays are strong and D small: their rounding is added.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, k: Tensor, total: Tensor, arithmetic: Arithmetic, place: str
    ) -> Tensor:
        bits = min(arithmetic.product, summed(x.shape[-1]))
        products, decay = decayed(arithmetic.dither(x, place, bits), k, total)
        assert decay is not None
        ctx.save_for_backward(x, k, products, decay)
        ctx.back = arithmetic, place  # type: ignore[attr-defined]
        return products

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, k, products, decay = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place = ctx.back  # type: ignore[attr-defined]
        chunk, width = x.shape[-2:]
        bits = min(arithmetic.product, summed(chunk))
        ds = cotangents[0] * decay
        dx = arithmetic.dither(ds, f"{place} dx", bits) @ k
        dk = arithmetic.dither(ds, f"{place} dk", bits).mT @ x
        off = (cotangents[0] * products).tril(-1)
        dg = off.sum(-1) - off.sum(-2)
        if arithmetic.runs > 1:
            for sign, name, a, da in ((1, "x.dx", x, dx), (-1, "k.dk", k, dk)):
                terms = a * da
                dg = dg + sign * (arithmetic.dither(terms, f"{place} {name}", summed(chunk * width)) - terms).sum(-1)
        return dx, dk, dg.unsqueeze(-1), None, None


class _ChannelScores(torch.autograd.Function):
    """sum_c x_ic k_jc exp(G_ic - G_jc) at and below the diagonal (oracles/decay.py), decayed operands stored.

    An implementation decays q and k towards some token between them and multiplies: near the diagonal it may multiply first.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, k: Tensor, total: Tensor, arithmetic: Arithmetic, place: str
    ) -> Tensor:
        ctx.save_for_backward(x, k, total)
        ctx.back = arithmetic, place  # type: ignore[attr-defined]
        bits = min(arithmetic.product, summed(x.shape[-1]))
        x = arithmetic.dither(x, place, bits)
        product = torch.zeros(*x.shape[:-1], x.shape[-2], dtype=x.dtype, device=x.device)
        product.diagonal(dim1=-2, dim2=-1).copy_((x * k).sum(-1))
        for size in sizes(x.shape[-2]):
            later, earlier = decays(total, size)
            high = arithmetic.dither(halves(x, size)[1] * later, f"{place} later {size}")
            low = arithmetic.dither(halves(k, size)[0] * earlier, f"{place} earlier {size}")
            squares(product, size).copy_(high @ low.mT)
        return product

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, k, total = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place = ctx.back  # type: ignore[attr-defined]
        chunk = x.shape[-2]
        bits = min(arithmetic.product, summed(chunk))
        dp = arithmetic.dither(cotangents[0], f"{place} dP")
        diagonal = dp.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dx, dk, dtotal = diagonal * k, diagonal * x, torch.zeros_like(x)
        for size in sizes(chunk):
            (_, high), (low, _), (dlow, dhigh) = halves(x, size), halves(k, size), halves(dtotal, size)
            later, earlier = decays(total, size)
            block = squares(dp, size)
            near, far = (
                arithmetic.dither(each, f"{place} {name} {size}", bits) for name, each in (("dx", block), ("dk", block.mT))
            )
            of_high = (near @ arithmetic.dither(low * earlier, f"{place} earlier {size} dx")) * later
            of_low = (far @ arithmetic.dither(high * later, f"{place} later {size} dk")) * earlier
            halves(dx, size)[1].add_(of_high)
            halves(dk, size)[0].add_(of_low)
            dhigh.add_(high * of_high)
            dlow.sub_(low * of_low)
        if arithmetic.runs > 1:
            for sign, name, a, da in ((1, "x.dx", x, dx), (-1, "k.dk", k, dk)):
                terms = a * da
                dtotal = dtotal + sign * (arithmetic.dither(terms, f"{place} {name}", summed(chunk)) - terms)
        return dx, dk, dtotal, None, None


class _Inverse(torch.autograd.Function):
    """T = (I + A)^-1 as stored. With dT the cotangent of T, that of A is -T^T dT T^T below the diagonal.

    Backward, an implementation may take T as it was stored or solve again, so its rounding there is another one; and it may
    begin with either product, which may be far larger than the other: half of each rounds like both.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor, arithmetic: Arithmetic) -> Tensor:
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        # A may be stored too; and substitution solves a system that is off by up to n roundings an entry (Higham 2002, theorem
        # 8.5). Blocks of 16 merged by products reach that: with the root of n in its place, dk was once off by 19 sigma.
        a = arithmetic.dither(a, "A", min(arithmetic.stored, SINGLE - math.ceil(math.log2(a.shape[-1]))))
        solved = torch.linalg.solve_triangular(identity + a, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(solved)
        ctx.arithmetic = arithmetic  # type: ignore[attr-defined]
        return arithmetic.dither(solved, "T")

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, None]:
        (solved,) = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic = ctx.arithmetic  # type: ignore[attr-defined]
        stored = min(arithmetic.stored, arithmetic.product, summed(solved.shape[-1]))
        left, right = (arithmetic.dither(solved, place, stored).mT for place in ("T^T dT", "dT T^T"))
        given = arithmetic.dither(cotangents[0].tril(), "dT", stored)
        first = arithmetic.dither(left @ given, "(T^T dT)", stored) @ right
        second = left @ arithmetic.dither(given @ right, "(dT T^T)", stored)
        return arithmetic.dither(-0.5 * (first + second).tril(-1), "dA", stored), None


class _Decayed(torch.autograd.Function):
    """decay * S; backward, a kernel takes the decay's gradient sum(S dS) from S and dS as it stored them."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, decay: Tensor, state: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.save_for_backward(decay, state)
        ctx.arithmetic = arithmetic  # type: ignore[attr-defined]
        return decay * state

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, Tensor, None]:
        decay, state = ctx.saved_tensors  # type: ignore[attr-defined]
        dither = ctx.arithmetic.dither  # type: ignore[attr-defined]
        product = dither(state, "S stored") * dither(cotangents[0], "dS stored")
        return product.sum_to_size(decay.shape), decay * cotangents[0], None
