"""Packed layouts of context parallelism: which tokens and features each rank holds, in integers.

A layout says which indices of one global axis each rank holds, and in which order. It is a tuple of int64 vectors, one for each
rank, which together name every index once. The T tokens of all (padded) sequences are packed along axis 0 (THD); the F features, in
sections, are the last axis.

    zigzag           each sequence is cut in 2 cp equal pieces; rank r holds pieces r and 2 cp - 1 - r of every sequence, in order
    zigzag_batch     the same for the whole stream, as if it were one sequence
    contiguous       the stream is cut in cp equal pieces; rank r holds piece r
    head_parallel    each section of features is cut in cp equal slices; rank r holds slice r of every section, in order

Under context parallelism (CP) the ranks share the tokens of x [T, ..., F]; under head parallelism (HP) they share its features:

    CP = shard(x, zigzag(lengths, cp))      HP = shard(x, head_parallel(sections, cp), axis=-1)

Computed from the global x, these two are the definition of CP -> HP and HP -> CP. Ranks do not have the global x. They convert one
into the other with an all-to-all for each sequence, or with one fused all-to-all. tests/formulas/test_parallel.py shows that both
forms equal the definition bit for bit, forward and backward. The layouts are those of Megatron-LM (THD: zigzag; SBHD:
zigzag_batch) and of flash-linear-attention (zigzag_batch, contiguous).
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oracles.operation import check_offsets

Layout = tuple[Tensor, ...]


def zigzag(lengths: Sequence[int], cp: int) -> Layout:
    """Return the tokens [T / cp] of each rank: pieces r and 2 cp - 1 - r of every sequence, in that order, sequences in order.

    `lengths` are the padded tokens of each sequence; empty sequences are allowed. ValueError if 2 cp does not divide a length.
    """
    _check_ranks(cp)
    lengths = _check_multiples("lengths", _whole("lengths", lengths), 2 * cp, "2 * cp")
    sequences = torch.arange(sum(lengths)).split(lengths)
    halves = [_zigzag_blocks(tokens, cp) for tokens in sequences]
    return tuple(torch.cat(parts) for parts in zip(*halves, strict=True))


def zigzag_batch(lengths: Sequence[int], cp: int) -> Layout:
    """Return the tokens [T / cp] of each rank: pieces r and 2 cp - 1 - r, in that order, of the stream of all sequences.

    A piece may end within a sequence. ValueError if 2 cp does not divide the total length.
    """
    return zigzag([_check_total(lengths, cp, 2)], cp)


def contiguous(lengths: Sequence[int], cp: int) -> Layout:
    """Return the tokens [T / cp] of each rank: piece r of the stream of all sequences.

    `contiguous_pieces` lists the sequences' pieces in it. ValueError if cp does not divide the total length.
    """
    return torch.arange(_check_total(lengths, cp, 1)).tensor_split(cp)


def head_parallel(sections: Sequence[int], cp: int) -> Layout:
    """Return the features [F / cp] of each rank: slice r of each section, sections in order.

    `sections` are the global widths, such as those of q, k, v, z, b, a. With tp in place of cp, the result is the column-parallel
    shards. ValueError if cp does not divide a section. Slices must also contain whole heads; the layer guarantees that.
    """
    _check_ranks(cp)
    sections = _check_multiples("sections", _whole("sections", sections, 1), cp, "cp")
    slices = [features.tensor_split(cp) for features in torch.arange(sum(sections)).split(sections)]
    return tuple(torch.cat(parts) for parts in zip(*slices, strict=True))


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens `first` to `end` - 1 of a sequence of `length` tokens, held by one rank; tokens are counted within the sequence."""

    sequence: int
    first: int
    end: int
    length: int

    @property
    def receives(self) -> bool:
        """Whether it starts from the last state of the rank before, not from its sequence's initial state."""
        return self.first > 0

    @property
    def sends(self) -> bool:
        """Whether the next rank continues from its last state, which is then not its sequence's final state."""
        return self.end < self.length


