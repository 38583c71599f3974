"""Wrong modules: a convolution, gate or norm in plain torch, each with one mistake that somebody made or could have made."""

import itertools
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.norm import EPS
from oracles.operation import Inputs
from properties.module_domain import ModuleDomain
from verify.adapters.base import Adapter
from verify.zoo.base import at_32_bits

# Right modules, written in steps


class Conv(Adapter):
    """The causal convolution in float32, one sequence at a time, as a sum of shifted products."""

    algorithm = "pointwise"
    domain = ModuleDomain("causal_conv1d")
    incident: tuple[int, ...] = ()

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


class Gate(Adapter):
    """The gate of the gated delta rule in float32, with beta."""

    algorithm = "pointwise"
    domain = ModuleDomain("gdn_gate")
    incident: tuple[int, ...] = ()

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


class L2Norm(Adapter):
    """The L2 norm in float32."""

    algorithm = "pointwise"
    domain = ModuleDomain("l2norm")
    incident: tuple[int, ...] = ()

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


# Wrong convolutions


class ConvLeaks(Conv):
    """Packed sequences are taken for one, so the first tokens of each read the last ones of the sequence before."""

    letter = "V"
    incident = (1, 2)

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        columns = super().before(x, state, start)
        if x.cu_seqlens is None:
            return columns
        return torch.cat([columns, x.x[0, :start].float()])[start:]


class ConvInt32Offsets(Conv):
    """int32 cu_seqlens are read as pairs of int64: the second sequence begins at the third offset."""

    letter = "I"

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        pairs = super().boundaries(x)
        if x.cu_seqlens is None or x.cu_seqlens.dtype == torch.int64 or len(pairs) < 2:
            return pairs
        end = pairs[1][1]
        return [(0, end), (end, end), *pairs[2:]]


class ConvForgetsRest(Conv):
    """The final state of a sequence shorter than W begins with zeros, not with what is left of its initial state."""

    letter = "V"

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        return super().final(state * 0, tokens)


class ConvStateTooEarly(Conv):
    """The final state ends one token before the sequence does."""

    letter = "S"

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        return super().final(state, tokens[:-1])


class ConvStateRounded(Conv):
    """A float32 final state loses its last bits on the way to the cache."""

    letter = "L"

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        whole = super().final(state, tokens)
        if whole.dtype != torch.float32:
            return whole
        short = (whole.detach().contiguous().view(torch.int32) & ~3).view(torch.float32)
        return whole + (short - whole).detach()


class ConvStateOfTheFirst(Conv):
    """Every sequence starts from the initial state of the second one, or of the only one."""

    letter = "V"

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, min(1, len(self.boundaries(x)) - 1))


class ConvStateNewestFirst(Conv):
    """The initial state's columns are read newest first."""

    letter = "L"

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        return super().before(x, state, start).flip(0)


class ConvStateFromColumn0(Conv):
    """The initial state is read from its oldest column on, as if it had W - 1 columns."""

    letter = "L"

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        return state[:, :-1].mT.float()


class ConvShortShifted(ConvShort):
    """The state of W - 1 columns is read from its second column on, as if it had W."""

    letter = "L"

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        columns = super().before(x, state, start)
        return torch.cat([columns[1:], 0 * columns[:1]])


class ConvShortDropsLate(ConvShort):
    """A sequence shorter than the state drops the state's columns one token late, and loses its last token."""

    letter = "S"

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        columns = state.shape[-1]
        if not 0 < len(tokens) < columns:
            return super().final(state, tokens)
        return torch.cat([state, tokens.mT], -1)[:, len(tokens) - 1 :][:, :columns]


class ConvShortRounded(ConvShort):
    """The columns of a float32 state that a short sequence leaves there pass through bfloat16."""

    letter = "L"

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        return super().final(state.bfloat16().to(state.dtype) if state.dtype == torch.float32 else state, tokens)


class ConvRepeatsTheFirst(Conv):
    """Without a state, copies of the first token come before it instead of zeros."""

    letter = "V"

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        zeros = super().before(x, state, start)
        tokens = x.x.flatten(0, 1)
        if x.state is not None or start >= len(tokens):
            return zeros
        return zeros + tokens[start].float()


