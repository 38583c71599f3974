"""Wrong norms in plain torch, each with one mistake that somebody made or could have made."""

import torch
from torch import Tensor

from oracles.norm import EPS
from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from verify.zoo.modules import GatedNorm, L2Norm, NormGateLinear, block_rounded


class NormEpsInsideMean(L2Norm, letter="E", incident=(34,)):
    """eps is added to the mean of squares, not to their sum."""

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return super().divided(wide, squares, eps * wide.shape[-1])


class NormEpsAsFloor(L2Norm, letter="E", incident=(34,)):
    """The norm is at least eps: max(norm, eps)."""

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.normalize(wide, dim=-1, eps=eps)


class NormEpsAfterTheRoot(L2Norm, letter="E"):
    """eps is added to the norm, not to its square."""

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return wide / ((squares + 1e-30).sqrt() + eps)


class NormEpsTenTimes(L2Norm, letter="E"):
    """An absent eps means 1e-5."""

    def eps(self, x: Inputs) -> float:
        return 1e-5 if x.eps is None else super().eps(x)


class NormIgnoresEps(L2Norm, letter="E"):
    """eps is 1e-6 in every call."""

    def eps(self, x: Inputs) -> float:
        return EPS


class NormSecondEps(L2Norm, letter="E"):
    """A second eps of 1e-12 guards the root."""

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return super().divided(wide, squares + 1e-12, eps)


class NormOverHeads(L2Norm, letter="-"):
    """The norm is taken over all heads of a token together."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return wide.square().sum((-1, -2), keepdim=True)


class NormSquaresInHalf(L2Norm, letter="L"):
    """Squares are stored in the inputs' dtype: in fp16 those over 65504 overflow, and those under 2^-24 are lost."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return (x.x * x.x).sum(-1, keepdim=True).float()


class NormWithoutProjection(L2Norm, letter="F"):
    """The gradient is scaled by the norm, but not projected."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return super().squares(wide.detach(), x)


class NormWithoutTheTail(L2Norm, letter="I"):
    """Channels beyond the last power of two are left out of the sum."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return super().squares(wide[..., : 1 << (wide.shape[-1].bit_length() - 1)], x)


class NormLeavesARow(L2Norm, letter="V"):
    """The last row of a last block of 32 that is not full is never written."""

    def run(self, x: Inputs) -> Tensor:
        y = super().run(x)
        rows = y.flatten(0, 2)
        if len(rows) % 32 == 0:
            return y
        return torch.cat([rows[:-1], torch.empty(1, rows.shape[-1], dtype=y.dtype) + 0 * rows[-1:]]).reshape(y.shape)


class NormTokensShareAnExponent(L2Norm, letter="L"):
    """Inputs are rounded to 20 bits of an exponent that all tokens share."""

    def run(self, x: Inputs) -> Tensor:
        return super().run(x.replaced(x=block_rounded(x.x, (0, 1))))


class NormByHeads(L2Norm, letter="-"):
    """If there are more than four heads, the last is summed in another order, although the same bits are promised."""

    domain = ModuleDomain("l2norm", position_independent=True)

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        squares = super().squares(wide, x)
        factor = torch.ones(wide.shape[2], 1)
        if wide.shape[2] > 4:
            factor[-1] = 1 + 2.0**-22
        return squares * factor


class GatedNormGateFirst(GatedNorm, letter="-"):
    """The gate is applied before the norm."""

    def wide(self, x: Inputs) -> Tensor:
        return super().wide(x) * super().gate(x)

    def gate(self, x: Inputs) -> Tensor:
        return torch.ones_like(x.z, dtype=torch.float32) + 0 * x.z


class GatedNormEpsTenTimes(GatedNorm, letter="E"):
    """eps is 1e-5 in every call."""

    def eps(self, x: Inputs) -> float:
        return 1e-5


class GatedNormEpsInSum(GatedNorm, letter="E", incident=(34,)):
    """eps is added to the sum of squares, not to their mean."""

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return super().divided(wide, squares, eps / wide.shape[-1])


