"""A bound of fewer runs is sure of what all of them allow at least, so that a judge who heeds it finds the same broken."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.operation import Inputs
from oracles.operations import RULES
from oracles.tolerance import bound, evaluation
from oracles.tolerance.allowance import KAPPA
from oracles.tolerance.bound import RUNS, Bound, Decision, bounds, truth
from properties.laws import in_parts
from properties.laws.law import Pair, pairs_of
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from properties.words.example import Example
from tests import right
from tests.faults import not_refused
from tests.over_bounds import answered
from tests.right_rules import TokenByToken
from verify.bench.adapter_bench import AdapterBench
from verify.bench.places import where
from verify.execution.judge import Judgement, judge
from verify.process.outcome import Finding
from verify.zoo.base import Chunkwise

MODES = st.sampled_from(
    (("chunkwise", "ieee", 64), ("chunkwise", "tf32", 16), ("chunkwise", "ieee", None), ("recurrent", "ieee", None))
)


def looks(case: Case, algorithm: str, products: str, chunk: int | None, first: int) -> list[dict[str, Bound]]:
    """The bounds from the first look to the one before the finest."""
    stages = [bounds(case.spec, case.inputs(), case.cotangents(), algorithm, products, chunk, first)]
    while any(limit.sure < 1 for limit in stages[-1].values()):
        stages.append({name: limit.finer() for name, limit in stages[-1].items() if limit.finer is not None})
    return stages


def less_than_sure(fewer: dict[str, Bound], all_of: dict[str, Bound], sure: float | None = None) -> list[str]:
    """The tensors of which all runs allow some row less than fewer runs are sure of."""
    return [
        name
        for name, limit in fewer.items()
        if not (all_of[name].allowed >= (limit.sure if sure is None else sure) * (1 - 1e-6) * limit.allowed).all()
    ]


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=4)
@given(case=cases(Domain(), longest=40, total=60, value_heads=2), mode=MODES, first=st.sampled_from((1, 2)))
@pytest.mark.slow
def test_all_runs_allow_at_least_what_fewer_are_sure_of(
    operation: str, case: Case, mode: tuple[str, str, int | None], first: int
) -> None:
    case = dataclasses.replace(case, operation=operation, **({"in_kernel": "none"} if operation == "delta_rule" else {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "_NEAR", 1)  # each run alone, as in a look at one: else other products are taken
        plain = bounds(case.spec, case.inputs(), case.cotangents(), *mode)
        *fewer, last = looks(case, *mode, first)
    assert len(fewer) == (2 if first == 1 else 1)
    for look in fewer:
        assert {limit.sure < 1 for limit in look.values()} == {True}
        assert less_than_sure(look, last) == []
    for name, limit in plain.items():
        assert (limit.sure, last[name].sure) == (1.0, 1.0)
        assert torch.equal(last[name].value, limit.value)
        torch.testing.assert_close(last[name].allowed, limit.allowed, rtol=1e-9, atol=0, msg="those of one look")


def test_one_run_or_two_are_sure_of_no_more() -> None:
    """The planted fault: one who takes what fewer runs allow for what all do, or is sure of a tenth more."""
    lengths = "+".join("1" * 16)  # with no neighbours to pool
    case = Case.parse(f"lengths={lengths} packed=yes key_dim=1 value_dim=1 dtype=bf16 gate=64 state=random seed=2")
    one, two, last = looks(case, "chunkwise", "ieee", 64, 1)
    assert ({limit.sure for limit in one.values()}, {limit.sure for limit in two.values()}) == ({0.5}, {0.5**0.5})
    for fewer in (one, two):
        assert less_than_sure(fewer, last) == []
        assert less_than_sure(fewer, last, 1.0) != []
    assert less_than_sure(one, last, 0.55) != []
    assert less_than_sure(two, last, 0.75) != []


def test_of_undeclared_chunks_one_size_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("lengths=40 key_dim=4 value_dim=4 dtype=bf16 gate=64")
    evaluate, seen = evaluation.evaluate, []
    monkeypatch.setattr(
        evaluation, "evaluate", lambda *arguments: seen.append((arguments[-1].chunk, arguments[-1].runs)) or evaluate(*arguments)
    )
    one = bounds(case.spec, case.inputs(), None, "chunkwise", first=1)["o"]
    assert seen[1:] == [(64, 1)]
    assert one.finer is not None
    several = one.finer()
    assert seen[2:] == [(size, 1) for size in bound.CHUNKS[1:]]
    assert several.finer is not None
    every = several.finer()
    assert seen[6:] == [(size, 1) for size in bound.CHUNKS]
    assert [one.sure, several.sure, every.sure] == [0.5**0.5, 0.5**0.5, 1.0]
    assert (several.allowed >= one.allowed).all()
    assert every.finer is not None
    assert every.finer().sure == 1
    assert seen[11:] == [(size, runs) for size in bound.CHUNKS for runs in (8, 2)]
    assert (finest := every.finer().finer) is not None
    assert finest().finer is None
    assert {size: sum(runs for chunk, runs in seen[11:] if chunk == size) for size in bound.CHUNKS} == dict.fromkeys(
        bound.CHUNKS, 40
    )


@pytest.mark.slow
def test_a_first_look_of_more_runs_is_the_one_that_fewer_lead_to() -> None:
    case = Case.parse("lengths=40+3 packed=yes key_dim=4 value_dim=4 dtype=bf16 gate=64")
    arguments = case.spec, case.inputs(), case.cotangents(), "chunkwise", "ieee", 16
    for first in [4, 16, 64]:
        for name, limit in bounds(*arguments).items():
            for _ in range((4, 16, 64).index(first)):
                assert limit.finer is not None, first
                limit = limit.finer()
            look = bounds(*arguments, first)[name]
            assert torch.equal(look.value, limit.value), first
            torch.testing.assert_close(look.allowed, limit.allowed, rtol=1e-12, atol=0)
            assert (look.sure, look.finer is None) == (1.0, first == 64), first


@pytest.mark.parametrize(("power", "amplification"), [(1, 1.0), (2, 4.0), (3, 16.0), (0, 1.0)])
def test_what_a_bit_less_amplifies_counts(power: int, amplification: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that go by a power of a rounding error, and so are of the size of one here and of 2^power in the coarse runs."""
    case, evaluate = Case.parse("lengths=1 key_dim=1 value_dim=1 dtype=bf16"), evaluation.evaluate

    def errs(*arguments: Any) -> dict[str, Tensor]:
        exact, rule = evaluate(*arguments[:-1], Arithmetic.exact()), arguments[-1]
        off = 2.0 ** (power * (8 - rule.output)) if rule.rounds else 0.0
        return {name: x.expand(rule.runs, *x.shape[1:]) + off for name, x in exact.items()}

    monkeypatch.setattr(evaluation, "evaluate", errs)
    for first, wanted in ((4, 1.0), (16, amplification), (64, amplification)):
        limit = bounds(case.spec, case.inputs(), None, "chunkwise", first=first)["o"]
        torch.testing.assert_close(limit.allowed, torch.full_like(limit.allowed, KAPPA * wanted**0.5))


