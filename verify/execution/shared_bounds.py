"""Computes the bounds of several cases in one call of the oracle, with their sequences packed side by side.

The oracle's many small operations then serve all the cases at once. Sequences of a rule do not influence each other, and error
scales are pooled within a sequence (oracles/tolerance/bound.py). So a case gets the truth that it gets alone, and its tolerance
differs only because the disturbed runs round on other grids. A_log and dt_bias of a gate in the kernel, which the tokens of all
sequences share, get one row for each case; its gradient is a sum over that case's own tokens (oracles/gates.py).

A case without an initial state, or without dt_bias, gets zeros in their place. A case without backward gets a backward if another
case has one. The gradients that this adds are dropped.

A case with an error over its bound is run again alone (verify/engine/asking.py), so a line that is printed as broken is broken
without the other cases too.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from oracles.arithmetic.room import fitting
from oracles.operation import Inputs, Operation, Port, gradient_name
from oracles.tolerance import bound
from oracles.tolerance.bound import Bound
from properties.laws.law import Cotangents
from properties.layers.case import LayerCase
from properties.pools.case import PoolCase
from properties.rules.case import Case
from properties.rules.numbers import drawn
from verify.adapters.base import Adapter
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.gpu import device as devices

MOST = 64  # cases in one call
# Numbers in one call, as `numbers` counts them. With these, a worker held 12.3 GiB at most in 400 cases of a palette
# (docs/results.md).
NUMBERS = 2**25
CHUNK = 64  # tokens in a chunk of the oracle, which is the least width of its matrices, however few channels there are
# Words in which cases of one call may differ. A word that is new counts as one in which they must be alike.
DIFFERENT = {
    *("lengths", "packed", "gate", "beta", "values", "state", "dt_bias", "offsets", "options", "state_dtype", "final_dtype"),
    *("initial_states", "final_states", "backward", "seed"),
}
ALIKE = tuple(name for name in Case.WORDS if name not in DIFFERENT)
Bounds = dict[str, Bound]


def together(runs: Sequence[Run]) -> Iterator["Shared | None"]:
    """For each run, in order, yield its part of a call that it shares with similar runs, or None if it shares none.

    A run counts as finished when the next one is taken from the iterator. The inputs and bounds of a call are made when its first
    run needs them, and released after its last run.
    """
    groups: dict[Any, list[int]] = {}
    for index, run in enumerate(runs):
        case = run.example.case
        if isinstance(case, Case) and run.the_law.base and _can_share(case):
            alike = (*(getattr(case, name) for name in ALIKE), case.spec.name)
            doubled = case.beta_inside and case.beta == "two"  # allow_neg_eigval
            groups.setdefault((run.adapter, run.products, run.device, alike, doubled), []).append(index)
    places: dict[int, tuple[_Call, int]] = {}
    for members in groups.values():
        for several in _shared([runs[index].example.case for index in members], runs[members[0]].device):
            if len(several) > 1:
                call = _Call([runs[members[place]] for place in several])
                places |= {members[place]: (call, row) for row, place in enumerate(several)}
    for index in range(len(runs)):
        if index not in places:
            yield None
            continue
        call, row = places[index]
        yield Shared(call, row)
        call.leave()


def _can_share(case: Case) -> bool:
    """Whether every sequence has its own states or none, and no decays of value channels make a head of every channel."""
    own = case.initial_states == "each" and case.final_states != "last"
    return own and case.channel_decays not in ("values", "both")


def numbers(case: Case | PoolCase | LayerCase) -> int:
    """The size of a case: the numbers in its channels and states, where a token counts at least as wide as a chunk's matrices."""
    tokens = case.tokens * max(case.key_dim + case.value_dim, CHUNK)
    return case.value_heads * (tokens + len(case.lengths) * case.key_dim * case.value_dim)


