"""A contest: forms of one computation, timed alternately forward and backward, and judged against the float64 truth."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oracles.operation import Inputs, Operation, gradient_name
from oracles.tolerance.bound import Bound, bounds
from properties.laws.law import pairs_of
from verify.bench.guards import poisoned
from verify.bench.places import where
from verify.claims.timing import Call, Clock, Effort, measured
from verify.execution.judge import judge
from verify.process.outcome import Finding

Tensors = tuple[Tensor, ...]
Form = Callable[[Inputs], Tensors]


@dataclasses.dataclass(frozen=True)
class Contest:
    """Forms of one operation, by name.

    - `timed`, `judged`: the cases (see properties/rules/case.py) with which the forms are timed and judged.
    - `join` makes the operation's `outputs` from the tensors that a form returns; `split` makes the cotangents of these tensors
      from the cotangents of the outputs.
    - `prepare` gives the inputs the layout that they have in a model.
    - `algorithm`, `chunk`: the class of algorithm for the tolerances, see oracles/tolerance/bound.py.
    """

    forms: Mapping[str, Form]
    timed: Any
    judged: Any
    algorithm: str
    chunk: int | None = None
    outputs: tuple[str, ...] = ("y",)
    split: Callable[[Tensors], Tensors] = tuple
    join: Callable[[Tensors], Tensors] = tuple
    prepare: Callable[[Inputs], Inputs] = lambda inputs: inputs
    backward: bool = True


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The inputs of a case and the cotangents of its outputs. `given` has the differentiable inputs, which are leaf tensors."""

    inputs: Inputs
    given: dict[str, Tensor]
    cotangents: Tensors


def ready(contest: Contest, case: Any, device: torch.device) -> Prepared:
    """The tensors of a case on a device, in the contest's layout."""
    inputs, spec = contest.prepare(case.inputs(str(device))), contest.judged.spec
    names = [port.name for port in spec.inputs if port.dtype != "index" and inputs.get(port.name) is not None]
    # nn.Parameter, because a module accepts nothing else in place of its parameters.
    leaves: dict[str, Tensor] = {name: nn.Parameter(inputs[name], requires_grad=contest.backward) for name in names}
    every = case.cotangents(str(device)) if contest.backward else {}
    return Prepared(inputs.replaced(**leaves), leaves, tuple(every[name] for name in contest.outputs if every))


@dataclasses.dataclass(frozen=True)
class Times:
    """For each form, the milliseconds forward (`ahead`) and backward (`back`), and the seconds of each first call.

    First calls include compilation and autotuning.
    """

    ahead: dict[str, list[float]]
    back: dict[str, list[float]]
    first_ahead_s: dict[str, float]
    first_back_s: dict[str, float]


