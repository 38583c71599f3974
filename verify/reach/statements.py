"""Which statements of the Python around kernels no case ran: read from the source, and from what ran in all cases.

The package coverage reads the source. A line with `# pragma: no cover` does not count.
"""

import ast
import bisect
import dataclasses
import functools
import json
import pathlib
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

import coverage

from verify.process.stacks import short_path

# Decorators of functions that do not run as Python, but are compiled: those of Triton, Gluon, CuTe and Helion.
KERNELS = ("jit", "kernel")
ATTEMPTS, PAUSE_S = 50, 0.1  # to parse a file
# Lines that raise do not count as lines that never ran, because every case is a legal call.
RAISES = r"^\s*raise\b"


@dataclasses.dataclass(frozen=True)
class Statements:
    """A function of Python of which something ran: its lines that ran, and those that never ran."""

    function: str
    file: str
    ran: tuple[int, ...]
    unrun: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether everything ran."""
        return not self.unrun

    def __str__(self) -> str:
        """What did not run, such as "chunk_fwd (fla/ops/chunk.py:51-60,72)"."""
        return f"{self.function} ({self.file}:{ranges(self.unrun)})"

    def to_json(self) -> dict[str, str]:
        """Plain data: the lines as text."""
        return {"ran": ranges(self.ran), "never_ran": ranges(self.unrun)}


def statements(lines: Mapping[str, Collection[int]]) -> list[Statements]:
    """The functions of which something ran, in the order of files and lines. Files that cannot be read are left out."""
    return [found for file, ran in sorted(lines.items()) for found in _of_file(file, ran)]


def ranges(lines: Iterable[int]) -> str:
    """Lines in a short form: "51-60,72"."""
    parts: list[list[int]] = []
    for line in sorted(lines):
        if parts and line == parts[-1][-1] + 1:
            parts[-1][1:] = [line]
        else:
            parts.append([line])
    return ",".join("-".join(map(str, part)) for part in parts)


def _of_file(file: str, ran: Collection[int]) -> Iterator[Statements]:
    functions = _functions(file)
    first = sorted([0, *(line for lines in functions.values() for line in lines)])
    begun = {first[bisect.bisect_right(first, line) - 1] for line in ran}  # of a statement of several lines, the first one
    for name, lines in functions.items():
        if name and lines & begun:
            yield Statements(name, short_path(file), tuple(sorted(lines & begun)), tuple(sorted(lines - begun)))


@functools.lru_cache(64)
def _functions(file: str) -> Mapping[str, frozenset[int]]:
    """The lines of each function of a file that runs as Python, and with an empty name those outside of functions.

    CPython 3.11 counts the depth of syntax trees of all threads together. So parsing may raise SystemError while another thread
    parses, and Hypothesis parses in threads that draw.
    """
    for _ in range(ATTEMPTS):
        try:
            return _parsed(file)
        except SystemError:
            time.sleep(PAUSE_S)
    return _parsed(file)


def _parsed(file: str) -> Mapping[str, frozenset[int]]:
    measured = coverage.Coverage(data_file=None, config_file=False, include=[file], messages=False)
    measured.exclude(RAISES)
    try:
        kernels = _kernels(ast.parse(pathlib.Path(file).read_bytes()))
        measured.get_data().add_lines({file: [1]})  # coverage reports only files in which something ran
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder) / "report.json"
            measured.json_report(morfs=[file], outfile=str(place))
            (report,) = json.loads(place.read_text())["files"].values()
    except (OSError, SyntaxError, ValueError, coverage.CoverageException):
        return {}
    return {
        name: frozenset([*function["executed_lines"], *function["missing_lines"]])
        for name, function in report["functions"].items()
        if function["start_line"] not in kernels
    }


def _kernels(tree: ast.AST) -> set[int]:
    """The lines at which functions begin that do not run as Python, from their first decorator on."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            words = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in _decorators(node)}
            if words & set(KERNELS):
                found |= {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
    return found


def _decorators(node: ast.FunctionDef) -> Iterator[ast.expr]:
    return (decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list)
