"""On small integers, outputs and gradients of the oracles equal those in Python integers."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import gradient_name
from oracles.operations import RULES
from oracles.rule import chunkwise
from tests.exact_numbers import Matrix, Whole, token_by_token
from tests.oracle_forms import form
from tests.together import for_each

# The code users run, on integers


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
@settings(max_examples=8)
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


@for_each("operation", RULES)
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
