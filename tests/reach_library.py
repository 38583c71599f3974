"""A library under test: a gate with an option that is wrong, a norm with a branch that is wrong, and wrappers as libraries have."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def gate(
    a: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    fast: bool = False,  # noqa: FBT001, FBT002 - as libraries have it
    *,
    floor: float = 0.0,
    **more: Any,
) -> Tensor:
    """The log-decay. With `fast` it forgets dt_bias: wrong, and no adapter passes it."""
    wide = a.float() if dt_bias is None or fast else a.float() + dt_bias
    return -A_log.exp() * torch.nn.functional.softplus(wide) - floor - more.get("extra", 0.0)


def long_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """The log-decay. Over many tokens it forgets dt_bias: wrong, and no case has so many."""
    if a.dim() < 3:
        raise ValueError(
            f"a must have tokens and heads, got {a.dim()} axes"  # a statement of several lines
        )
    wide = a.float()
    if dt_bias is not None:
        wide = torch.add(
            wide,
            dt_bias,
        )
    if (
        a.shape[1] > 100_000  # the condition has a line of its own
    ):
        wide = a.float()
    return -A_log.exp() * torch.nn.functional.softplus(wide)


def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as dispatchers have it; it calls another function with the tensors first."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        accepts(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def accepts(*args: Any, **kwargs: Any) -> bool:
    return bool(args or kwargs)


wrapped_gate = passing_on(gate)


class Norm(torch.nn.Module):
    """The L2 norm as a module."""

    def __init__(self, eps: float = 1e-6, *, rms: bool = False) -> None:
        super().__init__()
        self.eps, self.rms = eps, rms

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = l2norm(x, self.eps)
        return y if residual is None else y + residual


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = torch.empty_like(rows)
    if len(rows):
        l2norm_kernel[len(rows),](rows.contiguous(), y, eps, x.shape[-1], triton.next_power_of_2(x.shape[-1]))
    return y.reshape(x.shape)


@triton.jit
def l2norm_kernel(x, y, eps, D: tl.constexpr, BD: tl.constexpr):
    """One row a program. Rows of more than 4096 channels are not normalised: wrong, and no case is so wide."""
    row, lanes = tl.program_id(0), tl.arange(0, BD)
    b_x = tl.load(x + row * D + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    total = tl.sum(b_x * b_x) if D <= 4096 else tl.sum(b_x * 0.0) + 1.0
    if D > 4096:  # noqa: SIM108
        b_y = b_x
    else:
        b_y = b_x / tl.sqrt(total + eps)
    tl.store(y + row * D + lanes, b_y.to(y.dtype.element_ty), mask=lanes < D)