def time_forms(contest: Contest, clock: Clock, effort: Effort, device: torch.device) -> Times:
    """The times of the forms on the timed case. If there is a backward, forward saves tensors for it, as in training."""
    x = ready(contest, contest.timed, device)
    with torch.set_grad_enabled(contest.backward):
        calls: dict[str, Call] = {name: functools.partial(form, x.inputs) for name, form in contest.forms.items()}
        first_ahead = {name: clock.first(call) for name, call in calls.items()}
        ahead = measured(calls, clock, effort)
        if not contest.backward:
            return Times(ahead, {}, first_ahead, {})
        graphs = {name: form(x.inputs) for name, form in contest.forms.items()}
    leaves, directions = [*x.given.values()], contest.split(x.cotangents)

    def back(graph: Tensors) -> Tensors:
        return torch.autograd.grad(graph, leaves, directions, retain_graph=True)

    backs: dict[str, Call] = {name: functools.partial(back, graph) for name, graph in graphs.items()}
    first_back = {name: clock.first(call) for name, call in backs.items()}
    return Times(ahead, measured(backs, clock, effort), first_ahead, first_back)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How the forms' results compare with the truth.

    `worst` has each form's largest error divided by its tolerance, `findings` its errors over the tolerance, and `apart` the
    largest difference between two forms divided by the tolerance.
    """

    size: str
    worst: dict[str, float]
    findings: dict[str, list[Finding]]
    apart: dict[tuple[str, str], float]

    def broken(self, *forms: str) -> list[str]:
        """The wrong forms among the given ones."""
        return [name for name in forms if self.findings[name]]

    def about(self, *forms: str) -> str:
        """A text about the results of the given forms."""
        if wrong := self.broken(*forms):
            return f"BROKEN at {self.size}: " + "; ".join(f"{name}: {_finding_text(self.findings[name][0])}" for name in wrong)
        text = f"hold at {self.size}: {', '.join(f'{self.worst[name]:.2f}' for name in forms)} of what rounding allows"
        if len(forms) != 2:
            return text
        apart = self.apart[forms[0], forms[1]]
        return f"{text}, {apart:.2f} apart" if apart else f"{text}, equal to the bit"


def _finding_text(finding: Finding) -> str:
    rows = f", {finding.rows_over} of {finding.rows} rows, the worst {finding.worst}" if finding.rows else ""
    return f"{finding.place} {finding.what}{rows}"


def agreement(contest: Contest, device: torch.device) -> Agreement:
    """Judge every form row by row against the truth of the judged case. New memory holds NaN until a form writes to it.

    ValueError if the case has no rows to compare.
    """
    case = contest.judged
    x = ready(contest, case, device)
    directions = dict(zip(contest.outputs, x.cotangents, strict=True)) if contest.backward else None
    inputs = Inputs(**{name: value for name, value in x.inputs.items() if name != "lengths"})  # `lengths` is for the forms only
    limits = bounds(case.spec, inputs, directions, contest.algorithm, chunk=contest.chunk)
    answers: dict[str, dict[str, Tensor]] = {}
    worst, findings = {}, {}
    for name, form in contest.forms.items():
        with poisoned(math.nan):
            answers[name] = _evaluated(contest, form, x)
        judgement = judge(pairs_of(answers[name], limits), functools.partial(where, case))
        if not judgement.rows:
            raise ValueError(f"judged must be a case with rows to compare, got {case}")
        worst[name], findings[name] = max(judgement.ratios.values()), judgement.findings
    apart = {(a, b): _apart(case.spec, limits, answers[a], answers[b]) for a, b in itertools.permutations(answers, 2)}
    return Agreement(size_of(case), worst, findings, apart)


def _evaluated(contest: Contest, form: Form, x: Prepared) -> dict[str, Tensor]:
    """A form's outputs by name, and with backward the gradients of all inputs."""
    with torch.set_grad_enabled(contest.backward):
        parts = form(x.inputs)
        outputs = contest.join(parts)
    result = {name: value.detach() for name, value in zip(contest.outputs, outputs, strict=True)}
    if contest.backward:
        gradients = torch.autograd.grad(parts, [*x.given.values()], contest.split(x.cotangents))
        result |= {gradient_name(name): gradient for name, gradient in zip(x.given, gradients, strict=True)}
    return result


def _apart(spec: Operation, limits: Mapping[str, Bound], one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference between two results in any row, divided by the row's tolerance; infinite if it is NaN."""
    greatest = 0.0
    for name, value in one.items():
        error = (value.double() - other[name].double()).abs()
        rows = error if spec.port(name).scalar_rows else error.norm(dim=-1)
        if rows.numel():
            greatest = max(greatest, float((rows / limits[name].allowed).nan_to_num(nan=math.inf).max()))
    return greatest


def saved_bytes(call: Call, given: Sequence[Tensor]) -> int:
    """The bytes that a call's graph saves for backward. Shared memory counts once, and memory of the `given` tensors not at all."""
    addresses = {x.untyped_storage().data_ptr() for x in given}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> int:
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage  # keeps it alive, so that its address is not reused before the call ends
        return storage.data_ptr()

    def unpack(place: int) -> Tensor:
        raise AssertionError(f"backward of what was only counted, at {place:#x}")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        call()
    return sum(storage.nbytes() for place, storage in saved.items() if place not in addresses)


def allocated_bytes(call: Call, device: torch.device) -> int | None:
    """The bytes that stay allocated on a GPU after a call, while its results live. None on a CPU, where torch does not count."""
    if device.type != "cuda":
        return None
    with torch.enable_grad():
        before = torch.cuda.memory_allocated(device)
        results = call()
        allocated = torch.cuda.memory_allocated(device) - before
        del results
    return allocated


def size_of(case: Any) -> str:
    """The number of tokens and sequences of a case, as text."""
    count, lengths = len(case.lengths), case.lengths
    if count == 1:
        return f"{lengths[0]:,} tokens"
    if case.packed:
        return f"{sum(lengths):,} tokens in {count} sequences"
    return f"{count} x {lengths[0]:,} token{'s' * (lengths[0] > 1)}"
