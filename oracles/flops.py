"""The model FLOPs of the GDN layer, term by term: what its definition computes, whatever algorithm computes it.

A multiply-add is 2 FLOPs, hence a sum of n products 2 n; a multiplication alone is 1. Counted is the work on matrices: the
weights, and a state S in R^{K x V} for each value head. Per token, C = 2 H K + HV V the channels of q, k and v:

    term        forward                                      backward
    in_proj     2 hidden (C + HV V + 2 HV)                   twice that: the input's gradient, the weight's
    conv1d      2 W C                                        twice that: the input's gradient, the weight's
    decay         HV K V     S~ = exp(g) S                   3 HV K V: exp(g) dS~, and the sum of S dS~ for g
    recall      2 HV K V     r = S~^T k                      twice that: S~ dr for k, k (x) dr added to dS~
    write       2 HV K V     S = S~ + k (x) u                twice that: dS u for k, dS^T k for u
    read        2 HV K V     o = S^T q                       twice that: S do for q, q (x) do added to dS
    out_proj    2 hidden HV V                                twice that: the input's gradient, the weight's

A product of two matrices has two products of the same size behind it on the way back. A decay is no such product: one
multiplication an entry on the way there, one and a multiply-add on the way back. The first token of a sequence counts like any
other, its state and the tokens before it being zeros.

Not counted is what is linear in a token's widths: activations, norms, gates, u = beta (v - r), the scale, biases. Nor is what a
chunkwise algorithm does on top (its scores and its solve grow with the chunk): that is the algorithm's work, not the model's.
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
        """All terms."""
        return self.in_proj + self.conv1d + self.gated_delta_rule + self.out_proj


def forward_flops(layer: Layer, tokens: int) -> Flops:
    """The layer's FLOPs forward on `tokens` tokens, all sequences together (batch x length).

    ValueError for a token count that is not a whole number from 0 up.
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
    """The layer's FLOPs backward, every input and parameter getting a gradient and nothing computed again; as `forward_flops`."""
    once = forward_flops(layer, tokens)
    twice = {name: 2 * flops for name, flops in dataclasses.asdict(once).items()}
    return Flops(**twice | {"decay": 3 * once.decay})


def training_flops(layer: Layer, tokens: int) -> Flops:
    """The layer's FLOPs forward and backward; as `forward_flops`."""
    ahead, back = (dataclasses.asdict(count(layer, tokens)) for count in (forward_flops, backward_flops))
    return Flops(**{name: ahead[name] + back[name] for name in ahead})
