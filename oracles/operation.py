"""What an operation is: the contract of one mathematical function, its inputs, and the rules of legal input."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oracles.arithmetic.rounding import CLASSES, Arithmetic

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = (*NAMES, torch.float64)


class Inputs(Mapping[str, Any]):
    """The arguments of one call by name, read as attributes or as items.

    A value is a tensor, None (an optional tensor that is absent) or an option. Inputs cannot be changed; `replaced` makes a copy.
    """

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no input {name!r}; there are {', '.join(self._values)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"inputs are not to be changed: {name}; use replaced({name}=...)")

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def replaced(self, **values: Any) -> "Inputs":
        """Return a copy in which `values` replace the inputs of the same names. ValueError for an unknown name."""
        if unknown := values.keys() - self._values.keys():
            raise ValueError(f"no input {sorted(unknown)[0]!r}; there are {', '.join(self._values)}")
        return Inputs(**{**self._values, **values})


@dataclasses.dataclass(frozen=True)
class Port:
    """A named tensor of an operation: an input, an output or a gradient.

    `axes` are letters separated by spaces. `dtype` is "input" (the dtype of the case), "gate", "parameter" (of A_log), "bias" (of
    dt_bias), "state" (of a pool), one of DTYPES or "index". `optional` says whether the tensor may be absent. A row is the unit
    that has one tolerance: the vector along the last axis or, with `scalar_rows`, a single element (one number for each token and
    head). `gradient` says whether it is the gradient of an input.
    """

    name: str
    axes: str
    dtype: str = "input"
    optional: bool = False
    scalar_rows: bool = False
    gradient: bool = False


Rule = Callable[[Inputs, dict[str, int]], None]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One mathematical operation: its contract and its oracle.

    `inputs` and `outputs` are its ports. Every input that is not an index is differentiable. Axes are letters, and equal letters
    mean equal sizes. An axis such as W-1 is one shorter than the axis W. N is the number of sequences: `cu_seqlens` defines N or,
    without it, N is B. An operation without N in its ports takes no `cu_seqlens`. `options` are the arguments that are not tensors,
    including those that only implementations use. `rules` are further conditions of legal input.

    `forward` takes an `Arithmetic` and float64 inputs with a new axis 0, along which lie the runs of that arithmetic. It returns
    the outputs with the same axis 0. It rounds where an algorithm of the arithmetic's class rounds, and autograd differentiates it.
    A call may be cut into several calls along all `parallel` axes at once, because its parts share nothing. `classes` names the
    classes of algorithm that `forward` can model. `unjudged` has for some outputs or gradients a function of the inputs, which
    returns a mask of the elements whose value means nothing: any finite number there is right.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    forward: Callable[[Inputs, Arithmetic], dict[str, Tensor]]
    rules: tuple[Rule, ...] = ()
    options: tuple[str, ...] = ()
    parallel: tuple[str, ...] = ()
    classes: tuple[str, ...] = CLASSES
    unjudged: Mapping[str, Callable[[Inputs], Tensor]] = dataclasses.field(default_factory=dict)

    def sizes(self, inputs: Inputs) -> dict[str, int]:
        """Return the size of each axis of legal inputs."""
        tensors = ((port, inputs[port.name]) for port in self.inputs if inputs.get(port.name) is not None)
        sizes = {axis: size for port, x in tensors for axis, size in zip(port.axes.split(), x.shape, strict=True)}
        return sizes | {f"{axis}-1": size - 1 for axis, size in sizes.items() if f"{axis}-1" in self._axes}

    def gradients(self) -> tuple[Port, ...]:
        """Return one port for each gradient, named by `gradient_name`: dq for q, and dh0 for the initial state."""
        return self._gradients

    @functools.cached_property
    def _gradients(self) -> tuple[Port, ...]:
        differentiable = (port for port in self.inputs if port.dtype != "index")
        return tuple(dataclasses.replace(port, name=gradient_name(port.name), gradient=True) for port in differentiable)

    @functools.cached_property
    def _axes(self) -> set[str]:
        return {axis for port in (*self.inputs, *self.outputs) for axis in port.axes.split()}

    def port(self, name: str) -> Port:
        """Return the port of the output or gradient called `name`."""
        return next(port for port in (*self.outputs, *self._gradients) if port.name == name)

    def check(self, inputs: Inputs) -> None:
        """Raise ValueError for illegal input. The message names the argument, its value and the rule."""
        if not isinstance(inputs, Inputs):
            raise ValueError(f"inputs must be Inputs, got {type(inputs).__name__}")  # noqa: TRY004 - one kind of error
        for name, value in inputs.items():
            if value is not None and name not in self._named:
                what = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{name} is no input of {self.name}, must be None or absent, got {what}")
            if name in self.options and isinstance(value, Tensor):
                raise ValueError(f"{name} must be no tensor, an option of {self.name}, got a tensor")
        sizes: dict[str, int] = {}
        owner: dict[str, str] = {}
        first: tuple[str, torch.device] | None = None
        for port in self.inputs:
            if (argument := inputs.get(port.name)) is None and port.optional:
                continue
            tensor = checked_tensor(port.name, argument)
            axes = port.axes.split()
            if tensor.ndim != len(axes):
                raise ValueError(f"{port.name} must have axes [{', '.join(axes)}], got shape {tuple(tensor.shape)}")
            if port.dtype == "index" and tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{port.name} must be int32 or int64, got {tensor.dtype}")
            if port.dtype != "index" and tensor.dtype not in FLOATS:
                raise ValueError(f"{port.name} must be floating point of 16, 32 or 64 bits, got {tensor.dtype}")
            first = first or (port.name, tensor.device)
            if tensor.device != first[1]:
                raise ValueError(f"{port.name} must be on {first[1]} like {first[0]}, got {tensor.device}")
            for axis, size in zip(axes, tensor.shape, strict=True):
                longer = axis.removesuffix("-1")
                less = int(longer != axis)
                if axis != "N" and sizes.setdefault(longer, size + less) != size + less:
                    raise ValueError(
                        f"{port.name} must have {axis} = {sizes[longer] - less} like {owner[longer]}, "
                        f"got shape {tuple(tensor.shape)} for [{', '.join(axes)}]"
                    )
                owner.setdefault(longer, port.name)
        for rule in self.rules:
            rule(inputs, sizes)

    @functools.cached_property
    def _named(self) -> set[str]:
        """The names of all arguments that a call may have."""
        packs = any("N" in port.axes.split() for port in self.inputs)
        return {*(port.name for port in self.inputs), *self.options, *["cu_seqlens"] * packs}


def checked_tensor(name: str, value: object) -> Tensor:
    """Return `value` if it is a strided tensor with numbers; otherwise raise a ValueError that names the argument."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")  # noqa: TRY004 - one kind of error
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        kind = "nested" if value.is_nested else "without numbers" if value.is_meta else str(value.layout)
        raise ValueError(f"{name} must be a strided tensor, got one that is {kind}")
    return value


