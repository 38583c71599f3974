"""Wrong rules: each is the rule of verify/zoo/base.py with one wrong step, as in real kernels.

tests/laws/test_mutants.py names the laws each of which detects the wrong rule alone.
"""

import os
import time
from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.zoo.base import EPS, Chunkwise, Outputs, at_32_bits

Answer = tuple[Tensor, Tensor | None]


class DropsState(Chunkwise, letter="-"):
    """The state is dropped every 64 tokens."""

    def between(self, state: Tensor) -> Tensor:
        return state * 0


class LeaksState(Chunkwise, letter="V", incident=(1, 2, 3)):
    """The state of one packed sequence flows into the next (slime 1686)."""

    last_state: Tensor | None = None

    def run(self, x: Inputs) -> Answer:
        self.last_state = None
        return super().run(x)

    def initial(self, x: Inputs, row: int) -> Tensor:
        fresh = super().initial(x, row)
        leaked = self.last_state if x.cu_seqlens is not None and self.last_state is not None else 0
        return fresh + leaked

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        o, self.last_state = super().sequence(q, k, v, g, beta, state, scale)
        return o, self.last_state


class PeeksAhead(Chunkwise, letter="N"):
    """Token 0 of each chunk reads token 1."""

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        o, state = super().piece(q, k, v, g, beta, state, scale)
        if o.shape[-2] > 1:
            peek = torch.zeros(o.shape[-2], 1)
            peek[0] = 2.0**-20
            o = o + peek * v[:, 1:2].float()
        return o, state


class SeesFutureGates(Chunkwise, letter="N", incident=(33,)):
    """The decays inside a chunk are centred on the chunk's mean gate, which depends on later tokens (FLA 1240)."""

    def decays(self, total: Tensor) -> Tensor:
        middle = total.mean(-1, keepdim=True)
        lower = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).tril()
        up, down = (total - middle).clamp(-80, 80).exp(), (middle - total).clamp(-80, 80).exp()
        return (up.unsqueeze(-1) * down.unsqueeze(-2)).masked_fill(~lower, 0)


class TiledHeads(Chunkwise, letter="G"):
    """Value head h reads key head h % H instead of h // (HV // H)."""

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        return x.repeat(1, 1, value_heads // x.shape[2], 1)


class ForgetsBetaInErase(Chunkwise, letter="-"):
    """The value that is erased is not scaled by beta."""

    def corrections(self, k: Tensor, beta: Tensor, decays: Tensor) -> Tensor:
        return super().corrections(k, torch.ones_like(beta), decays)


class DecayOneTokenEarly(Chunkwise, letter="D", incident=(31,)):
    """The state, and what a full chunk adds to it, decay up to the last token but one (flashinfer 4311, in every channel)."""

    def last(self, total: Tensor) -> Tensor:
        return total[..., -2:-1] if total.shape[-1] == self.size else total[..., -1:]


class DecayTokenByThread(Chunkwise, letter="D", incident=(31,)):
    """Value channel c of a state decays up to token 57 + 2 (c % 4) of its chunk and not up to the last (flashinfer 4311)."""

    domain = Domain(backward=False)

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        o, after = super().piece(q, k, v, g, beta, state, scale)
        total = self.cumulative(g)
        # A thread holds one value channel of the state, but took the token from its part of another matrix. Of four threads, each
        # took another token, and only the fourth the right one. Only the incoming state decays wrongly, and gates past a chunk's
        # end are neutral.
        token = (57 + 2 * (torch.arange(v.shape[-1]) % 4)).clamp(max=g.shape[-1] - 1)
        wrong = (total[..., token].exp() - self.last(total).exp()).unsqueeze(-2) * state
        return o, after + wrong.detach()  # without a wrong gradient: the kernel had no backward, so no suite shall notice by one


class TailWithoutGate(Chunkwise, letter="V", incident=(5,)):
    """In a chunk that is not full the state does not decay (sparkinfer 604)."""

    def last(self, total: Tensor) -> Tensor:
        return total[..., -1:] if total.shape[-1] == self.size else total[..., -1:] * 0


class EpsInsideMean(Chunkwise, letter="E", incident=(34,)):
    """The L2 norm adds eps to the mean of squares, not to their sum (mlx-lm 1624)."""

    def normalise(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().sum(-1, keepdim=True) + 1e-6 * x.shape[-1]).sqrt()).to(x.dtype)


