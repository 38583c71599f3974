"""Adapters of Hugging Face transformers' modules of Qwen3-Next in plain torch. They adapt signatures and layout only.

The public names call other packages if they are installed, even on a CPU. We unwrap them to get the functions in torch.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from verify.adapters.interface import Lacking
from verify.adapters.packages import installed
from verify.adapters.transformers import REQUIRES, ModelAdapter

QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"


class Conv(ModelAdapter):
    """`causal_conv1d_fn` on the result of the cache's `update_conv_state`, as the layer's prefill calls them."""

    algorithm = "pointwise"
    api = f"{QWEN}:causal_conv1d_fn"
    domain = ModuleDomain("causal_conv1d", packed=False)
    counterpart = "transformers/conv_update"
    requires = REQUIRES

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        from transformers.cache_utils import LinearAttentionLayer

        cache, (taps, tokens) = LinearAttentionLayer(), (x.weight.shape[-1], x.x.shape[1])
        if x.state is not None:
            cache.update_conv_state(x.state, conv_kernel_size=taps)
        seen = cache.update_conv_state(x.x.mT, conv_kernel_size=taps)
        y = _function("causal_conv1d_fn")(seen, x.weight, x.bias, activation=x.activation)
        return y[..., seen.shape[-1] - tokens :].mT, cache.conv_states[0] if x.output_final_state else None


class ConvUpdate(ModelAdapter):
    """`causal_conv1d_update`, with a cache that it updates in place. For a call without tokens it returns a row."""

    algorithm = "pointwise"
    domain = ModuleDomain("causal_conv1d", packed=False, empty=False)
    requires = REQUIRES

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        cache = x.x.new_zeros(x.x.shape[0], *x.weight.shape) if x.state is None else x.state.clone()
        y = _function("causal_conv1d_update")(x.x.mT, cache, x.weight, x.bias, x.activation)
        return y.mT, cache


class L2Norm(ModelAdapter):
    """`l2norm`, which squares in the inputs' dtype."""

    algorithm = "pointwise"
    domain = ModuleDomain("l2norm", options=(("dim", ("last", "second")),))
    requires = REQUIRES

    def run(self, x: Inputs) -> Tensor:
        eps = {} if x.eps is None else {"eps": x.eps}
        if x.get("options", {}).get("dim") == "second":  # the channels of a transposed x
            turned: Tensor = _function("l2norm")(x.x.transpose(1, -1), dim=1, **eps)
            return turned.transpose(1, -1)
        y: Tensor = _function("l2norm")(x.x, **eps)
        return y


class GatedNorm(ModelAdapter):
    """`Qwen3NextRMSNormGated`: the normalised x is rounded to the inputs' dtype, weighted in that dtype, and gated in float32."""

    algorithm = "pointwise"
    domain = ModuleDomain(
        "gated_rms_norm", without_weight=False, options=(("training", ("yes", "no")),), exact_options=("training",)
    )
    requires = REQUIRES

    def run(self, x: Inputs) -> Tensor:
        module = _function("Qwen3NextRMSNormGated")(x.x.shape[-1], **({} if x.eps is None else {"eps": x.eps}))
        module.train(x.get("options", {}).get("training") != "no")
        y: Tensor = torch.func.functional_call(module, {"weight": x.weight}, (x.x, x.z))
        return y


def _function(name: str) -> Any:
    from transformers.models.qwen3_next import modeling_qwen3_next

    found = getattr(modeling_qwen3_next, name)
    if found is None:  # a function of the package causal-conv1d: older layers have their own lines in place of it
        raise Lacking(f"Qwen3-Next of transformers {installed('transformers')} has no {name} in torch")
    return found if inspect.isclass(found) else inspect.unwrap(found)
