"""Packed sequences in chunks, many chunks at once, one segment after another; the chunkwise forms of the delta rules share this.

Only the state goes from chunk to chunk; everything else is computed for the chunks of many sequences at once. A segment is as many
chunks as a form computes at once. Only the states between segments are kept, and the backward computes each segment again.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Chunks of `size` tokens that are computed at once, ordered by step, and the states around them.

    `tokens` are the chunks' tokens in order (a range if they are consecutive). If chunks are padded, `places` are the rows of the
    chunks that have tokens, `rows` is each row's token (for padding, a token of the same chunk), and `real` [chunk, token] is 1 for
    tokens and 0 for padding; otherwise these are None. `steps` has for each step its first chunk and its number of chunks, which
    belong to the first sequences of the block. The rows of states are, for each sequence, the state before the first step, and
    then, for each chunk, the state after it. `before` are the rows of the states before each chunk, `last` those after each
    sequence's last chunk in the segment.
    """

    size: int
    tokens: Tensor | range
    places: Tensor | None
    rows: Tensor | None
    real: Tensor | None
    steps: tuple[tuple[int, int], ...]
    before: Tensor | slice
    last: Tensor | slice

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return sum(self.steps[-1])

    @property
    def counts(self) -> list[int]:
        """The number of chunks in each step, which never grows from step to step."""
        return [count for _, count in self.steps]

    def states(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield for each step its chunks, the rows of the states before them, and the rows of the states after them."""
        rows = 0
        for first, count in self.steps:
            after = self.steps[0][1] + first
            yield slice(first, first + count), slice(rows, rows + count), slice(after, after + count)
            rows = after

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return tokens [T, ..., width] as contiguous chunks [chunk, ..., token, width], with zeros for padding."""
        tokens = self.tokens
        if self.rows is not None:
            rows = x.index_select(0, self.rows)
        else:
            rows = x[tokens.start : tokens.stop] if isinstance(tokens, range) else x.index_select(0, tokens)
        chunks = rows.unflatten(0, (-1, self.size)).movedim(1, -2)
        result = torch.empty(chunks.shape, dtype=dtype, device=x.device)
        inside = self.inside(chunks.ndim)
        return result.copy_(chunks) if inside is None else torch.mul(chunks, inside, out=result)

    def inside(self, axes: int) -> Tensor | None:
        """Return 1 for tokens and 0 for padding, [chunk, 1, ..., token, 1] with `axes` axes; None if nothing is padded."""
        return None if self.real is None else self.real.view(self.chunks, *[1] * (axes - 3), self.size, 1)

    def put(self, x: Tensor, chunks: Tensor) -> None:
        """Undo `take`: write chunks into x, which may have another dtype."""
        tokens, rows = self.tokens, chunks.movedim(-2, 1)
        if self.places is None and isinstance(tokens, range):
            x[tokens.start : tokens.stop].unflatten(0, (-1, self.size)).copy_(rows)
            return
        rows = rows.flatten(0, 1)
        rows = rows if self.places is None else rows.index_select(0, self.places)
        if isinstance(tokens, range):
            x[tokens.start : tokens.stop] = rows
        else:
            x.index_copy_(0, tokens, rows.to(x.dtype))


Block = tuple[Tensor | slice, list[Segment]]  # some sequences, and their segments in order
Restarts = tuple[tuple[int, ...], ...]  # for each sequence, tokens at which a chunk begins; empty means none
Pieces = list[tuple[int, int]]  # where pieces of a sequence begin and end, among all tokens


class Form(Protocol):
    """How to compute the chunks of a segment; tokens are q, k, v, g, beta [chunk, ..., token, width] with any axes between."""

    def most(self, size: int, k: Tensor, v: Tensor) -> int:
        """Return how many chunks of `size` tokens a segment may have; k and v have all tokens."""

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which the chunks of x are computed."""

    def forward(self, segment: Segment, tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return o of the chunks, the states after the segment given those before it, and what `backward` needs."""

    def backward(self, segment: Segment, tape: Any, do: Tensor, dstate: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the cotangents of the tokens and of the states before the segment, given those of the states after it."""


def rule(
    form: Form,
    tokens: tuple[Tensor, ...],
    state: Tensor,
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
    restarts: Restarts = (),
) -> tuple[Tensor, Tensor]:
    """Return o [T, ..., V] and the final states [N, ..., K, V] of sequences of `lengths` tokens; `sizes` has a chunk size for each.

    `tokens` are q, k [T, ..., K], v [T, ..., V], g and beta [T, ..., any]; `state` is [N, ..., K, V]. `restarts`, if
    given, has for each sequence the tokens at which a chunk begins too, as in calls that follow one another.
    """
    o, final = _Rule.apply(form, lengths, sizes, restarts, state, *tokens)
    return o, final


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        form: Form,
        lengths: tuple[int, ...],
        sizes: tuple[int, ...],
        restarts: Restarts,
        initial: Tensor,
        *tokens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        _, k, v, *_ = tokens
        dtype = form.dtype(k)
        # Every token is in some segment, so all of o is written.
        o, final = torch.empty_like(v, memory_format=torch.contiguous_format), _states(initial, lengths)
        most = tuple(form.most(size, k, v) for size in sizes)
        blocks = segments(lengths, sizes, most, k.device, restarts)
        plan = [(members, [_Record(segment) for segment in block]) for members, block in blocks]
        for members, block in plan:
            carry = initial[members].contiguous().to(dtype)
            for record in block:
                segment, record.before = record.segment, carry
                running = segment.counts[0]
                part, state, record.tape = form.forward(segment, _taken(segment, tokens, dtype), carry[:running])
                carry = _joined(state, carry[running:])
                segment.put(o, part)
                if record is not plan[-1][1][-1]:  # the backward begins with the last segment, so that one is not computed again
                    record.tape = None
            final[members] = carry.to(final.dtype)
        if not any(ctx.needs_input_grad):  # type: ignore[attr-defined]
            return o, final
        ctx.save_for_backward(*tokens, initial)  # the plan may have views of `initial`, so autograd must notice changes of it
        ctx.back = form, plan, dtype, lengths  # type: ignore[attr-defined]
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        *tokens, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        form, plan, dtype, lengths = ctx.back  # type: ignore[attr-defined]
        do, dfinal = cotangents
        results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens]
        dstate = _states(dfinal, lengths)
        for members, block in reversed(plan):
            carry = dfinal[members].contiguous().to(dtype)
            for record in reversed(block):
                segment, tape, running = record.segment, record.tape, record.segment.counts[0]
                if tape is None:
                    assert record.before is not None
                    tape = form.forward(segment, _taken(segment, tokens, dtype), record.before[:running])[2]
                parts, before = form.backward(segment, tape, segment.take(do, dtype), carry[:running])
                carry, tape, record.tape = _joined(before, carry[running:]), None, None
                for whole, part in zip(results, parts, strict=True):
                    segment.put(whole, part)
            dstate[members] = carry.to(dstate.dtype)
        return None, None, None, None, dstate, *results


@dataclasses.dataclass
class _Record:
    """A segment and the states before it, with what was computed for it if that is still in memory."""

    segment: Segment
    before: Tensor | None = None
    tape: Any = None


def _taken(segment: Segment, tokens: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(segment.take(x, dtype) for x in tokens)


def _states(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return room for states shaped as x; with empty sequences a copy of x, because their states do not change."""
    if 0 in lengths:
        return x.clone(memory_format=torch.contiguous_format)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _joined(running: Tensor, ended: Tensor) -> Tensor:
    """Return the states of all sequences of a block; sequences that ended earlier come last."""
    return torch.cat([running, ended]) if len(ended) else running


@functools.lru_cache(64)
def segments(
    lengths: tuple[int, ...], sizes: tuple[int, ...], most: tuple[int, ...], device: torch.device, restarts: Restarts = ()
) -> list[Block]:
    """Return blocks of sequences that have chunks of one size, and their segments in order; for `restarts` see `rule`.

    `sizes` and `most` have for each sequence its chunk size and the most chunks of a segment. The sequences of a block are sorted
    by their number of chunks, so that those still running at a step are the first ones.
    """
    starts, blocks = [0, *itertools.accumulate(lengths)][:-1], list[Block]()
    pieces = [_pieces(*sequence) for sequence in zip(starts, lengths, restarts or ((),) * len(lengths), strict=True)]
    for size, limit in sorted(set(zip(sizes, most, strict=True))):
        rows = (row for row, length in enumerate(lengths) if length and sizes[row] == size)
        order = sorted(rows, key=lambda row: -sum(-(-(end - begin) // size) for begin, end in pieces[row]))
        parts = [order[first : first + limit] for first in range(0, len(order), limit)]
        blocks += [_block(members, pieces, size, limit, device) for members in parts]
    return blocks


def _pieces(start: int, length: int, restarts: tuple[int, ...]) -> Pieces:
    """Return the pieces of a sequence, each of which begins a chunk."""
    cuts = [0, *(at for at in restarts if 0 < at < length), length]
    return [(start + begin, start + end) for begin, end in itertools.pairwise(cuts)]


def _block(members: list[int], pieces: list[Pieces], size: int, most: int, device: torch.device) -> Block:
    several = max(len(pieces[row]) for row in members)
    ends = [end for _, end in (pieces[row][-1] for row in members)]
    padded = [pieces[row] + [(end, end)] * (several - len(pieces[row])) for row, end in zip(members, ends, strict=True)]
    begin, end = torch.tensor(padded).unbind(-1)  # [member, piece]
    chunks = (end - begin + size - 1) // size
    counts, before = chunks.sum(-1), chunks.cumsum(-1) - chunks
    running = torch.arange(int(counts[0])).unsqueeze(-1) < counts  # [step, member]
    widths = running.sum(-1).tolist()
    step, member = running.nonzero(as_tuple=True)
    piece = (before[member] <= step.unsqueeze(-1)).sum(-1) - 1
    first = begin[member, piece] + (step - before[member, piece]) * size
    index = first.unsqueeze(-1) + torch.arange(size)
    inside = index < end[member, piece].unsqueeze(-1)
    block, at, row = [], 0, 0
    while at < len(widths):
        steps = [(0, widths[at])]
        while at + len(steps) < len(widths) and sum(steps[-1]) + widths[at + len(steps)] <= most:
            steps.append((sum(steps[-1]), widths[at + len(steps)]))
        at, count = at + len(steps), sum(steps[-1])
        block.append(_segment(size, index[row : row + count], inside[row : row + count], tuple(steps), device))
        row += count
    follow = members == list(range(members[0], members[0] + len(members)))
    return slice(members[0], members[-1] + 1) if follow else torch.tensor(members, device=device), block


def _segment(size: int, index: Tensor, inside: Tensor, steps: tuple[tuple[int, int], ...], device: torch.device) -> Segment:
    tokens, places, rows, real = index[inside], None, None, None
    if not inside.all():
        padded = inside.flatten().nonzero().squeeze(-1), torch.where(inside, index, index[:, :1]).flatten(), inside.double()
        places, rows, real = (x.to(device) for x in padded)
    follow = int(tokens[-1] - tokens[0]) == len(tokens) - 1 and bool((tokens.diff() == 1).all())
    selection = range(int(tokens[0]), int(tokens[-1]) + 1) if follow else tokens.to(device)
    before: Tensor | slice = slice(0, sum(steps[-1]))
    last: Tensor | slice = slice(sum(steps[-1]), None)
    whole = Segment(size, selection, places, rows, real, steps, before, last)
    if steps[0][1] != steps[-1][1]:  # some sequences end inside the segment
        states = list(whole.states())
        before = torch.cat([torch.arange(span.start, span.stop) for _, span, _ in states]).to(device)
        ends = torch.zeros(steps[0][1], dtype=torch.int64)
        for _, _, after in states:
            ends[: after.stop - after.start] = torch.arange(after.start, after.stop)
        whole = whole._replace(before=before, last=ends.to(device))
    return whole
