"""Adapters of Python behind a program. One process, tests/process_server.py, runs all of them."""

import functools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.loader import load
from verify.adapters.process_adapter import ProcessAdapter

ROOT = pathlib.Path(__file__).resolve().parent.parent
DECLARED = ("domain", "algorithm", "products", "chunk", "stores", "folds", "rounds_products")


class Server(ProcessAdapter):
    command = (sys.executable, "-P", "process_server.py")
    environment: ClassVar[Mapping[str, str]] = {"PYTHONPATH": str(ROOT)}
    domain = Domain()


SERVER = Server()


@functools.cache
def dressed(spec: str) -> type[ProcessAdapter]:
    """The adapter `spec` as one that asks the server, which reads its name among the options."""
    adapter = load(spec)
    assert isinstance(adapter, Adapter), spec

    def exchange(self: ProcessAdapter, line: str, sent: Sequence[Tensor], answer: Sequence[Tensor]) -> None:
        SERVER._exchange(f"{line} adapter={spec}", sent, answer)

    declared: dict[str, Any] = {name: getattr(adapter, name) for name in DECLARED}
    own = {"command": Server.command, "bring": lambda self: None, "_exchange": exchange}  # it starts no program itself
    return type("Dressed", (ProcessAdapter,), {**declared, **own})
