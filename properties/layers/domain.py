"""The domain of whole layers, and cases drawn from it."""

import dataclasses
import random
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from hypothesis import strategies as st

from properties.laws.promises import check_promises
from properties.layers.case import EPS, VALUES, LayerCase
from properties.modules.case import MAX_CONV_WIDTH
from properties.paths.case import LAYER_GATES, MOST_WIDTH
from properties.rules.case import check_gradients, overflows
from properties.rules.drawing import HEADS
from properties.words.domain import OFFSETS, AnyDomain, check_views, check_whole
from properties.words.lengths import MEAN, lengths
from properties.words.names import known_fields
from properties.words.options import Options, draw_options
from properties.words.sizes import FEW_HEADS, LENGTHS, MANY_EACH, ONE_OF_THREE, at_limits, coarsest, kind_of, large_lengths, named
from properties.words.word import flag, some_of

ORDINARY = 32  # a case with wider keys takes several times as long
ONE_SIGNED = 10  # one case in so many has hidden states of one sign
MANY_HEADS, MANY_SEQUENCES = 257, 259  # just over 8 bits; bf16 has not every number of the last sequences
DECODE_HEADS = 17  # of a batch of single tokens: just over 16
LONG, MANY_ROWS = 2048, 1100  # the most tokens and rows just over a number that the source names: 1,100 rows take 1.8 s
WIDE, SEVERAL_CHUNKS = 1 / 5, 1 / 4  # the shares of cases with wider keys, and of small batches that are longer than a chunk


@known_fields
@dataclasses.dataclass(frozen=True)
class LayerDomain(AnyDomain):
    """The calls for which a layer promises right results; by default all calls.

    Fields that Domain has too mean the same. ValueError for a field outside its choices, and unless `packed` or `batched` is True.
    """

    CASE = LayerCase
    draws_large = True

    operation: str = "gdn_layer"
    dtypes: Annotated[tuple[str, ...], some_of("dtype")] = ("fp32", "bf16", "fp16")
    widths: tuple[int, ...] = (8, 16, 4, 12, 32, 128, 64, 72, 160, 200)
    """The widths that keys, values and hidden states may have."""
    equal_widths: bool = False
    grouped_heads: bool = True
    packed: Annotated[bool, flag("packed")] = True
    batched: Annotated[bool, flag("packed", value=False)] = True
    empty: bool = True
    """Whether there may be sequences without tokens."""
    nothing: bool = True
    """Whether there may be calls without any token."""
    conv_widths: Annotated[tuple[int, ...], some_of("conv_width")] = (4, 2, 3)
    conv_bias: Annotated[bool, flag("conv_bias")] = True
    negative_eigenvalues: Annotated[bool, flag("allow_neg_eigval")] = True
    strong_decays: Annotated[bool, flag("gate", value="strong")] = True
    """Whether a token may decay the state by e^-3 to e^-60."""
    eps: Annotated[tuple[str, ...], some_of("eps")] = EPS
    """The eps that the norm may have."""
    offsets: Annotated[tuple[str, ...], some_of("offsets")] = OFFSETS
    caches: Annotated[bool, flag("cached")] = True
    """Whether states go in and come out."""
    state_gradients: bool = True
    """Whether gradients flow through the states."""
    attention_mask: bool = True
    """Whether a mask can exclude padding at the start of a batch's rows."""
    right_padding: bool = False
    """Whether such a mask can exclude padding at the end of rows too. Final states are those of the last token before it."""
    padded_states: bool = False
    """Whether a call with such a mask may have initial states, which go on with the first token that is no padding."""
    views: bool | tuple[str, ...] = True
    """Whether hidden states and offsets may be non-contiguous, or the kinds of strides that they may have (VIEWS)."""
    deterministic: bool = True
    backward: Annotated[bool, flag("backward")] = True
    refills: bool = True
    threads: bool = True
    streams: bool = True
    keeps_outputs: bool = True
    gatings: Annotated[tuple[str, ...], some_of("gating")] = ("silu",)
    """The functions of the norm's gate."""
    lower_bounds: Annotated[tuple[str, ...], some_of("lower_bound")] = ("none",)
    """The lower bounds of a KDA layer's log-decay."""
    parameter_dtypes: Annotated[tuple[str, ...], some_of("parameter_dtype")] = ("fp32",)
    qk_norm_eps: Annotated[tuple[str, ...], some_of("qk_norm_eps")] = ("1e-6",)
    """The eps of its norm of q and k."""
    qk_norm_forms: Annotated[tuple[str, ...], some_of("qk_norm_form")] = ("inside",)
    options: Options = ()
    split_invariant: bool = False
    """Whether a call in two parts gives the bits of one call."""
    packed_equals_dense: bool = False
    """Whether a sequence gets the same bits packed with others and as a batch of one."""
    decode_equals_prefill: bool = False
    """Whether a prompt and then single tokens give the bits of one call."""

    def __post_init__(self) -> None:
        self.check_fields()
        check_views(self)
        if self.operation == "kda_layer" and self.gatings != ("silu",):
            raise ValueError(f"gatings must be left out for kda_layer, whose norm's gate is a sigmoid, got {self.gatings!r}")
        if self.operation != "kda_layer" and self.lower_bounds != ("none",):
            raise ValueError(f"lower_bounds must be none for {self.operation}, got {', '.join(self.lower_bounds)}")
        check_gradients(self)
        batched = "" if self.batched else "batched=False"
        carries = batched or ("" if self.caches else "caches=False")
        packed = batched or ("" if self.packed else "packed=False")
        check_promises(self, {"split_invariant": carries, "packed_equals_dense": packed, "decode_equals_prefill": carries})
        check_whole("widths", self.widths, MOST_WIDTH)
        check_whole("conv_widths", self.conv_widths, MAX_CONV_WIDTH)

    @property
    def carries(self) -> bool:
        return self.caches

    def reasons(self, case: Any) -> Iterable[tuple[bool, str]]:
        """Return what else must be true of a case inside the domain, each with what is said if it is not."""
        return (
            (not self.equal_widths or case.key_dim == case.value_dim, "key_dim and value_dim must be equal"),
            (self.grouped_heads or case.heads == case.value_heads, "heads and value_heads must be equal"),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (self.nothing or case.tokens > 0, "a call without tokens is not supported"),
            (self.state_gradients or not (case.cached and case.backward), "backward=yes with cached=yes is not supported"),
        )


