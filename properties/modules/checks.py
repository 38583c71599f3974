"""What the laws of a layer's modules alone compare. Which cases they get is in laws.py."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from oracles import norm
from oracles.operation import DTYPES, Inputs
from oracles.tolerance.bound import Bound
from properties.laws import common as common_laws
from properties.laws.law import Bench, Pair, axes_of, many_at_once, pairs_of, present, reordered, rolled, spread, with_others
from properties.laws.promises import to_the_bit
from properties.modules.case import EPS
from properties.modules.domain import CONV
from properties.words.example import Example

NEARLY = 2.0**-36


def absent(bench: Bench, example: Example) -> Iterator[Pair]:
    """Leaving an argument out is the same as passing its default."""
    case, what = example.case, example.variant or ""
    if what == "options":
        yield from common_laws.without_options(bench, example)
        return
    inputs, cotangents = bench.call(case)
    if what == "final_state":
        assert cotangents is None or "final_state" in cotangents, case
        cotangents = cotangents and {**cotangents, "final_state": torch.zeros_like(cotangents["final_state"])}
    bounds, without = bench.bounds(inputs, cotangents), bench.run(inputs, cotangents)
    yield from pairs_of(without, bounds)
    if what == "final_state":
        unasked = None if cotangents is None else {"y": cotangents["y"]}
        yield from pairs_of(
            bench.run(inputs.replaced(output_final_state=False), unasked), bounds, "with the final state not asked for"
        )
        return
    neutral = {
        "bias": lambda: torch.zeros(case.width if case.operation in CONV else case.out_width, dtype=inputs.x.dtype),
        "weight": lambda: torch.ones(case.width, dtype=inputs.x.dtype),
        "state": lambda: torch.zeros(len(case.lengths), case.width, case.columns, dtype=inputs.x.dtype),
        "dt_bias": lambda: torch.zeros(inputs.a.shape[2:], dtype=DTYPES[case.dtype_of("dt_bias")]),
        "residual": lambda: torch.zeros_like(inputs.x),
        "eps": lambda: norm.EPS,
        "offsets": lambda: torch.tensor([0, case.tokens], dtype=getattr(torch, bench.domain.offsets[0])),
    }[what]()
    more = {"returns_sum": False} if what == "residual" and case.operation == "gated_rms_norm" else {}
    arguments = Inputs(**{**inputs, {"offsets": "cu_seqlens"}.get(what, what): neutral, **more})
    results = {name: got for name, got in bench.run(arguments, cotangents).items() if name in bounds}
    yield from pairs_of(results, bounds, f"with {what} given")
    if what == "state":
        same = {name: got for name, got in results.items() if name in without}
        yield from to_the_bit(bench, "absent_state_equals_zeros", "with state given, bits", same, lambda: without)


def linear(bench: Bench, example: Example) -> Iterator[Pair]:
    """A power of two rounds nothing, so it passes through every product and sum."""
    if example.variant in common_laws.FACTORS:
        yield from common_laws.linear_in_cotangents(bench, example)
        return
    inputs, cotangents = bench.call(example.case)
    changed = {"inputs": ("x", "state", "bias", "residual"), "weight": ("weight", "bias")}[example.variant or ""]
    same = {"inputs": ("dx", "dh0", "dbias", "dresidual"), "weight": ("final_state", "dweight", "dbias")}[example.variant or ""]
    if cotangents is not None and "final_state" in cotangents:  # gradients from the final state do not depend on the weight
        cotangents = {**cotangents, "final_state": torch.zeros_like(cotangents["final_state"])}
    once = bench.run(inputs, cotangents)
    changed_inputs = inputs.replaced(**{name: -2 * inputs[name] for name in changed if inputs.get(name) is not None})
    for name, got in bench.run(changed_inputs, cotangents).items():
        yield Pair(name, f"with {example.variant} times -2", got, once[name] if name in same else -2 * once[name])


def scaled(bench: Bench, example: Example) -> Iterator[Pair]:
    """sum((2 x)^2) + 4 eps is four times sum(x^2) + eps, and its root twice as large: powers of two round nothing."""
    case = example.case
    inputs, cotangents = bench.call(case)
    once = bench.run(inputs, cotangents)
    eps = EPS[case.eps] or norm.EPS
    for name, got in bench.run(inputs.replaced(x=2 * inputs.x, eps=4 * eps), cotangents).items():
        yield Pair(name, "of 2 x with 4 eps", 2 * got if name == "dx" else got, once[name])


def whole(bench: Bench, example: Example) -> Iterator[Pair]:
    """Whole numbers give exact results, except that sums over all tokens are rounded in half precision and not compared there.

    A number within NEARLY of a whole one counts as that one: a transform in float64 leaves 1e-16 where the truth is 0. Sums and
    products in float32 or fewer bits are exact here, or off by far more.
    """
    case = example.case
    many_at_once(bench, case)
    inputs, cotangents = bench.call(case)
    want = bench.truth(inputs, cotangents)
    for name, got in bench.run(inputs, cotangents).items():
        if case.dtype == "fp32" or name not in ("dweight", "dbias"):
            found = got.double()
            yield Pair(name, "", torch.where((found - found.round()).abs() < NEARLY, found.round(), found), want[name])


def copied(bench: Bench, example: Example) -> Iterator[Pair]:
    """A final state is a copy of inputs, so it is exact."""
    inputs, _ = bench.call(example.case)
    want = bench.truth(inputs, None)["final_state"]
    yield Pair("final_state", "", bench.run(inputs, None)["final_state"].double(), want)


def tokens(bench: Bench, example: Example) -> Iterator[Pair]:
    """Other numbers in one token change nothing of the other tokens."""
    case = example.case
    inputs, cotangents = bench.call(case)
    spec, others = case.spec, with_others(case, bench.domain).inputs()
    assert example.at is not None
    here = torch.arange(case.tokens).eq(example.at).reshape(case.batch)
    mixed = {
        name: torch.where(spread(here, inputs[name], 0), others[name], inputs[name]) for name in present(spec, inputs, "B", "T")
    }
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
    for name, got in twice.items():
        if axes_of(spec, name)[:2] == ["B", "T"]:
            yield Pair(name, "of the other tokens", got[~here], once[name][~here])


def apart(letters: tuple[str, ...]) -> Callable[[Bench, Example], Iterator[Pair]]:
    """Return the law that changing one head or channel and its parameters changes nothing of the others."""
    what = "heads" if "HV" in letters else "channels"

    def check(bench: Bench, example: Example) -> Iterator[Pair]:
        case, at = example.case, example.at
        assert at is not None
        inputs, cotangents = bench.call(case)
        spec, others = case.spec, with_others(case, bench.domain).inputs()

        def axis_of(name: str) -> int | None:
            axes = axes_of(spec, name)
            return next((axes.index(letter) for letter in letters if letter in axes), None)

        mixed = {}
        for name in present(spec, inputs):
            if (axis := axis_of(name)) is not None and others.get(name) is not None:
                here = torch.arange(inputs[name].shape[axis]).eq(at)
                mixed[name] = torch.where(spread(here, inputs[name], axis), others[name], inputs[name])
        once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
        for name, got in twice.items():
            if (axis := axis_of(name)) is not None:
                index: tuple[Any, ...] = (*[slice(None)] * axis, torch.arange(got.shape[axis]).ne(at))
                yield Pair(name, f"of the other {what}", got[index], once[name][index])

    return check


def permuted(bench: Bench, example: Example) -> Iterator[Pair]:
    """Permuted inputs give permuted results.

    Sums over tokens are taken in another order, so gradients of parameters are judged by bounds even if equal bits are promised.
    """
    case = example.case
    inputs, cotangents = bench.call(case)
    letters = {"causal_conv1d": ("D", "N"), "kda_gate": ("HV", "K"), "norm_gate_linear": ("D", "E")}.get(
        case.operation, ("H", "HV")
    )
    rows = rolled(len(case.lengths)) if case.operation in CONV else None
    permuted_inputs, turned, moved = reordered(case, inputs, cotangents, dict.fromkeys(letters, rolled), rows)
    bounds = bench.bounds(permuted_inputs, turned)
    once = bench.run(inputs, cotangents) if bench.domain.position_independent else {}
    for name, got in bench.run(permuted_inputs, turned).items():
        of_tokens = axes_of(case.spec, name)[0] in ("B", "N")
        yield Pair(name, "permuted", got, moved(name, once[name]) if once and of_tokens else bounds[name])


def repeated(bench: Bench, example: Example) -> Iterator[Pair]:
    """Repeated heads give the repeated norm, bit for bit if results are promised not to depend on the position.

    Not every implementation can promise that: vector code may treat the end of a row differently.
    """
    inputs, cotangents = bench.call(example.case)

    def repeat(x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=2)

    repeated_inputs = inputs.replaced(x=repeat(inputs.x))
    turned = None if cotangents is None else {name: repeat(x) for name, x in cotangents.items()}
    bounds = bench.bounds(repeated_inputs, turned)
    once = bench.run(inputs, cotangents) if bench.domain.position_independent else {}
    for name, got in bench.run(repeated_inputs, turned).items():
        want: Tensor | Bound = repeat(once[name]) if once else bounds[name]
        yield Pair(name, "of heads repeated", got, want)
