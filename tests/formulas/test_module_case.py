"""A module's case line rebuilds the same bits everywhere, its regimes are what they say, and a wrong line is refused clearly."""

import dataclasses
import hashlib
import itertools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.arithmetic.rounding import BITS
from oracles.operation import DTYPES, Inputs
from oracles.tolerance.bound import truth
from properties.modules.case import _STREAMS, ACTIVATIONS, EPS, MODULES, STATES, VALUES, ModuleCase, words_of
from properties.modules.domain import ModuleDomain, module_cases
from tests.formulas.test_rule_case import mixed, signed
from tests.together import for_each

KNOWN = (
    ("lengths=65 op=causal_conv1d", "d4b18a72c6aa6747"),
    (
        "lengths=3+0+21 op=causal_conv1d packed=yes width=5 conv_width=3 dtype=bf16 values=scaled bias=yes activation=silu "
        "state=random oldest=no offsets=int32 seed=17",
        "4b2be3c8779d601e",
    ),
    ("lengths=9+9 op=causal_conv1d width=3 dtype=fp16 values=whole state=random final_state=no seed=1", "05c1597ffd2dc7df"),
    ("lengths=17+17 op=gdn_gate heads=3 dtype=bf16 values=large allow_neg_eigval=yes seed=2", "127f05c1e662d868"),
    ("lengths=12 op=kda_gate heads=2 width=7 values=repeated dt_bias=no beta=no seed=3", "ff4a576f71a378c4"),
    ("lengths=5+5+5 op=l2norm heads=4 width=24 dtype=fp16 values=small eps=1e-5 seed=4294967295", "e39e21e3099ce8d1"),
    ("lengths=40 op=gated_rms_norm heads=2 width=8 values=zero_rows eps=default seed=65535", "df3240f832ba7b59"),
    ("lengths=4 op=causal_conv1d width=2 state=zero backward=no seed=5", "519414e73f32c69f"),
    ("lengths=5+9 op=causal_conv1d packed=yes dtype=fp16 values=great state=random seed=3", "8479b56ef39fdf0e"),
    ("lengths=4 op=l2norm heads=2 dtype=bf16 values=great seed=3", "1dd82a6007fbe21c"),
    ("lengths=3+3 op=norm_gate_linear width=5 out_width=3 dtype=bf16 bias=yes eps=1e-5 seed=3", "db1f5245a71e8870"),
    ("lengths=9 op=gated_rms_norm values=one_signed seed=10", "c6d2e7d769ee1ebd"),
    ("lengths=7 op=gated_rms_norm width=5 dtype=bf16 values=growing seed=11", "e9f64ccdaae7a5e0"),
    ("lengths=6 op=norm_gate_linear width=8 out_width=40 values=large weight=no seed=9", "a29800248f02298a"),
    ("lengths=3+2+4 op=causal_conv1d packed=yes width=5 dtype=bf16 state=some seed=19", "f29c317211ce70dc"),
)


def tensors(case: ModuleCase) -> dict[str, Tensor]:
    """Every tensor of the case by name, in a fixed order."""
    named = {name: value for name, value in sorted(case.inputs().items()) if isinstance(value, Tensor)}
    return named | {f"cotangent of {name}": cotangent for name, cotangent in case.cotangents().items()}


def fingerprint(case: ModuleCase) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors(case).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# Bits


@for_each(("line", "known"), KNOWN)
def test_line_makes_the_known_bits(line: str, known: str) -> None:
    case = ModuleCase.parse(line)
    assert str(case) == line
    assert fingerprint(case) == known
    assert fingerprint(dataclasses.replace(case, seed=case.seed ^ 1)) != known


def test_known_bits_cover_every_regime() -> None:
    seen = [ModuleCase.parse(line) for line, _ in KNOWN]
    choices: dict[str, Any] = {"operation": MODULES, "dtype": DTYPES, "values": VALUES, "state": STATES}
    choices |= {"activation": ACTIVATIONS, "eps": EPS, "offsets": ("int64", "int32")}
    choices |= dict.fromkeys(("packed", "bias", "final_state", "oldest", "dt_bias", "beta", "allow_neg_eigval"), (True, False))
    for field, values in choices.items():
        assert {getattr(case, field) for case in seen} == set(values), field


