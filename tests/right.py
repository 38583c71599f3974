"""Right implementations in plain torch, none of them used to set the bounds: other chunk sizes, summation orders, rounding places.

`Chunkwise` is written in steps so that tests/mutants.py can make one of them wrong.
"""

import itertools
from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapter import Adapter, Domain

EPS = 1e-6


class Chunkwise(Adapter):
    """The WY form, one sequence at a time, operands of products rounded to the inputs' dtype, sums in float32."""

    algorithm = "chunkwise"
    chunk: int | None = 64
    domain = Domain()
    size = 64

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        outputs, states = [], []
        q, k = self.keys(x)
        v, g, beta = x.v.flatten(0, 1), x.g.float().flatten(0, 1), x.beta.float().flatten(0, 1)
        for row, (start, end) in enumerate(self.boundaries(x)):
            at = slice(start, end)
            state = self.initial(x, row)
            o, state = self.sequence(q[at], k[at], v[at], g[at], beta[at], state, self.scale(x))
            outputs.append(o)
            states.append(state)
        o = torch.cat(outputs).to(x.v.dtype).reshape(x.v.shape)
        return self.answer(x, o, torch.stack(states) if x.output_final_state else None)

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return o, state

    def scale(self, x: Inputs) -> float:
        return x.q.shape[-1] ** -0.5 if x.scale is None else x.scale

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        q, k = (self.normalise(t) if x.qk_norm else t for t in (x.q, x.k))
        value_heads = x.v.shape[2]
        return self.repeat(q, value_heads).flatten(0, 1), self.repeat(k, value_heads).flatten(0, 1)

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        return x.repeat_interleave(value_heads // x.shape[2], dim=2)

    def normalise(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().sum(-1, keepdim=True) + EPS).sqrt()).to(x.dtype)

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            length = x.q.shape[1]
            return [(row * length, (row + 1) * length) for row in range(x.q.shape[0])]
        ends = x.cu_seqlens.tolist()
        return list(itertools.pairwise(ends))

    def initial(self, x: Inputs, row: int) -> Tensor:
        if x.state is not None:
            return x.state[row].float()
        return torch.zeros(x.v.shape[2], x.k.shape[3], x.v.shape[3])

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q, k [T, HV, K], v [T, HV, V], g, beta [T, HV], state [HV, K, V]."""
        rows = []
        for start in range(0, len(q), self.size):
            at = slice(start, start + self.size)
            piece = (t[at].transpose(0, 1) for t in (q, k, v, g, beta))
            o, state = self.piece(*piece, state, scale)
            state = self.between(state)
            rows.append(o.transpose(0, 1))
        return torch.cat(rows) if rows else v.float() * 0, state

    def between(self, state: Tensor) -> Tensor:
        return state

    def low(self, x: Tensor, like: Tensor) -> Tensor:
        """An operand as stored: rounded to the inputs' dtype."""
        return x.to(like.dtype)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return a.float() @ b.float()

    def cumulative(self, g: Tensor) -> Tensor:
        return g.cumsum(-1)

    def decays(self, total: Tensor) -> Tensor:
        lower = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).tril()
        return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()

    def corrections(self, k: Tensor, beta: Tensor, decays: Tensor) -> Tensor:
        return (self.dot(k, k.mT) * decays * beta.unsqueeze(-1)).tril(-1)

    def solve(self, a: Tensor, like: Tensor) -> Tensor:
        identity = torch.eye(a.shape[-1])
        return self.low(torch.linalg.solve_triangular(identity + a, identity.expand_as(a), upper=False), like)

    def masked(self, scores: Tensor) -> Tensor:
        return scores.tril()

    def last(self, total: Tensor) -> Tensor:
        return total[..., -1:]

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """One chunk: q, k [HV, C, K], v [HV, C, V], g, beta [HV, C], state [HV, K, V]."""
        total = self.cumulative(g)
        decays = self.decays(total)
        grown = total.exp().unsqueeze(-1)
        solved = self.solve(self.corrections(k, beta, decays), k)
        written = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * v, v)), v)
        erased = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * grown * k, k)), k)
        held = self.low(state, k)
        fresh = self.low(written.float() - self.dot(erased, held), v)
        scores = self.low(self.masked(self.dot(q, k.mT) * decays), k)
        o = scale * (grown * self.dot(q, held) + self.dot(scores, fresh))
        last = self.last(total)
        kept = self.low((last - total).exp().unsqueeze(-1) * fresh, v)
        return o, last.exp().unsqueeze(-1) * state + self.dot(k.mT, kept)


class Chunk16(Chunkwise):
    """Chunks of 16 tokens, which it does not say."""

    chunk = None
    size = 16


class Chunk128(Chunkwise):
    """Chunks of 128 tokens, twice the size the bounds are computed with."""

    chunk = None
    size = 128


