"""A worker answers, and whatever a kernel does to its process costs one question, not the run."""

import gc
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.commands import Command
from tests.processes import alive, children, gone, opened
from verify.process import forking
from verify.process.fork_server import importing
from verify.process.messages import RunOne
from verify.process.outcome import Outcome
from verify.process.stacks import frames, innermost
from verify.process.worker import Worker, WorkerLost, interrogate

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS_OVER_20 = "gate=forever beta=one values=one_hot scale=one backward=no lengths=25"
KERNEL = """
import ctypes, os, signal, subprocess, sys, threading, time
from tests.right import Chunkwise

class Base(Chunkwise):
    def run(self, x):
        if x.q.shape[1] == 25:
            self.go_wrong()
        return super().run(x)

class Right(Chunkwise):
    pass

class Deaf(Base):
    '''It hangs in C and holds the interpreter's lock.'''
    def go_wrong(self):
        with open(os.environ["GDN_VERIFY_SIGN"], "w") as sign:
            sign.write(str(os.getpid()))
        lock, pause = ctypes.PyDLL(None), 1000
        while True:
            lock.sleep(pause)

class Slow(Base):
    def go_wrong(self):
        with open(os.environ["GDN_VERIFY_SIGN"], "w") as sign:
            sign.write(str(os.getpid()))
        time.sleep(1000)

class Shouts(Base):
    def go_wrong(self):
        os.write(1, b"\\xff\\xfe\\x00 not UTF-8 \\xc3\\n" * 100)
        print("last words", file=sys.stderr)
        os._exit(3)

class Floods(Base):
    def go_wrong(self):
        for _ in range(200):
            os.write(1, b"x" * 100_000)

class FloodsForLong(Base):
    def go_wrong(self):
        for _ in range(40):
            os.write(1, b"x" * 1_000_000)
            time.sleep(0.05)

class Compiles(Base):
    def go_wrong(self):
        compiler = subprocess.Popen(["sleep", "100"])
        with open(os.environ["GDN_VERIFY_SIGN"], "w") as sign:
            sign.write(str(compiler.pid))
        compiler.wait()

class ClosesEverything(Base):
    def go_wrong(self):
        os.closerange(3, 256)
        time.sleep(1000)

class WritesOnPipes(Base):
    def go_wrong(self):
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"garbage\\n")
            except OSError:
                pass

class DiesWithChild(Base):
    '''A child that keeps the pipes open outlives it.'''
    def go_wrong(self):
        if os.fork():
            os._exit(9)
        os.setsid()
        time.sleep(6)
        os._exit(0)

class Leaves(Base):
    def go_wrong(self):
        sys.exit("goodbye")

class RaisesBase(Base):
    def go_wrong(self):
        raise KeyboardInterrupt

class RaisesUnprintable(Base):
    def go_wrong(self):
        class Odd(Exception):
            def __str__(self):
                return ""
        raise Odd

class RaisesLong(Base):
    def go_wrong(self):
        raise RuntimeError("\\x1b[31m" + "long \\ud800" * 100_000)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("kernels") / "lost_kernels.py"
    path.write_text(KERNEL)
    return path


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(20.0) as one:
        yield one


def question(adapter: str) -> RunOne:
    return RunOne(f"law=recall adapter={adapter} {TOKENS_OVER_20}")


def lose(worker: Worker, adapter: str, deadline_s: float = 20.0) -> WorkerLost:
    with pytest.raises(WorkerLost) as lost:
        worker.ask(question(adapter), deadline_s)
    return lost.value


def holds(worker: Worker) -> bool:
    """Whether the worker, a fresh one where the last was lost, judges a right implementation right."""
    return bool(worker.ask(question("tests/right.py:Chunkwise"))["verdict"] == "holds")


def written(path: pathlib.Path, within_s: float = 20.0) -> str:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"nothing wrote {path}")


@pytest.mark.parametrize(
    ("mutant", "how", "detail"),
    [
        ("Exits", "crashed", "exited with code 7"),
        ("Segfaults", "crashed", "killed by SIGSEGV, in run (wrong_rules.py:"),
        ("Hangs", "hung", "no answer within 1 s, in run (wrong_rules.py:"),
    ],
)
@pytest.mark.slow_after_first
def test_lost_worker_says_how_and_where_and_the_next_question_is_answered(
    worker: Worker, mutant: str, how: str, detail: str
) -> None:
    lost = lose(worker, f"zoo/{mutant}", 1.0 if how == "hung" else 20.0)
    assert lost.how == how
    assert lost.detail.startswith(detail), lost.detail
    assert holds(worker)


@pytest.mark.slow
def test_stack_of_a_hung_worker_is_in_the_tail(worker: Worker) -> None:
    lost = lose(worker, "zoo/Hangs", 0.5)
    assert "verify/execution/execute.py" in lost.tail
    assert "in execute" in lost.tail


def test_exception_is_a_finding_and_costs_no_worker(worker: Worker) -> None:
    assert holds(worker)
    before = worker._process
    outcome = Outcome.from_json(worker.ask(question("zoo/Raises")))
    assert outcome.findings[0].what == "raised RuntimeError: block size 20 exceeded"
    assert outcome.findings[0].worst.startswith("wrong_rules.py:")
    assert worker._process is before


def test_exception_without_words_or_with_a_megabyte_of_them_is_one_short_line(worker: Worker, kernels: pathlib.Path) -> None:
    empty = worker.ask(question(f"{kernels}:RaisesUnprintable"))
    assert empty["findings"][0]["what"] == "raised Odd: no message"
    long = worker.ask(question(f"{kernels}:RaisesLong"))
    assert len(long["findings"][0]["what"]) < 400


@pytest.mark.parametrize(("mutant", "code"), [("Leaves", 1), ("RaisesBase", -2)])
@pytest.mark.slow_after_first
def test_kernel_that_ends_its_process_by_an_exception_is_a_crash(
    worker: Worker, kernels: pathlib.Path, mutant: str, code: int
) -> None:
    lost = lose(worker, f"{kernels}:{mutant}")
    assert lost.how == "crashed"
    assert lost.detail == (f"exited with code {code}" if code > 0 else "killed by SIGINT")


def test_noise_on_stdout_and_stderr_disturbs_no_answer(worker: Worker) -> None:
    outcome = Outcome.from_json(worker.ask(question("tests/right.py:Prints")))
    assert outcome.verdict == "holds"
    assert outcome.rows > 0


def test_flood_of_noise_is_answered_and_forgotten_at_the_next_question(worker: Worker, kernels: pathlib.Path) -> None:
    assert worker.ask(question(f"{kernels}:Floods"))["verdict"] == "holds"
    assert os.fstat(worker._errors.fileno()).st_size >= 200 * 100_000
    assert holds(worker)
    assert os.fstat(worker._errors.fileno()).st_size < 10_000


@pytest.mark.slow
def test_flood_that_lasts_is_cut_off_meanwhile(worker: Worker, kernels: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.process.worker.NOISE_BYTES", 4_000_000)
    assert worker.ask(question(f"{kernels}:FloodsForLong"))["verdict"] == "holds"
    assert os.fstat(worker._errors.fileno()).st_size < 25_000_000


def test_stack_is_found_under_what_a_kernel_prints_after_it(worker: Worker) -> None:
    assert holds(worker)
    interrogate([worker])
    os.write(worker._errors.fileno(), b"x" * 1_000_000)
    assert "in serve\n" in worker.words()
    assert innermost(worker.words()) == str(frames(worker.words())[0])
    assert holds(worker)
    assert not frames(worker.words())


@pytest.mark.slow
def test_what_the_worker_started_outlives_the_question_where_it_is(
    kernels: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default action of the signal for stacks is to end a process, such as a compiler that the kernel waits for."""
    monkeypatch.setenv("GDN_VERIFY_SIGN", str(tmp_path / "sign"))
    with Worker() as worker:
        thread = threading.Thread(target=lambda: lose(worker, f"{kernels}:Compiles", 60.0))
        thread.start()
        compiler = int(written(tmp_path / "sign"))
        assert "go_wrong" in {frame.function for frame in frames(interrogate([worker])[0])}
        assert not gone([compiler], 0.5)
        worker.close()
        thread.join()
    assert gone([compiler], 5.0)


