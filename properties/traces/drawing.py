"""Traces drawn inside a domain: an author plays the engine's bookkeeping and writes events that the domain allows."""

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from hypothesis import strategies as st

from properties.traces.case import FREE, GATES, MOST_EVENTS, MOST_WIDTH, TAGGED, VALUES, TraceCase
from properties.traces.domain import MOST_BLOCK, Decoded, TraceDomain
from properties.traces.events import PADDING, Roll, name_of
from properties.words.domain import inside
from properties.words.lengths import widths
from properties.words.sizes import at_limits, named

_NAMES = [*map(name_of, range(TAGGED))]
ROWS = (33, 65, 260)  # of the steps of `crowds`: just over 32, 64 and 256, usual sizes of masks and tables of rows
CROWDED = ROWS[-1]  # slots of `crowds`
USUAL_BLOCK = 256  # tokens: a multiple of blocks of 16, 32, 64 and 128
GRAPH_ROWS = 7  # requests that share graphs of up to eight rows
ADMITTED, TOGETHER, MANY_HEADS = 257, 5, 257  # requests of an engine, so many at a time, and heads: just over 8 bits
SAVING = (0, 9, 18, 35)  # the rows of `crowded_snapshots`, each at another place of its group of 8, 16 or 32 rows
PADDED, BEHIND = 97, 4  # padding rows of a step, and rows of requests behind them: more than 100 rows with few slots
LONG_ROW, LONG_REQUESTS = 128, (256, 517)  # tokens of prompts, and of requests: exactly 256, and over 512
MANY_RANKS = 11  # of a transfer: in the order of their names, rank 10 comes before rank 2
OVER_A_PAGE = 40  # keys and values: in float32 one head and up to three have over 4 KiB, and no multiple of 4 KiB
_LONG = (63, 64, 65, 66, 128, 130)
VALUE_WIDTHS = (8, 8, 16, 4, 12)  # the widths of values that are drawn, as far as a domain has them
_TOKENS = 240  # tokens of a trace, because an interpreted kernel's time grows with them
_TOKENS_MIXED = 180  # the same where steps of continuous batching have further prompts
_PARTS = 18  # the most parts of a prompt that is to end near the end of a block
_FILLED = 64  # tokens of such a prompt that count
_MOST_EVENTS = 28  # from so many events on, a trace that fills a block has no more


