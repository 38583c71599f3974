"""The convolution is its definition, packed or not, cut anywhere and token by token; wrong readings of it are not."""

import functools
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.conv import CAUSAL_CONV1D, definition, update, with_oldest, without_oldest
from oracles.operation import Inputs
from oracles.tolerance.bound import truth
from tests.judging import Results, evaluate
from tests.pointwise_calls import agree, offsets
from tests.pointwise_readings import WRONG, convolve, runs_of
from tests.together import for_each

# The convolution is its definition


def whole_numbers(lengths: tuple[int, ...], packed: bool, seed: int, **kinds: Any) -> tuple[Inputs, Results]:  # noqa: FBT001
    """A call of small integers in float64, where sums are exact in any order, and cotangents alike."""
    generator = torch.Generator().manual_seed(seed)
    channels, width = kinds["channels"], kinds["width"]

    def some(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).double()

    batch = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    inputs = Inputs(
        x=some(*batch, channels),
        weight=some(channels, width),
        bias=some(channels) if kinds["bias"] else None,
        state=some(len(lengths), channels, width) if kinds["state"] else None,
        cu_seqlens=offsets(lengths) if packed else None,
        activation=kinds["activation"],
        output_final_state=True,
    )
    return inputs, {"y": some(*batch, channels), "final_state": some(len(lengths), channels, width)}


def by_definition(x: Inputs) -> Results:
    """Every sequence by itself, token by token."""
    tokens, outputs, finals = x.x.flatten(0, 1), [], []
    for row, (start, end) in enumerate(runs_of(x)):
        state = torch.zeros_like(x.weight) if x.state is None else x.state[row]
        y, final = definition(tokens[start:end], state, x.weight, x.bias, x.activation)
        outputs.append(y)
        finals.append(final)
    return {"y": torch.cat(outputs).reshape(x.x.shape), "final_state": torch.stack(finals)}


KINDS = st.fixed_dictionaries(
    {
        "channels": st.integers(1, 3),
        "width": st.integers(1, 5),
        "bias": st.booleans(),
        "state": st.booleans(),
        "activation": st.sampled_from([None, "silu"]),
    }
)
LENGTHS = st.one_of(
    st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple), st.just(True)),
    st.tuples(st.builds(lambda length, batch: (length,) * batch, st.integers(0, 7), st.integers(1, 3)), st.just(False)),
)
WIDE_KINDS = {"channels": 3, "width": 4, "bias": True, "state": True, "activation": None}


@settings(max_examples=60)
@given(lengths=LENGTHS, kinds=KINDS, seed=st.integers(0, 2**16))
@example(lengths=((0, 2, 0, 7), True), kinds=WIDE_KINDS, seed=1)
@example(lengths=((0,), False), kinds=WIDE_KINDS, seed=2)
@example(lengths=((5, 1), True), kinds={**WIDE_KINDS, "width": 1}, seed=3)
def test_convolution_is_its_definition_forward_and_backward(
    lengths: tuple[tuple[int, ...], bool], kinds: dict[str, Any], seed: int
) -> None:
    inputs, directions = whole_numbers(*lengths, seed, **kinds)
    CAUSAL_CONV1D.check(inputs)
    want = evaluate(CAUSAL_CONV1D, by_definition, inputs, directions)
    assert agree(truth(CAUSAL_CONV1D, inputs, directions), want, exactly=inputs.activation is None)


