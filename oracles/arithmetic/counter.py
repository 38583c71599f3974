"""Numbers from a counter: splitmix64 in wrapping 64-bit integers, with the same bits on every device and in every version."""

import itertools

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31


def mix(x: Tensor) -> Tensor:
    """Scramble int64 numbers with splitmix64 (Steele, Lea, Flood 2014), a bijection on 64-bit integers that wrap."""
    return _fold(_rounds(x + _signed(_STEP)), _LAST)


def mix_number(number: int) -> int:
    """Return the same for one number, modulo 2^64: int(mix(torch.tensor(number))), without a tensor."""
    word = (number + _STEP) % 2**64
    for by, factor in _ROUNDS:
        word = (word ^ (word >> by)) * factor % 2**64
    return _signed(word ^ (word >> _LAST))


def mix_words(number: int, text: str) -> int:
    """Return a 63-bit number that depends on every bit of a number and a text, used as the seed of a law within a run.

    ValueError for a number outside 64 bits, because some of its bits would not count.
    """
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"number must be in -2^63..2^63 - 1, got {number}")
    for byte in text.encode():
        number = mix_number(number + byte)
    return number & (2**63 - 1)


def integers(*draws: tuple[Tensor, int, int]) -> list[Tensor]:
    """Return, for each counter [n] in int64, key and bits, the first `bits` bits of mix(counter + key), signed.

    The numbers are uniform in [-2^(bits-1), 2^(bits-1)). All draws are mixed in one call, because on a GPU each operation costs a
    launch. ValueError without draws or for bits outside 1..64.
    """
    if not draws:
        raise ValueError("draws must be at least one, got none")
    for _, _, bits in draws:
        if not 1 <= bits <= 64:
            raise ValueError(f"bits must be in 1..64, got {bits}")
    order = sorted(range(len(draws)), key=lambda index: draws[index][2])  # puts draws of equal bits side by side
    counters, keys = [draws[index][0] for index in order], [_signed((draws[index][1] + _STEP) % 2**64) for index in order]
    words = _rounds(torch.cat(torch._foreach_add(counters, keys)))
    if max(bits for _, _, bits in draws) > _LAST:  # the last step changes only the last 64 - 31 bits
        _fold(words, _LAST)
    parts = dict(zip(order, words.split([len(counter) for counter in counters]), strict=True))
    start = 0
    for bits, alike in itertools.groupby(order, key=lambda index: draws[index][2]):
        end = start + sum(len(parts[index]) for index in alike)
        words[start:end].bitwise_right_shift_(64 - bits)
        start = end
    return [parts[index] for index in range(len(draws))]


def _rounds(x: Tensor) -> Tensor:
    """Apply the steps of splitmix64 between its first addition and its last step, in place."""
    for by, factor in _ROUNDS:
        _fold(x, by).mul_(_signed(factor))
    return x


def _fold(x: Tensor, by: int) -> Tensor:
    """Return x ^ (x >> by) with a logical shift, in place."""
    return x.bitwise_xor_((x >> by).bitwise_and_((1 << (64 - by)) - 1))  # the mask clears what int64's arithmetic shift fills in


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
