"""Imports modules of serving libraries (SGLang, vLLM, FlashInfer), of which often only the files are there, not the requirements.

`module("sglang.kernels.ops.attention.fla.chunk")` looks for the library on sys.path, then in the folder of `gdn-verify fetch`.

- If the library is installed with all its requirements and can be imported, its modules are imported as they are.
- Else its packages become namespace packages, so that no `__init__.py` runs, which would import half of the library. A few modules
  that have requirements are replaced by stubs (verify/adapters/stubs.py). Every other module is the library's own.

The library is prepared once in a process, when its first module is asked for. Nothing here runs when this module is imported, so a
worker may be a fork or a new process.
"""

import contextlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from verify.adapters.fla import decorating_later
from verify.adapters.interface import Lacking, Unavailable, signature_in
from verify.adapters.libraries import LIBRARIES, MANIFEST, Library

EXTRAS = ("einops", "msgspec", "regex")  # as in the extra `serving` of pyproject.toml
Stubs = Mapping[str, Mapping[str, Callable[[], Any]]]
_lock = threading.RLock()
_prepared: dict[str, bool] = {}  # the libraries that can be imported, and whether they need stubs


def module(name: str) -> types.ModuleType:
    """Import a module of a serving library by its full name, such as "sglang.kernels.ops.attention.fla.chunk".

    The name is that of the newest release; an older release may have the module by another name (`moved` of a library). ValueError
    if no library has such names. Lacking, in one line, if the library does not have the module, and Unavailable if the library is
    not there, or if importing the module fails.
    """
    library = _library(name)
    folder, name = _prepare(library), library.home(name)
    try:
        # Without this, torch.compile and its like would import torch's compiler, which takes seconds in each worker.
        with decorating_later() if _prepared[library.name] else contextlib.nullcontext():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == library.name:
            raise Lacking(_lacks(library, folder, error.name or name)) from None
        hint = f": pip install {error.name}" if error.name in (*EXTRAS, "transformers") else ""
        raise Unavailable(f"{name} needs the module {error.name}, which is not installed{hint}") from error
    except Exception as error:
        raise Unavailable(f"importing {name} from {folder} failed: {type(error).__name__}: {_one_line(error)}") from error


def names(wanted: Mapping[str, Sequence[str]]) -> types.SimpleNamespace:
    """Look up names in modules: `wanted` maps full names of modules to names in them.

    Returns a namespace with all the names. Lacking, in one line, says what is missing, and in which release.
    """
    found: dict[str, Any] = {}
    for place, members in wanted.items():
        source = module(place)
        for member in members:
            values = vars(source)["_values"] if isinstance(source, Stub) else None
            if not hasattr(source, member) or (values is not None and member not in values):
                library = _library(place)
                raise Lacking(_lacks(library, _prepare(library), f"{place}.{member}"))
            found[member] = getattr(source, member)
    return types.SimpleNamespace(**found)


def takes(place: str, parameter: str) -> bool:
    """Whether a function of a library has a parameter. `place` is `module:function`; nothing is imported.

    True for a function that is not there, so that a domain stays as it is and the call says what is missing.
    """
    name, _, function = place.partition(":")
    file = _file(name)
    found = None if file is None else signature_in(file, function)
    return found is None or parameter in found.parameters


def has_text(name: str, text: str) -> bool:
    """Whether the source of a module of a library has this text. False for a module that is not there. Nothing is imported."""
    file = _file(name)
    return file is not None and text in file.read_text(encoding="utf-8")


def _file(name: str) -> pathlib.Path | None:
    library = _library(name)
    file = pathlib.Path(library.folder() or "", *library.home(name).split(".")).with_suffix(".py")
    return file if file.is_file() else None


def uses_stubs() -> bool:
    """Whether a library is used without its requirements in this process."""
    return any(_prepared.values())


def _library(name: str) -> Library:
    top = name.partition(".")[0]
    if top not in LIBRARIES:
        raise ValueError(f"name must be a module of {', '.join(LIBRARIES)}, got {name!r}")
    return LIBRARIES[top]


