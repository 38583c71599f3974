"""Right modules of a layer in plain torch: convolutions, gates and norms. Each step is a method, as in base.py."""

import itertools
from typing import Any

import torch
from torch import Tensor

from oracles.norm import EPS
from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from verify.adapters.base import Adapter
from verify.zoo.base import Right


class Conv(Right, Adapter):
    """The causal convolution in float32, one sequence at a time, as a sum of shifted products."""

    algorithm = "pointwise"
    domain = ModuleDomain("causal_conv1d")

    def run(self, x: Inputs) -> Any:
        # Converted once for all sequences, so that the parts of a parameter's gradient are added in float32.
        x = x.replaced(weight=self.taps(x), bias=None if x.bias is None else x.bias.float())
        tokens = x.x.flatten(0, 1)
        outputs, finals = [], []
        for row, (start, end) in enumerate(self.boundaries(x)):
            state = self.initial(x, row)
            line = torch.cat([self.before(x, state, start), tokens[start:end].float()])
            y = self.biased(self.windows(line, x, end - start), x)
            outputs.append(self.activated(y, x))
            finals.append(self.final(state, tokens[start:end]))
        y = torch.cat(outputs).to(x.x.dtype).reshape(x.x.shape)
        return self.answer(x, y, torch.stack(finals).to(x.x.dtype))

    def answer(self, x: Inputs, y: Tensor, state: Tensor) -> Any:
        return y, state if x.output_final_state else None

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            length = x.x.shape[1]
            return [(row * length, (row + 1) * length) for row in range(x.x.shape[0])]
        return list(itertools.pairwise(x.cu_seqlens.tolist()))

    def initial(self, x: Inputs, row: int) -> Tensor:
        """The convolution state before a sequence [D, W], the oldest input first."""
        if x.state is not None:
            state: Tensor = x.state[row]
            return state
        return x.x.new_zeros(x.weight.shape)

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        """The W - 1 inputs before a sequence's tokens [W - 1, D]."""
        return state[:, 1:].mT.float()

    def taps(self, x: Inputs) -> Tensor:
        weight: Tensor = x.weight.float()
        return weight

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        """The convolution [T, D] of the inputs `line` [W - 1 + T, D]; `count` is T."""
        y = line.new_zeros(count, line.shape[-1])
        for tap in range(x.weight.shape[-1]):
            y = y + x.weight[:, tap] * line[tap : tap + count]
        return y

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.bias is None else y + x.bias

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return torch.nn.functional.silu(y) if x.activation == "silu" else y

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        """The convolution state after a sequence [D, W]."""
        return torch.cat([state, tokens.mT], -1)[:, -state.shape[-1] :]


class ConvShort(Conv):
    """The same with states of W - 1 columns, as serving libraries keep them."""

    domain = ModuleDomain("causal_conv1d", state_columns="W-1")

    def initial(self, x: Inputs, row: int) -> Tensor:
        """The convolution state before a sequence [D, W - 1], the oldest input first."""
        state: Tensor = x.x.new_zeros(x.weight[:, 1:].shape) if x.state is None else x.state[row]
        return state

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        return state.mT.float()

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        """The convolution state after a sequence [D, W - 1]."""
        return torch.cat([state, tokens.mT], -1)[:, len(tokens) :]


class ConvMasked(Conv):
    """The same with a mask: padding at the start of rows counts as zeros."""

    domain = ModuleDomain("causal_conv1d", attention_mask=True)

    def run(self, x: Inputs) -> Any:
        return super().run(x if x.pads is None else x.replaced(x=self.masked(x.x, self.real(x.x, x.pads))))

    def real(self, tokens: Tensor, pads: tuple[int, ...]) -> Tensor:
        """The mask of tokens that are no padding [B, T, 1]."""
        return (torch.arange(tokens.shape[1]) >= torch.tensor(pads).unsqueeze(-1)).unsqueeze(-1)

    def masked(self, tokens: Tensor, real: Tensor) -> Tensor:
        return torch.where(real, tokens, 0)


