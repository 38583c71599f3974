"""Decode: the gated delta rule for one or several new tokens of each request, on states that live in a pool.

Request n reads its state from slot slots[n] of the pool, and writes it back there after its last token. Slots that no request names
keep every bit. A slot equal to `padding` (-1; 0 in vLLM, where slot 0 belongs to no request) marks a padding request: it reads a
state of zeros and writes nothing. Its output rows mean nothing; here they are zeros.

The rule is the gated delta rule or KDA. As in oracles/rule/gated_delta.py, a kernel may compute the gate and beta itself. States
may be stored in half precision. Every state that is written back is then rounded to that precision, once for each call.

Two optional inputs say more about each request. `has_initial_state` is 0 if the request begins: it then starts from zeros, whatever
an earlier request left in its slot. `accepted` is for a draft that was verified: how many of the request's tokens are kept. The
outputs are those of all its tokens, but the state that is written back is the one after the accepted tokens.

The tokens of a draft may be a tree instead of a chain. `parents` then says for each token which earlier token of its request it
follows. A token sees the state of its own path only: that of the tokens from the first one to itself.
"""

import functools

import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.norm import known_norm
from oracles.operation import Inputs, Operation, Port, at_least_one, finite_scale, flag, grouped_heads, sequence_count, sequences
from oracles.rule import gated_delta

TOKENS = ("q", "k", "v", "g", "beta", "a", "b", "alpha")
_PARAMETERS = ("A_log", "dt_bias")
_OPTIONS = ("cu_seqlens", "scale", "qk_norm", "qk_norm_eps", "qk_norm_form", "allow_neg_eigval")


def forward(x: Inputs, arithmetic: Arithmetic, rule: Operation) -> dict[str, Tensor]:
    """Return o [runs, B, T, HV, V], and the pool [runs, P, HV, K, V] after the call.

    x has the inputs of the rule, but in place of the state `pool` [P, HV, K, V] and `slots` [N], one for each sequence. A sequence
    is a request: there are B of them or, with `cu_seqlens`, as many as it names. has_initial_state [N], accepted [N]
    and parents [B, T] may be None. With parents, `accepted` is the number of the token whose state is written back, from 1 up.
    """
    slots = x.slots[0].long()
    named = slots != x.padding
    read = named if x.get("has_initial_state") is None else named & (x.has_initial_state[0] == 1)
    lengths = torch.tensor(sequences(Inputs(cu_seqlens=x.get("cu_seqlens"), v=x.v[0]), "v"), dtype=torch.int64, device=slots.device)
    rows = named.repeat_interleave(lengths).reshape(x.v.shape[1:3])
    # The tokens of a padding request, and slot 0 that stands in for its slot, may hold anything, even NaN; `where` drops it.
    tokens = {
        name: x[name].where(rows.reshape(*rows.shape, *[1] * (x[name].ndim - 3)), 0.0) for name in TOKENS if x.get(name) is not None
    }
    state = None
    if x.pool.shape[1]:
        state = x.pool.index_select(1, slots.where(named, 0)).where(read.reshape(-1, 1, 1, 1), 0.0)
    options = {name: x[name] for name in (*_PARAMETERS, *_OPTIONS) if name in x}
    call = Inputs(**tokens, **options, state=state)
    counts = lengths if x.get("accepted") is None else x.accepted[0].long()
    if x.get("parents") is not None and state is not None:
        o, final = _of_paths(call, lengths, x.parents[0].flatten().tolist(), counts, rule, arithmetic)
    else:
        o, final = rule.forward(call, arithmetic).values()
        if x.get("accepted") is not None:
            final = rule.forward(_first(call, lengths, counts), arithmetic)["final_state"]
    return {"o": o, "pool": x.pool.index_copy(1, slots[named], arithmetic.in_pool(final[:, named]))}


