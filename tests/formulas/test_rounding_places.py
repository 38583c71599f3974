"""Each place of the rounding model rounds values, their gradients or both, to as many bits as its class of algorithm keeps."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracles.arithmetic.rounding import BITS, EXACT, FP16_STEP, Arithmetic, summed
from oracles.norm import Normalised
from oracles.tolerance import bound
from tests.roundings import arithmetic, numbers
from tests.together import for_each

# Places: what rounds ahead and what rounds back

Place = Callable[[Arithmetic, Tensor], Tensor]
PLACES: dict[str, tuple[Place, int, int]] = {  # bits ahead and back for bf16 chunkwise
    "operand": (lambda rule, x: rule.operand(x, "p"), 8, 8),
    "use": (lambda rule, x: rule.use(x, "p"), EXACT, 8),
    "input": (lambda rule, x: rule.input(x, "p"), EXACT, 8),
    "single": (lambda rule, x: rule.single(x, "p"), 24, 24),
    "single of 64": (lambda rule, x: rule.single(x, "p", 64), 21, 21),
    "sums of 64": (lambda rule, x: rule.sums(x, "p", 64), EXACT, 21),
    "result": (lambda rule, x: rule.result(x, "p"), 8, EXACT),
    "gradient of 11 bits": (lambda rule, x: rule.gradient(x, "p", 11), EXACT, 11),
}


def is_rounded(got: Tensor, x: Tensor, bits: int) -> None:
    """Run 0 is x; the others are x rounded to `bits`, or x where nothing rounds."""
    assert torch.equal(got[0], x[0])
    if bits == EXACT:
        assert torch.equal(got, x)
        return
    error = ((got - x)[1:] / x[1:]).abs()
    assert error.max() <= 2.0**-bits * (1 + 1e-6)
    assert error.max() > 0.9 * 2.0**-bits


@for_each("name", PLACES)
def test_place_rounds_the_value_and_its_cotangent_as_it_says(name: str) -> None:
    place, ahead, back = PLACES[name]
    x, cotangent = numbers(9, 2, 32, 32).requires_grad_(), numbers(9, 2, 32, 32) * 0.7
    got = place(arithmetic(), x)
    is_rounded(got.detach(), x.detach(), ahead)
    (gradient,) = torch.autograd.grad(got, x, cotangent)
    is_rounded(gradient, cotangent, back)
    if ahead == back:
        same_errors = torch.equal(place(arithmetic(), cotangent).detach(), gradient)
        assert not same_errors, "backward is another place"


@for_each("bits", ["bf16", "fp16"])
@for_each("dtype", ["bf16", "fp16", "fp32"])
def test_a_gradient_in_another_dtype_has_that_dtypes_step(dtype: str, bits: str) -> None:
    x, cotangent = numbers(9, 64, 64).requires_grad_(), numbers(9, 64, 64, low=-30, high=8)
    got = arithmetic(dtype).gradient(x, "p", BITS[bits])
    off = (torch.autograd.grad(got, x, cotangent)[0] - cotangent).abs()[1:]
    relative, step = cotangent[1:].abs() * 2.0 ** -BITS[bits] * (1 + 1e-6), FP16_STEP * (bits == "fp16")
    assert (off <= relative.clamp(min=step)).all()
    assert (off > relative).any() == (bits == "fp16"), "below fp16's normal numbers its step is larger than a relative error"


@for_each("name", PLACES)
def test_exact_arithmetic_returns_its_argument(name: str) -> None:
    x = numbers(1, 3, 4)
    assert PLACES[name][0](Arithmetic.exact(), x) is x
    assert Arithmetic.exact().dither(x, "p") is x
    assert torch.equal(Arithmetic.exact().multiply(x, x.mT, "p"), x @ x.mT)


@for_each(("dtype", "products", "bits"), [("fp32", "ieee", 24), ("fp32", "tf32", 10), ("bf16", "ieee", EXACT)])
def test_products_err_by_their_operands_forward_and_backward(dtype: str, products: str, bits: int) -> None:
    a, b = numbers(9, 2, 16, 16).requires_grad_(), numbers(9, 2, 16, 16).mT.clone().requires_grad_()
    rule = arithmetic(dtype, products=products)
    got, want, cotangent = rule.multiply(a, b, "p"), a @ b, numbers(9, 2, 16, 16)
    pairs = [
        (got, want),
        *zip(torch.autograd.grad(got, (a, b), cotangent), torch.autograd.grad(want, (a, b), cotangent), strict=True),
    ]
    for one, other in pairs:
        assert torch.equal(one[0], other[0])
        if bits == EXACT:
            assert torch.equal(one, other)
            continue
        reach = (a.detach().abs().max() * other.abs().max()) * 4
        u = 2.0 ** -min(bits, summed(16))
        error = (one - other)[1:].abs().amax((-1, -2, -3))
        assert (error > 0.1 * u).all(), "every run errs"
        assert (error < u * 16 * reach).all()


def test_sums_lose_half_a_bit_a_doubling() -> None:
    assert [summed(depth) for depth in (0, 1, 2, 4, 5, 16, 64, 128, 2**14)] == [24, 24, 23, 23, 22, 22, 21, 20, 17]


def test_precisions_of_each_class() -> None:
    blocks, steps, points = ({"algorithm": name} for name in ("chunkwise", "recurrent", "pointwise"))
    assert arithmetic("bf16") == Arithmetic(9, 8, EXACT, 8, **blocks)
    assert arithmetic("fp16") == Arithmetic(9, 11, EXACT, 11, FP16_STEP, **blocks)
    assert arithmetic("fp32") == Arithmetic(9, 24, 24, 24, **blocks)
    assert arithmetic("fp32", products="tf32") == Arithmetic(9, 10, 10, 24, **blocks, inverse=9)
    assert arithmetic("fp16", products="tf32") == Arithmetic(9, 11, EXACT, 11, FP16_STEP, **blocks, inverse=9)
    for options in (steps, points):  # which keep float32 throughout
        assert arithmetic("bf16", **options) == Arithmetic(9, 24, 24, 8, **options)
        assert arithmetic("fp16", **options) == Arithmetic(9, 24, 24, 11, FP16_STEP, **options)
        assert arithmetic("fp32", **options, products="tf32") == Arithmetic(9, 24, 24, 24, **options)
    assert Arithmetic.exact() == Arithmetic(1, EXACT, EXACT, EXACT, 0.0, EXACT, "exact", None, ())
    assert (arithmetic().gate, arithmetic().chunk) == (EXACT, None), "what only a call can tell"


@pytest.mark.parametrize("runs", [5, 9])
def test_choice_is_made_both_ways_by_odd_and_by_even_runs(runs: int) -> None:
    x = torch.ones(runs, 3, 2, dtype=torch.float64)
    choice = arithmetic(runs=runs).choice(x)
    assert choice.shape == (runs, 1, 1)
    assert choice.dtype == x.dtype
    ways = choice.flatten().tolist()
    assert ways[0] == 0
    for parity in (1, 2):
        assert sorted(ways[parity::2]) == [0.0] * ((runs - 1) // 4) + [1.0] * ((runs - 1) // 4)
    assert ways[1::2] == ways[2::2], "each way with equal errors for equal values, and without"
    assert Arithmetic.exact().choice(x[:1]).tolist() == [[[0.0]]]


def test_choice_of_two_runs_is_made_by_turns() -> None:
    pair, x = dataclasses.replace(arithmetic(runs=2), first=1), torch.ones(2, 1, 1)
    by_chunk = {chunk: dataclasses.replace(pair, chunk=chunk).choice(x).flatten().tolist() for chunk in bound.CHUNKS}
    assert sorted(map(tuple, by_chunk.values())) == [(0.0, 0.0)] * 2 + [(1.0, 1.0)] * 3
    by_part = [dataclasses.replace(pair, chunk=64, runs=1, first=run, last=2).choice(x[:1]).item() for run in (1, 2)]
    assert by_part == list(by_chunk[64])


@for_each(
    ("arguments", "message"),
    [
        (("quadratic", "bf16", "ieee"), "algorithm must be one of chunkwise, recurrent, pointwise, got 'quadratic'"),
        (("chunkwise", "fp64", "ieee"), "dtype must be one of bf16, fp16, fp32, got 'fp64'"),
        (("chunkwise", "fp32", "tf31"), "products must be one of ieee, tf32, got 'tf31'"),
    ],
)
def test_unknown_class_is_refused(arguments: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Arithmetic.of(*arguments)


def test_norm_of_a_single_channel_leaves_only_its_roundings() -> None:
    x = numbers(9, 4, 16, 1).requires_grad_()
    y = Normalised.apply(x, arithmetic(), "k")
    (gradient,) = torch.autograd.grad(y, x, numbers(9, 4, 16, 1))
    scale = gradient[0].abs().max()
    assert (gradient[1:].abs().amax((-1, -2, -3)) > 10 * scale).all()
