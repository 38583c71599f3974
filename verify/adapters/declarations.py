"""Finds the attributes of an adapter that look like misspelt declarations. A misspelt one would be ignored in silence.

An author may add attributes and methods to an adapter, such as the block sizes of a kernel. They differ from misspelt declarations
in that the author's code reads them.
"""

import ast
import dataclasses
import difflib
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from oracles import PRODUCTS
from oracles.operations import OPERATIONS
from properties.books import BOOKS
from verify.adapters.base import Adapter, Implementation, PathAdapter, TraceAdapter

CLOSE = 0.75  # `chunks`, `folded` and `counter_part` are this close to what was meant, `blocks` is to nothing
BASES = (Adapter, PathAdapter, TraceAdapter)
CALLABLE = (types.FunctionType, classmethod, staticmethod)


def misspelt(adapter: Implementation, file: str = "") -> str | None:
    """What is wrong with the first attribute that looks like a misspelt declaration, in words; None if none does.

    An attribute is suspicious if its public name is not that of a declaration, no code in the files of its classes reads it, and
    one of the following holds:

    - Its name is close to that of a declaration or method of this kind of adapter, or equal to that of another kind.
    - Its name is close to that of a field of the domain.
    - It is a number or a flag, and its name contains that of a declaration.
    - Only a declaration has such a value: a domain, a class of algorithm, a kind of product, versions of packages.

    It is not suspicious if the same class also sets the declaration that was meant. `file` is the file that the adapter is loaded
    from, or empty.
    """
    kind: type[Implementation] = next(kind for kind in BASES if isinstance(adapter, kind))
    known = _public(kind)
    reads: set[str] | None = None
    for place, names in _written(adapter, kind):
        for name, value in names.items():
            meant = None if name.startswith("_") or name in {*known, "operation"} else _meant(adapter, kind, name, value, names)
            if meant is None:
                continue
            reads = _reads(_files(adapter, file)) if reads is None else reads
            if name not in reads:
                text = f"{name}()" if isinstance(value, CALLABLE) else f"{name} = {' '.join(repr(value).split())[:80]}"
                return f"{place} has {text}, which nothing reads; {meant}, or _{name} if it is a helper"
    return None


def _public(kind: type) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


def _written(adapter: Implementation, kind: type) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The attributes that the author wrote: those of the instance, then those of each class below the kind."""
    yield type(adapter).__name__, vars(adapter)
    for base in type(adapter).__mro__:
        if base not in kind.__mro__:
            yield base.__name__, vars(base)


def _meant(adapter: Any, kind: type, name: str, value: Any, beside: Mapping[str, Any]) -> str | None:
    """What the author may have meant by an unknown attribute, as a question; None if it is nothing that we know."""
    known = _public(kind)
    methods = [other for other, default in known.items() if callable(default)]
    if isinstance(value, CALLABLE):
        return _question(name, methods, beside)
    if isinstance(value, type | types.ModuleType) or callable(value):
        return None
    settings = [other for other in known if other not in methods]
    if question := _question(name, settings, beside) or _by_word(name, value, settings, beside) or _by_value(value, beside):
        return question
    if strange := next((other for other in BASES if name in _public(other)), None):
        return f"only {strange.__name__} has it, and this is {kind.__name__}: leave it out"
    fields = {field.name: getattr(adapter.domain, field.name) for field in dataclasses.fields(adapter.domain)}
    near = _nearest(name, fields)
    if near is None or (near == name and fields[near] == value) or (near != name and near in beside):
        return None
    return f"did you mean {near} of its domain, {type(adapter.domain).__name__}({near}=...)?"


def _question(name: str, names: Iterable[str], beside: Mapping[str, Any]) -> str | None:
    near = _nearest(name, names)
    return None if near is None or near in beside else f"did you mean {near}?"


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that is close to another one, where case and underscores do not count."""
    plain = {other.replace("_", "").lower(): other for other in names}
    near = difflib.get_close_matches(name.replace("_", "").lower(), plain, 1, CLOSE)
    return plain[near[0]] if near else None


def _by_word(name: str, value: object, settings: Iterable[str], beside: Mapping[str, Any]) -> str | None:
    """The question for a number or a flag whose name contains that of a declaration, such as `chunk_size` or `stores_keys`."""
    words = {word.rstrip("s") for word in name.lower().split("_")} if isinstance(value, int) else set()
    return next((f"did you mean {other}?" for other in settings if other.rstrip("s") in words and other not in beside), None)


def _by_value(value: object, beside: Mapping[str, Any]) -> str | None:
    classes = {algorithm for operation in OPERATIONS.values() for algorithm in operation.classes}
    shapes = {
        "domain": isinstance(value, tuple(book.domain for book in BOOKS)),
        "algorithm": isinstance(value, str) and value in classes,
        "products": isinstance(value, str) and value in PRODUCTS,
        "requires": isinstance(value, Mapping) and bool(value) and all(_is_version(*item) for item in value.items()),
    }
    return next((f"did you mean {name}?" for name, fits in shapes.items() if fits and name not in beside), None)


def _is_version(package: object, version: object) -> bool:
    return isinstance(package, str) and isinstance(version, str) and version[:1].isdigit() and "." in version


def _files(adapter: Implementation, file: str) -> Iterator[str]:
    """The source files of an adapter's classes."""
    yield file
    for kind in type(adapter).__mro__:
        if kind.__module__ != "builtins":
            yield getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
            yield from (value.__code__.co_filename for value in vars(kind).values() if isinstance(value, types.FunctionType))


def _reads(files: Iterable[str]) -> set[str]:
    """The names that Python files read as attributes of an adapter or of a class, as text, or in the body of a class.

    If a method passes its `self` on, the attributes of all objects count, because any of them may be the adapter.
    """
    names: set[str] = set()
    for file in dict.fromkeys(files):
        try:
            tree = ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        nodes = list(ast.walk(tree))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        methods = [node for kind in classes for node in kind.body if isinstance(node, ast.FunctionDef)]
        own = {argument.arg for method in methods for argument in method.args.args[:1]} | {kind.name for kind in classes}
        calls = [node for node in nodes if isinstance(node, ast.Call) and not _is(node.func, {"type", "super", "getattr"})]
        escapes = any(_is(value, own) for call in calls for value in [*call.args, *(word.value for word in call.keywords)])
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (escapes or not _is_other(node.value, own)):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
        names |= {name for kind in classes for name in _read_in_body(kind.body)}
    return names


def _is(node: ast.expr, names: Iterable[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_other(node: ast.expr, own: Iterable[str]) -> bool:
    """Whether an expression is surely no adapter: a name that is no `self` and no class, or a part of such an object."""
    if isinstance(node, ast.Attribute):
        return node.attr != "__class__"
    return not _is(node, own) and not (isinstance(node, ast.Call) and _is(node.func, {"type", "super"}))


def _read_in_body(body: Sequence[ast.stmt]) -> set[str]:
    """The names that the statements of a class read, without the bodies of its methods."""
    parts: list[ast.AST] = []
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            parts += [*statement.decorator_list, *statement.args.defaults, *filter(None, statement.args.kw_defaults)]
        else:
            parts.append(statement)
    nodes = (node for part in parts for node in ast.walk(part))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