class GatedNormPlusOne(GatedNorm, letter="-"):
    """1 is added to the weight, as in other RMS norms."""

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.weight is None else y * (1 + x.weight.float())


class GatedNormSigmoid(GatedNorm, letter="-"):
    """The gate is a sigmoid."""

    def gate(self, x: Inputs) -> Tensor:
        return torch.sigmoid(x.z.float())


class GatedNormOfOneHead(GatedNorm, letter="F"):
    """The weight's gradient is that of the first head."""

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        if x.weight is None:
            return y
        first = (torch.arange(y.shape[2]) == 0).unsqueeze(-1)
        return y * torch.where(first, x.weight.float(), x.weight.detach().float())


class GatedNormRounds(GatedNorm, letter="L"):
    """The normalised numbers are stored in bfloat16 before the weight is applied, in a float32 call too."""

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return super().weighed(y.bfloat16().float(), x)


class GatedNormAbsentWeight(GatedNorm, letter="-"):
    """An absent weight is read as 2, which is 1 plus a weight of ones."""

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return 2 * y if x.weight is None else super().weighed(y, x)


class GatedNormClipsWeight(GatedNorm, letter="-"):
    """The weight is clamped to 1.5."""

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.weight is None else y * x.weight.float().clamp(-1.5, 1.5)


class NormGateLinearWithoutGate(NormGateLinear, letter="F"):
    """The backward computes the gated norm again without the gate, so that the gradient of the projection lacks it."""

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        wide = self.wide(x)
        bare = self.weighed(self.divided(wide, self.squares(wide, x), self.eps(x)), x).to(x.x.dtype)
        y = torch.nn.functional.linear(gated, x.linear.detach())
        of_linear = torch.nn.functional.linear(bare.detach(), x.linear)
        return y + (of_linear - of_linear.detach())


class NormGateLinearBiasAgain(NormGateLinear, letter="I"):
    """The bias is added once more for each block of 64 output channels before a channel."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.bias is None else y + x.bias.float() * (1 + torch.arange(y.shape[-1]) // 64)


class NormGateLinearBiasOfOnes(NormGateLinear, letter="-"):
    """An absent bias is read as ones."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return super().biased(y, x) if x.bias is not None else y + 1.0


class NormGateLinearBiasOfOneRow(NormGateLinear, letter="F"):
    """The gradient of the bias is that of the first batch row."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        if x.bias is None:
            return y
        first = (torch.arange(y.shape[0]) == 0).reshape(-1, 1, 1)
        return y + torch.where(first, x.bias.float(), x.bias.float().detach())


class NormGateLinearLeavesTheTail(NormGateLinear, letter="I"):
    """Channels of the gated norm beyond the last whole block of 16 are not multiplied."""

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        whole = gated.shape[-1] // 16 * 16 or gated.shape[-1]
        keep = torch.arange(gated.shape[-1]) < whole
        return super().projected(torch.where(keep, gated, 0), x)


class NormGateLinearByHeads(NormGateLinear, letter="G"):
    """The mean is taken over each half of the channels, as if there were two heads."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        if wide.shape[-1] % 2:
            return super().squares(wide, x)
        halves = wide.unflatten(-1, (2, -1)).square().mean(-1, keepdim=True)
        return halves.expand(*halves.shape[:-1], wide.shape[-1] // 2).flatten(-2)


class NormGateLinearOfHalf(NormGateLinear, letter="L"):
    """The gated norm is rounded to bfloat16 for the product, in a float32 call too."""

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        return super().projected(gated.bfloat16().to(gated.dtype), x)


class NormGateLinearTokensShareAnExponent(NormGateLinear, letter="L"):
    """The gated norm is rounded to 20 bits of an exponent that all tokens share."""

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        return super().projected(block_rounded(gated, (0, 1)), x)


class NormGateLinearClips(NormGateLinear, letter="-"):
    """The product is clamped to 4 on both sides."""

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        return super().projected(gated, x).clamp(-4, 4)
