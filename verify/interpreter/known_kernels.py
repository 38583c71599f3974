"""Kernels whose results are known to the bit. An untested Triton that gives other results is not used (`self_test`).

Every kernel runs with all programs together and one after another. Most patched operations are in one of them at least. All
results are the same on every machine: products have small integers, and numbers with functions are those that have exact results.
Import this module after `install()`.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl

from verify.interpreter import OutOfBounds, Race, install, patches

install(tested=True)

from verify.interpreter import launch  # noqa: E402 - it needs a patched Triton

PROGRAMS = 4
SIZE = 1 << 13  # elements of the tensor that kernels write
ROWS, QUARTER = tl.constexpr(PROGRAMS), tl.constexpr(SIZE // 4)


@triton.jit
def rounded_kernel(x, y, z, scale, N: tl.constexpr):
    """Arithmetic of 16-bit floats. A product of a tensor and a number rounds once."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    z += tl.program_id(0) * 20 * N + tl.arange(0, N)
    tl.store(z, (a + b).to(tl.float32))
    tl.store(z + N, (a - b).to(tl.float32))
    tl.store(z + 2 * N, (a * b).to(tl.float32))
    tl.store(z + 3 * N, (a / b).to(tl.float32))
    tl.store(z + 4 * N, tl.fma(a, b, a).to(tl.float32))
    least, most = tl.minimum(a, b * float("nan")), tl.maximum(a * float("nan"), b)
    tl.store(z + 5 * N, least.to(tl.float32) + most.to(tl.float32))
    tl.store(z + 6 * N, tl.where((a < b) & (a != b), a, b).to(tl.float32) + (a >= b).to(tl.float32))
    tl.store(z + 7 * N, (tl.abs(a) * 1.7).to(tl.float32))
    tl.store(z + 8 * N, (a * scale).to(tl.float32))
    low, inside = tl.clamp(a * float("nan"), -1.5, 2.5), tl.clamp(a, -0.5, 0.5)
    tl.store(z + 9 * N, low.to(tl.float32) + inside.to(tl.float32))
    tl.store(z + 10 * N, (tl.full((N,), 1.7, tl.bfloat16) + a).to(tl.float32))
    tl.store(z + 11 * N, tl.load(x + at, mask=at % 2 == 0, other=1.7).to(tl.float32))
    wide = a.to(tl.float32) * 1.0078126 + b.to(tl.float32)
    tl.store(z + 12 * N, wide.to(tl.bfloat16).to(tl.float32) + wide.to(tl.float16).to(tl.float32))
    tl.store(z + 13 * N, wide.to(tl.bfloat16, fp_downcast_rounding="rtne").to(tl.float32) + a.to(tl.float16).to(tl.float32))
    tl.store(z + 14 * N, (wide * 100).to(tl.int32).to(tl.bfloat16).to(tl.float32))
    tl.store(z + 15 * N, tl.fma(wide, wide, -wide) + tl.sqrt(tl.abs(wide)) + tl.exp(wide - wide) + tl.exp2(at.to(tl.float32) % 8))
    half = wide.to(tl.float16)
    tl.store(z + 16 * N, (half + half * 1.7 + tl.fma(half, half, half)).to(tl.float32))
    tl.store(z + 17 * N, ((at // 3) * (at % 5) - (at >> 1) + (-at // 2)).to(tl.float32))
    tl.store(z + 18 * N, ((a > 0) + (b > 0)).to(tl.float32) + (at.to(tl.uint32) * 2654435761 >> 20).to(tl.float32))
    functions = tl.rsqrt(tl.exp2((at % 4 * 2).to(tl.float32))) + tl.erf(wide - wide)
    high = tl.umulhi(at.to(tl.uint32), at.to(tl.uint32) * 2654435761).to(tl.float32)
    tl.store(z + 19 * N, wide.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-31 + functions + high)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _larger(a, i, b, j):
    keep = a > b
    return tl.where(keep, a, b), tl.where(keep, i, j)


@triton.jit
def reduced_kernel(x, y, z, N: tl.constexpr):
    """Products, reductions, scans and shapes."""
    i = tl.program_id(0)
    r = tl.arange(0, N)
    at = r[:, None] * N + r[None, :]
    a = tl.load(x + i + at)
    b = tl.trans(a).to(tl.float32)
    whole = (tl.load(y + i + at) * 8).to(tl.int32)
    z += i * 8 * N * N
    tl.store(
        z + at, tl.dot(whole.to(tl.bfloat16), tl.trans(whole).to(tl.bfloat16)) + tl.dot(whole.to(tl.float16), whole.to(tl.float16))
    )
    tl.store(z + N * N + at, tl.dot(whole.to(tl.float32), whole.to(tl.float32).T, acc=b * 0.0, input_precision="ieee"))
    tl.store(z + 2 * N * N + r, tl.sum(a, 0).to(tl.float32) + tl.sum(b.to(tl.float16), 1).to(tl.float32) + tl.sum(b, 1))
    tl.store(z + 2 * N * N + N + r, tl.max(b, 1) - tl.min(b, 0) + tl.argmax(b, 1) + tl.argmin(a.to(tl.float32), 0) + tl.max(a, 1))
    tl.store(z + 2 * N * N + 2 * N + r, tl.reduce(b, 1, _plus) + tl.sum(a, 0, keep_dims=True).to(tl.float32).reshape([N]))
    best, where = tl.reduce((b, at), 1, _larger)
    tl.store(z + 2 * N * N + 3 * N + r, best + where + tl.sum(b) + tl.max(b))
    tl.store(z + 3 * N * N + at, tl.cumsum(b, 0) + tl.cumsum(b.to(tl.float16), 1, reverse=True) + tl.cumprod(b, 1))
    tl.store(z + 4 * N * N + at, tl.associative_scan(a, 1, _plus).to(tl.float32) + tl.associative_scan(b, 0, _plus, reverse=True))
    left, right = tl.split(tl.join(b, -2 * b))
    tl.store(z + 5 * N * N + at, left - 3 * right + tl.reshape(tl.reshape(b, [N * N]), [N, N]) + tl.gather(b, at % N, 1))
    row = tl.load(y + i + r)
    tl.store(z + 6 * N * N + at, tl.broadcast_to(row[:, None], [N, N]) + tl.where(r[:, None] > r[None, :], row[None, :], 0.0))
    sums = tl.associative_scan(a, 1, tl.standard._sum_combine) + tl.associative_scan(a, 0, tl.standard._prod_combine)
    tl.store(z + 7 * N * N + at, sums.to(tl.float32))


@triton.jit
def _clipped(x, limit):
    if x > limit:
        return limit
    return x


@triton.jit
def parted_kernel(y, z, N: tl.constexpr):
    """Branches, loops and calls in which programs part."""
    i = tl.program_id(0)
    z += i * N
    if i == 3:
        tl.store(z, -1.0)
        return
    value = tl.load(y + i)
    if value > 0 and i % 2 == 0:
        value = value * 2
        kind = i.to(tl.int64)
    elif i > 0:
        value = value - min(value * float("nan"), 3.0)
        kind = 5
    else:
        kind = 7
    least = max(i, 2) + min(i, 1)
    total = tl.zeros([4], dtype=tl.float32)
    for j in range(i, i * 2 + 1):
        if j == 3:
            continue
        if j > 3:
            break
        total += tl.load(y + j) * tl.arange(0, 4)
    count = 0
    left = i * i + 1
    while left > 1:
        left = left // 2
        count += 1
    for j in tl.static_range(2):
        count += j * 10
    tl.store(z + 1, value + kind + least + count + _clipped(i * 3, 4))
    tl.store(z + 4 + tl.arange(0, 4), total)


@triton.jit
def stored_kernel(y, z, scale, wide: tl.int64, flag, none, pair, N: tl.constexpr):
    """Arguments, masks, atomics, and pointers into two tensors."""
    i = tl.program_id(0)
    at = i * N + tl.arange(0, N)
    tl.store(z + at, tl.load(y + at - 2, mask=at >= 2, other=-3.0), mask=at < 3 * N)
    if flag and none is None:
        tl.store(z + 1000 + i, (i * wide).to(tl.float64).to(tl.float32) + scale)
    tl.store(z + 3000 + at, tl.load(tl.where(i % 2 == 0, pair[0] + at, pair[1] + at)))
    tl.atomic_add(z + 2000 + at % 3, tl.load(y + at), mask=at < 3 * N - 1)
    tl.atomic_max((z + 2008).to(tl.pointer_type(tl.int32)), i)


@triton.jit
def serial_kernel(y, z):
    """What programs do one after another alone."""
    i = tl.program_id(0)
    tl.store(z + 1 + i, tl.atomic_add(z, 1.0))
    tl.store(z + 9 + i, tl.atomic_cas(z + 8, 0.0, i + 1.0))
    moved = (y.to(tl.int64) + i * 4).to(tl.pointer_type(tl.float32))
    tl.store(z + 64 + i, tl.load(moved))
    rows = tl.make_tensor_descriptor(y, shape=[ROWS, 4], strides=[4, 1], block_shape=[1, 4])
    tl.store(z + 16 + i * 4 + tl.arange(0, 4)[None, :], rows.load([i, 0]))


@triton.jit
def astray_kernel(z):
    """A store of the last program lies after the tensor."""
    tl.store(z + tl.program_id(0) * (QUARTER + 1) + 5, 1.0)


@triton.jit
def racing_kernel(z):
    """Two programs write other numbers to one place."""
    tl.store(z + tl.program_id(0) // 2, tl.program_id(0) * 1.0)


@triton.autotune([triton.Config({"N": 8}), triton.Config({"N": 16})], key=[])
@triton.jit
def tuned_kernel(z, count, N: tl.constexpr):
    """The grid depends on the configuration."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(z + at, at, mask=at < count)


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of a simple generator, in bfloat16 and in float32, with a storage of their own."""
    numbers = np.empty(1024, np.uint32)
    state = 1
    for place in range(len(numbers)):
        state = (state * 1664525 + 1013904223) % 2**32
        numbers[place] = state >> 8
    values = torch.from_numpy((numbers / 2**21).astype(np.float32) - 4)
    return values.to(torch.bfloat16), values


def _rounded(x: torch.Tensor, _y: torch.Tensor, z: torch.Tensor) -> None:
    rounded_kernel[(PROGRAMS,)](x, x.flip(0), z, 32**-0.5, N=16)


def _reduced(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    reduced_kernel[(PROGRAMS,)](x, y, z, N=16)


def _parted(_x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    parted_kernel[(PROGRAMS,)](y, z, N=16)


def _stored(_x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    stored_kernel[(PROGRAMS,)](y, z, 0.1, 2**30, True, None, (y, y.flip(0)), N=16)


def _serial(_x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    serial_kernel[(PROGRAMS,)](y, z)


def _tuned(_x: torch.Tensor, _y: torch.Tensor, z: torch.Tensor) -> None:
    tuned_kernel[lambda meta: (triton.cdiv(meta["z"].numel(), 64 * meta["N"]),)](z, 100)


def _astray(_x: torch.Tensor, _y: torch.Tensor, z: torch.Tensor) -> None:
    try:
        astray_kernel[(PROGRAMS,)](z)
    except OutOfBounds as error:
        z[:] = float(str(error) == "astray_kernel stores 1 element up to 1 after the memory of z")


def _racing(_x: torch.Tensor, _y: torch.Tensor, z: torch.Tensor) -> None:
    try:
        racing_kernel[(PROGRAMS,)](z)
    except Race as error:
        z[:] = float(str(error) == "program (0,) and (1,) both write z[0]")


Launches = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
# What is launched, what it is about, how, and a digest of the bits that it writes
TOGETHER, APART = "grid", "sequential"
KNOWN: tuple[tuple[Launches, str, Sequence[str], str], ...] = (
    (_rounded, "arithmetic of 16-bit floats", (TOGETHER, APART), "1634fec942a6c495"),
    (_reduced, "products, reductions and shapes", (TOGETHER, APART), "0d1e2747a33d2b43"),
    (_parted, "branches and loops", (TOGETHER, APART), "43e592d10e34867d"),
    (_stored, "arguments, masks and atomics", (TOGETHER, APART), "45b13a8b8875d1da"),
    (_tuned, "autotuning and grids", (TOGETHER, APART), "8ef58bae8d75707e"),
    (_serial, "what only programs one after another do", (APART,), "63d9824a09b41acc"),
    (_astray, "a store outside of a tensor", (TOGETHER, APART), "7f9b3c8084d12d65"),
    (_racing, "a race", (TOGETHER,), "46ac448298521650"),
)


def bits_of(launches: Launches, how: str) -> str:
    """A digest of what the launches write."""
    x, y = _inputs()
    z = torch.zeros(SIZE)
    with mock.patch.object(patches, "sequential", how == APART):
        launches(x, y, z)
    return hashlib.sha256(z.numpy().tobytes()).hexdigest()[:16]


def failures() -> Iterator[str]:
    """What the interpreter computes wrongly, one line each."""
    for launches, about, ways, known in KNOWN:
        for how in ways:
            before = sum(launch.one_by_one.values())
            words = "programs together" if how == TOGETHER else "programs one after another"
            try:
                same = bits_of(launches, how) == known
            except Exception as error:
                yield f"{about}, {words}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                continue
            if not same:
                yield f"{about}, {words}: other bits than known"
            elif sum(launch.one_by_one.values()) != before:
                yield f"{about}: programs could not run together"


if __name__ == "__main__":
    sys.stdout.write(json.dumps([*failures()]) + "\n")
