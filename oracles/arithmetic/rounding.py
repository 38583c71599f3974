"""Where finite-precision algorithms round, and what a rounding there does: the disturbed arithmetic.

An oracle calls a method of :class:`Arithmetic` at each place where an algorithm of the adapter's class rounds. Runs are numbered.
Run 0 is exact: every method returns its argument. In every other run, the value (and in the backward its cotangent) is rounded to
the precision of that place, on a grid that is shifted for each run and place:

    round_s(x) = fl_p(s x) / s,    s in [1, 2) fixed by (run, place),    fl_p = round to nearest with p bits

So each run commits different rounding errors of the true size at the true places. In an odd run a place has one s, so equal values
get equal errors, as on real hardware. Constant gates and repeated tokens then add up errors that independent noise would average
away. There the s of a place are stratified over one unit in the last place, for SET runs at a time (Latin hypercube sampling), so
that even a few runs do not all happen to round a value well. In an even run every position of the last two axes has its own s.
Errors of sums depend on all their terms, so equal results need not have equal errors, and errors of terms that should cancel do not
cancel. Monte Carlo arithmetic (Parker 1997; Verificarlo, CADNA) is the same idea with random errors.

The bits of a float64, read as an integer, count units in the last place, across binades too. So fl_p adds 2^(53-p) / 2 to them and
clears the lowest 53 - p bits: round to nearest, ties away from zero. The same holds for float32 with 24 in place of 53; a value of
24 bits then needs no rounding, because float32 rounds it. Where a dtype has p bits and the same range, fl_p is a cast to that
dtype: ties go to even.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from oracles import PRODUCTS
from oracles.arithmetic.grids import Grid, Runs, fractions, grid_of
from oracles.arithmetic.words import CASTS, MANTISSA, WORDS, Bits, fused, lowest, words_of

BITS = {"bf16": 8, "fp16": 11, "fp32": 24}
# TF32 has 11 bits. A matrix unit may round to them, or cut a number off there, which loses half a unit on average: 2^-11 of a
# number in [1, 2), and 0.72 of that relative to numbers of all sizes. Both err by no more than rounding to 10 bits does. What is
# cut off has one sign, however, so that it adds up in sums of terms of one sign. In one run of CUTTING, operands are smaller
# by that average, too. In each place it is a third, as an operand passes several places; tests/laws/test_tf32.py says what this
# gives.
TF32_BITS = 10
# `in_order` has the same runs.
CUT, CUTTING = 0.72 * 2.0**-11 / 3, 16
SINGLE = 24
EXACT = 53
SMALLEST = 2.0**-126  # the smallest normal number of float32
FP16_STEP = 2.0**-24  # the subnormal step of fp16: an absolute error of stored fp16 values
CLASSES = ("chunkwise", "recurrent", "pointwise")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The precisions in which an algorithm of one class works.

    Tensors given to its methods have the runs along one `axis`, by default 0. These are the runs from `first` on: run 0, which is
    exact, and others, or only runs that round. `last` is the number of the last run of the call if these are not all its runs. The
    numbers of a rounding run do not depend on the other rounding runs that are evaluated with it.

    Precisions are significand bits. `stored` is for stored intermediates and for computed operands. `product` is what products and
    sums in float32 keep; it is 53 (EXACT) where operands are coarser and hide the errors of the sums. `output` is for the inputs'
    dtype, and `step` is its subnormal step where that matters. `gate` is for the gate's dtype, and `pool` for that of a pool's
    states if it is narrower than float32. `algorithm` is the class, and `chunk` the number of tokens in its chunks, if known.
    `restarts`, if given, has for each sequence the tokens at which a chunk begins too. `inverse` is for the products that compute
    (I + A)^-1 where these keep few bits: TF32 may be used for them whatever dtype the inputs have. `summed_again` is for corrected
    values from which a backward sums its states again, if it does. `folds` says that the algorithm multiplies a decay into operands
    even if all channels share this decay. `term` is for the products of a convolution, if each is rounded before it is added.
    `parameter` is for the dtype of A_log, and `bias` for that of dt_bias.
    """

    runs: int
    stored: int
    product: int
    output: int
    step: float = 0.0
    gate: int = EXACT
    algorithm: str = "exact"
    chunk: int | None = None
    restarts: tuple[tuple[int, ...], ...] = ()
    first: int = 0
    last: int | None = None
    inverse: int = EXACT
    summed_again: int = EXACT
    folds: bool = False
    term: int = EXACT
    axis: int = 0
    pool: int = EXACT
    parameter: int = SINGLE
    bias: int = SINGLE

    @classmethod
    def of(cls, algorithm: str, dtype: str, products: str = "ieee", runs: int = 9) -> "Arithmetic":
        """Return the arithmetic of `algorithm`, one of CLASSES, on inputs of `dtype`; run 0 of `runs` is exact.

        ValueError for an unknown algorithm, dtype or `products`.
        """
        for name, value, choices in (
            ("algorithm", algorithm, CLASSES),
            ("dtype", dtype, tuple(BITS)),
            ("products", products, PRODUCTS),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        output, step = BITS[dtype], FP16_STEP if dtype == "fp16" else 0.0
        inverse = TF32_BITS - 1 if algorithm == "chunkwise" and products == "tf32" else EXACT
        if algorithm == "chunkwise" and dtype != "fp32":
            return cls(runs, output, EXACT, output, step, algorithm=algorithm, inverse=inverse)
        if algorithm == "chunkwise" and products == "tf32":
            # A product rounds both operands when it reads them, even those that are stored in float32. So terms of a sum that
            # cancel have independent errors, whichever operand they differ in.
            return cls(runs, TF32_BITS, TF32_BITS, output, step, algorithm=algorithm, inverse=inverse)
        return cls(runs, SINGLE, SINGLE, output, step, algorithm=algorithm)

    @classmethod
    def exact(cls) -> "Arithmetic":
        """Return the arithmetic that rounds nowhere, with one run."""
        return cls(1, EXACT, EXACT, EXACT)

    @property
    def rounds(self) -> bool:
        """Whether any run rounds."""
        return self.runs > 1 or self.first > 0

    @property
    def end(self) -> int:
        """The number of the last run of the call."""
        return self.first + self.runs - 1 if self.last is None else self.last

    @property
    def narrow(self) -> bool:
        """Whether operands are coarser than float32, so that everything else may be computed in float32."""
        return self.stored < SINGLE

    @property
    def uniform(self) -> bool:
        """Whether this is a single odd run, which has the same s for all positions of a place."""
        return self.runs == 1 and self.first % 2 == 1

    @functools.cached_property
    def _numbered(self) -> Runs:
        return self.first, self.first + self.runs, self.end

    def operand(self, x: Tensor, place: str) -> Tensor:
        """Return x as it is stored, or as a computed operand of a product; its cotangent is stored in the same precision."""
        return self._round(x, place, self.stored, self.stored, self.step if self.stored == self.output else 0.0)

    def use(self, x: Tensor, place: str) -> Tensor:
        """Return x unchanged, as one of several uses of an operand; the cotangent from this use is stored on its own."""
        return self._round(x, place, EXACT, self.stored, self.step if self.stored == self.output else 0.0)

    def multiply(self, a: Tensor, b: Tensor, place: str) -> Tensor:
        """Return a @ b, summed in float32 or from TF32 operands; each of the two backward products has its own errors."""
        if not self.rounds or self.product == EXACT:
            return a @ b
        return _Product.apply(a, b, self, place)  # type: ignore[no-any-return]

    def terms(self, x: Tensor, place: str, depth: int) -> Tensor:
        """Return x as an operand that gives its errors to a product, a sum of `depth` terms; for use outside autograd."""
        return x if self.product == EXACT else self.disturbed(x, (place,), self.product_bits(depth), 0.0)

    @property
    def memory(self) -> int:
        """The bits of values that are stored and read unchanged; with TF32 products that is float32, rounded only as an operand."""
        return SINGLE if self.product <= TF32_BITS else self.stored

    def product_bits(self, depth: int) -> int:
        """Return the bits that a product keeps, which is a sum of `depth` terms."""
        return min(self.product, summed(depth))

    def input(self, x: Tensor, place: str) -> Tensor:
        """Return x, an input; its gradient is an output in the precision of the inputs."""
        return self.gradient(x, place, self.output)

    def single(self, x: Tensor, place: str, depth: int = 1) -> Tensor:
        """Return x as held in float32, the sum of `depth` terms; its cotangent is held in the same way."""
        bits = summed(depth)
        return self._round(x, place, bits, bits, 0.0)

    def in_pool(self, x: Tensor) -> Tensor:
        """Return states as they are stored in a pool."""
        return self._round(x, "pool", self.pool, EXACT, FP16_STEP if self.pool == BITS["fp16"] else 0.0)

    def drift(self, x: Tensor, place: str) -> Tensor:
        """Return, for each run, float32 errors of numbers x [..., T, K] that are carried through T steps, as fractions of x.

        If a state is rounded again and again on one grid, it soon stays where it is. A kernel's state may drift: with repeated
        tokens each step can err in the same direction. So in the odd runs a channel errs by the same fraction of itself at every
        step.
        """
        fraction = fractions(place, self.first, self.runs, (x.shape[-2], x.shape[-1]), x.device)
        return fraction.view(self._along(x.ndim, *fraction.shape[1:]))

    def sums(self, x: Tensor, place: str, depth: int) -> Tensor:
        """Return x unchanged; its cotangent is a float32 sum of `depth` terms."""
        return self._round(x, place, EXACT, summed(depth), 0.0)

    def result(self, x: Tensor, place: str) -> Tensor:
        """Return x as an output in the precision of the inputs; its cotangent is given, hence exact."""
        return self._round(x, place, self.output, EXACT, self.step)

    def returned(self, x: Tensor, place: str, bits: int) -> Tensor:
        """Return x as an output of `bits` bits; its cotangent is given, hence exact."""
        return self._round(x, place, bits, EXACT, FP16_STEP if bits == BITS["fp16"] else 0.0)

    def gradient(self, x: Tensor, place: str, bits: int) -> Tensor:
        """Return x unchanged; its gradient is an output of `bits` bits, which may be those of another dtype than the inputs'."""
        step = FP16_STEP if bits == BITS["fp16"] else self.step if bits == self.output else 0.0
        return self._round(x, place, EXACT, bits, step)

    def _round(self, x: Tensor, place: str, forward: int, backward: int, step: float) -> Tensor:
        if not self.rounds or min(forward, backward) >= MANTISSA[x.dtype]:
            return x
        ahead = self.disturbed(x, (place,), forward, step)
        return _Round.apply(x, ahead, self, place + "'", backward, step)  # type: ignore[no-any-return]

    def choice(self, x: Tensor) -> Tensor:
        """Return 0 or 1 for each run, to multiply x: which of two ways to compute the same thing a run takes.

        Both ways occur among the odd runs, and among the even ones. If there are only two runs, both take the same way, and chunk
        lengths alternate between the ways.
        """
        return _choice(self.ways, x.device, x.dtype).view(self._along(x.ndim))

    @functools.cached_property
    def ways(self) -> tuple[int, ...]:
        """The choice of each run."""
        turn = (self.chunk or 0) // 16 if self.end == 2 else 0
        return tuple(((run + 1) // 2 + turn) % 2 for run in range(self.first, self.first + self.runs))

    def _along(self, axes: int, *last: int) -> list[int]:
        """Return a shape of `axes` axes: the number of runs at their axis, the sizes `last` at the end, and otherwise 1."""
        shape = [1] * (axes - len(last)) + list(last)
        shape[self.axis] = self.runs
        return shape

    def dither(self, x: Tensor, place: str, bits: int | None = None) -> Tensor:
        """Return x rounded to `bits` bits (default: as stored) on each run's own grid; for use outside autograd."""
        return self._at(x, (place,), bits)

    def flushed(self, x: Tensor) -> Tensor:
        """Return x with 0 for numbers below 2^-126 in runs that round; for use outside autograd.

        Float32 has numbers below, with fewer bits, but functions of GPUs give 0 there (PTX ISA, .ftz), as 1 / (1 + exp(-x)) does
        where exp(-x) overflows. A large factor behind the function makes the difference visible.
        """
        if not self.rounds:
            return x
        normal = x.masked_fill(x.abs() < SMALLEST, 0.0)
        if self.first == 0:  # run 0 is exact
            normal.narrow(self.axis, 0, 1).copy_(x.narrow(self.axis, 0, 1))
        return normal

    def stacked(self, x: Tensor, places: tuple[str, ...], bits: Bits | None = None, axis: int = -3) -> Tensor:
        """Apply `dither` to several tensors at once, each in its own place; x has them stacked along `axis`.

        x may also have size 1 there: one tensor, rounded in every place. `bits` is one number for all places, or one for each.
        """
        return self._at(x, places, bits, axis)

    def beside(self, x: Tensor, places: tuple[str, ...], widths: tuple[int, ...], bits: Bits | None = None) -> Tensor:
        """Apply `dither` to several tensors that lie side by side along x's last axis in these widths, each in its own place."""
        return self._at(x, places, bits, widths=widths)

    def _at(
        self, x: Tensor, places: tuple[str, ...], bits: Bits | None, axis: int | None = None, widths: tuple[int, ...] = ()
    ) -> Tensor:
        bits = self.stored if bits is None else bits
        return self.disturbed(x, places, bits, self.step if bits == self.output else 0.0, axis, widths)

    def disturbed(
        self,
        x: Tensor,
        places: tuple[str, ...],
        bits: Bits,
        step: float,
        axis: int | None = None,
        widths: tuple[int, ...] = (),
    ) -> Tensor:
        """Return x [runs, ...] with what each run does to it in `places`, for use outside autograd.

        Every rounding of a value passes here, and a subclass may override it (oracles/arithmetic/nearest.py). `places` is one
        place; or several, which are stacked along `axis` or lie side by side along the last axis in `widths`. `bits` is one number
        for all places, or one for each, and `step` is the least absolute error.
        """
        if not self.rounds:
            return x
        x = x.detach() if x.requires_grad else x
        if (bits if isinstance(bits, int) else min(bits)) >= MANTISSA[x.dtype]:
            return x
        grid, back = self.grids(x, places, bits, step, axis, widths)
        return self._rough(x, grid, bits, axis, widths, back)

    def grid(self, like: Tensor, place: str) -> Grid:
        """Return the grid s of each run for a place that stores numbers shaped as `like`, and 1 / s.

        dither(x) is rough(x, s) / s.
        """
        bits, step = self.stored, self.step if self.stored == self.output else 0.0
        if not self.rounds or bits >= MANTISSA[like.dtype]:
            one = like.new_ones([1] * like.ndim)
            return one, one
        return self.grids(like, (place,), bits, step, None, ())

    def grids(
        self, like: Tensor, places: tuple[str, ...], bits: Bits, step: float, axis: int | None, widths: tuple[int, ...]
    ) -> Grid:
        """Return the grid s of each run in `places`, shaped to multiply `like`, and 1 / s. A subclass may override it."""
        last = tuple(like.shape[-2:] if like.ndim > 2 else like.shape[1:])
        left = self._left if bits == self.product == TF32_BITS else ()
        return grid_of(places, self._numbered, bits, step, last, like.ndim, self.axis, like.device, like.dtype, axis, widths, left)

    @functools.cached_property
    def _left(self) -> tuple[float, ...]:
        """What is left of an operand of a TF32 product in each run: less than 1 where the run cuts (see CUT)."""
        return tuple(1.0 - CUT if run % CUTTING == 1 else 1.0 for run in range(self.first, self.first + self.runs))

    @functools.cached_property
    def in_order(self) -> tuple[int, ...]:
        """The indices along `axis` of the runs that add a sum term by term in float32, where the order gives errors of one sign."""
        return tuple(run - self.first for run in range(self.first, self.first + self.runs) if run % CUTTING == 1)

    def rough(self, x: Tensor, by: Tensor) -> Tensor:
        """Return x times `by`, rounded as a stored value."""
        return self._rough(x, by, self.stored) if self.rounds and self.stored < MANTISSA[by.dtype] else x * by

    def _rough(
        self,
        x: Tensor,
        by: Tensor,
        bits: Bits,
        axis: int | None = None,
        widths: tuple[int, ...] = (),
        back: Tensor | None = None,
    ) -> Tensor:
        """Return x times `by`, rounded, and then times `back` if given."""
        kind = CASTS.get((bits, by.dtype)) if self.first and isinstance(bits, int) else None
        if self.first and x.device.type == "cuda" and (launch := fused(x.device)) is not None:
            low = lowest(bits, kind, axis, widths, x.device, by.dtype)
            if back is not None and bits == self.product == TF32_BITS:  # `back` is not the reciprocal of `by` in runs that cut
                return launch(x, by, low, undo=False).mul_(back)
            return launch(x, by, low, undo=back is not None)
        rounded = x * by
        rounds = rounded if self.first else rounded.narrow(self.axis, 1, self.runs - 1)  # run 0 is exact
        if kind:
            rounds.copy_(rounds.to(kind))
        else:
            half, high = words_of(bits, MANTISSA[by.dtype], axis, widths, x.device)
            rounds.view(WORDS[by.dtype]).add_(half).bitwise_and_(high)
        return rounded if back is None else rounded.mul_(back)


def summed(depth: int) -> int:
    """Return the bits that are left of a float32 sum of `depth` terms; a sum's rounding errors grow like the root of its depth.

    If each term is rounded by u sqrt(n), the sum errs by u sqrt(n) times the root of the summed squares of its terms. Sequential
    summation of n terms errs by at most about that much (Higham 2002, section 4.2).
    """
    return SINGLE - math.ceil(math.log2(max(depth, 1)) / 2)


def added(depth: int) -> int:
    """Return the bits that are left of a float32 number to which `depth` small ones were added, one after another.

    Where tokens repeat, each addition rounds alike, so that the errors grow with their number (Higham 2002, section 4.2).
    """
    return SINGLE - math.ceil(math.log2(max(depth, 1)))


# A GPU computes exp(x) as 2^(x log2 e). The product rounds as x would, and 2^y and log2(y) err by up to 2^-22 (PTX ISA, ex2.approx
# and lg2.approx), like a float32 sum of 16 terms.
FUNCTION_TERMS = 16
FUNCTION_BITS = summed(FUNCTION_TERMS)


@functools.cache
def _choice(ways: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(ways, device=device, dtype=dtype)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,  # noqa: ARG004 - `ahead` is x rounded; x is an argument so that it gets the gradient
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
        return arithmetic.disturbed(cotangents[0], (place,), bits, step), None, None, None, None, None


class _Product(torch.autograd.Function):
    """a @ b with rounding errors.

    One operand is rounded to the bits that a sum of this depth keeps. That gives each element of the product an error in proportion
    to the root of the summed squares of its terms.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor, b: Tensor, arithmetic: Arithmetic, place: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.back = arithmetic, place  # type: ignore[attr-defined]
        return arithmetic.terms(a, place, a.shape[-1]) @ b

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place = ctx.back  # type: ignore[attr-defined]
        (g,) = cotangents
        left = arithmetic.terms(g, f"{place} da", g.shape[-1]) @ b.mT
        right = a.mT @ arithmetic.terms(g, f"{place} db", g.shape[-2])
        return left, right, None, None
