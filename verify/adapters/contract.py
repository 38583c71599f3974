"""What a call must have and return: its operation, legal inputs, and the shape and dtype of each of its outputs."""

import dataclasses
from typing import Any, NamedTuple

import torch

from oracles.conv import CAUSAL_CONV1D_SHORT_STATE
from oracles.decode import decode
from oracles.norm import GATED_RMS_NORM_OF_SUM
from oracles.operation import DTYPES, NAMES, Inputs, Operation, sequences
from oracles.operations import OPERATIONS
from oracles.rule.gated_delta import rule_of
from properties.calls.case import arguments_of, operation_of
from properties.calls.domain import CallDomain
from properties.laws.law import one_final_state
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain


class Wanted(NamedTuple):
    """An output that a call must return. `missing` rows of zeros are put before it: states of sequences that return none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    missing: int = 0


def contract_of(domain: Any, x: Inputs) -> Operation:
    """The operation of a call, from what the call has and what the domain says. It has all inputs that such a call may have."""
    inside = {"gate": x.get("a") is not None, "beta": x.get("b") is not None, "linear": x.get("alpha") is not None}
    if isinstance(domain, CallDomain):
        outputs = tuple(argument.port for argument in arguments_of(domain.gives))
        return dataclasses.replace(operation_of(domain.takes, domain.gives), outputs=outputs)
    if isinstance(domain, PoolDomain):
        return decode(domain.rule.operation, **inside)
    if isinstance(domain, Domain):
        channels = tuple(name for name in ("gk", "gv") if x.get(name) is not None)
        initial = "fp32" if x.get("state") is None else NAMES.get(x.state.dtype, "fp32")
        final = {"input": NAMES.get(x.q.dtype, "fp32"), "state": initial}.get(domain.final_dtype, domain.final_dtype)
        return rule_of(domain.operation, **inside, channels=channels, initial=initial, final=final)
    if isinstance(domain, ModuleDomain):
        if domain.operation == "causal_conv1d" and domain.state_columns != "W":
            return CAUSAL_CONV1D_SHORT_STATE
        if x.get("returns_sum"):
            return GATED_RMS_NORM_OF_SUM
        if domain.operation in ("gdn_gate", "kda_gate") and not inside["beta"]:
            whole = OPERATIONS[domain.operation]
            return dataclasses.replace(whole, outputs=whole.outputs[:1])
    return OPERATIONS[domain.operation]


def wanted(operation: Operation, x: Inputs, domain: Any) -> dict[str, Wanted]:
    """The outputs that a call returns, in their order. A final state may not be among them."""
    sizes = sizes_of(operation, x)
    tokens = next(port.name for port in operation.inputs if port.axes.startswith("B T"))
    dtypes = {**DTYPES, "input": x[tokens].dtype, "state": getattr(x.get("pool"), "dtype", None)}
    found: dict[str, Wanted] = {}
    for port in operation.outputs:
        if port.axes.startswith("N ") and not x.get("output_final_state", True):
            continue
        shape = tuple(sizes[axis] for axis in port.axes.split())
        one = port.name == "final_state" and x.get("cu_seqlens") is not None and one_final_state(domain)
        missing, shape = shape[0] - 1 if one else 0, (1, *shape[1:]) if one else shape
        found[port.name] = Wanted(shape, dtypes.get(port.dtype) or torch.float32, missing)
    return found


def sizes_of(operation: Operation, inputs: Inputs) -> dict[str, int]:
    """The length of every axis of a call's outputs."""
    sizes = operation.sizes(inputs)
    tokens = next(port.name for port in operation.inputs if port.axes.startswith("B T"))
    sizes["N"] = len(sequences(inputs, tokens))
    if (layer := inputs.get("layer")) is not None:
        sizes["K"] = layer.key_dim  # no input has this axis if there is no initial state
    return sizes


def check_legal(domain: Any, x: Inputs) -> None:
    """Raise ValueError for a call with illegal shapes or offsets, or without a tensor that it must have."""
    operation = contract_of(domain, x)
    left_out = {"g", "beta"} if isinstance(domain, Domain) and domain.left_out != ("none",) else set()
    left_out |= {"b"} if isinstance(domain, ModuleDomain) and not domain.beta else set()
    ports = tuple(dataclasses.replace(port, optional=port.optional or port.name in left_out) for port in operation.inputs)
    packs = ["cu_seqlens"] * any("N" in port.axes.split() for port in ports)
    names = {*packs, *(port.name for port in ports), *operation.options}
    legal = dataclasses.replace(operation, inputs=ports)
    legal.check(Inputs(**{name: value for name, value in x.items() if name in names}))
