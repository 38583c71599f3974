"""An adapter of the inference of Megatron-LM's GatedDeltaNet module. It adapts signature and layout only.

Releases up to 0.19.2 have no such inference, main has. Megatron's engine keeps the states of all requests in slots, and
`DynamicInferenceContext` says which requests a batch has. The context needs a GPU and the rest of an engine, so `_Batch`
stands in for it: it has the slots, and what the module asks of a batch. A batch is either all prompts or all single tokens.

On a CPU, `_update` replaces Megatron's kernel that writes states into slots, which refuses tensors that are not on a GPU.
"""

import sys
import types
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from verify.adapters.base import Adapter
from verify.adapters.interface import Unavailable
from verify.adapters.megatron import PLACES, Group, MegatronLayer, renamed
from verify.ranks.collectives import Alone

INFERENCE = "ssm_dynamic_inference"
Answer = tuple[Tensor, Tensor | None, Tensor | None]


class MegatronInference(Adapter):
    """`GatedDeltaNet` with an inference context: prompts through the chunkwise rule, single tokens through the recurrent rule."""

    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    api = f"{PLACES[0]}:GatedDeltaNet"
    domain = LayerDomain(
        negative_eigenvalues=False,
        empty=False,
        nothing=False,
        attention_mask=False,
        backward=False,
        refills=False,
        parameter_dtypes=("input",),
    )
    requires: ClassVar[dict[str, str]] = MegatronLayer.requires

    def __init__(self) -> None:
        self.layer = MegatronLayer()
        kind = self.layer.megatron.GatedDeltaNet
        if not hasattr(kind, INFERENCE):
            raise Unavailable(f"this Megatron-LM has no inference for its GDN layer: GatedDeltaNet has no {INFERENCE}")
        if not torch.cuda.is_available():
            vars(sys.modules[kind.__module__])["tensor_masked_update"] = _update

    @torch.no_grad()
    def run(self, x: Inputs) -> Answer:
        groups = self.layer.megatron.ProcessGroupCollection(tp=Group(Alone()), cp=Group(Alone()))
        with_bias = x.conv_bias is not None
        module = self.layer.module(groups, x.layer, conv_bias=with_bias, eps=x.eps, dtype=x.hidden.dtype, device=x.hidden.device)
        names = {"in_proj.weight": x.in_proj, "conv.weight": x.conv, "norm.weight": x.norm, "out_proj.weight": x.out_proj}
        parameters = renamed({**names, "A_log": x.A_log, "dt_bias": x.dt_bias, **({"conv.bias": x.conv_bias} if with_bias else {})})
        batch = self.batch(module, x)
        y: Tensor
        y, _ = torch.func.functional_call(
            module, parameters, (x.hidden.flatten(0, 1).unsqueeze(1), None), {"inference_context": batch}
        )
        y = y.reshape(x.hidden.shape)
        return (y, batch.states[batch.slots], batch.windows[batch.slots]) if x.output_final_state else (y, None, None)

    def batch(self, module: torch.nn.Module, x: Inputs) -> "_Batch":
        """The slots and the batch of a call."""
        return _Batch(module, x)


class _Batch:
    """What the module asks of Megatron's `DynamicInferenceContext`. Slot 0 belongs to no request."""

    num_speculative_tokens = 0
    enable_prefix_caching = False
    padding_slice = slice(0, 0)

    def __init__(self, module: Any, x: Inputs) -> None:
        rows, tokens = x.hidden.shape[:2]
        device = x.hidden.device
        offsets = torch.arange(0, rows * tokens + 1, tokens, device=device) if x.cu_seqlens is None else x.cu_seqlens
        requests = len(offsets) - 1
        self.slots = torch.arange(requests, 0, -1, device=device)
        window, state = module.mamba_state_shapes_per_request()
        self.windows = torch.zeros(requests + 1, *window, dtype=x.hidden.dtype, device=device)
        self.states = torch.zeros(requests + 1, *state, dtype=torch.float32, device=device)
        going_on = x.state is not None
        if going_on:
            self.windows[self.slots], self.states[self.slots] = x.conv_state.to(x.hidden.dtype), x.state
        single = going_on and rows * tokens == requests
        self.padded_batch_dimensions = types.SimpleNamespace(
            token_count=rows * tokens,
            decode_req_count=requests if single else 0,
            prefill_req_count=0 if single else requests,
        )
        self.mamba_metadata = types.SimpleNamespace(
            cu_seqlens=offsets, batch_indices_prefill=self.slots, batch_indices_decode=self.slots
        )

    def is_dynamic_batching(self) -> bool:
        return True

    def is_static_batching(self) -> bool:
        return False

    def is_chunked_prefill_enabled(self) -> bool:
        return False

    def mamba_states_cache(self, layer: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - there is one layer
        return self.windows, self.states


def _update(states: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write the new states of requests into their slots. -1 is no slot."""
    owned = slots >= 0
    states[slots[owned]] = new[owned].to(states.dtype)
