"""Ranks answer as one, and whatever one of them does becomes the right verdict, names it, and costs the group at most."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.commands import Command
from tests.processes import SOON_S, alive, gone, opened
from tests.together import for_each
from verify.execution.service import answer
from verify.process.messages import Describe, Failure, Join, Outcomes, Question, Reaction, answer_of
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Worker, WorkerLost
from verify.ranks import collectives, torchrun
from verify.ranks import group as ranks
from verify.ranks.group import RankGroup, environment
from verify.ranks.hangs import Standing, crashed, hung
from verify.ranks.merge import merge, merge_outcomes
from verify.ranks.merge import parted as have_parted
from verify.ranks.torchrun import Launch, TorchrunGroup, launched

pytestmark = pytest.mark.ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAULTY = "tests.faulty_ranks:answer"
FINE = {"planted": "none", "of": []}
DEADLINE_S = 1.0
SLACK_S = 3.5  # what finding out may take beyond a deadline, on a busy machine


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with RankGroup(2, deadline_s=20.0, serves=FAULTY) as two:
        yield two


def pids(group: RankGroup | TorchrunGroup) -> list[int]:
    return [seat._process.pid for seat in group._seats if isinstance(seat, Worker) and seat._process is not None]


def eventually(true: Any, within_s: float = 30.0) -> bool:
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(true())


def put(
    group: RankGroup | TorchrunGroup, fault: str, of: int, deadline_s: float = DEADLINE_S
) -> tuple[Outcome | WorkerLost, float]:
    """What becomes of a fault in a group that is ready, and after how many seconds; if it is lost, no process is left."""
    assert group.ask(FINE)["verdict"] == "holds"
    before, start = pids(group), time.monotonic()
    try:
        got: Outcome | WorkerLost = Outcome.from_json(group.ask({"planted": fault, "of": [of]}, deadline_s))
    except WorkerLost as lost:
        got = lost
    took = time.monotonic() - start
    if isinstance(got, WorkerLost):
        assert gone(before, 0.0)
    return got, took


# The verdict on each fault, under our own launch


def test_right_ranks_hold_and_their_rows_are_added(group: RankGroup) -> None:
    outcome, _ = put(group, "none", 0)
    assert isinstance(outcome, Outcome)
    assert (outcome.verdict, outcome.rows, outcome.ratios) == (Verdict.HOLDS, 2, {"o": 0.25})
    before = pids(group)
    assert group.ask(FINE)["verdict"] == "holds"
    assert pids(group) == before


def test_rank_that_exits_is_named_at_once_though_the_other_waits_for_it(group: RankGroup) -> None:
    lost, took = put(group, "leaves", 1, 20.0)
    assert isinstance(lost, WorkerLost)
    assert (lost.how, lost.detail) == ("crashed", "rank 1 exited with code 7")
    assert took < 3


def test_rank_that_is_killed_is_named_at_once_though_two_wait_for_it() -> None:
    with RankGroup(3, serves=FAULTY) as group:
        lost, took = put(group, "dies", 2, 20.0)
    assert isinstance(lost, WorkerLost)
    assert (lost.how, lost.detail) == ("crashed", "rank 2 killed by SIGKILL")
    assert took < 3


@pytest.mark.parametrize(("fault", "rank"), [("spins", 0), ("holds_the_lock", 1)])
@pytest.mark.slow
def test_rank_that_hangs_outside_any_collective_is_to_blame(group: RankGroup, fault: str, rank: int) -> None:
    lost, took = put(group, fault, rank)
    assert isinstance(lost, WorkerLost)
    assert lost.how == "hung"
    assert lost.detail.startswith(f"rank {rank} hung: no answer within 1 s, in {fault} (faulty_ranks.py:"), lost.detail
    assert lost.detail.endswith(f"; rank {1 - rank} waits in all_reduce")
    assert lost.in_kernel
    assert "call_implementation" in lost.tail
    assert took < DEADLINE_S + SLACK_S


@pytest.mark.slow
def test_different_collectives_are_both_named(group: RankGroup) -> None:
    lost, took = put(group, "gathers", 1)
    assert isinstance(lost, WorkerLost)
    assert lost.how == "hung"
    assert lost.detail.startswith(
        "ranks 0, 1 hung: no answer within 1 s; rank 0 in all_reduce, called by reduced (faulty_ranks.py:"
    )
    assert "; rank 1 in all_gather, called by gathers (faulty_ranks.py:" in lost.detail
    assert took < DEADLINE_S + SLACK_S


@pytest.mark.slow
def test_exception_of_one_rank_is_the_finding_long_before_the_deadline(group: RankGroup) -> None:
    outcome, took = put(group, "raises", 1, 20.0)
    assert isinstance(outcome, Outcome)
    assert outcome.verdict is Verdict.BROKEN
    (finding,) = outcome.findings
    assert (finding.place, finding.output, finding.ranks) == ("rank 1: call", "call", (1,))
    assert finding.what == "raised ZeroDivisionError: head 0 / 0; while rank 0 waits in all_reduce"
    assert outcome.way == "raised ZeroDivisionError"
    assert took < ranks.GRACE_S + SLACK_S
    assert not pids(group)


@pytest.mark.slow
def test_refusal_of_one_rank_alone_is_undecided(group: RankGroup) -> None:
    outcome, took = put(group, "refuses", 0, 20.0)
    assert isinstance(outcome, Outcome)
    assert (outcome.verdict, outcome.findings) == (Verdict.UNKNOWN, [])
    assert outcome.reason == "ranks disagree: rank 0: unsupported: heads must divide by 2; rank 1 waits in all_reduce"
    assert took < ranks.GRACE_S + SLACK_S


def test_row_that_is_not_finite_on_one_rank_breaks_the_law_and_costs_no_process(group: RankGroup) -> None:
    assert group.ask(FINE)["verdict"] == "holds"
    before = pids(group)
    outcome, _ = put(group, "is_not_finite", 1)
    assert isinstance(outcome, Outcome)
    assert (outcome.verdict, outcome.kind) == (Verdict.BROKEN, FailureKind.NOT_FINITE)
    assert [finding.place for finding in outcome.findings] == ["rank 1: o"]
    assert outcome.rows == 5
    assert group.ask(FINE)["verdict"] == "holds"
    assert pids(group) == before


def test_hundred_megabytes_of_noise_are_answered_and_forgotten(group: RankGroup) -> None:
    outcome, _ = put(group, "floods", 1, 20.0)
    assert isinstance(outcome, Outcome)
    assert outcome.verdict is Verdict.HOLDS
    assert group.ask(FINE)["verdict"] == "holds"
    assert all(len(seat.words()) < 10_000 for seat in group._seats)


# Starting, ending


def test_group_of_one_answers_what_a_worker_answers() -> None:
    with RankGroup(1) as one:
        assert one.ask(Describe("tests/right.py:Chunkwise"))["algorithm"] == "chunkwise"
        assert one.ask(Describe("tests/right.py:Nothing"))["error"].startswith("adapter tests/right.py:Nothing")


def test_rank_that_cannot_start_is_named_and_blames_no_kernel() -> None:
    with RankGroup(1, serves="tests.faulty_ranks:nothing") as group, pytest.raises(WorkerLost) as lost:
        group.ask(FINE)
    assert lost.value.how == "failed to start"
    assert lost.value.detail == (
        "rank 0 exited with code 1: AttributeError: module 'tests.faulty_ranks' has no attribute 'nothing'"
    )
    assert not lost.value.in_kernel


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused() -> None:
    reply = answer(Join("localhost", 0, "", 1, 0, "nccl").to_json())
    assert reply["error"].startswith("there is no GPU for this rank: CUDA_VISIBLE_DEVICES=")


def test_group_must_have_a_rank_and_a_known_backend() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        RankGroup(0)
    with pytest.raises(ValueError, match="backend must be one of gloo, nccl, got 'mpi'"):
        RankGroup(2, "mpi")


def test_each_rank_sees_its_gpu_and_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert environment("gloo", 3, 4, 3, one_host=True)["CUDA_VISIBLE_DEVICES"] == ""
    env = environment("nccl", 3, 4, 3, one_host=True)
    assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"], env["RANK"], env["WORLD_SIZE"]) == ("3", "0", "3", "4")
    assert env["GLOO_SOCKET_IFNAME"] in {name for _, name in socket.if_nameindex()}
    assert env["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert "GLOO_SOCKET_IFNAME" not in environment("gloo", 3, 16, 3, one_host=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert environment("gloo", 0, 4, 0, one_host=True)["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-12ab")
    assert environment("nccl", 9, 16, 1, one_host=False)["CUDA_VISIBLE_DEVICES"] == "GPU-12ab"
    with pytest.raises(ValueError, match="rank 2 needs GPU 2 of this host, but CUDA_VISIBLE_DEVICES has 2"):
        environment("nccl", 2, 4, 2, one_host=True)


def test_own_store_listens_on_loopback_alone_and_goes_with_the_group() -> None:
    RankGroup(1).close()  # the first store of a process opens a pipe that stays
    before = opened()
    group = RankGroup(1)
    port = group._meeting.port
    listening = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()]
    assert [words[1] for words in listening if words[1].endswith(f":{port:04X}") and words[3] == "0A"] == [f"0100007F:{port:04X}"]
    group.close()
    group.close()
    assert eventually(lambda: opened() <= before, 5)
    with pytest.raises(WorkerLost, match="closed"):
        group.ask(FINE)


def test_closing_from_another_thread_ends_a_busy_group_at_once() -> None:
    with RankGroup(1, serves=FAULTY) as group:
        assert group.ask(FINE)["verdict"] == "holds"
        before = pids(group)
        timer = threading.Timer(0.3, group.close)
        timer.start()
        with pytest.raises(WorkerLost, match="closed"):
            group.ask({"planted": "spins", "of": [0]}, 60.0)
        timer.join()
        assert gone(before, 0.0)


# Of servers that fork one rank or two: no rank needs more here.
RANKS_IMPORT = ["tests.faulty_ranks"]
HOLDER = """
import sys
from verify.ranks.group import RankGroup
for size in (2, 1):
    try:
        with RankGroup(size, serves=sys.argv[1]) as group:
            group.ask({"planted": "none", "of": []})
            print("ready", flush=True)
            group.ask({"planted": "spins", "of": [0]}, 60.0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_no_rank_outlives_its_supervisor(tmp_path: pathlib.Path) -> None:
    """Whether it is interrupted and ends them, or killed and they notice."""
    earlier = set[int]()
    with Command([FAULTY], ROOT, program=HOLDER, imports=RANKS_IMPORT, environment={"PIDS": str(tmp_path)}) as holder:
        assert holder.stdout is not None
        for how, size in ((signal.SIGINT, 2), (signal.SIGKILL, 1)):
            assert holder.stdout.readline() == "ready\n"
            started = {int(path.name) for path in tmp_path.iterdir()} - earlier
            assert len(started) == size
            time.sleep(0.2)
            holder.send_signal(how)
            if how == signal.SIGINT:
                assert holder.stdout.readline() == "interrupted\n"
            else:
                holder.wait(10)
            assert gone(started, 5)
            earlier |= started


# Under torchrun

PROGRAM = """
import json, sys
from verify.process.fork_server import importing
with importing():
    from verify.process import worker
    from verify.process.worker import WorkerLost
    from verify.ranks import group as ranks, torchrun
    from verify.ranks.torchrun import TorchrunGroup, follow, launched
worker.IMPORTS = ("tests.faulty_ranks",)
ranks.GRACE_S, torchrun.SILENT_S = 0.5, 3.0
launch, serves = launched(), "tests.faulty_ranks:answer"
if launch.rank:
    sys.exit(follow(launch, serves=serves))
with TorchrunGroup(launch, serves=serves) as group:
    for fault in sys.argv[1:]:
        group.ask({"planted": "none", "of": []})
        try:
            said = group.ask({"planted": fault, "of": [1]}, 1.0 if fault == "spins" else 60.0)
        except WorkerLost as lost:
            said = {"how": lost.how, "detail": lost.detail}
        print(json.dumps({"planted": fault, **said}), flush=True)
"""

TORCHRUN = "import runpy\nrunpy.run_module('torch.distributed.run', run_name='__main__', alter_sys=True)\n"


def under_torchrun(tmp_path: pathlib.Path, *faults: str) -> Command:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "pids").mkdir()
    words = ["--standalone", "--nproc-per-node", "2", str(program), *faults]
    return Command(words, ROOT, program=TORCHRUN, environment={"PIDS": str(tmp_path / "pids")})


