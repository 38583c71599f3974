"""The chunkwise form with the roundings of chunkwise kernels, and its backward (see oracles/rule/disturbed.py)."""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracles.arithmetic.rounding import EXACT, Arithmetic, added, summed
from oracles.rule.scan import Scan, scanned, scanned_back, segment_chunks
from oracles.rule.scores import decayed_scores, decayed_scores_back, factors_back, side_by_side, stacked_products, sums_from
from oracles.rule.segments import Segment

MERGED = 16  # tokens of the blocks of (I + A)^-1 that products merge
NARROW = torch.float32  # dtype of chunkwise runs in half precision and TF32


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
    o: Tensor


@dataclasses.dataclass(frozen=True)
class Chunkwise:
    """The chunkwise form of q, k, v, g, beta [chunk, runs, HV, C, width]; every use of an operand stores its own cotangent."""

    scale: float
    arithmetic: Arithmetic
    channels: bool

    def most(self, size: int, k: Tensor, v: Tensor) -> int:
        """Return as many chunks as memory allows."""
        return segment_chunks(size, k, v, self.dtype(k))

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
        pair = arithmetic.stacked(stacked_products((k, beta), (q, scale)), ("beta k", "scale q"))
        products, decay = decayed_scores(pair, k, total, arithmetic, channels=channels)
        corrections, scores = products.unbind(-3)
        solved, inverse = _inverse(corrections, arithmetic)
        right = side_by_side(v, grown, k)
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
        scan = Scan(keeps, reads, dither(scores, "scores"), erased, end.exp().mT, behind)
        o, final, states = scanned(scan, written, state, segment.counts, arithmetic)
        of = _OfChunkwise(k, beta, total, grown, ahead, pair, products, decay, solved, inverse, right, start, o)
        return o, final, (of, scan, states)

    def backward(self, segment: Segment, tape: Any, do: Tensor, dstate: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the cotangents of the tokens, and of the states before the segment."""
        of, scan, states = tape
        scale, arithmetic, channels = self.scale, self.arithmetic, self.channels
        dither, (chunk, depth) = arithmetic.dither, of.k.shape[-2:]
        widths = of.right.shape[-1] - depth, depth
        counts = segment.counts
        written, dscan, dstate = scanned_back(scan, states, do, dstate, counts, arithmetic, widths[0])

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
        dpair, dkeys, dtotal = decayed_scores_back(
            dproducts, of.pair, of.k, of.total, of.products, of.decay, arithmetic, channels=channels
        )
        stored = torch.cat([dpair, dkeys, dscan.reads.unsqueeze(-3), dscan.keeps.unsqueeze(-3)], -3)
        dpair, dkeys, ends = arithmetic.stacked(stored, STORED).split(2, -3)
        sums = [(dpair[..., 0, :, :] * of.k).sum(-1), *((terms.sum(-1)) for terms in (dstart * of.right).split(widths, -1))]
        dbeta = arithmetic.stacked(torch.stack(sums, -2).unsqueeze(-1), DBETA, summed(max(widths))).sum(-3)

        # exp(G) q, exp(G_C - G) k, exp(G) k
        dread, dkeep = ends.unbind(-3)
        once, again = factors_back(((of.pair[..., 1, :, :], dread), (of.k, dkeep), (of.k, dgrown)), of.total, FACTORS, arithmetic)
        ends = stacked_products((dread, of.grown), (dkeep, of.ahead))
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
        if not channels and arithmetic.rounds:
            # The gradient of G is also o do - v dv, sums over the values' channels whose terms may be larger than those over the
            # keys' channels. Where the decay is a factor beside the state, autograd rounds two parts of v dv: V' V'', and the rest.
            terms = stacked_products((of.o, do), (of.right[..., : widths[0]], dv), (states.fresh, written))
            dtotal.add_(arithmetic.stacked(terms, OF_VALUES, summed(widths[0])).sub_(terms).sum((-3, -1)).unsqueeze(-1))
        dg = dither(sums_from(dither(dtotal, "G'", summed(chunk))), "dg'", summed(chunk))
        return (dq, dk, dv, dg, dbeta), dstate


STORED = ("beta k'", "q in scores'", "k in A'", "k in scores'", "exp(G) q'", "exp(G_C - G) k'")
DBETA = ("dbeta A'", "dbeta U'", "dbeta W'")
OF_VALUES = ("o do", "v dv", "V' V''")
FACTORS = ("q exp(G)", "k exp(G_C - G)", "exp(G) k")


@functools.lru_cache(64)
def _identity(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(tokens, dtype=dtype, device=device)


def _inverse(a: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Return T = (I + A)^-1, and T as stored; only the part of A below the diagonal is used."""
    # A may be stored too, and substitution solves a system that is off by up to n roundings an entry (Higham 2002, theorem 8.5).
    # Blocks of 16 that are merged by products reach that: with the root of n in place of n, dk was once off by 19 sigma.
    # TF32 products, which are also used where half precision stores the result, truncate both operands: an error of one sign,
    # merge after merge.
    a = arithmetic.dither(a, "A", min(arithmetic.stored, arithmetic.inverse, added(a.shape[-1])))
    solved = torch.linalg.solve_triangular(a, _identity(a.shape[-1], a.dtype, a.device), upper=False, unitriangular=True)
    if arithmetic.inverse < EXACT and a.shape[-1] > MERGED:
        # L is the part of A outside the diagonal blocks, and D are the blocks of T on the diagonal. Merges solve T = D - D L T, so
        # an error e of what D multiplies becomes -T e. They read T and D in TF32: e is L dT, or D^-1 dD L T, where D^-1 is I + A -
        # L. Where keys repeat, sums of T cancel. Errors of A cancel with them, as T (dA) T has T on both sides, and these do not.
        outside = a * _apart(a.shape[-1], a.dtype, a.device)
        operands = torch.stack([solved, solved - solved * _apart(a.shape[-1], a.dtype, a.device)], -3)
        errors = arithmetic.stacked(operands, ("T in merges", "D"), arithmetic.inverse + 1).sub_(operands)
        of_solved, of_blocks = errors.unbind(-3)
        of_blocks = of_blocks + (a - outside) @ of_blocks
        solved = solved - solved @ (outside @ of_solved + of_blocks @ (outside @ solved))
    return solved, arithmetic.dither(solved, "T")


@functools.lru_cache(64)
def _apart(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 1 for pairs of tokens in different blocks of MERGED, and 0 for others."""
    blocks = torch.arange(tokens, device=device) // MERGED
    return (blocks.unsqueeze(-1) != blocks).to(dtype)


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
