"""The questions that a supervisor sends to a worker, and the answers, as types. They travel as JSON.

A question is the name of its type and its fields. The fields of an answer tell its type (`answer_of`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from verify.process.outcome import Outcome

Data = dict[str, Any]  # plain data, as it travels
T = TypeVar("T", bound="FromPlain")
LeftOut = Sequence[Sequence[str]]  # pairs of a kernel and words of its configuration


@dataclasses.dataclass(frozen=True)
class Question:
    """A question. The docstring of each subclass names the type of its answer, in whose place there may be a Failure."""

    def to_json(self) -> dict[str, Any]:
        """The question as plain data."""
        return {"question": type(self).__name__, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Launching(Question):
    """A question whose kernels follow a policy. `denied` has the entries of a deny-list as plain data (verify/gpu/policies.py)."""

    denied: Sequence[Data] = dataclasses.field(default_factory=list, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Describe(Question):
    """What does an adapter declare? Answer: a Description.

    `runs` says that runs follow, so that what they import is imported meanwhile.
    """

    adapter: str
    runs: bool = True


@dataclasses.dataclass(frozen=True)
class RunOne(Launching):
    """Run one line. Answer: its Outcome, which is UNKNOWN if the line is illegal.

    The values in `declared` replace what the adapter declares when the run is judged. `excused` has the outputs that a known defect
    explains, each with the multiple of the tolerance up to which it does (verify/execution/judge.py). `left_out` are pairs of a
    kernel and words of its configuration, which no draw takes (verify/gpu/autotune.py).
    """

    line: str
    declared: dict[str, Any] = dataclasses.field(default_factory=dict)
    excused: dict[str, float] = dataclasses.field(default_factory=dict)
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class RunMany(Launching):
    """Run several lines. Answer: Outcomes, in the order of the lines.

    They end after the first outcome that leaves ranks at different places in their code, or the device lost. `excused` and
    `left_out` have, for each line, what they have for one (RunOne). An empty list means that there is nothing for any line.
    """

    lines: list[str]
    excused: Sequence[dict[str, float]] = dataclasses.field(default_factory=list)
    left_out: Sequence[LeftOut] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Interprets(Question):
    """Does the run of a line launch interpreted kernels? Answer: Interpretation."""

    line: str


@dataclasses.dataclass(frozen=True)
class Compile(Launching):
    """Launch every kernel that the run of a line launches, so that it is compiled. The results are not judged.

    `left_out` as for RunOne. Answer: Compiled.
    """

    line: str
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Launches(Launching):
    """Which kernel launch gives different numbers in `calls` equal calls, or with each tuning word in `beside`?

    `left_out` as for RunOne. Answer: LaunchReport.
    """

    line: str
    calls: int
    beside: list[str]
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Calls(Launching):
    """What does the implementation of a line return, bit by bit, and on a GPU how long does it take? Answer: Called.

    `timed` is the number of calls that are timed. `left_out` as for RunOne.
    """

    line: str
    timed: int = 0
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Reproduce(Launching):
    """Which script repeats the call of a line with the library alone? Answer: Script.

    `finding` is a finding of the line as plain data. The script has the numbers of the call if these are `most` at most; if `most`
    is 0, torch draws others.
    """

    line: str
    finding: Data
    most: int


@dataclasses.dataclass(frozen=True)
class Tunings(Question):
    """Which autotune configurations has this process met? Answer: Configurations."""


@dataclasses.dataclass(frozen=True)
class Refuse(Launching):
    """What does an adapter do with an illegal input? `illegal` is the name of the input (verify/execution/refusals.py).

    Autotuned kernels follow `tune` and run with none of `left_out`, as in RunOne. Answer: Reaction.
    """

    adapter: str
    illegal: str
    tune: str = ""
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Way(Launching):
    """What does an implementation return for a line, called in one of the ways of verify/execution/twins.py? Answer: Went.

    The results are written to `file`. `declared` says how the implementation is called, as in RunOne.
    """

    line: str
    way: str
    file: str
    declared: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class UnderSanitizer(Question):
    """Does the worker run under its sanitizer? Answer: Watching."""


@dataclasses.dataclass(frozen=True)
class Whence(Question):
    """Were modules imported from these folders? Answer: Origins."""

    folders: list[str]


@dataclasses.dataclass(frozen=True)
class Join(Question):
    """Join a process group as one of its ranks (verify/ranks/group.py). Answer: Joined."""

    host: str
    port: int
    prefix: str
    size: int
    rank: int
    backend: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer. `spent`, where there is one, says that a new process must take the place of the one that answered."""

    def to_json(self) -> Data:
        """The answer as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Data) -> Self:
        """The answer from the data of `to_json`."""
        return cls(**data)


@dataclasses.dataclass(frozen=True)
class Failure(Answer):
    """Why a question has no answer: the adapter cannot be loaded, or the question is wrong."""

    error: str


@dataclasses.dataclass(frozen=True)
class Outcomes(Answer):
    """The outcomes of several lines."""

    outcomes: list[Outcome]
    spent: bool = False

    def to_json(self) -> Data:
        return {"outcomes": [outcome.to_json() for outcome in self.outcomes], "spent": self.spent}

    @classmethod
    def from_json(cls, data: Data) -> Self:
        return cls([Outcome.from_json(outcome) for outcome in data["outcomes"]], data.get("spent", False))


@dataclasses.dataclass(frozen=True)
class Reaction(Answer):
    """What an implementation does with an illegal input, in words: `did`.

    `left` says that a rank's call ended early, and `idle` that a rank has no part in the call.
    """

    did: str
    left: bool = False
    idle: bool = False
    spent: bool = False


@dataclasses.dataclass(frozen=True)
class Interpretation(Answer):
    """Whether a run launches interpreted kernels, and why this Triton cannot interpret them, or ""."""

    launches: bool
    refusal: str


@dataclasses.dataclass(frozen=True)
class Compiled(Answer):
    """The kernels of a line are compiled."""

    spent: bool


@dataclasses.dataclass(frozen=True)
class LaunchReport(Answer):
    """The launches that differ (verify/execution/launches.py).

    - `launches`, `kernels`: the number of launches, and of different kernels, in one call
    - `found`: what was found, in words
    - `left`: the calls that were not made, because the first one failed, the device was lost or memory ran out
    - `reason`: why nothing is known, or ""
    """

    launches: int = 0
    kernels: int = 0
    found: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    spent: bool = False
    reason: str = ""

    def to_json(self) -> Data:
        data = super().to_json()
        reason = data.pop("reason")
        return {"reason": reason} if reason else data


@dataclasses.dataclass(frozen=True)
class Called(Answer):
    """What an implementation returns for one line, unjudged.

    - `bits`: for each output and gradient, a hash of its bits
    - `unsteady`: those whose bits differ when the call is made again
    - `times_ms`, `memory`: of the timed calls, the milliseconds on the GPU, and the most bytes that they needed beside the inputs
    - `reason`: why nothing is known, or ""
    """

    bits: dict[str, str] = dataclasses.field(default_factory=dict)
    unsteady: list[str] = dataclasses.field(default_factory=list)
    times_ms: list[float] = dataclasses.field(default_factory=list)
    memory: int = 0
    reason: str = ""
    spent: bool = False


@dataclasses.dataclass(frozen=True)
class Went(Answer):
    """The dtypes of the results that were written, by name, or the `reason` why there are none."""

    dtypes: dict[str, str] = dataclasses.field(default_factory=dict)
    reason: str = ""
    spent: bool = False


@dataclasses.dataclass(frozen=True)
class Script(Answer):
    """A script that repeats a call of `function`, or the `reason` why there is none."""

    text: str = ""
    function: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Configurations(Answer):
    """The configurations of each autotuned kernel, and those that do not fit the GPU, with the reason."""

    known: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    infeasible: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Watching(Answer):
    """Why a worker does not run under its sanitizer, or ""."""

    trouble: str


@dataclasses.dataclass(frozen=True)
class Origins(Answer):
    """Whether a module was imported from the folders, and the files of modules that they have and that were found elsewhere."""

    inside: bool
    elsewhere: list[str]


@dataclasses.dataclass(frozen=True)
class Joined(Answer):
    """The worker has joined its group."""


@dataclasses.dataclass(frozen=True)
class Description(Answer):
    """What an adapter declares, as a worker sees it.

    `book` is the name of the book that its domain belongs to. `omits` maps parameters that are not passed to the reason. `closes`
    says whether the adapter wants to be closed. `memory` is that of the worker's GPU in bytes, or 0 without one. `declares` has
    what an export needs (verify/adapters/files_adapter.py). `named` are whole numbers of its source.
    """

    book: str
    domain: dict[str, Any]
    algorithm: str
    products: str
    versions: str
    device: str
    memory: int = 0
    chunk: int | None = None
    omits: dict[str, str] = dataclasses.field(default_factory=dict)
    closes: bool = False
    compiles: bool = False
    cost: str = "quick"
    declares: dict[str, Any] = dataclasses.field(default_factory=dict)
    named: list[int] = dataclasses.field(default_factory=list)


# Of answers that ranks give and that are merged: a field that only this type has.
_OF_RANKS: dict[str, type[Failure | Outcomes | Reaction | Outcome]] = {
    "error": Failure,
    "outcomes": Outcomes,
    "did": Reaction,
    "verdict": Outcome,
}
OfRank = Failure | Outcomes | Reaction | Outcome | Data


class FromPlain(Protocol):
    """What can be made from plain data."""

    @classmethod
    def from_json(cls, data: Data) -> Self:
        """The value from its plain data."""


def answer_of(data: Data) -> OfRank:
    """The answer of a rank from its plain data; other data, such as that of a worker that serves other questions, as it is."""
    return next((kind.from_json(data) for key, kind in _OF_RANKS.items() if key in data), data)


def read(kind: type[T], data: Data) -> T | Failure:
    """An answer of a type from its plain data, or the failure that stands in its place."""
    return Failure(data["error"]) if "error" in data else kind.from_json(data)


QUESTIONS = {kind.__name__: kind for base in (Question, Launching) for kind in base.__subclasses__()}


def plain(question: Question | Mapping[str, Any]) -> dict[str, Any]:
    """A question as plain data. It may be plain data already, for a worker that serves other questions than those above."""
    return question.to_json() if isinstance(question, Question) else dict(question)


def lines_of(question: Question | Mapping[str, Any]) -> list[str]:
    """The lines that a question asks to run, in their order."""
    return [question.line] if isinstance(question, RunOne) else question.lines if isinstance(question, RunMany) else []


def parse(data: Mapping[str, Any]) -> Question:
    """The question from its plain data. ValueError if the data is not a question."""
    words = dict(data)
    kind = QUESTIONS.get(words.pop("question", ""))
    try:
        if kind is not None:
            return kind(**words)
    except TypeError:
        pass
    raise ValueError(f"a worker is asked one of {', '.join(QUESTIONS)}, got {str(dict(data))[:200]}")
