"""Watches calls of an implementation: their seconds, and whom an exception blames."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from verify.bench.faults import AdapterFault, blamed
from verify.process.outcome import FailureKind, Finding
from verify.ranks.collectives import Abandoned, Mismatch


class WatchedBench:
    """What the benches of calls, of ranks and of engines have in common.

    - `kernel_s`, `oracle_s`: seconds spent in the implementation and in the oracle
    - `impure`: findings about inputs, and memory around them, that a call has changed
    - `lost`: why the device can no longer be used; "" if it can
    - `declared`: what a run is judged by in place of what the adapter declares, by the name of its attribute
    - `kept`: promises that the domain does not make, and whether they were kept
    """

    adapter: Any

    def __init__(self, device: str) -> None:
        self.device = device
        self.kernel_s = self.oracle_s = 0.0
        self.impure: list[Finding] = []
        self.lost = ""
        self.declared: Mapping[str, Any] = MappingProxyType({})
        self.kept: dict[str, bool] = {}

    def says(self, name: str) -> Any:
        """The declaration of this name that a run is judged by."""
        return self.declared[name] if name in self.declared else getattr(self.adapter, name)

    @contextlib.contextmanager
    def timed(self, account: str) -> Iterator[None]:
        """Add the seconds spent inside to `account`: "kernel_s" or "oracle_s"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, account, getattr(self, account) + time.perf_counter() - start)

    @contextlib.contextmanager
    def watched(self, *contexts: contextlib.AbstractContextManager[Any], output: str = "call") -> Iterator[None]:
        """Call the implementation inside, within these contexts.

        An exception becomes AdapterFault about `output`, OutOfMemory, UnknownTriton, Unavailable or Unsupported, and tells whether
        the device is lost. Abandoned, which says that another rank raised, passes through.
        """
        try:
            with self.timed("kernel_s"), contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield
        except (AdapterFault, Abandoned):
            raise
        except Mismatch as error:
            raise AdapterFault(output, FailureKind.RANKS_PART, f"parts from the other ranks: {error}") from error
        except Exception as error:
            raised, self.lost = blamed(error, self.device, output)
            raise raised from error
