"""Questions to workers: what an adapter declares, and the outcomes of runs.

If a worker is lost (it crashes or hangs), that is an outcome like any other, not an exception.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from properties.books import book_named, book_of
from properties.laws.law import Law
from properties.palette import key_of
from properties.paths.domain import PathDomain
from properties.paths.laws import PATH_LAWS
from properties.words.example import Example
from properties.words.sizes import MOST, MOST_ON_GPU, sized
from verify.adapters.packages import installed
from verify.adapters.registry import AdapterError
from verify.engine.compile_plan import has_keys
from verify.engine.drawing import seeded
from verify.execution.line import Run
from verify.findings.known import NO_DEFECTS, KnownDefects
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.interpreter.self_test import TRITONS, notice
from verify.process import prestart
from verify.process.choices import NoInterpreter
from verify.process.messages import (
    Describe,
    Description,
    Failure,
    Interpretation,
    Interprets,
    Outcomes,
    RunMany,
    RunOne,
    read,
)
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Worker, WorkerLost
from verify.ranks.group import Answering

# Runs in one question: BATCH where runs are short (exact laws on ranks, all laws on a GPU), TRUTHS for truth laws on ranks, whose
# oracles take a while, and GPU_TRUTHS for those on GPUs. At the end of a question a rank waits for its oracle processes.
BATCH, TRUTHS, GPU_TRUTHS = 32, 4, 16
# Runs in one question to a GPU's worker if it computes their tolerances in one call. If the worker is lost, each run is repeated.
POOLED = 64
PROBES, PROBE_TOKENS = 8, 64  # of so many drawn cases, those with about so many tokens show whether kernels are launched
CLEAR = 2.0  # an error of less than so many times its tolerance may be a false alarm
PATIENT = 1024  # tokens from which on a case on a CPU gets more time than others, in proportion
CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # of terminals: colours, and moves of the cursor
_WARNINGS: dict[str, str] = {}  # about an untested Triton, by adapter


@dataclasses.dataclass(frozen=True)
class Described:
    """An adapter's declarations, as a worker reports them.

    `device` is the name of the GPU, or "" without one. `omits` maps parameters that are not passed to the reason
    (verify/adapters/base.py). `memory` is the GPU's memory in bytes. `declares` has what an export needs. `named` are whole numbers
    that its source names.
    """

    spec: str
    domain: Any  # of the book's kind
    algorithm: str
    versions: str
    device: str = ""
    products: str = "ieee"
    chunk: int | None = None
    omits: dict[str, str] = dataclasses.field(default_factory=dict)
    compiles: bool = False
    cost: str = "quick"
    memory: int = 0
    declares: dict[str, Any] = dataclasses.field(default_factory=dict)
    named: tuple[int, ...] = ()

    def products_of(self, example: Example, device: str) -> str:
        """How the implementation multiplies float32 matrices in a run on `device`: "ieee" or "tf32".

        It is always "ieee" on a CPU. For a path it may depend on the choices and the variant of the example.
        """
        if device == "cpu" or not self.domain.tf32:
            return "ieee" if device == "cpu" else self.products
        words = example.case.words()
        chosen = {f"{name}={words[name]}" for name, _ in self.domain.choices} | {example.variant}
        return "tf32" if chosen & {*self.domain.tf32} else self.products

    def lines(self) -> list[str]:
        """The declarations by which results are judged, in two lines. Of the domain, the fields that differ from their defaults."""
        return [
            f"  declares     algorithm {self.algorithm}, chunk {self.chunk}, products {self.products}",
            f"  domain       {_short(self.domain)}, other fields as by default",
        ]


def _short(value: Any) -> str:
    """The repr of a value; of a dataclass, without the fields that have their defaults and without what a check sets."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    names = [field.name for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
    changed = [name for name in names if name != "drawing"]
    return f"{type(value).__name__}({', '.join(f'{name}={_short(getattr(value, name))}' for name in changed)})"


def started(device: str, count: int, deadline_s: float, *, sequential: bool = False) -> list[Worker]:
    """Start `count` workers of a device, at least one. A worker that began with the command is used if its environment fits."""
    environments = [devices.environment(device, index) for index in range(max(1, count))]
    return [
        prestart.take(environment, deadline_s, sequential=sequential)
        or Worker(deadline_s, environment=environment, sequential=sequential)
        for environment in environments
    ]


