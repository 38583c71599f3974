"""No row of a table is wider than a screen, the zoo's page has the incidents of the zoo, and pictures are small and described."""

import json
import os
import pathlib
import re

import pytest

from tests.pages import PAGES, codes, links, prose_and_code, read, section, table
from tests.sources import ROOT
from verify.zoo.animals import animals
from verify.zoo.incidents import INCIDENTS

README = 170  # the most lines of the first page that a stranger reads
ROW = 200  # the most characters in a row of a table
PICTURE = 60 * 1024  # the most bytes of a picture that benchmarks/pictures.py draws
KILLS = json.loads(read("docs/zoo.json"))["animals"]


# Rows


def long_rows(text: str) -> list[int]:
    """The numbers of the lines that are rows of tables with more than ROW characters."""
    return [number for number, line in prose_and_code(text)[0] if line.startswith("|") and len(line) > ROW]


def test_no_row_of_a_table_is_too_long() -> None:
    assert {page.as_posix(): numbers for page in PAGES if (numbers := long_rows(read(page)))} == {}


def test_a_row_that_is_too_long_is_seen_outside_code_only() -> None:
    row = f"| {'x' * ROW} |"
    assert long_rows(f"prose\n\n{row}\n| short |\n\n```\n{row}\n```\n") == [3]


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= README


# Incidents


def test_the_page_of_the_zoo_has_every_incident_its_reports_and_the_laws_that_notice_it() -> None:
    page = read("docs/zoo.md")
    rows = table(section(page, "The public incidents"), "incident")
    assert [int(row["incident"]) for row in rows] == [*INCIDENTS]
    for number, row in zip(INCIDENTS, rows, strict=True):
        (name,) = codes(row["wrong implementation"])
        twins = [animal.name for animal in animals().values() if number in animal.incident]
        first, more = [*KILLS[name]][:6], len(KILLS[name]) - 6
        assert row["what went wrong"] == INCIDENTS[number].what
        assert re.findall(r"\[([^\]]+)\]", row["reported in"]) == [*INCIDENTS[number].reports]
        assert name in twins
        assert int(row["others"] or 0) == len(twins) - 1, name
        assert row["laws that notice it"] == ", ".join(f"`{law}`" for law in first) + (f" and {more} more" if more > 0 else "")


def test_every_report_of_an_incident_has_its_address() -> None:
    page = read("docs/zoo.md")
    places = {
        report: f"https://github.com/{report.replace('#', '/issues/')}" for row in INCIDENTS.values() for report in row.reports
    }
    assert dict(re.findall(r"(?m)^\[([^\]]+)\]: (\S+)$", page)) == places
    assert {*places.values()} <= {*links(page)}


def test_the_laws_of_the_record_are_in_the_order_of_their_cases() -> None:
    assert [name for name, kills in KILLS.items() if not kills or [*kills.values()] != sorted(kills.values())] == []


# Pictures


def test_the_pictures_are_embedded_in_pages_with_words_and_are_small() -> None:
    pictures = pytest.importorskip("benchmarks.pictures").PICTURES
    shown = {
        pathlib.Path(os.path.normpath((ROOT / page).parent / target)): words
        for page in PAGES
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", read(page))
    }
    for name, (_, path) in pictures.items():
        assert len(shown[path].split()) > 5, name
        assert path.stat().st_size <= PICTURE, name
    assert len({path for _, path in pictures.values()}) == 6
