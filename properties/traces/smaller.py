"""How traces shrink: fewer requests, events, rows and tokens."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from properties.traces.case import TraceCase
from properties.traces.events import PADDING, drafted, name_of, split_row
from properties.words.smaller import FEW, Changes, Smaller, below, blocks_below, fewer_heads, next_multiples, without_some


def _requests(case: TraceCase) -> Changes:
    """Yield traces of one request alone, and traces without one request; if there are many, without some of them."""
    events = case.trace.split("/")
    names = dict.fromkeys(name for event in events for name in _names_in(event))
    if len(names) > 1:
        many = [{*names} - {*left} for left in without_some([*names])] if len(names) > FEW else []
        for gone in many or (*({*names} - {name} for name in names), *({name} for name in names)):
            if left := [fewer for event in events if (fewer := _without(event, gone))]:
                yield _trace(left)


def _without(event: str, gone: Collection[str]) -> str:
    """Return an event without the rows that name one of these requests, or "" if no other request is left in it."""
    kind, _, text = event.partition(":")
    rows = [row for row in text.split(",") if not {*_names_in(f":{row}")} & {*gone}]
    return f"{kind}:{','.join(rows)}" if any(_names_in(f":{row}") for row in rows) else ""


def _names_in(event: str) -> list[str]:
    """Return the names of the requests that an event names."""
    return re.findall("[a-z]+", event.partition(":")[2])


def _events(case: TraceCase) -> Changes:
    """Yield traces without some events: the first half, the last half, a quarter, ..., single events."""
    for left in without_some(case.trace.split("/")):
        yield _trace([*left])


def _rows(case: TraceCase) -> Changes:
    """Yield traces without one row of an event, padding rows first; if there are many rows, without some of them."""
    events = case.trace.split("/")
    for number, event in enumerate(events):
        kind, _, text = event.partition(":")
        rows = text.split(",")
        order = sorted(range(len(rows)), key=lambda row: not rows[row].startswith(PADDING))
        fewer = [[*rows[:row], *rows[row + 1 :]] for row in order if len(rows) > 1]
        for left in without_some(rows) if len(rows) > FEW else fewer:
            yield _trace([*events[:number], f"{kind}:{','.join(left)}", *events[number + 1 :]])


def _counts(case: TraceCase) -> Changes:
    """Yield traces with fewer tokens in a row of a prefill, with shorter drafts, and with other accepted tokens.

    If an event has many rows, no row has more than so many tokens.
    """
    events = case.trace.split("/")
    for number, event in enumerate(events):
        kind, _, text = event.partition(":")
        rows = text.split(",")
        if kind == "v":
            yield from (_trace([*events[:number], fewer, *events[number + 1 :]]) for fewer in _fewer_drafts(rows))
            continue
        if kind[0] == "v":
            for drafts in below(int(kind[1:]), 1):
                fewer = [row if row == PADDING else f"{name}{min(int(count), drafts)}" for row, (name, count) in _split(rows)]
                yield _trace([*events[:number], f"v{drafts}:{','.join(fewer)}", *events[number + 1 :]])
        if kind[0] in "pv" and len(rows) > FEW:
            for most in below(max(int(count or 0) for _, (_, count) in _split(rows)), 1):
                fewer = [f"{name}{min(int(count), most) if count else ''}" for _, (name, count) in _split(rows)]
                yield _trace([*events[:number], f"{kind}:{','.join(fewer)}", *events[number + 1 :]])
            continue
        for place, (_, (name, written)) in enumerate(_split(rows if kind[0] in "pv" else [])):
            tokens = int(written or 0)
            for count in (*below(tokens, 1), *blocks_below(tokens)) if tokens else ():
                fewer = [*rows[:place], f"{name}{count}", *rows[place + 1 :]]
                yield _trace([*events[:number], f"{kind}:{','.join(fewer)}", *events[number + 1 :]])


def _split(rows: list[str]) -> list[tuple[str, tuple[str, str]]]:
    """Return rows, each with its name and what stands behind the name."""
    return [(row, split_row(row)) for row in rows]


def _fewer_drafts(rows: list[str]) -> Iterator[str]:
    """Yield verifications with equal numbers of tokens in all rows, and with fewer tokens or fewer accepted ones in one row."""
    names, counts = [split_row(row)[0] for row in rows], [drafted(row) for row in rows]
    real = [count for name, count in zip(names, counts, strict=True) if name != PADDING]
    if real and all(accepted for accepted, _ in real):
        most = max(count for _, count in counts)
        written = [name if name == PADDING else f"{name}{accepted}" for name, (accepted, _) in zip(names, counts, strict=True)]
        yield f"v{most}:{','.join(written)}"
    for place, (name, (accepted, count)) in enumerate(zip(names, counts, strict=True)):
        changes = [(min(accepted, fewer), fewer) for fewer in below(count, 1)]
        changes += [(fewer, count) for fewer in below(accepted, 0)]
        for kept, drafts in changes:
            changed = f"{PADDING}:{drafts}" if name == PADDING else f"{name}{kept}:{drafts}"
            yield f"v:{','.join([*rows[:place], changed, *rows[place + 1 :]])}"


def _names(case: TraceCase) -> Changes:
    """Yield the trace with its requests called a, b, c in the order in which they come."""
    events = [event.partition(":") for event in case.trace.split("/")]
    names = dict.fromkeys(name for _, _, text in events for name in re.findall("[a-z]+", text))
    new = {name: name_of(number) for number, name in enumerate(names)}
    renamed = [f"{kind}:{re.sub('[a-z]+', lambda found: new[found[0]], text)}" for kind, _, text in events]
    if renamed != case.trace.split("/"):
        yield _trace(renamed)


def _trace(events: list[str]) -> tuple[str, dict[str, Any]]:
    return f"trace={'/'.join(events)}", {"trace": "/".join(events)}


def _slots(case: TraceCase) -> Changes:
    for slots in below(case.slots, 1):
        yield f"slots={slots}", {"slots": slots}


def _longer_rows(case: TraceCase) -> Changes:
    """Yield the trace with one row of a prefill longer, up to the next multiple of a chunk."""
    events = case.trace.split("/")
    for number, event in enumerate(events):
        kind, _, text = event.partition(":")
        rows = text.split(",")
        for place, row in enumerate(rows if kind == "p" else ()):
            name, tokens = split_row(row)[0], int(split_row(row)[1])
            for count in next_multiples(tokens) if name != PADDING and tokens else ():
                longer = [*rows[:place], f"{name}{count}", *rows[place + 1 :]]
                yield _trace([*events[:number], f"{kind}:{','.join(longer)}", *events[number + 1 :]])


SMALLER_TRACES = Smaller(
    TraceCase,
    (_requests, _events, _rows, _counts, _names, _slots, fewer_heads),
    ("key_dim", "value_dim"),
    beside={"trace": ("slots", "snapshots")},  # with fewer slots, the requests of the larger trace are not admitted
    telling=(_longer_rows,),
)
