"""The domain of modules (the other operations of a layer): what an implementation promises, and cases drawn from it."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from oracles.norm import GATINGS
from properties.modules.case import (
    ACTIVATIONS,
    EPS,
    MAX_CONV_WIDTH,
    MAX_WIDTH,
    MODULES,
    RESIDUALS,
    STATE_COLUMNS,
    VALUES,
    ModuleCase,
    words_of,
)
from properties.rules.case import PARAMETER_DTYPES
from properties.rules.numbers import LOWER_BOUNDS
from properties.words.domain import LARGEST, OFFSETS, check_sizes, check_spans, check_tuples, check_whole, check_widths, inside
from properties.words.lengths import lengths, narrow
from properties.words.names import known_fields
from properties.words.options import Options, check_options, draw_options, frozen_options, outside_options
from properties.words.sizes import LENGTHS, kind_of, large_lengths

CONV, GATES, NORMS = ("causal_conv1d",), ("gdn_gate", "kda_gate"), ("l2norm", "gated_rms_norm", "norm_gate_linear")
CHANNELS = (16, 1, 3, 8, 33, 64, 20, 100, 130, 257)
WIDTHS = (16, 8, 1, 32, 7, 24, 64, 100, 128, 256, 520, 1000)
HEADS = (1, 2, 3, 4, 8)


@known_fields
@dataclasses.dataclass(frozen=True)
class ModuleDomain:
    """The calls for which an implementation promises right results; by default all calls of its operation.

    `widths` (D, K or V, and also E) are an inclusive range in steps of `width_step`; `fixed_widths` lists the only widths; if it
    is not empty, it replaces `widths`. `largest_values` is the regime with the largest values that it takes, and `offsets` are
    the dtypes of cu_seqlens. `without_weight` and `without_dt_bias` say whether the implementation can do without that input, and
    `bias` whether it takes a bias. `beta` says whether it computes beta beside the gate, `eps` which of a case's values it can be
    given, and `final_state` whether it returns a final state. `state_columns` says how many columns a convolution's states have:
    "W", or "W-1" without the oldest, which no output reads. `attention_mask` says whether a mask can exclude padding at the start
    of a batch's rows. Every sequence has at most `longest` tokens. `views`, `deterministic` and `position_independent` mean the
    same as in Domain; here the positions are tokens, heads, channels and sequences. `residuals` says whether it adds a
    residual, and whether a norm can return the sum too; `gatings` are the functions of a norm's gate. `lower_bounds`,
    `parameter_dtypes`, `options` and `exact_options` mean the same as in Domain. A check sets `long`, the most tokens of its
    long cases (0 for none), and `large`, what is large in a case.

    ValueError for a field outside its choices or range, and unless `packed` or `batched` is True.
    """

    operation: str = "causal_conv1d"
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    widths: tuple[int, int] = (1, 1024)
    width_step: int = 1
    conv_widths: tuple[int, ...] = (4, 2, 3, 1, 5, 8)
    activations: tuple[str, ...] = ACTIVATIONS
    bias: bool = True
    without_weight: bool = True
    without_dt_bias: bool = True
    beta: bool = True
    negative_eigenvalues: bool = True
    eps: tuple[str, ...] = tuple(EPS)
    packed: bool = True
    batched: bool = True
    empty: bool = True
    longest: int = 2**20
    initial_state: bool = True
    final_state: bool = True
    state_columns: str = "W"
    attention_mask: bool = False
    views: bool = True
    deterministic: bool = True
    position_independent: bool = False
    backward: bool = True
    refills: bool = True
    threads: bool = True
    streams: bool = True
    residuals: tuple[str, ...] = ("none",)
    gatings: tuple[str, ...] = ("silu",)
    lower_bounds: tuple[str, ...] = ("none",)
    parameter_dtypes: tuple[str, ...] = ("fp32",)
    options: Options = ()
    exact_options: tuple[str, ...] = ()
    largest_values: str = "great"
    fixed_widths: tuple[int, ...] = ()
    offsets: tuple[str, ...] = OFFSETS
    long: int = 0
    large: str = ""

    def __post_init__(self) -> None:
        if self.operation not in MODULES:
            raise ValueError(f"operation must be one of {', '.join(MODULES)}, got {self.operation!r}")
        tuples: tuple[tuple[str, tuple[str, ...]], ...] = (
            *(("dtypes", ("fp32", "bf16", "fp16")), ("activations", ACTIVATIONS), ("eps", tuple(EPS)), ("residuals", RESIDUALS)),
            *(("gatings", GATINGS), ("lower_bounds", tuple(LOWER_BOUNDS)), ("parameter_dtypes", PARAMETER_DTYPES)),
            ("offsets", OFFSETS),
        )
        check_tuples(self, *tuples)
        if self.largest_values not in LARGEST:
            raise ValueError(f"largest_values must be one of {', '.join(LARGEST)}, got {self.largest_values!r}")
        if "returned" in self.residuals and self.operation != "gated_rms_norm":
            raise ValueError(f"residuals must be none or added for {self.operation}, got {', '.join(self.residuals)}")
        check_options(self.options, self.exact_options)
        if self.state_columns not in STATE_COLUMNS:
            raise ValueError(f"state_columns must be one of {', '.join(STATE_COLUMNS)}, got {self.state_columns!r}")
        check_spans(self, "widths", most=MAX_WIDTH)
        check_widths("fixed_widths", self.fixed_widths, "widths", self.widths == ModuleDomain.widths and self.width_step == 1)
        check_whole("conv_widths", self.conv_widths, MAX_CONV_WIDTH)
        if not isinstance(self.longest, int) or self.longest < 1:
            raise ValueError(f"longest must be at least 1, got {self.longest!r}")
        if not (self.packed or self.batched):
            raise ValueError("packed or batched must be True, got neither")
        if not self.batched and "packed" not in words_of(self.operation):
            raise ValueError(f"batched must be True for {self.operation}, which has no packed sequences, got False")
        check_sizes(self.long, large=self.large)

    @property
    def values(self) -> tuple[str, ...]:
        """The regimes of values with no larger numbers."""
        return tuple(values for values in VALUES if values not in LARGEST[LARGEST.index(self.largest_values) + 1 :])

    def has_width(self, width: int) -> bool:
        """Whether the width may be this one."""
        return width in self.fixed_widths if self.fixed_widths else inside(width, self.widths, self.width_step)

    def outside(self, case: ModuleCase) -> str | None:
        """Return why `case` is outside the domain, or None."""
        least, most = self.widths
        steps = f" in steps of {self.width_step}" if self.width_step > 1 else ""
        widths = f"among {', '.join(map(str, self.fixed_widths))}" if self.fixed_widths else f"in {least}..{most}{steps}"
        words = words_of(self.operation)
        checks = (
            (case.operation == self.operation, f"op={case.operation} is not {self.operation}"),
            (case.dtype in self.dtypes, f"dtype={case.dtype} is not among {', '.join(self.dtypes)}"),
            *(
                (name not in words or self.has_width(width), f"{name}={width} is not {widths}")
                for name, width in (("width", case.width), ("out_width", case.out_width))
            ),
            (
                "conv_width" not in words or case.conv_width in self.conv_widths,
                f"conv_width={case.conv_width} is not among {', '.join(map(str, self.conv_widths))}",
            ),
            (
                "activation" not in words or case.activation in self.activations,
                f"activation={case.activation} is not among {', '.join(self.activations)}",
            ),
            ("eps" not in words or case.eps in self.eps, f"eps={case.eps} is not among {', '.join(self.eps)}"),
            (self.bias or not case.bias, "bias=yes is not supported"),
            (self.without_weight or case.weight, "weight=no is not supported"),
            (self.without_dt_bias or case.dt_bias, "dt_bias=no is not supported"),
            ("beta" not in words or self.beta or not case.beta, "beta=yes is not supported"),
            (self.negative_eigenvalues or not case.allow_neg_eigval, "allow_neg_eigval=yes is not supported"),
            (self.packed or not case.packed, "packed=yes is not supported"),
            (self.batched or case.packed, "packed=no is not supported"),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (max(case.lengths) <= self.longest, f"lengths={max(case.lengths)}: more than {self.longest} tokens are not supported"),
            (case.values in self.values, f"values={case.values}: numbers are no larger than those of values={self.largest_values}"),
            (not case.packed or case.offsets in self.offsets, f"offsets={case.offsets} is not among {', '.join(self.offsets)}"),
            (self.initial_state or case.state == "none", f"state={case.state}: an initial state is not supported"),
            (
                "state_columns" not in words or case.state_columns == self.state_columns,
                f"state_columns={case.state_columns}: states have {self.state_columns} columns",
            ),
            (
                "final_state" not in words or self.final_state or not case.final_state,
                "final_state=yes: a final state is not returned",
            ),
            (self.backward or not case.backward, "backward=yes is not supported"),
            *(
                (
                    name not in words or getattr(case, name) in values,
                    f"{name}={getattr(case, name)} is not among {', '.join(values)}",
                )
                for name, values in self.rare_words.items()
            ),
        )
        return next((reason for inside, reason in checks if not inside), None) or outside_options(self.options, case.options)

    @property
    def rare_words(self) -> dict[str, tuple[str, ...]]:
        """The words of cases for which few domains allow several values, with these values, the usual one first."""
        return {
            "residual": self.residuals,
            "gating": self.gatings,
            "lower_bound": self.lower_bounds,
            "parameter_dtype": self.parameter_dtypes,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the domain as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ModuleDomain":
        """Return the domain from the data of `to_json`."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**{**fields, "options": frozen_options(data.get("options", ()))})


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
    large = kind_of(domain.large, min(domain.long, domain.longest), longest, kinds)
    heads = field("heads", HEADS[: 1 if large else None]) if "heads" in words else 1
    total = max(1, total // max(1, heads // 2))
    longest = min(longest, total, domain.longest)
    can = [choice for choice, may in ((True, domain.packed), (False, domain.batched)) if may]
    packed = "packed" in words and field("packed", can)
    if large:
        most = min(domain.long, domain.longest)
        sizes = large_lengths(chance, large, sequences, most, 64, packed=packed, empty=domain.empty)
    else:
        sizes = _lengths(chance, domain, sequences, longest, total, packed=packed)
    values: dict[str, Any] = {}
    for name, choices in (
        ("width", _widths(domain, sum(sizes) * heads)),
        ("conv_width", domain.conv_widths),
        ("activation", domain.activations),
        ("bias", (False, True) if domain.bias else (False,)),
        ("weight", (True, True, False) if domain.without_weight else (True,)),
        ("state", ("none", "zero", "random", "random") if domain.initial_state else ("none",)),
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
        values["out_width"] = field("out_width", _widths(domain, max(values["width"], sum(sizes))))
    if "state_columns" in words and domain.state_columns == "W-1":
        values |= {"state_columns": "W-1", "oldest": True}  # there is no column that no output reads
        if chance.random() < 1 / 4:
            sizes = _near(chance, domain, sizes, values["conv_width"], longest, packed=packed)
    dtype = field("dtype", domain.dtypes)
    regime = field("values", tuple(choice for choice in domain.values if choice != "whole"))
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
    return dataclasses.replace(case, **rare, options=draw_options(chance, domain.options))


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


def _widths(domain: ModuleDomain, rows: int) -> tuple[int, ...]:
    """Return the widths that the domain allows; wide ones only if there are few rows."""
    (least, most), step = domain.widths, domain.width_step
    wide = 2**14 // max(rows, 1)
    if domain.fixed_widths:
        return narrow(domain.fixed_widths, wide)
    every = CHANNELS if domain.operation in CONV else WIDTHS
    allowed = [width for width in every if least <= width <= most and width % step == 0] or [-(-least // step) * step]
    return narrow(tuple(allowed), wide)
