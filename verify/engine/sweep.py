"""Sweeps: judge every autotune configuration of every kernel of an implementation, and put the wrong ones on a deny-list.

Autotuning takes the fastest configuration, right or wrong, and may take another one on the next card. So a defect of one
configuration appears only on machines where that one is fastest. All kernels step through their configurations at the same time,
so the number of runs is the length of the longest list. If a run fails, further runs find the kernels at fault.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.palette import draw_palette, key_of
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.example import Example
from verify.engine.asking import Described, ask
from verify.engine.compile_plan import on_gpu
from verify.engine.drawing import seeded
from verify.engine.explaining import explain
from verify.execution.line import Run
from verify.findings.known import NO_DEFECTS, KnownDefects
from verify.findings.report import finding_lines
from verify.findings.store import Store
from verify.gpu.policies import Denied, Policy, narrow, plan, ran
from verify.process.messages import Configurations, Tunings
from verify.process.outcome import Finding, Outcome, Verdict
from verify.process.worker import Worker, WorkerLost

KEYS, CASES = 2, 2  # compile keys, and cases of each key: every configuration is compiled again for every key
LAWS = ("oracle", "memory")  # one judges by tolerance, the other compares a second run over other memory bit for bit
TRIES = 6
ALL = f"all configurations: this case fails with those that each of {TRIES} numbers draws, so no single one is at fault"
SHRINK_S = 120.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong configuration, or several that only fail together, with the smallest run that shows the fault and its findings."""

    policy: Policy
    run: Run
    findings: list[Finding]

    def denied(self, gpu: str, triton: str) -> list[Denied]:
        """The deny-list entries of this fault, one for each of its configurations."""
        finding = self.findings[0]
        error = f"{finding.place}: {finding.what}"
        return [Denied(gpu, triton, kernel, config, self.run.law, str(self.run), error) for kernel, config in self.policy.picks]


@dataclasses.dataclass
class Swept:
    """The result of a sweep.

    `known` has every kernel's configurations, `infeasible` those that do not fit this device with the reason, and `ran` those that
    ran, each by kernel. `left_out` has those that the deny-list leaves out of some runs, by its entry. `faults` are the wrong ones,
    `undecided` the reasons of runs without a verdict.
    """

    known: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    infeasible: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    ran: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    left_out: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    undecided: list[str] = dataclasses.field(default_factory=list)
    runs: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "known": self.known,
            "infeasible": self.infeasible,
            "ran": {kernel: sorted(configs) for kernel, configs in self.ran.items()},
            "left_out": {denial: sorted(configs) for denial, configs in self.left_out.items()},
            "faults": [
                {"tune": str(fault.policy), "run": str(fault.run), "findings": [finding.to_json() for finding in fault.findings]}
                for fault in self.faults
            ],
            "undecided": self.undecided,
            "runs": self.runs,
        }

    def lines(self) -> list[str]:
        """The lines of the report: one for each kernel, then each fault, then what is undecided."""
        text = []
        for kernel, configs in sorted(self.known.items()):
            missing = set(configs) - self.ran.get(kernel, set()) - set(self.infeasible.get(kernel, {}))
            more = f", {len(self.infeasible[kernel])} do not fit" if self.infeasible.get(kernel) else ""
            more += f", {len(missing)} did not run" if missing else ""
            text.append(f"  {kernel}: {len(self.ran.get(kernel, ()))} of {len(configs)} configurations ran{more}")
        text += [f"  left out of some runs: {len(configs)} of {denial}" for denial, configs in sorted(self.left_out.items())]
        for fault in self.faults:
            text.append(f"WRONG    {' with '.join(f'{kernel} {config}' for kernel, config in fault.policy.picks) or ALL}")
            text += finding_lines(fault.findings)
            text.append(f'  repeat       gdn-verify repeat "{fault.run}"')
        return text + [f"UNDECIDED  {reason}" for reason in self.undecided]


