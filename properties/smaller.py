"""How cases shrink: for each kind, the steps of its shape, the simplest values of its options, and which words are widths."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from oracles.norm import NORM_FORMS
from properties.cases.call_case import CallCase, sizes_of
from properties.cases.line import text_of
from properties.cases.module_case import ModuleCase
from properties.cases.path_case import CHOICES, ParallelCase
from properties.cases.pool_case import PoolCase
from properties.cases.rule_case import Case
from properties.cases.rule_numbers import NORM_EPS
from properties.cases.trace_case import TraceCase
from properties.cases.trace_events import PADDING
from properties.options import text_of_values, values_of

Changes = Iterator[tuple[str, dict[str, Any]]]  # for each step, its words and the fields that it changes


@dataclasses.dataclass(frozen=True)
class Smaller:
    """How cases of one kind shrink.

    `simplest` has the values to try for each option, the simplest first. `beside` has, for a word that acts only together with
    others, those others: the word gets the value of a larger case only together with them. `telling` yields changes that make a
    case no simpler, but may make it hold and so tell what the failure needs: values of options, and shapes that are larger.
    """

    shapes: tuple[Callable[[Any], Changes], ...]
    simplest: Mapping[str, tuple[Any, ...]]
    widths: tuple[str, ...]
    beside: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    telling: tuple[Callable[[Any], Changes], ...] = ()


SIMPLEST: dict[str, tuple[Any, ...]] = {
    "in_kernel": ("none", "gate", "beta"),
    "decay": ("log",),
    "left_out": ("none", "gate", "beta"),
    "channel_decays": ("none", "keys", "values"),
    "lower_bound": ("none",),
    "parameter_dtype": ("fp32",),
    "qk_norm_eps": ("1e-6",),
    "qk_norm_form": ("inside",),
    "qk_norm": (False,),
    "gate_dtype": ("fp32",),
    "offsets": ("int64",),
    "scale": ("default",),
    "values": ("ordinary",),
    "gate": ("forever", "1000"),
    "beta": ("ordinary",),
    "state": ("none", "zero"),
    "state_dtype": ("fp32",),
    "final_dtype": ("fp32",),
    "initial_states": ("each",),
    "final_states": ("each",),
    "backward": (False,),
    "dtype": ("fp32", "bf16"),
}
SIMPLEST_PATH: dict[str, tuple[Any, ...]] = {
    **{name: values[:1] for name, values in CHOICES.items()},
    "layout": ("zigzag", "zigzag_batch"),
    "deterministic": (False,),
    "recompute": (False,),
    "sp": (False,),
    "padding": ("none", "least"),
    "conv_bias": (False,),
    "allow_neg_eigval": (False,),
    "offsets": ("int64",),
    "values": ("ordinary",),
    "gate": ("long", "ordinary"),
    "backward": (False,),
    "dtype": ("fp32", "bf16"),
    "conv_width": (1, 2, 3),
}
SIMPLEST_POOL: dict[str, tuple[Any, ...]] = {
    "padded": ("none", "all"),
    "fresh": ("none", "all"),
    "accepted": ("all", "some"),
    "block_v": ("default",),
    "padding_slot": ("-1",),
    "free": ("zero", "random"),
    "indices": ("int64",),
    "drafts": ("chain",),
    "rule": ("gated_delta_rule",),
    **{name: SIMPLEST[name] for name in SIMPLEST if name in {field.name for field in dataclasses.fields(PoolCase)} - {"state"}},
    "state": ("zero",),
}
SIMPLEST_MODULE: dict[str, tuple[Any, ...]] = {
    "offsets": ("int64",),
    "values": ("ordinary",),
    "activation": ("none",),
    "residual": ("none", "added"),
    "gating": ("silu",),
    "lower_bound": ("none",),
    "parameter_dtype": ("fp32",),
    "bias": (False,),
    "weight": (False,),
    "dt_bias": (False,),
    "state": ("none", "zero"),
    "state_columns": ("W",),
    "oldest": (True,),
    "final_state": (True,),
    "eps": ("1e-6",),
    "allow_neg_eigval": (False,),
    "beta": (False,),
    "backward": (False,),
    "dtype": ("fp32", "bf16"),
    "conv_width": (1, 2, 3),
}
SIMPLEST_LAYER: dict[str, tuple[Any, ...]] = {
    "gating": ("silu",),
    "lower_bound": ("none",),
    "parameter_dtype": ("fp32",),
    "backward": (False,),
    "state": ("none", "zero"),
    "cached": (False,),
    "conv_bias": (False,),
    "allow_neg_eigval": (False,),
    "eps": ("1e-6",),
    "offsets": ("int64",),
    "values": ("ordinary",),
    "gate": ("long", "ordinary"),
    "dtype": ("fp32", "bf16"),
    "conv_width": (1, 2, 3),
}
SIMPLEST_TRACE: dict[str, tuple[Any, ...]] = {
    "snapshots": (0,),
    "pad": ("-1",),
    "free": ("zero", "random", "nan"),
    "indices": ("int64",),
    "gate": ("forever", "1000"),
    "state": ("fp32",),
    "dtype": ("fp32", "bf16"),
    "width": (2, 3),
}
SIMPLEST_CALL: dict[str, tuple[Any, ...]] = {
    "offsets": ("int64",),
    "values": ("ordinary",),
    "backward": (False,),
    "dtype": ("fp32", "bf16"),
}
HEADS = ((1, 1), (1, 2), (2, 2), (2, 4))
FEW, MANY = 8, 32  # of so many items each is looked at alone; of more parts only the first and the last one is left out
BLOCKS = (16, 32, 64)  # sizes of the chunks of most kernels


def _mesh(case: ParallelCase) -> Changes:
    """Yield smaller meshes whose sizes divide those of the case, so that the case can still be cut."""
    for tp, cp in sorted(
        ((t, c) for t in range(1, case.tp + 1) for c in range(1, case.cp + 1)), key=lambda mesh: mesh[0] * mesh[1]
    ):
        if (tp, cp) != (case.tp, case.cp) and case.tp % tp == 0 and case.cp % cp == 0:
            yield f"tp={tp} cp={cp}", {"tp": tp, "cp": cp, "sp": case.sp and tp > 1}


def _pieces(case: ParallelCase) -> Changes:
    """Yield shorter lengths that the layout can still cut, whole pieces at a time."""
    unit = 2 * case.cp * (case.tp if case.sp else 1)
    for row, length in enumerate(case.lengths):
        if length % unit == 0:
            for count in below(length // unit, 0):
                lengths = (*case.lengths[:row], count * unit, *case.lengths[row + 1 :])
                yield _lengths(lengths if case.packed else (count * unit,) * len(case.lengths))


def _shared_heads(case: ParallelCase) -> Changes:
    for heads in (case.tp * case.cp, 1):
        for value_heads in (heads, 2 * heads):
            if (value_heads, heads) < (case.value_heads, case.heads):
                yield f"heads={heads} value_heads={value_heads}", {"heads": heads, "value_heads": value_heads}


def _sequences(case: Case) -> Changes:
    lengths = case.lengths
    if len(lengths) > 1:
        yield _lengths((sum(lengths),))
        for length in dict.fromkeys((*lengths[:FEW], max(lengths), min(lengths))):
            yield _lengths((length,))
        for fewer in _fewer(lengths):
            yield _lengths(fewer)
        for gone in range(1, min(len(lengths), FEW)):
            yield _lengths((*lengths[: gone - 1], lengths[gone - 1] + lengths[gone], *lengths[gone + 1 :]))


def _fewer(items: Sequence[Any]) -> Iterator[Any]:
    """Yield the items without a half of them, without a quarter, ..., without one. Of many items, only the first and last ones."""
    size = len(items) // 2
    while size:
        starts = range(0, len(items), size)
        for start in starts if len(starts) <= MANY else (starts[0], starts[-1]):
            if len(left := (*items[:start], *items[start + size :])) > 0:
                yield left
        size //= 2


def _unpacked(case: Case) -> Changes:
    if case.packed:
        states = {name: "each" for name in ("initial_states", "final_states") if getattr(case, name, "none") != "none"}
        yield "packed=no", {"packed": False, "offsets": "int64", **states}


def _shorter(case: Case) -> Changes:
    lengths = case.lengths
    if case.packed:
        if len({*lengths} - {0}) > 1 or len(lengths) > 2:  # all of them at once
            for most in below(max(lengths), 1):
                yield _lengths(tuple(min(length, most) for length in lengths))
        for row, length in enumerate(lengths):
            for shorter in (*below(length, 0), *_blocks(length)):
                yield _lengths((*lengths[:row], shorter, *lengths[row + 1 :]))
    else:
        for shorter in (*below(lengths[0], 0), *_blocks(lengths[0])):
            yield _lengths((shorter,) * len(lengths))


def _lengths(lengths: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    return f"lengths={'+'.join(map(str, lengths))}", {"lengths": lengths}


def _heads(case: Case) -> Changes:
    for heads, value_heads in HEADS:
        if (value_heads, heads) < (case.value_heads, case.heads):
            yield f"heads={heads} value_heads={value_heads}", {"heads": heads, "value_heads": value_heads}


def _heads_alone(case: ModuleCase) -> Changes:
    for heads in (1, 2, 3, 4):
        if heads < case.heads:
            yield f"heads={heads}", {"heads": heads}


def _axes(case: CallCase) -> Changes:
    """Yield smaller sizes, one axis at a time."""
    sizes = sizes_of(case.sizes)
    for axis, size in sizes.items():
        for smaller in below(size, 1):
            text = ",".join(f"{name}:{smaller if name == axis else other}" for name, other in sizes.items())
            yield f"sizes={text}", {"sizes": text}


def _spare(case: PoolCase) -> Changes:
    for spare in below(case.spare, 0):
        yield f"spare={spare}", {"spare": spare}


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
    for left in _fewer(case.trace.split("/")):
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
        if kind[0] == "v":
            for drafts in below(int(kind[1:]), 1):
                fewer = [row if row == PADDING else f"{row[0]}{min(int(row[1:]), drafts)}" for row in rows]
                yield _trace([*events[:number], f"v{drafts}:{','.join(fewer)}", *events[number + 1 :]])
        for place, row in enumerate(rows if kind[0] in "pv" else ()):
            tokens = int(row[1:] or 0)
            for count in (*below(tokens, 1), *_blocks(tokens)) if tokens else ():
                fewer = [*rows[:place], f"{row[0]}{count}", *rows[place + 1 :]]
                yield _trace([*events[:number], f"{kind}:{','.join(fewer)}", *events[number + 1 :]])


def _names(case: TraceCase) -> Changes:
    """Yield the trace with its requests called a, b, c in the order in which they come."""
    text = re.sub("[pdskwtrf]:|v\\d:", lambda kind: kind[0].upper(), case.trace)
    letters = dict.fromkeys(letter for letter in text if letter.islower())
    renamed = str.translate(text, {ord(letter): ord("a") + number for number, letter in enumerate(letters)}).lower()
    if renamed != case.trace:
        yield _trace(renamed.split("/"))


def _trace(events: list[str]) -> tuple[str, dict[str, Any]]:
    return f"trace={'/'.join(events)}", {"trace": "/".join(events)}


def _slots(case: TraceCase) -> Changes:
    for slots in below(case.slots, 1):
        yield f"slots={slots}", {"slots": slots}


def _dt_bias(case: Case | PoolCase) -> Changes:
    """Yield the case without dt_bias if the kernel computes its gate. Where it does not, dt_bias has its default."""
    inside = case.in_kernel in ("gate", "both")
    if case.dt_bias is inside:
        yield f"dt_bias={text_of(not inside)}", {"dt_bias": not inside}


def _no_norm(case: Case | PoolCase) -> Changes:
    """Yield the case without a norm of q and k, and so without the norm's eps and form."""
    if case.qk_norm:
        yield "qk_norm=no", {"qk_norm": False, "qk_norm_eps": "1e-6", "qk_norm_form": "inside"}


