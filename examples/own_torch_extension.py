"""An operator of one's own, registered with torch as a C++ or CUDA extension is, and its adapter.

    gdn-verify check examples/own_torch_extension.py:OwnExtension

The two operators are written in Python so that this file needs no compiler. An extension registers
them with TORCH_LIBRARY in C++ instead; everything below `register_autograd` stays the same.
"""

import torch
from torch import Tensor

from verify import Adapter, Domain


@torch.library.custom_op("own_extension::gated_delta_rule", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """o [T, HV, V] and the final state [N, HV, K, V] of packed sequences: q, k [T, H, K], v [T, HV, V]."""
    o, final_state = torch.empty_like(v), torch.empty_like(state)
    for sequence, (tokens, states) in enumerate(_states(k, v, g, beta, state, cu_seqlens)):
        for token, (_, after) in zip(tokens, states, strict=True):
            o[token] = scale * _read(after, _repeated(q[token], v))
        final_state[sequence] = states[-1][1] if states else state[sequence]
    return o, final_state


@torch.library.custom_op("own_extension::gated_delta_rule_backward", mutates_args=())
def backward(
    do: Tensor,
    dfinal_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g, beta and the initial state."""
    dq, dk, dv, dg, dbeta, dstate = (torch.empty_like(x) for x in (q, k, v, g, beta, state))
    for sequence, (tokens, states) in enumerate(_states(k, v, g, beta, state, cu_seqlens)):
        d = dfinal_state[sequence].clone()  # the gradient of the state, from the last token back to the first
        for token, (decayed, after) in zip(reversed(tokens), reversed(states), strict=True):
            key, query, out = _repeated(k[token], v), _repeated(q[token], v), do[token].float()
            missing, strength = v[token].float() - _read(decayed, key), beta[token].float().unsqueeze(-1)
            d += scale * query.unsqueeze(-1) * out.unsqueeze(-2)
            dmissing = strength * _read(d, key)
            dq[token] = _added(scale * _write(after, out), q)
            dk_token = _write(d, strength * missing) - _write(decayed, dmissing)
            dk[token] = _added(dk_token, k)
            dv[token], dbeta[token] = dmissing, (_read(d, key) * missing).sum(-1)
            d -= key.unsqueeze(-1) * dmissing.unsqueeze(-2)
            dg[token] = (d * decayed).sum((-1, -2))
            d *= g[token].float().exp()[:, None, None]
        dstate[sequence] = d
    return dq, dk, dv, dg, dbeta, dstate


def _states(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor
) -> list[tuple[range, list[tuple[Tensor, Tensor]]]]:
    """The tokens of each sequence, and for each token the state after its decay and after its write, in float32."""
    ends = cu_seqlens.tolist()
    sequences = []
    for start, end, first in zip(ends, ends[1:], state, strict=False):
        states, after = [], first
        for token in range(start, end):
            decayed = g[token].float().exp()[:, None, None] * after
            key = _repeated(k[token], v)
            missing = beta[token].float().unsqueeze(-1) * (v[token].float() - _read(decayed, key))
            after = decayed + key.unsqueeze(-1) * missing.unsqueeze(-2)
            states.append((decayed, after))
        sequences.append((range(start, end), states))
    return sequences


def _read(state: Tensor, key: Tensor) -> Tensor:
    """[HV, V] that the state [HV, K, V] holds for the key [HV, K]."""
    return (state * key.unsqueeze(-1)).sum(-2)


def _write(state: Tensor, value: Tensor) -> Tensor:
    """[HV, K]: the transpose of `_read`."""
    return (state * value.unsqueeze(-2)).sum(-1)


def _repeated(x: Tensor, v: Tensor) -> Tensor:
    """[H, K] of one token as [HV, K] in float32: value head h reads key head h // (HV // H)."""
    return x.float().repeat_interleave(v.shape[1] // x.shape[0], 0)


def _added(x: Tensor, like: Tensor) -> Tensor:
    """[HV, K] as [H, K]: the gradients of the value heads that share a key head are added."""
    return x.unflatten(0, (like.shape[1], -1)).sum(1)


def _setup(ctx, inputs, output) -> None:  # noqa: ARG001 - torch passes all three by name
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, do, dfinal_state):
    return *backward(do, dfinal_state, *ctx.saved_tensors, ctx.scale), None, None


forward.register_autograd(_autograd, setup_context=_setup)


class OwnExtension(Adapter):
    """The operators above: packed sequences only inside, so a batch is packed here."""

    algorithm = "recurrent"
    domain = Domain(key_dims=(1, 64), value_dims=(1, 64))

    def run(self, x):
        q, k = (_normalised(tensor) if x.qk_norm else tensor for tensor in (x.q, x.k))
        rows, tokens, value_heads, value_dim = x.v.shape
        cu_seqlens = x.cu_seqlens
        if cu_seqlens is None:
            cu_seqlens = torch.arange(rows + 1, device=x.v.device) * tokens
        state = x.state
        if state is None:
            state = q.new_zeros(len(cu_seqlens) - 1, value_heads, q.shape[-1], value_dim, dtype=torch.float32)
        scale = q.shape[-1] ** -0.5 if x.scale is None else x.scale
        packed = (tensor.flatten(0, 1).contiguous() for tensor in (q, k, x.v, x.g, x.beta))
        o, final_state = forward(*packed, state, cu_seqlens, scale)
        return o.unflatten(0, (rows, tokens)), final_state


def _normalised(x: Tensor) -> Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
