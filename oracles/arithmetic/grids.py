"""The grids of disturbed runs: numbers s in [1, 2) for each run and place (see oracles/arithmetic/rounding.py)."""

import array
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracles.arithmetic.counter import mix
from oracles.arithmetic.room import memory
from oracles.arithmetic.words import MANTISSA, Bits

Runs = tuple[int, int, int]  # the first run here, one past the last run here, and the last run of the call
Grid = tuple[Tensor, Tensor]  # the numbers s, and 1 / s
SET = 8  # runs that share one word for the grids of a place; each odd one of them has its own stratum
UNIT = 2.0**-24  # half a unit in the last place of float32, relative to numbers in [1, 2)
_TABLE = 2**20
_SHARED = 2**16  # up to this many numbers a run, calls of different shapes share their grids
_KEPT_BYTES = 2**27  # bytes of grids that each cache keeps on a CPU for later calls
_KEPT_SHARE = 1 / 32  # the same on a GPU, as a share of its memory


@functools.cache
def _table(device: torch.device, turns: int = 1) -> Tensor:
    """Return 2^20 numbers in [1, 2), from which every place takes its grids, repeated `turns` times."""
    if turns > 1:
        return _table(device).repeat(turns)
    scrambled = mix(torch.arange(_TABLE, dtype=torch.int64, device=device)) & (2**52 - 1)
    return 1.0 + scrambled.to(torch.float64) / 2.0**52


@functools.cache
def _known() -> "array.array[float]":
    """Return the same numbers as an array, because looking up single numbers in a tensor is slow."""
    return array.array("d", _table(torch.device("cpu")).numpy().tobytes())


def prepare() -> None:
    """Compute the tables for a CPU, 0.04 s of CPU time. Processes that are forked from this one share them."""
    _known()
    _table(torch.device("cpu"), 2)


@functools.cache
def _cache_limit(device: torch.device) -> int:
    if device.type == "cpu":
        return _KEPT_BYTES
    return int(_KEPT_SHARE * memory(device))


def _allocated_bytes(grid: Grid) -> int:
    """Return the bytes that a grid keeps allocated; the grid may be a view of a larger storage."""
    return 2 * grid[0].untyped_storage().nbytes()


def cached(make: Callable[..., Grid]) -> Callable[..., Grid]:
    """Cache the results of `make` by its arguments while they fit into memory; the oldest results are dropped first."""
    cache: dict[Any, Grid] = {}
    total = 0

    @functools.wraps(make)
    def get(*arguments: Any) -> Grid:
        nonlocal total
        if (found := cache.get(arguments)) is not None:
            return found
        found = make(*arguments)
        size, most = _allocated_bytes(found), _cache_limit(found[0].device)
        if 8 * size <= most:
            cache[arguments], total = found, total + size
            while total > most:
                total -= _allocated_bytes(cache.pop(next(iter(cache))))
        return found

    def clear() -> None:
        nonlocal total
        cache.clear()
        total = 0

    get.clear = clear  # type: ignore[attr-defined]
    return get


