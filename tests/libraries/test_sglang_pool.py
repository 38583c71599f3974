"""SGLang's pool, allocator and kernels, driven event by event: the laws hold, and faults planted in the adapter are found."""

import pytest

from properties.traces.laws import TRACE_LAWS
from tests.kills import unexplained
from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

LINE = (
    "op=serving trace=p:a5,b70,_3/s:_,a/v4:a2,b1/k:c<b@/v2:c1,a2/w:a/r:a/p:d64,c1/k:e<d@/d:e,d,_,_ slots=6 pad=0 "
    "heads=1 value_heads=2 snapshots=64 gate=10 free=nan dtype=bf16 indices=int32 seed=7"
)
SLOW_FIXTURES = ("sglang_worker",)
# For each planted fault, the law that finds it, and after how many traces at most.
PLANTED = {"Drafts": "tags", "Clears": "tags", "Padding": "ledger", "Chunks": "tags", "Swaps": "ledger"}


@pytest.mark.interpreted
@pytest.mark.parametrize("law", [*TRACE_LAWS])
@pytest.mark.slow
def test_sglangs_engine_holds_on_a_trace_of_every_event(law: str, sglang_worker: Worker) -> None:
    for variant in TRACE_LAWS[law].variants or (None,):
        words = f"law={law} {f'variant={variant} ' if variant else ''}adapter=sglang/pool {LINE}"
        outcome = Outcome.from_json(sglang_worker.ask(RunOne(str(Run.parse(words)), {})))
        assert outcome.verdict is Verdict.HOLDS, (outcome.reason, outcome.findings)
        assert outcome.rows


@pytest.mark.interpreted
@pytest.mark.parametrize(("fault", "law"), PLANTED.items())
@pytest.mark.slow
def test_a_planted_fault_is_found(fault: str, law: str, sglang_worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("findings"))
    settings = Settings(f"tests/wrong_mamba.py:{fault}", [law], Profile("p", 16))
    with unexplained(), Check(settings, [sglang_worker], store, defects=[]) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.BROKEN, report.counts
    assert sum(report.counts.values()) <= 16
