"""The delta rules in float64 at real lengths: the chunkwise form with its own backward.

Per sequence and value head, with G = cumsum(g) inside a chunk of C tokens (g one number a token and head, or one a channel of
the key: KDA), E_ij = exp(G_i - G_j) for i >= j and products of keys taken channel by channel:

    A_ij = beta_i sum_c k_ic k_jc E_ijc,  i > j        P_ij = scale sum_c q_ic k_jc E_ijc,  i >= j
    (I + A) [U | W] = [beta v | beta exp(G) k]         unit lower triangular solve
    V' = U - W S                                       what the chunk writes, given the state S before it
    o  = scale exp(G) q S + P V'
    S <- exp(G_C) S + (exp(G_C - G) k)^T V'

Only V' and S go from chunk to chunk; all else is computed for many chunks at once. Backward, with dS the cotangent of the state
after the chunk, the same two lines run in reverse,

    dV' = P^T do + exp(G_C - G) k dS        dS <- exp(G_C) dS + (scale exp(G) q)^T do - W^T dV'

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

_SEGMENT = {"cpu": 2**26, "cuda": 2**32}  # bytes; a CPU was fastest with this of 2^24 to 2^30; a GPU's is not measured


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
        within, across = size * size * (3 * width + 2 * value_width), 4 * size * width * value_width
        return sum(-(-length // size) for length in lengths) * (within + across + 2 * width * value_width)

    return min((size for size in (16, 32, 64, 128, longest) if size <= min(128, max(16, longest))), key=work)


class _Segment(NamedTuple):
    """Chunks computed at once: `steps` says which rows of `tokens` are the chunks of one step, first and count."""

    members: Tensor
    tokens: Tensor
    steps: tuple[tuple[int, int], ...]


def _segments(lengths: tuple[int, ...], size: int, most: int, device: torch.device) -> Iterator[list[_Segment]]:
    """Blocks of sequences, each a list of segments in order; a chunk's row holds its tokens, len(tokens) where it is padded.

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
        index = torch.where(index < end[member].unsqueeze(-1), index, starts[-1]).to(device)
        block, at, row = [], 0, 0
        while at < len(widths):
            steps = [(0, widths[at])]
            while at + len(steps) < len(widths) and sum(steps[-1]) + widths[at + len(steps)] <= most:
                steps.append((sum(steps[-1]), widths[at + len(steps)]))
            at, count = at + len(steps), sum(steps[-1])
            block.append(_Segment(torch.tensor(members, device=device), index[row : row + count], tuple(steps)))
            row += count
        yield block


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
    solved: Tensor
    scores: Tensor
    total: Tensor
    factor: Tensor | None

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
        plan = [[_Kept(segment) for segment in block] for block in _segments(lengths, size, call.most(k, v), k.device)]
        for block in plan:
            members = block[0].segment.members
            carry = state.index_select(0, members)
            for kept in block:
                kept.before = carry.clone()
                kept.local = call.local(kept.segment, q, k, v, g, beta)
                kept.held, kept.fresh, rows = call.scan(kept.local, kept.segment, carry)
                call.put(o, kept.segment, rows)
                if kept is not plan[-1][-1]:  # backward begins with the last segment: it is not computed again
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
        for block in reversed(plan):
            members = block[0].segment.members
            carry = dfinal.index_select(0, members)
            for kept in reversed(block):
                if kept.local is None:
                    kept.local = call.local(kept.segment, q, k, v, g, beta)
                    kept.held, kept.fresh, _ = call.scan(kept.local, kept.segment, kept.before.clone(), outputs=False)
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
        each = 8 * self.size * (width + value_width) + 8 * self.size**2 + 4 * width * value_width
        return max(1, _SEGMENT.get(k.device.type, _SEGMENT["cuda"]) // (8 * each * v.shape[1]))

    def take(self, segment: _Segment, x: Tensor) -> Tensor:
        """Tokens [T, heads, ...] to chunks [chunk, H, heads / H, token, ...], zeros where a chunk is padded."""
        rows = x.index_select(0, segment.tokens.flatten().clamp(max=max(len(x) - 1, 0)))
        if (padding := segment.tokens.flatten() == len(x)).any():
            rows[padding] = 0.0
        chunks: Tensor = rows.unflatten(0, (-1, self.size)).unflatten(2, (self.heads, -1)).movedim(1, 3)
        return chunks.contiguous()

    def put(self, x: Tensor, segment: _Segment, chunks: Tensor) -> None:
        """The reverse of `take`, into x."""
        rows, index = chunks.movedim(3, 1).flatten(2, 3).flatten(0, 1), segment.tokens.flatten()
        inside = index < len(x)
        if not inside.all():
            rows, index = rows[inside], index[inside]
        x.index_copy_(0, index, rows.reshape(-1, *x.shape[1:]))

    def local(self, segment: _Segment, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Local:
        q, k, v, g, beta = (self.take(segment, x) for x in (q, k, v, g, beta.unsqueeze(-1)))
        q = q * self.scale
        total = g.cumsum(-2)
        grown, left = total.exp(), (total[..., -1:, :] - total).exp()
        both, factor = decayed(torch.stack([k, q]), k, total)
        products, scores = both.unbind(0)
        corrections = beta * products
        start = torch.cat([v, (grown * k).expand(*v.shape[:-1], k.shape[-1])], -1)
        solved = torch.linalg.solve_triangular(corrections, beta * start, upper=False, unitriangular=True)
        whole = grown[..., -1, :].unsqueeze(-1)
        return _Local(q, k, beta, start, left, grown, whole, products, corrections, solved, scores, total, factor)

    def scan(self, x: _Local, segment: _Segment, carry: Tensor, *, outputs: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """The states before the chunks, what the chunks write, and their outputs; `carry` becomes the state after them."""
        heads, (width, value_width) = self.heads * self.groups, carry.shape[-2:]
        flat = carry.view(-1, width, value_width)
        keeps, reads = (each.flatten(0, 2) for each in (x.keeps, x.reads))
        written, erased = (each.flatten(0, 2) for each in x.solved.split((value_width, width), -1))
        whole = x.whole.flatten(0, 2)
        held, fresh = flat.new_empty(len(keeps), width, value_width), flat.new_empty(written.shape)
        for first, count in segment.steps:
            rows, state = slice(first * heads, (first + count) * heads), flat[: count * heads]
            held[rows] = state
            torch.baddbmm(written[rows], erased[rows], state, alpha=-1, out=fresh[rows])
            state.mul_(whole[rows]).baddbmm_(keeps[rows].mT, fresh[rows])
        chunks = (len(segment.tokens), self.heads, self.groups)
        o = torch.baddbmm(torch.bmm(reads, held), x.scores.flatten(0, 2), fresh) if outputs else fresh
        return held, fresh, o.unflatten(0, chunks)

    def backward(self, kept: _Kept, do: Tensor, carry: Tensor) -> tuple[Tensor, ...]:
        """The cotangents of q, k, v, g, beta; `carry`, that of the state after the segment, becomes that of the one before."""
        x, held, fresh, segment = kept.local, kept.held, kept.fresh, kept.segment
        assert x is not None and held is not None and fresh is not None
        heads, (width, value_width) = self.heads * self.groups, carry.shape[-2:]
        chunks = (len(segment.tokens), self.heads, self.groups)
        flat = carry.view(-1, width, value_width)
        keeps, reads = (each.flatten(0, 2) for each in (x.keeps, x.reads))
        erased = x.solved[..., value_width:].flatten(0, 2)
        whole = x.whole.flatten(0, 2)
        do = do.flatten(0, 2)
        dfresh = x.scores.flatten(0, 2).mT @ do
        after = torch.empty_like(held)
        for first, count in reversed(segment.steps):
            rows, ds = slice(first * heads, (first + count) * heads), flat[: count * heads]
            after[rows] = ds
            dfresh[rows].baddbmm_(keeps[rows], ds)
            ds.mul_(whole[rows]).baddbmm_(reads[rows].mT, do[rows]).baddbmm_(erased[rows].mT, dfresh[rows], alpha=-1)
        dscores = (do @ fresh.mT).unflatten(0, chunks).tril()
        dreads, dkeeps = ((a @ b.mT).unflatten(0, chunks) for a, b in ((do, held), (fresh, after)))
        dwhole = (held * after).sum(-1).unflatten(0, chunks).unsqueeze(-2)
        dsolved = torch.cat([dfresh, -dfresh @ held.mT], -1).unflatten(0, chunks)
        dright = torch.linalg.solve_triangular(x.corrections.mT, dsolved, upper=True, unitriangular=True)
        dcorrections = -(dright @ x.solved.mT).tril(-1)
        dbeta = (dright * x.start).sum(-1) + (dcorrections * x.products).sum(-1)
        dstart = x.beta * dright
        dv, dgrown_k = dstart.split((value_width, width), -1)
        both = torch.stack([x.beta * dcorrections, dscores])
        pair, products = torch.stack([x.k, x.q]), torch.stack([x.products, x.scores])
        dpair, dy, dtotal = decayed_backward(both, pair, x.k, x.total, products, x.factor)
        dk = self.shared(dpair[0]) + self.shared(dy.sum(0)) + self.shared(dkeeps * x.left + dgrown_k * x.grown)
        dq = self.scale * (self.shared(dpair[1]) + self.shared(dreads * x.grown))
        kept_terms = dkeeps * x.keeps
        terms = dreads * x.reads + dgrown_k * x.grown * x.k - kept_terms
        last = kept_terms.sum(-2, keepdim=True) + dwhole * x.whole.mT
        if x.whole.shape[-2] == 1:
            terms, last = terms.sum(-1, keepdim=True), last.sum(-1, keepdim=True)
        dtotal = dtotal.sum(0) + terms
        dtotal[..., -1:, :] += last
        dg = dtotal.flip(-2).cumsum(-2).flip(-2)
        return dq, dk, dv, dg, dbeta.unsqueeze(-1)

    def shared(self, x: Tensor) -> Tensor:
        """The sum over the value heads of a key head."""
        return x.sum(2, keepdim=True)
