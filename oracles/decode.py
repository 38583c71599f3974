"""Decode: the gated delta rule for one or several new tokens of each request, on states that live in a pool.

Request n reads its state from slot slots[n] of the pool, and writes it back there after its last token. Slots that no request names
keep every bit. A slot equal to `padding` (-1; 0 in vLLM, where slot 0 belongs to no request) marks a padding request: it reads a
state of zeros and writes nothing. Its output rows mean nothing; here they are zeros.

Two optional inputs say more about each request. `has_initial_state` is 0 if the request begins: it then starts from zeros, whatever
an earlier request left in its slot. `accepted` is for a draft that was verified: how many of the request's tokens are kept. The
outputs are those of all its tokens, but the state that is written back is the one after the accepted tokens.
"""

import torch
from torch import Tensor

from oracles import gated_delta
from oracles.operation import Inputs, Operation, Port, at_least_one, finite_scale, flag, grouped_heads, sequence_count, sequences
from oracles.rounding import Arithmetic


def forward(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return o [runs, B, T, HV, V], and the pool [runs, P, HV, K, V] after the call.

    x has the inputs of oracles/gated_delta.py's forward, but in place of the state `pool` [P, HV, K, V] and `slots` [N], one for
    each sequence. A sequence is a request: there are B of them or, with `cu_seqlens`, as many as it names. has_initial_state [N]
    and accepted [N] may be None.
    """
    slots = x.slots[0].long()
    named = slots != x.padding
    read = named if x.get("has_initial_state") is None else named & (x.has_initial_state[0] == 1)
    lengths = torch.tensor(sequences(Inputs(cu_seqlens=x.get("cu_seqlens"), v=x.v[0]), "v"), dtype=torch.int64, device=slots.device)
    rows = named.repeat_interleave(lengths).reshape(*x.v.shape[1:3], 1)
    # The tokens of a padding request, and slot 0 that stands in for its slot, may hold anything, even NaN; `where` drops it.
    tokens = {name: x[name].where(rows if x[name].ndim == 4 else rows.unsqueeze(-1), 0.0) for name in ("q", "k", "v", "g", "beta")}
    state = None
    if x.pool.shape[1]:
        state = x.pool.index_select(1, slots.where(named, 0)).where(read.reshape(-1, 1, 1, 1), 0.0)
    call = Inputs(**tokens, state=state, cu_seqlens=x.get("cu_seqlens"), scale=x.get("scale"), qk_norm=x.get("qk_norm", False))
    results = gated_delta.forward(call, arithmetic)
    final = results["final_state"]
    if x.get("accepted") is not None:
        final = gated_delta.forward(_first(call, lengths, x.accepted[0].long()), arithmetic)["final_state"]
    return {"o": results["o"], "pool": x.pool.index_copy(1, slots[named], final[:, named])}


def _first(call: Inputs, lengths: Tensor, counts: Tensor) -> Inputs:
    """Return the packed call of the first `counts` tokens of each request."""
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)
    indices = torch.nonzero(place < counts.repeat_interleave(lengths)).squeeze(-1)
    tokens = {name: call[name].flatten(1, 2).index_select(1, indices).unsqueeze(1) for name in ("q", "k", "v", "g", "beta")}
    return call.replaced(**tokens, cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


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


DECODE = Operation(
    "decode",
    (
        Port("q", "B T H K"),
        Port("k", "B T H K"),
        Port("v", "B T HV V"),
        Port("g", "B T HV", "gate", scalar_rows=True),
        Port("beta", "B T HV", scalar_rows=True),
        Port("pool", "P HV K V", "fp32"),
        Port("slots", "N", "index"),
        Port("has_initial_state", "N", "index", optional=True),
        Port("accepted", "N", "index", optional=True),
    ),
    (Port("o", "B T HV V"), Port("pool", "P HV K V", "fp32")),
    forward,
    (
        at_least_one("H", "HV", "K", "V"),
        grouped_heads,
        finite_scale,
        flag("qk_norm"),
        one_slot_a_request,
        known_beginnings,
        no_more_than_drafted,
    ),
    ("scale", "qk_norm", "padding", "block_v"),
    parallel=("H", "HV"),
    classes=("chunkwise", "recurrent"),
)
