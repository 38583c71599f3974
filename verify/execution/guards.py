"""Guards: an input lies inside a larger allocation, whose other elements are NaN.

A kernel that reads beyond an input and multiplies what it read by zero gets NaN, and one that writes there is found. For integers,
whose numbers no multiplication keeps, the guard holds a number that is no index of a test case. Interpreted kernels know the memory
of the input itself (verify/interpreter/memory.py), so a read of a guard is an access outside a tensor there.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from verify.interpreter import memory

UNPOISONED = "GDN_VERIFY_UNPOISONED"  # environment variable of a worker: memory is as the implementation leaves it, for a sanitizer
# Elements on each side. As many bytes are a multiple of every alignment for which kernels are compiled. A tile of 64 tokens that is
# read whole, or the next token of the same head, begins within so many elements.
GUARD = 2**12
NO_INDEX = {1: 99, 2: 29999, 4: 29999, 8: 29999}  # by the bytes of an integer


class Guards:
    """Copies of tensors between guards. `tensors` has them by name.

    A tensor is taken as it is if it shares its memory with other numbers, has none, or if `around` is False.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, around: bool = True) -> None:
        around = around and not os.environ.get(UNPOISONED)
        self._wide = {name: wide for name, x in tensors.items() if (wide := _between(x) if around else None) is not None}
        self.tensors = {
            name: self._wide[name].as_strided(x.shape, x.stride(), GUARD) if name in self._wide else x
            for name, x in tensors.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Tell the interpreter inside which memory each tensor lies."""
        spans = {}
        for wide in self._wide.values():
            start, size = wide.data_ptr(), wide.element_size()
            spans[start] = (start + GUARD * size, start + (wide.numel() - GUARD) * size)
        memory.INNER.update(spans)
        try:
            yield
        finally:
            for start in spans:
                memory.INNER.pop(start, None)

    def written(self) -> list[str]:
        """Return the names of the tensors whose guards were written."""
        flags = {name: _differs(wide) for name, wide in self._wide.items()}
        if not flags or not torch.stack(list(flags.values())).any():  # one wait for the device
            return []
        return [name for name, flag in flags.items() if flag]


def _between(x: Tensor) -> Tensor | None:
    """Return the numbers of x between two guards, or None if x is not all of its memory."""
    count = x.untyped_storage().nbytes() // x.element_size()
    if x.numel() != count or not count:
        return None
    wide = x.new_full((count + 2 * GUARD,), _fill(x), requires_grad=False)
    wide[GUARD:-GUARD] = x.detach().as_strided((count,), (1,), 0)
    return wide


def _differs(wide: Tensor) -> Tensor:
    """Return whether a guard holds anything else than it did."""
    sides = torch.stack([wide[:GUARD], wide[-GUARD:]])
    return (~sides.isnan()).any() if wide.is_floating_point() else (sides != _fill(wide)).any()


def _fill(x: Tensor) -> float:
    return float("nan") if x.is_floating_point() else NO_INDEX[x.element_size()]
