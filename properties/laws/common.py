"""Laws that several books share: those of rules, of the other operations of a layer, and of whole layers."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs, no_padding
from oracles.tolerance.bound import Bound
from properties.laws.law import (
    CALLS,
    CROWD,
    Bench,
    Blind,
    Cotangents,
    Law,
    Pair,
    Results,
    axes_of,
    conventional,
    examples_of,
    firm_examples,
    one_final_state,
    one_initial_state,
    pairs_of,
    present,
    spread,
    token_output,
    with_others,
)
from properties.words.example import Example
from properties.words.options import text_of_values, values_of

Cases = Callable[..., st.SearchStrategy[Any]]
Check = Callable[[Any, Example], Iterator[Pair]]
# Powers of two by which cotangents are multiplied. The smallest is that of a mean over 2^24 numbers: float16 keeps no digit.
FACTORS = {"cotangents": -2.0, "zero_cotangents": 0.0, "small_cotangents": 2.0**-24}
UNDERFLOW = 2.0**-100  # the subnormal step of float32, 2^-149, is 2^-49 of this
FAR_PADDED = 262  # tokens of a row whose padding ends behind token 256


def linear_in_cotangents(bench: Bench, example: Example) -> Iterator[Pair]:
    """Gradients are linear in the cotangents, and a power of two rounds nothing, so it passes through every product and sum."""
    inputs, cotangents = bench.call(example.case)
    assert cotangents is not None
    factor = FACTORS[example.variant or ""]
    once = bench.run(inputs, cotangents)
    for name, got in bench.run(inputs, {name: factor * x for name, x in cotangents.items()}).items():
        if example.case.spec.port(name).gradient:
            compared = (normal(got, factor), normal(factor * once[name], factor)) if factor else (got, factor * once[name])
            yield Pair(name, f"with cotangents times {factor:.3g}", *compared)


def normal(x: Tensor, factor: float) -> Tensor:
    """Return x with zeros in place of numbers below UNDERFLOW; for the small factor, of numbers below 2^20 times that.

    Subnormal numbers, which do round under a power of two, may have gone into such small numbers.
    """
    return torch.where(x.abs() < UNDERFLOW * max(1.0, 2.0**-4 / abs(factor)), 0.0, x)


def plain(domain: Any) -> Any:
    """Return the domain without options and rare arguments, which the recurrent form of an implementation may lack."""
    first: dict[str, tuple[str, ...]] = {"options": (), "exact_options": ()}
    first |= {name: ("none",) for name in ("left_out", "channel_decays", "residuals") if "none" in getattr(domain, name, ())}
    names = {field.name for field in dataclasses.fields(domain)}
    return dataclasses.replace(domain, **{name: value for name, value in first.items() if name in names})


def oracle(bench: Bench, example: Example) -> Iterator[Pair]:
    """One run, judged by its bounds."""
    inputs, cotangents = bench.call(example.case)
    yield from pairs_of(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents))


def without_options(bench: Bench, example: Example) -> Iterator[Pair]:
    """The call of a case with options, and the same call without each of them.

    An option in `exact_options` of the domain changes no bit if runs are deterministic.
    """
    inputs, cotangents = bench.call(example.case)
    bounds, once = bench.bounds(inputs, cotangents), bench.run(inputs, cotangents)
    yield from pairs_of(once, bounds)
    values = values_of(example.case.options)
    for option in values:
        rest = text_of_values({name: value for name, value in values.items() if name != option})
        exact = option in bench.domain.exact_options and bench.domain.deterministic
        got = bench.run(inputs, cotangents, options=rest)
        yield from pairs_of(got, once if exact else bounds, f"without {option}:{values[option]}")


def future(bench: Bench, example: Example) -> Iterator[Pair]:
    """Everything from token `at` on changes, in all sequences; only parameters stay."""
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    spec, names = case.spec, present(case.spec, inputs, "B", "T")
    place = torch.cat([torch.arange(length) for length in case.lengths]).reshape(inputs[names[0]].shape[:2])
    later = _later(case, bench.domain).inputs()
    changed = inputs.replaced(
        **{name: torch.where(spread(place >= at, inputs[name], 0), later[name], inputs[name]) for name in names}
    )
    once, twice = bench.run(inputs, cotangents), bench.run(changed, cotangents)
    past = place < at
    for name in (token_output(spec), "dq"):
        if name in once:
            yield Pair(name, f"before token {at}", twice[name][past], once[name][past])


def _later(case: Any, domain: Any) -> Any:
    """Return the case with the same shapes, other values and, if it has a gate, other decays, at most the domain's strongest."""
    strongest = domain.strongest_decay
    if case.operation == "delta_rule" or not hasattr(case, "gate") or getattr(case, "without_gate", False):
        return with_others(case, domain)
    if strongest != "saturated" and getattr(case, "channel_decays", "none") != "none":
        return with_others(case, domain)  # with another gate the sum of the decays may be too strong
    another = "10" if strongest == "saturated" else "forever"
    return dataclasses.replace(with_others(case, domain), gate=strongest if case.gate != strongest else another)