def limits(domain: LayerDomain) -> list[LayerCase]:
    """Return cases just over usual limits, cheap because they are narrow or short, as far as the domain allows them.

    These are over 256 heads, if possible with 17 value heads for each key head; over 256 sequences in bf16, packed and as a
    batch; packed ones whose first and last length are the mean of all; one token, and three, between sequences of no tokens;
    states of zeros beside others; two rows of one token with 17 heads; and sizes just over the numbers that the source names.
    There are none if the check draws no long cases, and on a GPU.
    """
    if not at_limits(domain):
        return []
    narrow, cached = min(domain.widths), domain.caches
    words: dict[str, Any] = {
        "key_dim": narrow,
        "value_dim": narrow,
        "hidden": narrow,
        "conv_width": min(domain.conv_widths, key=lambda width: (width < 2, width)),
        "cached": cached,
        "state": "random" if cached else "none",
        "eps": domain.eps[0],
        "gating": domain.gatings[0],
        "lower_bound": domain.lower_bounds[0],
        "parameter_dtype": domain.parameter_dtypes[0],
        "qk_norm_eps": domain.qk_norm_eps[0],
        "qk_norm_form": domain.qk_norm_forms[0],
        "backward": domain.backward and not (cached and not domain.state_gradients),
    }

    def case(
        *lengths: int, heads: int = 1, group: int = 1, packed: bool = not domain.batched, dtype: str = domain.dtypes[0]
    ) -> LayerCase:
        offsets = domain.offsets[0] if packed else "int64"
        options = {"packed": packed, "heads": heads, "value_heads": group * heads, "offsets": offsets, "dtype": dtype, **words}
        return LayerCase(lengths, domain.operation, **options)

    many, coarse = (1,) * MANY_SEQUENCES, coarsest(domain.dtypes)
    cases = [
        case(3, heads=MANY_EACH[0], group=MANY_EACH[1] // MANY_EACH[0]) if domain.grouped_heads else case(3, heads=MANY_HEADS),
        case(*many, packed=True, dtype=coarse),
        case(*many, packed=False, dtype=coarse),
        case(*MEAN, packed=True),
        *(case(0, tokens, 0, packed=True) for tokens in ONE_OF_THREE),
        case(1, 1, heads=DECODE_HEADS),
        *(dataclasses.replace(case(3, 1, 3, packed=True), state="some", seed=seed) for seed in (0, 1) if cached),
    ]
    for number in named(domain):
        cases += [case(number + 1, number, 3, packed=True), case(number + 1)] if number <= LONG else []
        cases += [case(*(1,) * (number + 2), packed=packed) for packed in (True, False)] if number <= MANY_ROWS else []
        cases += [case(3, heads=number + 1)] if number <= MANY_HEADS else []
    return [case for case in dict.fromkeys(cases) if domain.outside(case) is None]


@st.composite
def layer_cases(
    draw: st.DrawFn,
    /,
    domain: LayerDomain,
    sequences: tuple[int, int] = (1, 3),
    longest: int = 70,
    total: int = 100,
    **fixed: Any,
) -> LayerCase:
    """Draw any case of the domain; `fixed` gives fields as a value, or as a tuple of values to choose from."""
    chance: random.Random = draw(st.randoms(use_true_random=True))

    def field(name: str, choices: tuple[Any, ...]) -> Any:
        options = fixed.get(name, choices)
        return chance.choice(options) if isinstance(options, tuple) else options

    packed = field("packed", tuple(choice for choice, can in ((True, domain.packed), (False, domain.batched)) if can))
    large = kind_of(domain.drawing.large, domain.drawing.long, longest, (*LENGTHS, "sequences") if sequences[1] >= 3 else LENGTHS)
    if large:
        sizes = large_lengths(
            chance, large, sequences, domain.drawing.long, domain.drawing.chunk, packed=packed, empty=domain.empty
        )
    elif packed:
        sizes = lengths(chance, sequences, longest, total, empty=domain.empty, many=sequences[1] >= 3)
    else:
        rows = chance.randint(*sequences)
        sizes = lengths(chance, (1, 1), min(longest, total // rows), total // rows, empty=False, many=False) * rows
    if not domain.nothing and not sum(sizes):
        sizes = (1, *sizes[1:])
    heads, value_heads = field(
        "groups",
        tuple(pair for pair in (FEW_HEADS if large else HEADS) if pair[1] <= 4 and (domain.grouped_heads or pair[0] == pair[1])),
    )
    ordinary = tuple(width for width in domain.widths if width <= ORDINARY) or domain.widths
    key_dim = field("key_dim", ordinary)
    same = domain.equal_widths or chance.random() < 1 / 3  # with equal widths a transposed state raises no shape error
    cached = domain.caches and field("cached", (False, False, True))
    case = LayerCase(
        sizes,
        domain.operation,
        packed=packed,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=key_dim if same else field("value_dim", ordinary),
        hidden=field("hidden", ordinary),
        conv_width=field("conv_width", domain.conv_widths),
        conv_bias=domain.conv_bias and field("conv_bias", (False, True)),
        dtype=field("dtype", domain.dtypes),
        gate=field("gate", (*LAYER_GATES, *LAYER_GATES, "strong") if domain.strong_decays else LAYER_GATES),
        values=field("values", tuple(choice for choice in VALUES if choice != "one_signed")),
        cached=cached,
        state=field("state", ("none", "none", "zero", "some", "random", "random")) if cached else "none",
        eps=field("eps", domain.eps),
        allow_neg_eigval=domain.negative_eigenvalues and field("allow_neg_eigval", (False, False, True)),
        offsets=field("offsets", domain.offsets) if packed else "int64",
        backward=domain.backward and (not cached or domain.state_gradients) and field("backward", (True,)),
        seed=chance.randrange(2**16),
    )
    case = case if large else _of_models(chance, domain, case, longest, fixed)
    rare = {
        "gating": domain.gatings,
        "parameter_dtype": domain.parameter_dtypes,
        "lower_bound": domain.lower_bounds,
        "qk_norm_eps": domain.qk_norm_eps,
        "qk_norm_form": domain.qk_norm_forms,
    }  # drawn last, as other words came before them
    words = {name: field(name, values) for name, values in rare.items() if values != (getattr(case, name),)}
    if case.dtype == "fp16" and overflows(words.get("qk_norm_eps", "1e-6"), words.get("qk_norm_form", "inside")):
        words["backward"] = False
    case = dataclasses.replace(case, **words, options=draw_options(chance, domain.options))
    if "values" not in fixed and case.seed % ONE_SIGNED == 0:
        case = dataclasses.replace(case, values="one_signed")
    return dataclasses.replace(case, values="ordinary") if _overflows(case) else case


def _overflows(case: LayerCase) -> bool:
    """Whether gradients of hidden states may be over 65504, the greatest number in fp16.

    The gradient of a token of zeros passes the roots of two norms, each of which multiplies it by 1000. A silu, as the gate of the
    second norm, is zero there, but a sigmoid is not.
    """
    opens = case.operation == "kda_layer" or case.gating == "sigmoid"
    return opens and case.dtype == "fp16" and case.values == "zero_rows" and case.backward


def _of_models(chance: random.Random, domain: LayerDomain, case: LayerCase, longest: int, fixed: Mapping[str, Any]) -> LayerCase:
    """Return the case, sometimes with wide keys and any values and hidden states, or with sequences of more than one chunk.

    The words before are drawn already, and do not depend on these.
    """
    words: dict[str, Any] = {}
    wide = tuple(width for width in domain.widths if width > ORDINARY)
    if wide and not fixed.keys() & {"key_dim", "value_dim", "hidden"} and chance.random() < WIDE:
        words["key_dim"] = chance.choice(wide)
        same = domain.equal_widths or chance.random() < 1 / 3
        words["value_dim"] = words["key_dim"] if same else chance.choice(domain.widths)
        words["hidden"] = chance.choice(domain.widths)
    rows = len(case.lengths)
    if not case.packed and rows <= 2 and longest > domain.drawing.chunk and chance.random() < SEVERAL_CHUNKS:
        words["lengths"] = (chance.randint(domain.drawing.chunk + 1, longest),) * rows
    return dataclasses.replace(case, **words)