class EpsAsFloor(Chunkwise, letter="E", incident=(34,)):
    """The L2 norm is F.normalize, whose eps is a floor (transformers 40842)."""

    def normalise(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x.float(), dim=-1, eps=1e-6).to(x.dtype)


class EpsTenTimes(Chunkwise, letter="E"):
    """The L2 norm uses eps = 1e-5 instead of 1e-6."""

    def normalise(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().sum(-1, keepdim=True) + 1e-5).sqrt()).to(x.dtype)


class ScaleMeansOne(Chunkwise, letter="-"):
    """An absent scale means 1."""

    def scale(self, x: Inputs) -> float:
        return 1.0 if x.scale is None else x.scale


class NeedsScaleOnlyWhenGiven(Chunkwise, letter="-"):
    """An explicit scale is multiplied by the default one."""

    def scale(self, x: Inputs) -> float:
        return super().scale(x) if x.scale is None else x.scale * x.q.shape[-1] ** -0.5


class FirstStateForAll(Chunkwise, letter="V"):
    """Every sequence starts from the first one's initial state."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, 0)


class StateTransposed(Chunkwise, letter="L", incident=(25,)):
    """If K = V, the final state is returned transposed, [V, K] (sgl-kernel-npu 640)."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        return o, state.mT if state is not None and state.shape[-1] == state.shape[-2] else state


class StateInBf16(Chunkwise, letter="L", incident=(26,)):
    """The final state is stored in bf16 (ollama 15865)."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        return o, None if state is None else state.bfloat16().float()


class NoGradientIntoState(Chunkwise, letter="F"):
    """The initial state gets no gradient beyond the first sequence's."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        state = super().initial(x, row)
        return state if row == 0 else state.detach() + 0 * state


class DropsStateGradient(Chunkwise, letter="F"):
    """The final state's cotangent is dropped."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        return o, None if state is None else state.detach() + 0 * state


class GateGradientLateByOne(Chunkwise, letter="F"):
    """The gate's gradient is summed from the next token on."""

    def cumulative(self, g: Tensor) -> Tensor:
        return g.cumsum(-1).detach() + (g.cumsum(-1) - g) - (g.cumsum(-1) - g).detach()


class Saturates(Chunkwise, letter="-"):
    """Large values are clamped to 1, so outputs are not linear in v."""

    def run(self, x: Inputs) -> Answer:
        return super().run(x.replaced(v=x.v.clamp(-0.5, 0.5)))


class ClipsGradient(Chunkwise, letter="F"):
    """The output's cotangent is clipped, so gradients are not linear in it."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        return _Clipped.apply(o), state


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> Tensor:
        return cotangents[0].clamp(-0.9, 0.9)


class ChangesBeta(Chunkwise, letter="-"):
    """beta is rounded in place."""

    def run(self, x: Inputs) -> Answer:
        answer = super().run(x)
        with torch.no_grad():
            x.beta.mul_(2).div_(2).add_(2.0**-6)
        return answer


class WritesBeforeV(Chunkwise, letter="I"):
    """The element just before v in memory is overwritten."""

    def run(self, x: Inputs) -> Answer:
        if x.v.storage_offset():
            with torch.no_grad():
                x.v.detach().as_strided((1,), (1,), x.v.storage_offset() - 1).zero_()
        return super().run(x)


class LeavesRowUnwritten(Chunkwise, letter="V"):
    """If the number of tokens is a multiple of 64, the last row is never written."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        if o.shape[1] and o.shape[1] % 64 == 0:
            memory = torch.empty(1, 1, *o.shape[2:], dtype=o.dtype)
            o = torch.cat([o[:, :-1], memory.expand(o.shape[0], 1, *o.shape[2:])], 1)
        return o, state


