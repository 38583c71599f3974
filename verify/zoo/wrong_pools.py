"""Wrong serving: each is the decode on a pool of verify/zoo/base.py with one wrong step, as in real servers.

tests/laws/test_pools.py names the laws each of which detects the wrong implementation alone.
"""

import dataclasses
import time
from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.pools.case import BLOCK_SIZES
from properties.pools.domain import PoolDomain
from properties.rules.case import IN_KERNEL
from properties.rules.domain import Domain
from verify.zoo.base import Chunkwise, Serving, at_32_bits
from verify.zoo.wrong_gates import Stepwise

Answer = tuple[Tensor, Tensor]


class PromptForgetsPrefix(Serving, letter="S", incident=(18,)):
    """A call with several tokens starts from zeros, so a second call on a cached prefix forgets the prefix (sglang 16053)."""

    def run(self, x: Inputs) -> Answer:
        self.several = [end - start > 1 for start, end in _spans(x)]
        return super().run(x)

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state = super().read(x, request, slot)
        return state * 0 if self.several[request] else state


class StatesOfAllThreads(Serving, letter="R"):
    """A state waits in an attribute of the class, where a call in another thread may replace it before it is used."""

    later_calls = True
    scratch: ClassVar[dict[torch.Size, Tensor]] = {}

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state = self.scratch[x.pool.shape[1:]] = super().read(x, request, slot)
        time.sleep(1e-3)  # the other thread replaces the state meanwhile
        return self.scratch[state.shape]


class IgnoresBeginnings(Serving, letter="S", incident=(19,)):
    """A request that begins continues from what the one before left in its slot (tpu-inference 2408)."""

    def begins(self, x: Inputs, request: int) -> bool:
        return False


class SlotsIn32Bits(Serving, letter="I"):
    """The place of a slot is computed in 32 bits, so a pool of 2^31 numbers and more is read before its first slot."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        return super().read(x.replaced(pool=at_32_bits(x.pool)), request, slot)


class BeginsByZeroTimes(Serving, letter="S", incident=(19,)):
    """A request that begins multiplies the contents of its slot by zero, so NaN stays NaN (tpu-inference 2431)."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state: Tensor = x.pool[slot] * float(not self.begins(x, request))
        return state


class SkipsWriteOfFour(Serving, letter="S", incident=(20,)):
    """With four tokens, one and three drafted ones, the state is not written back (vLLM 53051)."""

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        if len(states) != 5:
            super().write(x, request, slot, states)


class KeepsTheWholeDraft(Serving, letter="S", incident=(21,)):
    """The state after all drafted tokens is written back, rejected ones included (vLLM 39273)."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return tokens


class KeepsOneLess(Serving, letter="S", incident=(21,)):
    """If a part of a draft is accepted, the state of one token earlier is written back (vLLM 40738)."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        count = super().accepted_count(x, request, tokens)
        return count - 1 if 1 < count < tokens else count


class KeepsOneOfNone(Serving, letter="S"):
    """If no token of a draft is accepted, the state after its first token is written back."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return max(super().accepted_count(x, request, tokens), min(1, tokens))


class RejectedDraftsStay(Serving, letter="S", incident=(22,)):
    """After a draft was rejected in part, the next user of the slot starts from the rejected tokens' state (vLLM 53912)."""

    spoiled: ClassVar[dict[tuple[int, torch.Size], Tensor]] = {}

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        return self.spoiled.pop((slot, x.pool.shape), super().read(x, request, slot))

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        super().write(x, request, slot, states)
        if x.accepted is not None and int(x.accepted[request]) < len(states) - 1:
            self.spoiled[slot, x.pool.shape] = states[-1]


class CheckpointHalved(Serving, letter="S", incident=(23,)):
    """For prompts of 64 tokens or more, the state half way is stored, because its index is halved (sglang 33515)."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        count = super().accepted_count(x, request, tokens)
        return count // 2 if count >= 64 else count


class PaddingIsLast(Serving, letter="S", incident=(24,)):
    """The padding slot -1 is used as an address, so the last slot is read and written (vLLM 33326)."""

    def slot(self, x: Inputs, request: int) -> int | None:
        slot = int(x.slots[request])
        return len(x.pool) - 1 if slot == -1 else super().slot(x, request)


class PaddingIsBefore(Serving, letter="S", incident=(24,)):
    """The padding slot -1 is used as an address, so the memory before the pool is written (sglang 33431)."""

    def run(self, x: Inputs) -> Answer:
        answer = super().run(x)
        size, at = x.pool[0].numel(), x.pool.storage_offset()
        if -1 in x.slots.tolist() and at >= size:
            x.pool.as_strided((size,), (1,), at - size).zero_()
        return answer


class PaddingIsFirst(Serving, letter="S", incident=(24,)):
    """Padding slots are clamped to 0, so slot 0 is written."""

    def slot(self, x: Inputs, request: int) -> int | None:
        return max(int(x.slots[request]), 0)


class ReadsVFirst(Serving, letter="L", incident=(25,)):
    """If K = V, states are read and written transposed, V first (sgl-kernel-npu 640)."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state = super().read(x, request, slot)
        return state.mT if state.shape[-1] == state.shape[-2] else state

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        super().write(x, request, slot, [state.mT if state.shape[-1] == state.shape[-2] else state for state in states])


