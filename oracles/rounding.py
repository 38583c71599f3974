"""Where finite-precision algorithms round, and what a rounding there does: the disturbed arithmetic.

An oracle calls the methods of :class:`Arithmetic` at each place where an algorithm of the adapter's class rounds. Run 0 of
a batch is exact: every method returns its argument. In the other runs the value (and on the way back its cotangent) is
rounded to the precision held there, on a grid that is shifted for each run and place:

    round_s(x) = fl_p(s x) / s,    s in [1, 2) fixed by (run, place),    fl_p = round to nearest with p bits

so each run commits rounding errors of the true size, at the true places, and differently. In the odd runs a place has one s, so
equal values get equal errors, as on real hardware: constant gates and repeated tokens accumulate coherently, which independent
noise would miss. In the even runs every position of the last two axes has its own s: errors of sums depend on all their terms, so
equal results need not have equal errors, and terms that ought to cancel do not. Monte Carlo arithmetic (Parker 1997; Verificarlo,
CADNA) is the same idea with random errors.

fl_p(x) = t - (t - x) with t = (2^(53-p) + 1) x is Veltkamp's splitting (Dekker 1971); it is exact round-to-nearest in
float64, and p = 53, that is t = 2 x, returns x itself, which is how run 0 stays exact without a branch.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from oracles.counter import mix

BITS = {"bf16": 8, "fp16": 11, "fp32": 24}
TF32_BITS = 10  # 11 bits rounded to nearest; matrix units may truncate, which errs like 10
SINGLE = 24
FP16_STEP = 2.0**-24  # the subnormal step: an absolute error where fp16 values are stored
CLASSES = ("chunkwise", "recurrent")
PRODUCTS = ("ieee", "tf32")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The precisions an algorithm of one class works in; tensors given to its methods have the runs on axis 0.

    `stored` is the number of significand bits of stored intermediates and of matrix-product operands that are computed,
    `inputs` that of operands that are inputs (53: already representable, not rounded), `product` the bits an operand keeps
    in a product that is accumulated in float32, before the depth of the sum is taken into account.
    """

    runs: int
    stored: int
    inputs: int
    output: int
    step: float = 0.0

    @classmethod
    def of(cls, algorithm: str, dtype: str, products: str = "ieee", runs: int = 9) -> "Arithmetic":
        """The arithmetic of `algorithm` ("chunkwise" or "recurrent") on inputs of `dtype`; run 0 of `runs` is exact."""
        for name, value, choices in (
            ("algorithm", algorithm, CLASSES),
            ("dtype", dtype, tuple(BITS)),
            ("products", products, PRODUCTS),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        output, step = BITS[dtype], FP16_STEP if dtype == "fp16" else 0.0
        if algorithm == "recurrent":
            return cls(runs, SINGLE, SINGLE, output, step)
        if dtype == "fp32":
            bits = TF32_BITS if products == "tf32" else SINGLE
            return cls(runs, bits, bits, output, step)
        return cls(runs, output, 53, output, step)

    def operand(self, x: Tensor, place: str, depth: int = 1) -> Tensor:
        """x as stored, or as computed operand of a product over `depth` terms; its cotangent is stored alike."""
        bits = self.summed(self.stored, depth)
        return self._round(x, place, bits, bits, self.step if self.stored == self.output else 0.0)

    def use(self, x: Tensor, place: str, depth: int = 1) -> Tensor:
        """x unchanged, as one of several uses of an operand; the cotangent that comes from this use is stored on its own."""
        return self._round(x, place, 53, self.summed(self.stored, depth), self.step if self.stored == self.output else 0.0)

    def input(self, x: Tensor, place: str, depth: int = 1) -> Tensor:
        """x, an input, as operand of products over `depth` terms; its gradient is stored in the inputs' precision."""
        return self._round(x, place, self.summed(self.inputs, depth), self.output, self.step, self.step == 0.0)

    def single(self, x: Tensor, place: str, depth: int = 1) -> Tensor:
        """x held in float32, the sum of `depth` terms; its cotangent likewise."""
        bits = self.summed(SINGLE, depth)
        return self._round(x, place, bits, bits, 0.0)

    def sums(self, x: Tensor, place: str, depth: int) -> Tensor:
        """x unchanged; its cotangent is a float32 sum of `depth` terms."""
        return self._round(x, place, 53, self.summed(SINGLE, depth), 0.0)

    def result(self, x: Tensor, place: str) -> Tensor:
        """x as an output of the inputs' precision; its cotangent is given, hence exact."""
        return self._round(x, place, self.output, 53, self.step)

    def gradient(self, x: Tensor, place: str, bits: int) -> Tensor:
        """x unchanged; its gradient is an output of `bits` bits."""
        return self._round(x, place, 53, bits, self.step if bits == BITS["fp16"] else 0.0)

    def summed(self, bits: int, depth: int) -> int:
        """Bits left of a float32 sum of `depth` terms: rounding errors of a sum grow like the root of its depth.

        Rounding each operand by u sqrt(n) gives the sum an error of u sqrt(n) times its reach, the root of the summed
        squares of its terms; sequential summation of n terms errs by at most about that much (Higham 2002, section 4.2).
        Operands coarser than float32 drown that error, so they keep their bits.
        """
        return bits if bits != SINGLE else SINGLE - math.ceil(math.log2(max(depth, 1)) / 2)

    def _round(
        self, x: Tensor, place: str, forward: int, backward: int, step: float, step_back_only: bool = False
    ) -> Tensor:
        if self.runs == 1:
            return x
        ahead = _dither(self, x, place, forward, 0.0 if step_back_only or forward == 53 else step)
        return _Round.apply(x, ahead, self, place + "'", backward, step)  # type: ignore[no-any-return]

    def dither(self, x: Tensor, place: str, bits: int | None = None) -> Tensor:
        """x rounded to `bits` (default: as stored) on each run's own grid, outside automatic differentiation."""
        if self.runs == 1:
            return x
        bits = self.stored if bits is None else bits
        return _dither(self, x, place, bits, self.step if bits == self.output else 0.0)


@functools.lru_cache(4096)
def _factors(
    place: str, runs: int, bits: int, step: float, shape: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The grids s of a place, s (2^(53-p) + 1), and the constant that rounds to the subnormal step; run 0's do nothing."""
    last = shape[-2:] if len(shape) > 2 else shape[1:]
    word = int.from_bytes(place.encode()[:7], "big") + 31 * len(place)
    positions = torch.arange(math.prod(last), dtype=torch.int64, device=device)
    rows = []
    for run in range(runs):
        key = mix(torch.tensor(word * 64 + run, dtype=torch.int64, device=device))
        own = positions if run % 2 == 0 else torch.zeros_like(positions)
        rows.append(1.0 + ((mix(own + key) >> 1) & (2**62 - 1)).to(torch.float64) / 2.0**62)
    grid = torch.stack(rows)
    grid[0] = 1.0
    split = torch.full((runs, 1), 2.0 ** (53 - bits) + 1.0, dtype=torch.float64, device=device)
    snap = torch.full((runs, 1), 1.5 * 2.0**52 * step, dtype=torch.float64, device=device)
    split[0], snap[0] = 2.0, 0.0
    middle = (1,) * (len(shape) - 1 - len(last))
    full = (runs, *middle, *last)
    return grid.reshape(full), (grid * split).reshape(full), snap.reshape((runs,) + (1,) * (len(shape) - 1))


def _dither(arithmetic: Arithmetic, x: Tensor, place: str, bits: int, step: float) -> Tensor:
    if bits >= 53:
        return x.detach()
    with torch.no_grad():
        grid, split, snap = _factors(place, arithmetic.runs, bits, step, tuple(x.shape), x.device)
        scaled = x * grid
        high = x * split
        scaled = high.sub_(torch.sub(high, scaled, out=scaled))
        if step:
            scaled = scaled.add_(snap).sub_(snap)  # adding 1.5 * 2^52 steps rounds to a multiple of the step
        return scaled.div_(grid)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        ahead: Tensor,
        arithmetic: Arithmetic,
        place: str,
        bits: int,
        step: float,
    ) -> Tensor:
        ctx.back = arithmetic, place, bits, step  # type: ignore[attr-defined]
        return ahead.view_as(ahead)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic, place, bits, step = ctx.back  # type: ignore[attr-defined]
        return _dither(arithmetic, cotangents[0], place, bits, step), None, None, None, None, None
