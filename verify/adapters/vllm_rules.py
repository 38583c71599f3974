"""Adapters of vLLM's chunk kernels, which take and return one state a sequence, V first. They adapt signatures and layout only."""

from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters.left_out import IN_VLLM, left_out
from verify.adapters.vllm_pools import CHUNK, VLLM


class Chunk(VLLM):
    """`chunk_gated_delta_rule`: chunkwise, in half precision, without a backward.

    Sequences without tokens are left out: one that stands before another breaks the index of chunks (docs/FINDINGS.md).
    """

    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    source = CHUNK
    omits = left_out(IN_VLLM, "chunk_indices", "chunk_offsets", "core_attn_out")
    domain = Domain(
        dtypes=("bf16", "fp16"), key_dims=(1, 256), empty=False, backward=False, refills=False, batch_heads=MOST_ALONG_Y
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, final = self.module().chunk_gated_delta_rule(
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