def describe(spec: str, worker: Answering, *, runs: bool = True) -> Described:
    """The adapter's declarations, read in a worker. `runs` says that the worker will run cases of it.

    AdapterError if the adapter cannot be loaded, also if importing it kills the worker.
    """
    try:
        description = read(Description, worker.ask(Describe(spec, runs)))
    except WorkerLost as lost:
        if lost.how == "failed to start":
            raise AdapterError(f"the ranks failed to start: {lost.detail}") from None
        more = "; a larger --deadline waits longer" if lost.how == "hung" else ""
        raise AdapterError(f"adapter {spec}: importing it {lost.how}: {lost.detail}; {_last_line(lost.tail)}{more}") from None
    if isinstance(description, Failure):
        raise AdapterError(description.error)
    domain = book_named(description.book).domain.from_json(description.domain)
    if isinstance(domain, PathDomain) and not isinstance(worker, Worker):
        domain = dataclasses.replace(domain, ranks=worker.size, exchange_ranks=worker.size)
    about = (description.algorithm, description.versions, description.device, description.products, description.chunk)
    of_device = (description.cost, description.memory, description.declares, tuple(description.named))
    return Described(spec, domain, *about, description.omits, description.compiles, *of_device)


def with_sizes(described: Described, device: str, *, large: bool = True) -> Described:
    """The declarations with the sizes of this check's cases, which follow the chunk, the algorithm and, on a CPU, a token's cost.

    If not `large`, no case is large.
    """
    most = (MOST_ON_GPU if device != "cpu" else MOST[described.cost]) if large else 0
    domain = sized(described.domain, described.chunk, most, described.algorithm, described.named)
    return dataclasses.replace(described, domain=domain)


def interpreted(described: Described, device: str, deadline_s: float) -> str:
    """A warning if the adapter launches kernels that an untested Triton interprets; "" otherwise.

    NoInterpreter if this Triton cannot interpret them. With a tested Triton, or on a GPU, nothing is run. Otherwise a process runs
    short cases until one launches a kernel: plain torch works with every Triton.
    """
    triton = installed("triton")
    if device != "cpu" or triton is None or triton in TRITONS:
        return ""
    if described.spec not in _WARNINGS:
        _WARNINGS[described.spec] = _warning(described, triton, deadline_s)
    return _WARNINGS[described.spec]


def _warning(described: Described, triton: str, deadline_s: float) -> str:
    with Worker(deadline_s, environment=devices.environment("cpu")) as worker, contextlib.suppress(WorkerLost):
        for run in _probes(described):
            answer = read(Interpretation, worker.ask(Interprets(str(run))))
            if isinstance(answer, Interpretation) and answer.launches:
                if answer.refusal:
                    raise NoInterpreter(answer.refusal)
                return notice(triton)
    return ""


def _probes(described: Described) -> list[Run]:
    """Runs of a few cases, those with about PROBE_TOKENS tokens first; none if the law's cases cannot be drawn."""
    examples = list[Example]()
    book = book_of(described.domain)
    law = book.base or next(iter(book.laws.values()))
    with contextlib.suppress(Exception):  # the check of the law says why its cases cannot be drawn
        seeded(law.draw(described.domain), 0, PROBES, examples.append)
    examples.sort(key=lambda example: (abs(example.case.tokens - PROBE_TOKENS), str(example)))
    return [Run(law.name, described.spec, example) for example in examples]


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it wrote nothing"


def ask(
    run: Run, worker: Answering, store: Store, declared: dict[str, Any] | None = None, defects: KnownDefects = NO_DEFECTS
) -> Outcome:
    """The outcome of a run in a worker. A crash or a hang of the implementation is a finding like any other.

    The run's line is on disk while the run lasts. If the oracle or the ranks fail instead of the implementation, the verdict is
    UNKNOWN. Pass the `defects` that are to explain the outcome: the judge does not measure every error of a broken output, but
    those that they would not explain. Configurations on their deny-list are left out of the run's draw.
    """
    question = RunOne(str(run), declared or {}, defects.explained_outputs(run), defects.left_out(run), denied=defects.denied)
    return ask_line(question, worker, store, *_deadline(run, worker))


def ask_line(question: RunOne, worker: Answering, store: Store, *deadline_s: float) -> Outcome:
    """The outcome of a line in a worker, as for `ask`. It may be that of a watched call."""
    store.begin(question.line)
    try:
        outcome = read(Outcome, worker.ask(question, *deadline_s))
        if isinstance(outcome, Failure):
            return Outcome(Verdict.UNKNOWN, reason=outcome.error)
        if outcome.kind is FailureKind.RAISED and isinstance(worker, Worker):  # the cause may lie in a process beside it
            first, *others = outcome.findings
            outcome.findings = [dataclasses.replace(first, wrote=_last_lines(worker.words())), *others]
        return outcome
    except WorkerLost as lost:
        if lost.how == "closed":
            return Outcome(Verdict.UNKNOWN, reason="the worker was closed")
        if not lost.in_kernel:
            what = "the oracle did not finish" if lost.how == "hung" else f"the ranks {lost.how}"
            return Outcome(Verdict.UNKNOWN, reason=f"{what}: {lost.detail}: {question.line}")
        last = _last_line(lost.tail) if lost.how == "crashed" else ""
        said = lost.tail.partition("Thread 0x")[0] if lost.said is None else lost.said
        wrote = () if lost.how == "crashed" else _last_lines(said)
        return Outcome(Verdict.BROKEN, [Finding("call", FailureKind(lost.how), f"{lost.how}: {lost.detail}", last, wrote=wrote)])
    finally:
        store.end()


