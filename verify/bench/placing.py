"""Where the tensors of a call lie in memory."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.laws.law import Cotangents
from properties.words.domain import INDICES
from verify.bench.guards import Guards


def tensors_of(inputs: Inputs, cotangents: Cotangents) -> dict[str, Tensor]:
    """The tensors of a call by name, for findings about the memory around them."""
    named = {f"input {name}": x for name, x in inputs.items() if isinstance(x, Tensor)}
    return named | {f"cotangent of {name}": x for name, x in (cotangents or {}).items()}


def between(inputs: Inputs, cotangents: Cotangents, guards: Guards) -> tuple[Inputs, Cotangents]:
    """The call with its tensors between guards."""
    guarded = inputs.replaced(**{name: guards.tensors[f"input {name}"] for name, x in inputs.items() if isinstance(x, Tensor)})
    return guarded, cotangents and {name: guards.tensors[f"cotangent of {name}"] for name in cotangents}


def in_layout(inputs: Inputs, layout: str | None) -> Inputs:
    """The inputs with the states of a pool in the order in memory that the domain names; a pool that has it is not copied."""
    if layout != "vk" or not len(inputs.pool) or (inputs.pool.stride(-2) == 1 and inputs.pool[0].mT.is_contiguous()):
        return inputs
    return inputs.replaced(pool=inputs.pool.mT.clone(memory_format=torch.contiguous_format).mT)


def placed(domain: Any, x: Tensor) -> Tensor:
    """The tensor, or a copy as an allocator makes one if the domain does not promise to take such strides."""
    views = domain.of_call.views
    return x if views is True or (views and _is_view(x, views)) else as_allocated(x)


def _is_view(x: Tensor, views: Collection[str]) -> bool:
    """Whether the strides of a tensor are of one of these kinds (VIEWS)."""
    if not x.is_floating_point() and not x.is_contiguous():
        return INDICES in views
    steps = [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]
    last = x.shape[-1:].numel() <= 1 or x.stride(-1) == 1
    if x.is_contiguous():
        return not {"offset", "sliced"}.isdisjoint(views)
    if 0 in steps:
        return "expanded" in views
    if last and steps == sorted(steps, reverse=True):
        return "sliced" in views
    return ("transposed" if not last and x.ndim > 1 and x.stride(-2) == 1 else "strided") in views


def as_allocated(x: Tensor) -> Tensor:
    """The tensor as an allocator makes one: contiguous, or with its last two axes swapped, from a multiple of 16 bytes on.

    A tensor that is so already is returned itself.
    """
    contiguous = x.is_contiguous() or (x.ndim > 1 and x.mT.is_contiguous())
    return x if contiguous and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def refill(x: Tensor, numbers: Tensor) -> None:
    """Put other numbers into a tensor. The version of indices increases, that of floats does not.

    Optimizers and weight loaders write through `.data`, so an implementation may keep nothing for a version of a weight.
    """
    with torch.no_grad():
        (x.data if x.is_floating_point() else x).copy_(numbers)


def shares_a_slot(inputs: Inputs) -> bool:
    """Whether several padding requests have the same slot of a pool, so that several programs may write to it."""
    slots, padding = inputs.get("slots"), inputs.get("padding")
    return isinstance(slots, Tensor) and isinstance(padding, int) and padding >= 0 and int((slots == padding).sum()) > 1
