"""Outcomes: the verdict on one case, and each finding as data: which output failed, on which ranks, in which way, by how much."""

import dataclasses
import enum
import math
from collections.abc import Iterable
from typing import Any

Used = dict[str, tuple[str, ...]]  # of each autotuned kernel, the configurations that ran


class Verdict(enum.StrEnum):
    """What is known of a law: it holds, it is broken, we could not decide, or the adapter does not promise it.

    A single case has two more: BLIND, it could not have seen what the law is about, and KNOWN, broken in a way on file.
    """

    HOLDS = "holds"
    BROKEN = "broken"
    UNKNOWN = "unknown"
    UNSUPPORTED = "unsupported"
    BLIND = "blind"
    KNOWN = "known"


class FailureKind(enum.StrEnum):
    """How an output or a call fails. Shrinking keeps the kind; the sizes and numbers of a message may change."""

    OFF = "is off"
    NOT_FINITE = "is not finite"
    DIFFERS = "differs"
    NOT_A_NUMBER = "is no number"
    TYPE = "has another type"
    SHAPE = "has another shape"
    DTYPE = "has another dtype"
    NO_GRADIENT = "has no gradient"
    NOT_IN_PLACE = "is another tensor"
    INPUT_CHANGED = "was changed"
    RAISED = "raised"
    CRASHED = "crashed"
    HUNG = "hung"
    RACE = "race"
    OUT_OF_MEMORY = "ran out of memory"
    RANKS_PART = "parts from the other ranks"
    BREACH = "breach"
    SANITIZER = "sanitizer"


def port_of(name: str) -> str:
    """The output, gradient or input that the name of a comparison begins with: "dq" of "dq, sequence 2 alone"."""
    return name.split()[0].rstrip(",")


def rank_names(ranks: Iterable[int]) -> str:
    """The ranks in words: "rank 2", "ranks 0, 2, 3"."""
    names = sorted(ranks)
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Where one output parts from what it must be.

    `what` is a sentence about `output`; `detail` is what of it must stay the same in a smaller case, such as an exception's name.
    `ranks` are the ranks that found it, of a path. The places are in words; errors are 2-norms of rows.
    """

    output: str
    kind: FailureKind
    what: str
    worst: str = ""
    first: str = ""
    rows: int = 0
    rows_over: int = 0
    error: float = math.nan
    allowed: float = math.nan
    origin: str = ""
    got: tuple[float, ...] = ()
    want: tuple[float, ...] = ()
    detail: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """The output and the ranks that found it: "o", "rank 1: o"."""
        return f"{rank_names(self.ranks)}: {self.output}" if self.ranks else self.output

    @property
    def way(self) -> str:
        """How it fails, without its numbers: "is off", "raised ValueError"."""
        return f"{self.kind} {self.detail}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that JSON lacks are strings."""
        data = dataclasses.asdict(self)
        for name in ("error", "allowed"):
            data[name] = _plain(data[name])
        for name in ("got", "want"):
            data[name] = [_plain(value) for value in data[name]]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Finding":
        """The finding of `to_json`'s data."""
        numbers = {name: float(data[name]) for name in ("error", "allowed")}
        rows = {name: tuple(float(value) for value in data[name]) for name in ("got", "want")}
        return cls(**{**data, **numbers, **rows, "kind": FailureKind(data["kind"]), "ranks": tuple(data["ranks"])})


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


@dataclasses.dataclass
class Outcome:
    """What one run came to."""

    verdict: Verdict
    findings: list[Finding] = dataclasses.field(default_factory=list)
    reason: str = ""
    rows: int = 0
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    kernel_s: float = 0.0
    oracle_s: float = 0.0
    spent: bool = False  # the process that ran it can run nothing more on its device
    tuned: Used = dataclasses.field(default_factory=dict)
    fault: str = ""  # where gdn-verify itself failed: the exception, file, line and function
    one_by_one: dict[str, int] = dataclasses.field(default_factory=dict)  # interpreted launches: "kernel: why", how many

    @property
    def kind(self) -> FailureKind | None:
        """How the first finding fails; None where nothing was found."""
        return self.findings[0].kind if self.findings else None

    @property
    def way(self) -> str:
        """How the first finding fails, or the verdict: what shrinking must keep."""
        return self.findings[0].way if self.findings else str(self.verdict)

    @property
    def lost(self) -> bool:
        """Whether the finding is that the worker crashed or hung."""
        return self.kind in (FailureKind.CRASHED, FailureKind.HUNG)

    @property
    def starved(self) -> bool:
        """Whether the finding is that memory ran out."""
        return self.kind is FailureKind.OUT_OF_MEMORY

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = dataclasses.asdict(self)
        data["findings"] = [finding.to_json() for finding in self.findings]
        data["ratios"] = {name: ratio if ratio < 1e300 else 1e300 for name, ratio in self.ratios.items()}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Outcome":
        """The outcome of `to_json`'s data."""
        findings = [Finding.from_json(each) for each in data["findings"]]
        tuned = {kernel: tuple(texts) for kernel, texts in data["tuned"].items()}
        return cls(**{**data, "verdict": Verdict(data["verdict"]), "findings": findings, "tuned": tuned})
