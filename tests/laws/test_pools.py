"""Serving: cases of pools rebuild a call from a line, the contract's options mean what they say, and each law has killed."""

import collections
import concurrent.futures
import dataclasses
import importlib.machinery
import itertools
import pathlib
import sys
import time
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.decode import DECODE, decode
from oracles.gates import log_decay
from oracles.operation import Inputs
from oracles.tolerance.bound import bounds, truth
from properties.books import book_for, book_of
from properties.laws.law import Blind
from properties.pools.case import BLOCK_SIZES, PoolCase
from properties.pools.domain import PoolDomain
from properties.pools.laws import POOL_LAWS
from properties.rules.case import VALUES
from properties.rules.domain import Domain
from properties.words.example import Example
from tests import right
from tests.kills import Fewer, Kill, assert_killed_alone, rows, unexplained
from tests.random_domains import faults
from tests.together import for_each
from verify.adapters import blocks, fla_decode
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import AdapterFault
from verify.engine.check import Check
from verify.engine.drawing import seeded
from verify.engine.profiles import Profile
from verify.engine.shrink import shrink
from verify.engine.state import Settings
from verify.execution.judge import judge
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker
from verify.zoo import base
from verify.zoo import wrong_pools as pools

FULL = PoolCase(
    (3, 1, 4, 0, 2, 5), packed=True, heads=2, value_heads=4, key_dim=8, value_dim=12, dtype="bf16", gate="mixed", state="random",
    spare=3, free="nan", padding_slot="0", padded="some", fresh="some", accepted="some", indices="int32", qk_norm=True, seed=8,
)  # fmt: skip


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


# Cases


def test_line_rebuilds_the_call_to_the_bit() -> None:
    again = PoolCase.parse(str(FULL))
    assert again == FULL
    assert str(PoolCase((1,))) == "op=decode lengths=1"
    one, two = FULL.inputs(), again.inputs()
    assert one.keys() == two.keys()
    tensors = [name for name, value in one.items() if isinstance(value, Tensor)]
    assert {"pool", "slots", "has_initial_state", "accepted", "cu_seqlens"} <= set(tensors)
    for name in tensors:
        assert torch.equal(one[name].contiguous().view(torch.uint8), two[name].contiguous().view(torch.uint8)), name
    other = dataclasses.replace(FULL, seed=9).inputs()
    assert not torch.equal(one.slots, other.slots)
    assert not torch.equal(bits(one.pool), bits(other.pool))


INSIDE = PoolCase.parse(
    "op=decode lengths=3+1+2 packed=yes value_heads=2 key_dim=8 value_dim=12 dtype=bf16 gate=mixed beta=two state=random spare=2 "
    "free=nan padded=some rule=kda in_kernel=both dt_bias=no state_dtype=bf16 seed=3"
)


def test_line_says_the_rule_what_the_kernel_computes_and_the_dtype_of_states() -> None:
    inputs = INSIDE.inputs()
    assert PoolCase.parse(str(INSIDE)) == INSIDE
    assert inputs.g is inputs.beta is inputs.dt_bias is None
    assert inputs.allow_neg_eigval
    assert inputs.a.shape == (1, 6, 2, 8)
    assert inputs.pool.dtype == torch.bfloat16
    INSIDE.spec.check(inputs)
    free = [slot for slot in range(INSIDE.slots) if slot not in INSIDE.slot_of]
    assert len(set(inputs.pool[free].view(torch.int16).flatten().tolist())) > 120, "nearly all 128 quiet NaN"
    named = [slot for slot, real in zip(INSIDE.slot_of, INSIDE.real, strict=True) if real]
    want = decode("kda").forward(
        Inputs(
            **{name: inputs[name].double().unsqueeze(0) for name in ("q", "k", "v", "pool")},
            g=log_decay(Inputs(a=inputs.a.double().unsqueeze(0), A_log=inputs.A_log.double().unsqueeze(0)), Arithmetic.exact()),
            beta=2 * inputs.b.double().sigmoid().unsqueeze(0),
            slots=inputs.slots.unsqueeze(0),
            padding=-1,
            cu_seqlens=inputs.cu_seqlens,
        ),
        Arithmetic.exact(),
    )
    got = truth(INSIDE.spec, inputs)
    torch.testing.assert_close(got["pool"][named], want["pool"][0, named])
    limit = bounds(INSIDE.spec, inputs, None, "recurrent")["pool"]
    ulps = limit.allowed[named] / torch.linalg.vector_norm(got["pool"][named], dim=-1)
    assert 2**-8 < float(ulps.median()) < 2**-4, "a state is rounded to bf16 once"


