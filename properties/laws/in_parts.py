"""Laws about calls in parts: packed sequences alone, a sequence that is cut, and one token at a time."""

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from oracles.operation import DTYPES, Inputs, Operation, sequences
from properties.laws.common import inner
from properties.laws.law import (
    Bench,
    Blind,
    Cotangents,
    Pair,
    Results,
    axes_of,
    bounds_as,
    in_two_parts,
    one_final_state,
    one_initial_state,
    pairs_of,
    present,
    token_output,
    visible,
)
from properties.laws.promises import to_the_bit
from properties.words.example import Example
from properties.words.word import text_of


def packed(bench: Bench, example: Example) -> Iterator[Pair]:
    """Packed sequences give what each gives alone.

    If a packed call has one initial or one final state only, the bounds of the sequence alone are computed for it: bounds of the
    packed call do not judge the states that it lacks.

    Blind if a state that leaked from each sequence into the next would stay within the tolerance.
    """
    case, alone = example.case, example.at
    assert alone is not None
    inputs, cotangents = bench.call(case)
    spec, bounds = case.spec, bench.bounds(inputs, cotangents)
    leaked = torch.zeros_like(bounds["final_state"].value)
    leaked[1:] = bounds["final_state"].value[:-1]
    if inputs.state is not None:
        leaked = leaked + inputs.state
    if not visible(bench.truth(inputs.replaced(state=leaked), None), bounds):
        raise Blind("a state leaking into the next sequence would not show")
    together = bench.run(inputs, cotangents)
    yield from pairs_of(together, bounds)
    start, end = case.starts()[alone : alone + 2]

    def index_of(name: str) -> tuple[slice, ...]:
        axes = axes_of(spec, name)
        return (slice(alone, alone + 1),) if axes[0] == "N" else (slice(None), slice(start, end)) if axes[:2] == ["B", "T"] else ()

    # Copies begin where a new tensor begins. For views of the packed tensors, compilers would make kernels for each odd address.
    single = inputs.replaced(cu_seqlens=None, **{name: inputs[name][index_of(name)].clone() for name in present(spec, inputs)})
    part = None if cotangents is None else {name: x[index_of(name)].clone() for name, x in cotangents.items()}
    one_state = one_initial_state(bench.domain) or one_final_state(bench.domain)
    own = bench.bounds(single, part) if one_state else None
    results = {name: got for name, got in bench.run(single, part).items() if index_of(name)}  # no sums over all sequences
    for name, got in results.items():
        yield Pair(name, f"of sequence {alone} alone", got, bounds[name].at(*index_of(name)) if own is None else own[name])
    shared = {name: got for name, got in results.items() if not (one_state and name in ("final_state", "dh0"))}
    yield from to_the_bit(
        bench,
        "packed_equals_dense",
        f"of sequence {alone} alone, bits",
        shared,
        lambda: {name: together[name][index_of(name)] for name in shared},
    )


def tokens_of(spec: Operation, inputs: Inputs, where: slice) -> Inputs:
    """Return the inputs of some tokens."""
    return inputs.replaced(**{name: inputs[name][:, where] for name in present(spec, inputs, "B", "T")})


def _pieces(spec: Operation, inputs: Inputs, cotangents: Cotangents, at: int) -> tuple[list[Tensor], list[Inputs], list[Tensor]]:
    """Cut every sequence at token `at`; return token indices, inputs and the output's cotangents before and after the cut."""
    names = present(spec, inputs, "B", "T")
    lengths = sequences(inputs, names[0])
    sides: list[list[Tensor]] = [[], []]
    if inputs.cu_seqlens is None:
        indices = [torch.arange(at), torch.arange(at, lengths[0])]
        offsets: list[Tensor | None] = [None, None]
    else:
        start, offsets = 0, []
        for length in lengths:
            middle = start + min(at, length)
            sides[0].append(torch.arange(start, middle))
            sides[1].append(torch.arange(middle, start + length))
            start += length
        indices = [torch.cat(side) for side in sides]
        for side in sides:
            ends = torch.tensor([0, *(len(piece) for piece in side)]).cumsum(0)
            offsets.append(ends.to(inputs.cu_seqlens.dtype))
    parts = [
        inputs.replaced(cu_seqlens=offset, **{name: inputs[name][:, index] for name in names})
        for index, offset in zip(indices, offsets, strict=True)
    ]
    outputs = [] if cotangents is None else [cotangents[token_output(spec)][:, index] for index in indices]
    return indices, parts, outputs


