"""docs/results.md and the pages beside it, made of the records in docs/results.json and the texts in benchmarks/*.md.j2.

    python -m benchmarks.results            write the pages
    python -m benchmarks.results --check    only compare: the exit code is 1 if a page is not what the records say

The exit code is 2 if a record is wrong.
"""

import argparse
import datetime
import functools
import itertools
import pathlib
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2

from benchmarks.records import RECORDS, ROOT, Record, read

PAGES = {
    f"{name}.j2": ROOT / "docs" / name for name in ("results.md", "decode-blocks.md", "megatron-claims.md")
}  # by their templates
WIDTH = 100  # of prose
ROW = 200  # the most characters in a row of a table


def main() -> int:
    """Write or compare the pages. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not what the records say")
    options = parser.parse_args()
    try:
        data = read(RECORDS)
        pages = {page: rendered(data, template) for template, page in PAGES.items()}
    except (ValueError, jinja2.TemplateError) as error:
        print(f"benchmarks.results: {error}", file=sys.stderr)
        return 2
    code = 0
    for page, text in pages.items():
        if not options.check:
            page.write_text(text, encoding="utf-8")
        elif difference := first_difference(page.read_text(encoding="utf-8"), text):
            print(f"benchmarks.results: {page.name}:{difference}: run python -m benchmarks.results", file=sys.stderr)
            code = 1
    return code


def first_difference(found: str, wanted: str) -> str:
    """The number of the first line that differs, and what it must be. Empty if none differs."""
    pairs = itertools.zip_longest(found.split("\n"), wanted.split("\n"), fillvalue="(no line)")
    return next((f"{number} must be {want!r}, got {line!r}" for number, (line, want) in enumerate(pairs, 1) if line != want), "")


def rendered(data: dict[str, Any], template: str = "results.md.j2") -> str:
    """A page of the machines and records."""
    records: list[Record] = data["records"]
    year = max((record["date"][:4] for record in records), default="")

    def of(table: str, *, gpu: bool | None = None) -> list[Record]:
        """The records of a table; with `gpu`, only those of machines with a GPU or without."""
        return [
            record
            for record in records
            if record["table"] == table and gpu in (None, data["machines"][record["machine"]].get("gpu", False))
        ]

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"wrap": lambda text: fill(text) + "\n", "figure": figure}
    page: str = environment.get_template(template).render(
        year=year,
        machines=machine_rows(data["machines"]),
        of=of,
        table=table,
        alarms=functools.partial(alarms, year=year),
        rows=functools.partial(rows, year=year),
        grid=grid,
        seconds=functools.partial(seconds, year=year),
        place=functools.partial(place, year=year),
        command=lambda chosen: "; ".join(dict.fromkeys(record["command"] for record in chosen)),
    )
    return page


def table(cells: Sequence[Sequence[str]]) -> str:
    """A table, whose first row has the heads of its columns, and below it a list of what its rows have no room for."""
    rows, rest = zip(*map(short, cells), strict=True)
    lines = [line(row) for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    pairs = [(row[0], words.rstrip(".")) for row, words in zip(rows, rest, strict=True) if words]
    items = [fill(f"- {what}: {words}.", subsequent_indent="  ") for what, words in pairs]
    return "\n".join([*lines, "", *items] if items else lines)


def line(row: Sequence[str]) -> str:
    """A row as the page has it."""
    return f"| {' | '.join(row)} |"


def short(row: Sequence[str]) -> tuple[Sequence[str], str]:
    """A row with at most ROW characters, and what it has no room for: what follows the first value, or its longest cell."""
    if len(line(row)) <= ROW:
        return row, ""
    value, _, rest = row[-1].partition("; ")
    if rest and len(line([*row[:-1], value])) <= ROW:
        return [*row[:-1], value], rest
    longest = max(range(1, len(row)), key=lambda place: len(row[place]))
    return [*row[:longest], "below", *row[longest + 1 :]], row[longest]


def fill(text: str, subsequent_indent: str = "") -> str:
    """A paragraph of the page."""
    return textwrap.fill(text, WIDTH, subsequent_indent=subsequent_indent, break_long_words=False, break_on_hyphens=False)


def machine_rows(machines: dict[str, Any]) -> list[tuple[str, str]]:
    """A table of the names and descriptions of machines. Those with the same description have one row."""
    names: dict[str, list[str]] = {}
    for name, machine in machines.items():
        versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
        names.setdefault(f"{machine['what']}. {versions}", []).append(name)
    return [("machine", "what it is"), *((", ".join(those), what) for what, those in names.items())]


def alarms(records: Sequence[Record], year: str) -> list[tuple[str, ...]]:
    """A table of false alarms."""
    cells: list[tuple[str, ...]] = [("checked code", "command", "machine, date", "cases", "false alarms")]
    for record in records:
        cases = figure(record["cases"]) + (f"; {record['blind']} blind" if record.get("blind") else "")
        cells.append((record["what"], record["command"], place([record], year), cases, figures([record])))
    return cells


def seconds(records: Sequence[Record], year: str) -> list[tuple[str, ...]]:
    """A table of seconds with their spread, and of memory where it was measured."""
    cells = [(record["what"], place([record], year), figures([record]), figure(record.get("gib", ""))) for record in records]
    return [("what", "machine, date", "seconds (spread)", "GiB"), *cells]


def rows(records: Iterable[Record], year: str) -> list[tuple[str, str, str, str]]:
    """A table of what, command, place and value. Neighbours that differ only in the machine share a row.

    A word that their commands do not share, such as the number of ranks, is N.
    """
    cells, before = [("what", "command", "machine, date", "value")], ""
    for _, group in itertools.groupby(records, alike):
        several = list(group)
        words = zip(*(record["command"].split() for record in several), strict=True)
        command = " ".join(those[0] if len({*those}) == 1 else "N" + "`" * those[0].endswith("`") for those in words)
        what = several[0]["what"] + (f" ({several[0]['sample']})" if "sample" in several[0] else "")
        cells.append((what, "the same" if command == before else command, place(several, year), figures(several)))
        before = command
    return cells


def alike(record: Record) -> tuple[object, ...]:
    """What records of one row have in common."""
    return len(record["command"].split()), *(record.get(name) for name in ("what", "date", "unit", "target", "sample", "note"))


def place(records: Sequence[Record], year: str) -> str:
    """Where and when records were measured."""
    places = []
    for date, group in itertools.groupby(
        dict.fromkeys((record["date"], machine(record)) for record in records), lambda pair: pair[0]
    ):
        places.append("; ".join(name for _, name in group) + f", {day(date, year)}")
    return "; ".join(places)


def machine(record: Record) -> str:
    """The machine of a record, with how many GPUs, whether other programs used it, and versions that are not the machine's."""
    several, shared = f"{record['gpus']} x " if "gpus" in record else "", ", shared" if record.get("shared") else ""
    versions = "".join(f", {package} {version}" for package, version in record.get("versions", {}).items())
    return f"{several}{record['machine']}{shared}{versions}"


