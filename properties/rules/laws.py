"""The laws of rules: gated delta rule, delta rule and KDA. What they compare is in checks.py and in properties/laws/."""

import functools
from typing import Any

from hypothesis import strategies as st

from properties.laws.common import (
    FACTORS,
    again_law,
    batch,
    future,
    has_words,
    inner,
    memory_law,
    one_batch_row,
    oracle,
    plain,
    require,
    samples,
    several,
    two_tokens,
)
from properties.laws.far_views import FAR, can_be_far, far_examples
from properties.laws.history import history_law
from properties.laws.in_parts import cut, cuts, outside_of_cut, packed, recurrent, steps
from properties.laws.law import (
    Law,
    either,
    examples_of,
    firm_examples,
    one_final_state,
    one_initial_state,
)
from properties.laws.recompute import recompute_law
from properties.laws.views import (
    ARRANGED,
    firm_views,
    lacks_view,
    near_views,
    outside_views,
    pure_law,
    strides,
    takes_far,
    without_views,
)
from properties.rules import checks as rule_checks
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import REMEMBERING, cases, crowd, exact_limits, keys_of, limits, values_of
from properties.words.domain import VIEWS
from properties.words.example import Example
from properties.words.lengths import over_one
from properties.words.sizes import FEW_TILES, TILES, coarsest, with_drawing


def _value_heads(case: Case) -> range:
    return range(case.value_heads) if case.value_heads > 1 else range(0)


def _absent_lacks(case: Case, variant: str | None) -> str | None:
    if variant == "offsets":
        return one_batch_row(case, variant)
    if variant == "dt_bias" and not (case.gate_inside and not case.dt_bias):
        return "in_kernel=gate|both dt_bias=no"
    if variant in ("gate", "beta") and case.left_out not in (variant, "both"):
        return f"left_out={variant}|both"
    if variant == "options":
        return None if case.options != "none" else "options=..."
    wanted = {"scale": {"scale": "default"}, "state": {"state": "none"}}.get(variant or "", {})
    return has_words(**wanted)(case, variant)


def _linear_lacks(case: Case, variant: str | None) -> str | None:
    if variant != "sum":
        if case.dtype == "fp16" or case.gate not in REMEMBERING or case.values in ("small", "scaled", "zero_rows"):
            return "numbers away from underflow (no fp16, gate=" + "|".join(REMEMBERING) + ", ordinary values)"
        if _vanishes(case):
            return "numbers away from underflow (gate=forever in the kernel has gradients of 1e-35 and less)"
        if variant != "values" and not case.backward:
            return "backward=yes"
    return None


def _vanishes(case: Case) -> bool:
    """Whether gradients have a factor of exp(A_log) that is nearly zero."""
    return case.gate_inside and case.gate == "forever"


def _recall_lacks(case: Case, _: str | None) -> str | None:
    if case.values != "one_hot":
        return "values=one_hot"
    exact = case.scale != "default" or case.key_dim in (1, 4, 16, 64, 256, 1024)
    return None if exact else "a scale that is a power of two: scale=one"


def _near(domain: Domain) -> Domain:
    """Return the domain with lengths for interpreted kernels, because single tokens are slow on a GPU too."""
    return with_drawing(domain, reach=1)


