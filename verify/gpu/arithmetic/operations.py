"""The operations of a device whose arithmetic is probed. Tensors go in and come out on the CPU."""

import abc
import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Measure:
    """What a probe has measured: a number, or words.

    - `limit`: what the tolerances assume, whatever the card: the largest absolute value of a number, or a regular expression that
      the words match. None: anything
    - `concerns`: what relies on it: rows of docs/explanation/rounding.md, constants of oracles/arithmetic/rounding.py
    """

    name: str
    value: float | str
    limit: float | str | None
    concerns: str


class Operations(abc.ABC):
    """What probes call.

    - `points`: how many numbers a function is tried on
    - `added`: how many numbers an atomic sum has
    - `atomics`: the dtypes in which it can be made
    """

    points: int
    added: int
    atomics: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)

    @abc.abstractmethod
    def dot(self, a: Tensor, b: Tensor, total: Tensor | None = None, precision: str | None = None, rows: int = 64) -> Tensor:
        """Return total + a @ b in float32, with a [64 n, 64 m] and b [64 m, 64], in programs of 16 or 64 rows."""

    @abc.abstractmethod
    def matmul(self, a: Tensor, b: Tensor, *, tf32: bool) -> Tensor:
        """Return torch's a @ b of float32, where torch may use TF32 or may not."""

    @abc.abstractmethod
    def function(self, name: str, x: Tensor, y: Tensor | None = None, *, fusion: bool = True) -> Tensor:
        """Return a function of float32 numbers by name. "x*x - y*y" is one; `fusion` says whether it may become an fma."""

    @abc.abstractmethod
    def scan(self, x: Tensor, warps: int) -> tuple[Tensor, Tensor]:
        """Return the cumulative sums and the sum of each row of x, from a kernel with so many warps."""

    @abc.abstractmethod
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return float32 numbers in another dtype. Their count is a multiple of 256."""

    @abc.abstractmethod
    def atomic_sum(self, x: Tensor) -> Tensor:
        """Return the sum of all x, a multiple of 256 numbers, that atomic additions in the dtype of x make."""
