"""Probes of one device: each calls operations on chosen numbers, and tells from the results how the device computes.

A probe takes `Operations` and yields measures. Its inputs are the same on every machine.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oracles.arithmetic.rounding import FUNCTION_BITS, SINGLE, TF32_BITS, summed
from verify.gpu.arithmetic.cards import Measure, share

if TYPE_CHECKING:
    from verify.gpu.arithmetic.kernels import Operations  # it imports Triton

Probe = Callable[["Operations"], Iterator[Measure]]
ATOMICS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "TF32": torch.float32}
SIDE, WIDE = 64, 256
LONG = 4096  # terms of the sums whose bias is measured
WARPS = (1, 2, 4, 8)
REPEATS = 20
ULP = 2.0**SINGLE  # relative to a number, its unit in the last place is at most twice 1 / ULP

# What measures concern (Measure.concerns)
OPERANDS = "tl.dot of float32 in TF32: TF32_BITS, CUT"
TORCH_OPERANDS = "cuBLAS with allow_tf32: TF32_BITS"
INSTRUCTION = "an instruction of a matrix unit"
FULL = "products of float32 without TF32: summed"
EXP = "tl.exp, tl.sigmoid: SINGLE, FUNCTION_BITS"
FUNCTIONS = "other functions, and division: FUNCTION_BITS"
FLUSHES = "numbers below 2^-126: SMALLEST"
ORDER = "sums and cumulative sums: summed"
CONTRACTED = "a product and a sum: SINGLE"
CASTS = "float32 to bfloat16 and float16: BITS"
ATOMIC = "atomic additions: summed"
# A number that rounds to TF32_BITS bits errs by as much as one that is cut off behind TF32_BITS stored bits, or that rounds to one
# stored bit less: the first bit of a number is not stored.
_KEPT = "|".join(map(str, range(TF32_BITS, SINGLE - 1)))
OPERAND_LIMIT = rf"exact|({_KEPT}) bits, (cut|nearest.*|not told)|{TF32_BITS - 1} bits, nearest.*"
OPERAND_LIMITS = {None: OPERAND_LIMIT, "tf32x3": "exact|.*not told", "ieee": "exact"}


# Products


def operand(name: str, product: Callable[[Tensor], Tensor], limit: str, concerns: str) -> Measure:
    """How a product rounds an operand. `product` returns, for up to 64 numbers, each of them times 1."""
    powers = 2.0 ** -torch.arange(1, SINGLE)
    same = (product(1 + powers) == 1 + powers).tolist()
    bits = same.index(False) if False in same else SINGLE - 1
    if bits == SINGLE - 1:
        return Measure(name, "exact", limit, concerns)
    if bits > SINGLE - 4:
        return Measure(name, f"{bits} bits, not told", limit, concerns)
    unit = 2.0**-bits
    tried = torch.tensor([1 + unit / 2, 1 + unit / 2 + unit / 8, 1 + 1.5 * unit, 1 + unit - 2.0**-23, -1 - unit / 2])
    units = ((product(tried).double() * tried.double().sign() - 1) / unit).tolist()
    ways = {
        (0, 0, 1, 0, 0): "cut",
        (0, 1, 2, 1, 0): "nearest, ties to even",
        (1, 1, 2, 1, 1): "nearest, ties away",
    }
    return Measure(name, f"{bits} bits, {ways.get(tuple(units), f'otherwise: {units}')}", limit, concerns)


def times_one(ops: "Operations", precision: str | None, side: str) -> Callable[[Tensor], Tensor]:
    """The products of numbers, as operand `side` of tl.dot, with 1."""

    def product(x: Tensor) -> Tensor:
        a, b = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)
        (a[:, 0] if side == "a" else b[0])[: len(x)] = x
        (b[0] if side == "a" else a[:, 0]).fill_(1.0)
        out = ops.dot(a, b, precision=precision)
        return (out[:, 0] if side == "a" else out[0])[: len(x)]

    return product


def operands(ops: "Operations") -> Iterator[Measure]:
    """How float32 operands of products are rounded, and how far off such products are."""
    left, right = normal(0, SIDE, SIDE), normal(1, SIDE, SIDE)
    truth, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    for precision, allowed in OPERAND_LIMITS.items():
        name, concerns = f"tl.dot of float32, {precision or 'default'}", FULL if precision else OPERANDS
        for side in "ab":
            yield operand(f"{name}: operand {side}", times_one(ops, precision, side), allowed, concerns)
        off = (ops.dot(left, right, precision=precision).double() - truth).abs() / size
        limit = 2.0 ** (SINGLE - TF32_BITS + 1) if precision is None else 2.0 ** (SINGLE - summed(SIDE) + 1)
        yield Measure(f"{name}: worst error, in 2^-24 of the terms", float(off.max()) * ULP, limit, concerns)


def torch_operands(ops: "Operations") -> Iterator[Measure]:
    """How torch's products round float32 operands."""
    for tf32, limit, concerns in ((True, OPERAND_LIMIT, TORCH_OPERANDS), (False, "exact", FULL)):
        product = functools.partial(_mm_with_one, ops, tf32=tf32)
        yield operand(f"torch.mm of float32, allow_tf32={tf32}: operand", product, limit, concerns)