def top(position: int, stream: str, seed: int, bits: int) -> int:
    """The integer of a position, signed, of as many bits."""
    return signed(mixed(position + mixed(seed * 64 + _STREAMS[stream]))) >> (64 - bits)


@for_each("dtype", DTYPES)
def test_numbers_are_those_of_the_counter_scaled_by_a_power_of_two(dtype: str) -> None:
    bits, case = BITS[dtype], ModuleCase((3,), "causal_conv1d", width=5, conv_width=2, dtype=dtype, bias=True, seed=77)
    inputs = case.inputs()
    for name, factor in (("x", 1.0), ("weight", 1.0), ("bias", 1.0)):
        x = inputs[name].flatten().double().tolist()
        want = [factor * top(position, name, 77, bits) * 2.0 ** (1 - bits) for position in range(len(x))]
        assert x == want, name
    gates = ModuleCase((2,), "gdn_gate", heads=3, dtype=dtype, seed=5).inputs()
    assert gates.a.flatten().double().tolist() == [2 * top(place, "a", 5, bits) * 2.0 ** (1 - bits) for place in range(6)]
    assert gates.A_log.double().tolist() == [4 * top(place, "A_log", 5, 16) * 2.0**-15 - 1 for place in range(3)]
    assert gates.dt_bias.double().tolist() == [top(place, "dt_bias", 5, 24) * 2.0**-23 for place in range(3)]


def test_streams_are_those_of_no_other_case() -> None:
    assert len(set(_STREAMS.values())) == len(_STREAMS)
    assert all(48 <= stream % 2**40 < 64 for stream in _STREAMS.values())


def test_another_stream_does_not_change_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_STREAMS, "another", 62)
    assert ModuleCase((9, 9, 9, 9), "causal_conv1d", seed=3).pads() == (0, 5, 3, 5)
    assert ModuleCase((100,), "causal_conv1d", seed=7).pads() == (34,)


# Regimes

WIDE: dict[str, dict[str, Any]] = {
    "causal_conv1d": {"width": 6, "state": "random", "bias": True},
    "gdn_gate": {"heads": 3},
    "kda_gate": {"heads": 3, "width": 6},
    "l2norm": {"heads": 3, "width": 6},
    "gated_rms_norm": {"heads": 3, "width": 6},
    "norm_gate_linear": {"width": 18},
}
CARRIED = {"causal_conv1d": ("x",), "gdn_gate": ("a", "b"), "kda_gate": ("a", "b"), "l2norm": ("x",)}
CARRIED |= dict.fromkeys(("gated_rms_norm", "norm_gate_linear"), ("x", "z"))


def carried(operation: str, **fields: Any) -> dict[str, Tensor]:
    """What the tokens of a batch of two sequences of forty carry."""
    inputs = ModuleCase((40, 40), operation, **{**WIDE[operation], **fields}).inputs()
    return {name: inputs[name].double() for name in CARRIED[operation]}


@for_each("operation", MODULES)
def test_regimes_are_what_they_say(operation: str) -> None:
    ordinary = carried(operation)
    for name, x in ordinary.items():
        most = 1.0 if name == "x" else 2.0
        assert most / 2 < float(x.abs().max()) <= most
        assert len(x.unique()) > 70
    for name, x in carried(operation, values="repeated").items():
        assert torch.equal(x, x[:, :1].expand_as(x)), name
        assert not torch.equal(x[0], x[1])
    for name, x in carried(operation, values="small").items():
        assert torch.equal(x, ordinary[name] * 2.0**-13), name
    for name, x in carried(operation, values="large").items():
        most = 64.0 if name == "x" else 128.0
        assert most / 2 < float(x.abs().max()) <= most
    for name, x in carried(operation, values="zero_rows").items():
        gone = (x.flatten(0, x.ndim - 2) == 0).all(-1)
        assert 0.1 < float(gone.double().mean()) < 0.45, name
        assert torch.equal(torch.where(x != 0, x, ordinary[name]), ordinary[name])
    for name, x in carried(operation, values="scaled").items():
        powers = (x / ordinary[name]).nan_to_num(nan=1.0).log2()
        assert torch.equal(powers, powers.round()), name
        assert float(powers.min()) >= -6 and float(powers.max()) <= 5
        assert len(powers.unique()) == 12
        assert all(len(set(row.tolist()) - {0.0}) <= 1 for row in powers.flatten(0, x.ndim - 2)), "a row has one scale"


