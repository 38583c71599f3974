"""No false alarm: right implementations that were not used to set the bounds hold under every law.

A few cases a law here; thousands in benchmarks/soundness.py, with their figures in docs/MEASUREMENTS.md.
"""

from collections.abc import Iterator

import pytest

from tests import right
from verify.check import Check, Profile
from verify.judge import Verdict
from verify.store import Store
from verify.worker import Worker

FEW = Profile("few", 5)
RIGHT = (
    right.Chunkwise,
    right.Chunk16,
    right.Chunk48,
    right.Chunk128,
    right.BackwardSums,
    right.RoundsElsewhere,
    right.Recurrent,
    right.TransformersChunk,
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


@pytest.mark.parametrize("implementation", RIGHT, ids=lambda each: each.__name__)
def test_right_implementation_holds_under_every_law(
    implementation: type, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec, store = f"tests/right.py:{implementation.__name__}", Store(tmp_path_factory.mktemp("findings"))
    with Check(spec, profile=FEW, seed=7, workers=[worker], store=store) as check:
        reports = check.run()
    assert {report.law: report.run or report.reason for report in reports if report.verdict is Verdict.BROKEN} == {}
    assert sum(report.verdict is Verdict.HOLDS for report in reports) >= 10


@pytest.mark.parametrize(("products", "verdict"), [("tf32", Verdict.HOLDS), ("ieee", Verdict.BROKEN)])
def test_tf32_products_are_within_their_own_bound_and_over_the_float32_one(
    products: str, verdict: Verdict, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.mktemp("findings"))
    with Check("tests/right.py:Tf32", ["oracle"], FEW, seed=7, workers=[worker], store=store, products=products) as check:
        (report,) = check.run()
    assert report.verdict is verdict, report.run
