"""The laws of traces: what they compare, how traces shrink, the guards of the bench, and the engine of our own."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from properties.laws.law import Blind, Breach, Pair
from properties.traces.case import Batch, Sizes, TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.laws import TRACE_LAWS
from properties.traces.play import play
from properties.words.example import Example
from tests.together import for_each
from verify.adapters.base import Engine
from verify.adapters.gdn.pool import Pool, PoolEngine
from verify.bench.trace_bench import EngineBench, place_of
from verify.engine.drawing import seeded
from verify.engine.shrink import shrink
from verify.execution.execute import execute
from verify.execution.judge import judge
from verify.execution.line import Run
from verify.process.outcome import Verdict

LINE = (
    "op=serving trace=p:a5,b70,_3/d:a,_/v4:a2,b1/k:c<b@/w:a/f:a/p:d3,c1 slots=4 pad=0 heads=1 value_heads=2 snapshots=64 "
    "gate=mixed free=nan dtype=bf16 seed=7"
)
FULL = TraceCase.parse(LINE)


def opened(kind: type[PoolEngine]) -> Pool:
    """The adapter of an engine."""
    adapter = Pool()
    adapter.engine = kind
    return adapter


def outcome(law: str, case: TraceCase, kind: type[PoolEngine], variant: str | None = None) -> str:
    """What a law says of an engine on a case: "holds", "blind", or the first finding."""
    bench = EngineBench(opened(kind), case)
    try:
        result = judge(TRACE_LAWS[law].check(bench, Example(case, None, variant)), place_of)
    except Breach as breach:
        return str(breach)
    except Blind:
        return "blind"
    return f"{result.findings[0].output}: {result.findings[0].what}" if result.findings else "holds"


# Laws


def test_every_head_has_gate_parameters_of_its_own() -> None:
    for gate in ("1000", "64", "10"):
        sizes = TraceCase("p:a1", heads=16, value_heads=32, gate=gate).sizes()
        assert len(set(sizes.A_log.tolist())) > 16
        assert len(set(sizes.dt_bias.tolist())) > 16
        assert sizes.A_log.abs().max() <= 1 / 2
        assert torch.equal(sizes.A_log * 64, (sizes.A_log * 64).round())
        decay = sizes.A_log.exp() * torch.nn.functional.softplus(sizes.dt_bias)
        assert 0.7 / float(gate) <= decay.min() <= decay.max() <= 1.42 / float(gate)


@for_each("gate", ["forever", "1000", "64", "10", "mixed"])
def test_no_head_decays_under_tags(gate: str) -> None:
    sizes = TraceCase("p:a1", heads=64, value_heads=64, gate=gate).sizes(tagged=True)
    decay = (-sizes.A_log.exp() * torch.nn.functional.softplus(sizes.dt_bias - 100.0)).exp()
    assert torch.equal(decay, torch.ones(64))


@pytest.mark.parametrize("law", TRACE_LAWS)
@pytest.mark.slow
def test_the_engine_of_our_own_holds(law: str) -> None:
    verdicts: list[str] = []

    def look(example: Example) -> None:
        verdicts.append(outcome(law, example.case, PoolEngine, example.variant))

    seeded(TRACE_LAWS[law].draw(TraceDomain()), 11, 6, look)
    assert set(verdicts) <= {"holds", "blind"}
    assert verdicts.count("holds") >= 4


class SharesABuffer(PoolEngine):
    """Right: it returns what an owner has in the same two tensors for every owner."""

    def contents(self, owner: str) -> tuple[Tensor, Tensor]:
        found = super().contents(owner)
        if not hasattr(self, "buffer"):
            self.buffer = [x.clone() for x in found]
        return self.buffer[0].copy_(found[0]), self.buffer[1].copy_(found[1])


@pytest.mark.slow
def test_an_engine_may_return_the_same_tensors_for_every_owner() -> None:
    verdicts: list[str] = []
    seeded(
        TRACE_LAWS["session"].draw(TraceDomain()),
        11,
        5,
        lambda example: verdicts.append(outcome("session", example.case, SharesABuffer)),
    )
    assert verdicts.count("holds") >= 4
    assert set(verdicts) <= {"holds", "blind"}


class KeepsDrafts(PoolEngine):
    """Keeps the whole draft."""

    def commit(self, accepted: Sequence[int]) -> None:
        super().commit([len(row.o) for row in self.drafted])


def test_a_wrong_tag_names_the_culprit() -> None:
    case = TraceCase("p:a5,b3/v4:a2,b4/d:a", slots=2)
    assert outcome("tags", case, PoolEngine) == "holds"
    assert outcome("tags", case, KeepsDrafts) == (
        "a state holds a wrong tag: request a's state after event 2 (v4:a2,b4) of p:a5,b3/v4:a2,b4/d:a holds in row 7 of head 0 "
        "the tag of request a's rejected draft 2 in event 2, must hold zeros"
    )


class ForgetsWindows(PoolEngine):
    """Copies the state alone."""

    def copy(self, source: int, target: int) -> None:
        self.states[target] = self.states[source]


def test_a_ledger_names_the_fork_that_is_no_copy() -> None:
    case = TraceCase("p:a5/k:b<a", slots=2)
    assert outcome("ledger", case, PoolEngine) == "holds"
    assert outcome("ledger", case, ForgetsWindows) == ("window of b, a fork of a in event 2: differs, but must be equal to the bit")


def test_a_transfer_cuts_a_window_by_its_sections() -> None:
    case = TraceCase("p:a5/t:a/d:a", slots=1, heads=2, value_heads=4, key_dim=4, value_dim=4)
    engine = PoolEngine(case.sizes())
    window = torch.arange(case.channels)[:, None].expand(-1, 3)
    first, second = engine.cut(torch.arange(4)[:, None, None].expand(-1, 4, 4), window)
    assert [heads[:, 0, 0].tolist() for heads, _ in (first, second)] == [[0, 1], [2, 3]]
    assert torch.cat(first[1])[:, 0].tolist() == [*range(4), *range(8, 12), *range(16, 24)]
    assert torch.cat(second[1])[:, 0].tolist() == [*range(4, 8), *range(12, 16), *range(24, 32)]
    assert {outcome(law, case, PoolEngine) for law in ("tags", "ledger", "session", "slots")} == {"holds"}


def test_what_nobody_does_is_blind() -> None:
    assert outcome("alone", TraceCase("p:a1/d:a"), PoolEngine) == "blind"
    assert outcome("session", TraceCase("f:a"), PoolEngine) == "blind"


def test_a_session_is_judged_from_the_bits_before_each_step() -> None:
    """An engine whose steps are right, from a state that somebody changed between them, keeps the law `session`."""

    class Drifts(PoolEngine):
        def admit(self, requests: Sequence[str]) -> None:
            super().admit(requests)
            for request, slot in self.owned.items():
                if request not in requests:
                    self.states[slot] *= 1.5

    case = TraceCase("p:a5/p:b2/d:a,b", slots=2)
    assert outcome("session", case, Drifts) == "holds"
    assert outcome("ledger", case, Drifts) == "state of a, not in event 2: differs, but must be equal to the bit"


def test_a_swap_that_leaves_nan_is_a_failure_of_its_step() -> None:
    class Spoils(PoolEngine):
        def swap(self, request: str) -> None:
            super().swap(request)
            self.windows[self.owned[request]] = float("nan")

    assert outcome("session", TraceCase("p:a5/w:a/d:a", slots=1), Spoils) == (
        "a window is not finite: request a's window after event 2 (w:a) of p:a5/w:a/d:a holds nan"
    )


def test_the_window_of_a_snapshot_is_judged() -> None:
    class Spoils(PoolEngine):
        def save(self, batch: Batch, rows: Sequence[Any]) -> None:
            super().save(batch, rows)
            for owner, slot in self.owned.items():
                self.windows[slot] *= 1 + owner.endswith("@")

    found = outcome("session", TraceCase("p:a16", slots=2, snapshots=16), Spoils)
    assert found == "window of snapshot of a after event 1: differs, but must be equal to the bit"


def test_rounded_states_are_judged_with_their_rounding_and_no_more() -> None:
    class Coarse(PoolEngine):
        def put(self, row: Any, slot: int, count: int) -> None:
            super().put(row, slot, count)
            self.states[slot] = self.states[slot].bfloat16().to(self.states.dtype)

    assert outcome("session", TraceCase("p:a9/d:a", slots=1, state="bf16", gate="10"), Coarse) == "holds"
    assert outcome("session", TraceCase("p:a9/d:a", slots=1, gate="10"), Coarse).startswith("state of a after event 1: is off")


# Shrinking


def test_a_trace_of_ten_events_shrinks_to_the_events_that_matter() -> None:
    case = TraceCase.parse(
        "op=serving trace=p:a5,b3,_2/d:a,_,b/w:b/v5:_,a2,b5/k:c<b/d:c,a/f:b/p:d66,_1/v5:d1,a4/d:a,c,d slots=5 pad=0 heads=2 "
        "value_heads=2 snapshots=64 free=nan dtype=bf16 gate=mixed indices=int32 seed=99"
    )
    law, start = TRACE_LAWS["tags"], time.monotonic()

    def fails(example: Example) -> bool:
        return outcome("tags", example.case, KeepsDrafts).startswith("a state holds a wrong tag")

    assert fails(Example(case))
    small = shrink(Example(case), law, fails, lambda runs: runs < 300)
    assert time.monotonic() - start < 30
    assert small.finished
    assert str(small.example.case) == "op=serving trace=p:a1/v2:a1 slots=1 key_dim=1 value_dim=4 width=2"


def test_a_draft_with_tokens_of_its_own_shrinks() -> None:
    case = TraceCase("p:a5,b3,c4/v:_:3,a2:4,b0:3,c1:1/d:a,c/v:c3:5,a1:1", slots=4)

    def fails(example: Example) -> bool:
        return outcome("tags", example.case, KeepsDrafts).startswith("a state holds a wrong tag")

    small = shrink(Example(case), TRACE_LAWS["tags"], fails, lambda runs: runs < 300)
    assert small.finished
    assert str(small.example.case) == "op=serving trace=p:a1/v2:a1 slots=1 key_dim=1 value_dim=4 width=2"


# The bench


class Wide(PoolEngine):
    """Windows have a column more, and every request has a second slot, in which its state is."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(dataclasses.replace(sizes, slots=2 * sizes.slots))
        self.windows = torch.zeros(len(self.states), sizes.channels, sizes.width, dtype=sizes.dtype)
        self.second = dict[int, int]()

    def take(self) -> int:
        slot = super().take()
        self.second[slot] = super().take()
        return slot

    def give(self, slot: int) -> None:
        super().give(slot)
        super().give(self.second.pop(slot))

    def scratch(self) -> Sequence[int]:
        return [*self.second.values()]

    def contents(self, owner: str) -> tuple[Tensor, Tensor]:
        slot = self.owned[owner]
        return self.states[self.second[slot]], self.windows[slot][:, 1:]

    def clear(self, slot: int) -> None:
        self.states[self.second[slot]] = 0
        self.windows[slot] = 0

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        if self.padding(slot):
            return super().read(slot)[0], self.windows.new_zeros(self.windows[0, :, 1:].shape)
        return self.states[self.second[slot]].float(), self.windows[slot][:, 1:].clone()

    def put(self, row: Any, slot: int, count: int) -> None:
        self.states[self.second[slot]] = row.states[count].to(self.states.dtype)
        self.windows[slot][:, 1:] = row.line[:, count : count + self.sizes.width - 1]


