"""Names that a person may misspell: the nearest known one, and domains that refuse unknown fields and flags that are no bools."""

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with the known name that is most similar to a word, or "" if none is similar."""
    near = difflib.get_close_matches(word, list(names), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def unknown(kind: str, word: str, names: Iterable[str]) -> str:
    """Return the line about a word that is none of the names of a kind, with the nearest name and all of them."""
    names = list(names)
    return f"unknown {kind} {word!r}{did_you_mean(word, names)}; there are {', '.join(names)}"


def known_fields(kind: type[T]) -> type[T]:
    """Let a dataclass refuse a keyword that is none of its fields by a TypeError that names the nearest field and all of them.

    A field that is a bool takes nothing but True and False: "no", for one, would mean True. ValueError for another value.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    flags = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if isinstance(field.default, bool) and not isinstance(field.type, types.UnionType)
    ]
    plain = kind.__init__

    @functools.wraps(plain)
    def checked(self: Any, *values: Any, **fields: Any) -> None:
        if unknown := next((name for name in fields if name not in names), None):
            of_users = [name for name in names if name != "drawing"]  # which a check sets
            near = did_you_mean(unknown, of_users)
            raise TypeError(f"{kind.__name__} has no field {unknown!r}{near}; there are {', '.join(of_users)}")
        plain(self, *values, **fields)
        if odd := next((name for name in flags if not isinstance(getattr(self, name), bool)), None):
            raise ValueError(f"{odd} must be True or False, got {getattr(self, odd)!r}")

    setattr(kind, "__init__", checked)  # noqa: B010 - mypy refuses the assignment
    return kind
