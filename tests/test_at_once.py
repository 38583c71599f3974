"""Over 65,535 packed sequences: a case for implementations in plain torch that do not take sequences one by one."""

import pytest

from properties.books import book_of
from properties.words.example import Example
from properties.words.sizes import AT_ONCE
from tests.drawn import domain_in_a_check, in_a_check
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Outcome, Verdict

HERE = "tests/wrong_at_once.py"
LAWS = [("whole", "Conv"), ("recall", "Rule")]


def many(law: str, spec: str) -> Example:
    """The example of a law with over 65,535 sequences."""
    domain = domain_in_a_check(spec)
    (found,) = (one for one in book_of(domain).laws[law].always(domain) if len(one.case.lengths) == AT_ONCE)
    return found


def judged(law: str, spec: str) -> Outcome:
    return execute(Run(law, spec, many(law, spec)))


@pytest.mark.parametrize(("law", "name"), LAWS)
def test_launches_of_65535_sequences_are_broken_and_the_right_form_holds(law: str, name: str) -> None:
    right, wrong = (judged(law, f"{HERE}:{name}{form}") for form in ("AtOnce", "InLaunches"))
    assert (right.verdict, wrong.verdict) == (Verdict.HOLDS, Verdict.BROKEN)


@pytest.mark.parametrize(("law", "name"), LAWS)
def test_no_other_example_of_the_law_shows_it_and_each_seed_draws_it(law: str, name: str) -> None:
    spec, example = f"{HERE}:{name}InLaunches", many(law, f"{HERE}:{name}InLaunches")
    for seed in range(3):
        assert example in in_a_check(law, domain_in_a_check(spec), seed)
    others = [one for one in in_a_check(law, domain_in_a_check(spec), 0) if one != example]
    assert Verdict.BROKEN not in {execute(Run(law, spec, one)).verdict for one in others}


@pytest.mark.parametrize(("law", "spec"), [("whole", "zoo/Conv"), ("recall", "zoo/Chunkwise")])
def test_an_implementation_that_takes_sequences_one_by_one_is_not_asked(law: str, spec: str) -> None:
    outcome = judged(law, spec)
    assert (outcome.verdict, outcome.kernel_s < 1) == (Verdict.BLIND, True)
    assert outcome.reason == "the implementation takes sequences one by one, and so many would take it long"


@pytest.mark.parametrize("spec", ["zoo/Conv", f"{HERE}:ConvAtOnce"])
def test_its_line_is_short(spec: str) -> None:
    run = Run("whole", spec, many("whole", spec))
    assert "lengths=1x65600 " in str(run)
    assert (len(str(run)) < 200, Run.parse(str(run))) == (True, run)
