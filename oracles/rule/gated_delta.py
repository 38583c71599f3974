"""The delta rule, the gated delta rule and Kimi delta attention (KDA) in float64.

Sources: Yang, Wang, Shen, Panda, Kim 2024, arXiv 2406.06484; Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", arXiv
2412.06464; Kimi Team 2025, arXiv 2510.26692. For each sequence and value head, with the state S in R^{K x V}:

    S <- diag(exp(g_t)) S                        decay: g_t is one number (gated), one a channel (KDA), or 0 (delta rule)
    S <- S + k_t (x) beta_t (v_t - S^T k_t)      correct what the state recalls for key k_t
    o_t = scale S^T q_t                          read

A call may have the decay itself, alpha_t = exp(g_t), in place of g. alpha_t = 0 and g_t = -inf are legal: the state is forgotten.
`log_of` takes the logarithm for the forms that need G = cumsum(g). A call may leave out the decay or beta; the one
that is left out is 1.

The gated rule may have decays of single channels in addition to g: gk_t for the keys' channels, gv_t for the values' channels.
The decay then is S <- diag(exp(g_t + gk_t)) S diag(exp(gv_t)). The columns of S never mix, so each column is the state of a rule
with one value channel and the log-decay g_t + gk_t + gv_t of that channel. `forward` computes gv in this way.

A call may have its initial and final states in half precision (`with_states`). The truth is taken at the rounded initial state.

`definition` computes these lines. `forward` computes all heads of all sequences: with oracles/rule/chunkwise.py in exact
arithmetic, and with oracles/rule/disturbed.py where the arithmetic rounds. tests/formulas/test_oracles.py shows that each equals
the definition.

A stretch of tokens maps the state before it to the state after it by S -> M S + E (`transition`), and these maps compose (`merge`).
Ranks that hold contiguous shards of a sequence exchange M and E.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oracles import gates
from oracles.arithmetic.rounding import BITS, FUNCTION_BITS, FUNCTION_TERMS, Arithmetic
from oracles.gates import GDN_GATE, KDA_GATE, negative_bound
from oracles.norm import EPS, Normalised, known_norm
from oracles.operation import (
    DTYPES,
    Inputs,
    Operation,
    Port,
    Rule,
    at_least_one,
    finite_scale,
    flag,
    grouped_heads,
    one_a_sequence,
    sequences,
)
from oracles.rule import chunkwise, disturbed

Forward = Callable[[Inputs, Arithmetic], dict[str, Tensor]]
CHUNK = 64
FORGOTTEN = -1000.0  # in place of log(0): exp of it is 0 in float64
FLUSHED = -104.0  # the same where the arithmetic rounds: exp of it is 0 in float32, and sums of it lose fewer digits


def definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, V] and the final state [K, V] of one head of one sequence.

    q, k [T, K], v [T, V], g [T] or [T, K], beta [T], state [K, V]. ValueError for other shapes.
    """
    _check_shapes(k, q=(q, k.shape), state=(state, (*k.shape[1:], *v.shape[1:])), **_of_tokens(k, v, g, beta))
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp().unsqueeze(-1) * state
        state = state + torch.outer(k_t, beta_t * (v_t - k_t @ state))
        rows.append(scale * (q_t @ state))
    return torch.stack(rows) if rows else torch.zeros_like(v), state


