"""Rules that are wrong only just over a limit: tables of 1,024 sequences and of their states, and an index of heads with 8 bits."""

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from tests.right import Chunkwise
from tests.right_interfaces import FusedGates


class At1024Sequences(Chunkwise):
    """Sequences from the 1,025th on are skipped."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        if x.cu_seqlens is not None and len(x.cu_seqlens) > 1025:
            o = torch.cat([o[:, : int(x.cu_seqlens[1024])], torch.zeros_like(o[:, int(x.cu_seqlens[1024]) :])], 1)
        return o, state


class At1024States(Chunkwise):
    """The initial states of sequences from the 1,025th on are read as zeros."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row) * (row < 1024)


class At256Heads(Chunkwise):
    """The 257th head gets the output of the first one."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        return o[:, :, torch.arange(o.shape[2]) % 256], state


class SpeedsOf256Heads(FusedGates):
    """The 257th head gets the A_log of the first one."""

    domain = Domain(in_kernel=("none", "both"))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.get("A_log") is None:
            return Chunkwise.run(self, x)
        return super().run(x.replaced(A_log=x.A_log[torch.arange(len(x.A_log)) % 256]))