@pytest.mark.slow
def test_where_errors_are_amplified_a_right_implementation_is_within_what_many_runs_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is written again and again at 1.95 times its strength: (1 - beta)^64 is 0.04, which rounding makes 0.2."""
    case = Case.parse("lengths=197 heads=8 value_heads=8 key_dim=40 value_dim=12 dtype=fp16 values=repeated scale=half seed=460")
    inputs = case.inputs()
    beta = (2 * torch.sigmoid(dataclasses.replace(case, in_kernel="beta").inputs().b.float())).to(inputs.v.dtype)
    # Only the sixth of eight heads amplifies errors.
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g, "beta": beta}
    inputs = inputs.replaced(**{name: x[:, :, 5:6] for name, x in tensors.items()}, qk_norm=True)

    def limits_of_many_runs() -> dict[str, Bound]:
        return bounds(case.spec, inputs, None, "chunkwise", "ieee", 64, 64)

    def worst(actual_inputs: Inputs, limits: dict[str, Bound]) -> float:
        """The greatest error over bound of an implementation with other inputs."""
        o, state = right.BackwardSums().run(actual_inputs)
        assert state is not None
        off = {name: (x.double() - limits[name].value).norm(dim=-1) for name, x in (("o", o), ("final_state", state))}
        return max(float((off[name] / limits[name].allowed).max()) for name in off)

    missing = inputs.beta.clone()
    missing[0, 10] = 0
    limits = limits_of_many_runs()
    assert worst(inputs, limits) < 0.5
    assert worst(inputs.replaced(beta=missing), limits) > 5, "a token that is not written"
    monkeypatch.setattr(bound, "_coarser", lambda plain: plain)
    assert worst(inputs, limits_of_many_runs()) > 1, "sigma alone knows nothing of it"


AMPLIFYING = (
    "lengths=500 heads=8 value_heads=8 key_dim=32 value_dim=4 dtype=bf16 beta=two values=repeated qk_norm=yes backward=no seed=24"
)


@pytest.mark.slow
def test_after_several_chunks_nothing_is_clear_from_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same again and again for 500 tokens: of four runs none takes the errors as far as a right implementation does."""
    case = Case.parse(AMPLIFYING)
    inputs = case.inputs()

    def judged_as(actual_inputs: Inputs) -> tuple[list[str], float]:
        o, state = Chunkwise().run(actual_inputs)
        assert state is not None
        limits = bounds(case.spec, inputs, None, "chunkwise", chunk=64)
        judgement = judge(pairs_of({"o": o, "final_state": state}, limits), lambda *_: "")
        return [finding.output for finding in judgement.findings], max(judgement.ratios.values())

    found, ratio = judged_as(inputs)
    assert (found, ratio < 0.5) == ([], True)
    unwritten = inputs.beta.clone()
    unwritten[0, 3] = 0
    assert judged_as(inputs.replaced(beta=unwritten))[0] == ["o"], "a token that is not written"
    monkeypatch.setattr(bound, "AMPLIFIED", case.tokens)
    found, ratio = judged_as(inputs)
    assert (found, ratio > 1000) == (["o", "final_state"], True), "four runs alone"


