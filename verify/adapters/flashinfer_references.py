"""Adapters of FlashInfer's torch references, which stand beside its kernels as their definitions. They adapt signatures and layout.

The references are in flashinfer/trace/templates/gdn.py and run on a CPU. They compute gate and beta, keep states as [N, HV, V, K],
and return outputs in bf16.
"""

from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters import serving
from verify.adapters.base import Adapter
from verify.adapters.left_out import IN_FLASHINFER, left_out

TEMPLATES = "flashinfer.trace.templates.gdn"
REQUIRES = {"flashinfer-python": "0.7.2"}
PADDED = ("-1",)


def gated(**more: object) -> Domain:
    """The calls that all of them take: dt_bias must be a tensor, and beta is at most 1."""
    fields: dict[str, object] = {"dtypes": ("bf16",), "in_kernel": ("both",), "dt_bias": False, "negative_eigenvalues": False}
    return Domain(**{**fields, "backward": False, **more})  # type: ignore[arg-type]


class Reference(Adapter):
    """Base of adapters of FlashInfer's torch references."""

    algorithm = "recurrent"
    requires = REQUIRES
    name: str  # the function's

    def bring(self) -> None:
        self.function()

    def function(self) -> object:
        """The reference."""
        return getattr(serving.names({TEMPLATES: (self.name,)}), self.name)


class PrefillReference(Reference):
    """`_gdn_prefill_reference`: packed sequences, token by token in float32, of equal widths, without a norm.

    No sequence may be empty, because the reference loses the initial state of an empty sequence (docs/FINDINGS.md).
    """

    name = "_gdn_prefill_reference"
    domain = gated(equal_widths=True, batched=False, empty=False, qk_norm=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, final = self.function()(  # type: ignore[operator]
            x.q[0],
            x.k[0],
            x.v[0],
            None if x.state is None else x.state.mT,
            x.A_log,
            x.a[0],
            x.dt_bias,
            x.b[0],
            x.cu_seqlens,
            x.scale,
        )
        return o.unsqueeze(0), final.mT if x.output_final_state else None


class DecodeReference(Reference):
    """`_gdn_decode_reference`: one token for each state, in float32, without a norm. States are gathered from the pool for it."""

    name = "_gdn_decode_reference"
    domain = PoolDomain(
        rule=gated(empty=False, qk_norm=False),
        most_tokens=1,
        padding_slots=(),
        fresh=False,
        accepts=False,
        in_place=False,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v, a, b = (x[name].flatten(0, 1).unsqueeze(1) for name in ("q", "k", "v", "a", "b"))
        slots = x.slots.long()
        o, states = self.function()(q, k, v, x.pool[slots].mT, x.A_log, a, x.dt_bias, b, x.scale)  # type: ignore[operator]
        return o.reshape(x.v.shape), x.pool.index_copy(0, slots, states.mT)


class MtpReference(Reference):
    """`_gdn_mtp_reference`: a draft for each request, in float64.

    A draft that is accepted in part leaves the pool alone, and the state after the accepted token comes from the buffer that has
    the state after every token.
    """

    name = "_gdn_mtp_reference"
    omits = left_out(IN_FLASHINFER, "cache_replayssm", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
    domain = PoolDomain(rule=gated(packed=False), padding_slots=PADDED, fresh=False, in_place=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool = x.pool.mT
        buffer = pool.new_empty(*x.v.shape[:2], *pool.shape[1:])
        o, pool = drafted(self.function(), x, pool, buffer)
        return o, pool.mT if x.accepted is None else committed(pool, buffer, x).mT


def drafted(rule: Any, x: Inputs, pool: Tensor, buffer: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call the rule of drafts, which leaves the pool [P, HV, V, K] alone if a draft is accepted in part."""
    o, pool = rule(
        *(x.q, x.k, x.v, pool, x.slots, x.A_log, x.a, x.dt_bias, x.b),
        scale=x.scale,
        intermediate_states_buffer=buffer,
        disable_state_update=x.accepted is not None,
        use_qk_l2norm=x.qk_norm,
    )
    return o, pool


def committed(pool: Tensor, buffer: Tensor, x: Inputs) -> Tensor:
    """Return the pool [P, HV, V, K] with the state of each request after its last accepted token, from the buffer [N, T, ...]."""
    rows = torch.nonzero((x.slots >= 0) & (x.accepted > 0)).squeeze(-1)
    return pool.index_copy(0, x.slots[rows].long(), buffer[rows, x.accepted[rows].long() - 1])
