"""One rank's part of the GDN layer of Qwen3-Next under tensor, sequence and context parallelism.

[q k v | z | b a] = in_proj x              column-parallel: this TP rank's heads of each section
CP -> HP                                   exchanges this rank's tokens of its TP rank's heads for all tokens of its own heads
q, k, v = silu(conv1d(q, k, v))            causal, depthwise
q, k = norm(q), norm(k)                    L2, each head
g, beta = -exp(A_log) softplus(a + dt_bias), sigmoid(b)
o = gated delta rule(q, k, v, g, beta)     value head h reads key head h // (HV // H)
o = norm(o) weight silu(z)                 RMS, each head
HP -> CP                                   exchanges them back
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
from verify.adapters.fla import core
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
    """How the layer computes. Each choice is a published change, and none changes the right result. ValueError for other values.

    conv, rule       "torch": this package's own code; "fla": flash-linear-attention's Triton kernels
    qk_norm          "separate": one call for q, one for k; "combined": one call for both; "in_kernel": the rule normalises them
    thd_all_to_all   for packed input. "per_sequence": CP -> HP makes one all-to-all for each section of each sequence, and
                     HP -> CP one for each sequence; "fused": one in each direction
    deterministic    the layer's own code adds nothing in an order that may change. FLA's kernels that are used here have no
                     atomics, so with one autotune configuration they repeat too
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
    """One rank's layer. Its parameters are the rank's shards.

    `metadata` says which part of the whole a shard is, and over which axes its gradient is summed. Parameters are in `dtype`, but
    A_log and dt_bias in float32. They are zeros until `load` sets them. ValueError if tp * cp does not divide the key heads, or for
    dtypes other than float32, bfloat16 and float16.
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
        """This rank's parameters with their places in the whole, as a checkpoint stores them."""
        return weights.as_shards(self.state_dict(), self.metadata, self.place.rank)

    def load(self, shards: Mapping[str, Shard]) -> None:
        """Copy this rank's shards into the parameters. Raises ValueError like weights.load."""
        weights.load(self, self.metadata, shards, self.place.rank)

    def summed_gradients(self) -> dict[str, Tensor]:
        """Every parameter's gradient, added over the ranks that share the parameter. Every rank must call this."""
        return weights.summed_gradients(self, self.metadata, self.place)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None) -> Tensor:
        """Compute y [tokens, batch, hidden] from this rank's hidden states [tokens, batch, hidden].

        - Without cu_seqlens (layout SBHD), the sequence axis is cut into 2 cp pieces, and CP rank r has pieces r and 2 cp - 1 - r.
        - With cu_seqlens (layout THD, batch 1), CP rank r has these pieces of every sequence. cu_seqlens_padded, if given, counts
          the pad tokens at the end of each sequence, which are computed like other tokens.
        - With sequence_parallel, a rank has its contiguous slice, one of tp, of the tokens of its CP rank.

        ValueError for lengths that cannot be cut in this way, and for wrong shapes and dtypes. It is the same on every rank, and
        raised before any communication.
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
        """The tokens of each sequence on all ranks, with pads; for SBHD, those of the sequence axis. ValueError as in forward."""
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
        """[T, B, HV V] from the output of in_proj [T, B, ...], for all tokens and this rank's heads.

        `lengths` are the tokens of the sequences along B T.
        """
        layer, parts = self.layer, self.place.tp.size * self.place.cp.size
        x = x.transpose(0, 1)
        widths = {name: width // parts for name, width in layer.sections.items()}
        qkv, z, b, a = x.split([widths["q"] + widths["k"] + widths["v"], widths["z"], widths["b"], widths["a"]], -1)
        qkv = self.convolve(qkv, cu_seqlens, lengths)
        q, k, v = (
            section.unflatten(-1, (-1, head))
            for section, head in zip(
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
        """silu(conv1d(x)) of x [B, T, channels of this rank]."""
        weight, bias = self.in_use("conv.weight"), self.in_use("conv.bias") if "conv.bias" in self.metadata else None
        if self.choices.conv == "torch" or not x.numel():  # FLA launches no kernel for an empty tensor
            return functions.causal_conv1d(x, weight, bias, lengths)
        core()
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
        core()
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        o: Tensor = chunk_gated_delta_rule(
            *(tensor.contiguous() for tensor in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=norm, cu_seqlens=cu_seqlens
        )[0]
        return o

    def in_use(self, name: str) -> Tensor:
        """The part of a parameter that this rank's kernel uses: in each section of its TP rank, the slice of this rank's heads."""
        parameter, cp = self.get_parameter(name), self.place.cp
        if cp.size == 1:
            return parameter
        sections = parameter.split([width // self.place.tp.size for width in self.metadata[name].sections])
        return torch.cat([section.chunk(cp.size)[cp.rank] for section in sections])


def _lengths(name: str, offsets: Tensor) -> list[int]:
    """The tokens of each sequence. ValueError if `offsets` are no legal cu_seqlens."""
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64) or offsets.ndim != 1:
        what = f"{offsets.dtype} of shape {tuple(offsets.shape)}" if isinstance(offsets, Tensor) else repr(offsets)
        raise ValueError(f"{name} must be a vector of int32 or int64, got {what}")
    values: list[int] = offsets.tolist()
    lengths = [later - earlier for earlier, later in itertools.pairwise(values)]
    if not lengths or values[0] != 0 or min(lengths) < 0:
        raise ValueError(f"{name} must start at 0, have two entries or more and not decrease, got {values}")
    return lengths
