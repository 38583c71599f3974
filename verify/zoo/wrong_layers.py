"""Wrong layers: each is the GDN or the KDA layer of verify/zoo/base.py with one wrong step, as in real code.

tests/laws/test_layers.py names the laws each of which detects the wrong layer alone.
"""

from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from verify.zoo.base import Chunkwise, KdaLayered, Layered

Answer = tuple[Tensor, Tensor | None, Tensor | None]


class OffsetsForConvOnly(Layered, letter="V", incident=(1,)):
    """cu_seqlens reach the convolution, but not the rule, whose state flows into the next packed sample (slime 1686)."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.cu_seqlens is None:
            return super().rule(x)
        state = None if x.state is None else x.state[:1]
        o, last = super().rule(x.replaced(cu_seqlens=None, state=state))
        return o, None if last is None else last.expand(len(x.cu_seqlens) - 1, *last.shape[1:])


class OffsetsForNobody(OffsetsForConvOnly, letter="V", incident=(2,)):
    """The layer is called without cu_seqlens, so convolution and state run through all packed samples (Automodel 2147)."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        return [(0, x.hidden.shape[1])] if x.cu_seqlens is not None else super().boundaries(x)

    def convolve(self, x: Inputs, mixed: Tensor) -> tuple[Tensor, Tensor]:
        y, last = super().convolve(x, mixed)
        return y, last if x.cu_seqlens is None else last.expand(len(x.cu_seqlens) - 1, *last.shape[1:])


class ConvAcrossBoundaries(Layered, letter="V", incident=(3,)):
    """Boundaries reach the rule, but not the convolution, which sees the end of the sample before (ms-swift 9565)."""

    def before(self, x: Inputs, row: int) -> Tensor:
        width, start = x.conv.shape[-1], super().boundaries(x)[row][0]
        if x.cu_seqlens is None or not row or start < width:
            return super().before(x, row)
        return self.mixed[start - width : start]

    def convolve(self, x: Inputs, mixed: Tensor) -> tuple[Tensor, Tensor]:
        self.mixed = mixed.flatten(0, 1)
        return super().convolve(x, mixed)


class PadsNotMasked(Layered, letter="V", incident=(6,)):
    """Padding at the start of rows is computed like any token, so convolution and state begin with it (maxtext 5295)."""

    def run(self, x: Inputs) -> Answer:
        return self.unpadded(x.replaced(pads=None))


class PadsMaskedAfterConv(Layered, letter="V", incident=(6,)):
    """Padding is masked after the convolution, which has therefore read it (maxtext 5295)."""

    def run(self, x: Inputs) -> Answer:
        self.real = None
        if x.pads is not None:
            self.real = torch.arange(x.hidden.shape[1]) >= torch.tensor(x.pads).unsqueeze(-1)
        return self.unpadded(x.replaced(pads=None))

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if self.real is not None:
            x = x.replaced(beta=x.beta * self.real.unsqueeze(-1))
        return super().rule(x)


class PadsTwentyBitsDown(Layered, letter="V"):
    """Padding is left out except for 2^-20 of its hidden states."""

    def run(self, x: Inputs) -> Answer:
        y, state, conv_state = super().run(x)
        if x.pads is None:
            return y, state, conv_state
        padding = torch.arange(x.hidden.shape[1]) < torch.tensor(x.pads).unsqueeze(-1)
        return y * (1 + 2.0**-22 * bool((x.hidden[padding].abs() > 1).any())), state, conv_state


class SectionsSwapped(Layered, letter="T", incident=(14,)):
    """in_proj's output is cut as if b and a came before z, so the widths are right and the places wrong (Megatron-LM 1989)."""

    def sections(self, x: Inputs, projected: Tensor) -> dict[str, Tensor]:
        widths = x.layer.sections
        order = ("q", "k", "v", "b", "a", "z")
        return dict(zip(order, projected.split([widths[name] for name in order], -1), strict=True))


