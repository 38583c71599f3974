"""How cases of rules shrink, and steps that cases of pools share."""

import itertools
from typing import Any

from oracles.norm import NORM_FORMS
from properties.rules.case import Case
from properties.rules.numbers import NORM_EPS
from properties.words.smaller import (
    Changes,
    Smaller,
    fewer_heads,
    fewer_options,
    fewer_sequences,
    longer_sequences,
    other_values,
    shorter_sequences,
    unpacked,
)
from properties.words.word import text_of


def other_dt_bias(case: Any) -> Changes:
    """Yield the case without dt_bias if the kernel computes its gate. Where it does not, dt_bias has its default."""
    inside = case.in_kernel in ("gate", "both")
    if case.dt_bias is inside:
        yield f"dt_bias={text_of(not inside)}", {"dt_bias": not inside}


def without_norm(case: Any) -> Changes:
    """Yield the case without a norm of q and k, and so without the norm's eps and form."""
    if case.qk_norm:
        yield "qk_norm=no", {"qk_norm": False, "qk_norm_eps": "1e-6", "qk_norm_form": "inside"}


def with_norm(case: Any) -> Changes:
    """Yield the case with a norm, in each form and with each eps; one of them is inside the domain."""
    for form, eps in itertools.product(NORM_FORMS, NORM_EPS) if not case.qk_norm else ():
        changes = {"qk_norm": True, "qk_norm_eps": eps, "qk_norm_form": form}
        default = {"qk_norm_eps": "1e-6", "qk_norm_form": "inside"}
        yield " ".join(f"{name}={text_of(value)}" for name, value in changes.items() if default.get(name) != value), changes


SMALLER_RULES = Smaller(
    Case,
    (fewer_sequences, unpacked, shorter_sequences, fewer_heads, other_dt_bias, without_norm, fewer_options),
    ("key_dim", "value_dim"),
    telling=(longer_sequences, with_norm, other_values(scale=("one",))),
)
