"""Claims are measured by turns, judged by the truth, and said as they are: a wrong form, a failure and a missing GPU included.

In a worker, where kernels are interpreted, `answer` measures claims at tiny sizes, as `claims --device cpu --json FILE` does, and
says what it found about kernels that are wrong.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.modules.case import ModuleCase
from tests.alone import answered
from tests.faults import different, not_refused
from verify.adapters.gdn import functions
from verify.adapters.gdn.exchange import feature_map, permuted
from verify.claims import (
    decode_claims as decode,
)
from verify.claims import (
    exchange_claims as exchange,
)
from verify.claims import (
    kernel_claims as kernels,
)
from verify.claims import (
    layer_claims as layers,
)
from verify.claims import (
    timing,
)
from verify.claims.contest import Contest, Tensors, agreement, allocated_bytes, ready, saved_bytes, size_of, time_forms
from verify.claims.setting import LEAST_EFFORT, QWEN3_NEXT, TINY, Setting
from verify.claims.table import HEAD, Row, markdown, number, rounds_of, spread_text, table
from verify.claims.timing import Call, Clock, Effort, HostClock, Spread, by_turns, measured, ratios
from verify.cli import claims_command as command
from verify.cli.parsers import parser
from verify.process.worker import WorkerLost
from verify.ranks.collectives import Comm, Place, simulate
from verify.zoo.wrong_paths import GradientOfTheForward

pytestmark = pytest.mark.slow  # they change with the claims alone

SLOW_FIXTURES = ("measurement",)

CPU = torch.device("cpu")
MESSAGE = "gdn-verify: claims need a GPU, and torch sees none\n"


def setting(**changes: Any) -> Setting:
    return dataclasses.replace(Setting(TINY, HostClock(), LEAST_EFFORT, CPU), **changes)


class Scripted(Clock):
    """A clock whose calls say themselves how long they took."""

    def times(self, calls: Sequence[Call]) -> list[float]:
        self.passed_ms = [float(call()) for call in calls]  # type: ignore[arg-type]
        return self.passed_ms

    def settle(self) -> None:
        return

    def first(self, call: Call) -> float:
        call()
        return sum(self.passed_ms) / 1e3


# Times


def test_deciles_are_those_of_the_numbers_from_0_to_100() -> None:
    assert Spread.of([float(value) for value in range(100, -1, -1)]) == Spread(50.0, 10.0, 90.0, 101)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="values must hold at least one measurement"):
        Spread.of([])


def test_what_slows_both_down_in_a_turn_does_not_show_in_the_ratio() -> None:
    drift = [1.0, 1.5, 3.0, 0.5]
    assert ratios([6.0 * factor for factor in drift], [2.0 * factor for factor in drift]) == Spread(3.0, 3.0, 3.0, 4)
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_calls_come_by_turns_and_every_other_round_backwards() -> None:
    came: list[str] = []

    def call(name: str) -> Callable[[], float]:
        def timed() -> float:
            came.append(name)
            return len(came) + (100.0 if name == "b" else 0.0)

        return timed

    took = by_turns({name: call(name) for name in "abc"}, 3, Scripted())
    assert "".join(came) == "abc" + "cba" + "abc"
    assert took == {"a": [1.0, 6.0, 7.0], "b": [102.0, 105.0, 108.0], "c": [3.0, 4.0, 9.0]}


def test_rounds_fill_the_budget_within_their_limits() -> None:
    rows = [(1.0, 20), (50.0, 20), (100.0, 10), (400.0, 5), (0.0, 20)]
    assert different(Effort(budget_s=1.0, least=5, most=20, warm=1).rounds, rows) == []


def test_ranks_do_as_many_rounds_as_the_slowest_of_them_has_time_for() -> None:
    effort = Effort(budget_s=1.0, least=1, most=1000, warm=3)
    calls: dict[str, Call] = {"a": lambda: 4.0, "b": lambda: 6.0}
    assert {len(times) for times in measured(calls, Scripted(), effort).values()} == {100}
    assert {len(times) for times in measured(calls, Scripted(), effort, lambda ms: 5 * ms).values()} == {20}


def test_as_many_rounds_as_are_said_cost_no_more_calls() -> None:
    came: list[float] = []

    def call() -> float:
        came.append(1.0)
        return 1.0

    assert len(measured({"a": call}, Scripted(), Effort(budget_s=9.0, least=2, most=2, warm=3))["a"]) == 2
    assert len(came) == 5


def test_what_comes_before_a_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def passing(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    clock = HostClock(ahead=lambda: passing(5.0))
    assert clock.times([lambda: passing(0.25), lambda: passing(2.0)]) == [250.0, 2000.0]
    assert clock.first(lambda: passing(3.0)) == 3.0


def test_a_gpu_is_held_until_a_call_is_launched_and_its_cache_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    now = [0.0]

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            did.append("event")

        def elapsed_time(self, other: "Event") -> float:
            return 7.0

    class Flushed(list[int]):
        def zero_(self) -> None:
            did.append("flush")

    def call() -> None:
        did.append("call")
        now[0] += 0.004

    for name, fake in (("Event", Event), ("_sleep", lambda cycles: did.append(f"hold {cycles / 2e6:.1f}"))):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: did.append("wait"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "FLUSH_BYTES", 8)
    clock = timing.DeviceClock(CPU, lambda: did.append("ahead"))
    clock.flushed = Flushed()  # type: ignore[assignment]
    assert clock.times([call, call]) == [7.0, 7.0]
    rest = ["ahead", "event", "call", "event", "wait"]
    assert did == ["flush", "hold 3.0", *rest, "flush", "hold 6.0", *rest]  # half as long again as 4 ms
    did.clear()
    slow: list[Call] = [lambda: now.__setitem__(0, now[0] + 60)] * 2
    clock.times(slow)
    assert [action for action in did if action.startswith("hold")] == ["hold 3.0", "hold 8.0"]


# Numbers that follow from the claims


@given(gain=st.floats(1.01, 1.5), spare=st.floats(0.01, 0.6))
def test_a_kernel_that_gains_what_is_needed_makes_the_whole_gain_what_is_claimed(gain: float, spare: float) -> None:
    share = 1 - 1 / gain + spare
    assert math.isclose((1 - share) + share / decode.needed(gain, share), 1 / gain)


def test_no_kernel_gains_more_than_its_share() -> None:
    with pytest.raises(ValueError, match=r"share must be over 0.091 for a gain of 1.1, got 0.09"):
        decode.needed(1.1, 0.09)


@given(count=st.integers(1, 40), multiple=st.sampled_from([1, 4, 8]), more=st.integers(0, 200))
def test_ragged_lengths_add_up_in_multiples(count: int, multiple: int, more: int) -> None:
    lengths = kernels.ragged(multiple * (count + more), count, multiple)
    assert (len(lengths), sum(lengths)) == (count, multiple * (count + more))
    assert min(lengths) >= multiple and not any(length % multiple for length in lengths)


def test_ragged_lengths_are_long_and_short_by_turns() -> None:
    assert kernels.ragged(64, 4, 8) == [24, 8, 24, 8]


def test_lengths_that_cannot_be_are_refused() -> None:
    rows = [(3, 4, 1, "got 3"), (30, 2, 8, "got 30"), (8, 0, 1, "got 8"), (16, 3, 8, "got 16")]
    assert not_refused(kernels.ragged, rows) == []


def test_qwen3_next_saves_32_mib_at_4096_tokens() -> None:
    assert kernels.predicted_bytes(QWEN3_NEXT, 4096, 2) == 32 * 2**20


def test_a_teraflop_in_two_milliseconds_is_500_a_second() -> None:
    assert layers.rate(10**12, [2.0, 2.0, 2.0]) == Spread(500.0, 500.0, 500.0, 3)


# Memory


def test_memory_kept_for_backward_is_counted_once_and_without_what_was_given() -> None:
    x = torch.ones(1000, requires_grad=True)
    assert saved_bytes(lambda: x * x, [x]) == 0
    assert saved_bytes(lambda: x.exp(), [x]) == 4000  # its result
    assert saved_bytes(lambda: (lambda y: y[:10] * y[10:20])(x.exp()), [x]) == 4000  # views of one memory
    assert saved_bytes(lambda: x.exp() * x.cos(), [x]) == 8000
    assert saved_bytes(lambda: x + 1, [x]) == 0


def test_a_form_that_keeps_a_copy_is_seen_to() -> None:
    x = torch.ones(8, 8, requires_grad=True)
    plain = saved_bytes(lambda: x.t() @ x, [x])
    assert saved_bytes(lambda: x.t().contiguous() @ x, [x]) == plain + x.nbytes


def test_nobody_counts_allocations_on_a_cpu() -> None:
    assert allocated_bytes(lambda: torch.ones(5), CPU) is None
    assert kernels.saving((3 * 2**20, None), (2**20, None)) == "2.00 MiB less"
    assert kernels.saving((3 * 2**20, 5 * 2**20), (2**20, 2**20)) == "2.00 MiB less, by the allocator 4.00"


# Answers


LENGTHS = (5, 9, 3)


def plain_conv(x: Inputs) -> Tensors:
    return (functions.causal_conv1d(x.x, x.weight, x.bias, x.lengths),)


def conv_contest(dtype: str = "bf16", **forms: Callable[[Inputs], Tensors]) -> Contest:
    """The convolution of packed sequences before the change, and plain torch in place of the kernel after it."""
    case = ModuleCase(LENGTHS, "causal_conv1d", packed=True, width=6, dtype=dtype, activation="silu", final_state=False)

    def before(x: Inputs) -> Tensors:
        return (torch.cat([kernels.transposed_conv(sequence, x.weight, x.bias) for sequence in x.x.split(x.lengths, 1)], 1),)

    def prepare(x: Inputs) -> Inputs:
        return Inputs(**{**kernels.sliced(x, ("x",), 3), "lengths": sequences(x, "x")})

    return Contest({"before": before, "after": plain_conv, **forms}, case, case, "pointwise", prepare=prepare)


def test_right_forms_agree_with_the_truth() -> None:
    template = "hold at 17 tokens in 3 sequences: {:.2f}, {:.2f} of what rounding allows, {:.2f} apart"
    for dtype in ["fp32", "bf16", "fp16"]:
        agreed = agreement(conv_contest(dtype), CPU)
        assert agreed.broken("before", "after") == [] and 0 < max(agreed.worst.values()) <= 1, dtype
        assert 0 < agreed.apart["before", "after"] == agreed.apart["after", "before"] <= sum(agreed.worst.values()), dtype
        numbers = (agreed.worst["before"], agreed.worst["after"], agreed.apart["before", "after"])
        assert agreed.about("before", "after") == template.format(*numbers), dtype
        assert agreed.about("after") == template.partition("{:.2f}, ")[0] + f"{numbers[1]:.2f} of what rounding allows", dtype


def test_forms_that_are_the_same_are_equal_to_the_bit() -> None:
    contest = conv_contest()
    same = dataclasses.replace(contest, forms=dict.fromkeys(("before", "after"), contest.forms["after"]))
    assert agreement(same, CPU).about("before", "after").endswith(" of what rounding allows, equal to the bit")


def mixes_sequences(x: Inputs) -> Tensors:
    return (kernels.transposed_conv(x.x, x.weight, x.bias),)


def leaves_the_end_unwritten(x: Inputs) -> Tensors:
    y = functions.causal_conv1d(x.x, x.weight, x.bias, x.lengths)
    return (torch.cat([y[:, :-1], torch.empty_like(y[:, -1:])], 1),)


def forgets_a_gradient(x: Inputs) -> Tensors:
    wrong = 0.0 * x.weight.sum()  # there is a gradient, and it is nothing
    return (functions.causal_conv1d(x.x, x.weight.detach(), x.bias, x.lengths) + wrong,)


def doubles_a_gradient(x: Inputs) -> Tensors:
    twice = x.x + (x.x - x.x.detach())
    return (functions.causal_conv1d(twice, x.weight, x.bias, x.lengths),)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (mixes_sequences, "y is off by more than rounding explains"),
        (leaves_the_end_unwritten, "y is not finite"),
        (forgets_a_gradient, "dweight is off by more than rounding explains"),
        (doubles_a_gradient, "dx is off by more than rounding explains"),
    ],
)
def test_a_wrong_form_is_named_as_disagreeing(form: Callable[[Inputs], Tensors], message: str) -> None:
    contest = conv_contest(planted=form)
    agreed = agreement(contest, CPU)
    assert agreed.broken("before", "planted") == ["planted"]
    assert agreed.about("before", "planted").startswith(f"BROKEN at 17 tokens in 3 sequences: planted: {message}")
    assert agreed.apart["before", "planted"] > 1
    rows = [
        *kernels.rows_of(1, "conv", contest, time_forms(contest, HostClock(), LEAST_EFFORT, CPU), agreed, ("before", "planted"))
    ]
    assert [row.what for row in rows] == ["conv, forward", "conv, backward"]
    assert all(row.broken and row.measured for row in rows) and command.exit_code(rows) == command.BROKEN
    right = kernels.rows_of(1, "conv", contest, time_forms(contest, HostClock(), LEAST_EFFORT, CPU), agreed, ("before", "after"))
    assert not any(row.broken for row in right)


def test_a_case_without_rows_settles_nothing() -> None:
    contest = conv_contest()
    empty = dataclasses.replace(contest.judged, lengths=(0,))
    with pytest.raises(ValueError, match="judged must be a case with rows to compare"):
        agreement(dataclasses.replace(contest, judged=empty, backward=False, forms={"as it is": lambda x: (x.x,)}), CPU)


def test_every_form_is_timed_both_ways_as_often() -> None:
    times = time_forms(conv_contest(), HostClock(), Effort(budget_s=0.0, least=3, most=9, warm=1), CPU)
    for took in (times.ahead, times.back):
        assert {name: len(samples) for name, samples in took.items()} == {"before": 3, "after": 3}
        assert all(ms > 0 for samples in took.values() for ms in samples)
    assert times.first_ahead_s.keys() == times.first_back_s.keys() == {"before", "after"}


def test_without_backward_nothing_is_differentiated() -> None:
    grad: list[bool] = []

    def form(x: Inputs) -> Tensors:
        grad.append(torch.is_grad_enabled() or x.x.requires_grad)
        return plain_conv(x)

    contest = dataclasses.replace(conv_contest(after=form), backward=False)
    times = time_forms(contest, HostClock(), LEAST_EFFORT, CPU)
    assert times.back == {} and not any(grad)
    agreed = agreement(contest, CPU)
    assert agreed.broken(*contest.forms) == []
    (row,) = kernels.rows_of(5, "conv", contest, times, agreed, ("before", "after"))
    assert row.what == "conv"


def test_slices_of_a_projection_have_its_strides_and_the_same_numbers() -> None:
    case = kernels.rule_case(setting(), [4])
    plain, cut = case.inputs(), kernels.sliced(case.inputs(), ("q", "k", "v"), 5)
    width = sum(plain[name][0, 0].numel() for name in ("q", "k", "v")) + 5
    for name in ("q", "k", "v"):
        assert torch.equal(plain[name], cut[name]) and cut[name].stride(1) == width
    assert cut.g is not None and torch.equal(cut.g, plain.g)


def test_of_a_repeated_head_only_the_first_copy_has_a_cotangent() -> None:
    contest = kernels.norms_contest(setting(), repeated=True)
    x = ready(contest, contest.judged, CPU)
    q, k = contest.split(x.cotangents)
    heads, group = TINY.layer.heads, TINY.layer.value_heads // TINY.layer.heads
    assert q.shape[2] == k.shape[2] == TINY.layer.value_heads
    assert torch.equal(contest.join((q, k))[0], x.cotangents[0])
    assert not q.unflatten(2, (heads, group))[:, :, :, 1:].any()


def test_sizes_are_said_in_words() -> None:
    assert size_of(kernels.rule_case(setting(), [4096])) == "4,096 tokens"
    assert size_of(kernels.rule_case(setting(), [1] * 64)) == "64 x 1 token"
    assert size_of(ModuleCase((3, 4), "causal_conv1d", packed=True)) == "7 tokens in 2 sequences"


# The exchange


LOAD = exchange.Load((24, 8, 0, 16), (4, 4, 8, 8, 4, 4), (8,))


def tokens_as_they_came(comm: Comm, load: exchange.Load, device: torch.device) -> exchange.Move:
    """Tokens stay in the order of ranks, both ways: the round trip would not show it."""
    right = exchange.with_maps_kept(comm, load, device)
    order = exchange.token_map(load.lengths, comm.size)

    def move(x: Tensor, y: Tensor) -> exchange.Moved:
        there, _ = right(x, y)
        _, back = right(x, permuted(y, order, 0))
        return permuted(there, order[::-1], 0), back

    return move


def features_side_by_side(comm: Comm, load: exchange.Load, device: torch.device) -> exchange.Move:
    """Features are cut in contiguous slices, whatever their sections."""
    right = exchange.with_maps_kept(comm, load, device)
    order = feature_map(load.sections, comm.size)[::-1]
    return lambda x, y: right(permuted(x, order, -1), y)


def loses_the_way_back(comm: Comm, load: exchange.Load, device: torch.device) -> exchange.Move:
    """Right forward; backward adds what it should move."""
    right = exchange.with_maps_kept(comm, load, device)
    return lambda x, y: right(x + (x - x.detach()), y)


def returns_what_it_sent(comm: Comm, load: exchange.Load, device: torch.device) -> exchange.Move:
    """Right forward; backward returns what the forward got."""
    right = exchange.with_maps_kept(comm, load, device)

    def move(x: Tensor, y: Tensor) -> exchange.Moved:
        there, back = right(x.detach(), y)
        return GradientOfTheForward._Exchange.apply(x, there), back

    return move


@settings(max_examples=8)
@given(
    cp=st.sampled_from([2, 3]),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    sections=st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_every_form_of_the_exchange_moves_everything_where_it_belongs(cp: int, lengths: list[int], sections: list[int]) -> None:
    load = exchange.Load(tuple(2 * cp * length for length in lengths), tuple(cp * section for section in sections), (cp,))

    def work(place: Place) -> dict[str, list[str]]:
        forms = exchange.movers(place.cp, load, CPU)
        return {name: exchange.misplaced(move, load, cp, place.cp.rank, CPU) for name, move in forms.items()}

    for found in simulate(1, cp, work):
        assert found == {"per sequence": [], "fused": [], "fused, maps kept": []}


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        (tokens_as_they_came, [*exchange.WAYS]),
        (features_side_by_side, ["to heads", "to heads, backward"]),
        (loses_the_way_back, ["to heads, backward"]),
        (returns_what_it_sent, ["to heads, backward"]),
    ],
)
def test_a_wrong_exchange_is_reported_by_the_ways_that_are_wrong(planted: Callable[..., exchange.Move], wrong: list[str]) -> None:
    def work(place: Place) -> list[str]:
        return exchange.misplaced(planted(place.cp, LOAD, CPU), LOAD, 2, place.cp.rank, CPU)

    assert simulate(1, 2, work) == [wrong, wrong]


SAID: dict[str, Any] = {
    "ahead": {"per sequence": [8.0, 9.0], "fused": [4.0, 3.0]},
    "back": {"per sequence": [6.0, 6.0], "fused": [3.0, 2.0]},
    "first_ahead_s": {"per sequence": 1.0, "fused": 2.0},
    "first_back_s": {"per sequence": 3.0, "fused": 4.0},
    "misplaced": {"per sequence": [], "fused": []},
}


def test_rows_of_ranks_are_the_slowest_ones_turn_by_turn() -> None:
    ahead, back = exchange.rows_of_ranks("all-to-all", "16 tokens", SAID)
    assert (ahead.what, back.what) == ("all-to-all: fused, forward", "all-to-all: fused, backward")
    assert ahead.ratio == Spread.of([2.0, 3.0]) and back.ratio == Spread.of([2.0, 3.0])
    assert ahead.before is not None and ahead.before.median == 8.5 and ahead.first_s == (1.0, 2.0) and back.first_s == (3.0, 4.0)
    assert not ahead.broken and ahead.answers == "equal to the bit"
    wrong = {**SAID, "misplaced": {"per sequence": [], "fused": ["to tokens"]}}
    rows = [*exchange.rows_of_ranks("all-to-all", "16 tokens", wrong)]
    assert [row.answers for row in rows] == ["BROKEN: fused misplaces to tokens"] * 2
    assert command.exit_code(rows) == command.BROKEN


def test_a_rank_that_cannot_answer_says_why() -> None:
    question = {"lengths": [3], "sections": [2], "back": [2], "effort": dataclasses.asdict(LEAST_EFFORT)}
    assert exchange.answer(question)["error"].startswith("ValueError: Default process group")


class Answers:
    """A group of ranks with a fixed answer, or a lost one."""

    deadline_s = 1.0

    def __init__(self, answer: dict[str, Any] | WorkerLost) -> None:
        self.answer = answer
        self.question: dict[str, Any] = {}

    def ask(self, question: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        self.question = question
        if isinstance(self.answer, WorkerLost):
            raise self.answer
        return self.answer

    def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"error": "rank 1: RuntimeError: no such tile"}, "rank 1: RuntimeError: no such tile"),
        (WorkerLost("hung", "rank 1 hung", ""), "hung: rank 1 hung"),
    ],
)
def test_ranks_that_fail_are_a_row_with_their_reason(answer: dict[str, Any] | WorkerLost, reason: str) -> None:
    (row,) = exchange.packed(setting(), Answers(answer), 2, 4)
    assert row.reason == reason and not row.lacking and row.size == "32 tokens in 4 sequences"
    assert command.exit_code([GOOD, row]) == command.UNDECIDED


def test_ranks_get_lengths_that_they_can_share() -> None:
    group = Answers(SAID)
    assert len([*exchange.packed(setting(), group, 2, 4)]) == 2
    assert sum(group.question["lengths"]) == TINY.moved and len(group.question["lengths"]) == 4
    assert not any(length % 4 for length in group.question["lengths"])
    assert group.question["sections"] == tuple(TINY.layer.sections.values()) and group.question["back"] == (
        TINY.layer.sections["v"],
    )


@pytest.mark.parametrize(("there", "words"), [(1, "there is 1"), (3, "there are 3")])
def test_ranks_without_gpus_are_no_failure_and_no_measurement(monkeypatch: pytest.MonkeyPatch, there: int, words: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    sizes = dataclasses.replace(TINY, ranks=(4, 8))
    rows = [*exchange.exchanged(setting(sizes=sizes, device=torch.device("cuda", 0)))]
    assert [row.reason for row in rows] == [f"it needs {size} GPUs, {words}" for size in (4, 8)]
    assert command.exit_code(rows) == command.UNDECIDED
    assert command.exit_code([*rows, Row(1, "conv", before=Spread.of([1.0]))]) == command.HOLDS


# The table


def test_numbers_have_three_digits_and_no_exponent() -> None:
    shown = {12345.6: "12,346", 123.4: "123", 12.34: "12.3", 1.234: "1.23", 0.1234: "0.123", 0.01234: "0.0123", 0.0: "0.000"}
    assert {value: number(value) for value in shown} == shown
    assert number(math.inf) == "inf"
    assert spread_text(Spread(1.5, 1.25, 1.75, 10), "ms") == "1.50 ms (1.25 to 1.75)"
    assert spread_text(Spread(32.0, 32.0, 32.0, 1), "MiB") == "32.0 MiB"
    assert spread_text(None) == ""


ROWS = [
    Row(
        1,
        "conv1d on [b, s, d] | forward",
        "17 tokens",
        before=Spread(1.5, 1.25, 1.75, 12),
        after=Spread(0.5, 0.25, 0.75, 12),
        ratio=Spread(3.0, 2.5, 3.5, 12),
        claimed="1.20",
        answers="hold",
        first_s=(0.5, 12.0),
        note="so it is",
    ),
    Row(4, "all-to-all", claimed="7%", reason="it needs 4 GPUs, there is 1", lacking=True),
]


def test_a_row_is_said_in_the_order_of_the_head() -> None:
    assert dict(zip(HEAD, ROWS[0].cells(), strict=True)) == {
        "claim": "1",
        "what": "conv1d on [b, s, d] | forward",
        "size": "17 tokens",
        "before": "1.50 ms (1.25 to 1.75)",
        "after": "0.500 ms (0.250 to 0.750)",
        "before / after": "3.00 (2.50 to 3.50)",
        "claimed": "1.20",
        "answers": "hold; so it is",
        "first call, s": "0.500 + 12.0",
    }
    assert ROWS[1].cells()[7] == "not measured: it needs 4 GPUs, there is 1" and len(ROWS[1].cells()) == len(HEAD)


def test_markdown_has_a_line_a_row_and_as_many_cells() -> None:
    lines = markdown(ROWS).splitlines()
    assert len(lines) == 2 + len(ROWS) and "conv1d on [b, s, d] \\| forward" in lines[2]
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(HEAD) + 1}


def test_the_table_shows_brackets_as_they_are() -> None:
    from rich.console import Console

    console = Console(width=250, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(table(ROWS))
    shown = console.export_text()
    assert "conv1d on [b, s, d] | forward" in shown and "3.00 (2.50 to 3.50)" in shown
    console.file.close()


def test_how_often_was_measured_is_said_where_it_was() -> None:
    assert "of 12 rounds" in rounds_of(ROWS)
    assert "of 12 to 30 rounds" in rounds_of([*ROWS, Row(2, "norm", before=Spread(1.0, 0.5, 2.0, 30))])
    assert rounds_of([ROWS[1], Row(3, "memory", before=Spread.of([5.0]))]) == ""


def test_rows_are_plain_data() -> None:
    data = json.loads(json.dumps([row.to_json() for row in ROWS]))
    assert [row["measured"] for row in data] == [True, False]
    assert data[0]["before"] == {"median": 1.5, "low": 1.25, "high": 1.75, "count": 12}
    assert data[1]["reason"] == "it needs 4 GPUs, there is 1" and data[1]["lacking"]


# The verb


GOOD = Row(1, "conv", before=Spread.of([1.0]))


def test_the_exit_code_is_that_of_the_worst_row() -> None:
    rows = [
        ([GOOD], command.HOLDS),
        ([GOOD, ROWS[1]], command.HOLDS),
        ([GOOD, Row(2, "norm", reason="out of memory")], command.UNDECIDED),
        ([ROWS[1]], command.UNDECIDED),
        ([], command.UNDECIDED),
        ([GOOD, Row(2, "norm", reason="out of memory"), dataclasses.replace(GOOD, broken=True)], command.BROKEN),
    ]
    assert different(command.exit_code, rows) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no such tile\nand more"), "RuntimeError: no such tile"),
        (torch.OutOfMemoryError("tried to allocate much"), "out of memory"),
        (MemoryError(), "out of memory"),
    ],
)
def test_a_part_that_fails_is_a_row_with_its_reason_after_those_it_had(error: Exception, reason: str) -> None:
    lines: list[str] = []

    def part(setting: Setting) -> Iterator[Row]:
        yield GOOD
        raise error

    rows = command.attempted(2, "norms", part, setting(tell=lines.append))
    assert rows == [GOOD, Row(2, "norms", reason=reason)]
    assert lines == [f"claim 2: norms: {reason}"]


def options(*words: str) -> argparse.Namespace:
    return parser().parse_args(["claims", *words])


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.act(options("--claim", "1")) == 3
    assert capsys.readouterr() == ("", MESSAGE)


def test_a_failing_claim_does_not_stop_the_next_and_every_part_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[int] = []
    place = tmp_path / "claims.json"

    def fails(setting: Setting) -> Iterator[Row]:
        raise RuntimeError("no such tile")

    def counts(setting: Setting) -> Iterator[Row]:
        written.append(len(json.loads(place.read_text())["rows"]))
        yield GOOD

    monkeypatch.setattr(command, "PARTS", {1: (("one", fails), ("two", counts)), 2: (("three", counts),)})
    monkeypatch.setattr(command, "_prepare_kernels", lambda *_, **__: None)
    assert command.act(options("--device", "cpu", "--json", str(place), "--markdown")) == command.UNDECIDED
    assert written == [1, 2]
    out, err = capsys.readouterr()
    assert "| 1 | one |" in out and "not measured: RuntimeError: no such tile" in out and "these times do not hold for a GPU" in out
    assert "claim 2: three" in err
    data = json.loads(place.read_text())
    assert [row["reason"] for row in data["rows"]] == ["RuntimeError: no such tile", "", ""] and not data["interrupted"]


def test_an_interrupted_run_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "claims.json"

    def measures(setting: Setting) -> Iterator[Row]:
        yield GOOD

    def interrupted(setting: Setting) -> Iterator[Row]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "PARTS", {1: (("one", measures),), 2: (("two", interrupted),)})
    monkeypatch.setattr(command, "_prepare_kernels", lambda *_, **__: None)
    assert command.act(options("--device", "cpu", "--json", str(place))) == command.INTERRUPTED
    assert "interrupted: not every claim was measured" in capsys.readouterr().out
    data = json.loads(place.read_text())
    assert data["interrupted"] and len(data["rows"]) == 1


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=rf"--json must name a file that can be written, got '{tmp_path}': "):
        command.act(options("--device", "cpu", "--json", str(tmp_path)))


def test_a_file_that_cannot_be_written_in_the_end_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PARTS", {1: (("one", lambda setting: iter([GOOD])),)})
    monkeypatch.setattr(command, "_prepare_kernels", lambda *_, **__: None)
    assert command.act(options("--device", "cpu")) == command.HOLDS
    assert command.act(options("--device", "cpu", "--json", "/dev/full")) == command.UNDECIDED
    assert "gdn-verify: cannot write to /dev/full: No space left on device\n" in capsys.readouterr().err


def test_a_claim_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--claim", "7")
    assert "invalid choice" in capsys.readouterr().err


# All of it, with the kernels interpreted and two ranks over gloo


RANKS = 4  # the claim about ranks. They are forked for this process: a worker would have to start fork servers for them


@pytest.fixture(scope="module")
def measurement(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("claims") / "claims.json"
    found = answered(__name__, claims=[claim for claim in command.PARTS if claim != RANKS], place=str(place))
    with pytest.MonkeyPatch.context() as here:
        here.setattr(command, "_prepare_kernels", lambda *_, **__: None)  # no kernel is interpreted in this process
        moved = acted([RANKS], str(place))
    assert (found["code"], moved["code"]) == (command.HOLDS, command.HOLDS), found["said"] + moved["said"]
    return {"rows": found["rows"] + moved["rows"], "said": found["said"] + moved["said"], "faults": found["faults"]}


def acted(claims: Sequence[int], place: str) -> dict[str, Any]:
    """The exit code of the verb, what it printed and what it wrote."""
    chosen = [word for claim in claims for word in ("--claim", str(claim))]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = command.act(options("--device", "cpu", "--json", place, "--markdown", *chosen))
    return {"code": code, "said": out.getvalue(), **json.loads(pathlib.Path(place).read_text())}


def test_every_claim_is_measured_and_its_forms_agree(measurement: dict[str, Any]) -> None:
    rows = [row for row in measurement["rows"] if not row["lacking"]]  # SGLang's kernels have tests of their own
    assert {row["claim"] for row in rows} == set(command.PARTS)
    assert [row["what"] for row in rows if not row["measured"] or row["broken"]] == []
    assert all(row["answers"].startswith(("hold at", "equal to the bit")) for row in rows if row["unit"] != "MiB")
    assert all(row["what"] in measurement["said"] for row in rows)


def test_the_norm_in_the_kernel_saves_what_is_predicted_of_one_norm_and_nothing_of_two(measurement: dict[str, Any]) -> None:
    promised = kernels.predicted_bytes(TINY.layer, TINY.tokens, 2) / 2**20
    one, two = ([row[form]["median"] for form in ("before", "after")] for row in measurement["rows"] if row["unit"] == "MiB")
    assert one[0] - one[1] == promised
    assert two[0] - two[1] == 0


def test_decoding_is_measured_for_each_block_at_each_number_of_requests(measurement: dict[str, Any]) -> None:
    sizes = {(row["what"], row["size"]) for row in measurement["rows"] if row["claim"] == 5 and not row["lacking"]}
    assert sizes == {
        (f"recurrent kernel, BV {block} for 8", f"{count} x 1 token") for block in (16, 32, 64) for count in TINY.requests
    }


def test_kernels_that_are_wrong_are_named(measurement: dict[str, Any]) -> None:
    assert measurement["faults"]["decode"] == {
        "right": [],
        "blocks left out": ["o", "final_state"],
        "another head": ["o", "final_state"],
    }
    assert measurement["faults"]["norms"] == {"right": [], "one norm over both": ["y", "dx"]}


def test_tuning_is_limited_to_configurations_of_the_list(measurement: dict[str, Any]) -> None:
    tuned = measurement["faults"]["tuned"]
    assert tuned and all(0 < after <= min(before, 3) and subset for before, after, subset in tuned)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    return {**acted(question["claims"], question["place"]), "faults": faults()}


def faults() -> dict[str, Any]:
    """What is found about kernels that are wrong, and what a limit leaves to each tuner."""
    here = setting()
    right = decode.recurrent(8)

    def left_out(x: Inputs) -> Tensors:
        """As with a grid that is too small: what the last requests wait for is never written."""
        o, final_state = right(x)
        half = len(o) // 2
        return torch.cat([o[:half], torch.empty_like(o[half:])]), torch.cat(
            [final_state[:half], torch.empty_like(final_state[half:])]
        )

    def another_head(x: Inputs) -> Tensors:
        return right(x.replaced(v=x.v.flip(2)))

    decoding = decode.decode_contest(here, 2)
    forms = {"right": right, "blocks left out": left_out, "another head": another_head}
    contests = {"decode": dataclasses.replace(decoding, forms=forms)}

    def over_both(x: Inputs) -> Tensors:
        q, k = x.x.chunk(2, 2)
        both = kernels.l2norm(torch.cat([q, k], -1))
        return both.chunk(2, -1)

    norming = kernels.norms_contest(here, repeated=False)
    contests["norms"] = dataclasses.replace(norming, forms={"right": norming.forms["one norm"], "one norm over both": over_both})
    found: dict[str, Any] = {
        name: {form: [finding.output for finding in findings] for form, findings in agreement(contest, CPU).findings.items()}
        for name, contest in contests.items()
    }
    return {**found, "tuned": tuned()}


def tuned() -> list[tuple[int, int, bool]]:
    """Of each tuner, how many configurations it has before and after a limit, and whether all that are left were there."""
    import gc

    from triton.runtime.autotuner import Autotuner

    tuners = [tuner for tuner in gc.get_objects() if issubclass(type(tuner), Autotuner)]
    before = [[*tuner.configs] for tuner in tuners]
    command.limit_tuning(3)
    return [
        (len(were), len(tuner.configs), all(any(one is other for other in were) for one in tuner.configs))
        for tuner, were in zip(tuners, before, strict=True)
    ]
