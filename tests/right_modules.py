"""Right modules in plain torch that round elsewhere than those of the zoo: other orders of sums, steps that are stored or fused."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.operation import Inputs, sequences
from properties.modules.domain import ModuleDomain
from verify.adapters.base import Adapter
from verify.zoo.modules import Conv, ConvMasked, ConvSteps, Gate, GatedNorm, KdaGate, L2Norm, NormGateLinear


class ConvLastFirst(Conv):
    """Taps summed last to first from the bias on, silu as a product."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        y = line.new_zeros(count, line.shape[-1]) + (0.0 if x.bias is None else x.bias)
        for tap in reversed(range(x.weight.shape[-1])):
            y = torch.addcmul(y, x.weight[:, tap], line[tap : tap + count])
        return y

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return y * y.sigmoid() if x.activation == "silu" else y


class ConvStateIsAView(Conv):
    """The final state of a batch of one sequence without an initial state is a view of the last inputs."""

    def run(self, x: Inputs) -> Any:
        y, state = super().run(x)
        taps = x.weight.shape[-1]
        if state is not None and x.state is None and x.cu_seqlens is None and len(x.x) == 1 and x.x.shape[1] >= taps:
            state = x.x[:, -taps:].mT
        return y, state


class ConvInSteps(Conv):
    """torch's convolution in float32, its result stored in the inputs' dtype, and silu a step of its own."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        if not count:
            return line.new_zeros(0, line.shape[-1]) + 0 * (x.weight.sum() + (0.0 if x.bias is None else x.bias.sum()))
        return F.conv1d(line.mT.unsqueeze(0), x.weight.unsqueeze(1), x.bias, groups=line.shape[-1])[0].mT.to(x.x.dtype)

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y


class ConvTogether(Adapter):
    """All sequences of a batch at once, padded on the left, products summed by one contraction."""

    algorithm = "pointwise"
    domain = ModuleDomain("causal_conv1d", packed=False, empty=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        taps = x.weight.shape[-1]
        state = x.x.new_zeros(x.x.shape[0], *x.weight.shape) if x.state is None else x.state
        line = torch.cat([state.mT, x.x], 1)
        y = (line[:, 1:].float().unfold(1, taps, 1) * x.weight.float()).sum(-1)
        y = y if x.bias is None else y + x.bias.float()
        y = F.silu(y) if x.activation == "silu" else y
        return y.to(x.x.dtype), line[:, -taps:].mT if x.output_final_state else None


class ConvRolls(Adapter):
    """One token at a time through a window of W - 1 columns, which rolls by one column for each token."""

    algorithm = "pointwise"
    domain = ModuleDomain("causal_conv1d", state_columns="W-1", longest=40, backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        lengths = sequences(x, "x")
        shape = (len(lengths), x.weight.shape[0], x.weight.shape[1] - 1)
        windows = list(x.x.new_zeros(shape) if x.state is None else x.state)
        rows = []
        for token, row in zip(x.x.flatten(0, 1), [row for row, length in enumerate(lengths) for _ in range(length)], strict=True):
            window = torch.cat([windows[row], token.unsqueeze(-1)], -1)
            rows.append(self.token(window, x))
            windows[row] = window[:, 1:]
        return torch.stack(rows).reshape(x.x.shape) if rows else torch.zeros_like(x.x), torch.stack(windows)

    def token(self, window: Tensor, x: Inputs) -> Tensor:
        y = self.terms(window, x.weight).sum(-1)
        y = y if x.bias is None else y + x.bias.float()
        return (F.silu(y) if x.activation == "silu" else y).to(x.x.dtype)

    def terms(self, window: Tensor, weight: Tensor) -> Tensor:
        return window.float() * weight.float()


class ConvRoundsProducts(ConvRolls):
    """Each product is rounded to the inputs' dtype, as a GPU multiplies two numbers in half precision."""

    rounds_products = True

    def terms(self, window: Tensor, weight: Tensor) -> Tensor:
        return (window * weight).float()


class ConvUnpads(ConvMasked):
    """Rows with padding are packed without it, and the outputs are put back; padding gets zeros."""

    def run(self, x: Inputs) -> Any:
        if x.pads is None:
            return super().run(x)
        real = self.real(x.x, x.pads).squeeze(-1)
        ends = torch.tensor([0, *real.sum(-1).tolist()]).cumsum(0)
        y, state = super().run(x.replaced(x=x.x[real].unsqueeze(0), cu_seqlens=ends, pads=None))
        return torch.zeros_like(x.x).masked_scatter(real.unsqueeze(-1), y), state


class ConvStepsInARing(ConvSteps):
    """The cache is a ring buffer with a pointer, which is turned back at the end. All calls share the pointer."""

    domain = dataclasses.replace(ConvSteps.domain, threads=False)

    def run(self, x: Inputs) -> Any:
        self.newest = -1
        y, cache = super().run(x.replaced(output_final_state=True))
        return self.answer(x, y, cache.roll(-1 - self.newest, -1))

    def shift(self, cache: Tensor, token: Tensor) -> None:
        self.newest = (self.newest + 1) % cache.shape[-1]
        cache[..., self.newest] = token

    def read(self, x: Inputs, cache: Tensor) -> Tensor:
        return super().read(x, cache.roll(-1 - self.newest, -1))


