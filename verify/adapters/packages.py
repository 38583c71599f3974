"""Versions of installed packages."""

import functools
import importlib.metadata

from verify.adapters.libraries import BY_DISTRIBUTION


@functools.cache  # importlib reads and parses a distribution's metadata at every call
def installed(name: str) -> str | None:
    """The installed version of a distribution, or None if it is not installed.

    Of a serving library it is the version of the files that adapters import, which need not be installed.
    """
    if name in BY_DISTRIBUTION:
        return BY_DISTRIBUTION[name].release()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
