"""Words: the fields of a case and of a domain, each declared once, where the field is.

From the declarations of a case follow its choices, its compile key, what a report counts, and how it shrinks. From those of a
domain follow the checks of its fields and the reasons why a case is outside it. A sentence below each field says what it means.
"""

import dataclasses
import itertools
import typing
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
EQUAL = 16  # up to so many equal numbers in succession are written one by one


def always(case: Any) -> bool:  # noqa: ARG001
    """Whether a word acts in a case: the answer for words that act in all of them."""
    return True


@dataclasses.dataclass(frozen=True)
class Word:
    """What is known of a word of a case.

    `choices` are its values, if they are few texts, and `span` is the least and the largest number. `simplest` are the values that
    shrinking tries, the simplest first. `key` says that a compiled kernel depends on the word (properties/palette.py), and
    `counted` that a report counts its values. `of` names the operations that have the word; empty means all. Where the word does
    not act, a case is inside a domain whatever the value is.
    """

    choices: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    simplest: tuple[Any, ...] = ()
    key: bool = False
    counted: bool = False
    of: tuple[str, ...] = ()
    acts: Callable[[Any], bool] = always


def like(case: type[Any], name: str, **other: Any) -> Word:
    """Return what is known of a word that another class of cases has too, except for what is given."""
    return dataclasses.replace(words_of(case)[name], **other)


def words_of(kind: type[Any]) -> dict[str, Word]:
    """Return the words that a class of cases declares, by name, in the order of a line."""
    return {name: known or Word() for name, known in _declared(kind, Word).items()}


def _declared(kind: type[Any], of: type[T]) -> dict[str, T | None]:
    """Return for each field of a class what its annotation says beside the type, if that is of a certain kind."""
    found: dict[str, T | None] = {}
    for name, annotation in kind.__annotations__.items():
        if typing.get_origin(annotation) is not typing.ClassVar:  # type: ignore[comparison-overlap]
            found[name] = next((known for known in getattr(annotation, "__metadata__", ()) if isinstance(known, of)), None)
    return found


@dataclasses.dataclass(frozen=True)
class Promise:
    """What a field of a domain says about a word of the case.

    `how` is "some" (the field lists the values that may come), "one" (it is the value), or "flag" (without it `value` may not
    come). `choices` are the values that a field may have, by default those of the word.
    """

    word: str
    how: str
    choices: tuple[Any, ...] = ()
    value: Any = None

    def outside(self, name: str, domain: Any, case: Any) -> str | None:
        """Return why a case is outside a domain by its field `name`, or None."""
        promised, value = getattr(domain, name), getattr(case, self.word)
        written = f"{case.LONG.get(self.word, self.word)}={text_of(value)}"
        if self.how == "some":
            return None if value in promised else f"{written} is not among {', '.join(map(str, promised)) or 'any'}"
        if self.how == "one":
            return None if value == promised else f"{written} is not {promised}"
        return f"{written} is not supported" if value == self.value and not promised else None


def some_of(word: str, choices: tuple[Any, ...] = ()) -> Promise:
    """Return that a field of a domain lists the values of a word that may come."""
    return Promise(word, "some", choices)


def one_of(word: str, choices: tuple[str, ...] = ()) -> Promise:
    """Return that a field of a domain is the only value of a word."""
    return Promise(word, "one", choices)


def flag(word: str, *, value: Any = True) -> Promise:
    """Return that a field of a domain says whether a word may have `value`."""
    return Promise(word, "flag", value=value)


def promises_of(kind: type[Any]) -> dict[str, Promise]:
    """Return the fields of a class of domains that say something about a word of the case, by name."""
    return {name: promise for name, promise in _declared(kind, Promise).items() if promise is not None}


def text_of(value: object) -> str:
    """Return a field's value as text: yes or no for a flag, numbers joined by +, otherwise str(value).

    More than EQUAL equal numbers in succession are written as the number and its count, such as 3x1100.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, tuple):
        return str(value)
    runs = ((str(number), len([*equal])) for number, equal in itertools.groupby(value))
    return "+".join(f"{number}x{count}" if count > EQUAL else "+".join([number] * count) for number, count in runs)
