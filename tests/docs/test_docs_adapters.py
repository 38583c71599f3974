"""The page of adapters has the attributes and methods of every kind of adapter, and what the built-in ones declare."""

import importlib
import inspect
import re
from typing import Any

import pytest

import verify
from tests.pages import code_column, codes, items, reference, section, table, tables
from tests.sources import BOOK_BY_NAME, ROOT, definition, fields, short_repr

# docs/reference/adapters.md


def public_names(kind: type) -> dict[str, Any]:
    return {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items() if not name.startswith("_")}


@pytest.mark.parametrize(
    "kind", [verify.Adapter, verify.PathAdapter, verify.TraceAdapter, verify.Engine], ids=lambda kind: kind.__name__
)
def test_the_attributes_and_methods_of_an_adapter_are_in_the_page(kind: type) -> None:
    text, names = section(reference("adapters"), kind.__name__), public_names(kind)
    defaults = {name: short_repr(value) for name, value in names.items() if not callable(value)}
    parameters = {name: ", ".join(inspect.signature(value).parameters) for name, value in names.items() if callable(value)}
    assert {codes(row["attribute"])[0]: codes(row["default"])[0] for row in table(text, "attribute")} == defaults
    assert {*code_column(table(text, "method"), "method")} == {f"{name}({words})" for name, words in parameters.items()}


@pytest.mark.parametrize(
    ("kind", "page", "title"),
    [
        (verify.ProcessAdapter, "any-language", "The adapter"),
        (verify.FilesAdapter, "files", "The adapter"),
        (verify.ArrayAdapter, "arrays", "JAX, MLX, NumPy, CuPy"),
        (verify.OnnxAdapter, "arrays", "ONNX"),
        (verify.CLibrary, "arrays", "A C library"),
    ],
    ids=lambda kind: getattr(kind, "__name__", ""),
)
def test_the_attributes_of_adapters_outside_torch_are_in_both_pages(kind: type, page: str, title: str) -> None:
    own = {name: value for name, value in public_names(kind).items() if name not in public_names(verify.Adapter)}
    text = section(reference("adapters"), kind.__name__)
    defaults = {name: short_repr(value) for name, value in own.items() if not callable(value)}
    assert {codes(row["attribute"])[0]: codes(row["default"])[0] for row in table(text, "attribute")} == defaults
    methods = {name: ", ".join(inspect.signature(value).parameters) for name, value in own.items() if callable(value)}
    assert {*code_column([row for rows in tables(text) for row in rows if "method" in row], "method")} == {
        f"{name}({words})" for name, words in methods.items()
    }
    how_to = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    rows = [row for rows in tables(section(how_to, title)) for row in rows]
    names = {code.partition("(")[0] for row in rows for head in row if head.startswith("attribute") for code in codes(row[head])}
    shared = {*code_column(table(how_to.partition("\n## ")[0], "attribute"), "attribute")} if page == "arrays" else set()
    assert names | shared == {*own, *shared} and {*own} <= names | shared


@pytest.mark.parametrize(("section_name", "kind"), [("TraceAdapter", "Sizes"), ("Engine", "Batch")])
def test_what_an_engine_gets_is_in_the_page(section_name: str, kind: str) -> None:
    value = getattr(importlib.import_module("properties.traces.case"), kind)
    properties = {name for name, member in vars(value).items() if isinstance(member, property)}
    page = re.findall(r"`([a-zA-Z_]+)[ `]", section(reference("adapters"), section_name))
    assert {*fields(value), *properties} - {*page} == set()


@pytest.mark.parametrize("book", [name for name in BOOK_BY_NAME if name != "calls"])  # none is built in
def test_the_built_in_adapters_are_in_the_page_with_what_they_declare(book: str) -> None:
    places = definition("BOOKS_OF_BUILT_IN")[book]
    text = section(reference("adapters"), f"Built-in {book}")
    rows = table(text, "adapter")
    needs, domains = (items(part) for part in text.partition("Their domains:")[::2])
    assert code_column(rows, "adapter") == [*places]
    for row, (spec, place) in zip(rows, places.items(), strict=True):
        module, _, name = place.rpartition(":")
        adapter = getattr(importlib.import_module(module), name)
        assert codes(row["algorithm"]) == [adapter.algorithm], place
        assert row["chunk"] == ("" if adapter.chunk is None else str(adapter.chunk)), place
        assert codes(row["products"]) == [adapter.products], place
        assert codes(needs.get(spec, "")) == [f"{package} {version}" for package, version in adapter.requires.items()], place
        assert codes(domains[spec]) == [short_repr(adapter.domain)], place
        for flag in ("stores", "rounds_products"):
            assert (f"`{flag} = True`" in row["calls"]) is getattr(adapter, flag, False), place


def test_the_operations_of_an_algorithm_are_in_the_page() -> None:
    rows = table(section(reference("adapters"), "Where the implementation rounds"), "attribute")
    operations = {codes(row["attribute"])[0]: codes(row["operations"]) for row in rows}
    assert operations['algorithm = "pointwise"'] == [*BOOK_BY_NAME["modules"].operations]
    assert {name.partition(" = ")[0] for name in operations} <= {*public_names(verify.Adapter)}
