"""Adapters of vLLM's decoding kernels, which update a pool of states in place. They adapt signatures and layout only.

vLLM keeps states as [P, HV, V, K] and calls a slot a block. Block 0 is the null block, which belongs to no request: an index of 0
or less is padding. A kernel writes nothing to the pool for a padding request.

A draft of several tokens has one block for each token. The kernels start from the block `ssm_state_indices[n, accepted - 1]`, where
`accepted` counts the tokens that were kept of the request's last draft, and write the state after token t to the block
`ssm_state_indices[n, t]`. A padding index there leaves out the write.
"""

import dataclasses
import types

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.pools.case import BLOCK_SIZES
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters import serving
from verify.adapters.base import Adapter
from verify.adapters.blocks import in_blocks
from verify.adapters.left_out import IN_VLLM, left_out

OPS = "vllm.third_party.flash_linear_attention.ops"
SIGMOID = f"{OPS}.fused_sigmoid_gating"
RECURRENT = f"{OPS}.fused_recurrent"
CHUNK = f"{OPS}.chunk"
STEPS = 16  # most tokens of a draft that is verified
NULL_BLOCK = 0

# dt_bias must be a tensor, and beta is at most 1: there is no allow_neg_eigval.
GATED = Domain(in_kernel=("both",), dt_bias=False, negative_eigenvalues=False, position_independent=True, backward=False)


class VLLM(Adapter):
    """Base of adapters of vLLM's kernels."""

    algorithm = "recurrent"
    requires = {"vllm": "0.33.0", "triton": "3.7.1"}  # noqa: RUF012 - as in the base class
    source: str  # the kernel's module

    def bring(self) -> None:
        self.module()

    def module(self) -> types.ModuleType:
        """The kernel's module."""
        return serving.module(self.source)


class Decode(VLLM):
    """`fused_sigmoid_gating_delta_rule_update`: gates, norm and rule in one kernel, for one token of each request."""

    source = SIGMOID
    omits = left_out(IN_VLLM, "beta", "threshold", "inplace_final_state", "num_accepted_tokens", "is_kda")
    domain = PoolDomain(
        rule=GATED,
        most_tokens=1,
        padding_slots=("0",),
        fresh=False,
        accepts=False,
        layout="vk",
        state_dtypes=("fp32", "bf16"),
        blocks=BLOCK_SIZES,
    )

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
    domain = PoolDomain(
        rule=Domain(position_independent=True, backward=False),
        padding_slots=("0",),
        fresh=False,
        rejects=False,
        layout="vk",
        state_dtypes=("fp32", "bf16"),
        blocks=BLOCK_SIZES,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        module = self.module()
        blocks, accepted = (x.slots, None) if max(sequences(x, "v")) == 1 else blocks_of_tokens(x)
        with in_blocks(module, "fused_recurrent_gated_delta_rule_fwd_kernel", x.block_v, 1):
            o, _ = module.fused_recurrent_gated_delta_rule(
                x.q,
                x.k,
                x.v,
                x.g,
                x.beta,
                scale=x.scale,
                initial_state=x.pool.mT,
                cu_seqlens=x.cu_seqlens,
                ssm_state_indices=blocks,
                num_accepted_tokens=accepted,
                use_qk_l2norm_in_kernel=x.qk_norm,
            )
        return o, x.pool


class PackedDecode(VLLM):
    """`fused_recurrent_gated_delta_rule_packed_decode`: one token a request, q, k and v in one tensor [B, 2 H K + HV V].

    Its wrapper refuses a and b whose heads do not lie side by side.
    """

    source = RECURRENT
    domain = dataclasses.replace(Decode.domain, rule=dataclasses.replace(GATED, empty=False), views=("sliced", "offset", "fused"))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        module = self.module()
        o = x.v.new_empty(len(x.slots), 1, *x.v.shape[2:])
        tokens = [x[name].flatten(0, 1).flatten(1) for name in ("q", "k", "v")]
        with in_blocks(module, "fused_recurrent_gated_delta_rule_packed_decode_kernel", x.block_v):
            module.fused_recurrent_gated_delta_rule_packed_decode(
                torch.cat(tokens, -1),
                x.a.flatten(0, 1),
                x.b.flatten(0, 1),
                A_log=x.A_log,
                dt_bias=x.dt_bias,
                scale=x.q.shape[-1] ** -0.5 if x.scale is None else x.scale,
                initial_state=x.pool.mT,
                out=o,
                ssm_state_indices=x.slots,
                use_qk_l2norm_in_kernel=x.qk_norm,
            )
        return o.reshape(x.v.shape), x.pool


class Prefill(VLLM):
    """`chunk_gated_delta_rule` between the copies that vLLM's layer makes: prompts in chunks of 64 tokens, in half precision.

    As in `_forward_core` of qwen_gdn_linear_attn.py, the states are gathered from the pool, those of requests without history
    become zeros, and the final states are written back. That writes to the null block too, so callers leave padding out here. A
    request without tokens must not stand before others, because vLLM's index of chunks leaves it out (docs/FINDINGS.md).
    """

    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    source = CHUNK
    omits = left_out(IN_VLLM, "chunk_indices", "chunk_offsets", "core_attn_out")
    domain = PoolDomain(
        rule=Domain(dtypes=("bf16", "fp16"), key_dims=(1, 256), batched=False, backward=False),
        padding_slots=(),
        accepts=False,
        layout="vk",
        state_dtypes=("fp32", "bf16"),
        empty_first=False,
        refills=False,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool, slots = x.pool.mT, x.slots.long()
        states = pool[slots]
        if x.has_initial_state is not None:
            states[x.has_initial_state == 0] = 0
        o, final = self.module().chunk_gated_delta_rule(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            scale=x.scale,
            initial_state=states,
            output_final_state=True,
            cu_seqlens=x.cu_seqlens,
            use_qk_l2norm_in_kernel=x.qk_norm,
        )
        pool[slots] = final.to(pool.dtype)
        return o, x.pool
