"""Prompts, drafts and decodes at the ends of the blocks of an engine's cache, with blocks of up to 1,056 tokens."""

import pytest

from properties.laws.law import Blind, Breach
from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.laws import TRACE_LAWS
from properties.words.example import Example
from tests.wrong_block_ends import Blocks, DecodeThatBegins, PromptThatFills, WindowOfADraft, of_block
from verify.bench.trace_bench import EngineBench, place_of
from verify.engine.drawing import of_law
from verify.engine.profiles import PROFILES
from verify.execution.judge import judge
from verify.zoo.wrong_traces import AcceptedOfDraftsAlone, MixedStepsTakeNoSnapshot, OneWidthForAllDrafts, Serves

INPUTS = {64: "p:a62/v4:a4", 256: "p:a130/p:a124/v4:a4", 1056: "p:a130/" * 8 + "p:a14/v4:a4"}


def broken(kind: type[Serves], law: str, example: Example) -> bool:
    """Whether a law finds an engine broken on an example."""
    try:
        return bool(judge(TRACE_LAWS[law].check(EngineBench(kind(), example.case), example), place_of).findings)
    except Breach:
        return True
    except Blind:
        return False


def found(kind: type[Serves], laws: tuple[str, ...], seed: int, domain: TraceDomain | None = None) -> bool:
    """Whether one of these laws finds an engine broken in the cases that a check of the default profile draws.

    Short cases in float32 run first: they take less, and a wrong result is far over their tolerance.
    """
    for law in laws:
        examples: list[Example] = []
        of_law(TRACE_LAWS[law], domain or kind.domain, seed, PROFILES["quick"].examples_of(TRACE_LAWS[law]), examples.append)
        examples.sort(key=lambda example: (example.case.dtype != "fp32", example.case.tokens))
        if any(broken(kind, law, example) for example in examples):
            return True
    return False


@pytest.mark.parametrize("block", INPUTS)
def test_a_draft_across_the_end_of_a_block_shows_a_wrong_window(block: int) -> None:
    case = TraceCase(INPUTS[block], slots=1, key_dim=4, value_dim=4)
    for law in ("tags", "session"):
        assert broken(of_block(WindowOfADraft, block), law, Example(case))
        assert not broken(of_block(Blocks, block), law, Example(case))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("block", INPUTS)
@pytest.mark.slow
def test_a_check_finds_the_wrong_window_with_every_seed(block: int, seed: int) -> None:
    assert found(of_block(WindowOfADraft, block), ("tags", "session"), seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", [MixedStepsTakeNoSnapshot, OneWidthForAllDrafts, AcceptedOfDraftsAlone])
@pytest.mark.slow
def test_a_check_finds_what_mixed_steps_and_drafts_of_several_lengths_show_with_every_seed(kind: type[Serves], seed: int) -> None:
    assert found(kind, ("tags", "session"), seed)


@pytest.mark.parametrize("kind", [PromptThatFills, DecodeThatBegins])
@pytest.mark.slow
def test_a_check_finds_what_is_wrong_at_the_end_of_a_block(kind: type[Blocks]) -> None:
    assert found(of_block(kind, 256), ("tags", "session"), 0)


@pytest.mark.slow
def test_traces_without_blocks_do_not_show_the_wrong_window() -> None:
    assert not found(of_block(WindowOfADraft, 256), ("tags",), 0, TraceDomain(block=0))


@pytest.mark.slow
def test_an_engine_with_large_blocks_holds() -> None:
    kind = of_block(Blocks, 1056)
    for law in ("tags", "session", "ledger"):
        examples: list[Example] = []
        of_law(TRACE_LAWS[law], kind.domain, 7, 8, examples.append)
        assert max(row.start for example in examples for step in example.case.plan for row in step.rows) > 1000
        assert not any(broken(kind, law, example) for example in examples)
