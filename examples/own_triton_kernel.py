"""A Triton kernel of one's own, and the adapter that lets gdn-verify check it.

    gdn-verify check examples/own_triton_kernel.py:MyKernel

The kernel is the gated delta rule token by token, forward only. Each program holds the state of one
value head for a block of value channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify import Adapter, Domain


@triton.jit
def gated_delta_rule_kernel(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    o,
    final_state,
    cu_seqlens,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """A program computes one sequence and value head (axis 0 of the grid) and one block of value channels (axis 1).

    Only axis 0 may have more than 65,535 programs.
    """
    sequence, head, block = tl.program_id(0) // HV, tl.program_id(0) % HV, tl.program_id(1)
    key_head = head // (HV // H)
    if PACKED:
        start, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    else:
        start, end = sequence * T, sequence * T + T
    keys, values = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    is_key, is_value = keys < K, values < V
    of_state = (sequence * HV + head) * K * V + keys[:, None] * V + values[None, :]
    in_state = is_key[:, None] & is_value[None, :]

    state = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_INITIAL_STATE:
        state += tl.load(initial_state + of_state, mask=in_state, other=0.0).to(tl.float32)
    for token in range(start, end):
        b_q = tl.load(q + (token * H + key_head) * K + keys, mask=is_key, other=0.0).to(tl.float32)
        b_k = tl.load(k + (token * H + key_head) * K + keys, mask=is_key, other=0.0).to(tl.float32)
        b_v = tl.load(v + (token * HV + head) * V + values, mask=is_value, other=0.0).to(tl.float32)
        b_g = tl.load(g + token * HV + head).to(tl.float32)
        b_beta = tl.load(beta + token * HV + head).to(tl.float32)
        if QK_NORM:
            b_q = b_q / tl.sqrt(tl.sum(b_q * b_q) + 1e-6)
            b_k = b_k / tl.sqrt(tl.sum(b_k * b_k) + 1e-6)
        state *= tl.exp(b_g)
        b_v = b_beta * (b_v - tl.sum(state * b_k[:, None], 0))
        state += b_k[:, None] * b_v[None, :]
        b_o = scale * tl.sum(state * b_q[:, None], 0)
        tl.store(o + (token * HV + head) * V + values, b_o.to(o.dtype.element_ty), mask=is_value)
    tl.store(final_state + of_state, state, mask=in_state)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    qk_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final state [N, HV, K, V] in float32."""
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    (rows, tokens, heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    sequences = rows if cu_seqlens is None else len(cu_seqlens) - 1
    o = torch.empty_like(v)
    final_state = torch.empty(sequences, value_heads, key_dim, value_dim, dtype=torch.float32, device=v.device)
    block = min(triton.next_power_of_2(value_dim), 32)
    gated_delta_rule_kernel[sequences * value_heads, triton.cdiv(value_dim, block)](
        q,
        k,
        v,
        g,
        beta,
        None if initial_state is None else initial_state.contiguous(),
        o,
        final_state,
        cu_seqlens,
        key_dim**-0.5 if scale is None else scale,
        tokens,
        H=heads,
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BK=triton.next_power_of_2(key_dim),
        BV=block,
        PACKED=cu_seqlens is not None,
        HAS_INITIAL_STATE=initial_state is not None,
        QK_NORM=qk_norm,
    )
    return o, final_state


class MyKernel(Adapter):
    """The kernel above: recurrent, which means float32 throughout, and forward only."""

    algorithm = "recurrent"
    domain = Domain(key_dims=(1, 128), value_dims=(1, 256), backward=False)

    def run(self, x):
        return gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.scale, x.state, x.cu_seqlens, qk_norm=x.qk_norm)
