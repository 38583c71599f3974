"""Who is checked, where and how: adapters, the judge, workers, the interpreter, reproduction, reports, the command line."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verify.adapter import Adapter as Adapter
    from verify.adapter import Domain as Domain
    from verify.adapter import LayerDomain as LayerDomain
    from verify.adapter import ModuleDomain as ModuleDomain
    from verify.adapter import PathAdapter as PathAdapter
    from verify.adapter import PathDomain as PathDomain
    from verify.adapter import PoolDomain as PoolDomain

__version__ = "0.1.0"
__all__ = ["Adapter", "Domain", "LayerDomain", "ModuleDomain", "PathAdapter", "PathDomain", "PoolDomain"]


def __getattr__(name: str) -> Any:
    """The adapters' classes on first use: the pytest plugin lives here too, and must not import torch into foreign suites."""
    if name in __all__:
        from verify import adapter

        return getattr(adapter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
