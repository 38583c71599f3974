"""Illegal inputs of whole layers: offsets, masks, parameters and states that do not fit each other."""

from collections.abc import Callable
from typing import Any

from oracles.operation import Inputs
from properties.layers.case import LayerCase
from properties.layers.domain import LayerDomain
from properties.rules.illegal import OF_RULES
from properties.words.illegal import IllegalInputs

MASK = "a mask of one row for two"
_OF_STATES: dict[str, Callable[[Inputs], Inputs]] = {
    "one recurrent state for two sequences": lambda x: x.replaced(state=x.state[:1]),
    "one convolution state for two sequences": lambda x: x.replaced(conv_state=x.conv_state[:1]),
    "a recurrent state of fewer heads": lambda x: x.replaced(state=x.state[:, :-1].contiguous()),
    "a convolution state without its oldest column": lambda x: x.replaced(conv_state=x.conv_state[..., 1:].contiguous()),
}
OF_BOTH: dict[str, Callable[[Inputs], Inputs]] = {
    **{name: change for name, change in OF_RULES.items() if name.startswith("cu_seqlens")},
    MASK: lambda x: x.replaced(pads=(1,)),
    "hidden states of another width": lambda x: x.replaced(hidden=x.hidden[..., :-1].contiguous()),
    "in_proj of fewer features": lambda x: x.replaced(in_proj=x.in_proj[:-1]),
    "a convolution weight of fewer channels": lambda x: x.replaced(conv=x.conv[:-1]),
    "a convolution bias of one channel": lambda x: x.replaced(conv_bias=x.conv_bias[:1]),
    "A_log of one head": lambda x: x.replaced(A_log=x.A_log[:1]),
    "dt_bias of one head": lambda x: x.replaced(dt_bias=x.dt_bias[:1]),
    "a norm weight of one channel": lambda x: x.replaced(norm=x.norm[:1]),
    "out_proj of fewer features": lambda x: x.replaced(out_proj=x.out_proj[:, :-1].contiguous()),
    **_OF_STATES,
}
OF_LAYERS: dict[str, dict[str, Callable[[Inputs], Inputs]]] = {
    "gdn_layer": OF_BOTH,
    "kda_layer": {
        **OF_BOTH,
        "decay_proj of fewer features": lambda x: x.replaced(decay_proj=x.decay_proj[:-1]),
        "gate_proj of fewer features": lambda x: x.replaced(gate_proj=x.gate_proj[:-1]),
        "gate_bias of one channel": lambda x: x.replaced(gate_bias=x.gate_bias[:1]),
    },
}


def _layer_call(name: str, domain: LayerDomain) -> tuple[LayerCase, Inputs] | str:
    """Return a legal call inside the domain, and its inputs with one argument made wrong; or the reason why there is none."""
    if lacking := _lacking(name, domain):
        return f"{lacking} is unsupported"
    case = _case(name, domain)
    if reason := domain.outside(case):
        return f"the call is outside the domain: {reason}"
    return case, OF_LAYERS[domain.operation][name](case.inputs())


def _lacking(name: str, domain: LayerDomain) -> str | None:
    """Return what the domain does not support of what the input is about, or None."""
    lacks = (
        (name.startswith("cu_seqlens"), domain.packed, "packed input"),
        (name == MASK, domain.attention_mask and domain.batched, "a mask"),
        (name == "a convolution bias of one channel", domain.conv_bias, "a convolution bias"),
        (name in _OF_STATES, domain.caches, "a state"),
    )
    return next((what for about, has, what in lacks if about and not has), None)


def _case(name: str, domain: LayerDomain) -> LayerCase:
    """Return a call of two sequences in the conventions of a domain; with states if the input is about them."""
    packed = domain.packed and (name != MASK)
    width, states = domain.widths[0], name in _OF_STATES
    about: dict[str, Any] = {"cached": True, "state": "zero"} if states else {}
    return LayerCase(
        (5, 12) if packed else (8, 8),
        domain.operation,
        packed=packed,
        heads=2,
        value_heads=4 if domain.grouped_heads else 2,
        key_dim=width,
        value_dim=width,
        hidden=width,
        conv_width=next((taps for taps in domain.conv_widths if taps > 1), domain.conv_widths[0]),
        conv_bias=name == "a convolution bias of one channel",
        dtype=domain.dtypes[0],
        eps=domain.eps[0],
        offsets=domain.offsets[0] if packed else "int64",
        gating=domain.gatings[0],
        parameter_dtype=domain.parameter_dtypes[0],
        backward=False,
        **about,
    )


LAYER_INPUTS = IllegalInputs(lambda operation: list(OF_LAYERS[operation]), _layer_call)
