"""Views whose tokens, heads, sequences or slots lie 2^29 elements or more apart, so that an offset computed in 32 bits wraps.

The memory of such a view is reserved and touched only where the view has numbers. A wrapped offset lies up to 2^31 elements before
the view, where the memory is reserved too and holds zeros.
"""

import math
import mmap
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from properties.laws import Blind, along
from properties.strategies import Example

SPAN = 2**31  # elements from the first to the last index, one more than an offset of 32 bits can reach
LEAST = 5  # indices of an axis: neighbours lie 2^29 elements apart, which 32 bits can hold, unlike the product with the last index
# For each variant, the letters of the axes along which tensors are far.
FAR = {"far_tokens": ("T",), "far_heads": ("H", "HV"), "far_sequences": ("B", "N")}
_ALIGNED = 64  # bytes, and elements between neighbours: kernels may read several elements at once
_NORESERVE = 0x4000  # mmap.MAP_NORESERVE of Linux, which Python names from 3.13 on: the memory counts when it is touched


def lacks_far(case: Any, variant: str | None) -> str | None:
    """Return what a case lacks to have tensors that are far along an axis of the variant, or None."""
    rows = len(case.lengths)
    tokens = sum(case.lengths) if getattr(case, "packed", False) else max(case.lengths, default=0)
    heads = max(getattr(case, name, 1) for name in ("heads", "value_heads"))
    counts = {"far_tokens": tokens, "far_heads": heads, "far_sequences": rows, "far_slots": getattr(case, "slots", 0)}
    count = counts.get(variant or "", LEAST)
    return None if count >= LEAST else f"{LEAST} {(variant or '').removeprefix('far_')} or more"


def far_examples(choices: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Example]:
    """Return a strategy for examples of the variants in `choices`, whose strategies draw cases."""

    @st.composite
    def draw(draw: st.DrawFn) -> Example:
        chance = draw(st.randoms(use_true_random=True))
        variant = chance.choice(tuple(choices))
        return Example(draw(choices[variant].filter(lambda case: lacks_far(case, variant) is None)), None, variant)

    return draw()


def far(spec: Any, tensors: Mapping[str, Tensor], variant: str) -> dict[str, Tensor]:
    """Return copies of the tensors; those with an axis of the variant lie far along it. Blind if there is no such tensor.

    The tensors have the axes that `spec` gives to their names.
    """
    places = {name: axis for name, x in tensors.items() if (axis := _axis(spec, name, variant, x)) is not None}
    if not places:
        raise Blind(f"no tensor has {LEAST} {variant.removeprefix('far_')}")
    return {**tensors, **apart({name: tensors[name] for name in places}, places)}


def apart(tensors: Mapping[str, Tensor], axes: Mapping[str, int], span: int = SPAN) -> dict[str, Tensor]:
    """Return copies of the tensors in one memory, whose indices of an axis lie `span` / (n - 1) elements or more apart.

    All other axes are contiguous. An axis must have LEAST indices or more. Blind if the memory cannot be reserved.
    """
    widest = max(x.element_size() for x in tensors.values())
    front = SPAN * widest
    begin, layouts = front, {}
    for name, x in tensors.items():
        axis, inner = axes[name], [size for place, size in enumerate(x.shape) if place != axes[name]]
        steps = [math.prod(inner[place + 1 :]) for place in range(len(inner))]
        steps.insert(axis, _up(-(-span // (x.shape[axis] - 1))))
        layouts[name] = steps, begin // x.element_size()
        # The numbers of an index lie within this block, whatever the index and the dtype: the blocks of two tensors never meet.
        begin += _up(math.prod(inner) * x.element_size())
    last = max((x.shape[axes[name]] - 1) * layouts[name][0][axes[name]] * x.element_size() for name, x in tensors.items())
    memory = reserved(_up(begin + last), next(iter(tensors.values())).device)
    return {name: memory.view(x.dtype).as_strided(x.shape, *layouts[name]).copy_(x.detach()) for name, x in tensors.items()}


def _axis(spec: Any, name: str, variant: str, x: Tensor) -> int | None:
    """Return the first axis of a variant's letters that has enough indices, or None."""
    axes = (along(spec, name, letter) for letter in FAR[variant])
    return next((axis for axis in axes if axis is not None and x.shape[axis] >= LEAST and x.numel()), None)


def _up(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def reserved(size: int, device: torch.device) -> Tensor:
    """Return `size` bytes of memory that is taken from the system where it is touched; on a GPU all of it is taken."""
    what = f"{size / 2**30:.0f} GiB cannot be reserved"
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < 5 / 4 * size:
            raise Blind(f"{what}: the GPU has {free / 2**30:.0f} GiB of free memory")
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if device.type != "cpu":
        raise Blind(f"memory of {device.type} cannot be reserved")
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise Blind(f"{what}: {error}") from None
