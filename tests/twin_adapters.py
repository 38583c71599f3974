"""Pairs of tiny implementations for tests of `twin`: each server differs from its trainer in one choice."""

from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.zoo.base import Chunkwise, Layered, Serving


class Steps(Adapter):
    """Token by token in float32, all sequences and heads at once."""

    algorithm = "recurrent"
    domain = Domain(backward=False, packed=False)
    _eps = 1e-6

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        group = x.v.shape[2] // x.q.shape[2]
        q, k = (self._normalised(y.float(), x).repeat_interleave(group, 2) for y in (x.q, x.k))
        decay, beta = self._decay(x.g.float()), self._beta(x.beta.float())
        state = x.v.new_zeros(*x.v.shape[:1], *x.v.shape[2:3], k.shape[-1], x.v.shape[-1]).float() if x.state is None else x.state
        scale, rows = k.shape[-1] ** -0.5 if x.scale is None else x.scale, []
        for token in zip(*(y.unbind(1) for y in (scale * q, k, x.v.float(), decay, beta)), strict=True):
            o, state = self._step(state, *token)
            state = self._stored(state)
            rows.append(o)
        return torch.stack(rows, 1).to(x.v.dtype), state

    def _step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        state = decay[..., None, None] * state
        state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - self._product(k, state))).unsqueeze(-2)
        return self._product(q, state), state

    def _product(self, q: Tensor, state: Tensor) -> Tensor:
        return (q.unsqueeze(-2) @ state).squeeze(-2)

    def _normalised(self, y: Tensor, x: Inputs) -> Tensor:
        return y * (y.square().sum(-1, keepdim=True) + self._eps).rsqrt() if x.qk_norm else y

    def _decay(self, g: Tensor) -> Tensor:
        return g.exp()

    def _beta(self, beta: Tensor) -> Tensor:
        return beta

    def _stored(self, state: Tensor) -> Tensor:
        return state


class Eps(Steps):
    """It has another eps in the norm of q and k, and does not say so."""

    _eps = 1e-5


class DeclaredEps(Eps):
    """It has another eps in the norm of q and k, and declares it."""

    domain = Domain(backward=False, packed=False, qk_norm_eps=("1e-5",))


class HalfState(Steps):
    """It stores the state in bf16 after each token."""

    def _stored(self, state: Tensor) -> Tensor:
        return state.bfloat16().float()


class HalfGate(Steps):
    """It computes the decay in bf16."""

    def _decay(self, g: Tensor) -> Tensor:
        return g.bfloat16().float().exp()


class Late(Steps):
    """It reads the state before the token's own update, which is wrong."""

    def _step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        o = self._product(q, state)
        return o, super()._step(state, q, k, v, decay, beta)[1]


class Chunk48(Chunkwise):
    """Chunks of 48 tokens."""

    chunk = 48
    size = 48
    domain = Domain(backward=False, dtypes=("fp32",))


class Parts(Chunk48):
    """It processes 64 tokens at a time, each in chunks of 48 and 16 tokens."""

    chunk = None

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows = []
        for tokens in zip(*(x.split(64) for x in (q, k, v, g, beta)), strict=True):
            o, state = super().sequence(*tokens, state, scale)
            rows.append(o)
        return torch.cat(rows), state


class InBatches(Chunk48):
    """The order of its sums depends on how many sequences a call has."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        self._many = x.q.shape[0] > 1
        return super().run(x)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return super().dot(a.flip(-1), b.flip(-2)) if self._many else super().dot(a, b)


class Promises(Steps):
    """It promises that a call may be cut anywhere."""

    domain = Domain(backward=False, packed=False, split_invariant=True)


class BreaksPromise(Promises):
    """It promises that and adds rounding at the end of each call."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        o, state = super().run(x)
        return o, state * (1 + 2**-22)


class Gate(Adapter):
    """Another operation."""

    algorithm = "pointwise"
    domain = ModuleDomain("gdn_gate")

    def run(self, x: Inputs) -> Any:
        raise NotImplementedError


class Fails(Steps):
    """It raises an error."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image")


class Chunk64(Chunk48):
    """Chunks of 64 tokens."""

    chunk = 64
    size = 64
    domain = Domain(backward=False)


class Pool(Serving):
    """A kernel on a pool of states."""

    domain = PoolDomain(rule=Domain(backward=False), layout="vk", most_tokens=3)


class Forgets(Pool):
    """It writes no state back to the pool."""

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        pass


class Dense(Pool):
    """It reads tokens as if they lay side by side in memory, and declares that they must."""

    domain = PoolDomain(rule=Domain(backward=False), layout="vk", most_tokens=3, views=("offset",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        read = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
        read = {name: y.as_strided(y.shape, y.new_empty(y.shape).stride()) for name, y in read.items()}
        return super().run(x.replaced(**read))


class Whole(Layered):
    """A whole layer with its cache."""

    domain = LayerDomain(backward=False, dtypes=("fp32",))


class HalfGates(Whole):
    """It stores the log-decay and beta in bf16."""

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        return super().decay(x, a).bfloat16().float()

    def strength(self, x: Inputs, b: Tensor) -> Tensor:
        return super().strength(x, b).bfloat16().float()


class Inside(Steps):
    """It computes its gate and beta itself."""

    domain = Domain(backward=False, packed=False, in_kernel=("both",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        g = -x.A_log.exp() * torch.nn.functional.softplus(self._biased(x))
        beta = x.b.float().sigmoid() * (2 if x.allow_neg_eigval else 1)
        return super().run(x.replaced(g=g, beta=beta))

    def _biased(self, x: Inputs) -> Tensor:
        return x.a.float() if x.dt_bias is None else x.a.float() + x.dt_bias


class NoBias(Inside):
    """It forgets the bias of the gate."""

    def _biased(self, x: Inputs) -> Tensor:
        return x.a.float()