@pytest.mark.slow
def test_drawn_calls_are_legal_and_slots_are_each_somebodys() -> None:
    count = 0

    def look(example: Example) -> None:
        nonlocal count
        case: PoolCase = example.case
        inputs = case.inputs()
        DECODE.check(inputs)
        assert len(inputs.pool) == case.slots == len(case.lengths) + case.spare + (case.padding_slot == "0")
        assert [slot != inputs.padding for slot in case.slot_of] == list(case.real)
        assert inputs.slots.tolist() == list(case.slot_of)
        named = [slot for slot, real in zip(case.slot_of, case.real, strict=True) if real]
        assert len(set(named)) == len(named)
        assert min(named, default=1) >= (case.padding_slot == "0")
        assert all(
            min(length, case.accepted != "any") <= accepted <= length
            for accepted, length in zip(case.accepted_counts, case.lengths, strict=True)
        )
        assert case.accepted != "any" or any(
            length and not kept for kept, length in zip(case.accepted_counts, case.lengths, strict=True)
        )
        assert bool(inputs.pool[named].isfinite().all())
        free = [slot for slot in range(case.slots) if slot not in named]
        assert bool(inputs.pool[free].isnan().all()) == (case.free == "nan" or not free)
        for some, which in ((case.padded, [not real for real in case.real]), (case.fresh, case.beginning)):
            assert sum(which) == {"none": 0, "all": len(which)}.get(some, sum(which))
            assert (0 < sum(which) < len(which)) == (some == "some")
        count += 1

    seeded(POOL_LAWS["oracle"].draw(PoolDomain()), 5, 80, look)
    assert count == 80


def test_poison_has_many_bit_patterns_of_nan() -> None:
    pool = FULL.filled("nan")
    assert bool(pool.isnan().all())
    assert len(set(bits(pool).flatten().tolist())) > pool.numel() // 2
    assert {True, False} == set((bits(pool) < 0).flatten().tolist())
    assert float(FULL.filled("random").abs().max()) <= 0.25
    assert torch.equal(FULL.filled("zero"), torch.zeros(pool.shape))


REFUSED = {
    "op=gated_delta_rule lengths=1": "operation must be one of decode, got 'gated_delta_rule'",
    "lengths=1 state=none": "state must be one of zero, random, got 'none'",
    "lengths=1 spare=70000": r"spare must be in 0\.\.65536, got 70000",
    "lengths=1 padded=some": "padded=some needs two requests or more, got 1",
    "lengths=1 fresh=some": "fresh=some needs two requests or more, got 1",
    "lengths=0+0 accepted=any": "accepted=any needs a request with a token, got none",
    "lengths=1+1 accepted=some": "accepted=some needs a request of two tokens or more, got 1",
    "lengths=1+2": "lengths must all be equal unless packed=yes, got 1\\+2",
    "lengths=1 heads=2": "value_heads must be a multiple of heads 2, got 1",
    "lengths=1 padding_slot=1": "padding_slot must be one of -1, 0, got '1'",
    "lengths=1 values=one_hot": f"values must be one of {', '.join(kind for kind in VALUES if kind != 'one_hot')}, got 'one_hot'",
    "lengths=1 free=inf": "free must be one of zero, random, nan, got 'inf'",
    "lengths=1 block_v=5": "block_v must be one of default, 4, 8, 16, 32, 64, got '5'",
    "lengths=1 backward=yes": "unknown word 'backward'",
}


@for_each("line", REFUSED)
def test_illegal_case_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[line]):
        PoolCase.parse(line)


def test_block_reaches_the_inputs_and_changes_nothing_else() -> None:
    whole = FULL.inputs()
    assert whole.block_v is None
    for size in BLOCK_SIZES:
        case = PoolCase.parse(f"{FULL} block_v={size}")
        assert str(case) == f"{str(FULL).removesuffix(' seed=8')} block_v={size} seed=8"
        inputs = case.inputs()
        assert inputs.block_v == size
        DECODE.check(inputs)
        for name in whole.keys() - {"block_v"}:
            assert name in inputs
            if isinstance(whole[name], Tensor):
                assert torch.equal(inputs[name].contiguous().view(torch.uint8), whole[name].contiguous().view(torch.uint8)), name


@pytest.mark.slow
@for_each("law", POOL_LAWS)
def test_cases_with_a_choice_of_blocks_are_the_same_but_for_the_block(law: str) -> None:
    choosing, default = PoolDomain(blocks=BLOCK_SIZES), PoolDomain()

    def drawn(domain: PoolDomain) -> list[Example]:
        examples: list[Example] = []
        seeded(POOL_LAWS[law].draw(domain), 11, 40, examples.append)
        return examples

    with_blocks, without = drawn(choosing), drawn(default)
    assert {example.case.block_v for example in without} == {"default"}
    assert {example.case.block_v for example in with_blocks} == ({"default"} if law == "blocks" else {*choosing.block_choices})
    plain = [dataclasses.replace(example, case=dataclasses.replace(example.case, block_v="default")) for example in with_blocks]
    assert plain == without


