"""The slots and rows of a pool's call that mean something, comparisons of these alone, and a pool's numbers in memory."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from oracles.tolerance.bound import Bound
from properties.laws.law import Bench, Blind, Pair, Results, spread, with_others
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain


def slots_of(case: PoolCase) -> Tensor:
    """Return which slots of the pool [P] requests name."""
    named = torch.zeros(case.slots, dtype=torch.bool)
    named[[slot for slot, real in zip(case.slot_of, case.real, strict=True) if real]] = True
    return named


def rows_of(case: PoolCase, requests: Tensor) -> Tensor:
    """Return the mask [B, T] of the tokens of some requests [N]."""
    shape = (1, case.tokens) if case.packed else (len(case.lengths), case.lengths[0])
    return requests.repeat_interleave(torch.tensor(case.lengths)).reshape(shape)


def meaningful(case: PoolCase) -> dict[str, Tensor]:
    """Return the rows of each output that mean something: those of real requests and of their slots.

    Blind if there is no real request.
    """
    if not any(case.real):
        raise Blind("every request is padding")
    return {"o": rows_of(case, torch.tensor(case.real)), "pool": slots_of(case)}


def only(x: Tensor, mask: Tensor) -> Tensor:
    """Return x where the mask of its first axes is true, and zeros elsewhere; rows keep their positions in messages."""
    return torch.where(spread(mask, x, 0), x, 0)


def limited(bound: Bound, mask: Tensor) -> Bound:
    """Return the bound of what `only` returns. In other rows the value is zero and every tolerance is 1."""
    finer = bound.finer
    return dataclasses.replace(
        bound,
        value=only(bound.value, mask),
        allowed=torch.where(spread(mask, bound.allowed, 0), bound.allowed, 1.0),
        finer=None if finer is None else lambda over=None: limited(finer(over), mask),
    )


def judged(got: Results, bounds: dict[str, Bound], meant: dict[str, Tensor], what: str = "") -> Iterator[Pair]:
    """Compare the rows that mean something with their bounds."""
    for name, mask in meant.items():
        yield Pair(name, what, only(got[name], mask), limited(bounds[name], mask))


def equal(got: Results, want: Results, meant: dict[str, Tensor], what: str) -> Iterator[Pair]:
    """Compare the rows that mean something bit for bit."""
    for name, mask in meant.items():
        yield Pair(name, what, only(got[name], mask), only(want[name], mask))


def shaped(memory: Tensor, pool: Tensor, domain: PoolDomain) -> Tensor:
    """Return memory [..., HV * K * V] as states [..., HV, K, V] in the domain's layout."""
    heads, keys, values = pool.shape[1:]
    shape = (heads, values, keys) if domain.layout == "vk" else (heads, keys, values)
    states: Tensor = memory.unflatten(-1, shape)
    return states.mT if domain.layout == "vk" else states


def flat(pool: Tensor, domain: PoolDomain) -> Tensor:
    """Return the numbers of each slot [P, HV * K * V] in the order of the domain's layout."""
    return (pool.mT if domain.layout == "vk" else pool).flatten(1)


def begins_of(case: PoolCase) -> list[bool]:
    """Return which requests are real and begin anew."""
    return [real and beginning for real, beginning in zip(case.real, case.beginning, strict=True)]


def other_of(bench: Bench, case: PoolCase) -> PoolCase:
    """Return the case with the same shapes, other values, also of other magnitudes, and other slots."""
    other: PoolCase = with_others(case, bench.domain.rule)
    return other
