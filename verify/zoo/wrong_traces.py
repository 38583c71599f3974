"""Wrong serving engines: each is the engine of verify/adapters/gdn/pool.py with one wrong step, as in real servers.

tests/laws/test_wrong_traces.py names the laws each of which detects the wrong engine alone.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from properties.traces.events import PADDING
from verify.adapters.base import Engine, TraceAdapter
from verify.adapters.gdn.pool import PoolEngine, Progress
from verify.zoo.base import Right


class Serves(Right, PoolEngine, TraceAdapter):
    """The right engine, as an adapter that opens an engine of its own class."""

    domain = TraceDomain()

    def __init__(self, sizes: Sizes | None = None) -> None:
        if sizes is not None:
            super().__init__(sizes)

    def open(self, sizes: Sizes) -> Engine:
        return type(self)(sizes)


# Padding that aliases a slot


class PaddingIsTheLastSlot(Serves, letter="S", incident=(24,)):
    """Padding's index -1 is used as an address, so padding reads and writes the last slot (vllm 33326, 39064)."""

    def padding(self, slot: int) -> bool:
        return slot == self.sizes.padding_slot == 0


class PaddingTakesTheFirstSlot(Serves, letter="S", incident=(24,)):
    """The index of padding rows is clamped to the first slot of a request (flashinfer 2810, 2793)."""

    def slot(self, request: str) -> int:
        return max(super().slot(request), len(self.unowned))


class PaddingKeepsTheLastIndex(Serves, letter="S", incident=(24,)):
    """Padding rows keep the index that their place had in the batch before: a stale tail (sglang 33431, 20915)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.tail: list[int] = []

    def rows(self, batch: Batch) -> list[Progress]:
        rows = super().rows(batch)
        slots = [self.slot(request) for request in batch.requests]
        for place, row in enumerate(rows):
            if batch.requests[place] == PADDING and place < len(self.tail):
                row.slot = self.tail[place]
        self.tail = slots
        return rows


class PaddingInTheMiddle(Serves, letter="S", incident=(24,)):
    """Slots are gathered for the requests alone, so rows behind a padding row get their neighbour's (sglang 22818)."""

    def rows(self, batch: Batch) -> list[Progress]:
        order = [name for name in batch.requests if name != PADDING]
        order += [PADDING] * (len(batch.requests) - len(order))
        rows = super().rows(batch)
        for row, name in zip(rows, order, strict=True):
            row.slot = self.slot(name)
        return rows


# A slot that is used again


class StateIsNotCleared(Serves, letter="S", incident=(19,)):
    """A request that is admitted goes on from the state of the slot's last owner (vllm 35219)."""

    def clear(self, slot: int) -> None:
        self.windows[slot] = 0


class WindowIsNotCleared(Serves, letter="S", incident=(19,)):
    """A request that is admitted keeps the convolution window of the slot's last owner (sglang 26941)."""

    def clear(self, slot: int) -> None:
        self.states[slot] = 0


class ClearsByZeroTimes(Serves, letter="S", incident=(19,)):
    """A slot is cleared by multiplying it with zero, so NaN stays NaN (llama.cpp 29092)."""

    def clear(self, slot: int) -> None:
        self.states[slot] *= 0
        self.windows[slot] *= 0


class ClearsWhenFreed(Serves, letter="S", incident=(19,)):
    """A slot is cleared when its owner leaves, not when the next one comes (vllm 56524)."""

    def give(self, slot: int) -> None:
        super().give(slot)
        super().clear(slot)

    def clear(self, slot: int) -> None:
        pass


class ClearsItsNeighbour(Serves, letter="S", incident=(19,)):
    """Clearing a slot also clears the next one, if nobody owns it (sglang 16067)."""

    def clear(self, slot: int) -> None:
        super().clear(slot)
        if slot + 1 in self.unused:
            super().clear(slot + 1)


class HandsOutTheNullSlot(Serves, letter="S"):
    """A freed request's slot is lost, and when none is left, the slot 0 is handed out, which is nobody's."""

    def give(self, slot: int) -> None:
        pass

    def take(self) -> int:
        return super().take() if self.unused else 0