class SectionsOfOneHead(Layered, letter="T", incident=(17,)):
    """in_proj's rows are read as grouped by key head, as in Qwen3-Next, although they are sections (miles 1578)."""

    def sections(self, x: Inputs, projected: Tensor) -> dict[str, Tensor]:
        layer, widths = x.layer, x.layer.sections
        grouped = projected.unflatten(-1, (layer.heads, -1)).split([width // layer.heads for width in widths.values()], -1)
        return {name: section.flatten(-2) for name, section in zip(widths, grouped, strict=True)}


class DropsConvBias(Layered, letter="-"):
    """If a sequence has fewer tokens than the filter, the convolution's bias is left out."""

    def convolve(self, x: Inputs, mixed: Tensor) -> tuple[Tensor, Tensor]:
        if x.conv_bias is not None and mixed.shape[1] < x.conv.shape[-1]:
            x = x.replaced(conv_bias=0 * x.conv_bias)
        return super().convolve(x, mixed)


class FreezesALog(Layered, letter="F"):
    """A_log gets half its gradient, because one of its two uses is detached."""

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        return super().decay(x.replaced(A_log=(x.A_log + x.A_log.detach()) / 2), a)


class GateBeforeNorm(Layered, letter="-"):
    """The output is gated first and then normalised."""

    def gate(self, x: Inputs, o: Tensor, z: Tensor) -> Tensor:
        return self.normed(x, o.float() * torch.nn.functional.silu(z.float())).to(o.dtype)


class RmsOfAllHeads(Layered, letter="-"):
    """The RMS is computed over the channels of all heads together."""

    def normed(self, x: Inputs, o: Tensor) -> Tensor:
        return o * (o.square().mean((-1, -2), keepdim=True) + x.eps).rsqrt() * x.norm.float()


class NormWeightPerHead(Layered, letter="-"):
    """The norm's weight is indexed by head and not by channel."""

    def normed(self, x: Inputs, o: Tensor) -> Tensor:
        heads = torch.arange(o.shape[-2]) % len(x.norm)
        return super().normed(x.replaced(norm=torch.ones_like(x.norm)), o) * x.norm.float()[heads].unsqueeze(-1)


class NeverNormed(Layered, letter="-"):
    """out_proj gets the gated output without the norm."""

    def normed(self, x: Inputs, o: Tensor) -> Tensor:
        return o * x.norm.float()


class GateIsASigmoid(Layered, letter="-"):
    """The gate is sigmoid(z)."""

    def gate(self, x: Inputs, o: Tensor, z: Tensor) -> Tensor:
        return (self.normed(x, o.float()) * torch.sigmoid(z.float())).to(o.dtype)


class EpsOfTheOtherLibrary(Layered, letter="E"):
    """The norm's eps is 1e-5 in every layer."""

    def normed(self, x: Inputs, o: Tensor) -> Tensor:
        return super().normed(x.replaced(eps=1e-5), o)


class BiasInTheInputsDtype(Layered, letter="L"):
    """a + dt_bias is rounded to the inputs' dtype before its softplus."""

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        return super().decay(x.replaced(dt_bias=torch.zeros_like(x.dt_bias)), a + x.dt_bias.to(a.dtype))


class ForgetsConvState(Layered, letter="S", incident=(18,)):
    """A call continues from the recurrent state alone, and the convolution begins with zeros."""

    def before(self, x: Inputs, row: int) -> Tensor:
        return super().before(x.replaced(conv_state=None), row)


class ShortPromptsAlignLeft(Layered, letter="S", incident=(20,)):
    """The convolution's state of a prompt shorter than its filter is at the wrong end, and zeros follow it."""

    def convolve(self, x: Inputs, mixed: Tensor) -> tuple[Tensor, Tensor]:
        y, states = super().convolve(x, mixed)
        spans = [end - start for start, end in self.boundaries(x)]
        width = x.conv.shape[-1]
        turned = [
            state.roll(span, -1) if x.conv_state is None and span < width else state
            for state, span in zip(states, spans, strict=True)
        ]
        return y, torch.stack(turned)


class DecodesWithAnotherGate(Layered, letter="S"):
    """The prompt is right, but later tokens go through a layer that gates before it normalises."""

    counterpart = "zoo/GateBeforeNorm"


class LargeTokensChangeThePath(Layered, letter="N"):
    """If any token is large, a later one or another sample's included, all take a right path that rounds differently."""

    def unpadded(self, x: Inputs) -> Answer:
        y, state, conv_state = super().unpadded(x)
        large = bool((x.hidden.abs() > 1).any())
        return y * (1 + 2.0**-22 * large), state, conv_state


class FlattensMemory(Layered, letter="Q", incident=(35,)):
    """Hidden states are read as if they were contiguous (sglang 21836)."""

    def unpadded(self, x: Inputs) -> Answer:
        hidden = x.hidden
        if not hidden.is_contiguous() and hidden.numel():
            dense = torch.empty(0, dtype=hidden.dtype).set_(hidden.untyped_storage())[: hidden.numel()].nan_to_num(0.0)
            again = dense.repeat(2 + hidden.numel() // max(1, dense.numel()))[: hidden.numel()]
            hidden = hidden + (again.reshape(hidden.shape) - hidden).detach()
        return super().unpadded(x.replaced(hidden=hidden))


class ReadsUnwrittenScratch(Layered, letter="I"):
    """The gate's uninitialised scratch memory, multiplied by a very small number, is added."""

    def gate(self, x: Inputs, o: Tensor, z: Tensor) -> Tensor:
        memory = torch.empty(1).nan_to_num(0.0).clamp(-1, 1)
        normed = super().gate(x, o, z)
        return normed + (memory * 2.0**-9).to(normed.dtype) * normed


class WritesBeforeConv(Layered, letter="I"):
    """The number just before the convolution's filters in memory is overwritten."""

    def convolve(self, x: Inputs, mixed: Tensor) -> tuple[Tensor, Tensor]:
        if x.conv.storage_offset():
            with torch.no_grad():
                x.conv.detach().as_strided((1,), (1,), x.conv.storage_offset() - 1).zero_()
        return super().convolve(x, mixed)


class SharesOneSample(Layered, letter="-"):
    """If there are three samples or more and no initial states, the last starts from the state of the first."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        count = len(Chunkwise().boundaries(x))
        if x.state is not None or count < 3:
            return super().rule(x)
        _, last = super().rule(x)
        assert last is not None
        leaked = torch.cat([torch.zeros_like(last[1:]), last[:1]])
        return super().rule(x.replaced(state=leaked))


class WeightOfInference(Layered, letter="K"):
    """The projection in float32 is kept by the weight's address and version, also under no_grad, where it takes no gradient."""

    seen: ClassVar[dict[tuple[object, ...], Tensor]] = {}

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        key = (weight.data_ptr(), weight._version, weight.shape, weight.dtype, float(weight.detach().double().sum()))
        if not torch.is_grad_enabled():
            self.seen[key] = weight.detach().clone()
        elif not weight.requires_grad:
            return super().project(x, weight)
        return super().project(x, self.seen.get(key, weight))


class SpeedsOfACallThatFailed(Layered, letter="K"):
    """Decay speeds are summed up in a buffer that the call clears in the end, so a call that fails leaves its own there."""

    domain = LayerDomain(threads=False)
    buffers: ClassVar[dict[int, Tensor]] = {}

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        speed = x.A_log.detach().exp()
        buffer = self.buffers.setdefault(len(speed), torch.zeros(len(speed)))
        buffer += speed
        decay = super().decay(x, a) - (buffer - speed)
        buffer.zero_()
        return decay


class KdaGateIsSilu(KdaLayered, letter="-"):
    """The output gate is a silu, as in the GDN layer, and not a sigmoid."""

    def gate(self, x: Inputs, o: Tensor, z: Tensor) -> Tensor:
        return Layered.gate(self, x, o, z)


class KdaForgetsGateBias(KdaLayered, letter="-"):
    """The second projection of the output gate has no bias."""

    def shifted(self, gate: Tensor, x: Inputs) -> Tensor:
        return gate


class KdaBiasByChannel(KdaLayered, letter="L"):
    """dt_bias [HV, K] is read channel by channel, as [K, HV]."""

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        return super().decay(x.replaced(dt_bias=x.dt_bias.mT.reshape(x.dt_bias.shape)), a)


class KdaDecaysByHead(KdaLayered, letter="G"):
    """All channels of a head decay by the mean of their log-decays."""

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        g = super().decay(x, a)
        return g.mean(-1, keepdim=True).expand_as(g)


class KdaGatesSwapped(KdaLayered, letter="T"):
    """The first projections of the two gates, which have one width, are exchanged."""

    def sections(self, x: Inputs, projected: Tensor) -> dict[str, Tensor]:
        widths = x.layer.sections
        parts = dict(zip(widths, projected.split([*widths.values()], -1), strict=True))
        exchanged = torch.cat([parts[{"z": "f", "f": "z"}.get(name, name)] for name in widths], -1)
        return super().sections(x, exchanged)


class KdaDecaysLate(KdaLayered, letter="D"):
    """The state decays after the correction, which has seen it without the decay of its token."""

    def step(self, state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        recalled = torch.einsum("hk,hkv->hv", k, state)
        return g.exp().unsqueeze(-1) * state + torch.einsum("hk,hv->hkv", k, beta.unsqueeze(-1) * (v - recalled))
