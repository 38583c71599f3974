"""Layers on one rank: cases rebuild a call from a line, adapters lead to the code they name, and each law has killed."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.layer import GDN_LAYER
from oracles.operation import DTYPES
from oracles.tolerance.bound import truth
from properties.books import book_for, book_of
from properties.laws.law import Blind
from properties.layers.case import LayerCase
from properties.layers.domain import LayerDomain
from properties.layers.laws import LAYER_LAWS
from properties.words.example import Example
from tests.faults import different, not_refused
from tests.kills import Fewer, Kill, assert_killed_alone, rows, small_ones
from verify.bench.adapter_bench import AdapterBench
from verify.engine.check import Check
from verify.engine.drawing import seeded
from verify.engine.shrink import shrink
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker
from verify.zoo import base
from verify.zoo import wrong_layers as layers

FULL = LayerCase(
    (3, 1, 9, 0, 2), packed=True, heads=2, value_heads=4, key_dim=8, value_dim=12, hidden=16, conv_width=3, conv_bias=True,
    dtype="bf16", gate="mixed", values="zero_rows", cached=True, state="random", eps="1e-5", allow_neg_eigval=True,
    offsets="int32", seed=8,
)  # fmt: skip


# Cases


def test_line_rebuilds_the_call_to_the_bit() -> None:
    again = LayerCase.parse(str(FULL))
    assert again == FULL
    assert str(LayerCase((1,))) == "op=gdn_layer lengths=1"
    for one, two in ((FULL.inputs(), again.inputs()), (FULL.cotangents(), again.cotangents())):
        assert one.keys() == two.keys()
        for name, value in one.items():
            same = torch.equal(value, two[name]) if isinstance(value, Tensor) else value == two[name]
            assert same, name
    other = dataclasses.replace(FULL, seed=9).inputs()
    for name in ("hidden", "in_proj", "conv", "conv_bias", "A_log", "dt_bias", "norm", "out_proj", "state", "conv_state"):
        assert not torch.equal(FULL.inputs()[name], other[name]), name


@pytest.mark.slow
def test_drawn_calls_are_legal_and_of_their_regime() -> None:
    seen: list[LayerCase] = []

    def look(example: Example) -> None:
        case: LayerCase = example.case
        seen.append(case)
        inputs, cotangents = case.inputs(), case.cotangents()
        GDN_LAYER.check(inputs)
        assert inputs.hidden.shape == (*case.batch, case.hidden)
        assert inputs.hidden.dtype == inputs.in_proj.dtype == DTYPES[case.dtype]
        assert inputs.A_log.dtype == torch.float32
        assert (inputs.state is None) == (inputs.conv_state is None) == (case.state == "none")
        assert cotangents.keys() == ({"y", "final_state", "conv_state"} if case.cached else {"y"})
        assert cotangents["y"].shape == inputs.hidden.shape
        rows = inputs.hidden.flatten(0, 1).abs().amax(-1)
        if case.values == "small" and case.tokens:
            assert 0 < float(rows.max()) <= 2.0**-8
        if case.tokens >= 16:
            assert (0 < int((rows == 0).sum()) < len(rows)) == (case.values == "zero_rows")
        pads = case.pads()
        assert len(pads) == len(case.lengths)
        assert all(0 <= pad < max(length, 1) for pad, length in zip(pads, case.lengths, strict=True))

    seeded(LAYER_LAWS["oracle"].draw(LayerDomain()), 5, 100, look)
    assert len(seen) == 100
    for name in ("dtype", "values", "state", "gate", "eps", "cached", "packed", "conv_bias", "conv_width", "allow_neg_eigval"):
        assert len({getattr(case, name) for case in seen}) > 1, name
    assert {case.values for case in seen} == {"ordinary", "scaled", "small", "zero_rows", "one_signed"}
    assert any(0 in case.lengths for case in seen)
    assert any(not case.packed and max(case.lengths) > 64 for case in seen), "a batch of several chunks"
    assert {max(case.key_dim, case.value_dim) > 64 for case in seen} == {False, True}


def test_a_domain_of_wide_layers_has_all_its_widths() -> None:
    cases: list[LayerCase] = []
    seeded(LAYER_LAWS["oracle"].draw(LayerDomain(widths=(64, 128))), 6, 100, lambda example: cases.append(example.case))
    assert sum(case.key_dim != case.value_dim for case in cases) >= 20
    assert sum(case.hidden == 128 for case in cases) >= 30


@pytest.mark.parametrize(
    "domain", [LayerDomain("kda_layer", dtypes=("fp16",)), LayerDomain(dtypes=("fp16",), gatings=("sigmoid",))]
)
def test_no_case_has_zero_rows_whose_right_gradients_overflow(domain: LayerDomain) -> None:
    cases: list[LayerCase] = []
    seeded(LAYER_LAWS["oracle"].draw(domain), 6, 60, lambda example: cases.append(example.case))
    assert all(case.backward for case in cases)
    assert {case.values for case in cases} == {"ordinary", "one_signed", "scaled", "small"}
    case = LayerCase.parse("op=kda_layer lengths=116 key_dim=16 value_dim=16 hidden=4 dtype=fp16 values=zero_rows")
    assert float(truth(case.spec, case.inputs(), case.cotangents())["dhidden"].abs().max()) > torch.finfo(torch.float16).max


def test_hidden_states_are_the_same_whatever_they_are_cut_into() -> None:
    whole, packed, batch = LayerCase((6,)), LayerCase((1, 5), packed=True), LayerCase((3, 3))
    inputs = [case.inputs() for case in (whole, packed, batch)]
    assert torch.equal(inputs[0].hidden, inputs[1].hidden)
    assert torch.equal(inputs[0].hidden, inputs[2].hidden.reshape(inputs[0].hidden.shape))
    assert torch.equal(inputs[0].in_proj, inputs[2].in_proj)
    assert inputs[1].cu_seqlens.tolist() == [0, 1, 6]
    assert LayerCase((5,)).inputs().hidden.shape == (1, 5, 8)


REFUSED = {
    "op=decode lengths=1": "operation must be one of gdn_layer, kda_layer, got 'decode'",
    "lengths=1 state=zero": "state=zero needs cached=yes: states that go in come out",
    "lengths=1 heads=2": "value_heads must be a multiple of heads 2, got 1",
    "lengths=1+2": r"lengths must all be equal unless packed=yes, got 1\+2",
    "lengths=1 key_dim=0": r"key_dim must be in 1\.\.1024, got 0",
    "lengths=1 values=large": "values must be one of ordinary, one_signed, scaled, small, zero_rows, got 'large'",
    "lengths=1 eps=1": "eps must be one of 1e-6, 1e-5, got '1'",
    "lengths=1 tp=2": "unknown word 'tp'",
    "heads=2": "a case line must have lengths",
}


@pytest.mark.parametrize("line", REFUSED)
def test_illegal_case_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[line]):
        LayerCase.parse(line)


def test_case_without_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths must name at least one sequence, and no length may be negative, got"):
        LayerCase(())


def test_lines_find_the_book_by_their_operation() -> None:
    run = Run("oracle", "fla/layer", Example(FULL))
    assert Run.parse(str(run)) == run
    assert book_for("oracle", "gdn_layer").name == "layers"
    assert book_for("parallel", "gdn_layer").name == "paths"
    assert book_of(FULL) is book_of(LayerDomain()) is book_for("cache", None)


# Domains

NARROW = LayerDomain(
    dtypes=("bf16",), widths=(16, 32), equal_widths=True, grouped_heads=False, packed=False, empty=False, nothing=False,
    conv_widths=(4,), conv_bias=False, negative_eigenvalues=False, eps=("1e-6",), caches=False, attention_mask=False,
    views=False, backward=False,
)  # fmt: skip
TRAINING = LayerDomain(batched=False, state_gradients=False, offsets=("int32",), nothing=False)


@pytest.mark.parametrize("domain", [LayerDomain(), NARROW, TRAINING], ids=["everything", "narrow", "training"])
@pytest.mark.slow_after_first
def test_laws_draw_what_the_domain_promises(domain: LayerDomain) -> None:
    missing = {law.name: law.needs(domain) for law in LAYER_LAWS.values() if law.needs(domain)}
    assert (
        missing
        == {
            LayerDomain(): {},
            NARROW: {
                "packed": "packed is not supported",
                "left_padding": "attention mask is not supported",
                "cache": "caches is not supported",
                "strides": "views is not supported",
                "recompute": "backward is not supported",
            },
            TRAINING: dict.fromkeys(("packed", "left_padding", "cache"), "batched is not supported"),
        }[domain]
    )
    for law in LAYER_LAWS.values():
        if law.name in missing:
            continue
        seen: list[Example] = []
        seeded(law.draw(domain), 3, 12, seen.append)
        assert len(seen) == 12
        for example in seen:
            assert domain.outside(example.case) is None, law.name
            law.accept(example)
            assert LayerCase.parse(str(example.case)) == example.case
    assert LayerDomain.from_json(json.loads(json.dumps(domain.to_json()))) == domain


def test_domain_says_why_a_case_is_outside() -> None:
    plain = {"lengths": "2", "dtype": "bf16", "backward": "no"}
    for words, reason in [
        ("dtype=fp32", "dtype=fp32 is not among bf16"),
        ("value_dim=16", "key_dim and value_dim must be equal"),
        ("value_heads=2", "heads and value_heads must be equal"),
        ("packed=yes", "packed=yes is not supported"),
        ("lengths=0", "empty sequences are not supported"),
        ("conv_width=3", "conv_width=3 is not among 4"),
        ("conv_bias=yes", "conv_bias=yes is not supported"),
        ("allow_neg_eigval=yes", "allow_neg_eigval=yes is not supported"),
        ("eps=1e-5", "eps=1e-5 is not among 1e-6"),
        ("cached=yes", "cached=yes is not supported"),
        ("backward=yes", "backward=yes is not supported"),
    ]:
        assert NARROW.outside(LayerCase.parse(" ".join(f"{name}={value}" for name, value in plain.items()))) is None, words
        name, _, value = words.partition("=")
        case = LayerCase.parse(" ".join(f"{name}={value}" for name, value in {**plain, name: value}.items()))
        assert NARROW.outside(case) == reason, words
        assert LayerDomain().outside(case) is None, words


def test_domain_of_training_says_why() -> None:
    rows = [
        (TRAINING, "lengths=2", "packed=no is not supported"),
        (TRAINING, "lengths=2 packed=yes offsets=int64", "offsets=int64 is not among int32"),
        (TRAINING, "lengths=0 packed=yes offsets=int32", "a call without tokens is not supported"),
        (TRAINING, "lengths=1 packed=yes cached=yes offsets=int32", "backward=yes with cached=yes is not supported"),
    ]
    assert different(lambda domain, line: domain.outside(LayerCase.parse(line)), rows) == []


def test_domain_refuses_what_it_cannot_be() -> None:
    rows = [
        ({"operation": "conv"}, "operation must be one of gdn_layer, kda_layer, got 'conv'"),
        ({"dtypes": ()}, r"dtypes must be a tuple of some of fp32, bf16, fp16, got \(\)"),
        ({"eps": ("1e-4",)}, r"eps must be a tuple of some of 1e-6, 1e-5, got \('1e-4',\)"),
        ({"widths": (0,)}, r"widths must be a tuple of whole numbers in 1..1024, got \(0,\)"),
        ({"packed": False, "batched": False}, "packed or batched must be True, got neither"),
    ]
    assert not_refused(lambda wrong: LayerDomain(**wrong), rows) == []


# The bench


def test_only_states_that_a_call_returns_are_compared() -> None:
    case = LayerCase((2,), seed=1)
    names = set(AdapterBench(base.Layered(), None, case).run(case.inputs(), case.cotangents()))
    assert {name for name in names if not name.startswith("d")} == {"y"}
    assert {"dhidden", "din_proj", "dconv", "dA_log", "ddt_bias", "dnorm", "dout_proj"} <= names
    cached = dataclasses.replace(case, cached=True)
    names = set(AdapterBench(base.Layered(), None, cached).run(cached.inputs(), None))
    assert names == {"y", "final_state", "conv_state"}


def test_left_padding_without_padding_is_blind() -> None:
    case = next(case for case in (LayerCase((2, 2), seed=seed) for seed in range(99)) if not any(case.pads()))
    with pytest.raises(Blind, match="no row has padding"):
        list(LAYER_LAWS["left_padding"].check(AdapterBench(base.Layered(), None, case), Example(case)))


def test_states_whose_loss_would_not_show_are_blind() -> None:
    """The prompt's only token is a row of zeros: it leaves nothing in the states."""
    line = "lengths=2 key_dim=32 hidden=16 conv_width=3 dtype=bf16 values=zero_rows cached=yes state=zero backward=no seed=5264"
    case = LayerCase.parse(line)
    with pytest.raises(Blind, match="states lost after the prompt would not show"):
        list(LAYER_LAWS["cache"].check(AdapterBench(base.Layered(), None, case), Example(case, 1, "piece")))


