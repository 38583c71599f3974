"""The mask of a batch whose rows begin with padding, as layers and convolutions of libraries take it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def padding_mask(pads: Sequence[int] | None, tokens: Tensor) -> Tensor | None:
    """Return a mask [B, T] for `tokens` [B, T, ...], 0 in the first `pads` tokens of each row and else 1; None without pads."""
    if pads is None:
        return None
    start = torch.tensor(pads, device=tokens.device).unsqueeze(-1)
    return (torch.arange(tokens.shape[1], device=tokens.device) >= start).long()
