"""Segments and chunks of any size, and heads computed at once or apart, give the same results."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from oracles.operations import RULES
from oracles.rule import chunkwise, scan, segments
from oracles.tolerance import evaluation
from oracles.tolerance.bound import bounds, truth
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from tests.judging import relative
from tests.oracle_forms import SMALLEST, form, of, small_tensors
from tests.together import for_each


def forgets_blocks_before(a: Tensor, inverses: list[Tensor], b: Tensor, *, transposed: bool = False) -> Tensor:
    """Each block solved on its own."""
    sides = zip(inverses, b.split(chunkwise._BLOCK, -2), strict=True)
    return torch.cat([(inverse.mT if transposed else inverse) @ right for inverse, right in sides], -2)


def never_transposed(a: Tensor, inverses: list[Tensor], b: Tensor, *, transposed: bool = False) -> Tensor:
    """Backward solves the forward system."""
    return SUBSTITUTED(a, inverses, b)


SUBSTITUTED = chunkwise.substituted


@pytest.mark.parametrize("wrong", [forgets_blocks_before, never_transposed])
def test_wrong_substitutions_are_rejected(wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("lengths=64 gate=64 state=random seed=3")
    inputs, cotangents = case.inputs(), case.cotangents()
    right = form("gated_delta_rule", inputs, cotangents, "exact", 64)
    assert max(relative(right, form("gated_delta_rule", inputs, cotangents, "exact", 16)).values()) <= 1e-13
    monkeypatch.setattr(chunkwise, "substituted", wrong)
    assert max(relative(form("gated_delta_rule", inputs, cotangents, "exact", 64), right).values()) > 1e-3


# Segments, chunks and boundaries


def blocks_of(
    lengths: Sequence[int], sizes: Sequence[int], most: int, restarts: segments.Restarts = ()
) -> list[tuple[list[int], list[segments.Segment]]]:
    blocks = segments.segments(tuple(lengths), tuple(sizes), (most,) * len(lengths), torch.device("cpu"), restarts)
    return [(torch.arange(len(lengths))[members].tolist(), block) for members, block in blocks]


def tagged(segment: segments.Segment, tokens: int) -> list[list[int]]:
    """The tokens of each chunk's rows, as `take` places them, -1 for padding; `put` takes them back."""
    tags = torch.arange(1.0, tokens + 1).unsqueeze(-1)
    chunks = segment.take(tags, torch.float64)
    back = torch.zeros_like(tags)
    segment.put(back, chunks)
    assert back.flatten().tolist() == [tag if tag - 1 in segment.tokens else 0 for tag in tags.flatten().tolist()]
    real = segment.inside(chunks.ndim)
    assert torch.equal(chunks > 0, torch.ones_like(chunks, dtype=torch.bool) if real is None else real == 1)
    return (chunks.squeeze(-1).long() - 1).tolist()


def held_before(segment: segments.Segment, members: Sequence[int]) -> list[tuple[int, int]]:
    """Chunk by chunk, its sequence and how many chunks of that sequence the segment has from it on."""
    left = {row: sum(count > place for _, count in segment.steps) for place, row in enumerate(members)}
    return [(row, left[row] - step) for step, (_, count) in enumerate(segment.steps) for row in members[:count]]


