"""Legal calls pass the contract; each illegal one is refused in a line that names the argument, its value and the rule."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.conv import CAUSAL_CONV1D
from oracles.decode import DECODE
from oracles.gates import GDN_GATE
from oracles.norm import L2NORM
from oracles.operation import (
    DTYPES,
    NAMES,
    Inputs,
    Operation,
    Port,
    at_least_one,
    check_offsets,
    flag,
    gradient_name,
    one_a_sequence,
    sequences,
)
from oracles.operations import OPERATIONS, RULES
from oracles.rule.gated_delta import DELTA_RULE, GATED_DELTA_RULE, KDA
from properties.laws.views import view
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from properties.words.domain import VIEWS
from tests.together import for_each

TENSORS = ("q", "k", "v", "g", "beta", "state")
BATCH = Case.parse("lengths=5+5 heads=2 value_heads=4 key_dim=8 value_dim=12 state=random")
PACKED = Case.parse("lengths=3+0+4 packed=yes heads=2 value_heads=4 key_dim=8 value_dim=12 state=random")


# Legal


def of(operation: str, case: Case) -> Case:
    return dataclasses.replace(case, operation=operation)


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=40)
@given(case=cases(Domain(), longest=60, total=100), how=st.sampled_from((None, *VIEWS)))
@example(case=Case.parse("lengths=0"), how=None)
@example(case=Case.parse("lengths=0+0 packed=yes state=random"), how="sliced")
def test_every_drawn_case_is_legal_in_any_strides(operation: str, case: Case, how: str | None) -> None:
    inputs, contract = of(operation, case).inputs(), RULES[operation]
    if how is not None:
        inputs = inputs.replaced(**{name: view(inputs[name], how) for name in TENSORS if inputs[name] is not None})
    contract.check(inputs)
    broken = inputs.replaced(v=inputs.v.unsqueeze(0))
    with pytest.raises(ValueError, match=r"^v must have axes"):
        contract.check(broken)


@for_each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_point_is_legal_and_each_tensor_may_have_its_own(dtype: torch.dtype) -> None:
    for name in TENSORS:
        inputs = BATCH.inputs()
        GATED_DELTA_RULE.check(inputs.replaced(**{name: inputs[name].to(dtype)}))
    with pytest.raises(ValueError, match=r"^q must be floating point of 16, 32 or 64 bits"):
        GATED_DELTA_RULE.check(BATCH.inputs().replaced(q=BATCH.inputs().q.to(torch.int8)))


# Illegal

Change = Callable[[Inputs], Inputs]


def offsets(values: list[int], dtype: torch.dtype = torch.int64) -> Change:
    return lambda inputs: inputs.replaced(cu_seqlens=torch.tensor(values, dtype=dtype))


def turned(name: str, change: Callable[[Tensor], object]) -> Change:
    return lambda inputs: inputs.replaced(**{name: change(inputs[name])})


def without_heads(inputs: Inputs) -> Inputs:
    return inputs.replaced(q=inputs.q[:, :, :0], k=inputs.k[:, :, :0])


def of_width(name: str) -> Change:
    def change(inputs: Inputs) -> Inputs:
        names = ["q", "k"] if name == "K" else ["v"]
        state = inputs.state[:, :, :0] if name == "K" else inputs.state[..., :0]
        if name == "K" and inputs.g is not None and inputs.g.ndim == 4:
            names.append("g")
        return inputs.replaced(state=state, **{argument: inputs[argument][..., :0] for argument in names})

    return change


def without_value_heads(inputs: Inputs) -> Inputs:
    none = {name: inputs[name][:, :, :0] for name in ("v", "g", "beta") if inputs[name] is not None}
    return inputs.replaced(**none, state=inputs.state[:, :0])


def without(*names: str) -> Change:
    return lambda inputs: Inputs(**{name: inputs[name] for name in inputs if name not in names})


def of_three_heads(inputs: Inputs) -> Inputs:
    three = {name: inputs[name][:, :, :3] for name in ("v", "g", "beta") if inputs[name] is not None}
    return inputs.replaced(**three, state=inputs.state[:, :3])


ILLEGAL: dict[str, tuple[Case, Change, tuple[str, ...]]] = {
    "offsets decrease": (PACKED, offsets([0, 5, 3, 7]), ("cu_seqlens", "not decrease", "[0, 5, 3, 7]")),
    "offsets start after 0": (PACKED, offsets([1, 3, 5, 7]), ("cu_seqlens", "start at 0", "[1, 3, 5, 7]")),
    "offsets start before 0": (PACKED, offsets([-1, 3, 5, 7]), ("cu_seqlens", "start at 0", "[-1, 3, 5, 7]")),
    "offsets end early": (PACKED, offsets([0, 3, 5, 6]), ("cu_seqlens", "token count 7", "6")),
    "offsets end late": (PACKED, offsets([0, 3, 5, 8]), ("cu_seqlens", "token count 7", "8")),
    "offsets of one entry": (PACKED, offsets([0]), ("cu_seqlens", "two entries", "[0]")),
    "offsets of no entry": (PACKED, offsets([]), ("cu_seqlens", "two entries", "[]")),
    "offsets int16": (PACKED, offsets([0, 3, 3, 7], torch.int16), ("cu_seqlens", "int32 or int64", "int16")),
    "offsets float": (PACKED, offsets([0, 3, 3, 7], torch.float32), ("cu_seqlens", "int32 or int64", "float32")),
    "offsets bool": (PACKED, offsets([0, 1], torch.bool), ("cu_seqlens", "int32 or int64", "bool")),
    "offsets 2-D": (PACKED, turned("cu_seqlens", lambda x: x.reshape(2, 2)), ("cu_seqlens", "vector", "(2, 2)")),
    "offsets 0-D": (PACKED, turned("cu_seqlens", lambda x: x[0]), ("cu_seqlens", "vector", "()")),
    "offsets a list": (PACKED, turned("cu_seqlens", lambda x: x.tolist()), ("cu_seqlens", "vector", "[0, 3, 3, 7]")),
    "offsets of a batch": (BATCH, offsets([0, 5]), ("cu_seqlens", "B = 1", "B = 2")),
    "one state too few": (PACKED, turned("state", lambda x: x[:2]), ("state", "N = 3", "(2, 4, 8, 12)")),
    "one state for a batch": (BATCH, turned("state", lambda x: x[:1]), ("state", "N = 2", "(1, 4, 8, 12)")),
    "state transposed": (BATCH, turned("state", lambda x: x.mT), ("state", "K = 8", "(2, 4, 12, 8)")),
    "state without heads": (BATCH, turned("state", lambda x: x[:, 0]), ("state", "axes [N, HV, K, V]", "(2, 8, 12)")),
    "state of key heads": (BATCH, turned("state", lambda x: x[:, :2]), ("state", "HV = 4", "(2, 2, 8, 12)")),
    "state integer": (BATCH, turned("state", lambda x: x.long()), ("state", "floating point", "int64")),
    "state a number": (BATCH, turned("state", lambda x: 0.0), ("state", "tensor", "float")),
    "k of another batch": (BATCH, turned("k", lambda x: x[:1]), ("k", "B = 2", "(1, 5, 2, 8)")),
    "k of other tokens": (BATCH, turned("k", lambda x: x[:, :4]), ("k", "T = 5", "(2, 4, 2, 8)")),
    "k of other heads": (BATCH, turned("k", lambda x: x[:, :, :1]), ("k", "H = 2", "(2, 5, 1, 8)")),
    "k of another width": (BATCH, turned("k", lambda x: x[..., :7]), ("k", "K = 8", "(2, 5, 2, 7)")),
    "v of another batch": (BATCH, turned("v", lambda x: x[:1]), ("v", "B = 2", "(1, 5, 4, 12)")),
    "v of other tokens": (BATCH, turned("v", lambda x: x[:, :4]), ("v", "T = 5", "(2, 4, 4, 12)")),
    "beta of other heads": (BATCH, turned("beta", lambda x: x[..., :2]), ("beta", "HV = 4", "(2, 5, 2)")),
    "beta of other tokens": (BATCH, turned("beta", lambda x: x[:, :1]), ("beta", "T = 5", "(2, 1, 4)")),
    "beta integer": (BATCH, turned("beta", lambda x: x.int()), ("beta", "floating point", "int32")),
    "q integer": (BATCH, turned("q", lambda x: x.long()), ("q", "floating point", "int64")),
    "k bool": (BATCH, turned("k", lambda x: x > 0), ("k", "floating point", "bool")),
    "v complex": (BATCH, turned("v", lambda x: x.to(torch.complex64)), ("v", "floating point", "complex64")),
    "q 3-D": (BATCH, turned("q", lambda x: x[0]), ("q", "axes [B, T, H, K]", "(5, 2, 8)")),
    "q a list": (BATCH, turned("q", lambda x: x.tolist()), ("q", "tensor", "list")),
    "q None": (BATCH, turned("q", lambda x: None), ("q", "tensor", "NoneType")),
    "no q": (BATCH, without("q"), ("q", "tensor", "NoneType")),
    "no k": (BATCH, without("k"), ("k", "tensor", "NoneType")),
    "no v": (BATCH, without("v"), ("v", "tensor", "NoneType")),
    "no beta": (BATCH, without("beta"), ("beta", "tensor", "NoneType")),
    "scale a word": (BATCH, lambda inputs: inputs.replaced(scale="one"), ("scale", "finite number", "'one'")),
    "scale a truth value": (BATCH, lambda inputs: inputs.replaced(scale=True), ("scale", "finite number", "True")),
    "scale infinite": (BATCH, lambda inputs: inputs.replaced(scale=math.inf), ("scale", "finite number", "inf")),
    "scale not a number": (BATCH, lambda inputs: inputs.replaced(scale=math.nan), ("scale", "finite number", "nan")),
    "scale a tensor": (BATCH, lambda inputs: inputs.replaced(scale=torch.ones(())), ("scale", "no tensor", "got a tensor")),
    "an option misspelt": (
        BATCH,
        lambda inputs: Inputs(**inputs, qknorm=True),
        ("qknorm", "no input of", "None or absent", "True"),
    ),
    "q sparse": (BATCH, turned("q", lambda x: x.to_sparse()), ("q", "strided", "sparse_coo")),
    "k nested": (BATCH, turned("k", lambda x: torch.nested.nested_tensor(list(x))), ("k", "strided", "nested")),
    "v without numbers": (BATCH, turned("v", lambda x: x.to("meta")), ("v", "strided", "without numbers")),
    "q of 8 bits": (
        BATCH,
        turned("q", lambda x: x.to(torch.float8_e4m3fn)),
        ("q", "16, 32 or 64", "float8_e4m3fn"),
    ),
    "q of one channel": (BATCH, turned("q", lambda x: x[..., :1]), ("k", "K = 1 like q", "(2, 5, 2, 8)")),
    "a mask": (BATCH, lambda inputs: Inputs(**inputs, mask=inputs.beta), ("mask", "no input of", "None or absent", "a tensor")),
    "norm a number": (BATCH, lambda inputs: inputs.replaced(qk_norm=1), ("qk_norm", "True or False", "1")),
    "norm none": (BATCH, lambda inputs: inputs.replaced(qk_norm=None), ("qk_norm", "True or False", "None")),
    "HV not a multiple": (BATCH, of_three_heads, ("HV", "multiple of H = 2", "3")),
    "no key heads": (BATCH, without_heads, ("H", "at least 1", "0")),
    "no value heads": (BATCH, without_value_heads, ("HV", "at least 1", "0")),
    "no key channels": (BATCH, of_width("K"), ("K", "at least 1", "0")),
    "no value channels": (BATCH, of_width("V"), ("V", "at least 1", "0")),
}


ILLEGAL_GATES: dict[str, dict[str, tuple[Case, Change, tuple[str, ...]]]] = {
    "delta_rule": {
        "a g": (
            BATCH,
            lambda inputs: inputs.replaced(g=-inputs.beta),
            ("g", "no input of delta_rule", "None or absent", "a tensor"),
        ),
    },
    "gated_delta_rule": {
        "no g": (BATCH, without("g"), ("g", "tensor", "NoneType")),
        "g None": (BATCH, turned("g", lambda x: None), ("g", "tensor", "NoneType")),
        "g of other heads": (BATCH, turned("g", lambda x: x[..., :2]), ("g", "HV = 4", "(2, 5, 2)")),
        "g of other tokens": (BATCH, turned("g", lambda x: x[:, :4]), ("g", "T = 5", "(2, 4, 4)")),
        "g of each channel": (
            BATCH,
            turned("g", lambda x: x[..., None].expand(2, 5, 4, 8)),
            ("g", "axes [B, T, HV]", "(2, 5, 4, 8)"),
        ),
        "g heads first": (BATCH, turned("g", lambda x: x.transpose(1, 2)), ("g", "T = 5", "(2, 4, 5)")),
    },
    "kda": {
        "no g": (BATCH, without("g"), ("g", "tensor", "NoneType")),
        "g of each head": (BATCH, turned("g", lambda x: x[..., 0]), ("g", "axes [B, T, HV, K]", "(2, 5, 4)")),
        "g of one channel": (BATCH, turned("g", lambda x: x[..., :1]), ("g", "K = 8", "(2, 5, 4, 1)")),
        "g of the values' channels": (
            BATCH,
            turned("g", lambda x: x[..., :1].expand(2, 5, 4, 12)),
            ("g", "K = 8", "(2, 5, 4, 12)"),
        ),
        "g of key heads": (BATCH, turned("g", lambda x: x[:, :, :2]), ("g", "HV = 4", "(2, 5, 2, 8)")),
        "g of other tokens": (BATCH, turned("g", lambda x: x[:, :4]), ("g", "T = 5", "(2, 4, 4, 8)")),
        "g channels before heads": (BATCH, turned("g", lambda x: x.transpose(2, 3)), ("g", "HV = 4", "(2, 5, 8, 4)")),
    },
}


RULE_CALLS = [("gated_delta_rule", *call) for call in ILLEGAL.values()]
RULE_CALLS += [(operation, *call) for operation, calls in ILLEGAL_GATES.items() for call in calls.values()]
RULE_CALLS += [(operation, *ILLEGAL["beta of other heads"]) for operation in RULES]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@for_each(("operation", "case", "change", "words"), RULE_CALLS)
def test_illegal_call_is_refused_in_one_line_with_argument_rule_and_value(
    operation: str, case: Case, change: Change, words: tuple[str, ...]
) -> None:
    legal = of(operation, case).inputs()
    RULES[operation].check(legal)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        RULES[operation].check(change(legal))
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith(words[0]), message
    assert all(word in message for word in words), message


def test_what_is_none_is_nobodys_input() -> None:
    DELTA_RULE.check(Inputs(**of("delta_rule", BATCH).inputs(), mask=None))
    DELTA_RULE.check(without("g")(of("delta_rule", BATCH).inputs()))


@for_each(
    ("operation", "arguments", "message"),
    [
        (L2NORM, {"x": torch.ones(1, 2, 1, 3), "cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens is no input of l2norm"),
        (
            L2NORM,
            {"x": torch.ones(1, 2, 1, 3), "epsilon": 1e-3},
            "epsilon is no input of l2norm, must be None or absent, got 0.001",
        ),
        (GDN_GATE, {"a": torch.ones(1, 2, 3), "allow_neg_eigvals": True}, "allow_neg_eigvals is no input of gdn_gate"),
        (CAUSAL_CONV1D, {"x": torch.ones(1, 2, 3), "activations": "silu"}, "activations is no input of causal_conv1d"),
        (DECODE, {"q": torch.ones(1, 2, 3, 4), "pad": -1}, "pad is no input of decode"),
    ],
)
def test_an_option_that_is_misspelt_is_refused(operation: Operation, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        operation.check(Inputs(**arguments))


def test_what_is_no_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^inputs must be Inputs, got dict$"):
        GATED_DELTA_RULE.check(dict(BATCH.inputs()))  # type: ignore[arg-type]


@for_each("scale", [None, 0, -2, 0.5, 1e-30])
def test_any_finite_scale_is_legal(scale: float | None) -> None:
    GATED_DELTA_RULE.check(BATCH.inputs().replaced(scale=scale))
    with pytest.raises(ValueError, match=r"^scale must be None or a finite number, got -inf$"):
        GATED_DELTA_RULE.check(BATCH.inputs().replaced(scale=-math.inf))


@for_each("name", ["state", "cu_seqlens", "scale"])
def test_optional_arguments_may_be_none_or_absent(name: str) -> None:
    inputs = BATCH.inputs()
    GATED_DELTA_RULE.check(inputs.replaced(**{name: None}))
    GATED_DELTA_RULE.check(without(name)(inputs))
    GATED_DELTA_RULE.check(without("qk_norm", "scale", "state", "cu_seqlens")(inputs))
    with pytest.raises(ValueError, match=r"^beta must be a tensor, got NoneType$"):
        GATED_DELTA_RULE.check(inputs.replaced(beta=None))


@settings(max_examples=200)
@given(values=st.lists(st.integers(-2, 6), max_size=5), dtype=st.sampled_from((torch.int32, torch.int64)), tokens=st.integers(0, 6))
def test_offsets_are_legal_exactly_when_they_rise_from_zero_to_the_tokens(
    values: list[int], dtype: torch.dtype, tokens: int
) -> None:
    legal = len(values) > 1 and values[0] == 0 and values[-1] == tokens and values == sorted(values)
    cu_seqlens = torch.tensor(values, dtype=dtype)
    if legal:
        check_offsets(cu_seqlens, 1, tokens)
        return
    with pytest.raises(ValueError, match=r"^cu_seqlens must"):
        check_offsets(cu_seqlens, 1, tokens)


# Inputs


def test_inputs_are_read_as_attributes_and_as_items() -> None:
    inputs = BATCH.inputs()
    assert inputs.q is inputs["q"]
    assert inputs.scale is None
    assert inputs.qk_norm is False
    assert set(inputs) == {*TENSORS, "cu_seqlens", "scale", "qk_norm", "qk_norm_eps", "qk_norm_form", "output_final_state"}
    assert len(inputs) == len(list(inputs)) == 12
    assert inputs.get("nothing") is None
    assert "q" in inputs
    assert dict(**inputs)["v"] is inputs.v


def test_unknown_input_is_refused_with_the_names_there_are() -> None:
    inputs = BATCH.inputs()
    with pytest.raises(AttributeError, match=r"no input 'qq'; there are q, k, v, g, beta, state"):
        inputs.qq  # noqa: B018
    with pytest.raises(KeyError, match="qq"):
        inputs["qq"]
    with pytest.raises(ValueError, match=r"no input 'gate'; there are q, k, v, g, beta, state"):
        inputs.replaced(gate=inputs.g)
    with pytest.raises(ValueError, match="no input 'a'"):
        inputs.replaced(z=1, q=inputs.q, a=2)
    assert not hasattr(inputs, "__array__")


def test_inputs_cannot_be_changed_and_replacing_leaves_the_original() -> None:
    inputs = BATCH.inputs()
    with pytest.raises(AttributeError, match=r"not to be changed: q; use replaced\(q=\.\.\.\)"):
        inputs.q = None
    with pytest.raises(TypeError):
        inputs["q"] = None  # type: ignore[index]
    with pytest.raises(AttributeError):
        del inputs.q
    before = dict(inputs)
    other = inputs.replaced(scale=0.5, state=None)
    assert (other.scale, other.state) == (0.5, None)
    assert all(other[name] is inputs[name] for name in inputs if name not in ("scale", "state"))
    assert all(inputs[name] is value for name, value in before.items())
    assert other is not inputs


def test_inputs_survive_copy_and_pickle() -> None:
    inputs = BATCH.inputs()
    for other in (copy.copy(inputs), copy.deepcopy(inputs), pickle.loads(pickle.dumps(inputs))):
        assert set(other) == set(inputs)
        assert torch.equal(other.q, inputs.q)
    assert copy.deepcopy(inputs).q.data_ptr() != inputs.q.data_ptr()


# Sizes and sequences


def test_sizes_are_those_of_the_axes_of_the_arguments_there_are() -> None:
    inputs = BATCH.inputs()
    sizes = {"B": 2, "T": 5, "H": 2, "HV": 4, "K": 8, "V": 12, "N": 2}
    assert GATED_DELTA_RULE.sizes(inputs) == sizes
    assert KDA.sizes(of("kda", BATCH).inputs()) == sizes
    assert DELTA_RULE.sizes(of("delta_rule", PACKED).inputs()) == sizes | {"B": 1, "T": 7, "N": 3}
    assert GATED_DELTA_RULE.sizes(inputs.replaced(state=None)) == {axis: size for axis, size in sizes.items() if axis != "N"}
    narrow = inputs.replaced(v=inputs.v[..., :5], state=inputs.state[..., :5])
    assert GATED_DELTA_RULE.sizes(narrow) == sizes | {"V": 5}


def test_sequences_are_rows_of_a_batch_or_between_offsets() -> None:
    assert sequences(BATCH.inputs(), "q") == sequences(BATCH.inputs(), "v") == [5, 5]
    assert sequences(PACKED.inputs(), "q") == [3, 0, 4]
    assert sequences(without("cu_seqlens")(PACKED.inputs()), "q") == [7]
    assert sequences(Inputs(x=torch.zeros(0, 5, 2)), "x") == []


# Ports that the delta rules have not: an index, and axes of one's own

TOY = Operation(
    "toy",
    (Port("x", "B T D"), Port("weight", "D", scalar_rows=True), Port("slots", "N", "index"), Port("state", "N D", optional=True)),
    (Port("y", "B T D"),),
    lambda inputs, arithmetic: {"y": inputs.x * inputs.weight},
    (at_least_one("T", "D"), flag("even"), one_a_sequence("state")),
    ("even",),
)


def toy(**changed: object) -> Inputs:
    arguments = {
        "x": torch.ones(2, 3, 4),
        "weight": torch.ones(4),
        "slots": torch.tensor([5, 6]),
        "state": torch.ones(2, 4),
        "even": True,
    }
    return Inputs(**(arguments | changed))


def test_an_index_has_a_size_and_no_gradient() -> None:
    TOY.check(toy())
    TOY.check(toy(slots=torch.tensor([1, 2, 3], dtype=torch.int32), state=None, even=False))
    assert [port.name for port in TOY.gradients()] == ["dx", "dweight", "dh0"]
    assert TOY.port("dweight") == Port("dweight", "D", scalar_rows=True, gradient=True)
    assert TOY.sizes(toy(state=None)) == {"B": 2, "T": 3, "D": 4, "N": 2}


@for_each(
    ("changed", "message"),
    [
        ({"slots": torch.tensor([5.0, 6.0])}, "slots must be int32 or int64, got torch.float32"),
        ({"slots": torch.tensor([5, 6], dtype=torch.int16)}, "slots must be int32 or int64, got torch.int16"),
        ({"slots": torch.tensor([[5, 6]])}, "slots must have axes [N], got shape (1, 2)"),
        ({"slots": [5, 6]}, "slots must be a tensor, got list"),
        ({"x": torch.ones(2, 3, 4).long()}, "x must be floating point of 16, 32 or 64 bits, got torch.int64"),
        ({"x": torch.ones(2, 0, 4)}, "T must be at least 1, got 0"),
        ({"weight": torch.ones(3)}, "weight must have D = 4 like x, got shape (3,) for [D]"),
        ({"state": torch.ones(3, 4)}, "state must have N = 2, one per sequence, got shape (3, 4)"),
        ({"even": 2}, "even must be True or False, got 2"),
    ],
)
def test_contract_of_any_operation_names_port_rule_and_value(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        TOY.check(toy(**changed))
    assert str(refusal.value) == message


# Names


def test_gradients_are_named_after_their_inputs() -> None:
    gradients = {"delta_rule": ["dq", "dk", "dv", "dbeta", "dh0"]}
    for name, operation in RULES.items():
        assert operation.name == name
        assert [port.name for port in operation.gradients()] == gradients.get(name, ["dq", "dk", "dv", "dg", "dbeta", "dh0"])
        for port, source in zip(operation.gradients(), operation.inputs, strict=True):
            assert port.name == gradient_name(source.name)
            assert (port.axes, port.dtype, port.scalar_rows) == (source.axes, source.dtype, source.scalar_rows)
            assert operation.port(port.name) == port
        assert operation.port("o").axes == "B T HV V"
        assert [port.name for port in operation.inputs if port.optional] == ["state"]
    assert {"gated_delta_rule": GATED_DELTA_RULE, "delta_rule": DELTA_RULE, "kda": KDA} == RULES
    assert {NAMES[dtype] for dtype in DTYPES.values()} == set(DTYPES)


def test_a_row_of_a_gates_gradient_is_a_number_or_the_channels_of_a_head() -> None:
    assert GATED_DELTA_RULE.port("dg") == Port("dg", "B T HV", "gate", scalar_rows=True, gradient=True)
    assert KDA.port("dg") == Port("dg", "B T HV K", "gate", gradient=True)


def test_every_operation_is_found_by_its_name() -> None:
    assert RULES.items() <= OPERATIONS.items()
    for name, operation in OPERATIONS.items():
        assert operation.name == name
        ports = [port.name for port in (*operation.outputs, *operation.gradients())]
        assert len(set(ports)) == len(ports)
        assert {port.dtype for port in operation.inputs} <= {"input", "gate", "parameter", "bias", "state", "fp32", "index"}
