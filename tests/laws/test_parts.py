"""Parts of a call are calls of their own, with the rows that the whole has; what is over a bound is looked at in its part only."""

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs
from oracles.operations import RULES
from oracles.tolerance import bound, evaluation
from oracles.tolerance.bound import Bound, bounds, truth
from oracles.tolerance.parts import Cut, Part
from properties.laws.law import Pair
from properties.modules.case import ModuleCase
from properties.pools.case import PoolCase
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from tests.over_bounds import answered
from tests.together import for_each
from verify.bench.places import where
from verify.execution.judge import judge
from verify.zoo.base import Chunkwise

MODULES = ("causal_conv1d", "gdn_gate", "kda_gate", "l2norm")
CASES = {
    operation: cases(
        Domain(operation=operation, in_kernel=("none", "beta") if operation == "delta_rule" else ("none", "gate", "beta", "both")),
        longest=12,
        total=40,
        value_heads=6,
    )
    for operation in RULES
}


def parts_of(cut: Cut) -> st.SearchStrategy[Part]:
    """Any part but an empty one."""
    sequences = st.sets(st.sampled_from(cut.whole.sequences), min_size=1)
    groups = st.sets(st.sampled_from(cut.whole.groups), min_size=1)
    return st.tuples(sequences, groups).map(lambda sets: Part(*(tuple(sorted(some)) for some in sets)))


def summed_over_sequences(cut: Cut, name: str) -> bool:
    return cut.operation.port(name).axes.split()[0] not in ("B", "N")


def apart(cut: Cut, inputs: Inputs, cotangents: dict[str, Tensor] | None, part: Part) -> list[str]:
    """The tensors of which a part has other rows than the whole."""
    cut.operation.check(cut.inputs(inputs, part))
    whole = truth(cut.operation, inputs, cotangents)
    mine = truth(cut.operation, cut.inputs(inputs, part), cotangents and cut.named(cotangents, part))
    wanted = cut.named(whole, part)
    size = {name: 1.0 + float(x.abs().max()) if x.numel() else 1.0 for name, x in whole.items()}
    return [
        name
        for name, x in mine.items()
        if not (part.sequences != cut.whole.sequences and summed_over_sequences(cut, name))
        and not (x.shape == wanted[name].shape and bool(((x - wanted[name]).abs() <= 1e-12 * size[name]).all()))
    ]


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.slow_after_first
def test_the_rows_of_a_part_are_those_of_the_whole(operation: str, data: st.DataObject) -> None:
    case = data.draw(CASES[operation])
    inputs = case.inputs()
    cut = Cut.of(case.spec, inputs)
    assert (len(cut.whole.sequences), len(cut.whole.groups)) == (len(case.lengths), case.heads)
    assert apart(cut, inputs, case.cotangents() if case.backward else None, data.draw(parts_of(cut))) == []


class TakesTheNext(Cut):
    """The planted fault: of all inputs but the values the next head is taken, or of a packed batch's tokens the next sequence."""

    def inputs(self, inputs: Inputs, part: Part) -> Inputs:
        return super().inputs(inputs, part).replaced(v=super().inputs(inputs, self.next(part)).v)

    def next(self, part: Part) -> Part:
        return Part(part.sequences, tuple((group + 1) % self.groups for group in part.groups))


class TakesTheNextSequence(TakesTheNext):
    def next(self, part: Part) -> Part:
        return Part(tuple((row + 1) % len(self.lengths) for row in part.sequences), part.groups)


