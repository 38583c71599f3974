"""The laws of a layer's modules: drawn inside domains, each seen to kill, held by right code and by released code."""

import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

from benchmarks import soundness
from oracles.operation import Inputs
from oracles.tolerance.bound import bounds
from properties.books import book_for, book_named, book_of
from properties.laws.common import FACTORS
from properties.modules.case import MODULES, ModuleCase, words_of
from properties.modules.domain import CONV, GATES, NORMS, ModuleDomain
from properties.modules.illegal import MODULE_INPUTS, OF_MODULES
from properties.modules.laws import MODULE_LAWS, POINTWISE
from properties.words.domain import VIEWS
from properties.words.example import Example
from tests import right_modules
from tests.kills import Fewer, Kill, assert_killed_alone, rows
from tests.needs import need_adapter
from tests.random_domains import faults
from tests.together import for_each
from verify.adapters.libraries import LIBRARIES
from verify.adapters.loader import load
from verify.adapters.registry import BOOKS_OF_BUILT_IN
from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.shrink import shrink
from verify.engine.state import Settings
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.execution.refusals import probe
from verify.findings import known
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker
from verify.zoo import modules, wrong_convolutions, wrong_module_gates, wrong_norms
from verify.zoo.animals import animals

FEW = Fewer("few", 1, large=False)
_ALL = ("oracle", "absent", "linear", "permuted", "memory", "history", "recompute", "strides", "pure")
CAN = {
    "causal_conv1d": {*_ALL, "recurrent", "packed", "cut", "whole", "copied", "future", "samples", "channels", "left_padding"},
    "gdn_gate": {*_ALL, "tokens", "heads"},
    "kda_gate": {*_ALL, "tokens", "heads", "channels"},
    "l2norm": {*_ALL, "tokens", "heads", "scaled", "repeated"},
    "gated_rms_norm": {*_ALL, "tokens", "heads", "scaled"},
    "norm_gate_linear": {*_ALL, "tokens", "scaled"},
}
# A domain, and the laws about its operation that need something else, with what the domain lacks.
DOMAINS: dict[str, tuple[ModuleDomain, dict[str, str]]] = {
    **{operation: (ModuleDomain(operation), {}) for operation in MODULES},
    "one dtype": (ModuleDomain("l2norm", dtypes=("bf16",)), {}),
    "fp16 only": (
        ModuleDomain("gated_rms_norm", dtypes=("fp16",)),
        {"linear": "only fp16 is supported", "scaled": "only fp16 is supported"},
    ),
    "wide norm": (ModuleDomain("l2norm", widths=(600, 700), width_step=100), {}),
    "one eps": (ModuleDomain("l2norm", eps=("1e-5",)), {"scaled": "another eps", "absent": "no argument is optional"}),
    "the default eps": (ModuleDomain("gated_rms_norm", eps=("default", "1e-6"), without_weight=False), {"scaled": "another eps"}),
    "a gate alone": (ModuleDomain("kda_gate", beta=False, without_dt_bias=False), {"absent": "no argument is optional"}),
    "beta below one": (ModuleDomain("gdn_gate", negative_eigenvalues=False, empty=False), {}),
    "forward of gates": (
        ModuleDomain("gdn_gate", backward=False),
        {"linear": "no output or gradient is linear", "recompute": "backward is not supported"},
    ),
    "unpacked": (ModuleDomain(packed=False), {"packed": "packed is not supported"}),
    "packed alone": (ModuleDomain(batched=False, empty=False), {"packed": "batched", "recurrent": "batched"}),
    "no state": (
        ModuleDomain(initial_state=False, final_state=False),
        {"recurrent": "initial state", "packed": "initial state", "cut": "initial state", "copied": "final state"},
    ),
    "silu and a bias": (ModuleDomain(activations=("silu",), conv_widths=(4,), bias=True), {"whole": "activation=none"}),
    "wide taps": (ModuleDomain(conv_widths=(16, 9)), {"whole": "conv_width up to 8"}),
    "forward with silu": (
        ModuleDomain(activations=("silu",), backward=False, bias=False, views=False),
        {"linear": "no output or gradient", "whole": "activation=none", "strides": "views", "recompute": "backward"},
    ),
    "one channel": (ModuleDomain(widths=(1, 1)), {"channels": "more than one channel"}),
    "short": (ModuleDomain(longest=5), {}),
    "states of W - 1 columns": (ModuleDomain(state_columns="W-1"), {}),
    "a mask": (ModuleDomain(attention_mask=True), {}),
}
for _domain, _lacking in DOMAINS.values():
    if _domain.operation in CONV and not _domain.attention_mask:
        _lacking["left_padding"] = "attention mask is not supported"


def drawn(domain: ModuleDomain, law: str, count: int) -> list[Example]:
    examples: list[Example] = []

    @settings(max_examples=count, phases=[Phase.generate])
    @given(example=MODULE_LAWS[law].draw(domain))
    def collect(example: Example) -> None:
        examples.append(example)

    collect()
    return examples


