"""The laws of rules: gated delta rule, delta rule and KDA. Laws shared with other operations are in common_laws.py."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.norm import EPS
from oracles.operation import DTYPES, Inputs
from properties.cases.rule_case import Case
from properties.common_laws import (
    again,
    batch,
    carried_dtype,
    cut,
    cuts,
    final_dtype,
    future,
    has_words,
    inner,
    memory,
    one_batch_row,
    oracle,
    outside_of_cut,
    packed,
    plain,
    pure,
    recurrent,
    require,
    samples,
    several,
    steps,
    strides,
    without_options,
)
from properties.domain import VIEWS, Domain
from properties.far_views import FAR, far_examples, lacks_far
from properties.history_laws import history_law
from properties.laws import (
    Bench,
    Law,
    Pair,
    along,
    axes_of,
    bounds_as,
    either,
    examples_of,
    one_final_state,
    one_initial_state,
    pairs_of,
    present,
    spread,
    with_others,
)
from properties.strategies import REMEMBERING, Example, cases, keys_of, values_of, with_crowd


def _halves(names: Sequence[str], number: int) -> tuple[list[str], list[str]]:
    """Split the names into two non-empty groups; another number gives another split."""
    chosen = 1 + number % (2 ** len(names) - 2)
    some = [name for place, name in enumerate(names) if chosen >> place & 1]
    return some, [name for name in names if name not in some]


def _absent(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = bench.call(case)
    width, lengths = case.key_dim, case.lengths
    if example.variant == "gradients":
        bounds = bench.bounds(inputs, cotangents)
        with torch.no_grad():
            outputs = bench.run(inputs, None)
        for name, output in outputs.items():
            yield f"{name} under no_grad", output, bounds[name]
        for frozen in _halves(present(case.spec, inputs), case.seed) if cotangents is not None else ():
            for name, value in bench.run(inputs, cotangents, frozen=frozen).items():
                yield f"{name} with {', '.join(frozen)} frozen", value, bounds[name]
        return
    if example.variant == "options":
        yield from without_options(bench, example)
        return
    gates = inputs.v.shape[:-1] + inputs.k.shape[-1:] * (case.operation == "kda")
    gate_dtype = DTYPES["fp32" if case.gate_dtype == "fp32" else case.dtype]
    zeros, carried = (len(lengths), case.value_heads, width, case.value_dim), carried_dtype(bench, case, torch.float32)
    neutral = {
        "scale": lambda: inputs.replaced(scale=width**-0.5),
        "state": lambda: inputs.replaced(state=torch.zeros(zeros, dtype=carried)),
        "offsets": lambda: inputs.replaced(cu_seqlens=torch.tensor([0, lengths[0]], dtype=getattr(torch, bench.domain.offsets[0]))),
        "final_state": lambda: inputs.replaced(output_final_state=False),
        "dt_bias": lambda: inputs.replaced(dt_bias=torch.zeros(inputs.a.shape[2:], dtype=inputs.A_log.dtype)),
        "gate": lambda: inputs.replaced(g=torch.zeros(gates, dtype=gate_dtype)),
        "beta": lambda: inputs.replaced(beta=torch.ones(inputs.v.shape[:-1], dtype=inputs.v.dtype)),
    }[example.variant or ""]()
    if example.variant == "final_state" and cotangents is not None:
        cotangents = {**cotangents, "final_state": torch.zeros_like(cotangents["final_state"])}
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.run(inputs, cotangents), bounds)
    if (dtype := final_dtype(case, neutral)) != final_dtype(case, inputs):  # a final state has the initial one's dtype
        cotangents = cotangents and {**cotangents, "final_state": cotangents["final_state"].to(dtype)}
        bounds = bench.bounds(neutral, cotangents)
    for name, got in bench.run(neutral, cotangents).items():
        if name in bounds:
            yield (
                f"{name} with {example.variant} {'not asked for' if example.variant == 'final_state' else 'given'}",
                got,
                bounds[name],
            )


def _norm(bench: Bench, example: Example) -> Iterator[Pair]:
    """The norm inside the kernel equals an explicit norm.

    The explicit norm stores its result in the inputs' dtype, as the chunkwise class does, before the implementation rounds. So the
    bounds of the chunkwise class are added.
    """
    case = example.case
    inputs, cotangents = bench.call(case)
    yield from pairs_of(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents))
    bounds = bounds_as(bench, inputs, cotangents, "chunkwise")
    for when, groups in (("before", 1), ("after", case.value_heads // case.heads)):
        leaves = {name: inputs[name].detach().clone().requires_grad_() for name in ("q", "k")}
        normed = {name: _normalised(leaf.repeat_interleave(groups, dim=-2)) for name, leaf in leaves.items()}
        got = bench.run(inputs.replaced(qk_norm=False, **{name: x.detach() for name, x in normed.items()}), cotangents)
        for name, leaf in leaves.items():
            if cotangents is not None:
                (got[f"d{name}"],) = torch.autograd.grad(normed[name], leaf, got[f"d{name}"])
        for name, value in got.items():
            yield f"{name}, normalised {when} head repetition", value, bounds[name]


def _gates(bench: Bench, example: Example) -> Iterator[Pair]:
    """Gate and beta inside the kernel equal explicit ones.

    The explicit ones are computed in float32 as in oracles/gates.py and given to the implementation. Their gradients go back
    through the same computation.
    """
    case = example.case
    inputs, cotangents = bench.call(case)
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.run(inputs, cotangents), bounds)
    names = [*(["a", "A_log", "dt_bias"] if case.gate_inside else []), *(["b"] if case.beta_inside else [])]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names if inputs[name] is not None}
    outside: dict[str, Tensor] = {}
    if case.gate_inside:
        raw = leaves["a"].float() + leaves.get("dt_bias", torch.zeros(()))
        speed = leaves["A_log"].float().exp().reshape(-1, *[1] * (raw.ndim - 3))
        bound = inputs.get("lower_bound")
        outside["g"] = -speed * torch.nn.functional.softplus(raw) if bound is None else bound * (speed * raw).sigmoid()
    if case.beta_inside:
        beta = leaves["b"].float().sigmoid() * (2 if inputs.allow_neg_eigval else 1)
        outside["beta"] = beta.to(inputs.q.dtype)
    # Some values round only outside, and some only inside, so the explicit call is judged by both bounds.
    none = dict.fromkeys((*names, "allow_neg_eigval", "lower_bound"))
    arguments = Inputs(**{**inputs, **none, **{name: x.detach() for name, x in outside.items()}})
    got = bench.run(arguments, cotangents)
    if cotangents is not None and leaves:
        back = [got.pop(f"d{name}") for name in outside]
        gradients = torch.autograd.grad(list(outside.values()), list(leaves.values()), back)
        got |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    explicit = bench.bounds(arguments, cotangents)
    for name, value in got.items():
        limit = bounds[name].beside(explicit[name]) if name in explicit else bounds[name].beside(bounds[name])
        yield f"{name} with explicit gates", value, limit


def _normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


def _recall(bench: Bench, example: Example) -> Iterator[Pair]:
    """Keys are one-hot, beta = 1, g = 0 and v small integers: each write replaces a row of the state, and nothing rounds."""
    inputs, _ = bench.call(example.case)
    got = bench.run(inputs, None)
    for name, want in bench.truth(inputs, None).items():
        if name == "final_state" and example.case.packed and one_final_state(bench.domain):
            want, got[name] = want[-1:], got[name][-1:]
        yield name, got[name], want


def _heads(bench: Bench, example: Example) -> Iterator[Pair]:
    """Change one head's inputs and compare the others.

    With one key head, only the value head's own inputs change. With several, those of its key head's whole group change.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    group = case.value_heads // case.heads
    other = with_others(case, bench.domain).inputs()
    values = torch.arange(case.value_heads)
    touched = values // group == at // group if case.heads > 1 else values == at
    keys = torch.arange(case.heads) == (at // group if case.heads > 1 else -1)
    spec, mixed = case.spec, {}

    def changed_heads(name: str) -> tuple[int, Tensor] | None:
        """The axis of its heads, and which of them change."""
        for letter, mask in (("H", keys), ("HV", touched)):
            if (axis := along(spec, name, letter)) is not None:
                return axis, mask
        return None

    for name in present(spec, inputs):
        if (mine := changed_heads(name)) is not None:
            mixed[name] = torch.where(spread(mine[1], inputs[name], mine[0]), other[name], inputs[name])
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
    for name, got in twice.items():
        mine = changed_heads(name)
        if mine is not None and (case.heads > 1 or mine[1] is touched):
            index: tuple[Any, ...] = (*[slice(None)] * mine[0], ~mine[1])
            yield f"{name} of the other heads", got[index], once[name][index]


def _permuted(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = bench.call(case)
    group = case.value_heads // case.heads
    keys = torch.arange(case.heads).roll(1)
    values = torch.arange(case.value_heads).reshape(case.heads, group).roll(1, 0).flatten()
    states = one_initial_state(bench.domain) or one_final_state(bench.domain)
    rows = torch.arange(len(case.lengths)).roll(0 if case.packed and states else 1)  # the first and last sequences stay
    starts = case.starts()
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows.tolist()])

    def moved(name: str, x: Tensor) -> Tensor:
        axes = axes_of(case.spec, name)
        for letter, order in (("H", keys), ("HV", values), ("N", rows)):
            if letter in axes:
                x = x.index_select(axes.index(letter), order)
        return x.flatten(0, 1)[tokens].reshape(x.shape) if axes[:2] == ["B", "T"] else x

    there = inputs.replaced(**{name: moved(name, inputs[name]) for name in present(case.spec, inputs)})
    if inputs.cu_seqlens is not None:
        ends = torch.tensor([0, *(case.lengths[row] for row in rows.tolist())]).cumsum(0)
        there = there.replaced(cu_seqlens=ends.to(inputs.cu_seqlens.dtype))
    turned = None if cotangents is None else {name: moved(name, x) for name, x in cotangents.items()}
    got = bench.run(there, turned)
    if bench.domain.position_independent:
        once = bench.run(inputs, cotangents)
        for name, value in got.items():
            yield f"{name} permuted", value, moved(name, once[name])
    else:
        for name, bound in bench.bounds(there, turned).items():
            yield f"{name} permuted", got[name], bound


