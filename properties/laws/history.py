"""The law `history` of rules, modules and layers: a call gives what it gives in a fresh process, whatever came before it.

A history is a short sequence of calls in one process. Every call of it is judged by its own bounds, as if it came first. A variant
is one kind of history, so a line repeats it in any process.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.laws.law import (
    Bench,
    Blind,
    Cotangents,
    Law,
    Pair,
    Results,
    either,
    examples_of,
    firm_examples,
    firm_with_states,
    pairs_of,
    present,
    with_others,
)
from properties.laws.other_calls import (
    CROWDED,
    LATER,
    complete,
    later_in_float32,
    moved,
    other_kinds,
    rotated,
    settings_of,
)
from properties.seeds import further_apart
from properties.words.example import Example
from properties.words.sizes import named

AT_ONCE = ("threads", "streams")  # calls at the same time, whose failures depend on timing
HISTORIES = ("others", "one_input", "refill", "freed", "gradients", "no_grad", "inference", "refused", "failed", *AT_ONCE)
BEHIND = (257, 129, 65)  # tokens of a call with and without gradients: one behind usual blocks
MOST_BEHIND = 2048  # the most tokens of such a call that is one behind a number of the source
EACH = 48  # so many of the first operations of a call fail in the history `failed`, one in each call
MADE = 48  # so many of the operations that make a tensor out of nothing
LAST = 12  # so many of the last operations of a call
FAILURES = 18  # further operations that fail in the history `failed`, the last one at least the 366th, unless the call has fewer
Cases = Callable[..., st.SearchStrategy[Any]]


def history(bench: Bench, example: Example) -> Iterator[Pair]:
    """Play the history that the variant names.

    - `others`: calls between with other numbers in the same shapes, with other shapes and with another dtype. The second call
      must not change what the first returned.
    - `one_input`: before a call comes one in which one tensor alone has other numbers. An implementation that keeps a result, and
      knows it again by the contents of some inputs, would take the two calls for the same. Each input is that tensor once, every
      time with new numbers in all of them.
    - `refill`: the tensors of a call get the numbers of another call in place, and the implementation is called again. Of CROWDED
      packed sequences, two late offsets alone are other, and have the same sum.
    - `freed`: the tensors of a call are freed, and those of the next call get their addresses if the allocator plays along.
    - `gradients`: a call under `no_grad`, with gradients, under `no_grad` and with gradients, always of the same tensors. After
      the first, a call under `no_grad` has other numbers in the same shapes, as an evaluation between two steps of training has.
    - `no_grad`: LATER calls under `no_grad` with other numbers in the same shapes. They must not change what the first returned.
      Then their tensors get the first call's numbers through `.data`, as optimizers and weight loaders do it, which leaves their
      versions as they are, and the implementation is called again.
    - `inference`: a call under `inference_mode` gives what it gives under `no_grad`, and a later call may compute gradients.
    - `refused`: a call between in which a required tensor is None, so that most implementations raise.
    - `failed`: calls before in which an operation fails as if memory had run out, each time another one. In every other case,
      operations that make a tensor out of nothing, such as a workspace, fail first.
    - `threads`, `streams`: two calls at the same time, in two threads or on two CUDA streams.

    A repeated call is compared bit for bit only after calls of the same shapes. A compiler may make a new program for other shapes,
    a sum in another thread may be cut into other parts, and an implementation may take another way after an error.
    """
    play = {
        "others": _others,
        "one_input": _one_input,
        "refill": _refill,
        "freed": _freed,
        "gradients": _gradients,
        "no_grad": _no_grad,
        "inference": _inference,
        "refused": _refused,
        "failed": _failed,
        "threads": _at_once,
        "streams": _at_once,
    }[example.variant or ""]
    yield from play(bench, example)


def order_of(example: Example) -> int:
    """Return in which of two orders a history looks for other shapes and dtypes. The first of each are taken, and need kernels."""
    return example.case.seed % 2 if example.variant == "others" else 0


def _repeated(bench: Bench, got: Results, once: Results, bounds: dict[str, Bound]) -> Iterator[Pair]:
    """Compare a call with the same call before: bit for bit if the domain promises that, else by its bounds."""
    yield from pairs_of(got, once if bench.domain.deterministic else bounds, "of the first call, repeated")


def _others(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = bench.call(case)
    bounds = bench.bounds(inputs, cotangents)
    once = bench.run(inputs, cotangents)
    copies = {name: value.clone() for name, value in once.items()}
    yield from pairs_of(once, bounds, "of the first call")
    yield from _other(bench, rotated(case, bench.domain), "numbers")
    yield from pairs_of({name: x.clone() for name, x in once.items()}, copies, "of the first call, read after the second")
    yield from _repeated(bench, bench.run(inputs, cotangents), once, bounds)
    for what, other in other_kinds(bench.domain, case):
        yield from _other(bench, other, what)
    yield from pairs_of(bench.run(inputs, cotangents), bounds, "of the first call, repeated at the end")


def _other(bench: Bench, case: Any, what: str) -> Iterator[Pair]:
    """Run another case and judge it by its own bounds."""
    inputs, cotangents = bench.call(case)
    yield from pairs_of(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents), f"of a later call with other {what}")


def _one_input(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    names = present(case.spec, bench.call(case)[0])
    for number, name in enumerate(names):
        own = dataclasses.replace(case, seed=case.seed ^ 2 * number)
        (inputs, cotangents), (others, _) = _two(bench, own, with_others(own, bench.domain))
        bench.run(inputs.replaced(**{name: others[name]}), cotangents)
        yield from pairs_of(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents), f"after a call with another {name}")


def _two(bench: Bench, case: Any, other: Any) -> tuple[tuple[Inputs, Cotangents], tuple[Inputs, Cotangents]]:
    """Return the call of a case, and that of another one before it, with the cotangents of the first."""
    inputs, cotangents = bench.call(case)
    return (inputs, cotangents), (bench.call(other)[0], cotangents)


def _refill(bench: Bench, example: Example) -> Iterator[Pair]:
    """Offsets are filled again only if the domain has refills=True; all other tensors are in any case, as parameters are."""
    case = example.case
    other = with_others(case, bench.domain)
    if bench.domain.refills:
        other = moved(other, bench.domain) or rotated(case, bench.domain)
    (inputs, cotangents), (first, _) = _two(bench, case, other)
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.replay(first, inputs, cotangents), bounds, "after the call's tensors were filled again")


def _freed(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    (inputs, cotangents), (first, _) = _two(bench, case, rotated(case, bench.domain))
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.renew(first, inputs, cotangents), bounds, "in memory that an earlier call's tensors had")


def _gradients(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = bench.call(case)
    leaves, bounds = _leaves(case, inputs), bench.bounds(inputs, cotangents)
    with torch.no_grad():
        rounds = [bench.run(leaves, None, same_objects=True)]
        bench.run(bench.call(with_others(case, bench.domain))[0], None)
    rounds.append(bench.run(leaves, cotangents, same_objects=True))
    with torch.no_grad():
        rounds.append(bench.run(leaves, None, same_objects=True))
    rounds.append(bench.run(leaves, cotangents, same_objects=True))
    yield from pairs_of(rounds[0], bounds, "of a call under no_grad")
    yield from pairs_of(rounds[1], bounds, "of a call with gradients, after one under no_grad")
    for number in (2, 3):
        yield from _repeated(bench, rounds[number], rounds[number - 2], bounds)


def _no_grad(bench: Bench, example: Example) -> Iterator[Pair]:
    """Offsets are not filled again, because an implementation may keep what follows from the offsets of a version."""
    case = example.case
    inputs, _ = bench.call(case)
    bounds = bench.bounds(inputs, None)
    leaves = _leaves(case, bench.call(with_others(case, bench.domain))[0])
    with torch.no_grad():
        once = bench.run(inputs, None)
        copies = {name: value.clone() for name, value in once.items()}
        for _ in range(LATER):
            bench.run(leaves, None, same_objects=True)
        read = {name: value.clone() for name, value in once.items()}
        for name in present(case.spec, inputs):
            leaves[name].data.copy_(inputs[name])
        again = bench.run(leaves, None, same_objects=True)
    yield from pairs_of(copies, bounds, "of a call under no_grad")
    yield from pairs_of(read, copies, f"of a call under no_grad, read after {LATER} others")
    yield from pairs_of(again, bounds, "under no_grad, after tensors were filled again through .data")


def _leaves(case: Any, inputs: Inputs) -> Inputs:
    """Return the call with new tensors that require gradients."""
    return inputs.replaced(**{name: inputs[name].clone().requires_grad_() for name in present(case.spec, inputs)})


def _inference(bench: Bench, example: Example) -> Iterator[Pair]:
    """Tensors made under `inference_mode` are copies here, and what is kept of them can never take part in a graph.

    The first call is under it, so that what an implementation makes at its first call is made there.
    """
    case = example.case
    inputs, cotangents = bench.call(case)
    leaves, bounds = _leaves(case, inputs), bench.bounds(inputs, cotangents)
    with torch.inference_mode():
        copies = bench.run(inputs, None)
    with torch.no_grad():
        once = bench.run(inputs, None)
    with torch.inference_mode():
        same = bench.run(leaves, None, same_objects=True)
    yield from pairs_of(once, bounds, "of a call under no_grad")
    yield from pairs_of(copies, once if bench.domain.deterministic else bounds, "under inference_mode, as under no_grad")
    yield from pairs_of(same, bounds, "under inference_mode, of tensors that require gradients")
    yield from pairs_of(bench.run(leaves, cotangents, same_objects=True), bounds, "of a call after one under inference_mode")


def _refused(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = bench.call(case)
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.run(inputs, cotangents), bounds, "of the first call")
    required = [port.name for port in case.spec.inputs if not port.optional and inputs.get(port.name) is not None]
    bench.attempt(inputs.replaced(**{required[case.seed % len(required)]: None}))
    yield from pairs_of(bench.run(inputs, cotangents), bounds, "of the first call, repeated after a call without a required tensor")


def _failed(bench: Bench, example: Example) -> Iterator[Pair]:
    """The calls that fail come first, because an earlier call may have filled what a call that fails leaves half filled.

    Then comes the same call again. In every other case, a call with other lengths and numbers comes before it.
    """
    case = example.case
    inputs, cotangents = bench.call(case)
    for _ in failures(bench, inputs, cotangents, case.seed):
        pass
    if case.seed % 2:
        yield from _other(bench, rotated(case, bench.domain), "numbers, after one had failed for lack of memory")
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.run(inputs, cotangents), bounds, "of a call after it had failed for lack of memory")


def failures(bench: Bench, inputs: Inputs, cotangents: Cotangents, seed: int) -> Iterator[tuple[int, Inputs]]:
    """Let calls fail, and yield the number of the operation that failed and the inputs as the call left them.

    Each of the first EACH operations fails, and then some that lie further apart. The numbers increase, so that what a call keeps
    for ever is not yet there, and then decrease, so that a later call does not clear away what a call has left. The decreasing ones
    begin with the LAST operations of the call, where it may have written to what it keeps. With an odd seed, each of the first MADE
    operations that make a tensor fails before all others, because it may come behind many operations.
    """
    made = range(1, MADE + 1) if seed % 2 else ()
    for number in made:
        if (left := bench.fail(inputs, cotangents, number, made=True)) is None:
            break
        yield number, left
    places = further_apart(seed, FAILURES)
    for place in sorted({*range(1, EACH + 1), *places}):
        if (left := bench.fail(inputs, cotangents, place)) is None:
            break
        yield place, left
    count = bench.operations(inputs, cotangents)
    for place in sorted({*places, *range(count - LAST + 1, count + 1)}, reverse=True):
        if 0 < place <= count and (left := bench.fail(inputs, cotangents, place)) is not None:
            yield place, left


def _at_once(bench: Bench, example: Example) -> Iterator[Pair]:
    calls = [bench.call(case) for case in (example.case, with_others(example.case, bench.domain))]
    limits = [bench.bounds(*call) for call in calls]
    for number, results, what in at_once(bench, calls, bench.domain, streams=example.variant == "streams"):
        yield from pairs_of(results, limits[number], what)


def at_once(
    bench: Bench, calls: Sequence[tuple[Inputs, Cotangents]], domain: Any, *, streams: bool
) -> Iterator[tuple[int, Results, str]]:
    """Run two calls at the same time, on two `streams` or in two threads. Yield each one's number, its results and what they are.

    Raises Blind if streams are asked for without a GPU, or if the domain excludes the variant.
    """
    word = "streams" if streams else "threads"
    if not getattr(domain, word):
        raise Blind(f"the domain has {word}=False")
    if streams and bench.device == "cpu":
        raise Blind("streams need a GPU")
    where = "on two streams" if streams else "in two threads"
    for number, results in bench.at_once(calls, streams=streams):
        yield number, results, f"of call {number + 1} of two at the same time, {where}"


def _lacks(case: Any, variant: str | None) -> str | None:
    return "backward=yes" if variant == "gradients" and not case.backward else None


def history_law(cases: Cases, about: tuple[str, ...] = (), anew: int = 0) -> Law:
    """Return the law for a book whose cases `cases(domain, **fixed)` draws.

    `anew` is a number of tokens that no other case has. A call of so many fails before one has succeeded, so what an implementation
    makes for the first call of a size, such as a table, is made while operations fail. 0 stands for no such case.

    Further cases always come. The first call of a new process is in 16 bits, and a later one in float32. That of another one is
    under inference_mode, and a later one has gradients. The first calls of a third one fail. The first of BEHIND that the domain
    allows is called with and without gradients. Small single tokens are called under inference_mode, with every setting at one
    value, with each at another, and with all.
    """

    def crowds(domain: Any, **more: Any) -> st.SearchStrategy[Example]:
        drawn = cases(domain, packed=True, sequences=(CROWDED, CROWDED + 2), **more)
        return examples_of(drawn.filter(lambda case: moved(case, domain) is not None), None, ("refill",))

    def draw(domain: Any, *, gpu: bool = False) -> st.SearchStrategy[Example]:
        kinds = [_drawn(domain, cases, kind) for kind in _kinds(domain, gpu=gpu)]
        return either(kinds + [crowds(domain)] * (domain.packs and domain.refills))

    def always(domain: Any) -> list[Example]:
        kinds = [crowds(domain, values="ordinary")] * (domain.packs and domain.refills)
        plain = cases(domain, values="ordinary", packed=domain.packs).filter(
            lambda case: case.tokens > 0 and case.backward == domain.backward and (not domain.carries or case.state == "random")
        )
        plain = plain.map(lambda case: complete(case, domain))  # what is kept of a parameter shows only where there is one
        step = cases(domain, packed=not domain.batched, longest=domain.length_step).filter(lambda case: case.tokens > 0)
        packed = [cases(domain, packed=True, sequences=(2, 3)).filter(lambda case: min(case.lengths) > 0)] * domain.packs
        found = firm_examples(domain, *kinds, examples_of(plain, None, ("inference",)))
        told = plain.filter(lambda case: case.tokens > 1 and getattr(case, "beta", "ordinary") == "ordinary")
        found += firm_examples(domain, examples_of(told, None, ("one_input",)))
        others = [examples_of(step, None, ("no_grad",)), *(examples_of(drawn, None, ("failed",)) for drawn in packed)]
        again = [dataclasses.replace(one, variant="no_grad") for one in found if one.variant == "inference"]
        steps = [*firm_examples(domain, *others), *serving(domain)]
        if domain.threads and domain.drawing.quick:  # where operations of two threads take turns
            alone = cases(domain, values="ordinary", backward=False)
            visible = alone.filter(lambda case: case.tokens > 0 and getattr(case, "beta", None) != "zero")
            steps += firm_examples(domain, examples_of(visible, None, ("threads",)))
        return [*found, *again, *steps, *first(domain), *behind(domain), *begins(domain)]

    def serving(domain: Any) -> list[Example]:
        regimes = getattr(domain, "values", domain.CASE.WORDS["values"].choices)
        values = {"values": "small"} if "small" in regimes else {}  # with the norm, they show an eps of an earlier call
        small = cases(domain, packed=not domain.batched, longest=domain.length_step, **values)
        step = small.filter(lambda case: case.tokens > 0).map(lambda case: complete(case, domain, ("qk_norm",)))
        found = firm_with_states(domain, step, "inference")
        return found + [Example(other, None, "inference") for one in found for other in settings_of(one.case, domain)]

    def sized(domain: Any, tokens: int, **more: Any) -> st.SearchStrategy[Any]:
        """Draw cases of so many tokens, in one sequence if the domain has such long ones."""
        size = min(tokens, domain.longest or tokens) // domain.length_step * domain.length_step
        if not size:
            return st.nothing()
        lengths = (size,) * (-(-tokens // size) if domain.packs else 1)
        drawn = cases(domain, packed=domain.packs, **more).map(lambda case: dataclasses.replace(case, lengths=lengths))
        return drawn.filter(lambda case: domain.outside(case) is None)

    def first(domain: Any) -> list[Example]:
        return firm_examples(domain, examples_of(sized(domain, anew), None, ("failed",))) if anew else []

    def behind(domain: Any) -> list[Example]:
        if not (domain.backward and domain.drawing.quick):
            return []
        usual = next((size for size in BEHIND if size <= (domain.longest or size)), 0)
        sizes = {usual, *(number + 1 for number in named(domain) if number < min(domain.longest or MOST_BEHIND, MOST_BEHIND))} - {0}
        drawn = (sized(domain, size, values="ordinary").filter(lambda case: case.backward) for size in sorted(sizes))
        return firm_examples(domain, *(examples_of(one, None, ("gradients",)) for one in drawn))

    def begins(domain: Any) -> list[Example]:
        def drawn(**more: Any) -> st.SearchStrategy[Any]:
            firm = cases(domain, values="ordinary", **more)
            return firm.filter(lambda case: case.tokens > 0 and case.backward == domain.backward)

        halves = drawn().filter(lambda case: later_in_float32(case, domain))
        # A process takes about a second to start where kernels are interpreted.
        ways = {domain.packs, not domain.batched} if domain.drawing.quick else {domain.packs}
        modes = (examples_of(drawn(packed=packed), None, ("inference",)) for packed in sorted(ways))
        several = drawn(packed=domain.packs).filter(lambda case: min(case.lengths) >= min(3, domain.longest or 3))
        failing = [several]
        if domain.backward and domain.drawing.quick:  # a workspace may serve calls in float32 without gradients alone
            alone = cases(domain, values="ordinary", backward=False).filter(
                lambda case: case.tokens > 0 and case.dtype == ("fp32" if "fp32" in domain.dtypes else domain.dtypes[0])
            )
            failing.append(alone.map(lambda case: dataclasses.replace(case, seed=case.seed | 1)))
        fails = (examples_of(one, None, ("failed",)) for one in failing)
        return firm_examples(domain, examples_of(halves, None, ("others",)), *modes, *fails)

    return Law(
        "history",
        "truth",
        "a call gives what it gives in a fresh process, whatever calls came before it, in any memory, and beside another call",
        draw,
        history,
        variants=HISTORIES,
        lacks=_lacks,
        about=about,
        of_process=True,
        draw_gpu=functools.partial(draw, gpu=True),
        always=always,
        begins=begins,
        turns=lambda domain: _kinds(domain, gpu=False),
    )


def _kinds(domain: Any, *, gpu: bool) -> list[str]:
    """Return the histories that can happen to calls of a domain."""
    can = {"gradients": domain.backward, "threads": domain.threads, "streams": gpu and domain.streams}
    return [kind for kind in HISTORIES if can.get(kind, True)]


def _drawn(domain: Any, cases: Cases, kind: str) -> st.SearchStrategy[Example]:
    """Return examples of one kind of history. Packed sequences of several lengths come where these are what a cache would keep."""
    anything = cases(domain)
    if kind == "gradients":  # a layer whose states carry no gradients has cases without backward too
        anything = anything.filter(lambda case: case.backward)
    choices = [examples_of(anything, None, (kind,))]
    if kind in ("others", "refill", "freed", "failed") and domain.packs:
        choices.append(examples_of(cases(domain, packed=True, sequences=(2, 3)), None, (kind,)))
    if kind in AT_ONCE and domain.backward:  # calls without a backward may take another branch, with a workspace of its own
        choices.append(examples_of(cases(domain, backward=False), None, (kind,)))
    return either(choices)
