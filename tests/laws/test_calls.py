"""The laws of any callable: right ones of many kinds raise no alarm, and each law sees a wrong one."""

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import pytest
import torch

from oracles.arithmetic.counter import mix_words
from properties.books import book_for, book_of
from properties.calls.case import CallCase
from properties.calls.domain import CallDomain
from properties.calls.laws import CALL_LAWS
from properties.words.example import Example
from tests import right_calls
from verify.bench.call_bench import CallBench
from verify.engine.check import Check
from verify.engine.drawing import seeded
from verify.engine.profiles import PROFILES, Profile
from verify.engine.state import Settings
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker
from verify.zoo import wrong_calls as calls

KILLED_BY = {
    calls.CallRaisesOnOneToken: "finite",
    calls.CallDividesByZero: "finite",
    calls.CallLeaksAcrossBoundaries: "packed",
    calls.CallGatesOfTheFirstShape: "packed",
    calls.CallPeeksAhead: "future",
    calls.CallScalesTheBatch: "samples",
    calls.CallReadsUnwritten: "memory",
    calls.CallTunesLater: "again",
    calls.CallSpansByIdentity: "history",
    calls.CallLargeBatchesDiffer: "batch",
    calls.CallAssumesContiguous: "strides",
    calls.CallScalesInPlace: "pure",
}
RIGHT = [
    "examples/any_callable.py:CausalAttention",
    *(
        f"tests/right_calls.py:{name}"
        for name, kind in vars(right_calls).items()
        if isinstance(kind, type) and kind.__module__ == right_calls.__name__
    ),
]


def drawn(spec: str, law: str, count: int, most: int = 10**6) -> list[Example]:
    """What a seed draws of a law, of at most so many tokens."""
    found: list[Example] = []
    strategy = CALL_LAWS[law].draw(adapter_of(spec).domain).filter(lambda example: example.case.tokens <= most)
    seeded(strategy, mix_words(0, law), count, found.append)
    return found


@pytest.mark.slow
def test_law_sees_the_mistake_in_the_default_profile_and_accepts_right_code() -> None:
    for wrong, law in KILLED_BY.items():
        examples = drawn(f"zoo/{wrong.__name__}", law, PROFILES["quick"].examples)
        broken = next(
            example for example in examples if execute(Run(law, f"zoo/{wrong.__name__}", example)).verdict is Verdict.BROKEN
        )
        assert execute(Run(law, "zoo/LinearAttention", broken)).verdict is Verdict.HOLDS, wrong


def test_default_profile_has_empty_sequences_between_others_and_long_ones() -> None:
    for name, law in [("LeaksPastEmpty", "samples"), ("PeeksInLongSequences", "future")]:
        spec, count = f"tests/long_calls.py:{name}", PROFILES["quick"].examples
        assert any(execute(Run(law, spec, example)).verdict is Verdict.BROKEN for example in drawn(spec, law, count)), name


def test_sequences_are_drawn_up_to_the_longest_of_the_domain() -> None:
    for longest in [60, 81, 150, 5000]:
        domain = CallDomain(inputs={"x": "B T D", "cu_seqlens": "offsets"}, longest=longest)
        found = list[Example]()
        seeded(CALL_LAWS["future"].draw(domain), 0, 60, found.append)
        most = max(max(example.case.lengths) for example in found)
        assert min(longest, 1030) / 2 < most <= min(longest, 1030), longest
        assert all(domain.outside(example.case) is None for example in found), longest


def test_every_law_has_a_wrong_callable_and_every_wrong_callable_a_law() -> None:
    assert set(KILLED_BY.values()) == set(CALL_LAWS)
    assert set(KILLED_BY) == {kind for kind in vars(calls).values() if isinstance(kind, type) and hasattr(kind, "letter")}


@pytest.mark.slow
def test_right_callables_raise_no_alarm() -> None:
    for spec in RIGHT:
        for name, law in CALL_LAWS.items():
            if law.needs(adapter_of(spec).domain) is None:
                for example in drawn(spec, name, 1 if name == "finite" else 2, most=60):
                    outcome = execute(Run(name, spec, example))
                    assert outcome.verdict in (Verdict.HOLDS, Verdict.BLIND), (name, str(example.case), outcome)


@pytest.mark.slow
def test_a_check_shrinks_a_callables_case_and_its_line_repeats_it(worker: Worker, tmp_path: pathlib.Path) -> None:
    settings = Settings("zoo/CallRaisesOnOneToken", ["finite"], Profile("few", 8))
    with Check(settings, [worker], Store(tmp_path), defects=[]) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.BROKEN
    run = Run.parse(report.run)
    assert run.example.case.lengths == (1,)
    assert run.example.case.sizes == "H:1,K:1,V:1"
    assert execute(run).verdict is Verdict.BROKEN


