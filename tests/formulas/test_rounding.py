"""The rounding model rounds as hardware does, differently in each place and run, and the same in every call."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.arithmetic import grids, rounding, words
from oracles.arithmetic.rounding import BITS, FP16_STEP, Arithmetic
from oracles.operation import DTYPES
from tests.roundings import arithmetic, numbers
from tests.together import for_each

ROWS = 4096


# The dither


@pytest.fixture
def plain_grid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every grid s of the even runs is 1: what is left is round-to-nearest."""
    _forget_grids()
    monkeypatch.setattr(grids, "_table", lambda device, turns=1: torch.ones(turns * 2**20, dtype=torch.float64, device=device))
    monkeypatch.setattr(grids, "_known", lambda: [1.0] * 2**20)
    yield
    _forget_grids()


def _forget_grids() -> None:
    for cache in (grids.numbers_of, grids.grid_of):
        cache.clear()


@pytest.mark.usefixtures("plain_grid")
@for_each("dtype", ["bf16", "fp16", "fp32"])
def test_on_the_plain_grid_rounding_is_the_cast(dtype: str) -> None:
    x = numbers(5, 64, 64)
    want = x[0].to(DTYPES[dtype]).double()
    got = arithmetic(dtype, 5).dither(x, "place", BITS[dtype])
    for run in (2, 4):
        assert torch.equal(got[run], want)
    assert not torch.equal(x[0], want)
    assert not torch.equal(arithmetic(dtype, 5).dither(x, "place", BITS[dtype] + 1)[2], want), "one bit more is not the cast"


@pytest.mark.usefixtures("plain_grid")
def test_on_the_plain_grid_fp16_subnormals_are_multiples_of_their_step() -> None:
    x = numbers(3, 64, 64, low=-30, high=-12)
    got = arithmetic("fp16", 3).dither(x, "place")[2]
    assert torch.equal((got / FP16_STEP).round(), got / FP16_STEP)
    assert torch.equal(got, x[0].half().double()), "rounded once"
    assert ((got - x[0]).abs() <= FP16_STEP / 2 + x[0].abs() * 2.0**-11).all()
    without = arithmetic("bf16", 3).dither(x, "place", BITS["fp16"])[2]
    assert not torch.equal(without, got)


@for_each("dtype", ["bf16", "fp16", "fp32"])
def test_first_run_is_untouched_to_the_bit(dtype: str) -> None:
    for shape in ((3,), (2, 5), (2, 3, 7), (4, 2, 16, 16)):
        x = numbers(9, *shape, low=-40, high=40)
        x[..., 0] = 0.1
        got = arithmetic(dtype).dither(x, "place")
        assert torch.equal(got[0], x[0])
        assert all(not torch.equal(got[run], x[run]) for run in range(1, 9))


@for_each(("dtype", "bits"), [("bf16", 8), ("fp16", 11), ("fp32", 24), ("tf32", 10)])
def test_errors_are_unbiased_and_of_the_size_of_a_rounding(dtype: str, bits: int) -> None:
    x = numbers(9, 1, ROWS, 8)
    error = (arithmetic("fp32").dither(x, f"place {dtype}", bits) - x) / x / 2.0**-bits
    for run in range(1, 9):
        assert error[run].abs().max() <= 1 + 1e-6, "to nearest: half a unit in the last place"
        assert 0.38 < error[run].square().mean().sqrt() < 0.47, "uniform in a unit of the last place of 1 to 2: 0.425"
        assert abs(float(error[run].mean())) < 5 * 0.43 / math.sqrt(error[run].numel())


