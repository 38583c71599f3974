"""Adapters of vLLM's Triton kernels for KDA, those of Kimi-Linear and Kimi-K3 on NVIDIA. They adapt signatures and layout only.

vLLM's layer of Kimi calls `chunk_kda_with_fused_gate` for prompts, `fused_recurrent_kda_packed_decode` for single tokens and
`fused_recurrent_kda` for drafts. Padding and blocks are those of verify/adapters/vllm_pools.py.
"""

import dataclasses

from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.modules.domain import ModuleDomain
from properties.pools.case import BLOCK_SIZES
from properties.rules.domain import Domain
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters.blocks import in_blocks
from verify.adapters.left_out import IN_VLLM, left_out
from verify.adapters.serving import takes
from verify.adapters.serving_kernels import PROMPTS, VLLM, Chunks, call, dense, flat_bias, side_by_side, states, whole_tokens
from verify.adapters.vllm_pools import POOL, STEPS, blocks_of_tokens

KIMI = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
BOUNDS = ("none", "-5", "-1")  # of the log-decay
CHUNKS = dataclasses.replace(PROMPTS, operation="kda", grouped_heads=False, empty=False, refills=False, batch_heads=MOST_ALONG_Y)


class ChunkKda(VLLM, Chunks):
    """`chunk_kda`: log-decay and beta are given, in chunks of 64 tokens, in half precision.

    The wrapper needs an initial state. The outputs overwrite v, so v is a copy. In q and k, the channels and heads of a token must
    lie side by side. With the norm in the kernel, the wrapper makes them contiguous; without it, the adapter does. Sequences
    without tokens are left out, as for `vllm_rules.Chunk`.
    """

    folds = True
    source = f"{KIMI}.chunk"
    domain = CHUNKS

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        tokens = (*whole_tokens(x), x.v.clone(), x.g, x.beta)
        o, final = call(self.module().chunk_kda, x, *tokens, initial_state=states(x), output_final_state=x.output_final_state)
        return o, None if final is None else final.mT


class ChunkKdaGated(VLLM, Chunks):
    """`chunk_kda_with_fused_gate`: gate and beta are computed in the kernel."""

    folds = True
    source = f"{KIMI}.chunk"
    omits = left_out(IN_VLLM, "out")
    domain = dataclasses.replace(
        CHUNKS,
        negative_eigenvalues=False,
        in_kernel=("both",),
        lower_bounds=BOUNDS,
        parameter_dtypes=("fp32", "input"),
    )

    def __init__(self) -> None:
        place = f"{self.source}:chunk_kda_with_fused_gate"
        self.bounded, inside = takes(place, "lower_bound"), takes(place, "raw_beta")
        self.domain = dataclasses.replace(
            self.domain,
            in_kernel=("both",) if inside else ("gate",),
            lower_bounds=BOUNDS if self.bounded else BOUNDS[:1],
        )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        beta = x.b if x.get("beta") is None else x.beta
        o, final = call(
            self.module().chunk_kda_with_fused_gate,
            x,
            *(*whole_tokens(x), x.v.clone(), x.a, beta, x.A_log.contiguous(), flat_bias(x)),
            initial_state=None if x.state is None else states(x),
            output_final_state=x.output_final_state,
            **({"lower_bound": x.get("lower_bound")} if self.bounded else {}),
        )
        return o, None if final is None else final.mT


class KdaGate(VLLM):
    """`fused_kda_gate`: the gate alone."""

    algorithm = "pointwise"
    source = f"{KIMI}.chunk"
    omits = left_out(IN_VLLM, "beta", "threshold")
    domain = ModuleDomain("kda_gate", beta=False, backward=False, lower_bounds=BOUNDS, parameter_dtypes=("fp32", "input"))

    def __init__(self) -> None:
        self.bounded = takes(f"{self.source}:fused_kda_gate", "lower_bound")
        self.domain = self.domain if self.bounded else dataclasses.replace(self.domain, lower_bounds=BOUNDS[:1])

    def run(self, x: Inputs) -> Tensor:
        g: Tensor = self.module().fused_kda_gate(
            dense(x.a).flatten(-2),
            x.A_log.contiguous(),
            x.a.shape[-1],
            flat_bias(x),
            **({"lower_bound": x.get("lower_bound")} if self.bounded else {}),
        )
        return g