class WritesBf16(Serving, letter="L", incident=(26,)):
    """States are rounded to bf16 as they are written back (ollama 15865)."""

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        super().write(x, request, slot, [state.bfloat16().float() for state in states])


class StrideOfTwoBytes(Serving, letter="L", incident=(27,)):
    """For drafts, a state is read in steps of two bytes: each number comes twice, the second half never (sglang 40419)."""

    def run(self, x: Inputs) -> Answer:
        self.several = [end - start > 1 for start, end in _spans(x)]
        return super().run(x)

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state = super().read(x, request, slot)
        if not self.several[request]:
            return state
        return state.flatten().repeat_interleave(2)[: state.numel()].reshape(state.shape)


class SlotInSevenBits(Serving, letter="I"):
    """Slot numbers have seven bits, so slot 128 is slot 0."""

    def slot(self, x: Inputs, request: int) -> int | None:
        slot = super().slot(x, request)
        return None if slot is None else slot % 128


class WritesNeighbour(Serving, letter="I"):
    """If a slot is even, the state is also written to the next one."""

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        super().write(x, request, slot, states)
        if slot % 2 == 0 and slot + 1 < len(x.pool) and slot + 1 not in x.slots.tolist():
            x.pool[slot + 1] = x.pool[slot]


class OneHeadOfOneRequest(Serving, letter="-"):
    """The state of the third request's last head does not decay."""

    def run(self, x: Inputs) -> Answer:
        spans = _spans(x)
        if len(spans) > 2:
            g = x.g.clone()
            g.flatten(0, 1)[slice(*spans[2]), -1] = 0
            x = x.replaced(g=g)
        return super().run(x)


class OverEight(Serving, letter="-"):
    """If there are more than eight requests, the ninth has the state of the first, and so on."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        first = self.slot(x, request % 8)
        return super().read(x, request % 8, slot if first is None else first)


class NeverWritesOne(Serving, letter="S"):
    """A single token does not change the state."""

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        if len(states) != 2:
            super().write(x, request, slot, states)


class SumsPadding(Serving, letter="S"):
    """The outputs of all requests, padding included, pass through one product, so NaN spreads from padding."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        return o + 0 * x.v.sum()


class PicksByProduct(Serving, letter="S"):
    """States are selected by a product of the pool with zeros and ones, so NaN in any slot spreads to all."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        one_hot = torch.arange(len(x.pool)) == slot
        state = torch.tensordot(one_hot.float(), x.pool, 1)
        return state * 0 if self.begins(x, request) else state


class SlotsOfTheFirstCall(Serving, letter="K", incident=(36,)):
    """The slots of a call are cached by its shapes, and used in every later call with these shapes (FlashQLA 23)."""

    seen: ClassVar[dict[tuple[object, ...], Tensor]] = {}

    def run(self, x: Inputs) -> Answer:
        key = (x.q.shape, x.v.shape, x.pool.shape, x.q.dtype, x.padding, x.slots.dtype)
        return super().run(x.replaced(slots=self.seen.setdefault(key, x.slots.clone())))


class OffsetsByIdentity(Serving, letter="K", incident=(36,)):
    """Offsets are kept by the identity of cu_seqlens: a buffer that is filled again has the offsets of its first use."""

    seen: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}

    def run(self, x: Inputs) -> Answer:
        if x.cu_seqlens is None:
            return super().run(x)
        tensor, offsets = self.seen.setdefault(id(x.cu_seqlens), (x.cu_seqlens, x.cu_seqlens.clone()))
        return super().run(x.replaced(cu_seqlens=offsets) if tensor is x.cu_seqlens else x)


class SlotsByIdentity(Serving, letter="K", incident=(36,)):
    """Slots are kept by the identity of their tensor, which a server fills again for every step."""

    seen: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}

    def run(self, x: Inputs) -> Answer:
        tensor, slots = self.seen.setdefault(id(x.slots), (x.slots, x.slots.clone()))
        return super().run(x.replaced(slots=slots) if tensor is x.slots else x)


class SlotsByAddress(Serving, letter="K", incident=(36,)):
    """Slots are kept by their address, which the slots of a later step have too, once those of an earlier one are freed."""

    seen: ClassVar[dict[tuple[object, ...], Tensor]] = {}

    def run(self, x: Inputs) -> Answer:
        key = (x.slots.data_ptr(), x.slots.shape, x.slots.dtype, x.pool.shape, x.padding, len(x.v))
        return super().run(x.replaced(slots=self.seen.setdefault(key, x.slots.clone())))


class QueueAfterAnError(Serving, letter="S"):
    """A call that raises leaves a mark, and the first request of the next call is then taken for one that begins."""

    unfinished: ClassVar[bool] = False

    def run(self, x: Inputs) -> Answer:
        kind = type(self)
        self.late, kind.unfinished = kind.unfinished, True
        result = super().run(x)
        kind.unfinished = False
        return result

    def begins(self, x: Inputs, request: int) -> bool:
        return super().begins(x, request) or (self.late and request == 0)


class TakesStatesOut(Serving, letter="S"):
    """A state is taken out of its slot and put back in the end, so a call that fails in between loses it."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state = super().read(x, request, slot).clone()
        x.pool[slot] = 0
        return state


