"""The domain of decoding on a pool of states, and cases drawn from it."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Self

from hypothesis import strategies as st

from oracles.operation import DTYPES
from properties.laws.promises import PROMISES
from properties.pools.case import BLOCK_SIZES, FREE, PADDING_SLOTS, RULES, PoolCase
from properties.rules.case import BETAS
from properties.rules.domain import Domain
from properties.rules.drawing import HEADS, ONE_SIGNED, conventions, decay_of, gates_of, keys_of, values_of
from properties.words.domain import INDICES, OFFSETS, VIEWS, AnyDomain, check_tuples
from properties.words.lengths import EDGES
from properties.words.line import MAX_HEADS, MAX_WIDTH
from properties.words.names import known_fields
from properties.words.options import Options, draw_options
from properties.words.sizes import MANY_EACH, MANY_SEQUENCES, THREE_EACH, at_limits, named
from properties.words.word import some_of

LAYOUTS = ("kv", "vk")
POOL_VIEWS = (*VIEWS, "fused")
EVERY_RULE = Domain(backward=False)
POOL_STATES = (*DTYPES, "input")
# Fields that `rule` must leave out, each with the reason. `length_step` is about prompts of whole chunks, and a request has none.
_OWN = "because a PoolDomain has {} itself"
NOT_OF_POOLS = {
    **dict.fromkeys(("state_dtypes", "final_dtype"), _OWN.format("state_dtypes, the dtypes of the pool,")),
    **dict.fromkeys(("options", "exact_options"), _OWN.format("options")),
    "longest": _OWN.format("most_tokens"),
    **dict.fromkeys(("initial_states", "final_states"), "because every request of a pool has a state"),
    "length_step": "because a request may have any number of tokens",
    **dict.fromkeys(PROMISES, "because no law of pools judges it"),
    **dict.fromkeys(("left_out", "channel_decays", "lower_bounds"), "because decode has no such argument"),
}


@known_fields
@dataclasses.dataclass(frozen=True)
class PoolDomain(AnyDomain):
    """The calls for which a serving kernel promises right results; by default all calls without a choice of blocks.

    ValueError for a field outside its choices or range.
    """

    CASE = PoolCase
    has_limits = True

    operation: str = "decode"
    rule: Domain = EVERY_RULE
    """Which tokens the kernel takes, and which results it promises bit for bit."""
    most_tokens: int = 130
    """The most tokens of a request: 1 for a kernel of single tokens."""
    padding_slots: tuple[str, ...] = PADDING_SLOTS
    """The padding slots that it knows, none if callers must leave padding out."""
    indices: Annotated[tuple[str, ...], some_of("indices")] = OFFSETS
    fresh: bool = True
    """Whether it can start a request from zeros."""
    accepts: bool = True
    """Whether it can keep the state after a part of a draft."""
    rejects: bool = True
    """Whether it can keep the state before the draft, if no token is accepted."""
    in_place: bool = True
    """Whether it returns the pool that it was given."""
    blocks: tuple[int, ...] = ()
    """The numbers of value channels that it can be told to process at a time."""
    layout: str = "kv"
    """The order of a state's axes in memory, "kv" or "vk". The pool in a call always has the shape [P, HV, K, V], and its memory
    lies in this order, so an adapter transposes the pool without a copy."""
    state_dtypes: tuple[str, ...] = ("fp32",)
    """The dtypes of the pool; "input" means that of the tokens."""
    trees: bool = False
    """Whether the tokens of a request may be a tree, in which each follows any earlier one."""
    empty_first: bool = True
    """Whether a packed request without tokens may stand before one with tokens, if `rule.empty` is True."""
    refills: bool = True
    """Whether a caller may put other numbers into the tensors of a call and call again, as servers do with the buffers of a CUDA
    graph."""
    graphs: bool = False
    """Whether a call can be captured in such a graph."""
    apart: bool = True
    """Whether slots may lie apart from each other in memory."""
    views: tuple[str, ...] = tuple(how for how in POOL_VIEWS if how != INDICES)
    """Which strides the inputs may have, if `rule.views` is True: the views of Domain, and "fused" for tokens that lie side by side
    in one tensor with others."""
    options: Options = ()

    @property
    def of_call(self) -> Domain:
        return self.rule

    def __post_init__(self) -> None:
        self.check_fields()
        if not isinstance(self.rule, Domain) or self.rule.operation not in RULES or not self.rule.initial_state:
            raise ValueError(f"rule must be a Domain of {' or '.join(RULES)} with an initial state, got {self.rule!r}")
        for name, reason in NOT_OF_POOLS.items():
            if getattr(self.rule, name) != getattr(Domain, name):
                raise ValueError(f"rule must leave out {name}, {reason}, got {getattr(self.rule, name)!r}")
        if not isinstance(self.rule.views, bool):
            raise ValueError(  # noqa: TRY004 - one kind of error
                f"views of rule must be True or False, because a PoolDomain has views itself, got {self.rule.views!r}"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if not isinstance(self.most_tokens, int) or self.most_tokens < 1:
            raise ValueError(f"most_tokens must be at least 1, got {self.most_tokens!r}")
        check_tuples(self, ("padding_slots", PADDING_SLOTS), ("blocks", BLOCK_SIZES), least=0)
        check_tuples(self, ("state_dtypes", POOL_STATES), ("views", POOL_VIEWS))

    def outside(self, case: PoolCase) -> str | None:
        """Return why `case` is outside the domain, or None."""
        return super().outside(case) or self.rule.outside(case.call())

    def reasons(self, case: Any) -> Iterable[tuple[bool, str]]:
        """Return what else must be true of a case inside the domain, each with what is said if it is not."""
        longest = max(case.lengths)
        kept = [count for count, length in zip(case.accepted_counts, case.lengths, strict=True) if length]
        return (
            (longest <= self.most_tokens, f"lengths={longest}: more than {self.most_tokens} tokens a request are not supported"),
            (
                case.padded == "none" or case.padding_slot in self.padding_slots,
                f"padding_slot={case.padding_slot} is not among {', '.join(self.padding_slots) or 'any'}",
            ),
            (
                self.rule.batch_heads is None or len(case.lengths) * case.value_heads <= self.rule.batch_heads,
                f"{len(case.lengths)} requests of {case.value_heads} value heads are over batch_heads={self.rule.batch_heads}",
            ),
            (self.fresh or case.fresh == "none", f"fresh={case.fresh}: starting from zeros is not supported"),
            (self.accepts or case.accepted == "all", f"accepted={case.accepted}: keeping part of a draft is not supported"),
            (self.rejects or min(kept, default=1) > 0, "accepted=any: keeping no token of a draft is not supported"),
            (case.block_v in self.block_choices, f"block_v={case.block_v} is not among {', '.join(self.block_choices)}"),
            (
                self.empty_first or case.lengths == _empty_last(case.lengths),
                "a request without tokens before others is not supported",
            ),
            (self.trees or case.drafts == "chain", f"drafts={case.drafts} is not supported"),
            (
                case.state_dtype in self.states_of(case.dtype),
                f"state_dtype={case.state_dtype} is not among {', '.join(self.state_dtypes)}",
            ),
        )

    def states_of(self, dtype: str) -> tuple[str, ...]:
        """Return the dtypes of the pool in calls whose tokens have a dtype."""
        return tuple(dtype if name == "input" else name for name in self.state_dtypes)

    @property
    def block_choices(self) -> tuple[str, ...]:
        """The possible values of a case's block_v."""
        return ("default", *map(str, self.blocks))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the domain from the data of `to_json`."""
        return super().from_json({**data, "rule": Domain.from_json(data["rule"])})


TREE, LARGE_TREE = 16, 259  # most tokens of a drawn tree, as the oracle computes every path by itself, and of one over usual limits
_NUMBERS = 2**17  # most numbers in a pool
MANY_HEADS = 257  # just over 8 bits
MANY_BEGINS = 2060  # requests of which some begin: over two flags for each of the 1,024 threads of a block
MANY_DRAFTS = 690  # requests of three tokens
CUTS = (512, 1024, 2048)  # numbers of tokens after which a call may be cut: no request of three tokens ends there
LONG_DRAFTS, ACCEPTED = 4, (256, 128)  # requests of many tokens, of which one keeps at least so many: over 8 bits, over 7 bits
USUAL_KEYS = 128  # the most channels of a key that usual kernels take at once
WHOLE_TILES = 64  # tokens that a request keeps of a longer draft: a whole number of tiles of 16, 32 or 64
# Requests and heads. Of their programs, one for a request and a head, the first 65,535 end inside a request. They are fewer than
# two launches of 65,535, and more than two of the whole requests that fit into one: 2 * (65535 // 64) = 2046.
MANY_PROGRAMS = 2047, 64
MANY_SLOTS = (2**16, 2**15)  # slots besides those of 1,100 requests, some of which then have slots over 65,535, or over 32,767
_MOST_NUMBERS = 2**22  # most numbers in such a pool; 2^24 numbers take 4 s


def requests(chance: random.Random, domain: PoolDomain, most: int, kinds: tuple[str, ...]) -> tuple[tuple[int, ...], bool]:
    """Draw the tokens of each request, and whether requests are packed.

    A kind is "steps" (one token each), "drafts" (a few tokens), "prompts" (a few tokens each, with one longer prompt among them) or
    "crowd" (ten packed requests or more of one to three tokens, if the domain has any).
    """
    rule, most = domain.rule, min(most, domain.most_tokens)
    count = chance.choice((1, 2, 2, 3, 4, 5, 8, 9, chance.randint(6, 13)))
    packed = rule.packed and (not rule.batched or chance.random() < 1 / 2)
    kind = chance.choice(kinds)
    if kind == "crowd" and rule.packed and most > 1:
        return tuple(chance.randint(1, min(most, 3)) for _ in range(chance.randint(10, 12))), True
    if kind == "steps" or most == 1:
        drawn = [1] * count
    elif kind == "drafts" or not packed:
        longest = chance.randint(2, min(most, 8))
        drawn = [chance.randint(1, longest) if packed else longest for _ in range(count)]
        drawn[chance.randrange(count) if packed else 0] = longest
    else:
        drawn = [min(most, chance.choice((1, 1, 1, 2, 3))) for _ in range(count)]
        drawn[chance.randrange(count)] = chance.choice([n for n in (*EDGES, 16, 32, 64, 128) if n <= most])
    if packed and rule.empty and count > 1:
        drawn = [0 if chance.random() < 1 / 12 else length for length in drawn]
        drawn = drawn if domain.empty_first else [*_empty_last(drawn)]
    return tuple(drawn) if max(drawn) else (1, *drawn[1:]), packed


def _empty_last(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths with the zeros last, and otherwise in their order."""
    return tuple(sorted(lengths, key=lambda length: length == 0))


