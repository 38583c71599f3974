"""The pages, and what is in them: headings, sections, tables, commands, links and lines."""

import pathlib
import re
import shlex
from collections.abc import Iterator

from tests.sources import ROOT, verbs

PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
Row = dict[str, str]  # of a table: its cells by the heads of their columns


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
    """The tables of a text. Neighbours with the same first column are parts of one table, and are joined."""
    joined: list[list[Row]] = []
    for rows in _separate_tables(text):
        if joined and [next(iter(row.items())) for row in rows] == [next(iter(row.items())) for row in joined[-1]]:
            joined[-1] = [first | second for first, second in zip(joined[-1], rows, strict=True)]
        else:
            joined.append(rows)
    return joined


def _separate_tables(text: str) -> list[list[Row]]:
    grids: list[list[list[str]]] = []
    last = -1
    for number, line in prose_and_code(text)[0]:
        if line.startswith("|"):
            grids += [[]] if number != last + 1 else []
            grids[-1].append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
            last = number
    return [[dict(zip(head, cells, strict=True)) for cells in rows] for head, _, *rows in grids]


def table(text: str, first: str) -> list[Row]:
    """The only table of a text whose first column has this head. A cell that says "below" has its words in the item of its row."""
    (rows,) = (rows for rows in tables(text) if rows and next(iter(rows[0])) == first)
    words = items(text)
    return [{head: words[codes(row[first])[0]] if cell == "below" else cell for head, cell in row.items()} for row in rows]


def items(text: str) -> dict[str, str]:
    """What the lists of a text say about names in code: the items of the form `NAME`, `NAME` and words: text."""
    found: dict[str, str] = {}
    for item in re.findall(r"(?m)^- (.+(?:\n  .+)*)", text):
        names, _, rest = " ".join(item.split()).partition(": ")
        found |= dict.fromkeys(codes(names), rest)
    return found


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
