"""Illegal inputs of rules and modules: legal calls with one argument made wrong, which our own contract refuses.

A kernel may leave the test to its caller, because it costs a device synchronisation. But users should know that it does. The
illegal inputs of the other books are in illegal_pools.py, illegal_layers.py, illegal_layouts.py (paths) and illegal_events.py
(traces).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from oracles.operation import Inputs
from oracles.operations import RULES
from properties.cases.module_case import ModuleCase, words_of
from properties.cases.rule_case import MAX_WIDTH, Case
from properties.domain import Domain
from properties.module_domain import ModuleDomain
from properties.strategies import conventions


@dataclasses.dataclass(frozen=True)
class IllegalInputs:
    """The illegal inputs of a book: their `names` for an operation, and the `call` of a name inside a domain.

    `call` returns a case inside the domain, and what is wrong: the case's inputs with one argument made wrong, for a path an
    IllegalLayout, or for an engine a Step that cannot follow the case's trace. If the domain does not support what the input is
    about, it returns the reason as text. `check` is our own contract: it raises ValueError for what is wrong.
    """

    names: Callable[[str], list[str]] = lambda operation: []
    call: Callable[[str, Any], tuple[Any, Any] | str] = lambda name, domain: f"there are none of {domain.operation}"
    check: Callable[[Any, Any], None] = lambda case, inputs: case.spec.check(inputs)


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


# For a layer's modules: calls in which one argument would have to be broadcast, cut off or read beyond its end.
OF_MODULES: dict[str, dict[str, Callable[[Inputs], Inputs]]] = {
    "causal_conv1d": {
        **{name: change for name, change in OF_RULES.items() if name.startswith("cu_seqlens")},
        "one initial state for two sequences": lambda x: x.replaced(state=x.state[:1]),
        "an initial state without its oldest column": lambda x: x.replaced(state=x.state[..., 1:].contiguous()),
        "a weight of fewer channels": lambda x: x.replaced(weight=x.weight[:-1]),
        "a bias of one channel": lambda x: x.replaced(bias=x.bias[:1]),
    },
    **{
        operation: {
            "A_log of one head for two": lambda x: x.replaced(A_log=x.A_log[:1]),
            "dt_bias of one head for two": lambda x: x.replaced(dt_bias=x.dt_bias[:1]),
        }
        for operation in ("gdn_gate", "kda_gate")
    },
    "gated_rms_norm": {
        "a weight of one channel": lambda x: x.replaced(weight=x.weight[:1]),
        "z of one head for two": lambda x: x.replaced(z=x.z[:, :, :1]),
    },
    "norm_gate_linear": {
        "a weight of one channel": lambda x: x.replaced(weight=x.weight[:1]),
        "z of fewer channels": lambda x: x.replaced(z=x.z[..., :-1].contiguous()),
        "linear of fewer channels": lambda x: x.replaced(linear=x.linear[:, :-1].contiguous()),
        "a bias of one channel": lambda x: x.replaced(bias=x.bias[:1]),
    },
}


# Words of a module's case, and the field of a domain with their choices. The call has the first choice.
_CHOSEN = {
    "activation": "activations",
    "eps": "eps",
    "gating": "gatings",
    "lower_bound": "lower_bounds",
    "offsets": "offsets",
    "parameter_dtype": "parameter_dtypes",
    "residual": "residuals",
}


def _module_call(name: str, domain: ModuleDomain) -> tuple[ModuleCase, Inputs] | str:
    """Return a legal call inside the domain, and its inputs with one argument made wrong; or the reason why there is none."""
    if lacking := _lacking(name, domain):
        return lacking
    if domain.operation == "causal_conv1d":
        packed = {"lengths": (5, 12), "packed": True} if domain.packed else {"lengths": (8, 8)}
        about = {**packed, "bias": domain.bias, "state": "zero" if domain.initial_state else "none"}
        about |= {"conv_width": _taps(domain), "final_state": domain.final_state, "state_columns": domain.state_columns}
    elif domain.operation == "norm_gate_linear":
        about = {"lengths": (8, 8), "bias": domain.bias}
    else:
        about = {"lengths": (8, 8), "heads": 2}
    words = words_of(domain.operation)
    about |= {"beta": domain.beta} if "beta" in words else {}
    about |= {name: near(domain.has_width, 16) for name in ("width", "out_width") if name in words}
    about |= {name: getattr(domain, field)[0] for name, field in _CHOSEN.items() if name in words}
    case = ModuleCase(operation=domain.operation, dtype=domain.dtypes[0], backward=False, **about)  # type: ignore[arg-type]
    if reason := domain.outside(case):
        return f"the call is outside the domain: {reason}"
    return case, OF_MODULES[domain.operation][name](case.inputs())


def _taps(domain: ModuleDomain) -> int:
    """Return the first of the domain's conv_widths with which a state has columns, if there is one."""
    return next((width for width in domain.conv_widths if width > 1), domain.conv_widths[0])


def _lacking(name: str, domain: ModuleDomain) -> str | None:
    """Return what the domain does not support of what the input is about, or None."""
    lacks = {
        "cu_seqlens": (domain.packed, "packed input"),
        "one initial state": (domain.initial_state, "an initial state"),
        "an initial state": (domain.initial_state, "an initial state"),
        "an initial state without": (domain.state_columns == "W" or _taps(domain) > 1, "an initial state with columns"),
        "a bias": (domain.bias, "a bias"),
    }
    found = next((what for start, (has, what) in lacks.items() if name.startswith(start) and not has), None)
    return None if found is None else f"{found} is unsupported"


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


def near(has: Callable[[int], bool], width: int) -> int:
    """Return a width that the domain has: the next one from `width` on in steps of 2, or the next larger or smaller one.

    Even widths can be halved. Return `width` itself if the domain has none.
    """
    widths = (*range(width, MAX_WIDTH + 1, 2), *range(width + 1, MAX_WIDTH + 1, 2), *range(width, 0, -1))
    return next((candidate for candidate in widths if has(candidate)), width)


NO_INPUTS = IllegalInputs()
RULE_INPUTS = IllegalInputs(lambda operation: list(OF_RULES if operation in RULES else ()), _rule_call)
MODULE_INPUTS = IllegalInputs(lambda operation: list(OF_MODULES.get(operation, ())), _module_call)
