"""Adapters of vLLM's decoding kernels, which update a pool of states in place. They adapt signatures and layout only.

vLLM keeps states as [P, HV, V, K] and calls a slot a block. Block 0 is the null block, which belongs to no request: an index of 0
or less is padding. A kernel writes nothing to the pool for a padding request.

A draft of several tokens has one block for each token. The kernels start from the block `ssm_state_indices[n, accepted - 1]`, where
`accepted` counts the tokens that were kept of the request's last draft, and write the state after token t to the block
`ssm_state_indices[n, t]`. A padding index there leaves out the write.
"""

import dataclasses

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.pools.case import BLOCK_SIZES
from properties.pools.domain import PoolDomain
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters.blocks import in_blocks
from verify.adapters.left_out import IN_VLLM, left_out
from verify.adapters.serving_kernels import FEW_PROGRAMS, GATED, PROMPTS, VLLM, Chunks, Packed, call

OPS = "vllm.third_party.flash_linear_attention.ops"
SIGMOID = f"{OPS}.fused_sigmoid_gating"
RECURRENT = f"{OPS}.fused_recurrent"
CHUNK = f"{OPS}.chunk"
STEPS = 16  # most tokens of a draft that is verified
NULL_BLOCK = 0
POOL = PoolDomain(padding_slots=("0",), fresh=False, layout="vk", state_dtypes=("fp32", "bf16"))


class Decode(VLLM):
    """`fused_sigmoid_gating_delta_rule_update`: gates, norm and rule in one kernel, for one token of each request."""

    source = SIGMOID
    omits = left_out(IN_VLLM, "beta", "threshold", "inplace_final_state", "num_accepted_tokens", "is_kda")
    domain = dataclasses.replace(POOL, rule=GATED, most_tokens=1, accepts=False, blocks=BLOCK_SIZES)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self.call(x, x.slots, None)

    def call(self, x: Inputs, blocks: Tensor, accepted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Call the kernel with blocks [N] or [N, T]. `accepted` [N] is the column, from 1 up, of the block that holds the state."""
        module = self.module()
        with in_blocks(module, "fused_sigmoid_gating_delta_rule_update_kernel", x.block_v, 1):
            o, _ = module.fused_sigmoid_gating_delta_rule_update(
                A_log=x.A_log,
                a=x.a,
                b=x.b,
                dt_bias=x.dt_bias.flatten(),
                q=x.q,
                k=x.k,
                v=x.v,
                scale=x.scale,
                initial_state=x.pool.mT,
                cu_seqlens=x.cu_seqlens,
                ssm_state_indices=blocks,
                num_accepted_tokens=accepted,
                use_qk_l2norm_in_kernel=x.qk_norm,
                is_kda=self.domain.rule.operation == "kda",
            )
        return o, x.pool


class DecodeKda(Decode):
    """`Decode` with the gate of KDA, one number a key channel.

    The kernel reads gates without a mask, so widths of keys must be powers of two (docs/FINDINGS.md).
    """

    omits = left_out(IN_VLLM, "beta", "threshold", "inplace_final_state", "num_accepted_tokens")
    domain = dataclasses.replace(
        Decode.domain,
        rule=dataclasses.replace(GATED, operation="kda", key_dims=(64, 128), value_dims=(64, 256), width_step=64),
    )


class Verify(Decode):
    """The same kernel where drafts are verified, with a block for each token.

    The pool of a case has one slot for each request. The slot stands in the column of the accepted token, from which the kernel
    both starts and writes the state that is kept. The other columns are padding, so that the kernel writes no other state. There is
    no column before the first token, so one token at least is always accepted.
    """

    omits = left_out(IN_VLLM, "beta", "threshold", "inplace_final_state", "is_kda")
    domain = dataclasses.replace(Decode.domain, most_tokens=STEPS, accepts=True, rejects=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self.call(x, *blocks_of_tokens(x))


def blocks_of_tokens(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return the blocks [N, T] of each request's tokens, and the column [N], from 1 up, of its slot. Other columns are padding."""
    lengths = torch.tensor(sequences(x, "v"), dtype=x.slots.dtype, device=x.slots.device)
    accepted = (lengths if x.accepted is None else x.accepted).clamp(min=1)
    blocks = x.slots.new_full((len(lengths), max(1, *lengths.tolist())), NULL_BLOCK)
    return blocks.scatter(1, accepted.long().unsqueeze(1) - 1, x.slots.unsqueeze(1)), accepted


class Recurrent(VLLM):
    """`fused_recurrent_gated_delta_rule` on a pool: log-decay and beta are given. Drafts have blocks as in `Verify`."""

    source = RECURRENT
    omits = left_out(IN_VLLM, "inplace_final_state")
    domain = dataclasses.replace(POOL, rule=FEW_PROGRAMS, rejects=False, blocks=BLOCK_SIZES)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        module = self.module()
        blocks, accepted = (x.slots, None) if max(sequences(x, "v")) == 1 else blocks_of_tokens(x)
        drafts = {"ssm_state_indices": blocks, "num_accepted_tokens": accepted}
        with in_blocks(module, "fused_recurrent_gated_delta_rule_fwd_kernel", x.block_v, 1):
            o, _ = call(module.fused_recurrent_gated_delta_rule, x, initial_state=x.pool.mT, **drafts)
        return o, x.pool


class PackedDecode(VLLM, Packed):
    """`fused_recurrent_gated_delta_rule_packed_decode`: one token a request, q, k and v in one tensor [B, 2 H K + HV V].

    Its wrapper refuses a and b whose heads do not lie side by side.
    """

    source = RECURRENT
    domain = dataclasses.replace(Decode.domain, rule=dataclasses.replace(GATED, empty=False), views=("sliced", "offset", "fused"))


class Prefill(VLLM, Chunks):
    """`chunk_gated_delta_rule` between the copies that vLLM's layer makes: prompts in chunks of 64 tokens, in half precision.

    As in `_forward_core` of qwen_gdn_linear_attn.py, the states are gathered from the pool, those of requests without history
    become zeros, and the final states are written back. That writes to the null block too, so callers leave padding out here. A
    request without tokens must not stand before others, because vLLM's index of chunks leaves it out (docs/FINDINGS.md).
    """

    source = CHUNK
    omits = left_out(IN_VLLM, "chunk_indices", "chunk_offsets", "core_attn_out")
    domain = dataclasses.replace(
        POOL,
        rule=dataclasses.replace(PROMPTS, batched=False, batch_heads=MOST_ALONG_Y),
        padding_slots=(),
        fresh=True,
        accepts=False,
        empty_first=False,
        refills=False,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool, slots = x.pool.mT, x.slots.long()
        states = pool[slots]
        if x.has_initial_state is not None:
            states[x.has_initial_state == 0] = 0
        o, final = call(self.module().chunk_gated_delta_rule, x, initial_state=states, output_final_state=True)
        pool[slots] = final.to(pool.dtype)
        return o, x.pool
