"""Modules that are wrong only just over a limit: tests/laws/test_just_over.py says which case of a check shows each of them."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.wrong_just_over import NumbersOfSequences
from tests.wrong_options import SumNorm
from verify.zoo.modules import Conv, Gate, GatedNorm, KdaGate, L2Norm, NormGateLinear


class ConvEqualIfTheLastIsTheMean(Conv):
    """Packed sequences are taken for equally long if the last length is the mean of all."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        spans = super().boundaries(x)
        last = spans[-1][1] - spans[-1][0]
        return [(row * last, (row + 1) * last) for row in range(len(spans))] if last * len(spans) == spans[-1][1] else spans


class BiasOfAFullBlock(NormGateLinear):
    """Outputs come in blocks of 128. A last block that is not full gets the bias of outputs before it."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        if x.bias is None or len(x.bias) < 128:
            return super().biased(y, x)
        full, rest = len(x.bias) // 128 * 128, len(x.bias) % 128
        return y + torch.cat([x.bias[:full], x.bias[len(x.bias) - 128 :][:rest]]).float()


class GateHeadsUpTo512(Gate):
    """Heads from the 513th on have the speeds of the first ones."""

    def speed(self, x: Inputs) -> Tensor:
        speed = super().speed(x)
        return speed[torch.arange(len(speed)) % 512]


class UnitRowsOver512(L2Norm):
    """Over 512 channels, the backward takes the normalised row for a unit vector, as if there were no eps."""

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        if wide.shape[-1] <= 512:
            return super().divided(wide, squares, eps)
        y = super().divided(wide, squares.detach(), eps)
        unit = torch.nn.functional.normalize(y.detach(), dim=-1)
        along = (y * unit).sum(-1, keepdim=True)
        return y - unit * (along - along.detach())


class TailsOfL2(L2Norm):
    """Over 512 channels, squares are added in groups of 4, and those of a group that is not full are left out."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        channels = wide.shape[-1]
        seen = torch.arange(channels) < channels // 4 * 4
        return super().squares(wide * seen if channels > 512 else wide, x)


class TailsOfGatedNorms(TailsOfL2, GatedNorm):
    """The same in a gated norm."""

    domain = GatedNorm.domain


class SquaresUpTo8192(NormGateLinear):
    """The squares of a row are read as one block of 8,192 channels, and those behind it are not added."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return super().squares(wide * (torch.arange(wide.shape[-1]) < 2**13), x)


class ConvTilesOf16Bits(Conv):
    """Tiles of 8 tokens have numbers of 16 bits, and those behind them are not computed."""

    def run(self, x: Inputs) -> Any:
        y, state = super().run(x)
        return y * (torch.arange(y.shape[1]) < 8 * 2**16).view(-1, 1), state


class ConvStatesOf10Bits(Conv):
    """Packed sequence 1,024 begins from the state of the first one, and so on."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row if x.cu_seqlens is None else row % 1024)


class ConvOneTokenIsTheFirst(Conv):
    """A call of one token takes the way of a decode, where row n has state n. Its token may be that of another packed sequence."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, 0 if x.x.shape[:2].numel() == 1 else row)


class ConvBatchesOf10Bits(Conv):
    """Row 1,024 of a batch begins from the state of the first one, and so on."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row % 1024 if x.cu_seqlens is None else row)


class ConvNumbersInBf16(NumbersOfSequences, Conv):
    """Packed sequences are numbered in the dtype of the tokens."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row if x.cu_seqlens is None else self.numbered(row, x.x.dtype))


class ConvStartsOf16Bits(Conv):
    """Packed sequences that begin behind token 65,535 begin from zeros."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        return super().before(x, state * (start < 2**16 or x.cu_seqlens is None), start)


class RowsOf17Bits(GatedNorm):
    """Rows of the norm from 131,072 on, tokens times heads, stay zeros."""

    def run(self, x: Inputs) -> Tensor:
        y = super().run(x)
        return y * (torch.arange(y.shape[:-1].numel()) < 2**17).reshape(*y.shape[:-1], 1)