def test_whole_numbers_are_small_and_whole() -> None:
    case = ModuleCase((40, 40), "causal_conv1d", width=6, values="whole", state="random", bias=True)
    for name, x in (tensors(case)).items():
        assert torch.equal(x, x.round()), name
        assert {*x.flatten().tolist()} <= {*range(-4, 4)}
        assert len(x.unique()) > 4


def test_state_follows_the_regime_and_is_none_or_zero_where_said() -> None:
    states = {values: ModuleCase((2,) * 9, "causal_conv1d", state="random", values=values).inputs().state for values in VALUES}
    assert torch.equal(states["small"], states["ordinary"] * 2.0**-13)
    assert float(states["large"].abs().max()) > 32
    assert 0.1 < float((states["zero_rows"] == 0).all(-1).double().mean()) < 0.45
    assert not torch.equal(states["scaled"], states["ordinary"])
    assert ModuleCase((2,), "causal_conv1d").inputs().state is None
    assert not ModuleCase((2,), "causal_conv1d", state="zero").inputs().state.any()


def test_large_gates_reach_beyond_both_ends_of_float32s_exponential() -> None:
    inputs = ModuleCase((100,), "gdn_gate", heads=8, values="large").inputs()
    assert float(inputs.a.max()) > 100 and float(inputs.a.min()) < -100
    assert float(inputs.b.max()) > 100 and float(inputs.b.min()) < -100
    assert float(inputs.A_log.abs().max()) <= 8
    assert 8 < float(inputs.dt_bias.abs().max()) <= 16
    assert int(((inputs.a + inputs.dt_bias) - 20).abs().lt(2).sum()) > 5, "both sides of softplus's threshold"


def test_eps_matters_where_values_are_small_and_not_where_they_are_ordinary() -> None:
    for operation in ("l2norm", "gated_rms_norm", "norm_gate_linear"):
        moved = {}
        for values in ("small", "ordinary"):
            cases = [ModuleCase((9,), operation, values=values, eps=eps) for eps in ("1e-6", "1e-5")]
            one, two = (truth(case.spec, case.inputs())["y"] for case in cases)
            moved[values] = float(((one - two).norm(dim=-1) / one.norm(dim=-1)).median())
        assert moved["small"] > 0.5 and moved["ordinary"] < 1e-3, operation
    assert truth(MODULES["l2norm"], ModuleCase((9,), "l2norm", eps="default").inputs())["y"].equal(
        truth(MODULES["l2norm"], ModuleCase((9,), "l2norm").inputs())["y"]
    )


def test_oldest_no_is_a_cotangent_of_zero_for_the_final_states_first_column_alone() -> None:
    case = ModuleCase((7, 7), "causal_conv1d", conv_width=3)
    whole, least = case.cotangents(), dataclasses.replace(case, oldest=False).cotangents()
    assert whole["final_state"][..., 0].any() and not least["final_state"][..., 0].any()
    assert torch.equal(whole["final_state"][..., 1:], least["final_state"][..., 1:])
    assert torch.equal(whole["y"], least["y"])
    assert set(dataclasses.replace(case, final_state=False).cotangents()) == {"y"}
    assert not dataclasses.replace(case, final_state=False).inputs().output_final_state


def test_states_of_fewer_columns_have_other_numbers_and_everything_else_stays() -> None:
    case = ModuleCase.parse("lengths=7+0 op=causal_conv1d packed=yes width=5 conv_width=3 bias=yes state=random seed=3")
    short = dataclasses.replace(case, state_columns="W-1")
    assert short.inputs().state.shape == (2, 5, 2)
    assert short.cotangents()["final_state"].shape == (2, 5, 2)
    assert short.bytes == case.bytes - 16 * 2 * 5
    for name, x in short.inputs().items():
        assert name == "state" or x is case.inputs()[name] or torch.equal(x, case.inputs()[name]), name
    assert dataclasses.replace(short, conv_width=1).inputs().state.shape == (2, 5, 0)