def _shared(cases: Sequence[Case], device: str) -> list[list[int]]:
    """Which cases share a call, as lists of their indices, in order and of about equal length.

    A call has at most MOST cases and NUMBERS numbers, or fewer numbers if memory has less room.
    """
    even = -(-len(cases) // -(-len(cases) // MOST))
    calls, most = list[list[int]](), fitting(NUMBERS, torch.device(device))
    size = most
    for place, case in enumerate(cases):
        if not calls or len(calls[-1]) == even or size + numbers(case) > most:
            calls.append([])
            size = 0
        calls[-1].append(place)
        size += numbers(case)
    return calls


def of_calls(spec: Operation) -> Operation:
    """The operation of C calls side by side. Inputs without tokens or sequences get an axis C, with one row for each call.

    The additional input `calls` has the number of tokens of each call.
    """
    ports = [port if _along(port) else dataclasses.replace(port, axes=f"C {port.axes}") for port in spec.inputs]
    return dataclasses.replace(spec, inputs=tuple(ports), rules=(*spec.rules, _tokens_of_calls))


def _tokens_of_calls(inputs: Inputs, sizes: dict[str, int]) -> None:
    """Check the input `calls`, the number of tokens of each call. ValueError if it does not fit."""
    calls, rows = inputs.calls, sizes.get("C", len(inputs.calls))
    if len(calls) != rows or sum(calls) != sizes["T"]:
        raise ValueError(f"calls must be of C = {rows} calls and add up to T = {sizes['T']} tokens, got {calls}")


def _along(port: Port) -> str:
    """What a port is joined along: "tokens", "sequences", or "" if all tokens and sequences of a call share it."""
    return "tokens" if port.axes.startswith("B T") else "sequences" if port.axes.startswith("N ") else ""


@dataclasses.dataclass(frozen=True)
class Shared:
    """One case of a shared call. It implements `Ready` of verify/bench/adapter_bench.py."""

    of: "_Call"
    row: int

    @property
    def bytes(self) -> int:
        """The bytes of the tensors of all cases together, as long as the bounds are not made."""
        return 0 if self.of.results else sum(case.bytes for case in self.of.cases)

    def call(self) -> tuple[Inputs, Cotangents]:
        """The case's inputs, and its cotangents if it has a backward. They can be taken only once."""
        return self.of.take(self.row)

    def bounds(self, algorithm: str) -> Bounds:
        """The case's bounds for a class of algorithm. Finer bounds, which few cases need, are computed for the case alone."""
        return self.of.bounds_of(self.row, algorithm)


class _Call:
    """One packed call of all sequences of several cases."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.run, self.runs, self.cases = runs[0], runs, [run.example.case for run in runs]
        self.tokens = [0, *itertools.accumulate(case.tokens for case in self.cases)]
        self.rows = [0, *itertools.accumulate(len(case.lengths) for case in self.cases)]
        self.results: dict[str, Bounds] = {}
        self.waiting: dict[int, tuple[Inputs, Cotangents]] = {}  # inputs and cotangents that have not been handed out yet
        self.staying = len(runs)

    def leave(self) -> None:
        """One of the cases is finished. After the last one, release everything."""
        self.staying -= 1
        if not self.staying:
            self.results.clear()
            self.waiting.clear()
            self.__dict__.pop("_joined_call", None)

    def take(self, row: int) -> tuple[Inputs, Cotangents]:
        """Hand out the inputs of one case, and its cotangents if it has a backward. No reference to them stays here."""
        _ = self._joined_call
        inputs, cotangents = self.waiting.pop(row)
        return inputs, cotangents if self.cases[row].backward else None

    def bounds_of(self, row: int, algorithm: str) -> Bounds:
        """The bounds of one case for a class of algorithm. Finer bounds, which few cases need, are computed for the case alone."""
        if algorithm not in self.results:
            self.results[algorithm] = self._computed(algorithm)
        case = self.cases[row]
        parts = {
            name: self._part(row, name, whole)
            for name, whole in self.results[algorithm].items()
            if name not in _without_gradient(case)
        }
        alone = functools.cache(lambda: _alone(self.runs[row], algorithm, parts))

        def later(name: str, over: Tensor | None = None) -> Bound:
            finer = alone()[name].finer
            assert finer is not None
            return finer(over)

        return {name: dataclasses.replace(part, finer=functools.partial(later, name)) for name, part in parts.items()}

    def _computed(self, algorithm: str) -> Bounds:
        spec, (inputs, cotangents) = of_calls(self.cases[0].spec), self._joined_call
        with devices.default("cpu"):
            bounds = bound.bounds(spec, inputs, cotangents, algorithm, self.run.products, **_options(self.run, algorithm))
        return {name: dataclasses.replace(whole, finer=None) for name, whole in bounds.items()}

    @functools.cached_property
    def _joined_call(self) -> tuple[Inputs, Cotangents]:
        """The inputs and cotangents of all cases, side by side.

        Those of each single case are kept in `waiting`, since making them again would take as long.
        """
        device, backward = self.run.device, any(case.backward for case in self.cases)
        with devices.default("cpu"):
            self.waiting = dict(enumerate(drawn(self.cases, device, backward=backward)))
            joined = self._joined([inputs for inputs, _ in self.waiting.values()])
            per_case = [cotangents for _, cotangents in self.waiting.values() if cotangents is not None]
            ports = self.cases[0].spec.outputs if per_case else ()
            cotangents = {port.name: _side_by_side(port, [one[port.name] for one in per_case]) for port in ports}
        return joined, cotangents or None

    def _joined(self, several: Sequence[Inputs]) -> Inputs:
        tensors: dict[str, Tensor] = {}
        for port in self.cases[0].spec.inputs:
            parts = [inputs.get(port.name) for inputs in several]
            if (like := next((part for part in parts if part is not None), None)) is not None:
                pieces = [self._zeros(row, port, like) if part is None else part for row, part in enumerate(parts)]
                tensors[port.name] = _side_by_side(port, pieces)
        lengths = [length for case in self.cases for length in case.lengths]
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=several[0].q.device)
        calls = tuple(case.tokens for case in self.cases)
        return Inputs(**{**several[0], **tensors, "cu_seqlens": offsets, "calls": calls})

    def _zeros(self, row: int, port: Port, like: Tensor) -> Tensor:
        """Zeros for an input that a case lacks, shaped after `like`, the same input of another case."""
        assert port.optional and _along(port) != "tokens", port
        return like.new_zeros((len(self.cases[row].lengths), *like.shape[1:]) if _along(port) else like.shape)

    def _part(self, row: int, name: str, whole: Bound) -> Bound:
        """A case's part of a bound, in the case's own shape."""
        case = self.cases[row]
        along = _along(case.spec.port(name))
        if along == "sequences":
            return whole.at(slice(self.rows[row], self.rows[row + 1]))
        if not along:
            return whole.at(row)
        part = whole.at(0, slice(self.tokens[row], self.tokens[row + 1]))
        batch = (1, case.tokens) if case.packed else (len(case.lengths), case.lengths[0])
        return dataclasses.replace(part, value=part.value.unflatten(0, batch), allowed=part.allowed.unflatten(0, batch))


def _without_gradient(case: Case) -> set[str]:
    """The gradients that the case alone would not have: all if it has no backward, else those of inputs that it lacks."""
    given = {"state": case.state != "none", "dt_bias": case.dt_bias}
    return {gradient_name(port.name) for port in case.spec.inputs if not (case.backward and given.get(port.name, True))}


def _side_by_side(port: Port, parts: Sequence[Tensor]) -> Tensor:
    if _along(port) == "tokens":
        return torch.cat([part.flatten(0, 1) for part in parts]).unsqueeze(0)
    return torch.cat(list(parts)) if _along(port) else torch.stack(list(parts))


def _options(run: Run, algorithm: str) -> dict[str, Any]:
    """The adapter's declarations that bounds for its own class of algorithm depend on; none for another class."""
    adapter = adapter_of(run.adapter)
    assert isinstance(adapter, Adapter), run
    options = {"chunk": adapter.chunk, "stores": adapter.stores, "folds": adapter.folds}
    return options if algorithm == adapter.algorithm else {}


def _alone(run: Run, algorithm: str, shared_bounds: Bounds) -> Bounds:
    """The bounds `made` of one case, with finer ones that are computed for this case alone."""
    case = run.example.case
    with devices.default("cpu"):
        ((inputs, cotangents),) = drawn([case], run.device, backward=case.backward)
        return bound.bounds(
            case.spec, inputs, cotangents, algorithm, run.products, shared_bounds=shared_bounds, **_options(run, algorithm)
        )
