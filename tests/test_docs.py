"""The pages and the code agree, in both directions. What a page names exists: links, headings, files, imports, commands, lines."""

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import os
import pathlib
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import verify
from oracles.rounding import PRODUCTS
from properties.books import BOOKS, Book, every_law
from properties.laws import Law
from verify.zoo.animals import animals
from verify.zoo.trials import is_eligible

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
PACKAGES = ("oracles", "properties", "verify")
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "verify").rglob("*.py"))}
BOOK_BY_NAME = {book.name: book for book in BOOKS}
BOOK_BY_DOMAIN = {book.domain.__name__: book for book in BOOKS}
EVERY_LAW = [pytest.param(book, law, id=f"{book.name}-{law.name}") for book in BOOKS for law in book.laws.values()]
LINE_WIDTH, SHORT_PAGE = 100, 200
Row = dict[str, str]  # of a table: its cells by the heads of their columns


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
    """What pyproject.toml says for a command (`module:function`) or a plugin (`module`)."""
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

    importlib.import_module(entry_point("gdn_verify")).pytest_addoption(Group())
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


# Reading the pages


def read(page: pathlib.Path | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def reference(name: str) -> str:
    return read(f"docs/reference/{name}.md")


def prose_and_code(text: str) -> tuple[list[tuple[int, str]], list[list[str]]]:
    """The numbered lines outside code blocks, and the lines of each block. A block begins with its fence; if indented, with "".

    Indented lines after a line that begins with ":::" are options of mkdocstrings, and count as code.
    """
    prose: list[tuple[int, str]] = []
    blocks: list[list[str]] = []
    fence, indented = "", False
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
            blocks[-1] += [line] if fence else []
        elif mark:
            fence = mark[1]
            blocks.append([line.strip()])
        elif line.startswith("    ") and (indented or not prose or not prose[-1][1].strip() or prose[-1][1].startswith(":::")):
            blocks += [] if indented else [[""]]
            blocks[-1].append(line.strip())
            indented = True
        else:
            indented = indented and not line.strip()
            prose.append((number, line))
    return prose, blocks


def headings(text: str) -> list[tuple[int, int, str]]:
    """The line number, level and words of each heading."""
    matches = ((number, re.match(r"(#{1,6}) +(.*?) *#*$", line)) for number, line in prose_and_code(text)[0])
    return [(number, len(match[1]), match[2]) for number, match in matches if match]


def anchors(text: str) -> set[str]:
    """The names of the headings in links, as code hosts and MkDocs make them."""
    names: list[str] = []
    for _, _, words in headings(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        names.append(f"{anchor}-{names.count(anchor)}" if anchor in names else anchor)
    return set(names)


def section(text: str, title: str) -> str:
    """The text under a heading, up to the next heading of the same or a higher level."""
    every = headings(text)
    (index,) = (index for index, (_, _, words) in enumerate(every) if words == title)
    number, level, _ = every[index]
    end = next((later for later, other, _ in every[index + 1 :] if other <= level), len(text.splitlines()) + 1)
    return "\n".join(text.splitlines()[number : end - 1])


def tables(text: str) -> list[list[Row]]:
    grids: list[list[list[str]]] = []
    last = -1
    for number, line in prose_and_code(text)[0]:
        if line.startswith("|"):
            grids += [[]] if number != last + 1 else []
            grids[-1].append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
            last = number
    return [[dict(zip(head, cells, strict=True)) for cells in rows] for head, _, *rows in grids]


def table(text: str, first: str) -> list[Row]:
    """The only table of a text whose first column has this head."""
    (rows,) = (rows for rows in tables(text) if rows and next(iter(rows[0])) == first)
    return rows


def codes(cell: str) -> list[str]:
    """The pieces of code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def code_column(rows: list[Row], head: str) -> list[str]:
    return [code for row in rows for code in codes(row[head])]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each gdn-verify command in the code blocks of a page, from the verb on, without what is behind it."""
    start = re.compile(r"(?:^\s*(?:\$ )?|[\s\"'])(?:gdn-verify|python3? -m verify) +(?=[a-z])")
    for block in prose_and_code(text)[1]:
        for line in "\n".join(block[1:]).replace("\\\n", " ").splitlines():
            if match := start.search(line):
                command = re.split(r"  +|\s#|\s[|>&]", line[match.end() :])[0]
                if command.split()[0] in verbs() and "..." not in command:
                    yield shlex.split(command)


def parse_command(words: list[str]) -> argparse.Namespace:
    try:
        return verbs()[words[0]].parse_args(words[1:])
    except SystemExit:
        pytest.fail(f"bad usage: {shlex.join(words)}")


def links(text: str) -> Iterator[str]:
    """The targets of the links and images outside code."""
    prose = re.sub(r"`[^`]*`", "", "\n".join(line for _, line in prose_and_code(text)[0]))
    yield from re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose)
    yield from re.findall(r"(?m)^\[[^\]]+\]:\s*(\S+)", prose)


LINE = re.compile(r"law=[\w.]+(?: +[\w.]+=[^\s\"`);]+)+(?P<rest> *\S*)")


def lines(text: str) -> Iterator[str]:
    """The complete lines (`law=... adapter=...`) of a page."""
    for match in LINE.finditer(text):
        line = match[0].removesuffix(match["rest"]).rstrip(".,:")
        if " adapter=" in line and "..." not in match[0]:
            yield line


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
    assert [(module, name) for module, name in ours if not hasattr(importlib.import_module(module), name)] == []


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


# docs/reference/commands.md


def option_rows(verb: str) -> dict[tuple[str, ...], Row]:
    rows = table(section(reference("commands"), verb), "option")
    return {tuple(code.split()[0] for code in codes(row["option"])): row for row in rows}


def test_the_page_of_commands_has_a_row_and_a_section_for_every_verb_and_no_other() -> None:
    page = reference("commands")
    rows = code_column(table(page.partition("\n## ")[0], "verb"), "verb")
    assert sorted(rows) == sorted(verbs())
    assert [words for _, level, words in headings(page) if level == 2] == ["Exit codes", *rows, "pytest"]


@pytest.mark.parametrize("verb", [*verbs(), "pytest"])
def test_the_options_of_a_verb_are_those_of_its_parser(verb: str) -> None:
    rows = option_rows(verb)
    assert {*rows} == {*options(verb)}
    for names, action in options(verb).items():
        assert {len(code.split()) > 1 for code in codes(rows[names]["option"])} == {action.nargs != 0}, names
        assert ("[" in rows[names]["option"]) is (action.nargs == "?"), names


@pytest.mark.parametrize("verb", [*verbs(), "pytest"])
def test_the_defaults_of_options_are_those_of_the_parser(verb: str) -> None:
    for names, action in options(verb).items():
        cell = option_rows(verb)[names]["default"]
        if action.default is False:
            assert cell == "off", names
        elif action.required:
            assert cell == "must be given", names
        elif action.default in (None, [], ""):  # the page says in words what happens; values in the words are also in the help
            assert all(code in (action.help or "") for code in codes(cell) if not code.startswith("-")), names
            assert action.const is None or action.const in codes(cell), names
        elif action.dest == "workers":  # the default depends on the machine
            assert action.default == min(os.cpu_count() or 1, 4), names
            assert "cores, at most 4" in cell, names
        else:
            (code,) = codes(cell)
            assert type(action.default)(code) == action.default, names


@pytest.mark.parametrize("verb", [*verbs(), "pytest"])
def test_the_choices_of_options_are_those_of_the_parser(verb: str) -> None:
    for names, action in options(verb).items():
        meaning = option_rows(verb)[names]["meaning"]
        sentence = re.search(r"One of ((?:`[^`]+`(?:, )?)+)", meaning)
        if sentence:
            assert codes(sentence[1]) == [*map(str, action.choices or ())], names
        else:  # they may be in a table of the same page
            assert not action.choices or re.search(r"\]\(#[\w-]+\)", meaning), names


@pytest.mark.parametrize("verb", [*verbs(), "pytest"])
def test_every_option_of_a_verb_has_an_example(verb: str) -> None:
    blocks = prose_and_code(section(reference("commands"), verb))[1]
    words = {word.partition("=")[0] for block in blocks for line in block[1:] for word in shlex.split(line, comments=True)}
    assert [names for names in options(verb) if not {*names} & words] == []


def test_every_flag_in_the_page_of_commands_exists() -> None:
    code = "".join(re.findall(r"`[^`\n]+`|```.*?```", reference("commands"), re.DOTALL))
    flags = {*re.findall(r"(?<![\w-])--?[a-z][a-z-]*", code)}
    existing = {flag for verb in [*verbs(), "pytest"] for names in options(verb) for flag in names}
    assert flags - existing == {"-h", "--help", "-m", "--nproc-per-node"}


def test_profiles_letters_suites_and_claims_are_those_of_the_code() -> None:
    page = reference("commands")
    profiles = [
        (
            f"`{profile.name}`",
            str(profile.examples),
            *("yes" if has else "no" for has in (profile.large, profile.climbs)),
            "0" if profile.fixed_seed else "random",
        )
        for profile in definition("PROFILES").values()
    ]
    assert [tuple(row.values()) for row in table(section(page, "Profiles"), "profile")] == profiles
    assert code_column(table(section(page, "Classes of defects"), "letter"), "letter") == [*definition("LETTERS")]
    assert code_column(table(section(page, "Suites"), "suite"), "suite") == [*definition("SUITES")]
    assert code_column(table(section(page, "Published claims"), "number"), "number") == [*map(str, definition("PARTS"))]


@pytest.mark.parametrize("verb", verbs())
def test_the_exit_codes_of_a_verb_are_in_both_pages(verb: str) -> None:
    in_help = {*re.findall(r"(?:^exit:|  ) ?(\d+) ", verbs()[verb].epilog or "")}
    meanings = {row["exit code"]: row["meaning"] for row in table(section(reference("commands"), verb), "exit code")}
    summary = {row["verb"]: row for row in table(section(reference("files"), "Exit codes of every verb"), "verb")}
    assert in_help <= {*meanings}
    assert {*meanings} == {"0", "1", "2", "3", "130"}
    for code, meaning in meanings.items():
        assert (summary[f"`{verb}`"][code] == "") is (meaning == "does not occur"), code


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


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.name)
def test_the_page_has_the_laws_of_a_book_and_no_other(book: Book) -> None:
    assert code_column(book_tables(book, "equation"), "law") == [*book.laws]


