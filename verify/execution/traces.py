"""Executes the run of a serving engine."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from properties.rules.numbers import NORM_EPS
from verify.adapters.base import TraceAdapter
from verify.bench.trace_bench import EngineBench, layout_of, place_of
from verify.execution.judge import NOTHING
from verify.execution.judging import following, judged
from verify.execution.line import Run
from verify.execution.norms import with_norm
from verify.gpu import device as devices
from verify.process.outcome import Outcome, Verdict


def execute_trace(
    run: Run,
    adapter: TraceAdapter,
    excused: Mapping[str, float] = NOTHING,
    declared: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """Execute a run of a serving engine in this process (see verify/execution/execute.py)."""
    law, case = run.the_law, run.example.case
    norm = {name: declared[name] for name in ("qk_norm_eps", "qk_norm_form") if name in declared}
    domain = with_norm(adapter.domain, **norm) if norm else adapter.domain
    if reason := law.needs(domain) or domain.outside(case):
        return Outcome(Verdict.UNSUPPORTED, reason=reason)
    if run.device == "cuda" and not devices.gpus():
        return Outcome(Verdict.UNKNOWN, reason="device=cuda needs a GPU, and torch sees none")
    bench = EngineBench(adapter, case, run.products, run.device)
    if norm:
        bench.norm = {"qk_norm_eps": NORM_EPS[norm["qk_norm_eps"]], "qk_norm_form": norm["qk_norm_form"]}
    else:
        bench.declared = declared
    with following(run.tune) as used:
        outcome = judged(law, bench, run.example, place_of, layout_of, case.bytes, excused)
    outcome.tuned = dict(used)
    if outcome.rows == 0 and outcome.verdict is Verdict.HOLDS:
        outcome.verdict, outcome.reason = Verdict.BLIND, "nothing to compare: no event does anything"
    return outcome
