"""The truth of a call in float64, and the error each row of it may have: the rounding model, run.

Disturbed runs (oracles/rounding.py) surround the exact one: RUNS of them, or RUNS / 2 for each of CHUNKS where a chunkwise
implementation does not say how long its chunks are, since where they begin decides where its state rounds and its cumulative gate
restarts; the greatest of their spreads counts. A row is a token and head's vector, a row of a state, or one element of g's and
beta's gradients. Its error scale is

    sigma^2 = 1/2 own + 1/2 mean over the WINDOW rows around it,    own = mean over runs of |disturbed - exact|^2

where the neighbours are those of the same sequence and head (for a state, of the same matrix): one row's own spread over RUNS
runs is a poor estimate. A row is broken when its error exceeds

    allowed = KAPPA sigma

never less than FLOOR_ULP units in the last place of the row, nor than the subnormal step of what is stored on the way to it.
Where equal values err alike, pooling rows does not help, so the judge asks for FINER times as many runs before it calls a row
broken that is over by less than tenfold.

docs/MEASUREMENTS.md derives KAPPA and holds the distribution of error / allowed on right implementations.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracles.gated_delta import Normalised, chunkwise, recurrent
from oracles.operation import NAMES, Inputs, Operation, Port, gradient_name
from oracles.rounding import BITS, Arithmetic

RUNS = 8
FINER = 8
CHUNKS = (64, 16, 32, 128)
WINDOW = 9
KAPPA = 12.0
FLOOR_ULP = 2.0
ORIGIN = f"{KAPPA:g} sigma of the disturbed runs"
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

    def plus(self, other: "Bound") -> "Bound":
        """The bound of a sum of two tensors that err on their own."""
        one, two = self.finer, other.finer
        later = None if one is None or two is None else lambda: one().plus(two())
        return Bound(self.value + other.value, self.allowed + other.allowed, self.origin, later)


def sequences(inputs: Inputs) -> list[int]:
    """Tokens per sequence of legal inputs."""
    if inputs.cu_seqlens is None:
        return [inputs.q.shape[1]] * int(inputs.q.shape[0])
    offsets = inputs.cu_seqlens.tolist()
    return [later - earlier for earlier, later in itertools.pairwise(offsets)]


def truth(inputs: Inputs, cotangents: dict[str, Tensor] | None = None, lengths: list[int] | None = None) -> dict[str, Tensor]:
    """Outputs o [B, T, HV, V] and final_state [N, HV, K, V] in float64, and with cotangents every gradient.

    `lengths` overrides the sequences' boundaries: the counterfactual in which state crosses them.
    """
    batch = _evaluate(inputs, cotangents, "chunkwise", Arithmetic.exact(), lengths)
    return {name: runs[0] for name, runs in batch.items()}


def bounds(
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    algorithm: str,
    products: str = "ieee",
    chunk: int | None = None,
) -> dict[str, Bound]:
    """The truth and the bound of each output, and with cotangents of each gradient.

    `algorithm` is the class of the implementation ("chunkwise", "recurrent"), `products` how it multiplies float32 matrices
    ("ieee", "tf32"), `chunk` the tokens in its chunks if known; cotangents are those of the outputs, in their dtypes.
    """
    make = functools.partial(_bounds, operation, inputs, cotangents, algorithm, products, chunk)
    finer = functools.cache(lambda: make(FINER))
    return {
        name: dataclasses.replace(bound, finer=functools.partial(lambda name: finer()[name], name))
        for name, bound in make(1).items()
    }


def _bounds(
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    algorithm: str,
    products: str,
    chunk: int | None,
    batches: int,
) -> dict[str, Bound]:
    dtype = NAMES[inputs.q.dtype]
    chunks = CHUNKS if algorithm == "chunkwise" and chunk is None else (chunk or CHUNKS[0],)
    plain = Arithmetic.of(algorithm, dtype, products, 1 + (RUNS if len(chunks) == 1 else RUNS // 2))
    exact: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for each in chunks:
        spreads: dict[str, list[Tensor]] = {}
        for batch in range(batches):
            arithmetic = dataclasses.replace(plain, batch=batch)
            for name, runs in _evaluate(inputs, cotangents, algorithm, arithmetic, chunk=each).items():
                exact.setdefault(name, runs[0])
                spreads.setdefault(name, []).append((runs[1:] - runs[:1]).square().mean(0))
        for name, spread in spreads.items():
            mean = torch.stack(spread).mean(0)
            squares[name] = torch.maximum(squares[name], mean) if name in squares else mean
    result = {}
    for name, value in exact.items():
        port = operation.port(name)
        step = plain.step if port.dtype == "input" or plain.stored == plain.output else 0.0
        ulp = 2.0 ** (1 - BITS[dtype if port.dtype == "input" else "fp32"])
        result[name] = Bound(value, allowance(value, squares[name], port, sequences(inputs), ulp, step))
    return result


def allowance(value: Tensor, squares: Tensor, port: Port, lengths: list[int], ulp: float, step: float) -> Tensor:
    """The error allowed to each row, from a tensor's truth and the mean squared disturbance of its elements."""
    own = squares if port.scalar_rows else squares.sum(-1)
    magnitude = value.abs() if port.scalar_rows else value.norm(dim=-1)
    width = 1 if port.scalar_rows else value.shape[-1]
    floor = FLOOR_ULP * ulp * magnitude + (step + _TINY) * width**0.5
    return torch.maximum(KAPPA * (0.5 * own + 0.5 * _around(own, port, lengths)).sqrt(), floor)