# Contracts


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.slow
def test_every_case_with_short_states_is_a_legal_call(data: st.DataObject) -> None:
    domain = ModuleDomain(state_columns="W-1")
    case = data.draw(module_cases(domain, longest=20, total=30, oldest=(True, False)))
    assert ModuleCase.parse(str(case)) == case
    assert domain.outside(case) is None
    assert ModuleDomain().outside(case) == "state_columns=W-1 is not W"
    case.spec.check(case.inputs())
    outputs = truth(case.spec, case.inputs())
    assert all(x.shape == outputs[name].shape for name, x in case.cotangents().items())


@settings(max_examples=120)
@given(data=st.data(), operation=st.sampled_from(sorted(MODULES)))
@pytest.mark.slow
def test_every_case_is_a_legal_call_with_cotangents_like_its_outputs(data: st.DataObject, operation: str) -> None:
    case = data.draw(module_cases(ModuleDomain(operation), longest=20, total=30, oldest=(True, False)))
    assert ModuleCase.parse(str(case)) == case
    inputs, cotangents = case.inputs(), case.cotangents()
    case.spec.check(inputs)
    for port in case.spec.inputs:
        x = inputs.get(port.name)
        assert x is None or x.dtype == DTYPES["fp32" if port.dtype in ("parameter", "bias") else case.dtype], port.name
        assert x is None or x.is_contiguous()
    outputs = truth(case.spec, inputs)
    for name, x in cotangents.items():
        assert x.shape == outputs[name].shape
        assert x.dtype == DTYPES["fp32" if case.spec.port(name).dtype == "fp32" else case.dtype]
    assert set(outputs) - set(cotangents) <= {"final_state"}
    assert case.tokens == sum(case.lengths) == math.prod(case.batch)
    assert case.bytes >= 16 * case.tokens and case.starts()[-1] == case.tokens


@pytest.mark.parametrize("operation", ["gdn_gate", "kda_gate"])
def test_gate_without_beta_is_the_gate(operation: str) -> None:
    case = ModuleCase((9,), operation, heads=3, width=16, seed=2)
    alone = dataclasses.replace(case, beta=False)
    assert [port.name for port in alone.spec.inputs] == ["a", "A_log", "dt_bias"]
    assert [port.name for port in alone.spec.outputs] == ["g"]
    both = truth(case.spec, case.inputs(), {**case.cotangents(), "beta": torch.zeros(1, 9, 3)})
    got = truth(alone.spec, alone.inputs(), alone.cotangents())
    assert set(got) == {"g", "da", "dA_log", "ddt_bias"}
    assert all(torch.equal(tensor, both[name]) for name, tensor in got.items())
    with pytest.raises(ValueError, match="b is no input of"):
        alone.spec.check(case.inputs())


def test_same_inputs_whatever_is_not_theirs() -> None:
    base = ModuleCase((9,), "causal_conv1d", width=3, seed=9)
    for change in ({"bias": True}, {"state": "random"}, {"activation": "silu"}, {"backward": False}, {"packed": True}):
        other = dataclasses.replace(base, **change).inputs()  # type: ignore[arg-type]
        assert torch.equal(other.x, base.inputs().x) and torch.equal(other.weight, base.inputs().weight), change


# Lines

