"""The sizes of long cases: sequences over several chunks and around powers of two, and many sequences or heads.

A check draws a few such cases beside the short ones, at fixed places of each law. They have narrow widths, so that they cost about
as much as the others.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

EVERY, EVERY_ON_GPU = 16, 10  # one of so many cases of a law is large
# The kinds of large cases. A sequence is over several chunks, next to a power of two or nearly as long as possible; or sequences or
# heads are many.
LENGTHS, KINDS = ("chunks", "power", "most"), ("chunks", "power", "most", "sequences", "heads")
TURNS = ("chunks", "sequences", "power", "heads", "most", "sequences")  # of a law's large cases; the seed decides the first
POWERS = tuple(2**exponent for exponent in range(8, 17))
CHUNKS = 8  # a long sequence has more than so many chunks, or is next to a power of two
COUNTS = (33, 65, 65, 66)  # sequences: next to the threads of one and of two warps
MANY_HEADS = ((16, 16), (1, 32), (4, 32), (16, 32), (32, 32))
FEW_HEADS = ((1, 1), (1, 1), (1, 2), (2, 2))
NARROW = 16  # the widths of long cases, if the domain has narrower ones than its least
LEAST = 70  # a law whose cases are all shorter than this draws no long ones
MOST = {"quick": 4096, "interpreted": 1030, "slow": 0}  # tokens of the longest sequence on a CPU, by the cost of a token
MOST_ON_GPU = 2**16
MOST_ALONG_Y = 65_535  # programs that CUDA launches along the second and third axis of a grid
LARGEST_CHUNK, USUAL_CHUNK = 1024, 128  # the largest chunk that an adapter may declare, and the largest of most kernels
# Key and value heads with an odd number of value heads for each key head. Where a kernel takes 2, 4, 8, ... value heads together,
# it takes some of two key heads: up to 64 of the first, with key heads over 8 bits; and up to 16 of the second, also if it never
# takes more than a key head has.
THREE_EACH, MANY_EACH = (320, 960), (16, 272)
MANY_TOKENS = 8195  # just over 8,191, the last index with 13 bits, and over 128 chunks of 64
MANY_TOKENS_OF_CHUNKS = 16_450  # just over 256 chunks of 64; token by token, so many would take 6 s
MANY_STEPS = 2**15 + 1  # tokens, just over 32,767, the last index with 15 bits: the largest of a signed number with 16
MOST_TOKENS = MOST_ALONG_Y + 65  # just over 65,535, the last index with 16 bits
LONG_CONTEXT = 2**17 + 65  # tokens: 2,049 chunks of 64, or 1,025 of 128, and a part of one
MANY_SEQUENCES = 1100  # packed, just over 1,024
AT_ONCE = MOST_ALONG_Y + 65  # packed sequences of an implementation that does not take them one by one
ONE_BY_ONE = 2060  # the most packed sequences of one that does, because more of them would take long: over two blocks of 1,024
MANY_CHUNKS = 1025  # of one sequence: just over 1,024
CROWD = (65, 1024)  # sequences and value heads of a batch; their product is larger than MOST_ALONG_Y
ONE_OF_THREE = (1, 3)  # tokens of one of three packed sequences, which alone has any: as a step of one, or of each, would have
# Packed sequences with two heads: two tiles or more for each program of a persistent kernel, of which an H100 has 132. There are
# fewer where kernels are interpreted.
TILES, FEW_TILES = 150, 20
LONG_PAIR = (1030, 1030)  # two sequences of over 1,024 tokens, so that the second one begins there


def coarsest(dtypes: Sequence[str]) -> str:
    """Return the dtype that has the fewest whole numbers: bf16 up to 256, fp16 up to 2,048.

    An implementation that counts sequences or tokens in the dtype of its tokens is wrong there first.
    """
    return next((dtype for dtype in ("bf16", "fp16") if dtype in dtypes), dtypes[0])


def sized(domain: Any, chunk: int | None, most: int, algorithm: str = "chunkwise", named: tuple[int, ...] = ()) -> Any:
    """Return the domain with sizes that follow an implementation: its chunk and algorithm, and the most tokens of a long case.

    `named` are whole numbers that its source names.

    A chunk over USUAL_CHUNK shortens long cases to LARGEST_CHUNK^2 / chunk tokens: the time of the oracle is the product of tokens
    and chunk, and an implementation whose only chunk is the whole sequence declares LARGEST_CHUNK.
    """
    long = min(most, LARGEST_CHUNK**2 // chunk) if chunk and chunk > USUAL_CHUNK else most
    long = long if domain.draws_large or domain.has_limits else 0
    quick = long > 0 and most == MOST["quick"]
    exact = exact_tokens(chunk, algorithm) if quick else 0
    return with_drawing(domain, chunk=chunk or 64, long=long, quick=quick, exact=exact, large="", named=named)


def exact_tokens(chunk: int | None, algorithm: str) -> int:
    """Return the tokens of a sequence whose results are exact, in plain torch: over 1,024 chunks and over 32,767 tokens.

    In chunks of 64 or more, the sequence is a chunk longer than a usual longest context. There is none for a chunk over
    USUAL_CHUNK, and for one that is not known, unless the algorithm is recurrent: an implementation whose only chunk is the whole
    sequence would need 4 GB for each head.
    """
    if chunk is None:
        return MANY_STEPS if algorithm == "recurrent" else 0
    if chunk > USUAL_CHUNK:
        return 0
    if chunk >= 64 and algorithm == "chunkwise":
        return LONG_CONTEXT
    return min(max(MANY_STEPS, MANY_CHUNKS * chunk), MOST_TOKENS)


def at_limits(domain: Any) -> bool:
    """Whether cases at limits are drawn: if long ones are, and not on a GPU, where kernels would be compiled for their widths."""
    return bool(0 < domain.drawing.long <= MOST["quick"] and domain.drawing.reach == 1)


def named(domain: Any) -> tuple[int, ...]:
    """Return the numbers of the implementation's source for whose sizes cases are drawn: all in plain torch, else none."""
    return domain.drawing.named if at_limits(domain) and domain.drawing.quick else ()