@pytest.mark.parametrize(("book", "law"), EVERY_LAW)
def test_a_law_has_a_sentence_an_equation_a_defect_and_a_way_to_be_judged(book: Book, law: Law) -> None:
    (row,) = (row for row in book_tables(book, "equation") if row["law"] == f"`{law.name}`")
    assert row["what must hold"].endswith(".")
    assert codes(row["equation"])
    assert row["typical defects"]
    assert row["judged"].startswith("to the bit" if law.kind == "exact" else "within")
    if law.about:
        assert [*law.about] == (codes(row["about"]) or [*book.operations])


@pytest.mark.parametrize(("book", "law"), EVERY_LAW)
def test_a_law_is_unsupported_for_the_domains_of_its_row(book: Book, law: Law) -> None:
    domains = [domain for domain in default_domains(book) if not law.about or domain.operation in law.about]
    for changes in exclusions(book, law):
        assert any(law.needs(dataclasses.replace(domain, **changes)) for domain in domains), changes


@pytest.mark.parametrize(("book", "law"), EVERY_LAW)
def test_no_other_switch_of_a_domain_makes_a_law_unsupported(book: Book, law: Law) -> None:
    switches = [name for name, field in fields(book.domain).items() if isinstance(field.default, bool)]
    for domain in default_domains(book):
        if law.needs(domain):
            assert exclusions(book, law) or domain.operation not in (law.about or [domain.operation])
            continue
        for name in switches:
            changes = {name: not getattr(domain, name)}
            try:
                changed = dataclasses.replace(domain, **changes)
            except ValueError:
                continue
            assert not law.needs(changed) or changes in exclusions(book, law), changes


