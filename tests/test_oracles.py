"""The oracle is the definition: in float64 within stated limits, in integers exactly, and its gradients are gradients.

Each proof is shown to reject a wrong oracle. Float64 limits are stated twice. Whole tensors, in ordinary regimes: 5e-15 of the
largest entry, 3e-14 where terms cancel. Single rows, everywhere: float64 is 2^29 times finer than float32, so a row may err by a
few times 2^-29 of what `bounds` allows float32 there, which follows the conditioning of the case whatever it is.
"""

import dataclasses
import decimal
import math
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.bound import _evaluate, bounds, sequences, truth
from oracles.case import Case
from oracles.gated_delta import EPS, Normalised, chunkwise, definition, l2norm, recurrent, repeat_heads
from oracles.operation import Inputs, gradient_name
from oracles.rounding import Arithmetic
from properties.domain import VIEWS, Domain
from properties.laws import view
from properties.strategies import REMEMBERING, cases

Results = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
TENSORS = ("q", "k", "v", "g", "beta", "state")
FORMS = (("recurrent", 64), ("chunkwise", 16), ("chunkwise", 64), ("chunkwise", 128))
# Largest |error| / largest |entry| of a tensor, 1,200 cases measured (ordinary: no decay beyond 10 tokens, beta up to 1, no
# correlated or repeated tokens, no single channels): 3.4e-15, and 1.1e-14 for dq, dg and dh0, whose terms cancel.
RELATIVE_LIMIT, RELATIVE_LIMIT_CANCELLING = 5e-15, 3e-14
CANCELLING = ("dq", "dg", "dh0")
# Rows against 2^-29 of float32's allowance, 1,200 cases measured: 2.4, and 5.6 where tokens repeat (equal terms err alike).
ROW_LIMIT, ROW_LIMIT_REPEATED = 6.0, 12.0


# The definition, applied to every head of every sequence


def floored(x: Tensor) -> Tensor:
    """F.normalize: eps floors the norm."""
    return torch.nn.functional.normalize(x, dim=-1, eps=EPS)


def mean_eps(x: Tensor) -> Tensor:
    """eps is added to the mean of squares."""
    return x * (x.square().sum(-1, keepdim=True) + EPS * x.shape[-1]).rsqrt()