class GivesASlotTwice(Serves, letter="S", incident=(19,)):
    """A freed request that had a snapshot gives its own slot back twice (Megatron-LM 6584)."""

    def free(self, request: str) -> None:
        slot = self.owned[request]
        if f"{request}@" in self.owned:
            self.give(slot)
        super().free(request)


class LeaksSnapshots(Serves, letter="S", incident=(19,)):
    """A freed request gives its own slot back, and its snapshot's never (sglang 20182, 23496)."""

    def free(self, request: str) -> None:
        self.owned.pop(f"{request}@", None)
        super().free(request)


class HandsOutTheDummy(Serves, letter="S", incident=(19,)):
    """The slot 0, to which padding rows may write, is handed out like any other (sglang 26941)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        if sizes is not None:
            self.unused.extendleft(self.unowned)

    def slot(self, request: str) -> int:
        return self.owned.get(request, -1)

    def padding(self, slot: int) -> bool:
        return slot == -1


# Speculation


class StateKeepsTheDraft(Serves, letter="S", incident=(21,)):
    """After a draft was rejected in part, the state of all of its tokens is kept (vllm 39273)."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit([len(row.o) for row in self.drafted])


class AcceptsOneLess(Serves, letter="S", incident=(21,)):
    """Of a draft of which a part is accepted, the state a token earlier is kept (vllm 40738)."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit([count - (1 < count < len(row.o)) for count, row in zip(accepted, self.drafted, strict=True)])


class WindowKeepsTheDraft(Serves, letter="S", incident=(21,)):
    """The state goes back to the accepted tokens, and the window stays that of the whole draft (sglang 27463)."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit(accepted)
        for row in self.drafted:
            if not self.padding(row.slot):
                self.windows[row.slot] = row.line[:, len(row.o) :]


class WindowMissesTheDraft(Serves, letter="S", incident=(21,)):
    """The accepted tokens are in the state and not in the window (vllm 52942)."""

    def commit(self, accepted: Sequence[int]) -> None:
        windows = self.windows.clone()
        super().commit(accepted)
        self.windows.copy_(windows)


class AcceptedOfRequestsAlone(Serves, letter="S", incident=(21,)):
    """The counts of accepted tokens lie side by side without padding rows, and are read with them (xLLM 2247)."""

    def commit(self, accepted: Sequence[int]) -> None:
        counts = [count for count, row in zip(accepted, self.drafted, strict=True) if not self.padding(row.slot)]
        super().commit(counts + [1] * (len(accepted) - len(counts)))


class AcceptedOfTheStepBefore(Serves, letter="S", incident=(21,)):
    """The counts of accepted tokens are those of the verification before, if it had as many rows (vllm 47123)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.before: Sequence[int] = ()

    def commit(self, accepted: Sequence[int]) -> None:
        counts = self.before if len(self.before) == len(accepted) else accepted
        super().commit([min(count, len(row.o)) for count, row in zip(counts, self.drafted, strict=True)])
        self.before = accepted


class DraftsFromTheBuffer(Serves, letter="S", incident=(22,)):
    """A draft begins from the last state in the buffer of its row's place, whoever wrote it (flashinfer 3145, 3490)."""

    def verify(self, batch: Batch) -> Tensor:
        earlier, states = self.drafted, self.states.clone()
        for place, request in enumerate(batch.requests):
            if request != PADDING and place < len(earlier):
                self.states[self.owned[request]] = earlier[place].states[-1].to(states.dtype)
        o = super().verify(batch)
        self.states.copy_(states)
        return o


class NoWriteAfterFour(Serves, letter="S", incident=(20,)):
    """With drafts of four tokens, all accepted, the state is not written back (vllm 53051)."""

    def write(self, rows: Sequence[Progress], counts: Sequence[int]) -> None:
        written = [(row, count) for row, count in zip(rows, counts, strict=True) if not (count == len(row.o) == 4)]
        super().write([row for row, _ in written], [count for _, count in written])


