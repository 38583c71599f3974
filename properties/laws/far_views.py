"""Views whose last token, head, sequence or slot lies 2^31 elements or more behind the first, so that an offset in 32 bits wraps.

A kernel may compute the first token of a block in 64 bits, and the offsets in the block in 32 bits. That is right for every tensor
whose tokens have fewer than 2^31 / 128 elements each. So there are many tokens, and two in a block do not lie 2^31 elements apart.
A kernel for short sequences, such as a decode kernel, gets no tensor of 2^31 elements. Its tokens, heads and sequences are
therefore never drawn far apart.

The memory of such a view is reserved and touched only where the view has numbers. A wrapped offset lies up to 2^31 elements before
the view, where the memory is reserved too and holds zeros.
"""

import dataclasses
import functools
import math
import mmap
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from properties.laws.law import Blind, along
from properties.words.example import Example

SPAN = 2**31  # elements from the first to the last index, one more than an offset of 32 bits can reach
LEAST = 5  # indices of an axis: neighbours lie 2^29 elements apart, which 32 bits can hold, unlike the product with the last index
LEAST_TOKENS = 130  # the first and the last of 128 tokens in a block lie fewer than 2^31 elements apart
# For each variant, the letters of the axes along which tensors are far.
FAR = {"far_tokens": ("T",), "far_heads": ("H", "HV"), "far_sequences": ("B", "N")}
_ALIGNED = 64  # bytes, and elements between neighbours: kernels may read several elements at once
_NORESERVE = 0x4000  # mmap.MAP_NORESERVE of Linux, which Python names from 3.13 on: the memory counts when it is touched


def is_far(variant: str | None) -> bool:
    """Whether cases of a variant of a law have tensors that are far along an axis. Each takes gigabytes."""
    return (variant or "").startswith("far_")


def lacks_far(case: Any, variant: str | None) -> str | None:
    """Return what a case lacks to have tensors that are far along an axis of the variant, or None."""
    rows = len(case.lengths)
    tokens = sum(case.lengths) if getattr(case, "packed", False) else max(case.lengths, default=0)
    heads = max(getattr(case, name, 1) for name in ("heads", "value_heads"))
    counts = {"far_tokens": tokens, "far_heads": heads, "far_sequences": rows, "far_slots": getattr(case, "slots", 0)}
    least = LEAST_TOKENS if variant == "far_tokens" else LEAST
    return None if counts.get(variant or "", least) >= least else f"{least} {(variant or '').removeprefix('far_')} or more"


def can_be_far(domain: Any) -> bool:
    """Whether the domain of rules, modules, pools or layers has sequences long enough for tokens, heads and sequences far apart."""
    longest = getattr(domain, "most_tokens", domain.longest)
    return longest is None or longest >= _tokens_of(domain)


def require_long(domain: Any) -> None:
    """Blind if the domain is for short sequences."""
    if not can_be_far(domain):
        raise Blind(f"no sequence of the domain has {LEAST_TOKENS} tokens, so no tensor has 2^31 elements")


def _tokens_of(domain: Any) -> int:
    step: int = domain.length_step
    return -(-LEAST_TOKENS // step) * step


@st.composite
def far_examples(draw: st.DrawFn, domain: Any, choices: Mapping[str, st.SearchStrategy[Any]]) -> Example:
    """Draw an example of a variant in `choices`, whose strategies draw cases; far_tokens makes them longer."""
    chance = draw(st.randoms(use_true_random=True))
    variant = chance.choice(tuple(choices))
    longer = functools.partial(_longer, tokens=_tokens_of(domain)) if variant == "far_tokens" else lambda case: case
    return Example(draw(choices[variant].map(longer).filter(lambda case: lacks_far(case, variant) is None)), None, variant)


def _longer(case: Any, tokens: int) -> Any:
    """Return the case with so many tokens in one sequence of a packed call, or in each of up to three rows of a batch."""
    rows = len(case.lengths) if case.packed else min(len(case.lengths), 3)
    some = [row for row in range(rows) if case.lengths[row]] or [0]  # a sequence without tokens may have to stay behind the others
    longest = some[case.seed % len(some)]
    lengths = [tokens if not case.packed or row == longest else length for row, length in enumerate(case.lengths[:rows])]
    return dataclasses.replace(case, lengths=tuple(lengths), **({"drafts": "chain"} if hasattr(case, "drafts") else {}))


def far(domain: Any, spec: Any, tensors: Mapping[str, Tensor], variant: str) -> dict[str, Tensor]:
    """Return copies of the tensors; those with an axis of the variant lie far along it.

    The tensors have the axes that `spec` gives to their names. Blind if none has such an axis, or if the domain is for short
    sequences.
    """
    require_long(domain)
    least = LEAST_TOKENS if variant == "far_tokens" else LEAST
    axes = {name: [axis for letter in FAR[variant] if (axis := along(spec, name, letter)) is not None] for name in tensors}
    enough = {name: [axis for axis in axes[name] if x.shape[axis] >= least and x.numel()] for name, x in tensors.items()}
    places = {name: several[0] for name, several in enough.items() if several}
    if not places:
        raise Blind(f"no tensor has {least} {variant.removeprefix('far_')}")
    return {**tensors, **apart({name: tensors[name] for name in places}, places)}


def far_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors [B, T, ...] whose tokens all lie equally far apart, a row's behind those of the row before.

    The last row's first token lies SPAN elements or more behind the first token of all; in a single row the last token does.
    """
    rows = {name: x.flatten(0, 1) for name, x in tensors.items()}
    batch = next(iter(tensors.values())).shape[0]
    # Of B >= 2 rows with B T tokens, the last row's first token lies at (B - 1) T / (B T - 1) >= 1/2 of the span.
    views = apart(rows, dict.fromkeys(rows, 0), SPAN if batch == 1 else 2 * SPAN)
    return {name: views[name].unflatten(0, x.shape[:2]) for name, x in tensors.items()}


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
