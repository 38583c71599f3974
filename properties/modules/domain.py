"""The domain of modules (the other operations of a layer): what an implementation promises, and cases drawn from it."""

import dataclasses
import functools
import random
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from hypothesis import strategies as st

from properties.laws.promises import check_promises
from properties.modules.case import (
    ACTIVATIONS,
    EPS,
    MAX_CONV_WIDTH,
    MAX_WIDTH,
    VALUES,
    ModuleCase,
    words_of,
)
from properties.words.domain import (
    LARGEST,
    OFFSETS,
    AnyDomain,
    check_spans,
    check_views,
    check_whole,
    check_widths,
    inside,
)
from properties.words.lengths import MEAN, lengths, narrow
from properties.words.line import MAX_HEADS
from properties.words.names import known_fields
from properties.words.options import Options, draw_options
from properties.words.sizes import (
    AT_ONCE,
    LENGTHS,
    MANY_SEQUENCES,
    MOST_TOKENS,
    ONE_BY_ONE,
    ONE_OF_THREE,
    at_limits,
    coarsest,
    kind_of,
    large_lengths,
    named,
)
from properties.words.word import flag, one_of, some_of

CONV, GATES, NORMS = ("causal_conv1d",), ("gdn_gate", "kda_gate"), ("l2norm", "gated_rms_norm", "norm_gate_linear")
CHANNELS = (16, 1, 3, 8, 33, 64, 20, 100, 130, 257)
WIDTHS = (16, 8, 1, 32, 7, 24, 64, 100, 128, 256, 520, 1000)
HEADS = (1, 2, 3, 4, 8)
ROWS, LONG = MOST_TOKENS, 1024  # tokens of the case at a limit, and the least that its sequences may have
MANY_CHANNELS, MANY_HEADS = 12_289, 513  # of a convolution: just over those of released models; of gates and norms
ODD_STARTS = (4098, 5, 6, 61_500, 7, 8)  # of a convolution: the last of these begin at 65,609 and at 65,616
LONG_STREAM = 2**19 + 15  # tokens of a convolution whose numbers are whole: over 65,535 tiles of 8 tokens
OVER_TILES = (193, 385, 641, 769, 1025)  # tokens: the last tile of 32, 64, 96, 128, 160, 192, 256, 320, 384 or 512 has one of them
UNEVEN = (515, 8195)  # channels of norms and of KDA's gates: just over usual blocks, and no multiples of 4
# Two sizes that are large at the same time: tokens, with heads or with channels of a norm; and for a convolution tokens in packed
# sequences that begin inside tiles of 64, with channels.
TOKENS, HEADS_OF_TOKENS, CHANNELS_OF_TOKENS, STARTS_IN_TILES = 130, 65, 257, (30, 98, 5)
PARAMETER_ROWS = 5  # heads of a gate of 8,195 channels: its parameter has over 32,768 numbers
ONE_SIGNED = 10  # one case in so many has values of one sign


