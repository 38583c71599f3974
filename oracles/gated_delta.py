"""The gated delta rule in float64 (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", arXiv 2412.06464).

Per sequence and value head, with the state S in R^{K x V}:

    S <- exp(g_t) S                              decay
    S <- S + k_t (x) beta_t (v_t - S^T k_t)      correct what key k_t recalls
    o_t = scale S^T q_t                          read

`definition` is those lines. `recurrent` and `chunkwise` compute the same map for whole batches, in the arithmetic of the
two classes of algorithm that kernels use; with one run they are exact, and tests/test_oracles.py proves them equal to the
definition (in float64, and in integers modulo a prime).

Chunkwise (WY) form, G = cumsum(g) inside a chunk, A_ij = beta_i exp(G_i - G_j) k_i.k_j for i > j, else 0:

    T = (I + A)^-1      U = T (beta v)      W = T (beta exp(G) k)
    V' = U - W S        o = scale (exp(G) q S + tril(q k^T exp(G_i - G_j)) V')
    S <- exp(G_C) S + k^T (exp(G_C - G) V')
"""

import math

import torch
from torch import Tensor

from oracles.rounding import SINGLE, Arithmetic, summed

EPS = 1e-6
RSTD_BITS = SINGLE - 1  # a sum, a root and a division, or two products: more than one rounding


def definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [T, V] and the final state [K, V] of one head of one sequence: q, k [T, K], v [T, V], g, beta [T]."""
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp() * state
        state = state + torch.outer(k_t, beta_t * (v_t - k_t @ state))
        rows.append(scale * (q_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


def l2norm(x: Tensor, eps: float = EPS) -> Tensor:
    """x * rsqrt(sum(x^2) + eps) over the last axis: each head's vector has norm 1, or less where eps matters."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def repeat_heads(x: Tensor, value_heads: int, axis: int = -2) -> Tensor:
    """Value head h reads key head h // (value_heads // heads): grouped value attention (GVA), repeat_interleave."""
    heads = x.shape[axis]
    if heads == 0 or value_heads % heads:
        raise ValueError(f"value_heads must be a multiple of heads {heads}, got {value_heads}")
    return x.repeat_interleave(value_heads // heads, dim=axis)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """The definition, batched: q, k [runs, ..., T, K], v [runs, ..., T, V], g, beta [runs, ..., T], state [runs, ..., K, V].

    Recurrent and decode kernels keep float32 throughout: the decay, the state after its decay and after its update, what is
    written to it, and the two sums over K round, every step. Where tokens repeat, the same errors are written again and again.
    """
    depth, rows = q.shape[-1], []
    decay = arithmetic.single(arithmetic.single(g, "g").exp(), "decay")
    steps = (x.unbind(-2) for x in (q, k, v, decay.unsqueeze(-1), beta.unsqueeze(-1)))
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
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, padding)).unflatten(-2, (-1, chunk)) for x in (q, k, v))
    g, beta = (torch.nn.functional.pad(x, (0, padding)).unflatten(-1, (-1, chunk)) for x in (g, beta))
    betas = [arithmetic.sums(beta.unsqueeze(-1), f"dbeta {part}", max(v.shape[-1], depth)) for part in ("A", "U", "W")]

    # [..., chunks, chunk]: the cumulative gate is a float32 sum, forward and (reversed) backward.
    total = arithmetic.single(arithmetic.sums(g, "dg", chunk).cumsum(-1), "G", chunk)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    with torch.no_grad():
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    grown = arithmetic.sums(total, "G in exp(G)", depth).exp().unsqueeze(-1)
    end = arithmetic.sums(total[..., -1:], "G_C", chunk * depth)
    # An implementation decays k or V' before it stores them for the state: some runs do one, some the other.
    left = end - arithmetic.sums(total, "G in exp(G_C - G)", depth)
    share = arithmetic.choice(left)
    ahead, behind = (share * left).exp().unsqueeze(-1), ((1.0 - share) * left).exp().unsqueeze(-1)
    whole = end.exp().unsqueeze(-1)

    operand, use, multiply = arithmetic.operand, arithmetic.use, arithmetic.multiply
    corrections: Tensor = _Scores.apply(operand(betas[0] * k, "beta k"), use(k, "k in A"), total, decay.tril(-1), arithmetic, "A")
    solved: Tensor = _Inverse.apply(corrections, arithmetic)
    written = operand(multiply(use(solved, "T in U"), operand(betas[1] * v, "beta v"), "U = "), "U")
    erased = operand(multiply(use(solved, "T in W"), operand(betas[2] * grown * k, "beta exp(G) k"), "W = "), "W")
    q = operand(scale * q, "scale q")  # stored, where an implementation scales q and not what it reads
    scores = operand(_Scores.apply(use(q, "q in scores"), use(k, "k in scores"), total, decay, arithmetic, "q k"), "scores")
    reads = operand(q * grown, "exp(G) q")
    keeps = operand(ahead * use(k, "k in S"), "exp(G_C - G) k")

    rows = []
    pieces = (x.unbind(-3) for x in (keeps, reads, scores, written, erased, behind, whole))
    for keeps_c, reads_c, scores_c, written_c, erased_c, behind_c, whole_c in zip(*pieces, strict=True):
        held = operand(state, "S")
        fresh = operand(written_c - multiply(erased_c, use(held, "S in V'"), "W S"), "V'")
        rows.append(multiply(reads_c, use(held, "S in o"), "q S") + multiply(scores_c, use(fresh, "V' in o"), "scores V'"))
        kept: Tensor = _Decayed.apply(whole_c, state, arithmetic)
        given = operand(behind_c * use(fresh, "V' in S"), "exp(G_C - G) V'")
        state = arithmetic.single(kept + multiply(keeps_c.mT, given, "k V'"), "S'")
    return torch.cat(rows, -2)[..., :tokens, :], state


class _Scores(torch.autograd.Function):
    """(x k^T) decay, where decay_ij = exp(G_i - G_j) on and below (or only below) the diagonal, else 0.

    With D the product of scores and cotangents, dG_i = sum_j D_ij - sum_j D_ji, to which the diagonal adds nothing. Kernels take
    it as x_i.dx_i - k_i.dk_i, whose terms are as large as ever where decays are strong and D small: their rounding is added.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        k: Tensor,
        total: Tensor,  # noqa: ARG004 - decay is computed from it; here so that it gets its gradient
        decay: Tensor,
        arithmetic: Arithmetic,
        place: str,
    ) -> Tensor:
        bits = min(arithmetic.product, summed(x.shape[-1]))
        products = arithmetic.dither(x, place, bits) @ k.mT
        ctx.save_for_backward(x, k, products, decay)
        ctx.back = arithmetic, place  # type: ignore[attr-defined]
        return products * decay

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, k, products, decay = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place = ctx.back  # type: ignore[attr-defined]
        chunk, width = x.shape[-2:]
        bits = min(arithmetic.product, summed(chunk))
        ds = cotangents[0] * decay
        dx = arithmetic.dither(ds, f"{place} dx", bits) @ k
        dk = arithmetic.dither(ds, f"{place} dk", bits).mT @ x
        off = (ds * products).tril(-1)
        dg = off.sum(-1) - off.sum(-2)
        if arithmetic.runs > 1:
            for sign, name, a, da in ((1, "x.dx", x, dx), (-1, "k.dk", k, dk)):
                terms = a * da
                dg = dg + sign * (arithmetic.dither(terms, f"{place} {name}", summed(chunk * width)) - terms).sum(-1)
        return dx, dk, dg, None, None, None


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
        return product.sum((-2, -1), keepdim=True), decay * cotangents[0], None


class Normalised(torch.autograd.Function):
    """L2 norm with its result y stored; backward, rstd (dy - y (y.dy)) uses y and dy as stored, and rounds each product.

    dx is what is left of dy across x: with one channel, or dy along x, only the roundings are left, so each has its place.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, arithmetic: Arithmetic, place: str) -> Tensor:
        rstd = (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
        rstd = arithmetic.dither(rstd, f"{place} rstd", RSTD_BITS)
        y = arithmetic.dither(arithmetic.dither(x * rstd, f"{place} product", SINGLE), place)
        ctx.save_for_backward(y, rstd)
        ctx.back = arithmetic, place  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        y, rstd = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place = ctx.back  # type: ignore[attr-defined]
        dy = arithmetic.dither(cotangents[0], f"{place} dy")
        along = arithmetic.dither((y * dy).sum(-1, keepdim=True), f"{place} y.dy", summed(y.shape[-1]))
        across = arithmetic.dither(dy * rstd, f"{place} dy rstd", SINGLE) - arithmetic.dither(
            along * y * rstd, f"{place} y rstd", RSTD_BITS
        )
        return across, None, None
