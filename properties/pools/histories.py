"""The law `history` of pools: what came before a call, or runs beside it, must not change its results."""

import dataclasses
from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.laws.history import AT_ONCE, at_once, failures
from properties.laws.law import Bench, Blind, Pair, bits, either, examples_of
from properties.laws.other_calls import LATER
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain, pool_cases
from properties.pools.rows import equal, judged, meaningful, only, other_of
from properties.words.example import Example

WHOLE = "where each slot must be as it was or as the call stores it"


def history(bench: Bench, example: Example) -> Iterator[Pair]:
    """Two runs of the same call with something between.

    - Without a variant: another call of the same shapes, with other values and other slots. Only then bits are compared.
    - `shapes`: a call without the first request, and one with another request.
    - `freed`: the call's tensors are new, and have the addresses of the tensors of another call if the allocator plays along.
    - `inference`: the same call under `inference_mode`, as under `no_grad`, where LATER other calls must not change its results.
    - `refused`: a call in which a required tensor is None, so that most implementations raise.
    - `failed`: calls on copies of the pool in which an operation fails as if memory had run out. Such a call leaves each slot as it
      was or as the call would store it.
    - `threads`, `streams`: the other call runs at the same time on a pool of its own, in another thread or on another CUDA stream.
    """
    case = example.case
    if example.variant in AT_ONCE:
        yield from _at_once(bench, example)
        return
    inputs, meant = case.inputs(), meaningful(case)
    bounds = bench.bounds(inputs, None)
    if example.variant == "freed":
        got = bench.renew(earlier_call(bench, case).inputs(), inputs, None)
        yield from judged(got, bounds, meant, "in memory that an earlier call's tensors had")
        return
    if example.variant == "failed":
        yield from _failed(bench, example, inputs, bounds, meant)
        return
    if example.variant == "inference":
        with torch.no_grad():
            results, other = bench.run(inputs, None), other_of(bench, case).inputs()
            once = {name: value.clone() for name, value in results.items()}
            for _ in range(LATER):
                bench.run(other, None)
            read = {name: value.clone() for name, value in results.items()}
        with torch.inference_mode():
            got = bench.run(inputs, None)
        what = "under inference_mode, as under no_grad"
        yield from judged(once, bounds, meant, "under no_grad")
        yield from equal(read, once, meant, f"under no_grad, read after {LATER} others")
        yield from equal(got, once, meant, what) if bench.domain.rule.deterministic else judged(got, bounds, meant, what)
        return
    once = bench.run(inputs, None)
    if example.variant == "refused":
        required = [port.name for port in case.spec.inputs if not port.optional and inputs.get(port.name) is not None]
        bench.attempt(inputs.replaced(**{required[case.seed % len(required)]: None}))
        yield from judged(bench.run(inputs, None), bounds, meant, "after a call without a required tensor")
        return
    others = _other_requests(bench, case) if example.variant == "shapes" else [other_of(bench, case)]
    if not others:
        raise Blind("the domain has no other shapes for this case")
    for between in others:
        there = between.inputs()
        if any(between.real):
            yield from judged(bench.run(there, None), bench.bounds(there, None), meaningful(between), "after another call")
    again = bench.run(inputs, None)
    if bench.domain.rule.deterministic and example.variant is None:
        yield from equal(again, once, meant, "of a call as an earlier one")
    else:
        yield from judged(again, bounds, meant, "of a call as an earlier one")


def _failed(bench: Bench, example: Example, inputs: Inputs, bounds: dict[str, Bound], meant: dict[str, Tensor]) -> Iterator[Pair]:
    for at, left in failures(bench, inputs, None, example.case.seed):
        slots = (slice(None), *[None] * (inputs.pool.ndim - 1))
        same = (bits(left.pool) == bits(inputs.pool)).flatten(1).all(-1)
        stored = torch.where(same[slots], bounds["pool"].value.to(left.pool.dtype), left.pool)
        others = ~meant["pool"]
        yield from judged(
            {"pool": stored}, bounds, {"pool": meant["pool"]}, f"after operation {at} of the call had failed, {WHOLE}"
        )
        where = f"after operation {at} of the call had failed, other slots"
        yield Pair("pool", f"{where}, bits", only(bits(left.pool), others), only(bits(inputs.pool), others))
    yield from judged(bench.run(inputs, None), bounds, meant, "of a call after it had failed for lack of memory")


def _at_once(bench: Bench, example: Example) -> Iterator[Pair]:
    cases = [example.case, other_of(bench, example.case)]
    calls: list[tuple[Inputs, None]] = [(case.inputs(), None) for case in cases]
    limits = [bench.bounds(*call) for call in calls]
    rule = bench.domain.rule
    for number, results, what in at_once(bench, calls, rule, streams=example.variant == "streams"):
        yield from judged(results, limits[number], meaningful(cases[number]), f"{what}")


def _other_requests(bench: Bench, case: PoolCase) -> list[PoolCase]:
    """Return the case with other values, without its first request and with one more, as far as the domain allows that."""
    found = []
    for lengths in (case.lengths[1:], (*case.lengths, case.lengths[0])):
        try:
            between = dataclasses.replace(other_of(bench, case), lengths=lengths)
        except ValueError:
            continue
        if bench.domain.outside(between) is None:
            found.append(between)
    return found


def earlier_call(bench: Bench, case: PoolCase) -> PoolCase:
    """Return the case with other values and slots and, if the requests are packed, their lengths in another order."""
    before = other_of(bench, case)
    rotated = dataclasses.replace(before, lengths=(*case.lengths[1:], *case.lengths[:1]))
    return before if bench.domain.outside(rotated) else rotated


def turns(domain: PoolDomain) -> tuple[str, ...]:
    """Return the histories that the first examples of a check have."""
    return ("shapes", "freed", "inference", "refused", "failed", *(("threads",) if domain.rule.threads else ()))


def histories(domain: PoolDomain, *, gpu: bool = False) -> st.SearchStrategy[Example]:
    """Return examples of every history that can happen to calls of a domain. Two streams need a GPU."""
    kinds: list[tuple[str, ...]] = [(), (), ("shapes",), ("freed",), ("inference",), ("refused",), ("failed",)]
    kinds += [("threads",)] * 2 if domain.rule.threads else []  # what threads share shows in some runs only
    kinds += [("streams",)] if gpu and domain.rule.streams else []
    return either([examples_of(pool_cases(domain, most=8), None, kind) for kind in kinds])
