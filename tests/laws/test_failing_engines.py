"""Engines whose calls fail for lack of memory: what a failure leaves behind, and calls that are made again."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from properties.seeds import further_apart
from properties.traces.case import Batch, Sizes
from properties.traces.failing import CALLS
from properties.traces.laws import TRACE_LAWS
from tests.drawn import verdicts_of
from verify.adapters.base import Engine
from verify.adapters.gdn.pool import Progress
from verify.bench.failing import Counts, FailingOperation
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.process.outcome import Outcome, Verdict
from verify.zoo import wrong_histories

HERE = "tests/laws/test_failing_engines.py"
# Each wrong engine, and the variant of the law `history` that alone shows it.
SHOWN_BY = {
    "StepsBeforeTheyAreFull": "failed",
    "WritesRowByRow": "retried",
    "AdmissionsThatFailKeepTheirSlot": "retried",
    "SwapGivesTheSlotFirst": "retried",
}


def outcome_of(line: str) -> Outcome:
    return execute(Run.parse(line))


@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_failure_alone_shows_the_wrong_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, case = SHOWN_BY[name], "trace=p:a9,b1/d:a,b/v2:a1,b2/k:c<a/w:a/t:b/r:a/p:b3,a9 slots=4"
    for variant in (one for one in TRACE_LAWS["history"].variants if one not in (shown, "retried")):
        assert outcome_of(f"law=history variant={variant} adapter=zoo/{name} op=serving {case}").verdict is Verdict.HOLDS
    for law in ("session", "ledger", "slots", "renamed", "alone"):
        assert outcome_of(f"law={law} adapter=zoo/{name} op=serving {case}").verdict is Verdict.HOLDS
    monkeypatch.setattr(wrong_histories.StepsBeforeTheyAreFull, "seen", {})  # as in a fresh process
    assert outcome_of(f"law=history variant={shown} adapter=zoo/{name} op=serving {case}").verdict is Verdict.BROKEN


class AnswersByOtherMeans(wrong_histories.ServesAgain):
    """Right: a prefill for which memory runs out is computed again."""

    def prefill(self, batch: Batch) -> Tensor:
        with contextlib.suppress(torch.OutOfMemoryError):
            return super().prefill(batch)
        return super().prefill(batch)


RIGHT = ("zoo/ServesAgain", "gdn/pool", f"{HERE}:AnswersByOtherMeans")


@pytest.mark.parametrize("spec", RIGHT)
@pytest.mark.slow_after_first
def test_engines_that_write_when_all_is_computed_may_be_called_again(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = dataclasses.replace(adapter_of(spec).domain, retries=True)
    verdicts = verdicts_of(adapter_of(spec), "history", domain, 6, monkeypatch, lambda example: example.variant == "retried", 0)
    assert set(verdicts) == {Verdict.HOLDS}


class OutputsBehindTheWrites(wrong_histories.ServesAgain):
    """Rows are written before there is memory for their outputs, which is the last that a call gets."""

    def decode(self, batch: Batch) -> Tensor:
        rows = self.rows(batch)
        self.write(rows, batch.lengths)
        return self.outputs(rows)


class WindowsBeforeTheOutputs(wrong_histories.ServesAgain):
    """Windows are written before there is memory for the outputs."""

    def rows(self, batch: Batch) -> list[Progress]:
        rows = super().rows(batch)
        for row, length in zip(rows, batch.lengths, strict=True):
            if not self.padding(row.slot):
                self.windows[row.slot] = row.line[:, length : length + self.sizes.width - 1]
        return rows


class FreesFirst(wrong_histories.ServesAgain):
    """A request that is freed loses its slot before the zeros for it are there."""

    def free(self, request: str) -> None:
        slot = self.owned.pop(request)
        self.states[slot] = torch.zeros_like(self.states[slot])
        self.owned[request] = slot
        super().free(request)


LEFT_BEHIND = {
    f"{HERE}:WindowsBeforeTheOutputs": ("a window has changed", "that of request a in prefill"),
    f"{HERE}:FreesFirst": ("an owner has lost its slot", "request a in free"),
    "tests/wrong_uses.py:SlotsOfSnapshotsFirst": ("an owner has got a slot", "request a's snapshot in prefill"),
    "zoo/WritesRowByRow": ("a state has changed", "that of request a in prefill"),
}


@pytest.mark.parametrize("spec", LEFT_BEHIND)
def test_what_a_call_that_failed_has_left_behind_is_named(spec: str) -> None:
    outcome = outcome_of(f"law=history variant=retried adapter={spec} op=serving trace=p:a64,b1/f:a slots=4 snapshots=64")
    (finding,) = outcome.findings
    assert finding.what == "{} in a call that failed for lack of memory: {}".format(*LEFT_BEHIND[spec])


def test_the_last_operation_of_a_call_fails_too() -> None:
    for seed in range(4):
        line = f"law=history variant=retried adapter={HERE}:OutputsBehindTheWrites op=serving trace=p:a3/d:a seed={seed}"
        assert outcome_of(line).verdict is Verdict.BROKEN, line


class Told(wrong_histories.ServesAgain):
    """The right engine, which notes the calls that raise."""

    raised: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("open", *CALLS):
            return found

        def told_of(*args: Any, **options: Any) -> Any:
            try:
                return found(*args, **options)
            except torch.OutOfMemoryError:
                self.raised.append(name)
                raise

        return told_of


def test_every_call_of_an_engine_fails_that_gets_memory() -> None:
    trace = "op=serving trace=p:a9,b3/d:a,b/v2:a1,b2/k:c<a/w:a/t:b/r:a/p:b1,a3 slots=4"
    assert outcome_of(f"law=history variant=retried adapter={HERE}:Told {trace}").verdict is Verdict.HOLDS
    raised = adapter_of(f"{HERE}:Told").raised  # of the module that was loaded from this file
    told_of = collections.Counter(raised)
    assert {*told_of} == {"admit", "prefill", "decode", "verify", "fork", "swap", "transfer"}, "a commit only writes"
    assert told_of["prefill"] >= 4, "two prefills fail several times"
    raised.clear()
    assert outcome_of(f"law=history variant=failed adapter={HERE}:Told {trace}").verdict is Verdict.HOLDS
    assert {*raised} >= {"open", "admit", "prefill", "decode", "verify", "fork", "swap", "transfer"}


def test_what_writes_to_a_tensor_that_is_there_gets_no_memory() -> None:
    x, y = torch.zeros(2, 3), torch.ones(3)

    def counted(call: Callable[[], object]) -> list[str]:
        found = list[str]()
        for counts in get_args(Counts):
            with contextlib.suppress(torch.OutOfMemoryError), FailingOperation(1, counts) as fault:
                call()
            found += [counts] * fault.failed
        return found

    calls: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: x[0].copy_(y), ["all"]),
        (lambda: x.__setitem__(0, 0), ["all"]),
        (lambda: torch.add(y, y, out=y), ["all"]),
        (lambda: float(y[0]), ["all"]),
        (lambda: y + y, ["all", "allocations"]),
        (lambda: y.clone(), ["all", "allocations"]),
        (lambda: y.bfloat16(), ["all", "allocations"]),
        (lambda: torch.empty(2), ["all", "allocations", "made"]),
        (lambda: torch.zeros_like(y), ["all", "allocations", "made"]),
        (lambda: y.new_empty(3), ["all", "allocations", "made"]),
        (lambda: torch.empty_strided((2, 3), (1, 2)), ["all", "allocations", "made"]),
        (lambda: x.mT[0], []),  # a view
    ]
    for number, (call, counts) in enumerate(calls):
        assert counted(call) == counts, number


class ElsewhereInMemory(wrong_histories.ServesAgain):
    """An engine that computes where no mode of torch sees an operation, as one in another language does."""

    def open(self, sizes: Sizes) -> Engine:
        with _disable_current_modes():
            return super().open(sizes)

    def admit(self, requests: Sequence[str]) -> None:
        with _disable_current_modes():
            super().admit(requests)

    def prefill(self, batch: Batch) -> Tensor:
        with _disable_current_modes():
            return super().prefill(batch)


@pytest.mark.parametrize("variant", ["failed", "retried"])
def test_a_trace_in_which_nothing_fails_is_blind(variant: str) -> None:
    outcome = outcome_of(f"law=history variant={variant} adapter={HERE}:ElsewhereInMemory op=serving trace=p:a1")
    assert (outcome.verdict, outcome.reason) == (Verdict.BLIND, "no operation of torch failed")


def test_numbers_of_operations_lie_close_at_first_and_then_further_apart() -> None:
    for seed in range(20):
        numbers = further_apart(seed, 12)
        assert numbers[:2] == [1, 2]
        assert all(one < two <= 2 * one for one, two in itertools.pairwise(numbers))
        assert 63 <= numbers[-1] < 85
    assert len({tuple(further_apart(seed, 12)) for seed in range(20)}) > 15
