"""The check of one law of an adapter: draw cases, run them in a worker, count the outcomes, and explain the broken one."""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.laws.history import AT_ONCE
from properties.laws.law import Law
from properties.words.example import Example
from verify.engine.asking import Described, ask, ask_afresh, ask_all, most_at_once, of_one_key
from verify.engine.climb import climb, climbed
from verify.engine.compile_plan import Plan
from verify.engine.drawing import Look, batches, of_law, seeded
from verify.engine.explaining import YES, explain_repeating, limit_s, would_hold, would_hold_within
from verify.engine.profiles import PROFILES, Profile
from verify.engine.shard import WHOLE, Shard
from verify.engine.shrink import similar, with_ordinary_numbers
from verify.execution.judging import faulted
from verify.execution.line import Run
from verify.findings.known import KnownDefects
from verify.findings.law_report import ENOUGH, LawReport, overall
from verify.findings.regressions import Examples
from verify.findings.store import Store
from verify.gpu import policies
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.process.worker import Worker
from verify.ranks.group import Answering

FAULTS = 3  # after so many cases in a row in which gdn-verify itself fails in the same way, the law ends: more would not decide it
CLEAR = 2.0  # after a case whose error is less than so many times its tolerance, the law goes on: it may be a false alarm
CHANCES = 3  # fresh processes in which a failure that depends on timing may happen again
WORST = 10  # a declaration must suit so many cases like the found one, and so many others, or it is not suggested
SAMPLE = 2  # lines that hold are in the report of a law, so that a certificate can be checked by running some again
REPLACEMENTS = 3  # in place of blind cases, at most so many times the examples of a profile are drawn


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a check.

    - `laws`: names of laws; None means all laws about the adapter's operation. Laws in `skip` are left out.
    - `products`: how the implementation multiplies float32 matrices; None means what the adapter declares.
    - `climbs`: whether half of the cases are climbed for; None means what the profile says.
    - `deadline_s`: seconds after which a case counts as a hang.
    - `compilers`: how many processes compile kernels ahead; for a path on so many `ranks`, each stands in for one of them.
    - `until`: a time of time.monotonic() after which no case begins.
    - `under`: options that `repeat` needs besides a line to see what this check saw.
    - `known`: files of known defects, besides ours and the one beside the adapter's file. `denied`: a deny-list.
    - `shard`: which lines are run; those of the other shards are drawn alone.
    - `given`: the examples of each law, in place of those that the seed draws.
    - `engine_workers`, `gpu_workers`: the least number of workers on GPUs, if the check starts its own: for a serving engine, and
      for everything else.
    """

    adapter: str
    laws: Sequence[str] | None = None
    profile: Profile = PROFILES["quick"]
    seed: int = 0
    device: str = "cpu"
    tune: str = ""
    products: str | None = None
    climbs: bool | None = None
    stop_at_first: bool = False
    deadline_s: float = 120.0
    compilers: int = 0
    ranks: int = 0
    skip: Collection[str] = ()
    until: float = math.inf
    under: str = ""
    known: Sequence[str] = ()
    denied: Sequence[policies.Denied] = ()
    engine_workers: int = 0
    gpu_workers: int = 0
    shard: Shard = WHOLE
    given: Mapping[str, Sequence[Example]] | None = None

    def examples_of(self, law: str) -> int:
        """How many examples a law has, in all shards together."""
        return self.profile.examples_of(law) if self.given is None else len(self.given.get(law, ()))

    def drawn(self, law: Law) -> int:
        """How many of a law's examples are drawn; the rest is climbed for."""
        examples = self.examples_of(law.name)
        climbs = self.profile.climbs if self.climbs is None else self.climbs
        return examples - (climbed(examples, law.kind) if climbs and self.given is None else 0)