class LargeValuesChangeThePath(Serving, letter="-"):
    """If any request has a large value, all requests take a right path that rounds differently."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        return o * (1 + 2.0**-22) if x.v.numel() and float(x.v.float().nan_to_num(0.0).abs().max()) > 1 else o


class NanChangesThePath(Serving, letter="-"):
    """If any slot holds NaN, a free one included, outputs are right but have other bits."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        return o * (1 + 2.0**-22) if bool(x.pool.isnan().any()) else o


class SlotsSideBySide(Serving, letter="Q", incident=(35,)):
    """Slots are read as if they lay next to each other in memory."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state = super().read(x, request, slot)
        if self.begins(x, request) or x.pool.is_contiguous():
            return state
        size = state.numel()
        dense = x.pool.as_strided((size,), (1,), x.pool.storage_offset() + slot * size)
        return dense.nan_to_num(0.0).reshape(state.shape)


class ClampsSlots(Serving, letter="-"):
    """The caller's slots are clamped in place, so that padding is slot 0 from then on."""

    def run(self, x: Inputs) -> Answer:
        answer = super().run(x)
        x.slots.clamp_(min=0)
        return answer


class WritesBeforeG(Serving, letter="I"):
    """The number just before g in memory is overwritten."""

    def run(self, x: Inputs) -> Answer:
        if x.g.storage_offset():
            x.g.as_strided((1,), (1,), x.g.storage_offset() - 1).zero_()
        return super().run(x)


class OddSlots(Serving, letter="-"):
    """States in odd slots are right but round differently, although the same bits are promised in every slot."""

    domain = PoolDomain(rule=Domain(backward=False, position_independent=True))

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        return super().read(x, request, slot) * (1 + slot % 2 * 2.0**-23)


class UnwrittenScratch(Serving, letter="I"):
    """Outputs pass through scratch memory that a draft's first token does not write."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        scratch = torch.empty(1).nan_to_num(0.0).clamp(-1, 1)
        return o + (scratch * 2.0**-9).to(o.dtype) * o


class ReturnsACopy(Serving, letter="S"):
    """The returned pool is a copy, and the caller's pool is unchanged."""

    def run(self, x: Inputs) -> Answer:
        return super().run(x.replaced(pool=x.pool.clone()))