def gradient_name(name: str) -> str:
    """Return the name of the gradient of input `name`."""
    return "dh0" if name == "state" else f"d{name}"


def at_least_one(*axes: str) -> Rule:
    """Return the rule that each of these axes has at least one entry."""

    def rule(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
        for axis in axes:
            if sizes[axis] < 1:
                raise ValueError(f"{axis} must be at least 1, got {sizes[axis]}")

    return rule


def flag(name: str) -> Rule:
    """Return the rule that an option is True or False; an absent option means False."""

    def rule(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
        if not isinstance(value := inputs.get(name, False), bool):
            raise ValueError(  # noqa: TRY004 - one kind of error for every illegal argument
                f"{name} must be True or False, got {value!r}"
            )

    return rule


def finite_scale(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: the scale is None or a finite number; None or absent means K ** -0.5."""
    scale = inputs.get("scale")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale)):
        raise ValueError(f"scale must be None or a finite number, got {scale!r}")


def grouped_heads(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule of grouped value attention: HV is a multiple of H."""
    if sizes["HV"] % sizes["H"]:
        raise ValueError(f"HV must be a multiple of H = {sizes['H']}, got {sizes['HV']}")


def padding_of_rows(inputs: Inputs, sizes: dict[str, int]) -> None:
    """Rule: `pads` is None or absent, or says for each row of a batch how many of its tokens are padding (`no_padding`)."""
    if (pads := inputs.get("pads")) is None:
        return
    batch, tokens = sizes["B"], sizes["T"]
    if inputs.get("cu_seqlens") is not None or len(pads) != batch or not all(abs(pad) <= tokens for pad in pads):
        raise ValueError(
            f"pads must be a number in {-tokens}..{tokens} for each of B = {batch} rows, without cu_seqlens, got {pads!r}"
        )


def no_padding(pads: Sequence[int], tokens: int, device: torch.device | None = None) -> Tensor:
    """Return a mask [B, T], false where a row is padding: in its first `pads` tokens or, of a negative number, in its last ones."""
    first, place = torch.tensor(pads, device=device).unsqueeze(-1), torch.arange(tokens, device=device)
    return (place >= first) & (place < tokens + first.clamp(max=0))


def one_a_sequence(name: str) -> Rule:
    """Return the rule that `cu_seqlens` is legal, and that the state `name` has one entry for each sequence."""

    def rule(inputs: Inputs, sizes: dict[str, int]) -> None:
        count = sequence_count(inputs, sizes)
        if (state := inputs.get(name)) is not None and state.shape[0] != count:
            raise ValueError(f"{name} must have N = {count}, one per sequence, got shape {tuple(state.shape)}")

    return rule


def sequence_count(inputs: Inputs, sizes: dict[str, int]) -> int:
    """Return the number of sequences: B, or the number in `cu_seqlens`. ValueError for illegal `cu_seqlens`."""
    if (offsets := inputs.get("cu_seqlens")) is None:
        return sizes["B"]
    check_offsets(offsets, sizes["B"], sizes["T"])
    return len(offsets) - 1


def sequences(inputs: Inputs, tokens: str) -> list[int]:
    """Return the number of tokens of each sequence of legal inputs; `tokens` names an input with axes [B, T, ...]."""
    if inputs.get("cu_seqlens") is None:
        return [inputs[tokens].shape[1]] * int(inputs[tokens].shape[0])
    offsets = inputs.cu_seqlens.tolist()
    return [later - earlier for earlier, later in itertools.pairwise(offsets)]


def check_offsets(offsets: Tensor, batch: int, tokens: int) -> None:
    """Raise ValueError if `cu_seqlens` is illegal for a packed batch; the message names the value and the rule."""
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64) or offsets.ndim != 1:
        what = f"{offsets.dtype} of shape {tuple(offsets.shape)}" if isinstance(offsets, Tensor) else repr(offsets)
        raise ValueError(f"cu_seqlens must be a vector of int32 or int64, got {what}")
    if batch != 1:
        raise ValueError(f"cu_seqlens needs B = 1, the sequences packed along T, got B = {batch}")
    values = offsets.tolist()
    if len(values) < 2 or values[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0 and have at least two entries, got {values}")
    if any(later < earlier for earlier, later in itertools.pairwise(values)):
        raise ValueError(f"cu_seqlens must not decrease, got {values}")
    if values[-1] != tokens:
        raise ValueError(f"cu_seqlens must end at the token count {tokens}, got {values[-1]} ({values})")
