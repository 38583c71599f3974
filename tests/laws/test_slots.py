"""Which slots an engine gives: a free list of any kind, and slots that owners of the same tokens share."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from properties.traces.case import Batch, TraceCase
from properties.traces.events import number_of
from tests.laws.test_traces import outcome
from tests.laws.test_wrong_traces import examples
from verify.adapters.gdn.pool import PoolEngine, Progress
from verify.zoo.wrong_traces import ForkSharesTheSlot, SlotsDecideTheRounding


class FirstFree(PoolEngine):
    """The first slot that is free is used first, as a bit map gives it."""

    def take(self) -> int:
        slot = min(self.unused)
        self.unused.remove(slot)
        return slot


class FirstFreeRounds(FirstFree, SlotsDecideTheRounding):
    """Wrong: what a slot holds is rounded in every second one."""


class ByName(PoolEngine):
    """Each request has a slot of its own, which its name decides."""

    def admit(self, requests: Sequence[str]) -> None:
        for request in requests:
            slot = self.owned[request] = number_of(request)
            self.unused.remove(slot)
            self.clear(slot)


class CopiesWhenItWrites(PoolEngine):
    """A fork has the slot of its source, and a snapshot at a row's end that of its request, until one of them goes on."""

    def give(self, slot: int) -> None:
        if slot not in self.owned.values():
            super().give(slot)

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        self.owned[new] = self.owned[f"{old}@" if snapshot else old]

    def move_out(self, owner: str) -> None:
        """Give an owner a slot of its own."""
        slot = self.owned[owner]
        if [*self.owned.values()].count(slot) > 1:
            self.owned[owner] = self.take()
            self.copy(slot, self.owned[owner])

    def rows(self, batch: Batch) -> list[Progress]:
        for request in batch.requests:
            if request in self.owned:
                self.move_out(request)
        return super().rows(batch)

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        for request, count, length in zip(batch.requests, batch.snapshots, batch.lengths, strict=True):
            saved = f"{request}@"
            if count is not None and saved in self.owned:
                self.give(self.owned.pop(saved))
            if count is not None and count == length:
                self.owned[saved] = self.owned[request]
        super().save(batch, rows)

    def move(self, request: str, state: Tensor, window: Tensor) -> None:
        self.give(self.owned.pop(request))
        slot = self.owned[request] = self.take()
        self.states[slot], self.windows[slot] = state, window


class SharesWithStrangers(CopiesWhenItWrites):
    """Wrong: a slot is free again when the first of its owners gives it back."""

    def give(self, slot: int) -> None:
        PoolEngine.give(self, slot)


FORKED = TraceCase("p:a8,b3/k:c<a/k:d<a@/d:a,b/d:c,d/k:e<d/s:e/w:d/t:c/r:a/f:e/p:a4", slots=8, snapshots=4)


@pytest.mark.parametrize("law", ["slots", "renamed", "ledger", "session", "tags"])
@pytest.mark.parametrize("kind", [FirstFree, CopiesWhenItWrites])
def test_right_engines_give_slots_in_their_own_way(kind: type[PoolEngine], law: str) -> None:
    assert outcome(law, FORKED, kind) == "holds"
    found = {outcome(law, example.case, kind) for example in examples(law)}
    assert "holds" in found
    assert found <= {"holds", "blind"}


def test_rounding_by_slots_shows_where_the_first_free_slot_is_used() -> None:
    assert outcome("renamed", FORKED, FirstFreeRounds).startswith("o of ")
    assert outcome("renamed", TraceCase("p:a1", slots=1), FirstFreeRounds).startswith("o of a ")


def test_an_engine_that_moves_nobody_is_blind() -> None:
    assert outcome("renamed", TraceCase("p:a1,b2/d:b"), ByName) == "blind"


def test_owners_of_different_tokens_share_no_slot() -> None:
    assert outcome("slots", TraceCase("p:a5/k:b<a"), ForkSharesTheSlot) == "holds", "nobody can tell yet"
    where = "a slot has two owners: request a and request b have different tokens, and both have slot 0 after event 3"
    assert outcome("slots", TraceCase("p:a5/k:b<a/d:a"), ForkSharesTheSlot).startswith(where)
    taken_away = TraceCase("p:a5/k:b<a/f:a/p:c1/f:c/p:d1/f:d/p:e1")
    assert outcome("ledger", taken_away, SharesWithStrangers).startswith("state of b, not in event 8: differs")
