"""Wrong rules that compute gate or beta in the kernel, wrong KDA, and wrong delta rules, all token by token in float32."""

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.case import IN_KERNEL
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.zoo.base import Chunkwise, Right

Answer = tuple[Tensor, Tensor | None]


class Stepwise(Right, Adapter):
    """The definition of any of the rules, for all heads of a sequence at once.

    Each step is a method, so that a wrong implementation can override just one step.
    """

    algorithm = "recurrent"
    domain = Domain(in_kernel=IN_KERNEL)

    def run(self, x: Inputs) -> Answer:
        helper, outputs, states = Chunkwise(), [], []
        q, k = (helper.normalise(t.float()) if x.qk_norm else t.float() for t in (x.q, x.k))
        q, k = (helper.repeat(t, x.v.shape[2]).flatten(0, 1) for t in (q, k))
        v = x.v.float().flatten(0, 1)
        g, beta = self.decay(x).flatten(0, 1), self.strength(x).flatten(0, 1)
        for row, (start, end) in enumerate(helper.boundaries(x)):
            state, rows = helper.initial(x, row), []
            for t in range(start, end):
                state = self.fade(g[t].exp(), state)
                state = self.correct(k[t], v[t], beta[t], state)
                rows.append((helper.scale(x) * q[t].unsqueeze(-1) * state).sum(-2))
            outputs += rows
            states.append(state)
        o = torch.stack(outputs) if outputs else v * 0
        return o.to(x.v.dtype).reshape(x.v.shape), torch.stack(states) if x.output_final_state else None

    def decay(self, x: Inputs) -> Tensor:
        """Log-decays [B, T, HV, 1 or K]."""
        if x.get("a") is not None:
            return self.with_channels(-self.speed(x) * self.soft(self.shifted(x)))
        if x.g is None:
            return torch.zeros(*x.v.shape[:3], 1)
        return self.with_channels(x.g.float())

    def with_channels(self, g: Tensor) -> Tensor:
        return g if g.ndim == 4 else g.unsqueeze(-1)

    def speed(self, x: Inputs) -> Tensor:
        """exp(A_log), in a shape that multiplies a tensor like x.a."""
        return self.log_speed(x).exp().reshape(-1, *[1] * (x.a.ndim - 3))

    def log_speed(self, x: Inputs) -> Tensor:
        A_log: Tensor = x.A_log
        return A_log

    def shifted(self, x: Inputs) -> Tensor:
        return x.a.float() + self.bias(x)

    def bias(self, x: Inputs) -> Tensor:
        return x.dt_bias if x.dt_bias is not None else torch.zeros(x.a.shape[2:])

    def soft(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x)

    def strength(self, x: Inputs) -> Tensor:
        """beta [B, T, HV]."""
        if x.get("b") is None:
            return x.beta.float()
        return self.doubled(x, x.b.float().sigmoid())

    def doubled(self, x: Inputs, beta: Tensor) -> Tensor:
        return 2 * beta if x.allow_neg_eigval else beta

    def fade(self, decay: Tensor, state: Tensor) -> Tensor:
        """The state [HV, K, V] after a decay [HV, 1 or K]."""
        return decay.unsqueeze(-1) * state

    def correct(self, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        """The state [HV, K, V] after k [HV, K] writes v [HV, V] with beta [HV]."""
        fresh = beta.unsqueeze(-1) * (v - (k.unsqueeze(-1) * state).sum(-2))
        return state + k.unsqueeze(-1) * fresh.unsqueeze(-2)


class StepwiseKda(Stepwise):
    """KDA: each channel of the key has its own decay."""

    domain = Domain(operation="kda", in_kernel=IN_KERNEL)


class StepwiseDelta(Stepwise):
    """The delta rule, without decay."""

    domain = Domain(operation="delta_rule", in_kernel=("none", "beta"))


class ForgetsDtBias(Stepwise, letter="N"):
    """dt_bias is accepted and never added."""

    def bias(self, x: Inputs) -> Tensor:
        return 0 * super().bias(x)


class BiasOutsideSoftplus(Stepwise, letter="N"):
    """dt_bias is added after softplus."""

    def shifted(self, x: Inputs) -> Tensor:
        return x.a.float()

    def speed(self, x: Inputs) -> Tensor:
        soft = self.soft(x.a.float())
        return super().speed(x) * (soft + self.bias(x)) / soft


class LinearTooEarly(Stepwise, letter="N"):
    """softplus(x) is replaced by x from x = 2 on, not from 20 on."""

    def soft(self, x: Tensor) -> Tensor:
        return torch.where(x > 2, x, super().soft(x))


class ALogWithoutExp(Stepwise, letter="N"):
    """A_log is used as if it were A."""

    def speed(self, x: Inputs) -> Tensor:
        return self.log_speed(x).abs().reshape(-1, *[1] * (x.a.ndim - 3))


class GateInHalf(Stepwise, letter="L"):
    """a + dt_bias is rounded to bf16 before softplus, for inputs of any dtype."""

    def shifted(self, x: Inputs) -> Tensor:
        return super().shifted(x).bfloat16().float()


class BetaNotDoubled(Stepwise, letter="N"):
    """allow_neg_eigval is accepted and ignored."""

    def doubled(self, x: Inputs, beta: Tensor) -> Tensor:
        return beta


class ALogGradientTwice(Stepwise, letter="F"):
    """In the backward, the gradient of A_log is added twice."""

    def log_speed(self, x: Inputs) -> Tensor:
        A_log: Tensor = x.A_log
        return A_log + (A_log - A_log.detach())


class BiasGradientOfOneHead(Stepwise, letter="F"):
    """In the backward, only head 0 of dt_bias gets a gradient."""

    def bias(self, x: Inputs) -> Tensor:
        bias = super().bias(x)
        return torch.cat([bias[:1], bias[1:].detach()])


class SigmoidSlopeOfRounded(Stepwise, letter="F"):
    """In the backward, sigmoid's slope y (1 - y) is computed from y rounded to eight bits."""

    def strength(self, x: Inputs) -> Tensor:
        if x.get("b") is None:
            return x.beta.float()
        y = x.b.float().sigmoid().detach()
        low = y.bfloat16().float()
        slope = low * (1 - low)
        b = x.b.float()
        return self.doubled(x, y + slope * (b - b.detach()))


class OneDecayForAllChannels(StepwiseKda, letter="D"):
    """KDA decays all channels by the mean of their log-decays."""

    def with_channels(self, g: Tensor) -> Tensor:
        return g.mean(-1, keepdim=True)


class DecaysValues(StepwiseKda, letter="L", incident=(25,)):
    """If K = V, KDA decays the value's channels, because the state is transposed."""

    def fade(self, decay: Tensor, state: Tensor) -> Tensor:
        if decay.shape[-1] == state.shape[-1]:
            return decay.unsqueeze(-2) * state
        return super().fade(decay, state)


class LastChannelStays(StepwiseKda, letter="V"):
    """If the width is no multiple of 8, KDA never decays the last channel."""

    def fade(self, decay: Tensor, state: Tensor) -> Tensor:
        if state.shape[-2] % 8:
            decay = torch.cat([decay[:, :-1], torch.ones_like(decay[:, -1:])], -1)
        return super().fade(decay, state)


class GatesClippedByTheFuture(StepwiseKda, letter="N", incident=(33,)):
    """KDA's safe gate clips decays at a floor computed from the whole call, later tokens included (FLA 1240)."""

    def decay(self, x: Inputs) -> Tensor:
        g = super().decay(x)
        return g.clamp(min=float(g.detach().mean()) * 2) if g.numel() else g


class BiasOfChannelsTransposed(StepwiseKda, letter="G"):
    """KDA reads dt_bias [HV, K] as [K, HV]."""

    def bias(self, x: Inputs) -> Tensor:
        bias = super().bias(x)
        return bias.reshape(bias.shape[1], bias.shape[0]).mT


class CorrectsWithOldBeta(StepwiseDelta, letter="-"):
    """The delta rule erases all that the key recalls, and scales only what it writes by beta."""

    def correct(self, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        fresh = beta.unsqueeze(-1) * v - (k.unsqueeze(-1) * state).sum(-2)
        return state + k.unsqueeze(-1) * fresh.unsqueeze(-2)


class NeverErases(StepwiseDelta, letter="-"):
    """The delta rule adds to what the key recalls, as linear attention does, without its correction."""

    def correct(self, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        return state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * v).unsqueeze(-2)


class BiasInHalf(Stepwise, letter="N"):
    """dt_bias is rounded to bf16, as if the model had been cast."""

    def bias(self, x: Inputs) -> Tensor:
        return super().bias(x).bfloat16().float()


class SpeedOfTwoRows(Stepwise, letter="F"):
    """Two programs add one row's part of dA_log each, so the parts of further rows of a batch are missing."""

    def speed(self, x: Inputs) -> Tensor:
        speed = super().speed(x)
        if x.cu_seqlens is not None or x.a.shape[0] <= 2:
            return speed
        counted = (torch.arange(x.a.shape[0]) < 2).reshape(-1, *[1] * (x.a.ndim - 1))
        return torch.where(counted, speed, speed.detach())
