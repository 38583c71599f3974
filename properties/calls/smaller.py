"""How calls shrink."""

from properties.calls.case import CallCase, sizes_of
from properties.words.smaller import Changes, Smaller, below, fewer_sequences, longer_sequences, shorter_sequences, unpacked


def _axes(case: CallCase) -> Changes:
    """Yield smaller sizes, one axis at a time."""
    sizes = sizes_of(case.sizes)
    for axis, size in sizes.items():
        for smaller in below(size, 1):
            text = ",".join(f"{name}:{smaller if name == axis else other}" for name, other in sizes.items())
            yield f"sizes={text}", {"sizes": text}


SMALLER_CALLS = Smaller(CallCase, (fewer_sequences, unpacked, shorter_sequences, _axes), (), telling=(longer_sequences,))
