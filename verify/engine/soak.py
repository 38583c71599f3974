"""Soaks: checks of several adapters in rounds, each round with another seed, until a time is over.

A round is a check (verify/engine/check.py) and can be repeated as one. The first rounds are short, so that every law of every
adapter is checked soon. Later rounds have more cases and climb from those with the largest errors.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.paths.domain import PathDomain
from verify.engine.asking import Described, describe, interpreted, started
from verify.engine.check import Check
from verify.engine.profiles import PROFILES, Profile
from verify.engine.state import Settings
from verify.findings.law_report import LawReport, overall, reach_of
from verify.findings.regressions import Examples
from verify.findings.report import laws_that_hold, times
from verify.findings.store import Store
from verify.gpu.policies import Denied
from verify.process.outcome import Verdict
from verify.process.worker import Worker

# The profiles of the first rounds, by device. All later rounds use the last profile.
PACE = {"cpu": ("few", "quick", "ci"), "cuda": ("quick", "gpu")}
SUMMED = ("kernel_s", "oracle_s", "wall_s", "wait_s", "started", "start_s", "planned")


@dataclasses.dataclass(frozen=True)
class Round:
    """One check of a soak."""

    number: int
    spec: str
    profile: Profile
    seed: int

    def __str__(self) -> str:
        """The command that runs this round again."""
        return f"check {self.spec} --profile {self.profile.name} --seed {self.seed} --climb"


class Soak:
    """A soak of some adapters.

    - `laws`: names of laws; None means all laws about an adapter's operation. A law that broke is not checked again.
    - `place(spec)` returns the device of an adapter, `workers(device)` and `compilers(device)` how many processes a device has.
    - `profile`: the profile of every round; None means the profiles of PACE.
    - `known`: files of known defects. `denied`: a deny-list. `sequential` as for a Worker.
    - `on_round` is called at the start of each round, `on_case(what, done, of)` after each case, `on_report` for each broken law,
      from any thread.
    """

    def __init__(
        self,
        specs: Sequence[str],
        laws: Sequence[str] | None = None,
        *,
        seed: int = 0,
        place: Callable[[str], str] = lambda spec: "cpu",
        workers: Callable[[str], int] = lambda device: 1,
        compilers: Callable[[str], int] = lambda device: 0,
        store: Store | None = None,
        examples: Examples | None = None,
        profile: Profile | None = None,
        stop_at_first: bool = False,
        deadline_s: float = 120.0,
        sequential: bool = False,
        products: str | None = None,
        tune: str = "",
        known: Sequence[str] = (),
        denied: Sequence[Denied] = (),
        on_round: Callable[[Round], None] = lambda begun: None,
        on_case: Callable[[str, int, int], None] = lambda what, done, of: None,
        on_report: Callable[[LawReport], None] = lambda report: None,
    ) -> None:
        self.specs, self.laws, self.seed = list(dict.fromkeys(specs)), laws, seed
        self.store, self.examples, self.profile = store or Store(), examples, profile
        self.stop_at_first, self.deadline_s, self.products, self.tune = stop_at_first, deadline_s, products, tune
        self.on_round, self.on_case, self.on_report = on_round, on_case, on_report
        self._known, self._denied, self._sequential = known, denied, sequential
        self._place, self._count, self._compilers = place, workers, compilers
        self._workers: dict[str, list[Worker]] = {}
        self._devices: dict[str, str] = {}
        self._reports: dict[tuple[str, str], LawReport] = {}
        self.described: dict[str, Described] = {}
        self.warnings: list[str] = []
        self.rounds = 0

    def __enter__(self) -> "Soak":
        return self

    def __exit__(self, *_: object) -> None:
        for workers in self._workers.values():
            for worker in workers:
                worker.close()
        self.store.close()

    @property
    def reports(self) -> list[LawReport]:
        """The reports so far, one for each adapter and law."""
        return list(self._reports.values())

    @property
    def processes(self) -> int:
        """How many workers run cases."""
        return sum(map(len, self._workers.values()))

    def describe(self) -> dict[str, Described]:
        """The adapters' declarations.

        AdapterError if an adapter cannot be loaded, NoInterpreter if the installed Triton cannot interpret its kernels.
        """
        for spec in self.specs:
            if spec in self.described:
                continue
            device = self._place(spec)
            described = describe(spec, self._started(device)[0])
            self._devices[spec] = device
            self.described[spec] = described
            if warning := interpreted(described, device, self.deadline_s):
                self.warnings = [warning]
            for law in self.laws or book_of(described.domain).about(described.domain.operation):
                self._reports[spec, law] = LawReport(law, spec, Verdict.UNKNOWN, reason="no case was run")
        return self.described

    def run(self, seconds: float) -> list[LawReport]:
        """Run rounds until the time is over or no law is left to check; with `stop_at_first`, until a law is broken.

        The results of an interrupted round are in `reports`. A broken case is shrunk even if the time ends meanwhile.
        """
        self.describe()
        end = time.monotonic() + seconds
        while time.monotonic() < end and (left := [spec for spec in self.specs if self._open(spec)]):
            self.rounds += 1
            for place, spec in enumerate(left):
                now = time.monotonic()
                # Each adapter gets an equal share of the time that is left, so that a long round does not use up the others' time.
                self._round(spec, now + max(0.0, end - now) / (len(left) - place))
                if self.stop_at_first and any(report.verdict is Verdict.BROKEN for report in self.reports):
                    return self.reports
        return self.reports

    def _round(self, spec: str, until: float) -> None:
        device = self._devices[spec]
        pace = PACE[device]
        profile = self.profile or PROFILES[pace[min(self.rounds, len(pace)) - 1]]
        this = Round(self.rounds, spec, profile, round_seed(self.seed, self.rounds))
        self.on_round(this)
        label = f"{spec} " if len(self.specs) > 1 else ""
        settings = Settings(
            spec,
            self.laws,
            profile,
            this.seed,
            device=device,
            tune=self.tune or (str(this.seed) if device == "cuda" else ""),
            products=self.products,
            climbs=True,
            stop_at_first=self.stop_at_first,
            compilers=0 if isinstance(self.described[spec].domain, PathDomain) else self._compilers(device),
            skip=self._closed(spec),
            until=until,
            known=self._known,
            denied=self._denied,
        )
        checking = Check(
            settings,
            self._started(device),
            self.store,
            examples=self.examples,
            on_case=lambda law, done, of: self.on_case(label + law, done, of),
            on_report=self._on_report,
        )
        with checking as check:
            try:
                check.run()
            finally:
                for report in (*check.reports, *check.unfinished):
                    self._reports[spec, report.law] = merged(self._reports[spec, report.law], report)

    def _on_report(self, report: LawReport) -> None:
        if report.verdict is Verdict.BROKEN:
            self.on_report(report)

    def _started(self, device: str) -> list[Worker]:
        if device not in self._workers:
            self._workers[device] = started(device, self._count(device), self.deadline_s, sequential=self._sequential)
        return self._workers[device]

    def _closed(self, spec: str) -> set[str]:
        """The laws that are not checked any more: those that broke, and those that the adapter does not support."""
        done = (Verdict.BROKEN, Verdict.UNSUPPORTED)
        return {law for (adapter, law), report in self._reports.items() if adapter == spec and report.verdict in done}

    def _open(self, spec: str) -> bool:
        return len(self._closed(spec)) < sum(adapter == spec for adapter, _ in self._reports)


def round_seed(seed: int, number: int) -> int:
    """The seed of a round, in 0..2**32 - 1, as `check --seed` takes it."""
    return mix_words(seed, f"round {number}") % 2**32


def merged(before: LawReport, more: LawReport) -> LawReport:
    """Two reports of one law of one adapter as one: counts and times add up, and a broken law stays broken."""
    base = before if before.verdict is Verdict.BROKEN else more
    counts = _added(before.counts, more.counts)
    verdict, reason = base.verdict, base.reason
    if Verdict.BROKEN not in (before.verdict, more.verdict) and counts:
        undecided = [_undecided(report.reason) for report in (before, more) if report.counts and report.verdict is Verdict.UNKNOWN]
        verdict, reason = overall(counts, next(filter(None, undecided), ""))
    names = before.ratios.keys() | more.ratios.keys()
    data: dict[str, Any] = {name: getattr(before, name) + getattr(more, name) for name in SUMMED}
    return dataclasses.replace(
        base,
        verdict=verdict,
        reason=reason,
        counts=counts,
        ratios={name: max(before.ratios.get(name, 0.0), more.ratios.get(name, 0.0)) for name in sorted(names)},
        regimes=_added(before.regimes, more.regimes),
        left_out=_added(before.left_out, more.left_out),
        known=before.known or more.known,
        cut_short=False,
        fault=before.fault or more.fault,
        fault_run=before.fault_run or more.fault_run,
        reach=reach_of((before, more)),
        **data,
    )


def summary(reports: Sequence[LawReport], rounds: int, wall_s: float, processes: int) -> str:
    """One line: how many laws have each verdict, how many cases were run, how long it took, and in how many processes."""
    cases, adapters = sum(sum(report.counts.values()) for report in reports), len({report.adapter for report in reports})
    line = laws_that_hold(reports, len(reports), f"{adapters} adapter{'' if adapters == 1 else 's'}")
    line += (
        f"; {rounds} round{'' if rounds == 1 else 's'}, {cases} cases in {wall_s:.0f} s, {cases / max(wall_s, 1e-3):.3g} a second"
    )
    return f"{line} {times(reports, processes)}"


def _added(before: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {name: before.get(name, 0) + more.get(name, 0) for name in (*before, *(key for key in more if key not in before))}


def _undecided(reason: str) -> str:
    """The reason why a case was undecided, without the number of undecided cases before it."""
    return re.sub(r"^\d+ of \d+ cases undecided: ", "", reason)
