"""Adapters of SGLang's recurrent kernels that take one state a sequence, V first. They adapt signatures and layout only."""

import dataclasses

from torch import Tensor

from oracles.operation import Inputs
from verify.adapters.serving_kernels import FEW_PROGRAMS, SGLang, call, call_on_states, states
from verify.adapters.sglang_pools import OPS, RECURRENT


class Recurrent(SGLang):
    """`fused_recurrent_gated_delta_rule`: token by token in float32, without a backward."""

    source = RECURRENT
    domain = FEW_PROGRAMS

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return call_on_states(self.module().fused_recurrent_gated_delta_rule, x)


class RecurrentKda(SGLang):
    """`fused_recurrent_kda`: the same for KDA, with an initial state. Gates are read by key head, so HV must be H."""

    source = f"{OPS}.fla.kda"
    domain = dataclasses.replace(Recurrent.domain, operation="kda", grouped_heads=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        o, final = call(self.module().fused_recurrent_kda, x, initial_state=states(x), inplace_final_state=False)
        return o, final.mT
