"""Where and at what sizes claims are measured."""

import dataclasses
from collections.abc import Callable

import torch

from oracles.layer import Layer
from verify.claims.timing import Clock, Effort

QWEN3_NEXT = Layer(hidden=2048, heads=16, value_heads=32, key_dim=128, value_dim=128)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is timed, and at which sizes what is timed is judged.

    `tokens` are those of a training step on one GPU, in one or in `sequences`; of `judged` the truth is computed too. Decoding has
    one token of each of `requests`, of which as many as `judged_requests` are judged. The exchange moves `moved` tokens, in as many
    sequences as each of `packs`, over each of `ranks`.
    """

    layer: Layer = QWEN3_NEXT
    dtype: str = "bf16"
    tokens: int = 4096
    judged: int = 256
    sequences: int = 16
    requests: tuple[int, ...] = (1, 4, 16, 64, 256, 512)
    judged_requests: int = 4
    moved: int = 16384
    packs: tuple[int, ...] = (1, 4, 16, 64, 256)
    ranks: tuple[int, ...] = (2, 4)


REAL = Sizes()
QUICK = dataclasses.replace(REAL, requests=(1, 64, 256), packs=(1, 16, 256))
TINY = Sizes(
    Layer(hidden=8, heads=1, value_heads=2, key_dim=8, value_dim=8),
    tokens=24,
    judged=24,
    sequences=3,
    requests=(2,),
    judged_requests=2,
    moved=32,
    packs=(1, 4),
    ranks=(2,),
)
FULL_EFFORT = Effort(budget_s=1.0, least=10, most=200, warm=3)
QUICK_EFFORT = Effort(budget_s=0.3, least=6, most=50, warm=1)
LEAST_EFFORT = Effort(budget_s=0.0, least=2, most=2, warm=0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One measurement's sizes, clock, effort and device; `tell` is told what is being done."""

    sizes: Sizes
    clock: Clock
    effort: Effort
    device: torch.device
    tell: Callable[[str], None] = lambda words: None
