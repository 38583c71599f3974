"""Wrong callables whose mistakes need an empty sequence between others, or a sequence of over 128 tokens."""

import torch
from torch import Tensor
from torch.nn import functional

from oracles.operation import Inputs
from verify import Adapter, CallDomain


class LeaksPastEmpty(Adapter):
    """A running sum of packed sequences, not cleared after an empty sequence."""

    domain = CallDomain(
        inputs={"x": "B T D", "cu_seqlens": "offsets"}, outputs={"y": "B T D"}, dtypes=("fp32",), empty=True, batched=False
    )

    def run(self, x: Inputs) -> Tensor:
        lengths = x.cu_seqlens.diff().tolist()
        sums = x.x.new_zeros(x.x.shape[2])
        parts = []
        for place, part in enumerate(x.x[0].split(lengths)):
            start = sums if place and not lengths[place - 1] else torch.zeros_like(sums)
            parts.append(start + part.cumsum(0))
            sums = parts[-1][-1] if len(part) else sums
        return torch.cat(parts).unsqueeze(0)


class PeeksInLongSequences(Adapter):
    """Attention whose causal mask is off by one in sequences of over 128 tokens."""

    domain = CallDomain(inputs={"q": "B T H K", "k": "B T H K", "v": "B T H V"}, outputs={"o": "B T H V"})

    def run(self, x: Inputs) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        tokens = q.shape[2]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril(int(tokens > 128))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
