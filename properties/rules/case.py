"""Cases of rules: one printable line of plain data from which an example is made again.

The numbers of a case are made in properties/rules/numbers.py.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.norm import NORM_FORMS
from oracles.operation import DTYPES, NAMES, Inputs, Operation
from oracles.operations import RULES
from oracles.rule.gated_delta import rule_of
from properties.rules.numbers import LOWER_BOUNDS, MEMORIES, NORM_EPS, OF_CHANNELS, SCALES, cotangents_of, drawn
from properties.words.line import MAX_HEADS, MAX_SEQUENCES, MAX_TOKENS, MAX_WIDTH, Line, check_choices, text_of
from properties.words.options import values_of

GATES = (*MEMORIES, "saturated", "mixed")
GIVEN_GATES = ("edges", "closed")  # only where the log-decay is given
COMPUTED_GATES = ("thresholds",)  # only where the kernel computes it
BETAS = ("ordinary", "one", "zero", "two", "edges")
VALUES = ("ordinary", "correlated", "repeated", "zero_rows", "small", "scaled", "large", "great", "one_hot")
STATES = ("none", "zero", "random")
IN_KERNEL = ("none", "gate", "beta", "both")
DECAYS = ("log", "linear")
STATE_DTYPES = ("fp32", "input", "bf16")
FINAL_DTYPES = (*STATE_DTYPES, "state")
INITIAL_STATES, FINAL_STATES = ("each", "first"), ("each", "last", "none")  # "first" and "last" are about packed calls
# What an operation computes itself or takes in another form, and the input that says so.
INSIDE = {"gate": "a", "beta": "b", "linear": "alpha"}
LEFT_OUT = ("none", "gate", "beta", "both")
CHANNEL_DECAYS = ("none", "keys", "values", "both")
PARAMETER_DTYPES = ("fp32", "input")
GAIN = 1e4  # the largest factor from a cotangent to the gradient of a row of zeros with which fp16 gradients do not overflow

_CHOICES: dict[str, Sequence[str]] = {
    "operation": tuple(RULES),
    "dtype": tuple(DTYPES),
    "gate": (*GATES, *GIVEN_GATES, *COMPUTED_GATES),
    "beta": BETAS,
    "values": VALUES,
    "state": STATES,
    "scale": tuple(SCALES),
    "offsets": ("int64", "int32"),
    "gate_dtype": ("fp32", "input"),
    "in_kernel": IN_KERNEL,
    "decay": DECAYS,
    "left_out": LEFT_OUT,
    "channel_decays": CHANNEL_DECAYS,
    "lower_bound": tuple(LOWER_BOUNDS),
    "parameter_dtype": PARAMETER_DTYPES,
    "qk_norm_eps": tuple(NORM_EPS),
    "qk_norm_form": NORM_FORMS,
    "state_dtype": STATE_DTYPES,
    "final_dtype": FINAL_DTYPES,
    "initial_states": INITIAL_STATES,
    "final_states": FINAL_STATES,
}


def overflows(eps: str, form: str) -> bool:
    """Whether float16 gradients of a row of zeros overflow: those of the normalised row, divided by the root of eps or by eps."""
    return 1 / (NORM_EPS[eps] if form == "max" else math.sqrt(NORM_EPS[eps])) > GAIN


@dataclasses.dataclass(frozen=True)
class Case(Line):
    """One example of a rule. Fields at their defaults, which are the simplest values, are left out of the line.

    `lengths` are tokens per sequence: packed (THD, `cu_seqlens`), or a batch if all are equal. `gate` is the memory in tokens,
    `beta` the regime of beta, and `values` the regime of q, k and v. `qk_norm` says whether the operation normalises q and k.
    With `qk_norm_form="inside"` it divides by sqrt(|x|^2 + eps), with "max" by max(|x|, eps); eps is `qk_norm_eps`.
    `in_kernel` says which of gate and beta the operation computes itself: the gate from a, A_log and perhaps `dt_bias`, beta from
    b. `decay` says whether the operation takes the log-decay g, or the decay alpha itself. `left_out` says which of gate and beta
    the call leaves out. `channel_decays` says which decays of single channels the call has in addition to the gate: gk for the
    keys' channels, gv for the values' channels. `lower_bound` is the lower bound of KDA's gate in the kernel, and
    `parameter_dtype` the dtype of A_log and dt_bias: float32, or that of q. `options` are the options of the implementation
    (properties/words/options.py) that do not have their first value.

    `state_dtype` is the dtype of initial states, if there are any. `final_dtype` is that of final states; "state" means the dtype
    of the initial state, or float32 if there is none. In a packed call, `initial_states` and `final_states` say which sequences
    have an initial state and which return a final one. With `final_states="none"` no call returns one.

    ValueError for a field outside its choices or range, or for fields that exclude each other.
    """

    LONG: ClassVar[dict[str, str]] = {"operation": "op"}
    REGIMES: ClassVar[tuple[str, ...]] = (
        *("dtype", "gate", "beta", "values", "state", "in_kernel", "decay"),
        *("left_out", "channel_decays", "lower_bound", "parameter_dtype", "qk_norm_eps", "qk_norm_form"),
    )
    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = _CHOICES
    # The words on which a compiled kernel depends; of state only whether it is none, of beta only whether it is two
    # (properties/palette.py).
    KEYS: ClassVar[tuple[str, ...]] = (
        *("packed", "heads", "value_heads", "key_dim", "value_dim", "dtype", "gate_dtype", "state", "scale", "qk_norm"),
        *("in_kernel", "dt_bias", "beta", "offsets", "decay", "state_dtype", "final_dtype"),
        *("left_out", "channel_decays", "lower_bound", "parameter_dtype", "qk_norm_eps", "qk_norm_form", "options"),
    )

    lengths: tuple[int, ...]
    operation: str = "gated_delta_rule"
    packed: bool = False
    heads: int = 1
    value_heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    dtype: str = "fp32"
    gate: str = "forever"
    gate_dtype: str = "fp32"
    beta: str = "ordinary"
    values: str = "ordinary"
    state: str = "none"
    scale: str = "default"
    qk_norm: bool = False
    in_kernel: str = "none"
    dt_bias: bool = True
    offsets: str = "int64"
    decay: str = "log"
    left_out: str = "none"
    channel_decays: str = "none"
    lower_bound: str = "none"
    parameter_dtype: str = "fp32"
    qk_norm_eps: str = "1e-6"
    qk_norm_form: str = "inside"
    options: str = "none"
    state_dtype: str = "fp32"
    final_dtype: str = "fp32"
    initial_states: str = "each"
    final_states: str = "each"
    backward: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        if not self.lengths or min(self.lengths) < 0:
            raise ValueError(f"lengths must name at least one sequence, and no length may be negative, got {text_of(self.lengths)}")
        if len(self.lengths) > MAX_SEQUENCES:
            raise ValueError(f"lengths must name at most {MAX_SEQUENCES} sequences, got {len(self.lengths)}")
        if sum(self.lengths) > MAX_TOKENS:
            raise ValueError(f"lengths must add up to at most {MAX_TOKENS} tokens, got {sum(self.lengths)}")
        for name, most in (
            ("heads", MAX_HEADS),
            ("value_heads", MAX_HEADS),
            ("key_dim", MAX_WIDTH),
            ("value_dim", MAX_WIDTH),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be in 1..{most}, got {getattr(self, name)}")
        if self.value_heads % self.heads:
            raise ValueError(f"value_heads must be a multiple of heads {self.heads}, got {self.value_heads}")
        if not self.packed and len(set(self.lengths)) > 1:
            raise ValueError(f"lengths must all be equal unless packed=yes, got {text_of(self.lengths)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in 0..{2**32 - 1}, got {self.seed}")
        if self.values == "one_hot" and (self.gate, self.beta, self.qk_norm) != ("forever", "one", False):
            raise ValueError("values=one_hot needs gate=forever beta=one qk_norm=no: only then is the answer exact")
        if self.values == "one_hot" and self.in_kernel != "none":
            raise ValueError(f"values=one_hot needs in_kernel=none: only then is the answer exact, got {self.in_kernel}")
        if self.operation == "delta_rule" and self.gate_inside:
            raise ValueError(f"in_kernel must be none or beta for op=delta_rule, which has no gate, got {self.in_kernel}")
        if self.gate in GIVEN_GATES and (self.gate_inside or self.decay != "log"):
            raise ValueError(f"gate={self.gate} needs a log-decay that is given: in_kernel=none or beta, decay=log")
        if self.gate in COMPUTED_GATES and not self.gate_inside:
            raise ValueError(f"gate={self.gate} needs a gate in the kernel: in_kernel=gate or both, got {self.in_kernel}")
        if self.decay == "linear" and (self.operation == "delta_rule" or self.gate_inside):
            what = "op=delta_rule" if self.operation == "delta_rule" else f"in_kernel={self.in_kernel}"
            raise ValueError(f"decay must be log for {what}, which takes no decay, got {self.decay}")
        values_of(self.options)
        self._check_rare_words()

    def _check_rare_words(self) -> None:
        """Raise ValueError if a word that few cases have stands beside another word that excludes it."""
        for name, has in (("gate", self.without_gate), ("beta", self.without_beta)):
            if has and self.in_kernel in (name, "both"):
                raise ValueError(f"left_out={self.left_out} needs in_kernel without {name}, got {self.in_kernel}")
        if self.without_gate and (self.operation == "delta_rule" or self.gate != "forever" or self.decay != "log"):
            raise ValueError(f"left_out={self.left_out} needs a rule with a gate, gate=forever and decay=log: nothing decays")
        if self.without_beta and self.beta != "one":
            raise ValueError(f"left_out={self.left_out} needs beta=one, because a beta that is left out is 1, got {self.beta}")
        if self.channel_decays != "none" and (self.operation != "gated_delta_rule" or self.decay != "log"):
            raise ValueError(f"channel_decays={self.channel_decays} needs op=gated_delta_rule decay=log, got op={self.operation}")
        if self.channel_decays != "none" and self.values == "one_hot":
            raise ValueError("values=one_hot needs channel_decays=none: only then is the answer exact")
        if self.lower_bound != "none" and not (self.operation == "kda" and self.gate_inside):
            raise ValueError(
                f"lower_bound={self.lower_bound} needs op=kda and in_kernel=gate or both, got in_kernel={self.in_kernel}"
            )
        if self.parameter_dtype != "fp32" and not self.gate_inside:
            raise ValueError(f"parameter_dtype={self.parameter_dtype} needs in_kernel=gate or both, got {self.in_kernel}")
        if (self.qk_norm_eps, self.qk_norm_form) != ("1e-6", "inside"):
            words = f"qk_norm_eps={self.qk_norm_eps} qk_norm_form={self.qk_norm_form}"
            if not self.qk_norm:
                raise ValueError(f"{words} needs qk_norm=yes")
            if self.dtype == "fp16" and self.backward and overflows(self.qk_norm_eps, self.qk_norm_form):
                raise ValueError(f"{words} needs backward=no or another dtype than fp16, where gradients of rows of zeros overflow")

    @property
    def gate_inside(self) -> bool:
        """Whether the operation computes its gate."""
        return self.in_kernel in ("gate", "both")

    @property
    def beta_inside(self) -> bool:
        """Whether the operation computes its beta."""
        return self.in_kernel in ("beta", "both")

    @property
    def without_gate(self) -> bool:
        """Whether the call leaves out the gate."""
        return self.left_out in ("gate", "both")

    @property
    def without_beta(self) -> bool:
        """Whether the call leaves out beta."""
        return self.left_out in ("beta", "both")

    @property
    def spec(self) -> Operation:
        """The operation's contract."""
        inside = {"gate": self.gate_inside, "beta": self.beta_inside, "linear": self.decay == "linear"}
        without = ("gate",) * self.without_gate + ("beta",) * self.without_beta
        channels = tuple(name for name, word in OF_CHANNELS.items() if self.channel_decays in (word, "both"))
        initial = self.dtype_of_states if self.state != "none" else None
        return self._with_states(self.dtype, inside, without, channels, initial, packed=self.packed)

    def spec_of(self, inputs: Inputs) -> Operation:
        """Return the contract of a call like the case's; the call may have a gate or beta that the case's computes or leaves out.

        The call may also have another dtype, have an initial state where the case has none, or be packed where the case is not.
        """
        inside, state = {name: inputs.get(raw) is not None for name, raw in INSIDE.items()}, inputs.get("state")
        gate = self.without_gate and not (inside["gate"] or inside["linear"]) and inputs.get("g") is None
        beta = self.without_beta and not inside["beta"] and inputs.get("beta") is None
        without = ("gate",) * gate + ("beta",) * beta
        channels = tuple(name for name in OF_CHANNELS if inputs.get(name) is not None)
        initial = None if state is None else NAMES.get(state.dtype, "fp32")
        q = inputs.get("q")
        dtype = NAMES.get(q.dtype, self.dtype) if isinstance(q, Tensor) else self.dtype
        return self._with_states(dtype, inside, without, channels, initial, packed=inputs.get("cu_seqlens") is not None)

    def _with_states(
        self,
        dtype: str,
        inside: Mapping[str, bool],
        without: tuple[str, ...],
        channels: tuple[str, ...],
        initial: str | None,
        *,
        packed: bool,
    ) -> Operation:
        """Return the contract of a call of inputs in `dtype` that has initial states of a dtype, or none."""
        final = {"input": dtype, "state": initial or "fp32"}.get(self.final_dtype, self.final_dtype)
        first, last = packed and self.initial_states == "first", packed and self.final_states == "last"
        states = {"initial": initial or "fp32", "final": final}
        return rule_of(self.operation, **inside, without=without, channels=channels, **states, first=first, last=last)

    def carried_dtype(self, domain: Any, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a final state becomes an initial state: its own if the domain has it, else the domain's
        first."""
        allowed = [DTYPES[self.dtype if name == "input" else name] for name in domain.state_dtypes]
        return dtype if dtype in allowed else allowed[0]

    @property
    def dtype_of_states(self) -> str:
        """The name of the dtype of the case's initial states."""
        return self.dtype if self.state_dtype == "input" else self.state_dtype

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences together."""
        return sum(self.lengths)

    @property
    def bytes(self) -> int:
        """The bytes of inputs, outputs and gradients in float32, a simple measure of the case's size."""
        tokens = self.tokens * (2 * self.heads * self.key_dim + self.value_heads * (2 * self.value_dim + 2))
        return 8 * (tokens + 2 * len(self.lengths) * self.value_heads * self.key_dim * self.value_dim)

    def starts(self) -> list[int]:
        """Return the first token of each sequence, and the end of the last sequence."""
        return [0, *itertools.accumulate(self.lengths)]

    def inputs(self, device: str | None = None) -> Inputs:
        """Return the contiguous inputs: q, k [B, T, H, K], v [B, T, HV, V], g, beta [B, T, HV], state [N, HV, K, V] and options.

        g is [B, T, HV, K] for KDA, and None for the delta rule. With decay=linear, g is None and there is alpha in its place. If
        the kernel computes its gate, g is None and there are a (shaped as g would be), A_log [HV] and dt_bias [HV] or [HV, K]. If
        it computes beta, beta is None and there is b [B, T, HV].
        """
        return drawn([self], device, backward=False)[0][0]

    def cotangents(self, device: str | None = None) -> dict[str, Tensor]:
        """Return a random cotangent for every output, the final state included, in the output's shape and dtype."""
        return cotangents_of(self, device)
