"""Conventions of implementations: each word of a domain is drawn, refused and judged, and its right implementation holds.

A few cases here; benchmarks/soundness.py runs hundreds of each.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from oracles.rule.gated_delta import rule_of
from oracles.tolerance.bound import bounds
from properties.books import book_of
from properties.laws import common as common_laws
from properties.laws import views
from properties.modules.case import ModuleCase
from properties.modules.domain import ModuleDomain
from properties.palette import draw_palette, sample
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from properties.rules.laws import LAWS
from properties.traces.domain import TraceDomain
from properties.words.domain import LARGEST, Drawing
from properties.words.example import Example
from tests import right_interfaces
from tests.faults import not_refused
from tests.right_conventions import (
    CONVENTIONS,
    InputStates,
    LosesTheLastDecay,
    NoFinalState,
    OneInitialState,
    OneState,
    StatesAsGiven,
    WholeChunks,
)
from verify.adapters.base import Adapter
from verify.engine.shrink import shrink
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.execution.refusals import probe
from verify.process.outcome import FailureKind, Outcome, Verdict

INTERFACES = [
    kind
    for kind in vars(right_interfaces).values()
    if isinstance(kind, type) and issubclass(kind, Adapter) and kind.__module__ == right_interfaces.__name__
]
NAMES = [kind.__name__ for kind in CONVENTIONS]
ROWS = [(kind, *row) for kind, row in CONVENTIONS.items()]
LAWS_OF: dict[type[Adapter], tuple[str, ...]] = {  # besides the law oracle
    **dict.fromkeys((InputStates, StatesAsGiven), ("cut", "recurrent", "absent")),
    **dict.fromkeys((OneState, OneInitialState), ("cut", "permuted", "batch", "strides", "recall")),
    WholeChunks: ("cut", "history"),
    NoFinalState: ("absent", "packed", "permuted", "linear", "recall", "strides", "heads", "history"),
}
WORDS: list[dict[str, Any]] = [
    {"largest_values": "ordinary"},
    {"length_step": 64},
    {"length_step": 24, "packed": False, "drawing": Drawing(long=4096)},
    {"length_step": 64, "empty": False, "drawing": Drawing(long=1030)},
    {"longest": 64, "drawing": Drawing(long=4096)},
    {"longest": 192, "length_step": 64, "drawing": Drawing(long=1030)},
    {"longest": 200, "drawing": Drawing(reach=4)},
    {"key_widths": (64, 128, 256), "value_widths": (64, 1024)},
    {"key_widths": (64, 128), "value_widths": (128, 256), "equal_widths": True},
    {"offsets": ("int32",)},
    {"state_dtypes": ("input", "bf16"), "final_dtype": "state"},
    {"initial_states": "first", "final_states": "last"},
    {"initial_states": "first", "final_states": "none"},
    {"scales": ("one", "half")},
]


def small(law: str, domain: Domain, count: int, most: int = 200) -> list[Example]:
    """A few small examples of a law, with at most so many tokens."""
    return sample(LAWS[law].draw(domain).filter(lambda example: 0 < example.case.tokens <= most), 4, count)


def numbers(example: Example) -> int:
    """How many numbers the tensors of a case have, about."""
    case = example.case
    return case.tokens * case.value_heads * (case.key_dim + case.value_dim)


def outcomes(adapter: Adapter, law: str, examples: list[Example], patch: pytest.MonkeyPatch) -> list[Outcome]:
    """The outcomes of examples, those with the fewest numbers first, until one is broken."""
    patch.setitem(judging._LOADED, "it", adapter)
    found = []
    for example in sorted(examples, key=numbers):
        found.append(execute(Run(law, "it", example)))
        if found[-1].verdict is Verdict.BROKEN:
            break
    return found


@pytest.mark.parametrize(("kind", "without", "wrong", "law"), ROWS, ids=NAMES)
@pytest.mark.slow_after_first
def test_a_convention_is_needed_and_judged(
    kind: type[Adapter], without: dict[str, Any], wrong: type[Adapter], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right implementation holds with its word and has an alarm without it, and a wrong one in the convention is detected."""
    for name in ("oracle", *LAWS_OF.get(kind, ())):
        found = outcomes(kind(), name, small(name, kind.domain, 1), monkeypatch)
        findings = [outcome.findings for outcome in found]
        assert {outcome.verdict for outcome in found} <= {Verdict.HOLDS, Verdict.BLIND}, (name, findings)
    undeclared = kind()
    undeclared.domain = dataclasses.replace(kind.domain, **without)
    others = [example for example in small("oracle", undeclared.domain, 40) if kind.domain.outside(example.case)]
    assert outcomes(undeclared, "oracle", others, monkeypatch)[-1].verdict is Verdict.BROKEN
    precise = dataclasses.replace(wrong.domain, dtypes=wrong.domain.dtypes[:1])  # then few runs decide
    examples = small(law, precise, 20, most=200 if wrong is LosesTheLastDecay else 80)
    assert outcomes(wrong(), law, examples, monkeypatch)[-1].verdict is Verdict.BROKEN


