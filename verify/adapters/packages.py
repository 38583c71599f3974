"""Versions of installed packages."""

import functools
import importlib.metadata


@functools.cache  # a distribution's metadata is read and parsed every time that it is asked for
def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
