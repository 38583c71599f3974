"""Executes the run of a path: on this rank of a process group, or on ranks simulated in this process."""

import functools
from collections.abc import Callable, Mapping

import torch

from oracles.tolerance.bound import Bound
from properties.paths.case import ParallelCase
from verify.adapters.base import PathAdapter
from verify.bench import oracle_process
from verify.bench.guards import poisoned
from verify.bench.path_bench import RankBench, Unjudged, place_of
from verify.execution.judge import NOTHING
from verify.execution.judging import faulted, following, judged
from verify.execution.line import Run
from verify.gpu import device as devices
from verify.process.outcome import Outcome, Verdict
from verify.ranks.collectives import Abandoned, Place, simulate
from verify.ranks.group import join_alone
from verify.ranks.merge import IDLE, left, merge_outcomes


def execute_path(run: Run, adapter: PathAdapter, excused: Mapping[str, float] = NOTHING) -> Outcome:
    """The outcome of a run: on this rank if this process belongs to a process group, otherwise on simulated ranks.

    `excused` is as in verify/execution/judge.py.
    """
    case, law = run.example.case, run.the_law
    assert isinstance(case, ParallelCase)
    here = torch.distributed.is_initialized()
    reason = law.needs(adapter.domain) or adapter.domain.outside(case)
    if adapter.domain.processes and not here:
        reason = f"{run.adapter} needs ranks that are processes: --ranks N, or torchrun"
    if reason is not None:
        return Outcome(Verdict.UNSUPPORTED, reason=reason)
    device = _device(run.device)
    if device == "cuda" and not devices.gpus():
        return Outcome(Verdict.UNKNOWN, reason="device=cuda needs a GPU, one for each rank that is a process, and torch sees none")

    work = work_of(run, adapter)
    computed: Callable[[], dict[str, Bound]] = functools.cache(work.bounds)

    def on_rank(place: Place) -> Outcome:
        bench = RankBench(adapter, case, place, computed, device)
        return judged(law, bench, run.example, bench.where, bench.layout, _bytes(case), excused)

    with poisoned(float("nan")), following(run.tune) as used:
        if not here:
            outcome = _simulated(case, on_rank)
        else:
            adapter.join(case.mesh)
            place = place_of(case.mesh)
            if place is not None and law.kind == "truth":
                computed = oracle_process.ask(work)
            outcome = Outcome(Verdict.HOLDS, reason=IDLE, idle=True) if place is None else on_rank(place)
    outcome.tuned = dict(used)
    return outcome


def alone_on_rank(run: Run, adapter: PathAdapter) -> Unjudged | None:
    """What calls the path as the rank that this process stands in for, alone; None if the rank has no part in the case."""
    case = run.example.case
    join_alone()
    adapter.join(case.mesh)
    place = place_of(case.mesh)
    return None if place is None else Unjudged(adapter, case, place, dict, run.device)


def _device(asked: str) -> str:
    """Where ranks compute: processes over NCCL on their GPUs; simulated ranks, and processes over gloo, on the run's device."""
    nccl = torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"
    return "cuda" if nccl else asked


def work_of(run: Run, adapter: PathAdapter) -> oracle_process.Work:
    """The oracle's work for a run."""
    return oracle_process.Work(run.example.case, adapter.algorithm, run.products, adapter.chunk)


class _Failed(Exception):
    """A rank left its case early with this outcome. Raised so that the simulation stops the ranks that wait for it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.way)
        self.outcome = outcome


def _simulated(case: ParallelCase, on_rank: Callable[[Place], Outcome]) -> Outcome:
    """Run all simulated ranks and merge their outcomes. A rank that waited for a rank that failed has no outcome of its own."""

    def work(place: Place) -> Outcome:
        outcome = on_rank(place)
        if left(outcome):
            raise _Failed(outcome)
        return outcome

    outcomes, waits = dict[int, Outcome](), list[str]()
    for rank, result in enumerate(simulate(case.tp, case.cp, work)):
        if isinstance(result, Abandoned):
            waits.append(f"rank {rank} waits for rank {result.rank}")
            continue
        if isinstance(result, _Failed):
            result = result.outcome
        elif isinstance(result, BaseException):
            result = faulted(result)
        outcomes[rank] = result
    return merge_outcomes(outcomes, "; ".join(waits))


def _bytes(case: ParallelCase) -> int:
    """An estimate of the bytes of a case's tensors, from the numbers in its tokens and its input projection."""
    layer = case.layer
    return 16 * (case.tokens * (layer.hidden + sum(layer.sections.values())) + layer.hidden * sum(layer.sections.values()))
