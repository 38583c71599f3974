"""The adapter of MLX's kernel for the gated delta rule. It adapts layout only."""

from collections.abc import Mapping
from typing import Any, ClassVar

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.adapters.array_adapter import ArrayAdapter


class GatedDelta(ArrayAdapter):
    """`mx.fast.gated_delta_update`, which takes the decay itself, does not scale, and has states as [N, HV, V, K]."""

    library = "mlx"
    algorithm = "recurrent"
    requires: ClassVar[dict[str, str]] = {"mlx": "0.32.4"}
    layout: ClassVar[Mapping[str, str]] = {"state": "V K", "final_state": "V K"}
    domain = Domain(packed=False, nothing=False, qk_norm=False, decays=("linear",), scales=("one",), views=False, backward=False)

    def compute(self, x: Inputs) -> Any:
        import mlx.core

        return mlx.core.fast.gated_delta_update(x.q, x.k, x.v, x.alpha, x.beta, x.state)
