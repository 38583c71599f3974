"""Plays a trace on an engine, and records what every owner of a slot has before and after each step."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.laws.law import Breach, bits
from properties.traces.case import Batch, Sizes, TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.events import Step


class Played(Protocol):
    """An engine, as laws see it (verify/adapters/base.py documents the methods)."""

    @property
    def states(self) -> Tensor:
        """The states of all slots."""

    @property
    def windows(self) -> Tensor:
        """The windows of all slots."""

    @property
    def unowned(self) -> tuple[int, ...]:
        """The slots that belong to nobody and that padding rows may write to."""

    def slots(self) -> Mapping[str, int]:
        """Return the slot of every request and of every snapshot."""

    def scratch(self) -> Sequence[int]:
        """Return the slots that requests have beside their own."""

    def copies(self, owners: Sequence[str], slots: Sequence[int]) -> "list[Slot]":
        """Return copies, on the CPU, of what each owner (a request or a snapshot) has, and then of what slots hold."""

    def admit(self, requests: Sequence[str]) -> None:
        """Give new requests slots."""

    def prefill(self, batch: Batch) -> Tensor:
        """Process prompts."""

    def decode(self, batch: Batch) -> Tensor:
        """Process a token of each row."""

    def verify(self, batch: Batch) -> Tensor:
        """Process drafts."""

    def commit(self, accepted: Sequence[int]) -> None:
        """Keep the accepted tokens."""

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        """Begin a request from another one."""

    def swap(self, request: str) -> None:
        """Take a request out of the pool and bring it back."""

    def transfer(self, request: str) -> None:
        """Cut what a request has for the ranks of another TP size, and put it together again."""

    def preempt(self, request: str) -> None:
        """Give the slots of a request back until it is admitted again."""

    def free(self, request: str) -> None:
        """Give the slots of a request back."""


class Failure(Protocol):
    """An operation that is to fail: `failed` says whether it did, and `seen` how many operations there were."""

    failed: bool
    seen: int


class TraceBench(Protocol):
    """Opens engines for laws, and knows the truth and the bounds of their rows."""

    domain: TraceDomain

    def open(self, sizes: Sizes, *, buffers: dict[Any, Any] | None = None) -> Played:
        """Return an engine with an empty pool.

        With `buffers`, its parameters and its batches are in tensors that are kept there, those of one shape in the same tensors.
        """

    def attempt(self, engine: Played, batch: Batch) -> None:
        """Let an engine prefill requests that it has not admitted, and drop what it returns or raises."""

    def failing(self, at: int, *, allocations: bool = False) -> AbstractContextManager[Failure]:
        """Let operation number `at` of the engine's calls inside fail as if memory had run out, and drop what is raised.

        With `allocations`, only operations that return new tensors are counted. Operation 0 is none.
        """

    def bounds(self, inputs: Inputs, kind: str) -> dict[str, Bound]:
        """Return the truth and the tolerances of rows of a step of this kind ("p", "d" or "v")."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """What an owner has: state [HV, K, V] and window [D, W - 1]."""

    state: Tensor
    window: Tensor

    def bits(self) -> tuple[Tensor, Tensor]:
        """Return both as whole numbers, so that NaN have their bits too."""
        return bits(self.state), bits(self.window)


@dataclasses.dataclass(frozen=True)
class Moment:
    """One step of a played trace.

    - `rows`: the outputs [count, HV, V] of the step's rows, by place, without those that were left out
    - `before`, `after`: what every owner has. Before a step, it is what the owner had after the step before
    - `slots`: the owners' slots after the step
    - `idle`: what every slot holds that nobody owned before the step, during it (as far as an engine shows that between its calls)
      and after it, before and after the step
    """

    step: Step
    rows: Mapping[int, Tensor]
    before: Mapping[str, Slot]
    after: Mapping[str, Slot]
    slots: Mapping[str, int]
    idle: Mapping[int, tuple[Slot, Slot]]

    @property
    def where(self) -> str:
        """The event in words, such as "event 3 (d:a,_)"."""
        return f"event {self.step.event} ({self.step.text})"


def play(
    bench: TraceBench,
    case: TraceCase,
    *,
    tagged: bool = False,
    other: Collection[str] = (),
    apart: bool = False,
    before: Callable[[Played], None] | None = None,
    engine: Played | None = None,
    between: Callable[[], object] = lambda: None,
) -> Iterator[Moment]:
    """Play the trace of a case on `engine`, without it on a fresh one, and yield a moment for each step.

    `other` may have "drafts", "padding" and "free": rejected drafts, padding rows, or what slots hold that nobody owns, then have
    other numbers. With `apart`, every row of a batch is a call of its own, and padding rows are left out. `before` is called with
    the engine before the first step, and `between` between a verification and its commit. Breach if the engine has other owners
    than the trace.
    """
    engine = bench.open(case.sizes(tagged=tagged)) if engine is None else engine
    if before is not None:
        before(engine)
    _fill(engine, case, _idle(engine, engine.slots()), other)
    now, left = _look(engine, engine.slots())
    for step in case.plan:
        was, idle = now, left
        outputs, used = dict[int, Tensor](), set[int]()
        if step.rows:
            engine.admit([row.request for row in step.rows if row.begins])
            used |= _owned(engine)
            places = range(len(step.rows))
            calls = [[place] for place in places if step.rows[place].count] if apart else [[*places]]
            for call in calls:
                if any(step.rows[place].real for place in call):
                    drafts, padding = int("drafts" in other), int("padding" in other)
                    batch = case.batch(step, call, tagged=tagged, drafts=drafts, padding=padding)
                    o = _process(engine, step, batch, [step.rows[place].accepted for place in call], used, between)
                    outputs |= dict(zip(call, o.split(list(batch.lengths)), strict=True))
        else:
            _change(engine, step)
        slots = dict(engine.slots())
        check_owners(slots, step, case)
        now, left = _look(engine, slots)
        still = {slot: (idle[slot], after) for slot, after in left.items() if slot in idle and slot not in used}
        yield Moment(step, outputs, was, now, slots, still)
        if case.free != "old" and (written := [slot for slot in left if slot not in still]):
            _fill(engine, case, written, other)
            left |= dict(zip(written, engine.copies([], written), strict=True))


def advance(engine: Played, case: TraceCase, step: Step) -> None:
    """Let an engine take a step, whose rows are one call, and drop what it returns."""
    if not step.rows:
        _change(engine, step)
        return
    engine.admit([row.request for row in step.rows if row.begins])
    _process(engine, step, case.batch(step), [row.accepted for row in step.rows], set())


def _process(
    engine: Played, step: Step, batch: Batch, accepted: Sequence[int], used: set[int], between: Callable[[], object] = lambda: None
) -> Tensor:
    """Let an engine process a batch of a step, and return its outputs. Slots that have owners between its calls go to `used`."""
    o = {"p": engine.prefill, "d": engine.decode, "s": engine.decode, "v": engine.verify}[step.kind](batch)
    used |= _owned(engine)
    if step.kind == "v":
        between()
        engine.commit(accepted)
        used |= _owned(engine)
    return o


def _change(engine: Played, step: Step) -> None:
    """Let an engine take a step that has no rows."""
    if step.kind == "k":
        engine.fork(step.request, step.source, snapshot=step.snapshot)
        return
    {"w": engine.swap, "t": engine.transfer, "r": engine.preempt, "f": engine.free}[step.kind](step.request)


def check_owners(owners: Collection[str], step: Step, case: TraceCase) -> None:
    """Raise Breach if an engine has other requests or snapshots after a step than the trace."""
    want, got = case.owners[step.event], {*owners}
    for owner in sorted(want ^ got):
        what = "has no slot" if owner in want else "still has a slot"
        raise Breach(f"an owner {what}", f"{named(owner)} after event {step.event} ({step.text}) of {case.trace}")


def named(owner: str) -> str:
    """Return an owner in words."""
    return f"request {owner[:-1]}'s snapshot" if owner.endswith("@") else f"request {owner}"


def _idle(engine: Played, slots: Mapping[str, int]) -> list[int]:
    """Return the slots that nobody owns, without those that padding rows may write to."""
    owned = {*slots.values(), *engine.scratch(), *engine.unowned}
    return [slot for slot in range(len(engine.states)) if slot not in owned]


def _owned(engine: Played) -> set[int]:
    """Return the slots that requests and snapshots have now, and those that requests have beside their own."""
    return {*engine.slots().values(), *engine.scratch()}


def _fill(engine: Played, case: TraceCase, slots: Sequence[int], other: Collection[str]) -> None:
    """Fill slots that nobody owns."""
    for pool in (engine.states, engine.windows) if slots else ():
        for slot, numbers in zip(slots, case.filled(pool, slots, other=int("free" in other)), strict=True):
            pool[slot] = numbers


def _look(engine: Played, slots: Mapping[str, int]) -> tuple[dict[str, Slot], dict[int, Slot]]:
    """Return what every owner has, and what every slot holds that nobody owns, copied to the CPU, where laws compare."""
    idle = _idle(engine, slots)
    copies = engine.copies([*slots], idle)
    return dict(zip(slots, copies, strict=False)), dict(zip(idle, copies[len(slots) :], strict=True))