LINES = [
    ("", "a case line must have lengths"),
    ("lengths=4", "a case line of a module must have op=, one of causal_conv1d"),
    (
        "lengths=4 op=decode",
        "operation must be one of causal_conv1d, gdn_gate, kda_gate, l2norm, gated_rms_norm, norm_gate_linear, got 'decode'",
    ),
    ("lengths=4 op=l2norm head=2", "unknown word 'head' in the case line; did you mean heads?"),
    ("lengths=4 op=l2norm values=loud", "values must be one of ordinary, one_signed, growing, repeated"),
    ("lengths=4 op=causal_conv1d activation=relu", "activation must be one of none, silu, got 'relu'"),
    ("lengths=4 op=l2norm eps=1e-4", "eps must be one of 1e-6, 1e-5, default, got '1e-4'"),
    ("lengths=4+5 op=l2norm", "lengths must all be equal unless packed=yes, got 4+5"),
    ("lengths=4 op=norm_gate_linear out_width=0", "out_width must be in 1..16384, got 0"),
    ("lengths=4 op=kda_gate allow_neg_eigval=yes beta=no", "allow_neg_eigval=yes needs beta=yes, which it doubles, got beta=no"),
    ("lengths=4 op=causal_conv1d activation=silu values=whole", "values=whole needs op=causal_conv1d activation=none"),
    ("lengths=4 op=l2norm values=whole", "values=whole needs op=causal_conv1d activation=none"),
    ("lengths=4 op=causal_conv1d state_columns=W-2", "state_columns must be one of W, W-1, got 'W-2'"),
    (
        "lengths=4 op=causal_conv1d state_columns=W-1 oldest=no",
        "oldest=no needs state_columns=W, whose column 0 it is about, got state_columns=W-1",
    ),
    ("lengths=4 op=causal_conv1d conv_width=65", "conv_width must be in 1..64, got 65"),
    ("lengths=4 op=l2norm heads=0", "heads must be in 1..1024, got 0"),
    ("lengths=4 op=l2norm width=16385", "width must be in 1..16384, got 16385"),
    ("lengths=4 op=l2norm seed=4294967296", "seed must be in 0..4294967295, got 4294967296"),
    ("lengths=1048577 op=l2norm", "lengths must add up to at most 1048576 tokens, got 1048577"),
    ("lengths=4 op=l2norm backward=maybe", "backward must be yes or no, got 'maybe'"),
]


@for_each(("line", "says"), LINES)
def test_an_illegal_line_is_refused_by_word_value_and_rule(line: str, says: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(says)) as refusal:
        ModuleCase.parse(line)
    assert "\n" not in str(refusal.value)


@for_each(
    ("lengths", "says"),
    [
        ((), "lengths must name at least one sequence"),
        ((-1,), "no length may be negative"),
        ((0,) * 131073, "at most 131072 sequences, got 131073"),
    ],
)
def test_illegal_lengths_are_refused(lengths: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModuleCase(lengths, "l2norm")


def test_every_word_that_not_all_operations_have_is_refused_where_it_is_not() -> None:
    other = {
        "packed": True,
        "heads": 2,
        "width": 3,
        "out_width": 3,
        "conv_width": 2,
        "bias": True,
        "weight": False,
        "activation": "silu",
    }
    other |= {
        "state": "zero",
        "state_columns": "W-1",
        "final_state": False,
        "oldest": False,
        "eps": "1e-5",
        "dt_bias": False,
        "beta": False,
    }
    other |= {"allow_neg_eigval": True, "offsets": "int32"}
    other |= {"residual": "added", "gating": "sigmoid", "lower_bound": "-5", "parameter_dtype": "input"}
    assert set(other) == {name for operation in MODULES for name in words_of(operation)}
    for operation, (name, value) in itertools.product(MODULES, other.items()):
        if name in words_of(operation):
            assert getattr(ModuleCase((4,), operation, **{name: value}), name) == value  # type: ignore[arg-type]
        else:
            with pytest.raises(ValueError, match=f"op={operation} has no {name}"):
                ModuleCase((4,), operation, **{name: value})  # type: ignore[arg-type]


def test_defaults_are_part_of_the_format() -> None:
    for operation in MODULES:
        case = ModuleCase((4,), operation)
        assert str(case) == f"lengths=4 op={operation}"
        words = " ".join(itertools.starmap("{}={}".format, case.words().items()))
        assert ModuleCase.parse(words) == case


def test_inputs_are_the_same_in_every_call() -> None:
    case = ModuleCase.parse(KNOWN[1][0])
    one, two = case.inputs(), case.inputs("cpu")
    assert isinstance(one, Inputs)
    assert all(torch.equal(value, two[name]) for name, value in one.items() if isinstance(value, Tensor))