def examples_of(domain: Any, seed: int, device: str = "cuda") -> Iterator[tuple[str, Example]]:
    """Pairs (law, example): a few cases of a few compile keys. Each case runs every kernel.

    On a CPU, where kernels are interpreted, there are fewer cases, and they are short.
    """
    domain, keys = (domain, 1) if device == "cpu" else (on_gpu(domain, seed), KEYS)
    book = book_of(domain)
    if device != "cpu" and isinstance(domain, Domain):
        yield from ((law, Example(case)) for case in _usual(domain, seed) for law in LAWS)
    palette = draw_palette(domain, seed, keys, ["oracle"])
    for law in LAWS:
        drawn: list[Example] = []
        seeded(palette.examples(book.laws[law], domain), mix_words(seed, law), 40, drawn.append)
        counts: dict[Any, int] = {}
        for example in drawn:
            case = example.case
            enough = case.backward == domain.backward and max(case.lengths) > 64
            if enough and counts.get(key_of(case), 0) < CASES and len(counts) <= keys:
                counts[key_of(case)] = counts.get(key_of(case), 0) + 1
                yield law, example


def _usual(domain: Domain, seed: int) -> Iterator[Case]:
    """Short cases inside the domain at the widths of real models, where wrong configurations were found."""
    for dtype, width in (("bf16", 128), ("fp16", 64)):
        cases = (
            Case(
                tuple(_up(domain.most(length), domain.length_step) for length in ((200, 130) if domain.packed else (200,))),
                operation=domain.operation,
                packed=domain.packed,
                heads=2,
                value_heads=heads,
                key_dim=width,
                value_dim=width,
                dtype=dtype,
                gate="mixed" if "mixed" in domain.gates else "forever",
                scale=domain.drawn_scales[0],
                offsets=domain.offsets[0],
                state_dtype=domain.state_dtypes[0],
                final_dtype=domain.final_dtype,
                initial_states=domain.initial_states if domain.packed else "each",
                final_states=domain.final_states_of(packed=domain.packed),
                backward=domain.backward,
                seed=seed % 2**16,
            )
            for heads in (4, 2)
        )
        yield from itertools.islice((case for case in cases if domain.outside(case) is None), 1)