def contiguous_pieces(lengths: Sequence[int], cp: int) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of sequences that each rank of `contiguous` holds, in order.

    Only the first piece of a rank can receive a state, and only its last piece can send one. An empty sequence has no piece; its
    final state is its initial state. With 2 cp in place of cp, rank r of `zigzag_batch` holds entries r and 2 cp - 1 - r, and
    states pass from entry to entry. ValueError as in `contiguous`.
    """
    size = _check_total(lengths, cp, 1) // cp
    starts = [0, *itertools.accumulate(lengths)]
    ranks = []
    for begin in (rank * size for rank in range(cp)):
        cuts = [
            (sequence, max(begin - start, 0), min(begin + size - start, length), length)
            for sequence, (start, length) in enumerate(zip(starts, lengths, strict=False))
        ]
        ranks.append(tuple(Piece(*cut) for cut in cuts if cut[1] < cut[2]))
    return tuple(ranks)


def local_cu_seqlens(pieces: Sequence[Piece], dtype: torch.dtype = torch.int32) -> Tensor:
    """Return where each piece of one rank begins in that rank's tokens, and where the last piece ends: [pieces + 1].

    A rank without tokens has the single entry 0, which is not a legal `cu_seqlens`. ValueError for a dtype other than int32 and
    int64.
    """
    if dtype not in (torch.int32, torch.int64):
        raise ValueError(f"dtype must be int32 or int64, got {dtype}")
    return torch.tensor([0, *itertools.accumulate(piece.end - piece.first for piece in pieces)], dtype=dtype)


def lengths_of(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Return the tokens of each sequence of `cu_seqlens` [N + 1] (int32 or int64) over `tokens` packed tokens.

    ValueError if `cu_seqlens` is illegal.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"tokens must be a whole number from 0 up, got {tokens!r}")
    check_offsets(cu_seqlens, 1, tokens)
    return [later - earlier for earlier, later in itertools.pairwise(cu_seqlens.tolist())]


def padded_lengths(lengths: Sequence[int], multiple: int) -> list[int]:
    """Return the least multiples of `multiple` (2 cp for `zigzag`) that hold the sequences; empty sequences stay empty."""
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise ValueError(f"multiple must be a whole number from 1 up, got {multiple!r}")
    return [-(-length // multiple) * multiple for length in _whole("lengths", lengths)]


def real_tokens(lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Return the index of each real token among the padded tokens: int64 [sum(lengths)].

    Pad tokens are at the end of their sequence. ValueError unless `padded` has one length for each sequence, no shorter than the
    sequence.
    """
    return torch.cat([places[:length] for places, length in _padded_places(lengths, padded)])


