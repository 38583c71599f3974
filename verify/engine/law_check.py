"""The check of one law of an adapter: draw cases, run them in a worker, count the outcomes, and explain the broken one."""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator

from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.laws.history import AT_ONCE
from properties.laws.law import Law
from properties.words.example import Example
from verify.engine.asking import CLEAR, ask, ask_afresh, ask_all, most_at_once, of_one_key
from verify.engine.climb import climb
from verify.engine.compilers import Need, Pending
from verify.engine.drawing import Look, batches, of_law, seeded
from verify.engine.explaining import limit_s
from verify.engine.repeating import AFTER, YES, after_fewest, earlier, explain_repeating
from verify.engine.shrink import similar, with_ordinary_numbers
from verify.engine.state import CheckState
from verify.engine.worker_pool import WorkerPool
from verify.engine.would_hold import would_hold, would_hold_within
from verify.execution.judging import faulted
from verify.execution.line import Run
from verify.findings.law_report import ENOUGH, LawReport, overall
from verify.gpu import policies
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.process.worker import Worker
from verify.ranks.group import Answering

FAULTS = 3  # after so many cases in a row in which gdn-verify itself fails in the same way, the law ends: more would not decide it
CHANCES = 3  # fresh processes in which a failure that depends on timing may happen again
WORST = 10  # a declaration must suit so many cases like the found one, and so many others, or it is not suggested
SAMPLE = 2  # lines that hold are in the report of a law, so that a certificate can be checked by running some again
REPLACEMENTS = 3  # in place of blind cases, at most so many times the examples of a profile are drawn


