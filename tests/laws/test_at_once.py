"""Thousands of packed sequences in plain torch. Most cases are for implementations that do not take sequences one by one."""

import pytest

from properties.books import book_of
from properties.words.example import Example
from properties.words.sizes import AT_ONCE, ONE_BY_ONE
from tests.drawn import domain_in_a_check, in_a_check
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Outcome, Verdict

HERE = "tests/wrong_at_once.py"
# The law and the number of sequences that show each of them.
SHOWN_BY = {
    "ConvInLaunches": ("whole", {AT_ONCE}),
    "RuleInLaunches": ("recall", {AT_ONCE}),
    "RuleOf12Bits": ("recall", {4100, AT_ONCE}),
    "ConvCarryOfOneBlock": ("whole", {ONE_BY_ONE}),
    "CarryOfOneBlock": ("recall", {ONE_BY_ONE}),
}
RIGHT = {
    "ConvInLaunches": f"{HERE}:ConvAtOnce",
    "RuleInLaunches": f"{HERE}:RuleAtOnce",
    "RuleOf12Bits": f"{HERE}:RuleAtOnce",
    "ConvCarryOfOneBlock": "zoo/Conv",
    "CarryOfOneBlock": "zoo/Chunkwise",
}


def always(law: str, spec: str) -> list[Example]:
    """The examples of a law that come with every seed and have over 2,048 sequences, in the order of their numbers."""
    domain = domain_in_a_check(spec)
    return [one for one in book_of(domain).laws[law].always(domain) if len(one.case.lengths) >= ONE_BY_ONE]


def judged(law: str, spec: str, example: Example) -> Outcome:
    return execute(Run(law, spec, example))


@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_late_sequence_shows_it_and_the_right_form_holds(name: str) -> None:
    law, counts = SHOWN_BY[name]
    examples = always(law, f"{HERE}:{name}")
    broken = {len(one.case.lengths) for one in examples if judged(law, f"{HERE}:{name}", one).verdict is Verdict.BROKEN}
    assert (broken, len(examples)) == (counts, 3 if law == "recall" else 2)
    holds = [one for one in examples if judged(law, RIGHT[name], one).verdict is Verdict.HOLDS]
    assert counts <= {len(one.case.lengths) for one in holds}


@pytest.mark.parametrize("name", SHOWN_BY)
def test_no_other_example_of_the_law_shows_it_and_each_seed_draws_it(name: str) -> None:
    (law, _), spec = SHOWN_BY[name], f"{HERE}:{name}"
    examples = always(law, spec)
    for seed in range(3):
        assert [one for one in in_a_check(law, domain_in_a_check(spec), seed) if one in examples] == examples
    others = [one for one in in_a_check(law, domain_in_a_check(spec), 0) if one not in examples]
    assert Verdict.BROKEN not in {judged(law, spec, one).verdict for one in others}


@pytest.mark.parametrize(("law", "spec"), [("whole", "zoo/Conv"), ("recall", "zoo/Chunkwise")])
def test_an_implementation_that_takes_sequences_one_by_one_is_not_asked(law: str, spec: str) -> None:
    for example in always(law, spec)[1:]:
        outcome = judged(law, spec, example)
        assert (outcome.verdict, outcome.kernel_s < 1) == (Verdict.BLIND, True)
        assert outcome.reason == "the implementation takes sequences one by one, and so many would take it long"


@pytest.mark.parametrize("spec", ["zoo/Conv", f"{HERE}:ConvAtOnce"])
def test_its_line_is_short(spec: str) -> None:
    *_, example = always("whole", spec)
    run = Run("whole", spec, example)
    assert "lengths=1x65600 " in str(run)
    assert (len(str(run)) < 200, Run.parse(str(run))) == (True, run)
