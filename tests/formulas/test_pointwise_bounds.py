"""Bounds of the convolution, the gates and the norms hold for right implementations and reject wrong ones."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracles.arithmetic.rounding import Arithmetic
from oracles.gates import shared
from oracles.tolerance import evaluation
from oracles.tolerance.bound import bounds, truth
from tests.judging import Implementation, evaluate, worst
from tests.pointwise_calls import DTYPES, OPERATIONS, agree, drawn, rand, telling
from tests.pointwise_readings import RIGHT, STORED, WRONG
from tests.together import for_each

# The bounds


@for_each("dtype", DTYPES)
@for_each("name", OPERATIONS)
def test_run_0_of_the_disturbed_arithmetic_is_the_truth_and_the_others_are_not(name: str, dtype: str) -> None:
    inputs, directions = telling(name, DTYPES[dtype])
    want = truth(OPERATIONS[name], inputs, directions)
    got = evaluation.evaluate(OPERATIONS[name], inputs, directions, Arithmetic.of("pointwise", dtype, runs=3))
    in_order = name != "causal_conv1d"  # whose dx is the same sum in another order
    assert agree({key: runs[0] for key, runs in got.items()}, want, exactly=in_order)
    same = {key for key, runs in got.items() if torch.equal(runs[1], runs[0]) or torch.equal(runs[2], runs[1])}
    assert same == ({"final_state"} if name == "causal_conv1d" else set()), "the final state is copied, everything else rounds"


@for_each("name", OPERATIONS)
def test_half_precision_rounds_alike_where_the_layer_calls_it(name: str) -> None:
    inputs, directions = telling(name, torch.bfloat16)
    alone, within = (
        evaluation.evaluate(OPERATIONS[name], inputs, directions, Arithmetic.of(algorithm, "bf16", runs=4))
        for algorithm in ("pointwise", "chunkwise")
    )
    assert agree(alone, within, exactly=True)
    single = evaluation.evaluate(OPERATIONS[name], inputs, directions, Arithmetic.of("pointwise", "fp32", runs=4))
    assert not agree(alone, single, exactly=True)


def test_gradient_of_a_shared_parameter_errs_by_its_terms_and_not_by_its_sum() -> None:
    arithmetic = Arithmetic.of("pointwise", "fp32", runs=9)
    parameter = torch.ones(9, 1, 3, dtype=torch.float64, requires_grad=True)
    terms = rand(torch.Generator().manual_seed(2), 1, 500, 3).expand(9, 500, 3)
    terms = torch.cat([terms, -terms], 1)  # they cancel: the sum is zero, and what float32 makes of it is not
    (gradient,) = torch.autograd.grad(shared(parameter, terms.shape, arithmetic, "d"), parameter, terms)
    assert (gradient[0].abs() < 1e-12).all()
    spread = gradient[1:].square().mean(0).sqrt()
    reach = (
        terms[0].square().sum(0).sqrt() * 1000**0.5
    )  # the terms are rounded by this many times 2^-24, of which 0.4 is the spread
    assert ((spread > 0.2 * 2.0**-24 * reach) & (spread < 2.0 * 2.0**-24 * reach)).all(), spread / reach * 2.0**24


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.slow
def test_bounds_hold_for_right_implementations(name: str, record_property: Callable[[str, object], None]) -> None:
    found: dict[str, tuple[float, str, int]] = {}
    for seed in range(100):
        dtype = tuple(DTYPES)[seed // 7 % 3]
        inputs, directions = drawn(name, seed, DTYPES[dtype])
        limits = bounds(OPERATIONS[name], inputs, directions, "pointwise")
        for right, implementation in RIGHT[name].items():
            ratio, where = worst(OPERATIONS[name], limits, evaluate(OPERATIONS[name], implementation, inputs, directions))
            found[f"{right} {dtype}"] = max(found.get(f"{right} {dtype}", (0.0, "", 0)), (ratio, where, seed))
    line = "; ".join(f"{label} {ratio:.2f} ({where}, {seed})" for label, (ratio, where, seed) in found.items())
    record_property(f"error / allowed, {name}", line)
    print(f"{name}: error / allowed at most {line}")
    assert len(found) == 6
    assert max(ratio for ratio, _, _ in found.values()) <= 1.0, line
    assert min(ratio for ratio, _, _ in found.values()) > 0.01, f"a bound a hundred times too wide: {line}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.slow_after_first
def test_bound_rejects_wrong_implementations(name: str, dtype: str) -> None:
    operation = OPERATIONS[name]
    inputs, directions = telling(name, DTYPES[dtype])
    limits = bounds(operation, inputs, directions, "pointwise")

    def ratio(implementation: Implementation) -> float:
        return worst(operation, limits, evaluate(operation, implementation, inputs, directions))[0]

    rows = [(wrong, implementation, reading) for of, wrong, implementation, reading in WRONG if of == name]
    assert rows
    assert all(ratio(implementation) <= 1.0 for _, implementation, _ in rows)
    ratios = {wrong: ratio(functools.partial(implementation, **reading)) for wrong, implementation, reading in rows}
    assert {wrong: ratio for wrong, ratio in ratios.items() if ratio <= 5.0} == {}


@for_each(("name", "implementation", "reading"), STORED)
def test_bound_rejects_what_was_stored_in_bfloat16_on_the_way_of_a_float32_call(
    name: str, implementation: Implementation, reading: dict[str, Any]
) -> None:
    operation = OPERATIONS[name]
    inputs, directions = telling(name, torch.float32)
    limits = bounds(operation, inputs, directions, "pointwise")
    got = evaluate(operation, functools.partial(implementation, **reading), inputs, directions)
    assert worst(operation, limits, got)[0] > 100


@for_each("dtype", DTYPES)
@for_each("name", OPERATIONS)
def test_bound_rejects_zeros_one_zeroed_row_and_a_shift_by_a_token(name: str, dtype: str) -> None:
    operation = OPERATIONS[name]
    inputs, directions = telling(name, DTYPES[dtype])
    limits = bounds(operation, inputs, directions, "pointwise")
    right = {key: limit.value for key, limit in limits.items()}
    assert worst(operation, limits, right)[0] == 0.0
    for key, value in right.items():
        largest = value.flatten(0, -2) if not operation.port(key).scalar_rows and value.ndim > 1 else value.flatten()
        row = int(largest.flatten(1).norm(dim=1).argmax()) if largest.ndim > 1 else int(largest.abs().argmax())
        zeroed = largest.clone()
        zeroed[row] = 0.0
        token = 1 if value.ndim > 2 and operation.port(key).axes.startswith("B T") else 0
        for wrong in (torch.zeros_like(value), zeroed.reshape(value.shape), value.roll(1, token)):
            assert worst(operation, limits, {**right, key: wrong})[0] > 1.0, key


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.parallel])
def test_call_may_be_cut_along_its_parallel_axes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, directions = telling(name, torch.float32)
    whole = bounds(OPERATIONS[name], inputs, directions, "pointwise")
    monkeypatch.setattr(evaluation, "_BATCH", {"cpu": 1})
    cut = bounds(OPERATIONS[name], inputs, directions, "pointwise")
    assert agree(
        {key: limit.value for key, limit in cut.items()}, {key: limit.value for key, limit in whole.items()}, exactly=False
    )
