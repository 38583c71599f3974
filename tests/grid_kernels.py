"""Runs Triton kernels with all programs together and answers, in a worker, with each check's failure ("" where it holds).

A check compares with the same kernel's programs run one after another, bit for bit. Then every check runs again with each of some
faults planted in the interpreter: under "faults" stands the first check that fails with it.
"""

import ast
import inspect
import linecache
import os
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from packaging.version import Version

from verify.interpreter import OutOfBounds, Race, UnknownTriton, install, patches

install()
from verify.interpreter import branches, grid, launch, memory, operations, races, repeats  # noqa: E402 - these need a patched interpreter
from verify.interpreter.variables import Names  # noqa: E402

N = 16


@triton.jit
def _clipped(x, limit):
    if x > limit:
        return limit
    return x


@triton.jit
def _steps(n):
    count = 0
    while n > 1:
        n = n // 2
        count += 1
    return count


@triton.jit
def branch_kernel(x, y, n):
    i = tl.program_id(0)
    value = tl.load(x + i)
    if value > 0:
        scaled = value * 2
        if i % 2 == 0:
            scaled += 100
    elif value < -1:
        scaled = value - 1
    else:
        scaled = value * 0
    tl.store(y + i, scaled)


@triton.jit
def masked_kernel(x, y, n):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    value = tl.load(x + at - 2, mask=at >= 2, other=-3.0)
    tl.store(y + at, value, mask=(at < n) & (value > -1))


@triton.jit
def lengths_kernel(x, y):
    i = tl.program_id(0)
    total = 0.0
    for _ in range(tl.load(x + i).to(tl.int32)):
        total += 1.0
    tl.store(y + i, total)


@triton.jit
def early_kernel(x, y, n):
    i = tl.program_id(0)
    if i >= n:
        return
    value = tl.load(x + i)
    if value < 0:
        tl.store(y + i, -1.0)
        return
    tl.store(y + i, value + 1)


@triton.jit
def loop_kernel(x, y, n, LEAVES: tl.constexpr):
    """Programs take different numbers of turns; some leave, and some skip a turn."""
    i = tl.program_id(0)
    total = tl.zeros([4], dtype=tl.float32)
    last = 0
    for j in range(i % 3, i + 1):
        if LEAVES:
            if j == 5:
                break
            if (i + j) % 4 == 0:
                continue
        total += tl.load(x + j) * tl.arange(0, 4)
        last = j
    tl.store(y + i * 8 + tl.arange(0, 4), total)
    tl.store(y + i * 8 + 4, last)


@triton.jit
def stepping_kernel(x, y, n):
    i = tl.program_id(0)
    total = 0.0
    for j in tl.range(0, n - i, 3, num_stages=2):
        total += tl.load(x + j)
    for j in tl.static_range(2):
        if j + i > 3:
            total += j
    tl.store(y + i, total)


@triton.jit
def while_kernel(x, y, n):
    i = tl.program_id(0)
    tl.store(y + i, _steps(i * i + 1) + _clipped(i, 7))


@triton.jit
def choice_kernel(x, y, n):
    i = tl.program_id(0)
    value = tl.load(x + i)
    picked = 1.0 if value > 0 and i % 3 > 0 else 2.0
    if value > 0 or not (i % 2 < 1):
        picked = picked + min(i, 5) + max(n - i, 2)
    tl.store(y + i, picked)


@triton.jit
def widths_kernel(x, y, n):
    """A variable of other types in other programs, and one that only some have."""
    i = tl.program_id(0)
    if i > 3:
        part = tl.arange(0, 4)
        wide = i.to(tl.int64)
    else:
        part = tl.arange(0, 8)
        wide = i
    if i > 3:
        only = tl.load(x + i)
    tl.store(y + i, wide + 1)
    if i > 3:
        tl.store(y + i, only + tl.sum(part, 0) + wide)


@triton.jit
def blocks_kernel(x, y, n, ROWS: tl.constexpr):
    i = tl.program_id(0)
    p = tl.make_block_ptr(x, (n, 4), (4, 1), (0, 0), (ROWS, 4), (1, 0))
    if i % 2 == 1:
        p = tl.advance(p, (i, 0))
    b = tl.load(p, boundary_check=(0, 1))
    q = tl.make_block_ptr(y, (N * ROWS, 4), (4, 1), (i * ROWS, 0), (ROWS, 4), (1, 0))
    tl.store(q, b + i)


