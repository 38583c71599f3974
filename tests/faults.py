"""Which rows of a table are not as they should be: a test asserts that there are none, and names all of them."""

import re
from collections.abc import Callable, Iterable
from typing import Any


def not_refused(
    call: Callable[..., object], rows: Iterable[tuple[Any, ...]], error: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> list[str]:
    """The rows whose arguments `call` accepts, or refuses with a message in which the pattern at their end does not occur.

    Exceptions of other types are raised.
    """
    faults = []
    for *arguments, pattern in at_least_one(rows):
        try:
            call(*arguments)
        except error as refusal:
            faults += [] if re.search(pattern, str(refusal)) else [f"{arguments}: {refusal} (not {pattern!r})"]
        else:
            faults.append(f"{arguments} is accepted")
    return faults


def different(call: Callable[..., object], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """The rows for whose arguments `call` returns something else than the value at their end."""
    return [f"{arguments}: {got!r} is not {want!r}" for *arguments, want in at_least_one(rows) if (got := call(*arguments)) != want]


def at_least_one(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The rows; ValueError if there are none, because a test of nothing would pass."""
    if not (found := [*rows]):
        raise ValueError("rows must have at least one row, got none")
    return found
