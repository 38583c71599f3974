"""Shrinking: the smallest case that still fails, found on case lines.

Hypothesis draws; its shrinker is not used, for three reasons. A line may come from anywhere (another host, a colleague, a file)
and must shrink without the engine that drew it. Every candidate costs a kernel's run, so few and well-ordered ones matter: half
a second interpreted, many seconds where a candidate is a new compile key on a GPU. And the candidates of the last pass, which
all hold, are the neighbours that make the trigger plain.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from oracles.case import Case
from properties.laws import Law
from properties.strategies import Example

SIMPLEST = {
    "qk_norm": (False,),
    "gate_dtype": ("fp32",),
    "offsets": ("int64",),
    "scale": ("default",),
    "values": ("ordinary",),
    "gate": ("forever", "1000"),
    "beta": ("ordinary",),
    "state": ("none", "zero"),
    "backward": (False,),
    "dtype": ("fp32", "bf16"),
}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
HEADS = ((1, 1), (1, 2), (2, 2), (2, 4))


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The smallest failing example found, and its neighbours, one step simpler, that hold."""

    example: Example
    neighbours: tuple[tuple[str, str], ...]
    runs: int
    finished: bool


def shrink(
    example: Example, law: Law, fails: Callable[[Example], bool | None], more: Callable[[int], bool]
) -> Shrunk:
    """The smallest example for which `fails` is true; None means undecided. `more(runs)` says whether another run may be spent."""
    seen: dict[Example, bool | None] = {}
    neighbours: list[tuple[str, str]] = []
    progress = True
    while progress:
        progress, neighbours = False, []
        for what, candidate in _simpler(example, law):
            if candidate not in seen:
                if not more(len(seen)):
                    return Shrunk(example, tuple(neighbours), len(seen), False)
                seen[candidate] = fails(candidate)
            if seen[candidate] is False:
                neighbours.append((what, "holds"))
            if seen[candidate]:
                example, progress = candidate, True
                break
    return Shrunk(example, tuple(dict.fromkeys(neighbours)), len(seen), True)


def _simpler(example: Example, law: Law) -> Iterator[tuple[str, Example]]:
    """Candidates one step simpler, the boldest first, each with the words that differ; illegal ones are left out."""
    case = example.case
    for what, changes in _changes(case):
        try:
            smaller = dataclasses.replace(case, **changes)
        except ValueError:
            continue
        at = example.at
        if law.place is not None:
            places = law.place(smaller)
            if not places or at is None:
                continue
            at = min(max(at, places[0]), places[-1])
        yield what, Example(smaller, at, example.variant)
    if law.place is not None and example.at is not None:
        first = law.place(case)[0]
        for at in _below(example.at, first):
            yield f"at={at}", dataclasses.replace(example, at=at)
    for variant in law.variants[: law.variants.index(example.variant)] if example.variant else ():
        candidate = dataclasses.replace(example, variant=variant)
        try:
            law.accept(candidate)
        except ValueError:
            continue
        yield f"variant={variant}", candidate


def _changes(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    lengths = case.lengths
    if len(lengths) > 1:
        yield f"lengths={sum(lengths)}", {"lengths": (sum(lengths),)}
        for kept in dict.fromkeys(lengths):
            yield f"lengths={kept}", {"lengths": (kept,)}
        for gone in range(len(lengths)):
            rest = lengths[:gone] + lengths[gone + 1 :]
            yield f"lengths={'+'.join(map(str, rest))}", {"lengths": rest}
            if gone:
                merged = (*lengths[: gone - 1], lengths[gone - 1] + lengths[gone], *lengths[gone + 1 :])
                yield f"lengths={'+'.join(map(str, merged))}", {"lengths": merged}
    if case.packed:
        yield "packed=no", {"packed": False, "offsets": "int64"}
        for row, length in enumerate(lengths):
            for shorter in _below(length, 0):
                changed = (*lengths[:row], shorter, *lengths[row + 1 :])
                yield f"lengths={'+'.join(map(str, changed))}", {"lengths": changed}
    else:
        for shorter in _below(lengths[0], 0):
            changed = (shorter,) * len(lengths)
            yield f"lengths={'+'.join(map(str, changed))}", {"lengths": changed}
    for heads, value_heads in HEADS:
        if (value_heads, heads) < (case.value_heads, case.heads):
            yield f"heads={heads} value_heads={value_heads}", {"heads": heads, "value_heads": value_heads}
    for name, simplest in SIMPLEST.items():
        for value in simplest:
            if getattr(case, name) == value:
                break
            text = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
            yield f"{name}={text}", {name: value}
    for name in ("key_dim", "value_dim"):
        for width in WIDTHS:
            if width < getattr(case, name):
                yield f"{name}={width}", {name: width}
    if case.seed:
        yield "seed=0", {"seed": 0}


def _below(number: int, least: int) -> Iterator[int]:
    """Numbers below `number`: the least ones, then steps that halve, so that a threshold is found in few runs."""
    if number <= least:
        return
    yield least
    if least + 1 < number:
        yield least + 1
    step = (number - least) // 2
    while step:
        if least + 1 < number - step < number:
            yield number - step
        step //= 2
