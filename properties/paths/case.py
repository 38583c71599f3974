"""Cases of parallel paths: one printable line for a layer's or a kernel's call and the way its ranks share it.

As in properties/rules/numbers.py, every number comes from a counter, so the same line gives the same bits everywhere.
"""

import dataclasses
import functools
import itertools
import math
from typing import Annotated, Any

import torch
from torch import Tensor

from oracles import parallel, sharding
from oracles.arithmetic.counter import integers, mix_number
from oracles.arithmetic.rounding import BITS
from oracles.conv import CAUSAL_CONV1D
from oracles.layer import GDN_LAYER, KDA_LAYER, KdaLayer, Layer
from oracles.operation import DTYPES, Inputs, Operation
from oracles.operations import RULES
from oracles.parallel import Layout
from oracles.rule.segments import Restarts
from oracles.sharding import Mesh
from properties.rules.case import IN_KERNEL, Case, check_norm
from properties.rules.numbers import NORM_EPS, small_factor
from properties.words.line import MAX_TOKENS, SEEDS, Line
from properties.words.word import Word, like

LAYOUTS = ("zigzag", "zigzag_batch", "contiguous")
LAYER_LAYOUTS = ("zigzag", "contiguous")
PADDINGS = ("none", "least", "more")
LAYER_GATES = ("long", "ordinary", "mixed")
GATES = (*LAYER_GATES, "strong")
VALUES = ("ordinary", "scaled", "small")
# Published changes of Megatron-LM's layer, each as a choice that must not change the result; the first value is the older form.
CHOICES: dict[str, tuple[str, ...]] = {
    "conv": ("torch", "fla"),
    "qk_norm": ("separate", "combined", "in_kernel"),
    "thd_all_to_all": ("per_sequence", "fused"),
    "rule": ("torch", "fla"),
}
MAX_RANKS, MAX_WIDTH = 1024, 8192
MOST_WIDTH = 1024  # of heads, K and V

# A_log and dt_bias are uniform in [centre - 1, centre + 1). The median memory of a head is 450 tokens (long), 1.6 (ordinary) or
# 0.06 (strong).
_CENTRES = {"long": (-4.0, -2.0), "ordinary": (0.0, 0.0), "strong": (2.0, 2.0)}
_STREAMS = (
    *("hidden", "in_proj", "conv", "conv_bias", "A_log", "dt_bias", "norm", "out_proj", "dy", "scale", "x", "weight", "bias"),
    *("decay_proj", "gate_proj", "gate_bias", "channel_bias", "gradients"),
)


def _normalises(case: Any) -> bool:
    """Whether the operation normalises q and k: a layer does in each of its forms, and a rule does in its kernel."""
    return case.operation in ("gdn_layer", "kda_layer") or (case.operation in RULES and case.qk_norm == "in_kernel")