def _mm_with_one(ops: "Operations", x: Tensor, *, tf32: bool) -> Tensor:
    a, b = torch.zeros(WIDE, WIDE), torch.zeros(WIDE, WIDE)
    a[: len(x), 0], b[0] = x, 1.0
    return ops.matmul(a, b, tf32=tf32)[: len(x), 0]


def in_one_dot(ops: "Operations", dtype: torch.dtype, left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """For each row: its total, and the sum of the products left * right along it; at most 64 rows and columns."""
    a, b, c = (torch.zeros(SIDE, SIDE) for _ in range(3))
    a[: len(left), : left.shape[1]] = left
    b[: left.shape[1], : len(left)] = right.T
    if total is not None:
        c[: len(total)] = total.unsqueeze(1)
    return ops.dot(a.to(dtype), b.to(dtype), c).diag()[: len(left)].double()


def instruction(ops: "Operations", name: str) -> Iterator[Measure]:
    """How a matrix unit adds: how many products at a time, down to which bit, how it rounds the sum, and the bias of long sums."""
    dtype, unit = DTYPES[name], f"tl.dot of {name}"
    yield Measure(f"{unit}: last bit of an addend beside 1", _last_bit(ops, dtype), r"2\^-(2[3-9])", INSTRUCTION)
    yield Measure(f"{unit}: products in an instruction", _together(ops, dtype), None, INSTRUCTION)
    yield Measure(f"{unit}: rounding of a sum", _sum_rounds(ops, dtype), "cut.*|nearest", INSTRUCTION)
    a, b = normal(2, SIDE, 4 * SIDE).to(dtype), normal(3, 4 * SIDE, SIDE).to(dtype)
    equal = ops.dot(a, b, rows=16) == ops.dot(a, b, rows=SIDE)
    yield Measure(f"{unit}: equal results of M=16 and M=64", share(equal), None, INSTRUCTION)
    left, right = (_stored(uniform(seed, *shape), name) for seed, shape in ((4, (SIDE, LONG)), (5, (LONG, SIDE))))
    yield _bias(unit, left, right, ops.dot(left.to(dtype), right.to(dtype)))
    if name == "TF32":
        yield _bias(f"torch.mm of {name}", left, right, ops.matmul(left, right, tf32=True))
    if name == "bfloat16":
        tiny = torch.full((1, 1), 2.0**-70)
        kept = in_one_dot(ops, dtype, tiny, tiny).item()
        words = {2.0**-140: "kept", 0.0: "flushed"}.get(kept, f"otherwise: {kept}")
        yield Measure(f"{unit}: subnormal products", words, "kept|flushed", FLUSHES)


def _last_bit(ops: "Operations", dtype: torch.dtype) -> str:
    """The lowest power of two that is left of its sum with 1 and -1 in the same instruction."""
    powers = torch.arange(18, 29)
    one, low = torch.ones(len(powers)), powers // 2
    left = torch.stack([2.0**-low, one, -one], 1)
    right = torch.stack([2.0 ** -(powers - low), one, one], 1)
    got = in_one_dot(ops, dtype, left, right)
    kept = (got == 2.0 ** -powers.double()).tolist()
    last = kept.index(False) if False in kept else len(kept)
    return f"2^-{int(powers[0]) + last - 1}"


def _together(ops: "Operations", dtype: torch.dtype) -> str:
    """How many products are aligned to the largest of them, which is followed by its negative."""
    left = 2.0**-14 * torch.eye(SIDE)
    right = left.clone()
    left[:, :2], right[:, 0], right[:, 1] = 1.0, 1.0, -1.0
    kept = (in_one_dot(ops, dtype, left, right)[2:] == 2.0**-28).tolist()
    first = kept.index(True) if True in kept else len(kept)
    return str(first + 2) if all(kept[first:]) else "otherwise"


def _sum_rounds(ops: "Operations", dtype: torch.dtype) -> str:
    """How the sum of an accumulator and a product rounds to float32."""
    total = torch.tensor([1.0, -1.0, 1.0, 1.0])
    left = torch.tensor([[1.5 * 2.0**-12], [-1.5 * 2.0**-12], [-(2.0**-12)], [-(2.0**-13)]])
    right = torch.tensor([[2.0**-12], [2.0**-12], [2.0**-13], [2.0**-13]])
    units = ((in_one_dot(ops, dtype, left, right, total).abs() - 1) * 2.0**24).tolist()
    ways = {(0, 0, -1, 0): "cut, addends cut before", (0, 0, -1, -1): "cut", (2, 2, 0, 0): "nearest"}
    return ways.get(tuple(units), f"otherwise: {units}")


def _stored(x: Tensor, name: str) -> Tensor:
    """X with the bits that an operand of this name keeps."""
    if name != "TF32":
        return x.to(DTYPES[name]).float()
    return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)


