"""How far the outputs of two implementations are apart, token by token."""

import dataclasses
import functools
import itertools
import math

import torch
from torch import Tensor

VOCABULARY, SPREAD = 1024, 3.0  # tokens of the head, and the standard deviation of its logits
AT_ONCE = 256  # positions whose log-probabilities are in memory at a time


@dataclasses.dataclass(frozen=True)
class Drift:
    """The difference of two outputs [B, T, ...].

    - `tokens` has for each token |a - b| / |truth|, the 2-norms over all sequences, heads and channels
    - `unequal` has for each token the share of numbers that differ, and `first` is the first token with any, or None
    - `log_mean`, `log_max`: mean and maximum of |log p_a - log p_b| over all positions and the VOCABULARY (see `log_probabilities`)
    - `log_tokens`: the mean of each token
    - `changed`: the share of positions whose most likely token is another one
    """

    tokens: list[float]
    unequal: list[float]
    first: int | None
    log_mean: float
    log_max: float
    log_tokens: list[float]
    changed: float

    @property
    def largest(self) -> float:
        """The largest difference of a token; infinity if one is not a number."""
        return max((math.inf if math.isnan(token) else token for token in self.tokens), default=0.0)


def log_probabilities(y: Tensor) -> Tensor:
    """The log-probabilities [positions, VOCABULARY] of a fixed random head over outputs y [positions, features], in float64.

    As at the end of a model, y is divided by its root mean square (of rows of zeros, by 1), and multiplied by a matrix of normal
    numbers with mean 0 and variance SPREAD^2 / features, from torch's CPU generator with seed 0. So logits have a standard
    deviation of SPREAD. Then log-softmax. A real model has other layers in between: the numbers are for comparing two pairs of
    implementations, and not those of a model.
    """
    wide = y.double()
    size = wide.square().mean(-1, keepdim=True).sqrt()
    logs: Tensor = torch.log_softmax((wide / size.where(size > 0, 1.0)) @ _head(y.shape[-1]), -1)
    return logs


@functools.lru_cache(4)
def _head(features: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    head: Tensor = SPREAD * features**-0.5 * torch.randn(features, VOCABULARY, generator=generator, dtype=torch.float64)
    return head


def drift_of(first: Tensor, second: Tensor, truth: Tensor) -> Drift:
    """The difference of two outputs [B, T, ...] on the CPU, of which `truth` is the float64 truth."""
    a, b, exact = (x.double().movedim(1, 0).flatten(1) for x in (first, second, truth))
    differs = (a != b).double().mean(1)
    reach = exact.norm(dim=1)
    apart = (a - b).norm(dim=1) / reach.where(reach > 0, 1.0)
    rows = [x.double().movedim(1, 0).flatten(2) for x in (first, second)]
    means, most, changed = [], 0.0, 0.0
    for p, q in zip(*(x.split(max(1, AT_ONCE // x.shape[1])) for x in rows), strict=True):
        one, other = log_probabilities(p), log_probabilities(q)
        off = (one - other).abs()
        means.append(off.mean((1, 2)))
        most = max(most, float(off.max()))
        changed += float((one.argmax(-1) != other.argmax(-1)).sum())
    logs = torch.cat(means)
    index = differs.nonzero().flatten()
    start = int(index[0]) if len(index) else None
    positions = rows[0].shape[0] * rows[0].shape[1]
    return Drift(apart.tolist(), differs.tolist(), start, float(logs.mean()), most, logs.tolist(), changed / positions)


def stretches(tokens: int) -> list[tuple[int, int]]:
    """The tokens 0, 1, 2 to 3, 4 to 7 and so on, as pairs of a first token and the one after the last."""
    ends = [0, 1]
    while ends[-1] < tokens:
        ends.append(min(2 * ends[-1], tokens))
    return list(itertools.pairwise(ends))
