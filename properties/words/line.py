"""Lines: a frozen dataclass of plain data, written as `name=value` words and parsed again. Default values are left out."""

import dataclasses
import difflib
import types
import typing
from typing import Any, ClassVar, Self

import torch

MAX_TOKENS, MAX_SEQUENCES, MAX_WIDTH, MAX_HEADS = 2**20, 2**16, 1024, 1024  # of a case

_TYPES: dict[type, dict[str, Any]] = {}


class Line:
    """A case that can be written as a line.

    `LONG` maps the name of a field to its word in a line where the two differ. `REGIMES` are the words whose drawn values a report
    counts, and `CHOICES` the possible values of words that have few. `NEEDED` is the word that every line has, and an example.
    """

    LONG: ClassVar[dict[str, str]] = {}
    REGIMES: ClassVar[tuple[str, ...]] = ()
    CHOICES: ClassVar[typing.Mapping[str, typing.Sequence[str]]] = {}
    NEEDED: ClassVar[tuple[str, str]] = ("lengths", "for example lengths=65 or lengths=0+65+130")

    def __str__(self) -> str:
        plain = {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        short = {word: name for name, word in self.LONG.items()}
        return " ".join(
            f"{word}={text}"
            for word, text in self.words().items()
            if getattr(self, short.get(word, word)) != plain[short.get(word, word)]
        )

    def carried_dtype(self, domain: Any, dtype: torch.dtype) -> torch.dtype | None:  # noqa: ARG002
        """Return the dtype in which a final state becomes an initial state; None if states are not rounded."""
        return None

    def words(self) -> dict[str, str]:
        """Return every word of the line with its value, defaults included."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return {self.LONG.get(name, name): text_of(getattr(self, name)) for name in names}

    @classmethod
    def parse(cls, line: str) -> Self:
        """Return the case of a line of `name=value` words. ValueError names the word, the rule and the choices."""
        if cls not in _TYPES:
            _TYPES[cls] = typing.get_type_hints(cls)  # cached, because it takes longer than the rest of parsing
        types_of = _TYPES[cls]
        fields: dict[str, Any] = {
            name: _value(name, types_of[name], text) for name, text in cls.fields_of(split_line(line)).items()
        }
        return cls(**fields)

    @classmethod
    def fields_of(cls, words: dict[str, str]) -> dict[str, str]:
        """Return the words by field name. ValueError names an unknown word and the most similar known one."""
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        short = {word: name for name, word in cls.LONG.items()}
        fields = {}
        for word, value in words.items():
            name = short.get(word, word)
            if name not in known:
                names = sorted(cls.LONG.get(field, field) for field in known)
                near = difflib.get_close_matches(word, names, 1)
                raise ValueError(
                    f"unknown word {word[:80]!r} in the case line; "
                    + (f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}")
                )
            if name in fields:
                raise ValueError(f"{cls.LONG.get(name, name)} must come once, got {word} too")
            fields[name] = value
        if cls.NEEDED[0] not in fields:
            raise ValueError(f"a case line must have {', '.join(cls.NEEDED)}, got {words}")
        return fields


def split_line(line: str) -> dict[str, str]:
    """Return the `name=value` words of a line. ValueError for a word of another form, or a name that comes twice."""
    words: dict[str, str] = {}
    for word in line.split():
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ValueError(f"a case line is made of name=value words, got {word[:80]!r}")
        if name in words:
            raise ValueError(f"{name} must come once, got {name}={words[name]} and {word}")
        words[name] = value
    return words


def text_of(value: object) -> str:
    """Return a field's value as text: yes or no for a flag, numbers joined by +, otherwise str(value)."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def check_choices(case: object, choices: dict[str, typing.Sequence[str]]) -> None:
    """Raise ValueError for a field whose value is not one of its choices."""
    for name, values in choices.items():
        if getattr(case, name) not in values:
            raise ValueError(f"{name} must be one of {', '.join(values)}, got {str(getattr(case, name))[:80]!r}")


def _value(name: str, kind: object, text: str) -> object:
    if kind is bool:
        if text not in ("yes", "no"):
            raise ValueError(f"{name} must be yes or no, got {text!r}")
        return text == "yes"
    if kind is str:
        return text
    several = isinstance(kind, types.GenericAlias)
    parts = text.split("+") if several else [text]
    if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
        rule = "whole numbers joined by +" if several else "a whole number"
        raise ValueError(f"{name} must be {rule}, got {text[:80]!r}")
    numbers = tuple(int(part) for part in parts)
    return numbers if several else numbers[0]
