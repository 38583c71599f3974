"""Cases of traces: lines, plans, numbers, the oracle of their rows, and domains."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import conv, gates
from oracles.operation import Inputs
from oracles.rule import gated_delta
from oracles.serving import SERVING
from oracles.tolerance import bound
from properties.books import book_for
from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.drawing import trace_cases
from properties.traces.events import name_of, number_of
from properties.traces.laws import TRACE_LAWS
from tests.laws.test_traces import FULL, outcome
from tests.together import for_each
from verify.adapters.gdn.pool import PoolEngine
from verify.engine.drawing import seeded


def drawn(count: int, domain: TraceDomain = TraceDomain(), seed: int = 3, **fixed: Any) -> list[TraceCase]:  # noqa: B008
    cases: list[TraceCase] = []
    seeded(trace_cases(domain, **fixed), seed, count, cases.append)
    return cases


# Lines and plans


def test_a_line_is_the_same_case_again() -> None:
    assert TraceCase.parse(str(FULL)) == FULL
    assert str(TraceCase("p:a1")) == "op=serving trace=p:a1"
    for case in drawn(60):
        assert TraceCase.parse(str(case)) == case


def test_the_plan_of_the_documented_trace() -> None:
    plan = [
        (
            step.text,
            [(row.request, row.start, row.count, row.accepted, row.begins, row.snapshot) for row in step.rows],
            step.requests,
        )
        for step in FULL.plan
    ]
    assert plan == [
        ("p:a5,b70,_3", [("a", 0, 5, 5, True, None), ("b", 0, 70, 70, True, 64), ("_", 0, 3, 3, False, None)], ("a", "b")),
        ("d:a,_", [("a", 5, 1, 1, False, None), ("_", 0, 1, 0, False, None)], ("a",)),
        ("v4:a2,b1", [("a", 6, 4, 2, False, None), ("b", 70, 4, 1, False, None)], ("a", "b")),
        ("k:c<b@", [], ("c",)),
        ("w:a", [], ("a",)),
        ("f:a", [], ("a",)),
        ("p:d3,c1", [("d", 0, 3, 3, True, None), ("c", 64, 1, 1, False, None)], ("d", "c")),
    ]


def test_names_of_two_letters_follow_those_of_one() -> None:
    assert [name_of(number) for number in (0, 25, 26, 51, 52, 701)] == ["a", "z", "aa", "az", "ba", "zz"]
    assert [number_of(name_of(number)) for number in range(702)] == [*range(702)]
    case = TraceCase("p:a5,aa3,_2/d:aa,a/v4:aa2,a1/v:a0:2,ba1:1,aa2:4/s:aa/k:ba<aa@/w:ba/t:ba/r:a/f:aa", slots=4)
    assert TraceCase.parse(str(case)) == case
    found = [(step.text, [(row.request, row.start, row.count, row.accepted) for row in step.rows]) for step in case.plan]
    assert found[1:4] == [
        ("d:aa,a", [("aa", 3, 1, 1), ("a", 5, 1, 1)]),
        ("v4:aa2,a1", [("aa", 4, 4, 2), ("a", 6, 4, 1)]),
        ("v:a0:2,ba1:1,aa2:4", [("a", 7, 2, 0), ("aa", 6, 4, 2)]),
    ]
    assert [step.request for step in case.plan[5:]] == ["ba", "ba", "ba", "a", "aa"]
    laws = ("ledger", "session", "slots", "alone", "renamed")
    assert {outcome(law, case, PoolEngine) for law in laws} == {"holds"}
    assert TRACE_LAWS["tags"].lacks(case, None) == "requests a to z"
    assert TRACE_LAWS["tags"].lacks(TraceCase("p:a5,z3/d:z"), None) is None
    one, other = (TraceCase(f"p:{name}2", slots=1) for name in ("b", "ba"))
    assert not torch.equal(*(x.row(x.plan[0], 0)[0] for x in (one, other))), "each name has numbers of its own"


def test_a_snapshot_of_a_request_of_two_letters_is_named_whole() -> None:
    class Loses(PoolEngine):
        def fork(self, new: str, old: str, *, snapshot: bool) -> None:
            super().fork(new, old, snapshot=snapshot)
            self.give(self.owned.pop(f"{old}@"))

    case = TraceCase("p:aa5/s:aa/k:b<aa@/d:b", slots=4)
    assert outcome("session", case, Loses).startswith("an owner has no slot: request aa's snapshot after event 3")


def test_slots_over_those_of_a_domain_are_outside() -> None:
    domain = TraceDomain(most_slots=26)
    assert domain.outside(TraceCase("p:a1", slots=26)) is None
    assert domain.outside(TraceCase("p:a1", slots=27)) == "slots=27: more than 26 slots are not supported"


@for_each(
    ("trace", "texts"),
    [
        ("d:a/v2:a1/w:a/f:a/k:b<a/p:_3", []),  # nobody is there
        ("p:a1,b1,c1,d1/d:d", ["p:a1,b1,c1,d1"]),  # no slot is left for d
        ("p:a1,b1,c1/k:d<a/f:b/k:d<a", ["p:a1,b1,c1", "f:b", "k:d<a"]),
        ("p:a1/k:b<a@/k:a<a", None),
        ("p:a0/d:a", []),  # a request begins with a token
        ("p:a2/p:a0/d:a", ["p:a2", "d:a"]),
    ],
)
def test_events_that_cannot_happen_do_nothing(trace: str, texts: list[str] | None) -> None:
    if texts is None:
        with pytest.raises(ValueError, match="a fork must be NEW<OLD"):
            TraceCase(trace)
    else:
        assert [step.text for step in TraceCase(trace).plan] == texts


def test_drafts_may_have_numbers_of_tokens_of_their_own() -> None:
    case = TraceCase("p:a5,b3,c2/v:a2:4,b0:3,c1:1,_:2,d1:2/d:a,b,c")
    plan = [[(row.request, row.start, row.count, row.accepted) for row in step.rows] for step in case.plan[1:]]
    assert plan == [
        [("a", 5, 4, 2), ("b", 3, 3, 0), ("c", 2, 1, 1), ("_", 0, 2, 0)],
        [("a", 7, 1, 1), ("b", 3, 1, 1), ("c", 3, 1, 1)],
    ]
    assert case.drafts == 4
    assert case.batch(case.plan[1]).lengths == (4, 3, 1, 2)
    same = (TraceCase("p:a5,b3/v:a2:4,b1:4/d:a"), TraceCase("p:a5,b3/v4:a2,b1/d:a"))
    assert same[0].plan[1].rows == same[1].plan[1].rows
    assert all(torch.equal(*pair) for place in (0, 1) for pair in zip(*(x.row(x.plan[1], place) for x in same), strict=True))


def test_a_draft_of_which_nothing_is_accepted_leaves_its_request_as_it_is() -> None:
    class Rounds(PoolEngine):
        def commit(self, accepted: Sequence[int]) -> None:
            super().commit(accepted)
            for row, count in zip(self.drafted, accepted, strict=True):
                self.states[row.slot] *= 1 + (count == 0) * 2**-20

    case = TraceCase("p:a5,b3/v:a0:4,b1:2/d:a,b", slots=2)
    assert {outcome(law, case, PoolEngine) for law in ("tags", "ledger", "session", "alone", "slots")} == {"holds"}
    assert outcome("dropped", case, PoolEngine, "drafts") == "holds"
    assert outcome("ledger", case, Rounds) == (
        "state of a, of whose draft nothing is accepted in event 2: differs, but must be equal to the bit"
    )


def test_a_decode_takes_snapshots_and_a_preempted_request_begins_again() -> None:
    case = TraceCase("p:a5,b2/s:a,_,b/d:a/k:c<a@/r:a/d:a/p:a3/s:c", slots=4)
    plan = [(step.text, [(row.request, row.start, row.begins, row.snapshot) for row in step.rows]) for step in case.plan]
    assert plan == [
        ("p:a5,b2", [("a", 0, True, None), ("b", 0, True, None)]),
        ("s:a,_,b", [("a", 5, False, 1), ("_", 0, False, None), ("b", 2, False, 1)]),
        ("d:a", [("a", 6, False, None)]),
        ("r:a", []),
        ("p:a3", [("a", 0, True, None)]),
    ]
    assert TraceCase("p:a5,b2/s:b,a", slots=3).plan[1].rows[1].snapshot is None  # the last slot is b's snapshot's
    assert [step.text for step in TraceCase("p:a5/s:a/k:c<a@/r:a/k:d<a@/s:c", slots=3).plan] == [
        "p:a5",
        "s:a",
        "k:c<a@",
        "r:a",
        "s:c",
    ]
    again, once = TraceCase("p:a5/r:a/p:a5"), TraceCase("p:a5")
    assert torch.equal(again.row(again.plan[2], 0)[0], once.row(once.plan[0], 0)[0])


def test_a_snapshot_needs_a_slot_and_is_taken_at_the_last_chunk_of_the_row() -> None:
    taken = {
        (row.request, row.snapshot)
        for step in TraceCase("p:a16,b33,c5/p:b40", slots=4, snapshots=16).plan
        for row in step.rows
        if row.snapshot is not None
    }
    assert taken == {("a", 16)}  # three requests and one snapshot have four slots
    more = TraceCase("p:a16,b33,c5/p:b40/f:a", slots=5, snapshots=16).plan
    assert [row.snapshot for step in more for row in step.rows] == [16, 32, None, 32]


def test_snapshots_may_be_aligned_to_requests() -> None:
    def taken(aligned: str) -> list[int | None]:
        case = TraceCase("p:a62/p:a1/p:a3,b70/p:a64,b1", slots=4, snapshots=64, aligned=aligned)
        return [row.snapshot for step in case.plan for row in step.rows]

    assert taken("row") == [None, None, None, 64, 64, None]
    assert taken("request") == [None, None, 1, 64, 62, None]
    case = TraceCase("p:a62/p:a3/k:b<a@/d:a,b", slots=3, snapshots=64, aligned="request")
    assert {outcome(law, case, PoolEngine) for law in ("tags", "ledger", "session", "slots")} == {"holds"}


def test_a_transfer_over_three_ranks_keeps_the_order_of_heads() -> None:
    for heads, value_heads in ((2, 4), (3, 3), (3, 6)):
        case = TraceCase("p:a5/t:a/d:a", slots=1, heads=heads, value_heads=value_heads, key_dim=4, value_dim=4)
        assert {outcome(law, case, PoolEngine) for law in ("tags", "ledger", "session", "slots")} == {"holds"}


REFUSED = {
    "trace=x:a1": "an event of a trace must begin with p:, d:, s:, v:, v1: to v8:, k:, w:, t:, r: or f:, got 'x:a1'",
    "trace=p:a1/": "an event of a trace must begin with p:, d:, s:, v:, v1: to v8:, k:, w:, t:, r: or f:, got ''",
    "trace=s:a1": "a row of a decode must be a request a to zz or _, got 'a1' in 's:a1'",
    "trace=r:a,b": "r: takes one request, got 'r:a,b'",
    "trace=p:A1": "a row of a prefill must be a request and 0 to 256 tokens, got 'A1'",
    "trace=p:a999": "a row of a prefill must be a request and 0 to 256 tokens, got 'a999'",
    "trace=p:a01": "a row of a prefill must be a request and 0 to 256 tokens, got 'a01'",
    "trace=d:a1": "a row of a decode must be a request a to zz or _, got 'a1'",
    "trace=v9:a1": "a draft must have 1 to 8 tokens, got 'v9:a1'",
    "trace=v2:a3": "a row of v2 must be a request and 1 to 2 accepted tokens, or _, got 'a3'",
    "trace=v2:a0": "a row of v2 must be a request and 1 to 2 accepted tokens, or _, got 'a0'",
    "trace=v:a2": "a row of v: must be such as a2:4, of 1 to 8 tokens, or _:4, got 'a2'",
    "trace=v:a3:2": "a row of v: must be such as a2:4, of 1 to 8 tokens, or _:4, got 'a3:2'",
    "trace=v:a1:9": "a row of v: must be such as a2:4, of 1 to 8 tokens, or _:4, got 'a1:9'",
    "trace=v:a0:0": "a row of v: must be such as a2:4, of 1 to 8 tokens, or _:4, got 'a0:0'",
    "trace=v:_1:2": "a row of v: must be such as a2:4, of 1 to 8 tokens, or _:4, got '_1:2'",
    "trace=v:a1:2,a1:1": "an event must name a request once, got 'v:a1:2,a1:1'",
    "trace=k:a<a": "a fork must be NEW<OLD or NEW<OLD@ of two requests a to zz, got 'a<a'",
    "trace=w:a,b": "w: takes one request, got 'w:a,b'",
    "trace=f:abc": "f: takes requests a to zz, got 'abc' in 'f:abc'",
    "trace=d:a,a": "an event must name a request once, got 'd:a,a'",
    f"trace={'/'.join(['d:a'] * 1001)}": "trace must have at most 1000 events, got 1001",
    f"trace=p:a1/d:{','.join('_' * 513)}": "an event of trace must have at most 512 rows, got 513 in 'd:_,",
    f"trace={'/'.join(['p:' + ','.join(['_256'] * 64)] * 2)}": "trace must have at most 16384 tokens in all, got 32768",
    "trace=p:a1 slots=0": "slots must be in 1..512, got 0",
    "trace=p:a1 heads=2 value_heads=3": "value_heads must be a multiple of heads 2, got 3",
    "trace=p:a1 pad=1": "pad must be one of -1, 0, got '1'",
    "slots=3": "a case line must have trace, for example trace=p:a5,b70/d:a,b",
    "trace=p:a1 lengths=3": "unknown word 'lengths' in the case line",
}


@for_each("line", REFUSED)
def test_a_wrong_line_is_refused_with_the_word_its_value_and_the_rule(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(REFUSED[line])) as caught:
        TraceCase.parse(line)
    assert "\n" not in str(caught.value)


def test_every_part_of_a_trace_is_a_trace() -> None:
    smaller = book_for("tags", "serving").smaller
    for case in drawn(12):
        for shape in smaller.shapes[:4]:
            for words, change in shape(case):
                part = dataclasses.replace(case, **change)
                assert len(part.plan) <= len(part.trace.split("/")), words
                for step in part.plan:
                    assert all(row.start >= 0 and 0 <= row.accepted <= row.count for row in step.rows), words


# Numbers


def test_the_numbers_of_a_line_are_the_same_everywhere() -> None:
    digest = hashlib.sha256()
    for step in FULL.plan:
        if step.rows:
            batch = FULL.batch(step)
            for x in (batch.mixed, batch.a, batch.b):
                digest.update(x.float().contiguous().numpy().tobytes())
    sizes = dataclasses.replace(FULL, gate="10").sizes()
    for x in (sizes.weight, sizes.A_log, sizes.dt_bias, FULL.filled(torch.zeros(2, 3, 4)).view(torch.int32)):
        digest.update(x.float().contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "98e5695aa701388e"


def test_a_token_has_its_own_numbers_wherever_it_stands() -> None:
    one, two = TraceCase("p:a5,b3/d:a", seed=5), TraceCase("p:_2,b3/p:a2/v4:a3/d:a", seed=5)
    first = torch.cat([one.row(one.plan[0], 0)[0], one.row(one.plan[1], 0)[0]])
    second = torch.cat([two.row(two.plan[1], 0)[0], two.row(two.plan[2], 0)[0][:3], two.row(two.plan[3], 0)[0]])
    assert torch.equal(first, second)
    rejected = two.row(two.plan[2], 0)[0][3]
    assert not (rejected == first).all(-1).any()
    assert not torch.equal(rejected, two.row(two.plan[2], 0, other=1)[0][3])
    assert torch.equal(two.row(two.plan[0], 1)[0], one.row(one.plan[0], 1)[0])


def test_free_slots_hold_what_the_case_says() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pool = torch.ones(3, 8, 8, dtype=dtype)
        nan = TraceCase("p:a1", free="nan").filled(pool)
        assert nan.dtype == dtype
        assert bool(nan.isnan().all())
        assert len(nan.view(torch.int16).unique()) > 16
        assert float(TraceCase("p:a1", free="random").filled(pool).float().abs().max()) <= 8
        assert not TraceCase("p:a1").filled(pool).any()
        assert bool(TraceCase("p:a1").filled(pool, other=1).any())


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tags_pass_through_silu_and_half_precision_and_name_their_token(dtype: torch.dtype) -> None:
    named = {
        ("tokens", 1, 0): "the tag of request b's token 0",
        ("tokens", 25, 4711): "the tag of request z's token 4711",
        ("rejected", 0, 4 * 256 + 2): "the tag of request a's rejected draft 2 in event 4",
        ("padding", 31, 513): "the tag of a padding row's token 1 in event 31",
    }
    for owner, words in named.items():
        tag = torch.tensor(TraceCase.tag(*owner))
        assert torch.equal(torch.nn.functional.silu(tag.to(dtype).float()).to(dtype).float(), tag)
        assert TraceCase.untag(tag.tolist()) == words
    heads = TraceCase("p:a1", heads=1, value_heads=3, value_dim=6).repeated(TraceCase.tag("tokens", 1, 7))
    assert heads.shape == (3, 6)
    assert TraceCase.untag(heads[2, :4].tolist()) == "the tag of request b's token 7 for head 2"
    assert TraceCase.untag([0.0] * 4) == "zeros"
    assert TraceCase.untag([float("nan"), 20.0, 20.0, 20.0]).startswith("no tag (nan")
    assert TraceCase.untag([20.5, 20.0, 20.0, 20.0]).startswith("no tag (20.5")


# The oracle


def test_the_oracle_is_the_definition_of_its_parts_one_token_at_a_time() -> None:
    heads, value_heads, key_dim, value_dim, width = 1, 2, 4, 3, 3
    channels, lengths = 2 * heads * key_dim + value_heads * value_dim, [3, 0, 2]
    numbers = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64)

    x = Inputs(
        mixed=rand(1, 5, channels), a=rand(1, 5, value_heads), b=rand(1, 5, value_heads), A_log=rand(value_heads),
        dt_bias=rand(value_heads), weight=rand(channels, width), state=rand(3, value_heads, key_dim, value_dim),
        window=rand(3, channels, width - 1), cu_seqlens=torch.tensor([0, 3, 3, 5]), heads=heads,
    )  # fmt: skip
    got = bound.truth(SERVING, x)
    start = 0
    for row, length in enumerate(lengths):
        span = slice(start, start + length)
        y, window = conv.definition(x.mixed[0, span], conv.with_oldest(x.window[row]), x.weight, None, "silu")
        q, k, v = y.split([key_dim, key_dim, value_heads * value_dim], -1)
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        for head in range(value_heads):
            g = -x.A_log[head].exp() * gates.softplus(x.a[0, span, head] + x.dt_bias[head])
            beta = gates.sigmoid(x.b[0, span, head])
            values = v.unflatten(-1, (value_heads, -1))[:, head]
            o, state = gated_delta.definition(q, k, values, g, beta, x.state[row, head], key_dim**-0.5)
            torch.testing.assert_close(got["o"][0, span, head], o, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(got["final_state"][row, head], state, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got["final_window"][row], conv.without_oldest(window), rtol=0, atol=0)
        start += length


@for_each(
    ("change", "message"),
    [
        ({"heads": 3}, "heads must be a whole number that divides HV = 2, got 3"),
        ({"heads": None}, "heads must be a whole number that divides HV = 2, got None"),
        ({"weight": torch.zeros(4, 3)}, "weight must have D = 12 like mixed"),
        ({"window": torch.zeros(1, 12, 3)}, "window must have W - 1 = 2 columns, got 3"),
        ({"state": torch.zeros(1, 2, 5, 2)}, "D must be 2 H K + HV V = 14, got 12"),
        ({"window": torch.zeros(2, 12, 2)}, "window must have N = 1"),
    ],
)
def test_the_oracle_refuses_illegal_rows(change: dict[str, Any], message: str) -> None:
    x = Inputs(
        mixed=torch.zeros(1, 2, 12), a=torch.zeros(1, 2, 2), b=torch.zeros(1, 2, 2), A_log=torch.zeros(2), dt_bias=torch.zeros(2),
        weight=torch.zeros(12, 3), state=torch.zeros(1, 2, 4, 2), window=torch.zeros(1, 12, 2), cu_seqlens=None, heads=1,
    )  # fmt: skip
    SERVING.check(x)
    with pytest.raises(ValueError, match=re.escape(message)):
        SERVING.check(x.replaced(**change))


# Domains


@pytest.mark.slow
def test_drawn_traces_lie_in_the_domain_and_reuse_slots() -> None:
    domains = [
        TraceDomain(),
        TraceDomain(padding_slots=(), events=("prefill", "decode", "free"), empty=False, snapshots=(0,), most_tokens=5),
        TraceDomain(later_prompts=False, snapshots=(0, 16)),
        TraceDomain(ragged=False, most_drafts=4),
        TraceDomain(none_accepted=False, most_drafts=4),
        TraceDomain(mixed=False),
        TraceDomain(block=1056, most_tokens=64, later_prompts=False),
        TraceDomain(prefill_padding=False, widths=(4,), most_drafts=2, grouped_heads=False, key_dims=(8, 8), value_dims=(24, 24)),
    ]
    for domain in domains:
        cases = drawn(40, domain)
        assert [domain.outside(case) for case in cases] == [None] * len(cases)
        assert TraceDomain.from_json(domain.to_json()) == domain
        for case in cases:
            begun = sum(row.begins for step in case.plan for row in step.rows) + sum(step.kind == "k" for step in case.plan)
            assert begun > case.slots or len(case.trace.split("/")) >= 13, case.trace


@pytest.mark.slow
def test_traces_of_narrow_domains_lie_in_them_too() -> None:
    """Where a prompt has one token a step, a prompt that ends at a snapshot would have too many parts."""
    for domain in (
        TraceDomain(alignments=("request",)),
        TraceDomain(most_tokens=1, later_prompts=False, block=16),
        TraceDomain(most_tokens=2, block=32, alignments=("request",)),
    ):
        cases = drawn(300, domain)
        assert [domain.outside(case) for case in cases] == [None] * len(cases)


@pytest.mark.slow
def test_drawn_traces_have_every_event_and_length() -> None:
    cases = drawn(200)
    mixed = [step.rows for case in cases for step in case.plan if step.kind == "p" and any(row.count > 1 for row in step.rows)]
    mixed = [rows for rows in mixed if any(row.real and row.start and row.count == 1 for row in rows)]
    assert sum(any(row.snapshot is not None for row in rows) for rows in mixed) > 8, "snapshots in steps of continuous batching"
    ragged = [step.rows for case in cases for step in case.plan if step.kind == "v" and len({row.count for row in step.rows}) > 1]
    assert any({1, 2} <= {row.count for row in rows} for rows in ragged), "a plain decode beside drafts"
    assert any(row.real and not row.accepted for rows in ragged for row in rows)
    rows = [(step.kind, row) for case in cases for step in case.plan for row in step.rows]
    assert {step.kind for case in cases for step in case.plan} == set("pdsvkwtrf")
    assert {1, 2, 3, 63, 64, 65, 66, 128, 130} <= {row.count for kind, row in rows if kind == "p"}
    assert {row.count for kind, row in rows if kind == "v"} >= {1, 2, 3, 4, 5, 8}
    assert any(kind == "p" and row.count == 0 for kind, row in rows)
    assert any(kind == "v" and row.real and row.accepted < row.count for kind, row in rows)
    assert any(kind == "p" and row.real and row.start for kind, row in rows)
    assert {case.slots for case in cases} == {3, 4, 5, 6}
    ends = [row.start + row.accepted for kind, row in rows if kind == "v" and row.real]
    assert {63, 64, 65} <= {*ends}, "drafts that end just below, at and just over the end of a block"
    first = [step.rows[0].real for case in cases for step in case.plan if len(step.rows) > 1 and not all(r.real for r in step.rows)]
    assert {True, False} == set(first)  # padding stands before and behind
    assert any(stale_tail(case) for case in cases)


def stale_tail(case: TraceCase) -> bool:
    """Whether a decode has padding rows behind its requests where the decode before it had a request."""
    before: Sequence[bool] = ()
    for step in case.plan:
        if step.kind in "ds":
            real = [row.real for row in step.rows]
            last = max(place for place, found in enumerate(real) if found)
            if any(before[last + 1 : len(real)]):
                return True
            before = real
    return False


OUTSIDE = {
    "trace=p:a1/w:a": ({"events": ("prefill",)}, "w:a: swap is not supported"),
    "trace=p:a9": ({"most_tokens": 8}, "more than 8 tokens a row are not supported, got 9"),
    "trace=p:a1/v3:a1": ({"most_drafts": 2}, "more than 2 tokens a draft are not supported, got 3"),
    "trace=p:a1,b1/v:a1:1,b1:2": (
        {"ragged": False},
        "v:a1:1,b1:2: drafts of different numbers of tokens are not supported",
    ),
    "trace=p:a1,b1/v:a0:2,b1:2": (
        {"none_accepted": False},
        "v:a0:2,b1:2: a draft of which nothing is accepted is not supported",
    ),
    "trace=p:a1/p:b2,a1": (
        {"mixed": False},
        "p:b2,a1: prompts beside one token of a request that goes on are not supported",
    ),
    "trace=p:a1/d:a,_": ({"padding_slots": ("0",)}, "pad=-1 is not among 0"),
    "trace=p:a1/d:a,_,_,_": ({"most_padding": 2}, "more than 2 padding rows in an event are not supported, got 3"),
    "trace=p:a1,_2": ({"prefill_padding": False}, "padding rows in a prefill are not supported"),
    "trace=p:a1/p:a0,b1": ({"empty": False}, "rows of no tokens are not supported"),
    "trace=p:a1/d:a/p:a2": ({"later_prompts": False}, "p:a2: several tokens of a prompt after a decode are not supported"),
    "trace=p:a5/v4:a2/k:b<a/f:a/p:b3": (
        {"later_prompts": False},
        "p:b3: several tokens of a prompt after a decode are not supported",
    ),
    "trace=p:a1 snapshots=64": ({"snapshots": (0,)}, "snapshots=64 is not among 0"),
    "trace=p:a1 snapshots=64 aligned=request": ({"alignments": ("row",)}, "aligned=request is not among row"),
    "trace=p:a1 dtype=fp16": ({"dtypes": ("bf16",)}, "dtype=fp16 is not among bf16"),
    "trace=p:a1 state=bf16": ({"states": ("fp32",)}, "state=bf16 is not among fp32"),
    "trace=p:a1 width=3": ({"widths": (4,)}, "width=3 is not among 4"),
    "trace=p:a1 key_dim=24": ({"width_step": 16}, "key_dim=24 is not in 4..128"),
    "trace=p:a1 value_heads=2": ({"grouped_heads": False}, "heads=1 with value_heads=2"),
}


@for_each("line", OUTSIDE)
def test_a_case_outside_the_domain_is_unsupported_with_the_reason(line: str) -> None:
    fields, reason = OUTSIDE[line]
    assert TraceDomain(**fields).outside(TraceCase.parse(line)) == reason


@for_each(
    ("fields", "message"),
    [
        ({"operation": "decode"}, "operation must be serving, got 'decode'"),
        ({"events": ("decode",)}, "events must have prefill, which admits requests, got ('decode',)"),
        (
            {"events": ("prefill", "steal")},
            "events must be a tuple of some of prefill, decode, save, verify, fork, swap, transfer, preempt, free",
        ),
        ({"states": ()}, "states must be a tuple of some of fp32, bf16, fp16, got ()"),
        ({"snapshot_dtype": "fp8"}, "snapshot_dtype must be state or input, got 'fp8'"),
        ({"block": 1057}, "block must be in 0..1056, got 1057"),
        ({"most_drafts": 9}, "most_drafts must be in 1..8, got 9"),
        ({"most_padding": 0}, "most_padding must be in 1..512, got 0"),
        ({"most_slots": 5}, "most_slots must be in 6..512, got 5"),
        ({"key_dims": (5, 7), "width_step": 8}, "key_dims must contain a width in steps of 8, from 1 to 256, got (5, 7)"),
        ({"value_dims": 8}, "value_dims must be a tuple (least, most), got 8"),
        ({"width_step": 0}, "width_step must be at least 1, got 0"),
    ],
)
def test_a_wrong_domain_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TraceDomain(**fields)
