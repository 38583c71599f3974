"""Loads an adapter by its built-in name, by its name in the zoo, or from a class in a file, and checks its declarations."""

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from oracles import PRODUCTS
from oracles.operations import OPERATIONS
from properties.books import BOOKS
from properties.paths.domain import PathDomain
from properties.traces.domain import TraceDomain
from properties.words.sizes import LARGEST_CHUNK, MOST
from verify.adapters.base import Adapter, Implementation, PathAdapter, TraceAdapter
from verify.adapters.declarations import FOREIGN, misspelt
from verify.adapters.files_adapter import judged_by
from verify.adapters.foreign import ForeignAdapter
from verify.adapters.interface import Unavailable
from verify.adapters.libraries import BY_DISTRIBUTION
from verify.adapters.packages import installed
from verify.adapters.registry import ANSWERS, BUILT_IN, ZOO, ZOO_PLACE, AdapterError, check_spec, unknown_animal

AnyAdapter = Adapter | PathAdapter | TraceAdapter
Kind = type[Adapter] | type[PathAdapter] | type[TraceAdapter]


def load(spec: str) -> AnyAdapter:
    """Load an adapter by its built-in name, as an animal of the zoo, or as `file.py:Class`. AdapterError if that fails."""
    check_spec(spec)
    if spec.startswith(ZOO):
        animals = _animals(spec)
        if spec not in animals:
            raise AdapterError(unknown_animal(spec))
        return make(animals[spec], spec)
    if spec.startswith(ANSWERS):
        return make(judged_by(spec), spec)
    place, _, name = BUILT_IN.get(spec, spec).rpartition(":")
    try:
        if spec in BUILT_IN:
            module = importlib.import_module(place)
        else:
            path = pathlib.Path(place).resolve()
            found = importlib.util.spec_from_file_location(path.stem, path)
            assert found is not None and found.loader is not None, path
            module = importlib.util.module_from_spec(found)
            sys.path.insert(0, str(path.parent))  # the file may import its neighbours
            sys.modules.setdefault(path.stem, module)
            found.loader.exec_module(module)
    except Exception as error:
        raise AdapterError(f"adapter {spec}: importing {place} failed: {type(error).__name__}: {_first_line(error)}") from error
    kind: Any = getattr(module, name, None)
    if not _is_adapter(kind):
        names = [key for key, value in vars(module).items() if _is_adapter(value)]
        raise AdapterError(f"adapter {spec}: {place} has no Adapter called {name}; it has {', '.join(names) or 'none'}")
    return make(kind, spec)


def _animals(spec: str) -> Mapping[str, Kind]:
    module, _, name = ZOO_PLACE.partition(":")
    try:
        found: Mapping[str, Kind] = getattr(importlib.import_module(module), name)()
        return found
    except Exception as error:
        raise AdapterError(f"adapter {spec}: the zoo cannot be imported: {type(error).__name__}: {_first_line(error)}") from error


def _is_adapter(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, AnyAdapter) and value not in (*AnyAdapter.__args__, *FOREIGN)


