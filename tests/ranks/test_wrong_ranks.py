"""The law `parallel` sees what only gates, states and contiguous shards on ranks can have wrong; right paths hold every law."""

import functools
from typing import Any

import pytest

from properties.paths.case import ParallelCase
from properties.paths.domain import PathDomain
from properties.paths.laws import PATH_LAWS
from properties.words.example import Example
from tests import wrong_exchanges as exchanges
from tests import wrong_ranks as paths
from tests.drawn import domain_in_a_check, in_a_check, spec_of
from verify.adapters.base import PathAdapter
from verify.engine.drawing import seeded
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Outcome, Verdict

CASES = 16
# The gradients and outputs of which one is off, whatever the case; the others follow.
SHOWN: dict[type[PathAdapter], set[str]] = {
    paths.WindowStopsAtRanks: {"dconv", "y"},
    paths.StateStopsAtRanks: {"y", "dA_log"},
    paths.ZigzagOfContiguous: {"y", "call"},
    paths.GatesNotSummed: {"dA_log", "ddt_bias"},
    paths.GatesSummedWithTheirBias: {"dA_log"},
    paths.GatesSummedTwice: {"dA_log", "ddt_bias"},
    paths.StateOfTheFirstRank: {"o", "final_state", "dh0"},
    paths.FinalStateOfTheLastRank: {"final_state"},
    paths.InitialStateOnEachRank: {"dh0"},
    paths.DividesByDecays: {"o", "dg"},
    paths.LayerDividesByDecays: {"y"},
    paths.NeverDoubles: {"o"},
    paths.KdaStateStopsAtRanks: {"y", "dA_log"},
    paths.KdaBiasSummedTwice: {"ddt_bias"},
}


# What the cases have that show these, and no other case does.
ONLY: dict[type[PathAdapter], tuple[str, Any]] = {
    paths.LayerDividesByDecays: ("gate", "strong"),
    paths.NeverDoubles: ("allow_neg_eigval", True),
    paths.GatesSummedWithTheirBias: ("dt_bias", False),
}


@functools.cache
def drawn(law: str, domain: PathDomain) -> list[Example]:
    """As many cases of a law as half of the default profile has, short ones in float32 first."""
    examples: list[Example] = []
    seeded(PATH_LAWS[law].draw(domain), 0, CASES, examples.append)
    return sorted(examples, key=lambda example: (example.case.dtype != "fp32", example.case.tokens))


def run(kind: type[PathAdapter], law: str, example: Example) -> Outcome:
    return execute(Run(law, f"tests/wrong_ranks.py:{kind.__name__}", example))


@pytest.mark.parametrize("mutant", SHOWN)
@pytest.mark.slow_after_first
def test_the_law_parallel_sees_it(mutant: type[PathAdapter]) -> None:
    outcomes = (run(mutant, "parallel", example) for example in drawn("parallel", mutant.domain))
    broken = next((outcome for outcome in outcomes if outcome.verdict is Verdict.BROKEN), None)
    assert broken is not None
    assert {finding.port for finding in broken.findings} & SHOWN[mutant]


@pytest.mark.parametrize("kind", [paths.BuffersOfGradients, paths.WritesIntoTheLastOutput])
@pytest.mark.slow_after_first
def test_the_law_earlier_sees_results_that_a_later_call_changes(kind: type[PathAdapter]) -> None:
    examples = [example for example in in_a_check("earlier", kind.domain, 0) if example.case.dtype == "fp32"]
    broken = [example for example in examples if run(kind, "earlier", example).verdict is Verdict.BROKEN]
    assert {example.variant for example in broken} - {"in_flight"} == {"others"}
    for example in broken:
        rights = (paths.RuleThatSteps, paths.SaysItsBuffers) if kind is paths.BuffersOfGradients else (paths.RuleOnRanks,)
        assert {run(right, "earlier", example).verdict for right in rights} == {Verdict.HOLDS}


