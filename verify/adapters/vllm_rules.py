"""Adapters of vLLM's chunk kernels, which take and return one state a sequence, V first. They adapt signatures and layout only."""

import dataclasses

from torch import Tensor

from oracles.operation import Inputs
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters.left_out import IN_VLLM, left_out
from verify.adapters.serving_kernels import PROMPTS, VLLM, Chunks, call_on_states
from verify.adapters.vllm_pools import CHUNK


class Chunk(VLLM, Chunks):
    """`chunk_gated_delta_rule`: chunkwise, in half precision, without a backward.

    Sequences without tokens are left out: one that stands before another breaks the index of chunks (docs/FINDINGS.md).
    """

    source = CHUNK
    omits = left_out(IN_VLLM, "chunk_indices", "chunk_offsets", "core_attn_out")
    domain = dataclasses.replace(PROMPTS, empty=False, refills=False, batch_heads=MOST_ALONG_Y)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return call_on_states(self.module().chunk_gated_delta_rule, x)
