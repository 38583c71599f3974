"""Known defects of released code. They are reported but break no law. A defect that no longer fails is reported too."""

import dataclasses
import math
import pathlib
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from properties.books import book_of
from properties.cases.line import split_line
from properties.cases.rule_case import Case
from verify.adapters.packages import installed
from verify.adapters.registry import BUILT_IN
from verify.execution.run import Run
from verify.process.outcome import Finding, Outcome, Verdict, port_of

FILE = pathlib.Path(__file__).with_name("known_defects.toml")


@dataclasses.dataclass(frozen=True)
class Known:
    """A defect on file: a run that shows it, the versions that have it, and the other cases that it explains.

    A failure is this defect if all of the following hold:

    - It has the same adapter, and the law of `run` or one of the laws in `also`.
    - Its case has all words of `where`, and the number of each word in `least` is at least, in `most` at most, the given one.
    - If `outputs` are named, only these outputs are wrong, each by at most `times` its tolerance.
    - If `run` is on a GPU, the failure is on a GPU too.

    `somewhere`: the defect depends on the processor, so it is no surprise if it does not show.
    """

    run: Run
    versions: dict[str, tuple[str, ...]]
    where: dict[str, str]
    reason: str
    also: tuple[str, ...] = ()
    least: dict[str, int] = dataclasses.field(default_factory=dict)
    most: dict[str, int] = dataclasses.field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    times: float = math.inf
    somewhere: bool = False

    def applies(self, device: str = "cpu") -> bool:
        """Whether the installed versions have the defect on this device. A defect shown on a GPU exists on GPUs only."""
        return self.run.device in ("cpu", device) and all(installed(name) in listed for name, listed in self.versions.items())

    def explains(self, run: Run, findings: Sequence[Finding] = ()) -> bool:
        """Whether the findings of `run` are this defect. Without findings: whether any finding of the run would be."""
        return self.covers(run) and (not self.outputs or (bool(findings) and all(self._explains(finding) for finding in findings)))

    def covers(self, run: Run) -> bool:
        """Whether this defect may show in `run`, judged by its adapter, law, case and device alone."""
        if run.adapter != self.run.adapter or run.law not in (self.run.law, *self.also) or not self.applies(run.device):
            return False
        words = run.example.case.words()
        return (
            all(words[name] == value for name, value in self.where.items())
            and all(int(words[name]) >= number for name, number in self.least.items())
            and all(int(words[name]) <= number for name, number in self.most.items())
        )

    def _explains(self, finding: Finding) -> bool:
        return port_of(finding.output) in self.outputs and (self.times == math.inf or finding.error <= self.times * finding.allowed)


class KnownDefects:
    """The defects on file. Only this class decides whether the outcome of a run is a known defect."""

    def __init__(self, defects: Iterable[Known] = ()) -> None:
        self._defects = tuple(defects)

    def __iter__(self) -> Iterator[Known]:
        return iter(self._defects)

    def explain(self, run: Run, outcome: Outcome) -> Known | None:
        """The defect that a broken run shows, or None."""
        if outcome.verdict is not Verdict.BROKEN:
            return None
        return next((defect for defect in self if defect.explains(run, outcome.findings)), None)

    def explain_any(self, run: Run) -> Known | None:
        """The defect that would explain any failure of this run; None if that depends on the findings. Nothing is run."""
        return next((defect for defect in self if defect.explains(run)), None)

    def explained_outputs(self, run: Run) -> dict[str, float]:
        """The outputs that known defects explain in `run`, each with the largest error, in tolerances, that they explain.

        Outputs that a defect may make wrong by any amount are left out, because an error near the tolerance need not come from it.
        """
        times: dict[str, float] = {}
        for defect in self:
            if defect.outputs and math.isfinite(defect.times) and defect.covers(run):
                times |= {output: max(defect.times, times.get(output, 0.0)) for output in defect.outputs}
        return times

    def shown_by(self, adapter: str, law: str, device: str) -> list[Known]:
        """The defects whose lines a check of this adapter and law runs again, to see whether they still fail."""
        return [defect for defect in self if (defect.run.adapter, defect.run.law) == (adapter, law) and defect.applies(device)]


