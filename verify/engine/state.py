"""The settings of a check, and what all its laws share."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from properties.laws.law import Law
from properties.words.example import Example
from verify.engine.asking import Described
from verify.engine.climb import climbed
from verify.engine.compile_plan import Plan
from verify.engine.profiles import PROFILES, Profile
from verify.engine.shard import WHOLE, Shard
from verify.execution.line import Run
from verify.findings.known import KnownDefects
from verify.findings.regressions import Examples
from verify.findings.store import Store
from verify.gpu import policies


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a check.

    - `laws`: names of laws; None means all laws about the adapter's operation. Laws in `skip` are left out.
    - `products`: how the implementation multiplies float32 matrices; None means what the adapter declares.
    - `climbs`: whether half of the cases are climbed for; None means what the profile says.
    - `deadline_s`: seconds after which a case counts as a hang. `sequential` as for a Worker: of those that the check starts.
    - `compilers`: how many processes compile kernels ahead; for a path on so many `ranks`, each stands in for one of them.
    - `until`: a time of time.monotonic() after which no case begins.
    - `under`: options that `repeat` needs besides a line to see what this check saw.
    - `known`: files of known defects, besides ours and the one beside the adapter's file. `denied`: a deny-list.
    - `shard`: which lines are run; those of the other shards are drawn alone.
    - `given`: the examples of each law, in place of those that the seed draws.
    - `engine_workers`, `gpu_workers`: the least number of workers on GPUs, if the check starts its own: for a serving engine, and
      for everything else.
    """

    adapter: str
    laws: Sequence[str] | None = None
    profile: Profile = PROFILES["quick"]
    seed: int = 0
    device: str = "cpu"
    tune: str = ""
    products: str | None = None
    climbs: bool | None = None
    stop_at_first: bool = False
    deadline_s: float = 120.0
    sequential: bool = False
    compilers: int = 0
    ranks: int = 0
    skip: Collection[str] = ()
    until: float = math.inf
    under: str = ""
    known: Sequence[str] = ()
    denied: Sequence[policies.Denied] = ()
    engine_workers: int = 0
    gpu_workers: int = 0
    shard: Shard = WHOLE
    given: Mapping[str, Sequence[Example]] | None = None

    def examples_of(self, law: Law) -> int:
        """How many examples a law has, in all shards together."""
        return self.profile.examples_of(law) if self.given is None else len(self.given.get(law.name, ()))

    def drawn(self, law: Law) -> int:
        """How many of a law's examples are drawn; the rest is climbed for."""
        examples = self.examples_of(law)
        climbs = self.profile.climbs if self.climbs is None else self.climbs
        return examples - (climbed(examples, law.kind) if climbs and self.given is None else 0)


@dataclasses.dataclass
class CheckState:
    """What all laws of a check share. `on_case(law, done, of)` is called from any thread; `cases` are the cases run so far.

    `answered` is set once a case was more than a call that failed. `first` has the name of the first broken law of a check that
    stops at it.
    """

    settings: Settings
    described: Described
    store: Store
    defects: KnownDefects
    examples: Examples | None
    stopped: threading.Event
    on_case: Callable[[str, int, int], None]
    plan: Plan | None = None
    cases: list[Any] = dataclasses.field(default_factory=list)
    answered: threading.Event = dataclasses.field(default_factory=threading.Event)
    first: list[str] = dataclasses.field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the check was stopped or its time is up."""
        return self.stopped.is_set() or time.monotonic() >= self.settings.until

    @property
    def closed(self) -> bool:
        """Whether no case may begin any more."""
        return self.over or bool(self.first)

    def may_report(self, law: str) -> bool:
        """Whether a broken law may be shrunk and reported: any law, or the first one if the check stops at that."""
        if self.settings.stop_at_first:
            self.first.append(law)  # one step for Python, so that two threads never both come first
        return not self.first or self.first[0] == law

    def products_of(self, example: Example) -> str:
        """How the implementation multiplies float32 matrices in an example: "ieee" or "tf32"."""
        return self.settings.products or self.described.products_of(example, self.settings.device)

    def run_of(self, law: str, example: Example) -> Run:
        """The run of a law's case."""
        settings = self.settings
        return Run(law, settings.adapter, example, self.products_of(example), settings.device, settings.tune)

    def owns(self, law: str, example: Example) -> bool:
        """Whether a law's example is run here, and not in another shard."""
        return self.settings.shard.owns(self.run_of(law, example).everywhere)
