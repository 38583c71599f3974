"""The law `left_padding` beside initial states and at the end of rows, for domains that allow it.

The layers are in padded_layers.py.
"""

import pytest

from properties.layers.domain import LayerDomain
from properties.layers.laws import LAYER_LAWS
from properties.words.example import Example
from tests import padded_layers
from tests.drawn import domain_in_a_check
from verify.adapters.base import Adapter
from verify.engine.drawing import seeded
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict

LAW = LAYER_LAWS["left_padding"]


def drawn(domain: LayerDomain, count: int) -> list[Example]:
    examples: list[Example] = []
    seeded(LAW.draw(domain), 0, count, examples.append)
    return sorted(examples, key=lambda example: (example.case.dtype != "fp32", example.case.tokens))


def verdicts(kind: type[Adapter], examples: list[Example]) -> list[Verdict]:
    return [execute(Run(LAW.name, f"tests/padded_layers.py:{kind.__name__}", example)).verdict for example in examples]


def test_states_stand_beside_padding_only_where_the_domain_says_so() -> None:
    both = drawn(padded_layers.Padded.domain, 48)
    assert {example.case.state for example in both} >= {"none", "random", "some"}
    assert {example.case.state for example in drawn(LayerDomain(), 48)} == {"none"}
    beside = next(example for example in both if example.case.state == "random")
    outcome = execute(Run(LAW.name, "zoo/Layered", beside))
    assert (outcome.verdict, outcome.reason) == (Verdict.UNSUPPORTED, "padding beside an initial state")


@pytest.mark.slow_after_first
def test_a_right_layer_holds() -> None:
    assert {*verdicts(padded_layers.Padded, drawn(padded_layers.Padded.domain, 16))} <= {Verdict.HOLDS, Verdict.BLIND}


@pytest.mark.parametrize("mutant", [padded_layers.ForgetsStatesOfPadded, padded_layers.PadsEnterTheWindow])
@pytest.mark.slow_after_first
def test_wrong_layers_show_beside_states_alone(mutant: type[Adapter]) -> None:
    examples = drawn(padded_layers.Padded.domain, 32)
    beside = [example for example in examples if example.case.state == "random"]
    assert Verdict.BROKEN in verdicts(mutant, beside[:4])
    without = [example for example in examples if example.case.state == "none"]
    assert {*verdicts(mutant, without[:4])} <= {Verdict.HOLDS, Verdict.BLIND}


def test_padding_at_the_end_of_rows_is_only_where_the_domain_says_so() -> None:
    ends = [example for example in drawn(padded_layers.PaddedEnds.domain, 32) if example.variant]
    assert {example.variant for example in ends} == {"end", "mixed"}
    assert {example.variant for example in drawn(LayerDomain(), 32)} == {None}
    assert sorted(firm()) == ["end", "mixed"]
    for example in ends:
        outcome = execute(Run(LAW.name, "zoo/Layered", example))
        assert (outcome.verdict, outcome.reason) == (Verdict.UNSUPPORTED, "padding at the end of rows")


def firm() -> dict[str, Example]:
    """Return the firm examples of padding at the end of rows by their variants."""
    examples = LAW.always(domain_in_a_check("tests/padded_layers.py:PaddedEnds"))
    return {example.variant: example for example in examples if example.variant}


@pytest.mark.parametrize(
    ("kind", "shows"),
    [
        (padded_layers.PaddedEnds, set()),
        (padded_layers.PadsGoOn, {"end", "mixed"}),
        (padded_layers.PadsAtTheStart, {"end", "mixed"}),
        (padded_layers.PadsOnOneSide, {"mixed"}),
    ],
)
def test_padding_at_the_end_shows_wrong_layers_and_leaves_the_right_one(kind: type[Adapter], shows: set[str]) -> None:
    examples = firm()
    assert all(example.case.cached for example in examples.values())
    assert {one for one, example in examples.items() if verdicts(kind, [example]) == [Verdict.BROKEN]} == shows
    others = [example for example in drawn(kind.domain, 16) if example.variant is None]
    assert others
    assert {*verdicts(kind, others)} <= {Verdict.HOLDS, Verdict.BLIND}


@pytest.mark.slow_after_first
def test_a_right_layer_with_padding_at_the_end_holds() -> None:
    ends = [*firm().values(), *(example for example in drawn(padded_layers.PaddedEnds.domain, 24) if example.variant)]
    assert {*verdicts(padded_layers.PaddedEnds, ends)} == {Verdict.HOLDS}