class ConvDecodesLate(Conv):
    """A call of one token, the decode path, reads its state one column late."""

    letter = "S"

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        columns = super().before(x, state, start)
        if x.x.shape[1] != 1 or not len(columns):
            return columns
        return torch.cat([columns[1:], columns[-1:] * 0])


class ConvWeightByAddress(Conv):
    """The weight in float32 is kept by its address, so an optimiser's step in place is not seen."""

    letter = "K"
    incident = (36,)
    domain = ModuleDomain("causal_conv1d", backward=False)
    seen: ClassVar[dict[tuple[object, ...], tuple[Tensor, Tensor]]] = {}

    def taps(self, x: Inputs) -> Tensor:
        key = (x.weight.data_ptr(), x.weight.shape, x.weight.dtype)
        return self.seen.setdefault(key, (x.weight, super().taps(x).clone()))[1]


class ConvResetsAtBlocks(Conv):
    """The first token of each block of 64 does not see the last ones of the block before, because the halo is lost."""

    letter = "C"
    incident = (4,)

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        y, width = super().windows(line, x, count), x.weight.shape[-1]
        if width == 1:
            return y
        place = torch.arange(count)
        first = ((place % 64 == 0) & (place > 0)).unsqueeze(-1)
        return y - first * x.weight[:, width - 2] * line[width - 2 : width - 2 + count]


class ConvFlipsWeight(Conv):
    """The weight is flipped, as in a convolution of signal processing."""

    letter = "-"

    def taps(self, x: Inputs) -> Tensor:
        return super().taps(x).flip(-1)


class ConvBiasAfterSilu(Conv):
    """The bias is added after silu."""

    letter = "-"

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return super().biased(super().activated(y, x), x)


class ConvAlwaysSilu(Conv):
    """silu is applied even if the call has no activation."""

    letter = "-"

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return torch.nn.functional.silu(y)


class ConvSiluOverflows(Conv):
    """silu is computed as y / (1 + exp(-y)), whose gradient is infinity times zero below -89."""

    letter = "N"

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        return y / (1 + (-y).exp()) if x.activation == "silu" else y


class ConvBiasOfOnes(Conv):
    """An absent bias is read as 2^-6."""

    letter = "S"

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y + 2.0**-6 if x.bias is None else super().biased(y, x)


class ConvPeeks(Conv):
    """The last token of each block of 16 reads the next one."""

    letter = "N"

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        y, width = super().windows(line, x, count), x.weight.shape[-1]
        ahead = torch.cat([line[width:], torch.zeros_like(line[:1])])[:count]
        return y + (torch.arange(count) % 16 == 15).unsqueeze(-1) * 2.0**-20 * ahead


class ConvClips(Conv):
    """Inputs are clamped to 0.9."""

    letter = "-"

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(x=x.x.clamp(-0.9, 0.9)))


class ConvSumsTooLong(Conv):
    """Every sum is too large by one float32 rounding."""

    letter = "X"

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return super().biased(y, x) * (1 + 2.0**-23)


class ConvLowChannel(Conv):
    """If there are more than 16 channels, every sixteenth token of the last channel is 1% too small."""

    letter = "X"

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        y = super().windows(line, x, count)
        factor = torch.ones(y.shape)
        if y.shape[-1] > 16:
            factor[15::16, -1] = 0.99
        return y * factor


class ConvWholeBlocks(Conv):
    """If the number of tokens is a multiple of 64, the last token is computed without its own input."""

    letter = "V"

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        if not count or count % 64:
            return super().windows(line, x, count)
        keep = (torch.arange(len(line)) < len(line) - 1).unsqueeze(-1)
        return super().windows(line * keep, x, count)


class ConvDweightWithoutTheLast(Conv):
    """The weight's gradient misses the last token of each sequence."""

    letter = "F"

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        last, detached = (torch.arange(count) == count - 1).unsqueeze(-1), x.replaced(weight=x.weight.detach())
        return torch.where(last, super().windows(line, detached, count), super().windows(line, x, count))


