"""Which choice of an implementation explains a difference: one is switched at a time, and it is measured what vanishes.

Two switches are made on the implementations themselves, which are called in parts, or on single sequences. The others are made
on the float64 oracle: it is evaluated with the choice and without it, both are rounded to the dtype of the output, and the change
is taken off the implementation's result. If d is the difference of both results and d' what is left of it, the switch explains the
share 1 - |d'|^2 / |d|^2. A switch that has nothing to do with a difference adds to it, so its share is 0 or less.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oracles.arithmetic.nearest import Nearest
from oracles.arithmetic.rounding import BITS
from oracles.norm import NORM_FORMS
from oracles.operation import DTYPES, Inputs
from oracles.tolerance import bound, evaluation
from properties.laws.law import Results, token_output
from properties.rules.numbers import NORM_EPS
from verify.execution.twins import ALONE, PART, PARTS, STEPS, TURNED, in_parts

SIDES = ("trainer", "server")
STATE, EPS, GATE, CHUNK, SPLIT, BATCH = "state dtype", "eps of the q/k norm", "gate precision", "chunk", "split", "batch"
KNOBS = (BATCH, SPLIT, EPS, GATE, STATE, CHUNK)
CALLED = {  # the ways of verify/execution/twins.py, by knob, and what they are called
    BATCH: {ALONE: "each sequence alone", TURNED: "sequences in the reverse order"},
    SPLIT: {PARTS: f"in parts of {PART} tokens", STEPS: "one token at a time"},
}
CHUNKS = (16, 32, 64, 128)
CLOSER = 1e-3  # a switch of both sides must explain so much more than one of a single side
Changes = dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]  # by knob, for each side: what a switch is, and the result with it


@dataclasses.dataclass(frozen=True)
class Cause:
    """A knob, the share of the squared difference that vanishes when it is switched, and the best switch in words."""

    knob: str
    share: float
    switch: str


def causes_of(first: Tensor, second: Tensor, changes: Changes) -> list[Cause]:
    """What explains the difference of two results, the largest share first. Each knob is switched on one side, and on both."""
    apart, found = float((first - second).square().sum()), []
    if apart == 0:
        return []
    for knob, sides in changes.items():
        best = Cause(knob, -torch.inf, "")
        options = [[("", base), *side.items()] for base, side in zip((first, second), sides, strict=True)]
        pairs = sorted(itertools.product(*options), key=lambda pair: sum(bool(words) for words, _ in pair))
        for (mine, a), (other, b) in pairs[1:]:  # the first one switches nothing
            share = 1.0 - float((a - b).square().sum()) / apart
            if share > best.share + (CLOSER if mine and other else 0.0):
                words = [f"{side} {words}" for side, words in zip(SIDES, (mine, other), strict=True) if words]
                best = Cause(knob, share, ", ".join(words))
        found += [best] if best.switch else []
    return sorted(found, key=lambda cause: -cause.share)


def changes_of(case: Any, inputs: Inputs, sides: Sequence[Mapping[str, Results]], truth: Results) -> Changes:
    """The outputs of both sides with each switch, of as many tokens as `inputs` has, on the CPU; `sides` has those of each way."""
    y = token_output(case.spec_of(inputs))
    sides = [{way: {y: results[y][:, : truth[y].shape[1]]} for way, results in side.items()} for side in sides]
    changes: Changes = {knob: ({}, {}) for knob in KNOBS}
    for knob, ways in CALLED.items():
        for side, results in zip(changes[knob], sides, strict=True):
            side.update({words: results[way][y].double() for way, words in ways.items() if way in results})
    for knob, words, evaluate in _emulations(case, inputs):
        value = evaluate()[y]
        for side, results in zip(changes[knob], sides, strict=True):
            whole = results["whole"][y]
            change = value.to(whole.dtype).double() - truth[y].to(whole.dtype).double()
            if bool(change.any()):
                side[words] = whole.double() - change
    return changes


def _emulations(case: Any, inputs: Inputs) -> Iterator[tuple[str, str, Callable[[], Results]]]:
    """The knobs of the oracle: the name, a switch in words, and the function that evaluates the oracle with it."""

    def exact(call: Inputs) -> Results:
        return bound.truth(case.spec_of(call), call)

    def rounded(arithmetic: Nearest, call: Inputs) -> Results:
        evaluated = evaluation.evaluate(case.spec_of(call), call, None, arithmetic)
        return {name: runs[0] for name, runs in evaluated.items()}

    def in_dtype(dtype: torch.dtype, name: str, state: Tensor) -> Tensor:
        return state.to(dtype).double() if name == "state" else state

    for (name, dtype), size in itertools.product(DTYPES.items(), (1, PART)):
        if name != "fp32":
            where = "each token" if size == 1 else f"each {PART} tokens"
            carried = functools.partial(in_dtype, dtype)
            evaluate = functools.partial(in_parts, exact, case.spec_of(inputs), inputs, size, carried)
            yield STATE, f"with exact states in place of {name} after {where}", evaluate
    if getattr(case, "qk_norm", True):
        for form, eps in itertools.product(NORM_FORMS, NORM_EPS):
            if (form, eps) != (case.qk_norm_form, case.qk_norm_eps):
                other = Inputs(**{**inputs, "qk_norm_eps": NORM_EPS[eps], "qk_norm_form": form})
                words = f"with eps {case.qk_norm_eps} in place of {eps}" + f" of the form {form}" * (form != case.qk_norm_form)
                yield EPS, words, functools.partial(exact, other)
    for name in ("g", "alpha", "beta"):
        if isinstance(given := inputs.get(name), Tensor):
            half = inputs.replaced(**{name: given.bfloat16().to(given.dtype)})
            yield GATE, f"with exact {name} in place of bf16", functools.partial(exact, half)
    if isinstance(g := inputs.get("g"), Tensor):
        decayed = g.double().exp().bfloat16().double().log().clamp(min=-1e3).to(g.dtype)
        yield GATE, "with exact exp(g) in place of bf16", functools.partial(exact, inputs.replaced(g=decayed))
    if inputs.get("a") is not None or inputs.get("b") is not None or hasattr(inputs.get("layer"), "heads"):
        yield GATE, "with exact g and beta in place of bf16", functools.partial(rounded, Nearest.of_gates(BITS["bf16"]), inputs)
    if case.dtype != "fp32":
        for chunk in CHUNKS:
            words = f"with exact operands in place of {case.dtype} in chunks of {chunk}"
            yield CHUNK, words, functools.partial(rounded, Nearest.in_chunks(case.dtype, chunk), inputs)
