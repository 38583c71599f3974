"""Layouts and exchanges refuse what does not fit, and the message has the rule and the value."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import parallel
from oracles.parallel import Layout, Network, join, local_cu_seqlens, pad, padded_lengths, shard, unpad
from tests.together import for_each

# What is refused


def zeros(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


TWO = parallel.zigzag([8], 2)
Refusal = tuple[Callable[[], object], str]
BAD_COUNTS = (0, -1, 2.0, True, None)
BAD_LENGTHS = (
    ([4, -2], "lengths must be whole numbers from 0 up, got -2 in place 1"),
    ([4.0], "lengths must be whole numbers from 0 up, got 4.0 in place 0"),
    ([4, True], "lengths must be whole numbers from 0 up, got True in place 1"),
    (["4"], "lengths must be whole numbers from 0 up, got '4' in place 0"),
    ([], "lengths must be a list of at least one whole number, got none"),
    (torch.tensor([0, 4]), "lengths must be a list of at least one whole number, got Tensor"),
    (4, "lengths must be a list of at least one whole number, got int"),
)
REFUSED: list[Refusal] = [
    (lambda: parallel.zigzag([8, 12], 4), "lengths must be multiples of 2 * cp = 8, got 12 in place 1"),
    (lambda: parallel.zigzag([16, 15], 4), "lengths must be multiples of 2 * cp = 8, got 15 in place 1"),
    (lambda: parallel.zigzag_batch([5, 7], 4), "lengths must add up to a multiple of 2 * cp = 8, got 12"),
    (lambda: parallel.contiguous([5, 6], 4), "lengths must add up to a multiple of cp = 4, got 11"),
    (lambda: parallel.contiguous_pieces([5, 6], 4), "lengths must add up to a multiple of cp = 4, got 11"),
    (lambda: parallel.head_parallel([8, 6], 4), "sections must be multiples of cp = 4, got 6 in place 1"),
    (lambda: parallel.head_parallel([8, 0], 4), "sections must be whole numbers from 1 up, got 0 in place 1"),
    (lambda: parallel.head_parallel([], 4), "sections must be a list of at least one whole number, got none"),
    (lambda: parallel.head_parallel({"q": 4}, 4), "sections must be a list of at least one whole number, got dict"),
    (lambda: padded_lengths([4], 0), "multiple must be a whole number from 1 up, got 0"),
    (lambda: padded_lengths([4], True), "multiple must be a whole number from 1 up, got True"),
    (lambda: padded_lengths([4], 2.0), "multiple must be a whole number from 1 up, got 2.0"),
    (lambda: parallel.real_tokens([3, 2], [4]), "padded must have one length a sequence, 2, got 1"),
    (lambda: parallel.pad_tokens([3, 5], [4, 4]), "padded must hold the 5 tokens of sequence 1, got 4"),
    (lambda: parallel.real_tokens([0], [-4]), "padded must be whole numbers from 0 up, got -4 in place 0"),
    (
        lambda: pad(torch.zeros(4, 2), [3], [4]),
        "x must have the 3 tokens of lengths along axis 0, got torch.float32 of shape (4, 2)",
    ),
    (lambda: pad(torch.tensor(0.0), [1], [2]), "x must have the 1 tokens of lengths along axis 0, got torch.float32 of shape ()"),
    (
        lambda: unpad(torch.zeros(3, 2), [3], [4]),
        "x must have the 4 tokens of padded along axis 0, got torch.float32 of shape (3, 2)",
    ),
    (lambda: unpad([1, 2, 3, 4], [3], [4]), "x must have the 4 tokens of padded along axis 0, got list"),
    (lambda: local_cu_seqlens((), torch.int16), "dtype must be int32 or int64, got torch.int16"),
    (lambda: parallel.lengths_of(torch.tensor([0, 5, 3, 7]), 7), "cu_seqlens must not decrease, got [0, 5, 3, 7]"),
    (lambda: parallel.lengths_of(torch.tensor([0, 3]), 7), "cu_seqlens must end at the token count 7, got 3 ([0, 3])"),
    (
        lambda: parallel.lengths_of(torch.tensor([0, 7], dtype=torch.int16), 7),
        "cu_seqlens must be a vector of int32 or int64, got torch.int16 of shape (2,)",
    ),
    (lambda: shard(torch.zeros(8), TWO, 1), "axis must be one of x's, got 1 for x torch.float32 of shape (8,)"),
    (lambda: shard(torch.zeros(8), TWO, -2), "axis must be one of x's, got -2 for x torch.float32 of shape (8,)"),
    (lambda: shard([0] * 8, TWO), "axis must be one of x's, got 0 for x list"),
    (lambda: shard(torch.zeros(7), TWO), "layout must name each of 7 indices once, got 8 of them"),
    (lambda: shard(torch.zeros(9), TWO), "layout must name each of 9 indices once, got 8 of them"),
    (
        lambda: shard(torch.zeros(3), (torch.tensor([0, 1]), torch.tensor([1]))),
        "layout must name each of 3 indices once, got 1 where 2 is due",
    ),
    (lambda: shard(torch.zeros(2), (torch.tensor([0, -1]),)), "layout must name each of 2 indices once, got -1 where 0 is due"),
    (lambda: shard(torch.zeros(2), (torch.tensor([0, 2]),)), "layout must name each of 2 indices once, got 2 where 1 is due"),
    (lambda: shard(torch.zeros(2), ()), "layout must have at least one rank, got none"),
    (lambda: shard(torch.zeros(2), None), "layout must have at least one rank, got NoneType"),
    (lambda: shard(torch.zeros(2), (torch.arange(2),), 0.0), "axis must be one of x's, got 0.0 for x torch.float32 of shape (2,)"),
    (lambda: shard(torch.zeros(1, 2), TWO, True), "axis must be one of x's, got True for x torch.float32 of shape (1, 2)"),
    (lambda: join(None, TWO), "shards must be one tensor a rank, got NoneType"),
    (lambda: parallel.lengths_of(torch.tensor([0, 2]), 2.0), "tokens must be a whole number from 0 up, got 2.0"),
    (lambda: parallel.cp_to_hp_fused(zeros((1, 2), (1, 2)), TWO, [2], None), "network must be a Network, got NoneType"),
    (lambda: parallel.hp_to_cp_per_sequence(zeros((2, 2)), [2], [2], None), "network must be a Network, got NoneType"),
    (
        lambda: Network().all_to_all([[torch.zeros(1), torch.zeros(1)], [torch.zeros(1), torch.zeros(1).double()]]),
        "blocks must all have one dtype, got [torch.float32, torch.float64]",
    ),
    (
        lambda: shard(torch.zeros(1), (torch.tensor([0], dtype=torch.int32),)),
        "layout must be int64 vectors, one a rank, got torch.int32 of shape (1,) for rank 0",
    ),
    (lambda: shard(torch.zeros(2), (torch.tensor([0]), [1])), "layout must be int64 vectors, one a rank, got list for rank 1"),
    (
        lambda: shard(torch.zeros(2), (torch.tensor([[0, 1]]),)),
        "layout must be int64 vectors, one a rank, got torch.int64 of shape (1, 2) for rank 0",
    ),
    (lambda: join([], TWO), "shards must be one tensor a rank, got none"),
    (lambda: join(zeros((4,)), TWO), "shards must have the layout's sizes [4, 4] along axis 0, got [4]"),
    (lambda: join(zeros((4,), (4,), (4,)), TWO), "shards must have the layout's sizes [4, 4] along axis 0, got [4, 4, 4]"),
    (lambda: join(zeros((4,), (3,)), TWO), "shards must have the layout's sizes [4, 4] along axis 0, got [4, 3]"),
    (
        lambda: join(zeros((4, 2), (4, 3)), TWO),
        "shards must agree between ranks, got torch.float32 of shape (4, 3) on rank 1, torch.float32 of shape (4, 2) on rank 0",
    ),
    (
        lambda: join(zeros((4, 2), (4,)), TWO),
        "shards must agree between ranks, got torch.float32 of shape (4,) on rank 1, torch.float32 of shape (4, 2) on rank 0",
    ),
    (
        lambda: join([torch.zeros(4), torch.zeros(4, dtype=torch.float64)], TWO),
        "shards must agree between ranks, got torch.float64 of shape (4,) on rank 1, torch.float32 of shape (4,) on rank 0",
    ),
    (lambda: join([[0] * 4] * 2, TWO), "shards must be tensors with axis 0, got list on rank 0"),
    (lambda: join(zeros((4,), (4,)), TWO, 1), "shards must be tensors with axis 1, got torch.float32 of shape (4,) on rank 0"),
    (lambda: join(zeros((4,)), ()), "layout must have at least one rank, got none"),
    (lambda: Network().all_to_all([zeros((1,), (1,)), zeros((1,))]), "blocks must be one a rank on each of 2 ranks, got [2, 1]"),
    (lambda: Network().all_to_all([zeros((1,), (1,)), zeros((1,), (2,))]), "blocks must all have one shape, got [(1,), (2,)]"),
]


@for_each(("call", "message"), REFUSED)
def test_illegal_argument_is_refused_with_value_and_rule(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_all_layouts_refuse_what_is_no_number_of_ranks_and_what_are_no_lengths() -> None:
    """Every wrong value is tried on the zigzag layout. The others have the same validators, and one wrong value shows it."""
    for layout in (parallel.zigzag_batch, parallel.contiguous, parallel.head_parallel, parallel.contiguous_pieces, parallel.zigzag):
        for cp in BAD_COUNTS if layout is parallel.zigzag else BAD_COUNTS[:1]:
            with pytest.raises(ValueError, match=f"^cp must be a whole number from 1 up, got {cp!r}$"):
                layout([8], cp)
    for layout in (parallel.zigzag_batch, parallel.contiguous, padded_lengths, parallel.contiguous_pieces, parallel.zigzag):
        for lengths, message in BAD_LENGTHS if layout is parallel.zigzag else BAD_LENGTHS[:1]:
            with pytest.raises(ValueError, match=f"^{message}$"):
                layout(lengths, 1)


CP_SHARDS, HP_SHARDS = zeros((4, 6), (4, 6)), zeros((8, 3), (8, 3))
MOVES: dict[str, tuple[Callable[..., object], list[Tensor], str]] = {
    "cp_to_hp_per_sequence": (parallel.cp_to_hp_per_sequence, CP_SHARDS, "[4, ..., 6] on each of 2 CP ranks"),
    "hp_to_cp_per_sequence": (parallel.hp_to_cp_per_sequence, HP_SHARDS, "[8, ..., 3] on each of 2 HP ranks"),
    "cp_to_hp_fused": (parallel.cp_to_hp_fused, CP_SHARDS, "[4, ..., 6] on each of 2 CP ranks"),
    "hp_to_cp_fused": (parallel.hp_to_cp_fused, HP_SHARDS, "[8, ..., 3] on each of 2 HP ranks"),
}
Change = Callable[[list[Tensor]], object]
WRONG_SHARDS: dict[str, tuple[Change, str]] = {
    "a token too few": (lambda shards: [x[1:] for x in shards], "shards must be {due}, got "),
    "a feature too few": (lambda shards: [x[:, 1:] for x in shards], "shards must be {due}, got "),
    "tokens only": (lambda shards: [x[:, 0] for x in shards], "shards must be {due}, got "),
    "tokens that differ": (lambda shards: [shards[0], shards[1][1:]], "shards must be {due}, got "),
    "features that differ": (lambda shards: [shards[0], shards[1][:, 1:]], "shards must agree between ranks, got "),
    "dtypes that differ": (lambda shards: [shards[0], shards[1].double()], "shards must agree between ranks, got "),
    "an axis more": (lambda shards: [shards[0], shards[1][..., None]], "shards must agree between ranks, got "),
    "no tensor": (lambda shards: [shards[0], None], "shards must be tensors with axis 0, got NoneType on rank 1"),
}


@for_each("wrong", WRONG_SHARDS)
@for_each("move", MOVES)
def test_shards_that_disagree_are_refused(move: str, wrong: str) -> None:
    call, legal, due = MOVES[move]
    change, message = WRONG_SHARDS[wrong]
    packing = TWO if move.endswith("fused") else [8]
    call(legal, packing, [4, 2], Network())
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        call(change(legal), packing, [4, 2], Network())
    assert str(refusal.value).startswith(message.format(due=due))


@for_each("move", MOVES)
@for_each(
    ("sections", "message"),
    [
        ([4, 4], "shards must be "),
        ([2], "shards must be "),
        ([3, 3], "sections must be multiples of cp = 2, got 3 in place 0"),
        ([6, 0], "sections must be whole numbers from 1 up, got 0 in place 1"),
        ([], "sections must be a list of at least one whole number, got none"),
        (6, "sections must be a list of at least one whole number, got int"),
    ],
)
def test_sections_that_disagree_are_refused(move: str, sections: Any, message: str) -> None:
    call, legal, _ = MOVES[move]
    packing = TWO if move.endswith("fused") else [8]
    with pytest.raises(ValueError, match=f"^{message}"):
        call(legal, packing, sections, Network())


@for_each("move", MOVES)
@for_each("ranks", [0, 1, 3])
def test_a_wrong_number_of_ranks_is_refused(move: str, ranks: int) -> None:
    call, legal, _ = MOVES[move]
    fused = move.endswith("fused")
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        call((legal * 2)[:ranks], TWO if fused else [8], [4, 2], Network())
    if fused:
        wanted = (
            f"shards must be one a rank of the layout, 2, got {ranks}" if ranks else "shards must be one tensor a rank, got none"
        )
        assert str(refusal.value) == wanted
    else:
        rules = {0: "shards must be one tensor a rank, got none", 1: "shards must be [8, ..., 6] on each of 1 "}
        assert str(refusal.value).startswith(rules.get(ranks, "lengths must be multiples of 2 * cp = 6, got 8 in place 0"))


@for_each("move", MOVES)
def test_tokens_that_disagree_with_the_shards_are_refused(move: str) -> None:
    call, legal, _ = MOVES[move]
    fused = move.endswith("fused")
    with pytest.raises(ValueError, match=r"^shards must be \["):
        call(legal, parallel.zigzag([12], 2) if fused else [4, 8], [4, 2], Network())


@for_each("move", ["cp_to_hp_fused", "hp_to_cp_fused"])
@for_each(
    ("layout", "message"),
    [
        ((torch.arange(3), torch.arange(3, 8)), r"layout must give every rank as many tokens, got \[3, 5\]"),
        ((torch.arange(4), torch.arange(4)), "layout must name each of 8 indices once, got 0 where 1 is due"),
        ((), "layout must have at least one rank, got none"),
    ],
)
def test_a_layout_that_shares_out_unevenly_is_refused(move: str, layout: Layout, message: str) -> None:
    call, legal, _ = MOVES[move]
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(legal, layout, [4, 2], Network())


@for_each("move", ["cp_to_hp_per_sequence", "hp_to_cp_per_sequence"])
@for_each(
    ("lengths", "message"),
    [
        ([2, 6], r"lengths must be multiples of 2 \* cp = 4, got 2 in place 0"),
        ([8, -4], "lengths must be whole numbers from 0 up, got -4 in place 1"),
        ([], "lengths must be a list of at least one whole number, got none"),
        (torch.tensor([0, 8]), "lengths must be a list of at least one whole number, got Tensor"),
    ],
)
def test_lengths_that_cannot_be_cut_are_refused(move: str, lengths: Any, message: str) -> None:
    call, legal, _ = MOVES[move]
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(legal, lengths, [4, 2], Network())


@for_each(("move", "sections"), [(move, [4] if move.startswith("cp") else [16]) for move in MOVES])
def test_a_vector_is_not_taken_for_tokens_and_features_at_once(move: str, sections: list[int]) -> None:
    call = MOVES[move][0]
    packing, size = (TWO if move.endswith("fused") else [8]), 4 if move.startswith("cp") else 8
    call(zeros((size, size), (size, size)), packing, sections, Network())
    with pytest.raises(ValueError, match=rf"^shards must be \[{size}, ..., {size}\] on each of 2 "):
        call(zeros((size,), (size,)), packing, sections, Network())
