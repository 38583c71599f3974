"""What the laws of pools compare."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.laws.far_views import FAR, SPAN, apart, far, far_rows, require_long
from properties.laws.law import Bench, Blind, Pair, bits, present, spread, visible
from properties.laws.other_calls import moved
from properties.laws.views import bytes_of, spaced, view, views_of
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.pools.histories import earlier_call
from properties.pools.rows import (
    begins_of,
    equal,
    flat,
    judged,
    limited,
    meaningful,
    only,
    other_of,
    rows_of,
    shaped,
    slots_of,
)
from properties.words.example import Example

MOST_JUDGED = 2**15  # requests times value heads of which all are judged
JUDGED, LAST_JUDGED = 32, 4  # of more, about so many requests, and the last ones


def oracle(bench: Bench, example: Example) -> Iterator[Pair]:
    """Judge the outputs, and the states in the slots of requests: of all, or of some if requests and heads are very many."""
    case = example.case
    inputs, meant = case.inputs(), meaningful(case)
    got = bench.run(inputs, None)
    if len(case.lengths) * case.value_heads <= MOST_JUDGED or case.drafts != "chain":
        yield from judged(got, bench.bounds(inputs, None), meant)
        return
    # Requests do not influence each other, so the truth of some is that of a call of these. Bounds of 70,000 rows take 9 s.
    count, real = len(case.lengths), [row for row, here in enumerate(case.real) if here]
    some = sorted({*real[:: -(-len(real) // JUDGED)], *real[-LAST_JUDGED:]})
    part, index = _tokens(case, inputs, 0, max(case.lengths), some)
    if inputs.accepted is not None:
        part = part.replaced(accepted=inputs.accepted[[row for row in some if case.lengths[row]]])
    slots = torch.zeros_like(meant["pool"])
    slots[[case.slot_of[row] for row in some]] = True
    o = got["o"].flatten(0, 1)[index].view(part.v.shape)
    rows = meant["o"].flatten()[index].reshape(part.v.shape[:2])
    what = f"of {len(some)} of {count} requests"
    yield from judged({"o": o, "pool": got["pool"]}, bench.bounds(part, None), {"o": rows, "pool": slots}, what)


def untouched(bench: Bench, example: Example) -> Iterator[Pair]:
    """Slots that no request names keep their bits, and so do the slots before and behind the pool in memory.

    The state of a request that goes on and has no tokens keeps its bits too.

    These two slots belong to others; they hold NaN of many bit patterns.
    """
    case = example.case
    inputs, free = case.inputs(), ~slots_of(case)
    domain: PoolDomain = bench.domain
    guard = dataclasses.replace(case, spare=case.spare + 2).filled("nan")[:2].flatten(1)
    memory = torch.cat([guard[:1], flat(inputs.pool, domain), guard[1:]])
    before = bits(memory).clone()
    got = bench.run(inputs.replaced(pool=shaped(memory[1:-1], inputs.pool, domain)), None)
    yield Pair("pool", ", bits of slots that nobody names", only(bits(got["pool"]), free), only(bits(inputs.pool), free))
    idle = torch.zeros(case.slots, dtype=torch.bool)
    requests = zip(case.slot_of, case.real, case.beginning, case.lengths, strict=True)
    idle[[slot for slot, real, begins, length in requests if real and not begins and not length]] = True
    yield Pair("pool", ", bits of requests without tokens", only(bits(got["pool"]), idle), only(bits(inputs.pool), idle))
    for name, where in (("before", slice(1)), ("behind", slice(-1, None))):
        yield Pair("memory", f"{name} the pool", bits(memory)[where], before[where])


def padding(bench: Bench, example: Example) -> Iterator[Pair]:
    """Change the inputs of padding requests, which changes nothing."""
    case = example.case
    inputs, other = case.inputs(), other_of(bench, case).inputs()
    nobody = ~rows_of(case, torch.tensor(case.real))
    names = present(case.spec, inputs, "B", "T")
    carried = {name: other[name] if example.variant == "values" else torch.full_like(other[name], torch.nan) for name in names}
    changed = inputs.replaced(**{name: torch.where(spread(nobody, inputs[name], 0), carried[name], inputs[name]) for name in names})
    once, twice = bench.run(inputs, None), bench.run(changed, None)
    real = rows_of(case, torch.tensor(case.real))
    yield Pair("o", "with other padding", only(twice["o"], real), only(once["o"], real))
    yield Pair("pool", ", bits with other padding", bits(twice["pool"]), bits(once["pool"]))


def poison(bench: Bench, example: Example) -> Iterator[Pair]:
    """Put other numbers into slots that no request names, which changes nothing."""
    case = example.case
    inputs, meant = case.inputs(), meaningful(case)
    named = spread(meant["pool"], inputs.pool, 0)
    runs = [
        bench.run(inputs.replaced(pool=torch.where(named, inputs.pool, case.filled(how))), None)
        for how in ("zero", example.variant or "")
    ]
    yield from equal(runs[1], runs[0], meant, f"with {example.variant} in slots that nobody names")


def fresh(bench: Bench, example: Example) -> Iterator[Pair]:
    """A request that begins gives the same bits whatever its slot holds, and the results of a request that continues from zeros."""
    case = example.case
    inputs, meant = case.inputs(), meaningful(case)
    begins = begins_of(case)
    if not any(begins):
        raise Blind("every request that begins is padding")
    slots = torch.zeros(case.slots, dtype=torch.bool)
    slots[[slot for slot, here in zip(case.slot_of, begins, strict=True) if here]] = True
    at = spread(slots, inputs.pool, 0)
    clean, dirty = (inputs.replaced(pool=torch.where(at, case.filled(how), inputs.pool)) for how in ("zero", example.variant or ""))
    once = bench.run(clean, None)
    yield from equal(bench.run(dirty, None), once, meant, f"with {example.variant} left in the slot")
    going_on = clean.replaced(has_initial_state=torch.ones_like(inputs.has_initial_state))
    bounds = bench.bounds(clean, None)
    yield from judged(once, bounds, meant)
    yield from judged(bench.run(going_on, None), bounds, meant, "going on from zeros")


def _tokens(case: PoolCase, inputs: Inputs, start: int, stop: int, some: Sequence[int] | None = None) -> tuple[Inputs, Tensor]:
    """Return the call of tokens start..stop of the requests that have any, and their indices among all tokens, flattened.

    With `some`, it is a call of these requests alone.
    """
    spans = [range(min(start, length), min(stop, length)) for length in case.lengths]
    rows = [row for row in (range(len(spans)) if some is None else some) if len(spans[row])]
    index = torch.tensor([case.starts()[row] + at for row in rows for at in spans[row]], dtype=torch.int64)
    shape = (1, len(index)) if case.packed else (len(rows), len(spans[0]))
    tokens = {
        name: inputs[name].flatten(0, 1).index_select(0, index).unflatten(0, shape) for name in present(case.spec, inputs, "B", "T")
    }
    offsets = None
    if case.packed:
        ends = torch.tensor([0, *(len(spans[row]) for row in rows)]).cumsum(0)
        offsets = ends.to(inputs.cu_seqlens.dtype)
    begins = inputs.has_initial_state
    if begins is not None:
        begins = torch.ones_like(begins[rows]) if start else begins[rows]
    part = inputs.replaced(**tokens, slots=inputs.slots[rows], has_initial_state=begins, accepted=None, cu_seqlens=offsets)
    return part, index


def accept(bench: Bench, example: Example) -> Iterator[Pair]:
    """The state after k tokens is the same if they come one at a time, at once, or as the kept part of a draft.

    The other tokens then continue from that state. A state in half precision is rounded after every call, so there each call is
    judged by what follows from the state before it. Blind if the state after k - 1 tokens would stay within the tolerance.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, meant = case.inputs(), meaningful(case)
    first, _ = _tokens(case, inputs, 0, at)
    after = {"pool": bench.bounds(first, None)["pool"]}
    fewer = bench.truth(_tokens(case, inputs, 0, at - 1)[0], None)["pool"] if at > 1 else inputs.pool.double()
    if not visible({"pool": only(fewer, meant["pool"])}, {"pool": limited(after["pool"], meant["pool"])}):
        raise Blind("the state after one token less would not show")
    named, narrow = {"pool": meant["pool"]}, case.state_dtype != "fp32"
    yield from judged(bench.run(first, None), after, named, f"after {at} tokens at once")
    whole = bench.bounds(inputs, None)
    o, step = torch.zeros_like(inputs.v), {"pool": inputs.pool}
    for start, stop in [*((token, token + 1) for token in range(at)), (at, max(case.lengths))]:
        if start < stop:
            part, index = _tokens(case, inputs, start, stop)
            part = part.replaced(pool=step["pool"])
            step = bench.run(part, None)
            o.flatten(0, 1)[index] = step["o"].flatten(0, 1)
            if narrow:
                rows = meant["o"].flatten()[index].reshape(step["o"].shape[:2])
                what = f" of tokens {start} to {stop - 1} in a call of their own"
                yield from judged(step, bench.bounds(part, None), {"o": rows, **named}, what)
        if stop == at and not narrow:
            yield from judged(step, after, named, f"after {at} tokens one at a time")
    if not narrow:
        yield from judged({"o": o, "pool": step["pool"]}, whole, meant, f"going on after {at} tokens")
    if bench.domain.accepts:
        accepted = torch.tensor([min(at, length) for length in case.lengths], dtype=inputs.slots.dtype)
        draft = inputs.replaced(accepted=accepted)
        yield from judged(bench.run(draft, None), bench.bounds(draft, None), meant, f"of a draft of which {at} tokens are kept")