# docs/reference/domains.md: the fields of domains

HEADS = "heads=2 value_heads=4 key_dim=5 value_dim=6"
PACKED = "lengths=3+4 packed=yes dtype=bf16"
ONE = "lengths=3 dtype=bf16"
# Cases of each operation that together have every input in every dtype, and leave out everything optional.
CASES = {
    "rules": [
        f"{PACKED} {HEADS} state=random in_kernel=INSIDE offsets=int32 scale=one",
        f"lengths=3+3 dtype=bf16 {HEADS} gate_dtype=input in_kernel=INSIDE dt_bias=no",
        f"{PACKED} {HEADS}",
        f"{ONE} gate_dtype=input",
        f"{PACKED} {HEADS} decay=LINEAR",
        f"{ONE} gate_dtype=input decay=LINEAR",
    ],
    "causal_conv1d": [
        f"{PACKED} width=5 conv_width=3 bias=yes state=random offsets=int32 activation=silu",
        f"{PACKED} width=5",
        ONE,
    ],
    "gdn_gate": ["lengths=3+3 dtype=bf16 heads=4", f"{ONE} dt_bias=no beta=no"],
    "kda_gate": ["lengths=3+3 dtype=bf16 heads=4 width=5", f"{ONE} dt_bias=no beta=no"],
    "l2norm": ["lengths=3+3 dtype=bf16 heads=2 width=5", f"{ONE} eps=default"],
    "gated_rms_norm": ["lengths=3+3 dtype=bf16 heads=4 width=6", f"{ONE} eps=default weight=no"],
    "norm_gate_linear": ["lengths=3+3 dtype=bf16 width=6 out_width=5 bias=yes", f"{ONE} eps=default weight=no"],
    "decode": [
        f"{PACKED} {HEADS} fresh=some accepted=some block_v=8 offsets=int32 indices=int32 scale=one",
        f"{PACKED} fresh=some accepted=some gate_dtype=input",
        f"{PACKED} {HEADS} in_kernel=INSIDE state_dtype=bf16 drafts=tree indices=int32",
        f"{PACKED} {HEADS} drafts=tree",
        f"{PACKED} {HEADS} in_kernel=INSIDE dt_bias=no state_dtype=fp16",
        f"{PACKED} {HEADS} decay=LINEAR",
        f"{PACKED} gate_dtype=input decay=LINEAR",
        ONE,
    ],
    "gdn_layer": [f"{PACKED} {HEADS} conv_bias=yes cached=yes state=random offsets=int32", PACKED, ONE],
    "kda_layer": [f"{PACKED} {HEADS} conv_bias=yes cached=yes state=random offsets=int32", PACKED, ONE],
}
DTYPES = {
    "input": torch.bfloat16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
}
SINGLE_PROCESS = [
    pytest.param(book, operation, id=f"{book.name}-{operation}")
    for book in BOOKS
    if book.name not in ("paths", "traces", "calls")
    for operation in book.operations
]


