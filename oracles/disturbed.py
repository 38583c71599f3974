"""The delta rules in the arithmetic of the two classes of algorithm that kernels use, many runs at once.

`recurrent` and `chunkwise` round where such algorithms round (oracles/rounding.py); without rounding, tests/test_oracles.py
proves both equal to the definition. tests/test_rounding.py proves of `recurrent` that its runs spread as those of the definition
do that rounds every element at every step, which takes as many steps as there are tokens.
"""

import math

import torch
from torch import Tensor

from oracles.decay import decayed, decays, halves, sizes, squares
from oracles.rounding import EXACT, SINGLE, Arithmetic, summed

STEPS = 64  # tokens of the recurrence computed at once
FLOAT64 = EXACT - 5  # bits of a float64 sum over a chunk


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """The definition, batched: q, k [runs, ..., T, K], v [..., T, V], g [..., T, 1 or K], beta [..., T, 1], state [..., K, V].

    Recurrent and decode kernels keep float32 throughout: the decay, the state after its decay and after its update, what is
    written to it, and the two sums over K round, every step. Where tokens repeat, the same errors are written again and again.

    A run so disturbed is nearly the definition on other numbers: a key that recalls, one that is written, a query, and for the
    fractions e_t that channel k of a state loses or gains at each step, the decay exp(g + e). So it is computed in chunks: with
    E = cumsum(e), tiny, exp(G_i - G_j + E_i - E_j) goes into the operands, exp(E) k and exp(-E) k.

    Such errors are those of a whole row of the state, shared by the values' channels, and might cancel in sums over them where an
    implementation's do not. Values' channels never meet in a state: in every other pair of runs, half of them, others in each, are
    computed with errors of other sign.
    """
    tokens, depth, values = q.shape[-2], q.shape[-1], v.shape[-1]
    if tokens == 0:
        return torch.zeros_like(v), state
    recalls, writes, reads = (
        arithmetic.single(x, place, terms)
        for x, place, terms in ((k, "recalled", depth), (k, "written", 1), (scale * q, "read", depth))
    )
    g, drift = arithmetic.single(g, "g"), torch.zeros_like(k)
    if arithmetic.rounds:
        g = g + (arithmetic.dither(torch.ones_like(g), "decay", SINGLE) - 1.0)
        drift = arithmetic.drift(k, "decayed") + arithmetic.drift(k, "state")
        recalls, writes, reads, drift = (
            _apart(rounded, x, arithmetic) for rounded, x in ((recalls, k), (writes, k), (reads, scale * q), (drift, 0.0 * drift))
        )
        g, beta = g.unsqueeze(-3), beta.unsqueeze(-3)
        order = arithmetic.drift(v[..., :1, :], "halves").argsort(-1)
        v, state = (_halves(x.gather(-1, order.expand_as(x))) for x in (v, state))
    width = v.shape[-1]
    chunk = min(STEPS, 1 << (tokens - 1).bit_length())
    recalls, writes, reads, v, g, beta, drift = (_chunks(x, chunk) for x in (recalls, writes, reads, v, g, beta, drift))
    total, drift = g.cumsum(-2), drift.cumsum(-2).exp()
    recalls, writes, reads, drifted = drift * recalls, writes / drift, drift * reads, drift[..., -1:, :]
    writes, total = _Remaining.apply(writes, total, arithmetic)
    end = total[..., -1:, :]

    scored: type[_Scores] | type[_ChannelScores] = _Scores if g.shape[-1] == 1 else _ChannelScores
    plain, grown = Arithmetic.exact(), total.exp()
    corrections = (beta * scored.apply(recalls, writes, total, plain, "A")).tril(-1)
    weighed = [
        _Times.apply(x, beta.expand(*x.shape[:-1], 1), None, arithmetic, f"beta {name}")
        for x, name in ((v, "v"), (grown * recalls, "k"))
    ]
    start = torch.cat(weighed, -1)
    solved = torch.linalg.solve_triangular(corrections, start, upper=False, unitriangular=True)
    written, erased = solved.split((width, depth), -1)
    keeps, whole = (end - total).exp() * drifted * writes, (end.exp() * drifted).mT
    scores = scored.apply(reads, writes, total, plain, "q k")
    o, final = _Scan.apply(keeps, grown * reads, scores, written, erased, whole, None, None, state, arithmetic)
    o = o.flatten(-3, -2)[..., :tokens, :]
    if arithmetic.rounds:
        o, final = (torch.cat(x.unbind(-3), -1)[..., :values] for x in (o, final))
        o, final = (x.gather(-1, order.argsort(-1).expand_as(x)) for x in (o, final))
    return o, final


def _halves(x: Tensor) -> Tensor:
    """The two halves of the last axis [..., rows, V] as [..., 2, rows, V / 2], a zero at the end where V is odd."""
    return torch.stack(torch.nn.functional.pad(x, (0, x.shape[-1] % 2)).chunk(2, -1), -3)