@dataclasses.dataclass
class Common:
    """What all laws of a check share. `on_case(law, done, of)` is called from any thread; `cases` are the cases run so far.

    `answered` is set once a case was more than a call that failed. `first` has the name of the first broken law of a check that
    stops at it.
    """

    settings: Settings
    described: Described
    store: Store
    defects: KnownDefects
    examples: Examples | None
    stopped: threading.Event
    on_case: Callable[[str, int, int], None]
    plan: Plan | None = None
    cases: list[Any] = dataclasses.field(default_factory=list)
    answered: threading.Event = dataclasses.field(default_factory=threading.Event)
    first: list[str] = dataclasses.field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the check was stopped or its time is up."""
        return self.stopped.is_set() or time.monotonic() >= self.settings.until

    @property
    def closed(self) -> bool:
        """Whether no case may begin any more."""
        return self.over or bool(self.first)

    def may_report(self, law: str) -> bool:
        """Whether a broken law may be shrunk and reported: any law, or the first one if the check stops at that."""
        if self.settings.stop_at_first:
            self.first.append(law)  # one step for Python, so that two threads never both come first
        return not self.first or self.first[0] == law

    def products_of(self, example: Example) -> str:
        """How the implementation multiplies float32 matrices in an example: "ieee" or "tf32"."""
        return self.settings.products or self.described.products_of(example, self.settings.device)

    def run_of(self, law: str, example: Example) -> Run:
        """The run of a law's case."""
        settings = self.settings
        return Run(law, settings.adapter, example, self.products_of(example), settings.device, settings.tune)

    def owns(self, law: str, example: Example) -> bool:
        """Whether a law's example is run here, and not in another shard."""
        return self.settings.shard.owns(self.run_of(law, example).everywhere)


