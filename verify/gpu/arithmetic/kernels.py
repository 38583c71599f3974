"""The Triton kernels of the probes, and the operations that they make of a device. Import it in a worker process."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # rows and columns of a product, and the terms that one tl.dot adds
BLOCK = 256


@triton.jit
def dot_kernel(a, b, c, out, K, M: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr):
    """Out = c + a @ b for a [.., K], b [K, N], c [.., N]; a program has M rows."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    column, term = tl.arange(0, N), tl.arange(0, DEPTH)
    total = tl.load(c + row[:, None] * N + column[None, :])
    for start in range(0, K, DEPTH):
        x = tl.load(a + row[:, None] * K + (start + term)[None, :])
        y = tl.load(b + (start + term)[:, None] * N + column[None, :])
        total = tl.dot(x, y, total) if PRECISION == "" else tl.dot(x, y, total, input_precision=PRECISION)
    tl.store(out + row[:, None] * N + column[None, :], total)


@triton.jit
def function_kernel(x, y, out, NAME: tl.constexpr, N: tl.constexpr):
    """Out = the function NAME of x, and of y if it has two arguments."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    one, other = tl.load(x + at), tl.load(y + at)
    if NAME == "exp":
        result = tl.exp(one)
    elif NAME == "exp2":
        result = tl.exp2(one)
    elif NAME == "log":
        result = tl.log(one)
    elif NAME == "log2":
        result = tl.log2(one)
    elif NAME == "sqrt":
        result = tl.sqrt(one)
    elif NAME == "rsqrt":
        result = tl.rsqrt(one)
    elif NAME == "sigmoid":
        result = tl.sigmoid(one)
    elif NAME == "/":
        result = one / other
    else:
        result = one * one - other * other
    tl.store(out + at, result)


@triton.jit
def scan_kernel(x, out, N: tl.constexpr):
    """Out [rows, N + 1] = the cumulative sum of each row of x [rows, N], and its sum."""
    row, at = tl.program_id(0), tl.arange(0, N)
    values = tl.load(x + row * N + at)
    tl.store(out + row * (N + 1) + at, tl.cumsum(values))
    tl.store(out + row * (N + 1) + N, tl.sum(values))


@triton.jit
def cast_kernel(x, out, N: tl.constexpr):
    """Out = x in the dtype of out."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def add_kernel(x, out, N: tl.constexpr):
    """Add every x to the one number of out, atomically."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.atomic_add(out + at * 0, tl.load(x + at))


class Operations:
    """What probes call: Triton's kernels and torch, on one device. Tensors go in and come out on the CPU.

    `points` is how many numbers a function is tried on, and `added` how many numbers an atomic sum has, in each dtype of `atomics`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, on_gpu = device, device.type == "cuda"
        self.points, self.added = (1 << 20, 1 << 16) if on_gpu else (1 << 15, 1 << 10)
        self.atomics = (torch.float32, torch.float16, *((torch.bfloat16,) if on_gpu else ()))  # the interpreter has no bfloat16

    def dot(self, a: Tensor, b: Tensor, total: Tensor | None = None, precision: str | None = None, rows: int = TILE) -> Tensor:
        """Return total + a @ b in float32, with a [64 n, 64 m] and b [64 m, 64], in programs of 16 or 64 rows."""
        total = torch.zeros(len(a), TILE) if total is None else total
        a, b, total = (x.to(self.device).contiguous() for x in (a, b, total))
        out = torch.empty_like(total)
        dot_kernel[(len(a) // rows,)](a, b, total, out, a.shape[1], rows, TILE, TILE, precision or "", num_stages=1)
        return out.cpu()

    def matmul(self, a: Tensor, b: Tensor, *, tf32: bool) -> Tensor:
        """Return torch's a @ b of float32, where torch may use TF32 or may not."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            return (a.to(self.device) @ b.to(self.device)).cpu()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def function(self, name: str, x: Tensor, y: Tensor, *, fusion: bool = True) -> Tensor:
        """Return a function of float32 numbers by name. "x*x - y*y" is one; `fusion` says whether it may become an fma."""
        size = x.numel()
        padded = torch.ones(2, -(-size // BLOCK) * BLOCK)
        padded[0, :size], padded[1, :size] = x, y
        one, other = padded.to(self.device)
        out = torch.empty_like(one)
        options = {} if fusion else {"enable_fp_fusion": False}
        function_kernel[(one.numel() // BLOCK,)](one, other, out, name, BLOCK, **options)
        return out[:size].cpu()

    def scan(self, x: Tensor, warps: int) -> tuple[Tensor, Tensor]:
        """Return the cumulative sums and the sum of each row of x, from a kernel with so many warps."""
        out = torch.empty(len(x), x.shape[1] + 1, device=self.device)
        scan_kernel[(len(x),)](x.to(self.device), out, x.shape[1], num_warps=warps)
        out = out.cpu()
        return out[:, :-1], out[:, -1]

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return float32 numbers, a multiple of 256, in another dtype."""
        out = torch.empty(x.numel(), dtype=dtype, device=self.device)
        cast_kernel[(x.numel() // BLOCK,)](x.to(self.device), out, BLOCK)
        return out.cpu()

    def atomic_sum(self, x: Tensor) -> Tensor:
        """Return the sum of all x, a multiple of 256 numbers, that atomic additions in the dtype of x make."""
        out = torch.zeros(1, dtype=x.dtype, device=self.device)
        add_kernel[(x.numel() // BLOCK,)](x.to(self.device), out, BLOCK)
        return out.cpu()
