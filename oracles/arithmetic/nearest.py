"""Arithmetic that rounds to nearest at some places, as hardware does: what one choice of an implementation does to its results.

The disturbed runs of oracles/arithmetic/rounding.py say how far right results may be off. An evaluation here says where a result
would be if it were rounded at these places and exact elsewhere. It is one run, numbered 1, whose grid is not shifted.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from oracles.arithmetic.rounding import EXACT, Arithmetic
from oracles.arithmetic.words import Bits

# What flash-linear-attention's chunkwise kernels, and those that are derived from them, store in the dtype of the inputs.
STORED = ("q normalised", "k normalised", "beta v", "beta exp(G) k", "T", "U", "W", "S", "V'", "exp(G_C - G) V'", "scores")
GATES = ("g", "beta")  # what a kernel or a layer computes from a, b, A_log and dt_bias


@dataclasses.dataclass(frozen=True)
class Nearest(Arithmetic):
    """An arithmetic that rounds at `places` alone: to nearest, with as many bits as `bits`, or as the place has (None)."""

    places: tuple[str, ...] = ()
    bits: int | None = None

    @classmethod
    def in_chunks(cls, dtype: str, chunk: int) -> "Nearest":
        """Return the arithmetic of chunkwise kernels on inputs of `dtype`, in chunks of `chunk` tokens."""
        plain = Arithmetic.of("chunkwise", dtype, runs=1)
        fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return cls(**{**fields, "first": 1, "chunk": chunk}, places=STORED)

    @classmethod
    def of_gates(cls, bits: int) -> "Nearest":
        """Return the arithmetic in which gates and beta that are computed inside have so many bits."""
        return cls(1, EXACT, EXACT, EXACT, first=1, places=GATES, bits=bits)

    @property
    def in_order(self) -> tuple[int, ...]:
        """Return no runs: what a sum errs by is no rounding of a place."""
        return ()

    def choice(self, x: Tensor) -> Tensor:
        """Return 0: of two ways, the one that decays V' and not k."""
        return x.new_zeros([1] * x.ndim)

    def drift(self, x: Tensor, place: str) -> Tensor:  # noqa: ARG002
        """Return no drift."""
        return torch.zeros_like(x)

    def disturbed(
        self,
        x: Tensor,
        places: tuple[str, ...],
        bits: Bits,
        step: float,
        axis: int | None = None,
        widths: tuple[int, ...] = (),
    ) -> Tensor:
        """Return x rounded in those of `places` that are among the arithmetic's own."""
        known = bits if isinstance(bits, tuple) else (bits,) * len(places)
        asked = tuple((self.bits or own) if place in self.places else EXACT for place, own in zip(places, known, strict=True))
        return super().disturbed(x, places, asked if len(asked) > 1 else asked[0], step, axis, widths)

    def grid(self, like: Tensor, place: str) -> tuple[Tensor, Tensor]:
        """Return the grid of a place: 1, and nothing to divide by."""
        return self.grids(like, (place,), self.stored, 0.0, None, ())

    def grids(self, like: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Return grids that are not shifted: 1, and 1 to divide by."""
        one = like.new_ones([1] * like.ndim)
        return one, one
