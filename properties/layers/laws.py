"""What layers on one rank promise, the cases drawn inside that, and the laws of a layer as training and serving call it."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import Inputs
from properties.laws import common as common_laws
from properties.laws import in_parts, views
from properties.laws.far_views import FAR, far_examples
from properties.laws.history import history_law
from properties.laws.law import (
    Bench,
    Blind,
    Law,
    Pair,
    bounds_as,
    either,
    examples_of,
    firm_examples,
    in_two_parts,
    pairs_of,
    visible,
    with_others,
)
from properties.laws.promises import to_the_bit
from properties.laws.recompute import recompute_law
from properties.layers.case import LayerCase
from properties.layers.domain import LayerDomain, layer_cases, limits
from properties.words.domain import VIEWS
from properties.words.example import Example

GOING_ON = ("steps", "piece")


def _future(bench: Bench, example: Example) -> Iterator[Pair]:
    """Convolution, rule and norm of a token depend on no later token."""
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    place = torch.cat([torch.arange(length) for length in case.lengths]).reshape(inputs.hidden.shape[:2])
    later = torch.where((place >= at).unsqueeze(-1), with_others(case).inputs().hidden, inputs.hidden)
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(hidden=later), cotangents)
    yield Pair("y", f"before token {at}", twice["y"][place < at], once["y"][place < at])


def _cache(bench: Bench, example: Example) -> Iterator[Pair]:
    """The tokens after the prompt come one at a time, through the layer's recurrent counterpart if it has one, or in one piece.

    Blind if losing the states after the prompt would stay within the tolerance.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, _ = bench.call(case)
    bounds = bounds_as(bench, inputs, None, "recurrent") if example.variant == "steps" else bench.bounds(inputs, None)
    tail = {"y": bounds["y"].at(slice(None), slice(at, None)), "final_state": bounds["final_state"]}
    lost = bench.truth(_part(inputs, at, None, None), None)
    if not visible({name: lost[name] for name in tail}, tail):
        raise Blind("states lost after the prompt would not show")
    got = bench.run(inputs.replaced(hidden=inputs.hidden[:, :at]), None)
    if example.variant != "steps":
        bounds = in_two_parts(bench, bounds, inputs, None, at, len(case.lengths))
    rows, ends = [got["y"]], [at, *(range(at + 1, case.lengths[0]) if example.variant == "steps" else ()), case.lengths[0]]
    for start, stop in itertools.pairwise(ends):
        part = _part(inputs, start, stop, got)
        got = bench.run(part, None, counterpart=example.variant == "steps")
        rows.append(got["y"])
    whole = {"y": torch.cat(rows, 1), **{name: got[name] for name in ("final_state", "conv_state")}}
    yield from pairs_of(whole, bounds, f"going on after {at} tokens")
    promise = "decode_equals_prefill" if example.variant == "steps" else "split_invariant"
    yield from to_the_bit(bench, promise, f"going on after {at} tokens, bits", whole, lambda: bench.run(inputs, None))


def _part(inputs: Inputs, start: int, stop: int | None, after: dict[str, Tensor] | None) -> Inputs:
    """Return the call of tokens start..stop with the states that the previous call returned."""
    states = (
        {"state": None, "conv_state": None} if after is None else {"state": after["final_state"], "conv_state": after["conv_state"]}
    )
    return inputs.replaced(hidden=inputs.hidden[:, start:stop], **states)


def _strides(bench: Bench, example: Example) -> Iterator[Pair]:
    inputs, cotangents = bench.call(example.case)
    how, tensors = example.variant or "", {"hidden": inputs.hidden, **({} if cotangents is None else {"y": cotangents["y"]})}
    viewed = views.views_of(bench.domain, example, tensors)
    inputs = views.spaced(inputs, how).replaced(hidden=viewed.pop("hidden"))
    turned = None if cotangents is None else {**cotangents, **viewed}
    bounds = bench.bounds(inputs, turned)
    yield from pairs_of(bench.run(inputs, turned), bounds, f"from {how.replace('_', ' ')} hidden states")


def _strided(domain: LayerDomain) -> st.SearchStrategy[Example]:
    near = views.near_views(domain, functools.partial(layer_cases, domain, sequences=(1, 2), longest=40), packed=domain.packed)
    if not views.takes_far(domain, "far_tokens"):
        return either(near)
    far_ones = far_examples(domain, {"far_tokens": layer_cases(domain, sequences=(1, 2), longest=12)})
    return either(near + [far_ones] * (1 + (len(near) > 3)))


def _promises(name: str) -> Callable[[LayerDomain], str | None]:
    def needs(domain: LayerDomain) -> str | None:
        return None if getattr(domain, name) else f"{name.replace('_', ' ')} is not supported"

    return needs


def _prompts(case: LayerCase) -> range:
    """Return the lengths that a prompt may have."""
    return range(1, case.lengths[0]) if not case.packed and case.cached and not case.backward else range(0)


