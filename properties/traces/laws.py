"""The laws of serving engines. A law plays a trace on an engine (properties/traces/play.py) and compares what the owners have.

Outputs of padding rows mean nothing and are not judged. Outputs of rejected drafts are judged, because they decide what is
rejected. Every comparison names the request and the event.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor

from properties.laws.law import Blind, Breach, Law, Pair, all_variants, bits, examples_of
from properties.traces.case import MOST_SLOTS, MOST_WIDTH, TAG_CHANNELS, TAGGED, TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.drawing import VALUE_WIDTHS, trace_cases
from properties.traces.events import Step, name_of, number_of
from properties.traces.failing import Retried, let_fail, retried
from properties.traces.limits import (
    admissions,
    alternating,
    block_ends,
    crowded_snapshots,
    crowds,
    empty_padding,
    forks,
    leaks,
    long_requests,
    long_steps,
    many_heads,
    microbatches,
    mixed_snapshots,
    repeats,
    wide,
)
from properties.traces.play import Moment, Played, Slot, TraceBench, named, play
from properties.traces.rows import judged
from properties.traces.tags import tags
from properties.words.example import Example

OTHERS = ("drafts", "padding", "free")
HISTORIES = ("others", "turns", "again", "refill", "refused", "failed", "retried")


def _ledger(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Owners keep every bit in steps that are not about them, and so do slots that nobody owns.

    A request of whose draft nothing is accepted keeps its bits too. Forks, swaps and transfers are copies of a state and a window.

    What an owner has is compared wherever its slot is, so a step may move it. A slot must keep its bits if nobody owned it before,
    during and after the step, because then nobody's step may write to it. A slot that a request had during the step alone, such as
    the first of two between which the step moves it, may hold anything: it was the request's to write, nobody owns it now, and
    whoever gets it next is judged by the laws of first tokens. An engine that uses further slots within one call names them in
    `scratch`.
    """
    case: TraceCase = example.case
    for moment in play(bench, case):
        step, was = moment.step, moment.before
        changed = {
            name for row in step.rows if row.accepted for name in (row.request, f"{row.request}@" * (row.snapshot is not None))
        }
        for owner, slot in sorted(was.items()):
            if owner in moment.after and owner not in changed and owner != step.request:
                rejected = any(row.request == owner and row.count for row in step.rows)
                where = f"of {owner}, of whose draft nothing is accepted in event" if rejected else f"of {owner}, not in event"
                yield from _same(f"{where} {step.event}", moment.after[owner], slot)
        for number, (earlier, later) in moment.idle.items():
            yield from _same(f"in slot {number}, which nobody owns, after event {step.event}", later, earlier)
        if step.kind == "k":
            source = f"{step.source}@" if step.snapshot else step.source
            yield from _same(
                f"of {step.request}, a fork of {source} in event {step.event}", moment.after[step.request], was[source]
            )
        if step.kind in ("w", "t"):
            what = "swap" if step.kind == "w" else "transfer"
            yield from _same(
                f"of {step.request} after its {what} in event {step.event}", moment.after[step.request], was[step.request]
            )


def _same(where: str, got: Slot, want: Slot) -> Iterator[Pair]:
    """Compare two slots bit for bit."""
    for name, one, two in zip(("state", "window"), got.bits(), want.bits(), strict=True):
        yield Pair(name, where, one, two)


