"""Adapters of SGLang's recurrent kernels without a pool, as pools: only there can a case choose the block of value channels.

The kernels take and return states [N, HV, V, K]. The adapters read them from the pool's slots and write the final ones there.
"""

import dataclasses

from torch import Tensor

from oracles.operation import Inputs
from properties.pools.case import BLOCK_SIZES
from properties.pools.domain import PoolDomain
from verify.adapters.blocks import in_blocks
from verify.adapters.serving_kernels import FEW_PROGRAMS, SGLang, call
from verify.adapters.sglang_pools import OPS, RECURRENT

KDA = f"{OPS}.fla.kda"
FORWARD_KERNEL = "fused_recurrent_gated_delta_rule_fwd_kernel"


class RecurrentBlocks(SGLang):
    """`fused_recurrent_gated_delta_rule`: log-decay and beta are given, states come in and go out as tensors."""

    source = RECURRENT
    domain = PoolDomain(rule=FEW_PROGRAMS, padding_slots=(), fresh=False, accepts=False, layout="vk", blocks=BLOCK_SIZES)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self._called("fused_recurrent_gated_delta_rule", x, output_final_state=True)

    def _called(self, rule: str, x: Inputs, **final: bool) -> tuple[Tensor, Tensor]:
        module, slots = self.module(), x.slots.long()
        with in_blocks(module, FORWARD_KERNEL, x.block_v, 1):
            o, final_state = call(getattr(module, rule), x, initial_state=x.pool.mT[slots], **final)
        x.pool.mT[slots] = final_state
        return o, x.pool


class RecurrentKdaBlocks(RecurrentBlocks):
    """`fused_recurrent_kda`: the same kernel with KDA's gate, of which it reads one for each key head."""

    source = KDA
    domain = dataclasses.replace(
        RecurrentBlocks.domain, rule=dataclasses.replace(FEW_PROGRAMS, operation="kda", grouped_heads=False)
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self._called("fused_recurrent_kda", x, inplace_final_state=False)
