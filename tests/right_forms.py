"""More right implementations in plain torch and NumPy, in conventions of their own. None of them was used to set the bounds.

Each declares what docs/reference/adapters.md and docs/reference/domains.md lead to, and nothing else.
"""

import math

import numpy as np
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from tests.right import Recurrent
from verify.adapters.base import Adapter
from verify.zoo.base import EPS, Chunkwise


class WholeSequence(Chunkwise):
    """A parallel form: the only chunk is the whole sequence."""

    chunk = 1024
    size = 1 << 20


class Chunk256(Chunkwise):
    """Chunks of 256 tokens."""

    chunk = 256
    size = 256


class Exp2Gates(Chunkwise):
    """Gates times log2(e) before they are summed, and powers of two of them."""

    def cumulative(self, g: Tensor) -> Tensor:
        return (g * math.log2(math.e)).cumsum(-1)

    def decays(self, total: Tensor) -> Tensor:
        lower = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).tril()
        return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp2()

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        total = self.cumulative(g)
        decays, last = self.decays(total), self.last(total)
        grown, left = total.exp2().unsqueeze(-1), (last - total).exp2().unsqueeze(-1)
        solved = self.solve(self.corrections(k, beta, decays), k)
        written = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * v, v)), v)
        erased = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * grown * k, k)), k)
        low_state = self.low(state, k)
        fresh = self.low(written.float() - self.dot(erased, low_state), v)
        o = scale * (grown * self.dot(q, low_state) + self.dot(self.low(self.masked(self.dot(q, k.mT) * decays), k), fresh))
        return o, last.exp2().unsqueeze(-1) * state + self.added(k, fresh, left)

    def added(self, k: Tensor, fresh: Tensor, left: Tensor) -> Tensor:
        """What a chunk adds to the state, of its keys [HV, C, K], corrections [HV, C, V] and decays up to its end [HV, C, 1]."""
        return self.dot(k.mT, self.low(left * fresh, k))


class FlushedKeys(Exp2Gates):
    """Decays of what is written go into the keys. Products take operands below 2^-126 for zeros, as AVX-512 does in bfloat16."""

    least = 2.0**-126

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        # What is taken for zero has a gradient all the same.
        return super().dot(*(x - torch.where(x.abs() < self.least, x, 0.0).detach() for x in (a, b)))

    def added(self, k: Tensor, fresh: Tensor, left: Tensor) -> Tensor:
        return self.dot(self.low(left * k, k).mT, fresh)


class Factored(Chunkwise):
    """Decays of a chunk as products exp(G_i) exp(-G_j), the second of which would overflow under stronger decays."""

    domain = Domain(strongest_decay="10")

    def decays(self, total: Tensor) -> Tensor:
        return (total.exp().unsqueeze(-1) * (-total).exp().unsqueeze(-2)).tril()


class NotScaled(Chunkwise):
    """Its output is S q: the caller scales the queries."""

    domain = Domain(scales=("one",))

    def scale(self, x: Inputs) -> float:
        return 1.0


class DoublingInverse(Chunkwise):
    """I + A is inverted in float32: blocks of 16 tokens by doubling, (I - A)(I + A^2)(I + A^4)..., with a Newton step, then merged.

    Doubling alone loses every digit where keys repeat: the powers of a block of 64 tokens reach 1e17.
    """

    def solve(self, a: Tensor, like: Tensor) -> Tensor:
        size = a.shape[-1]
        rows = [torch.zeros_like(a[..., :0, :])]
        for cut in range(0, size, 16):
            end = min(cut + 16, size)
            inverse = self.doubled(a[..., cut:end, cut:end])
            before = -inverse @ (a[..., cut:end, :cut] @ torch.cat(rows, -2)[..., :cut])
            rows.append(torch.cat([before, inverse, a.new_zeros(*a.shape[:-2], end - cut, size - end)], -1))
        return self.low(torch.cat(rows, -2), like)

    def doubled(self, a: Tensor) -> Tensor:
        identity = torch.eye(a.shape[-1])
        inverse, power, reach = identity - a, a @ a, 2
        while reach < a.shape[-1]:
            inverse, power, reach = inverse @ (identity + power), power @ power, 2 * reach
        return (inverse @ (2 * identity - (identity + a) @ inverse)).tril()