@cached
def grid_of(
    places: tuple[str, ...],
    runs: Runs,
    bits: Bits,
    step: float,
    last: tuple[int, ...],
    axes: int,
    runs_axis: int,
    device: torch.device,
    dtype: torch.dtype,
    axis: int | None,
    widths: tuple[int, ...],
    left: tuple[float, ...],
) -> Grid:
    """Return the grids s of several places, and 1 / s, for tensors with `axes` axes; run 0 has s = 1.

    If `left` is not empty, it has for each run the factor by which 1 / s is multiplied.

    There is one s for each run and each position of the last two axes. Several places are stacked along `axis`, or lie side by side
    along the last axis if `widths` are given. Below its smallest normal number a dtype has a fixed step. Where `step` is not 0, the
    grids are scaled so that `dtype` has that step there.
    """
    if runs[0] % 2 and runs[1] == runs[0] + 1:  # an odd run has one s for all positions of a place
        last = (1,) * len(last)
    sizes = [last[0] * width for width in widths] or [math.prod(last)] * len(places)
    precisions = (bits,) * len(places) if isinstance(bits, int) else bits
    scale = torch.finfo(dtype).tiny / (step * 2.0 ** (precisions[0] - 1)) if step else 1.0
    # Sizes are rounded up so that calls of different shapes share the numbers of a place.
    rooms = [max(_SHARED >> 7, 1 << (size - 1).bit_length()) if size <= _SHARED else size for size in sizes]
    parts = [
        [numbers[:, :size] for numbers in numbers_of(place, runs, precision, room, scale, device, dtype)]
        for place, precision, size, room in zip(places, precisions, sizes, rooms, strict=True)
    ]
    if widths:
        parts = [[numbers.unflatten(1, (last[0], -1)) for numbers in part] for part in parts]
    join = torch.cat if widths else torch.stack
    grid, back = parts[0] if len(parts) == 1 else (join(part, -1 if widths else 1) for part in zip(*parts, strict=True))
    view = [1] * (axes - len(last)) + list(last[:-1]) + [sum(widths) or last[-1]]
    view[runs_axis] = len(grid)
    if axis is not None:
        view[axis] = len(places)
    grid, back = grid.view(view), back.view(view)
    if left:  # made here, once: a tensor that a GPU gets from the host makes the host wait for the GPU
        shape = [1] * axes
        shape[runs_axis] = len(left)
        back = back * torch.tensor(left, dtype=dtype, device=device).view(shape)
    return grid, back


@cached
def numbers_of(place: str, runs: Runs, bits: int, size: int, scale: float, device: torch.device, dtype: torch.dtype) -> Grid:
    """Return numbers in [1, 2) [runs, size] for the grids of a place, times `scale`, and their reciprocals."""
    known, (first, after, last) = _known(), runs
    starts, same = [], {}
    for row, run in enumerate(range(first, after)):
        word, index = _word(place, run)
        starts.append(_start(word, index))
        if run and index % 2:
            count = (min(last - run + index, SET) + 1) // 2
            strata = sorted(range(count), key=lambda run: known[(word + 104729 * run) % _TABLE])
            phase = (strata[index // 2] + known[starts[row]] - 1.0) / count
            same[row] = known[word % _TABLE] * (1.0 + phase * 2.0 ** (1 - bits))
    table = _table(device, 1 + -(-size // _TABLE))
    numbers = torch.stack([table[start : start + size] for start in starts]).to(dtype)
    if same:
        numbers[list(same)] = torch.tensor(list(same.values()), dtype=dtype, device=device).unsqueeze(-1)
    numbers.mul_(scale)
    if first == 0:
        numbers[0] = 1.0
    return numbers, numbers.reciprocal()


def _word(place: str, run: int) -> tuple[int, int]:
    """Return the word from which a run takes its numbers for a place, and the run's index (from 1) among the runs that share it."""
    sets, index = divmod(run - 1, SET)
    return (zlib.crc32(f"{place}#{sets}".encode()), index + 1) if run else (0, 0)


def _start(word: int, index: int) -> int:
    """Return where the numbers of a run begin in the table."""
    return (word + 7919 * index * (index + 12)) % _TABLE


def fractions(place: str, first: int, runs: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return numbers in (-u, u), [runs, *shape], u = 2^-24; in odd runs all rows are equal, and in run 0 all numbers are 0."""
    table, (rows, size), numbers = _table(device), shape, range(first, first + runs)
    number = torch.tensor(numbers, device=device).reshape(-1, 1, 1)
    start = torch.tensor([_start(*_word(place, run)) for run in numbers], device=device).reshape(-1, 1, 1)
    row = torch.arange(rows, device=device).unsqueeze(-1) * (number % 2 == 0)
    fraction = (2.0 * table[(start + row * size + torch.arange(size, device=device)) % _TABLE] - 3.0) * 2.0 ** -MANTISSA[
        torch.float32
    ]
    return fraction * (number > 0)
