"""What a function of an installed package takes, read from its source. Nothing is imported, so reading takes milliseconds."""

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import pathlib
import textwrap
import types
import typing


class Unavailable(ImportError):
    """A library, a module of it, or a name in a module is not there. A case that needs it gets no verdict."""


class Lacking(Unavailable):
    """The release that is here does not have what the adapter calls. A case that needs it is unsupported."""


class Unsupported(Exception):
    """The implementation refuses a call, although its domain has the call. The case is not judged."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function as its source shows it: the names of its parameters, its documentation, and the names of what it calls.

    Names that the function reads from its `**` argument are parameters too.
    """

    parameters: frozenset[str]
    doc: str
    calls: frozenset[str] = frozenset()


@functools.cache
def signature(place: str) -> Signature | None:
    """The signature of `package.module:function`, or None if there is no such package, module or function."""
    module, _, name = place.partition(":")
    file = source(module)
    return None if file is None else signature_in(file, name)


def signature_in(file: pathlib.Path, name: str) -> Signature | None:
    """The signature of a function of a file, or None if the file has no such function."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return Signature(_parameters(node), ast.get_docstring(node) or "", _calls(node))
    return None


def source(module: str) -> pathlib.Path | None:
    """The file of a module of a package, or None if there is no such file."""
    package, *parts = module.split(".")
    found = None
    with contextlib.suppress(ValueError):  # a module that was made by hand has no spec
        found = importlib.util.find_spec(package)
    folders = (found.submodule_search_locations or ()) if found is not None and parts else ()
    files = (pathlib.Path(folder, *parts).with_suffix(".py") for folder in folders)
    return next((file for file in files if file.is_file()), None)


def has_text(module: str, text: str) -> bool:
    """Whether the source of a module of a package has this text. False if there is no such module."""
    file = source(module)
    return file is not None and text in file.read_text(encoding="utf-8")


@functools.cache
def parameters_of(function: types.FunctionType) -> frozenset[str]:
    """The names of the parameters of a function, with those that it reads from its `**` argument or that an annotation of it has.

    Such an annotation is Unpack[...] of a TypedDict. Without the source only the others are known.
    """
    known = inspect.signature(function).parameters
    rest = next((name for name, one in known.items() if one.kind is one.VAR_KEYWORD), None)
    names = {name for name, one in known.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    if rest is not None:
        with contextlib.suppress(OSError, SyntaxError, TypeError):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
            names |= _parameters(node) if isinstance(node, ast.FunctionDef) else set()
        with contextlib.suppress(Exception):  # an annotation is text that nobody needs to understand
            annotation = typing.get_type_hints(function).get(rest)
            if typing.get_origin(annotation) is typing.Unpack:
                names |= typing.get_args(annotation)[0].__annotations__.keys()
    return frozenset(names)


def _parameters(function: ast.FunctionDef) -> frozenset[str]:
    arguments = function.args
    names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    if arguments.kwarg is not None:
        names |= {name for node in ast.walk(function) if (name := _read_from(arguments.kwarg.arg, node))}
    return frozenset(names)


def _calls(function: ast.FunctionDef) -> frozenset[str]:
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = [getattr(target, "attr", getattr(target, "id", "")) for target in called]
    return frozenset(name for name in names if name)


def _read_from(mapping: str, node: ast.AST) -> str:
    """The name that `mapping.get("name")` or `mapping.pop("name")` reads, or ""."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=owner), attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]
        ) if owner == mapping:
            return name
    return ""
