"""Draws the picture of a comparison: the largest error over its tolerance in each of a few parts."""

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from verify.bench.places import Layout
from verify.process.picture import MOST_COLUMNS, MOST_LINES, Picture, rounded


def drawn(ratio: Tensor, layout: Layout) -> Picture | None:
    """The picture of rows from their errors over their tolerances, NaN and infinity among them. None if there are no rows."""
    if not ratio.numel():
        return None
    kept = [axis for axis in (layout.line, *layout.axes) if axis is not None]
    others = [axis for axis in range(ratio.ndim) if axis not in kept]
    plane = ratio.permute(*kept, *others)
    plane = (plane.flatten(len(kept)).amax(-1) if others else plane).double().cpu()
    plane = plane.reshape(1 if layout.line is None else plane.shape[0], -1)
    lengths = layout.lengths if sum(length > 0 for length in layout.lengths) <= MOST_COLUMNS else (sum(layout.lengths),)
    columns = _spans(lengths, MOST_COLUMNS)
    lines = _spans(plane.shape[:1], MOST_LINES)
    plane = _largest(_largest(plane, columns).T, lines).T
    values = tuple(tuple(map(rounded, line)) for line in plane.tolist())
    mixed = len(lengths) < len(layout.lengths)
    return Picture(
        layout.along,
        layout.across,
        layout.group if len(layout.lengths) > 1 else "",
        tuple((-1 if mixed else group, first, last) for group, first, last in columns),
        tuple((first, last) for _, first, last in lines),
        values,
    )


def _largest(plane: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """The largest number of each span of columns, NaN before any other."""
    parts = plane.split([last - first + 1 for _, first, last in spans], -1)
    return torch.stack([part.amax(-1) for part in parts], -1)


def _spans(lengths: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """At most `most` spans, all of one size where a group's end allows it: their group, their first and their last place in it."""
    sizes = range(1, max(lengths) + 1)
    size = sizes[bisect.bisect_left(sizes, True, key=lambda size: sum(-(-length // size) for length in lengths) <= most)]
    return [
        (group, first, min(first + size, length) - 1) for group, length in enumerate(lengths) for first in range(0, length, size)
    ]
