"""The Gated DeltaNet (GDN) layer of Qwen3-Next and the KDA layer of Kimi Linear in float64: their widths, and what they compute.

    [q k v | z | b a] = in_proj x                     sections in this order; transformers interleaves them per key head
    q, k, v = silu(conv1d(q, k, v))                   causal, depthwise, one filter a channel
    g, beta = -exp(A_log) softplus(a + dt_bias), sigmoid(b)
    o = gated delta rule(norm(q), norm(k), v, g, beta)
    y = out_proj (norm(o) silu(z))                    RMS norm of each head, with a weight

The KDA layer has one decay for each channel of the key. The decay and the output gate have low rank, V:

    [q k v | z f b] = in_proj x
    q, k, v = silu(conv1d(q, k, v))
    g, beta = -exp(A_log) softplus(decay_proj f + dt_bias), sigmoid(b)      or g with a lower bound (oracles/gates.py)
    o = KDA(norm(q), norm(k), v, g, beta)
    y = out_proj (norm(o) sigmoid(gate_proj z + gate_bias))

Each line is an operation of its own (oracles/conv.py, gates.py, gated_delta.py, norm.py). This module composes them.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from oracles import conv, gates, norm
from oracles.arithmetic.rounding import Arithmetic
from oracles.operation import Inputs, Operation, Port, Rule, flag, one_a_sequence, padding_of_rows
from oracles.rule import gated_delta


@dataclasses.dataclass(frozen=True)
class Layer:
    """The widths of one layer. ValueError for a width below 1, or if value_heads is not a multiple of heads."""

    hidden: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            width = getattr(self, field.name)
            if not isinstance(width, int) or isinstance(width, bool) or width < 1:
                raise ValueError(f"{field.name} must be a whole number from 1 up, got {width!r}")
        if self.value_heads % self.heads:
            raise ValueError(f"value_heads must be a multiple of heads {self.heads}, got {self.value_heads}")

    @property
    def sections(self) -> dict[str, int]:
        """The widths of the sections of in_proj's output, in order: q, k, v, z, b, a."""
        keys, values = self.heads * self.key_dim, self.value_heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "z": values, "b": self.value_heads, "a": self.value_heads}

    def offsets(self) -> dict[str, int]:
        """Return where each section begins in in_proj's output."""
        ends = itertools.accumulate(self.sections.values())
        return {name: end - width for (name, width), end in zip(self.sections.items(), ends, strict=True)}


@dataclasses.dataclass(frozen=True)
class KdaLayer(Layer):
    """The widths of a KDA layer. ValueError as for Layer."""

    @property
    def sections(self) -> dict[str, int]:
        """The widths of the sections of in_proj's output, in order: q, k, v, z, f, b. z and f are first projections of gates."""
        keys, values = self.heads * self.key_dim, self.value_heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "z": self.value_dim, "f": self.value_dim, "b": self.value_heads}