@pytest.mark.parametrize("name", BOOK_BY_DOMAIN)
def test_the_fields_of_a_domain_are_in_the_page_with_type_and_default(name: str) -> None:
    domain = BOOK_BY_DOMAIN[name].domain
    rows = table(section(reference("domains"), name), "field")
    assert code_column(rows, "field") == [*fields(domain)]
    for row, field in zip(rows, fields(domain).values(), strict=True):
        type_name = field.type.__name__ if type(field.type) is type else re.sub(r"\b[\w.]+\.(\w+)", r"\1", str(field.type))
        assert codes(row["type"]) == [type_name], field.name
        assert codes(row["default"]) == [short_repr(field.default)], field.name
        assert row["meaning"], field.name


@pytest.mark.parametrize("name", BOOK_BY_DOMAIN)
def test_the_example_of_a_field_makes_a_domain(name: str) -> None:
    for row in table(section(reference("domains"), name), "field"):
        (code,) = codes(row["example"])
        assert [*keyword_arguments(code)] == codes(row["field"])
        BOOK_BY_DOMAIN[name].domain(**keyword_arguments(code))


def input_rows(prefix: str, operation: str) -> dict[str, Row]:
    """The rows by field of the section whose title is the prefix and a list of operations."""
    page = reference("domains")
    titles = [words for *_, words in headings(page) if words.startswith(prefix)]
    (title,) = (title for title in titles if operation in title.removeprefix(prefix).split(", "))
    return {name: row for row in table(section(page, title), "field") for name in codes(row["field"])}