class InBlocks(Serving):
    """A right implementation that takes value channels in blocks of `x.block_v` (or 8), with one program for each block."""

    domain = PoolDomain(blocks=BLOCK_SIZES)

    def run(self, x: Inputs) -> Answer:
        self.block = x.block_v or 8
        return super().run(x)

    def programs(self, width: int) -> int:
        """The number of programs, one for each block, for `width` channels."""
        return -(-width // self.block)

    def step(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Answer:
        o, after = torch.zeros_like(v), state.clone()
        for program in range(self.programs(v.shape[-1])):
            at = slice(program * self.block, (program + 1) * self.block)
            o[:, at], after[..., at] = super().step(q, k, v[:, at], g, beta, state[..., at])
        return o, after


class WholeBlocksOf32(InBlocks, letter="I"):
    """In blocks of 32, the grid is rounded down, so the remaining channels are not written."""

    def programs(self, width: int) -> int:
        return width // 32 if self.block == 32 else super().programs(width)


class GridOfTheFirstLaunch(InBlocks, letter="K"):
    """A launch's grid is cached by shapes and used for later ones with smaller blocks, so last channels are not written."""

    seen: ClassVar[dict[tuple[object, ...], int]] = {}

    def run(self, x: Inputs) -> Answer:
        self.key = (x.q.shape, x.v.shape, x.pool.shape, x.v.dtype)
        return super().run(x)

    def programs(self, width: int) -> int:
        return self.seen.setdefault(self.key, super().programs(width))


def _spans(x: Inputs) -> list[tuple[int, int]]:
    """The tokens of each request."""

    return Chunkwise().boundaries(x)


class GatesInside(Serving):
    """A right decode as servers have it: gates in the kernel, states V first in memory and of any dtype."""

    domain = PoolDomain(rule=Domain(in_kernel=IN_KERNEL, backward=False), layout="vk", state_dtypes=("fp32", "bf16", "fp16"))
    gates = Stepwise()

    def run(self, x: Inputs) -> Answer:
        g = self.gates.decay(x)
        g = g if self.domain.rule.operation == "kda" else g.squeeze(-1)
        return super().run(x.replaced(g=g, beta=self.gates.strength(x)))


class KdaInside(GatesInside):
    """The same for KDA."""

    domain = dataclasses.replace(GatesInside.domain, rule=Domain(operation="kda", in_kernel=IN_KERNEL, backward=False))


class _WithoutBias(Stepwise):
    def bias(self, x: Inputs) -> Tensor:
        return 0 * super().bias(x)


class _LinearFromTwo(Stepwise):
    def soft(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x, threshold=2.0)


class _FirstSpeed(Stepwise):
    def log_speed(self, x: Inputs) -> Tensor:
        return super().log_speed(x)[:1].expand(x.A_log.shape)


class DecodesWithoutBias(GatesInside, letter="N"):
    """The gate in the kernel leaves out dt_bias."""

    gates = _WithoutBias()


class DecodesLinearGates(GatesInside, letter="N"):
    """The gate's softplus is linear above 2, which makes it 6% too small there."""

    gates = _LinearFromTwo()


class DecodesFirstSpeed(GatesInside, letter="G"):
    """Every head decays with the A_log of the first head."""

    gates = _FirstSpeed()


class DecodesKdaAsOneDecay(KdaInside, letter="D"):
    """KDA's decays are read with a stride of one number for each head, so every channel gets the first one's decay."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().step(q, k, v, g[:, :1].expand(g.shape), beta, state)


class HalfStatesByHalf(GatesInside, letter="L", incident=(27,)):
    """States in half precision are read with float32's stride, so half of each keeps its old numbers (sglang 40419)."""

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        before = x.pool[slot].clone()
        super().write(x, request, slot, states)
        if x.pool.dtype != torch.float32:
            half = x.pool.shape[-1] // 2
            x.pool[slot, ..., half:] = before[..., half:]


class IdleRequestsDecay(GatesInside, letter="L"):
    """The state of a request without tokens is rounded down at each call, which no tolerance of half precision shows."""

    def write(self, x: Inputs, request: int, slot: int, states: list[Tensor]) -> None:
        super().write(x, request, slot, states if len(states) > 1 else [states[0] * (1 - 2.0**-7)])


class TransposesByCopy(GatesInside, letter="L"):
    """A pool that is V first is transposed into a copy, and only the copy is updated, so states are lost."""

    def run(self, x: Inputs) -> Answer:
        o, _ = super().run(x.replaced(pool=x.pool.contiguous() if x.pool.shape[-1] > 1 else x.pool))
        return o, x.pool


class DraftsInTrees(GatesInside):
    """A right decode of drafts that are trees."""

    domain = dataclasses.replace(GatesInside.domain, trees=True)


class TreesAsChains(DraftsInTrees, letter="S"):
    """Every token of a tree follows the token before it."""

    def parent(self, x: Inputs, row: int, token: int) -> int:
        return token - 1


class TreesByTheNextRequest(DraftsInTrees, letter="S"):
    """From the second request on, the first parent is read one place too early."""

    def parent(self, x: Inputs, row: int, token: int) -> int:
        parent = super().parent(x, row, token)
        return super().parent(x, row - 1, token) if row > token > 1 and x.get("parents") is not None else parent


class TokensSideBySide(Serving, letter="Q", incident=(35,)):
    """Values are read as if tokens lay next to each other, although they lie in a fused tensor with queries and keys."""

    def run(self, x: Inputs) -> Answer:
        if x.v.is_contiguous() or not x.v.numel() or x.v.stride(-1) != 1:
            return super().run(x)
        start, size = x.v.storage_offset(), x.v.numel()
        dense = x.v.as_strided((size,), (1,), start).nan_to_num(0.0).reshape(x.v.shape)
        return super().run(x.replaced(v=dense))
