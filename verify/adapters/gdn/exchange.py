"""From each context-parallel rank's own tokens to its own heads (CP -> HP), and back.

    CP    x [T / cp, ..., F]: of each sequence, cut in 2 cp equal pieces, rank r has pieces r and 2 cp - 1 - r (zigzag)
    HP    x [T, ..., F / cp]: every token, sequences in natural order; of each section of features, rank r has slice r

Each way takes one of two forms, equal bit for bit. Fused: one all-to-all whatever the number of sequences and sections, one index
map along tokens and one along features. Per sequence: one all-to-all for each section of each sequence that has tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verify.ranks.collectives import Comm, exchange


def cp_to_hp(comm: Comm, x: Tensor, lengths: Sequence[int], sections: Sequence[int], *, fused: bool) -> Tensor:
    """x [T / cp, ..., F] of this rank's tokens as [T, ..., F / cp] of its heads.

    `lengths` are the tokens of every sequence on all ranks, `sections` the features of every section before they are cut.
    ValueError for one that 2 cp (cp) does not divide, or another shape of x. With one rank x itself, whatever the lengths.
    """
    if comm.size == 1:
        return x
    _check(comm, x, lengths, sections, (sum(lengths) // comm.size, sum(sections)))
    if fused:
        x = permuted(x, feature_map(tuple(sections), comm.size), -1)
        return permuted(_swap(comm, x), token_map(lengths, comm.size), 0)
    moved = [
        torch.cat([_unzigzag(_swap(comm, each), comm.size) for each in sequence.split(list(sections), -1)], -1)
        for sequence in x.split([length // comm.size for length in lengths])
        if len(sequence)
    ]
    return torch.cat(moved) if moved else x[..., : x.shape[-1] // comm.size]


def hp_to_cp(comm: Comm, x: Tensor, lengths: Sequence[int], sections: Sequence[int], *, fused: bool) -> Tensor:
    """x [T, ..., F / cp] of this rank's heads as [T / cp, ..., F] of its tokens: the inverse of `cp_to_hp`, same arguments."""
    if comm.size == 1:
        return x
    _check(comm, x, lengths, sections, (sum(lengths), sum(sections) // comm.size))
    if fused:
        x = permuted(x, token_map(lengths, comm.size)[::-1], 0)
        return permuted(_swap_back(comm, x), feature_map(tuple(sections), comm.size)[::-1], -1)
    slices = [width // comm.size for width in sections]
    moved = [
        torch.cat([_swap_back(comm, _zigzag(each, comm.size)) for each in sequence.split(slices, -1)], -1)
        for sequence in x.split(list(lengths))
        if len(sequence)
    ]
    return torch.cat(moved) if moved else torch.cat([x] * comm.size, -1)


@functools.lru_cache(maxsize=64)
def feature_map(sections: tuple[int, ...], cp: int) -> tuple[Tensor, Tensor]:
    """Features by the rank that gets them, its slices of all sections side by side; and the inverse of that order."""
    starts = [sum(sections[:index]) for index in range(len(sections))]
    slices = [torch.arange(start, start + width).view(cp, -1) for start, width in zip(starts, sections, strict=True)]
    index = torch.cat(slices, 1).flatten()
    return index, _inverse(index)


def token_map(lengths: Sequence[int], cp: int) -> tuple[Tensor, Tensor]:
    """Where each token in natural order stands among the tokens of rank 0, then of rank 1, ...; and the inverse of that order."""
    length = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(length)), length)
    start, piece_length = (length.cumsum(0) - length)[sequence], (length // (2 * cp))[sequence]
    token = torch.arange(len(sequence)) - start
    piece, within = token // piece_length, token % piece_length
    rank = torch.minimum(piece, 2 * cp - 1 - piece)
    index = rank * (len(sequence) // cp) + start // cp + (piece >= cp) * piece_length + within
    return index, _inverse(index)


def permuted(x: Tensor, order: tuple[Tensor, Tensor], axis: int) -> Tensor:
    """x in another order along an axis, given with its inverse.

    Backward is a gather by the inverse, where index_select's own adds: atomic on a GPU, and it makes 0.0 of -0.0.
    """
    result: Tensor = _Permuted.apply(x, *(each.to(x.device) for each in order), axis)
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
    return torch.empty_like(index).scatter_(0, index, torch.arange(len(index)))


def _swap(comm: Comm, x: Tensor) -> Tensor:
    """[n, ..., cp * F] of this rank's n tokens as [cp * n, ..., F] of all ranks' in rank order."""
    return exchange(comm, x.unflatten(-1, (comm.size, x.shape[-1] // comm.size)).movedim(-2, 0).flatten(0, 1))


def _swap_back(comm: Comm, x: Tensor) -> Tensor:
    """The inverse of `_swap`."""
    blocks: Tensor = exchange(comm, x).unflatten(0, (comm.size, len(x) // comm.size))
    return blocks.movedim(0, -2).flatten(-2)


def _unzigzag(x: Tensor, cp: int) -> Tensor:
    """One sequence in natural order, from its tokens by rank: first pieces rise with the rank, second ones fall."""
    # Not by indexing, whose gradients are added, here and below: that makes 0.0 of -0.0.
    firsts, seconds = x.unflatten(0, (cp, 2, len(x) // (2 * cp))).unbind(1)
    return torch.cat([firsts, seconds.flip(0)]).flatten(0, 1)


def _zigzag(x: Tensor, cp: int) -> Tensor:
    """One sequence's tokens by rank, from natural order."""
    firsts, seconds = x.unflatten(0, (2 * cp, len(x) // (2 * cp))).split(cp)
    return torch.stack([firsts, seconds.flip(0)], 1).flatten(0, 2)


def _check(comm: Comm, x: Tensor, lengths: Sequence[int], sections: Sequence[int], ends: tuple[int, int]) -> None:
    check_lengths("lengths", lengths, comm.size)
    if wrong := [width for width in sections if width % comm.size]:
        raise ValueError(f"sections must be multiples of cp = {comm.size}, got {wrong[0]} ({list(sections)})")
    if x.ndim < 2 or (x.shape[0], x.shape[-1]) != ends:
        raise ValueError(f"x must be [{ends[0]}, ..., {ends[1]}] by lengths and sections, got shape {tuple(x.shape)}")


def check_lengths(name: str, lengths: Sequence[int], cp: int) -> None:
    """Refuse a sequence that zigzag cannot cut: ValueError. With one rank nothing is cut."""
    if wrong := [length for length in lengths if cp > 1 and length % (2 * cp)]:
        raise ValueError(f"{name} must have sequences of a multiple of 2 * cp = {2 * cp} tokens, got {wrong[0]} ({list(lengths)})")