def decays_after_writing(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp() * (state + torch.outer(k_t, beta_t * (v_t - k_t @ state)))
        rows.append(scale * (q_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


def reads_before_writing(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp() * state
        rows.append(scale * (q_t @ state))
        state = state + torch.outer(k_t, beta_t * (v_t - k_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


def corrects_the_undecayed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp() * state + torch.outer(k_t, beta_t * (v_t - k_t @ state))
        rows.append(scale * (q_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the contract is read: the rule of one head, its norm, the key head of a value head, and what a sequence starts from."""

    rule: Rule = definition
    norm: Callable[[Tensor], Tensor] = l2norm
    tiled: bool = False
    leaks: bool = False


RIGHT = Reading()
WRONG = {
    "decays after writing": Reading(rule=decays_after_writing),
    "reads before writing": Reading(rule=reads_before_writing),
    "corrects the undecayed state": Reading(rule=corrects_the_undecayed),
    "eps floors the norm": Reading(norm=floored),
    "eps inside the mean": Reading(norm=mean_eps),
    "tiles key heads": Reading(tiled=True),
    "state leaks into the next sequence": Reading(leaks=True),
}
TELLING = "lengths=9+0+20 packed=yes heads=2 value_heads=4 gate=10 state=random values=small qk_norm=yes seed=3"


def by_definition(inputs: Inputs, cotangents: Results, reading: Reading = RIGHT) -> Results:
    """Outputs and gradients in float64, one head of one sequence at a time, differentiated by autograd."""
    leaves = {name: inputs[name].double().requires_grad_() for name in TENSORS if inputs[name] is not None}
    x = dict(leaves)
    if inputs.qk_norm:
        x |= {name: reading.norm(x[name]) for name in ("q", "k")}
    x |= {name: x[name].flatten(0, 1) for name in TENSORS[:5]}
    (heads, width), (value_heads, value_width) = inputs.q.shape[2:], inputs.v.shape[2:]
    scale = width**-0.5 if inputs.scale is None else inputs.scale
    outputs, finals, start = [], [], 0
    for row, length in enumerate(sequences(inputs)):
        at = slice(start, start + length)
        start += length
        columns, ends = [], []
        for head in range(value_heads):
            key = head % heads if reading.tiled else head // (value_heads // heads)
            state = x["state"][row, head] if "state" in x else torch.zeros(width, value_width, dtype=torch.float64)
            if reading.leaks and row:
                state = state + finals[-1][head]
            keys, values = (x[name][at, key] for name in ("q", "k")), (x[name][at, head] for name in ("v", "g", "beta"))
            o, end = reading.rule(*keys, *values, state, scale)
            columns.append(o)
            ends.append(end)
        outputs.append(torch.stack(columns, 1))
        finals.append(torch.stack(ends))
    result = {"o": torch.cat(outputs).reshape(inputs.v.shape), "final_state": torch.stack(finals)}
    total = sum(((result[name] * each.double()).sum() for name, each in cotangents.items()), torch.zeros(()))
    zeros = [torch.zeros_like(leaf) for leaf in leaves.values()]
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True) if total.requires_grad else zeros
    result |= {gradient_name(name): each for name, each in zip(leaves, gradients, strict=True)}
    return {name: each.detach() for name, each in result.items()}


def form(inputs: Inputs, cotangents: Results | None, algorithm: str, chunk: int) -> Results:
    """Outputs and gradients of one form of the oracle, in exact arithmetic."""
    batch = _evaluate(inputs, cotangents, algorithm, Arithmetic.exact(), chunk=chunk)
    return {name: runs[0] for name, runs in batch.items()}


def in_single(inputs: Inputs) -> Inputs:
    """The same numbers in float32."""
    return inputs.replaced(**{name: inputs[name].float() for name in TENSORS if inputs[name] is not None})


def worst_row(case: Case, got: Results, want: Results, allowed: Results) -> float:
    """The largest error of a row, in units of 2^-29 of what float32 may err there."""
    assert got.keys() == want.keys()
    worst = 0.0
    for name, each in want.items():
        assert got[name].shape == each.shape
        error = (got[name] - each).abs() if case.spec.port(name).scalar_rows else (got[name] - each).norm(dim=-1)
        worst = max([worst, *(error / (allowed[name] * 2.0**-29)).flatten().tolist()])
    return worst


def allowed_in_single(case: Case) -> Results:
    limits = bounds(case.spec, in_single(case.inputs()), case.cotangents(), "chunkwise")
    return {name: limit.allowed for name, limit in limits.items()}


@settings(max_examples=24)
@given(case=cases(Domain(), longest=150, total=150))
@example(case=Case.parse("lengths=128+42 packed=yes value_heads=2 key_dim=12 beta=two values=repeated qk_norm=yes seed=127"))
@example(case=Case.parse("lengths=75+75 value_heads=4 key_dim=1 value_dim=40 beta=one state=random qk_norm=yes seed=9982"))
@example(case=Case.parse("lengths=130 value_heads=2 gate=saturated beta=two values=correlated state=random seed=5"))
@example(case=Case.parse("lengths=0+0+1+129+0 packed=yes value_heads=2 gate=tenth values=scaled state=random seed=6"))
@example(case=Case.parse("lengths=0 packed=yes state=random"))
@example(case=Case.parse("lengths=0+0"))
def test_each_form_equals_the_definition_row_by_row(case: Case) -> None:
    inputs, cotangents = case.inputs(), case.cotangents()
    want, allowed = by_definition(inputs, cotangents), allowed_in_single(case)
    for algorithm, chunk in FORMS:
        worst = worst_row(case, form(inputs, cotangents, algorithm, chunk), want, allowed)
        assert worst <= (ROW_LIMIT_REPEATED if case.values == "repeated" else ROW_LIMIT), (algorithm, chunk)


ORDINARY = cases(
    Domain(key_dims=(2, 256)),
    longest=150,
    total=150,
    gate=REMEMBERING,
    beta=("ordinary", "one", "edges"),
    values=("ordinary", "scaled"),
)


@settings(max_examples=30)
@given(case=ORDINARY)
def test_each_form_equals_the_definition_to_few_roundings_where_the_case_is_well_conditioned(case: Case) -> None:
    inputs, cotangents = case.inputs(), case.cotangents()
    want = by_definition(inputs, cotangents)
    for algorithm, chunk in FORMS:
        got = form(inputs, cotangents, algorithm, chunk)
        assert got.keys() == want.keys()
        for name, each in want.items():
            limit = RELATIVE_LIMIT_CANCELLING if name in CANCELLING else RELATIVE_LIMIT
            assert not each.numel() or (got[name] - each).abs().max() <= limit * each.abs().max(), (algorithm, chunk, name)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_reading_of_the_definition_is_rejected(wrong: str) -> None:
    case = Case.parse(TELLING)
    inputs, cotangents = case.inputs(), case.cotangents()
    got, allowed = form(inputs, cotangents, "chunkwise", 16), allowed_in_single(case)
    assert worst_row(case, got, by_definition(inputs, cotangents), allowed) <= ROW_LIMIT
    assert worst_row(case, got, by_definition(inputs, cotangents, WRONG[wrong]), allowed) > 1e6


@settings(max_examples=20)
@given(case=cases(Domain(), longest=80, total=100), how=st.sampled_from(VIEWS))
def test_strides_of_the_inputs_change_no_bit(case: Case, how: str) -> None:
    inputs, cotangents = case.inputs(), case.cotangents()
    views = inputs.replaced(**{name: view(inputs[name], how) for name in TENSORS if inputs[name] is not None})
    dense = inputs.replaced(**{name: views[name].contiguous() for name in TENSORS if inputs[name] is not None})
    turned = {name: view(each, how) for name, each in cotangents.items()}
    got, want = truth(views, turned), truth(dense, {name: each.contiguous() for name, each in turned.items()})
    assert all(torch.equal(got[name], want[name]) for name in want)


# The algebra, in a field: no rounding at all

P = 2**61 - 1  # a prime: two different polynomials of degree d agree at a random point with probability d / P


@dataclasses.dataclass(frozen=True, slots=True)
class Residue:
    """An integer modulo P."""

    n: int

    def __add__(self, other: "Residue") -> "Residue":
        return Residue((self.n + other.n) % P)

    def __sub__(self, other: "Residue") -> "Residue":
        return Residue((self.n - other.n) % P)

    def __mul__(self, other: "Residue") -> "Residue":
        return Residue(self.n * other.n % P)


@dataclasses.dataclass(frozen=True, slots=True)
class Dual:
    """An integer and its derivative."""

    n: int
    slope: int = 0

    def __add__(self, other: "Dual") -> "Dual":
        return Dual(self.n + other.n, self.slope + other.slope)

    def __sub__(self, other: "Dual") -> "Dual":
        return Dual(self.n - other.n, self.slope - other.slope)

    def __mul__(self, other: "Dual") -> "Dual":
        return Dual(self.n * other.n, self.slope * other.n + self.n * other.slope)


class Token(NamedTuple):
    """One token of one head; `decay` is exp(g). Numbers of any ring."""

    q: list[Any]
    k: list[Any]
    v: list[Any]
    decay: Any
    beta: Any


Matrix = list[list[Any]]


def dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    first, *rest = [x * y for x, y in zip(a, b, strict=True)]
    return sum(rest, first)


def token_by_token(tokens: Sequence[Token], state: Matrix) -> tuple[Matrix, Matrix]:
    """The definition in any ring, scale 1."""
    outputs = []
    for q, k, v, decay, beta in tokens:
        state = [[decay * x for x in row] for row in state]
        fresh = [beta * (value - dot(k, column)) for value, column in zip(v, zip(*state, strict=True), strict=True)]
        state = [[x + each * new for x, new in zip(row, fresh, strict=True)] for each, row in zip(k, state, strict=True)]
        outputs.append([dot(q, column) for column in zip(*state, strict=True)])
    return outputs, state


class Chunked:
    """The chunkwise (WY) form in any ring, scale 1: forward substitution, no division."""

    def reaches(self, before: int, after: int) -> bool:
        """Whether A has an entry for token `after` and the earlier token `before`."""
        return before < after

    def reads(self, token: int, query: int) -> bool:
        return token <= query

    def between(self, tokens: Sequence[Token], i: int, j: int) -> Sequence[Token]:
        """The tokens whose decays part what token j wrote from token i."""
        return tokens[j + 1 : i + 1]

    def decay(self, one: Any, tokens: Sequence[Token]) -> Any:
        product = one
        for token in tokens:
            product = product * token.decay
        return product

    def run(self, one: Any, tokens: Sequence[Token], state: Matrix, sizes: Sequence[int]) -> tuple[Matrix, Matrix]:
        outputs: Matrix = []
        start = 0
        for size in sizes:
            rows, state = self.chunk(one, tokens[start : start + size], state)
            outputs += rows
            start += size
        assert start == len(tokens)
        return outputs, state

    def chunk(self, one: Any, tokens: Sequence[Token], state: Matrix) -> tuple[Matrix, Matrix]:
        grown = [self.decay(one, tokens[: i + 1]) for i in range(len(tokens))]
        solved: Matrix = []  # [U | W], a row a token: (I + A) [U | W] = [beta v | beta exp(G) k]
        for i, token in enumerate(tokens):
            row = [token.beta * x for x in token.v] + [token.beta * grown[i] * x for x in token.k]
            for j in range(len(solved)):
                if self.reaches(j, i):
                    entry = token.beta * self.decay(one, self.between(tokens, i, j)) * dot(token.k, tokens[j].k)
                    row = [x - entry * y for x, y in zip(row, solved[j], strict=True)]
            solved.append(row)
        width = len(state[0])
        columns = list(zip(*state, strict=True))
        fresh = [[u - dot(row[width:], column) for u, column in zip(row[:width], columns, strict=True)] for row in solved]
        outputs = []
        for i, token in enumerate(tokens):
            row = [grown[i] * dot(token.q, column) for column in columns]
            for j in range(len(tokens)):
                if self.reads(j, i):
                    score = dot(token.q, tokens[j].k) * self.decay(one, self.between(tokens, i, j))
                    row = [x + score * y for x, y in zip(row, fresh[j], strict=True)]
            outputs.append(row)
        last = len(tokens) - 1
        state = [[self.decay(one, tokens) * x for x in row] for row in state]
        for j, token in enumerate(tokens):
            left = self.decay(one, self.between(tokens, last, j))
            state = [
                [x + left * each * new for x, new in zip(row, fresh[j], strict=True)]
                for each, row in zip(token.k, state, strict=True)
            ]
        return outputs, state


class DecayAtTheWritingToken(Chunked):
    """Between tokens j and i lie the decays of j..i-1."""

    def between(self, tokens: Sequence[Token], i: int, j: int) -> Sequence[Token]:
        return tokens[j:i]


class StateNotDecayed(Chunked):
    """What enters a chunk does not decay in it."""

    def decay(self, one: Any, tokens: Sequence[Token]) -> Any:
        return one if len(tokens) == self.whole else super().decay(one, tokens)

    whole = 0

    def chunk(self, one: Any, tokens: Sequence[Token], state: Matrix) -> tuple[Matrix, Matrix]:
        self.whole = len(tokens)
        return super().chunk(one, tokens, state)


class ReadsOnlyThePast(Chunked):
    """The mask of the scores is strict."""

    def reads(self, token: int, query: int) -> bool:
        return token < query


class ReadsTheFuture(Chunked):
    """The scores have no mask."""

    def reads(self, token: int, query: int) -> bool:
        return True


class CorrectsOnlyNeighbours(Chunked):
    """A has one subdiagonal."""

    def reaches(self, before: int, after: int) -> bool:
        return before == after - 1


class MaskNotStrict(Chunked):
    """A keeps its diagonal: a token corrects what it writes itself."""

    def chunk(self, one: Any, tokens: Sequence[Token], state: Matrix) -> tuple[Matrix, Matrix]:
        twice = [token._replace(beta=token.beta * (one - token.beta * dot(token.k, token.k))) for token in tokens]
        return super().chunk(one, twice, state)


class DropsState(Chunked):
    """Every chunk starts from nothing."""

    def chunk(self, one: Any, tokens: Sequence[Token], state: Matrix) -> tuple[Matrix, Matrix]:
        return super().chunk(one, tokens, [[x - x for x in row] for row in state])


WRONG_CHUNKED = (
    DecayAtTheWritingToken,
    StateNotDecayed,
    ReadsOnlyThePast,
    ReadsTheFuture,
    CorrectsOnlyNeighbours,
    MaskNotStrict,
    DropsState,
)


def residues(tokens: int, key_dim: int, value_dim: int, seed: int) -> tuple[list[Token], Matrix]:
    """Random tokens and a state; one decay in eight is zero, as exp(-1000) is."""
    rng = random.Random(seed)

    def vector(width: int) -> list[Residue]:
        return [Residue(rng.randrange(P)) for _ in range(width)]

    rows = [
        Token(vector(key_dim), vector(key_dim), vector(value_dim), Residue(rng.randrange(P) * (rng.randrange(8) > 0)), *vector(1))
        for _ in range(tokens)
    ]
    return rows, [vector(value_dim) for _ in range(key_dim)]


@given(
    sizes=st.lists(st.integers(0, 5), max_size=4),
    key_dim=st.integers(1, 3),
    value_dim=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_chunkwise_algebra_is_the_recurrence_exactly(sizes: list[int], key_dim: int, value_dim: int, seed: int) -> None:
    tokens, state = residues(sum(sizes), key_dim, value_dim, seed)
    assert Chunked().run(Residue(1), tokens, state, sizes) == token_by_token(tokens, state)


@pytest.mark.parametrize("wrong", WRONG_CHUNKED)
def test_wrong_chunkwise_algebra_is_rejected(wrong: type[Chunked]) -> None:
    tokens, state = residues(7, 2, 2, seed=1)
    assert Chunked().run(Residue(1), tokens, state, [3, 4]) == token_by_token(tokens, state)
    assert wrong().run(Residue(1), tokens, state, [3, 4]) != token_by_token(tokens, state)


# The code users run, on integers


@dataclasses.dataclass(frozen=True)
class Whole:
    """A call of small integers: no decay, beta 0 or 1, scale 1. Rows are q, k, v, beta, and per sequence and head a state."""

    lengths: tuple[int, ...]
    heads: int
    value_heads: int
    width: int
    value_width: int
    seed: int

    def numbers(self) -> dict[str, list[int]]:
        """Each tensor's entries in order; g's are decays of one."""
        rng = random.Random(self.seed)

        def some(low: int, high: int, *sizes: int) -> list[int]:
            return [rng.randint(low, high) for _ in range(math.prod(sizes))]

        tokens = sum(self.lengths)
        return {
            "q": some(-3, 3, tokens, self.heads, self.width),
            "k": some(-1, 1, tokens, self.heads, self.width),
            "v": some(-3, 3, tokens, self.value_heads, self.value_width),
            "g": [1] * (tokens * self.value_heads),
            "beta": some(0, 1, tokens, self.value_heads),
            "state": some(-3, 3, len(self.lengths), self.value_heads, self.width, self.value_width),
        }

    def cotangents(self) -> dict[str, list[int]]:
        rng = random.Random(self.seed + 1)
        sizes = {"o": (sum(self.lengths), self.value_heads, self.value_width), "final_state": self.states()}
        return {name: [rng.randint(-2, 2) for _ in range(math.prod(size))] for name, size in sizes.items()}

    def states(self) -> tuple[int, ...]:
        return len(self.lengths), self.value_heads, self.width, self.value_width

    def inputs(self) -> Inputs:
        tokens, entries = sum(self.lengths), self.numbers()
        keys, values = (1, tokens, self.heads, self.width), (1, tokens, self.value_heads, self.value_width)
        shapes = {"q": keys, "k": keys, "v": values, "g": values[:3], "beta": values[:3], "state": self.states()}
        tensors = {name: torch.tensor(entries[name], dtype=torch.float32).reshape(shape) for name, shape in shapes.items()}
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        return Inputs(**{**tensors, "g": torch.zeros(shapes["g"])}, cu_seqlens=ends, scale=1.0, qk_norm=False)


def in_duals(call: Whole, entries: dict[str, list[Dual]], keys: Callable[[int], int]) -> dict[str, list[Dual]]:
    """Outputs of the definition in integers with derivatives, entries in order."""

    def vector(name: str, index: int, width: int) -> list[Dual]:
        return entries[name][index * width : (index + 1) * width]

    rows: dict[tuple[int, int], list[Dual]] = {}
    finals: list[Dual] = []
    start = 0
    for sequence, length in enumerate(call.lengths):
        for head in range(call.value_heads):
            tokens = [
                Token(
                    vector("q", t * call.heads + keys(head), call.width),
                    vector("k", t * call.heads + keys(head), call.width),
                    vector("v", t * call.value_heads + head, call.value_width),
                    entries["g"][t * call.value_heads + head],
                    entries["beta"][t * call.value_heads + head],
                )
                for t in range(start, start + length)
            ]
            first = (sequence * call.value_heads + head) * call.width
            state = [vector("state", first + row, call.value_width) for row in range(call.width)]
            outputs, state = token_by_token(tokens, state)
            rows |= {(start + t, head): row for t, row in enumerate(outputs)}
            finals += [x for row in state for x in row]
        start += length
    return {"o": [x for place in sorted(rows) for x in rows[place]], "final_state": finals}


def by_integers(call: Whole, tiled: bool = False) -> dict[str, list[int]]:  # noqa: FBT001, FBT002
    """Outputs and gradients in Python integers: the derivative of exp(g) at g = 0 is that of the decay."""

    def keys(head: int) -> int:
        return head % call.heads if tiled else head // (call.value_heads // call.heads)

    numbers = {name: [Dual(n) for n in entries] for name, entries in call.numbers().items()}
    cotangents = call.cotangents()
    result = {name: [x.n for x in each] for name, each in in_duals(call, numbers, keys).items()}
    for name, entries in numbers.items():
        slopes = []
        for index, entry in enumerate(entries):
            moved = [*entries[:index], Dual(entry.n, 1), *entries[index + 1 :]]
            outputs = in_duals(call, {**numbers, name: moved}, keys)
            slopes.append(sum(c * x.slope for each in cotangents for c, x in zip(cotangents[each], outputs[each], strict=True)))
        result[gradient_name(name)] = slopes
    return result


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) <= 9),
    groups=st.sampled_from([(1, 1), (1, 2), (2, 2)]),
    widths=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[7, 0, 2], groups=(2, 4), widths=(2, 2), seed=5)
def test_float64_equals_python_integers_forward_and_backward(
    lengths: list[int], groups: tuple[int, int], widths: tuple[int, int], seed: int
) -> None:
    call = Whole(tuple(lengths), *groups, *widths, seed)
    inputs, want = call.inputs(), by_integers(call)
    assert max((abs(n) for each in want.values() for n in each), default=0) < 2**40, "float64 must hold every sum"
    given_directions = {
        "o": torch.tensor(call.cotangents()["o"], dtype=torch.float32).reshape(inputs.v.shape),
        "final_state": torch.tensor(call.cotangents()["final_state"], dtype=torch.float32).reshape(call.states()),
    }
    for algorithm, chunk in (("recurrent", 4), ("chunkwise", 1), ("chunkwise", 4), ("chunkwise", 64)):
        got = form(inputs, given_directions, algorithm, chunk)
        assert {name: each.flatten().tolist() for name, each in got.items()} == want, (algorithm, chunk)


def test_integers_reject_tiled_key_heads() -> None:
    call = Whole((3,), 2, 4, 2, 2, seed=5)
    assert form(call.inputs(), None, "chunkwise", 64)["o"].flatten().tolist() == by_integers(call)["o"]
    assert form(call.inputs(), None, "chunkwise", 64)["o"].flatten().tolist() != by_integers(call, tiled=True)["o"]


# Gradients


def objective(inputs: Inputs, cotangents: Results) -> float:
    """The sum of all outputs times their cotangents."""
    outputs = truth(inputs)
    return float(sum((outputs[name] * each.double()).sum() for name, each in cotangents.items()))


def taylor_order(case: Case, gradients: Results, directions: int = 3) -> float:
    """How fast J(x + hd) - J(x) - h <dJ, d> falls with h, summed over random directions in all inputs: 2 if dJ is the gradient."""
    inputs, cotangents = case.inputs(), case.cotangents()
    generator = torch.Generator().manual_seed(case.seed)
    x = {name: inputs[name].double() for name in TENSORS if inputs[name] is not None}
    start = objective(inputs, cotangents)
    remainders = [0.0, 0.0]
    for _ in range(directions):
        toward = {}
        for name, each in x.items():
            size = min(float(each.abs().max()), 1.0) or 1.0
            toward[name] = (torch.rand(each.shape, generator=generator, dtype=torch.float64) * 2 - 1) * size
        slope = float(sum((gradients[gradient_name(name)] * each).sum() for name, each in toward.items()))
        for index, h in enumerate((2.0**-14, 2.0**-15)):
            there = objective(inputs.replaced(**{name: x[name] + h * toward[name] for name in x}), cotangents)
            remainders[index] += abs(there - start - h * slope)
    return math.log2(remainders[0] / remainders[1])


SMOOTH = cases(Domain(key_dims=(2, 256)), longest=40, total=60, beta=("ordinary", "one", "two", "edges")).filter(
    lambda case: case.tokens and not (case.qk_norm and case.values == "zero_rows")  # the norm turns within sqrt(EPS) of zero
)


@settings(max_examples=40)
@given(case=SMOOTH)
@example(case=Case.parse("lengths=70+9 packed=yes heads=2 value_heads=4 gate=64 state=random qk_norm=yes seed=1"))
@example(case=Case.parse("lengths=66 gate=saturated beta=two values=correlated state=random seed=2"))
def test_taylor_remainders_of_the_truth_are_of_second_order(case: Case) -> None:
    assert taylor_order(case, truth(case.inputs(), case.cotangents())) > 1.9


def unprojected(case: Case) -> Tensor:
    """dk that forgets that the norm of k moves with k."""
    inputs = case.inputs()
    q, k = (inputs[name].double() for name in ("q", "k"))
    flat = truth(inputs.replaced(q=l2norm(q), k=l2norm(k), qk_norm=False), case.cotangents())
    return flat["dk"] * (k.square().sum(-1, keepdim=True) + EPS).rsqrt()


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda case, right: {"dg": right["dg"].roll(1, 1)}, id="dg late by one token"),
        pytest.param(lambda case, right: {"dk": unprojected(case)}, id="dk not projected"),
        pytest.param(lambda case, right: {"dh0": torch.zeros_like(right["dh0"])}, id="no dh0"),
        pytest.param(lambda case, right: {"dbeta": right["dbeta"] * (1 + 1e-2)}, id="dbeta one percent off"),
        pytest.param(lambda case, right: {"dq": right["dq"].flip(2)}, id="dq of the other head"),
        pytest.param(lambda case, right: {"dv": right["dv"] * (torch.arange(20) != 7).reshape(1, -1, 1, 1)}, id="a row of dv lost"),
    ],
)
def test_taylor_remainders_reject_a_wrong_gradient(wrong: Callable[[Case, Results], Results]) -> None:
    case = Case.parse("lengths=20 heads=2 value_heads=4 gate=10 state=random qk_norm=yes seed=4")
    right = truth(case.inputs(), case.cotangents())
    assert taylor_order(case, right) > 1.9
    assert taylor_order(case, {**right, **wrong(case, right)}) < 1.5


def small_tensors(tokens: int) -> tuple[Tensor, ...]:
    """q, k, v, g, beta, state with one run, two heads, K = 2 and V = 3."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((1, 2, tokens, 2), (1, 2, tokens, 2), (1, 2, tokens, 3), (1, 2, tokens), (1, 2, tokens), (1, 2, 2, 3))
    drawn = [torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1 for shape in shapes]
    drawn[3] = -drawn[3].abs()
    return tuple(each.requires_grad_() for each in drawn)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_gradcheck_accepts_both_forms(tokens: int) -> None:
    exact = Arithmetic.exact()
    assert torch.autograd.gradcheck(lambda *x: recurrent(*x, 0.7, exact), small_tensors(tokens))
    assert torch.autograd.gradcheck(lambda *x: chunkwise(*x, 0.7, exact, 2), small_tensors(tokens))


class Unprojected(torch.autograd.Function):
    """The L2 norm, whose backward forgets that the norm moves."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return l2norm(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return cotangents[0] * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def test_gradcheck_accepts_the_norm_and_rejects_one_without_projection() -> None:
    x = (small_tensors(3)[0].detach() * 1e-2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: Normalised.apply(x, Arithmetic.exact(), "k"), x)
    assert not torch.autograd.gradcheck(Unprojected.apply, x, raise_exception=False)


# The norm and the heads


def by_decimals(row: Sequence[float]) -> list[Fraction]:
    """x / sqrt(sum(x^2) + eps) to 60 digits."""
    with decimal.localcontext(decimal.Context(prec=60)):
        root = (sum((Decimal(x) ** 2 for x in row), Decimal(0)) + Decimal(EPS)).sqrt()
        return [Fraction(Decimal(x) / root) for x in row]


def ulps_off(norm: Callable[[Tensor], Tensor], row: Sequence[float]) -> float:
    """The largest error of an entry in units of 2^-53 of it."""
    got = norm(torch.tensor(row, dtype=torch.float64)).tolist()
    pairs = zip(got, by_decimals(row), strict=True)
    return max(float(abs(Fraction(one) - each) / abs(each)) * 2.0**53 if each else abs(one) for one, each in pairs)


ROWS = st.builds(
    lambda entries, exponent: [n * 2.0 ** (exponent - 8) for n in entries],
    st.lists(st.integers(-255, 255), min_size=1, max_size=64),
    st.integers(-30, 6),
)


@settings(max_examples=200)
@given(row=ROWS)
@example(row=[0.0] * 7)
@example(row=[1e-4] * 128)
@example(row=[1e-200, 0.0, 3.0])
def test_norm_equals_60_digits_to_a_few_roundings(row: list[float]) -> None:
    limit = 4 + len(row) / 2  # a sum of squares, a root, a reciprocal and a product; 2 measured up to 64 entries
    assert ulps_off(l2norm, row) <= limit
    assert ulps_off(lambda x: Normalised.apply(x, Arithmetic.exact(), "k"), row) <= limit


@pytest.mark.parametrize("wrong", [mean_eps, floored])
def test_wrong_place_of_eps_is_rejected(wrong: Callable[[Tensor], Tensor]) -> None:
    row = [1e-3, -2e-3, 5e-4]
    assert ulps_off(l2norm, row) <= 4
    assert ulps_off(wrong, row) > 1e6


@given(group=st.integers(1, 4), heads=st.integers(1, 3), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_norm_commutes_with_repeating_heads_exactly(group: int, heads: int, width: int, seed: int) -> None:
    x = torch.rand(2, heads, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e-3
    repeated = repeat_heads(x, heads * group)
    assert torch.equal(l2norm(repeated), repeat_heads(l2norm(x), heads * group))
    assert all(torch.equal(repeated[:, head], x[:, head // group]) for head in range(heads * group))
    assert torch.equal(repeat_heads(x.mT, heads * group, axis=-1), repeated.mT)
    if heads > 1 and group > 1:
        assert not torch.equal(repeated, x.repeat(1, group, 1)), "tiled heads are another mapping"


@pytest.mark.parametrize(("heads", "value_heads"), [(2, 3), (0, 2), (4, 2)])
def test_heads_that_do_not_divide_are_refused(heads: int, value_heads: int) -> None:
    with pytest.raises(ValueError, match=f"^value_heads must be a multiple of heads {heads}, got {value_heads}$"):
        repeat_heads(torch.zeros(1, heads, 2), value_heads)


# Boundaries


def test_lengths_override_the_boundaries() -> None:
    case = Case.parse("lengths=7+0+60+5 packed=yes heads=2 value_heads=2 gate=1000 seed=8")
    inputs, cotangents = case.inputs(), case.cotangents()
    whole = truth(inputs, lengths=[case.tokens])
    joined = dataclasses.replace(case, lengths=(case.tokens,))
    want = by_definition(inputs.replaced(cu_seqlens=torch.tensor([0, case.tokens])), joined.cotangents())
    assert whole["final_state"].shape[0] == 1
    torch.testing.assert_close(whole["o"], want["o"], rtol=0, atol=1e-14)
    torch.testing.assert_close(whole["final_state"], want["final_state"], rtol=0, atol=1e-14)
    apart = truth(inputs, cotangents)
    assert torch.equal(truth(inputs, cotangents, lengths=[7, 0, 60, 5])["dq"], apart["dq"])
    moved = (whole["o"] - apart["o"]).norm(dim=-1)[0]
    assert torch.equal(moved[:7], torch.zeros(7, 2, dtype=torch.float64))
    assert (moved[7:] > 1e-3).all(), "state that crosses a boundary shows"


def test_no_state_is_a_state_of_zeros_to_the_bit() -> None:
    case = Case.parse("lengths=33+0+70 packed=yes heads=2 value_heads=4 gate=64 qk_norm=yes seed=9")
    inputs, cotangents = case.inputs(), case.cotangents()
    absent, zeros = truth(inputs, cotangents), truth(inputs.replaced(state=torch.zeros(3, 4, 16, 16)), cotangents)
    assert zeros.keys() - absent.keys() == {"dh0"}
    assert all(torch.equal(absent[name], zeros[name]) for name in absent)


@pytest.mark.parametrize("state", ["none", "zero", "random"])
@pytest.mark.parametrize("lengths", ["0", "0+0 packed=yes", "0+0"])
def test_no_tokens_at_all_return_the_state(lengths: str, state: str) -> None:
    case = Case.parse(f"lengths={lengths} value_heads=2 state={state}")
    inputs, cotangents = case.inputs(), case.cotangents()
    got = truth(inputs, cotangents)
    assert got["o"].shape == inputs.v.shape
    assert got["dq"].shape == inputs.q.shape
    if inputs.state is None:
        assert torch.equal(got["final_state"], torch.zeros_like(cotangents["final_state"]).double())
    else:
        assert torch.equal(got["final_state"], inputs.state.double())
        assert torch.equal(got["dh0"], cotangents["final_state"].double())


@settings(max_examples=20)
@given(
    lengths=st.lists(st.sampled_from((0, 0, 1, 5, 17)), min_size=1, max_size=5),
    state=st.sampled_from(("none", "random")),
    seed=st.integers(0, 2**16),
)
def test_empty_sequences_pass_their_state_and_change_nothing_else(lengths: list[int], state: str, seed: int) -> None:
    case = Case(lengths=tuple(lengths), packed=True, state=state, gate="64", seed=seed)
    inputs, cotangents = case.inputs(), case.cotangents()
    filled = [row for row, length in enumerate(lengths) if length]
    empty = [row for row, length in enumerate(lengths) if not length]
    got = truth(inputs, cotangents)
    start = torch.zeros_like(got["final_state"]) if inputs.state is None else inputs.state.double()
    assert torch.equal(got["final_state"][empty], start[empty])
    if not filled:
        return
    offsets = torch.tensor([0, *(lengths[row] for row in filled)]).cumsum(0)
    only = inputs.replaced(cu_seqlens=offsets, state=None if inputs.state is None else inputs.state[filled])
    want = truth(only, {**cotangents, "final_state": cotangents["final_state"][filled]})
    for name, each in want.items():
        rows = got[name][filled] if name in ("final_state", "dh0") else got[name]
        assert torch.equal(rows, each), name