class RecurrentKda(VLLM):
    """`fused_recurrent_kda_fwd`: one or several tokens of each request on a pool, packed.

    The wrapper `fused_recurrent_kda` calls it with gate, beta and norm in the kernel. q, k and v are slices of one tensor, as
    vLLM's layer has them, since the kernel knows one stride from token to token. The wrapper compares strides, which a state of one
    channel may have otherwise. A draft has a block for each token, as in `vllm_pools.Verify`.
    """

    source = f"{KIMI}.fused_recurrent"
    omits = left_out(IN_VLLM, "inplace_final_state", "lower_bound", "out")
    domain = dataclasses.replace(
        POOL,
        rule=Domain(
            operation="kda",
            key_dims=(2, 256),
            value_dims=(2, 1024),
            grouped_heads=False,
            batched=False,
            in_kernel=("none", "gate", "beta", "both"),
            negative_eigenvalues=False,
            position_independent=True,
            backward=False,
        ),
        most_tokens=STEPS,
        rejects=False,
        blocks=BLOCK_SIZES,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        module, raw = self.module(), (x.get("a") is not None, x.get("b") is not None)
        blocks, accepted = (x.slots, None) if {*sequences(x, "v")} == {1} else blocks_of_tokens(x)
        q, k, v = slices(x, side_by_side(x))
        gate = {"A_log": x.A_log.contiguous(), "dt_bias": flat_bias(x)} if raw[0] else {}
        with in_blocks(module, "fused_recurrent_kda_fwd_kernel", x.block_v):
            o, _ = call(
                module.fused_recurrent_kda_fwd,
                x,
                *(q, k, v, dense(x.a if raw[0] else x.g), dense(x.b if raw[1] else x.beta)),
                initial_state=x.pool.mT,
                ssm_state_indices=blocks,
                num_accepted_tokens=accepted,
                use_gate_in_kernel=raw[0],
                use_beta_sigmoid_in_kernel=raw[1],
                **gate,
            )
        return o, x.pool


def slices(x: Inputs, mixed: Tensor) -> list[Tensor]:
    """q, k and v as slices of that tensor, with its stride from token to token even where an axis has one element or none."""
    found, begin = [], 0
    for name in "qkv":
        heads, width = x[name].shape[2:]
        strides = (mixed.numel(), mixed.shape[1], width, 1)
        found.append(mixed.as_strided((1, len(mixed), heads, width), strides, begin))
        begin += heads * width
    return found


class PackedDecodeKda(RecurrentKda):
    """`fused_recurrent_kda_packed_decode`: one token a request, q, k and v in one tensor, with gate, beta and norm inside.

    It always normalises q and k, so calls without the norm go to `RecurrentKda`. It needs a dt_bias.
    """

    omits = left_out(IN_VLLM, "lower_bound", "out")
    domain = dataclasses.replace(
        RecurrentKda.domain,
        rule=dataclasses.replace(RecurrentKda.domain.rule, in_kernel=("both",), dt_bias=False, empty=False),
        most_tokens=1,
        accepts=False,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        if not x.qk_norm:
            return super().run(x)
        module = self.module()
        with in_blocks(module, "fused_recurrent_kda_packed_decode_kernel", x.block_v):
            o, _ = module.fused_recurrent_kda_packed_decode(
                side_by_side(x),
                dense(x.a).flatten(0, 1).unsqueeze(0),
                dense(x.b).flatten(0, 1).unsqueeze(0),
                x.A_log.contiguous(),
                flat_bias(x),
                None,
                initial_state=x.pool.mT,
                state_indices=x.slots,
                scale=x.scale,
            )
        return o, x.pool
