"""The truth of a call in float64, and the error each row of it may have: the rounding model, run.

Disturbed runs (oracles/rounding.py) surround the truth: RUNS of them, or RUNS / 2 for each of CHUNKS where a chunkwise
implementation does not say how long its chunks are, since where they begin decides where its state rounds and its cumulative gate
restarts; the greatest of their bounds counts. A row is a token and head's vector, a row of a state, or one element of g's and
beta's gradients. Its error scale is

    sigma^2 = 1/2 own + 1/2 mean over the WINDOW rows around it,    own = mean over runs of |disturbed - truth|^2

where the neighbours are those of the same sequence and head (for a state, of the same matrix): one row's own spread over RUNS
runs is a poor estimate. A row is broken when its error exceeds

    allowed = KAPPA sigma

never less than FLOOR_ULP units in the last place of the row, nor than the subnormal step of what is stored on the way to it.
So few runs, where equal values err alike and pooling rows does not help, may all happen to err little: the judge asks for FINER
times as many before it calls a row broken that is over by less than thirtyfold.

docs/MEASUREMENTS.md derives KAPPA and holds the distribution of error / allowed on right implementations.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracles.operation import NAMES, Inputs, Operation, Port, gradient_name, sequences
from oracles.rounding import BITS, Arithmetic

RUNS = 4
FINER = 16
CHUNKS = (64, 16, 32, 128, 48)  # 48, since the others all begin a chunk at every 128th token
WINDOW = 9
KAPPA = 12.0
FLOOR_ULP = 2.0
ORIGIN = f"{KAPPA:g} sigma of the disturbed runs"
_AT_ONCE = 8  # runs evaluated together where there are many
_BATCH = 2**25  # float64 numbers of all runs' inputs: what is evaluated at once
_TINY = 2.0**-100  # products of what is flushed to zero below 2^-126 with anything up to 6e7, the norm's 1 / 1e-4 included


@dataclasses.dataclass(frozen=True)
class Bound:
    """The truth of one tensor, in float64, and the error allowed to each of its rows (its shape less the row's axis).

    `finer` makes the same bound from FINER times as many runs: a judge asks for it before it calls a row broken on a near thing.
    """

    value: Tensor
    allowed: Tensor
    origin: str = ORIGIN
    finer: Callable[[], "Bound"] | None = None

    def at(self, *index: Any) -> "Bound":
        """The bound of some rows: the value and the allowance indexed alike."""
        finer = self.finer
        later = None if finer is None else lambda: finer().at(*index)
        return Bound(self.value[index], self.allowed[index], self.origin, later)

    def beside(self, other: "Bound") -> "Bound":
        """The bound of the same tensor where both err, one after the other: the allowances add up."""
        one, two = self.finer, other.finer
        later = None if one is None or two is None else lambda: one().beside(two())
        return Bound(self.value, self.allowed + other.allowed, self.origin, later)

    def plus(self, other: "Bound") -> "Bound":
        """The bound of a sum of two tensors that err on their own."""
        one, two = self.finer, other.finer
        later = None if one is None or two is None else lambda: one().plus(two())
        return Bound(self.value + other.value, self.allowed + other.allowed, self.origin, later)


def truth(operation: Operation, inputs: Inputs, cotangents: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every output in float64, and with cotangents (of the outputs that have one) every gradient.

    ValueError, as from `bounds`, if the inputs break the operation's contract or a cotangent is not shaped as its output.
    """
    operation.check(inputs)
    return {name: runs[0] for name, runs in _evaluate(operation, inputs, cotangents, Arithmetic.exact()).items()}


def bounds(
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    algorithm: str,
    products: str = "ieee",
    chunk: int | None = None,
) -> dict[str, Bound]:
    """The truth and the bound of each output, and with cotangents of each gradient.

    `algorithm` is the class of the implementation ("chunkwise", "recurrent", "pointwise"), `products` how it multiplies float32
    matrices ("ieee", "tf32"), `chunk` the tokens in its chunks if known; cotangents are those of the outputs, in their dtypes.
    """
    if algorithm not in operation.classes:
        raise ValueError(f"algorithm must be one of {', '.join(operation.classes)} for {operation.name}, got {algorithm!r}")
    operation.check(inputs)
    exact = truth(operation, inputs, cotangents)
    make = functools.partial(_bounds, operation, inputs, cotangents, exact, algorithm, products, chunk)
    finer = functools.cache(lambda: make(FINER * RUNS))
    return {
        name: dataclasses.replace(bound, finer=functools.partial(lambda name: finer()[name], name))
        for name, bound in make(RUNS).items()
    }


def _bounds(
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    exact: dict[str, Tensor],
    algorithm: str,
    products: str,
    chunk: int | None,
    runs: int,
) -> dict[str, Bound]:
    dtype = _dtype(operation, inputs)
    chunks = CHUNKS if algorithm == "chunkwise" and chunk is None else (chunk,)
    runs = runs if len(chunks) == 1 else runs // 2
    plain = Arithmetic.of(algorithm, dtype, products, min(runs, _AT_ONCE))
    plain = dataclasses.replace(plain, gate=BITS[_dtype(operation, inputs, "gate")], first=1)
    pieces = _pieces(operation, inputs, plain.runs)
    cut = functools.partial(_slices, operation, pieces=pieces)
    given = list(zip(cut(inputs), cut(cotangents), cut(exact), strict=True))
    result: dict[str, Bound] = {}
    for size in chunks:
        arithmetics = [dataclasses.replace(plain, chunk=size, batch=batch) for batch in range(runs // plain.runs)]
        parts = [_spread(operation, *part, arithmetics) for part in given]
        for name, value in exact.items():
            port = operation.port(name)
            squares = _joined(operation, port, [part[name] for part in parts])
            step = plain.step if port.dtype == "input" or plain.stored == plain.output else 0.0
            ulp = 2.0 ** (1 - BITS[dtype if port.dtype == "input" else "fp32"])
            lengths = sequences(inputs, operation.inputs[0].name) if port.axes.startswith("B T") else []
            allowed = allowance(value, squares, port, lengths, ulp, step)
            result[name] = Bound(value, torch.maximum(allowed, result[name].allowed) if name in result else allowed)
    return result


def _dtype(operation: Operation, inputs: Inputs, kind: str = "input") -> str:
    """The name of the dtype that the inputs of a kind have; of float64, which only the truth is asked for, fp32."""
    names = [port.name for port in operation.inputs if port.dtype == kind and inputs.get(port.name) is not None]
    return NAMES.get(inputs[names[0]].dtype, "fp32") if names else "fp32"


def _spread(
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    exact: dict[str, Tensor],
    arithmetics: list[Arithmetic],
) -> dict[str, Tensor]:
    """The mean square by which the runs of some arithmetics differ from the truth."""
    squares = {name: torch.zeros_like(value) for name, value in exact.items()}
    for arithmetic in arithmetics:
        for name, runs in _evaluate(operation, inputs, cotangents, arithmetic).items():
            squares[name] += (runs - exact[name]).square_().mean(0) / len(arithmetics)
    return squares


def _pieces(operation: Operation, inputs: Inputs, runs: int) -> int:
    """Into how few calls a call is cut along the operation's parallel axes to keep the runs' inputs within _BATCH numbers each."""
    sizes = operation.sizes(inputs)
    most = math.gcd(*(sizes[axis] for axis in operation.parallel)) if operation.parallel else 1
    wanted = runs * sum(inputs[port.name].numel() for port in operation.inputs if inputs.get(port.name) is not None) / _BATCH
    return next(count for count in range(1, most + 1) if most % count == 0 and (count >= wanted or count == most))


def _slices(operation: Operation, tensors: Any, pieces: int) -> list[Any]:
    """Inputs, or tensors by name, cut into pieces along the operation's parallel axes; what has none of them is in each."""
    if tensors is None or pieces == 1:
        return [tensors] * pieces
    ports = {port.name: port for port in (*operation.inputs, *operation.outputs, *operation.gradients())}
    parts: list[dict[str, Any]] = [dict(tensors) for _ in range(pieces)]
    for name, x in tensors.items():
        if isinstance(x, Tensor) and name in ports and (axis := _axis(operation, ports[name])) is not None:
            for part, piece in zip(parts, x.chunk(pieces, axis), strict=True):
                part[name] = piece
    return [Inputs(**part) if isinstance(tensors, Inputs) else part for part in parts]


def _axis(operation: Operation, port: Port) -> int | None:
    axes = port.axes.split()
    return next((axes.index(axis) for axis in operation.parallel if axis in axes), None)


def _joined(operation: Operation, port: Port, parts: list[Tensor]) -> Tensor:
    axis = _axis(operation, port)
    assert axis is not None or len(parts) == 1, port
    return parts[0] if axis is None or len(parts) == 1 else torch.cat(parts, axis)


def allowance(value: Tensor, squares: Tensor, port: Port, lengths: list[int], ulp: float, step: float) -> Tensor:
    """The error allowed to each row, from a tensor's truth and the mean squared disturbance of its elements."""
    own = squares if port.scalar_rows else squares.sum(-1)
    magnitude = value.abs() if port.scalar_rows else value.norm(dim=-1)
    width = 1 if port.scalar_rows else value.shape[-1]
    floor = FLOOR_ULP * ulp * magnitude + (step + _TINY) * width**0.5
    return torch.maximum(KAPPA * (0.5 * own + 0.5 * _around(own, port, lengths)).sqrt(), floor)


def _around(own: Tensor, port: Port, lengths: list[int]) -> Tensor:
    """The mean of the WINDOW rows around each: along tokens [B, T, ...] within a sequence, else along the last axis of rows."""
    if not own.numel():
        return own
    if not port.axes.startswith("B T"):
        return _moving_mean(own) if own.ndim else own
    flat = own.flatten(0, 1).flatten(1) if own.ndim > 2 else own.flatten().unsqueeze(-1)
    return torch.cat([_moving_mean(piece.mT).mT for piece in flat.split(lengths)]).reshape(own.shape)


def _moving_mean(rows: Tensor) -> Tensor:
    """The mean over up to WINDOW entries around each along the last axis; fewer at the ends."""
    size = rows.shape[-1]
    if rows.numel() == 0:
        return rows
    total = torch.nn.functional.pad(rows.cumsum(-1), (1, 0))
    place = torch.arange(size, device=rows.device)
    first, last = (place - WINDOW // 2).clamp(min=0), (place + WINDOW // 2 + 1).clamp(max=size)
    return ((total[..., last] - total[..., first]) / (last - first)).clamp(min=0.0)


def _evaluate(
    operation: Operation, inputs: Inputs, cotangents: dict[str, Tensor] | None, arithmetic: Arithmetic
) -> dict[str, Tensor]:
    """Every output and gradient with the runs along axis 0, shaped as the call's tensors."""
    names = [port.name for port in operation.inputs if inputs.get(port.name) is not None]
    given = {name: inputs[name].detach() for name in names}
    given = {name: x if not x.is_floating_point() else x.double() for name, x in given.items()}
    leaves = {name: x.unsqueeze(0).repeat(arithmetic.runs, *[1] * x.ndim) for name, x in given.items()}
    wanted = {name: leaf for name, leaf in leaves.items() if cotangents is not None and leaf.is_floating_point()}
    for leaf in wanted.values():
        leaf.requires_grad_()
    outputs = operation.forward(inputs.replaced(**leaves), arithmetic)
    result = {name: value.detach() for name, value in outputs.items()}
    if cotangents is not None:
        for name, each in cotangents.items():
            if name not in outputs or each.shape != outputs[name].shape[1:]:
                wanted_shape = tuple(outputs[name].shape[1:]) if name in outputs else f"one of {', '.join(outputs)}"
                raise ValueError(f"cotangent of {name} must be {wanted_shape}, got shape {tuple(each.shape)}")
        given = {name: each for name, each in cotangents.items() if each.numel() and outputs[name].requires_grad}
        targets = [outputs[name] for name in given]
        directions = [each.double().unsqueeze(0).expand_as(outputs[name]) for name, each in given.items()]
        gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if targets:
            gradients = torch.autograd.grad(targets, list(wanted.values()), directions, allow_unused=True)
        for (name, leaf), gradient in zip(wanted.items(), gradients, strict=True):
            result[gradient_name(name)] = torch.zeros_like(leaf) if gradient is None else gradient
    return result
