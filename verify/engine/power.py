"""The laws by power and cost: how many wrong implementations each kills, and how long it takes. They order a check in limited time.

`python -m benchmarks.power` writes the numbers, in power.json. These are also the names of all laws for who has not imported torch.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from verify.engine.profiles import PROFILES

if TYPE_CHECKING:
    from properties.books import Book

_MEASURED = json.loads(pathlib.Path(__file__).with_name("power.json").read_text(encoding="utf-8"))
# For each book, the wrong implementations that each law kills in its first two cases, or the book's base law in its first eight;
# None of a law that was not measured. Most numbers are of 307 wrong implementations of the zoo, with seed 0 on 2026-11-24, run in
# the order of the largest domains up to the first 100 pairs of a law and a domain. For `history`, `earlier`, `left_padding` of
# modules, `recompute` and the laws of calls, only the zoo's files about them were run, for `replicas` and `accumulated` only
# tests/wrong_ranks.py.
KILLS: dict[str, dict[str, int | None]] = _MEASURED["kills"]
# Seconds of a case, in those of a case of the law oracle: means of fla/chunk and fla/fused_recurrent, interpreted, with the profile
# `few` on 2026-11-27. Laws that are not here are taken for as slow as the oracle.
SECONDS: dict[str, float] = _MEASURED["seconds"]
LAWS = tuple(dict.fromkeys(law for laws in KILLS.values() for law in laws))


def by_power(book: "Book", laws: Iterable[str]) -> list[str]:
    """The law that kills most, then the others by what they kill in a second of all their cases; laws without a number come last.

    The first takes one worker long: it is the oracle in most books. The others run beside it.
    """
    kills = {law: count for law, count in KILLS.get(book.name, {}).items() if count is not None}
    most = max(kills, key=lambda law: kills[law], default="")
    examples_of = PROFILES["quick"].examples_of

    def rate(law: str) -> float:
        return kills[law] / (SECONDS.get(law, 1.0) * examples_of(book.laws[law])) if law in kills else -1.0

    return sorted(laws, key=lambda law: (law != most, -rate(law)))
