"""Cases of rules: one printable line of plain data from which an example is made again.

The numbers of a case are made in properties/rules/numbers.py.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from oracles.norm import NORM_FORMS
from oracles.operation import DTYPES, NAMES, Inputs, Operation
from oracles.operations import RULES
from oracles.rule.gated_delta import rule_of
from properties.rules.numbers import (
    LOWER_BOUNDS,
    MEMORIES,
    NORM_EPS,
    OF_CHANNELS,
    SCALES,
    SINGLE_PARAMETERS,
    cotangents_of,
    drawn,
)
from properties.words.line import MAX_HEADS, MAX_WIDTH, SEEDS, Line
from properties.words.options import values_of
from properties.words.word import Word

GATES = (*MEMORIES, "saturated", "mixed")
GIVEN_GATES = ("edges", "closed", "runs")  # only where the log-decay is given
COMPUTED_GATES = ("thresholds", "overflow")  # only where the kernel computes it
BETAS = ("ordinary", "one", "zero", "two", "edges", "runs")
VALUES = ("ordinary", "correlated", "one_signed", "repeated", "zero_rows", "small", "scaled", "large", "great", "one_hot")
STATES = ("none", "zero", "random", "some")
IN_KERNEL = ("none", "gate", "beta", "both")
DECAYS = ("log", "linear")
STATE_DTYPES = ("fp32", "input", "bf16")
FINAL_DTYPES = (*STATE_DTYPES, "state")
INITIAL_STATES, FINAL_STATES = ("each", "first"), ("each", "last", "none")  # "first" and "last" are about packed calls
# What an operation computes itself or takes in another form, and the input that says so.
INSIDE = {"gate": "a", "beta": "b", "linear": "alpha"}
LEFT_OUT = ("none", "gate", "beta", "both")
CHANNEL_DECAYS = ("none", "keys", "values", "both")
PARAMETER_DTYPES = ("fp32", "input", "mixed")
GAIN = 1e4  # the largest factor from a cotangent to the gradient of a row of zeros with which fp16 gradients do not overflow


def overflows(eps: str, form: str) -> bool:
    """Whether float16 gradients of a row of zeros overflow: those of the normalised row, divided by the root of eps or by eps."""
    return 1 / (NORM_EPS[eps] if form == "max" else math.sqrt(NORM_EPS[eps])) > GAIN


def check_norm(case: Any, *, acts: bool, needs: str, backward: bool) -> None:
    """Raise ValueError if a case has another norm of q and k than most where none acts, or gradients that overflow."""
    if (case.qk_norm_eps, case.qk_norm_form) != ("1e-6", "inside"):
        words = f"qk_norm_eps={case.qk_norm_eps} qk_norm_form={case.qk_norm_form}"
        if not acts:
            raise ValueError(f"{words} needs {needs}")
        if case.dtype == "fp16" and backward and overflows(case.qk_norm_eps, case.qk_norm_form):
            raise ValueError(f"{words} needs backward=no or another dtype than fp16, where gradients of rows of zeros overflow")


def check_gradients(domain: Any) -> None:
    """Raise ValueError if a domain with a norm in every case promises gradients, and they would overflow in all of its cases."""
    norms = itertools.product(domain.qk_norm_eps, domain.qk_norm_forms)
    if domain.backward and domain.dtypes == ("fp16",) and all(overflows(*norm) for norm in norms):
        raise ValueError(
            f"backward must be False for fp16 alone with qk_norm_eps {', '.join(domain.qk_norm_eps)} and qk_norm_forms "
            f"{', '.join(domain.qk_norm_forms)}, where gradients of rows of zeros overflow"
        )


def _gate_inside(case: Any) -> bool:
    return case.in_kernel in ("gate", "both")


@dataclasses.dataclass(frozen=True)
class Case(Line):
    """One example of a rule. Fields at their defaults, which are the simplest values, are left out of the line.

    ValueError for a field outside its choices or range, or for fields that exclude each other.
    """

    lengths: tuple[int, ...]
    """Tokens per sequence: packed (THD, `cu_seqlens`), or a batch if all are equal."""
    operation: Annotated[str, Word(choices=tuple(RULES))] = "gated_delta_rule"
    packed: Annotated[bool, Word(key=True)] = False
    heads: Annotated[int, Word(span=(1, MAX_HEADS), key=True)] = 1
    value_heads: Annotated[int, Word(span=(1, MAX_HEADS), key=True)] = 1
    key_dim: Annotated[int, Word(span=(1, MAX_WIDTH), key=True)] = 16
    value_dim: Annotated[int, Word(span=(1, MAX_WIDTH), key=True)] = 16
    dtype: Annotated[str, Word(choices=tuple(DTYPES), key=True, counted=True, simplest=("fp32", "bf16"))] = "fp32"
    gate: Annotated[str, Word(choices=(*GATES, *GIVEN_GATES, *COMPUTED_GATES), counted=True, simplest=("forever", "1000"))] = (
        "forever"
    )
    """The memory in tokens."""
    gate_dtype: Annotated[str, Word(choices=("fp32", "input"), key=True, simplest=("fp32",))] = "fp32"
    beta: Annotated[str, Word(choices=BETAS, key=True, counted=True, simplest=("ordinary",))] = "ordinary"
    """The regime of beta; a kernel depends only on whether it is two."""
    values: Annotated[str, Word(choices=VALUES, counted=True, simplest=("ordinary",))] = "ordinary"
    """The regime of q, k and v."""
    state: Annotated[str, Word(choices=STATES, key=True, counted=True, simplest=("none", "zero", "random"))] = "none"
    """What the initial states hold; a kernel depends only on whether there are any."""
    scale: Annotated[str, Word(choices=tuple(SCALES), key=True, simplest=("default",))] = "default"
    qk_norm: Annotated[bool, Word(key=True, simplest=(False,))] = False
    """Whether the operation normalises q and k."""
    in_kernel: Annotated[str, Word(choices=IN_KERNEL, key=True, counted=True, simplest=("none", "gate", "beta"))] = "none"
    """Which of gate and beta the operation computes itself: the gate from a, A_log and perhaps dt_bias, beta from b."""
    dt_bias: Annotated[bool, Word(key=True, acts=_gate_inside)] = True
    offsets: Annotated[str, Word(choices=("int64", "int32"), key=True, simplest=("int64",), acts=lambda case: case.packed)] = (
        "int64"
    )
    decay: Annotated[
        str,
        Word(
            choices=DECAYS,
            key=True,
            counted=True,
            simplest=("log",),
            acts=lambda case: not (_gate_inside(case) or case.operation == "delta_rule"),
        ),
    ] = "log"
    """Whether the operation takes the log-decay g, or the decay alpha itself."""
    left_out: Annotated[str, Word(choices=LEFT_OUT, key=True, counted=True, simplest=("none", "gate", "beta"))] = "none"
    """Which of gate and beta the call leaves out: then nothing decays, or beta is 1."""
    channel_decays: Annotated[str, Word(choices=CHANNEL_DECAYS, key=True, counted=True, simplest=("none", "keys", "values"))] = (
        "none"
    )
    """Which decays of single channels there are beside the gate: gk of the keys' channels, gv of the values' channels."""
    lower_bound: Annotated[
        str,
        Word(
            choices=tuple(LOWER_BOUNDS),
            key=True,
            counted=True,
            simplest=("none",),
            acts=lambda case: case.operation == "kda" and _gate_inside(case),
        ),
    ] = "none"
    """The lower bound of KDA's gate in the kernel."""
    parameter_dtype: Annotated[
        str, Word(choices=PARAMETER_DTYPES, key=True, counted=True, simplest=("fp32",), acts=_gate_inside)
    ] = "fp32"
    """The dtype of A_log and dt_bias: float32, or that of q; with "mixed" A_log is float32 and dt_bias has the dtype of q."""
    qk_norm_eps: Annotated[
        str, Word(choices=tuple(NORM_EPS), key=True, counted=True, simplest=("1e-6",), acts=lambda case: case.qk_norm)
    ] = "1e-6"
    qk_norm_form: Annotated[
        str, Word(choices=NORM_FORMS, key=True, counted=True, simplest=("inside",), acts=lambda case: case.qk_norm)
    ] = "inside"
    """The norm divides by sqrt(|x|^2 + eps) with "inside", by max(|x|, eps) with "max"."""
    options: Annotated[str, Word(key=True)] = "none"
    """Options of the implementation that do not have their first value (properties/words/options.py)."""
    state_dtype: Annotated[
        str, Word(choices=STATE_DTYPES, key=True, simplest=("fp32",), acts=lambda case: case.state != "none")
    ] = "fp32"
    """The dtype of initial states."""
    final_dtype: Annotated[str, Word(choices=FINAL_DTYPES, key=True, simplest=("fp32",))] = "fp32"
    """The dtype of final states; "state" means that of the initial state, or float32 if there is none."""
    initial_states: Annotated[
        str, Word(choices=INITIAL_STATES, simplest=("each",), acts=lambda case: case.packed and case.state != "none")
    ] = "each"
    """Which sequences of a packed call have an initial state."""
    final_states: Annotated[str, Word(choices=FINAL_STATES, simplest=("each",))] = "each"
    """Which sequences of a packed call return a final state; "none" means that no call returns one."""
    backward: Annotated[bool, Word(simplest=(False,))] = True
    seed: Annotated[int, Word(span=SEEDS)] = 0

    def __post_init__(self) -> None:
        self.check_words()
        if self.value_heads % self.heads:
            raise ValueError(f"value_heads must be a multiple of heads {self.heads}, got {self.value_heads}")
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
        check_norm(self, acts=self.qk_norm, needs="qk_norm=yes", backward=self.backward)

    @property
    def gate_inside(self) -> bool:
        """Whether the operation computes its gate."""
        return _gate_inside(self)

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

    def dtype_of(self, parameter: str) -> str:
        """Return the name of the dtype of A_log or dt_bias."""
        return "fp32" if parameter in SINGLE_PARAMETERS[self.parameter_dtype] else self.dtype

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
