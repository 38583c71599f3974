"""Where finite-precision algorithms round, and what a rounding there does: the disturbed arithmetic.

An oracle calls the methods of :class:`Arithmetic` at each place where an algorithm of the adapter's class rounds. Runs are
numbered; run 0 is exact: every method returns its argument. In the others the value (and on the way back its cotangent) is
rounded to the precision held there, on a grid that is shifted for each run and place:

    round_s(x) = fl_p(s x) / s,    s in [1, 2) fixed by (run, place),    fl_p = round to nearest with p bits

so each run commits rounding errors of the true size, at the true places, and differently. In the odd runs a place has one s, so
equal values get equal errors, as on real hardware: constant gates and repeated tokens accumulate coherently, which independent
noise would miss. There the s of a place's runs are stratified over one unit in the last place (Latin hypercube sampling):
however few the runs, they do not all happen to round a value well. In the even runs every position of the last two axes has its
own s: errors of sums depend on all their terms, so equal results need not have equal errors, and terms that ought to cancel do
not. Monte Carlo arithmetic (Parker 1997; Verificarlo, CADNA) is the same idea with random errors.

fl_p(x) = t - (t - x) with t = (2^(53-p) + 1) x is Veltkamp's splitting (Dekker 1971); it is exact round-to-nearest in
float64, and p = 53, that is t = 2 x, returns x itself, which is how run 0 stays exact without a branch. In float32, with 24 for 53,
it is so too; what has 24 bits there needs no rounding, since float32 does it.
"""

import array
import dataclasses
import functools
import math
import zlib

import torch
from torch import Tensor

from oracles.counter import mix