# Laws draw inside a domain


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.slow_after_first
def test_every_law_draws_what_the_domain_promises_and_the_law_accepts(name: str) -> None:
    domain, lacking = DOMAINS[name]
    possible = CAN[domain.operation] - lacking.keys()
    reasons = {law.name: law.needs(domain) for law in MODULE_LAWS.values()}
    assert {name for name, reason in reasons.items() if reason is None} == possible
    assert all(lacking.get(name, "it is not about") in reason for name, reason in reasons.items() if reason is not None)
    assert faults(domain, 1, 4) == {}


def test_laws_are_about_the_operations_of_the_table_above() -> None:
    for name, law in MODULE_LAWS.items():
        assert set(law.about) == {operation for operation in MODULES if name in CAN[operation]}
    assert set().union(*CAN.values()) == set(MODULE_LAWS)


@pytest.mark.parametrize("operation", MODULES)
@pytest.mark.slow
def test_variants_and_places_are_all_drawn(operation: str) -> None:
    variants = {
        "absent": {
            "causal_conv1d": {"final_state", "bias", "state", "offsets"},
            "l2norm": {"eps"},
            "gated_rms_norm": {"weight", "eps"},
            "norm_gate_linear": {"bias", "weight", "eps"},
        },
        "linear": {
            "causal_conv1d": {"inputs", "weight"},
            "gated_rms_norm": {"weight"},
            "norm_gate_linear": {"weight"},
        },
    }
    for law in (law for law in MODULE_LAWS.values() if operation in law.about and (law.variants or law.place)):
        examples = drawn(ModuleDomain(operation), law.name, 240 if law.variants else 20)
        if law.variants:
            default = {"dt_bias"} if law.name == "absent" else set[str]()
            views = {*VIEWS, "tokens_first", "one_channel", "far_tokens", "far_sequences"}
            views |= {"heads_first", "far_heads"} if "heads" in words_of(operation) else set()
            views -= {"indices"}  # which a domain must name
            if law.name in ("history", "recompute"):  # streams need a GPU, and freezing a part of the inputs needs two
                default = {*law.variants} - {"streams"} - ({"frozen"} if operation == "l2norm" else set())
                if all(len(example.case.spec.outputs) == 1 for example in examples):
                    default -= {"one_output"}
            want = variants.get(law.name, {"strides": views}).get(operation if law.name in variants else law.name, default)
            want = want | ({*FACTORS} if law.name == "linear" else set())
            assert {example.variant for example in examples} == want, law.name
        if law.place is not None:
            assert len({example.at for example in examples}) >= 3, law.name
            assert all(example.at in law.place(example.case) for example in examples)


@pytest.mark.slow
def test_cases_reach_what_finds_defects() -> None:
    conv = [example.case for example in drawn(ModuleDomain(), "oracle", 300)]
    shares = {
        "packed": lambda case: case.packed,
        "a sequence shorter than the taps, with a state": lambda case: (
            case.state == "random" and any(0 < length < case.conv_width for length in case.lengths)
        ),
        "an empty sequence beside others": lambda case: 0 in case.lengths and case.tokens > 0,
        "over a block of 64": lambda case: max(case.lengths) > 64,
        "channels that no block divides": lambda case: case.width > 16 and case.width % 16,
        "no final state": lambda case: not case.final_state,
        "no cotangent of the oldest column": lambda case: case.final_state and not case.oldest,
        "silu with a bias": lambda case: case.activation == "silu" and case.bias,
        "values large": lambda case: case.values == "large",
    }
    counts = {what: sum(bool(seen(case)) for case in conv) for what, seen in shares.items()}
    assert min(counts.values()) >= 8, counts
    short = [example.case for example in drawn(ModuleDomain(state_columns="W-1", conv_widths=(4, 2, 3)), "oracle", 300)]
    short += [example.case for example in drawn(ModuleDomain(state_columns="W-1", packed=False, longest=9), "oracle", 300)]
    for beside in (-1, 0, 1):
        for packed in (True, False):
            near = [case for case in short if case.state == "random" and case.conv_width + beside in case.lengths]
            assert sum(case.packed is packed and len(case.lengths) > 1 for case in near) >= 4, (beside, packed)
    norms = [example.case for example in drawn(ModuleDomain("l2norm"), "oracle", 800)]  # of 400 about 3 have the width 520
    assert {1, 7, 520} <= {case.width for case in norms}
    assert sum(case.values == "small" for case in norms) >= 40
    assert max(case.tokens * case.heads * case.width for case in norms) <= 2**15


# Domains and lines


