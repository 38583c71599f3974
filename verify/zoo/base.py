"""Right implementations in plain torch. Each step is a method, so that a wrong implementation can override just one step."""

import itertools

import torch
from torch import Tensor

from oracles.operation import Inputs, no_padding
from properties.layers.domain import LayerDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters.base import Adapter

EPS = 1e-6
Outputs = tuple[Tensor, Tensor]  # the outputs, and the state after them


class Right:
    """Base of the right implementations, from which wrong ones are derived with the class keywords `letter` and `incident`."""

    incident: tuple[int, ...] = ()

    def __init_subclass__(cls, *, letter: str = "", incident: tuple[int, ...] = ()) -> None:
        super().__init_subclass__()
        for name, value in (("letter", letter), ("incident", incident)):
            if value:
                setattr(cls, name, value)


class Chunkwise(Right, Adapter):
    """The gated delta rule in the WY form, one sequence at a time.

    Operands of products are rounded to the inputs' dtype, sums are in float32.
    """

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
        return float(x.q.shape[-1] ** -0.5 if x.scale is None else x.scale)

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
            state: Tensor = x.state[row].float()
            return state
        return torch.zeros(x.v.shape[2], x.k.shape[3], x.v.shape[3])

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        """One sequence: q, k [T, HV, K], v [T, HV, V], g, beta [T, HV], state [HV, K, V]. Returns o [T, HV, V] and the state."""
        rows = []
        for start in range(0, len(q), self.size):
            at = slice(start, start + self.size)
            piece = [t[at].transpose(0, 1) for t in (q, k, v, g, beta)]
            o, state = self.piece(piece[0], piece[1], piece[2], piece[3], piece[4], state, scale)
            state = self.between(state)
            rows.append(o.transpose(0, 1))
        return torch.cat(rows) if rows else v.float() * 0, state

    def between(self, state: Tensor) -> Tensor:
        return state

    def low(self, x: Tensor, like: Tensor) -> Tensor:
        """An operand as a kernel stores it: rounded to the inputs' dtype."""
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

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        """One chunk: q, k [HV, C, K], v [HV, C, V], g, beta [HV, C], state [HV, K, V]. Returns o [HV, C, V] and the state."""
        total = self.cumulative(g)
        decays = self.decays(total)
        grown = total.exp().unsqueeze(-1)
        solved = self.solve(self.corrections(k, beta, decays), k)
        written = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * v, v)), v)
        erased = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * grown * k, k)), k)
        low_state = self.low(state, k)
        fresh = self.low(written.float() - self.dot(erased, low_state), v)
        scores = self.low(self.masked(self.dot(q, k.mT) * decays), k)
        o = scale * (grown * self.dot(q, low_state) + self.dot(scores, fresh))
        last = self.last(total)
        decayed = self.low((last - total).exp().unsqueeze(-1) * fresh, v)
        return o, self.onto(last.exp().unsqueeze(-1) * state, k, decayed)

    def onto(self, state: Tensor, k: Tensor, decayed: Tensor) -> Tensor:
        return state + self.dot(k.mT, decayed)


