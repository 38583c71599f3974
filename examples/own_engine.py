"""An adapter of a serving engine: a pool of slots, and what it does with them, event by event.

    gdn-verify check examples/own_engine.py:OwnEngine

Replace `layer` by your kernels and the lists below by your engine's pool and allocator.
"""

import torch
from torch import nn

from verify import Engine, TraceAdapter, TraceDomain


class Served(Engine):
    """An engine that knows prefill, decode, speculation and free, and gives the freed slot that it saw last."""

    def __init__(self, sizes):
        self.sizes, self.owners = sizes, {}
        self.spare = list(range(sizes.slots))[::-1]
        device, state = sizes.weight.device, (sizes.value_heads, sizes.key_dim, sizes.value_dim)
        self.states = torch.zeros(sizes.slots, *state, device=device)
        self.windows = torch.zeros(sizes.slots, sizes.channels, sizes.width - 1, dtype=sizes.dtype, device=device)

    def slots(self):
        return self.owners

    def admit(self, requests):
        for request in requests:
            slot = self.owners[request] = self.spare.pop()
            self.states[slot], self.windows[slot] = 0, 0

    def free(self, request):
        self.spare.append(self.owners.pop(request))

    def prefill(self, batch):
        o = self.verify(batch)
        self.commit(batch.lengths)
        return o

    decode = prefill

    def verify(self, batch):
        rows = zip(*(x.split(batch.lengths) for x in (batch.mixed, batch.a, batch.b)), strict=True)
        self.drafts = [
            (self.owners[name], *self.layer(self.owners[name], *row)) for name, row in zip(batch.requests, rows, strict=True)
        ]
        return torch.cat([o for _, o, _, _ in self.drafts]).to(self.sizes.dtype)

    def commit(self, accepted):
        for (slot, _, states, line), count in zip(self.drafts, accepted, strict=True):
            self.states[slot] = states[count]
            self.windows[slot] = line[:, count : count + self.sizes.width - 1]

    def layer(self, slot, mixed, a, b):
        """Return o of a row, its state after each number of tokens, and its window with its tokens behind."""
        sizes, line = self.sizes, torch.cat([self.windows[slot], mixed.mT], -1)
        y = nn.functional.silu(nn.functional.conv1d(line.float(), sizes.weight.float().unsqueeze(1), groups=sizes.channels)).mT
        keys = sizes.heads * sizes.key_dim
        q, k = (x.unflatten(-1, (sizes.heads, -1)) for x in (y[:, :keys], y[:, keys : 2 * keys]))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(sizes.value_heads // sizes.heads, 1) for x in (q, k))
        v = y[:, 2 * keys :].unflatten(-1, (sizes.value_heads, -1))
        decay, beta = torch.exp(-sizes.A_log.exp() * nn.functional.softplus(a.float() + sizes.dt_bias)), b.float().sigmoid()
        states, rows = [self.states[slot].clone()], [v[:0]]
        for t in range(len(v)):
            state = decay[t, :, None, None] * states[-1]
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state)))
            states.append(state)
            rows.append(torch.einsum("hk,hkv->hv", q[t], state).unsqueeze(0) * sizes.key_dim**-0.5)
        return torch.cat(rows), states, line


class OwnEngine(TraceAdapter):
    """Opens the engine; it has no padding rows, forks, swaps or snapshots, and float32 states. conv1d needs tokens in every row."""

    domain = TraceDomain(
        events=("prefill", "decode", "verify", "free"), states=("fp32",), padding_slots=(), snapshots=(0,), empty=False
    )

    def open(self, sizes):
        return Served(sizes)
