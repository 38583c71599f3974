"""The mask of a batch whose rows begin or end with padding, as layers and convolutions of libraries take it."""

import torch
from torch import Tensor

from oracles.operation import Inputs, no_padding


def padding_mask(x: Inputs, tokens: Tensor) -> Tensor | None:
    """Return a mask [B, T] for `tokens` [B, T, ...], 0 in the padding that `x.pads` says of each row and else 1.

    Without pads the mask has ones alone if the call has the option `mask` with the value `ones`, and is None otherwise.
    """
    pads = x.get("pads")
    if pads is None:
        ones = x.get("options", {}).get("mask") == "ones"
        return torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device) if ones else None
    return no_padding(pads, tokens.shape[1], tokens.device).long()
