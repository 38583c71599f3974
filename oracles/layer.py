"""The Gated DeltaNet (GDN) layer of Qwen3-Next in float64: its widths, and what it computes.

    [q k v | z | b a] = in_proj x                     sections in this order; transformers interleaves them per key head
    q, k, v = silu(conv1d(q, k, v))                   causal, depthwise, one filter a channel
    g, beta = -exp(A_log) softplus(a + dt_bias), sigmoid(b)
    o = gated delta rule(norm(q), norm(k), v, g, beta)
    y = out_proj (norm(o) silu(z))                    RMS norm of each head, with a weight

Each line is an operation of its own (oracles/conv.py, gates.py, gated_delta.py, norm.py). This module composes them.
"""

import dataclasses
import itertools

from torch import Tensor

from oracles import conv, gated_delta, gates, norm
from oracles.operation import Inputs, Operation, Port, flag, one_a_sequence
from oracles.rounding import Arithmetic


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


def forward(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return y [runs, B, T, D], final_state [runs, N, HV, K, V] and conv_state [runs, N, C, W].

    C is the number of channels of q, k and v together. x has layer (a Layer), hidden [B, T, D], in_proj [E, D], conv [C, W], A_log,
    dt_bias [HV], norm [V] and out_proj [D, HV V]. It may have conv_bias [C], state [N, HV, K, V], conv_state [N, C, W],
    cu_seqlens [N + 1], eps, allow_neg_eigval and gating ("silu" or "sigmoid", the function of the norm's gate).

    Tensors that go from one operation to the next are stored in the inputs' dtype; log-decays and states are stored in float32.
    """
    layer: Layer = x.layer
    stored = dataclasses.replace(arithmetic, stored=arithmetic.output)
    hidden, in_proj = arithmetic.input(x.hidden, "hidden"), arithmetic.input(x.in_proj, "in_proj")
    projected = _projected(hidden, in_proj, stored, "in_proj x")
    q, k, v, z, b, a = projected.split(tuple(layer.sections.values()), -1)
    mixed = conv.forward(
        Inputs(
            x=projected[..., : layer.offsets()["z"]],
            weight=x.conv,
            bias=x.get("conv_bias"),
            state=x.get("conv_state"),
            cu_seqlens=x.get("cu_seqlens"),
            activation="silu",
        ),
        arithmetic,
    )
    q, k, v = mixed["y"].split((q.shape[-1], k.shape[-1], v.shape[-1]), -1)
    gate = gates.forward(
        Inputs(a=a, b=b, A_log=x.A_log, dt_bias=x.dt_bias, allow_neg_eigval=x.get("allow_neg_eigval", False)), arithmetic
    )
    ruled = gated_delta.forward(
        Inputs(
            q=q.unflatten(-1, (layer.heads, -1)),
            k=k.unflatten(-1, (layer.heads, -1)),
            v=v.unflatten(-1, (layer.value_heads, -1)),
            **gate,
            state=x.get("state"),
            cu_seqlens=x.get("cu_seqlens"),
            scale=None,
            qk_norm=True,
        ),
        arithmetic,
    )
    gating = x.get("gating", "silu")
    normed = norm.forward_gated_rms_norm(
        Inputs(x=ruled["o"], z=z.unflatten(-1, (layer.value_heads, -1)), weight=x.norm, eps=x.get("eps"), gating=gating), arithmetic
    )
    out_proj = arithmetic.input(x.out_proj, "out_proj")
    y = arithmetic.result(_projected(normed["y"].flatten(-2), out_proj, stored, "out_proj o"), "y")
    return {"y": y, "final_state": ruled["final_state"], "conv_state": mixed["final_state"]}


def _projected(x: Tensor, weight: Tensor, arithmetic: Arithmetic, place: str) -> Tensor:
    """Return W x for each token of x [runs, B, T, D] and W [runs, E, D]; the product and its cotangent are stored."""
    product = arithmetic.multiply(x.flatten(1, 2), weight.mT, place)
    stored: Tensor = arithmetic.operand(product, place).unflatten(1, x.shape[1:3])
    return stored


def layer_widths(inputs: Inputs, sizes: dict[str, int]) -> None:
    """Rule: every tensor has the widths of the layer."""
    layer = inputs.get("layer")
    if not isinstance(layer, Layer):
        raise ValueError(f"layer must be a Layer, got {type(layer).__name__}")  # noqa: TRY004 - one kind of error
    wanted = {
        "D": layer.hidden,
        "E": sum(layer.sections.values()),
        "C": layer.offsets()["z"],
        "W": layer.conv_width,
        "HV": layer.value_heads,
        "V": layer.value_dim,
        "P": layer.sections["v"],
    }
    if inputs.get("state") is not None:
        wanted["K"] = layer.key_dim
    for axis, width in wanted.items():
        if sizes[axis] != width:
            raise ValueError(f"{axis} must be {width} for {layer}, got {sizes[axis]}")


GDN_LAYER = Operation(
    "gdn_layer",
    (
        Port("hidden", "B T D"),
        Port("in_proj", "E D"),
        Port("conv", "C W"),
        Port("conv_bias", "C", optional=True, scalar_rows=True),
        Port("A_log", "HV", "parameter", scalar_rows=True),
        Port("dt_bias", "HV", "parameter", scalar_rows=True),
        Port("norm", "V", scalar_rows=True),
        Port("out_proj", "D P"),
        Port("state", "N HV K V", "fp32", optional=True),
        Port("conv_state", "N C W", optional=True),
    ),
    (Port("y", "B T D"), Port("final_state", "N HV K V", "fp32"), Port("conv_state", "N C W")),
    forward,
    (
        layer_widths,
        one_a_sequence("state"),
        one_a_sequence("conv_state"),
        flag("allow_neg_eigval"),
        norm.positive_eps,
        norm.known_gating,
    ),
    ("layer", "allow_neg_eigval", "eps", "gating", "output_final_state", "pads"),
)
