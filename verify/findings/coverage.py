"""Coverage: which regimes the cases of a check had, and which regimes they missed although the domain allows them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from properties.words.word import text_of

WIDTH = 120


def counted(cases: Iterable[Any]) -> dict[str, dict[str, int]]:
    """For each word in the case class's REGIMES, how many cases had each of its values."""
    seen: dict[str, dict[str, int]] = {}
    for case in cases:
        words = case.words()
        for name in case.REGIMES:
            values = seen.setdefault(name, {})
            values[words[name]] = values.get(words[name], 0) + 1
    return seen


def missed(seen: dict[str, dict[str, int]], domain: Any, like: Iterable[Any]) -> list[str]:
    """The regimes, as `name=value`, that no counted case had although the domain allows them.

    A regime is allowed if one of the cases `like`, with its word set to this value, lies in the domain.
    """
    like = list(like)
    unseen = ((name, value) for name in seen for value in _values(name, like) if text_of(value) not in seen[name])
    return [f"{name}={text_of(value)}" for name, value in unseen if any(_legal(case, name, value, domain) for case in like)]


def lines(seen: dict[str, dict[str, int]], gaps: list[str]) -> list[str]:
    """The lines of the report: counts by regime, then the missed regimes."""
    told = [f"{name}: " + ", ".join(f"{value} {count}" for value, count in sorted(values.items())) for name, values in seen.items()]
    told = [f"  {line}" for line in told]
    return [
        *told,
        f"  never drawn, although the domain allows it: {'; '.join(gaps)}"
        if gaps
        else "  every value that the domain allows was drawn",
    ]


def _values(name: str, cases: list[Any]) -> list[Any]:
    """The values that a word of these cases can have: its choices, or False and True."""
    for case in cases:
        if isinstance(getattr(case, name), bool):
            return [False, True]
        return list(case.CHOICES.get(name, ()))
    return []


def _legal(case: Any, name: str, value: Any, domain: Any) -> bool:
    try:
        return domain.outside(dataclasses.replace(case, **{name: value})) is None
    except ValueError:
        return False