@pytest.mark.slow
def test_worker_has_the_server_and_the_environment_of_its_arguments(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served.py").write_text(
        "import os\ndef say(question):\n    return {name: os.environ.get(name) for name in question['names']}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = {"names": ["COLOUR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]}
    with Worker(environment={"COLOUR": "red", "CUDA_VISIBLE_DEVICES": "9"}, serves="served:say") as told:
        assert told.ask(names) == {"COLOUR": "red", "CUDA_VISIBLE_DEVICES": "9", "OMP_NUM_THREADS": "1"}
    with Worker(serves="served:say") as plain:
        assert plain.ask(names) == {"COLOUR": None, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_bytes_that_are_no_text_do_not_hide_the_last_words(worker: Worker, kernels: pathlib.Path) -> None:
    lost = lose(worker, f"{kernels}:Shouts")
    assert lost.detail == "exited with code 3"
    assert lost.tail.endswith("last words\n")
    assert "�" in lost.tail
    json.dumps(lost.tail)


@pytest.mark.slow
def test_kernel_that_closes_every_descriptor_is_a_crash(worker: Worker, kernels: pathlib.Path) -> None:
    assert lose(worker, f"{kernels}:ClosesEverything").detail == "closed the pipe of its answers"


def test_kernel_that_writes_on_every_descriptor_is_a_crash_and_no_answer(worker: Worker, kernels: pathlib.Path) -> None:
    lost = lose(worker, f"{kernels}:WritesOnPipes")
    assert lost.detail == "wrote b'garbage' where its answer belongs"


@pytest.mark.slow
def test_death_is_seen_at_once_though_a_child_keeps_the_pipe_open(worker: Worker, kernels: pathlib.Path) -> None:
    assert holds(worker)
    start = time.monotonic()
    lost = lose(worker, f"{kernels}:DiesWithChild", 60.0)
    assert lost.detail == "exited with code 9"
    assert time.monotonic() - start < 5


def test_worker_killed_from_outside_is_a_crash(worker: Worker) -> None:
    assert holds(worker)
    process = worker._process
    assert process is not None
    timer = threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL))
    timer.start()
    lost = lose(worker, "zoo/Hangs")
    timer.join()
    assert lost.detail == "killed by SIGKILL"


