"""The GDN layer of Qwen3-Next under tensor, sequence and context parallelism: one rank's part of it.

[q k v | z | b a] = in_proj x              column-parallel: this TP rank's heads of each section
CP -> HP                                   this rank's tokens and its TP rank's heads, for all tokens and its own heads
q, k, v = silu(conv1d(q, k, v))            causal, depthwise
q, k = norm(q), norm(k)                    L2, each head
g, beta = -exp(A_log) softplus(a + dt_bias), sigmoid(b)
o = gated delta rule(q, k, v, g, beta)     value head h reads key head h // (HV // H)
o = norm(o) weight silu(z)                 RMS, each head
HP -> CP
y = out_proj o                             row-parallel: the TP ranks' y add up
"""

import dataclasses
import itertools
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor, nn

from oracles.layer import Layer
from oracles.sharding import Shard
from verify.adapters.gdn import functions, weights
from verify.adapters.gdn.exchange import check_lengths, cp_to_hp, hp_to_cp
from verify.ranks.collectives import Place, copy_to, gather_from, reduce_from, scatter_to

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHOICES = {
    "conv": ("torch", "fla"),
    "qk_norm": ("separate", "combined", "in_kernel"),
    "thd_all_to_all": ("per_sequence", "fused"),
    "rule": ("torch", "fla"),
    "deterministic": (True, False),
}


@dataclasses.dataclass(frozen=True)
class Choices:
    """How the layer computes what it computes; each is a published change, and none changes what is right. ValueError for others.

    conv, rule       "torch": this package's own; "fla": flash-linear-attention's Triton kernels
    qk_norm          "separate": one norm of q, one of k; "combined": one of both together; "in_kernel": the rule does it
    thd_all_to_all   of packed input, "per_sequence": one a section of a sequence in, one a sequence out; "fused": one each way
    deterministic    the layer's own code adds nothing in an order that may change. FLA's kernels here have no atomics: with one
                     autotune configuration they repeat too
    """

    conv: str = "torch"
    qk_norm: str = "separate"
    thd_all_to_all: str = "fused"
    rule: str = "torch"
    deterministic: bool = True

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}")


