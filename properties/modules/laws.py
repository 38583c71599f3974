"""The laws of a layer's modules (convolution, gates, norms): the cases that each is asked about, and what a domain needs for it.

Most compare what a law of properties/laws/ compares; the others are in checks.py.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from properties.laws import common as common_laws
from properties.laws import in_parts, views
from properties.laws.far_views import FAR, can_be_far, far_examples
from properties.laws.history import history_law
from properties.laws.law import Bench, Law, Pair, either, examples_of
from properties.laws.recompute import recompute_law
from properties.modules import checks as module_checks
from properties.modules.case import MODULES, ModuleCase, words_of
from properties.modules.domain import CONV, GATES, HEADS, NORMS, ModuleDomain, exact_limits, limits, module_cases, widths_of
from properties.words.domain import VIEWS
from properties.words.example import Example
from properties.words.lengths import over_one

EXACT_WIDTH = 8  # a sum of up to 8 products of whole numbers up to 4 is exact in eight bits
CALM = ("ordinary", "repeated")  # regimes without numbers near underflow


EVERY = tuple(MODULES)
POINTWISE = (*GATES, *NORMS)
WITH_HEADS = tuple(operation for operation in POINTWISE if "heads" in words_of(operation))
WEIGHED = tuple(operation for operation in NORMS if "weight" in words_of(operation))


def _law(
    name: str,
    kind: str,
    says: str,
    draw: Callable[[ModuleDomain], st.SearchStrategy[Example]],
    check: Callable[[Bench, Example], Iterator[Pair]],
    about: tuple[str, ...] = EVERY,
    needs: Callable[[ModuleDomain], str | None] = lambda domain: None,
    lacks: Callable[[ModuleCase, str | None], str | None] = lambda case, variant: None,
    **more: Any,
) -> Law:
    """Return a law for some operations only; it does not apply to the others."""

    def domain_lacks(domain: ModuleDomain) -> str | None:
        return needs(domain) if domain.operation in about else f"it is not about {domain.operation}"

    def case_lacks(case: ModuleCase, variant: str | None) -> str | None:
        return lacks(case, variant) if case.operation in about else f"op={'|'.join(about)}"

    return Law(name, kind, says, draw, check, domain_lacks, lacks=case_lacks, about=about, **more)


def _absent_variants(domain: ModuleDomain) -> dict[str, dict[str, Any]]:
    """Return what callers can leave out in this domain, with the fields of cases that leave it out."""
    words = words_of(domain.operation)
    can: dict[str, tuple[bool, dict[str, Any]]] = {
        "final_state": ("final_state" in words and domain.final_state, {"final_state": True}),
        "bias": ("bias" in words and domain.bias, {"bias": False}),
        "weight": ("weight" in words and domain.without_weight, {"weight": False}),
        "state": ("state" in words and domain.initial_state, {"state": "none"}),
        "dt_bias": ("dt_bias" in words and domain.without_dt_bias, {"dt_bias": False}),
        "eps": ("eps" in words and {"default", "1e-6"} <= {*domain.eps}, {"eps": "default"}),
        "offsets": ("packed" in words and domain.packed and domain.batched, {"packed": False, "sequences": (1, 1)}),
        "residual": ("residual" in words and {"none", "added"} <= {*domain.residuals}, {"residual": "none"}),
        "options": (bool(domain.options), {}),
    }
    return {name: fields for name, (may, fields) in can.items() if may}


def _absent_examples(domain: ModuleDomain) -> st.SearchStrategy[Example]:
    drawn = {name: _small(domain, **fields) for name, fields in _absent_variants(domain).items()}
    if "options" in drawn:
        drawn["options"] = drawn["options"].filter(lambda case: case.options != "none")
    return either([examples_of(strategy, None, (name,)) for name, strategy in drawn.items()])


def _absent_lacks(case: ModuleCase, variant: str | None) -> str | None:
    if variant == "options":
        return None if case.options != "none" else "options=..."
    word = {"offsets": "packed"}.get(variant or "", variant or "")
    if word not in words_of(case.operation):
        return f"an operation that has {word}"
    if variant == "offsets":
        return common_laws.one_batch_row(case, variant)
    wanted = {"final_state": "yes", "state": "none", "eps": "default", "residual": "none"}.get(word, "no")
    return common_laws.has_words(**{word: wanted})(case, variant)


def _linear_lacks(case: ModuleCase, variant: str | None) -> str | None:
    if case.dtype == "fp16" or case.values not in CALM:
        return f"numbers away from underflow (no fp16, values={'|'.join(CALM)})"
    if variant in common_laws.FACTORS:
        return None if case.backward else "backward=yes"
    if variant == "weight" and case.residual != "none":
        return "residual=none"
    if case.operation in CONV:
        return None if case.activation == "none" else "activation=none"
    if variant == "weight" and case.operation in WEIGHED:
        return None if case.weight else "weight=yes"
    return "|".join(("op=causal_conv1d", *(WEIGHED if variant == "weight" else ())))


def _linear_examples(domain: ModuleDomain) -> st.SearchStrategy[Example]:
    exact = tuple(dtype for dtype in domain.dtypes if dtype != "fp16")  # subnormals of fp16, below 6e-5, round under a factor
    small: dict[str, Any] = {"dtype": exact, "values": CALM}
    choices = []
    if domain.backward:
        choices.append(examples_of(_small(domain, **small), None, tuple(common_laws.FACTORS)))
    if domain.operation in CONV and "none" in domain.activations:
        choices.append(examples_of(_small(domain, activation="none", **small), None, ("inputs",)))
        if "none" in domain.residuals:
            choices.append(examples_of(_small(domain, activation="none", residual="none", **small), None, ("weight",)))
    if domain.operation in WEIGHED and "none" in domain.residuals:
        choices.append(examples_of(_small(domain, weight=True, residual="none", **small), None, ("weight",)))
    return either(choices)


def _linear_needs(domain: ModuleDomain) -> str | None:
    if set(domain.dtypes) == {"fp16"}:
        return "only fp16 is supported, whose subnormals round"
    weighed = domain.operation in WEIGHED and "none" in domain.residuals
    if domain.backward or weighed or (domain.operation in CONV and "none" in domain.activations):
        return None
    return "no output or gradient is linear"


def _scaled_lacks(case: ModuleCase, _: str | None) -> str | None:
    rounds = case.dtype == "fp16" or case.values == "large"
    if case.residual != "none":
        return "residual=none"
    return "numbers away from underflow (no fp16, no values=large)" if rounds else None


def _scaled_needs(domain: ModuleDomain) -> str | None:
    if not {"1e-6", "1e-5"} <= {*domain.eps}:
        return "another eps is not supported"
    if "none" not in domain.residuals:
        return "residual=none is not supported"
    return "only fp16 is supported, whose subnormals round" if set(domain.dtypes) == {"fp16"} else None


def _whole_needs(domain: ModuleDomain) -> str | None:
    if "none" not in domain.activations:
        return "activation=none is not supported"
    return None if min(domain.conv_widths) <= EXACT_WIDTH else f"conv_width up to {EXACT_WIDTH} is not supported"


def _whole_lacks(case: ModuleCase, _: str | None) -> str | None:
    if case.values != "whole":
        return "values=whole"
    narrow = case.dtype == "fp32" or case.conv_width <= EXACT_WIDTH
    return None if narrow else f"conv_width up to {EXACT_WIDTH}, or dtype=fp32"


def _rows(case: ModuleCase) -> range:
    return range(case.tokens) if case.tokens > 1 else range(0)


def _heads(case: ModuleCase) -> range:
    return range(case.heads) if case.heads > 1 else range(0)


def _channels(case: ModuleCase) -> range:
    return range(case.width) if case.width > 1 else range(0)


def _wide(domain: ModuleDomain) -> str | None:
    return None if max(domain.fixed_widths or domain.widths) > 1 else "more than one channel is not supported"


def _small(domain: ModuleDomain, **more: Any) -> st.SearchStrategy[ModuleCase]:
    return module_cases(domain, **{"longest": 130, "total": 180, "sequences": (1, 3), **more})


def _strided(domain: ModuleDomain) -> st.SearchStrategy[Example]:
    """Return cases in every view, some with tokens, heads or sequences far apart if the domain allows enough tokens."""
    near = views.near_views(domain, functools.partial(_small, domain, sequences=(1, 2)), packed=domain.packs)
    choices = {
        "far_sequences": module_cases(domain, longest=3, total=18, sequences=(5, 6)),
        "far_tokens": module_cases(domain, longest=12, total=12, sequences=(1, 2)),
    }
    if "heads" in words_of(domain.operation):
        choices["far_heads"] = module_cases(domain, longest=3, total=40, sequences=(1, 2), heads=(5, 8))
    choices = {how: cases for how, cases in choices.items() if views.takes_far(domain, how)}
    if not can_be_far(domain) or not choices:
        return either(near)
    return either(near + [far_examples(domain, choices)] * (1 + (len(near) > 3)))


def _stateful(domain: ModuleDomain, **more: Any) -> st.SearchStrategy[ModuleCase]:
    """Return cases in which a lost state would show."""
    options: dict[str, Any] = {"values": ("ordinary", "scaled", "small", "large"), "final_state": True, **more}
    return _small(domain, **options)


def _copied_examples(domain: ModuleDomain) -> st.SearchStrategy[Example]:
    """Return cases with any lengths and, two of three, with sequences so short that something of the initial state is left."""
    words: dict[str, Any] = {"final_state": True, "backward": False}
    anything = examples_of(_small(domain, **words))
    taps = tuple(width for width in domain.conv_widths if width > 2)
    if not taps or not domain.initial_state:
        return anything
    short = _small(domain, **words, state="random", conv_width=taps, longest=max(taps) - 2)
    return either([examples_of(short.filter(lambda case: min(case.lengths) < case.conv_width - 1))] * 2 + [anything])


def _padded_lacks(case: ModuleCase, _: str | None) -> str | None:
    return "packed=no state=none" if case.packed or case.state != "none" else None


def _one_row_and_its_state(case: ModuleCase, variant: str | None) -> str | None:
    """Return what a case lacks to be one sequence that is not packed and returns its state, or None."""
    return common_laws.one_batch_row(case, variant) or common_laws.has_words(final_state="yes")(case, variant)


def _calm(domain: ModuleDomain) -> st.SearchStrategy[ModuleCase]:
    """Return short cases whose derivatives are well above rounding, with all that may carry a gradient."""
    given: dict[str, Any] = {
        "bias": domain.bias,
        "weight": True,
        "dt_bias": True,
        "state": "random" if domain.initial_state else "none",
        "heads": over_one(HEADS),
        "width": over_one(widths_of(domain, 24)),
    }
    return _small(domain, longest=20, total=24, sequences=(1, 2), values="ordinary", **given)


def _calm_lacks(case: ModuleCase, _: str | None) -> str | None:
    return "no fp16" if case.dtype == "fp16" else common_laws.has_words(values="ordinary")(case, None)


MODULE_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        _law(
            "oracle",
            "truth",
            "every output and every gradient, those of parameters included, equals the float64 definition",
            lambda domain: examples_of(module_cases(domain, longest=260, total=280, oldest=(False, True))),
            common_laws.oracle,
            always=lambda domain: [Example(case) for case in limits(domain)],
            base=True,
        ),
        _law(
            "recurrent",
            "truth",
            "a prompt in one call and then one token at a time give what one call for all tokens gives",
            lambda domain: examples_of(
                _stateful(common_laws.plain(domain), packed=False, sequences=(1, 1), longest=80, backward=False), in_parts.steps
            ),
            in_parts.recurrent,
            CONV,
            common_laws.first_of(common_laws.require(initial_state=True, final_state=True, batched=True), common_laws.two_tokens),
            _one_row_and_its_state,
            place=in_parts.steps,
            within=common_laws.plain,
            counterpart=True,
        ),
        _law(
            "packed",
            "truth",
            "packed sequences give what each gives alone",
            lambda domain: examples_of(_stateful(domain, packed=True, sequences=(2, 3)), common_laws.several),
            in_parts.packed,
            CONV,
            common_laws.require(packed=True, batched=True, initial_state=True, final_state=True),
            common_laws.has_words(packed="yes", final_state="yes"),
            place=common_laws.several,
        ),
        _law(
            "cut",
            "truth",
            "a sequence may be cut anywhere if the state is carried over the cut, backward too",
            lambda domain: examples_of(
                _stateful(
                    domain,
                    **({} if domain.empty or not domain.batched else {"packed": False}),
                    sequences=(1, 2 if domain.empty or domain.batched else 1),  # one part of several sequences may have empty ones
                ),
                common_laws.inner,
            ),
            in_parts.cut,
            CONV,
            common_laws.first_of(common_laws.require(initial_state=True, final_state=True), common_laws.two_tokens),
            common_laws.has_words(final_state="yes"),
            place=common_laws.inner,
            outside=in_parts.outside_of_cut,
        ),
        _law(
            "absent",
            "truth",
            "an omitted optional argument means its neutral value",
            _absent_examples,
            module_checks.absent,
            needs=lambda domain: None if _absent_variants(domain) else "no argument is optional",
            lacks=_absent_lacks,
            variants=("final_state", "bias", "weight", "state", "dt_bias", "eps", "offsets", "residual", "options"),
        ),
        _law(
            "linear",
            "exact",
            "a power of two on the cotangents, the convolution's inputs or the weight passes through, bit for bit",
            _linear_examples,
            module_checks.linear,
            needs=_linear_needs,
            lacks=_linear_lacks,
            variants=("inputs", "weight", *common_laws.FACTORS),
        ),
        _law(
            "scaled",
            "exact",
            "the norm of 2 x with 4 eps equals the norm of x, bit for bit, because eps is added to the squares",
            lambda domain: examples_of(
                _small(
                    domain,
                    dtype=tuple(dtype for dtype in domain.dtypes if dtype != "fp16"),
                    values=("ordinary", "repeated", "zero_rows", "small", "scaled"),
                    residual="none",
                )
            ),
            module_checks.scaled,
            NORMS,
            _scaled_needs,
            _scaled_lacks,
        ),
        _law(
            "whole",
            "exact",
            "the convolution of small whole numbers and its gradients are exact",
            lambda domain: examples_of(
                _small(
                    domain,
                    values="whole",
                    activation="none",
                    conv_width=tuple(width for width in domain.conv_widths if width <= EXACT_WIDTH),
                )
            ),
            module_checks.whole,
            CONV,
            _whole_needs,
            _whole_lacks,
            always=lambda domain: [Example(case) for case in exact_limits(domain)],
        ),
        _law(
            "copied",
            "exact",
            "the final state has the last inputs, and before them what is left of the initial state, bit for bit",
            _copied_examples,
            module_checks.copied,
            CONV,
            common_laws.require(final_state=True),
            common_laws.has_words(final_state="yes"),
        ),
        _law(
            "future",
            "exact",
            "later tokens change no earlier output, bit for bit",
            lambda domain: examples_of(_small(domain), common_laws.inner),
            common_laws.future,
            CONV,
            common_laws.two_tokens,
            place=common_laws.inner,
        ),
        _law(
            "samples",
            "exact",
            "changing one sequence changes nothing of the others, bit for bit",
            lambda domain: examples_of(_small(domain, sequences=(2, 3)), common_laws.several),
            common_laws.samples,
            CONV,
            place=common_laws.several,
            few=16,  # the eight wrong modules that it finds break in the first 8 cases
        ),
        _law(
            "left_padding",
            "truth",
            "padding at the start of rows, which a mask leaves out, changes nothing",
            lambda domain: examples_of(
                _small(domain, packed=False, state="none", longest=min(33, domain.longest)).filter(lambda case: any(case.pads()))
            ),
            common_laws.left_padding,
            CONV,
            common_laws.first_of(common_laws.require(attention_mask=True, batched=True), common_laws.two_tokens),
            _padded_lacks,
            always=lambda domain: common_laws.far_padding(domain, _small),
        ),
        _law(
            "tokens",
            "exact",
            "changing one token changes nothing of the others, bit for bit",
            lambda domain: examples_of(_small(domain), _rows),
            module_checks.tokens,
            POINTWISE,
            place=_rows,
        ),
        _law(
            "heads",
            "exact",
            "changing one head and its parameters changes nothing of the others, bit for bit",
            lambda domain: examples_of(_small(domain, heads=(2, 3, 4)), _heads),
            module_checks.apart(("H", "HV")),
            WITH_HEADS,
            place=_heads,
            several_heads=True,
        ),
        _law(
            "channels",
            "exact",
            "changing one channel and its parameters changes nothing of the others, bit for bit",
            lambda domain: examples_of(_small(domain), _channels),
            module_checks.apart(("D", "K")),
            (*CONV, "kda_gate"),
            _wide,
            place=_channels,
        ),
        _law(
            "permuted",
            "truth",
            "permuting sequences or tokens, heads and channels permutes the results, bit for bit if position_independent=True",
            lambda domain: examples_of(_small(domain)),
            module_checks.permuted,
            several_heads=True,
        ),
        _law(
            "repeated",
            "truth",
            "the L2 norm of repeated heads equals the repeated norm, bit for bit if position_independent=True",
            lambda domain: examples_of(_small(domain)),
            module_checks.repeated,
            ("l2norm",),
        ),
        common_laws.memory_law(_small, about=EVERY),
        history_law(functools.partial(module_cases, sequences=(1, 3), longest=40, total=60), about=EVERY),
        recompute_law(_calm, _calm_lacks, about=EVERY),
        _law(
            "strides",
            "truth",
            "inputs and cotangents may have any strides",
            _strided,
            views.strides,
            needs=views.without_views,
            variants=(*VIEWS, *views.ARRANGED, *FAR),
            lacks=views.lacks_view,
            outside=views.outside_views,
            always=lambda domain: views.firm_views(domain, functools.partial(_small, domain), packed=domain.packs),
        ),
        views.pure_law(_small, about=EVERY),
    )
}