def test_chopping_would_be_seen_as_bias() -> None:
    x = numbers(1, 1, ROWS, 8)[0]
    chopped = (x.float().view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    assert abs(float(((chopped - x) / x / 2.0**-8).mean())) > 0.3


def test_equal_values_get_equal_errors_in_odd_runs_only() -> None:
    x = torch.full((9, 3, 16, 16), math.pi, dtype=torch.float64)
    got = arithmetic().dither(x, "place")
    for run in range(1, 9):
        distinct = len(got[run].unique())
        assert distinct == 1 if run % 2 else distinct > 100
    odd = [float(got[run].flatten()[0]) for run in (1, 3, 5, 7)]
    assert len(set(odd)) == 4, "runs differ"
    assert len({float(arithmetic().dither(x, f"place {n}")[1].flatten()[0]) for n in range(8)}) == 8, "places differ"


def test_odd_runs_never_all_round_a_value_well() -> None:
    x = torch.full((9, 1, 1), math.pi, dtype=torch.float64)
    errors = torch.stack([((arithmetic().dither(x, f"place {n}") - x) / x)[1::2].flatten() for n in range(1000)]) / 2.0**-8
    assert errors.square().mean(-1).sqrt().min() > 0.08
    assert abs(float(errors.mean())) < 0.03


def test_even_runs_differ_by_position_in_the_last_two_axes() -> None:
    x = torch.full((3, 5, 8, 8), math.pi, dtype=torch.float64)
    even = arithmetic(runs=3).dither(x, "place")[2]
    assert all(torch.equal(even[0], matrix) for matrix in even[1:])
    assert not torch.equal(even[:, 0], even[:, 1])
    assert not torch.equal(even[..., 0], even[..., 1])


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(("bf16", "fp16", "fp32")),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    place=st.lists(st.sampled_from("az_0#"), max_size=8).map("".join),
)
def test_zero_stays_zero_signs_turn_and_twice_is_twice(dtype: str, shape: list[int], place: str) -> None:
    rule = arithmetic(dtype, 5)
    zeros = torch.zeros(5, *shape, dtype=torch.float64)
    assert torch.equal(rule.dither(zeros, place), zeros)
    x = numbers(5, *shape)
    assert torch.equal(rule.dither(-x, place), -rule.dither(x, place))
    if dtype != "fp16":  # whose subnormal step is absolute
        assert torch.equal(rule.dither(2 * x, place), 2 * rule.dither(x, place))


def test_rounding_a_rounded_number_again_changes_nothing() -> None:
    once = arithmetic().dither(numbers(9, 4, 8, 8), "place")
    twice = arithmetic().dither(once, "place")
    assert (twice - once).abs().max() < 1e-15 * once.abs().max()
    other = arithmetic().dither(once, "another place")
    assert (other - once)[1:].abs().amax((-1, -2, -3)).min() > 2.0**-10


def test_infinities_and_nan_stay_not_finite() -> None:
    x = torch.tensor([1.0, math.inf, math.nan], dtype=torch.float64).expand(3, 1, 3)
    assert not arithmetic(runs=3).dither(x, "place")[..., 1:].isfinite().any()