@pytest.mark.slow
def test_every_law_draws_inside_the_domain() -> None:
    for words in WORDS:
        domain = Domain(**words)
        for law in LAWS.values():
            if law.needs(domain) is None:
                for example in sample(law.draw(domain), 3, 6):
                    law.accept(example)
                    assert domain.outside(example.case) is None, (law.name, example)
                    assert law.outside(domain, example) is None, (law.name, example)


def drawn(domain: Domain, count: int = 60) -> list[Case]:
    return [example.case for example in sample(LAWS["oracle"].draw(domain), 5, count)]


@pytest.mark.slow
def test_what_is_drawn() -> None:
    for number, largest in enumerate(LARGEST):
        cases = drawn(Domain(largest_values=largest))
        assert {case.values for case in cases} & {*LARGEST} == {*LARGEST[: number + 1]}
    cases = drawn(Domain(key_widths=(32, 640), value_widths=(48, 96), offsets=("int32",)), 120)
    assert {case.key_dim for case in cases} == {32, 640}
    assert {case.value_dim for case in cases} == {48, 96}
    assert {case.offsets for case in cases if case.packed} == {"int32"}
    cases = drawn(Domain(state_dtypes=("fp32", "input"), final_dtype="input"))
    assert {case.state_dtype for case in cases} == {"fp32", "input"}
    assert {case.final_dtype for case in cases} == {"input"}
    cases = drawn(Domain(length_step=64), 120)
    assert {1, 2, 3, 4} <= {case.tokens // 64 for case in cases}
    assert any(len(case.lengths) > 2 and min(case.lengths) == 0 for case in cases)
    palette = draw_palette(Domain(key_widths=(64, 128), value_widths=(64, 128)), 1, 12, ["oracle", "cut"])
    assert {entry.key_dim for entry in palette.entries} == {64, 128}


OUTSIDE: list[tuple[dict[str, Any], str, str]] = [
    ({"largest_values": "scaled"}, "lengths=3 values=large", "values=large: numbers are no larger than those of values=scaled"),
    ({"longest": 64}, "lengths=64+65 packed=yes", "lengths=64+65: sequences of more than 64 tokens are not supported"),
    ({"length_step": 64}, "lengths=64+3 packed=yes", "lengths=64+3: every length must be a multiple of 64"),
    ({"key_widths": (64, 128)}, "lengths=3 key_dim=96", "key_dim=96 is not among 64, 128"),
    ({"value_widths": (64,)}, "lengths=3 value_dim=16", "value_dim=16 is not among 64"),
    ({"offsets": ("int32",)}, "lengths=3 packed=yes", "offsets=int64 is not among int32"),
    ({}, "lengths=3 state=zero state_dtype=bf16", "state_dtype=bf16 is not among fp32"),
    ({"state_dtypes": ("input",)}, "lengths=3 state=zero", "state_dtype=fp32 is not among input"),
    ({"final_dtype": "input"}, "lengths=3", "final_dtype=fp32 is not input"),
    ({"initial_states": "first"}, "lengths=3 packed=yes state=zero", "initial_states=each is not first"),
    ({}, "lengths=3 packed=yes final_states=last", "final_states=last is not each"),
    ({}, "lengths=3 final_states=none", "final_states=none is not each"),
    ({"final_states": "none"}, "lengths=3", "final_states=each is not none"),
    ({"final_states": "none"}, "lengths=3 packed=yes", "final_states=each is not none"),
]


def test_what_is_outside() -> None:
    reasons = [Domain(**words).outside(Case.parse(line)) for words, line, _ in OUTSIDE]
    assert reasons == [reason for _, _, reason in OUTSIDE]


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"largest_values": "huge"}, "largest_values must be one of ordinary, scaled, large, great, got 'huge'"),
    ({"length_step": 0}, "length_step must be in 1..1024, got 0"),
    ({"length_step": True}, "length_step must be in 1..1024, got True"),
    ({"longest": 63}, "longest must be None, 1 or at least 64, got 63"),
    ({"longest": 160, "length_step": 64}, "longest must be None or at least 192 and a multiple of length_step=64, got 160"),
    ({"offsets": ()}, r"offsets must be a tuple of some of int64, int32, got \(\)"),
    ({"state_dtypes": ("fp64",)}, r"state_dtypes must be a tuple of some of fp32, input, bf16, got \('fp64',\)"),
    ({"final_dtype": "fp16"}, "final_dtype must be one of fp32, input, bf16, state, got 'fp16'"),
    ({"initial_states": "last"}, "initial_states must be one of each, first, got 'last'"),
    ({"final_states": "first"}, "final_states must be one of each, last, none, got 'first'"),
    ({"key_widths": (64, 0)}, r"key_widths must be a tuple of whole numbers in 1..1024, got \(64, 0\)"),
    (
        {"key_widths": (64,), "key_dims": (64, 128)},
        r"key_dims and width_step must be left out with key_widths, which lists the widths, got key_widths=\(64,\)",
    ),
    (
        {"key_widths": (64,), "value_widths": (128,), "equal_widths": True},
        "equal_widths=True needs a width that keys and values can have",
    ),
]


