"""The laws of each book by power: how many wrong implementations each law kills. When time is limited, powerful laws come first.

These are also the names of all laws for who has not imported torch.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from properties.books import Book

# Kills in the first two cases of a law, of the law oracle in the first eight, with seed 0 on 2026-11-24. The zoo's 307 wrong
# implementations were run in the order of the largest domains, up to the first 100 pairs of a law and a domain. For `history`,
# `earlier` and the laws of calls, only verify/zoo/wrong_histories.py and verify/zoo/wrong_calls.py were run. For the law
# `left_padding` of modules, only the convolutions with a mask in verify/zoo/wrong_convolutions.py were run. For `recompute`, only
# verify/zoo/wrong_recompute.py was run, in the eight cases of a check on 2026-11-27.
KILLS: dict[str, dict[str, int]] = {
    "rules": {
        "oracle": 52,
        "packed": 31,
        "norm": 24,
        "batch": 24,
        "strides": 24,
        "recurrent": 21,
        "permuted": 21,
        "absent": 19,
        "cut": 17,
        "linear": 17,
        "recall": 12,
        "samples": 9,
        "gates": 7,
        "recompute": 7,
        "memory": 5,
        "again": 5,
        "future": 4,
        "heads": 4,
        "history": 2,
        "pure": 2,
    },
    "modules": {
        "oracle": 60,
        "permuted": 36,
        "strides": 33,
        "absent": 26,
        "packed": 21,
        "cut": 18,
        "whole": 15,
        "recurrent": 12,
        "repeated": 9,
        "scaled": 5,
        "copied": 5,
        "left_padding": 5,
        "linear": 4,
        "heads": 4,
        "future": 3,
        "tokens": 3,
        "memory": 3,
        "samples": 2,
        "recompute": 1,
        "pure": 2,
        "history": 0,
        "channels": 1,
    },
    "paths": {
        "same": 10,
        "parallel": 5,
        "traffic": 3,
        "exchange": 2,
        "refused": 2,
        "reshard": 2,
        "round_trip": 1,
        "fused": 1,
        "repeats": 1,
        "earlier": 1,
    },
    "pools": {
        "oracle": 14,
        "accept": 13,
        "refill": 13,
        "strides": 12,
        "fresh": 10,
        "history": 10,
        "slots": 9,
        "padding": 4,
        "requests": 4,
        "untouched": 3,
        "poison": 2,
        "memory": 2,
        "pure": 2,
        "blocks": 0,
    },
    "layers": {
        "oracle": 14,
        "packed": 13,
        "left_padding": 13,
        "strides": 11,
        "cache": 9,
        "future": 4,
        "memory": 2,
        "pure": 1,
        "recompute": 1,
        "history": 0,
        "samples": 0,
    },
    "calls": {
        "packed": 5,
        "batch": 4,
        "memory": 3,
        "again": 3,
        "history": 3,
        "future": 2,
        "samples": 2,
        "strides": 2,
        "finite": 1,
        "pure": 1,
    },
    "traces": {"tags": 27, "session": 24, "ledger": 14, "alone": 12, "renamed": 8, "dropped": 7, "slots": 4, "history": 3},
}


def by_power(book: "Book", laws: Iterable[str]) -> list[str]:
    """The laws, those that kill most wrong implementations first; laws without a count come last, in their order."""
    kills = KILLS.get(book.name, {})
    return sorted(laws, key=lambda law: -kills.get(law, -1))
