"""Laws that several books share: those of rules, of the other operations of a layer, and of whole layers."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.laws.far_views import FAR, far, lacks_far
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
from properties.words.domain import INDICES, KINDS, MIXED, takes_view
from properties.words.example import Example
from properties.words.options import text_of_values, values_of

Cases = Callable[..., st.SearchStrategy[Any]]
Check = Callable[[Any, Example], Iterator[Pair]]
FAR_PADDED = 262  # tokens of a row whose padding ends behind token 256
ALIGNED = 128  # elements: 256 bytes or more, a multiple of every alignment that a kernel may need


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
    """The truth is that of the packed tokens without padding; other numbers in the padding must change no bit."""
    case = example.case
    pads = case.pads()
    if not any(pads):
        raise Blind("no row has padding")
    inputs, cotangents = bench.call(case)
    spec, real = case.spec, torch.arange(case.lengths[0]) >= torch.tensor(pads).unsqueeze(-1)
    names = present(spec, inputs, "B", "T")

    def of_tokens(name: str) -> bool:
        return axes_of(spec, name)[:2] == ["B", "T"]

    def tokens(name: str, x: Tensor) -> Tensor:
        return x[real].unsqueeze(0) if of_tokens(name) else x

    def only(name: str, x: Tensor, other: Tensor | float) -> Tensor:
        """Return x with `other` in the padding."""
        return torch.where(spread(real, x, 0), x, other) if of_tokens(name) else x

    ends = torch.tensor([0, *(case.lengths[0] - pad for pad in pads)]).cumsum(0)
    alone = inputs.replaced(**{name: tokens(name, inputs[name]) for name in names}, cu_seqlens=ends)
    part = None if cotangents is None else {name: tokens(name, x) for name, x in cotangents.items()}
    bounds = bench.bounds(alone, part)
    padded, others = inputs.replaced(pads=pads), with_others(case, bench.domain).inputs()
    turned = None if cotangents is None else {name: only(name, x, 0.0) for name, x in cotangents.items()}
    changed = padded.replaced(**{name: only(name, inputs[name], others[name]) for name in names})
    once, twice = bench.run(padded, turned), bench.run(changed, turned)
    for name, got in once.items():
        yield Pair(name, "with left padding", tokens(name, got), bounds[name])
        yield Pair(name, "with other left padding", tokens(name, twice[name]), tokens(name, got))


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


def strides(bench: Bench, example: Example) -> Iterator[Pair]:
    """Inputs and cotangents in other strides, judged by bounds.

    Not bit for bit: an implementation may copy strided inputs first or compute on them in place.
    """
    inputs, cotangents = bench.call(example.case)
    spec, how = example.case.spec, example.variant or ""
    tensors = {name: inputs[name] for name in present(spec, inputs)}
    views = views_of(bench.domain, example, tensors | (cotangents or {}))
    turned = cotangents and {name: views.pop(name) for name in cotangents}
    inputs = spaced(inputs, how).replaced(**views)
    if how == "expanded":  # the numbers of the one state that a packed call may have are then in the places of the others too
        inputs, turned = conventional(bench.domain, inputs, turned)
    bounds = bench.bounds(inputs, turned)
    yield from pairs_of(bench.run(inputs, turned), bounds, f"from {how.replace('_', ' ')} inputs")


def views_of(domain: Any, example: Example, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the strides of the variant. `mixed` gives neighbours different kinds, and the seed decides which."""
    how = example.variant or ""
    if how in FAR:
        return far(domain, example.case.spec, tensors, how)
    kinds: tuple[str, ...] = ("aligned",) if how == INDICES else (how,)
    if how == MIXED:
        known = domain.views if isinstance(domain.views, tuple) else KINDS
        kinds = tuple(kind for kind in known if kind not in ("expanded", MIXED, INDICES))
        kinds = kinds if len(kinds) > 1 else (*kinds, "aligned")
    views = {name: view(x, kinds[(example.case.seed + place) % len(kinds)]) for place, (name, x) in enumerate(tensors.items())}
    if how == "fused" or (how == "sliced" and example.case.seed % 4 == 1):
        spec, groups = example.case.spec, dict[torch.dtype, dict[str, Tensor]]()
        for port in spec.inputs:
            if port.name in tensors and (axes := port.axes.split())[:2] == ["B", "T"] and len(axes) == 4:
                groups.setdefault(tensors[port.name].dtype, {})[port.name] = tensors[port.name]
        for several in groups.values():
            views |= beside(several, example.case.seed // 4)
    return views


def beside(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return tensors [B, T, ...] of one dtype as sections of one tensor [B, T, W], in an order that the seed decides.

    Half of the time, NaN is before the first section of a token and behind the last one.
    """
    orders = [*itertools.permutations(tensors)]
    order, margin = orders[seed % len(orders)], seed // len(orders) % 2
    widths = [margin, *(math.prod(tensors[name].shape[2:]) for name in order), margin]
    first = tensors[order[0]]
    sections = first.new_full((*first.shape[:2], sum(widths)), float("nan")).split(widths, -1)[1:-1]
    for name, section in zip(order, sections, strict=True):
        section.copy_(tensors[name].flatten(2))
    return {name: _as_tokens(section, tensors[name]) for name, section in zip(order, sections, strict=True)}


def _as_tokens(section: Tensor, x: Tensor) -> Tensor:
    """Return x's numbers, which each token of a section [B, T, W] holds one after the other, in x's shape."""
    # A view would give a batch of single tokens another stride of tokens.
    return section.as_strided(x.shape, (*section.stride()[:2], *x.contiguous().stride()[2:]), section.storage_offset())


def spaced(inputs: Inputs, how: str) -> Inputs:
    """Return the call with every second element of wider index tensors, if the variant is `indices`.

    The elements between repeat those before them. What takes such a tensor for contiguous then gets wrong indices that are legal.
    """
    if how != INDICES:
        return inputs
    wide = {name: x.repeat_interleave(2, -1) for name, x in inputs.items() if isinstance(x, Tensor) and not x.is_floating_point()}
    return inputs.replaced(**{name: x[..., ::2] for name, x in wide.items()})


def near_views(domain: Any, cases: Callable[..., st.SearchStrategy[Any]], *, packed: bool) -> list[st.SearchStrategy[Example]]:
    """Return strategies for the views of a domain that are not far: three for the kinds of one tensor, and one for each other view.

    `packed` says whether there are packed cases, which alone have offsets.
    """
    kinds = tuple(how for how in KINDS if takes_view(domain, how))
    choices = [examples_of(cases(), None, kinds)] * 3 if kinds else []
    choices += [examples_of(cases(), None, (MIXED,))] if takes_view(domain, MIXED) else []
    return choices + ([examples_of(cases(packed=True), None, (INDICES,))] if packed and takes_view(domain, INDICES) else [])


def firm_views(domain: Any, cases: Callable[..., st.SearchStrategy[Any]], *, packed: bool) -> list[Example]:
    """Return an example of each view of several tensors, whose values are ordinary, for every seed. `packed` as for near_views."""
    ordinary = functools.partial(cases, values="ordinary")
    near = near_views(domain, ordinary, packed=packed) if domain.views else []
    firm = near[3 if any(takes_view(domain, how) for how in KINDS) else 0 :]
    firm += [examples_of(ordinary().map(side_by_side), None, ("sliced",))] if takes_view(domain, "sliced") else []
    return firm_examples(domain, *firm)


def side_by_side(case: Any) -> Any:
    """Return the case with a seed of which `views_of` puts q, v and k side by side, in this unusual order, without a margin."""
    return dataclasses.replace(case, seed=case.seed // 48 * 48 + 5)  # 48 is 4 * 6 orders * 2, and 5 is 4 * the second order + 1


def without_views(domain: Any) -> str | None:
    """Return why the law `strides` does not apply to a domain, or None."""
    return None if domain.views else "views is not supported"


def takes_far(domain: Any, how: str) -> bool:
    """Whether inputs may be far along an axis: heads, which are the last axis of g and beta, need strides of any kind."""
    return takes_view(domain, "strided" if how == "far_heads" else "sliced")


def outside_views(domain: Any, example: Example) -> str | None:
    """Return why a domain does not take the views of an example, or None."""
    how = example.variant or ""
    if (takes_far if how in FAR else takes_view)(domain, how):
        return None
    return f"{how} inputs are not among {', '.join(domain.views) if isinstance(domain.views, tuple) else 'those of views=True'}"


def lacks_view(case: Any, variant: str | None) -> str | None:
    """Return what a case lacks to have the views of a variant, or None."""
    return lacks_far(case, variant) if variant != INDICES else has_words(packed="yes")(case, variant)


def view(x: Tensor, how: str) -> Tensor:
    """Return x in other strides, with NaN around it in memory; `expanded` repeats its first head (or token) with stride 0.

    `fused` is for x [B, T, ...]: each token's numbers lie together, as a part of one wide tensor of tokens (see `beside`). An
    `aligned` tensor begins ALIGNED elements after its allocation, as one does that an allocator made.
    """
    if how == "fused":
        wide = x.new_full((*x.shape[:2], math.prod(x.shape[2:]) + 8), float("nan"))
        inner = wide[:, :, 2:-6]
        return _as_tokens(inner.copy_(x.flatten(2)), x)
    if how == "transposed":
        return banded(x.transpose(-1, -2), 1).transpose(-1, -2) if x.ndim > 1 else x
    if how == "expanded":
        axis = min(2 if x.ndim < 4 or x.shape[1] == 1 else 1, x.ndim - 1)
        axis = 0 if x.shape[axis] == 1 else axis
        return x.narrow(axis, 0, 1).expand_as(x) if x.numel() else x
    if how == "strided":  # every second element
        wide = x.new_full((*x.shape[:-1], x.shape[-1] * 2), float("nan"))
        wide[..., ::2] = x
        return wide[..., ::2]
    if how in ("offset", "aligned"):  # dense, but not at the start of its allocation
        start = 3 if how == "offset" else ALIGNED
        flat = x.new_full((x.numel() + start,), float("nan"))
        flat[start:] = x.flatten()
        return flat[start:].view(x.shape)
    return banded(x, 2)


def banded(x: Tensor, width: int) -> Tensor:
    """Return x as a slice of a larger tensor whose margins, `width` on each side of every axis, are NaN."""
    wide = x.new_full([size + 2 * width for size in x.shape], float("nan"))
    inner = wide[tuple(slice(width, width + size) for size in x.shape)]
    return inner.copy_(x)


def pure(bench: Bench, example: Example) -> Iterator[Pair]:
    """Inputs are compared bit for bit after a call, with the memory around them, which is NaN and must stay NaN."""
    inputs, cotangents = bench.call(example.case)
    # On a GPU, odd addresses need kernels of their own, which take as long to compile as all others. The law `strides` has some.
    how = "offset" if takes_view(bench.domain, "offset") and bench.device == "cpu" else "aligned"
    views = {name: view(inputs[name], how) for name in present(example.case.spec, inputs)}
    turned = None if cotangents is None else {name: view(x, how) for name, x in cotangents.items()}
    memory = {f"input {name}": x for name, x in views.items()}
    memory |= {f"cotangent of {name}": x for name, x in (turned or {}).items()}
    if inputs.cu_seqlens is not None:
        memory["input cu_seqlens"] = inputs.cu_seqlens
    copies = {name: bytes_of(x).clone() for name, x in memory.items()}
    bench.run(inputs.replaced(**views), turned)
    for name, x in memory.items():
        yield Pair("bytes", f"of {name}", bytes_of(x), copies[name])


def memory_law(cases: Cases, check: Check = memory, about: tuple[str, ...] = ()) -> Law:
    """Return the law for a book whose cases `cases(domain)` draws."""
    says = "other numbers in uninitialised memory change no result, bit for bit if deterministic=True"
    return Law("memory", "exact", says, lambda domain: examples_of(cases(domain)), check, about=about)


def again_law(cases: Cases) -> Law:
    """Return the law for a book whose cases `cases(domain)` draws."""
    says = "three calls with the same inputs give the same results, bit for bit if deterministic=True"
    return Law("again", "exact", says, lambda domain: examples_of(cases(domain)), again)


def pure_law(
    cases: Cases,
    check: Check = pure,
    says: str = "a call changes neither its inputs nor the memory around them",
    about: tuple[str, ...] = (),
) -> Law:
    """Return the law for a book whose cases `cases(domain)` draws."""
    return Law("pure", "exact", says, lambda domain: examples_of(cases(domain)), check, about=about)


def bytes_of(x: Tensor) -> Tensor:
    """Return the whole allocation behind x, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


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
