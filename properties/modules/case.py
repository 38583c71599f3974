"""Cases of a layer's modules (convolution, gates, norms): one printable line from which a call is made again, bit for bit.

As in properties/rules/numbers.py, every number comes from a counter: splitmix64 of (seed, tensor, position), scaled by powers
of two and rounded to the tensor's dtype.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from oracles.arithmetic.counter import integers, mix_number
from oracles.arithmetic.rounding import BITS, Arithmetic
from oracles.conv import CAUSAL_CONV1D, CAUSAL_CONV1D_SHORT_STATE
from oracles.gates import GDN_GATE, KDA_GATE, log_decay
from oracles.norm import GATED_RMS_NORM, GATED_RMS_NORM_OF_SUM, GATINGS, L2NORM, NORM_GATE_LINEAR
from oracles.operation import DTYPES, Inputs, Operation
from properties.rules.case import PARAMETER_DTYPES
from properties.rules.numbers import LOG_BITS, LOWER_BOUNDS, SINGLE_PARAMETERS
from properties.words.line import MAX_HEADS, SEEDS, Line
from properties.words.options import values_of
from properties.words.word import Word, text_of

MODULES = {operation.name: operation for operation in (CAUSAL_CONV1D, GDN_GATE, KDA_GATE, L2NORM, GATED_RMS_NORM, NORM_GATE_LINEAR)}
VALUES = ("ordinary", "one_signed", "growing", "repeated", "zero_rows", "small", "scaled", "large", "great", "whole")
STATES = ("none", "zero", "random", "some")
STATE_COLUMNS = ("W", "W-1")
ACTIVATIONS = ("none", "silu")
EPS = {"1e-6": 1e-6, "1e-5": 1e-5, "default": None}
RESIDUALS = ("none", "added", "returned")
SMALL = 2.0**-13  # about 1e-4: there a norm's eps of 1e-6 is no longer negligible
# Factors of tokens' values. sigmoid(-128) is 0 in float32, softplus(128) is 128 and exp(128) overflows. The square of an x under
# 64 fits into fp16, but the sum of squares over many channels does not.
LARGE = {"x": 64.0, "z": 128.0, "a": 128.0, "b": 128.0, "residual": 64.0}
GREAT = {"fp32": 2.0**30, "bf16": 2.0**30, "fp16": 2.0**7}  # factors of x: sums over tokens and channels still fit
MAX_WIDTH, MAX_CONV_WIDTH = 16_384, 64

CONV, GATE = ("causal_conv1d",), ("gdn_gate", "kda_gate")
# Other streams than those of Case and ParallelCase.
_STREAMS = {
    name: 48 + index
    for index, name in enumerate(
        ("x", "z", "weight", "bias", "state", "a", "b", "A_log", "dt_bias", "dy", "dht", "dg", "dbeta", "scale", "zero", "linear")
    )
}
_STREAMS["residual"] = 63 + (1 << 40)  # as if the stream of `linear` had a seed of more than 32 bits, which no case has
# The stream of `scale` with a salt that no other draw has. Earlier versions drew pads from it, so their lines keep their pads.
_STREAMS["pads"] = 61 + (65 << 40)


def pads_of(numbers: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Return a number of padding tokens for each row, from one random number a row: none in one row, never all of a row."""
    pads = [number % max(length, 1) for number, length in zip(numbers, lengths, strict=True)]
    pads[numbers[0] % len(pads)] = 0 if len(pads) > 1 else pads[0]
    return tuple(pads)


