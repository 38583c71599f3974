"""The rule of findings: nothing in the repository is an input that crashes software of others, or makes it read outside a tensor.

Such a defect is described in words. A program can only read what pages print: code, printed lines, rows of numbers, known defects.
"""

import re
import tomllib

from tests.pages import prose_and_code, read, tables
from tests.sources import ROOT
from verify.findings.known import FILE

PAGES = ["docs/FINDINGS.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "upstream").glob("*.md"))]
CRASH = re.compile(
    r"illegal (?:memory )?(?:access|address)|(?:device|context|GPU) (?:is|was) lost|CUDA error"
    r"|SIGSEGV|SIGABRT|segmentation fault|core dumped|invalid next size|OutOfBounds|out of bounds"
    r"|(?:reads?|writes?|stores?)(?: and \w+)? (?:outside|behind|beyond|past)"
    r"|(?:outside|behind|beyond|past) (?:that|the|its|a) (?:memory|tensor)",
    re.IGNORECASE,
)


def crashing(text: str) -> list[str]:
    """Lines of code blocks that tell of a crash, and rows of tables that do so beside numbers. Prose and rows of words may."""
    code = [line for block in prose_and_code(text)[1] for line in block[1:] if CRASH.search(line)]
    rows = [[*row.values()] for rows in tables(text) for row in rows]
    numbers = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")  # sizes, and not versions
    return code + [
        " | ".join(cells)
        for cells in rows
        if any(CRASH.search(cell) and any(numbers.search(other) for other in cells if other is not cell) for cell in cells)
    ]


def defects_that_crash(text: str) -> list[str]:
    """The lines of known defects whose reason describes a crash."""
    return [entry["run"] for entry in tomllib.loads(text).get("defect", ()) if CRASH.search(entry["reason"])]


def test_no_page_of_findings_has_an_input_that_crashes() -> None:
    assert {page: found for page in PAGES if (found := crashing(read(page)))} == {}


def test_no_known_defect_has_a_line_that_crashes() -> None:
    assert defects_that_crash(FILE.read_text(encoding="utf-8")) == []


def test_an_input_that_crashes_is_seen() -> None:
    for planted in [
        "```text\nK=2 num_warps=4: got CUDA error: an illegal memory access was encountered\n```\n",
        "```python\nexcept RuntimeError:  # an illegal address ends the CUDA context\n```\n",
        "| K, V | fp16 |\n| --- | --- |\n| 128, 16 | illegal address |\n",
        "| illegal input | result |\n| --- | --- |\n| a state of 3 columns | reads and writes outside: SIGSEGV |\n",
    ]:
        assert len(crashing(planted)) == 1, planted
        assert (
            crashing("With wide keys the kernel reads an illegal address.\n\n| effect | an illegal address |\n| --- | --- |\n")
            == []
        ), planted


def test_a_known_defect_that_crashes_is_seen() -> None:
    entry = '[[defect]]\nrun = "law=oracle"\nreason = "four warps give {}"\n'
    assert defects_that_crash(entry.format("wrong gradients")) == []
    assert defects_that_crash(entry.format("wrong gradients, or an illegal address")) == ["law=oracle"]
