"""Shards of a global tensor are as defined, joining them undoes the cut, and cuts along tokens and features compose."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracles import parallel
from oracles.layer import Layer
from oracles.parallel import Network, join, shard
from tests.parallel_checks import (
    EMPTY,
    FORMS,
    RIGHT,
    TELLING,
    Packing,
    cp_by_hand,
    hp_by_hand,
    lists,
    one_block,
    packings,
    same,
    slices_by_hand,
)

# Shards of a global tensor


@settings(max_examples=60)
@given(packing=packings())
@example(packing=TELLING)
@example(packing=EMPTY)
@pytest.mark.slow
def test_shards_are_as_defined_and_join_undoes_shard_both_ways(packing: Packing) -> None:
    x, cp = packing.x(), packing.cp
    for layout, axis, want in (
        (parallel.zigzag(packing.lengths, cp), 0, cp_by_hand(packing)),
        (parallel.head_parallel(packing.sections, cp), -1, hp_by_hand(packing)),
    ):
        shards = shard(x, layout, axis)
        assert same(shards, want)
        assert same(join(shards, layout, axis), x)
        assert same(shard(join(want, layout, axis), layout, axis), want)


def test_a_shard_on_another_layout_is_not_joined_to_the_whole() -> None:
    x = TELLING.x()
    shards = shard(x, parallel.zigzag(TELLING.lengths, TELLING.cp))
    assert not torch.equal(join(shards, parallel.zigzag_batch(TELLING.lengths, TELLING.cp)), x)


@settings(max_examples=40)
@given(packing=packings())
@example(packing=TELLING)
@pytest.mark.slow
def test_shards_along_tokens_and_features_compose_in_either_order(packing: Packing) -> None:
    x, cp = packing.x(), packing.cp
    tokens, features = parallel.zigzag(packing.lengths, cp), parallel.head_parallel(packing.sections, cp)
    one = [shard(part, features, -1) for part in shard(x, tokens)]
    other = [shard(part, tokens) for part in shard(x, features, -1)]
    for rank, column in itertools.product(range(cp), range(cp)):
        want = packing.elements(tokens[rank].tolist(), features[column].tolist())
        assert same(one[rank][column], want)
        assert same(other[column][rank], want)


@given(
    slices=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    tp=st.integers(1, 6),
    cp=st.integers(1, 6),
)
def test_features_sharded_over_tp_and_then_cp_are_sharded_over_both(slices: list[int], tp: int, cp: int) -> None:
    sections = [tp * cp * size for size in slices]
    want = slices_by_hand(sections, tp * cp)
    shards = shard(torch.arange(sum(sections)), parallel.head_parallel(sections, tp))
    local = parallel.head_parallel([width // tp for width in sections], cp)
    got = [part.tolist() for one in shards for part in shard(one, local)]
    assert got == want
    if tp > 1 and len(slices) > 1:
        whole = one_block([width // tp for width in sections], cp)
        assert cp == 1 or [part.tolist() for one in shards for part in shard(one, whole)] != want


@settings(max_examples=40)
@given(slices=st.lists(st.integers(0, 9), min_size=1, max_size=5), sections=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_one_rank_holds_everything_in_natural_order(slices: list[int], sections: list[int]) -> None:
    packing = Packing(tuple(2 * size for size in slices), 1, tuple(sections))
    whole = [list(range(packing.tokens))]
    assert lists(parallel.zigzag(packing.lengths, 1)) == whole
    assert lists(parallel.zigzag_batch(packing.lengths, 1)) == whole
    assert lists(parallel.contiguous(packing.lengths, 1)) == whole
    assert lists(parallel.head_parallel(sections, 1)) == [list(range(packing.features))]
    for form in FORMS:
        for move in (RIGHT.into, RIGHT.back):
            network = Network()
            assert same(move(form, [packing.x()], packing, network), [packing.x()])
            assert (network.elements, network.sent_bytes) == (0, 0)


@settings(max_examples=40)
@given(cp=st.integers(1, 64), size=st.integers(0, 9))
def test_zigzag_of_one_sequence_is_zigzag_of_the_batch(cp: int, size: int) -> None:
    one = [2 * cp * size]
    assert lists(parallel.zigzag(one, cp)) == lists(parallel.zigzag_batch(one, cp))
    if cp > 1 and size:
        assert lists(parallel.zigzag(one * 2, cp)) != lists(parallel.zigzag_batch(one * 2, cp))


def test_the_sections_of_a_layer_are_sections() -> None:
    layer = Layer(hidden=8, heads=4, value_heads=8, key_dim=3, value_dim=5)
    features = parallel.head_parallel(list(layer.sections.values()), 4)
    starts = layer.offsets()
    for rank, indices in enumerate(features):
        want = [
            range(starts[name] + rank * width // 4, starts[name] + (rank + 1) * width // 4)
            for name, width in layer.sections.items()
        ]
        assert indices.tolist() == [feature for span in want for feature in span]
