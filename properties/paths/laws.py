"""The laws of several ranks together, and the cases drawn for each inside what a path promises."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from properties.laws.law import Law, all_variants, either
from properties.paths import checks
from properties.paths.case import CHOICES, ParallelCase
from properties.paths.domain import MESHES, PathDomain, case_ranks
from properties.paths.drawing import limits, path_cases, unequal
from properties.paths.illegal import JUDGED, illegal_of, lacking_for
from properties.words.example import Example

WAYS = ("heads", "tokens")
ILLEGAL = tuple(JUDGED)
NUMBERS = ("finite", "nan", "inf")
HISTORIES = ("others", "refill", "freed", "gradients", "in_flight", "refused", "failed", "alone")


def _paths(
    strategy: st.SearchStrategy[ParallelCase], variants: Callable[[ParallelCase], Sequence[str | None]] | None = None
) -> Any:
    """Return a strategy for examples, each with one of the variants that its case has."""
    return _path(strategy if variants is None else strategy.filter(lambda case: bool(variants(case))), variants)


@st.composite
def _path(
    draw: st.DrawFn, strategy: st.SearchStrategy[ParallelCase], variants: Callable[[ParallelCase], Sequence[str | None]] | None
) -> Example:
    case = draw(strategy)
    chance = draw(st.randoms(use_true_random=True))
    return Example(case, None, chance.choice(list(variants(case))) if variants else None)


def _goes_back(case: ParallelCase) -> bool:
    """Whether a case has a backward; norms of q and k whose gradients overflow in fp16 have none."""
    return case.backward


def _with_tp(domain: PathDomain) -> tuple[tuple[int, int], ...]:
    """Return the meshes (tp, cp) of a domain whose ranks share heads: in half of the draws three TP ranks or more, if there are.

    Of two numbers the order does not matter to their sum.
    """
    every = range(2, domain.ranks + 1)
    meshes = [(tp, cp) for tp in every for cp in range(1, domain.ranks // tp + 1 if domain.context_parallel else 2)]
    more = [mesh for mesh in meshes if mesh[0] > 2]
    return tuple(meshes + more)


def _sharing_heads(domain: PathDomain) -> str | None:
    return None if domain.tensor_parallel and domain.ranks > 1 else "no ranks share the heads"


def _of_gradients(domain: PathDomain) -> st.SearchStrategy[ParallelCase]:
    """Return cases whose ranks share heads. No layer runs, and gradients are in float32 whatever the dtype is."""
    return path_cases(domain, tokens=16, sp=False, mesh=_with_tp(domain), dtype=_plainest(domain), **_QUICK)


def _many(domain: PathDomain) -> PathDomain:
    """Return the domain with all the ranks that exchanges without a layer may have. Nothing is compiled for them."""
    return dataclasses.replace(domain, ranks=domain.exchange_ranks, drawing=dataclasses.replace(domain.drawing, forms=()))


def _plainest(domain: PathDomain) -> str | tuple[str, ...]:
    """Return float32, which is enough for laws about layouts, or the dtypes of a domain without it."""
    return "fp32" if "fp32" in domain.dtypes else domain.dtypes


def _needs(**wanted: bool) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        name = next((name for name, value in wanted.items() if getattr(domain, name) is not value), None)
        return name and f"{name} is {'not promised' if wanted[name] else 'declared'}"

    return needs


def _needs_layer(**wanted: bool) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        return "the operation is not gdn_layer" if domain.operation != "gdn_layer" else _needs(**wanted)(domain)

    return needs


def _has(name: str, *values: str) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        had = dict(domain.choices).get(name, ())
        return None if set(values) <= set(had) else f"{name} has no {' and '.join(sorted(set(values) - set(had)))}"

    return needs


def _alternatives(domain: PathDomain) -> tuple[str, ...]:
    """Return every value of every choice that has more than one value, as a variant."""
    return tuple(f"{name}={value}" for name, values in domain.choices if len(values) > 1 for value in values)


def _others(domain: PathDomain) -> Callable[[ParallelCase], Sequence[str]]:
    def others(case: ParallelCase) -> Sequence[str]:
        words = case.words()
        every = [choice for choice in _alternatives(domain) if words[choice.partition("=")[0]] != choice.partition("=")[2]]
        if domain.drawing.forms:  # with compiled kernels all choices are equally quick
            return [choice for choice in every if domain.outside(_with_choice(case, choice)) is None]
        quick = [choice for choice in every if choice not in domain.slow]
        return quick + [choice for choice in every if choice in domain.slow][: 1 if case.tokens <= 40 else 0]

    return others


def _with_choice(case: ParallelCase, choice: str) -> ParallelCase:
    name, _, value = choice.partition("=")
    changed: dict[str, Any] = {name: value}
    return dataclasses.replace(case, **changed)


def _changes(case: ParallelCase, variant: str | None) -> str | None:
    name, _, value = (variant or "").partition("=")
    return f"{name} other than {value}" if case.words().get(name) == value else None


def _divides(case: ParallelCase, variant: str | None) -> str | None:
    tp, cp = map(int, (variant or "1x1").split("x"))
    return None if case.heads % (tp * cp) == 0 else f"heads that {tp} * {cp} ranks can share"


def _kinds(domain: PathDomain) -> list[str]:
    """Return the histories that can happen to calls of a domain."""
    can = {"refused": domain.refuses and domain.operation == "gdn_layer", "in_flight": domain.backward and not domain.steps}
    return [kind for kind in HISTORIES if can.get(kind, True)]


def _histories(domain: PathDomain) -> st.SearchStrategy[Example]:
    """Return examples of every history that can happen to calls of a domain. A cache may keep the lengths of packed sequences."""

    def possible(case: ParallelCase) -> list[str]:
        kinds = _kinds(domain)
        return [kind for kind in kinds if _lacks_history(case, kind) is None]

    drawn = [path_cases(domain, tokens=40, chunked=0.0)]
    if any(form.packed for form in domain.drawing.forms) if domain.drawing.forms else domain.packed:
        several = path_cases(domain, tokens=40, chunked=0.0, packed=True)
        drawn.append(several.filter(lambda case: len({*case.lengths}) > 1))
    return either([all_variants(cases, possible) for cases in drawn])


def _lacks_history(case: ParallelCase, variant: str | None) -> str | None:
    if variant in ("gradients", "in_flight") and not case.backward:
        return "backward=yes"
    if variant in ("alone", "failed") and case_ranks(case) == 1:
        return "more than one rank"
    if variant == "refused" and (case.operation != "gdn_layer" or not illegal_of(case)):
        return "op=gdn_layer with packed=yes or more than one rank"
    return None


# For laws that run no layer, or only count its collectives, one way to compute it is enough.
_QUICK: dict[str, Any] = {"conv": "torch", "qk_norm": "separate", "rule": "torch", "chunked": 0.0}
_IN_TORCH: dict[str, Any] = {"conv": "torch", "rule": "torch", "chunked": 0.0}  # what it shows does not depend on kernels
_EXCHANGES: dict[str, Any] = {**_QUICK, "exchanges": True}
LAYOUT_ONLY = {**_EXCHANGES, "hidden": 1, "conv_bias": False, "values": "ordinary", "key_dim": (1, 2, 3), "value_dim": (1, 2, 3)}
EVERY_CHOICE = tuple(f"{name}={value}" for name, values in CHOICES.items() for value in values)
PATH_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "parallel",
            "truth",
            "outputs and every gradient equal the float64 definition, on tp x cp ranks and on one rank",
            lambda domain: _paths(path_cases(domain, tokens=100)),
            checks.parallel,
            _needs(computes=True),
            always=lambda domain: [Example(case) for case in limits(domain)],
        ),
        Law(
            "same",
            "truth",
            "a choice of how to compute changes nothing but rounding",
            lambda domain: _paths(path_cases(domain, tokens=60), _others(domain)),
            checks.same,
            lambda domain: _needs_layer(computes=True)(domain) or (None if _alternatives(domain) else "the path has no choices"),
            variants=EVERY_CHOICE,
            lacks=_changes,
        ),
        Law(
            "exchange",
            "exact",
            "tagged numbers arrive where the layout puts them, from tokens to heads or back, and so do their gradients",
            lambda domain: _paths(path_cases(_many(domain), tokens=400, dtype=_plainest(domain), **LAYOUT_ONLY), lambda case: WAYS),
            checks.exchange,
            _needs_layer(exchanges=True),
            variants=WAYS,
            within=_many,
        ),
        Law(
            "round_trip",
            "exact",
            "the exchange from tokens to heads and back is the identity, forward and backward, bit for bit",
            lambda domain: _paths(path_cases(_many(domain), tokens=400, dtype=_plainest(domain), **LAYOUT_ONLY)),
            checks.round_trip,
            _needs_layer(exchanges=True),
            within=_many,
        ),
        Law(
            "fused",
            "exact",
            "the fused exchange equals a separate exchange for each sequence, forward and backward, bit for bit",
            lambda domain: _paths(
                path_cases(_many(domain), tokens=400, dtype=_plainest(domain), packed=True, **LAYOUT_ONLY).filter(
                    lambda case: case.tokens > 0
                )
            ),
            checks.fused,
            lambda domain: (
                _needs_layer(exchanges=True, packed=True)(domain) or _has("thd_all_to_all", "fused", "per_sequence")(domain)
            ),
            within=_many,
        ),
        Law(
            "traffic",
            "exact",
            "the number and bytes of all-to-alls are as designed: one each way if fused, else one for each section of a sequence",
            lambda domain: _paths(path_cases(domain, tokens=60, dtype=_plainest(domain), **_EXCHANGES)),
            checks.traffic,
            _needs_layer(counts=True),
        ),
        Law(
            "refused",
            "exact",
            "an illegal layout is refused on every rank with the same message, before any communication",
            lambda domain: _paths(
                path_cases(domain, tokens=60, dtype=_plainest(domain), **_QUICK),
                illegal_of,
            ),
            checks.refused,
            lambda domain: (
                _needs_layer(refuses=True)(domain)
                or (None if domain.packed or domain.ranks > 1 else "one rank can split no batch in an illegal way")
            ),
            variants=ILLEGAL,
            lacks=lacking_for,
        ),
        Law(
            "reshard",
            "exact",
            "a checkpoint is cut section by section, and loads on any other mesh, bit for bit",
            lambda domain: _paths(
                path_cases(domain, tokens=16, dtype=_plainest(domain), **_QUICK),
                lambda case: [mesh for mesh in MESHES if _divides(case, mesh) is None],
            ),
            checks.reshard,
            lambda domain: _needs_layer(**({} if domain.saves else {"checkpoints": True}))(domain),
            variants=MESHES,
            lacks=_divides,
        ),
        Law(
            "repeats",
            "exact",
            "a second run gives the same bits in cases with deterministic=yes",
            lambda domain: _paths(path_cases(domain, tokens=60, deterministic=True)),
            checks.repeats,
            _needs(deterministic=True),
            lacks=lambda case, _: None if case.deterministic else "deterministic=yes",
        ),
        Law(
            "replicas",
            "exact",
            "TP ranks that hold the same output, or the same gradient of hidden states, hold the same bits",
            lambda domain: _paths(path_cases(domain, tokens=40, sp=False, mesh=_with_tp(domain), **_IN_TORCH)),
            checks.replicas,
            lambda domain: _needs_layer(computes=True, replicas=True)(domain) or _sharing_heads(domain),
            lacks=lambda case, _: None if case.tp > 1 and not case.sp else "tp over 1 and sp=no",
            few=10,
        ),
        Law(
            "accumulated",
            "truth",
            "gradients of several micro-batches add up in place, and are right where some inputs require none",
            lambda domain: _paths(
                path_cases(domain, tokens=40, values="ordinary", **_IN_TORCH).filter(_goes_back), lambda case: ("frozen", None)
            ),
            checks.accumulated,
            _needs(computes=True, backward=True, steps=False),
            variants=("frozen",),
            plain=True,
            lacks=lambda case, _: None if case.backward else "backward=yes",
            turns=lambda domain: ("frozen",),
            few=10,
        ),
        Law(
            "clipped",
            "truth",
            "gradients are clipped to their norm over all ranks, and are left alone if it is below the limit",
            lambda domain: _paths(_of_gradients(domain)),
            checks.clipped,
            lambda domain: _needs_layer(clips=True)(domain) or _sharing_heads(domain),
            lacks=lambda case, _: None if case.tp > 1 else "tp over 1",
        ),
        Law(
            "skipped",
            "exact",
            "every rank skips a step in which a gradient on any rank is not finite, and no other step",
            lambda domain: _paths(_of_gradients(domain), lambda case: NUMBERS),
            checks.skipped,
            lambda domain: _needs_layer(skips=True)(domain) or _sharing_heads(domain),
            variants=NUMBERS,
            lacks=lambda case, _: None if case.tp > 1 else "tp over 1",
        ),
        Law(
            "earlier",  # not `history`: a line with op=gdn_layer and that law is one of layers
            "truth",
            "a call gives what it gives in a fresh process, whatever calls its ranks ran before it, and in any memory",
            _histories,
            checks.earlier,
            _needs(computes=True),
            variants=HISTORIES,
            lacks=_lacks_history,
            of_process=True,
            turns=_kinds,
            always=lambda domain: [Example(case, None, "others") for case in unequal(domain)],
        ),
    )
}