def test_few_runs_may_have_no_error_where_a_right_implementation_has_one() -> None:
    """A KDA rule without a state sums q dq - k dk for dg of a lone token: 0, but for an error on the grid of float32.

    The few runs that the first bound has meet no such error, so there is hardly a tolerance, and only more runs can tell.
    """
    words = "lengths=2+1 op=kda packed=yes key_dim=1 value_dim=65 dtype=bf16 gate=1000 values=repeated in_kernel=gate dt_bias=no"
    case = Case.parse(f"{words} seed=44483")
    limit = bounds(case.spec, case.inputs(), case.cotangents(), "chunkwise")["da"]
    assert float(limit.allowed[0, -1]) < 1e-28

    def found(error: float) -> list[str]:
        off = torch.zeros_like(limit.value)
        off[0, -1] = error
        return [finding.output for finding in judge(pairs_of({"da": limit.value + off}, {"da": limit}), lambda *_: "").findings]

    assert found(6.5e-11) == []
    assert found(6.5e-9) == ["da"]
    assert found(math.nan) == ["da"]


@pytest.mark.slow
def test_how_far_over_is_clear() -> None:
    for words, counts in [
        ("lengths=129 dtype=bf16", {4: math.inf, 16: bound.CLEARLY, 64: bound.CLEARLY}),
        ("lengths=3+0+130 packed=yes dtype=fp16", {4: math.inf, 16: bound.CLEARLY}),
        ("lengths=128 dtype=bf16", {4: bound.CLEAR, 16: bound.CLEAR_OF_MORE}),
        ("lengths=200 dtype=fp32", {4: bound.CLEAR, 16: bound.CLEAR_OF_MORE}),
    ]:
        case = Case.parse(f"{words} key_dim=2 value_dim=2")
        for count, clear in counts.items():
            one = bounds(case.spec, case.inputs(), None, "chunkwise", first=count)["o"]
            assert (one.clear, one.at(0).clear, one.plus(one).clear) == (clear, clear, clear), words


