"""Wrong convolutions in plain torch, each with one mistake that somebody made or could have made."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from verify.zoo.base import at_32_bits
from verify.zoo.modules import Conv, ConvMasked, ConvShort, ConvSteps, block_rounded


class ConvLeaks(Conv, letter="V", incident=(1, 2)):
    """Packed sequences are taken for one, so the first tokens of each read the last ones of the sequence before."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        columns = super().before(x, state, start)
        if x.cu_seqlens is None:
            return columns
        return torch.cat([columns, x.x[0, :start].float()])[start:]


class ConvInt32Offsets(Conv, letter="I"):
    """int32 cu_seqlens are read as pairs of int64: the second sequence begins at the third offset."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        pairs = super().boundaries(x)
        if x.cu_seqlens is None or x.cu_seqlens.dtype == torch.int64 or len(pairs) < 2:
            return pairs
        end = pairs[1][1]
        return [(0, end), (end, end), *pairs[2:]]


class ConvForgetsRest(Conv, letter="V"):
    """The final state of a sequence shorter than W begins with zeros, not with what is left of its initial state."""

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        return super().final(state * 0, tokens)


class ConvStateTooEarly(Conv, letter="S"):
    """The final state ends one token before the sequence does."""

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        return super().final(state, tokens[:-1])


class ConvStateRounded(Conv, letter="L"):
    """A float32 final state loses its last bits on the way to the cache."""

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        whole = super().final(state, tokens)
        if whole.dtype != torch.float32:
            return whole
        short = (whole.detach().contiguous().view(torch.int32) & ~3).view(torch.float32)
        return whole + (short - whole).detach()


class ConvStateOfTheFirst(Conv, letter="V"):
    """Every sequence starts from the initial state of the second one, or of the only one."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, min(1, len(self.boundaries(x)) - 1))


class ConvStateNewestFirst(Conv, letter="L"):
    """The initial state's columns are read newest first."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        return super().before(x, state, start).flip(0)


class ConvStateFromColumn0(Conv, letter="L"):
    """The initial state is read from its oldest column on, as if it had W - 1 columns."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        return state[:, :-1].mT.float()


class ConvShortShifted(ConvShort, letter="L"):
    """The state of W - 1 columns is read from its second column on, as if it had W."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        columns = super().before(x, state, start)
        return torch.cat([columns[1:], 0 * columns[:1]])


class ConvShortDropsLate(ConvShort, letter="S"):
    """A sequence shorter than the state drops the state's columns one token late, and loses its last token."""

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        columns = state.shape[-1]
        if not 0 < len(tokens) < columns:
            return super().final(state, tokens)
        return torch.cat([state, tokens.mT], -1)[:, len(tokens) - 1 :][:, :columns]


class ConvShortRounded(ConvShort, letter="L"):
    """The columns of a float32 state that a short sequence leaves there pass through bfloat16."""

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        return super().final(state.bfloat16().to(state.dtype) if state.dtype == torch.float32 else state, tokens)


class ConvRepeatsTheFirst(Conv, letter="V"):
    """Without a state, copies of the first token come before it instead of zeros."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        zeros = super().before(x, state, start)
        tokens = x.x.flatten(0, 1)
        if x.state is not None or start >= len(tokens):
            return zeros
        return zeros + tokens[start].float()


class ConvDecodesLate(Conv, letter="S"):
    """A call of one token, the decode path, reads its state one column late."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        columns = super().before(x, state, start)
        if x.x.shape[1] != 1 or not len(columns):
            return columns
        return torch.cat([columns[1:], columns[-1:] * 0])


class ConvWeightByAddress(Conv, letter="K", incident=(36,)):
    """The weight in float32 is kept by its address, so an optimiser's step in place is not seen."""

    domain = ModuleDomain("causal_conv1d", backward=False)
    seen: ClassVar[dict[tuple[object, ...], tuple[Tensor, Tensor]]] = {}

    def taps(self, x: Inputs) -> Tensor:
        key = (x.weight.data_ptr(), x.weight.shape, x.weight.dtype)
        return self.seen.setdefault(key, (x.weight, super().taps(x).clone()))[1]


class ConvOnesBeforeTheyAreFull(Conv, letter="K"):
    """Ones are kept by the weight's shape before they are filled in, so a call that fails in between leaves zeros."""

    seen: ClassVar[dict[torch.Size, Tensor]] = {}

    def taps(self, x: Inputs) -> Tensor:
        if x.weight.shape not in self.seen:
            self.seen[x.weight.shape] = torch.zeros(x.weight.shape)
            self.seen[x.weight.shape].copy_(torch.ones(x.weight.shape))
        return super().taps(x) * self.seen[x.weight.shape]