def pad_tokens(lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Return the indices of the pad tokens among the padded tokens: int64 [sum(padded) - sum(lengths)]."""
    return torch.cat([places[length:] for places, length in _padded_places(lengths, padded)])


def pad(x: Tensor, lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Return x [sum(lengths), ...] with zeros for the pad tokens: [sum(padded), ...]."""
    real = real_tokens(lengths, padded)
    _check_tokens(x, len(real), "lengths")
    return x.new_zeros(sum(padded), *x.shape[1:]).index_copy(0, real.to(x.device), x)


def unpad(x: Tensor, lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Return the real tokens of x [sum(padded), ...]: [sum(lengths), ...], whatever the pad tokens hold."""
    real = real_tokens(lengths, padded)
    _check_tokens(x, sum(padded), "padded")
    return x.index_select(0, real.to(x.device))


def _padded_places(lengths: Sequence[int], padded: Sequence[int]) -> list[tuple[Tensor, int]]:
    lengths, padded = _whole("lengths", lengths), _whole("padded", padded)
    if len(padded) != len(lengths):
        raise ValueError(f"padded must have one length a sequence, {len(lengths)}, got {len(padded)}")
    for sequence, (length, longer) in enumerate(zip(lengths, padded, strict=True)):
        if longer < length:
            raise ValueError(f"padded must hold the {length} tokens of sequence {sequence}, got {longer}")
    return list(zip(torch.arange(sum(padded)).split(padded), lengths, strict=True))


def shard(x: Tensor, layout: Layout, axis: int = 0) -> list[Tensor]:
    """Return what each rank holds of the global x along `axis`, in its order; all other axes are whole.

    ValueError unless the layout names every index of the axis once.
    """
    _check_axis(x, axis)
    _check_layout(layout, x.shape[axis])
    return [x.index_select(axis, indices.to(x.device)) for indices in layout]


def join(shards: Sequence[Tensor], layout: Layout, axis: int = 0) -> Tensor:
    """Return the global tensor from the ranks' shards: the inverse of `shard`.

    ValueError for a wrong number of ranks, or if shards disagree with the layout along `axis` or with each other in other axes.
    """
    _check_alike(shards, axis)
    _check_layout(layout)
    sizes = [x.shape[axis] for x in shards]
    if sizes != [len(indices) for indices in layout]:
        raise ValueError(
            f"shards must have the layout's sizes {[len(indices) for indices in layout]} along axis {axis}, got {sizes}"
        )
    return torch.cat(list(shards), axis).index_select(axis, _inverse(layout).to(shards[0].device))


@dataclasses.dataclass
class Network:
    """An all-to-all among ranks of one process, with counts of its use.

    `elements` and `sent_bytes` count what the ranks sent to other ranks, over all ranks; what a rank keeps is not sent. With one
    rank a collective therefore sends nothing, and implementations leave it out.
    """

    collectives: int = 0
    elements: int = 0
    sent_bytes: int = 0

    def all_to_all(self, blocks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return the blocks by receiver: result[r][s] is blocks[s][r], what rank s holds for rank r.

        ValueError unless each rank has a block for each rank, all of one shape and dtype.
        """
        ranks = len(blocks)
        if any(len(row) != ranks for row in blocks):
            raise ValueError(f"blocks must be one a rank on each of {ranks} ranks, got {[len(row) for row in blocks]}")
        every = [block for row in blocks for block in row]
        for what, kinds in (("shape", {tuple(x.shape) for x in every}), ("dtype", {x.dtype for x in every})):
            if len(kinds) > 1:
                raise ValueError(f"blocks must all have one {what}, got {sorted(kinds, key=str)}")
        self.collectives += 1
        for sender, receiver in itertools.permutations(range(ranks), 2):
            self.elements += blocks[sender][receiver].numel()
            self.sent_bytes += blocks[sender][receiver].nbytes
        return [list(column) for column in zip(*blocks, strict=True)]


def cp_to_hp_per_sequence(
    shards: Sequence[Tensor], lengths: Sequence[int], sections: Sequence[int], network: Network
) -> list[Tensor]:
    """Return HP shards [T, ..., F / cp] from the CP shards [T / cp, ..., F] of `zigzag`.

    It takes one all-to-all for each non-empty sequence and section. `sections` are the global widths. With lengths [T] it converts
    the shards of `zigzag_batch`, with one all-to-all for each section. ValueError for shards that disagree with lengths, sections
    or each other.
    """
    _check_network(network)
    cp, lengths, sections = _check_packing(shards, lengths, sections, "CP")

    def move(section: tuple[Tensor, ...]) -> list[Tensor]:
        received = network.all_to_all([x.tensor_split(cp, -1) for x in section])
        return [_natural_order(blocks) for blocks in received]

    empty = [x[:0, ..., : x.shape[-1] // cp] for x in shards]
    return _per_sequence(shards, [length // cp for length in lengths], sections, empty, move)


def hp_to_cp_per_sequence(
    shards: Sequence[Tensor], lengths: Sequence[int], sections: Sequence[int], network: Network
) -> list[Tensor]:
    """Return CP shards [T / cp, ..., F] of `zigzag` from the HP shards [T, ..., F / cp].

    It takes one all-to-all for each non-empty sequence and section. `sections` are the global widths; a layer brings back one
    section, its output. ValueError as in `cp_to_hp_per_sequence`.
    """
    _check_network(network)
    cp, lengths, sections = _check_packing(shards, lengths, sections, "HP")

    def move(section: tuple[Tensor, ...]) -> list[Tensor]:
        received = network.all_to_all([_zigzag_blocks(x, cp) for x in section])
        return [torch.cat(blocks, -1) for blocks in received]

    empty = [torch.cat([x[:0]] * cp, -1) for x in shards]
    return _per_sequence(shards, lengths, [width // cp for width in sections], empty, move)


def cp_to_hp_fused(shards: Sequence[Tensor], layout: Layout, sections: Sequence[int], network: Network) -> list[Tensor]:
    """Return HP shards [T, ..., F / cp] from the CP shards [T / cp, ..., F] of any token layout.

    It takes one all-to-all and one gather of tokens. Features are permuted first, so that the features for one rank lie side by
    side. `sections` are the global widths. ValueError for a wrong number of ranks, or for shards that disagree with the layout, the
    sections or each other.
    """
    _check_network(network)
    cp = _check_ranks_of(shards, layout)
    features, tokens = torch.cat(head_parallel(sections, cp)), _inverse(layout)
    _check_shapes(shards, len(tokens) // cp, len(features), "CP")
    device = shards[0].device
    received = network.all_to_all([x.index_select(-1, features.to(device)).tensor_split(cp, -1) for x in shards])
    return [torch.cat(blocks).index_select(0, tokens.to(device)) for blocks in received]


def hp_to_cp_fused(shards: Sequence[Tensor], layout: Layout, sections: Sequence[int], network: Network) -> list[Tensor]:
    """Return CP shards [T / cp, ..., F] of any token layout from the HP shards [T, ..., F / cp].

    It takes one gather of tokens and one all-to-all. `sections` are the global widths. ValueError as in `cp_to_hp_fused`.
    """
    _check_network(network)
    cp = _check_ranks_of(shards, layout)
    features, tokens = _inverse(head_parallel(sections, cp)), torch.cat(layout)
    _check_shapes(shards, len(tokens), len(features) // cp, "HP")
    device = shards[0].device
    received = network.all_to_all([x.index_select(0, tokens.to(device)).tensor_split(cp) for x in shards])
    return [torch.cat(blocks, -1).index_select(-1, features.to(device)) for blocks in received]


def _per_sequence(
    shards: Sequence[Tensor],
    lengths: list[int],
    sections: list[int],
    empty: list[Tensor],
    move: Callable[[tuple[Tensor, ...]], list[Tensor]],
) -> list[Tensor]:
    """Apply `move` to each section of each non-empty sequence, and concatenate the results after `empty`.

    `lengths` and `sections` are those of the shards, not the global ones.
    """
    rows = [[x] for x in empty]
    for sequence in zip(*(x.split(lengths) for x in shards), strict=True):
        if len(sequence[0]):
            moved = [move(section) for section in zip(*(x.split(sections, -1) for x in sequence), strict=True)]
            for row, columns in zip(rows, zip(*moved, strict=True), strict=True):
                row.append(torch.cat(columns, -1))
    return [torch.cat(row) for row in rows]


def _zigzag_blocks(x: Tensor, cp: int) -> list[Tensor]:
    """Return pieces r and 2 cp - 1 - r of one sequence, for each rank r."""
    pieces = x.tensor_split(2 * cp)
    return [torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]]) for rank in range(cp)]


def _natural_order(blocks: Sequence[Tensor]) -> Tensor:
    """Return one sequence from the blocks of `_zigzag_blocks`: first halves by rising rank, second halves by falling rank."""
    firsts, seconds = zip(*(block.tensor_split(2) for block in blocks), strict=True)
    return torch.cat([*firsts, *reversed(seconds)])


def _inverse(layout: Layout) -> Tensor:
    """Return the index of each global index in the concatenation of the ranks' shards."""
    return torch.cat(layout).argsort()


def _check_network(network: object) -> None:
    if not isinstance(network, Network):
        raise ValueError(f"network must be a Network, got {type(network).__name__}")  # noqa: TRY004 - one kind of error


def _check_ranks(cp: int) -> None:
    if not isinstance(cp, int) or isinstance(cp, bool) or cp < 1:
        raise ValueError(f"cp must be a whole number from 1 up, got {cp!r}")


def _whole(name: str, values: Sequence[int], least: int = 0) -> list[int]:
    if not isinstance(values, Sequence) or not values:
        raise ValueError(f"{name} must be a list of at least one whole number, got {_kind(values)}")
    for index, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be whole numbers from {least} up, got {value!r} in place {index}")
    return list(values)


def _check_multiples(name: str, values: list[int], multiple: int, rule: str) -> list[int]:
    for index, value in enumerate(values):
        if value % multiple:
            raise ValueError(f"{name} must be multiples of {rule} = {multiple}, got {value} in place {index}")
    return values


def _check_total(lengths: Sequence[int], cp: int, pieces: int) -> int:
    """Return the tokens of all sequences; ValueError unless they can be cut into `pieces` equal pieces for each rank."""
    _check_ranks(cp)
    total = sum(_whole("lengths", lengths))
    if total % (pieces * cp):
        rule = "cp" if pieces == 1 else f"{pieces} * cp"
        raise ValueError(f"lengths must add up to a multiple of {rule} = {pieces * cp}, got {total}")
    return total


def _check_tokens(x: Tensor, tokens: int, name: str) -> None:
    if not isinstance(x, Tensor) or x.ndim == 0 or len(x) != tokens:
        raise ValueError(f"x must have the {tokens} tokens of {name} along axis 0, got {_shape(x)}")


def _check_axis(x: Tensor, axis: int) -> None:
    if not isinstance(x, Tensor) or not _is_axis(axis, x):
        raise ValueError(f"axis must be one of x's, got {axis!r} for x {_shape(x)}")


def _is_axis(axis: object, x: Tensor) -> bool:
    return isinstance(axis, int) and not isinstance(axis, bool) and -x.ndim <= axis < x.ndim


def _check_layout(layout: Layout, size: int | None = None) -> None:
    """Raise ValueError unless the layout names each of `size` indices (default: as many as it names) once."""
    if not isinstance(layout, Sequence) or not layout:
        raise ValueError(f"layout must have at least one rank, got {_kind(layout)}")
    for rank, indices in enumerate(layout):
        if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.ndim != 1:
            raise ValueError(f"layout must be int64 vectors, one a rank, got {_shape(indices)} for rank {rank}")
    named = torch.cat(layout).sort().values
    size = len(named) if size is None else size
    if len(named) != size:
        raise ValueError(f"layout must name each of {size} indices once, got {len(named)} of them")
    if (wrong := named != torch.arange(size, device=named.device)).any():
        place = int(wrong.nonzero()[0])
        raise ValueError(f"layout must name each of {size} indices once, got {int(named[place])} where {place} is due")


def _check_ranks_of(shards: Sequence[Tensor], layout: Layout) -> int:
    _check_layout(layout)
    _check_alike(shards, 0)
    if len(shards) != len(layout):
        raise ValueError(f"shards must be one a rank of the layout, {len(layout)}, got {len(shards)}")
    if len({len(indices) for indices in layout}) > 1:
        raise ValueError(f"layout must give every rank as many tokens, got {[len(indices) for indices in layout]}")
    return len(layout)


def _check_alike(shards: Sequence[Tensor], axis: int) -> None:
    """Raise ValueError for shards that differ in dtype, or in shape outside `axis`.

    torch.cat would promote dtypes, or drop an empty shard.
    """
    if not isinstance(shards, Sequence) or not shards:
        raise ValueError(f"shards must be one tensor a rank, got {_kind(shards)}")
    for rank, x in enumerate(shards):
        if not isinstance(x, Tensor) or not _is_axis(axis, x):
            raise ValueError(f"shards must be tensors with axis {axis}, got {_shape(x)} on rank {rank}")
        one, first = list(x.shape), list(shards[0].shape)
        one[axis] = first[axis]
        if one != first or x.dtype != shards[0].dtype:
            raise ValueError(f"shards must agree between ranks, got {_shape(x)} on rank {rank}, {_shape(shards[0])} on rank 0")


def _check_packing(
    shards: Sequence[Tensor], lengths: Sequence[int], sections: Sequence[int], layout: str
) -> tuple[int, list[int], list[int]]:
    _check_alike(shards, 0)
    cp = len(shards)
    lengths = _check_multiples("lengths", _whole("lengths", lengths), 2 * cp, "2 * cp")
    sections = _check_multiples("sections", _whole("sections", sections, 1), cp, "cp")
    tokens, features = sum(lengths), sum(sections)
    _check_shapes(shards, *((tokens // cp, features) if layout == "CP" else (tokens, features // cp)), layout)
    return cp, lengths, sections


def _check_shapes(shards: Sequence[Tensor], tokens: int, features: int, layout: str) -> None:
    _check_alike(shards, 0)
    if any(x.ndim < 2 or (x.shape[0], x.shape[-1]) != (tokens, features) for x in shards):
        shapes = [tuple(x.shape) for x in shards]
        raise ValueError(f"shards must be [{tokens}, ..., {features}] on each of {len(shards)} {layout} ranks, got {shapes}")


def _kind(value: object) -> str:
    return "none" if isinstance(value, Sequence) else type(value).__name__


def _shape(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
