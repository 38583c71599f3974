"""How cases of pools shrink."""

from properties.pools.case import PoolCase
from properties.rules.smaller import other_dt_bias, with_norm, without_norm
from properties.words.smaller import (
    Changes,
    Smaller,
    below,
    fewer_heads,
    fewer_options,
    fewer_sequences,
    longer_sequences,
    other_values,
    shorter_sequences,
    unpacked,
)


def _spare(case: PoolCase) -> Changes:
    for spare in below(case.spare, 0):
        yield f"spare={spare}", {"spare": spare}


SMALLER_POOLS = Smaller(
    PoolCase,
    (fewer_sequences, unpacked, shorter_sequences, _spare, fewer_heads, other_dt_bias, without_norm, fewer_options),
    ("key_dim", "value_dim"),
    # Of fewer requests than in the larger case, other ones are padding, begin anew, or keep fewer tokens.
    beside=dict.fromkeys(("padded", "fresh", "accepted"), ("lengths",)),
    telling=(longer_sequences, with_norm, other_values(scale=("one",))),
)
