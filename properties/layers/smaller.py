"""How cases of layers shrink."""

from properties.layers.case import LayerCase
from properties.words.smaller import (
    Smaller,
    fewer_heads,
    fewer_options,
    fewer_sequences,
    longer_sequences,
    shorter_sequences,
    unpacked,
)

SMALLER_LAYERS = Smaller(
    LayerCase,
    (fewer_sequences, unpacked, shorter_sequences, fewer_heads, fewer_options),
    ("key_dim", "value_dim", "hidden"),
    telling=(longer_sequences,),
)
