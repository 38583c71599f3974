"""Layouts hold what the prose says, and both forms of CP -> HP and HP -> CP equal the definition bit for bit; wrong ones do not."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from oracles import parallel
from oracles.parallel import Layout, Network, Piece
from tests.parallel_checks import (
    CHECKS,
    EMPTY,
    FORMS,
    RIGHT,
    TELLING,
    Implementation,
    Packing,
    broken,
    cp_by_hand,
    hp_by_hand,
    one_block,
    packings,
    same,
)
from tests.together import for_each


@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=6)
@given(packing=packings())
@example(packing=TELLING)
@example(packing=EMPTY)
@example(packing=Packing((64, 0, 128), 32, (32, 64)))
@example(packing=Packing((6, 0, 2), 1, (3, 1), (1,)))
@pytest.mark.slow_after_first
def test_check_holds(check: str, packing: Packing) -> None:
    assert broken(check, RIGHT, packing) == []


@pytest.mark.slow
@for_each("cp", (*range(1, 17), 24, 31, 32, 64))
def test_layouts_and_both_forms_are_right_on_every_number_of_ranks(cp: int) -> None:
    packing = Packing((2 * cp, 0, 4 * cp), cp, (cp, 2 * cp))
    for check in ("tokens", "features", "shared out", "refusal"):
        assert broken(check, RIGHT, packing) == [], check
    one = Packing((0, 2 * cp), cp, (cp, 2 * cp))  # every sequence has cp^2 blocks, and the check above draws several
    for check in ("into", "back"):
        assert broken(check, RIGHT, one) == [], check


# Wrong implementations


def pieces_of(length: int, start: int, cp: int) -> list[list[int]]:
    size = length // (2 * cp)
    return [list(range(start + piece * size, start + (piece + 1) * size)) for piece in range(2 * cp)]


def zigzag_with(pair: Callable[[list[list[int]], int, int], list[int]], step: int = 1) -> Callable[..., Layout]:
    """A zigzag in which `pair` joins a rank's two pieces of a sequence; sequences in order, or backward for a step of -1."""

    def layout(lengths: Sequence[int], cp: int) -> Layout:
        starts = [0, *itertools.accumulate(lengths)]
        cuts = [pieces_of(length, start, cp) for length, start in zip(lengths, starts, strict=False)][::step]
        return tuple(
            torch.tensor([token for cut in cuts for token in pair(cut, rank, cp)], dtype=torch.int64) for rank in range(cp)
        )

    return layout


def right_pair(cut: list[list[int]], rank: int, cp: int) -> list[int]:
    return cut[rank] + cut[2 * cp - 1 - rank]


def uneven_zigzag(lengths: Sequence[int], cp: int) -> Layout:
    """Takes multiples of cp: its pieces differ by a token."""
    cuts = [tokens.tensor_split(2 * cp) for tokens in torch.arange(sum(lengths)).split(list(lengths))]
    return tuple(torch.cat([half for cut in cuts for half in (cut[rank], cut[2 * cp - 1 - rank])]) for rank in range(cp))


