"""What a check has for every seed: ways to call, limits, and moves of a request that come twice."""

import dataclasses
import itertools
from typing import Any

import pytest

from properties.books import book_of
from properties.laws import other_calls, recompute
from properties.laws.recompute import separations
from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.limits import (
    BEHIND,
    CROWDED,
    MANY_RANKS,
    PADDED,
    SAVING,
    STEP_ROWS,
    alternating,
    block_ends,
    crowded_snapshots,
    crowds,
    forks,
    long_requests,
    long_steps,
    repeats,
)
from properties.words.example import Example
from properties.words.sizes import MOST, sized
from tests import wrong_corners as corners
from tests import wrong_survivors as wrong
from tests.drawn import domain_in_a_check, in_a_check
from tests.together import for_each
from tests.wrong_options import SumNorm
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import FailureKind, Outcome, Verdict

HERE = "tests/wrong_survivors.py"
OTHERS = 3  # examples of the law that are drawn, with which the implementation holds
# The law that shows each of them, and the variant or, for an example that a law always has, "".
SHOWN_BY: dict[type, tuple[str, str]] = {
    wrong.HeadsOf16Bits: ("recall", ""),
    wrong.TokensOf12Bits: ("oracle", ""),
    wrong.TokensOf16Bits: ("recall", ""),
    wrong.RowsOf16Bits: ("oracle", ""),
    wrong.TapsOf16Bits: ("oracle", ""),
    wrong.RequestsUpTo1024: ("oracle", ""),
    wrong.RowsUpTo16: ("session", ""),
    wrong.RowsUpTo64: ("session", ""),
    wrong.SnapshotsByGroup: ("session", ""),
    wrong.TableOfParts: ("session", ""),
    wrong.HostCopyOfTheFirstSwap: ("ledger", ""),
    wrong.DraftsLeaveTheCopy: ("ledger", ""),
    wrong.PromptsLeaveTheCopy: ("ledger", ""),
    wrong.MicrobatchesOf32Rows: ("history", ""),
    wrong.DraftsOfTheLastEngine: ("history", "turns"),
    wrong.SavedStrides: ("recompute", "offloaded"),
    wrong.OffsetsBySum: ("history", "refill"),
    wrong.SavedScale: ("recompute", ""),
    wrong.StatesInTwoBuffers: ("history", ""),
    wrong.BiasWithTheWeight: ("recompute", "frozen"),
    wrong.ForgetsInitialStates: ("recompute", "twice"),
    wrong.TurnsHeadsTheSecondTime: ("recompute", "twice"),
    wrong.GatesOfEightCalls: ("recompute", "between"),
    wrong.LayerOfEightCalls: ("recompute", "between"),
    wrong.OffsetsOfEightPackings: ("recompute", "between"),
    wrong.DraftsAsLongAsTheFirst: ("session", ""),
    wrong.PadsInBf16: ("left_padding", ""),
    wrong.LayerPadsInBf16: ("left_padding", ""),
    corners.HeadsFirstAreDense: ("strides", "heads_first"),
    corners.TokensFirstAreDense: ("strides", "tokens_first"),
    corners.StrideOfOneToken: ("strides", "tokens_first"),
    corners.StrideOfOneHead: ("strides", "heads_first"),
    corners.BetaBesideTheKeys: ("recompute", "frozen"),
    corners.NothingOfFinalStates: ("recompute", "one_output"),
    corners.StatesForGradients: ("recompute", "twice"),
    corners.GatesOf32Calls: ("recompute", "between"),
    corners.SumWithoutItsNorm: ("recompute", "one_output"),
    corners.CotangentsInHalf: ("linear", "small_cotangents"),
    corners.MeanOfManyDecodes: ("oracle", ""),
    corners.LaunchesByTheMean: ("oracle", ""),
    corners.WideBlocksOfFullGrids: ("oracle", ""),
    corners.HeadsOfLongTiles: ("oracle", ""),
    corners.EqualSequencesAsABatch: ("oracle", ""),
    corners.StatesOfKeyHeads: ("oracle", ""),
    corners.PartsOfManyHeads: ("oracle", ""),
    corners.TileOfItsFirstSequence: ("oracle", ""),
    corners.DecodesInGroupsOf16: ("oracle", ""),
    corners.StatesAloneInWhatWasThere: ("recompute", "frozen"),
    corners.ChunksWithALoss: ("recompute", "parts"),
    corners.BeginsAtTheLastLoss: ("recompute", "parts"),
    corners.HeadsWithALoss: ("recompute", "parts"),
    corners.GradientsByAddress: ("recompute", "twice"),
    corners.DecaysByKeys: ("history", "one_input"),
    corners.KdaOfOneDecay: ("strides", "one_channel"),
    corners.IdleChunksDoNotDecay: ("oracle", ""),
    corners.StatesOfTheFirst: ("oracle", ""),
    corners.WindowsOfTheFirst: ("oracle", ""),
    corners.LayerStatesOfTheFirst: ("oracle", ""),
    corners.ProgramsInRounds: ("oracle", ""),
    corners.TreeOfValueHeads: ("oracle", ""),
    corners.DraftsOf64Values: ("session", ""),
    corners.PaddingHasAToken: ("session", ""),
    corners.ForksOfDraftsComeLater: ("session", ""),
}