class OneWidthForAllDrafts(Serves, letter="S", incident=(20,)):
    """The state that is kept of a draft is looked for where it would be if all rows were as long as the longest (vllm 55504)."""

    def commit(self, accepted: Sequence[int]) -> None:
        widest = max(len(row.o) for row in self.drafted)
        every = [state for row in self.drafted for state in row.states[1:]]
        for place, (row, count) in enumerate(zip(self.drafted, accepted, strict=True)):
            row.states[count] = every[min(place * widest + count, len(every)) - 1] if count else row.states[0]
        super().commit(accepted)


class AcceptedOfDraftsAlone(Serves, letter="S", incident=(20,)):
    """Counts of accepted tokens lie side by side for drafts alone, and are read with the plain decodes (vllm-xpu-kernels 599)."""

    def commit(self, accepted: Sequence[int]) -> None:
        lengths = [len(row.o) for row in self.drafted]
        drafts = [count for count, length in zip(accepted, lengths, strict=True) if length > 1]
        counts = (drafts + [1] * len(lengths))[: len(lengths)] if drafts else accepted
        super().commit([min(count, length) for count, length in zip(counts, lengths, strict=True)])


class NoneAcceptedIsOne(Serves, letter="S", incident=(21,)):
    """A draft of which nothing is accepted is committed like one of which the first token is (vllm 51508)."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit([max(count, 1) for count in accepted])


class VerifyWithoutDecay(Serves, letter="D"):
    """The kernel that verifies drafts leaves out the decay (mlx-swift-lm 218)."""

    def verify(self, batch: Batch) -> Tensor:
        batch.a.fill_(-100.0)
        return super().verify(batch)


# Prefill and decode together


class OneTokenIsADecode(Serves, letter="S", incident=(20,)):
    """A prompt of one token is taken for a decode and goes on from what its slot holds (vllm 36917)."""

    def clear(self, slot: int) -> None:
        pass

    def prefill(self, batch: Batch) -> Tensor:
        for request, start, length in zip(batch.requests, batch.starts, batch.lengths, strict=True):
            if request != PADDING and start == 0 and length > 1:
                super().clear(self.owned[request])
        return super().prefill(batch)


class PromptForgetsItsPrefix(Serves, letter="S", incident=(18,)):
    """The second part of a prompt starts from zeros (vllm 34871, 34845)."""

    def prefill(self, batch: Batch) -> Tensor:
        for request, length in zip(batch.requests, batch.lengths, strict=True):
            if request != PADDING and length:
                self.states[self.owned[request]] = 0
        return super().prefill(batch)


class PromptForgetsItsWindow(Serves, letter="S", incident=(18,)):
    """The second part of a prompt begins with an empty convolution window (mlxcel 1749)."""

    def prefill(self, batch: Batch) -> Tensor:
        for request, length in zip(batch.requests, batch.lengths, strict=True):
            if request != PADDING and length:
                self.windows[self.owned[request]] = 0
        return super().prefill(batch)


class ShortPromptsDropTheWindow(Serves, letter="S", incident=(18,)):
    """If a prefill has fewer tokens than the window, the columns before them become zeros (vllm 55894)."""

    def put(self, row: Progress, slot: int, count: int) -> None:
        super().put(row, slot, count)
        columns = self.sizes.width - 1
        if 1 < count < columns:
            self.windows[slot, :, : columns - count] = 0


class NoTokensMeanZeros(Serves, letter="V"):
    """A row of no tokens leaves a state of zeros behind (vllm 55898)."""

    def put(self, row: Progress, slot: int, count: int) -> None:
        super().put(row, slot, count)
        if not len(row.o):
            self.states[slot] = 0


class RowsChangeStates(Serves, letter="S", incident=(1,)):
    """In a prefill of several rows, a request that goes on gets the state of the row before it (vllm 40766)."""

    def prefill(self, batch: Batch) -> Tensor:
        starts, names = batch.starts, batch.requests
        for place in range(1, len(names)):
            if starts[place] and names[place - 1] != PADDING and starts[place - 1]:
                self.states[self.owned[names[place]]] = self.states[self.owned[names[place - 1]]]
        return super().prefill(batch)


class MixedStepsTakeNoSnapshot(Serves, letter="S", incident=(23,)):
    """A prefill in which a request goes on with one token takes the way of decodes, and no snapshot is written (sglang 39342)."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        names = zip(batch.requests, batch.starts, batch.lengths, strict=True)
        if max(batch.lengths) == 1 or not any(name != PADDING and start and length == 1 for name, start, length in names):
            super().save(batch, rows)
            return
        for request, count in zip(batch.requests, batch.snapshots, strict=True):
            if count is not None and f"{request}@" not in self.owned:
                self.owned[f"{request}@"] = self.take()