def _bias(name: str, left: Tensor, right: Tensor, got: Tensor) -> Measure:
    truth = left.double() @ right.double()
    off = float(((got.double() - truth) / unit_of(truth)).mean())
    return Measure(f"{name}: mean error of sums of {LONG} positive terms, in ulp", off, LONG / 8, INSTRUCTION)


# Functions


def functions(ops: "Operations") -> Iterator[Measure]:
    """The worst error of each function over a range."""
    count, every = ops.points, normal_numbers(ops.points)
    moderate = every[(every > 2.0**-60) & (every < 2.0**60)]
    divisor = moderate.flip(0)[torch.arange(len(moderate)) * 7919 % len(moderate)]
    ranges = [
        ("exp", "[-80, 80]", torch.linspace(-80, 80, count), 80.0),
        ("exp", "[-5, 0]", torch.linspace(-5, 0, count), 5.0),
        ("sigmoid", "[-20, 20]", torch.linspace(-20, 20, count), 20.0),
        ("exp2", "[-125, 125]", torch.linspace(-125, 125, count), 0.0),
        *((name, "normal numbers", every, 0.0) for name in ("log", "log2", "sqrt", "rsqrt")),
        ("/", "2^-60 to 2^60", moderate, 0.0),
    ]
    for name, words, x, largest in ranges:
        y = divisor if name == "/" else x
        truth = exactly(name, x, y)
        error = ((ops.function(name, x, y).double() - truth) / unit_of(truth)).abs()
        worst = float(error.nan_to_num(math.inf).max())
        yield Measure(f"tl {name} on {words}: worst error in ulp", worst, _function_limit(largest), EXP if largest else FUNCTIONS)


def subnormals(ops: "Operations") -> Iterator[Measure]:
    """Whether functions give 0 in place of a number below 2^-126, or take 0 for it."""
    unary = dict.fromkeys(("log", "log2", "sqrt", "rsqrt"), 2.0**-130)
    y = torch.tensor([2.0**30])
    for name, at in {"exp": -90.0, "exp2": -130.0, **unary, "sigmoid": -88.5, "/": 2.0**-100}.items():
        x = torch.tensor([at])
        got, truth = ops.function(name, x, y).double().item(), exactly(name, x, y).item()
        flushed = got == 0 or math.isinf(got)
        words = "flushed" if flushed else "kept" if abs(got - truth) <= 2.0**-12 * abs(truth) else f"otherwise: {got}"
        yield Measure(f"tl {name}: subnormal numbers", words, "kept|flushed", FLUSHES)


def contraction(ops: "Operations") -> Iterator[Measure]:
    """Whether a product and a sum become an fma, which rounds once."""
    x = torch.full((8,), 1 + 2.0**-12)
    for fusion in (True, False):
        left = ops.function("x*x - y*y", x, x, fusion=fusion).double().unique().tolist()
        words = {(0.0,): "two roundings", (2.0**-24,): "one fma", (-(2.0**-24),): "one fma"}.get(tuple(left), f"otherwise: {left}")
        name = "x*x - y*y" + ("" if fusion else ", enable_fp_fusion=False")
        yield Measure(name, words, "two roundings|one fma", CONTRACTED)


def _function_limit(largest: float) -> float:
    """How many units in the last place a function may err, if its argument, up to `largest`, also rounds to float32 (exp)."""
    argument = 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
    return argument + 2.0 ** (SINGLE - FUNCTION_BITS)


def exactly(name: str, x: Tensor, y: Tensor) -> Tensor:
    """A function by name, in float64. Only a division has y."""
    function: Callable[[Tensor], Tensor] = (lambda x: x / y.double()) if name == "/" else getattr(torch, name)
    return function(x.double())


# Sums, casts, atomics


