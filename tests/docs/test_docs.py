"""What a page names exists: links, headings, files, imports, commands and lines; and prose keeps to its width."""

import ast
import functools
import importlib
import importlib.util
import pathlib
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from properties.books import every_law
from tests.pages import PAGES, anchors, commands, lines, links, prose_and_code, read
from tests.sources import ROOT, built_in_adapters, verbs
from verify.execution.line import Run

PACKAGES = ("oracles", "properties", "verify")
LINE_WIDTH, SHORT_PAGE = 100, 235


# Every page


def pages_with(faults: Callable[[pathlib.Path], list[Any]]) -> dict[str, list[Any]]:
    """The faults of each page that has some."""
    return {page.as_posix(): found for page in PAGES if (found := faults(page))}


def broken_links(page: pathlib.Path) -> list[str]:
    def is_broken(link: str) -> bool:
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in anchors(read(target)))

    return [link for link in links(read(page)) if not re.match(r"[a-z]+:", link) and is_broken(link)]


def long_lines(page: pathlib.Path) -> list[int]:
    def without_links(line: str) -> str:
        return re.sub(r"https?://\S+", "", re.sub(r"\]\([^)]*\)", "]", line))

    prose = [(number, line) for number, line in prose_and_code(read(page))[0] if not line.startswith("|")]
    return [number for number, line in prose if len(without_links(line)) > LINE_WIDTH]


def missing_files(page: pathlib.Path) -> list[str]:
    names = re.findall(rf"(?<![\w/.])((?:{'|'.join(PACKAGES)}|benchmarks|examples)/[\w/]+\.py)\b", read(page))
    return [name for name in sorted({*names}) if not (ROOT / name).is_file()]


def missing_imports(page: pathlib.Path) -> list[tuple[str, ...]]:
    blocks = [textwrap.dedent("\n".join(block[1:])) for block in prose_and_code(read(page))[1] if block[0].endswith("python")]
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    names = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    names += [tuple(name.rsplit(".", 1)) for name in re.findall(r"(?m)^::: ([\w.]+)", read(page))]
    return [(module, name) for module, name in names if module.split(".")[0] in PACKAGES and not can_be_imported(module, name)]


def can_be_imported(module: str, name: str) -> bool:
    """Whether a module has this name, or is a package with a module of this name."""
    found = importlib.import_module(module)
    return hasattr(found, name) or (hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None)


@functools.cache
def is_known(adapter: str) -> bool:
    return adapter in built_in_adapters() or adapter.startswith("zoo/") or ".py:" in adapter


def is_good_usage(words: list[str]) -> bool:
    """Whether the parser of a verb accepts a command, and its laws and adapters exist."""
    try:
        values = verbs()[words[0]].parse_args(words[1:])
    except SystemExit:
        return False
    adapters = {"check": lambda: [values.adapter or values.own], "soak": lambda: values.adapter}.get(words[0], list)()
    adapters = [adapter for adapter in adapters if adapter is not None]  # a project's settings name others
    return {*(getattr(values, "law", None) or ())} <= {*every_law()} and all(map(is_known, adapters))


def without_a_verb(page: pathlib.Path) -> list[str]:
    code = (line.strip().removeprefix("$ ") for block in prose_and_code(read(page))[1] for line in block[1:])
    return [line for line in code if re.match(r"gdn-verify [a-z]+( |$)", line) and line.split()[1] not in verbs()]


def is_readable(line: str) -> bool:
    """Whether `repeat` can read a line. Adapters in files and in the zoo are replaced by a built-in one, which is imported fast."""
    (adapter,) = re.findall(r"(?<= adapter=)\S+", line)
    try:
        Run.parse(line.replace(f"adapter={adapter}", "adapter=fla/chunk"))
    except ValueError:
        return False
    return is_known(adapter)


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    assert pages_with(broken_links) == {}


def test_no_line_of_prose_is_too_long() -> None:
    assert pages_with(long_lines) == {}


def test_pages_to_read_from_start_to_end_are_short() -> None:
    assert all(len(read(page).splitlines()) <= SHORT_PAGE for page in ("README.md", "docs/results.md"))


def test_every_python_file_that_a_page_names_exists() -> None:
    assert pages_with(missing_files) == {}


def test_what_a_page_imports_from_our_packages_can_be_imported() -> None:
    assert pages_with(missing_imports) == {}


def test_every_command_in_a_page_is_good_usage() -> None:
    assert pages_with(lambda page: [words for words in commands(read(page)) if not is_good_usage(words)]) == {}
    assert pages_with(without_a_verb) == {}


def test_every_line_in_a_page_can_be_read() -> None:
    assert pages_with(lambda page: [line for line in lines(read(page)) if not is_readable(line)]) == {}


# The functions above find what they are for, and nothing else


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("# A\n\n[x](#a) [y](#b)", ["#a", "#b"]),
        ("[two\nlines](there.md)", ["there.md"]),
        ("`[code](no.md)` [`code`](yes.md)", ["yes.md"]),
        ("```\n[x](no.md)\n```\n\n    [x](no.md)\n", []),
        ("![a figure](figure.png)\n\n[a]: other.md", ["figure.png", "other.md"]),
    ],
)
def test_links_are_found_outside_code_only(text: str, targets: list[str]) -> None:
    assert [*links(text)] == targets


def test_a_heading_has_the_name_that_code_hosts_give_it() -> None:
    assert anchors("# The `x`, of y's\n\n## A\n\n## A\n\n```\n# no\n```\n") == {"the-x-of-ys", "a", "a-1"}


def test_commands_are_found_in_code_without_their_comments() -> None:
    text = """```
$ gdn-verify check fla/chunk  # a comment
gdn-verify list    a comment
x: python -m verify repeat "law=a b=c" | head
gdn-verify: failed
gdn-verify check ...
```
gdn-verify list
"""
    assert [*commands(text)] == [["check", "fla/chunk"], ["list"], ["repeat", "law=a b=c"]]


def test_complete_lines_are_found() -> None:
    text = '"law=cut at=1 adapter=a/b lengths=2" law=cut at=1 law=cut adapter=a/b ... law=oracle adapter=a/b lengths=3, and'
    assert [*lines(text)] == ["law=cut at=1 adapter=a/b lengths=2", "law=oracle adapter=a/b lengths=3"]


def test_bad_usage_and_names_that_do_not_exist_are_seen() -> None:
    assert is_good_usage(["check", "fla/chunk", "--law", "cut"])
    for words in (["fla/chunk", "--lore", "cut"], ["fla/chunk", "--law", "cat"], ["fla/chank", "--law", "cut"]):
        assert not is_good_usage(["check", *words]), words
    line = "law=cut at=1 adapter=fla/chunk lengths=2"
    assert is_readable(line)
    assert not is_readable(line.replace("chunk", "chank"))
    assert not is_readable(line.replace("lengths", "length"))