def started(tmp_path: pathlib.Path) -> list[int]:
    return [int(path.name) for path in (tmp_path / "pids").iterdir()]


@pytest.mark.slow
def test_torchrun_survives_what_a_rank_does_and_leaves_no_worker_though_one_holds_the_lock(tmp_path: pathlib.Path) -> None:
    faults = ["none", "is_not_finite", "floods", "raises", "dies", "spins", "none"]
    with under_torchrun(tmp_path, *faults, "holds_the_lock") as job:
        assert job.stdout is not None
        late = threading.Timer(240, job.kill)
        late.start()
        replies = [json.loads(job.stdout.readline()) for _ in faults]
        time.sleep(0.2)
        assert sum(map(alive, started(tmp_path))) == 2
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=20)
        late.cancel()
    assert [reply.pop("planted") for reply in replies] == faults
    fine, not_finite, noise, raised, died, spun, again = replies
    assert [reply["verdict"] for reply in (fine, noise, again)] == ["holds"] * 3
    assert [(finding["output"], finding["ranks"]) for finding in not_finite["findings"]] == [("o", [1])]
    assert raised["findings"][0]["what"] == "raised ZeroDivisionError: head 0 / 0; while rank 0 waits in all_reduce"
    assert died == {"how": "crashed", "detail": "rank 1 killed by SIGKILL"}
    assert spun["detail"].startswith("rank 1 hung: no answer within 1 s, in spins (faulty_ranks.py:")
    assert spun["detail"].endswith("; rank 0 waits in all_reduce")
    assert len(started(tmp_path)) == 2 * 4
    assert gone(started(tmp_path), SOON_S)