def sums(ops: "Operations") -> Iterator[Measure]:
    """Whether sums and cumulative sums depend on the number of warps, and how far they are off."""
    for width in (64, 1024):
        x = normal(7, 512, width)
        scans = {warps: ops.scan(x, warps) for warps in WARPS}
        size = x.double().abs().cumsum(1)
        for place, name in enumerate(("tl.cumsum", "tl.sum")):
            got = {warps: both[place] for warps, both in scans.items()}
            yield Measure(f"{name} of {width}: warps with equal bits", _alike(got), None, ORDER)
            truth = x.double().cumsum(1) if place == 0 else x.double().sum(1)
            terms = size if place == 0 else size[:, -1]
            off = max(float(((one.double() - truth).abs() / terms).max()) for one in got.values())
            limit = 2.0 ** (SINGLE - summed(width))
            yield Measure(f"{name} of {width}: worst error, in 2^-24 of the terms", off * ULP, limit, ORDER)
    cumulative, total = scans[4]
    yield Measure("tl.sum of 1024: equal to the end of tl.cumsum", share(cumulative[:, -1] == total), None, ORDER)


def _alike(got: dict[int, Tensor]) -> str:
    """The keys in groups of equal tensors, such as "1 | 2, 4, 8"."""
    groups: list[list[int]] = []
    for key, one in got.items():
        group = next((group for group in groups if torch.equal(got[group[0]], one)), None)
        groups.append([key]) if group is None else group.append(key)
    return " | ".join(", ".join(map(str, group)) for group in groups)


def casts(ops: "Operations") -> Iterator[Measure]:
    """How float32 becomes bfloat16 and float16: ties, overflow, subnormal numbers, NaN."""
    every = torch.arange(-(1 << 31), 1 << 31, (1 << 32) // ops.points | 1)
    beside = torch.tensor([-1, 0, 1]).unsqueeze(1)  # ties, and the numbers beside them
    coarse = torch.arange(0x8000, 1 << 31, 1 << 20) + beside  # of bfloat16
    fine = torch.arange(0x33001000, 0x47800000, 1 << 16) + beside  # of float16, from below its smallest number to over its largest
    patterns = torch.cat([fine.flatten(), coarse.flatten(), every]).to(torch.int32)
    numbers = patterns[: len(patterns) // 256 * 256].view(torch.float32)
    missing = numbers.isnan()
    for dtype in (torch.bfloat16, torch.float16):
        got = ops.cast(numbers, dtype)
        wrong = int((got != numbers.to(dtype))[~missing].sum())
        cut = int((got.double().abs() > numbers.double().abs())[~missing].sum()) == 0
        rounds = "cut" if wrong and cut else f"otherwise in {wrong} of {len(numbers)}" if wrong else "nearest, ties to even"
        bits = sorted({f"{word & 0xFFFF:#06x}" for word in got[missing].view(torch.int16).unique().tolist()})
        which = ", ".join(bits) if len(bits) <= 2 else f"{len(bits)} patterns"
        nan = f"NaN {which}" if bool(got[missing].isnan().all()) else "NaN LOST"
        name = str(dtype).removeprefix("torch.")
        yield Measure(f"float32 to {name}", f"{rounds}; {nan}", "nearest, ties to even; NaN (?!LOST).*", CASTS)


def atomics(ops: "Operations", name: str) -> Iterator[Measure]:
    """Whether atomic additions add, and whether they add in the same order again."""
    dtype, what = ATOMICS[name], f"tl.atomic_add of {name}"
    if dtype not in ops.atomics:
        yield Measure(what, "not there", None, ATOMIC)
        return
    counted = ops.atomic_sum(torch.ones(256, dtype=dtype)).item()
    x = normal(8, ops.added).to(dtype)
    different = {ops.atomic_sum(x).item() for _ in range(REPEATS)}
    words = f"wrong: {counted}" if counted != 256 else "adds, repeats" if len(different) == 1 else "adds, varies"
    yield Measure(what, words, "adds.*", ATOMIC)


# Numbers


def normal(seed: int, *shape: int) -> Tensor:
    """Float32 numbers with a normal distribution, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def uniform(seed: int, *shape: int) -> Tensor:
    """Float32 numbers between 0 and 1, the same on every machine."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def normal_numbers(count: int) -> Tensor:
    """About so many positive normal numbers of float32, over all exponents; an odd stride reaches all last bits."""
    first, last = 0x00800000, 0x7F800000
    return torch.arange(first, last, (last - first) // count | 1, dtype=torch.int32).view(torch.float32)


def unit_of(truth: Tensor) -> Tensor:
    """The unit in the last place of float32 at each float64 number."""
    exponent = torch.frexp(truth.abs().clamp(min=2.0**-126)).exponent
    return torch.ldexp(torch.ones_like(truth), exponent - SINGLE)


PROBES: dict[str, Probe] = {
    "operands": operands,
    "torch.mm": torch_operands,
    **{f"sums of products of {name}": functools.partial(instruction, name=name) for name in DTYPES},
    "functions": functions,
    "subnormal numbers": subnormals,
    "contraction": contraction,
    "sums": sums,
    "casts": casts,
    **{f"atomic additions in {name}": functools.partial(atomics, name=name) for name in ATOMICS},
}
