"""Adapters: one implementation made callable as an operation, and where adapters are found."""

import abc
import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
from typing import ClassVar

from torch import Tensor

from oracles.operation import Inputs
from properties.domain import Domain as Domain

ASKED = ("gated_delta_rule",)  # the operations that laws ask about; the others have an oracle only
CLASSES = ("chunkwise", "recurrent")
BUILT_IN = {
    "fla/chunk": "verify.adapters.fla:Chunk",
    "fla/fused_recurrent": "verify.adapters.fla:FusedRecurrent",
}


class Adapter(abc.ABC):
    """One implementation: signature and layout, no arithmetic, no tolerance.

    `algorithm` names the class whose rounding it may show: "chunkwise" (matrix products of operands in the inputs' dtype) or
    "recurrent" (float32 throughout); `chunk` is the tokens in its chunks, where they are always as many. `domain` is what it
    promises. `counterpart` is the adapter of its one-token form. `requires` are the distributions it needs, with the least
    version of each.
    """

    operation: str = "gated_delta_rule"
    algorithm: str = "chunkwise"
    chunk: int | None = None
    domain: Domain = Domain()
    counterpart: str | None = None
    requires: ClassVar[dict[str, str]] = {}

    @abc.abstractmethod
    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        """o [B, T, HV, V] and final_state [N, HV, K, V] (None if not asked for), differentiable where the domain says so.

        x has q, k [B, T, H, K], v [B, T, HV, V], g (log-decay), beta [B, T, HV], state [N, HV, K, V] or None, cu_seqlens
        [N + 1] or None, scale (None: K ** -0.5), qk_norm (L2-normalise q and k), output_final_state.
        """


class AdapterError(Exception):
    """An adapter cannot be had: unknown, not importable, or lacking a package. The message is one line with the choices."""


def load(spec: str) -> Adapter:
    """The adapter of a built-in name or of `file.py:Class`. AdapterError in one line if it cannot be had."""
    check_spec(spec)
    place, _, name = BUILT_IN.get(spec, spec).rpartition(":")
    try:
        if spec in BUILT_IN:
            module = importlib.import_module(place)
        else:
            path = pathlib.Path(place).resolve()
            found = importlib.util.spec_from_file_location(path.stem, path)
            assert found is not None and found.loader is not None, path
            module = importlib.util.module_from_spec(found)
            sys.path.insert(0, str(path.parent))  # so that the file may import its neighbours
            sys.modules.setdefault(path.stem, module)
            found.loader.exec_module(module)
    except Exception as error:
        raise AdapterError(f"adapter {spec}: importing {place} failed: {type(error).__name__}: {_first_line(error)}") from error
    made = getattr(module, name, None)
    if not (isinstance(made, type) and issubclass(made, Adapter)):
        names = [key for key, value in vars(module).items() if _is_adapter(value)]
        raise AdapterError(f"adapter {spec}: {place} has no Adapter called {name}; it has {', '.join(names) or 'none'}")
    return make(made, spec)


def _is_adapter(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Adapter) and value is not Adapter


def make(kind: type[Adapter], spec: str) -> Adapter:
    """An instance, its declarations checked. AdapterError names a wrong one and the choices."""
    try:
        adapter = kind()
    except Exception as error:
        raise AdapterError(f"adapter {spec}: {kind.__name__}() failed: {type(error).__name__}: {_first_line(error)}") from error
    for name, choices in (("operation", ASKED), ("algorithm", CLASSES)):
        if getattr(adapter, name) not in choices:
            raise AdapterError(f"adapter {spec}: {name} must be one of {', '.join(choices)}, got {getattr(adapter, name)!r}")
    if adapter.chunk is not None and not (isinstance(adapter.chunk, int) and 1 <= adapter.chunk <= 1024):
        raise AdapterError(f"adapter {spec}: chunk must be None or in 1..1024, got {adapter.chunk!r}")
    if not isinstance(adapter.domain, Domain):
        raise AdapterError(f"adapter {spec}: domain must be a Domain, got {adapter.domain!r}")
    if not all(isinstance(word, str) for item in adapter.requires.items() for word in item):
        raise AdapterError(f"adapter {spec}: requires must map distributions to least versions, as text, got {adapter.requires!r}")
    check_requirements(spec, adapter.requires)
    if adapter.counterpart is not None:
        try:
            check_spec(adapter.counterpart)
        except AdapterError as error:
            raise AdapterError(f"adapter {spec}: its counterpart: {error}") from None
    return adapter


def check_spec(spec: str) -> None:
    """Refuse a name that is no built-in adapter and no `file.py:Class`, without importing anything."""
    if spec in BUILT_IN:
        return
    place, colon, name = spec.rpartition(":")
    if not colon or not place.endswith(".py") or not name.isidentifier():
        raise AdapterError(f"unknown adapter {spec!r}; there are {', '.join(BUILT_IN)}, or your own as my_kernel.py:MyKernel")
    if any(space in spec for space in " \t\n"):
        raise AdapterError(f"adapter {spec!r} must not contain spaces: it is a word of the line that repeats a run")
    if not pathlib.Path(place).is_file():
        raise AdapterError(f"adapter {spec}: there is no file {place}")


def check_requirements(spec: str, requires: dict[str, str]) -> None:
    """Refuse when a distribution is missing or too old, and say what to install."""
    for name, least in requires.items():
        got = installed(name)
        if got is None:
            raise AdapterError(f"adapter {spec} needs {name} >= {least}, which is not installed: pip install '{name}>={least}'")
        if _numbers(got) < _numbers(least):
            raise AdapterError(f"adapter {spec} needs {name} >= {least}, got {got}: pip install '{name}>={least}'")


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(adapter: Adapter) -> str:
    """The versions a finding depends on, in one line."""
    names = dict.fromkeys((*adapter.requires, "torch"))
    return " ".join(f"{name} {version}" for name in names if (version := installed(name)))


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:300]