def test_dither_is_the_same_in_every_call_and_uses_no_random_numbers() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    x = numbers(5, 6, 6)
    first = arithmetic("bf16", 5).dither(x, "place")
    torch.manual_seed(2)
    _forget_grids()
    assert torch.equal(arithmetic("bf16", 5).dither(x, "place"), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_grids_wrap_around_the_table() -> None:
    place = next(f"place {n}" for n in range(10**6) if _start(f"place {n}", 2) > 2**20 - 30)
    x = torch.full((3, 1, 6, 10), math.pi, dtype=torch.float64)
    got = arithmetic("fp32", 3).dither(x, place, 30)[2].flatten()
    table = grids._table(torch.device("cpu"))
    assert ((table >= 1) & (table < 2)).all()
    wrapped, ended = (_start(place, 2) + torch.arange(60)) % 2**20, (_start(place, 2) + torch.arange(60)).clamp(max=2**20 - 1)

    def rounded(grid: Tensor) -> Tensor:
        high = math.pi * (grid * (2.0**23 + 1))
        return (high - (high - math.pi * grid)) / grid

    assert (got - rounded(table[wrapped])).abs().max() < 1e-14
    assert (got - rounded(table[ended])).abs().max() > 1e-11, "rounding to 30 bits errs by 2^-30"


def test_grids_do_not_depend_on_the_shapes_that_share_them() -> None:
    for first, later in (((9, 3), (40, 30)), ((40, 30), (9, 3)), ((200, 300), (9, 3)), ((9, 3), (300, 300))):
        _forget_grids()
        arithmetic("fp32").dither(numbers(9, *first), "place", 20)
        shared = arithmetic("fp32").dither(numbers(9, *later), "place", 20)
        _forget_grids()
        assert torch.equal(arithmetic("fp32").dither(numbers(9, *later), "place", 20), shared)


@pytest.mark.parametrize(("bits", "dtype"), [(24, torch.float64), (8, torch.float64), (8, torch.float32)])
def test_a_cast_rounds_as_clearing_bits_does(bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the grid's rounding is a dtype's own, the runs that round take its cast."""
    rule, x = dataclasses.replace(arithmetic("fp32", 4), first=1), numbers(4, 3, 32, 32).to(dtype)
    cast = rule.dither(x, "place", bits)
    with monkeypatch.context() as patch:
        patch.setattr(rounding, "CASTS", {})
        assert torch.equal(rule.dither(x, "place", bits), cast)
    assert not torch.equal(x, cast)


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gpu_rounds_in_one_launch_to_the_same_bits(
    dtype: torch.dtype, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, *, plain: bool
) -> None:
    """On the plain grid half of the numbers lie half way between two; and the words of the kernel's that say so are seen."""
    if plain:
        request.getfixturevalue("plain_grid")
    device = torch.device("cuda", torch.cuda.current_device())
    assert rounding.fused(device) is not None
    digits = words.MANTISSA[dtype]

    def parted() -> set[Any]:
        found = set()
        for bits in (8, 10, 11, 20, 24):
            rules = [*(arithmetic(name, 4) for name in ("fp16", "bf16", "fp32")), arithmetic("fp32", 4, products="tf32")]
            for rule in (dataclasses.replace(rule, first=1) for rule in rules):
                x = numbers(4, 3, 2, 8, 12, low=-40, high=10)
                grain = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - bits - 1)
                x = ((x / grain).round() * grain).to(dtype)
                there = x.to(device)
                pairs = {"dither": (rule.dither(x, "place", bits), rule.dither(there, "place", bits))}
                for places in (("a", "b"), ("c", "d")):
                    precisions = (bits, digits if bits == 24 else 21)
                    pairs[f"stacked {places}"] = (rule.stacked(x, places, precisions), rule.stacked(there, places, precisions))
                wide = x[:, :, 0], there[:, :, 0]
                pairs["beside"] = tuple(rule.beside(tensor, ("e", "f"), (7, 5), (bits, 11)) for tensor in wide)
                pairs["rough"] = tuple(rule.rough(tensor, rule.grid(tensor, "g")[0]) for tensor in (x, there))
                found |= {
                    (name, bits, rule.stored, rule.product)
                    for name, (here, far) in pairs.items()
                    if not torch.equal(here, far.cpu())
                }
        return found

    assert parted() == set()
    if plain:
        for right, wrong in (("0x7fff + ((narrow.word >> 16) & 1)", "0x8000"), ("(int) low - 1", "(int) low - 2")):
            with monkeypatch.context() as patch:
                patch.setattr(words, "FUSED", words.FUSED.replace(right, wrong))
                patch.setattr(rounding, "fused", functools.cache(rounding.fused.__wrapped__))
                assert parted()


@pytest.mark.usefixtures("plain_grid")
@for_each(("dtype", "digits"), [(torch.float64, 53), (torch.float32, 24)])
@for_each("bits", [8, 10, 11, 20, 21])
def test_clearing_bits_rounds_as_splitting_does(bits: int, dtype: torch.dtype, digits: int) -> None:
    x = numbers(2, 64, 64)[1].to(dtype)
    high = (2.0 ** (digits - bits) + 1.0) * x  # Veltkamp's splitting: round to nearest (Dekker 1971)
    want = high - (high - x)
    got = dataclasses.replace(arithmetic("bf16", 2), first=1).dither(torch.stack([x, x]), "place", bits)[1]
    half = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - bits - 1)
    tie = (x - want).abs() == half
    assert torch.equal(torch.where(tie, x + x.sign() * half, want), got), "ties go away from zero"
    assert tie.double().mean() < 0.2


