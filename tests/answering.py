"""A worker that is none: it answers at once, in this process, with a known function of the case."""

from collections.abc import Callable
from typing import Any

from properties.domain import Domain
from verify.outcome import FailureKind, Finding, Outcome, Verdict
from verify.run import Run


class Answering:
    """It runs nothing: `ratio` says the error over bound of a run, over 1 the run is broken. `asked` are the lines, in order."""

    deadline_s = 1.0

    def __init__(self, ratio: Callable[[Run], float] = lambda run: 0.5, domain: Domain | None = None) -> None:
        self.ratio, self.domain = ratio, domain or Domain()
        self.asked: list[str] = []
        self.closed = False

    def ask(self, question: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        if "describe" in question:
            return {
                "book": "rules",
                "domain": self.domain.to_json(),
                "algorithm": "chunkwise",
                "versions": "none 1.0",
                "device": "",
                "products": "ieee",
            }
        if "runs" in question:
            return {"outcomes": []}  # each is to be asked alone
        self.asked.append(question["run"])
        ratio = self.ratio(Run.parse(question["run"]))
        outcome = Outcome(Verdict.HOLDS, rows=1, ratios={"o": ratio, "dg": ratio / 2})
        if ratio > 1:
            outcome.verdict, outcome.findings = (
                Verdict.BROKEN,
                [Finding("o", FailureKind.OFF, "is off by more than rounding explains")],
            )
        return outcome.to_json()

    def close(self) -> None:
        self.closed = True
