"""Launches that ran before, with the same arguments and the same bytes in memory. They do not run again.

Laws call an implementation several times with the same inputs. What a launch of an interpreted kernel does follows from the kernel,
the grid, the numbers among its arguments and, for each tensor, its type, its place in its memory and every byte of that memory. A
program gets nothing else: it cannot see the address of a memory unless it makes a number of a pointer, and such a launch is not
kept. So a launch of which all this is equal would write equal bytes, and these are written in its place. A launch that raises, or
whose programs ran one after another, is not kept either.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl

from verify.interpreter import branches, patches
from verify.interpreter.grid import Function
from verify.interpreter.memory import Memory, Span, bytes_of, span_of

MOST_BYTES = 2**22  # of the memories of a launch that is kept, because larger ones take long to read
KEPT_BYTES = 2**26  # of what all kept launches wrote
NUMBERS = bool | int | float | str | None | tl.dtype | torch.dtype


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a launch wrote, by the number of the memory among its arguments, and the numbers of the blocks that it ran."""

    after: Mapping[int, Any]
    blocks: frozenset[int]

    @property
    def bytes(self) -> int:
        """The size of what the launch wrote."""
        return sum(map(len, self.after.values()))


repeated: collections.Counter[str] = collections.Counter()  # launches that did not run again, of each kernel


class Repeat:
    """A launch of a kernel with the values of its arguments, which may have run before."""

    def __init__(self, python: Any, values: Mapping[str, Any], grid: tuple[int, int, int]) -> None:
        self._name, self._spans = python.__name__, list[Span]()
        function: Function | None = getattr(python, "gdn_function", None)
        digest = None if patches.kept is None or function is None else self._digest(values, grid)
        self._key = None if digest is None else (function, digest)

    def _digest(self, values: Mapping[str, Any], grid: tuple[int, int, int]) -> bytes | None:
        """A digest of all that programs can see. None if that is too much, or if an argument is neither a number nor a tensor."""
        seen: list[Any] = [grid]
        for name, value in values.items():
            plain = value.value if isinstance(value, tl.constexpr) else value
            if isinstance(plain, torch.Tensor):
                start, end = span = span_of(plain)
                if span not in self._spans:
                    self._spans.append(span)
                seen.append((name, plain.dtype, self._spans.index(span), plain.data_ptr() - start, end - start, bool(start)))
            elif isinstance(plain, NUMBERS):
                seen.append((name, type(plain), plain))
            else:
                return None
        if sum(end - start for start, end in self._spans) > MOST_BYTES:
            return None
        digest = hashlib.blake2b(repr(seen).encode(), digest_size=16)
        for span in self._spans:
            digest.update(bytes_of(span))
        return digest.digest()

    def write(self) -> bool:
        """Write what the equal launch wrote, if there was one. Returns whether there was."""
        kept: Kept | None = (patches.kept or {}).get(self._key)
        if kept is None:
            return False
        for number, after in kept.after.items():
            bytes_of(self._spans[number])[:] = after
        branches.ran(kept.blocks)
        repeated[self._name] += 1
        return True

    def keep(self, memory: Memory) -> None:
        """Keep what the launch wrote to its memory, unless a program saw an address, or too much is kept already."""
        if self._key is None or patches.kept is None or memory.by_address:
            return
        kept = Kept({self._spans.index(span): bytes_of(span).copy() for span in memory.before}, branches.of_launch())
        if sum(one.bytes for one in (kept, *patches.kept.values())) <= KEPT_BYTES:
            patches.kept[self._key] = kept
