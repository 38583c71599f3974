"""Shrinking finds the smallest case that fails, in few runs, and says truly which neighbours hold."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from properties.books import BOOKS, book_for
from properties.calls.case import CallCase
from properties.laws.law import Law
from properties.paths.case import ParallelCase
from properties.rules.case import IN_KERNEL, Case
from properties.rules.domain import Domain
from properties.rules.laws import LAWS
from properties.rules.smaller import SMALLER_RULES
from properties.traces.case import TraceCase
from properties.traces.events import name_of
from properties.words.domain import VIEWS
from properties.words.example import Example
from properties.words.smaller import Smaller, shorter_sequences
from tests.together import for_each
from verify.engine.drawing import seeded
from verify.engine.explaining import SHRINK_RUNS
from verify.engine.shrink import Shrunk, one_step, shrink, similar
from verify.execution.line import Run

BIG = Case(
    (130, 0, 65, 17), packed=True, heads=2, value_heads=8, key_dim=64, value_dim=128, dtype="bf16", gate="saturated",
    beta="edges", values="correlated", state="random", scale="half", qk_norm=True, offsets="int32", gate_dtype="input",
    seed=12345,
)  # fmt: skip
ORACLE = LAWS["oracle"]
Fails = Callable[[Example], bool | None]


class Log:
    """A predicate that keeps the examples it has seen."""

    def __init__(self, fails: Fails) -> None:
        self.fails, self.tried = fails, dict[Example, bool | None]()

    def __call__(self, example: Example) -> bool | None:
        assert example not in self.tried, f"tried twice: {example}"
        self.tried[example] = self.fails(example)
        return self.tried[example]


def small(fails: Fails, example: Example | Case = BIG, law: Law = ORACLE, most: int = SHRINK_RUNS) -> tuple[Shrunk, Log]:
    """The shrunk example, after checks that hold for every predicate."""
    example = Example(example) if isinstance(example, Case) else example
    log = Log(fails)
    shrunk = shrink(example, law, log, lambda runs: runs < most)
    assert shrunk.example == example or log.tried[shrunk.example] is True
    assert shrunk.runs == len(log.tried) <= most
    for tried in log.tried:
        law.accept(tried)
        assert Case.parse(str(tried.case)) == tried.case
    return shrunk, log


@for_each(
    ("fails", "line"),
    [
        (lambda e: True, "lengths=0"),
        (lambda e: e.case.tokens > 0, "lengths=1"),
        (lambda e: e.case.tokens > 64, "lengths=65"),
        (lambda e: max(e.case.lengths) > 64, "lengths=65"),
        (lambda e: e.case.tokens >= 127, "lengths=127"),
        (lambda e: len(e.case.lengths) > 1 and e.case.lengths[-1] > 0, "lengths=0+1 packed=yes"),
        (lambda e: e.case.packed and len(e.case.lengths) > 1 and e.case.lengths[-1] > 3, "lengths=0+4 packed=yes"),
        (lambda e: 0 in e.case.lengths[1:-1], "lengths=0+0+0"),
        (lambda e: e.case.value_heads > e.case.heads, "lengths=0 value_heads=2"),
        (lambda e: e.case.heads > 1 and e.case.value_heads > e.case.heads, "lengths=0 heads=2 value_heads=4"),
        (lambda e: e.case.value_dim > 32, "lengths=0 value_dim=64"),
        (lambda e: e.case.value_dim > 64, "lengths=0 value_dim=128"),
        (lambda e: e.case.key_dim != e.case.value_dim, None),
        (lambda e: e.case.dtype == "bf16" and e.case.qk_norm, "lengths=0 dtype=bf16 qk_norm=yes"),
        (lambda e: e.case.gate == "saturated" and e.case.tokens > 1, "lengths=2 gate=saturated"),
        (lambda e: e.case.gate != "forever", "lengths=0 gate=1000"),
        (lambda e: e.case.state != "none", "lengths=0 state=zero"),
        (lambda e: e.case.offsets == "int32", "lengths=0 packed=yes offsets=int32"),
        (lambda e: e.case.seed != 0, "lengths=0 seed=12345"),
        (lambda e: e.case.backward, "lengths=0 backward=yes"),
    ],
)
def test_exact_boundary_is_found_and_all_else_is_simple(fails: Fails, line: str | None) -> None:
    assert fails(Example(BIG)), "the predicate must fail where it starts"
    shrunk, _ = small(fails)
    assert shrunk.finished
    assert shrunk.runs < 60
    case, simplest = shrunk.example.case, Case((0,), key_dim=1, value_dim=1, backward=False)
    if line is None:
        assert {case.key_dim, case.value_dim} == {1, 2}
        return
    words = dict(word.split("=") for word in line.split())
    want = {**simplest.words(), **words}
    assert case.words() == want


# One case of each kind in which every word has a value that can be made simpler.
LARGE = (
    f"{BIG} in_kernel=both dt_bias=yes options=order:vk",
    "op=decode lengths=5+3 packed=yes heads=2 value_heads=4 spare=3 in_kernel=gate options=order:vk",
    "op=causal_conv1d lengths=5+3 packed=yes heads=1 width=8 options=order:vk",
    "op=gdn_gate lengths=5 heads=4",
    "op=gdn_layer lengths=5+3 packed=yes heads=2 value_heads=4 options=order:vk",
    "op=call lengths=5+3 packed=yes takes=x:B.T.D,cu_seqlens:offsets sizes=D:8",
    "op=serving trace=p:a5,b3/d:a,b slots=3 heads=2 value_heads=4",
)
PARALLEL = "op=gdn_layer lengths=32+16 packed=yes tp=2 cp=2 sp=yes heads=4 value_heads=8"
NEVER_SIMPLER = {"operation", "seed", "takes", "gives"}  # `seed` is tried in every kind, and the others say which call it is


def untried(smaller: Smaller, cases: Sequence[Any]) -> set[str]:
    """The words of cases that shrinking leaves as they are."""
    shapes = {name for case in cases for shape in smaller.shapes for _, change in shape(case) for name in change}
    words = {field.name for case in cases for field in dataclasses.fields(case)}
    return words - shapes - {*smaller.simplest} - {*smaller.widths} - NEVER_SIMPLER


def test_every_word_of_a_case_is_tried() -> None:
    cases = [book_for("oracle", dict(word.split("=") for word in line.split()).get("op")).case.parse(line) for line in LARGE[:5]]
    cases += [CallCase.parse(LARGE[5]), TraceCase.parse(LARGE[6]), ParallelCase.parse(PARALLEL)]
    cases.append(ParallelCase.parse("op=gated_delta_rule cp=2 layout=contiguous lengths=8 in_kernel=gate"))
    for book in BOOKS:
        mine = [case for case in cases if type(case) is book.case]
        assert mine, book.name
        assert untried(book.smaller, mine) == set(), book.name
        for name, values in book.smaller.simplest.items():
            assert {*values} <= {*book.case.CHOICES.get(name, values)}, name
    without = dataclasses.replace(SMALLER_RULES, shapes=SMALLER_RULES.shapes[:4])
    assert untried(without, cases[:1]) == {"dt_bias", "options"}


@for_each(
    ("line", "word", "law"),
    [
        ("lengths=3 in_kernel=both", "dt_bias", "oracle"),
        ("op=gdn_gate lengths=3", "beta", "oracle"),
        ("op=gdn_gate lengths=3", "dt_bias", "oracle"),
        ("op=gated_rms_norm lengths=3", "weight", "oracle"),
        ("op=decode lengths=1 in_kernel=gate", "dt_bias", "oracle"),
    ],
)
def test_what_a_failure_needs_of_optional_tensors_is_a_neighbour(line: str, word: str, law: str) -> None:
    run = Run.parse(f"law={law} adapter=tests/right.py:Chunkwise {line}")

    def fails(example: Example) -> bool:
        return getattr(example.case, word) and getattr(example.case, "in_kernel", "gate") != "none"

    shrunk = shrink(run.example, run.the_law, fails, lambda runs: runs < SHRINK_RUNS)
    assert (f"{word}=no", "holds") in shrunk.neighbours
    shrunk = shrink(run.example, run.the_law, lambda e: True, lambda runs: runs < SHRINK_RUNS)
    assert getattr(shrunk.example.case, word) is ("in_kernel" in line), "it says nothing without a gate in the kernel"


def test_a_trace_of_many_requests_shrinks_in_few_runs() -> None:
    """By halves of its requests and rows, and by the counts of all rows at once: one by one, requests alone would take all runs."""
    names = [name_of(number) for number in range(130)]
    prompts, decode = ",".join(f"{name}3" for name in names), ",".join([*"_" * 40, *names])
    run = Run.parse(f"law=session adapter=zoo/Serves op=serving trace=p:{prompts}/d:{decode}/v2:a1/w:b slots=130")

    def fails(example: Example) -> bool:
        return any(row.real and place >= 64 for step in example.case.plan for place, row in enumerate(step.rows))

    shrunk = shrink(run.example, run.the_law, fails, lambda runs: runs < SHRINK_RUNS)
    rows = [row for step in shrunk.example.case.plan for row in step.rows]
    assert len(rows) < 140, "of 434"
    assert {row.count for row in rows} == {1}


@pytest.mark.parametrize("words", ["packed=yes", "backward=no"])
def test_a_case_of_very_many_sequences_has_few_candidates(words: str) -> None:
    """Each of them has as many sequences, so that one for every sequence would take gigabytes and minutes."""
    run = Run.parse(f"law=oracle adapter=zoo/Chunkwise lengths=3x65600 {words}")
    candidates = list(itertools.chain.from_iterable(one_step(run.the_law, run.example)))
    assert 50 < len(candidates) < 200
    as_many = [one.case.lengths for _, one in candidates if len(one.case.lengths) == 65600]
    for place in (0, -1):
        assert any(lengths[place] < 3 and lengths[1] == 3 for lengths in as_many) is (words == "packed=yes")


def test_a_trace_shrinks_by_requests_and_by_blocks_of_tokens() -> None:
    line = "trace=p:b5,a128/d:b,a/v3:b2,_/k:c<a@/w:b/f:b/d:a slots=6"
    run = Run.parse(f"law=tags adapter=zoo/StatesRoundToHalf op=serving {line}")
    traces = list[str]()

    def fails(example: Example) -> bool:
        traces.append(example.case.trace)
        rows = [row for step in example.case.plan for row in step.rows if step.kind == "d"]
        return any(row.start and row.start % 64 == 0 for row in rows)

    shrunk = shrink(run.example, run.the_law, fails, lambda runs: runs < SHRINK_RUNS)
    assert shrunk.example.case.trace == "p:a64/d:a"
    assert "p:a128/d:a/d:a" in traces, "one request alone, without the fork"


def test_cases_like_a_found_one_have_its_words_but_one() -> None:
    found = Example(dataclasses.replace(BIG, values="small"))
    others = [*similar(ORACLE, found, Domain(dtypes=("bf16",)))]
    assert len(others) > 10
    for other in others:
        changed = [word for word, value in other.case.words().items() if value != found.case.words()[word]]
        assert len(changed) == 1
    assert [other.case.seed for other in others[:4]] == [12346, 12347, 12348, 12349]
    assert {other.case.dtype for other in others} == {"bf16"}, "that of the domain alone"


def test_batch_of_two_stays_a_batch() -> None:
    shrunk, _ = small(lambda e: len(e.case.lengths) > 1 and e.case.lengths[1] > 0, Case((33, 33), value_heads=4))
    assert str(shrunk.example.case) == "lengths=1+1 key_dim=1 value_dim=1 backward=no"


def test_conditions_together_keep_each_of_them() -> None:
    def fails(e: Example) -> bool:
        case = e.case
        return case.tokens > 64 and case.dtype != "fp32" and case.value_heads > case.heads and case.state == "random"

    shrunk, log = small(fails)
    want = "lengths=65 value_heads=2 key_dim=1 value_dim=1 dtype=bf16 state=random backward=no"
    assert str(shrunk.example.case) == want
    assert len(log.tried) < 70


def test_place_shrinks_to_its_boundary_and_stays_legal() -> None:
    cut = LAWS["cut"]
    shrunk, _ = small(lambda e: (e.at or 0) >= 37, Example(BIG, 100), cut)
    assert shrunk.example.at == 37
    assert shrunk.example.case.lengths == (38,)
    shrunk, _ = small(lambda e: True, Example(BIG, 100), cut)
    assert (shrunk.example.at, shrunk.example.case.lengths) == (1, (2,))


def test_place_is_not_lost_where_a_law_needs_two_sequences() -> None:
    start = dataclasses.replace(BIG, lengths=(130, 64, 65))
    shrunk, _ = small(lambda e: True, Example(start, 2), LAWS["samples"])
    assert shrunk.example.case.lengths == (1, 1)
    assert shrunk.example.at == 0


def test_variant_shrinks_to_the_simplest_that_fails() -> None:
    strides = LAWS["strides"]
    last = VIEWS[-1]
    shrunk, _ = small(lambda e: True, Example(Case((3,)), None, last), strides)
    assert shrunk.example.variant == strides.variants[0]
    shrunk, _ = small(lambda e: e.variant == last, Example(Case((3,)), None, last), strides)
    assert shrunk.example.variant == last
    assert {f"variant={name}" for name in VIEWS[:-1]} <= {what for what, _ in shrunk.neighbours}


def test_budget_is_kept_and_said() -> None:
    for most in (0, 1, 2, 5, 17):
        shrunk, log = small(lambda e: e.case.tokens > 64, most=most)
        assert not shrunk.finished
        assert len(log.tried) <= most
        assert shrunk.example.case.tokens > 64


def test_nothing_simpler_fails_gives_the_start_itself() -> None:
    shrunk, log = small(lambda e: False)
    assert shrunk.example.case == BIG
    assert shrunk.finished
    assert {what for what, _ in shrunk.neighbours} == {what for what, _ in shrunk.neighbours if what}
    assert len(shrunk.neighbours) <= len(log.tried)


def test_undecided_neighbours_are_not_said_to_hold() -> None:
    def fails(e: Example) -> bool | None:
        if e.case.dtype != "bf16":
            return None
        return e.case.tokens > 64

    shrunk, log = small(fails)
    assert shrunk.example.case.words()["dtype"] == "bf16"
    assert "dtype=fp32" not in {what for what, _ in shrunk.neighbours}
    assert "lengths=64" in {what for what, _ in shrunk.neighbours}
    hold_count = sum(verdict is False for verdict in log.tried.values())
    assert len(shrunk.neighbours) <= hold_count


def test_neighbours_are_one_step_from_the_result_and_really_held() -> None:
    def fails(e: Example) -> bool:
        return e.case.tokens > 64 and e.case.state == "random" and e.case.value_heads > e.case.heads

    shrunk, log = small(fails)
    for what, _ in shrunk.neighbours:
        words = {**shrunk.example.case.words(), **dict(word.split("=") for word in what.split())}
        neighbour = Case.parse(" ".join(f"{name}={value}" for name, value in words.items()))
        assert neighbour != shrunk.example.case
        assert log.tried[Example(neighbour)] is False


def test_flaky_failure_ends() -> None:
    chance = random.Random(7)
    shrunk, log = small(lambda e: chance.random() < 0.5)
    assert len(log.tried) <= SHRINK_RUNS
    assert shrunk.runs == len(log.tried)


@pytest.mark.slow
@for_each("law", LAWS.values())
def test_shrinking_tries_only_examples_that_the_law_accepts(law: Law) -> None:
    seen: list[Example] = []

    def look(example: Example) -> None:
        seen.append(example)
        threshold = example.case.tokens // 2
        shrunk, _ = small(lambda e: e.case.tokens > threshold or e.case.seed % 3 == 1, example, law)
        law.accept(shrunk.example)

    seeded(law.draw(Domain(in_kernel=IN_KERNEL)), 5, 12, look)
    assert seen


@for_each(
    "words",
    [
        "law=norm lengths=1",
        "law=recall lengths=5",
        "law=packed at=0 lengths=5+5",
        "law=recurrent at=3 lengths=5 packed=yes",
        "law=absent variant=state lengths=5 state=random",
        "law=absent variant=scale lengths=5 scale=one",
        "law=absent variant=offsets lengths=5+6 packed=yes",
        "law=linear variant=cotangents lengths=5 backward=no",
        "law=linear variant=values lengths=70 dtype=fp16 values=small",
    ],
)
def test_law_refuses_a_case_that_it_is_not_about(words: str) -> None:
    """Or else shrinking leaves what the law is about, and its result breaks right implementations too."""
    with pytest.raises(ValueError, match="law"):
        Run.parse(f"{words} adapter=tests/right.py:Chunkwise")


def test_packed_sequences_shrink_in_proportion() -> None:
    """A fault may need a length that is a multiple of another, as where a rank begins with a sequence."""
    lengths = [fields["lengths"] for _, fields in shorter_sequences(Case((19, 38), packed=True))]
    assert {(1, 2), (2, 4), (18, 36)} <= {*lengths}
    assert all(fields["lengths"] != (0, 0) for _, fields in shorter_sequences(Case((0, 0), packed=True)))
