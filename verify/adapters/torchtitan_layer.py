"""Adapter of torchtitan's GDN layer of Qwen3.5, which calls flash-linear-attention's kernels. It adapts signatures and layout only.

The layer joins the rows of a batch to one sequence, and keeps them apart by the offsets that its model passes. So the adapter
passes offsets for every call, those of the rows of a batch or those of packed sequences. It needs torchtitan's files alone, not
its requirements (verify/adapters/stubs.py).
"""

import functools
import types
from typing import Any

import torch
from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs, sequences
from properties.layers.domain import LayerDomain
from verify.adapters import serving
from verify.adapters.base import Adapter
from verify.adapters.fla import REQUIRES, core
from verify.adapters.transformers_layer import sections_of

MODEL = "torchtitan.models.qwen3_5.model"


class Qwen35Layer(Adapter):
    """`GatedDeltaNet` in training: the Triton convolution and the chunkwise rule of flash-linear-attention, without states."""

    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    api = f"{MODEL}:GatedDeltaNet"
    requires = {"torchtitan": "0.3.0", **REQUIRES}  # noqa: RUF012 - as in the base class
    domain = LayerDomain(
        nothing=False,
        caches=False,
        conv_bias=False,
        negative_eigenvalues=False,
        attention_mask=False,
        refills=False,
        parameter_dtypes=("fp32", "input"),
    )

    def bring(self) -> None:
        core()
        library()

    def run(self, x: Inputs) -> tuple[Tensor, None, None]:
        hidden = x.hidden
        y: Tensor = torch.func.functional_call(self.module(x.layer, x.eps), parameters(x), (hidden, self.offsets(x)))
        return y, None, None

    def module(self, layer: Layer, eps: float) -> torch.nn.Module:
        """The layer, whose parameters are replaced by those of the call."""
        model, widths = library(), layer.sections
        linear = {f"in_proj_{name}": model.Linear.Config(in_features=layer.hidden, out_features=widths[name]) for name in "qkvzab"}
        convolution = {
            f"conv_{name}": model.Conv1d.Config(
                in_channels=widths[name],
                out_channels=widths[name],
                kernel_size=layer.conv_width,
                groups=widths[name],
                bias=False,
            )
            for name in "qkv"
        }
        config = model.GatedDeltaNet.Config(
            key_head_dim=layer.key_dim,
            value_head_dim=layer.value_dim,
            conv_kernel_size=layer.conv_width,
            **linear,
            **convolution,
            kernel=model.GatedDeltaKernel.Config(),
            norm=model.RMSNormGated.Config(dim=layer.value_dim, eps=eps),
            out_proj=model.Linear.Config(in_features=widths["z"], out_features=layer.hidden),
        )
        module: torch.nn.Module = config.build()
        return module

    def offsets(self, x: Inputs) -> Any:
        """The offsets of the sequences, as the model passes them to its layers."""
        lengths = sequences(x, "hidden")
        ends = torch.tensor([0, *lengths]).cumsum(0)
        offsets = ends.to(device=x.hidden.device, dtype=torch.int32 if x.cu_seqlens is None else x.cu_seqlens.dtype)
        longest = max(lengths)
        return library().VarlenMetadata(offsets, offsets, longest, longest, tuple(ends.tolist()))


@functools.cache
def library() -> types.SimpleNamespace:
    """The classes of torchtitan that the adapter uses. Unavailable, in one line, says what is missing."""
    return serving.names({MODEL: ("Conv1d", "GatedDeltaKernel", "GatedDeltaNet", "Linear", "RMSNormGated", "VarlenMetadata")})


def parameters(x: Inputs) -> dict[str, Tensor]:
    """The parameters of the call by torchtitan's names."""
    sections = sections_of(x)
    filters = x.conv.unsqueeze(1).split([x.layer.sections[name] for name in "qkv"])
    return {
        **{f"in_proj_{name}.weight": section for name, section in sections.items()},
        **{f"conv_{name}.weight": weight for name, weight in zip("qkv", filters, strict=True)},
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "norm.weight": x.norm,
        "out_proj.weight": x.out_proj,
    }
