"""The oracles of the delta rules are the definition, within float64 and exactly in a field and in integers; so are their gradients.

Each proof is shown to reject a wrong oracle. Float64 limits are stated twice. Whole tensors, in ordinary regimes: 1e-14 of the
largest entry. Single rows, everywhere: float64 is 2^29 times finer than float32, so a row may err by a few times 2^-29 of what
`bounds` allows float32 there, which follows the conditioning of the case whatever it is.
"""

import dataclasses
import decimal
import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from oracles import bound, chunkwise, decay, disturbed, scan, segments
from oracles.bound import _evaluate, bounds, truth
from oracles.gated_delta import definition, merge, repeat_heads, transition
from oracles.norm import EPS, Normalised, l2norm
from oracles.operation import Inputs, gradient_name, sequences
from oracles.operations import RULES
from oracles.rounding import Arithmetic
from properties.cases.rule_case import Case
from properties.common_laws import view
from properties.domain import VIEWS, Domain
from properties.strategies import REMEMBERING, cases
from tests.judging import relative

Results = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
TENSORS = ("q", "k", "v", "g", "beta", "state")
# The definition's forms: what `truth` computes in chunks of any size (None: of least work), and at runs = 1 the two classes
# that round; where channels decay apart, chunks are powers of two.
EXACT = (("exact", None), ("exact", 1), ("exact", 16), ("exact", 37), ("exact", 64))
SMALLEST = {"cpu": 1, "cuda": 1}  # bytes: one chunk a segment
FORMS = (*EXACT, ("recurrent", None), ("chunkwise", 16), ("chunkwise", 64), ("chunkwise", 128))


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
        state = g_t.exp().unsqueeze(-1) * (state + torch.outer(k_t, beta_t * (v_t - k_t @ state)))
        rows.append(scale * (q_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


def reads_before_writing(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp().unsqueeze(-1) * state
        rows.append(scale * (q_t @ state))
        state = state + torch.outer(k_t, beta_t * (v_t - k_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


def corrects_the_undecayed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp().unsqueeze(-1) * state + torch.outer(k_t, beta_t * (v_t - k_t @ state))
        rows.append(scale * (q_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


def decays_the_values_channels(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp().unsqueeze(-2) * state
        state = state + torch.outer(k_t, beta_t * (v_t - k_t @ state))
        rows.append(scale * (q_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the contract is read: the rule of one head, its norm and gates, a value head's key head, what a sequence starts from."""

    rule: Rule = definition
    norm: Callable[[Tensor], Tensor] = l2norm
    gate: Callable[[Tensor], Tensor] = lambda g: g
    tiled: bool = False
    leaks: bool = False


RIGHT = Reading()
WRONG = {
    "reads before writing": Reading(rule=reads_before_writing),
    "eps floors the norm": Reading(norm=floored),
    "eps inside the mean": Reading(norm=mean_eps),
    "tiles key heads": Reading(tiled=True),
    "state leaks into the next sequence": Reading(leaks=True),
}
WRONG_DECAYS = {
    "decays after writing": Reading(rule=decays_after_writing),
    "corrects the undecayed state": Reading(rule=corrects_the_undecayed),
    "decays late by one token": Reading(gate=lambda g: g.roll(1, 0)),
}
WRONG_CHANNELS = {
    "one decay for all channels": Reading(gate=lambda g: g.mean(-1, keepdim=True).expand_as(g)),
    "channels reversed": Reading(gate=lambda g: g.flip(-1)),
    "decays the values' channels": Reading(rule=decays_the_values_channels),
}
READINGS = {
    "delta_rule": WRONG,
    "gated_delta_rule": {**WRONG, **WRONG_DECAYS},
    "kda": {**WRONG, **WRONG_DECAYS, **WRONG_CHANNELS},
}
TELLING = "lengths=9+0+20 packed=yes heads=2 value_heads=4 gate=10 state=random values=small qk_norm=yes seed=3"


def by_definition(inputs: Inputs, cotangents: Results, reading: Reading = RIGHT) -> Results:
    """Outputs and gradients in float64, one head of one sequence at a time, differentiated by autograd."""
    leaves = {name: inputs[name].double().requires_grad_() for name in TENSORS if inputs[name] is not None}
    x = dict(leaves)
    if inputs.qk_norm:
        x |= {name: reading.norm(x[name]) for name in ("q", "k")}
    x |= {name: x[name].flatten(0, 1) for name in x if name != "state"}
    x["g"] = reading.gate(x["g"]) if "g" in x else torch.zeros_like(x["beta"])
    (heads, width), (value_heads, value_width) = inputs.q.shape[2:], inputs.v.shape[2:]
    scale = width**-0.5 if inputs.scale is None else inputs.scale
    outputs, finals, start = [], [], 0
    for row, length in enumerate(sequences(inputs, "q")):
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
    total = sum(((result[name] * cotangent.double()).sum() for name, cotangent in cotangents.items()), torch.zeros(()))
    zeros = [torch.zeros_like(leaf) for leaf in leaves.values()]
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True) if total.requires_grad else zeros
    result |= {gradient_name(name): gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach() for name, tensor in result.items()}


def form(operation: str, inputs: Inputs, cotangents: Results | None, algorithm: str = "exact", chunk: int | None = None) -> Results:
    """Outputs and gradients of one form of the oracle, in exact arithmetic."""
    arithmetic = dataclasses.replace(Arithmetic.exact(), algorithm=algorithm, chunk=chunk)
    return {name: runs[0] for name, runs in _evaluate(RULES[operation], inputs, cotangents, arithmetic).items()}


def of(operation: str, case: Case) -> Case:
    return dataclasses.replace(case, operation=operation)


def in_single(inputs: Inputs) -> Inputs:
    """The same numbers in float32."""
    return inputs.replaced(**{name: inputs[name].float() for name in TENSORS if inputs[name] is not None})


def worst_row(case: Case, got: Results, want: Results, allowed: Results) -> float:
    """The largest error of a row, in units of 2^-29 of what float32 may err there."""
    assert got.keys() == want.keys()
    worst = 0.0
    for name, value in want.items():
        assert got[name].shape == value.shape
        error = (got[name] - value).abs() if case.spec.port(name).scalar_rows else (got[name] - value).norm(dim=-1)
        ratios = (error / (allowed[name] * 2.0**-29)).nan_to_num(nan=math.inf).flatten()
        worst = max([worst, *ratios.tolist()])
    return worst


def allowed_in_single(case: Case) -> Results:
    limits = bounds(case.spec, in_single(case.inputs()), case.cotangents(), "chunkwise")
    return {name: limit.allowed for name, limit in limits.items()}


# Largest error of a tensor over its largest entry; 650 cases an operation measured, ordinary: no decay beyond 10 tokens, beta up to
# 1, no correlated or repeated tokens, no single channels. With 16 tokens and heads or more 4.0e-15, the classes at runs = 1
# 5.8e-15. Of fewer, the largest entry of dg or dbeta may itself be what is left of a sum whose terms cancel: 5.4e-14.
RELATIVE_LIMIT, FEW_SCALARS_LIMIT = 1e-14, 1e-13
# Chunks of one token, which nobody asks for, multiply the state by a K x K product a token: of 8 cases of 150 tokens, with a memory
# of 1000 or more, the worst is off by 1.3e-14 (K = 64), 1.7e-14 (128) and 2.8e-14 (256).
ONE_TOKEN_LIMIT = 5e-14
# Rows against 2^-29 of float32's allowance; 700 cases of the whole domain an operation measured: 3.0, and 4.4 where tokens repeat.
ROW_LIMIT = 8.0


def forms(operation: str) -> list[tuple[str, int | None]]:
    return [(algorithm, chunk) for algorithm, chunk in FORMS if operation != "kda" or chunk != 37]


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=6)
@given(case=cases(Domain(), longest=150, total=150))
@example(case=Case.parse("lengths=128+42 packed=yes value_heads=2 key_dim=12 beta=two values=repeated qk_norm=yes seed=127"))
@example(case=Case.parse("lengths=75+75 value_heads=4 key_dim=1 value_dim=40 beta=one state=random qk_norm=yes seed=9982"))
@example(case=Case.parse("lengths=130 value_heads=2 gate=saturated beta=two values=correlated state=random seed=5"))
@example(case=Case.parse("lengths=0+0+1+129+0 packed=yes value_heads=2 gate=mixed values=scaled state=random seed=6"))
@example(case=Case.parse("lengths=0 packed=yes state=random"))
@example(case=Case.parse("lengths=0+0"))
@pytest.mark.slow
def test_each_form_equals_the_definition_row_by_row(operation: str, case: Case) -> None:
    case = of(operation, case)
    inputs, cotangents = case.inputs(), case.cotangents()
    want, allowed = by_definition(inputs, cotangents), allowed_in_single(case)
    for algorithm, chunk in forms(operation):
        worst = worst_row(case, form(operation, inputs, cotangents, algorithm, chunk), want, allowed)
        assert worst <= ROW_LIMIT, (algorithm, chunk)


ORDINARY = cases(
    Domain(key_dims=(2, 256)),
    longest=150,
    total=150,
    gate=REMEMBERING,
    beta=("ordinary", "one", "edges"),
    values=("ordinary", "scaled"),
)


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=7)
@given(case=ORDINARY)
@pytest.mark.slow
def test_each_form_equals_the_definition_to_few_roundings_where_the_case_is_well_conditioned(operation: str, case: Case) -> None:
    case = of(operation, case)
    inputs, cotangents = case.inputs(), case.cotangents()
    want = by_definition(inputs, cotangents)
    for algorithm, chunk in forms(operation):
        errors = relative(form(operation, inputs, cotangents, algorithm, chunk), want)
        few = ("dg", "dbeta") if case.tokens * case.value_heads < 16 else ()
        limit = ONE_TOKEN_LIMIT if chunk == 1 else RELATIVE_LIMIT
        for name, error in errors.items():
            assert error <= (FEW_SCALARS_LIMIT if name in few else limit), (algorithm, chunk, name)


# Two regimes that are worse conditioned; 30 cases an operation and chunk of 16, 64 and 128 measured. Where every write reflects the
# state in a key like the one before: 5e-15, 9e-15 and 1.5e-14. Where decays of -1e3 stand beside -0.01, an exponent is the
# difference of two sums of up to 1e3 times the tokens in a chunk, each off by a unit of its last place: 1.5e-12, 1.3e-11, 2.6e-11.


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("chunk", [16, 64, 128])
@pytest.mark.slow_after_first
def test_reflections_in_correlated_keys_keep_to_their_own_limit(operation: str, chunk: int) -> None:
    for seed in range(2):
        case = Case.parse(f"op={operation} lengths=260 key_dim=32 gate=1000 values=correlated state=random seed={seed}")
        inputs, cotangents = case.inputs(), case.cotangents()
        twice = inputs.replaced(beta=torch.full_like(inputs.beta, 2.0))
        errors = relative(form(operation, twice, cotangents, "exact", chunk), by_definition(twice, cotangents))
        assert max(errors.values()) <= 3e-14, errors


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("chunk", [16, 64, 128])
@pytest.mark.slow_after_first
def test_decays_of_a_thousand_beside_a_hundredth_keep_to_their_own_limit(operation: str, chunk: int) -> None:
    for seed in range(2):
        case = Case.parse(f"op={operation} lengths=260 key_dim=32 gate=saturated state=random seed={seed}")
        inputs, cotangents = case.inputs(), case.cotangents()
        g = torch.where(inputs.g < -1, -1e3, torch.tensor(-1e-2, dtype=torch.float64))
        errors = relative(
            form(operation, inputs.replaced(g=g), cotangents, "exact", chunk), by_definition(inputs.replaced(g=g), cotangents)
        )
        assert 1e-14 < max(errors.values()) <= 1e3 * chunk * 2.0**-51, errors


@pytest.mark.parametrize(("operation", "wrong"), [(operation, wrong) for operation in RULES for wrong in READINGS[operation]])
@pytest.mark.slow_after_first
def test_wrong_reading_of_the_definition_is_rejected(operation: str, wrong: str) -> None:
    case = of(operation, Case.parse(TELLING))
    inputs, cotangents = case.inputs(), case.cotangents()
    got, allowed = form(operation, inputs, cotangents), allowed_in_single(case)
    right, read = by_definition(inputs, cotangents), by_definition(inputs, cotangents, READINGS[operation][wrong])
    assert worst_row(case, got, right, allowed) <= ROW_LIMIT
    assert max(relative(got, right).values()) <= RELATIVE_LIMIT
    assert worst_row(case, got, read, allowed) > 1e6
    assert max(relative(got, read).values()) > 1e6 * RELATIVE_LIMIT


# Here gradients changed in the last bit as long as products took cotangents or inputs in the strides of the call.
TRANSPOSED = "lengths=33 packed=yes value_heads=4 key_dim=65 value_dim=1 dtype=bf16 gate=tenth values=small state=random scale=one"
TRANSPOSED_NORMED = "lengths=16 value_heads=3 key_dim=40 value_dim=1 dtype=fp16 gate=mixed beta=one state=random qk_norm=yes"


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=8)
@given(case=cases(Domain(), longest=80, total=100), how=st.sampled_from(VIEWS))
@example(Case.parse(TRANSPOSED), "transposed")
@example(Case.parse(TRANSPOSED_NORMED), "transposed")
def test_strides_of_the_inputs_change_no_bit(operation: str, case: Case, how: str) -> None:
    case = of(operation, case)
    inputs, cotangents = case.inputs(), case.cotangents()
    views = inputs.replaced(**{name: view(inputs[name], how) for name in TENSORS if inputs[name] is not None})
    dense = inputs.replaced(**{name: views[name].contiguous() for name in TENSORS if inputs[name] is not None})
    cotangent_views = {name: view(cotangent, how) for name, cotangent in cotangents.items()}
    got = truth(case.spec, views, cotangent_views)
    want = truth(case.spec, dense, {name: cotangent.contiguous() for name, cotangent in cotangent_views.items()})
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_gates_alike_in_every_channel_or_of_zeros_are_the_plainer_operations() -> None:
    case = Case.parse("lengths=70+0+9 packed=yes heads=2 value_heads=4 gate=10 state=random qk_norm=yes seed=21")
    inputs, cotangents = case.inputs(), case.cotangents()
    alike = inputs.replaced(g=inputs.g.unsqueeze(-1).expand(*inputs.g.shape, 16))
    gated, channels = (truth(RULES[name], x, cotangents) for name, x in (("gated_delta_rule", inputs), ("kda", alike)))
    channels["dg"] = channels["dg"].sum(-1)
    assert max(relative(channels, gated).values()) <= RELATIVE_LIMIT
    none = truth(RULES["delta_rule"], inputs.replaced(g=None), cotangents)
    zeros = truth(RULES["gated_delta_rule"], inputs.replaced(g=torch.zeros_like(inputs.g)), cotangents)
    assert all(torch.equal(none[name], zeros[name]) for name in none)
    assert not torch.equal(none["o"], gated["o"])


# States passed between shards


def passed(inputs: Inputs, sizes: Sequence[int], combine: Callable[..., tuple[Tensor, Tensor]] = merge) -> tuple[Tensor, Tensor]:
    """M and E of all tokens of the first head, from those of shards of `sizes` tokens."""
    tokens = [inputs[name][0, :, 0].double() for name in ("k", "v")]
    tokens += [inputs.beta.new_zeros(inputs.beta.shape[1]).double() if inputs.g is None else inputs.g[0, :, 0].double()]
    tokens += [inputs.beta[0, :, 0].double()]
    width, shards = inputs.k.shape[-1], zip(*(tensor.split(list(sizes)) for tensor in tokens), strict=True)
    whole = torch.eye(width, dtype=torch.float64), torch.zeros(width, inputs.v.shape[-1], dtype=torch.float64)
    for shard in shards:
        whole = combine(whole, transition(*shard))
    return whole


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=12)
@given(case=ORDINARY, shards=st.integers(1, 5), seed=st.integers(0, 2**16))
@pytest.mark.slow_after_first
def test_merged_transitions_of_shards_are_the_definition(operation: str, case: Case, shards: int, seed: int) -> None:
    one = dataclasses.replace(of(operation, case), lengths=(case.tokens,), state="random", qk_norm=False, heads=1, value_heads=1)
    cuts = sorted(random.Random(seed).choices(range(one.tokens + 1), k=shards - 1))
    inputs = one.inputs()
    keep, write = passed(inputs, [b - a for a, b in itertools.pairwise([0, *cuts, one.tokens])])
    state = inputs.state[0, 0].double()
    want = by_definition(inputs, {})["final_state"][0, 0]
    assert (keep @ state + write - want).abs().max() <= RELATIVE_LIMIT * want.abs().max()


WRONG_MERGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "the later shard first": lambda earlier, later: merge(later, earlier),
    "M on the later shard's E": lambda earlier, later: (later[0] @ earlier[0], later[0] @ later[1] + earlier[1]),
    "E not passed on": lambda earlier, later: (later[0] @ earlier[0], later[1]),
    "M not passed on": lambda earlier, later: (later[0], later[0] @ earlier[1] + later[1]),
}


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("wrong", WRONG_MERGES)
def test_wrong_merge_of_shards_is_rejected(operation: str, wrong: str) -> None:
    inputs = Case.parse(f"op={operation} lengths=20 gate=10 state=random seed=4").inputs()
    state, want = inputs.state[0, 0].double(), by_definition(inputs, {})["final_state"][0, 0]
    errors = []
    for combine in (merge, WRONG_MERGES[wrong]):
        keep, write = passed(inputs, (7, 4, 9), combine)
        errors.append(float((keep @ state + write - want).abs().max() / want.abs().max()))
    assert errors[0] <= RELATIVE_LIMIT
    assert errors[1] > 1e-3


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
    """One token of one head; `decay` is exp(g), one a channel of the key. Numbers of any ring."""

    q: list[Any]
    k: list[Any]
    v: list[Any]
    decay: list[Any]
    beta: Any


Matrix = list[list[Any]]


def dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    first, *rest = [x * y for x, y in zip(a, b, strict=True)]
    return sum(rest, first)


def times(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [x * y for x, y in zip(a, b, strict=True)]


def token_by_token(tokens: Sequence[Token], state: Matrix) -> tuple[Matrix, Matrix]:
    """The definition in any ring, scale 1."""
    outputs = []
    for q, k, v, decays, beta in tokens:
        state = [[channel * x for x in row] for channel, row in zip(decays, state, strict=True)]
        fresh = [beta * (value - dot(k, column)) for value, column in zip(v, zip(*state, strict=True), strict=True)]
        state = [[x + factor * new for x, new in zip(row, fresh, strict=True)] for factor, row in zip(k, state, strict=True)]
        outputs.append([dot(q, column) for column in zip(*state, strict=True)])
    return outputs, state


class Chunked:
    """The chunkwise (WY) form in any ring, scale 1, channel by channel: forward substitution, no division."""

    def reaches(self, before: int, after: int) -> bool:
        """Whether A has an entry for token `after` and the earlier token `before`."""
        return before < after

    def reads(self, token: int, query: int) -> bool:
        return token <= query

    def between(self, tokens: Sequence[Token], i: int, j: int) -> Sequence[Token]:
        """The tokens whose decays part what token j wrote from token i."""
        return tokens[j + 1 : i + 1]

    def decays(self, one: Any, tokens: Sequence[Token], width: int) -> list[Any]:
        """The product of the tokens' decays, channel by channel."""
        product = [one] * width
        for token in tokens:
            product = times(product, token.decay)
        return product

    def product(self, one: Any, tokens: Sequence[Token], x: list[Any], i: int, j: int) -> Any:
        """sum_c x_c k_jc exp(G_ic - G_jc), x the query or key of token i."""
        return dot(times(x, self.decays(one, self.between(tokens, i, j), len(x))), tokens[j].k)

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
        width, value_width = len(state), len(state[0])
        grown = [self.decays(one, tokens[: i + 1], width) for i in range(len(tokens))]
        solved: Matrix = []  # [U | W], a row a token: (I + A) [U | W] = [beta v | beta exp(G) k]
        for i, token in enumerate(tokens):
            row = [token.beta * x for x in (*token.v, *times(grown[i], token.k))]
            for j in range(len(solved)):
                if self.reaches(j, i):
                    entry = token.beta * self.product(one, tokens, token.k, i, j)
                    row = [x - entry * y for x, y in zip(row, solved[j], strict=True)]
            solved.append(row)
        columns = list(zip(*state, strict=True))
        fresh = [
            [u - dot(row[value_width:], column) for u, column in zip(row[:value_width], columns, strict=True)] for row in solved
        ]
        outputs = []
        for i, token in enumerate(tokens):
            row = [dot(times(grown[i], token.q), column) for column in columns]
            for j in range(len(tokens)):
                if self.reads(j, i):
                    score = self.product(one, tokens, token.q, i, j)
                    row = [x + score * y for x, y in zip(row, fresh[j], strict=True)]
            outputs.append(row)
        last = len(tokens) - 1
        whole = self.decays(one, tokens, width)
        state = [[channel * x for x in row] for channel, row in zip(whole, state, strict=True)]
        for j, token in enumerate(tokens):
            key = times(self.decays(one, self.between(tokens, last, j), width), token.k)
            state = [
                [x + factor * new for x, new in zip(row, fresh[j], strict=True)] for factor, row in zip(key, state, strict=True)
            ]
        return outputs, state


class Halved(Chunked):
    """Products that decay as oracles/decay.py takes them: from token j to the last of its half, and from there to token i."""

    def middle(self, i: int, j: int) -> int:
        """The last token of the earlier half of the smallest aligned 2 s tokens, s a power of two, that hold both."""
        size = 1 << ((i ^ j).bit_length() - 1)
        return i // (2 * size) * 2 * size + size - 1

    def halves(self, tokens: Sequence[Token], i: int, j: int) -> tuple[Sequence[Token], Sequence[Token]]:
        """The tokens whose decays go to the later operand, and those that go to the earlier one."""
        middle = self.middle(i, j)
        assert j <= middle < i
        return tokens[middle + 1 : i + 1], tokens[j + 1 : middle + 1]

    def product(self, one: Any, tokens: Sequence[Token], x: list[Any], i: int, j: int) -> Any:
        if i <= j:
            return super().product(one, tokens, x, i, j)
        later, earlier = (self.decays(one, half, len(x)) for half in self.halves(tokens, i, j))
        return dot(times(x, later), times(tokens[j].k, earlier))


class DecayAtTheWritingToken(Chunked):
    """Between tokens j and i lie the decays of j..i-1."""

    def between(self, tokens: Sequence[Token], i: int, j: int) -> Sequence[Token]:
        return tokens[j:i]


class StateNotDecayed(Chunked):
    """What enters a chunk does not decay in it."""

    def decays(self, one: Any, tokens: Sequence[Token], width: int) -> list[Any]:
        return [one] * width if len(tokens) == self.whole else super().decays(one, tokens, width)

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


class DecaysTheOtherChannel(Chunked):
    """Between tokens, the channels' decays come in the opposite order."""

    def product(self, one: Any, tokens: Sequence[Token], x: list[Any], i: int, j: int) -> Any:
        return dot(times(x, self.decays(one, self.between(tokens, i, j), len(x))[::-1]), tokens[j].k)


class DecaysLikeTheFirstChannel(Chunked):
    """Scores and corrections decay by one number, as those of the gated rule do."""

    def product(self, one: Any, tokens: Sequence[Token], x: list[Any], i: int, j: int) -> Any:
        return self.decays(one, self.between(tokens, i, j), len(x))[0] * dot(x, tokens[j].k)


class MiddleTwice(Halved):
    """The decay of the middle token goes to both operands."""

    def halves(self, tokens: Sequence[Token], i: int, j: int) -> tuple[Sequence[Token], Sequence[Token]]:
        middle = self.middle(i, j)
        return tokens[middle : i + 1], tokens[j + 1 : middle + 1]


class MiddleNever(Halved):
    """The decay of the middle token goes to neither operand."""

    def halves(self, tokens: Sequence[Token], i: int, j: int) -> tuple[Sequence[Token], Sequence[Token]]:
        middle = self.middle(i, j)
        return tokens[middle + 1 : i + 1], tokens[j + 1 : middle]


class DecaysOnlyTheLater(Halved):
    """Keys before the middle do not decay towards it."""

    def halves(self, tokens: Sequence[Token], i: int, j: int) -> tuple[Sequence[Token], Sequence[Token]]:
        return super().halves(tokens, i, j)[0], []


class DecaysFromTheChunksMiddle(Halved):
    """One middle for all pairs: where both tokens are on one side of it, the decays are not those between them."""

    def halves(self, tokens: Sequence[Token], i: int, j: int) -> tuple[Sequence[Token], Sequence[Token]]:
        return tokens[2 : i + 1], tokens[j + 1 : 2]


WRONG_CHUNKED = (
    DecayAtTheWritingToken,
    StateNotDecayed,
    ReadsOnlyThePast,
    ReadsTheFuture,
    CorrectsOnlyNeighbours,
    MaskNotStrict,
    DropsState,
)
WRONG_CHANNELWISE = (
    DecaysTheOtherChannel,
    DecaysLikeTheFirstChannel,
    MiddleTwice,
    MiddleNever,
    DecaysOnlyTheLater,
    DecaysFromTheChunksMiddle,
)


def residues(operation: str, tokens: int, key_dim: int, value_dim: int, seed: int) -> tuple[list[Token], Matrix]:
    """Random tokens and a state; one decay in eight is zero, as exp(-1000) is."""
    rng = random.Random(seed)

    def vector(width: int) -> list[Residue]:
        return [Residue(rng.randrange(P)) for _ in range(width)]

    def decays() -> list[Residue]:
        channels = [Residue(rng.randrange(P) * (rng.randrange(8) > 0)) for _ in range(key_dim)]
        return channels if operation == "kda" else [channels[0] if operation == "gated_delta_rule" else Residue(1)] * key_dim

    rows = [Token(vector(key_dim), vector(key_dim), vector(value_dim), decays(), *vector(1)) for _ in range(tokens)]
    return rows, [vector(value_dim) for _ in range(key_dim)]


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("evaluation", [Chunked, Halved])
@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=3),
    key_dim=st.integers(1, 3),
    value_dim=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.slow_after_first
def test_chunkwise_algebra_is_the_recurrence_exactly(
    operation: str, evaluation: type[Chunked], sizes: list[int], key_dim: int, value_dim: int, seed: int
) -> None:
    tokens, state = residues(operation, sum(sizes), key_dim, value_dim, seed)
    assert evaluation().run(Residue(1), tokens, state, sizes) == token_by_token(tokens, state)


@pytest.mark.parametrize(
    ("operation", "wrong"),
    [
        *(("gated_delta_rule", wrong) for wrong in WRONG_CHUNKED),
        *(("delta_rule", wrong) for wrong in WRONG_CHUNKED[2:]),
        *(("kda", wrong) for wrong in (*WRONG_CHUNKED, *WRONG_CHANNELWISE)),
    ],
)
def test_wrong_chunkwise_algebra_is_rejected(operation: str, wrong: type[Chunked]) -> None:
    tokens, state = residues(operation, 7, 2, 2, seed=0)
    assert all(decay != Residue(0) for token in tokens for decay in token.decay), "a decay of zero would hide a later one"
    assert Chunked().run(Residue(1), tokens, state, [3, 4]) == token_by_token(tokens, state)
    assert wrong().run(Residue(1), tokens, state, [3, 4]) != token_by_token(tokens, state)


def stretch(tokens: Sequence[Token], width: int, value_width: int, one: Any) -> tuple[Matrix, Matrix]:
    """M and E of some tokens in any ring: what becomes of the identity if nothing is written, beside what becomes of nothing."""
    zero = one - one
    state = [[one if row == column else zero for column in range(width)] + [zero] * value_width for row in range(width)]
    _, state = token_by_token([token._replace(v=[zero] * width + token.v) for token in tokens], state)
    return [row[:width] for row in state], [row[width:] for row in state]


def applied(keep: Matrix, state: Matrix) -> Matrix:
    return [[dot(row, column) for column in zip(*state, strict=True)] for row in keep]


def added(a: Matrix, b: Matrix) -> Matrix:
    return [[x + y for x, y in zip(one, other, strict=True)] for one, other in zip(a, b, strict=True)]


Pieces = tuple[Matrix, Matrix]
Merge = Callable[[Pieces, Pieces], Pieces]


def merged(earlier: Pieces, later: Pieces) -> Pieces:
    """`merge` in any ring."""
    return applied(later[0], earlier[0]), added(applied(later[0], earlier[1]), later[1])


WRONG_MERGED: dict[str, Merge] = {
    "the later shard first": lambda earlier, later: merged(later, earlier),
    "M on the later shard's E": lambda earlier, later: (
        applied(later[0], earlier[0]),
        added(applied(later[0], later[1]), earlier[1]),
    ),
    "E not passed on": lambda earlier, later: (applied(later[0], earlier[0]), later[1]),
    "M not passed on": lambda earlier, later: (later[0], added(applied(later[0], earlier[1]), later[1])),
}


def by_shards(tokens: Sequence[Token], state: Matrix, sizes: Sequence[int], combine: Merge = merged) -> tuple[Matrix, Matrix]:
    """Outputs and final state of shards that know of what came before only the merged transitions, as ranks do."""
    outputs: Matrix = []
    before, start = stretch([], len(state), len(state[0]), Residue(1)), 0
    for size in sizes:
        shard = tokens[start : start + size]
        rows, _ = token_by_token(shard, added(applied(before[0], state), before[1]))
        before = combine(before, stretch(shard, len(state), len(state[0]), Residue(1)))
        outputs, start = outputs + rows, start + size
    return outputs, added(applied(before[0], state), before[1])


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=4),
    key_dim=st.integers(1, 3),
    value_dim=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_states_passed_between_shards_are_the_recurrence_exactly(
    operation: str, sizes: list[int], key_dim: int, value_dim: int, seed: int
) -> None:
    tokens, state = residues(operation, sum(sizes), key_dim, value_dim, seed)
    assert by_shards(tokens, state, sizes) == token_by_token(tokens, state)
    parts, start = [], 0
    for size in sizes:
        parts.append(stretch(tokens[start : start + size], key_dim, value_dim, Residue(1)))
        start += size
    while len(parts) > 1:  # in a tree as well as one after the other
        parts = [merged(*parts[at : at + 2]) if at + 1 < len(parts) else parts[at] for at in range(0, len(parts), 2)]
    assert parts in ([], [stretch(tokens, key_dim, value_dim, Residue(1))])


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("wrong", WRONG_MERGED)
def test_wrong_passing_of_states_is_rejected(operation: str, wrong: str) -> None:
    tokens, state = residues(operation, 8, 2, 2, seed=0)
    assert by_shards(tokens, state, [3, 4, 1]) == token_by_token(tokens, state)
    assert by_shards(tokens, state, [3, 4, 1], WRONG_MERGED[wrong]) != token_by_token(tokens, state)


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
def test_transition_that_forgets_the_decay_is_rejected(operation: str) -> None:
    tokens, state = residues(operation, 5, 2, 2, seed=0)
    keep, write = stretch(tokens, 2, 2, Residue(1))
    undecayed, _ = stretch([token._replace(decay=[Residue(1)] * 2) for token in tokens], 2, 2, Residue(1))
    want = token_by_token(tokens, state)[1]
    assert added(applied(keep, state), write) == want
    assert added(applied(undecayed, state), write) != want


# The code users run, on integers


@dataclasses.dataclass(frozen=True)
class Whole:
    """A call of small integers, scale 1: decays and beta are 0 or 1. Entries are in order, per sequence and head a state."""

    operation: str
    lengths: tuple[int, ...]
    heads: int
    value_heads: int
    width: int
    value_width: int
    seed: int

    @property
    def gates(self) -> int:
        """Decays a token and head."""
        return {"delta_rule": 0, "gated_delta_rule": 1, "kda": self.width}[self.operation]

    def numbers(self) -> dict[str, list[int]]:
        """Each tensor's entries; g's are decays, one in six of them 0."""
        rng = random.Random(self.seed)

        def some(low: int, high: int, *sizes: int) -> list[int]:
            return [rng.randint(low, high) for _ in range(math.prod(sizes))]

        tokens = sum(self.lengths)
        return {
            "q": some(-3, 3, tokens, self.heads, self.width),
            "k": some(-1, 1, tokens, self.heads, self.width),
            "v": some(-3, 3, tokens, self.value_heads, self.value_width),
            "g": [int(n > 0) for n in some(0, 5, tokens, self.value_heads, self.gates)],
            "beta": some(0, 1, tokens, self.value_heads),
            "state": some(-3, 3, len(self.lengths), self.value_heads, self.width, self.value_width),
        }

    def cotangents(self) -> dict[str, list[int]]:
        rng = random.Random(self.seed + 1)
        sizes = {"o": (sum(self.lengths), self.value_heads, self.value_width), "final_state": self.states()}
        return {name: [rng.randint(-2, 2) for _ in range(math.prod(size))] for name, size in sizes.items()}

    def directions(self) -> Results:
        shapes = {"o": (1, sum(self.lengths), self.value_heads, self.value_width), "final_state": self.states()}
        return {
            name: torch.tensor(entries, dtype=torch.float32).reshape(shapes[name]) for name, entries in self.cotangents().items()
        }

    def states(self) -> tuple[int, ...]:
        return len(self.lengths), self.value_heads, self.width, self.value_width

    def inputs(self) -> Inputs:
        """The same numbers as tensors: exp(g) is 1 for g = 0, and exactly 0 for g = -1000."""
        tokens, entries = sum(self.lengths), self.numbers()
        keys, values = (1, tokens, self.heads, self.width), (1, tokens, self.value_heads, self.value_width)
        gates = (*values[:3], self.width) if self.operation == "kda" else values[:3]
        shapes = {"q": keys, "k": keys, "v": values, "g": gates, "beta": values[:3], "state": self.states()}
        if self.operation == "delta_rule":
            del shapes["g"]
        tensors: dict[str, Any] = {
            name: torch.tensor(entries[name], dtype=torch.float32).reshape(shape) for name, shape in shapes.items()
        }
        tensors["g"] = (1 - tensors["g"]) * -1000 if "g" in tensors else None
        return Inputs(**tensors, cu_seqlens=torch.tensor([0, *self.lengths]).cumsum(0), scale=1.0, qk_norm=False)

    def by_head(self, entries: dict[str, list[Any]], one: Any, keys: Callable[[int], int]) -> dict[tuple[int, int], list[Token]]:
        """The tokens of each sequence and head."""

        def vector(name: str, index: int, width: int) -> list[Any]:
            return entries[name][index * width : (index + 1) * width]

        def token(t: int, head: int) -> Token:
            key, value = t * self.heads + keys(head), t * self.value_heads + head
            decays = vector("g", value, self.gates) or [one]
            return Token(
                vector("q", key, self.width),
                vector("k", key, self.width),
                vector("v", value, self.value_width),
                decays * (self.width // len(decays)),
                entries["beta"][value],
            )

        spans = list(enumerate(itertools.pairwise([0, *itertools.accumulate(self.lengths)])))
        places = [(row, span, head) for row, span in spans for head in range(self.value_heads)]
        return {(row, head): [token(t, head) for t in range(*span)] for row, span, head in places}


def in_duals(call: Whole, entries: dict[str, list[Dual]], keys: Callable[[int], int]) -> dict[str, list[Dual]]:
    """Outputs of the definition in integers with derivatives, entries in order."""
    columns: list[list[Matrix]] = [[] for _ in call.lengths]
    finals: list[Dual] = []
    for (sequence, head), tokens in call.by_head(entries, Dual(1), keys).items():
        first = (sequence * call.value_heads + head) * call.width
        rows = range(first * call.value_width, (first + call.width) * call.value_width, call.value_width)
        outputs, state = token_by_token(tokens, [entries["state"][at : at + call.value_width] for at in rows])
        columns[sequence].append(outputs)
        finals += [x for row in state for x in row]
    return {
        "o": [x for heads in columns for token in zip(*heads, strict=True) for row in token for x in row],
        "final_state": finals,
    }


def by_integers(call: Whole, tiled: bool = False) -> dict[str, list[int]]:  # noqa: FBT001, FBT002
    """Outputs and gradients in Python integers: the derivative of exp(g) in g is exp(g)."""

    def keys(head: int) -> int:
        return head % call.heads if tiled else head // (call.value_heads // call.heads)

    numbers = {name: [Dual(n) for n in entries] for name, entries in call.numbers().items()}
    cotangents = call.cotangents()
    result = {name: [x.n for x in duals] for name, duals in in_duals(call, numbers, keys).items()}
    for name, entries in numbers.items():
        slopes = []
        for index, entry in enumerate(entries):
            moved = [*entries[:index], Dual(entry.n, entry.n if name == "g" else 1), *entries[index + 1 :]]
            outputs = in_duals(call, {**numbers, name: moved}, keys)
            slopes.append(
                sum(c * x.slope for output in cotangents for c, x in zip(cotangents[output], outputs[output], strict=True))
            )
        result[gradient_name(name)] = slopes
    return {name: values for name, values in result.items() if (name, call.gates) != ("dg", 0)}


INTEGER_FORMS = (
    ("recurrent", None),
    *(("chunkwise", size) for size in (1, 4, 64)),
    *(("exact", size) for size in (None, 1, 3, 4, 64)),
)


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=14)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) <= 9),
    groups=st.sampled_from([(1, 1), (1, 2), (2, 2)]),
    widths=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[7, 0, 2], groups=(2, 4), widths=(2, 2), seed=5)