@pytest.mark.parametrize("law", TRACE_LAWS)
@pytest.mark.slow_after_first
def test_an_engine_may_have_slots_beside_those_of_requests(law: str) -> None:
    case = TraceCase("p:a5,b3/v4:a2,b4/d:a,b,_/f:a/p:c3/d:b,c", slots=2, pad="0", free="nan")
    for variant in TRACE_LAWS[law].variants or (None,):
        assert outcome(law, case, Wide, variant) == "holds"


def test_slots_beside_those_of_requests_have_one_owner() -> None:
    class Twice(Wide):
        def scratch(self) -> Sequence[int]:
            return [*self.owned.values()]

    class Idle(Wide):
        def scratch(self) -> Sequence[int]:
            return ()

    case = TraceCase("p:a5,b3/d:a", slots=2)
    assert outcome("slots", case, Twice) == (
        "a slot beside a request's own has another owner: the slots beside requests' own are 0, 2 after event 1 (p:a5,b3) of "
        "p:a5,b3/d:a"
    )
    assert outcome("ledger", case, Idle).startswith("state in slot 1, which nobody owns, after event 1: differs")


class Bare(Engine):
    """An engine that is wrong in what it returns."""

    def __init__(self, sizes: Sizes, **wrong: Any) -> None:
        self.states = torch.zeros(sizes.slots, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        self.windows = torch.zeros(sizes.slots, sizes.channels, sizes.width - 1)
        self.shape, self.owned = (sizes.value_heads, sizes.value_dim), dict[str, int]()
        self.__dict__.update(wrong)

    def slots(self) -> Mapping[str, int]:
        return self.owned

    def admit(self, requests: Sequence[str]) -> None:
        self.owned |= {request: len(self.owned) for request in requests}

    def prefill(self, batch: Batch) -> Tensor:
        return torch.zeros(sum(batch.lengths), *self.shape)

    def decode(self, batch: Batch) -> Tensor:
        return self.prefill(batch).bfloat16()

    def free(self, request: str) -> None:
        raise KeyError(request)


@for_each(
    ("trace", "wrong", "finding"),
    [
        ("p:a1", {"states": torch.zeros(3, 1, 8, 16)}, "states: has slots of shape (1, 8, 16), must have (1, 16, 8)"),
        ("p:a1", {"windows": torch.zeros(3, 40, 3).half()}, "windows: has dtype torch.float16, must have torch.float32"),
        ("p:a1", {"states": None}, "states: is NoneType, must be a tensor"),
        ("p:a1", {"shape": (8, 1)}, "o of prefill: has shape (1, 8, 1), must have (1, 1, 8)"),
        ("p:a1/d:a", {}, "o of decode: has dtype torch.bfloat16, must have torch.float32"),
        ("p:a1/f:a", {}, "free: raised KeyError: 'a'"),
        ("p:a1", {"windows": torch.zeros(3, 40, 2)}, "windows: has slots of shape (40, 2), must have (40, 3)"),
        ("p:a1", {"windows": torch.zeros(3, 40, 4)}, "window of contents: has shape (40, 4), must have (40, 3)"),
        ("p:a1/k:b<a", {}, "fork: raised NotImplementedError: no message"),
        ("p:a1", {"admit": lambda requests: None}, "call: an owner has no slot: request a after event 1 (p:a1) of p:a1"),
    ],
)
def test_an_engine_that_breaks_its_contract_is_a_finding(
    trace: str, wrong: dict[str, Any], finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "open", lambda self, sizes: Bare(sizes, **wrong))
    result = execute(Run.parse(f"law=ledger adapter=gdn/pool op=serving trace={trace}"))
    assert result.verdict is Verdict.BROKEN
    assert f"{result.findings[0].output}: {result.findings[0].what}" == finding


def test_open_must_return_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "open", lambda self, sizes: sizes)
    result = execute(Run.parse("law=ledger adapter=gdn/pool op=serving trace=p:a1"))
    assert [f"{found.output}: {found.what}" for found in result.findings] == ["open: returned Sizes, must return an Engine"]


