"""The hunt: run every law of its book against every wrong implementation ("animal"), and count the cases until each law kills it.

A law kills an animal if one of its cases is broken. The cases of a law are those that `check` draws in the default profile. They
are drawn once for all animals of one domain. Every animal runs the first quarter of the cases. An animal that fewer than three laws
have killed by then runs the rest too. So a survivor has run everything that `check` would run, and an animal that every law kills
costs little.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from properties.books import Book, book_of
from properties.words.example import Example
from properties.words.sizes import MOST, sized
from verify.adapters.registry import ZOO
from verify.engine.asking import ask
from verify.engine.drawing import of_law
from verify.engine.explaining import explain
from verify.engine.profiles import PROFILES
from verify.execution.line import Run
from verify.findings.known import NO_DEFECTS
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker
from verify.zoo.animals import Animal, right_of
from verify.zoo.crew import Crew
from verify.zoo.incidents import INCIDENTS

PROFILE = PROFILES["quick"]
QUARTER = 4
IN_FULL = 3  # an animal that so many laws have killed after the first quarter skips the remaining cases
LOST = 3  # an animal that ended its process so often is run no more: a new process costs seconds
SHRINK_S = 20.0


@dataclasses.dataclass
class Cell:
    """The result of one law for one animal.

    `planned` is the number of cases that are to be run, or None before they are drawn. `asked` counts the cases run, of which
    `holding` hold and `blind` could not see. `killed_at` is the number, from 1, of the case that killed the animal. `seconds` is
    the time that these cases take, with the computation of their tolerances.
    """

    law: str
    planned: int | None = None
    asked: int = 0
    holding: int = 0
    blind: int = 0
    killed_at: int | None = None
    seconds: float = 0.0
    run: str = ""
    what: str = ""
    reason: str = ""
    broken: tuple[Run, Outcome] | None = None

    @property
    def state(self) -> str:
        """The state: "killed", "alive", "blind", "undecided" or "not asked". For the last, `reason` has the reason."""
        if self.killed_at is not None:
            return "killed"
        if not self.asked:
            return "not asked"
        if self.asked > self.holding + self.blind:
            return "undecided"
        return "alive" if self.holding else "blind"

    @property
    def finished(self) -> bool:
        """Whether the law killed the animal, is not about it, or had all of its cases run."""
        return self.killed_at is not None or self.asked == self.planned or (not self.asked and bool(self.reason))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        fields = [field.name for field in dataclasses.fields(self) if field.name != "broken"]
        data = {"held" if name == "holding" else name: getattr(self, name) for name in fields}
        return data | {"state": self.state, "seconds": round(self.seconds, 3)}


@dataclasses.dataclass
class Fate:
    """The results of one animal: a Cell for each law of its book, in the book's order."""

    animal: Animal
    book: Book
    domain: Any
    cells: dict[str, Cell]
    smallest: str = ""
    lost: int = 0

    @property
    def killers(self) -> list[Cell]:
        """The cells of the laws that killed the animal, sorted by number of cases, then in the book's order."""
        return sorted((cell for cell in self.cells.values() if cell.killed_at is not None), key=lambda cell: cell.killed_at or 0)

    @property
    def was_run(self) -> bool:
        """Whether the animal ran any case."""
        return any(cell.asked for cell in self.cells.values())

    @property
    def verdict(self) -> str:
        """The verdict: "killed", "SURVIVES", "not finished" (some of its cases were not run) or "not asked"."""
        if self.killers or not self.was_run:
            return "killed" if self.killers else "not asked"
        return "SURVIVES" if all(cell.finished for cell in self.cells.values()) else "not finished"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.animal.name,
            "spec": self.animal.spec,
            "letter": self.animal.letter,
            "incident": list(self.animal.incident),
            "story": self.animal.story,
            "book": self.book.name,
            "verdict": self.verdict,
            "killed_by": [cell.law for cell in self.killers],
            "smallest": self.smallest or (self.killers[0].run if self.killers else ""),
            "laws": [cell.to_json() for cell in self.cells.values()],
        }


@dataclasses.dataclass
class Herd:
    """The animals of one domain, one law of their book, and the cases that they share."""

    law: str
    fates: list[Fate]
    examples: list[Example] = dataclasses.field(default_factory=list)

    @property
    def book(self) -> Book:
        """The book of the law."""
        return self.fates[0].book


