"""Numbers to round, and arithmetic that rounds them."""

import math

import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic


def numbers(runs: int, *shape: int, low: int = -3, high: int = 3) -> Tensor:
    """The same random numbers in every run, of magnitudes 2^low to 2^high and both signs."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    mantissa = torch.rand(shape, generator=generator, dtype=torch.float64) + 1
    exponent = torch.randint(low, high, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * mantissa * 2.0**exponent).expand(runs, *shape).clone()


def arithmetic(dtype: str = "bf16", runs: int = 9, algorithm: str = "chunkwise", products: str = "ieee") -> Arithmetic:
    return Arithmetic.of(algorithm, dtype, products, runs)
