"""Illegal layouts of parallel paths: tokens, offsets and heads that ranks cannot share as a legal call's ranks do."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from oracles import parallel
from oracles.operation import check_offsets
from oracles.sharding import Rank
from properties.paths.case import LAYOUTS, ParallelCase
from properties.paths.domain import PathDomain, case_ranks
from properties.words.illegal import IllegalInputs


@dataclasses.dataclass(frozen=True)
class IllegalLayout:
    """What the ranks of a case are told otherwise than in the case.

    `lengths` are the sequences in cu_seqlens, or () to leave it as it is, and `start` is its first entry. `longer` says which ranks
    hold one token more than in the case: "none", "first" or "all". `heads` are the key heads of the layer, or 0 to leave them, with
    two value heads for each.
    """

    lengths: tuple[int, ...] = ()
    start: int = 0
    longer: str = "none"
    heads: int = 0

    def offsets(self) -> list[int]:
        """Return the entries of cu_seqlens."""
        return [*itertools.accumulate(self.lengths, initial=self.start)]

    def is_longer(self, rank: Rank) -> bool:
        """Return whether a rank holds one token more."""
        return self.longer == "all" or (self.longer == "first" and rank == Rank(rank.mesh))


def check_layout(case: ParallelCase, wrong: IllegalLayout) -> None:
    """Raise ValueError if the ranks of a case cannot share what they are told; the message names the value and the rule."""
    if wrong.heads:
        dataclasses.replace(case, heads=wrong.heads, value_heads=2 * wrong.heads)
    added = {"none": 0, "first": 1, "all": case.cp}[wrong.longer]
    if not case.packed:
        dataclasses.replace(case, lengths=tuple(length + added for length in case.lengths))
    elif case.padding != "none":
        parallel.real_tokens(wrong.lengths, case.padded)
    elif wrong.lengths:
        check_offsets(torch.tensor(wrong.offsets()), 1, case.tokens + added)
        dataclasses.replace(case, lengths=wrong.lengths)


def _a_token_each(case: ParallelCase) -> IllegalLayout:
    """Give each rank one token more, so that nothing but the length is wrong: cp divides it, and 2 cp does not."""
    return IllegalLayout((case.cp, *case.padded) if case.packed else (), longer="all")


def _a_token(case: ParallelCase) -> IllegalLayout:
    """Give the first rank one token more, as if the ranks shared the tokens as evenly as they can."""
    return IllegalLayout((1, *case.padded) if case.packed else (), longer="first")


def _ends_early(case: ParallelCase) -> IllegalLayout:
    return IllegalLayout((*case.padded[:-1], case.padded[-1] - 2 * case.cp))


def _starts_late(case: ParallelCase) -> IllegalLayout:
    return IllegalLayout((case.padded[0] - 2 * case.cp, *case.padded[1:]), start=2 * case.cp)


def _more_than_padded(case: ParallelCase) -> IllegalLayout:
    """Let the first sequence have a token more than the room that it has with padding, and the last one a token less."""
    return IllegalLayout((case.padded[0] + 1, *case.lengths[1:-1], case.lengths[-1] - 1))


Change = Callable[[ParallelCase], IllegalLayout]
_TWICE, _ONCE, _OVER_TP = "tokens that 2 cp does not divide", "tokens that cp does not divide", "tokens that tp does not divide"
_HEADS, _PADDED = "heads that the ranks do not divide", "cu_seqlens_padded with less room than a sequence needs"
_BEYOND = "cu_seqlens that end after the tokens do"
CHANGES: dict[str, Change] = {
    _TWICE: _a_token_each,
    _ONCE: _a_token,
    _OVER_TP: _a_token,
    _BEYOND: lambda case: IllegalLayout((*case.padded, 2 * case.cp)),
    "cu_seqlens that end before the tokens do": _ends_early,
    "cu_seqlens that do not start at 0": _starts_late,
    "cu_seqlens that decrease": lambda case: IllegalLayout((*case.padded, 2 * case.cp, -2 * case.cp)),
    _PADDED: _more_than_padded,
    _HEADS: lambda case: IllegalLayout(heads=case.heads + 1),
}
# The illegal layouts that the law `refused` judges, by the name of its variant (properties/paths/laws.py).
JUDGED = {"length": _TWICE, "total": _BEYOND, "order": "cu_seqlens that decrease", "heads": _HEADS}
_OF_LAYER = (_OVER_TP, _PADDED, _HEADS)
_CUT = {layout: (_TWICE, _ONCE) if layout.startswith("zigzag") else (_ONCE,) for layout in LAYOUTS}


def lacking_for(case: ParallelCase, variant: str | None) -> str | None:
    """Return what a case lacks to be made illegal in the way `variant`, a key of JUDGED; None if it lacks nothing."""
    if variant in ("length", "total", "order") and not case.packed:
        return "packed=yes"
    if variant == "length" and (case.cp == 1 or case.layout != "zigzag"):
        return "cp over 1 and layout=zigzag"
    if variant == "heads" and case_ranks(case) == 1:
        return "more than one rank"
    return None


def illegal_of(case: ParallelCase) -> list[str]:
    """Return the illegal layouts that can be made of a case."""
    return [variant for variant in JUDGED if lacking_for(case, variant) is None]


def _names(operation: str) -> list[str]:
    """Return the names for an operation. A layer has one layout; elsewhere, a name says the layout that cuts the tokens."""
    if operation == "gdn_layer":
        return list(CHANGES)
    cut = [f"{name} ({layout})" for layout, names in _CUT.items() for name in names]
    return [*cut, *(name for name in CHANGES if name not in (_TWICE, _ONCE, *_OF_LAYER))]


def _layout_call(name: str, domain: PathDomain) -> tuple[ParallelCase, IllegalLayout] | str:
    """Return a legal case inside the domain, and what its ranks are told instead; or the reason why there is none."""
    what, _, layout = name.removesuffix(")").partition(" (")
    layout = layout or domain.layouts[0]
    if lacking := _lacking(what, layout, domain):
        return f"{lacking} is unsupported"
    case = _case(what, layout, domain)
    if reason := domain.outside(case):
        return f"the call is outside the domain: {reason}"
    judged = domain.refuses and domain.operation == "gdn_layer" and what in JUDGED.values()
    if judged and (case.packed or what == _HEADS):
        return "the law refused judges this, because the domain has refuses=True"
    return case, CHANGES[what](case)


def _lacking(what: str, layout: str, domain: PathDomain) -> str | None:
    """Return what the domain does not support of what the illegal layout is about, or None."""
    checks = (
        (domain.computes, "more than exchanges"),
        (domain.ranks > 1, "more than one rank"),
        (layout in domain.layouts, f"layout={layout}"),
        (domain.packed or not what.startswith("cu_seqlens"), "packed input"),
        (domain.padded or what != _PADDED, "padding"),
        (what != _TWICE or layout.startswith("zigzag"), "a zigzag layout"),
        (what != _OVER_TP or (domain.tensor_parallel and domain.sequence_parallel), "sequence parallelism"),
    )
    return next((lacking for has, lacking in checks if not has), None)


def _case(what: str, layout: str, domain: PathDomain) -> ParallelCase:
    """Return a case of two ranks and two sequences in the conventions of a domain; its choices are the first ones."""
    over_tp = what == _OVER_TP
    layer = domain.operation == "gdn_layer"
    choices: dict[str, Any] = {name: _quick(name, values, domain) for name, values in domain.choices}
    return ParallelCase(
        ((7, 12) if what == _PADDED else (8, 12)) if domain.packed else (8, 8),
        domain.operation,
        tp=2 if over_tp else 1,
        cp=1 if over_tp else 2,
        sp=over_tp,
        layout=layout,
        packed=domain.packed,
        padding="least" if what == _PADDED else "none",
        heads=2,
        value_heads=4 if domain.grouped_heads else 2,
        key_dim=domain.widths[0],
        value_dim=domain.widths[0],
        conv_width=domain.conv_widths[0],
        dtype=domain.dtypes[0],
        offsets=domain.offsets[0] if domain.packed else "int64",
        backward=False,
        **{name: value for name, value in choices.items() if layer or name == "qk_norm"},
    )


def _quick(name: str, values: tuple[str, ...], domain: PathDomain) -> str:
    """Return the first value of a choice that is not slow, or the first one."""
    return next((value for value in values if f"{name}={value}" not in domain.slow), values[0])


LAYOUT_INPUTS = IllegalInputs(_names, _layout_call, check_layout)
