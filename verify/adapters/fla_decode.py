"""Adapters of flash-linear-attention's rule on states in a pool, called as a serving loop does. They gather and scatter only."""

import dataclasses
import functools
import itertools

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.pools.case import BLOCK_SIZES
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters.blocks import in_blocks
from verify.adapters.fla import INSIDE, V_FIRST, FlaAdapter, call, chosen, narrowed, v_first
from verify.adapters.left_out import IN_FLA, left_out

TOKENS = ("q", "k", "v", "g", "beta", "a", "b")
OPTIONS = ("cu_seqlens", "scale", "qk_norm", "A_log", "dt_bias", "allow_neg_eigval")
RULE = Domain(key_dims=(1, 256), position_independent=True, backward=False, in_kernel=INSIDE)
PLACE = "fla.ops.gated_delta_rule.fused_recurrent:fused_recurrent_gated_delta_rule"


class Decode(FlaAdapter):
    """`fused_recurrent_gated_delta_rule` on the states in the requests' slots. FLA has no pool, so the states are copied back."""

    algorithm = "recurrent"
    omits = left_out(IN_FLA, "gk", "gv")
    domain = PoolDomain(rule=RULE, options=V_FIRST)

    def __init__(self) -> None:
        rule = narrowed(dataclasses.replace(self.domain.rule, options=self.domain.options), PLACE)
        self.domain = dataclasses.replace(self.domain, rule=dataclasses.replace(rule, options=()), options=rule.options)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule import fused_recurrent as module

        rule = module.fused_recurrent_gated_delta_rule
        named = x.slots != x.padding
        goes_on = named if x.has_initial_state is None else named & (x.has_initial_state == 1)
        states = x.pool[x.slots.long().clamp(min=0)].where(goes_on.reshape(-1, 1, 1, 1), 0.0)
        inputs = Inputs(**{name: x.get(name) for name in (*TOKENS, *OPTIONS)}, state=states, output_final_state=True)
        calling = functools.partial(v_first, place=PLACE) if chosen(x, "state_v_first") else call
        with in_blocks(module, "fused_recurrent_gated_delta_rule_fwd_kernel", x.block_v):
            o, final = calling(rule, inputs)
            if x.accepted is not None:
                _, final = calling(rule, first_tokens(inputs, x.accepted))
        assert final is not None
        x.pool[x.slots[named].long()] = final[named]
        return o, x.pool


class DecodeBlocks(Decode):
    """`Decode` with its kernel launched in blocks of as many value channels as the case says. FLA itself uses at most 8.

    Every channel is computed by one program, whatever the size of its block. But in a wider block, a compiler may sum over K in
    another order.
    """

    domain = PoolDomain(rule=RULE, blocks=BLOCK_SIZES, options=V_FIRST)


def first_tokens(x: Inputs, counts: Tensor) -> Inputs:
    """The packed call of the first `counts` tokens of each request."""
    starts = [0, *itertools.accumulate(sequences(x, "v"))]
    positions = [start + token for start, count in zip(starts, counts.tolist(), strict=False) for token in range(count)]
    index = torch.tensor(positions, dtype=torch.int64, device=x.v.device)
    tokens = {name: x[name].flatten(0, 1).index_select(0, index).unsqueeze(0) for name in TOKENS if x.get(name) is not None}
    return x.replaced(**tokens, cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(counts.dtype))
