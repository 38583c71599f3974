"""Judges the steps of a trace: the rows of all steps are one packed call of the oracle, with bounds for each of them."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from oracles.operation import DTYPES, Inputs
from oracles.tolerance.bound import Bound
from properties.laws.law import Blind, Breach, Pair
from properties.traces.case import TraceCase
from properties.traces.events import Row
from properties.traces.play import Moment, Slot, TraceBench, named


def judged(bench: TraceBench, case: TraceCase, moments: Iterator[Moment]) -> Iterator[Pair]:
    """Judge every step of a trace from the bits that its requests had before it. Blind if no step has a token of a request."""
    rows = {kind: PackedRows(case) for kind in ("p", "d", "v")}
    for moment in moments:
        _check_finite(case, moment)
        for place, row in enumerate(moment.step.rows):
            if row.real and row.count:
                rows["d" if moment.step.kind == "s" else moment.step.kind].add(moment, place, row)
    for kinds in ("p", "dv"):
        merged = PackedRows(case).of(*(rows[kind] for kind in kinds))
        if merged.parts:
            yield from merged.judged(bench, kinds[0])
    if not any(found.parts for found in rows.values()):
        raise Blind("no step has a token of a request")


def _check_finite(case: TraceCase, moment: Moment) -> None:
    """Raise Breach if a state or a window of an owner is not finite: no later step could be judged from it."""
    for owner, slot in sorted(moment.after.items()):
        for what, x in (("state", slot.state), ("window", slot.window)):
            if not x.isfinite().all():
                holds = f"holds {float(x[~x.isfinite()][0])}"
                raise Breach(f"a {what} is not finite", f"{named(owner)}'s {what} after {moment.where} of {case.trace} {holds}")


class Compared(NamedTuple):
    """A result of a row. `saved` says that it is a snapshot of a prefill, which may be kept in the dtype of the inputs."""

    port: str
    detail: str
    output: str  # of the oracle
    got: Tensor
    saved: bool = False


class PackedRows:
    """Rows of several steps as one packed call, and what each of them is judged by."""

    def __init__(self, case: TraceCase) -> None:
        self.case = case
        self.parts: list[dict[str, Tensor]] = []
        self.comparisons: list[list[Compared]] = []
        self.windows: list[Pair] = []

    def of(self, *others: "PackedRows") -> "PackedRows":
        """Return these rows with those of others behind."""
        self.parts = [part for other in others for part in other.parts]
        self.comparisons = [comparisons for other in others for comparisons in other.comparisons]
        self.windows = [pair for other in others for pair in other.windows]
        return self

    def add(self, moment: Moment, place: int, row: Row) -> None:
        """Add a row: its outputs, its state and window after the accepted tokens, and its snapshot."""
        name, event, dtype = row.request, moment.step.event, DTYPES[self.case.dtype]
        drawn = zip(("mixed", "a", "b"), self.case.row(moment.step, place), strict=True)
        tokens = {key: x.to(dtype) for key, x in drawn}
        zeros = Slot(torch.zeros_like(moment.after[name].state), torch.zeros_like(moment.after[name].window))
        before = zeros if row.begins else moment.before[name]
        line = torch.cat([before.window, tokens["mixed"].mT], -1)
        owners = [(name, name, row.accepted)]
        owners += [(f"{name}@", f"snapshot of {name}", row.snapshot)] if row.snapshot is not None else []
        for owner, whose, end in owners:
            want = line[:, end : end + self.case.width - 1]
            self.windows.append(Pair("window", f"of {whose} after event {event}", moment.after[owner].window, want))
        ends = {row.count: [Compared("o", f"of {name} in event {event}", "o", moment.rows[place])]}
        state = Compared("state", f"of {name} after event {event}", "final_state", moment.after[name].state)
        ends.setdefault(row.accepted, []).append(state)
        if row.snapshot is not None:
            saved, prefill = moment.after[f"{name}@"].state, moment.step.kind == "p"
            snapshot = Compared("snapshot", f"of {name} in event {event}", "final_state", saved, prefill)
            ends.setdefault(row.snapshot, []).append(snapshot)
        for end, comparisons in ends.items():
            part = {key: x[:end] for key, x in tokens.items()}
            self.parts.append({**part, "state": before.state, "window": before.window})
            self.comparisons.append(comparisons)

    def judged(self, bench: TraceBench, kind: str) -> Iterator[Pair]:
        """Yield every window, and every other result with its bound, from one call of the oracle."""
        yield from self.windows
        case, sizes = self.case, self.case.sizes()
        lengths = [len(part["mixed"]) for part in self.parts]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        inputs = Inputs(
            **{name: torch.cat([part[name] for part in self.parts]).unsqueeze(0) for name in ("mixed", "a", "b")},
            state=torch.stack([part["state"] for part in self.parts]).float(),
            window=torch.stack([part["window"] for part in self.parts]),
            A_log=sizes.A_log,
            dt_bias=sizes.dt_bias,
            weight=sizes.weight,
            cu_seqlens=offsets,
            heads=case.heads,
            qk_norm_eps=sizes.qk_norm_eps,
            qk_norm_form=sizes.qk_norm_form,
        )
        bounds = bench.bounds(inputs, kind)
        for number, comparisons in enumerate(self.comparisons):
            for port, detail, output, got, saved in comparisons:
                if output == "o":
                    yield Pair(port, detail, got, bounds["o"].at(0, slice(int(offsets[number]), int(offsets[number + 1]))))
                else:
                    rounded = [DTYPES[case.state]]
                    rounded += [DTYPES[case.dtype]] if saved and bench.domain.snapshot_dtype == "input" else []
                    yield Pair(port, detail, got, _stored(bounds["final_state"].at(number), rounded))


def _stored(bound: Bound, dtypes: list[torch.dtype]) -> Bound:
    """Return the bound of a state that is rounded once to each of these dtypes, each time by half a unit in the last place."""
    half = sum(torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype != torch.float32)
    if not half:
        return bound
    tiny = sum(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype != torch.float32)
    norm = torch.linalg.vector_norm(bound.value, dim=-1)
    allowed = bound.allowed + half * (norm + bound.allowed) + tiny * bound.value.shape[-1] ** 0.5
    finer = bound.finer
    later = None if finer is None else lambda over=None: _stored(finer(over), dtypes)
    return dataclasses.replace(bound, allowed=allowed, finer=later, origin=f"{bound.origin}, and the rounding of stored states")