def _around(own: Tensor, port: Port, lengths: list[int]) -> Tensor:
    """The mean of the WINDOW rows around each: along tokens [B, T, H] within a sequence, or along K of a state [N, H, K]."""
    if port.axes.startswith("N"):
        return _moving_mean(own)
    flat = own.flatten(0, 1)
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
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    algorithm: str,
    arithmetic: Arithmetic,
    lengths: list[int] | None = None,
    chunk: int = CHUNKS[0],
) -> dict[str, Tensor]:
    """Every output and gradient with the runs along axis 0, shaped as the call's tensors."""
    lengths = sequences(inputs) if lengths is None else lengths
    heads, width = inputs.q.shape[-2:]
    value_heads, value_width = inputs.v.shape[-2:]
    names = [name for name in ("q", "k", "v", "g", "beta", "state") if inputs[name] is not None]
    leaves = {name: inputs[name].detach().double().unsqueeze(0).repeat(arithmetic.runs, *[1] * inputs[name].ndim) for name in names}
    if cotangents is not None:
        for leaf in leaves.values():
            leaf.requires_grad_()
    bits = arithmetic.output
    x = {name: leaves[name].flatten(1, 2) for name in names if name != "state"}
    for name in ("q", "k"):
        repeated = arithmetic.input(x[name], name).repeat_interleave(value_heads // heads, dim=-2)
        if inputs.qk_norm:  # after the repetition, where an implementation that normalises each value head's copy rounds
            repeated = Normalised.apply(repeated, arithmetic, f"{name} normalised")
        x[name] = arithmetic.gradient(repeated, f"d{name} a value head", arithmetic.stored)
    x["v"] = arithmetic.input(x["v"], "v")
    x["beta"] = arithmetic.gradient(x["beta"], "dbeta", bits)
    x["g"] = arithmetic.gradient(x["g"], "dg output", BITS[NAMES[inputs.g.dtype]] if arithmetic.runs > 1 else 53)
    shape = (arithmetic.runs, len(lengths), value_heads, width, value_width)
    state = leaves["state"] if "state" in leaves else x["v"].new_zeros(shape)
    if state.shape != shape:  # a counterfactual has other sequences, and no state of its own
        state = x["v"].new_zeros(shape)
    scale = width**-0.5 if inputs.scale is None else inputs.scale
    rows, finals, order = [], [], []
    for padded in _groups(lengths, chunk, inputs.q.device):
        q, k, v = (padded.gather(x[name]).transpose(2, 3) for name in ("q", "k", "v"))  # [runs, n, HV, L, width]
        g, beta = (padded.gather(x[name].unsqueeze(-1)).transpose(2, 3).squeeze(-1) for name in ("g", "beta"))
        start = state.index_select(1, padded.members)
        if algorithm == "recurrent":
            o, final = recurrent(q, k, v, g, beta, start, scale, arithmetic)
        else:
            o, final = chunkwise(q, k, v, g, beta, start, scale, arithmetic, min(chunk, padded.longest))
        rows.append(padded.scatter(o.transpose(2, 3)))
        finals.append(final)
        order.append(padded)
    tokens = torch.cat([padded.tokens for padded in order]).argsort()
    o = torch.cat(rows, 1).index_select(1, tokens)
    final = torch.cat(finals, 1).index_select(1, torch.cat([padded.members for padded in order]).argsort())
    o = arithmetic.result(o, "o").unflatten(1, inputs.v.shape[:2])
    outputs = {"o": o, "final_state": arithmetic.single(final, "final state")}
    result = {name: value.detach() for name, value in outputs.items()}
    if cotangents is not None:
        given = {name: each for name, each in cotangents.items() if each.numel() and outputs[name].requires_grad}
        targets = [outputs[name] for name in given]
        directions = [each.double().expand_as(outputs[name]) for name, each in given.items()]
        gradients = torch.autograd.grad(targets, list(leaves.values()), directions, allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            result[gradient_name(name)] = torch.zeros_like(leaf) if gradient is None else gradient
    return result


def _groups(lengths: list[int], chunk: int, device: torch.device) -> list["_Padded"]:
    """The sequences in groups of the same padded length (a power of two, or a number of chunks), so that none pads much."""
    groups: dict[int, list[int]] = {}
    for member, length in enumerate(lengths):
        short = max(16, 1 << max(length - 1, 0).bit_length())
        groups.setdefault(min(short, -(-length // chunk) * chunk) if length else 0, []).append(member)
    return [_Padded(lengths, members, longest, device) for longest, members in groups.items()]


class _Padded:
    """Some sequences as rows of one padded tensor [runs, n, L, ...], and back to tokens [runs, tokens, ...]."""

    def __init__(self, lengths: list[int], members: list[int], longest: int, device: torch.device) -> None:
        self.longest = longest
        self.members = torch.tensor(members, device=device)
        sizes = torch.tensor(lengths, device=device)
        starts = (sizes.cumsum(0) - sizes)[self.members]
        place = torch.arange(longest, device=device)
        inside = place < sizes[self.members].unsqueeze(-1)
        index = starts.unsqueeze(-1) + place
        self.index = torch.where(inside, index, sum(lengths))
        self.back = torch.nonzero(inside.flatten()).squeeze(-1)
        self.tokens = index.flatten()[self.back]

    def gather(self, x: Tensor) -> Tensor:
        """Tokens [runs, tokens, ...] to rows [runs, n, L, ...], zeros after a sequence's end."""
        x = torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1)
        rows: Tensor = x.index_select(1, self.index.flatten()).unflatten(1, tuple(self.index.shape))
        return rows

    def scatter(self, rows: Tensor) -> Tensor:
        """Rows [runs, n, L, ...] to the tokens that `tokens` names [runs, ..., ...]."""
        return rows.flatten(1, 2).index_select(1, self.back)
