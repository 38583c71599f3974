"""The questions that a worker is asked, as types. Between processes they are JSON: the name of the type and its fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Answer = dict[str, Any]  # plain data


@dataclasses.dataclass(frozen=True)
class Question:
    """A question; its subclasses say what is answered."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"question": type(self).__name__, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Describe(Question):
    """What an adapter declares: a Description, or {"error": why it cannot be had}."""

    adapter: str


@dataclasses.dataclass(frozen=True)
class RunOne(Question):
    """What the run of a line comes to: an Outcome. What is `declared` counts instead of what its adapter declares."""

    line: str
    declared: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunMany(Question):
    """{"outcomes": of the lines in their order}, up to the first after which ranks may have parted.

    `excused` has for each line the outputs that a known defect explains, and by how many times their tolerance
    (verify/execution/judge.py); it is empty where there is none.
    """

    lines: list[str]
    excused: list[dict[str, float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Compile(Question):
    """{}, after every kernel that the run of a line launches was launched; nobody looks at what they computed."""

    line: str


@dataclasses.dataclass(frozen=True)
class Launches(Question):
    """Which launch of a line's kernels gives other numbers: in `calls` calls, and with each word of tuning in `beside`.

    For the answer see verify/execution/launches.py:told.
    """

    line: str
    calls: int
    beside: list[str]


@dataclasses.dataclass(frozen=True)
class Tunings(Question):
    """{"known": the configurations of each autotuned kernel met so far, "infeasible": those that do not fit, with the reason}."""


@dataclasses.dataclass(frozen=True)
class Refuse(Question):
    """{"did": what an adapter does with an illegal input, in words}; `illegal` is its name (verify/execution/refusals.py)."""

    adapter: str
    illegal: str


@dataclasses.dataclass(frozen=True)
class Watched(Question):
    """{"trouble": why the worker does not run under its sanitizer, or ""}."""


@dataclasses.dataclass(frozen=True)
class Join(Question):
    """{}, after the worker has joined a process group as one of its ranks (verify/ranks/group.py)."""

    host: str
    port: int
    prefix: str
    size: int
    rank: int
    backend: str


@dataclasses.dataclass(frozen=True)
class Description:
    """What an adapter declares of itself, as a worker sees it; `book` is the name of its domain's (properties/books.py)."""

    book: str
    operation: str
    domain: dict[str, Any]
    algorithm: str
    products: str
    counterpart: str | None
    versions: str
    device: str

    def to_json(self) -> Answer:
        """Plain data."""
        return dataclasses.asdict(self)


QUESTIONS = {kind.__name__: kind for kind in Question.__subclasses__()}


def plain(question: Question | Mapping[str, Any]) -> dict[str, Any]:
    """A question as plain data; one that is plain data already is for whoever serves others than ours."""
    return question.to_json() if isinstance(question, Question) else dict(question)


def parse(data: Mapping[str, Any]) -> Question:
    """The question of plain data. ValueError if it is none."""
    words = dict(data)
    kind = QUESTIONS.get(words.pop("question", ""))
    try:
        if kind is not None:
            return kind(**words)
    except TypeError:
        pass
    raise ValueError(f"a worker is asked one of {', '.join(QUESTIONS)}, got {str(dict(data))[:200]}")
