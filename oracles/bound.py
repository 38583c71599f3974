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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracles.operation import NAMES, Inputs, Operation, Port, gradient_name, sequences
from oracles.rounding import BITS, EXACT, Arithmetic

RUNS = 4
FINER = 16
CHUNKS = (64, 16, 32, 128, 48)  # 48, since the others all begin a chunk at every 128th token
WINDOW = 9
KAPPA = 12.0
FLOOR_ULP = 2.0
ORIGIN = f"{KAPPA:g} sigma of the disturbed runs"
_AT_ONCE = 8  # runs evaluated together where there are many
_NEAR = 2_500_000  # bytes of some runs' inputs: with more, a CPU waits for memory; measured
_BYTES = {"half": 4, "single": 8, "recurrent": 20}  # an input's: float32, float64, and that for two halves and more
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
    dtypes = _dtype(operation, inputs), _dtype(operation, inputs, "gate")
    inputs, cotangents = _wide(operation, inputs), cotangents and {name: each.double() for name, each in cotangents.items()}
    exact = {name: runs[0] for name, runs in _evaluate(operation, inputs, cotangents, Arithmetic.exact()).items()}
    make = functools.partial(_bounds, operation, inputs, cotangents, exact, dtypes, algorithm, products, chunk)
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
    dtypes: tuple[str, str],
    algorithm: str,
    products: str,
    chunk: int | None,
    runs: int,
) -> dict[str, Bound]:
    dtype, gate = dtypes
    chunks = CHUNKS if algorithm == "chunkwise" and chunk is None else (chunk,)
    runs = runs if len(chunks) == 1 else runs // 2
    plain = Arithmetic.of(algorithm, dtype, products, min(runs, _AT_ONCE))
    plain = dataclasses.replace(plain, gate=BITS[gate], first=1)
    once = _at_once(inputs, plain)
    pieces = _pieces(operation, inputs, plain.runs)
    cut = functools.partial(_slices, operation, pieces=pieces)
    given = list(zip(cut(inputs), cut(cotangents), cut(exact), strict=True))
    ports = {port.name: port for port in (*operation.outputs, *operation.gradients())}
    result: dict[str, Bound] = {}
    for size in chunks:
        arithmetics = [
            dataclasses.replace(plain, chunk=size, batch=batch, runs=once, first=first, last=plain.runs)
            for batch in range(runs // plain.runs)
            for first in range(1, plain.runs + 1, once)
        ]
        parts = [_spread(ports, operation, *part, arithmetics) for part in given]
        rows = []
        for name, value in exact.items():
            port = ports[name]
            step = plain.step if port.dtype == "input" or plain.stored == plain.output else 0.0
            ulp = 2.0 ** (1 - BITS[dtype if port.dtype == "input" else "fp32"])
            rows.append(Rows(port, value, _joined(operation, port, [part[name] for part in parts]), ulp, step))
        lengths = sequences(inputs, operation.inputs[0].name) if any(each.along_tokens for each in rows) else []
        for (name, value), allowed in zip(exact.items(), allowances(rows, lengths), strict=True):
            result[name] = Bound(value, torch.maximum(allowed, result[name].allowed) if name in result else allowed)
    return result


def _dtype(operation: Operation, inputs: Inputs, kind: str = "input") -> str:
    """The name of the dtype that the inputs of a kind have; of float64, which only the truth is asked for, fp32."""
    names = [port.name for port in operation.inputs if port.dtype == kind and inputs.get(port.name) is not None]
    return NAMES.get(inputs[names[0]].dtype, "fp32") if names else "fp32"


def _wide(operation: Operation, inputs: Inputs) -> Inputs:
    """The inputs in float64."""
    names = [port.name for port in operation.inputs if inputs.get(port.name) is not None]
    return inputs.replaced(**{name: inputs[name].double() for name in names if inputs[name].is_floating_point()})


def _spread(
    ports: dict[str, Port],
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    exact: dict[str, Tensor],
    arithmetics: list[Arithmetic],
) -> dict[str, Tensor]:
    """The mean over the runs of some arithmetics of each row's squared distance from the truth."""
    own: list[Tensor] = []
    for arithmetic in arithmetics:
        runs = _evaluate(operation, inputs, cotangents, arithmetic)
        off = [runs[name] - value for name, value in exact.items()]
        torch._foreach_mul_(off, off)
        each = [x.sum((0,) if ports[name].scalar_rows else (0, -1)) for name, x in zip(exact, off, strict=True)]
        own = list(torch._foreach_add(own, each)) if own else each
    torch._foreach_div_(own, float(sum(arithmetic.runs for arithmetic in arithmetics)))
    return dict(zip(exact, own, strict=True))


def _at_once(inputs: Inputs, plain: Arithmetic) -> int:
    """How many of the runs are evaluated together: on a CPU no more than keep what they work on near."""
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    if any(x.device.type != "cpu" for x in tensors):
        return plain.runs
    each = _BYTES["recurrent" if plain.algorithm == "recurrent" else "half" if plain.product == EXACT else "single"]
    near = min(plain.runs, _NEAR // max(1, each * sum(x.numel() for x in tensors)))
    return max((count for count in range(1, near + 1) if plain.runs % count == 0), default=1)


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


class Rows(NamedTuple):
    """The rows of a tensor: its truth, each row's mean squared disturbance (`own`), a unit in the last place, a subnormal step."""

    port: Port
    value: Tensor
    own: Tensor
    ulp: float
    step: float

    @property
    def along_tokens(self) -> bool:
        """Whether the neighbours of a row are those of its sequence and head."""
        return self.port.axes.startswith("B T")


def allowances(given: Sequence[Rows], lengths: list[int]) -> list[Tensor]:
    """The error allowed to each row of some tensors; `lengths` are those of the sequences, for tensors with tokens."""
    floors = [rows.value.abs() if rows.port.scalar_rows else torch.linalg.vector_norm(rows.value, dim=-1) for rows in given]
    widths = [1 if rows.port.scalar_rows else rows.value.shape[-1] for rows in given]
    torch._foreach_mul_(floors, [FLOOR_ULP * rows.ulp for rows in given])
    torch._foreach_add_(floors, [(rows.step + _TINY) * width**0.5 for rows, width in zip(given, widths, strict=True)])
    along = iter(_along_tokens([rows.own for rows in given if rows.along_tokens], lengths))
    spread = [next(along) if rows.along_tokens else _allowed(rows.own, _moving_mean(rows.own)) for rows in given]
    return [torch.maximum(each, floor) for each, floor in zip(spread, floors, strict=True)]


def _allowed(own: Tensor, around: Tensor) -> Tensor:
    return (own + around).mul_(0.5 * KAPPA**2).sqrt_()


def _along_tokens(given: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """What is allowed where the neighbours of a row are those of its sequence and head: all tensors [B, T, ...] at once."""
    tokens = sum(lengths)
    if not given or not tokens:
        return given
    parts = [own.flatten(0, 1).reshape(tokens, -1) for own in given]
    # Between two sequences stand so many zeros that no window sees both; a column of ones counts what each window sees.
    gap = WINDOW // 2
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    places = (torch.arange(tokens) + gap * numbers).to(given[0].device)
    columns = torch.cat([*parts, parts[0].new_ones(tokens, 1)], -1)
    apart = columns.new_zeros(tokens + gap * len(lengths), columns.shape[-1]).index_copy_(0, places, columns)
    means = torch.nn.functional.avg_pool1d(apart.mT, WINDOW, 1, gap).mT.index_select(0, places)
    each = _allowed(columns, means / means[:, -1:]).split([*(part.shape[-1] for part in parts), 1], -1)
    return [part.reshape(own.shape) for part, own in zip(each, given, strict=False)]


def _moving_mean(rows: Tensor) -> Tensor:
    """The mean over up to WINDOW entries around each along the last axis; fewer at the ends."""
    if not rows.ndim or not rows.numel():
        return rows
    each = rows.reshape(-1, rows.shape[-1])
    return torch.nn.functional.avg_pool1d(each, WINDOW, 1, WINDOW // 2, count_include_pad=False).reshape(rows.shape)


def _evaluate(
    operation: Operation, inputs: Inputs, cotangents: dict[str, Tensor] | None, arithmetic: Arithmetic
) -> dict[str, Tensor]:
    """Every output and gradient with the runs along axis 0, shaped as the call's tensors."""
    names = [port.name for port in operation.inputs if inputs.get(port.name) is not None]
    given = {name: x.detach() for name, x in _wide(operation, inputs).items() if name in names}
    leaves = {name: x.unsqueeze(0).expand(arithmetic.runs, *x.shape) for name, x in given.items()}
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