class GateNaive(Gate):
    """softplus by the logarithm up to 20, the sigmoid by its logarithm."""

    def softplus(self, raw: Tensor) -> Tensor:
        return torch.where(raw <= 20, (1 + raw.clamp(max=20).exp()).log(), raw)

    def strength(self, x: Inputs) -> Tensor:
        beta = F.logsigmoid(x.b.float()).exp()
        return (2 * beta if x.allow_neg_eigval else beta).to(x.b.dtype)


class GateInSteps(Gate):
    """The sigmoid in the inputs' dtype, doubled there; the speed negated before its exponential is multiplied."""

    def decay(self, x: Inputs) -> Tensor:
        return self.softplus(self.raw(x)) * (-self.speed(x))

    def strength(self, x: Inputs) -> Tensor:
        beta: Tensor = x.b.sigmoid()
        return beta * 2 if x.allow_neg_eigval else beta


class KdaGateNaive(GateNaive):
    """The same by channels."""

    domain = KdaGate.domain


class KdaGateInSteps(GateInSteps):
    """The same by channels."""

    domain = KdaGate.domain


class L2NormDivides(L2Norm):
    """Summed from the last channel on, one after another; a root and a division."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return wide.flip(-1).square().cumsum(-1)[..., -1:]

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return wide / (squares + eps).sqrt()


class L2NormOfStored(L2Norm):
    """Backward reads the result as it was stored."""

    def run(self, x: Inputs) -> Tensor:
        return _Stored.apply(x.x, self.eps(x))  # type: ignore[no-any-return]


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        rstd = 1 / (x.float().square().sum(-1, keepdim=True) + eps).sqrt()
        y = (x.float() * rstd).to(x.dtype)
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        y, rstd = ctx.saved_tensors
        y, dy = y.float(), cotangents[0].float()
        return (rstd * (dy - y * (y * dy).sum(-1, keepdim=True))).to(cotangents[0].dtype), None


class GatedNormInSteps(GatedNorm):
    """What was normalised is stored in the inputs' dtype, weighed in it, and gated in float32."""

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        y = y.to(x.x.dtype)
        return y if x.weight is None else x.weight * y


class GatedNormFused(GatedNorm):
    """Float32 throughout, the weight times the gate first, squares summed from the last channel on."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return wide.flip(-1).square().cumsum(-1)[..., -1:] / wide.shape[-1]

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return y

    def gate(self, x: Inputs) -> Tensor:
        z: Tensor = x.z.float()  # once: of two casts each would store its part of dz in the inputs' dtype
        gate = z * z.sigmoid()
        return gate if x.weight is None else gate * x.weight.float()


class GatedNormOfAStoredSum(GatedNorm):
    """The residual is added in float32 and the sum stored; then everything comes from the stored sum."""

    domain = ModuleDomain("gated_rms_norm", residuals=("none", "added", "returned"), gatings=("silu", "sigmoid"))

    def run(self, x: Inputs) -> Any:
        total = self.stored(x)
        y = (self.weighed(self.normalised(total, x), x) * self.gate(x)).to(x.x.dtype)
        return (y, total) if x.get("returns_sum") else y

    def stored(self, x: Inputs) -> Tensor:
        return self.kept(x).to(x.x.dtype)

    def kept(self, x: Inputs) -> Tensor:
        return x.x.float() if x.get("residual") is None else x.x.float() + x.residual.float()

    def normalised(self, total: Tensor, x: Inputs) -> Tensor:
        wide = total.float()
        return self.divided(wide, self.squares(wide, x), self.eps(x))

    def gate(self, x: Inputs) -> Tensor:
        z: Tensor = x.z.float()
        return z.sigmoid() if x.get("gating") == "sigmoid" else F.silu(z)


class GatedNormOfTwoSums(GatedNormOfAStoredSum):
    """The norm is that of the sum in float32; backward reads this norm and the stored sum, as flash-linear-attention does."""

    def normalised(self, total: Tensor, x: Inputs) -> Tensor:
        return norm_of_two_sums(total, self.kept(x), self.eps(x))


def norm_of_two_sums(total: Tensor, kept: Tensor, eps: float) -> Tensor:
    """Return kept / rms(kept). The gradient, in terms of the stored `total`, goes to `total`."""
    y: Tensor = _NormOfTwoSums.apply(total, kept.detach(), eps)
    return y


class _NormOfTwoSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, kept: Tensor, eps: float) -> Tensor:
        rstd = (kept.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(total, rstd)
        return kept * rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        total, rstd = ctx.saved_tensors
        y, dy = total.float() * rstd, cotangents[0]
        return (rstd * (dy - y * (y * dy).mean(-1, keepdim=True))).to(total.dtype), None, None


class NormGateLinearInSteps(NormGateLinear):
    """Every step is stored in the inputs' dtype: what was normalised, what was weighed, the gated norm, and the product."""

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        y = y.to(x.x.dtype)
        return y if x.weight is None else x.weight * y

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        return gated @ x.linear.mT


class NormGateLinearFused(NormGateLinear):
    """Float32 throughout: the gated norm is not stored, and the product is summed in blocks of 16 channels with the bias first."""

    def run(self, x: Inputs) -> Tensor:
        wide = self.wide(x)
        gated = self.weighed(self.divided(wide, self.squares(wide, x), self.eps(x)), x) * self.gate(x)
        y = x.x.new_zeros((), dtype=torch.float32) if x.bias is None else x.bias.float()
        linear = x.linear.float()  # once: of several casts each would store its part of the gradient in the inputs' dtype
        for block, columns in zip(gated.split(16, -1), linear.split(16, -1), strict=True):
            y = y + block @ columns.mT
        return y.to(x.x.dtype)
