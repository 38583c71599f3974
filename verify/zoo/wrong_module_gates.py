"""Wrong gates outside a kernel: log-decays and their gradients, each with one mistake that somebody made or could have made."""

from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.zoo.modules import Gate, KdaGate, block_rounded


class GateBiasInHalf(Gate, letter="N"):
    """dt_bias is rounded to bf16, as if the model had been cast."""

    def raw(self, x: Inputs) -> Tensor:
        return super().raw(x if x.dt_bias is None else x.replaced(dt_bias=x.dt_bias.bfloat16().float()))


class GateLinearAt2(Gate, letter="N"):
    """softplus is linear from 2 on, because the threshold of 20 lost its zero."""

    def softplus(self, raw: Tensor) -> Tensor:
        return torch.nn.functional.softplus(raw, threshold=2)


class GateOverflows(Gate, letter="N"):
    """softplus is computed as log(1 + exp(a)) everywhere, which is infinite from 89 on."""

    def softplus(self, raw: Tensor) -> Tensor:
        return (1 + raw.exp()).log()


class GateBiasAfterSoftplus(Gate, letter="-"):
    """dt_bias is added after softplus."""

    def decay(self, x: Inputs) -> Tensor:
        soft = self.softplus(x.a.float())
        return -self.speed(x) * (soft if x.dt_bias is None else soft + x.dt_bias)


class GateRawA(Gate, letter="-"):
    """A_log is used as if it were A."""

    def speed(self, x: Inputs) -> Tensor:
        speed: Tensor = x.A_log.float()
        return speed.unsqueeze(-1) if x.a.ndim == 4 else speed


class GateHeadsShareA(Gate, letter="G"):
    """Head h decays at the speed of head h // 2."""

    def speed(self, x: Inputs) -> Tensor:
        return super().speed(x)[torch.arange(len(x.A_log)) // 2]


class GateSlopeOfA(Gate, letter="F"):
    """The gradient of A_log has the wrong sign."""

    def speed(self, x: Inputs) -> Tensor:
        speed = super().speed(x)
        return 2 * speed.detach() - speed


class GateBiasOfOneRow(Gate, letter="F"):
    """The gradient of dt_bias is that of the first batch row."""

    def raw(self, x: Inputs) -> Tensor:
        if x.dt_bias is None:
            return super().raw(x)
        first = (torch.arange(x.a.shape[0]) == 0).reshape(-1, *[1] * (x.a.ndim - 1))
        return x.a.float() + torch.where(first, x.dt_bias, x.dt_bias.detach())


class GateBiasOfOnes(Gate, letter="-"):
    """An absent dt_bias is read as ones."""

    def raw(self, x: Inputs) -> Tensor:
        return super().raw(x) + (1.0 if x.dt_bias is None else 0.0)


class GateNotDoubled(Gate, letter="-"):
    """beta is not doubled if negative eigenvalues are allowed."""

    def strength(self, x: Inputs) -> Tensor:
        return super().strength(x.replaced(allow_neg_eigval=False))


class GateFlatAtZero(Gate, letter="F"):
    """The sigmoid is computed from exp(-|b|), whose slope is zero at b = 0 for automatic differentiation."""

    def strength(self, x: Inputs) -> Tensor:
        b: Tensor = x.b.float()
        small = (-b.abs()).exp()
        beta = torch.where(b >= 0, 1, small) / (1 + small)
        return (2 * beta if x.allow_neg_eigval else beta).to(x.b.dtype)


class GateReadsTheNext(Gate, letter="N", incident=(33,)):
    """A token's gate reads the next token's input."""

    def raw(self, x: Inputs) -> Tensor:
        raw = super().raw(x)
        return raw + 2.0**-20 * raw.roll(-1, 1)


class GateSkipsARow(Gate, letter="V"):
    """If there are more than 64 tokens and the last one begins a block of 32, it is not computed."""

    def decay(self, x: Inputs) -> Tensor:
        g = super().decay(x)
        tokens = g.shape[1]
        keep = (torch.arange(tokens) < tokens - 1).reshape(-1, *[1] * (g.ndim - 2))
        return g * keep if tokens > 64 and tokens % 32 == 1 else g


class GateOfRounded(Gate, letter="L"):
    """The gate is computed in the inputs' dtype."""

    def raw(self, x: Inputs) -> Tensor:
        return super().raw(x).to(x.a.dtype).float()


class GateHeadsShareAnExponent(Gate, letter="L"):
    """Inputs are rounded to 20 bits of an exponent that all heads share."""

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(a=block_rounded(x.a, (2,))))


class KdaGateLastChannels(KdaGate, letter="I"):
    """Channels after the last whole block of 16 have the next head's bias."""

    def raw(self, x: Inputs) -> Tensor:
        if x.dt_bias is None or x.a.shape[-1] <= 16:
            return super().raw(x)
        whole = x.a.shape[-1] // 16 * 16
        bias = torch.cat([x.dt_bias[:, :whole], x.dt_bias[:, whole:].roll(-1, 0)], -1)
        return x.a.float() + bias


class KdaGateFlatBias(KdaGate, letter="L"):
    """dt_bias [HV, K] is read channel by channel, as [K, HV]."""

    def raw(self, x: Inputs) -> Tensor:
        if x.dt_bias is None:
            return super().raw(x)
        return x.a.float() + x.dt_bias.mT.reshape(x.dt_bias.shape)


class KdaGateMixesChannels(KdaGate, letter="L"):
    """Inputs are rounded to 20 bits of an exponent that all channels share."""

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(a=block_rounded(x.a, (3,))))
