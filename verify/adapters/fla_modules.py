"""Adapters of flash-linear-attention's modules. They adapt signatures and layout only."""

from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.module_domain import ModuleDomain
from verify.adapters.fla import INDICES, ON_HOST, SWITCH, FlaAdapter, chosen, given_options
from verify.adapters.left_out import IN_FLA, left_out

SWISH = (("swish", SWITCH),)  # FLA's kernels tell the names swish and silu of the same function apart
TRAINING = (("training", ("yes", "no")),)  # whether a module is in train(), as it is when it is made, or in eval()
MASK = (("mask", ("none", "ones")),)  # a mask of pads that says that there is none
CHUNK = 64  # tokens in a chunk of the convolution


class Conv(FlaAdapter):
    """`fla.modules.causal_conv1d.causal_conv1d`, its Triton backend: forward and backward."""

    algorithm = "pointwise"
    omits = left_out(IN_FLA, "backend", "cp_context")
    domain = ModuleDomain(
        "causal_conv1d",
        refills=False,
        residuals=("none", "added"),
        options=(*ON_HOST, *INDICES, *SWISH),
        exact_options=("cu_seqlens_cpu", "chunk_indices", "swish"),
    )
    counterpart = "fla/conv_update"

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        from fla.modules.causal_conv1d import causal_conv1d

        y, state = causal_conv1d(
            x=x.x,
            weight=x.weight,
            bias=x.bias,
            initial_state=x.state,
            output_final_state=x.output_final_state,
            activation=_activation(x),
            cu_seqlens=x.cu_seqlens,
            **({} if x.get("residual") is None else {"residual": x.residual}),
            **given_options(x, CHUNK),
        )
        return y, state