def test_lines_find_the_book_by_their_operation() -> None:
    run = Run("oracle", "fla/decode", Example(FULL))
    assert Run.parse(str(run)) == run
    assert book_for("oracle", "decode").name == "pools"
    assert book_of(FULL) is book_of(PoolDomain()) is book_for("accept", None)


# The contract's options


def options() -> Inputs:
    """Drafts of which the second, third and fifth begin, without padding; in float64."""
    case = dataclasses.replace(FULL, padded="none", fresh="none", accepted="all", dtype="fp32")
    inputs = case.inputs()
    wide = {name: inputs[name].double() for name in ("q", "k", "v", "g", "beta", "pool")}
    return inputs.replaced(**wide, has_initial_state=torch.tensor([1, 0, 0, 1, 0, 1]), accepted=torch.tensor([2, 1, 0, 0, 1, 5]))


def test_request_that_begins_is_one_on_a_slot_of_zeros() -> None:
    inputs = options().replaced(accepted=None)
    zeroed = inputs.pool.clone()
    zeroed[inputs.slots[inputs.has_initial_state == 0].long()] = 0
    left = inputs.pool.clone()
    left[inputs.slots[inputs.has_initial_state == 0].long()] = torch.nan
    want = truth(DECODE, inputs.replaced(pool=zeroed, has_initial_state=None))
    for pool in (zeroed, inputs.pool, left):
        got = truth(DECODE, inputs.replaced(pool=pool))
        assert torch.equal(got["o"], want["o"])
        assert torch.equal(got["pool"].nan_to_num(7.0), want["pool"].nan_to_num(7.0))
    assert not torch.equal(want["o"], truth(DECODE, inputs.replaced(has_initial_state=None))["o"])


def test_draft_answers_every_token_and_keeps_the_state_after_those_accepted() -> None:
    inputs = options()
    got, whole = truth(DECODE, inputs), truth(DECODE, inputs.replaced(accepted=None))
    assert torch.equal(got["o"], whole["o"])
    starts, accepted = inputs.cu_seqlens.tolist(), inputs.accepted.tolist()
    index = torch.tensor([start + at for start, count in zip(starts, accepted, strict=False) for at in range(count)])
    first = inputs.replaced(
        **{name: inputs[name][:, index] for name in ("q", "k", "v", "g", "beta")},
        accepted=None,
        cu_seqlens=torch.tensor([0, *accepted]).cumsum(0),
    )
    want = truth(DECODE, first)["pool"]
    named = inputs.slots.long()
    torch.testing.assert_close(got["pool"][named], want[named], rtol=1e-13, atol=0.0)
    for request, (count, length) in enumerate(zip(accepted, (3, 1, 4, 0, 2, 5), strict=True)):
        same = torch.equal(got["pool"][named[request]], whole["pool"][named[request]])
        assert same == (count == length), request
    assert not torch.equal(got["pool"][named[2]], inputs.pool[named[2]]), "it begins and keeps nothing: zeros"
    assert float(got["pool"][named[2]].abs().max()) == 0.0


def test_bounds_of_a_pool_with_nan_are_finite_where_requests_are() -> None:
    limit = bounds(DECODE, FULL.inputs(), None, "recurrent")["pool"]
    named = torch.zeros(FULL.slots, dtype=torch.bool)
    named[[slot for slot, real in zip(FULL.slot_of, FULL.real, strict=True) if real]] = True
    for x in (limit.value, limit.allowed):
        assert bool(x[named].isfinite().all())
        assert bool(x[~named].isnan().all())


@for_each(
    ("wrong", "message"),
    [
        ({"has_initial_state": torch.tensor([1, 0, 0, 1, 0, 2])}, "has_initial_state must be 0 or 1 for each of N = 6 requests"),
        ({"has_initial_state": torch.tensor([1, 0])}, "has_initial_state must be 0 or 1 for each of N = 6 requests, got"),
        ({"has_initial_state": torch.ones(6)}, "has_initial_state must be int32 or int64, got torch.float32"),
        ({"accepted": torch.tensor([4, 1, 4, 0, 2, 5])}, r"accepted must be in 0\.\.its tokens for each request, of \[3, 1, 4, 0"),
        ({"accepted": torch.tensor([3, -1, 4, 0, 2, 5])}, r"accepted must be in 0\.\.its tokens for each request"),
        ({"accepted": torch.tensor([3])}, r"accepted must be in 0\.\.its tokens for each request, .* got \[3\]"),
    ],
)
def test_illegal_option_is_refused(wrong: dict[str, Any], message: str) -> None:
    DECODE.check(options())
    with pytest.raises(ValueError, match=f"^{message}"):
        DECODE.check(options().replaced(**wrong))


