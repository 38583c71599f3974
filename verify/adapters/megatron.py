"""Adapters of Megatron-LM's GatedDeltaNet module and of its all-to-alls. They adapt signatures and layout only.

The code comes from an installed megatron-core, from the folder that --path names (a checkout, or files of `gdn-verify fetch`), or
from the files that `gdn-verify fetch megatron` has left in the working directory. Adapters ask for names and not for versions, and
what a release lacks is not in their domains:

- Without `tensor_a2a_cp2hp` (0.16.1, 0.17.1) there is neither context parallelism nor a packed sequence.
- Without `_build_thd_cp_a2a_perm` (0.18.2) packed sequences are exchanged one by one.
- Without `a2a_cp_to_hp` (0.19.2) the steps of the fused exchange are in the module itself. `MegatronExchange` takes them in the
  order of the module.

- Context parallelism is Megatron's own, over the ranks' process group. For simulated ranks, `_all_to_all` replaces its all-to-all.
- Tensor parallelism is in the projections, which Megatron takes from the code that builds the module. Here they are plain
  projections over verify.ranks.collectives.
- On a CPU, Megatron's functions are not compiled, and it is told that the current device is the CPU.
"""

import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
import unittest.mock
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor, nn

from oracles.layer import Layer
from oracles.operation import Inputs
from properties.paths.domain import MODEL_WIDTHS, PathDomain
from verify.adapters.base import PathAdapter
from verify.adapters.fla import REQUIRES, core_only, decorating_later
from verify.adapters.libraries import LIBRARIES
from verify.ranks.collectives import Comm, Distributed, Place, copy_to, exchange, gather_from, reduce_from, scatter_to

LIBRARY = LIBRARIES["megatron"]
OLDEST = LIBRARY.others[-1]
# Where the names of Megatron are that we use. The module is a file in older releases and a package in newer ones.
PLACES = tuple(f"megatron.core.ssm.gated_delta_net{file}" for file in ("", ".common", ".gdn"))
WANTED = ("GatedDeltaNet", "GatedDeltaNetSubmodules")
# Names that some releases lack.
OPTIONAL = (
    *("a2a_cp_to_hp", "a2a_hp_to_cp", "tensor_a2a_cp2hp", "tensor_a2a_hp2cp"),
    *("_build_head_perm_for_split_sections", "_build_thd_cp_a2a_perm"),
)
# Megatron's names of the layer's parameters.
NAMES = {"conv.weight": "conv1d.weight", "conv.bias": "conv1d.bias", "norm.weight": "out_norm.weight"}
_CPU = torch.device("cpu")
_COMMON: dict[str, Any] = {"negative_eigenvalues": False, "counts": False, "refuses": False, "checkpoints": False}


class _Megatron(PathAdapter):
    requires: ClassVar[dict[str, str]] = {LIBRARY.distribution: OLDEST}

    def __init__(self) -> None:
        self.megatron = m = _modules()
        self.domain = dataclasses.replace(
            self.domain,
            choices=tuple(self.choices(m).items()),
            packed=self.domain.packed and m.shares,
            context_parallel=m.shares,
            exchanges=self.domain.exchanges and m.shares,
        )

    def choices(self, m: types.SimpleNamespace) -> dict[str, tuple[str, ...]]:
        """The values of each choice in this release."""
        raise NotImplementedError