@known_fields
@dataclasses.dataclass(frozen=True)
class ModuleDomain(AnyDomain):
    """The calls for which an implementation of a module promises right results; by default all calls of its operation.

    Fields that Domain has too mean the same. ValueError for a field outside its choices or range, and unless `packed` or `batched`
    is True.
    """

    CASE = ModuleCase
    draws_large = True

    operation: str = "causal_conv1d"
    dtypes: Annotated[tuple[str, ...], some_of("dtype")] = ("fp32", "bf16", "fp16")
    widths: tuple[int, int] = (1, MAX_WIDTH)
    """The least and the largest D, K or V, and also E, in steps of `width_step`."""
    width_step: int = 1
    conv_widths: Annotated[tuple[int, ...], some_of("conv_width")] = (4, 2, 3, 1, 5, 8)
    activations: Annotated[tuple[str, ...], some_of("activation")] = ACTIVATIONS
    bias: Annotated[bool, flag("bias")] = True
    without_weight: Annotated[bool, flag("weight", value=False)] = True
    """Whether it can do without a weight."""
    without_dt_bias: Annotated[bool, flag("dt_bias", value=False)] = True
    """Whether it can do without a dt_bias."""
    beta: Annotated[bool, flag("beta")] = True
    """Whether it computes beta beside the gate."""
    negative_eigenvalues: Annotated[bool, flag("allow_neg_eigval")] = True
    eps: Annotated[tuple[str, ...], some_of("eps")] = tuple(EPS)
    packed: Annotated[bool, flag("packed")] = True
    batched: Annotated[bool, flag("packed", value=False)] = True
    empty: bool = True
    longest: int = 2**20
    """The most tokens of a sequence."""
    initial_state: bool = True
    final_state: bool = True
    """Whether it returns a final state."""
    state_columns: Annotated[str, one_of("state_columns")] = "W"
    """How many columns a convolution's states have: "W", or "W-1" without the oldest, which no output reads."""
    attention_mask: bool = False
    """Whether a mask can exclude padding at the start of a batch's rows."""
    views: bool | tuple[str, ...] = True
    deterministic: bool = True
    position_independent: bool = False
    """Whether a token, head, channel or sequence gets the same bits wherever it stands."""
    backward: Annotated[bool, flag("backward")] = True
    refills: bool = True
    threads: bool = True
    streams: bool = True
    keeps_outputs: bool = True
    residuals: Annotated[tuple[str, ...], some_of("residual")] = ("none",)
    """Whether it adds a residual, and whether a norm can return the sum too."""
    gatings: Annotated[tuple[str, ...], some_of("gating")] = ("silu",)
    """The functions of a norm's gate."""
    lower_bounds: Annotated[tuple[str, ...], some_of("lower_bound")] = ("none",)
    parameter_dtypes: Annotated[tuple[str, ...], some_of("parameter_dtype")] = ("fp32",)
    options: Options = ()
    exact_options: tuple[str, ...] = ()
    largest_values: str = "great"
    """The regime with the largest values that it takes (LARGEST)."""
    fixed_widths: tuple[int, ...] = ()
    """The only widths; if there are any, they replace `widths`."""
    offsets: Annotated[tuple[str, ...], some_of("offsets")] = OFFSETS
    nothing: bool = True
    """Whether there may be calls without any token."""
    split_invariant: bool = False
    """Whether a call in two parts gives the bits of one call, gradients included."""
    packed_equals_dense: bool = False
    """Whether a sequence gets the same bits packed with others and as a batch of one."""
    absent_state_equals_zeros: bool = False
    """Whether a call without an initial state gives the bits of a call with zeros."""
    decode_equals_prefill: bool = False
    """Whether a prompt and then single tokens give the bits of one call."""

    def __post_init__(self) -> None:
        self.check_fields()
        check_views(self)
        if self.largest_values not in LARGEST:
            raise ValueError(f"largest_values must be one of {', '.join(LARGEST)}, got {self.largest_values!r}")
        if "returned" in self.residuals and self.operation != "gated_rms_norm":
            raise ValueError(f"residuals must be none or added for {self.operation}, got {', '.join(self.residuals)}")
        check_spans(self, "widths", most=MAX_WIDTH)
        check_widths("fixed_widths", self.fixed_widths, "widths", self.widths == ModuleDomain.widths and self.width_step == 1)
        check_whole("conv_widths", self.conv_widths, MAX_CONV_WIDTH)
        if not isinstance(self.longest, int) or self.longest < 1:
            raise ValueError(f"longest must be at least 1, got {self.longest!r}")
        self._check_promises()
        if not self.batched and "packed" not in words_of(self.operation):
            raise ValueError(f"batched must be True for {self.operation}, which has no packed sequences, got False")

    def _check_promises(self) -> None:
        """Raise ValueError for a promise that no law judges."""
        flags = ("initial_state", "final_state", "batched", "packed")
        lacks = [f"operation={self.operation}"] if self.operation not in CONV else []
        lacks += [f"{name}=False" for name in flags if not getattr(self, name)] + ["longest=1"] * (self.longest == 1)
        needs = {
            "split_invariant": {"packed=False", "batched=False"},
            "packed_equals_dense": {"longest=1"},
            "absent_state_equals_zeros": {"packed=False", "batched=False", "final_state=False", "longest=1"},
            "decode_equals_prefill": {"packed=False"},
        }
        check_promises(self, {name: next((lack for lack in lacks if lack not in free), "") for name, free in needs.items()})

    @property
    def values(self) -> tuple[str, ...]:
        """The regimes of values with no larger numbers."""
        return tuple(values for values in VALUES if values not in LARGEST[LARGEST.index(self.largest_values) + 1 :])

    @property
    def packs(self) -> bool:
        return self.packed and self.operation in CONV

    @property
    def carries(self) -> bool:
        return self.initial_state and self.operation in CONV

    def has_width(self, width: int) -> bool:
        """Whether the width may be this one."""
        return width in self.fixed_widths if self.fixed_widths else inside(width, self.widths, self.width_step)

    def reasons(self, case: Any) -> Iterable[tuple[bool, str]]:
        """Return what else must be true of a case inside the domain, each with what is said if it is not."""
        least, most = self.widths
        steps = f" in steps of {self.width_step}" if self.width_step > 1 else ""
        widths = f"among {', '.join(map(str, self.fixed_widths))}" if self.fixed_widths else f"in {least}..{most}{steps}"
        words = words_of(self.operation)
        return (
            *(
                (name not in words or self.has_width(width), f"{name}={width} is not {widths}")
                for name, width in (("width", case.width), ("out_width", case.out_width))
            ),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (self.nothing or sum(case.lengths) > 0, "a call without tokens is not supported"),
            (max(case.lengths) <= self.longest, f"lengths={max(case.lengths)}: more than {self.longest} tokens are not supported"),
            (case.values in self.values, f"values={case.values}: numbers are no larger than those of values={self.largest_values}"),
            (self.initial_state or case.state == "none", f"state={case.state}: an initial state is not supported"),
            (
                "final_state" not in words or self.final_state or not case.final_state,
                "final_state=yes: a final state is not returned",
            ),
        )

    @property
    def rare_words(self) -> dict[str, tuple[str, ...]]:
        """The words of cases for which few domains allow several values, with these values, the usual one first."""
        return {
            "residual": self.residuals,
            "gating": self.gatings,
            "lower_bound": self.lower_bounds,
            "parameter_dtype": self.parameter_dtypes,
        }