@triton.jit
def _larger(a, i, b, j):
    keep = a > b
    return tl.where(keep, a, b), tl.where(keep, i, j)


@triton.jit
def operations_kernel(x, y, n, SHAPE: tl.constexpr):
    """One result of each kind of operation, at addresses of the program's own."""
    i = tl.program_id(0)
    r = tl.arange(0, SHAPE)
    a = tl.load(x + i + r[:, None] * 3 + r[None, :])
    y += i * 64 * SHAPE * SHAPE
    at = r[:, None] * SHAPE + r[None, :]
    tl.store(y + at, a + i)
    y += SHAPE * SHAPE
    tl.store(y + at, tl.dot(a, tl.trans(a), allow_tf32=False) + tl.dot(tl.full([SHAPE, SHAPE], 0.5, tl.float32), a.T))
    y += SHAPE * SHAPE
    tl.store(y + r, tl.sum(a, 0) + tl.max(a, 1) - tl.min(a, 0))
    y += SHAPE
    tl.store(y, tl.sum(a) + tl.max(a) + tl.sum(tl.sum(a.to(tl.float16), 1), 0))
    y += 1
    tl.store(y + at, tl.cumsum(a, 0) + tl.cumsum(a, 1, reverse=True) + tl.cumprod(a, 1))
    y += SHAPE * SHAPE
    value, index = tl.max(a, 1, return_indices=True)
    tl.store(y + r, value + index + tl.argmin(a, 0))
    y += SHAPE
    best, where = tl.reduce((a, at), 1, _larger)
    tl.store(y + r, best + where)
    y += SHAPE
    b = tl.reshape(a, [SHAPE * SHAPE])
    tl.store(y + tl.arange(0, SHAPE * SHAPE), b)
    y += SHAPE * SHAPE
    joined = tl.join(a, -a)
    left, right = tl.split(joined)
    tl.store(y + at, left - 2 * right)
    y += SHAPE * SHAPE
    tl.store(y + at, tl.exp(a.to(tl.bfloat16)).to(tl.float32) * tl.sigmoid(a) + tl.sqrt(tl.abs(a)) + tl.gather(a, at % SHAPE, 1))
    y += SHAPE * SHAPE
    tl.store(y + r, tl.where(r[:, None] > r[None, :], 1.0, 2.0).sum(1) + i + tl.broadcast_to(tl.load(x + i), [SHAPE]))
    y += SHAPE
    tl.store(y + tl.arange(0, 2 * SHAPE), tl.cat(r + i, r * i, can_reorder=True))


@triton.jit
def adding_kernel(x, y, n):
    i = tl.program_id(0)
    tl.atomic_add(y + i % 3, tl.load(x + i))


@triton.jit
def ticket_kernel(x, y, n):
    i = tl.program_id(0)
    ticket = tl.atomic_add(y, 1.0)
    tl.store(y + 1 + i, ticket)


@triton.jit
def swap_kernel(x, y, n):
    tl.atomic_cas(y, 0.0, tl.program_id(0) + 1.0)


@triton.jit
def waiting_kernel(x, y, n):
    """Each program waits for the one before."""
    i = tl.program_id(0)
    while tl.load(y + i) < 0:
        n += 0
    tl.store(y + i + 1, 1.0)


@triton.jit
def odd_kernel(x, y, n):
    """It reads between two elements, by way of pointers to narrower ones."""
    i = tl.program_id(0)
    p = (x.to(tl.pointer_type(tl.int16)) + 1 + i).to(tl.pointer_type(tl.int32))
    tl.store(y.to(tl.pointer_type(tl.int32)) + i, tl.load(p))


@triton.jit
def nothing_kernel(x, y, n):
    i = tl.program_id(0)
    tl.store(y + i, tl.load(x + i + 100000, mask=i > 100, other=2.0), mask=i < 5)
    tl.store(x + i + 100000, 1.0, mask=i > 100)


@triton.jit
def looking_back_kernel(x, y, n):
    """Each program waits in the body of its loop for what the one before stores."""
    i = tl.program_id(0)
    flag = tl.load(y + i, volatile=True)
    while flag < 0:
        flag = tl.load(y + i, volatile=True)
    tl.store(y + i + 1, flag + 1)


@triton.jit
def scanning_kernel(x, y, n):
    """A loop that reads until it finds something; nobody stores there."""
    i = tl.program_id(0)
    place = i
    while tl.load(x + place) < 0.5:
        place += 1
    tl.store(y + i, place)


