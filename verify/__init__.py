"""The public classes of gdn-verify: adapters and domains. docs/map.md lists the packages and which may import which."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from properties.call_domain import CallDomain as CallDomain
    from properties.domain import Domain as Domain
    from properties.layer_domain import LayerDomain as LayerDomain
    from properties.module_domain import ModuleDomain as ModuleDomain
    from properties.path_domain import PathDomain as PathDomain
    from properties.pool_domain import PoolDomain as PoolDomain
    from properties.trace_domain import TraceDomain as TraceDomain
    from verify.adapters.base import Adapter as Adapter
    from verify.adapters.base import Engine as Engine
    from verify.adapters.base import PathAdapter as PathAdapter
    from verify.adapters.base import TraceAdapter as TraceAdapter

__version__ = "0.1.0"
__all__ = [
    *(
        "Adapter",
        "CallDomain",
        "Domain",
        "Engine",
        "LayerDomain",
        "ModuleDomain",
        "PathAdapter",
        "PathDomain",
        "PoolDomain",
        "TraceAdapter",
    ),
    "TraceDomain",
]

_PLACES = {
    "Adapter": "verify.adapters.base",
    "CallDomain": "properties.call_domain",
    "Domain": "properties.domain",
    "Engine": "verify.adapters.base",
    "LayerDomain": "properties.layer_domain",
    "ModuleDomain": "properties.module_domain",
    "PathAdapter": "verify.adapters.base",
    "PathDomain": "properties.path_domain",
    "PoolDomain": "properties.pool_domain",
    "TraceAdapter": "verify.adapters.base",
    "TraceDomain": "properties.trace_domain",
}


def __getattr__(name: str) -> Any:
    """Import a public class on first use. Every pytest run loads the plugin in this package, and must not import torch for it."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
