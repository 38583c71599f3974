"""Illegal inputs of decode on a pool of states: slots, lengths and widths that do not fit each other."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from oracles.operation import Inputs
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.rules.drawing import gates_of
from properties.rules.illegal import OF_RULES
from properties.words.illegal import IllegalInputs, near

BASE = PoolCase((1, 2), packed=True, heads=2, value_heads=4, spare=1)
OF_TOKENS = ("v", "g", "beta", "a", "b", "alpha")  # axes [B, T, HV, ...]
OF_HEADS = ("A_log", "dt_bias")  # axes [HV, ...]


def _with_slots(x: Inputs, *slots: int) -> Inputs:
    return x.replaced(slots=x.slots.new_tensor(slots))


def _decreasing(x: Inputs) -> Inputs:
    """Make offsets decrease; there are three requests with a slot for each, so that only the order is wrong."""
    _, middle, end = x.cu_seqlens.tolist()
    used = x.slots.tolist()
    third = next(slot for slot in range(len(x.pool)) if slot not in used and slot != x.padding)
    return _with_slots(x, *used, third).replaced(cu_seqlens=x.cu_seqlens.new_tensor([0, end, middle, end]))


def _three_value_heads(x: Inputs) -> Inputs:
    heads = {name: x[name][:, :, :3] for name in OF_TOKENS if x.get(name) is not None}
    heads |= {name: x[name][:3] for name in OF_HEADS if x.get(name) is not None}
    return x.replaced(**heads, pool=x.pool[:, :3])


def _shorter_gate(x: Inputs) -> Inputs:
    name = next(name for name in ("g", "alpha", "a") if x.get(name) is not None)
    return x.replaced(**{name: x[name][:, :-1]})


def _more_accepted(x: Inputs) -> Inputs:
    return x.replaced(accepted=torch.cat([x.accepted[:-1], x.accepted[-1:] * 0 + 3]))


def _own_parent(x: Inputs) -> Inputs:
    """Let the last token follow itself."""
    parents = x.parents.clone()
    parents[:, -1] = 1
    return x.replaced(parents=parents)


OF_POOLS: dict[str, Callable[[Inputs], Inputs]] = {
    "a slot beyond the pool": lambda x: _with_slots(x, int(x.slots[0]), len(x.pool)),
    "a negative slot that is not the padding slot": lambda x: _with_slots(x, int(x.slots[0]), min(x.padding, 0) - 1),
    "one slot for two requests": lambda x: _with_slots(x, int(x.slots[0]), int(x.slots[0])),
    "slots of one request for two": lambda x: x.replaced(slots=x.slots[:1]),
    "a pool of fewer heads": lambda x: x.replaced(pool=x.pool[:, :-1]),
    "a pool of narrower keys": lambda x: x.replaced(pool=x.pool[:, :, : x.pool.shape[2] // 2]),
    "a pool of narrower values": lambda x: x.replaced(pool=x.pool[..., : x.pool.shape[3] // 2]),
    **{name: change for name, change in OF_RULES.items() if name.startswith("cu_seqlens")},
    "cu_seqlens that decrease": _decreasing,
    "HV not a multiple of H": _three_value_heads,
    "q and k of different widths": OF_RULES["q and k of different widths"],
    "a gate of another length": _shorter_gate,
    "has_initial_state of one request for two": lambda x: x.replaced(has_initial_state=x.has_initial_state[:1]),
    "more accepted tokens than drafted": _more_accepted,
    "a draft token that follows itself": _own_parent,
}
# The words of a case that has the argument that an illegal input is about.
_WORDS = {
    "has_initial_state of one request for two": {"fresh": "some"},
    "more accepted tokens than drafted": {"accepted": "some"},
    "a draft token that follows itself": {"drafts": "tree"},
}


def _pool_call(name: str, domain: PoolDomain) -> tuple[PoolCase, Inputs] | str:
    """Return a legal call inside the domain, and its inputs with one argument made wrong; or the reason why there is none."""
    if lacking := _lacking(name, domain):
        return f"{lacking} is unsupported"
    words: dict[str, Any] = _WORDS.get(name, {})
    case = dataclasses.replace(_case(domain), **words)
    if reason := domain.outside(case):
        return f"the call is outside the domain: {reason}"
    return case, OF_POOLS[name](case.inputs())


def _lacking(name: str, domain: PoolDomain) -> str | None:
    """Return what the domain does not support of what the input is about, or None."""
    drafts = domain.most_tokens > 1
    lacks = {
        "cu_seqlens": (domain.rule.packed, "packed input"),
        "HV": (domain.rule.grouped_heads, "a group of value heads for each key head"),
        "has_initial_state": (domain.fresh, "starting from zeros"),
        "more accepted": (domain.accepts and drafts, "keeping part of a draft"),
        "a draft token": (domain.trees and drafts, "drafts=tree"),
    }
    return next((what for start, (has, what) in lacks.items() if name.startswith(start) and not has), None)


def _case(domain: PoolDomain) -> PoolCase:
    """Return a call of two requests in the conventions of a domain; the second has two tokens if that is possible."""
    rule = domain.rule
    longest = min(domain.most_tokens, 2)
    linear = "log" not in rule.decays and rule.in_kernel[0] not in ("gate", "both")
    key_dim = near(rule.has_key, BASE.key_dim)
    kernel = {"in_kernel": rule.in_kernel[0], "decay": "linear" if linear else "log"}
    return dataclasses.replace(
        BASE,
        lengths=(1 if rule.packed else longest, longest),
        packed=rule.packed,
        value_heads=BASE.value_heads if rule.grouped_heads else BASE.heads,
        key_dim=key_dim,
        value_dim=key_dim if rule.equal_widths else near(rule.has_value, BASE.value_dim),
        dtype=rule.dtypes[0],
        gate=gates_of(rule, rule.in_kernel[0], kernel)[0],
        gate_dtype=rule.gate_dtypes[0],
        scale=rule.drawn_scales[0],
        offsets=rule.offsets[0] if rule.packed else "int64",
        padding_slot=(*domain.padding_slots, "-1")[0],
        indices=domain.indices[0],
        rule=rule.operation,
        in_kernel=kernel["in_kernel"],
        decay=kernel["decay"],
        parameter_dtype=rule.parameter_dtypes[0] if rule.in_kernel[0] in ("gate", "both") else "fp32",
        state_dtype=domain.states_of(rule.dtypes[0])[0],
    )


POOL_INPUTS = IllegalInputs(lambda operation: list(OF_POOLS), _pool_call)
