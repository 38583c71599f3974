"""Bounds of the delta rules are positive, scale with the call, accept rounded truths, and reject a single wrong row."""

import dataclasses
import functools
import math
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.arithmetic.rounding import FP16_STEP, Arithmetic
from oracles.operation import DTYPES, Inputs
from oracles.operations import RULES
from oracles.tolerance.allowance import KAPPA
from oracles.tolerance.bound import Bound, bounds, truth
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from tests.over_bounds import NAMES, names
from tests.together import for_each

# Bounds

LINE = "lengths=70+9+0+1 packed=yes value_heads=2 value_dim=24 state=random qk_norm=yes seed=3"
MODES = (
    ("bf16", "chunkwise", "ieee"),
    ("fp16", "chunkwise", "ieee"),
    ("fp32", "chunkwise", "ieee"),
    ("fp32", "chunkwise", "tf32"),
    ("bf16", "recurrent", "ieee"),
    ("fp16", "recurrent", "ieee"),
    ("fp32", "recurrent", "ieee"),
)
KINDS = (
    *(("gated_delta_rule", *mode) for mode in MODES),
    *((name, *MODES[index]) for name in ("delta_rule", "kda") for index in (0, 3, 5)),
)


@functools.cache
def judged(operation: str, dtype: str, algorithm: str, products: str, more: str = "") -> tuple[Case, dict[str, Bound]]:
    """Of undeclared chunks unless there is more: where one length of chunks allows an error, several do."""
    case = Case.parse(f"op={operation} {LINE} dtype={dtype} {more or 'gate=64'}")
    chunk = 64 if more and algorithm == "chunkwise" else None
    return case, bounds(case.spec, case.inputs(), case.cotangents(), algorithm, products, chunk)


def off(case: Case, name: str, got: Tensor, limit: Bound) -> Tensor:
    """Which rows part from the truth by more than allowed."""
    error = got - limit.value
    return ~((error.abs() if case.spec.port(name).scalar_rows else error.norm(dim=-1)) <= limit.allowed)


