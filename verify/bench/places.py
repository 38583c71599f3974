"""Where two tensors differ, in words: sequence, token, head."""

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
    ports = (*case.spec.outputs, *case.spec.gradients())
    axes: list[str] = next((port.axes.split() for port in ports if port.name == pair.port), [])[: len(index)]
    if not axes or len(axes) < len(index):
        return plain
    words = [f"{WORDS[axis]} {at}" for axis, at in zip(axes, index, strict=True) if axis in WORDS]
    if axes[0] == "N":
        return ", ".join(words) if shape[0] == len(case.lengths) else plain
    if axes[:2] != ["B", "T"]:
        return ", ".join(words) or plain
    if tuple(shape[:2]) != ((1, case.tokens) if case.packed else (len(case.lengths), case.lengths[0])):
        return plain
    sequence, token = index[:2]
    if case.packed:
        starts = case.starts()
        sequence = max(row for row, start in enumerate(starts[:-1]) if start <= token and case.lengths[row])
        token -= starts[sequence]
    what = ", ".join([f"token {token}", *words])
    return f"sequence {sequence}, {what}" if len(case.lengths) > 1 else what
