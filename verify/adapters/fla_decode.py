"""Adapters of flash-linear-attention's rule on states in a pool, called as a serving loop does. They gather and scatter only."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from properties.cases.pool_case import BLOCK_SIZES
from properties.domain import Domain
from properties.pool_domain import PoolDomain
from verify.adapters.fla import FlaAdapter, call

TOKENS = ("q", "k", "v", "g", "beta")
RULE = Domain(key_dims=(1, 256), position_independent=True, backward=False)


class Decode(FlaAdapter):
    """`fused_recurrent_gated_delta_rule` on the states in the requests' slots. FLA has no pool, so the states are copied back."""

    algorithm = "recurrent"
    domain = PoolDomain(rule=RULE)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as rule

        named = x.slots != x.padding
        goes_on = named if x.has_initial_state is None else named & (x.has_initial_state == 1)
        states = x.pool[x.slots.long().clamp(min=0)].where(goes_on.reshape(-1, 1, 1, 1), 0.0)
        inputs = Inputs(
            **{name: x[name] for name in (*TOKENS, "cu_seqlens", "scale", "qk_norm")}, state=states, output_final_state=True
        )
        with in_blocks(x.block_v):
            o, final = call(rule, inputs)
            if x.accepted is not None:
                _, final = call(rule, first_tokens(inputs, x.accepted))
        assert final is not None
        x.pool[x.slots[named].long()] = final[named]
        return o, x.pool


class DecodeBlocks(Decode):
    """`Decode` with its kernel launched in blocks of as many value channels as the case says. FLA itself uses at most 8.

    Every channel is computed by one program, whatever the size of its block. But in a wider block, a compiler may sum over K in
    another order.
    """

    domain = PoolDomain(rule=RULE, blocks=BLOCK_SIZES)


def first_tokens(x: Inputs, counts: Tensor) -> Inputs:
    """The packed call of the first `counts` tokens of each request."""
    starts = [0, *itertools.accumulate(sequences(x, "v"))]
    positions = [start + token for start, count in zip(starts, counts.tolist(), strict=False) for token in range(count)]
    index = torch.tensor(positions, dtype=torch.int64, device=x.v.device)
    tokens = {name: x[name].flatten(0, 1).index_select(0, index).unsqueeze(0) for name in TOKENS}
    return x.replaced(**tokens, cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(counts.dtype))


@contextlib.contextmanager
def in_blocks(size: int | None) -> Iterator[None]:
    """Make FLA's wrapper launch its kernel in blocks of `size` value channels inside; None leaves the choice to FLA.

    RuntimeError if nothing was launched inside.
    """
    if size is None:
        yield
        return
    from fla.ops.gated_delta_rule import fused_recurrent as module

    kernel = module.fused_recurrent_gated_delta_rule_fwd_kernel
    launcher = Launcher(kernel, size)
    module.fused_recurrent_gated_delta_rule_fwd_kernel = launcher
    try:
        yield
    finally:
        module.fused_recurrent_gated_delta_rule_fwd_kernel = kernel
    if not launcher.launches:
        raise RuntimeError(f"nothing was launched in blocks of {size}: the wrapper took another path")


@dataclasses.dataclass
class Launcher:
    """Launches a kernel with the arguments of its wrapper, but another block of value channels and the grid that fits it."""

    kernel: Any
    size: int
    launches: int = 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def launch(**named: Any) -> Any:
            heads, left = divmod(grid[0], _blocks(named["V"], named["BV"]))  # the heads of all sequences
            if len(grid) > 1 or left:
                raise RuntimeError(f"the grid must be every head's blocks of {named['BV']} of {named['V']} channels, got {grid}")
            self.launches += 1
            return self.kernel[heads * _blocks(named["V"], self.size),](**{**named, "BV": self.size})

        return launch


def _blocks(width: int, size: int) -> int:
    return -(-width // size)