def other_slots(bench: Bench, example: Example) -> Iterator[Pair]:
    """Put the requests into other slots."""
    case = example.case
    inputs, meant = case.inputs(), meaningful(case)
    first = int(case.padding_slot == "0")
    goes = torch.cat([torch.arange(first), torch.arange(first, case.slots).roll(1)])  # the new slot of each state
    slots = inputs.slots.long()
    moved_inputs = inputs.replaced(
        pool=torch.empty_like(inputs.pool).index_copy(0, goes, inputs.pool),
        slots=torch.where(slots == inputs.padding, slots, goes[slots.clamp(min=0)]).to(inputs.slots.dtype),
    )
    got = bench.run(moved_inputs, None)
    if bench.domain.rule.position_independent:
        back = {"o": got["o"], "pool": got["pool"].index_select(0, goes)}
        yield from equal(back, bench.run(inputs, None), meant, "in other slots")
    else:
        meant["pool"] = torch.zeros_like(meant["pool"]).index_copy(0, goes, meant["pool"])
        yield from judged(got, bench.bounds(moved_inputs, None), meant, "in other slots")


def requests(bench: Bench, example: Example) -> Iterator[Pair]:
    """Change one request and its state, which changes nothing of the others."""
    case, at = example.case, example.at
    assert at is not None
    inputs, other, meant = case.inputs(), other_of(bench, case).inputs(), meaningful(case)
    one = torch.arange(len(case.lengths)) == at
    rows = rows_of(case, one)
    mixed = {
        name: torch.where(spread(rows, inputs[name], 0), other[name], inputs[name]) for name in present(case.spec, inputs, "B", "T")
    }
    mixed["pool"] = inputs.pool.clone()
    slot_mask = torch.zeros_like(meant["pool"])
    if case.real[at]:
        slot_mask[case.slot_of[at]] = True
        mixed["pool"][slot_mask] = 2 * case.filled("random")[slot_mask]
    once, twice = bench.run(inputs, None), bench.run(inputs.replaced(**mixed), None)
    yield from equal(twice, once, {"o": meant["o"] & ~rows, "pool": meant["pool"] & ~slot_mask}, "of the other requests")