def _norms(case: Case | PoolCase) -> Changes:
    """Yield the case with a norm, in each form and with each eps; one of them is inside the domain."""
    for form, eps in itertools.product(NORM_FORMS, NORM_EPS) if not case.qk_norm else ():
        changes = {"qk_norm": True, "qk_norm_eps": eps, "qk_norm_form": form}
        default = {"qk_norm_eps": "1e-6", "qk_norm_form": "inside"}
        yield " ".join(f"{name}={text_of(value)}" for name, value in changes.items() if default.get(name) != value), changes


def _fewer_options(case: Any) -> Changes:
    """Yield the case without options of the implementation, and without each of them."""
    values = values_of(case.options)
    without = [{*values} - {name} for name in values]
    for names in [set[str](), *without] if len(values) > 1 else without:
        fewer = text_of_values({name: value for name, value in values.items() if name in names})
        yield f"options={fewer}", {"options": fewer}


def _longer(case: Any) -> Changes:
    """Yield the case with its longest sequences up to the next multiple of a chunk: there, a defect of partial chunks is gone."""
    longest = max(case.lengths)
    for length in _whole(longest):
        yield _lengths(tuple(length if one == longest else one for one in case.lengths))


def _longer_rows(case: TraceCase) -> Changes:
    """Yield the trace with one row of a prefill longer, up to the next multiple of a chunk."""
    events = case.trace.split("/")
    for number, event in enumerate(events):
        kind, _, text = event.partition(":")
        rows = text.split(",")
        for place, row in enumerate(rows if kind == "p" else ()):
            for count in _whole(int(row[1:])) if row[0] != PADDING and int(row[1:]) else ():
                longer = [*rows[:place], f"{row[0]}{count}", *rows[place + 1 :]]
                yield _trace([*events[:number], f"{kind}:{','.join(longer)}", *events[number + 1 :]])


