"""Right implementations with other interfaces: their adapters turn, repeat, pad or clone. Few need a word of a domain.

None of them was used to set the bounds.
"""

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from tests.right import Recurrent
from verify.adapters.base import Adapter
from verify.zoo.base import Chunkwise


class HeadsFirst(Chunkwise):
    """Tensors are [B, H, T, D], and what is returned is a view of such a tensor."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        turned = {name: x[name].transpose(1, 2).contiguous() for name in ("q", "k", "v", "g", "beta")}
        o, state = super().run(x.replaced(**{name: tensor.transpose(1, 2) for name, tensor in turned.items()}))
        return o.transpose(1, 2).contiguous().transpose(1, 2), state


class TiledHeads(Recurrent):
    """Value head h reads key head h % H; the adapter puts the value heads in that order and back."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        heads, count = x.q.shape[2], x.v.shape[2]
        there = torch.arange(count).reshape(heads, -1).T.flatten()
        back = there.argsort()
        q, k = (x[name].repeat(1, 1, count // heads, 1) for name in ("q", "k"))
        tokens = {name: x[name][:, :, there] for name in ("v", "g", "beta")}
        state = None if x.state is None else x.state[:, there]
        o, final = super().run(x.replaced(q=q, k=k, state=state, **tokens))
        return o[:, :, back], None if final is None else final[:, back]


class BetaMultiplied(Chunkwise):
    """It takes beta k and beta v instead of beta, both in the dtype of k."""

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        writes, values = self.low(beta.unsqueeze(-1) * k, k), self.low(beta.unsqueeze(-1) * v, v)
        total = self.cumulative(g)
        decays, last, grown = self.decays(total), self.last(total), total.exp().unsqueeze(-1)
        solved = self.solve((self.dot(writes, k.mT) * decays).tril(-1), k)
        erased = self.low(self.dot(solved, self.low(grown * writes, k)), k)
        low_state = self.low(state, k)
        fresh = self.low(self.dot(solved, values) - self.dot(erased, low_state), v)
        o = scale * (grown * self.dot(q, low_state) + self.dot(self.low(self.masked(self.dot(q, k.mT) * decays), k), fresh))
        return o, last.exp().unsqueeze(-1) * state + self.dot(k.mT, self.low((last - total).exp().unsqueeze(-1) * fresh, v))


class ClampedGates(Recurrent):
    """Log-decays are clamped at -20 from below, so that stronger decays leave 2e-9 of a state."""

    domain = Domain(strongest_decay="tenth")

    def decay(self, x: Inputs) -> Tensor:
        return x.g.float().clamp(min=-20.0).exp()


class WideOutputs(Recurrent):
    """The kernel returns float32 whatever it takes, and the adapter rounds that."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        wide = {name: x[name].float() for name in ("q", "k", "v", "g", "beta")}
        o, state = super().run(x.replaced(**wide))
        return o.to(x.v.dtype), state


class AlwaysFinal(Chunkwise):
    """It returns a final state whether that is needed or not."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(output_final_state=True))


class StateInPlace(Adapter):
    """The kernel changes the state that it gets, so the adapter clones it. It has no backward."""

    algorithm = "recurrent"
    domain = Domain(backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        steps, rows = Chunkwise(), len(Chunkwise().boundaries(x))
        shape = (rows, x.v.shape[2], x.q.shape[3], x.v.shape[3])
        states = torch.zeros(shape) if x.state is None else x.state.detach().clone()
        q, k = (steps.normalise(t.float()) if x.qk_norm else t.float() for t in (x.q, x.k))
        q, k = (steps.repeat(t, x.v.shape[2]).flatten(0, 1) for t in (q, k))
        v, g, beta = (t.float().flatten(0, 1) for t in (x.v, x.g, x.beta))
        o = torch.zeros(v.shape)
        for row, (start, end) in enumerate(steps.boundaries(x)):
            state = states[row]
            for t in range(start, end):
                state *= g[t].exp()[:, None, None]
                fresh = beta[t].unsqueeze(-1) * (v[t] - (k[t].unsqueeze(-1) * state).sum(-2))
                state += k[t].unsqueeze(-1) * fresh.unsqueeze(-2)
                o[t] = steps.scale(x) * (q[t].unsqueeze(-1) * state).sum(-2)
        return o.to(x.v.dtype).reshape(x.v.shape), states


class PartsOfABuffer(Recurrent):
    """Outputs and states are parts of larger tensors, and not contiguous."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        o = torch.cat([o, o.detach() * float("nan")], -1)[..., : o.shape[-1]]
        return o, None if state is None else torch.stack([state, state.detach() * float("nan")], -1)[..., 0]


class ListOfLengths(Chunkwise):
    """It takes the lengths of packed sequences as a list, and splits the tokens."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            return super().boundaries(x)
        lengths = x.cu_seqlens.diff().tolist()
        ends = [sum(lengths[: row + 1]) for row in range(len(lengths))]
        return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


class PaddedBatch(Recurrent):
    """Packed sequences become a batch, filled up at the end with tokens that neither write nor forget."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.cu_seqlens is None:
            return super().run(x)
        lengths = x.cu_seqlens.diff().tolist()
        most = max(lengths)

        def padded(tensor: Tensor) -> Tensor:
            parts = tensor[0].split(lengths)
            return torch.stack([torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])]) for part in parts])

        tokens = {name: padded(x[name]) for name in ("q", "k", "v", "g", "beta")}
        o, state = super().run(x.replaced(cu_seqlens=None, **tokens))
        return torch.cat([o[row, :length] for row, length in enumerate(lengths)]).unsqueeze(0), state


class PowersOfTwo(Recurrent):
    """Log-decays are multiplied by log2(e), and the kernel takes powers of two."""

    def decay(self, x: Inputs) -> Tensor:
        return (x.g.float() * 1.4426950408889634).exp2()


class TurnedStates(Chunkwise):
    """States are [V, K] outside the kernel; the adapter turns them without a copy."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row).mT.contiguous().mT

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return o, None if state is None else state.mT.contiguous().mT


class ReadsBefore(Recurrent):
    """The output is what the query reads of the decayed state, and its product with the key times what is written."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        steps, scale = Chunkwise(), Chunkwise().scale(x)
        q, k = (steps.normalise(t.float()) if x.qk_norm else t.float() for t in (x.q, x.k))
        q, k = (steps.repeat(t, x.v.shape[2]).flatten(0, 1) for t in (q, k))
        v, g, beta = (t.float().flatten(0, 1) for t in (x.v, x.g, x.beta))
        rows, states = [], []
        for row, (start, end) in enumerate(steps.boundaries(x)):
            state = steps.initial(x, row)
            for t in range(start, end):
                state = g[t].exp()[:, None, None] * state
                both = torch.stack([k[t], q[t]], -2) @ state
                fresh = beta[t].unsqueeze(-1) * (v[t] - both[:, 0])
                rows.append(scale * (both[:, 1] + (q[t] * k[t]).sum(-1, keepdim=True) * fresh))
                state = state + k[t].unsqueeze(-1) * fresh.unsqueeze(-2)
            states.append(state)
        o = torch.stack(rows) if rows else v * 0
        return o.to(x.v.dtype).reshape(x.v.shape), torch.stack(states) if x.output_final_state else None


class FlattenedBatch(Chunkwise):
    """A batch is passed as packed sequences."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        rows, tokens = x.q.shape[:2]
        if x.cu_seqlens is not None:
            return super().run(x)
        flat = {name: x[name].flatten(0, 1).unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
        o, state = super().run(x.replaced(cu_seqlens=torch.arange(rows + 1) * tokens, **flat))
        return o.reshape(x.v.shape), state


class ScaledQueries(Recurrent):
    """The caller scales the queries, in float32."""

    domain = Domain(scales=("one",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(scale=1.0))


class FusedGates(Chunkwise):
    """The kernel computes gate and beta, with softplus as PyTorch has it: x itself above 20."""

    domain = Domain(in_kernel=("both",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        raw = x.a.float() if x.get("dt_bias") is None else x.a.float() + x.dt_bias
        beta = x.b.float().sigmoid() * (2 if x.allow_neg_eigval else 1)
        return super().run(Inputs(**{**x, "g": -x.A_log.exp() * torch.nn.functional.softplus(raw), "beta": beta}))