@dataclasses.dataclass(frozen=True)
class ParallelCase(Line):
    """One example of a path that tp x cp ranks share. Fields at their defaults, the simplest values, are left out of the line.

    The fields named in CHOICES of this module select a form of the implementation.

    ValueError for a field outside its choices or range, or for lengths that the ranks cannot share.
    """

    lengths: tuple[int, ...]
    """Tokens per sequence. If packed (THD), sequences follow each other along the tokens. Otherwise (SBHD) they are a batch, and
    each is cut in the same way."""
    operation: Annotated[str, Word(choices=("gdn_layer", "causal_conv1d", *RULES, "kda_layer"))] = "gdn_layer"
    tp: Annotated[int, Word(span=(1, MAX_RANKS), counted=True)] = 1
    cp: Annotated[int, Word(span=(1, MAX_RANKS), counted=True)] = 1
    sp: Annotated[bool, Word(counted=True, simplest=(False,))] = False
    """Whether the tokens of a CP rank are also cut over tp."""
    layout: Annotated[str, Word(choices=LAYOUTS, counted=True, simplest=("zigzag", "zigzag_batch"))] = "zigzag"
    """Which tokens a CP rank has."""
    packed: Annotated[bool, Word(counted=True)] = False
    padding: Annotated[str, Word(choices=PADDINGS, counted=True, simplest=("none", "least"))] = "none"
    """How each packed sequence is padded. Pad tokens are at the end of their sequence and are computed like any other."""
    heads: Annotated[int, Word(span=(1, MOST_WIDTH))] = 1
    value_heads: Annotated[int, Word(span=(1, MOST_WIDTH))] = 1
    key_dim: Annotated[int, Word(span=(1, MOST_WIDTH))] = 8
    value_dim: Annotated[int, Word(span=(1, MOST_WIDTH))] = 8
    hidden: Annotated[int, Word(span=(1, MAX_WIDTH))] = 8
    conv_width: Annotated[int, Word(span=(1, 64), simplest=(1, 2, 3))] = 4
    dtype: Annotated[str, Word(choices=tuple(DTYPES), counted=True, simplest=("fp32", "bf16"))] = "fp32"
    gate: Annotated[str, Word(choices=GATES, counted=True, simplest=("long", "ordinary"))] = "long"
    values: Annotated[str, Word(choices=VALUES, counted=True, simplest=("ordinary",))] = "ordinary"
    conv_bias: Annotated[bool, Word(simplest=(False,))] = False
    allow_neg_eigval: Annotated[bool, Word(simplest=(False,))] = False
    offsets: Annotated[str, Word(choices=("int64", "int32"), simplest=("int64",), acts=lambda case: case.packed)] = "int64"
    backward: Annotated[bool, Word(simplest=(False,))] = True
    conv: Annotated[str, Word(choices=CHOICES["conv"], counted=True, simplest=("torch",))] = "torch"
    qk_norm: Annotated[str, Word(choices=CHOICES["qk_norm"], counted=True, simplest=("separate",))] = "separate"
    thd_all_to_all: Annotated[str, Word(choices=CHOICES["thd_all_to_all"], counted=True, simplest=("per_sequence",))] = (
        "per_sequence"
    )
    rule: Annotated[str, Word(choices=CHOICES["rule"], counted=True, simplest=("torch",))] = "torch"
    deterministic: Annotated[bool, Word(simplest=(False,))] = False
    recompute: Annotated[bool, Word(counted=True, simplest=(False,))] = False
    qk_norm_eps: Annotated[str, like(Case, "qk_norm_eps", key=False, acts=_normalises)] = "1e-6"
    """The eps of the norm of q and k, if the operation normalises them."""
    qk_norm_form: Annotated[str, like(Case, "qk_norm_form", key=False, acts=_normalises)] = "inside"
    in_kernel: Annotated[str, Word(choices=IN_KERNEL, counted=True, simplest=("none", "gate", "beta"))] = "none"
    """Which of gate and beta a rule computes itself: the gate from a, A_log and dt_bias, beta from b."""
    state: Annotated[str, Word(choices=("none", "random"), counted=True, simplest=("none",))] = "none"
    """Whether a rule has initial states."""
    final_state: Annotated[bool, Word(simplest=(False,))] = False
    """Whether a rule returns final states."""
    dt_bias: Annotated[bool, like(Case, "dt_bias", key=False, acts=lambda case: case.in_kernel in ("gate", "both"))] = True
    """Whether a rule that computes its gate has a dt_bias."""
    seed: Annotated[int, Word(span=SEEDS)] = 0

    def __post_init__(self) -> None:
        self.check_words()
        if self.value_heads % self.heads:
            raise ValueError(f"value_heads must be a multiple of heads {self.heads}, got {self.value_heads}")
        if not self.packed and self.padding != "none":
            raise ValueError(f"padding must be none unless packed=yes, got {self.padding}")
        if self.operation != "gdn_layer" and (self.tp > 1 or self.sp or self.padding != "none"):
            raise ValueError(f"op={self.operation} must have tp=1 sp=no padding=none, got {self}")
        if self.operation == "gdn_layer" and self.layout not in LAYER_LAYOUTS:
            raise ValueError(f"layout must be zigzag or contiguous for op=gdn_layer, got {self.layout}")
        if self.operation not in RULES and (self.in_kernel, self.state, self.final_state) != ("none", "none", False):
            raise ValueError(f"op={self.operation} must have in_kernel=none state=none final_state=no, got {self}")
        if self.heads % (self.tp * self.cp if self.operation == "gdn_layer" else 1):
            raise ValueError(f"heads must be a multiple of tp * cp = {self.tp * self.cp}, got {self.heads}")
        check_norm(self, acts=_normalises(self), needs="op=gdn_layer, or a rule with qk_norm=in_kernel", backward=self.backward)
        if sum(self.padded) > MAX_TOKENS:
            raise ValueError(f"lengths must add up to at most {MAX_TOKENS} tokens, got {sum(self.padded)}")
        local_tokens = len(self.tokens_of_ranks()[0])  # raises ValueError for lengths that the layout cannot cut
        if self.sp and local_tokens % self.tp:
            raise ValueError(f"sp=yes needs a multiple of tp = {self.tp} tokens on every CP rank, got {local_tokens}")

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks that share the case."""
        return Mesh(self.tp, self.cp)

    @property
    def layer(self) -> Layer:
        """The widths of the layer."""
        kind = KdaLayer if self.operation == "kda_layer" else Layer
        return kind(self.hidden, self.heads, self.value_heads, self.key_dim, self.value_dim, self.conv_width)

    @property
    def spec(self) -> Operation:
        """The operation's contract."""
        others = {"gdn_layer": GDN_LAYER, "kda_layer": KDA_LAYER, "causal_conv1d": CAUSAL_CONV1D}
        return others.get(self.operation) or self.call().spec

    @functools.cached_property
    def padded(self) -> tuple[int, ...]:
        """Tokens per sequence with padding: the least multiple of 2 cp, or with `more` 2 cp tokens beyond that."""
        if self.padding == "none":
            return self.lengths
        least = parallel.padded_lengths(self.lengths, 2 * self.cp)
        return tuple(length + (2 * self.cp if self.padding == "more" else 0) for length in least)

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences together, padding included."""
        return sum(self.padded)

    @property
    def batch(self) -> tuple[int, int]:
        """The two axes of tokens: [1, T] if packed, otherwise [B, T]."""
        return (1, self.tokens) if self.packed else (len(self.lengths), self.lengths[0])

    def starts(self) -> list[int]:
        """Return the first token of each sequence, and the end of the last sequence, padding included."""
        return [0, *itertools.accumulate(self.padded)]

    def tokens_of_ranks(self) -> Layout:
        """Return the tokens along axis 1 of `batch` that each CP rank has, in its order.

        ValueError for lengths that the layout cannot cut.
        """
        lengths = list(self.padded) if self.packed else [self.lengths[0]]
        return _layout(self.layout, tuple(lengths), self.cp)

    @functools.cached_property
    def restarts(self) -> Restarts:
        """For each sequence the tokens at which a piece of a rank begins; empty for a GDN layer with zigzag pieces.

        The ranks of such a layer exchange tokens for heads before the rule, and have whole sequences then.
        """
        if self.cp == 1 or (self.operation == "gdn_layer" and self.layout == "zigzag"):
            return ()
        pieces = self.cp if self.layout == "contiguous" else 2 * self.cp
        spans = [*itertools.pairwise(self.starts())] if self.packed else [(0, self.lengths[0])] * len(self.lengths)
        streams = spans if self.layout == "zigzag" else [(0, spans[-1][1])] * len(spans)
        begins = ([first + piece * (last - first) // pieces for piece in range(1, pieces)] for first, last in streams)
        return tuple(
            tuple(at - start for at in several if start < at < end) for several, (start, end) in zip(begins, spans, strict=True)
        )

    def cu_seqlens(self, device: str | None = None, *, padded: bool = True) -> Tensor | None:
        """Return the offsets [N + 1] of the padded or of the real sequences; None for a batch."""
        if not self.packed:
            return None
        offsets = [0, *itertools.accumulate(self.padded if padded else self.lengths)]
        return torch.tensor(offsets, dtype=getattr(torch, self.offsets), device=device)

    def call(self) -> Case:
        """Return the kernel's call that the ranks share, if the operation is a rule."""
        return Case(
            self.lengths,
            self.operation,
            packed=self.packed,
            heads=self.heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
            gate={"long": "1000", "ordinary": "10", "mixed": "mixed", "strong": "tenth"}[self.gate],
            beta="two" if self.allow_neg_eigval else "ordinary",
            values=self.values,
            qk_norm=self.qk_norm == "in_kernel",
            qk_norm_eps=self.qk_norm_eps,
            qk_norm_form=self.qk_norm_form,
            in_kernel=self.in_kernel,
            dt_bias=self.dt_bias,
            state=self.state,
            offsets=self.offsets,
            backward=self.backward,
            seed=self.seed,
        )

    def inputs(self, device: str | None = None) -> Inputs:
        """Return the inputs of the whole call by the operation's contract; for a layer, hidden [B, T, D] and every parameter."""
        if self.operation == "causal_conv1d":
            channels, taps = self.value_heads * self.value_dim, self.conv_width
            return Inputs(
                x=self._uniform("x", (*self.batch, channels), device),
                weight=self._uniform("weight", (channels, taps), device),
                bias=self._uniform("bias", (channels,), device) if self.conv_bias else None,
                cu_seqlens=self.cu_seqlens(device),
                activation="silu",
            )
        if self.operation in RULES:
            return self.call().inputs(device).replaced(output_final_state=self.final_state)
        layer = self.layer
        channels, outputs = layer.offsets()["z"], sum(layer.sections.values())
        hidden = self._uniform("hidden", (*self.batch, layer.hidden), device)
        if self.values == "scaled":  # by 2^-4..2^3, for each token
            powers = torch.tensor([2.0**power for power in range(-4, 4)], device=device, dtype=hidden.dtype)
            hidden = hidden * powers[self._integers("scale", self.batch, 3, device) + 4].unsqueeze(-1)
        centres = torch.tensor([_CENTRES[name] for name in (("long", "ordinary") if self.gate == "mixed" else (self.gate,))])
        a_log, dt_bias = centres.to(device)[torch.arange(layer.value_heads, device=device) % len(centres)].unbind(-1)
        inputs = Inputs(
            layer=layer,
            hidden=hidden,
            in_proj=self._uniform("in_proj", (outputs, layer.hidden), device) * scale_of(layer.hidden),
            conv=self._uniform("conv", (channels, layer.conv_width), device),
            conv_bias=self._uniform("conv_bias", (channels,), device) / 2 if self.conv_bias else None,
            A_log=a_log + self._uniform("A_log", (layer.value_heads,), device, "fp32"),
            dt_bias=dt_bias + self._uniform("dt_bias", (layer.value_heads,), device, "fp32"),
            norm=1 + self._uniform("norm", (layer.value_dim,), device) / 4,
            out_proj=self._uniform("out_proj", (layer.hidden, layer.sections["v"]), device) * scale_of(layer.sections["v"]),
            cu_seqlens=self.cu_seqlens(device),
            eps=1e-6,
            allow_neg_eigval=self.allow_neg_eigval,
            qk_norm_eps=NORM_EPS[self.qk_norm_eps],
            qk_norm_form=self.qk_norm_form,
        )
        if self.operation == "kda_layer":
            inputs = Inputs(**{**inputs, **self._of_kda(inputs, device)})
        return with_small_keys(inputs, self) if self.values == "small" else inputs

    def _of_kda(self, inputs: Inputs, device: str | None) -> dict[str, Tensor]:
        """Return the parameters that a KDA layer has beside those of a GDN layer, or in another shape."""
        layer, rank = self.layer, self.value_dim
        keys, values = layer.value_heads * layer.key_dim, layer.sections["v"]
        return {
            "decay_proj": self._uniform("decay_proj", (keys, rank), device) * scale_of(rank),
            "gate_proj": self._uniform("gate_proj", (values, rank), device) * scale_of(rank),
            "gate_bias": self._uniform("gate_bias", (values,), device),
            "dt_bias": inputs.dt_bias.unsqueeze(-1)
            + self._uniform("channel_bias", (layer.value_heads, layer.key_dim), device, "fp32") / 2,
        }

    def cotangents(self, device: str | None = None) -> dict[str, Tensor]:
        """Return a random cotangent of the output that the ranks share, in its shape and dtype; of a final state, zeros."""
        if self.operation in ("gdn_layer", "kda_layer"):
            return {"y": self._uniform("dy", (*self.batch, self.hidden), device)}
        if self.operation == "causal_conv1d":
            return {"y": self._uniform("dy", (*self.batch, self.value_heads * self.value_dim), device)}
        found = self.call().cotangents(device)
        return {"o": found["o"]} | ({"final_state": 0 * found["final_state"]} if self.final_state else {})

    def gradients(self) -> dict[str, Tensor]:
        """Return random gradients of the whole parameters of a GDN layer, by name, in float32.

        They are up to 64, so that their norm is far above what an implementation adds to it before a division (torch 1e-6).
        """
        about = sharding.parameters(self.layer)
        names = [name for name in about if self.conv_bias or name != "conv.bias"]
        sizes = [math.prod(about[name].shape) for name in names]
        parts = (64 * self._uniform("gradients", (sum(sizes),), None, "fp32")).split(sizes)
        return {name: part.view(about[name].shape) for name, part in zip(names, parts, strict=True)}

    def tagged(self, shape: tuple[int, ...], device: str | None = None) -> Tensor:
        """Return distinct whole numbers in float32, which are exact for up to 2^24 of them; ValueError for more."""
        count = math.prod(shape)
        if count > 2**24:
            raise ValueError(f"tagged numbers must be at most 2^24, got {count}")
        return torch.arange(-(count // 2), count - count // 2, dtype=torch.float32, device=device).reshape(shape)

    def _uniform(self, name: str, shape: tuple[int, ...], device: str | None, dtype: str | None = None) -> Tensor:
        """Return numbers uniform in [-1, 1), on a grid of as many bits as the dtype holds."""
        dtype = dtype or self.dtype
        whole = self._integers(name, shape, BITS[dtype], device)
        return (whole.to(torch.float64) * 2.0 ** (1 - BITS[dtype])).to(DTYPES[dtype])

    def _integers(self, name: str, shape: tuple[int, ...], bits: int, device: str | None) -> Tensor:
        """Return integers uniform in [-2^(bits-1), 2^(bits-1))."""
        counter = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
        return integers((counter, mix_number(self.seed * 64 + 32 + _STREAMS.index(name)), bits))[0].view(shape)


def with_small_keys(inputs: Inputs, case: Any) -> Inputs:
    """Return the inputs of a layer with rows of in_proj and conv_bias that make q and k nearly as small as their norm's eps."""
    keys, factor = 2 * inputs.layer.sections["q"], small_factor(case)

    def smaller(x: Tensor) -> Tensor:
        return torch.cat([x[:keys] * factor, x[keys:]])

    names = ("in_proj", *(("conv_bias",) if inputs.conv_bias is not None else ()))
    return inputs.replaced(**{name: smaller(inputs[name]) for name in names})


LAYOUT_OF = {"zigzag": parallel.zigzag, "zigzag_batch": parallel.zigzag_batch, "contiguous": parallel.contiguous}


@functools.lru_cache(64)
def _layout(name: str, lengths: tuple[int, ...], cp: int) -> Layout:
    return LAYOUT_OF[name](lengths, cp)


def scale_of(terms: int) -> float:
    """Return a power of two near the root of 3 / terms, which keeps a sum of that many products of the order of 1."""
    return 2.0 ** -round(math.log2(max(terms / 3, 1)) / 2)
