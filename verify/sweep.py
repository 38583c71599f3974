"""Sweeps: every autotune configuration of every kernel of an implementation, judged, and those at fault put on a deny-list.

Autotuning takes the fastest configuration, right or wrong, and another one on the next card: a defect of one of them is seen by
whoever's clock chose it. All kernels step through their configurations at the same time, so that as many runs as the longest list
has show them all; a run that fails is taken apart kernel by kernel.
"""

import concurrent.futures
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from oracles.counter import mix_words
from properties.books import book_of
from properties.palette import draw_palette, key_of
from properties.strategies import Example
from verify.check import Described, ask, explain, seeded
from verify.judge import Finding, Verdict
from verify.plan import far
from verify.report import finding_lines
from verify.run import Outcome, Run
from verify.store import Store
from verify.tuning import Denied, Policy, narrow, plan
from verify.worker import Worker, WorkerLost

KEYS, CASES = 2, 2  # compile keys, and cases of each: a configuration is compiled anew for every key
LAWS = ("oracle", "memory")  # by bound; and bit for bit, a second run over other memory
TRIES = 6
SHRINK_S = 120.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A configuration, or some that fail together only, with the smallest run that shows it and what it came to."""

    policy: Policy
    run: Run
    findings: list[Finding]

    def denied(self, gpu: str, triton: str) -> list[Denied]:
        """Its entries of a deny-list."""
        finding = self.findings[0]
        error = f"{finding.output}: {finding.what}"
        return [Denied(gpu, triton, kernel, config, self.run.law, str(self.run), error) for kernel, config in self.policy.picks]


@dataclasses.dataclass
class Swept:
    """What a sweep came to: every kernel's configurations, those that do not fit this device, and those at fault."""

    known: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    infeasible: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    ran: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    undecided: list[str] = dataclasses.field(default_factory=list)
    runs: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "known": self.known,
            "infeasible": self.infeasible,
            "ran": {kernel: sorted(configs) for kernel, configs in self.ran.items()},
            "faults": [
                {"tune": str(fault.policy), "run": str(fault.run), "findings": [each.to_json() for each in fault.findings]}
                for fault in self.faults
            ],
            "undecided": self.undecided,
            "runs": self.runs,
        }

    def lines(self) -> list[str]:
        """A line a kernel, and what each fault is."""
        text = []
        for kernel, configs in sorted(self.known.items()):
            missing = set(configs) - self.ran.get(kernel, set()) - set(self.infeasible.get(kernel, {}))
            more = f", {len(self.infeasible[kernel])} do not fit" if self.infeasible.get(kernel) else ""
            more += f", {len(missing)} did not run" if missing else ""
            text.append(f"  {kernel}: {len(self.ran.get(kernel, ()))} of {len(configs)} configurations ran{more}")
        for fault in self.faults:
            text.append(f"WRONG    {' with '.join(f'{kernel} {config}' for kernel, config in fault.policy.picks)}")
            text += finding_lines(fault.findings)
            text.append(f'  repeat       python -m verify repeat "{fault.run}"')
        return text + [f"UNDECIDED  {reason}" for reason in self.undecided]


def examples_of(domain: Any, seed: int, device: str = "cuda") -> Iterator[tuple[str, Example]]:
    """Few cases of few keys, each of which compiles every kernel: (law, example). On the CPU, interpreted, fewer and short ones."""
    domain, keys = (domain, 1) if device == "cpu" else (far(domain), KEYS)
    book = book_of(domain)
    palette = draw_palette(domain, seed, keys, ["oracle"])
    for law in LAWS:
        drawn: list[Example] = []
        seeded(palette.examples(book.laws[law], domain), mix_words(seed, law), 40, drawn.append)
        counts: dict[Any, int] = {}
        for example in drawn:
            case = example.case
            enough = case.backward == getattr(domain, "backward", case.backward) and max(getattr(case, "lengths", (0,))) > 64
            if enough and counts.get(key_of(case), 0) < CASES and len(counts) <= keys:
                counts[key_of(case)] = counts.get(key_of(case), 0) + 1
                yield law, example