def _up(length: int, step: int) -> int:
    return -(-length // step) * step


class Sweep:
    """A sweep of one adapter. `on_run(done, of)` is called after each run, from any thread."""

    def __init__(
        self,
        described: Described,
        workers: Sequence[Worker],
        store: Store,
        *,
        seed: int = 0,
        device: str = "cuda",
        products: str = "ieee",
        defects: KnownDefects = NO_DEFECTS,
        examples: Iterable[tuple[str, Example]] | None = None,
        on_run: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self.described, self.workers, self.store, self.seed = described, list(workers), store, seed
        self.device, self.products, self.on_run, self._defects = device, products, on_run, defects.deny_list
        self.examples = list(examples_of(described.domain, seed, device) if examples is None else examples)
        self.swept = Swept()
        self._idle: queue.Queue[Worker] = queue.Queue()
        self._lock = threading.Lock()
        for worker in self.workers:
            self._idle.put(worker)

    def run(self) -> Swept:
        """Judge every configuration. ValueError if no kernel is autotuned.

        An example that fails with all TRIES combinations of configurations is reported as a fault without a configuration. Such an
        example cannot tell right configurations from wrong ones, so it is not used for that.
        """
        bases, broken = self._bases()
        known = {kernel: texts for kernel, texts in self.swept.known.items() if texts}
        if not known:
            raise ValueError(f"a sweep needs autotuned kernels, and {self.described.spec} ran none")
        asked = [
            dataclasses.replace(run, tune=str(self._allowed(policy, run)))
            for number, runs in bases.items()
            for policy in plan(known, number)
            for run in runs
        ]
        outcomes = self._outcomes(asked)
        self._undecided(asked, outcomes)
        failing: dict[str, tuple[Run, Outcome]] = {}
        for run, outcome in zip(asked, outcomes, strict=True):
            if outcome.verdict is Verdict.BROKEN:
                failing.setdefault(run.tune, (run, outcome))
        found: dict[tuple[str, ...], tuple[Policy, Run, Outcome]] = {}
        for tune, (run, outcome) in failing.items():
            policy = Policy.parse(tune)
            if seen := {pick for prior, *_ in found.values() if set(prior.picks) <= set(policy.picks) for pick in prior.picks}:
                # Configurations that are known to fail are taken out. All lists step together, so another wrong configuration may
                # only ever run beside one of them.
                policy = Policy(policy.tune, tuple(pick for pick in policy.picks if pick not in seen))
                left = next((base for base in bases[policy.tune or 0] if self._fails(base, policy)), None)
                if left is None:
                    continue
                run = left
            try:
                smallest = narrow(policy, functools.partial(self._fails, run))
                reason = "" if smallest else "failed once and not again"
            except ValueError as error:  # without these picks, the run that held before does not hold any more
                smallest, reason = [], str(error)
            for narrowest in smallest:
                picks = tuple(f"{kernel}:{config}" for kernel, config in narrowest.picks)
                found.setdefault(picks, (narrowest, dataclasses.replace(run, tune=str(narrowest)), outcome))
            self.swept.undecided += [f"{reason}: {run}"] if reason else []
        for run, outcome in broken:
            found.setdefault((run.law, str(key_of(run.example.case))), (Policy.parse(run.tune), run, outcome))
        self.swept.faults = [self._smallest(policy, run, outcome) for policy, run, outcome in found.values()]
        return self.swept

    def _allowed(self, policy: Policy, run: Run) -> Policy:
        """The policy without picks that the deny-list leaves out of the run, which `swept` then lists with the reason."""
        picks, denials = [], self._defects.denials(run)
        for kernel, config in policy.picks:
            denied = next((denial for denial in denials if ran({kernel: (config,)}, denial.kernel, denial.config)), None)
            if denied is None:
                picks.append((kernel, config))
            else:
                self.swept.left_out.setdefault(str(denied), set()).add(f"{kernel}:{config}")
        return Policy(policy.tune, tuple(picks))

    def _bases(self) -> tuple[dict[int, list[Run]], list[tuple[Run, Outcome]]]:
        """By number (from the seed on), the runs that hold with that number's configurations; and the runs that never held.

        A wrong configuration shows when it makes a run of the first kind fail. Runs of the second kind failed with the
        configurations of all TRIES numbers.
        """
        bases: dict[int, list[Run]] = {}
        left, broken = self.examples, list[tuple[Run, Outcome]]()
        for number in range(self.seed, self.seed + TRIES):
            runs = [self._run(law, example, Policy(number)) for law, example in left]
            outcomes = self._outcomes(runs)
            answers = list(zip(runs, left, outcomes, strict=True))
            bases[number] = [run for run, _, outcome in answers if outcome.verdict is not Verdict.BROKEN]
            self._undecided(runs, outcomes)
            left = [example for _, example, outcome in answers if outcome.verdict is Verdict.BROKEN]
            broken = [(run, outcome) for run, _, outcome in answers if outcome.verdict is Verdict.BROKEN]
            if not left:
                break
        return bases, broken

    def _run(self, law: str, example: Example, policy: Policy) -> Run:
        return Run(law, self.described.spec, example, self.products, self.device, str(policy))

    def _outcomes(self, runs: Sequence[Run]) -> list[Outcome]:
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
            outcome = ask(run, worker, self.store, defects=self._defects)
            if outcome.lost or outcome.starved:  # because of this configuration, or of other workers on the same device: repeat it
                outcome = ask(run, worker, self.store, defects=self._defects)
            if outcome.starved and len(self.workers) > 1:
                outcome = Outcome(Verdict.UNKNOWN, reason=f"{outcome.findings[0].what}, of memory that other workers share")
            tunings = Configurations() if outcome.lost else Configurations.from_json(worker.ask(Tunings()))
        except WorkerLost:
            tunings = Configurations()
        finally:
            self._idle.put(worker)
        if outcome.verdict is Verdict.BROKEN:  # write it to disk before further runs
            self.store.keep(
                {
                    "stage": "swept",
                    "run": str(run),
                    "law": run.law,
                    "versions": self.described.versions,
                    "findings": [finding.to_json() for finding in outcome.findings],
                }
            )
        with self._lock:
            self.swept.runs += 1
            for kernel, texts in tunings.known.items():
                self.swept.known[kernel] = tuple(dict.fromkeys([*self.swept.known.get(kernel, ()), *texts]))
            for kernel, why in tunings.infeasible.items():
                self.swept.infeasible.setdefault(kernel, {}).update(why)
            for kernel, texts in outcome.tuned.items():
                self.swept.ran.setdefault(kernel, set()).update(texts)
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
            small, best = explain(run.the_law, run, outcome, worker, self.store, self._defects, threading.Event(), SHRINK_S)
        finally:
            self._idle.put(worker)
        return Fault(policy, dataclasses.replace(run, example=small.example), best.findings)