def _whole(length: int) -> list[int]:
    """Return the next multiples of BLOCKS above a length, the smallest first."""
    return sorted({(length // block + 1) * block for block in BLOCKS})


def _one_of(**words: tuple[Any, ...]) -> Callable[[Any], Changes]:
    """Return a function that yields the changes to these values, one at a time."""

    def changes(case: Any) -> Changes:
        for name, value in itertools.chain.from_iterable(itertools.product([name], values) for name, values in words.items()):
            if getattr(case, name) != value:
                yield f"{name}={text_of(value)}", {name: value}

    return changes


def _blocks(length: int) -> Iterator[int]:
    """Yield block sizes below a length: a defect that shows only at multiples of 64 has no threshold to bisect."""
    yield from (block for block in (16, 32, 64, 128) if block < length)


def below(number: int, least: int) -> Iterator[int]:
    """Yield numbers below `number`: first the least ones, then steps that halve, so that few runs find a threshold."""
    if number <= least:
        return
    yield least
    if least + 1 < number:
        yield least + 1
    step = (number - least) // 2
    while step:
        if least + 1 < number - step < number:
            yield number - step
        step //= 2


SMALLER_RULES = Smaller(
    (_sequences, _unpacked, _shorter, _heads, _dt_bias, _no_norm, _fewer_options),
    SIMPLEST,
    ("key_dim", "value_dim"),
    telling=(_longer, _norms, _one_of(scale=("one",))),
)
SMALLER_PATHS = Smaller(
    (_mesh, _sequences, _unpacked, _pieces, _shorter, _shared_heads),
    SIMPLEST_PATH,
    ("key_dim", "value_dim", "hidden"),
    telling=(_longer,),
)
SMALLER_MODULES = Smaller(
    (_sequences, _unpacked, _shorter, _heads_alone, _fewer_options), SIMPLEST_MODULE, ("width", "out_width"), telling=(_longer,)
)
SMALLER_LAYERS = Smaller(
    (_sequences, _unpacked, _shorter, _heads, _fewer_options),
    SIMPLEST_LAYER,
    ("key_dim", "value_dim", "hidden"),
    telling=(_longer,),
)
SMALLER_POOLS = Smaller(
    (_sequences, _unpacked, _shorter, _spare, _heads, _dt_bias, _no_norm, _fewer_options),
    SIMPLEST_POOL,
    ("key_dim", "value_dim"),
    # Of fewer requests than in the larger case, other ones are padding, begin anew, or keep fewer tokens.
    beside=dict.fromkeys(("padded", "fresh", "accepted"), ("lengths",)),
    telling=(_longer, _norms, _one_of(scale=("one",))),
)
SMALLER_CALLS = Smaller((_sequences, _unpacked, _shorter, _axes), SIMPLEST_CALL, (), telling=(_longer,))
SMALLER_TRACES = Smaller(
    (_requests, _events, _rows, _counts, _names, _slots, _heads),
    SIMPLEST_TRACE,
    ("key_dim", "value_dim"),
    beside={"trace": ("slots", "snapshots")},  # with fewer slots, the requests of the larger trace are not admitted
    telling=(_longer_rows,),
)