class ConvResetsAtBlocks(Conv, letter="C", incident=(4,)):
    """The first token of each block of 64 does not see the last ones of the block before, because the halo is lost."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        y, width = super().windows(line, x, count), x.weight.shape[-1]
        if width == 1:
            return y
        place = torch.arange(count)
        first = ((place % 64 == 0) & (place > 0)).unsqueeze(-1)
        return y - first * x.weight[:, width - 2] * line[width - 2 : width - 2 + count]


class ConvFlipsWeight(Conv, letter="-"):
    """The weight is flipped, as in a convolution of signal processing."""

    def taps(self, x: Inputs) -> Tensor:
        return super().taps(x).flip(-1)


class ConvBiasAfterSilu(Conv, letter="-"):
    """The bias is added after silu."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return super().biased(super().activated(y, x), x)


class ConvAlwaysSilu(Conv, letter="-"):
    """silu is applied even if the call has no activation."""

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return torch.nn.functional.silu(y)


class ConvSiluOverflows(Conv, letter="N"):
    """silu is computed as y / (1 + exp(-y)), whose gradient is infinity times zero below -89."""

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return y / (1 + (-y).exp()) if x.activation == "silu" else y


class ConvBiasOfOnes(Conv, letter="S"):
    """An absent bias is read as 2^-6."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y + 2.0**-6 if x.bias is None else super().biased(y, x)


class ConvPeeks(Conv, letter="N"):
    """The last token of each block of 16 reads the next one."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        y, width = super().windows(line, x, count), x.weight.shape[-1]
        ahead = torch.cat([line[width:], torch.zeros_like(line[:1])])[:count]
        return y + (torch.arange(count) % 16 == 15).unsqueeze(-1) * 2.0**-20 * ahead


class ConvClips(Conv, letter="-"):
    """Inputs are clamped to 0.9."""

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(x=x.x.clamp(-0.9, 0.9)))


class ConvSumsTooLong(Conv, letter="X"):
    """Every sum is too large by one float32 rounding."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return super().biased(y, x) * (1 + 2.0**-23)


class ConvLowChannel(Conv, letter="X"):
    """If there are more than 16 channels, every sixteenth token of the last channel is 1% too small."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        y = super().windows(line, x, count)
        factor = torch.ones(y.shape)
        if y.shape[-1] > 16:
            factor[15::16, -1] = 0.99
        return y * factor


class ConvWholeBlocks(Conv, letter="V"):
    """If the number of tokens is a multiple of 64, the last token is computed without its own input."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        if not count or count % 64:
            return super().windows(line, x, count)
        keep = (torch.arange(len(line)) < len(line) - 1).unsqueeze(-1)
        return super().windows(line * keep, x, count)


class ConvDweightWithoutTheLast(Conv, letter="F"):
    """The weight's gradient misses the last token of each sequence."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        last, detached = (torch.arange(count) == count - 1).unsqueeze(-1), x.replaced(weight=x.weight.detach())
        return torch.where(last, super().windows(line, detached, count), super().windows(line, x, count))