@pytest.mark.slow_after_first
def test_float64_equals_python_integers_forward_and_backward(
    operation: str, lengths: list[int], groups: tuple[int, int], widths: tuple[int, int], seed: int
) -> None:
    call = Whole(operation, tuple(lengths), *groups, *widths, seed)
    want = by_integers(call)
    assert max((abs(n) for entries in want.values() for n in entries), default=0) < 2**40, "float64 must hold every sum"
    for algorithm, chunk in INTEGER_FORMS:
        got = form(operation, call.inputs(), call.directions(), algorithm, chunk)
        assert {name: tensor.flatten().tolist() for name, tensor in got.items()} == want, (algorithm, chunk)


@pytest.mark.parametrize("operation", RULES)
def test_integers_reject_tiled_key_heads(operation: str) -> None:
    call = Whole(operation, (3,), 2, 4, 2, 2, seed=5)
    got = form(operation, call.inputs(), None)["o"].flatten().tolist()
    assert got == by_integers(call)["o"]
    assert got != by_integers(call, tiled=True)["o"]


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda dx, dy, dtotal: (dx, dy, 0 * dtotal), id="no dG from the products"),
        pytest.param(lambda dx, dy, dtotal: (dx, dy, -dtotal), id="the sign of dG"),
        pytest.param(lambda dx, dy, dtotal: (dx, dy.roll(1, -2), dtotal), id="dk late by one token"),
        pytest.param(lambda dx, dy, dtotal: (dx.flip(0), dy, dtotal), id="dq and dk of A exchanged"),
    ],
)
@pytest.mark.slow_after_first
def test_integers_reject_a_wrong_backward(
    operation: str, wrong: Callable[..., tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Whole(operation, (6, 3), 1, 2, 2, 2, seed=7)
    want, right = by_integers(call), chunkwise.decayed_backward

    def gradients() -> dict[str, list[float]]:
        got = form(operation, call.inputs(), call.directions(), "exact", 4)
        return {name: tensor.flatten().tolist() for name, tensor in got.items()}

    assert gradients() == want
    monkeypatch.setattr(chunkwise, "decayed_backward", lambda *arguments: wrong(*right(*arguments)))
    assert gradients() != want


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


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 4), max_size=4),
    widths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 2**32),
)
def test_transition_and_merge_equal_python_integers(operation: str, sizes: list[int], widths: tuple[int, int], seed: int) -> None:
    call = Whole(operation, (sum(sizes),), 1, 1, *widths, seed)
    (tokens,) = call.by_head(call.numbers(), 1, lambda head: head).values()
    keep, write = passed(call.inputs(), sizes)
    assert (keep.tolist(), write.tolist()) == stretch(tokens, *widths, 1)


