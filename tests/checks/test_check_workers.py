"""A check starts as many processes as a GPU has room for, and those that compile ahead give way."""

import threading
from typing import Any

import pytest

from properties.rules.domain import Domain
from properties.traces.domain import TraceDomain
from tests.answering import Answering
from tests.checking import RIGHT
from verify.engine import asking, check
from verify.engine.check import Check
from verify.engine.state import Settings
from verify.execution import service
from verify.process.messages import Compile, Describe, Question
from verify.process.worker import WorkerLost


@pytest.mark.parametrize(("device", "running", "count"), [("cuda", False, 4), ("cpu", False, 2), ("cuda", True, 2)])
def test_a_check_of_a_serving_engine_starts_more_workers_on_the_gpus(
    monkeypatch: pytest.MonkeyPatch, *, device: str, running: bool, count: int
) -> None:
    places = list[dict[str, str]]()

    def start(_deadline_s: float, environment: dict[str, str]) -> Answering:
        places.append(environment)
        return Answering()

    monkeypatch.setattr(check, "Worker", start)
    monkeypatch.setattr(check, "started", lambda device, count, deadline_s, sequential: [Answering() for _ in range(count)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    settings = Settings("gdn/pool", device=device, engine_workers=4)
    checking = Check(settings, [Answering(), Answering()] if running else 2)
    checking.share_gpus(TraceDomain())
    assert len(checking.workers) == count
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["3", "5"][: count - 2]


@pytest.mark.parametrize(("gib", "count"), [(141, 6), (40, 4), (20, 2)])
def test_a_check_of_a_kernel_starts_as_many_workers_as_the_memory_of_the_gpus_has_room_for(
    monkeypatch: pytest.MonkeyPatch, *, gib: int, count: int
) -> None:
    monkeypatch.setattr(check, "Worker", lambda _deadline_s, environment: Answering())
    first = [Answering(), Answering()]
    monkeypatch.setattr(check, "started", lambda device, count, deadline_s, sequential: first)
    checking = Check(Settings(RIGHT, device="cuda", engine_workers=8, gpu_workers=6), 2)
    checking.described = asking.Described(RIGHT, Domain(), "chunkwise", "none", memory=gib << 30)
    checking.share_gpus(Domain())
    assert len(checking.workers) == count
    assert [checking._pool.take(0) for _ in first] == first[::-1]  # they have started, so the first laws get them


def test_further_workers_of_a_gpu_start_before_their_first_law(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Semaphore(0)
    questions = list[Question]()

    class Starting(Answering):
        def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
            questions.append(question)
            begun.release()
            raise WorkerLost("closed", "by its supervisor", "")  # a check that ends at once closes it

    monkeypatch.setattr(check, "Worker", lambda _deadline_s, environment: Starting())
    monkeypatch.setattr(check, "started", lambda device, count, deadline_s, sequential: [Answering()])
    checking = Check(Settings(RIGHT, device="cuda", gpu_workers=3), 1)
    checking.described = asking.Described(RIGHT, Domain(), "chunkwise", "none", memory=141 << 30)
    checking.share_gpus(Domain())
    assert all(begun.acquire(timeout=60) for _ in range(2))
    assert questions == [Describe(RIGHT)] * 2


def test_a_process_that_compiles_ahead_gives_way_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[int]()
    monkeypatch.setattr(service.os, "nice", steps.append)
    monkeypatch.setattr(service, "compiled", lambda run: False)
    service._give_way.cache_clear()
    for _ in range(2):
        service._compile(Compile(f"law=oracle adapter={RIGHT} lengths=3"))
    service._give_way.cache_clear()
    assert steps == [service.NICE]