class GatedDeltaNet(nn.Module):
    """One rank's layer. Its parameters are its shards; `metadata` says of what, and over which axes their gradients add up.

    ValueError for key heads that tp * cp does not divide and dtypes other than float32, bfloat16 and float16. Parameters are in
    `dtype`, A_log and dt_bias in float32. They begin with one value each, good for nothing: `load` gives them theirs.
    """

    def __init__(
        self,
        layer: Layer,
        place: Place,
        choices: Choices,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        conv_bias: bool,
        eps: float = 1e-6,
        allow_neg_eigval: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        tp, cp = place.tp.size, place.cp.size
        if layer.heads % (tp * cp):
            raise ValueError(f"heads must be a multiple of tp * cp = {tp} * {cp}, got {layer.heads}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
        self.layer, self.place, self.choices, self.dtype = layer, place, choices, dtype
        self.sequence_parallel, self.eps, self.allow_neg_eigval = sequence_parallel, eps, allow_neg_eigval
        self.metadata = weights.metadata(layer, conv_bias=conv_bias)
        for name, about in self.metadata.items():
            shape = list(about.shape)
            shape[about.axis] = len(about.rows(place.tp.rank, tp))
            kind = torch.float32 if name in ("A_log", "dt_bias") else dtype
            owner, _, leaf = name.rpartition(".")
            if owner and owner not in self._modules:
                self.add_module(owner, nn.Module())
            self.get_submodule(owner).register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=kind, device=device)))

    def shards(self) -> dict[str, Shard]:
        """This rank's parameters with their places in the whole: what a checkpoint holds."""
        return weights.as_shards(self.state_dict(), self.metadata, self.place.rank)

    def load(self, shards: Mapping[str, Shard]) -> None:
        """Take this rank's shards. ValueError as weights.load."""
        weights.load(self, self.metadata, shards, self.place.rank)

    def summed_gradients(self) -> dict[str, Tensor]:
        """Every parameter's gradient, added over the ranks that share it; every rank must call it."""
        return weights.summed_gradients(self, self.metadata, self.place)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None) -> Tensor:
        """y [tokens, batch, hidden] of this rank's hidden states [tokens, batch, hidden].

        Without cu_seqlens (SBHD) a CP rank has pieces r and 2 cp - 1 - r of the 2 cp of the sequence axis. With it (THD, batch 1)
        it has those of every sequence; cu_seqlens_padded, if given, are the sequences with their pad tokens, which are computed as
        tokens at their ends. With sequence_parallel a rank has its contiguous slice, of tp, of its CP rank's tokens.

        ValueError, the same on every rank and before any communication, for what cannot be cut so, and for wrong shapes and dtypes.
        """
        lengths = self.check(hidden, cu_seqlens, cu_seqlens_padded)
        tp, cp, widths = self.place.tp, self.place.cp, self.layer.sections
        packed = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        fused = packed is None or self.choices.thd_all_to_all == "fused"
        x = gather_from(tp, hidden) if self.sequence_parallel else copy_to(tp, hidden)
        x = F.linear(x, self.get_parameter("in_proj.weight"))
        x = cp_to_hp(cp, x, lengths, [width // tp.size for width in widths.values()], fused=fused)
        x = self.mix(x, packed, lengths if packed is not None else lengths * hidden.shape[1])
        x = hp_to_cp(cp, x, lengths, [widths["v"] // tp.size], fused=fused)
        y = F.linear(x, self.get_parameter("out_proj.weight"))
        return scatter_to(tp, y) if self.sequence_parallel else reduce_from(tp, y)

    def check(self, hidden: Tensor, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None) -> list[int]:
        """The tokens of each sequence on all ranks, with pads; of SBHD, those of its sequence axis. ValueError as forward."""
        cp, cuts = self.place.cp.size, self.place.tp.size if self.sequence_parallel else 1
        if hidden.ndim != 3 or hidden.shape[-1] != self.layer.hidden:
            raise ValueError(f"hidden must be [tokens, batch, {self.layer.hidden}], got shape {tuple(hidden.shape)}")
        if hidden.dtype != self.dtype:
            raise ValueError(f"hidden must be {self.dtype}, got {hidden.dtype}")
        if cu_seqlens is None:
            if cu_seqlens_padded is not None:
                raise ValueError("cu_seqlens_padded needs cu_seqlens, got it alone")
            lengths = [len(hidden) * cuts * cp]
            check_lengths("hidden", lengths, cp)
            return lengths
        lengths = _lengths("cu_seqlens", cu_seqlens)
        if cu_seqlens_padded is not None:
            padded = _lengths("cu_seqlens_padded", cu_seqlens_padded)
            if len(padded) != len(lengths) or any(more < less for more, less in zip(padded, lengths, strict=True)):
                raise ValueError(f"cu_seqlens_padded must hold the sequences of cu_seqlens {lengths}, got {padded}")
            lengths = padded
        name = "cu_seqlens" if cu_seqlens_padded is None else "cu_seqlens_padded"
        if hidden.shape[1] != 1:
            raise ValueError(f"hidden must have batch 1 with {name}, got shape {tuple(hidden.shape)}")
        check_lengths(name, lengths, cp)
        if sum(lengths) // cp % cuts:
            raise ValueError(f"{name} must give every CP rank a multiple of tp = {cuts} tokens to cut, got {sum(lengths) // cp}")
        if len(hidden) * cuts * cp != sum(lengths):
            raise ValueError(f"{name} must add up to the {len(hidden) * cuts * cp} tokens of all ranks, got {sum(lengths)}")
        return lengths

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:
        """[T, B, HV V] from in_proj's output [T, B, ...], all tokens and this rank's heads; sequences of `lengths` along B T."""
        layer, parts = self.layer, self.place.tp.size * self.place.cp.size
        x = x.transpose(0, 1)
        widths = {name: width // parts for name, width in layer.sections.items()}
        qkv, z, b, a = x.split([widths["q"] + widths["k"] + widths["v"], widths["z"], widths["b"], widths["a"]], -1)
        qkv = self.convolve(qkv, cu_seqlens, lengths)
        q, k, v = (
            each.unflatten(-1, (-1, head))
            for each, head in zip(
                qkv.split([widths[name] for name in "qkv"], -1), (layer.key_dim, layer.key_dim, layer.value_dim), strict=True
            )
        )
        if self.choices.qk_norm == "separate":
            q, k = functions.l2norm(q), functions.l2norm(k)
        elif self.choices.qk_norm == "combined":
            q, k = functions.l2norm(torch.cat([q, k], 2)).chunk(2, 2)
        A_log, dt_bias = self.in_use("A_log"), self.in_use("dt_bias")
        g, beta = functions.gates(a, b, A_log, dt_bias, allow_neg_eigval=self.allow_neg_eigval)
        o = self.rule(q, k, v, g, beta, cu_seqlens, lengths)
        o = functions.gated_rms_norm(o, z.unflatten(-1, (-1, layer.value_dim)), self.get_parameter("norm.weight"), self.eps)
        return o.flatten(-2).transpose(0, 1)

    def convolve(self, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:
        """silu(conv1d(x)), x [B, T, channels of this rank]."""
        weight, bias = self.in_use("conv.weight"), self.in_use("conv.bias") if "conv.bias" in self.metadata else None
        if self.choices.conv == "torch" or not x.numel():  # FLA launches nothing where there is nothing to compute
            return functions.causal_conv1d(x, weight, bias, lengths)
        from fla.modules.causal_conv1d import causal_conv1d

        y: Tensor = causal_conv1d(x.contiguous(), weight, bias, activation="silu", cu_seqlens=cu_seqlens)[0]
        return y

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, lengths: list[int]
    ) -> Tensor:
        """o [B, T, HV, V] of the gated delta rule."""
        norm = self.choices.qk_norm == "in_kernel"
        if self.choices.rule == "torch" or not v.numel():
            return functions.gated_delta_rule(q, k, v, g, beta, lengths, qk_norm=norm, deterministic=self.choices.deterministic)
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        o: Tensor = chunk_gated_delta_rule(
            *(each.contiguous() for each in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=norm, cu_seqlens=cu_seqlens
        )[0]
        return o

    def in_use(self, name: str) -> Tensor:
        """What this rank's kernel uses of a parameter: of each section that its TP rank holds, the slice of its heads."""
        held, cp = self.get_parameter(name), self.place.cp
        if cp.size == 1:
            return held
        sections = held.split([width // self.place.tp.size for width in self.metadata[name].sections])
        return torch.cat([each.chunk(cp.size)[cp.rank] for each in sections])


def _lengths(name: str, offsets: Tensor) -> list[int]:
    """The tokens of each sequence. ValueError for what are no offsets."""
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64) or offsets.ndim != 1:
        what = f"{offsets.dtype} of shape {tuple(offsets.shape)}" if isinstance(offsets, Tensor) else repr(offsets)
        raise ValueError(f"{name} must be a vector of int32 or int64, got {what}")
    values: list[int] = offsets.tolist()
    lengths = [later - earlier for earlier, later in itertools.pairwise(values)]
    if not lengths or values[0] != 0 or min(lengths) < 0:
        raise ValueError(f"{name} must start at 0, have two entries or more and not decrease, got {values}")
    return lengths
