"""The layer's parameters on ranks: which part of the whole a shard is, and how shards get into a module and out of it.

    parameter                       cut over tp along               the gradient is the sum over the ranks of
    in_proj.weight                  outputs, section by section     cp
    conv.weight, conv.bias          channels, section by section    cp
    A_log, dt_bias                  heads                           cp
    norm.weight                     -                               tp and cp
    out_proj.weight                 inputs                          cp

Ranks that differ only in cp hold the same shards. Inside the kernel, a CP rank uses the slice of its heads of conv, A_log and
dt_bias. Its own gradient is therefore zero in the slices of other ranks, and the sum over cp, in `summed_gradients`, fills them.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from oracles.layer import Layer
from oracles.sharding import Rank, Shard
from verify.ranks.collectives import Place


@dataclasses.dataclass(frozen=True)
class Metadata:
    """How ranks share one parameter.

    `shape` is that of the whole parameter. tp cuts it along `axis`, section by section, unless `cut` is False. `gradient_sum` are
    the axes of the mesh over which its gradient is summed.
    """

    shape: tuple[int, ...]
    axis: int
    sections: tuple[int, ...]
    cut: bool = True
    gradient_sum: tuple[str, ...] = ("cp",)

    def rows(self, rank: int, tp: int) -> Tensor:
        """The indices of the whole along `axis` that a TP rank holds, in its order: its slice of each section."""
        if not self.cut:
            return torch.arange(self.shape[self.axis])
        place = torch.arange(sum(self.sections))
        return torch.cat([section.view(tp, -1)[rank] for section in place.split(self.sections)])


def metadata(layer: Layer, *, conv_bias: bool) -> dict[str, Metadata]:
    """The metadata of every parameter by name, in the order of the computation."""
    keys, values, heads = layer.heads * layer.key_dim, layer.value_heads * layer.value_dim, layer.value_heads
    channels = (keys, keys, values)
    projected = (*channels, values, heads, heads)
    every = {
        "in_proj.weight": Metadata((sum(projected), layer.hidden), 0, projected),
        "conv.weight": Metadata((sum(channels), layer.conv_width), 0, channels),
        "conv.bias": Metadata((sum(channels),), 0, channels),
        "A_log": Metadata((heads,), 0, (heads,)),
        "dt_bias": Metadata((heads,), 0, (heads,)),
        "norm.weight": Metadata((layer.value_dim,), 0, (layer.value_dim,), cut=False, gradient_sum=("tp", "cp")),
        "out_proj.weight": Metadata((layer.hidden, values), 1, (values,)),
    }
    return every if conv_bias else {name: entry for name, entry in every.items() if name != "conv.bias"}


def as_shards(values: Mapping[str, Tensor], about: Mapping[str, Metadata], rank: Rank) -> dict[str, Shard]:
    """Copies of a rank's parameters, or of their gradients, with their places in the whole."""
    return {
        name: Shard(
            name, about[name].shape, about[name].axis, rank, about[name].rows(rank.tp, rank.mesh.tp), value.detach().clone()
        )
        for name, value in values.items()
    }


def load(module: torch.nn.Module, about: Mapping[str, Metadata], shards: Mapping[str, Shard], rank: Rank) -> None:
    """Copy this rank's shards into its parameters. ValueError if names, rows or dtypes differ from those of the parameters."""
    if about.keys() != shards.keys():
        raise ValueError(f"shards must be of {', '.join(about)}, got {', '.join(shards)}")
    parameters = {name: module.get_parameter(name) for name in about}
    for name, shard in shards.items():
        rows = about[name].rows(rank.tp, rank.mesh.tp)
        if (shard.shape, shard.axis) != (about[name].shape, about[name].axis) or not torch.equal(shard.rows, rows):
            raise ValueError(
                f"shard of {name} must have rows {rows.tolist()} along axis {about[name].axis} of {about[name].shape}, "
                f"got {shard.rows.tolist()} along axis {shard.axis} of {shard.shape}"
            )
        if shard.value.dtype != parameters[name].dtype:
            raise ValueError(f"shard of {name} must be {parameters[name].dtype}, got {shard.value.dtype}")
    with torch.no_grad():
        for name, shard in shards.items():
            parameters[name].copy_(shard.value)


def summed_gradients(module: torch.nn.Module, about: Mapping[str, Metadata], place: Place) -> dict[str, Tensor]:
    """Every parameter's gradient, added in float32 over the axes of its `gradient_sum` and then rounded once.

    Every rank of the mesh must call this. A parameter without a gradient counts as one of zeros.
    """
    result = {}
    for name, entry in about.items():
        parameter = module.get_parameter(name)
        total = torch.zeros_like(parameter).float() if parameter.grad is None else parameter.grad.float()
        for axis in entry.gradient_sum:
            total = getattr(place, axis).all_reduce(total)
        result[name] = total.to(parameter.dtype)
    return result


def squared_norm(gradients: Mapping[str, Tensor], about: Mapping[str, Metadata], place: Place) -> Tensor:
    """A rank's share of the squared norm of all gradients, in float32; what TP ranks hold together counts on the first of them."""
    return torch.stack([x.float().square().sum() for name, x in gradients.items() if about[name].cut or place.tp.rank == 0]).sum()