def limits(domain: PoolDomain) -> list[PoolCase]:
    """Return cases just over usual limits, cheap because they are narrow, as far as the domain allows them.

    These are over 1,024 requests of one token in a pool of over 65,535 slots; over 2,048 of which some begin; requests of so
    many heads that there are over 65,535 programs (MANY_PROGRAMS); over 2,048 tokens in over 256 requests of three, of which
    some keep few; requests of one token, of which one is rejected; requests without tokens, of which some begin; requests of
    over 128 tokens, of which one keeps so many, and of over 64, of which one keeps exactly these; trees of over 256 tokens;
    over 256 heads, with several value heads for each key head; over 256 value heads for one key head; keys of over 128
    channels, and q and k of them as small as a norm's eps; and sizes just over the numbers that the source names. There are
    none if the check draws no large cases, and on a GPU.
    """
    rule = domain.rule
    if not at_limits(domain):
        return []
    fixed = conventions(rule)
    names = {*PoolCase.WORDS} & fixed.keys() - {"operation"}
    key_dim, value_dim = min(keys_of(rule, 16)), min(values_of(rule, 16))
    value_dim = key_dim if rule.equal_widths else value_dim
    words: dict[str, Any] = {
        **{name: fixed[name] for name in names},
        "state_dtype": domain.states_of(rule.dtypes[0])[0],
        "key_dim": key_dim,
        "value_dim": value_dim,
        "packed": not rule.batched,
        "state": "random",
        "rule": rule.operation,
        "padding_slot": (domain.padding_slots or ("-1",))[0],
        "indices": domain.indices[0],
    }
    begin = "some" if domain.fresh else "none"
    few = _MOST_NUMBERS // (key_dim * value_dim) - MANY_SEQUENCES - 1
    groups = (THREE_EACH, MANY_EACH) if rule.grouped_heads else ((MANY_HEADS, MANY_HEADS),)
    cases = [
        PoolCase((1,) * MANY_SEQUENCES, spare=next((spare for spare in MANY_SLOTS if spare <= few), 0), **words),
        PoolCase((1,) * MANY_BEGINS, fresh="some", seed=2, **words),  # with seed 0 a float32 form needs 64 disturbed runs
        PoolCase((1,) * MANY_PROGRAMS[0], fresh=begin, heads=MANY_PROGRAMS[1], value_heads=MANY_PROGRAMS[1], **words),
        _cut_drafts(domain, words),
        PoolCase((1, 1, 1), accepted="any", **words),
        PoolCase((0, 0), fresh="some", free="nan", **words),
        PoolCase((1,), heads=1, value_heads=MANY_HEADS, **words),
        *(PoolCase((2,), heads=keys, value_heads=values, **words) for keys, values in groups),
        *_long_drafts(domain, words),
        *_wide_keys(domain, words),
    ]
    accepted = "some" if domain.accepts else "all"
    cases += [_large_trees(domain.most_tokens, accepted=accepted, **words)] if domain.trees and domain.most_tokens > TREE else []
    for number in named(domain):
        tokens = [min(number + more, domain.most_tokens) for more in (1, 0)]
        cases += [PoolCase((*tokens, 2), accepted=accepted, **{**words, "packed": True})]
        cases += [PoolCase((1,) * (number + 2), fresh="some", **words)] if number <= MANY_SEQUENCES else []
        most = number + 1 if number < MAX_HEADS else 1
        cases += [PoolCase((2,), heads=heads, value_heads=most, **words) for heads in (most, 1)]
    return [case for case in dict.fromkeys(cases) if domain.outside(case) is None]


