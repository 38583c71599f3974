"""Right KDA layers that round at other places than the one of verify/zoo/base.py."""

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.zoo.base import KdaLayered


class KdaLayerByMaps(KdaLayered):
    """A token's map of the state is a matrix; the bias of the output gate is added to the product before it is stored."""

    def sections(self, x: Inputs, projected: Tensor) -> dict[str, Tensor]:
        widths = x.layer.sections
        parts = dict(zip(widths, projected.split([*widths.values()], -1), strict=True))
        gate = torch.nn.functional.linear(parts["z"].float(), x.gate_proj.float(), x.gate_bias.float())
        return {**parts, "a": self.project(parts["f"], x.decay_proj), "z": gate.to(projected.dtype)}

    def step(self, state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        decay, written = g.exp().unsqueeze(-1), (beta.unsqueeze(-1) * k).unsqueeze(-1)
        return (torch.eye(k.shape[-1]) - written * k.unsqueeze(-2)) @ (decay * state) + written * v.unsqueeze(-2)


class KdaLayerInSingle(KdaLayered):
    """Both gates stay in float32 after their second projections, and the sigmoid is computed by an exponential."""

    def sections(self, x: Inputs, projected: Tensor) -> dict[str, Tensor]:
        widths = x.layer.sections
        parts = dict(zip(widths, projected.split([*widths.values()], -1), strict=True))
        decay, gate = (parts[name].float() @ weight.float().mT for name, weight in (("f", x.decay_proj), ("z", x.gate_proj)))
        return {**parts, "a": decay, "z": gate + x.gate_bias.float()}

    def gate(self, x: Inputs, o: Tensor, z: Tensor) -> Tensor:
        return (self.normed(x, o.float()) / (1 + (-z).exp())).to(o.dtype)
