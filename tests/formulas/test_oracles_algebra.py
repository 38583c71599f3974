"""The algebra of chunks equals the recurrence exactly, in a field, where nothing rounds."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.operations import RULES
from tests.exact_numbers import Matrix, Residue, Token, dot, residues, times, token_by_token
from tests.together import for_each

# The algebra, in a field: no rounding at all


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
    """Products that decay as oracles/rule/decay.py takes them: from token j to the last of its half, and from there to token i."""

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


@for_each(
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
