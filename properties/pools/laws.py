"""The laws of states in a pool. Each law says which slots of the pool it is about."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.laws.common import bytes_of, memory_law, pure_law, spaced, view, views_of
from properties.laws.far_views import FAR, SPAN, apart, can_be_far, far, far_examples, far_rows, lacks_far, require_long
from properties.laws.history import moved
from properties.laws.law import Bench, Blind, Law, Pair, bits, either, examples_of, firm_examples, present, spread, visible
from properties.pools.case import PoolCase
from properties.pools.domain import POOL_VIEWS, PoolDomain, limits, pool_cases
from properties.pools.histories import earlier_call, histories, history, turns
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
from properties.rules.drawing import REMEMBERING, values_of
from properties.words.domain import INDICES, MIXED
from properties.words.example import Example

POISON = ("nan", "random")
CARRIED = ("values", "nan")


@st.composite
def _draft_examples(draw: st.DrawFn, strategy: st.SearchStrategy[PoolCase]) -> Example:
    """Draw drafts with a place `at`: any of their tokens after which the draft is left."""
    case = draw(strategy.filter(lambda case: len(_drafts(case)) > 0))
    return Example(case, draw(st.randoms(use_true_random=True)).choice(_drafts(case)))


def _oracle(bench: Bench, example: Example) -> Iterator[Pair]:
    inputs, meant = example.case.inputs(), meaningful(example.case)
    yield from judged(bench.run(inputs, None), bench.bounds(inputs, None), meant)


def _untouched(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _padding(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _poison(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, meant = case.inputs(), meaningful(case)
    named = spread(meant["pool"], inputs.pool, 0)
    runs = [
        bench.run(inputs.replaced(pool=torch.where(named, inputs.pool, case.filled(how))), None)
        for how in ("zero", example.variant or "")
    ]
    yield from equal(runs[1], runs[0], meant, f"with {example.variant} in slots that nobody names")


def _fresh(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _tokens(case: PoolCase, inputs: Inputs, start: int, stop: int) -> tuple[Inputs, Tensor]:
    """Return the call of tokens start..stop of the requests that have any, and their indices among all tokens, flattened."""
    spans = [range(min(start, length), min(stop, length)) for length in case.lengths]
    rows = [row for row, span in enumerate(spans) if len(span)]
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


def _accept(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _moved(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _requests(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _refill(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _memory(bench: Bench, example: Example) -> Iterator[Pair]:
    inputs, meant = example.case.inputs(), meaningful(example.case)
    once, twice = (bench.run(inputs, None, poison=poison) for poison in (float("nan"), -3.0e4))
    if bench.domain.rule.deterministic:
        yield from equal(twice, once, meant, "of a second run")
    else:
        bounds = bench.bounds(inputs, None)
        for results in (once, twice):
            yield from judged(results, bounds, meant)


def _blocks(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _strides(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _strided_examples(domain: PoolDomain) -> st.SearchStrategy[Example]:
    """Draw a view that the domain promises; one in five has far slots and one in five far tokens or heads, if it has both."""
    rule, far_ones = domain.rule, {}
    if can_be_far(domain) and {"fused", "sliced"} & {*domain.views}:
        far_ones["far_tokens"] = pool_cases(domain, most=8, kinds=("drafts", "prompts"))
    if can_be_far(domain) and "strided" in domain.views:
        groups = ((5, 5), (8, 8), (5, 10)) if rule.grouped_heads else ((5, 5), (8, 8))
        far_ones["far_heads"] = pool_cases(domain, most=3, groups=groups)
    kinds = tuple(how for how in domain.views if how not in (MIXED, INDICES))
    choices = [examples_of(pool_cases(domain, most=8), None, kinds)] * 3 if kinds else []
    choices += [examples_of(pool_cases(domain, most=8), None, (how,)) for how in (MIXED, INDICES) if how in domain.views]
    # By themselves, because a pool of 2^31 numbers is usual: a short check should not miss them.
    choices += [far_examples(domain, {"far_slots": pool_cases(domain, most=3, spare=(5, 7))})] if domain.apart else []
    choices += [far_examples(domain, far_ones)] if far_ones else []
    return either(choices)


def _firm_views(domain: PoolDomain) -> list[Example]:
    """Return an example of each view of several tensors: drafts of several requests, some of which are accepted in part."""
    accepted = "some" if domain.accepts and domain.most_tokens > 1 else "all"
    drafts = _remember(domain, most=8, kinds=("drafts",), values="ordinary", padded="none", fresh="none", state="random")
    drafts = drafts.filter(lambda case: case.accepted == accepted and 1 < len(case.lengths) <= len({*case.accepted_counts}) + 1)
    return firm_examples(domain, *(examples_of(drafts, None, (how,)) for how in (MIXED, INDICES) if how in domain.views))


def _pure(bench: Bench, example: Example) -> Iterator[Pair]:
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


def _promises(name: str) -> Callable[[PoolDomain], str | None]:
    def needs(domain: PoolDomain) -> str | None:
        return None if getattr(domain, name) else f"{name.replace('_', ' ')} is not supported"

    return needs


def _drafts(case: PoolCase) -> range:
    """Return the tokens after which a draft may be left.

    Empty unless every request has a token and the case does not itself say how many tokens are kept.
    """
    longest = max(case.lengths)
    whole = case.accepted == "all" and case.drafts == "chain"
    return range(1, longest + 1) if longest > 1 and min(case.lengths) and whole else range(0)


def _several(case: PoolCase) -> range:
    return range(len(case.lengths)) if len(case.lengths) > 1 else range(0)


def _remember(domain: PoolDomain, **more: Any) -> st.SearchStrategy[PoolCase]:
    options: dict[str, Any] = {"gate": REMEMBERING, "beta": ("ordinary", "edges"), "values": ("ordinary", "correlated", "scaled")}
    return pool_cases(domain, **{**options, **more})


def _value_dims(domain: PoolDomain) -> tuple[int, ...]:
    """Return widths of values that are several blocks and a part of one, or all widths if the domain has no such width."""
    rule = domain.rule
    several = tuple(width for width in (24, 40, 65, 12) if rule.has_value(width))
    return several or values_of(rule, 128)


def _lacks(word: str, *values: str) -> Callable[[PoolCase, str | None], str | None]:
    def lacks(case: PoolCase, _: str | None) -> str | None:
        return None if case.words()[word] in values else f"{word}={'|'.join(values)}"

    return lacks


POOL_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "oracle",
            "truth",
            "every output and the state in every slot of a request equal the float64 definition",
            lambda domain: examples_of(pool_cases(domain)),
            _oracle,
            always=lambda domain: [Example(case) for case in limits(domain)],
            base=True,
        ),
        Law(
            "untouched",
            "exact",
            "slots that no request names keep every bit, NaN included, and so does the memory before and behind the pool",
            lambda domain: examples_of(pool_cases(domain, padded=("none", "some", "all"), most=8)),
            _untouched,
        ),
        Law(
            "padding",
            "exact",
            "the inputs of padding requests change nothing, bit for bit",
            lambda domain: examples_of(pool_cases(domain, padded=("some", "all"), most=8), None, CARRIED),
            _padding,
            _promises("padding_slots"),
            variants=CARRIED,
            lacks=_lacks("padded", "some", "all"),
        ),
        Law(
            "poison",
            "exact",
            "the states in slots that no request names change nothing, bit for bit",
            lambda domain: examples_of(pool_cases(domain, spare=(1, 2, 5), most=8), None, POISON),
            _poison,
            variants=POISON,
        ),
        Law(
            "fresh",
            "exact",
            "a request that begins starts from zeros, whatever its slot contains, bit for bit",
            lambda domain: examples_of(
                _remember(domain, fresh=("some", "all"), most=8).filter(lambda case: any(begins_of(case))), None, POISON
            ),
            _fresh,
            _promises("fresh"),
            variants=POISON,
            lacks=_lacks("fresh", "some", "all"),
        ),
        Law(
            "accept",
            "truth",
            "k tokens at once, k single steps and the k accepted tokens of a draft leave the same state, for every k",
            lambda domain: _draft_examples(_remember(domain, kinds=("drafts",), most=8, accepted="all", drafts="chain")),
            _accept,
            lambda domain: None if domain.most_tokens > 1 else "drafts are not supported",
            place=_drafts,
        ),
        Law(
            "slots",
            "truth",
            "requests in other slots get the same outputs and states, bit for bit if position_independent=True",
            lambda domain: examples_of(pool_cases(domain, spare=(1, 2, 5), most=8)),
            _moved,
        ),
        Law(
            "requests",
            "exact",
            "changing one request and its state changes nothing of the others, bit for bit",
            lambda domain: examples_of(pool_cases(domain, most=8), _several),
            _requests,
            place=_several,
        ),
        Law(
            "history",
            "truth",
            "a call gives the same results whatever calls came before it or run beside it, bit for bit after the same shapes "
            "if deterministic=True",
            histories,
            history,
            variants=("shapes", "freed", "inference", "refused", "failed", "threads", "streams"),
            plain=True,
            of_process=True,
            draw_gpu=functools.partial(histories, gpu=True),
            turns=turns,
        ),
        Law(
            "refill",
            "truth",
            "a call whose tensors held the numbers of another call before gives its own results, also replayed from a CUDA graph",
            lambda domain: examples_of(pool_cases(domain, kinds=("steps", "drafts", "prompts", "crowd"))),
            _refill,
            _promises("refills"),
            always=lambda domain: firm_examples(
                domain, examples_of(_remember(domain, kinds=("crowd",), values="ordinary", padded="none"))
            ),
        ),
        memory_law(functools.partial(pool_cases, most=8), _memory),
        Law(
            "blocks",
            "truth",
            "every number of value channels in a block gives the same results within the tolerance",
            lambda domain: examples_of(pool_cases(domain, most=8, block_v="default", value_dim=_value_dims(domain))),
            _blocks,
            _promises("blocks"),
            lacks=_lacks("block_v", "default"),
        ),
        Law(
            "strides",
            "truth",
            "tokens may have any strides, and slots need not lie next to each other in memory",
            _strided_examples,
            _strides,
            lambda domain: None if domain.rule.views else "strided views are not supported",
            variants=(*POOL_VIEWS, *FAR, "far_slots"),
            lacks=lacks_far,
            always=_firm_views,
        ),
        pure_law(
            functools.partial(pool_cases, most=8),
            _pure,
            says="a call changes neither its inputs nor the memory around them, except a pool that is updated in place",
        ),
    )
}