@for_each("wrong", [TakesTheNext, TakesTheNextSequence])
@for_each("words", ["lengths=4+4+4 packed=yes", "lengths=4+4"])
def test_a_part_with_anothers_rows_is_seen(wrong: type[Cut], words: str) -> None:
    case = Case.parse(f"{words} heads=3 value_heads=6 key_dim=4 value_dim=4 state=random")
    inputs = case.inputs()
    for kind, faults in ((Cut, False), (wrong, True)):
        assert bool(apart(kind.of(case.spec, inputs), inputs, case.cotangents(), Part((1,), (0, 2)))) == faults


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.slow_after_first
def test_a_part_that_has_rows_is_the_smallest(operation: str, data: st.DataObject) -> None:
    """Of single rows, each named by its place: what is taken has them all, and nothing less has."""
    case = data.draw(CASES[operation])
    inputs = case.inputs()
    cut = Cut.of(case.spec, inputs)
    port = data.draw(st.sampled_from((*case.spec.outputs, *case.spec.gradients())))
    like = truth(case.spec, inputs, case.cotangents()).get(port.name)
    if like is None:
        return
    shape = like.shape if port.scalar_rows else like.shape[:-1]
    numbers = torch.arange(shape.numel()).view(shape)
    some = data.draw(st.sets(st.integers(0, max(0, shape.numel() - 1)), max_size=4)) if shape.numel() else set()
    rows = torch.isin(numbers, torch.tensor(sorted(some), dtype=torch.int64))
    part = cut.having(port, rows)
    if not rows.any():
        assert part == cut.whole
        return
    assert int(cut.taken(rows, port, part).sum()) == len(some)
    fewer = [Part(tuple(row for row in part.sequences if row != gone), part.groups) for gone in part.sequences]
    fewer = [] if summed_over_sequences(cut, port.name) else fewer
    pooled = port.axes.split()[len(shape) - 1] == "HV" and port.axes.split()[0] != "B"
    less = [tuple(group for group in part.groups if group != gone) for gone in part.groups]
    fewer += [] if pooled else [Part(part.sequences, groups) for groups in less]
    for subset in fewer:
        if subset.sequences and subset.groups:
            assert int(cut.taken(rows, port, subset).sum()) < len(some)
    # What is put back lies where it came from, and nothing else is touched.
    put = cut.put(torch.full(shape, -1), port, part, cut.taken(numbers, port, part))
    assert torch.equal(put[put >= 0], cut.taken(numbers, port, part).flatten().sort().values)
    assert ((put == -1) | (put == numbers)).all()
    assert cut.having(port, rows | (numbers == data.draw(st.integers(0, shape.numel() - 1)))).has(part)


def test_sequences_of_a_pool_and_of_several_calls_stay_together() -> None:
    case = Case.parse("lengths=4+4 packed=yes heads=2 value_heads=2 key_dim=2 value_dim=2")
    inputs = case.inputs()
    cut = Cut.of(case.spec, inputs)
    over = torch.zeros(1, 8, 2, dtype=torch.bool)
    over[0, 5, 1] = True
    assert cut.having(case.spec.port("o"), over) == Part((1,), (1,))
    together = Cut.of(case.spec, Inputs(**inputs, calls=(4, 4)))
    assert together.having(case.spec.port("o"), over) == Part((0, 1), (1,))
    pools = PoolCase.parse("lengths=1+1+1 heads=2 value_heads=4 key_dim=4 value_dim=6")
    pool = Cut.of(pools.spec, pools.inputs())
    over = torch.zeros(3, 1, 4, dtype=torch.bool)
    over[1, 0, 3] = True
    assert pool.having(pools.spec.port("o"), over) == Part((0, 1, 2), (1,))


# Bounds


