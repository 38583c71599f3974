"""vLLM's blocks, metadata and layer, driven event by event: the laws hold, and faults planted in the adapter are found."""

from collections import Counter

import pytest

from properties.traces.case import TraceCase
from properties.traces.drawing import trace_cases
from properties.traces.laws import TRACE_LAWS
from tests.kills import unexplained
from verify.adapters.vllm_pool import Pool
from verify.engine.check import Check
from verify.engine.drawing import seeded
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

# Prompts beside decodes and beside drafts of no tokens, a prompt in two parts, one of one token, and graphs with padding rows.
LINE = (
    "op=serving trace=p:a5,b17/p:b3,c1/v4:a2,b4/d:b,_,a,_/p:d66,a1/v2:d1,_,b2/r:b/f:a/p:e1,b30/p:b19,d1/d:e,b,_ slots=5 pad=0 "
    "heads=1 value_heads=2 value_dim=16 gate=10 free=nan dtype=bf16 indices=int32 seed=7"
)
PLAIN = LINE.replace("v4:a2,b4", "v1:a1,b1").replace("v2:d1,_,b2", "d:d,_,b")
# A preempted request decodes before its prompt is complete again.
EARLY = "op=serving trace=p:a4/v1:a1/r:a/p:a1/v2:a2/d:a slots=1 pad=0 value_dim=16 gate=10 dtype=bf16 indices=int32"
# For each planted fault, the law that finds it.
PLANTED = {
    "Drafts": "tags",
    "Accepted": "tags",
    "Absent": "ledger",
    "Prompts": "tags",
    "Tail": "ledger",
    "Decodes": "tags",
    "Leaks": "slots",
}
SLOW_FIXTURES = ("vllm_worker",)
CASES = 16  # at most, until a planted fault is found


def test_drawn_traces_mix_prompts_decodes_and_drafts() -> None:
    mixtures, resumed = Counter[tuple[bool, tuple[str, ...]]](), 0

    def note(case: TraceCase) -> None:
        nonlocal resumed
        decoded, preempted = set[str](), set[str]()
        for step in case.plan:
            preempted |= {step.request} if step.kind == "r" else set()
            decoded -= {row.request for row in step.rows if row.begins}
            if step.kind == "p":
                resumed += any(row.begins and row.request in preempted for row in step.rows)
                ways = {
                    "decode" if row.request in decoded else "part" if row.start else "one" if row.count == 1 else "prompt"
                    for row in step.rows
                }
                mixtures[case.drafts > 1, tuple(sorted(ways))] += 1
            elif step.kind in "dv":
                decoded |= {row.request for row in step.rows if row.real}

    # Of a hundred traces without drafts, about one has a decode beside a prompt of one token.
    seeded(trace_cases(Pool.domain), 5, 600, note)
    for drafts in (False, True):
        assert all(mixtures[drafts, ways] for ways in (("decode",), ("part",), ("decode", "prompt"), ("decode", "one")))
    assert resumed > 60


@pytest.mark.interpreted
@pytest.mark.parametrize("line", [LINE, PLAIN, EARLY], ids=["drafts", "plain", "early"])
@pytest.mark.slow
def test_vllms_engine_holds_on_a_trace_of_every_way_through_the_layer(line: str, vllm_worker: Worker) -> None:
    for name, law in TRACE_LAWS.items():
        for variant in (law.variants or (None,)) if law.needs(Pool.domain) is None else ():
            if line != LINE and name in ("dropped", "renamed", "history"):
                continue
            words = f"law={name} {f'variant={variant} ' if variant else ''}adapter=vllm/pool {line}"
            outcome = Outcome.from_json(vllm_worker.ask(RunOne(str(Run.parse(words)), {})))
            assert outcome.verdict is Verdict.HOLDS, (words, outcome.reason, outcome.findings)
            assert outcome.rows


@pytest.mark.interpreted
@pytest.mark.parametrize(("fault", "law"), PLANTED.items())
@pytest.mark.slow
def test_a_planted_fault_is_found(fault: str, law: str, vllm_worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("findings"))
    settings = Settings(f"tests/wrong_blocks.py:{fault}", [law], Profile("p", CASES))
    with unexplained(), Check(settings, [vllm_worker], store, defects=[]) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.BROKEN, report.counts
    assert sum(report.counts.values()) <= CASES


@pytest.mark.interpreted
@pytest.mark.slow
def test_what_vllm_does_not_promise_is_unsupported(vllm_worker: Worker) -> None:
    """Beside a prompt, a decode takes other kernels; and the way of prompts does not begin at the last accepted token."""
    reasons = {}
    for law, trace in (("alone", "p:a1/p:b1,a1"), ("tags", "p:a5/d:a/p:a2"), ("tags", "p:a5/k:b<a")):
        run = f"law={law} adapter=vllm/pool op=serving trace={trace} pad=0 value_dim=16 dtype=bf16 indices=int32"
        reasons[trace] = Outcome.from_json(vllm_worker.ask(RunOne(run, {}))).reason
    assert reasons == {
        "p:a1/p:b1,a1": "batch invariant is not supported",
        "p:a5/d:a/p:a2": "p:a2: several tokens of a prompt after a decode are not supported",
        "p:a5/k:b<a": "k:b<a: fork is not supported",
    }