class ConvSteps(Conv):
    """The convolution in float32, one token of a batch at a time. The answer is the cache, which each step updates in place."""

    domain = ModuleDomain("causal_conv1d", packed=False, longest=9, backward=False)

    def run(self, x: Inputs) -> Any:
        cache = x.x.new_zeros(x.x.shape[0], *x.weight.shape) if x.state is None else x.state.clone()
        rows = [self.step(x, token, cache) for token in x.x.unbind(1)]
        return self.answer(x, torch.stack(rows, 1) if rows else x.x.clone(), cache)

    def step(self, x: Inputs, token: Tensor, cache: Tensor) -> Tensor:
        """The outputs [B, D] of the next token; the cache [B, D, W] is updated."""
        self.shift(cache, token)
        return self.read(x, cache)

    def shift(self, cache: Tensor, token: Tensor) -> None:
        cache.copy_(torch.cat([cache[..., 1:], token.unsqueeze(-1)], -1))

    def read(self, x: Inputs, cache: Tensor) -> Tensor:
        y = (cache.float() * self.taps(x)).sum(-1)
        return self.activated(self.biased(y, x), x).to(x.x.dtype)


class Gate(Right, Adapter):
    """The gate of the gated delta rule in float32, with beta."""

    algorithm = "pointwise"
    domain = ModuleDomain("gdn_gate")

    def run(self, x: Inputs) -> Any:
        g = self.decay(x)
        return (g, self.strength(x)) if "b" in x else g

    def decay(self, x: Inputs) -> Tensor:
        return -self.speed(x) * self.softplus(self.raw(x))

    def speed(self, x: Inputs) -> Tensor:
        speed: Tensor = x.A_log.float().exp()
        return speed.unsqueeze(-1) if x.a.ndim == 4 else speed

    def raw(self, x: Inputs) -> Tensor:
        raw: Tensor = x.a.float()
        return raw if x.dt_bias is None else raw + x.dt_bias

    def softplus(self, raw: Tensor) -> Tensor:
        return torch.nn.functional.softplus(raw)

    def strength(self, x: Inputs) -> Tensor:
        beta: Tensor = x.b.float().sigmoid()
        return (2 * beta if x.allow_neg_eigval else beta).to(x.b.dtype)


class KdaGate(Gate):
    """The gate of KDA, with one log-decay for each channel of the key."""

    domain = ModuleDomain("kda_gate")


class L2Norm(Right, Adapter):
    """The L2 norm in float32."""

    algorithm = "pointwise"
    domain = ModuleDomain("l2norm")

    def run(self, x: Inputs) -> Tensor:
        wide = self.wide(x)
        return self.divided(wide, self.squares(wide, x), self.eps(x)).to(x.x.dtype)

    def wide(self, x: Inputs) -> Tensor:
        wide: Tensor = x.x.float()
        return wide

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return wide.square().sum(-1, keepdim=True)

    def eps(self, x: Inputs) -> float:
        return EPS if x.eps is None else float(x.eps)

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return wide * (squares + eps).rsqrt()


class GatedNorm(L2Norm):
    """The gated RMSNorm in float32: norm, weight, gate."""

    domain = ModuleDomain("gated_rms_norm")

    def run(self, x: Inputs) -> Tensor:
        wide = self.wide(x)
        y = self.weighed(self.divided(wide, self.squares(wide, x), self.eps(x)), x)
        return (y * self.gate(x)).to(x.x.dtype)

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return wide.square().mean(-1, keepdim=True)

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.weight is None else y * x.weight.float()

    def gate(self, x: Inputs) -> Tensor:
        return torch.nn.functional.silu(x.z.float())


class NormGateLinear(GatedNorm):
    """The gated RMSNorm in float32, stored in the inputs' dtype, and its projection."""

    domain = ModuleDomain("norm_gate_linear")

    def run(self, x: Inputs) -> Tensor:
        gated = super().run(x)
        return self.biased(self.projected(gated, x).float(), x).to(x.x.dtype)

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        """The product in the inputs' dtype, summed in float32."""
        return torch.nn.functional.linear(gated, x.linear)

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.bias is None else y + x.bias.float()


def block_rounded(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """x rounded to 20 bits below the largest exponent along some axes. Its gradient is passed on unchanged."""
    if not x.numel():
        return x
    wide = x.detach().float()
    top = 2.0 ** (wide.abs().amax(axes, keepdim=True).clamp(min=2.0**-30).log2().ceil() - 20)
    return x + ((wide / top).round() * top - wide).to(x.dtype)
