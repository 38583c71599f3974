"""The domain of serving engines. drawing.py draws traces inside it."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from properties.traces.case import ALIGNED, MOST_ROWS, MOST_SLOTS, MOST_WIDTH, PADDING_SLOTS, TraceCase
from properties.traces.events import MOST_DRAFTS, MOST_TOKENS, Step
from properties.words.domain import OFFSETS, AnyDomain, check_spans, check_tuples, check_widths, inside
from properties.words.names import known_fields
from properties.words.word import flag, some_of

EVENTS = ("prefill", "decode", "save", "verify", "fork", "swap", "transfer", "preempt", "free")
CONV_WIDTHS, SNAPSHOTS = (2, 3, 4, 5), (0, 16, 32, 64, 128)
MOST_BLOCK = 1056
LEAST_SLOTS = 6  # as many as the traces of every law may have
_KINDS = dict(zip("pdsvkwtrf", EVENTS, strict=True))


@known_fields
@dataclasses.dataclass(frozen=True)
class TraceDomain(AnyDomain):
    """The traces for which an engine promises right results; by default all traces with and without snapshots at 64 tokens.

    ValueError for a field outside its choices or range.
    """

    CASE = TraceCase
    has_limits = True

    operation: str = "serving"
    events: tuple[str, ...] = EVENTS
    """The events that the engine knows."""
    dtypes: Annotated[tuple[str, ...], some_of("dtype")] = ("fp32", "bf16", "fp16")
    """The dtypes of tokens and windows."""
    states: Annotated[tuple[str, ...], some_of("state")] = ("fp32", "bf16")
    """The dtypes of states."""
    key_dims: tuple[int, int] = (4, 128)
    """The least and the largest K, in steps of `width_step`."""
    value_dims: tuple[int, int] = (4, 128)
    """The least and the largest V, in steps of `width_step`."""
    width_step: int = 1
    grouped_heads: bool = True
    widths: Annotated[tuple[int, ...], some_of("width", CONV_WIDTHS)] = (2, 3, 4)
    """The widths of the convolution."""
    most_tokens: int = 130
    """The most tokens in a row of a prefill."""
    most_drafts: int = MOST_DRAFTS
    """The most tokens of a draft."""
    ragged: bool = True
    """Whether drafts of one verification may have different numbers of tokens, among them plain decodes of one token."""
    none_accepted: bool = True
    """Whether a draft may be rejected as a whole, so that its request stays where it is."""
    most_slots: int = MOST_SLOTS
    """The most slots that requests and snapshots may have together."""
    padding_slots: tuple[str, ...] = PADDING_SLOTS
    """The indices that padding rows may have, none if batches have no padding."""
    most_padding: int = MOST_ROWS
    """The most padding rows in an event."""
    prefill_padding: bool = True
    """Whether a prefill may have padding rows."""
    empty: bool = True
    """Whether a prefill may have rows of no tokens."""
    later_prompts: bool = True
    """Whether a request that has decoded or verified may get several tokens of a prompt in one step; it may always get one."""
    block: int = 64
    """The tokens of a block of the engine's cache, at whose ends prompts and drafts are drawn to end; 0 if there are none."""
    mixed: bool = True
    """Whether one step may have prompts of some requests beside one token of requests that go on (continuous batching)."""
    snapshots: Annotated[tuple[int, ...], some_of("snapshots", SNAPSHOTS)] = (0, 64)
    """The distances in tokens between places where a snapshot may be taken; 0 means that none is taken."""
    alignments: Annotated[tuple[str, ...], some_of("aligned")] = ALIGNED
    """From where places of snapshots are counted: from the first token of a row ("row"), or of its request ("request")."""
    snapshot_dtype: str = "state"
    """Whether snapshots are as precise as states ("state"), or rounded to the inputs' dtype first ("input")."""
    indices: Annotated[tuple[str, ...], some_of("indices")] = OFFSETS
    batch_invariant: bool = True
    """Whether a row's bits do not depend on the other rows of its batch."""
    refills: bool = True
    """Whether parameters and batches may be in tensors that an engine had before, filled again."""
    together: bool = True
    """Whether a process may use two engines at the same time."""
    retries: bool = False
    """Whether a call that failed for lack of memory has changed nothing, so that it may be made again."""
    key_widths: tuple[int, ...] = ()
    """The only values of K; if there are any, they replace `key_dims`."""
    value_widths: tuple[int, ...] = ()
    """The only values of V; if there are any, they replace `value_dims`."""
    strong_decays: Annotated[bool, flag("gate", value="tenth")] = True
    """Whether a token may decay the state by e^-3 to e^-16."""
    qk_norm_eps: Annotated[tuple[str, ...], some_of("qk_norm_eps")] = ("1e-6",)
    """The eps of its norm of q and k."""
    qk_norm_forms: Annotated[tuple[str, ...], some_of("qk_norm_form")] = ("inside",)

    def __post_init__(self) -> None:
        self.check_fields()
        check_tuples(self, ("events", EVENTS))
        check_tuples(self, ("padding_slots", PADDING_SLOTS), least=0)
        if "prefill" not in self.events:
            raise ValueError(f"events must have prefill, which admits requests, got {self.events!r}")
        if self.snapshot_dtype not in ("state", "input"):
            raise ValueError(f"snapshot_dtype must be state or input, got {self.snapshot_dtype!r}")
        for name, least, most in (
            ("most_tokens", 1, MOST_TOKENS),
            ("most_drafts", 1, MOST_DRAFTS),
            ("most_slots", LEAST_SLOTS, MOST_SLOTS),
            ("most_padding", 1, MOST_ROWS),
            ("block", 0, MOST_BLOCK),
        ):
            number = getattr(self, name)
            if not isinstance(number, int) or not least <= number <= most:
                raise ValueError(f"{name} must be in {least}..{most}, got {number!r}")
        check_spans(self, "key_dims", "value_dims", most=MOST_WIDTH)
        for name, span in (("key_widths", "key_dims"), ("value_widths", "value_dims")):
            left = getattr(self, span) == getattr(TraceDomain, span) and self.width_step == 1
            check_widths(name, getattr(self, name), span, left, MOST_WIDTH)

    def reasons(self, case: Any) -> Iterable[tuple[bool, str]]:
        """Return what else must be true of a case inside the domain, each with what is said if it is not."""
        rows = [(step, row) for step in case.plan for row in step.rows]
        unknown = [step for step in case.plan if _KINDS[step.kind] not in self.events]
        prefill = [row for step, row in rows if step.kind == "p"]
        longest = max((row.count for row in prefill), default=0)
        padding = max((sum(not row.real for row in step.rows) for step in case.plan), default=0)
        later = "" if self.later_prompts else _later_prompt(case)
        mixed = [step.text for step in case.plan if step.kind == "p" and _mixed(step)] if not self.mixed else []
        drafts = [step for step in case.plan if step.kind == "v"]
        ragged = [step.text for step in drafts if len({row.count for row in step.rows}) > 1 and not self.ragged]
        refused = [
            step.text for step in drafts if any(row.real and not row.accepted for row in step.rows) and not self.none_accepted
        ]
        plain = [row for step in drafts for row in step.rows if self.ragged and row.real and row.count == 1]
        undone = [row.request for row in plain if not row.accepted]
        return (
            (not unknown, f"{unknown[0].text if unknown else ''}: {_KINDS[unknown[0].kind] if unknown else ''} is not supported"),
            (longest <= self.most_tokens, f"more than {self.most_tokens} tokens a row are not supported, got {longest}"),
            (case.drafts <= self.most_drafts, f"more than {self.most_drafts} tokens a draft are not supported, got {case.drafts}"),
            (not ragged, f"{''.join(ragged[:1])}: drafts of different numbers of tokens are not supported"),
            (not refused, f"{''.join(refused[:1])}: a draft of which nothing is accepted is not supported"),
            (not undone, f"{''.join(undone[:1])}: a row of one token beside drafts is a plain decode, which is never rejected"),
            (case.slots <= self.most_slots, f"slots={case.slots}: more than {self.most_slots} slots are not supported"),
            (
                case.pad in self.padding_slots or all(row.real for _, row in rows),
                f"pad={case.pad} is not among {', '.join(self.padding_slots) or 'any'}",
            ),
            (
                padding <= self.most_padding,
                f"more than {self.most_padding} padding rows in an event are not supported, got {padding}",
            ),
            (self.prefill_padding or all(row.real for row in prefill), "padding rows in a prefill are not supported"),
            (self.empty or all(row.count for row in prefill), "rows of no tokens are not supported"),
            (not mixed, f"{''.join(mixed[:1])}: prompts beside one token of a request that goes on are not supported"),
            (not later, f"{later}: several tokens of a prompt after a decode are not supported"),
            *(
                (has, f"{name}={width} is not {'among ' + ', '.join(map(str, listed)) if listed else f'in {span[0]}..{span[1]}'}")
                for name, has, width, span, listed in (
                    ("key_dim", self.has_key(case.key_dim), case.key_dim, self.key_dims, self.key_widths),
                    ("value_dim", self.has_value(case.value_dim), case.value_dim, self.value_dims, self.value_widths),
                )
            ),
            (self.grouped_heads or case.heads == case.value_heads, f"heads={case.heads} with value_heads={case.value_heads}"),
        )

    def has_key(self, width: int) -> bool:
        """Whether K may be this width."""
        return width in self.key_widths if self.key_widths else inside(width, self.key_dims, self.width_step)

    def has_value(self, width: int) -> bool:
        """Whether V may be this width."""
        return width in self.value_widths if self.value_widths else inside(width, self.value_dims, self.width_step)


class Decoded(set[str]):
    """The requests that have decoded or verified, while a trace is read. A fork of such a request has decoded too."""

    def follow(self, step: Step) -> None:
        """Go on with a step."""
        for row in step.rows:
            if step.kind != "p" and row.real:
                self.add(row.request)
            elif row.begins:
                self.discard(row.request)
        if step.kind == "k":
            self.discard(step.request)
            if step.source in self and not step.snapshot:
                self.add(step.request)


def _later_prompt(case: TraceCase) -> str:
    """Return the first event in which a request that has decoded gets several tokens of a prompt, or ""."""
    decoded = Decoded()
    for step in case.plan:
        if step.kind == "p" and any(row.count > 1 and row.request in decoded and not row.begins for row in step.rows):
            return step.text
        decoded.follow(step)
    return ""


def _mixed(step: Step) -> bool:
    """Whether a prefill has one token of a request that goes on beside several tokens of another one."""
    rows = [row for row in step.rows if row.real]
    return any(row.count > 1 for row in rows) and any(row.count == 1 and not row.begins for row in rows)
