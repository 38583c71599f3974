"""Adapters of SGLang's recurrent kernels that take one state a sequence, V first. They adapt signatures and layout only."""

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters.sglang_pools import OPS, SGLang


class Recurrent(SGLang):
    """`fused_recurrent_gated_delta_rule`: token by token in float32, without a backward."""

    algorithm = "recurrent"
    source = f"{OPS}.fla.fused_recurrent"
    # The grid's third axis has sequences x heads.
    domain = Domain(position_independent=True, backward=False, batch_heads=MOST_ALONG_Y)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, final = self.module().fused_recurrent_gated_delta_rule(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            scale=x.scale,
            initial_state=None if x.state is None else x.state.mT.contiguous(),
            output_final_state=x.output_final_state,
            cu_seqlens=x.cu_seqlens,
            use_qk_l2norm_in_kernel=x.qk_norm,
        )
        return o, None if final is None else final.mT


class RecurrentKda(SGLang):
    """`fused_recurrent_kda`: the same for KDA, with an initial state. Gates are read by key head, so HV must be H."""

    algorithm = "recurrent"
    source = f"{OPS}.fla.kda"
    domain = Domain(operation="kda", grouped_heads=False, position_independent=True, backward=False, batch_heads=MOST_ALONG_Y)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        count = x.v.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
        zeros = x.v.new_zeros(count, *x.v.shape[2:], x.q.shape[-1], dtype=torch.float32)
        o, final = self.module().fused_recurrent_kda(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            scale=x.scale,
            initial_state=zeros if x.state is None else x.state.mT.contiguous(),
            inplace_final_state=False,
            cu_seqlens=x.cu_seqlens,
            use_qk_l2norm_in_kernel=x.qk_norm,
        )
        return o, final.mT
