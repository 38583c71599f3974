"""How cases of paths shrink."""

from properties.paths.case import ParallelCase
from properties.rules.smaller import other_dt_bias
from properties.words.smaller import (
    Changes,
    Smaller,
    below,
    fewer_sequences,
    longer_sequences,
    of_lengths,
    shorter_sequences,
    unpacked,
)


def _mesh(case: ParallelCase) -> Changes:
    """Yield smaller meshes whose sizes divide those of the case, so that the case can still be cut."""
    for tp, cp in sorted(
        ((t, c) for t in range(1, case.tp + 1) for c in range(1, case.cp + 1)), key=lambda mesh: mesh[0] * mesh[1]
    ):
        if (tp, cp) != (case.tp, case.cp) and case.tp % tp == 0 and case.cp % cp == 0:
            yield f"tp={tp} cp={cp}", {"tp": tp, "cp": cp, "sp": case.sp and tp > 1}


def _pieces(case: ParallelCase) -> Changes:
    """Yield shorter lengths that the layout can still cut, whole pieces at a time."""
    unit = 2 * case.cp * (case.tp if case.sp else 1)
    for row, length in enumerate(case.lengths):
        if length % unit == 0:
            for count in below(length // unit, 0):
                lengths = (*case.lengths[:row], count * unit, *case.lengths[row + 1 :])
                yield of_lengths(lengths if case.packed else (count * unit,) * len(case.lengths))


def _shared_heads(case: ParallelCase) -> Changes:
    for heads in (case.tp * case.cp, 1):
        for value_heads in (heads, 2 * heads):
            if (value_heads, heads) < (case.value_heads, case.heads):
                yield f"heads={heads} value_heads={value_heads}", {"heads": heads, "value_heads": value_heads}


SMALLER_PATHS = Smaller(
    ParallelCase,
    (_mesh, fewer_sequences, unpacked, _pieces, shorter_sequences, _shared_heads, other_dt_bias),
    ("key_dim", "value_dim", "hidden"),
    telling=(longer_sequences,),
)
