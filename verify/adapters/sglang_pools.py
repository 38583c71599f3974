"""Adapters of SGLang's decoding kernels, which update a pool of states in place. They adapt signatures and layout only.

SGLang keeps states as [P, HV, V, K]. A negative slot is padding: the kernel writes nothing to the pool for it. Slots that begin are
zeroed by the pool's allocator, so no kernel starts a request from zeros itself.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.pools.case import BLOCK_SIZES
from properties.pools.domain import PoolDomain
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters import serving
from verify.adapters.blocks import in_blocks
from verify.adapters.left_out import IN_SGLANG, left_out
from verify.adapters.serving import has_text
from verify.adapters.serving_kernels import FEW_PROGRAMS, GATED, PROMPTS, Chunks, Packed, SGLang, call

OPS = "sglang.kernels.ops.attention"
SIGMOID = f"{OPS}.linear.fused_sigmoid_gating_recurrent"
RECURRENT = f"{OPS}.fla.fused_recurrent"
CHUNK = f"{OPS}.fla.chunk"
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
SCATTERED = 1024  # numbers that a program of the scatter kernel copies, as in SGLang's wrapper
STEPS = 16  # most tokens of a draft, the second axis of the buffer of states
POOL = PoolDomain(padding_slots=("-1",), fresh=False, accepts=False, layout="vk", state_dtypes=("fp32", "bf16"))
# Parameters that `omits` names: those of a draft that is verified, and those of a ring of inputs and what comes with it.
DRAFTS = (
    "disable_state_update",
    "intermediate_states_buffer",
    "intermediate_state_indices",
    "cache_steps",
    "retrieve_parent_token",
)
REPLAY = (
    "lower_bound",
    "cache_ring",
    "replayssm_rawv",
    "replayssm_rawk",
    "replayssm_g",
    "replayssm_beta",
    "match_cutedsl_decode",
)


def _of_kda(domain: PoolDomain) -> PoolDomain:
    """Return the domain for KDA. Its kernel for blocks of 4 channels has inline assembly, which cannot be interpreted."""
    return dataclasses.replace(domain, rule=dataclasses.replace(domain.rule, operation="kda"), blocks=BLOCK_SIZES[1:])


class Decode(SGLang):
    """`fused_sigmoid_gating_delta_rule_update`: gates, norm and rule in one kernel, for one or several tokens of each request.

    The kernel reads the stride of tokens only. Heads and channels of a token must lie side by side, and so must the tokens of all
    requests of a batch.
    """

    source = SIGMOID
    omits = left_out(IN_SGLANG, "is_kda", *DRAFTS, *REPLAY)
    domain = dataclasses.replace(POOL, rule=GATED, blocks=BLOCK_SIZES, graphs=True, views=("offset", "fused"))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self.call(x)

    def call(self, x: Inputs, **verification: Any) -> tuple[Tensor, Tensor]:
        """Call the kernel; `verification` has the arguments of a draft that is verified."""
        module = self.module()
        axis = 0 if x.a.device.type == "cuda" else 1  # the blocks of channels are another axis of the grid on a GPU
        with in_blocks(module, "fused_sigmoid_gating_delta_rule_update_kernel", x.block_v, axis):
            o = module.fused_sigmoid_gating_delta_rule_update(
                A_log=x.A_log,
                a=x.a,
                dt_bias=x.dt_bias.flatten(),
                softplus_beta=1.0,
                softplus_threshold=20.0,
                q=x.q,
                k=x.k,
                v=x.v,
                b=x.b,
                initial_state_source=x.pool.mT,
                initial_state_indices=x.slots,
                scale=x.scale,
                use_qk_l2norm_in_kernel=x.qk_norm,
                cu_seqlens=x.cu_seqlens,
                is_kda=self.domain.rule.operation == "kda",
                **verification,
            )
        return o, x.pool


class DecodeKda(Decode):
    """`Decode` with the gate of KDA, one number a key channel."""

    omits = left_out(IN_SGLANG, *DRAFTS, *REPLAY)
    domain = _of_kda(Decode.domain)


class Verify(Decode):
    """The same kernel where drafts are verified, and the commit of the accepted token's state.

    As in SGLang's `target_verify`, the kernel writes the state after every token to a buffer [requests, steps, HV, V, K] and leaves
    the pool alone. Then `fused_mamba_state_scatter_with_mask` copies the accepted token's state to the pool. Drafts may be trees: a
    token then starts from its parent's state in the buffer.
    """

    omits = left_out(IN_SGLANG, "is_kda", *REPLAY)
    domain = dataclasses.replace(Decode.domain, graphs=False, most_tokens=STEPS, accepts=True, trees=True, state_dtypes=("fp32",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(sequences(x, "v"), device=x.v.device)
        requests = torch.arange(len(lengths), dtype=x.slots.dtype, device=x.v.device)
        buffer = x.pool.new_empty(len(lengths), STEPS, *x.pool.mT.shape[1:])
        o, _ = self.call(
            x,
            disable_state_update=True,
            intermediate_states_buffer=buffer,
            intermediate_state_indices=requests,
            cache_steps=STEPS,
            retrieve_parent_token=None if x.get("parents") is None else _by_request(x.parents, lengths),
        )
        commit(x.pool.mT, buffer, x.slots, (lengths if x.accepted is None else x.accepted) - 1)
        return o, x.pool


class VerifyHalf(Verify):
    """`Verify` with states in bf16, without trees: a token of a tree would start from a state that is rounded on purpose."""

    omits = left_out(IN_SGLANG, "is_kda", "retrieve_parent_token", *REPLAY)
    domain = dataclasses.replace(Verify.domain, state_dtypes=("bf16",), trees=False)


def without_padding(domain: PoolDomain) -> PoolDomain:
    """Return the domain of chunk kernels, which may not take padding."""
    return dataclasses.replace(domain, padding_slots=()) if strays() else domain


def strays() -> bool:
    """Whether chunk kernels read and write before the pool where a request is padding, as they did before 0.5.19."""
    module = f"{OPS}.fla.chunk_delta_h"
    return has_text(module, "initial_state_indices") and not has_text(module, "valid_state")


def _by_request(parents: Tensor, lengths: Tensor) -> Tensor:
    """The parents [N, T] of each request's tokens. The first token's parent is not read."""
    rows = parents.clamp(min=0).flatten().split(lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def commit(pool: Tensor, buffer: Tensor, slots: Tensor, steps: Tensor) -> None:
    """Copy the state of each request after token `steps` [N] from the buffer [N, steps, ...] to its slot of the pool [P, ...].

    A negative step or slot is left out. Without a GPU, SGLang's wrapper refuses its tensors, so its kernel is launched with the
    arguments and the grid of the wrapper.
    """
    module = serving.module(SCATTER)
    if pool.device.type == "cuda":
        module.fused_mamba_state_scatter_with_mask(pool.unsqueeze(0), buffer.unsqueeze(0), slots, steps)
        return
    size = pool[0].numel()
    kernel = module._fused_mamba_state_scatter_with_mask_kernel
    rows = [torch.arange(len(slots), dtype=torch.int32)] * ("src_indices_raw_ptr" in kernel.arg_names)  # from 0.5.22 on
    kernel[len(slots), 1, -(-size // SCATTERED)](
        buffer,
        pool,
        slots.to(torch.int32),
        steps.to(torch.int32),
        *rows,
        size,
        0,
        *buffer.stride()[:2],
        0,
        pool.stride(0),
        *buffer.shape[:2],
        len(pool),
        BLOCK_SIZE=SCATTERED,
    )


class Update(SGLang):
    """`fused_recurrent_gated_delta_rule_update`: log-decay and beta are given, for one or several tokens of each request.

    Its `input_guard` makes every tensor contiguous. A pool whose slots lie apart would be copied, and the states would be lost, so
    slots must lie side by side.
    """

    source = RECURRENT
    omits = left_out(IN_SGLANG, "disable_output_calculation", *DRAFTS)
    domain = dataclasses.replace(POOL, rule=FEW_PROGRAMS, blocks=BLOCK_SIZES, graphs=True, apart=False)

    def __init__(self) -> None:
        # Before 0.5.22 the wrapper compares their number with that of the requests in packed calls, and else does not read them.
        self.asks = has_text(self.source, "            if initial_state_indices.shape[0] != intermediate_state_indices.shape[0]:")

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        module = self.module()
        rule = module.fused_recurrent_gated_delta_rule_update
        with in_blocks(module, "fused_recurrent_gated_delta_rule_update_fwd_kernel", x.block_v, 1):
            more = {"intermediate_state_indices": x.slots} if self.asks else {}
            o = call(rule, x, initial_state_source=x.pool.mT, initial_state_indices=x.slots, **more)
        return o, x.pool


class PackedDecode(SGLang, Packed):
    """`fused_recurrent_gated_delta_rule_packed_decode`: one token a request, q, k and v in one tensor [B, 2 H K + HV V]."""

    source = RECURRENT
    domain = dataclasses.replace(Decode.domain, rule=dataclasses.replace(GATED, empty=False), most_tokens=1)


class PackedDecodeKda(PackedDecode):
    """`fused_recurrent_kda_packed_decode`: the same with the gate of KDA.

    With int32 indices it may call a CUDA kernel instead, which has to be built (at least 8 requests, bf16, widths of 128).
    """

    wrapper = "fused_recurrent_kda_packed_decode"
    omits = left_out(IN_SGLANG, "lower_bound")
    domain = dataclasses.replace(_of_kda(PackedDecode.domain), indices=("int64",))


class ChunkInPlace(SGLang, Chunks):
    """`chunk_gated_delta_rule`: prompts in chunks of 64 tokens, in half precision; final states are written to the pool.

    As for `Update`, slots must lie side by side. A request without tokens must not stand before others: `prepare_chunk_indices`
    counts only sequences that have a chunk, so that the next request gets the slot of the empty one (docs/FINDINGS.md). Its result
    is kept by the identity of `cu_seqlens`, which must therefore be a new tensor for every call.
    """

    source = CHUNK
    omits = left_out(IN_SGLANG, "head_first", "inplace_update")
    domain = dataclasses.replace(
        POOL,
        rule=dataclasses.replace(PROMPTS, batched=False, batch_heads=MOST_ALONG_Y),
        apart=False,
        empty_first=False,
        refills=False,
    )

    def __init__(self) -> None:
        self.domain = without_padding(self.domain)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        rule = self.module().chunk_gated_delta_rule
        o, _, _ = call(rule, x, initial_state=x.pool.mT, initial_state_indices=x.slots)
        return o, x.pool
