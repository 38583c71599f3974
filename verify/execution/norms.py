"""The norm of q and k by which a run is judged in place of that of its case."""

import dataclasses
from typing import Any

from properties.pools.domain import PoolDomain


def with_norm(domain: Any, qk_norm_eps: str, qk_norm_form: str) -> Any:
    """The domain of a rule, a pool, a layer or an engine with one more eps and form of the norm of q and k."""
    if isinstance(domain, PoolDomain):
        return dataclasses.replace(domain, rule=with_norm(domain.rule, qk_norm_eps, qk_norm_form))
    eps, forms = (*domain.qk_norm_eps, qk_norm_eps), (*domain.qk_norm_forms, qk_norm_form)
    return dataclasses.replace(domain, qk_norm_eps=tuple(dict.fromkeys(eps)), qk_norm_forms=tuple(dict.fromkeys(forms)))
