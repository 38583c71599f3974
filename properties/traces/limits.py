"""Traces at usual limits, which come in every check whatever its seed."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from properties.traces.case import MOST_EVENTS, MOST_WIDTH, TAGGED, TraceCase
from properties.traces.domain import MOST_BLOCK, TraceDomain
from properties.traces.events import PADDING, name_of
from properties.words.sizes import MANY_EACH, THREE_EACH, at_limits, named

_NAMES = [*map(name_of, range(TAGGED))]
ROWS = (33, 65, 260)  # of the steps of `crowds`: just over 32, 64 and 256, usual sizes of masks and tables of rows
CROWDED = ROWS[-1]  # slots of `crowds`
USUAL_BLOCK = 256  # tokens: a multiple of blocks of 16, 32, 64 and 128
GRAPH_ROWS = 7  # requests that share graphs of up to eight rows
ADMITTED, TOGETHER, MANY_HEADS = 257, 5, 257  # requests of an engine, so many at a time, and heads: just over 8 bits
WIDEST = 128  # channels of a wide case
SAVING = (0, 9, 18, 35)  # the rows of `crowded_snapshots`, each at another place of its group of 8, 16 or 32 rows
PADDED, BEHIND = 97, 4  # padding rows of a step, and rows of requests behind them: more than 100 rows with few slots
LONG_ROW, LONG_REQUESTS = 128, (256, 517)  # tokens of prompts, and of requests: exactly 256, and over 512
# Requests of a step, and tokens of each: over 8,192 tokens, and over 2,048 inside a row, which are usual limits of a step.
STEP_ROWS, STEP_TOKENS = 66, 127
LEAST_STEP = 2049  # tokens of such a step where the domain has fewer rows or tokens
MANY_RANKS = 11  # of a transfer: in the order of their names, rank 10 comes before rank 2
OVER_A_PAGE = 40  # keys and values: in float32 one head and up to three have over 4 KiB, and no multiple of 4 KiB


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


def long_steps(domain: TraceDomain) -> list[TraceCase]:
    """Return a case with a step of over 8,192 tokens, each row of which takes a snapshot where the domain has them.

    An engine that cuts such a step into parts cuts a few rows before the place of their snapshot. There is none where kernels are
    interpreted, and none of fewer than LEAST_STEP tokens.
    """
    every = min((tokens for tokens in domain.snapshots if tokens), default=0)
    count, tokens = min(STEP_ROWS, domain.most_slots // 2), min(STEP_TOKENS, domain.most_tokens)
    if count * tokens < LEAST_STEP or not domain.drawing.quick:
        return []
    names = [*map(name_of, range(count))]
    trace = f"p:{','.join(f'{name}{tokens}' for name in names)}/{_token(domain, names[:4])}"
    return fixed_cases(domain, [trace], slots=2 * count, snapshots=every, aligned=domain.alignments[0])


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
    """Return a case of MANY_HEADS heads, or where the domain groups heads two cases of many value heads for each key head."""
    groups = (THREE_EACH, MANY_EACH) if domain.grouped_heads else ((MANY_HEADS, MANY_HEADS),)
    trace = f"p:a3,b1/{_token(domain, ['b', 'a'])}"
    return [case for pair in groups for case in fixed_cases(domain, [trace], heads=pair[0], value_heads=pair[1])]


def mixed_snapshots(domain: TraceDomain) -> list[TraceCase]:
    """Return a case in which prompts and single tokens of one step take snapshots, in turns, with a row between that takes none."""
    every = min((tokens for tokens in domain.snapshots if 1 < tokens <= domain.most_tokens - 2), default=0)
    if not every or "request" not in domain.alignments:
        return []
    trace = f"p:a{every - 1},c{every - 1},e2/p:a1,b{every + 2},e1,c1,d{every}/{_token(domain, 'dcab')}"
    return fixed_cases(domain, [trace], slots=10, snapshots=every, aligned="request")


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


def microbatches(domain: TraceDomain) -> list[TraceCase]:
    """Return a case with a prompt and a decode of over 64 rows. There is none where kernels are interpreted, as each call fails."""
    count = min(ROWS[1] + 1, domain.most_slots)
    if not (domain.retries and domain.drawing.quick):
        return []
    names = [*map(name_of, range(count))]
    trace = f"p:{','.join(f'{name}{1 + place % 2}' for place, name in enumerate(names))}/{_token(domain, names)}"
    return fixed_cases(domain, [trace], slots=count)


def forks(domain: TraceDomain) -> list[TraceCase]:
    """Return cases in which a request begins from a snapshot or from another request.

    In two of them the snapshot is then taken again. In one it was taken after a single token of a prompt's second part, and in
    one a request leaves whose name begins the name of its owner. In one, a request begins from another behind a draft, and that
    leaves. In one, a request begins from one that has just begun itself. In one, requests leave from which others began, and
    new ones get their slots before the others go on.
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
    if {"fork", "verify", "free"} <= {*domain.events}:
        draft = min(3, domain.most_drafts)
        cases += fixed_cases(domain, [f"p:a3/v{draft}:a1/k:b<a/f:a/{token}"], slots=4, free="random")
    if "fork" in domain.events:
        leave = "r:a" if "preempt" in domain.events else "f:a"
        then = f"{leave}/f:c/p:e3,f2/{_token(domain, ['b', 'd'])}"
        cases += fixed_cases(domain, [f"p:a5/k:b<a/k:c<b/{_token(domain, ['b', 'c'])}"], slots=5)
        cases += fixed_cases(domain, [f"p:a5,c4/k:b<a/k:d<c/{then}"], slots=5)
    if {"fork", "save"} <= {*domain.events}:
        cases += fixed_cases(domain, [f"p:a5/s:a/k:b<a@/s:a/{token}"], slots=5)
    return cases


