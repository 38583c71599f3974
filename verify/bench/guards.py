"""Guards: an input lies inside a larger allocation, whose other elements are NaN. Memory that nobody has written is NaN too.

A kernel that reads beyond an input and multiplies what it read by zero gets NaN, and one that writes there is found. For integers,
whose numbers no multiplication keeps, the guard holds a number that is no index of a test case. Interpreted kernels know the memory
of the input itself (verify/interpreter/memory.py), so a read of a guard is an access outside a tensor there.
"""

import contextlib
import os
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from verify.gpu import device as devices
from verify.interpreter import memory
from verify.process.environment import UNPOISONED
from verify.process.outcome import FailureKind, Finding

Name = TypeVar("Name", bound=Hashable)

# Elements on each side. As many bytes are a multiple of every alignment for which kernels are compiled. A tile of 64 tokens that is
# read whole, or the next token of the same head, begins within so many elements.
GUARD = 2**12
NO_INDEX = {1: 99, 2: 29999, 4: 29999, 8: 29999}  # by the bytes of an integer


@contextlib.contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Fill uninitialised tensors that are created from Python with `value`, or a large integer if their dtype is no float.

    Code that reads such memory before it writes there then gives wrong results.
    """
    if os.environ.get(UNPOISONED):
        yield
        return
    names = ("empty", "empty_like", "empty_strided")
    originals = {name: getattr(torch, name) for name in names}
    new_empty = torch.Tensor.new_empty

    def filled(make: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = make(*args, **kwargs)
            data = result.detach()
            if data.is_floating_point():
                data.fill_(value)
            else:
                data.fill_(99 if data.dtype in (torch.int8, torch.uint8, torch.bool) else 29999)
            return result

        return wrapper

    try:
        for name, make in originals.items():
            setattr(torch, name, filled(make))
        torch.Tensor.new_empty = filled(new_empty)  # type: ignore[method-assign]
        yield
    finally:
        for name, make in originals.items():
            setattr(torch, name, make)
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the integers of as many bytes


class Copies(Generic[Name]):
    """Copies of tensors, which tell whether the tensors have changed since.

    The bits of all tensors of a dtype are compared in one operation, because on a GPU a call takes longer to start than to run.
    """

    def __init__(self, tensors: Mapping[Name, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._shapes = {name: x.shape for name, x in tensors.items()}
        alike: dict[tuple[torch.device, torch.dtype], list[Name]] = {}
        for name, x in tensors.items():
            alike.setdefault((x.device, x.dtype), []).append(name)
        with devices.default("cpu"):
            self._groups = [(names, self._joined(names)) for names in alike.values()]

    def _joined(self, names: list[Name]) -> Tensor:
        return torch.cat([self._tensors[name].detach().reshape(-1) for name in names])

    def __getitem__(self, wanted: Name) -> Tensor:
        """The copy of a tensor, contiguous."""
        names, joined = next(group for group in self._groups if wanted in group[0])
        sizes = [self._shapes[name].numel() for name in names]
        copy: Tensor = joined.split(sizes)[names.index(wanted)].view(self._shapes[wanted])
        return copy

    def changed(self) -> list[Name]:
        """The names of tensors whose shape or numbers have changed. NaN counts as equal to NaN, and 0 to -0."""
        with devices.default("cpu"):
            if not _any_changed(self):
                return []
            return [name for name, x in self._tensors.items() if _differs(x.detach(), self[name])]

    def flags(self) -> list[Tensor]:
        """Scalars, still on their devices, of which one is true if a tensor may have changed."""
        if any(x.shape != self._shapes[name] for name, x in self._tensors.items()):
            return [torch.tensor(True)]
        return [(_bits(self._joined(names)) != _bits(before)).any() for names, before in self._groups]


class Guards:
    """Copies of tensors between guards. `tensors` has them by name.

    A tensor is taken as it is if it shares its memory with other numbers, has none, or if `around` is False.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, around: bool = True) -> None:
        around = around and not os.environ.get(UNPOISONED)
        guards: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        with devices.default("cpu"):
            self._wide = {name: wide for name, x in tensors.items() if around and (wide := _between(x, guards)) is not None}
            self.tensors = {
                name: self._wide[name].as_strided(x.shape, x.stride(), GUARD) if name in self._wide else x
                for name, x in tensors.items()
            }
            sides = {"before": slice(GUARD), "behind": slice(-GUARD, None)}
            self._guards = Copies({(name, side): wide[at] for name, wide in self._wide.items() for side, at in sides.items()})

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

    def written(self, *others: "Guards") -> list[str]:
        """Return the names of the tensors whose guards were written, those of `others` included. On a GPU we wait once for all."""
        copies = [guards._guards for guards in (self, *others)]
        with devices.default("cpu"):
            if not _any_changed(*copies):
                return []
        return list(dict.fromkeys(name for copy in copies for name, _ in copy.changed()))


def changed(output: str, port: str = "", what: str = "was changed by the call") -> Finding:
    """The finding that a call changed what it must not change."""
    return Finding(output, FailureKind.INPUT_CHANGED, what, port=port)


def _any_changed(*copies: Copies[Any]) -> bool:
    """Whether any of the copied tensors may have changed. We wait once for each device."""
    flags = [flag for copy in copies for flag in copy.flags()]
    return any(bool(torch.stack([flag for flag in flags if flag.device == at]).any()) for at in {flag.device for flag in flags})


def _between(x: Tensor, guards: dict[tuple[torch.device, torch.dtype], Tensor]) -> Tensor | None:
    """Return the numbers of x between two guards, or None if x is not all of its memory. `guards` has one for each dtype."""
    count = x.untyped_storage().nbytes() // x.element_size()
    if x.numel() != count or not count:
        return None
    if (kind := (x.device, x.dtype)) not in guards:
        fill = float("nan") if x.is_floating_point() else NO_INDEX[x.element_size()]
        guards[kind] = x.new_full((GUARD,), fill, requires_grad=False)
    return torch.cat([guards[kind], x.detach().as_strided((count,), (1,), 0), guards[kind]])


def _bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.element_size()])


def _differs(now: Tensor, before: Tensor) -> bool:
    return now.shape != before.shape or bool(((now != before) & ~(now.isnan() & before.isnan())).any())
