"""Adapters of flash-linear-attention's own context parallelism (`cp_context`). They adapt signatures and layout only.

FLA wrote it for GPUs and NCCL, and there it runs unchanged. On a CPU, where its kernels are interpreted, `_permit_cpu` replaces two
of its functions: the check that refuses any device but a GPU, and its all-gather, whose output has one axis more than gloo accepts.
"""

import functools
import importlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

from oracles.operation import Inputs
from properties.paths.domain import MODEL_WIDTHS, PathDomain
from verify.adapters.base import PathAdapter
from verify.adapters.fla import REQUIRES, call, core
from verify.ranks.collectives import Distributed, Place

LAYOUTS = {"contiguous": "contiguous", "zigzag_batch": "zigzag"}  # FLA's zigzag cuts all sequences as one stream
_DOMAIN: dict[str, Any] = {
    "ranks": 4,
    "processes": True,
    "tensor_parallel": False,
    "sequence_parallel": False,
    "layouts": tuple(LAYOUTS),
    "batched": False,
    "padded": False,
    "exchanges": False,
    "counts": False,
    "refuses": False,
    "checkpoints": False,
    "deterministic": False,
    "refills": False,
    "least_piece": 1,
    "compiled_widths": MODEL_WIDTHS,
}
_RULES: dict[str, Any] = {**_DOMAIN, "conv_bias": False, "choices": (("qk_norm", ("separate", "in_kernel")),)}


class ChunkCP(PathAdapter):
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule` with `cp_context`: ranks pass states and decays on."""

    algorithm = "chunkwise"
    products = "tf32"
    domain = PathDomain(operation="gated_delta_rule", **_RULES)
    requires = REQUIRES
    rule = "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"

    def run(self, x: Inputs, place: Place) -> Tensor:
        core()
        module, name = self.rule
        return call(getattr(importlib.import_module(module), name), x, cp_context=_context(x, place))[0]


class KdaCP(ChunkCP):
    """`fla.ops.kda.chunk_kda` with `cp_context`: as `ChunkCP`, with a decay for each key channel."""

    domain = PathDomain(operation="kda", **_RULES)
    rule = "fla.ops.kda", "chunk_kda"


class ConvCP(PathAdapter):
    """`fla.modules.causal_conv1d.causal_conv1d` with `cp_context`: ranks pass their last tokens on.

    A rank must have the W - 1 tokens that it passes on. FLA checks this for the pieces of zigzag; contiguous pieces need it too.
    """

    algorithm = "recurrent"
    domain = PathDomain(operation="causal_conv1d", **{**_DOMAIN, "least_piece": 3}, choices=())
    requires = REQUIRES

    def run(self, x: Inputs, place: Place) -> Tensor:
        core()
        from fla.modules.causal_conv1d import causal_conv1d

        y: Tensor
        y, _ = causal_conv1d(
            x=x.x,
            weight=x.weight,
            bias=x.bias,
            activation=x.activation,
            cu_seqlens=x.cu_seqlens,
            cp_context=_context(x, place, conv1d_kernel_size=x.weight.shape[-1]),
        )
        return y


def _context(x: Inputs, place: Place, **more: Any) -> Any:
    """FLA's description of how the ranks share the tokens, or None for a single rank."""
    if place.cp.size == 1:
        return None
    from fla.ops.cp import build_cp_context

    assert isinstance(place.cp, Distributed), place
    if x.cu_seqlens.device.type == "cpu":
        _permit_cpu()
    return build_cp_context(x.cu_seqlens, group=place.cp.group, layout=LAYOUTS[x.layout], **more)


@functools.cache
def _permit_cpu() -> None:
    """Patch FLA so that its context parallelism runs in this process on a CPU, over gloo."""
    for name in ("context", "chunk_delta_h", "chunk_merge", "chunk_bwd", "chunk_fwd"):
        importlib.import_module(f"fla.ops.cp.{name}")._check_cp_device = lambda device: None  # type: ignore[attr-defined]
    comm = importlib.import_module("fla.ops.cp.comm")
    gather = comm.all_gather_into_tensor

    def flat(inp: Tensor, out: Tensor | None = None, group: Any = None, async_op: bool = False) -> Any:  # noqa: FBT001, FBT002
        size = dist.get_world_size(group)
        out = inp.new_empty(size, *inp.shape) if out is None else out
        _, handle = gather(inp, out.view(size * inp.shape[0], *inp.shape[1:]), group, async_op)
        return out, handle

    for name in ("fla.ops.cp.comm", "fla.ops.cp.chunk_delta_h", "fla.modules.causal_conv1d.cp"):
        importlib.import_module(name).all_gather_into_tensor = flat  # type: ignore[attr-defined]