class Hunt(Crew):
    """A hunt: some animals against some laws; without `laws`, against all laws of their books.

    `fates` has the results so far. `alarms` are the lines of cases that rejected right code; these cases count as no kill. With
    `until`, an animal that so many laws have killed runs no further cases, and broken cases are not shrunk.
    `on_case(what, done, of)` is called as the hunt proceeds, from any thread.
    """

    def __init__(
        self,
        animals: Sequence[Animal],
        laws: Iterable[str] | None = None,
        seed: int = 0,
        workers: int = 2,
        *,
        deadline_s: float = 10.0,
        until: int | None = None,
        on_case: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> None:
        self.seed, self.on_case, self.until, self.runs = seed, on_case, until, 0
        self.alarms: list[str] = []
        super().__init__([Worker(deadline_s) for _ in range(max(1, workers))])
        self.started, self.ended = time.monotonic(), 0.0
        self.fates = [self._fate(animal, set(laws) if laws is not None else None) for animal in animals]

    @staticmethod
    def _fate(animal: Animal, laws: set[str] | None) -> Fate:
        domain = sized(animal.kind.domain, animal.kind.chunk, MOST["quick"], animal.kind.algorithm)
        book = book_of(domain)
        fate = Fate(animal, book, domain, {name: Cell(name) for name in book.laws if laws is None or name in laws})
        for name, cell in fate.cells.items():
            cell.reason = book.laws[name].needs(domain) or ""
        return fate

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="gdn-verify-zoo-")
        self._store = Store(self._folder.name)  # a temporary store, because failures of animals are no findings
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    @property
    def wall_s(self) -> float:
        """Seconds since the hunt was created, or its duration once it has ended."""
        return (self.ended or time.monotonic()) - self.started

    def run(self) -> list[Fate]:
        """Run the hunt. The fates are in the order of the animals."""
        herds = list(self._herds())
        self._run_all(herds, lambda herd, worker: self._ask(herd, worker, "", slice(0, self._share(herd)), herd.fates))
        hardy = {id(fate) for fate in self.fates if len(fate.killers) < IN_FULL}
        rest = [(herd, [fate for fate in herd.fates if id(fate) in hardy and self._continues(fate, herd)]) for herd in herds]
        rest = [(herd, fates) for herd, fates in rest if fates]
        self._run_all(rest, lambda item, worker: self._ask(item[0], worker, "+", slice(self._share(item[0]), None), item[1]))
        killed, done = [fate for fate in self.fates if fate.killers and self.until is None], 0

        def smallest(fate: Fate, worker: Worker) -> None:
            nonlocal done
            self._shrink(fate, worker)
            done += 1
            self.on_case("smallest", done, len(killed))

        self._run_all(killed, smallest)
        self.ended = time.monotonic()
        return self.fates

    def _herds(self) -> Iterator[Herd]:
        """The herds, the largest first, so that at the end no worker is alone with a large one."""
        groups: dict[tuple[str, str, Any], Herd] = {}
        for fate in self.fates:
            for law, cell in fate.cells.items():
                if not cell.reason:
                    groups.setdefault((fate.book.name, law, fate.domain), Herd(law, [])).fates.append(fate)
        return iter(sorted(groups.values(), key=lambda herd: -len(herd.fates) * PROFILE.examples_of(herd.book.laws[herd.law])))

    @staticmethod
    def _share(herd: Herd) -> int:
        return PROFILE.examples_of(herd.book.laws[herd.law]) // QUARTER

    def _continues(self, fate: Fate, herd: Herd) -> bool:
        if fate.cells[herd.law].killed_at is not None or fate.lost >= LOST:
            return False
        return self.until is None or len(fate.killers) < self.until

    def _ask(self, herd: Herd, worker: Worker, more: str, share: slice, fates: Sequence[Fate]) -> None:
        """Run a share of a law's cases. Each case is run on every living animal in turn, so that they share its tolerances."""
        law = herd.book.laws[herd.law]
        if not herd.examples:
            of_law(law, herd.fates[0].domain, self.seed, PROFILE.examples_of(law), herd.examples.append)
            for fate in herd.fates:
                fate.cells[herd.law].planned = len(herd.examples)
        cases = list(enumerate(herd.examples, 1))[share]
        for done, (number, example) in enumerate(cases, 1):
            bounds_s, broken = 0.0, list[tuple[Fate, Run, Outcome]]()
            for fate in fates:
                if not self._continues(fate, herd):
                    continue
                run = Run(law.name, fate.animal.spec, example)
                outcome, bounds_s = self._one(run, fate, bounds_s, worker)
                if self._stopped.is_set():
                    return
                if outcome.verdict is Verdict.BROKEN:
                    broken.append((fate, run, outcome))
            self._kill(broken, number, worker)
            self.on_case(law.name + more, done, len(cases))

    def _one(self, run: Run, fate: Fate, bounds_s: float, worker: Worker) -> tuple[Outcome, float]:
        """The outcome of an animal on a case, and the seconds that the case's tolerances took.

        The first animal computes the tolerances for all. Their time is added to every animal's seconds all the same.
        """
        cell, start = fate.cells[run.law], time.monotonic()
        outcome = ask(run, worker, self._store)
        if outcome.lost:  # run again in a new process: an earlier animal may have written out of bounds
            fate.lost += 1
            if fate.lost == 1:
                outcome = ask(run, worker, self._store)
        if self._stopped.is_set():
            return outcome, bounds_s
        bounds_s = max(bounds_s, outcome.oracle_s)
        self.runs += 1
        cell.asked += 1
        cell.seconds += time.monotonic() - start - outcome.oracle_s + bounds_s
        cell.holding += outcome.verdict is Verdict.HOLDS
        cell.blind += outcome.verdict is Verdict.BLIND
        if outcome.verdict in (Verdict.UNKNOWN, Verdict.UNSUPPORTED):
            cell.reason = outcome.reason
        return outcome, bounds_s

    def _kill(self, broken: Sequence[tuple[Fate, Run, Outcome]], number: int, worker: Worker) -> None:
        """Count the kills of a case, unless the case also rejects the right implementation from which the animal is derived."""
        controls: dict[type[Any] | None, str] = {None: ""}
        for fate, run, outcome in broken:
            cell, right = fate.cells[run.law], right_of(fate.animal.kind)
            if right not in controls:
                assert right is not None
                control = dataclasses.replace(run, adapter=ZOO + right.__name__)
                rejected = ask(control, worker, self._store).verdict is Verdict.BROKEN
                controls[right] = str(control) if rejected else ""
                if rejected:
                    self.alarms.append(str(control))
                    worker.end()  # a fresh process, in case an animal left something behind in this one
            if controls[right]:
                cell.reason = f"right code is rejected too: {controls[right]}"
                continue
            finding = outcome.findings[0]
            cell.killed_at, cell.run, cell.broken = number, str(run), (run, outcome)
            cell.what = f"{finding.place}: {finding.what}"

    def _shrink(self, fate: Fate, worker: Worker) -> None:
        """Shrink the case of the law that needed the fewest cases, and store its line."""
        broken = fate.killers[0].broken
        assert broken is not None
        run, outcome = broken
        fate.smallest = str(run)
        if outcome.lost:
            return  # every smaller case would cost a process or the deadline
        law = fate.book.laws[run.law]
        small, _ = explain(law, run, outcome, worker, self._store, NO_DEFECTS, self._stopped, SHRINK_S)
        if not self._stopped.is_set():
            fate.smallest = str(dataclasses.replace(run, example=small.example))


