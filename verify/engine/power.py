"""The laws by power and cost: how many wrong implementations each kills, and how long it takes. They order a check in limited time.

These are also the names of all laws for who has not imported torch.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from verify.engine.profiles import PROFILES

if TYPE_CHECKING:
    from properties.books import Book

# Kills in the first two cases of a law, of the law oracle in the first eight, with seed 0 on 2026-11-24. The zoo's 307 wrong
# implementations were run in the order of the largest domains, up to the first 100 pairs of a law and a domain. For `history`,
# `earlier` and the laws of calls, only verify/zoo/wrong_histories.py and verify/zoo/wrong_calls.py were run. For the law
# `left_padding` of modules, only the convolutions with a mask in verify/zoo/wrong_convolutions.py were run. For `recompute`, only
# verify/zoo/wrong_recompute.py was run, in the eight cases that a check had on 2026-11-27. For `replicas` and `accumulated`, only
# tests/wrong_ranks.py was run.
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
        "replicas": 2,
        "accumulated": 1,
        "clipped": 1,
        "skipped": 1,
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


# Seconds of a case, in those of a case of the law oracle: means of fla/chunk and fla/fused_recurrent, interpreted, with the profile
# `few` on 2026-11-27; of `recompute`, fla/chunk alone. Laws that are not here are taken for as slow as the oracle.
SECONDS = {
    "recurrent": 0.7,
    "packed": 0.9,
    "cut": 0.5,
    "absent": 0.7,
    "norm": 0.8,
    "recall": 0.15,
    "linear": 0.7,
    "samples": 0.4,
    "future": 0.55,
    "heads": 0.55,
    "permuted": 0.7,
    "memory": 0.7,
    "again": 1.2,
    "history": 1.2,
    "recompute": 0.9,
    "batch": 0.8,
    "strides": 0.4,
    "pure": 0.13,
}


def by_power(book: "Book", laws: Iterable[str]) -> list[str]:
    """The law that kills most, then the others by what they kill in a second of all their cases; laws without a count come last.

    The first takes one worker long: it is the oracle in most books. The others run beside it.
    """
    kills, examples_of = KILLS.get(book.name, {}), PROFILES["quick"].examples_of
    most = max(kills, key=lambda law: kills[law], default="")

    def rate(law: str) -> float:
        return kills[law] / (SECONDS.get(law, 1.0) * examples_of(book.laws[law])) if law in kills else -1.0

    return sorted(laws, key=lambda law: (law != most, -rate(law)))