def test_a_first_look_of_other_runs_is_refused() -> None:
    case = Case.parse("lengths=4")
    patterns = ((first, rf"^first must be None or one of 1, 2, 4, 16, 64, got {first!r}$") for first in [0, 3, 8, True, 1.5, "1"])
    assert not_refused(lambda first: bounds(case.spec, case.inputs(), None, "chunkwise", first=first), patterns) == []


def test_chunks_that_are_no_number_of_tokens_are_refused() -> None:
    case = Case.parse("lengths=4")
    patterns = ((chunk, rf"^chunk must be None or a whole number from 1 up, got {chunk!r}$") for chunk in [0, -1, True, 2.5, "64"])
    assert not_refused(lambda chunk: bounds(case.spec, case.inputs(), None, "chunkwise", chunk=chunk), patterns) == []
    rule = "restarts must be empty or have increasing token numbers from 0 up for each of 1 sequences"
    wrong = [((-1,),), ((True,),), ((2.5,),), ((2, 1),), ((1, 1),), ((1,), (1,)), (1,), 1, None]
    patterns = ((at, f"^{re.escape(f'{rule}, got {at!r}')}$") for at in wrong)
    assert not_refused(lambda at: bounds(case.spec, case.inputs(), None, "chunkwise", restarts=at), patterns) == []


def test_cotangents_that_are_no_numbers_are_refused() -> None:
    case = Case.parse("lengths=4")
    for cotangents, message in [
        ([], "cotangents must be None or tensors by name, got list"),
        ({"o": None}, "cotangent of o must be a tensor, got NoneType"),
        ({"o": [1.0]}, "cotangent of o must be a tensor, got list"),
        (
            {"o": torch.ones(1, 4, 1, 16, dtype=torch.int64)},
            "cotangent of o must be floating point of 16, 32 or 64 bits, got torch.int64",
        ),
        ({"o": torch.ones(1, 4, 1, 16).to_sparse()}, "cotangent of o must be a strided tensor, got one that is torch.sparse_coo"),
    ]:
        for ask in (truth, functools.partial(bounds, algorithm="chunkwise")):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                ask(case.spec, case.inputs(), cotangents)


def test_inputs_of_two_dtypes_are_judged_by_the_coarser_whichever_is_first() -> None:
    case = Case.parse("lengths=20 key_dim=8 value_dim=8")
    inputs, coarse = case.inputs(), Case.parse("lengths=20 key_dim=8 value_dim=8 dtype=bf16")
    want = bounds(case.spec, coarse.inputs(), None, "chunkwise")["o"].allowed.median()
    for name in ("q", "v"):
        mixed = inputs.replaced(**{name: inputs[name].bfloat16()})
        assert 0.3 < bounds(case.spec, mixed, None, "chunkwise")["o"].allowed.median() / want < 3
    assert bounds(case.spec, inputs, None, "chunkwise")["o"].allowed.median() < want / 100


def test_a_first_look_of_all_runs_is_the_plain_one() -> None:
    case = Case.parse("lengths=20 dtype=bf16")
    one, other = (bounds(case.spec, case.inputs(), None, "chunkwise", first=first)["o"] for first in (None, RUNS))
    assert torch.equal(one.allowed, other.allowed)
    assert (one.sure, other.sure) == (1.0, 1.0)