class ReadsUnwritten(Chunkwise, letter="I"):
    """An uninitialised factor, multiplied by 2^-9, scales what is added to the output."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        memory = torch.empty(1).nan_to_num(0.0).clamp(-1, 1)
        return (o + (memory * 2.0**-9).to(o.dtype) * o), state


class AssumesContiguous(Chunkwise, letter="Q", incident=(35,)):
    """g is read as if it were contiguous (sglang 22312)."""

    def run(self, x: Inputs) -> Answer:
        g = x.g
        if not g.is_contiguous() and g.numel():
            dense = torch.empty(0, dtype=g.dtype).set_(g.untyped_storage())
            g = g + (dense[: g.numel()].nan_to_num(0.0).reshape(g.shape) - g).detach()
        return super().run(x.replaced(g=g))


class AddressesIn32Bits(Chunkwise, letter="I"):
    """Offsets of v are computed in 32 bits, so tokens that lie 2^31 elements behind the first are read before it."""

    def run(self, x: Inputs) -> Answer:
        return super().run(x.replaced(v=at_32_bits(x.v)))


class SharesExponentAcrossHeads(Chunkwise, letter="L"):
    """v is rounded to 20 bits of an exponent that all heads share."""

    axes: tuple[int, ...] = (0, 2, 3)

    def run(self, x: Inputs) -> Answer:
        if not x.v.numel():
            return super().run(x)
        top = 2.0 ** (x.v.detach().float().abs().amax(self.axes, keepdim=True).clamp(min=2.0**-30).log2().ceil() - 20)
        rounded = ((x.v.detach().float() / top).round() * top).to(x.v.dtype)
        return super().run(x.replaced(v=x.v + (rounded - x.v).detach()))


class SharesExponentAcrossTokens(SharesExponentAcrossHeads, letter="L"):
    """v is rounded to 20 bits of an exponent that all tokens of a head share, those of other sequences included."""

    axes = (0, 1, 3)


class SlotOneIsOff(Chunkwise, letter="-"):
    """The second sequence is computed by a right formula that rounds differently, although the same bits are promised."""

    domain = Domain(position_independent=True)

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        o, state = super().sequence(q, k, v, g, beta, state, scale)
        self.row += 1
        return (o, state) if self.row != 2 else (o * (1 + 2.0**-22), state * (1 + 2.0**-22))

    def run(self, x: Inputs) -> Answer:
        self.row = 0
        return super().run(x)


class NeverTheSame(Chunkwise, letter="R", incident=(29,)):
    """Every other call rounds its output differently, as with a race."""

    calls = 0

    def run(self, x: Inputs) -> Answer:
        type(self).calls += 1
        return super().run(x.replaced(v=x.v * (1 + (self.calls % 2) * 2.0**-7)))


class TunesOnTheThirdCall(Chunkwise, letter="R", incident=(29,)):
    """Every third call in a row with the same inputs rounds differently, as if tuned, although the same bits are promised."""

    before: ClassVar[object] = None
    calls: ClassVar[int] = 0

    def run(self, x: Inputs) -> Answer:
        kind = type(self)
        now = (x.k.shape, x.v.shape, float(x.k.detach().double().sum()), float(x.v.detach().double().sum()))
        kind.calls = kind.calls + 1 if now == kind.before else 1
        kind.before = now
        o, state = super().run(x)
        return (o, state) if kind.calls % 3 or state is None else (o, state * (1 + 2.0**-22))


class EachAlone(Chunkwise):
    """A right implementation with a separate call, on separate memory, for each sequence and key head.

    Its results have the same bits at every position of a sequence or head.
    """

    domain = Domain(position_independent=True, backward=False)

    def run(self, x: Inputs) -> Answer:
        o, states = torch.zeros_like(x.v), []
        group = x.v.shape[2] // x.q.shape[2]
        for row, (start, end) in enumerate(self.boundaries(x)):
            ends = []
            for head in range(x.q.shape[2]):
                keys, values = slice(head, head + 1), slice(head * group, (head + 1) * group)
                tensors = {
                    name: x[name].flatten(0, 1)[start:end, keys if name in ("q", "k") else values].clone().unsqueeze(0)
                    for name in ("q", "k", "v", "g", "beta")
                }
                state = None if x.state is None else x.state[row : row + 1, values].clone()
                part, after = super().run(x.replaced(**tensors, state=state, cu_seqlens=None, output_final_state=True))
                o.flatten(0, 1)[start:end, values] = part[0]
                assert after is not None
                ends.append(after[0])
            states.append(torch.cat(ends))
        return self.whole(o, torch.stack(states)) if x.output_final_state else (o, None)

    def whole(self, o: Tensor, states: Tensor) -> Answer:
        return o, states


class LargeBatchesDiffer(EachAlone, letter="-"):
    """With eight sequences or more, another path is taken, which rounds differently, although the same bits are promised."""

    def whole(self, o: Tensor, states: Tensor) -> Answer:
        return o, states * (1 + 2.0**-22) if len(states) >= 8 else states


class OneSequenceDiffers(EachAlone, letter="-"):
    """A single sequence takes another path, which rounds differently, although the same bits are promised."""

    def whole(self, o: Tensor, states: Tensor) -> Answer:
        return o, states * (1 + 2.0**-22) if len(states) == 1 else states


class LargeBatchesLoseAState(Chunkwise, letter="V"):
    """With eight sequences or more, the last one has no initial state."""

    def run(self, x: Inputs) -> Answer:
        self.count = len(self.boundaries(x))
        return super().run(x)

    def initial(self, x: Inputs, row: int) -> Tensor:
        state = super().initial(x, row)
        return state * 0 if row == self.count - 1 >= 7 else state


class Int32Offsets(Chunkwise, letter="V"):
    """int32 cu_seqlens are taken for one sequence."""

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        ends = super().boundaries(x)
        if x.cu_seqlens is None or x.cu_seqlens.dtype == torch.int64:
            return ends
        whole = ends[-1][1]
        return [(0, whole), *[(whole, whole)] * (len(ends) - 1)]


class SkipsLengthOne(Chunkwise, letter="V"):
    """A sequence of one token is left out."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        if len(q) == 1:
            return 0 * super().sequence(q, k, v, g, beta, state, scale)[0], state
        return super().sequence(q, k, v, g, beta, state, scale)


