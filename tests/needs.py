"""Skips tests that need a package that is not installed, without importing it: `import fla` takes seconds."""

import importlib.util

import pytest


def need(package: str) -> None:
    """Skip the test if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
