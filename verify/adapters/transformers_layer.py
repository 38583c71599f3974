"""Adapters of Hugging Face transformers' GDN layers in plain torch. They adapt signatures and layout only.

The modules call flash-linear-attention's kernels if they are installed. Here they call transformers' own functions in torch.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs
from properties.layer_domain import LayerDomain
from verify.adapters.padding import padding_mask
from verify.adapters.transformers import REQUIRES, QwenAdapter

KERNELS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update")
Answer = tuple[Tensor, Tensor | None, Tensor | None]


class Qwen3NextLayer(QwenAdapter):
    """`Qwen3NextGatedDeltaNet`. One projection has q, k, v and z of each key head side by side; another has b and a."""

    algorithm = "chunkwise"
    chunk = 64
    # It takes no packed sequences and no convolution bias, and does not double beta. It writes to its cache in place, so that no
    # gradient passes through states.
    domain = LayerDomain(
        packed=False,
        conv_bias=False,
        negative_eigenvalues=False,
        empty=False,
        nothing=False,
        state_gradients=False,
        parameter_dtypes=("fp32", "input"),
        options=(("training", ("yes", "no")), ("mask", ("none", "ones"))),
    )
    requires = REQUIRES
    model = "qwen3_next"
    api = "transformers.models.qwen3_next.modeling_qwen3_next:Qwen3NextGatedDeltaNet"

    def run(self, x: Inputs) -> Answer:
        module, cache = self.module(x.layer, x.eps), _cache(self.config(x.layer, x.eps), x)
        mask = padding_mask(x, x.hidden)
        module.train(x.get("options", {}).get("training") != "no")
        with _torch_only(self.model):
            parameters = {**self.projections(x.layer, x.in_proj), **_shared(x)}
            options = {"cache_params": cache, "attention_mask": mask}
            y: Tensor = torch.func.functional_call(module, parameters, (x.hidden,), options)
        if cache is None:
            return y, None, None
        return y, cache.get_recurrent_state(0), cache.get_conv_state(0)

    def config(self, layer: Layer, eps: float) -> Any:
        from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

        return Qwen3NextConfig(**_widths(layer, eps))

    def module(self, layer: Layer, eps: float) -> torch.nn.Module:
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

        module: torch.nn.Module = Qwen3NextGatedDeltaNet(self.config(layer, eps), 0)
        return module

    def projections(self, layer: Layer, in_proj: Tensor) -> dict[str, Tensor]:
        """The rows of in_proj by transformers' names, with the sections of each key head side by side."""
        sections = _sections(layer, in_proj)
        heads = {name: section.unflatten(0, (layer.heads, -1)) for name, section in sections.items()}
        return {
            "in_proj_qkvz.weight": torch.cat([heads[name] for name in "qkvz"], 1).flatten(0, 1),
            "in_proj_ba.weight": torch.cat([heads[name] for name in "ba"], 1).flatten(0, 1),
        }


class Qwen35Layer(Qwen3NextLayer):
    """`Qwen3_5GatedDeltaNet`. One projection has q, k and v; z, b and a have one each."""

    model = "qwen3_5"
    api = "transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5GatedDeltaNet"

    def config(self, layer: Layer, eps: float) -> Any:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

        return Qwen3_5TextConfig(**_widths(layer, eps))

    def module(self, layer: Layer, eps: float) -> torch.nn.Module:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

        module: torch.nn.Module = Qwen3_5GatedDeltaNet(self.config(layer, eps), 0)
        return module

    def projections(self, layer: Layer, in_proj: Tensor) -> dict[str, Tensor]:
        """The rows of in_proj by transformers' names, with the sections q, k and v together."""
        sections = _sections(layer, in_proj)
        return {
            "in_proj_qkv.weight": torch.cat([sections[name] for name in "qkv"]),
            **{f"in_proj_{name}.weight": sections[name] for name in "zba"},
        }


def _sections(layer: Layer, in_proj: Tensor) -> dict[str, Tensor]:
    return dict(zip(layer.sections, in_proj.split([*layer.sections.values()]), strict=True))


def _shared(x: Inputs) -> dict[str, Tensor]:
    """The parameters that have the same layout in both models."""
    return {
        "conv1d.weight": x.conv.unsqueeze(1),
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "norm.weight": x.norm,
        "out_proj.weight": x.out_proj,
    }


def _widths(layer: Layer, eps: float) -> dict[str, Any]:
    """The configuration of a model of two layers, of which the first is the GDN layer."""
    return {
        "hidden_size": layer.hidden,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": layer.value_heads,
        "linear_num_key_heads": layer.heads,
        "linear_key_head_dim": layer.key_dim,
        "linear_value_head_dim": layer.value_dim,
        "linear_conv_kernel_dim": layer.conv_width,
        "rms_norm_eps": eps,
    }


def _cache(config: Any, x: Inputs) -> Any:
    """A cache with the call's states; empty without initial states, and None if no final states are wanted."""
    if not x.output_final_state:
        return None
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionLayer  # noqa: F401 - releases without it have caches of another kind

    cache = DynamicCache(config=config)
    if x.state is not None:
        cache.update_conv_state(x.conv_state.clone(), 0)
        cache.update_recurrent_state(x.state, 0)
    return cache


@contextlib.contextmanager
def _torch_only(model: str) -> Iterator[None]:
    """Make the model's module use transformers' own functions in torch as its kernels, inside."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    with mock.patch.multiple(module, **{name: _unwrapped(getattr(module, name)) for name in KERNELS}):
        yield


@functools.cache
def _unwrapped(function: Any) -> Any:
    return inspect.unwrap(function)
