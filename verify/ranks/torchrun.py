"""Ranks under torchrun: each process that torchrun starts supervises one worker. Rank 0 leads, and the others follow.

The supervisors communicate through torchrun's store.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from verify.process.messages import Data, Question, plain
from verify.process.worker import SERVICE, START_S, Worker, WorkerLost, interrogate
from verify.ranks.group import IDLE_S, Group, Meeting, Seat, environment, pause

PULSE_S = 1.0
SILENT_S = 20.0  # a supervisor without a pulse for so long counts as gone
DISMISS_S = 5.0  # how long the leader waits for its followers to end, since the store may end with the leader
UNDECIDED = 3  # the exit code of a follower whose leader is gone
LINGER_S = 3.0  # how long the leader of a failed check outlives its followers, so that each torchrun sees a failure of its own


@dataclasses.dataclass(frozen=True)
class Launch:
    """What torchrun tells a process that it starts: its rank among `size` processes, and the address of their store."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    attempt: int
    hosted: bool

    @property
    def one_host(self) -> bool:
        """Whether every rank is on this host."""
        return self.local_size == self.size

    def store(self) -> Store:
        """Connect to torchrun's store, under our own prefix. If torchrun does not share its store, rank 0 hosts one."""
        lead = not self.hosted and self.rank == 0
        return PrefixStore(self.prefix, TCPStore(self.host, self.port, is_master=lead, wait_for_workers=False))

    @property
    def prefix(self) -> str:
        """The prefix of our keys. Each restart of the job has another one."""
        return f"gdn-verify/{self.attempt}"


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch that this process is part of, or None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return Launch(
        int(environment["RANK"]),
        int(environment["WORLD_SIZE"]),
        int(environment["LOCAL_RANK"]),
        int(environment["LOCAL_WORLD_SIZE"]),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


class TorchrunGroup(Group):
    """The ranks that torchrun started, led by the supervisor of rank 0. It can be used in place of a `Worker`.

    The other supervisors must call `follow`; closing the group ends them too, with the exit code `code`. On SIGTERM, with which
    torchrun ends a job, this process ends its worker first. ValueError on any rank but 0.
    """

    def __init__(
        self, launch: Launch, backend: str = "gloo", deadline_s: float = 120.0, *, serves: str = SERVICE, sequential: bool = False
    ) -> None:
        if launch.rank:
            raise ValueError(f"rank 0 leads, the others follow; this is rank {launch.rank}")
        self.code = UNDECIDED  # until the leader knows better
        _exit_on_sigterm()
        words = environment(backend, 0, launch.size, launch.local_rank, one_host=launch.one_host)
        self._store = launch.store()
        self._remotes = [_Remote(self._store, rank) for rank in range(1, launch.size)]
        self._pulse = _Pulse(self._store, 0)
        own = Worker(deadline_s, environment=words, serves=serves, sequential=sequential)
        seats: list[Seat] = [own, *self._remotes]
        super().__init__(seats, Meeting(launch.host, launch.port, launch.prefix), backend, deadline_s)

    def close(self) -> None:
        """End every rank and let the followers exit. Any thread may call this."""
        super().close()
        with contextlib.suppress(RuntimeError):  # the store may be gone, and the followers with it
            for remote in self._remotes:
                remote.dismiss(self.code)
            end = time.monotonic() + DISMISS_S
            while not all(remote.left for remote in self._remotes) and time.monotonic() < end:
                time.sleep(IDLE_S)
            # The torchrun of this host may host the store of the others. It ends as soon as a rank of its own has failed.
            time.sleep(LINGER_S if self.code and self._remotes else 0.0)
        self._pulse.stop()


def follow(launch: Launch, backend: str = "gloo", *, serves: str = SERVICE, sequential: bool = False) -> int:
    """Answer the leader's questions with the worker of this rank until the leader dismisses it.

    Returns the exit code: that of the leader, or 3 if the leader or the store is gone. So torchrun reports the same on every host.
    """
    _exit_on_sigterm()
    words = environment(backend, launch.rank, launch.size, launch.local_rank, one_host=launch.one_host)
    try:
        store = launch.store()
        pulse = _Pulse(store, launch.rank)
        try:
            with Worker(environment=words, serves=serves, sequential=sequential) as worker:
                code = _serve(worker, store, launch.rank)
        finally:
            pulse.stop()
            with contextlib.suppress(RuntimeError):
                _Mail(store, f"gone/{launch.rank}").put({})
        return code
    except torch.distributed.DistError as error:
        print(f"gdn-verify: rank {launch.rank}: the store is gone: {str(error)[:200]}", file=sys.stderr)  # noqa: T201
        return UNDECIDED


def _serve(worker: Worker, store: Store, rank: int) -> int:
    """Do what the leader's `_Remote` orders, and report the worker's answers. Returns the exit code."""
    orders, reports, leader = _Mail(store, f"to/{rank}"), _Mail(store, f"from/{rank}"), _Silence(store, 0)
    life, running, last = 0, False, time.monotonic()

    def attempt(order: Data) -> None:
        nonlocal life, running
        match order["do"]:
            case "launch":
                life, running = order["life"], True
                worker.launch()
            case "ask" if running:
                worker.send(order["question"], order["deadline_s"])
            case "interrogate" if running:
                reports.put({"life": life, "words": interrogate([worker])[0]})
            case "end":
                running = False
                worker.end()

    while True:
        order = orders.get()
        try:
            if order is not None:
                if order["do"] == "dismiss":
                    return int(order["code"])
                attempt(order)
            answer = worker.receive() if running else None
        except WorkerLost as lost:
            running = False
            reports.put({"life": life, "lost": [lost.how, lost.detail, lost.tail], "in_kernel": lost.in_kernel})
        else:
            if answer is not None:
                reports.put({"life": life, "answer": answer})
            if order is None and answer is None:
                if why := leader.too_long():
                    print(f"gdn-verify: rank {rank}: lost the supervisor of rank 0: {why}", file=sys.stderr)  # noqa: T201
                    return UNDECIDED
                pause([worker] if running else [], IDLE_S, time.monotonic() - last, remote=True)
                continue
        last = time.monotonic()


class _Mail:
    """Messages from one process to another, in order, through a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._next = store, name, 0

    def put(self, message: Data) -> None:
        self._store.set(f"{self._name}/{self._next}", json.dumps(message))
        self._next += 1

    def get(self) -> Data | None:
        """The next message, or None if it has not arrived."""
        key = f"{self._name}/{self._next}"
        if not self._store.check([key]):
            return None
        message: Data = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._next += 1
        return message


class _Pulse:
    """A thread that writes a counter to the store, which shows other supervisors that this one is alive."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._key, self._stopped = store, f"pulse/{rank}", threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        beats = 0
        with contextlib.suppress(RuntimeError):  # the store is gone, which code that needs it will report
            while not self._stopped.wait(PULSE_S):
                beats += 1
                self._store.set(self._key, str(beats))

    def stop(self) -> None:
        self._stopped.set()


class _Silence:
    """Watches the pulse of another supervisor."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._key = store, f"pulse/{rank}"
        self._seen, self._since = b"", time.monotonic()
        self._looked = self._since

    def too_long(self) -> str:
        """For how long there has been no pulse, in words, or "" while there is one. The first may take as long as a start."""
        now = time.monotonic()
        if now - self._looked > PULSE_S:
            if now - self._looked > SILENT_S / 2:
                self._since = now  # this process was stopped itself and did not look
            self._looked = now
            seen = self._store.get(self._key) if self._store.check([self._key]) else b""
            if seen != self._seen:
                self._seen, self._since = seen, now
        patience = SILENT_S if self._seen else START_S
        return f"no message from it for {patience:g} s" if now - self._since > patience else ""


class _Remote:
    """The worker of a rank under another supervisor, which follows this one."""

    def __init__(self, store: Store, rank: int) -> None:
        self._orders, self._reports = _Mail(store, f"to/{rank}"), _Mail(store, f"from/{rank}")
        self._gone, self._silence = _Mail(store, f"gone/{rank}"), _Silence(store, rank)
        self._running = self._left = False
        self._life, self._words = 0, ""
        self._answer: Data | None = None
        self._loss: WorkerLost | None = None

    @property
    def alive(self) -> bool:
        self._read_reports()
        return self._running and self._loss is None

    def launch(self) -> None:
        self._life, self._running, self._answer, self._loss = self._life + 1, True, None, None
        self._orders.put({"do": "launch", "life": self._life})

    def send(self, question: Question | Mapping[str, Any], deadline_s: float) -> None:
        self._words, self._answer = "", None
        self._orders.put({"do": "ask", "question": plain(question), "deadline_s": deadline_s})

    def receive(self) -> Data | None:
        self._read_reports()
        if self._loss is not None:
            raise self._loss
        answer, self._answer = self._answer, None
        return answer

    def interrogate(self) -> None:
        self._words = ""
        self._orders.put({"do": "interrogate"})

    def words(self) -> str:
        self._read_reports()
        return self._words

    def stop(self) -> None:
        """Do nothing: a thread that waits for this worker checks in short intervals whether the group is closed."""

    def kill(self) -> None:
        if self._running:
            self._running = False
            with contextlib.suppress(RuntimeError):  # if the store is gone, its supervisor ends the worker without an order
                self._orders.put({"do": "end"})

    def end(self) -> None:
        """Kill the worker. Its supervisor waits for its end before it starts another one."""
        self.kill()

    def dismiss(self, code: int) -> None:
        """Let the other supervisor exit with a code. `left` is True once it does."""
        self._orders.put({"do": "dismiss", "code": code})

    @property
    def left(self) -> bool:
        """Whether the other supervisor has announced its exit."""
        self._left = self._left or self._gone.get() is not None
        return self._left

    def _read_reports(self) -> None:
        while (report := self._reports.get()) is not None:
            if report["life"] != self._life:
                continue  # from a worker that has been replaced
            if "lost" in report:
                self._loss = WorkerLost(*report["lost"], in_kernel=report["in_kernel"])
            self._answer = report.get("answer", self._answer)
            self._words = report.get("words", self._words)
        if self._loss is None and (why := "the process ended" if self.left else self._silence.too_long()):
            self._loss = WorkerLost("crashed", f"lost its supervisor: {why}", "", in_kernel=False)


def _exit_on_sigterm() -> None:
    """Let SIGTERM end this process in order, its worker first, unless the signal has a handler already."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