def _apart(rounded: Tensor, x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """x as rounded, for each half of the values' channels: in some runs the errors of the second have the other sign."""
    error = rounded - x
    return torch.stack([rounded, x + (1.0 - 2.0 * arithmetic.choice(x)) * error], -3)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Tokens [..., T, width] in chunks [..., chunks, chunk, width], zeros after the last."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % chunk))
    chunked: Tensor = padded.unflatten(-2, (-1, chunk))
    return chunked


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
    *,
    channels: bool = False,
) -> tuple[Tensor, Tensor]:
    """The chunkwise form, batched; shapes as `recurrent`, T any number of tokens (a last short chunk is padded).

    `channels` says that an implementation decays each channel of the key on its own, be there only one.
    Padding tokens have k = v = g = beta = 0: they decay nothing and write nothing, so the final state is the right one.
    """
    tokens, depth, dtype, channels = q.shape[-2], q.shape[-1], q.dtype, channels or g.shape[-1] > 1
    if tokens == 0:
        return torch.zeros_like(v), state
    if arithmetic.first and arithmetic.product == EXACT:
        # Operands are coarser than float32, in which an implementation computes all else: its own roundings are such too.
        q, k, v, g, beta, state = (x.float() for x in (q, k, v, g, beta, state))
    q, k, v, g, beta = (_chunks(x, chunk) for x in (q, k, v, g, beta))
    betas = [arithmetic.sums(beta, f"dbeta {part}", max(v.shape[-1], depth)) for part in ("A", "U", "W")]

    # The cumulative gate is a float32 sum, forward and (reversed) backward.
    total = arithmetic.single(arithmetic.sums(g, "dg", chunk).cumsum(-2), "G", chunk)
    grown, end = total.exp(), total[..., -1:, :]
    whole = end.exp().mT
    # An implementation decays k or V' before it stores them for the state: some runs do one, some the other.
    share = torch.ones_like(total) if channels else arithmetic.choice(total)
    ahead, behind = (_left(total, end, each) for each in (share, 1.0 - share))

    operand, use, multiply = arithmetic.operand, arithmetic.use, arithmetic.multiply
    scored: type[_Scores] | type[_ChannelScores] = _ChannelScores if channels else _Scores
    corrections: Tensor = scored.apply(operand(betas[0] * k, "beta k"), use(k, "k in A"), total, arithmetic, "A").tril(-1)
    solved: Tensor = _Inverse.apply(corrections, arithmetic)
    written = operand(multiply(use(solved, "T in U"), operand(betas[1] * v, "beta v"), "U = "), "U")
    k_grown = _Times.apply(k, grown, None, arithmetic, "exp(G) k")
    erased = operand(multiply(use(solved, "T in W"), operand(betas[2] * k_grown, "beta exp(G) k"), "W = "), "W")
    q = operand(scale * q, "scale q")  # stored, where an implementation scales q and not what it reads
    scores = operand(scored.apply(use(q, "q in scores"), use(k, "k in scores"), total, arithmetic, "q k"), "scores")
    reads = operand(_Times.apply(q, grown, None, arithmetic, "q exp(G)"), "exp(G) q")
    keeps = operand(_Times.apply(use(k, "k in S"), *ahead, arithmetic, "k exp(G_C - G)"), "exp(G_C - G) k")

    decays = (None, None) if channels else behind  # a decay of each channel of the key can only be k's
    o, final = _Scan.apply(keeps, reads, scores, written, erased, whole, *decays, state, arithmetic)
    return o.flatten(-3, -2)[..., :tokens, :].to(dtype), final.to(dtype)


