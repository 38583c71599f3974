"""How traces shrink: fewer requests, events, rows and tokens."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from properties.traces.case import TraceCase
from properties.traces.events import PADDING, drafted
from properties.words.smaller import Changes, Smaller, below, blocks_below, fewer_heads, next_multiples, without_some


def _requests(case: TraceCase) -> Changes:
    """Yield traces of one request alone, and traces without one request."""
    events = case.trace.split("/")
    letters = dict.fromkeys(letter for event in events for letter in _names_in(event))
    if len(letters) > 1:
        for gone in (*({*letters} - {letter} for letter in letters), *({letter} for letter in letters)):
            if left := [fewer for event in events if (fewer := _without(event, gone))]:
                yield _trace(left)


def _without(event: str, gone: Collection[str]) -> str:
    """Return an event without the rows that name one of these requests, or "" if no other request is left in it."""
    kind, _, text = event.partition(":")
    rows = [row for row in text.split(",") if not {*_names_in(f":{row}")} & {*gone}]
    return f"{kind}:{','.join(rows)}" if any(_names_in(f":{row}") for row in rows) else ""


def _names_in(event: str) -> list[str]:
    """Return the letters of the requests that an event names."""
    return [letter for letter in event.partition(":")[2] if letter.islower()]


def _events(case: TraceCase) -> Changes:
    """Yield traces without some events: the first half, the last half, a quarter, ..., single events."""
    for left in without_some(case.trace.split("/")):
        yield _trace([*left])


def _rows(case: TraceCase) -> Changes:
    """Yield traces without one row of an event, padding rows first."""
    events = case.trace.split("/")
    for number, event in enumerate(events):
        kind, _, text = event.partition(":")
        rows = text.split(",")
        order = sorted(range(len(rows)), key=lambda row: not rows[row].startswith(PADDING))
        for row in order if len(rows) > 1 else ():
            yield _trace([*events[:number], f"{kind}:{','.join([*rows[:row], *rows[row + 1 :]])}", *events[number + 1 :]])


def _counts(case: TraceCase) -> Changes:
    """Yield traces with fewer tokens in a row of a prefill, with shorter drafts, and with other accepted tokens."""
    events = case.trace.split("/")
    for number, event in enumerate(events):
        kind, _, text = event.partition(":")
        rows = text.split(",")
        if kind == "v":
            yield from (_trace([*events[:number], fewer, *events[number + 1 :]]) for fewer in _fewer_drafts(rows))
            continue
        if kind[0] == "v":
            for drafts in below(int(kind[1:]), 1):
                fewer = [row if row == PADDING else f"{row[0]}{min(int(row[1:]), drafts)}" for row in rows]
                yield _trace([*events[:number], f"v{drafts}:{','.join(fewer)}", *events[number + 1 :]])
        for place, row in enumerate(rows if kind[0] in "pv" else ()):
            tokens = int(row[1:] or 0)
            for count in (*below(tokens, 1), *blocks_below(tokens)) if tokens else ():
                fewer = [*rows[:place], f"{row[0]}{count}", *rows[place + 1 :]]
                yield _trace([*events[:number], f"{kind}:{','.join(fewer)}", *events[number + 1 :]])


def _fewer_drafts(rows: list[str]) -> Iterator[str]:
    """Yield verifications with equal numbers of tokens in all rows, and with fewer tokens or fewer accepted ones in one row."""
    counts = [drafted(row) for row in rows]
    real = [count for row, count in zip(rows, counts, strict=True) if row[0] != PADDING]
    if real and all(accepted for accepted, _ in real):
        most = max(count for _, count in counts)
        written = [row[0] if row[0] == PADDING else f"{row[0]}{accepted}" for row, (accepted, _) in zip(rows, counts, strict=True)]
        yield f"v{most}:{','.join(written)}"
    for place, (row, (accepted, count)) in enumerate(zip(rows, counts, strict=True)):
        changes = [(min(accepted, fewer), fewer) for fewer in below(count, 1)]
        changes += [(fewer, count) for fewer in below(accepted, 0)]
        for kept, drafts in changes:
            changed = f"{PADDING}:{drafts}" if row[0] == PADDING else f"{row[0]}{kept}:{drafts}"
            yield f"v:{','.join([*rows[:place], changed, *rows[place + 1 :]])}"


def _names(case: TraceCase) -> Changes:
    """Yield the trace with its requests called a, b, c in the order in which they come."""
    text = re.sub("[pdskwtrf]:|v\\d?:", lambda kind: kind[0].upper(), case.trace)
    letters = dict.fromkeys(letter for letter in text if letter.islower())
    renamed = str.translate(text, {ord(letter): ord("a") + number for number, letter in enumerate(letters)}).lower()
    if renamed != case.trace:
        yield _trace(renamed.split("/"))


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
            for count in next_multiples(int(row[1:])) if row[0] != PADDING and int(row[1:]) else ():
                longer = [*rows[:place], f"{row[0]}{count}", *rows[place + 1 :]]
                yield _trace([*events[:number], f"{kind}:{','.join(longer)}", *events[number + 1 :]])


SMALLER_TRACES = Smaller(
    TraceCase,
    (_requests, _events, _rows, _counts, _names, _slots, fewer_heads),
    ("key_dim", "value_dim"),
    beside={"trace": ("slots", "snapshots")},  # with fewer slots, the requests of the larger trace are not admitted
    telling=(_longer_rows,),
)
