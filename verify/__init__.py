"""Who is checked, where and how. docs/map.md says what is in which package, and the order in which they may import each other."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from properties.domain import Domain as Domain
    from properties.layer_domain import LayerDomain as LayerDomain
    from properties.module_domain import ModuleDomain as ModuleDomain
    from properties.path_domain import PathDomain as PathDomain
    from properties.pool_domain import PoolDomain as PoolDomain
    from verify.adapters.base import Adapter as Adapter
    from verify.adapters.base import PathAdapter as PathAdapter

__version__ = "0.1.0"
__all__ = ["Adapter", "Domain", "LayerDomain", "ModuleDomain", "PathAdapter", "PathDomain", "PoolDomain"]

_PLACES = {
    "Adapter": "verify.adapters.base",
    "Domain": "properties.domain",
    "LayerDomain": "properties.layer_laws",
    "ModuleDomain": "properties.module_laws",
    "PathAdapter": "verify.adapters.base",
    "PathDomain": "properties.path_laws",
    "PoolDomain": "properties.pool_laws",
}


def __getattr__(name: str) -> Any:
    """The adapters' classes on first use: the pytest plugin lives here too, and must not import torch into foreign suites."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
