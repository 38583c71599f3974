"""Adapters of FlashInfer's kernels for Gated DeltaNet, which need a GPU. They adapt signatures and layout only.

The kernels are compiled on the host by FlashInfer's requirements, so its files alone are not enough. Widths are 128. States lie in
memory as [V, K]. The prefill kernel takes the decay alpha; it computes log2(alpha + 1e-10), so a state never decays by less than
1e-10. The other two compute gate and beta, and round q, k and v of float16 to bfloat16, so float16 is left out of their domains.
"""

import dataclasses
import importlib
import types

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.flashinfer_references import PADDED, REQUIRES, committed, drafted

WIDTH = 128
ON_A_GPU = Domain(
    dtypes=("bf16", "fp16"),
    gate_dtypes=("fp32",),
    key_dims=(WIDTH, WIDTH),
    value_dims=(WIDTH, WIDTH),
    negative_eigenvalues=False,
    views=False,
    backward=False,
)
SERVED = dataclasses.replace(ON_A_GPU, dtypes=("bf16",), in_kernel=("both",), dt_bias=False, empty=False)


class Kernel(Adapter):
    """Base of adapters of FlashInfer's kernels. RuntimeError, in one line, without a GPU or without the whole library."""

    requires = REQUIRES
    source: str  # the function's module

    def __init__(self) -> None:
        self.module = imported(self.source)


def imported(place: str) -> types.ModuleType:
    """Import a module of the installed library. RuntimeError if there is no GPU, or if the library lacks a requirement."""
    need = "FlashInfer's kernels need a GPU and the library with its requirements (pip install flashinfer-python)"
    if not torch.cuda.is_available():
        raise RuntimeError(f"{need}: torch sees no GPU")
    try:
        return importlib.import_module(place)
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RuntimeError(f"{need}: importing {place} failed: {line}") from error


class Prefill(Kernel):
    """`chunk_gated_delta_rule`: packed sequences in chunks of 64 tokens. alpha and beta are float32.

    No sequence may be empty, because the kernel leaves the final state of an empty sequence unwritten (docs/FINDINGS.md).
    """

    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    source = "flashinfer.gdn_prefill"
    domain = dataclasses.replace(ON_A_GPU, batched=False, empty=False, decays=("linear",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        shape = len(x.cu_seqlens) - 1, x.v.shape[2], x.v.shape[3], x.k.shape[3]
        state = x.v.new_empty(shape, dtype=torch.float32) if x.output_final_state else None
        answer = self.module.chunk_gated_delta_rule(
            x.q[0],
            x.k[0],
            x.v[0],
            g=x.alpha[0],
            beta=x.beta[0].float(),
            scale=x.scale,
            initial_state=None if x.state is None else x.state.mT.contiguous(),
            output_final_state=x.output_final_state,
            cu_seqlens=x.cu_seqlens,
            use_qk_l2norm_in_kernel=x.qk_norm,
            output_state=state,
        )
        o, final = answer if x.output_final_state else (answer, None)
        return o.unsqueeze(0), None if final is None else final.mT


class Decode(Kernel):
    """`gated_delta_rule_decode_pretranspose`: one token for each request, on a pool of float32 states.

    A pool in bf16 is not adapted: there the kernel takes slot 0 for padding requests, whose state it overwrites.
    """

    algorithm = "recurrent"
    source = "flashinfer.gdn_decode"
    domain = PoolDomain(
        rule=SERVED,
        most_tokens=1,
        padding_slots=PADDED,
        fresh=False,
        accepts=False,
        layout="vk",
        apart=False,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v, a, b = (x[name].flatten(0, 1).unsqueeze(1) for name in ("q", "k", "v", "a", "b"))
        o, _ = self.module.gated_delta_rule_decode_pretranspose(
            q,
            k,
            v,
            None,
            x.A_log,
            a,
            x.dt_bias,
            b,
            scale=x.scale,
            use_qk_l2norm=x.qk_norm,
            initial_state=x.pool.mT,
            initial_state_indices=x.slots,
        )
        return o.reshape(x.v.shape), x.pool


class Mtp(Kernel):
    """`gated_delta_rule_mtp`: a draft for each request, on a pool of float32 states. A draft of one token goes to `Decode`.

    If a draft is accepted in part, the kernel leaves the pool alone, and the state after the accepted token comes from the buffer
    that has the state after every token.
    """

    algorithm = "recurrent"
    source = "flashinfer.gdn_decode"
    domain = PoolDomain(
        rule=dataclasses.replace(SERVED, packed=False),
        most_tokens=8,
        padding_slots=PADDED,
        fresh=False,
        layout="vk",
        apart=False,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        if x.v.shape[1] == 1:
            return self.decoded(x)
        pool = x.pool.mT
        buffer = None if x.accepted is None else pool.new_empty(*x.v.shape[:2], *pool.shape[1:])
        o, _ = drafted(self.module.gated_delta_rule_mtp, x, pool, buffer)
        if buffer is not None:
            pool.copy_(committed(pool, buffer, x))
        return o, x.pool

    def decoded(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Decode drafts of one token; if some of them are rejected, on a copy of the pool."""
        if x.accepted is None:
            return Decode.run(self, x)  # type: ignore[arg-type]  # it needs the module alone
        o, pool = Decode.run(self, x.replaced(pool=x.pool.mT.clone().mT))  # type: ignore[arg-type]
        x.pool.mT.copy_(committed(x.pool.mT, pool.mT[x.slots.long()].unsqueeze(1), x))
        return o, x.pool