def transition(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return M [K, K] and E [K, V] of a stretch of tokens, which takes the state S to M S + E.

    Shapes and ValueError are those of `definition`.
    """
    _check_shapes(k, **_of_tokens(k, v, g, beta))
    width = k.shape[-1]
    keep, write = torch.eye(width, dtype=k.dtype, device=k.device), v.new_zeros(width, v.shape[-1])
    for k_t, v_t, g_t, beta_t in zip(k, v, g, beta, strict=True):
        decay = g_t.exp().unsqueeze(-1)
        keep, write = decay * keep, decay * write
        keep = keep - torch.outer(k_t, beta_t * (k_t @ keep))
        write = write + torch.outer(k_t, beta_t * (v_t - k_t @ write))
    return keep, write


def merge(earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the transition of two stretches, one after the other. ValueError if their shapes are not those of `transition`."""
    (keep, write), (keep_later, write_later) = earlier, later
    square, tall = (*keep.shape[:1], *keep.shape[:1]), (*keep.shape[:1], *write.shape[1:])
    named = ("M", keep, square), ("E", write, tall), ("later M", keep_later, square), ("later E", write_later, tall)
    for name, x, shape in named:
        if x.shape != shape or x.ndim != 2:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    return keep_later @ keep, keep_later @ write + write_later


def _of_tokens(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return each tensor that one head of one sequence has for its tokens, with the shape that it must have."""
    gate = k.shape if g.ndim > 1 else k.shape[:1]
    return {"v": (v, (*k.shape[:1], *v.shape[1:2])), "g": (g, gate), "beta": (beta, k.shape[:1])}


def _check_shapes(k: Tensor, **tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    if k.ndim != 2:
        raise ValueError(f"k must be [T, K], got shape {tuple(k.shape)}")
    for name, (x, shape) in tensors.items():
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} for k of {tuple(k.shape)}, got {tuple(x.shape)}")


def repeat_heads(x: Tensor, value_heads: int, axis: int = -2) -> Tensor:
    """Repeat key heads so that value head h reads key head h // (value_heads // heads), as grouped value attention (GVA) does.

    ValueError if value_heads is not a multiple of the heads of x along `axis`.
    """
    heads = x.shape[axis]
    if isinstance(value_heads, bool) or not isinstance(value_heads, int) or value_heads < 0:
        raise ValueError(f"value_heads must be a whole number from 0 up, got {value_heads!r}")
    if heads == 0 or value_heads % heads:
        raise ValueError(f"value_heads must be a multiple of heads {heads}, got {value_heads}")
    return x.repeat_interleave(value_heads // heads, dim=axis)


def forward(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return o [runs, B, T, HV, V] and final_state [runs, N, HV, K, V]; x has the runs of `arithmetic` along axis 0.

    x has q, k [B, T, H, K] and v [B, T, HV, V]. It may have beta [B, T, HV] (None means 1), g or alpha [B, T, HV] or
    [B, T, HV, K], gk [B, T, HV, K], gv [B, T, HV, V], state [N, HV, K, V], cu_seqlens [N + 1], scale (None means K ** -0.5) and
    qk_norm (normalise q and k first, in the form qk_norm_form and with qk_norm_eps, which mean EPS inside the root if absent).
    """
    linear = x.get("alpha") is not None
    lengths = sequences(Inputs(cu_seqlens=x.get("cu_seqlens"), v=x.v[0]), "v")
    width, (value_heads, value_width) = x.q.shape[-1], x.v.shape[-2:]
    option = x.get("scale")
    scale = width**-0.5 if option is None else float(option)
    v = arithmetic.input(x.v.flatten(1, 2), "v")
    beta = v.new_ones(v.shape[:-1]) if x.get("beta") is None else x.beta.flatten(1, 2)
    beta = arithmetic.gradient(beta, "dbeta", arithmetic.output)
    decay = x.alpha if linear else x.get("g")
    channels = decay is not None and decay.ndim == 5
    g = v.new_zeros(v.shape[:-1]).unsqueeze(-1) if decay is None else (decay if channels else decay.unsqueeze(-1)).flatten(1, 2)
    g = arithmetic.gradient(g, "dg output", arithmetic.gate)
    g = log_of(g, arithmetic) if linear else _finite(g, arithmetic)
    if x.get("gk") is not None:
        g, channels = _also(g, x.gk.flatten(1, 2), arithmetic, "gk"), True
    state = x.get("state")
    if state is None:
        state = v.new_zeros(arithmetic.runs, len(lengths), value_heads, width, value_width)
    if by_columns := x.get("gv") is not None:
        g = _also(g.unsqueeze(-2), x.gv.flatten(1, 2).unsqueeze(-1), arithmetic, "gv").flatten(2, 3)
        v, beta = v.flatten(2).unsqueeze(-1), beta.repeat_interleave(value_width, -1)
        state = state.mT.flatten(2, 3).unsqueeze(-1)
        value_heads = value_heads * value_width
    keys = {name: x[name].flatten(1, 2) for name in ("q", "k")}
    if arithmetic.algorithm == "exact":
        q, k = (_normalised(tensor, x, arithmetic, name) if x.get("qk_norm") else tensor for name, tensor in keys.items())
        o, final = chunkwise.delta_rule(q[0], k[0], v[0], g[0], beta[0], state[0], scale, lengths, arithmetic.chunk or 0)
        o, final = o.unsqueeze(0), final.unsqueeze(0)
    else:
        for name, vectors in keys.items():
            repeated = repeat_heads(arithmetic.input(vectors, name), value_heads)
            if x.get("qk_norm"):  # after repeating heads: an implementation may normalise (and round) each value head's copy
                repeated = _normalised(repeated, x, arithmetic, f"{name} normalised")
            keys[name] = arithmetic.gradient(repeated, f"d{name} a value head", arithmetic.output)
        if arithmetic.folds and decay is not None and not channels:
            g, channels = g.expand(*g.shape[:-1], width), True
        tokens = keys["q"], keys["k"], v, g, beta.unsqueeze(-1)
        if arithmetic.algorithm == "recurrent":
            o, final = disturbed.recurrent(*tokens, state, scale, arithmetic, lengths, linear=linear)
        else:
            chunk = arithmetic.chunk or CHUNK
            o, final = disturbed.chunkwise(
                *tokens, state, scale, arithmetic, lengths, chunk, channels=channels, restarts=arithmetic.restarts
            )
    if by_columns:
        o, final = o.squeeze(-1).unflatten(-1, x.v.shape[-2:]), final.squeeze(-1).unflatten(2, x.v.shape[-2:]).mT
    o = arithmetic.result(o, "o").unflatten(1, x.v.shape[1:3])
    return {"o": o, "final_state": arithmetic.single(final, "final state")}


def _normalised(tensor: Tensor, x: Inputs, arithmetic: Arithmetic, place: str) -> Tensor:
    """Return q or k normalised in the form of the call."""
    normalised: Tensor = Normalised.apply(
        tensor, arithmetic, place, x.get("qk_norm_eps", EPS), 1, None, x.get("qk_norm_form", "inside")
    )
    return normalised


def _finite(g: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return the log-decays with a number in place of -inf."""
    return g.masked_fill(g == -torch.inf, _forgotten(arithmetic))


def _also(g: Tensor, more: Tensor, arithmetic: Arithmetic, name: str) -> Tensor:
    """Return g + more, the log of a product of decays. An implementation may multiply them, and round both and the product."""
    more = _finite(arithmetic.gradient(more, f"d{name} output", arithmetic.gate), arithmetic)
    one = torch.ones_like(g + more)
    return g + more + (arithmetic.dither(one, f"exp({name})", FUNCTION_BITS) - one)


def log_of(alpha: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return log(alpha). In the chunkwise class it rounds, since an implementation may compute it in float32; alpha never rounds.

    Where alpha is 0, the result is a constant whose exponential is 0. So dalpha is left at 0 there, and not judged
    (`Operation.unjudged`): a gate that computed alpha passes alpha dalpha on, which is 0 whatever dalpha is.
    """
    zero = alpha == 0
    g = alpha.masked_fill(zero, 1.0).log()
    if arithmetic.algorithm == "chunkwise":
        g = arithmetic.single(g, "log alpha", FUNCTION_TERMS)
    return g.masked_fill(zero, _forgotten(arithmetic))


def _forgotten(arithmetic: Arithmetic) -> float:
    """Return the number that stands for a log-decay of -inf."""
    return FLUSHED if arithmetic.rounds else FORGOTTEN


def _decays(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: no decay is negative, which would have no logarithm."""
    if bool((inputs.alpha < 0).any()):
        raise ValueError(f"alpha must be 0 or more, got {float(inputs.alpha.min())}")


def _operation(
    name: str,
    gate: tuple[Port, ...],
    beta: tuple[Port, ...],
    forward: Forward,
    rules: tuple[Rule, ...] = (),
    options: tuple[str, ...] = (),
) -> Operation:
    return Operation(
        name,
        (
            *(Port("q", "B T H K"), Port("k", "B T H K"), Port("v", "B T HV V"), *gate, *beta),
            Port("state", "N HV K V", "fp32", optional=True),
        ),
        (Port("o", "B T HV V"), Port("final_state", "N HV K V", "fp32")),
        forward,
        (
            at_least_one("H", "HV", "K", "V"),
            grouped_heads,
            finite_scale,
            flag("qk_norm"),
            known_norm,
            one_a_sequence("state"),
            *rules,
        ),
        ("scale", "qk_norm", "qk_norm_eps", "qk_norm_form", "output_final_state", "calls", *options),
        parallel=("H", "HV"),
        classes=("chunkwise", "recurrent"),
        unjudged={"dalpha": lambda x: x.alpha == 0} if [port.name for port in gate] == ["alpha"] else {},
    )


_BETA = (Port("beta", "B T HV", scalar_rows=True),)
_CHANNELS = {"gk": Port("gk", "B T HV K", "gate"), "gv": Port("gv", "B T HV V", "gate")}
_GATES: dict[str, tuple[Port, ...]] = {
    "delta_rule": (),
    "gated_delta_rule": (Port("g", "B T HV", "gate", scalar_rows=True),),
    "kda": (Port("g", "B T HV K", "gate"),),
}
_LINEAR: dict[str, tuple[Port, ...]] = {
    "gated_delta_rule": (Port("alpha", "B T HV", "gate", scalar_rows=True),),
    "kda": (Port("alpha", "B T HV K", "gate"),),
}
DELTA_RULE, GATED_DELTA_RULE, KDA = (_operation(name, gate, _BETA, forward) for name, gate in _GATES.items())


@functools.cache
def in_kernel(
    rule: str,
    *,
    gate: bool,
    beta: bool,
    linear: bool = False,
    without: tuple[str, ...] = (),
    channels: tuple[str, ...] = (),
) -> Operation:
    """Return the rule that computes its gate, its beta, or both inside (oracles/gates.py).

    The gate g comes from a, A_log and dt_bias; beta comes from b. With `linear` the rule takes the decay alpha in place of g.
    `without` names inputs that the call leaves out, some of "gate" and "beta". `channels` names decays of single channels in
    addition to g, some of "gk" and "gv". ValueError for an unknown rule, for a gate or a decay of the delta rule, which has none,
    for a gate and `linear` together, for an input that is left out and also computed or taken as alpha, or for decays of channels
    of another rule than the gated one.
    """
    if rule not in _GATES:
        raise ValueError(f"rule must be one of {', '.join(_GATES)}, got {rule!r}")
    if gate and not _GATES[rule]:
        raise ValueError(f"gate must be False for {rule}, which has none")
    if linear and (gate or rule not in _LINEAR):
        raise ValueError(f"linear must be False for {rule} with {'its gate in the kernel' if gate else 'no gate'}")
    if ((gate or linear) and "gate" in without) or (beta and "beta" in without):
        raise ValueError(f"without must not name what the kernel computes or takes as alpha, got {', '.join(without)}")
    if channels and (rule != "gated_delta_rule" or linear):
        raise ValueError(f"channels must be empty for {rule}{' of alpha' * linear}, got {', '.join(channels)}")
    decay, rules = (_LINEAR[rule], (_decays,)) if linear else (_GATES[rule], ())
    decay, given = () if "gate" in without else decay, () if "beta" in without else _BETA
    more = tuple(_CHANNELS[name] for name in channels)
    rare = [*(f"without {name}" for name in without), *(f"and {name}" for name in channels)]
    named = " ".join([f"{rule}{' of alpha' * linear}", *rare])
    if not (gate or beta) and named != rule:
        return _operation(named, (*decay, *more), given, forward, rules)
    if not (gate or beta):
        return {operation.name: operation for operation in (DELTA_RULE, GATED_DELTA_RULE, KDA)}[rule]
    ports = {port.name: port for port in (KDA_GATE if rule == "kda" else GDN_GATE).inputs}

    def inside(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
        results = {"g": gates.log_decay(x, arithmetic)} if gate else {}
        results |= {"beta": gates.write_strength(x, arithmetic)} if beta else {}
        return forward(Inputs(**{**x, **results}), arithmetic)

    return _operation(
        f"{named} with {' and '.join(['its gate'] * gate + ['beta'] * beta)} in the kernel",
        (*((ports["a"], ports["A_log"], ports["dt_bias"]) if gate else decay), *more),
        (ports["b"],) if beta else given,
        inside,
        (*rules, *(flag("allow_neg_eigval"),) * beta, *(negative_bound,) * gate),
        ("allow_neg_eigval",) * beta + ("lower_bound",) * (gate and rule == "kda"),
    )


def with_states(
    operation: Operation, initial: str = "fp32", final: str = "fp32", *, first: bool = False, last: bool = False
) -> Operation:
    """Return a rule whose initial and final states have these dtypes.

    With `first`, a packed call has only the initial state of its first sequence, and with `last` it returns only the final state
    of its last sequence. The other states are zeros, and neither they nor their gradients are judged. ValueError for a dtype that
    is not among DTYPES.
    """
    for name, dtype in (("initial", initial), ("final", final)):
        if dtype not in DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if (initial, final, first, last) == ("fp32", "fp32", False, False):
        return operation

    def forward(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
        if initial != "fp32" and (state := x.get("state")) is not None:
            x = x.replaced(state=arithmetic.gradient(state, "dh0 in its dtype", BITS[initial]))
        outputs = operation.forward(x, arithmetic)
        if final != "fp32":
            outputs["final_state"] = arithmetic.returned(outputs["final_state"], "final state in its dtype", BITS[final])
        return outputs

    dtypes = {"state": initial, "final_state": final}

    def ports(of: tuple[Port, ...]) -> tuple[Port, ...]:
        return tuple(dataclasses.replace(port, dtype=dtypes.get(port.name, port.dtype)) for port in of)

    unjudged: Mapping[str, Callable[[Inputs], Tensor]] = {
        **operation.unjudged,
        **({"dh0": functools.partial(_states_but, 0)} if first else {}),
        **({"final_state": functools.partial(_states_but, -1)} if last else {}),
    }
    which = " of the first sequence" * first + " to the last sequence" * last
    return dataclasses.replace(
        operation,
        name=f"{operation.name} from {initial} to {final} states{which}",
        inputs=ports(operation.inputs),
        outputs=ports(operation.outputs),
        forward=forward,
        unjudged=unjudged,
    )


@functools.cache
def rule_of(
    rule: str,
    *,
    gate: bool = False,
    beta: bool = False,
    linear: bool = False,
    without: tuple[str, ...] = (),
    channels: tuple[str, ...] = (),
    initial: str = "fp32",
    final: str = "fp32",
    first: bool = False,
    last: bool = False,
) -> Operation:
    """Return the rule of `in_kernel` with the states of `with_states`. ValueError as from these two."""
    operation = in_kernel(rule, gate=gate, beta=beta, linear=linear, without=without, channels=channels)
    return with_states(operation, initial, final, first=first, last=last)


def _states_but(row: int, inputs: Inputs) -> Tensor:
    """Return a mask [N, HV, K, V] of the states of all sequences but one."""
    mask = torch.ones(len(inputs.cu_seqlens) - 1, inputs.v.shape[2], inputs.q.shape[-1], inputs.v.shape[-1], dtype=torch.bool)
    mask[row] = False
    return mask.to(inputs.v.device)
