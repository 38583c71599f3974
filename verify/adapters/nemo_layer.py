"""Adapter of NeMo AutoModel's GDN layer of Qwen3.5-MoE. It adapts signatures and layout only.

The layer is derived from that of transformers. It has A_log and dt_bias in a module of their own, and calls the chunkwise rule of
flash-linear-attention. It needs NeMo AutoModel's files, transformers and flash-linear-attention, and none of its other
requirements (verify/adapters/stubs.py).
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters import fla, serving, transformers_layer

PLACE = "nemo_automodel.components.models.qwen3_5_moe.cp_linear_attn"


class Qwen35MoeLayer(transformers_layer.Qwen35MoeLayer):
    """`CPAwareGatedDeltaNet` in training on one rank, without packed sequences.

    Packed sequences need the package causal_conv1d. A call of several tokens begins from zeros whatever its cache holds, so states
    are left out.
    """

    products = "tf32"
    api = f"{PLACE}:CPAwareGatedDeltaNet"
    requires = {"nemo-automodel": "0.7.0", "transformers": "5.18", **fla.REQUIRES}  # noqa: RUF012 - as in the base class
    domain = dataclasses.replace(transformers_layer.GdnLayer.domain, caches=False, state_gradients=True)

    def bring(self) -> None:
        fla.core()
        serving.module(PLACE)

    def module(self, config: Any) -> torch.nn.Module:
        layer: torch.nn.Module = serving.module(PLACE).CPAwareGatedDeltaNet(config, 0)
        return layer

    def parameters(self, module: torch.nn.Module, x: Inputs) -> dict[str, Tensor]:
        return super().parameters(module, x) | {f"_fp32_params.{name}": x[name] for name in ("A_log", "dt_bias")}
