"""Evaluates a call under an arithmetic: in float64, or with many rounded runs at once, in pieces that memory has room for."""

import math
from typing import Any

import torch
from torch import Tensor

from oracles.arithmetic.room import fitting
from oracles.arithmetic.rounding import Arithmetic
from oracles.operation import Inputs, Operation, Port, gradient_name

_NEAR = 1_500_000  # bytes of the inputs of runs evaluated together on a CPU; with more it waits for memory (measured)
_WIDE = 9_000_000  # float64 numbers of inputs that a GPU takes at once, in any number of runs
_FEW, _FEWEST = 8, 4  # runs that a GPU takes at once: _FEW if memory allows, otherwise _FEWEST
_ROOM = 160_000_000  # float64 numbers of the inputs of _FEW runs: 155 million took 22.2 GiB, of which a segment took 8
_BYTES = {"half": 8, "single": 12, "recurrent": 20}  # bytes of an input and its results: float32, float64, two halves in float64
_BATCH = {"cpu": 2**25, "cuda": 2**28}  # float64 numbers of the inputs of a few runs: a larger call is cut into several


def evaluate(
    operation: Operation, inputs: Inputs, cotangents: dict[str, Tensor] | None, arithmetic: Arithmetic
) -> dict[str, Tensor]:
    """Return every output and gradient with the runs along axis 0, shaped as the tensors of the call."""
    names = [port.name for port in operation.inputs if inputs.get(port.name) is not None]
    tensors = {name: x.detach() for name, x in wide(operation, inputs).items() if name in names}
    leaves = {name: x.unsqueeze(0).expand(arithmetic.runs, *x.shape) for name, x in tensors.items()}
    wanted = {name: leaf for name, leaf in leaves.items() if cotangents is not None and leaf.is_floating_point()}
    for leaf in wanted.values():
        leaf.requires_grad_()
    outputs = operation.forward(inputs.replaced(**leaves), arithmetic)
    result = {name: value.detach() for name, value in outputs.items()}
    if cotangents is not None:
        for name, cotangent in cotangents.items():
            if name not in outputs or cotangent.shape != outputs[name].shape[1:]:
                wanted_shape = tuple(outputs[name].shape[1:]) if name in outputs else f"one of {', '.join(outputs)}"
                raise ValueError(f"cotangent of {name} must be {wanted_shape}, got shape {tuple(cotangent.shape)}")
        tensors = {name: tensor for name, tensor in cotangents.items() if tensor.numel() and outputs[name].requires_grad}
        targets = [outputs[name] for name in tensors]
        directions = [dense(tensor).unsqueeze(0).expand_as(outputs[name]) for name, tensor in tensors.items()]
        gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if targets:
            gradients = torch.autograd.grad(targets, list(wanted.values()), directions, allow_unused=True)
        for (name, leaf), gradient in zip(wanted.items(), gradients, strict=True):
            result[gradient_name(name)] = torch.zeros_like(leaf) if gradient is None else gradient
    return result


def wide(operation: Operation, inputs: Inputs) -> Inputs:
    """Return the inputs in float64, contiguous, with offsets on the CPU, where reading them does not wait for the GPU."""
    names = [port.name for port in operation.inputs if inputs.get(port.name) is not None]
    tensors = {name: dense(inputs[name]) for name in names if inputs[name].is_floating_point()}
    if (offsets := inputs.get("cu_seqlens")) is not None:
        tensors["cu_seqlens"] = offsets.cpu()
    return inputs.replaced(**tensors)


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, in the strides of a new tensor, because products over other strides may differ in the last bit.

    Axes of size 1 have these strides too; `contiguous` leaves any there, and a matrix product chooses its order of sums by them.
    """
    wide = tensor.double()
    return (
        wide
        if wide.stride() == torch.empty(wide.shape, device="meta").stride()
        else wide.clone(memory_format=torch.contiguous_format)
    )


def numbers_of(operation: Operation, inputs: Inputs) -> int:
    """Return how many numbers the inputs of a call have, together with those of `_of_columns`."""
    numbers: int = sum(inputs[port.name].numel() for port in operation.inputs if inputs.get(port.name) is not None)
    return numbers + _of_columns(inputs)


def _of_columns(inputs: Inputs) -> int:
    """Return how many numbers a call with gv has in addition, because each value channel becomes a head
    (gated_delta.py).

    Each of these heads has q, k and a decay of K channels, and one channel of v and beta.
    """
    return 0 if (gv := inputs.get("gv")) is None else int(gv.numel()) * (3 * inputs.k.shape[-1] + 2)


def on_a_gpu(inputs: Inputs) -> bool:
    """Return whether the inputs are on a GPU."""
    return _device(inputs).type != "cpu"


def _device(inputs: Inputs) -> torch.device:
    return next(x.device for x in inputs.values() if isinstance(x, Tensor))


def at_once(inputs: Inputs, plain: Arithmetic, pieces: int) -> int:
    """Return how many runs to evaluate together: what stays in a CPU's cache, or what a GPU has memory for."""
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    numbers = max(1, (sum(x.numel() for x in tensors) + _of_columns(inputs)) // pieces)
    if on_a_gpu(inputs):
        most = max(_WIDE // numbers, _FEW if _FEW * numbers <= fitting(_ROOM, _device(inputs)) else _FEWEST)
    else:
        most = _NEAR // (_BYTES[_kind(plain)] * numbers)
    return max((count for count in range(1, min(plain.runs, most) + 1) if plain.runs % count == 0), default=1)


def _kind(plain: Arithmetic) -> str:
    """Return the key into _BYTES: chunkwise runs are computed in float32 if operands are coarser than that, else in float64."""
    return "recurrent" if plain.algorithm == "recurrent" else "half" if plain.narrow else "single"


def pieces_of(operation: Operation, inputs: Inputs, runs: int) -> int:
    """Return the least number of calls to cut a call into so that the inputs of a few runs stay within _BATCH numbers each.

    Cuts are along the operation's parallel axes.
    """
    sizes = operation.sizes(inputs)
    most = math.gcd(*(sizes[axis] for axis in operation.parallel)) if operation.parallel else 1
    capacity = fitting(_BATCH["cuda" if on_a_gpu(inputs) else "cpu"], _device(inputs))
    wanted = min(runs, _FEW) * numbers_of(operation, inputs) / capacity
    return next(count for count in range(1, most + 1) if most % count == 0 and (count >= wanted or count == most))


def slices(operation: Operation, tensors: Any, pieces: int) -> list[Any]:
    """Cut inputs, or tensors by name, along the operation's parallel axes; a tensor without these axes goes into every piece."""
    if tensors is None or pieces == 1:
        return [tensors] * pieces
    ports = {port.name: port for port in (*operation.inputs, *operation.outputs, *operation.gradients())}
    parts: list[dict[str, Any]] = [dict(tensors) for _ in range(pieces)]
    for name, x in tensors.items():
        if isinstance(x, Tensor) and name in ports and (axis := _axis(operation, ports[name])) is not None:
            for part, piece in zip(parts, x.chunk(pieces, axis), strict=True):
                part[name] = piece
    return [Inputs(**part) if isinstance(tensors, Inputs) else part for part in parts]


def joined(operation: Operation, port: Port, parts: list[Tensor]) -> Tensor:
    """Put the slices of a tensor together again."""
    axis = _axis(operation, port)
    assert axis is not None or len(parts) == 1, port
    return parts[0] if axis is None or len(parts) == 1 else torch.cat(parts, axis)


def _axis(operation: Operation, port: Port) -> int | None:
    axes = port.axes.split()
    return next((axes.index(axis) for axis in operation.parallel if axis in axes), None)
