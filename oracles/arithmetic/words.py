"""Rounding of numbers to p bits by integer operations on their words, or by a cast (see oracles/arithmetic/rounding.py)."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Bits = int | tuple[int, ...]  # for all places, or for each
MANTISSA = {torch.float64: 53, torch.float32: 24}
CASTS = {  # casts that round to so many bits and keep the range
    (8, torch.float32): torch.bfloat16,
    (8, torch.float64): torch.bfloat16,
    (24, torch.float64): torch.float32,
}
WORDS = {torch.float64: torch.int64, torch.float32: torch.int32}


def words_of(bits: "Bits", digits: int, axis: int | None, widths: tuple[int, ...], device: torch.device) -> tuple[Any, Any]:
    """Return what is added to a number's word to round it, and the mask of the sum; tensors if places have different bits."""
    if isinstance(bits, int):
        half = 1 << (digits - bits - 1)
        return half, -2 * half
    return _words_by_place(bits, digits, axis, widths, device)


@functools.lru_cache(256)
def _words_by_place(
    bits: tuple[int, ...], digits: int, axis: int | None, widths: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    halves = _placed([(1 << (digits - precision)) >> 1 if precision < digits else 0 for precision in bits], axis, widths, device)
    dtype = torch.int64 if digits > MANTISSA[torch.float32] else torch.int32
    return halves.to(dtype), torch.where(halves > 0, -2 * halves, -1).to(dtype)


# `Arithmetic._rough` in one launch: on a GPU four launches take four times as long, whatever their size. `low` is what `lowest`
# returns, and `undo` is 1 if the result is divided by the number it was multiplied by. The result equals that of the separate
# operations bit for bit (tests/formulas/test_rounding.py, on a GPU).
FUSED = """
template <typename T> T rounded(T x, T by, T low, T undo) {
  T y = x * by;
  if (low < 0) {
    union { float number; int word; } narrow;
    narrow.number = (float) y;
    if (low < -1 && y == y) narrow.word = (narrow.word + 0x7fff + ((narrow.word >> 16) & 1)) & -65536;
    y = (T) narrow.number;
  } else if (low > 0 && sizeof(T) == 8) {
    union { double number; long long word; } wide;
    wide.number = y;
    wide.word = (wide.word + (1ll << ((int) low - 1))) & -(1ll << (int) low);
    y = (T) wide.number;
  } else if (low > 0) {
    union { float number; int word; } single;
    single.number = y;
    single.word = (single.word + (1 << ((int) low - 1))) & -(1 << (int) low);
    y = (T) single.number;
  }
  return undo > 0 ? y * ((T) 1 / by) : y;
}
"""


@functools.cache
def fused(device: torch.device) -> "Callable[..., Tensor] | None":
    """Return FUSED as compiled by torch's jiterator on a GPU; None if it is missing or cannot compile."""
    try:
        create = torch.cuda.jiterator._create_jit_fn
        alike, placed = create(FUSED, low=0.0, undo=0.0), create(FUSED, undo=0.0)

        def launch(x: Tensor, by: Tensor, low: float | Tensor, *, undo: bool) -> Any:
            if isinstance(low, Tensor):
                return placed(x, by, low, undo=float(undo))
            return alike(x, by, low=low, undo=float(undo))

        for dtype in MANTISSA:
            one = torch.ones((), device=device, dtype=dtype)
            for low in (1.0, one):
                launch(one, one, low, undo=True)
                launch(one.new_ones(2, 2), one.new_ones(2, 1), low, undo=True)  # broadcast arguments are compiled separately
    except torch.OutOfMemoryError:
        raise  # it does not mean that the compiler failed
    except (AttributeError, RuntimeError):
        return None
    return launch


def lowest(
    bits: "Bits", kind: torch.dtype | None, axis: int | None, widths: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> float | Tensor:
    """Return how many of a number's lowest bits are cleared, for all places or each; -1 means a cast to float32, -2 to bfloat16."""
    if isinstance(bits, int):
        return {None: float(MANTISSA[dtype] - bits), torch.float32: -1.0, torch.bfloat16: -2.0}[kind]
    return _lowest_by_place(bits, axis, widths, device, dtype)


@functools.lru_cache(256)
def _lowest_by_place(
    bits: tuple[int, ...], axis: int | None, widths: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Tensor:
    return _placed([max(0, MANTISSA[dtype] - precision) for precision in bits], axis, widths, device).to(dtype)


def _placed(numbers: list[int], axis: int | None, widths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a tensor with a number for each place, laid out as the places are: along `axis`, or in widths along the last axis."""
    tensor = torch.tensor(numbers, device=device)
    if widths:
        return tensor.repeat_interleave(torch.tensor(widths, device=device))
    return tensor if axis is None else tensor.reshape(-1, *[1] * (-1 - axis))
