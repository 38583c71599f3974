"""The outcome of one case as data: its verdict and its findings. A finding says which output failed, where, how and by how much."""

import dataclasses
import enum
import math
from collections.abc import Iterable
from typing import Any, Self

from verify.process.picture import Picture, plain_number
from verify.process.reach import Reach

Used = dict[str, tuple[str, ...]]  # for each autotuned kernel, the autotune configurations that ran


class Verdict(enum.StrEnum):
    """The verdict on a law: it holds, it is broken, we could not decide, or the adapter does not promise it (UNSUPPORTED).

    A single case has two more verdicts. BLIND: the case could not have shown a defect that its law is about. KNOWN: the case is
    broken in a way that a known defect explains.
    """

    HOLDS = "holds"
    BROKEN = "broken"
    UNKNOWN = "unknown"
    UNSUPPORTED = "unsupported"
    BLIND = "blind"
    KNOWN = "known"


class FailureKind(enum.StrEnum):
    """How an output or a call fails. While a case shrinks, the kind stays the same; sizes and numbers in the message may change."""

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


CALLS = (FailureKind.RAISED, FailureKind.CRASHED, FailureKind.HUNG, FailureKind.TYPE)  # failures of a whole call


def rank_names(ranks: Iterable[int]) -> str:
    """The ranks in words: "rank 2" or "ranks 0, 2, 3"."""
    names = sorted(ranks)
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One failure of a case: which output is wrong, where, by how much, and what was expected.

    - `output`: the comparison in words, such as "o" or "dq of sequence 2 alone"; "call" for a failure of the whole call
    - `what`: a sentence without its subject, which is `output`
    - `worst`, `first`: the places of the row with the largest error and of the first wrong row, in words
    - `rows`, `rows_over`: the number of rows compared, and of those over their tolerance
    - `error`, `allowed`: the error of the worst row (its 2-norm) and its tolerance
    - `origin`: where that tolerance comes from, in words
    - `got`, `want`: the first numbers of the worst row, as returned and as expected
    - `begin`: the place in the row at which they begin: not 0 if the first numbers hardly differ
    - `detail`: the part of `what` that must stay the same while the case shrinks, such as the name of an exception
    - `ranks`: for a path, the ranks that found it
    - `wrote`: of a call that raised, the last lines that its process, and those beside it, wrote to stdout and stderr meanwhile
    - `port`: the output or gradient alone, such as "dq"; by default it is `output`
    - `picture`: where the rows are off; None if no rows were compared, or if nobody knows what their axes are
    - `source`: of a call that raised or raced, the file and line of the code that did so, such as "my_kernels/rule.py:41"
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
    wrote: tuple[str, ...] = ()
    port: str = ""
    picture: Picture | None = dataclasses.field(default=None, compare=False)
    source: str = ""
    begin: int = 0

    def __post_init__(self) -> None:
        if not self.port:
            object.__setattr__(self, "port", self.output)

    @property
    def place(self) -> str:
        """The output, after the ranks that found it: "o" or "rank 1: o"."""
        return f"{rank_names(self.ranks)}: {self.output}" if self.ranks else self.output

    @property
    def way(self) -> str:
        """How the output fails, without numbers: "is off" or "raised ValueError"."""
        return f"{self.kind} {self.detail}".rstrip()

    @property
    def exact(self) -> bool:
        """Whether bits were compared."""
        return self.kind in (FailureKind.DIFFERS, FailureKind.NOT_A_NUMBER)

    @property
    def ratio(self) -> float:
        """The error of the worst row over its tolerance. Infinite unless the finding is that an error exceeds a tolerance."""
        if self.kind is not FailureKind.OFF or not math.isfinite(self.error) or not self.allowed > 0:
            return math.inf
        return self.error / self.allowed

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data. NaN and infinity, which JSON lacks, are strings."""
        data = dataclasses.asdict(dataclasses.replace(self, picture=None))
        data["picture"] = self.picture and self.picture.to_json()
        for name in ("error", "allowed"):
            data[name] = plain_number(data[name])
        for name in ("got", "want"):
            data[name] = [plain_number(value) for value in data[name]]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Finding":
        """The finding from the data of `to_json`. In data of earlier releases, the first word of `output` is the port, and there is
        no picture."""
        numbers = {name: float(data[name]) for name in ("error", "allowed")}
        rows = {name: tuple(float(value) for value in data[name]) for name in ("got", "want")}
        return cls(
            **{
                **data,
                **numbers,
                **rows,
                "wrote": tuple(data.get("wrote", ())),
                "kind": FailureKind(data["kind"]),
                "ranks": tuple(data["ranks"]),
                "port": data.get("port") or data["output"].split()[0].rstrip(","),
                "picture": Picture.from_json(data["picture"]) if data.get("picture") else None,
            }
        )


@dataclasses.dataclass
class Outcome:
    """The result of one run.

    `ratios` maps each output to its largest error as a multiple of the tolerance. `rows` is the number of rows compared.
    """

    verdict: Verdict
    findings: list[Finding] = dataclasses.field(default_factory=list)
    reason: str = ""
    rows: int = 0
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    kernel_s: float = 0.0
    oracle_s: float = 0.0
    cpu_s: float = 0.0  # CPU seconds of the worker, which are about the same on an idle and on a busy machine
    spent: bool = False  # the process that ran the case can run nothing more on its device
    tuned: Used = dataclasses.field(default_factory=dict)
    fault: str = ""  # if gdn-verify itself failed: the exception, file, line and function
    # Launches whose programs could not be interpreted together: the number of launches for each "kernel: reason".
    one_by_one: dict[str, int] = dataclasses.field(default_factory=dict)
    reach: Reach = dataclasses.field(default_factory=Reach)  # what the case looked at
    kept: dict[str, bool] = dataclasses.field(default_factory=dict)  # promises that the domain does not make: whether it keeps them
    idle: bool = False  # of a rank: it has no part in the case

    @property
    def kind(self) -> FailureKind | None:
        """The kind of the first finding, or None if there is none."""
        return self.findings[0].kind if self.findings else None

    @property
    def way(self) -> str:
        """The `way` of the first finding, or else the verdict. It must stay the same while the case shrinks."""
        return self.findings[0].way if self.findings else str(self.verdict)

    @property
    def worst(self) -> float:
        """The largest ratio of its findings, infinite if one of them is no error over a tolerance. 0 without findings."""
        return max((finding.ratio for finding in self.findings), default=0.0)

    @property
    def lost(self) -> bool:
        """Whether the first finding is that the worker crashed or hung."""
        return self.kind in (FailureKind.CRASHED, FailureKind.HUNG)

    @property
    def refused(self) -> bool:
        """Whether the call itself failed: it raised, crashed, hung, or returned something that is no tuple of tensors."""
        return bool(self.findings) and self.findings[0].output == "call" and self.kind in CALLS

    @property
    def starved(self) -> bool:
        """Whether the first finding is that memory ran out."""
        return self.kind is FailureKind.OUT_OF_MEMORY

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data. Ratios are at most 1e300, since JSON has no infinity."""
        data = vars(self) | {"reach": self.reach.to_json()}  # asdict would copy each value, which takes several times as long
        data["findings"] = [finding.to_json() for finding in self.findings]
        data["ratios"] = {name: ratio if ratio < 1e300 else 1e300 for name, ratio in self.ratios.items()}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The outcome from the data of `to_json`."""
        findings = [Finding.from_json(finding) for finding in data["findings"]]
        tuned = {kernel: tuple(texts) for kernel, texts in data["tuned"].items()}
        reach = Reach.from_json(data["reach"])
        return cls(**{**data, "verdict": Verdict(data["verdict"]), "findings": findings, "tuned": tuned, "reach": reach})