@for_each(
    ("domain", "line", "reason"),
    [
        (ModuleDomain("l2norm"), "lengths=5 op=gdn_gate", "op=gdn_gate is not l2norm"),
        (ModuleDomain("l2norm", dtypes=("bf16",)), "lengths=5 op=l2norm", "dtype=fp32 is not among bf16"),
        (ModuleDomain("l2norm", widths=(64, 128)), "lengths=5 op=l2norm", "width=16 is not in 64..128"),
        (ModuleDomain("l2norm", width_step=3), "lengths=5 op=l2norm", "width=16 is not in 1..16384 in steps of 3"),
        (ModuleDomain("l2norm", eps=("1e-5",)), "lengths=5 op=l2norm", "eps=1e-6 is not among 1e-5"),
        (ModuleDomain(conv_widths=(2, 3)), "lengths=5 op=causal_conv1d", "conv_width=4 is not among 2, 3"),
        (ModuleDomain(activations=("silu",)), "lengths=5 op=causal_conv1d", "activation=none is not among silu"),
        (ModuleDomain(bias=False), "lengths=5 op=causal_conv1d bias=yes", "bias=yes is not supported"),
        (ModuleDomain(packed=False), "lengths=5 op=causal_conv1d packed=yes", "packed=yes is not supported"),
        (ModuleDomain(batched=False), "lengths=5 op=causal_conv1d", "packed=no is not supported"),
        (ModuleDomain(empty=False), "lengths=0 op=causal_conv1d", "empty sequences are not supported"),
        (
            ModuleDomain(initial_state=False),
            "lengths=5 op=causal_conv1d state=zero",
            "state=zero: an initial state is not supported",
        ),
        (ModuleDomain(final_state=False), "lengths=5 op=causal_conv1d", "final_state=yes: a final state is not returned"),
        (
            ModuleDomain(state_columns="W-1"),
            "lengths=5 op=causal_conv1d",
            "state_columns=W is not W-1",
        ),
        (ModuleDomain(backward=False), "lengths=5 op=causal_conv1d", "backward=yes is not supported"),
        (
            ModuleDomain("gated_rms_norm", without_weight=False),
            "lengths=5 op=gated_rms_norm weight=no",
            "weight=no is not supported",
        ),
        (
            ModuleDomain("norm_gate_linear", widths=(8, 20)),
            "lengths=5 op=norm_gate_linear out_width=21",
            "out_width=21 is not in 8..20",
        ),
        (ModuleDomain("norm_gate_linear", bias=False), "lengths=5 op=norm_gate_linear bias=yes", "bias=yes is not supported"),
        (ModuleDomain("gdn_gate", without_dt_bias=False), "lengths=5 op=gdn_gate dt_bias=no", "dt_bias=no is not supported"),
        (ModuleDomain("gdn_gate", beta=False), "lengths=5 op=gdn_gate", "beta=yes is not supported"),
        (
            ModuleDomain("gdn_gate", negative_eigenvalues=False),
            "lengths=5 op=gdn_gate allow_neg_eigval=yes",
            "allow_neg_eigval=yes is not supported",
        ),
    ],
)
def test_domain_says_why_a_case_is_outside(domain: ModuleDomain, line: str, reason: str) -> None:
    assert domain.outside(ModuleCase.parse(line)) == reason
    assert ModuleDomain(ModuleCase.parse(line).operation).outside(ModuleCase.parse(line)) is None


