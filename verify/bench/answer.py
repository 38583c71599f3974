"""What an implementation returned, checked against the contract of its operation."""

from typing import Any

import torch
from torch import Tensor

from oracles.operation import DTYPES, Inputs, Operation, sequences
from properties.laws.law import Results, one_final_state
from verify.bench.faults import AdapterFault
from verify.process.outcome import FailureKind


def outputs_of(answer: Any, spec: Operation, inputs: Inputs, domain: Any) -> Results:
    """The outputs by name. AdapterFault if a type, shape or dtype breaks the contract."""
    ports = spec.outputs
    if isinstance(answer, Tensor) and (len(ports) == 1 or domain.final_states == "none"):
        answer = (answer, *[None] * (len(ports) - 1))
    if not (isinstance(answer, tuple) and len(answer) == len(ports)):
        names = ", ".join(port.name for port in ports)
        raise AdapterFault(
            "call", FailureKind.TYPE, f"returned {type(answer).__name__}, must return a tuple ({names})", detail="answer"
        )
    sizes = sizes_of(spec, inputs)
    tokens = next(port.name for port in spec.inputs if port.axes.startswith("B T"))
    outputs: Results = {}
    for port, output in zip(ports, answer, strict=True):
        if port.axes.startswith("N ") and not inputs.get("output_final_state", True):
            continue
        shape = tuple(sizes[axis] for axis in port.axes.split())
        one = port.name == "final_state" and inputs.get("cu_seqlens") is not None and one_final_state(domain)
        missing, shape = shape[0] - 1 if one else 0, (1, *shape[1:]) if one else shape
        dtypes = {**DTYPES, "input": inputs[tokens].dtype, "state": getattr(inputs.get("pool"), "dtype", None)}
        dtype = dtypes.get(port.dtype, torch.float32)
        if not isinstance(output, Tensor):
            raise AdapterFault(port.name, FailureKind.TYPE, f"is {type(output).__name__}, must be a tensor", detail="output")
        if tuple(output.shape) != shape:
            raise AdapterFault(port.name, FailureKind.SHAPE, f"has shape {tuple(output.shape)}, must have {shape}")
        if port.dtype != "any" and output.dtype != dtype:
            raise AdapterFault(port.name, FailureKind.DTYPE, f"has dtype {output.dtype}, must have {dtype}")
        outputs[port.name] = torch.cat([output.new_zeros(missing, *shape[1:]), output]) if missing else output
    return outputs


def sizes_of(spec: Operation, inputs: Inputs) -> dict[str, int]:
    """The length of every axis of a call's outputs."""
    sizes = spec.sizes(inputs)
    tokens = next(port.name for port in spec.inputs if port.axes.startswith("B T"))
    sizes["N"] = len(sequences(inputs, tokens))
    if (layer := inputs.get("layer")) is not None:
        sizes["K"] = layer.key_dim  # no input has this axis if there is no initial state
    return sizes