def _linear(bench: Bench, example: Example) -> Iterator[Pair]:
    """A factor of -2 rounds nothing, so it passes through every product and sum. Sums round, so the variant `sum` has a bound."""
    inputs, cotangents = bench.call(example.case)
    if example.variant == "sum":
        odd = torch.arange(inputs.v.shape[1]).reshape(1, -1, 1, 1) % 2 == 1
        parts = [
            inputs.replaced(v=torch.where(odd, inputs.v, 0)),
            inputs.replaced(v=torch.where(odd, 0, inputs.v), state=None),
        ]
        runs, limits = [bench.run(part, None) for part in parts], [bench.bounds(part, None) for part in parts]
        for name in runs[0]:
            got = runs[0][name].double() + runs[1][name].double()
            yield f"{name}, summed over even and odd tokens' values", got, limits[0][name].plus(limits[1][name])
        return
    once = bench.run(inputs, cotangents)
    if example.variant == "values":
        state = None if inputs.state is None else -2 * inputs.state
        twice = bench.run(inputs.replaced(v=-2 * inputs.v, state=state), cotangents)
        for name, got in twice.items():
            factor = 1 if name in ("dv", "dh0") else -2
            yield f"{name} with v and state times -2", _normal(got), _normal(factor * once[name])
    else:
        assert cotangents is not None
        factor = 0 if example.variant == "zero_cotangents" else -2
        twice = bench.run(inputs, {name: factor * x for name, x in cotangents.items()})
        for name, got in twice.items():
            if name.startswith("d"):
                due = factor * once[name]
                pair = (_normal(got), _normal(due)) if factor else (got, due)
                yield f"{name} with cotangents times {factor}", *pair