class MegatronLayer(_Megatron):
    """`megatron.core.ssm.gated_delta_net.GatedDeltaNet` with FLA's kernels, for batches and packed sequences."""

    domain = PathDomain(
        **_COMMON,
        ranks=4,
        least_piece=1,  # Megatron cannot reshape a tensor without tokens
        exchanges=False,
        deterministic=False,
        refills=False,  # flash-linear-attention keeps the chunks of a cu_seqlens
        tf32=("rule=fla",),
        compiled_widths=MODEL_WIDTHS,
        choices=(("conv", ("fla",)), ("qk_norm", ("combined",)), ("thd_all_to_all", ("fused",)), ("rule", ("fla",))),
    )
    _deterministic = False
    requires: ClassVar[dict[str, str]] = {**REQUIRES, **_Megatron.requires}

    def choices(self, m: types.SimpleNamespace) -> dict[str, tuple[str, ...]]:
        own = "torch" if self._deterministic else "fla"
        return {
            "conv": (own if m.shares else "torch",),
            "qk_norm": ("combined" if m.shares else "separate",),
            "thd_all_to_all": ("fused" if m.fuses else "per_sequence",),
            "rule": (own,),
        }

    def run(self, x: Inputs, place: Place) -> Tensor:
        groups = self.megatron.ProcessGroupCollection(tp=Group(place.tp), cp=_group(place.cp))
        module = self.module(groups, **settings(x))
        y: Tensor
        y, _ = torch.func.functional_call(module, renamed(x.parameters), (x.hidden, None), self.more_arguments(x))
        return y

    def more_arguments(self, x: Inputs) -> dict[str, Any]:
        """The arguments of the module beside the hidden states and the attention mask."""
        if x.cu_seqlens is None:
            return {"packed_seq_params": None}
        packed = self.megatron.PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=x.cu_seqlens,
            cu_seqlens_kv=x.cu_seqlens,
            cu_seqlens_q_padded=x.cu_seqlens_padded,
            cu_seqlens_kv_padded=x.cu_seqlens_padded,
        )
        return {"packed_seq_params": packed}

    def module(
        self,
        groups: Any,
        layer: Layer,
        *,
        conv_bias: bool,
        eps: float = 1e-6,
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
        **config: Any,
    ) -> nn.Module:
        """Megatron's module for one rank of `groups`; `config` has more fields of its configuration."""
        m, tp, cp = self.megatron, groups.tp.size(), groups.cp.size()
        with current_device(device):
            about = m.TransformerConfig(
                num_layers=1,
                hidden_size=layer.hidden,
                num_attention_heads=tp,
                linear_conv_kernel_dim=layer.conv_width,
                linear_key_head_dim=layer.key_dim,
                linear_value_head_dim=layer.value_dim,
                linear_num_key_heads=layer.heads,
                linear_num_value_heads=layer.value_heads,
                normalization="RMSNorm",
                layernorm_epsilon=eps,
                activation_func=F.silu,
                params_dtype=dtype,
                tensor_model_parallel_size=tp,
                context_parallel_size=cp,
                perform_initialization=False,
                deterministic_mode=self._deterministic,
                **config,
            )
            module: nn.Module = m.GatedDeltaNet(
                about, m.GatedDeltaNetSubmodules(**self.parts()), layer_number=1, conv_bias=conv_bias, pg_collection=groups
            )
        return module

    def parts(self) -> dict[str, type]:
        """The classes of the modules inside Megatron's module."""
        return {"in_proj": _InProj, "out_norm": OutNorm, "out_proj": _OutProj}


class MegatronDeterministic(MegatronLayer):
    """`MegatronLayer` with `deterministic_mode`: torch's convolution and Megatron's own chunkwise rule, for batches only."""

    domain = PathDomain(
        **_COMMON,
        packed=False,
        least_piece=1,
        exchanges=False,
        choices=(("conv", ("torch",)), ("qk_norm", ("combined",)), ("thd_all_to_all", ("fused",)), ("rule", ("torch",))),
    )
    _deterministic = True


