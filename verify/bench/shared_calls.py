"""How ranks share a call of an operation: which part of each tensor a rank has, and over which ranks gradients are summed.

The parts are those that oracles/parallel.py and oracles/sharding.py define.
"""

from typing import Any

import torch
from torch import Tensor

from oracles import sharding
from oracles.operation import Inputs, gradient_name
from oracles.sharding import AT_REST, Rank
from properties.laws.law import Results
from properties.paths.case import CHOICES, ParallelCase
from verify.ranks.collectives import Place

# The layers' parameters: the names of the oracle's inputs, and those that an adapter gets (of GDN, those of oracles/sharding.py).
PARAMETERS = {
    "in_proj": "in_proj.weight",
    "conv": "conv.weight",
    "conv_bias": "conv.bias",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm": "norm.weight",
    "out_proj": "out_proj.weight",
    "decay_proj": "decay_proj.weight",
    "gate_proj": "gate_proj.weight",
    "gate_bias": "gate_proj.bias",
}


class SharedCall:
    """A call whose tensors are cut by tokens.

    - `carrier`: the input that has the shape of the output
    - `undivided`: inputs that every CP rank has whole
    - `token_axis`: the axis of tokens in a rank's part
    """

    carrier = "v"
    undivided: tuple[str, ...] = ()
    token_axis = 1

    def __init__(self, case: ParallelCase) -> None:
        self.case = case
        self.inputs = {gradient_name(port.name): port.name for port in case.spec.inputs}  # by the names of their gradients

    def cut(self, rank: Rank, inputs: Inputs) -> tuple[Results, dict[str, Any]]:
        """A rank's part of the inputs: the tensors that may have a gradient, and everything else."""
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        others = {name: x for name, x in inputs.items() if name not in tensors}
        return {name: self.part_of(name, x, rank) for name, x in tensors.items()}, others

    def part_of(self, name: str, x: Tensor, rank: Rank) -> Tensor:
        """A rank's part of an input."""
        return x.clone() if name in self.undivided else self.tokens(x, rank)

    def tokens(self, x: Tensor, rank: Rank) -> Tensor:
        """A rank's tokens of x [B, T, ...]."""
        return x.index_select(1, sharding.tokens(self.case.tokens_of_ranks(), rank, sequence_parallel=self.case.sp))

    def arguments(self, leaves: Results) -> dict[str, Any]:  # noqa: ARG002 - a layer passes its parameters
        """What the adapter gets beside the tensors."""
        return {}

    def summed_over(self, name: str) -> tuple[str, ...]:
        """The axes of the mesh over which the gradient of an input is summed."""
        return ("cp",) if name in self.undivided else ()

    def summed(self, name: str, gradient: Tensor, place: Place) -> Tensor:
        """The gradient of an input, added in float32 over the ranks that share the input."""
        total = gradient.float()
        for axis in self.summed_over(name):
            total = getattr(place, axis).all_reduce(total)
        return total.to(gradient.dtype)

    def as_oracle(self, name: str, x: Tensor) -> Tensor:  # noqa: ARG002 - a layer has its tokens first
        """A rank's part of a result with the axes of the oracle."""
        return x

    def rows(self, name: str, rank: Rank) -> tuple[int, Tensor] | None:
        """The axis of an input, an output or a gradient that is cut, and the rank's indices along it; None if it is whole."""
        if self.inputs.get(name, name) in self.undivided:
            return None
        return 1, sharding.tokens(self.case.tokens_of_ranks(), rank, sequence_parallel=self.case.sp)

    def longer(self, name: str, x: Tensor) -> Tensor:
        """A rank's part of an input with its first token twice, or with a token of zeros if it has none."""
        if name in self.undivided:
            return x
        axis = self.token_axis
        token = x.narrow(axis, 0, 1) if x.shape[axis] else x.new_zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]))
        return torch.cat([token, x], axis)


class RuleCall(SharedCall):
    """A call of a rule, which may compute its gate and have states."""

    undivided = ("A_log", "dt_bias", "state", "final_state")


class ConvolutionCall(SharedCall):
    """A call of a convolution."""

    carrier = "x"
    undivided = ("weight", "bias")


class LayerCall(SharedCall):
    """A call of a layer. Its parameters are cut by heads, and a rank's tokens are [tokens, B, ...]."""

    carrier = "hidden"
    undivided = tuple(PARAMETERS)  # not by tokens
    token_axis = 0

    def part_of(self, name: str, x: Tensor, rank: Rank) -> Tensor:
        if name in PARAMETERS:
            return sharding.shard(self.case.layer, PARAMETERS[name], x, rank, AT_REST).value
        return self.tokens(x, rank)

    def tokens(self, x: Tensor, rank: Rank) -> Tensor:
        """A rank's tokens of x [B, T, ...], as [tokens, B, ...]."""
        return super().tokens(x, rank).transpose(0, 1).contiguous()

    def arguments(self, leaves: Results) -> dict[str, Any]:
        choices = {name: getattr(self.case, name) for name in (*CHOICES, "deterministic", "recompute")}
        return {**choices, "parameters": {PARAMETERS[name]: leaf for name, leaf in leaves.items() if name in PARAMETERS}}

    def summed_over(self, name: str) -> tuple[str, ...]:
        return sharding.parameters(self.case.layer)[PARAMETERS[name]].gradient_sum if name in PARAMETERS else ()

    def as_oracle(self, name: str, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if name in ("y", "dhidden") else x

    def rows(self, name: str, rank: Rank) -> tuple[int, Tensor] | None:
        if (parameter := PARAMETERS.get(self.inputs.get(name, name))) is None:
            return super().rows(name, rank)
        return sharding.parameters(self.case.layer)[parameter].axis, sharding.rows(self.case.layer, parameter, rank, AT_REST)


class KdaLayerCall(LayerCall):
    """A call of a KDA layer, whose parameters every rank has whole."""

    def part_of(self, name: str, x: Tensor, rank: Rank) -> Tensor:
        return x.clone() if name in PARAMETERS else self.tokens(x, rank)

    def summed_over(self, name: str) -> tuple[str, ...]:
        return ("cp",) if name in PARAMETERS else ()

    def rows(self, name: str, rank: Rank) -> tuple[int, Tensor] | None:
        return None if self.inputs.get(name, name) in PARAMETERS else SharedCall.rows(self, name, rank)


# The others are rules.
_CALLS: dict[str, type[SharedCall]] = {"gdn_layer": LayerCall, "kda_layer": KdaLayerCall, "causal_conv1d": ConvolutionCall}


def shared_call(case: ParallelCase) -> SharedCall:
    """The call of a case."""
    return _CALLS.get(case.operation, RuleCall)(case)
