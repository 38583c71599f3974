"""Strategies: cases that find bugs, drawn inside a domain. Hypothesis draws a seed, and everything else follows from it.

Hypothesis draws one seed for each case, and a plain generator makes the choices from it. If Hypothesis draws every choice, it
prefers small and repetitive examples that shrink well: of 120 draws for the law `memory`, 52 had no token. Cases shrink on their
lines (verify/engine/shrink.py), so drawing only has to give diverse cases.

Lengths are drawn on both sides of the block sizes of kernels, and gates by their memory.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from properties.rules.case import BETAS, COMPUTED_GATES, GIVEN_GATES, Case, overflows
from properties.rules.domain import Domain
from properties.words.lengths import MEAN, lengths, narrow, widths
from properties.words.line import MAX_HEADS, MAX_WIDTH
from properties.words.options import draw_options
from properties.words.sizes import (
    AT_ONCE,
    CROWD,
    FEW_HEADS,
    KINDS,
    LENGTHS,
    LONG_PAIR,
    MANY_EACH,
    MANY_HEADS,
    MANY_SEQUENCES,
    MANY_STEPS,
    MANY_TOKENS,
    MANY_TOKENS_OF_CHUNKS,
    NARROW,
    ONE_BY_ONE,
    ONE_OF_THREE,
    THREE_EACH,
    coarsest,
    kind_of,
    kinds_of,
    large_lengths,
    named,
)

WIDER = 512  # a width of values only, for cases with few tokens
UNEVEN = (129, 200, 193)  # in place of a drawn width of over 128 in one case of three: blocks of 64 channels that are not full
HEADS = ((1, 1), (1, 2), (2, 2), (2, 4), (1, 4), (3, 3), (1, 3), (1, 8), (2, 8), (2, 6))
# With a reach: the longest sequence, more heads, and the width below which few are drawn.
FAR, FAR_HEADS, FAR_NARROW = 512, ((4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32)), 16
MANY = 257  # heads, just over usual limits
MOST_SEQUENCES = 4100  # packed, just over 12 bits; a backward of so many would take 8 s
MANY_ROWS, MANY_OF_A_KEY = 259, 257  # sequences of a batch with a backward, and value heads of a key head: just over 8 bits
MOST_ROWS = 1030  # of a batch, just over 1,024
OF_A_KEY = (6, 11)  # value heads of a key head: as a tree, odd at another level than at the leaves
TOKENS_OF_RUNS = 200  # three whole runs of 64, and a part of one
NORMED = (1030, 64)  # tokens and heads of rows that a norm in the kernel takes: over 65,535
WIDE_KEYS = 129  # just over 128, beside wide values
WIDE_VALUES = 515  # just over 512, and no multiple of 4: blocks of channels that are not full
# Two sizes that are large at the same time, where an implementation may choose another way by each or by their product: sequences
# of one token beside a long one, with keys over 32; sequences, with channels over 128; heads, with tokens or channels.
DECODES, PROMPT, KEYS_OF_LONG = 40, 480, 33
ROWS_OF_WIDE, WIDE = 133, 129
HEADS_OF_LONG, TOKENS_OF_HEADS = 65, 130
ROWS = (1, 1, 2, 2, 3, 5)  # rows of a batch; 5 only with a reach, which allows so many sequences
REMEMBERING = ("forever", "1000", "64", "10")
ONE_SIGNED = 5  # one case in so many, of those whose gates remember, has values of one sign
NARROW_COLUMNS = 32  # no decays of value channels for more channels: the oracle computes every channel as a head


def crowd(domain: Domain, **more: Any) -> Case | None:
    """Return the case of a batch with over 65,535 sequences and heads, or None if the domain does not allow it.

    A token that replaces what its key channel held leaves another channel, in which the initial state shows. The tolerances of the
    gradients of so many programs take over a minute and 5 GB, so the law `pure`, which needs none, has the backward.
    """
    rows, heads = CROWD
    words: dict[str, Any] = {"lengths": (1,) * rows, "heads": heads, "value_heads": heads, **more}
    return _narrow_case(domain, 2, **words) or _narrow_case(domain, **words)


def limits(domain: Domain) -> list[Case]:
    """Return cases just over usual limits that the domain allows, cheap because they are narrow.

    These are whole chunks without beta and others without decays; states of zeros beside others; over 1,024 packed sequences of
    unequal lengths in bf16, which are over 1,024 chunks too; packed sequences whose first and last length are the mean of all;
    one token, and three, between packed sequences of no tokens; over 256 heads, with several value heads for each key head, and
    with gates in the kernel; over 256 value heads for one key head, and 6 and 11; rows of a token whose q and k are as small as a
    norm's eps; over 256 sequences of a batch, and over 1,024 without a backward, and as many, packed if possible, without states.
    Two sizes are large at once in those of `_two_sizes`.
    Where kernels are interpreted, there is a batch with over 65,535 sequences and heads.
    In plain torch there are a sequence of over 8,192 tokens, or of over 256 chunks of 64; two sequences of over 1,024 tokens, as a
    batch and packed; a norm in the kernel of over 65,535 rows, without a backward; and values of over 512 channels, with keys of
    over 128. There are none if the check draws no long cases, and if kernels are compiled (a `reach` above 1), because they compile
    for few widths.
    """
    step, apart, quick = domain.length_step, not domain.batched, domain.drawing.quick

    def up(tokens: int) -> int:
        return -(-domain.most(tokens) // step) * step

    def heads(heads: int, value_heads: int, inside: str = "none") -> Case | None:
        return _narrow_case(domain, inside=inside, lengths=(up(3),), packed=apart, heads=heads, value_heads=value_heads)

    unequal = tuple(domain.most(place % 3 + 1) for place in range(MANY_SEQUENCES))  # outside a domain of longer steps
    pair = tuple(map(up, LONG_PAIR))
    found = [
        crowd(domain, backward=False) if not quick else None,
        _narrow_case(domain, inside="both", lengths=unequal, packed=True, dtype=coarsest(domain.dtypes)),
        _narrow_case(domain, lengths=tuple(step * length for length in MEAN), packed=True),
        *(_narrow_case(domain, lengths=(0, step * tokens, 0), packed=True) for tokens in ONE_OF_THREE),
        heads(MANY, MANY),
        heads(*THREE_EACH),
        heads(*MANY_EACH),
        heads(MANY, MANY, "both") if "both" in domain.in_kernel[1:] else None,
        heads(1, MANY_OF_A_KEY),
        *(heads(1, count) for count in OF_A_KEY),
        _small_token(domain, up),
        _narrow_case(domain, lengths=(up(1),) * MANY_ROWS),
        _narrow_case(domain, lengths=(up(1),) * MOST_ROWS, backward=False),
        _narrow_case(domain, state="none", lengths=(up(1),) * MOST_ROWS, packed=domain.packed, backward=False),
        *_in_runs(domain, up),
        *_two_sizes(domain, up),
    ]
    if quick:
        long = MANY_TOKENS_OF_CHUNKS if domain.drawing.exact > MANY_STEPS else MANY_TOKENS
        found += [_narrow_case(domain, lengths=pair), _narrow_case(domain, lengths=pair, packed=True)]
        rows: dict[str, Any] = {"lengths": (up(NORMED[0]),), "packed": apart, "heads": NORMED[1], "value_heads": NORMED[1]}
        norm: dict[str, Any] = {"qk_norm": True, "qk_norm_eps": domain.qk_norm_eps[0], "qk_norm_form": domain.qk_norm_forms[0]}
        found += [
            _narrow_case(domain, backward=False, **rows, **norm) if domain.qk_norm else None,
            _narrow_case(domain, lengths=(up(long),), packed=apart),
            _narrow_case(domain, WIDE_KEYS, WIDE_VALUES, lengths=(up(3),), packed=apart)
            or _narrow_case(domain, least_value=WIDE_VALUES, lengths=(up(3),), packed=apart),
        ]
    over = (case for number in named(domain) for case in _over(domain, number))
    return [*dict.fromkeys((*(case for case in found if case is not None), *over))]


def _small_token(domain: Domain, up: Callable[[int], int]) -> Case | None:
    """Return a case of a token in each row, whose q and k are as small as the eps of the norm that the operation computes.

    An implementation may have a kernel of its own for one token, where value heads share a key head.
    """
    if not domain.qk_norm or "small" not in domain.values:
        return None
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_eps": domain.qk_norm_eps[0], "qk_norm_form": domain.qk_norm_forms[0]}
    words: dict[str, Any] = {"lengths": (up(1),) * 2, "packed": not domain.batched, "values": "small", **norm}
    return _narrow_case(domain, 4, heads=1, value_heads=2, **words) or _narrow_case(domain, 4, **words)


def _in_runs(domain: Domain, up: Callable[[int], int]) -> Iterator[Case | None]:
    """Yield cases in which whole chunks have no beta, or no decay, and others do, and some sequences begin with states of zeros.

    The two seeds begin with another one.
    """
    usual = conventions(domain)
    beta = "runs" if usual["beta"] == "ordinary" else usual["beta"]
    gate: dict[str, Any] = {"gate": "runs"} if "runs" in gates_of(domain, usual["in_kernel"], usual) else {}
    for seed in (0, 1):
        words: dict[str, Any] = {"lengths": (up(TOKENS_OF_RUNS),), "packed": not domain.batched, "beta": beta, "seed": seed}
        yield _narrow_case(domain, **words, **gate) or _narrow_case(domain, **words)
        if domain.initial_state:
            yield _narrow_case(domain, lengths=(up(3), up(2), up(3)), packed=True, state="some", seed=seed)


def _two_sizes(domain: Domain, up: Callable[[int], int]) -> Iterator[Case | None]:
    """Yield cases with two large sizes, with equal sequences of whole chunks, and without tokens but with several value heads.

    `up` gives the next number of tokens that the domain allows.
    """
    apart, chunk = not domain.batched, up(domain.drawing.chunk)
    decodes = (*(up(1),) * DECODES, up(PROMPT))
    yield _narrow_case(domain, KEYS_OF_LONG, lengths=decodes, packed=True) or _narrow_case(domain, lengths=decodes, packed=True)
    yield _narrow_case(domain, least_value=WIDE, lengths=(up(1),) * ROWS_OF_WIDE, packed=apart)
    yield _narrow_case(domain, lengths=(up(TOKENS_OF_HEADS),), packed=apart, heads=HEADS_OF_LONG, value_heads=HEADS_OF_LONG)
    yield _narrow_case(domain, least_value=WIDE, lengths=(up(3),), packed=apart, heads=HEADS_OF_LONG, value_heads=HEADS_OF_LONG)
    yield _narrow_case(domain, lengths=(chunk,) * 3, packed=True)
    yield _narrow_case(domain, lengths=(0,), packed=apart, heads=1, value_heads=2)


def _over(domain: Domain, number: int) -> Iterator[Case]:
    """Yield cases with sizes of a number that the source names and just over it: of tokens, sequences, rows, heads and widths.

    Over MANY_SEQUENCES sequences or rows, and over MANY_TOKENS tokens, have no backward, which would take long.
    """
    step, apart = domain.length_step, not domain.batched
    up = [-(-domain.most(number + more) // step) * step for more in (0, 1)]
    few: dict[str, Any] = {"lengths": (-(-domain.most(3) // step) * step,), "packed": apart}
    found = [
        _narrow_case(domain, lengths=(up[1], up[0], *few["lengths"]), packed=True),
        _narrow_case(domain, lengths=(up[1],), packed=apart),
    ]
    if number <= MOST_SEQUENCES:
        found += [_narrow_case(domain, lengths=(step,) * (number + 2), packed=packed) for packed in (True, False)]
    if number < MAX_HEADS:
        found += [_narrow_case(domain, heads=heads, value_heads=number + 1, **few) for heads in (number + 1, 1)]
    if number < MAX_WIDTH:
        found += [_narrow_case(domain, number + 1, **few), _narrow_case(domain, least_value=number + 1, **few)]
    for case in found:
        if case is not None:
            long = len(case.lengths) > MANY_SEQUENCES or case.tokens > MANY_TOKENS
            yield dataclasses.replace(case, backward=False) if long else case


def exact_limits(domain: Domain) -> list[Case]:
    """Return cases at limits of plain torch for the law `recall`, as far as the domain allows them.

    These are the crowd of `crowd`; over 2,048 packed sequences in bf16; over 4,096 and over 65,535, for an implementation that does
    not take them one by one (`many_at_once` of properties/laws/law.py); a sequence of over 1,024 chunks and 32,767 tokens, in
    chunks of 64 also of over 131,072; and one of over 256 chunks of 64 with a packed one behind it. Plain torch has no grid that is
    too large, but it may have indices that are too narrow. The bounds of so many numbers take 10 s, and this law needs none. Token
    by token, so many take 2 s.
    """
    step, tokens = domain.length_step, domain.drawing.exact
    words: dict[str, Any] = {"lengths": (-(-tokens // step) * step,), "packed": not domain.batched}
    found = [crowd(domain) if domain.drawing.quick else None]
    if domain.drawing.quick:
        many: dict[str, Any] = {"packed": True, "dtype": coarsest(domain.dtypes)}
        # With two key channels a token replaces the part of one in the state, and leaves the other.
        found += [_narrow_case(domain, 2, lengths=(step,) * count, **many) for count in (ONE_BY_ONE, MOST_SEQUENCES)]
        found.append(_narrow_case(domain, 2, lengths=(1,) * AT_ONCE, **many) if step == 1 else None)
    if tokens:
        packed = (-(-MANY_TOKENS_OF_CHUNKS // step) * step, domain.most(3 * step))
        found += [_narrow_case(domain, **words), _narrow_case(domain, lengths=packed, packed=True)]
    scale = max(domain.drawn_scales, key=("default", "half", "one").index)
    exact: dict[str, Any] = {"values": "one_hot", "gate": "forever", "beta": "one", "scale": scale, "backward": False}
    cases = [dataclasses.replace(case, **exact) for case in found if case is not None and case.in_kernel == "none"]
    return [case for case in cases if domain.outside(case) is None]


def _narrow_case(domain: Domain, least_key: int = 1, least_value: int = 1, inside: str = "none", **words: Any) -> Case | None:
    """Return a case with the narrowest K and V of the domain that are at least so wide, with a state if it has one.

    The words may name another state. None if the case is outside, or if nothing long is drawn.
    """
    if not domain.drawing.long or domain.drawing.reach > 1:
        return None
    keys = [width for width in range(least_key, least_key + 64) if domain.has_key(width)]
    values = [width for width in range(least_value, least_value + 64) if domain.has_value(width)]
    if domain.equal_widths:
        keys = values = [width for width in keys if width in values]
    if not keys or not values:
        return None
    fixed = {**conventions(domain, inside), "final_states": domain.final_states_of(packed=words.get("packed", False))}
    case = Case(key_dim=keys[0], value_dim=values[0], **{**fixed, "backward": domain.backward, **words})
    states: dict[str, Any] = {"state": words.get("state", "random"), "state_dtype": domain.state_dtypes[0]}
    with_state = dataclasses.replace(case, **states) if states["state"] != "none" else case
    return next((one for one in (with_state, case) if domain.outside(one) is None), None)


def conventions(domain: Domain, inside: str = "none") -> dict[str, Any]:
    """Return the words of a case without a state that follow a domain's conventions, with the simplest values that it has.

    `inside` is what the kernel computes, if the domain has that.
    """

    def simplest(values: tuple[str, ...], value: str = "none") -> str:
        return value if value in values else values[0]

    inside, left_out = simplest(domain.in_kernel, inside), simplest(domain.left_out)
    computed = inside in ("gate", "both")
    words: dict[str, Any] = {
        "operation": domain.operation,
        "dtype": domain.dtypes[0],
        "gate_dtype": domain.gate_dtypes[0],
        "gate": "64" if "64" in domain.gates and left_out not in ("gate", "both") else "forever",
        "beta": "one" if left_out in ("beta", "both") else "ordinary",
        "in_kernel": inside,
        "dt_bias": domain.dt_bias or not computed,
        "decay": "log" if computed else simplest(domain.decays, "log"),
        "left_out": left_out,
        "channel_decays": simplest(domain.channel_decays),
        "scale": domain.drawn_scales[0],
        "final_dtype": domain.final_dtype,
        "final_states": domain.final_states_of(packed=False),
    }
    if computed:
        words |= {"lower_bound": simplest(domain.lower_bounds), "parameter_dtype": simplest(domain.parameter_dtypes, "fp32")}
    return words


@st.composite
def cases(
    draw: st.DrawFn,
    /,
    domain: Domain,
    sequences: tuple[int, int] = (1, 4),
    longest: int = 150,
    total: int = 260,
    value_heads: int = 4,
    **fixed: Any,
) -> Case:
    """Draw any case of the domain; `fixed` gives fields as a value, or as a tuple of values to choose from.

    `longest`, `total` and `value_heads` are for interpreted kernels. A domain's reach multiplies the number of tokens. With it
    sequences have up to 512 tokens, there may be four times as many of them if `sequences` allows four or more, up to 32 value
    heads, and widths up to 256 for every length, few of them narrower than a matrix unit's 16. With the domain's `large`, cases are
    large as in properties/words/sizes.py.
    """
    chance = draw(st.randoms(use_true_random=True))
    for name, allowed, simplest in (("gate", domain.gates, "forever"), ("values", domain.values, "ordinary")):
        if isinstance(fixed.get(name), tuple):
            fixed[name] = tuple(regime for regime in fixed[name] if regime in allowed) or (simplest,)
    far = domain.drawing.reach > 1
    step, kinds = domain.length_step, KINDS if sequences[1] >= 3 and "groups" not in fixed else LENGTHS
    longest, long = domain.most(longest), domain.most(domain.drawing.long)
    large = kind_of(domain.drawing.large, long // step * step, longest, kinds_of(kinds, long, step))

    def field(name: str, choices: Sequence[Any]) -> Any:
        options = fixed.get(name, choices)
        return chance.choice(options) if isinstance(options, tuple) else options

    groups = (*HEADS, *FAR_HEADS) if far else tuple(pair for pair in HEADS if pair[1] <= value_heads)
    groups = {"": groups, "heads": MANY_HEADS}.get(large, FEW_HEADS)
    heads, value_heads = field("groups", tuple(pair for pair in groups if domain.grouped_heads or pair[0] == pair[1]))
    total = domain.drawing.reach * total * 4 // max(4, value_heads)  # many heads mean many kernel programs, so fewer tokens
    longest = min(domain.most(min(domain.drawing.reach * longest, max(longest, FAR))), total)
    sequences = (sequences[0], 4 * sequences[1]) if far and sequences[1] >= 4 else sequences
    packed = field("packed", tuple(choice for choice, can in ((False, domain.batched), (True, domain.packed)) if can))
    if large:
        sizes = large_lengths(chance, large, sequences, long, domain.drawing.chunk, packed=packed, empty=domain.empty, step=step)
    elif packed:
        many = sequences[1] >= 4 and (step == 1 or domain.empty)
        sizes = lengths(chance, sequences, longest, total, empty=domain.empty, many=many, step=step)
    else:
        rows = chance.choice([count for count in ROWS if sequences[0] <= count <= sequences[1]] or [sequences[0]])
        none = domain.empty and chance.random() < 1 / 5  # times one in ten in `lengths`: one batch in fifty has no tokens
        sizes = lengths(chance, (1, 1), max(1, min(longest, total // rows)), total // rows, empty=none, many=False, step=step)
        sizes *= rows
    if not domain.nothing and not sum(sizes):
        sizes = (step, *sizes[1:]) if packed else (step,) * len(sizes)
    size = sum(sizes) * value_heads  # the time of interpreted kernels grows with this and with the widths
    wide = NARROW if large else 256 if far or size <= 100 else 128 if size <= 200 else 64
    broad = (
        not (far or large) and max(sizes, default=0) > 64 and size <= 600 and chance.random() < 1 / 6
    )  # wide keys of several chunks
    keys, values = keys_of(domain, 256 if broad else wide), values_of(domain, wide)
    if not (far or large) and size <= 60:
        keys = keys_of(domain, MAX_WIDTH) if domain.key_widths else keys
        values = domain.value_widths or (values if not domain.has_value(WIDER) else (*values, WIDER))
    if far and not large:
        keys, values = _seldom_narrow(chance, keys), _seldom_narrow(chance, values)
    key_dim = field("key_dim", tuple(width for width in keys if width > 128) or keys if broad else keys)
    value_dim = field("value_dim", values)
    same = domain.has_value(key_dim) and "value_dim" not in fixed
    if domain.equal_widths or (same and chance.random() < 1 / 3):  # with equal widths a transposed state raises no shape error
        value_dim = key_dim
    inside = field("in_kernel", domain.in_kernel) if len(domain.in_kernel) > 1 else domain.in_kernel[0]
    form = decay_of(field, domain, inside)
    case = Case(
        lengths=sizes,
        operation=domain.operation,
        packed=packed,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=field("dtype", domain.dtypes),
        gate=field("gate", gates_of(domain, inside, form)) if domain.operation != "delta_rule" else "forever",
        gate_dtype=field("gate_dtype", tuple(d for d in domain.gate_dtypes for _ in range(3 if d == "fp32" else 1))),
        beta=field("beta", tuple(b for b in BETAS if domain.doubles(inside) or b != "two")),
        values=field("values", tuple(v for v in domain.values if v not in ("one_hot", "one_signed"))),
        state=field("state", ("none", "zero", "some", "random", "random") if domain.initial_state else ("none",)),
        scale=field("scale", tuple(s for s in ("default", "default", "one", "half") if s in domain.drawn_scales)),
        qk_norm=field("qk_norm", (False, True) if domain.qk_norm else (False,)),
        in_kernel=inside,
        dt_bias=inside not in ("gate", "both") or not domain.dt_bias or field("dt_bias", (True, True, False)),
        offsets=field("offsets", domain.offsets) if packed else "int64",
        backward=domain.backward and field("backward", (True, False) if large in LENGTHS and not far else (True,)),
        seed=chance.randrange(2**16),
        **form,
        **states_of(field, domain, packed=packed),
    )
    if case.state == "none":  # then no state has a dtype
        case = dataclasses.replace(case, state_dtype="fp32")
    return _with_rare_words(chance, domain, case, fixed)


def _with_rare_words(chance: random.Random, domain: Domain, case: Case, fixed: Mapping[str, Any]) -> Case:
    """Return the case with the words that few domains have. They are drawn last, so that other words do not depend on them."""

    def chosen(name: str, choices: tuple[str, ...], of: int = 2) -> str:
        """Return a choice: not the first one in one of `of` cases, unless it is fixed. Draws nothing for a single choice."""
        options = fixed.get(name, choices)
        if not isinstance(options, tuple) or len(options) == 1:
            return str(options if isinstance(options, str) else options[0])
        return str(
            chance.choice(options) if name in fixed else chance.choice(options[1:]) if chance.randrange(of) == 0 else options[0]
        )

    def may(name: str, value: str, every: Sequence[str]) -> bool:
        """Whether a word that was drawn for the case may have this value instead."""
        options = fixed.get(name, every)
        return value in (options if isinstance(options, tuple) else (options,))

    def uneven(width: int, allowed: Callable[[int], bool], *, free: bool) -> int:
        """Return a width that was drawn, or one that is about as wide and no multiple of 64."""
        choices = [other for other in UNEVEN if free and 128 < width < WIDER and allowed(other)]
        return chance.choice(choices) if choices and chance.random() < 1 / 3 else width

    words: dict[str, Any] = {}
    if domain.drawing.reach == 1 and not domain.equal_widths:  # on a GPU, kernels are compiled for few widths
        words["key_dim"] = uneven(case.key_dim, domain.has_key, free="key_dim" not in fixed)
        words["value_dim"] = uneven(case.value_dim, domain.has_value, free="value_dim" not in fixed)
    left_out = chosen("left_out", domain.left_out)
    given = case.operation != "delta_rule" and case.decay == "log" and not case.gate_inside and may("gate", "forever", domain.gates)
    can = {"gate": given, "beta": not case.beta_inside and may("beta", "one", BETAS)}
    if left_out != "none" and all(can[name] for name in (("gate", "beta") if left_out == "both" else (left_out,))):
        words["left_out"] = left_out
        words |= {"gate": "forever"} if left_out in ("gate", "both") else {}
        words |= {"beta": "one"} if left_out in ("beta", "both") else {}
    if domain.channel_decays != ("none",) and case.decay == "log" and case.values != "one_hot":
        words["channel_decays"] = chosen("channel_decays", domain.channel_decays)
        if words["channel_decays"] in ("values", "both") and case.value_dim > NARROW_COLUMNS:
            words["channel_decays"] = "keys" if "keys" in domain.channel_decays else "none"
        if not domain.has_decays_of(dataclasses.replace(case, **words)):
            words["channel_decays"] = "none"
    if case.gate_inside and case.operation == "kda":
        words["lower_bound"] = chosen("lower_bound", domain.lower_bounds)
    if case.gate_inside:
        words["parameter_dtype"] = chosen("parameter_dtype", domain.parameter_dtypes, 3)
    if case.qk_norm:
        eps, form = chosen("qk_norm_eps", domain.qk_norm_eps), chosen("qk_norm_form", domain.qk_norm_forms)
        words |= {"qk_norm_eps": eps, "qk_norm_form": form}
        words |= {"backward": False} if case.dtype == "fp16" and overflows(eps, form) else {}
    words["options"] = draw_options(chance, domain.options)
    if case.gate in REMEMBERING and may("values", "one_signed", domain.values) and case.seed % ONE_SIGNED == 0:
        words["values"] = "one_signed"
    return dataclasses.replace(case, **words)


def gates_of(domain: Domain, inside: str, form: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the domain's regimes of gates for what the kernel computes itself and the form of its decay."""
    computed = inside in ("gate", "both")
    given = not computed and form.get("decay", "log") == "log"
    left_out = {*(() if domain.infinite_gates else ("closed",)), *(() if given else GIVEN_GATES)}
    left_out |= set() if computed else {*COMPUTED_GATES}
    return tuple(gate for gate in domain.gates if gate not in left_out)