class ByAlpha(Chunkwise):
    """The same rule, which takes the decay alpha and its logarithm in float32. A state that is forgotten decays by 1e-38."""

    domain = Domain(decays=("linear",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(g=self.log(x.alpha.float())))

    def log(self, alpha: Tensor) -> Tensor:
        return alpha.clamp(min=torch.finfo(torch.float32).tiny).log()


class Serving(Right, Adapter):
    """Decode on a pool of states: request by request and token by token in float32. Each state is written back in place."""

    algorithm = "recurrent"
    domain = PoolDomain()

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        steps, scale = Chunkwise(), Chunkwise().scale(x)
        q, k = (steps.normalise(t.float()) if x.qk_norm else t.float() for t in (x.q, x.k))
        q, k = (steps.repeat(t, x.v.shape[2]).flatten(0, 1) for t in (q, k))
        v, g, beta = (t.float().flatten(0, 1) for t in (x.v, x.g, x.beta))
        o = torch.zeros(v.shape)
        for request, (start, end) in enumerate(steps.boundaries(x)):
            slot = self.slot(x, request)
            if slot is None:
                continue
            states = [self.read(x, request, slot)]
            for t in range(start, end):
                before = states[self.parent(x, t, t - start) + 1]
                o[t], state = self.step(q[t] * scale, k[t], v[t], g[t], beta[t], before)
                states.append(state)
            self.write(x, request, slot, states)
        return self.answer(x, o.to(x.v.dtype).reshape(x.v.shape)), x.pool

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        return o

    def slot(self, x: Inputs, request: int) -> int | None:
        """The slot of a request, or None if the request is padding."""
        slot = int(x.slots[request])
        return None if slot == x.padding else slot

    def begins(self, x: Inputs, request: int) -> bool:
        return x.has_initial_state is not None and not int(x.has_initial_state[request])

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        """The state [HV, K, V] that a request starts from."""
        state: Tensor = x.pool[slot].float()
        return torch.zeros_like(state) if self.begins(x, request) else state

    def step(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Outputs:
        """One token: q, k [HV, K], v [HV, V], g [HV] or [HV, K], beta [HV], state [HV, K, V].

        Returns o [HV, V] and the state after the token.
        """
        state = self.decay(g).reshape(*g.shape, *[1] * (3 - g.ndim)) * state
        fresh = beta.unsqueeze(-1) * (v - (k.unsqueeze(-1) * state).sum(-2))
        state = state + k.unsqueeze(-1) * fresh.unsqueeze(-2)
        return (q.unsqueeze(-1) * state).sum(-2), state

    def parent(self, x: Inputs, row: int, token: int) -> int:
        """The number of the token that a token follows; -1 for the first. `row` counts the tokens of all requests."""
        return token - 1 if x.get("parents") is None else int(x.parents.flatten()[row])

    def decay(self, g: Tensor) -> Tensor:
        return g.exp()

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        """After how many of a request's tokens its state is stored: the accepted ones, or all."""
        return tokens if x.accepted is None else int(x.accepted[request])

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        """Write the state to keep into the slot. `states` has the state before the first token and after each token."""
        x.pool[slot] = states[self.accepted_count(x, request, len(states) - 1)]


class ServingByAlpha(Serving):
    """The same, which takes the decay alpha and multiplies by it."""

    domain = PoolDomain(rule=Domain(decays=("linear",), backward=False))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(g=x.alpha))

    def decay(self, g: Tensor) -> Tensor:
        return g


class Layered(Right, Adapter):
    """The GDN layer: projections, convolution, gates, rule and gated norm. Each result is stored in the inputs' dtype."""

    algorithm = "chunkwise"
    chunk: int | None = 64
    domain = LayerDomain()

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if x.pads is None:
            return self.unpadded(x)
        real = no_padding(x.pads, x.hidden.shape[1])
        ends = torch.tensor([0, *real.sum(-1).tolist()]).cumsum(0)
        y, state, conv_state = self.unpadded(x.replaced(hidden=x.hidden[real].unsqueeze(0), cu_seqlens=ends, pads=None))
        return torch.zeros_like(x.hidden).masked_scatter(real.unsqueeze(-1), y), state, conv_state

    def unpadded(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        sections = self.sections(x, self.project(x.hidden, x.in_proj))
        mixed, conv_state = self.convolve(x, torch.cat([sections[name] for name in "qkv"], -1))
        layer, beta = x.layer, self.strength(x, sections["b"])
        q, k, v = mixed.split([layer.sections[name] for name in "qkv"], -1)
        o, state = self.rule(
            Inputs(
                q=q.unflatten(-1, (layer.heads, -1)),
                k=k.unflatten(-1, (layer.heads, -1)),
                v=v.unflatten(-1, (layer.value_heads, -1)),
                g=self.decay(x, sections["a"]),
                beta=beta,
                state=x.state,
                cu_seqlens=x.cu_seqlens,
                scale=None,
                qk_norm=True,
                output_final_state=True,
            )
        )
        normed = self.gate(x, o, sections["z"].unflatten(-1, (layer.value_heads, -1)))
        y = self.project(normed.flatten(-2), x.out_proj)
        return (y, state, conv_state) if x.output_final_state else (y, None, None)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x.float() @ weight.float().mT).to(x.dtype)

    def sections(self, x: Inputs, projected: Tensor) -> dict[str, Tensor]:
        widths = x.layer.sections
        return dict(zip(widths, projected.split([*widths.values()], -1), strict=True))

    def convolve(self, x: Inputs, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """SiLU of the convolution of q, k, v [B, T, C], sequence by sequence; and each sequence's last inputs [N, C, W]."""
        rows, states, width = [], [], x.conv.shape[-1]
        for row, (start, end) in enumerate(self.boundaries(x)):
            line = torch.cat([self.before(x, row), mixed.flatten(0, 1)[start:end]])
            states.append(line[-width:].mT)
            windows = line[1:].float().unfold(0, width, 1) if end > start else line.new_zeros(0, *x.conv.shape)
            total = (windows * x.conv.float()).sum(-1)
            rows.append(self.activated(x, total if x.conv_bias is None else total + x.conv_bias.float()))
        return torch.cat(rows).to(mixed.dtype).reshape(mixed.shape), torch.stack(states)

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        return Chunkwise().boundaries(Inputs(cu_seqlens=x.cu_seqlens, q=x.hidden))

    def before(self, x: Inputs, row: int) -> Tensor:
        """The inputs [W, C] that the convolution sees before a sequence: the convolution state, or zeros."""
        if x.conv_state is None:
            return torch.zeros(x.conv.shape[-1], x.conv.shape[0], dtype=x.hidden.dtype)
        last: Tensor = x.conv_state[row].mT
        return last

    def activated(self, x: Inputs, total: Tensor) -> Tensor:
        return torch.nn.functional.silu(total)

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        speed: Tensor = x.A_log.exp()
        return -speed * torch.nn.functional.softplus(a.float() + x.dt_bias)

    def strength(self, x: Inputs, b: Tensor) -> Tensor:
        return (torch.sigmoid(b.float()) * (2 if x.allow_neg_eigval else 1)).to(b.dtype)

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return Chunkwise().run(x)

    def normed(self, x: Inputs, o: Tensor) -> Tensor:
        return o * (o.square().mean(-1, keepdim=True) + x.eps).rsqrt() * x.norm.float()

    def gate(self, x: Inputs, o: Tensor, z: Tensor) -> Tensor:
        return (self.normed(x, o.float()) * torch.nn.functional.silu(z.float())).to(o.dtype)


class KdaLayered(Layered):
    """The KDA layer, whose rule goes token by token in float32."""

    algorithm = "recurrent"
    chunk = None
    domain = LayerDomain("kda_layer")

    def sections(self, x: Inputs, projected: Tensor) -> dict[str, Tensor]:
        """The sections of in_proj's output; a and z are the gates after their second projections."""
        sections = super().sections(x, projected)
        decay, gate = self.project(sections["f"], x.decay_proj), self.project(sections["z"], x.gate_proj)
        return {**sections, "a": decay, "z": self.shifted(gate, x)}

    def shifted(self, gate: Tensor, x: Inputs) -> Tensor:
        return (gate.float() + x.gate_bias.float()).to(gate.dtype)

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        raw = a.unflatten(-1, (x.layer.value_heads, -1)).float() + x.dt_bias
        return -x.A_log.exp().unsqueeze(-1) * torch.nn.functional.softplus(raw)

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        rule, groups = Chunkwise(), x.v.shape[2] // x.q.shape[2]
        q, k = (self.unit(y.float()).repeat_interleave(groups, 2).flatten(0, 1) for y in (x.q, x.k))
        v, g, beta = (y.float().flatten(0, 1) for y in (x.v, x.g, x.beta))
        rows, states = [], []
        for row, (start, end) in enumerate(rule.boundaries(x)):
            state = rule.initial(x, row)
            for token in range(start, end):
                state = self.step(state, k[token], v[token], g[token], beta[token])
                rows.append(torch.einsum("hk,hkv->hv", q[token], state) * q.shape[-1] ** -0.5)
            states.append(state)
        o = torch.stack(rows) if rows else v
        return o.reshape(x.v.shape).to(x.v.dtype), torch.stack(states)

    def unit(self, y: Tensor) -> Tensor:
        return y * (y.square().sum(-1, keepdim=True) + EPS).rsqrt()

    def step(self, state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The states [HV, K, V] after a token with k, g [HV, K], v [HV, V] and beta [HV]."""
        state = g.exp().unsqueeze(-1) * state
        recalled = torch.einsum("hk,hkv->hv", k, state)
        return state + torch.einsum("hk,hv->hkv", k, beta.unsqueeze(-1) * (v - recalled))

    def gate(self, x: Inputs, o: Tensor, z: Tensor) -> Tensor:
        return (self.normed(x, o.float()) * z.float().sigmoid()).to(o.dtype)


def at_32_bits(x: Tensor) -> Tensor:
    """Return x as read at offsets computed in 32 bits: those of 2^31 elements and more wrap to before x."""
    flat = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    offsets: Tensor = torch.zeros((), dtype=torch.int32, device=x.device)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        step = (stride + 2**31) % 2**32 - 2**31
        offsets = offsets.unsqueeze(-1) + torch.arange(size, dtype=torch.int32, device=x.device) * step
    places = (offsets.long() + int(x.storage_offset())).clamp(0, max(len(flat) - 1, 0))
    return x + (flat[places].nan_to_num(0.0) - x).detach() if x.numel() else x