def same_values(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return inputs.replaced(**{name: inputs[name].to(dtype) for name in ("q", "k", "v", "beta")})


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.slow_after_first
def test_every_output_and_gradient_has_its_truth_and_a_positive_bound(kind: tuple[str, str, str, str]) -> None:
    case, limits = judged(*kind)
    assert tuple(limits) == names(case.operation)
    want = truth(case.spec, case.inputs(), case.cotangents())
    for name, limit in limits.items():
        shape = limit.value.shape if case.spec.port(name).scalar_rows else limit.value.shape[:-1]
        assert limit.allowed.shape == shape
        assert (limit.allowed > 0).all()
        assert limit.allowed.isfinite().all()
        assert limit.origin == f"{KAPPA:g} times the expected rounding error"
        torch.testing.assert_close(limit.value, want[name], rtol=1e-11, atol=1e-13)
    without = bounds(case.spec, case.inputs(), None, *kind[2:])
    assert tuple(without) == NAMES[:2]
    for name, limit in without.items():
        torch.testing.assert_close(limit.allowed, limits[name].allowed, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.slow_after_first
def test_bound_rejects_zeros_a_zeroed_row_and_a_shifted_token(kind: tuple[str, str, str, str]) -> None:
    case, limits = judged(*kind)
    for name in names(case.operation):
        limit = limits[name]
        assert off(case, name, torch.zeros_like(limit.value), limit).double().mean() > 0.85, f"{name}: seven rows in eight are seen"
        axis = 2 if name in ("final_state", "dh0") else 1
        assert off(case, name, limit.value.roll(1, axis), limit).double().mean() > 0.6, name
        sizes = limit.value.abs() if case.spec.port(name).scalar_rows else limit.value.norm(dim=-1)
        place = tuple(int(index) for index in torch.unravel_index(sizes.argmax(), sizes.shape))
        for number in (0.0, math.nan):
            wrong = limit.value.clone()
            wrong[place] = number
            assert off(case, name, wrong, limit).nonzero().tolist() == [list(place)], f"{name}: that row and no other, {number}"


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.slow_after_first
@for_each("more", ["", "gate=1000 values=small", "gate=saturated values=zero_rows", "gate=10 gate_dtype=input"])
def test_bound_accepts_the_truth_rounded_once(kind: tuple[str, str, str, str], more: str) -> None:
    case, limits = judged(*kind, more)
    work, single = DTYPES[case.dtype], torch.float32
    gate = work if case.gate_dtype == "input" else single
    kinds = {"input": work, "gate": gate, "fp32": single}
    for name, limit in limits.items():
        rounded = limit.value.to(kinds[case.spec.port(name).dtype]).double()
        assert not off(case, name, rounded, limit).any(), name


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=2)
@given(
    case=cases(Domain(), longest=80, total=100, value_heads=2),
    mode=st.sampled_from((("chunkwise", "ieee"), ("chunkwise", "tf32"), ("recurrent", "ieee"))),
)
@example(case=Case.parse("lengths=0 packed=yes state=random dtype=fp16"), mode=("chunkwise", "ieee"))
@example(case=Case.parse("lengths=65 dtype=fp16 values=small gate=saturated beta=two state=random"), mode=("chunkwise", "ieee"))
@example(case=Case.parse("lengths=33 dtype=bf16 values=repeated beta=zero state=zero"), mode=("recurrent", "ieee"))
@example(case=Case.parse("lengths=16 key_dim=1 value_dim=1 qk_norm=yes values=zero_rows"), mode=("chunkwise", "tf32"))
@pytest.mark.slow
def test_bounds_are_positive_numbers_for_every_drawn_case(operation: str, case: Case, mode: tuple[str, str]) -> None:
    case = dataclasses.replace(case, operation=operation)
    limits = bounds(case.spec, case.inputs(), case.cotangents(), *mode)
    assert limits.keys() == {*names(operation)} - ({"dh0"} if case.state == "none" else set())
    for name, limit in limits.items():
        assert limit.value.isfinite().all(), name
        assert limit.allowed.isfinite().all(), name
        assert (limit.allowed > 0).all(), name


LINEAR = {  # name: whether it doubles with v and state, whether it doubles with the cotangents
    "o": (True, False),
    "final_state": (True, False),
    "dq": (True, True),
    "dk": (True, True),
    "dg": (True, True),
    "dbeta": (True, True),
    "dv": (False, True),
    "dh0": (False, True),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] != "fp16"], ids=" ".join)
@pytest.mark.slow_after_first
def test_bound_doubles_exactly_with_v_and_state_and_with_the_cotangents(kind: tuple[str, str, str, str]) -> None:
    case, limits = judged(*kind)
    inputs, cotangents = case.inputs(), case.cotangents()
    wide = inputs.replaced(v=2 * inputs.v, state=2 * inputs.state)
    values = bounds(case.spec, wide, cotangents, *kind[2:])
    turned = bounds(case.spec, inputs, {name: -2 * cotangent for name, cotangent in cotangents.items()}, *kind[2:])
    for name in limits:
        with_values, with_cotangents = LINEAR[name]
        assert torch.equal(values[name].allowed, limits[name].allowed * (2 if with_values else 1)), name
        assert torch.equal(turned[name].allowed, limits[name].allowed * (2 if with_cotangents else 1)), name
        assert torch.equal(turned[name].value, limits[name].value * (-2 if with_cotangents else 1)), name


def test_fp16_bounds_keep_the_subnormal_step_however_small_the_values() -> None:
    case = Case.parse("lengths=70 value_dim=24 gate=64 dtype=fp16")
    tiny = case.inputs().replaced(v=case.inputs().v * 2.0**-14)
    limit = bounds(case.spec, tiny, None, "chunkwise")["o"]
    assert (limit.allowed >= FP16_STEP * 24**0.5).all()
    other = bounds(case.spec, same_values(tiny, torch.bfloat16), None, "chunkwise")["o"]
    assert (other.allowed < FP16_STEP * 24**0.5).any()