@for_each("bits", [8, 11, 21])
@for_each("dtype", [torch.float64, torch.float32])
def test_several_places_at_once_round_as_each_by_itself(dtype: torch.dtype, bits: int) -> None:
    for rule in (arithmetic("fp16", 5), dataclasses.replace(arithmetic("fp16", 4), first=1)):
        x = numbers(rule.runs, 3, 2, 8, 12).to(dtype)
        one, other = x[:, :, 0], x[:, :, 1]
        want = rule.dither(one, "one", bits), rule.dither(other, "other", bits)
        stacked = rule.stacked(x, ("one", "other"), bits)
        assert torch.equal(stacked, torch.stack(want, -3))
        assert torch.equal(rule.stacked(x.movedim(-3, 1).contiguous(), ("one", "other"), bits, -4), torch.stack(want, 1))
        both = rule.stacked(one.unsqueeze(-3), ("one", "other"), bits)
        assert torch.equal(both, torch.stack([want[0], rule.dither(one, "other", bits)], -3))
        assert not torch.equal(both[:, :, 0], both[:, :, 1]), "places differ"
        narrow = rule.dither(other[..., :5], "other", bits)
        assert torch.equal(
            rule.beside(torch.cat([one, other[..., :5]], -1), ("one", "other"), (12, 5), bits), torch.cat([want[0], narrow], -1)
        )
    exact = Arithmetic.exact()
    assert exact.stacked(x, ("one", "other")) is x
    assert exact.beside(x, ("one", "other"), (10, 2)) is x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_several_places_may_each_have_bits_of_their_own(dtype: torch.dtype) -> None:
    for rule in (arithmetic("fp16", 5), dataclasses.replace(arithmetic("bf16", 4), first=1)):
        x, bits = numbers(rule.runs, 3, 3, 8, 12).to(dtype), (11, 21, 10)
        want = [rule.dither(x[:, :, at], name, digits) for at, (name, digits) in enumerate(zip("abc", bits, strict=True))]
        got = rule.stacked(x, ("a", "b", "c"), bits)
        assert torch.equal(got, torch.stack(want, -3))
        assert not torch.equal(got, rule.stacked(x, ("a", "b", "c"), 21))
        assert torch.equal(rule.stacked(x.movedim(-3, 1).contiguous(), ("a", "b", "c"), bits, -4), torch.stack(want, 1))
        side = torch.cat([x[:, :, 0], x[:, :, 1, :, :5]], -1)
        other = rule.dither(x[:, :, 1, :, :5], "b", 21)
        assert torch.equal(rule.beside(side, ("a", "b"), (12, 5), (11, 21)), torch.cat([want[0], other], -1))
        finest = rule.stacked(x, ("a", "b", "c"), (53, 53, 11))
        assert ((finest - x)[:, :, :2].abs() <= 2.0 ** (3 - (53 if dtype == torch.float64 else 24)) * x[:, :, :2].abs()).all()
        assert rule.stacked(x, ("a", "b", "c"), (53, 53, 53)).equal(x)


@for_each("dtype", ["bf16", "fp16", "fp32"])
def test_what_is_rounded_on_a_grid_and_divided_by_it_later_is_the_dither(dtype: str) -> None:
    kind = torch.float64 if dtype == "fp32" else torch.float32
    for rule in (arithmetic(dtype, 5), dataclasses.replace(arithmetic(dtype, 4), first=1)):
        x = numbers(rule.runs, 3, 8, 12, low=-20).to(kind)
        grid, back = rule.grid(x, "place")
        rough = rule.rough(x, grid)
        assert torch.equal(rough * back, rule.dither(x, "place"))
        assert not torch.equal(rough, x * grid)
        later = numbers(1, 3, 8, 1).to(kind)
        twice = rule.rough(rough, back * rule.grid(x, "another")[0] * later) * rule.grid(x, "another")[1]
        want = rule.dither(rule.dither(x, "place") * later, "another")
        off = (twice - want).abs() > 1e-6 * want.abs()
        assert off.double().mean() < 0.01, "but for numbers half way between two, which another order of products may turn"
        assert not torch.equal(twice, rule.dither(x * later, "another"))
    exact = Arithmetic.exact()
    assert all((factor == 1).all() for factor in exact.grid(x, "place"))
    assert torch.equal(exact.rough(x, x), x * x)


