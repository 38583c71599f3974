"""The command `gdn-verify` and its pytest plugin, under a name that no other module has.

A user's verify.py may come before our package `verify` on sys.path, and must not be run in its place.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
PACKAGES = ("oracles", "properties", "verify")


class Shadowed(Exception):
    """A module of another has the name of one of our packages and comes before it on sys.path. The message is one line."""


def check_names() -> None:
    """Check that this process, and so its worker processes, find our packages. Shadowed names the file that is in their place."""
    for name in PACKAGES:
        spec = PathFinder.find_spec(name)
        place = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
        if place and os.path.realpath(place) != os.path.join(HERE, name, "__init__.py"):
            raise Shadowed(f"{place} is found in place of gdn-verify's package {name}: rename it, or move it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    try:
        check_names()
    except Shadowed as error:
        sys.stderr.write(f"gdn-verify: {error}\n")
        return 2
    from verify.cli.main import main

    return main(arguments)


def __getattr__(name: str) -> Any:
    """`watch` is verify.watch, or raises Shadowed. `plugin` is the pytest plugin: ours, or if another module has the name of its
    package, one that says so where it is used."""
    if name == "watch":
        check_names()
        import verify

        return verify.watch
    if name != "plugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        check_names()
    except Shadowed as error:
        return _Refusing(str(error))
    import verify.cli.pytest_plugin

    return verify.cli.pytest_plugin


class _Refusing:
    """A plugin that refuses what needs ours. Suites that use nothing of ours run as without it."""

    def __init__(self, line: str) -> None:
        self._line = line

    def pytest_load_initial_conftests(self, args: list[str]) -> None:
        """Refuse our options."""
        if any(word.startswith("--gdn-") for word in args):
            self._refuse()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Refuse tests that use our fixture."""
        if "gdn_law" in metafunc.fixturenames:
            self._refuse()

    def _refuse(self) -> None:
        import pytest

        raise pytest.UsageError(f"gdn-verify: {self._line}")
