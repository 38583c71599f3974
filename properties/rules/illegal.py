"""Illegal inputs of rules: legal calls with one argument made wrong."""

import dataclasses
from collections.abc import Callable

import torch

from oracles.operation import Inputs
from oracles.operations import RULES
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import conventions
from properties.words.illegal import IllegalInputs, near

PACKED = Case((5, 12), packed=True, heads=2, value_heads=4, state="zero", backward=False)


def _ends_early(x: Inputs) -> Inputs:
    offsets = x.cu_seqlens.clone()
    offsets[-1] -= 1
    return x.replaced(cu_seqlens=offsets)


def _starts_late(x: Inputs) -> Inputs:
    offsets = x.cu_seqlens.clone()
    offsets[0] = 1
    return x.replaced(cu_seqlens=offsets)


def _decreasing(x: Inputs) -> Inputs:
    """Make offsets decrease; there are three sequences with a state for each, so that only the order is wrong."""
    state, (_, middle, end) = x.get("state"), x.cu_seqlens.tolist()
    states = {} if state is None else {"state": torch.cat([state, state[:1]])}
    return x.replaced(cu_seqlens=x.cu_seqlens.new_tensor([0, end - middle, middle, end]), **states)


def _value_heads(x: Inputs) -> Inputs:
    heads = {name: x[name][:, :, :3] for name in ("v", "g", "alpha", "beta") if x.get(name) is not None}
    return x.replaced(**heads, state=x.state[:, :3])


def _shorter_gate(x: Inputs) -> Inputs:
    name = "g" if x.get("alpha") is None else "alpha"
    return x.replaced(**{name: x[name][:, :-1]})


OF_RULES: dict[str, Callable[[Inputs], Inputs]] = {
    "cu_seqlens that decrease": _decreasing,
    "cu_seqlens that end before the tokens do": _ends_early,
    "cu_seqlens that do not start at 0": _starts_late,
    "one initial state for two sequences": lambda x: x.replaced(state=x.state[:1]),
    "HV not a multiple of H": _value_heads,
    "g of another length": _shorter_gate,
    "q and k of different widths": lambda x: x.replaced(q=x.q[..., : x.q.shape[-1] // 2].contiguous()),
}


def _rule_call(name: str, domain: Domain) -> tuple[Case, Inputs] | str:
    """Return a packed call with a state inside the domain, and its inputs with one argument made wrong; or why there is none."""
    if not domain.packed or not domain.initial_state:
        return "packed input with a state is unsupported"
    if "none" not in domain.in_kernel:
        return "explicit gates are unsupported"
    if not domain.grouped_heads and OF_RULES[name] is _value_heads:
        return "grouped heads are unsupported"
    if domain.operation == "delta_rule" and name.startswith("g "):
        return "the delta rule has no gate"
    if domain.initial_states == "first" and name.startswith("one initial state"):
        return "a state for each sequence is unsupported"
    case = _packed_case(domain)
    if reason := domain.outside(case):
        return f"the call is outside the domain: {reason}"
    return case, OF_RULES[name](case.inputs())


def _packed_case(domain: Domain) -> Case:
    """Return a packed call of two sequences with a state in the conventions of a domain, with even widths near 16."""
    step, key_dim = domain.length_step, near(domain.has_key, PACKED.key_dim)
    return dataclasses.replace(
        PACKED,
        **{**conventions(domain), "final_states": domain.final_states},
        lengths=PACKED.lengths if step == 1 else (step, 2 * step),
        value_heads=PACKED.value_heads if domain.grouped_heads else PACKED.heads,
        key_dim=key_dim,
        value_dim=key_dim if domain.equal_widths else near(domain.has_value, PACKED.value_dim),
        offsets=domain.offsets[0],
        state_dtype=domain.state_dtypes[0],
        initial_states=domain.initial_states,
    )


RULE_INPUTS = IllegalInputs(lambda operation: list(OF_RULES if operation in RULES else ()), _rule_call)
