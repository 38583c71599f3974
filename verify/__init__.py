"""The public classes of gdn-verify: adapters and domains. docs/map.md lists the packages and which may import which."""

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
    "LayerDomain": "properties.layer_domain",
    "ModuleDomain": "properties.module_domain",
    "PathAdapter": "verify.adapters.base",
    "PathDomain": "properties.path_domain",
    "PoolDomain": "properties.pool_domain",
}


def __getattr__(name: str) -> Any:
    """Import a public class on first use. Every pytest run loads the plugin in this package, and must not import torch for it."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
