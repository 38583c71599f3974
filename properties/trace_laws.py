"""The laws of serving engines. A law plays a trace on an engine (properties/trace_play.py) and compares what the owners have.

Outputs of padding rows mean nothing and are not judged. Outputs of rejected drafts are judged, because they decide what is
rejected. Every comparison names the request and the event.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.bound import Bound
from oracles.operation import DTYPES, Inputs
from properties.cases.trace_case import MOST_SLOTS, TAG_CHANNELS, TraceCase
from properties.cases.trace_events import Row
from properties.laws import Blind, Breach, Law, Pair, all_variants, bits, examples_of
from properties.strategies import Example
from properties.trace_domain import TraceDomain, trace_cases
from properties.trace_play import Moment, Played, Slot, TraceBench, named, play

OTHERS = ("drafts", "padding", "free")
HISTORIES = ("others", "turns", "again", "refill", "refused")
EXACT_OUTPUTS = (4, 16, 64, 256)  # key_dim: 1 / sqrt(K) is a power of two


@dataclasses.dataclass
class _Ledger:
    """Which token's tag each row of a state and each column of a window must hold."""

    rows: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    columns: list[Tensor] = dataclasses.field(default_factory=list)

    def copy(self) -> "_Ledger":
        """Return a copy that can go on by itself."""
        return _Ledger(dict(self.rows), list(self.columns))


