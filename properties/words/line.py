"""Lines: a frozen dataclass of plain data, written as `name=value` words and parsed again. Default values are left out."""

import dataclasses
import difflib
import re
import types
import typing
from typing import TYPE_CHECKING, Any, ClassVar, Self

from properties.words.word import Word, text_of, words_of

if TYPE_CHECKING:  # the command line imports this module before torch
    import torch

MAX_TOKENS, MAX_SEQUENCES, MAX_WIDTH, MAX_HEADS = 2**20, 2**17, 1024, 1024  # of a case
SEEDS = (0, 2**32 - 1)

_TYPES: dict[type, dict[str, Any]] = {}


class Line:
    """A case that can be written as a line: a frozen dataclass whose fields are annotated with what is known of each word.

    `LONG` maps the name of a field to its word in a line where the two differ. `NEEDED` is the word that every line has, and an
    example. From the words of the class follow the others: CHOICES are the possible values of words that have few, KEYS the words
    on which a compiled kernel depends, and REGIMES the words whose drawn values a report counts.
    """

    LONG: ClassVar[dict[str, str]] = {"operation": "op"}
    NEEDED: ClassVar[tuple[str, str]] = ("lengths", "for example lengths=65 or lengths=0+65+130")
    WORDS: ClassVar[dict[str, Word]] = {}
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}
    KEYS: ClassVar[tuple[str, ...]] = ()
    REGIMES: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.WORDS = words_of(cls)
        cls.CHOICES = {name: word.choices for name, word in cls.WORDS.items() if word.choices}
        cls.KEYS = tuple(name for name, word in cls.WORDS.items() if word.key)
        cls.REGIMES = tuple(name for name, word in cls.WORDS.items() if word.counted)

    def check_words(self) -> None:
        """Raise ValueError for a word whose value is none of its choices or outside its span, and for lengths that are illegal."""
        for name, word in self.WORDS.items():
            value = getattr(self, name)
            if word.choices and value not in word.choices:
                raise ValueError(f"{name} must be one of {', '.join(word.choices)}, got {str(value)[:80]!r}")
        for name, word in self.WORDS.items():
            if word.span and not word.span[0] <= getattr(self, name) <= word.span[1]:
                raise ValueError(f"{name} must be in {word.span[0]}..{word.span[1]}, got {getattr(self, name)}")
        if "lengths" in self.WORDS:
            check_lengths(getattr(self, "lengths"), packed=getattr(self, "packed"))  # noqa: B009 - not of every class

    def __str__(self) -> str:
        plain = {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        short = {word: name for name, word in self.LONG.items()}
        return " ".join(
            f"{word}={text}"
            for word, text in self.words().items()
            if getattr(self, short.get(word, word)) != plain[short.get(word, word)]
        )

    def carried_dtype(self, domain: Any, dtype: "torch.dtype") -> "torch.dtype | None":  # noqa: ARG002
        """Return the dtype in which a final state becomes an initial state; None if states are not rounded."""
        return None

    def further_traits(self) -> list[tuple[str, object]]:
        """Return what makes a case unlike others beside the values of its words (pairs.py)."""
        return []

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


def check_lengths(lengths: tuple[int, ...], *, packed: bool) -> None:
    """Raise ValueError for lengths that are none, negative, too many, too long, or that differ in a batch."""
    if not lengths or min(lengths) < 0:
        raise ValueError(f"lengths must name at least one sequence, and no length may be negative, got {text_of(lengths)}")
    if len(lengths) > MAX_SEQUENCES:
        raise ValueError(f"lengths must name at most {MAX_SEQUENCES} sequences, got {len(lengths)}")
    if sum(lengths) > MAX_TOKENS:
        raise ValueError(f"lengths must add up to at most {MAX_TOKENS} tokens, got {sum(lengths)}")
    if not packed and len(set(lengths)) > 1:
        raise ValueError(f"lengths must all be equal unless packed=yes, got {text_of(lengths)}")


def _value(name: str, kind: object, text: str) -> object:
    if kind is bool:
        if text not in ("yes", "no"):
            raise ValueError(f"{name} must be yes or no, got {text!r}")
        return text == "yes"
    if kind is str:
        return text
    if isinstance(kind, types.GenericAlias):
        return _numbers(name, text)
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ValueError(f"{name} must be a whole number, got {text[:80]!r}")
    return int(text)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a text as properties/words/word.py writes them. ValueError for another form or too many numbers."""
    parts = [part for each in text.split("+") if (part := re.fullmatch(r"([0-9]{1,15})(?:x([0-9]{1,15}))?", each))]
    counts = [int(part[2] or 1) for part in parts]
    if len(parts) <= text.count("+") or not all(counts):
        raise ValueError(f"{name} must be whole numbers joined by +, or as 3x1100 the same one so many times, got {text[:80]!r}")
    if sum(counts) > MAX_SEQUENCES:
        raise ValueError(f"{name} must name at most {MAX_SEQUENCES} sequences, got {sum(counts)}")
    return tuple(number for part, count in zip(parts, counts, strict=True) for number in (int(part[1]),) * count)