class MegatronExchange(_Megatron):
    """Megatron's all-to-alls alone.

    The fused form is `a2a_cp_to_hp` with its permutations and its inverse; the other form is `tensor_a2a_*` for each sequence.
    """

    domain = PathDomain(
        **_COMMON,
        computes=False,
        deterministic=False,
        choices=(("thd_all_to_all", ("per_sequence", "fused")),),
    )

    def choices(self, m: types.SimpleNamespace) -> dict[str, tuple[str, ...]]:
        return {"thd_all_to_all": ("per_sequence", "fused") if m.fuses else ("per_sequence",)}

    def run(self, x: Inputs, place: Place) -> Tensor:
        raise NotImplementedError("megatron/exchange has no layer; use megatron/layer")

    def move(
        self, x: Tensor, lengths: Sequence[int] | None, sections: Sequence[int], to: str, place: Place, choices: dict[str, str]
    ) -> Tensor:
        m, group, size = self.megatron, _group(place.cp), place.cp.size
        tokens = len(x) * (size if to == "heads" else 1)
        offsets = torch.tensor([0, *(lengths or [tokens])], device=x.device).cumsum(0)
        packed = None if lengths is None else m.PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        y: Tensor
        if choices["thd_all_to_all"] == "fused":
            index = m._build_head_perm_for_split_sections(tuple(sections), size, x.device)
            if to == "heads":
                return self._to_heads(x, tuple(sections), group, offsets, tokens, packed, index)
            y = self._to_tokens(x, group, offsets, tokens, packed)
            # The way back knows one section only. Several come out rank by rank, in the order into which the way there puts them.
            return y.index_select(-1, index.argsort())
        way = {"seq_dim": 0, "head_dim": -1, "cp_group": group}
        if to == "heads":
            move = functools.partial(m.tensor_a2a_cp2hp, **way, split_sections=list(sections))
        else:
            move = functools.partial(m.tensor_a2a_hp2cp, **way, split_sections=[width // size for width in sections])
        if lengths is None:
            y = move(x)
            return y
        sequences = x.split([length // (size if to == "heads" else 1) for length in lengths])
        moved = [move(part) for part in sequences if len(part)]
        return torch.cat(moved) if moved else x.new_empty(0, x.shape[1], sum(sections) // (size if to == "heads" else 1))

    def _to_heads(
        self, x: Tensor, sections: tuple[int, ...], group: Any, offsets: Tensor, tokens: int, packed: Any, index: Tensor
    ) -> Tensor:
        m, size = self.megatron, group.size()
        y: Tensor
        if hasattr(m, "a2a_cp_to_hp"):
            y, _ = m.a2a_cp_to_hp(x, sections, size, group, offsets, tokens, packed)
            return y
        x = x.index_select(-1, index) if size > 1 else x
        y = m.tensor_a2a_cp2hp(x, 0, -1, group, undo_attention_load_balancing=packed is None)
        shared = packed is not None and size > 1
        return y.index_select(0, m._build_thd_cp_a2a_perm(offsets, size, tokens)[0]) if shared else y

    def _to_tokens(self, x: Tensor, group: Any, offsets: Tensor, tokens: int, packed: Any) -> Tensor:
        m, size = self.megatron, group.size()
        back = None if packed is None else m._build_thd_cp_a2a_perm(offsets, size, tokens)[1]
        y: Tensor
        if hasattr(m, "a2a_hp_to_cp"):
            y = m.a2a_hp_to_cp(x, size, group, packed, back)
            return y
        x = x.index_select(0, back) if back is not None and size > 1 else x
        y = m.tensor_a2a_hp2cp(x, 0, -1, group, redo_attention_load_balancing=packed is None)
        return y


def settings(x: Inputs) -> dict[str, Any]:
    """The arguments of `MegatronLayer.module` for a call, without the groups."""
    return {
        "layer": x.layer,
        "conv_bias": "conv.bias" in x.parameters,
        "eps": x.eps,
        "dtype": x.hidden.dtype,
        "device": x.hidden.device,
        "sequence_parallel": x.sequence_parallel,
    }


def renamed(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by Megatron's names and in its shapes: a convolution's weight has an axis of size 1 more."""
    return {NAMES.get(name, name): x.unsqueeze(1) if name == "conv.weight" else x for name, x in parameters.items()}


class Group:
    """The ranks of one axis, with the methods of a process group that Megatron calls."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def size(self) -> int:
        return self.comm.size

    def rank(self) -> int:
        return self.comm.rank


def _group(comm: Comm) -> Any:
    return comm.group if isinstance(comm, Distributed) else Group(comm)


class _Projection(nn.Module):
    """A projection that TP ranks share. Its weight is passed in at each call, by functional_call."""

    def __init__(self, *_: Any, config: Any, tp_group: Group, **__: Any) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp_group.comm, config.sequence_parallel
        self.weight = nn.Parameter(torch.empty(0))


class _InProj(_Projection):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(gather_from(self.tp, x) if self.sequence_parallel else copy_to(self.tp, x), self.weight), None


class _OutProj(_Projection):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y = F.linear(x, self.weight)
        return scatter_to(self.tp, y) if self.sequence_parallel else reduce_from(self.tp, y), None


class OutNorm(nn.RMSNorm):
    """torch's norm, marked as Megatron marks Transformer Engine's. Megatron takes torch's norm itself only without SP."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


def current_device(device: torch.device) -> Any:
    """Make `device` torch's current CUDA device, on which a module creates its parameters.

    No collective may run inside, since the other simulated ranks would then see this device too.
    """
    return unittest.mock.patch.object(torch.cuda, "current_device", return_value=device)


@functools.cache
def _modules() -> types.SimpleNamespace:
    """The names of Megatron that we use, and what the release has. ImportError, in one line, says what is missing.

    `shares` says whether it has context parallelism, and `fuses` whether it exchanges packed sequences in one all-to-all.
    """
    if importlib.util.find_spec("megatron") is None and (folder := LIBRARY.folder()) is not None:
        sys.path.append(folder)
    if torch.cuda.is_available():
        with core_only():  # importing FLA's layers and models takes seconds
            imported(PLACES[0])
    else:
        with core_only(), decorating_later():
            imported("megatron.core.jit").disable_jit_fuser()  # compiling its small functions takes minutes on a CPU
            torch.cuda.current_device = functools.partial(torch.device, "cpu")  # type: ignore[assignment]  # it only raises here
            imported(PLACES[0])
    places = [importlib.import_module(place) for place in PLACES if _exists(place)]
    names = {name: getattr(place, name) for place in places for name in (*WANTED, *OPTIONAL) if hasattr(place, name)}
    if lacking := [name for name in WANTED if name not in names]:
        raise ImportError(_missing(f"{PLACES[0]}.{lacking[0]}"))
    for module, name in (
        ("megatron.core.packed_seq_params", "PackedSeqParams"),
        ("megatron.core.process_groups_config", "ProcessGroupCollection"),
        ("megatron.core.transformer", "TransformerConfig"),
    ):
        names[name] = found(module, name)
    mappings = imported("megatron.core.tensor_parallel.mappings")
    for module in (mappings, imported("megatron.core.ssm.mamba_context_parallel")):
        if hasattr(module, "all_to_all"):
            module.all_to_all = functools.partial(_all_to_all, module.all_to_all)
    mappings.get_tensor_model_parallel_group_if_none = functools.partial(_same, mappings.get_tensor_model_parallel_group_if_none)
    if not torch.cuda.is_available() and hasattr(places[0], "causal_conv1d_fn"):
        # The package causal_conv1d needs a GPU. Without it the module takes torch's convolution.
        vars(places[0])["causal_conv1d_fn"] = None
    return types.SimpleNamespace(**names, shares="tensor_a2a_cp2hp" in names, fuses="_build_thd_cp_a2a_perm" in names)


def _exists(module: str) -> bool:
    """Whether there is such a module. One inside a file that is no package is not there."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def found(module: str, name: str) -> Any:
    """What Megatron calls `name` in `module`. ImportError, in one line, if it has no such module or name."""
    place = imported(module)
    if not hasattr(place, name):
        raise ImportError(_missing(f"{module}.{name}"))
    return getattr(place, name)


def imported(module: str) -> Any:
    """A module of Megatron. ImportError, in one line, if there is none."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ImportError(_missing(module)) from None


def _missing(what: str) -> str:
    return (
        f"there is no {what}, neither in an installed megatron-core nor under --path: run `gdn-verify fetch megatron`, or name a "
        f"checkout of NVIDIA/Megatron-LM, or files of a release since {OLDEST}, with --path DIR"
    )


def _all_to_all(original: Any, group: Any, x: Tensor, *more: Any) -> Any:
    """Megatron's all-to-all, or that of simulated ranks if there is no process group."""
    return exchange(group.comm, x.contiguous()) if isinstance(group, Group) else original(group, x, *more)


def _same(original: Any, group: Any, *more: Any, **named: Any) -> Any:
    """The group that was passed, if it is our `Group`. Without torch.distributed, Megatron itself finds no group."""
    return group if isinstance(group, Group) else original(group, *more, **named)