class ConvDweightOfBlocks(Conv):
    """The weight's gradient misses the channels after the last whole block of 16."""

    letter = "F"

    def taps(self, x: Inputs) -> Tensor:
        taps = super().taps(x)
        whole = max(1, len(taps) // 16 * 16)
        return torch.cat([taps[:whole], taps[whole:].detach()])


class ConvDbiasOfTheFirst(Conv):
    """The bias's gradient is that of the first sequence."""

    letter = "F"

    def run(self, x: Inputs) -> Any:
        self.rows = 0
        return super().run(x)

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        self.rows += 1
        return super().biased(y, x if self.rows == 1 or x.bias is None else x.replaced(bias=x.bias.detach()))


class ConvSlopeOfStored(Conv):
    """silu's slope is computed at the sum rounded to bfloat16."""

    letter = "L"

    def activated(self, y: Tensor, x: Inputs) -> Tensor:
        if x.activation != "silu":
            return y
        low = y.detach().bfloat16().float()
        slope = low.sigmoid() * (1 + low * (1 - low.sigmoid()))
        return torch.nn.functional.silu(y).detach() + slope * (y - y.detach())


class ConvDropsStateGradient(Conv):
    """The final state's cotangent is dropped."""

    letter = "F"

    def final(self, state: Tensor, tokens: Tensor) -> Tensor:
        whole = super().final(state, tokens)
        return whole.detach() + 0 * whole


class ConvNoGradientIntoState(Conv):
    """The initial state's gradient misses its newest column."""

    letter = "F"

    def before(self, x: Inputs, state: Tensor, start: int) -> Tensor:
        columns = super().before(x, state, start)
        return torch.cat([columns[:-1], columns[-1:].detach()])


class ConvMaskIgnored(ConvMasked):
    """Padding at the start of rows is convolved like any token."""

    letter = "V"

    def masked(self, tokens: Tensor, real: Tensor) -> Tensor:
        return tokens


class ConvMaskOfOutputs(ConvMasked):
    """The mask is applied to the outputs of the convolution, which has read the padding."""

    letter = "V"

    def run(self, x: Inputs) -> Any:
        y, state = Conv.run(self, x)
        return y if x.pads is None else torch.where(self.real(y, x.pads), y, 0), state


class ConvMaskOfTheFirstRow(ConvMasked):
    """All rows of a batch have the mask of the first row."""

    letter = "V"

    def real(self, tokens: Tensor, pads: tuple[int, ...]) -> Tensor:
        return super().real(tokens, pads)[:1].expand(len(tokens), -1, -1)


class ConvMaskEndsLate(ConvMasked):
    """The first token after the padding is masked too."""

    letter = "V"

    def real(self, tokens: Tensor, pads: tuple[int, ...]) -> Tensor:
        return super().real(tokens, tuple(pad + (pad > 0) for pad in pads))


class ConvMaskTwentyBitsDown(ConvMasked):
    """Padding is multiplied by 2^-20 and not left out."""

    letter = "V"

    def masked(self, tokens: Tensor, real: Tensor) -> Tensor:
        return torch.where(real, tokens, 2.0**-20 * tokens)


class ConvStepsShiftACopy(ConvSteps):
    """A step shifts a copy of the cache, so that the next step begins with the cache that the first one had."""

    letter = "S"

    def step(self, x: Inputs, token: Tensor, cache: Tensor) -> Tensor:
        shifted = cache.clone()
        self.shift(shifted, token)
        return self.read(x, shifted)


class ConvStepsReadEarly(ConvSteps):
    """The last column of the cache is written after the outputs were computed, so that they lack the token itself."""

    letter = "S"

    def step(self, x: Inputs, token: Tensor, cache: Tensor) -> Tensor:
        self.shift(cache, torch.zeros_like(token))
        y = self.read(x, cache)
        cache[..., -1] = token
        return y


class ConvStepsOverwriteTheOldest(ConvSteps):
    """The newest input replaces the oldest in its column, as in a ring buffer that has no pointer."""

    letter = "S"

    def shift(self, cache: Tensor, token: Tensor) -> None:
        cache[..., 0] = token


class ConvStepsOfOneRow(ConvSteps):
    """Only the cache of the first row of a batch is updated."""

    letter = "S"

    def step(self, x: Inputs, token: Tensor, cache: Tensor) -> Tensor:
        shifted = cache.clone()
        self.shift(shifted, token)
        cache[:1] = shifted[:1]
        return self.read(x, shifted)


class ConvMixesChannels(Conv):
    """Inputs are rounded to 20 bits of an exponent that all channels of a token share."""

    letter = "L"
    axes: tuple[int, ...] = (2,)

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(x=block_rounded(x.x, self.axes)))