# Snapshots of a prefix


class SnapshotHalfWay(Serves, letter="S", incident=(23,)):
    """A snapshot is the state half way, its index divided twice (sglang 33515)."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        super().save(_with_snapshots(batch, [count and count // 2 for count in batch.snapshots]), rows)


class SnapshotOfTheEnd(Serves, letter="S", incident=(23,)):
    """A snapshot is the state after all tokens, beyond the end of the chunk (sglang 37836, vllm 56196)."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        ends = [count and length for count, length in zip(batch.snapshots, batch.lengths, strict=True)]
        super().save(_with_snapshots(batch, ends), rows)


class SnapshotWindowOfTheEnd(Serves, letter="S", incident=(23,)):
    """A snapshot has the state after the chunk with the window after all tokens (vllm 53912, sglang 31833)."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        super().save(batch, rows)
        for row, request, count in zip(rows, batch.requests, batch.snapshots, strict=True):
            if count is not None:
                self.windows[self.owned[f"{request}@"]] = row.line[:, len(row.o) :]


class ShortRowsSaveAnEmptyWindow(Serves, letter="S", incident=(23,)):
    """A prompt that takes a snapshot after fewer tokens than the window has saves zeros for the tokens before."""

    def prefill(self, batch: Batch) -> Tensor:
        o, columns = super().prefill(batch), self.sizes.width - 1
        for request, count in zip(batch.requests, batch.snapshots, strict=True):
            if count is not None and count < columns:
                self.windows[self.owned[f"{request}@"], :, : columns - count] = 0
        return o


class SnapshotIsNotRenewed(Serves, letter="S", incident=(23,)):
    """A request that has a snapshot keeps it, though a later one is due (vllm 55507, LMCache 5004)."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        first = zip(batch.requests, batch.snapshots, strict=True)
        super().save(_with_snapshots(batch, [None if f"{name}@" in self.owned else count for name, count in first]), rows)


class SnapshotOfItsNeighbour(Serves, letter="S", incident=(23,)):
    """In a prefill of several rows, a snapshot is taken from the row before it (sglang 29973, 12111)."""

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        order = [*rows]
        for place in range(1, len(rows)):
            if (count := batch.snapshots[place]) is not None and len(rows[place - 1].o) >= count:
                order[place] = rows[place - 1]
        super().save(batch, order)


class ForkSharesTheSlot(Serves, letter="S", incident=(22,)):
    """A fork has its source's slot and is not copied when it is written (vllm 48375, 43559)."""

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        self.owned[new] = self.owned[f"{old}@" if snapshot else old]


class ForkForgetsTheWindow(Serves, letter="S", incident=(22,)):
    """A fork copies the state, and its window stays what the slot held (vllm 53142, LMCache 4984)."""

    def copy(self, source: int, target: int) -> None:
        self.states[target] = self.states[source]


class ForkOfTheRequest(Serves, letter="S", incident=(22,)):
    """A fork from a snapshot copies the request's own state, which is further (vllm 55600, 56525)."""

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        super().fork(new, old, snapshot=snapshot and old not in self.owned)