@triton.jit
def _wider(a, b):
    if tl.abs(a) > tl.abs(b):
        return a
    return b


@triton.jit
def deciding_kernel(x, y, n):
    """A reduction whose function decides by the value of each element."""
    i, r = tl.program_id(0), tl.arange(0, 4)
    a = tl.load(x + i + r[:, None] * 3 + r[None, :])
    tl.store(y + i * 4 + r, tl.reduce(a, 1, _wider))


@triton.jit
def transposed_kernel(x, y, n, SIZE: tl.constexpr):
    """Sums of transposed blocks, and a product with one's own transpose after a branch."""
    i, r = tl.program_id(0), tl.arange(0, SIZE)
    a = tl.load(x + i + r[:, None] * 31 + r[None, :])
    t = tl.trans(a)
    product = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    if i % 2 == 0:
        product = tl.dot(a, t)
        t = t * 0.5
    y += i * SIZE * (SIZE + 2)
    tl.store(y + r[:, None] * SIZE + r[None, :], product)
    tl.store(y + SIZE * SIZE + r, tl.sum(t * tl.load(x + i), 1) + tl.sum(t))
    tl.store(y + SIZE * SIZE + SIZE + r, tl.sum(tl.where(i > 3, t, 0.0), 0))


@triton.jit
def views_kernel(x, y, n, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """A product of a block, and of the same numbers in a transposed view."""
    m, k, c = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    b = tl.load(x + 7 + k[:, None] * N + c[None, :])
    plain = tl.dot(tl.load(x + m[:, None] * K + k[None, :]), b)
    view = tl.dot(tl.trans(tl.load(x + m[None, :] * K + k[:, None])), b)
    tl.store(y + m[:, None] * N + c[None, :], plain - view)


@triton.jit
def extremes_kernel(x, y, n):
    i = tl.program_id(0)
    nothing = tl.load(x + i) * float("nan")
    tl.store(y + i, min(nothing, 0.5) + max(i, 3) + min(i.to(tl.int64), n))


@triton.jit
def assigned_kernel(x, y, n):
    """The same in the value of an assignment."""
    i = tl.program_id(0)
    least = min(tl.load(x + i) * float("nan"), 0.5)
    tl.store(y + i, least)


@triton.jit
def max(a, b):  # noqa: A001 - a module's own function is what a kernel calls by this name
    return a + b


@triton.jit
def own_extremes_kernel(x, y, n):
    i = tl.program_id(0)
    tl.store(y + i, max(i, 3))


@triton.jit
def flag_kernel(x, y, n):
    """A variable of several types is used, by all and by those who have it."""
    i = tl.program_id(0)
    if i > 8:
        flag = 0.0
        kind = 1
    else:
        flag = i % 3
        kind = 2
    if flag + kind > 2:
        tl.store(y + i, 1.0)


@triton.jit
def _sign(a):
    if a > 0:
        return 1
    return 0


@triton.jit
def constants_kernel(x, y, n):
    i = tl.program_id(0)
    for j in range(i % 3):
        weight = tl.load(x + j + i)
    if i % 3 > 0:
        tl.store(y + i, weight * _sign(weight))
    else:
        tl.store(y + i, -1.0)


@triton.jit
def either_kernel(x, y, n):
    """A pointer into one tensor in some programs and into another in others."""
    i = tl.program_id(0)
    p = y + 100 + i
    if i < 5:
        p = x + i
    tl.store(y + i, tl.load(p) + 1)
    tl.store(tl.where(i % 2 == 0, x + 200 + i, y + 200 + i), 3.0)


@triton.jit
def updates_kernel(x, y, n):
    """Sums of floats depend on the order of programs, and so do updates of several kinds."""
    i = tl.program_id(0)
    tl.atomic_add(y, tl.load(x + i))
    if i % 2 == 0:
        tl.atomic_add(y, tl.load(x + 100 + i) * 1000)
        tl.atomic_xchg(y.to(tl.pointer_type(tl.int32)) + 1, i)
    else:
        tl.atomic_xchg(y.to(tl.pointer_type(tl.int32)) + 1, i)
        tl.atomic_add(y, tl.load(x + 200 + i) * 0.001)
    for j in range(i, n):
        tl.atomic_add(y + 2 + j, tl.load(x + 300 + i + j))
    tl.atomic_min(y.to(tl.pointer_type(tl.int32)) + 41, i)
    tl.atomic_add(y.to(tl.pointer_type(tl.int32)) + 41, i)


@triton.jit
def hidden_kernel(x, y, n):
    """Behind a pair of programs that store the same value, one reads what another stores."""
    i = tl.program_id(0)
    tl.store(y + i // 2, 1.0, mask=i != 3)
    tl.store(y + 100 + i, tl.load(y + i // 2))


@triton.jit
def again_and_again_kernel(x, y, n):
    """Many suspicions that are none, and then a race."""
    i = tl.program_id(0)
    for j in range(6):
        tl.store(y, j * 1.0)
    tl.store(y + 1, i, mask=(i == 2) | (i == 3))


@triton.jit
def zeroing_kernel(x, y, n):
    """One program sets to zero what the others add to, and it is zero already."""
    i = tl.program_id(0)
    if i == 0:
        tl.store(y + 2000, 0.0)
    else:
        tl.atomic_add(y + 2000, 1.0)


@triton.jit
def transient_kernel(x, y, n):
    """One program changes a value and puts it back; the others read it."""
    i = tl.program_id(0)
    old = tl.load(y)
    if i == 0:
        tl.store(y, old + 1)
        tl.store(y, old)
    else:
        tl.store(y + i, old)


@triton.jit
def unused_kernel(x, y, n):
    """Each program reads more than it writes, and does not use the rest."""
    r = tl.arange(0, 4)
    p = y + tl.program_id(0) * 2 + r
    tl.store(p, tl.where(r < 2, tl.load(p) * 2, 0.0), mask=r < 2)


@triton.jit
def described_kernel(x, y, n):
    i = tl.program_id(0)
    d = tl.make_tensor_descriptor(x, shape=[N, 4], strides=[4, 1], block_shape=[1, 4])
    tl.store(y + i * 4 + tl.arange(0, 4)[None, :], d.load([i, 0]))


@triton.jit
def atomic_load_kernel(x, y, n):
    """Triton has such loads since 3.9."""
    i = tl.program_id(0)
    tl.atomic_store(y + i, tl.atomic_load(x + i))


@triton.jit
def parting_kernel(x, y, n):
    """It stores, and then fails in some programs: what it stored must not stay in the way of the reference."""
    i = tl.program_id(0)
    old = tl.load(y + i)
    tl.store(y + i, old + 1)
    tl.atomic_add(y + N + i, 1.0)
    tl.atomic_cas(y + 2 * N, 0.0, 1.0)


@triton.jit
def astray_kernel(x, y, n):
    i = tl.program_id(0)
    tl.store(y + i, 1.0)
    tl.store(y + i + (i == n) * 1000, 2.0)


# races


@triton.jit
def overlapping_kernel(x, y, n):
    at = tl.program_id(0) * 2 + tl.arange(0, 4)
    tl.store(y + at, tl.load(x + at) + tl.program_id(0))


@triton.jit
def equal_kernel(x, y, n):
    at = tl.program_id(0) * 2 + tl.arange(0, 4)
    tl.store(y + at, 0.0)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def neighbour_kernel(x, y, n, BACK: tl.constexpr):
    """In place, from the element beside; lockstep hides what one after another would show, and the other way round."""
    i = tl.program_id(0)
    value = tl.load(y + i + 1) if not BACK else tl.load(y + tl.maximum(i - 1, 0))
    tl.store(y + i, value)


@triton.jit
def own_kernel(x, y, n):
    i = tl.program_id(0)
    tl.store(y + i, tl.load(y + i) * 2)
    tl.store(y + i, tl.load(y + i) + 1)


@triton.jit
def mixed_kernel(x, y, n, READS: tl.constexpr):
    """An atomic beside a plain access of the same bytes."""
    i = tl.program_id(0)
    tl.atomic_add(y, 1.0)
    if i == 5:
        if READS:
            tl.store(y + 1, tl.load(y))
        else:
            tl.store(y, 7.0)


@triton.jit
def every_kernel(x, y, n):
    """Every program stores at the same place: the same, but for one."""
    i = tl.program_id(0)
    tl.store(y, 3.0)
    if i == 9:
        tl.store(y, 4.0)


@triton.jit
def halves_kernel(x, y, n):
    """Two programs share bytes, which they know by other types."""
    i = tl.program_id(0)
    if i == 1:
        tl.store(y.to(tl.pointer_type(tl.int16)) + 1, 7)
    if i == 2:
        tl.store(y, 1.0)


def numbers(count: int = 4096) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(3))


def ran(kernel: Any, x: torch.Tensor, y: torch.Tensor, n: int, how: str, **options: Any) -> tuple[torch.Tensor, str]:
    """What a launch leaves in y, and what it raises."""
    patches.sequential = how == "sequential"
    y = y.clone()
    try:
        kernel[(N,)](x, y, n, **options)
    except (OutOfBounds, Race, triton.runtime.errors.InterpreterError) as error:
        return y, f"{type(error).__name__}: {error}"
    return y, ""


def same(kernel: Any, n: int = 11, *, together: bool = True, width: int = 1 << 16, **options: Any) -> None:
    x, y = numbers(), numbers(width)
    before = sum(launch.one_by_one.values())
    got, raised = ran(kernel, x, y, n, "grid", **options)
    alone = sum(launch.one_by_one.values()) - before
    want, reference = ran(kernel, x, y, n, "sequential", **options)
    assert (raised, reference) == ("", ""), (raised, reference)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32)), f"{(got != want).sum()} of {len(want)} differ"
    assert together == (alone == 0), dict(launch.one_by_one)


def check_places_in_the_file() -> None:
    """Every node of a rewritten kernel is where Python's own functions put it, also one that had no place."""
    for function in (branch_kernel, lengths_kernel, _steps):
        function.rewrite()
        rewriter = function.rewriter
        lines, _ = inspect.getsourcelines(function.fn)
        source = rewriter._prepare_source(lines)
        assert source.startswith(f"def {function.fn.__name__}(")
        assert linecache.getline(rewriter.filename, rewriter.def_file_lineno) == source.splitlines(keepends=True)[0]
        right = rewriter.ast_transformer.visit(ast.parse(source))
        ast.increment_lineno(ast.fix_missing_locations(right), rewriter.def_file_lineno - 1)
        right = ast.dump(right, include_attributes=True)
        assert ast.dump(rewriter._transform_ast(source), include_attributes=True) == right
    trees = ast.parse(source), ast.parse(source)
    for node in [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Call)]:
        del node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
    launch._put_in_file(trees[0], 7)
    ast.increment_lineno(ast.fix_missing_locations(trees[1]), 7)
    assert ast.dump(trees[0], include_attributes=True) == ast.dump(trees[1], include_attributes=True)