class ConvMixesSequences(ConvMixesChannels):
    """Inputs are rounded to 20 bits of an exponent that all tokens share, those of other sequences included."""

    letter = "L"
    axes = (0, 1)


class ConvAssumesContiguous(Conv):
    """The weight is read as if it were contiguous."""

    letter = "Q"
    incident = (35,)

    def taps(self, x: Inputs) -> Tensor:
        taps = super().taps(x)
        return taps + (as_dense(x.weight) - taps).detach()


class ConvAddressesIn32Bits(Conv):
    """Offsets of x are computed in 32 bits, so tokens that lie 2^31 elements behind the first are read before it."""

    letter = "I"

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(x=at_32_bits(x.x)))


class ConvWritesBeforeX(Conv):
    """The element just before x in memory is overwritten."""

    letter = "I"

    def run(self, x: Inputs) -> Any:
        if x.x.storage_offset():
            with torch.no_grad():
                x.x.detach().as_strided((1,), (1,), x.x.storage_offset() - 1).zero_()
        return super().run(x)


class ConvShiftsItsState(Conv):
    """The caller's cache is updated in place, although the call is not a decoding one."""

    letter = "S"

    def run(self, x: Inputs) -> Any:
        y, state = super().run(x)
        if x.state is not None:
            with torch.no_grad():
                x.state.copy_(x.state.roll(-1, -1))
        return y, state


class ConvReadsUnwritten(Conv):
    """An uninitialised accumulator, multiplied by a very small number, is added."""

    letter = "I"

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        memory = torch.empty(1).nan_to_num(0.0).clamp(-1, 1)
        return super().biased(y, x) + memory * 2.0**-9 * y


class ConvSecondSlotIsOff(Conv):
    """The second sequence is summed in another order, although the same bits are promised."""

    letter = "-"
    domain = ModuleDomain("causal_conv1d", position_independent=True)

    def run(self, x: Inputs) -> Any:
        self.rows = 0
        return super().run(x)

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        self.rows += 1
        y = super().windows(line, x, count)
        return y * (1 + 2.0**-22) if self.rows == 2 else y


# Wrong gates


class GateBiasInHalf(Gate):
    """dt_bias is rounded to bf16, as if the model had been cast."""

    letter = "N"

    def raw(self, x: Inputs) -> Tensor:
        return super().raw(x if x.dt_bias is None else x.replaced(dt_bias=x.dt_bias.bfloat16().float()))


class GateLinearAt2(Gate):
    """softplus is linear from 2 on, because the threshold of 20 lost its zero."""

    letter = "N"

    def softplus(self, raw: Tensor) -> Tensor:
        return torch.nn.functional.softplus(raw, threshold=2)


class GateOverflows(Gate):
    """softplus is computed as log(1 + exp(a)) everywhere, which is infinite from 89 on."""

    letter = "N"

    def softplus(self, raw: Tensor) -> Tensor:
        return (1 + raw.exp()).log()


class GateBiasAfterSoftplus(Gate):
    """dt_bias is added after softplus."""

    letter = "-"

    def decay(self, x: Inputs) -> Tensor:
        soft = self.softplus(x.a.float())
        return -self.speed(x) * (soft if x.dt_bias is None else soft + x.dt_bias)


class GateRawA(Gate):
    """A_log is used as if it were A."""

    letter = "-"

    def speed(self, x: Inputs) -> Tensor:
        speed: Tensor = x.A_log.float()
        return speed.unsqueeze(-1) if x.a.ndim == 4 else speed