@for_each(
    ("fields", "message"),
    [
        ({"operation": "kda"}, "operation must be one of causal_conv1d, .* got 'kda'"),
        ({"dtypes": ()}, "dtypes must be a tuple of some of fp32, bf16, fp16, got"),
        ({"dtypes": "fp32"}, "dtypes must be a tuple"),
        ({"activations": ("relu",)}, r"activations must be a tuple of some of none, silu, got \('relu',\)"),
        ({"eps": (1e-6,)}, "eps must be a tuple of some of 1e-6, 1e-5, default"),
        ({"widths": (5, 3)}, r"widths must contain a width in steps of 1, from 1 to 16384, got \(5, 3\)"),
        ({"widths": (5, 7), "width_step": 8}, "widths must contain a width in steps of 8"),
        ({"widths": 5}, r"widths must be a tuple \(least, most\), got 5"),
        ({"width_step": 0}, "width_step must be at least 1, got 0"),
        ({"conv_widths": (0,)}, r"conv_widths must be a tuple of whole numbers in 1..64, got \(0,\)"),
        ({"state_columns": 3}, "state_columns must be one of W, W-1, got 3"),
        ({"longest": 0}, "longest must be at least 1, got 0"),
        ({"packed": False, "batched": False}, "packed or batched must be True, got neither"),
    ],
)
def test_wrong_domain_is_refused_by_name_value_and_rule(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ModuleDomain(**fields)


def test_lines_find_their_book_by_law_and_operation() -> None:
    for operation in MODULES:
        assert book_for("oracle", operation).name == "modules"
    assert book_for("parallel", "causal_conv1d").name == "paths"
    assert book_for("oracle", None).name == "rules"
    assert book_of(ModuleCase((4,), "l2norm")) is book_of(ModuleDomain()) is book_named("modules")
    with pytest.raises(ValueError, match=r"op must be one of .*l2norm.* for law oracle, got 'l3norm'"):
        book_for("oracle", "l3norm")
    assert book_named("modules").about("gdn_gate") == [name for name in MODULE_LAWS if name in CAN["gdn_gate"]]


REFUSED = {
    "a law of other operations": ("whole", "lengths=4 op=l2norm", None, None, "law whole needs op=causal_conv1d"),
    "no place": ("oracle", "lengths=4 op=l2norm", 3, None, "law oracle takes no at, got at=3"),
    "a place beyond the tokens": ("tokens", "lengths=4 op=l2norm", 4, None, "at must be in 0..3 for law tokens"),
    "one head": ("heads", "lengths=4 op=l2norm", 0, None, "at must be possible, but this case has no place for it"),
    "one channel": ("channels", "lengths=4 op=causal_conv1d width=1", 0, None, "at must be possible"),
    "nothing whole": ("whole", "lengths=4 op=causal_conv1d", None, None, "law whole needs values=whole"),
    "sums beyond eight bits": (
        "whole",
        "lengths=4 op=causal_conv1d conv_width=9 dtype=bf16 values=whole",
        None,
        None,
        "conv_width up to 8, or dtype=fp32",
    ),
    "no final state": ("copied", "lengths=4 op=causal_conv1d final_state=no", None, None, "law copied needs final_state=yes"),
    "a state that is given": ("absent", "lengths=4 op=causal_conv1d state=zero", None, "state", "law absent needs state=none"),
    "an eps that is given": ("absent", "lengths=4 op=l2norm", None, "eps", "law absent needs eps=default"),
    "a bias of a norm": ("absent", "lengths=4 op=l2norm", None, "bias", "law absent needs an operation that has bias"),
    "offsets of two": ("absent", "lengths=4+4 op=causal_conv1d", None, "offsets", "law absent needs one sequence, packed=no"),
    "linear through silu": (
        "linear",
        "lengths=4 op=causal_conv1d activation=silu",
        None,
        "inputs",
        "law linear needs activation=none",
    ),
    "fp16 underflows": ("linear", "lengths=4 op=l2norm dtype=fp16", None, "cotangents", "numbers away from underflow"),
    "no cotangents": ("linear", "lengths=4 op=l2norm backward=no", None, "cotangents", "law linear needs backward=yes"),
    "no weight": ("linear", "lengths=4 op=gated_rms_norm weight=no", None, "weight", "law linear needs weight=yes"),
    "not linear": ("linear", "lengths=4 op=l2norm", None, "inputs", "law linear needs op=causal_conv1d, got"),
    "scaled underflows": ("scaled", "lengths=4 op=l2norm values=large", None, None, "no fp16, no values=large"),
    "padding of a pack": (
        "left_padding",
        "lengths=4+5 op=causal_conv1d packed=yes",
        None,
        None,
        "left_padding needs packed=no state=none",
    ),
    "one token at a time of a pack": ("recurrent", "lengths=4+5 op=causal_conv1d packed=yes", 3, None, "one sequence, packed=no"),
}


@for_each("what", REFUSED)
def test_law_refuses_an_example_that_it_cannot_check_in_one_line(what: str) -> None:
    law, line, at, variant, message = REFUSED[what]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the text is compared below
        MODULE_LAWS[law].accept(Example(ModuleCase.parse(line), at, variant))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


# Laws have been seen to fail


KILLED_BY: dict[str, tuple[Kill, ...]] = {
    "ConvLeaks": (Kill("packed", 6, 2), Kill("samples", 1, 2), Kill("oracle", 1, 2)),
    "ConvInt32Offsets": (Kill("oracle", 1, 2, shown=(0, 18)),),
    "ConvForgetsRest": (Kill("copied"), Kill("cut", 6)),
    "ConvStateTooEarly": (Kill("recurrent", 2), Kill("oracle", 2)),
    "ConvStateRounded": (Kill("copied"),),
    "ConvStateOfTheFirst": (Kill("oracle", 1, 2),),
    "ConvStateNewestFirst": (Kill("cut", 3),),
    "ConvStateFromColumn0": (Kill("recurrent", 2),),
    "ConvShortShifted": (Kill("recurrent", 2), Kill("oracle")),
    "ConvShortDropsLate": (Kill("copied"), Kill("cut", 6)),
    "ConvShortRounded": (Kill("copied", seeds=3), Kill("oracle")),
    "ConvRepeatsTheFirst": (Kill("absent"),),
    "ConvDecodesLate": (Kill("recurrent", 3),),
    "ConvResetsAtBlocks": (Kill("oracle", 193),),
    "ConvFlipsWeight": (Kill("oracle"),),
    "ConvBiasAfterSilu": (Kill("oracle"),),
    "ConvAlwaysSilu": (Kill("oracle"), Kill("whole")),
    "ConvSiluOverflows": (Kill("oracle", 60, shown=(0, 38)),),
    "ConvBiasOfOnes": (Kill("absent"),),
    "ConvPeeks": (Kill("future", 17),),
    "ConvClips": (Kill("linear"),),
    "ConvSumsTooLong": (Kill("whole"),),
    "ConvLowChannel": (Kill("oracle", 16, shown=(0, 12)),),
    "ConvWholeBlocks": (Kill("oracle", 64),),
    "ConvDweightWithoutTheLast": (Kill("oracle"), Kill("whole")),
    "ConvDweightOfBlocks": (Kill("oracle"),),
    "ConvDbiasOfTheFirst": (Kill("oracle", 1, 2),),
    "ConvSlopeOfStored": (Kill("oracle"),),
    "ConvDropsStateGradient": (Kill("cut", 2),),
    "ConvNoGradientIntoState": (Kill("oracle"),),
    "ConvMaskIgnored": (Kill("left_padding", 6),),
    "ConvMaskOfOutputs": (Kill("left_padding", 6),),
    "ConvMaskOfTheFirstRow": (Kill("left_padding", 4, 2),),
    "ConvMaskEndsLate": (Kill("left_padding", 3),),
    "ConvMaskTwentyBitsDown": (Kill("left_padding", 15, 2),),
    "ConvStepsShiftACopy": (Kill("oracle", 2), Kill("copied", 1, 2)),
    "ConvStepsReadEarly": (Kill("oracle"),),
    "ConvStepsOverwriteTheOldest": (Kill("copied"), Kill("recurrent", 2)),
    "ConvStepsOfOneRow": (Kill("oracle", 2, 2),),
    "ConvMixesChannels": (Kill("channels", 3),),
    "ConvMixesSequences": (Kill("samples", 2, 2),),
    "ConvAssumesContiguous": (Kill("strides", 2),),
    "ConvAddressesIn32Bits": (Kill("strides", 6, shown=(0, 19)),),
    "ConvWeightByAddress": (Kill("history"),),
    "ConvOnesBeforeTheyAreFull": (Kill("history", shown=(0, 8)),),
    "ConvWritesBeforeX": (Kill("pure"),),
    "ConvShiftsItsState": (Kill("pure"),),
    "ConvReadsUnwritten": (Kill("memory"),),
    "ConvSecondSlotIsOff": (Kill("permuted", 1, 2),),
    "GateBiasInHalf": (Kill("oracle", 2),),
    "GateLinearAt2": (Kill("oracle", 4),),
    "GateOverflows": (Kill("oracle", 8),),
    "GateBiasAfterSoftplus": (Kill("oracle"),),
    "GateRawA": (Kill("oracle"),),
    "GateHeadsShareA": (Kill("heads"), Kill("oracle")),
    "GateSlopeOfA": (Kill("oracle"),),
    "GateBiasOfOneRow": (Kill("oracle", 1, 2),),
    "GateBiasOfOnes": (Kill("absent"),),
    "GateNotDoubled": (Kill("oracle"),),
    "GateFlatAtZero": (Kill("oracle", 4, shown=(0, 16)),),
    "GateReadsTheNext": (Kill("tokens", 2),),
    "GateSkipsARow": (Kill("oracle", 65, shown=(0, 17)),),
    "GateOfRounded": (Kill("oracle", shown=(0, 37)),),
    "GateHeadsShareAnExponent": (Kill("heads", 8),),
    "KdaGateLastChannels": (Kill("heads", 2, shown=(0, 12)),),
    "KdaGateFlatBias": (Kill("channels"), Kill("oracle")),
    "KdaGateMixesChannels": (Kill("channels", 8),),
    "NormEpsInsideMean": (Kill("oracle"),),
    "NormEpsAsFloor": (Kill("scaled", 8), Kill("oracle", 5)),
    "NormEpsAfterTheRoot": (Kill("oracle", 5),),
    "NormEpsTenTimes": (Kill("absent", 65),),
    "NormIgnoresEps": (Kill("oracle", 3), Kill("scaled")),
    "NormSecondEps": (Kill("scaled"),),
    "NormOverHeads": (Kill("heads"), Kill("repeated")),
    "NormSquaresInHalf": (Kill("oracle", 8, shown=(0, 49)),),
    "NormWithoutProjection": (Kill("oracle"),),
    "NormWithoutTheTail": (Kill("oracle"),),
    "NormLeavesARow": (Kill("memory"),),
    "NormTokensShareAnExponent": (Kill("tokens", 8, 3),),
    "NormByHeads": (Kill("repeated"),),
    "GatedNormGateFirst": (Kill("oracle"),),
    "GatedNormEpsTenTimes": (Kill("oracle", 8),),
    "GatedNormEpsInSum": (Kill("oracle"),),
    "GatedNormPlusOne": (Kill("linear"), Kill("oracle")),
    "GatedNormSigmoid": (Kill("oracle"),),
    "GatedNormOfOneHead": (Kill("oracle"),),
    "GatedNormRounds": (Kill("oracle"),),
    "GatedNormAbsentWeight": (Kill("absent"),),
    "GatedNormClipsWeight": (Kill("linear"),),
    "NormGateLinearWithoutGate": (Kill("oracle"),),
    "NormGateLinearBiasAgain": (Kill("oracle", shown=(0, 65)),),
    "NormGateLinearBiasOfOnes": (Kill("absent"),),
    "NormGateLinearBiasOfOneRow": (Kill("oracle", 1, 2),),
    "NormGateLinearLeavesTheTail": (Kill("permuted"),),
    "NormGateLinearByHeads": (Kill("oracle"),),
    "NormGateLinearOfHalf": (Kill("oracle"),),
    "NormGateLinearTokensShareAnExponent": (Kill("tokens", 8, 3),),
    "NormGateLinearClips": (Kill("oracle", shown=(0, 9)),),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("findings"))


def checked(spec: str, laws: list[str] | None, profile: Profile, worker: Worker, store: Store, seed: int = 0) -> list[LawReport]:
    with Check(Settings(spec, laws, profile, seed), [worker], store) as check:
        return check.run()


@pytest.mark.parametrize(("name", "kill"), rows(KILLED_BY))
@pytest.mark.slow_after_first
def test_law_alone_kills_animal_and_shows_a_small_case(name: str, kill: Kill, worker: Worker, tmp_path: pathlib.Path) -> None:
    assert_killed_alone(name, kill, worker, tmp_path)


def test_every_law_has_an_animal_that_it_kills_alone_and_every_animal_is_killed() -> None:
    laws = {kill.law for kills in KILLED_BY.values() for kill in kills}
    assert laws == set(MODULE_LAWS) - {"recompute"}  # tests/laws/test_recompute.py
    wrong = {module.__name__ for module in (wrong_convolutions, wrong_module_gates, wrong_norms)}
    here = {name: animal for name, animal in animals().items() if animal.kind.__module__ in wrong}
    assert set(here) == set(KILLED_BY)
    assert len(here) >= 22
    rows = {row for animal in here.values() for row in animal.incident}
    assert {1, 2, 4, 33, 34, 35} <= rows


# Right code holds

RIGHT = [
    *(
        f"{modules.__file__}:{name}"
        for name in (
            *("Conv", "ConvShort", "ConvMasked", "ConvSteps"),
            *("Gate", "KdaGate", "L2Norm", "GatedNorm", "NormGateLinear"),
        )
    ),
    *(
        f"{right_modules.__file__}:{name}"
        for name in (
            "ConvLastFirst",
            "ConvInSteps",
            "ConvStateIsAView",
            "ConvTogether",
            "ConvRolls",
            "ConvRoundsProducts",
            "ConvUnpads",
            "ConvStepsInARing",
            "GateNaive",
            "GateInSteps",
            "KdaGateNaive",
            "KdaGateInSteps",
            "L2NormDivides",
            "L2NormOfStored",
            "GatedNormInSteps",
            "GatedNormFused",
            "GatedNormOfAStoredSum",
            "GatedNormOfTwoSums",
            "NormGateLinearInSteps",
            "NormGateLinearFused",
        )
    ),
]


def not_held(reports: list[LawReport]) -> dict[str, str]:
    """The laws that do not hold, by their run or reason, but for those of which too few of so few cases could see."""
    sees = (report for report in reports if not (report.verdict is Verdict.UNKNOWN and "a verdict needs" in report.reason))
    fine = (Verdict.HOLDS, Verdict.UNSUPPORTED)
    return {report.law: report.run or report.reason for report in sees if report.verdict not in fine}


@functools.cache
def cases(domain: ModuleDomain, law: str) -> list[Example]:
    """The same for all right modules of a domain: drawing takes longer than they do."""
    return drawn(domain, law, 6 if law == "oracle" else 3)


def verdicts_of(law: str, spec: str, examples: list[Example]) -> dict[str, Verdict]:
    """The verdicts of runs, until one is broken or enough hold: the others are for where a case is blind."""
    verdicts: dict[str, Verdict] = {}
    for example in examples:
        run = Run(law, spec, example)
        verdicts[str(run)] = execute(run).verdict
        if Verdict.BROKEN in verdicts.values() or [*verdicts.values()].count(Verdict.HOLDS) == (4 if law == "oracle" else 2):
            break
    return verdicts


@pytest.mark.parametrize("spec", RIGHT, ids=lambda spec: spec.rpartition(":")[2])
@pytest.mark.slow
def test_right_module_holds_under_every_law(spec: str) -> None:
    domain, laws = load(spec).domain, set()
    for law in CAN[domain.operation]:
        if MODULE_LAWS[law].needs(domain) is None:
            verdicts = verdicts_of(law, spec, cases(domain, law))
            assert [run for run, verdict in verdicts.items() if verdict not in (Verdict.HOLDS, Verdict.BLIND)] == []
            laws |= {law} if Verdict.HOLDS in verdicts.values() else set()
    lacking = {law for law in CAN[domain.operation] if MODULE_LAWS[law].needs(domain)}
    assert lacking <= {"packed", "left_padding", *(() if domain.backward else ("recompute", "linear"))}
    assert laws == CAN[domain.operation] - lacking


@pytest.mark.parametrize("spec", [spec for spec in BOOKS_OF_BUILT_IN["modules"] if spec.partition("/")[0] not in LIBRARIES])
@pytest.mark.slow
def test_released_module_holds_under_every_law(spec: str, worker: Worker, store: Store) -> None:
    need_adapter(spec)
    reports = checked(spec, None, FEW, worker, store)
    assert not_held(reports) == {}
    assert sum(report.verdict is Verdict.HOLDS for report in reports) >= 7
    assert all("NO LONGER" not in line for report in reports for line in report.known)


def test_known_defect_of_released_code_is_found_and_is_none_where_its_words_are_not() -> None:
    defects = [defect for defect in known.load() if defect.run.adapter in BOOKS_OF_BUILT_IN["modules"]]
    assert {defect.run.adapter for defect in defects} >= {"fla/conv", "fla/short_convolution", "transformers/l2norm"}
    conv = next(defect for defect in defects if defect.run.adapter == "fla/conv" and "0.6.0" in defect.versions["fla-core"])
    line = str(conv.run)
    assert conv.explains(Run.parse(line)) or not conv.applies()
    assert not conv.explains(Run.parse(f"{line} oldest=no"))
    (norm,) = (defect for defect in defects if defect.run.adapter == "transformers/l2norm")
    other = Run.parse("law=tokens at=0 adapter=transformers/l2norm lengths=2 op=l2norm dtype=fp16")
    assert norm.explains(other) or not norm.applies()
    assert not norm.explains(Run.parse("law=pure adapter=transformers/l2norm lengths=2 op=l2norm dtype=fp16"))
    assert not norm.explains(Run.parse("law=tokens at=0 adapter=transformers/l2norm lengths=2 op=l2norm dtype=bf16"))


def test_other_laws_of_a_known_defect_must_be_laws_of_its_book(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "defects.toml"
    run = "law=oracle adapter=fla/l2norm lengths=2 op=l2norm"
    entry = f'[[defect]]\nrun = "{run}"\nversions = {{torch = ["1"]}}\nwhere = "op=l2norm"\nreason = "?"\n'
    file.write_text(entry + 'also = ["tokens"]\n')
    (defect,) = known.load(file)
    assert defect.also == ("tokens",)
    for also in ('["gates"]', '"tokens"'):
        file.write_text(entry + f"also = {also}\n")
        with pytest.raises(ValueError, match="known defect 0: also must be a list of laws among oracle, recurrent"):
            known.load(file)


# What the laws see that the bound does not, and the other way round


def test_bound_lets_pass_what_whole_numbers_show() -> None:
    case = ModuleCase((40,), "causal_conv1d", bias=True)
    inputs = case.inputs()
    right, wrong = (kind().run(inputs)[0] for kind in (modules.Conv, wrong_convolutions.ConvSumsTooLong))
    limit = bounds(case.spec, inputs, None, "pointwise")["y"]
    assert bool(((wrong.double() - limit.value).abs() <= limit.allowed).all())
    assert not torch.equal(right, wrong)
    whole = Run.parse("law=whole adapter=zoo/ConvSumsTooLong lengths=4 op=causal_conv1d values=whole")
    assert execute(whole).verdict is Verdict.BROKEN


def test_final_state_that_the_call_does_not_want_is_not_judged() -> None:
    line = "law=oracle adapter=zoo/ConvStateTooEarly lengths=8 op=causal_conv1d"
    assert execute(Run.parse(line)).verdict is Verdict.BROKEN
    assert execute(Run.parse(f"{line} final_state=no")).verdict is Verdict.HOLDS


def test_implementation_that_returns_no_final_state_is_broken_where_the_call_wants_one() -> None:
    class Forgets(modules.Conv):
        domain = ModuleDomain()

        def answer(self, x: Inputs, y: Tensor, state: Tensor) -> Any:
            return y, None

    from verify.execution import judging

    judging._LOADED["forgets"] = Forgets()
    case = ModuleCase((8,), "causal_conv1d")
    for wanted, verdict in ((True, Verdict.BROKEN), (False, Verdict.HOLDS)):
        example = Example(dataclasses.replace(case, final_state=wanted))
        assert execute(Run("oracle", "forgets", example)).verdict is verdict


# Shrinking and refusals


def test_module_shrinks_word_by_word_to_what_decides() -> None:
    start = ModuleCase.parse(
        "lengths=130+0+65 op=causal_conv1d packed=yes width=64 conv_width=8 dtype=bf16 values=scaled bias=yes activation=silu "
        "state=random oldest=no offsets=int32 seed=12345"
    )
    simplest = ModuleCase.parse("lengths=0 op=causal_conv1d width=1 conv_width=1 backward=no").words()
    for fails, words in (
        (lambda case: True, {}),
        (lambda case: case.tokens > 64, {"lengths": "65"}),
        (lambda case: case.conv_width > 2 and case.tokens > 0, {"lengths": "1", "conv_width": "3"}),
        (lambda case: case.activation == "silu" and case.bias, {"activation": "silu", "bias": "yes"}),
        (lambda case: case.dtype == "bf16" and case.state != "none", {"dtype": "bf16", "state": "zero"}),
        (lambda case: case.offsets == "int32", {"packed": "yes", "offsets": "int32"}),
        (lambda case: not case.oldest and case.backward, {"oldest": "no", "backward": "yes"}),
    ):
        shrunk = shrink(Example(start), MODULE_LAWS["oracle"], lambda e, fails=fails: fails(e.case), lambda runs: runs < 120)
        assert shrunk.finished and shrunk.runs < 60
        assert shrunk.example.case.words() == {**simplest, **words}


def test_heads_of_a_norm_shrink_and_its_eps() -> None:
    start = ModuleCase((20, 20), "gated_rms_norm", heads=8, width=100, eps="default", weight=False, values="small", seed=3)
    shrunk = shrink(Example(start), MODULE_LAWS["oracle"], lambda e: e.case.heads > 2 and not e.case.weight, lambda runs: True)
    assert str(shrunk.example.case) == "lengths=0 op=gated_rms_norm heads=3 width=1 weight=no backward=no"


@for_each(("operation", "name"), [(operation, name) for operation in OF_MODULES for name in OF_MODULES[operation]])
def test_our_contract_refuses_the_illegal_inputs(operation: str, name: str) -> None:
    domain = ModuleDomain(operation)
    call = MODULE_INPUTS.call(name, domain)
    assert not isinstance(call, str), call
    case, inputs = call
    assert domain.outside(case) is None
    case.spec.check(case.inputs())
    with pytest.raises(ValueError, match=r"must|needs"):
        case.spec.check(inputs)


def test_probe_distinguishes_refused_silent_and_not_run() -> None:
    class Refuses(modules.Conv):
        def run(self, x: Inputs) -> Any:
            raise TypeError("not like this")

    class Silent(modules.Conv):
        domain = ModuleDomain(packed=False, initial_state=False, bias=False)

        def run(self, x: Inputs) -> Any:
            return x.x, None

    names = book_named("modules").illegal.names
    assert names("causal_conv1d") == list(OF_MODULES["causal_conv1d"])
    assert names("l2norm") == []
    for name in names("causal_conv1d"):
        assert probe(Refuses(), name) == "refuses (TypeError)"
        runs = name == "a weight of fewer channels"
        assert probe(Silent(), name).startswith("returns numbers without an error" if runs else "not run: "), name


@pytest.mark.slow
def test_soundness_is_measured_of_any_book_and_an_alarm_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = f"{modules.__file__}:L2Norm"
    command = ["soundness.py", right, "zoo/NormEpsAsFloor", "--law", "all", "--cases", "33"]
    command += ["--workers", "1", "--json", str(tmp_path / "cases.jsonl")]
    records = {"machines": {"here": {"what": "a host", "versions": {}}}, "records": []}
    (tmp_path / "results.json").write_text(json.dumps(records))
    command += ["--record", str(tmp_path / "results.json"), "--machine", "here"]
    monkeypatch.setattr(sys, "argv", command)
    code, out = soundness.main(), capsys.readouterr().out
    first, second = (line for line in out.splitlines() if " cases of " in line)
    assert code == 1
    assert first.startswith(f"{right}: 39 cases of oracle+absent+linear+scaled+") and first.endswith("; 0 alarms")
    assert int(second.split()[-2]) > 5
    assert "  broken: y is off by more than rounding explains" in out
    records = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    (result,) = json.loads((tmp_path / "results.json").read_text())["records"]
    assert (result["table"], result["machine"], result["cases"]) == ("false alarms", "here", 78)
    assert result["value"] == int(second.split()[-2])
    assert result["command"] == f"`python -m benchmarks.soundness {right} zoo/NormEpsAsFloor --law all --cases 33 --workers 1`"
    assert len(records) == 78 and Run.parse(records[0]["run"]).law == "oracle"


def test_groups_of_operations_are_all_of_them() -> None:
    assert {*CONV, *GATES, *NORMS} == set(MODULES)
    assert {*POINTWISE} == set(MODULES) - {*CONV}


def test_errors_of_a_known_defect_are_not_the_worst_of_a_law_that_holds() -> None:
    report = LawReport("oracle", "fla/conv", Verdict.UNKNOWN)
    run = Run("oracle", "fla/conv", Example(ModuleCase((4,), "causal_conv1d")))
    report.count(run, Outcome(Verdict.HOLDS, ratios={"dx": 0.25}))
    report.count(run, Outcome(Verdict.KNOWN, ratios={"dx": 1e300}))
    assert report.ratios == {"dx": 0.25}
    assert report.counts == {Verdict.HOLDS: 1, Verdict.KNOWN: 1}


def test_a_transform_in_float64_is_whole_and_a_last_bit_of_float32_is_not() -> None:
    words = "lengths=40 op=causal_conv1d width=6 conv_width=3 values=whole backward=no seed=3"
    line = "law=whole adapter=tests/wrong_corners.py:{} " + words
    assert execute(Run.parse(line.format("Fourier"))).verdict is Verdict.HOLDS
    assert execute(Run.parse(line.format("NotQuiteWhole"))).verdict is Verdict.BROKEN
