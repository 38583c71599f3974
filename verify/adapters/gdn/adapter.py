"""The adapter of this package's GDN layer. It adapts signatures and layout only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs
from oracles.sharding import Mesh, Rank, Shard
from properties.paths.case import CHOICES
from properties.paths.domain import MODEL_WIDTHS, PathDomain
from verify.adapters.base import PathAdapter
from verify.adapters.gdn import weights
from verify.adapters.gdn.exchange import cp_to_hp, hp_to_cp
from verify.adapters.gdn.layer import Choices, GatedDeltaNet
from verify.adapters.packages import installed
from verify.ranks.collectives import Comm, Place

_CHOICES = tuple(
    (name, tuple(value for value in values if value != "fla" or installed("fla-core"))) for name, values in CHOICES.items()
)


class GdnLayer(PathAdapter):
    """`verify.adapters.gdn.layer.GatedDeltaNet` with tensor, sequence and context parallelism; published changes are choices."""

    algorithm = "chunkwise"
    chunk = 64
    api = GatedDeltaNet
    domain = PathDomain(
        choices=_CHOICES,
        slow=("conv=fla", "rule=fla"),
        refills=False,  # with conv=fla and rule=fla, flash-linear-attention keeps the chunks of a cu_seqlens
        tf32=("rule=fla",),
        compiled_widths=MODEL_WIDTHS,
        clips=True,
        skips=True,
    )
    module: type[GatedDeltaNet] = GatedDeltaNet

    def run(self, x: Inputs, place: Place) -> Tensor:
        choices = Choices(x.conv, x.qk_norm, x.thd_all_to_all, x.rule, x.deterministic)
        module = self.module(
            x.layer,
            place,
            choices,
            sequence_parallel=x.sequence_parallel,
            dtype=x.hidden.dtype,
            conv_bias="conv.bias" in x.parameters,
            eps=x.eps,
            allow_neg_eigval=x.allow_neg_eigval,
            device=x.hidden.device,
        )
        y: Tensor = torch.func.functional_call(module, x.parameters, (x.hidden, x.cu_seqlens, x.cu_seqlens_padded))
        return y

    def clipped(self, gradients: dict[str, Tensor], layer: Layer, limit: float, place: Place) -> dict[str, Tensor] | None:
        squares = weights.squared_norm(gradients, weights.metadata(layer, conv_bias="conv.bias" in gradients), place)
        if self.skips(squares, place):
            return None
        factor = (limit / self.norm(squares, place)).clamp(max=1.0)
        return {name: x * factor for name, x in gradients.items()}

    def skips(self, squares: Tensor, place: Place) -> bool:
        """Whether a rank's share of the squared norm of gradients is not finite. A maximum over ranks loses NaN, but not 1."""
        return bool(place.tp.all_max((~squares.isfinite()).float()))

    def norm(self, squares: Tensor, place: Place) -> Tensor:
        """The norm of all gradients, whose squares are added over TP ranks in float32. CP ranks hold the same gradients."""
        return place.tp.all_reduce(squares).sqrt()

    def move(
        self, x: Tensor, lengths: Sequence[int] | None, sections: Sequence[int], to: str, place: Place, choices: dict[str, str]
    ) -> Tensor:
        way = cp_to_hp if to == "heads" else hp_to_cp
        fused = lengths is None or choices["thd_all_to_all"] == "fused"
        tokens = len(x) * (place.cp.size if to == "heads" else 1)
        return way(place.cp, x, [tokens] if lengths is None else lengths, sections, fused=fused)

    def shards(self, whole: dict[str, Tensor], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        about = weights.metadata(layer, conv_bias="conv.bias" in whole)
        return {name: x.index_select(about[name].axis, about[name].rows(rank.tp, rank.mesh.tp)) for name, x in whole.items()}

    def loaded(self, shards: dict[str, Shard], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        module = self.module(
            layer, _seat(rank), Choices(), sequence_parallel=False, dtype=torch.float32, conv_bias="conv.bias" in shards
        )
        module.load(shards)
        return {name: parameter.detach() for name, parameter in module.named_parameters()}


class _Silent(Comm):
    """An axis of ranks without collectives, for a rank that only holds parameters."""

    def _collective(self, kind: str, x: Tensor) -> Tensor:
        raise AssertionError(f"{kind} {tuple(x.shape)} where nobody listens")


def _seat(rank: Rank) -> Place:
    mesh: Mesh = rank.mesh
    return Place(_Silent(rank.tp, mesh.tp), _Silent(rank.cp, mesh.cp))
