"""Cases of a serving engine: one printable line for a pool of slots and a trace of its requests (trace_events.py).

The numbers of a token depend on the seed, the request and the token's position alone. Drafts that will be rejected and padding rows
have numbers of their own.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from oracles.arithmetic.counter import integers, mix_number
from oracles.operation import DTYPES, Inputs, Operation
from oracles.serving import SERVING
from properties.rules.case import Case
from properties.rules.numbers import NORM_EPS, small_factor
from properties.traces.events import MOST_TOKENS, PADDING, Roll, Step, check_event, name_of, number_of, tokens_of_event
from properties.words.line import MAX_HEADS, SEEDS, Line
from properties.words.word import Word, always, like

PADDING_SLOTS = ("-1", "0")
FREE = ("zero", "random", "nan", "old")
ALIGNED = ("row", "request")
GATES = ("forever", "1000", "64", "10", "mixed", "tenth")
_MEMORIES = {"1000": 1000.0, "64": 64.0, "10": 10.0, "tenth": 0.125}  # tokens
VALUES = ("ordinary", "small")
MOST_EVENTS, MOST_SLOTS = 1000, 512
MOST_ROWS, MOST_TRACE_TOKENS = 512, 2**14  # rows of an event; tokens of all events, those of padding rows and of drafts included
MOST_WIDTH = 256
_STREAMS = {name: 80 + index for index, name in enumerate(("tokens", "rejected", "padding", "free", "weight", "A_log", "dt_bias"))}
_QUIET_NAN = {torch.float32: (0x7FC00000, 22, 2**31, torch.int32), torch.bfloat16: (0x7FC0, 6, 2**15, torch.int16)}
_QUIET_NAN[torch.float16] = (0x7E00, 9, 2**15, torch.int16)
# Tags: whole numbers that bfloat16 holds, in which silu rounds nothing; a key is one entry of this size.
TAG_CHANNELS, _LEAST_TAG, _TAGS, _KEY = 4, 20, 200, 1024.0
TAGGED = 26  # requests that have tags
_CLOSED, _OPEN = -100.0, 100.0  # of a and b: no decay, and a beta of one


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of one call of an engine, with the tokens of all rows one after the other (T tokens in all).

    `requests` has the name of each row's request (PADDING for padding rows), `lengths` its number of tokens, and `starts` how many
    tokens the request has already. `snapshots` says for each row after how many of its tokens a snapshot is to be taken, or None.
    mixed [T, D] are q, k and v side by side, before the convolution; a and b [T, HV] belong to the gates. An engine may overwrite
    these tensors.
    """

    requests: tuple[str, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    snapshots: tuple[int | None, ...]
    mixed: Tensor
    a: Tensor
    b: Tensor

    @property
    def real(self) -> tuple[bool, ...]:
        """Which rows are requests', that is, not padding."""
        return tuple(request != PADDING for request in self.requests)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What an engine is opened with: the sizes of its layer and of its pool, and the layer's parameters.

    A pool has `slots` slots for requests and snapshots. `padding_slot` is the index that padding rows have: -1, or 0, in which
    case slot 0 comes in addition and belongs to nobody. `snapshots` is the number of tokens between places where a snapshot may be
    taken (0 means that none is). `drafts` is the largest number of tokens of a draft in this trace.
    weight [D, W] is the convolution's, and D = 2 heads key_dim + value_heads value_dim; A_log and dt_bias [HV] are the gate's.
    qk_norm_eps and qk_norm_form are the eps and the form of the norm of q and k ("inside" or "max"), as the domain allows.
    """

    slots: int
    padding_slot: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    index_dtype: torch.dtype
    snapshots: int
    drafts: int
    weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    qk_norm_eps: float = NORM_EPS["1e-6"]
    qk_norm_form: str = "inside"

    @property
    def channels(self) -> int:
        """The number of channels D of the convolution."""
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim


def _takes_snapshots(case: Any) -> bool:
    """Whether a prefill of a case may take snapshots."""
    return bool(case.snapshots)


@dataclasses.dataclass(frozen=True)
class TraceCase(Line):
    """A trace and the pool on which it runs. Fields at their defaults, the simplest values, are left out of the line.

    ValueError for a trace of another form, or for a field outside its choices or range.
    """

    NEEDED: ClassVar[tuple[str, str]] = ("trace", "for example trace=p:a5,b70/d:a,b")

    trace: str
    """What the engine is asked, event by event (events.py)."""
    operation: Annotated[str, Word(choices=("serving",))] = "serving"
    slots: Annotated[int, Word(span=(1, MOST_SLOTS))] = 3
    """The slots of the pool that requests and snapshots may have."""
    pad: Annotated[str, Word(choices=PADDING_SLOTS, counted=True, simplest=("-1",))] = "-1"
    """The index of padding rows; if it is 0, slot 0 comes in addition and belongs to nobody."""
    heads: Annotated[int, Word(span=(1, MAX_HEADS))] = 1
    value_heads: Annotated[int, Word(span=(1, MAX_HEADS))] = 1
    key_dim: Annotated[int, Word(span=(1, MOST_WIDTH))] = 16
    value_dim: Annotated[int, Word(span=(1, MOST_WIDTH))] = 8
    width: Annotated[int, Word(span=(2, 8), simplest=(2, 3))] = 4
    """The width W of the convolution."""
    dtype: Annotated[str, Word(choices=tuple(DTYPES), counted=True, simplest=("fp32", "bf16"))] = "fp32"
    state: Annotated[str, Word(choices=tuple(DTYPES), counted=True, simplest=("fp32",))] = "fp32"
    """The dtype of states in the pool."""
    gate: Annotated[str, Word(choices=GATES, counted=True, simplest=("forever", "1000"))] = "forever"
    snapshots: Annotated[int, Word(span=(0, 256), simplest=(0,))] = 0
    """The distance in tokens between places where a snapshot may be taken; 0 means that none is."""
    aligned: Annotated[str, Word(choices=ALIGNED, counted=True, simplest=("row",), acts=_takes_snapshots)] = "row"
    """Whether multiples of `snapshots` are counted from the first token of a row, or from that of its request."""
    free: Annotated[str, Word(choices=FREE, counted=True, simplest=("zero", "random", "nan"))] = "zero"
    """What slots hold that nobody owns: zeros, random numbers, NaN, or what their last owner left."""
    indices: Annotated[str, Word(choices=("int64", "int32"), counted=True, simplest=("int64",))] = "int64"
    qk_norm_eps: Annotated[str, like(Case, "qk_norm_eps", key=False, acts=always)] = "1e-6"
    """The eps of the norm of q and k."""
    qk_norm_form: Annotated[str, like(Case, "qk_norm_form", key=False, acts=always)] = "inside"
    values: Annotated[str, Word(choices=VALUES, counted=True, simplest=("ordinary",))] = "ordinary"
    """Whether q and k are nearly as small as their norm's eps ("small")."""
    seed: Annotated[int, Word(span=SEEDS)] = 0

    def __post_init__(self) -> None:
        self.check_words()
        if self.value_heads % self.heads:
            raise ValueError(f"value_heads must be a multiple of heads {self.heads}, got {self.value_heads}")
        events = self.trace.split("/")
        if len(events) > MOST_EVENTS:
            raise ValueError(f"trace must have at most {MOST_EVENTS} events, got {len(events)}")
        for event in events:
            check_event(event)
            if (rows := event.count(",") + 1) > MOST_ROWS:
                raise ValueError(f"an event of trace must have at most {MOST_ROWS} rows, got {rows} in {event[:80]!r}")
        if (tokens := sum(map(tokens_of_event, events))) > MOST_TRACE_TOKENS:
            raise ValueError(f"trace must have at most {MOST_TRACE_TOKENS} tokens in all, got {tokens}")

    def __str__(self) -> str:
        return f"op={self.operation} {super().__str__()}"  # always printed, because it selects the book of the line

    def further_traits(self) -> list[tuple[str, object]]:
        """Return the kinds of events that the trace has, whether it has padding rows, and whether it forks from a snapshot."""
        kinds = {event[0] for event in self.trace.split("/")}
        return [("event", kind) for kind in sorted(kinds | {*self.trace} & {PADDING, "@"})]

    @property
    def spec(self) -> Operation:
        """The contract of one row of a step."""
        return SERVING

    def spec_of(self, inputs: Inputs) -> Operation:  # noqa: ARG002 - one signature for all cases
        """Return the contract of a call like the case's."""
        return SERVING

    @property
    def channels(self) -> int:
        """The number of channels D of the convolution: those of q, k and v."""
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def tokens(self) -> int:
        """The number of tokens of all steps together."""
        return sum(row.count for step in self.plan for row in step.rows)

    @property
    def bytes(self) -> int:
        """The bytes of inputs and states in float32, a simple measure of the case's size."""
        return 4 * (self.tokens * self.channels + self.slots * self.value_heads * self.key_dim * self.value_dim)

    @functools.cached_property
    def plan(self) -> tuple[Step, ...]:
        """What the events do, without those that do nothing."""
        roll = Roll(self.slots, self.snapshots, self.aligned)
        steps = (roll.step(number, event) for number, event in enumerate(self.trace.split("/"), 1))
        return tuple(step for step in steps if step is not None)

    @functools.cached_property
    def owners(self) -> dict[int, frozenset[str]]:
        """The requests and snapshots that are there after each step of the plan, by the number of its event."""
        here, after = set[str](), dict[int, frozenset[str]]()
        for step in self.plan:
            if step.kind in ("r", "f"):
                here -= {step.request, f"{step.request}@"}
            here |= {step.request} if step.kind == "k" else set()
            for row in step.rows:
                here |= {row.request} if row.real else set()
                here |= {f"{row.request}@"} if row.snapshot is not None else set()
            after[step.event] = frozenset(here)
        return after

    @property
    def drafts(self) -> int:
        """The largest number of tokens of a draft in this trace, at least 1."""
        return max((row.count for step in self.plan if step.kind == "v" for row in step.rows), default=1)

    def sizes(self, *, tagged: bool = False) -> Sizes:
        """Return what an engine is opened with. With `tagged` the convolution copies its input, and the gate does not decay.

        Every head has its own A_log and dt_bias. For a gate that is a memory, exp(A_log) softplus(dt_bias) is its inverse times a
        factor between 0.7 and 1.4.
        """
        weight = self._uniform("weight", self.channels * self.width).reshape(self.channels, self.width)
        A_log, dt_bias = ((self._uniform(name, self.value_heads) * 32).round() / 64 for name in ("A_log", "dt_bias"))
        if self.values == "small":
            weight[: 2 * self.heads * self.key_dim] *= small_factor(self)
        if tagged:
            weight = torch.zeros_like(weight)
            weight[:, -1] = 1.0
        elif self.gate not in ("forever", "mixed"):
            speeds = [
                2.0**bias / (math.exp(log) * _MEMORIES[self.gate])
                for log, bias in zip(A_log.tolist(), dt_bias.tolist(), strict=True)
            ]
            dt_bias = torch.tensor([round(math.log(math.expm1(speed)) * 2**10) * 2.0**-10 for speed in speeds])
        return Sizes(
            self.slots,
            int(self.pad),
            *(self.heads, self.value_heads, self.key_dim, self.value_dim, self.width),
            DTYPES[self.dtype],
            DTYPES[self.state],
            getattr(torch, self.indices),
            self.snapshots,
            self.drafts,
            weight.to(DTYPES[self.dtype]),
            A_log,
            dt_bias,
            NORM_EPS[self.qk_norm_eps],
            self.qk_norm_form,
        )

    def batch(
        self, step: Step, places: Sequence[int] | None = None, *, tagged: bool = False, drafts: int = 0, padding: int = 0
    ) -> Batch:
        """Return the rows of a prefill, a decode or a verification as an engine gets them: all rows, or those at some places.

        With `tagged` the tokens carry tags (see `tag`). Other numbers `drafts` and `padding` give other rejected drafts and other
        padding rows.
        """
        places = range(len(step.rows)) if places is None else places
        rows = [step.rows[place] for place in places]
        parts = [
            self.row(step, place, tagged=tagged, other=drafts if row.real else padding)
            for place, row in zip(places, rows, strict=True)
        ]
        tensors = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        dtype = DTYPES[self.dtype]
        return Batch(
            tuple(row.request for row in rows),
            tuple(row.count for row in rows),
            tuple(row.start for row in rows),
            tuple(row.snapshot for row in rows),
            *(x.to(dtype) for x in tensors),
        )

    def row(self, step: Step, place: int, *, tagged: bool = False, other: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return mixed [count, D], a and b [count, HV] of the row at a place of a step, in float32."""
        row = step.rows[place]
        owners = [self.owner(step, place, token, other) for token in range(row.count)]
        if tagged:
            mixed = [self.tagged(self.tag(*owner), row.start + token) for token, owner in enumerate(owners)]
            gates = torch.full((row.count, self.value_heads), _CLOSED)
            return torch.stack(mixed) if mixed else torch.zeros(0, self.channels), gates, torch.full_like(gates, _OPEN)
        keys = tuple(self._key(kind, *numbers) for kind, *numbers in owners)
        drawn = _tokens_of(keys, self.channels + 2 * self.value_heads)
        mixed, a, b = drawn.split([self.channels, self.value_heads, self.value_heads], -1)
        a = a / 2 if self.gate != "mixed" else torch.where(a < 0, 40 * a, a)
        return mixed, a if self.gate != "forever" else torch.full_like(a, _CLOSED), 3 * b

    def owner(self, step: Step, place: int, token: int, other: int = 0) -> tuple[str, int, int]:
        """Return the kind of a token and two numbers: request and position, or event and place."""
        row = step.rows[place]
        if not row.real:
            return "padding", step.event + 1000 * other, place * MOST_TOKENS + token
        number = number_of(row.request)
        if token >= row.accepted:
            return "rejected", number, (step.event + 1000 * other) * MOST_TOKENS + token
        return "tokens", number, row.start + token

    def tagged(self, tag: Sequence[float], position: int) -> Tensor:
        """Return mixed [D] of a token with a tag: its key is one entry, its query the entry of the token before."""
        q, k = torch.zeros(2, self.heads, self.key_dim)
        k[:, position % self.key_dim] = q[:, (position - 1) % self.key_dim] = _KEY
        return torch.cat([q.flatten(), k.flatten(), self.repeated(tag).flatten()])

    def repeated(self, tag: Sequence[float]) -> Tensor:
        """Return a tag as the values [HV, V] of all heads; its last number counts the heads. Later calls return the same tensor."""
        return _repeated(tuple(tag), self.value_heads, self.value_dim)

    @staticmethod
    def tag(kind: str, first: int, second: int) -> list[float]:
        """Return the four whole numbers that name a token, from 20 to 219; `untag` reads them.

        The first names the kind and the request, one of a to z. The next two hold the position, or the event and the place, in base
        200. The last one is that of value head 0.
        """
        kinds = ("tokens", "rejected", "padding")
        name = kinds.index(kind) * TAGGED + (first if kind != "padding" else 0)
        number = second if kind != "padding" else first * MOST_TOKENS + second % MOST_TOKENS
        digits = [name, number % _TAGS, number // _TAGS % _TAGS, 0]
        return [float(_LEAST_TAG + digit) for digit in digits]

    @staticmethod
    def untag(values: Sequence[float]) -> str:
        """Return in words what the first four values of a row hold, such as "request a's token 3"."""
        if not any(values):
            return "zeros"
        digits = [round(value) - _LEAST_TAG if value == value and abs(value) < _TAGS * 2 else -1 for value in values]
        whole = all(float(digit + _LEAST_TAG) == value for digit, value in zip(digits, values, strict=True))
        if not whole or not all(0 <= digit < _TAGS for digit in digits) or digits[0] >= 3 * TAGGED:
            return f"no tag ({', '.join(f'{value:g}' for value in values)})"
        kind, request = divmod(digits[0], TAGGED)
        number, owner = digits[1] + _TAGS * digits[2], f"request {name_of(request)}'s"
        head = f" for head {digits[3]}" if digits[3] else ""
        if kind == 0:
            return f"the tag of {owner} token {number}{head}"
        event, token = divmod(number, MOST_TOKENS)
        if kind == 1:
            return f"the tag of {owner} rejected draft {token} in event {event}{head}"
        return f"the tag of a padding row's token {token} in event {event}{head}"

    def filled(self, pool: Tensor, slots: Sequence[int] | None = None, *, other: int = 0) -> Tensor:
        """Return what some slots of a pool, or all, hold if nobody owns them: zeros, random numbers or NaN of many bit patterns."""
        slots = range(len(pool)) if slots is None else slots
        shape = (len(slots), *pool.shape[1:])
        if self.free == "zero" and not other:
            return torch.zeros(shape, dtype=pool.dtype, device=pool.device)
        size = math.prod(shape[1:])
        places = torch.tensor(slots, dtype=torch.int64).unsqueeze(-1) * size + torch.arange(size)
        numbers = integers((places.flatten(), self._key("free", other), 64))[0].reshape(shape)
        if self.free == "nan" and not other:  # quiet NaN of either sign, because a copy keeps their bits
            quiet, payload, sign, whole = _QUIET_NAN[pool.dtype]
            bits = quiet | (numbers & (2**payload - 1))
            held = torch.where(numbers < 0, bits - sign, bits).to(whole).view(pool.dtype)
        else:
            held = ((numbers >> 40).float() * 2.0**-20).to(pool.dtype)  # uniform in [-8, 8)
        return held.to(pool.device, non_blocking=True)

    def _uniform(self, kind: str, count: int, *numbers: int) -> Tensor:
        """Return `count` numbers in [-1, 1) with 24 bits."""
        return _fraction(self._integers(kind, count, *numbers))

    def _integers(self, kind: str, count: int, *numbers: int) -> Tensor:
        """Return `count` different 64-bit integers."""
        return integers((torch.arange(count, dtype=torch.int64), self._key(kind, *numbers), 64))[0]

    def _key(self, kind: str, *numbers: int) -> int:
        """Return the key of a stream of numbers, which depends on the seed and on every number."""
        key = mix_number(self.seed * 128 + _STREAMS[kind])
        for number in numbers:
            key = mix_number(key ^ (number + 1))
        return key


@functools.lru_cache(4096)
def _repeated(tag: tuple[float, ...], value_heads: int, value_dim: int) -> Tensor:
    """Return a tag as the values [HV, V] of all heads. A law compares the same tags after every step."""
    heads = torch.tensor(tag).repeat(value_heads, 1)
    heads[:, -1] += torch.arange(value_heads)
    return heads.repeat(1, -(-value_dim // TAG_CHANNELS))[:, :value_dim]


@functools.lru_cache(1024)  # a law asks for the tokens of a row when it plays a step and when it judges the trace
def _tokens_of(keys: tuple[int, ...], width: int) -> Tensor:
    """Return numbers in [-1, 1) [tokens, width], a stream for each key. Later calls return the same tensor."""
    if not keys:
        return torch.zeros(0, width)
    channel = torch.arange(width, dtype=torch.int64)
    return _fraction(torch.stack(integers(*((channel, key, 64) for key in keys))))


def _fraction(words: Tensor) -> Tensor:
    """Return the first 24 bits of 64-bit integers as numbers in [-1, 1)."""
    return (words >> 40).float() * 2.0**-23
