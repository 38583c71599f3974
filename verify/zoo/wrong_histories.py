"""Wrong rules, paths and engines that are right in a fresh process: what they keep of one call makes a later call wrong.

tests/laws/test_histories.py names the history that detects each of them. Layers, modules and pools that keep too much are beside
the other wrong layers, modules and pools.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from verify.adapters.gdn.layer import GatedDeltaNet
from verify.adapters.gdn.pool import Progress
from verify.ranks.collectives import CollectiveFailed, Place
from verify.zoo.base import Chunkwise
from verify.zoo.wrong_paths import Mutant
from verify.zoo.wrong_traces import Serves

Answer = tuple[Tensor, Tensor | None]
Key = tuple[object, ...]


class Remembers(Chunkwise):
    """The right rule, from which rules are derived that keep something of a call. Only later calls of a process are then wrong."""

    later_calls = True


class SpansByIdentity(Remembers, letter="K", incident=(36,)):
    """The spans of sequences are kept by the identity of cu_seqlens, so offsets that are filled again are not seen."""

    seen: ClassVar[dict[int, tuple[Tensor, list[tuple[int, int]]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            return super().boundaries(x)
        tensor, spans = self.seen.setdefault(id(x.cu_seqlens), (x.cu_seqlens, super().boundaries(x)))
        return spans if tensor is x.cu_seqlens else super().boundaries(x)


class SpansByAddress(Remembers, letter="K", incident=(36,)):
    """The spans are kept by the address and version of cu_seqlens, which a later tensor has too, once the first one is freed."""

    seen: ClassVar[dict[Key, list[tuple[int, int]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None:
            return super().boundaries(x)
        key = (x.cu_seqlens.data_ptr(), x.cu_seqlens._version, x.cu_seqlens.shape, x.q.shape, x.v.shape, x.q.dtype)
        return self.seen.setdefault(key, super().boundaries(x))


class GatesOfTheFirstShape(Remembers, letter="K", incident=(36,)):
    """The gates of a call are kept by its shapes and its gate's dtype, and used for later calls of these shapes."""

    seen: ClassVar[dict[Key, Tensor]] = {}

    def run(self, x: Inputs) -> Answer:
        key = (x.q.shape, x.v.shape, x.q.dtype, x.g.dtype)
        gates = self.seen.setdefault(key, x.g.detach().clone())
        return super().run(x.replaced(g=x.g + (gates - x.g).detach()))


class ScratchOfTheFirstBatch(Remembers, letter="K"):
    """Memory for the states is allocated for the sequences of the first call of a width, so that later ones find no room."""

    rows: ClassVar[dict[Key, int]] = {}

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> Answer:
        if state is None:
            return o, state
        room = self.rows.setdefault((x.q.shape[2:], x.v.shape[2:], x.q.dtype), len(state))
        return o, state * (torch.arange(len(state)) < room).reshape(-1, 1, 1, 1)


class NestedAfterAnError(Remembers, letter="K"):
    """A counter of nested calls is not counted down where a call raises. A nested call leaves its initial states out."""

    depth: ClassVar[int] = 0

    def run(self, x: Inputs) -> Answer:
        kind = type(self)
        kind.depth += 1
        result = super().run(x)
        kind.depth -= 1
        return result

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row) * (self.depth == 1)


class MaskBeforeItIsFull(Remembers, letter="K"):
    """The mask of a chunk is kept by its size before it is filled, so a call that fails in between leaves an empty one."""

    seen: ClassVar[dict[int, Tensor]] = {}

    def decays(self, total: Tensor) -> Tensor:
        size = total.shape[-1]
        if size not in self.seen:
            self.seen[size] = torch.zeros(size, size)
            self.seen[size].add_(torch.ones(size, size).tril())
        return super().decays(total) * self.seen[size]


class ScratchOfAllThreads(Remembers, letter="R"):
    """Rounded operands go through an attribute of the class, which a call in another thread may replace in the meantime."""

    scratch: ClassVar[dict[torch.Size, Tensor]] = {}

    def low(self, x: Tensor, like: Tensor) -> Tensor:
        low = super().low(x, like)
        self.scratch[low.shape] = low
        time.sleep(1e-3)  # what happens before the operand is used
        return self.scratch[low.shape]


class SharesAndRemembers(Mutant):
    """The right layer on several ranks, from which layers are derived that keep something of a call."""

    later_calls = True