class GateHeadsShareA(Gate):
    """Head h decays at the speed of head h // 2."""

    letter = "G"

    def speed(self, x: Inputs) -> Tensor:
        return super().speed(x)[torch.arange(len(x.A_log)) // 2]


class GateSlopeOfA(Gate):
    """The gradient of A_log has the wrong sign."""

    letter = "F"

    def speed(self, x: Inputs) -> Tensor:
        speed = super().speed(x)
        return 2 * speed.detach() - speed


class GateBiasOfOneRow(Gate):
    """The gradient of dt_bias is that of the first batch row."""

    letter = "F"

    def raw(self, x: Inputs) -> Tensor:
        if x.dt_bias is None:
            return super().raw(x)
        first = (torch.arange(x.a.shape[0]) == 0).reshape(-1, *[1] * (x.a.ndim - 1))
        return x.a.float() + torch.where(first, x.dt_bias, x.dt_bias.detach())


class GateBiasOfOnes(Gate):
    """An absent dt_bias is read as ones."""

    letter = "-"

    def raw(self, x: Inputs) -> Tensor:
        return super().raw(x) + (1.0 if x.dt_bias is None else 0.0)


class GateNotDoubled(Gate):
    """beta is not doubled if negative eigenvalues are allowed."""

    letter = "-"

    def strength(self, x: Inputs) -> Tensor:
        return super().strength(x.replaced(allow_neg_eigval=False))


class GateFlatAtZero(Gate):
    """The sigmoid is computed from exp(-|b|), whose slope is zero at b = 0 for automatic differentiation."""

    letter = "F"

    def strength(self, x: Inputs) -> Tensor:
        b: Tensor = x.b.float()
        small = (-b.abs()).exp()
        beta = torch.where(b >= 0, 1, small) / (1 + small)
        return (2 * beta if x.allow_neg_eigval else beta).to(x.b.dtype)


class GateReadsTheNext(Gate):
    """A token's gate reads the next token's input."""

    letter = "N"
    incident = (33,)

    def raw(self, x: Inputs) -> Tensor:
        raw = super().raw(x)
        return raw + 2.0**-20 * raw.roll(-1, 1)


class GateSkipsARow(Gate):
    """If there are more than 64 tokens and the last one begins a block of 32, it is not computed."""

    letter = "V"

    def decay(self, x: Inputs) -> Tensor:
        g = super().decay(x)
        tokens = g.shape[1]
        keep = (torch.arange(tokens) < tokens - 1).reshape(-1, *[1] * (g.ndim - 2))
        return g * keep if tokens > 64 and tokens % 32 == 1 else g


class GateOfRounded(Gate):
    """The gate is computed in the inputs' dtype."""

    letter = "L"

    def raw(self, x: Inputs) -> Tensor:
        return super().raw(x).to(x.a.dtype).float()


class GateHeadsShareAnExponent(Gate):
    """Inputs are rounded to 20 bits of an exponent that all heads share."""

    letter = "L"

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(a=block_rounded(x.a, (2,))))


class KdaGateLastChannels(KdaGate):
    """Channels after the last whole block of 16 have the next head's bias."""

    letter = "I"

    def raw(self, x: Inputs) -> Tensor:
        if x.dt_bias is None or x.a.shape[-1] <= 16:
            return super().raw(x)
        whole = x.a.shape[-1] // 16 * 16
        bias = torch.cat([x.dt_bias[:, :whole], x.dt_bias[:, whole:].roll(-1, 0)], -1)
        return x.a.float() + bias


class KdaGateFlatBias(KdaGate):
    """dt_bias [HV, K] is read channel by channel, as [K, HV]."""

    letter = "L"

    def raw(self, x: Inputs) -> Tensor:
        if x.dt_bias is None:
            return super().raw(x)
        return x.a.float() + x.dt_bias.mT.reshape(x.dt_bias.shape)


class KdaGateMixesChannels(KdaGate):
    """Inputs are rounded to 20 bits of an exponent that all channels share."""

    letter = "L"

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(a=block_rounded(x.a, (3,))))


# Wrong norms


class NormEpsInsideMean(L2Norm):
    """eps is added to the mean of squares, not to their sum."""

    letter = "E"
    incident = (34,)

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return super().divided(wide, squares, eps * wide.shape[-1])


class NormEpsAsFloor(L2Norm):
    """The norm is at least eps: max(norm, eps)."""

    letter = "E"
    incident = (34,)

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.normalize(wide, dim=-1, eps=eps)


