"""Promises to the bit: judged exactly where a domain makes them, and named where a kernel keeps them without one."""

import dataclasses
import pathlib
from typing import Any

import pytest

from properties.books import book_of
from properties.laws.promises import PROMISES
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.palette import sample
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.example import Example
from tests import right, right_words
from tests.together import for_each
from verify.bench.adapter_bench import UNLIKE
from verify.engine.check import Check
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings import report as text
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.process.worker import Worker

WRONG = {
    "split_invariant": right_words.FlipsLongCalls,
    "packed_equals_dense": right_words.FlipsPacked,
    "absent_state_equals_zeros": right_words.FlipsStates,
    "decode_equals_prefill": right_words.FlipsSteps,
}


def outcomes(
    adapter: Any, law: str, domain: Any, count: int, patch: pytest.MonkeyPatch, variant: str | None = None
) -> list[Outcome]:
    """The outcomes of small cases of a law."""
    adapter.domain = domain
    patch.setitem(judging._LOADED, "it", adapter)
    drawn = book_of(domain).laws[law].draw(domain).filter(lambda x: x.case.tokens <= 60 and variant in (None, x.variant))
    return [execute(Run(law, "it", example)) for example in sample(drawn, 4, count)]


@for_each("promise", PROMISES)
def test_a_promise_that_is_kept_holds(promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for backward in (False, True):
        domain = dataclasses.replace(right_words.Exact.domain, backward=backward)
        found = outcomes(right_words.Exact(), PROMISES[promise], domain, 3, monkeypatch)
        assert {outcome.verdict for outcome in found} <= {Verdict.HOLDS, Verdict.BLIND}, found
        assert not any(outcome.kept for outcome in found), "what is promised is judged"


@for_each("promise", PROMISES)
def test_a_promise_that_is_not_kept_is_broken_in_its_law_alone(promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law, wrong = PROMISES[promise], WRONG[promise]
    variant = "state" if law == "absent" else None
    broken = [x for x in outcomes(wrong(), law, wrong.domain, 12, monkeypatch, variant) if x.verdict is Verdict.BROKEN]
    assert broken
    assert {finding.kind for outcome in broken for finding in outcome.findings} == {FailureKind.DIFFERS}
    without = dataclasses.replace(wrong.domain, **{promise: False})
    found = outcomes(wrong(), law, without, 12, monkeypatch, variant)
    assert {outcome.verdict for outcome in found} <= {Verdict.HOLDS, Verdict.BLIND}
    assert False in {outcome.kept.get(promise) for outcome in found}


@pytest.mark.parametrize(
    ("kind", "law", "verdict"),
    [
        (right_words.ExactConv, "packed", Verdict.HOLDS),
        (right_words.ExactConv, "absent", Verdict.HOLDS),
        (right_words.ConvSplits, "cut", Verdict.BROKEN),
        (right_words.LayerSplits, "cache", Verdict.BROKEN),
    ],
)
@pytest.mark.slow_after_first
def test_promises_of_modules_and_layers(kind: Any, law: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {outcome.verdict for outcome in outcomes(kind(), law, kind.domain, 12, monkeypatch)} - {Verdict.BLIND}
    assert verdict in found
    assert found <= {verdict, Verdict.HOLDS}


def test_what_is_kept_without_a_promise_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    UNLIKE.clear()
    for promise, law in PROMISES.items():
        variant = "state" if law == "absent" else None
        found = outcomes(right.Recurrent(), law, right.Recurrent.domain, 3, monkeypatch, variant)
        assert {outcome.kept.get(promise) for outcome in found if outcome.verdict is Verdict.HOLDS} == {True}
    assert not any(UNLIKE.values())


def test_after_a_difference_no_further_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    class Counts(right.Chunkwise):
        def run(self, x: Any) -> Any:
            calls.append(x.v.shape[1])
            return super().run(x)

    monkeypatch.setitem(judging._LOADED, "it", Counts())
    run = Run("cut", "it", Example(Case((20,), state="random", backward=False), 7))
    found = [execute(run) for _ in range(2)]
    assert [outcome.kept for outcome in found] == [{"split_invariant": False}] * 2
    assert calls == [7, 13, 20, 7, 13]


def test_a_further_call_that_fails_is_a_difference_and_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judging._LOADED, "it", right_words.FailsWhole())
    outcome = execute(Run("cut", "it", Example(Case((12,), state="random", backward=False), 6)))
    assert outcome.verdict is Verdict.HOLDS
    assert outcome.kept == {"split_invariant": False}


def test_the_report_names_what_every_case_of_a_law_kept() -> None:
    def reported(law: str, verdict: Verdict, **fields: Any) -> LawReport:
        return LawReport(law, "it", verdict, **fields)

    kept = reported("cut", Verdict.HOLDS, kept={"split_invariant": 8})
    rarely = reported("absent", Verdict.HOLDS, kept={"absent_state_equals_zeros": 4})
    mostly = reported("packed", Verdict.HOLDS, kept={"packed_equals_dense": 9}, unkept={"packed_equals_dense": 1})
    broken = reported("recurrent", Verdict.BROKEN, kept={"decode_equals_prefill": 9})
    line = "kept to the bit, though not promised: split_invariant"
    assert text.kept_promises([kept, rarely, mostly, broken]) == [line]
    assert text.kept_promises([rarely, mostly, broken]) == []
    report = reported("cut", Verdict.HOLDS)
    run = Run("cut", "it", Example(Case((3,)), 1))
    for verdict in (Verdict.HOLDS, Verdict.HOLDS, Verdict.BLIND):
        report.count(run, Outcome(verdict, kept={"split_invariant": True}))
    assert report.kept == {"split_invariant": 2}


@pytest.mark.slow
def test_a_check_counts_what_was_kept(worker: Worker, tmp_path: pathlib.Path) -> None:
    settings = Settings("tests/right.py:Recurrent", ["recurrent"], dataclasses.replace(PROFILES["few"], examples=6), 7)
    with Check(settings, [worker], Store(tmp_path / "findings"), defects=[]) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.HOLDS
    assert report.unkept == {}
    assert report.kept["decode_equals_prefill"] == report.counts[Verdict.HOLDS]


@for_each(
    ("kind", "words", "message"),
    [
        (Domain, {"split_invariant": True, "initial_state": False}, "split_invariant must be False with initial_state=False"),
        (Domain, {"decode_equals_prefill": True, "length_step": 64}, "decode_equals_prefill must be False with length_step=64"),
        (Domain, {"decode_equals_prefill": True, "longest": 1}, "decode_equals_prefill must be False with longest=1"),
        (Domain, {"packed_equals_dense": True, "packed": False}, "packed_equals_dense must be False with packed=False"),
        (Domain, {"split_invariant": 1}, "split_invariant must be True or False, got 1"),
        (ModuleDomain, {"operation": "l2norm", "split_invariant": True}, "split_invariant must be False with operation=l2norm"),
        (ModuleDomain, {"packed_equals_dense": True, "batched": False}, "packed_equals_dense must be False with batched=False"),
        (LayerDomain, {"decode_equals_prefill": True, "caches": False}, "decode_equals_prefill must be False with caches=False"),
        (
            PoolDomain,
            {"rule": Domain(split_invariant=True, backward=False)},
            "rule must leave out split_invariant, because no law of pools judges it, got True",
        ),
    ],
)
def test_what_a_domain_cannot_promise(kind: Any, words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**words)