class Sweep:
    """A sweep of one adapter. `on_run(done, of)` is told as it goes, from any thread."""

    def __init__(
        self,
        described: Described,
        workers: Sequence[Worker],
        store: Store,
        *,
        seed: int = 0,
        device: str = "cuda",
        products: str = "ieee",
        examples: Iterable[tuple[str, Example]] | None = None,
        on_run: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self.described, self.workers, self.store, self.seed = described, list(workers), store, seed
        self.device, self.products, self.on_run = device, products, on_run
        self.examples = list(examples_of(described.domain, seed, device) if examples is None else examples)
        self.swept = Swept()
        self._idle: queue.Queue[Worker] = queue.Queue()
        self._lock = threading.Lock()
        for worker in self.workers:
            self._idle.put(worker)

    def run(self) -> Swept:
        """Every configuration, judged. ValueError if nothing is autotuned, or no number draws configurations that hold."""
        base, runs = self._base()
        known = {kernel: texts for kernel, texts in self.swept.known.items() if texts}
        if not known:
            raise ValueError(f"a sweep needs autotuned kernels, and {self.described.spec} ran none")
        policies = list(plan(known, base))
        asked = [dataclasses.replace(run, tune=str(policy)) for policy in policies for run in runs]
        outcomes = self._asked(asked)
        self._undecided(asked, outcomes)
        failing: dict[str, tuple[Run, Outcome]] = {}
        for run, outcome in zip(asked, outcomes, strict=True):
            if outcome.verdict is Verdict.BROKEN:
                failing.setdefault(run.tune, (run, outcome))
        found: dict[str, tuple[Run, Outcome]] = {}
        for tune, (run, outcome) in failing.items():
            try:
                smallest = narrow(Policy.parse(tune), functools.partial(self._fails, run))
                reason = "" if smallest else "failed once and not again"
            except ValueError as error:  # its configurations hold no longer without the picks
                smallest, reason = [], str(error)
            for policy in smallest:
                found.setdefault(str(policy), (dataclasses.replace(run, tune=str(policy)), outcome))
            self.swept.undecided += [f"{reason}: {run}"] if reason else []
        self.swept.faults = [self._smallest(Policy.parse(tune), run, outcome) for tune, (run, outcome) in found.items()]
        return self.swept

    def _base(self) -> tuple[int, list[Run]]:
        """The first number from the seed on whose configurations hold, from which a wrong one can be told; and its runs."""
        for number in range(self.seed, self.seed + TRIES):
            runs = [self._run(law, example, Policy(number)) for law, example in self.examples]
            outcomes = self._asked(runs)
            if all(outcome.verdict is not Verdict.BROKEN for outcome in outcomes):
                self._undecided(runs, outcomes)
                return number, runs
        last = self.seed + TRIES - 1
        raise ValueError(f"a sweep needs a number whose configurations hold, but those of tune={self.seed} to {last} do not")

    def _run(self, law: str, example: Example, policy: Policy) -> Run:
        return Run(law, self.described.spec, example, self.products, self.device, str(policy))

    def _asked(self, runs: Sequence[Run]) -> list[Outcome]:
        done = [0]

        def one(run: Run) -> Outcome:
            outcome = self._ask(run)
            with self._lock:
                done[0] += 1
                self.on_run(done[0], len(runs))
            return outcome

        with concurrent.futures.ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(one, runs))

    def _ask(self, run: Run) -> Outcome:
        worker = self._idle.get()
        try:
            outcome = ask(run, worker, self.store)
            if outcome.lost:  # a configuration may take the device away; or something else did
                outcome = ask(run, worker, self.store)
            said: Mapping[str, Any] = {}
            if not outcome.lost:
                said = worker.ask({"tuned": True})
        except WorkerLost:
            said = {}
        finally:
            self._idle.put(worker)
        if outcome.verdict is Verdict.BROKEN:  # on disk before it is taken apart
            self.store.keep(
                {
                    "stage": "swept",
                    "run": str(run),
                    "law": run.law,
                    "versions": self.described.versions,
                    "findings": [each.to_json() for each in outcome.findings],
                }
            )
        with self._lock:
            self.swept.runs += 1
            for kernel, texts in said.get("known", {}).items():
                self.swept.known[kernel] = tuple(dict.fromkeys([*self.swept.known.get(kernel, ()), *texts]))
            for kernel, why in said.get("infeasible", {}).items():
                self.swept.infeasible.setdefault(kernel, {}).update(why)
            for kernel, ran in outcome.tuned.items():
                self.swept.ran.setdefault(kernel, set()).update(ran)
        return outcome

    def _undecided(self, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
        for run, outcome in zip(runs, outcomes, strict=True):
            if outcome.verdict is Verdict.UNKNOWN:
                self.swept.undecided.append(f"{outcome.reason}: {run}")

    def _fails(self, run: Run, policy: Policy) -> bool:
        return self._ask(dataclasses.replace(run, tune=str(policy))).verdict is Verdict.BROKEN

    def _smallest(self, policy: Policy, run: Run, outcome: Outcome) -> Fault:
        again = self._ask(run)
        outcome = again if again.verdict is Verdict.BROKEN else outcome
        worker = self._idle.get()
        try:
            small, best = explain(run.the_law, run, outcome, worker, self.store, lambda _: False, threading.Event(), SHRINK_S)
        finally:
            self._idle.put(worker)
        return Fault(policy, dataclasses.replace(run, example=small.example), best.findings)
