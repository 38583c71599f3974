"""Decode is the definition, token by token on the slots that its requests name, and its bounds are sound and sharp.

The definition here takes one token of one head at a time; `Reading` says how the slots can be read wrong.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from oracles.arithmetic.rounding import Arithmetic
from oracles.decode import DECODE
from oracles.norm import l2norm
from oracles.operation import Inputs, gradient_name, sequences
from oracles.rule.gated_delta import GATED_DELTA_RULE, definition
from oracles.tolerance import evaluation
from oracles.tolerance.bound import Bound, bounds, truth
from tests import judging, wrong_backward
from tests.faults import not_refused
from tests.judging import Results, gradcheck, relative, remainders, taylor_order

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
evaluate, worst = (functools.partial(function, DECODE) for function in (judging.evaluate, judging.worst))
TENSORS = ("q", "k", "v", "g", "beta", "pool")
TOKENS = TENSORS[:5]


# Calls


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform in (-1, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of decode: new tokens and slot of each request, widths, options, and a seed for its numbers."""

    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    pool: int
    packed: bool = False
    padding: int = -1
    heads: int = 1
    value_heads: int = 1
    key_dim: int = 4
    value_dim: int = 4
    scale: float | None = None
    qk_norm: bool = True
    decay: float = 0.5
    seed: int = 0

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """In `dtype`, gate and pool in float32 where it is half."""
        make = functools.partial(rand, torch.Generator().manual_seed(self.seed))
        batch = (1, sum(self.lengths)) if self.packed else (len(self.lengths), max(self.lengths, default=1))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        keys, values = (*batch, self.heads, self.key_dim), (*batch, self.value_heads, self.value_dim)
        unit = 1.0 if self.qk_norm else self.key_dim**-0.5
        return Inputs(
            q=make(*keys).to(dtype),
            k=(make(*keys) * unit).to(dtype),
            v=make(*values).to(dtype),
            g=(-self.decay * make(*values[:3]).abs()).to(wide),
            beta=make(*values[:3]).abs().to(dtype),
            pool=make(self.pool, self.value_heads, self.key_dim, self.value_dim).to(wide),
            slots=torch.tensor(self.slots, dtype=torch.int64),
            padding=self.padding,
            cu_seqlens=torch.tensor([0, *itertools.accumulate(self.lengths)]) if self.packed else None,
            scale=self.scale,
            qk_norm=self.qk_norm,
        )

    def cotangents(self, dtype: torch.dtype = torch.float64) -> Results:
        make, inputs = functools.partial(rand, torch.Generator().manual_seed(self.seed + 2**31)), self.inputs(dtype)
        return {"o": make(*inputs.v.shape).to(dtype), "pool": make(*inputs.pool.shape).to(inputs.pool.dtype)}


# Drafts of several lengths, one of none, a padding request, slots out of order, slot 0 and another free, GVA.
TELLING = Call((3, 1, 2, 0, 4), (4, 1, -1, 2, 3), 6, packed=True, heads=2, value_heads=4, seed=3)
VLLM = dataclasses.replace(TELLING, slots=(4, 1, 0, 2, 3), padding=0)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    packed = draw(st.booleans())
    lengths = draw(
        st.lists(st.integers(0, 4), min_size=1, max_size=4)
        if packed
        else st.builds(lambda count, length: [length] * count, st.integers(0, 4), st.integers(1, 4))
    )
    padding, pool = draw(st.sampled_from((-1, 0))), draw(st.integers(0, 7))
    free = list(range(padding + 1, pool))
    slots = draw(st.permutations(free + [padding] * len(lengths)))[: len(lengths)]
    heads = draw(st.integers(1, 2))
    return Call(
        tuple(lengths),
        tuple(slots),
        pool,
        packed,
        padding,
        heads,
        heads * draw(st.sampled_from((1, 2, 4))),
        draw(st.integers(2, 8)),  # of a single channel the norm leaves nothing but eps
        draw(st.integers(1, 8)),
        draw(st.sampled_from((None, 1.0, 0.5))),
        draw(st.booleans()),
        draw(st.sampled_from((0.5, 0.0, 20.0))),
        draw(st.integers(0, 2**16)),
    )


# The definition, and how to read it wrong

Slot = Callable[[list[int], int, int], int | None]


def named(slots: list[int], n: int, padding: int) -> int | None:
    """The slot of request n, if it has one."""
    return None if slots[n] == padding else slots[n]


