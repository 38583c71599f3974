"""The domain of whole layers, and cases drawn from it."""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from oracles.norm import GATINGS
from properties.layers.case import EPS, LAYERS, VALUES, LayerCase
from properties.modules.case import MAX_CONV_WIDTH
from properties.paths.case import GATES, MOST_WIDTH
from properties.rules.case import PARAMETER_DTYPES
from properties.rules.drawing import HEADS
from properties.rules.numbers import LOWER_BOUNDS
from properties.words.domain import check_sizes, check_tuples, check_whole
from properties.words.lengths import lengths
from properties.words.names import known_fields
from properties.words.options import Options, check_options, draw_options, frozen_options, outside_options
from properties.words.sizes import FEW_HEADS, LENGTHS, kind_of, large_lengths

ORDINARY = 32  # a case with wider keys takes several times as long
WIDE, SEVERAL_CHUNKS = 1 / 5, 1 / 4  # the shares of cases with wider keys, and of small batches that are longer than a chunk


@known_fields
@dataclasses.dataclass(frozen=True)
class LayerDomain:
    """The calls for which a layer promises right results; by default all calls.

    `widths` are the possible widths of keys, values and hidden states, and `eps` the possible eps of the norm. `empty` says whether
    sequences without tokens are supported, and `nothing` whether calls without any token are. `caches` says whether states go in
    and come out, and `state_gradients` whether gradients flow through them. `attention_mask` says whether a mask can exclude
    padding at the start of a batch's rows. `views` says whether hidden states may be non-contiguous, and `deterministic` whether a
    second call gives the same bits. `gatings` are the functions of the norm's gate, `lower_bounds` the lower bounds of a KDA
    layer's log-decay, and `parameter_dtypes` the dtypes of A_log and dt_bias: float32, or that of the hidden states. `options`
    means the same as in Domain. A check sets `long`, the most tokens of its long cases (0 for none), `chunk`, the chunk whose
    multiples these exceed, and `large`, what is large in a case.

    ValueError for a field outside its choices, and unless `packed` or `batched` is True.
    """

    operation: str = "gdn_layer"
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    widths: tuple[int, ...] = (8, 16, 4, 12, 32, 128, 64, 72, 160, 200)
    equal_widths: bool = False
    grouped_heads: bool = True
    packed: bool = True
    batched: bool = True
    empty: bool = True
    nothing: bool = True
    conv_widths: tuple[int, ...] = (4, 2, 3)
    conv_bias: bool = True
    negative_eigenvalues: bool = True
    eps: tuple[str, ...] = EPS
    offsets: tuple[str, ...] = ("int64", "int32")
    caches: bool = True
    state_gradients: bool = True
    attention_mask: bool = True
    views: bool = True
    deterministic: bool = True
    backward: bool = True
    refills: bool = True
    threads: bool = True
    streams: bool = True
    gatings: tuple[str, ...] = ("silu",)
    lower_bounds: tuple[str, ...] = ("none",)
    parameter_dtypes: tuple[str, ...] = ("fp32",)
    options: Options = ()
    long: int = 0
    large: str = ""
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.operation not in LAYERS:
            raise ValueError(f"operation must be one of {', '.join(LAYERS)}, got {self.operation!r}")
        tuples: tuple[tuple[str, tuple[str, ...]], ...]
        tuples = (
            *(("dtypes", ("fp32", "bf16", "fp16")), ("eps", EPS), ("offsets", ("int64", "int32"))),
            *(("gatings", GATINGS), ("lower_bounds", tuple(LOWER_BOUNDS)), ("parameter_dtypes", PARAMETER_DTYPES)),
        )
        check_options(self.options)
        if self.operation == "kda_layer" and self.gatings != ("silu",):
            raise ValueError(f"gatings must be left out for kda_layer, whose norm's gate is a sigmoid, got {self.gatings!r}")
        if self.operation != "kda_layer" and self.lower_bounds != ("none",):
            raise ValueError(f"lower_bounds must be none for {self.operation}, got {', '.join(self.lower_bounds)}")
        check_tuples(self, *tuples)
        check_whole("widths", self.widths, MOST_WIDTH)
        check_whole("conv_widths", self.conv_widths, MAX_CONV_WIDTH)
        if not (self.packed or self.batched):
            raise ValueError("packed or batched must be True, got neither")
        check_sizes(self.long, self.chunk, self.large)

    def outside(self, case: LayerCase) -> str | None:
        """Return why `case` is outside the domain, or None."""
        checks = (
            (case.operation == self.operation, f"op={case.operation} is not {self.operation}"),
            (case.dtype in self.dtypes, f"dtype={case.dtype} is not among {', '.join(self.dtypes)}"),
            (not self.equal_widths or case.key_dim == case.value_dim, "key_dim and value_dim must be equal"),
            (self.grouped_heads or case.heads == case.value_heads, "heads and value_heads must be equal"),
            (self.packed or not case.packed, "packed=yes is not supported"),
            (self.batched or case.packed, "packed=no is not supported"),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (self.nothing or case.tokens > 0, "a call without tokens is not supported"),
            (
                case.conv_width in self.conv_widths,
                f"conv_width={case.conv_width} is not among {', '.join(map(str, self.conv_widths))}",
            ),
            (self.conv_bias or not case.conv_bias, "conv_bias=yes is not supported"),
            (self.negative_eigenvalues or not case.allow_neg_eigval, "allow_neg_eigval=yes is not supported"),
            (case.eps in self.eps, f"eps={case.eps} is not among {', '.join(self.eps)}"),
            (not case.packed or case.offsets in self.offsets, f"offsets={case.offsets} is not among {', '.join(self.offsets)}"),
            (self.caches or not case.cached, "cached=yes is not supported"),
            (self.state_gradients or not (case.cached and case.backward), "backward=yes with cached=yes is not supported"),
            (self.backward or not case.backward, "backward=yes is not supported"),
            (
                case.lower_bound in self.lower_bounds or case.operation != "kda_layer",
                f"lower_bound={case.lower_bound} is not among {', '.join(self.lower_bounds)}",
            ),
            (case.gating in self.gatings, f"gating={case.gating} is not among {', '.join(self.gatings)}"),
            (
                case.parameter_dtype in self.parameter_dtypes,
                f"parameter_dtype={case.parameter_dtype} is not among {', '.join(self.parameter_dtypes)}",
            ),
        )
        return next((reason for inside, reason in checks if not inside), None) or outside_options(self.options, case.options)

    def to_json(self) -> dict[str, Any]:
        """Return the domain as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LayerDomain":
        """Return the domain from the data of `to_json`."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**{**fields, "options": frozen_options(data.get("options", ()))})


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
    large = kind_of(domain.large, domain.long, longest, (*LENGTHS, "sequences") if sequences[1] >= 3 else LENGTHS)
    if large:
        sizes = large_lengths(chance, large, sequences, domain.long, domain.chunk, packed=packed, empty=domain.empty)
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
        gate=field("gate", GATES),
        values=field("values", VALUES),
        cached=cached,
        state=field("state", ("none", "none", "zero", "random", "random")) if cached else "none",
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
    }  # drawn last, as other words came before them
    words = {name: field(name, values) for name, values in rare.items() if values != (getattr(case, name),)}
    case = dataclasses.replace(case, **words, options=draw_options(chance, domain.options))
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
    if not case.packed and rows <= 2 and longest > domain.chunk and chance.random() < SEVERAL_CHUNKS:
        words["lengths"] = (chance.randint(domain.chunk + 1, longest),) * rows
    return dataclasses.replace(case, **words)
