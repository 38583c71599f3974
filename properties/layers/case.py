"""Cases of a layer on one rank, GDN or KDA: one printable line for a call with its parameters, states and cotangents.

Parameters and hidden states are those of a case of properties/paths/case.py with one rank. Everything else comes from the same
counter: states, and parameters that only the KDA layer has or has in another shape.
"""

import dataclasses
import itertools
import math
from typing import Annotated, Any

import torch
from torch import Tensor

from oracles.arithmetic.counter import integers, mix_number
from oracles.arithmetic.rounding import BITS
from oracles.layer import GDN_LAYER, KDA_LAYER, KdaLayer, Layer
from oracles.norm import GATINGS
from oracles.operation import DTYPES, Inputs, Operation
from properties.modules.case import pads_of
from properties.paths.case import GATES, ParallelCase, scale_of, with_small_keys
from properties.rules.case import PARAMETER_DTYPES, Case
from properties.rules.numbers import LOWER_BOUNDS, SINGLE_PARAMETERS
from properties.words.line import Line
from properties.words.options import values_of
from properties.words.word import Word, always, like

VALUES = ("ordinary", "one_signed", "scaled", "small", "zero_rows")
STATES = ("none", "zero", "random", "some")
EPS = ("1e-6", "1e-5")
LAYERS = {operation.name: operation for operation in (GDN_LAYER, KDA_LAYER)}
_STREAMS = {name: 56 + index for index, name in enumerate(("state", "conv_state", "dfinal_state", "dconv_state", "zeros", "pads"))}
_STREAMS |= {name: 62 + (index << 40) for index, name in enumerate(("in_proj", "decay_proj", "gate_proj", "gate_bias", "dt_bias"))}
SMALL = 2.0**-8  # factor of hidden states that makes q and k about as small as the root of their norm's eps