def samples(bench: Bench, example: Example) -> Iterator[Pair]:
    """One sequence changes, and the results of the others are compared.

    Gradients of parameters, which all sequences share, are not compared.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    spec, names = case.spec, present(case.spec, inputs, "B", "T")
    shape = inputs[names[0]].shape[:2]
    sample = torch.cat([torch.full((length,), row) for row, length in enumerate(case.lengths)]).reshape(shape)
    rows, other = torch.arange(len(case.lengths)) != at, with_others(case, bench.domain).inputs()
    mixed = {name: torch.where(spread(sample == at, inputs[name], 0), other[name], inputs[name]) for name in names}
    mixed |= {name: torch.where(spread(rows, inputs[name], 0), inputs[name], other[name]) for name in present(spec, inputs, "N")}
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
    for name, got in twice.items():
        axes = axes_of(spec, name)
        if axes[0] == "N" or axes[:2] == ["B", "T"]:
            keep = rows if axes[0] == "N" else sample != at
            yield Pair(name, "of the other sequences", got[keep], once[name][keep])


def left_padding(bench: Bench, example: Example) -> Iterator[Pair]:
    """The truth is that of the packed tokens without padding; other numbers in the padding must change no bit.

    With `end`, rows do not begin but end with padding, so states are those behind the last token before it. With `mixed`, every
    second row that has padding ends with it, and the others begin with it.
    """
    case = example.case
    side = {"end": "right", "mixed": "mixed"}.get(example.variant or "", "left")
    pads = on_sides(case.pads(), example.variant)
    if not any(pads):
        raise Blind("no row has padding")
    inputs, cotangents = bench.call(case)
    spec, real = case.spec, no_padding(pads, case.lengths[0])
    names = present(spec, inputs, "B", "T")

    def of_tokens(name: str) -> bool:
        return axes_of(spec, name)[:2] == ["B", "T"]

    def tokens(name: str, x: Tensor) -> Tensor:
        return x[real].unsqueeze(0) if of_tokens(name) else x

    def only(name: str, x: Tensor, other: Tensor | float) -> Tensor:
        """Return x with `other` in the padding."""
        return torch.where(spread(real, x, 0), x, other) if of_tokens(name) else x

    ends = torch.tensor([0, *(case.lengths[0] - abs(pad) for pad in pads)]).cumsum(0)
    alone = inputs.replaced(**{name: tokens(name, inputs[name]) for name in names}, cu_seqlens=ends)
    part = None if cotangents is None else {name: tokens(name, x) for name, x in cotangents.items()}
    bounds = bench.bounds(alone, part)
    padded, others = inputs.replaced(pads=pads), with_others(case, bench.domain).inputs()
    turned = None if cotangents is None else {name: only(name, x, 0.0) for name, x in cotangents.items()}
    changed = padded.replaced(**{name: only(name, inputs[name], others[name]) for name in names})
    once, twice = bench.run(padded, turned), bench.run(changed, turned)
    for name, got in once.items():
        yield Pair(name, f"with {side} padding", tokens(name, got), bounds[name])
        yield Pair(name, f"with other {side} padding", tokens(name, twice[name]), tokens(name, got))


def on_sides(pads: Sequence[int], variant: str | None) -> tuple[int, ...]:
    """Return numbers of padding tokens with the signs of `pads` of a call: negative ones are at the end of their rows."""
    if variant == "mixed":
        signs = itertools.cycle((1, -1))
        return tuple(pad and next(signs) * pad for pad in pads)
    return tuple(-pad for pad in pads) if variant == "end" else tuple(pads)


def far_padding(domain: Any, cases: Callable[..., st.SearchStrategy[Any]]) -> list[Example]:
    """Return an example in bf16 whose padding ends one behind a multiple of 4 over 256, which bf16 rounds down to that multiple.

    `cases(domain, **fixed)` draws a book's cases. There is none without bf16, or if sequences are shorter.
    """
    if "bf16" not in domain.dtypes or (domain.longest or FAR_PADDED) < FAR_PADDED:
        return []
    drawn = cases(domain, packed=False, sequences=(2, 2), dtype="bf16", state="none", longest=8)
    (example,) = firm_examples(domain, examples_of(drawn)) or (None,)
    if example is None:
        return []
    padded = (dataclasses.replace(example.case, lengths=(FAR_PADDED,) * 2, seed=seed) for seed in range(2**16))
    return [Example(next(case for case in padded if any(pad > 256 and pad % 4 == 1 for pad in case.pads())))]


def memory(bench: Bench, example: Example) -> Iterator[Pair]:
    """Two runs over memory with different poison give the same bits.

    If runs of the implementation are not deterministic, each run is judged by its bounds instead.
    """
    inputs, cotangents = bench.call(example.case)
    once, twice = (bench.run(inputs, cotangents, poison=poison) for poison in (float("nan"), -3.0e4))
    if bench.domain.deterministic:
        yield from pairs_of(twice, once, "of a second run")
    else:
        bounds = bench.bounds(inputs, cotangents)
        for results in (once, twice):
            yield from pairs_of(results, bounds)


def again(bench: Bench, example: Example) -> Iterator[Pair]:
    """The same call CALLS times gives the same bits.

    An implementation may set something up in the first call, record or tune in the second, and reuse it from the third on. Memory
    holds the same poison in every call, so a difference is the implementation's own. If its runs are not deterministic, each is
    judged by its bounds instead.
    """
    inputs, cotangents = bench.call(example.case)
    runs = [bench.run(inputs, cotangents) for _ in range(CALLS)]
    if bench.domain.deterministic:
        for number, results in enumerate(runs[1:], 2):
            yield from pairs_of(results, runs[0], f"of call {number}, as of the first")
    else:
        bounds = bench.bounds(inputs, cotangents)
        for number, results in enumerate(runs, 1):
            yield from pairs_of(results, bounds, f"of call {number}")


def batch(bench: Bench, example: Example) -> Iterator[Pair]:
    """A sequence alone gives what it gives in batches.

    All calls have the form of the case, packed or not: a compiler makes a program for each form, and their bits may rightly differ.
    Gradients of parameters are sums over all sequences and are not compared.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    if case.packed and one_initial_state(bench.domain):
        inputs = inputs.replaced(state=None)  # the sequence is not the first one of every batch
    few = [*range(len(case.lengths))]

    def call(rows: list[int]) -> tuple[Inputs, Cotangents]:
        return conventional(bench.domain, *_sequences_of(case, inputs, cotangents, rows))

    batches, alone = [few, few * -(-CROWD // len(few))], call([at])
    want: Results | dict[str, Bound]
    if bench.domain.position_independent:
        want = bench.run(*alone)
    else:
        want, batches = bench.bounds(*alone), [[at], *batches]
    for rows in batches:
        last = len(rows) - 1 - rows[::-1].index(at)
        end = sum(case.lengths[row] for row in rows[: last + 1])
        for name, x in bench.run(*call(rows)).items():
            axes = axes_of(case.spec, name)
            if name == "final_state" and case.packed and one_final_state(bench.domain) and last < len(rows) - 1:
                continue
            if axes[:2] == ["B", "T"]:
                x = x.flatten(0, 1)[end - case.lengths[at] : end].unsqueeze(0)
            elif axes[0] == "N":
                x = x[last : last + 1]
            else:
                continue
            yield Pair(name, f"of sequence {at}, one of {len(rows)}", x, want[name])


def _sequences_of(case: Any, inputs: Inputs, cotangents: Cotangents, rows: list[int]) -> tuple[Inputs, Cotangents]:
    """Return the call of some of the case's sequences, in this order; a sequence may occur several times."""
    starts = case.starts()
    index = torch.tensor(rows)
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
    shape = (1, len(tokens)) if case.packed else (len(rows), case.lengths[0])

    def part(name: str, x: Tensor) -> Tensor:
        axes = axes_of(case.spec, name)
        if axes[:2] == ["B", "T"]:
            return x.flatten(0, 1)[tokens].reshape(*shape, *x.shape[2:])
        return x[index] if axes[0] == "N" else x

    selected = inputs.replaced(**{name: part(name, inputs[name]) for name in present(case.spec, inputs)})
    if inputs.cu_seqlens is not None:
        ends = torch.tensor([0, *(case.lengths[row] for row in rows)]).cumsum(0)
        selected = selected.replaced(cu_seqlens=ends.to(inputs.cu_seqlens.dtype))
    return selected, None if cotangents is None else {name: part(name, x) for name, x in cotangents.items()}


def memory_law(cases: Cases, check: Check = memory, about: tuple[str, ...] = ()) -> Law:
    """Return the law for a book whose cases `cases(domain)` draws."""
    says = "other numbers in uninitialised memory change no result, bit for bit if deterministic=True"
    return Law("memory", "exact", says, lambda domain: examples_of(cases(domain)), check, about=about)


def again_law(cases: Cases) -> Law:
    """Return the law for a book whose cases `cases(domain)` draws."""
    says = "three calls with the same inputs give the same results, bit for bit if deterministic=True"
    return Law("again", "exact", says, lambda domain: examples_of(cases(domain)), again)


def several(case: Any) -> range:
    """Return the sequences as a range if there are two or more and none is empty, otherwise an empty range."""
    return range(len(case.lengths)) if len(case.lengths) > 1 and min(case.lengths) > 0 else range(0)


def inner(case: Any) -> range:
    """Return the tokens at which a sequence can be cut in two."""
    return range(1, max(case.lengths))


def has_words(**wanted: str) -> Callable[[Any, str | None], str | None]:
    """Return a function that returns which of the wanted words a case lacks, or None."""

    def lacks(case: Any, _: str | None) -> str | None:
        words = case.words()
        return next((f"{name}={value}" for name, value in wanted.items() if words[name] != value), None)

    return lacks


def one_batch_row(case: Any, _: str | None) -> str | None:
    """Return what a case lacks to be one sequence that is not packed, or None."""
    return "one sequence, packed=no" if case.packed or len(case.lengths) > 1 else None


def two_tokens(domain: Any) -> str | None:
    """Return why no sequence of a domain can be cut in two, or None."""
    return None if domain.longest is None or domain.longest > 1 else f"longest={domain.longest}: no sequence has two tokens"


def first_of(*needs: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Return a function that returns the first reason that any of the functions returns for a domain, or None."""
    return lambda domain: next((lacking for need in needs if (lacking := need(domain))), None)


def require(**flags: bool) -> Callable[[Any], str | None]:
    """Return a function that returns which of the wanted flags a domain lacks, or None."""

    def needs(domain: Any) -> str | None:
        lacking = [name for name, value in flags.items() if getattr(domain, name) != value]
        return f"{lacking[0].replace('_', ' ')} is not supported" if lacking else None

    return needs
