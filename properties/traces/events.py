"""Traces: the events of the requests that share a pool, as one word, and what each of them does.

A trace is a word such as `p:a5,b70,_3/d:a,_/v4:a2,b1/k:c<b@/w:a/f:a`. Events are separated by `/`, and rows by `,`:

    p:a5,b70,_3   prefill: 5 tokens of request a, 70 of b, a padding row of 3 tokens; a request that is not there is admitted
    d:a,_         decode: one token of a, a padding row
    s:a,_         the same, after which a snapshot of each request is taken
    v4:a2,b1      verify drafts of 4 tokens: the first 2 of a's and the first token of b's are accepted
    v:a2:4,b0:3,c1:1,_:2   the same for drafts with numbers of tokens of their own: 2 of a's 4 tokens are accepted, none of b's 3;
                  c has a plain decode beside them, and the padding row has 2 tokens
    k:c<b@        fork: c begins from b's snapshot, or without `@` from b's state
    w:a           swap: a's state leaves its slot and comes back into a slot
    t:a           transfer: a's state and window are cut for the ranks of another TP size, and put together in a slot again
    r:a           preemption: the slots of a go back to the pool; a later prefill begins with its first token again
    f:a           free: a is finished, and its slots go back to the pool

An event or a row that cannot happen does nothing: a row of a request that is not there, a fork from a snapshot that was never
taken, an admission when no slot is left. So a part of a trace is a trace, and a trace shrinks by leaving out events and rows.

A prefill of n tokens with n >= `snapshots` takes a snapshot after the last multiple of `snapshots` tokens, if the request has a
snapshot already or a slot is left. With `aligned=request`, multiples are counted from the first token of the request, so that a
short row may take a snapshot too. The event `s` takes one wherever the request is, under the same condition. Requests and
snapshots have one slot each.

Requests are called a to z, and further ones aa to zz.
"""

import dataclasses
import re

PADDING = "_"
MOST_TOKENS, MOST_DRAFTS = 256, 8
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NAME = "[a-z]{1,2}"
_ROW, _DRAFT, _FORK = re.compile(rf"({_NAME}|_)(\d{{1,3}})"), re.compile(r"v(\d?)"), re.compile(rf"({_NAME})<({_NAME})(@?)")
_RAGGED = re.compile(rf"(?:{_NAME}(\d)|_):(\d)")  # a row of `v:`, with its accepted tokens and all of its tokens
_PARTS = re.compile(r"(_|[a-z]*)(.*)")


def name_of(number: int) -> str:
    """Return the name of a request by its number: a to z for 0 to 25, aa for 26, up to zz for 701."""
    tens, ones = divmod(number, len(_LETTERS))
    return (_LETTERS[tens - 1] if tens else "") + _LETTERS[ones]


def number_of(name: str) -> int:
    """Return the number of a request by its name."""
    first = len(_LETTERS) * (_LETTERS.index(name[0]) + 1) if len(name) > 1 else 0
    return first + _LETTERS.index(name[-1])


def split_row(row: str) -> tuple[str, str]:
    """Return the name in a row, or PADDING, and what stands behind it."""
    found = _PARTS.fullmatch(row)
    assert found is not None, row
    return found[1], found[2]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a batch: `count` tokens of a request, the first `accepted` of which stay; `start` tokens came before.

    `request` is PADDING for a padding row. `begins` says that the request was admitted for this row. `snapshot` is the number of
    the row's tokens after which a snapshot is taken, or None.
    """

    request: str
    start: int
    count: int
    accepted: int
    begins: bool = False
    snapshot: int | None = None

    @property
    def real(self) -> bool:
        """Whether the row is a request's."""
        return self.request != PADDING