@settings(max_examples=100)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 40)), max_size=7),
    size=st.integers(1, 9),
    short=st.integers(1, 9),
    most=st.integers(1, 12),
    begins=st.lists(st.sets(st.integers(0, 20), max_size=4), min_size=7, max_size=7),
)
@example(lengths=[0, 0], size=4, short=4, most=1, begins=[])
@example(lengths=[40, 1, 1, 1, 1, 1, 1, 1, 1], size=4, short=4, most=3, begins=[])
@example(lengths=[40, 3, 20, 2, 0, 4], size=8, short=4, most=9, begins=[])
@example(lengths=[9, 12, 3, 0], size=4, short=4, most=9, begins=[{5}, {5}, {5}, {5}])
@example(lengths=[9, 12, 3, 0], size=4, short=4, most=9, begins=[{1, 2, 7}, set(), {2}, {1}])
@pytest.mark.slow
def test_segments_hold_every_token_once_in_order(
    lengths: list[int], size: int, short: int, most: int, begins: list[set[int]]
) -> None:
    restarts = tuple(tuple(sorted(each)) for each in begins[: len(lengths)])
    ends, seen = [0, *itertools.accumulate(lengths)], {row: [] for row, length in enumerate(lengths) if length}
    sizes = [short if length <= short else size for length in lengths]
    for members, block in blocks_of(lengths, sizes, most, restarts):
        assert len(members) <= most
        assert {sizes[row] for row in members} == {segment.size for segment in block}
        running = len(members)
        for segment in block:
            assert segment.chunks == sum(count for _, count in segment.steps) <= max(most, segment.steps[0][1])
            assert [first for first, _ in segment.steps] == [0, *itertools.accumulate(count for _, count in segment.steps)][:-1]
            rows = tagged(segment, ends[-1])
            states = [(row, len(seen[row])) for row in members[: segment.steps[0][1]]] + [None] * segment.chunks
            for chunks, before, after in segment.states():
                assert chunks.stop - chunks.start <= running, "those that still run are the first members"
                running = chunks.stop - chunks.start
                for row, chunk, state in zip(members, rows[chunks], states[before], strict=False):
                    assert state == (row, len(seen[row])), "the state before a chunk is that after the chunk before"
                    seen[row].append(chunk)
                states[after] = [(row, len(seen[row])) for row in members[:running]]
            at = torch.arange(len(states))
            assert [states[row] for row in at[segment.before]] == [
                (row, len(seen[row]) - left) for row, left in held_before(segment, members)
            ]
            assert [states[row] for row in at[segment.last]] == [(row, len(seen[row])) for row in members[: segment.steps[0][1]]]
    for row, chunks in seen.items():
        tokens = list(range(ends[row], ends[row + 1]))
        cuts = [0, *(restarts[row] if restarts else ()), len(tokens)]
        parts = [part + [-1] * (-len(part) % sizes[row]) for part in (tokens[a:b] for a, b in itertools.pairwise(cuts))]
        assert [token for chunk in chunks for token in chunk] == [token for part in parts for token in part]
        assert all(len(chunk) == sizes[row] for chunk in chunks)


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=6)
@given(
    case=cases(Domain(), longest=150, total=200).filter(lambda case: case.key_dim > 1 or not case.qk_norm), most=st.integers(1, 5)
)
@example(case=Case.parse("lengths=130+0+3+70 packed=yes heads=2 value_heads=4 gate=64 state=random seed=1"), most=1)
@example(case=Case.parse("lengths=40+3+3+3+3+3+3+200 packed=yes value_heads=2 gate=mixed state=random seed=2"), most=3)
@pytest.mark.slow_after_first
def test_segments_however_small_give_the_results_of_one(operation: str, case: Case, most: int) -> None:
    """A single number that is normalised has no gradient but roundings."""
    case = of(operation, case)
    inputs, cotangents = case.inputs(), case.cotangents()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunkwise._Call, "most", lambda *arguments: 2**20)
        whole = form(operation, inputs, cotangents, "exact", 16)
        patch.setattr(chunkwise._Call, "most", lambda *arguments: most)
        cut = form(operation, inputs, cotangents, "exact", 16)
    errors = relative(cut, whole)  # all 0 where measured; another library may add up a product of a smaller batch in another order
    assert max(errors.values(), default=0.0) <= 1e-14, errors


def test_segments_in_the_wrong_order_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("lengths=130+0+3+70 packed=yes gate=64 state=random seed=1")
    inputs, cotangents = case.inputs(), case.cotangents()
    whole, right = truth(case.spec, inputs, cotangents), segments.segments
    monkeypatch.setattr(chunkwise, "_SEGMENT", SMALLEST)
    assert max(relative(truth(case.spec, inputs, cotangents), whole).values()) <= 1e-14
    monkeypatch.setattr(segments, "segments", lambda *arguments: [(members, block[::-1]) for members, block in right(*arguments)])
    assert min(relative(truth(case.spec, inputs, cotangents), whole).values()) > 1e-3


def test_a_segment_is_as_many_chunks_as_fit_and_one_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    call, arguments = chunkwise._Call(1.0), (64, torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 2, 48))
    plenty = call.most(*arguments)
    assert plenty > 1
    monkeypatch.setattr(chunkwise, "_SEGMENT", {name: 10 * size for name, size in chunkwise._SEGMENT.items()})
    assert 10 * plenty <= call.most(*arguments) < 10 * (plenty + 1)
    monkeypatch.setattr(chunkwise, "_SEGMENT", SMALLEST)
    assert call.most(*arguments) == 1


