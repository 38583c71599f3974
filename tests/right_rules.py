"""Right implementations of the delta rule and of KDA in plain torch, token by token and in chunks."""

import torch
from torch import Tensor

from oracles.operation import Inputs
from tests import right


class TokenByToken(right.Chunkwise):
    """The definition in float32, all heads at once: g a number a head, one a channel, or none."""

    algorithm = "recurrent"
    chunk = None

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(g=torch.zeros_like(x.beta, dtype=torch.float32)) if x.g is None else x)

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().keys(x.replaced(q=x.q.float(), k=x.k.float()))

    def gates(self, g: Tensor) -> Tensor:
        return g

    def stored_state(self, state: Tensor) -> Tensor:
        """The state as it is stored between tokens."""
        return state

    def recalled(self, k: Tensor, decay: Tensor, state: Tensor) -> Tensor:
        """What key k recalls of the decayed state."""
        return (k.unsqueeze(-1) * (decay * state)).sum(-2)

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = q.float(), k.float(), v.float()
        decays = self.gates(g if g.ndim == 3 else g.unsqueeze(-1)).exp().unsqueeze(-1)
        rows = []
        for q_t, k_t, v_t, decay, beta_t in zip(q, k, v, decays, beta, strict=True):
            fresh = beta_t.unsqueeze(-1) * (v_t - self.recalled(k_t, decay, state))
            state = self.stored_state(decay * state + k_t.unsqueeze(-1) * fresh.unsqueeze(-2))
            rows.append(scale * (q_t.unsqueeze(-1) * state).sum(-2))
        return torch.stack(rows) if rows else 0 * v, state


class ScaledState(TokenByToken):
    """The decay is a factor beside the state, which takes it every 32 tokens or when it is small."""

    algorithm = "chunkwise"  # a gate's gradient adds up over tokens
    chunk = 32

    def scaled(self, factor: Tensor, x: Tensor) -> Tensor:
        """x times the factor."""
        return factor * x

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = q.float(), k.float(), v.float()
        factor, rows = torch.ones(v.shape[1], 1), []
        for t, (q_t, k_t, v_t, decay, beta_t) in enumerate(zip(q, k, v, g.exp(), beta, strict=True)):
            factor = factor * decay.unsqueeze(-1)
            small = (factor < 2.0**-10) | (t % 32 == 31)
            state = torch.where(small, factor, 1.0).unsqueeze(-1) * state
            factor = torch.where(small, 1.0, factor)
            fresh = beta_t.unsqueeze(-1) * (v_t - self.scaled(factor, (k_t.unsqueeze(-1) * state).sum(-2)))
            state = state + k_t.unsqueeze(-1) * (fresh / factor).unsqueeze(-2)
            rows.append(scale * self.scaled(factor, (q_t.unsqueeze(-1) * state).sum(-2)))
        return torch.stack(rows) if rows else 0 * v, factor.unsqueeze(-1) * state


class Transitions(right.Chunkwise):
    """States go from chunk to chunk by matrices, S <- M S + N, as a parallel scan takes them."""

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        total = self.cumulative(g)
        decays, grown, last = self.decays(total), total.exp().unsqueeze(-1), self.last(total)
        solved = self.solve(self.corrections(k, beta, decays), k).float()
        written, erased = solved @ (beta.unsqueeze(-1) * v), solved @ (beta.unsqueeze(-1) * grown * k)
        keeps = ((last - total).exp().unsqueeze(-1) * k).mT
        transition = self.transition(last.exp().unsqueeze(-1) * torch.eye(k.shape[-1]) - keeps @ erased)
        scores = self.masked(self.dot(q, k.mT) * decays)
        o = scale * (grown * self.dot(q, state) + scores @ (written - erased @ state))
        return o, transition @ state + keeps @ written

    def transition(self, matrix: Tensor) -> Tensor:
        """M as it is stored."""
        return matrix


class NoGates(right.Chunkwise):
    """The delta rule in chunks of 64."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(g=torch.zeros_like(x.beta, dtype=torch.float32)))


class ChannelChunkwise(right.Chunkwise):
    """KDA in chunks of 64 and blocks of 16 tokens, as in FLA.

    Products of two blocks decay towards the first token of the later one, on operands rounded to the inputs' dtype; inside a block
    each pair decays by itself, in float32.
    """

    block = 16

    def gates(self, g: Tensor) -> Tensor:
        return g

    def products(self, x: Tensor, k: Tensor, total: Tensor) -> Tensor:
        """sum_c x_ic k_jc exp(G_ic - G_jc) at and below the diagonal, [HV, C, C] from [HV, C, K]."""
        rows, size = [], self.block
        for start in range(0, x.shape[-2], size):
            at, before = slice(start, start + size), slice(0, start)
            first = total[:, start : start + 1]
            later = self.low(x[:, at] * (total[:, at] - first).exp(), x)
            earlier = self.low(k[:, before] * (first - total[:, before]).exp(), x)
            pairs = total[:, at].unsqueeze(-2) - total[:, at].unsqueeze(-3)
            upper = torch.ones(pairs.shape[1:3], dtype=torch.bool).triu(1).unsqueeze(-1)
            decays = pairs.masked_fill(upper, -torch.inf).exp()
            inside = (x[:, at].float().unsqueeze(-2) * k[:, at].float().unsqueeze(-3) * decays).sum(-1)
            after = inside.new_zeros(*inside.shape[:-1], x.shape[-2] - start - inside.shape[-1])
            rows.append(torch.cat([self.dot(later, earlier.mT), inside, after], -1))
        return torch.cat(rows, -2)

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        total, beta = self.gates(g).cumsum(-2), beta.unsqueeze(-1)
        solved = self.solve((beta * self.products(k, k, total)).tril(-1), k)
        written = self.low(self.dot(solved, self.low(beta * v, v)), v)
        erased = self.low(self.dot(solved, self.low(beta * total.exp() * k, k)), k)
        low_state = self.low(state, k)
        fresh = self.low(written.float() - self.dot(erased, low_state), v)
        scores = self.low(scale * self.products(q, k, total), k)
        o = scale * self.dot(self.low(total.exp() * q, q), low_state) + self.dot(scores, fresh)
        last = total[:, -1:]
        keeps = self.low((last - total).exp() * k, k)
        return o, last.exp().mT * state + self.dot(keeps.mT, fresh)