def test_worker_that_died_between_questions_is_replaced(worker: Worker) -> None:
    assert holds(worker)
    process = worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait(5)
    assert holds(worker)


@pytest.mark.slow
def test_stopped_worker_is_hung(worker: Worker) -> None:
    assert holds(worker)
    process = worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert lose(worker, "tests/right.py:Chunkwise", 0.5).how == "hung"


def test_answer_larger_than_a_pipe_arrives_whole(worker: Worker) -> None:
    name = "x" * 300_000
    answer = worker.ask(RunOne(f"law=oracle adapter={name} lengths=1"))
    assert name in json.dumps(answer)


STUB = """#!/bin/bash
echo '{}' >&$6
read question <&$5
echo noise
kill -$GDN_VERIFY_SIGNAL $$
"""


@pytest.fixture
def server() -> None:
    """A server that has the environment of this process forks workers.

    Other tests may have put folders on sys.path since the last server began. The second worker in a row with another environment
    starts a server of its own.
    """
    for _ in range(2):
        with Worker(20.0) as one:
            assert holds(one)


@pytest.fixture
def stub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, server: None) -> None:
    """Workers that start in a millisecond and die by $GDN_VERIFY_SIGNAL of their first question."""
    path = tmp_path / "stub"
    path.write_text(STUB)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize(("number", "named"), [(signal.SIGBUS, "SIGBUS"), (signal.SIGRTMIN + 3, f"signal {signal.SIGRTMIN + 3}")])
@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.usefixtures("stub")
@pytest.mark.slow
def test_twenty_losses_leave_no_process_and_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, number: int, named: str, *, forked: bool
) -> None:
    monkeypatch.setattr(forking, "HERE", forked)
    monkeypatch.setenv("GDN_VERIFY_SIGNAL", str(int(number)))
    before, family = opened(), children()
    with Worker(5.0) as fresh:
        for _ in range(20):
            lost = lose(fresh, "tests/right.py:Chunkwise")
            assert (lost.how, lost.detail, lost.tail) == ("crashed", f"killed by {named}", "noise\n")
    assert opened() <= before
    assert children() <= family


@pytest.mark.usefixtures("server")
@pytest.mark.slow
def test_closing_from_another_thread_ends_a_busy_worker_at_once() -> None:
    before = opened()
    worker = Worker(60.0)
    assert holds(worker)
    process = worker._process
    assert process is not None
    timer = threading.Timer(0.5, worker.close)
    start = time.monotonic()
    timer.start()
    lost = lose(worker, "zoo/Hangs", 60.0)
    timer.join()
    assert lost.how == "closed"
    assert time.monotonic() - start < 5
    assert gone([process.pid], 5)
    assert opened() <= before
    with pytest.raises(WorkerLost, match="closed"):
        worker.ask(question("tests/right.py:Chunkwise"))


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that forks is there yet, and none is left."""
    monkeypatch.setattr(forking, "_servers", {})
    yield
    forking._end()


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.slow
def test_closing_while_the_worker_starts_ends_it(monkeypatch: pytest.MonkeyPatch, *, forked: bool) -> None:
    monkeypatch.setattr(forking, "HERE", forked)
    before, worker = opened(), Worker()
    timer = threading.Timer(0.2, worker.close)
    timer.start()
    with pytest.raises(WorkerLost, match="closed"):
        worker.ask(question("tests/right.py:Chunkwise"))
    timer.join()
    forking._end()
    assert opened() <= before


# In place of a worker, which would import torch.
HASHES = """
import os
def main(words):
    _, requests, answers = words
    os.write(int(answers), b"{}\\n")
    os.read(int(requests), 1000)
    os.write(int(answers), b'{"hash": %d}\\n' % hash("a word"))
