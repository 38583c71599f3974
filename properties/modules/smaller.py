"""How cases of modules shrink."""

from typing import Any

from properties.modules.case import ModuleCase
from properties.words.smaller import Changes, Smaller, fewer_options, fewer_sequences, longer_sequences, shorter_sequences, unpacked

SIMPLEST_MODULE: dict[str, tuple[Any, ...]] = {
    "offsets": ("int64",),
    "values": ("ordinary",),
    "activation": ("none",),
    "residual": ("none", "added"),
    "gating": ("silu",),
    "lower_bound": ("none",),
    "parameter_dtype": ("fp32",),
    "bias": (False,),
    "weight": (False,),
    "dt_bias": (False,),
    "state": ("none", "zero"),
    "state_columns": ("W",),
    "oldest": (True,),
    "final_state": (True,),
    "eps": ("1e-6",),
    "allow_neg_eigval": (False,),
    "beta": (False,),
    "backward": (False,),
    "dtype": ("fp32", "bf16"),
    "conv_width": (1, 2, 3),
}


def _heads_alone(case: ModuleCase) -> Changes:
    for heads in (1, 2, 3, 4):
        if heads < case.heads:
            yield f"heads={heads}", {"heads": heads}


SMALLER_MODULES = Smaller(
    (fewer_sequences, unpacked, shorter_sequences, _heads_alone, fewer_options),
    SIMPLEST_MODULE,
    ("width", "out_width"),
    telling=(longer_sequences,),
)