# Domains

STEPS = PoolDomain(
    rule=Domain(dtypes=("bf16",), key_dims=(128, 128), value_dims=(128, 128), packed=False, scale=False, backward=False),
    most_tokens=1,
    padding_slots=("0",),
    indices=("int32",),
    fresh=False,
    accepts=False,
)
ALONE = PoolDomain(rule=Domain(batched=False, empty=False, grouped_heads=False), padding_slots=(), fresh=False)
BLOCKS = PoolDomain(rule=Domain(value_dims=(33, 300), width_step=3), blocks=(16, 64))
UNTOLD = {"blocks": "blocks is not supported"}


LACKING = (
    (PoolDomain(), UNTOLD),
    (STEPS, {"fresh": "fresh is not supported", "accept": "drafts are not supported", **UNTOLD}),
    (ALONE, {"padding": "padding slots is not supported", "fresh": "fresh is not supported", **UNTOLD}),
    (BLOCKS, {}),
)


@pytest.mark.parametrize(("domain", "lacking"), LACKING, ids=["everything", "steps", "alone", "blocks"])
@pytest.mark.slow_after_first
def test_laws_draw_what_the_domain_promises(domain: PoolDomain, lacking: dict[str, str]) -> None:
    assert {law.name: law.needs(domain) for law in POOL_LAWS.values() if law.needs(domain)} == lacking
    assert faults(domain, 3, 12) == {}


@for_each(
    ("domain", "line", "reason"),
    [
        (STEPS, "lengths=2 indices=int32", "lengths=2: more than 1 tokens a request are not supported"),
        (STEPS, "lengths=1+1 padded=some indices=int32", "padding_slot=-1 is not among 0"),
        (ALONE, "lengths=1+1 padded=some", "padding_slot=-1 is not among any"),
        (STEPS, "lengths=1", "indices=int64 is not among int32"),
        (STEPS, "lengths=1 indices=int32 fresh=all", "fresh=all: starting from zeros is not supported"),
        (PoolDomain(rejects=False), "lengths=2 accepted=any", "accepted=any: keeping no token of a draft is not supported"),
        (PoolDomain(accepts=False), "lengths=2 accepted=some", "accepted=some: keeping part of a draft is not supported"),
        (STEPS, "lengths=1 indices=int32", "dtype=fp32 is not among bf16"),
        (ALONE, "lengths=1", "packed=no is not supported"),
        (STEPS, "lengths=1 indices=int32 block_v=8", "block_v=8 is not among default"),
        (BLOCKS, "lengths=1 block_v=8", "block_v=8 is not among default, 16, 64"),
    ],
)
def test_domain_says_why_a_case_is_outside(domain: PoolDomain, line: str, reason: str) -> None:
    assert domain.outside(PoolCase.parse(line)) == reason
    assert PoolDomain(blocks=BLOCK_SIZES).outside(PoolCase.parse(line)) is None


@for_each(
    ("wrong", "message"),
    [
        ({"operation": "conv"}, "operation must be decode, got 'conv'"),
        ({"rule": Domain(initial_state=False)}, "rule must be a Domain of gated_delta_rule or kda with an initial state"),
        ({"rule": Domain(operation="delta_rule")}, "rule must be a Domain of gated_delta_rule or kda with an initial state"),
        ({"layout": "v_first"}, "layout must be one of kv, vk, got 'v_first'"),
        ({"state_dtypes": ()}, r"state_dtypes must be a tuple of some of fp32, bf16, fp16, input, got \(\)"),
        ({"views": ("sideways",)}, r"views must be a tuple of some of sliced, .*, fused, got \('sideways',\)"),
        ({"most_tokens": 0}, "most_tokens must be at least 1, got 0"),
        ({"padding_slots": ("1",)}, r"padding_slots must be a tuple of some of -1, 0, got \('1',\)"),
        ({"indices": ()}, r"indices must be a tuple of some of int64, int32, got \(\)"),
        ({"blocks": (8, 24)}, r"blocks must be a tuple of some of 4, 8, 16, 32, 64, got \(8, 24\)"),
        ({"blocks": 8}, r"blocks must be a tuple of some of 4, 8, 16, 32, 64, got 8"),
    ],
)
def test_domain_refuses_what_it_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolDomain(**wrong)