def limits(domain: ModuleDomain) -> list[ModuleCase]:
    """Return cases just over usual limits, cheap because they are narrow or short, as far as the domain allows them.

    In plain torch there are over 65,535 tokens, which are over 131,071 rows of a norm with heads, and sequences of a
    convolution that begin at even and odd places behind token 4,096 and behind token 65,535. A convolution has over 1,024
    packed sequences with states in bf16, as many rows of a batch, four sequences whose first and last length are the mean of
    all, one token, and three, between sequences of no tokens, states of zeros beside others, and over 12,288 channels, or as
    many as it takes; in plain torch also sequences of one token over multiples of 64 to 1,024. Gates and norms have over 512
    heads, and over 512 and over 8,192 channels in numbers that are no multiples of 4, or as many as they take. Those of over
    8,192 channels have five heads, and a residual that is returned if the domain has that, and a norm's have sums of squares
    over the range of fp16 too. Those of over 512 channels have numbers as small as a norm's eps too. Over 128 tokens come with
    over 64 heads, and with over 256 channels. Gradients of parameters in 16 bits are sums over 65,535 tokens. Further cases are
    just over the numbers that the source names. There are none if the check draws no long cases, or if kernels are compiled.
    """
    if not at_limits(domain):
        return []
    every, narrow, case = words_of(domain.operation), min(widths_of(domain, ROWS)), functools.partial(_narrow_case, domain)
    cases = []
    if domain.drawing.quick and domain.longest >= LONG:
        longest = min(domain.longest, ROWS)
        cases += [case(*[longest] * -(-ROWS // longest), heads=2 if domain.operation in NORMS else 1)]
        cases += [case(*(min(length, domain.longest) for length in ODD_STARTS), packed=True)] if "packed" in every else []
        rough, input_dtype = coarsest(domain.dtypes), "input" in domain.parameter_dtypes
        if domain.backward and rough != "fp32" and (input_dtype or domain.operation not in GATES):
            parameters: dict[str, Any] = {"parameter_dtype": "input"} if input_dtype else {}
            cases += [case(*[longest] * -(-ROWS // longest), dtype=rough, values="growing", **parameters)]
    regimes = ("ordinary", "small") if domain.operation in NORMS else ("ordinary",)  # a norm's eps counts in small numbers
    few, unequal = min(3, domain.longest), [min(place % 3 + 1, domain.longest) for place in range(MANY_SEQUENCES)]
    if domain.operation in CONV:
        cases += [
            case(min(5, domain.longest), width=_width_from(domain, MANY_CHANNELS)),
            case(*unequal, packed=True, dtype=coarsest(domain.dtypes)),
            case(*MEAN, packed=True),
            case(
                *(min(length, domain.longest) for length in STARTS_IN_TILES),
                packed=True,
                width=_width_from(domain, CHANNELS_OF_TOKENS),
            ),
            *(case(0, tokens, 0, packed=True) for tokens in ONE_OF_THREE),
            *(case(few, 1, few, packed=True, state="some", seed=seed) for seed in (0, 1) if domain.initial_state),
            case(*(1,) * MANY_SEQUENCES, packed=False, backward=False),
        ]
        if domain.drawing.quick:
            over = [min(length, domain.longest) for length in OVER_TILES]
            cases += [case(*over, packed=True, conv_width=max(domain.conv_widths))]
    elif "width" in every:
        wide = [_width_from(domain, least) for least in UNEVEN]
        cases += [case(few, width=wide[0], out_width=wide[0], values=regime) for regime in regimes]
        cases += [case(min(TOKENS, domain.longest), width=_width_from(domain, CHANNELS_OF_TOKENS), out_width=narrow)]
        cases += [case(few, width=wide[1], out_width=narrow, heads=PARAMETER_ROWS, residual=domain.residuals[-1])]
        if domain.operation in NORMS and {"fp16", "large"} <= {*domain.dtypes, *domain.values}:
            cases += [case(few, width=wide[1], out_width=narrow, dtype="fp16", values="large")]
    if "heads" in every:
        cases += [case(few, heads=MANY_HEADS), case(min(TOKENS, domain.longest), heads=HEADS_OF_TOKENS)]
    for number in named(domain):
        tokens = [min(number + more, domain.longest) for more in (1, 0)]
        cases += [case(*tokens, few, packed=True)] if "packed" in every else [case(tokens[0])]
        if domain.operation in CONV and number <= MANY_SEQUENCES:
            cases += [case(*(1,) * (number + 2), packed=packed) for packed in (True, False)]
        cases += [case(few, width=_width_from(domain, number + 1), values=regime) for regime in regimes] if "width" in every else []
        cases += [case(few, heads=number + 1)] if "heads" in every and number < MAX_HEADS else []
    return [case for case in dict.fromkeys(cases) if domain.outside(case) is None]


def exact_limits(domain: ModuleDomain) -> list[ModuleCase]:
    """Return the cases of the law `whole` in plain torch: over 524,288 tokens, and over 2,048 or 65,535 sequences of one."""
    if not (at_limits(domain) and domain.drawing.quick):
        return []
    words: dict[str, Any] = {"activation": "none", "values": "whole", "backward": False}
    cases = [_narrow_case(domain, LONG_STREAM, **words)]
    cases += [_narrow_case(domain, *(1,) * count, **words, packed=True) for count in (ONE_BY_ONE, AT_ONCE)]
    return [case for case in cases if domain.outside(case) is None]


def _narrow_case(domain: ModuleDomain, *lengths: int, packed: bool | None = None, **words: Any) -> ModuleCase:
    """Return a case of the fewest channels, with states and a bias if the domain has them; `words` replace those of the domain."""
    packed, narrow = not domain.batched if packed is None else packed, min(widths_of(domain, ROWS))
    words = {
        **{name: values[0] for name, values in domain.rare_words.items()},
        "width": narrow,
        "out_width": narrow,
        "conv_width": min(domain.conv_widths, key=lambda width: (width < 2, width)),
        "activation": domain.activations[0],
        "bias": domain.bias,
        "state": "random" if domain.initial_state else "none",
        "final_state": domain.final_state,
        "state_columns": domain.state_columns,
        "oldest": domain.state_columns != "W",  # some kernels drop the cotangent of a column that no output reads
        "eps": domain.eps[0],
        "beta": domain.beta,
        "dtype": domain.dtypes[0],
        "backward": domain.backward,
        "packed": packed,
        "offsets": domain.offsets[0] if packed else "int64",
        **words,
    }
    others = {name for name, known in ModuleCase.WORDS.items() if known.of and domain.operation not in known.of}
    return ModuleCase(lengths, domain.operation, **{name: value for name, value in words.items() if name not in others})


def _width_from(domain: ModuleDomain, least: int) -> int:
    """Return the least width of at least `least` that the domain allows, or its largest."""
    allowed = [width for width in range(1, MAX_WIDTH + 1) if domain.has_width(width)]
    return next((width for width in allowed if width >= least), max(allowed))


@st.composite
def module_cases(
    draw: st.DrawFn,
    /,
    domain: ModuleDomain,
    sequences: tuple[int, int] = (1, 4),
    longest: int = 150,
    total: int = 260,
    **fixed: Any,
) -> ModuleCase:
    """Draw any case of the domain; `fixed` gives fields as a value, or as a tuple of values to choose from."""
    chance = draw(st.randoms(use_true_random=True))
    words = words_of(domain.operation)
    if isinstance(fixed.get("values"), tuple):
        fixed["values"] = tuple(regime for regime in fixed["values"] if regime in domain.values) or ("ordinary",)

    def field(name: str, choices: Sequence[Any]) -> Any:
        options = fixed.get(name, tuple(choices))
        return chance.choice(options) if isinstance(options, tuple) else options

    kinds = (*LENGTHS, "sequences") if sequences[1] >= 3 else LENGTHS
    large = kind_of(domain.drawing.large, min(domain.drawing.long, domain.longest), longest, kinds)
    heads = field("heads", HEADS[: 1 if large else None]) if "heads" in words else 1
    total = max(1, total // max(1, heads // 2))
    longest = min(longest, total, domain.longest)
    can = [choice for choice, may in ((True, domain.packed), (False, domain.batched)) if may]
    packed = "packed" in words and field("packed", can)
    if large:
        most = min(domain.drawing.long, domain.longest)
        sizes = large_lengths(chance, large, sequences, most, 64, packed=packed, empty=domain.empty)
    else:
        sizes = _lengths(chance, domain, sequences, longest, total, packed=packed)
    values: dict[str, Any] = {}
    for name, choices in (
        ("width", widths_of(domain, sum(sizes) * heads)),
        ("conv_width", domain.conv_widths),
        ("activation", domain.activations),
        ("bias", (False, True) if domain.bias else (False,)),
        ("weight", (True, True, False) if domain.without_weight else (True,)),
        ("state", ("none", "zero", "some", "random", "random") if domain.initial_state else ("none",)),
        ("final_state", (True, True, True, False) if domain.final_state else (False,)),
        ("oldest", (False,)),
        ("eps", domain.eps),
        ("dt_bias", (True, True, False) if domain.without_dt_bias else (True,)),
        ("beta", (domain.beta,)),
        ("allow_neg_eigval", (False, True) if domain.negative_eigenvalues and domain.beta else (False,)),
        ("offsets", domain.offsets if packed else ("int64",)),
    ):
        if name in words:
            values[name] = field(name, choices)
    if "out_width" in words:
        values["out_width"] = field("out_width", widths_of(domain, max(values["width"], sum(sizes))))
    if "state_columns" in words and domain.state_columns == "W-1":
        values |= {"state_columns": "W-1", "oldest": True}  # there is no column that no output reads
        if chance.random() < 1 / 4:
            sizes = _near(chance, domain, sizes, values["conv_width"], longest, packed=packed)
    if not domain.nothing and not sum(sizes):
        sizes = (1, *sizes[1:]) if packed else (1,) * len(sizes)
    dtype = field("dtype", domain.dtypes)
    regime = field("values", tuple(choice for choice in domain.values if choice not in ("whole", "one_signed", "growing")))
    case = ModuleCase(
        sizes,
        domain.operation,
        packed=packed,
        heads=heads,
        dtype=dtype,
        values=regime,
        backward=domain.backward and field("backward", (True,)),
        seed=chance.randrange(2**16),
        **values,
    )
    rare = {  # drawn last, so that other words do not depend on them
        name: field(name, choices)
        for name, choices in domain.rare_words.items()
        if name in words and (len(choices) > 1 or choices[0] != getattr(case, name))
    }
    case = dataclasses.replace(case, **rare, options=draw_options(chance, domain.options))
    one_signed = fixed.get("values", domain.values) == domain.values and case.seed % ONE_SIGNED == 0
    return dataclasses.replace(case, values="one_signed") if one_signed else case


def _lengths(
    chance: random.Random, domain: ModuleDomain, sequences: tuple[int, int], longest: int, total: int, *, packed: bool
) -> tuple[int, ...]:
    """Return lengths around block sizes; for a convolution, one time in three, lengths near its width."""
    near = "conv_width" in words_of(domain.operation) and chance.random() < 1 / 3
    few = min(longest, max(domain.conv_widths) + 1 if near else longest)
    if packed:
        return lengths(chance, sequences, few, total, empty=domain.empty, many=sequences[1] >= 4)
    rows = chance.randint(sequences[0], max(sequences[0], min(3, sequences[1])))
    none = domain.empty and chance.random() < 1 / 5  # times one in ten in `lengths`: one batch in fifty has no tokens
    return lengths(chance, (1, 1), max(1, min(few, total // rows)), max(1, total // rows), empty=none, many=False) * rows


def _near(
    chance: random.Random, domain: ModuleDomain, sizes: tuple[int, ...], taps: int, longest: int, *, packed: bool
) -> tuple[int, ...]:
    """Return as many lengths as `sizes` has, next to the number of columns of a state: 1, W - 1, W or W + 1."""
    choices = [min(max(length, 0 if domain.empty else 1), longest) for length in (1, taps - 1, taps, taps + 1)]
    if packed:
        return tuple(chance.choice(choices) for _ in sizes)
    return (chance.choice(choices),) * len(sizes)


def widths_of(domain: ModuleDomain, rows: int) -> tuple[int, ...]:
    """Return the widths that the domain allows; wide ones only if there are few rows."""
    (least, most), step = domain.widths, domain.width_step
    wide = 2**14 // max(rows, 1)
    if domain.fixed_widths:
        return narrow(domain.fixed_widths, wide)
    every = CHANNELS if domain.operation in CONV else WIDTHS
    allowed = [width for width in every if least <= width <= most and width % step == 0] or [-(-least // step) * step]
    return narrow(tuple(allowed), wide)