def test_what_cannot_be_is_refused() -> None:
    assert not_refused(lambda words: Domain(**words), IMPOSSIBLE) == []


def test_a_pool_has_no_use_for_words_about_other_states() -> None:
    with pytest.raises(
        ValueError, match="rule must leave out length_step, because a request may have any number of tokens, got 64"
    ):
        PoolDomain(rule=Domain(length_step=64, backward=False))
    for words, reason in (
        ({"left_out": ("none", "gate")}, "because decode has no such argument"),
        ({"options": (("fast", ("off", "on")),)}, "because a PoolDomain has options itself"),
        ({"state_dtypes": ("bf16",)}, "because a PoolDomain has state_dtypes, the dtypes of the pool, itself"),
    ):
        with pytest.raises(ValueError, match=f"rule must leave out {next(iter(words))}, {reason}, got"):
            PoolDomain(rule=Domain(backward=False, **words))
    domain = PoolDomain(rule=Domain(key_widths=(32, 64), value_widths=(64,), offsets=("int32",), largest_values="ordinary"))
    for law in book_of(domain).laws.values():
        if law.needs(domain) is None:
            for example in sample(law.draw(domain), 3, 8):
                assert domain.outside(example.case) is None, (law.name, example)


@pytest.mark.slow
def test_modules_and_traces() -> None:
    module = ModuleDomain(fixed_widths=(24, 100), offsets=("int32",), largest_values="scaled", drawing=Drawing(long=1030))
    for law in book_of(module).laws.values():
        if "causal_conv1d" in (law.about or ("causal_conv1d",)) and law.needs(module) is None:
            for example in sample(law.draw(module), 3, 8):
                assert module.outside(example.case) is None, (law.name, example)
    cases = [example.case for example in sample(book_of(module).laws["oracle"].draw(module), 5, 80)]
    assert {case.width for case in cases} == {24, 100}
    assert {case.values for case in cases} & {*LARGEST} == {"ordinary", "scaled"}
    assert module.outside(ModuleCase((3,), "causal_conv1d", width=16)) == "width=16 is not among 24, 100"
    assert module.outside(ModuleCase((3,), "causal_conv1d", width=24, values="great")) == (
        "values=great: numbers are no larger than those of values=scaled"
    )
    with pytest.raises(ValueError, match="widths and width_step must be left out with fixed_widths"):
        ModuleDomain(fixed_widths=(24,), width_step=8)
    traces = TraceDomain(key_widths=(8, 32), value_widths=(16,))
    for law in book_of(traces).laws.values():
        if law.needs(traces) is None:
            for example in sample(law.draw(traces), 3, 4):
                assert traces.outside(example.case) is None, (law.name, example)
    with pytest.raises(ValueError, match="key_dims and width_step must be left out with key_widths"):
        TraceDomain(key_widths=(8,), key_dims=(8, 16))


def test_a_law_that_cuts_says_what_is_outside() -> None:
    step, one = Domain(length_step=64), Domain(final_states="last")
    case = Case.parse("lengths=64+128 packed=yes")
    assert LAWS["cut"].outside(step, Example(case, 63)) == "at=63: every length must be a multiple of 64"
    assert LAWS["cut"].outside(step, Example(case, 64)) is None
    why = "lengths=64+128: the states of several packed sequences cannot be carried over a cut"
    assert LAWS["cut"].outside(one, Example(case, 63)) == why
    assert LAWS["recurrent"].needs(step) == "single tokens are not supported: every length is a multiple of 64"