def cut(bench: Bench, example: Example) -> Iterator[Pair]:
    """Forward, the final state of the head is the initial state of the tail; backward, its gradient comes back the same way.

    Blind if a state lost at the cut would stay within the tolerance.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    spec, bounds = case.spec, bench.bounds(inputs, cotangents)
    y = token_output(spec)
    (before, after), (head, tail), directions = _pieces(spec, inputs, cotangents, at)
    lost = bench.truth(tail.replaced(state=None), None)
    limits = {y: bounds[y].at(slice(None), after), "final_state": bounds["final_state"]}
    if not visible(lost, limits):
        raise Blind("a state lost at the cut would not show")
    first = bench.run(head, None)
    order = torch.cat([before, after]).argsort()
    if rounds_states(bench, case, first["final_state"].dtype):
        parts = yield from _cut_in_two(bench, case, (head, tail), directions, cotangents, first)
        yield from _split(bench, _joined(spec, *parts, order), inputs, cotangents)
        return
    if cotangents is None:
        second = bench.run(tail.replaced(state=first["final_state"]), None)
    else:
        second = bench.run(tail.replaced(state=first["final_state"]), {y: directions[1], "final_state": cotangents["final_state"]})
        first = bench.run(head, {y: directions[0], "final_state": second["dh0"]})
    whole = _joined(spec, first, second, order)
    yield from pairs_of(whole, in_two_parts(bench, bounds, inputs, cotangents, at, len(case.lengths)))
    yield from _split(bench, whole, inputs, cotangents)


def _joined(spec: Operation, first: Results, second: Results, order: Tensor) -> Results:
    """Return the results of two parts of a call as those of the call, with its tokens in their order.

    Gradients of parameters are left out: they are sums over parts that are rounded separately.
    """
    whole = {}
    for name, value in first.items():
        if axes_of(spec, name)[:2] == ["B", "T"]:
            whole[name] = torch.cat([value, second[name]], 1)[:, order]
        elif name in ("final_state", "dh0"):
            whole[name] = second[name] if name == "final_state" else value
    return whole


def _split(bench: Bench, whole: Results, inputs: Inputs, cotangents: Cotangents) -> Iterator[Pair]:
    """Compare the results of a call in two parts with those of one call, to the bit."""
    yield from to_the_bit(bench, "split_invariant", "of both parts, bits", whole, lambda: bench.run(inputs, cotangents))


def rounds_states(bench: Bench, case: Any, dtype: torch.dtype) -> bool:
    """Whether a final state of this dtype was rounded when it was returned, or is rounded when it becomes an initial state."""
    carried = case.carried_dtype(bench.domain, dtype)
    return carried is not None and (dtype != torch.float32 or carried != dtype)


def carried_dtype(bench: Bench, case: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a final state becomes an initial state."""
    carried: torch.dtype | None = case.carried_dtype(bench.domain, dtype)
    return carried or dtype


def _cut_in_two(
    bench: Bench, case: Any, parts: tuple[Inputs, Inputs], directions: list[Tensor], cotangents: Cotangents, first: Results
) -> Generator[Pair, None, tuple[Results, Results]]:
    """Judge each part of a cut by its own bounds, because the state that is carried over the cut is rounded.

    The truth of the tail is taken at the carried state, and that of the head at the gradient that comes back. Returns the results
    of both parts.
    """
    head, tail = parts
    y, dtype = token_output(case.spec), first["final_state"].dtype
    tail = tail.replaced(state=first["final_state"].to(carried_dtype(bench, case, dtype)))
    if cotangents is None:
        yield from pairs_of(first, bench.bounds(head, None), "before the cut")
        limits = bench.bounds(tail, None)
        second = bench.run(tail, None)
        yield from pairs_of(second, limits, "after the cut")
        return first, second
    later = {y: directions[1], "final_state": cotangents["final_state"].to(final_dtype(case, tail))}
    second, limits = bench.run(tail, later), bench.bounds(tail, later)
    yield from pairs_of(second, limits, "after the cut")
    earlier = {y: directions[0], "final_state": second["dh0"].to(dtype)}
    limits = bench.bounds(head, earlier)
    first = bench.run(head, earlier)
    yield from pairs_of(first, limits, "before the cut")
    return first, second


