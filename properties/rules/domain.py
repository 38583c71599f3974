"""Domains: what an adapter supports, as data. Cases are drawn inside a domain; a case outside it is unsupported."""

import dataclasses
from typing import Any

from oracles.norm import NORM_FORMS
from oracles.operations import RULES
from properties.rules.case import (
    CHANNEL_DECAYS,
    COMPUTED_GATES,
    DECAYS,
    FINAL_DTYPES,
    FINAL_STATES,
    GATES,
    GIVEN_GATES,
    IN_KERNEL,
    INITIAL_STATES,
    LEFT_OUT,
    PARAMETER_DTYPES,
    STATE_DTYPES,
    VALUES,
    Case,
)
from properties.rules.numbers import LOWER_BOUNDS, MEMORIES, NORM_EPS, SCALES
from properties.words.domain import LARGEST, LEAST_LONGEST, OFFSETS, check_sizes, check_spans, check_tuples, check_widths, inside
from properties.words.line import MAX_WIDTH, text_of
from properties.words.names import known_fields
from properties.words.options import Options, check_options, frozen_options, outside_options

STRENGTHS = ("1000", "64", "10", "tenth", "saturated")  # gate regimes, the weakest decay first; "forever" has none
MOST_STEP = 1024  # the largest `length_step`
LEAST_BATCH_HEADS = 512  # the largest product of sequences and value heads that laws draw or make, beside the case of a crowd
MOST_REACH = 256  # about 70,000 tokens; check larger sizes with single cases


