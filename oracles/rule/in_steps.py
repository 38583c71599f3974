"""The recurrence with the roundings of recurrent kernels, in chunks, and its backward (`recurrent` in disturbed.py)."""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracles.arithmetic.rounding import EXACT, SINGLE, Arithmetic, summed
from oracles.rule.chunkwise import inverted, substituted
from oracles.rule.scan import Scan, States, correction_states, scanned, scanned_back, segment_chunks
from oracles.rule.scores import decayed_scores, decayed_scores_back, gathered, side_by_side, stacked_products, sums_from
from oracles.rule.segments import Segment

FLOAT64 = EXACT - 5  # bits of a float64 sum over a chunk
_KEPT = 2**20  # up to so many numbers, in all runs, what calls of one shape share is cached
PLAIN = Arithmetic.exact()


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
class Recurrent:
    """The recurrence in chunks: keys and queries [chunk, runs, HV, halves, C, K]; values' channels are in one or two halves."""

    scale: float
    arithmetic: Arithmetic
    linear: bool = False

    def most(self, size: int, k: Tensor, v: Tensor) -> int:
        """Return as many chunks as memory allows."""
        return segment_chunks(size, k, v, self.dtype(k))

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
            make = drifts if arithmetic.runs * chunk * depth <= _KEPT else drifts.__wrapped__
            slips, lost, order, back = make(arithmetic, chunk, depth, g.shape[-1], v.shape[-1], v.device)
            if (inside := segment.inside(g.ndim)) is not None:
                slips, lost = slips * inside, lost * inside.unsqueeze(-3)
            g, drift = g if self.linear else g + slips, lost.cumsum(-2).exp()
        v, state = (_halves(tensor, order) for tensor in (v, state))
        g, beta = g.unsqueeze(-3), beta.unsqueeze(-3)
        reads, recalls, writes = x.unbind(-3)
        writes, drifted = writes / drift, drift[..., -1:, :]
        pair, total = stacked_products((recalls, drift), (reads, drift)), g.cumsum(-2)
        grown, last = total.exp(), total[..., -1:, :]
        left, whole = (last - total).exp() * drifted, grown[..., -1:, :] * drifted
        products, decay = decayed_scores(pair, writes, total, PLAIN, channels=channels)
        right = side_by_side(v, grown, pair[..., 0, :, :])
        corrections = beta * products[..., 0, :, :]
        inverses = inverted(corrections)
        solved = substituted(corrections, inverses, beta * right)
        written, erased = solved.split((v.shape[-1], depth), -1)
        scan = Scan(left * writes, grown * pair[..., 1, :, :], products[..., 1, :, :], erased, whole.mT, None)
        o, final, states = scanned(scan, written, state, segment.counts, arithmetic)
        missed = None
        if arithmetic.summed_again < EXACT:
            before, memory, fresh, _ = states
            stored = arithmetic.dither(fresh, "corrected values", arithmetic.summed_again)
            missed = stored - fresh
            states = States(before, memory + correction_states(scan, missed, segment.counts), stored, stored)
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
            states = States(before, memory, beside, beside)
        written, dscan, dstate = scanned_back(scan, states, do, dstate, segment.counts, arithmetic, half)
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
        dpair, dwrites, dtotal = decayed_scores_back(
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
        dtotal = dtotal + gathered(parts, of.total)
        dtotal[..., -1:, :].add_(gathered(keep_terms.sum(-2, keepdim=True), of.total) + gathered(all_of, of.total))
        dg = arithmetic.dither(sums_from(dtotal.sum(-3)), "g'", SINGLE)
        if apart is not None:  # after dG, which has no such errors: the recurrence never forms the k.dk that dG uses here
            dwrites = torch.addcmul(dwrites, of.beta, apart)
        dx = torch.stack([dpair[..., 1, :, :] * of.drift, dpair[..., 0, :, :] * of.drift, dwrites / of.drift], -3)
        dx = _apart_back(dx, arithmetic)
        dq, dk = scale * dx[..., 0, :, :], dx[..., 1:, :, :].sum(-3)
        return (dq, dk, _whole(dv, of.back), dg, dbeta.sum(-3)), _whole(dstate, of.back)


def _written(cotangents: Tensor, pair: Tensor, writes: Tensor, total: Tensor, products: Tensor, decay: Tensor | None) -> Tensor:
    """Return the gradient of keys from `decayed_scores_back` without rounding, for both x together."""
    if decay is None:
        return decayed_scores_back(cotangents, pair, writes, total, products, decay, PLAIN, channels=True)[1].sum(-3)
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
def drifts(
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