@pytest.mark.slow
@for_each("name", NAMES)
def test_finer_arithmetic_has_finer_bounds(name: str) -> None:
    case = Case.parse(f"{LINE} gate=64 dtype=bf16")

    def allowed(dtype: str, algorithm: str, products: str = "ieee") -> Tensor:
        rows = allowed_for(case, dtype, algorithm, products)[name].allowed
        return rows[[0, 1, 3]] if name in ("final_state", "dh0") else rows  # an empty sequence computes nothing

    bf16, fp16, fp32 = (allowed(dtype, "chunkwise") for dtype in ("bf16", "fp16", "fp32"))
    assert (fp32 < bf16 / 100).all()
    assert (fp32 / bf16).median() < 2.0**-10
    assert 1 / 16 < (fp16 / bf16).median() < 1 / 5, "three bits"
    tf32 = allowed("fp32", "chunkwise", "tf32")
    assert (tf32 / fp32).median() > 100
    assert (tf32 < bf16).double().mean() > 0.95
    token_by_token = allowed("bf16", "recurrent")
    assert (token_by_token / bf16).median() < 0.6


@functools.cache
def allowed_for(case: Case, dtype: str, algorithm: str, products: str) -> dict[str, Bound]:
    """The bounds of the same numbers in another dtype."""
    inputs = same_values(case.inputs(), DTYPES[dtype])
    return bounds(case.spec, inputs, case.cotangents(), algorithm, products)


@pytest.mark.parametrize(
    ("algorithm", "name", "hard"),
    [
        ("chunkwise", "o", "values=correlated"),
        ("chunkwise", "o", "beta=two values=correlated"),
        ("chunkwise", "dk", "beta=two values=repeated"),
    ],
)
@pytest.mark.slow_after_first
def test_bounds_grow_with_the_condition_of_the_case(algorithm: str, name: str, hard: str) -> None:
    relative = []
    for more in ("", hard):
        case = Case.parse(f"lengths=130 gate=1000 dtype=fp32 state=random seed=5 {more}")
        limit = bounds(case.spec, case.inputs(), case.cotangents(), algorithm)[name]
        relative.append(float((limit.allowed / limit.value.norm(dim=-1)).median()))
    assert relative[1] > 2 * relative[0]


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
def test_gradient_of_a_gate_rounds_like_the_gate(operation: str) -> None:
    case = Case.parse(f"op={operation} lengths=70 gate=64 gate_dtype=input dtype=bf16 seed=4")
    inputs = case.inputs()
    single = inputs.replaced(g=inputs.g.float())
    coarse, fine = (bounds(case.spec, x, case.cotangents(), "recurrent") for x in (inputs, single))
    assert torch.equal(coarse["dg"].value, fine["dg"].value)
    assert (coarse["dg"].allowed / fine["dg"].allowed).median() > 100
    assert torch.equal(coarse["dbeta"].allowed, fine["dbeta"].allowed)


@for_each("operation", RULES)
def test_illegal_calls_have_neither_truth_nor_bounds(operation: str) -> None:
    case = Case.parse(f"op={operation} lengths=5+5 value_heads=2 state=random")
    inputs, cotangents = case.inputs(), case.cotangents()
    wrong: tuple[tuple[Inputs, dict[str, Tensor], str], ...] = (
        (inputs.replaced(k=inputs.k[:, :4]), cotangents, "k must have T = 5"),
        (inputs.replaced(state=inputs.state[:1]), cotangents, "state must have N = 2"),
        (inputs, cotangents | {"o": cotangents["o"][:, :4]}, r"cotangent of o must be \(2, 5, 2, 16\), got shape \(2, 4, 2, 16\)"),
        (inputs, {"y": cotangents["o"]}, "cotangent of y must be one of o, final_state, got shape"),
    )
    for illegal, directions, message in wrong:
        for ask in (truth, functools.partial(bounds, algorithm="chunkwise")):
            with pytest.raises(ValueError, match=f"^{message}"):
                ask(case.spec, illegal, cotangents=directions)
    message = f"^algorithm must be one of chunkwise, recurrent for {operation}, got 'pointwise'$"
    with pytest.raises(ValueError, match=message):
        bounds(case.spec, inputs, cotangents, "pointwise")


