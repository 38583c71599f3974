"""The cases of `twin`: calls that both implementations promise to take."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from properties.layers.domain import LayerDomain
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from verify.adapters.pooled import gated_domain, rule_domain
from verify.execution.norms import with_norm

SMALL = 130  # most tokens of the case with small values
WIDTHS = {"cpu": (32, 64, 16, 128, 8), "cuda": (128, 64, 32, 256, 16, 8)}
HEADS = ((1, 2), (1, 1))  # q and k, and v
NORM = ("qk_norm_eps", "qk_norm_form")
FIRST = {"dtype": ("bf16", "fp16", "fp32"), "qk_norm": (True, False), "dt_bias": (True, False), "conv_bias": (True, False)}
VARIED = ("dtype", "packed", "in_kernel", "decay", "qk_norm", "dt_bias", "conv_bias", "allow_neg_eigval", "cached", "scale")


def comparable(domain: Any) -> Any:
    """The domain of the calls that `twin` makes: those of a rule for a kernel on a pool. ValueError for other operations."""
    if isinstance(domain, PoolDomain):
        return rule_domain(domain)
    if isinstance(domain, Domain | LayerDomain):
        return domain
    raise ValueError(f"twin compares rules, kernels on pools and layers, got {domain.operation}: use compare for other operations")


def cases_of(domains: Sequence[Any], tokens: int, device: str, seed: int) -> list[Any]:
    """The case of `tokens` tokens in each of two sequences, and a short one whose q and k are about as small as their norm's eps.

    Packed calls have one sequence. ValueError, with a reason, if the domains have no case in common.
    """
    case = _shared(domains, tokens, device, seed)
    if not getattr(case, "qk_norm", True):
        return [case]
    small = dataclasses.replace(case, values="small", lengths=tuple(min(length, SMALL) for length in case.lengths))
    return [case, small]


def declared_for(case: Any, domain: Any) -> dict[str, Any]:
    """What must be declared so that an implementation can be called and judged: the case's norm, and gates computed before."""
    norm = {name: getattr(case, name) for name in NORM}
    known = norm["qk_norm_eps"] in domain.qk_norm_eps and norm["qk_norm_form"] in domain.qk_norm_forms
    declared: dict[str, Any] = {} if known or not getattr(case, "qk_norm", True) else norm
    gated = isinstance(case, Case) and case.in_kernel not in domain.in_kernel
    return {**declared, "gated": True} if gated else declared


def suited(case: Any, domain: Any) -> Any:
    """The case with the words of a domain that change no input."""
    own = {name: getattr(domain, name) for name in ("final_dtype", "final_states") if hasattr(case, name)}
    return dataclasses.replace(case, **own)


def carries(case: Any) -> bool:
    """Whether calls of a case return the states with which a next call goes on."""
    return bool(getattr(case, "cached", True)) and getattr(case, "final_states", "each") != "none"


def _shared(domains: Sequence[Any], tokens: int, device: str, seed: int) -> Any:
    first, kind = domains[0], domains[0].CASE
    rules = isinstance(first, Domain)
    words: dict[str, Sequence[Any]] = {"packed": (False, True)}
    for name, promise in first.PROMISES.items():
        values: list[Any] = [False, True]
        if promise.how == "some":
            values = [value for value in getattr(first, name) if all(value in getattr(other, name) for other in domains)]
            values = values or _given_before(domains, name) or [*getattr(first, name)][:1]
        if promise.how == "some" or (promise.how == "flag" and isinstance(promise.value, bool)):  # not gate=strong, say
            words[promise.word] = sorted(values, key=(*FIRST.get(promise.word, values), *values).index)
    words |= {"scale": ("default", "one", "half")} if rules else {"cached": (True, False)}
    words["backward"] = (False,)
    words = {word: values if word in VARIED else values[:1] for word, values in words.items()}
    fixed = {"operation": first.operation, "seed": seed, "gate": "1000" if rules else "long"}
    widths = sorted(itertools.product(WIDTHS[device], repeat=2), key=lambda pair: pair[0] != pair[1])
    order = [word for word in VARIED if word in words] + [word for word in words if word not in VARIED]
    reasons = collections.Counter[str]()
    for *values, (key, value), (heads, value_heads) in itertools.product(*(words[word] for word in order), widths, HEADS):
        chosen = dict(zip(order, values, strict=True))
        sizes = {"key_dim": key, "value_dim": value, "heads": heads, "value_heads": value_heads}
        sizes |= {} if rules else {"hidden": key}
        try:
            case = kind(lengths=(tokens,) * (1 if chosen["packed"] else 2), **fixed, **chosen, **sizes)
            found = [_outside(suited(case, domain), domain) for domain in domains]
        except ValueError as error:
            found = [str(error)]
        if not any(found):
            return case
        reasons.update(filter(None, found))
    raise ValueError(f"the two have no case of {tokens} tokens in common: {reasons.most_common(1)[0][0]}")


def _given_before(domains: Sequence[Any], name: str) -> list[str]:
    """What the one kernel computes inside if the other one is given all of that."""
    inside = [value for domain in domains for value in getattr(domain, name) if value != "none"]
    return inside if name == "in_kernel" and any(domain.in_kernel == ("none",) for domain in domains) else []


def _outside(case: Any, domain: Any) -> str | None:
    declared = declared_for(case, domain)
    if declared.pop("gated", False) and "log" in domain.decays and "none" in domain.in_kernel:
        domain = gated_domain(domain)
    reason: str | None = (with_norm(domain, **declared) if declared else domain).outside(case)
    return reason
