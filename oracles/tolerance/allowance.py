"""The tolerance of each row, from how far disturbed runs are from the truth at the row and around it.

The formula is in the docstring of oracles/tolerance/bound.py, which computes the disturbed runs.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oracles.operation import Port

WINDOW = 9
KAPPA = 12.0
FLOOR_ULP = 2.0
# A number flushed to zero below 2^-126, times a factor up to 2^31: values are up to 2^30, and the norm's factor 1 / 1e-4 is less.
_TINY = 2.0**-95


class Rows(NamedTuple):
    """A tensor's rows: truth, mean squared disturbance of each row (`mean_square`), unit in the last place, subnormal step."""

    port: Port
    value: Tensor
    mean_square: Tensor
    ulp: float
    step: float

    @property
    def along_tokens(self) -> bool:
        """Whether the neighbours of a row are those of its sequence and head."""
        return self.port.axes.startswith("B T")


def allowances(tensors: Sequence[Rows], lengths: list[int]) -> list[Tensor]:
    """Return the error allowed to each row of several tensors; `lengths` are the sequences' lengths, for tensors with tokens."""
    floors = [rows.value.abs() if rows.port.scalar_rows else torch.linalg.vector_norm(rows.value, dim=-1) for rows in tensors]
    # A row of no numbers, as of a state of W - 1 = 0 columns, gets a tolerance above its error, which is zero.
    widths = [1 if rows.port.scalar_rows else max(rows.value.shape[-1], 1) for rows in tensors]
    torch._foreach_mul_(floors, [FLOOR_ULP * rows.ulp for rows in tensors])
    torch._foreach_add_(floors, [(rows.step + _TINY) * width**0.5 for rows, width in zip(tensors, widths, strict=True)])
    along = iter(_along_tokens([rows.mean_square for rows in tensors if rows.along_tokens], lengths))
    spread = [next(along) if rows.along_tokens else _allowed(rows.mean_square, moving_mean(rows.mean_square)) for rows in tensors]
    return list(torch._foreach_maximum(spread, floors))


def _allowed(squares: Tensor, around: Tensor) -> Tensor:
    return (squares + around).mul_(0.5 * KAPPA**2).sqrt_()


def _along_tokens(tensors: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """Return the tolerances of all tensors [B, T, ...] at once; a row's neighbours are those of its sequence and head."""
    tokens = sum(lengths)
    if not tensors or not tokens:
        return tensors
    parts = [tensor.flatten(0, 1).reshape(tokens, -1) for tensor in tensors]
    # A column of ones counts the rows in each window.
    gap, places = WINDOW // 2, _apart(tuple(lengths), tensors[0].device)
    columns = torch.cat([*parts, parts[0].new_ones(tokens, 1)], -1)
    apart = columns.new_zeros(tokens + gap * len(lengths), columns.shape[-1]).index_copy_(0, places, columns)
    means = torch.nn.functional.avg_pool1d(apart.mT, WINDOW, 1, gap).mT.index_select(0, places)
    tolerances = _allowed(columns, means / means[:, -1:]).split([*(part.shape[-1] for part in parts), 1], -1)
    return [part.reshape(tensor.shape) for part, tensor in zip(tolerances, tensors, strict=False)]


@functools.lru_cache(64)
def _apart(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the place of each token when enough zeros separate the sequences that no window covers two of them."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (torch.arange(sum(lengths)) + WINDOW // 2 * numbers).to(device)


def moving_mean(rows: Tensor) -> Tensor:
    """Return the mean over up to WINDOW entries around each entry along the last axis; windows are shorter at the ends."""
    if not rows.ndim or not rows.numel():
        return rows
    matrix = rows.reshape(-1, rows.shape[-1])
    return torch.nn.functional.avg_pool1d(matrix, WINDOW, 1, WINDOW // 2, count_include_pad=False).reshape(rows.shape)