@for_each("dtype", ["bf16", "fp16", "fp32"])
def test_runs_evaluated_in_parts_are_those_evaluated_together(dtype: str) -> None:
    x = numbers(8, 3, 8, 8)
    for runs in (2, 4, 8, 24):
        rule, copies = dataclasses.replace(arithmetic(dtype, runs), first=1, chunk=64), x[:1].expand(runs, *x.shape[1:])
        for size in (1, 2, runs // 2):
            parts = [dataclasses.replace(rule, runs=size, first=first, last=runs) for first in range(1, runs + 1, size)]
            for method in (
                lambda part, x: part.dither(x, "place", 8),
                lambda part, x: part.drift(x, "place"),
                lambda part, x: part.choice(x),
            ):
                together = torch.cat([method(part, copies[part.first - 1 :][:size]) for part in parts])
                assert torch.equal(together, method(rule, copies))


def test_odd_runs_of_each_set_are_stratified() -> None:
    """However many runs: of eight, each quarter of a unit in the last place has the grid of one."""
    rule, values = dataclasses.replace(arithmetic("bf16", 64), first=1), torch.ones(64, 1, 1, dtype=torch.float64)
    for place in ("place", "another place"):
        grid, _ = rule.grids(values, (place,), 8, 0.0, None, ())
        for word, odd in enumerate(grid.flatten()[::2].reshape(8, 4)):
            base = grids._known()[zlib.crc32(f"{place}#{word}".encode()) % 2**20]
            assert sorted(((odd / base - 1.0) * 2.0**7 * 4).floor().tolist()) == [0, 1, 2, 3]
        assert len(grid.unique()) == 64, "sets differ"


def test_grids_are_kept_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def make(name: str, size: int) -> tuple[Tensor, Tensor]:
        computed.append(name)
        return torch.ones(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)

    monkeypatch.setattr(grids, "_cache_limit", lambda device: 2 * 8 * 100)
    get = grids.cached(make)
    for name, size in (("small", 10), ("large", 13), ("small", 10), ("large", 13)):
        assert len(get(name, size)[0]) == size
    assert computed == ["small", "large", "large"], "what takes over an eighth is not kept"
    for name in "abcdefgh":
        get(name, 12)
    get("h", 12)
    get("b", 12)
    assert computed[3:] == list("abcdefgh"), "a hundred numbers are two small ones and eight of twelve: all but the first are there"
    get("small", 10)
    assert computed[-1] == "small", "the first made is the first forgotten"
    get("a", 12)
    assert computed[-1] == "a"
    get.clear()
    get("a", 12)
    assert computed[-2:] == ["a", "a"]


def _start(place: str, run: int) -> int:
    return (zlib.crc32(f"{place}#0".encode()) + 7919 * run * (run + 12)) % 2**20


def test_runs_from_the_first_on_are_those_of_run_zero_and_others() -> None:
    x = numbers(9, 2, 8, 8)
    for dtype in ("bf16", "fp16", "fp32"):
        all_runs, rounding_ones = arithmetic(dtype), dataclasses.replace(arithmetic(dtype, 8), first=1)
        assert torch.equal(rounding_ones.dither(x[1:], "place"), all_runs.dither(x, "place")[1:])
    alone = dataclasses.replace(arithmetic(runs=1), first=1)
    assert alone.rounds
    assert not torch.equal(alone.dither(x[:1], "place"), x[:1]), "a single run that is not run 0 rounds"
    assert not Arithmetic.exact().rounds


@for_each(("dtype", "bits"), [("bf16", 8), ("fp16", 11), ("bf16", 21)])
def test_float32_runs_round_to_as_many_bits_as_float64_ones(dtype: str, bits: int) -> None:
    rule = dataclasses.replace(arithmetic(dtype, 8), first=1)
    x = numbers(8, 1, ROWS, 8).float().double()
    error = (rule.dither(x.float(), "place", bits).double() - x) / x / 2.0**-bits
    slack = 2.0 ** (bits - 23)  # float32's own roundings of x s and of its quotient
    for run in error:
        assert run.abs().max() <= 1 + 2 * slack
        assert 0.38 < run.square().mean().sqrt() < 0.47 + slack
        assert abs(float(run.mean())) < 5 * 0.43 / math.sqrt(run.numel()) + slack
    assert rule.dither(x.float(), "place", 24).equal(x.float()), "float32 itself rounds to 24"


@pytest.mark.usefixtures("plain_grid")
def test_float32_runs_of_half_precision_round_as_the_casts_do() -> None:
    x = numbers(2, 64, 64, low=-30, high=8).float()
    for dtype in ("bf16", "fp16"):
        got = dataclasses.replace(arithmetic(dtype, 2), first=1).dither(x, "place")[1]
        off = (got - x[0].to(DTYPES[dtype]).float()).abs()
        assert (off > 0).double().mean() < (2.0**-8 if dtype == "fp16" else 2.0**-63), "fp16's ties go away from zero"
        assert (off <= (x[0].abs() * 2.0 ** (1 - BITS[dtype])).clamp(min=FP16_STEP)).all()


def test_drift_is_the_same_at_every_step_in_odd_runs_only() -> None:
    x = numbers(8, 3, 40, 6)
    drift = dataclasses.replace(arithmetic("fp32", 8), first=1).drift(x, "place")
    assert drift.shape == (8, 1, 40, 6)
    assert 0.9 < drift.abs().max() / 2.0**-24 <= 1
    assert 0.5 < (drift[1::2] / 2.0**-24).square().mean().sqrt() < 0.65, "uniform: 0.58"
    for run, values in enumerate(drift, 1):
        assert torch.equal(values[:, :1].expand_as(values), values) == (run % 2 == 1)
        assert len(values[0, 0].unique()) == 6, "channels differ"
    assert (arithmetic("fp32").drift(x, "place")[0] == 0).all()