def final_dtype(case: Any, inputs: Inputs) -> torch.dtype:
    """Return the dtype of the final state of a call like the case's."""
    return DTYPES[case.spec_of(inputs).port("final_state").dtype]


def recurrent(bench: Bench, example: Example) -> Iterator[Pair]:
    """The tokens after the prompt come one at a time, through the implementation's recurrent counterpart if it has one.

    Blind if a state lost after the prompt would stay within the tolerance.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, _ = bench.call(case)
    bounds = bounds_as(bench, inputs, None, "recurrent")
    spec, y = case.spec, token_output(case.spec)
    tail = tokens_of(spec, inputs, slice(at, None))
    ends = {y: bounds[y].at(slice(None), slice(at, None)), "final_state": bounds["final_state"]}
    if not visible(bench.truth(tail.replaced(state=None), None), ends):
        raise Blind("a state lost after the prompt would not show")
    got = bench.run(tokens_of(spec, inputs, slice(0, at)), None)
    rows = [got[y]]
    if rounds_states(bench, case, got["final_state"].dtype):  # then every call is judged by its own bounds
        yield from pairs_of(got, bench.bounds(tokens_of(spec, inputs, slice(0, at)), None), "of the prompt")
        for token in range(at, case.lengths[0]):
            state = got["final_state"].to(carried_dtype(bench, case, got["final_state"].dtype))
            step = tokens_of(spec, inputs, slice(token, token + 1)).replaced(state=state)
            got, limits = bench.run(step, None, counterpart=True), bounds_as(bench, step, None, "recurrent")
            yield from pairs_of(got, limits, f"of the step at token {token}")
            rows.append(got[y])
        yield from _stepped(bench, {y: torch.cat(rows, 1), "final_state": got["final_state"]}, inputs)
        return
    for token in range(at, case.lengths[0]):
        step = tokens_of(spec, inputs, slice(token, token + 1)).replaced(state=got["final_state"])
        got = bench.run(step, None, counterpart=True)
        rows.append(got[y])
    whole = {y: torch.cat(rows, 1), "final_state": got["final_state"]}
    yield from pairs_of(whole, bounds)
    yield from _stepped(bench, whole, inputs)


def _stepped(bench: Bench, whole: Results, inputs: Inputs) -> Iterator[Pair]:
    """Compare the results of a prompt and single tokens with those of one call, to the bit."""
    yield from to_the_bit(bench, "decode_equals_prefill", "of a prompt and steps, bits", whole, lambda: bench.run(inputs, None))


def cuts(domain: Any) -> Callable[[Any], range]:
    """Return the function of a case that returns the tokens at which the domain's sequences can be cut in two."""
    step = domain.length_step
    return inner if step == 1 else lambda case: range(step, max(case.lengths), step)


def outside_of_cut(domain: Any, example: Example) -> str | None:
    """Return why the parts of a cut are outside the domain, or None."""
    step, lengths = domain.length_step, example.case.lengths
    if example.at is not None and example.at % step:
        return f"at={example.at}: every length must be a multiple of {step}"
    if example.at is not None and not domain.empty and min(lengths) <= example.at:
        return f"lengths={text_of(lengths)}: cut at {example.at}, a sequence would have no tokens left"
    if example.case.packed and len(example.case.lengths) > 1 and (one_initial_state(domain) or one_final_state(domain)):
        return f"lengths={text_of(example.case.lengths)}: the states of several packed sequences cannot be carried over a cut"
    return None


def steps(case: Any) -> range:
    """Return the lengths of a prompt that leave only a few tokens to step through."""
    return range(max(1, case.lengths[0] - 3), case.lengths[0])
