"""flash-linear-attention's rule on states that live in a pool, as a serving loop calls it: gathering and scattering only."""

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from verify.adapter import Adapter, Domain, PoolDomain
from verify.adapters.fla import REQUIRES, call

TOKENS = ("q", "k", "v", "g", "beta")


class Decode(Adapter):
    """`fused_recurrent_gated_delta_rule` on the states that the slots name, written back into them; FLA has no pool of its own."""

    algorithm = "recurrent"
    domain = PoolDomain(rule=Domain(key_dims=(1, 256), position_independent=True, backward=False))
    requires = REQUIRES

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as rule

        named = x.slots != x.padding
        goes_on = named if x.has_initial_state is None else named & (x.has_initial_state == 1)
        states = x.pool[x.slots.long().clamp(min=0)].where(goes_on.reshape(-1, 1, 1, 1), 0.0)
        given = Inputs(
            **{name: x[name] for name in (*TOKENS, "cu_seqlens", "scale", "qk_norm")}, state=states, output_final_state=True
        )
        o, final = call(rule, given)
        if x.accepted is not None:
            _, final = call(rule, first_tokens(given, x.accepted))
        assert final is not None
        x.pool[x.slots[named].long()] = final[named]
        return o, x.pool


def first_tokens(x: Inputs, counts: Tensor) -> Inputs:
    """The packed call of the first tokens of each request, as many as `counts` says."""
    starts = torch.tensor([0, *sequences(x, "v")]).cumsum(0).tolist()
    kept = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts.tolist(), strict=False)])
    tokens = {name: x[name].flatten(0, 1).index_select(0, kept).unsqueeze(0) for name in TOKENS}
    return x.replaced(**tokens, cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(counts.dtype))