@for_each("reading", [entry[3] for entry in WRONG if entry[0] == "causal_conv1d"])
def test_wrong_reading_of_the_convolution_is_not_the_definition(reading: dict[str, Any]) -> None:
    kinds = {**WIDE_KINDS, "activation": "silu" if "early_silu" in reading else None}
    inputs, directions = whole_numbers((6, 2, 5), True, 4, **kinds)
    want = evaluate(CAUSAL_CONV1D, by_definition, inputs, directions)
    right, wrong = (
        evaluate(CAUSAL_CONV1D, functools.partial(convolve, wide=torch.float64, **options), inputs, directions)
        for options in ({}, reading)
    )
    assert agree(right, want, exactly=False)
    assert not agree(wrong, want, exactly=False)


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), kinds=KINDS, seed=st.integers(0, 2**16))
def test_packed_equals_separate(lengths: tuple[int, ...], kinds: dict[str, Any], seed: int) -> None:
    inputs, directions = whole_numbers(lengths, True, seed, **{**kinds, "activation": None})
    packed = truth(CAUSAL_CONV1D, inputs, directions)
    apart = []
    for row, (start, end) in enumerate(runs_of(inputs)):
        one = inputs.replaced(
            x=inputs.x[:, start:end], state=None if inputs.state is None else inputs.state[row : row + 1], cu_seqlens=None
        )
        toward = {"y": directions["y"][:, start:end], "final_state": directions["final_state"][row : row + 1]}
        apart.append(truth(CAUSAL_CONV1D, one, toward))
    for name, tensor in packed.items():
        pieces = [one[name] for one in apart]
        whole = sum(pieces) if name in ("dweight", "dbias") else torch.cat(pieces, 1 if name in ("y", "dx") else 0)
        assert torch.equal(tensor, whole), name


@settings(max_examples=40)
@given(length=st.integers(0, 9), data=st.data(), kinds=KINDS, seed=st.integers(0, 2**16))
def test_convolution_may_be_cut_anywhere_if_the_state_is_carried_backward_too(
    length: int, data: st.DataObject, kinds: dict[str, Any], seed: int
) -> None:
    at = data.draw(st.integers(0, length))
    inputs, directions = whole_numbers((length,), False, seed, **{**kinds, "state": True, "activation": None})
    whole = truth(CAUSAL_CONV1D, inputs, directions)
    head = inputs.replaced(x=inputs.x[:, :at])
    tail = inputs.replaced(x=inputs.x[:, at:], state=truth(CAUSAL_CONV1D, head)["final_state"])
    after = truth(CAUSAL_CONV1D, tail, {"y": directions["y"][:, at:], "final_state": directions["final_state"]})
    before = truth(CAUSAL_CONV1D, head, {"y": directions["y"][:, :at], "final_state": after["dh0"]})
    joined = {name: torch.cat([before[name], after[name]], 1) for name in ("y", "dx")}
    joined |= {name: before[name] + after[name] for name in whole if name in ("dweight", "dbias")}
    assert agree({**joined, "final_state": after["final_state"], "dh0": before["dh0"]}, whole, exactly=True)


def test_cut_shows_a_state_that_is_not_carried() -> None:
    inputs, _ = whole_numbers((9,), False, 5, **WIDE_KINDS)
    whole = truth(CAUSAL_CONV1D, inputs)
    tail = truth(CAUSAL_CONV1D, inputs.replaced(x=inputs.x[:, 7:]))
    assert not torch.equal(tail["y"], whole["y"][:, 7:])
    assert not torch.equal(tail["final_state"], whole["final_state"])


@settings(max_examples=40)
@given(count=st.integers(1, 4), kinds=KINDS, seed=st.integers(0, 2**16))
def test_update_is_the_convolution_of_one_token(count: int, kinds: dict[str, Any], seed: int) -> None:
    inputs, _ = whole_numbers((1,) * count, False, seed, **{**kinds, "state": True})
    want = truth(CAUSAL_CONV1D, inputs)
    y, state = update(inputs.x[:, 0], inputs.state, inputs.weight, inputs.bias, inputs.activation)
    assert agree({"y": y.unsqueeze(1), "final_state": state}, want, exactly=inputs.activation is None)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_column_0_of_a_state_is_read_by_nothing_but_the_final_state_of_no_tokens(
    lengths: tuple[int, ...], width: int, seed: int
) -> None:
    inputs, directions = whole_numbers(lengths, True, seed, **{**WIDE_KINDS, "width": width})
    got = truth(CAUSAL_CONV1D, inputs, directions)
    short = without_oldest(inputs.state)
    assert short.shape == (len(lengths), 3, width - 1)
    other = truth(CAUSAL_CONV1D, inputs.replaced(state=with_oldest(short)), directions)
    filled = [row for row, length in enumerate(lengths) if length]
    assert torch.equal(other["y"], got["y"])
    assert torch.equal(other["final_state"][filled], got["final_state"][filled])
    assert torch.equal(without_oldest(other["final_state"]), without_oldest(got["final_state"]))
    assert not got["dh0"][filled][..., 0].any()
