"""Where in the user's repository a broken law is shown: a file below the working directory, and a line.

Files are read and never imported.
"""

import ast
import functools
import pathlib
from collections.abc import Iterator, Mapping

from verify.findings.records.entries import Entry
from verify.findings.records.record import Record

Place = tuple[str, int]


def place_of(record: Record, entry: Entry) -> Place | None:
    """The file, relative to the working directory, and the line of an entry; None if its code is somewhere else.

    It is the line that raised or raced; or else the function under test; or else the class or the method `run` of the adapter.
    """
    findings = entry.report.findings if entry.report is not None else []
    for finding in findings:
        if found := _source(finding.source):
            return found
    return (findings and _function(record)) or _adapter(record.head.adapter) or None


def _source(source: str) -> Place | None:
    file, _, line = source.rpartition(":")
    path = _inside(pathlib.Path(file)) if file else None
    return (path, int(line)) if path and line.isdecimal() else None


def _function(record: Record) -> Place | None:
    """Where the function under test is defined, as the record's end names it."""
    beside = pathlib.Path(record.head.adapter.rpartition(":")[0]).parent
    for function in record.end.reach.functions if record.end is not None else ():
        module, _, name = function.partition(":")
        file = pathlib.Path(*module.split("."))
        for root in (beside, pathlib.Path(), pathlib.Path("src")):
            for path in (root / file.with_suffix(".py"), root / file / "__init__.py"):
                inside = _inside(path)
                if inside and (line := _definitions(inside).get(name)):
                    return inside, line
    return None


def _adapter(spec: str) -> Place | None:
    """Where an adapter of the user's own has its method `run`, or its class. None for a built-in adapter."""
    file, _, name = spec.rpartition(":")
    path = _inside(pathlib.Path(file)) if file.endswith(".py") else None
    if path is None:
        return None
    lines = _definitions(path)
    return path, lines.get(f"{name}.run") or lines.get(name) or 1


def _inside(file: pathlib.Path) -> str | None:
    """The path of a file relative to the working directory, or None if the file is not there."""
    try:
        return file.resolve().relative_to(pathlib.Path.cwd().resolve()).as_posix() if file.is_file() else None
    except (OSError, ValueError):
        return None


@functools.lru_cache(64)
def _definitions(file: str) -> Mapping[str, int]:
    """The lines of the functions, the classes and their methods in a file; none if it cannot be read."""
    try:
        tree = ast.parse(pathlib.Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}
    return dict(_named(tree, ""))


def _named(tree: ast.AST, outer: str) -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{outer}{node.name}", node.lineno
            yield from _named(node, f"{outer}{node.name}.")