@st.composite
def _cache_examples(draw: st.DrawFn, domain: LayerDomain) -> Example:
    """Draw short cases for both variants, because a convolution's state is not full at first, and long cases only for one piece.

    Long cases have more than one chunk. No case has options, which the recurrent counterpart may lack.
    """
    domain = common_laws.plain(domain)
    serving: dict[str, Any] = {"packed": False, "cached": True, "backward": False, "gate": "long"}
    short, long = layer_cases(domain, longest=12, total=24, **serving), layer_cases(domain, sequences=(1, 1), longest=90, **serving)
    chance: random.Random = draw(st.randoms(use_true_random=True))
    brief = chance.random() < 2 / 3
    case = draw((short if brief else long).filter(lambda case: len(_prompts(case)) > 0))
    early = [at for at in _prompts(case) if at < case.conv_width]
    at = chance.choice(early if brief and chance.random() < 1 / 2 and early else _prompts(case))
    return Example(case, at, chance.choice(GOING_ON) if brief else "piece")


def _padded_lacks(case: LayerCase, _: str | None) -> str | None:
    return "packed=no" if case.packed else None


def _beside_states(domain: LayerDomain, example: Example) -> str | None:
    """Return why a domain does not have padding in an example, or None: few layers take it beside states, or behind tokens."""
    if example.variant is not None and not domain.right_padding:
        return "padding at the end of rows"
    return "padding beside an initial state" if example.case.state != "none" and not domain.padded_states else None


def _padded(domain: LayerDomain) -> st.SearchStrategy[Example]:
    states: dict[str, Any] = {} if domain.padded_states else {"state": "none"}
    cases = layer_cases(domain, packed=False, longest=33, total=80, **states).filter(lambda case: any(case.pads()))
    return either([examples_of(cases)] + [examples_of(cases, None, ("end", "mixed"))] * domain.right_padding)


def _padded_ends(domain: LayerDomain) -> list[Example]:
    """Return examples of padding at the end of rows, and of some rows, with final states, if the domain has both."""
    if not domain.right_padding:
        return []

    def padded(rows: int, variant: str) -> st.SearchStrategy[Example]:
        """Examples with more than one row, all but one of which have padding."""
        drawn = layer_cases(domain, packed=False, sequences=(rows, 3), longest=12, state="none", cached=domain.caches)
        return examples_of(drawn.filter(lambda case: sum(map(bool, case.pads())) >= rows - 1), None, (variant,))

    return firm_examples(domain, padded(2, "end"), padded(3, "mixed"))


def _calm(domain: LayerDomain) -> st.SearchStrategy[LayerCase]:
    """Return short cases whose derivatives are well above rounding."""
    words: dict[str, Any] = {"values": "ordinary", "gate": "long", "state": "random", "conv_bias": True}
    words["groups"] = ((2, 2), (2, 4), (1, 2)) if domain.grouped_heads else ((2, 2), (3, 3))
    return layer_cases(domain, longest=12, total=16, sequences=(1, 2), **words)


def _calm_lacks(case: LayerCase, _: str | None) -> str | None:
    return "no fp16" if case.dtype == "fp16" else common_laws.has_words(values="ordinary", gate="long")(case, None)


LAYER_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "oracle",
            "truth",
            "the output, the states and every gradient, those of parameters included, equal the float64 definition",
            lambda domain: examples_of(layer_cases(domain)),
            common_laws.oracle,
            always=lambda domain: [Example(case) for case in limits(domain)],
            base=True,
        ),
        Law(
            "packed",
            "truth",
            "packed sequences give what each gives alone, through convolution and rule",
            lambda domain: examples_of(
                layer_cases(domain, packed=True, sequences=(2, 3), longest=40, gate="long"), common_laws.several
            ),
            in_parts.packed,
            common_laws.first_of(_promises("packed"), _promises("batched")),
            place=common_laws.several,
            lacks=common_laws.has_words(packed="yes"),
        ),
        Law(
            "samples",
            "exact",
            "changing one sequence changes nothing of the others, bit for bit",
            lambda domain: examples_of(layer_cases(domain, sequences=(2, 3), longest=40), common_laws.several),
            common_laws.samples,
            place=common_laws.several,
        ),
        Law(
            "future",
            "exact",
            "later tokens change no earlier output, neither through convolution nor rule nor norm, bit for bit",
            lambda domain: examples_of(layer_cases(domain), common_laws.inner),
            _future,
            place=common_laws.inner,
        ),
        Law(
            "left_padding",
            "truth",
            "padding at the start of rows, and at the end if right_padding=True, that the mask leaves out changes nothing",
            _padded,
            common_laws.left_padding,
            common_laws.first_of(_promises("attention_mask"), _promises("batched")),
            variants=("end", "mixed"),
            plain=True,
            lacks=_padded_lacks,
            outside=_beside_states,
            always=lambda domain: [*common_laws.far_padding(domain, layer_cases), *_padded_ends(domain)],
        ),
        Law(
            "cache",
            "truth",
            "a prompt in one call, then the other tokens one at a time or in one call, give what one call for all tokens gives",
            _cache_examples,
            _cache,
            common_laws.first_of(_promises("caches"), _promises("batched")),
            variants=GOING_ON,
            place=_prompts,
            within=common_laws.plain,
            counterpart=True,
        ),
        common_laws.memory_law(layer_cases),
        history_law(functools.partial(layer_cases, longest=20)),
        recompute_law(_calm, _calm_lacks),
        Law(
            "strides",
            "truth",
            "hidden states and their cotangents may have any strides",
            _strided,
            _strides,
            views.without_views,
            variants=(*VIEWS, *views.ARRANGED, *FAR),
            lacks=views.lacks_view,
            outside=views.outside_views,
        ),
        views.pure_law(
            functools.partial(layer_cases, longest=40),
            says="a call changes neither hidden states, parameters nor states, nor the memory around them",
        ),
    )
}
