"""Known defects of released code: reported, and no failure; one that no longer fails is reported too."""

import dataclasses
import pathlib
import tomllib

from oracles.line import split_line
from properties.books import book_of
from verify.adapter import BUILT_IN, installed
from verify.run import Run

FILE = pathlib.Path(__file__).with_name("known_defects.toml")


@dataclasses.dataclass(frozen=True)
class Known:
    """A defect on file: the run line that shows it, the versions that have it, and which other cases of the law it explains.

    `where` is words of a case line; a finding of the same adapter and law, or one of the laws in `also`, on a case that has all of
    them is this defect.
    """

    run: Run
    versions: dict[str, tuple[str, ...]]
    where: dict[str, str]
    reason: str
    also: tuple[str, ...] = ()

    def applies(self) -> bool:
        """Whether the installed versions are among those that have it."""
        return all(installed(name) in listed for name, listed in self.versions.items())

    def explains(self, run: Run) -> bool:
        """Whether a finding of `run` is this defect."""
        if run.adapter != self.run.adapter or run.law not in (self.run.law, *self.also) or not self.applies():
            return False
        words = run.example.case.words()
        return all(words[name] == value for name, value in self.where.items())


def load(path: pathlib.Path = FILE) -> list[Known]:
    """The defects of a TOML file. ValueError names the entry and the rule it breaks."""
    entries = tomllib.loads(path.read_text()).get("defect", [])
    return [_known(index, entry) for index, entry in enumerate(entries)]


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
    known = Known(run, listed, split_line(str(entry["where"])), str(entry["reason"]), tuple(also))
    if not known.where:
        raise ValueError(f"known defect {index}: where must have at least one word, or the defect would hide everything")
    words = run.example.case.words()
    for name, value in known.where.items():
        if words.get(name) != value:
            raise ValueError(f"known defect {index}: where must hold for its own run, got {name}={value} and {words.get(name)}")
    return known
