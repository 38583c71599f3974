"""What adapters of SGLang's and vLLM's kernels have in common. They adapt signatures and layout only.

Both libraries keep states as [N, HV, V, K], where a case has [N, HV, K, V].
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters import serving
from verify.adapters.base import Adapter
from verify.adapters.blocks import in_blocks

# dt_bias must be a tensor, and beta is at most 1: there is no allow_neg_eigval.
GATED = Domain(in_kernel=("both",), dt_bias=False, negative_eigenvalues=False, position_independent=True, backward=False)
GIVEN = Domain(position_independent=True, backward=False)
FEW_PROGRAMS = dataclasses.replace(GIVEN, batch_heads=MOST_ALONG_Y)  # where sequences x heads are the grid's third axis
PROMPTS = Domain(dtypes=("bf16", "fp16"), key_dims=(1, 256), backward=False)


class Serving(Adapter):
    """Base of adapters of kernels in one module of a serving library."""

    algorithm = "recurrent"
    source: str  # the kernels' module

    def bring(self) -> None:
        self.module()

    def module(self) -> types.ModuleType:
        """The kernels' module."""
        return serving.module(self.source)


class SGLang(Serving):
    """Base of adapters of SGLang's kernels."""

    requires: ClassVar[dict[str, str]] = {"sglang": "0.5.13", "triton": "3.7.1"}


class VLLM(Serving):
    """Base of adapters of vLLM's kernels."""

    requires: ClassVar[dict[str, str]] = {"vllm": "0.22.1", "triton": "3.7.1"}


class Chunks(Serving):
    """Base of adapters of kernels for prompts, which work in chunks of 64 tokens."""

    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64


class Packed(Serving):
    """Base of adapters of kernels for one token a request, with q, k and v in one tensor [B, 2 H K + HV V]."""

    wrapper = "fused_recurrent_gated_delta_rule_packed_decode"
    grid_axis = 0

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        module = self.module()
        o = x.v.new_empty(len(x.slots), 1, *x.v.shape[2:])
        with in_blocks(module, f"{self.wrapper}_kernel", x.block_v, self.grid_axis):
            getattr(module, self.wrapper)(
                side_by_side(x),
                x.a.flatten(0, 1).flatten(1),
                x.b.flatten(0, 1),
                A_log=x.A_log,
                dt_bias=x.dt_bias.flatten(),
                scale=x.q.shape[-1] ** -0.5 if x.scale is None else x.scale,
                initial_state=x.pool.mT,
                out=o,
                ssm_state_indices=x.slots,
                use_qk_l2norm_in_kernel=x.qk_norm,
            )
        return o.reshape(x.v.shape), x.pool


def call(rule: Callable[..., Any], x: Inputs, *tokens: Tensor | None, **states: Any) -> Any:
    """Call a rule on `tokens`, by default q, k, v, g and beta of the call `x`. `states` are the arguments about states."""
    return rule(
        *(tokens or (x.q, x.k, x.v, x.g, x.beta)),
        scale=x.scale,
        cu_seqlens=x.cu_seqlens,
        use_qk_l2norm_in_kernel=x.qk_norm,
        **states,
    )


def call_on_states(rule: Callable[..., Any], x: Inputs) -> tuple[Tensor, Tensor | None]:
    """Call a rule that takes one state a sequence, V first, or None, and returns the final ones."""
    state = None if x.state is None else x.state.mT.contiguous()
    o, final = call(rule, x, initial_state=state, output_final_state=x.output_final_state)
    return o, None if final is None else final.mT


def states(x: Inputs) -> Tensor:
    """New initial states [N, HV, V, K], zeros if there are none."""
    if x.state is not None:
        given: Tensor = dense(x.state.mT)
        return given
    count = x.v.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    zeros: Tensor = x.v.new_zeros(count, *x.v.shape[2:], x.q.shape[-1], dtype=torch.float32)
    return zeros


def whole_tokens(x: Inputs) -> tuple[Tensor, Tensor]:
    """q and k with the channels and heads of a token side by side. With the norm in the kernel, its wrapper sees to that."""
    return (x.q, x.k) if x.qk_norm else (x.q.contiguous(), x.k.contiguous())


def side_by_side(x: Inputs) -> Tensor:
    """q, k and v of each token in one tensor [T, 2 H K + HV V]."""
    return torch.cat([x[name].flatten(0, 1).flatten(1) for name in "qkv"], -1)


def dense(tensor: Tensor) -> Tensor:
    """A copy whose strides are those of a new tensor even where an axis has one element."""
    return tensor.clone(memory_format=torch.contiguous_format)


def flat_bias(x: Inputs) -> Tensor | None:
    """dt_bias in one axis, contiguous, or None."""
    return None if x.dt_bias is None else x.dt_bias.flatten().contiguous()
