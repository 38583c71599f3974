"""The FLOP formula is a count on the recurrent definition, term by term, forward and backward.

Two counts. PyTorch's counter sees matrix products, so every term but the decay is written as one for a token and counted forward
and through autograd. Numbers that count their own multiplications and additions take the step of each head, decay included, and
its way back. Both are shown to be the definition first, so that what is counted is what the layer computes.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from oracles.flops import Flops, backward_flops, forward_flops, training_flops
from oracles.layer import Layer
from oracles.rule.gated_delta import definition, repeat_heads
from tests.faults import not_refused

pytestmark = pytest.mark.slow  # they change with the formula alone

Formula = Callable[[Layer, int], Flops]
Counts = dict[str, int]
QWEN3_NEXT = Layer(hidden=2048, heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
TELLING = Layer(hidden=5, heads=2, value_heads=6, key_dim=3, value_dim=4, conv_width=2)
WIDTHS = st.integers(1, 6)
LAYERS = st.builds(
    lambda hidden, heads, group, key_dim, value_dim, conv: Layer(hidden, heads, heads * group, key_dim, value_dim, conv),
    *(WIDTHS, st.integers(1, 3), st.integers(1, 3), WIDTHS, WIDTHS, st.integers(1, 4)),
)


def random_tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5 for shape in shapes]


# Counted by PyTorch: the step of a token in matrix products


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x [1, inputs], weight [outputs, inputs]."""
    return x @ weight.T


def convolve(window: Tensor, weight: Tensor) -> Tensor:
    """A channel's last W inputs times its weights, both [C, W]: [C]."""
    return torch.bmm(window.unsqueeze(1), weight.unsqueeze(2)).flatten()


def recall(state: Tensor, key: Tensor) -> Tensor:
    """What states [HV, K, V] hold for keys [HV, K]: [HV, V]."""
    return torch.bmm(key.unsqueeze(1), state).squeeze(1)


def write(state: Tensor, key: Tensor, update: Tensor) -> Tensor:
    """States [HV, K, V] with updates [HV, V] written at keys [HV, K]."""
    return torch.baddbmm(state, key.unsqueeze(2), update.unsqueeze(1))


def products(layer: Layer) -> dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]]:
    """Each term but the decay: one token's product, and the shapes it takes."""
    widths, inner = layer.sections, layer.value_heads * layer.value_dim
    window = (widths["q"] + widths["k"] + widths["v"], layer.conv_width)
    key, value = (layer.value_heads, layer.key_dim), (layer.value_heads, layer.value_dim)
    state = (*key, layer.value_dim)
    return {
        "in_proj": (project, [(1, layer.hidden), (sum(widths.values()), layer.hidden)]),
        "conv1d": (convolve, [window, window]),
        "recall": (recall, [state, key]),
        "write": (write, [state, key, value]),
        "read": (recall, [state, key]),
        "out_proj": (project, [(1, inner), (layer.hidden, inner)]),
    }


def counted_by_torch(layer: Layer) -> tuple[Counts, Counts]:
    """One token's FLOPs by term, forward and backward."""
    ahead, back = {}, {}
    for name, (product, shapes) in products(layer).items():
        operands = [x.requires_grad_() for x in random_tensors(1, *shapes)]
        with FlopCounterMode(display=False) as counter:
            result = product(*operands)
        ahead[name] = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(result, operands, torch.ones_like(result))
        back[name] = counter.get_total_flops()
    return ahead, back


def in_products(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, V] and the final states [HV, K, V], scale 1: q, k [T, HV, K], v [T, HV, V], decay, beta [T, HV]."""
    rows = []
    for q_t, k_t, v_t, decay_t, beta_t in zip(q, k, v, decay, beta, strict=True):
        state = decay_t[:, None, None] * state
        state = write(state, k_t, beta_t[:, None] * (v_t - recall(state, k_t)))
        rows.append(recall(state, q_t))
    return torch.stack(rows), state


# Counted by numbers: the step of a head


class Tally:
    """How often numbers were multiplied, added and subtracted, by the term at work."""

    def __init__(self) -> None:
        self.counts: Counts = collections.Counter()
        self.term = ""

    def taken(self) -> Counts:
        """The counts since they were last taken."""
        counts, self.counts = dict(self.counts), collections.Counter()
        return counts


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number that counts what is done with it."""

    n: float
    tally: Tally

    def counted(self, n: float) -> "Number":
        self.tally.counts[self.tally.term] += 1
        return Number(n, self.tally)

    def __add__(self, other: "Number") -> "Number":
        return self.counted(self.n + other.n)

    def __sub__(self, other: "Number") -> "Number":
        return self.counted(self.n - other.n)

    def __mul__(self, other: "Number") -> "Number":
        return self.counted(self.n * other.n)

    def __neg__(self) -> "Number":
        return Number(-self.n, self.tally)


