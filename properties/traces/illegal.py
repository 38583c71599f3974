"""Illegal events of serving engines: a step that cannot follow the trace of a case, such as a request that is freed twice."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.events import Roll, Row, Step
from properties.words.domain import inside
from properties.words.illegal import IllegalInputs, near

LAST = 99  # the number of the illegal event


def check_step(case: TraceCase, step: Step) -> None:
    """Raise ValueError if a step cannot follow the trace of a case; the message names the request and the rule."""
    roll = roll_after(case)
    names = [row.request for row in step.rows if row.real]
    for row in step.rows:
        if names.count(row.request) > 1:
            raise ValueError(f"a step must have one row for each request, got several of {row.request}")
        if row.accepted > row.count:
            raise ValueError(f"a row must accept at most its {row.count} tokens, got {row.accepted}")
        if row.real and row.begins is (row.request in roll.tokens):
            raise ValueError(f"a request must be admitted once, before its first tokens, got {row.request} of {step.text}")
    if step.kind == "k":
        if step.source not in (roll.saved if step.snapshot else roll.tokens):
            raise ValueError(f"a fork must begin from what is there, got {step.text}")
        if step.request in roll.tokens:
            raise ValueError(f"a fork must begin a new request, got {step.text}")
    elif not step.rows and step.request not in roll.tokens:
        raise ValueError(f"a request must be there, got {step.text}")
    needed = sum(row.begins for row in step.rows) + (step.kind == "k")
    needed += sum(row.snapshot is not None and row.request not in roll.saved for row in step.rows)
    if needed > (left := case.slots - len(roll.tokens) - len(roll.saved)):
        raise ValueError(f"a step must need at most the slots that are left, {left}, got {needed} for {step.text}")


def roll_after(case: TraceCase) -> Roll:
    """Return who is there after the trace of a case."""
    roll = Roll(case.slots, case.snapshots, case.aligned)
    for number, event in enumerate(case.trace.split("/"), 1):
        roll.step(number, event)
    return roll


@dataclasses.dataclass(frozen=True)
class _Illegal:
    """A legal trace on a pool of `slots` slots, the events that it and the illegal step need, and the illegal step."""

    trace: str
    step: Callable[[], Step]
    events: tuple[str, ...]
    slots: int = 3


def _of_rows(kind: str, text: str, *rows: Row) -> Callable[[], Step]:
    return lambda: Step(LAST, text, kind, rows)


def _of_request(kind: str, text: str, request: str = "a", **words: Any) -> Callable[[], Step]:
    return lambda: Step(LAST, text, kind, request=request, **words)


def _decoded(request: str = "a", **words: Any) -> Row:
    return Row(request, 1, 1, 1, **words)


ILLEGAL: dict[str, _Illegal] = {
    "more requests than slots": _Illegal("p:a1,b1", _of_rows("p", "p:c1", Row("c", 0, 1, 1, begins=True)), (), 2),
    "a request that is admitted twice": _Illegal("p:a1", _of_rows("p", "p:a1", Row("a", 0, 1, 1, begins=True)), ()),
    "a decode of a request that was freed": _Illegal("p:a1/f:a", _of_rows("d", "d:a", _decoded()), ("decode", "free")),
    "two rows of one request in a decode": _Illegal("p:a1", _of_rows("d", "d:a,a", _decoded(), _decoded()), ("decode",)),
    "a snapshot without a slot": _Illegal("p:a1", _of_rows("s", "s:a", _decoded(snapshot=1)), ("save",), 1),
    "more accepted tokens than drafted": _Illegal("p:a1", _of_rows("v", "v2:a3", Row("a", 1, 2, 3)), ("verify",)),
    "a fork from a request that was freed": _Illegal("p:a1/f:a", _of_request("k", "k:b<a", "b", source="a"), ("fork", "free")),
    "a fork from a snapshot that was never taken": _Illegal(
        "p:a1", _of_request("k", "k:b<a@", "b", source="a", snapshot=True), ("fork", "save")
    ),
    "a fork to a request that is there": _Illegal("p:a1,b1", _of_request("k", "k:b<a", "b", source="a"), ("fork",)),
    "a fork without a slot": _Illegal("p:a1", _of_request("k", "k:b<a", "b", source="a"), ("fork",), 1),
    "a swap of a request that was freed": _Illegal("p:a1/f:a", _of_request("w", "w:a"), ("swap", "free")),
    "a transfer of a request that was freed": _Illegal("p:a1/f:a", _of_request("t", "t:a"), ("transfer", "free")),
    "a preemption of a request that was freed": _Illegal("p:a1/f:a", _of_request("r", "r:a"), ("preempt", "free")),
    "a request that is freed twice": _Illegal("p:a1/f:a", _of_request("f", "f:a"), ("free",)),
}


def _event_call(name: str, domain: TraceDomain) -> tuple[TraceCase, Step] | str:
    """Return a case inside the domain, and a step that cannot follow its trace; or the reason why there is none."""
    illegal = ILLEGAL[name]
    if lacking := [event for event in illegal.events if event not in domain.events]:
        return f"the event {lacking[0]} is unsupported"
    if illegal.step().kind == "v" and domain.most_drafts < 2:
        return "drafts of two tokens are unsupported"
    case = _case(illegal, domain)
    if reason := domain.outside(case):
        return f"the trace is outside the domain: {reason}"
    return case, illegal.step()


def _case(illegal: _Illegal, domain: TraceDomain) -> TraceCase:
    """Return the legal trace in the conventions of a domain."""
    key_dim, value_dim = (
        listed[0] if listed else near(functools.partial(inside, span=span, step=domain.width_step), 16)
        for listed, span in ((domain.key_widths, domain.key_dims), (domain.value_widths, domain.value_dims))
    )
    return TraceCase(
        illegal.trace,
        slots=illegal.slots,
        pad=(*domain.padding_slots, "-1")[0],
        key_dim=key_dim,
        value_dim=value_dim,
        width=domain.widths[0],
        dtype=domain.dtypes[0],
        state=domain.states[0],
        snapshots=domain.snapshots[0],
        aligned=domain.alignments[0],
        indices=domain.indices[0],
    )


EVENT_INPUTS = IllegalInputs(lambda operation: list(ILLEGAL), _event_call, check_step)
