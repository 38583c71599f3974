"""What pages quote from reports and count in the zoo is what the program prints and the zoo holds."""

import functools
import pathlib
import re
from collections.abc import Iterator

from properties.books import BOOKS, every_law
from tests.pages import PAGES, codes, prose_and_code, read, tables
from tests.sources import ROOT
from verify.zoo.animals import animals
from verify.zoo.trials import is_eligible

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


def test_reports_that_a_page_quotes_have_the_sentences_of_their_laws() -> None:
    assert [line for page in PAGES for line in misquoted(read(page))] == []


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
    sentence = r"(\d+) wrong implementations of the gated delta rule"
    assert {number for text in texts.values() for number in re.findall(sentence, text)} == {str(judged)}