class LawCheck:
    """The check of one law. One worker runs all its cases.

    With a `pool`, the law gives its worker back while it waits for kernels that are compiled, and another may run its next cases.
    Its `place` says which law comes first where several wait for a worker.
    """

    def __init__(self, state: CheckState, name: str, worker: Answering, pool: WorkerPool | None = None, place: int = 0) -> None:
        self._state, self._name, self._pool, self._place = state, name, pool, place
        self.held = False  # whether the law has its worker; if not, the check was stopped while it had given it back
        self._done = 0
        self._scores: dict[Example, float] = {}
        self._blind: set[Example] = set()
        self._ratios: dict[Run, float] = {}  # of the cases that hold or are broken, the largest error over its tolerance
        self._broken: tuple[Run, Outcome] | None = None
        self._before: dict[Run, list[Run]] = {}  # of a broken run, what its process had run before
        self._needed: dict[Run, list[Run]] = {}  # of one that holds in a fresh process, after which of these it is broken there
        self._marginal = False  # the first broken case was marginal, so that the law goes on to its last case
        self.waits = False  # the call failed in the first case, as it did in every case of the check so far: not explained yet
        self._drawn: list[Example] = []  # in their order, those of other shards too
        self._faults: list[str] = []  # faults of the last cases, if gdn-verify failed in the same way each time
        settings = state.settings
        self.report = LawReport(
            name,
            settings.adapter,
            Verdict.UNKNOWN,
            seed=settings.seed,
            versions=state.described.versions,
            under=settings.under,
        )
        self._hold(worker)

    def run(self) -> LawReport:
        """Check the law and return its report."""
        report, domain, start = self.report, self._state.described.domain, time.monotonic()
        law = book_of(domain).laws.get(self._name)
        reason = law.needs(domain) if law is not None else "the law is not about the operation of this adapter"
        if law is not None:
            report.kind, report.says, report.planned = law.kind, law.says, -(-self._examples // self._state.settings.shard.count)
        if law is None or reason:
            report.verdict, report.reason = Verdict.UNSUPPORTED, reason or ""
            return report
        self._run_known()
        if not self._stored_failure(law):
            self._draw(law)
        report.sample = self._sample()
        report.wall_s = time.monotonic() - start
        self._note_starts()
        if self._broken is None:
            report.cut_short = self._state.closed and self._done < report.planned
            if not report.cut_short:
                own = sum(self._state.owns(self._name, example) for example in self._drawn)
                report.planned = min(own, self._done)
            report.verdict, report.reason = self._verdict()
            return report
        if not self._state.may_report(self._name):
            report.cut_short, report.reason = True, f"law {self._state.first[0]} was broken first"
            return report
        outcome = self._tell_broken()
        alone = sum(report.counts.values()) == 1 and not self._state.settings.stop_at_first
        # A law whose worker was lost does not wait: after a hang, the first cases of all laws would take too long.
        self.waits = alone and outcome.refused and not outcome.lost and not self._state.answered.is_set()
        return report if self.waits else self.explain()

    @property
    def _examples(self) -> int:
        """How many examples the law has, in all shards together."""
        return self._state.settings.examples_of(book_of(self._state.described.domain).laws[self._name])

    def _verdict(self) -> tuple[Verdict, str]:
        """The verdict of a law that is not broken, and the reason if it does not hold.

        Whether enough cases could see is decided for all shards together, by the verb `merge`.
        """
        report, shard = self.report, self._state.settings.shard
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
        if report.verdict is not Verdict.BROKEN and self._broken is not None and self._state.may_report(self._name):
            self._tell_broken()
        report.verdict = Verdict.BROKEN if report.run else Verdict.UNKNOWN
        report.shrunk = not report.run
        return report

    @property
    def worker(self) -> Answering:
        """The worker that the law has, or had last."""
        return self._worker

    def _hold(self, worker: Answering) -> None:
        self._worker, self.held = worker, True
        self._since = worker.started, worker.start_s

    def _note_starts(self) -> None:
        """Add to the report what the worker has started since the law has it."""
        (started, start_s), worker = self._since, self._worker
        self._since = worker.started, worker.start_s
        self.report.started += worker.started - started
        self.report.start_s += worker.start_s - start_s

    def _ask(self, run: Run) -> Outcome:
        return ask(run, self._worker, self._state.store, defects=self._state.defects)

    def _ask_afresh(self, run: Run) -> Outcome:
        return ask_afresh(run, self._worker, self._state.store, self._state.defects)

    def _run_known(self) -> None:
        """Run the lines of the known defects of this law, and note in the report whether each still fails."""
        settings = self._state.settings
        for defect in self._state.defects.shown_by(settings.adapter, self._name, settings.device):
            if not settings.shard.owns(defect.run.everywhere):
                continue
            if self._state.plan is not None:
                self._await(self._state.plan.pending(defect.run))
            outcome = self._ask(defect.run)
            still = outcome.verdict is Verdict.BROKEN
            if defect.kernel and outcome.lost:
                self._state.defects.deny(defect)
            gone = (
                "known defect, not shown on this processor"
                if defect.somewhere
                else f"known defect NO LONGER FAILS, remove it from {defect.file}"
            )
            self.report.known.append(f"{'known defect, still there' if still else gone}: {defect.reason} ({defect.run})")
        for defect in self._state.defects.outdated(settings.adapter, self._name):
            versions = ", ".join(f"{name} {' or '.join(listed)}" for name, listed in defect.versions.items())
            self.report.known.append(f"known defect of {versions} alone, so not looked for ({defect.file}): {defect.reason}")

    def _stored_failure(self, law: Law) -> bool:
        """Run the lines that broke the law in earlier checks. True if one of them still does, so that no other case is needed.

        Only a line that is still broken is counted in the report. A line that holds again is dropped from the file.
        """
        state, settings = self._state, self._state.settings
        for run in state.examples.of(settings.adapter, law.name, settings.device) if state.examples is not None else ():
            if state.closed:
                break
            # The adapter may have declared other products then.
            if run.products != state.products_of(run.example) or not settings.shard.owns(run.everywhere):
                continue
            outcome = self._confirmed(run, self._ask(run))
            if outcome.verdict is Verdict.BROKEN:
                self.report.count(run, outcome)
                self._note(run, outcome)
                self.report.remembered = True
                if self._ends(outcome):
                    return True
            if outcome.verdict is Verdict.HOLDS and state.examples is not None:
                state.examples.drop(run)
        return False

    def _draw(self, law: Law) -> None:
        """Draw and run cases until one is clearly broken, then climb from those with the largest errors."""
        state, settings = self._state, self._state.settings
        examples, drawn = self._examples, settings.drawn(law)
        begins = law.begins(state.described.domain)
        for batch in self._batches(law, drawn, most_at_once(law, self._worker, settings.device)):
            if any(example in begins for example in batch):
                self._worker.end()  # the next one starts with these
            runs = [state.run_of(law.name, example) for example in batch]
            outcomes = ask_all(runs, self._worker, state.store, state.defects)
            if any(self._counted(*pair) for pair in zip(runs, outcomes, strict=True)):
                return
        if self._replace_blind(law):
            return

        def score(example: Example) -> float | None:
            run = state.run_of(law.name, example)
            return None if self._counted(run, self._ask(run)) else self._scores[example]

        if drawn < examples:
            plan = state.plan
            same_key = plan is not None and plan.palette is not None
            domain, seed = state.described.domain if plan is None else plan.domain, mix_words(settings.seed, law.name)
            climb(law, domain, dict(self._scores), seed, examples - drawn, score, same_key=same_key)

    def _replace_blind(self, law: Law) -> bool:
        """Draw other cases in place of those of the first ENOUGH that are blind. True if the law ends with one of them.

        The others have a seed of their own, so that the law's first cases do not depend on them, and there are at most REPLACEMENTS
        times as many as the profile has examples. Each of the first cases has its own, every ENOUGH-th of them: which are run is
        the same however the check is divided into shards.
        """
        state, counts, seed = self._state, self.report.counts, self._state.settings.seed
        if set(counts) - {Verdict.HOLDS, Verdict.KNOWN, Verdict.BLIND} or self._state.settings.given is not None:
            return False
        places = [place for place, example in enumerate(self._drawn[:ENOUGH]) if example in self._blind]
        if not places:
            return False
        domain = state.described.domain
        strategy = law.draw(domain) if state.plan is None else state.plan.strategy(law, state.plan.domain)
        mixed = mix_words(seed, f"{law.name} in place of blind cases")
        draw = functools.partial(seeded, strategy, mixed, REPLACEMENTS * self._examples, seen=self._drawn)
        for number, (example,) in enumerate(batches(draw, 1)):
            place, run = number % ENOUGH, state.run_of(law.name, example)
            if place in places and self._counted(run, self._ask(run)):
                return True
            if place in places and example not in self._blind:
                places.remove(place)
            if not places:
                return False
        return False

    def lines(self) -> list[Run]:
        """The runs of the law that no outcome decides, in their order. None is run, and nothing is in `report`."""
        state, law = self._state, book_of(self._state.described.domain).laws.get(self._name)
        if law is None or law.needs(state.described.domain):
            return []
        batches_of_one = self._batches(law, state.settings.drawn(law), 1)
        return [state.run_of(law.name, example) for batch in batches_of_one for example in batch]

    def _batches(self, law: Law, examples: int, most: int) -> Iterator[list[Example]]:
        """The law's examples in this shard, in lists of at most `most`. With a plan, a list waits for its kernels."""
        state = self._state
        self._drawn = []
        if state.plan is None:

            def draw(look: Look) -> None:
                if (given := state.settings.given) is not None:
                    for example in given.get(law.name, ()):
                        self._own(look, example)
                    return
                of_law(law, state.described.domain, state.settings.seed, examples, functools.partial(self._own, look))

            yield from batches(draw, most)
            return
        planned = state.plan.of(law.name)
        self._drawn = planned.drawn
        for batch in of_one_key(planned.examples, most):
            for example in batch:
                self._await(planned.pending(example))
            yield batch

    def _own(self, look: Look, example: Example) -> None:
        """Pass on an example of this shard. What is drawn goes on being the same: the others count as drawn."""
        self._drawn.append(example)
        if self._state.owns(self._name, example):
            look(example)

    def _await(self, pending: Pending | None) -> None:
        """Wait for processes that compile, and note the seconds. Meanwhile another law has the worker.

        What the first laws wait for is compiled first, as many laws as there are workers, so that one is decided soon.
        """
        if pending is None:
            return
        start, pool = time.monotonic(), self._pool
        if pool is None:
            pending.wait()
        else:
            self._note_starts()
            self.held = False
            pool.give(self._worker)
            pending.wait(Need.BY_WORKER if self._place < pool.size else Need.BY_LAW)
            if (worker := pool.take(self._place)) is not None:
                self._hold(worker)
        self.report.wait_s += time.monotonic() - start

    def _counted(self, run: Run, outcome: Outcome) -> bool:
        """Count the outcome of a run. True if no further case of the law is needed or allowed."""
        state = self._state
        if state.stopped.is_set() and outcome.verdict is not Verdict.BROKEN:
            return True
        outcome = self._confirmed(run, outcome)
        self._done += 1
        self._scores[run.example] = max(outcome.ratios.values(), default=0.0) if outcome.verdict is Verdict.HOLDS else 0.0
        state.cases.append(run.example.case)
        if not outcome.refused:
            state.answered.set()
        self.report.count(run, outcome)
        for denial in state.defects.denials(run):
            if denial.launched(outcome.tuned):
                self.report.left_out[str(denial)] = self.report.left_out.get(str(denial), 0) + 1
        state.on_case(self._name, self._done, max(self._done, self.report.planned))
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
        return self._ends(outcome) or state.closed or len(self._faults) == FAULTS

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
            if any(denial.launched([kernel]) for denial in self._state.defects.denials(run))
        }
        if ran and run.tune.isdecimal():
            named = dataclasses.replace(run, tune=str(policies.repeating(ran, int(run.tune))))
            for others in (self._before, self._needed):
                others |= {named: others[run]} if run in others else {}
            run = named
        if self._broken is None:
            self._marginal = outcome.worst < CLEAR
        if self._broken is None or outcome.worst > self._broken[1].worst:
            self._broken, self.report.found_case = (run, outcome), sum(self.report.counts.values())
            self.report.remembered = False
            self._keep(run, outcome, "found")

    def _confirmed(self, run: Run, outcome: Outcome) -> Outcome:
        """The outcome after a second look: KNOWN if a known defect explains it, UNKNOWN if a crash or hang does not happen again.

        A failure of a law about what a process keeps must happen again in a new process, or its line would not repeat it, unless a
        known defect explains it. Such a failure, a crash and a hang may also happen again after earlier runs of their process.
        Calls at the same time get several chances, because their failures depend on timing. A sanitizer's finding is repeated too,
        because it may arrive late and belong to the case before.
        """
        by_sanitizer, state = outcome.kind is FailureKind.SANITIZER, self._state
        defect = state.defects.explain(run, outcome)
        by_timing = run.example.variant in AT_ONCE
        if outcome.verdict is Verdict.BROKEN and not (defect or by_sanitizer or by_timing):
            self._before[run] = earlier(self._worker.ran, run)
        afresh = outcome.verdict is Verdict.BROKEN and run.the_law.of_process and not defect
        chances = CHANCES if afresh and by_timing else 1
        again = outcome.lost or by_sanitizer or afresh
        if again and all(self._ask_afresh(run).verdict is not Verdict.BROKEN for _ in range(chances)):
            before = self._before.get(run, ())
            if needed := after_fewest(run, before, self._worker, state.store, state.defects, state.stopped):
                self._needed[run] = needed
                return outcome
            # The host may have killed the worker: nothing shows that this case is at fault.
            self._keep(run, outcome, "found once")
            where = "in a fresh worker" if outcome.lost or afresh else "when it was run again"
            reason = f"{outcome.findings[0].what}, but not again {where}: {run}"
            return Outcome(Verdict.UNKNOWN, reason=reason)
        if defect:
            outcome.verdict = Verdict.KNOWN
            if defect.kernel and outcome.lost:
                self._state.defects.deny(defect)
        return outcome

    def explain(self) -> LawReport:
        """Shrink the broken run and say what is known about it. Returns the report."""
        assert self._broken is not None
        self._pool = None  # it keeps its worker from here on
        run, outcome = self._broken
        report, state, worker, start = self.report, self._state, self._worker, time.monotonic()
        domain = state.described.domain
        explained = explain_repeating(
            run,
            outcome,
            worker,
            state.store,
            state.defects,
            state.stopped,
            domain,
            before=self._before.get(run, ()),
            needed=self._needed.get(run, ()),
            compiled=(lambda run: None) if state.plan is None else state.plan.hurry,
        )
        smallest, best, small, report.repeats = explained.run, explained.outcome, explained.small, explained.repeats
        report.after = list(map(str, explained.after))
        report.run, report.findings, report.shrunk, report.limit = str(smallest), best.findings, small.finished, small.limit
        again = best.kind is FailureKind.OFF and report.repeats == YES
        if again and (example := with_ordinary_numbers(run.the_law, small.example, domain)) is not None:
            ordinary = best if example == small.example else self._ask(dataclasses.replace(run, example=example))
            report.ordinary = sorted({finding.port for finding in ordinary.findings})
        report.neighbours = [what for what, _ in small.neighbours]
        report.fails_too = list(small.others)
        if report.repeats != AFTER:  # a known defect needs no earlier runs
            report.resembles = [defect.title for defect in state.defects.resembling(smallest, best, small.others)]
        self._keep(smallest, best, "shrunk")
        refused = best.kind is FailureKind.RAISED and report.repeats == YES
        if (again or refused) and isinstance(worker, Worker):
            end = time.monotonic() + limit_s(run)

            def more() -> bool:
                return not state.over and time.monotonic() < end

            others = functools.cache(functools.partial(self._others, run))
            asked, deny_list = (state.described, (smallest, run)), state.defects.deny_list
            rounding = would_hold(*asked, worker, state.store, more, others, deny_list) if again else []
            report.otherwise = [*would_hold_within(*asked, best, worker, state.store, more, others, deny_list), *rounding]
        report.shrink_s = time.monotonic() - start
        report.wall_s += report.shrink_s
        return report

    def _others(self, run: Run) -> list[Run]:
        """Other runs of the law: some like the found one, those with the largest errors in tolerances, perhaps the next ones."""
        state, law = self._state, run.the_law
        near = [state.run_of(law.name, example) for example in similar(law, run.example, state.described.domain)]
        runs = sorted(self._ratios, key=lambda other: -self._ratios[other])
        if len(runs) <= WORST:
            for batch in self._batches(law, state.settings.drawn(law), 1):
                runs += [state.run_of(law.name, example) for example in batch]
                if len({*runs}) > self._done + WORST:
                    break
        others = [other for other in dict.fromkeys(runs) if other != run]
        return [other for other in (*near[:WORST], *others[:WORST]) if not state.defects.covering(other)]

    def _keep(self, run: Run, outcome: Outcome, stage: str) -> None:
        state = self._state
        state.store.keep(
            {
                "stage": stage,
                "run": str(run),
                "law": self._name,
                "versions": self.report.versions,
                "seed": state.settings.seed,
                "findings": [finding.to_json() for finding in outcome.findings],
            }
        )
        if state.examples is not None and stage != "found once":
            state.examples.add(run)
