"""The sizes, clock, effort and device with which claims are measured."""

import dataclasses
from collections.abc import Callable

import torch

from oracles.layer import Layer
from verify.claims.timing import Clock, Effort

QWEN3_NEXT = Layer(hidden=2048, heads=16, value_heads=32, key_dim=128, value_dim=128)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes at which claims are timed and judged.

    - `tokens`: the tokens of a training step on one GPU, as one sequence or as `sequences` packed ones. The results are judged with
      `judged` tokens.
    - `requests`: numbers of requests in decoding, with one token each. The results are judged with `judged_requests`.
    - `batches`: numbers of requests in decoding with a serving library's kernels, and `shares`: in how many parts ranks share the
      layer. The last share is judged, with `judged_gates` gates.
    - `moved`: the tokens of the exchange, in as many sequences as each number of `packs`, over as many ranks as each of `ranks`.
    """

    layer: Layer = QWEN3_NEXT
    dtype: str = "bf16"
    tokens: int = 4096
    judged: int = 256
    sequences: int = 16
    requests: tuple[int, ...] = (1, 4, 16, 64, 256, 512)
    judged_requests: int = 4
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    shares: tuple[int, ...] = (1, 4)
    judged_gates: int = 4
    moved: int = 16384
    packs: tuple[int, ...] = (1, 4, 16, 64, 256)
    ranks: tuple[int, ...] = (2, 4)


REAL = Sizes()
QUICK = dataclasses.replace(REAL, requests=(1, 64, 256), batches=(1, 64, 256), judged_gates=1, packs=(1, 16, 256))
TINY = Sizes(
    Layer(hidden=8, heads=1, value_heads=2, key_dim=8, value_dim=8),
    tokens=24,
    judged=24,
    sequences=3,
    requests=(2,),
    judged_requests=2,
    batches=(2,),
    shares=(1,),
    judged_gates=1,
    moved=32,
    packs=(1, 4),
    ranks=(2,),
)
FULL_EFFORT = Effort(budget_s=1.0, least=10, most=200, warm=3)
QUICK_EFFORT = Effort(budget_s=0.3, least=6, most=50, warm=1)
LEAST_EFFORT = Effort(budget_s=0.0, least=2, most=2, warm=0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The sizes, clock, effort and device of a measurement. `tell` is called with lines about the progress."""

    sizes: Sizes
    clock: Clock
    effort: Effort
    device: torch.device
    tell: Callable[[str], None] = lambda words: None
