"""Runs Triton kernels in the interpreter and answers, in a worker, with each check's failure ("" where it holds).

With GDN_VERIFY_PLAIN in the environment the interpreter is Triton's own, unpatched.
"""

import itertools
import math
import os
import traceback
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from packaging.version import Version
from triton.language.extra import libdevice

raw_exp = tl.exp  # Bound before the shim, as by a module that a caller imported first.

if "GDN_VERIFY_PLAIN" not in os.environ:
    from verify.interpreter import install

    install()
    launch = triton.runtime.interpreter.InterpretedFunction.run
    install()
    assert triton.runtime.interpreter.InterpretedFunction.run is launch, "a second install() changes nothing"

late_exp = tl.exp
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def library_kernel(x, exps, logs, roots, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(exps + i, libdevice.exp(-a))
    tl.store(logs + i, libdevice.log(a))
    tl.store(roots + i, libdevice.rsqrt(a))


@triton.jit
def annotated_kernel(
    y,
    z,
    wide: tl.int64,
    also_wide: "uint64",  # noqa: F821
    narrow,
    cut: tl.int32,
    flag: tl.int1,
    number: tl.float64,
    whole: tl.float32,
    half: tl.float16,
):
    three = tl.program_id(0) + 3
    tl.store(y, (three * wide).to(tl.int64))
    tl.store(y + 1, (three * also_wide).to(tl.int64))
    tl.store(y + 2, (three * narrow).to(tl.int64))
    tl.store(y + 3, cut.to(tl.int64))
    tl.store(y + 4, (~flag).to(tl.int64))
    tl.store(z, number.to(tl.float64))
    tl.store(z + 1, (whole / 2).to(tl.float64))
    tl.store(z + 2, half.to(tl.float64))


@triton.jit
def surplus_kernel(y):
    i, j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(y + 2 * i + j, (10 * i + j).to(tl.float32))


@triton.jit
def nearest_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty, fp_downcast_rounding="rtne"))


