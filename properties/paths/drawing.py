"""Cases of parallel paths: those at usual limits, which come with every seed, and those that are drawn inside a domain."""

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from oracles.operations import RULES
from properties.paths.case import ParallelCase
from properties.paths.domain import LONGEST, PathDomain
from properties.rules.case import overflows
from properties.words.sizes import THREE_EACH, at_limits

COMPILED = 1 / 3  # share of a layer's cases on a GPU with a choice whose kernels are compiled
SHORT = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 64, 65, 66)
MOST_SHARED = 8  # CP ranks that may share the heads of a rule
CHUNKED = 2 / 5  # share of cases in which every rank has two chunks or more
SHARED = 3 / 4  # share of a layer's cases with cp over 1, if there are more than two ranks
MANY_SEQUENCES, MANY_HEADS = (33, 130), 257  # just over usual limits: 32 and 128, and 8 bits
MANY_TOKENS, HIDDEN = 2120, 32  # over 33 chunks of 64, 1,024 and 2,048 tokens; times HIDDEN over 65,536 numbers
UNEQUAL = (1, 3, 2)  # the lengths of packed sequences, in units that a layout can cut


def limits(domain: PathDomain) -> list[ParallelCase]:
    """Return cases just over usual limits, cheap because they are narrow and short, as far as the domain allows them.

    These are over 32 and over 128 packed sequences before one that lies over two ranks, an empty sequence exactly between two
    ranks, over 256 heads, and the long ones of `_long`. There are none if the check draws no large cases, and on a GPU.
    """
    if not at_limits(domain):
        return []
    words, group = _few(domain), THREE_EACH[1] // THREE_EACH[0] if domain.grouped_heads else 1
    cp, share = words["cp"], words["heads"]
    words |= {"value_heads": group * share}
    cases = []
    for layout in domain.layouts:
        unit = _unit(layout, cp)
        for count in MANY_SEQUENCES if domain.packed else ():
            half = max(2, domain.least_piece)  # tokens of the long sequence on each rank, if ranks cut the tokens of all sequences
            half += -(count - 1 + half) % max(1, unit // 2)
            short = (1,) * (count - 1)
            least = unit * max(1, domain.least_piece)
            lengths = (least,) * (count - 1) + (3 * least,) if layout == "zigzag" else (*short, 2 * half, *short)
            cases.append(_with_first_norm(domain, ParallelCase(lengths, layout=layout, packed=True, **words)))
        half = unit * max(1, domain.least_piece)
        empty = ParallelCase((half, 0, half), layout=layout, packed=True, **words)
        cases += [_with_first_norm(domain, empty)] if domain.packed else []
        tokens = -(-max(4, domain.least_piece * 2 * cp) // unit) * unit
        heads = -(-(THREE_EACH[0] if group > 1 else MANY_HEADS) // share) * share
        many: dict[str, Any] = {"heads": heads, "value_heads": group * heads, "packed": not domain.batched}
        cases.append(_with_first_norm(domain, ParallelCase((tokens,), layout=layout, **(words | many))))
    cases += _long(domain)
    return [case for case in cases if domain.outside(case) is None]


def _long(domain: PathDomain) -> list[ParallelCase]:
    """Return cases of over 33 chunks of 64 on each rank: two CP ranks, and two TP ranks with over 65,536 numbers to add up."""
    if not (domain.computes and domain.longest >= LONGEST):
        return []
    words, layer = _few(domain), domain.operation == "gdn_layer"
    words |= {"packed": domain.packed, "layout": domain.layouts[0]}
    cases = [ParallelCase((MANY_TOKENS * words["cp"],), **words)] if words["cp"] > 1 else []
    if layer and domain.tensor_parallel and domain.ranks > 1:
        shared = {"tp": 2, "cp": 1, "heads": 2, "value_heads": 2, "hidden": HIDDEN}
        cases.append(ParallelCase((MANY_TOKENS,), **(words | shared)))
    return [_with_first_norm(domain, case) for case in cases]


def unequal(domain: PathDomain) -> list[ParallelCase]:
    """Return a case of packed sequences of different lengths for each layout, so that other offsets have the same counts and sums.

    There are none if the check draws no large cases, and on a GPU.
    """
    if not (at_limits(domain) and domain.packed):
        return []
    words, cases = _few(domain), []
    for layout in domain.layouts:
        unit = _unit(layout, words["cp"]) * max(1, domain.least_piece)
        lengths = tuple(unit * count for count in UNEQUAL)
        cases.append(_with_first_norm(domain, ParallelCase(lengths, layout=layout, packed=True, **words)))
    return [case for case in cases if domain.outside(case) is None]


def _unit(layout: str, cp: int) -> int:
    """Return the number of tokens whose multiples a layout can cut over so many ranks."""
    return 2 * cp if layout.startswith("zigzag") else cp


def _few(domain: PathDomain) -> dict[str, Any]:
    """Return the words of a narrow case with few heads on two ranks, or on one if the domain has no more."""
    layer, narrow, several = domain.operation == "gdn_layer", min(domain.widths), domain.ranks > 1
    cp = 2 if several and domain.context_parallel else 1
    tp = 2 if several and cp == 1 and domain.tensor_parallel else 1
    share = tp * cp if layer else 1
    words: dict[str, Any] = {
        "operation": domain.operation,
        "tp": tp,
        "cp": cp,
        "key_dim": narrow,
        "value_dim": narrow,
        "heads": share,
        "value_heads": share,
        "conv_width": min(domain.conv_widths, key=lambda width: (width < 2, width)),
        "dtype": domain.dtypes[0],
        "backward": domain.backward,
        **{name: choices[0] for name, choices in domain.choices},
    }
    if domain.operation in RULES:
        words |= {"in_kernel": domain.in_kernel[0], "final_state": domain.final_state}
        words |= {"state": "random" if domain.initial_state else "none"}
    return words


def _with_first_norm(domain: PathDomain, case: ParallelCase) -> ParallelCase:
    """Return the case with the first norm of q and k that the domain has, if the operation normalises them."""
    if not case.WORDS["qk_norm_eps"].acts(case):
        return case
    return dataclasses.replace(case, qk_norm_eps=domain.qk_norm_eps[0], qk_norm_form=domain.qk_norm_forms[0])


@st.composite
def path_cases(
    draw: st.DrawFn, /, domain: PathDomain, tokens: int = 200, *, chunked: float = CHUNKED, exchanges: bool = False, **fixed: Any
) -> ParallelCase:
    """Draw any case of the domain; `fixed` gives fields as a value, or as a tuple of values to choose from.

    A share of `chunked` of the cases has two chunks or more on every rank; the others have about `tokens` tokens. If there are
    several ranks, every case is shared. Most cases of a layer have cp over 1; of two ranks, every other one has tp=2, unless
    `exchanges`: then the cases are for laws about what CP ranks exchange. ValueError if 1000 attempts give no legal case.
    """
    chance = draw(st.randoms(use_true_random=True))
    large = domain.computes and domain.longest >= LONGEST and chance.random() < chunked
    for attempt in range(1000):
        try:
            case = _drawn(chance, domain, tokens if attempt < 500 else 10 * tokens, fixed, large=large, exchanges=exchanges)
        except ValueError:
            continue  # the layout does not divide the tokens: draw again
        if domain.outside(case) is None:
            return case
    raise ValueError(f"no legal case was drawn in 1000 attempts for {domain} with {fixed}")


@functools.cache
def _meshes(ranks: int, *, tensor_parallel: bool, context_parallel: bool) -> tuple[tuple[int, int], ...]:
    """Return the meshes (tp, cp) of up to `ranks` ranks, of one rank only if there are no more."""
    tps, cps = (range(1, ranks + 1) if parallel else (1,) for parallel in (tensor_parallel, context_parallel))
    return tuple((tp, cp) for tp in tps for cp in cps if min(ranks, 2) <= tp * cp <= ranks) or ((1, 1),)


def _drawn(
    chance: random.Random, domain: PathDomain, tokens: int, fixed: dict[str, Any], *, large: bool, exchanges: bool
) -> ParallelCase:
    def field(name: str, choices: Sequence[Any]) -> Any:
        options = fixed.get(name, tuple(choices))
        return chance.choice(options) if isinstance(options, tuple) else options

    layer = domain.operation == "gdn_layer"
    meshes = list(_meshes(domain.ranks, tensor_parallel=layer and domain.tensor_parallel, context_parallel=domain.context_parallel))
    if domain.drawing.forms:
        fixed = _of_a_form(chance, domain, meshes, fixed)
    if (large or chance.random() < SHARED) and (exchanges or domain.ranks > 2):
        meshes = [mesh for mesh in meshes if mesh[1] > 1] or meshes
    wide = [mesh for mesh in meshes if mesh[0] * mesh[1] > domain.ranks // 2]
    tp, cp = field("mesh", wide if wide and chance.random() < 1 / 2 else meshes)
    layout = field("layout", domain.layouts)
    packed = field(
        "packed", [choice for choice, can in ((True, domain.packed), (True, domain.packed), (False, domain.batched)) if can]
    )
    padding = field("padding", ("none", "least", "more")) if packed and domain.padded and layer else "none"
    sp = tp > 1 and domain.sequence_parallel and field("sp", (False, True))
    unit = (2 * cp if layout.startswith("zigzag") else cp) * (tp if sp else 1)
    if large:
        lengths = _of_chunks(chance, domain, layout, unit, cp, packed=packed, padded=padding != "none")
    else:
        lengths = _lengths(chance, domain, layout, unit, tokens, packed=packed, padded=padding != "none")
    share = tp * cp if layer else 1
    # The ranks of a rule may share its heads too, if they can: those of q and k, or those of v alone.
    if not (layer or domain.drawing.forms) and cp <= MOST_SHARED and "heads_a_rank" not in fixed and chance.random() < 1 / 2:
        share = cp
    heads = share * field("heads_a_rank", (1, 1, 2) if share < 16 and not large else (1,))
    value_heads = heads * (field("group", (1, 2) if large else (1, 2, 2, 3)) if domain.grouped_heads else 1)
    if share == cp > 2 and not layer and domain.grouped_heads and chance.random() < 1 / 2:
        heads, value_heads = 2, 2 * cp
    key_dim = field("key_dim", domain.widths)
    values = {}
    for name, choices in domain.choices:
        setting = fixed.get(name)
        several = setting if isinstance(setting, tuple) else _weighted(chance, name, choices, domain, slow=not large)
        values[name] = setting if setting in choices else chance.choice(several)
    case = ParallelCase(
        lengths,
        domain.operation,
        tp=tp,
        cp=cp,
        sp=sp,
        layout=layout,
        packed=packed,
        padding=padding,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=key_dim if domain.equal_widths else field("value_dim", domain.widths),
        hidden=field("hidden", (8, 12, 32)),
        conv_width=field("conv_width", domain.conv_widths),
        dtype=field("dtype", ("fp32", *domain.dtypes) if "fp32" in domain.dtypes else domain.dtypes),
        gate=field("gate", ("long", "ordinary", "mixed")),
        values=field("values", ("ordinary", "scaled")),
        conv_bias=domain.conv_bias and field("conv_bias", (False, True)),
        allow_neg_eigval=layer and domain.negative_eigenvalues and field("allow_neg_eigval", (False, True)),
        offsets=field("offsets", domain.offsets) if packed else "int64",
        backward=domain.backward and field("backward", (True,)),
        deterministic=domain.deterministic and field("deterministic", (False, True)),
        recompute=domain.recomputes and field("recompute", (False, True)),
        seed=chance.randrange(2**16),
        **values,
    )
    usual = (domain.qk_norm_eps, domain.qk_norm_forms) == (PathDomain.qk_norm_eps, PathDomain.qk_norm_forms)
    if not usual and case.WORDS["qk_norm_eps"].acts(case):
        case = _with_norm(chance, domain, case, fixed)
    rare = {
        "in_kernel": domain.in_kernel,
        "state": ("none", "random", "random") if domain.initial_state else ("none",),
        "final_state": (False, True) if domain.final_state else (False,),
    }  # drawn last, as other words came before them
    words = {name: field(name, choices) for name, choices in rare.items() if choices != (getattr(case, name),)}
    case = dataclasses.replace(case, **words) if domain.operation in RULES else case
    if case.in_kernel in ("beta", "both") and domain.negative_eigenvalues:
        case = dataclasses.replace(case, allow_neg_eigval=field("allow_neg_eigval", (False, True)))
    if case.in_kernel in ("gate", "both") and domain.dt_bias:
        case = dataclasses.replace(case, dt_bias=field("dt_bias", (True, True, False)))
    if domain.strong_decays and "gate" not in fixed and chance.random() < 1 / 6:
        case = dataclasses.replace(case, gate="strong")
    return case


def _with_norm(chance: random.Random, domain: PathDomain, case: ParallelCase, fixed: dict[str, Any]) -> ParallelCase:
    """Return the case with a norm of q and k that the domain has, and in half of the cases with q and k near its eps."""
    eps, form = chance.choice(domain.qk_norm_eps), chance.choice(domain.qk_norm_forms)
    words: dict[str, Any] = {"qk_norm_eps": eps, "qk_norm_form": form}
    if "values" not in fixed and chance.random() < 1 / 2:
        words["values"] = "small"
    if case.dtype == "fp16" and overflows(eps, form):
        words["backward"] = False
    return dataclasses.replace(case, **words)


def _of_a_form(chance: random.Random, domain: PathDomain, meshes: list[tuple[int, int]], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the fixed fields of a case on a GPU: a form if its kernels are compiled, else choices without compiled kernels."""
    values: dict[str, tuple[str, ...]] = {}
    if domain.operation == "gdn_layer":
        for name, choices in domain.choices:
            options = fixed.get(name, choices)
            options = options if isinstance(options, tuple) else (options,)
            values[name] = tuple(value for value in options if value in choices) or choices
        plain = {name: tuple(value for value in several if value != "fla") for name, several in values.items()}
        compiled = plain != values and (not all(plain.values()) or chance.random() < COMPILED)
        values = values if compiled else plain
        if not compiled:
            return {**fixed, **values}
    form = chance.choice(domain.drawing.forms)
    shared = tuple(mesh for mesh in meshes if mesh[0] * mesh[1] == form.ranks)
    return {**form._asdict(), "mesh": shared, **fixed, **values}


def _weighted(chance: random.Random, name: str, choices: Sequence[str], domain: PathDomain, *, slow: bool) -> tuple[str, ...]:
    """Return the quick values of a choice, and with `slow` one time in eight also the slow ones."""
    quick = tuple(value for value in choices if f"{name}={value}" not in domain.slow)
    return tuple(choices) if not quick or (slow and chance.random() < 1 / 8) else quick


def _of_chunks(
    chance: random.Random, domain: PathDomain, layout: str, unit: int, cp: int, *, packed: bool, padded: bool
) -> tuple[int, ...]:
    """Return lengths that give every rank two chunks or more, and that end anywhere in a chunk.

    Beside the long sequence, a packed call has up to two short ones, at any place.
    """
    least = 2 * domain.drawing.chunk * cp
    one = chance.randint(least, least + domain.drawing.chunk * cp)
    if not packed:
        return (-(-one // unit) * unit,)
    lengths = [chance.choice(SHORT) for _ in range(chance.choice((0, 1, 2)))]
    lengths.insert(chance.randint(0, len(lengths)), one)
    if padded:
        return tuple(lengths)
    if layout == "zigzag":
        return tuple(-(-length // unit) * unit for length in lengths)
    return (*lengths[:-1], lengths[-1] - sum(lengths) % -unit)


def _lengths(
    chance: random.Random, domain: PathDomain, layout: str, unit: int, tokens: int, *, packed: bool, padded: bool
) -> tuple[int, ...]:
    """Return lengths that the layout can cut: multiples of `unit`, or only their total, or any lengths if they are padded."""
    tokens = max(tokens, 2 * unit)
    if not packed:
        rows = chance.choice((1, 1, 2, 3))
        return (unit * chance.randint(1, max(1, min(domain.longest, tokens // rows) // unit)),) * rows
    count = chance.choice((1, 2, 3, 4, 4, chance.randint(5, 12)))
    if padded:
        drawn = [chance.choice(SHORT) for _ in range(count)]
    elif layout == "zigzag":
        drawn = [unit * max(domain.least_piece, chance.choice((1, 1, 2, 3, 5, 8))) for _ in range(count)]
    else:
        total = unit * chance.randint(1, max(1, tokens // unit))
        cuts = sorted(chance.randint(0, total) for _ in range(count - 1))
        drawn = [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
        if not domain.empty:
            drawn = [length for length in drawn if length]
        return tuple(drawn)
    if domain.empty:
        drawn = [0 if chance.random() < 1 / 6 else length for length in drawn]
    while len(drawn) > 1 and sum(drawn) > tokens:
        drawn.pop()
    return tuple(drawn)
