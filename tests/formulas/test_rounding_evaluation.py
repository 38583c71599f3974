"""Bounds do not depend on how they are evaluated: runs at once or apart, padded, packed or alone, in float32 or float64."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from oracles.arithmetic.rounding import Arithmetic
from oracles.operation import Inputs
from oracles.operations import RULES
from oracles.rule import disturbed, in_chunks, in_steps, segments
from oracles.tolerance import evaluation
from oracles.tolerance.bound import Bound, bounds, truth
from properties.rules.case import Case
from tests.over_bounds import LINE
from tests.roundings import arithmetic
from tests.together import for_each


@pytest.mark.slow
@for_each("dtype", ["bf16", "fp16", "fp32"])
@for_each("axes", [(0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 2, 3), (0, 1, 3, 2)])
def test_a_bound_does_not_depend_on_how_a_state_lies_in_memory(dtype: str, axes: tuple[int, ...]) -> None:
    words = f"lengths=40+40 heads=2 value_heads=2 key_dim=8 value_dim=4 state=random dtype={dtype} gate=64"
    case = Case.parse(words)
    inputs, cotangents = case.inputs(), case.cotangents()
    assert inputs.state is not None
    order = [axes.index(axis) for axis in range(4)]
    views = {"state": inputs.state.permute(axes).contiguous().permute(order)}
    assert views["state"].stride() != inputs.state.stride()
    assert torch.equal(views["state"], inputs.state)
    for algorithm in ("chunkwise", "recurrent"):
        want, got = (bounds(case.spec, call, cotangents, algorithm, chunk=16) for call in (inputs, inputs.replaced(**views)))
        for name, limit in want.items():
            torch.testing.assert_close(got[name].allowed, limit.allowed, rtol=1e-6, atol=0)


@for_each("words", ["op=gated_delta_rule", "op=kda"])
@for_each("kind", [("chunkwise", "fp32", "ieee"), ("chunkwise", "fp32", "tf32"), ("chunkwise", "bf16", "ieee")])
def test_a_single_run_that_does_not_round_is_the_truth(words: str, kind: tuple[str, str, str]) -> None:
    case = Case.parse(f"{words} lengths=40 key_dim=8 value_dim=4 state=random dtype=fp32")
    cotangents = {name: cotangent.double() for name, cotangent in case.cotangents().items()}
    for algorithm in (kind[0], "recurrent"):
        plain = Arithmetic.of(algorithm, *kind[1:], runs=1)
        runs = evaluation.evaluate(case.spec, case.inputs(), cotangents, plain)
        for name, value in truth(case.spec, case.inputs(), cotangents).items():
            torch.testing.assert_close(runs[name][0], value, rtol=1e-11, atol=1e-12)


def test_as_many_runs_are_evaluated_at_once_as_there_is_room_for() -> None:
    def at_once(tokens: int, heads: int, width: int, runs: int, device: str) -> tuple[int, int]:
        case = Case(lengths=(tokens,), heads=heads, value_heads=2 * heads, key_dim=width, value_dim=width)
        shapes = {"q": (heads, width), "k": (heads, width), "v": (2 * heads, width), "g": (2 * heads,), "beta": (2 * heads,)}
        tensors = {name: torch.empty(1, tokens, *shape, device=device) for name, shape in shapes.items()}
        inputs = Inputs(**tensors, state=None, cu_seqlens=None)
        pieces = evaluation.pieces_of(case.spec, inputs, runs)
        return pieces, evaluation.at_once(inputs, dataclasses.replace(arithmetic("bf16", runs), first=1), pieces)

    for runs in (2, 4):
        assert [at_once(tokens, 2, 64, runs, "meta") for tokens in (1, 130, 4096)] == [(1, runs)] * 3
    assert [at_once(tokens, 2, 64, 64, "meta") for tokens in (1, 130, 512, 1024)] == [(1, 64), (1, 64), (1, 32), (1, 16)]
    assert at_once(130, 2, 32, 32, "meta") == (1, 32)
    assert [at_once(tokens, 16, 128, 64, "meta") for tokens in (32768, 65536)] == [(16, 8), (16, 4)]
    assert [at_once(tokens, 16, 128, 4, "meta") for tokens in (32768, 65536)] == [(8, 4), (16, 4)]
    assert [at_once(tokens, 16, 128, 1, "meta") for tokens in (32768, 65536)] == [(2, 1), (4, 1)]
    assert [at_once(tokens, 2, 64, 64, "cpu") for tokens in (1, 64, 130, 512, 1024)] == [(1, 64), (1, 4), (1, 2), (1, 1), (1, 1)]


def test_chunks_are_as_long_as_others_where_that_pads_little() -> None:
    def taken(lengths: list[int], sizes: list[int]) -> list[int]:
        return disturbed.alike(lengths, sizes)

    assert taken([2, 20, 40], [16, 32, 64]) == [64] * 3, "80 tokens more"
    assert taken([2, 3, 20, 40], [16, 16, 32, 64]) == [16, 16, 64, 64], "32 more, and 96 beside them are too many"
    assert taken([1] * 6 + [64], [16] * 6 + [64]) == [16] * 6 + [64]
    assert taken([1] * 6 + [640, 0], [16] * 6 + [64, 16]) == [16] * 6 + [64, 16], "288 more of 736 are more than a quarter"
    assert taken([1] * 6 + [1600, 0], [16] * 6 + [64, 16]) == [64] * 8, "and of 1,696 less"
    assert taken([5, 9], [16, 16]) == [16, 16]
    assert taken([], []) == []


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("algorithm", ["chunkwise", "recurrent"])
@pytest.mark.slow_after_first
def test_bounds_do_not_depend_on_how_many_runs_are_evaluated_at_once(
    operation: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.parse(f"op={operation} {LINE} gate=64 dtype=bf16")
    make = functools.partial(bounds, case.spec, case.inputs(), case.cotangents(), algorithm)
    whole, seen, evaluate = make(), set(), evaluation.evaluate
    monkeypatch.setattr(evaluation, "_NEAR", 1)
    monkeypatch.setattr(evaluation, "evaluate", lambda *args: seen.add(args[-1].runs) or evaluate(*args))
    for name, limit in make().items():
        torch.testing.assert_close(limit.allowed, whole[name].allowed, rtol=1e-4, atol=0)
    assert seen == {1}


@pytest.mark.parametrize("more", ["dtype=bf16", "dtype=fp32", "op=kda dtype=fp16"])
@pytest.mark.parametrize("algorithm", ["chunkwise", "recurrent"])
@pytest.mark.slow
def test_a_finer_bound_is_the_same_from_one_evaluation_and_from_several(
    more: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.parse(f"lengths=20+7 packed=yes key_dim=4 value_dim=5 state=random gate=10 {more}")
    evaluate, tolerances = evaluation.evaluate, {}
    for count in (64, 8):
        seen: list[int] = []
        monkeypatch.setattr(evaluation, "at_once", lambda _, plain, __, count=count: min(plain.runs, count))
        monkeypatch.setattr(evaluation, "evaluate", lambda *args, seen=seen: seen.append(args[-1].runs) or evaluate(*args))
        limits = bounds(case.spec, case.inputs(), case.cotangents(), algorithm, chunk=16)
        finer = {name: limit.finer() for name, limit in limits.items() if limit.finer is not None}
        tolerances[count] = {name: limit.finer().allowed for name, limit in finer.items() if limit.finer is not None}
        coarse = algorithm == "chunkwise" and "fp32" not in more
        if count == 64:
            assert seen == [1, 4, *([16, 4, 48, 12] if coarse else [16, 48])]
        else:
            assert seen == [1, 4, *([8, 8, 4, *[8] * 6, 8, 4] if coarse else [8] * 8)]
        first = {name: limit.allowed for name, limit in limits.items()}
    assert tolerances[64].keys() == tolerances[8].keys() == first.keys()
    for name, allowed in tolerances[64].items():
        torch.testing.assert_close(allowed, tolerances[8][name], rtol=1e-4, atol=0)
        assert not torch.allclose(allowed, first[name], rtol=1e-3, atol=0), name


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("algorithm", ["chunkwise", "recurrent"])
@pytest.mark.slow_after_first
def test_a_packed_sequence_has_the_bounds_that_it_has_alone(
    operation: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its chunks are padded: padding loses nothing, and a state does not drift after its last token."""
    lengths = [9, 70, 0, 40]
    line = f"op={operation} heads=2 value_heads=4 key_dim=8 value_dim=13 gate=mixed state=random dtype=fp32 seed=9 packed=yes"
    case = Case.parse(f"{line} lengths={'+'.join(map(str, lengths))}")
    inputs, cotangents = case.inputs(), case.cotangents()
    places = [(slice(start, start + lengths[row]), slice(row, row + 1)) for row, start in enumerate(case.starts()[:-1])]

    def bounds_alone(tokens: slice, rows: slice) -> dict[str, Bound]:
        tensors = {name: x[:, tokens] for name, x in inputs.items() if name in ("q", "k", "v", "g", "beta") and x is not None}
        call = inputs.replaced(**tensors, state=inputs.state[rows], cu_seqlens=torch.tensor([0, tokens.stop - tokens.start]))
        directions = {"o": cotangents["o"][:, tokens], "final_state": cotangents["final_state"][rows]}
        return bounds(case.spec, call, directions, algorithm, chunk=64)

    alone = [bounds_alone(*place) for place in places]

    def off() -> dict[str, float]:
        """By output, the greatest factor between what is allowed packed and alone."""
        packed = bounds(case.spec, inputs, cotangents, algorithm, chunk=64)
        worst = dict.fromkeys(packed, 0.0)
        for (tokens, rows), limits in zip(places, alone, strict=True):
            for name, limit in limits.items():
                whole = packed[name].allowed
                part = whole[rows] if name in ("final_state", "dh0") else whole[:, tokens]
                worst[name] = max([worst[name], *(part / limit.allowed).log2().abs().flatten().tolist()])
        return worst

    # What is stored of all tokens [T, HV] together has a grid that goes by the place in it, in the even runs; and so has what is
    # stored of chunks of all tokens by all of them, where those of packed sequences are as long as the longest.
    placed = {"dg": 1.0, "dbeta": 1.0}
    assert {name: worst for name, worst in off().items() if worst > max(0.3, placed.get(name, 0.0))} == {}
    monkeypatch.setattr(disturbed, "alike", lambda lengths, sizes: sizes)
    assert {name: worst for name, worst in off().items() if worst > placed.get(name, 1e-3)} == {}
    if algorithm == "recurrent":
        make, forward = functools.partial(bounds, case.spec, inputs, cotangents, algorithm), in_steps.Recurrent.forward
        limit = make()["final_state"].allowed

        def forgets(*arguments: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(segments.Segment, "inside", lambda segment, axes: None)
                return forward(*arguments)

        monkeypatch.setattr(in_steps.Recurrent, "forward", forgets)
        assert (make()["final_state"].allowed / limit)[0].median() > 1.3, "padding that drifts is seen in the shortest"


@pytest.mark.slow
def test_float32_runs_spread_as_float64_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for products, first, more in (
        ("ieee", None, "dtype=bf16 gate=64"),
        ("ieee", None, "dtype=fp16 gate=mixed beta=two"),
        ("ieee", None, "dtype=bf16 gate=1000 beta=two values=correlated"),
        ("tf32", 16, "dtype=fp32 gate=64"),
        ("tf32", 16, "dtype=fp32 gate=1000 beta=two values=correlated"),
    ):
        case = Case.parse(f"lengths=130 value_heads=2 state=random qk_norm=yes seed=11 {more}")
        make = functools.partial(bounds, case.spec, case.inputs(), case.cotangents(), "chunkwise", products, 64, first)
        narrow = make()
        with monkeypatch.context() as patch:
            patch.setattr(in_chunks, "NARROW", torch.float64)
            wide = make()
        for name, limit in narrow.items():
            ratio = (limit.allowed / wide[name].allowed).flatten()
            assert not torch.equal(limit.allowed, wide[name].allowed), "both were computed"
            assert 0.95 < ratio.median() < 1.05, (more, name)
            few, most = ratio.quantile(0.05), ratio.quantile(0.95)  # a scalar row's runs may by chance all err little
            assert 0.5 < few <= most < 2, (more, name, few, most)
