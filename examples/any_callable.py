"""Adapters of functions for which gdn-verify has no float64 reference: they name their inputs, outputs and axes.

In a clone of the repository:

    gdn-verify check examples/any_callable.py:CausalAttention
"""

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify import Adapter, CallDomain


class CausalAttention(Adapter):
    """torch's causal attention, on a batch of sequences."""

    domain = CallDomain(inputs={"q": "B T H K", "k": "B T H K", "v": "B T H V"}, outputs={"o": "B T H V"})

    def run(self, x: Inputs) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