def check_branches() -> None:
    same(branch_kernel)


def check_masks() -> None:
    same(masked_kernel)
    same(masked_kernel, 64)


def check_early_returns() -> None:
    same(early_kernel)


def check_loops() -> None:
    same(loop_kernel, LEAVES=False)


def check_loops_that_are_left() -> None:
    same(loop_kernel, LEAVES=True)


def check_ranges() -> None:
    same(stepping_kernel, 40)


def check_whiles_and_calls() -> None:
    same(while_kernel)


def check_choices() -> None:
    same(choice_kernel)


def check_types_that_part() -> None:
    same(widths_kernel)


def check_block_pointers() -> None:
    if Version(triton.__version__) < Version("3.9"):
        same(blocks_kernel, ROWS=2)
        return
    x = numbers()
    with pytest.raises(UnknownTriton, match="Block pointers have been removed"):
        blocks_kernel[(N,)](x, x, 11, ROWS=2)


def check_operations() -> None:
    same(operations_kernel, SHAPE=4)
    same(operations_kernel, SHAPE=8)


def check_atomics() -> None:
    same(adding_kernel)


def check_what_cannot_run_together() -> None:
    for kernel, why in (
        (ticket_kernel, "value that an atomic returns"),
        (swap_kernel, "atomic_cas"),
        (described_kernel, "descriptor"),
        (odd_kernel, "between two elements"),
        *([(atomic_load_kernel, "atomic load")] if hasattr(tl, "atomic_load") else []),
    ):
        launch.one_by_one.clear()
        same(kernel, together=False)
        assert any(why in reason for reason in launch.one_by_one), dict(launch.one_by_one)


