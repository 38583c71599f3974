"""Exchanges of a context-parallel layer: from each rank's own tokens to its own heads (CP -> HP), and back.

    CP    x [T / cp, ..., F]: of each sequence, cut into 2 cp equal pieces, rank r has pieces r and 2 cp - 1 - r (zigzag)
    HP    x [T, ..., F / cp]: every token, sequences in natural order; of each section of features, rank r has slice r

Each direction has two forms, which are equal bit for bit. The fused form makes one all-to-all for any number of sequences and
sections, with one index map along tokens and one along features. The other form makes one all-to-all for each section of each
sequence that has tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verify.ranks.collectives import Comm, exchange


def cp_to_hp(comm: Comm, x: Tensor, lengths: Sequence[int], sections: Sequence[int], *, fused: bool) -> Tensor:
    """Exchange x [T / cp, ..., F] with this rank's tokens for [T, ..., F / cp] with its heads.

    `lengths` are the tokens of each sequence on all ranks together. `sections` are the features of each section before they are
    cut. ValueError for a length that 2 cp does not divide, a section that cp does not divide, or another shape of x. With a single
    rank, x is returned and nothing is checked.
    """
    if comm.size == 1:
        return x
    _check(comm, x, lengths, sections, (sum(lengths) // comm.size, sum(sections)))
    if fused:
        x = permuted(x, feature_map(tuple(sections), comm.size), -1)
        return permuted(_swap(comm, x), token_map(lengths, comm.size), 0)
    moved = [
        torch.cat([_unzigzag(_swap(comm, section), comm.size) for section in sequence.split(list(sections), -1)], -1)
        for sequence in x.split([length // comm.size for length in lengths])
        if len(sequence)
    ]
    return torch.cat(moved) if moved else x[..., : x.shape[-1] // comm.size]


def hp_to_cp(comm: Comm, x: Tensor, lengths: Sequence[int], sections: Sequence[int], *, fused: bool) -> Tensor:
    """Exchange x [T, ..., F / cp] with this rank's heads for [T / cp, ..., F] with its tokens. The inverse of `cp_to_hp`."""
    if comm.size == 1:
        return x
    _check(comm, x, lengths, sections, (sum(lengths), sum(sections) // comm.size))
    if fused:
        x = permuted(x, token_map(lengths, comm.size)[::-1], 0)
        return permuted(_swap_back(comm, x), feature_map(tuple(sections), comm.size)[::-1], -1)
    slices = [width // comm.size for width in sections]
    moved = [
        torch.cat([_swap_back(comm, _zigzag(section, comm.size)) for section in sequence.split(slices, -1)], -1)
        for sequence in x.split(list(lengths))
        if len(sequence)
    ]
    return torch.cat(moved) if moved else torch.cat([x] * comm.size, -1)


@functools.lru_cache(maxsize=64)
def feature_map(sections: tuple[int, ...], cp: int) -> tuple[Tensor, Tensor]:
    """The order of features by the rank that gets them, each rank's slices of all sections side by side; and its inverse."""
    starts = [sum(sections[:index]) for index in range(len(sections))]
    slices = [torch.arange(start, start + width, device="cpu").view(cp, -1) for start, width in zip(starts, sections, strict=True)]
    index = torch.cat(slices, 1).flatten()
    return index, _inverse(index)


def token_map(lengths: Sequence[int], cp: int) -> tuple[Tensor, Tensor]:
    """The place of each token of the natural order among the tokens of rank 0, then of rank 1, ...; and the inverse order.

    All tokens of a piece are shifted alike, so we compute one shift for each piece. Let n be the tokens of a piece of this
    sequence, and s the sum of n over the sequences before it. In natural order, piece j starts at 2 cp s + j n. In the order of
    ranks, it starts at rank * T / cp + 2 s + d n, where d is 1 for the second piece of its rank and else 0.
    """
    rank, after = _pieces(cp)
    n = torch.tensor(lengths, dtype=torch.long, device="cpu").view(-1, 1) // (2 * cp)
    tokens = sum(lengths)
    shift = rank * (tokens // cp) + (n.cumsum(0) - n) * (2 - 2 * cp) + after * n
    shifts = shift.flatten().repeat_interleave(n.expand_as(shift).flatten(), output_size=tokens)
    index = torch.arange(tokens, device="cpu") + shifts
    return index, _inverse(index)


@functools.cache
def _pieces(cp: int) -> tuple[Tensor, Tensor]:
    """Two numbers for each piece j of a sequence: its rank, and d - j, where d is 1 for the second piece of its rank and else 0.

    The second number is the factor of n in the shift of the piece (see `token_map`).
    """
    piece = torch.arange(2 * cp, device="cpu")
    return torch.minimum(piece, 2 * cp - 1 - piece), (piece >= cp).long() - piece


def permuted(x: Tensor, order: tuple[Tensor, Tensor], axis: int) -> Tensor:
    """Return x in another order along an axis. `order` has the indices and those of the inverse order.

    The backward gathers by the inverse. The backward of index_select would add instead, which is atomic on a GPU and turns -0.0
    into 0.0.
    """
    result: Tensor = _Permuted.apply(x, *(indices.to(x.device) for indices in order), axis)
    return result


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, axis: int) -> Tensor:
        ctx.inverse, ctx.axis = inverse, axis
        return x.index_select(axis, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.index_select(ctx.axis, ctx.inverse), None, None, None


def _inverse(index: Tensor) -> Tensor:
    return torch.empty_like(index).scatter_(0, index, torch.arange(len(index), device=index.device))


def _swap(comm: Comm, x: Tensor) -> Tensor:
    """Exchange [n, ..., cp * F] with this rank's n tokens for [cp * n, ..., F] with the tokens of all ranks in rank order."""
    return exchange(comm, x.unflatten(-1, (comm.size, x.shape[-1] // comm.size)).movedim(-2, 0).flatten(0, 1))


def _swap_back(comm: Comm, x: Tensor) -> Tensor:
    """The inverse of `_swap`."""
    blocks: Tensor = exchange(comm, x).unflatten(0, (comm.size, len(x) // comm.size))
    return blocks.movedim(0, -2).flatten(-2)


def _unzigzag(x: Tensor, cp: int) -> Tensor:
    """One sequence in natural order, from its tokens in rank order. With the rank, first pieces ascend and second ones descend."""
    # No indexing here and in _zigzag: its backward adds gradients, which turns -0.0 into 0.0.
    firsts, seconds = x.unflatten(0, (cp, 2, len(x) // (2 * cp))).unbind(1)
    return torch.cat([firsts, seconds.flip(0)]).flatten(0, 1)


def _zigzag(x: Tensor, cp: int) -> Tensor:
    """The tokens of one sequence in rank order, from natural order."""
    firsts, seconds = x.unflatten(0, (2 * cp, len(x) // (2 * cp))).split(cp)
    return torch.stack([firsts, seconds.flip(0)], 1).flatten(0, 2)


def _check(comm: Comm, x: Tensor, lengths: Sequence[int], sections: Sequence[int], ends: tuple[int, int]) -> None:
    check_lengths("lengths", lengths, comm.size)
    if wrong := [width for width in sections if width % comm.size]:
        raise ValueError(f"sections must be multiples of cp = {comm.size}, got {wrong[0]} ({list(sections)})")
    if x.ndim < 2 or (x.shape[0], x.shape[-1]) != ends:
        raise ValueError(f"x must be [{ends[0]}, ..., {ends[1]}] by lengths and sections, got shape {tuple(x.shape)}")


def check_lengths(name: str, lengths: Sequence[int], cp: int) -> None:
    """Raise ValueError for a sequence that zigzag cannot cut. With a single rank, every length is right."""
    if wrong := [length for length in lengths if cp > 1 and length % (2 * cp)]:
        raise ValueError(f"{name} must have sequences of a multiple of 2 * cp = {2 * cp} tokens, got {wrong[0]} ({list(lengths)})")