def with_drawing(domain: T, **fields: Any) -> T:
    """Return the domain with fields of its `drawing` changed."""
    replaced: T = dataclasses.replace(domain, drawing=dataclasses.replace(domain.drawing, **fields))  # type: ignore[type-var, attr-defined]
    return replaced


def first_place(examples: int) -> int:
    """Return the place of the first large case among the examples of a law."""
    return min(examples, EVERY // 2)


def places(examples: int, most: int, first: int = 0) -> dict[int, str]:
    """Return the places of large cases among the examples of a law, from 0, each with the kind of its case.

    The kinds are those of TURNS, from `first` on. `most` is the domain's `long`: 0 if nothing is large.
    """
    large = range(first_place(examples), examples if most else 0, EVERY)
    return {place: TURNS[(first + number) % len(TURNS)] for number, place in enumerate(large)}


def kind_of(large: str, most: int, longest: int, kinds: Sequence[str] = KINDS) -> str:
    """Return the kind of the next case, or "" for an ordinary case.

    That is `large` if it is one of `kinds`, else the first of these. `most` is the domain's `long`, and `longest` the longest
    sequence of the law's ordinary cases.
    """
    if not large or not most or longest < LEAST:
        return ""
    return large if large in kinds else kinds[0]


def is_large(case: Any) -> bool:
    """Whether a case is as large as the smallest of the large ones that fit a small chunk."""
    longest, heads = max(case.lengths, default=0), getattr(case, "value_heads", 1)
    return longest >= POWERS[0] - 1 or len(case.lengths) >= COUNTS[0] or heads >= MANY_HEADS[0][1]


def kinds_of(kinds: Sequence[str], most: int, step: int) -> Sequence[str]:
    """Return the kinds for a domain whose lengths are multiples of `step`.

    "sequences" is left out if many sequences of `step` tokens have more than `most` tokens.
    """
    return kinds if step * COUNTS[0] <= most or step == 1 else tuple(kind for kind in kinds if kind != "sequences")


def long_length(chance: random.Random, kind: str, most: int, chunk: int) -> int:
    """Return a length of at most `most`: next to a power of two, over CHUNKS chunks, or nearly `most`, as the kind says."""
    ways: dict[str, Sequence[int]] = {
        "power": [power + step for power in POWERS for step in (-1, 0, 1) if power + step <= most],
        "chunks": range(CHUNKS * chunk + 1, most + 1),
    }
    return chance.choice(ways.get(kind) or range(max(1, most - 10), most + 1))


def large_lengths(
    chance: random.Random,
    kind: str,
    sequences: tuple[int, int],
    most: int,
    chunk: int,
    *,
    packed: bool,
    empty: bool,
    step: int = 1,
) -> tuple[int, ...]:
    """Return the lengths of a large case of a kind. `sequences` are the least and the most that a law takes.

    Beside a long sequence, a packed call has up to two short ones, at any place. `empty` permits sequences of no tokens. Lengths
    are rounded up to multiples of `step`, or down where rounding up would give more than `most`.
    """
    if step > 1:
        drawn = large_lengths(chance, kind, sequences, most, chunk, packed=packed, empty=empty)
        return tuple(min(-(-length // step), max(1, most // step)) * step for length in drawn)
    least = 0 if empty and chance.random() < 1 / 2 else 1
    if kind == "sequences":
        count = chance.choice((*COUNTS, chance.randint(33, 70)))
        lengths = [chance.randint(least, 3) for _ in range(count)] if packed else [chance.randint(1, 3)] * count
        return tuple(lengths) if any(lengths) else (1, *lengths[1:])
    one = long_length(chance, kind, most, chunk) if kind in LENGTHS else chance.choice((1, 2, 3, 5, 17))
    count = chance.randint(sequences[0], max(sequences[0], min(3, sequences[1])))
    if not packed:
        return (one,) * sequences[0]
    lengths = [chance.randint(least, 20) for _ in range(count - 1)]
    lengths.insert(chance.randint(0, count - 1), one)
    return tuple(lengths)
