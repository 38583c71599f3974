"""Layouts hold what the prose says, and both forms of CP -> HP and HP -> CP equal the definition, bit for bit.

Every token and feature of x carries its own integer, so where it lands is read off. What ought to land where is worked out again
here, token by token and feature by feature. Each check is a function of an implementation and a packing that yields pairs which
ought to be equal; each is shown to reject a wrong implementation.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import parallel
from oracles.layer import Layer
from oracles.operation import check_offsets
from oracles.parallel import Layout, Network, Piece, join, local_cu_seqlens, pad, padded_lengths, shard, unpad

Pair = tuple[str, Any, Any]
Lists = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Packing:
    """Packed sequences of x [T, *middle, F] on cp ranks, features in sections."""

    lengths: tuple[int, ...]
    cp: int
    sections: tuple[int, ...]
    middle: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def features(self) -> int:
        return sum(self.sections)

    def x(self) -> Tensor:
        """The global tensor: its own integer for each element."""
        shape = (self.tokens, *self.middle, self.features)
        return torch.arange(torch.Size(shape).numel()).reshape(shape)

    def elements(self, tokens: Sequence[int] | None, features: Sequence[int] | None) -> Tensor:
        """The integers of some tokens' and features' elements (None: of all), from the numbering alone."""
        t = torch.tensor(range(self.tokens) if tokens is None else tokens, dtype=torch.int64)
        f = torch.tensor(range(self.features) if features is None else features, dtype=torch.int64)
        width = torch.Size(self.middle).numel()
        m = torch.arange(width)
        numbers = (t[:, None, None] * width + m[:, None]) * self.features + f
        return numbers.reshape(len(t), *self.middle, len(f))


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to do all of it."""

    zigzag: Callable[..., Layout] = parallel.zigzag
    zigzag_batch: Callable[..., Layout] = parallel.zigzag_batch
    contiguous: Callable[..., Layout] = parallel.contiguous
    head_parallel: Callable[..., Layout] = parallel.head_parallel
    contiguous_pieces: Callable[..., Any] = parallel.contiguous_pieces
    real_tokens: Callable[..., Tensor] = parallel.real_tokens
    pad_tokens: Callable[..., Tensor] = parallel.pad_tokens
    cp_to_hp_per_sequence: Callable[..., list[Tensor]] = parallel.cp_to_hp_per_sequence
    hp_to_cp_per_sequence: Callable[..., list[Tensor]] = parallel.hp_to_cp_per_sequence
    cp_to_hp_fused: Callable[..., list[Tensor]] = parallel.cp_to_hp_fused
    hp_to_cp_fused: Callable[..., list[Tensor]] = parallel.hp_to_cp_fused

    def into(self, form: str, shards: Sequence[Tensor], packing: Packing, network: Network) -> list[Tensor]:
        """CP -> HP of shards in the zigzag layout."""
        if form == "fused":
            return self.cp_to_hp_fused(shards, parallel.zigzag(packing.lengths, packing.cp), packing.sections, network)
        return self.cp_to_hp_per_sequence(shards, packing.lengths, packing.sections, network)

    def back(self, form: str, shards: Sequence[Tensor], packing: Packing, network: Network) -> list[Tensor]:
        """HP -> CP to the zigzag layout."""
        if form == "fused":
            return self.hp_to_cp_fused(shards, parallel.zigzag(packing.lengths, packing.cp), packing.sections, network)
        return self.hp_to_cp_per_sequence(shards, packing.lengths, packing.sections, network)


RIGHT = Implementation()
FORMS = ("per sequence", "fused")


# Who holds what, element by element from the prose


def zigzag_by_hand(lengths: Sequence[int], cp: int) -> Lists:
    tokens: Lists = [[] for _ in range(cp)]
    token = 0
    for length in lengths:
        for position in range(length):
            piece = position // (length // (2 * cp))
            (owner,) = [rank for rank in range(cp) if piece in (rank, 2 * cp - 1 - rank)]
            tokens[owner].append(token)
            token += 1
    return tokens


