"""The page of lines has the words of every case and of every line, with their values and defaults."""

import typing
from typing import Any

import pytest

from oracles import PRODUCTS
from properties.books import BOOKS, Book
from tests.pages import Row, code_column, codes, reference, section, table
from tests.sources import BOOK_BY_NAME, definition, fields, needs_a_value

# docs/reference/lines.md


def word_rows(book: Book) -> dict[str, Row]:
    return {codes(row["word"])[0]: row for row in table(section(reference("lines"), f"Words of {book.name}"), "word")}


def word_fields(book: Book) -> dict[str, Any]:
    """The fields of a book's cases by their words in a line."""
    return {book.case.LONG.get(name, name): field for name, field in fields(book.case).items()}


def shortest(book: Book) -> str:
    """The word that every line of a book has."""
    return {"lengths": "lengths=2", "trace": "trace=p:a2"}[book.case.NEEDED[0]]


def operations_with(book: Book, word: str) -> list[str]:
    """The operations that have a word, according to the page."""
    return codes(word_rows(book)[word].get("operations", "")) or [*book.operations]


def test_the_words_of_a_case_are_in_the_page_with_their_defaults() -> None:
    for book in BOOKS:
        assert [*word_rows(book)] == [*word_fields(book)], book.name
        defaults = book.case.parse(f"{shortest(book)} op={book.operations[0]}").words()
        for word, row in word_rows(book).items():
            default = "must be given" if needs_a_value(word_fields(book)[word]) else f"`{defaults[word]}`"
            assert row["default"] == default, word


def test_the_values_of_a_word_are_those_that_a_case_accepts() -> None:
    for book in BOOKS:
        types = typing.get_type_hints(book.case)
        for word, row in word_rows(book).items():
            field = word_fields(book)[word]
            kind = types[field.name]
            line = f"{shortest(book)} op={operations_with(book, word)[0]}"
            if kind is bool:
                assert row["values"] == "yes, no", word
            elif kind is int:
                low, high = map(int, row["values"].split(" to "))
                for number in {max(0, low - 1), high + 1} - {low}:
                    with pytest.raises(ValueError, match=rf"{word} must be in {low}\.\.{high}\b"):
                        book.case.parse(f"{line} {word}={number}")
            elif word == "options":
                assert row["values"] == "`none`, or name:value joined by commas", book.name
            elif word in ("trace", "takes", "gives", "sizes"):
                what = {"trace": "events joined by `/`", "sizes": "sizes joined by `,`"}.get(word, "tensors joined by `,`")
                assert row["values"] == what, word
            elif kind is str:
                choices = book.case.CHOICES.get(field.name) or BOOK_BY_NAME["rules"].case.CHOICES[field.name]
                assert codes(row["values"]) == [*choices], word
            else:
                assert row["values"] == "whole numbers joined by `+`", word


def test_a_word_that_an_operation_lacks_is_refused_and_no_other() -> None:
    book = BOOK_BY_NAME["modules"]
    types = typing.get_type_hints(book.case)
    for word, field in word_fields(book).items():
        if needs_a_value(field):
            continue
        value = {bool: "no" if field.default else "yes", int: "2"}.get(types[field.name]) or codes(word_rows(book)[word]["values"])[
            -1
        ]
        for operation in book.operations:
            try:
                book.case.parse(f"lengths=2 op={operation} {word}={value}")
                refused = False
            except ValueError as error:
                refused = "has no" in str(error)
            assert refused is (operation not in operations_with(book, word)), (word, operation)


def test_every_value_of_a_regime_is_explained() -> None:
    for word in ("gate", "values"):
        title = "Gates" if word == "gate" else "Values"
        rows = table(section(reference("lines"), title), f"`{word}`")
        assert code_column(rows, f"`{word}`") == [*BOOK_BY_NAME["rules"].case.CHOICES[word]]


def test_the_words_of_every_line_are_in_the_page() -> None:
    rows = {codes(row["word"])[0]: row for row in table(section(reference("lines"), "Words of every line"), "word")}
    run = fields(definition("Run"))
    assert {*rows} == {*run, "at", "variant"} - {"example"}
    for word, choices in (("products", PRODUCTS), ("device", definition("DEVICES"))):
        assert codes(rows[word]["values"]) == [*choices]
        assert codes(rows[word]["default"]) == [run[word].default]


def test_the_places_and_variants_of_laws_are_in_the_page() -> None:
    rows = {(row["book"], *codes(row["law"])): row for row in table(section(reference("lines"), "at and variant"), "book")}
    laws = {(book.name, law.name): law for book in BOOKS for law in book.laws.values() if law.place or law.variants}
    assert [*rows] == [*laws]
    for name, law in laws.items():
        assert (rows[name]["`at`"] != "") is (law.place is not None), name
        assert codes(rows[name]["`variant`"]) == [*law.variants], name
