"""What a page names exists: links, headings, files, imports, commands and lines; and prose keeps to its width."""

import ast
import importlib
import importlib.util
import pathlib
import re
import textwrap

import pytest

from properties.books import every_law
from tests.pages import PAGES, anchors, commands, lines, links, parse_command, prose_and_code, read
from tests.sources import ROOT, built_in_adapters, definition, verbs

PACKAGES = ("oracles", "properties", "verify")
LINE_WIDTH, SHORT_PAGE = 100, 200


# Every page


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: pathlib.Path) -> None:
    broken = []
    for link in links(read(page)):
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_line_of_prose_is_too_long(page: pathlib.Path) -> None:
    def without_links(line: str) -> str:
        return re.sub(r"https?://\S+", "", re.sub(r"\]\([^)]*\)", "]", line))

    prose = [(number, line) for number, line in prose_and_code(read(page))[0] if not line.startswith("|")]
    assert [number for number, line in prose if len(without_links(line)) > LINE_WIDTH] == []


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_a_page_to_read_from_start_to_end_is_short(page: str) -> None:
    assert len(read(page).splitlines()) <= SHORT_PAGE


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_python_file_that_a_page_names_exists(page: pathlib.Path) -> None:
    names = re.findall(rf"(?<![\w/.])((?:{'|'.join(PACKAGES)}|benchmarks|examples)/[\w/]+\.py)\b", read(page))
    assert [name for name in sorted({*names}) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_imports_from_our_packages_can_be_imported(page: pathlib.Path) -> None:
    blocks = [textwrap.dedent("\n".join(block[1:])) for block in prose_and_code(read(page))[1] if block[0].endswith("python")]
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    names = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    names += [tuple(name.rsplit(".", 1)) for name in re.findall(r"(?m)^::: ([\w.]+)", read(page))]
    ours = [(module, name) for module, name in names if module.split(".")[0] in PACKAGES]
    assert [(module, name) for module, name in ours if not can_be_imported(module, name)] == []


def can_be_imported(module: str, name: str) -> bool:
    """Whether a module has this name, or is a package with a module of this name."""
    found = importlib.import_module(module)
    return hasattr(found, name) or (hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_in_a_page_is_good_usage(page: pathlib.Path) -> None:
    for words in commands(read(page)):
        values = parse_command(words)
        assert {*(getattr(values, "law", None) or ())} <= {*every_law()}, words
        if words[0] in ("check", "soak"):
            adapters = values.adapter if words[0] == "soak" else [values.adapter or values.own]
            for adapter in adapters:
                assert adapter in built_in_adapters() or adapter.startswith("zoo/") or ".py:" in adapter, words


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_in_a_page_begins_with_a_verb(page: pathlib.Path) -> None:
    code = (line.strip().removeprefix("$ ") for block in prose_and_code(read(page))[1] for line in block[1:])
    assert {line.split()[1] for line in code if re.match(r"gdn-verify [a-z]+( |$)", line)} <= {*verbs()}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_line_in_a_page_can_be_read(page: pathlib.Path) -> None:
    """Adapters in files and in the zoo are replaced by a built-in one: the files are not there, and the zoo is slow to import."""
    parse, adapters = definition("Run").parse, built_in_adapters()
    for line in lines(read(page)):
        (adapter,) = re.findall(r"(?<= adapter=)\S+", line)
        assert adapter in adapters or adapter.startswith("zoo/") or ".py:" in adapter, line
        parse(line if adapter in adapters else line.replace(f"adapter={adapter}", f"adapter={adapters[0]}"))


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


def test_bad_usage_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pytest.fail.Exception, match="bad usage"):
        parse_command(["check", "fla/chunk", "--lore", "cut"])
    assert "--lore" in capsys.readouterr().err
