"""Wrong pools that are right up to a usual limit, and wrong just over it."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.wrong_just_over import in_pairs
from verify.zoo.base import Serving
from verify.zoo.wrong_pools import DraftsInTrees, InBlocks


class SlotsOf16Bits(Serving):
    """Slot 65,536 is taken for slot 0, and so on."""

    def slot(self, x: Inputs, request: int) -> int | None:
        slot = super().slot(x, request)
        return None if slot is None else slot % 2**16


class SlotsOf16BitsWithASign(Serving):
    """Slot 32,768 is taken for slot -32,768, counted from the end of the pool, and so on."""

    def slot(self, x: Inputs, request: int) -> int | None:
        slot = super().slot(x, request)
        return slot if slot is None or slot < 2**15 else (slot + 2**15) % 2**16 - 2**15


class AcceptedOf7Bits(Serving):
    """128 accepted tokens, or more, are taken for none."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        count = super().accepted_count(x, request, tokens)
        return count if x.accepted is None or count < 128 else 0


class DraftsUpTo256(Serving):
    """Requests from the 257th on keep all of their tokens."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return super().accepted_count(x, request, tokens) if request < 256 else tokens


class FreshUpTo1024(Serving):
    """Requests from the 1,025th on never begin anew."""

    most: ClassVar[int] = 1024

    def begins(self, x: Inputs, request: int) -> bool:
        return request < self.most and super().begins(x, request)


class FreshUpTo2048(FreshUpTo1024):
    """Requests from the 2,049th on never begin anew."""

    most = 2048


class SlabsOf2048(Serving):
    """Tokens in slabs of 2,048; a request that goes on in the next slab goes on from the state that the pool was left with."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        tokens, length = x.v.shape[:2].numel(), x.v.shape[1]
        if x.accepted is None or tokens <= 2048:
            return super().run(x)
        flat = {name: x[name].flatten(0, 1).unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
        starts = torch.arange(0, tokens + 1, length) if x.cu_seqlens is None else x.cu_seqlens
        outputs = []
        for low in range(0, tokens, 2048):
            ends, done = (starts - low).clamp(0, min(2048, tokens - low)), (low - starts[:-1]).clamp(min=0)
            left = torch.minimum((x.accepted - done).clamp(min=0), ends.diff())
            part = {name: t[:, low : low + 2048] for name, t in flat.items()}
            slab = x.replaced(**part, cu_seqlens=ends, accepted=left, has_initial_state=self.goes_on(x, done))
            outputs.append(super().run(slab)[0])
        return torch.cat(outputs, 1).view(x.v.shape), x.pool

    def goes_on(self, x: Inputs, done: Tensor) -> Tensor | None:
        return None if x.has_initial_state is None else x.has_initial_state | (done > 0)


class AcceptedOfWholeTiles(Serving):
    """The last accepted token is looked for in its tile of 64, counted from none: a whole number of tiles is in no tile."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        count = super().accepted_count(x, request, tokens)
        return tokens if x.accepted is not None and count and not count % 64 else count


class SinglesAreAccepted(Serving):
    """In a batch of single tokens, one that is rejected is kept all the same."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return 1 if tokens == 1 and x.cu_seqlens is None else super().accepted_count(x, request, tokens)


class NothingToDo(Serving):
    """A call without tokens returns at once, so that requests which begin keep what their slots had."""

    def run(self, x: Inputs) -> Any:
        return super().run(x) if x.v.shape[:2].numel() else (torch.zeros_like(x.v), x.pool)


class AcceptedUpTo64(Serving):
    """Requests from the 65th on keep all of their tokens."""

    def accepted_count(self, x: Inputs, request: int, tokens: int) -> int:
        return super().accepted_count(x, request, tokens) if request < 64 else tokens


class PoolHeadsOf7Bits(Serving):
    """The 129th head gets the output of the first one."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        return o[:, :, torch.arange(o.shape[2]) % 128]


class KeysOver128OfTheFirstHead(Serving):
    """Key channels from the 129th on are read from the state of the first head."""

    def read(self, x: Inputs, request: int, slot: int) -> Tensor:
        state = super().read(x, request, slot)
        return torch.cat([state[:, :128], state[:1, 128:].expand_as(state[:, 128:])], 1)


class PoolPairsOfValueHeads(Serving):
    """Two value heads at a time, with one load of their key."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        order = in_pairs(x.q.shape[2], x.v.shape[2])
        return super().run(x.replaced(q=x.q[:, :, order], k=x.k[:, :, order]))


class FourOfAKeyHead(Serving):
    """Up to four value heads of a key head at a time, with one load of their key."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        heads = torch.arange(x.v.shape[2])
        ratio = len(heads) // x.q.shape[2]
        together = min(ratio, 4)
        order = heads // together * together // ratio
        return super().run(x.replaced(q=x.q[:, :, order], k=x.k[:, :, order]))


class BlocksOf6Bits(InBlocks):
    """A block of value channels has a number of 6 bits, so that no more than 64 are computed."""

    def programs(self, width: int) -> int:
        return min(super().programs(width), 64)


class LongTrees(DraftsInTrees):
    """A right decode of drafts that are long trees."""

    domain = dataclasses.replace(DraftsInTrees.domain, most_tokens=300)


class ParentsOf7Bits(LongTrees):
    """The parents of a tree's tokens are signed bytes: from the 129th token on a parent is -1, the request's own state."""

    def parent(self, x: Inputs, row: int, token: int) -> int:
        parent = super().parent(x, row, token)
        return parent if parent < 128 or x.get("parents") is None else -1


class TreesInARing(DraftsInTrees):
    """The states of a tree's tokens lie in 64 places. That of the 65th token replaces that of the first one."""

    def parent(self, x: Inputs, row: int, token: int) -> int:
        parent = super().parent(x, row, token)
        return parent + (token - 1 - parent) // 64 * 64


class LaunchesOf16Bits(Serving):
    """Programs, one for a request and a value head, are launched 65,535 at a time. A launch begins with a request's first head."""

    def answer(self, x: Inputs, o: Tensor) -> Tensor:
        programs, most = o.flatten(0, 2), 2**16 - 1
        begins = most // o.shape[2] * o.shape[2]
        return torch.cat([programs[:most], programs[begins:][: max(0, len(programs) - most)]]).view(o.shape)


class LaunchesOfWholeRequests(Serving):
    """A launch has the programs of whole requests, at most 65,535, and launches are counted as if each had 65,535."""

    def slot(self, x: Inputs, request: int) -> int | None:
        heads, most = x.v.shape[2], 2**16 - 1
        reached = -(-len(x.slots) * heads // most) * max(1, most // heads)
        return super().slot(x, request) if request < reached else None


class FlagsOfTheFirstLaunch(Serving):
    """Requests behind the first 65,535 programs begin anew if those of the first launch do, whose flags they read."""

    def begins(self, x: Inputs, request: int) -> bool:
        return super().begins(x, request % ((2**16 - 1) // x.v.shape[2]))