def _tags(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Keys have one entry, the gate does not decay, beta is one and the convolution copies, so that nothing rounds.

    Row t mod K of a state must hold the tag of the last accepted token t of this row, and the window the last accepted inputs. A
    row that holds another tag names the culprit.
    """
    case: TraceCase = example.case
    ledgers: dict[str, _Ledger] = {}
    for moment in play(bench, case, tagged=True):
        step = moment.step
        for place, row in enumerate(step.rows):
            if row.real:
                ledger = _Ledger() if row.begins else ledgers[row.request]
                for token in range(row.accepted):
                    _accept(case, ledger, row.request, row.start + token)
                    if token + 1 == row.snapshot:
                        ledgers[f"{row.request}@"] = ledger.copy()
                ledgers[row.request] = ledger
                if case.key_dim in EXACT_OUTPUTS and row.count:
                    yield _tagged_output(case, moment, place, row)
        if step.kind == "k":
            ledgers[step.request] = ledgers[f"{step.source}@" if step.snapshot else step.source].copy()
        if step.kind in ("r", "f"):
            ledgers.pop(step.request)
            ledgers.pop(f"{step.request}@", None)
        for owner, ledger in sorted(ledgers.items()):
            yield from _tagged_slot(case, moment, owner, ledger, moment.after[owner])


def _accept(case: TraceCase, ledger: _Ledger, request: str, token: int) -> None:
    number = ord(request) - ord("a")
    tag = case.tag("tokens", number, token)
    ledger.rows[token % case.key_dim] = tag
    ledger.columns = [*ledger.columns, case.tagged(tag, token)][1 - case.width :]


def _tagged_slot(case: TraceCase, moment: Moment, owner: str, ledger: _Ledger, slot: Slot) -> Iterator[Pair]:
    """Compare an owner's state and window with what they must hold. Breach names the first wrong row or column and its culprit."""
    whose = f"{named(owner)}'s"
    state = torch.zeros(case.value_heads, case.key_dim, case.value_dim)
    for row, tag in ledger.rows.items():
        state[:, row] = case.repeated(tag)
    got = slot.state.float()
    if (wrong := (got != state).any(-1).nonzero().tolist()) != []:
        head, row = wrong[0]
        holds, must = (case.untag(x[head, row, :TAG_CHANNELS].tolist()) for x in (got, state))
        raise Breach(
            f"a state holds a wrong tag: {whose} state after {moment.where} of {case.trace} holds in row {row} of head {head} "
            f"{holds}, must hold {must}"
        )
    yield f"state of {owner} after event {moment.step.event}", got, state
    blank = torch.zeros(case.channels)
    window = torch.stack([*[blank] * (case.width - 1 - len(ledger.columns)), *ledger.columns], -1)
    columns = slot.window.float()
    if (wrong := (columns != window).any(0).nonzero().tolist()) != []:
        column = wrong[0][0]
        at = 2 * case.heads * case.key_dim
        raise Breach(
            f"a window holds a wrong tag: {whose} window after {moment.where} of {case.trace} holds in column {column} "
            f"{case.untag(columns[at : at + TAG_CHANNELS, column].tolist())}, "
            f"must hold {case.untag(window[at : at + TAG_CHANNELS, column].tolist())}"
        )
    yield f"window of {owner} after event {moment.step.event}", columns, window


def _tagged_output(case: TraceCase, moment: Moment, place: int, row: Row) -> Pair:
    """Compare a row's outputs: token t reads row t - 1 of the state, and its scale is a power of two."""
    state = torch.zeros(case.value_heads, case.key_dim, case.value_dim)
    if not row.begins:  # a copy of a state that the law has compared after the step before
        state = moment.before[row.request].state.float().clone()
    want = torch.zeros(row.count, case.value_heads, case.value_dim)
    for token in range(row.count):
        position = row.start + token
        state[:, position % case.key_dim] = case.repeated(case.tag(*case.owner(moment.step, place, token)))
        want[token] = state[:, (position - 1) % case.key_dim] * case.key_dim**-0.5
    got = moment.rows[place].float()
    if (wrong := (got != want).any(-1).nonzero().tolist()) != []:
        (token, head), scale = wrong[0], case.key_dim**0.5
        raise Breach(
            f"an output reads a wrong tag: request {row.request}'s token {token} of {moment.where} of {case.trace} reads "
            f"{case.untag((got[token, head, :TAG_CHANNELS] * scale).tolist())}, "
            f"must read {case.untag((want[token, head, :TAG_CHANNELS] * scale).tolist())}"
        )
    return f"o of {row.request} in event {moment.step.event}", got, want


def _ledger(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Owners keep every bit in steps that are not about them, and so do slots that nobody owns.

    A fork, a swap and a transfer are copies of a state and a window.
    """
    case: TraceCase = example.case
    was: dict[str, Slot] = {}
    for moment in play(bench, case):
        step = moment.step
        changed = {name for row in step.rows if row.count for name in (row.request, f"{row.request}@" * (row.snapshot is not None))}
        for owner, slot in sorted(moment.before.items()):
            if owner in was:  # nothing happens between two steps
                yield from _same(f"of {owner} before event {step.event}", slot, was[owner])
            if owner in moment.after and owner not in changed and owner != step.request:
                yield from _same(f"of {owner}, not in event {step.event}", moment.after[owner], slot)
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
        was = dict(moment.after)


def _same(where: str, got: Slot, want: Slot) -> Iterator[Pair]:
    """Compare two slots bit for bit."""
    for name, one, two in zip(("state", "window"), got.bits(), want.bits(), strict=True):
        yield f"{name} {where}", one, two


def _session(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Each step is judged from the bits that its requests had before it, so that errors of earlier steps do not add up.

    Windows hold inputs, so they are judged bit for bit. States and windows must be finite after every step.
    """
    yield from _judged(bench, example.case, play(bench, example.case))


def _judged(bench: TraceBench, case: TraceCase, moments: Iterator[Moment]) -> Iterator[Pair]:
    rows = {kind: _Rows(case) for kind in ("p", "d", "v")}
    for moment in moments:
        _check_finite(case, moment)
        for place, row in enumerate(moment.step.rows):
            if row.real and row.count:
                rows["d" if moment.step.kind == "s" else moment.step.kind].add(moment, place, row)
    for kinds in ("p", "dv"):
        merged = _Rows(case).of(*(rows[kind] for kind in kinds))
        if merged.parts:
            yield from merged.judged(bench, kinds[0])
    if not any(found.parts for found in rows.values()):
        raise Blind("no step has a token of a request")


def _check_finite(case: TraceCase, moment: Moment) -> None:
    """Raise Breach if a state or a window of an owner is not finite: no later step could be judged from it."""
    for owner, slot in sorted(moment.after.items()):
        for what, x in (("state", slot.state), ("window", slot.window)):
            if not x.isfinite().all():
                number = float(x[~x.isfinite()][0])
                raise Breach(f"a {what} is not finite: {named(owner)}'s {what} after {moment.where} of {case.trace} holds {number}")


class _Rows:
    """Rows of several steps as one packed call, and what each of them is judged by."""

    def __init__(self, case: TraceCase) -> None:
        self.case = case
        self.parts: list[dict[str, Tensor]] = []
        self.comparisons: list[list[tuple[str, str, Tensor, bool]]] = []
        self.windows: list[Pair] = []

    def of(self, *others: "_Rows") -> "_Rows":
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
            self.windows.append((f"window of {whose} after event {event}", moment.after[owner].window, want))
        ends = {row.count: [(f"o of {name} in event {event}", "o", moment.rows[place], False)]}
        state = f"state of {name} after event {event}"
        ends.setdefault(row.accepted, []).append((state, "final_state", moment.after[name].state, False))
        if row.snapshot is not None:
            what = f"snapshot of {name} in event {event}"
            ends.setdefault(row.snapshot, []).append((what, "final_state", moment.after[f"{name}@"].state, moment.step.kind == "p"))
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
        )
        bounds = bench.bounds(inputs, kind)
        for number, comparisons in enumerate(self.comparisons):
            for name, output, got, saved in comparisons:
                if output == "o":
                    yield name, got, bounds["o"].at(0, slice(int(offsets[number]), int(offsets[number + 1])))
                else:
                    rounded = [DTYPES[case.state]]
                    rounded += [DTYPES[case.dtype]] if saved and bench.domain.snapshot_dtype == "input" else []
                    yield name, got, _stored(bounds["final_state"].at(number), rounded)


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


def _results(moments: Iterator[Moment]) -> Iterator[tuple[str, Tensor]]:
    """Yield what a run keeps: the outputs of accepted tokens, and every owner's state and window, by name, as bits."""
    for moment in moments:
        step = moment.step
        for place, row in enumerate(step.rows):
            if row.real and row.count:
                yield f"o of {row.request} in event {step.event}", bits(moment.rows[place][: row.accepted])
        for owner, slot in sorted(moment.after.items()):
            state, window = slot.bits()
            yield f"state of {owner} after event {step.event}", state
            yield f"window of {owner} after event {step.event}", window


def _compared(once: Iterator[tuple[str, Tensor]], twice: Iterator[tuple[str, Tensor]], how: str) -> Iterator[Pair]:
    """Compare what two runs keep, in the order of events, up to the first event in which they differ."""
    for (name, want), (other, got) in zip(once, twice, strict=True):
        assert name == other, (name, other)
        yield f"{name} {how}", got, want
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
    """After every step each slot has one owner at most. At the end, when all have left, every slot can be had again."""
    case: TraceCase = example.case
    engines: list[Played] = []
    for moment in play(bench, case, before=engines.append):
        _check_slots(engines[0], case, moment)
    engine = engines[0]
    for owner in sorted(owner for owner in engine.slots() if not owner.endswith("@")):
        engine.free(owner)
    if left := sorted(engine.slots()):
        raise Breach(f"a slot is still owned after every request was freed: {', '.join(left)}, {case.trace}")
    for number in range(case.slots):
        engine.admit([chr(ord("a") + number)])
    slots = {*engine.slots().values()} & {*range(len(engine.states))} - {*engine.unowned, *engine.scratch()}
    yield "owners of all slots", torch.tensor(len(slots)), torch.tensor(case.slots)


def _check_slots(engine: Played, case: TraceCase, moment: Moment) -> None:
    """Raise Breach if two owners share a slot, or if a slot is outside the pool or belongs to nobody."""
    owners, where = dict[int, str](), f"after {moment.where} of {case.trace}"
    for owner, slot in moment.slots.items():
        if slot in engine.unowned:
            raise Breach(f"a slot that belongs to nobody is handed out: {named(owner)} has slot {slot} {where}")
        if not 0 <= slot < len(engine.states):
            raise Breach(f"a slot is outside the pool: {named(owner)} has slot {slot} of {len(engine.states)} {where}")
        if slot in owners:
            raise Breach(f"a slot has two owners: {named(owners[slot])} and {named(owner)} have slot {slot} {where}")
        owners[slot] = owner
    shared = {*engine.scratch()} & {*owners, *engine.unowned}
    if shared or len({*engine.scratch()}) < len(engine.scratch()):
        slots = ", ".join(map(str, sorted(engine.scratch())))
        raise Breach(f"a slot beside a request's own has another owner: the slots beside requests' own are {slots} {where}")


def _renamed(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Before the second run, requests take all slots and give them back in another order. Blind if that moves nobody."""
    case: TraceCase = example.case
    names = [chr(ord("a") + number) for number in range(case.slots)]

    def shuffle(engine: Played) -> None:
        for name in names:
            engine.admit([name])
        for name in names[1::2] + names[::2][::-1]:
            engine.free(name)

    first, second = list(play(bench, case)), list(play(bench, case, before=shuffle))
    if all(one.slots == two.slots for one, two in zip(first, second, strict=True)):
        raise Blind("every request has the same slot in both runs")
    yield from _compared(_results(iter(first)), _results(iter(second)), "in other slots")


def _history(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Judge a trace as `session` does, after or beside another one with other tokens.

    - `others`: another engine, with other parameters and perhaps another pool, plays its trace before.
    - `turns`: the engines of both traces take turns, step by step.
    - `again`: the same engine plays the other trace before, and every request is freed.
    - `refill`: as `others`, and the engines' parameters and batches are in the same tensors, filled again.
    - `refused`: another engine gets a batch of requests that it has not admitted, before.
    """
    case: TraceCase = example.case
    other = _other(bench.domain, case, pool=example.variant in ("others", "turns"))
    engine: Played | None = None
    moments: Iterator[Moment] = iter(())
    if example.variant == "again":
        engine = bench.open(case.sizes())
        _exhaust(play(bench, other, engine=engine))
        for owner in sorted(owner for owner in engine.slots() if not owner.endswith("@")):
            engine.free(owner)
    elif example.variant == "turns":
        if not bench.domain.together:
            raise Blind("the domain has together=False")
        moments = play(bench, other)
    elif example.variant == "refused":
        bench.attempt(bench.open(other.sizes()), other.batch(other.plan[0]))
    else:
        if example.variant == "refill" and not bench.domain.refills:
            raise Blind("the domain has refills=False")
        buffers: dict[Any, Any] | None = {} if example.variant == "refill" else None
        _exhaust(play(bench, other, engine=bench.open(other.sizes(), buffers=buffers)))
        engine = bench.open(case.sizes(), buffers=buffers)
    yield from _judged(bench, case, _in_turns(play(bench, case, engine=engine), moments))


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


def _in_turns(moments: Iterator[Moment], others: Iterator[Moment]) -> Iterator[Moment]:
    """Yield the moments of a trace. After each of them, another trace goes on by a step."""
    next(others, None)
    for moment in moments:
        yield moment
        next(others, None)


def _histories(domain: TraceDomain) -> tuple[str, ...]:
    """Return the histories that can happen to the engines of a domain."""
    can = {"turns": domain.together, "refill": domain.refills}
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
    return None if case.value_dim >= TAG_CHANNELS else f"value_dim of at least {TAG_CHANNELS}"


def _promises(name: str) -> Callable[[TraceDomain], str | None]:
    def needs(domain: TraceDomain) -> str | None:
        return None if getattr(domain, name) else f"{name.replace('_', ' ')} is not supported"

    return needs


def _tag_channels(domain: TraceDomain) -> str | None:
    return (
        None
        if max(domain.value_widths or domain.value_dims) >= TAG_CHANNELS
        else f"value_dim of at least {TAG_CHANNELS} is not supported"
    )


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
        ),
        Law(
            "tags",
            "exact",
            "states, windows and outputs hold the tags of accepted tokens and nothing else, exactly",
            _drawn(free=("nan", "random", "old")),
            _tags,
            _tag_channels,
            lacks=_tagable,
        ),
        Law(
            "ledger",
            "exact",
            "nobody's state changes but in its own steps; forks, swaps, transfers copy; slots that nobody owns keep their bits",
            _drawn(free=("nan", "nan", "random")),
            _ledger,
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
            "no slot has two owners, no slot is lost, and slots that belong to nobody are not handed out",
            _drawn(),
            _slots,
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
        ),
    )
}