class LengthsOfTheFirstShape(SharesAndRemembers, letter="K", incident=(36,)):
    """On each rank, the offsets of packed sequences are kept by their number and the shape of the hidden states."""

    seen: ClassVar[dict[Key, dict[str, Tensor]]] = {}

    def run(self, x: Inputs, place: Place) -> Tensor:
        offsets = {name: x[name].clone() for name in ("cu_seqlens", "cu_seqlens_padded") if x[name] is not None}
        shapes = [(name, len(tensor), tensor.dtype) for name, tensor in offsets.items()]
        return super().run(x.replaced(**self.seen.setdefault((place.rank, x.hidden.shape, *shapes), offsets)), place)


class LengthsByIdentity(SharesAndRemembers, letter="K", incident=(36,)):
    """The offsets of packed sequences are kept by the identity of cu_seqlens, so new numbers in them are not seen."""

    seen: ClassVar[dict[int, tuple[Tensor, dict[str, Tensor]]]] = {}

    def run(self, x: Inputs, place: Place) -> Tensor:
        if x.cu_seqlens is None:
            return super().run(x, place)
        offsets = {name: x[name].clone() for name in ("cu_seqlens", "cu_seqlens_padded") if x[name] is not None}
        return super().run(x.replaced(**self.seen.setdefault(id(x.cu_seqlens), (x.cu_seqlens, offsets))[1]), place)


class LengthsByAddress(SharesAndRemembers, letter="K", incident=(36,)):
    """The offsets are kept by the address and version of cu_seqlens, which a later tensor has too, once the first one is freed."""

    seen: ClassVar[dict[Key, dict[str, Tensor]]] = {}

    def run(self, x: Inputs, place: Place) -> Tensor:
        offsets = {name: x[name].clone() for name in ("cu_seqlens", "cu_seqlens_padded") if x[name] is not None}
        shapes = [(name, len(tensor), tensor.dtype, x[name].data_ptr(), x[name]._version) for name, tensor in offsets.items()]
        return super().run(x.replaced(**self.seen.setdefault((place.rank, x.hidden.shape, *shapes), offsets)), place)


class ProjectionOfInference(SharesAndRemembers, letter="K"):
    """The weight of in_proj is prepared once for a parameter, by a call under no_grad too, and then carries no gradient."""

    seen: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}

    def run(self, x: Inputs, place: Place) -> Tensor:
        weight = x.parameters["in_proj.weight"]
        if not torch.is_grad_enabled():
            self.seen[id(weight)] = weight, weight * 1
        prepared = self.seen.get(id(weight), (weight, weight))[1]
        return super().run(x.replaced(parameters={**x.parameters, "in_proj.weight": prepared}), place)


class OpenAfterARefusal(SharesAndRemembers, letter="K"):
    """A counter of open calls is not counted down where a layout is refused. A call inside another skips the norm's weight."""

    depth: ClassVar[dict[Key, int]] = {}

    def run(self, x: Inputs, place: Place) -> Tensor:
        self.depth[place.rank,] = self.depth.get((place.rank,), 0) + 1
        parameters = dict(x.parameters)
        if self.depth[place.rank,] > 1:
            parameters["norm.weight"] = 0 * parameters["norm.weight"] + 1
        y = super().run(x.replaced(parameters=parameters), place)
        self.depth[place.rank,] -= 1
        return y


class OpenAfterACollective(SharesAndRemembers, letter="K"):
    """What a rank has open is not closed where a collective raises. A call inside an open one skips the norm's weight."""

    opened: ClassVar[set[Key]] = set()

    def run(self, x: Inputs, place: Place) -> Tensor:
        parameters = dict(x.parameters)
        if (place.rank,) in self.opened:
            parameters["norm.weight"] = 0 * parameters["norm.weight"] + 1
        try:
            return super().run(x.replaced(parameters=parameters), place)
        except CollectiveFailed:
            self.opened.add((place.rank,))
            raise


