"""Known defects of released code: reported, and no failure; one that no longer fails is reported too."""

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
    """A defect on file: the run line that shows it, the versions that have it, and which other cases of the law it explains.

    `where` is words of a case line; a finding of the same adapter and law, or one of the laws in `also`, on a case that has all of
    them is this defect; one shown on a GPU is one of GPUs only. `least` and `most` are words whose numbers go no further down and
    up; where `outputs` are named, no other one may be wrong, and by no more than `times` its bound. `somewhere`: processors differ,
    and on some it does not show.
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
        """Whether the installed versions are among those that have it; one shown on a GPU is one of GPUs only."""
        return self.run.device in ("cpu", device) and all(installed(name) in listed for name, listed in self.versions.items())

    def explains(self, run: Run, findings: Sequence[Finding] = ()) -> bool:
        """Whether what was found in `run` is this defect; before it is run, whether it would be whatever is found."""
        return self.covers(run) and (not self.outputs or (bool(findings) and all(self._explains(finding) for finding in findings)))

    def covers(self, run: Run) -> bool:
        """Whether `run` is one that this defect may show in."""
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
    """The defects on file. Here alone it is decided whether what a run came to is one of them."""

    def __init__(self, defects: Iterable[Known] = ()) -> None:
        self._defects = tuple(defects)

    def __iter__(self) -> Iterator[Known]:
        return iter(self._defects)

    def explain(self, run: Run, outcome: Outcome) -> Known | None:
        """The defect that a broken run shows, or None."""
        if outcome.verdict is not Verdict.BROKEN:
            return None
        return next((defect for defect in self if defect.explains(run, outcome.findings)), None)

    def whatever(self, run: Run) -> Known | None:
        """The defect that anything found in a run would be, before the run; None where it depends on what is found."""
        return next((defect for defect in self if defect.explains(run)), None)

    def excused(self, run: Run) -> dict[str, float]:
        """The outputs that defects take over their tolerance in `run`, by so many times at most.

        Those that a defect may make wrong by any amount are not among them: an error near the tolerance is not it.
        """
        times: dict[str, float] = {}
        for defect in self:
            if defect.outputs and math.isfinite(defect.times) and defect.covers(run):
                times |= {output: max(defect.times, times.get(output, 0.0)) for output in defect.outputs}
        return times

    def shown_by(self, adapter: str, law: str, device: str) -> list[Known]:
        """The defects that a check of this law of an adapter runs again, to see whether they are still there."""
        return [each for each in self if (each.run.adapter, each.run.law) == (adapter, law) and each.applies(device)]


NO_DEFECTS = KnownDefects()


def _outputs(case: Any) -> set[str]:
    """Every output and gradient of a case, also where its gate and beta are computed by the operation or given to it."""
    forms = [case]
    if isinstance(case, Case) and case.operation != "delta_rule":
        forms += [dataclasses.replace(case, values="ordinary", in_kernel=form) for form in ("none", "both")]
    return {port.name for form in forms for port in (*form.spec.outputs, *form.spec.gradients())}


def load(path: pathlib.Path = FILE) -> KnownDefects:
    """The defects of a TOML file. ValueError names the entry and the rule it breaks."""
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
    listed = {name: tuple(each) for name, each in versions.items()}
    also, laws = entry.get("also", []), book_of(run.example.case).laws
    if not isinstance(also, list) or not set(also) <= laws.keys():
        raise ValueError(f"known defect {index}: also must be a list of laws among {', '.join(laws)}, got {also!r}")
    least, most = (_numbers(index, entry, *each) for each in (("least", "least"), ("most", "greatest")))
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
    """The words of an entry's `least` or `most`, and their numbers."""
    numbers = entry.get(name, {})
    if not isinstance(numbers, dict) or not all(isinstance(number, int) for number in numbers.values()):
        raise ValueError(f"known defect {index}: {name} must give words their {which} whole numbers, got {numbers!r}")
    return numbers