def calls(book: Book, operation: str) -> list[tuple[Any, dict[str, Any]]]:
    """Cases of an operation with their inputs."""
    gated = operation != "delta_rule"
    inside, linear = ("both", "linear") if gated else ("beta", "log")
    words = [
        line.replace("INSIDE", inside).replace("LINEAR", linear) for line in CASES["rules" if book.name == "rules" else operation]
    ]
    cases = [book.case.parse(f"{line} op={operation}") for line in words]
    return [(case, dict(case.inputs())) for case in cases]


@pytest.mark.parametrize(("book", "operation"), SINGLE_PROCESS)
def test_the_inputs_of_an_operation_are_those_of_the_page(book: Book, operation: str) -> None:
    rows, inputs = input_rows("Inputs of ", operation), [call for _, call in calls(book, operation)]
    for name in ("a", "A_log", "dt_bias", "alpha") if operation == "delta_rule" else ():  # it has no gate, and shares its table
        del rows[name]
    assert {*rows} == {name for call in inputs for name in call}
    for name, row in rows.items():
        values = [call[name] for call in inputs if name in call]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        types = {type(value).__name__ for value in values if value is not None} - {"Tensor"}
        if operation != "delta_rule":
            states = {"None": any(value is None for value in values), "absent": len(values) < len(inputs)}
            assert row["may be"] == ", ".join(state for state, occurs in states.items() if occurs), name
        if tensors:
            assert {tensor.dtype for tensor in tensors} == {DTYPES[word] for word in row["dtype"].split(" or ")}, name
        if types:
            assert codes(row["shape or type"]) == [*types], name


@pytest.mark.parametrize(("book", "operation"), SINGLE_PROCESS)
def test_every_input_has_the_shape_of_the_page(book: Book, operation: str) -> None:
    for name, row in input_rows("Inputs of ", operation).items():
        shapes = codes(row["shape or type"])
        for case, call in calls(book, operation):
            if isinstance(tensor := call.get(name), torch.Tensor):
                sizes = {**case.spec.sizes(case.inputs()), "N": len(case.lengths), "1": 1}
                shape = shapes[shapes.index(operation) + 1] if operation in shapes else shapes[0]
                terms = [axis.split(" + ") for axis in shape[1:-1].split(", ")]
                assert tensor.shape == tuple(sum(sizes[term] for term in axis) for axis in terms), name


RECORDER = """
import pathlib

from verify import PathAdapter, PathDomain


class Recorder(PathAdapter):
    domain = PathDomain(operation="{operation}")

    def run(self, x, place):
        names = [*x, *(f"parameters {{name}}" for name in x.get("parameters") or ())]
        pathlib.Path(__file__).with_suffix(".txt").write_text("\\n".join(names))
"""


