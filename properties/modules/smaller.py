"""How cases of modules shrink."""

from properties.modules.case import ModuleCase
from properties.words.smaller import Changes, Smaller, fewer_options, fewer_sequences, longer_sequences, shorter_sequences, unpacked


def _heads_alone(case: ModuleCase) -> Changes:
    for heads in (1, 2, 3, 4):
        if heads < case.heads:
            yield f"heads={heads}", {"heads": heads}


SMALLER_MODULES = Smaller(
    ModuleCase,
    (fewer_sequences, unpacked, shorter_sequences, _heads_alone, fewer_options),
    ("width", "out_width"),
    telling=(longer_sequences,),
)