def _left(total: Tensor, end: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """exp(share (G_C - G)), twice: one for the gradient of G, one for that of G_C."""
    return (share * (end.detach() - total)).exp(), (share * (end - total.detach())).exp()


class _Remaining(torch.autograd.Function):
    """k and G as they are; of k.dk, whose terms cancel in dG, a run in chunks knows what is left only to a float64 rounding.

    Nor does the truth where each channel decays on its own. The recurrence never forms such sums: its gradients of gates may be far
    smaller, and right.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, k: Tensor, total: Tensor, arithmetic: Arithmetic
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(k)
        ctx.arithmetic = arithmetic  # type: ignore[attr-defined]
        return k.view_as(k), total.view_as(total)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, Tensor, None]:
        (k,), (dk, dtotal) = ctx.saved_tensors, cotangents  # type: ignore[attr-defined]
        terms = k * dk
        left = ctx.arithmetic.dither(terms, "k.dk", FLOAT64) - terms  # type: ignore[attr-defined]
        return dk, dtotal + left.sum_to_size(dtotal.shape), None


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
        once, again = _factor_gradients(x, cotangents[0], factor, arithmetic, place, twice=twice)
        return cotangents[0] * factor, once, again, None, None


def _factor_gradients(
    x: Tensor, cotangent: Tensor, factor: Tensor, arithmetic: Arithmetic, place: str, *, twice: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of a factor of x summed over the channels that share it and, `twice`, for a sum over all of the chunk."""
    chunk, width = x.shape[-2], x.shape[-1] // factor.shape[-1]
    terms = x * cotangent
    once = arithmetic.dither(terms, f"{place} summed", summed(width)).sum_to_size(factor.shape)
    if not twice:
        return once, None
    return once, arithmetic.dither(terms, f"{place} summed at the end", summed(chunk * width)).sum_to_size(factor.shape)


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
        if arithmetic.rounds:
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
        if arithmetic.rounds:
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


class _Scan(torch.autograd.Function):
    """The states from chunk to chunk, and what comes of them: o and the final state.

        S stored, V' = U - W S, V' and decayed V' stored       S <- exp(G_C) S + keeps^T V'       o = reads S + scores V'

    Decayed V' is V' where only k can decay (`behind` None). Only S, and backward its cotangent, go from chunk to chunk; all else is
    computed for all chunks at once. Every use's cotangent is stored on its own before they are added; a kernel takes the gradient
    of exp(G_C), sum(S dS), from S and dS as it stored them.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        keeps: Tensor,
        reads: Tensor,
        scores: Tensor,
        written: Tensor,
        erased: Tensor,
        whole: Tensor,
        behind: Tensor | None,
        again: Tensor | None,  # noqa: ARG004 - `behind`, once more: the other way its gradient is summed
        state: Tensor,
        arithmetic: Arithmetic,
    ) -> tuple[Tensor, Tensor]:
        dither, terms, chunk, depth = arithmetic.dither, arithmetic.terms, _summed_tokens(keeps, arithmetic), keeps.shape[-1]
        erases, writes = terms(erased, "W S", depth), terms(keeps.mT, "k V'", chunk)
        every = []
        for at in range(keeps.shape[-3]):
            held = dither(state, "S")
            fresh = dither(written[..., at, :, :] - erases[..., at, :, :] @ held, "V'")
            given = fresh if behind is None else dither(fresh * behind[..., at, :, :], "exp(G_C - G) V'")
            every.append((state, held, fresh, given))
            state = dither(torch.addcmul(writes[..., at, :, :] @ given, whole[..., at, :, :], state), "S'", SINGLE)
        states, held, fresh, given = (torch.stack(each, -3) for each in zip(*every, strict=True))
        saved = keeps, reads, scores, erased, whole, behind, states, held, fresh, given
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]
        ctx.arithmetic = arithmetic  # type: ignore[attr-defined]
        return terms(reads, "q S", depth) @ held + terms(scores, "scores V'", chunk) @ fresh, state

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        keeps, reads, scores, erased, whole, behind, states, held, fresh, given = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic = ctx.arithmetic  # type: ignore[attr-defined]
        (do, ds), dither, terms = cotangents, arithmetic.dither, arithmetic.terms
        chunk, depth, width = _summed_tokens(keeps, arithmetic), keeps.shape[-1], fresh.shape[-1]
        read = dither(reads.mT @ terms(do, "q S db", chunk), "S in o'")
        scored = dither(scores.mT @ terms(do, "scores V' db", chunk), "V' in o'")
        every = []
        for at in reversed(range(keeps.shape[-3])):
            ds = dither(ds, "S''", SINGLE)
            dgiven = keeps[..., at, :, :] @ terms(ds, "k V' db", depth)
            dkept = dgiven
            if behind is not None:
                dgiven = dither(dgiven, "exp(G_C - G) V''")
                dkept = dgiven * behind[..., at, :, :]
            dfresh = dither(scored[..., at, :, :] + dither(dkept, "V' in S'"), "V''")
            dheld = dither(erased[..., at, :, :].mT @ terms(dfresh, "W S db", chunk), "S in V''")
            every.append((ds, dgiven, dfresh))
            ds = torch.addcmul(dither(read[..., at, :, :] - dheld, "S'"), whole[..., at, :, :], ds)
        dstates, dgiven, dfresh = (torch.stack(each[::-1], -3) for each in zip(*every, strict=True))
        dkeeps = given @ terms(dstates, "k V' da", width).mT
        dreads, dscores = (terms(do, f"{place} da", width) @ x.mT for place, x in (("q S", held), ("scores V'", fresh)))
        derased = -terms(dfresh, "W S da", width) @ held.mT
        dwhole = (dither(states, "S stored") * dither(dstates, "dS stored")).sum_to_size(whole.shape)
        dbehind: tuple[Tensor | None, Tensor | None] = (None, None)
        if behind is not None:
            dbehind = _factor_gradients(fresh, dgiven, behind, arithmetic, "V' exp(G_C - G)", twice=True)
        return dkeeps, dreads, dscores, dfresh, derased, dwhole, *dbehind, ds, None


def _summed_tokens(x: Tensor, arithmetic: Arithmetic) -> int:
    """How many tokens an implementation sums at once: a recurrence carries them in its state, which drifts."""
    return 1 if arithmetic.algorithm == "recurrent" else x.shape[-2]