@pytest.mark.parametrize("operation", BOOK_BY_NAME["paths"].operations)
def test_the_inputs_on_a_rank_are_those_of_the_page(
    operation: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"recorder_of_{operation}.py"
    file.write_text(RECORDER.format(operation=operation))
    monkeypatch.setattr(sys, "path", [*sys.path])
    case = f"op={operation} lengths=4+4 packed=yes conv_bias=yes deterministic=yes backward=no"
    definition("execute")(definition("Run").parse(f"law=repeats adapter={file}:Recorder {case}"))
    monkeypatch.delitem(sys.modules, file.stem)
    names = file.with_suffix(".txt").read_text().splitlines()
    rows = input_rows("Inputs on a rank: ", operation)
    assert sorted(rows) == sorted(name for name in names if " " not in name)
    parameters = codes(rows["parameters"]["meaning"]) if "parameters" in rows else []
    assert sorted(parameters) == sorted(name.removeprefix("parameters ") for name in names if " " in name)


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


@pytest.mark.parametrize(("section_name", "kind"), [("TraceAdapter", "Sizes"), ("Engine", "Batch")])
def test_what_an_engine_gets_is_in_the_page(section_name: str, kind: str) -> None:
    value = getattr(importlib.import_module("properties.cases.trace_case"), kind)
    properties = {name for name, member in vars(value).items() if isinstance(member, property)}
    page = re.findall(r"`([a-zA-Z_]+)[ `]", section(reference("adapters"), section_name))
    assert {*fields(value), *properties} - {*page} == set()


@pytest.mark.parametrize("book", [name for name in BOOK_BY_NAME if name != "calls"])  # none is built in
def test_the_built_in_adapters_are_in_the_page_with_what_they_declare(book: str) -> None:
    places = definition("BOOKS_OF_BUILT_IN")[book]
    rows = table(section(reference("adapters"), f"Built-in {book}"), "adapter")
    assert code_column(rows, "adapter") == [*places]
    for row, place in zip(rows, places.values(), strict=True):
        module, _, name = place.rpartition(":")
        adapter = getattr(importlib.import_module(module), name)
        assert codes(row["algorithm"]) == [adapter.algorithm], place
        assert row["chunk"] == ("" if adapter.chunk is None else str(adapter.chunk)), place
        assert codes(row["products"]) == [adapter.products], place
        assert codes(row["needs"]) == [f"{package} {version}" for package, version in adapter.requires.items()], place
        assert codes(row["domain"]) == [short_repr(adapter.domain)], place
        for flag in ("stores", "rounds_products"):
            assert (f"`{flag} = True`" in row["calls"]) is getattr(adapter, flag, False), place


def test_the_operations_of_an_algorithm_are_in_the_page() -> None:
    rows = table(section(reference("adapters"), "Where the implementation rounds"), "attribute")
    operations = {codes(row["attribute"])[0]: codes(row["operations"]) for row in rows}
    assert operations['algorithm = "pointwise"'] == [*BOOK_BY_NAME["modules"].operations]
    assert {name.partition(" = ")[0] for name in operations} <= {*public_names(verify.Adapter)}


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


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.name)
def test_the_words_of_a_case_are_in_the_page_with_their_defaults(book: Book) -> None:
    assert [*word_rows(book)] == [*word_fields(book)]
    defaults = book.case.parse(f"{shortest(book)} op={book.operations[0]}").words()
    for word, row in word_rows(book).items():
        default = "must be given" if needs_a_value(word_fields(book)[word]) else f"`{defaults[word]}`"
        assert row["default"] == default, word


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.name)
def test_the_values_of_a_word_are_those_that_a_case_accepts(book: Book) -> None:
    for word, row in word_rows(book).items():
        field = word_fields(book)[word]
        line = f"{shortest(book)} op={operations_with(book, word)[0]}"
        if field.type is bool:
            assert row["values"] == "yes, no", word
        elif field.type is int:
            low, high = map(int, row["values"].split(" to "))
            for number in {max(0, low - 1), high + 1} - {low}:
                with pytest.raises(ValueError, match=rf"{word} must be in {low}\.\.{high}\b"):
                    book.case.parse(f"{line} {word}={number}")
        elif word == "options":
            assert row["values"] == "`none`, or name:value joined by commas"
        elif word in ("trace", "takes", "gives", "sizes"):
            assert row["values"] == {"trace": "events joined by `/`", "sizes": "sizes joined by `,`"}.get(
                word, "tensors joined by `,`"
            )
        elif field.type is str:
            choices = book.case.CHOICES.get(field.name) or BOOK_BY_NAME["rules"].case.CHOICES[field.name]
            assert codes(row["values"]) == [*choices], word
        else:
            assert row["values"] == "whole numbers joined by `+`", word


def test_a_word_that_an_operation_lacks_is_refused_and_no_other() -> None:
    book = BOOK_BY_NAME["modules"]
    for word, field in word_fields(book).items():
        if needs_a_value(field):
            continue
        value = {bool: "no" if field.default else "yes", int: "2"}.get(field.type) or codes(word_rows(book)[word]["values"])[-1]
        for operation in book.operations:
            try:
                book.case.parse(f"lengths=2 op={operation} {word}={value}")
                refused = False
            except ValueError as error:
                refused = "has no" in str(error)
            assert refused is (operation not in operations_with(book, word)), (word, operation)


@pytest.mark.parametrize(("title", "word"), [("Gates", "gate"), ("Values", "values")])
def test_every_value_of_a_regime_is_explained(title: str, word: str) -> None:
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