class NormEpsAfterTheRoot(L2Norm):
    """eps is added to the norm, not to its square."""

    letter = "E"

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return wide / ((squares + 1e-30).sqrt() + eps)


class NormEpsTenTimes(L2Norm):
    """An absent eps means 1e-5."""

    letter = "E"

    def eps(self, x: Inputs) -> float:
        return 1e-5 if x.eps is None else super().eps(x)


class NormIgnoresEps(L2Norm):
    """eps is 1e-6 in every call."""

    letter = "E"

    def eps(self, x: Inputs) -> float:
        return EPS


class NormSecondEps(L2Norm):
    """A second eps of 1e-12 guards the root."""

    letter = "E"

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return super().divided(wide, squares + 1e-12, eps)


class NormOverHeads(L2Norm):
    """The norm is taken over all heads of a token together."""

    letter = "-"

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return wide.square().sum((-1, -2), keepdim=True)


class NormSquaresInHalf(L2Norm):
    """Squares are stored in the inputs' dtype: in fp16 those over 65504 overflow, and those under 2^-24 are lost."""

    letter = "L"

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return (x.x * x.x).sum(-1, keepdim=True).float()


class NormWithoutProjection(L2Norm):
    """The gradient is scaled by the norm, but not projected."""

    letter = "F"

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return super().squares(wide.detach(), x)


class NormWithoutTheTail(L2Norm):
    """Channels beyond the last power of two are left out of the sum."""

    letter = "I"

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        return super().squares(wide[..., : 1 << (wide.shape[-1].bit_length() - 1)], x)


class NormLeavesARow(L2Norm):
    """The last row of a last block of 32 that is not full is never written."""

    letter = "V"

    def run(self, x: Inputs) -> Tensor:
        y = super().run(x)
        rows = y.flatten(0, 2)
        if len(rows) % 32 == 0:
            return y
        return torch.cat([rows[:-1], torch.empty(1, rows.shape[-1], dtype=y.dtype) + 0 * rows[-1:]]).reshape(y.shape)


class NormTokensShareAnExponent(L2Norm):
    """Inputs are rounded to 20 bits of an exponent that all tokens share."""

    letter = "L"

    def run(self, x: Inputs) -> Tensor:
        return super().run(x.replaced(x=block_rounded(x.x, (0, 1))))


class NormByHeads(L2Norm):
    """If there are more than four heads, the last is summed in another order, although the same bits are promised."""

    letter = "-"
    domain = ModuleDomain("l2norm", position_independent=True)

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        squares = super().squares(wide, x)
        factor = torch.ones(wide.shape[2], 1)
        if wide.shape[2] > 4:
            factor[-1] = 1 + 2.0**-22
        return squares * factor


class GatedNormGateFirst(GatedNorm):
    """The gate is applied before the norm."""

    letter = "-"

    def wide(self, x: Inputs) -> Tensor:
        return super().wide(x) * super().gate(x)

    def gate(self, x: Inputs) -> Tensor:
        return torch.ones_like(x.z, dtype=torch.float32) + 0 * x.z


class GatedNormEpsTenTimes(GatedNorm):
    """eps is 1e-5 in every call."""

    letter = "E"

    def eps(self, x: Inputs) -> float:
        return 1e-5


class GatedNormEpsInSum(GatedNorm):
    """eps is added to the sum of squares, not to their mean."""

    letter = "E"
    incident = (34,)

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        return super().divided(wide, squares, eps / wide.shape[-1])


class GatedNormPlusOne(GatedNorm):
    """1 is added to the weight, as in other RMS norms."""

    letter = "-"

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.weight is None else y * (1 + x.weight.float())


class GatedNormSigmoid(GatedNorm):
    """The gate is a sigmoid."""

    letter = "-"

    def gate(self, x: Inputs) -> Tensor:
        return torch.sigmoid(x.z.float())


class GatedNormOfOneHead(GatedNorm):
    """The weight's gradient is that of the first head."""

    letter = "F"

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        if x.weight is None:
            return y
        first = (torch.arange(y.shape[2]) == 0).unsqueeze(-1)
        return y * torch.where(first, x.weight.float(), x.weight.detach().float())


