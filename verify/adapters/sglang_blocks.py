"""Adapters of SGLang's recurrent kernels without a pool, as pools: only there can a case choose the block of value channels.

The kernels take and return states [N, HV, V, K]. The adapters read them from the pool's slots and write the final ones there.
"""

import dataclasses

from torch import Tensor

from oracles.operation import Inputs
from properties.pools.case import BLOCK_SIZES
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters.blocks import in_blocks
from verify.adapters.sglang_pools import OPS, RECURRENT, SGLang

KDA = f"{OPS}.fla.kda"
FORWARD_KERNEL = "fused_recurrent_gated_delta_rule_fwd_kernel"


class RecurrentBlocks(SGLang):
    """`fused_recurrent_gated_delta_rule`: log-decay and beta are given, states come in and go out as tensors."""

    algorithm = "recurrent"
    source = RECURRENT
    domain = PoolDomain(
        rule=Domain(position_independent=True, backward=False),
        padding_slots=(),
        fresh=False,
        accepts=False,
        layout="vk",
        blocks=BLOCK_SIZES,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        module, slots = self.module(), x.slots.long()
        with in_blocks(module, FORWARD_KERNEL, x.block_v, 1):
            o, final_state = module.fused_recurrent_gated_delta_rule(
                x.q,
                x.k,
                x.v,
                x.g,
                x.beta,
                scale=x.scale,
                initial_state=x.pool.mT[slots],
                output_final_state=True,
                cu_seqlens=x.cu_seqlens,
                use_qk_l2norm_in_kernel=x.qk_norm,
            )
        x.pool.mT[slots] = final_state
        return o, x.pool


class RecurrentKdaBlocks(RecurrentBlocks):
    """`fused_recurrent_kda`: the same kernel with KDA's gate, of which it reads one for each key head."""

    source = KDA
    domain = dataclasses.replace(
        RecurrentBlocks.domain, rule=dataclasses.replace(RecurrentBlocks.domain.rule, operation="kda", grouped_heads=False)
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        module, slots = self.module(), x.slots.long()
        with in_blocks(module, FORWARD_KERNEL, x.block_v, 1):
            o, final_state = module.fused_recurrent_kda(
                x.q,
                x.k,
                x.v,
                x.g,
                x.beta,
                scale=x.scale,
                initial_state=x.pool.mT[slots],
                inplace_final_state=False,
                use_qk_l2norm_in_kernel=x.qk_norm,
                cu_seqlens=x.cu_seqlens,
            )
        x.pool.mT[slots] = final_state
        return o, x.pool
