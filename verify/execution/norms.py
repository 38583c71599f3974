"""The norm of q and k by which a run is judged in place of that of its case."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from properties.pools.domain import PoolDomain
from properties.rules.numbers import NORM_EPS


def with_norm(domain: Any, qk_norm_eps: str, qk_norm_form: str) -> Any:
    """The domain of a rule, a pool, a layer or an engine with one more eps and form of the norm of q and k."""
    if isinstance(domain, PoolDomain):
        return dataclasses.replace(domain, rule=with_norm(domain.rule, qk_norm_eps, qk_norm_form))
    eps, forms = (*domain.qk_norm_eps, qk_norm_eps), (*domain.qk_norm_forms, qk_norm_form)
    return dataclasses.replace(domain, qk_norm_eps=tuple(dict.fromkeys(eps)), qk_norm_forms=tuple(dict.fromkeys(forms)))


def norm_in(declared: Mapping[str, Any]) -> dict[str, Any]:
    """The norm that a call has in place of the case's, from words that replace those of the case; {} if there are none."""
    if "qk_norm_eps" not in declared:
        return {}
    return {"qk_norm_eps": NORM_EPS[declared["qk_norm_eps"]], "qk_norm_form": declared["qk_norm_form"]}