@pytest.fixture
def own_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def launch_words() -> tuple[TCPStore, dict[str, str]]:
    """A store of this process, and what torchrun says to each of two ranks that meet there."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return store, words | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.usefixtures("own_sigterm")
@pytest.mark.slow
def test_supervisors_without_a_pulse_are_missed_by_those_who_need_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that is stopped is a loss that names its rank; without a leader it ends itself and its worker."""
    monkeypatch.setattr(torchrun, "SILENT_S", 3.0)
    _store, words = launch_words()
    (tmp_path / "pids").mkdir()
    environment = {**words, "RANK": "1", "LOCAL_RANK": "1", "PIDS": str(tmp_path / "pids")}
    launch = launched({**words, "RANK": "0", "LOCAL_RANK": "0"})
    assert launch is not None
    follower = Command([], ROOT, program=PROGRAM, environment=environment)
    with follower, TorchrunGroup(launch, serves=FAULTY) as group:
        assert group.ask(FINE)["verdict"] == "holds"
        threading.Timer(1.5, follower.send_signal, [signal.SIGSTOP]).start()  # it has shown a pulse by then
        start = time.monotonic()
        with pytest.raises(WorkerLost) as lost:
            group.ask({"planted": "sleeps", "of": [1]}, 60.0)
        assert time.monotonic() - start < 1.5 + 3 + SLACK_S
        assert (lost.value.how, lost.value.detail) == ("crashed", "rank 1 lost its supervisor: no message from it for 3 s")
        assert not lost.value.in_kernel
        group._pulse.stop()
        follower.send_signal(signal.SIGCONT)
        _, err = follower.communicate(timeout=3 + 3 + SLACK_S)
        assert follower.returncode == torchrun.UNDECIDED
        assert "rank 1: lost the supervisor of rank 0: no message from it for 3 s" in err
        assert not group._seats[1].alive
        assert gone(started(tmp_path), SOON_S)
        with pytest.raises(WorkerLost, match="rank 1 lost its supervisor: the process ended"):
            group.ask(FINE)