class BackwardSums(Chunkwise):
    """Products summed in the opposite order, in four pieces."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.float().flip(-1), b.float().flip(-2)
        pieces = zip(a.split(max(1, a.shape[-1] // 4), -1), b.split(max(1, b.shape[-2] // 4), -2), strict=True)
        total = torch.zeros(())
        for left, right in pieces:
            total = total + left @ right
        return total


class RoundsElsewhere(Chunkwise):
    """The scale folded into q and rounded there, the correction matrix rounded before it is inverted, k decayed instead of v."""

    chunk = None
    size = 32

    def solve(self, a: Tensor, like: Tensor) -> Tensor:
        return super().solve(self.low(a, like).float(), like)

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q = self.low(scale * q, q)
        total = self.cumulative(g)
        decays = self.decays(total)
        grown = total.exp().unsqueeze(-1)
        solved = self.solve(self.corrections(k, beta, decays), k)
        held = self.low(state, k)
        recalled = self.dot(self.low(grown * k, k), held)
        fresh = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * (v - recalled), v)), v)
        scores = self.low(self.dot(q, k.mT) * decays, k)
        o = self.dot(self.low(grown * q, q), held) + self.dot(scores, fresh)
        last = self.last(total)
        kept = self.low((last - total).exp().unsqueeze(-1) * k, k)
        return o, last.exp().unsqueeze(-1) * state + self.dot(kept.mT, fresh)


class Chunk48(Chunkwise):
    """Chunks of 48 tokens, which begin where no power of two does; the decays' exponentials stored in the inputs' dtype."""

    chunk = None
    size = 48

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        total = self.cumulative(g)
        decays, last = self.decays(total), self.last(total)
        grown, left = (self.low(each.exp(), k).float().unsqueeze(-1) for each in (total, last - total))
        held = self.low(state, k)
        recalled = self.dot(self.low(grown * k, k), held)
        solved = self.solve(self.corrections(k, beta, decays), k)
        fresh = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * (v - recalled), v)), v)
        scores = self.low(self.masked(self.dot(q, k.mT) * decays), k)
        o = scale * (self.dot(self.low(grown * q, q), held) + self.dot(scores, fresh))
        return o, last.exp().unsqueeze(-1) * state + self.dot(self.low(left * k, k).mT, fresh)


class Tf32(Chunkwise):
    """float32 inputs multiplied in TF32, operands truncated to 10 mantissa bits as matrix units may."""

    domain = Domain(dtypes=("fp32",))

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return _Truncated.apply(a) @ _Truncated.apply(b)  # type: ignore[no-any-return]

    def solve(self, a: Tensor, like: Tensor) -> Tensor:
        identity = torch.eye(a.shape[-1])
        return torch.linalg.solve_triangular(identity + a, identity.expand_as(a), upper=False)


class _Truncated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        return (x.float().contiguous().view(torch.int32) & ~((1 << 13) - 1)).view(torch.float32)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> Tensor:
        return (cotangents[0].contiguous().view(torch.int32) & ~((1 << 13) - 1)).view(torch.float32)


class Recurrent(Adapter):
    """Token by token in float32, the sums over K taken one channel after another."""

    algorithm = "recurrent"
    domain = Domain()

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        steps = Chunkwise()
        scale = steps.scale(x)
        q, k = (t.float() for t in (x.q, x.k))
        if x.qk_norm:
            q, k = steps.normalise(q), steps.normalise(k)
        q, k = (steps.repeat(t, x.v.shape[2]).flatten(0, 1) for t in (q, k))
        v, g, beta = (t.float().flatten(0, 1) for t in (x.v, x.g, x.beta))
        rows, states = [], []
        for row, (start, end) in enumerate(steps.boundaries(x)):
            state = steps.initial(x, row)
            for t in range(start, end):
                state = state * g[t].exp()[:, None, None]
                fresh = beta[t, :, None] * (v[t] - self.sum(k[t].unsqueeze(-1) * state))
                state = state + k[t].unsqueeze(-1) * fresh.unsqueeze(-2)
                rows.append(scale * self.sum(q[t].unsqueeze(-1) * state))
            states.append(state)
        o = torch.stack(rows) if rows else v * 0
        return o.to(x.v.dtype).reshape(x.v.shape), torch.stack(states) if x.output_final_state else None

    def sum(self, terms: Tensor) -> Tensor:
        return terms.cumsum(-2)[..., -1, :]


class TransformersChunk(Adapter):
    """transformers' pure-torch chunkwise rule (Qwen3-Next), the function behind its wrapper; it has no packed form."""

    domain = Domain(packed=False, gate_dtypes=("fp32",), scale=False)
    requires: ClassVar[dict[str, str]] = {"transformers": "5.0"}

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        from transformers.models.qwen3_next import modeling_qwen3_next as module

        rule = module.torch_chunk_gated_delta_rule
        while hasattr(rule, "__wrapped__"):
            rule = rule.__wrapped__
        groups = x.v.shape[2] // x.q.shape[2]
        q, k = (t.repeat_interleave(groups, dim=2) for t in (x.q, x.k))
        o, state = rule(
            q,
            k,
            x.v,
            x.g,
            x.beta,
            initial_state=x.state,
            output_final_state=x.output_final_state,
            use_qk_l2norm_in_kernel=x.qk_norm,
        )
        return o, state