class Products(TorchDispatchMode):
    """Counts matrix products by torch's formulas, without its counter, which imports torch's compiler and leaves out `baddbmm_`."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.baddbmm_:
            self.total += 2 * math.prod(args[1].shape) * args[2].shape[-1]
        elif (count := flop_registry.get(func.overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def flops(lengths: list[int], chunk: int, width: int, value_width: int, device: str = "meta") -> int:
    """The matrix products that are counted for one head, forward and backward. Without numbers they are the same."""
    tokens, count = sum(lengths), len(lengths)
    shapes = [(tokens, 1, width)] * 2 + [(tokens, 1, value_width), (tokens, 1, 1), (tokens, 1), (count, 1, width, value_width)]
    x = [tensor.detach().to(device).requires_grad_() for tensor in small_tensors(shapes, 0)]
    with Products() as counter:
        o, _ = chunkwise.delta_rule(*x, 1.0, lengths, chunk)
        o.sum().backward()
    return counter.total


def test_products_are_counted_and_are_the_same_without_numbers() -> None:
    with Products() as counter:
        torch.ones(6, 5) @ torch.ones(5, 3)
        torch.ones(2, 3, 5).baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
        torch.ones(3).exp()
    assert counter.total == 2 * 6 * 5 * 3 + 2 * 2 * 3 * 4 * 5
    assert 0 < flops([5, 20], 16, 8, 6, "cpu") == flops([5, 20], 16, 8, 6)


@for_each("widths", [(8, 8), (128, 32), (256, 256)])
@for_each("lengths", [[17] * 12, [3] * 30, [64, 65], [400], [1, 1, 1, 130], [5], [90]])
@pytest.mark.slow
def test_default_chunk_has_few_products_padding_included(lengths: list[int], widths: tuple[int, int]) -> None:
    best = chunkwise.best_chunk(lengths, *widths)
    counts = {size: flops(lengths, size, *widths) for size in {16, 32, 64, 128, max(lengths), best} if size <= 128}
    assert counts[best] <= 1.2 * min(counts.values()), (best, counts)
    if lengths == [17] * 12:
        assert counts[16] > 1.5 * counts[best], "what a choice that forgets the padding would take"


def test_default_chunk_of_no_tokens_is_one() -> None:
    assert chunkwise.best_chunk([], 8, 8) >= 1
    assert chunkwise.best_chunk([0, 0], 8, 8) >= 1


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("algorithm", ["chunkwise", "recurrent"])
@pytest.mark.slow_after_first
def test_bounds_do_not_depend_on_what_is_computed_at_once(operation: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "lengths=100+3+0+70 packed=yes heads=2 value_heads=4 key_dim=8 value_dim=12 gate=64 state=random dtype=bf16 qk_norm=yes"
    case = Case.parse(f"op={operation} {line} seed=9")
    make = functools.partial(bounds, case.spec, case.inputs(), case.cotangents(), algorithm, chunk=64)
    whole, counts, evaluated = make(), [], []
    plan, evaluate = segments.segments, evaluation.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(scan, "GRAPH", SMALLEST)
        patch.setattr(segments, "segments", lambda *arguments: counts.append(arguments) or plan(*arguments))
        stretches = make()
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "_BATCH", SMALLEST)
        patch.setattr(evaluation, "evaluate", lambda *arguments: evaluated.append(arguments[1].v.shape[2]) or evaluate(*arguments))
        heads = make()
    assert sum(len(block) for _, block in plan(*counts[-1])) == 5, "each chunk of each sequence is a segment of its own"
    assert evaluated == [4, 2, 2], "the truth at once, the runs in two slices of the heads"
    for name, limit in whole.items():
        for other in (stretches[name], heads[name]):
            torch.testing.assert_close(other.value, limit.value, rtol=1e-11, atol=1e-13)
            ratio = other.allowed / limit.allowed  # other grids in the even runs
            assert 0.8 < ratio.median() < 1.25
            assert 1 / 6 < ratio.min() <= ratio.max() < 6
        if algorithm == "chunkwise":  # stretches are whole chunks, on the same grids, but float32 sums of another order
            torch.testing.assert_close(stretches[name].allowed, limit.allowed, rtol=1e-3, atol=0)