Row = list[Number]
Matrix = list[Row]


def dot(a: Sequence[Number], b: Sequence[Number], start: Number | None = None) -> Number:
    """Products added one by one to what is there, at first zero."""
    total = Number(0.0, a[0].tally) if start is None else start
    for x, y in zip(a, b, strict=True):
        total = total + x * y
    return total


def columns(matrix: Matrix) -> Iterator[tuple[Number, ...]]:
    return zip(*matrix, strict=True)


def scaled(factor: Number, row: Sequence[Number]) -> Row:
    return [factor * x for x in row]


def with_rank_one(matrix: Matrix, a: Row, b: Row) -> Matrix:
    return [[x + factor * y for x, y in zip(row, b, strict=True)] for row, factor in zip(matrix, a, strict=True)]


@dataclasses.dataclass
class Step:
    """One token of one head, there and back."""

    tally: Tally
    q: Row
    k: Row
    v: Row
    decay: Number
    beta: Number
    scale: Number
    start: Matrix

    def forward(self) -> tuple[Row, Matrix]:
        """o and the state after the token."""
        self.tally.term = "decay"
        self.decayed = [scaled(self.decay, row) for row in self.start]
        self.tally.term = "recall"
        recalled = [dot(self.k, column) for column in columns(self.decayed)]
        self.tally.term = "left out"
        self.missing = [x - y for x, y in zip(self.v, recalled, strict=True)]
        self.update = scaled(self.beta, self.missing)
        self.tally.term = "write"
        self.state = with_rank_one(self.decayed, self.k, self.update)
        self.tally.term = "read"
        o = [dot(self.q, column) for column in columns(self.state)]
        self.tally.term = "left out"
        return scaled(self.scale, o), self.state

    def backward(self, do: Row, ds: Matrix) -> list[Matrix]:
        """The gradients of q, k, v, the decay, beta and the state before, from those of o and of the state after."""
        self.tally.term = "left out"
        do = scaled(self.scale, do)
        self.tally.term = "read"
        dq = [dot(row, do) for row in self.state]
        ds = with_rank_one(ds, self.q, do)
        self.tally.term = "write"
        dk = [dot(row, self.update) for row in ds]
        du = [dot(self.k, column) for column in columns(ds)]
        self.tally.term = "left out"
        dv, dbeta = scaled(self.beta, du), dot(self.missing, du)
        self.tally.term = "recall"
        dr = [-x for x in dv]
        dk = [dot(row, dr, before) for row, before in zip(self.decayed, dk, strict=True)]
        ds = with_rank_one(ds, self.k, dr)
        self.tally.term = "decay"
        ddecay = dot([x for row in ds for x in row], [x for row in self.start for x in row])
        return [[dq], [dk], [dv], [[ddecay]], [[dbeta]], [scaled(self.decay, row) for row in ds]]


def step(key_dim: int, value_dim: int, seed: int) -> tuple[Step, Row, Matrix]:
    """A step of random numbers, and cotangents of what comes out."""
    rng, tally = random.Random(seed), Tally()

    def row(width: int) -> Row:
        return [Number(rng.uniform(-1, 1), tally) for _ in range(width)]

    state, cotangent = ([row(value_dim) for _ in range(key_dim)] for _ in range(2))
    return Step(tally, row(key_dim), row(key_dim), row(value_dim), *row(3), state), row(value_dim), cotangent


def counted_by_numbers(layer: Layer) -> tuple[Counts, Counts]:
    """One token's FLOPs on the states by term, forward and backward; "left out" is what the formula does without."""
    ahead: Counts = collections.Counter()
    back: Counts = collections.Counter()
    for head in range(layer.value_heads):
        there, do, ds = step(layer.key_dim, layer.value_dim, head)
        there.forward()
        ahead.update(there.tally.taken())
        there.backward(do, ds)
        back.update(there.tally.taken())
    return ahead, back


# The formula


def disagreements(layer: Layer, tokens: int, forward: Formula, backward: Formula) -> list[str]:
    """The terms in which a formula is not the counts."""
    wrong = set()
    for count in (counted_by_torch, counted_by_numbers):
        for way, formula, counts in zip(("forward", "backward"), (forward, backward), count(layer), strict=True):
            got = dataclasses.asdict(formula(layer, tokens))
            wrong |= {f"{name} {way}" for name, number in counts.items() if name != "left out" and got[name] != tokens * number}
    return sorted(wrong)