def test_a_bound_says_right_wrong_or_that_more_runs_are_needed() -> None:
    last = Bound(torch.zeros(1, 1), torch.ones(1))
    final, some, few = last, dataclasses.replace(last, finer=lambda _=None: last), dataclasses.replace(last, sure=0.5)
    few = dataclasses.replace(few, finer=lambda _=None: some)
    for limit, ratio, most, decision in [
        (few, 0.5, 1.0, Decision.RIGHT),
        (few, 0.6, 1.0, Decision.UNDECIDED),
        (few, math.inf, 1.0, Decision.UNDECIDED),
        (some, 1.0, 1.0, Decision.RIGHT),
        (some, 1.1, 1.0, Decision.UNDECIDED),
        (some, bound.CLEAR, 1.0, Decision.WRONG),
        (some, 2.0 * bound.NOTHING, 1.0, Decision.UNDECIDED),
        (some, math.inf, 1.0, Decision.WRONG),
        (final, 2.0 * bound.NOTHING, 1.0, Decision.WRONG),
        (some, 3.0, 4.0, Decision.RIGHT),
        (some, 4.5, 4.0, Decision.UNDECIDED),
        (final, 1.1, 1.0, Decision.WRONG),
    ]:
        assert limit.decide(ratio, most) is decision, (limit.sure, ratio, most)


# The judge


def chain(*pairs: tuple[float, float]) -> tuple[Bound, list[float]]:
    """A bound of one row of zeros that allows so much and is so sure, whose finer ones are the next; and what was computed."""
    steps: list[float] = []

    def make(rest: tuple[tuple[float, float], ...]) -> Bound:
        (allowed, sure), later = rest[0], rest[1:]

        def finer(over: Tensor | None = None) -> Bound:
            steps.append(later[0][0])
            return make(later)

        return Bound(torch.zeros(1, 1), torch.tensor([allowed]), "", finer if later else None, sure)

    return make(pairs), steps


def test_a_settled_bound_has_all_runs() -> None:
    one, steps = chain((1.0, 0.5), (1.5, 0.7), (0.9, 1.0), (1.1, 1.0))
    all_of = one.settled()
    assert (float(all_of.allowed), steps) == (pytest.approx(0.9), [1.5, 0.9])
    assert all_of.settled() is all_of


def judged(limit: Bound, error: float) -> Judgement:
    return judge([Pair("o", "", torch.tensor([[error]]), limit)], lambda *_: "")


def test_the_judge_looks_further_where_fewer_runs_are_not_sure() -> None:
    for error, steps, broken in [
        (0.4, [], False),  # one run is sure
        (0.6, [1.5], False),  # two are
        (1.2, [1.5, 0.9, 1.1], True),  # though over nothing that one or two allow
        (1.08, [1.5, 0.9, 1.1], False),  # 64 allow it
        (2.0 * bound.CLEAR, [1.5, 0.9], True),  # clearly broken, of all runs only
        (math.nan, [1.5, 0.9], True),
    ]:
        limit, seen = chain((1.0, 0.5), (1.5, 0.7), (0.9, 1.0), (1.1, 1.0))
        judgement = judged(limit, error)
        assert seen == steps, error
        assert bool(judgement.findings) == broken, error


def test_the_judge_looks_no_further_where_an_output_is_excused() -> None:
    """What is over is found all the same, and an output that is not excused is judged by every look."""
    for error, times, steps, broken in [
        (0.4, 2.0, [], False),
        (1.2, 2.0, [1.5, 0.9], True),  # over what all runs allow: no more are made
        (1.2, 1.3, [1.5, 0.9, 1.1], True),  # by more than is excused: it is looked at whole
        (1.08, 1.1, [1.5, 0.9, 1.1], False),
        (2.0 * bound.CLEAR, math.inf, [1.5, 0.9], True),
        (math.nan, math.inf, [1.5, 0.9], True),
    ]:
        limit, seen = chain((1.0, 0.5), (1.5, 0.7), (0.9, 1.0), (1.1, 1.0))
        judgement = judge([Pair("o", ", from head 3 on", torch.tensor([[error]]), limit)], lambda *_: "", {"o": times})
        assert seen == steps, error
        assert bool(judgement.findings) == broken, error
        other, all_of = chain((1.0, 0.5), (1.5, 0.7), (0.9, 1.0), (1.1, 1.0))
        assert bool(judge([Pair("dq", "", torch.tensor([[1.2]]), other)], lambda *_: "", {"o": times}).findings), error
        assert all_of == [1.5, 0.9, 1.1], error