def test_cases_are_lines_inside_the_domain_and_repeat_their_numbers() -> None:
    for law in ("finite", "packed", "history"):
        for example in drawn("zoo/LinearAttention", law, 20):
            case = example.case
            assert CallCase.parse(str(case)) == case
            assert adapter_of("zoo/LinearAttention").domain.outside(case) is None
            case.spec.check(case.inputs())
            assert torch.equal(case.inputs().g, CallCase.parse(str(case)).inputs().g)
    assert book_for("packed", "call") is book_of(CallDomain())
    domain = CallDomain(inputs={"x": "B T D unit"}, sizes={"D": (1, 2)})
    assert CallDomain.from_json(json.loads(json.dumps(domain.to_json()))) == domain


def test_numbers_are_of_the_named_kinds() -> None:
    case = CallCase(
        (5, 5), takes="a:B.T.D.negative,b:B.T.D.unit,c:B.T.H.D.normalised.fp32", gives="y:B.T", sizes="D:64,H:2", dtype="bf16"
    )
    a, b, c = case.inputs().a, case.inputs().b, case.inputs().c
    assert (float(a.max()) <= 0, float(a.min()) >= -1, float(b.min()) >= 0, float(b.max()) <= 1) == (True,) * 4
    assert torch.allclose(c.norm(dim=-1), torch.ones(2, 5, 2))
    assert (a.dtype, c.dtype) == (torch.bfloat16, torch.float32)


WRONG_DOMAINS: list[tuple[dict[str, Any], str]] = [
    ({"inputs": {"x": "T B D"}}, "x must have the axes B T"),
    (
        {"inputs": {"x": "B T D positive"}},
        "x must have axes in capitals and some of fp32, negative, unit, normalised, got 'B.T.D.positive'",
    ),
    ({"inputs": {"x": "B T D", "offsets": "offsets"}}, "cu_seqlens and no other tensor must be offsets"),
    ({"inputs": {"w": "D"}}, "takes must name an input with axes B T"),
    ({"outputs": {"y": "D"}}, "gives must name outputs with axes B T or N"),
    ({"sizes": {"K": (1,)}}, "sizes must map axes among D to numbers from 1 up, got K"),
    ({"inputs": "B T D"}, "inputs must map names to axes"),
    ({"batched": False}, "batched must be True unless there is the input cu_seqlens"),
    ({"dtypes": ("fp8",)}, "dtypes must be a tuple of some of fp32"),
    ({"longest": 0}, "longest must be at least 1, got 0"),
]


def test_a_domain_that_cannot_be_is_refused_in_one_line() -> None:
    for wrong, message in WRONG_DOMAINS:
        with pytest.raises(ValueError, match=message) as refusal:
            CallDomain(**wrong)
        assert "\n" not in str(refusal.value), wrong


def test_a_bound_allows_a_rounding_and_no_visible_error() -> None:
    """A row that moves by a quarter of a unit in the last place is within the bound, one that moves by a thousand is not."""
    adapter = adapter_of("zoo/LinearAttention")
    for (off, verdict), dtype in itertools.product([(0.25, True), (1000.0, False)], ["fp32", "bf16"]):
        case = CallCase((9,), takes=adapter.domain.takes, gives="o:B.T.H.V", sizes="H:2,K:8,V:8", dtype=dtype)
        bench = CallBench(adapter, None, case)
        bound = bench.bounds(*bench.call(case))["o"]
        size = bound.value.norm(dim=-1)
        error = off * torch.finfo({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).eps * size
        assert bool((error <= bound.allowed).all()) is verdict, (off, dtype)
        assert bool((bound.allowed < 0.5 * size.clamp(min=1e-6)).float().mean() > 0.9), (off, dtype)


def test_changed_words_are_outside_the_domain() -> None:
    domain = adapter_of("zoo/LinearAttention").domain
    case = CallCase((3, 4), packed=True, takes=domain.takes, gives=domain.gives, sizes="H:2,K:8,V:8")
    assert domain.outside(case) is None
    for change in (
        {"sizes": "H:2,K:99,V:8"},
        {"lengths": (3, 0)},
        {"lengths": (3, 151)},
        {"takes": domain.takes.replace("g:", "h:")},
    ):
        assert domain.outside(dataclasses.replace(case, **change))
