"""Laws take workers in turns: one that waits for kernels gives its worker to another, and the first law comes first."""

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.answering import Answering
from verify.engine import check
from verify.engine.check import Check
from verify.engine.compilers import Compilation, Need
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.engine.worker_pool import WorkerPool
from verify.findings.store import Store
from verify.process.outcome import Verdict

SPEC, LAWS = "tests/right.py:Chunkwise", ("pure", "future", "heads")


class Slow:
    """Stands for the processes that compile: what a law needs is compiled when somebody says so."""

    def __init__(self) -> None:
        self.compilations: dict[str, list[Compilation]] = {}

    def prepare(self, question: Any, family: Any, *words: Any, shared: bool = False) -> Compilation:
        made = Compilation(question, family, words)
        self.compilations.setdefault(words[0], []).append(made)
        return made

    def compiled(self, law: str) -> None:
        """Say that all that a law needs is compiled."""
        for one in self.compilations.get(law, []):
            one.end()

    def close(self) -> None:
        for law in self.compilations:
            self.compiled(law)

    def versions(self, words: str) -> None:
        """They do not matter here."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    compilers = Slow()
    monkeypatch.setattr(check, "_compilers", lambda settings: compilers)
    return compilers


def until(true: Any) -> None:
    """Wait until something is true; the test fails if it never is."""
    end = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def checking(slow: Slow, tmp_path: Any) -> Iterator[tuple[Check, threading.Thread, list[str]]]:
    """A check of three laws for a GPU with one worker, which runs in a thread, and the laws that it has decided."""
    decided: list[str] = []
    worker: Any = Answering()
    settings = Settings(SPEC, LAWS, Profile("some", 4, large=False), device="cuda")
    with Check(settings, [worker], Store(tmp_path), defects=[], on_report=lambda report: decided.append(report.law)) as one:
        thread = threading.Thread(target=one.run)
        thread.start()
        yield one, thread, decided
    thread.join(20.0)


def test_a_law_that_waits_for_kernels_gives_its_worker_to_another(
    slow: Slow, checking: tuple[Check, threading.Thread, list[str]]
) -> None:
    check, thread, decided = checking
    until(lambda: len(slow.compilations) == len(LAWS))
    slow.compiled("heads")
    until(lambda: decided == ["heads"])
    assert {report.verdict for report in check.reports} == {Verdict.HOLDS}
    until(lambda: any(one.need is Need.BY_WORKER for one in slow.compilations["pure"]))
    assert all(one.need is Need.BY_LAW for one in slow.compilations["future"]), "there is one worker, so one law comes first"
    slow.compiled("future")
    until(lambda: decided == ["heads", "future"])
    slow.compiled("pure")
    thread.join(20.0)
    assert decided == ["heads", "future", "pure"]
    assert [sum(report.counts.values()) for report in check.reports] == [4, 4, 4]
    assert all(report.wait_s > 0 for report in check.reports[1:])


def test_a_check_that_is_stopped_while_laws_wait_ends(checking: tuple[Check, threading.Thread, list[str]], slow: Slow) -> None:
    check, thread, decided = checking
    until(lambda: len(slow.compilations) == len(LAWS))
    check.stop()
    thread.join(20.0)
    assert not thread.is_alive()
    assert decided == []


def test_the_law_with_the_lowest_place_gets_the_next_worker() -> None:
    worker: Any = Answering()
    stopped, got = threading.Event(), list[int]()
    pool = WorkerPool([worker], stopped)

    def law(place: int) -> None:
        taken = pool.take(place)
        got.append(place)
        if taken is not None:
            pool.give(taken)

    assert pool.take(9) is worker
    threads = [threading.Thread(target=functools.partial(law, place)) for place in (5, 3, 7, 1)]
    for thread in threads:
        thread.start()
    until(lambda: len(pool._waiting) == len(threads))
    pool.give(worker)
    for thread in threads:
        thread.join(20.0)
    assert got == [1, 3, 5, 7]
    assert pool.take(0) is worker
    stopped.set()
    assert pool.take(0) is None