class RowByRow(Chunkwise):
    """The inverse of I + A by forward substitution, one row after another."""

    def solve(self, a: Tensor, like: Tensor) -> Tensor:
        rows = [torch.eye(a.shape[-1])[0].expand_as(a[..., 0, :])]
        for row in range(1, a.shape[-1]):
            known = torch.stack(rows, -2)
            rows.append(torch.eye(a.shape[-1])[row] - (a[..., row : row + 1, :row] @ known).squeeze(-2))
        return self.low(torch.stack(rows, -2), like)


class HeadByHead(Chunkwise):
    """One head after another."""

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads = [slice(head, head + 1) for head in range(v.shape[1])]
        parts = [super(HeadByHead, self).sequence(q[:, h], k[:, h], v[:, h], g[:, h], beta[:, h], state[h], scale) for h in heads]
        return torch.cat([o for o, _ in parts], 1), torch.cat([final for _, final in parts])


class ValueBlocks(Chunkwise):
    """Blocks of 32 value channels, each computed as if it were alone."""

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        blocks = zip(v.split(32, -1), state.split(32, -1), strict=True)
        parts = [super(ValueBlocks, self).piece(q, k, block, g, beta, part, scale) for block, part in blocks]
        return torch.cat([o for o, _ in parts], -1), torch.cat([final for _, final in parts], -1)


class Padded(Chunkwise):
    """The last chunk is filled up with tokens of zeros, which neither write nor forget."""

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        tokens = len(q)
        more = -tokens % self.size
        q, k, v, g, beta = (torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in (q, k, v, g, beta))
        o, final = super().sequence(q, k, v, g, beta, state, scale)
        return o[:tokens], final


class ValuesFirst(Recurrent):
    """Token by token on states [V, K]."""

    def write(self, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        turned, key, value = state.mT.contiguous(), k.mT, v.mT
        return (turned + beta * (value - turned @ key.mT) * key).mT

    def sum(self, terms: Tensor) -> Tensor:
        return terms.sum(-2)


class Wide(Recurrent):
    """Token by token in float64, and rounded at the end."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        steps, scale = Chunkwise(), Chunkwise().scale(x)
        q, k, v, g, beta = (x[name].double() for name in ("q", "k", "v", "g", "beta"))
        if x.qk_norm:
            q, k = (t / (t.square().sum(-1, keepdim=True) + EPS).sqrt() for t in (q, k))
        q, k = (steps.repeat(t, v.shape[2]).flatten(0, 1) for t in (q, k))
        v, decay, beta = v.flatten(0, 1), g.exp().flatten(0, 1)[..., None, None], beta.flatten(0, 1)[..., None, None]
        rows, states = [], []
        for row, (start, end) in enumerate(steps.boundaries(x)):
            state = steps.initial(x, row).double()
            for t in range(start, end):
                state, key = state * decay[t], k[t].unsqueeze(-1)
                state = state + key * (beta[t] * (v[t].unsqueeze(-2) - key.mT @ state))
                rows.append(scale * (q[t].unsqueeze(-2) @ state).squeeze(-2))
            states.append(state)
        o = torch.stack(rows) if rows else v * 0
        final = torch.stack(states).float() if x.output_final_state else None
        return o.to(x.v.dtype).reshape(x.v.shape), final


class InNumPy(Adapter):
    """Token by token in NumPy's float32, without gradients."""

    algorithm = "recurrent"
    domain = Domain(dtypes=("fp32",), backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = (x[name].detach().float().numpy() for name in ("q", "k", "v", "g", "beta"))
        if x.qk_norm:
            q, k = (t / np.sqrt(np.square(t).sum(-1, keepdims=True) + np.float32(EPS)) for t in (q, k))
        groups, scale = v.shape[2] // q.shape[2], np.float32(Chunkwise().scale(x))
        q, k = (np.repeat(t, groups, 2).reshape(-1, v.shape[2], t.shape[3]) for t in (q, k))
        o, states = np.zeros((v.shape[0] * v.shape[1], *v.shape[2:]), np.float32), []
        v, g, beta = (t.reshape(-1, *t.shape[2:]) for t in (v, g, beta))
        for row, (start, end) in enumerate(Chunkwise().boundaries(x)):
            state = Chunkwise().initial(x, row).detach().numpy().copy()
            for t in range(start, end):
                state *= np.exp(g[t])[:, None, None]
                state += np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state)))
                o[t] = scale * np.einsum("hk,hkv->hv", q[t], state)
            states.append(state)
        final = torch.from_numpy(np.stack(states)) if x.output_final_state else None
        return torch.from_numpy(o).reshape(x.v.shape), final


class RecurrentKda(Recurrent):
    """KDA token by token: every key channel decays by itself."""

    domain = Domain(operation="kda")