# The bench, where a pool may be changed in place


def bench_of(adapter: Any, case: PoolCase = FULL) -> AdapterBench:
    return AdapterBench(adapter, None, case)


def test_pool_in_place_is_no_impurity_and_comes_back_for_the_next_run() -> None:
    inputs = FULL.inputs()
    before = bits(inputs.pool).clone()
    bench = bench_of(base.Serving())
    once = bench.run(inputs, None)
    assert bench.impure == []
    assert torch.equal(bits(inputs.pool), before)
    assert not torch.equal(bits(once["pool"]), before)
    twice = bench.run(inputs, None)
    assert torch.equal(bits(twice["pool"]), bits(once["pool"]))


def test_pool_of_an_adapter_that_is_not_in_place_must_not_change() -> None:
    class Says(base.Serving):
        domain = PoolDomain(in_place=False)

    bench = bench_of(Says())
    bench.run(FULL.inputs(), None)
    assert [(finding.output, finding.what) for finding in bench.impure] == [("input pool", "was changed by the call")]
    other = bench_of(right.Gathered())
    other.run(FULL.inputs(), None)
    assert other.impure == []


def test_pool_in_place_must_be_the_one_that_was_given() -> None:
    with pytest.raises(AdapterFault) as fault:
        bench_of(pools.ReturnsACopy()).run(FULL.inputs(), None)
    assert fault.value.finding.output == "pool"
    assert "in_place=True" in fault.value.finding.what


def test_every_request_padding_is_blind_but_for_the_laws_of_padding() -> None:
    case = PoolCase((1, 1), padded="all", spare=1, free="random")
    for name, law in POOL_LAWS.items():
        example = Example(case, 0 if name == "requests" else None, law.variants[0] if law.variants else None)
        if name in ("fresh", "accept"):
            continue
        check = law.check(bench_of(base.Serving(), case), example)
        if name in ("untouched", "padding", "pure"):
            assert list(check), name
        else:
            with pytest.raises(Blind, match="every request is padding"):
                list(check)


# Every law has been seen to fail


KILLED_BY = {
    pools.DecodesWithoutBias: Kill("oracle", 4),
    pools.DecodesLinearGates: Kill("oracle", seeds=3),
    pools.DecodesFirstSpeed: Kill("oracle", 2),
    pools.DecodesKdaAsOneDecay: Kill("oracle", 4),
    pools.HalfStatesByHalf: Kill("oracle", shown=(0, 7)),
    pools.TransposesByCopy: Kill("oracle"),
    pools.IdleRequestsDecay: Kill("untouched", 1, 2, seeds=4, shown=(1, 25)),
    pools.OffsetsByIdentity: Kill("refill", 2, 2),
    pools.SlotsByIdentity: Kill("refill", 1, 2),
    pools.SlotsByAddress: Kill("history", 1, 13, shown=(0, 9)),
    pools.QueueAfterAnError: Kill("history", 2, 2, shown=(0, 7)),
    pools.TakesStatesOut: Kill("history", 2, 2),
    pools.StatesOfAllThreads: Kill("history", 1, 2),
    pools.TreesAsChains: Kill("oracle", 4),
    pools.TreesByTheNextRequest: Kill("oracle", 6, 2),
    pools.TokensSideBySide: Kill("strides", 4),
    pools.SlotsIn32Bits: Kill("strides", 1, 3),
    pools.PromptForgetsPrefix: Kill("oracle", 2, 1),
    pools.IgnoresBeginnings: Kill("fresh"),
    pools.BeginsByZeroTimes: Kill("fresh"),
    pools.SkipsWriteOfFour: Kill("accept", 4, 1),
    pools.KeepsTheWholeDraft: Kill("accept", 2, 1),
    pools.KeepsOneLess: Kill("accept", 3, 1),
    pools.KeepsOneOfNone: Kill("oracle", 2, 2),
    pools.RejectedDraftsStay: Kill("history", 4, 2, shown=(0, 8)),
    pools.CheckpointHalved: Kill("oracle", 65, shown=(0, 71)),
    pools.PaddingIsLast: Kill("untouched", 1, 2),
    pools.PaddingIsBefore: Kill("untouched", 0, 2),
    pools.PaddingIsFirst: Kill("padding", 1, 2),
    pools.ReadsVFirst: Kill("oracle", 1, 1),
    pools.WritesBf16: Kill("oracle", 1, 1),
    pools.StrideOfTwoBytes: Kill("oracle", 2, 2),
    pools.SlotInSevenBits: Kill("oracle", 1, 129),  # the case at a limit has no slots but those of requests
    pools.WritesNeighbour: Kill("untouched", 1, 13),
    pools.OneHeadOfOneRequest: Kill("oracle", 16, 3),
    pools.OverEight: Kill("oracle", 1, 9, shown=(0, 35)),
    pools.NeverWritesOne: Kill("oracle", 1, 1),
    pools.SumsPadding: Kill("padding", 1, 2, shown=(0, 11)),
    pools.PicksByProduct: Kill("poison", 1, 13),
    pools.NanChangesThePath: Kill("poison", 1, 2),
    pools.SlotsOfTheFirstCall: Kill("history", 8, 13),
    pools.LargeValuesChangeThePath: Kill("requests", 2, 2),
    pools.SlotsSideBySide: Kill("strides", 5, 2),
    pools.ClampsSlots: Kill("pure", 1, 2),
    pools.WritesBeforeG: Kill("pure", 0, 1),
    pools.OddSlots: Kill("slots", 0, 2),
    pools.UnwrittenScratch: Kill("memory", 1, 1),
    pools.ReturnsACopy: Kill("pure", 0, 1),
    pools.WholeBlocksOf32: Kill("blocks", 1, 1),
    pools.GridOfTheFirstLaunch: Kill("blocks", 1, 1),
}


