"""Adapters of flash-linear-attention's modules. They adapt signatures and layout only."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from verify.adapters.fla import INDICES, ON_HOST, SWITCH, FlaAdapter, chosen, given_options
from verify.adapters.interface import signature, source
from verify.adapters.left_out import IN_FLA, left_out
from verify.adapters.padding import padding_mask

SWISH = (("swish", SWITCH),)  # FLA's kernels have a branch for each of the names swish and silu of one function
TRAINING = (("training", ("yes", "no")),)  # whether a module is in train(), as it is when it is made, or in eval()
MASK = (("mask", ("none", "ones")),)  # a mask of ones, which excludes no token
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
        y, state = _convolutions().causal_conv1d(
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
        update = _convolutions().causal_conv1d_update
        cache = x.x.new_zeros(x.x.shape[0], *x.weight.shape) if x.state is None else x.state.clone()
        rows = []
        for number, token in enumerate(x.x.split(1, 1) if x.x.shape[1] else ()):
            added = {} if x.get("residual") is None else {"residual": x.residual[:, number : number + 1]}
            y, cache = update(token, cache, weight=x.weight, bias=x.bias, activation=_activation(x), **added)
            rows.append(y)
        return torch.cat(rows, 1) if rows else torch.zeros_like(x.x), cache


class ShortConvolution(FlaAdapter):
    """`fla.modules.ShortConvolution`. Without gradients, it computes single tokens with its cache, which it updates in place.

    With a mask it writes to its argument x, so it gets a copy of x.
    """

    algorithm = "pointwise"
    api = "fla.modules:ShortConvolution"
    omits = left_out(IN_FLA, "backend", "device")
    domain = ModuleDomain(
        "causal_conv1d",
        attention_mask=True,
        refills=False,
        residuals=("none", "added"),
        options=(*ON_HOST, *INDICES, *SWISH, *TRAINING, *MASK),
        exact_options=("cu_seqlens_cpu", "chunk_indices", "swish", "training"),
    )
    counterpart: str | None = "fla/short_convolution_steps"

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        mask = padding_mask(x, x.x) if x.cu_seqlens is None else None  # the module rejects a mask together with cu_seqlens
        options = {
            "mask": mask,
            "cache": None if x.state is None else x.state.clone(),
            "output_final_state": x.output_final_state,
            "cu_seqlens": x.cu_seqlens,
            **({} if x.get("residual") is None else {"residual": x.residual}),
            **given_options(x, CHUNK),
        }
        needed = any(isinstance(value, Tensor) and value.requires_grad for value in x.values())
        with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
            y, state = _convolved(x, x.x if mask is None else x.x.clone(), options)
        return y, state


class ShortConvolutionSteps(FlaAdapter):
    """`fla.modules.ShortConvolution`, one token at a time: as a batch and as packed sequences by turns.

    `run` returns the cache that it passed, so the module must update this cache in place. It is contiguous, because the module does
    not update another one (docs/FINDINGS.md).
    """

    algorithm = "pointwise"
    api = "fla.modules:ShortConvolution"
    domain = ModuleDomain("causal_conv1d", packed=False, longest=9, backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        rows = x.x.shape[0]
        cache = x.x.new_zeros(rows, *x.weight.shape)
        if x.state is not None:
            cache.copy_(x.state)
        offsets, outputs = torch.arange(rows + 1, device=x.x.device), []
        with torch.no_grad():
            for number, token in enumerate(x.x.split(1, 1) if x.x.shape[1] else ()):
                packs = number % 2 == 1
                options = {"cache": cache, "output_final_state": True, "cu_seqlens": offsets if packs else None}
                y, _ = _convolved(x, token.transpose(0, 1) if packs else token, options)
                outputs.append(y.transpose(0, 1) if packs else y)
        return torch.cat(outputs, 1) if outputs else torch.zeros_like(x.x), cache


def _convolutions() -> Any:
    """The module that has FLA's convolutions. Releases before 0.6.0 have it under another name."""
    if source("fla.modules.causal_conv1d.__init__") is None:
        from fla.modules import convolution

        return convolution
    from fla.modules import causal_conv1d

    return causal_conv1d


def _convolved(x: Inputs, tokens: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Call a ShortConvolution with the parameters of the call x."""
    from fla.modules import ShortConvolution as Module

    channels, taps = x.weight.shape
    module = Module(channels, taps, bias=x.bias is not None, activation=_activation(x), dtype=x.x.dtype)
    module.train(x.get("options", {}).get("training") != "no")
    parameters = {"weight": x.weight.unsqueeze(1)} | ({} if x.bias is None else {"bias": x.bias})
    result: tuple[Tensor, Tensor | None] = torch.func.functional_call(module, parameters, (tokens,), options)
    return result


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

    def __init__(self) -> None:
        rule = signature("fla.ops.kda.gate:fused_kda_gate")
        if rule is not None and "lower_bound" not in rule.parameters:
            self.domain = dataclasses.replace(self.domain, lower_bounds=("none",))

    def run(self, x: Inputs) -> Tensor:
        from fla.ops.kda.gate import fused_kda_gate

        bias = None if x.dt_bias is None else x.dt_bias.flatten()
        rule = signature("fla.ops.kda.gate:fused_kda_gate")
        g: Tensor
        if (
            rule is not None and "head_k_dim" in rule.parameters
        ):  # an older release, which takes all channels of a token in one axis
            g = fused_kda_gate(x.a.flatten(-2), x.A_log, x.a.shape[-1], g_bias=bias)
            return g
        more = {"lower_bound": x.lower_bound} if x.get("lower_bound") is not None else {}
        g = fused_kda_gate(x.a, x.A_log, bias, **more)
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
        silu = "swish" if x.x.shape[-1] % 2 else "silu"  # two names of one function; FLA's kernels have a branch for each
        name = "sigmoid" if x.get("gating") == "sigmoid" else silu
        module = FusedRMSNormGated(x.x.shape[-1], elementwise_affine=weighs, activation=name, dtype=x.x.dtype, **_eps(x))
        module.train(x.get("options", {}).get("training") != "no")
        parameters: dict[str, Any] = {} if x.weight is None else {"weight": x.weight}
        more = {} if x.get("residual") is None else {"residual": x.residual, "prenorm": x.returns_sum}
        return torch.func.functional_call(module, parameters, (x.x, x.z), more)


def _activation(x: Inputs) -> Any:
    """The activation by one of FLA's two names of it."""
    return "swish" if x.activation == "silu" and chosen(x, "swish") else x.activation


class NormGateLinear(FlaAdapter):
    """`fla.modules.fused_norm_gate.rms_norm_swish_gate_linear`: norm and gate in one kernel, and torch's linear.

    The backward of a call without tokens divides by the number of tokens and raises ZeroDivisionError.
    """

    algorithm = "pointwise"
    omits = left_out(IN_FLA, "residual", "prenorm", "residual_in_fp32")
    domain = ModuleDomain("norm_gate_linear", empty=False)

    def run(self, x: Inputs) -> Tensor:
        from fla.modules.fused_norm_gate import rms_norm_swish_gate_linear

        y: Tensor = rms_norm_swish_gate_linear(
            x.x, x.z, norm_weight=x.weight, norm_bias=None, linear_weight=x.linear, linear_bias=x.bias, **_eps(x)
        )
        return y


def _eps(x: Inputs) -> dict[str, float]:
    """The argument eps, or none if the case wants the implementation's own default."""
    return {} if x.eps is None else {"eps": x.eps}
