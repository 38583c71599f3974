"""Cases of any callable: one printable line that names the inputs and outputs by their axes, their sizes, and a seed.

Such a call has no float64 reference. What it must give follows from other calls of the same implementation.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from oracles.arithmetic.counter import integers, mix_number
from oracles.arithmetic.rounding import BITS
from oracles.operation import DTYPES, Inputs, Operation, Port, sequence_count
from properties.words.line import SEEDS, Line
from properties.words.word import Word

OFFSETS = "cu_seqlens"
KINDS = ("fp32", "negative", "unit", "normalised")
VALUES = ("ordinary", "scaled", "repeated")
_AXIS = re.compile(r"[A-Z]+\Z")
STREAMS = 64  # streams of random numbers of one seed


@dataclasses.dataclass(frozen=True)
class Argument:
    """One tensor of a call: its name, its axes, and the `kinds` of its numbers, some of KINDS."""

    name: str
    axes: tuple[str, ...]
    kinds: tuple[str, ...] = ()

    @property
    def port(self) -> Port:
        """The contract of the tensor."""
        if self.name == OFFSETS:
            return Port(OFFSETS, "N+1", "index", optional=True)
        return Port(self.name, " ".join(self.axes), "fp32" if "fp32" in self.kinds else "input")


@functools.lru_cache(64)
def arguments_of(text: str) -> tuple[Argument, ...]:
    """Return the tensors that a text such as q:B.T.H.K,g:B.T.H.fp32.negative,cu_seqlens:offsets names.

    ValueError for a name that comes twice, a word that is neither an axis nor a kind, and axes that no law knows: an axis B is the
    first one and is followed by T, and an axis N is the first one.
    """
    found: dict[str, Argument] = {}
    for item in text.split(","):
        name, _, words = item.partition(":")
        if not name.isidentifier() or name in found:
            raise ValueError(f"each tensor must have a name of its own, got {item!r} in {text!r}")
        if (name == OFFSETS) != (words == "offsets"):
            raise ValueError(f"{OFFSETS} and no other tensor must be offsets, got {item!r}")
        axes = tuple(word for word in words.split(".") if _AXIS.match(word)) if words != "offsets" else ()
        kinds = tuple(word for word in words.split(".") if not _AXIS.match(word)) if words != "offsets" else ()
        if not set(kinds) <= set(KINDS):
            raise ValueError(f"{name} must have axes in capitals and some of {', '.join(KINDS)}, got {words!r}")
        if name != OFFSETS and (not axes or "B" in axes[1:] or "N" in axes[1:] or (axes[:1] == ("B",)) != (axes[1:2] == ("T",))):
            raise ValueError(f"{name} must have the axes B T ..., N ..., or neither B, T nor N, got {' '.join(axes)!r}")
        found[name] = Argument(name, axes, kinds)
    return tuple(found.values())


@functools.lru_cache(64)
def operation_of(takes: str, gives: str) -> Operation:
    """Return the contract of a call with these inputs and outputs; it has no reference."""
    inputs = tuple(argument.port for argument in arguments_of(takes))
    outputs = tuple(dataclasses.replace(argument.port, dtype="any") for argument in arguments_of(gives))
    if not any(port.axes.startswith("B T") for port in inputs):
        raise ValueError(f"takes must name an input with axes B T, got {takes!r}")
    if not any(port.axes.startswith("B T") for port in outputs) or any(port.axes[0] not in "BN" for port in outputs):
        raise ValueError(f"gives must name outputs with axes B T or N, one of them with B T, got {gives!r}")

    def offsets(inputs: Inputs, sizes: dict[str, int]) -> None:
        sequence_count(inputs, sizes)

    return Operation("call", inputs, outputs, _no_reference, (offsets,))


def _no_reference(*_: Any) -> dict[str, Tensor]:
    raise NotImplementedError("a call has no float64 reference")


def sizes_of(text: str) -> dict[str, int]:
    """Return the size of each axis that a text such as H:2,K:16 names. ValueError for another form."""
    sizes: dict[str, int] = {}
    for item in text.split(",") if text else ():
        axis, _, size = item.partition(":")
        if not _AXIS.match(axis) or axis in ("B", "T", "N") or axis in sizes or not size.isdecimal() or not int(size):
            raise ValueError(f"sizes must name each axis but B, T and N once with a number from 1 up, got {text!r}")
        sizes[axis] = int(size)
    return sizes


@dataclasses.dataclass(frozen=True)
class CallCase(Line):
    """One call of any callable. Fields at their defaults are left out of the line.

    Numbers are uniform in [-1, 1); those of kind "negative" in [-1, 0), of kind "unit" in [0, 1), and rows of kind "normalised"
    have the 2-norm 1.

    ValueError for a field outside its choices or range, or for fields that exclude each other.
    """

    lengths: tuple[int, ...]
    operation: Annotated[str, Word(choices=("call",))] = "call"
    takes: str = "x:B.T.D"
    """The inputs with their axes. B and T are the axes of tokens, N is that of sequences."""
    gives: str = "y:B.T.D"
    """The outputs with their axes."""
    sizes: str = "D:8"
    """The sizes of the other axes."""
    packed: Annotated[bool, Word(counted=True)] = False
    dtype: Annotated[str, Word(choices=tuple(DTYPES), counted=True, simplest=("fp32", "bf16"))] = "fp32"
    values: Annotated[str, Word(choices=VALUES, counted=True, simplest=("ordinary",))] = "ordinary"
    """The regime of inputs with tokens: "scaled" multiplies each token by a power of two from 1 to 1/64, and "repeated" repeats the
    first token."""
    offsets: Annotated[str, Word(choices=("int64", "int32"), simplest=("int64",), acts=lambda case: case.packed)] = "int64"
    backward: Annotated[bool, Word(simplest=(False,))] = True
    seed: Annotated[int, Word(span=SEEDS)] = 0

    def __post_init__(self) -> None:
        self.check_words()
        axes = {axis for argument in (*self.arguments, *arguments_of(self.gives)) for axis in argument.axes} - {"B", "T", "N"}
        if sizes_of(self.sizes).keys() != axes:
            raise ValueError(f"sizes must name the axes {', '.join(sorted(axes)) or 'of none'}, got {self.sizes!r}")
        if self.packed and OFFSETS not in (argument.name for argument in self.arguments):
            raise ValueError(f"packed=yes needs the input {OFFSETS}, got takes={self.takes}")
        operation_of(self.takes, self.gives)

    def __str__(self) -> str:
        return f"op={self.operation} {super().__str__()}"  # always printed, because it selects the book of the line

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The inputs."""
        return arguments_of(self.takes)

    @property
    def spec(self) -> Operation:
        """The operation's contract."""
        return operation_of(self.takes, self.gives)

    def spec_of(self, inputs: Inputs) -> Operation:  # noqa: ARG002 - one signature for all cases
        """Return the contract of a call like the case's."""
        return self.spec

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences together."""
        return sum(self.lengths)

    @property
    def bytes(self) -> int:
        """The bytes of inputs and outputs in float32, twice for gradients."""
        return 8 * sum(math.prod(self.shape(argument.axes)) for argument in (*self.arguments, *arguments_of(self.gives)))

    def starts(self) -> list[int]:
        """Return the first token of each sequence, and the end of the last sequence."""
        return [0, *itertools.accumulate(self.lengths)]

    def shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the shape of a tensor with these axes."""
        batch = (1, self.tokens) if self.packed else (len(self.lengths), self.lengths[0])
        sizes = sizes_of(self.sizes) | {"B": batch[0], "T": batch[1], "N": len(self.lengths)}
        return tuple(sizes[axis] for axis in axes)

    def inputs(self, device: str | None = None) -> Inputs:
        """Return the contiguous inputs by name; `cu_seqlens` is None unless packed=yes."""
        found: dict[str, Any] = {OFFSETS: None}
        for index, argument in enumerate(self.arguments):
            if argument.name == OFFSETS:
                offsets = torch.tensor(self.starts(), dtype=getattr(torch, self.offsets), device=device)
                found[OFFSETS] = offsets if self.packed else None
            else:
                found[argument.name] = self._numbers(argument, index, device)
        return Inputs(**found)

    def cotangents(self, device: str | None = None) -> dict[str, Tensor]:
        """Return a random cotangent for every output, in the dtype of the case; the bench casts it to that of the output."""
        outputs = enumerate(arguments_of(self.gives), STREAMS // 2)
        return {argument.name: self._uniform(index, self.shape(argument.axes), device, self.dtype) for index, argument in outputs}

    def _numbers(self, argument: Argument, index: int, device: str | None) -> Tensor:
        dtype = "fp32" if "fp32" in argument.kinds else self.dtype
        x = self._uniform(index, self.shape(argument.axes), device, dtype).double()
        if "negative" in argument.kinds or "unit" in argument.kinds:
            x = (x - 1) / 2 if "negative" in argument.kinds else (x + 1) / 2
        if argument.axes[:2] == ("B", "T") and self.values == "repeated" and x.numel():
            x = x[:1, :1].expand_as(x).contiguous()
        if argument.axes[:2] == ("B", "T") and self.values == "scaled":
            powers = (self._uniform(STREAMS - 1, x.shape[:2], device, "fp32").double() * 3.5 - 3.5).round()
            x = x * 2.0 ** powers.reshape(*powers.shape, *[1] * (x.ndim - 2))
        if "normalised" in argument.kinds:
            x = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        return x.to(DTYPES[dtype])

    def _uniform(self, index: int, shape: tuple[int, ...], device: str | None, dtype: str) -> Tensor:
        """Return numbers uniform in [-1, 1), on a grid of as many bits as the dtype holds."""
        counter = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
        whole = integers((counter, mix_number(self.seed * STREAMS + index), BITS[dtype]))[0].view(shape)
        return (whole.to(torch.float64) * 2.0 ** (1 - BITS[dtype])).to(DTYPES[dtype])
