"""What each rank holds, worked out by hand, and checks of an implementation of layouts and of CP -> HP and HP -> CP.

Every token and feature of x carries its own integer, so where it lands is read off. What ought to land where is worked out again
here, token by token and feature by feature. Each check is a function of an implementation and a packing that yields pairs which
ought to be equal; each is shown to reject a wrong implementation.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles import parallel
from oracles.parallel import Layout, Network, Piece

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


def one_block(sections: Sequence[int], cp: int) -> Layout:
    return torch.arange(sum(sections)).tensor_split(cp)
