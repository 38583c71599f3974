"""Answers the questions of a worker: what an adapter declares, and the outcomes of runs."""

import contextlib
import functools
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from properties.books import book_of
from verify import interpreter
from verify.adapters.base import Adapter, Implementation, PathAdapter, TraceAdapter
from verify.adapters.files_adapter import declared_by
from verify.adapters.loader import versions
from verify.adapters.registry import AdapterError
from verify.bench import oracle_process
from verify.execution import calls, launches, reproduction, twins, watched
from verify.execution.cost import cost_of
from verify.execution.execute import compiled, execute, prepare
from verify.execution.judging import adapter_of, denying, following, loaded
from verify.execution.line import Run
from verify.execution.paths import work_of
from verify.execution.refusals import SILENT, probe
from verify.execution.shared_bounds import together
from verify.execution.thresholds import thresholds_of
from verify.gpu import autotune
from verify.gpu import device as devices
from verify.interpreter.patches import keeping_launches
from verify.process import messages
from verify.process.fork_server import importing
from verify.process.messages import (
    Answer,
    Called,
    Calls,
    Compile,
    Compiled,
    Configurations,
    Data,
    Describe,
    Description,
    Failure,
    Interpretation,
    Interprets,
    Join,
    Joined,
    Launches,
    Launching,
    LaunchReport,
    Origins,
    Outcomes,
    Reaction,
    Refuse,
    Reproduce,
    RunMany,
    RunOne,
    Script,
    Tunings,
    Way,
    Whence,
)
from verify.process.outcome import Finding, Outcome, Verdict
from verify.ranks.group import join
from verify.ranks.merge import IDLE, left

NICE = 10  # of processes that compile ahead, beside workers that check


def answer(question: Mapping[str, Any]) -> Data:
    """The answer to a question of verify/process/messages.py. Both are plain data."""
    return typed_answer(question).to_json()