def check_programs_that_wait_for_others_run_one_after_another() -> None:
    patches.sequential = False
    y = torch.full((N + 1,), -1.0)
    y[0] = 1
    waiting_kernel[(N,)](numbers(), y, 11)
    assert y.tolist() == [1.0] * (N + 1)


def check_programs_that_look_back_run_one_after_another() -> None:
    patches.sequential = False
    y = torch.full((N + 1,), -1.0)
    y[0] = 1
    looking_back_kernel[(N,)](numbers(), y, 11)
    assert y.tolist() == [1.0 + i for i in range(N + 1)]


def check_loops_that_read() -> None:
    same(scanning_kernel)


def check_reductions_that_decide() -> None:
    same(deciding_kernel, together=False)


def check_transposed_blocks() -> None:
    for size in (4, 16, 32, 64):
        same(transposed_kernel, width=1 << 17, SIZE=size)


def check_transposed_views() -> None:
    for m, k, n in ((16, 32, 8), (16, 16, 16), (32, 32, 32), (64, 64, 1)):
        for how in ("grid", "sequential"):
            left, raised = ran(views_kernel, numbers(), torch.ones(m * n), 11, how, M=m, K=k, N=n)
            assert (raised, left.count_nonzero().item()) == ("", 0), (m, k, n, how, raised)


