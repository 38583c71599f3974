"""Serving: what one row of an engine's batch computes from the state and the convolution window of its request.

    q, k, v = silu(conv1d(mixed))                     causal, depthwise, one filter a channel, after the window's inputs
    g, beta = -exp(A_log) softplus(a + dt_bias), sigmoid(b)
    o, S    = gated delta rule(norm(q), norm(k), v, g, beta)

Each line is an operation of its own (oracles/conv.py, gates.py, gated_delta.py). A window has the last W - 1 inputs of a request,
oldest first; before the first token they are zeros.
"""

from torch import Tensor

from oracles import conv, gates, norm
from oracles.arithmetic.rounding import Arithmetic
from oracles.operation import Inputs, Operation, Port, at_least_one, one_a_sequence
from oracles.rule import gated_delta


def forward(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return o [runs, B, T, HV, V], final_state [runs, N, HV, K, V] and final_window [runs, N, D, W - 1].

    x has mixed [B, T, D] with D = 2 H K + HV V, a and b [B, T, HV], A_log and dt_bias [HV], weight [D, W], state [N, HV, K, V],
    window [N, D, W - 1], heads (the number H of key heads), and perhaps cu_seqlens [N + 1], qk_norm_eps and qk_norm_form. What the
    convolution returns is stored in the inputs' dtype; log-decays and states are stored in float32.
    """
    value_heads, key_dim, value_dim = x.state.shape[-3:]
    offsets = x.get("cu_seqlens")
    mixed = conv.forward(
        Inputs(x=x.mixed, weight=x.weight, state=conv.with_oldest(x.window), cu_seqlens=offsets, activation="silu"), arithmetic
    )
    q, k, v = mixed["y"].split((x.heads * key_dim, x.heads * key_dim, value_heads * value_dim), -1)
    gate = gates.forward(Inputs(a=x.a, b=x.b, A_log=x.A_log, dt_bias=x.dt_bias), arithmetic)
    ruled = gated_delta.forward(
        Inputs(
            q=q.unflatten(-1, (x.heads, -1)),
            k=k.unflatten(-1, (x.heads, -1)),
            v=v.unflatten(-1, (value_heads, -1)),
            **gate,
            state=x.state,
            cu_seqlens=offsets,
            scale=None,
            qk_norm=True,
            **norm.norm_of(x),
        ),
        arithmetic,
    )
    return {**ruled, "final_window": conv.without_oldest(mixed["final_state"])}


def channels_of_heads(inputs: Inputs, sizes: dict[str, int]) -> None:
    """Rule: D = 2 H K + HV V, HV is a multiple of H, and a window has one column less than the filters."""
    heads = inputs.get("heads")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or sizes["HV"] % heads:
        raise ValueError(f"heads must be a whole number that divides HV = {sizes['HV']}, got {heads!r}")
    channels = 2 * heads * sizes["K"] + sizes["HV"] * sizes["V"]
    if sizes["D"] != channels:
        raise ValueError(f"D must be 2 H K + HV V = {channels}, got {sizes['D']}")
    if sizes["C"] != sizes["W"] - 1:
        raise ValueError(f"window must have W - 1 = {sizes['W'] - 1} columns, got {sizes['C']}")


SERVING = Operation(
    "serving",
    (
        Port("mixed", "B T D"),
        Port("a", "B T HV", scalar_rows=True),
        Port("b", "B T HV", scalar_rows=True),
        Port("A_log", "HV", "fp32", scalar_rows=True),
        Port("dt_bias", "HV", "fp32", scalar_rows=True),
        Port("weight", "D W"),
        Port("state", "N HV K V", "fp32"),
        Port("window", "N D C"),
    ),
    (Port("o", "B T HV V"), Port("final_state", "N HV K V", "fp32"), Port("final_window", "N D C")),
    forward,
    (at_least_one("HV", "K", "V", "W"), channels_of_heads, one_a_sequence("state"), one_a_sequence("window"), norm.known_norm),
    ("heads", "qk_norm_eps", "qk_norm_form"),
    classes=("chunkwise", "recurrent"),
)
