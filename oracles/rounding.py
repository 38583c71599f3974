"""Where finite-precision algorithms round, and what a rounding there does: the disturbed arithmetic.

An oracle calls the methods of :class:`Arithmetic` at each place where an algorithm of the adapter's class rounds. Run 0 of
a batch is exact: every method returns its argument. In the other runs the value (and on the way back its cotangent) is
rounded to the precision held there, on a grid that is shifted for each run and place:

    round_s(x) = fl_p(s x) / s,    s in [1, 2) fixed by (run, place),    fl_p = round to nearest with p bits

so each run commits rounding errors of the true size, at the true places, and differently. In the odd runs a place has one s, so
equal values get equal errors, as on real hardware: constant gates and repeated tokens accumulate coherently, which independent
noise would miss. There the s of a place's runs are stratified over one unit in the last place (Latin hypercube sampling):
however few the runs, they do not all happen to round a value well. In the even runs every position of the last two axes has its
own s: errors of sums depend on all their terms, so equal results need not have equal errors, and terms that ought to cancel do
not. Monte Carlo arithmetic (Parker 1997; Verificarlo, CADNA) is the same idea with random errors.

fl_p(x) = t - (t - x) with t = (2^(53-p) + 1) x is Veltkamp's splitting (Dekker 1971); it is exact round-to-nearest in
float64, and p = 53, that is t = 2 x, returns x itself, which is how run 0 stays exact without a branch.
"""

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

    def operand(self, x: Tensor, place: str) -> Tensor:
        """x as stored, or as computed operand of a product; its cotangent is stored alike."""
        return self._round(x, place, self.stored, self.stored, self.step if self.stored == self.output else 0.0)

    def use(self, x: Tensor, place: str) -> Tensor:
        """x unchanged, as one of several uses of an operand; the cotangent that comes from this use is stored on its own."""
        return self._round(x, place, EXACT, self.stored, self.step if self.stored == self.output else 0.0)

    def multiply(self, a: Tensor, b: Tensor, place: str) -> Tensor:
        """a @ b, summed in float32 or of TF32 operands; so are the two products of its backward, each with its own errors."""
        if self.runs == 1 or self.product == EXACT:
            return a @ b
        return _Product.apply(a, b, self, place)  # type: ignore[no-any-return]

    def input(self, x: Tensor, place: str) -> Tensor:
        """x, an input; its gradient is an output in the inputs' precision."""
        return self.gradient(x, place, self.output)

    def single(self, x: Tensor, place: str, depth: int = 1) -> Tensor:
        """x held in float32, the sum of `depth` terms; its cotangent likewise."""
        bits = summed(depth)
        return self._round(x, place, bits, bits, 0.0)

    def carried(self, x: Tensor, place: str) -> Tensor:
        """x, carried from token to token in float32; its cotangent likewise.

        Rounded again and again on one grid, a state soon stays where it is, while a kernel's may drift: with repeated tokens each
        step can err the same way. So in the odd runs the error of an element is the same fraction of it every time.
        """
        if self.runs == 1:
            return x
        return _Carried.apply(x, self, place)  # type: ignore[no-any-return]

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
        if self.runs == 1:
            return x
        ahead = _dither(self, x, place, forward, step)
        return _Round.apply(x, ahead, self, place + "'", backward, step)  # type: ignore[no-any-return]

    def choice(self, x: Tensor) -> Tensor:
        """0 or 1 a run, to multiply x: which of two ways to compute the same a run takes; odd and even runs do both."""
        run = torch.arange(self.runs, device=x.device)
        return (((run + 1) // 2) % 2).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))

    def dither(self, x: Tensor, place: str, bits: int | None = None) -> Tensor:
        """x rounded to `bits` (default: as stored) on each run's own grid, outside automatic differentiation."""
        if self.runs == 1:
            return x
        bits = self.stored if bits is None else bits
        return _dither(self, x, place, bits, self.step if bits == self.output else 0.0)


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


_TABLE = 2**20


@functools.lru_cache(128)
def _factors(
    place: str, runs: int, bits: int, step: float, shape: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The grids s of a place, s (2^(53-p) + 1), the constant that rounds to the subnormal step, and 1 / s; run 0's do nothing."""
    last = shape[-2:] if len(shape) > 2 else shape[1:]
    size, table = math.prod(last), _table(device)
    word = zlib.crc32(place.encode())
    rows = [table.new_ones(size)]
    coherent = range(1, runs, 2)
    strata = table[(word + 104729 * torch.arange(len(coherent), device=device)) % _TABLE].argsort().tolist()
    for run in range(1, runs):
        start = (word + 7919 * run * (run + 12)) % _TABLE
        if run % 2:
            phase = (strata[run // 2] + table[start] - 1.0) / len(coherent)
            rows.append((table[word % _TABLE] * (1.0 + phase * 2.0 ** (1 - bits))).expand(size))
        elif start + size <= _TABLE:
            rows.append(table[start : start + size])
        else:
            rows.append(table[torch.arange(start, start + size, device=device) % _TABLE])
    grid = torch.stack(rows)
    split = torch.full((runs, 1), 2.0 ** (53 - bits) + 1.0, dtype=torch.float64, device=device)
    snap = torch.full((runs, 1), 1.5 * 2.0**52 * step, dtype=torch.float64, device=device)
    split[0], snap[0] = 2.0, 0.0
    full = (runs, *(1,) * (len(shape) - 1 - len(last)), *last)
    steps = snap.reshape((runs,) + (1,) * (len(shape) - 1))
    return grid.reshape(full), (grid * split).reshape(full), steps, grid.reciprocal().reshape(full)


def _dither(arithmetic: Arithmetic, x: Tensor, place: str, bits: int, step: float) -> Tensor:
    if bits >= EXACT:
        return x.detach()
    with torch.no_grad():
        grid, split, snap, back = _factors(f"{place}#{arithmetic.batch}", arithmetic.runs, bits, step, tuple(x.shape), x.device)
        high = x * split
        rounded = high.sub_(torch.addcmul(high, x, grid, value=-1.0))
        if step:
            rounded = rounded.add_(snap).sub_(snap)  # adding 1.5 * 2^52 steps rounds to a multiple of the step
        return rounded.mul_(back)


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
        return _dither(arithmetic, cotangents[0], place, bits, step), None, None, None, None, None


class _Product(torch.autograd.Function):
    """a @ b. Rounding one operand to the bits that a sum of this depth keeps gives each element an error of its reach's size."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor, b: Tensor, arithmetic: Arithmetic, place: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.back = arithmetic, place  # type: ignore[attr-defined]
        return _dither(arithmetic, a, place, min(arithmetic.product, summed(a.shape[-1])), 0.0) @ b

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, place = ctx.back  # type: ignore[attr-defined]
        (g,) = cotangents
        left = _dither(arithmetic, g, f"{place} da", min(arithmetic.product, summed(g.shape[-1])), 0.0) @ b.mT
        right = a.mT @ _dither(arithmetic, g, f"{place} db", min(arithmetic.product, summed(g.shape[-2])), 0.0)
        return left, right, None, None


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, arithmetic: Arithmetic, place: str) -> Tensor:
        ctx.back = arithmetic, place  # type: ignore[attr-defined]
        return _drift(arithmetic, x, place)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        arithmetic, place = ctx.back  # type: ignore[attr-defined]
        return _drift(arithmetic, cotangents[0], place + "'"), None, None


def _drift(arithmetic: Arithmetic, x: Tensor, place: str) -> Tensor:
    rounded = _dither(arithmetic, x, place, SINGLE, 0.0)
    # Twice as many runs have numbers of their own for each position in the even ones, which serve the odd ones here.
    grid = _factors(f"{place}#{arithmetic.batch}", 2 * arithmetic.runs, SINGLE, 0.0, (2 * arithmetic.runs, *x.shape[1:]), x.device)[
        0
    ]
    fraction = (2.0 * grid[2 : 2 * arithmetic.runs : 4] - 3.0) * 2.0**-SINGLE  # uniform in (-u, u)
    odd = x[1::2]
    rounded[1::2] = odd + odd * fraction[: len(odd)]
    return rounded
