"""Processes that compile ahead: what comes first, and that nobody waits in vain."""

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from verify.engine.compilers import COMPILE_S, Compilation, Compilers, Need, OfRanks
from verify.gpu import device as devices
from verify.process.messages import Compile
from verify.process.worker import Worker
from verify.ranks.group import stand_in


class Gated(Worker):
    """A worker that remembers its questions, and answers when it is let go."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines, self.begun, self.go = lines, threading.Semaphore(0), threading.Semaphore(0)
        self.last = ""

    def ask(self, question: Any, deadline_s: float | None = None) -> dict[str, Any]:
        self.lines.append(question.line)
        self.last = question.line
        self.begun.release()
        assert self.go.acquire(timeout=60)
        return {}


def prepared(compilers: Compilers, family: str, line: str) -> Compilation:
    compilation = compilers.prepare(Compile(line), family, line)
    assert compilation is not None
    return compilation


def asked_after(change: Callable[[dict[str, Compilation]], None]) -> list[str]:
    """The order in which one process compiles a1, a2 and b1, if `change` comes while it compiles a0."""
    lines = list[str]()
    worker = Gated(lines)
    compilers = Compilers([worker], None)
    compilations = {line: prepared(compilers, line[0], line) for line in ("a0",)}
    assert worker.begun.acquire(timeout=60)
    compilations |= {line: prepared(compilers, line[0], line) for line in ("a1", "a2", "b1")}
    change(compilations)
    for _ in range(4):
        worker.go.release()
    for compilation in compilations.values():
        compilation.wait()
    compilers.close()
    return lines[1:]


def test_in_a_hurry_every_process_compiles_a_part_of_it() -> None:
    workers = [Gated([]) for _ in range(3)]
    compilers = Compilers(workers, None)
    whole = compilers.prepare(Compile("whole"), "family", "whole", shared=True)
    assert whole is not None
    thread = threading.Thread(target=compilers.hurry, args=(whole,))
    thread.start()
    for worker in workers:
        assert worker.begun.acquire(timeout=60), "all compile at the same time"
        worker.go.release(4)
    thread.join(60)
    assert whole.done
    compilers.close()
    compilers.hurry(whole)  # nobody waits for what is closed


def later(compilations: dict[str, Compilation]) -> None:
    """Change nothing."""


def of_a_law(compilations: dict[str, Compilation]) -> None:
    compilations["b1"].need = Need.BY_LAW


def waited_for(compilations: dict[str, Compilation]) -> None:
    of_a_law(compilations)
    compilations["a2"].need = Need.BY_WORKER


@pytest.mark.parametrize(
    ("change", "order"),
    [(later, ["a1", "a2", "b1"]), (of_a_law, ["b1", "a1", "a2"]), (waited_for, ["a2", "b1", "a1"])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_waited_for_comes_first_then_what_laws_need_that_have_begun(
    change: Callable[[dict[str, Compilation]], None], order: list[str]
) -> None:
    assert asked_after(change) == order


def test_a_process_takes_a_family_that_no_other_process_compiles() -> None:
    lines = list[str]()
    workers = [Gated(lines), Gated(lines)]
    compilers = Compilers(workers, None)
    compilations = [prepared(compilers, line[0], line) for line in ("a0", "c0")]
    for worker in workers:
        assert worker.begun.acquire(timeout=60)
    compilations += [prepared(compilers, line[0], line) for line in ("a1", "b0")]
    of_c = next(worker for worker in workers if worker.last == "c0")
    of_c.go.release()
    assert of_c.begun.acquire(timeout=60)
    assert of_c.last == "b0"  # although a1 came before it
    for worker in workers:
        worker.go.release(2)
    for compilation in compilations:
        compilation.wait()
    compilers.close()


def test_whoever_waits_goes_on_when_the_processes_end() -> None:
    worker = Gated([])
    compilers = Compilers([worker], None)
    begun, pending = prepared(compilers, "a", "a0"), prepared(compilers, "a", "a1")
    assert worker.begun.acquire(timeout=60)
    compilers.close()
    pending.wait()
    worker.go.release()
    begun.wait()
    assert worker.lines == ["a0"]


def test_what_ranks_launch_is_compiled_for_every_rank_and_waited_for() -> None:
    lines = list[str]()
    workers = [Gated(lines), Gated(lines)]
    compilers = OfRanks([Compilers([worker], None) for worker in workers])
    compilation = compilers.prepare(Compile("a0"), "a", "a0")
    assert compilation is not None
    for worker in workers:
        assert worker.begun.acquire(timeout=60)
    waiting = threading.Thread(target=compilation.wait)
    waiting.start()
    workers[0].go.release()
    waiting.join(0.2)
    assert waiting.is_alive()
    workers[1].go.release()
    waiting.join(60)
    assert not waiting.is_alive()
    assert lines == ["a0", "a0"]
    compilers.close()


ALONE = """
import pathlib

from verify import PathAdapter, PathDomain


class Alone(PathAdapter):
    domain = PathDomain(operation="causal_conv1d", ranks=4, processes=True)

    def run(self, x, place):
        whole = place.cp.all_gather(x.x.transpose(0, 1))
        with pathlib.Path(__file__).with_suffix(".txt").open("a") as notes:
            notes.write(f"rank {place.cp.rank} of {place.cp.size} has {x.x.shape[1]} of {len(whole)}\\n")
        return x.x * x.weight.sum()
"""


def test_a_process_that_stands_in_for_a_rank_calls_the_path_as_this_rank(tmp_path: pathlib.Path) -> None:
    """No other rank exists. A rank without a part in the case does nothing, and the law's call on one rank is made too."""
    file = tmp_path / "alone_on_rank.py"
    file.write_text(ALONE)
    line = f"law=parallel adapter={file}:Alone op=causal_conv1d cp=2 lengths=3+5 packed=yes layout=contiguous"
    for rank in range(3):
        with Worker(COMPILE_S, environment={**devices.environment("cpu"), **stand_in(rank, 3)}) as worker:
            worker.ask(Compile(line))
    assert file.with_suffix(".txt").read_text().splitlines() == [
        "rank 0 of 2 has 4 of 8",
        "rank 0 of 1 has 8 of 8",
        "rank 1 of 2 has 4 of 8",
    ]