@dataclasses.dataclass(frozen=True)
class Summary:
    """A hunt in numbers.

    `twins` are the rows of the record of incidents that some animal repeats, `without` the other rows. `median_cases` is the median
    number of cases until the first kill.
    """

    animals: int
    killed: int
    alive: int
    not_finished: int
    not_asked: int
    median_cases: float | None
    runs: int
    wall_s: float
    twins: tuple[int, ...]
    without: tuple[int, ...]
    kills_of_law: dict[str, int]


def summary(hunt: Hunt) -> Summary:
    """The numbers of a hunt."""
    verdicts = [fate.verdict for fate in hunt.fates]
    first = [fate.killers[0].killed_at or 0 for fate in hunt.fates if fate.killers]
    twins = {row for fate in hunt.fates for row in fate.animal.incident}
    kills: dict[str, int] = {}
    for fate in hunt.fates:
        for name, cell in fate.cells.items():
            key = law_key(fate.book, name)
            kills[key] = kills.get(key, 0) + (cell.killed_at is not None)
    return Summary(
        len(verdicts),
        verdicts.count("killed"),
        verdicts.count("SURVIVES"),
        verdicts.count("not finished"),
        verdicts.count("not asked"),
        statistics.median(first) if first else None,
        hunt.runs,
        hunt.wall_s,
        tuple(sorted(twins)),
        tuple(row for row in INCIDENTS if row not in twins),
        kills,
    )


def law_key(book: Book, law: str) -> str:
    """A law's name with its book, because laws of two books may share a name."""
    return f"{book.name}/{law}"
