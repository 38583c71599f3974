"""What a token costs an implementation on a CPU, which decides how large the large cases of a check are
(properties/words/sizes.py).

The answer follows from what an adapter declares and imports and never from a clock, because it decides which cases a seed has.
"""

import sys
from types import ModuleType

from properties.words.sizes import MOST
from verify.adapters.base import Adapter

# Packages into which the search for kernels does not look: that Triton is imported says nothing, and ours are not under test.
OTHERS = ("triton", "torch", "numpy", "oracles", "properties", "verify")


def cost_of(adapter: object) -> str:
    """What a token costs: one of the names of MOST, as the adapter declares it.

    Without a declaration, tokens are "interpreted" if the adapter requires Triton, or if a Triton kernel can be reached from the
    modules of its classes over what these modules have imported. Otherwise they are "quick".
    """
    if not isinstance(adapter, Adapter):
        return "quick"
    if adapter.cost in MOST:
        return adapter.cost
    kernels = "triton" in adapter.requires or _reaches_kernels({kind.__module__ for kind in type(adapter).__mro__})
    return "interpreted" if kernels else "quick"


def _reaches_kernels(names: set[str]) -> bool:
    if "triton" not in sys.modules:
        return False
    from triton import KernelInterface

    left, seen = list(names), set[str]()
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        # What a module that imports on demand has imported so far depends on what this process did before.
        if name in seen or type(module) is not ModuleType or name.partition(".")[0] in (*OTHERS, *sys.stdlib_module_names):
            continue
        seen.add(name)
        for value in list(vars(module).values()):
            if isinstance(value, KernelInterface):
                return True
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            left += [home] if isinstance(home, str) else []
    return False