def slices_by_hand(widths: Sequence[int], ranks: int) -> Lists:
    """Each width in as many equal slices as ranks: features by section, or contiguous tokens of the one stream."""
    slices: Lists = [[] for _ in range(ranks)]
    index = 0
    for width in widths:
        for position in range(width):
            slices[position * ranks // width].append(index)
            index += 1
    return slices


def cp_by_hand(packing: Packing) -> list[Tensor]:
    return [packing.elements(tokens, None) for tokens in zigzag_by_hand(packing.lengths, packing.cp)]


def hp_by_hand(packing: Packing) -> list[Tensor]:
    return [packing.elements(None, features) for features in slices_by_hand(packing.sections, packing.cp)]


def pieces_by_hand(lengths: Sequence[int], cp: int) -> list[list[Piece]]:
    """Runs of tokens of one sequence on one rank, found by walking along the stream."""
    stream = [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
    size = len(stream) // cp
    ranks = []
    for rank in range(cp):
        runs = itertools.groupby(stream[rank * size : (rank + 1) * size], key=lambda place: place[0])
        spans = [(sequence, [position for _, position in run]) for sequence, run in runs]
        ranks.append([Piece(sequence, span[0], span[-1] + 1, lengths[sequence]) for sequence, span in spans])
    return ranks


# Checks


def lists(layout: Layout) -> Lists:
    return [indices.tolist() for indices in layout]


def tokens_as_told(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """Each rank holds the tokens that the prose names, in its order."""
    lengths, cp = packing.lengths, packing.cp
    yield "zigzag", lists(way.zigzag(lengths, cp)), zigzag_by_hand(lengths, cp)
    yield "zigzag_batch", lists(way.zigzag_batch(lengths, cp)), zigzag_by_hand([packing.tokens], cp)
    yield "contiguous", lists(way.contiguous(lengths, cp)), slices_by_hand([packing.tokens], cp)


def features_as_told(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """Each rank holds its slice of every section, sections in order."""
    yield "head_parallel", lists(way.head_parallel(packing.sections, packing.cp)), slices_by_hand(packing.sections, packing.cp)


def shared_out(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """Every index is on one rank, and all ranks have as many."""
    for name, size in (("zigzag", packing.tokens), ("zigzag_batch", packing.tokens), ("contiguous", packing.tokens)):
        layout = getattr(way, name)(packing.lengths, packing.cp)
        yield f"{name} indices", sorted(torch.cat(layout).tolist()), list(range(size))
        yield f"{name} sizes", [len(indices) for indices in layout], [size // packing.cp] * packing.cp
    features = way.head_parallel(packing.sections, packing.cp)
    yield "head_parallel indices", sorted(torch.cat(features).tolist()), list(range(packing.features))
    yield "head_parallel sizes", [len(indices) for indices in features], [packing.features // packing.cp] * packing.cp


def odd_multiples_refused(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """A length that cp divides and 2 cp does not is refused, wherever it stands."""
    for place in range(len(packing.lengths)):
        lengths = [length + packing.cp * (place == index) for index, length in enumerate(packing.lengths)]
        try:
            got = f"answered {lists(way.zigzag(lengths, packing.cp))}"
        except ValueError as refusal:
            got = str(refusal)
        rule = f"lengths must be multiples of 2 * cp = {2 * packing.cp}, got {lengths[place]} in place {place}"
        yield f"sequence {place}", got, rule


def into_as_defined(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """CP -> HP gives every rank all tokens in natural order and its slice of every section."""
    for form in FORMS:
        got = way.into(form, cp_by_hand(packing), packing, Network())
        yield from ((f"{form}, rank {rank}", *pair) for rank, pair in enumerate(zip(got, hp_by_hand(packing), strict=True)))


def back_as_defined(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """HP -> CP gives every rank all features of its tokens."""
    for form in FORMS:
        got = way.back(form, hp_by_hand(packing), packing, Network())
        yield from ((f"{form}, rank {rank}", *pair) for rank, pair in enumerate(zip(got, cp_by_hand(packing), strict=True)))


def there_and_back(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """HP -> CP undoes CP -> HP and the other way round, whichever form goes and whichever returns."""
    for going, returning in itertools.product(FORMS, FORMS):
        middle = way.into(going, cp_by_hand(packing), packing, Network())
        yield f"{going}, {returning}: cp", way.back(returning, middle, packing, Network()), cp_by_hand(packing)
        middle = way.back(going, hp_by_hand(packing), packing, Network())
        yield f"{going}, {returning}: hp", way.into(returning, middle, packing, Network()), hp_by_hand(packing)


def gradients_as_defined(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """Cotangents return on the transposed permutation: those of HP shards land as HP -> CP would put them, and reversed."""
    for form in FORMS:
        for name, move, start, end in (
            ("into", way.into, cp_by_hand(packing), hp_by_hand(packing)),
            ("back", way.back, hp_by_hand(packing), cp_by_hand(packing)),
        ):
            leaves = [torch.zeros(x.shape, dtype=torch.float64, requires_grad=True) for x in start]
            moved = move(form, leaves, packing, Network())
            gradients = torch.autograd.grad(moved, leaves, [x.double() for x in end], materialize_grads=True)
            yield f"{form}, {name}", list(gradients), [x.double() for x in start]


def traffic_as_stated(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """One all-to-all a non-empty sequence and section, or one at all; what another rank is to hold is sent, once."""
    tokens, features = zigzag_by_hand(packing.lengths, packing.cp), slices_by_hand(packing.sections, packing.cp)
    width = torch.Size(packing.middle).numel()
    moved = sum(
        len(local) * width * len(features[other])
        for rank, local in enumerate(tokens)
        for other in range(packing.cp)
        if other != rank
    )
    calls = {"per sequence": sum(length > 0 for length in packing.lengths) * len(packing.sections), "fused": 1}
    for form in FORMS:
        for move, start in ((way.into, cp_by_hand(packing)), (way.back, hp_by_hand(packing))):
            network = Network()
            move(form, start, packing, network)
            yield f"{form}, {move.__name__}", network, Network(calls[form], moved, 8 * moved)


def padding_at_the_end(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """Each sequence's real tokens come first, in order, and its pad tokens after them."""
    lengths = [max(length - sequence - 1, 0) for sequence, length in enumerate(packing.lengths)]
    real: list[int] = []
    pads: list[int] = []
    place = 0
    for length, padded in zip(lengths, packing.lengths, strict=True):
        for position in range(padded):
            (real if position < length else pads).append(place)
            place += 1
    yield "real tokens", way.real_tokens(lengths, packing.lengths).tolist(), real
    yield "pad tokens", way.pad_tokens(lengths, packing.lengths).tolist(), pads


def pieces_as_told(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """Each rank of the contiguous shards holds the runs of tokens found by walking along the stream."""
    yield (
        "pieces",
        [list(rank) for rank in way.contiguous_pieces(packing.lengths, packing.cp)],
        pieces_by_hand(packing.lengths, packing.cp),
    )


def states_passed_on(way: Implementation, packing: Packing) -> Iterator[Pair]:
    """A recurrence that passes its state from rank to rank where pieces say so is the recurrence of the whole sequences."""
    steps, starts = recurrence(packing)
    want, finals, place = [], [], 0
    for length, state in zip(packing.lengths, starts, strict=True):
        rows, final = scan(steps[place : place + length], state)
        want += rows
        finals.append(final)
        place += length
    got, ends, place = [], list(starts), 0
    carried, sent = torch.zeros(2, 2, dtype=torch.int64), []
    for rank in way.contiguous_pieces(packing.lengths, packing.cp):
        for piece in rank:
            size = piece.end - piece.first
            rows, final = scan(steps[place : place + size], carried if piece.receives else starts[piece.sequence])
            got += rows
            place += size
            if piece.sends:
                carried = final
            else:
                ends[piece.sequence] = final
        sent.append([(at, piece.receives, piece.sends) for at, piece in enumerate(rank)])
    yield "outputs", got, want
    yield "final states", ends, finals
    yield "receives first", [at for rank in sent for at, receives, _ in rank if receives and at], []
    yield "sends last", [at for rank in sent for at, _, sends in rank if sends and at != len(rank) - 1], []


Step = tuple[Tensor, Tensor]


def recurrence(packing: Packing) -> tuple[list[Step], list[Tensor]]:
    """A step S <- M S + B of 2 x 2 integers (modulo 2^64, exactly, and M do not commute) for each token, and initial states."""
    generator = torch.Generator().manual_seed(packing.tokens)
    drawn = torch.randint(-(2**62), 2**62, (2 * packing.tokens + len(packing.lengths), 2, 2), generator=generator)
    matrices = list(drawn)
    steps = list(zip(matrices[: packing.tokens], matrices[packing.tokens : 2 * packing.tokens], strict=True))
    return steps, matrices[2 * packing.tokens :]


def scan(steps: Sequence[Step], state: Tensor) -> tuple[list[Tensor], Tensor]:
    rows = []
    for matrix, added in steps:
        state = matrix @ state + added
        rows.append(state)
    return rows, state


CHECKS: dict[str, Callable[[Implementation, Packing], Iterator[Pair]]] = {
    "tokens": tokens_as_told,
    "features": features_as_told,
    "shared out": shared_out,
    "refusal": odd_multiples_refused,
    "into": into_as_defined,
    "back": back_as_defined,
    "round trip": there_and_back,
    "gradients": gradients_as_defined,
    "traffic": traffic_as_stated,
    "padding": padding_at_the_end,
    "pieces": pieces_as_told,
    "states": states_passed_on,
}


def same(got: Any, want: Any) -> bool:
    """Equal in type, shape, dtype and every bit."""
    if isinstance(want, Tensor):
        return isinstance(got, Tensor) and got.dtype == want.dtype and torch.equal(got, want)
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(itertools.starmap(same, zip(got, want, strict=True)))
    return bool(got == want)


def broken(check: str, way: Implementation, packing: Packing) -> list[str]:
    """Where a check finds two things unequal. It compares something, or it is no check."""
    pairs = list(CHECKS[check](way, packing))
    assert pairs, f"{check} compared nothing"
    return [what for what, got, want in pairs if not same(got, want)]


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    """Ragged lengths, some empty, in pieces of 0 to 12 / cp tokens (at least 1); 1 to 6 sections; cp of 1 to 64."""
    cp = draw(st.one_of(st.integers(1, 5), st.integers(1, 64)))
    longest, most = max(1, 12 // cp), 6 if cp < 9 else 3
    pieces = draw(st.lists(st.integers(0, longest), min_size=1, max_size=most))
    slices = draw(st.lists(st.integers(1, 3), min_size=1, max_size=most))
    middle = draw(st.sampled_from(((), (1,), (2,))))
    return Packing(tuple(2 * cp * size for size in pieces), cp, tuple(cp * size for size in slices), middle)


TELLING = Packing((12, 0, 24, 6), 3, (6, 3, 12), (2,))
EMPTY = Packing((0, 0), 4, (4, 8))


@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=30)
@given(packing=packings())
@example(packing=TELLING)
@example(packing=EMPTY)
@example(packing=Packing((128, 0, 256), 64, (64, 128)))
@example(packing=Packing((6, 0, 2), 1, (3, 1), (1,)))
@pytest.mark.slow_after_first
def test_check_holds(check: str, packing: Packing) -> None:
    assert broken(check, RIGHT, packing) == []


@pytest.mark.parametrize("cp", range(1, 65))
@pytest.mark.slow_after_first
def test_layouts_and_both_forms_are_right_on_every_number_of_ranks(cp: int) -> None:
    packing = Packing((2 * cp, 0, 4 * cp), cp, (cp, 2 * cp))
    for check in ("tokens", "features", "shared out", "refusal", "into", "back"):
        assert broken(check, RIGHT, packing) == [], check


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


def one_block(sections: Sequence[int], cp: int) -> Layout:
    return torch.arange(sum(sections)).tensor_split(cp)


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


def told(kind: type[Piece], piece: Piece) -> Piece:
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
        Implementation(contiguous_pieces=pieces_with(lambda piece, at: piece if at else told(AlwaysReceives, piece))),
        "states",
    ),
    "no piece receives": (Implementation(contiguous_pieces=pieces_with(lambda piece, at: told(NeverReceives, piece))), "states"),
    "pieces of sequences cut apart": (
        Implementation(contiguous_pieces=pieces_with(lambda piece, at: dataclasses.replace(piece, length=piece.end))),
        "pieces",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
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


# Shards of a global tensor


@settings(max_examples=60)
@given(packing=packings())
@example(packing=TELLING)
@example(packing=EMPTY)
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


# Padding


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    cp=st.integers(1, 64),
    more=st.integers(0, 2),
    middle=st.sampled_from(((), (2,))),
)
@example(lengths=[0, 0], cp=2, more=0, middle=())
@example(lengths=[0, 9], cp=2, more=1, middle=())
def test_padding_is_undone_and_stands_at_the_end(lengths: list[int], cp: int, more: int, middle: tuple[int, ...]) -> None:
    least = padded_lengths(lengths, 2 * cp)
    assert all(padded % (2 * cp) == 0 and 0 <= padded - length < 2 * cp for padded, length in zip(least, lengths, strict=True))
    padded = [length + 2 * cp * more for length in least]
    x = torch.arange(1, sum(lengths) * torch.Size(middle).numel() + 1).reshape(-1, *middle)
    wide = pad(x, lengths, padded)
    assert wide.shape == (sum(padded), *middle)
    for real, part in zip(x.split(lengths), wide.split(padded), strict=True):
        assert torch.equal(part[: len(real)], real)
        assert not part[len(real) :].any()
    assert torch.equal(unpad(wide, lengths, padded), x)
    pads = parallel.pad_tokens(lengths, padded)
    assert torch.equal(unpad(wide.index_fill(0, pads, -1), lengths, padded), x)
    assert sorted([*pads.tolist(), *parallel.real_tokens(lengths, padded).tolist()]) == list(range(sum(padded)))
    parallel.zigzag(padded, cp)


def test_gradients_pass_through_padding_to_real_tokens_only() -> None:
    lengths, padded = [3, 0, 5], [4, 4, 8]
    x = torch.zeros(8, 2, dtype=torch.float64, requires_grad=True)
    cotangent = torch.arange(1.0, 33.0, dtype=torch.float64).reshape(16, 2)
    (dx,) = torch.autograd.grad(pad(x, lengths, padded), x, cotangent)
    assert torch.equal(dx, cotangent[[0, 1, 2, 8, 9, 10, 11, 12]])
    wide = torch.zeros(16, 2, dtype=torch.float64, requires_grad=True)
    (dwide,) = torch.autograd.grad(unpad(wide, lengths, padded), wide, dx)
    assert torch.equal(dwide[[0, 1, 2, 8, 9, 10, 11, 12]], dx)
    assert not dwide[[3, 4, 5, 6, 7, 13, 14, 15]].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_read_as_lengths(dtype: torch.dtype) -> None:
    assert parallel.lengths_of(torch.tensor([0, 3, 3, 7], dtype=dtype), 7) == [3, 0, 4]


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


# What is refused


def zeros(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


TWO = parallel.zigzag([8], 2)
LAYOUTS = {"zigzag": parallel.zigzag, "zigzag_batch": parallel.zigzag_batch, "contiguous": parallel.contiguous}
Refusal = tuple[Callable[[], object], str]
REFUSED: dict[str, Refusal] = {
    **{
        f"{name} on {cp!r} ranks": (
            lambda layout=layout, cp=cp: layout([8], cp),
            f"cp must be a whole number from 1 up, got {cp!r}",
        )
        for name, layout in {**LAYOUTS, "head_parallel": parallel.head_parallel, "pieces": parallel.contiguous_pieces}.items()
        for cp in (0, -1, 2.0, True, None)
    },
    **{
        f"{name} of {lengths!r}": (lambda layout=layout, lengths=lengths: layout(lengths, 1), rule)
        for name, layout in {**LAYOUTS, "padded_lengths": padded_lengths, "pieces": parallel.contiguous_pieces}.items()
        for lengths, rule in (
            ([4, -2], "lengths must be whole numbers from 0 up, got -2 in place 1"),
            ([4.0], "lengths must be whole numbers from 0 up, got 4.0 in place 0"),
            ([4, True], "lengths must be whole numbers from 0 up, got True in place 1"),
            (["4"], "lengths must be whole numbers from 0 up, got '4' in place 0"),
            ([], "lengths must be a list of at least one whole number, got none"),
            (torch.tensor([0, 4]), "lengths must be a list of at least one whole number, got Tensor"),
            (4, "lengths must be a list of at least one whole number, got int"),
        )
    },
    "a multiple of cp only": (lambda: parallel.zigzag([8, 12], 4), "lengths must be multiples of 2 * cp = 8, got 12 in place 1"),
    "no multiple of cp": (lambda: parallel.zigzag([16, 15], 4), "lengths must be multiples of 2 * cp = 8, got 15 in place 1"),
    "a total of cp only": (lambda: parallel.zigzag_batch([5, 7], 4), "lengths must add up to a multiple of 2 * cp = 8, got 12"),
    "a total not of cp": (lambda: parallel.contiguous([5, 6], 4), "lengths must add up to a multiple of cp = 4, got 11"),
    "pieces of a total not of cp": (
        lambda: parallel.contiguous_pieces([5, 6], 4),
        "lengths must add up to a multiple of cp = 4, got 11",
    ),
    "a section that cp does not divide": (
        lambda: parallel.head_parallel([8, 6], 4),
        "sections must be multiples of cp = 4, got 6 in place 1",
    ),
    "an empty section": (lambda: parallel.head_parallel([8, 0], 4), "sections must be whole numbers from 1 up, got 0 in place 1"),
    "no section": (lambda: parallel.head_parallel([], 4), "sections must be a list of at least one whole number, got none"),
    "sections by name": (
        lambda: parallel.head_parallel({"q": 4}, 4),  # type: ignore[arg-type]
        "sections must be a list of at least one whole number, got dict",
    ),
    "multiple 0": (lambda: padded_lengths([4], 0), "multiple must be a whole number from 1 up, got 0"),
    "multiple True": (lambda: padded_lengths([4], True), "multiple must be a whole number from 1 up, got True"),
    "multiple 2.0": (
        lambda: padded_lengths([4], 2.0),  # type: ignore[arg-type]
        "multiple must be a whole number from 1 up, got 2.0",
    ),
    "padded too few": (lambda: parallel.real_tokens([3, 2], [4]), "padded must have one length a sequence, 2, got 1"),
    "padded too short": (lambda: parallel.pad_tokens([3, 5], [4, 4]), "padded must hold the 5 tokens of sequence 1, got 4"),
    "padded negative": (lambda: parallel.real_tokens([0], [-4]), "padded must be whole numbers from 0 up, got -4 in place 0"),
    "pad of other tokens": (
        lambda: pad(torch.zeros(4, 2), [3], [4]),
        "x must have the 3 tokens of lengths along axis 0, got torch.float32 of shape (4, 2)",
    ),
    "pad of a number": (
        lambda: pad(torch.tensor(0.0), [1], [2]),
        "x must have the 1 tokens of lengths along axis 0, got torch.float32 of shape ()",
    ),
    "unpad of other tokens": (
        lambda: unpad(torch.zeros(3, 2), [3], [4]),
        "x must have the 4 tokens of padded along axis 0, got torch.float32 of shape (3, 2)",
    ),
    "unpad of a list": (
        lambda: unpad([1, 2, 3, 4], [3], [4]),  # type: ignore[arg-type]
        "x must have the 4 tokens of padded along axis 0, got list",
    ),
    "local offsets int16": (lambda: local_cu_seqlens((), torch.int16), "dtype must be int32 or int64, got torch.int16"),
    "offsets that decrease": (
        lambda: parallel.lengths_of(torch.tensor([0, 5, 3, 7]), 7),
        "cu_seqlens must not decrease, got [0, 5, 3, 7]",
    ),
    "offsets of other tokens": (
        lambda: parallel.lengths_of(torch.tensor([0, 3]), 7),
        "cu_seqlens must end at the token count 7, got 3 ([0, 3])",
    ),
    "offsets of int16": (
        lambda: parallel.lengths_of(torch.tensor([0, 7], dtype=torch.int16), 7),
        "cu_seqlens must be a vector of int32 or int64, got torch.int16 of shape (2,)",
    ),
    "axis past the last": (
        lambda: shard(torch.zeros(8), TWO, 1),
        "axis must be one of x's, got 1 for x torch.float32 of shape (8,)",
    ),
    "axis before the first": (
        lambda: shard(torch.zeros(8), TWO, -2),
        "axis must be one of x's, got -2 for x torch.float32 of shape (8,)",
    ),
    "shard of a list": (lambda: shard([0] * 8, TWO), "axis must be one of x's, got 0 for x list"),  # type: ignore[arg-type]
    "shard of fewer tokens": (lambda: shard(torch.zeros(7), TWO), "layout must name each of 7 indices once, got 8 of them"),
    "shard of more tokens": (lambda: shard(torch.zeros(9), TWO), "layout must name each of 9 indices once, got 8 of them"),
    "layout that repeats": (
        lambda: shard(torch.zeros(3), (torch.tensor([0, 1]), torch.tensor([1]))),
        "layout must name each of 3 indices once, got 1 where 2 is due",
    ),
    "layout below 0": (
        lambda: shard(torch.zeros(2), (torch.tensor([0, -1]),)),
        "layout must name each of 2 indices once, got -1 where 0 is due",
    ),
    "layout past the end": (
        lambda: shard(torch.zeros(2), (torch.tensor([0, 2]),)),
        "layout must name each of 2 indices once, got 2 where 1 is due",
    ),
    "layout of nobody": (lambda: shard(torch.zeros(2), ()), "layout must have at least one rank, got none"),
    "layout None": (lambda: shard(torch.zeros(2), None), "layout must have at least one rank, got NoneType"),  # type: ignore[arg-type]
    "axis a fraction": (
        lambda: shard(torch.zeros(2), (torch.arange(2),), 0.0),
        "axis must be one of x's, got 0.0 for x torch.float32 of shape (2,)",
    ),
    "axis a truth value": (
        lambda: shard(torch.zeros(1, 2), TWO, True),
        "axis must be one of x's, got True for x torch.float32 of shape (1, 2)",
    ),
    "join of None": (lambda: join(None, TWO), "shards must be one tensor a rank, got NoneType"),  # type: ignore[arg-type]
    "tokens a fraction": (
        lambda: parallel.lengths_of(torch.tensor([0, 2]), 2.0),
        "tokens must be a whole number from 0 up, got 2.0",
    ),
    "network of nobody": (
        lambda: parallel.cp_to_hp_fused(zeros((1, 2), (1, 2)), TWO, [2], None),  # type: ignore[arg-type]
        "network must be a Network, got NoneType",
    ),
    "network of nobody, by sequence": (
        lambda: parallel.hp_to_cp_per_sequence(zeros((2, 2)), [2], [2], None),  # type: ignore[arg-type]
        "network must be a Network, got NoneType",
    ),
    "blocks of two dtypes": (
        lambda: Network().all_to_all([[torch.zeros(1), torch.zeros(1)], [torch.zeros(1), torch.zeros(1).double()]]),
        "blocks must all have one dtype, got [torch.float32, torch.float64]",
    ),
    "layout of int32": (
        lambda: shard(torch.zeros(1), (torch.tensor([0], dtype=torch.int32),)),
        "layout must be int64 vectors, one a rank, got torch.int32 of shape (1,) for rank 0",
    ),
    "layout of lists": (
        lambda: shard(torch.zeros(2), (torch.tensor([0]), [1])),  # type: ignore[arg-type]
        "layout must be int64 vectors, one a rank, got list for rank 1",
    ),
    "layout of a matrix": (
        lambda: shard(torch.zeros(2), (torch.tensor([[0, 1]]),)),
        "layout must be int64 vectors, one a rank, got torch.int64 of shape (1, 2) for rank 0",
    ),
    "join of no shard": (lambda: join([], TWO), "shards must be one tensor a rank, got none"),
    "join of one shard too few": (
        lambda: join(zeros((4,)), TWO),
        "shards must have the layout's sizes [4, 4] along axis 0, got [4]",
    ),
    "join of one shard too many": (
        lambda: join(zeros((4,), (4,), (4,)), TWO),
        "shards must have the layout's sizes [4, 4] along axis 0, got [4, 4, 4]",
    ),
    "join of a short shard": (
        lambda: join(zeros((4,), (3,)), TWO),
        "shards must have the layout's sizes [4, 4] along axis 0, got [4, 3]",
    ),
    "join of other widths": (
        lambda: join(zeros((4, 2), (4, 3)), TWO),
        "shards must agree between ranks, got torch.float32 of shape (4, 3) on rank 1, torch.float32 of shape (4, 2) on rank 0",
    ),
    "join of other axes": (
        lambda: join(zeros((4, 2), (4,)), TWO),
        "shards must agree between ranks, got torch.float32 of shape (4,) on rank 1, torch.float32 of shape (4, 2) on rank 0",
    ),
    "join of two dtypes": (
        lambda: join([torch.zeros(4), torch.zeros(4, dtype=torch.float64)], TWO),
        "shards must agree between ranks, got torch.float64 of shape (4,) on rank 1, torch.float32 of shape (4,) on rank 0",
    ),
    "join of lists": (
        lambda: join([[0] * 4] * 2, TWO),  # type: ignore[list-item]
        "shards must be tensors with axis 0, got list on rank 0",
    ),
    "join along an axis that is none": (
        lambda: join(zeros((4,), (4,)), TWO, 1),
        "shards must be tensors with axis 1, got torch.float32 of shape (4,) on rank 0",
    ),
    "join by no layout": (lambda: join(zeros((4,)), ()), "layout must have at least one rank, got none"),
    "blocks that are not square": (
        lambda: Network().all_to_all([zeros((1,), (1,)), zeros((1,))]),
        "blocks must be one a rank on each of 2 ranks, got [2, 1]",
    ),
    "blocks of two shapes": (
        lambda: Network().all_to_all([zeros((1,), (1,)), zeros((1,), (2,))]),
        "blocks must all have one shape, got [(1,), (2,)]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_illegal_argument_is_refused_with_value_and_rule(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        call()
    assert str(refusal.value) == message


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


@pytest.mark.parametrize("wrong", WRONG_SHARDS)
@pytest.mark.parametrize("move", MOVES)
def test_shards_that_disagree_are_refused(move: str, wrong: str) -> None:
    call, legal, due = MOVES[move]
    change, message = WRONG_SHARDS[wrong]
    packing = TWO if move.endswith("fused") else [8]
    call(legal, packing, [4, 2], Network())
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        call(change(legal), packing, [4, 2], Network())
    assert str(refusal.value).startswith(message.format(due=due))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(
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


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("ranks", [0, 1, 3])
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


@pytest.mark.parametrize("move", MOVES)
def test_tokens_that_disagree_with_the_shards_are_refused(move: str) -> None:
    call, legal, _ = MOVES[move]
    fused = move.endswith("fused")
    with pytest.raises(ValueError, match=r"^shards must be \["):
        call(legal, parallel.zigzag([12], 2) if fused else [4, 8], [4, 2], Network())


@pytest.mark.parametrize("move", ["cp_to_hp_fused", "hp_to_cp_fused"])
@pytest.mark.parametrize(
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


@pytest.mark.parametrize("move", ["cp_to_hp_per_sequence", "hp_to_cp_per_sequence"])
@pytest.mark.parametrize(
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


@pytest.mark.parametrize(("move", "sections"), [(move, [4] if move.startswith("cp") else [16]) for move in MOVES])
def test_a_vector_is_not_taken_for_tokens_and_features_at_once(move: str, sections: list[int]) -> None:
    call = MOVES[move][0]
    packing, size = (TWO if move.endswith("fused") else [8]), 4 if move.startswith("cp") else 8
    call(zeros((size, size), (size, size)), packing, sections, Network())
    with pytest.raises(ValueError, match=rf"^shards must be \[{size}, ..., {size}\] on each of 2 "):
        call(zeros((size,), (size,)), packing, sections, Network())