# Products that decay

Pair = tuple[Tensor, Tensor]


def products(x: Tensor, y: Tensor, total: Tensor) -> Tensor:
    """sum_c x_ic y_jc exp(G_ic - G_jc) at and below the diagonal: the exponentials of all pairs, as they are."""
    x, y, total = torch.broadcast_tensors(x, y, total)
    rows = [
        torch.stack([(x[..., i, :] * y[..., j, :] * (total[..., i, :] - total[..., j, :]).exp()).sum(-1) for j in range(i + 1)], -1)
        for i in range(x.shape[-2])
    ]
    return torch.stack([torch.nn.functional.pad(row, (0, x.shape[-2] - row.shape[-1])) for row in rows], -2)


def decaying(tokens: int, channels: int, seed: int, strongest: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 1, 1, T, 3] and y, G [1, 1, 2, T, ...]: two kinds of products, two value heads of a key head."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2, 1, 1, tokens, 3, generator=generator, dtype=torch.float64) * 2 - 1
    y = torch.rand(1, 1, 1, tokens, 3, generator=generator, dtype=torch.float64) * 2 - 1
    steps = torch.rand(1, 1, 2, tokens, channels, generator=generator, dtype=torch.float64)
    return x, y, (-strongest * steps**4).cumsum(-2)