class LawCheck:
    """The check of one law. One worker runs all its cases."""

    def __init__(self, common: Common, name: str, worker: Answering) -> None:
        self._common, self._name, self._worker = common, name, worker
        self._done = 0
        self._scores: dict[Example, float] = {}
        self._blind: set[Example] = set()
        self._ratios: dict[Run, float] = {}  # of the cases that hold or are broken, the largest error over its tolerance
        self._broken: tuple[Run, Outcome] | None = None
        self._marginal = False  # the first broken case was marginal, so that the law goes on to its last case
        self.waits = False  # the call failed in the first case, as it did in every case of the check so far: not explained yet
        self._drawn: list[Example] = []  # in their order, those of other shards too
        self._faults: list[str] = []  # faults of the last cases, if gdn-verify failed in the same way each time
        settings = common.settings
        self.report = LawReport(
            name,
            settings.adapter,
            Verdict.UNKNOWN,
            seed=settings.seed,
            versions=common.described.versions,
            under=settings.under,
        )

    def run(self) -> LawReport:
        """Check the law and return its report."""
        report, domain, start, worker = self.report, self._common.described.domain, time.monotonic(), self._worker
        started, start_s = worker.started, worker.start_s
        law = book_of(domain).laws.get(self._name)
        reason = law.needs(domain) if law is not None else "the law is not about the operation of this adapter"
        if law is not None:
            report.kind, report.says, report.planned = law.kind, law.says, -(-self._examples // self._common.settings.shard.count)
        if law is None or reason:
            report.verdict, report.reason = Verdict.UNSUPPORTED, reason or ""
            return report
        self._run_known()
        if not self._stored_failure(law):
            self._draw(law)
        report.sample = self._sample()
        report.wall_s = time.monotonic() - start
        report.started, report.start_s = worker.started - started, worker.start_s - start_s
        if self._broken is None:
            report.cut_short = self._common.closed and self._done < report.planned
            if not report.cut_short:
                own = sum(self._common.owns(self._name, example) for example in self._drawn)
                report.planned = min(own, self._done)
            report.verdict, report.reason = self._verdict()
            return report
        if not self._common.may_report(self._name):
            report.cut_short, report.reason = True, f"law {self._common.first[0]} was broken first"
            return report
        outcome = self._tell_broken()
        alone = sum(report.counts.values()) == 1 and not self._common.settings.stop_at_first
        # A law whose worker was lost does not wait: after a hang, the first cases of all laws would take too long.
        self.waits = alone and outcome.refused and not outcome.lost and not self._common.answered.is_set()
        return report if self.waits else self.explain()

    @property
    def _examples(self) -> int:
        """How many examples the law has, in all shards together."""
        return self._common.settings.examples_of(self._name)

    def _verdict(self) -> tuple[Verdict, str]:
        """The verdict of a law that is not broken, and the reason if it does not hold.

        Whether enough cases could see is decided for all shards together, by the verb `merge`.
        """
        report, shard = self.report, self._common.settings.shard
        if shard.whole:
            return overall(report.counts, report.reason, report.planned)
        if not report.cut_short and not set(report.counts) - {Verdict.BLIND, Verdict.KNOWN, Verdict.UNSUPPORTED}:
            return Verdict.UNSUPPORTED, f"no case of shard {shard} could show a defect"
        return overall(report.counts, report.reason, 0)

    def _sample(self) -> dict[str, float]:
        """Lines that hold, spread evenly over those that ran, each with its largest error over the tolerance."""
        held = [(str(run), ratio) for run, ratio in self._ratios.items() if ratio <= 1]
        places = {place * (len(held) - 1) // max(1, SAMPLE - 1) for place in range(SAMPLE)} if held else set()
        return dict(held[place] for place in sorted(places))

    def _tell_broken(self) -> Outcome:
        """Enter the broken run in the report, and return its outcome."""
        assert self._broken is not None
        (run, outcome), report = self._broken, self.report
        report.verdict, report.run, report.first_run = Verdict.BROKEN, str(run), str(run)
        report.findings = report.first_findings = outcome.findings
        return outcome

    def failed(self, error: Exception) -> LawReport:
        """The report of a law in which gdn-verify itself raised: undecided, or broken by a run that was found before."""
        fault, report = faulted(error), self.report
        report.fault, report.reason = report.fault or fault.fault, fault.reason
        if report.verdict is not Verdict.BROKEN and self._broken is not None and self._common.may_report(self._name):
            self._tell_broken()
        report.verdict = Verdict.BROKEN if report.run else Verdict.UNKNOWN
        report.shrunk = not report.run
        return report

    def _ask(self, run: Run) -> Outcome:
        return ask(run, self._worker, self._common.store, defects=self._common.defects)

    def _ask_afresh(self, run: Run) -> Outcome:
        return ask_afresh(run, self._worker, self._common.store, self._common.defects)

    def _run_known(self) -> None:
        """Run the lines of the known defects of this law, and note in the report whether each still fails."""
        settings = self._common.settings
        for defect in self._common.defects.shown_by(settings.adapter, self._name, settings.device):
            if not settings.shard.owns(defect.run.everywhere):
                continue
            if self._common.plan is not None:
                self._await(functools.partial(self._common.plan.await_known, defect.run))
            outcome = self._ask(defect.run)
            still = outcome.verdict is Verdict.BROKEN
            if defect.kernel and outcome.lost:
                self._common.defects.deny(defect)
            gone = (
                "known defect, not shown on this processor"
                if defect.somewhere
                else f"known defect NO LONGER FAILS, remove it from {defect.file}"
            )
            self.report.known.append(f"{'known defect, still there' if still else gone}: {defect.reason} ({defect.run})")
        for defect in self._common.defects.outdated(settings.adapter, self._name):
            versions = ", ".join(f"{name} {' or '.join(listed)}" for name, listed in defect.versions.items())
            self.report.known.append(f"known defect of {versions} alone, so not looked for ({defect.file}): {defect.reason}")

    def _stored_failure(self, law: Law) -> bool:
        """Run the lines that broke the law in earlier checks. True if one of them still does, so that no other case is needed.

        Only a line that is still broken is counted in the report. A line that holds again is dropped from the file.
        """
        common, settings = self._common, self._common.settings
        for run in common.examples.of(settings.adapter, law.name, settings.device) if common.examples is not None else ():
            if common.closed:
                break
            # The adapter may have declared other products then.
            if run.products != common.products_of(run.example) or not settings.shard.owns(run.everywhere):
                continue
            outcome = self._confirmed(run, self._ask(run))
            if outcome.verdict is Verdict.BROKEN:
                self.report.count(run, outcome)
                self._note(run, outcome)
                self.report.remembered = True
                if self._ends(outcome):
                    return True
            if outcome.verdict is Verdict.HOLDS and common.examples is not None:
                common.examples.drop(run)
        return False

    def _draw(self, law: Law) -> None:
        """Draw and run cases until one is clearly broken, then climb from those with the largest errors."""
        common, settings = self._common, self._common.settings
        examples, drawn = self._examples, settings.drawn(law)
        for batch in self._batches(law, drawn, most_at_once(law, self._worker, settings.device)):
            runs = [common.run_of(law.name, example) for example in batch]
            outcomes = ask_all(runs, self._worker, common.store, common.defects)
            if any(self._counted(*pair) for pair in zip(runs, outcomes, strict=True)):
                return
        if self._replace_blind(law):
            return

        def score(example: Example) -> float | None:
            run = common.run_of(law.name, example)
            return None if self._counted(run, self._ask(run)) else self._scores[example]

        if drawn < examples:
            plan = common.plan
            same_key = plan is not None and plan.palette is not None
            domain, seed = common.described.domain if plan is None else plan.domain, mix_words(settings.seed, law.name)
            climb(law, domain, dict(self._scores), seed, examples - drawn, score, same_key=same_key)

    def _replace_blind(self, law: Law) -> bool:
        """Draw other cases in place of those of the first ENOUGH that are blind. True if the law ends with one of them.

        The others have a seed of their own, so that the law's first cases do not depend on them, and there are at most REPLACEMENTS
        times as many as the profile has examples. Each of the first cases has its own, every ENOUGH-th of them: which are run is
        the same however the check is divided into shards.
        """
        common, counts, seed = self._common, self.report.counts, self._common.settings.seed
        if set(counts) - {Verdict.HOLDS, Verdict.KNOWN, Verdict.BLIND} or self._common.settings.given is not None:
            return False
        places = [place for place, example in enumerate(self._drawn[:ENOUGH]) if example in self._blind]
        if not places:
            return False
        domain = common.described.domain
        strategy = law.draw(domain) if common.plan is None else common.plan.strategy(law, common.plan.domain)
        mixed = mix_words(seed, f"{law.name} in place of blind cases")
        draw = functools.partial(seeded, strategy, mixed, REPLACEMENTS * self._examples, seen=self._drawn)
        for number, (example,) in enumerate(batches(draw, 1)):
            place, run = number % ENOUGH, common.run_of(law.name, example)
            if place in places and self._counted(run, self._ask(run)):
                return True
            if place in places and example not in self._blind:
                places.remove(place)
            if not places:
                return False
        return False

    def lines(self) -> list[Run]:
        """The runs of the law that no outcome decides, in their order. None is run, and nothing is in `report`."""
        common, law = self._common, book_of(self._common.described.domain).laws.get(self._name)
        if law is None or law.needs(common.described.domain):
            return []
        batches_of_one = self._batches(law, common.settings.drawn(law), 1)
        return [common.run_of(law.name, example) for batch in batches_of_one for example in batch]

    def _batches(self, law: Law, examples: int, most: int) -> Iterator[list[Example]]:
        """The law's examples in this shard, in lists of at most `most`. With a plan, a list waits for its kernels."""
        common = self._common
        self._drawn = []
        if common.plan is None:

            def draw(look: Look) -> None:
                if (given := common.settings.given) is not None:
                    for example in given.get(law.name, ()):
                        self._own(look, example)
                    return
                of_law(law, common.described.domain, common.settings.seed, examples, functools.partial(self._own, look))

            yield from batches(draw, most)
            return
        planned = common.plan.of(law.name)
        self._drawn = planned.drawn
        for batch in of_one_key(planned.examples, most):
            for example in batch:
                self._await(functools.partial(planned.wait, example))
            yield batch

    def _own(self, look: Look, example: Example) -> None:
        """Pass on an example of this shard. What is drawn goes on being the same: the others count as drawn."""
        self._drawn.append(example)
        if self._common.owns(self._name, example):
            look(example)

    def _await(self, compiled: Callable[[], None]) -> None:
        """Wait for processes that compile, and note the seconds."""
        start = time.monotonic()
        compiled()
        self.report.wait_s += time.monotonic() - start

    def _counted(self, run: Run, outcome: Outcome) -> bool:
        """Count the outcome of a run. True if no further case of the law is needed or allowed."""
        common = self._common
        if common.stopped.is_set() and outcome.verdict is not Verdict.BROKEN:
            return True
        outcome = self._confirmed(run, outcome)
        self._done += 1
        self._scores[run.example] = max(outcome.ratios.values(), default=0.0) if outcome.verdict is Verdict.HOLDS else 0.0
        common.cases.append(run.example.case)
        if not outcome.refused:
            common.answered.set()
        self.report.count(run, outcome)
        for denial in common.defects.denials(run):
            if denial.launched(outcome.tuned):
                self.report.left_out[str(denial)] = self.report.left_out.get(str(denial), 0) + 1
        common.on_case(self._name, self._done, max(self._done, self.report.planned))
        if outcome.verdict is Verdict.BLIND:
            self._blind.add(run.example)
        if outcome.verdict is Verdict.HOLDS:
            self._ratios[run] = self._scores[run.example]
        if outcome.verdict is Verdict.BROKEN:
            self._note(run, outcome)
        same = [fault for fault in self._faults if fault == outcome.fault]
        self._faults = [*same, outcome.fault] if outcome.fault else []
        if len(self._faults) == FAULTS and self._done < self.report.planned:
            self.report.reason += f"; the law ended after {FAULTS} such cases in a row"
        return self._ends(outcome) or common.closed or len(self._faults) == FAULTS

    def _ends(self, outcome: Outcome) -> bool:
        """Whether the law ends with this outcome: with the first broken case, unless its error is less than CLEAR tolerances.

        Such a case may be a false alarm that hides a defect. The law then goes on, and ends only with a failure of another kind
        than an error over its tolerance, since nothing is worse.
        """
        return outcome.verdict is Verdict.BROKEN and (not self._marginal or outcome.worst == math.inf)

    def _note(self, run: Run, outcome: Outcome) -> None:
        """Keep a broken run if it is the first one or worse than those before.

        If configurations were left out of its draw, its line names those that ran instead, so that it repeats without a deny-list.
        """
        self._ratios[run] = outcome.worst
        ran = {
            kernel: texts
            for kernel, texts in outcome.tuned.items()
            if any(denial.launched([kernel]) for denial in self._common.defects.denials(run))
        }
        if ran and run.tune.isdecimal():
            run = dataclasses.replace(run, tune=str(policies.repeating(ran, int(run.tune))))
        if self._broken is None:
            self._marginal = outcome.worst < CLEAR
        if self._broken is None or outcome.worst > self._broken[1].worst:
            self._broken, self.report.found_case = (run, outcome), sum(self.report.counts.values())
            self.report.remembered = False
            self._keep(run, outcome, "found")

    def _confirmed(self, run: Run, outcome: Outcome) -> Outcome:
        """The outcome after a second look: KNOWN if a known defect explains it, UNKNOWN if a crash or hang does not happen again.

        A failure of a law about what a process keeps must happen again in a new process, or its line would not repeat it, unless a
        known defect explains it. Calls at the same time get several chances, because their failures depend on timing.
        A sanitizer's finding is repeated too, because it may arrive late and belong to the case before.
        """
        by_sanitizer = outcome.kind is FailureKind.SANITIZER
        defect = self._common.defects.explain(run, outcome)
        afresh = outcome.verdict is Verdict.BROKEN and run.the_law.of_process and not defect
        chances = CHANCES if afresh and run.example.variant in AT_ONCE else 1
        again = outcome.lost or by_sanitizer or afresh
        if again and all(self._ask_afresh(run).verdict is not Verdict.BROKEN for _ in range(chances)):
            # An earlier case may have written out of bounds, or the host may have killed the worker: nothing shows that this case
            # is at fault.
            self._keep(run, outcome, "found once")
            where = "in a fresh worker" if outcome.lost or afresh else "when it was run again"
            reason = f"{outcome.findings[0].what}, but not again {where}: {run}"
            return Outcome(Verdict.UNKNOWN, reason=reason)
        if defect:
            outcome.verdict = Verdict.KNOWN
            if defect.kernel and outcome.lost:
                self._common.defects.deny(defect)
        return outcome

    def explain(self) -> LawReport:
        """Shrink the broken run and say what is known about it. Returns the report."""
        assert self._broken is not None
        run, outcome = self._broken
        report, common, worker, start = self.report, self._common, self._worker, time.monotonic()
        domain = common.described.domain
        explained = explain_repeating(run, outcome, worker, common.store, common.defects, common.stopped, domain)
        smallest, best, small, report.repeats = explained.run, explained.outcome, explained.small, explained.repeats
        report.run, report.findings, report.shrunk, report.limit = str(smallest), best.findings, small.finished, small.limit
        again = best.kind is FailureKind.OFF and report.repeats == YES
        if again and (example := with_ordinary_numbers(run.the_law, small.example, domain)) is not None:
            ordinary = best if example == small.example else self._ask(dataclasses.replace(run, example=example))
            report.ordinary = sorted({finding.port for finding in ordinary.findings})
        report.neighbours = [what for what, _ in small.neighbours]
        report.fails_too = list(small.others)
        report.resembles = [defect.title for defect in common.defects.resembling(smallest, best, small.others)]
        self._keep(smallest, best, "shrunk")
        refused = best.kind is FailureKind.RAISED and report.repeats == YES
        if (again or refused) and isinstance(worker, Worker):
            end = time.monotonic() + limit_s(run)

            def more() -> bool:
                return not common.over and time.monotonic() < end

            others = functools.cache(functools.partial(self._others, run))
            asked, deny_list = (common.described, (smallest, run)), common.defects.deny_list
            rounding = would_hold(*asked, worker, common.store, more, others, deny_list) if again else []
            report.otherwise = [*would_hold_within(*asked, best, worker, common.store, more, others, deny_list), *rounding]
        report.shrink_s = time.monotonic() - start
        report.wall_s += report.shrink_s
        return report

    def _others(self, run: Run) -> list[Run]:
        """Other runs of the law: some like the found one, those with the largest errors in tolerances, perhaps the next ones."""
        common, law = self._common, run.the_law
        near = [common.run_of(law.name, example) for example in similar(law, run.example, common.described.domain)]
        runs = sorted(self._ratios, key=lambda other: -self._ratios[other])
        if len(runs) <= WORST:
            for batch in self._batches(law, common.settings.drawn(law), 1):
                runs += [common.run_of(law.name, example) for example in batch]
                if len({*runs}) > self._done + WORST:
                    break
        others = [other for other in dict.fromkeys(runs) if other != run]
        return [other for other in (*near[:WORST], *others[:WORST]) if not common.defects.covering(other)]

    def _keep(self, run: Run, outcome: Outcome, stage: str) -> None:
        common = self._common
        common.store.keep(
            {
                "stage": stage,
                "run": str(run),
                "law": self._name,
                "versions": self.report.versions,
                "seed": common.settings.seed,
                "findings": [finding.to_json() for finding in outcome.findings],
            }
        )
        if common.examples is not None and stage != "found once":
            common.examples.add(run)
