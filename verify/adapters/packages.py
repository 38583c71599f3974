"""Versions of installed packages."""

import functools
import importlib.metadata


@functools.cache  # importlib reads and parses a distribution's metadata at every call
def installed(name: str) -> str | None:
    """The installed version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
