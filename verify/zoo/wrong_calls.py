"""Wrong callables, for the laws that need no reference: linear attention with a decay, each with one mistake.

tests/laws/test_calls.py names the law that detects each of them.
"""

import itertools
from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.calls.domain import CallDomain
from verify.adapters.base import Adapter
from verify.zoo.base import Right


class LinearAttention(Right, Adapter):
    """Right: causal linear attention with a decay for each token and head, a sequence at a time, in float32."""

    domain = CallDomain(
        inputs={
            "q": "B T H K",
            "k": "B T H K",
            "v": "B T H V",
            "g": "B T H fp32 negative",
            "cu_seqlens": "offsets",
        },
        outputs={"o": "B T H V"},
        sizes={"K": (8, 16, 1, 24), "V": (8, 16, 1, 33)},
    )

    def run(self, x: Inputs) -> Tensor:
        q, k, v, g = (t.flatten(0, 1).transpose(0, 1).float() for t in (x.q, x.k, x.v, x.g))
        pieces = [self.sequence(q[:, at], k[:, at], v[:, at], g[:, at]) for at in itertools.starmap(slice, self.boundaries(x))]
        return torch.cat(pieces, 1).transpose(0, 1).to(x.v.dtype).reshape(x.v.shape)

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            length = x.q.shape[1]
            return [(row * length, (row + 1) * length) for row in range(x.q.shape[0])]
        return list(itertools.pairwise(x.cu_seqlens.tolist()))

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        """One sequence: q, k [H, T, K], v [H, T, V], g [H, T]. Returns o [H, T, V]."""
        total = g.cumsum(-1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~self.mask(g.shape[-1]), -torch.inf).exp()
        return (q @ k.mT * decay) @ v

    def mask(self, tokens: int) -> Tensor:
        return torch.ones(tokens, tokens, dtype=torch.bool).tril()


class CallRaisesOnOneToken(LinearAttention, letter="V"):
    """A sequence of one token raises."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        if q.shape[1] == 1:
            raise IndexError("index 1 is out of bounds for dimension 1 with size 1")
        return super().sequence(q, k, v, g)


class CallDividesByZero(LinearAttention, letter="N"):
    """Outputs are divided by zero after tokens that have decayed by more than exp(-8)."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        o = super().sequence(q, k, v, g)
        return o / (g.cumsum(-1).unsqueeze(-1) > -8)


class CallLeaksAcrossBoundaries(LinearAttention, letter="V", incident=(1,)):
    """A packed sequence of more than 16 tokens sees the last token of the sequence before it."""

    def run(self, x: Inputs) -> Tensor:
        o = super().run(x)
        starts = [start for start, end in self.boundaries(x)[1:] if end - start > 16] if x.cu_seqlens is not None else []
        leaked = torch.zeros_like(o)
        for start in starts:
            leaked[:, start] = x.v[:, start - 1] / 64
        return o + leaked


class CallPeeksAhead(LinearAttention, letter="N"):
    """In sequences of more than 32 tokens, a token sees the one after it."""

    def mask(self, tokens: int) -> Tensor:
        return torch.ones(tokens, tokens, dtype=torch.bool).tril(1 if tokens > 32 else 0)


class CallScalesTheBatch(LinearAttention, letter="-"):
    """Values are divided by the largest number of the whole batch, rounded, and multiplied again."""

    def run(self, x: Inputs) -> Tensor:
        largest = x.v.detach().abs().max() if x.v.numel() else torch.ones(())
        return super().run(x.replaced(v=(x.v / largest).to(x.v.dtype) * largest))


class CallReadsUnwritten(LinearAttention, letter="-"):
    """The sum of decays is accumulated in memory that nobody cleared; only a NaN there is taken for zero."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        o = super().sequence(q, k, v, g)
        return o + torch.empty(o.shape).nan_to_num(0.0) * 2.0**-20


class CallTunesLater(LinearAttention, letter="R"):
    """The third call in a row of the same shapes takes another order of sums, as if tuned, although the same bits are promised."""

    before: ClassVar[object] = None
    calls: ClassVar[int] = 0

    def run(self, x: Inputs) -> Tensor:
        kind, now = type(self), (x.q.shape, x.v.shape, float(x.v.detach().double().sum()))
        kind.calls, kind.before = (kind.calls + 1 if now == kind.before else 1), now
        return super().run(x) * (1 + 2.0**-6 if kind.calls % 3 == 0 else 1)


class CallSpansByIdentity(LinearAttention, letter="K", incident=(36,)):
    """The spans of sequences are kept by the identity of cu_seqlens."""

    seen: ClassVar[dict[int, tuple[Tensor, list[tuple[int, int]]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            return super().boundaries(x)
        tensor, spans = self.seen.setdefault(id(x.cu_seqlens), (x.cu_seqlens, super().boundaries(x)))
        return spans if tensor is x.cu_seqlens else super().boundaries(x)


class CallGatesOfTheFirstShape(LinearAttention, letter="K", incident=(36,)):
    """The spans of a call are kept by its shapes, and used for later calls with other spans."""

    seen: ClassVar[dict[tuple[object, ...], list[tuple[int, int]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            return super().boundaries(x)
        return self.seen.setdefault((x.q.shape, x.v.shape, x.q.dtype, x.cu_seqlens.shape), super().boundaries(x))


class CallLargeBatchesDiffer(LinearAttention, letter="-"):
    """In a batch of more than eight sequences the last one's decays are those of the first."""

    def run(self, x: Inputs) -> Tensor:
        spans = self.boundaries(x)
        if len(spans) <= 8:
            return super().run(x)
        g = x.g.flatten(0, 1).clone()
        (first, _), (start, end) = spans[0], spans[-1]
        g[start:end] = g[first : first + 1]
        return super().run(x.replaced(g=g.reshape(x.g.shape)))


class CallAssumesContiguous(LinearAttention, letter="Q", incident=(35,)):
    """Keys are read as if they were contiguous."""

    def run(self, x: Inputs) -> Tensor:
        return super().run(x.replaced(k=x.k.as_strided(x.k.shape, x.q.contiguous().stride(), x.k.storage_offset())))


class CallScalesInPlace(LinearAttention, letter="-"):
    """Queries are scaled in place, and scaled back, which rounds."""

    def run(self, x: Inputs) -> Tensor:
        with torch.no_grad():
            x.q.mul_(3)
        o = super().run(x)
        with torch.no_grad():
            x.q.div_(3)
        return o / 3