def worst_product(tokens: int, channels: int, seed: int, strongest: float) -> float:
    """The largest error of the products and of their gradients, over the largest entry."""
    x, y, total = (tensor.requires_grad_() for tensor in decaying(tokens, channels, seed, strongest))
    want = products(x, y, total)
    got, factor = decay.decayed(x.detach(), y.detach(), total.detach())
    dp = torch.rand(want.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).tril()
    dx, dy, dtotal = torch.autograd.grad(want, (x, y, total), dp)
    gradients = dx, dy, dtotal.flip(-2).cumsum(-2).flip(-2)  # of g, of which G is the sum
    slopes = decay.decayed_backward(dp, x.detach(), y.detach(), total.detach(), got, factor)
    parts = {
        "P": got,
        **{name: one.sum_to_size(gradient.shape) for name, one, gradient in zip("xyg", slopes, gradients, strict=True)},
    }
    return max(relative(parts, {"P": want.detach(), **dict(zip("xyg", gradients, strict=True))}).values())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 8, 32])
def test_products_that_decay_are_those_of_all_pairs_however_strong_the_decay(channels: int, tokens: int) -> None:
    for strongest in (0.0, 0.1, 5.0):
        assert worst_product(tokens, channels, tokens, strongest) <= 1e-14
    assert worst_product(tokens, channels, tokens, 1e3) <= 1e-11, "G of thousands, from another"


