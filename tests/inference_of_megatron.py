"""A small stand-in for the GDN layer of Megatron-LM's main branch with inference: what the adapter `megatron/inference` uses of it.

It computes with the float64 definition. What is tested with it is the adapter: the slots, the batches and the layouts. `tree` has
the files of a megatron-core around it.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn

from oracles.layer import GDN_LAYER, Layer
from oracles.operation import Inputs
from oracles.tolerance.bound import truth

_RECORD = "from types import SimpleNamespace as {}"
TREE = {
    "__init__": "",
    "jit": "def disable_jit_fuser(): pass",
    "package_info": "MAJOR = 0\nMINOR = 20\nPATCH = 0\n",
    "packed_seq_params": _RECORD.format("PackedSeqParams"),
    "process_groups_config": _RECORD.format("ProcessGroupCollection"),
    "transformer/__init__": f"from {__name__} import TransformerConfig",
    "transformer/transformer_config": "",
    "tensor_parallel/__init__": "",
    "tensor_parallel/mappings": "all_to_all = get_tensor_model_parallel_group_if_none = None",
    "ssm/__init__": "",
    "ssm/mamba_context_parallel": "",
    "ssm/gated_delta_net": f"from {__name__} import GatedDeltaNet, GatedDeltaNetSubmodules",
}
GatedDeltaNetSubmodules = types.SimpleNamespace


class TransformerConfig(types.SimpleNamespace):
    """The configuration, with the default that the projections read."""

    sequence_parallel = False


def tensor_masked_update(states: Tensor, slots: Tensor, new: Tensor) -> None:
    """Megatron's is a kernel, so an adapter replaces it on a CPU."""
    raise RuntimeError("tensors must be on a GPU")


class GatedDeltaNet(nn.Module):
    """The layer: its parameters by Megatron's names, and its inference."""

    def __init__(self, config: Any, submodules: Any, *, layer_number: int, conv_bias: bool, pg_collection: Any) -> None:
        super().__init__()
        c = config
        self.eps = c.layernorm_epsilon
        self.layer = Layer(
            c.hidden_size,
            c.linear_num_key_heads,
            c.linear_num_value_heads,
            c.linear_key_head_dim,
            c.linear_value_head_dim,
            c.linear_conv_kernel_dim,
        )
        channels, width = self.layer.offsets()["z"], self.layer.conv_width
        groups = {"config": c, "tp_group": pg_collection.tp}
        self.in_proj = submodules.in_proj(c.hidden_size, sum(self.layer.sections.values()), **groups)
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=conv_bias, dtype=c.params_dtype)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(self.layer.value_heads)) for _ in range(2))
        self.out_norm = submodules.out_norm(config=c, hidden_size=self.layer.value_dim, eps=self.eps)
        self.out_proj = submodules.out_proj(self.layer.sections["v"], c.hidden_size, **groups)

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        layer = self.layer
        return (layer.offsets()["z"], layer.conv_width), (layer.value_heads, layer.key_dim, layer.value_dim)

    def forward(self, hidden: Tensor, mask: Tensor | None, *, inference_context: Any = None) -> tuple[Tensor, None]:
        assert inference_context.is_dynamic_batching() and not inference_context.is_static_batching()
        assert inference_context.num_speculative_tokens == 0 and not inference_context.enable_prefix_caching
        return self.ssm_dynamic_inference(hidden, inference_context)

    def ssm_dynamic_inference(self, hidden: Tensor, context: Any) -> tuple[Tensor, None]:
        """One step: all prompts, or all single tokens."""
        windows, states = context.mamba_states_cache(0)
        batch, metadata = context.padded_batch_dimensions, context.mamba_metadata
        if batch.decode_req_count:
            assert batch.token_count == batch.decode_req_count and not batch.prefill_req_count
            slots, offsets = metadata.batch_indices_decode, torch.arange(batch.token_count + 1)
        else:
            assert not context.is_chunked_prefill_enabled()
            slots, offsets = metadata.batch_indices_prefill, metadata.cu_seqlens
            assert len(slots) == batch.prefill_req_count == len(offsets) - 1
        call = Inputs(
            layer=self.layer,
            hidden=hidden.transpose(0, 1),
            in_proj=self.in_proj.weight,
            conv=self.conv1d.weight.squeeze(1),
            conv_bias=self.conv1d.bias,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm=self.out_norm.weight,
            out_proj=self.out_proj.weight,
            state=states[slots],
            conv_state=windows[slots],
            cu_seqlens=offsets,
            eps=self.eps,
        )
        found = truth(GDN_LAYER, call)
        tensor_masked_update(windows, slots, found["conv_state"])
        tensor_masked_update(states, slots, found["final_state"])
        return found["y"].to(hidden.dtype).transpose(0, 1), None
