"""Adapters of vLLM's causal convolutions, whose states of W - 1 columns lie in a pool. They adapt signatures and layout only.

The kernels multiply an input and a weight in the inputs' dtype and add the products in float32, so half precision rounds each
product (`rounds_products`). For prompts they compute W = 2, 3 and 4, and for W = 5 return other numbers without an error; one token
at a time they compute W up to 6. They read the strides of every tensor but the bias, whose channels must lie side by side, and the
offsets, which must be contiguous. Slot 0 is the null block: a request that has it is padding. In the pool, the channels of a column
lie side by side.
"""

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.modules.domain import ModuleDomain
from verify.adapters.conv_pools import ConvPool, ServingConv, bias, offsets
from verify.adapters.left_out import IN_VLLM, left_out
from verify.adapters.serving_kernels import VLLM


class VllmConv(VLLM, ServingConv):
    """Base of adapters of vLLM's convolutions."""

    source = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
    channels_last = True


class Conv(VllmConv):
    """`causal_conv1d_fn`: prompts, packed, in blocks of 8 tokens. A batch is packed by the adapter.

    A sequence without an initial state is one whose `has_initial_state` is False; its slot then holds NaN.
    """

    omits = left_out(IN_VLLM, "pad_slot_id", "null_block_id", "metadata", "validate_data")
    domain = ModuleDomain("causal_conv1d", conv_widths=(4, 2, 3), state_columns="W-1", backward=False)
    counterpart = "vllm/conv_update"

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self.prompts(x)


class ConvUpdate(VllmConv):
    """`causal_conv1d_update`: one token of each request, or a draft of several. The output overwrites x, so x is a copy."""

    omits = left_out(IN_VLLM, "num_accepted_tokens", "query_start_loc", "max_query_len", "null_block_id", "validate_data", "out")
    domain = ModuleDomain(
        "causal_conv1d", conv_widths=(4, 2, 3, 5, 6), packed=False, longest=9, state_columns="W-1", backward=False
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self.steps(x, x.x.clone())


class ConvVerify(VllmConv):
    """`causal_conv1d_update` on packed drafts with `num_accepted_tokens`, as speculative decoding calls it.

    A slot has W - 1 columns and one more for each token of a draft but the first. `num_accepted_tokens` are those of the step
    before, and say at which column the state begins: at 0, 1, 2 and so on in turn. Without them, a draft that is shorter than
    `max_query_len` would leave a wrong state; vLLM always passes both.
    """

    omits = left_out(IN_VLLM, "null_block_id", "validate_data", "out")
    domain = ModuleDomain("causal_conv1d", conv_widths=(4, 2, 3, 5, 6), longest=9, state_columns="W-1", backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(sequences(x, "x"), device=x.x.device)
        longest = max(int(lengths.max()), 1)
        first = torch.arange(len(lengths), device=x.x.device) % longest
        pool = ConvPool.of(x, cleared=True, channels_last=True, spare=longest - 1, first=first)
        y = self.module().causal_conv1d_update(
            x.x.flatten(0, 1).clone(),
            pool.states,
            x.weight,
            bias(x),
            x.activation,
            conv_state_indices=pool.slots,
            num_accepted_tokens=(first + 1).to(torch.int32),
            query_start_loc=offsets(x),
            max_query_len=longest,
        )
        return y.reshape(x.x.shape), pool.final(torch.where(lengths > 0, lengths - 1, first))