def test_launch_is_what_torchrun_says_and_nothing_outside_of_it() -> None:
    words = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "there",
        "MASTER_PORT": "29501",
    }
    assert launched(words) is None
    launch = launched(
        {**words, "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    )
    assert launch == Launch(3, 4, 1, 2, "there", 29501, 2, hosted=False)
    assert not launch.one_host
    with pytest.raises(ValueError, match="rank 0 leads, the others follow; this is rank 3"):
        TorchrunGroup(launch)


# What a group makes of what its ranks do, in any order: without processes


def outcome(verdict: Verdict, reason: str = "", *findings: Finding, rows: int = 1) -> dict[str, Any]:
    return Outcome(verdict, list(findings), reason, rows, {"o": 0.5} if rows else {}, 0.1, 0.2).to_json()


HOLDS = outcome(Verdict.HOLDS)
RAISED = outcome(Verdict.BROKEN, "", Finding("call", FailureKind.RAISED, "raised ValueError: no", detail="ValueError"), rows=0)
OFF = outcome(Verdict.BROKEN, "", Finding("o", FailureKind.OFF, "is off", "token 3", rows=4))


TORCH = os.path.dirname(torch.__file__)
KERNEL, RUN = "/home/me/kernel.py", "/opt/run.py"
EXCHANGE = collectives.exchange.__code__.co_name  # with its mark


def dump(*threads: list[tuple[str, str]]) -> str:
    """What faulthandler writes of threads, the main one last."""
    blocks = []
    for number, stack in enumerate(threads, 1):
        title = "Current thread" if number == len(threads) else "Thread"
        lines = [f'  File "{file}", line {line} in {function}\n' for line, (file, function) in enumerate(stack, 1)]
        blocks.append(f"{title} 0x{number:016x} (most recent call first):\n" + "".join(lines))
    return "\n".join(blocks)


READER = [
    ("/opt/worker.py", "read"),
    ("/usr/lib/python3/threading.py", "run"),
    ("/usr/lib/python3/threading.py", "_bootstrap"),
]
REDUCE = [(f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"), (f"{TORCH}/distributed/c10d_logger.py", "wrapper")]
OUTERMOST = ("<frozen runpy>", "_run_module_as_main")
WORKS = dump([(KERNEL, "work"), OUTERMOST]).replace("line 1 in", "line LINE in")
SPINS, WAITS = dump([(KERNEL, "spin"), OUTERMOST]), dump([*REDUCE, (KERNEL, "run"), OUTERMOST])


class Rank:
    """A rank that answers, or is lost, at given seconds after the question."""

    def __init__(
        self, *does: tuple[float, dict[str, Any] | WorkerLost], wrote: str = "", join: dict[str, Any] | None = None
    ) -> None:
        self.does, self.wrote, self.join = list(does), wrote, join or {}
        self.alive, self.starts, self.looks = False, 0, 0
        self.due: list[tuple[float, dict[str, Any] | WorkerLost]] = []

    def launch(self) -> None:
        self.alive, self.starts, self.due = True, self.starts + 1, [(0.0, {})]

    def send(self, question: Question | Mapping[str, Any], deadline_s: float) -> None:
        now = time.monotonic()
        self.due = [(0.0, self.join)] if isinstance(question, Join) else [(now + after, what) for after, what in self.does]

    def receive(self) -> dict[str, Any] | None:
        if self.due and time.monotonic() >= self.due[0][0]:
            _, what = self.due.pop(0)
            if isinstance(what, WorkerLost):
                raise what
            return what
        return None

    def interrogate(self) -> None:
        pass

    def words(self) -> str:
        if self.wrote == WORKS:
            self.looks += 1
        return self.wrote.replace("LINE", str(self.looks))

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def end(self) -> None:
        self.alive = False


class Interrupted(Rank):
    def receive(self) -> dict[str, Any] | None:
        raise KeyboardInterrupt


def of(*seats: Rank) -> ranks.Group:
    return ranks.Group(seats, ranks.Meeting("nowhere", 0, "test"), "gloo", 1.0)


def test_loss_beats_the_finding_that_it_caused() -> None:
    """Where a rank dies, the others see a connection break, and may say so first."""
    group = of(Rank((0.0, RAISED)), Rank((0.3, WorkerLost("crashed", "killed by SIGBUS", ""))))
    with pytest.raises(WorkerLost, match="crashed: rank 1 killed by SIGBUS"):
        group.ask({})


def test_rank_in_a_collective_that_the_others_have_left_is_named() -> None:
    group = of(Rank((0.0, HOLDS)), Rank(wrote=WAITS))
    with pytest.raises(WorkerLost) as lost:
        group.ask({}, 0.2)
    assert (
        lost.value.detail == "rank 1 hung: no answer within 0.2 s, in all_reduce, called by run (kernel.py:3); rank 0 has answered"
    )


@pytest.mark.slow
def test_failed_rank_does_not_cut_short_one_that_works() -> None:
    seats = Rank((0.0, RAISED)), Rank((2.6, OFF), wrote=WORKS)
    got = Outcome.from_json(of(*seats).ask({}, 20.0))
    assert [finding.place for finding in got.findings] == ["rank 0: call", "rank 1: o"]
    assert not any(seat.alive for seat in seats)


@pytest.mark.slow
def test_patience_with_one_that_works_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE_S", 1.0)
    got = Outcome.from_json(of(Rank((0.0, RAISED)), Rank(wrote=WORKS)).ask({}, 20.0))
    assert re.fullmatch(r"raised ValueError: no; while rank 1 is in work \(kernel.py:\d\)", got.findings[0].what)


@pytest.mark.slow
def test_rank_that_stands_still_waits_for_the_one_that_failed() -> None:
    start = time.monotonic()
    got = Outcome.from_json(of(Rank((0.0, RAISED)), Rank(wrote=SPINS)).ask({}, 20.0))
    assert time.monotonic() - start < ranks.GRACE_S + ranks.LOOK_S + SLACK_S
    assert [finding.what for finding in got.findings] == ["raised ValueError: no; while rank 1 is in spin (kernel.py:1)"]


@for_each(("answers", "starts"), [((HOLDS, HOLDS), 1), ((HOLDS, OFF), 1), ((HOLDS, RAISED), 2)])
def test_group_is_replaced_only_where_ranks_may_have_parted(answers: tuple[dict[str, Any], ...], starts: int) -> None:
    seats = [Rank((0.0, reply)) for reply in answers]
    group = of(*seats)
    group.ask({})
    group.ask({})
    assert {seat.starts for seat in seats} == {starts}


def test_rank_that_cannot_join_is_named() -> None:
    refused = Failure("there is no GPU for this rank").to_json()
    with pytest.raises(WorkerLost, match="failed to start: rank 1: there is no GPU for this rank"):
        of(Rank(), Rank(join=refused)).ask({})


def test_interrupted_question_does_not_answer_the_next_one() -> None:
    seats = Rank((0.0, HOLDS)), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        of(*seats).ask({})
    assert not any(seat.alive for seat in seats)


# Merging answers, reading stacks: without processes


def merged(*answers: dict[str, Any], waited: str = "") -> Outcome:
    found = merge({rank: answer_of(answer) for rank, answer in enumerate(answers)}, waited)
    assert isinstance(found, Outcome)
    return found


@for_each("verdict", [Verdict.HOLDS, Verdict.BLIND, Verdict.UNSUPPORTED, Verdict.UNKNOWN])
def test_what_all_ranks_decide_alike_is_decided(verdict: Verdict) -> None:
    one = outcome(verdict, "why")
    got = merged(one, one, one)
    assert (got.verdict, got.reason, got.rows, got.kernel_s) == (verdict, "why", 3, 0.1)


def test_same_verdict_for_different_reasons_has_them_all() -> None:
    got = merged(outcome(Verdict.BLIND, "a"), outcome(Verdict.BLIND, "b"), outcome(Verdict.BLIND, "a"))
    assert (got.verdict, got.reason) == (Verdict.BLIND, "ranks 0, 2: a; rank 1: b")


@for_each("verdict", [Verdict.BLIND, Verdict.UNSUPPORTED, Verdict.UNKNOWN])
def test_what_ranks_decide_differently_is_unknown(verdict: Verdict) -> None:
    got = merged(HOLDS, outcome(verdict, "why"), HOLDS)
    assert (got.verdict, got.reason) == (Verdict.UNKNOWN, f"ranks disagree: ranks 0, 2: holds; rank 1: {verdict}: why")


@for_each("other", [HOLDS, outcome(Verdict.UNKNOWN, "why"), outcome(Verdict.UNSUPPORTED), {"error": "why"}])
def test_finding_of_one_rank_breaks_the_law_whatever_the_others_say(other: dict[str, Any]) -> None:
    got = merged(other, OFF)
    assert got.verdict is Verdict.BROKEN
    assert [(finding.place, finding.what, finding.worst) for finding in got.findings] == [("rank 1: o", "is off", "token 3")]


def test_same_finding_of_several_ranks_is_one_and_different_ones_stay_apart() -> None:
    got = merged(RAISED, OFF, RAISED)
    assert [finding.place for finding in got.findings] == ["ranks 0, 2: call", "rank 1: o"]


def test_finding_says_what_waiting_ranks_did_and_keeps_its_kind() -> None:
    alone = merged(OFF, waited="ranks 0, 2 wait in all_reduce")
    assert (alone.findings[0].what, alone.way) == ("is off; while ranks 0, 2 wait in all_reduce", "is off")
    assert merged(RAISED, waited="rank 0 waits in f").way == "raised ValueError"


def test_launches_one_by_one_of_all_ranks_are_counted() -> None:
    one, two = (dataclasses.replace(Outcome.from_json(HOLDS), one_by_one={"k: why": count}).to_json() for count in (1, 2))
    assert merged(one, HOLDS, two).one_by_one == {"k: why": 3}


def test_errors_and_descriptions_are_those_of_all_ranks() -> None:
    failure, description = Failure("no file"), {"book": "rules"}
    assert merge({0: failure, 1: failure}) == failure
    assert merge({0: Reaction("raised"), 1: Reaction("raised")}) == Reaction("raised")
    assert merge({0: description, 1: description}) == description
    assert merge({0: description, 1: failure}) == Failure("ranks disagree: rank 0: {'book': 'rules'}; rank 1: no file")
    assert merged(HOLDS, {"error": "no file"}).reason == "ranks disagree: rank 0: holds; rank 1: unknown: no file"


@for_each(
    ("answers", "parted"),
    [
        ([HOLDS, HOLDS], False),
        ([HOLDS, OFF], False),
        ([RAISED, RAISED], False),
        ([RAISED, OFF], True),
        ([RAISED, HOLDS], True),
        ([HOLDS, outcome(Verdict.BLIND, "no rows")], True),
        ([{"error": "no file"}] * 2, False),
    ],
)
def test_group_goes_on_where_every_rank_came_to_the_same_place(answers: list[dict[str, Any]], *, parted: bool) -> None:
    assert have_parted(list(map(answer_of, answers))) is parted


@for_each(
    ("wrote", "description"),
    [
        ("no stack", "at an unknown place"),
        (dump(READER, [(KERNEL, "run"), (RUN, "execute")]), "in run (kernel.py:1)"),
        (dump(READER, [*REDUCE, (KERNEL, "run")]), "in all_reduce, called by run (kernel.py:3)"),
        (dump([("/opt/any.py", EXCHANGE), (KERNEL, "run")]), "in exchange, called by run (kernel.py:2)"),
        (
            dump([(f"{TORCH}/cuda/streams.py", "synchronize"), ("/opt/any.py", EXCHANGE), (KERNEL, "run")]),
            "in exchange, called by run (kernel.py:3)",
        ),
        (dump([(f"{TORCH}/cuda/streams.py", "synchronize"), (KERNEL, "run")]), "in synchronize (streams.py:1)"),
        (dump([("/home/me/torch/distributed/kernel.py", "run")]), "in run (kernel.py:1)"),
        (
            dump(
                READER, [*REDUCE, (KERNEL, "backward")], [(f"{TORCH}/autograd/graph.py", "_engine_run_backward"), (RUN, "execute")]
            ),
            "in all_reduce, called by backward (kernel.py:3)",
        ),
        (dump(READER, [(f"{TORCH}/autograd/graph.py", "_engine_run_backward")]), "in _engine_run_backward (graph.py:1)"),
        (dump([(KERNEL, "old")]) + "\n" + dump([(KERNEL, "new")]), "in new (kernel.py:1)"),
    ],
)
def test_place_of_a_rank_is_read_off_its_stack(wrote: str, description: str) -> None:
    place = Standing.of(wrote)
    assert str(place) == description
    assert bool(place.collective) == ("called by" in description)


def test_several_culprits_and_victims_are_named_together() -> None:
    spins, waits = Standing.of(SPINS), Standing.of(WAITS)
    lost = hung({0: waits, 1: spins, 2: waits, 4: spins}, [3, 5], 5.0)
    assert lost.detail == (
        "ranks 1, 4 hung: no answer within 5 s; ranks 1, 4 in spin (kernel.py:1); ranks 0, 2 wait in all_reduce; "
        "ranks 3, 5 have answered"
    )
    assert not lost.in_kernel
    assert hung({0: Standing.of(""), 1: waits}, [], 5.0).in_kernel


def test_deaths_of_the_same_moment_are_all_named() -> None:
    first, second = WorkerLost("crashed", "killed by SIGABRT", "one"), WorkerLost("crashed", "exited with code 1", "two")
    lost = crashed({0: first, 2: second})
    assert (lost.how, lost.detail, lost.tail) == ("crashed", "rank 0 killed by SIGABRT; rank 2 exited with code 1", "one")


def test_lists_of_outcomes_are_merged_as_far_as_every_rank_came() -> None:
    holds, broken = Outcome(Verdict.HOLDS, rows=1), Outcome(Verdict.BROKEN, [Finding("y", FailureKind.OFF, "is off", rows=3)])
    one, other = Outcomes([holds, broken, holds]), Outcomes([holds, holds])
    merged = merge({0: one, 1: other})
    assert isinstance(merged, Outcomes)
    assert [outcome.verdict for outcome in merged.outcomes] == [Verdict.HOLDS, Verdict.BROKEN]
    assert (merged.outcomes[1].findings[0].output, merged.outcomes[1].findings[0].ranks) == ("y", (0,))
    assert merge({0: one, 1: other}, "rank 1 waits in all_reduce") == Outcomes([])
    assert merge({0: one, 1: Failure("gone")}) == Outcomes([])


def test_where_one_rank_lost_its_gpu_the_ranks_are_replaced() -> None:
    """Though both say the same, and have not parted."""
    lost = Outcome(
        Verdict.BROKEN, [Finding("call", FailureKind.CRASHED, "crashed: CUDA error: an illegal memory access")], spent=True
    )
    for both in ((lost, lost), (Outcome(Verdict.HOLDS, rows=1), lost)):
        assert merge_outcomes(dict(enumerate(both))).spent
        lists = {rank: Outcomes([result], result.spent) for rank, result in enumerate(both)}
        assert getattr(merge(lists), "spent", False)


@pytest.mark.slow
def test_ranks_that_are_spent_do_not_answer_again(group: RankGroup) -> None:
    def ranks_after(kind: str) -> list[int]:
        group.ask({"planted": kind, "of": [0, 1]})
        return pids(group)

    before = ranks_after("none")
    assert len(before) == 2
    assert ranks_after("none") == before
    assert ranks_after("spends") == []
    assert not {*before} & {*ranks_after("none")}


def test_the_place_where_gdn_verify_failed_is_reported_of_all_ranks() -> None:
    failed = Outcome(
        Verdict.UNKNOWN,
        reason="gdn-verify failed: RuntimeError: mixed",
        fault="RuntimeError at verify/bench/path_bench.py:7 in f",
    )
    merged = merge_outcomes({0: failed, 1: failed})
    assert (merged.verdict, merged.reason, merged.fault) == (Verdict.UNKNOWN, failed.reason, failed.fault)
