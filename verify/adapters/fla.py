"""flash-linear-attention's gated delta rule: signatures and layout only."""

from typing import Any

from torch import Tensor

from oracles.operation import Inputs
from verify.adapter import Adapter, Domain

REQUIRES = {"fla-core": "0.6.0", "triton": "3.7.1"}


class Chunk(Adapter):
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`: chunkwise, forward and backward."""

    algorithm = "chunkwise"
    chunk = 64
    # Not position independent: torch sums dg over blocks of key channels, and on a CPU its sum depends on the place in memory.
    domain = Domain(key_dims=(1, 256))
    counterpart = "fla/fused_recurrent"
    requires = REQUIRES

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

        return call(rule, x)


class FusedRecurrent(Adapter):
    """`fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule`: token by token in float32; its backward is not implemented."""

    algorithm = "recurrent"
    domain = Domain(key_dims=(1, 256), position_independent=True, backward=False)
    requires = REQUIRES

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as rule

        return call(rule, x)


def call(rule: Any, x: Inputs, **more: Any) -> tuple[Tensor, Tensor | None]:
    """A rule of FLA's on a kernel's inputs, with `more` arguments."""
    o, state = rule(
        q=x.q,
        k=x.k,
        v=x.v,
        g=x.g,
        beta=x.beta,
        scale=x.scale,
        initial_state=x.state,
        output_final_state=x.output_final_state,
        use_qk_l2norm_in_kernel=x.qk_norm,
        cu_seqlens=x.cu_seqlens,
        **more,
    )
    return o, state
