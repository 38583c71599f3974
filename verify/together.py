"""The bounds of several cases at once: their sequences side by side in one packed call, so that its many small operations serve
them all.

Sequences of a rule know nothing of each other, and rows are pooled within theirs (oracles/bound.py): a case has the truth that
it has alone, and its allowance differs only by the grids on which the disturbed runs round. What is over it is asked alone again
(verify/check.py), so a printed line comes to the same wherever it stood.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oracles import bound
from oracles.bound import Bound
from oracles.case import Case
from oracles.operation import Inputs, Port
from verify import device as devices
from verify.adapter import Adapter
from verify.run import Run, adapter_of

MOST, TOKENS = 16, 2**14  # cases and tokens in one call
ALIKE = ("operation", "heads", "value_heads", "key_dim", "value_dim", "dtype", "gate_dtype", "scale", "qk_norm", "in_kernel")
Bounds = dict[str, Bound]
Ready = Callable[[str], Bounds]  # by class of algorithm


def together(runs: Sequence[Run]) -> list[Ready | None]:
    """For each run what makes its bounds, at once with those of others like it, when the first of them is asked for.

    None for those that are alone: only the oracle law asks for the bounds of a rule's case as it stands, and only without a gate
    in the kernel, whose parameters' gradients are sums over all sequences.
    """
    groups: dict[Any, list[int]] = {}
    ready: list[Ready | None] = [None] * len(runs)
    for index, run in enumerate(runs):
        case = run.example.case
        if run.law == "oracle" and isinstance(case, Case) and case.tokens and not case.gate_inside:
            alike = tuple(getattr(case, name) for name in ALIKE)
            key = (run.adapter, run.products, run.device, alike, case.state != "none", case.backward)
            groups.setdefault((*key, case.beta == "two" and case.beta_inside), []).append(index)
    for members in groups.values():
        for several in _shared([runs[index].example.case for index in members]):
            if len(several) > 1:
                call = _Call([runs[members[place]] for place in several])
                for row, place in enumerate(several):
                    ready[members[place]] = functools.partial(call.bounds_of, row)
    return ready


def _shared(cases: Sequence[Case]) -> list[list[int]]:
    """Which cases share a call: in their order, MOST of them and TOKENS tokens at most."""
    calls: list[list[int]] = []
    tokens = TOKENS
    for place, case in enumerate(cases):
        if not calls or len(calls[-1]) == MOST or tokens + case.tokens > TOKENS:
            calls.append([])
            tokens = 0
        calls[-1].append(place)
        tokens += case.tokens
    return calls


class _Call:
    """One packed call of all sequences of several cases."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.run, self.runs, self.cases = runs[0], runs, [run.example.case for run in runs]
        self.tokens = [0, *itertools.accumulate(case.tokens for case in self.cases)]
        self.rows = [0, *itertools.accumulate(len(case.lengths) for case in self.cases)]
        self.made: dict[str, Bounds] = {}

    def bounds_of(self, row: int, algorithm: str) -> Bounds:
        """The bounds of one of the cases, for a class of algorithm; finer ones, which few cases ask for, are of the case alone."""
        if algorithm not in self.made:
            self.made[algorithm] = self._made(algorithm, self.cases)
        spec, case = self.cases[row].spec, self.cases[row]
        tokens = slice(self.tokens[row], self.tokens[row + 1])
        rows = slice(self.rows[row], self.rows[row + 1])
        batch = (1, case.tokens) if case.packed else (len(case.lengths), case.lengths[0])
        alone = functools.cache(lambda: _Call([self.runs[row]]).bounds_of(0, algorithm))
        parts = {name: _part(spec.port(name), each, rows, tokens, batch) for name, each in self.made[algorithm].items()}
        if len(self.cases) == 1:
            return parts
        return {name: dataclasses.replace(part, finer=functools.partial(_finer, alone, name)) for name, part in parts.items()}

    def _made(self, algorithm: str, cases: Sequence[Case]) -> Bounds:
        case, device = cases[0], self.run.device
        adapter = adapter_of(self.run.adapter)
        assert isinstance(adapter, Adapter), self.run
        chunk = adapter.chunk if algorithm == adapter.algorithm else None
        with devices.default("cpu"):
            inputs = self._joined([each.inputs(device) for each in cases])
            each = [one.cotangents(device) for one in cases] if case.backward else []
            cotangents = {name: self._side_by_side(name, [one[name] for one in each]) for name in (each[0] if each else ())}
            return bound.bounds(case.spec, inputs, cotangents or None, algorithm, self.run.products, chunk, first=1)

    def _joined(self, several: Sequence[Inputs]) -> Inputs:
        first = several[0]
        names = [port.name for port in self.cases[0].spec.inputs if port.dtype != "index" and first.get(port.name) is not None]
        tensors = {name: self._side_by_side(name, [one[name] for one in several]) for name in names}
        lengths = [length for case in self.cases for length in case.lengths]
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=first.q.device)
        return first.replaced(**tensors, cu_seqlens=offsets)

    def _side_by_side(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        spec = self.cases[0].spec
        port = next(port for port in (*spec.inputs, *spec.outputs) if port.name == name)
        if port.axes.startswith("B T"):
            return torch.cat([part.flatten(0, 1) for part in parts]).unsqueeze(0)
        return torch.cat(list(parts))


def _finer(alone: Callable[[], Bounds], name: str) -> Bound:
    finer = alone()[name].finer
    assert finer is not None
    return finer()


def _part(port: Port, whole: Bound, rows: slice, tokens: slice, batch: tuple[int, int]) -> Bound:
    """A case's part of a bound, in the case's own shape."""
    if not port.axes.startswith("B T"):
        return whole.at(rows)
    part = whole.at(0, tokens)
    value, allowed = (x.unflatten(0, batch) for x in (part.value, part.allowed))
    finer = part.finer
    later = None if finer is None else lambda: _part(port, _back(finer()), slice(0), slice(None), batch)
    return dataclasses.replace(part, value=value, allowed=allowed, finer=later)


def _back(part: Bound) -> Bound:
    finer = part.finer
    later = None if finer is None else lambda: _back(finer())
    return dataclasses.replace(part, value=part.value.unsqueeze(0), allowed=part.allowed.unsqueeze(0), finer=later)
