"""Domains: what an adapter supports, as data. Cases are drawn inside a domain; a case outside it is unsupported."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from properties.laws.promises import check_promises
from properties.rules.case import (
    COMPUTED_GATES,
    FINAL_STATES,
    GATES,
    GIVEN_GATES,
    VALUES,
    Case,
)
from properties.rules.numbers import MEMORIES, SCALES
from properties.words.domain import (
    LARGEST,
    LEAST_LONGEST,
    OFFSETS,
    AnyDomain,
    check_spans,
    check_tuples,
    check_views,
    check_widths,
    inside,
)
from properties.words.line import MAX_WIDTH
from properties.words.names import known_fields
from properties.words.options import Options
from properties.words.word import flag, one_of, some_of, text_of

STRENGTHS = ("1000", "64", "10", "tenth", "saturated")  # gate regimes, the weakest decay first; "forever" has none
MOST_STEP = 1024  # the largest `length_step`
LEAST_BATCH_HEADS = 512  # the largest product of sequences and value heads that laws draw or make, beside the case of a crowd


@known_fields
@dataclasses.dataclass(frozen=True)
class Domain(AnyDomain):
    """The calls for which an implementation promises right results; by default all calls with a given gate and beta.

    ValueError for a field outside its choices or range, and unless `packed` or `batched` is True.
    """

    CASE = Case
    draws_large = True

    operation: str = "gated_delta_rule"
    dtypes: Annotated[tuple[str, ...], some_of("dtype")] = ("fp32", "bf16", "fp16")
    gate_dtypes: Annotated[tuple[str, ...], some_of("gate_dtype")] = ("fp32", "input")
    key_dims: tuple[int, int] = (1, 256)
    """The least and the largest K, in steps of `width_step`."""
    value_dims: tuple[int, int] = (1, 1024)
    """The least and the largest V, in steps of `width_step`."""
    width_step: int = 1
    equal_widths: bool = False
    grouped_heads: bool = True
    packed: Annotated[bool, flag("packed")] = True
    batched: Annotated[bool, flag("packed", value=False)] = True
    empty: bool = True
    initial_state: bool = True
    qk_norm: Annotated[bool, flag("qk_norm")] = True
    scale: bool = True
    negative_eigenvalues: bool | tuple[str, ...] = True
    """Whether beta may be up to 2; ("given",) says only where beta is given, and not computed in the kernel."""
    in_kernel: Annotated[tuple[str, ...], some_of("in_kernel")] = ("none",)
    """Which of gate and beta the implementation can compute itself."""
    dt_bias: Annotated[bool, flag("dt_bias", value=False)] = True
    """Whether it can compute its gate without a dt_bias."""
    views: bool | tuple[str, ...] = True
    """Whether inputs may be non-contiguous and begin anywhere in memory, or the kinds of strides that they may have (VIEWS)."""
    deterministic: bool = True
    """Whether a second call gives the same bits."""
    position_independent: bool = False
    """Whether a sequence or head gets the same bits wherever it stands in the batch. Few implementations need to promise that, and
    vector code that treats the end of a row differently breaks it."""
    backward: Annotated[bool, flag("backward")] = True
    decays: Annotated[tuple[str, ...], some_of("decay")] = ("log",)
    """Whether it takes the log-decay g ("log"), or the decay alpha itself ("linear"), where it does not compute the gate."""
    refills: bool = True
    threads: bool = True
    streams: bool = True
    keeps_outputs: bool = True
    infinite_gates: bool = False
    """Whether a log-decay may be -inf, which forgets the state."""
    scales: tuple[str, ...] = ("default", "one", "half")
    """The scales that it takes: none ("default", which means K ** -0.5), 1 ("one") and 0.5 ("half")."""
    strongest_decay: str = "saturated"
    """The strongest of the gate regimes that it takes (STRENGTHS)."""
    left_out: Annotated[tuple[str, ...], some_of("left_out")] = ("none",)
    """Which of gate and beta a call may leave out: without a gate nothing decays, and a beta that is left out is 1."""
    channel_decays: Annotated[tuple[str, ...], some_of("channel_decays")] = ("none",)
    """The decays of single channels that it takes beside the gate: gk ("keys"), gv ("values"), or "both". The sum of all decays is
    no stronger than `strongest_decay`."""
    lower_bounds: Annotated[tuple[str, ...], some_of("lower_bound")] = ("none",)
    parameter_dtypes: Annotated[tuple[str, ...], some_of("parameter_dtype")] = ("fp32",)
    qk_norm_eps: Annotated[tuple[str, ...], some_of("qk_norm_eps")] = ("1e-6",)
    qk_norm_forms: Annotated[tuple[str, ...], some_of("qk_norm_form")] = ("inside",)
    options: Options = ()
    """Further options of the implementation, with their values (properties/words/options.py)."""
    exact_options: tuple[str, ...] = ()
    """The options that change no bit."""
    largest_values: str = "great"
    """The regime with the largest values that it takes (LARGEST)."""
    length_step: int = 1
    """Every sequence has a multiple of so many tokens."""
    longest: int | None = None
    """The most tokens of a sequence; None means any number, and 1 that it decodes single tokens."""
    key_widths: tuple[int, ...] = ()
    """The only values of K; if there are any, they replace `key_dims`."""
    value_widths: tuple[int, ...] = ()
    """The only values of V; if there are any, they replace `value_dims`."""
    offsets: Annotated[tuple[str, ...], some_of("offsets")] = OFFSETS
    state_dtypes: Annotated[tuple[str, ...], some_of("state_dtype")] = ("fp32",)
    final_dtype: Annotated[str, one_of("final_dtype")] = "fp32"
    initial_states: Annotated[str, one_of("initial_states")] = "each"
    """Whether each sequence of a packed call has an initial state, or only the first one."""
    final_states: str = "each"
    """Whether each sequence of a packed call returns a final state, or only the last one, or whether no call returns one."""
    batch_heads: int | None = None
    """The largest product of sequences and value heads of a batch that is not packed; None means any. CUDA launches at most 65,535
    programs along the second and third axis of a grid."""
    nothing: bool = True
    """Whether there may be calls without any token; `empty` says whether there may be empty sequences beside others."""
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
        check_tuples(self, ("scales", tuple(SCALES)))
        for name in ("left_out", "channel_decays"):
            if "none" not in getattr(self, name):
                raise ValueError(f"{name} must contain none, because some cases need it, got {', '.join(getattr(self, name))}")
        for name, choices in (("largest_values", LARGEST), ("final_states", FINAL_STATES), ("strongest_decay", STRENGTHS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if isinstance(self.length_step, bool) or not isinstance(self.length_step, int) or not 1 <= self.length_step <= MOST_STEP:
            raise ValueError(f"length_step must be in 1..{MOST_STEP}, got {self.length_step!r}")
        step, least = self.length_step, max(LEAST_LONGEST, 3 * self.length_step)  # the law `cut` needs several steps
        if self.longest is not None and (
            isinstance(self.longest, bool)
            or not isinstance(self.longest, int)
            or (self.longest < least and (self.longest, step) != (1, 1))
            or self.longest % step
        ):
            what = f"None or at least {least} and a multiple of length_step={step}" if step > 1 else f"None, 1 or at least {least}"
            raise ValueError(f"longest must be {what}, got {self.longest!r}")
        self._check_choices_of_flags()
        self._check_promises()
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
        if not self.scale and "default" not in self.scales:
            raise ValueError(f"scales must contain default with scale=False, got {', '.join(self.scales)}")
        if self.strongest_decay == STRENGTHS[0] and self.channel_decays != ("none",):
            raise ValueError(
                f"channel_decays must be none with strongest_decay={STRENGTHS[0]}, because they are stronger, "
                f"got {', '.join(self.channel_decays)}"
            )
        if self.batch_heads is not None and (not isinstance(self.batch_heads, int) or self.batch_heads < LEAST_BATCH_HEADS):
            raise ValueError(
                f"batch_heads must be None or at least {LEAST_BATCH_HEADS}, because laws call batches of as many, "
                f"got {self.batch_heads!r}"
            )

    def _check_promises(self) -> None:
        """Raise ValueError for a promise that no law judges."""
        no_state = "" if self.initial_state else "initial_state=False"
        carries = no_state or ("final_states=none" if self.final_states == "none" else "longest=1" if self.longest == 1 else "")
        batched = "" if self.batched else "batched=False"
        steps = "" if self.length_step == 1 else f"length_step={self.length_step}"
        lacking = {
            "split_invariant": carries,
            "packed_equals_dense": batched or ("" if self.packed else "packed=False"),
            "absent_state_equals_zeros": no_state,
            "decode_equals_prefill": carries or batched or steps,
        }
        check_promises(self, lacking)

    def _check_choices_of_flags(self) -> None:
        """Raise ValueError for a field that is neither True nor False, nor a tuple that says more."""
        check_views(self)
        if not isinstance(self.negative_eigenvalues, bool) and self.negative_eigenvalues != ("given",):
            raise ValueError(f"negative_eigenvalues must be True, False or ('given',), got {self.negative_eigenvalues!r}")
        if self.negative_eigenvalues == ("given",) and not {*self.in_kernel} & {"none", "gate"}:
            raise ValueError(
                f"negative_eigenvalues must be True or False without a beta that is given, got ('given',) with in_kernel "
                f"{', '.join(self.in_kernel)}"
            )

    def doubles(self, in_kernel: str) -> bool:
        """Whether beta may be up to 2 in cases whose kernel computes this."""
        if isinstance(self.negative_eigenvalues, bool):
            return self.negative_eigenvalues
        return in_kernel not in ("beta", "both")

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

    def reasons(self, case: Any) -> Iterable[tuple[bool, str]]:
        """Return what else must be true of a case inside the domain, each with what is said if it is not."""
        return (
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
            (
                self.batch_heads is None or case.packed or len(case.lengths) * case.value_heads <= self.batch_heads,
                f"{len(case.lengths)} sequences of {case.value_heads} value heads are over batch_heads={self.batch_heads}",
            ),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (self.nothing or case.tokens > 0, "a call without tokens is not supported"),
            (
                all(length % self.length_step == 0 for length in case.lengths),
                f"lengths={text_of(case.lengths)}: every length must be a multiple of {self.length_step}",
            ),
            (
                self.longest is None or max(case.lengths) <= self.longest,
                f"lengths={text_of(case.lengths)}: sequences of more than {self.longest} tokens are not supported",
            ),
            (
                case.final_states == self.final_states
                or (not case.packed and "none" not in (case.final_states, self.final_states)),
                f"final_states={case.final_states} is not {self.final_states}",
            ),
            (self.initial_state or case.state == "none", f"state={case.state}: an initial state is not supported"),
            (case.scale in self.drawn_scales, f"scale={case.scale} is not supported"),
            (case.gate in self.gates, f"gate={case.gate}: decays are no stronger than those of gate={self.strongest_decay}"),
            (case.values in self.values, f"values={case.values}: numbers are no larger than those of values={self.largest_values}"),
            (
                self.doubles(case.in_kernel) or case.beta != "two",
                "beta=two: beta over 1 is not supported" + (", but where it is given" if self.negative_eigenvalues else ""),
            ),
            (self.infinite_gates or case.gate != "closed", "gate=closed: a log-decay of -inf is not supported"),
            (
                self.has_decays_of(case),
                f"channel_decays={case.channel_decays} with gate={case.gate}: together they are stronger than "
                f"gate={self.strongest_decay}",
            ),
        )

    def _widths(self, widths: tuple[int, ...], span: tuple[int, int]) -> str:
        if widths:
            return f"among {', '.join(map(str, widths))}"
        return f"in {span[0]}..{span[1]}" + (f" in steps of {self.width_step}" if self.width_step > 1 else "")
