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

from verify.process.reach import Arc

# Decorators of functions that do not run as Python, but are compiled: those of Triton, Gluon, CuTe and Helion.
KERNELS = ("jit", "kernel")
ATTEMPTS, PAUSE_S = 50, 0.1  # to parse a file
# Lines that raise do not count as lines that never ran, because every case is a legal call.
RAISES = r"^\s*raise\b"


@dataclasses.dataclass(frozen=True)
class Statements:
    """A function of Python of which something ran.

    - `ran` and `unrun` are its lines that ran, and those that never ran.
    - `alike`: lines such as that of an `if`, which can be followed by several lines and were always followed by the same one.
    """

    function: str
    file: str
    ran: tuple[int, ...]
    unrun: tuple[int, ...]
    alike: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether everything ran."""
        return not self.unrun and not self.alike

    def __str__(self) -> str:
        """What did not run, such as "chunk_fwd (fla/ops/chunk.py:51-60,72 and one way only at 80)"."""
        words = [ranges(self.unrun)] if self.unrun else []
        words += [f"one way only at {ranges(self.alike)}"] if self.alike else []
        return f"{self.function} ({self.file}:{' and '.join(words)})"

    def to_json(self) -> dict[str, str]:
        """Plain data: the lines as text."""
        return {"ran": ranges(self.ran), "never_ran": ranges(self.unrun), "one_way": ranges(self.alike)}


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function in a file: its lines that are statements, and its branches, as pairs of lines."""

    name: str
    lines: frozenset[int]
    branches: frozenset[Arc]


def statements(arcs: Mapping[str, Collection[Arc]]) -> list[Statements]:
    """The functions of which something ran, in the order of files and lines. Files that cannot be read are left out."""
    return [found for file, pairs in sorted(arcs.items()) for found in _of_file(file, pairs)]


def ranges(lines: Iterable[int]) -> str:
    """Lines in a short form: "51-60,72"."""
    parts: list[list[int]] = []
    for line in sorted(lines):
        if parts and line == parts[-1][-1] + 1:
            parts[-1][1:] = [line]
        else:
            parts.append([line])
    return ",".join("-".join(map(str, part)) for part in parts)


def _of_file(file: str, arcs: Collection[Arc]) -> Iterator[Statements]:
    functions = _functions(file)
    first = sorted(line for function in functions for line in function.lines)

    def statement(line: int) -> int:
        """The line with which the statement of a line begins. The exit of a function is the negative of its first line."""
        place = bisect.bisect_right(first, line)
        return first[place - 1] if line > 0 and place else line

    found = {(statement(before), statement(after)) for before, after in arcs}
    ran = {line for arc in found for line in arc}
    with_arcs = any(before for before, _ in found)
    for function in functions:
        if not function.name or not function.lines & ran:
            continue
        unrun = function.lines - ran
        # A branch to a line that never ran is in `unrun`. A line of which no branch is known was left by an exception.
        decided = {before for before, _ in function.branches & found}
        alike = {before for before, after in function.branches - found if before in decided and after not in unrun}
        yield Statements(
            function.name,
            _short(file),
            tuple(sorted(function.lines & ran)),
            tuple(sorted(unrun)),
            tuple(sorted(alike if with_arcs else ())),
        )


@functools.lru_cache(64)
def _functions(file: str) -> tuple[_Function, ...]:
    """The functions of a file that run as Python, and with an empty name what is outside of functions.

    CPython 3.11 counts the depth of syntax trees of all threads together. So parsing may raise SystemError while another thread
    parses, and Hypothesis parses in threads that draw.
    """
    for _ in range(ATTEMPTS):
        try:
            return _parsed(file)
        except SystemError:
            time.sleep(PAUSE_S)
    return _parsed(file)


def _parsed(file: str) -> tuple[_Function, ...]:
    measured = coverage.Coverage(data_file=None, config_file=False, branch=True, include=[file], messages=False)
    measured.exclude(RAISES)
    try:
        kernels = _kernels(ast.parse(pathlib.Path(file).read_bytes()))
        measured.get_data().add_arcs({file: [(-1, 1)]})  # coverage reports only files in which something ran
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder) / "report.json"
            measured.json_report(morfs=[file], outfile=str(place))
            (report,) = json.loads(place.read_text())["files"].values()
    except (OSError, SyntaxError, ValueError, coverage.CoverageException):
        return ()
    return tuple(
        _Function(
            name,
            frozenset([*function["executed_lines"], *function["missing_lines"]]),
            frozenset((before, after) for before, after in [*function["executed_branches"], *function["missing_branches"]]),
        )
        for name, function in report["functions"].items()
        if function["start_line"] not in kernels
    )


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


def _short(file: str) -> str:
    """The path of a file, from its package or from the working directory on."""
    parts = pathlib.Path(file).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    try:
        return pathlib.Path(file).relative_to(pathlib.Path.cwd()).as_posix()
    except ValueError:
        return file