@pytest.mark.parametrize(("name", "kill"), rows({wrong: (kill,) for wrong, kill in KILLED_BY.items()}))
@pytest.mark.slow
def test_law_alone_kills_animal_and_shows_a_small_case(name: str, kill: Kill, worker: Worker, tmp_path: pathlib.Path) -> None:
    assert_killed_alone(name, kill, worker, tmp_path)


def test_every_law_has_an_animal_that_it_kills_alone_and_every_animal_its_law() -> None:
    assert {kill.law for kill in KILLED_BY.values()} == set(POOL_LAWS)
    assert set(KILLED_BY) == {kind for kind in vars(pools).values() if isinstance(kind, type) and hasattr(kind, "letter")}


SEEN_BY_ONE_LAW = {
    pools.BeginsByZeroTimes: "fresh",
    pools.SumsPadding: "padding",
    pools.NanChangesThePath: "poison",
    pools.OddSlots: "slots",
    pools.UnwrittenScratch: "memory",
    pools.CheckpointHalved: "oracle",
    pools.GridOfTheFirstLaunch: "blocks",
}


@pytest.mark.parametrize("animal", SEEN_BY_ONE_LAW, ids=lambda animal: animal.__name__)
@pytest.mark.slow
def test_what_one_law_alone_sees_the_oracle_does_not(
    animal: type, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.mktemp("findings"))
    others = [name for name in ("oracle", "requests") if name != SEEN_BY_ONE_LAW[animal]]
    with Check(Settings(f"zoo/{animal.__name__}", others, Fewer("few", 4, large=False)), [worker], store, defects=[]) as check:
        assert {report.verdict for report in check.run()} == {Verdict.HOLDS}