def refill(bench: Bench, example: Example) -> Iterator[Pair]:
    """A call whose tensors hold the numbers of another call at first, as those of a CUDA graph do.

    The other call has other lengths if the requests are packed, of many requests only two of the last ones, and other slots and
    padding. What it put into the rows of padding stays there.
    """
    case = example.case
    before = moved(other_of(bench, case), bench.domain) or earlier_call(bench, case)
    inputs, first, meant = case.inputs(), before.inputs(), meaningful(case)
    padding = ~rows_of(case, torch.tensor(case.real))
    stale = {
        name: torch.where(spread(padding, inputs[name], 0), first[name], inputs[name])
        for name in present(case.spec, inputs, "B", "T")
        if inputs[name].is_floating_point()
    }
    later = inputs.replaced(**stale)
    yield from judged(bench.replay(first, later), bench.bounds(later, None), meant, "after its tensors were filled again")


def memory(bench: Bench, example: Example) -> Iterator[Pair]:
    """Two runs over memory with different poison give the same bits."""
    inputs, meant = example.case.inputs(), meaningful(example.case)
    once, twice = (bench.run(inputs, None, poison=poison) for poison in (float("nan"), -3.0e4))
    if bench.domain.rule.deterministic:
        yield from equal(twice, once, meant, "of a second run")
    else:
        bounds = bench.bounds(inputs, None)
        for results in (once, twice):
            yield from judged(results, bounds, meant)


