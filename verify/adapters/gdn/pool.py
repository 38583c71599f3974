"""Our own serving engine in plain torch: one GDN layer on a pool of slots.

Token by token, in float32: the convolution over the window, the gates, the norm of q and k, and the gated delta rule. Each row of a
batch is computed on tensors of its own. torch's vector code treats the end of a tensor differently, so in a shared tensor the bits
of a row would depend on the other rows. Every method is one step, so that a wrong engine (verify/zoo/wrong_traces.py) changes one.
A call that fails for lack of memory has changed nothing: what it needs is there before it writes a row, and tables are put back.
"""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from properties.traces.events import PADDING
from verify.adapters.base import Engine, TraceAdapter

EPS = 1e-6  # in the norm of q and k


@dataclasses.dataclass
class Progress:
    """What a row of T tokens computes: its slot, o [T, HV, V], and all that it may keep.

    `states[t]` [HV, K, V] is the state after t tokens. `line` [D, W - 1 + T] has the window before, with the tokens behind.
    """

    slot: int
    o: Tensor
    states: list[Tensor]
    line: Tensor


class PoolEngine(Engine):
    """A pool in which the slot that was free for the longest time is used first."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        first = int(sizes.padding_slot == 0)
        count, layer = sizes.slots + first, (sizes.value_heads, sizes.key_dim, sizes.value_dim)
        self.states = torch.zeros(count, *layer, dtype=sizes.state_dtype, device=sizes.weight.device)
        self.windows = torch.zeros(count, sizes.channels, sizes.width - 1, dtype=sizes.dtype, device=sizes.weight.device)
        self.unowned = (0,) if first else ()
        self.unused = deque(range(first, count))
        self.owned: dict[str, int] = {}
        self.drafted: list[Progress] = []

    def slots(self) -> Mapping[str, int]:
        return self.owned

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Put the tables of slots and owners back if what is done inside fails."""
        unused, owned = self.unused.copy(), self.owned.copy()
        try:
            yield
        except Exception:
            self.unused, self.owned = unused, owned
            raise

    def admit(self, requests: Sequence[str]) -> None:
        with self.whole():
            for request in requests:
                self.owned[request] = self.take()
                self.clear(self.owned[request])

    def take(self) -> int:
        """Take a slot out of the free list."""
        return self.unused.popleft()

    def give(self, slot: int) -> None:
        """Put a slot back into the free list."""
        self.unused.append(slot)

    def clear(self, slot: int) -> None:
        """Let a slot begin from zeros."""
        self.states[slot] = 0
        self.windows[slot] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy one slot to another."""
        self.states[target] = self.states[source]
        self.windows[target] = self.windows[source]

    def free(self, request: str) -> None:
        self.give(self.owned.pop(request))
        if (saved := self.owned.pop(f"{request}@", None)) is not None:
            self.give(saved)

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        source = self.owned[f"{old}@" if snapshot else old]
        with self.whole():
            self.owned[new] = self.take()
            self.copy(source, self.owned[new])

    def swap(self, request: str) -> None:
        slot = self.owned[request]
        self.move(request, self.states[slot].clone(), self.windows[slot].clone())

    def transfer(self, request: str) -> None:
        slot = self.owned[request]
        self.move(request, *self.joined(self.cut(self.states[slot].clone(), self.windows[slot].clone())))

    def move(self, request: str, state: Tensor, window: Tensor) -> None:
        """Give the slot of a request back, and write what it has to the next one."""
        with self.whole():
            self.give(self.owned[request])
            slot = self.owned[request] = self.take()
            self.states[slot], self.windows[slot] = state, window

    def sections(self) -> list[int]:
        """Return the channels of q, k and v in a window."""
        sizes = self.sizes
        return [sizes.heads * sizes.key_dim] * 2 + [sizes.value_heads * sizes.value_dim]

    def cut(self, state: Tensor, window: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        """Return for each of H ranks its value heads of a state, and its channels of the sections q, k and v of a window."""
        ranks = self.sizes.heads
        parts = [section.chunk(ranks) for section in window.split(self.sections())]
        return [(heads, [part[rank] for part in parts]) for rank, heads in enumerate(state.chunk(ranks))]

    def joined(self, ranks: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
        """Return the state and the window that ranks have together."""
        windows = zip(*(parts for _, parts in ranks), strict=True)
        return torch.cat([heads for heads, _ in ranks]), torch.cat([part for section in windows for part in section])

    def prefill(self, batch: Batch) -> Tensor:
        rows = self.rows(batch)
        o = self.outputs(rows)
        self.save(batch, rows)
        self.write(rows, batch.lengths)
        return o

    def decode(self, batch: Batch) -> Tensor:
        rows = self.rows(batch)
        o = self.outputs(rows)
        self.save(batch, rows)
        self.write(rows, batch.lengths)
        return o

    def verify(self, batch: Batch) -> Tensor:
        self.drafted = self.rows(batch)
        return self.outputs(self.drafted)

    def commit(self, accepted: Sequence[int]) -> None:
        self.write(self.drafted, accepted)

    def slot(self, request: str) -> int:
        """Return the slot of a row's request, or the index of padding rows."""
        return self.owned[request] if request != PADDING else self.sizes.padding_slot

    def padding(self, slot: int) -> bool:
        """Return whether a row with this slot is a padding row."""
        return slot == self.sizes.padding_slot

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return the state [HV, K, V] in float32 and the window [D, W - 1] of a row; zeros for a padding row."""
        if self.padding(slot):
            return torch.zeros_like(self.states[0], dtype=torch.float32), torch.zeros_like(self.windows[0])
        return self.states[slot].float(), self.windows[slot].clone()

    def write(self, rows: Sequence[Progress], counts: Sequence[int]) -> None:
        """Write the state and window after `counts` tokens of each row to its slot; padding rows write nothing."""
        for row, count in zip(rows, counts, strict=True):
            if not self.padding(row.slot):
                self.put(row, row.slot, count)

    def put(self, row: Progress, slot: int, count: int) -> None:
        """Write the state and window of a row after `count` tokens to a slot."""
        self.states[slot] = row.states[count]
        self.windows[slot] = row.line[:, count : count + self.sizes.width - 1]

    def save(self, batch: Batch, rows: Sequence[Progress]) -> None:
        """Keep the snapshots that a batch asks for."""
        for row, request, count in zip(rows, batch.requests, batch.snapshots, strict=True):
            if count is not None:
                if f"{request}@" not in self.owned:
                    self.owned[f"{request}@"] = self.take()
                self.put(row, self.owned[f"{request}@"], count)

    def rows(self, batch: Batch) -> list[Progress]:
        """Compute all tokens of a batch. The pool keeps what it holds."""
        tokens = zip(*(x.split(list(batch.lengths)) for x in (batch.mixed, batch.a, batch.b)), strict=True)
        return [self.row(self.slot(request), *row) for request, row in zip(batch.requests, tokens, strict=True)]

    def row(self, slot: int, mixed: Tensor, a: Tensor, b: Tensor) -> Progress:
        """Compute a row of T tokens: mixed [T, D], a and b [T, HV]."""
        sizes = self.sizes
        state, window = self.read(slot)
        line = torch.cat([window, mixed.mT], -1)
        if not len(mixed):
            return Progress(slot, torch.zeros(0, sizes.value_heads, sizes.value_dim, device=mixed.device), [state], line)
        sections = self.convolve(line).split([2 * sizes.heads * sizes.key_dim, sizes.value_heads * sizes.value_dim], -1)
        q, k = self.normed(sections[0].unflatten(-1, (2 * sizes.heads, -1))).unsqueeze(-2).chunk(2, 1)
        v, decay, beta = sections[1].unflatten(-1, (sizes.value_heads, 1, -1)), self.decay(a), b.float().sigmoid()
        beta = beta[..., None, None]
        tokens = (sizes.key_dim**-0.5 * q, k.mT, beta * v, -beta * k, decay[..., None, None])
        states, outputs = [state], list[Tensor]()
        for token in zip(*(x.unbind() for x in tokens), strict=True):
            state, o = self.step(state, *token)
            states.append(state)
            outputs.append(o)
        return Progress(slot, torch.stack(outputs).squeeze(-2), states, line)

    def convolve(self, line: Tensor) -> Tensor:
        """Return silu of the convolution [T, D] over a line [D, W - 1 + T]."""
        taps, weight = line.float().unfold(-1, self.sizes.width, 1), self.sizes.weight.float()
        total = torch.stack([taps[..., tap] * weight[:, None, tap] for tap in range(self.sizes.width)]).sum(0)
        return torch.nn.functional.silu(total).mT

    def decay(self, a: Tensor) -> Tensor:
        """Return the factor [T, HV] of the state."""
        return (-self.sizes.A_log.exp() * torch.nn.functional.softplus(a.float() + self.sizes.dt_bias)).exp()

    def normed(self, x: Tensor) -> Tensor:
        """Return heads of q and k [T, 2 H, K], normalised and repeated for each value head: [T, 2 HV, K]."""
        x = x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()
        return x.repeat_interleave(self.sizes.value_heads // self.sizes.heads, -2)

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, erased: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state [HV, K, V] after one token, and its output [HV, 1, V].

        q [HV, 1, K] is scaled, k is [HV, K, 1], v [HV, 1, V] and erased [HV, 1, K] are beta v and -beta k, and decay is [HV, 1, 1].
        On a GPU each operation is a launch, so there are few.
        """
        state = decay * state
        state = torch.baddbmm(state, k, torch.baddbmm(v, erased, state))
        return state, torch.bmm(q, state)

    def outputs(self, rows: Sequence[Progress]) -> Tensor:
        """Return the outputs [T, HV, V] of the rows' tokens, one row after the other."""
        return torch.cat([row.o for row in rows]).to(self.sizes.dtype)


class Pool(TraceAdapter):
    """`PoolEngine`: every row's state and window are read from its slot, advanced, and written back."""

    domain = TraceDomain(retries=True)
    engine: type[PoolEngine] = PoolEngine

    def open(self, sizes: Sizes) -> Engine:
        return self.engine(sizes)
