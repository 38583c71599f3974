"""The public names of gdn-verify: adapters, domains and `watch`. docs/map.md lists the packages and which may import which."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from properties.calls.domain import CallDomain as CallDomain
    from properties.layers.domain import LayerDomain as LayerDomain
    from properties.modules.domain import ModuleDomain as ModuleDomain
    from properties.paths.domain import PathDomain as PathDomain
    from properties.pools.domain import PoolDomain as PoolDomain
    from properties.rules.domain import Domain as Domain
    from properties.traces.domain import TraceDomain as TraceDomain
    from verify.adapters.array_adapter import ArrayAdapter as ArrayAdapter
    from verify.adapters.base import Adapter as Adapter
    from verify.adapters.base import Engine as Engine
    from verify.adapters.base import PathAdapter as PathAdapter
    from verify.adapters.base import TraceAdapter as TraceAdapter
    from verify.adapters.c_library import CLibrary as CLibrary
    from verify.adapters.files_adapter import FilesAdapter as FilesAdapter
    from verify.adapters.onnx_adapter import OnnxAdapter as OnnxAdapter
    from verify.adapters.process_adapter import ProcessAdapter as ProcessAdapter
    from verify.adapters.watch import watch as watch

__version__ = "0.1.0"
_PLACES = {
    "Adapter": "verify.adapters.base",
    "ArrayAdapter": "verify.adapters.array_adapter",
    "CLibrary": "verify.adapters.c_library",
    "CallDomain": "properties.calls.domain",
    "Domain": "properties.rules.domain",
    "Engine": "verify.adapters.base",
    "FilesAdapter": "verify.adapters.files_adapter",
    "LayerDomain": "properties.layers.domain",
    "ModuleDomain": "properties.modules.domain",
    "OnnxAdapter": "verify.adapters.onnx_adapter",
    "PathAdapter": "verify.adapters.base",
    "PathDomain": "properties.paths.domain",
    "PoolDomain": "properties.pools.domain",
    "ProcessAdapter": "verify.adapters.process_adapter",
    "TraceAdapter": "verify.adapters.base",
    "TraceDomain": "properties.traces.domain",
    "watch": "verify.adapters.watch",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    """Import a public class on first use. Every pytest run loads the plugin in this package, and must not import torch for it."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