@dataclasses.dataclass(frozen=True)
class LayerCase(Line):
    """One call of the layer. Fields at their defaults, the simplest values, are left out of the line.

    ValueError for a field outside its choices or range, or for fields that exclude each other.
    """

    lengths: tuple[int, ...]
    """Tokens per sequence: packed (THD, `cu_seqlens`), or a batch if all are equal."""
    operation: Annotated[str, Word(choices=tuple(LAYERS))] = "gdn_layer"
    packed: Annotated[bool, Word(key=True, counted=True)] = False
    heads: Annotated[int, Word(key=True)] = 1
    value_heads: Annotated[int, Word(key=True)] = 1
    key_dim: Annotated[int, Word(key=True)] = 8
    value_dim: Annotated[int, Word(key=True)] = 8
    hidden: int = 8
    conv_width: Annotated[int, Word(key=True, simplest=(1, 2, 3))] = 4
    conv_bias: Annotated[bool, Word(key=True, simplest=(False,))] = False
    dtype: Annotated[str, Word(choices=tuple(DTYPES), key=True, counted=True, simplest=("fp32", "bf16"))] = "fp32"
    gate: Annotated[str, Word(choices=GATES, counted=True, simplest=("long", "ordinary"))] = "long"
    """The memory of the heads, set by A_log and dt_bias."""
    values: Annotated[str, Word(choices=VALUES, counted=True, simplest=("ordinary",))] = "ordinary"
    """The regime of the hidden states."""
    cached: Annotated[bool, Word(key=True, counted=True, simplest=(False,))] = False
    """Whether the recurrent state and the convolution's state come out; else the call is one of training."""
    state: Annotated[str, Word(choices=STATES, key=True, counted=True, simplest=("none", "zero", "random"))] = "none"
    """What goes in; a kernel depends only on whether something does."""
    eps: Annotated[str, Word(choices=EPS, simplest=("1e-6",))] = "1e-6"
    allow_neg_eigval: Annotated[bool, Word(key=True, simplest=(False,))] = False
    offsets: Annotated[str, Word(choices=("int64", "int32"), key=True, simplest=("int64",), acts=lambda case: case.packed)] = (
        "int64"
    )
    gating: Annotated[str, Word(choices=GATINGS, key=True, counted=True, simplest=("silu",))] = "silu"
    """The function of the norm's gate."""
    lower_bound: Annotated[
        str,
        Word(
            choices=tuple(LOWER_BOUNDS), key=True, counted=True, simplest=("none",), acts=lambda case: case.operation == "kda_layer"
        ),
    ] = "none"
    """The lower bound of a KDA layer's log-decay."""
    parameter_dtype: Annotated[str, Word(choices=PARAMETER_DTYPES, key=True, counted=True, simplest=("fp32",))] = "fp32"
    """The dtype of A_log and dt_bias, as for rules."""
    qk_norm_eps: Annotated[str, like(Case, "qk_norm_eps", acts=always)] = "1e-6"
    """The eps of the norm of q and k."""
    qk_norm_form: Annotated[str, like(Case, "qk_norm_form", acts=always)] = "inside"
    options: Annotated[str, Word(key=True)] = "none"
    """Options of the implementation that do not have their first value (properties/words/options.py)."""
    backward: Annotated[bool, Word(simplest=(False,))] = True
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_words()
        values_of(self.options)
        if self.operation == "kda_layer" and self.gating != "silu":
            raise ValueError(f"gating must be left out for kda_layer, whose norm's gate is a sigmoid, got {self.gating}")
        if self.operation != "kda_layer" and self.lower_bound != "none":
            raise ValueError(f"lower_bound={self.lower_bound} needs op=kda_layer")
        self.whole()  # raises ValueError for fields that are illegal for a layer
        if self.state != "none" and not self.cached:
            raise ValueError(f"state={self.state} needs cached=yes: states that go in come out")

    def __str__(self) -> str:
        rest = super().__str__().replace(f" op={self.operation}", "")
        return f"op={self.operation} {rest}"  # always printed, because it selects the book of the line

    @property
    def spec(self) -> Operation:
        """The operation's contract."""
        return LAYERS[self.operation]

    def spec_of(self, inputs: Inputs) -> Operation:  # noqa: ARG002 - one signature for all cases
        """Return the contract of a call like the case's."""
        return self.spec

    @property
    def layer(self) -> Layer:
        """The widths of the layer."""
        layer = self.whole().layer
        return KdaLayer(**dataclasses.asdict(layer)) if self.operation == "kda_layer" else layer

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences together."""
        return sum(self.lengths)

    @property
    def bytes(self) -> int:
        """The bytes of inputs, outputs and gradients in float32, a simple measure of the case's size."""
        layer = self.layer
        wide = sum(layer.sections.values())
        parameters = self.hidden * (wide + layer.sections["v"]) + layer.offsets()["z"] * self.conv_width
        states = len(self.lengths) * (self.value_heads * self.key_dim * self.value_dim + layer.offsets()["z"] * self.conv_width)
        return 8 * (self.tokens * (2 * self.hidden + 2 * wide) + parameters + 2 * states)

    def starts(self) -> list[int]:
        """Return the first token of each sequence, and the end of the last sequence."""
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def batch(self) -> tuple[int, int]:
        """The two axes of tokens: [1, T] if packed, otherwise [B, T]."""
        return (1, self.tokens) if self.packed else (len(self.lengths), self.lengths[0])

    def whole(self) -> ParallelCase:
        """Return the case of one rank with the same parameters; its only sequence has all tokens, and one more if they are odd."""
        names = [field.name for field in dataclasses.fields(ParallelCase) if field.name in _SHARED]
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        values = "scaled" if self.values == "scaled" else "ordinary"
        return ParallelCase(
            **{
                **fields,
                "operation": "gdn_layer",
                "lengths": (self.tokens + self.tokens % 2,),
                "packed": False,
                "values": values,
                "state": "none",
            }
        )

    def inputs(self, device: str | None = None) -> Inputs:
        """Return the contiguous inputs: hidden [B, T, D], every parameter by its name in the contract, states or None, and options.

        `pads` is None, or the number of tokens at the start of each row of a batch that are padding. The contract does not have
        this option, because its meaning is the call without these tokens.
        """
        inputs, layer, count = self.whole().inputs(device), self.layer, len(self.lengths)
        hidden, usual = self._tokens(inputs.hidden), (self.qk_norm_eps, self.qk_norm_form) == ("1e-6", "inside")
        if self.values == "one_signed":
            hidden = ((hidden.double() + 1) / 2).to(hidden.dtype)
        if self.values == "small" and usual:
            hidden = hidden * SMALL
        if self.values == "zero_rows":
            hidden = hidden * (self._integers("zeros", self.batch, 2, device) != 0).unsqueeze(-1)
        state = conv_state = None
        if self.state != "none":
            state = self._uniform("state", (count, layer.value_heads, layer.key_dim, layer.value_dim), device, "fp32") / 4
            conv_state = self._uniform("conv_state", (count, layer.offsets()["z"], layer.conv_width), device)
            if self.state != "random":  # zeros for every sequence, or for every second one
                rows = torch.arange(count, device=device)
                keep = (rows % 2 != self.seed % 2) if self.state == "some" else rows < 0
                state, conv_state = state * keep.view(-1, 1, 1, 1), conv_state * keep.view(-1, 1, 1)
        offsets = torch.tensor(self.starts(), dtype=getattr(torch, self.offsets), device=device) if self.packed else None
        arguments = {"hidden": hidden, "eps": float(self.eps), "cu_seqlens": offsets, "state": state, "conv_state": conv_state}
        inputs = Inputs(**{**inputs, **arguments, "output_final_state": self.cached, "pads": None})
        if self.operation == "kda_layer":
            inputs = Inputs(**{**inputs, **self._of_kda(inputs, device)})
        if self.values == "small" and not usual:
            inputs = with_small_keys(inputs, self)
        if self.parameter_dtype != "fp32":
            names = {"A_log", "dt_bias"} - {*SINGLE_PARAMETERS[self.parameter_dtype]}
            inputs = inputs.replaced(**{name: inputs[name].to(DTYPES[self.dtype]) for name in names})
        return inputs if self.gating == "silu" else Inputs(**{**inputs, "gating": self.gating})

    def _of_kda(self, inputs: Inputs, device: str | None) -> dict[str, Any]:
        """Return the layer and the parameters that a KDA layer has in place of those of a GDN layer, or beside them."""
        layer, rank = self.layer, self.value_dim
        keys, values = layer.value_heads * layer.key_dim, layer.sections["v"]
        biases = self._uniform("dt_bias", (layer.value_heads, layer.key_dim), device, "fp32") / 2
        speeds = {}
        if self.lower_bound != "none":
            # With a bound of -5 the median memory of a head is 80 tokens (long) or 1.7 (ordinary), and five times as many with -1.
            inputs = inputs.replaced(A_log=inputs.A_log - inputs.A_log.round(), dt_bias=2 * inputs.dt_bias - 2)
            speeds = {"lower_bound": LOWER_BOUNDS[self.lower_bound], "A_log": inputs.A_log}
        return {
            **speeds,
            "layer": layer,
            "in_proj": self._uniform("in_proj", (sum(layer.sections.values()), layer.hidden), device) * scale_of(layer.hidden),
            "decay_proj": self._uniform("decay_proj", (keys, rank), device) * scale_of(rank),
            "gate_proj": self._uniform("gate_proj", (values, rank), device) * scale_of(rank),
            "gate_bias": self._uniform("gate_bias", (values,), device),
            "dt_bias": inputs.dt_bias.unsqueeze(-1) + biases,
        }

    def cotangents(self, device: str | None = None) -> dict[str, Tensor]:
        """Return a random cotangent for every output, in its shape and dtype; for states only if they are returned.

        The cotangent of the convolution's state is zero in column 0, which no call reads (oracles/conv.py). Cases of the
        convolution alone (properties/modules/case.py) have other numbers there.
        """
        layer, count = self.layer, len(self.lengths)
        result = {"y": self._tokens(self.whole().cotangents(device)["y"])}
        if self.cached:
            shape = (count, layer.value_heads, layer.key_dim, layer.value_dim)
            result["final_state"] = self._uniform("dfinal_state", shape, device, "fp32")
            result["conv_state"] = self._uniform("dconv_state", (count, layer.offsets()["z"], layer.conv_width), device)
            result["conv_state"][..., 0] = 0
        return result

    def pads(self) -> tuple[int, ...]:
        """Return how many tokens of each row the law `left_padding` turns into padding: none in one row, never all of a row."""
        return pads_of(self._integers("pads", (len(self.lengths),), 63, "cpu").tolist(), self.lengths)

    def _tokens(self, x: Tensor) -> Tensor:
        """Return the tokens [B, T, D] out of those of the whole case [1, T, D]."""
        return x[:, : self.tokens].reshape(*self.batch, x.shape[-1]).contiguous()

    def _uniform(self, name: str, shape: tuple[int, ...], device: str | None, dtype: str | None = None) -> Tensor:
        """Return numbers uniform in [-1, 1), on a grid of as many bits as the dtype holds."""
        dtype = dtype or self.dtype
        whole = self._integers(name, shape, BITS[dtype], device)
        return (whole.to(torch.float64) * 2.0 ** (1 - BITS[dtype])).to(DTYPES[dtype])

    def _integers(self, name: str, shape: tuple[int, ...], bits: int, device: str | None) -> Tensor:
        """Return integers uniform in [-2^(bits-1), 2^(bits-1))."""
        counter = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
        return integers((counter, mix_number(self.seed * 64 + _STREAMS[name]), bits))[0].view(shape)


_SHARED = {field.name for field in dataclasses.fields(LayerCase)}
