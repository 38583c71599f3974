"""What a command line says, as a frozen class for each verb, made once when the command begins. Nothing here imports torch.

The fields are what the verb's parser sets (verify/cli/arguments.py has the help). A base class is about options that several verbs
share (verify/cli/options.py).
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from verify.engine.shard import Shard

T = TypeVar("T")


def options_of(kind: type[T], namespace: argparse.Namespace) -> T:
    """What a parser has set, as the class of the verb."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in namespace]  # type: ignore[arg-type]
    return kind(**{name: getattr(namespace, name) for name in names})


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a case may take, and how kernels run without a GPU."""

    deadline: float | None
    interpreter: str | None

    @property
    def sequential(self) -> bool:
        """Whether the programs of an interpreted launch run one after another (`Worker`)."""
        return self.interpreter == "sequential"


@dataclasses.dataclass(frozen=True)
class Line(Limits):
    """Where a line runs."""

    deny: str | None
    path: str | None


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is kept of what failed."""

    findings: str
    no_examples: bool


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes that share a case."""

    ranks: int | None
    backend: str | None


@dataclasses.dataclass(frozen=True)
class Processes(Ranks, Line):
    """The processes that run a case: ranks, or one under a sanitizer."""

    sanitize: str | None


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The files that show a check elsewhere."""

    json: str | None
    html: str | None
    junit: str | None
    markdown: str | None
    annotations: str | None


@dataclasses.dataclass(frozen=True)
class Asking(Outputs):
    """What is checked, and where kernels run."""

    law: Sequence[str] | None
    profile: str | None
    seed: int | None
    stop: bool
    workers: int | None
    products: str | None
    device: str | None
    tune: str | None
    known: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Cases:
    """Which cases are drawn."""

    law: Sequence[str] | None
    profile: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Versions(Limits):
    """How versions of an implementation are had."""

    yes: bool
    json: bool


@dataclasses.dataclass(frozen=True)
class Places(Versions):
    """Where versions of an implementation are: each place with its kind, in the order of the command line."""

    places: Sequence[tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class ListOptions:
    """Options of `list`."""

    json: bool
    schema: bool


@dataclasses.dataclass(frozen=True)
class CheckOptions(Asking, Kept, Processes):
    """Options of `check`. `settings` says from where some of them come, and `given` has the examples of laws that are not drawn."""

    adapters: Sequence[str]
    settings: str
    climb: bool
    budget: float | None
    budget_ok: bool
    shard: Shard | None
    strict_reach: bool
    strict_domain: bool
    certificate: str | None
    sign_key: str | None
    given: Mapping[str, Sequence[Any]] | None = None


@dataclasses.dataclass(frozen=True)
class MergeOptions(Outputs):
    """Options of `merge`."""

    record: Sequence[str]
    budget_ok: bool
    strict_reach: bool
    strict_domain: bool


@dataclasses.dataclass(frozen=True)
class DrawOptions:
    """Options of `draw`."""

    adapters: Sequence[str]
    settings: str
    law: Sequence[str] | None
    profile: str | None
    seed: int | None
    climb: bool
    device: str | None
    shard: Shard | None
    json: bool


@dataclasses.dataclass(frozen=True)
class ExportOptions(Cases):
    """Options of `export`."""

    adapter: str
    out: str


@dataclasses.dataclass(frozen=True)
class JudgeOptions(Outputs):
    """Options of `judge`."""

    folder: str
    answers: str | None
    law: Sequence[str] | None
    stop: bool
    workers: int | None
    deadline: float | None
    findings: str


@dataclasses.dataclass(frozen=True)
class RepeatOptions(Kept, Processes):
    """Options of `repeat`. The process of `line` runs those in `after` first."""

    line: str
    after: Sequence[str]
    json: bool
    upstream: str | None


@dataclasses.dataclass(frozen=True)
class KnownOptions(Line):
    """Options of `known`."""

    line: str
    reason: str
    known: str | None
    where: str
    also: Sequence[str]
    times: float | None
    kernel: str


@dataclasses.dataclass(frozen=True)
class LaunchesOptions(Line):
    """Options of `launches`."""

    line: str
    calls: int
    beside: Sequence[str] | None
    json: bool


@dataclasses.dataclass(frozen=True)
class ArithmeticOptions(Ranks):
    """Options of `arithmetic`."""

    device: str | None
    json: str | None
    record: str | None


@dataclasses.dataclass(frozen=True)
class AcrossOptions(Places, Cases):
    """Options of `across`. `asked` is an adapter if there are no `lines`."""

    asked: Sequence[str]
    lines: Sequence[str]
    workers: int | None


@dataclasses.dataclass(frozen=True)
class BisectOptions(Versions):
    """Options of `bisect`."""

    line: str
    good: str
    bad: str
    package: Sequence[str] | None
    releases: Sequence[str] | None
    rev: bool


@dataclasses.dataclass(frozen=True)
class CompareOptions(Places, Cases):
    """Options of `compare`."""

    adapters: Sequence[str]
    device: str | None
    same_bits: bool


@dataclasses.dataclass(frozen=True)
class TwinOptions(Places):
    """Options of `twin`."""

    trainer: str
    server: str
    tokens: int | None
    seed: int
    device: str | None


@dataclasses.dataclass(frozen=True)
class SoakOptions(Asking, Kept, Line):
    """Options of `soak`."""

    adapter: Sequence[str]
    minutes: float


@dataclasses.dataclass(frozen=True)
class ZooOptions(Cases):
    """Options of `zoo`."""

    names: Sequence[str]
    letter: Sequence[str] | None
    workers: int
    deadline: int
    json: str | None
    html: str | None
    rule: Sequence[str] | None
    mutate: str | None
    sample: int | None
    id: Sequence[str] | None
    grep: str | None
    list: bool


@dataclasses.dataclass(frozen=True)
class ClaimsOptions:
    """Options of `claims`."""

    claim: Sequence[int] | None
    megatron: bool
    releases: str | None
    quick: bool
    device: str | None
    json: str | None
    markdown: bool


@dataclasses.dataclass(frozen=True)
class FetchOptions:
    """Options of `fetch`."""

    library: str
    release: str | None
    to: str | None
    json: bool


@dataclasses.dataclass(frozen=True)
class CompletionOptions:
    """Options of `completion`."""

    shell: str


@dataclasses.dataclass(frozen=True)
class CertificateOptions:
    """Options of `certificate`."""

    file: str
    allowed_signers: str | None
    again: bool
    path: str | None


@dataclasses.dataclass(frozen=True)
class NewProcessOptions:
    """Options of `new-process`."""

    language: str
    to: str