class _Author:
    """Writes one trace, event by event, so that most events do something."""

    def __init__(self, chance: random.Random, domain: TraceDomain, case: dict[str, Any], *, drafts: int) -> None:
        self.chance, self.domain, self.drafts = chance, domain, drafts
        self.pads = bool(domain.padding_slots) and case["pad"] in domain.padding_slots and chance.random() < 2 / 3
        self.slots, self.snapshots, self.width = case["slots"], case["snapshots"], case["width"]
        self.heads, self.aligned = case["heads"], case.get("aligned", "row")
        self.roll, self.decoded = Roll(self.slots, self.snapshots, self.aligned), Decoded()
        self.events: list[str] = []
        self.tokens: dict[str, int] = {}  # before the last event
        self.used: list[str] = []
        self.admitted, self.left = 0, _TOKENS_MIXED if domain.mixed else _TOKENS
        blocks = domain.block > 0 and self.in_parts(domain.block)
        self.fills = 0  # events before a request fills a block; 0 if none does
        if blocks and chance.random() < (5 / 6 if self.short() else 1 / 3):
            self.fills = 1 if self.short() else chance.randint(1, 4)
        if self.fills and domain.most_drafts > 1:
            self.drafts = max(2, self.drafts)
        self.parts = 0  # events that are only further parts of one prompt

    def trace(self, events: int) -> str:
        """Return a trace of about so many events, in which every slot had an owner and one slot had two."""
        while self.goes_on(events):
            if self.fills and len(self.events) >= self.fills:
                self.fills = 0
                self.fill_block()
            else:
                self.event()
        return "/".join(self.events)

    def goes_on(self, events: int) -> bool:
        """Whether the trace has another event."""
        few = len(self.events) - self.parts
        return (few < events or (self.admitted <= self.slots and few < events + 8)) and len(self.events) < _MOST_EVENTS

    def event(self) -> None:
        """Add an event, and sometimes the one that should follow at once."""
        here, chance = sorted(self.roll.tokens), self.chance
        ways: list[tuple[float, str, Callable[[], str]]] = [(3.0 if self.roll.room() else 0.5, "prefill", self.prefill)]
        if here and self.domain.mixed:
            ways.append((1.5, "prefill", self.mixed))
        if here:
            ways += [(3.0, "decode", self.decode), (3.0, "verify", self.verify), (1.0, "swap", lambda: f"w:{chance.choice(here)}")]
            ways.append((1.5 if self.heads > 1 else 0.2, "transfer", lambda: f"t:{chance.choice(here)}"))
            ways.append((1.0 if self.roll.room() else 3.0, "free", lambda: f"f:{chance.choice(here)}"))
            ways.append((0.7 if self.roll.room() else 1.5, "preempt", lambda: f"r:{chance.choice(here)}"))
            if self.roll.room():
                ways.append((2.0 if self.roll.saved else 0.7, "fork", self.fork))
            if self.roll.room() or self.roll.saved:
                ways.append((1.0, "save", lambda: f"s:{self.padded(self.some())}"))
        ways = [way for way in ways if way[1] in self.domain.events]
        _, name, write = chance.choices(ways, [way[0] for way in ways])[0]
        self.add(write())
        if name == "free" and chance.random() < 2 / 3:  # free and admit at once
            self.add(self.prefill())
        if name == "verify" and self.domain.none_accepted and self.moves() and chance.random() < 1 / 5:
            self.add(self.moved(chance.choice(sorted(self.roll.tokens))))
        if name == "preempt" and chance.random() < 3 / 4:
            self.add(self.resumed())

    def add(self, event: str) -> None:
        before, self.tokens = len(self.roll.tokens), dict(self.roll.tokens)
        step = self.roll.step(len(self.events) + 1, event)
        self.events.append(event)
        self.admitted += max(0, len(self.roll.tokens) - before)
        if step:
            self.left -= sum(row.count for row in step.rows)
            self.decoded.follow(step)

    def name(self, taken: Collection[str] = ()) -> str:
        """Return a name for a new request: mostly a fresh one, sometimes that of a request that has left."""
        gone = [name for name in self.used if name not in self.roll.tokens and name not in taken]
        fresh = [name for name in _NAMES if name not in self.used] or gone
        return self.chance.choice(gone) if gone and self.chance.random() < 1 / 6 else fresh[0]

    def length(self) -> int:
        """Return a number of tokens of a row of a prefill."""
        most, chance = min(self.domain.most_tokens, max(3, self.left)), self.chance
        edges = [number for number in _LONG if number <= most]
        if self.snapshots:
            edges += [number for number in (self.snapshots, self.snapshots + 1) if number <= most]
        often = 1 / 3 if self.domain.mixed else 1 / 2  # steps of continuous batching have long prompts too
        if edges and chance.random() < (often if self.snapshots else 1 / 6):
            return chance.choice(edges)
        return chance.choice(
            [number for number in (1, 2, 3, self.width - 1, self.width, 5, 1 + self.drafts) if 1 <= number <= most]
        )

    def prefill(self) -> str:
        """Return a prefill of one or two new requests, or of further tokens of those that are there."""
        chance, rows = self.chance, dict[str, int]()
        for _ in range(chance.choice((1, 1, 2, 3))):
            room = self.slots - len(self.roll.tokens) - len(self.roll.saved) - len(rows)
            here = [request for request in sorted(self.roll.tokens) if request not in rows]
            if here and (room <= 0 or chance.random() < 1 / 3):
                name, empty = chance.choice(here), self.domain.empty and chance.random() < 1 / 6
                alone = name in self.decoded and not self.domain.later_prompts
                rows[name] = 0 if empty else 1 if alone else self.length()
            else:
                name = self.name(rows)
                self.used.append(name)
                rows[name] = self.length()
        if not self.domain.mixed and any(count > 1 for count in rows.values()):
            rows = {name: count for name, count in rows.items() if count != 1 or name not in self.roll.tokens}
        return self.prompts(rows)

    def mixed(self) -> str:
        """Return a step of continuous batching: one or two prompts, and one token of every other request, in any order.

        With snapshots, one is due in most of the steps.
        """
        chance, rows = self.chance, dict[str, int]()
        for _ in range(chance.choice((1, 1, 2))):
            going_on = [name for name in sorted(self.roll.tokens) if name not in self.decoded or self.domain.later_prompts]
            going_on = [name for name in going_on if name not in rows]
            due = self.snapshots and self.snapshots <= self.domain.most_tokens and chance.random() < 2 / 3
            left = self.slots - len(self.roll.tokens) - len(self.roll.saved) - len(rows)
            if left > 1 or (left and not (due and going_on)):  # a snapshot needs a slot too
                name = self.name(rows)
                self.used.append(name)
            elif going_on:
                name = chance.choice(going_on)
            else:
                break
            rows[name] = self.snapshots if due else self.length()
        rows |= {name: 1 for name in sorted(self.roll.tokens) if name not in rows}
        return self.prompts({name: rows[name] for name in chance.sample(sorted(rows), len(rows))})

    def prompts(self, rows: Mapping[str, int]) -> str:
        """Return a prefill of so many tokens of each request."""
        written = [f"{request}{count}" for request, count in rows.items()]
        return f"p:{self.padded(written, prefill=True, tokens=self.padding_tokens)}"

    def resumed(self) -> str:
        """Return a prefill of the request that the last event preempted: of its old tokens, one more, or a part of them."""
        request = self.events[-1][-1]
        tokens = self.tokens[request]
        count = min(self.chance.choice((tokens, tokens + 1, 1 + tokens // 2)), self.domain.most_tokens, max(3, self.left))
        return self.prompts({request: count})

    def short(self) -> bool:
        """Whether a row shorter than the window may take a snapshot."""
        return bool(self.snapshots) and self.aligned == "request"

    def in_parts(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens has few enough parts for a trace."""
        return -(-tokens // self.domain.most_tokens) <= _PARTS

    def fill_block(self) -> None:
        """Add prompts of a request that end near the end of a block, and mostly a step that begins near that end.

        The tokens of a large block do not count, because only engines whose kernels are not interpreted have one.
        """
        chance, left = self.chance, self.left
        names = [name for name in sorted(self.roll.tokens) if name not in self.decoded or self.domain.later_prompts]
        if self.roll.room():
            names = [self.name()]
            self.used += names
        if not names:
            return
        name = chance.choice(names)
        drafts = self.drafts if "verify" in self.domain.events else 1
        short = self.short() and self.in_parts(self.snapshots)
        before = chance.choice((chance.randint(1, max(1, drafts - 1)), chance.randint(1, max(1, drafts - 1)), 0, 0, -1, drafts))
        if short and chance.random() < 2 / 3:
            before = chance.randint(1, max(1, self.width - 2))
        block = self.snapshots if short else self.domain.block
        count = block - self.roll.tokens.get(name, 0) % block - before
        while count < 1:
            count += block
        self.parts = -(-count // self.domain.most_tokens) - 1
        while count > 0:
            part = min(count, self.domain.most_tokens)
            self.add(self.prompts({name: part}))
            count -= part
        self.left = max(self.left, left - _FILLED)
        ways = [(4.0 if before else 1.0, self.cross_block)] if drafts > 1 else []
        if short and before > 0:
            ways += [(24.0, lambda: self.prompts({name: min(before + chance.randint(0, 2), self.domain.most_tokens)}))]
        ways += [(1.0 if before else 4.0, self.decode)] if "decode" in self.domain.events else []
        if not before:
            ways += [(3.0, lambda: self.moved(name))] if self.moves() else []
            ways += [(1.0, lambda: f"s:{self.padded(self.some())}")] if "save" in self.domain.events else []
        if ways:
            self.add(chance.choices([write for _, write in ways], [weight for weight, _ in ways])[0]())

    def moves(self) -> list[str]:
        """Return the kinds of events that move what a request has, as far as the domain has them."""
        kinds = {"w": "swap", "t": "transfer", "r": "preempt", "k": "fork"}
        return [kind for kind, name in kinds.items() if name in self.domain.events and (kind != "k" or self.roll.room())]

    def moved(self, name: str) -> str:
        """Return a swap, a transfer, a preemption or a fork of a request."""
        kind = self.chance.choice(self.moves())
        if kind != "k":
            return f"{kind}:{name}"
        self.used.append(self.name())
        return f"k:{self.used[-1]}<{name}"

    def cross_block(self) -> str:
        """Return a verification of drafts of which most are accepted as a whole."""
        chance = self.chance
        here = chance.sample(sorted(self.roll.tokens), len(self.roll.tokens))
        if self.domain.ragged and chance.random() < 1 / 2:
            counts = {name: chance.choice((self.drafts, self.drafts, 1)) for name in here}
            rows = [f"{name}{chance.choice((count, count, chance.randint(1, count)))}:{count}" for name, count in counts.items()]
            return f"v:{self.padded(rows, tokens=lambda: f':{chance.randint(1, self.drafts)}')}"
        rows = [f"{name}{chance.choice((self.drafts, self.drafts, chance.randint(1, self.drafts)))}" for name in here]
        return f"v{self.drafts}:{self.padded(rows)}"

    def decode(self) -> str:
        return f"d:{self.padded(self.some())}"

    def verify(self) -> str:
        if (self.domain.ragged or self.domain.none_accepted) and self.chance.random() < 1 / 2:
            return self.ragged()
        accepted = (self.chance.choice((1, self.drafts, self.chance.randint(1, self.drafts))) for _ in iter(int, 1))
        return f"v{self.drafts}:{self.padded([f'{request}{next(accepted)}' for request in self.some()])}"

    def ragged(self) -> str:
        """Return a verification in which each row has its own number of tokens, some have one, and of some none is accepted."""
        chance, rows = self.chance, list[str]()
        for request in self.some():
            count = chance.choice((1, self.drafts, chance.randint(1, self.drafts))) if self.domain.ragged else self.drafts
            accepted = chance.choice((1, count, chance.randint(1, count)))
            rejected = self.domain.none_accepted and (count > 1 or not self.domain.ragged) and chance.random() < 3 / 8
            rows.append(f"{request}{0 if rejected else accepted}:{count}")
        return f"v:{self.padded(rows, tokens=lambda: f':{chance.randint(1, self.drafts) if self.domain.ragged else self.drafts}')}"

    def fork(self) -> str:
        chance = self.chance
        if self.roll.saved and chance.random() < 3 / 4:
            source = f"{chance.choice(sorted(self.roll.saved))}@"
        else:
            source = chance.choice(sorted(self.roll.tokens))
        self.used.append(self.name())
        return f"k:{self.used[-1]}<{source}"

    def some(self) -> list[str]:
        """Return some of the requests that are there, in any order."""
        here = sorted(self.roll.tokens)
        return self.chance.sample(here, self.chance.choice((len(here), len(here), self.chance.randint(1, len(here)))))

    def padded(self, rows: list[str], *, prefill: bool = False, tokens: Callable[[], str] = str) -> str:
        """Return the rows with padding rows at any place. `tokens` says how many tokens one has, as text."""
        if self.pads and (self.domain.prefill_padding or not prefill) and self.chance.random() < 1 / 2:
            for _ in range(min(self.chance.choice((1, 1, 2)), self.domain.most_padding)):
                place = self.chance.randint(0, len(rows))
                rows.insert(place, f"{PADDING}{tokens()}")
        return ",".join(rows)

    def padding_tokens(self) -> str:
        """Return the number of tokens of a padding row of a prefill."""
        return str(min(self.chance.choice((1, 2, 3)), self.domain.most_tokens))


def fixed_cases(domain: TraceDomain, traces: Sequence[str], **words: Any) -> list[TraceCase]:
    """Return the case of the first of some traces that is inside the domain, with its simplest widths and dtypes; [] if none is.

    There is none if the check draws no large cases, and on a GPU. Traces of too many events are left out.
    """
    keys, values = ([width for width in range(4, MOST_WIDTH + 1) if has(width)] for has in (domain.has_key, domain.has_value))
    if not (keys and values and at_limits(domain)):
        return []
    fields: dict[str, Any] = {
        "pad": (domain.padding_slots or ("-1",))[0],
        "width": min(domain.widths),
        "dtype": domain.dtypes[0],
        "state": domain.states[0],
        "indices": domain.indices[0],
        "gate": "64",
        "key_dim": keys[0],
        "value_dim": values[0],
        **words,
    }
    cases = (TraceCase(trace, **fields) for trace in traces if trace.count("/") < MOST_EVENTS)
    return [case for case in cases if domain.outside(case) is None][:1]


def crowds(domain: TraceDomain) -> list[TraceCase]:
    """Return cases whose steps have many rows: of many requests, and of few requests behind many padding rows.

    The first has steps of the numbers of rows in ROWS, up to the number of slots that the domain has. In each step of a prompt,
    rows of new requests come first, and rows of requests that go on come last. Its decodes have padding rows in front, up to
    CROWDED rows, and so have its drafts, which have two and three tokens where the domain has that.
    """
    cases = []
    for count, paddings in ((min(CROWDED, domain.most_slots), (CROWDED, 0)), (BEHIND, (PADDED + BEHIND,))):
        names, there = [*map(name_of, range(count))], 0
        prompts = []
        for rows in sorted({min(rows, count) for rows in ROWS}):
            if not there:
                there = rows - 1
                prompts.append("p:" + ",".join(f"{name}{1 + place % 3}" for place, name in enumerate(names[:there])))
            prompts.append("p:" + ",".join(f"{name}1" for name in (*names[there:rows], *names[:there])))
            there = rows
        kinds = [kind for kind, event in (("d", "decode"), ("v", "verify")) if event in domain.events]
        traces = []
        for most in paddings:
            padding = [PADDING] * max(0, most - count)  # requests stand behind the padding
            equal, ragged = (
                (f"{name}1" for name in names),
                (f"{name}{1 + place % 2}:{3 - place % 2}" for place, name in enumerate(names)),
            )
            drafts = [f"v:{','.join([*(f'{one}:2' for one in padding), *ragged])}"] * (domain.ragged and domain.most_drafts > 2)
            drafts.append(f"v2:{','.join([*padding, *equal])}")
            for draft in drafts:
                steps = [{"d": f"d:{','.join([*padding, *names[::-1]])}", "v": draft}[kind] for kind in kinds]
                traces += ["/".join([*prompts, *steps])] if kinds or not padding else []
        cases += fixed_cases(domain, traces, slots=count, free="nan")
    return cases


def alternating(domain: TraceDomain) -> list[TraceCase]:
    """Return a case in which decodes and drafts of few, some and all requests alternate.

    A graph of so many rows, or of the next power of two, then runs with a number of rows between those of its own last run and of
    the last run of the other kind.
    """
    if not {"decode", "verify"} <= {*domain.events}:
        return []
    names = [name_of(number) for number in range(GRAPH_ROWS)]
    few, some = names[:2], names[:3]
    turns = [("d", names), ("d", few), ("v", names), ("d", some), ("v", few), ("d", names), ("v", some), ("d", names)]
    steps = ["p:" + ",".join(f"{name}{1 + place % 3}" for place, name in enumerate(names))]
    steps += [f"d:{','.join(rows)}" if kind == "d" else f"v2:{','.join(f'{name}1' for name in rows)}" for kind, rows in turns]
    return fixed_cases(domain, ["/".join(steps)], slots=GRAPH_ROWS, free="nan")


def crowded_snapshots(domain: TraceDomain) -> list[TraceCase]:
    """Return a case in which few rows among many take snapshots, at other places of the step and of its groups of rows.

    The first row ends where its snapshot is taken, so it has no part behind that place. The rows between those with snapshots have
    one to three tokens, and so one part each in a table of the parts of all rows.
    """
    every = min((tokens for tokens in domain.snapshots if tokens), default=0)
    counts = dict(zip(SAVING, (every, 2 * every + 1, every + 2, 2 * every + 2), strict=True))
    rows = [f"{name_of(row)}{min(counts.get(row, 1 + row % 3), domain.most_tokens)}" for row in range(max(SAVING) + 2)]
    if not every or every > domain.most_tokens or len(rows) + len(SAVING) > domain.most_slots:
        return []
    trace = f"p:{','.join(rows)}/{_token(domain, [name_of(row) for row in SAVING])}"
    slots = len(rows) + len(SAVING)
    return fixed_cases(domain, [trace], slots=slots, snapshots=every, aligned=domain.alignments[0], free="nan")


def admissions(domain: TraceDomain) -> list[TraceCase]:
    """Return a case in which ADMITTED requests are admitted, up to TOGETHER at a time, beside a request that stays.

    Each has a token more than the last one, so that what a slot held before would stay in the state of the last one, whose keys
    differ by position. There is none where kernels are interpreted, because every event launches some.
    """
    if "free" not in domain.events or not domain.drawing.quick:
        return []
    first, *others = _NAMES
    *names, last = (others[number % len(others)] for number in range(ADMITTED - 1))
    events = [f"p:{first}1"]
    for place in range(0, len(names), TOGETHER):
        some = names[place : place + TOGETHER]
        events += ["p:" + ",".join(f"{name}2" for name in some), *(f"f:{name}" for name in some)]
    events += [f"p:{last}1", _token(domain, [first, last])]
    return fixed_cases(domain, ["/".join(events)], slots=1 + TOGETHER, free="old", width=max(domain.widths))


def many_heads(domain: TraceDomain) -> list[TraceCase]:
    """Return a case of MANY_HEADS key heads, with two value heads each where the domain groups them."""
    value_heads = 2 * MANY_HEADS if domain.grouped_heads else MANY_HEADS
    return fixed_cases(domain, [f"p:a3,b1/{_token(domain, ['b', 'a'])}"], heads=MANY_HEADS, value_heads=value_heads)


def leaks(domain: TraceDomain) -> list[TraceCase]:
    """Return cases in which a request begins from a snapshot whose owner leaves, in either order, until all slots have owners."""
    every, cases = min((tokens for tokens in domain.snapshots if tokens), default=0), []
    if not {"fork", "free"} <= {*domain.events}:
        return []
    saves = [(f"p:a{every}", {"snapshots": every, "aligned": domain.alignments[0]})] if every else []
    saves += [("p:a5/s:a", {})] if "save" in domain.events else []
    ways = [kind for kind, event in (("r", "preempt"), ("f", "free")) if event in domain.events]
    for save, words in saves:
        turns = [turn for kind in ways for turn in (f"{kind}:a/f:b", f"f:b/{kind}:a")]
        trace = "/".join([*(f"{save}/k:b<a@/{turn}/p:c1,d1,e1/f:c/f:d/f:e" for turn in turns)])
        cases += fixed_cases(domain, [trace], slots=3, **words)
    return cases


def long_requests(domain: TraceDomain) -> list[TraceCase]:
    """Return a case with a request of exactly 256 tokens before a decode, and in plain torch with one of over 512."""
    part, most = min(LONG_ROW, domain.most_tokens), LONG_REQUESTS if domain.drawing.quick else LONG_REQUESTS[:1]
    ends = [[min(end, tokens) for end in range(part, tokens + part, part)] for tokens in most]
    parts = [[end - begin for begin, end in zip([0, *request], request, strict=False)] for request in ends]
    steps = [
        "p:" + ",".join(f"{name_of(number)}{count}" for number, count in enumerate(rows) if count) for rows in zip_longest(*parts)
    ]
    after = _token(domain, [name_of(number) for number in range(len(most))])
    return fixed_cases(domain, ["/".join([*steps, after, after])], slots=6)


def block_ends(domain: TraceDomain) -> list[TraceCase]:
    """Return a case of drafts whose accepted tokens end just below, at and just over the end of a block, and one wholly at it.

    In plain torch the end is a multiple of all usual blocks, up to those of 256 tokens, and in another case of the domain's.
    Further blocks are the numbers that the source names.
    """
    if "verify" not in domain.events or domain.most_drafts < 2:
        return []
    drafts, cases = min(4, domain.most_drafts), []
    usual = USUAL_BLOCK if domain.drawing.quick else domain.block
    for block in dict.fromkeys((usual, domain.block, *(number for number in named(domain) if number <= MOST_BLOCK))):
        before = [block - 2, block - 2, block - 2, block - drafts]
        part = max(1, min(block, domain.most_tokens))
        steps = [
            "p:" + ",".join(f"{name}{min(part, count - done)}" for name, count in zip("abcd", before, strict=True) if count > done)
            for done in range(0, max(before), part)
        ]
        accepted = [min(count, drafts) for count in (1, 2, 3)]
        draft = f"v{drafts}:" + ",".join(f"{name}{count}" for name, count in zip("abcd", (*accepted, drafts), strict=True))
        cases += fixed_cases(domain, ["/".join([*steps, draft, _token(domain, "abcd")])], slots=5) if block > drafts else []
    return cases


def forks(domain: TraceDomain) -> list[TraceCase]:
    """Return cases in which a request begins from a snapshot or from another request.

    In two of them the snapshot is then taken again. In one it was taken after a single token of a prompt's second part, and in one
    a request leaves whose name begins the name of its owner. In one, requests leave from which others began, and new ones get their
    slots before the others go on.
    """
    every = min((tokens for tokens in domain.snapshots if tokens), default=0)
    token, cases = _token(domain, ["b"]), []
    if "fork" in domain.events and every:
        snapshot = f"p:a{every}"
        aligned = domain.alignments[0]
        cases += fixed_cases(domain, [f"{snapshot}/k:b<a@/{snapshot}/{token}"], slots=5, snapshots=every, aligned=aligned)
        parts = f"p:a{every - 1}/p:a1/k:b<a@/{token}"
        cases += fixed_cases(domain, [parts], slots=5, snapshots=every, aligned="request", width=max(domain.widths))
        prefix = f"p:a{every},ab{every}/f:a/k:b<ab@/{token}" if "free" in domain.events else ""
        cases += fixed_cases(domain, [prefix] * bool(prefix), slots=6, snapshots=every, aligned=aligned)
    if "fork" in domain.events:
        leave = "r:a" if "preempt" in domain.events else "f:a"
        cases += fixed_cases(domain, [f"p:a5,c4/k:b<a/k:d<c/{leave}/f:c/p:e3,f2/{_token(domain, ['b', 'd'])}"], slots=5)
    if {"fork", "save"} <= {*domain.events}:
        cases += fixed_cases(domain, [f"p:a5/s:a/k:b<a@/s:a/{token}"], slots=5)
    return cases


def repeats(domain: TraceDomain) -> list[TraceCase]:
    """Return a case in which a request is moved in each way twice, and goes on between, so that a copy of the first time shows.

    A transfer goes to 11 ranks. In a second case it goes to two ranks that share one of three key heads. There the
    state of a rank has over 4 KiB and does not end with a page.
    """
    token = _token(domain, ["a", "b"])
    ways = [f"{kind}:a" for kind, event in (("w", "swap"), ("t", "transfer")) if event in domain.events]
    ways += ["s:a"] if "save" in domain.events else []
    branch = ["k:c<a@"] if {"save", "fork"} <= {*domain.events} else []
    moves = [step for way in ways for step in (way, token, way, token)]
    traces = ["/".join(["p:a5,b3", *some]) for some in ([*moves, *branch], moves) if some]
    heads = MANY_RANKS if "transfer" in domain.events else 1
    cases = fixed_cases(domain, traces, slots=4, free="nan", heads=heads, value_heads=heads)
    if "transfer" in domain.events and domain.grouped_heads:
        wide = {
            name: next((width for width in range(OVER_A_PAGE, MOST_WIDTH + 1) if has(width)), OVER_A_PAGE)
            for name, has in (("key_dim", domain.has_key), ("value_dim", domain.has_value))
        }
        cases += fixed_cases(domain, [f"p:a5,b3/t:a/{token}"], heads=3, value_heads=6, **wide)
    return cases


def _token(domain: TraceDomain, names: Sequence[str]) -> str:
    """Return an event of one token of each request: a decode if the domain has it."""
    return f"d:{','.join(names)}" if "decode" in domain.events else f"p:{','.join(f'{name}1' for name in names)}"


def _groups(domain: TraceDomain) -> tuple[tuple[int, int], ...]:
    """Return the numbers of heads and of value heads that are drawn.

    A transfer shows a wrong order only if a rank has several value heads, or if there are more than two ranks. With three key
    heads and six value heads two ranks have a key head in common.
    """
    groups = ((1, 1), (1, 1), (1, 2), (2, 2)) if domain.grouped_heads else ((1, 1), (2, 2))
    if "transfer" in domain.events:
        groups = (*groups, *(((3, 6), (1, 1), (2, 4), (3, 3)) if domain.grouped_heads else ((1, 1), (1, 1), (2, 2), (3, 3))))
    return groups


@st.composite
def trace_cases(draw: st.DrawFn, /, domain: TraceDomain, **fixed: Any) -> TraceCase:
    """Draw any case of the domain; `fixed` gives fields as a value, or as a tuple of values to choose from."""
    chance = draw(st.randoms(use_true_random=True))

    def field(name: str, choices: tuple[Any, ...]) -> Any:
        value = fixed.get(name, choices)
        return chance.choice(value) if isinstance(value, tuple) else value

    heads, value_heads = field("groups", _groups(domain))
    values = tuple(width for width in VALUE_WIDTHS if inside(width, domain.value_dims, domain.width_step))
    keys = tuple(width for width in (16, 16, 8) if inside(width, domain.key_dims, domain.width_step))
    fields: dict[str, Any] = {
        "slots": field("slots", (3, 3, 4, 4, 5, 6)),
        "pad": field("pad", domain.padding_slots or ("-1",)),
        "heads": heads,
        "value_heads": value_heads,
        "key_dim": field("key_dim", domain.key_widths or keys or widths(domain.key_dims, domain.width_step, 16)),
        "value_dim": field("value_dim", domain.value_widths or values or widths(domain.value_dims, domain.width_step, 16)),
        "width": field("width", domain.widths),
        "dtype": field("dtype", domain.dtypes),
        "state": field("state", domain.states),
        "gate": field("gate", GATES),
        "snapshots": field("snapshots", domain.snapshots),
        "free": field("free", FREE),
        "indices": field("indices", domain.indices),
    }
    if fields["snapshots"] and domain.alignments != ("row",):
        fields["aligned"] = field("aligned", domain.alignments)
    drafts = field("drafts", (1, 2, 3, 4, 5, 8))
    events = field("events", (5, 7, 9))
    author = _Author(chance, domain, fields, drafts=min(drafts, domain.most_drafts))
    case = TraceCase(author.trace(events), **fields, seed=chance.randrange(2**16))
    if (domain.qk_norm_eps, domain.qk_norm_forms) == (TraceDomain.qk_norm_eps, TraceDomain.qk_norm_forms):
        return case
    norm = {"qk_norm_eps": field("qk_norm_eps", domain.qk_norm_eps), "qk_norm_form": field("qk_norm_form", domain.qk_norm_forms)}
    return dataclasses.replace(case, **norm, values=field("values", VALUES))