# docs/reference/illegal-input.md


@pytest.mark.parametrize("book", [book for book in BOOKS if book.name != "calls"], ids=lambda book: book.name)
def test_the_illegal_inputs_of_a_book_are_in_the_page_and_no_other(book: Book) -> None:
    text = section(reference("illegal-input"), book.name.capitalize())
    names = {name for operation in book.operations for name in book.illegal.names(operation)}
    assert names <= {*codes(text)}
    if book.name == "modules":
        rows = table(text, "operation")
        page = {operation: codes(row["illegal inputs"]) for row in rows for operation in codes(row["operation"])}
        assert page == {name: book.illegal.names(name) for name in book.operations if book.illegal.names(name)}
    else:
        assert {name for row in table(text, "illegal input") for name in codes(row["illegal input"])} <= names


# docs/reference/files.md


def stages() -> set[str]:
    """The stages of findings: in the records themselves, and in calls of a method that makes them."""
    pairs = [re.findall(r'"stage": "([\w ]+)"|\b_keep\([^)\n]*"([\w ]+)"\)', text) for text in SOURCES.values()]
    return {first or second for text in pairs for first, second in text}


KEYS: dict[tuple[str, str], Callable[[], Any]] = {
    ("findings.jsonl", "key"): lambda: dict_keys("stage", "run"),
    ("findings.jsonl", "`stage`"): stages,
    ("A finding", "key"): lambda: fields(definition("Finding")),
    ("A finding", "`kind`"): lambda: map(str, definition("FailureKind")),
    ("Deny-lists", "key"): lambda: fields(definition("Denied")),
    ("known_defects.toml", "key"): lambda: {*fields(definition("Known"))} - {"file"},
    ("list JSON", "key"): lambda: dict_keys("gpu_gate"),
    ("list JSON", "key of an adapter"): lambda: dict_keys("runs", "shared") | dict_keys("runs", "reason"),
    ("check and soak JSON", "key"): lambda: fields(definition("LawReport")),
    ("reach", "key of a reach"): lambda: [*({*fields(definition("Reach"))} - {"arcs"}), "statements"],
    ("sweep JSON", "key"): lambda: dict_keys("infeasible", "faults"),
    ("repeat JSON", "key"): lambda: {"run", "versions", *fields(definition("Outcome"))} - {"reach"},
    ("launches JSON", "key"): lambda: {"run", "reason", *dict_keys("found", "left")},
    ("zoo JSON", "key"): lambda: dict_keys("animals", "alarms"),
    ("zoo JSON", "key of an animal"): lambda: dict_keys("killed_by"),
    ("zoo JSON", "key of a law of an animal"): lambda: {*fields(definition("Cell")), "state", "held"} - {"broken", "holding"},
    ("zoo JSON", "key of a suite"): lambda: {*fields(definition("Trial")), "killed"},
    ("zoo JSON", "key of a mutant"): lambda: (
        {*fields(definition("Fate", with_field="differed")), *dict_keys("operator", "id"), "diff"} - {"mutant"}
    ),
    ("claims JSON", "key"): lambda: dict_keys("rows", "interrupted") | dict_keys("device", "text"),
    ("claims JSON", "key of a row"): lambda: {*fields(definition("Row")), "measured"},
    ("fetch JSON", "key"): lambda: {"folder", "fetched", *dict_keys("sha256", "patterns")},
    ("The record of the GPU tests", "key"): lambda: definition("KINDS"),
}


@pytest.mark.parametrize(("title", "head"), KEYS, ids=[f"{title}, {head}" for title, head in KEYS])
def test_the_keys_of_a_file_are_those_of_the_code(title: str, head: str) -> None:
    assert sorted(code_column(table(section(reference("files"), title), head), head)) == sorted(KEYS[title, head]())


def test_the_files_of_findings_are_those_of_the_code() -> None:
    rows = table(section(reference("files"), "The folder .gdn-verify"), "file")
    assert code_column(rows, "file") == ["findings.jsonl", "examples.txt", "under-way-PID.txt"]
    source = "\n".join(SOURCES.values())
    assert all(f'"{name}' in source for name in ("findings.jsonl", "examples.txt", "under-way-"))