def _session(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Each step is judged from the bits that its requests had before it, so that errors of earlier steps do not add up.

    Windows hold inputs, so they are judged bit for bit. States and windows must be finite after every step.
    """
    yield from judged(bench, example.case, play(bench, example.case))


def _results(moments: Iterator[Moment]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield what a run keeps: the outputs of accepted tokens, and every owner's state and window, by port and detail, as bits."""
    for moment in moments:
        step = moment.step
        for place, row in enumerate(step.rows):
            if row.real and row.count:
                yield "o", f"of {row.request} in event {step.event}", bits(moment.rows[place][: row.accepted])
        for owner, slot in sorted(moment.after.items()):
            state, window = slot.bits()
            yield "state", f"of {owner} after event {step.event}", state
            yield "window", f"of {owner} after event {step.event}", window


def _compared(once: Iterator[tuple[str, str, Tensor]], twice: Iterator[tuple[str, str, Tensor]], how: str) -> Iterator[Pair]:
    """Compare what two runs keep, in the order of events, up to the first event in which they differ."""
    for (*name, want), (*other, got) in zip(once, twice, strict=True):
        assert name == other, (name, other)
        port, detail = name
        yield Pair(port, f"{detail} {how}", got, want)
        if not torch.equal(got, want):
            return


def _dropped(bench: TraceBench, example: Example) -> Iterator[Pair]:
    assert example.variant is not None
    what = {"drafts": "rejected drafts", "padding": "padding rows", "free": "contents of slots that nobody owns"}[example.variant]
    once, twice = (_results(play(bench, example.case, other=other)) for other in ((), (example.variant,)))
    yield from _compared(once, twice, f"with other {what}")


def _alone(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """In the second run every row of a batch is a call of its own."""
    if all(len(step.rows) < 2 for step in example.case.plan):
        raise Blind("no batch has two rows")
    yield from _compared(
        _results(play(bench, example.case)), _results(play(bench, example.case, apart=True)), "without its batch mates"
    )


def _slots(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """After every step owners of one slot have the same tokens. At the end, when all have left, every slot can be had again."""
    case: TraceCase = example.case
    engines: list[Played] = []
    _exhaust(_in_right_slots(lambda: engines[0], case, play(bench, case, before=engines.append)))
    yield _all_slots(engines[0], case)


def _all_slots(engine: Played, case: TraceCase) -> Pair:
    """Free every request, and compare how many slots can be had again with how many there are."""
    _free(engine)
    if left := sorted(engine.slots()):
        raise Breach("a slot is still owned after every request was freed", f"{', '.join(left)}, {case.trace}")
    for number in range(case.slots):
        engine.admit([name_of(number)])
    slots = {*engine.slots().values()} & {*range(len(engine.states))} - {*engine.unowned, *engine.scratch()}
    return Pair("owners", "of all slots", torch.tensor(len(slots)), torch.tensor(case.slots))


def _free(engine: Played) -> None:
    """Free every request."""
    for owner in sorted(owner for owner in engine.slots() if not owner.endswith("@")):
        engine.free(owner)


def _in_right_slots(engine: Callable[[], Played], case: TraceCase, moments: Iterator[Moment]) -> Iterator[Moment]:
    """Yield the moments. Raise Breach if owners of different tokens share a slot, or if a slot is outside the pool or nobody's.

    An engine may copy when it writes. Until then a request, its snapshots and its forks have the same tokens and may have one slot.
    """
    tokens: dict[str, tuple[Any, ...]] = {}
    for moment in moments:
        _go_on(tokens, moment.step)
        owners, where, unowned = dict[int, str](), f"after {moment.where} of {case.trace}", engine().unowned
        for owner, slot in moment.slots.items():
            if slot in unowned:
                raise Breach("a slot that belongs to nobody is handed out", f"{named(owner)} has slot {slot} {where}")
            if not 0 <= slot < len(engine().states):
                raise Breach("a slot is outside the pool", f"{named(owner)} has slot {slot} of {len(engine().states)} {where}")
            if tokens[owners.setdefault(slot, owner)] != tokens[owner]:
                both = f"{named(owners[slot])} and {named(owner)} have different tokens, and both have slot {slot} {where}"
                raise Breach("a slot has two owners", both)
        scratch = sorted(engine().scratch())
        if {*scratch} & {*owners, *unowned} or len({*scratch}) < len(scratch):
            slots = ", ".join(map(str, scratch))
            raise Breach("a slot beside a request's own has another owner", f"the slots beside requests' own are {slots} {where}")
        yield moment


def _go_on(tokens: dict[str, tuple[Any, ...]], step: Step) -> None:
    """Add the tokens of a step to those that owners have, as parts (event, request, number of tokens)."""
    for row in step.rows:
        if row.real:
            had = ((step.event, row.request, 0),) if row.begins else tokens[row.request]
            for owner, count in ((f"{row.request}@", row.snapshot), (row.request, row.accepted)):
                if count is not None:
                    tokens[owner] = (*had, (step.event, row.request, count)) if count else had
    if step.kind == "k":
        tokens[step.request] = tokens[f"{step.source}@" if step.snapshot else step.source]


def _renamed(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Before the second run, requests take all slots and give them back in another order. Blind if that moves nobody.

    It moves nobody where an engine always gives the first slot that is free. There the pool of both runs has a slot more, which
    another request has in the second run.
    """
    case: TraceCase = example.case

    def shuffle(engine: Played) -> None:
        names = [name_of(number) for number in range(case.slots)]
        for name in names:
            engine.admit([name])
        for name in names[1::2] + names[::2][::-1]:
            engine.free(name)

    runs = list(play(bench, case)), list(play(bench, case, before=shuffle))
    if not _moved(*runs) and case.slots < min(bench.domain.most_slots, MOST_SLOTS):
        sizes = dataclasses.replace(case.sizes(), slots=case.slots + 1)
        alone, beside = bench.open(sizes), cast(Played, _Beside(bench.open(sizes), case))
        runs = list(play(bench, case, engine=alone)), list(play(bench, case, engine=beside))
    if not _moved(*runs):
        raise Blind("every request has the same slot in both runs")
    yield from _compared(_results(iter(runs[0])), _results(iter(runs[1])), "in other slots")


def _moved(once: Sequence[Moment], twice: Sequence[Moment]) -> bool:
    return any(one.slots != two.slots for one, two in zip(once, twice, strict=True))


class _Beside:
    """An engine with a request beside those of a case, which has come before them and stays."""

    def __init__(self, engine: Played, case: TraceCase) -> None:
        used = {owner for owners in case.owners.values() for owner in owners}
        self.engine, self.more = engine, next(name for name in map(name_of, itertools.count()) if name not in used)
        engine.admit([self.more])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def slots(self) -> dict[str, int]:
        """Return the slots without that of the other request."""
        return {owner: slot for owner, slot in self.engine.slots().items() if owner != self.more}


def _history(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Judge a trace as `session` does, after or beside another one with other tokens.

    - `others`: another engine, with other parameters and perhaps another pool, plays its trace before.
    - `turns`: the engines of both traces take turns, step by step. In a verification, the other one's step comes before the commit;
      in a trace without one, the other one goes first.
    - `again`: the same engine plays the other trace before, and every request is freed.
    - `refill`: as `others`, and the engines' parameters and batches are in the same tensors, filled again.
    - `refused`: another engine gets a batch of requests that it has not admitted, before.
    - `failed`: as `others`, and in several steps an operation fails as if memory had run out (see `let_fail`).
    - `retried`: there is no other trace. Each call fails for lack of memory and is made again with the same numbers, until it does
      not fail. Slots are judged as in the law `slots`. The domain promises that a call that failed has changed nothing.
    """
    case: TraceCase = example.case
    other = _other(bench.domain, case, pool=example.variant in ("others", "turns", "failed"))
    engine: Played | None = None
    if example.variant == "again":
        engine = bench.open(case.sizes())
        _exhaust(play(bench, other, engine=engine))
        _free(engine)
    elif example.variant == "turns":
        if not bench.domain.together:
            raise Blind("the domain has together=False")
        yield from judged(bench, case, _in_turns(bench, case, play(bench, other)))
        return
    elif example.variant == "refused":
        bench.attempt(bench.open(other.sizes()), other.batch(other.plan[0]))
    elif example.variant == "failed":
        if not let_fail(bench, other):
            raise Blind("no operation of torch failed")
    elif example.variant == "retried":
        if not bench.domain.retries:
            raise Blind("the domain has retries=False")
        failing = retried(bench, case)
        yield from judged(bench, case, _again(bench, case, failing))
        yield _all_slots(failing.engine, case)
        return
    else:
        if example.variant == "refill" and not bench.domain.refills:
            raise Blind("the domain has refills=False")
        buffers: dict[Any, Any] | None = {} if example.variant == "refill" else None
        _exhaust(play(bench, other, engine=bench.open(other.sizes(), buffers=buffers)))
        engine = bench.open(case.sizes(), buffers=buffers)
    yield from judged(bench, case, play(bench, case, engine=engine))


def _other(domain: TraceDomain, case: TraceCase, *, pool: bool) -> TraceCase:
    """Return the case with other tokens and parameters and, with `pool`, half of the time with a larger pool."""
    other = dataclasses.replace(case, seed=case.seed ^ 1)
    if pool and case.seed % 2 and case.slots < MOST_SLOTS:
        larger = dataclasses.replace(other, slots=case.slots + 1)
        other = larger if domain.outside(larger) is None else other
    return other


def _exhaust(moments: Iterator[Moment]) -> None:
    for _ in moments:
        pass


def _in_turns(bench: TraceBench, case: TraceCase, others: Iterator[Moment]) -> Iterator[Moment]:
    """Yield the moments of a case. In each of its steps another trace goes on by a step."""

    def go() -> None:
        next(others, None)

    if first := not any(step.kind == "v" for step in case.plan):
        go()
    for moment in play(bench, case, between=(lambda: None) if first else go):
        yield moment
        if first or moment.step.kind != "v":
            go()


def _again(bench: TraceBench, case: TraceCase, engine: Retried) -> Iterator[Moment]:
    """Yield the moments of a case in which calls fail, with slots as in the law `slots`. Blind if no operation failed."""
    yield from _in_right_slots(lambda: engine.engine, case, play(bench, case, engine=cast(Played, engine)))
    if not engine.failed:
        raise Blind("no operation of torch failed")


def _histories(domain: TraceDomain) -> tuple[str, ...]:
    """Return the histories that can happen to the engines of a domain."""
    can = {"turns": domain.together, "refill": domain.refills, "retried": domain.retries}
    return tuple(kind for kind in HISTORIES if can.get(kind, True))


def _has(case: TraceCase, variant: str | None) -> str | None:
    """Return what a case lacks for a variant of the law `dropped`, or None."""
    rows = [row for step in case.plan for row in step.rows]
    if variant == "drafts" and not any(row.real and row.accepted < row.count for row in rows):
        return "a draft of which a part is rejected"
    if variant == "padding" and all(row.real for row in rows):
        return "a padding row"
    if variant == "free" and case.free == "old":
        return "free=zero|random|nan"
    return None


@st.composite
def _others(draw: st.DrawFn, domain: TraceDomain) -> Example:
    """Draw a case with a variant that it has something for."""
    case = draw(trace_cases(domain, free=("zero", "random", "nan")))
    return Example(case, None, draw(st.randoms(use_true_random=True)).choice([name for name in OTHERS if _has(case, name) is None]))


def _tagable(case: TraceCase, _: str | None) -> str | None:
    """Return what a case lacks for tags, or None."""
    if case.value_dim < TAG_CHANNELS:
        return f"value_dim of at least {TAG_CHANNELS}"
    return None if all(number_of(name) < TAGGED for step in case.plan for name in step.requests) else "requests a to z"


def _promises(name: str) -> Callable[[TraceDomain], str | None]:
    def needs(domain: TraceDomain) -> str | None:
        return None if getattr(domain, name) else f"{name.replace('_', ' ')} is not supported"

    return needs


def tag_widths(domain: TraceDomain) -> tuple[int, ...]:
    """Return the widths of values that are wide enough for tags: those that are drawn, or the least one of the domain."""
    usual = tuple(width for width in domain.value_widths or VALUE_WIDTHS if width >= TAG_CHANNELS and domain.has_value(width))
    return usual or tuple(width for width in range(TAG_CHANNELS, MOST_WIDTH + 1) if domain.has_value(width))[:1]


def _tag_channels(domain: TraceDomain) -> str | None:
    return None if tag_widths(domain) else f"value_dim of at least {TAG_CHANNELS} is not supported"


def _drawn(**fixed: Any) -> Callable[[TraceDomain], st.SearchStrategy[Example]]:
    return lambda domain: examples_of(trace_cases(domain, **fixed))


TRACE_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "session",
            "truth",
            "every step gives the float64 outputs, states and snapshots, and exact windows, of what its requests had before it",
            _drawn(),
            _session,
            always=lambda domain: [
                Example(case)
                for case in (
                    *crowds(domain),
                    *crowded_snapshots(domain),
                    *long_requests(domain),
                    *long_steps(domain),
                    *block_ends(domain),
                    *many_heads(domain),
                    *mixed_snapshots(domain),
                    *forks(domain),
                    *wide(domain),
                    *empty_padding(domain),
                )
            ],
        ),
        Law(
            "tags",
            "exact",
            "states, windows and outputs hold the tags of accepted tokens and nothing else, exactly",
            lambda domain: _drawn(free=("nan", "random", "old"), value_dim=tag_widths(domain))(domain),
            tags,
            _tag_channels,
            lacks=_tagable,
            always=lambda domain: [Example(case) for case in admissions(domain) if _tagable(case, None) is None],
        ),
        Law(
            "ledger",
            "exact",
            "nobody's state changes but in its own steps; forks, swaps, transfers copy; slots that nobody owns keep their bits",
            _drawn(free=("nan", "nan", "random")),
            _ledger,
            always=lambda domain: [Example(case) for case in (*repeats(domain), *forks(domain), *alternating(domain))],
        ),
        Law(
            "dropped",
            "exact",
            "rejected drafts, padding rows and slots that nobody owns may hold anything, bit for bit",
            _others,
            _dropped,
            variants=OTHERS,
            lacks=_has,
        ),
        Law(
            "alone",
            "exact",
            "a request gets the same bits without the other rows of its batches, where that is promised",
            _drawn(),
            _alone,
            _promises("batch_invariant"),
        ),
        Law(
            "slots",
            "exact",
            "no slot has two owners of other tokens, none is lost, and slots that belong to nobody are not handed out",
            _drawn(),
            _slots,
            always=lambda domain: [Example(case) for case in leaks(domain)],
        ),
        Law(
            "renamed",
            "exact",
            "which slots requests get does not matter: in other slots the bits are the same",
            _drawn(),
            _renamed,
        ),
        Law(
            "history",
            "truth",
            "a trace gives what it gives in a fresh process, whatever traces came before it, and beside another engine",
            lambda domain: all_variants(trace_cases(domain, events=(3, 5)), lambda _: _histories(domain)),
            _history,
            variants=HISTORIES,
            of_process=True,
            always=lambda domain: [
                Example(case, None, "retried") for case in (*mixed_snapshots(domain), *microbatches(domain)) if domain.retries
            ],
        ),
    )
}