def test_shrinking_stays_inside_the_domain() -> None:
    domain, tried = Domain(length_step=64, key_widths=(32, 64)), []

    def fails(example: Example) -> bool:
        tried.append(example)
        return max(example.case.lengths) >= 128

    start = Example(Case.parse("lengths=64+0+448+192 packed=yes key_dim=64 seed=7"), 320)
    shrunk = shrink(start, LAWS["cut"], fails, lambda runs: runs < 200, domain=domain)
    assert shrunk.finished
    assert (str(shrunk.example.case), shrunk.example.at) == ("lengths=128 key_dim=32 value_dim=1 backward=no", 64)
    assert all(domain.outside(example.case) is None and example.at is not None and example.at % 64 == 0 for example in tried)


@pytest.mark.parametrize("kind", [InputStates, OneState, WholeChunks])
def test_illegal_inputs_are_made_in_the_convention(kind: type[Adapter]) -> None:
    found = {name: probe(kind(), name) for name in ("g of another length", "one initial state for two sequences")}
    assert found["g of another length"] == "refuses (RuntimeError)"
    one = "not run: a state for each sequence is unsupported"
    assert found["one initial state for two sequences"] == (one if kind is OneState else "refuses (IndexError)")


def test_the_truth_is_taken_at_the_rounded_state() -> None:
    case = Case.parse(
        "lengths=5+3 packed=yes state=random state_dtype=bf16 final_dtype=bf16 initial_states=first final_states=last"
    )
    inputs, cotangents = case.inputs(), case.cotangents()
    assert inputs.state.dtype == cotangents["final_state"].dtype == torch.bfloat16
    assert inputs.state[0].any()
    assert not inputs.state[1].any()
    assert cotangents["final_state"][1].any()
    assert not cotangents["final_state"][0].any()
    whole = bounds(rule_of("gated_delta_rule"), inputs.replaced(state=inputs.state.float()), cotangents, "recurrent")
    found = bounds(case.spec, inputs, cotangents, "recurrent")
    assert all(torch.equal(found[name].value, bound.value) for name, bound in whole.items())
    assert bool((found["final_state"].allowed[0] > 1e100).all())  # the first sequence returns none
    assert bool((found["dh0"].allowed[1] > 1e100).all())
    ulp = found["final_state"].value[1].norm(dim=-1) * 2**-7
    assert bool((found["final_state"].allowed[1] >= ulp).all())
    assert bool((found["final_state"].allowed[1] < 12 * ulp).all())
    assert torch.equal(found["o"].allowed, whole["o"].allowed)


def test_lines_of_earlier_versions_mean_the_same() -> None:
    line = "lengths=5+3 packed=yes dtype=bf16 state=random seed=3"
    case = Case.parse(line)
    assert str(case) == line
    assert (case.state_dtype, case.final_dtype, case.initial_states, case.final_states) == ("fp32", "fp32", "each", "each")
    assert case.spec is rule_of("gated_delta_rule")
    assert case.inputs().state.dtype == torch.float32


# Right calls that were called wrong until 25 November 2026: the gradient of bf16 states was rounded as if fp16 had its range, and a
# later call in another dtype was expected to return states in the dtype of the first call.
CALLS = {
    "dh0 in bf16 of a call in fp16": "law=oracle adapter=tests/right_conventions.py:HalfInitialStates lengths=16+16 value_heads=2 "
    "key_dim=1 value_dim=1 dtype=fp16 gate=10 beta=one values=great state=zero qk_norm=yes state_dtype=bf16 seed=40304",
    "states in the dtype of each call": "law=history variant=others adapter=tests/right_conventions.py:InputStates lengths=6+2 "
    "packed=yes key_dim=1 dtype=fp16 gate=1000 beta=one values=great qk_norm=yes offsets=int32 final_dtype=input seed=48125",
}


@pytest.mark.parametrize("line", CALLS.values(), ids=CALLS)
def test_a_right_call_that_had_an_alarm_holds(line: str) -> None:
    outcome = execute(Run.parse(line))
    assert outcome.verdict is Verdict.HOLDS, outcome.findings