@pytest.mark.slow
def test_finer_bound_is_the_same_from_more_runs() -> None:
    _, limits = judged("gated_delta_rule", "bf16", "chunkwise", "ieee")
    for limit in limits.values():
        assert limit.finer is not None
        finer = limit.finer()
        assert torch.equal(finer.value, limit.value)
        ratio = (finer.allowed / limit.allowed).flatten()
        assert 0.8 < ratio.median() < 1.25
        assert not torch.equal(finer.allowed, limit.allowed)
        some = limit.at(slice(0, 1), slice(0, 2))
        assert torch.equal(some.value, limit.value[:1, :2])
        assert torch.equal(some.allowed, limit.allowed[:1, :2])
        assert some.finer is not None
        assert torch.equal(some.finer().allowed, finer.allowed[:1, :2])
        twice = limit.plus(limit)
        assert torch.equal(twice.allowed, 2 * limit.allowed)
        assert torch.equal(twice.value, 2 * limit.value)
        assert twice.finer is not None
        assert torch.equal(twice.finer().allowed, 2 * finer.allowed)
        beside = limit.beside(limit)
        assert torch.equal(beside.allowed, 2 * limit.allowed)
        assert torch.equal(beside.value, limit.value)
        assert beside.finer is not None
        assert torch.equal(beside.finer().allowed, 2 * finer.allowed)
    plain = Bound(limits["o"].value, limits["o"].allowed)
    assert plain.at(0).finer is None
    assert plain.plus(limits["o"]).finer is None
    assert plain.beside(limits["o"]).finer is None


def test_chunks_are_those_of_the_implementation_or_several() -> None:
    case = Case.parse("lengths=130 gate=64 dtype=bf16 seed=7")
    inputs = case.inputs()
    known = {chunk: bounds(case.spec, inputs, None, "chunkwise", chunk=chunk)["o"].allowed for chunk in (16, 64, 128)}
    unknown = bounds(case.spec, inputs, None, "chunkwise")["o"].allowed
    assert len({float(allowed.sum()) for allowed in (*known.values(), unknown)}) == 4
    ratio = unknown / torch.stack([*known.values()]).square().mean(0).sqrt()
    assert ((ratio > 0.5) & (ratio < 2)).double().mean() > 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["chunkwise", "recurrent"])
@pytest.mark.parametrize(("dtype", "products"), [("bf16", "ieee"), ("fp16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32")])
def test_disturbed_runs_do_not_wait_for_a_gpu(algorithm: str, dtype: str, products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads the offsets of a call, and then only launches, however many chunks there are. A wait in each is seen."""

    def waits(length: int) -> int:
        case = Case((length, 20), packed=True, state="random", dtype=dtype)
        call = case.spec, case.inputs("cuda"), case.cotangents("cuda"), algorithm, products, 64
        bounds(*call)  # fills the caches
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                bounds(*call)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return len(caught)

    assert max(waits(16 * 64), waits(2 * 64)) <= 8
    plain = Arithmetic.dither

    def waiting(self: Arithmetic, x: Tensor, place: str, bits: int | None = None) -> Tensor:
        return plain(self, x, place, bits) + torch.tensor(0.0, device=x.device)

    monkeypatch.setattr(Arithmetic, "dither", waiting)
    assert waits(16 * 64) > 16