def _wide_keys(domain: PoolDomain, words: dict[str, Any]) -> Iterator[PoolCase]:
    """Yield cases with keys of over 128 channels, or the most that the domain allows, and with q and k as small as a norm's eps."""
    rule = domain.rule
    widths = [
        width for width in range(1, MAX_WIDTH + 1) if rule.has_key(width) and (rule.has_value(width) or not rule.equal_widths)
    ]
    wide = next((width for width in widths if width > USUAL_KEYS), max(widths, default=0))
    if wide:
        wide_words = {**words, "key_dim": wide, "value_dim": wide if rule.equal_widths else words["value_dim"]}
        heads = 2 if rule.grouped_heads else 1
        yield PoolCase((1, 2), heads=1, value_heads=heads, **{**wide_words, "packed": True})
        if rule.qk_norm and "small" in rule.values:
            norm: dict[str, Any] = {"qk_norm": True, "qk_norm_eps": rule.qk_norm_eps[0], "qk_norm_form": rule.qk_norm_forms[0]}
            yield PoolCase((1, 1), heads=1, value_heads=heads, values="small", **norm, **wide_words)


def _long_drafts(domain: PoolDomain, words: dict[str, Any]) -> Iterator[PoolCase]:
    """Yield a case in which a request keeps more tokens than a number of 8 bits holds, or of 7 bits, and one with WHOLE_TILES."""
    least = next((least for least in ACCEPTED if least < domain.most_tokens), None)
    if least is not None and domain.accepts:
        yield _keeping(range(least, least + 3), min(domain.most_tokens, least + 2), words)
    if domain.accepts and domain.most_tokens > WHOLE_TILES:
        yield _keeping(range(WHOLE_TILES, WHOLE_TILES + 1), min(domain.most_tokens, WHOLE_TILES + 6), words)


