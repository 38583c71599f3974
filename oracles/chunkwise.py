"""The delta rules in float64 at real lengths: the chunkwise form with its own backward.

Per sequence and value head, with G = cumsum(g) inside a chunk of C tokens (g one number a token and head, or one a channel of
the key: KDA), E_ij = exp(G_i - G_j) for i >= j and products of keys taken channel by channel:

    A_ij = beta_i sum_c k_ic k_jc E_ijc,  i > j        P_ij = scale sum_c q_ic k_jc E_ijc,  i >= j
    (I + A) [U | W] = [beta v | beta exp(G) k]         unit lower triangular
    V' = U - W S                                       what the chunk writes, given the state S before it
    o  = scale exp(G) q S + P V'
    S <- exp(G_C) S + L^T V' = M S + L^T U,            L = exp(G_C - G) k,   M = exp(G_C) - L^T W

Only S goes from chunk to chunk, by one product a chunk; all else is computed for many chunks at once. Backward, with dS the
cotangent of the state after the chunk, that line runs in reverse,

    dV' = P^T do + L dS        dS <- M^T dS + (scale exp(G) q)^T do - W^T P^T do

and the rest is again computed at once. A segment is as many chunks as fit into _SEGMENT bytes; only the states between
segments are kept, and backward computes a segment again. tests/test_oracles.py proves all of it equal to the definition.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from oracles.decay import decayed, decayed_backward

_BLOCK = 32  # tokens
_SEGMENT = {
    "cpu": 2**26,
    "cuda": 2**33,
}  # bytes; of 2^24 to 2^30 a CPU was fastest with this, of 2^30 to 2^34 an H200 with twice this


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, lengths: list[int], chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """o [T, HV, V] and the final states [N, HV, K, V]; sequences of `lengths` tokens, that add up to T, follow each other.

    q, k [T, H, K], v [T, HV, V], g [T, HV, 1] or, a channel each, [T, HV, K], beta [T, HV], state [N, HV, K, V], all float64.
    `chunk` is a number of tokens, by default (0) that of least work. ValueError if the lengths do not add up.
    """
    if not isinstance(chunk, int) or chunk < 0:
        raise ValueError(f"chunk must be a whole number from 0 up, got {chunk!r}")
    if min(lengths, default=0) < 0 or sum(lengths) != len(q):
        raise ValueError(f"lengths must be at least 0 and add up to the {len(q)} tokens of q, got {lengths}")
    size = chunk or best_chunk(lengths, k.shape[-1], v.shape[-1])
    if g.shape[-1] > 1:  # products that decay by channel are taken in halves of halves
        size = 1 << (size - 1).bit_length()
    o, final = _Rule.apply(q, k, v, g, beta, state, scale, tuple(lengths), size)
    return o, final


def best_chunk(lengths: list[int], width: int, value_width: int) -> int:
    """The tokens in a chunk for which the matrix products of all sequences cost least, padding included."""
    longest = max(lengths, default=1) or 1

    def work(size: int) -> float:
        within, across = size**2 * (3 * width + 2 * value_width), size * width * (width + 3 * value_width)
        return sum(-(-length // size) for length in lengths) * (within + across + width**2 * value_width)

    return min((size for size in (16, 32, 64, 128, longest) if size <= min(128, max(16, longest))), key=work)


class _Segment(NamedTuple):
    """Chunks computed at once, those of a step side by side, and the states around them.

    `tokens` are the chunks' tokens in order (a range where they follow each other), `places` where they stand in the chunks' rows
    (None where every row has one). `steps` are the chunks of each step: the first and how many, which are those of the first
    sequences of the block. A row of states is for each sequence that before the first step, then for each chunk that after it;
    `before` are the rows of the states before each chunk, `last` those after each sequence's last chunk in the segment.
    """

    tokens: Tensor | range
    places: Tensor | None
    steps: tuple[tuple[int, int], ...]
    before: Tensor | slice
    last: Tensor | slice

    @property
    def chunks(self) -> int:
        return sum(self.steps[-1])

    def states(self) -> Iterator[tuple[slice, slice, slice]]:
        """Step by step: its chunks, the rows of the states before them, and those of the states after them."""
        rows = 0
        for first, count in self.steps:
            after = self.steps[0][1] + first
            yield slice(first, first + count), slice(rows, rows + count), slice(after, after + count)
            rows = after


def _segments(lengths: tuple[int, ...], size: int, most: int, device: torch.device) -> Iterator[tuple[Tensor, list[_Segment]]]:
    """Blocks of sequences: which ones, and their segments in order.

    The sequences of a block are sorted by their number of chunks, so that those still running at a step are the first ones.
    """
    starts = [0, *itertools.accumulate(lengths)]
    order = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
    for first in range(0, len(order), most):
        members = order[first : first + most]
        counts = torch.tensor([-(-lengths[row] // size) for row in members])
        begin = torch.tensor([starts[row] for row in members])
        end = torch.tensor([starts[row + 1] for row in members])
        running = torch.arange(int(counts[0])).unsqueeze(-1) < counts  # [step, member]
        widths = running.sum(-1).tolist()
        step, member = running.nonzero(as_tuple=True)
        index = (begin[member] + step * size).unsqueeze(-1) + torch.arange(size)
        inside = index < end[member].unsqueeze(-1)
        block, at, row = [], 0, 0
        while at < len(widths):
            steps = [(0, widths[at])]
            while at + len(steps) < len(widths) and sum(steps[-1]) + widths[at + len(steps)] <= most:
                steps.append((sum(steps[-1]), widths[at + len(steps)]))
            at, count = at + len(steps), sum(steps[-1])
            block.append(_segment(index[row : row + count], inside[row : row + count], tuple(steps), device))
            row += count
        yield torch.tensor(members, device=device), block


def _segment(index: Tensor, inside: Tensor, steps: tuple[tuple[int, int], ...], device: torch.device) -> _Segment:
    tokens, places = index[inside], None if inside.all() else inside.flatten().nonzero().squeeze(-1).to(device)
    follow = int(tokens[-1] - tokens[0]) == len(tokens) - 1 and bool((tokens.diff() == 1).all())
    kept = range(int(tokens[0]), int(tokens[-1]) + 1) if follow else tokens.to(device)
    before: Tensor | slice = slice(0, sum(steps[-1]))
    last: Tensor | slice = slice(sum(steps[-1]), None)
    whole = _Segment(kept, places, steps, before, last)
    if steps[0][1] != steps[-1][1]:  # some sequences end within the segment
        rows = list(whole.states())
        before = torch.cat([torch.arange(each.start, each.stop) for _, each, _ in rows]).to(device)
        ends = torch.zeros(steps[0][1], dtype=torch.int64)
        for _, _, each in rows:
            ends[: each.stop - each.start] = torch.arange(each.start, each.stop)
        whole = whole._replace(before=before, last=ends.to(device))
    return whole


@dataclasses.dataclass
class _Local:
    """What the chunks of a segment need of no state; axes [chunk, H, HV / H, token, ...], one head group for q and k."""

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
    transition: Tensor

    @property
    def reads(self) -> Tensor:
        return self.q * self.grown

    @property
    def keeps(self) -> Tensor:
        return self.k * self.left


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        scale: float,
        lengths: tuple[int, ...],
        size: int,
    ) -> tuple[Tensor, Tensor]:
        heads, groups = k.shape[1], v.shape[1] // k.shape[1]
        call = _Call(heads, groups, scale, size)
        o, final = torch.zeros_like(v), state.clone()
        plan = [
            (members, [_Kept(segment) for segment in block])
            for members, block in _segments(lengths, size, call.most(k, v), k.device)
        ]
        for members, block in plan:
            carry = state.index_select(0, members)
            for kept in block:
                kept.before = carry.clone()
                kept.local, kept.held, kept.fresh = call.forward(kept.segment, q, k, v, g, beta, carry)
                call.put(o, kept.segment, call.outputs(kept))
                if kept is not plan[-1][1][-1]:  # backward begins with the last segment: it is not computed again
                    kept.local = kept.held = kept.fresh = None
            final.index_copy_(0, members, carry)
        if not any(ctx.needs_input_grad):  # type: ignore[attr-defined]
            return o, final
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.call, ctx.plan = call, plan  # type: ignore[attr-defined]
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta = ctx.saved_tensors  # type: ignore[attr-defined]
        call, plan = ctx.call, ctx.plan  # type: ignore[attr-defined]
        do, dfinal = cotangents
        results = [torch.zeros_like(x) for x in (q, k, v, g, beta)]
        dstate = dfinal.clone()
        for members, block in reversed(plan):
            carry = dfinal.index_select(0, members)
            for kept in reversed(block):
                if kept.local is None:
                    kept.local, kept.held, kept.fresh = call.forward(kept.segment, q, k, v, g, beta, kept.before.clone())
                parts = call.backward(kept, call.take(kept.segment, do), carry)
                kept.local = kept.held = kept.fresh = None
                for whole, part in zip(results, parts, strict=True):
                    call.put(whole, kept.segment, part)
            dstate.index_copy_(0, members, carry)
        return *results, dstate, None, None, None


@dataclasses.dataclass
class _Kept:
    """A segment and the state before it; what was computed of it, where that is at hand."""

    segment: _Segment
    before: Tensor | None = None
    local: _Local | None = None
    held: Tensor | None = None
    fresh: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _Call:
    """The shapes of one call, and its computations a segment."""

    heads: int
    groups: int
    scale: float
    size: int

    def most(self, k: Tensor, v: Tensor) -> int:
        """The chunks of a segment: as many as fit into _SEGMENT bytes, by the float64 numbers that each takes backward."""
        width, value_width = k.shape[-1], v.shape[-1]
        each = 8 * self.size * (width + value_width) + 8 * self.size**2 + 4 * width * value_width + width**2
        return max(1, _SEGMENT.get(k.device.type, _SEGMENT["cuda"]) // (8 * each * v.shape[1]))

    def take(self, segment: _Segment, x: Tensor) -> Tensor:
        """Tokens [T, heads, ...] to chunks [chunk, H, heads / H, token, ...], zeros where a chunk is padded."""
        tokens = segment.tokens
        rows = x[tokens.start : tokens.stop] if isinstance(tokens, range) else x.index_select(0, tokens)
        if segment.places is not None:
            rows = x.new_zeros(segment.chunks * self.size, *x.shape[1:]).index_copy_(0, segment.places, rows)
        chunks: Tensor = rows.unflatten(0, (-1, self.size)).unflatten(2, (self.heads, -1)).movedim(1, 3)
        return chunks.contiguous()

    def put(self, x: Tensor, segment: _Segment, chunks: Tensor) -> None:
        """The reverse of `take`, into x."""
        tokens, rows = segment.tokens, chunks.movedim(3, 1).reshape(-1, self.size, *x.shape[1:])
        if segment.places is None and isinstance(tokens, range):
            x[tokens.start : tokens.stop].unflatten(0, (-1, self.size)).copy_(rows)
            return
        rows = rows.flatten(0, 1)
        rows = rows if segment.places is None else rows.index_select(0, segment.places)
        if isinstance(tokens, range):
            x[tokens.start : tokens.stop] = rows
        else:
            x.index_copy_(0, tokens, rows)

    def forward(
        self, segment: _Segment, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, carry: Tensor
    ) -> tuple[_Local, Tensor, Tensor]:
        """What needs no state, the states before the chunks, and what they write; `carry` becomes the state after the segment."""
        q, k, v, g, beta = (self.take(segment, x) for x in (q, k, v, g, beta.unsqueeze(-1)))
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
        transition = -(keeps.mT @ erased)
        transition.diagonal(dim1=-2, dim2=-1).add_(whole.squeeze(-1))
        states = torch.cat([carry[: segment.steps[0][1]], (keeps.mT @ written).flatten(1, 2)])
        for chunks, before, after in segment.states():
            states[after].flatten(0, 1).baddbmm_(transition[chunks].flatten(0, 2), states[before].flatten(0, 1))
        carry[: segment.steps[0][1]] = states[segment.last]
        held = states[segment.before].unflatten(1, (self.heads, self.groups))
        fresh = written - erased @ held
        local = _Local(
            q, k, beta, start, left, grown, whole, products, corrections, inverses, solved, scores, total, factor, transition
        )
        return local, held, fresh

    def outputs(self, kept: _Kept) -> Tensor:
        """o of the chunks."""
        assert kept.local is not None and kept.held is not None and kept.fresh is not None
        return kept.local.reads @ kept.held + kept.local.scores @ kept.fresh

    def backward(self, kept: _Kept, do: Tensor, carry: Tensor) -> tuple[Tensor, ...]:
        """The cotangents of q, k, v, g, beta; `carry`, that of the state after the segment, becomes that of the one before."""
        x, held, fresh, segment = kept.local, kept.held, kept.fresh, kept.segment
        assert x is not None and held is not None and fresh is not None
        value_width, width = fresh.shape[-1], x.k.shape[-1]
        erased, members = x.solved[..., value_width:], segment.steps[0][1]
        dfresh = x.scores.mT @ do
        directions = held.new_empty(members + segment.chunks, *carry.shape[1:])
        directions[segment.before] = (x.reads.mT @ do - erased.mT @ dfresh).flatten(1, 2)
        directions[segment.last] = carry[:members]
        for chunks, before, after in reversed(list(segment.states())):
            directions[before].flatten(0, 1).baddbmm_(x.transition[chunks].flatten(0, 2).mT, directions[after].flatten(0, 1))
        carry[:members] = directions[:members]
        after = directions[members:].unflatten(1, (self.heads, self.groups))
        dfresh += x.keeps @ after
        dscores = do @ fresh.mT  # read at and below the diagonal only
        dreads, dkeeps = do @ held.mT, fresh @ after.mT
        dwhole = (held * after).sum(-1).unsqueeze(-2)
        dsolved = torch.cat([dfresh, -dfresh @ held.mT], -1)
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
            later, earlier, every = (each.sum(-1, keepdim=True) for each in (later, earlier, every))
        # exp(G_i) has the gates up to i, exp(G_C - G_i) those after i, exp(G_C) all.
        dg = dg.sum(0) + later.flip(-2).cumsum(-2).flip(-2) + every
        dg[..., 1:, :] += earlier[..., :-1, :].cumsum(-2)
        return dq, dk, dv, dg, dbeta.unsqueeze(-1)

    def shared(self, x: Tensor) -> Tensor:
        """The sum over the value heads of a key head."""
        return x.sum(2, keepdim=True)


def inverted(a: Tensor) -> list[Tensor]:
    """The inverses of the diagonal blocks of I + a, for `substituted`; a [.., C, C] is lower triangular, its diagonal not used."""
    cuts = range(0, a.shape[-1], _BLOCK)
    blocks = [a[..., cut : cut + _BLOCK, cut : cut + _BLOCK] for cut in cuts]
    unit = torch.eye(min(_BLOCK, a.shape[-1]), dtype=a.dtype, device=a.device)
    return [
        torch.linalg.solve_triangular(block, unit[: block.shape[-1], : block.shape[-1]], upper=False, unitriangular=True)
        for block in blocks
    ]


def substituted(a: Tensor, inverses: list[Tensor], b: Tensor, *, transposed: bool = False) -> Tensor:
    """x of (I + a) x = b, or of (I + a)^T x = b, b [.., C, W]: substitution by blocks, whose inverses are `inverted(a)`.

    As accurate as by rows where the blocks are well conditioned (Demmel and Higham 1992), and made of products.
    """
    x = torch.empty_like(b)
    places = [slice(index * _BLOCK, (index + 1) * _BLOCK) for index in range(len(inverses))]
    for index in reversed(range(len(places))) if transposed else range(len(places)):
        own, inverse = places[index], inverses[index]
        right = b[..., own, :]
        if transposed and index + 1 < len(places):
            done = slice(places[index + 1].start, None)
            right = right - a[..., done, own].mT @ x[..., done, :]
        elif not transposed and index:
            done = slice(0, own.start)
            right = right - a[..., own, done] @ x[..., done, :]
        x[..., own, :] = (inverse.mT if transposed else inverse) @ right
    return x