def _remember(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    options: dict[str, Any] = {"gate": REMEMBERING, "beta": ("ordinary", "edges"), **more}
    options.setdefault("values", ("ordinary", "correlated", "zero_rows", "scaled"))
    return cases(domain, **options)


def _leaves_out(words: tuple[str, ...], case: Case) -> bool:
    return case.left_out in words


def _carries(domain: Domain) -> str | None:
    """Return what a domain lacks to carry a state from one call to the next, or None."""
    if domain.final_states == "none":
        return "final states are not supported"
    return two_tokens(domain) or require(initial_state=True)(domain)


def _absent_choices(domain: Domain) -> list[st.SearchStrategy[Example]]:
    """Return strategies for calls that leave something out, one for each thing that may be left out."""
    small: dict[str, Any] = {"longest": 80, "total": 160, "value_heads": 2}
    choices = []
    if domain.final_states != "none":
        choices.append(examples_of(cases(domain, **small), None, ("final_state",)))
    if domain.backward:
        choices.append(examples_of(cases(domain, **small), None, ("gradients",)))
    if "default" in domain.drawn_scales and len(domain.drawn_scales) > 1:
        choices.append(examples_of(cases(domain, scale="default", **small), None, ("scale",)))
    if domain.initial_state:
        choices.append(examples_of(cases(domain, state="none", **small), None, ("state",)))
    if domain.packed and domain.batched:
        choices.append(examples_of(cases(domain, packed=False, sequences=(1, 1), **small), None, ("offsets",)))
    inside = tuple(name for name in domain.in_kernel if name in ("gate", "both"))
    if inside and domain.dt_bias:
        choices.append(examples_of(cases(domain, in_kernel=inside, dt_bias=False, **small), None, ("dt_bias",)))
    for name in ("gate", "beta"):
        if left_out := tuple(word for word in domain.left_out if word in (name, "both")):
            drawn = cases(domain, left_out=left_out, in_kernel="none", gate=("forever",), beta="one", **small)
            choices.append(examples_of(drawn.filter(functools.partial(_leaves_out, left_out)), None, (name,)))
    if domain.options:
        choices.append(examples_of(cases(domain, **small).filter(lambda case: case.options != "none"), None, ("options",)))
    return choices


def _unasked(domain: Domain, sequences: int) -> list[st.SearchStrategy[Example]]:
    """Return a strategy for short sequences that have no initial states and whose final ones nobody asks for, if that may be."""
    if domain.final_states == "none":
        return []
    crowd: dict[str, Any] = {"packed": domain.packed, "sequences": (sequences, sequences), "longest": 3 * domain.length_step}
    return [examples_of(cases(domain, state="none", groups=((2, 2),), backward=False, **crowd), None, ("final_state",))]


def _leaves_nothing_out(domain: Domain) -> str | None:
    """Return why the law `absent` has nothing to compare in a domain, or None."""
    return None if _absent_choices(domain) else "no argument may be left out"


_SHORT: dict[str, Any] = {"longest": 130, "total": 130, "value_heads": 2}


def _linear_examples(domain: Domain) -> st.SearchStrategy[Example]:
    exact = tuple(dtype for dtype in domain.dtypes if dtype != "fp16")
    choices = [examples_of(_remember(domain, **_SHORT), None, ("sum",))]
    if exact:  # subnormals of fp16, below 6e-5, do round under a factor of two
        variants = ("values", *FACTORS) if domain.backward else ("values",)
        choices.append(_exactly_linear(domain, variants, dtype=exact))
    return either(choices)


def _exactly_linear(domain: Domain, variants: tuple[str, ...], **more: Any) -> st.SearchStrategy[Example]:
    calm: dict[str, Any] = {"gate": REMEMBERING, "values": ("ordinary", "correlated", "repeated"), **_SHORT, **more}
    normal = cases(domain, **calm).filter(lambda case: not _vanishes(case))
    # Long cases may lack a backward pass, which the variants of cotangents need.
    return examples_of(normal, None, variants).filter(lambda x: _linear_lacks(x.case, x.variant) is None)


def _firm_linear(domain: Domain) -> list[Example]:
    """Return an example of small cotangents in the dtype of the fewest bits, of which an implementation may take special care."""
    exact = [dtype for dtype in domain.dtypes if dtype != "fp16"]
    if not exact or not domain.backward:
        return []
    return firm_examples(domain, _exactly_linear(domain, ("small_cotangents",), dtype=coarsest(exact)))


def _small(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    options: dict[str, Any] = {"longest": 130, "total": 180, "value_heads": 4, "sequences": (1, 3), **more}
    return cases(domain, **options)


def _backward_of_a_crowd(domain: Domain) -> list[Example]:
    """Return the case whose backward has over 65,535 sequences and heads, where kernels are interpreted."""
    case = None if domain.drawing.quick else crowd(domain)
    return [Example(case)] if case is not None and case.backward else []


def _strided(domain: Domain) -> st.SearchStrategy[Example]:
    """Return cases in every view, some with tokens, heads or sequences far apart if the domain allows enough tokens."""
    near = near_views(domain, functools.partial(_small, domain, sequences=(1, 2)), packed=domain.packed)
    far_views = [how for how in FAR if takes_far(domain, how)]
    if not can_be_far(domain) or not far_views:
        return either(near)
    groups = ((5, 5), (8, 8), (5, 10)) if domain.grouped_heads else ((5, 5), (8, 8))
    drawn = {
        "far_tokens": cases(domain, longest=12, total=12, value_heads=2, sequences=(1, 2)),
        "far_heads": cases(domain, longest=3, total=12, sequences=(1, 2), groups=groups),
        "far_sequences": cases(domain, longest=3, total=18, value_heads=2, sequences=(5, 6)),
    }
    far_ones = far_examples(domain, {how: drawn[how] for how in far_views})
    return either(near + [far_ones] * (1 + (len(near) > 3)))


def _brief(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    """Return short and narrow cases, because a history has several calls."""
    narrow = {"key_dim": over_one(keys_of(domain, 64)), "value_dim": over_one(values_of(domain, 64))}
    narrow = narrow if not domain.equal_widths else {}
    return _small(domain, **{"longest": 34, "total": 60, "value_heads": 2, **narrow, **more})


def _calm(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    """Return short and narrow cases whose derivatives are well above rounding, with all that may carry a gradient."""
    calm: dict[str, Any] = {
        "values": "ordinary",
        "gate": REMEMBERING,
        "beta": "ordinary",
        "state": "random" if domain.initial_state else "none",
    }
    calm["groups"] = tuple(pair for pair in _many(domain) if pair[1] <= 2)
    return _brief(domain, **{"longest": 20, "total": 24, "sequences": (1, 2), **calm, **more})


def _explicit(domain: Domain) -> st.SearchStrategy[Case]:
    """Return calm cases in which g and beta are inputs, if the domain has such."""
    return _calm(domain, in_kernel="none" if "none" in domain.in_kernel else domain.in_kernel)


def _calm_lacks(case: Case, _: str | None) -> str | None:
    if case.dtype == "fp16":
        return "no fp16"
    if case.gate not in REMEMBERING or _vanishes(case):
        return "gate=" + "|".join(REMEMBERING)
    return has_words(values="ordinary")(case, None) or (None if case.beta in ("ordinary", "one") else "beta=ordinary|one")


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "oracle",
            "truth",
            "every output and every gradient equals the float64 definition",
            lambda domain: examples_of(cases(domain, longest=260, total=280, value_heads=8)),
            oracle,
            always=lambda domain: [Example(case) for case in limits(domain)],
            base=True,
        ),
        Law(
            "recurrent",
            "truth",
            "a prompt in one call and then one token at a time give what one call for all tokens gives",
            lambda domain: examples_of(
                _remember(
                    _near(plain(domain)), packed=False, sequences=(1, 1), longest=80, total=80, value_heads=2, backward=False
                ),
                steps,
            ),
            recurrent,
            lambda domain: (
                _carries(domain) or require(batched=True)(domain)
                if domain.length_step == 1
                else f"single tokens are not supported: every length is a multiple of {domain.length_step}"
            ),
            place=steps,
            lacks=one_batch_row,
            within=plain,
            counterpart=True,
        ),
        Law(
            "packed",
            "truth",
            "packed sequences give what each gives alone",
            lambda domain: examples_of(
                _remember(domain, packed=True, sequences=(2, 3), longest=100, total=170, value_heads=2), several
            ),
            packed,
            require(packed=True, batched=True),
            place=several,
            lacks=has_words(packed="yes"),
        ),
        Law(
            "cut",
            "truth",
            "a sequence may be cut anywhere if the state is carried over the cut, backward too",
            lambda domain: examples_of(
                _remember(
                    domain,
                    longest=max(130, 3 * domain.length_step),
                    total=max(150, 3 * domain.length_step),
                    value_heads=2,
                    sequences=(1, 2 if _cuts_several(domain) else 1),
                    **({} if domain.empty or not domain.batched else {"packed": False}),
                ),
                cuts(domain),
            ),
            cut,
            _carries,
            place=inner,
            outside=outside_of_cut,
        ),
        Law(
            "absent",
            "truth",
            "an omitted optional argument means its neutral value; outputs are the same under no_grad",
            lambda domain: either(_absent_choices(domain)),
            rule_checks.absent,
            needs=_leaves_nothing_out,
            variants=("scale", "state", "offsets", "final_state", "dt_bias", "gradients", "gate", "beta", "options"),
            lacks=_absent_lacks,
            draw_gpu=lambda domain: either(_absent_choices(domain) + _unasked(domain, TILES)),
            always=lambda domain: firm_examples(domain, *_unasked(domain, TILES if domain.drawing.quick else FEW_TILES)),
        ),
        Law(
            "norm",
            "truth",
            "the L2 norm in the kernel equals an explicit one with the same eps, before or after heads are repeated",
            lambda domain: examples_of(
                cases(
                    domain,
                    qk_norm=True,
                    longest=80,
                    total=100,
                    sequences=(1, 2),
                    values=("ordinary", "small", "zero_rows", "large"),
                )
            ),
            rule_checks.norm,
            require(qk_norm=True),
            lacks=has_words(qk_norm="yes"),
        ),
        Law(
            "gates",
            "truth",
            "gate and beta that the kernel computes equal explicit ones, and so do the gradients of A_log, dt_bias, a and b",
            lambda domain: examples_of(cases(domain, in_kernel=_inside(domain), longest=130, total=150, sequences=(1, 2))),
            rule_checks.gates,
            lambda domain: None if _inside(domain) else "neither gate nor beta is computed in the kernel",
            lacks=lambda case, _: None if case.in_kernel != "none" else "in_kernel=gate|beta|both",
        ),
        Law(
            "linear",
            "exact",
            "outputs are linear in (v, state) and gradients are linear in the cotangents; a power of two passes through to the bit",
            _linear_examples,
            rule_checks.linear,
            variants=("values", *FACTORS, "sum"),
            lacks=_linear_lacks,
            always=_firm_linear,
        ),
        Law(
            "recall",
            "exact",
            "with one-hot keys, beta = 1 and no decay the last value written is read back, bit for bit",
            lambda domain: examples_of(
                _small(
                    domain,
                    values="one_hot",
                    gate="forever",
                    beta="one",
                    in_kernel="none",
                    qk_norm=False,
                    scale=max(domain.drawn_scales, key=("default", "half", "one").index),
                    backward=False,
                    **({} if domain.drawn_scales != ("default",) else {"key_dim": _root_widths(domain)}),
                )
            ),
            rule_checks.recall,
            lambda domain: (
                "explicit gates are not supported"
                if "none" not in domain.in_kernel
                else None
                if domain.drawn_scales != ("default",) or _root_widths(domain)
                else "scale is not supported"
            ),
            lacks=_recall_lacks,
            always=lambda domain: [Example(case) for case in exact_limits(domain) if _recall_lacks(case, None) is None],
        ),
        Law(
            "future",
            "exact",
            "later tokens change no earlier output and no earlier gradient of q, bit for bit",
            lambda domain: examples_of(_small(domain), inner),
            future,
            two_tokens,
            place=inner,
        ),
        Law(
            "samples",
            "exact",
            "changing one sequence changes nothing of the others, bit for bit",
            lambda domain: examples_of(_small(domain, sequences=(2, 3)), several),
            samples,
            place=several,
        ),
        Law(
            "heads",
            "exact",
            "changing one head changes nothing of the others, bit for bit",
            lambda domain: examples_of(_small(domain, groups=_many(domain)), _value_heads),
            rule_checks.heads,
            place=_value_heads,
            several_heads=True,
        ),
        Law(
            "permuted",
            "truth",
            "permuting sequences and head groups permutes the results, bit for bit if position_independent=True",
            lambda domain: examples_of(_small(domain, sequences=(1, 3), groups=_many(domain))),
            rule_checks.permuted,
            several_heads=True,
        ),
        memory_law(_small),
        again_law(_small),
        history_law(_brief),
        recompute_law(_calm, _calm_lacks, explicit=_explicit),
        Law(
            "batch",
            "truth",
            "a sequence gives the same alone, in a batch of a few and of nine or more, bit for bit if position_independent=True",
            lambda domain: examples_of(_small(domain, sequences=(2, 3), longest=34, total=48, value_heads=2), several),
            batch,
            place=several,
        ),
        Law(
            "strides",
            "truth",
            "inputs and cotangents may have any strides",
            _strided,
            strides,
            without_views,
            variants=(*VIEWS, *ARRANGED, *FAR),
            lacks=lacks_view,
            outside=outside_views,
            always=lambda domain: firm_views(domain, functools.partial(_calm, domain), packed=domain.packed),
        ),
        pure_law(_small, always=_backward_of_a_crowd),
    )
}


def _inside(domain: Domain) -> tuple[str, ...]:
    """Return what the domain can compute of gate and beta, if these can also be given explicitly: a gate only as its logarithm."""
    explicit = "none" in domain.in_kernel
    return tuple(name for name in domain.in_kernel if explicit and (name == "beta" or (name != "none" and "log" in domain.decays)))


def _cuts_several(domain: Domain) -> bool:
    """Whether several sequences of a call can be cut at once, so that all parts are inside the domain."""
    if one_initial_state(domain) or one_final_state(domain):
        return not domain.packed
    return domain.empty or domain.batched


def _root_widths(domain: Domain) -> tuple[int, ...]:
    """Return the key widths of the domain for which the default scale, K ** -0.5, is a power of two."""
    return tuple(
        width for width in (1, 4, 16, 64, 256) if domain.has_key(width) and (not domain.equal_widths or domain.has_value(width))
    )


def _many(domain: Domain) -> tuple[tuple[int, int], ...]:
    return ((2, 2), (2, 4), (3, 3), (1, 2)) if domain.grouped_heads else ((2, 2), (3, 3))