def clamped(slots: list[int], n: int, padding: int) -> int | None:
    return max(slots[n], 0)


def own_index(slots: list[int], n: int, padding: int) -> int | None:
    return None if slots[n] == padding else n


def in_order(slots: list[int], n: int, padding: int) -> int | None:
    return None if slots[n] == padding else sorted(slots)[n]


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the contract is read; the defaults are right.

    A request reads one slot or none, and writes one slot after `accepted_count` tokens.
    """

    reads: Slot = named
    writes: Slot = named
    earlier: bool = False
    turned: bool = False
    accepted_count: Callable[[int], int] = lambda length: length
    stale: bool = False
    tiled: bool = False


WRONG = {
    "writes padding into slot 0": Reading(writes=clamped),
    "reads slot 0 for padding and writes it": Reading(reads=clamped, writes=clamped),
    "writes back to the request's index": Reading(writes=own_index),
    "reads the request's index": Reading(reads=own_index),
    "slots in order": Reading(reads=in_order, writes=in_order),
    "reads the state that another request wrote": Reading(earlier=True),
    "state transposed": Reading(turned=True),
    "keeps the state after the first draft token": Reading(accepted_count=lambda length: min(length, 1)),
    "keeps the state before the last draft token": Reading(accepted_count=lambda length: max(length - 1, 0)),
    "every draft token reads the state before the draft": Reading(stale=True),
    "tiles key heads": Reading(tiled=True),
}


def define(x: Inputs, read: Reading = Reading()) -> Results:
    """The pool after the call and the outputs, one token of one head of one request at a time."""
    q, k = (l2norm(tensor) if x.qk_norm else tensor for tensor in (x.q, x.k))
    q, k, v, g, beta = (tensor.flatten(0, 1) for tensor in (q, k, x.v, x.g, x.beta))
    (heads, width), value_heads = q.shape[1:], v.shape[1]
    scale = width**-0.5 if x.scale is None else x.scale
    slots, pool, rows, start, last = x.slots.tolist(), list(x.pool.unbind(0)), [], 0, None
    for request, length in enumerate(sequences(x, "q")):
        source, target = (of(slots, request, x.padding) for of in (read.reads, read.writes))
        before = x.pool.new_zeros(x.pool.shape[1:]) if source is None else x.pool[source]
        before = last if read.earlier and last is not None else before
        states = [before.mT if read.turned else before]
        for t in range(start, start + length):
            outputs, ends = [], []
            old_state = states[0] if read.stale else states[-1]
            for head in range(value_heads):
                key, one = head % heads if read.tiled else head // (value_heads // heads), slice(t, t + 1)
                tokens = (q[one, key], k[one, key], v[one, head], g[one, head], beta[one, head])
                o, state = definition(*tokens, old_state[head], scale)
                outputs.append(o[0])
                ends.append(state)
            rows.append(torch.stack(outputs) if slots[request] != x.padding else torch.zeros_like(v[0]))
            states.append(torch.stack(ends))
        start += length
        after = states[read.accepted_count(length)]
        after = after.mT if read.turned else after
        if target is not None:
            pool[target] = after
            last = after
    o = torch.stack(rows) if rows else torch.zeros_like(v)
    return {"o": o.reshape(x.v.shape), "pool": torch.stack(pool) if pool else x.pool}


# The oracle is the definition

# Largest error of a tensor / its largest entry, 1,000 calls measured: 1e-14.
LIMIT = 1e-13
# Rows of the bounds' truth against 2^-29 (float32 to float64) of what they allow float32, 1,000 calls measured: 2.4.
ROW_LIMIT = 8.0


def over(got: Results, want: Results) -> dict[str, float]:
    """The tensors of `got` that are further from `want` than their limit, with their relative errors."""
    return {name: error for name, error in relative(got, want).items() if not error <= LIMIT}


@settings(max_examples=20)
@given(call=calls())
@example(call=TELLING)
@example(call=VLLM)
@example(call=Call((1, 1, 1), (2, 0, 1), 3, heads=2, value_heads=2, value_dim=3))
@example(call=Call((4, 4), (-1, -1), 3))
@example(call=Call((2, 2), (0, 0), 1, padding=0))
@example(call=Call((2, 2), (-1, -1), 0))
@example(call=Call((), (), 3))
@example(call=Call((0,), (1,), 3, packed=True))
@pytest.mark.slow
def test_decode_is_the_definition_token_by_token_forward_and_backward(call: Call) -> None:
    inputs, directions = call.inputs(), call.cotangents()
    DECODE.check(inputs)
    got, want = truth(DECODE, inputs, directions), evaluate(define, inputs, directions)
    assert over(got, want) == {}
    limits = bounds(DECODE, inputs, directions, "recurrent")
    limits = {name: Bound(limit.value, limit.allowed * ROW_LIMIT * 2.0**-29) for name, limit in limits.items()}
    assert worst(limits, want)[0] <= 1.0
    padded = rows_of(inputs, [slot == call.padding for slot in call.slots])
    assert torch.equal(got["o"][padded], torch.zeros_like(got["o"][padded])), "exactly zero"


def rows_of(inputs: Inputs, which: list[bool]) -> Tensor:
    """[B, T], true at the tokens of some requests."""
    lengths = torch.tensor(sequences(inputs, "q"), dtype=torch.int64)
    return torch.tensor(which, dtype=torch.bool).repeat_interleave(lengths).reshape(inputs.q.shape[:2])


def test_wrong_reading_is_not_the_definition() -> None:
    for call in [TELLING, VLLM]:
        inputs, directions = call.inputs(), call.cotangents()
        got = truth(DECODE, inputs, directions)
        assert over(got, evaluate(define, inputs, directions)) == {}, call
        for wrong, read in WRONG.items():
            errors = relative(got, evaluate(functools.partial(define, read=read), inputs, directions))
            assert max(errors["o"], errors["pool"]) > 0.1, wrong


def test_slot_of_padding_is_what_the_call_says() -> None:
    inputs = TELLING.inputs()
    with pytest.raises(ValueError, match=r"^slots must be in 0\.\.5 or padding 0, got -1"):
        DECODE.check(inputs.replaced(padding=0))
    read, padded = (truth(DECODE, VLLM.inputs().replaced(padding=padding)) for padding in (-1, 0))
    assert not torch.equal(read["pool"][0], padded["pool"][0])
    assert torch.equal(padded["pool"][0], VLLM.inputs().pool[0])


def test_slots_that_no_request_names_keep_every_bit() -> None:
    for call in [TELLING, VLLM, dataclasses.replace(TELLING, slots=(-1,) * 5)]:
        inputs, directions = call.inputs(torch.float32), call.cotangents(torch.float32)
        free = [slot for slot in range(call.pool) if slot not in call.slots or slot == call.padding]
        hostile = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 2.0**-149, 2.0**127])
        inputs.pool[free] = hostile.repeat(inputs.pool[0].numel())[: inputs.pool[0].numel()].reshape(inputs.pool[0].shape)
        got = truth(DECODE, inputs, directions)
        free_states = inputs.pool.double()[free]
        assert len(free) >= 2, call
        assert torch.equal(got["pool"][free].view(torch.int64), free_states.view(torch.int64)), call
        assert torch.equal(got["dpool"][free], directions["pool"].double()[free]), "its gradient is what comes from the pool after"
        runs = evaluation.evaluate(DECODE, inputs, directions, Arithmetic.of("recurrent", "fp32", runs=3))
        for run in (0, 1, 2):
            assert torch.equal(runs["pool"][run, free].view(torch.int64), free_states.view(torch.int64)), call
        turned = define(inputs.replaced(**{name: inputs[name].double() for name in TENSORS}), WRONG["writes padding into slot 0"])
        assert not torch.equal(turned["pool"][free].view(torch.int64), free_states.view(torch.int64)), call


def by_product(x: Inputs) -> Results:
    """Padding masked by products with zero: NaN where the memory that it does not own holds NaN."""
    named = (x.slots != x.padding).to(x.pool.dtype)
    state = x.pool[x.slots.clamp(min=0)] * named.reshape(-1, 1, 1, 1)
    every = define(x.replaced(pool=state, slots=torch.arange(len(x.slots)), padding=-1))
    rows = rows_of(x, (x.slots != x.padding).tolist()).to(x.q.dtype)
    pool = x.pool.index_copy(0, x.slots[x.slots != x.padding], every["pool"][x.slots != x.padding])
    return {"o": every["o"] * rows[..., None, None], "pool": pool}


@pytest.mark.parametrize("call", [TELLING, VLLM], ids=["padding -1", "padding 0"])
def test_nothing_is_read_of_paddings_memory(call: Call) -> None:
    inputs, directions = call.inputs(), call.cotangents()
    padded = rows_of(inputs, [slot == call.padding for slot in call.slots])
    assert padded.sum() == 2
    poisoned = inputs.replaced(**{name: inputs[name].clone() for name in TENSORS})
    poisoned.pool[0] = math.nan
    for name in TOKENS:
        poisoned[name][padded] = math.nan

    def moved(implementation: Callable[[Inputs, Results], Results]) -> set[str]:
        """The tensors that the poison changes anywhere but in slot 0 after the call."""
        clean, dirty = implementation(inputs, directions), implementation(poisoned, directions)
        dirty["pool"][0] = clean["pool"][0]
        return {name for name in clean if not torch.equal(clean[name], dirty[name])}

    assert moved(functools.partial(truth, DECODE)) == set()
    assert moved(functools.partial(evaluate, by_product)) >= {"o", "dq"}
    assert over(evaluate(by_product, inputs, directions), truth(DECODE, inputs, directions)) == {}, "else it is right"
    got = truth(DECODE, poisoned, directions)
    for name in ("o", *map(gradient_name, TOKENS)):
        assert torch.equal(got[name][padded], torch.zeros_like(got[name][padded])), name


def test_index_dtypes_are_the_same_call_to_the_bit() -> None:
    inputs, directions = TELLING.inputs(), TELLING.cotangents()
    short = inputs.replaced(slots=inputs.slots.int(), cu_seqlens=inputs.cu_seqlens.int())
    DECODE.check(short)
    want, got = (truth(DECODE, variant, directions) for variant in (inputs, short))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_absent_option_is_its_default() -> None:
    call = Call((2, 2), (1, -1), 2, heads=1, value_heads=2, qk_norm=False, scale=0.5)
    inputs, directions = call.inputs(), call.cotangents()
    absent = Inputs(**{name: inputs[name] for name in (*TENSORS, "slots", "padding")})
    DECODE.check(absent)
    got, want = truth(DECODE, absent, directions), truth(DECODE, inputs, directions)
    assert all(torch.equal(got[name], want[name]) for name in want), "4 ** -0.5 is 0.5"
    assert not torch.equal(got["o"], truth(DECODE, inputs.replaced(scale=1.0))["o"])
    assert not torch.equal(got["o"], truth(DECODE, inputs.replaced(qk_norm=True))["o"])


# Decode is prefill, some tokens at a time


def drafted(
    inputs: Inputs, directions: Results, drafts: list[tuple[int, ...]], *, forward: bool = True, back: bool = True
) -> Results:
    """One call a draft: of each packed request its next tokens, as many as the draft says; the pool goes on from call to call."""
    ends = list(itertools.accumulate(sequences(inputs, "q")))
    starts, steps, pool = [0, *ends[:-1]], [], inputs.pool
    for draft in drafts:
        index = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, draft, strict=True)])
        starts = [start + count for start, count in zip(starts, draft, strict=True)]
        tokens = {name: inputs[name].index_select(1, index) for name in TOKENS}
        call = inputs.replaced(**tokens, pool=pool, cu_seqlens=torch.tensor([0, *itertools.accumulate(draft)]))
        DECODE.check(call)
        steps.append((index, call))
        pool = truth(DECODE, call)["pool"] if forward else pool
    assert starts == ends
    parts, dpool, last = [], directions["pool"], truth(DECODE, steps[-1][1])["pool"]
    for index, call in reversed(steps):
        parts.insert(0, truth(DECODE, call, {"o": directions["o"].index_select(1, index), "pool": dpool}))
        dpool = parts[0]["dpool"] if back else torch.zeros_like(dpool)
    order = torch.cat([index for index, _ in steps]).argsort()
    names = ("o", *(gradient_name(name) for name in TOKENS))
    whole = {name: torch.cat([part[name] for part in parts], 1).index_select(1, order) for name in names}
    return {**whole, "pool": last, "dpool": dpool}


def prefilled(inputs: Inputs, directions: Results) -> Results:
    """The gated delta rule on all tokens, from the states in the slots and back into them."""
    slots = inputs.slots
    call = Inputs(
        **{name: inputs[name] for name in (*TOKENS, "cu_seqlens", "scale", "qk_norm")},
        state=inputs.pool[slots],
    )
    got = truth(GATED_DELTA_RULE, call, {"o": directions["o"], "final_state": directions["pool"][slots]})
    return {
        "o": got["o"],
        "pool": inputs.pool.index_copy(0, slots, got["final_state"]),
        **{gradient_name(name): got[gradient_name(name)] for name in TOKENS},
        "dpool": directions["pool"].index_copy(0, slots, got["dh0"]),
    }


@settings(max_examples=12)
@given(
    drafts=st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=6),
    slots=st.permutations(range(5)),
    groups=st.sampled_from((1, 2)),
    seed=st.integers(0, 2**16),
)
@example(drafts=[(65, 0, 3), (1, 1, 1), (4, 2, 1), (1, 1, 1)], slots=[3, 0, 2, 1, 4], groups=2, seed=0)
@pytest.mark.slow
def test_drafts_one_after_another_are_prefill_of_all_their_tokens(
    drafts: list[tuple[int, ...]], slots: list[int], groups: int, seed: int
) -> None:
    lengths = tuple(map(sum, zip(*drafts, strict=True)))
    call = Call(lengths, tuple(slots[:3]), 5, packed=True, heads=2, value_heads=2 * groups, value_dim=3, seed=seed)
    inputs, directions = call.inputs(), call.cotangents()
    assert over(drafted(inputs, directions, drafts), prefilled(inputs, directions)) == {}


def test_drafts_show_a_pool_that_is_not_carried() -> None:
    drafts = [(3, 1, 0), (1, 4, 2), (2, 2, 2)]
    call = Call((6, 7, 4), (2, 0, 3), 5, packed=True)
    inputs, directions = call.inputs(), call.cotangents()
    for dropped, shown in [("forward", {"o", "pool"}), ("back", {"dv", "dpool"})]:
        wrong = drafted(inputs, directions, drafts, **{dropped: False})
        assert shown <= {name for name, error in over(wrong, prefilled(inputs, directions)).items() if error > 1e-2}, dropped


# Gradients


STARTS = {"has_initial_state": torch.tensor([1, 0, 1, 1, 0]), "accepted": torch.tensor([2, 1, 1, 0, 3])}


def test_taylor_remainders_of_the_truth_are_of_second_order() -> None:
    for more in [{}, STARTS]:
        inputs, directions = Inputs(**TELLING.inputs(), **more), TELLING.cotangents()
        DECODE.check(inputs)
        right, found = truth(DECODE, inputs, directions), remainders(DECODE, inputs, directions)
        assert taylor_order(found, right) > 1.9, more
        for gradient in (gradient_name(name) for name in TENSORS):
            assert taylor_order(found, {**right, gradient: right[gradient] * 1.01}) < 1.5, gradient


def test_gradcheck_accepts_every_input() -> None:
    for more in [{}, STARTS]:
        assert gradcheck(DECODE, Inputs(**TELLING.inputs(), **more)), more


@pytest.mark.parametrize("wrong", ["norm", "state"])
def test_taylor_remainders_reject_a_wrong_backward(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, directions = TELLING.inputs(), TELLING.cotangents()
    found = remainders(DECODE, inputs, directions)
    monkeypatch.setattr(*wrong_backward.WRONG[wrong])
    assert taylor_order(found, truth(DECODE, inputs, directions)) < 1.5


@pytest.mark.parametrize("wrong", ["norm", "state"])
@pytest.mark.slow
def test_gradcheck_rejects_a_wrong_backward(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Call((1, 2, 1), (2, 0, -1), 3, packed=True, key_dim=2, value_dim=2, seed=1).inputs()
    assert gradcheck(DECODE, inputs)
    monkeypatch.setattr(*wrong_backward.WRONG[wrong])
    with pytest.raises(GradcheckError, match="Jacobian"):
        gradcheck(DECODE, inputs)


# The bounds


def single(x: Inputs, read: Reading = Reading()) -> Results:
    """The definition in float32; o is stored in the inputs' dtype."""
    got = define(x.replaced(**{name: x[name].float() for name in TENSORS}), read)
    return {"o": got["o"].to(x.v.dtype), "pool": got["pool"]}