class ChannelsOf12Bits(Conv):
    """Channels of a convolution from 4,096 on get the weights of the first ones."""

    def taps(self, x: Inputs) -> Tensor:
        return super().taps(x)[torch.arange(len(x.weight)) % 2**12]


class ChannelsUpTo12288(Conv):
    """Channels of a convolution from 12,288 on stay without weights."""

    def taps(self, x: Inputs) -> Tensor:
        return super().taps(x) * (torch.arange(len(x.weight)) < 12_288).unsqueeze(-1)


class BiasUpTo16384(KdaGate):
    """dt_bias is read as one block of 16,384 numbers, and what lies behind it as zeros."""

    def raw(self, x: Inputs) -> Tensor:
        read = torch.arange(x.a.shape[-2:].numel()).reshape(x.a.shape[-2:]) < 2**14
        return super().raw(x if x.dt_bias is None else x.replaced(dt_bias=x.dt_bias * read))


class SumsUpTo512(SumNorm):
    """The sum that is returned has no gradient over 512 channels."""

    def run(self, x: Inputs) -> Any:
        answer = super().run(x)
        if not x.get("returns_sum") or x.x.shape[-1] <= 512:
            return answer
        return answer[0], answer[1].detach() + 0 * answer[1]


class OffsetsOf12Bits(Conv):
    """Offsets over 4,096 are rounded to even numbers, as in a format of 12 bits."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        ends = [0, *(end for _, end in super().boundaries(x))]
        inner = [end // 2 * 2 if end > 2**12 else end for end in ends[:-1]]
        return list(itertools.pairwise([*inner, ends[-1]])) if x.cu_seqlens is not None else super().boundaries(x)


class StatesOfTheLastTile(Conv):
    """The state after a sequence is read from its last 192 tokens or fewer, those of the last tile; what these lack is zeros."""

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        found, there = super().final(state, tokens), len(tokens) % 192 or 192
        return found * (torch.arange(found.shape[-1]) >= found.shape[-1] - there) if len(tokens) > 192 else found


class _AddedUp(torch.autograd.Function):
    """A parameter for each of so many rows. Its gradient is added up in its own dtype, 64 rows after the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        return x.expand(rows, *x.shape).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.new_zeros(gradient.shape[1:])
        for tile in gradient.split(64):
            total += tile.float().sum(0)
        return total, None


def added_up(parameter: Tensor, rows: int) -> Tensor:
    found: Tensor = _AddedUp.apply(parameter, rows)
    return found.float()


class TapsAddUpInTheirDtype(Conv):
    """The gradient of the weight has no buffer in float32. Behind some hundred tiles, what a tile adds is below half an ulp."""

    domain = dataclasses.replace(Conv.domain, packed=False)

    def taps(self, x: Inputs) -> Tensor:
        weight: Tensor = x.weight
        return weight

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        taps = added_up(x.weight, count)
        return torch.stack([taps[..., tap] * line[tap : tap + count] for tap in range(taps.shape[-1])]).sum(0)


class NormAddsUpInItsDtype(GatedNorm):
    """The same of the weight of a norm."""

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.weight is None else y * added_up(x.weight, y.shape[:-1].numel()).view_as(y)


class GateOfNarrowParameters(Gate):
    """Not wrong: A_log and dt_bias may have the dtype of the inputs."""

    domain = dataclasses.replace(Gate.domain, parameter_dtypes=("fp32", "input"))


class SpeedsAddUpInTheirDtype(GateOfNarrowParameters):
    """The same of A_log, where its dtype is that of the inputs."""

    def speed(self, x: Inputs) -> Tensor:
        return added_up(x.A_log, x.a.shape[:2].numel()).exp().view(x.a.shape)


class PartsOfSquaresInHalf(GatedNorm):
    """The sum of squares of each 1,024 channels is kept in the dtype of x, and float16 ends at 65,504."""

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        if wide.shape[-1] <= 1024:
            return super().squares(wide, x)
        parts = [part.sum(-1, keepdim=True).to(x.x.dtype) for part in wide.square().split(1024, -1)]
        return torch.cat(parts, -1).float().sum(-1, keepdim=True) / wide.shape[-1]