def blocks(bench: Bench, example: Example) -> Iterator[Pair]:
    """Every block size is judged by half the tolerance, so that no two sizes differ by more than the whole tolerance.

    Not bit for bit, because the order of a sum may depend on the block. The largest blocks come first: if an implementation keeps
    something of a launch, such as its grid, it is then too small for the smaller blocks that follow.
    """
    inputs, meant = example.case.inputs(), meaningful(example.case)
    halves = {name: _half(bound) for name, bound in bench.bounds(inputs, None).items()}
    for size in sorted(bench.domain.blocks, reverse=True):
        yield from judged(bench.run(inputs.replaced(block_v=size), None), halves, meant, f"in blocks of {size}")
    yield from judged(bench.run(inputs, None), halves, meant, "in blocks of its own choice")


def _half(bound: Bound) -> Bound:
    """Return the bound with half the tolerance of each row."""
    finer = bound.finer
    later = None if finer is None else lambda over=None: _half(finer(over))
    return dataclasses.replace(bound, allowed=bound.allowed / 2, origin=f"half of {bound.origin}", finer=later)


def strides(bench: Bench, example: Example) -> Iterator[Pair]:
    """Inputs in other strides, and memory between the pool's slots, as if states of many layers shared one allocation.

    Where slots may not lie apart, the memory is only before and behind the pool.
    """
    case, domain = example.case, bench.domain
    assert isinstance(domain, PoolDomain)
    if example.variant in (*FAR, "far_slots"):
        yield from _far(bench, example)
        return
    if example.variant not in domain.views:
        raise Blind(f"{example.variant} inputs are not among {', '.join(domain.views)}")
    inputs, meant = case.inputs(), meaningful(case)
    numbers = flat(inputs.pool, domain)
    memory = numbers.new_full((case.slots, 3, numbers.shape[1]) if domain.apart else (3, *numbers.shape), torch.nan)
    slots = memory.unbind(1 if domain.apart else 0)[1].copy_(numbers)
    others = memory[:, ::2] if domain.apart else memory[::2]
    between = bits(others).clone()
    names = present(case.spec, inputs, "B", "T")
    views = views_of(domain, example, {name: inputs[name] for name in names})
    there = spaced(inputs, example.variant or "").replaced(pool=shaped(slots, inputs.pool, domain), **views)
    bounds = bench.bounds(there, None)
    yield from judged(bench.run(there, None), bounds, meant, f"from {example.variant} inputs")
    yield Pair("memory", "between slots", bits(others), between)


def _far(bench: Bench, example: Example) -> Iterator[Pair]:
    """Tokens, heads or requests far apart in memory, or the slots of the pool, if these may lie apart."""
    case, domain, how = example.case, bench.domain, example.variant or ""
    assert isinstance(domain, PoolDomain)
    inputs, meant = case.inputs(), meaningful(case)
    if how == "far_slots":
        # Requests name some of the slots alone, so that not only the last slot must lie 2^31 elements behind the first.
        pool = apart({"pool": flat(inputs.pool, domain)}, {"pool": 0}, 2 * SPAN)["pool"]
        views = {"pool": shaped(pool, inputs.pool, domain)}
    else:
        tensors = {name: inputs[name] for name in present(case.spec, inputs, "B", "T")}
        if ("strided" if how == "far_heads" else "sliced") in domain.views:  # heads are the last axis of a and b
            views = far(domain, case.spec, tensors, how)
        elif how == "far_tokens" and "fused" in domain.views:
            require_long(domain)
            views = far_rows(tensors)  # an implementation that knows one stride reaches the next request with it too
        else:
            raise Blind(f"{how} inputs are not among {', '.join(domain.views)}")
    there = inputs.replaced(**views)
    bounds = bench.bounds(there, None)
    yield from judged(bench.run(there, None), bounds, meant, f"from {how.replace('_', ' ')}")


def pure(bench: Bench, example: Example) -> Iterator[Pair]:
    """Inputs keep every bit, and so does the memory around them, which is NaN. Only the pool itself may change."""
    inputs = example.case.inputs()
    domain: PoolDomain = bench.domain
    how = "offset" if domain.rule.views and "offset" in domain.views else "aligned"
    views = {name: view(inputs[name], how) for name in present(example.case.spec, inputs)}
    indices = {name: inputs[name] for name in ("slots", "has_initial_state", "accepted", "parents", "cu_seqlens") if name in inputs}
    memory = {**views, **{name: x for name, x in indices.items() if x is not None}}
    copies = {name: bytes_of(x).clone() for name, x in memory.items()}
    bench.run(inputs.replaced(**views), None)  # the bench restores a pool that may change
    for name, x in memory.items():
        yield Pair("bytes", f"of input {name}", bytes_of(x), copies[name])