def kernel(x: Inputs) -> Results:
    """As decode kernels do: a request's heads at once, q scaled first, float32 sums over K one channel after another, in place."""
    groups, pool, start = x.v.shape[2] // x.q.shape[2], x.pool.clone(), 0
    q, k, v, g, beta = (x[name].float().flatten(0, 1) for name in TOKENS)
    if x.qk_norm:
        q, k = (tensor / (tensor.square().sum(-1, keepdim=True) + 1e-6).sqrt() for tensor in (q, k))
    q = q * (q.shape[-1] ** -0.5 if x.scale is None else x.scale)
    q, k = (tensor.repeat_interleave(groups, 1).unsqueeze(-1) for tensor in (q, k))
    rows = []
    for slot, length in zip(x.slots.tolist(), sequences(x, "q"), strict=True):
        at = slice(start, start + length)
        start += length
        if slot == x.padding:
            rows.append(torch.zeros_like(v[at]))
            continue
        state = pool[slot].clone()
        for q_t, k_t, v_t, g_t, beta_t in zip(q[at], k[at], v[at], g[at], beta[at], strict=True):
            state = state * g_t.exp()[:, None, None]
            fresh = (v_t - (k_t * state).cumsum(-2)[:, -1]) * beta_t.unsqueeze(-1)
            state = state + k_t * fresh.unsqueeze(-2)
            rows.append((q_t * state).cumsum(-2)[:, -1].unsqueeze(0))
        pool[slot] = state
    o = torch.cat(rows) if rows else v
    return {"o": o.reshape(x.v.shape).to(x.v.dtype), "pool": pool}