def check_extremes() -> None:
    same(extremes_kernel)
    for how in ("grid", "sequential"):
        y, raised = ran(assigned_kernel, numbers(), torch.zeros(N), 11, how)
        assert (raised, y.tolist()) == ("", [0.5] * N), (raised, y)
    same(own_extremes_kernel)


def check_variables_of_some() -> None:
    same(flag_kernel, together=False)
    same(constants_kernel)


def check_pointers_into_two_tensors() -> None:
    same(either_kernel)


def check_the_order_of_updates() -> None:
    same(updates_kernel)


def check_many_lengths() -> None:
    """A loop whose programs all take another number of turns, more than Python lets calls nest."""
    x, y = torch.arange(1200.0), torch.zeros(1200)
    patches.sequential = False
    before = sum(launch.one_by_one.values())
    lengths_kernel[(1200,)](x, y)
    assert torch.equal(y, torch.arange(1200.0)), y
    assert sum(launch.one_by_one.values()) == before, dict(launch.one_by_one)


def check_masks_that_are_false_everywhere() -> None:
    same(nothing_kernel)


def check_memory_is_put_back() -> None:
    same(parting_kernel, together=False)


def check_strays_are_told_as_before() -> None:
    x, y = numbers(), numbers(N)
    got, reference = ran(astray_kernel, x, y, 3, "grid"), ran(astray_kernel, x, y, 3, "sequential")
    assert got[1] == reference[1], (got[1], reference[1])
    assert got[1].startswith("OutOfBounds: astray_kernel stores 1 element"), got[1]
    assert torch.equal(got[0], reference[0])


def check_slices() -> None:
    """A grid is cut into slices: of one program, of a few, and of what fits once the kernel's blocks are known."""
    for count in (1, 3, 7):
        with mock.patch.object(launch, "PROGRAMS", count), mock.patch.object(launch, "ELEMENTS", 12):
            for kernel in (branch_kernel, early_kernel, stepping_kernel, choice_kernel, masked_kernel, adding_kernel):
                launch._blocks.clear()
                same(kernel)
            launch._blocks.clear()
            raced(overlapping_kernel, "both write")
    assert launch._blocks


@triton.jit
def repeated_kernel(x, y, n, times):
    i = tl.program_id(0)
    if i < n:
        tl.store(y + i, tl.load(y + i) + times * tl.load(x + i))


@triton.jit
def address_kernel(x, y, n):
    i = tl.program_id(0)
    tl.store(y + i, (x + i).to(tl.int64))


def check_a_launch_that_ran_before_gives_what_it_gave() -> None:
    """In the same memory, in other memory, and again behind launches in which one thing that a program sees is other."""

    def run(x: torch.Tensor, y: torch.Tensor, n: int = N, times: Any = 3, programs: int = N) -> int:
        before = repeats.repeated["repeated_kernel"]
        repeated_kernel[(programs,)](x, y, n, times)
        return repeats.repeated["repeated_kernel"] - before

    x, y = torch.arange(2.0 * N), torch.zeros(2 * N)
    first = {"x": x[:N], "y": y[:N]}

    def equal(repeated: int, want: torch.Tensor, **others: Any) -> None:
        given = {**{name: value.clone() for name, value in first.items()}, **others}
        assert run(**given) == repeated, (others, "was run" if repeated else "was not run")
        assert torch.equal(given["y"].double(), want.double()), others

    with patches.keeping_launches():
        want = 3 * x[:N]
        equal(0, want)
        equal(1, want)
        equal(1, want, x=x[:N].clone(), y=torch.zeros(N))
        other = first["x"].clone()
        other[N - 1] = 100
        equal(0, torch.cat([want[:-1], torch.tensor([300.0])]), x=other)
        equal(0, want + 1, y=torch.ones(N))
        equal(0, 3.5 * x[:N], times=3.5)
        equal(0, 3.0 * x[:N], times=3.0)
        equal(0, 3 * x[:N] * (torch.arange(N) < 5), n=5)
        equal(0, 3 * x[:N] * (torch.arange(N) < 4), programs=4)
        equal(0, want, y=torch.zeros(N, dtype=torch.int32))
        equal(0, want, x=x[:N])  # in a larger memory
        equal(0, 3 * x[1 : N + 1], x=x[1 : N + 1])
        equal(1, 3 * x[1 : N + 1], x=x[1 : N + 1])
        both = x[:N].clone()  # one tensor twice
        assert not run(both, both)
        assert torch.equal(both, 4 * x[:N])
        equal(1, want)