class DropsEmpty(Chunkwise, letter="V"):
    """Empty sequences are dropped from the list of states, so later states move up and the last one comes twice."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        if state is None or not o.numel():
            return o, state
        full = [row for row, (start, end) in enumerate(self.boundaries(x)) if end > start]
        order = full + full[-1:] * (len(state) - len(full))
        return o, state[order]


class Overflows(Chunkwise, letter="N"):
    """exp(G_i) and exp(-G_j) are computed separately, which gives inf times 0 under strong decay."""

    def decays(self, total: Tensor) -> Tensor:
        return (total.exp().unsqueeze(-1) * (-total).exp().unsqueeze(-2)).tril()


class AlwaysNormalises(Chunkwise, letter="E"):
    """Keys are normalised even if qk_norm is off, so one-hot keys lose a bit to eps."""

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        q, k = super().keys(x)
        norm = k.float().norm(dim=-1, keepdim=True)
        near = (norm - 1).abs() < 1e-3
        return q, torch.where(near, k.float() / (norm.square() + 1e-6).sqrt(), k.float()) if k.dtype == torch.float32 else k


class SingleTokenForgetsDecay(Chunkwise, letter="S"):
    """A call of one token, the decode path, does not decay its state."""

    def run(self, x: Inputs) -> Answer:
        return super().run(x.replaced(g=x.g * 0) if x.q.shape[1] == 1 else x)


class OneHeadOneToken(Chunkwise, letter="X"):
    """In the last head, the output of token 70 is 5% too small."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        o, state = super().sequence(q, k, v, g, beta, state, scale)
        if len(o) > 70:
            factor = torch.ones(len(o), o.shape[1], 1)
            factor[70, -1] = 0.95
            o = o * factor
        return o, state


class ZeroesARow(Chunkwise, letter="X"):
    """The output of token 33 is zero."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        o, state = super().sequence(q, k, v, g, beta, state, scale)
        keep = (torch.arange(len(o)) != 33).reshape(-1, 1, 1)
        return o * keep, state


class AddsStateTwice(Chunkwise, letter="S", incident=(19,)):
    """An absent initial state is read as ones."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row) + (1.0 if x.state is None else 0.0)