# Adapters


def small(case: LayerCase) -> bool:
    """Whether a case has at most two chunks of 64 a sequence, and few heads and numbers."""
    return max(case.lengths) <= 70 and case.tokens <= 130 and case.tokens * case.value_heads * case.key_dim <= 2**14


@pytest.mark.slow
def test_right_layer_holds_under_every_law(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    spec, store = "verify/zoo/base.py:Layered", Store(tmp_path_factory.mktemp("findings"))
    with small_ones(small), Check(Settings(spec, profile=Fewer("few", 2, large=False), seed=7), [worker], store) as check:
        reports = check.run()
    assert {report.law: report.run or report.reason for report in reports if report.verdict is Verdict.BROKEN} == {}
    assert {report.law for report in reports if report.verdict is Verdict.UNSUPPORTED} == set()
    assert {report.law for report in reports if report.verdict is Verdict.UNKNOWN} <= {"packed", "cache"}, "which may be blind"


@pytest.mark.parametrize("spec", ["fla/layer", "fla/layer_recurrent", "fla/kda_layer", "fla/kda_layer_recurrent"])
@pytest.mark.slow
def test_flas_layer_holds(spec: str, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    store, laws = Store(tmp_path_factory.mktemp("findings")), ["oracle", "left_padding", "cache"]
    with small_ones(small), Check(Settings(spec, laws, Fewer("few", 1, large=False), 7), [worker], store) as check:
        reports = check.run()
    assert {report.law: report.run for report in reports if report.verdict is Verdict.BROKEN} == {}


# Every law has been seen to fail


KILLED_BY = {
    layers.OffsetsForConvOnly: Kill("packed", 2, 2),
    layers.OffsetsForNobody: Kill("packed", 2, 2),
    layers.ConvAcrossBoundaries: Kill("packed", 4, 2),
    layers.PadsNotMasked: Kill("left_padding", 5),
    layers.PadsMaskedAfterConv: Kill("left_padding", 2),
    layers.PadsTwentyBitsDown: Kill("left_padding", 3),
    layers.SectionsSwapped: Kill("oracle", 3),
    layers.SectionsOfOneHead: Kill("oracle", 1),
    layers.DropsConvBias: Kill("oracle", 1, short=True),
    layers.FreezesALog: Kill("oracle", 2),
    layers.GateBeforeNorm: Kill("oracle", 15),
    layers.RmsOfAllHeads: Kill("oracle", 17),
    layers.NormWeightPerHead: Kill("oracle", 2),
    layers.NeverNormed: Kill("oracle", 1),
    layers.GateIsASigmoid: Kill("oracle", 1),
    layers.EpsOfTheOtherLibrary: Kill("oracle", 1),
    layers.BiasInTheInputsDtype: Kill("strides", 33, 2, seeds=3),
    layers.ForgetsConvState: Kill("cache", 3),
    layers.ShortPromptsAlignLeft: Kill("cache", 2),
    layers.DecodesWithAnotherGate: Kill("cache", 2),
    layers.LargeTokensChangeThePath: Kill("future", 2),
    layers.FlattensMemory: Kill("strides", 2),
    layers.ReadsUnwrittenScratch: Kill("memory", 1),
    layers.WritesBeforeConv: Kill("pure", 1),
    layers.SharesOneSample: Kill("samples", 2, 3, shown=(0, 12)),
    layers.WeightOfInference: Kill("history", 1, shown=(0, 15)),
    layers.SpeedsOfACallThatFailed: Kill("history", 2),
    layers.KdaGateIsSilu: Kill("oracle", 1),
    layers.KdaForgetsGateBias: Kill("oracle", 1),
    layers.KdaBiasByChannel: Kill("oracle", 2),
    layers.KdaDecaysByHead: Kill("oracle", 2),
    layers.KdaDecaysLate: Kill("oracle", 2),
    layers.KdaGatesSwapped: Kill("oracle", 1),
}


@pytest.mark.parametrize(("name", "kill"), rows({wrong: (kill,) for wrong, kill in KILLED_BY.items()}))
@pytest.mark.slow
def test_law_alone_kills_animal_and_shows_a_small_case(name: str, kill: Kill, worker: Worker, tmp_path: pathlib.Path) -> None:
    assert_killed_alone(name, kill, worker, tmp_path)


def test_every_law_has_an_animal_that_it_kills_alone_and_every_animal_its_law() -> None:
    assert {kill.law for kill in KILLED_BY.values()} == set(LAYER_LAWS) - {"recompute"}  # tests/laws/test_recompute.py
    assert set(KILLED_BY) == {kind for kind in vars(layers).values() if isinstance(kind, type) and hasattr(kind, "letter")}


# Shrinking


def test_shrunk_case_is_simple_but_for_what_fails() -> None:
    law = LAYER_LAWS["oracle"]

    def small(fails: Any) -> str:
        shrunk = shrink(Example(FULL), law, lambda example: fails(example.case), lambda runs: runs < 200)
        assert shrunk.finished
        return str(shrunk.example.case)

    least = "op=gdn_layer lengths=0 key_dim=1 value_dim=1 hidden=1 conv_width=1 backward=no"
    assert small(lambda case: True) == least
    assert small(lambda case: case.hidden > 4) == least.replace("hidden=1 ", "")
    assert small(lambda case: case.cached) == least.replace("backward", "cached=yes backward")
    assert small(lambda case: case.state != "none") == least.replace("backward", "cached=yes state=zero backward")
    assert small(lambda case: case.tokens > 2 and case.values == "zero_rows") == (
        least.replace("lengths=0", "lengths=3").replace("backward", "values=zero_rows backward")
    )
