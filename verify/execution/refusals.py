"""Finds out what an implementation does with illegal input. This is reported, not judged."""

import functools
from typing import Any

import torch

from oracles.operation import Inputs
from properties.books import book_of
from properties.laws.law import with_one_state, with_options
from properties.paths.case import ParallelCase
from properties.paths.illegal import IllegalLayout
from properties.traces.case import TraceCase
from properties.traces.events import Step
from properties.traces.play import advance
from verify.adapters.base import Adapter, PathAdapter, TraceAdapter
from verify.adapters.interface import Unsupported
from verify.adapters.loader import AnyAdapter
from verify.bench.faults import AdapterFault
from verify.bench.path_bench import RankBench, place_of
from verify.bench.placing import in_layout
from verify.bench.trace_bench import EngineBench
from verify.gpu import device as devices
from verify.interpreter import OutOfBounds, Race
from verify.process.child import ProcessDied, WrongAnswer
from verify.process.outcome import FailureKind
from verify.ranks.collectives import Abandoned, Mismatch, Place, simulate
from verify.ranks.merge import IDLE, reaction

SILENT, STRAYS = "returns numbers without an error", "reads or writes outside its tensors"
# What an implementation does that an error of ours is about, by the name of the error's class.
FROM_US = {
    kind.__name__: words
    for kind, words in (
        (OutOfBounds, STRAYS),
        (Race, "lets its programs race for the same memory"),
        (ProcessDied, "crashed"),
        (WrongAnswer, "gives no answer, or one of another length"),
        (Unsupported, "refuses"),
    )
}


def probe(adapter: AnyAdapter, name: str, device: str = "cpu") -> str:
    """Call the adapter with the illegal input `name` and say what it does, such as "refuses (ValueError)".

    The call may also crash the process. "not run: ..." says why the input does not exist for this domain. For a path this is what
    all simulated ranks do, or what this rank of a process group does.
    """
    illegal = book_of(adapter.domain).illegal
    call = illegal.call(name, adapter.domain)
    if isinstance(call, str):
        return f"not run: {call}"
    case, wrong = call
    try:
        illegal.check(case, wrong)
    except ValueError:
        pass
    else:
        raise AssertionError(f"the contract of gdn-verify accepts the illegal input {name}")
    if isinstance(adapter, PathAdapter):
        return _of_path(adapter, case, wrong, device)
    if isinstance(adapter, TraceAdapter):
        return _of_engine(adapter, case, wrong, device)
    return _of_call(adapter, case, wrong)


def _of_call(adapter: Adapter, case: Any, inputs: Inputs) -> str:
    domain = adapter.domain
    # Each tensor gets memory of its own: through a view, a kernel may legally reach the rest of the tensor that it was cut from.
    whole = {name: x.clone(memory_format=torch.contiguous_format) for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    inputs = in_layout(inputs.replaced(**whole), domain.layout)
    try:
        adapter.run(with_options(domain, with_one_state(domain, inputs), getattr(case, "options", "none")))
    except Exception as error:
        return _refusal(error)
    return SILENT


def _of_engine(adapter: TraceAdapter, case: TraceCase, step: Step, device: str) -> str:
    bench = EngineBench(adapter, case, device=device)
    with devices.default("cpu"):
        try:
            engine = bench.open(case.sizes())
            for legal in case.plan:
                advance(engine, case, legal)
        except Exception as error:
            return f"not run: the legal events before it fail ({_kind(error)})"
        try:
            advance(engine, case, step)
        except Exception as error:
            return _refusal(error)
    return SILENT


def _of_path(adapter: PathAdapter, case: ParallelCase, wrong: IllegalLayout, device: str) -> str:
    work = functools.partial(_on_rank, adapter, case, wrong, device)
    ranks, processes = case.tp * case.cp, torch.distributed.is_initialized()
    with devices.default("cpu"):
        if not processes and not adapter.domain.processes:
            return reaction(dict(enumerate(map(_of_rank, simulate(case.tp, case.cp, work)))))
        available = torch.distributed.get_world_size() if processes else 0
        if available < ranks:
            return f"not run: it needs {ranks} ranks that are processes, as with --ranks {ranks}"
        adapter.join(case.mesh)
        place = place_of(case.mesh)
        if place is None:
            return IDLE
        try:
            return work(place)
        except Exception as error:
            return _of_rank(error)


def _on_rank(adapter: PathAdapter, case: ParallelCase, wrong: IllegalLayout, device: str, place: Place) -> str:
    """Call the path on one rank. An exception of the path passes through, so that ranks that wait for this one do not wait on."""
    bench = RankBench(adapter, case, place, dict, device)
    bench.attempt(case, wrong)
    return SILENT


def _of_rank(result: str | BaseException) -> str:
    """What a rank did, in words, from what it returned or raised."""
    if isinstance(result, str):
        return result
    if isinstance(result, Abandoned):
        return "waits for a rank that has raised an error"
    if isinstance(result.__cause__, Mismatch):
        return "calls other collectives than the other ranks"
    return _refusal(result)


def _refusal(error: BaseException) -> str:
    """What an implementation did that raised this error, in words."""
    if isinstance(error, AdapterFault) and error.__cause__ is None:  # an error of ours about what it returned or wrote
        return STRAYS if error.finding.kind is FailureKind.INPUT_CHANGED else SILENT
    return FROM_US.get(_kind(error), f"refuses ({_kind(error)})")


def _kind(error: BaseException) -> str:
    """The name of an error's class, or of the one of the implementation that a bench has replaced."""
    return type(error.__cause__ if isinstance(error, AdapterFault) and error.__cause__ else error).__name__