def decay_of(field: Callable[[str, tuple[str, ...]], Any], domain: Domain, inside: str) -> dict[str, Any]:
    """Draw the form of the decay, if the domain has another one than the logarithm and the operation does not compute its gate."""
    if domain.decays == ("log",) or inside in ("gate", "both"):
        return {}
    return {"decay": field("decay", domain.decays) if len(domain.decays) > 1 else domain.decays[0]}


def states_of(field: Callable[[str, tuple[str, ...]], Any], domain: Domain, *, packed: bool) -> dict[str, Any]:
    """Return the words of the domain about states; the dtype of initial states is drawn if there are several."""
    words: dict[str, Any] = {"final_dtype": domain.final_dtype, "final_states": domain.final_states_of(packed=packed)}
    if packed:
        words |= {"initial_states": domain.initial_states}
    dtypes = domain.state_dtypes
    return words | {"state_dtype": field("state_dtype", dtypes) if len(dtypes) > 1 else dtypes[0]}


def keys_of(domain: Domain, wide: int) -> tuple[int, ...]:
    """Return widths of keys that the domain allows, at most `wide` unless all are larger."""
    allowed = narrow(domain.key_widths, wide) if domain.key_widths else widths(domain.key_dims, domain.width_step, wide)
    if not domain.equal_widths:
        return allowed
    both = tuple(width for width in allowed if domain.has_value(width))
    return both or tuple(width for width in range(1, MAX_WIDTH + 1) if domain.has_key(width) and domain.has_value(width))[:1]


def values_of(domain: Domain, wide: int) -> tuple[int, ...]:
    """Return widths of values that the domain allows, at most `wide` unless all are larger."""
    return narrow(domain.value_widths, wide) if domain.value_widths else widths(domain.value_dims, domain.width_step, wide)


def _seldom_narrow(chance: random.Random, allowed: tuple[int, ...]) -> tuple[int, ...]:
    """Return the widths, including those below 16 only one time in six."""
    broad = tuple(width for width in allowed if width >= FAR_NARROW)
    return broad if broad and chance.random() < 5 / 6 else allowed
