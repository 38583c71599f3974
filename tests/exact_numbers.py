"""Numbers that do not round, the delta rules token by token in them, and calls of small integers."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from oracles.operation import Inputs
from tests.oracle_forms import Results

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
