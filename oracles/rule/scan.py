"""The states of the disturbed rules from chunk to chunk, forward and backward. Both classes of algorithm use it.

Only this part of a rule goes from chunk to chunk. Everything else is computed for all chunks at once.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracles.arithmetic.room import fitting
from oracles.arithmetic.rounding import SINGLE, Arithmetic
from oracles.rule.scores import factors_back

GRAPH = {"cpu": 2**32, "cuda": 2**34}  # bytes of a segment; in a call of several, the backward computes all but the last again
ERASED = ("W in o'", "W in S'")
_KEPT = 2**20  # up to so many numbers, in all runs, the drift of a shape is cached: on a GPU, making it waits
DRIFT = 1 / 6  # of a unit roundoff for each token; a tolerance, KAPPA times their spread, then has 1.15 of them: over one rounding


def segment_chunks(size: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> int:
    """Return the chunks of a segment: as many as fit with their graphs into GRAPH bytes of a dtype.

    At its peak, a graph has 51 to 67 numbers for each token and channel (measured at widths 64 and 128, in either class); 60 are
    assumed.
    """
    chunk_bytes = 60 * dtype.itemsize * size * math.prod(v.shape[1:-1]) * (k.shape[-1] + v.shape[-1])
    return max(1, fitting(GRAPH.get(k.device.type, GRAPH["cuda"]), k.device) // chunk_bytes)


class Scan(NamedTuple):
    """What takes the states from chunk to chunk, or the cotangents of these tensors; `behind` is None if only k decays."""

    keeps: Tensor
    reads: Tensor
    scores: Tensor
    erased: Tensor
    whole: Tensor
    behind: Any


class States(NamedTuple):
    """For each chunk: the state before it, as computed and as stored; V' as it is read, and as it is kept for the state."""

    before: Tensor
    stored: Tensor
    fresh: Tensor
    addend: Tensor


