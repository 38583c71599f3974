"""Adapters of SGLang's Triton kernels for KDA prompts and drafts. They adapt signatures and layout only.

SGLang's other KDA backends (CuTe DSL, FlashInfer, FlashKDA, Helion, PTX, and CUDA sources) need a GPU.
"""

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters import serving_kernels
from verify.adapters.fla import chosen
from verify.adapters.left_out import IN_SGLANG, left_out
from verify.adapters.serving import takes
from verify.adapters.serving_kernels import PROMPTS, Chunks, SGLang, dense, flat_bias, states, whole_tokens
from verify.adapters.sglang_pools import OPS, POOL, REPLAY, Verify, without_padding

KDA = f"{OPS}.fla.kda"
FUSED = (("fused", ("no", "yes")),)
RULE = dataclasses.replace(PROMPTS, operation="kda", grouped_heads=False)
BETWEEN = ("output_intermediate_states", "track_state", "track_chunk_idx", "chunk_indices", "chunk_offsets")


class VerifyKda(Verify):
    """`Verify` with the gate of KDA, one number a key channel."""

    omits = left_out(IN_SGLANG, *REPLAY)
    domain = dataclasses.replace(
        Verify.domain, rule=dataclasses.replace(Verify.domain.rule, operation="kda"), blocks=Verify.domain.blocks[1:]
    )


class ChunkKda(SGLang, Chunks):
    """`chunk_kda`: prompts in chunks of 64 tokens, in half precision; final states are written to the pool.

    Log-decay and beta are given. The outputs overwrite v, so v is a copy. In q and k, the channels and heads of a token must lie
    side by side. With the norm in the kernel, the wrapper makes them contiguous; without it, the adapter does. As for
    `ChunkInPlace`, a request without tokens must not stand before others, and `cu_seqlens` must be a new tensor for every call.

    If a call has at most 256 chunks times heads, the wrapper computes more in one kernel. The option `fused` leaves that choice to
    the wrapper ("yes"), or makes small calls use the kernels of large ones too ("no"). The one kernel is wrong where a channel
    decays by more than 87 within 16 tokens (docs/FINDINGS.md).
    """

    folds = True
    source = KDA
    omits = left_out(IN_SGLANG, "A_log", "dt_bias", "lower_bound", "beta_is_raw", *BETWEEN)
    domain = dataclasses.replace(
        POOL,
        rule=dataclasses.replace(RULE, batched=False, batch_heads=MOST_ALONG_Y),
        empty_first=False,
        refills=False,
        options=FUSED,
    )

    def __init__(self) -> None:
        self.domain = without_padding(self.domain)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        o = call(self.module(), x, x.pool.mT, x.slots, g=x.g, beta=x.beta)
        return o, x.pool


class ChunkKdaGated(SGLang, Chunks):
    """`chunk_kda` with gate and beta in the kernel, on one state a sequence.

    The states of the sequences are a pool of their own, in whose slots the kernel writes the final ones.
    """

    folds = True
    source = KDA
    omits = left_out(IN_SGLANG, *BETWEEN)
    domain = dataclasses.replace(
        RULE,
        empty=False,
        negative_eigenvalues=False,
        in_kernel=("gate", "beta", "both"),
        lower_bounds=("none", "-5", "-1"),
        parameter_dtypes=("fp32", "input"),
        refills=False,
        batch_heads=MOST_ALONG_Y,
        options=FUSED,
    )

    def __init__(self) -> None:
        if not takes(f"{KDA}:chunk_kda", "beta_is_raw"):
            self.domain = dataclasses.replace(self.domain, in_kernel=("gate",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        pool = states(x)
        gate: dict[str, Any] = {"g": x.get("g"), "beta": x.get("beta")}
        if x.get("a") is not None:
            gate |= {"g": x.a, "A_log": x.A_log.contiguous(), "dt_bias": flat_bias(x), "lower_bound": x.get("lower_bound")}
        if x.get("b") is not None:
            gate |= {"beta": x.b, "beta_is_raw": True}
        o = call(self.module(), x, pool, torch.arange(len(pool), device=x.v.device), **gate)
        return o, pool.mT if x.output_final_state else None


def call(module: types.ModuleType, x: Inputs, pool: Tensor, slots: Tensor, **gate: Any) -> Tensor:
    """Call `chunk_kda` on a pool [P, HV, V, K]. `gate` has what the kernel gets for gate and beta."""
    tokens = (*whole_tokens(x), dense(x.v))
    with contextlib.nullcontext() if chosen(x, "fused") else _apart(module):
        o: Tensor = serving_kernels.call(module.chunk_kda, x, *tokens, initial_state=pool, initial_state_indices=slots, **gate)
    return o


@contextlib.contextmanager
def _apart(module: types.ModuleType) -> Iterator[None]:
    """Make `chunk_kda` use the kernels of large calls inside."""
    original = module.chunk_kda_fwd_intra

    def apart(**arguments: Any) -> Any:
        return original(**{**arguments, "fuse_diagonal": False, "fuse_recompute": False})

    with mock.patch.object(module, "chunk_kda_fwd_intra", apart):
        yield
