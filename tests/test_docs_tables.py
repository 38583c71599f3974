"""No row of a table in a page is wider than a screen."""

from tests.pages import PAGES, prose_and_code, read

ROW = 200  # the most characters in a row of a table


def long_rows(text: str) -> list[int]:
    """The numbers of the lines that are rows of tables with more than ROW characters."""
    return [number for number, line in prose_and_code(text)[0] if line.startswith("|") and len(line) > ROW]


def test_no_row_of_a_table_is_too_long() -> None:
    assert {page.as_posix(): numbers for page in PAGES if (numbers := long_rows(read(page)))} == {}


def test_a_row_that_is_too_long_is_seen_outside_code_only() -> None:
    row = f"| {'x' * ROW} |"
    assert long_rows(f"prose\n\n{row}\n| short |\n\n```\n{row}\n```\n") == [3]