@settings(max_examples=60)
@given(layer=LAYERS, tokens=st.integers(0, 9))
@example(layer=TELLING, tokens=7)
def test_formula_is_the_count_of_every_term_forward_and_backward(layer: Layer, tokens: int) -> None:
    assert disagreements(layer, tokens, forward_flops, backward_flops) == []


def test_every_term_is_counted() -> None:
    (by_torch, _), (by_numbers, _) = counted_by_torch(TELLING), counted_by_numbers(TELLING)
    terms = {field.name for field in dataclasses.fields(Flops)}
    assert terms == by_torch.keys() | by_numbers.keys() - {"left out"}
    assert by_torch.keys() & by_numbers.keys() == {"recall", "write", "read"}


@given(layer=LAYERS)
def test_what_is_left_out_of_a_step_is_linear_in_the_widths(layer: Layer) -> None:
    ahead, back = counted_by_numbers(layer)
    assert ahead["left out"] == 3 * layer.value_heads * layer.value_dim
    assert back["left out"] == 4 * layer.value_heads * layer.value_dim


def only(**changes: Callable[[Layer, int, Flops], int]) -> Callable[[Formula], Formula]:
    """A formula with some terms replaced."""
    return lambda right: (
        lambda layer, tokens: dataclasses.replace(
            right(layer, tokens), **{name: change(layer, tokens, right(layer, tokens)) for name, change in changes.items()}
        )
    )


def share(part: Callable[[Layer], int], whole: Callable[[Layer], int], name: str) -> Callable[[Layer, int, Flops], int]:
    return lambda layer, tokens, count: getattr(count, name) * part(layer) // whole(layer)


def by_key_heads(right: Formula) -> Formula:
    terms = ("decay", "recall", "write", "read")
    return only(**{name: share(lambda layer: layer.heads, lambda layer: layer.value_heads, name) for name in terms})(right)


