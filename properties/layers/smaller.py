"""How cases of layers shrink."""

from typing import Any

from properties.words.smaller import (
    Smaller,
    fewer_heads,
    fewer_options,
    fewer_sequences,
    longer_sequences,
    shorter_sequences,
    unpacked,
)

SIMPLEST_LAYER: dict[str, tuple[Any, ...]] = {
    "gating": ("silu",),
    "lower_bound": ("none",),
    "parameter_dtype": ("fp32",),
    "backward": (False,),
    "state": ("none", "zero"),
    "cached": (False,),
    "conv_bias": (False,),
    "allow_neg_eigval": (False,),
    "eps": ("1e-6",),
    "offsets": ("int64",),
    "values": ("ordinary",),
    "gate": ("long", "ordinary"),
    "dtype": ("fp32", "bf16"),
    "conv_width": (1, 2, 3),
}
SMALLER_LAYERS = Smaller(
    (fewer_sequences, unpacked, shorter_sequences, fewer_heads, fewer_options),
    SIMPLEST_LAYER,
    ("key_dim", "value_dim", "hidden"),
    telling=(longer_sequences,),
)