def test_the_keys_that_a_known_defect_must_have_are_those_of_the_code() -> None:
    rows = table(section(reference("files"), "known_defects.toml"), "key")
    needed = {name for name, field in fields(definition("Known")).items() if needs_a_value(field)}
    assert {codes(row["key"])[0] for row in rows if row["must be given"] == "yes"} == needed


def test_the_environment_variables_are_those_of_the_code() -> None:
    source = "\n".join(SOURCES.values())
    in_code = {*re.findall(r"environ(?:ment)?(?:\.get\(|\[)['\"]([A-Z_]+)['\"]|\"(GDN_VERIFY_[A-Z]\w*)\"", source)}
    rows = [row for rows in tables(section(reference("files"), "Environment variables")) for row in rows]
    in_page = {*code_column(rows, "variable")}
    assert {first or second for first, second in in_code} - in_page == set()
    assert [name for name in sorted(in_page) if not re.search(rf"\b{name}\b", source)] == []


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


# What pages quote from the program


PRINTED = re.compile(r"\s*(HOLDS|BROKEN|unsupported|blind) +(\w+)(?: +\d+ cases)?(?: {2}[\d.]+ \w+)? +(.+)")
LABELS = ("holds with", "would hold", "versions", "found", "repeat", "worst row", "rows over", "got", "want", "compared")


@functools.cache
def sentences() -> dict[str, set[str]]:
    """The sentences of each law's name, in whichever book."""
    texts: dict[str, set[str]] = {}
    for book in BOOKS:
        for law in book.laws.values():
            texts.setdefault(law.name, set()).add(law.says)
    return texts


def quoted(text: str) -> Iterator[tuple[str, str, str]]:
    """Each quoted line of a report that names a law, the law, and the text at its end, without the counts of other cases."""
    for line in (line for block in prose_and_code(text)[1] for line in block):
        found = PRINTED.fullmatch(line)
        if found and found[2] in sentences() and found[1] != "unsupported":
            yield line, found[2], re.sub(r" \(\d+ \w+(, \d+ \w+)*\)$", "", found[3].rpartition(" · ")[2])


def misquoted(text: str) -> list[str]:
    """The quoted lines of reports that do not end with the sentence of their law."""
    return [line for line, law, end in quoted(text) if end not in sentences()[law]]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_reports_that_a_page_quotes_have_the_sentences_of_their_laws(page: pathlib.Path) -> None:
    assert misquoted(read(page)) == []


def test_the_lines_of_reports_that_pages_quote_are_found() -> None:
    counts = {page.as_posix(): len(list(quoted(read(page)))) for page in PAGES}
    assert counts["README.md"] >= 5
    assert counts["docs/tutorial.md"] >= 20
    assert counts["docs/how-to/read-a-report.md"] >= 3


def test_a_misquoted_report_is_seen() -> None:
    right = f"```\nHOLDS       pure         5 cases                   {every_law()['pure'].says}\n```\n"
    assert misquoted(right) == []
    assert misquoted(right.replace("neither", "none of")) != []
    assert misquoted("```\nBROKEN   oracle · my.py:Kernel · every output equals the truth\n```\n") != []


def test_labels_of_reports_in_pages_are_those_of_the_program() -> None:
    source = (ROOT / "verify" / "findings" / "report.py").read_text(encoding="utf-8")
    assert [label for label in LABELS if f"  {label}  " not in source] == []
    rows = {label for page in PAGES for row_ in tables(read(page)) for row in row_ for label in codes(next(iter(row.values())))}
    assert {*LABELS[:7]} <= rows, "a page explains each of them"


def test_counts_of_wrong_implementations_in_pages_are_those_of_the_zoo() -> None:
    count, judged = len(animals()), sum(map(is_eligible, animals().values()))
    texts = {page: " ".join(read(page).split()) for page in PAGES}
    assert re.findall(r"\b(\d+) of \1\b[^|]*incidents", texts[pathlib.Path("docs/results.md")])[:1] == [str(count)]
    told = {
        number for text in texts.values() for number in re.findall(r"(\d+) wrong implementations of the gated delta rule", text)
    }
    assert told == {str(judged)}