def _first(call: Inputs, lengths: Tensor, counts: Tensor) -> Inputs:
    """Return the packed call of the first `counts` tokens of each request."""
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)
    indices = torch.nonzero(place < counts.repeat_interleave(lengths)).squeeze(-1)
    tokens = {name: call[name].flatten(1, 2).index_select(1, indices).unsqueeze(1) for name in TOKENS if name in call}
    return call.replaced(**tokens, cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def _of_paths(
    call: Inputs, lengths: Tensor, parents: list[int], counts: Tensor, rule: Operation, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """Return the outputs of trees of tokens, and each request's state after its token number `counts`, from 1 up.

    The path to each token is a sequence of its own. It starts from the request's state, and its last output is the token's.
    """
    paths, requests, starts = list[list[int]](), list[int](), [0]
    for request, length in enumerate(lengths.tolist()):
        start = starts[-1]
        for token in range(length):
            before = paths[start + parents[start + token]] if token else []
            paths.append([*before, start + token])
        requests += [request] * length
        starts.append(start + length)
    device = lengths.device
    places = torch.tensor([token for path in paths for token in path], dtype=torch.int64, device=device)
    ends = torch.tensor([0, *(len(path) for path in paths)], dtype=torch.int64, device=device).cumsum(0)
    tokens = {name: call[name].flatten(1, 2).index_select(1, places).unsqueeze(1) for name in TOKENS if name in call}
    states = call.state.index_select(1, torch.tensor(requests, dtype=torch.int64, device=device))
    o, final = rule.forward(call.replaced(**tokens, state=states, cu_seqlens=ends), arithmetic).values()
    o = o.squeeze(1).index_select(1, ends[1:] - 1).unflatten(1, call.v.shape[1:3])
    after = torch.cat([call.state, final], 1)
    number = torch.tensor(starts[:-1], device=device) + counts - 1 + len(lengths)
    return o, after.index_select(1, torch.where(counts > 0, number, torch.arange(len(lengths), device=device)))


def earlier_parents(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: the first token of each request has parent -1, and every other one an earlier token of its request."""
    if (parents := inputs.get("parents")) is None:
        return
    values = iter(parents.flatten().tolist())
    for request, length in enumerate(sequences(inputs, "v")):
        row = [next(values) for _ in range(length)]
        if any(not (0 <= parent < token if token else parent == -1) for token, parent in enumerate(row)):
            raise ValueError(
                f"parents must be -1 for the first token of a request and then an earlier one, got {row} for {request}"
            )


def one_slot_a_request(inputs: Inputs, sizes: dict[str, int]) -> None:
    """Rule: there is one slot for each request; it is in the pool or padding, and no slot of the pool is named twice."""
    count, pool = sequence_count(inputs, sizes), sizes["P"]
    padding = inputs.get("padding")
    if not isinstance(padding, int) or isinstance(padding, bool):
        raise ValueError(f"padding must be a whole number, got {padding!r}")  # noqa: TRY004 - one kind of error
    slots = inputs.slots.tolist()
    if len(slots) != count:
        raise ValueError(f"slots must have N = {count}, one per request, got {len(slots)}")
    named = [slot for slot in slots if slot != padding]
    if wrong := [slot for slot in named if not 0 <= slot < pool]:
        raise ValueError(f"slots must be in 0..{pool - 1} or padding {padding}, got {wrong[0]} ({slots})")
    if len(set(named)) < len(named):
        twice = next(slot for slot in named if named.count(slot) > 1)
        raise ValueError(f"slots must name each slot at most once, got {twice} twice ({slots})")


def known_beginnings(inputs: Inputs, sizes: dict[str, int]) -> None:
    """Rule: has_initial_state is 0 or 1 for each request."""
    if (flags := inputs.get("has_initial_state")) is None:
        return
    values = flags.tolist()
    if len(values) != sequence_count(inputs, sizes) or not set(values) <= {0, 1}:
        raise ValueError(f"has_initial_state must be 0 or 1 for each of N = {sequence_count(inputs, sizes)} requests, got {values}")


def no_more_than_drafted(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: accepted has one number for each request, at most its number of tokens."""
    if (accepted := inputs.get("accepted")) is None:
        return
    values, lengths = accepted.tolist(), sequences(inputs, "v")
    if len(values) != len(lengths) or any(not 0 <= count <= length for count, length in zip(values, lengths, strict=True)):
        raise ValueError(f"accepted must be in 0..its tokens for each request, of {lengths} tokens, got {values}")


@functools.cache
def decode(rule: str = "gated_delta_rule", *, gate: bool = False, beta: bool = False, linear: bool = False) -> Operation:
    """Return decode with a rule that may compute its gate, its beta, or both inside, or take the decay alpha (`linear`).

    ValueError as from `in_kernel`.
    """
    inner = gated_delta.in_kernel(rule, gate=gate, beta=beta, linear=linear)
    inside = " and ".join(["its gate"] * gate + ["beta"] * beta)
    return Operation(
        ("decode" if rule == "gated_delta_rule" else f"decode of {rule}")
        + " by alpha" * linear
        + (f" with {inside} in the kernel" if inside else ""),
        (
            *(port for port in inner.inputs if port.name != "state"),
            Port("pool", "P HV K V", "state"),
            Port("slots", "N", "index"),
            Port("has_initial_state", "N", "index", optional=True),
            Port("accepted", "N", "index", optional=True),
            Port("parents", "B T", "index", optional=True),
        ),
        (Port("o", "B T HV V"), Port("pool", "P HV K V", "state")),
        functools.partial(forward, rule=inner),
        (
            at_least_one("H", "HV", "K", "V"),
            grouped_heads,
            finite_scale,
            flag("qk_norm"),
            known_norm,
            *(flag("allow_neg_eigval"),) * beta,
            one_slot_a_request,
            known_beginnings,
            no_more_than_drafted,
            earlier_parents,
        ),
        ("scale", "qk_norm", "qk_norm_eps", "qk_norm_form", *("allow_neg_eigval",) * beta, "padding", "block_v"),
        parallel=("H", "HV"),
        classes=("chunkwise", "recurrent"),
    )


DECODE = decode()
