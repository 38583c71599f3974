"""The delta rules in float64 at real lengths: the chunkwise form with a backward of its own.

For each sequence and value head, let G = cumsum(g) inside a chunk of C tokens (g is one number for each token and head or, in KDA,
for each channel of the key too), E_ij = exp(G_i - G_j) for i >= j, and take products of keys channel by channel:

    A_ij = beta_i sum_c k_ic k_jc E_ijc,  i > j        P_ij = scale sum_c q_ic k_jc E_ijc,  i >= j
    (I + A) [U | W] = [beta v | beta exp(G) k]         unit lower triangular
    V' = U - W S                                       what the chunk writes, given the state S before it
    o  = scale exp(G) q S + P V'
    S <- exp(G_C) S + L^T V' = M S + L^T U,            L = exp(G_C - G) k,   M = exp(G_C) - L^T W

Only S goes from chunk to chunk, by one product for each chunk; everything else is computed for many chunks at once. (If no chunk of
a segment follows another, as for short sequences, S needs only V', and M is not computed.) In the backward, with dS the cotangent
of the state after the chunk, the last line runs in reverse,

    dV' = P^T do + L dS        dS <- M^T dS + (scale exp(G) q)^T do - W^T P^T do

and everything else is again computed at once. A segment (oracles/rule/segments.py) is as many chunks as fit into _SEGMENT bytes.
tests/formulas/test_oracles.py shows that all of it equals the definition.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from oracles.arithmetic.room import fitting
from oracles.rule.decay import decayed, decayed_backward
from oracles.rule.segments import Segment, rule

_BLOCK = 32  # tokens
_SEGMENT = {
    "cpu": 2**26,
    "cuda": 2**33,
}  # bytes; a CPU was fastest with this among 2^24 to 2^30, an H200 with twice this among 2^30 to 2^34


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, lengths: list[int], chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """Return o [T, HV, V] and the final states [N, HV, K, V] of consecutive sequences of `lengths` tokens, which add up to T.

    q, k [T, H, K], v [T, HV, V], g [T, HV, 1] or, with a gate for each channel, [T, HV, K], beta [T, HV], state [N, HV, K, V]; all
    are float64. `chunk` is a number of tokens; 0 (the default) selects the one with the least work. ValueError for other shapes or
    dtypes, or lengths that do not add up.
    """
    _check(q, k, v, g, beta, state, scale, lengths, chunk)
    size = chunk or best_chunk(lengths, k.shape[-1], v.shape[-1])
    if g.shape[-1] > 1:  # products that decay by channel need powers of two (oracles/rule/decay.py)
        size = 1 << (size - 1).bit_length()
    heads = k.shape[1]
    tokens = q.unsqueeze(2), k.unsqueeze(2), *(x.unflatten(1, (heads, -1)) for x in (v, g, beta.unsqueeze(-1)))
    o, final = rule(_Call(scale), tokens, state.unflatten(1, (heads, -1)), tuple(lengths), (size,) * len(lengths))
    return o.flatten(1, 2), final.flatten(1, 2)


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, lengths: list[int], chunk: int
) -> None:
    if k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"k must be [T, H, K] and v [T, HV, V], got shapes {tuple(k.shape)} and {tuple(v.shape)}")
    wrong = not isinstance(lengths, list | tuple) or any(type(length) is not int or length < 0 for length in lengths)
    if wrong or sum(lengths) != len(k):
        raise ValueError(f"lengths must be whole numbers from 0 up that add up to the {len(k)} tokens of k, got {lengths}")
    (tokens, heads, width), (value_heads, value_width) = k.shape, v.shape[1:]
    gates = g.shape[-1] if g.ndim and g.shape[-1] in (1, width) else 1
    for name, x, shape in (
        ("q", q, (tokens, heads, width)),
        ("k", k, (tokens, heads, width)),
        ("v", v, (tokens, value_heads, value_width)),
        ("g", g, (tokens, value_heads, gates)),
        ("beta", beta, (tokens, value_heads)),
        ("state", state, (len(lengths), value_heads, width, value_width)),
    ):
        if x.shape != shape or x.dtype != torch.float64:
            raise ValueError(f"{name} must have shape {shape} and be float64, got {tuple(x.shape)} and {x.dtype}")
    if heads == 0 or value_heads % heads:
        raise ValueError(f"HV must be a multiple of H = {heads}, got {value_heads}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 0:
        raise ValueError(f"chunk must be a whole number from 0 up, got {chunk!r}")


def best_chunk(lengths: list[int], width: int, value_width: int) -> int:
    """Return the tokens in a chunk for which the matrix products of all sequences cost least, padding included."""
    longest = max(lengths, default=1) or 1

    def work(size: int) -> float:
        within, across = size**2 * (3 * width + 2 * value_width), size * width * (width + 3 * value_width)
        return sum(-(-length // size) for length in lengths) * (within + across + width**2 * value_width)

    return min((size for size in (16, 32, 64, 128, longest) if size <= min(128, max(16, longest))), key=work)


@dataclasses.dataclass
class _Local:
    """What the chunks of a segment need besides the state; axes [chunk, H, HV / H, token, ...].

    The axis HV / H has size 1 for q and k.
    """

    q: Tensor
    k: Tensor
    beta: Tensor
    start: Tensor
    left: Tensor
    grown: Tensor
    whole: Tensor
    products: Tensor
    corrections: Tensor
    inverses: list[Tensor]
    solved: Tensor
    scores: Tensor
    total: Tensor
    factor: Tensor | None
    transition: Tensor | None

    @property
    def reads(self) -> Tensor:
        return self.q * self.grown

    @property
    def keeps(self) -> Tensor:
        return self.k * self.left


class _Tape(NamedTuple):
    """What a segment keeps for the backward: tensors of its chunks, the state before each chunk, and what each chunk writes."""

    local: _Local
    states: Tensor
    fresh: Tensor


@dataclasses.dataclass(frozen=True)
class _Call:
    """The computations of a segment (segments.py), scaled by `scale`; the axes between chunk and token are H and HV / H."""

    scale: float

    def most(self, size: int, k: Tensor, v: Tensor) -> int:
        """Return the chunks of a segment: as many as fit into _SEGMENT bytes.

        The size of a chunk is the number of float64 numbers that its backward takes.
        """
        (heads, groups, value_width), width = v.shape[1:], k.shape[-1]
        numbers = 8 * size * (width + value_width) + 8 * size**2 + 4 * width * value_width + width**2
        return max(1, fitting(_SEGMENT.get(k.device.type, _SEGMENT["cuda"]), k.device) // (8 * numbers * heads * groups))

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of x."""
        return x.dtype

    def forward(self, segment: Segment, tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor, _Tape]:
        """Return o, the states after the segment, and what the backward needs."""
        q, k, v, g, beta = tokens
        q = q * self.scale
        total = g.cumsum(-2)
        grown, left = total.exp(), (total[..., -1:, :] - total).exp()
        both, factor = decayed(torch.stack([k, q]), k, total)
        products, scores = both.unbind(0)
        corrections = beta * products
        inverses = inverted(corrections)
        start = torch.cat([v, (grown * k).expand(*v.shape[:-1], k.shape[-1])], -1)
        solved = substituted(corrections, inverses, beta * start)
        written, erased = solved.split((v.shape[-1], k.shape[-1]), -1)
        whole, keeps = grown[..., -1, :].unsqueeze(-1), k * left
        if len(segment.steps) == 1:  # no chunk follows another: no transition is needed, which is as large as a state
            transition, memory = None, state
            fresh = written - erased @ memory
            final = whole * memory
            final.flatten(0, 2).baddbmm_(keeps.mT.flatten(0, 2), fresh.flatten(0, 2))
        else:
            transition = -(keeps.mT @ erased)
            transition.diagonal(dim1=-2, dim2=-1).add_(whole.squeeze(-1))
            states = torch.cat([state, keeps.mT @ written])
            for chunks, before, after in segment.states():
                states[after].flatten(0, 2).baddbmm_(transition[chunks].flatten(0, 2), states[before].flatten(0, 2))
            memory, final = states[segment.before], states[segment.last]
            fresh = written - erased @ memory
        local = _Local(
            q, k, beta, start, left, grown, whole, products, corrections, inverses, solved, scores, total, factor, transition
        )
        return local.reads @ memory + scores @ fresh, final, _Tape(local, memory, fresh)

    def backward(self, segment: Segment, tape: _Tape, do: Tensor, dstate: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the cotangents of q, k, v, g, beta, and of the states before the segment."""
        x, memory, fresh = tape
        value_width, width = fresh.shape[-1], x.k.shape[-1]
        erased, members = x.solved[..., value_width:], len(dstate)
        dfresh = x.scores.mT @ do
        if x.transition is None:
            after = dstate
            dfresh += x.keeps @ after
            dbefore = x.whole * after
            dbefore.flatten(0, 2).baddbmm_(x.reads.mT.flatten(0, 2), do.flatten(0, 2))
            dbefore.flatten(0, 2).baddbmm_(erased.mT.flatten(0, 2), dfresh.flatten(0, 2), alpha=-1)
        else:
            directions = memory.new_empty(members + segment.chunks, *dstate.shape[1:])
            directions[segment.before] = x.reads.mT @ do - erased.mT @ dfresh
            directions[segment.last] = dstate
            for chunks, before, after in reversed(list(segment.states())):
                directions[before].flatten(0, 2).baddbmm_(x.transition[chunks].flatten(0, 2).mT, directions[after].flatten(0, 2))
            dbefore, after = directions[:members], directions[members:]
            dfresh += x.keeps @ after
        dscores = do @ fresh.mT  # used at and below the diagonal only
        dreads, dkeeps = do @ memory.mT, fresh @ after.mT
        dwhole = (memory * after).sum(-1).unsqueeze(-2)
        dsolved = torch.cat([dfresh, -dfresh @ memory.mT], -1)
        dright = substituted(x.corrections, x.inverses, dsolved, transposed=True)
        dcorrections = -(dright @ x.solved.mT).tril(-1)
        dbeta = (dright * x.start).sum(-1) + (dcorrections * x.products).sum(-1)
        dstart = x.beta * dright
        dv, dgrown_k = dstart.split((value_width, width), -1)
        both = torch.stack([x.beta * dcorrections, dscores])
        pair, products = torch.stack([x.k, x.q]), torch.stack([x.products, x.scores])
        dpair, dy, dg = decayed_backward(both, pair, x.k, x.total, products, x.factor)
        dk = self.shared(dpair[0]) + self.shared(dy.sum(0)) + self.shared(dkeeps * x.left + dgrown_k * x.grown)
        dq = self.scale * (self.shared(dpair[1]) + self.shared(dreads * x.grown))
        later, earlier, every = dreads * x.reads + dgrown_k * x.grown * x.k, dkeeps * x.keeps, dwhole * x.whole.mT
        if x.whole.shape[-2] == 1:
            later, earlier, every = (terms.sum(-1, keepdim=True) for terms in (later, earlier, every))
        # exp(G_i) depends on the gates up to i, exp(G_C - G_i) on those after i, exp(G_C) on all.
        dg = dg.sum(0) + later.flip(-2).cumsum(-2).flip(-2) + every
        dg[..., 1:, :] += earlier[..., :-1, :].cumsum(-2)
        return (dq, dk, dv, dg, dbeta.unsqueeze(-1)), dbefore

    def shared(self, x: Tensor) -> Tensor:
        """Return the sum over the value heads of a key head."""
        return x.sum(2, keepdim=True)


def inverted(a: Tensor) -> list[Tensor]:
    """Return the inverses of the diagonal blocks of I + a, for `substituted`.

    a [.., C, C] is lower triangular; its diagonal is not used.
    """
    cuts = range(0, a.shape[-1], _BLOCK)
    blocks = [a[..., cut : cut + _BLOCK, cut : cut + _BLOCK] for cut in cuts]
    unit = torch.eye(min(_BLOCK, a.shape[-1]), dtype=a.dtype, device=a.device)
    return [
        torch.linalg.solve_triangular(block, unit[: block.shape[-1], : block.shape[-1]], upper=False, unitriangular=True)
        for block in blocks
    ]


def substituted(a: Tensor, inverses: list[Tensor], b: Tensor, *, transposed: bool = False) -> Tensor:
    """Solve (I + a) x = b, or (I + a)^T x = b, for x, with b [.., C, W], by substitution in blocks; `inverses` are `inverted(a)`.

    This is as accurate as substitution by rows if the blocks are well conditioned (Demmel and Higham 1992), and uses matrix
    products.
    """
    x = torch.empty_like(b)
    places = [slice(index * _BLOCK, (index + 1) * _BLOCK) for index in range(len(inverses))]
    for index in reversed(range(len(places))) if transposed else range(len(places)):
        block, inverse = places[index], inverses[index]
        right = b[..., block, :]
        if transposed and index + 1 < len(places):
            done = slice(places[index + 1].start, None)
            right = right - a[..., done, block].mT @ x[..., done, :]
        elif not transposed and index:
            done = slice(0, block.start)
            right = right - a[..., block, done] @ x[..., done, :]
        x[..., block, :] = (inverse.mT if transposed else inverse) @ right
    return x
