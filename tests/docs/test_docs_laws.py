"""The page of laws has the laws of every book and no others, and says for which domains a law is unsupported."""

import contextlib
import dataclasses
from typing import Any

import pytest

from properties.books import BOOKS, Book
from properties.laws.law import Law
from tests.pages import Row, code_column, codes, reference, section, tables
from tests.sources import fields, keyword_arguments

EVERY_BOOK = pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.name)


# docs/reference/laws.md


def book_tables(book: Book, head: str) -> list[Row]:
    """The table of a book's laws that has a column with this head."""
    (rows,) = (rows for rows in tables(section(reference("laws"), book.name.capitalize())) if head in rows[0])
    return rows


def default_domains(book: Book) -> list[Any]:
    """The domains of a book with their defaults; of modules, one for each operation."""
    operations = book.operations if book.name == "modules" else [book.domain().operation]
    return [book.domain(operation=operation) for operation in operations]


def exclusions(book: Book, law: Law) -> list[dict[str, Any]]:
    """The fields of domains for which the page calls a law unsupported."""
    cells = [row["unsupported with"] for row in book_tables(book, "unsupported with") if row["law"] == f"`{law.name}`"]
    return [keyword_arguments(code) for cell in cells for code in codes(cell) if "=" in code]


@EVERY_BOOK
def test_the_page_has_the_laws_of_a_book_and_no_other(book: Book) -> None:
    assert code_column(book_tables(book, "equation"), "law") == [*book.laws]


@EVERY_BOOK
def test_a_law_has_a_sentence_an_equation_a_defect_and_a_way_to_be_judged(book: Book) -> None:
    for row, law in zip(book_tables(book, "equation"), book.laws.values(), strict=True):
        assert row["what must hold"].endswith("."), law.name
        assert codes(row["equation"]), law.name
        assert row["typical defects"], law.name
        assert row["judged"].startswith("to the bit" if law.kind == "exact" else "within"), law.name
        assert not law.about or [*law.about] == (codes(row["about"]) or [*book.operations]), law.name


@EVERY_BOOK
def test_a_law_is_unsupported_for_the_domains_of_its_row_and_no_other(book: Book) -> None:
    for law in book.laws.values():
        domains = [domain for domain in default_domains(book) if not law.about or domain.operation in law.about]
        for changes in exclusions(book, law):
            assert any(law.needs(dataclasses.replace(domain, **changes)) for domain in domains), (law.name, changes)
        for domain in default_domains(book):
            if law.needs(domain):
                assert exclusions(book, law) or domain.operation not in (law.about or [domain.operation]), law.name
            else:
                unlisted = [changes for changes in excluding_switches(law, domain) if changes not in exclusions(book, law)]
                assert unlisted == [], law.name


def excluding_switches(law: Law, domain: Any) -> list[dict[str, bool]]:
    """The switches of a domain that make a law unsupported when they alone are turned."""
    found = []
    for name in (name for name, field in fields(type(domain)).items() if isinstance(field.default, bool)):
        changes = {name: not getattr(domain, name)}
        with contextlib.suppress(ValueError):  # no such domain
            found += [changes] if law.needs(dataclasses.replace(domain, **changes)) else []
    return found