class DraftsSpoilTheSnapshot(Serves, letter="S", incident=(22,)):
    """A draft of which a part is rejected is committed to the request's snapshot too (sglang 33450, 22935)."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit(accepted)
        owners = {slot: owner for owner, slot in self.owned.items()}
        for row, count in zip(self.drafted, accepted, strict=True):
            if not self.padding(row.slot) and count < len(row.o) and f"{owners[row.slot]}@" in self.owned:
                self.put(row, self.owned[f"{owners[row.slot]}@"], count)


# Swap, preemption, transfer


class SwapLosesTheWindow(Serves, letter="S"):
    """A request that was swapped out comes back without its window (sglang 22493)."""

    def swap(self, request: str) -> None:
        super().swap(request)
        self.windows[self.owned[request]] = 0


class SwapBringsBackTheSlot(Serves, letter="S"):
    """A request that was swapped out comes back in its old slot, which may have another owner (vllm-metal 488)."""

    def swap(self, request: str) -> None:
        slot = self.owned[request]
        self.give(slot)
        self.take()


class SwapTransposes(Serves, letter="L", incident=(25,)):
    """A state that was swapped out is read back with its axes in the other order (sglang 39830, 22060)."""

    def swap(self, request: str) -> None:
        super().swap(request)
        state = self.states[self.owned[request]]
        state.copy_(state.mT.reshape(state.shape))


class SwapRoundsToHalf(Serves, letter="L", incident=(26,)):
    """A state in float32 is swapped out in bfloat16 (vllm 55208, 53078)."""

    def swap(self, request: str) -> None:
        super().swap(request)
        state = self.states[self.owned[request]]
        state.copy_(state.bfloat16())


class TransferJoinsRanks(Serves, letter="T", incident=(14,)):
    """The windows of ranks are joined whole, so that the sections q, k and v of each rank follow one another (vllm 41869)."""

    def joined(self, ranks: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
        state, _ = super().joined(ranks)
        return state, torch.cat([part for _, parts in ranks for part in parts])


class TransferSendsTheFirstRank(Serves, letter="T"):
    """The states of all ranks are those of the first one (vllm 45682)."""

    def joined(self, ranks: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
        return super().joined([(ranks[0][0], parts) for _, parts in ranks])


class TransferDealsHeads(Serves, letter="T"):
    """Value heads are dealt to ranks in turn, and joined as if each rank had neighbours (vllm 38898)."""

    def cut(self, state: Tensor, window: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        ranks = super().cut(state, window)
        return [(state[rank :: len(ranks)], parts) for rank, (_, parts) in enumerate(ranks)]


class TransferJoinsTheEndsFirst(Serves, letter="T"):
    """Of three or more ranks, the last one is joined right behind the first one."""

    def joined(self, ranks: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
        return super().joined([ranks[0], *ranks[1:][-1:], *ranks[1:-1]])


class PreemptionKeepsTheState(Serves, letter="S", incident=(19,)):
    """A request that was preempted goes on from its old state, though its tokens are processed again (vllm-metal 489)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes)
        self.preempted: dict[str, Tensor] = {}

    def preempt(self, request: str) -> None:
        self.preempted[request] = self.states[self.owned[request]].clone()
        super().preempt(request)

    def admit(self, requests: Sequence[str]) -> None:
        super().admit(requests)
        for request in requests:
            if request in self.preempted:
                self.states[self.owned[request]] = self.preempted.pop(request)


class PreemptionLosesTheSlot(Serves, letter="S", incident=(19,)):
    """A request that is preempted does not give its slot back (sglang 39862)."""

    def preempt(self, request: str) -> None:
        slot = self.owned[request]
        super().preempt(request)
        self.unused.remove(slot)


class SavesBeforeTheToken(Serves, letter="S", incident=(23,)):
    """A snapshot that a decode takes is the state before its token (sglang 33450)."""

    def decode(self, batch: Batch) -> Tensor:
        return super().decode(_with_snapshots(batch, [None if count is None else 0 for count in batch.snapshots]))


class SavesTheFirstRows(Serves, letter="S", incident=(23,)):
    """A decode saves the states of its first rows, as if all padding rows stood behind (sglang 22935)."""

    def decode(self, batch: Batch) -> Tensor:
        rows = self.rows(batch)
        self.save(batch, [rows[sum(batch.real[:place])] for place in range(len(rows))])
        self.write(rows, batch.lengths)
        return self.outputs(rows)


# Dtypes and addresses


class StatesRoundToHalf(Serves, letter="L", incident=(26,)):
    """States in float32 are rounded to bfloat16 whenever they are written (sglang 40419, vllm 37728)."""

    def put(self, row: Progress, slot: int, count: int) -> None:
        super().put(row, slot, count)
        self.states[slot] = self.states[slot].bfloat16().to(self.states.dtype)


