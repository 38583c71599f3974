"""Adapters of older releases, whose configurations later ones took off their lists; they run where that release is installed.

    gdn-verify check tests/older.py:ChunkFla042 --tune sweep

FLA 0.4.2 computes the gated rule's gradients with configurations that are wrong on some cards with some versions of Triton
(flash-linear-attention issues 640 and 984); later releases refuse such versions.
"""

from typing import ClassVar

from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.fla import call


class ChunkFla042(Adapter):
    """`chunk_gated_delta_rule` of FLA 0.4.2: as many value heads as key heads, gate and beta given."""

    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    domain = Domain(key_dims=(16, 256), value_dims=(16, 256), grouped_heads=False, gate_dtypes=("fp32",), empty=False)
    requires: ClassVar[dict[str, str]] = {"fla-core": "0.4.2"}

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

        return call(rule, x)