class WrongWithoutFinalState(Chunkwise, letter="S"):
    """If the caller wants no final state, the last chunk is not computed."""

    def run(self, x: Inputs) -> Answer:
        if x.output_final_state or not x.v.numel():
            return super().run(x)
        o, _ = super().run(x)
        keep = torch.arange(o.shape[1]) < max(1, o.shape[1] // 64 * 64)
        return o * keep.reshape(1, -1, 1, 1), None


class HalfSum(Chunkwise, letter="X"):
    """Products lose the terms beyond the first 32 channels."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return super().dot(a[..., :32], b[..., :32, :])


class Exits(Chunkwise, letter="I"):
    """The process exits on a sequence of more than 20 tokens."""

    domain = Domain(backward=False)

    def run(self, x: Inputs) -> Answer:
        if x.q.shape[1] > 20:
            os._exit(7)
        return super().run(x)


class Segfaults(Exits, letter="I", incident=(7,)):
    """The process dies of SIGSEGV on more than 20 tokens."""

    def run(self, x: Inputs) -> Answer:
        if x.q.shape[1] > 20:
            os.kill(os.getpid(), 11)
        return Chunkwise.run(self, x)


class Hangs(Exits, letter="R", incident=(32,)):
    """The call never returns on more than 20 tokens."""

    def run(self, x: Inputs) -> Answer:
        while x.q.shape[1] > 20:
            time.sleep(0.05)
        return Chunkwise.run(self, x)


class Raises(Exits, letter="X"):
    """The call raises an error on more than 20 tokens."""

    def run(self, x: Inputs) -> Answer:
        if x.q.shape[1] > 20:
            raise RuntimeError("block size 20 exceeded\nand more")
        return Chunkwise.run(self, x)


class OneBlockWidth(Chunkwise, letter="X", incident=(28,)):
    """dk is wrong in the key channels from 64 on, which another block computes (FLA 640, in one configuration)."""

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        q, k = super().keys(x)
        if k.shape[-1] > 64 and k.requires_grad:
            k = torch.cat([k[..., :64], 2 * k[..., 64:] - k[..., 64:].detach()], -1)
        return q, k


class NanAtLengthOne(Chunkwise, letter="X", incident=(30,)):
    """In a mixed batch, sequences of one token go to the chunk kernel, whose tail divides by zero (vLLM 50649)."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        o, state = super().sequence(q, k, v, g, beta, state, scale)
        return (o * float("nan") if len(q) == 1 else o), state


class GroupsByShift(Chunkwise, letter="G"):
    """A value head's key head is found by a shift, which is right only if a key head has a power of two of value heads."""

    def repeat(self, x: Tensor, value_heads: int) -> Tensor:
        bits = (value_heads // x.shape[2] - 1).bit_length()
        return x[:, :, torch.arange(value_heads) >> bits]


class ThirtyTwoSequences(Chunkwise, letter="V"):
    """One warp reads the table of sequences, so from the 33rd on states are read from the table's beginning again."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row % 32)


class WideValuesDoNotDecay(Chunkwise, letter="I"):
    """Value channels from 256 on belong to another block, which does not get the gate."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        if v.shape[-1] <= 256:
            return super().sequence(q, k, v, g, beta, state, scale)
        o, final = super().sequence(q, k, v[..., :256], g, beta, state[..., :256], scale)
        more_o, more_final = super().sequence(q, k, v[..., 256:], 0 * g, beta, state[..., 256:], scale)
        return torch.cat([o, more_o], -1), torch.cat([final, more_final], -1)


class InferenceForgetsTheTail(Chunkwise, letter="V"):
    """Under torch.no_grad(), another path is taken, in which a chunk that is not full does not decay."""

    def last(self, total: Tensor) -> Tensor:
        return super().last(total) * (torch.is_grad_enabled() or total.shape[-1] == self.size)


class SquaresInHalf(Chunkwise, letter="L"):
    """The norm in the kernel squares in the inputs' dtype, so in fp16 a query of norm 256 or more becomes zero."""

    def normalise(self, x: Tensor) -> Tensor:
        wide = x.float()
        total = wide.square().sum(-1, keepdim=True)
        return (wide / (torch.where(total > torch.finfo(x.dtype).max, torch.inf, total) + EPS).sqrt()).to(x.dtype)