"""


@pytest.mark.usefixtures("no_server")
def test_neighbouring_ranks_walk_a_set_in_different_orders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hashes.py").write_text(HASHES)
    monkeypatch.syspath_prepend(tmp_path)
    start = forking.start

    def without_torch(module: str, arguments: list[str], *rest: Any) -> forking.Forked:
        descriptors, environment, output, _, place = rest
        return start("hashes", arguments, descriptors, environment, output, [], place)

    monkeypatch.setattr(forking, "start", without_torch)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # tox sets it
    hashes = []
    for rank in ("0", "1", "2"):
        with Worker(environment={"RANK": rank, "CUDA_VISIBLE_DEVICES": ""}) as worker:
            hashes.append(worker.ask({})["hash"])
    assert hashes[0] == hashes[2], "these are forked by one server"
    assert hashes[0] != hashes[1]


def test_close_twice_and_close_unused_do_nothing() -> None:
    worker = Worker()
    worker.close()
    worker.close()
    assert worker._process is None


def test_interrupted_question_does_not_answer_the_next_one(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert holds(worker)

    def interrupt(deadline_s: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(worker, "_answer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.ask(question("zoo/Raises"))
    assert holds(worker)


HOLDER = """
import sys, threading
from verify.process.messages import RunOne
from verify.process.worker import NO_GPU, Worker
for sign, line in zip(sys.argv[1::2], sys.argv[2::2]):
    worker = Worker(4, environment={**NO_GPU, "GDN_VERIFY_SIGN": sign})
    threading.Thread(target=worker.ask, args=[RunOne(line)]).start()
"""


@pytest.mark.slow
def test_worker_ends_when_its_supervisor_is_killed(kernels: pathlib.Path, tmp_path: pathlib.Path) -> None:
    within_s = {"Slow": 5.0, "Deaf": 11.0}
    words = [word for adapter in within_s for word in (str(tmp_path / adapter), question(f"{kernels}:{adapter}").line)]
    with Command(words, tmp_path, program=HOLDER, imports=["verify.execution.service"]) as holder:
        pids = {adapter: int(written(tmp_path / adapter)) for adapter in within_s}
        assert all(map(alive, pids.values()))
        holder.send_signal(signal.SIGKILL)
        holder.wait(10.0)
    start = time.monotonic()
    for adapter, pid in pids.items():
        assert gone([pid], start + within_s[adapter] - time.monotonic()), adapter


@pytest.mark.slow
def test_worker_finds_modules_where_its_supervisor_does_and_in_the_same_order(tmp_path: pathlib.Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    for name in ("first", "second"):
        (tmp_path / name / "kernel_under_test.py").write_text(f"SAYS = {name!r}\n")
    (tmp_path / "json.py").write_text("raise AssertionError('a file in the working directory hides the library')\n")
    adapter = tmp_path / "adapter.py"
    adapter.write_text(
        "import kernel_under_test\nfrom tests.right import Chunkwise\n"
        "class Kernel(Chunkwise):\n    def __init__(self):\n        raise RuntimeError(kernel_under_test.SAYS)\n"
    )
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from verify.process.messages import Describe\n"
        "from verify.process import worker; worker.IMPORTS = ()\n"  # the server of one worker need not import for it
        "with worker.Worker() as worker: print(worker.ask(Describe(sys.argv[2]))['error'])\n"
    )
    path = os.pathsep.join([str(tmp_path / "second"), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path / "first"), f"{adapter}:Kernel"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RuntimeError: first" in result.stdout, result.stdout + result.stderr


def test_garbage_is_not_looked_for_while_modules_are_imported_and_is_afterwards() -> None:
    frozen_count = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    with pytest.raises(ModuleNotFoundError), importing():
        importlib.import_module("no_such_module")
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen_count
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled(), "who has switched it off keeps it off"
    finally:
        gc.enable()


PREPARED = """
from tests.alone import told

assert told(
    "from oracles.arithmetic import grids; told = [made.cache_info().currsize for made in (grids._known, grids._table)]"
) == [1, 2]
files, ours = told(
    "import inspect, sys; told = [list(inspect.modulesbyfile), [m.__file__ for n, m in sys.modules.items() if 'oracles.' in n]]"
)
assert ours
assert {*ours} < {*files}, "coverage has looked up the files of all modules"
"""


@pytest.mark.skipif(not forking.HERE, reason="processes are forked on Linux only")
def test_what_a_first_case_needs_is_made_before_a_worker_is_forked() -> None:
    """Asked in a process of its own with few variables: earlier tests leave folders on this one's path, and perhaps variables."""
    command = [sys.executable, "-P", "-c", PREPARED]
    few = {name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH", "PATH", "TMPDIR") if name in os.environ}
    done = subprocess.run(command, env={**few, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