@pytest.mark.parametrize(
    ("spec", "lacking"),
    [
        ("verify/zoo/base.py:Serving", UNTOLD),
        ("tests/right.py:Gathered", UNTOLD),
        ("tests/right.py:GatheredChunkwise", UNTOLD),
        ("zoo/InBlocks", {}),
    ],
)
@pytest.mark.slow
def test_right_implementation_holds_under_every_law(
    spec: str, lacking: dict[str, str], worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Check(
        Settings(spec, profile=Fewer("few", 2, large=False), seed=7), [worker], Store(tmp_path_factory.mktemp("findings"))
    ) as check:
        reports = check.run()
    assert {report.law: report.run or report.reason for report in reports if report.verdict is not Verdict.HOLDS} == lacking
    assert len(reports) == len(POOL_LAWS)


@pytest.mark.slow
def test_serving_loop_of_flas_kernel_holds(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    store, laws = Store(tmp_path_factory.mktemp("findings")), ["oracle", "untouched", "fresh", "accept", "padding"]
    with Check(Settings("fla/decode", laws, Profile("few", 2), 7), [worker], store) as check:
        reports = check.run()
    assert {report.law: report.run or report.reason for report in reports if report.verdict is not Verdict.HOLDS} == {}


# Blocks of value channels


class Told(base.Serving):
    """In blocks of 64 above the truth, in others below it, by a share of what a row may err; its states are true."""

    domain = PoolDomain(blocks=(8, 64))
    share = 0.0

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        limit = bounds(DECODE, x, None, self.algorithm)
        away = torch.nn.functional.normalize(torch.ones_like(limit["o"].value), dim=-1) * limit["o"].allowed.unsqueeze(-1)
        x.pool.copy_(limit["pool"].value)
        return (limit["o"].value + self.share * (1 if x.block_v == 64 else -1) * away).float(), x.pool


@for_each(("share", "seen"), [(0.45, set()), (0.55, {"blocks"}), (0.95, {"blocks"}), (1.05, {"blocks", "oracle"})])
def test_two_sizes_of_blocks_differ_by_a_bound_at_most(share: float, seen: set[str]) -> None:
    case = PoolCase((2, 1), packed=True, value_dim=24, state="random", gate="10", values="correlated")
    adapter = Told()
    adapter.share = share

    def broken(law: str) -> bool:
        pairs = POOL_LAWS[law].check(bench_of(adapter, case), Example(case))
        return bool(judge(pairs, lambda *place: str(place)).findings)

    assert {law for law in ("blocks", "oracle") if broken(law)} == seen


KERNEL = "fused_recurrent_gated_delta_rule_fwd_kernel"


class Kernel:
    """A kernel that notes its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.given: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda **arguments: self.given.append(arguments)


@for_each("size", BLOCK_SIZES)
@for_each("width", [1, 7, 8, 31, 32, 33, 64, 65, 200])
def test_launcher_changes_the_block_and_covers_every_channel_once(size: int, width: int) -> None:
    kernel, wrappers = Kernel(), min(8, 1 << (width - 1).bit_length())
    launcher = blocks.Launcher(kernel, size)
    launcher[(-(-width // wrappers) * 6,)](V=width, BV=wrappers, K=3, num_warps=1, num_stages=3)
    ((programs,),) = kernel.grids
    assert kernel.given == [{"V": width, "BV": size, "K": 3, "num_warps": 1, "num_stages": 3}]
    channels = [[program % (programs // 6) * size + lane for lane in range(size)] for program in range(programs)]
    assert sorted(channel for block in channels for channel in block if channel < width) == sorted([*range(width)] * 6)
    assert all(min(block) < width for block in channels)
    assert launcher.launches == 1


@pytest.mark.parametrize(("grid", "axis"), [((5,), 0), ((4, 6), 1)])
def test_launcher_refuses_a_grid_that_is_not_one_of_blocks(grid: tuple[int, ...], axis: int) -> None:
    with pytest.raises(RuntimeError, match=rf"axis {axis} of the grid must be blocks of 8 of 30 channels, got \("):
        blocks.Launcher(Kernel(), 32, axis)[grid](V=30, BV=8)


def test_launcher_changes_one_axis_of_the_grid() -> None:
    kernel = Kernel()
    blocks.Launcher(kernel, 32, 1)[1, 4, 6](V=30, BV=8)
    assert kernel.grids == [(1, 1, 6)]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module in the place of FLA's, which is not to be imported where it would compile."""
    module = types.ModuleType("fla.ops.gated_delta_rule.fused_recurrent")
    module.fused_recurrent_gated_delta_rule_fwd_kernel = Kernel()  # type: ignore[attr-defined]
    package = types.ModuleType("fla.ops.gated_delta_rule")
    package.fused_recurrent = module  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        stub = types.ModuleType(name)
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, stub)
    for stub in (package, module):
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    return module


def test_wrapper_has_its_own_kernel_again_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stand_in(monkeypatch)
    kernel = module.fused_recurrent_gated_delta_rule_fwd_kernel
    with blocks.in_blocks(module, KERNEL, None):
        assert module.fused_recurrent_gated_delta_rule_fwd_kernel is kernel
    with blocks.in_blocks(module, KERNEL, 32):
        module.fused_recurrent_gated_delta_rule_fwd_kernel[8,](V=32, BV=8)
    assert kernel.grids == [(2,)]
    with pytest.raises(ZeroDivisionError), blocks.in_blocks(module, KERNEL, 32):
        raise ZeroDivisionError
    assert module.fused_recurrent_gated_delta_rule_fwd_kernel is kernel


def test_two_threads_may_want_blocks_of_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stand_in(monkeypatch)
    kernel = module.fused_recurrent_gated_delta_rule_fwd_kernel

    def launch(size: int) -> None:
        for _ in range(20):
            with blocks.in_blocks(module, KERNEL, size):
                time.sleep(1e-3)  # in which the other thread would replace the kernel
                module.fused_recurrent_gated_delta_rule_fwd_kernel[8,](V=32, BV=8)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(launch, (16, 32)))
    assert collections.Counter(given["BV"] for given in kernel.given) == {16: 20, 32: 20}
    assert module.fused_recurrent_gated_delta_rule_fwd_kernel is kernel


def test_a_path_that_launches_nothing_in_blocks_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stand_in(monkeypatch)
    with pytest.raises(RuntimeError, match="nothing was launched in blocks of 16"), blocks.in_blocks(module, KERNEL, 16):
        pass


