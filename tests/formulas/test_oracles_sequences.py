"""Sequences end where the offsets say; empty sequences, empty batches and absent states change nothing else."""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracles.operation import gradient_name
from oracles.operations import RULES
from oracles.tolerance.bound import truth
from properties.rules.case import Case
from tests.judging import relative
from tests.oracle_forms import FORMS, RELATIVE_LIMIT, TENSORS, by_definition, form
from tests.together import for_each


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("lengths=" + "+".join(str(n % 5) for n in range(400)) + " packed=yes key_dim=4 value_dim=3", id="short"),
        pytest.param("lengths=3+1+400+0+2+5+1 packed=yes key_dim=8 value_dim=4", id="one long among short"),
    ],
)
@pytest.mark.slow
def test_many_short_sequences_and_one_long_among_short_equal_the_definition(operation: str, line: str) -> None:
    case = Case.parse(f"op={operation} {line} gate=64 state=random seed=3")
    inputs, cotangents = case.inputs(), case.cotangents()
    want = by_definition(inputs, cotangents)
    for chunk in (None, 1, 64):
        errors = relative(form(operation, inputs, cotangents, "exact", chunk), want)
        assert max(errors.values()) <= RELATIVE_LIMIT, (chunk, errors)


def test_boundaries_are_where_cu_seqlens_says() -> None:
    case = Case.parse("lengths=7+0+60+5 packed=yes heads=2 value_heads=2 gate=1000 seed=8")
    inputs, cotangents = case.inputs(), case.cotangents()
    one = inputs.replaced(cu_seqlens=torch.tensor([0, case.tokens]))
    joined = dataclasses.replace(case, lengths=(case.tokens,)).cotangents()
    whole, want = truth(case.spec, one, joined), by_definition(one, joined)
    assert whole["final_state"].shape[0] == 1
    assert max(relative(whole, want).values()) <= RELATIVE_LIMIT
    apart = truth(case.spec, inputs, cotangents)
    moved = (whole["o"] - apart["o"]).norm(dim=-1)[0]
    assert (moved[:7] < 1e-14).all()
    assert (moved[7:] > 1e-3).all(), "state that crosses a boundary shows"


@for_each("operation", RULES)
def test_no_state_is_a_state_of_zeros_to_the_bit(operation: str) -> None:
    case = Case.parse(f"op={operation} lengths=33+0+70 packed=yes heads=2 value_heads=4 gate=64 qk_norm=yes seed=9")
    inputs, cotangents = case.inputs(), case.cotangents()
    absent = truth(case.spec, inputs, cotangents)
    zeros = truth(case.spec, inputs.replaced(state=torch.zeros(3, 4, 16, 16)), cotangents)
    assert zeros.keys() - absent.keys() == {"dh0"}
    assert all(torch.equal(absent[name], zeros[name]) for name in absent)


@for_each("operation", RULES)
@for_each("state", ["none", "zero", "random"])
@for_each("lengths", ["0", "0+0 packed=yes", "0+0"])
def test_no_tokens_at_all_return_the_state(operation: str, lengths: str, state: str) -> None:
    case = Case.parse(f"op={operation} lengths={lengths} value_heads=2 state={state}")
    inputs, cotangents = case.inputs(), case.cotangents()
    for algorithm, chunk in FORMS:
        got = form(operation, inputs, cotangents, algorithm, chunk)
        assert got["o"].shape == inputs.v.shape
        assert got["dq"].shape == inputs.q.shape
        assert ("dg" in got) == (operation != "delta_rule")
        if inputs.state is None:
            assert torch.equal(got["final_state"], torch.zeros_like(cotangents["final_state"]).double())
        else:
            assert torch.equal(got["final_state"], inputs.state.double())
            assert torch.equal(got["dh0"], cotangents["final_state"].double())


@for_each("operation", RULES)
def test_a_batch_of_no_sequences_is_answered_in_its_shapes(operation: str) -> None:
    case = Case.parse(f"op={operation} lengths=7+7 value_heads=2 value_dim=12 state=random")
    inputs = case.inputs()
    none = inputs.replaced(**{name: inputs[name][:0] for name in TENSORS if inputs[name] is not None})
    cotangents = {name: cotangent[:0] for name, cotangent in case.cotangents().items()}
    for algorithm, chunk in FORMS:
        got = form(operation, none, cotangents, algorithm, chunk)
        assert got["o"].shape == (0, 7, 2, 12)
        assert got["final_state"].shape == (0, 2, 16, 12)
        assert all(got[gradient_name(name)].shape == none[name].shape for name in TENSORS if none[name] is not None)


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=10)
@given(
    lengths=st.lists(st.sampled_from((0, 0, 1, 5, 17)), min_size=1, max_size=5),
    state=st.sampled_from(("none", "random")),
    seed=st.integers(0, 2**16),
)
@example(lengths=[17, 0, 5, 0, 17], state="random", seed=1)
def test_empty_sequences_pass_their_state_and_change_nothing_else(
    operation: str, lengths: list[int], state: str, seed: int
) -> None:
    case = Case(operation=operation, lengths=tuple(lengths), packed=True, state=state, gate="64", seed=seed)
    inputs, cotangents = case.inputs(), case.cotangents()
    filled = [row for row, length in enumerate(lengths) if length]
    empty = [row for row, length in enumerate(lengths) if not length]
    got = truth(case.spec, inputs, cotangents)
    start = torch.zeros_like(got["final_state"]) if inputs.state is None else inputs.state.double()
    assert torch.equal(got["final_state"][empty], start[empty])
    if inputs.state is not None:
        assert torch.equal(got["dh0"][empty], cotangents["final_state"][empty].double())
    if not filled:
        return
    offsets = torch.tensor([0, *(lengths[row] for row in filled)]).cumsum(0)
    only = inputs.replaced(cu_seqlens=offsets, state=None if inputs.state is None else inputs.state[filled])
    want = truth(case.spec, only, {**cotangents, "final_state": cotangents["final_state"][filled]})
    for name, value in want.items():
        rows = got[name][filled] if name in ("final_state", "dh0") else got[name]
        assert torch.equal(rows, value), name