def test_a_gradient_of_bf16_states_in_fp16_is_judged() -> None:
    """It was rounded to zero in every disturbed run, so the tolerance was 12 times the gradient."""
    right = Run.parse(
        "law=oracle adapter=tests/right_conventions.py:HalfInitialStates lengths=16+16 value_heads=2 key_dim=8 value_dim=8 "
        "dtype=fp16 gate=10 state=random state_dtype=bf16 seed=1"
    )
    assert execute(right).verdict is Verdict.HOLDS
    outcome = execute(dataclasses.replace(right, adapter="tests/right_conventions.py:HalfOfTheGradient"))
    assert outcome.verdict is Verdict.BROKEN
    assert [finding.output for finding in outcome.findings] == ["dh0"]


def test_a_state_in_the_dtype_of_the_first_call_is_found() -> None:
    run = dataclasses.replace(
        Run.parse(CALLS["states in the dtype of each call"]), adapter="tests/right_conventions.py:DtypeOfTheFirstCall"
    )
    (finding,) = execute(run).findings
    assert (finding.output, finding.kind) == ("final_state", FailureKind.DTYPE)


@pytest.mark.slow
def test_another_interface_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in INTERFACES:
        found = outcomes(kind(), "oracle", small("oracle", kind.domain, 1), monkeypatch)
        assert {outcome.verdict for outcome in found} == {Verdict.HOLDS}, [outcome.findings for outcome in found]


class OneStateWrongAlone(OneState):
    """In a call that is not packed, the final state is wrong."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        o, state = super().answer(x, o, state)
        return o, state if state is None or x.cu_seqlens is not None else 1.5 * state


def test_a_sequence_alone_is_judged_in_the_states_that_a_packed_call_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "packed=yes value_dim=4 gate=64 state=random initial_states=first final_states=last backward=no"
    example = Example(Case.parse(f"lengths=5+3 {words}"), 0)
    assert outcomes(OneState(), "packed", [example], monkeypatch)[0].verdict is Verdict.HOLDS
    (outcome,) = outcomes(OneStateWrongAlone(), "packed", [example], monkeypatch)
    assert [finding.output for finding in outcome.findings] == ["final_state of sequence 0 alone"]


class Watched:
    """A bench that notes the inputs of every run and returns nothing."""

    def __init__(self, domain: Any) -> None:
        self.domain, self.seen = domain, list[Inputs]()

    def call(self, case: Any) -> tuple[Inputs, None]:
        return case.inputs(), None

    def bounds(self, inputs: Inputs, cotangents: Any) -> dict[str, Any]:
        return {}

    def run(self, inputs: Inputs, cotangents: Any) -> dict[str, Tensor]:
        self.seen.append(inputs)
        return {}


def test_the_one_state_of_a_packed_call_has_other_strides_too() -> None:
    bench: Any = Watched(OneState.domain)
    case = Case.parse("lengths=5+3 packed=yes state=random initial_states=first final_states=last")
    for variant in ("strided", "expanded"):
        assert not [*views.strides(bench, Example(case, variant=variant))]
    strided, expanded = (inputs.state for inputs in bench.seen)
    assert torch.equal(strided, case.inputs().state)
    assert not strided.is_contiguous()
    assert not expanded[1].any()


def test_numbers_in_padding_are_those_of_the_domain() -> None:
    bench: Any = Watched(ModuleDomain(largest_values="ordinary"))
    case = ModuleCase((20, 20), "causal_conv1d", dtype="fp32")
    assert any(case.pads())
    assert not [*common_laws.left_padding(bench, Example(case))]
    assert max(float(inputs.x.abs().max()) for inputs in bench.seen) <= 1


def test_a_case_without_a_state_has_no_dtype_of_states() -> None:
    drawn = sample(cases(Domain(state_dtypes=("input", "bf16")), longest=8), 3, 60)
    assert {case.state_dtype for case in drawn if case.state == "none"} == {"fp32"}
    assert {case.state_dtype for case in drawn if case.state != "none"} == {"input", "bf16"}
    start = Example(Case((3,), left_out="both", beta="one", state="random", state_dtype="bf16"))
    shrunk = shrink(start, LAWS["oracle"], lambda example: example.case.without_beta, lambda runs: runs < 200)
    assert str(shrunk.example.case) == "lengths=0 key_dim=1 value_dim=1 beta=one left_out=beta backward=no"


@pytest.mark.parametrize(("device", "odd"), [("cpu", True), ("cuda", False)])
def test_the_law_pure_needs_no_kernels_of_its_own_on_a_gpu(device: str, *, odd: bool) -> None:
    bench: Any = Watched(OneState.domain)
    bench.device = device
    assert [*views.pure(bench, Example(Case.parse("lengths=5")))]
    (inputs,) = bench.seen
    assert {inputs[name].storage_offset() % 16 > 0 for name in ("q", "k", "v", "g", "beta")} == {odd}