SHAPES = (  # few, so that the disturbed runs' grids are made once
    Call((1,) * 6, (7, 2, -1, 0, 5, 3), 8, heads=2, value_heads=4, key_dim=16, value_dim=8),
    Call((3, 3), (1, 0), 3, heads=1, value_heads=8, key_dim=8, value_dim=16),
    Call((4, 0, 1, 2), (4, 1, 2, 3), 5, packed=True, heads=2, value_heads=2, key_dim=32, value_dim=4),
    Call((2, 4, 3, 1), (0, 3, 0, 1), 4, packed=True, padding=0, heads=1, value_heads=2, key_dim=5, value_dim=12),
    Call((1,), (0,), 1, heads=4, value_heads=8, key_dim=64, value_dim=8),
)


@pytest.mark.slow
def test_bounds_hold_for_right_implementations(record_property: Callable[[str, object], None]) -> None:
    found: dict[tuple[str, str], tuple[float, str, int]] = {}
    for seed in range(30):
        dtype = tuple(DTYPES)[seed // len(SHAPES) % 3]
        decay, normed, scale = (0.5, 0.01, 8.0)[seed % 7 % 3], seed % 4 > 0, (None, 1.0)[seed % 11 % 2]
        call = dataclasses.replace(SHAPES[seed % len(SHAPES)], decay=decay, qk_norm=normed, scale=scale, seed=seed)
        inputs, directions = call.inputs(DTYPES[dtype]), call.cotangents(DTYPES[dtype])
        limits = bounds(DECODE, inputs, directions, "recurrent")
        for name, implementation in {"float32 definition": single, "kernel": kernel}.items():
            ratio, where = worst(limits, evaluate(implementation, inputs, directions))
            found[name, dtype] = max(found.get((name, dtype), (0.0, "", 0)), (ratio, where, seed))
    line = "; ".join(f"{name}, {dtype}: {ratio:.2f} ({where}, {seed})" for (name, dtype), (ratio, where, seed) in found.items())
    record_property("error / allowed, decode", line)
    print(f"decode: error / allowed at most {line}")
    assert len(found) == 6
    assert max(ratio for ratio, _, _ in found.values()) <= 1.0, line
    assert min(ratio for ratio, _, _ in found.values()) > 0.01, f"a bound a hundred times too wide: {line}"


def test_bound_rejects_every_wrong_reading() -> None:
    for dtype, call in itertools.product(DTYPES, [TELLING, VLLM]):
        inputs, directions = call.inputs(DTYPES[dtype]), call.cotangents(DTYPES[dtype])
        limits = bounds(DECODE, inputs, directions, "recurrent")
        forward = {name: limits[name] for name in directions}
        assert worst(limits, evaluate(single, inputs, directions))[0] <= 1.0, (dtype, call)
        for wrong, read in WRONG.items():
            assert worst(forward, single(inputs, read))[0] > 1e3, wrong


def test_bound_rejects_a_pool_that_was_stored_in_bfloat16() -> None:
    inputs, directions = TELLING.inputs(torch.bfloat16), TELLING.cotangents(torch.bfloat16)
    limits = bounds(DECODE, inputs, directions, "recurrent")
    right = {name: limit.value for name, limit in limits.items()}
    assert worst(limits, {**right, "pool": right["pool"].bfloat16()})[0] > 100


def test_bound_rejects_zeros_one_zeroed_row_and_a_shift_by_a_token() -> None:
    for dtype in DTYPES:
        inputs, directions = TELLING.inputs(DTYPES[dtype]), TELLING.cotangents(DTYPES[dtype])
        limits = bounds(DECODE, inputs, directions, "recurrent")
        right = {name: limit.value for name, limit in limits.items()}
        assert worst(limits, right)[0] == 0.0, dtype
        for name, value in right.items():
            rows = value.unsqueeze(-1) if DECODE.port(name).scalar_rows else value
            sizes = rows.norm(dim=-1, keepdim=True)
            zeroed = torch.where(sizes == sizes.max(), 0.0, rows).reshape(value.shape)
            axis = 1 if DECODE.port(name).axes.startswith("B T") else 0
            for wrong in (torch.zeros_like(value), zeroed, value.roll(1, axis)):
                assert worst(limits, {**right, name: wrong})[0] > 1.0, name


# Contracts

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"slots": torch.tensor([4, 1, -1, 2, 6])}, r"slots must be in 0\.\.5 or padding -1, got 6 \(\[4, 1, -1, 2, 6\]\)$"),
    ({"slots": torch.tensor([4, 1, -1, -2, 3])}, r"slots must be in 0\.\.5 or padding -1, got -2 \(\[4, 1, -1, -2, 3\]\)$"),
    ({"padding": 0}, r"slots must be in 0\.\.5 or padding 0, got -1 \(\[4, 1, -1, 2, 3\]\)$"),
    ({"slots": torch.tensor([4, 1, -1, 2, 4])}, r"slots must name each slot at most once, got 4 twice \(\[4, 1, -1, 2, 4\]\)$"),
    ({"slots": torch.tensor([4, 1, -1, 2])}, r"slots must have N = 5, one per request, got 4$"),
    ({"slots": torch.tensor([4, 1, -1, 2, 3, 0])}, r"slots must have N = 5, one per request, got 6$"),
    ({"cu_seqlens": None}, r"slots must have N = 1, one per request, got 5$"),
    ({"slots": torch.tensor([4.0, 1.0, -1.0, 2.0, 3.0])}, r"slots must be int32 or int64, got torch.float32$"),
    ({"slots": torch.tensor([[4, 1, -1, 2, 3]])}, r"slots must have axes \[N\], got shape \(1, 5\)$"),
    ({"slots": [4, 1, -1, 2, 3]}, r"slots must be a tensor, got list$"),
    ({"padding": -1.0}, r"padding must be a whole number, got -1.0$"),
    ({"padding": None}, r"padding must be a whole number, got None$"),
    ({"padding": False}, r"padding must be a whole number, got False$"),
    ({"scale": math.nan}, r"scale must be None or a finite number, got nan$"),
    ({"qk_norm": 1}, r"qk_norm must be True or False, got 1$"),
    ({"pool": None}, r"pool must be a tensor, got NoneType$"),
    ({"pool": torch.zeros(6, 2, 4, 4)}, r"pool must have HV = 4 like .*, got shape \(6, 2, 4, 4\)"),
    ({"pool": torch.zeros(6, 4, 5, 4)}, r"pool must have K = 4 like .*, got shape \(6, 4, 5, 4\)"),
    ({"pool": torch.zeros(6, 4, 4, 1)}, r"pool must have V = 4 like .*, got shape \(6, 4, 4, 1\)"),
    ({"pool": torch.zeros(6, 4, 4, 4, dtype=torch.int64)}, r"pool must be floating point of 16, 32 or 64 bits, got torch.int64$"),
    ({"q": torch.zeros(1, 10, 3, 4), "k": torch.zeros(1, 10, 3, 4)}, r"HV must be a multiple of H = 3, got 4$"),
    ({"g": torch.zeros(1, 10, 2)}, r"g must have HV = 4 like .*, got shape \(1, 10, 2\)"),
    ({"cu_seqlens": torch.tensor([0, 3, 4, 6, 6, 9])}, r"cu_seqlens must end at the token count 10, got 9"),
]


def test_illegal_input_is_refused() -> None:
    inputs = TELLING.inputs(torch.float32)
    DECODE.check(inputs)
    patterns = ((wrong, f"^{message}") for wrong, message in REFUSED)
    assert not_refused(lambda wrong: DECODE.check(inputs.replaced(**wrong)), patterns) == []