def overflowing(total: Tensor, size: int) -> Pair:
    """exp(G_i) on one side and exp(-G_j) on the other."""
    low, high = decay.halves(total, size)
    return high.exp(), (-low).exp()


def from_the_later_half(total: Tensor, size: int) -> Pair:
    """Rows decay from the first token of their own half, columns to the last of theirs."""
    low, high = decay.halves(total, size)
    return (high - high[..., :1, :]).exp(), (low[..., -1:, :] - low).exp()


@pytest.mark.parametrize(("wrong", "strongest"), [(overflowing, 1e3), (from_the_later_half, 0.1)])
def test_wrong_decays_of_halves_are_rejected(
    wrong: Callable[[Tensor, int], Pair], strongest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst_product(16, 3, 1, strongest) <= 1e-11
    monkeypatch.setattr(decay, "decays", wrong)
    assert worst_product(16, 3, 1, strongest) > 1e-3


@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 64])
def test_squares_and_diagonal_cover_the_lower_triangle_once(tokens: int) -> None:
    tags = torch.arange(tokens**2).reshape(tokens, tokens)
    seen = tags.diagonal().tolist()
    for size in decay.sizes(tokens):
        squares = decay.squares(tags, size)
        assert squares.data_ptr() >= tags.data_ptr()
        assert squares.shape == (tokens // (2 * size), size, size)
        low, high = (part.reshape(-1, size).tolist() for part in decay.halves(torch.arange(tokens).unsqueeze(-1), size))
        want = [[[row * tokens + column for column in columns] for row in rows] for columns, rows in zip(low, high, strict=True)]
        assert squares.tolist() == want, "later rows, earlier columns"
        seen += squares.flatten().tolist()
    assert sorted(seen) == tags[decay.lower(tokens, tags.device)].tolist()


# Gradients


def objective(case: Case, inputs: Inputs, cotangents: Results) -> float:
    """The sum of all outputs times their cotangents."""
    outputs = truth(case.spec, inputs)
    return float(sum((outputs[name] * cotangent.double()).sum() for name, cotangent in cotangents.items()))


def taylor_order(case: Case, gradients: Results, directions: int = 3) -> float:
    """How fast J(x + hd) - J(x) - h <dJ, d> falls with h, summed over random directions in all inputs: 2 if dJ is the gradient."""
    inputs, cotangents = case.inputs(), case.cotangents()
    generator = torch.Generator().manual_seed(case.seed)
    x = {name: inputs[name].double() for name in TENSORS if inputs[name] is not None}
    start = objective(case, inputs, cotangents)
    remainders = [0.0, 0.0]
    for _ in range(directions):
        toward = {}
        for name, tensor in x.items():
            size = min(float(tensor.abs().max()), 1.0) or 1.0
            toward[name] = (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1) * size
        slope = float(sum((gradients[gradient_name(name)] * direction).sum() for name, direction in toward.items()))
        for index, h in enumerate((2.0**-14, 2.0**-15)):
            there = objective(case, inputs.replaced(**{name: x[name] + h * toward[name] for name in x}), cotangents)
            remainders[index] += abs(there - start - h * slope)
    return math.log2(remainders[0] / remainders[1])


SMOOTH = cases(Domain(key_dims=(2, 256)), longest=40, total=60, beta=("ordinary", "one", "two", "edges")).filter(
    lambda case: case.tokens and not (case.qk_norm and case.values == "zero_rows")  # the norm turns within sqrt(EPS) of zero
)


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=20)
@given(case=SMOOTH)
@example(case=Case.parse("lengths=70+9 packed=yes heads=2 value_heads=4 gate=64 state=random qk_norm=yes seed=1"))
@example(case=Case.parse("lengths=66 gate=saturated beta=two values=correlated state=random seed=2"))
@pytest.mark.slow_after_first
def test_taylor_remainders_of_the_truth_are_of_second_order(operation: str, case: Case) -> None:
    case = of(operation, case)
    assert taylor_order(case, truth(case.spec, case.inputs(), case.cotangents())) > 1.9