def wide(domain: TraceDomain) -> list[TraceCase]:
    """Return cases of a prompt, a draft, a decode and what follows, with the widest keys and values of the domain up to WIDEST.

    In one of them q and k are nearly as small as their norm's eps.
    """
    keys, values = ([width for width in range(4, WIDEST + 1) if has(width)] for has in (domain.has_key, domain.has_value))
    if not (keys and values):
        return []
    steps = [f"v{min(3, domain.most_drafts)}:a1,b2"] * ("verify" in domain.events and domain.most_drafts > 1)
    steps.append(_token(domain, ["a", "b"]))
    trace, widths = "/".join(["p:a5,b3", *steps, *steps]), {"key_dim": max(keys), "value_dim": max(values)}
    return [case for regime in ("ordinary", "small") for case in fixed_cases(domain, [trace], values=regime, **widths)]


def empty_padding(domain: TraceDomain) -> list[TraceCase]:
    """Return a case with padding rows of no tokens, as of a batch whose offsets are filled up with the last one."""
    if not (domain.empty and domain.prefill_padding and domain.padding_slots):
        return []
    return fixed_cases(domain, [f"p:_0,a3,_0,b2,_0/{_token(domain, ['a', 'b'])}"])


def repeats(domain: TraceDomain) -> list[TraceCase]:
    """Return a case in which a request is moved in each way several times, and goes on between, so that an old copy shows.

    It goes on by a token, by a draft and by a prompt, each of which alone may be what makes a copy an old one. A transfer goes to
    11 ranks. In a second case it goes to two ranks that share one of three key heads. There the state of a rank has over 4 KiB and
    does not end with a page. In a third case it may go to four or eight ranks that have copies of two key heads.
    """
    token = _token(domain, ["a", "b"])
    ways = [f"{kind}:a" for kind, event in (("w", "swap"), ("t", "transfer")) if event in domain.events]
    ways += ["s:a"] if "save" in domain.events else []
    branch = ["k:c<a@"] if {"save", "fork"} <= {*domain.events} else []
    drafts = [f"v{min(4, domain.most_drafts)}:a1,b1"] if "verify" in domain.events else []
    moves = [step for way in ways for step in (way, token, way, *drafts, way, "p:a2,b1", way, token)]
    traces = ["/".join(["p:a5,b3", *some]) for some in ([*moves, *branch], moves) if some]
    heads = MANY_RANKS if "transfer" in domain.events else 1
    cases = fixed_cases(domain, traces, slots=4, free="nan", heads=heads, value_heads=heads)
    if "transfer" in domain.events and domain.grouped_heads:
        wide = {
            name: next((width for width in range(OVER_A_PAGE, MOST_WIDTH + 1) if has(width)), OVER_A_PAGE)
            for name, has in (("key_dim", domain.has_key), ("value_dim", domain.has_value))
        }
        cases += fixed_cases(domain, [f"p:a5,b3/t:a/{token}"], heads=3, value_heads=6, **wide)
        cases += fixed_cases(domain, [f"p:a5,b3/t:a/{token}"], heads=2, value_heads=8)
    return cases


def _token(domain: TraceDomain, names: Sequence[str]) -> str:
    """Return an event of one token of each request: a decode if the domain has it."""
    return f"d:{','.join(names)}" if "decode" in domain.events else f"p:{','.join(f'{name}1' for name in names)}"
