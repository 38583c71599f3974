"""Layouts of the whole stream ignore where sequences end, and ranks hand on the states of sequences that they share."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracles import parallel
from oracles.operation import check_offsets
from oracles.parallel import Network, local_cu_seqlens
from tests.parallel_checks import RIGHT, Packing, broken, hp_by_hand, lists, recurrence, same, scan, slices_by_hand, zigzag_by_hand

# The whole stream


@st.composite
def streams(draw: st.DrawFn, pieces: int) -> tuple[list[int], int]:
    """Any lengths, empty ones too, of which the last makes the total a multiple of pieces * cp; and cp."""
    cp = draw(st.one_of(st.integers(1, 5), st.integers(1, 64)))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    lengths[draw(st.integers(0, len(lengths) - 1))] += -sum(lengths) % (pieces * cp)
    return lengths, cp


@settings(max_examples=60)
@given(stream=streams(2))
@example(stream=([0, 5, 0, 0, 3, 8], 4))
@example(stream=([0, 0], 3))
def test_layouts_of_the_stream_ignore_where_sequences_end(stream: tuple[list[int], int]) -> None:
    lengths, cp = stream
    total = sum(lengths)
    assert lists(parallel.zigzag_batch(lengths, cp)) == zigzag_by_hand([total], cp)
    assert lists(parallel.contiguous(lengths, cp)) == slices_by_hand([total], cp)
    halves = parallel.contiguous(lengths, 2 * cp)
    want = [torch.cat([halves[rank], halves[2 * cp - 1 - rank]]).tolist() for rank in range(cp)]
    assert lists(parallel.zigzag_batch(lengths, cp)) == want


@settings(max_examples=40)
@given(stream=streams(2), slices=st.lists(st.integers(1, 2), min_size=1, max_size=3))
@example(stream=([0, 5, 0, 0, 3, 8], 4), slices=[1, 2])
@pytest.mark.slow
def test_every_layout_of_tokens_goes_through_the_fused_form(stream: tuple[list[int], int], slices: list[int]) -> None:
    lengths, cp = stream
    packing = Packing(tuple(lengths), cp, tuple(cp * size for size in slices))
    for layout, shares in (
        (parallel.zigzag_batch(lengths, cp), zigzag_by_hand([packing.tokens], cp)),
        (parallel.contiguous(lengths, cp), slices_by_hand([packing.tokens], cp)),
    ):
        shards = [packing.elements(tokens, None) for tokens in shares]
        moved = parallel.cp_to_hp_fused(shards, layout, packing.sections, Network())
        assert same(moved, hp_by_hand(packing))
        assert same(parallel.hp_to_cp_fused(moved, layout, packing.sections, Network()), shards)


@settings(max_examples=40)
@given(stream=streams(2), slices=st.lists(st.integers(1, 2), min_size=1, max_size=3))
@pytest.mark.slow
def test_one_long_sequence_in_the_per_sequence_form_is_the_whole_stream(stream: tuple[list[int], int], slices: list[int]) -> None:
    lengths, cp = stream
    packing = Packing(tuple(lengths), cp, tuple(cp * size for size in slices))
    shards = [packing.elements(tokens, None) for tokens in zigzag_by_hand([packing.tokens], cp)]
    network = Network()
    moved = parallel.cp_to_hp_per_sequence(shards, [packing.tokens], packing.sections, network)
    assert same(moved, hp_by_hand(packing))
    assert network.collectives == (len(slices) if packing.tokens else 0)
    assert same(parallel.hp_to_cp_per_sequence(moved, [packing.tokens], packing.sections, Network()), shards)


@settings(max_examples=60)
@given(stream=streams(1), dtype=st.sampled_from((torch.int32, torch.int64)))
@example(stream=([0, 5, 0, 0, 4, 7, 0], 4), dtype=torch.int32)
@example(stream=([0, 0], 3), dtype=torch.int64)
def test_pieces_of_a_ragged_stream_hand_on_states_and_count_local_tokens(stream: tuple[list[int], int], dtype: torch.dtype) -> None:
    lengths, cp = stream
    packing = Packing(tuple(lengths), cp, (cp,))
    assert broken("pieces", RIGHT, packing) == []
    assert broken("states", RIGHT, packing) == []
    ranks = parallel.contiguous_pieces(lengths, cp)
    for rank, (pieces, tokens) in enumerate(zip(ranks, parallel.contiguous(lengths, cp), strict=True)):
        local = local_cu_seqlens(pieces, dtype)
        assert local.dtype == dtype
        if not len(tokens):
            assert local.tolist() == [0]
            continue
        check_offsets(local, 1, len(tokens))
        starts = [0, *itertools.accumulate(lengths)]
        spans = [range(starts[piece.sequence] + piece.first, starts[piece.sequence] + piece.end) for piece in pieces]
        cut = [tokens[begin:end].tolist() for begin, end in itertools.pairwise(local.tolist())]
        assert cut == [list(span) for span in spans]
        assert pieces[-1].sends == (rank + 1 < cp and ranks[rank + 1][0].receives)


@settings(max_examples=40)
@given(stream=streams(1))
@example(stream=([3, 0, 29], 8))
def test_a_state_over_many_ranks_is_a_chain_of_summaries(stream: tuple[list[int], int]) -> None:
    """Each rank sums up its piece as (M, S_ext), from a state of zeros; S <- M S + S_ext along the ranks before gives the state."""
    lengths, cp = stream
    packing = Packing(tuple(lengths), cp, (cp,))
    steps, starts = recurrence(packing)
    begins = [0, *itertools.accumulate(lengths)]
    ranks = parallel.contiguous_pieces(lengths, cp)
    nothing, identity = torch.zeros(2, 2, dtype=torch.int64), torch.eye(2, dtype=torch.int64)
    for rank, pieces in enumerate(ranks):
        if not pieces or not pieces[0].receives:
            continue
        begin = begins[pieces[0].sequence]
        state, first = starts[pieces[0].sequence], rank
        while ranks[first][0].receives and ranks[first][0].sequence == pieces[0].sequence:
            first -= 1
        for before in ranks[first:rank]:
            mine = steps[begin + before[-1].first : begin + before[-1].end]
            product = identity
            for matrix, _ in mine:
                product = matrix @ product
            state = product @ state + scan(mine, nothing)[1]
        assert torch.equal(state, scan(steps[begin : begin + pieces[0].first], starts[pieces[0].sequence])[1])