def spec_of(kind: type) -> str:
    return f"{kind.__module__.replace('.', '/')}.py:{kind.__name__}"


def domain_of(kind: type) -> Any:
    return domain_in_a_check(spec_of(kind))


def outcome_of(kind: type, law: str, example: Example) -> Outcome:
    return execute(Run(law, spec_of(kind), example))


def fixed(kind: type, law: str, variant: str, seed: int) -> list[Example]:
    """The examples of a check that are to show an implementation."""
    domain = domain_of(kind)
    always = [] if variant else list(book_of(domain).laws[law].always(domain))
    return [example for example in in_a_check(law, domain, seed) if example in always or (variant and example.variant == variant)]


@pytest.mark.parametrize("kind", SHOWN_BY, ids=lambda kind: kind.__name__)
@pytest.mark.slow_after_first
def test_a_fixed_place_shows_it_with_every_seed_and_the_right_form_holds(kind: type) -> None:
    law, variant = SHOWN_BY[kind]
    shown: dict[tuple[Example, ...], Example] = {}
    for seed in range(3):
        examples = tuple(fixed(kind, law, variant, seed))
        if examples not in shown:
            shows = (example for example in examples if outcome_of(kind, law, example).verdict is Verdict.BROKEN)
            found = next(shows, None)
            assert found is not None, (seed, examples)
            shown[examples] = found
    right = next(base for base in kind.__mro__ if base is SumNorm or base.__module__.startswith("verify.zoo."))
    for example in {*shown.values()}:
        outcome = execute(Run(law, spec_of(right) if right is SumNorm else f"zoo/{right.__name__}", example))
        assert outcome.verdict is Verdict.HOLDS or "one by one" in outcome.reason, example


# Those that drawn examples may show too: `second` is drawn in float32 with some seeds, and a fork behind a draft in some traces.
DRAWN_TOO = {wrong.SavedScale, corners.ForksOfDraftsComeLater}


@pytest.mark.parametrize("kind", [kind for kind, (_, variant) in SHOWN_BY.items() if not variant and kind not in DRAWN_TOO])
@pytest.mark.slow
def test_examples_that_are_drawn_do_not_show_it(kind: type) -> None:
    law, variant = SHOWN_BY[kind]
    shown = fixed(kind, law, variant, 0)
    others = [example for example in in_a_check(law, domain_of(kind), 0) if example not in shown]
    verdicts = [outcome_of(kind, law, example).verdict for example in others[:OTHERS]]
    assert Verdict.BROKEN not in verdicts


