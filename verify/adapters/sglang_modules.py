"""Adapters of SGLang's causal convolutions, whose states of W - 1 columns lie in a pool. They adapt signatures and layout only.

The kernels multiply an input and a weight in the inputs' dtype and add the products in float32, so half precision rounds each
product (`rounds_products`). They compute W = 2, 3 and 4; for W = 5 they return other numbers without an error. They read the
strides of every tensor but the bias, whose channels must lie side by side.
"""

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.modules.domain import ModuleDomain
from verify.adapters.conv_pools import ConvPool, ServingConv, bias
from verify.adapters.left_out import IN_SGLANG, left_out
from verify.adapters.serving_kernels import SGLang

# Parameters that `omits` names, of a call for single tokens or for a draft.
OTHERS = (
    "cache_seqlens",
    "num_accept_tokens",
    "retrieve_next_token",
    "retrieve_next_sibling",
    "retrieve_parent_token",
    "pad_slot_id",
    "metadata",
    "validate_data",
)


class SGLangConv(SGLang, ServingConv):
    """Base of adapters of SGLang's convolutions."""

    source = "sglang.kernels.ops.mamba.causal_conv1d_triton"


class Conv(SGLangConv):
    """`causal_conv1d_fn`: prompts, packed, in blocks of 8 tokens. A batch is packed by the adapter.

    A sequence without an initial state is one whose `has_initial_state` is False; its slot then holds NaN.
    """

    omits = left_out(IN_SGLANG, "pad_slot_id", "validate_data", "block_table")
    domain = ModuleDomain("causal_conv1d", conv_widths=(4, 2, 3), state_columns="W-1", backward=False)
    counterpart = "sglang/conv_update"

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self.prompts(x, sequences(x, "x"), pad_slot_id=-1)


class ConvUpdate(SGLangConv):
    """`causal_conv1d_update`: one token of each request, or a draft of several."""

    omits = left_out(IN_SGLANG, "intermediate_conv_window", "intermediate_state_indices", *OTHERS)
    domain = ModuleDomain("causal_conv1d", conv_widths=(4, 2, 3), packed=False, longest=9, state_columns="W-1", backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return self.steps(x, x.x, pad_slot_id=-1)


class ConvVerify(SGLangConv):
    """`causal_conv1d_update` on drafts of one length, with a buffer of the window after each token (`intermediate_conv_window`).

    A sequence is the accepted part of a draft. Its final state is the window after its last token, which SGLang copies into the
    pool afterwards. The tokens that follow it in the draft are rejected, and hold NaN. One token at least is always accepted.
    """

    omits = left_out(IN_SGLANG, *OTHERS)
    domain = ModuleDomain("causal_conv1d", conv_widths=(4, 2, 3), empty=False, longest=9, state_columns="W-1", backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool = ConvPool.of(x, cleared=True)
        lengths = torch.tensor(sequences(x, "x"), device=x.x.device)
        count, longest = len(lengths), int(lengths.max())
        accepted = torch.arange(longest, device=x.x.device) < lengths.unsqueeze(-1)
        drafts = x.x.new_full((count, longest, x.x.shape[-1]), float("nan"))
        drafts[accepted] = x.x.flatten(0, 1)
        windows = x.x.new_full((count, longest, *pool.states.shape[1:]), float("nan"))
        rows = torch.arange(count, device=x.x.device).flip(0)
        y = self.module().causal_conv1d_update(
            drafts.mT,
            pool.states,
            x.weight,
            bias(x),
            x.activation,
            conv_state_indices=pool.slots,
            intermediate_conv_window=windows,
            intermediate_state_indices=rows.to(torch.int32),
            pad_slot_id=-1,
        )
        return y.mT[accepted].reshape(x.x.shape), windows[rows, lengths - 1]