def check_a_launch_that_sees_an_address_runs_again() -> None:
    with patches.keeping_launches():
        for _ in range(2):
            x, y = torch.zeros(N), torch.zeros(N, dtype=torch.int64)
            address_kernel[(N,)](x, y, N)
            assert torch.equal(y, x.data_ptr() + 4 * torch.arange(N))
        assert not patches.kept, "a launch that sees an address was kept"


def check_a_launch_that_ran_before_took_its_branches() -> None:
    with patches.keeping_launches():
        found = []
        for _ in range(2):
            with branches.recorded() as blocks:
                repeated_kernel[(N,)](torch.full((N,), 7.0), torch.zeros(N), N - 1, 2)
            found.append({name: sorted(ran) for name, (_, ran) in blocks.items()})
    assert found[0] == found[1] != {}


def check_few_launches_are_kept() -> None:
    with patches.keeping_launches(), mock.patch.object(repeats, "KEPT_BYTES", 1000):
        for number in range(40):
            repeated_kernel[(N,)](torch.full((N,), float(number)), torch.zeros(N), N, 5)
        assert sum(kept.bytes for kept in patches.kept.values()) == 1000 // (4 * N) * 4 * N
    with patches.keeping_launches(), mock.patch.object(repeats, "MOST_BYTES", 8 * N - 1):
        repeated_kernel[(N,)](torch.ones(N), torch.zeros(N), N, 5)
        assert not patches.kept
    assert patches.kept is None


def raced(kernel: Any, *words: str, **options: Any) -> str:
    """A launch in which programs race leaves memory as it was, and says which programs, where."""
    x, y = numbers(), numbers()
    got, raised = ran(kernel, x, y, 11, "grid", **options)
    assert raised.startswith("Race: program ("), raised or "no race"
    assert all(word in raised for word in words), (raised, words)
    assert torch.equal(got, y), "a race leaves memory changed"
    return raised


def calm(kernel: Any, **options: Any) -> None:
    _, raised = ran(kernel, numbers(), numbers(), 11, "grid", **options)
    assert not raised, raised


def check_overlapping_stores_race() -> None:
    raised = raced(overlapping_kernel, "both write y[")
    assert raised == "Race: program (0,) and (1,) both write y[2]", raised


def check_stores_beside_loads_race() -> None:
    raced(neighbour_kernel, "reads", "writes", "y[", BACK=False)
    raced(neighbour_kernel, "reads", "writes", "y[", BACK=True)


def check_atomics_beside_plain_accesses_race() -> None:
    raced(mixed_kernel, "update", "read", "y[0]", READS=True)
    raced(mixed_kernel, "update", "write", "y[0]", READS=False)


def check_one_store_that_differs_races() -> None:
    raced(every_kernel, "both write y[0]")


def check_races_behind_what_is_none() -> None:
    raced(hidden_kernel, "reads", "writes", "y[1]")
    raced(again_and_again_kernel, "both write y[1]")


def check_a_store_beside_updates_races_whatever_it_stores() -> None:
    x, y = numbers(), numbers()
    y[2000] = 0
    _, raised = ran(zeroing_kernel, x, y, 11, "grid")
    assert raised.startswith("Race: program (0,) writes and ("), raised
    raced(transient_kernel, "writes", "reads", "y[0]")


def check_what_is_read_and_not_used_is_no_race() -> None:
    calm(unused_kernel)
    same(unused_kernel, together=False)


def check_bytes_of_other_types_race() -> None:
    raced(halves_kernel, "program (1,) and (2,) both write y[0]")


def check_equal_stores_are_no_race() -> None:
    calm(equal_kernel)
    same(equal_kernel, together=False)  # side by side it looks like a race, and each program alone shows that it is none