def _deadline(run: Run, worker: Answering) -> tuple[float, ...]:
    """The deadline of a long case on a CPU, whose time grows with its tokens; nothing for other cases."""
    tokens = run.example.case.tokens if run.device == "cpu" and isinstance(worker, Worker) else 0
    return (worker.deadline_s * tokens / PATIENT,) if isinstance(worker, Worker) and tokens > PATIENT else ()


def ask_afresh(
    run: Run,
    worker: Answering,
    store: Store,
    defects: KnownDefects = NO_DEFECTS,
    *,
    always: bool = False,
    declared: dict[str, Any] | None = None,
    after: Sequence[Run] = (),
) -> Outcome:
    """The outcome of a run in a new process, if its law is about what a process keeps, or if `always`.

    Groups of ranks go on as they are, unless `always`. The process runs those in `after` first, and their CPU time counts.
    """
    if always or (run.the_law.of_process and isinstance(worker, Worker)):
        worker.end()
    before_s = sum(ask(one, worker, store, defects=defects).cpu_s for one in after)
    outcome = ask(run, worker, store, declared, defects)
    outcome.cpu_s += before_s
    return outcome


def _last_lines(text: str, most: int = 5) -> tuple[str, ...]:
    """The last lines of a text that are not empty, each cut to 200 characters, without the codes that colour a terminal."""
    return tuple([line.rstrip()[:200] for line in CODES.sub("", text).splitlines() if line.strip()][-most:])


def ask_all(runs: Sequence[Run], worker: Answering, store: Store, defects: KnownDefects = NO_DEFECTS) -> Iterator[Outcome]:
    """The outcomes of several runs, in their order, sent to the worker as one question.

    A run without an outcome is repeated alone, and so is a run that is BROKEN or UNKNOWN. If it holds then, a failure that is no
    error of less than CLEAR tolerances stays: the tolerance alone may differ a little from that of many runs together
    (verify/execution/shared_bounds.py). If the worker crashed and no run fails alone, the last run is UNKNOWN. A run whose failure
    `defects` explain is not repeated, and its exact excess over the tolerance is not measured, because that would take longer than
    everything else.
    """
    outcomes, loss = list[Outcome](), ""
    excused, left_out = [defects.explained_outputs(run) for run in runs], [defects.left_out(run) for run in runs]
    if len(runs) > 1 or any(excused):
        lines = [str(run) for run in runs]
        store.begin("\n".join(lines))
        try:
            pairs = left_out if any(left_out) else []
            question = RunMany(lines, excused if any(excused) else [], pairs, denied=defects.denied)
            answer = read(Outcomes, worker.ask(question))
            outcomes = answer.outcomes if isinstance(answer, Outcomes) else []
        except WorkerLost as lost:  # each run is now repeated alone, which shows the run that loses the worker
            if lost.how == "crashed":  # one deadline is for all, so a hang may be nothing but too many cases
                loss = f"the worker crashed while it ran {len(runs)} cases, and none fails alone: {lost.detail}"
        finally:
            store.end()
    for index, run in enumerate(runs):
        outcome = outcomes[index] if index < len(outcomes) else None
        if outcome is None or (outcome.verdict in (Verdict.BROKEN, Verdict.UNKNOWN) and not defects.explain(run, outcome)):
            before, outcome = outcome, ask(run, worker, store, defects=defects)
            if before is not None and outcome.verdict is Verdict.HOLDS and before.worst >= CLEAR:
                outcome = before
        loss = "" if outcome.verdict in (Verdict.BROKEN, Verdict.UNKNOWN) else loss
        yield Outcome(Verdict.UNKNOWN, reason=loss) if loss and index == len(runs) - 1 else outcome


def most_at_once(law: Law, worker: Answering, device: str) -> int:
    """How many runs of a law one question holds.

    An exchange between ranks and a kernel on a GPU both take a few milliseconds, so several share a question. Interpreted kernels
    and simulated ranks take longer and go one by one.
    """
    if not isinstance(worker, Worker):
        truths = GPU_TRUTHS if device == "cuda" else TRUTHS
        return BATCH if law.kind == "exact" else truths
    if device == "cpu" or PATH_LAWS.get(law.name) is law:
        return 1
    return POOLED if law.base else BATCH


def of_one_key(examples: Iterable[Example], most: int) -> Iterator[list[Example]]:
    """The examples in their order, in lists of at most `most`. All examples of a list have the same compile key.

    So no example waits for the kernels of another key. Cases of paths have no compile keys and count as one key.
    """
    for _, same in itertools.groupby(examples, lambda example: key_of(example.case) if has_keys(example.case) else None):
        while batch := list(itertools.islice(same, most)):
            yield batch