class ConvDweightOfBlocks(Conv, letter="F"):
    """The weight's gradient misses the channels after the last whole block of 16."""

    def taps(self, x: Inputs) -> Tensor:
        taps = super().taps(x)
        whole = max(1, len(taps) // 16 * 16)
        return torch.cat([taps[:whole], taps[whole:].detach()])


class ConvDbiasOfTheFirst(Conv, letter="F"):
    """The bias's gradient is that of the first sequence."""

    def run(self, x: Inputs) -> Any:
        self.rows = 0
        return super().run(x)

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        self.rows += 1
        return super().biased(y, x if self.rows == 1 or x.bias is None else x.replaced(bias=x.bias.detach()))


class ConvSlopeOfStored(Conv, letter="L"):
    """silu's slope is computed at the sum rounded to bfloat16."""

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        if x.activation != "silu":
            return y
        low = y.detach().bfloat16().float()
        slope = low.sigmoid() * (1 + low * (1 - low.sigmoid()))
        return torch.nn.functional.silu(y).detach() + slope * (y - y.detach())


class ConvDropsStateGradient(Conv, letter="F"):
    """The final state's cotangent is dropped."""

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        whole = super().final(state, tokens)
        return whole.detach() + 0 * whole


class ConvNoGradientIntoState(Conv, letter="F"):
    """The initial state's gradient misses its newest column."""

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        columns = super().before(x, state, start)
        return torch.cat([columns[:-1], columns[-1:].detach()])


class ConvMaskIgnored(ConvMasked, letter="V"):
    """Padding at the start of rows is convolved like any token."""

    def masked(self, tokens: Tensor, real: Tensor) -> Tensor:
        return tokens


class ConvMaskOfOutputs(ConvMasked, letter="V"):
    """The mask is applied to the outputs of the convolution, which has read the padding."""

    def run(self, x: Inputs) -> Any:
        y, state = Conv.run(self, x)
        return y if x.pads is None else torch.where(self.real(y, x.pads), y, 0), state


class ConvMaskOfTheFirstRow(ConvMasked, letter="V"):
    """All rows of a batch have the mask of the first row."""

    def real(self, tokens: Tensor, pads: tuple[int, ...]) -> Tensor:
        return super().real(tokens, pads)[:1].expand(len(tokens), -1, -1)


class ConvMaskEndsLate(ConvMasked, letter="V"):
    """The first token after the padding is masked too."""

    def real(self, tokens: Tensor, pads: tuple[int, ...]) -> Tensor:
        return super().real(tokens, tuple(pad + (pad > 0) for pad in pads))


class ConvMaskTwentyBitsDown(ConvMasked, letter="V"):
    """Padding is multiplied by 2^-20 and not left out."""

    def masked(self, tokens: Tensor, real: Tensor) -> Tensor:
        return torch.where(real, tokens, 2.0**-20 * tokens)


class ConvStepsShiftACopy(ConvSteps, letter="S"):
    """A step shifts a copy of the cache, so that the next step begins with the cache that the first one had."""

    def step(self, x: Inputs, token: Tensor, cache: Tensor) -> Tensor:
        shifted = cache.clone()
        self.shift(shifted, token)
        return self.read(x, shifted)


class ConvStepsReadEarly(ConvSteps, letter="S"):
    """The last column of the cache is written after the outputs were computed, so that they lack the token itself."""

    def step(self, x: Inputs, token: Tensor, cache: Tensor) -> Tensor:
        self.shift(cache, torch.zeros_like(token))
        y = self.read(x, cache)
        cache[..., -1] = token
        return y


class ConvStepsOverwriteTheOldest(ConvSteps, letter="S"):
    """The newest input replaces the oldest in its column, as in a ring buffer that has no pointer."""

    def shift(self, cache: Tensor, token: Tensor) -> None:
        cache[..., 0] = token


class ConvStepsOfOneRow(ConvSteps, letter="S"):
    """Only the cache of the first row of a batch is updated."""

    def step(self, x: Inputs, token: Tensor, cache: Tensor) -> Tensor:
        shifted = cache.clone()
        self.shift(shifted, token)
        cache[:1] = shifted[:1]
        return self.read(x, shifted)


class ConvMixesChannels(Conv, letter="L"):
    """Inputs are rounded to 20 bits of an exponent that all channels of a token share."""

    axes: tuple[int, ...] = (2,)

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(x=block_rounded(x.x, self.axes)))


class ConvMixesSequences(ConvMixesChannels, letter="L"):
    """Inputs are rounded to 20 bits of an exponent that all tokens share, those of other sequences included."""

    axes = (0, 1)


class ConvAssumesContiguous(Conv, letter="Q", incident=(35,)):
    """The weight is read as if it were contiguous."""

    def taps(self, x: Inputs) -> Tensor:
        taps = super().taps(x)
        return taps + (as_dense(x.weight) - taps).detach()


class ConvAddressesIn32Bits(Conv, letter="I"):
    """Offsets of x are computed in 32 bits, so tokens that lie 2^31 elements behind the first are read before it."""

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(x=at_32_bits(x.x)))


class ConvWritesBeforeX(Conv, letter="I"):
    """The element just before x in memory is overwritten."""

    def run(self, x: Inputs) -> Any:
        if x.x.storage_offset():
            with torch.no_grad():
                x.x.detach().as_strided((1,), (1,), x.x.storage_offset() - 1).zero_()
        return super().run(x)


class ConvShiftsItsState(Conv, letter="S"):
    """The caller's cache is updated in place, although the call is not a decoding one."""

    def run(self, x: Inputs) -> Any:
        y, state = super().run(x)
        if x.state is not None:
            with torch.no_grad():
                x.state.copy_(x.state.roll(-1, -1))
        return y, state


class ConvReadsUnwritten(Conv, letter="I"):
    """An uninitialised accumulator, multiplied by a very small number, is added."""

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        memory = torch.empty(1).nan_to_num(0.0).clamp(-1, 1)
        return super().biased(y, x) + memory * 2.0**-9 * y


class ConvSecondSlotIsOff(Conv, letter="-"):
    """The second sequence is summed in another order, although the same bits are promised."""

    domain = ModuleDomain("causal_conv1d", position_independent=True)

    def run(self, x: Inputs) -> Any:
        self.rows = 0
        return super().run(x)

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        self.rows += 1
        y = super().windows(line, x, count)
        return y * (1 + 2.0**-22) if self.rows == 2 else y


def as_dense(x: Tensor) -> Tensor:
    """The memory of x, read as if x were contiguous and began at the start of its memory."""
    if x.is_contiguous() or not x.numel():
        return x.detach().float()
    memory = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage())
    dense = memory[: x.numel()].nan_to_num(0.0)
    return torch.nn.functional.pad(dense, (0, x.numel() - len(dense))).reshape(x.shape).float()