class ConvUpdate(FlaAdapter):
    """`fla.modules.causal_conv1d.causal_conv1d_update`: one token at a time, with a cache that it updates in place."""

    algorithm = "pointwise"
    domain = ModuleDomain(
        "causal_conv1d",
        packed=False,
        longest=9,
        backward=False,
        residuals=("none", "added"),
        options=SWISH,
        exact_options=("swish",),
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        from fla.modules.causal_conv1d import causal_conv1d_update

        cache = x.x.new_zeros(x.x.shape[0], *x.weight.shape) if x.state is None else x.state.clone()
        rows = []
        for number, token in enumerate(x.x.split(1, 1) if x.x.shape[1] else ()):
            added = {} if x.get("residual") is None else {"residual": x.residual[:, number : number + 1]}
            y, cache = causal_conv1d_update(token, cache, weight=x.weight, bias=x.bias, activation=_activation(x), **added)
            rows.append(y)
        return torch.cat(rows, 1) if rows else torch.zeros_like(x.x), cache


class ShortConvolution(FlaAdapter):
    """`fla.modules.ShortConvolution`. Without gradients, it computes single tokens with its cache, which it updates in place."""

    algorithm = "pointwise"
    api = "fla.modules:ShortConvolution"
    omits = left_out(IN_FLA, "backend", "device")
    domain = ModuleDomain(
        "causal_conv1d",
        refills=False,
        residuals=("none", "added"),
        options=(*ON_HOST, *INDICES, *SWISH, *TRAINING, *MASK),
        exact_options=("cu_seqlens_cpu", "chunk_indices", "swish", "training"),
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        from fla.modules import ShortConvolution as Module

        channels, taps = x.weight.shape
        module = Module(channels, taps, bias=x.bias is not None, activation=_activation(x), dtype=x.x.dtype)
        module.train(x.get("options", {}).get("training") != "no")
        parameters = {"weight": x.weight.unsqueeze(1)} | ({} if x.bias is None else {"bias": x.bias})
        options = {
            "cache": None if x.state is None else x.state.clone(),
            "output_final_state": x.output_final_state,
            "cu_seqlens": x.cu_seqlens,
            **({} if x.get("residual") is None else {"residual": x.residual}),
            **given_options(x, CHUNK),
        }
        tokens = x.x
        if x.get("options", {}).get("mask") == "ones" and x.cu_seqlens is None:  # which the module refuses beside a mask
            options["mask"], tokens = x.x.new_ones(x.x.shape[:2]), x.x.clone()  # it multiplies the mask into its input in place
        with torch.set_grad_enabled(x.x.requires_grad):
            y, state = torch.func.functional_call(module, parameters, (tokens,), options)
        return y, state


class GdnGate(FlaAdapter):
    """`fla.ops.gated_delta_rule.gate.fused_gdn_gate`: the gate alone, forward and backward."""

    algorithm = "pointwise"
    omits = left_out(IN_FLA, "output_dtype")
    domain = ModuleDomain("gdn_gate", beta=False, parameter_dtypes=("fp32", "input"))

    def run(self, x: Inputs) -> Tensor:
        from fla.ops.gated_delta_rule.gate import fused_gdn_gate

        g: Tensor = fused_gdn_gate(x.a, x.A_log, x.dt_bias)
        return g


class KdaGate(FlaAdapter):
    """`fla.ops.kda.gate.fused_kda_gate`: the gate alone, forward and backward."""

    algorithm = "pointwise"
    omits = left_out(IN_FLA, "output_dtype")
    domain = ModuleDomain("kda_gate", beta=False, lower_bounds=("none", "-5", "-1"), parameter_dtypes=("fp32", "input"))

    def run(self, x: Inputs) -> Tensor:
        from fla.ops.kda.gate import fused_kda_gate

        more = {"lower_bound": x.lower_bound} if x.get("lower_bound") is not None else {}
        g: Tensor = fused_kda_gate(x.a, x.A_log, None if x.dt_bias is None else x.dt_bias.flatten(), **more)
        return g


class L2Norm(FlaAdapter):
    """`fla.modules.l2norm.l2norm`: forward and backward."""

    algorithm = "pointwise"
    omits = left_out(IN_FLA, "output_dtype")
    domain = ModuleDomain("l2norm")

    def run(self, x: Inputs) -> Tensor:
        from fla.modules.l2norm import l2norm

        y: Tensor = l2norm(x.x, **_eps(x))
        return y


class GatedNorm(FlaAdapter):
    """`fla.modules.FusedRMSNormGated` with the gate silu, in float32 throughout. Its own default of eps is 1e-5.

    The backward of a call without tokens divides by the number of tokens and raises ZeroDivisionError.
    """

    algorithm = "pointwise"
    api = "fla.modules:FusedRMSNormGated"
    omits = left_out(IN_FLA, "residual_in_fp32", "device")
    domain = ModuleDomain(
        "gated_rms_norm",
        eps=("1e-6", "1e-5"),
        empty=False,
        residuals=("none", "added", "returned"),
        gatings=("silu", "sigmoid"),
        options=TRAINING,
        exact_options=("training",),
    )

    def run(self, x: Inputs) -> Any:
        from fla.modules import FusedRMSNormGated

        weighs = x.weight is not None
        silu = "swish" if x.x.shape[-1] % 2 else "silu"  # two names of the same function, which FLA's kernels tell apart
        name = "sigmoid" if x.get("gating") == "sigmoid" else silu
        module = FusedRMSNormGated(x.x.shape[-1], elementwise_affine=weighs, activation=name, dtype=x.x.dtype, **_eps(x))
        module.train(x.get("options", {}).get("training") != "no")
        parameters: dict[str, Any] = {} if x.weight is None else {"weight": x.weight}
        more = {} if x.get("residual") is None else {"residual": x.residual, "prenorm": x.returns_sum}
        return torch.func.functional_call(module, parameters, (x.x, x.z), more)


def _activation(x: Inputs) -> Any:
    """The activation by one of FLA's two names of it."""
    return "swish" if x.activation == "silu" and chosen(x, "swish") else x.activation


def _eps(x: Inputs) -> dict[str, float]:
    """The argument eps, or none if the case wants the implementation's own default."""
    return {} if x.eps is None else {"eps": x.eps}