def _cut_drafts(domain: PoolDomain, words: dict[str, Any]) -> PoolCase:
    """Return a case of requests of three tokens.

    A request with tokens on both sides of a number of CUTS keeps fewer than those before it, if the domain allows so few.
    What takes so many tokens at a time then needs the state after tokens that are not kept.
    """
    least = 0 if domain.rejects else 1
    accepted = ("any" if domain.rejects else "some") if domain.accepts else "all"
    lengths = (min(3, domain.most_tokens),) * MANY_DRAFTS
    cases = (PoolCase(lengths, accepted=accepted, seed=seed, **words) for seed in itertools.count())
    cuts = [divmod(cut, 3) for cut in CUTS] if domain.accepts and lengths[0] == 3 else []
    return next(case for case in cases if all(case.accepted_counts[request] < before for request, before in cuts if before > least))


def _keeping(counts: range, length: int, words: dict[str, Any]) -> PoolCase:
    """Return a case of LONG_DRAFTS requests of this length, of which one keeps one of these numbers of tokens."""
    cases = (PoolCase((length,) * LONG_DRAFTS, accepted="some", seed=seed, **words) for seed in itertools.count())
    return next(case for case in cases if {*counts} & {*case.accepted_counts})


def _large_trees(most_tokens: int, **words: Any) -> PoolCase:
    """Return a case of two trees, in one of which the last token follows one of the first two."""
    tokens = min(LARGE_TREE, most_tokens)
    cases = (PoolCase((tokens, tokens), drafts="tree", seed=seed, **words) for seed in itertools.count())
    return next(case for case in cases if any(row[-1] < 2 for row in case.parents))


