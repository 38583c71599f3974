"""Adapters of SGLang's causal convolutions, whose states of W - 1 columns lie in a pool. They adapt signatures and layout only.

The kernels multiply an input and a weight in the inputs' dtype and add the products in float32, so half precision rounds each
product (`rounds_products`). They compute W = 2, 3 and 4; for W = 5 they return other numbers without an error. They read the
strides of every tensor but the bias, whose channels must lie side by side.
"""

import types

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.modules.domain import ModuleDomain
from verify.adapters import serving
from verify.adapters.base import Adapter
from verify.adapters.conv_pools import ConvPool, offsets
from verify.adapters.left_out import IN_SGLANG, left_out

CONV = "sglang.kernels.ops.mamba.causal_conv1d_triton"


class SGLangConv(Adapter):
    """Base of adapters of SGLang's convolutions."""

    algorithm = "pointwise"
    rounds_products = True
    requires = {"sglang": "0.5.23", "triton": "3.7.1"}  # noqa: RUF012 - as in the base class

    def bring(self) -> None:
        self.module()

    def module(self) -> types.ModuleType:
        """The kernels' module."""
        return serving.module(CONV)


class Conv(SGLangConv):
    """`causal_conv1d_fn`: prompts, packed, in blocks of 8 tokens. A batch is packed by the adapter.

    A sequence without an initial state is one whose `has_initial_state` is False; its slot then holds NaN.
    """

    omits = left_out(IN_SGLANG, "pad_slot_id", "validate_data", "block_table")
    domain = ModuleDomain("causal_conv1d", conv_widths=(4, 2, 3), state_columns="W-1", backward=False)
    counterpart = "sglang/conv_update"

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool = ConvPool.of(x, cleared=False)
        y = self.module().causal_conv1d_fn(
            x.x.flatten(0, 1).mT,
            x.weight,
            None if x.bias is None else x.bias.contiguous(),
            pool.states,
            offsets(x),
            sequences(x, "x"),
            cache_indices=pool.slots,
            has_initial_state=torch.full(pool.slots.shape, x.state is not None, device=x.x.device),
            activation=x.activation,
            pad_slot_id=-1,
        )
        return y.mT.reshape(x.x.shape), pool.final()


class ConvUpdate(SGLangConv):
    """`causal_conv1d_update`: one token of each request, or a draft of several."""

    omits = left_out(
        IN_SGLANG,
        "intermediate_conv_window",
        "intermediate_state_indices",
        "cache_seqlens",
        "num_accept_tokens",
        "retrieve_next_token",
        "retrieve_next_sibling",
        "retrieve_parent_token",
        "pad_slot_id",
        "metadata",
        "validate_data",
    )
    domain = ModuleDomain("causal_conv1d", conv_widths=(4, 2, 3), packed=False, longest=9, state_columns="W-1", backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        pool = ConvPool.of(x, cleared=True)
        single = x.x.shape[1] == 1
        y = self.module().causal_conv1d_update(
            x.x[:, 0] if single else x.x.mT,
            pool.states,
            x.weight,
            None if x.bias is None else x.bias.contiguous(),
            x.activation,
            conv_state_indices=pool.slots,
            pad_slot_id=-1,
        )
        return y.unsqueeze(1) if single else y.mT, pool.final()


class ConvVerify(SGLangConv):
    """`causal_conv1d_update` on drafts of one length, with a buffer of the window after each token (`intermediate_conv_window`).

    A sequence is the accepted part of a draft. Its final state is the window after its last token, which SGLang copies into the
    pool afterwards. The tokens that follow it in the draft are rejected, and hold NaN. One token at least is always accepted.
    """

    omits = left_out(
        IN_SGLANG,
        "cache_seqlens",
        "num_accept_tokens",
        "retrieve_next_token",
        "retrieve_next_sibling",
        "retrieve_parent_token",
        "pad_slot_id",
        "metadata",
        "validate_data",
    )
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
            None if x.bias is None else x.bias.contiguous(),
            x.activation,
            conv_state_indices=pool.slots,
            intermediate_conv_window=windows,
            intermediate_state_indices=rows.to(torch.int32),
            pad_slot_id=-1,
        )
        return y.mT[accepted].reshape(x.x.shape), windows[rows, lengths - 1]