def make(kind: Kind, spec: str) -> AnyAdapter:
    """Create an instance and check its declarations. AdapterError names the first wrong declaration and the choices."""
    try:
        adapter = kind()
    except Unavailable as error:
        raise AdapterError(f"adapter {spec}: {_first_line(error)}") from error
    except Exception as error:
        raise AdapterError(f"adapter {spec}: {kind.__name__}() failed: {type(error).__name__}: {_first_line(error)}") from error
    if (
        isinstance(adapter, Adapter | TraceAdapter)
        and adapter.chunk is not None
        and not (isinstance(adapter.chunk, int) and 1 <= adapter.chunk <= LARGEST_CHUNK)
    ):
        raise AdapterError(f"adapter {spec}: chunk must be None or in 1..{LARGEST_CHUNK}, got {adapter.chunk!r}")
    bases = {PathDomain: PathAdapter, TraceDomain: TraceAdapter}  # the domains of which only one kind of adapter has one
    kinds: list[Any] = [book.domain for book in BOOKS if isinstance(adapter, bases.get(book.domain, Adapter))]
    if not isinstance(adapter.domain, tuple(kinds)):
        names = " or a ".join(domain.__name__ for domain in kinds)
        raise AdapterError(f"adapter {spec}: domain must be a {names}, got {adapter.domain!r}")
    domain: Any = adapter.domain
    does: str = domain.operation
    if (operation := getattr(adapter, "operation", does)) != does:
        raise AdapterError(f"adapter {spec}: operation is {operation!r}, but its domain has {does}: set it in the domain alone")
    if does in OPERATIONS and adapter.algorithm not in OPERATIONS[does].classes:
        choices = ", ".join(OPERATIONS[does].classes)
        raise AdapterError(f"adapter {spec}: algorithm must be one of {choices} for {does}, got {adapter.algorithm!r}")
    if adapter.products not in PRODUCTS:
        raise AdapterError(f"adapter {spec}: products must be one of {', '.join(PRODUCTS)}, got {adapter.products!r}")
    if isinstance(adapter, Adapter) and adapter.compiles not in (True, False):
        raise AdapterError(f"adapter {spec}: compiles must be True or False, got {adapter.compiles!r}")
    if isinstance(adapter, Adapter) and adapter.cost is not None and adapter.cost not in MOST:
        raise AdapterError(f"adapter {spec}: cost must be None or one of {', '.join(MOST)}, got {adapter.cost!r}")
    for name, wanted in {"folds": "chunkwise", "stores": "recurrent"}.items():
        if isinstance(adapter, Adapter) and getattr(adapter, name) and adapter.algorithm != wanted:
            raise AdapterError(f"adapter {spec}: {name} must be False unless algorithm is {wanted}, which is {adapter.algorithm!r}")
    if isinstance(adapter, Adapter) and adapter.rounds_products and (does != "causal_conv1d" or domain.backward):
        raise AdapterError(f"adapter {spec}: rounds_products must be False unless its domain is a convolution with backward=False")
    if not all(isinstance(word, str) for item in adapter.requires.items() for word in item):
        raise AdapterError(f"adapter {spec}: requires must map distributions to least versions, as text, got {adapter.requires!r}")
    for name, least in adapter.requires.items():
        if not is_version(least):
            raise AdapterError(f"adapter {spec}: requires must name a version of {name} such as 1.2.0, got {least!r}")
    if isinstance(adapter, ForeignAdapter) and (wrong := adapter._wrong_declaration()):
        raise AdapterError(f"adapter {spec}: {wrong}")
    if wrong := misspelt(adapter):
        raise AdapterError(f"adapter {spec}: {wrong}")
    if not (adapter.api is None or callable(adapter.api) or (isinstance(adapter.api, str) and adapter.api.count(":") == 1)):
        raise AdapterError(
            f"adapter {spec}: api must be a function, a class or text such as package.module:name, got {adapter.api!r}"
        )
    if not (
        isinstance(adapter.omits, Mapping)
        and all(isinstance(word, str) and word for item in adapter.omits.items() for word in item)
    ):
        raise AdapterError(f"adapter {spec}: omits must map names of parameters to reasons, as text, got {adapter.omits!r}")
    check_requirements(spec, adapter.requires)
    if isinstance(adapter, Adapter) and adapter.counterpart is not None:
        try:
            check_spec(adapter.counterpart)
        except AdapterError as error:
            raise AdapterError(f"adapter {spec}: its counterpart: {error}") from None
    return adapter


def check_requirements(spec: str, requires: dict[str, str]) -> None:
    """Raise AdapterError, with the command that installs it, if a distribution is missing or too old."""
    for name, least in requires.items():
        got, library = installed(name), BY_DISTRIBUTION.get(name)
        if got is None and library is not None:
            if library.folder() is None:
                raise AdapterError(f"adapter {spec}: {library.missing()}")
            continue  # a checkout says no version
        if got is None:
            raise AdapterError(f"adapter {spec} needs {name} >= {least}, which is not installed: pip install '{name}>={least}'")
        if not at_least(got, least):
            raise AdapterError(f"adapter {spec} needs {name} >= {least}, got {got}: pip install '{name}>={least}'")


def is_version(text: str) -> bool:
    """Whether a text is a version as packages have them (PEP 440)."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def at_least(got: str, least: str) -> bool:
    """Whether a version is at least another. A development build of a release counts as that release, what is none as too old."""
    try:
        return Version(Version(got).base_version) >= Version(least)
    except InvalidVersion:
        return False


def versions(adapter: Implementation) -> str:
    """The installed versions of the adapter's packages and of torch, in one line. A finding depends on them."""
    names = dict.fromkeys((*adapter.requires, "torch"))
    return " ".join(f"{name} {version}" for name in names if (version := installed(name)))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:300]