@st.composite
def pool_cases(
    draw: st.DrawFn,
    /,
    domain: PoolDomain,
    most: int = 130,
    kinds: tuple[str, ...] = ("steps", "steps", "drafts", "prompts"),
    **fixed: Any,
) -> PoolCase:
    """Draw any case of the domain; `fixed` gives fields as a value, or as a tuple of values to choose from.

    `most` limits the tokens of a request, and `kinds` are the kinds of `requests`.
    """
    chance = draw(st.randoms(use_true_random=True))

    def field(name: str, choices: tuple[Any, ...]) -> Any:
        values = fixed.get(name, choices)
        return chance.choice(values) if isinstance(values, tuple) else values

    for name, allowed, simplest in (("gate", domain.rule.gates, "forever"), ("values", domain.rule.values, "ordinary")):
        if isinstance(fixed.get(name), tuple):
            fixed[name] = tuple(regime for regime in fixed[name] if regime in allowed) or (simplest,)

    def which(name: str, choices: tuple[str, ...]) -> str:
        values = fixed.get(name, choices)
        allowed = [
            choice for choice in (values if isinstance(values, tuple) else (values,)) if len(lengths) > 1 or choice != "some"
        ]
        chosen: str = chance.choice(allowed or ["none"])
        return chosen

    rule = domain.rule
    lengths, packed = requests(chance, domain, most, kinds)
    heads, value_heads = field(
        "groups", tuple(pair for pair in HEADS if pair[1] <= 4 and (rule.grouped_heads or pair[0] == pair[1]))
    )
    # The time of an interpreted kernel grows with its requests, heads and width.
    size = value_heads * len(lengths) * (2 if max(lengths) > 8 else 1)
    wide = chance.choice((16, 32, 64, 128)) if size <= 8 else chance.choice((16, 64)) if size <= 16 else 16
    key_dim = field("key_dim", keys_of(rule, wide))
    value_dim = field("value_dim", values_of(rule, wide))
    if rule.equal_widths or (rule.has_value(key_dim) and chance.random() < 1 / 3):
        value_dim = key_dim
    spare = field("spare", (0, 1, 1, 2, 5) if chance.random() < 7 / 8 else (chance.randint(120, 260),))
    room = _NUMBERS // (value_heads * key_dim * value_dim) - len(lengths) - 1
    kernel = _of_kernel(field, domain)
    dtype = field("dtype", rule.dtypes)
    if kernel.get("state_dtype") == "input":
        kernel["state_dtype"] = dtype
    inside = kernel.get("in_kernel", rule.in_kernel[0])
    gates = gates_of(rule, inside, kernel)
    case = PoolCase(
        lengths,
        packed=packed,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        gate=field("gate", gates),
        gate_dtype=field("gate_dtype", tuple(d for d in rule.gate_dtypes for _ in range(3 if d == "fp32" else 1))),
        beta=field("beta", tuple(b for b in BETAS if rule.doubles(inside) or b != "two")),
        values=field("values", tuple(v for v in PoolCase.CHOICES["values"] if v in rule.values and v != "one_signed")),
        state=field("state", ("zero", "random", "random", "random")),
        scale=field("scale", tuple(s for s in ("default", "default", "one", "half") if s in rule.drawn_scales)),
        qk_norm=field("qk_norm", (False, True) if rule.qk_norm else (False,)),
        offsets=field("offsets", rule.offsets) if packed else "int64",
        spare=min(spare, max(1, room)),
        free=field("free", FREE),
        padding_slot=field("padding_slot", domain.padding_slots or ("-1",)),
        padded=which("padded", ("none", "none", "some")) if domain.padding_slots else "none",
        fresh=which("fresh", ("none", "none", "some", "all")) if domain.fresh else "none",
        accepted=field("accepted", ("all", "some", "any") if domain.rejects else ("all", "some"))
        if domain.accepts and max(lengths) > 1
        else "all",
        indices=field("indices", domain.indices),
        seed=chance.randrange(2**16),
        block_v=field("block_v", domain.block_choices),  # drawn last, so that other fields do not depend on having a choice
        rule=rule.operation,
        **kernel,
        drafts=field("drafts", ("chain", "tree", "tree")) if domain.trees and 1 < max(lengths) <= TREE else "chain",
    )
    if case.call().gate_inside and rule.parameter_dtypes != ("fp32",):  # drawn last, so that other words do not depend on it
        case = dataclasses.replace(case, parameter_dtype=field("parameter_dtype", rule.parameter_dtypes))
    if case.qk_norm:
        eps, forms = rule.qk_norm_eps, rule.qk_norm_forms
        case = dataclasses.replace(
            case,
            qk_norm_eps=field("qk_norm_eps", eps) if len(eps) > 1 else eps[0],
            qk_norm_form=field("qk_norm_form", forms) if len(forms) > 1 else forms[0],
        )
    case = dataclasses.replace(case, options=draw_options(chance, domain.options))
    one_signed = "values" not in fixed and case.seed % ONE_SIGNED == 0
    return dataclasses.replace(case, values="one_signed") if one_signed else case


def _of_kernel(field: Callable[[str, tuple[Any, ...]], Any], domain: PoolDomain) -> dict[str, Any]:
    """Draw what few kernels leave open: what of gate and beta they compute, and the dtype of states."""
    rule, words = domain.rule, dict[str, Any]()
    if rule.in_kernel != ("none",):
        words["in_kernel"] = field("in_kernel", rule.in_kernel)
        words["dt_bias"] = (
            field("dt_bias", (True, True, False) if rule.dt_bias else (True,)) if words["in_kernel"] in ("gate", "both") else True
        )
    if domain.state_dtypes != ("fp32",):
        words["state_dtype"] = field("state_dtype", domain.state_dtypes)
    return words | decay_of(field, rule, words.get("in_kernel", rule.in_kernel[0]))