UNDERFLOW = 2.0**-100  # the subnormal step of float32, 2^-149, is 2^-49 of this


def _normal(x: Tensor) -> Tensor:
    """Return x with zeros in place of numbers below UNDERFLOW.

    Subnormal numbers, which do round under a factor of two, may have gone into such small numbers.
    """
    return torch.where(x.abs() < UNDERFLOW, 0.0, x)


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
    return dataclasses.replace(domain, reach=1)


def _remember(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    options: dict[str, Any] = {"gate": REMEMBERING, "beta": ("ordinary", "edges"), **more}
    options.setdefault("values", ("ordinary", "correlated", "zero_rows", "scaled"))
    return cases(domain, **options)


def _leaves_out(words: tuple[str, ...], case: Case) -> bool:
    return case.left_out in words


def _absent_examples(domain: Domain) -> st.SearchStrategy[Example]:
    small: dict[str, Any] = {"longest": 80, "total": 160, "value_heads": 2}
    choices = [examples_of(cases(domain, **small), None, ("final_state",))]
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
    return either(choices)


def _linear_examples(domain: Domain) -> st.SearchStrategy[Example]:
    calm: dict[str, Any] = {
        "gate": REMEMBERING,
        "values": ("ordinary", "correlated", "repeated"),
    }
    exact = tuple(dtype for dtype in domain.dtypes if dtype != "fp16")
    small: dict[str, Any] = {"longest": 130, "total": 130, "value_heads": 2}
    choices = [examples_of(_remember(domain, **small), None, ("sum",))]
    if exact:  # subnormals of fp16, below 6e-5, do round under a factor of two
        variants = ("values", "cotangents", "zero_cotangents") if domain.backward else ("values",)
        normal = cases(domain, dtype=exact, **calm, **small).filter(lambda case: not _vanishes(case))
        # Long cases may lack a backward pass, which the variants of cotangents need.
        choices.append(examples_of(normal, None, variants).filter(lambda x: _linear_lacks(x.case, x.variant) is None))
    return either(choices)


def _small(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    options: dict[str, Any] = {"longest": 130, "total": 180, "value_heads": 4, "sequences": (1, 3), **more}
    return cases(domain, **options)


def _far(domain: Domain) -> st.SearchStrategy[Example]:
    """Return small cases with enough tokens, heads or sequences to lie far apart."""
    groups = ((5, 5), (8, 8), (5, 10)) if domain.grouped_heads else ((5, 5), (8, 8))
    return far_examples(
        {
            "far_tokens": cases(domain, longest=12, total=12, value_heads=2, sequences=(1, 2)),
            "far_heads": cases(domain, longest=3, total=12, sequences=(1, 2), groups=groups),
            "far_sequences": cases(domain, longest=3, total=18, value_heads=2, sequences=(5, 6)),
        }
    )


def _brief(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    """Return short and narrow cases, because a history has several calls."""
    narrow = {"key_dim": keys_of(domain, 64), "value_dim": values_of(domain, 64)}
    narrow = narrow if not domain.equal_widths else {}
    return _small(domain, **{"longest": 34, "total": 60, "value_heads": 2, **narrow, **more})


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "oracle",
            "truth",
            "every output and every gradient equals the float64 definition",
            lambda domain: with_crowd(domain, examples_of(cases(domain, longest=260, total=280, value_heads=8))),
            oracle,
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
                require(initial_state=True, batched=True)(domain)
                if domain.length_step == 1
                else f"single tokens are not supported: every length is a multiple of {domain.length_step}"
            ),
            place=steps,
            lacks=one_batch_row,
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
            require(initial_state=True),
            place=inner,
            outside=outside_of_cut,
        ),
        Law(
            "absent",
            "truth",
            "an omitted optional argument means its neutral value; results do not depend on which inputs require a gradient",
            _absent_examples,
            _absent,
            variants=("scale", "state", "offsets", "final_state", "dt_bias", "gradients", "gate", "beta", "options"),
            lacks=_absent_lacks,
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
            _norm,
            require(qk_norm=True),
            lacks=has_words(qk_norm="yes"),
        ),
        Law(
            "gates",
            "truth",
            "gate and beta that the kernel computes equal explicit ones, and so do the gradients of A_log, dt_bias, a and b",
            lambda domain: examples_of(cases(domain, in_kernel=_inside(domain), longest=130, total=150, sequences=(1, 2))),
            _gates,
            lambda domain: None if _inside(domain) else "neither gate nor beta is computed in the kernel",
            lacks=lambda case, _: None if case.in_kernel != "none" else "in_kernel=gate|beta|both",
        ),
        Law(
            "linear",
            "exact",
            "outputs are linear in (v, state) and gradients are linear in the cotangents; a factor of -2 passes through to the bit",
            _linear_examples,
            _linear,
            variants=("values", "cotangents", "zero_cotangents", "sum"),
            lacks=_linear_lacks,
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
            _recall,
            lambda domain: (
                "explicit gates are not supported"
                if "none" not in domain.in_kernel
                else None
                if domain.drawn_scales != ("default",) or _root_widths(domain)
                else "scale is not supported"
            ),
            lacks=_recall_lacks,
        ),
        Law(
            "future",
            "exact",
            "later tokens change no earlier output and no earlier gradient of q, bit for bit",
            lambda domain: examples_of(_small(domain), inner),
            future,
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
            _heads,
            place=_value_heads,
        ),
        Law(
            "permuted",
            "truth",
            "permuting sequences and head groups permutes the results, bit for bit if position_independent=True",
            lambda domain: examples_of(_small(domain, sequences=(1, 3), groups=_many(domain))),
            _permuted,
        ),
        Law(
            "memory",
            "exact",
            "other numbers in uninitialised memory change no result, bit for bit if deterministic=True",
            lambda domain: examples_of(_small(domain)),
            memory,
        ),
        Law(
            "again",
            "exact",
            "three calls with the same inputs give the same results, bit for bit if deterministic=True",
            lambda domain: examples_of(_small(domain)),
            again,
        ),
        history_law(_brief),
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
            lambda domain: either([examples_of(_small(domain, sequences=(1, 2)), None, VIEWS)] * 3 + [_far(domain)]),
            strides,
            require(views=True),
            variants=(*VIEWS, *FAR),
            lacks=lacks_far,
        ),
        Law(
            "pure",
            "exact",
            "a call changes neither its inputs nor the memory around them",
            lambda domain: examples_of(_small(domain)),
            pure,
        ),
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
    return tuple(width for width in (1, 4, 16, 64, 256) if domain.has_key(width))


def _many(domain: Domain) -> tuple[tuple[int, int], ...]:
    return ((2, 2), (2, 4), (3, 3), (1, 2)) if domain.grouped_heads else ((2, 2), (3, 3))