def unprojected(case: Case) -> Tensor:
    """dk that forgets that the norm of k moves with k."""
    inputs = case.inputs()
    q, k = (inputs[name].double() for name in ("q", "k"))
    flat = truth(case.spec, inputs.replaced(q=l2norm(q), k=l2norm(k), qk_norm=False), case.cotangents())
    return flat["dk"] * (k.square().sum(-1, keepdim=True) + EPS).rsqrt()


WRONG_GRADIENTS: dict[str, Callable[[Case, Results], Results]] = {
    "dk not projected": lambda case, right: {"dk": unprojected(case)},
    "no dh0": lambda case, right: {"dh0": torch.zeros_like(right["dh0"])},
    "dbeta one percent off": lambda case, right: {"dbeta": right["dbeta"] * (1 + 1e-2)},
    "dq of the other head": lambda case, right: {"dq": right["dq"].flip(2)},
    "a row of dv lost": lambda case, right: {"dv": right["dv"] * (torch.arange(20) != 7).reshape(1, -1, 1, 1)},
}
WRONG_GATES = {"dg late by one token": lambda case, right: {"dg": right["dg"].roll(1, 1)}}
WRONG_CHANNEL_GATES = {
    "channels of dg reversed": lambda case, right: {"dg": right["dg"].flip(-1)},
    "dg shared out evenly": lambda case, right: {"dg": right["dg"].mean(-1, keepdim=True).expand_as(right["dg"])},
}
WRONG_GRADIENTS_OF = {
    "delta_rule": WRONG_GRADIENTS,
    "gated_delta_rule": {**WRONG_GRADIENTS, **WRONG_GATES},
    "kda": {**WRONG_GRADIENTS, **WRONG_GATES, **WRONG_CHANNEL_GATES},
}


@pytest.mark.parametrize(
    ("operation", "wrong"), [(operation, wrong) for operation in RULES for wrong in WRONG_GRADIENTS_OF[operation]]
)
def test_taylor_remainders_reject_a_wrong_gradient(operation: str, wrong: str) -> None:
    case = Case.parse(f"op={operation} lengths=20 heads=2 value_heads=4 gate=10 state=random qk_norm=yes seed=4")
    right = truth(case.spec, case.inputs(), case.cotangents())
    assert taylor_order(case, right) > 1.9
    assert taylor_order(case, {**right, **WRONG_GRADIENTS_OF[operation][wrong](case, right)}) < 1.5


