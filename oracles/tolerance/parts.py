"""Parts of a call: some of its sequences, and some of the heads that are independent of the others; each part is a call of its own.

Sequences are independent of each other, and so are the slices along an operation's `parallel` axes. So the rows of some sequences
and heads are the same in a part that contains these as in the whole call: a token's vector, or a row of a final state. Sums over
all sequences, such as the gradient of A_log, are the same only in parts with every sequence. Their rows are those of heads and are
pooled (oracles/tolerance/bound.py), so these parts need every head too.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from oracles.operation import Inputs, Operation, Port, sequences


class Part(NamedTuple):
    """Which sequences a part has, and which groups along the parallel axes."""

    sequences: tuple[int, ...]
    groups: tuple[int, ...]

    def has(self, other: "Part") -> bool:
        """Whether this part contains the other one."""
        return {*other.sequences} <= {*self.sequences} and {*other.groups} <= {*self.groups}


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a legal call may be cut: into `groups` equal groups along the parallel axes, and into sequences of `lengths` tokens.

    If `apart` is False, sequences stay together: those whose states lie in a pool, and those of several calls
    (verify/execution/shared_bounds.py).
    """

    operation: Operation
    lengths: tuple[int, ...]
    packed: bool
    groups: int
    apart: bool

    @classmethod
    def of(cls, operation: Operation, inputs: Inputs) -> "Cut":
        """Return the cut of a call."""
        sizes = operation.sizes(inputs)
        groups = math.gcd(*(sizes[axis] for axis in operation.parallel)) if operation.parallel else 1
        lengths = sequences(inputs, operation.inputs[0].name)
        apart = bool(operation.parallel) and "P" not in sizes and inputs.get("calls") is None
        return cls(operation, tuple(lengths), inputs.get("cu_seqlens") is not None, groups, apart)

    @property
    def whole(self) -> Part:
        """The part that is the whole call."""
        return Part(tuple(range(len(self.lengths))), tuple(range(self.groups)))

    def size(self, part: Part) -> int:
        """Return the size of a part: for each group, its tokens and one state for each sequence."""
        return len(part.groups) * sum(1 + self.lengths[row] for row in part.sequences)

    def having(self, port: Port, rows: Tensor) -> Part:
        """Return the smallest part that contains all rows of a tensor that are true in `rows`; the whole call if none is true."""
        axes, (some, groups) = port.axes.split()[: rows.ndim], self.whole
        if not bool(rows.any()):
            return self.whole
        if (along := [place for place, axis in enumerate(axes) if axis in self.operation.parallel]) and not self._pooled(axes):
            groups = _true(rows.movedim(along[0], 0).reshape(self.groups, -1).any(-1))
        if not self.apart:
            return Part(some, groups)
        if axes[0] == "N":
            some = _true(rows.flatten(1).any(-1) if rows.ndim > 1 else rows)
        elif axes[:2] == ["B", "T"]:
            tokens = rows.flatten(2).any(-1) if rows.ndim > 2 else rows
            some = _true(self._any_by_sequence(tokens[0]) if self.packed else tokens.any(-1))
        return Part(some, groups)

    def _pooled(self, axes: list[str]) -> bool:
        """Whether tolerances of rows are pooled along a parallel axis (oracles/tolerance/bound.py).

        That is so if the rows' last axis is parallel, unless they are rows of tokens.
        """
        return axes[:2] != ["B", "T"] and axes[-1] in self.operation.parallel

    def _any_by_sequence(self, tokens: Tensor) -> Tensor:
        """Return for each sequence whether any of its tokens is true."""
        numbers = torch.arange(len(self.lengths), device=tokens.device).repeat_interleave(
            torch.tensor(self.lengths, device=tokens.device)
        )
        return torch.zeros(len(self.lengths), dtype=torch.bool, device=tokens.device).index_fill_(0, numbers[tokens], True)

    def inputs(self, inputs: Inputs, part: Part) -> Inputs:
        """Return the inputs of a part."""
        taken = {
            port.name: self.taken(inputs[port.name], port, part)
            for port in self.operation.inputs
            if inputs.get(port.name) is not None
        }
        if self.packed:
            offsets = [0, *itertools.accumulate(self.lengths[row] for row in part.sequences)]
            taken["cu_seqlens"] = inputs.cu_seqlens.new_tensor(offsets)
        return inputs.replaced(**taken)

    def named(self, tensors: dict[str, Tensor], part: Part) -> dict[str, Tensor]:
        """Return the part's rows of outputs, cotangents of outputs, or gradients, by their names."""
        return {name: self.taken(x, self.operation.port(name), part) for name, x in tensors.items()}

    def taken(self, x: Tensor, port: Port, part: Part) -> Tensor:
        """Return what a part has of a tensor, or of a tensor with a number for each row."""
        for place, axis in enumerate(port.axes.split()[: x.ndim]):
            if (at := self._at(axis, x.shape[place], part, x.device)) is not None:
                x = x.index_select(place, at)
        return x

    def put(self, x: Tensor, port: Port, part: Part, values: Tensor) -> Tensor:
        """Return x, which has a number for each row, with the part's rows replaced by `values`."""
        index = []
        for place, (axis, size) in enumerate(zip(port.axes.split(), x.shape, strict=False)):
            at = self._at(axis, size, part, x.device)
            at = torch.arange(size, device=x.device) if at is None else at
            index.append(at.view(-1, *[1] * (x.ndim - place - 1)))
        return x.index_put(tuple(index), values) if index else values

    def _at(self, axis: str, size: int, part: Part, device: torch.device) -> Tensor | None:
        """Return the part's places along an axis; None if it has all of them."""
        some: Tensor | None = None
        if axis in self.operation.parallel and len(part.groups) < self.groups:
            some = torch.arange(size).view(self.groups, -1)[list(part.groups)].flatten()
        elif axis == ("T" if self.packed else "B") and len(part.sequences) < len(self.lengths):
            if self.packed:
                starts = [0, *itertools.accumulate(self.lengths)]
                some = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in part.sequences])
            else:
                some = torch.tensor(part.sequences)
        elif axis == "N" and len(part.sequences) < len(self.lengths):
            some = torch.tensor(part.sequences)
        return None if some is None else some.to(device)


def _true(mask: Tensor) -> tuple[int, ...]:
    """Return the places that are true."""
    return tuple(mask.nonzero().flatten().tolist())