@pytest.mark.parametrize(
    ("sure", "excused", "steps"),
    [
        (1.0, {}, [[False, False, False, True]]),
        (1.0, {"o": 2.0}, [[False, False, False, True]]),
        (0.5, {"o": 2.0}, [[True, True, True, True], [False, False, False, True]]),  # until all runs are made nobody is excused
        (1.0, {"o": 50.0}, []),  # every row is excused, whatever more runs allow it
    ],
)
def test_finer_bounds_are_computed_for_the_worst_row_unless_it_is_excused(
    sure: float, excused: dict[str, float], steps: list[list[bool]]
) -> None:
    seen: list[list[bool]] = []
    errors = torch.tensor([0.6, 1.5, 2.5, 40.0])

    def finer(over: Tensor | None = None) -> Bound:
        assert over is not None
        seen.append(over.tolist())
        last = Bound(torch.zeros(4, 1), torch.tensor([1.0, 1.0, 3.0, 1.0]))
        return last if len(seen) == len(steps) else Bound(torch.zeros(4, 1), torch.ones(4), finer=finer, clear=100.0)

    limit = Bound(torch.zeros(4, 1), torch.ones(4), finer=finer, sure=sure, clear=100.0)
    (finding,) = judge([Pair("o", "", errors.unsqueeze(-1), limit)], lambda *_: "", excused).findings
    assert seen == steps
    assert (finding.rows_over, round(finding.error)) == (2 if steps else 3, 40)


CLEARS = (bound.CLEAR, bound.CLEAR_OF_MORE, bound.CLEAR_OF_MORE)


