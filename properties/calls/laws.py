"""The laws of any callable, which need no float64 reference: what one call must give follows from other calls.

Where two calls may differ by rounding, they are judged by bounds that the bench measures: it calls the implementation with inputs
that are disturbed by one rounding (verify/bench/call_bench.py).
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.calls.case import CallCase
from properties.calls.domain import FURTHER, CallDomain, call_cases
from properties.laws import common as common_laws
from properties.laws import views
from properties.laws.history import history_law
from properties.laws.law import (
    Bench,
    Cotangents,
    Law,
    Pair,
    axes_of,
    either,
    examples_of,
    firm_examples,
    present,
    spread,
    with_others,
)
from properties.words.domain import VIEWS
from properties.words.example import Example
from properties.words.sizes import coarsest, named

MANY_ROWS = (259, 1030)  # of a batch: just over 8 and over 10 bits
CROWD = 2051  # packed sequences: just over 2,048, the last number below which fp16 has all
ANEW = 520  # tokens of a call that fails before any call of its size has succeeded: just over 512


def _finite(bench: Bench, example: Example) -> Iterator[Pair]:
    """Numbers are compared with themselves, where NaN and infinities are replaced by zeros."""
    inputs, cotangents = bench.call(example.case)
    for name, got in bench.run(inputs, cotangents).items():
        yield Pair(name, "", got, got.nan_to_num(0.0, 0.0, 0.0))


def _strided(domain: CallDomain) -> st.SearchStrategy[Example]:
    return either(views.near_views(domain, functools.partial(_small, domain, sequences=(1, 2)), packed=domain.packed))


def _future(bench: Bench, example: Example) -> Iterator[Pair]:
    """Everything from token `at` on changes, in all sequences. Gradients may rightly move and are not compared."""
    case, at = example.case, example.at
    assert at is not None
    inputs, _ = bench.call(case)
    spec, names = case.spec, present(case.spec, inputs, "B", "T")
    place = torch.cat([torch.arange(length) for length in case.lengths]).reshape(inputs[names[0]].shape[:2])
    later = with_others(case).inputs()
    changed = {name: torch.where(spread(place >= at, inputs[name], 0), later[name], inputs[name]) for name in names}
    changed_inputs = inputs.replaced(**changed)
    got, past = bench.run(changed_inputs, None), place < at
    want = bench.run(inputs, None) if bench.domain.isolated else _both(bench, inputs, changed_inputs, None)
    for name, x in got.items():
        if axes_of(spec, name)[:2] == ["B", "T"]:
            yield Pair(name, f"before token {at}", x[past], _part(want[name], past))


def _late(domain: CallDomain) -> list[Example]:
    """Return a longest sequence in bf16, cut one token behind the last power of two: from 256 on, bf16 has not every position."""
    longest = min(domain.longest, FURTHER)
    at = 2 ** (max(longest, 3) - 2).bit_length() // 2 + 1
    if "bf16" not in domain.dtypes or at <= 256:
        return []
    cases = call_cases(domain, sequences=(1, 1), dtype="bf16").map(lambda case: dataclasses.replace(case, lengths=(longest,)))
    return [dataclasses.replace(example, at=at) for example in firm_examples(domain, examples_of(cases))]


def _samples(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    if bench.domain.isolated:
        yield from common_laws.samples(bench, example)
        return
    inputs, cotangents = bench.call(case)
    other, spec = with_others(case).inputs(), case.spec
    mixed = {}
    for name in (*present(spec, inputs, "B", "T"), *present(spec, inputs, "N")):
        rows = _others(example, axes_of(spec, name))
        mixed[name] = torch.where(spread(rows, inputs[name], 0), inputs[name], other[name])
    mixed_inputs = inputs.replaced(**mixed)
    bounds = _both(bench, inputs, mixed_inputs, cotangents)
    for name, got in bench.run(mixed_inputs, cotangents).items():
        axes = axes_of(spec, name)
        if axes[0] in "BN":
            rows = _others(example, axes)
            yield Pair(name, "of the other sequences", got[rows], bounds[name].at(rows))


def _crowd(domain: CallDomain) -> list[Example]:
    """Return many packed sequences of one or two tokens, in 16 bits and without a backward. The 2,050th is called alone too.

    Neither bf16 nor fp16 has all numbers of sequences. Further cases have sizes of the numbers that the source names and just over.
    """
    if not (domain.packed and domain.batched):
        return []
    sizes = tuple(min(1 + (place % 3 == 1), domain.longest) for place in range(CROWD))
    cases = call_cases(domain, packed=True, backward=False, dtype=coarsest(domain.dtypes), values="ordinary")
    drawn = examples_of(cases.map(lambda case: dataclasses.replace(case, lengths=sizes)))
    found = {sizes: CROWD - 2}  # the lengths of each case, and which sequence is called alone too
    for number in named(domain):
        found[tuple(min(size, domain.longest) for size in (number + 1, number, 2))] = 0
        found |= {(1,) * (number + 2): number + 1} if number < CROWD else {}
    firm = firm_examples(domain, drawn)
    return [Example(dataclasses.replace(one.case, lengths=lengths), at) for one in firm for lengths, at in found.items()]


def _rows(domain: CallDomain) -> list[Example]:
    """Return batches of over 256 and 1,024 rows, and just over the numbers that the source names.

    The last row is called alone too.
    """
    if not domain.batched:
        return []
    cases = call_cases(domain, packed=False, backward=False, values="ordinary")
    one = firm_examples(domain, examples_of(cases))
    counts = dict.fromkeys((*MANY_ROWS, *(number + 2 for number in named(domain) if number < CROWD)))
    length = min(3, domain.longest)
    return [Example(dataclasses.replace(found.case, lengths=(length,) * rows), rows - 1) for found in one for rows in counts]


def _both(bench: Bench, inputs: Inputs, changed: Inputs, cotangents: Cotangents) -> dict[str, Bound]:
    """Return the results of the first call, and the errors that both calls together may have."""
    bounds, more = bench.bounds(inputs, cotangents), bench.bounds(changed, cotangents)
    return {name: dataclasses.replace(bound, allowed=bound.allowed + more[name].allowed) for name, bound in bounds.items()}


def _others(example: Example, axes: list[str]) -> torch.Tensor:
    """Return the mask of what belongs to the other sequences, along the first axes of a tensor."""
    lengths = torch.tensor(example.case.lengths)
    sample = torch.arange(len(lengths))
    if axes[0] == "B":
        sample = sample.repeat_interleave(lengths).reshape(example.case.shape(("B", "T")))
    return sample.ne(-1 if example.at is None else example.at)


def _part(want: Any, rows: torch.Tensor) -> Any:
    return want.at(rows) if isinstance(want, Bound) else want[rows]


def _packed(bench: Bench, example: Example) -> Iterator[Pair]:
    """Each packed sequence is also called alone, as a batch of one, by whose bounds it is judged.

    A call with other lengths in the same shapes comes before, whose results must not be taken for those of this one.
    """
    case = example.case
    inputs, cotangents = bench.call(case)
    lengths = (*case.lengths[1:], case.lengths[0])
    bench.run(bench.call(dataclasses.replace(with_others(case), lengths=lengths))[0], cotangents)
    together = bench.run(inputs, cotangents)
    starts = case.starts()
    for row in {example.at or 0, len(case.lengths) - 1}:
        tokens, here = slice(starts[row], starts[row + 1]), slice(row, row + 1)

        def index_of(name: str, tokens: slice = tokens, here: slice = here) -> tuple[slice, ...]:
            axes = axes_of(case.spec, name)
            return (slice(None), tokens) if axes[:2] == ["B", "T"] else (here,) if axes[0] == "N" else ()

        single = inputs.replaced(cu_seqlens=None, **{name: inputs[name][index_of(name)] for name in present(case.spec, inputs)})
        part = None if cotangents is None else {name: x[index_of(name)] for name, x in cotangents.items()}
        bounds = bench.bounds(single, part)
        for name, got in together.items():
            if index_of(name):  # not for a parameter's gradient, which is a sum over all sequences
                yield Pair(name, f"of packed sequence {row}", got[index_of(name)], bounds[name])


def _some(case: CallCase) -> range:
    """Return the sequences as a range if two or more have tokens, otherwise an empty range."""
    return range(len(case.lengths)) if sum(length > 0 for length in case.lengths) > 1 else range(0)


def _promised(**flags: bool) -> Any:
    return common_laws.require(**flags)


def _small(domain: CallDomain, **more: Any) -> st.SearchStrategy[CallCase]:
    return call_cases(domain, **{"sequences": (1, 3), **more})


CALL_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "finite",
            "exact",
            "every call inside the domain returns finite numbers in the shapes of the outputs, and so does its backward",
            lambda domain: examples_of(call_cases(domain, longest=150)),
            _finite,
        ),
        Law(
            "packed",
            "truth",
            "packed sequences give what each gives alone, within what one rounding of the inputs changes",
            lambda domain: examples_of(_small(domain, packed=True, sequences=(2, 5)), _some),
            _packed,
            _promised(packed=True, batched=True),
            place=_some,
            lacks=common_laws.has_words(packed="yes"),
            always=_crowd,
        ),
        Law(
            "future",
            "exact",
            "later tokens change no earlier output, bit for bit if isolated=True",
            lambda domain: examples_of(_small(domain), common_laws.inner),
            _future,
            common_laws.first_of(_promised(causal=True), common_laws.two_tokens),
            place=common_laws.inner,
            always=_late,
        ),
        Law(
            "samples",
            "exact",
            "changing one sequence changes nothing of the others, bit for bit if isolated=True",
            lambda domain: examples_of(_small(domain, sequences=(2, 5)), _some),
            _samples,
            place=_some,
        ),
        common_laws.memory_law(_small),
        common_laws.again_law(_small),
        history_law(lambda domain, **more: _small(domain, **{"longest": 34, "total": 60, **more}), anew=ANEW),
        Law(
            "batch",
            "truth",
            "a sequence gives the same alone and in batches of several sizes, within what one rounding of the inputs changes",
            lambda domain: examples_of(_small(domain, sequences=(2, 3), longest=34, total=60), common_laws.several),
            common_laws.batch,
            place=common_laws.several,
            always=_rows,
        ),
        Law(
            "strides",
            "truth",
            "inputs and cotangents may have any strides",
            _strided,
            views.strides,
            views.without_views,
            variants=(*VIEWS, *views.ARRANGED),
            lacks=views.lacks_view,
            outside=views.outside_views,
        ),
        views.pure_law(_small),
    )
}