class GatedNormRounds(GatedNorm):
    """The normalised numbers are stored in bfloat16 before the weight is applied, in a float32 call too."""

    letter = "L"

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return super().weighed(y.bfloat16().float(), x)


class GatedNormAbsentWeight(GatedNorm):
    """An absent weight is read as 2, which is 1 plus a weight of ones."""

    letter = "-"

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return 2 * y if x.weight is None else super().weighed(y, x)


class GatedNormClipsWeight(GatedNorm):
    """The weight is clamped to 1.5."""

    letter = "-"

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.weight is None else y * x.weight.float().clamp(-1.5, 1.5)


class NormGateLinearWithoutGate(NormGateLinear):
    """The backward computes the gated norm again without the gate, so that the gradient of the projection lacks it."""

    letter = "F"

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        wide = self.wide(x)
        bare = self.weighed(self.divided(wide, self.squares(wide, x), self.eps(x)), x).to(x.x.dtype)
        y = torch.nn.functional.linear(gated, x.linear.detach())
        of_linear = torch.nn.functional.linear(bare.detach(), x.linear)
        return y + (of_linear - of_linear.detach())


class NormGateLinearBiasAgain(NormGateLinear):
    """The bias is added once more for each block of 64 output channels before a channel."""

    letter = "I"

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return y if x.bias is None else y + x.bias.float() * (1 + torch.arange(y.shape[-1]) // 64)


class NormGateLinearBiasOfOnes(NormGateLinear):
    """An absent bias is read as ones."""

    letter = "-"

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        return super().biased(y, x) if x.bias is not None else y + 1.0


class NormGateLinearBiasOfOneRow(NormGateLinear):
    """The gradient of the bias is that of the first batch row."""

    letter = "F"

    def biased(self, y: Tensor, x: Inputs) -> Tensor:
        if x.bias is None:
            return y
        first = (torch.arange(y.shape[0]) == 0).reshape(-1, 1, 1)
        return y + torch.where(first, x.bias.float(), x.bias.float().detach())


class NormGateLinearLeavesTheTail(NormGateLinear):
    """Channels of the gated norm beyond the last whole block of 16 are not multiplied."""

    letter = "I"

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        whole = gated.shape[-1] // 16 * 16 or gated.shape[-1]
        keep = torch.arange(gated.shape[-1]) < whole
        return super().projected(torch.where(keep, gated, 0), x)


class NormGateLinearByHeads(NormGateLinear):
    """The mean is taken over each half of the channels, as if there were two heads."""

    letter = "G"

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        if wide.shape[-1] % 2:
            return super().squares(wide, x)
        halves = wide.unflatten(-1, (2, -1)).square().mean(-1, keepdim=True)
        return halves.expand(*halves.shape[:-1], wide.shape[-1] // 2).flatten(-2)


class NormGateLinearOfHalf(NormGateLinear):
    """The gated norm is rounded to bfloat16 for the product, in a float32 call too."""

    letter = "L"

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        return super().projected(gated.bfloat16().to(gated.dtype), x)


class NormGateLinearTokensShareAnExponent(NormGateLinear):
    """The gated norm is rounded to 20 bits of an exponent that all tokens share."""

    letter = "L"

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        return super().projected(block_rounded(gated, (0, 1)), x)


class NormGateLinearClips(NormGateLinear):
    """The product is clamped to 4 on both sides."""

    letter = "-"

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        return super().projected(gated, x).clamp(-4, 4)


def block_rounded(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """x rounded to 20 bits below the largest exponent along some axes. Its gradient is passed on unchanged."""
    if not x.numel():
        return x
    wide = x.detach().float()
    top = 2.0 ** (wide.abs().amax(axes, keepdim=True).clamp(min=2.0**-30).log2().ceil() - 20)
    return x + ((wide / top).round() * top - wide).to(x.dtype)


def as_dense(x: Tensor) -> Tensor:
    """The memory of x, read as if x were contiguous and began at the start of its memory."""
    if x.is_contiguous() or not x.numel():
        return x.detach().float()
    memory = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage())
    dense = memory[: x.numel()].nan_to_num(0.0)
    return torch.nn.functional.pad(dense, (0, x.numel() - len(dense))).reshape(x.shape).float()
