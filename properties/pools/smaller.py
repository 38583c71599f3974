"""How cases of pools shrink."""

import dataclasses
from typing import Any

from properties.pools.case import PoolCase
from properties.rules.smaller import SIMPLEST, other_dt_bias, with_norm, without_norm
from properties.words.smaller import (
    Changes,
    Smaller,
    below,
    fewer_heads,
    fewer_options,
    fewer_sequences,
    longer_sequences,
    one_of,
    shorter_sequences,
    unpacked,
)

SIMPLEST_POOL: dict[str, tuple[Any, ...]] = {
    "padded": ("none", "all"),
    "fresh": ("none", "all"),
    "accepted": ("all", "some"),
    "block_v": ("default",),
    "padding_slot": ("-1",),
    "free": ("zero", "random"),
    "indices": ("int64",),
    "drafts": ("chain",),
    "rule": ("gated_delta_rule",),
    **{name: SIMPLEST[name] for name in SIMPLEST if name in {field.name for field in dataclasses.fields(PoolCase)} - {"state"}},
    "state": ("zero",),
}


def _spare(case: PoolCase) -> Changes:
    for spare in below(case.spare, 0):
        yield f"spare={spare}", {"spare": spare}


SMALLER_POOLS = Smaller(
    (fewer_sequences, unpacked, shorter_sequences, _spare, fewer_heads, other_dt_bias, without_norm, fewer_options),
    SIMPLEST_POOL,
    ("key_dim", "value_dim"),
    # Of fewer requests than in the larger case, other ones are padding, begin anew, or keep fewer tokens.
    beside=dict.fromkeys(("padded", "fresh", "accepted"), ("lengths",)),
    telling=(longer_sequences, with_norm, one_of(scale=("one",))),
)
