"""The float64 oracles lie where they must: their definitions, evaluated in ball arithmetic, enclose the true values rigorously.

Inputs are exact. A ball of 200 bits contains the true result; the distance of an answer to the farthest point of its ball is an
upper bound of its error, and is stated in units in the last place: of the entry itself where nothing cancels, else of the
greatest number that went into it, which each enclosure says. Each limit is shown to reject a wrong oracle.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from flint import arb, ctx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.conv import CAUSAL_CONV1D
from oracles.gates import GDN_GATE, KDA_GATE, rounded_silu, sigmoid, softplus
from oracles.norm import EPS, GATED_RMS_NORM, L2NORM, NORM_GATE_LINEAR
from oracles.operation import Inputs, Operation
from oracles.rule import chunkwise
from oracles.rule.gated_delta import definition
from oracles.tolerance.bound import truth
from tests import wrong_backward

Record = Callable[[str, object], None]
Vector = list[arb]
SMALLEST = 2.0**-1000  # an entry under it counts as that: products of subnormal numbers have no units left
BITS = 200


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    with ctx.workprec(BITS):
        yield


def balls(x: Tensor) -> Vector:
    """The entries in order, exactly."""
    return [arb(entry) for entry in x.flatten().tolist()]


def total(terms: Sequence[arb]) -> arb:
    return sum(terms, arb(0))


def ulp(size: arb) -> arb:
    """The unit in the last place of numbers as great as `size`."""
    return arb(math.ulp(max(float(abs(size).mid()), SMALLEST)))


@dataclasses.dataclass
class Worst:
    """The greatest error seen, in units."""

    name: str
    limit: float
    ulps: float = 0.0
    seen: int = 0

    def see(self, got: Tensor, want: Sequence[arb], units: Sequence[arb], note: str = "") -> None:
        """An answer, the balls of its entries and their units: from no point of its ball is an entry farther than the limit."""
        for entry, ball, unit in zip(got.flatten().tolist(), want, units, strict=True):
            distance = (arb(entry) - ball).abs_upper()
            ulps = float(distance / unit)
            assert ball.rad() < unit / 2**20, f"{self.name}: a ball of {ball} is too wide to judge by"
            # Compared as balls, which is true only where it is certain: not where the answer is no number.
            assert distance <= self.limit * unit, f"{self.name}: {ulps:.4g} ulp from {ball.str(20)}, got {entry!r} {note}"
            self.ulps = max(self.ulps, ulps)
            self.seen += 1

    def settle(self, record: Record) -> None:
        """Say what was seen."""
        print(f"{self.name}: {self.ulps:.3f} ulp at most of {self.limit:g}, {self.seen} entries")
        record(f"ulp, {self.name}", f"{self.ulps:.3f}")
        assert self.seen >= 100
        assert self.limit < max(10 * self.ulps, 4.0), f"{self.name}: a limit of {self.limit} is too wide for {self.ulps}"

    def rejects(self, got: Tensor, want: Sequence[arb], units: Sequence[arb]) -> bool:
        """Whether a wrong answer is over the limit a thousand times."""
        with pytest.raises(AssertionError, match="ulp from"):
            dataclasses.replace(self, limit=1000 * self.limit).see(got, want, units)
        return True


# Functions of one number


def ball_sigmoid(x: arb) -> arb:
    return 1 / (1 + (-x).exp())


def ball_softplus(x: arb) -> arb:
    return x.exp().log1p()


def ball_silu(x: arb) -> arb:
    return x * ball_sigmoid(x)


def ball_silu_slope(x: arb) -> arb:
    return ball_sigmoid(x) * (1 + x * ball_sigmoid(-x))


def oracle_silu(x: Tensor) -> Tensor:
    return rounded_silu(x, Arithmetic.exact(), "silu")


def slope(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The derivative that a function's own backward gives."""

    def derivative(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (result,) = torch.autograd.grad(function(x).sum(), x)
        return result

    return derivative


def oracle_beta(b: Tensor) -> Tensor:
    """The gate's own function of b."""
    heads = b.reshape(1, 1, -1)
    one = Inputs(a=torch.zeros_like(heads), b=heads, A_log=torch.zeros_like(b), dt_bias=None, allow_neg_eigval=False)
    batch = one.replaced(**{name: one[name].unsqueeze(0) for name in ("a", "b", "A_log")})
    return GDN_GATE.forward(batch, Arithmetic.exact())["beta"].reshape(b.shape)


HARD = (0.0, -0.0, 5e-324, -1e-300, 2.0**-53, -1e-8, 0.5, -1.2784645427610738, 19.9, 20.1, -20.1, 36.7, -36.7, -37.5, 709.0, -700.0)
ENDS = (1e3, -1e3, 710.5, -710.5, -744.0)
NUMBERS = st.one_of(st.sampled_from(HARD + ENDS), st.floats(-1e3, 1e3), st.floats(-5, 5), st.floats(-1e-3, 1e-3))
# The limits are about twice what 20 times as many examples found, at 30,000 entries each: 1.7, 1.4, 2.7, 1.3, 1.7 and 2.0 ulp here.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[arb], arb], float]] = {
    "sigmoid": (sigmoid, ball_sigmoid, 3.0),
    "beta": (oracle_beta, ball_sigmoid, 3.0),
    "slope of beta": (slope(oracle_beta), lambda x: ball_sigmoid(x) * ball_sigmoid(-x), 5.0),
    "softplus": (softplus, ball_softplus, 3.0),
    "slope of softplus": (slope(softplus), ball_sigmoid, 3.0),
    "silu": (oracle_silu, ball_silu, 4.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.slow_after_first
def test_function_is_within_a_few_ulp_of_its_enclosure(name: str, record_property: Record) -> None:
    function, enclosure, limit = FUNCTIONS[name]
    worst = Worst(name, limit)

    @settings(max_examples=100)
    @given(numbers=st.lists(NUMBERS, min_size=8, max_size=24))
    @example(numbers=list(HARD + ENDS))
    def check_drawn(numbers: list[float]) -> None:
        got, want = function(torch.tensor(numbers, dtype=torch.float64)), [enclosure(arb(x)) for x in numbers]
        worst.see(got, want, [ulp(ball) for ball in want], str(numbers))

    check_drawn()
    worst.settle(record_property)


@pytest.mark.slow
def test_slope_of_silu_is_within_a_few_ulp_of_its_terms(record_property: Record) -> None:
    worst = Worst(
        "slope of silu", 4.0
    )  # 2.0 found; it is zero at -1.278, where its two terms cancel: the unit is that of the greater

    @settings(max_examples=100)
    @given(numbers=st.lists(NUMBERS, min_size=8, max_size=24))
    @example(numbers=list(HARD + ENDS))
    def check_drawn(numbers: list[float]) -> None:
        number_balls = [arb(x) for x in numbers]
        units = [ulp(ball_sigmoid(x) + abs(x) * ball_sigmoid(x) * ball_sigmoid(-x)) for x in number_balls]
        worst.see(slope(oracle_silu)(torch.tensor(numbers, dtype=torch.float64)), [ball_silu_slope(x) for x in number_balls], units)

    check_drawn()
    worst.settle(record_property)


WRONG_FUNCTIONS: list[tuple[str, str, Callable[[Tensor], Tensor], float]] = [
    ("softplus", "log(1 + exp(x))", lambda x: (1 + x.exp()).log(), -20.1),
    ("softplus", "log(1 + exp(x)), which overflows", lambda x: (1 + x.exp()).log(), 710.5),
    ("softplus", "torch's threshold", torch.nn.functional.softplus, 20.1),
    ("softplus", "float32", lambda x: softplus(x.float()).double(), 0.3),
    ("sigmoid", "float32 exponential", lambda x: 1 / (1 + (-x).float().exp().double()), 0.3),
    ("sigmoid", "1 - sigmoid(-x)", lambda x: 1 - sigmoid(-x), -36.7),
    ("beta", "doubled", lambda x: 2 * sigmoid(x), 0.5),
    ("slope of beta", "y (1 - y)", lambda x: sigmoid(x) * (1 - sigmoid(x)), 36.7),
    ("silu", "hard silu", lambda x: torch.nn.functional.hardsigmoid(x) * x, 0.5),
]


def test_wrong_function_is_rejected() -> None:
    for name, wrong, function, at in WRONG_FUNCTIONS:
        right, enclosure, limit = FUNCTIONS[name]
        x, want = torch.tensor([at], dtype=torch.float64), [enclosure(arb(at))]
        Worst(name, limit).see(right(x), want, [ulp(want[0])])
        assert Worst(name, limit).rejects(function(x), want, [ulp(want[0])]), wrong


# The gates

HALVES = st.integers(-(2**30), 2**30).map(lambda n: n * 2.0**-20)  # up to 1e3; two of them add up exactly
GATE_LIMIT = 5.0  # 2.9 found of 74,000 entries


def ball_gate(a: arb, speed: arb, dt_bias: arb) -> arb:
    return -speed.exp() * ball_softplus(a + dt_bias)


def gate_call(a: list[float], speeds: list[float], biases: list[float] | None) -> Inputs:
    """Two heads, one token each of a; beta as in FUNCTIONS."""
    heads = torch.tensor(a, dtype=torch.float64).reshape(1, -1, 2)
    return Inputs(
        a=heads,
        b=heads,
        A_log=torch.tensor(speeds, dtype=torch.float64),
        dt_bias=None if biases is None else torch.tensor(biases, dtype=torch.float64),
        allow_neg_eigval=True,
    )


def by_channel(x: Inputs) -> Inputs:
    """The call of KDA's gate: its second channel has a negated, and half of the bias negated."""
    bias = None if x.dt_bias is None else torch.stack([x.dt_bias, -x.dt_bias / 2], -1)
    return x.replaced(a=torch.stack([x.a, -x.a], -1), dt_bias=bias)


def ball_gates(x: Inputs) -> dict[str, Vector]:
    """g, beta and the gradients of their sum: of one gate a head, or one a channel."""
    size, heads = x.a[0, 0].numel(), len(x.A_log)
    a, speeds = balls(x.a), balls(x.A_log.repeat_interleave(size // heads)) * x.a.shape[1]
    biases = [arb(0)] * len(a) if x.dt_bias is None else balls(x.dt_bias) * x.a.shape[1]
    g = [ball_gate(*arguments) for arguments in zip(a, speeds, biases, strict=True)]
    da = [-speed.exp() * ball_sigmoid(entry + bias) for entry, speed, bias in zip(a, speeds, biases, strict=True)]
    dA_log = [total([gate for place, gate in enumerate(g) if place % size * heads // size == head]) for head in range(heads)]
    result = {"g": g, "da": da, "dA_log": dA_log, "beta": [2 * ball_sigmoid(entry) for entry in balls(x.b)]}
    return result if x.dt_bias is None else result | {"ddt_bias": [total(da[place::size]) for place in range(size)]}


def gates_of(operation: Operation, x: Inputs) -> dict[str, Tensor]:
    return truth(operation, x, {"g": torch.ones_like(x.a), "beta": torch.ones_like(x.b)})


def see_gates(worst: Worst, x: Inputs) -> None:
    """Both gates. Terms of a sum have one sign."""
    for operation, call in ((GDN_GATE, x), (KDA_GATE, by_channel(x))):
        got = gates_of(operation, call)
        for name, want in ball_gates(call).items():
            worst.see(got[name], want, [ulp(ball) for ball in want], f"{name} of {operation.name}")


def test_gates_are_within_a_few_ulp_of_their_enclosure(record_property: Record) -> None:
    worst = Worst("gates", GATE_LIMIT)

    @settings(max_examples=60)
    @given(
        a=st.lists(st.tuples(HALVES, HALVES), min_size=1, max_size=4),
        speeds=st.tuples(*[st.floats(-20, 5)] * 2),
        biases=st.none() | st.tuples(HALVES, HALVES),
    )
    @example(a=[(-1e3, 1e3), (0.0, -20.0)], speeds=(0.0, 2.5), biases=None)
    @example(a=[(-30.0, 30.0)], speeds=(-20.0, 5.0), biases=(-1e3, 1e3))
    @example(a=[(1e-300, -5e-324)], speeds=(1.0, 1.0), biases=None)
    def check_drawn(a: list[tuple[float, float]], speeds: tuple[float, float], biases: tuple[float, float] | None) -> None:
        flat = [entry for pair in a for entry in pair]
        see_gates(worst, gate_call(flat, list(speeds), None if biases is None else list(biases)))

    check_drawn()
    worst.settle(record_property)


def test_wrong_gate_is_rejected() -> None:
    x = gate_call([20.0, 21.0], [0.3, 0.7], [0.5, 0.25])
    want = [ball_gate(*arguments) for arguments in zip(balls(x.a), balls(x.A_log), balls(x.dt_bias), strict=True)]
    units = [ulp(ball) for ball in want]
    Worst("g", GATE_LIMIT).see(truth(GDN_GATE, x)["g"], want, units)
    for wrong, gate in [
        ("softplus before the bias", lambda a, A, bias: -A.exp() * (softplus(a) + bias)),
        ("A as its logarithm", lambda a, A, bias: -A * softplus(a + bias)),
        ("float32 exponential of A", lambda a, A, bias: -A.float().exp().double() * softplus(a + bias)),
        ("torch's softplus", lambda a, A, bias: -A.exp() * torch.nn.functional.softplus(a + bias)),
    ]:
        assert Worst("g", GATE_LIMIT).rejects(gate(x.a, x.A_log, x.dt_bias), want, units), wrong


def test_wrong_gate_of_channels_is_rejected() -> None:
    x = by_channel(gate_call([20.0, 21.0], [0.3, 0.7], [0.5, 0.25]))
    want = ball_gates(x)["g"]
    units = [ulp(ball) for ball in want]
    Worst("g", GATE_LIMIT).see(truth(KDA_GATE, x)["g"], want, units)
    for wrong, gate in [
        ("no bias", lambda a, A, bias: -A.exp().unsqueeze(-1) * softplus(a)),
        ("the first channel's bias", lambda a, A, bias: -A.exp().unsqueeze(-1) * softplus(a + bias[:, :1])),
        ("channels and heads of the bias swapped", lambda a, A, bias: -A.exp().unsqueeze(-1) * softplus(a + bias.mT)),
        ("one A a channel", lambda a, A, bias: -A.exp() * softplus(a + bias)),
    ]:
        assert Worst("g", GATE_LIMIT).rejects(gate(x.a, x.A_log, x.dt_bias), want, units), wrong


def test_wrong_backward_of_a_gate_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    wrongs = (("softplus", "da"), ("softplus", "ddt_bias"), ("parameter", "ddt_bias"), ("parameter", "dA_log"))
    for operation, (wrong, gradient) in itertools.product((GDN_GATE, KDA_GATE), wrongs):
        x = gate_call([1.0, 2.0, -1.0, 3.0], [0.3, 0.7], [0.5, 0.25])
        x = by_channel(x) if operation is KDA_GATE else x
        want = ball_gates(x)[gradient]
        units = [ulp(ball) for ball in want]
        Worst(gradient, GATE_LIMIT).see(gates_of(operation, x)[gradient], want, units)
        with monkeypatch.context() as patch:
            patch.setattr(*wrong_backward.WRONG[wrong])
            assert Worst(gradient, GATE_LIMIT).rejects(gates_of(operation, x)[gradient], want, units), (operation.name, wrong)


# The norms


def ball_normalised(row: Vector, eps: float, *, mean: bool) -> Vector:
    squares = total([x * x for x in row])
    root = ((squares / len(row) if mean else squares) + arb(eps)).sqrt()
    return [x / root for x in row]


def ball_norm_gradient(row: Vector, eps: float, dy: Vector, *, mean: bool) -> tuple[Vector, Vector]:
    """dx_i = (dy_i - y_i sum(y dy) / n) / root, and the greatest number that went into it."""
    y, count = ball_normalised(row, eps, mean=mean), len(row) if mean else 1
    squares = total([x * x for x in row]) / count
    root = (squares + arb(eps)).sqrt()
    along = total([a * b for a, b in zip(y, dy, strict=True)]) / count
    reach = total([abs(a * b) for a, b in zip(y, dy, strict=True)]) / count
    dx = [(d - a * along) / root for a, d in zip(y, dy, strict=True)]
    return dx, [(abs(d) + abs(a) * reach) / root for a, d in zip(y, dy, strict=True)]


def ball_dz(normed: Vector, weight: Vector, z: Vector) -> tuple[Vector, Vector]:
    """dz_i = weight_i y_i silu'(z_i), and the greater of the slope's terms, times that: they cancel at -1.278."""
    sizes = [w * n for w, n in zip(weight, normed, strict=True)]
    reach = [ball_sigmoid(entry) + abs(entry) * ball_sigmoid(entry) * ball_sigmoid(-entry) for entry in z]
    dz = [size * ball_silu_slope(entry) for size, entry in zip(sizes, z, strict=True)]
    return dz, [abs(size) * extent for size, extent in zip(sizes, reach, strict=True)]


def see_norms(worst: Worst, row: list[float], z: list[float], weight: list[float], eps: float) -> None:
    """Both norms of one row, and the gradient of the L2 norm's first entry and all entries' sum."""
    wide = torch.tensor(row, dtype=torch.float64).reshape(1, 1, 1, -1)
    exact, ones = balls(wide), [arb(1)] * len(row)
    # A sum of n squares errs by up to n / 2 ulp, the root by half of it.
    spare = 1 + len(row) // 16
    got = truth(L2NORM, Inputs(x=wide, eps=eps), {"y": torch.ones_like(wide)})
    want = ball_normalised(exact, eps, mean=False)
    worst.see(got["y"], want, [spare * ulp(ball) for ball in want], "l2norm")
    dx, reach = ball_norm_gradient(exact, eps, ones, mean=False)
    worst.see(got["dx"], dx, [spare * ulp(extent) for extent in reach], "dx of l2norm")
    gates, weights = (torch.tensor(numbers, dtype=torch.float64) for numbers in (z, weight))
    inputs = Inputs(x=wide, z=gates.reshape(wide.shape), weight=weights, eps=eps)
    directions = {"y": torch.ones_like(wide)}
    got = truth(GATED_RMS_NORM, inputs, directions)
    normed = ball_normalised(exact, eps, mean=True)
    silus = [ball_silu(gate) for gate in balls(gates)]
    want = [w * n * s for w, n, s in zip(balls(weights), normed, silus, strict=True)]
    worst.see(got["y"], want, [spare * ulp(ball) for ball in want], "gated_rms_norm")
    dweight = [n * s for n, s in zip(normed, silus, strict=True)]
    worst.see(got["dweight"], dweight, [spare * ulp(ball) for ball in dweight], "dweight")
    dy = [w * s for w, s in zip(balls(weights), silus, strict=True)]
    dx, reach = ball_norm_gradient(exact, eps, dy, mean=True)
    worst.see(got["dx"], dx, [spare * ulp(extent) for extent in reach], "dx of gated_rms_norm")
    dz, reach = ball_dz(normed, balls(weights), balls(gates))
    worst.see(got["dz"], dz, [spare * ulp(extent) for extent in reach], "dz of gated_rms_norm")
    see_projection(worst, inputs.replaced(x=wide[0], z=inputs.z[0]), want, spare)


def see_projection(worst: Worst, inputs: Inputs, gated: Vector, spare: int) -> None:
    """The projection of one gated row by two rows of numbers with cancelling terms, and the gradients of its parameters."""
    first = inputs.weight.flip(0)
    linear, bias = torch.stack([first, -0.75 * first.roll(1)]), torch.tensor([0.3, 0.0], dtype=torch.float64)
    inputs = Inputs(**inputs, linear=linear, bias=bias)
    got = truth(NORM_GATE_LINEAR, inputs, {"y": torch.ones(1, 1, 2, dtype=torch.float64)})
    rows = zip(linear, balls(bias), strict=True)
    terms = [[*(entry * g for entry, g in zip(balls(row), gated, strict=True)), shift] for row, shift in rows]
    want = [sum(row[1:], row[0]) for row in terms]
    sizes = [sum((abs(term) for term in row[1:]), abs(row[0])) for row in terms]
    worst.see(got["y"], want, [spare * ulp(size) for size in sizes], "norm_gate_linear")
    worst.see(got["dlinear"], [*gated, *gated], [spare * ulp(ball) for ball in gated] * 2, "dlinear")
    assert torch.equal(got["dbias"], torch.ones(2, dtype=torch.float64))


WIDTHS = st.sampled_from((1, 2, 3, 8, 64))
NORM_LIMIT = 14.0  # 6.9 found of 99,000 entries, in dx of the gated norm


def test_norms_are_within_a_few_ulp_of_their_enclosure(record_property: Record) -> None:
    worst = Worst("norms", NORM_LIMIT)

    @settings(max_examples=60)
    @given(data=st.data(), width=WIDTHS, scale=st.sampled_from((1.0, 1e-3, 1e-4, 1e-30, 1e6)), eps=st.sampled_from((1e-6, 1e-5)))
    def check_drawn(data: st.DataObject, width: int, scale: float, eps: float) -> None:
        rng = data.draw(st.randoms(use_true_random=False))
        row = [rng.choice((1.0, 1.0, 1.0, 0.0, 1e-9)) * rng.uniform(-scale, scale) for _ in range(width)]
        z = [rng.choice((rng.uniform(-4, 4), *HARD, *ENDS)) for _ in range(width)]
        see_norms(worst, row, z, [rng.uniform(-2, 2) for _ in range(width)], eps)

    check_drawn()
    worst.settle(record_property)


def test_wrong_norm_is_rejected() -> None:
    x = torch.tensor([1e-3, -2e-3, 7e-4], dtype=torch.float64).reshape(1, 1, 1, -1)
    want = ball_normalised(balls(x), EPS, mean=False)
    units = [ulp(ball) for ball in want]
    Worst("l2norm", NORM_LIMIT).see(truth(L2NORM, Inputs(x=x, eps=EPS))["y"], want, units)
    for wrong, norm in [
        ("eps 1e-5", lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-5).rsqrt()),
        ("mean of squares", lambda x: x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()),
        ("eps after the root", lambda x: x / (x.square().sum(-1, keepdim=True).sqrt() + EPS)),
        ("eps floors the norm", lambda x: torch.nn.functional.normalize(x, dim=-1, eps=EPS)),
        ("float32 root", lambda x: x * (x.square().sum(-1, keepdim=True) + EPS).float().rsqrt().double()),
    ]:
        assert Worst("l2norm", NORM_LIMIT).rejects(norm(x), want, units), wrong


def test_wrong_projection_is_rejected() -> None:
    x, z = torch.tensor([[0.3, -0.7], [1.5, -0.2]], dtype=torch.float64).reshape(2, 1, 1, 2)
    linear = torch.tensor([[0.6, -1.7], [0.9, 0.2]], dtype=torch.float64)
    normed, gates = ball_normalised(balls(x), EPS, mean=True), [ball_silu(entry) for entry in balls(z)]
    gated = [n * s for n, s in zip(normed, gates, strict=True)]
    want = [a * gated[0] + b * gated[1] for a, b in (balls(row) for row in linear)]
    worst, units = Worst("norm_gate_linear", NORM_LIMIT), [ulp(ball) for ball in want]
    inputs = Inputs(x=x, z=z, linear=linear, eps=EPS)
    worst.see(truth(NORM_GATE_LINEAR, inputs)["y"], want, units)
    assert worst.rejects(truth(NORM_GATE_LINEAR, inputs.replaced(linear=linear.mT.contiguous()))["y"], want, units)
    narrow = truth(GATED_RMS_NORM, Inputs(x=x.unsqueeze(2), z=z.unsqueeze(2), weight=None, eps=EPS))["y"].float().double()
    assert worst.rejects(narrow @ linear.mT, want, units)


def test_gate_before_norm_and_float32_silu_are_rejected() -> None:
    x, z = torch.tensor([[0.3, -0.7], [1.5, -0.2]], dtype=torch.float64).reshape(2, 1, 1, 1, 2)
    normed, gates = ball_normalised(balls(x), EPS, mean=True), [ball_silu(entry) for entry in balls(z)]
    want = [n * s for n, s in zip(normed, gates, strict=True)]
    worst, units = Worst("gated_rms_norm", NORM_LIMIT), [ulp(ball) for ball in want]
    worst.see(truth(GATED_RMS_NORM, Inputs(x=x, z=z, weight=None, eps=EPS))["y"], want, units)
    gated = x * oracle_silu(z)
    assert worst.rejects(gated * (gated.square().mean(-1, keepdim=True) + EPS).rsqrt(), want, units)
    rounded = torch.nn.functional.silu(z.float()).double()
    assert worst.rejects(x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * rounded, want, units)


def test_wrong_dz_is_rejected() -> None:
    x, z = torch.tensor([[0.3, -0.7], [1.5, -0.2]], dtype=torch.float64).reshape(2, 1, 1, 1, 2)
    inputs = Inputs(x=x, z=z, weight=torch.tensor([0.6, -1.7], dtype=torch.float64), eps=EPS)
    dz, reach = ball_dz(ball_normalised(balls(x), EPS, mean=True), balls(inputs.weight), balls(z))
    worst, units = Worst("dz", NORM_LIMIT), [ulp(extent) for extent in reach]
    worst.see(truth(GATED_RMS_NORM, inputs, {"y": torch.ones_like(x)})["dz"], dz, units)
    normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    for wrong, gradient in [
        ("sigmoid alone", lambda x, n: x.weight * n * sigmoid(x.z)),
        ("sigmoid's own slope", lambda x, n: x.weight * n * sigmoid(x.z) * sigmoid(-x.z)),
        ("no weight", lambda x, n: n * slope(oracle_silu)(x.z)),
        ("x before the norm", lambda x, n: x.weight * x.x * slope(oracle_silu)(x.z)),
        ("float32 slope", lambda x, n: x.weight * n * slope(oracle_silu)(x.z).float().double()),
    ]:
        assert worst.rejects(gradient(inputs, normed), dz, units), wrong


# The convolution


def ball_convolution(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, *, silu: bool) -> tuple[Vector, Vector]:
    """y of one sequence [T, D], entries in order, and their units: an ulp of y, and what one of the sum's terms becomes by silu."""
    (channels, width), outputs, units = weight.shape, [], []
    for t in range(len(x)):
        for channel in range(channels):
            line = [*balls(state[channel]), *balls(x[:, channel])]
            terms = [arb(float(bias[channel]))]
            terms += [arb(float(weight[channel, tap])) * line[t + 1 + tap] for tap in range(width)]
            y, reach = total(terms), total([abs(term) for term in terms])
            outputs.append(ball_silu(y) if silu else y)
            carried = abs(ball_silu_slope(y)) if silu else arb(1)
            units.append(ulp(outputs[-1]) + carried * ulp(reach))
    return outputs, units


def ball_convolution_gradients(x: Inputs) -> dict[str, tuple[Vector, Vector]]:
    """dx, dh0, dweight and dbias of a batch of one, the channel first, and their units; the cotangents are `conv_cotangents`.

    A sum's unit is an ulp of its reach, and what the unit of each ds_t, the cotangent of the sum before silu, becomes in it: an
    ulp of the slope's terms, and an ulp of y's, which the slope turns by at most (2 + |y|) sigmoid(y) sigmoid(-y).
    """
    (_, tokens, channels), width = x.x.shape, x.weight.shape[-1]
    result: dict[str, tuple[Vector, Vector]] = {name: ([], []) for name in ("dx", "dh0", "dweight", "dbias")}
    cotangents = conv_cotangents(x)
    for channel in range(channels):
        line, taps = [*balls(x.state[0, channel]), *balls(x.x[0, :, channel])], balls(x.weight[channel])
        ds, loose = balls(cotangents["y"][0, :, channel]), [arb(0)] * tokens
        for t in range(tokens if x.activation == "silu" else 0):
            terms = [arb(float(x.bias[channel])), *(tap * line[t + 1 + w] for w, tap in enumerate(taps))]
            y, reach = total(terms), total([abs(term) for term in terms])
            near = ball_sigmoid(y) * ball_sigmoid(-y)
            loose[t] = abs(ds[t]) * (ulp(ball_sigmoid(y) + abs(y) * near) + (2 + abs(y)) * near * ulp(reach))
            ds[t] *= ball_silu_slope(y)
        ends = [*[arb(0)] * tokens, *balls(cotangents["final_state"][0, channel])]
        reads = [{place - 1 - w: tap for w, tap in enumerate(taps) if 0 <= place - 1 - w < tokens} for place in range(len(line))]
        sums = [("dh0" if place < width else "dx", *pair) for place, pair in enumerate(zip(reads, ends, strict=True))]
        sums += [("dweight", {t: line[t + 1 + w] for t in range(tokens)}, arb(0)) for w in range(width)]
        sums += [("dbias", dict.fromkeys(range(tokens), arb(1)), arb(0))]
        for name, factors, end in sums:
            terms = [*(factor * ds[t] for t, factor in factors.items()), end]
            result[name][0].append(total(terms))
            carried = total([abs(factor) * loose[t] for t, factor in factors.items()])
            result[name][1].append(ulp(total([abs(term) for term in terms])) + carried)
    return result


def conv_cotangents(x: Inputs) -> dict[str, Tensor]:
    """Those of y and the final state: x and the state, the other way round."""
    return {"y": x.x.flip(1), "final_state": x.state.flip(-1)}


def conv_truth(x: Inputs) -> dict[str, Tensor]:
    """y and the gradients, of x too with the channel first."""
    got = truth(CAUSAL_CONV1D, x, conv_cotangents(x))
    return got | {"dx": got["dx"].mT}


CONV_LIMIT, CONV_GRADIENT_LIMIT = 2.5, 4.0  # 1.2 found of 5,600 entries and 1.9 of 19,000


def conv_call(tokens: int, channels: int, width: int, seed: int, scale: float, activation: str | None) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1

    return Inputs(
        x=scale * make(1, tokens, channels),
        weight=make(channels, width),
        bias=scale * make(channels),
        state=scale * make(1, channels, width),
        activation=activation,
    )


def test_convolution_is_within_a_few_ulp_of_its_enclosure(record_property: Record) -> None:
    worst, gradients = Worst("convolution", CONV_LIMIT), Worst("gradients of the convolution", CONV_GRADIENT_LIMIT)

    @settings(max_examples=60)
    @given(
        tokens=st.integers(1, 5),
        channels=st.integers(1, 2),
        width=st.integers(1, 5),
        seed=st.integers(0, 2**16),
        scale=st.sampled_from((1.0, 1e-6, 30.0, 1e3)),
        activation=st.sampled_from((None, "silu")),
    )
    def check_drawn(tokens: int, channels: int, width: int, seed: int, scale: float, activation: str | None) -> None:
        x = conv_call(tokens, channels, width, seed, scale, activation)
        want, units = ball_convolution(x.x[0], x.weight, x.bias, x.state[0], silu=activation == "silu")
        got = conv_truth(x)
        worst.see(got["y"], want, units)
        for name, (balls_of, units_of) in ball_convolution_gradients(x).items():
            gradients.see(got[name], balls_of, units_of, name)

    check_drawn()
    worst.settle(record_property)
    gradients.settle(record_property)


def test_wrong_convolution_is_rejected() -> None:
    x = conv_call(3, 2, 4, 5, 1.0, "silu")
    want, units = ball_convolution(x.x[0], x.weight, x.bias, x.state[0], silu=True)
    Worst("convolution", CONV_LIMIT).see(truth(CAUSAL_CONV1D, x)["y"], want, units)
    for wrong in [
        lambda x: {"weight": x.weight.flip(-1)},
        lambda x: {"bias": None},
        lambda x: {"state": None},
        lambda x: {"state": x.state.roll(1, -1)},
        lambda x: {"activation": None},
        lambda x: {"x": x.x.float().double()},
    ]:
        assert Worst("convolution", CONV_LIMIT).rejects(truth(CAUSAL_CONV1D, x.replaced(**wrong(x)))["y"], want, units), wrong


def test_wrong_backward_of_the_convolution_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    x = conv_call(3, 2, 4, 5, 1.0, "silu")
    for gradient, wrong in [
        ("dx", "dx"),
        ("dx", "sigmoid"),
        ("dh0", "dx"),
        ("dweight", "dweight"),
        ("dweight", "sigmoid"),
        ("dbias", "parameter"),
    ]:
        want, units = ball_convolution_gradients(x)[gradient]
        Worst(gradient, CONV_GRADIENT_LIMIT).see(conv_truth(x)[gradient], want, units)
        with monkeypatch.context() as patch:
            patch.setattr(*wrong_backward.WRONG[wrong])
            assert Worst(gradient, CONV_GRADIENT_LIMIT).rejects(conv_truth(x)[gradient], want, units), (gradient, wrong)


# The delta rules


SPEEDS = {"none": [0.0], "long": [1e-3], "short": [2.0], "mixed": [1e3, 1e-2, 5e-324, 0.0]}
BETAS = {"one": 1.0, "two": 2.0, "zero": 0.0}


@dataclasses.dataclass(frozen=True)
class Head:
    """One head of one sequence: q, k [T, K], v [T, V], g [T] or [T, K], beta [T], state [K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    scale: float

    @classmethod
    def drawn(cls, tokens: int, width: int, value_width: int, gate: str, beta: str, seed: int, *, channels: bool) -> "Head":
        """Keys of norm at most 1, and decays by regime."""
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1

        decays = make(tokens, width) if channels else make(tokens)
        speeds = torch.tensor(SPEEDS[gate], dtype=torch.float64)
        picked = speeds[torch.randint(0, len(speeds), decays.shape, generator=generator)]
        betas = make(tokens).abs() if beta == "ordinary" else torch.full((tokens,), BETAS[beta], dtype=torch.float64)
        return cls(
            q=make(tokens, width),
            k=make(tokens, width) / width**0.5,
            v=make(tokens, value_width) * torch.tensor([1.0, 1e-8])[torch.randint(0, 2, (tokens, 1), generator=generator)],
            g=-decays.abs() * picked,
            beta=betas,
            state=make(width, value_width),
            scale=width**-0.5,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta, self.state

    def enclosed(self) -> tuple[Vector, Vector, Vector, Vector]:
        """The balls of o [T, V] and of the final state [K, V], and their units.

        A column's unit is an ulp of the greatest entry of it that the recurrence met, decayed since; o's is that times |scale q|_1.
        """
        tokens, width = self.q.shape
        columns = [balls(column) for column in self.state.mT]
        met = [max((abs(entry) for entry in column), key=float) for column in columns]
        outputs, units, scale = [], [], arb(self.scale)
        for t in range(tokens):
            q, k, v, beta = balls(self.q[t]), balls(self.k[t]), balls(self.v[t]), arb(float(self.beta[t]))
            decay = [log_decay.exp() for log_decay in balls(self.g[t])]
            decay = decay * width if len(decay) == 1 else decay
            for column, entries in enumerate(columns):
                entries = [d * entry for d, entry in zip(decay, entries, strict=True)]
                recalled = [key * entry for key, entry in zip(k, entries, strict=True)]
                written = beta * (v[column] - total(recalled))
                columns[column] = [entry + key * written for key, entry in zip(k, entries, strict=True)]
                reach = beta * (abs(v[column]) + total([abs(term) for term in recalled]))
                now = [abs(entry) + abs(key) * reach for key, entry in zip(k, entries, strict=True)]
                met[column] = max(met[column] * max(decay, key=float), *now, key=float)
                outputs.append(scale * total([a * b for a, b in zip(q, columns[column], strict=True)]))
                units.append(ulp(met[column]) * scale * total([abs(entry) for entry in q]) + ulp(outputs[-1]))
        state = [columns[column][row] for row in range(width) for column in range(len(columns))]
        return outputs, units, state, [ulp(met[column]) for _ in range(width) for column in range(len(columns))]


HEADS = {
    "tokens": st.integers(1, 6),
    "width": st.integers(1, 3),
    "value_width": st.integers(1, 2),
    "gate": st.sampled_from(tuple(SPEEDS)),
    "beta": st.sampled_from(("ordinary", *BETAS)),
    "seed": st.integers(0, 2**16),
}
RULE_LIMIT, CHUNK_LIMIT = 5.0, 4.0  # 2.7 and 2.0 found of 13,000 entries each


def by_chunks(head: Head, size: int) -> tuple[Tensor, Tensor]:
    """The fast oracle on one head."""
    q, k, v, g, beta, state = head.tensors()
    g = g.unsqueeze(-1) if g.ndim == 1 else g
    heads = (tensor.unsqueeze(1) for tensor in (q, k, v, g, beta))
    o, final = chunkwise.delta_rule(*heads, state[None, None], head.scale, [len(q)], size)
    return o[:, 0], final[0, 0]


@pytest.mark.parametrize("channels", [False, True], ids=["one decay a token", "one a channel"])
def test_delta_rule_is_within_a_few_ulp_of_its_enclosure(channels: bool, record_property: Record) -> None:  # noqa: FBT001
    worst = Worst(f"definition, {'KDA' if channels else 'gated'}", RULE_LIMIT)

    @settings(max_examples=50)
    @given(**HEADS)
    def check_drawn(**kinds: Any) -> None:
        head = Head.drawn(**kinds, channels=channels)
        o, o_units, state, state_units = head.enclosed()
        got, final = definition(*head.tensors(), head.scale)
        worst.see(got, o, o_units, f"o of {kinds}")
        worst.see(final, state, state_units, f"state of {kinds}")

    check_drawn()
    worst.settle(record_property)


@pytest.mark.parametrize("channels", [False, True], ids=["one decay a token", "one a channel"])
def test_chunkwise_oracle_is_within_a_few_ulp_of_the_enclosure(channels: bool, record_property: Record) -> None:  # noqa: FBT001
    worst = Worst(f"chunkwise, {'KDA' if channels else 'gated'}", CHUNK_LIMIT)

    @settings(max_examples=50)
    @given(**HEADS, size=st.sampled_from((1, 2, 4, 8)))
    def check_drawn(size: int, **kinds: Any) -> None:
        head = Head.drawn(**kinds, channels=channels)
        o, o_units, state, state_units = head.enclosed()
        # exp(G_i - G_j) errs by half an ulp of G: a decay of -1e3 before one of -0.01 costs that much.
        spare = 1 + float(head.g.abs().sum())
        got, final = by_chunks(head, size)
        worst.see(got, o, [spare * unit for unit in o_units], f"o of {kinds}, chunks of {size}")
        worst.see(final, state, [spare * unit for unit in state_units], f"state of {kinds}, chunks of {size}")

    check_drawn()
    worst.settle(record_property)


def forward(head: Head, form: str) -> Tensor:
    return definition(*head.tensors(), head.scale)[0] if form == "definition" else by_chunks(head, 2)[0]


def test_wrong_delta_rule_is_rejected() -> None:
    head = Head.drawn(5, 3, 2, "long", "ordinary", 3, channels=False)
    o, units, _, _ = head.enclosed()
    rows = [
        ("scale 1", lambda x: {"scale": 1.0}),
        ("float32 exponential", lambda x: {"g": x.g.exp().float().double().log()}),
        ("beta a millionth off", lambda x: {"beta": x.beta * (1 + 1e-6)}),
        ("a key late by one token", lambda x: {"k": x.k.roll(1, 0)}),
        ("no state", lambda x: {"state": torch.zeros_like(x.state)}),
    ]
    for form, (wrong, change) in itertools.product(("definition", "chunkwise"), rows):
        worst = Worst(form, CHUNK_LIMIT)
        worst.see(forward(head, form), o, units)
        assert worst.rejects(forward(dataclasses.replace(head, **change(head)), form), o, units), (form, wrong)


def test_enclosure_rejects_what_is_no_number_and_a_ball_too_wide() -> None:
    one = [arb(1)]
    worst = Worst("one", 4.0)
    worst.see(torch.ones(1, dtype=torch.float64), one, [ulp(one[0])])
    for wrong in (math.nan, math.inf, 1.0 + 1e-12):
        assert worst.rejects(torch.tensor([wrong], dtype=torch.float64), one, [ulp(one[0])])
    with pytest.raises(AssertionError, match="too wide to judge by"):
        worst.see(torch.ones(1, dtype=torch.float64), [arb(1, 1e-17)], [ulp(one[0])])