def day(date: str, year: str) -> str:
    """A date as `23 Nov`, with its year if that is not the page's."""
    parsed = datetime.date.fromisoformat(date)
    return f"{parsed.day} {parsed:%b}" + (f" {parsed.year}" if str(parsed.year) != year else "")


def figures(records: Sequence[Record]) -> str:
    """The values of records in one cell, with their spread, their unit, and the target that they share."""
    first, texts = records[0], []
    for record in records:
        value, spread = record["value"], record.get("spread")
        digits = decimals([value, spread])
        text = figure(value, digits) + (f" {first['unit']}" if "unit" in first and record is records[-1] else "")
        if isinstance(spread, list):
            text += f", {figure(spread[0], digits)} to {figure(spread[1], digits)}"
        elif spread is not None:
            text += f" ({figure(spread, digits)})"
        texts.append(text)
    target = f", target {figure(first['target'])}" if "target" in first else ""
    return "; ".join(texts) + target + (f"; {first['note']}" if "note" in first else "")


def grid(records: Sequence[Record], first: str) -> list[list[str]]:
    """A table of records whose values have names, the heads of its columns. A column has as many decimals as it needs."""
    heads = list(dict.fromkeys(name for record in records for name in record["value"]))
    digits = {name: decimals([record["value"].get(name) for record in records]) for name in heads}
    return [
        [first, *heads],
        *([record["what"], *(figure(record["value"].get(name, ""), digits[name]) for name in heads)] for record in records),
    ]


def decimals(value: object) -> int:
    """The most decimals of the numbers in a value."""
    if isinstance(value, list):
        return max(map(decimals, value), default=0)
    return len(str(value).partition(".")[2]) if isinstance(value, float) else 0


def figure(value: object, digits: int | None = None) -> str:
    """A value as the page has it: a text as it stands, a number with commas, the numbers of a list between commas."""
    digits = decimals(value) if digits is None else digits
    if isinstance(value, list):
        return ", ".join(figure(part, digits) for part in value)
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
