"""Where two tensors differ, in words: sequence, token, head."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from properties.laws.law import Pair


def indices(flat: int, shape: torch.Size) -> list[int]:
    """The index along each axis that belongs to a flat index."""
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return index[::-1]


WORDS = {"N": "sequence", "H": "head", "HV": "head", "K": "key row", "D": "channel", "V": "channel", "C": "channel", "P": "slot"}


def where(case: Any, pair: Pair, flat: int, shape: torch.Size) -> str:
    """The place of a flat index in words: sequence, token, head. If `shape` is not that of the whole case, plain indices."""
    index, plain = indices(flat, shape), "index " + ", ".join(map(str, indices(flat, shape)))
    axes = _axes(case, pair)[: len(index)]
    if not axes or len(axes) < len(index):
        return plain
    words = [f"{WORDS[axis]} {at}" for axis, at in zip(axes, index, strict=True) if axis in WORDS]
    if axes[0] == "N":
        return ", ".join(words) if shape[0] == len(case.lengths) else plain
    if axes[:2] != ["B", "T"]:
        return ", ".join(words) or plain
    if not _whole(case, shape):
        return plain
    sequence, token = index[:2]
    if case.packed:
        starts = case.starts()
        sequence = max(row for row, start in enumerate(starts[:-1]) if start <= token and case.lengths[row])
        token -= starts[sequence]
    what = ", ".join([f"token {token}", *words])
    return f"sequence {sequence}, {what}" if len(case.lengths) > 1 else what


def _axes(case: Any, pair: Pair) -> list[str]:
    """The names of the axes of a comparison's output or gradient; none if the operation has no such output."""
    ports = (*case.spec.outputs, *case.spec.gradients())
    return next((port.axes.split() for port in ports if port.name == pair.port), [])


def _whole(case: Any, shape: torch.Size) -> bool:
    """Whether axes B and T of this shape have all tokens of a case."""
    return tuple(shape[:2]) == ((1, case.tokens) if case.packed else (len(case.lengths), case.lengths[0]))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the rows of a comparison lie in a picture (verify/process/picture.py has the words).

    `axes` are the axes from left to right, the outer one first. `lengths` are the lengths of the groups that lie there one after
    the other. `line` is the axis from top to bottom, if there is one. All other axes are one place of the picture.
    """

    along: str
    axes: tuple[int, ...]
    lengths: tuple[int, ...]
    group: str = ""
    across: str = ""
    line: int | None = None


ALONG = {"T": "token", "K": "key row", "D": "channel", "C": "channel", "HV": "head", "H": "head"}
ACROSS = {"HV": "head", "H": "head", "D": "channel", "C": "channel"}
GROUPS = {"B": "sequence", "N": "sequence", "P": "slot"}


def layout(case: Any, pair: Pair, shape: torch.Size) -> Layout | None:
    """How the rows of a comparison lie in a picture; None if they have neither tokens, heads, key rows nor channels."""
    axes = _axes(case, pair)[: len(shape)]
    found = lay_out(axes, shape) if len(axes) == len(shape) else None
    if found is None or not found.group:
        return found
    if axes[0] == "B" and case.packed and _whole(case, shape):
        return dataclasses.replace(found, group="sequence", lengths=case.lengths)
    whole = axes[0] == "P" or (_whole(case, shape) if axes[0] == "B" else shape[0] == len(case.lengths))
    return found if whole else dataclasses.replace(found, group="row of the batch")


def lay_out(axes: Sequence[str], shape: torch.Size) -> Layout | None:
    """How rows with these axes lie in a picture: tokens from left to right if there are any, and heads from top to bottom."""
    names = [name for name in ALONG if name in axes]
    if not names:
        return None
    main, others = axes.index(names[0]), [name for name in ACROSS if name in axes and name != names[0]]
    across, line = (ACROSS[others[0]], axes.index(others[0])) if others else ("", None)
    if axes[0] in GROUPS and main > 0:
        return Layout(ALONG[names[0]], (0, main), (shape[main],) * shape[0], GROUPS[axes[0]], across, line)
    return Layout(ALONG[names[0]], (main,), (shape[main],), "", across, line)
