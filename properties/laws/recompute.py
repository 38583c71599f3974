"""The law `recompute` of rules, modules and layers: a call in the ways in which models call kernels gives what a plain call gives.

A variant is one way. Two of them are about what few kernels support, second derivatives and the transforms of torch.func. There an
error is right too, because the caller then knows.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.arithmetic.counter import mix_words
from oracles.operation import Inputs, gradient_name
from oracles.tolerance.bound import ANY, Bound
from properties.laws.common import require
from properties.laws.law import (
    Bench,
    Cotangents,
    Law,
    Pair,
    Results,
    all_variants,
    axes_of,
    examples_of,
    firm_examples,
    firm_with_states,
    pairs_of,
    present,
    spread,
    with_others,
)
from properties.laws.other_calls import later_cases
from properties.laws.views import view
from properties.words.domain import takes_view
from properties.words.example import Example

SAME = {  # ways that give what a plain call gives, and what a report says of them
    "checkpoint": "under checkpoint(use_reentrant=False)",
    "reentrant": "under checkpoint(use_reentrant=True)",
    "offloaded": "with saved tensors moved to the CPU and back",
    "twice": "of a second backward of the same graph",
    "between": "with other calls between forward and backward",
    "cleared": "with inputs cleared between forward and backward",
}
DENSE = "with saved tensors moved to the CPU and back, contiguous"
CLEARED_OUTPUTS = "with outputs cleared between forward and backward"
LAST_BUT_ONE = "of the last call but one of those between"
PACKED = ("between", "offloaded", "checkpoint")  # these always have packed sequences, whose order then shows
# These always have float32. There a derivative along a direction shows more, `x.float()` is the caller's own tensor, and calls of
# one packing come in `between`.
PRECISE = ("second", "cleared", "between")
# These also come without optional inputs. A backward that lacks one of them, or the gradient of an output, may be another one.
SPARE = ("one_output", "twice", "frozen")
PART_TOKENS = (130, 7)  # of a call whose loss depends on a part: more than two chunks of 64, so that whole chunks have no loss
BARE = {"state": "none", "weight": False, "bias": False, "conv_bias": False, "dt_bias": False, "residual": "returned"}
UNSORTED = (3, 7, 2)  # lengths of sequences, neither the shortest nor the longest first
VARIANTS = (*SAME, "one_output", "parts", "sums", "second", "frozen", "transforms")
STEP = 1e-5  # of a finite difference in float64, as a part of each number
SHARE, SHARE_OF_HALVES = 0.02, 0.5  # of the largest row, that a derivative along a direction may be off by; a lost part is more
FLOOR = 1e-6  # the same as a part of the largest row of what is differentiated
UNSEEN = 1e-3  # the same as a part of the largest row along any direction, which may be along another input
Words = Callable[[Any, str | None], str | None]


def recompute(bench: Bench, example: Example) -> Iterator[Pair]:
    """Call in the way that the variant names.

    - `checkpoint`, `reentrant`: under torch.utils.checkpoint, which runs the forward again in the backward.
    - `offloaded`: saved tensors are copied to the CPU and back, with their strides and then contiguous.
    - `twice`: the graph is retained, and the backward runs again, behind two with other cotangents.
    - `between`: LATER other calls with other numbers and settings come between forward and backward. The backward of the last one
      begins inside that of the first. That of the last but one comes at the end, and gives what it gives after a plain call too.
    - `cleared`: the caller puts zeros into all inputs, and in another call into all outputs, between forward and backward. Tensors
      that were saved are copies, so only what the implementation keeps in another way can change. An error is right too. Outputs
      are left alone where the domain has keeps_outputs=False.
    - `one_output`: the loss depends on one output alone, once on each, and the backward gets no cotangent of the others.
    - `parts`: the loss depends on some tokens alone, as that of an answer does: on those behind the last multiple of 64, on those
      before it and all states, on the last sequence, or on every second head and all states. A sequence of at most 64 tokens is
      parted in the middle.
    - `sums`: the loss adds up the outputs along their last axis, or along all axes, so that cotangents have strides of 0.
    - `frozen`: some inputs require no gradient. The first input, which has the tokens, is the only one that does not, then each
      input is the only one that does, and then about half of them do, so that any two are frozen together in some call. In the
      first of these calls, and in every second one of the last, the loss depends on one output alone too.
    - `second`: gradients with create_graph=True, which are differentiated along a direction, or an error. In float32 each input
      has a direction of its own, unless products are in TF32.
    - `transforms`: under torch.func.vjp, jvp and vmap, or an error. vmap maps all tensors along their first axis, and in another
      call those of tokens along their second one.

    The bits of the first six are those of the plain call. A forward without gradients may round differently, so the outputs of
    `reentrant` are judged by bounds, and so is a backward whose saved tensors have other strides. Derivatives along a direction are
    compared with differences of the float64 reference.
    """
    case, variant = example.case, example.variant or ""
    inputs, cotangents = bench.call(case)
    if variant in SAME:
        yield from _same(bench, case, variant, inputs, cotangents)
    elif variant == "frozen":
        names = present(case.spec, inputs)
        losses = {"": (cotangents, bench.bounds(inputs, cotangents))}
        if len(cotangents or {}) > 1:
            losses |= {f" and a loss of {name} alone": loss for name, loss in _of_one_output(bench, inputs, cotangents)}
        for number, frozen in enumerate(separations(names, case.seed)):
            several = number == 0 or (number > len(names) and number % 2)
            for what, (loss, bounds) in [*losses.items()][: None if several else 1]:
                got = bench.under("frozen", inputs, loss, frozen=frozen)
                yield from pairs_of(got, bounds, f"with {', '.join(frozen)} frozen{what}")
    elif variant == "one_output":
        for name, (loss, bounds) in _of_one_output(bench, inputs, cotangents):
            yield from pairs_of(bench.run(inputs, loss), bounds, f"of a loss of {name} alone")
    elif variant == "parts":
        for what, part in _parts(case, cotangents or {}):
            yield from pairs_of(bench.run(inputs, part), bench.bounds(inputs, part), f"of a loss of {what}")
    elif variant == "sums":
        for where, last in (("the last axis", True), ("all axes", False)):
            turned = {name: _summed(x, last_axis=last) for name, x in (cotangents or {}).items()}
            yield from pairs_of(bench.run(inputs, turned), bench.bounds(inputs, turned), f"of a loss that adds up {where}")
    elif variant == "second":
        yield from _second(bench, case, inputs, cotangents)
    else:
        yield from _transforms(bench, case, inputs, cotangents)


def _same(bench: Bench, case: Any, variant: str, inputs: Inputs, cotangents: Cotangents) -> Iterator[Pair]:
    if variant == "between":
        yield from _between(bench, case, inputs, cotangents)
        return
    once = bench.run(inputs, cotangents)
    got = bench.under(variant, inputs, cotangents)
    outputs = {port.name for port in case.spec.outputs}
    exact = bench.domain.deterministic
    bounds = {} if exact and variant != "reentrant" else bench.bounds(inputs, cotangents)
    wanted = {name: once[name] if exact and not (variant == "reentrant" and name in outputs) else bounds[name] for name in once}
    yield from pairs_of(got, wanted, SAME[variant])
    if variant == "cleared" and bench.domain.keeps_outputs:
        yield from pairs_of(bench.under("cleared outputs", inputs, cotangents), wanted, CLEARED_OUTPUTS)
    if variant == "offloaded":
        strided = _strided(bench, case, inputs)
        yield from pairs_of(bench.under("dense", strided, cotangents), bench.bounds(inputs, cotangents), DENSE)


def _between(bench: Bench, case: Any, inputs: Inputs, cotangents: Cotangents) -> Iterator[Pair]:
    others = [bench.call(other) for other in later_cases(case, bench.domain, bench.device)]
    wanted: list[tuple[str, Mapping[str, Tensor | Bound]]] = []
    for prefix, call in (("", (inputs, cotangents)), ("later ", others[-2])):
        if bench.domain.deterministic:
            wanted.append((prefix, {name: value.clone() for name, value in bench.run(*call).items()}))
        else:
            wanted.append((prefix, bench.bounds(*call)))
    got = bench.under("between", inputs, cotangents, others=others)
    for prefix, want in wanted:
        own = {name.removeprefix(prefix): x for name, x in got.items() if name.startswith("later ") == bool(prefix)}
        yield from pairs_of(own, want, LAST_BUT_ONE if prefix else SAME["between"])


def _of_one_output(bench: Bench, inputs: Inputs, cotangents: Cotangents) -> Iterator[tuple[str, tuple[Results, dict[str, Bound]]]]:
    """Yield each output with its cotangent alone, and with the bounds of a loss of this output."""
    cotangents = cotangents or {}
    for name in cotangents:
        zeros = {other: torch.zeros_like(x) if other != name else x for other, x in cotangents.items()}
        yield name, ({name: cotangents[name]}, bench.bounds(inputs, zeros))


def _parts(case: Any, cotangents: Results) -> Iterator[tuple[str, Results]]:
    """Yield the cotangents of a loss of some tokens, or of some heads, each with what it is a loss of."""
    spec = case.spec
    tokens = {name for name in cotangents if axes_of(spec, name)[:2] == ["B", "T"]}
    if not tokens:
        return
    shape = cotangents[min(tokens)].shape[:2]
    place = torch.cat([torch.arange(length) for length in case.lengths]).reshape(shape)
    last = [(length - 1) // 64 * 64 if length > 64 else length // 2 for length in case.lengths]
    begin, row = (
        torch.cat([torch.full((length,), number) for length, number in zip(case.lengths, numbers, strict=True)]).reshape(shape)
        for numbers in (last, range(len(case.lengths)))
    )

    def only(keep: Tensor, *, states: bool) -> Results:
        return {
            name: torch.where(spread(keep, x, 0), x, 0.0) if name in tokens else x if states else torch.zeros_like(x)
            for name, x in cotangents.items()
        }

    yield "the last tokens alone", only(place >= begin, states=False)
    yield "the first tokens and the states", only(place < begin, states=True)
    if len(case.lengths) > 1:
        yield "the last sequence's tokens", only(row == len(case.lengths) - 1, states=False)
    headed = {name for name in tokens if axes_of(spec, name)[2:3] == ["HV"] and cotangents[name].shape[2] > 1}
    if headed:
        turned = dict(cotangents)
        for name in headed:
            odd = torch.arange(cotangents[name].shape[2], device=cotangents[name].device) % 2 == 1
            turned[name] = torch.where(spread(odd, cotangents[name], 2), cotangents[name], 0.0)
        yield "every second head and the states", turned


def _summed(x: Tensor, *, last_axis: bool) -> Tensor:
    """Return a cotangent with one number along its last axis, or along all axes, as the backward of a sum makes it."""
    return (x[..., :1] if last_axis else x.flatten()[0]).expand_as(x) if x.numel() else x


def _strided(bench: Bench, case: Any, inputs: Inputs) -> Inputs:
    """Return the call with tokens in strides that a contiguous copy does not have.

    It is the call itself if the domain has no such strides, or on a GPU, where kernels would be compiled for them.
    """
    how = next((how for how in ("transposed", "strided", "sliced") if takes_view(bench.domain, how)), None)
    if how is None or bench.device != "cpu":
        return inputs
    return inputs.replaced(**{name: view(inputs[name], how) for name in present(case.spec, inputs, "B", "T")})


def separations(names: Sequence[str], seed: int) -> Iterator[list[str]]:
    """Yield groups of names: the first one, all but one, and about half of them.

    So any two names are in some group together, and each is in one without the other. The halves are the rows of a Hadamard
    matrix, in which two columns have every pair of signs equally often; the seed decides which columns the names have.
    """
    if len(names) < 2:
        return
    groups = [[*names[:1]], *([other for other in names if other != name] for name in names)]
    size = 1 << len(names).bit_length()
    columns = sorted(range(1, size), key=lambda column: mix_words(seed, str(column)))
    groups += (
        [name for name, column in zip(names, columns, strict=False) if (row & column).bit_count() % 2] for row in range(1, size)
    )
    yield from (group for number, group in enumerate(groups) if 0 < len(group) < len(names) and group not in groups[:number])


def bare(case: Any, domain: Any) -> Any:
    """Return the case without each optional input that the domain can do without, and with a residual that is returned."""
    for name, value in BARE.items():
        if getattr(case, name, value) != value:
            with contextlib.suppress(ValueError):
                changed = dataclasses.replace(case, **{name: value})
                case = case if domain.outside(changed) else changed
    return case


def _second(bench: Bench, case: Any, inputs: Inputs, cotangents: Cotangents) -> Iterator[Pair]:
    directions = _directions(bench, case, inputs)
    bounds = bench.bounds(inputs, cotangents)
    got = bench.under("second", inputs, cotangents, directions=[*directions.values()])
    first = {name: value for name, value in got.items() if name in bounds}
    yield from pairs_of(first, bounds, "with create_graph=True")
    if not any(name.startswith("second ") for name in got):
        return  # refused
    for number, (along, wanted) in enumerate(_along(bench, case, inputs, cotangents, directions, bounds).items()):
        for name in present(case.spec, inputs):
            gradient = gradient_name(name)
            yield Pair(gradient, f"differentiated again {along}", got[f"second {number} {gradient}"], wanted[gradient])


def _transforms(bench: Bench, case: Any, inputs: Inputs, cotangents: Cotangents) -> Iterator[Pair]:
    names, directions = present(case.spec, inputs), _directions(bench, case, inputs)
    other, _ = bench.call(with_others(case, bench.domain))
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.run(inputs, cotangents), bounds, "of a plain call")
    if (found := bench.transformed("vjp", inputs, names, {}, cotangents)) is not None:
        outputs, gradients = found
        results = {**outputs, **dict(zip(map(gradient_name, names), gradients, strict=True))}
        yield from pairs_of(results, bounds, "of torch.func.vjp")
    jvps = {along: bench.transformed("jvp", inputs, names, direction, None) for along, direction in directions.items()}
    for along, wanted in _along(bench, case, inputs, None, directions, bounds).items() if all(jvps.values()) else ():
        outputs, tangents = jvps[along] or ({}, ())
        yield from pairs_of(outputs, bounds, "of torch.func.jvp")
        yield from pairs_of(dict(zip(outputs, tangents, strict=True)), wanted, along)
    if (found := bench.transformed("vmap", inputs, names, {name: other[name] for name in names}, None)) is not None:
        outputs, others = found
        yield from pairs_of(outputs, bounds, "of torch.func.vmap")
        yield from pairs_of(dict(zip(outputs, others, strict=True)), bench.bounds(other, None), "of vmap's second call")
    tokens = {name: other[name] for name in present(case.spec, inputs, "B", "T")}
    if tokens and (found := bench.transformed("vmap along 1", inputs, names, tokens, None)) is not None:
        outputs, others = found
        yield from pairs_of(outputs, bounds, "of torch.func.vmap along axis 1, with shared parameters and states")
        mixed = bench.bounds(inputs.replaced(**tokens), None)
        yield from pairs_of(dict(zip(outputs, others, strict=True)), mixed, "of its second call")


def _directions(bench: Bench, case: Any, inputs: Inputs) -> dict[str, Results]:
    """Return directions of the inputs, in proportion to their numbers, so that decays stay below 1, each with what it is.

    In float32 every direction is that of one input, so that a part that is left out of the derivative along it is all there is.
    In 16 bits, and with products in TF32, all inputs have one direction: along one of them, rounding could be more than
    the derivative.
    """
    chance = torch.Generator().manual_seed(case.seed)
    names = present(case.spec, inputs)
    parts = {name: torch.rand(inputs[name].shape, generator=chance, device="cpu") * 2 - 1 for name in names}
    every = {name: (inputs[name] * part.to(inputs[name].device)).to(inputs[name].dtype) for name, part in parts.items()}
    if not _precise(bench, case):
        return {"along a direction": every}
    return {
        f"along a direction of {own}": {name: x if name == own else torch.zeros_like(x) for name, x in every.items()}
        for own in names
    }


def _along(
    bench: Bench, case: Any, inputs: Inputs, cotangents: Cotangents, directions: dict[str, Results], bounds: dict[str, Bound]
) -> dict[str, dict[str, Bound]]:
    """Return the derivatives of results along each direction, by differences of the float64 reference.

    For gradients these are also the gradients of the product of all gradients with the directions, because second derivatives are
    symmetric.
    """
    turned = cotangents and {name: x.double() for name, x in cotangents.items()}

    def derivative(direction: Results) -> Results:
        before, after = (
            bench.truth(
                inputs.replaced(**{name: inputs[name].double() + step * x.double() for name, x in direction.items()}), turned
            )
            for step in (-STEP, STEP)
        )
        return {name: (after[name] - before[name]) / (2 * STEP) for name in before.keys() & bounds.keys()}

    values = {along: derivative(direction) for along, direction in directions.items()}
    first = next(iter(values.values()))
    share = SHARE if _precise(bench, case) else SHARE_OF_HALVES
    largest = {name: max(_largest(found[name], bounds[name].allowed) for found in values.values()) for name in first}

    def limited(name: str, value: Tensor) -> Bound:
        allowed = bounds[name].allowed
        limit = share * _largest(value, allowed) + UNSEEN * largest[name] + FLOOR * _largest(bounds[name].value, allowed)
        limits = torch.full_like(allowed, limit + torch.finfo(torch.float32).tiny)
        # not of states that a packed call does not return
        return Bound(value, limits.where(allowed < ANY, ANY), f"{share:g} of the largest row of the derivative")

    return {along: {name: limited(name, value) for name, value in found.items()} for along, found in values.items()}


def _precise(bench: Bench, case: Any) -> bool:
    return case.dtype == "fp32" and bench.products != "tf32"


def _largest(x: Tensor, rows: Tensor) -> float:
    """Return the size of the largest row; the tensor `rows` has a number for each."""
    sizes = x.abs() if rows.ndim == x.ndim else x.norm(dim=-1)
    return float(sizes.max()) if sizes.numel() else 0.0


def recompute_law(
    cases: Callable[[Any], st.SearchStrategy[Any]],
    calm: Words,
    about: tuple[str, ...] = (),
    *,
    explicit: Callable[[Any], st.SearchStrategy[Any]] | None = None,
) -> Law:
    """Return the law for a book whose cases `cases(domain)` draws.

    `calm(case, variant)` returns the words that a case lacks for a derivative along a direction to be well above rounding, or None.
    `explicit(domain)` draws cases whose gates are inputs, if the domain has such: one of them always comes as `frozen`. Where the
    kernel computes gates, it may have other branches.
    """

    def lacks(case: Any, variant: str | None) -> str | None:
        if not case.backward:
            return "backward=yes"
        if variant == "frozen":
            needed = [port.name for port in case.spec.inputs if port.dtype != "index" and not port.optional]
            return None if len(needed) > 1 else "an operation with two inputs"
        if variant == "one_output":
            return None if len(case.spec.outputs) > 1 else "two outputs"
        if variant == "parts":
            return None if max(case.lengths) > 1 else "a sequence of two tokens"
        if variant == "sums":
            widths = (getattr(case, name, 2) for name in ("width", "value_dim", "hidden"))
            return None if min(case.tokens, *widths) > 1 else "two tokens and channels"
        return calm(case, variant) if variant in ("second", "transforms") else None

    def draw(domain: Any) -> st.SearchStrategy[Example]:
        # Each variant may come once, so it comes with a sequence in which an order of tokens shows.
        drawn = cases(domain).filter(lambda case: case.backward and max(case.lengths) > (domain.longest != 1))
        return all_variants(drawn, lambda case: [variant for variant in VARIANTS if lacks(case, variant) is None])

    def firm(domain: Any) -> list[Example]:
        if not domain.backward:
            return []
        apart = [explicit(domain).filter(lambda case: case.tokens > 1 and lacks(case, "frozen") is None)] if explicit else []
        frozen = firm_examples(domain, *(examples_of(drawn, None, ("frozen",)) for drawn in apart))
        # What a backward decays in place shows in the next one only if there are decays, which the delta rule has not.
        decaying = [drawn.filter(lambda case: case.gate != "forever") for drawn in apart if domain.operation != "delta_rule"]
        frozen += firm_examples(domain, *(examples_of(drawn, None, ("twice",)) for drawn in decaying))
        return [*precise(domain), *frozen, *spare(domain), *parts(domain), *(unsorted(domain) if domain.packs else [])]

    def parts(domain: Any) -> list[Example]:
        step = domain.length_step
        sizes = [max(1, min(tokens, domain.longest or tokens) // step) * step for tokens in PART_TOKENS]
        lengths = tuple(sizes) if domain.packs else (sizes[0],)
        forgets = domain.operation != "delta_rule"

        def fits(case: Any) -> bool:
            return case.backward and case.packed == domain.packs and not (forgets and getattr(case, "gate", "") == "forever")

        drawn = cases(domain).filter(fits).map(lambda case: dataclasses.replace(case, lengths=lengths))
        drawn = drawn.filter(lambda case: domain.outside(case) is None and lacks(case, "parts") is None)
        return firm_with_states(domain, drawn, "parts")

    def spare(domain: Any) -> list[Example]:
        drawn = cases(domain).filter(lambda case: case.backward and case.tokens > 1).map(lambda case: bare(case, domain))
        found = (examples_of(drawn, None, (variant,)) for variant in SPARE)
        return firm_examples(domain, *(examples.filter(lambda one: lacks(one.case, one.variant) is None) for examples in found))

    def precise(domain: Any) -> list[Example]:
        if "fp32" not in domain.dtypes:
            return []
        drawn = cases(domain).filter(lambda case: case.dtype == "fp32" and case.tokens > 1 and lacks(case, "second") is None)
        return firm_examples(domain, *(examples_of(drawn, None, (variant,)) for variant in PRECISE))

    def unsorted(domain: Any) -> list[Example]:
        lengths = tuple(domain.length_step * length for length in UNSORTED)
        drawn = cases(domain).filter(lambda case: case.packed and case.backward)
        drawn = drawn.map(lambda case: dataclasses.replace(case, lengths=lengths)).filter(lambda case: domain.outside(case) is None)
        return firm_with_states(domain, drawn, *PACKED)

    return Law(
        "recompute",
        "exact",
        "a call under checkpointing, with saved tensors moved away, or with other calls and a backward between gives what a plain "
        "call gives; second derivatives and the transforms of torch.func are right or raise an error",
        draw,
        recompute,
        require(backward=True),
        variants=VARIANTS,
        lacks=lacks,
        always=firm,
        turns=lambda domain: VARIANTS[::-1],  # the last ones suit fewer cases, so they come before cases run out
        about=about,
        # each variant, and those that come twice
        few=len(VARIANTS) + len(PRECISE) + len(SPARE) + len(PACKED) + 2 * (explicit is not None) + 1,
    )