def check_a_programs_own_memory_is_no_race() -> None:
    calm(own_kernel)
    same(own_kernel)
    calm(adding_kernel)


def check_a_view_is_named_by_its_element() -> None:
    patches.sequential = False
    whole = torch.zeros(4, 100)
    y = whole[1:, 10:60].T  # element (i, j) of y lies at 110 + i + 100 j of the memory
    with pytest.raises(Race, match=r"^program \(0,\) and \(1,\) both write y\[2, 0\]$") as caught:
        overlapping_kernel[(N,)](numbers(), y, 11)
    assert caught.value.place.startswith("grid_kernels.py:"), caught.value.place


# faults of the interpreter, each of which some check must see


def _first_group_for_all(data: Any) -> Any:
    return data.reshape(-1)[0]


def _last_wins(parts: list[tuple[Any, Any]], count: int) -> Any:
    return parts[-1][1]


def _shortest_loop(arguments: list[Any], step: Any) -> Any:
    turns, counts = ranges(arguments, step)
    return (turns, counts) if counts is None else (turns, np.full_like(counts, counts.min()))


def _nobody(self: Any, *_: Any) -> Any:
    return np.zeros(1, dtype=np.int32)


def _one_pair(self: Any, others: Any, programs: Any, where: Any) -> None:
    if not self.suspects:
        suspect(self, others, programs, where)


def _names_of_all(self: Any, name: str) -> Any:
    if self.outer is None:
        raise KeyError(name)
    return self.outer[name]


def _unmasked(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> None:
    self._store(pointers, value, None)


def _by_numbers(self: Any, values: Any, programs: Any) -> Any:
    """A digest of everything but the bytes of tensors."""
    digest(self, values, programs)
    seen = [value if not isinstance(value, torch.Tensor) else (value.dtype, value.storage_offset()) for value in values.values()]
    return repr((programs, seen)).encode()


digest = repeats.Repeat._digest
ranges, suspect = grid.ranges, memory.Memory._suspect
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "decides for all by the first": (operations, "agreed", _first_group_for_all),
    "keeps the last group's values": (grid, "merged", _last_wins),
    "ends loops with the shortest": (grid, "ranges", _shortest_loop),
    "forgets who touched what": (races.Shadow, "others", _nobody),
    "does not put memory back": (memory.Memory, "rollback", lambda self: None),
    "believes every suspicion": (launch, "conflicts", lambda one, other: [("write", "write", 0)]),
    "believes no suspicion": (launch, "conflicts", lambda one, other: []),
    "believes that what is read is used": (launch, "writes_the_same", lambda one, other: False),
    "updates in the order of statements": (
        memory.Memory,
        "queue",
        lambda self, kind, apply, places, values, _: apply(places, values),
    ),
    "settles one pair": (memory.Memory, "_suspect", _one_pair),
    "does not look at loads": (memory.Memory, "loading", lambda self, *_: None),
    "stores under no mask": (operations.GridBuilder, "create_masked_store", _unmasked),
    "gives each program the variables of all": (Names, "__missing__", _names_of_all),
    "broadcasts nothing": (operations, "full", lambda handle: handle.data),
    "knows a launch by its numbers": (repeats.Repeat, "_digest", _by_numbers),
    "keeps a launch that sees an address": (memory.Memory, "by_address", property(lambda self: False, lambda self, value: None)),
    "forgets the branches of a launch": (branches, "ran", lambda numbers: None),
    "counts no bytes of a launch": (repeats.Kept, "bytes", property(lambda self: 0)),
    "counts lines from the top of a kernel": (launch, "_put_in_file", lambda tree, lines: ast.fix_missing_locations(tree)),
}


DEAR = ("many_lengths", "operations", "slices", "transposed_blocks", "transposed_views")  # others see most faults before these


def trouble(check: Callable[[], None]) -> str:
    """What a check fails with, "" if it holds."""
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc(limit=-3)
    return ""


def answer(_: dict[str, Any]) -> dict[str, Any]:
    checks = {name.removeprefix("check_"): value for name, value in globals().items() if name.startswith("check_")}
    report: dict[str, Any] = {name: trouble(check) for name, check in checks.items()}
    report["faults"], first = {}, sorted(checks, key=DEAR.__contains__)
    for fault, (owner, name, wrong) in FAULTS.items():
        with mock.patch.object(owner, name, wrong):
            report["faults"][fault] = next((name for name in first if trouble(checks[name])), "")
    return report
