"""What the code of verify defines, for tests of its pages: names, fields, parsers, options and adapters."""

import argparse
import ast
import dataclasses
import functools
import importlib
import pathlib
import re
import tomllib
from typing import Any

import pytest

from properties.books import BOOKS

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "verify").rglob("*.py"))}
BOOK_BY_NAME = {book.name: book for book in BOOKS}
BOOK_BY_DOMAIN = {book.domain.__name__: book for book in BOOKS}


# Reading the code. Names of verify are looked up by their definition, because modules move and names stay.


def definition(name: str, with_field: str = "") -> Any:
    """What verify defines under a name. If several classes have the name, the one with a field of that name."""
    pattern = re.compile(rf"^(?:class |def ){name}\b|^{name}\b[^=\n]*= ", re.MULTILINE)
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path, text in SOURCES.items() if pattern.search(text)]
    values = [getattr(importlib.import_module(module.removesuffix(".__init__")), name) for module in modules]
    values = [value for value in values if not with_field or with_field in fields(value)]
    assert len(values) == 1, f"{name} is defined in {modules}"
    return values[0]


def fields(kind: Any) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(kind)}


def needs_a_value(field: Any) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def dict_keys(*keys: str) -> set[str]:
    """The keys of those dict displays in verify that have all of these keys."""
    texts = [text for text in SOURCES.values() if all(f'"{key}"' in text for key in keys)]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict)]
    displays = [{key.value for key in node.keys if isinstance(key, ast.Constant)} for node in nodes]
    return set().union(*(display for display in displays if display >= {*keys}))


def entry_point(name: str) -> str:
    """What pyproject.toml says for a command or a plugin: `module:name`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str({**project["scripts"], **project["entry-points"]["pytest11"]}[name])


class ParserCaptured(BaseException):
    """Carries the parser that a command was about to use."""


def capture(parser: argparse.ArgumentParser, *_: object) -> None:
    raise ParserCaptured(parser)


@functools.cache
def verbs() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb, from the command that users run."""
    module, _, function = entry_point("gdn-verify").partition(":")
    command = getattr(importlib.import_module(module), function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", capture)
        with pytest.raises(ParserCaptured) as captured:
            command([])
    actions = captured.value.args[0]._actions
    return dict(next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction)))


def options_by_name(parser: argparse.ArgumentParser) -> dict[tuple[str, ...], argparse.Action]:
    return {tuple(action.option_strings): action for action in parser._actions if action.option_strings and action.dest != "help"}


@functools.cache
def plugin_options() -> dict[tuple[str, ...], argparse.Action]:
    """The options of the pytest plugin, as argparse sees them."""
    parser = argparse.ArgumentParser()

    class Group:
        def getgroup(self, *_: str) -> "Group":
            return self

        def addoption(self, *names: str, **settings: Any) -> None:
            parser.add_argument(*names, **settings)

    module, _, plugin = entry_point("gdn_verify").partition(":")
    getattr(importlib.import_module(module), plugin).pytest_addoption(Group())
    return options_by_name(parser)


def options(verb: str) -> dict[tuple[str, ...], argparse.Action]:
    return plugin_options() if verb == "pytest" else options_by_name(verbs()[verb])


def built_in_adapters() -> list[str]:
    return [name for adapters in definition("BOOKS_OF_BUILT_IN").values() for name in adapters]


def short_repr(value: object) -> str:
    """The repr of a value; of a dataclass, without the fields that have their defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    changed = [name for name, field in fields(value).items() if getattr(value, name) != field.default]
    return f"{type(value).__name__}({', '.join(f'{name}={short_repr(getattr(value, name))}' for name in changed)})"


def keyword_arguments(text: str) -> dict[str, Any]:
    """The values in `name=value, ...`. A value is a literal or a domain."""

    def value_of(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            domain = BOOK_BY_DOMAIN[node.func.id].domain
            return domain(**{keyword.arg: value_of(keyword.value) for keyword in node.keywords if keyword.arg})
        return ast.literal_eval(node)

    call = ast.parse(f"dict({text})", mode="eval").body
    assert isinstance(call, ast.Call), text
    return {keyword.arg: value_of(keyword.value) for keyword in call.keywords if keyword.arg}
