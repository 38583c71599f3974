"""Engines that move a request to another slot within a step, and what the law `ledger` says of slots that nobody owns."""

from collections.abc import Sequence

import pytest

from properties.traces.laws import TRACE_LAWS
from tests.drawn import domain_in_a_check, in_a_check
from verify.adapters.gdn.pool import Progress
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict
from verify.zoo.wrong_traces import Serves

HERE = "tests/laws/test_moving_engines.py"
LINES = (
    "trace=p:a1 slots=3 free=random",
    "trace=p:a1,b1/d:b,a/v2:a1,b2/w:a/f:a/p:c3,b1 slots=4 free=nan",
    "trace=p:a64/d:a slots=4 snapshots=64",
)


class Moves(Serves):
    """Right: what a step writes goes to the slot that was free for the longest time, and the request's old slot is given back."""

    def put(self, row: Progress, slot: int, count: int) -> None:
        super().put(row, self.moved(slot), count)

    def moved(self, slot: int) -> int:
        """The slot to which the owner of a slot moves: its own if no other is free."""
        if not self.unused:
            return slot
        owner = next(owner for owner, owned in self.owned.items() if owned == slot)
        self.owned[owner] = self.take()
        self.give(slot)
        return self.owned[owner]


class MovesAndScribbles(Moves):
    """Each step writes to a slot that nobody has, besides."""

    def put(self, row: Progress, slot: int, count: int) -> None:
        super().put(row, slot, count)
        if len(self.unused) > 1:
            self.states[self.unused[0]] = 1.0


class MovesAndDrops(Moves):
    """A verification moves requests of whose drafts nothing is accepted as well, and leaves what they have behind."""

    def commit(self, accepted: Sequence[int]) -> None:
        for row, count in zip(self.drafted, accepted, strict=True):
            if not self.padding(row.slot) and not count:
                self.moved(row.slot)
        counts = [(row, count) for row, count in zip(self.drafted, accepted, strict=True) if count]
        self.write([row for row, _ in counts], [count for _, count in counts])


def verdict(kind: type[Serves], line: str, law: str = "ledger") -> Verdict:
    return execute(Run.parse(f"law={law} adapter={HERE}:{kind.__name__} op=serving {line} key_dim=4 value_dim=4")).verdict


@pytest.mark.parametrize("line", LINES)
def test_a_slot_that_a_request_had_within_a_step_may_change(line: str) -> None:
    assert [verdict(kind, line) for kind in (Moves, Serves)] == [Verdict.HOLDS] * 2
    assert verdict(Moves, line, "session") is Verdict.HOLDS


def test_a_slot_that_nobody_had_must_not_and_what_an_owner_has_moves_with_it() -> None:
    assert verdict(Moves, "trace=p:a1 slots=2 free=random") is Verdict.BLIND, "each slot had an owner, so nothing is compared"
    assert verdict(MovesAndScribbles, "trace=p:a1/d:a slots=4 free=random") is Verdict.BROKEN
    assert verdict(MovesAndDrops, "trace=p:a3,b2/v:a0:2,b1:2 slots=4 free=random") is Verdict.BROKEN
    assert verdict(Moves, "trace=p:a3,b2/v:a0:2,b1:2 slots=4 free=random") is Verdict.HOLDS


@pytest.mark.slow
@pytest.mark.parametrize("law", TRACE_LAWS)
def test_an_engine_that_moves_requests_holds_in_a_check(law: str) -> None:
    domain = domain_in_a_check(f"{HERE}:Moves")
    for example in in_a_check(law, domain, 0)[:12]:
        assert execute(Run(law, f"{HERE}:Moves", example)).verdict is not Verdict.BROKEN, example
