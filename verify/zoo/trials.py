"""Trials: which wrong implementations of the zoo a test suite accepts."""

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from oracles.operation import Inputs
from properties.laws.law import Cotangents, Results
from properties.rules.case import Case
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import AdapterFault
from verify.execution.judging import adapter_of
from verify.process.worker import Worker, WorkerLost
from verify.zoo.animals import Animal
from verify.zoo.base import Chunkwise
from verify.zoo.crew import Crew
from verify.zoo.published_suites import SUITES
from verify.zoo.suite import OPERATION, SPEC, Suite, call

RIGHT = "right"  # names the right implementation, which every suite must accept


def suites() -> Mapping[str, type[Suite]]:
    """The suites that come with the zoo, by name."""
    return SUITES


def load(spec: str) -> Suite:
    """The suite with this name, or the class NAME of FILE.py:NAME. ValueError, in one line, if it cannot be loaded."""
    known = suites()
    if spec in known:
        return known[spec]()
    place, colon, name = spec.rpartition(":")
    if not colon or not place.endswith(".py"):
        raise ValueError(f"--rule must be all, one of {', '.join(known)}, or your own as FILE.py:NAME, got {spec!r}")
    path = pathlib.Path(place).resolve()
    if not path.is_file():
        raise ValueError(f"--rule {spec}: there is no file {place}")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
        kind = getattr(module, name, None)
        if isinstance(kind, type) and issubclass(kind, Suite):
            return kind()
    except Exception as error:
        raise ValueError(f"--rule {spec}: {type(error).__name__}: {error}") from error
    names = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Suite)]
    raise ValueError(
        f"--rule {spec}: {place} has no Suite called {name}; it has {', '.join(n for n in names if n != 'Suite') or 'none'}"
    )


@functools.lru_cache(1)
def _cases(spec: str) -> tuple[Suite, list[tuple[Inputs, Cotangents]]]:
    suite = load(spec)
    return suite, [call(case) for case in suite.cases()]


@functools.lru_cache(1)
def _reference(spec: str, index: int) -> Results:
    suite, cases = _cases(spec)
    inputs, cotangents = cases[index]
    reference = suite.reference(inputs, cotangents)
    return {name: value for name, value in reference.items() if name != "final_state" or inputs.output_final_state}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer a question to a worker.

    {"suite": spec} asks for the number of cases. With "animal" and "case" (an index) besides, it asks whether the suite accepts the
    animal's results. The answer has "cases", or "accepted" and "what", or "error" if the suite itself fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            suite, cases = _cases(question["suite"])
            if "animal" not in question:
                return {"cases": len(cases)}
            inputs, cotangents = cases[question["case"]]
            reference = _reference(question["suite"], question["case"])
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        adapter = Chunkwise() if question["animal"] == RIGHT else adapter_of(question["animal"])
        assert isinstance(adapter, Adapter)
        try:
            got = called(adapter, inputs, cotangents, suite.chunk)
        except AdapterFault as fault:
            return {"accepted": False, "what": f"{fault.finding.place}: {fault.finding.what}"}
        except Exception as error:
            return {"accepted": False, "what": f"call: raised {type(error).__name__}: {error}"}
        try:
            return {"accepted": bool(suite.accepts(got, reference, inputs)), "what": ""}
        except AssertionError as error:  # tests reject by assertions
            return {"accepted": False, "what": (str(error).strip() or "assertion failed").splitlines()[0]}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def called(adapter: Adapter, inputs: Inputs, cotangents: Cotangents, chunk: int | None) -> Results:
    """An adapter's results for a copy of the inputs: outputs, and gradients if there are cotangents.

    `chunk` replaces the adapter's chunk length during the call, if it has one. AdapterFault if the adapter gives no results.
    """
    copied = Inputs(**{name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in inputs.items()})
    size = getattr(adapter, "size", None)
    if chunk is not None and size is not None:
        adapter.size = chunk  # type: ignore[attr-defined]
    try:
        return AdapterBench(adapter, None, Case((1,)), "ieee").call_implementation(adapter, SPEC, copied, cotangents)
    finally:
        if chunk is not None and size is not None:
            adapter.size = size  # type: ignore[attr-defined]