def scanned(scan: Scan, written: Tensor, state: Tensor, counts: list[int], arithmetic: Arithmetic) -> tuple[Tensor, Tensor, States]:
    """Compute the states from chunk to chunk; return o, the states after, and what `scanned_back` needs.

        S stored, V' = U - W S, V' and decayed V' stored       S <- exp(G_C) S + keeps^T V'       o = reads S + scores V'

    Decayed V' is V' if only k can decay (`behind` is None). Only S, and in the backward its cotangent, goes from chunk to chunk, in
    steps of `counts` sequences. Everything else is computed for all chunks at once.

    An implementation may add the tokens of a chunk to S one after another, or compute S <- (exp(G_C) - keeps^T W) S + keeps^T U. So
    S drifts (`_slip`), however small V' is. Errors of exp(G_C) are no larger than that.
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
    every, ended, slip = [], [], _slip(state, "S", chunk, arithmetic)
    for news, erase, write, onward, all_of in zip(
        written.split(counts), erases, writes, onwards, scan.whole.split(counts), strict=True
    ):
        ended.append(state[len(news) :])
        state = state[: len(news)]
        memory = dither(state, "S")
        fresh = rough(news - erase @ memory, grid)
        decayed = (fresh if onward is None else rough(fresh, onward)) * apart
        every.append((state, memory, fresh, decayed))
        state = slip * dither(torch.addcmul(write @ decayed, all_of, state), "S'", SINGLE)
    before, memory, fresh, decayed = (_joined(column) for column in zip(*every, strict=True))
    fresh = decayed if behind is None else fresh * back
    o = terms(scan.reads, "q S", depth) @ memory + terms(scan.scores, "scores V'", chunk) @ fresh
    return o, _joined([state, *(part for part in reversed(ended) if len(part))]), States(before, memory, fresh, decayed)


def correction_states(scan: Scan, missed: Tensor, counts: list[int]) -> Tensor:
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


def scanned_back(
    scan: Scan,
    states: States,
    do: Tensor,
    ds: Tensor,
    counts: list[int],
    arithmetic: Arithmetic,
    width: int,
) -> tuple[Tensor, Scan, Tensor]:
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
    every, slip = [], _slip(ds, "S''", chunk, arithmetic)
    dfinal, ds = ds, ds[:0]
    steps = *(x.split(counts) for x in (keeps, scan.erased, scan.whole, read, scored)), onwards
    for keep, erase, all_of, read_of, scored_of, onward in reversed(list(zip(*steps, strict=True))):
        ds = _joined([part for part in (ds, dfinal[len(ds) : len(keep)]) if len(part)])
        ds = slip * dither(ds, "S''", SINGLE)
        dgiven = rough(keep @ terms(ds, "k V' db", depth), grid)
        dkept = dgiven if onward is None else rough(dgiven, onward)
        dfresh = dither(torch.addcmul(scored_of, dkept, apart), "V''")
        dheld = rough(erase.mT @ terms(dfresh, "W S db", chunk), into)
        every.append((ds, dgiven, dkept, dfresh))
        ds = torch.addcmul(dither(torch.addcmul(read_of, dheld, out_of, value=-1), "S'"), all_of, ds)
    after, dgiven, dkept, dfresh = (_joined(column[::-1]) for column in zip(*every, strict=True))
    if arithmetic.product == SINGLE and chunk > 1:
        # All tokens of a chunk have read the same dS. Where each is added to dS by itself, they read it after further roundings, of
        # which two come with a token: that of q do, and that of k dv.
        size = torch.copysign(keeps.abs() @ after.abs() * (1.0 if behind is None else behind), dfresh)
        dfresh = dfresh + dither(size, "dS of a token", SINGLE - 1).sub_(size)
    dkeeps = states.addend @ terms(after, "k V' da", width).mT
    dreads, dscores = (terms(do, f"{place} da", width) @ x.mT for place, x in (("q S", states.stored), ("scores V'", states.fresh)))
    # A parallel scan takes states from chunk to chunk by matrices, S <- (exp(G_C) - keeps^T W) S + keeps^T U. There U and W each
    # have a cotangent from o and one from S'. If these cancel in V'', and U and W S in V', the errors of four products remain.
    dnews = dfresh
    if arithmetic.algorithm != "recurrent":
        uses = torch.stack([scored, dkept * apart], -3)
        dnews = dfresh + arithmetic.stacked(uses, ERASED).sub_(uses).sum(-3)
    derased = torch.neg(terms(dnews, "W S da", width) @ states.stored.mT)
    dwhole = dither(states.before, "S stored", arithmetic.memory) * dither(after, "dS stored", arithmetic.memory)
    dwhole = dwhole.sum_to_size(scan.whole.shape)
    dbehind = None
    if behind is not None:
        dgiven = dgiven * back
        parts = factors_back(((states.fresh, dgiven),), behind, ("V' exp(G_C - G)",), arithmetic)
        dbehind = parts[0].squeeze(-3), parts[1]
    return dfresh, Scan(dkeeps, dreads, dscores, derased, dwhole, dbehind), ds


def _slip(state: Tensor, place: str, chunk: int, arithmetic: Arithmetic) -> Tensor | float:
    """Return the factor by which states drift with each chunk, if its tokens are added to them one after another.

    Where tokens repeat, each addition rounds as the last one did, as long as the state's exponent stays what it is.
    """
    if chunk == 1 or not arithmetic.rounds:
        return 1.0
    make = _fractions if arithmetic.runs * state.shape[-2:].numel() <= _KEPT else _fractions.__wrapped__
    fractions = make(arithmetic, f"drift of {place}", (*[1] * (state.ndim - 2), *state.shape[-2:]), state.device)
    return (1.0 + DRIFT * chunk * fractions).to(state.dtype)


@functools.lru_cache(8)
def _fractions(arithmetic: Arithmetic, place: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return arithmetic.drift(torch.empty(shape, device=device), place)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _summed_tokens(x: Tensor, arithmetic: Arithmetic) -> int:
    """Return how many tokens an implementation sums at once; a recurrence carries them in its state, which drifts instead."""
    return 1 if arithmetic.algorithm == "recurrent" else x.shape[-2]
