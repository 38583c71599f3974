"""The laws `strides` and `pure`: tensors with other strides, and the memory around them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs
from properties.laws.common import Cases, Check, has_words
from properties.laws.far_views import FAR, far, lacks_far
from properties.laws.law import (
    Bench,
    Law,
    Pair,
    axes_of,
    conventional,
    examples_of,
    firm_examples,
    pairs_of,
    present,
)
from properties.words.domain import INDICES, KINDS, MIXED, takes_view
from properties.words.example import Example

ALIGNED = 128  # elements: 256 bytes or more, a multiple of every alignment that a kernel may need
# Tensors [B, T, ...] whose axes lie in another order in memory, by the two axes that change places: as transpose(1, 2) gives them
# of [B, H, T, D], and transpose(0, 1) of [T, B, ...].
ORDERS = {"heads_first": (1, 2), "tokens_first": (0, 1)}
# Inputs [B, T, ..., C] whose channels repeat the first one with a stride of 0, as a head's decay is handed to KDA. Not q and k: a
# row of equal numbers could have a norm over 1.
ONE_CHANNEL = "one_channel"
ARRANGED = (*ORDERS, ONE_CHANNEL)


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
    if how in ORDERS:
        spec, margin = example.case.spec, example.case.seed % 2
        return {name: ordered(x, how, margin) if _can_order(axes_of(spec, name), how) else x for name, x in tensors.items()}
    if how == ONE_CHANNEL:
        ports = {port.name for port in example.case.spec.inputs if port.axes.split()[:2] == ["B", "T"]} - {"q", "k"}
        alike = {name for name in ports & tensors.keys() if tensors[name].ndim > 2}
        return {name: x[..., :1].expand_as(x) if name in alike else x for name, x in tensors.items()}
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
    orders = tuple(how for how in ARRANGED if takes_near(domain, how))
    return choices + _of_several(domain, cases, packed=packed) + ([_in_order(domain, cases(), orders)] if orders else [])


def _of_several(domain: Any, cases: Callable[..., st.SearchStrategy[Any]], *, packed: bool) -> list[st.SearchStrategy[Example]]:
    """Return a strategy for each view that differs from tensor to tensor."""
    several = [examples_of(cases(), None, (MIXED,))] if takes_view(domain, MIXED) else []
    return several + ([examples_of(cases(packed=True), None, (INDICES,))] if packed and takes_view(domain, INDICES) else [])


def _in_order(domain: Any, cases: st.SearchStrategy[Any], orders: tuple[str, ...]) -> st.SearchStrategy[Example]:
    """Return examples of the domain whose tensors lie in one of these orders."""
    fits = functools.cache(lambda case: domain.outside(case) is None)
    return examples_of(cases, None, orders).filter(lambda one: lacks_view(one.case, one.variant) is None and fits(one.case))


def _firm_orders(domain: Any, ordinary: Callable[..., st.SearchStrategy[Any]]) -> list[st.SearchStrategy[Example]]:
    """Return strategies for each order of tensors, dense and with margins, and for single tokens and single heads.

    An axis of one index may have any stride, and torch calls the tensor contiguous. A batch of tokens that comes from tokens first,
    and a head that comes from heads first, have another one there than an allocator gives.
    """

    def cases(margin: int, **least: int) -> st.SearchStrategy[Any]:
        drawn = ordinary().filter(lambda case: max(case.lengths) > 1 and all(getattr(case, n) >= k for n, k in least.items()))
        return drawn.map(lambda case: dataclasses.replace(case, seed=case.seed // 2 * 2 + margin))

    def single(case: Any) -> Any:
        return dataclasses.replace(case, lengths=(1, 1), packed=False)

    def one_head(case: Any) -> Any:
        return dataclasses.replace(case, **dict.fromkeys({"heads", "value_heads"} & {*case.WORDS}, 1))

    found = [_in_order(domain, cases(margin), ("tokens_first",)) for margin in (0, 1)]
    found.append(_in_order(domain, cases(0).map(single), ("tokens_first",)))
    if hasattr(domain.CASE, "heads"):
        found += [_in_order(domain, cases(margin, heads=2), ("heads_first",)) for margin in (0, 1)]
        found.append(_in_order(domain, cases(0).map(one_head), ("heads_first",)))
    return found


def firm_views(domain: Any, cases: Callable[..., st.SearchStrategy[Any]], *, packed: bool) -> list[Example]:
    """Return an example of each view of several tensors, whose values are ordinary, for every seed. `packed` as for near_views."""
    ordinary = functools.partial(cases, values="ordinary")
    firm = _of_several(domain, ordinary, packed=packed) if domain.views else []
    firm += _firm_orders(domain, ordinary) if takes_near(domain, "tokens_first") else []
    if takes_near(domain, ONE_CHANNEL):
        firm.append(examples_of(ordinary().filter(lambda case: case.tokens > 1), None, (ONE_CHANNEL,)))
    if takes_view(domain, "sliced"):  # parts of one tensor may be taken as that tensor where they need no gradients of their own
        both = (ordinary(), *([ordinary(backward=False)] if domain.backward else []))
        firm += [examples_of(drawn.map(side_by_side), None, ("sliced",)) for drawn in both]
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


def takes_near(domain: Any, how: str) -> bool:
    """Whether inputs may be views of a kind that are not far; another order of the axes needs strides of any kind."""
    return takes_view(domain, "strided" if how in ORDERS else "expanded" if how == ONE_CHANNEL else how)


def outside_views(domain: Any, example: Example) -> str | None:
    """Return why a domain does not take the views of an example, or None."""
    how = example.variant or ""
    if (takes_far if how in FAR else takes_near)(domain, how):
        return None
    return f"{how} inputs are not among {', '.join(domain.views) if isinstance(domain.views, tuple) else 'those of views=True'}"


def lacks_view(case: Any, variant: str | None) -> str | None:
    """Return what a case lacks to have the views of a variant, or None."""
    if variant in ORDERS:
        able = any(_can_order(port.axes.split(), variant) for port in case.spec.inputs)
        return None if able else "an operation that has tensors with tokens and heads"
    return lacks_far(case, variant) if variant != INDICES else has_words(packed="yes")(case, variant)


def _can_order(axes: list[str], how: str) -> bool:
    """Whether a tensor with these axes has those that change places."""
    return axes[:2] == ["B", "T"] and (how == "tokens_first" or axes[2:3] in (["H"], ["HV"]))


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


def ordered(x: Tensor, how: str, margin: int) -> Tensor:
    """Return x in another order of axes in memory (ORDERS), with `margin` indices of NaN before and behind the inner axis.

    For heads first these are tokens, as in a buffer with room for more of them; for tokens first they are rows of the batch.
    """
    outer, inner = ORDERS[how]
    turned = x.transpose(outer, inner)
    shape = list(turned.shape)
    shape[inner] += 2 * margin
    wide = x.new_full(shape, float("nan"))
    return wide.narrow(inner, margin, turned.shape[inner]).copy_(turned).transpose(outer, inner)


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


def pure_law(
    cases: Cases,
    check: Check = pure,
    says: str = "a call changes neither its inputs nor the memory around them",
    about: tuple[str, ...] = (),
    always: Callable[[Any], Sequence[Example]] = lambda domain: (),
) -> Law:
    """Return the law for a book whose cases `cases(domain)` draws; `always(domain)` are those that come with every seed."""
    return Law("pure", "exact", says, lambda domain: examples_of(cases(domain)), check, about=about, always=always)


def bytes_of(x: Tensor) -> Tensor:
    """Return the whole allocation behind x, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
