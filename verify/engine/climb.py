"""Climbing: cases in which an implementation errs more, looked for among edits of cases that were run.

Hypothesis climbs error over bound, its `target`. It changes one number that it drew at a time, and of a case it draws but a seed
(properties/strategies.py): the next seed is any other case. So what it draws here are edits of the best cases so far: which words
change, and how far each moves along the values which that word has in the others.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, target
from hypothesis import strategies as st

from oracles.counter import mix_words
from properties.laws import Law
from properties.palette import key_of, suits
from properties.strategies import Example
from verify.engine.drawing import Enough

LEAST = 8  # examples that a climb is worth: half of them are spent on finding where to begin
BEST = 8  # so many of the best examples so far are edited
EDITS = 2  # words that change in one edit
STAGE = 24  # examples between two choices of the best: half of them are edits at random, half are climbed
TOGETHER = (("packed", "lengths"), ("heads", "value_heads"))  # words that are legal together
SEED, SEEDS = ("seed",), 2**16
SAME = 1e-9  # a score that is less by so much is as good, and no step up

Edit = tuple[int, int]  # of which word, and by how many places its value moves
Moves = list[tuple[tuple[str, ...], Sequence[tuple[Any, ...]]]]


def climbed(examples: int, kind: str) -> int:
    """How many of a law's examples are climbed for; the others are drawn. Exact laws have nothing to climb: they differ or not."""
    return examples // 2 if kind == "truth" and examples // 2 >= LEAST else 0


def climb(
    law: Law,
    domain: Any,
    known: Mapping[Example, float],
    seed: int,
    most: int,
    score: Callable[[Example], float | None],
    *,
    same_key: bool = False,
) -> None:
    """Give `score` up to `most` examples that are not known, each an edit of a good one, the same for the same seed and scores.

    `known` has the score of each example that was run. `score` runs one and returns its score, None if there is to be no other.
    Every edit is inside the domain and one that the law can be asked about; none is of a larger call than all that are known,
    and with `same_key` none needs another compiled kernel.
    """
    scores, stage, before = dict(known), 0, -1
    moves = _moves(list(known))
    largest = max((_size(example.case) for example in known), default=0)

    def legal(base: Example, moved: Example) -> bool:
        if same_key and key_of(moved.case) != key_of(base.case):
            return False
        return suits(law, domain, moved) and _size(moved.case) <= largest

    def edited(base: Example, edits: Sequence[Edit]) -> Example:
        """Edits that are not legal are left out."""
        for word, step in edits:
            names, values = moves[word]
            own = tuple(getattr(base.case, name) for name in names)
            place = own[0] if names == SEED else values.index(own) if own in values else 0
            base = _replaced(law, base, dict(zip(names, values[(place + step) % len(values)], strict=True)), legal)
        return base

    def asked(example: Example) -> float:
        if example not in scores:
            got = score(example) if len(scores) - len(known) < most else None
            if got is None:
                raise Enough
            scores[example] = got
        return scores[example]

    try:
        while moves and before < len(scores):
            before, stage = len(scores), stage + 1
            best = sorted(scores, key=lambda each: (-scores[each], str(each)))[:BEST]
            _stage(best, moves, mix_words(seed, f"stage {stage}"), edited, asked)
    except Enough:
        pass


def _stage(
    best: list[Example],
    moves: Moves,
    seed: int,
    edited: Callable[[Example, Sequence[Edit]], Example],
    asked: Callable[[Example], float],
) -> None:
    """Edits of the best at random, and from the best of those on as Hypothesis climbs."""
    edit = st.integers(0, len(moves) - 1).flatmap(lambda word: st.tuples(st.just(word), _steps(len(moves[word][1]))))
    visited = set[Example]()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=STAGE,
        phases=(Phase.generate, Phase.target),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(st.sampled_from(best), st.tuples(*[edit] * EDITS))
    def drive(base: Example, edits: Sequence[Edit]) -> None:
        example = edited(base, edits)
        # One that other edits led to before is no step sideways: Hypothesis would walk on as long as a score does not fall.
        target(asked(example) - (SAME if example in visited else 0.0))
        visited.add(example)

    drive()


def _steps(values: int) -> st.SearchStrategy[int]:
    return st.integers(-(values // 2), (values - 1) // 2)


def _moves(known: Sequence[Example]) -> Moves:
    """The words that have several values in the examples, those that go together as one, with the values in their order."""
    names = [field.name for field in dataclasses.fields(known[0].case) if field.name != "seed"] if known else []
    groups: list[tuple[str, ...]] = [group for group in TOGETHER if set(group) <= set(names)]
    groups += [(name,) for name in names if not any(name in group for group in groups)]
    moves: Moves = []
    for group in groups:
        values = {tuple(getattr(example.case, name) for name in group) for example in known}
        if len(values) > 1:
            choices = {name: list(known[0].case.CHOICES.get(name, ())) for name in group}
            moves.append((group, sorted(values, key=lambda value: _rank(group, value, choices))))
    if known:
        moves.append((SEED, [(seed,) for seed in range(SEEDS)]))  # other numbers in the same case
    return moves


def _rank(group: tuple[str, ...], value: tuple[Any, ...], choices: Mapping[str, Sequence[str]]) -> tuple[Any, ...]:
    """Where a value stands among those of its words: choices as they are listed, numbers by size, lengths by the longest."""
    rank: list[Any] = []
    for name, each in zip(group, value, strict=True):
        if choices[name]:
            rank.append(choices[name].index(each))
        else:
            rank.append((max(each, default=0), sum(each), each) if isinstance(each, tuple) else each)
    return tuple(rank)


def _size(case: Any) -> int:
    """How large a call is: its bytes, or its tokens where its class does not count them."""
    return int(getattr(case, "bytes", sum(case.lengths)))


def _replaced(law: Law, base: Example, words: Mapping[str, Any], legal: Callable[[Example, Example], bool]) -> Example:
    """The example with these words, as it was where that is not legal; its place, where the law has other ones, is another."""
    try:
        case = dataclasses.replace(base.case, **words)
    except ValueError:
        return base
    at = base.at
    if law.place is not None and at not in (places := law.place(case)):
        at = places[at % len(places)] if places and at is not None else None
    moved = Example(case, at, base.variant)
    return moved if legal(base, moved) else base
