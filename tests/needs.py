"""Skips tests that need a package that is not installed, without importing it: `import fla` takes seconds."""

import importlib.util

import pytest

from verify.adapters.loader import load
from verify.adapters.registry import AdapterError


def need(package: str) -> None:
    """Skip the test if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def need_adapter(spec: str) -> None:
    """Skip the test if an adapter's package is not installed, or if its implementation needs another processor."""
    try:
        load(spec)
    except AdapterError as error:
        if "not installed" in str(error) or "needs a processor" in str(error):
            pytest.skip(str(error))
        raise