def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many numbers and runs are evaluated, of disturbed runs, as they come."""
    evaluate, seen = evaluation.evaluate, list[tuple[int, int]]()

    def noted(operation: Any, inputs: Inputs, cotangents: Any, arithmetic: Any) -> dict[str, Tensor]:
        if arithmetic.rounds:
            seen.append((sum(x.numel() for x in inputs.values() if isinstance(x, Tensor)), arithmetic.runs))
        return evaluate(operation, inputs, cotangents, arithmetic)

    monkeypatch.setattr(evaluation, "evaluate", noted)
    return seen


WIDE = Case.parse("lengths=70+3+33+50 packed=yes heads=4 value_heads=8 key_dim=8 value_dim=8 dtype=bf16 state=random gate=64")


def wide_bounds(first: int | None = 1) -> dict[str, Bound]:
    return bounds(WIDE.spec, WIDE.inputs(), WIDE.cotangents(), "chunkwise", "ieee", 64, first)


@pytest.mark.slow
def test_only_the_part_in_question_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = evaluated(monkeypatch)
    one, all_of = wide_bounds()["o"], wide_bounds(4)["o"]
    seen.clear()
    over = torch.zeros_like(one.allowed, dtype=torch.bool)
    over[0, 71, 5] = True  # of the second sequence, and the third key head
    assert one.finer is not None
    sizes, limit = [], one
    while limit.finer is not None:
        limit, before = limit.finer(over), limit
        rows = torch.zeros_like(over)
        rows[0, 70:73, 4:6] = True
        assert torch.equal(limit.allowed[~rows], before.allowed[~rows])
        assert not torch.equal(limit.allowed[rows], before.allowed[rows])
        assert limit.value is one.value
        sizes.append(limit.sure)
    assert sizes == [0.5**0.5, 1.0, 1.0, 1.0]
    # 3 of 156 tokens and one of four key heads: 3 runs after the whole call's first, then 64, and 16 coarse ones.
    largest = sum(x.numel() for x in WIDE.inputs().values() if isinstance(x, Tensor))
    assert all(numbers < largest / 16 for numbers, _ in seen)
    assert sum(runs for _, runs in seen) == 3 + 64 + 16
    few = one.finer(over).finer
    assert few is not None
    ratio = few(over).allowed[0, 70:73, 4:6] / all_of.allowed[0, 70:73, 4:6]
    assert float(ratio.min()) > 0.25 and float(ratio.max()) < 4.0, "other grids, and no other errors"


def test_what_was_looked_at_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, limits = evaluated(monkeypatch), wide_bounds()
    finer = {name: limit.finer for name, limit in limits.items() if limit.finer is not None}
    seen.clear()
    over = torch.zeros_like(limits["o"].allowed, dtype=torch.bool)
    over[0, 0, 0] = over[0, 71, 5] = True
    finer["o"](over)
    assert len(seen) > 0
    seen.clear()
    over[0, 0, 0] = False
    finer["dv"](over)
    finer["o"](over)
    assert seen == [], "a part of that"
    finer["o"]()
    assert [numbers for numbers, _ in seen] == [sum(x.numel() for x in WIDE.inputs().values() if isinstance(x, Tensor))]
    seen.clear()
    finer["dbeta"](over)
    finer["final_state"]()
    assert seen == []


def test_a_sum_over_sequences_is_looked_at_with_all_of_them_and_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(WIDE, in_kernel="gate")
    seen = evaluated(monkeypatch)
    one = bounds(case.spec, case.inputs(), case.cotangents(), "chunkwise", "ieee", 64, 1)["dA_log"]
    whole = seen[-1][0]
    seen.clear()
    over = torch.zeros_like(one.allowed, dtype=torch.bool)
    over[6] = True
    assert one.finer is not None
    found = one.finer(over)
    assert {numbers for numbers, _ in seen} == {whole}
    assert (found.allowed != one.allowed).all()


@pytest.mark.slow
def test_a_bound_that_came_with_others_has_finer_ones_of_the_part_in_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the call; they are those that all of it leads to, on other grids where they are of a part."""
    arguments, limits = (WIDE.spec, WIDE.inputs(), WIDE.cotangents()), wide_bounds(4)
    seen = evaluated(monkeypatch)
    several = bounds(*arguments, "chunkwise", "ieee", 64, shared_bounds=limits)
    assert seen == [], "nothing is computed before its first use"
    over = torch.zeros_like(limits["o"].allowed, dtype=torch.bool)
    over[0, 71, 5] = True
    finer, single_finer = several["o"].finer, limits["o"].finer
    assert finer is not None and single_finer is not None
    found = finer(over)
    largest = sum(x.numel() for x in WIDE.inputs().values() if isinstance(x, Tensor))
    assert sum(runs for _, runs in seen) == 16 + 4
    assert all(numbers < largest / 16 for numbers, _ in seen)
    assert torch.equal(found.value, limits["o"].value)
    whole, want = finer(), single_finer()
    torch.testing.assert_close(whole.allowed, want.allowed, rtol=1e-6, atol=0.0)
    assert (whole.sure, whole.clear) == (1.0, want.clear)
    assert not torch.allclose(want.allowed, limits["o"].allowed, rtol=1e-3, atol=0.0)


def of_two_runs() -> dict[str, Tensor]:
    """What two runs allow rows of a part: those of the third key head and the last sequence."""
    found, limits = {}, wide_bounds()
    for name in ("o", "dv", "dg", "dbeta"):
        over = torch.zeros_like(limits[name].allowed, dtype=torch.bool)
        over[0, 106:, 4:6] = True
        finer = limits[name].finer
        assert finer is not None
        found[name] = finer(over).allowed[over]
    return found