def _decays(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    return {"g": log_decay(x, arithmetic)}


def _without_beta(operation: Operation) -> Operation:
    return dataclasses.replace(
        operation,
        inputs=tuple(port for port in operation.inputs if port.name != "b"),
        outputs=tuple(port for port in operation.outputs if port.name != "beta"),
        forward=_decays,
    )


_DECAYS = {operation.name: _without_beta(operation) for operation in (GDN_GATE, KDA_GATE)}


@dataclasses.dataclass(frozen=True)
class ModuleCase(Line):
    """One call of a module. Fields at their defaults, which are the simplest values, are left out of the line; `op` never is.

    ValueError for a field outside its choices or range, or for fields that exclude each other.
    """

    lengths: tuple[int, ...]
    """Tokens per sequence: packed (convolution only) or a batch."""
    operation: Annotated[str, Word(choices=tuple(MODULES))]
    packed: Annotated[bool, Word(key=True, of=CONV)] = False
    heads: Annotated[int, Word(span=(1, MAX_HEADS), key=True, of=(*GATE, "l2norm", "gated_rms_norm"))] = 1
    """H or HV."""
    width: Annotated[
        int, Word(span=(1, MAX_WIDTH), key=True, of=(*CONV, "kda_gate", "l2norm", "gated_rms_norm", "norm_gate_linear"))
    ] = 16
    """D, K or V."""
    out_width: Annotated[int, Word(span=(1, MAX_WIDTH), key=True, of=("norm_gate_linear",))] = 16
    """E."""
    conv_width: Annotated[int, Word(span=(1, MAX_CONV_WIDTH), key=True, of=CONV, simplest=(1, 2, 3))] = 4
    dtype: Annotated[str, Word(choices=tuple(DTYPES), key=True, counted=True, simplest=("fp32", "bf16"))] = "fp32"
    values: Annotated[str, Word(choices=VALUES, counted=True, simplest=("ordinary",))] = "ordinary"
    """The regime of the tokens' values.

    In `growing`, cotangents are not negative either, so that gradients of parameters grow with the number of tokens. In `whole`,
    all are small whole numbers, whose sums are exact.
    """
    bias: Annotated[bool, Word(key=True, of=(*CONV, "norm_gate_linear"), simplest=(False,))] = False
    weight: Annotated[bool, Word(key=True, of=("gated_rms_norm", "norm_gate_linear"), simplest=(False,))] = True
    activation: Annotated[str, Word(choices=ACTIVATIONS, key=True, counted=True, of=CONV, simplest=("none",))] = "none"
    state: Annotated[str, Word(choices=STATES, key=True, counted=True, of=CONV, simplest=("none", "zero", "random"))] = "none"
    """What initial states hold; a kernel depends only on whether there are any."""
    state_columns: Annotated[str, Word(choices=STATE_COLUMNS, key=True, of=CONV, simplest=("W",))] = "W"
    """How many columns the states of a convolution have: W, or W - 1."""
    final_state: Annotated[bool, Word(key=True, of=CONV, simplest=(True,))] = True
    oldest: Annotated[bool, Word(of=CONV, simplest=(True,))] = True
    """With `no`, column 0 of a final state of W columns, which no output reads, has a cotangent of zeros."""
    eps: Annotated[
        str, Word(choices=tuple(EPS), counted=True, of=("l2norm", "gated_rms_norm", "norm_gate_linear"), simplest=("1e-6",))
    ] = "1e-6"
    dt_bias: Annotated[bool, Word(key=True, of=GATE, simplest=(False,))] = True
    beta: Annotated[bool, Word(key=True, of=GATE, simplest=(False,))] = True
    """Whether beta is computed beside the gate."""
    allow_neg_eigval: Annotated[bool, Word(key=True, of=GATE, simplest=(False,))] = False
    offsets: Annotated[
        str, Word(choices=("int64", "int32"), key=True, of=CONV, simplest=("int64",), acts=lambda case: case.packed)
    ] = "int64"
    residual: Annotated[
        str, Word(choices=RESIDUALS, key=True, counted=True, of=(*CONV, "gated_rms_norm"), simplest=("none", "added"))
    ] = "none"
    """Whether a residual is added: to the result of a convolution, or to the x of a gated norm, which may return the sum too."""
    gating: Annotated[str, Word(choices=GATINGS, key=True, counted=True, of=("gated_rms_norm",), simplest=("silu",))] = "silu"
    """The function of a norm's gate."""
    lower_bound: Annotated[str, Word(choices=tuple(LOWER_BOUNDS), key=True, counted=True, of=("kda_gate",), simplest=("none",))] = (
        "none"
    )
    """The lower bound of KDA's gate."""
    parameter_dtype: Annotated[str, Word(choices=PARAMETER_DTYPES, key=True, counted=True, of=GATE, simplest=("fp32",))] = "fp32"
    """The dtype of A_log and dt_bias, as for rules."""
    options: Annotated[str, Word(key=True)] = "none"
    """Options of the implementation that do not have their first value (properties/words/options.py)."""
    backward: Annotated[bool, Word(simplest=(False,))] = True
    seed: Annotated[int, Word(span=SEEDS)] = 0

    def __post_init__(self) -> None:
        self.check_words()
        plain = {field.name: field.default for field in dataclasses.fields(self)}
        for name, known in self.WORDS.items():
            if known.of and self.operation not in known.of and getattr(self, name) != plain[name]:
                raise ValueError(f"op={self.operation} has no {name}: it must be left out, got {text_of(getattr(self, name))}")
        if self.values == "whole" and (self.operation != "causal_conv1d" or self.activation != "none"):
            raise ValueError(
                f"values=whole needs op=causal_conv1d activation=none: only then is the answer exact, "
                f"got op={self.operation} activation={self.activation}"
            )
        if self.state_columns != "W" and not self.oldest:
            raise ValueError(f"oldest=no needs state_columns=W, whose column 0 it is about, got state_columns={self.state_columns}")
        values_of(self.options)
        if self.residual == "returned" and self.operation != "gated_rms_norm":
            raise ValueError(f"residual=returned needs op=gated_rms_norm, got op={self.operation}")
        if self.allow_neg_eigval and not self.beta:
            raise ValueError("allow_neg_eigval=yes needs beta=yes, which it doubles, got beta=no")

    @classmethod
    def fields_of(cls, words: dict[str, str]) -> dict[str, str]:
        """Return the words by field name. ValueError for an unknown word, or if the operation is missing."""
        fields = super().fields_of(words)
        if "operation" not in fields:
            raise ValueError(f"a case line of a module must have op=, one of {', '.join(MODULES)}, got {words}")
        return fields

    @property
    def spec(self) -> Operation:
        """The operation's contract."""
        if self.state_columns != "W":
            return CAUSAL_CONV1D_SHORT_STATE
        if self.residual == "returned":
            return GATED_RMS_NORM_OF_SUM
        return MODULES[self.operation] if self.beta else _DECAYS[self.operation]

    def spec_of(self, inputs: Inputs) -> Operation:  # noqa: ARG002
        """Return the contract of a call like the case's."""
        return self.spec

    @property
    def columns(self) -> int:
        """The number of columns of a convolution's states."""
        return self.conv_width - (self.state_columns == "W-1")

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences together."""
        return sum(self.lengths)

    @property
    def batch(self) -> tuple[int, int]:
        """The two axes of tokens: [1, T] if packed, otherwise [B, T]."""
        return (1, self.tokens) if self.packed else (len(self.lengths), self.lengths[0])

    @property
    def bytes(self) -> int:
        """The bytes of inputs, outputs and gradients in float32, a simple measure of the case's size."""
        states = len(self.lengths) * self.width * self.columns if self.operation == "causal_conv1d" else 0
        projection = self.out_width * (self.tokens + self.width) if self.operation == "norm_gate_linear" else 0
        return 16 * (2 * self.tokens * self.heads * self.width + states + projection)

    def starts(self) -> list[int]:
        """Return the first token of each sequence, and the end of the last sequence."""
        return [0, *itertools.accumulate(self.lengths)]

    def dtype_of(self, parameter: str) -> str:
        """Return the name of the dtype of A_log or dt_bias."""
        return "fp32" if parameter in SINGLE_PARAMETERS[self.parameter_dtype] else self.dtype

    def pads(self) -> tuple[int, ...]:
        """Return how many tokens of each row the law `left_padding` turns into padding: none in one row, never all of a row."""
        return pads_of(_Builder(self, None).integers("pads", (len(self.lengths),), 63).tolist(), self.lengths)

    def inputs(self, device: str | None = None) -> Inputs:
        """Return the contiguous inputs of the operation's contract; cu_seqlens is None unless the case is packed.

        `pads` of a convolution is None, or the number of tokens at the start of each row of a batch that are padding. The contract
        does not have this option, because its meaning is the call without these tokens.
        """
        build = _Builder(self, device)
        work = DTYPES[self.dtype]

        def residual(axes: tuple[int, ...]) -> Tensor:
            rows: Tensor = build.rows("residual", axes).to(work).unflatten(0, self.batch)
            return rows

        if self.operation == "causal_conv1d":
            state = None
            if self.state != "none":
                state = build.states().to(work)
                state = torch.zeros_like(state) if self.state == "zero" else state
                if self.state == "some":  # zeros for every second sequence
                    state[self.seed % 2 :: 2] = 0
            return Inputs(
                x=build.rows("x", (self.width,)).to(work).unflatten(0, self.batch),
                weight=build.parameter("weight", (self.width, self.conv_width)).to(work),
                bias=build.parameter("bias", (self.width,)).to(work) if self.bias else None,
                state=state,
                cu_seqlens=torch.tensor(self.starts(), dtype=getattr(torch, self.offsets), device=device) if self.packed else None,
                activation=None if self.activation == "none" else self.activation,
                output_final_state=self.final_state,
                pads=None,
                **({} if self.residual == "none" else {"residual": residual((self.width,))}),
            )
        axes = self._token_axes
        if self.operation in _DECAYS:
            inside = {"b": build.rows("b", (self.heads,)).to(work).unflatten(0, self.batch)} if self.beta else {}
            return Inputs(
                a=build.rows("a", axes).to(work).unflatten(0, self.batch),
                A_log=build.speeds().to(DTYPES[self.dtype_of("A_log")]),
                dt_bias=build.parameter("dt_bias", axes).to(DTYPES[self.dtype_of("dt_bias")]) if self.dt_bias else None,
                allow_neg_eigval=self.allow_neg_eigval,
                **({} if self.lower_bound == "none" else {"lower_bound": LOWER_BOUNDS[self.lower_bound]}),
                cu_seqlens=None,
                **inside,
            )
        x = build.rows("x", axes).to(work).unflatten(0, self.batch)
        gated = {}
        if self.operation != "l2norm":
            weight = 2 * build.parameter("weight", axes[-1:]) if self.weight else None
            gated = {
                "z": build.rows("z", axes).to(work).unflatten(0, self.batch),
                "weight": None if weight is None else weight.to(work),
                **({} if self.residual == "none" else {"residual": residual(axes), "returns_sum": self.residual == "returned"}),
                **({} if self.gating == "silu" else {"gating": self.gating}),
            }
        if self.operation == "norm_gate_linear":
            gated["linear"] = build.projection().to(work)
            gated["bias"] = build.parameter("bias", (self.out_width,)).to(work) if self.bias else None
        return Inputs(x=x, eps=EPS[self.eps], cu_seqlens=None, **gated)

    def cotangents(self, device: str | None = None) -> dict[str, Tensor]:
        """Return a random cotangent for every output (the final state only if it is returned), in the output's shape and dtype."""
        build, work = _Builder(self, device), DTYPES[self.dtype]
        if self.operation == "causal_conv1d":
            result = {"y": build.cotangent("dy", (self.tokens, self.width)).to(work).unflatten(0, self.batch)}
            if self.final_state:
                state = build.cotangent("dht", (len(self.lengths), self.width, self.columns)).to(work)
                if not self.oldest:
                    state[..., 0] = 0.0
                result["final_state"] = state
            return result
        axes = self._token_axes
        if self.operation in _DECAYS:
            g = build.cotangent("dg", (self.tokens, *axes)).to(DTYPES["fp32"]).unflatten(0, self.batch)
            beta = build.cotangent("dbeta", (self.tokens, self.heads)).to(work).unflatten(0, self.batch)
            return {"g": g, "beta": beta} if self.beta else {"g": g}
        axes = (self.out_width,) if self.operation == "norm_gate_linear" else axes
        result = {"y": build.cotangent("dy", (self.tokens, *axes)).to(work).unflatten(0, self.batch)}
        if self.residual == "returned":
            result["sum"] = build.cotangent("dht", (self.tokens, *axes)).to(work).unflatten(0, self.batch)
        return result

    @property
    def _token_axes(self) -> tuple[int, ...]:
        """The axes of a token of a gate or a norm."""
        if self.operation == "gdn_gate":
            return (self.heads,)
        return (self.width,) if self.operation == "norm_gate_linear" else (self.heads, self.width)


class _Builder:
    """Makes the tensors of a case in float64, exactly, with tokens flattened along axis 0."""

    def __init__(self, case: ModuleCase, device: str | None) -> None:
        self.case, self.device = case, device
        self.bits = BITS[case.dtype]
        token = torch.arange(case.tokens, dtype=torch.int64, device=device)
        if case.values == "repeated":  # each token repeats the first of its sequence
            starts = torch.tensor(case.starts()[:-1], dtype=torch.int64, device=device)
            token = starts.repeat_interleave(torch.tensor(case.lengths, device=device))
        self.token = token

    def rows(self, name: str, axes: tuple[int, ...]) -> Tensor:
        """Return the values of tokens [tokens, *axes]: uniform in [-1, 1), or [-2, 2) for gates, changed as the regime says."""
        case, shape = self.case, (self.case.tokens, *axes)
        if case.values == "whole":
            return self.integers(name, shape, 3, rows=self.token).to(torch.float64)
        x = self.uniform(name, shape, rows=self.token)
        if case.values == "great" and name == "x":
            return GREAT[case.dtype] * x
        if case.values in ("large", "great"):
            return LARGE[name] * x
        if case.values in ("one_signed", "growing") and name in ("x", "z", "residual"):
            return (x + 1) / 2
        x = 2 * x if name in ("z", "a", "b") else x
        return SMALL * x if case.values == "small" else self.regime(x, name)

    def states(self) -> Tensor:
        """Return initial states [N, D, W], or [N, D, W - 1]."""
        case, shape = self.case, (len(self.case.lengths), self.case.width, self.case.columns)
        if case.values == "whole":
            return self.integers("state", shape, 3).to(torch.float64)
        x = self.uniform("state", shape)
        return LARGE["x"] * x if case.values == "large" else SMALL * x if case.values == "small" else self.regime(x, "state")

    def parameter(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter, uniform in [-1, 1).

        dt_bias has the bits of float32 whatever the inputs are, and is in [-16, 16) if values are large.
        """
        if self.case.values == "whole":
            return self.integers(name, shape, 3).to(torch.float64)
        x = self.uniform(name, shape, bits=BITS["fp32"] if name == "dt_bias" else None)
        return 16 * x if name == "dt_bias" and self.case.values == "large" else x

    def projection(self) -> Tensor:
        """Return a matrix [E, D], uniform and scaled by a power of two, so that a sum over D or E is as large as its terms."""
        case = self.case
        power = max(case.width, case.out_width).bit_length() // 2
        return self.uniform("linear", (case.out_width, case.width)) * 2.0**-power

    def speeds(self) -> Tensor:
        """Return A_log [HV], in [-5, 3), or in [-8, 8) if values are large."""
        x = self.uniform("A_log", (self.case.heads,), bits=LOG_BITS)
        return 8 * x if self.case.values == "large" else 4 * x - 1

    def cotangent(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a cotangent, uniform in [-1, 1), in [0, 1) if values are growing, or of small whole numbers."""
        if self.case.values == "whole":
            return self.integers(name, shape, 3).to(torch.float64)
        x = self.uniform(name, shape)
        return (x + 1) / 2 if self.case.values == "growing" else x

    def regime(self, x: Tensor, name: str) -> Tensor:
        """Set rows to zero, or scale them by powers of two in 2^-6..2^5, as the regime says.

        A row belongs to a token (and head), or to a channel of a state.
        """
        of_row = x.shape[:1] if x.ndim < 3 else x.shape[:2]
        rows = None if name == "state" else self.token
        if self.case.values == "zero_rows":
            keep = self.integers("zero", of_row, 2, rows=rows, salt=_STREAMS[name]) != 0
            return x * keep.reshape(*of_row, *[1] * (x.ndim - len(of_row)))
        if self.case.values == "scaled":
            exponent = self.integers("scale", of_row, 16, rows=rows, salt=_STREAMS[name]) % 12 - 6
            table = torch.tensor([2.0**power for power in range(-6, 6)], dtype=torch.float64, device=self.device)
            return x * table[exponent + 6].reshape(*of_row, *[1] * (x.ndim - len(of_row)))
        return x

    def uniform(self, name: str, shape: tuple[int, ...], bits: int | None = None, rows: Tensor | None = None) -> Tensor:
        """Return numbers uniform in [-1, 1), on a grid of `bits` bits (default: as many as the dtype holds)."""
        bits = self.bits if bits is None else bits
        return self.integers(name, shape, bits, rows=rows).to(torch.float64) * 2.0 ** (1 - bits)

    def integers(self, name: str, shape: tuple[int, ...], bits: int, rows: Tensor | None = None, salt: int = 0) -> Tensor:
        """Return integers uniform in [-2^(bits-1), 2^(bits-1)), one for each position; `rows` renumbers axis 0."""
        width = math.prod(shape[1:])
        first = torch.arange(shape[0], dtype=torch.int64, device=self.device) if rows is None else rows
        counter = first.unsqueeze(-1) * width + torch.arange(width, dtype=torch.int64, device=self.device)
        key = mix_number(self.case.seed * 64 + _STREAMS[name] + (salt << 40))
        return integers((counter.flatten(), key, bits))[0].view(shape)


def words_of(operation: str) -> tuple[str, ...]:
    """Return the words of a line that this operation has but not all operations have."""
    return tuple(name for name, known in ModuleCase.WORDS.items() if operation in known.of)
