"""Short references in float64 and plain torch, whose text a script can contain. Each is compared with the oracle before that."""

from typing import Any

import torch
from torch import Tensor


def exact_gates(x: dict[str, Any]) -> dict[str, Tensor]:
    """The log-decay g and beta, from a, A_log, dt_bias and b."""
    x = dict(x)
    if x.get("a") is not None:
        speed = x["A_log"].exp().view(-1, *[1] * (x["a"].ndim - 3))
        a = x["a"] if x.get("dt_bias") is None else x["a"] + x["dt_bias"]
        bound = x.get("lower_bound")
        x["g"] = -speed * torch.nn.functional.softplus(a) if bound is None else bound * (speed * a).sigmoid()
    if x.get("b") is not None:
        x["beta"] = x["b"].sigmoid() * (2 if x.get("allow_neg_eigval") else 1)
    return {name: x[name] for name in ("g", "beta") if x.get(name) is not None}


def exact_norm(x: Tensor, eps: float, form: str = "inside") -> Tensor:
    """x over its length along the last axis: eps is inside the root, or the length is at least eps."""
    length = x.square().sum(-1, keepdim=True)
    return x / (length.sqrt().clamp(min=eps) if form == "max" else (length + eps).sqrt())


def exact_rule(x: dict[str, Any]) -> dict[str, Tensor]:
    """The delta rule, token by token: o [B, T, HV, V] and the final states [N, HV, K, V]."""
    q, k, v, x = x["q"], x["k"], x["v"], {**x, **exact_gates(x)}
    if x.get("qk_norm"):
        q, k = (exact_norm(t, x.get("qk_norm_eps", 1e-6), x.get("qk_norm_form", "inside")) for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    scale = q.shape[-1] ** -0.5 if x.get("scale") is None else x["scale"]
    decay = x["g"].exp() if x.get("g") is not None else x.get("alpha")
    decay = torch.ones_like(k) if decay is None else decay if decay.ndim == 4 else decay.unsqueeze(-1)
    beta = torch.ones_like(v[..., 0]) if x.get("beta") is None else x["beta"]
    if x.get("cu_seqlens") is None:
        places = [(row, range(v.shape[1])) for row in range(v.shape[0])]
    else:
        ends = x["cu_seqlens"].tolist()
        places = [(0, range(ends[n], ends[n + 1])) for n in range(len(ends) - 1)]
    o, states = torch.zeros_like(v), []
    for n, (b, tokens) in enumerate(places):
        S = v.new_zeros(v.shape[2], k.shape[-1], v.shape[-1]) if x.get("state") is None else x["state"][n]
        for t in tokens:
            S = decay[b, t].unsqueeze(-1) * S
            recalled = (k[b, t].unsqueeze(-1) * S).sum(-2)
            S = S + k[b, t].unsqueeze(-1) * (beta[b, t].unsqueeze(-1) * (v[b, t] - recalled)).unsqueeze(-2)
            o[b, t] = scale * (q[b, t].unsqueeze(-1) * S).sum(-2)
        states.append(S)
    return {"o": o, "final_state": torch.stack(states)}


def exact_l2norm(x: dict[str, Any]) -> dict[str, Tensor]:
    """The L2 norm of x."""
    return {"y": exact_norm(x["x"], x.get("eps", 1e-6))}


REFERENCES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("gated_delta_rule", "delta_rule", "kda"), (exact_gates, exact_norm, exact_rule)),
    **dict.fromkeys(("gdn_gate", "kda_gate"), (exact_gates,)),
    "l2norm": (exact_norm, exact_l2norm),
}  # for an operation the functions of a script: the last one computes the outputs
