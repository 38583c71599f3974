"""The questions that a supervisor sends to a worker, as types. They travel as JSON: the name of the type and its fields."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Answer = dict[str, Any]  # plain data
LeftOut = Sequence[Sequence[str]]  # pairs


@dataclasses.dataclass(frozen=True)
class Question:
    """A question. The docstring of each subclass describes the answer."""

    def to_json(self) -> dict[str, Any]:
        """The question as plain data."""
        return {"question": type(self).__name__, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Describe(Question):
    """What does an adapter declare? Answer: a Description, or {"error": why the adapter cannot be loaded}.

    `runs` says that runs follow, so that what they import is imported meanwhile.
    """

    adapter: str
    runs: bool = True


@dataclasses.dataclass(frozen=True)
class RunOne(Question):
    """Run one line. Answer: its Outcome.

    The values in `declared` replace what the adapter declares when the run is judged. `excused` has the outputs that a known defect
    explains, each with the multiple of the tolerance up to which it does (verify/execution/judge.py). `left_out` are pairs of a
    kernel and words of its configuration, which no draw takes (verify/gpu/autotune.py).
    """

    line: str
    declared: dict[str, Any] = dataclasses.field(default_factory=dict)
    excused: dict[str, float] = dataclasses.field(default_factory=dict)
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class RunMany(Question):
    """Run several lines. Answer: {"outcomes": the Outcomes in the order of the lines}.

    The answer ends after the first outcome that leaves ranks at different places in their code, or the device lost. `excused` and
    `left_out` have, for each line, what they have for one (RunOne). An empty list means that there is nothing for any line.
    """

    lines: list[str]
    excused: Sequence[dict[str, float]] = dataclasses.field(default_factory=list)
    left_out: Sequence[LeftOut] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Interprets(Question):
    """Does the run of a line launch interpreted kernels?

    Answer: {"launches": whether it does, "refusal": why this Triton cannot interpret them, or ""}.
    """

    line: str


@dataclasses.dataclass(frozen=True)
class Compile(Question):
    """Launch every kernel that the run of a line launches, so that it is compiled. The results are not judged.

    `left_out` as for RunOne. Answer: {"spent": whether a new process must take this one's place}.
    """

    line: str
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Launches(Question):
    """Which kernel launch gives different numbers in `calls` equal calls, or with each tuning word in `beside`?

    `left_out` as for RunOne. The answer is that of verify/execution/launches.py:told.
    """

    line: str
    calls: int
    beside: list[str]
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Tunings(Question):
    """Which autotune configurations has this process met?

    Answer: {"known": the configurations of each autotuned kernel, "infeasible": those that do not fit the GPU, with the reason}.
    """


@dataclasses.dataclass(frozen=True)
class Refuse(Question):
    """What does an adapter do with an illegal input? `illegal` is the name of the input (verify/execution/refusals.py).

    Autotuned kernels follow `tune` and run with none of `left_out`, as in RunOne.

    Answer: {"did": what it does, in words}. A rank whose call ended early adds {"left": True}, and a rank without a part in the
    call adds {"reason": ...} (verify/ranks/merge.py).
    """

    adapter: str
    illegal: str
    tune: str = ""
    left_out: LeftOut = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Watched(Question):
    """Does the worker run under its sanitizer? Answer: {"trouble": why it does not, or ""}."""


@dataclasses.dataclass(frozen=True)
class Join(Question):
    """Join a process group as one of its ranks (verify/ranks/group.py). Answer: {}, once the worker has joined."""

    host: str
    port: int
    prefix: str
    size: int
    rank: int
    backend: str


@dataclasses.dataclass(frozen=True)
class Description:
    """What an adapter declares, as a worker sees it.

    `book` is the name of the book that its domain belongs to. `omits` maps parameters that are not passed to the reason. `closes`
    says whether the adapter wants to be closed. `memory` is that of the worker's GPU in bytes, or 0 without one.
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

    def to_json(self) -> Answer:
        """The description as plain data."""
        return dataclasses.asdict(self)


QUESTIONS = {kind.__name__: kind for kind in Question.__subclasses__()}


def plain(question: Question | Mapping[str, Any]) -> dict[str, Any]:
    """A question as plain data. It may be plain data already, for a worker that serves other questions than those above."""
    return question.to_json() if isinstance(question, Question) else dict(question)


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