def halved(right: Formula) -> Formula:
    return lambda layer, tokens: Flops(**{name: number // 2 for name, number in dataclasses.asdict(right(layer, tokens)).items()})


def width(*sections: str) -> Callable[[Layer], int]:
    return lambda layer: sum(layer.sections[name] for name in sections)


WRONG: dict[str, Callable[[Formula], Formula]] = {
    "key heads hold the states": by_key_heads,
    "a multiply-add is one": halved,
    "conv over z too": only(conv1d=share(width(*"qkvz"), width(*"qkv"), "conv1d")),
    "in_proj without gates": only(in_proj=share(width(*"qkvz"), width(*"qkvzba"), "in_proj")),
    "V squared": only(read=lambda layer, tokens, count: count.read // layer.key_dim * layer.value_dim),
    "the read dropped": only(read=lambda layer, tokens, count: 0),
    "the decay dropped": only(decay=lambda layer, tokens, count: 0),
    "a decay is a multiply-add": only(decay=lambda layer, tokens, count: count.recall),
}


def test_wrong_formula_is_rejected_forward_and_backward() -> None:
    for wrong in WRONG:
        assert disagreements(TELLING, 7, forward_flops, backward_flops) == [], wrong
        assert disagreements(TELLING, 7, WRONG[wrong](forward_flops), backward_flops), wrong
        assert disagreements(TELLING, 7, forward_flops, WRONG[wrong](backward_flops)), wrong


def test_backward_is_neither_forward_nor_simply_twice_forward() -> None:
    def doubled(layer: Layer, tokens: int) -> Flops:
        return Flops(**{name: 2 * number for name, number in dataclasses.asdict(forward_flops(layer, tokens)).items()})

    terms = {field.name for field in dataclasses.fields(Flops)}
    assert disagreements(TELLING, 7, forward_flops, forward_flops) == sorted(f"{name} backward" for name in terms)
    assert disagreements(TELLING, 7, forward_flops, doubled) == ["decay backward"]


@given(layer=LAYERS, tokens=st.integers(0, 9))
def test_sums_are_over_all_terms(layer: Layer, tokens: int) -> None:
    for formula in (forward_flops, backward_flops, training_flops):
        count = formula(layer, tokens)
        assert count.total == sum(dataclasses.astuple(count))
        assert count.gated_delta_rule == count.total - count.in_proj - count.conv1d - count.out_proj
    ways = (dataclasses.astuple(way(layer, tokens)) for way in (forward_flops, backward_flops))
    assert dataclasses.astuple(training_flops(layer, tokens)) == tuple(map(sum, zip(*ways, strict=True)))


def test_what_is_no_count_of_tokens_and_no_layer_is_refused() -> None:
    rows: list[tuple[Any, ...]] = [(None, 7, "^layer must be a Layer, got NoneType$")]
    rows += [(TELLING, tokens, f"^tokens must be a whole number from 0 up, got {tokens!r}$") for tokens in (-1, 2.0, True, "7")]
    for formula in (forward_flops, backward_flops, training_flops):
        assert not_refused(formula, rows) == []


# What is counted is the layer


@settings(max_examples=30)
@given(key_dim=st.integers(1, 4), value_dim=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_step_in_numbers_is_the_definition_and_its_gradient(key_dim: int, value_dim: int, seed: int) -> None:
    there, do, ds = step(key_dim, value_dim, seed)
    there.decay = Number(abs(there.decay.n) + 0.1, there.tally)

    def tensor(matrix: Matrix) -> Tensor:
        return torch.tensor([[x.n for x in row] for row in matrix], dtype=torch.float64)

    x = [tensor(matrix) for matrix in ([there.q], [there.k], [there.v], [[there.decay]], [[there.beta]], there.start)]
    leaves = [leaf.requires_grad_() for leaf in x]
    q, k, v, decay, beta, state = leaves
    o, end = definition(q, k, v, decay[0].log(), beta[0], state, there.scale.n)
    got = there.forward()
    torch.testing.assert_close(tensor([got[0]]), o)
    torch.testing.assert_close(tensor(got[1]), end)
    want = torch.autograd.grad([o, end], leaves, [tensor([do]), tensor(ds)])
    for one, gradient in zip(there.backward(do, ds), want, strict=True):
        torch.testing.assert_close(tensor(one), gradient)


def test_products_are_the_definition_and_hold_all_of_its_chain() -> None:
    layer, tokens = TELLING, 5
    head, value = (tokens, layer.heads, layer.key_dim), (tokens, layer.value_heads, layer.value_dim)
    state = (layer.value_heads, layer.key_dim, layer.value_dim)
    q, k, v, decay, beta, start = random_tensors(2, head, head, value, value[:2], value[:2], state)
    x = [repeat_heads(q, layer.value_heads), repeat_heads(k, layer.value_heads), v, decay + 0.6, beta, start]
    leaves = [leaf.requires_grad_() for leaf in x]
    with FlopCounterMode(display=False) as counter:
        o, end = in_products(*leaves)
    ahead = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad([o, end], leaves, [torch.ones_like(o), torch.ones_like(end)])
    back = counter.get_total_flops()
    for formula, count in ((forward_flops, ahead), (backward_flops, back)):
        flops = formula(layer, tokens)
        assert count == flops.gated_delta_rule - flops.decay
    for h in range(layer.value_heads):
        q_h, k_h, v_h, decay_h, beta_h = (leaf[:, h] for leaf in leaves[:5])
        want, want_end = definition(q_h, k_h, v_h, decay_h.log(), beta_h, start[h], 1.0)
        torch.testing.assert_close(o[:, h], want)
        torch.testing.assert_close(end[h], want_end)


@given(layer=LAYERS, batch=st.integers(1, 3), length=st.integers(1, 5))
def test_torch_counts_its_own_layers_alike(layer: Layer, batch: int, length: int) -> None:
    widths = layer.sections
    channels, inner = widths["q"] + widths["k"] + widths["v"], widths["v"]
    shapes = ((batch * length, layer.hidden), (sum(widths.values()), layer.hidden), (batch, channels, length))
    x, w_in, mixed, w_conv, o, w_out = random_tensors(
        3, *shapes, (channels, 1, layer.conv_width), (batch * length, inner), (layer.hidden, inner)
    )
    got = {}
    for name, call in {
        "in_proj": lambda: functional.linear(x, w_in),
        # Forward only: backward, PyTorch's counter takes the weight's gradient of a depthwise convolution as a dense one's.
        "conv1d": lambda: functional.conv1d(functional.pad(mixed, (layer.conv_width - 1, 0)), w_conv, groups=channels),
        "out_proj": lambda: functional.linear(o, w_out),
    }.items():
        with FlopCounterMode(display=False) as counter:
            call()
        got[name] = counter.get_total_flops()
    want = dataclasses.asdict(forward_flops(layer, batch * length))
    assert got == {name: want[name] for name in got}


# What it is not, and what others count


def in_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The chunkwise (WY) form of one head, scale 1: q, k [T, K], v [T, V], g, beta [T], state [K, V]."""
    rows = []
    for q_c, k_c, v_c, g_c, beta_c in zip(*(x.split(chunk) for x in (q, k, v, g, beta.unsqueeze(-1))), strict=True):
        total = g_c.cumsum(0)
        decay, grown = (total.unsqueeze(1) - total).exp(), total.exp().unsqueeze(1)
        solve = torch.linalg.inv(torch.eye(len(q_c)) + ((beta_c * k_c) @ k_c.T * decay).tril(-1))
        fresh = solve @ (beta_c * v_c) - (solve @ (beta_c * grown * k_c)) @ state
        rows.append((grown * q_c) @ state + (q_c @ k_c.T * decay).tril() @ fresh)
        state = grown[-1] * state + ((total[-1] - total).exp().unsqueeze(1) * k_c).T @ fresh
    return torch.cat(rows), state


@pytest.mark.parametrize("chunk", [4, 8])
def test_chunkwise_form_multiplies_more_the_longer_its_chunks(chunk: int) -> None:
    tokens, key_dim, value_dim = 16, 3, 4
    shapes = ((tokens, key_dim), (tokens, key_dim), (tokens, value_dim), (tokens,), (tokens,), (key_dim, value_dim))
    x = random_tensors(4, *shapes)
    with FlopCounterMode(display=False) as counter:
        o, end = in_chunks(*x, chunk)
    for one, reference in zip((o, end), definition(*x, 1.0), strict=True):
        torch.testing.assert_close(one, reference)
    states, scores = 6 * key_dim * value_dim, 2 * chunk * (3 * key_dim + 2 * value_dim)
    assert counter.get_total_flops() == tokens * (states + scores)
    layer = Layer(hidden=1, heads=1, value_heads=1, key_dim=key_dim, value_dim=value_dim)
    assert forward_flops(layer, tokens).gated_delta_rule == tokens * 7 * key_dim * value_dim < tokens * (states + scores)


def megatron(layer: Layer, tokens: int) -> Counts:
    """Megatron-LM's training FLOPs of a GDN layer (`num_floating_point_operations`): thrice forward, four products a state."""
    keys, values = layer.heads * layer.key_dim, layer.value_heads * layer.value_dim
    return {
        "in_proj": 3 * 2 * tokens * layer.hidden * (2 * keys + 2 * values + 2 * layer.value_heads),
        "conv1d": 3 * 2 * tokens * layer.conv_width * (2 * keys + values),
        "gated_delta_rule": 3 * 2 * tokens * 4 * layer.value_heads * layer.value_dim**2,
        "out_proj": 3 * 2 * tokens * layer.hidden * values,
    }


def megatron_householder(layer: Layer, tokens: int, reflections: int) -> int:
    """Megatron-LM's forward FLOPs on the states of a gated delta product layer, of which one reflection a token is the GDN."""
    return (4 * reflections + 3) * tokens * layer.value_heads * layer.value_dim * layer.key_dim


@given(layer=LAYERS, tokens=st.integers(1, 9))
@example(layer=QWEN3_NEXT, tokens=4096)
def test_megatron_counts_the_projections_and_the_convolution_alike(layer: Layer, tokens: int) -> None:
    ours, theirs = training_flops(layer, tokens), megatron(layer, tokens)
    assert (ours.in_proj, ours.conv1d, ours.out_proj) == (theirs["in_proj"], theirs["conv1d"], theirs["out_proj"])


def test_megatron_counts_two_more_a_state_entry_of_qwen3_next_in_training() -> None:
    ours, theirs = training_flops(QWEN3_NEXT, 4096), megatron(QWEN3_NEXT, 4096)
    entries = 4096 * 32 * 128 * 128
    assert (theirs["gated_delta_rule"], ours.gated_delta_rule) == (24 * entries, 22 * entries)
    assert sum(theirs.values()) - ours.total == 2 * entries
    assert 2 * entries < 0.005 * ours.total


@given(layer=LAYERS, tokens=st.integers(1, 9))
def test_megatron_squares_the_value_width_where_a_state_is_key_by_value(layer: Layer, tokens: int) -> None:
    values = tokens * layer.value_heads * layer.value_dim
    excess = megatron(layer, tokens)["gated_delta_rule"] - training_flops(layer, tokens).gated_delta_rule
    assert excess == values * (24 * layer.value_dim - 22 * layer.key_dim)


@given(layer=LAYERS, tokens=st.integers(1, 9))
def test_megatron_counts_a_gated_delta_product_of_one_reflection_as_we_do(layer: Layer, tokens: int) -> None:
    assert megatron_householder(layer, tokens, 1) == forward_flops(layer, tokens).gated_delta_rule
