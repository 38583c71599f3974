"""Lengths of sequences and widths, on both sides of the block sizes of kernels."""

import random

# Lengths over 300 are drawn only with a reach: for interpreted kernels, every law has a smaller limit.
BLOCKS = (64, 16, 32, 128, 192, 256, 320, 384, 512)
EDGES = (1, 2, 15, 17, 31, 33, 63, 65, 66, 80, 127, 129, 130, 191, 193, 257, 319, 321, 383, 385, 449, 511)
WIDTHS = (16, 8, 32, 24, 40, 64, 12, 128, 1, 7, 65, 256, 160, 192)
MEAN = (3, 2, 4, 3)  # packed lengths of which the first and the last are the mean, as if all were equal
CROWDED = 130  # from this total of tokens on, a batch may have more sequences than a warp has threads


def lengths(
    chance: random.Random, sequences: tuple[int, int], longest: int, total: int, *, empty: bool, many: bool, step: int = 1
) -> tuple[int, ...]:
    """Draw lengths of sequences, around block sizes or anything up to `longest`, with at most `total` tokens.

    With `empty`, one in ten has no tokens. With `many`, one batch in six is 5 to 12 short sequences, or more than a warp has
    threads. With a `step`, all lengths are multiples of it, even if one `step` for each sequence is more than `longest` or `total`.
    """
    if step > 1:
        steps = lengths(chance, sequences, max(1, longest // step), max(sequences[0], total // step), empty=empty, many=many)
        return tuple(step * length for length in steps)
    if many and chance.random() < 1 / 6:
        short, count = (3, chance.randint(33, 70)) if total >= CROWDED and chance.random() < 1 / 2 else (5, chance.randint(5, 12))
        drawn = [chance.randint(0 if empty else 1, min(short, longest)) for _ in range(count)]
    else:
        sizes = [[n for n in BLOCKS if n <= longest], [n for n in EDGES if n <= longest], range(1, longest + 1)]
        drawn = [chance.choice(chance.choice([group for group in sizes if group])) for _ in range(chance.randint(*sequences))]
        if empty:
            drawn = [0 if chance.random() < 1 / 10 else length for length in drawn]
    result: list[int] = []
    for length in drawn:
        result.append(max(min(length, total - sum(result)), int(not empty)))
    return tuple(result)


def narrow(allowed: tuple[int, ...], wide: int) -> tuple[int, ...]:
    """Return the widths that are at most `wide`, or the least one if all are larger."""
    return tuple(width for width in allowed if width <= wide) or (min(allowed),)


def over_one(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes without 1, along which no order and no stride shows, or all if there is no other."""
    return tuple(size for size in sizes if size > 1) or sizes


def widths(span: tuple[int, int], step: int, wide: int) -> tuple[int, ...]:
    """Return the widths that a domain allows, at most `wide` unless all are larger."""
    allowed = [width for width in WIDTHS if span[0] <= width <= span[1] and width % step == 0] or [-(-span[0] // step) * step]
    return narrow(tuple(allowed), wide)