def forward(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return y [runs, B, T, D], final_state [runs, N, HV, K, V] and conv_state [runs, N, C, W].

    C is the number of channels of q, k and v together. x has layer (a Layer), hidden [B, T, D], in_proj [E, D], conv [C, W], A_log,
    dt_bias [HV], norm [V] and out_proj [D, HV V]. It may have conv_bias [C], state [N, HV, K, V], conv_state [N, C, W],
    cu_seqlens [N + 1], eps, allow_neg_eigval, gating ("silu" or "sigmoid", the function of the norm's gate), and qk_norm_eps and
    qk_norm_form of the norm of q and k.

    Tensors that go from one operation to the next are stored in the inputs' dtype; log-decays and states are stored in float32.
    """
    return _layer(x, arithmetic, _gates_of_gdn)


def forward_kda(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return what `forward` returns, of a KDA layer.

    x has the inputs of `forward` without gating, but layer is a KdaLayer and dt_bias is [HV, K]. It also has decay_proj [HV K, V],
    gate_proj [HV V, V] and gate_bias [HV V], and may have lower_bound, that of the log-decay.
    """
    return _layer(x, arithmetic, _gates_of_kda)


class _Gates(NamedTuple):
    """What the gates of a layer are computed from: a [runs, B, T, HV] or [runs, B, T, HV, K], z [runs, B, T, HV V], and gating."""

    a: Tensor
    z: Tensor
    gating: str


def _layer(x: Inputs, arithmetic: Arithmetic, gates_of: Callable[..., _Gates]) -> dict[str, Tensor]:
    """Return the outputs of a layer. `gates_of` returns its `_Gates`, from the inputs and the sections of in_proj's output."""
    layer: Layer = x.layer
    stored = dataclasses.replace(arithmetic, stored=arithmetic.output)
    hidden, in_proj = arithmetic.input(x.hidden, "hidden"), arithmetic.input(x.in_proj, "in_proj")
    projected = _projected(hidden, in_proj, stored, "in_proj x")
    parts = dict(zip(layer.sections, projected.split(tuple(layer.sections.values()), -1), strict=True))
    mixed, (a, z, gating) = _convolved(x, projected, arithmetic), gates_of(x, parts, stored, arithmetic)
    shared = {"A_log": x.A_log, "dt_bias": x.dt_bias, "lower_bound": x.get("lower_bound")}
    gate = gates.forward(Inputs(a=a, b=parts["b"], **shared, allow_neg_eigval=x.get("allow_neg_eigval", False)), arithmetic)
    ruled = _ruled(x, mixed["y"], gate, arithmetic)
    z = z.unflatten(-1, (layer.value_heads, -1))
    normed = norm.forward_gated_rms_norm(Inputs(x=ruled["o"], z=z, weight=x.norm, eps=x.get("eps"), gating=gating), arithmetic)
    y = _answer(x, normed["y"], stored, arithmetic)
    return {"y": y, "final_state": ruled["final_state"], "conv_state": mixed["final_state"]}


def _gates_of_gdn(x: Inputs, parts: dict[str, Tensor], stored: Arithmetic, arithmetic: Arithmetic) -> _Gates:  # noqa: ARG001
    return _Gates(parts["a"], parts["z"], x.get("gating", "silu"))


def _gates_of_kda(x: Inputs, parts: dict[str, Tensor], stored: Arithmetic, arithmetic: Arithmetic) -> _Gates:
    """Return the second projections of f and z, to the latter of which a bias is added."""
    a = _projected(parts["f"], arithmetic.input(x.decay_proj, "decay_proj"), stored, "decay_proj f")
    z = _projected(parts["z"], arithmetic.input(x.gate_proj, "gate_proj"), stored, "gate_proj z")
    bias = arithmetic.input(x.gate_bias, "gate_bias")[:, None, None]
    z = stored.operand(z + gates.shared(bias, z.shape, arithmetic, "dgate_bias", arithmetic.output), "gate_proj z + gate_bias")
    return _Gates(a.unflatten(-1, (x.layer.value_heads, -1)), z, "sigmoid")


def _convolved(x: Inputs, projected: Tensor, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return y and final_state of the convolution of q, k and v, which are the first channels of in_proj's output."""
    return conv.forward(
        Inputs(
            x=projected[..., : x.layer.offsets()["z"]],
            weight=x.conv,
            bias=x.get("conv_bias"),
            state=x.get("conv_state"),
            cu_seqlens=x.get("cu_seqlens"),
            activation="silu",
        ),
        arithmetic,
    )


def _ruled(x: Inputs, mixed: Tensor, gate: dict[str, Tensor], arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return o and final_state of the rule; `mixed` has q, k and v after the convolution, and `gate` g and beta."""
    layer: Layer = x.layer
    q, k, v = mixed.split([layer.sections[name] for name in "qkv"], -1)
    return gated_delta.forward(
        Inputs(
            q=q.unflatten(-1, (layer.heads, -1)),
            k=k.unflatten(-1, (layer.heads, -1)),
            v=v.unflatten(-1, (layer.value_heads, -1)),
            **gate,
            state=x.get("state"),
            cu_seqlens=x.get("cu_seqlens"),
            scale=None,
            qk_norm=True,
            **norm.norm_of(x),
        ),
        arithmetic,
    )


def _answer(x: Inputs, normed: Tensor, stored: Arithmetic, arithmetic: Arithmetic) -> Tensor:
    """Return the projection of the gated norm [runs, B, T, HV, V]."""
    out_proj = arithmetic.input(x.out_proj, "out_proj")
    return arithmetic.result(_projected(normed.flatten(-2), out_proj, stored, "out_proj o"), "y")


def _projected(x: Tensor, weight: Tensor, arithmetic: Arithmetic, place: str) -> Tensor:
    """Return W x for each token of x [runs, B, T, D] and W [runs, E, D]; the product and its cotangent are stored."""
    product = arithmetic.multiply(x.flatten(1, 2), weight.mT, place)
    stored: Tensor = arithmetic.operand(product, place).unflatten(1, x.shape[1:3])
    return stored


def layer_widths(kind: type[Layer]) -> Rule:
    """Return the rule that every tensor has the widths of the layer, which is a `kind`."""

    def rule(inputs: Inputs, sizes: dict[str, int]) -> None:
        layer = inputs.get("layer")
        if not isinstance(layer, kind):
            raise ValueError(f"layer must be a {kind.__name__}, got {type(layer).__name__}")  # noqa: TRY004 - one kind of error
        wanted = {
            "D": layer.hidden,
            "E": sum(layer.sections.values()),
            "C": layer.offsets()["z"],
            "W": layer.conv_width,
            "HV": layer.value_heads,
            "V": layer.value_dim,
            "P": layer.sections["v"],
        }
        if inputs.get("state") is not None or "K" in sizes:
            wanted["K"] = layer.key_dim
        if "G" in sizes:
            wanted["G"] = layer.value_heads * layer.key_dim
        for axis, width in wanted.items():
            if sizes[axis] != width:
                raise ValueError(f"{axis} must be {width} for {layer}, got {sizes[axis]}")

    return rule


GDN_LAYER = Operation(
    "gdn_layer",
    (
        Port("hidden", "B T D"),
        Port("in_proj", "E D"),
        Port("conv", "C W"),
        Port("conv_bias", "C", optional=True, scalar_rows=True),
        Port("A_log", "HV", "parameter", scalar_rows=True),
        Port("dt_bias", "HV", "bias", scalar_rows=True),
        Port("norm", "V", scalar_rows=True),
        Port("out_proj", "D P"),
        Port("state", "N HV K V", "fp32", optional=True),
        Port("conv_state", "N C W", optional=True),
    ),
    (Port("y", "B T D"), Port("final_state", "N HV K V", "fp32"), Port("conv_state", "N C W")),
    forward,
    (
        layer_widths(Layer),
        one_a_sequence("state"),
        one_a_sequence("conv_state"),
        flag("allow_neg_eigval"),
        norm.positive_eps,
        norm.known_norm,
        norm.known_gating,
        padding_of_rows,
    ),
    ("layer", "allow_neg_eigval", "eps", "qk_norm_eps", "qk_norm_form", "gating", "output_final_state", "pads"),
)
_OF_GDN = {port.name: port for port in GDN_LAYER.inputs}
KDA_LAYER = dataclasses.replace(
    GDN_LAYER,
    name="kda_layer",
    inputs=(
        *(_OF_GDN[name] for name in ("hidden", "in_proj", "conv", "conv_bias")),
        Port("decay_proj", "G V"),
        Port("gate_proj", "P V"),
        Port("gate_bias", "P", scalar_rows=True),
        _OF_GDN["A_log"],
        Port("dt_bias", "HV K", "bias"),
        *(_OF_GDN[name] for name in ("norm", "out_proj", "state", "conv_state")),
    ),
    forward=forward_kda,
    rules=(layer_widths(KdaLayer), *(rule for rule in GDN_LAYER.rules[1:] if rule is not norm.known_gating), gates.negative_bound),
    options=(*(option for option in GDN_LAYER.options if option != "gating"), "lower_bound"),
)