@known_fields
@dataclasses.dataclass(frozen=True)
class Domain:
    """The calls for which an implementation promises right results; by default all calls with a given gate and beta.

    `key_dims` and `value_dims` are inclusive ranges in steps of `width_step`. `views` says whether inputs may be non-contiguous and
    begin anywhere in memory. `deterministic` says whether a second call gives the same bits. `position_independent` says whether a
    sequence or head gets the same bits wherever it stands in the batch; few implementations need to promise that, and vector code
    that treats the end of a row differently breaks it. `in_kernel` names which of gate and beta the implementation can compute
    itself ("none", "gate", "beta", "both"), and `dt_bias` says whether it can do so without a dt_bias. `decays` says whether it
    takes the log-decay g ("log"), the decay alpha itself ("linear"), or either, where it does not compute the gate. `batch_heads`
    is the largest product of sequences and value heads of a batch that is not packed; None means any. CUDA launches at most 65,535
    programs along the second and third axis of a grid. `infinite_gates` says whether a log-decay may be -inf, which forgets the
    state. `scales` names the scales that it takes: none ("default", which means K ** -0.5), 1 ("one") and 0.5 ("half").
    `strongest_decay` is the strongest of the gate regimes that it takes (STRENGTHS), and `largest_values` the regime with the
    largest values that it takes (LARGEST). Every sequence has a multiple of `length_step` tokens, and at most `longest` tokens;
    None means any number. `key_widths` and `value_widths` list the only widths; if they are not empty, they replace `key_dims` and
    `value_dims`. `offsets` are the dtypes of cu_seqlens. `state_dtypes` are the dtypes of initial states, and `final_dtype` is that
    of final states. `initial_states` says whether each sequence of a packed call has an initial state, or only the first one.
    `final_states` says whether each returns a final state, or only the last one, or whether no call returns one ("none").

    `left_out` names which of gate and beta a call may leave out: without a gate nothing decays, and a beta that is left out is 1.
    `channel_decays` names the decays of single channels that it takes in addition to the gate: gk for the keys' channels
    ("keys"), gv for the values' channels ("values"), or "both". The sum of all decays is no stronger than `strongest_decay`. Both
    fields must contain "none". `lower_bounds` are the lower bounds that KDA's gate in the kernel
    may have, and `parameter_dtypes` the dtypes of A_log and dt_bias. `qk_norm_eps` and `qk_norm_forms` are the eps and the forms
    that its L2 norm of q and k may have. `options` are further options of the implementation, with
    their values, and `exact_options` names those that change no bit (properties/words/options.py).

    Four fields are no promises, and a check sets them. `reach` is how many times more tokens are drawn than where kernels are
    interpreted, with wider heads too. `long` is the most tokens of long cases (0 for none), and `chunk` is the chunk whose
    multiples these exceed. `large` is what is large in the cases that are drawn, "" for nothing (properties/words/sizes.py).

    ValueError for a field outside its choices or range, and unless `packed` or `batched` is True.
    """

    operation: str = "gated_delta_rule"
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    gate_dtypes: tuple[str, ...] = ("fp32", "input")
    key_dims: tuple[int, int] = (1, 256)
    value_dims: tuple[int, int] = (1, 1024)
    width_step: int = 1
    equal_widths: bool = False
    grouped_heads: bool = True
    packed: bool = True
    batched: bool = True
    empty: bool = True
    initial_state: bool = True
    qk_norm: bool = True
    scale: bool = True
    negative_eigenvalues: bool = True
    in_kernel: tuple[str, ...] = ("none",)
    dt_bias: bool = True
    views: bool = True
    deterministic: bool = True
    position_independent: bool = False
    backward: bool = True
    decays: tuple[str, ...] = ("log",)
    refills: bool = True
    threads: bool = True
    streams: bool = True
    infinite_gates: bool = False
    scales: tuple[str, ...] = ("default", "one", "half")
    strongest_decay: str = "saturated"
    left_out: tuple[str, ...] = ("none",)
    channel_decays: tuple[str, ...] = ("none",)
    lower_bounds: tuple[str, ...] = ("none",)
    parameter_dtypes: tuple[str, ...] = ("fp32",)
    qk_norm_eps: tuple[str, ...] = ("1e-6",)
    qk_norm_forms: tuple[str, ...] = ("inside",)
    options: Options = ()
    exact_options: tuple[str, ...] = ()
    largest_values: str = "great"
    length_step: int = 1
    longest: int | None = None
    key_widths: tuple[int, ...] = ()
    value_widths: tuple[int, ...] = ()
    offsets: tuple[str, ...] = OFFSETS
    state_dtypes: tuple[str, ...] = ("fp32",)
    final_dtype: str = "fp32"
    initial_states: str = "each"
    final_states: str = "each"
    reach: int = 1
    long: int = 0
    large: str = ""
    chunk: int = 64
    batch_heads: int | None = None

    def __post_init__(self) -> None:
        if self.operation not in RULES:
            raise ValueError(f"operation must be one of {', '.join(RULES)}, got {self.operation!r}")
        tuples = (
            ("dtypes", ("fp32", "bf16", "fp16")),
            ("gate_dtypes", ("fp32", "input")),
            ("in_kernel", IN_KERNEL),
            ("decays", DECAYS),
            ("scales", tuple(SCALES)),
            ("left_out", LEFT_OUT),
            ("channel_decays", CHANNEL_DECAYS),
            ("lower_bounds", tuple(LOWER_BOUNDS)),
            ("parameter_dtypes", PARAMETER_DTYPES),
            ("qk_norm_eps", tuple(NORM_EPS)),
            ("qk_norm_forms", NORM_FORMS),
            ("offsets", OFFSETS),
            ("state_dtypes", STATE_DTYPES),
        )
        check_tuples(self, *tuples)
        for name in ("left_out", "channel_decays"):
            if "none" not in getattr(self, name):
                raise ValueError(f"{name} must contain none, because some cases need it, got {', '.join(getattr(self, name))}")
        words = (
            ("largest_values", LARGEST),
            ("final_dtype", FINAL_DTYPES),
            ("initial_states", INITIAL_STATES),
            ("final_states", FINAL_STATES),
        )
        for name, choices in words:
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if isinstance(self.length_step, bool) or not isinstance(self.length_step, int) or not 1 <= self.length_step <= MOST_STEP:
            raise ValueError(f"length_step must be in 1..{MOST_STEP}, got {self.length_step!r}")
        step, least = self.length_step, max(LEAST_LONGEST, 3 * self.length_step)  # the law `cut` needs several steps
        if self.longest is not None and (
            isinstance(self.longest, bool) or not isinstance(self.longest, int) or self.longest < least or self.longest % step
        ):
            what = f"at least {least}" + (f" and a multiple of length_step={step}" if step > 1 else "")
            raise ValueError(f"longest must be None or {what}, got {self.longest!r}")
        check_spans(self, "key_dims", "value_dims")
        check_widths("key_widths", self.key_widths, "key_dims", self.key_dims == Domain.key_dims and self.width_step == 1)
        check_widths("value_widths", self.value_widths, "value_dims", self.value_dims == Domain.value_dims and self.width_step == 1)
        if self.equal_widths and not any(self.has_key(width) and self.has_value(width) for width in range(1, MAX_WIDTH + 1)):
            raise ValueError("equal_widths=True needs a width that keys and values can have")
        if self.operation == "delta_rule" and not set(self.in_kernel) <= {"none", "beta"}:
            raise ValueError(f"in_kernel must be none or beta for delta_rule, which has no gate, got {', '.join(self.in_kernel)}")
        if self.operation == "delta_rule" and self.decays != ("log",):
            raise ValueError(f"decays must be log for delta_rule, which has no gate, got {', '.join(self.decays)}")
        if self.operation == "delta_rule" and not {*self.left_out} <= {"none", "beta"}:
            raise ValueError(f"left_out must be none or beta for delta_rule, which has no gate, got {', '.join(self.left_out)}")
        if self.left_out != ("none",) and ("none" not in self.in_kernel or "log" not in self.decays):
            raise ValueError(
                f"left_out must be none without none in in_kernel and log in decays, got {', '.join(self.left_out)} with "
                f"in_kernel {', '.join(self.in_kernel)} and decays {', '.join(self.decays)}"
            )
        if self.operation != "gated_delta_rule" and self.channel_decays != ("none",):
            raise ValueError(f"channel_decays must be none for {self.operation}, got {', '.join(self.channel_decays)}")
        if self.operation != "kda" and self.lower_bounds != ("none",):
            raise ValueError(f"lower_bounds must be none for {self.operation}, got {', '.join(self.lower_bounds)}")
        if not self.qk_norm and (self.qk_norm_eps, self.qk_norm_forms) != (Domain.qk_norm_eps, Domain.qk_norm_forms):
            raise ValueError("qk_norm_eps and qk_norm_forms must be left out with qk_norm=False")
        check_options(self.options, self.exact_options)
        if not self.scale and "default" not in self.scales:
            raise ValueError(f"scales must contain default with scale=False, got {', '.join(self.scales)}")
        if self.strongest_decay not in STRENGTHS:
            raise ValueError(f"strongest_decay must be one of {', '.join(STRENGTHS)}, got {self.strongest_decay!r}")
        if self.strongest_decay == STRENGTHS[0] and self.channel_decays != ("none",):
            raise ValueError(
                f"channel_decays must be none with strongest_decay={STRENGTHS[0]}, because they are stronger, "
                f"got {', '.join(self.channel_decays)}"
            )
        if not (self.packed or self.batched):
            raise ValueError("packed or batched must be True, got neither")
        if not isinstance(self.reach, int) or not 1 <= self.reach <= MOST_REACH:
            raise ValueError(f"reach must be in 1..{MOST_REACH}, got {self.reach!r}")
        check_sizes(self.long, self.chunk, self.large)
        if self.batch_heads is not None and (not isinstance(self.batch_heads, int) or self.batch_heads < LEAST_BATCH_HEADS):
            raise ValueError(
                f"batch_heads must be None or at least {LEAST_BATCH_HEADS}, because laws call batches of as many, "
                f"got {self.batch_heads!r}"
            )

    @property
    def drawn_scales(self) -> tuple[str, ...]:
        """The scales of cases: those in `scales`, or the default alone with scale=False."""
        return self.scales if self.scale else ("default",)

    @property
    def gates(self) -> tuple[str, ...]:
        """The gate regimes with no stronger decays. Those that are neither "forever" nor in STRENGTHS have decays of every size."""
        if self.strongest_decay == STRENGTHS[-1]:
            return (*GATES, *GIVEN_GATES, *COMPUTED_GATES)
        return ("forever", *STRENGTHS[: STRENGTHS.index(self.strongest_decay) + 1])

    @property
    def values(self) -> tuple[str, ...]:
        """The regimes of values with no larger numbers. Regimes that are not in LARGEST have ordinary numbers or smaller ones."""
        return tuple(values for values in VALUES if values not in LARGEST[LARGEST.index(self.largest_values) + 1 :])

    def most(self, tokens: int) -> int:
        """So many tokens, or `longest` if that is less."""
        return tokens if self.longest is None else min(tokens, self.longest)

    def final_states_of(self, *, packed: bool) -> str:
        """The word `final_states` of a case. Only packed calls return the last state alone; any call may return none."""
        return self.final_states if packed or self.final_states == "none" else "each"

    def has_key(self, width: int) -> bool:
        """Whether K may be this width."""
        return width in self.key_widths if self.key_widths else inside(width, self.key_dims, self.width_step)

    def has_value(self, width: int) -> bool:
        """Whether V may be this width."""
        return width in self.value_widths if self.value_widths else inside(width, self.value_dims, self.width_step)

    def has_decays_of(self, case: Case) -> bool:
        """Whether the decays of a case's channels, added to those of its gate, are no stronger than `strongest_decay`."""
        if self.strongest_decay == STRENGTHS[-1]:
            return True
        added = {"none": 0, "both": 2}.get(case.channel_decays, 1)
        gate = MEMORIES.get(case.gate, 0.0)
        return gate + added * (gate or MEMORIES["64"]) <= MEMORIES[self.strongest_decay] or not added

    def outside(self, case: Case) -> str | None:
        """Return why `case` is outside the domain, or None."""
        checks = (
            (case.operation == self.operation, f"op={case.operation} is not {self.operation}"),
            (case.in_kernel in self.in_kernel, f"in_kernel={case.in_kernel} is not among {', '.join(self.in_kernel)}"),
            (self.dt_bias or not case.gate_inside or case.dt_bias, "dt_bias=no is not supported"),
            (
                case.gate_inside or case.operation == "delta_rule" or case.decay in self.decays,
                f"decay={case.decay} is not among {', '.join(self.decays)}",
            ),
            (case.dtype in self.dtypes, f"dtype={case.dtype} is not among {', '.join(self.dtypes)}"),
            (case.gate_dtype in self.gate_dtypes, f"gate_dtype={case.gate_dtype} is not among {', '.join(self.gate_dtypes)}"),
            (self.has_key(case.key_dim), f"key_dim={case.key_dim} is not {self._widths(self.key_widths, self.key_dims)}"),
            (
                self.has_value(case.value_dim),
                f"value_dim={case.value_dim} is not {self._widths(self.value_widths, self.value_dims)}",
            ),
            (
                not self.equal_widths or case.key_dim == case.value_dim,
                f"key_dim={case.key_dim} and value_dim={case.value_dim} must be equal",
            ),
            (
                self.grouped_heads or case.heads == case.value_heads,
                f"heads={case.heads} and value_heads={case.value_heads} must be equal",
            ),
            (self.packed or not case.packed, "packed=yes is not supported"),
            (self.batched or case.packed, "packed=no is not supported"),
            (
                self.batch_heads is None or case.packed or len(case.lengths) * case.value_heads <= self.batch_heads,
                f"{len(case.lengths)} sequences of {case.value_heads} value heads are over batch_heads={self.batch_heads}",
            ),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (
                all(length % self.length_step == 0 for length in case.lengths),
                f"lengths={text_of(case.lengths)}: every length must be a multiple of {self.length_step}",
            ),
            (
                self.longest is None or max(case.lengths) <= self.longest,
                f"lengths={text_of(case.lengths)}: sequences of more than {self.longest} tokens are not supported",
            ),
            (not case.packed or case.offsets in self.offsets, f"offsets={case.offsets} is not among {', '.join(self.offsets)}"),
            (
                case.state == "none" or case.state_dtype in self.state_dtypes,
                f"state_dtype={case.state_dtype} is not among {', '.join(self.state_dtypes)}",
            ),
            (case.final_dtype == self.final_dtype, f"final_dtype={case.final_dtype} is not {self.final_dtype}"),
            (
                not case.packed or case.state == "none" or case.initial_states == self.initial_states,
                f"initial_states={case.initial_states} is not {self.initial_states}",
            ),
            (
                case.final_states == self.final_states
                or (not case.packed and "none" not in (case.final_states, self.final_states)),
                f"final_states={case.final_states} is not {self.final_states}",
            ),
            (self.initial_state or case.state == "none", f"state={case.state}: an initial state is not supported"),
            (self.qk_norm or not case.qk_norm, "qk_norm=yes is not supported"),
            (
                not case.qk_norm or case.qk_norm_eps in self.qk_norm_eps,
                f"qk_norm_eps={case.qk_norm_eps} is not among {', '.join(self.qk_norm_eps)}",
            ),
            (
                not case.qk_norm or case.qk_norm_form in self.qk_norm_forms,
                f"qk_norm_form={case.qk_norm_form} is not among {', '.join(self.qk_norm_forms)}",
            ),
            (case.scale in self.drawn_scales, f"scale={case.scale} is not supported"),
            (case.gate in self.gates, f"gate={case.gate}: decays are no stronger than those of gate={self.strongest_decay}"),
            (case.values in self.values, f"values={case.values}: numbers are no larger than those of values={self.largest_values}"),
            (self.negative_eigenvalues or case.beta != "two", "beta=two: beta over 1 is not supported"),
            (self.infinite_gates or case.gate != "closed", "gate=closed: a log-decay of -inf is not supported"),
            (self.backward or not case.backward, "backward=yes is not supported"),
            (case.left_out in self.left_out, f"left_out={case.left_out} is not among {', '.join(self.left_out)}"),
            (
                case.channel_decays in self.channel_decays,
                f"channel_decays={case.channel_decays} is not among {', '.join(self.channel_decays)}",
            ),
            (
                self.has_decays_of(case),
                f"channel_decays={case.channel_decays} with gate={case.gate}: together they are stronger than "
                f"gate={self.strongest_decay}",
            ),
            (
                not (self.operation == "kda" and case.gate_inside) or case.lower_bound in self.lower_bounds,
                f"lower_bound={case.lower_bound} is not among {', '.join(self.lower_bounds)}",
            ),
            (
                not case.gate_inside or case.parameter_dtype in self.parameter_dtypes,
                f"parameter_dtype={case.parameter_dtype} is not among {', '.join(self.parameter_dtypes)}",
            ),
        )
        return next((reason for inside, reason in checks if not inside), None) or outside_options(self.options, case.options)

    def _widths(self, widths: tuple[int, ...], span: tuple[int, int]) -> str:
        if widths:
            return f"among {', '.join(map(str, widths))}"
        return f"in {span[0]}..{span[1]}" + (f" in steps of {self.width_step}" if self.width_step > 1 else "")

    def to_json(self) -> dict[str, Any]:
        """Return the domain as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Domain":
        """Return the domain from the data of `to_json`."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**{**fields, "options": frozen_options(data.get("options", ()))})