def test_a_line_is_repeated_and_an_unsupported_one_says_why() -> None:
    result = execute(Run.parse(f"law=session adapter=gdn/pool {LINE}"))
    assert result.verdict is Verdict.HOLDS
    assert {"o", "state", "snapshot", "window"} == set(result.ratios)
    assert execute(Run.parse("law=slots adapter=gdn/pool op=serving trace=f:a")).verdict is Verdict.HOLDS
    assert execute(Run.parse("law=ledger adapter=gdn/pool op=serving trace=f:a")).verdict is Verdict.BLIND
    refused = execute(Run.parse("law=ledger adapter=gdn/pool op=serving trace=p:a200"))
    assert (refused.verdict, refused.reason) == (Verdict.UNSUPPORTED, "more than 130 tokens a row are not supported, got 200")
    with pytest.raises(ValueError, match="law dropped needs a padding row"):
        Run.parse("law=dropped variant=padding adapter=gdn/pool op=serving trace=p:a1")


def test_places_are_named_in_words() -> None:
    def place(port: str, flat: int, *shape: int) -> str:
        return place_of(Pair(port, "of a in event 3", torch.empty(0), torch.empty(0)), flat, torch.Size(shape))

    assert place("o", 3, 2, 2) == "token 1, head 1"
    assert place("state", 17, 2, 16) == "head 1, key row 1"
    assert place("owners", 0) == "index "


def test_what_the_engine_gets_is_its_own_copy() -> None:
    class Overwrites(PoolEngine):
        def rows(self, batch: Batch) -> list[Any]:
            rows = super().rows(batch)
            batch.mixed.fill_(float("nan"))
            return rows

    assert outcome("session", FULL, Overwrites) == "holds"
    assert len(list(play(EngineBench(opened(Overwrites), FULL), FULL))) == len(FULL.plan)