class _Windows(Serves):
    """An engine that changes what it stores in a window."""

    def stored(self, window: Tensor) -> Tensor:
        """Return what is stored for the last inputs of a row."""
        raise NotImplementedError

    def put(self, row: Progress, slot: int, count: int) -> None:
        super().put(row, slot, count)
        self.windows[slot] = self.stored(self.windows[slot])


class WindowsAfterRelu(_Windows, letter="S"):
    """Windows hold their inputs after an activation: negative ones become zero."""

    def stored(self, window: Tensor) -> Tensor:
        return window.relu()


class WindowsRoundToHalf(_Windows, letter="L"):
    """Windows are rounded to bfloat16, also where inputs have more bits."""

    def stored(self, window: Tensor) -> Tensor:
        return window.bfloat16().to(window.dtype)


class WindowsLoseTheirSign(_Windows, letter="N"):
    """Negative inputs become NaN in windows."""

    def stored(self, window: Tensor) -> Tensor:
        return torch.where(window < 0, math.nan, window)


class NegatesALog(Serves, letter="N"):
    """A_log is read with the other sign."""

    def decay(self, a: Tensor) -> Tensor:
        return (-(-self.sizes.A_log).exp() * torch.nn.functional.softplus(a.float() + self.sizes.dt_bias)).exp()


class OneBiasForAllHeads(Serves, letter="G"):
    """Every head has the dt_bias of head 0."""

    def decay(self, a: Tensor) -> Tensor:
        return (-self.sizes.A_log.exp() * torch.nn.functional.softplus(a.float() + self.sizes.dt_bias[:1])).exp()


class SlotsDecideTheRounding(Serves, letter="I"):
    """In every second slot the output is scaled by 3 and back, which rounds: an address that is not aligned (sglang 38975)."""

    def row(self, slot: int, mixed: Tensor, a: Tensor, b: Tensor) -> Progress:
        row = super().row(slot, mixed, a, b)
        row.o = row.o * 3 / 3 if slot % 2 else row.o
        return row


class SharedScale(Serves, letter="-"):
    """Outputs are quantised with one scale for the first tokens of all rows of a batch (flashinfer 3230)."""

    def outputs(self, rows: Sequence[Progress]) -> Tensor:
        real = [row.o[:1].abs().amax() for row in rows if not self.padding(row.slot) and len(row.o)]
        return _quantised(super().outputs(rows), max(real, default=torch.tensor(1.0)))


class ScaleOfTheDraft(Serves, letter="-"):
    """The outputs of a draft are quantised with one scale for all of its tokens, rejected ones too (sglang 11133)."""

    def outputs(self, rows: Sequence[Progress]) -> Tensor:
        parts = super().outputs(rows).split([len(row.o) for row in rows])
        return torch.cat([_quantised(part, part.abs().amax().float()) if len(part) else part for part in parts])


class ScaleOfThePool(Serves, letter="-"):
    """Outputs are quantised with one scale for the whole pool, slots that nobody owns included (sglang 40362)."""

    def outputs(self, rows: Sequence[Progress]) -> Tensor:
        return _quantised(super().outputs(rows), self.states.float().nan_to_num(nan=7.0).abs().amax())


def _quantised(o: Tensor, scale: Tensor) -> Tensor:
    """Return outputs as multiples of a step, which changes last bits of small numbers. Every number of the scale counts.

    The step is a power of two, a sixteenth or less of the scale's unit in the last place, so that tags stay as they are.
    """
    if not scale:
        return o
    step = torch.finfo(o.dtype).eps * 2.0 ** (math.floor(math.log2(scale)) - 4 - int(float(scale) * 1e4) % 2)
    return ((o.float() / step).round() * step).to(o.dtype)


def _with_snapshots(batch: Batch, counts: Sequence[int | None]) -> Batch:
    """Return the batch with other places for its snapshots."""
    return Batch(batch.requests, batch.lengths, batch.starts, tuple(counts), batch.mixed, batch.a, batch.b)
