"""No false alarm: right implementations that were not used to set the bounds hold under every law.

A few cases a law here; thousands in benchmarks/soundness.py, with their figures in docs/results.md.
"""

import collections
import itertools

import pytest

from properties.rules.case import Case
from properties.rules.laws import LAWS
from tests import right
from tests.kills import Fewer, small_ones, unexplained
from verify.engine.check import Check
from verify.engine.state import Settings
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker

# tests/laws/test_standin.py runs right code under every law too, and benchmarks/soundness.py runs thousands of cases.
FEW = Fewer("few", 1, large=False)
# Those that have the same bounds run a law at a time, so that the bounds of a case are made once for them all.
RIGHT = {
    "chunks of 64": (right.Chunkwise, right.BackwardSums),
    "chunks not told": (right.Chunk16, right.Chunk128, right.RoundsElsewhere),
    "token by token": (right.Recurrent, right.Expanded),
}


def small(case: Case) -> bool:
    """Whether a case has at most two chunks of 64 and a part of a third, and few numbers."""
    return case.tokens <= 130 and case.tokens * case.value_heads * case.key_dim * case.value_dim <= 2**16


@pytest.mark.parametrize("alike", RIGHT.values(), ids=RIGHT)
@pytest.mark.slow
def test_right_implementations_hold_under_every_law(
    alike: tuple[type, ...], worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store, counts, broken = Store(tmp_path_factory.mktemp("findings")), collections.Counter[str](), []
    for law, implementation in itertools.product(LAWS, alike):
        settings = Settings(f"tests/right.py:{implementation.__name__}", [law], FEW, 7)
        with small_ones(small), Check(settings, [worker], store, defects=[]) as check:
            (report,) = check.run()
        counts[implementation.__name__] += report.verdict is Verdict.HOLDS
        broken += [report.run or report.reason] if report.verdict is Verdict.BROKEN else []
    assert broken == []
    assert min(counts[implementation.__name__] for implementation in alike) >= 10


@pytest.mark.parametrize(("products", "verdict"), [("tf32", Verdict.HOLDS), ("ieee", Verdict.BROKEN)])
@pytest.mark.slow_after_first
def test_tf32_products_are_within_their_own_bound_and_over_the_float32_one(
    products: str, verdict: Verdict, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.mktemp("findings"))
    with unexplained(), Check(Settings("tests/right.py:Tf32", ["oracle"], FEW, 7, products=products), [worker], store) as check:
        (report,) = check.run()
    assert report.verdict is verdict, report.run


@pytest.mark.slow
def test_a_hopper_holds(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = Settings("tests/right.py:Hopper", ["oracle"], FEW, 7, products="tf32")
    with small_ones(small), Check(settings, [worker], Store(tmp_path_factory.mktemp("findings")), defects=[]) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.HOLDS, report.run
