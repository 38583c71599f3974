"""Shrinking: the smallest case that still fails, found on case lines.

Hypothesis draws; its shrinker is not used, for three reasons. A line may come from anywhere (another host, a colleague, a file)
and must shrink without the engine that drew it. Every candidate costs a kernel's run, so few and well-ordered ones matter: half
a second interpreted, many seconds where a candidate is a new compile key on a GPU. And the candidates of the last pass, which
all hold, are the neighbours that make the trigger plain.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from oracles.case import Case
from oracles.layer_case import LayerCase
from oracles.line import text_of
from oracles.module_case import ModuleCase
from oracles.parallel_case import CHOICES, ParallelCase
from oracles.pool_case import PoolCase
from properties.laws import Law
from properties.strategies import Example

SIMPLEST: dict[str, tuple[Any, ...]] = {
    "in_kernel": ("none", "gate", "beta"),
    "dt_bias": (True,),
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
SIMPLEST_PATH: dict[str, tuple[Any, ...]] = {
    **{name: values[:1] for name, values in CHOICES.items()},
    "deterministic": (False,),
    "sp": (False,),
    "padding": ("none", "least"),
    "conv_bias": (False,),
    "allow_neg_eigval": (False,),
    "offsets": ("int64",),
    "values": ("ordinary",),
    "gate": ("long", "ordinary"),
    "backward": (False,),
    "dtype": ("fp32", "bf16"),
    "conv_width": (1, 2, 3),
}
SIMPLEST_POOL: dict[str, tuple[Any, ...]] = {
    "padded": ("none", "all"),
    "fresh": ("none", "all"),
    "accepted": ("all",),
    "block_v": ("default",),
    "padding_slot": ("-1",),
    "free": ("zero", "random"),
    "indices": ("int64",),
    **{name: values for name, values in SIMPLEST.items() if name not in ("state", "backward", "in_kernel", "dt_bias")},
    "state": ("zero",),
}
SIMPLEST_MODULE: dict[str, tuple[Any, ...]] = {
    "offsets": ("int64",),
    "values": ("ordinary",),
    "activation": ("none",),
    "bias": (False,),
    "weight": (True,),
    "state": ("none", "zero"),
    "oldest": (True,),
    "final_state": (True,),
    "eps": ("1e-6",),
    "dt_bias": (True,),
    "beta": (True,),
    "allow_neg_eigval": (False,),
    "backward": (False,),
    "dtype": ("fp32", "bf16"),
    "conv_width": (1, 2, 3),
}
SIMPLEST_LAYER: dict[str, tuple[Any, ...]] = {
    "backward": (False,),
    "state": ("none", "zero"),
    "cached": (False,),
    "conv_bias": (False,),
    "allow_neg_eigval": (False,),
    "eps": ("1e-6",),
    "offsets": ("int64",),
    "values": ("ordinary",),
    "gate": ("long", "ordinary"),
    "dtype": ("fp32", "bf16"),
    "conv_width": (1, 2, 3),
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


def shrink(example: Example, law: Law, fails: Callable[[Example], bool | None], more: Callable[[int], bool]) -> Shrunk:
    """The smallest example for which `fails` is true; None means undecided. `more(runs)` says whether to spend another run.

    One aspect after another is made as simple as it gets, all of them again until none moves: going back to the first after
    every success would ask about its threshold each time, and cost three times the runs.
    """
    seen: dict[Example, bool | None] = {}
    neighbours: list[tuple[str, str]] = []
    progress = True
    while progress:
        progress, neighbours = False, []
        for aspect in _aspects(law, example):
            moved = True
            while moved:
                moved, held = False, list[tuple[str, str]]()
                for what, candidate in aspect(example):
                    if candidate not in seen:
                        if not more(len(seen)):
                            return Shrunk(example, tuple(dict.fromkeys(neighbours + held)), len(seen), False)
                        seen[candidate] = fails(candidate)
                    if seen[candidate]:
                        example, moved, progress = candidate, True, True
                        break
                    if seen[candidate] is False:
                        held.append((what, "holds"))
            neighbours += held
    return Shrunk(example, tuple(dict.fromkeys(neighbours)), len(seen), True)


Steps = Iterator[tuple[str, Example]]


def _aspects(law: Law, example: Example) -> list[Callable[[Example], Steps]]:
    """What can be made simpler on its own. Each yields candidates, the boldest first, with the words that differ; all are legal."""

    def of_case(changes: Callable[[Any], Changes]) -> Callable[[Example], Steps]:
        def steps(example: Example) -> Steps:
            for what, change in changes(example.case):
                try:
                    candidate = dataclasses.replace(example, case=dataclasses.replace(example.case, **change))
                    if law.place is not None and example.at is not None and (places := law.place(candidate.case)):
                        candidate = dataclasses.replace(candidate, at=min(max(example.at, places[0]), places[-1]))
                    law.accept(candidate)
                except ValueError:
                    continue
                yield what, candidate

        return steps

    def place(example: Example) -> Steps:
        if law.place is not None and example.at is not None:
            for at in _below(example.at, law.place(example.case)[0]):
                yield f"at={at}", dataclasses.replace(example, at=at)

    def variant(example: Example) -> Steps:
        for name in law.variants[: law.variants.index(example.variant)] if example.variant else ():
            candidate = dataclasses.replace(example, variant=name)
            try:
                law.accept(candidate)
            except ValueError:
                continue
            yield f"variant={name}", candidate

    shapes, simplest, widths = _OF_CASES[type(example.case)]
    changes: list[Callable[[Any], Changes]] = [*shapes]
    changes += [functools.partial(_option, name, simplest) for name in simplest]
    changes += [functools.partial(_width, name) for name in widths]
    return [*(of_case(change) for change in (*changes, _seed)), place, variant]


Changes = Iterator[tuple[str, dict[str, Any]]]


def _mesh(case: ParallelCase) -> Changes:
    """Fewer ranks, of those that what is cut for more can be cut for."""
    for tp, cp in sorted(
        ((t, c) for t in range(1, case.tp + 1) for c in range(1, case.cp + 1)), key=lambda mesh: mesh[0] * mesh[1]
    ):
        if (tp, cp) != (case.tp, case.cp) and case.tp % tp == 0 and case.cp % cp == 0:
            yield f"tp={tp} cp={cp}", {"tp": tp, "cp": cp, "sp": case.sp and tp > 1}


def _pieces(case: ParallelCase) -> Changes:
    """Whole pieces less: shorter lengths that the layout still cuts."""
    unit = 2 * case.cp * (case.tp if case.sp else 1)
    for row, length in enumerate(case.lengths):
        if length % unit == 0:
            for count in _below(length // unit, 0):
                lengths = (*case.lengths[:row], count * unit, *case.lengths[row + 1 :])
                yield _lengths(lengths if case.packed else (count * unit,) * len(case.lengths))


def _shared_heads(case: ParallelCase) -> Changes:
    for heads in (case.tp * case.cp, 1):
        for value_heads in (heads, 2 * heads):
            if (value_heads, heads) < (case.value_heads, case.heads):
                yield f"heads={heads} value_heads={value_heads}", {"heads": heads, "value_heads": value_heads}


def _sequences(case: Case) -> Changes:
    lengths = case.lengths
    if len(lengths) > 1:
        yield _lengths((sum(lengths),))
        for kept in dict.fromkeys(lengths):
            yield _lengths((kept,))
        for gone in range(len(lengths)):
            yield _lengths(lengths[:gone] + lengths[gone + 1 :])
            if gone:
                yield _lengths((*lengths[: gone - 1], lengths[gone - 1] + lengths[gone], *lengths[gone + 1 :]))


def _unpacked(case: Case) -> Changes:
    if case.packed:
        yield "packed=no", {"packed": False, "offsets": "int64"}


def _shorter(case: Case) -> Changes:
    lengths = case.lengths
    if case.packed:
        for row, length in enumerate(lengths):
            for shorter in (*_below(length, 0), *_blocks(length)):
                yield _lengths((*lengths[:row], shorter, *lengths[row + 1 :]))
    else:
        for shorter in (*_below(lengths[0], 0), *_blocks(lengths[0])):
            yield _lengths((shorter,) * len(lengths))


def _lengths(lengths: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    return f"lengths={'+'.join(map(str, lengths))}", {"lengths": lengths}


def _heads(case: Case) -> Changes:
    for heads, value_heads in HEADS:
        if (value_heads, heads) < (case.value_heads, case.heads):
            yield f"heads={heads} value_heads={value_heads}", {"heads": heads, "value_heads": value_heads}


def _option(name: str, simplest: dict[str, tuple[Any, ...]], case: Case) -> Changes:
    for value in simplest[name]:
        if getattr(case, name) == value:
            return
        yield f"{name}={text_of(value)}", {name: value}


def _width(name: str, case: Case) -> Changes:
    for width in WIDTHS:
        if width < getattr(case, name):
            yield f"{name}={width}", {name: width}


def _heads_alone(case: ModuleCase) -> Changes:
    for heads in (1, 2, 3, 4):
        if heads < case.heads:
            yield f"heads={heads}", {"heads": heads}


def _spare(case: PoolCase) -> Changes:
    for spare in _below(case.spare, 0):
        yield f"spare={spare}", {"spare": spare}


def _seed(case: Case) -> Changes:
    if case.seed:
        yield "seed=0", {"seed": 0}


# Of each kind of case: how its shape gets smaller, what its options are at their simplest, and which of its words are widths.
_OF_CASES: dict[type, tuple[list[Callable[[Any], Changes]], dict[str, tuple[Any, ...]], list[str]]] = {
    Case: ([_sequences, _unpacked, _shorter, _heads], SIMPLEST, ["key_dim", "value_dim"]),
    ParallelCase: (
        [_mesh, _sequences, _unpacked, _pieces, _shorter, _shared_heads],
        SIMPLEST_PATH,
        ["key_dim", "value_dim", "hidden"],
    ),
    ModuleCase: ([_sequences, _unpacked, _shorter, _heads_alone], SIMPLEST_MODULE, ["width"]),
    LayerCase: ([_sequences, _unpacked, _shorter, _heads], SIMPLEST_LAYER, ["key_dim", "value_dim", "hidden"]),
    PoolCase: ([_sequences, _unpacked, _shorter, _spare, _heads], SIMPLEST_POOL, ["key_dim", "value_dim"]),
}


def _blocks(length: int) -> Iterator[int]:
    """Block sizes below a length: what fails at multiples of 64 only has no threshold."""
    yield from (block for block in (16, 32, 64, 128) if block < length)


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