@dataclasses.dataclass(frozen=True)
class Step:
    """What an event of a trace does. `event` is its number from 1 on, and `text` its word in the trace.

    `kind` is "p", "d", "s", "v", "k", "w", "t", "r" or "f". A fork has the new request in `request`, the old one in `source`, and
    `snapshot` says whether it begins from the snapshot. Swaps, transfers, preemptions and frees have their request in `request`.
    """

    event: int
    text: str
    kind: str
    rows: tuple[Row, ...] = ()
    request: str = ""
    source: str = ""
    snapshot: bool = False

    @property
    def requests(self) -> tuple[str, ...]:
        """The requests that the step is about."""
        return tuple(row.request for row in self.rows if row.real) or (self.request,)


def tokens_of_event(event: str) -> int:
    """Return the number of tokens that an event names."""
    kind, _, text = event.partition(":")
    rows = text.split(",")
    if kind == "p":
        return sum(int(split_row(row)[1]) for row in rows)
    if kind == "v":
        return sum(drafted(row)[1] for row in rows)
    return len(rows) * int(kind[1:] or 1) if kind[0] in "dsv" else 0


def drafted(row: str) -> tuple[int, int]:
    """Return of a row of `v:` how many tokens are accepted and how many it has."""
    accepted, _, count = split_row(row)[1].partition(":")
    return int(accepted or 0), int(count)


def check_event(event: str) -> None:
    """Raise ValueError for an event of another form than those at the top of this module."""
    kind, colon, text = event.partition(":")
    rows = text.split(",")
    if not colon or not (kind in ("p", "d", "s", "k", "w", "t", "r", "f") or _DRAFT.fullmatch(kind)):
        begins = f"p:, d:, s:, v:, v1: to v{MOST_DRAFTS}:, k:, w:, t:, r: or f:"
        raise ValueError(f"an event of a trace must begin with {begins}, got {event[:80]!r}")
    drafts = int(kind[1:] or MOST_DRAFTS) if kind[0] == "v" else 0
    if kind[0] == "v" and not 1 <= drafts <= MOST_DRAFTS:
        raise ValueError(f"a draft must have 1 to {MOST_DRAFTS} tokens, got {event[:80]!r}")
    for row in rows:
        if kind == "k":
            if not (found := _FORK.fullmatch(row)) or found[1] == found[2]:
                raise ValueError(f"a fork must be NEW<OLD or NEW<OLD@ of two requests a to zz, got {row[:80]!r} in {event[:80]!r}")
        elif kind == "p":
            found = _ROW.fullmatch(row)
            if not found or int(found[2]) > MOST_TOKENS or str(int(found[2])) != found[2]:
                raise ValueError(f"a row of a prefill must be a request and 0 to {MOST_TOKENS} tokens, got {row[:80]!r}")
        elif kind == "v":
            if not _RAGGED.fullmatch(row) or not 1 <= drafted(row)[1] <= drafts or drafted(row)[0] > drafted(row)[1]:
                raise ValueError(f"a row of v: must be such as a2:4, of 1 to {drafts} tokens, or _:4, got {row[:80]!r}")
        elif kind[0] == "v" and row != PADDING:
            found = _ROW.fullmatch(row)
            if not found or found[1] == PADDING or not 1 <= int(found[2]) <= drafts or str(int(found[2])) != found[2]:
                raise ValueError(f"a row of {kind} must be a request and 1 to {drafts} accepted tokens, or _, got {row[:80]!r}")
        elif kind in ("w", "t", "r", "f") and not re.fullmatch(_NAME, row):
            raise ValueError(f"{kind}: takes requests a to zz, got {row[:80]!r} in {event[:80]!r}")
        elif kind in ("d", "s") and not re.fullmatch(f"{_NAME}|_", row):
            raise ValueError(f"a row of a decode must be a request a to zz or _, got {row[:80]!r} in {event[:80]!r}")
    if kind in ("k", "w", "t", "r", "f") and len(rows) > 1:
        raise ValueError(f"{kind}: takes one request, got {event[:80]!r}")
    names = [name for name, _ in map(split_row, rows) if name != PADDING]
    if len(set(names)) < len(names):
        raise ValueError(f"an event must name a request once, got {event[:80]!r}")