def small_tensors(shapes: Sequence[Sequence[int]], seed: int) -> tuple[Tensor, ...]:
    """q, k, v, g, beta, state of these shapes; g is negative."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * 2 - 1 for shape in shapes]
    drawn[3] = -drawn[3].abs()
    return tuple(tensor.requires_grad_() for tensor in drawn)


def packed(tokens: int, count: int, gates: int, seed: int = 0) -> tuple[Tensor, ...]:
    """One key head for two value heads, K = 2 and V = 3, as `chunkwise.delta_rule` takes them."""
    return small_tensors([(tokens, 1, 2), (tokens, 1, 2), (tokens, 2, 3), (tokens, 2, gates), (tokens, 2), (count, 2, 2, 3)], seed)


@pytest.mark.parametrize(("gates", "chunk"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize("lengths", [(1,), (3, 0, 4)])
@pytest.mark.slow_after_first
def test_gradcheck_accepts_the_truth(lengths: tuple[int, ...], gates: int, chunk: int) -> None:
    x = packed(sum(lengths), len(lengths), gates)
    assert torch.autograd.gradcheck(lambda *x: chunkwise.delta_rule(*x, 0.7, list(lengths), chunk), x)


@pytest.mark.parametrize("gates", [1, 2])
@pytest.mark.slow
def test_gradcheck_rejects_a_truth_whose_states_carry_no_gradient(gates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunkwise._Call.backward

    def drops_the_state(*arguments: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        tokens, dstate = right(*arguments)
        return tokens, torch.zeros_like(dstate)

    monkeypatch.setattr(chunkwise._Call, "backward", drops_the_state)
    monkeypatch.setattr(chunkwise, "_SEGMENT", SMALLEST)  # one chunk a segment: the state's gradient is carried between them
    x = packed(5, 1, gates)
    assert not torch.autograd.gradcheck(lambda *x: chunkwise.delta_rule(*x, 0.7, [5], 2), x, raise_exception=False)
    monkeypatch.setattr(chunkwise._Call, "backward", right)
    assert torch.autograd.gradcheck(lambda *x: chunkwise.delta_rule(*x, 0.7, [5], 2), x)


@pytest.mark.parametrize("gates", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.slow
def test_gradcheck_accepts_both_classes(tokens: int, gates: int) -> None:
    exact = Arithmetic.exact()
    lengths = [tokens, 0, 2]
    x = small_tensors([*((1, tokens + 2, 2, width) for width in (2, 2, 3, gates, 1)), (1, 3, 2, 2, 3)], tokens)
    assert torch.autograd.gradcheck(lambda *x: disturbed.recurrent(*x, 0.7, exact, lengths), x)
    assert torch.autograd.gradcheck(lambda *x: disturbed.chunkwise(*x, 0.7, exact, lengths, 2), x)


def test_gradients_asked_for_alone_are_those_of_all_and_none_asked_for_is_no_graph() -> None:
    x = packed(9, 3, 2)
    directions = torch.ones(9, 2, 3, dtype=torch.float64), torch.ones(3, 2, 2, 3, dtype=torch.float64)
    outputs = chunkwise.delta_rule(*x, 0.7, [4, 0, 5], 4)
    whole = torch.autograd.grad(outputs, x, directions)
    for index, leaf in enumerate(x):
        alone = [other.detach() for other in x]
        alone[index] = leaf
        got = chunkwise.delta_rule(*alone, 0.7, [4, 0, 5], 4)
        assert all(torch.equal(one, other) for one, other in zip(got, outputs, strict=True))
        assert torch.equal(torch.autograd.grad(got, leaf, directions)[0], whole[index])
    plain = chunkwise.delta_rule(*(tensor.detach() for tensor in x), 0.7, [4, 0, 5], 4)
    assert not any(output.requires_grad for output in plain)
    assert all(torch.equal(one, other) for one, other in zip(plain, outputs, strict=True))


def test_gradient_of_a_gradient_is_refused() -> None:
    x = packed(3, 1, 1)
    (dq,) = torch.autograd.grad(chunkwise.delta_rule(*x, 0.7, [3])[0].square().sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


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
    x = (packed(3, 1, 1)[0].detach() * 1e-2).requires_grad_()
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
    return max(float(abs(Fraction(one) - fraction) / abs(fraction)) * 2.0**53 if fraction else abs(one) for one, fraction in pairs)


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


# Segments, chunks and boundaries


def blocks_of(lengths: Sequence[int], sizes: Sequence[int], most: int) -> list[tuple[list[int], list[segments.Segment]]]:
    blocks = segments.segments(tuple(lengths), tuple(sizes), (most,) * len(lengths), torch.device("cpu"))
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
)
@example(lengths=[0, 0], size=4, short=4, most=1)
@example(lengths=[40, 1, 1, 1, 1, 1, 1, 1, 1], size=4, short=4, most=3)
@example(lengths=[40, 3, 20, 2, 0, 4], size=8, short=4, most=9)
def test_segments_hold_every_token_once_in_order(lengths: list[int], size: int, short: int, most: int) -> None:
    ends, seen = [0, *itertools.accumulate(lengths)], {row: [] for row, length in enumerate(lengths) if length}
    sizes = [short if length <= short else size for length in lengths]
    for members, block in blocks_of(lengths, sizes, most):
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
        padding = [-1] * (-len(tokens) % sizes[row])
        assert [token for chunk in chunks for token in chunk] == tokens + padding
        assert all(len(chunk) == sizes[row] for chunk in chunks)
        assert len(chunks) == -(-len(tokens) // sizes[row])


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=6)
@given(case=cases(Domain(), longest=150, total=200), most=st.integers(1, 5))
@example(case=Case.parse("lengths=130+0+3+70 packed=yes heads=2 value_heads=4 gate=64 state=random seed=1"), most=1)
@example(case=Case.parse("lengths=40+3+3+3+3+3+3+200 packed=yes value_heads=2 gate=mixed state=random seed=2"), most=3)
@pytest.mark.slow_after_first
def test_segments_however_small_give_the_results_of_one(operation: str, case: Case, most: int) -> None:
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


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("lengths=" + "+".join(str(n % 5) for n in range(1000)) + " packed=yes key_dim=4 value_dim=3", id="short"),
        pytest.param("lengths=3+1+700+0+2+5+1 packed=yes key_dim=8 value_dim=4", id="one long among short"),
    ],
)
@pytest.mark.slow
def test_many_short_sequences_and_one_long_among_short_equal_the_definition(operation: str, line: str) -> None:
    case = Case.parse(f"op={operation} {line} gate=64 state=random seed=3")
    inputs, cotangents = case.inputs(), case.cotangents()
    want = by_definition(inputs, cotangents)
    for chunk in (None, 1, 64):
        errors = relative(form(operation, inputs, cotangents, "exact", chunk), want)
        assert max(errors.values()) <= RELATIVE_LIMIT, (chunk, errors)


def test_a_state_changed_before_backward_is_refused() -> None:
    q, k, v, g, beta, state = packed(7, 2, 1)
    state.requires_grad_()
    start = state * 1.0
    o, _ = chunkwise.delta_rule(q, k, v, g, beta, start, 0.7, [3, 4])
    with torch.no_grad():
        start.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(("lengths", "text"), [([3, 3], "[3, 3]"), ([8], "[8]"), ([8, -1], "[8, -1]"), ([], "[]"), (7, "7")])
def test_lengths_that_do_not_add_up_are_refused(lengths: Any, text: str) -> None:
    rule = f"lengths must be whole numbers from 0 up that add up to the 7 tokens of k, got {text}"
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        chunkwise.delta_rule(*packed(7, len(lengths) if isinstance(lengths, list) else 1, 1), 0.7, lengths)


HEAD = {"q": (3, 2), "k": (3, 2), "v": (3, 4), "g": (3,), "beta": (3,), "state": (2, 4)}
OF_HEADS = {"q": (3, 1, 2), "k": (3, 1, 2), "v": (3, 2, 4), "g": (3, 2, 1), "beta": (3, 2), "state": (1, 2, 2, 4)}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("state", (2, 1), "state must have shape (2, 4) for k of (3, 2), got (2, 1)"),
        ("beta", (3, 4), "beta must have shape (3,) for k of (3, 2), got (3, 4)"),
        ("g", (3, 1), "g must have shape (3, 2) for k of (3, 2), got (3, 1)"),
        ("q", (3, 1), "q must have shape (3, 2) for k of (3, 2), got (3, 1)"),
        ("v", (2, 4), "v must have shape (3, 4) for k of (3, 2), got (2, 4)"),
        ("k", (3, 2, 1), "k must be [T, K], got shape (3, 2, 1)"),
    ],
)
def test_the_definition_broadcasts_nothing(name: str, shape: tuple[int, ...], message: str) -> None:
    tensors = {argument: torch.ones(size, dtype=torch.float64) for argument, size in (HEAD | {name: shape}).items()}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        definition(**tensors, scale=1.0)
    if name in ("beta", "g", "v", "k"):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            transition(*(tensors[argument] for argument in ("k", "v", "g", "beta")))


@pytest.mark.parametrize(
    ("earlier", "later", "message"),
    [
        (((3, 3), (3, 2)), ((3, 3), (1, 2)), "later E must have shape (3, 2), got (1, 2)"),
        (((3, 3), (3, 2)), ((1, 3), (3, 2)), "later M must have shape (3, 3), got (1, 3)"),
        (((3, 1), (3, 2)), ((3, 3), (3, 2)), "M must have shape (3, 3), got (3, 1)"),
        (((3, 3), (3,)), ((3, 3), (3,)), "E must have shape (3,), got (3,)"),
    ],
)
def test_a_merge_broadcasts_nothing(earlier: Any, later: Any, message: str) -> None:
    one, other = (tuple(map(torch.ones, shapes)) for shapes in (earlier, later))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        merge(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": (2, 2, 2, 4)}, "state must have shape (1, 2, 2, 4) and be float64, got (2, 2, 2, 4) and torch.float64"),
        (
            {"v": (3, 3, 4), "g": (3, 3, 1), "beta": (3, 3), "k": (3, 2, 2), "q": (3, 2, 2), "state": (1, 3, 2, 4)},
            "HV must be a multiple of H = 2, got 3",
        ),
        ({"g": (3, 2, 3)}, "g must have shape (3, 2, 1) and be float64, got (3, 2, 3) and torch.float64"),
        ({"k": (3, 2)}, "k must be [T, H, K] and v [T, HV, V], got shapes (3, 2) and (3, 2, 4)"),
    ],
)
def test_chunks_broadcast_nothing(changed: dict[str, tuple[int, ...]], message: str) -> None:
    tensors = [torch.ones(size, dtype=torch.float64) for size in (OF_HEADS | changed).values()]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        chunkwise.delta_rule(*tensors, 1.0, [3])  # type: ignore[arg-type]


def test_chunks_are_of_float64_scaled_by_a_number_and_of_whole_lengths() -> None:
    tensors = [torch.ones(size, dtype=torch.float64) for size in OF_HEADS.values()]
    chunkwise.delta_rule(*tensors, 1.0, [3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^q must have shape \(3, 1, 2\) and be float64, got \(3, 1, 2\) and torch.float32$"):
        chunkwise.delta_rule(tensors[0].float(), *tensors[1:], 1.0, [3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^scale must be a finite number, got nan$"):
        chunkwise.delta_rule(*tensors, math.nan, [3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^lengths must be whole numbers from 0 up .*, got \[3.0\]$"):
        chunkwise.delta_rule(*tensors, 1.0, [3.0])  # type: ignore[arg-type, list-item]
    with pytest.raises(ValueError, match=r"^value_heads must be a whole number from 0 up, got 4.0$"):
        repeat_heads(tensors[0], 4.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [-1, 2.5, "64", None, True])
def test_a_chunk_that_is_no_number_of_tokens_is_refused(chunk: object) -> None:
    with pytest.raises(ValueError, match=f"^chunk must be a whole number from 0 up, got {re.escape(repr(chunk))}$"):
        chunkwise.delta_rule(*packed(7, 1, 1), 0.7, [7], chunk)  # type: ignore[arg-type]


IN_PLACE = {torch.ops.aten.baddbmm_: lambda state, a, b, *rest, **more: 2 * math.prod(a) * b[-1]}  # torch's counter leaves it out


def flops(lengths: list[int], chunk: int, width: int, value_width: int) -> int:
    """The matrix products that torch counts for one head, forward and backward."""
    tokens, count = sum(lengths), len(lengths)
    shapes = [(tokens, 1, width)] * 2 + [(tokens, 1, value_width), (tokens, 1, 1), (tokens, 1), (count, 1, width, value_width)]
    x = small_tensors(shapes, 0)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        o, _ = chunkwise.delta_rule(*x, 1.0, lengths, chunk)
        o.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("widths", [(8, 8), (128, 32), (256, 256)])
@pytest.mark.parametrize("lengths", [[17] * 12, [3] * 30, [64, 65], [400], [1, 1, 1, 130], [5], [90]])
@pytest.mark.slow_after_first
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
    plan, evaluate = segments.segments, bound._evaluate
    with monkeypatch.context() as patch:
        patch.setattr(scan, "GRAPH", SMALLEST)
        patch.setattr(segments, "segments", lambda *arguments: counts.append(arguments) or plan(*arguments))
        stretches = make()
    with monkeypatch.context() as patch:
        patch.setattr(bound, "_BATCH", SMALLEST)
        patch.setattr(bound, "_evaluate", lambda *arguments: evaluated.append(arguments[1].v.shape[2]) or evaluate(*arguments))
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


def test_boundaries_are_where_cu_seqlens_says() -> None:
    case = Case.parse("lengths=7+0+60+5 packed=yes heads=2 value_heads=2 gate=1000 seed=8")
    inputs, cotangents = case.inputs(), case.cotangents()
    one = inputs.replaced(cu_seqlens=torch.tensor([0, case.tokens]))
    joined = dataclasses.replace(case, lengths=(case.tokens,)).cotangents()
    whole, want = truth(case.spec, one, joined), by_definition(one, joined)
    assert whole["final_state"].shape[0] == 1
    assert max(relative(whole, want).values()) <= RELATIVE_LIMIT
    apart = truth(case.spec, inputs, cotangents)
    moved = (whole["o"] - apart["o"]).norm(dim=-1)[0]
    assert (moved[:7] < 1e-14).all()
    assert (moved[7:] > 1e-3).all(), "state that crosses a boundary shows"


@pytest.mark.parametrize("operation", RULES)
def test_no_state_is_a_state_of_zeros_to_the_bit(operation: str) -> None:
    case = Case.parse(f"op={operation} lengths=33+0+70 packed=yes heads=2 value_heads=4 gate=64 qk_norm=yes seed=9")
    inputs, cotangents = case.inputs(), case.cotangents()
    absent = truth(case.spec, inputs, cotangents)
    zeros = truth(case.spec, inputs.replaced(state=torch.zeros(3, 4, 16, 16)), cotangents)
    assert zeros.keys() - absent.keys() == {"dh0"}
    assert all(torch.equal(absent[name], zeros[name]) for name in absent)


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("state", ["none", "zero", "random"])
@pytest.mark.parametrize("lengths", ["0", "0+0 packed=yes", "0+0"])
def test_no_tokens_at_all_return_the_state(operation: str, lengths: str, state: str) -> None:
    case = Case.parse(f"op={operation} lengths={lengths} value_heads=2 state={state}")
    inputs, cotangents = case.inputs(), case.cotangents()
    for algorithm, chunk in FORMS:
        got = form(operation, inputs, cotangents, algorithm, chunk)
        assert got["o"].shape == inputs.v.shape
        assert got["dq"].shape == inputs.q.shape
        assert ("dg" in got) == (operation != "delta_rule")
        if inputs.state is None:
            assert torch.equal(got["final_state"], torch.zeros_like(cotangents["final_state"]).double())
        else:
            assert torch.equal(got["final_state"], inputs.state.double())
            assert torch.equal(got["dh0"], cotangents["final_state"].double())


@pytest.mark.parametrize("operation", RULES)
def test_a_batch_of_no_sequences_is_answered_in_its_shapes(operation: str) -> None:
    case = Case.parse(f"op={operation} lengths=7+7 value_heads=2 value_dim=12 state=random")
    inputs = case.inputs()
    none = inputs.replaced(**{name: inputs[name][:0] for name in TENSORS if inputs[name] is not None})
    cotangents = {name: cotangent[:0] for name, cotangent in case.cotangents().items()}
    for algorithm, chunk in FORMS:
        got = form(operation, none, cotangents, algorithm, chunk)
        assert got["o"].shape == (0, 7, 2, 12)
        assert got["final_state"].shape == (0, 2, 16, 12)
        assert all(got[gradient_name(name)].shape == none[name].shape for name in TENSORS if none[name] is not None)


@pytest.mark.parametrize("operation", RULES)
@settings(max_examples=10)
@given(
    lengths=st.lists(st.sampled_from((0, 0, 1, 5, 17)), min_size=1, max_size=5),
    state=st.sampled_from(("none", "random")),
    seed=st.integers(0, 2**16),
)
@example(lengths=[17, 0, 5, 0, 17], state="random", seed=1)
def test_empty_sequences_pass_their_state_and_change_nothing_else(
    operation: str, lengths: list[int], state: str, seed: int
) -> None:
    case = Case(operation=operation, lengths=tuple(lengths), packed=True, state=state, gate="64", seed=seed)
    inputs, cotangents = case.inputs(), case.cotangents()
    filled = [row for row, length in enumerate(lengths) if length]
    empty = [row for row, length in enumerate(lengths) if not length]
    got = truth(case.spec, inputs, cotangents)
    start = torch.zeros_like(got["final_state"]) if inputs.state is None else inputs.state.double()
    assert torch.equal(got["final_state"][empty], start[empty])
    if inputs.state is not None:
        assert torch.equal(got["dh0"][empty], cotangents["final_state"][empty].double())
    if not filled:
        return
    offsets = torch.tensor([0, *(lengths[row] for row in filled)]).cumsum(0)
    only = inputs.replaced(cu_seqlens=offsets, state=None if inputs.state is None else inputs.state[filled])
    want = truth(case.spec, only, {**cotangents, "final_state": cotangents["final_state"][filled]})
    for name, value in want.items():
        rows = got[name][filled] if name in ("final_state", "dh0") else got[name]
        assert torch.equal(rows, value), name
