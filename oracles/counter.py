"""Numbers from a counter: splitmix64 in wrapping 64-bit integers, the same bits on every device and in every version."""

import torch
from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea, Flood 2014): a bijection on 64-bit integers that scrambles them; int64, wrapping."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def mix_words(number: int, text: str) -> int:
    """A 63-bit number that depends on every bit of a number and a text: the seed of a law within a run."""
    state = torch.tensor(number, dtype=torch.int64)
    for byte in text.encode():
        state = mix(state + byte)
    return int(state) & (2**63 - 1)


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)  # a logical shift: int64's own keeps the sign


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
