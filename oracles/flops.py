"""The model FLOPs of the GDN layer by term: those of its definition, whatever algorithm computes it.

A multiply-add is 2 FLOPs, so a sum of n products is 2 n FLOPs; a multiplication alone is 1. Only work on matrices is counted: on
the weights, and on a state S in R^{K x V} for each value head. Per token, with C = 2 H K + HV V the channels of q, k and v:

    term        forward                                      backward
    in_proj     2 hidden (C + HV V + 2 HV)                   twice that: the input's gradient, the weight's
    conv1d      2 W C                                        twice that: the input's gradient, the weight's
    decay         HV K V     S~ = exp(g) S                   3 HV K V: exp(g) dS~, and the sum of S dS~ for g
    recall      2 HV K V     r = S~^T k                      twice that: S~ dr for k, k (x) dr added to dS~
    write       2 HV K V     S = S~ + k (x) u                twice that: dS u for k, dS^T k for u
    read        2 HV K V     o = S^T q                       twice that: S do for q, q (x) do added to dS
    out_proj    2 hidden HV V                                twice that: the input's gradient, the weight's

The backward of a product of two matrices is two products of the same size. A decay is not such a product: for each entry, its
forward is one multiplication, and its backward one multiplication and one multiply-add. The first token of a sequence counts like
any other, although its state and the tokens before it are zeros.

Work that is linear in a token's widths is not counted: activations, norms, gates, u = beta (v - r), the scale, biases. The
additional work of a chunkwise algorithm is not counted either (its scores and its solve grow with the chunk), because that is the
algorithm's work, not the model's.
"""

import dataclasses

from oracles.layer import Layer


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs by term."""

    in_proj: int
    conv1d: int
    decay: int
    recall: int
    write: int
    read: int
    out_proj: int

    @property
    def gated_delta_rule(self) -> int:
        """The FLOPs on the states."""
        return self.decay + self.recall + self.write + self.read

    @property
    def total(self) -> int:
        """The FLOPs of all terms."""
        return self.in_proj + self.conv1d + self.gated_delta_rule + self.out_proj


def forward_flops(layer: Layer, tokens: int) -> Flops:
    """Return the layer's forward FLOPs on `tokens` tokens, all sequences together (batch x length).

    ValueError for a layer that is not a Layer, or a token count that is not a whole number from 0 up.
    """
    if not isinstance(layer, Layer):
        raise ValueError(f"layer must be a Layer, got {type(layer).__name__}")  # noqa: TRY004 - one kind of error
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise ValueError(f"tokens must be a whole number from 0 up, got {tokens!r}")
    widths = layer.sections
    channels = widths["q"] + widths["k"] + widths["v"]
    states = layer.value_heads * layer.key_dim * layer.value_dim
    return Flops(
        in_proj=2 * tokens * layer.hidden * sum(widths.values()),
        conv1d=2 * tokens * layer.conv_width * channels,
        decay=tokens * states,
        recall=2 * tokens * states,
        write=2 * tokens * states,
        read=2 * tokens * states,
        out_proj=2 * tokens * layer.hidden * widths["v"],
    )


def backward_flops(layer: Layer, tokens: int) -> Flops:
    """Return the layer's backward FLOPs, with a gradient for every input and parameter and no recomputation.

    Arguments and errors are those of `forward_flops`.
    """
    once = forward_flops(layer, tokens)
    twice = {name: 2 * flops for name, flops in dataclasses.asdict(once).items()}
    return Flops(**twice | {"decay": 3 * once.decay})


def training_flops(layer: Layer, tokens: int) -> Flops:
    """Return the layer's forward and backward FLOPs. Arguments and errors are those of `forward_flops`."""
    ahead, back = (dataclasses.asdict(count(layer, tokens)) for count in (forward_flops, backward_flops))
    return Flops(**{name: ahead[name] + back[name] for name in ahead})