@triton.jit
def binary_kernel(x, y, z, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "div":
        c = a / b
    elif OP == "minimum":
        c = tl.minimum(a, b)
    elif OP == "maximum":
        c = tl.maximum(a, b)
    elif OP == "lt":
        c = a < b
    elif OP == "le":
        c = a <= b
    elif OP == "gt":
        c = a > b
    elif OP == "ge":
        c = a >= b
    elif OP == "eq":
        c = a == b
    elif OP == "ne":
        c = a != b
    elif OP == "where":
        c = tl.where(a > b, a, b)
    elif OP == "fma":
        c = tl.fma(a, b, a)
    tl.store(z + i, c.to(z.dtype.element_ty))


@triton.jit
def unary_kernel(x, z, other, scale, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    if OP == "neg":
        c = -a
    elif OP == "abs":
        c = tl.abs(a)
    elif OP == "constant":
        c = a * 1.7
    elif OP == "argument":
        c = a * scale
    elif OP == "exp":
        c = tl.exp(a.to(tl.float32))
    elif OP == "full":
        c = tl.full((N,), 1.7, tl.bfloat16) + a
    elif OP == "other":
        c = tl.load(x + i, mask=i % 2 == 0, other=1.7)
    elif OP == "clamp":
        c = tl.clamp(a, -1.5, 2.5)
    elif OP == "turn":
        c = tl.reshape(tl.trans(tl.reshape(a, (2, N // 2))), (N,))
    tl.store(z + i, c.to(z.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, P: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + j[None, :])
    z = tl.dot(x, y, input_precision=P, out_dtype=OUT)
    z = tl.dot(x, y, acc=z, input_precision=P, out_dtype=OUT)
    tl.store(c + i[:, None] * N + j[None, :], z.to(c.dtype.element_ty))


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def reduce_kernel(x, y, OP: tl.constexpr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(x + i * N + j)
    if OP == "cumsum":
        tl.store(y + i * N + j, tl.cumsum(a, AXIS, dtype=tl.float32).to(y.dtype.element_ty))
    elif OP == "cumprod":
        tl.store(y + i * N + j, tl.associative_scan(a, AXIS, tl.standard._prod_combine))
    elif OP == "scan":
        tl.store(y + i * N + j, tl.associative_scan(a, AXIS, tl.standard._sum_combine))
    elif OP == "reversed":
        tl.store(y + i * N + j, tl.associative_scan(a, AXIS, tl.standard._sum_combine, reverse=True))
    elif OP == "all":
        tl.store(y, tl.sum(a).to(y.dtype.element_ty))
    elif OP == "keep":
        tl.store(y + tl.arange(0, M)[:, None], tl.sum(a, AXIS, keep_dims=True))
    else:
        if OP == "sum":
            b = tl.sum(a, AXIS)
        elif OP == "max":
            b = tl.max(a, AXIS)
        elif OP == "min":
            b = tl.min(a, AXIS)
        elif OP == "argmax":
            b = tl.argmax(a, AXIS)
        elif OP == "generic":
            b = tl.reduce(a, AXIS, plus)
        tl.store(y + tl.arange(0, M if AXIS == 1 else N), b.to(y.dtype.element_ty))


@triton.jit
def loop_kernel(y, n, N: tl.constexpr):
    for i in range(n):
        for j in range(1):
            one = 1
            tl.store(y + i.to(tl.int64), (i + j - one.to(tl.int32) + 1).to(tl.float32))
    for i in tl.static_range(N):
        tl.store(y + n + i, tl.sum(tl.full((2**i,), 1.0, tl.float32)))


@triton.jit
def mask_kernel(x, y, n, N: tl.constexpr):
    i = tl.arange(0, N)
    here = tl.program_id(0) == n
    tl.static_assert(here.handle.dtype == tl.int1)
    tl.static_assert((tl.load(x + i) > tl.load(x)).handle.dtype == tl.int1)
    tl.store(y + i, tl.load(x + i, mask=here, other=-1.0))


@triton.jit
def alias_kernel(x, y):
    tl.store(y, raw_exp(tl.load(x)))
    tl.store(y + 1, late_exp(tl.load(x)))


@triton.jit
def argument_kernel(y, yes, none, number):
    if yes and none is None:
        tl.store(y, number)


@triton.jit
def atomic_kernel(x, y, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(y + i % 4, tl.load(x + i), mask=i < n)


@triton.jit
def moved(x, i):
    return tl.load(x + i)


@triton.jit
def reach_kernel(x, y, n, by, WHAT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    here = i < n
    if WHAT == "load":
        tl.store(y + i, tl.load(x + i + by, mask=here, other=0.0), mask=here)
    elif WHAT == "function":
        tl.store(y + i, moved(x, i + by), mask=here)
    elif WHAT == "scalar":
        tl.store(y, tl.load(x + by))
    elif WHAT == "store":
        tl.store(x + i + by, tl.load(y + i, mask=here, other=0.0), mask=here)
    elif WHAT == "add":
        tl.atomic_add(x + i + by, tl.load(y + i, mask=here, other=0.0), mask=here)
    elif WHAT == "exchange":
        tl.atomic_cas(x + by, 0.0, 1.0)
    elif WHAT == "flags":
        tl.store(y + i, tl.load(x + i + by, mask=here, other=0).to(tl.float32), mask=here)
    elif WHAT == "either":
        tl.store(y + i, tl.load(tl.where(n > 2, x, y) + i + by, mask=here, other=0.0), mask=here)
    elif WHAT == "joined":
        both = tl.join(x + i, y + i)
        tl.store(both + by, tl.full((N, 2), 5.0, tl.float32), mask=here[:, None])
    elif WHAT == "integer":
        at = (x.to(tl.int64) + (i + by) * 4).to(tl.pointer_type(tl.float32))
        tl.store(y + i, tl.load(at, mask=here, other=0.0), mask=here)


@triton.jit
def block_kernel(x, y, n, by, CHECKED: tl.constexpr, DESCRIBED: tl.constexpr):
    i, j = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :]
    if DESCRIBED:
        b = tl.make_tensor_descriptor(x, (n, 4), (4, 1), (4, 4)).load((by, 0))
    else:
        p = tl.make_block_ptr(x, (n, 4), (4, 1), (0, 0), (4, 4), (1, 0))
        p = tl.advance(p, (by, 0))
        b = tl.load(p, boundary_check=(0,)) if CHECKED else tl.load(p)
    tl.store(y + i * 4 + j, b)


@triton.jit
def pair_kernel(pair, y, by, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(pair[0] + i) + tl.load(pair[1] + i + by))


@triton.autotune([triton.Config({"N": 4}), triton.Config({"N": 8})], key=["n"])
@triton.jit
def tuned_kernel(y, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, i, mask=i < n)


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)


def every_f16() -> torch.Tensor:
    return every_bf16().view(F16)


def awkward_f32() -> torch.Tensor:
    """Every bfloat16 pattern with the tails that decide a rounding: exact, below, at and above the half."""
    tails = torch.tensor([0, 1, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF], dtype=torch.int32)
    return ((torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16)[:, None] + tails).flatten().view(F32)


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of 256 bfloat16 numbers: zeros, subnormals, infinities, NaN, both signs, and near ones."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.tensor([0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x3F7F, 0x7F7F, 0x7F80, 0x7FC0], dtype=torch.int16)
    near = torch.randn(192, generator=generator).to(BF16)
    rest = torch.randint(-(2**15), 2**15, (44,), dtype=torch.int16, generator=generator).view(BF16)
    x = torch.cat([edges.view(BF16), -edges.view(BF16), near, rest])
    return x.repeat_interleave(256), x.repeat(256)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The bits are equal, except that any NaN is as good as another."""
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, want.dtype, got.shape, want.shape)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if got.is_floating_point():
        equal = (got.view(bits[got.itemsize]) == want.view(bits[got.itemsize])) | (got.isnan() & want.isnan())
    else:
        equal = got == want
    wrong = torch.nonzero(~equal).tolist()
    assert not wrong, f"{len(wrong)} of {got.numel()} differ, first at {wrong[0]}: {got[~equal][0]}, not {want[~equal][0]}"


def cast(x: torch.Tensor, dtype: torch.dtype, kernel: Any = cast_kernel) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    kernel[(1,)](x, y, N=x.numel())
    return y


def binary(op: str, dtype: torch.dtype, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.empty(x.shape, dtype=dtype)
    binary_kernel[(1,)](x, y, z, OP=op, N=x.numel())
    return z


def unary(op: str, x: torch.Tensor, dtype: torch.dtype = BF16, scale: float = 0.0) -> torch.Tensor:
    z = torch.empty(x.shape, dtype=dtype)
    unary_kernel[(1,)](x, z, x, scale, OP=op, N=x.numel())
    return z


def reduced(op: str, axis: int, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    y = torch.empty(shape, dtype=dtype)
    reduce_kernel[(1,)](x, y, OP=op, AXIS=axis, M=x.shape[0], N=x.shape[1])
    return y


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def dotted(dtype: torch.dtype, out: torch.dtype = F32, precision: str = "ieee") -> None:
    x, y = numbers(64, 32, dtype=dtype), numbers(48, 32, dtype=dtype)[:32].T.contiguous()
    z = torch.empty(64, 32, dtype=out)
    dot_kernel[(1,)](x, y, z, M=64, K=32, N=32, OUT=tl.float16 if out == F16 else tl.float32, P=precision)
    want, size = 2 * (x.to(F64) @ y.to(F64)), 2 * (x.to(F64).abs() @ y.to(F64).abs())
    # 64 additions and products round to 2^-24 each; a narrower output rounds the two sums once each.
    bound = 64 * 2.0**-24 * size + {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-10}[out] * want.abs() + 1e-30
    worst = ((z.to(F64) - want).abs() / bound).max().item()
    assert worst <= 1, f"{dtype} dot is {worst:.3g} bounds off"
    assert z.to(F64).ne(0).all()


def check_dot_bf16() -> None:
    dotted(BF16)


def check_dot_fp16() -> None:
    dotted(F16)


def check_dot_fp32() -> None:
    dotted(F32)


def check_dot_bf16_narrowed_once() -> None:
    dotted(BF16, BF16)


def check_dot_fp16_output() -> None:
    dotted(F16, F16)


def check_dot_bf16x3_is_allowed() -> None:
    dotted(F32, precision="bf16x3")
    dotted(F32, precision="bf16x6")


def check_dot_fp16_adds_in_float32() -> None:
    z = torch.empty(16, 16)
    x = torch.ones(16, 4096, dtype=F16)
    dot_kernel[(1,)](x, x.T.contiguous(), z, M=16, K=4096, N=16, OUT=tl.float32, P="ieee")
    same(z, torch.full((16, 16), 8192.0))


def check_cast_bf16_to_fp32() -> None:
    same(cast(every_bf16(), F32), every_bf16().to(F32))


def check_cast_fp32_to_bf16() -> None:
    same(cast(awkward_f32(), BF16), awkward_f32().to(BF16))


def check_cast_fp32_carries() -> None:
    x = torch.tensor([1.00390625, 1.01171875, 1.998046875, -1.998046875, 3.3961775e38, float("inf"), float("nan"), -0.0])
    want = torch.tensor([1.0, 1.015625, 2.0, -2.0, float("inf"), float("inf"), float("nan"), -0.0], dtype=BF16)
    same(cast(x, BF16), want)


def check_cast_fp32_to_bf16_by_name() -> None:
    same(cast(awkward_f32(), BF16, nearest_kernel), awkward_f32().to(BF16))


def check_cast_fp16_and_bf16() -> None:
    same(cast(every_bf16(), F16), every_bf16().to(F16))
    same(cast(every_f16(), BF16), every_f16().to(BF16))


def check_cast_fp64_and_bf16() -> None:
    same(cast(every_bf16(), F64), every_bf16().to(F64))
    x = awkward_f32().to(F64)
    same(cast(x, BF16), x.to(BF16))


def check_cast_integers_and_bf16() -> None:
    x = torch.arange(-(2**17), 2**17, dtype=torch.int32) * 1021
    same(cast(x, BF16), x.to(BF16))
    small = every_bf16()
    small = torch.where(small.abs() < 2.0**31, small, torch.zeros_like(small))
    same(cast(small, torch.int32), small.to(torch.int32))


def check_cast_fp16_and_fp32() -> None:
    same(cast(every_f16(), F32), every_f16().to(F32))
    x = torch.cat([awkward_f32()[::2], every_f16().to(F32).repeat(4) * (1 + 2.0**-11)])
    same(cast(x, F16), x.to(F16))


def check_add() -> None:
    x, y = pairs()
    same(binary("add", BF16, x, y), x + y)


def check_sub() -> None:
    x, y = pairs()
    same(binary("sub", BF16, x, y), x - y)


def check_mul() -> None:
    x, y = pairs()
    same(binary("mul", BF16, x, y), x * y)


def check_div() -> None:
    x, y = pairs()
    same(binary("div", F32, x, y), x.float() / y.float())


def check_fma() -> None:
    x, y = pairs()
    same(binary("fma", BF16, x, y), rounded_once(x, y, BF16))
    # The product rounds with the sum, not before it, and the sum once: near the middle of two numbers, too.
    for dtype, digits in ((BF16, 8), (F16, 11), (F32, 24)):
        unit = 2.0 ** (1 - digits)
        x = (1 + unit * torch.randint(2 ** (digits - 1), (256,), generator=torch.Generator().manual_seed(1))).to(dtype)
        y = torch.tensor([1 + unit, 1 - unit / 2, unit / 2, -unit / 2, unit**3, -(unit**3), unit**2, 3 * unit]).to(dtype)
        x, y = x.repeat_interleave(8), y.repeat(256)
        same(binary("fma", dtype, x, y), rounded_once(x, y, dtype))


def rounded_once(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * y + x, rounded to nearest in exact arithmetic where all numbers are normal, and by torch otherwise."""
    digits, least = {BF16: (8, -126), F16: (11, -14), F32: (24, -126)}[dtype]
    found = (x.double() * y.double() + x.double()).to(dtype)
    for place, (one, other) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        if math.isfinite(one) and math.isfinite(other) and (exact := Fraction(one) * Fraction(other) + Fraction(one)):
            exponent = math.frexp(float(exact))[1]
            if least < exponent < 120:
                unit = Fraction(2) ** (exponent - digits)
                found[place] = float(round(exact / unit) * unit)
    return found


def check_minimum_and_maximum() -> None:
    x, y = pairs()
    # fmin may return either of two zeros.
    same(binary("minimum", F32, x, y) + 0.0, torch.fmin(x.float(), y.float()) + 0.0)
    same(binary("maximum", F32, x, y) + 0.0, torch.fmax(x.float(), y.float()) + 0.0)


def check_comparisons() -> None:
    x, y = pairs()
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        same(binary(op, torch.int32, x, y), getattr(torch, op)(x, y).to(torch.int32))


def check_where() -> None:
    x, y = pairs()
    same(binary("where", BF16, x, y), torch.where(x > y, x, y))


def check_neg_and_abs() -> None:
    x = every_bf16()
    same(unary("abs", x), x.abs())
    x = x[: 2**14]  # No zero: Triton releases disagree on the sign of -0.
    same(unary("neg", x), -x)


def check_exp() -> None:
    x = numbers(4096)
    torch.testing.assert_close(unary("exp", x, F32), x.float().exp(), rtol=1e-6, atol=0)


def check_library() -> None:
    """The functions of libdevice are those of the language."""
    x = numbers(4096).float().abs() + 1
    y, want = torch.empty(3, len(x)), torch.stack([(-x).exp(), x.log(), x.rsqrt()])
    library_kernel[(1,)](x, *y, N=len(x))
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)


def check_constants() -> None:
    x = every_bf16()
    same(unary("constant", x), x * torch.tensor(1.7, dtype=BF16))
    same(unary("full", x), x + torch.tensor(1.7, dtype=BF16))
    same(unary("other", x), torch.where(torch.arange(x.numel()) % 2 == 0, x, torch.tensor(1.7, dtype=BF16)))


def check_float_argument_is_float32() -> None:
    x = every_bf16()
    same(unary("argument", x, BF16, 32**-0.5), (x.float() * 32**-0.5).to(BF16))


def check_annotated_arguments() -> None:
    y, z = torch.full((5,), -1, dtype=torch.int64), torch.zeros(3, dtype=F64)
    annotated_kernel[(1,)](y, z, 2**30, 2**30, 2**30, 2**32 + 5, 2, 1 / 3, 3, 1 / 3)
    assert y.tolist() == [3 * 2**30, 3 * 2**30, -(2**30), 5, 0], y.tolist()
    assert z.tolist() == [1 / 3, 1.5, float(torch.tensor(1 / 3, dtype=F16))], z.tolist()


def check_clamp() -> None:
    x = every_bf16()
    same(unary("clamp", x), torch.where(x.isnan(), torch.tensor(-1.5, dtype=BF16), x.clamp(-1.5, 2.5)))


def check_sums_of_one_bit() -> None:
    x, y = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    for op in ("add", "sub"):
        same(binary(op, torch.bool, x, y), x != y)


def check_shapes() -> None:
    x = every_bf16()
    same(unary("turn", x), x.view(2, -1).T.flatten())


def check_sum_bf16() -> None:
    for dtype in (BF16, F16):
        x = numbers(16, 64, dtype=dtype)
        for axis in (0, 1):
            want = x.T if axis == 0 else x
            while want.shape[1] > 1:
                half = want.shape[1] // 2
                want = want[:, :half] + want[:, half:]
            got = reduced("sum", axis, x, dtype, (want.shape[0],))
            same(got, want[:, 0])
            # Each of the levels rounds once: 6 for 64 terms, at half a unit in the last place of 8 bits.
            error = (got.double() - x.double().sum(axis)).abs()
            assert (error <= 7 * 2.0**-8 * x.double().abs().sum(axis)).all()
        same(reduced("keep", 1, x, dtype, (16, 1))[:, 0], reduced("sum", 1, x, dtype, (16,)))
        assert abs(reduced("all", 1, x, F32, (1,)).item() - x.double().sum().item()) < 11 * 2.0**-8 * x.abs().sum()


def check_sum_fp32() -> None:
    x = numbers(16, 64, dtype=F32)
    torch.testing.assert_close(reduced("sum", 1, x, F32, (16,)), x.sum(1), rtol=1e-5, atol=1e-5)


def check_generic_reduction() -> None:
    x = numbers(8, 16)
    want = x[:, 0]
    for j in range(1, 16):
        want = want + x[:, j]
    same(reduced("generic", 1, x, BF16, (8,)), want)


def check_cumsum() -> None:
    x = numbers(16, 64)
    same(reduced("cumsum", 1, x, BF16, (16, 64)), x.float().cumsum(1).to(BF16))


def check_cumprod() -> None:
    x = numbers(16, 8)
    got, want = reduced("cumprod", 1, x, BF16, (16, 8)), x.double().cumprod(1)
    assert ((got.double() - want).abs() <= 8 * 2.0**-8 * want.abs()).all()
    signs = numbers(8, 64).sign()
    same(reduced("cumprod", 1, signs, BF16, (8, 64)), signs.cumprod(1))


def check_scan() -> None:
    for dtype in (BF16, F16):
        x = numbers(16, 64, dtype=dtype)
        size = 7 * 2.0**-8 * x.double().abs().cumsum(1)
        got = reduced("scan", 1, x, dtype, (16, 64))
        assert ((got.double() - x.double().cumsum(1)).abs() <= size).all()
        same(got[:, :2], torch.stack([x[:, 0], x[:, 0] + x[:, 1]], 1))
        same(reduced("reversed", 1, x.flip(1).contiguous(), dtype, (16, 64)), got.flip(1))
        same(reduced("scan", 0, x.T.contiguous(), dtype, (64, 16)), got.T.contiguous())


def check_max_and_min() -> None:
    x = -numbers(16, 64).abs()
    x[0, 3] = float("nan")
    x[1] = float("nan")
    clean = x.float().nan_to_num(nan=-float("inf"))
    clean[1] = float("nan")
    same(reduced("max", 1, x, F32, (16,)), clean.amax(1))
    clean = x.float().nan_to_num(nan=float("inf"))
    clean[1] = float("nan")
    same(reduced("min", 1, x, F32, (16,)), clean.amin(1))
    same(reduced("argmax", 1, x[2:10], torch.int32, (8,)), x[2:10].float().argmax(1).to(torch.int32))


def check_loop_variables() -> None:
    y = torch.empty(8)
    loop_kernel[(1,)](y, 5, N=3)
    same(y, torch.tensor([0.0, 1, 2, 3, 4, 1, 2, 4]))


def check_values_beyond_the_names_are_dropped() -> None:
    y = torch.full((4,), -1.0)
    surplus_kernel[(2, 2)](y)
    same(y, torch.tensor([0.0, 1, 10, 11]))


def check_scalar_mask() -> None:
    x = numbers(8)
    y = torch.empty_like(x)
    mask_kernel[(1,)](x, y, 0, N=8)
    same(y, x)
    mask_kernel[(1,)](x, y, 1, N=8)
    same(y, torch.full_like(x, -1.0))


def check_aliased_builtins() -> None:
    y = torch.empty(2)
    alias_kernel[(1,)](torch.ones(1), y)
    torch.testing.assert_close(y, torch.ones(2).exp())


def check_arguments() -> None:
    y = torch.zeros(1)
    argument_kernel[(1,)](y, True, None, 0.1)
    same(y, torch.tensor([0.1]))


def check_callable_grid() -> None:
    y = torch.empty(16, dtype=torch.int32)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        assert isinstance(meta["y"], torch.Tensor) and type(meta["n"]) is int, meta
        return (triton.cdiv(meta["y"].nelement(), meta["N"]),)

    tuned_kernel[grid](y, 16)
    same(y, torch.arange(16, dtype=torch.int32))


def check_atomic_add() -> None:
    x, y = torch.arange(16, dtype=F32), torch.ones(4)
    atomic_kernel[(1,)](x, y, 14, N=16)
    same(y, torch.tensor([25.0, 29, 19, 22]))


def memories(*sizes: int) -> list[torch.Tensor]:
    """Tensors of 1, 2, ... that lie side by side, each with a storage of its own, in the middle of memory that nobody else has."""
    ends = [256 + sum(sizes[:count]) for count in range(len(sizes) + 1)]
    memory = np.arange(-255, 257 + sum(sizes), dtype=np.float32)
    return [torch.from_numpy(memory[start:end]) for start, end in itertools.pairwise(ends)]


def strays(kernel: Any, *args: Any, **options: Any) -> str:
    """What is said of a launch that must not be let pass."""
    try:
        kernel[(1,)](*args, **options)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {frame.name}: {error}"
    return "nothing"


def assert_message(got: str, want: str) -> None:
    assert got == f"OutOfBounds in {want}", got


def check_load_outside_of_a_tensor_raises() -> None:
    x, y = memories(8, 8)
    for what, by, n, message in (
        ("load", 1, 8, "loads 1 element up to 1 after the memory of x"),
        ("load", 5, 4, "loads 1 element up to 1 after the memory of x"),
        ("load", -3, 2, "loads 2 elements up to 3 before the memory of x"),
        ("load", 100, 8, "loads 8 elements up to 100 after the memory of x"),
        ("scalar", 8, 8, "loads 1 element up to 1 after the memory of x"),
        ("scalar", -1, 8, "loads 1 element up to 1 before the memory of x"),
    ):
        assert_message(strays(reach_kernel, x, y, n, by, WHAT=what, N=8), f"reach_kernel: reach_kernel {message}")
    reach_kernel[(1,)](x, y, 7, 1, WHAT="load", N=8)
    same(y[:7], x[1:])
    reach_kernel[(1,)](x, y, 0, 10**6, WHAT="load", N=8)


def check_stray_is_told_where_a_function_strays() -> None:
    x, y = memories(8, 8)
    assert_message(
        strays(reach_kernel, x, y, 8, 2, WHAT="function", N=8), "moved: reach_kernel loads 2 elements up to 2 after the memory of x"
    )


def check_write_outside_of_a_tensor_raises_and_writes_nothing() -> None:
    x, y, z = memories(8, 8, 8)
    before = [t.clone() for t in (x, y, z)]
    for what, message in (("store", "stores 3 elements up to 3"), ("add", "updates 3 elements up to 3")):
        assert_message(
            strays(reach_kernel, y, x, 8, 3, WHAT=what, N=8), f"reach_kernel: reach_kernel {message} after the memory of x"
        )
    assert_message(
        strays(reach_kernel, y, x, 8, -1, WHAT="exchange", N=8),
        "reach_kernel: reach_kernel updates 1 element up to 1 before the memory of x",
    )
    for t, was in zip((x, y, z), before, strict=True):
        same(t, was)
    reach_kernel[(1,)](y, x, 5, 3, WHAT="add", N=8)
    same(y, before[1] + torch.cat([torch.zeros(3), before[0][:5]]))


def check_neighbour_is_no_part_of_a_tensor() -> None:
    x, y = memories(8, 8)
    assert y.data_ptr() == x.data_ptr() + 32
    assert_message(
        strays(reach_kernel, x, y, 8, 8, WHAT="load", N=8),
        "reach_kernel: reach_kernel loads 8 elements up to 8 after the memory of x",
    )
    view = memories(16)[0][4:12]  # what it is a view of is
    reach_kernel[(1,)](view, y, 8, 4, WHAT="load", N=8)
    reach_kernel[(1,)](view, y, 8, -4, WHAT="load", N=8)
    assert_message(
        strays(reach_kernel, view, y, 8, 5, WHAT="load", N=8),
        "reach_kernel: reach_kernel loads 1 element up to 1 after the memory of x",
    )
    message = "reach_kernel: reach_kernel loads 1 element up to 1 before the memory of x or y"
    assert_message(strays(reach_kernel, view, view[2:], 8, -5, WHAT="load", N=8), message)
    empty = "reach_kernel: reach_kernel loads 1 element up to 1 after the memory of x"
    assert_message(strays(reach_kernel, torch.empty(0), y, 8, 0, WHAT="scalar", N=8), empty)


def check_pointers_of_two_tensors_are_held_to_both() -> None:
    x, y = memories(8, 8)
    for n, first, message in ((8, 1.0, "8 elements up to 12"), (2, 9.0, "2 elements up to 14")):
        x, y = memories(8, 8)
        reach_kernel[(1,)](x, y, n, 0, WHAT="either", N=8)
        same(y[:n], torch.arange(first, first + n))
        got = strays(reach_kernel, x, y, n, 20, WHAT="either", N=8)
        assert_message(got, f"reach_kernel: reach_kernel loads {message} after the memory of y")
    x, y = memories(8, 8)
    reach_kernel[(1,)](x, y, 8, 0, WHAT="joined", N=8)
    same(torch.cat([x, y]), torch.full((16,), 5.0))
    assert "stores 2 elements up to 2 after" in strays(reach_kernel, x, y, 8, 2, WHAT="joined", N=8)


def check_flags_outside_of_a_tensor_raise() -> None:
    x, y = torch.from_numpy(np.zeros(64, dtype=np.bool_)[16:24]), torch.zeros(8)
    assert_message(
        strays(reach_kernel, x, y, 8, 2, WHAT="flags", N=8),
        "reach_kernel: reach_kernel loads 2 elements up to 2 after the memory of x",
    )
    reach_kernel[(1,)](x, y, 8, 0, WHAT="flags", N=8)


def check_pointers_made_from_integers_are_let_go() -> None:
    x, y = memories(8, 8)
    reach_kernel[(1,)](x, y, 8, -4, WHAT="integer", N=8)
    same(y, torch.arange(-3.0, 5.0))
    assert strays(reach_kernel, x, y, 8, 1, WHAT="load", N=8) != "nothing"


def check_blocks_outside_of_a_tensor_raise() -> None:
    # Triton 3.9 has no block pointers any more, and descriptors instead.
    for described in (False, True) if Version(triton.__version__) < Version("3.9") else (True,):
        x, y = memories(24, 16)
        want = torch.cat([x[16:], torch.zeros(8)])
        block_kernel[(1,)](x, y, 6, 4, CHECKED=True, DESCRIBED=described)
        same(y, want)
        got = strays(block_kernel, x, y, 8, 4, CHECKED=described, DESCRIBED=described)
        assert_message(got, "block_kernel: block_kernel loads 8 elements up to 8 after the memory of x")
        block_kernel[(1,)](x, y, 6, 2, CHECKED=False, DESCRIBED=described)
        same(y, x[8:])


def check_tensors_in_a_tuple_are_told() -> None:
    x, y, z = memories(8, 8, 8)
    pair_kernel[(1,)]((x, y), z, 0, N=8)
    same(z, x + y)
    assert_message(
        strays(pair_kernel, (x, y), z, 1, N=8), "pair_kernel: pair_kernel loads 1 element up to 1 after the memory of pair"
    )


def check_wrappers_split_work() -> None:
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    assert properties["multiprocessor_count"] > 1, properties
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return
    raise AssertionError(f"there is no device, and {target} is its target")


def check_cpu_device_guard() -> None:
    with torch.cpu.device(0):
        pass


def check_overflow_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = pairs()
        binary("div", F32, x, y)
        binary("mul", F32, x.float() * 1e38, y.float())
        reduced("max", 1, torch.full((2, 2), float("nan")), F32, (2,))


def answer(_: dict[str, Any]) -> dict[str, str]:
    checks: dict[str, Callable[[], None]] = {
        name.removeprefix("check_"): value for name, value in globals().items() if name.startswith("check_")
    }
    report = {}
    for name, check in checks.items():
        try:
            check()
            report[name] = ""
        except Exception:
            report[name] = traceback.format_exc(limit=-3)
    return report