def _prepare(library: Library) -> str:
    """Make the library importable, once in a process. Returns the folder that holds it. ImportError if there is none."""
    with _lock:
        folder = library.folder()
        if folder is None:
            raise Unavailable(library.missing())
        if library.name not in _prepared:
            if folder not in map(os.path.abspath, sys.path):
                sys.path.append(folder)
                importlib.invalidate_caches()
            # A module that is there already was imported by somebody else, and as it is.
            whole = library.name in sys.modules or (_complete(library, folder) and _importable(library))
            if not whole:
                from verify.adapters.stubs import STUBS

                sys.meta_path.insert(0, Finder(library.name, folder, STUBS[library.name], library.whole))
                for package in library.stands_for:
                    if importlib.util.find_spec(package) is None:
                        sys.meta_path.insert(0, Finder(package, folder, STUBS[package]))
            _prepared[library.name] = not whole
        return folder


def _complete(library: Library, folder: str) -> bool:
    """Whether the library is installed in the folder, and with every package that it requires."""
    if _is_fetched(folder):
        return False
    for found in importlib.metadata.distributions(name=library.distribution, path=[folder]):
        return all(map(_has_requirement, found.requires or ()))
    return False


def _is_fetched(folder: str) -> bool:
    """Whether `gdn-verify fetch` has unpacked a part of a library into the folder."""
    return os.path.exists(os.path.join(folder, MANIFEST))


def _has_requirement(text: str) -> bool:
    try:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            return True
        importlib.metadata.version(requirement.name)
    except (InvalidRequirement, importlib.metadata.PackageNotFoundError):
        return False
    return True


def _importable(library: Library) -> bool:
    """Whether the library's own packages can be imported on this host. If not, what was imported of them is forgotten."""
    try:
        for name in library.gates:
            importlib.import_module(name)
    except (Exception, SystemExit):
        for name in [*sys.modules]:
            if name.partition(".")[0] == library.name:
                del sys.modules[name]
        return False
    return True


def _lacks(library: Library, folder: str, what: str) -> str:
    version = library.release() or "of an unknown version"
    if _is_fetched(folder) and version == library.version:
        hint = f"`gdn-verify fetch` has only what runs without its requirements, pip install '{library.distribution}=={version}'"
    else:
        hint = f"the release that we tested is {library.version}"
    return f"there is no {what} in {library.name} {version} under {folder}: {hint}"


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


class Finder(importlib.abc.MetaPathFinder):
    """An import finder for one library. Its packages become namespace packages, and stubs replace some of its modules.

    `stubs` maps a module's name to the values of its names, as functions that compute them when they are first asked for.
    `whole` are packages that stay as they are: their `__init__.py` runs.
    """

    def __init__(self, library: str, folder: str, stubs: Stubs, whole: Collection[str] = ()) -> None:
        self.library, self.folder, self.stubs, self.whole = library, folder, stubs, whole

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """Find a package or a stub of the library. Python's other finders find its plain modules."""
        top, _, _ = name.partition(".")
        if top != self.library or name in self.whole:
            return None
        folders = [self.folder] if path is None else [*path]
        places = [place for folder in folders if _is_package(place := os.path.join(folder, name.rpartition(".")[2]))]
        holds_stubs = any(stub.startswith(f"{name}.") for stub in self.stubs)
        if name not in self.stubs and not places and not holds_stubs:
            return None
        loader = _Loader(self.stubs[name]) if name in self.stubs else None
        spec = ModuleSpec(name, loader, is_package=True)
        spec.submodule_search_locations = places
        return spec


def _is_package(place: str) -> bool:
    """Whether a folder is a package. Beside a module of the same name, only one with an `__init__.py` is."""
    return os.path.isdir(place) and (os.path.exists(os.path.join(place, "__init__.py")) or not os.path.exists(f"{place}.py"))


class Stub(types.ModuleType):
    """A module in place of a library's own. A name that it does not know becomes a class that cannot be used."""

    _values: Mapping[str, Callable[[], Any]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Triton's interpreter takes a module that has every name for a builtin
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        compute = self._values.get(name)
        value = unusable(f"{self.__name__}.{name}") if compute is None else compute()
        setattr(self, name, value)
        return value


def unusable(name: str) -> type:
    """A class in place of a name that nobody here uses. It may be a base class or an annotation; calling it raises an error."""

    def refuse(*_: object, **__: object) -> Any:
        raise Unavailable(f"{name} is a stub: {name.partition('.')[0]} is here without its requirements")

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__module__": name.rpartition(".")[0]})


class _Loader(importlib.abc.Loader):
    def __init__(self, values: Mapping[str, Callable[[], Any]]) -> None:
        self.values = values

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        stub = Stub(spec.name)
        vars(stub)["_values"] = self.values
        return stub

    def exec_module(self, module: types.ModuleType) -> None:
        """A stub has no code."""