@pytest.mark.parametrize(
    ("kind", "count"), [(wrong.GatesOfEightCalls, 7), (wrong.LayerOfEightCalls, 7), (wrong.OffsetsOfEightPackings, 9)]
)
@pytest.mark.slow
def test_fewer_calls_or_one_packing_would_not_show_it(kind: type, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of eight buffers outlasts seven later calls, and nine calls of one packing share a buffer."""

    def fewer(case: Any, domain: Any, device: str) -> list[Any]:
        later = other_calls.later_cases(case, domain, device, count)
        return [dataclasses.replace(one, lengths=later[0].lengths) for one in later]

    monkeypatch.setattr(recompute, "later_cases", fewer)
    for example in fixed(kind, "recompute", "between", 0):
        assert outcome_of(kind, "recompute", example).verdict is Verdict.HOLDS, example


@pytest.mark.parametrize(
    ("kind", "law", "gate"), [(corners.LayerOfFactors, "oracle", "strong"), (corners.QuotientsOfDecays, "session", "tenth")]
)
@pytest.mark.slow
def test_strong_decays_are_drawn_and_nothing_else_shows_it(kind: type, law: str, gate: str) -> None:
    right = next(base for base in kind.__mro__ if base.__module__.startswith("verify.zoo."))
    for seed in range(3):
        examples = sorted(in_a_check(law, domain_of(kind), seed), key=lambda example: example.case.tokens)
        strong = [example for example in examples if example.case.gate == gate]
        found = next(example for example in strong if outcome_of(kind, law, example).verdict is Verdict.BROKEN)
        assert execute(Run(law, f"zoo/{right.__name__}", found)).verdict is Verdict.HOLDS
        others = [example for example in examples if example.case.gate != gate]
        assert Verdict.BROKEN not in {outcome_of(kind, law, example).verdict for example in others[:OTHERS]}
    weak = dataclasses.replace(domain_of(kind), strong_decays=False)
    assert gate not in {example.case.gate for example in in_a_check(law, weak, 0)}
    assert weak.outside(found.case) == f"gate={gate} is not supported"


def test_an_input_that_the_backward_restores_was_changed_all_the_same() -> None:
    line = "lengths=2 key_dim=2 value_dim=2 gate=10"
    outcome = execute(Run.parse(f"law=oracle adapter={HERE}:ScratchInValues {line}"))
    assert [(f.output, f.kind, f.what) for f in outcome.findings] == [
        ("input v", FailureKind.INPUT_CHANGED, "was changed by the forward")
    ]
    assert execute(Run.parse(f"law=oracle adapter={HERE}:ScratchInValues {line} backward=no")).verdict is Verdict.HOLDS
    assert execute(Run.parse(f"law=oracle adapter=zoo/Recomputes {line}")).verdict is Verdict.HOLDS


def test_failures_come_in_calls_of_several_packed_sequences() -> None:
    """With the spans of another call of one sequence, a call of one sequence may be right."""
    for seed in range(3):
        failed = [one for one in in_a_check("history", domain_of(wrong.SpansByKey), seed) if one.variant == "failed"]
        assert any(one.case.packed and len(one.case.lengths) > 1 for one in failed), seed
    line = "law=history variant=failed adapter={} lengths=5+3 packed=yes key_dim=4 value_dim=4 gate=64 seed=2"
    assert execute(Run.parse(line.format(f"{HERE}:SpansByKey"))).verdict is Verdict.BROKEN
    assert execute(Run.parse(line.format("zoo/Chunkwise"))).verdict is Verdict.HOLDS


def test_a_call_after_one_whose_backward_failed_has_other_lengths() -> None:
    line = "law=history variant=failed adapter={} lengths=9+4 packed=yes key_dim=4 value_dim=4 gate=64 seed={}"
    for seed in (1, 3):
        outcome = execute(Run.parse(line.format(f"{HERE}:OffsetsOfTheBackward", seed)))
        assert {finding.output for finding in outcome.findings} & {
            "o of a later call with other numbers, after one had failed for lack of memory"
        }
        assert execute(Run.parse(line.format("zoo/Recomputes", seed))).verdict is Verdict.HOLDS


def test_a_call_is_cut_behind_the_last_position_that_bf16_has() -> None:
    (example,) = fixed(wrong.PositionsInBf16, "future", "", 0)
    assert (example.case.lengths, example.case.dtype, example.at) == ((300,), "bf16", 257)
    assert outcome_of(wrong.PositionsInBf16, "future", example).verdict is Verdict.BROKEN
    assert outcome_of(wrong.LongAttention, "future", example).verdict is Verdict.HOLDS


@for_each("count", [1, 2, 3, 4, 5, 8, 11])
def test_each_of_two_inputs_is_once_frozen_without_the_other(count: int) -> None:
    names = [chr(ord("a") + number) for number in range(count)]
    for seed in range(5):
        groups = list(separations(names, seed))
        assert all(0 < len(group) < count for group in groups)
        for one, two in itertools.permutations(names, 2):
            assert any(one in group and two not in group for group in groups), (seed, one, two)
            assert count < 3 or any({one, two} <= {*group} for group in groups), (seed, one, two)
        halves = [group for group in groups if 1 < len(group) < count - 1]
        assert count < 8 or len(halves) > count, "of each pair, both are needed in some call where about half are frozen"


def test_traces_at_limits_follow_the_domain() -> None:
    domain = sized(TraceDomain(), None, MOST["quick"])
    (crowd, padded), (repeat, transfer, copies), (long,) = crowds(domain), repeats(domain), long_requests(domain)
    assert rows_of(crowd) == (CROWDED, CROWDED)
    assert rows_of(padded) == (PADDED + BEHIND, BEHIND)
    assert [step.kind for step in repeat.plan if step.request == "a"] == ["w"] * 4 + ["t"] * 4
    assert repeat.heads == repeat.value_heads == MANY_RANKS
    assert [(case.heads, case.value_heads) for case in (transfer, copies)] == [(3, 6), (2, 8)]
    assert repeats(dataclasses.replace(domain, grouped_heads=False)) == [repeat]
    assert [row.start for step in long.plan for row in step.rows if step.kind == "d"][:2] == [256, 517]
    again, short, prefix, drafted, chain, left, saved = ([step.kind for step in case.plan] for case in forks(domain))
    assert (again, short, saved) == (["p", "k", "p", "d"], ["p", "p", "k", "d"], ["p", "s", "k", "s", "d"])
    assert (prefix, drafted, chain) == (["p", "f", "k", "d"], ["p", "v", "k", "f", "d"], ["p", "k", "k", "d"])
    assert [row.start for step in block_ends(domain)[0].plan for row in step.rows if step.kind == "d"] == [255, 256, 257, 256]
    assert [len(step.rows) for step in alternating(domain)[0].plan[1:]] == [7, 2, 7, 3, 2, 7, 3, 7]
    assert left == ["p", "k", "k", "r", "f", "p", "d"]
    kept = dataclasses.replace(domain, events=tuple(event for event in domain.events if event != "preempt"))
    assert [step.kind for step in forks(kept)[5].plan] == ["p", "k", "k", "f", "f", "p", "d"]
    (step,) = long_steps(domain)
    assert (sum(row.count for row in step.plan[0].rows), {row.snapshot for row in step.plan[0].rows}) == (8382, {64})
    (saving,) = crowded_snapshots(domain)
    assert [place for place, row in enumerate(saving.plan[0].rows) if row.snapshot is not None] == [*SAVING]
    few = sized(TraceDomain(most_slots=26), None, MOST["quick"])
    assert rows_of(crowds(few)[0]) == (CROWDED, 26)
    assert rows_of(crowds(dataclasses.replace(few, most_padding=9))[0]) == (26, 26)
    without = sized(TraceDomain(padding_slots=(), snapshots=(0,), events=("prefill", "decode")), None, MOST["quick"])
    assert [rows_of(case) for case in crowds(without)] == [(CROWDED, CROWDED)]
    assert repeats(without) == forks(without) == crowded_snapshots(without) == crowded_snapshots(few) == []
    assert long_steps(dataclasses.replace(domain, most_slots=32)) == []
    assert len(long_steps(dataclasses.replace(domain, most_tokens=64))[0].plan[0].rows) == STEP_ROWS
    short = dataclasses.replace(without, most_tokens=64, later_prompts=False)
    assert max(row.start for step in long_requests(short)[0].plan for row in step.rows) == 518
    (parts,) = long_requests(dataclasses.replace(short, most_tokens=9))
    assert len(parts.plan) == -(-517 // 9) + 2
    dear = sized(TraceDomain(), None, MOST["interpreted"])
    assert max(row.start for step in long_requests(dear)[0].plan for row in step.rows) == 257
    one = TraceDomain()
    assert crowds(one) == repeats(one) == long_requests(one) == forks(one) == [], "a check without large cases"


def rows_of(case: TraceCase) -> tuple[int, int]:
    """The most rows of a step, and how many of them are requests'."""
    return max((len(step.rows), sum(row.real for row in step.rows)) for step in case.plan)