class InTwoParts:
    """Bounds of four rows: the tolerances of RUNS runs, and those of more. Rows 0 and 1 are one part, 2 and 3 the other.

    `clears` has the factor from which on an error is clear, for each number of runs.
    """

    def __init__(self, *levels: list[float], clears: Sequence[float] = CLEARS) -> None:
        self.levels, self.clears, self.steps = levels, clears, list[tuple[int, list[int]]]()

    def bound(self, level: int = 0, allowed: Tensor | None = None) -> Bound:
        def finer(over: Tensor | None = None) -> Bound:
            assert over is not None
            rows = over.nonzero().flatten().tolist()
            self.steps.append((level + 1, rows))
            known, later = now.clone(), torch.tensor(self.levels[level + 1])
            for first in {row // 2 * 2 for row in rows}:
                known[first : first + 2] = later[first : first + 2]
            return self.bound(level + 1, known)

        now = torch.tensor(self.levels[0]) if allowed is None else allowed
        later = finer if level + 1 < len(self.levels) else None
        return Bound(torch.zeros(4, 1), now, finer=later, clear=self.clears[level])

    def judged(self, *errors: float, excused: float = 0.0) -> tuple[list[Finding], float]:
        judgement = judge([Pair("o", "", torch.tensor(errors).unsqueeze(-1), self.bound())], lambda *_: "", {"o": excused})
        return judgement.findings, judgement.ratios["o"]


def test_one_part_is_enough_for_an_output_that_is_broken() -> None:
    limits = InTwoParts([1.0, 1.0, 1.0, 1.0], [1.5, 1.5, 1.5, 1.5], [2.5, 2.0, 9.0, 9.0])
    (finding,), ratio = limits.judged(6.0, 1.8, 4.0, 1.2)
    assert limits.steps == [(1, [0]), (2, [0])], "no finer bound for the part of rows 2 and 3"
    assert (finding.error, finding.allowed, finding.rows_over) == (6.0, 2.5, 3)
    assert ratio == pytest.approx(6.0 / 2.5)


def test_a_part_that_is_within_its_tolerance_hides_no_other_part() -> None:
    limits = InTwoParts([1.0, 1.0, 1.0, 1.0], [4.0, 3.0, 1.05, 1.1])
    (finding,), ratio = limits.judged(3.0, 2.0, 1.2, 1.25)
    assert limits.steps == [(1, [0]), (1, [3])]
    assert (finding.error, finding.rows_over, ratio) == (1.25, 2, pytest.approx(1.25 / 1.1))


def test_a_part_of_an_excused_output_hides_no_other_part() -> None:
    limits = InTwoParts([1.0, 1.0, 1.0, 1.0], [1.5, 1.0, 1.0, 1.0])
    (finding,), ratio = limits.judged(2.9, 1.0, 2.5, 1.0, excused=2.0)
    assert limits.steps == [(1, [0]), (1, [2])]
    assert (finding.error, ratio, finding.rows_over) == (2.5, pytest.approx(2.5), 2)


def test_runs_are_made_until_an_error_is_clear_of_what_is_excused() -> None:
    """16 runs allow 18.2 times too little, and 64 runs 15.4 times: a defect explains 16 times."""
    limits = InTwoParts([1.0] * 4, [1.1] * 4, [1.3] * 4)
    (finding,), ratio = limits.judged(20.0, 0.5, 0.5, 0.5, excused=16.0)
    assert limits.steps == [(1, [0]), (2, [0])]
    assert (finding.allowed, ratio) == (pytest.approx(1.3), pytest.approx(20 / 1.3))


def test_an_error_is_clear_by_the_factor_of_the_runs_that_were_made() -> None:
    """16 runs allow 13.6 times too little, which is clear, or 11.7 times, which 64 runs allow."""
    for error, steps, broken in [(15.0, [1], True), (12.9, [1, 2], False)]:
        limits = InTwoParts([1.0] * 4, [1.1] * 4, [20.0] * 4)
        findings, _ = limits.judged(error, 0.5, 0.5, 0.5)
        assert [level for level, _ in limits.steps] == steps, error
        assert bool(findings) == broken, error


def test_what_more_runs_allow_holds_in_every_part() -> None:
    limits = InTwoParts([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 1.2, 2.0], [0.5, 0.5, 1.5, 2.0])
    findings, ratio = limits.judged(1.6, 1.7, 1.4, 1.0)
    assert limits.steps == [(1, [1]), (1, [2]), (2, [2])], "16 runs allow rows 0 and 1, so they need no 64"
    assert (findings, ratio) == ([], pytest.approx(1.4 / 1.5))


def test_sums_of_bounds_look_further_where_they_are_least_sure() -> None:
    for join in (Bound.beside, Bound.plus):
        (one, of_one), (other, of_other) = chain((1.0, 0.5), (2.0, 1.0), (3.0, 1.0)), chain((10.0, 1.0), (20.0, 1.0))
        both = join(one, other)
        seen = [(both.sure, float(both.allowed))]
        while both.finer is not None:
            both = both.finer()
            seen.append((both.sure, float(both.allowed)))
        assert seen == [(0.5, 11.0), (1.0, 12.0), (1.0, 23.0)]
        assert (of_one, of_other) == ([2.0, 3.0], [20.0])
    row = one.at(slice(0, 1))
    assert row.sure == 0.5


def test_what_one_bound_finds_right_stays_right_and_the_rest_is_judged_by_another() -> None:
    (one, of_one), (other, of_other) = chain((4.0, 0.5), (8.0, 1.0)), chain((1.0, 0.5), (3.0, 1.0), (5.0, 1.0))
    bound, seen = one.otherwise(lambda: other), list[tuple[float, float]]()
    assert bound.decide(0.5) is Decision.RIGHT
    assert bound.decide(1e9) is Decision.UNDECIDED, "nothing is clearly wrong before the other bound is asked"
    while bound.finer is not None:
        bound = bound.finer()
        seen.append((bound.sure, float(bound.allowed)))
    assert seen == [(0.5, 2.0), (1.0, 3.0), (1.0, 5.0)], "half of 4 is right, whatever the other bound allows"
    assert (of_one, of_other) == ([], [3.0, 5.0])


class ChangesTheState(Chunkwise):
    """The state that a call is given is off by 2^-8 of itself: too little for the tolerance of most rows of a float16 call."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(state=x.state * (1 + 2.0**-8)) if x.get("state") is not None else x)


@pytest.mark.parametrize(
    ("implementation", "wrong"), [(Chunkwise(), set()), (ChangesTheState(), {"o", "final_state", "dg", "dh0"})]
)
def test_the_law_cut_judges_the_second_part_by_runs_that_begin_a_chunk_there(implementation: Chunkwise, wrong: set[str]) -> None:
    """The tolerance of one call would find dk wrong, however many runs it has. The other tolerance still finds what is wrong."""
    words = "dtype=fp16 gate=64 values=repeated state=random scale=one qk_norm=yes seed=1667"
    case = Case.parse(f"lengths=80 value_heads=3 key_dim=24 value_dim=24 {words}")
    bench = AdapterBench(implementation, None, case)
    pairs = list(in_parts.cut(bench, Example(case, at=58)))
    assert {finding.port for finding in judge(pairs, functools.partial(where, case)).findings} == wrong
    whole = bounds(case.spec, *bench.call(case), "chunkwise", chunk=64, first=64)
    over = {finding.port for finding in judge([pair._replace(want=whole[pair.port]) for pair in pairs], lambda *_: "").findings}
    assert "dk" in over


@functools.cache
def first_look(case: Case, algorithm: str, chunk: int | None, first: int | None) -> dict[str, Bound]:
    return bounds(case.spec, case.inputs(), case.cotangents(), algorithm, chunk=chunk, first=first)


class RoundsTheStateOnce(Chunkwise):
    """The state is rounded to bfloat16 between chunks, whatever the dtype."""

    def piece(self, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        o, state = super().piece(*arguments)
        return o, state.bfloat16().float()


@pytest.mark.parametrize(
    "implementation",
    [Chunkwise(), right.RoundsElsewhere(), TokenByToken(), RoundsTheStateOnce()],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.slow_after_first
def test_the_same_is_broken_however_few_runs_are_looked_at_first(implementation: Chunkwise) -> None:
    """And mostly no more is looked at than that: the same finding of the same row, since what is broken is broken for all runs."""
    make = functools.partial(first_look, algorithm=implementation.algorithm, chunk=implementation.chunk)
    found = []
    for seed in range(6):
        dtype, gate = ("bf16", "fp16", "fp32")[seed % 3], ("64", "forever", "tenth", "mixed")[seed % 4]
        case = Case.parse(f"lengths=70+3 packed=yes key_dim=8 value_dim=8 state=random dtype={dtype} gate={gate} seed={seed}")
        results = answered(implementation, case)
        by_look = [
            judge(
                (Pair(name, "", results[name], limit) for name, limit in make(case, first=first).items()),
                functools.partial(where, case),
            ).findings
            for first in (1, 2, None)
        ]
        assert [[dataclasses.replace(finding, allowed=0.0) for finding in those] for those in by_look[:2]] == [
            [dataclasses.replace(finding, allowed=0.0) for finding in by_look[2]]
        ] * 2
        found += by_look[2]
    assert bool(found) == isinstance(implementation, RoundsTheStateOnce)


def test_errors_near_their_tolerance_are_measured_by_more_runs_and_stay_right() -> None:
    """Row 2 would be over what 16 runs allow: what is right by RUNS runs is right, and keeps their multiple."""
    limits = InTwoParts([1.0, 1.0, 1.0, 1.0], [4.0, 3.0, 0.5, 2.0], [9.0, 9.0, 9.0, 9.0])
    findings, ratio = limits.judged(0.95, 0.7, 0.85, 0.9)
    assert (findings, limits.steps, ratio) == ([], [(1, [0, 2, 3])], pytest.approx(0.85))
    for errors, excused in (((0.8, 0.1, 0.2, 0.3), 0.0), ((0.95, 0.7, 0.85, 0.9), 2.0)):
        limits = InTwoParts([1.0, 1.0, 1.0, 1.0], [4.0, 3.0, 0.5, 2.0])
        findings, ratio = limits.judged(*errors, excused=excused)
        assert (findings, limits.steps, ratio) == ([], [], pytest.approx(max(errors))), errors