@dataclasses.dataclass
class Trial:
    """The verdicts of a suite: `killed_at` has the number of the case that rejected each animal, or None if none did.

    `tried` of the `cases` were run on all animals: fewer than all if the trial was interrupted.

    `what` is why, `rejects_right` is the first case that rejects the right implementation, and `error` is a failure of the suite.
    """

    suite: str
    story: str
    cases: int = 0
    tried: int = 0
    killed_at: dict[str, int | None] = dataclasses.field(default_factory=dict)
    what: dict[str, str] = dataclasses.field(default_factory=dict)
    rejects_right: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> int:
        """How many animals the suite rejected."""
        return sum(number is not None for number in self.killed_at.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"killed": self.killed, "seconds": round(self.seconds, 3)}


class Trials(Crew):
    """Suites tried on animals, each suite in one worker. `trials` has the results so far; `on_case` is called as in a Hunt."""

    def __init__(
        self,
        specs: Sequence[str],
        animals: Sequence[Animal],
        workers: int = 2,
        *,
        deadline_s: float = 10.0,
        on_case: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> None:
        self.on_case = on_case
        self.animals = [animal for animal in animals if is_eligible(animal)]
        self.trials = [Trial(spec, " ".join((type(load(spec)).__doc__ or "").split())) for spec in specs]
        count = max(1, min(workers, len(specs)))
        super().__init__([Worker(deadline_s, serves="verify.zoo.trials:answer") for _ in range(count)])

    def run(self) -> list[Trial]:
        """Run the trials. They are returned in the order of the suites."""
        self._run_all(self.trials, self._one)
        return self.trials

    def _one(self, trial: Trial, worker: Worker) -> None:
        try:
            self._try(trial, worker)
        except WorkerLost as lost:
            if not self._stopped.is_set():
                trial.error = f"{lost.how}: {lost.detail}"

    def _try(self, trial: Trial, worker: Worker) -> None:
        start = time.monotonic()
        reply = worker.ask({"suite": trial.suite})
        if "error" in reply:
            trial.error = reply["error"]
            return
        trial.cases = reply["cases"]
        if not trial.cases:
            trial.error = "it has no cases"
            return
        trial.killed_at = {animal.name: None for animal in self.animals}
        for index in range(trial.cases):
            for name, spec in [(RIGHT, RIGHT), *((animal.name, animal.spec) for animal in self.animals)]:
                if self._stopped.is_set():
                    return
                if trial.killed_at.get(name) is not None or (name == RIGHT and trial.rejects_right):
                    continue
                try:
                    reply = worker.ask({"suite": trial.suite, "animal": spec, "case": index})
                except WorkerLost as lost:
                    if self._stopped.is_set():
                        return
                    reply = {"accepted": False, "what": f"call: {lost.how}: {lost.detail}"}
                if "error" in reply:
                    trial.error = f"case {index + 1}: {reply['error']}"
                    return
                if not reply["accepted"]:
                    if name == RIGHT:
                        trial.rejects_right = f"case {index + 1}" + (f": {reply['what']}" if reply["what"] else "")
                    else:
                        trial.killed_at[name], trial.what[name] = index + 1, reply["what"]
            trial.seconds, trial.tried = time.monotonic() - start, index + 1
            self.on_case(trial.suite, index + 1, trial.cases)


def is_eligible(animal: Animal) -> bool:
    """Whether suites can judge this animal: it must implement the gated delta rule with log-decay and beta as inputs.

    An animal that is wrong only in later calls of a process, or in ways of calling that no suite has, is not eligible.
    """
    domain, plain = animal.kind.domain, Domain()
    if getattr(animal.kind, "later_calls", False):
        return False
    if not (issubclass(animal.kind, Adapter) and isinstance(domain, Domain) and domain.operation == OPERATION):
        return False
    return (domain.in_kernel, domain.decays) == (plain.in_kernel, plain.decays)