def test_first_tokens_makes_nothing_on_the_default_device() -> None:
    case = dataclasses.replace(FULL, padded="none", fresh="none")
    inputs = case.inputs()
    with torch.device("meta"):
        first = fla_decode.first_tokens(inputs, inputs.accepted)
    positions = [
        row for start, count in zip(case.starts(), case.accepted_counts, strict=False) for row in range(start, start + count)
    ]
    assert first.cu_seqlens.tolist() == [0, *itertools.accumulate(case.accepted_counts)]
    assert first.cu_seqlens.dtype == inputs.accepted.dtype
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(first[name], inputs[name][:, positions])


def test_serving_loop_gathers_and_scatters_on_the_device_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def rule(**arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments)
        return arguments["v"], arguments["initial_state"] + len(calls)

    module = stand_in(monkeypatch)
    module.fused_recurrent_gated_delta_rule = rule  # type: ignore[attr-defined]
    inputs = FULL.inputs()
    want = inputs.pool.clone()
    for slot, real, begins in zip(FULL.slot_of, FULL.real, FULL.beginning, strict=True):
        if real:
            want[slot] = (0 if begins else want[slot]) + 2  # the second call is of what is kept
    with torch.device("meta"):
        o, pool = fla_decode.Decode().run(inputs)
    assert pool is inputs.pool
    assert torch.equal(bits(pool), bits(want))
    assert o is calls[0]["v"]
    assert [call["v"].shape[1] for call in calls] == [FULL.tokens, sum(FULL.accepted_counts)]


class GridRoundedDown(fla_decode.DecodeBlocks):
    """FLA's kernel in the grid of V // 32 blocks where it is launched in those."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        counted = blocks._blocks
        blocks._blocks = lambda width, size: width // 32 if size == 32 else counted(width, size)
        try:
            return super().run(x)
        finally:
            blocks._blocks = counted


@pytest.mark.parametrize(
    ("spec", "broken"),
    [("fla/decode_blocks", set()), ("tests/laws/test_pools.py:GridRoundedDown", {"o in blocks of 32", "pool in blocks of 32"})],
)
@pytest.mark.slow
def test_kernel_is_right_in_every_block_and_is_launched_in_it(spec: str, broken: set[str], worker: Worker) -> None:
    line = "op=decode lengths=2+1+3 packed=yes value_heads=2 key_dim=8 value_dim=40 dtype=bf16 state=random gate=64"
    answer = worker.ask(RunOne(f"law=blocks adapter={spec} {line}"))
    outcome = Outcome.from_json(answer)
    assert outcome.verdict is (Verdict.BROKEN if broken else Verdict.HOLDS), outcome
    assert {finding.output for finding in outcome.findings} == broken
    assert outcome.rows == 6 * (6 * 2 + 3 * 2 * 8)


# Shrinking


def test_shrunk_case_is_simple_but_for_what_fails() -> None:
    law = POOL_LAWS["oracle"]

    def small(fails: Any) -> str:
        shrunk = shrink(Example(FULL), law, lambda example: fails(example.case), lambda runs: runs < 200)
        assert shrunk.finished
        return str(shrunk.example.case)

    assert small(lambda case: True) == "op=decode lengths=0 key_dim=1 value_dim=1"
    assert small(lambda case: case.spare > 1) == "op=decode lengths=0 key_dim=1 value_dim=1 spare=2"
    assert small(lambda case: case.free == "nan" and case.padding_slot == "0") == (
        "op=decode lengths=0 key_dim=1 value_dim=1 free=nan padding_slot=0"
    )
    assert small(lambda case: case.accepted == "some") == "op=decode lengths=2 key_dim=1 value_dim=1 accepted=some"
    assert small(lambda case: case.padded == "some") == "op=decode lengths=0+0 key_dim=1 value_dim=1 padded=some"
    assert small(lambda case: any(case.beginning)) == "op=decode lengths=0 key_dim=1 value_dim=1 fresh=all"


@pytest.mark.parametrize(
    ("name", "verdict"), [("Captured", Verdict.HOLDS), ("SlotsOfTheFirstStep", Verdict.BROKEN), ("SlotsOnTheHost", Verdict.HOLDS)]
)
@pytest.mark.slow
def test_without_a_gpu_tensors_are_filled_again_and_no_graph_is_captured(
    name: str, verdict: Verdict, worker: Worker, tmp_path: pathlib.Path
) -> None:
    settings = Settings(f"tests/right.py:{name}", ["refill"], Profile("short", 8, large=False))
    with unexplained(), Check(settings, [worker], Store(tmp_path)) as check:
        (report,) = check.run()
    assert report.verdict is verdict, report
