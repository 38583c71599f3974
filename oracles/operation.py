"""Operations: the contract of one mathematical operation, its inputs, and what legal input is."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Inputs(Mapping[str, Any]):
    """The arguments of one call by name, as attributes or items: tensors, None where an optional one is absent, and options."""

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
        """The same inputs but for `values`. ValueError for a name that is not among them."""
        if unknown := values.keys() - self._values.keys():
            raise ValueError(f"no input {sorted(unknown)[0]!r}; there are {', '.join(self._values)}")
        return Inputs(**{**self._values, **values})


@dataclasses.dataclass(frozen=True)
class Port:
    """A named tensor: its axes, its dtype ("input": the case's; "gate", "fp32") and whether it may be absent.

    A row, the unit that is judged, is the last axis, or a single element where `scalar_rows` (one number a token and head).
    """

    name: str
    axes: str
    dtype: str = "input"
    optional: bool = False
    scalar_rows: bool = False


@dataclasses.dataclass(frozen=True)
class Operation:
    """One mathematical operation: the ports of its inputs and outputs. Every input is differentiable."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def gradients(self) -> tuple[Port, ...]:
        """The ports of the gradients, one an input: dq for q, and dh0 for the initial state."""
        return tuple(dataclasses.replace(port, name=gradient_name(port.name)) for port in self.inputs)

    def port(self, name: str) -> Port:
        """The output or gradient called `name`."""
        return next(port for port in (*self.outputs, *self.gradients()) if port.name == name)

    def check(self, inputs: Inputs) -> None:
        """Refuse illegal input: ValueError names the argument, its value and the rule (DESIGN section 2)."""
        sizes: dict[str, int] = {}
        for port in self.inputs:
            tensor = inputs.get(port.name)
            if tensor is None and port.optional:
                continue
            if not isinstance(tensor, Tensor):
                raise ValueError(  # noqa: TRY004 - one kind of error for every illegal argument
                    f"{port.name} must be a tensor, got {type(tensor).__name__}"
                )
            axes = port.axes.split()
            if tensor.ndim != len(axes):
                raise ValueError(f"{port.name} must have axes [{', '.join(axes)}], got shape {tuple(tensor.shape)}")
            if not tensor.is_floating_point():
                raise ValueError(f"{port.name} must be floating point, got {tensor.dtype}")
            for axis, size in zip(axes, tensor.shape, strict=True):
                if axis != "N" and sizes.setdefault(axis, size) != size:
                    raise ValueError(
                        f"{port.name} must have {axis} = {sizes[axis]} like the arguments before it, "
                        f"got shape {tuple(tensor.shape)} for [{', '.join(axes)}]"
                    )
        for axis in ("H", "HV", "K", "V"):
            if sizes[axis] < 1:
                raise ValueError(f"{axis} must be at least 1, got {sizes[axis]}")
        if sizes["HV"] % sizes["H"]:
            raise ValueError(f"HV must be a multiple of H = {sizes['H']}, got {sizes['HV']}")
        sequences = sizes["B"]
        if (offsets := inputs.get("cu_seqlens")) is not None:
            check_offsets(offsets, sizes["B"], sizes["T"])
            sequences = len(offsets) - 1
        if (state := inputs.get("state")) is not None and state.shape[0] != sequences:
            raise ValueError(f"state must have N = {sequences}, one per sequence, got shape {tuple(state.shape)}")


def gradient_name(name: str) -> str:
    """What the gradient of input `name` is called."""
    return "dh0" if name == "state" else f"d{name}"


def check_offsets(offsets: Tensor, batch: int, tokens: int) -> None:
    """Refuse illegal `cu_seqlens` of a packed batch: ValueError names the value and the rule."""
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


GATED_DELTA_RULE = Operation(
    "gated_delta_rule",
    (
        Port("q", "B T H K"),
        Port("k", "B T H K"),
        Port("v", "B T HV V"),
        Port("g", "B T HV", "gate", scalar_rows=True),
        Port("beta", "B T HV", scalar_rows=True),
        Port("state", "N HV K V", "fp32", optional=True),
    ),
    (Port("o", "B T HV V"), Port("final_state", "N HV K V", "fp32")),
)
OPERATIONS = {operation.name: operation for operation in (GATED_DELTA_RULE,)}