def front_padding(lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    starts = [0, *itertools.accumulate(padded)]
    spans = [range(start + longer - length, start + longer) for start, longer, length in zip(starts, padded, lengths, strict=False)]
    return torch.tensor([place for span in spans for place in span], dtype=torch.int64)


def blind_to_sections(form: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Slices for the ranks lie side by side already, as they would in a single section."""
    return lambda shards, layout, sections, network: form(shards, layout, [sum(sections)], network)


def without_gather(form: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Tokens stay in the order of the ranks."""

    def fused(shards: Sequence[Tensor], layout: Layout, sections: Sequence[int], network: Network) -> list[Tensor]:
        return form(shards, torch.arange(sum(map(len, layout))).tensor_split(len(layout)), sections, network)

    return fused


def gathers_by_order(shards: Sequence[Tensor], layout: Layout, sections: Sequence[int], network: Network) -> list[Tensor]:
    """The gather after the all-to-all takes the order of the ranks' tokens, not its inverse."""
    rank_major = without_gather(parallel.cp_to_hp_fused)(shards, layout, sections, network)
    return [x.index_select(0, torch.cat(layout)) for x in rank_major]


def as_one_sequence(form: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda shards, lengths, sections, network: form(shards, [sum(lengths)], sections, network)


def sends_empty_sequences(
    shards: Sequence[Tensor], lengths: Sequence[int], sections: Sequence[int], network: Network
) -> list[Tensor]:
    for _ in range(lengths.count(0)):
        network.all_to_all([[x[:0] for _ in shards] for x in shards])
    return parallel.cp_to_hp_per_sequence(shards, lengths, sections, network)


def sends_everything_to_all(shards: Sequence[Tensor], layout: Layout, sections: Sequence[int], network: Network) -> list[Tensor]:
    """An all-gather, of which each rank keeps what it needs."""
    whole = [torch.cat(blocks) for blocks in network.all_to_all([[x] * len(shards) for x in shards])]
    features = parallel.head_parallel(sections, len(shards))
    return [x[torch.cat(layout).argsort()][..., columns] for x, columns in zip(whole, features, strict=True)]


def gradient_of_another_rank(shards: Sequence[Tensor], layout: Layout, sections: Sequence[int], network: Network) -> list[Tensor]:
    """The right values, whose cotangents return to the rank after."""
    right = parallel.cp_to_hp_fused(shards, layout, sections, network)
    wrong = parallel.cp_to_hp_fused([*shards[1:], shards[0]], layout, sections, Network())
    return [value.detach() + other - other.detach() for value, other in zip(right, wrong, strict=True)]


def without_empty(lengths: Sequence[int], cp: int) -> tuple[tuple[Piece, ...], ...]:
    """Numbers the sequences after empty ones were dropped."""
    return parallel.contiguous_pieces([length for length in lengths if length], cp)


def pieces_with(change: Callable[[Piece, int], Piece]) -> Callable[..., tuple[tuple[Piece, ...], ...]]:
    """The pieces, each changed, given its place on its rank."""
    return lambda lengths, cp: tuple(
        tuple(change(piece, at) for at, piece in enumerate(rank)) for rank in parallel.contiguous_pieces(lengths, cp)
    )


class AlwaysReceives(Piece):
    """A rank's first piece goes on from the rank before, even where a sequence begins."""

    @property
    def receives(self) -> bool:
        return True


class NeverReceives(Piece):
    @property
    def receives(self) -> bool:
        return False


def as_kind(kind: type[Piece], piece: Piece) -> Piece:
    return kind(piece.sequence, piece.first, piece.end, piece.length)


WRONG: dict[str, tuple[Implementation, str]] = {
    "multiple of cp only": (Implementation(zigzag=uneven_zigzag), "refusal"),
    "pieces r and r + cp": (Implementation(zigzag=zigzag_with(lambda cut, rank, cp: cut[rank] + cut[rank + cp])), "tokens"),
    "sequences backward": (Implementation(zigzag=zigzag_with(right_pair, step=-1)), "tokens"),
    "second piece backward": (
        Implementation(zigzag=zigzag_with(lambda cut, rank, cp: cut[rank] + cut[2 * cp - 1 - rank][::-1])),
        "tokens",
    ),
    "second piece first": (Implementation(zigzag=zigzag_with(lambda cut, rank, cp: cut[2 * cp - 1 - rank] + cut[rank])), "tokens"),
    "pieces 2 r and 2 r + 1": (
        Implementation(zigzag=zigzag_with(lambda cut, rank, cp: cut[2 * rank] + cut[2 * rank + 1])),
        "tokens",
    ),
    "first piece twice": (Implementation(zigzag=zigzag_with(lambda cut, rank, cp: cut[rank] + cut[rank])), "shared out"),
    "first piece only": (Implementation(zigzag=zigzag_with(lambda cut, rank, cp: cut[rank])), "shared out"),
    "whole stream for each sequence": (Implementation(zigzag=parallel.zigzag_batch), "tokens"),
    "each sequence for the whole stream": (Implementation(zigzag_batch=parallel.zigzag), "tokens"),
    "zigzag for contiguous": (Implementation(contiguous=parallel.zigzag_batch), "tokens"),
    "sections as one block": (Implementation(head_parallel=one_block), "features"),
    "sections backward": (
        Implementation(head_parallel=lambda sections, cp: parallel.head_parallel(sections[::-1], cp)),
        "features",
    ),
    "padding at the front": (Implementation(real_tokens=front_padding), "padding"),
    "padding after all sequences": (
        Implementation(real_tokens=lambda lengths, padded: torch.arange(sum(lengths))),
        "padding",
    ),
    "fused in blind to sections": (Implementation(cp_to_hp_fused=blind_to_sections(parallel.cp_to_hp_fused)), "into"),
    "fused back blind to sections": (Implementation(hp_to_cp_fused=blind_to_sections(parallel.hp_to_cp_fused)), "back"),
    "fused in without gather": (Implementation(cp_to_hp_fused=without_gather(parallel.cp_to_hp_fused)), "into"),
    "fused back without gather": (Implementation(hp_to_cp_fused=without_gather(parallel.hp_to_cp_fused)), "back"),
    "fused back without gather, seen on return": (
        Implementation(hp_to_cp_fused=without_gather(parallel.hp_to_cp_fused)),
        "round trip",
    ),
    "fused in gathers by the order": (Implementation(cp_to_hp_fused=gathers_by_order), "into"),
    "all sequences in as one": (Implementation(cp_to_hp_per_sequence=as_one_sequence(parallel.cp_to_hp_per_sequence)), "into"),
    "all sequences back as one": (Implementation(hp_to_cp_per_sequence=as_one_sequence(parallel.hp_to_cp_per_sequence)), "back"),
    "all-to-all for empty sequences": (Implementation(cp_to_hp_per_sequence=sends_empty_sequences), "traffic"),
    "all-gather for all-to-all": (Implementation(cp_to_hp_fused=sends_everything_to_all), "traffic"),
    "gradient of another rank": (Implementation(cp_to_hp_fused=gradient_of_another_rank), "gradients"),
    "empty sequences uncounted": (Implementation(contiguous_pieces=without_empty), "pieces"),
    "a rank's first piece always receives": (
        Implementation(contiguous_pieces=pieces_with(lambda piece, at: piece if at else as_kind(AlwaysReceives, piece))),
        "states",
    ),
    "no piece receives": (Implementation(contiguous_pieces=pieces_with(lambda piece, at: as_kind(NeverReceives, piece))), "states"),
    "pieces of sequences cut apart": (
        Implementation(contiguous_pieces=pieces_with(lambda piece, at: dataclasses.replace(piece, length=piece.end))),
        "pieces",
    ),
}


@for_each("wrong", WRONG)
def test_wrong_implementation_is_rejected(wrong: str) -> None:
    way, check = WRONG[wrong]
    assert broken(check, RIGHT, TELLING) == []
    assert broken(check, way, TELLING)


def test_every_check_rejects_something() -> None:
    assert {check for _, check in WRONG.values()} == set(CHECKS)


def test_a_round_trip_alone_does_not_see_sections_ignored_both_ways() -> None:
    way = Implementation(
        cp_to_hp_fused=blind_to_sections(parallel.cp_to_hp_fused), hp_to_cp_fused=blind_to_sections(parallel.hp_to_cp_fused)
    )
    assert not [what for what in broken("round trip", way, TELLING) if what.startswith("fused, fused")]
    assert [what for what in broken("into", way, TELLING) if what.startswith("fused")]


# The network


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_all_to_all_transposes_and_counts_what_leaves_a_rank(dtype: torch.dtype) -> None:
    blocks = [[torch.full((2, 5), 10 * sender + receiver, dtype=dtype) for receiver in range(3)] for sender in range(3)]
    network = Network()
    received = network.all_to_all(blocks)
    assert [[int(block[0, 0]) for block in row] for row in received] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert network == Network(collectives=1, elements=6 * 10, sent_bytes=6 * 10 * dtype.itemsize)
    network.all_to_all(received)
    assert network == Network(collectives=2, elements=2 * 60, sent_bytes=2 * 60 * dtype.itemsize)


def test_inputs_keep_their_values_and_their_dtype() -> None:
    for dtype in (torch.bfloat16, torch.int32, torch.bool):
        shards = [x.to(dtype) for x in cp_by_hand(TELLING)]
        before = [x.clone() for x in shards]
        for form in FORMS:
            moved = RIGHT.into(form, shards, TELLING, Network())
            assert same(moved, [x.to(dtype) for x in hp_by_hand(TELLING)])
            assert same(RIGHT.back(form, moved, TELLING, Network()), before)
        assert same(shards, before)


def test_strides_of_the_shards_change_nothing() -> None:
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in cp_by_hand(TELLING)]
    assert not any(x.is_contiguous() for x in turned)
    for form in FORMS:
        assert same(RIGHT.into(form, turned, TELLING, Network()), hp_by_hand(TELLING))