BITS = {"bf16": 8, "fp16": 11, "fp32": 24}
TF32_BITS = 10  # 11 bits rounded to nearest; matrix units may truncate, which errs like 10
SINGLE = 24
EXACT = 53
FP16_STEP = 2.0**-24  # the subnormal step: an absolute error where fp16 values are stored
CLASSES = ("chunkwise", "recurrent", "pointwise")
PRODUCTS = ("ieee", "tf32")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The precisions an algorithm of one class works in; tensors given to its methods have the runs on axis 0.

    Axis 0 has the runs from `first` on: run 0, which is exact, and others, or only runs that round.

    In significand bits: `stored` for intermediates that are stored and operands that are computed, `product` for what float32
    products and sums of them keep (53: operands are coarser, so that the sums' own errors drown), `output` for the inputs' dtype.
    `step` is the subnormal step of that dtype where it matters; runs of another `batch` take other grids. `gate` are the bits of
    the gate's dtype, `algorithm` the class and `chunk` the tokens in its chunks, if known.
    """

    runs: int
    stored: int
    product: int
    output: int
    step: float = 0.0
    batch: int = 0
    gate: int = EXACT
    algorithm: str = "exact"
    chunk: int | None = None
    first: int = 0

    @classmethod
    def of(cls, algorithm: str, dtype: str, products: str = "ieee", runs: int = 9) -> "Arithmetic":
        """The arithmetic of `algorithm`, one of CLASSES, on inputs of `dtype`; run 0 of `runs` is exact."""
        for name, value, choices in (
            ("algorithm", algorithm, CLASSES),
            ("dtype", dtype, tuple(BITS)),
            ("products", products, PRODUCTS),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        output, step = BITS[dtype], FP16_STEP if dtype == "fp16" else 0.0
        if algorithm == "chunkwise" and dtype != "fp32":
            return cls(runs, output, EXACT, output, step, algorithm=algorithm)
        tf32 = algorithm == "chunkwise" and products == "tf32"
        return cls(runs, SINGLE, TF32_BITS if tf32 else SINGLE, output, step, algorithm=algorithm)

    @classmethod
    def exact(cls) -> "Arithmetic":
        """No rounding anywhere, one run."""
        return cls(1, EXACT, EXACT, EXACT)

    @property
    def rounds(self) -> bool:
        """Whether any run rounds."""
        return self.runs > 1 or self.first > 0

    def operand(self, x: Tensor, place: str) -> Tensor:
        """x as stored, or as computed operand of a product; its cotangent is stored alike."""
        return self._round(x, place, self.stored, self.stored, self.step if self.stored == self.output else 0.0)

    def use(self, x: Tensor, place: str) -> Tensor:
        """x unchanged, as one of several uses of an operand; the cotangent that comes from this use is stored on its own."""
        return self._round(x, place, EXACT, self.stored, self.step if self.stored == self.output else 0.0)

    def multiply(self, a: Tensor, b: Tensor, place: str) -> Tensor:
        """a @ b, summed in float32 or of TF32 operands; so are the two products of its backward, each with its own errors."""
        if not self.rounds or self.product == EXACT:
            return a @ b
        return _Product.apply(a, b, self, place)  # type: ignore[no-any-return]

    def terms(self, x: Tensor, place: str, depth: int) -> Tensor:
        """x as an operand that gives a product, a sum of `depth` terms, its errors; outside automatic differentiation."""
        return x if self.product == EXACT else self._dither(x, place, min(self.product, summed(depth)), 0.0)

    def input(self, x: Tensor, place: str) -> Tensor:
        """x, an input; its gradient is an output in the inputs' precision."""
        return self.gradient(x, place, self.output)

    def single(self, x: Tensor, place: str, depth: int = 1) -> Tensor:
        """x held in float32, the sum of `depth` terms; its cotangent likewise."""
        bits = summed(depth)
        return self._round(x, place, bits, bits, 0.0)

    def drift(self, x: Tensor, place: str) -> Tensor:
        """Errors of float32 numbers carried through T steps, fractions of them: [runs, 1, ..., T, K] for x [runs, ..., T, K].

        Rounded again and again on one grid, a state soon stays where it is, while a kernel's may drift: with repeated tokens each
        step can err the same way. So in the odd runs a channel errs by the same fraction of itself at every step.
        """
        fraction = _fractions(f"{place}#{self.batch}", self.runs, self.first, (x.shape[-2], x.shape[-1]), x.device)
        return fraction.reshape(self.runs, *[1] * (x.ndim - 3), *fraction.shape[1:])

    def sums(self, x: Tensor, place: str, depth: int) -> Tensor:
        """x unchanged; its cotangent is a float32 sum of `depth` terms."""
        return self._round(x, place, EXACT, summed(depth), 0.0)

    def result(self, x: Tensor, place: str) -> Tensor:
        """x as an output of the inputs' precision; its cotangent is given, hence exact."""
        return self._round(x, place, self.output, EXACT, self.step)

    def gradient(self, x: Tensor, place: str, bits: int) -> Tensor:
        """x unchanged; its gradient is an output of `bits` bits."""
        return self._round(x, place, EXACT, bits, self.step if bits == BITS["fp16"] else 0.0)

    def _round(self, x: Tensor, place: str, forward: int, backward: int, step: float) -> Tensor:
        if not self.rounds or min(forward, backward) >= _MANTISSA[x.dtype]:
            return x
        ahead = self._dither(x, place, forward, step)
        return _Round.apply(x, ahead, self, place + "'", backward, step)  # type: ignore[no-any-return]

    def choice(self, x: Tensor) -> Tensor:
        """0 or 1 a run, to multiply x: which of two ways to compute the same a run takes; odd and even runs do both.

        Where there are two runs only, batches and chunk sizes take turns.
        """
        run = torch.arange(self.first, self.first + self.runs, device=x.device)
        turn = self.batch + (self.chunk or 0) // 16 if self.runs == 2 else 0
        return (((run + 1) // 2 + turn) % 2).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))

    def dither(self, x: Tensor, place: str, bits: int | None = None) -> Tensor:
        """x rounded to `bits` (default: as stored) on each run's own grid, outside automatic differentiation."""
        if not self.rounds:
            return x
        bits = self.stored if bits is None else bits
        return self._dither(x, place, bits, self.step if bits == self.output else 0.0)

    def _dither(self, x: Tensor, place: str, bits: int, step: float) -> Tensor:
        if bits >= _MANTISSA[x.dtype] or not self.rounds:
            return x.detach()
        with torch.no_grad():
            grid = _grid(f"{place}#{self.batch}", self.runs, self.first, bits, x)
            if self.first and (bits, x.dtype) in _CASTS:
                return torch.mul(x, grid, out=torch.empty_like(x, dtype=_CASTS[bits, x.dtype])) / grid
            rest = x * grid
            split = 2.0 ** (_MANTISSA[x.dtype] - bits) + 1.0
            rounded = rest * (split if self.first else _splits(split, self.runs, rest))
            rounded.sub_(torch.sub(rounded, rest, out=rest))
            if step:
                snap = 1.5 * 2.0 ** (_MANTISSA[x.dtype] - 1) * step  # adding that rounds to a multiple of the step
                rounded[0 if self.first else 1 :].add_(snap).sub_(snap)
            return rounded.div_(grid)


def summed(depth: int) -> int:
    """Bits left of a float32 sum of `depth` terms: rounding errors of a sum grow like the root of its depth.

    Rounding each term by u sqrt(n) gives the sum an error of u sqrt(n) times its reach, the root of the summed squares of its
    terms; sequential summation of n terms errs by at most about that much (Higham 2002, section 4.2).
    """
    return SINGLE - math.ceil(math.log2(max(depth, 1)) / 2)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """2^20 numbers in [1, 2), from which every place takes its grids."""
    scrambled = mix(torch.arange(_TABLE, dtype=torch.int64, device=device)) & (2**52 - 1)
    return 1.0 + scrambled.to(torch.float64) / 2.0**52


@functools.cache
def _known() -> "array.array[float]":
    """The same numbers where single ones are looked up, which a tensor takes long for."""
    return array.array("d", _table(torch.device("cpu")).tolist())


_TABLE = 2**20
_MANTISSA = {torch.float64: 53, torch.float32: 24}
_CASTS = {(8, torch.float32): torch.bfloat16, (24, torch.float64): torch.float32}  # a cast rounds so, and has the range
_SMALL, _LARGE = 2**12, 2**16


def _splits(split: float, runs: int, like: Tensor) -> Tensor:
    """2^(53-p) + 1 a run, and 2 for run 0."""
    splits = torch.full((runs, *[1] * (like.ndim - 1)), split, dtype=like.dtype, device=like.device)
    splits[0] = 2.0
    return splits


def _grid(place: str, runs: int, first: int, bits: int, x: Tensor) -> Tensor:
    """The grids s of a place, one a run and position of x's last two axes; 1 for run 0."""
    last = x.shape[-2:] if x.ndim > 2 else x.shape[1:]
    size = math.prod(last)
    room = max(_SMALL // 8, 1 << (size - 1).bit_length()) if size <= _LARGE else size  # calls of many shapes share one
    make = _small if room <= _SMALL else _large if room <= _LARGE else _numbers
    numbers = make(place, runs, first, bits, room, x.device, x.dtype)
    return numbers[:, :size].view(runs, *(1,) * (x.ndim - 1 - len(last)), *last)


def _numbers(place: str, runs: int, first: int, bits: int, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers in [1, 2) [runs, size] for the grids of a place."""
    table, known = _table(device), _known()
    word = zlib.crc32(place.encode())
    count = (first + runs) // 2  # odd runs
    strata = sorted(range(count), key=lambda run: known[(word + 104729 * run) % _TABLE])
    numbers = torch.empty(runs, size, dtype=dtype, device=device)
    for row, run in zip(numbers, range(first, first + runs), strict=True):
        start = (word + 7919 * run * (run + 12)) % _TABLE
        if run == 0:
            row.fill_(1.0)
        elif run % 2:
            phase = (strata[run // 2] + known[start] - 1.0) / count
            row.fill_(known[word % _TABLE] * (1.0 + phase * 2.0 ** (1 - bits)))
        elif start + size <= _TABLE:
            row.copy_(table[start : start + size])
        else:
            row.copy_(table[torch.arange(start, start + size, device=device) % _TABLE])
    return numbers


_small = functools.lru_cache(4096)(_numbers)  # 128 KiB each at most, of four runs in float64
_large = functools.lru_cache(128)(_numbers)


@functools.lru_cache(64)
def _fractions(place: str, runs: int, first: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Numbers in (-u, u), [runs, *shape], u = 2^-24; in the odd runs all rows are the same, and run 0's are 0."""
    table, (rows, size) = _table(device), shape
    number = torch.arange(first, first + runs, device=device).reshape(-1, 1, 1)
    row = torch.arange(rows, device=device).unsqueeze(-1) * (number % 2 == 0)
    start = zlib.crc32(place.encode()) + 7919 * number * (number + 12)
    fraction = (2.0 * table[(start + row * size + torch.arange(size, device=device)) % _TABLE] - 3.0) * 2.0**-SINGLE
    return fraction * (number > 0)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,  # noqa: ARG004 - `ahead` is x rounded; here so that it gets its gradient
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
        return arithmetic._dither(cotangents[0], place, bits, step), None, None, None, None, None


class _Product(torch.autograd.Function):
    """a @ b. Rounding one operand to the bits that a sum of this depth keeps gives each element an error of its reach's size."""

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