class SlicesOfOneRank(SharesAndRemembers, letter="K"):
    """Where a rank's heads of A_log begin is kept for a layer, whatever number of ranks shares the next call."""

    seen: ClassVar[dict[Key, int]] = {}

    class module(GatedDeltaNet):  # noqa: N801
        def in_use(self, name: str) -> Tensor:
            if name != "A_log":
                return super().in_use(name)
            heads, cp = self.get_parameter(name), self.place.cp
            ranks = SlicesOfOneRank.seen.setdefault((self.layer, self.place.tp.size), cp.size)
            start = cp.rank * (len(heads) // ranks) % len(heads)
            return torch.cat([heads, heads])[start : start + len(heads) // cp.size]


class ServesAndRemembers(Serves):
    """The right engine, from which engines are derived that keep something of another one."""

    later_calls = True


class GatesOfTheFirstEngine(ServesAndRemembers, letter="K"):
    """A_log and dt_bias are prepared once for a number of heads, and later engines of as many heads use the same."""

    seen: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}

    def decay(self, a: Tensor) -> Tensor:
        gates = (self.sizes.A_log.exp(), self.sizes.dt_bias.clone())
        speed, bias = self.seen.setdefault(self.sizes.value_heads, gates)
        return (-speed * torch.nn.functional.softplus(a.float() + bias)).exp()


class FiltersByAddress(ServesAndRemembers, letter="K", incident=(36,)):
    """The convolution's weight in float32 is kept by its address, so new numbers in the same tensor are not seen."""

    seen: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}

    def convolve(self, line: Tensor) -> Tensor:
        weight = self.sizes.weight
        prepared = self.seen.setdefault(weight.data_ptr(), (weight, weight.float().clone()))[1]
        sizes, self.sizes = self.sizes, dataclasses.replace(self.sizes, weight=prepared)
        try:
            return super().convolve(line)
        finally:
            self.sizes = sizes


class OneTableForAllEngines(ServesAndRemembers, letter="K"):
    """The table of slots is the process's, not the engine's, so a second engine takes it over."""

    table: ClassVar[dict[str, int]] = {}

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.table.clear()
        self.owned = self.table


class TableOfTheLastTrace(ServesAndRemembers, letter="K"):
    """The last request that leaves an engine stays in its table with what it had, and a request of its name goes on from that."""

    def free(self, request: str) -> None:
        slot = self.owned[request]
        left = self.states[slot].clone(), self.windows[slot].clone()
        super().free(request)
        self.warm = {} if self.owned else {request: left}

    def admit(self, requests: Sequence[str]) -> None:
        super().admit(requests)
        for request in requests:
            if request in getattr(self, "warm", {}):
                self.states[self.owned[request]], self.windows[self.owned[request]] = self.warm.pop(request)


class ZerosAfterAnError(ServesAndRemembers, letter="K"):
    """A counter of open calls, shared by all engines, is not counted down where one raises. Later calls read zeros as states."""

    failed: ClassVar[list[bool]] = []

    def rows(self, batch: Batch) -> list[Progress]:
        self.failed.append(True)
        rows = super().rows(batch)
        self.failed.pop()
        return rows

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        state, window = super().read(slot)
        return (state, window) if len(self.failed) == 1 else (0 * state, window)


class StepsBeforeTheyAreFull(ServesAndRemembers, letter="K"):
    """A table of a factor for each token is kept before it is filled, so an engine that fails leaves zeros to all others."""

    seen: ClassVar[dict[int, Tensor]] = {}

    def decay(self, a: Tensor) -> Tensor:
        factors, tokens = super().decay(a), len(a)
        if tokens not in self.seen:
            self.seen[tokens] = torch.zeros(tokens, 1)
            for row in self.seen[tokens]:
                row.fill_(1.0)
        return factors * self.seen[tokens].to(factors.device)


class ServesAgain(Serves):
    """The right engine, which promises that a call that failed for lack of memory has changed nothing."""

    domain = TraceDomain(retries=True)
    later_calls = True


class WritesRowByRow(ServesAgain, letter="S"):
    """Each row of a prefill is written when it is computed, so a prefill that is made again processes its first rows twice."""

    def prefill(self, batch: Batch) -> Tensor:
        tokens, rows = zip(*(x.split(list(batch.lengths)) for x in (batch.mixed, batch.a, batch.b)), strict=True), list[Progress]()
        for request, row, length in zip(batch.requests, tokens, batch.lengths, strict=True):
            rows.append(self.row(self.slot(request), *row))
            self.write(rows[-1:], [length])
        o = self.outputs(rows)
        self.save(batch, rows)
        return o


class AdmissionsThatFailKeepTheirSlot(ServesAgain, letter="S"):
    """A slot is taken before the zeros for it are there, so an admission that fails loses it."""

    def admit(self, requests: Sequence[str]) -> None:
        for request in requests:
            slot = self.take()
            self.states[slot], self.windows[slot] = torch.zeros_like(self.states[slot]), torch.zeros_like(self.windows[slot])
            self.owned[request] = slot


class SwapGivesTheSlotFirst(ServesAgain, letter="S"):
    """A swap gives the slot back before what it holds is copied, so one that is made again gives the slot back twice."""

    def swap(self, request: str) -> None:
        slot = self.owned[request]
        self.give(slot)
        state, window = self.states[slot].clone(), self.windows[slot].clone()
        slot = self.owned[request] = self.take()
        self.states[slot], self.windows[slot] = state, window
