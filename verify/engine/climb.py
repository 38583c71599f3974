"""Climbing: search for cases with larger errors among edits of the cases that were run.

Hypothesis maximises its `target`, here the error divided by the tolerance. It changes one drawn number at a time. For a case it
draws only a seed (properties/rules/drawing.py), and the next seed gives an unrelated case, so a climb over seeds would be random.
Therefore Hypothesis draws edits of the best cases so far: which words of a case change, and by how many places each word moves in
the sorted list of the values that it has in the known cases.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import Phase, target
from hypothesis import strategies as st

from oracles.arithmetic.counter import mix_words
from properties.laws.law import Law
from properties.palette import key_of, suits
from properties.seeds import draw
from properties.words.example import Example
from verify.engine.drawing import Enough

LEAST = 8  # a climb of fewer examples is not worth it: half of the examples are spent on finding where to begin
BEST = 8  # how many of the best examples so far are edited
EDITS = 2  # words that change in one edit
STAGE = 24  # examples between two choices of the best: half of them are random edits, half are climbed
TOGETHER = (("packed", "lengths"), ("heads", "value_heads"))  # words that must change together to stay legal
SEED, SEEDS = ("seed",), 2**16
SAME = 1e-9  # subtracted from the score of an example that was visited before, so that it is not a step up

Edit = tuple[int, int]  # the index of a word, and the number of places by which its value moves
Moves = list[tuple[tuple[str, ...], Sequence[tuple[Any, ...]]]]


def climbed(examples: int, kind: str) -> int:
    """How many of a law's examples come from a climb; the others are drawn.

    For an exact law the answer is 0: two runs differ or they do not, so there is no error to climb.
    """
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
    """Pass up to `most` new examples to `score`, each an edit of one of the best examples so far.

    `known` maps each example that was run to its score. `score` runs an example and returns its score, or None to end the climb.
    The same seed and scores give the same examples. Every edited example lies in the domain and suits the law, and is not a larger
    call than the largest one in `known`. With `same_key`, no edit changes the compile key.
    """
    scores, stage, before = dict(known), 0, -1
    moves = _moves(list(known))
    largest = max((_size(example.case) for example in known), default=0)

    def legal(base: Example, moved: Example) -> bool:
        if same_key and key_of(moved.case) != key_of(base.case):
            return False
        return suits(law, domain, moved) and _size(moved.case) <= largest

    def edited(base: Example, edits: Sequence[Edit]) -> Example:
        """The example after those of the edits that are legal."""
        for word, step in edits:
            names, values = moves[word]
            value = tuple(getattr(base.case, name) for name in names)
            place = value[0] if names == SEED else values.index(value) if value in values else 0
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
            best = sorted(scores, key=lambda example: (-scores[example], str(example)))[:BEST]
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
    """One stage: random edits of the best examples, then Hypothesis climbs from the best of these edits."""
    edit = st.integers(0, len(moves) - 1).flatmap(lambda word: st.tuples(st.just(word), _steps(len(moves[word][1]))))
    visited = set[Example]()

    def drive(drawn: tuple[Example, Sequence[Edit]]) -> None:
        example = edited(*drawn)
        # Hypothesis goes on as long as the score does not fall. A slightly lower score for an example that was visited before ends
        # such walks.
        target(asked(example) - (SAME if example in visited else 0.0))
        visited.add(example)

    draw(st.tuples(st.sampled_from(best), st.tuples(*[edit] * EDITS)), seed, STAGE, drive, (Phase.generate, Phase.target))


def _steps(values: int) -> st.SearchStrategy[int]:
    return st.integers(-(values // 2), (values - 1) // 2)


def _moves(known: Sequence[Example]) -> Moves:
    """The words that have several values in the examples, each with its values in order. Words of TOGETHER form one entry."""
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
    """The sort key of a value: choices in the order of their list, numbers by size, lengths by the longest one."""
    rank: list[Any] = []
    for name, item in zip(group, value, strict=True):
        if choices[name]:
            rank.append(choices[name].index(item))
        else:
            rank.append((max(item, default=0), sum(item), item) if isinstance(item, tuple) else item)
    return tuple(rank)


def _size(case: Any) -> int:
    """The size of a call: its bytes, or its tokens if the case class does not count bytes."""
    return int(case.bytes if hasattr(case, "bytes") else sum(case.lengths))


def _replaced(law: Law, base: Example, words: Mapping[str, Any], legal: Callable[[Example, Example], bool]) -> Example:
    """The example with these words, or the unchanged example if that would not be legal.

    If the law cannot act at the example's `at` in the new case, `at` is replaced by a place where it can.
    """
    try:
        case = dataclasses.replace(base.case, **words)
    except ValueError:
        return base
    at = base.at
    if law.place is not None and at not in (places := law.place(case)):
        at = places[at % len(places)] if places and at is not None else None
    moved = Example(case, at, base.variant)
    return moved if legal(base, moved) else base
