"""Shards of a sequence pass their states on: merged transitions equal the definition, in float64 and exactly."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs
from oracles.operations import RULES
from oracles.rule.gated_delta import merge, transition
from properties.rules.case import Case
from tests.exact_numbers import Matrix, Residue, Token, Whole, dot, residues, token_by_token
from tests.oracle_forms import ORDINARY, RELATIVE_LIMIT, by_definition, of
from tests.together import for_each

# States passed between shards


def passed(inputs: Inputs, sizes: Sequence[int], combine: Callable[..., tuple[Tensor, Tensor]] = merge) -> tuple[Tensor, Tensor]:
    """M and E of all tokens of the first head, from those of shards of `sizes` tokens."""
    tokens = [inputs[name][0, :, 0].double() for name in ("k", "v")]
    tokens += [inputs.beta.new_zeros(inputs.beta.shape[1]).double() if inputs.g is None else inputs.g[0, :, 0].double()]
    tokens += [inputs.beta[0, :, 0].double()]
    width, shards = inputs.k.shape[-1], zip(*(tensor.split(list(sizes)) for tensor in tokens), strict=True)
    whole = torch.eye(width, dtype=torch.float64), torch.zeros(width, inputs.v.shape[-1], dtype=torch.float64)
    for shard in shards:
        whole = combine(whole, transition(*shard))
    return whole


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=12)
@given(case=ORDINARY, shards=st.integers(1, 5), seed=st.integers(0, 2**16))
@pytest.mark.slow_after_first
def test_merged_transitions_of_shards_are_the_definition(operation: str, case: Case, shards: int, seed: int) -> None:
    one = dataclasses.replace(of(operation, case), lengths=(case.tokens,), state="random", qk_norm=False, heads=1, value_heads=1)
    cuts = sorted(random.Random(seed).choices(range(one.tokens + 1), k=shards - 1))
    inputs = one.inputs()
    keep, write = passed(inputs, [b - a for a, b in itertools.pairwise([0, *cuts, one.tokens])])
    state = inputs.state[0, 0].double()
    want = by_definition(inputs, {})["final_state"][0, 0]
    assert (keep @ state + write - want).abs().max() <= RELATIVE_LIMIT * want.abs().max()


WRONG_MERGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "the later shard first": lambda earlier, later: merge(later, earlier),
    "M on the later shard's E": lambda earlier, later: (later[0] @ earlier[0], later[0] @ later[1] + earlier[1]),
    "E not passed on": lambda earlier, later: (later[0] @ earlier[0], later[1]),
    "M not passed on": lambda earlier, later: (later[0], later[0] @ earlier[1] + later[1]),
}


@for_each("operation", RULES)
@for_each("wrong", WRONG_MERGES)
def test_wrong_merge_of_shards_is_rejected(operation: str, wrong: str) -> None:
    inputs = Case.parse(f"op={operation} lengths=20 gate=10 state=random seed=4").inputs()
    state, want = inputs.state[0, 0].double(), by_definition(inputs, {})["final_state"][0, 0]
    errors = []
    for combine in (merge, WRONG_MERGES[wrong]):
        keep, write = passed(inputs, (7, 4, 9), combine)
        errors.append(float((keep @ state + write - want).abs().max() / want.abs().max()))
    assert errors[0] <= RELATIVE_LIMIT
    assert errors[1] > 1e-3


def stretch(tokens: Sequence[Token], width: int, value_width: int, one: Any) -> tuple[Matrix, Matrix]:
    """M and E of some tokens in any ring: what becomes of the identity if nothing is written, beside what becomes of nothing."""
    zero = one - one
    state = [[one if row == column else zero for column in range(width)] + [zero] * value_width for row in range(width)]
    _, state = token_by_token([token._replace(v=[zero] * width + token.v) for token in tokens], state)
    return [row[:width] for row in state], [row[width:] for row in state]


def applied(keep: Matrix, state: Matrix) -> Matrix:
    return [[dot(row, column) for column in zip(*state, strict=True)] for row in keep]


def added(a: Matrix, b: Matrix) -> Matrix:
    return [[x + y for x, y in zip(one, other, strict=True)] for one, other in zip(a, b, strict=True)]


Pieces = tuple[Matrix, Matrix]
Merge = Callable[[Pieces, Pieces], Pieces]


def merged(earlier: Pieces, later: Pieces) -> Pieces:
    """`merge` in any ring."""
    return applied(later[0], earlier[0]), added(applied(later[0], earlier[1]), later[1])


WRONG_MERGED: dict[str, Merge] = {
    "the later shard first": lambda earlier, later: merged(later, earlier),
    "M on the later shard's E": lambda earlier, later: (
        applied(later[0], earlier[0]),
        added(applied(later[0], later[1]), earlier[1]),
    ),
    "E not passed on": lambda earlier, later: (applied(later[0], earlier[0]), later[1]),
    "M not passed on": lambda earlier, later: (later[0], added(applied(later[0], earlier[1]), later[1])),
}


def by_shards(tokens: Sequence[Token], state: Matrix, sizes: Sequence[int], combine: Merge = merged) -> tuple[Matrix, Matrix]:
    """Outputs and final state of shards that know of what came before only the merged transitions, as ranks do."""
    outputs: Matrix = []
    before, start = stretch([], len(state), len(state[0]), Residue(1)), 0
    for size in sizes:
        shard = tokens[start : start + size]
        rows, _ = token_by_token(shard, added(applied(before[0], state), before[1]))
        before = combine(before, stretch(shard, len(state), len(state[0]), Residue(1)))
        outputs, start = outputs + rows, start + size
    return outputs, added(applied(before[0], state), before[1])


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=4),
    key_dim=st.integers(1, 3),
    value_dim=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.slow_after_first
def test_states_passed_between_shards_are_the_recurrence_exactly(
    operation: str, sizes: list[int], key_dim: int, value_dim: int, seed: int
) -> None:
    tokens, state = residues(operation, sum(sizes), key_dim, value_dim, seed)
    assert by_shards(tokens, state, sizes) == token_by_token(tokens, state)
    parts, start = [], 0
    for size in sizes:
        parts.append(stretch(tokens[start : start + size], key_dim, value_dim, Residue(1)))
        start += size
    while len(parts) > 1:  # in a tree as well as one after the other
        parts = [merged(*parts[at : at + 2]) if at + 1 < len(parts) else parts[at] for at in range(0, len(parts), 2)]
    assert parts in ([], [stretch(tokens, key_dim, value_dim, Residue(1))])


@for_each("operation", RULES)
@for_each("wrong", WRONG_MERGED)
def test_wrong_passing_of_states_is_rejected(operation: str, wrong: str) -> None:
    tokens, state = residues(operation, 8, 2, 2, seed=0)
    assert by_shards(tokens, state, [3, 4, 1]) == token_by_token(tokens, state)
    assert by_shards(tokens, state, [3, 4, 1], WRONG_MERGED[wrong]) != token_by_token(tokens, state)


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
def test_transition_that_forgets_the_decay_is_rejected(operation: str) -> None:
    tokens, state = residues(operation, 5, 2, 2, seed=0)
    keep, write = stretch(tokens, 2, 2, Residue(1))
    undecayed, _ = stretch([token._replace(decay=[Residue(1)] * 2) for token in tokens], 2, 2, Residue(1))
    want = token_by_token(tokens, state)[1]
    assert added(applied(keep, state), write) == want
    assert added(applied(undecayed, state), write) != want


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 4), max_size=4),
    widths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 2**32),
)
def test_transition_and_merge_equal_python_integers(operation: str, sizes: list[int], widths: tuple[int, int], seed: int) -> None:
    call = Whole(operation, (sum(sizes),), 1, 1, *widths, seed)
    (tokens,) = call.by_head(call.numbers(), 1, lambda head: head).values()
    keep, write = passed(call.inputs(), sizes)
    assert (keep.tolist(), write.tolist()) == stretch(tokens, *widths, 1)