NO_DEFECTS = KnownDefects()


def _outputs(case: Any) -> set[str]:
    """The names of all outputs and gradients of a case, both with gate and beta as inputs and computed in the kernel."""
    forms = [case]
    if isinstance(case, Case) and case.operation != "delta_rule":
        forms += [dataclasses.replace(case, values="ordinary", in_kernel=form) for form in ("none", "both")]
    return {port.name for form in forms for port in (*form.spec.outputs, *form.spec.gradients())}


def load(path: pathlib.Path = FILE) -> KnownDefects:
    """The defects of a TOML file. ValueError names the entry and the rule that the entry breaks."""
    entries = tomllib.loads(path.read_text()).get("defect", [])
    return KnownDefects(_known(index, entry) for index, entry in enumerate(entries))


def _known(index: int, entry: dict[str, object]) -> Known:
    missing = {"run", "versions", "where", "reason"} - entry.keys()
    if missing:
        raise ValueError(f"known defect {index} must have {', '.join(sorted(missing))}")
    run = Run.parse(str(entry["run"]))
    if run.adapter not in BUILT_IN:
        raise ValueError(f"known defect {index}: adapter must be one of {', '.join(BUILT_IN)}, got {run.adapter}")
    versions = entry["versions"]
    if not isinstance(versions, dict) or not versions:
        raise ValueError(f"known defect {index}: versions must name a distribution and its versions, got {versions!r}")
    listed = {name: tuple(choices) for name, choices in versions.items()}
    also, laws = entry.get("also", []), book_of(run.example.case).laws
    if not isinstance(also, list) or not set(also) <= laws.keys():
        raise ValueError(f"known defect {index}: also must be a list of laws among {', '.join(laws)}, got {also!r}")
    least, most = (_numbers(index, entry, *pair) for pair in (("least", "least"), ("most", "greatest")))
    outputs, times = entry.get("outputs", []), entry.get("times", math.inf)
    names = {"call", *_outputs(run.example.case)} if outputs else set()
    if not isinstance(outputs, list) or not set(outputs) <= names:
        raise ValueError(f"known defect {index}: outputs must be a list of some of {', '.join(sorted(names))}, got {outputs!r}")
    if not isinstance(times, int | float) or times < 1:
        raise ValueError(f"known defect {index}: times must be a number from 1 up, got {times!r}")
    words_of = split_line(str(entry["where"]))
    somewhere = entry.get("somewhere", False)
    if not isinstance(somewhere, bool):
        raise ValueError(f"known defect {index}: somewhere must be true or false, got {somewhere!r}")  # noqa: TRY004
    known = Known(run, listed, words_of, str(entry["reason"]), tuple(also), least, most, tuple(outputs), float(times), somewhere)
    if not known.where:
        raise ValueError(f"known defect {index}: where must have at least one word, or the defect would hide everything")
    words = run.example.case.words()
    for what, numbers, sign in (("least", known.least, -1), ("most", known.most, 1)):
        for name, number in numbers.items():
            if not words.get(name, "").isdecimal() or sign * int(words[name]) > sign * number:
                raise ValueError(
                    f"known defect {index}: {what} must hold for its own run, got {name}={number} and {words.get(name)}"
                )
    for name, value in known.where.items():
        if words.get(name) != value:
            raise ValueError(f"known defect {index}: where must hold for its own run, got {name}={value} and {words.get(name)}")
    return known


def _numbers(index: int, entry: dict[str, object], name: str, which: str) -> dict[str, int]:
    """The words of an entry's `least` or `most` with their numbers. ValueError if they are not whole numbers."""
    numbers = entry.get(name, {})
    if not isinstance(numbers, dict) or not all(isinstance(number, int) for number in numbers.values()):
        raise ValueError(f"known defect {index}: {name} must give words their {which} whole numbers, got {numbers!r}")
    return numbers
