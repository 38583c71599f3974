"""What an implementation returned, checked against the contract of its operation."""

from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs, Operation
from properties.laws.law import Results
from verify.adapters.contract import wanted
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
    must = wanted(spec, inputs, domain)
    outputs: Results = {}
    for port, output in zip(ports, answer, strict=True):
        if port.name not in must:
            continue
        shape, dtype, missing = must[port.name]
        if not isinstance(output, Tensor):
            raise AdapterFault(port.name, FailureKind.TYPE, f"is {type(output).__name__}, must be a tensor", detail="output")
        if tuple(output.shape) != shape:
            raise AdapterFault(port.name, FailureKind.SHAPE, f"has shape {tuple(output.shape)}, must have {shape}")
        if port.dtype != "any" and output.dtype != dtype:
            raise AdapterFault(port.name, FailureKind.DTYPE, f"has dtype {output.dtype}, must have {dtype}")
        outputs[port.name] = torch.cat([output.new_zeros(missing, *shape[1:]), output]) if missing else output
    return outputs
