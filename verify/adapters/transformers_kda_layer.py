"""Adapters of the KDA layers of Hugging Face transformers' models in plain torch. They adapt signatures and layout only.

Some linear layers inside a KDA layer of transformers are not those of the operation (oracles/layer.py). The adapters replace them.
All other code is transformers' own.

- The second projection of the output gate gets a bias, which transformers does not have.
- Where a gate has one projection (Bailing), the two projections of the operation are in its place, one after the other.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters.transformers_layer import GdnLayer, ModelLayer, sections_of

KERNELS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn", "causal_conv1d_update")
BOUNDS = ("none", "-5", "-1")  # of the log-decay


class KdaLayer(ModelLayer):
    """Base of adapters of KDA layers.

    The layers have one width for keys and values, as many value heads as key heads, and no convolution bias. They do not double
    beta. They write to their cache in place, so that no gradient passes through states.
    """

    kernels = KERNELS
    domain = dataclasses.replace(GdnLayer.domain, operation="kda_layer", equal_widths=True, grouped_heads=False)

    def module(self, config: Any) -> torch.nn.Module:
        module: Any = super().module(config)
        if hasattr(module, "g_proj"):
            sizes = (module.hidden_size, module.head_dim, module.qkv_dim)
            module.g_proj, module.forget_gate.f_proj = _two_projections(*sizes), _two_projections(*sizes, bias=False)
        else:
            module.g_b_proj = torch.nn.Linear(module.head_dim, module.qkv_dim)
        layer: torch.nn.Module = module
        return layer

    def fields(self, x: Inputs) -> dict[str, Any]:
        return {
            "linear_num_heads": x.layer.heads,
            "linear_head_dim": x.layer.key_dim,
            "linear_conv_kernel_dim": x.layer.conv_width,
        }

    def optional_fields(self, x: Inputs) -> dict[str, Any]:
        bound = x.get("lower_bound")
        safe = {} if bound is None else {"kda_lower_bound": bound}
        return {"linear_lower_bound": bound, "kda_safe_gate": bound is not None, **safe}

    def parameters(self, module: torch.nn.Module, x: Inputs) -> dict[str, Tensor]:
        sections, gate = sections_of(x), module.get_submodule("forget_gate")
        return {
            **{f"{name}_proj.weight": sections[name] for name in "qkvb"},
            "conv1d.weight": x.conv.unsqueeze(1),
            **dict.fromkeys(("forget_gate.f_a_proj.weight", "forget_gate.f_proj.0.weight"), sections["f"]),
            **dict.fromkeys(("forget_gate.f_b_proj.weight", "forget_gate.f_proj.1.weight"), x.decay_proj),
            "forget_gate.dt_bias": x.dt_bias.flatten(),
            "forget_gate.A_log": x.A_log if gate.get_parameter("A_log").ndim == 1 else x.A_log.view(1, 1, -1, 1),
            **dict.fromkeys(("g_a_proj.weight", "g_proj.0.weight"), sections["z"]),
            **dict.fromkeys(("g_b_proj.weight", "g_proj.1.weight"), x.gate_proj),
            **dict.fromkeys(("g_b_proj.bias", "g_proj.1.bias"), x.gate_bias),
            "o_norm.weight": x.norm,
            "o_proj.weight": x.out_proj,
        }


class KimiLinearLayer(KdaLayer):
    """`KimiLinearDeltaAttention`. A_log has four axes."""

    model = "kimi_linear"
    api = "transformers.models.kimi_linear.modeling_kimi_linear:KimiLinearDeltaAttention"


class Glm5NextLayer(KdaLayer):
    """`Glm5NextTextLinearAttention` of GLM-5.3-Flash."""

    model = "glm5_next"
    api = "transformers.models.glm5_next.modeling_glm5_next:Glm5NextTextLinearAttention"
    domain = dataclasses.replace(KdaLayer.domain, lower_bounds=BOUNDS)


class Packed(KdaLayer):
    """Base of adapters of KDA layers as in training on packed sequences, whose offsets `forward` takes as `cu_seq_lens_q`."""

    domain = dataclasses.replace(KdaLayer.domain, packed=True, caches=False, state_gradients=True)

    def further_options(self, x: Inputs) -> dict[str, Any]:
        return {"cu_seq_lens_q": x.cu_seqlens}


class BailingHybridLayer(KdaLayer):
    """`BailingHybridDeltaAttention` of Ling. Each of its gates has one projection."""

    model = "bailing_hybrid"
    api = "transformers.models.bailing_hybrid.modeling_bailing_hybrid:BailingHybridDeltaAttention"
    domain = dataclasses.replace(KdaLayer.domain, lower_bounds=BOUNDS)

    def fields(self, x: Inputs) -> dict[str, Any]:
        return {
            "num_attention_heads": x.layer.heads,
            "head_dim": x.layer.key_dim,
            "short_conv_kernel_size": x.layer.conv_width,
        }


class KimiLinearPacked(Packed, KimiLinearLayer):
    """`KimiLinearDeltaAttention` in training, with packed sequences."""


class Glm5NextPacked(Packed, Glm5NextLayer):
    """`Glm5NextTextLinearAttention` in training, with packed sequences."""


class BailingHybridPacked(Packed, BailingHybridLayer):
    """`BailingHybridDeltaAttention` in training, with packed sequences."""


def _two_projections(hidden: int, width: int, features: int, *, bias: bool = True) -> torch.nn.Sequential:
    """Two linear layers without anything between them, of which the second may have a bias."""
    return torch.nn.Sequential(torch.nn.Linear(hidden, width, bias=False), torch.nn.Linear(width, features, bias=bias))
