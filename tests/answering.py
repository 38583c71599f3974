"""A worker that is none: it answers at once, in this process, with a known function of the case."""

from collections.abc import Callable
from typing import Any

from properties.books import book_of
from properties.rules.domain import Domain
from verify.execution.line import Run
from verify.process.messages import Describe, Description, Question, RunMany, RunOne
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict


class Answering:
    """It runs nothing. `ratio` is the error over the bound of a run: over 1 the run is broken. `asked` has the lines in order."""

    deadline_s, started, start_s = 1.0, 0, 0.0
    size = 2  # of its ranks, for a domain of paths

    def __init__(self, ratio: Callable[[Run], float] = lambda run: 0.5, domain: Any = None, cost: str = "slow") -> None:
        self.ratio, self.domain, self.cost = ratio, domain or Domain(), cost
        self.asked: list[str] = []
        self.ran = self.asked  # one process runs all of them
        self.closed = False

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        if isinstance(question, Describe):
            domain = self.domain
            description = Description(book_of(domain).name, domain.to_json(), "chunkwise", "ieee", "none 1.0", "", cost=self.cost)
            return description.to_json()
        if isinstance(question, RunMany):
            return {"outcomes": []}  # each run gets a question of its own
        assert isinstance(question, RunOne)
        self.asked.append(question.line)
        ratio = self.ratio(Run.parse(question.line))
        outcome = Outcome(Verdict.HOLDS, rows=1, ratios={"o": ratio, "dg": ratio / 2})
        if ratio > 1:
            outcome.verdict, outcome.findings = (
                Verdict.BROKEN,
                [Finding("o", FailureKind.OFF, "is off by more than rounding explains")],
            )
        return outcome.to_json()

    def end(self) -> None:
        """There is no process to end."""

    def close(self) -> None:
        self.closed = True