class Roll:
    """Who is there: the number of tokens of each request and of each snapshot, while a trace is planned."""

    def __init__(self, slots: int, snapshots: int, aligned: str = "row") -> None:
        self.slots, self.every, self.aligned = slots, snapshots, aligned
        self.tokens: dict[str, int] = {}
        self.saved: dict[str, int] = {}

    def room(self) -> bool:
        """Whether a slot is left."""
        return len(self.tokens) + len(self.saved) < self.slots

    def step(self, number: int, event: str) -> Step | None:
        """Return what an event does, or None if it does nothing."""
        kind, _, text = event.partition(":")
        if kind in ("p", "d", "s") or kind[0] == "v":
            rows = (
                self._prefill(text) if kind == "p" else self._drafts(text) if kind == "v" else self._steps(text, int(kind[1:] or 1))
            )
            rows = self._saved(rows) if kind == "s" else rows
            if not any(row.real for row in rows) or not sum(row.count for row in rows):
                return None
            for row in rows:
                if row.real:
                    self.tokens[row.request] = row.start + row.accepted
            return Step(number, event, kind[0], rows)
        if kind == "k":
            found = _FORK.fullmatch(text)
            assert found is not None, event
            new, old, saved = found.groups()
            source = self.saved if saved else self.tokens
            if new in self.tokens or old not in source or not self.room():
                return None
            self.tokens[new] = source[old]
            return Step(number, event, kind, request=new, source=old, snapshot=bool(saved))
        if text not in self.tokens:
            return None
        if kind in ("r", "f"):
            del self.tokens[text]
            self.saved.pop(text, None)
        return Step(number, event, kind, request=text)

    def _steps(self, text: str, count: int) -> tuple[Row, ...]:
        """Return the rows of a decode or of a verification of `count` tokens each."""
        rows = []
        for name, accepted in map(split_row, text.split(",")):
            if name == PADDING:
                rows.append(Row(PADDING, 0, count, 0))
            elif name in self.tokens:
                rows.append(Row(name, self.tokens[name], count, int(accepted or count)))
        return tuple(rows)

    def _drafts(self, text: str) -> tuple[Row, ...]:
        """Return the rows of a verification whose drafts have numbers of tokens of their own."""
        rows = []
        for row in text.split(","):
            name, (accepted, count) = split_row(row)[0], drafted(row)
            if name == PADDING:
                rows.append(Row(PADDING, 0, count, 0))
            elif name in self.tokens:
                rows.append(Row(name, self.tokens[name], count, accepted))
        return tuple(rows)

    def _saved(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Return the rows of a decode with a snapshot of each request, as long as a slot is left."""
        decoded = []
        for row in rows:
            saves = row.real and (row.request in self.saved or self.room())
            if saves:
                self.saved[row.request] = row.start + row.count
            decoded.append(dataclasses.replace(row, snapshot=row.count) if saves else row)
        return tuple(decoded)

    def _prefill(self, text: str) -> tuple[Row, ...]:
        """Return the rows of a prefill; requests that are not there are admitted, as long as a slot is left."""
        rows = []
        for row in text.split(","):
            request, count = split_row(row)[0], int(split_row(row)[1])
            begins = request != PADDING and request not in self.tokens
            if begins and (not count or not self.room()):
                continue
            if begins:
                self.tokens[request] = 0
            rows.append(Row(request, self.tokens.get(request, 0), count, count, begins))
        for place, found in enumerate(rows):
            snapshot = self._due(found)
            if found.real and snapshot > 0 and (found.request in self.saved or self.room()):
                self.saved[found.request] = found.start + snapshot
                rows[place] = dataclasses.replace(found, snapshot=snapshot)
        return tuple(rows)

    def _due(self, row: Row) -> int:
        """Return after how many tokens of a row of a prefill a snapshot is due; 0 or less if none is."""
        before = row.start if self.aligned == "request" else 0
        return (before + row.count) // self.every * self.every - before if self.every else 0
