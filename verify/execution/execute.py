"""Executes a run in this process. A path runs on this rank, or on simulated ranks."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.books import book_of
from properties.calls.case import CallCase
from properties.laws.law import Cotangents
from properties.layers.case import LayerCase
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.words.domain import frozen
from verify.adapters.base import Adapter, PathAdapter, TraceAdapter
from verify.adapters.loader import AnyAdapter
from verify.adapters.pooled import called_with
from verify.bench import afresh
from verify.bench.adapter_bench import AdapterBench, Ready
from verify.bench.call_bench import CallBench
from verify.bench.compiling import Compiling
from verify.bench.faults import NoRoom
from verify.bench.places import layout, where
from verify.execution.judge import NOTHING
from verify.execution.judging import adapter_of, following, judged, on_device
from verify.execution.line import Run
from verify.execution.norms import norm_in, with_norm
from verify.execution.outside import outside
from verify.execution.paths import alone_on_rank, execute_path
from verify.execution.shared_bounds import numbers
from verify.execution.traces import execute_trace
from verify.gpu import device as devices
from verify.gpu.policies import is_timed
from verify.gpu.turns import turn
from verify.gpu.warmup import unlaunched
from verify.process.outcome import Outcome, Verdict
from verify.reach import recorder


def execute(
    run: Run,
    ready: Ready | None = None,
    excused: Mapping[str, float] = NOTHING,
    declared: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """Execute a run in this process: call the adapter, judge its results, and return the outcome. Nothing is printed.

    - `ready` has the inputs and bounds of the case, if they were made together with those of other cases
      (verify/execution/shared_bounds.py).
    - `excused` maps outputs to multiples of their tolerance (see verify/execution/judge.py).
    - `declared` replaces attributes of the adapter, such as `folds`, when the results are judged. The adapter is called unchanged.
      With `gated`, gates and beta that the case's kernel computes are computed before the call (verify/adapters/pooled.py).
      The words `qk_norm_eps` and `qk_norm_form` replace those of the case, and its domain has them too. `domain` has fields of the
      domain, or of a pool's rule, that are replaced.
    """
    adapter = called_with(adapter_of(run.adapter), run.example.case, gated="gated" in declared)
    if book_of(adapter.domain) is not book_of(run.example.case):
        return Outcome(Verdict.UNSUPPORTED, reason=f"law {run.law} is not about {run.adapter}")
    if run.outside:
        return outside(run.outside, adapter, lambda other: _executed(run, other, None, NOTHING, {}))
    with recorder.recording(adapter) as reach:
        outcome = _executed(run, adapter, ready, excused, declared)
        reach.sizes = recorder.sizes_of(run.example.case, adapter)
    outcome.reach = reach
    return outcome


def _executed(
    run: Run, adapter: AnyAdapter, ready: Ready | None, excused: Mapping[str, float], declared: Mapping[str, Any]
) -> Outcome:
    law = run.the_law
    if isinstance(adapter, PathAdapter):
        return execute_path(run, adapter, excused)
    if isinstance(adapter, TraceAdapter):
        return execute_trace(run, adapter, excused, declared)
    _bring(run.adapter)
    counterpart, case = _counterpart(run, adapter), run.example.case
    norm = {name: declared[name] for name in ("qk_norm_eps", "qk_norm_form") if name in declared}
    domain = with_norm(adapter.domain, **norm) if norm else _with_fields(adapter.domain, declared.get("domain", {}))
    reason = law.needs(domain) or domain.outside(case) or law.outside(domain, run.example)
    if reason is None and counterpart is not None:
        reason = counterpart.domain.outside(dataclasses.replace(case, lengths=(1,) * len(case.lengths)))  # it gets single tokens
    if reason is not None:
        return Outcome(Verdict.UNSUPPORTED, reason=reason)
    if run.device == "cuda" and not devices.gpus():
        return Outcome(Verdict.UNKNOWN, reason="device=cuda needs a GPU, and torch sees none")
    kind = CallBench if isinstance(case, CallCase) else AdapterBench

    def tried(ready: Ready | None, *, patient: bool) -> Outcome:
        bench = kind(adapter, counterpart, case, run.products, run.device)
        bench.ready = ready
        if isinstance(bench, CallBench) and law.of_process:
            bench.spec = run.adapter
        if norm:
            bench.norm = norm_in(norm)
        else:
            bench.declared = declared
        need = _room(case) if ready is None else max(_room(case), ready.bytes)
        with turn(run.device, need), following(run.tune) as used:
            places, lay_out = functools.partial(where, case), functools.partial(layout, case)
            outcome = judged(law, bench, run.example, places, lay_out, case.bytes, excused, patient=patient)
        outcome.tuned = dict(used)
        return outcome

    outcome = None
    with contextlib.suppress(NoRoom):  # its traceback holds tensors, which are released here
        outcome = tried(ready, patient=run.device == "cuda")
    if outcome is None:
        devices.found_room(run.device)
        outcome = tried(None, patient=False)
    if outcome.rows == 0 and outcome.verdict is Verdict.HOLDS:
        outcome.verdict, outcome.reason = Verdict.BLIND, "nothing to compare: the case has no rows"
    return outcome


def _room(case: Any) -> int:
    """The bytes of a case's tensors. Those of a rule count as if each head had at least the width of the oracle's matrices."""
    return max(case.bytes, 16 * numbers(case)) if isinstance(case, Case | PoolCase | LayerCase) else case.bytes


def _with_fields(domain: Any, fields: Mapping[str, Any]) -> Any:
    """The domain of a rule, or that of a pool, with other fields of the rule."""
    if isinstance(domain, PoolDomain):
        return dataclasses.replace(domain, rule=_with_fields(domain.rule, fields)) if fields else domain
    return dataclasses.replace(domain, **{name: frozen(value) for name, value in fields.items()}) if fields else domain


@functools.cache
def _bring(spec: str) -> None:
    """Let an adapter import what it needs in its own way, which may take less time than its first call would."""
    adapter = adapter_of(spec)
    assert isinstance(adapter, Adapter)
    with contextlib.suppress(Exception):  # an error here comes up again in the call
        adapter.bring()


def prepare(run: Run) -> None:
    """Fork the process that makes no calls, before the first call of this one, if the run is one of calls."""
    if isinstance(run.example.case, CallCase):
        afresh.start(_bring, _bounds_of)


def _bounds_of(spec: str, case: Any, inputs: Inputs, cotangents: Cotangents) -> dict[str, Bound]:
    adapter = adapter_of(spec)
    assert isinstance(adapter, Adapter)
    return CallBench(adapter, None, case).bounds(inputs, cotangents)


def _counterpart(run: Run, adapter: Adapter) -> Adapter | None:
    """The adapter's one-token form, if the law of the run uses it."""
    counterpart = adapter_of(adapter.counterpart) if adapter.counterpart and run.the_law.counterpart else None
    assert counterpart is None or isinstance(counterpart, Adapter)
    return counterpart


def compiled(run: Run) -> bool:
    """Compile every kernel that the run launches, and judge nothing. All processes then find the kernels in Triton's cache.

    Of a path, these are the kernels of the rank that this process stands in for (`verify.ranks.group.stand_in`).

    Kernels that other processes compile come last, so that processes with the same kernels share the work. Returns whether kernels
    were launched. Triton's kernels are launched only where Triton chooses their configurations by time.
    """
    adapter, law, case = adapter_of(run.adapter), run.the_law, run.example.case

    def bench() -> Any:
        if isinstance(adapter, PathAdapter):
            return alone_on_rank(run, adapter)
        assert isinstance(adapter, Adapter), run
        return Compiling(adapter, _counterpart(run, adapter), case, run.products, run.device)

    def call(launching: contextlib.AbstractContextManager[None]) -> None:
        # An error here comes up again in the check, which reports it.
        with contextlib.suppress(Exception), following(run.tune), launching:
            if (called := bench()) is not None:
                collections.deque(on_device(called.law_device, law.check(called, run.example)), maxlen=0)

    if is_timed(run.tune):
        call(contextlib.nullcontext())
        return True
    passed: list[str] = []
    call(unlaunched(passed))
    if passed:
        call(unlaunched())
    return False
