"""Traces drawn inside a domain: an author plays the engine's bookkeeping and writes events that the domain allows."""

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hypothesis import strategies as st

from properties.traces.case import FREE, GATES, TAGGED, VALUES, TraceCase
from properties.traces.domain import Decoded, TraceDomain
from properties.traces.events import PADDING, Roll, name_of
from properties.words.domain import inside
from properties.words.lengths import widths

_NAMES = [*map(name_of, range(TAGGED))]
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
        "gate": field("gate", tuple(gate for gate in GATES if domain.strong_decays or gate != "tenth")),
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
