"""Finds the attributes of an adapter that look like misspelt declarations. A misspelt one would be ignored in silence.

An author may add attributes and methods to an adapter, such as the block sizes of a kernel. If a name is near that of a
declaration, it must begin with an underscore.
"""

import dataclasses
import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from oracles import PRODUCTS
from oracles.operations import OPERATIONS
from properties.books import BOOKS
from verify.adapters.array_adapter import ArrayAdapter
from verify.adapters.base import Adapter, Implementation, PathAdapter, TraceAdapter
from verify.adapters.c_library import CLibrary
from verify.adapters.files_adapter import FilesAdapter
from verify.adapters.onnx_adapter import OnnxAdapter
from verify.adapters.process_adapter import ProcessAdapter

CLOSE_FIELD = 0.85  # a field of the domain has a short name such as `scale`, and an author's own attribute may be `stale`
CLOSE = 0.75  # `chunks`, `folded` and `counter_part` are this close to what was meant, `blocks` is to nothing
FOREIGN = (ArrayAdapter, CLibrary, FilesAdapter, OnnxAdapter, ProcessAdapter)
BASES = (Adapter, PathAdapter, TraceAdapter)
CALLABLE = (types.FunctionType, classmethod, staticmethod)


def misspelt(adapter: Implementation) -> str | None:
    """What is wrong with the first attribute that looks like a misspelt declaration, in words; None if none does.

    An attribute is suspicious if its public name is not that of a declaration, and one of the following holds:

    - Its name is close to that of a declaration or method of this kind of adapter, or equal to that of another kind.
    - Its name is that of a field of the domain, or close to it if it is an attribute of a class.
    - It is a number or a flag, and its name contains that of a declaration.
    - Only a declaration has such a value: a domain, a class of algorithm, a kind of product, versions of packages.

    It is not suspicious if the same class also sets the declaration that was meant, or if another value hides it.
    """
    kind: type[Implementation] = next(kind for kind in (*FOREIGN, *BASES) if isinstance(adapter, kind))
    known = _public(kind)
    hidden = {*known, "operation"}
    for place, names in _written(adapter, kind):
        for name, value in names.items():
            meant = None if name.startswith("_") or name in hidden else _meant(adapter, kind, name, value, names)
            if meant is not None:
                text = f"{name}()" if isinstance(value, CALLABLE) else f"{name} = {' '.join(repr(value).split())[:80]}"
                return f"{place} has {text}; {meant}, or _{name} if it is a helper"
        hidden |= names.keys()
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
    near = _nearest(name, fields, CLOSE_FIELD)
    if near is None or (near == name and fields[near] == value):
        return None
    if near != name and (near in beside or beside is vars(adapter)):  # what an instance holds may have any such name
        return None
    return f"did you mean {near} of its domain, {type(adapter.domain).__name__}({near}=...)?"


def _question(name: str, names: Iterable[str], beside: Mapping[str, Any]) -> str | None:
    near = _nearest(name, names)
    return None if near is None or near in beside else f"did you mean {near}?"


def _nearest(name: str, names: Iterable[str], close: float = CLOSE) -> str | None:
    """The name that is close to another one, where case and underscores do not count.

    Both begin with the same letter: `most` is a usual name, and no misspelt `cost`.
    """
    asked = name.replace("_", "").lower()
    plain = {other.replace("_", "").lower(): other for other in names}
    near = difflib.get_close_matches(asked, [other for other in plain if other[:1] == asked[:1]], 1, close)
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