@pytest.mark.parametrize(
    ("mutant", "right"),
    [
        (exchanges.StepsBackwards, exchanges.HeadsOnRanks),
        (exchanges.TilesSharedKeys, exchanges.HeadsOnRanks),
        (exchanges.SlabsOf1024, paths.RuleOnRanks),
        (exchanges.BucketTail, exchanges.Mutant),
    ],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.slow_after_first
def test_a_check_sees_it_with_every_seed(mutant: type[PathAdapter], right: type[PathAdapter]) -> None:
    domain = domain_in_a_check(spec_of(mutant))
    for seed in range(3):
        examples = sorted(in_a_check("parallel", domain, seed), key=lambda example: -example.case.tokens)
        shows = (example for example in examples if execute(Run("parallel", spec_of(mutant), example)).verdict is Verdict.BROKEN)
        found = next(shows, None)
        assert found is not None, seed
        spec = "zoo/Mutant" if right is exchanges.Mutant else spec_of(right)
        assert execute(Run("parallel", spec, found)).verdict is Verdict.HOLDS


def test_pieces_of_zigzag_are_those_of_each_sequence() -> None:
    """A rank of two has tokens 0, 3, 4 and 7 of two sequences of four: pieces of one token."""
    domain = PathDomain("causal_conv1d", context_parallel=True, tensor_parallel=False, least_piece=2, ranks=4)
    words = {"operation": "causal_conv1d", "cp": 2, "packed": True, "layout": "zigzag"}
    refused = "pieces of 1 tokens, under 2, are not supported"
    assert [domain.outside(ParallelCase(lengths, **words)) for lengths in ((4, 4), (8, 4), (8, 0, 8))] == [refused, refused, None]
    drawn_cases = [example.case for example in in_a_check("parallel", domain, 0)]
    assert {case.layout for case in drawn_cases} >= {"zigzag"}
    assert all(length >= 4 * case.cp for case in drawn_cases if case.layout == "zigzag" for length in case.padded if length)


@pytest.mark.parametrize("mutant", ONLY)
@pytest.mark.slow
def test_cases_without_that_word_do_not_show_it(mutant: type[PathAdapter]) -> None:
    word, value = ONLY[mutant]
    right = next(base for base in (paths.RuleOnRanks, paths.Contiguous) if issubclass(mutant, base))
    for example in drawn("parallel", mutant.domain):
        broken = run(mutant, "parallel", example).verdict is Verdict.BROKEN
        assert not broken or getattr(example.case, word) == value, str(example)
        assert not broken or run(right, "parallel", example).verdict is Verdict.HOLDS, str(example)


@pytest.mark.parametrize(
    "right", [paths.Contiguous, paths.RuleOnRanks, paths.RuleThatSteps, paths.KdaLayerOnRanks, exchanges.HeadsOnRanks]
)
@pytest.mark.slow_after_first
def test_a_right_path_holds_every_law(right: type[PathAdapter]) -> None:
    for law in PATH_LAWS:
        if PATH_LAWS[law].needs(right.domain) is None:
            for example in drawn(law, right.domain)[:5]:
                outcome = execute(Run(law, spec_of(right), example))
                assert outcome.verdict in (Verdict.HOLDS, Verdict.BLIND), (law, str(example), outcome.findings, outcome.reason)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (paths.Contiguous, {"layout": {"contiguous"}, "packed": {True, False}, "padding": {"none", "least", "more"}}),
        (
            paths.RuleOnRanks,
            {"in_kernel": {"none", "gate", "beta", "both"}, "state": {"none", "random"}, "final_state": {True, False}},
        ),
    ],
)
def test_cases_have_the_words_that_the_domain_allows(kind: type[PathAdapter], words: dict[str, set[Any]]) -> None:
    cases: list[Any] = []
    seeded(PATH_LAWS["parallel"].draw(kind.domain), 0, 64, lambda example: cases.append(example.case))
    for word, values in words.items():
        assert {getattr(case, word) for case in cases} == values
    assert all(type(case).parse(str(case)) == case for case in cases)


def test_words_of_rules_are_for_rules() -> None:
    for words in ("in_kernel=gate", "state=random", "final_state=yes"):
        with pytest.raises(ValueError, match="must have in_kernel=none state=none final_state=no"):
            Run.parse(f"law=parallel adapter=gdn/layer lengths=4 cp=2 heads=2 value_heads=2 {words}")
    with pytest.raises(ValueError, match="layout must be zigzag or contiguous for op=gdn_layer"):
        Run.parse("law=parallel adapter=gdn/layer lengths=4 layout=zigzag_batch")