def test_a_part_goes_on_with_the_runs_of_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is the same in each: it has one number for all positions of a place."""
    seen = evaluated(monkeypatch)
    going_on = of_two_runs()
    assert [runs for _, runs in seen] == [1, 1], "of the whole, and of the part"
    go_on = bound._Disturbed.go_on
    monkeypatch.setattr(bound._Disturbed, "go_on", lambda *_: None)
    anew = of_two_runs()
    for name, allowed in going_on.items():
        torch.testing.assert_close(allowed, anew[name], rtol=1e-6, atol=0.0, msg=name)

    def astray(runs: Any, begun: Any, taken: Any) -> None:
        go_on(runs, begun, lambda name, rows: taken(name, rows).flip(1))

    monkeypatch.setattr(bound._Disturbed, "go_on", astray)
    assert all(not torch.allclose(allowed, anew[name], rtol=1e-3, atol=0.0) for name, allowed in of_two_runs().items())


@pytest.mark.slow
def test_of_a_small_call_a_gpu_looks_at_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "on_a_gpu", lambda inputs: True)
    seen = evaluated(monkeypatch)
    one = wide_bounds()["o"]
    assert one.sure == 1.0, "four runs at once"
    seen.clear()
    over = torch.zeros_like(one.allowed, dtype=torch.bool)
    over[0, 0, 0] = True
    assert one.finer is not None
    assert (one.finer(over).allowed != one.allowed).any(-1).all()
    assert {numbers for numbers, _ in seen} == {sum(x.numel() for x in WIDE.inputs().values() if isinstance(x, Tensor))}


LINES = (
    "lengths=70+0+33 packed=yes heads=4 value_heads=8 key_dim=4 value_dim=6 dtype=bf16 state=random in_kernel=both",
    "lengths=40+40 heads=4 value_heads=8 key_dim=4 value_dim=6 values=scaled gate=mixed in_kernel=gate",
    "op=kda lengths=9+20 packed=yes heads=4 value_heads=4 key_dim=4 value_dim=6 values=scaled gate=mixed in_kernel=gate",
    "op=causal_conv1d lengths=9+0+20+3 packed=yes width=20 bias=yes activation=silu state=random offsets=int32 values=scaled",
    "op=gdn_gate lengths=9+9 heads=12 values=scaled",
    "op=kda_gate lengths=9+9 heads=12 width=5 values=scaled",
    "op=l2norm lengths=9+9 heads=6 width=8 dtype=bf16",
    "lengths=1+1+1 heads=2 value_heads=4 key_dim=4 value_dim=6 dtype=bf16 slots=int64",
)


def of_a_line(line: str) -> Case | ModuleCase | PoolCase:
    kind = PoolCase if "slots=" in line else ModuleCase if any(f"op={name}" in line for name in MODULES) else Case
    return kind.parse(line.replace(" slots=int64", ""))


def unlike(line: str) -> list[tuple[str, float]]:
    """The tensors of whose rows, each alone, a part allows another thing than the whole: less than half, or more than twice."""
    case = of_a_line(line)
    cotangents = None if isinstance(case, PoolCase) else case.cotangents()
    algorithm = "pointwise" if isinstance(case, ModuleCase) else "chunkwise" if isinstance(case, Case) else "recurrent"
    chunk = 16 if algorithm == "chunkwise" and "op=kda" not in line else None  # of one line the chunks are not declared
    make = functools.partial(bounds, case.spec, case.inputs(), cotangents, algorithm, chunk=chunk, first=4)
    found, chance = [], random.Random(line)
    all_of = {name: limit.finer().allowed for name, limit in make().items() if limit.finer is not None}
    for name, one in make().items():
        over = torch.zeros_like(one.allowed, dtype=torch.bool)
        for at in chance.sample(range(over.numel()), min(3, over.numel())):
            over.zero_().view(-1)[at] = True
            assert one.finer is not None
            mine, whole = float(one.finer(over).allowed[over]), float(all_of[name][over])
            if not 0.5 < mine / whole < 2.0:
                found.append((name, mine / whole))
    return found


@pytest.mark.parametrize("line", LINES)
@pytest.mark.slow
def test_a_part_allows_what_the_whole_does(line: str) -> None:
    """On other grids, and with the same neighbours: rows of heads or channels that are pooled have all of these in their part."""
    assert unlike(line) == []


@pytest.mark.slow
def test_a_part_without_the_rows_that_are_pooled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cut, "_pooled", lambda self, axes: False)
    assert any(name == "dA_log" for line in LINES if "in_kernel=gate" in line for name, _ in unlike(line))


class OneWrongToken(Chunkwise):
    """The corrected values of one token of one head of one sequence are lost."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        beta = x.beta.clone()
        if len(x.cu_seqlens) > 3:
            beta[0, int(x.cu_seqlens[3]) + 7, 6] = 0
        return super().run(x.replaced(beta=beta))


@pytest.mark.parametrize(("implementation", "broken"), [(Chunkwise(), False), (OneWrongToken(), True)])
@pytest.mark.slow
def test_the_same_is_broken_whether_the_whole_is_looked_at_or_parts(
    implementation: Chunkwise, monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    for dtype in ("bf16", "fp32"):
        case = dataclasses.replace(WIDE, dtype=dtype)
        results, found = answered(implementation, case), []
        for parts in (True, False):
            with monkeypatch.context() as patch:
                if not parts:
                    patch.setattr(Cut, "having", lambda self, port, rows: self.whole)
                limits = bounds(case.spec, case.inputs(), case.cotangents(), "chunkwise", "ieee", 64, 1)
                pairs = [Pair(name, "", results[name], limit) for name, limit in limits.items()]
                found.append({(finding.output, finding.worst) for finding in judge(pairs, functools.partial(where, case)).findings})
        assert found[0] == found[1]
        assert bool(found[0]) == broken
        assert all("sequence 3" in worst for _, worst in found[0])