def typed_answer(question: Mapping[str, Any]) -> Answer | Outcome:
    """The answer to a question.

    An adapter that cannot be loaded gives a Failure. An illegal line gives an outcome with the verdict UNKNOWN.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of a kernel are for its authors
            _await_imports()
            asked = messages.parse(question)
            if type(asked) not in _ANSWERS:
                raise ValueError(f"this worker runs under no sanitizer, and cannot answer {asked}")
            with denying(asked.denied if isinstance(asked, Launching) else ()):
                return _ANSWERS[type(asked)](asked)
    except AdapterError as error:
        return Failure(str(error))
    except ValueError as error:
        unknown = question.get("question") == RunOne.__name__
        return Outcome(Verdict.UNKNOWN, reason=str(error)) if unknown else Failure(str(error))


def close() -> None:
    """Close the adapters of this process. A worker calls this before it ends."""
    for adapter in loaded():
        try:
            adapter.close()
        except Exception:
            traceback.print_exc()  # nobody waits for an answer; the others are closed still


def _join(asked: Join) -> Joined:
    oracle_process.start()  # it forks, which must come before a group starts threads and perhaps opens a GPU
    join(asked)
    return Joined()


def _describe(asked: Describe) -> Description:
    adapter = adapter_of(asked.adapter)
    counterpart = adapter.counterpart if isinstance(adapter, Adapter) else None
    if counterpart:
        adapter_of(counterpart)
    if asked.runs and isinstance(adapter, Adapter | TraceAdapter):
        _start_imports(adapter)
    return Description(
        book=book_of(adapter.domain).name,
        domain=adapter.domain.to_json(),
        algorithm=adapter.algorithm,
        products=adapter.products,
        versions=versions(adapter),
        device=devices.name(),
        memory=devices.memory(),
        chunk=adapter.chunk,
        omits=dict(adapter.omits),
        closes=type(adapter).close is not Implementation.close,
        compiles=isinstance(adapter, Adapter) and adapter.compiles,
        cost=cost_of(adapter),
        declares=declared_by(adapter),
        named=thresholds_of(adapter),
    )


def _interprets(asked: Interprets) -> Interpretation:
    execute(Run.parse(asked.line))
    return Interpretation(interpreter.has_launched(), interpreter.patches.refusal)


@functools.cache
def _give_way() -> None:
    """Leave the CPU to the workers that check, from now on."""
    os.nice(NICE)


def _compile(asked: Compile) -> Compiled:
    _give_way()
    with autotune.leaving_out(asked.left_out):
        launched = compiled(Run.parse(asked.line))
    devices.tidy()
    device = _device()
    return Compiled(bool(devices.lost(device)) or (launched and devices.crowded(device) and not _crowded.is_set()))


def _tunings(_: Tunings) -> Configurations:
    return Configurations(autotune.known(), autotune.infeasible())


def _whence(asked: Whence) -> Origins:
    folders = tuple(os.path.join(os.path.realpath(folder), "") for folder in asked.folders)
    files = {name: os.path.realpath(file) for name, module in [*sys.modules.items()] if (file := getattr(module, "__file__", None))}
    theirs = {entry.name.removesuffix(".py") for folder in folders for entry in os.scandir(folder)}
    elsewhere = [file for name, file in files.items() if name in theirs and not file.startswith(folders)]
    return Origins(any(file.startswith(folders) for file in files.values()), elsewhere)


def _launches(asked: Launches) -> LaunchReport:
    with autotune.leaving_out(asked.left_out):
        return launches.report_of(Run.parse(asked.line), asked.calls, asked.beside)


def _calls(asked: Calls) -> Called:
    with autotune.leaving_out(asked.left_out):
        return calls.called(Run.parse(asked.line), asked.timed)


def _reproduce(asked: Reproduce) -> Script:
    return reproduction.script(Run.parse(asked.line), Finding.from_json(asked.finding), asked.most)


def _refuse(asked: Refuse) -> Reaction:
    adapter, device = adapter_of(asked.adapter), _device()
    with devices.default(device), autotune.leaving_out(asked.left_out), following(asked.tune):
        did = probe(adapter, asked.illegal, device)
    if reason := devices.lost(device):
        return Reaction(f"crashed ({reason})", spent=True)
    if did == IDLE:
        return Reaction(did, idle=True)
    return Reaction(did, left=isinstance(adapter, PathAdapter) and did != SILENT)


def _run_many(asked: RunMany) -> Outcomes:
    runs = [Run.parse(line) for line in asked.lines]
    _begin(runs)
    outcomes: list[Outcome] = []
    excused, left_out = asked.excused or [{}] * len(runs), asked.left_out or [()] * len(runs)
    for run in runs[:1]:
        prepare(run)
    for run, ready, times, pairs in zip(runs, together(runs), excused, left_out, strict=True):
        with autotune.leaving_out(pairs), keeping_launches():
            outcomes.append(execute(run, ready, times))
        devices.tidy()
        if _ends(outcomes[-1]):
            break
    return Outcomes(outcomes, any(outcome.spent for outcome in outcomes))


def _run_one(asked: RunOne) -> Outcome:
    if asked.line.startswith(watched.WORD):
        return watched.judged(watched.WatchedLine.parse(asked.line))
    run, start = Run.parse(asked.line), _cpu_s()
    prepare(run)
    with autotune.leaving_out(asked.left_out), keeping_launches():
        outcome = execute(run, excused=asked.excused, declared=asked.declared)
    outcome.cpu_s = _cpu_s() - start
    devices.tidy()
    return outcome


def _cpu_s() -> float:
    """The CPU seconds of this process and of the processes that it started and that have ended, such as compilers."""
    return sum(os.times()[:4])


_ANSWERS: dict[type[messages.Question], Callable[[Any], Answer | Outcome]] = {
    Calls: _calls,
    Compile: _compile,
    Describe: _describe,
    Interprets: _interprets,
    Join: _join,
    Launches: _launches,
    Refuse: _refuse,
    Reproduce: _reproduce,
    RunMany: _run_many,
    RunOne: _run_one,
    Tunings: _tunings,
    Way: twins.went,
    Whence: _whence,
}


def _device() -> str:
    return "cuda" if devices.gpus() else "cpu"


_crowded = threading.Event()  # the GPU was crowded when this process began: a new process would have no more room
_bringing: list[threading.Thread] = []


def _await_imports() -> None:
    """Wait for imports in the background: code that imports the same module meanwhile might see only a part of it."""
    while _bringing:
        _bringing.pop().join()


def _start_imports(adapter: Adapter | TraceAdapter) -> None:
    """Start the adapter's imports and the GPU in the background, while the check draws its first cases. Each takes seconds."""

    def bring() -> None:
        with importing(), contextlib.suppress(Exception):  # an error here comes up again in the first call
            if devices.gpus():
                torch.zeros(1, device="cuda")
                if devices.crowded("cuda"):
                    _crowded.set()
            adapter.bring()

    thread = threading.Thread(target=bring, daemon=True)
    thread.start()
    _bringing.append(thread)


def _begin(runs: list[Run]) -> None:
    """Let the oracle processes of this rank compute the bounds of all runs that need some, in the order of the runs."""
    works = []
    for run in runs:
        adapter = adapter_of(run.adapter)
        if isinstance(adapter, PathAdapter) and run.the_law.kind == "truth":
            works.append(work_of(run, adapter))
    oracle_process.begin(works)


def _ends(outcome: Outcome) -> bool:
    """Whether no further run may follow: the device is lost, or ranks may be at different places in their code.

    BLIND and UNSUPPORTED are decided by the example alone, so all ranks decide them alike.
    """
    return outcome.spent or (left(outcome) and outcome.verdict not in (Verdict.BLIND, Verdict.UNSUPPORTED))
