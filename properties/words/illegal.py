"""Illegal inputs: legal calls with one argument made wrong, which our own contract refuses. Each book has its own in illegal.py.

A kernel may leave the test to its caller, because it costs a device synchronisation. But users should know that it does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from properties.words.line import MAX_WIDTH


@dataclasses.dataclass(frozen=True)
class IllegalInputs:
    """The illegal inputs of a book: their `names` for an operation, and the `call` of a name inside a domain.

    `call` returns a case inside the domain, and what is wrong: the case's inputs with one argument made wrong, for a path an
    IllegalLayout, or for an engine a Step that cannot follow the case's trace. If the domain does not support what the input is
    about, it returns the reason as text. `check` is our own contract: it raises ValueError for what is wrong.
    """

    names: Callable[[str], list[str]] = lambda operation: []
    call: Callable[[str, Any], tuple[Any, Any] | str] = lambda name, domain: f"there are none of {domain.operation}"
    check: Callable[[Any, Any], None] = lambda case, inputs: case.spec.check(inputs)


def near(has: Callable[[int], bool], width: int) -> int:
    """Return a width that the domain has: the next one from `width` on in steps of 2, or the next larger or smaller one.

    Even widths can be halved. Return `width` itself if the domain has none.
    """
    widths = (*range(width, MAX_WIDTH + 1, 2), *range(width + 1, MAX_WIDTH + 1, 2), *range(width, 0, -1))
    return next((candidate for candidate in widths if has(candidate)), width)


NO_INPUTS = IllegalInputs()
