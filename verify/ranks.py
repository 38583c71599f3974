"""Ranks: persistent workers joined in a process group that answer a question as one, and the supervisors that hold their clock.

On one host RankGroup starts them. Under torchrun each process that it starts is a supervisor with a worker of its own: that of rank
0 leads (TorchrunGroup), the others `follow`, and they talk by torchrun's store. Reports never travel by collective: a rank that
failed cannot be trusted to reach one. Workers join through a store under a prefix of their own generation, so that nothing of a
lost group is found by the next.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from verify.outcome import Finding, Outcome, Verdict, rank_names
from verify.stacks import Frame, Mark, frames, in_implementation
from verify.worker import SERVICE, START_S, TAIL_CHARACTERS, Worker, WorkerLost, interrogate

BACKENDS = ("gloo", "nccl")
GRACE_S = 3.0  # how long after a rank failed the others may take to answer, if they wait for it
LOOK_S = 1.0  # one that stands where it stood so long ago waits too: collectives on a GPU do not hold their caller
PATIENCE_S = 30.0  # how long they may take if they do not wait
POLLS = ((0.02, 0.0002), (1.0, 0.001))  # so long after a message a store is looked at so often, for it pushes nothing
IDLE_S = 0.02  # and so often later
PULSE_S = 1.0
SILENT_S = 20.0  # a supervisor without a pulse for so long is gone
DISMISS_S = 5.0  # how long a leader waits for its followers to go; the store may go with it
IDLE = "this rank has no part in the case"  # why a rank holds that was not needed
UNDECIDED = 3  # the exit code of a follower whose leader is gone

_TORCH = os.path.dirname(torch.__file__) + os.sep

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Launch:
    """What torchrun tells a process that it starts: its place among `size` processes and where their store is."""

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
        """torchrun's store, under a prefix of ours; where torchrun keeps its own to itself, rank 0 is the host."""
        lead = not self.hosted and self.rank == 0
        return PrefixStore(self.prefix, TCPStore(self.host, self.port, is_master=lead, wait_for_workers=False))

    @property
    def prefix(self) -> str:
        """The prefix, another one for each restart of the job."""
        return f"gdn-verify/{self.attempt}"


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch that this process is part of, None if torchrun did not start it."""
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


def environment(backend: str, rank: int, size: int, local_rank: int, *, one_host: bool) -> dict[str, str]:
    """What the process of a rank finds in its environment. ValueError names the backend and the choices.

    With nccl it sees one GPU, the `local_rank`-th of this process, and calls it device 0; with gloo it sees none. On one host it
    listens on loopback, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME say otherwise.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    words = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    if one_host:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        words |= {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        words["LOCAL_WORLD_SIZE"] = str(size)
    if backend == "gloo":
        return {**words, "CUDA_VISIBLE_DEVICES": ""}
    seen = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if seen and local_rank >= len(seen):
        raise ValueError(f"rank {rank} needs GPU {local_rank} of this host, CUDA_VISIBLE_DEVICES has {len(seen)}")
    # NCCL's own clocks would end a process with a message of theirs; the supervisor's clock rules.
    clocks = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    clocks["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that looking for a GPU does not open it: verify/ahead.py forks
    return {**words, **clocks, "CUDA_VISIBLE_DEVICES": seen[local_rank] if seen else str(local_rank)}


def join(how: Mapping[str, Any]) -> None:
    """This process is a rank of the default process group, and with nccl has connected. ValueError if it has no GPU for that."""
    device = torch.device("cuda", 0) if how["backend"] == "nccl" else None
    if device is not None and not torch.cuda.is_available():
        raise ValueError(f"there is no GPU for it: CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
    store = TCPStore(how["host"], how["port"], is_master=False, wait_for_workers=False)
    torch.distributed.init_process_group(
        how["backend"],
        store=PrefixStore(how["prefix"], store),
        rank=how["rank"],
        world_size=how["size"],
        timeout=datetime.timedelta(days=1),  # the supervisor holds the clock
        device_id=device,
    )


class Seat(Protocol):
    """The worker of one rank, here (Worker) or under another supervisor (_Remote); see Worker."""

    @property
    def alive(self) -> bool: ...
    def launch(self) -> None: ...
    def send(self, question: Answer, deadline_s: float) -> None: ...
    def receive(self) -> Answer | None: ...
    def interrogate(self) -> None: ...
    def words(self) -> str: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def end(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where workers join: a store, and the prefix of what is theirs in it."""

    host: str
    port: int
    prefix: str


class _Group:
    """Ranks that answer as one: every rank is put the question, and the answers are merged."""

    def __init__(self, seats: Sequence[Seat], meeting: Meeting, backend: str, deadline_s: float) -> None:
        self.deadline_s, self.backend = deadline_s, backend
        self._seats, self._meeting = list(seats), meeting
        self._generation = 0
        self._asking = threading.RLock()
        self._closed = False

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._seats)

    def ask(self, question: Answer, deadline_s: float | None = None) -> Answer:
        """The answers of all ranks as one, see `merge`. WorkerLost names the rank that died or did not answer.

        The `deadline_s` count from when all ranks are ready. A rank that failed while others wait for it in a collective is the
        answer: they are ended after GRACE_S seconds. Whenever ranks may have parted within their collectives, the next question
        has a new group.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        with self._asking:
            try:
                if not all(seat.alive for seat in self._seats):
                    self._start()
                answers, waited = self._put([question] * self.size, deadline_s)
                merged = merge(answers, waited)
                if waited or merged.get("spent") or _parted(list(_busy(answers).values())):
                    self._end()
                return merged
            except BaseException:
                self._end()
                raise

    def close(self) -> None:
        """End every rank, whatever it is doing; safe from any thread."""
        self._closed = True
        for seat in self._seats:
            seat.stop()
        with self._asking:
            self._end()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._end()
        self._generation += 1
        join = {
            **dataclasses.asdict(self._meeting),
            "prefix": f"{self._meeting.prefix}/generation/{self._generation}",
            "size": self.size,
            "backend": self.backend,
        }
        try:
            for seat in self._seats:
                seat.launch()
            answers, _ = self._gather(START_S)
            if not any(answers.values()):
                answers, _ = self._put([{"join": {**join, "rank": rank}} for rank in range(self.size)], START_S)
        except WorkerLost as lost:
            if lost.how == "closed":
                raise
            said = [line for line in lost.tail.splitlines() if line.strip()]
            raise _not_started(lost.detail + (f": {said[-1].strip()[:200]}" if said and lost.how == "crashed" else "")) from None
        for rank, answer in answers.items():
            if answer:
                raise _not_started(f"rank {rank}: {answer.get('error') or answer.get('reason')}")

    def _end(self) -> None:
        for seat in self._seats:
            seat.kill()  # all at once: a process with a GPU takes its time to end
        for seat in self._seats:
            seat.end()

    def _put(self, questions: Sequence[Answer], deadline_s: float) -> tuple[dict[int, Answer], str]:
        lost = {}
        for rank, (seat, question) in enumerate(zip(self._seats, questions, strict=True)):
            try:
                seat.send(question, deadline_s)
            except WorkerLost as loss:
                lost[rank] = loss
        if lost:
            raise _crashed(lost)
        return self._gather(deadline_s)

    def _gather(self, deadline_s: float) -> tuple[dict[int, Answer], str]:
        """The answers of the ranks; and, if some did not answer because one failed, what they did instead."""
        answers: dict[int, Answer] = {}
        start = time.monotonic()
        end, look, patience = start + deadline_s, math.inf, math.inf
        places: dict[int, Place] = {}
        while silent := {rank: seat for rank, seat in enumerate(self._seats) if rank not in answers}:
            _pause(silent.values(), min(end, look) - time.monotonic(), time.monotonic() - start)
            answers |= self._heard(silent)
            silent = {rank: seat for rank, seat in silent.items() if rank not in answers}
            now = time.monotonic()
            if look == math.inf and any(map(_failed, answers.values())):
                look, patience = now + GRACE_S, now + PATIENCE_S
            if not silent or now < min(end, look):
                continue
            before, wrote = places, interrogate(list(silent.values()))
            places = {rank: Place.of(each) for rank, each in zip(silent, wrote, strict=True)}
            wait = all(place.collective or (place == before.get(rank) and not place.oracle) for rank, place in places.items())
            if look < math.inf and (wait or now >= min(end, patience)):
                return answers, _waiting(places)
            if now >= end:
                raise _hung(places, list(answers), deadline_s)
            look = time.monotonic() + LOOK_S
        return answers, ""

    def _heard(self, silent: Mapping[int, Seat]) -> dict[int, Answer]:
        """What ranks say now. WorkerLost names those that are lost."""
        answers, lost = {}, {}
        for rank, seat in silent.items():
            try:
                if (answer := seat.receive()) is not None:
                    answers[rank] = answer
            except WorkerLost as loss:
                lost[rank] = loss
        if self._closed:
            raise WorkerLost("closed", "by its supervisor", "")
        if lost:
            raise _crashed(lost)
        return answers


class RankGroup(_Group):
    """`size` persistent workers on this host, joined over gloo or NCCL: it fits where a Worker fits.

    They join through a store that this process keeps, on loopback and a port that the system chooses. With nccl rank r has the
    r-th GPU. `serves` is the module:function that answers questions on each rank.
    """

    def __init__(self, size: int, backend: str = "gloo", deadline_s: float = 120.0, *, serves: str = SERVICE) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        words = [environment(backend, rank, size, rank, one_host=True) for rank in range(size)]
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
            port = int(listening.getsockname()[1])
            descriptor = listening.detach()
        self._store: Store | None = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        seats = [Worker(deadline_s, environment=each, serves=serves) for each in words]
        super().__init__(seats, Meeting("127.0.0.1", port, "ranks"), backend, deadline_s)

    def __enter__(self) -> "RankGroup":
        return self

    def close(self) -> None:
        """End every rank, whatever it is doing; safe from any thread."""
        super().close()
        self._store = None


class TorchrunGroup(_Group):
    """The ranks that torchrun started, led from the supervisor of rank 0: it fits where a Worker fits.

    The other supervisors must `follow`. Closing it ends them too. SIGTERM, by which torchrun ends a job, ends the worker first.
    """

    def __init__(self, launch: Launch, backend: str = "gloo", deadline_s: float = 120.0, *, serves: str = SERVICE) -> None:
        if launch.rank:
            raise ValueError(f"rank 0 leads, the others follow; this is rank {launch.rank}")
        _exit_on_sigterm()
        words = environment(backend, 0, launch.size, launch.local_rank, one_host=launch.one_host)
        self._store = launch.store()
        self._remotes = [_Remote(self._store, rank) for rank in range(1, launch.size)]
        self._pulse = _Pulse(self._store, 0)
        seats: list[Seat] = [Worker(deadline_s, environment=words, serves=serves), *self._remotes]
        super().__init__(seats, Meeting(launch.host, launch.port, launch.prefix), backend, deadline_s)

    def __enter__(self) -> "TorchrunGroup":
        return self

    def close(self) -> None:
        """End every rank and let the followers go; safe from any thread."""
        super().close()
        with contextlib.suppress(RuntimeError):  # the store may be gone, and then so are they
            for remote in self._remotes:
                remote.dismiss()
            end = time.monotonic() + DISMISS_S
            while not all(remote.left for remote in self._remotes) and time.monotonic() < end:
                time.sleep(IDLE_S)
        self._pulse.stop()


def follow(launch: Launch, backend: str = "gloo", *, serves: str = SERVICE) -> int:
    """Serve the leader's questions with the worker of this rank until told to go; the exit code: 0, or 3 if the leader is gone."""
    _exit_on_sigterm()
    words = environment(backend, launch.rank, launch.size, launch.local_rank, one_host=launch.one_host)
    try:
        store = launch.store()
        pulse = _Pulse(store, launch.rank)
        try:
            with Worker(environment=words, serves=serves) as worker:
                return _serve(worker, store, launch.rank)
        finally:
            pulse.stop()
            with contextlib.suppress(RuntimeError):
                _Mail(store, f"gone/{launch.rank}").put({})
    except torch.distributed.DistError as error:
        print(f"gdn-verify: rank {launch.rank}: the store is gone: {str(error)[:200]}", file=sys.stderr)  # noqa: T201
        return UNDECIDED


def _serve(worker: Worker, store: Store, rank: int) -> int:
    """Do what the leader's _Remote orders, and report what the worker says."""
    orders, reports, leader = _Mail(store, f"to/{rank}"), _Mail(store, f"from/{rank}"), _Silence(store, 0)
    life, running, last = 0, False, time.monotonic()

    def attempt(order: Answer) -> None:
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
                    return 0
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
                _pause([worker] if running else [], IDLE_S, time.monotonic() - last, remote=True)
                continue
        last = time.monotonic()


class _Mail:
    """Messages from one process to one other, in order, in a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._next = store, name, 0

    def put(self, message: Answer) -> None:
        self._store.set(f"{self._name}/{self._next}", json.dumps(message))
        self._next += 1

    def get(self) -> Answer | None:
        """The next message, None if it has not come."""
        key = f"{self._name}/{self._next}"
        if not self._store.check([key]):
            return None
        message: Answer = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._next += 1
        return message


class _Pulse:
    """A thread that shows others that this supervisor is there."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._key, self._stopped = store, f"pulse/{rank}", threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        beats = 0
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever needs it will say so
            while not self._stopped.wait(PULSE_S):
                beats += 1
                self._store.set(self._key, str(beats))

    def stop(self) -> None:
        self._stopped.set()


class _Silence:
    """How this process sees the pulse of another supervisor."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._key = store, f"pulse/{rank}"
        self._seen, self._since = b"", time.monotonic()
        self._looked = self._since

    def too_long(self) -> str:
        """Nothing while there is a pulse, else for how long there was none; the first may take as long as a start."""
        now = time.monotonic()
        if now - self._looked > PULSE_S:
            if now - self._looked > SILENT_S / 2:
                self._since = now  # it was this process that did not look
            self._looked = now
            seen = self._store.get(self._key) if self._store.check([self._key]) else b""
            if seen != self._seen:
                self._seen, self._since = seen, now
        patience = SILENT_S if self._seen else START_S
        return f"no sign of it for {patience:g} s" if now - self._since > patience else ""


class _Remote:
    """The worker of a rank under another supervisor, which follows."""

    def __init__(self, store: Store, rank: int) -> None:
        self._orders, self._reports = _Mail(store, f"to/{rank}"), _Mail(store, f"from/{rank}")
        self._gone, self._silence = _Mail(store, f"gone/{rank}"), _Silence(store, rank)
        self._running = self._left = False
        self._life, self._words = 0, ""
        self._answer: Answer | None = None
        self._loss: WorkerLost | None = None

    @property
    def alive(self) -> bool:
        self._hear()
        return self._running and self._loss is None

    def launch(self) -> None:
        self._life, self._running, self._answer, self._loss = self._life + 1, True, None, None
        self._orders.put({"do": "launch", "life": self._life})

    def send(self, question: Answer, deadline_s: float) -> None:
        self._words, self._answer = "", None
        self._orders.put({"do": "ask", "question": question, "deadline_s": deadline_s})

    def receive(self) -> Answer | None:
        self._hear()
        if self._loss is not None:
            raise self._loss
        answer, self._answer = self._answer, None
        return answer

    def interrogate(self) -> None:
        self._words = ""
        self._orders.put({"do": "interrogate"})

    def words(self) -> str:
        self._hear()
        return self._words

    def stop(self) -> None:
        """Nothing: who waits for it looks every moment whether it is to stop."""

    def kill(self) -> None:
        if self._running:
            self._running = False
            with contextlib.suppress(RuntimeError):  # without a store its supervisor ends it unasked
                self._orders.put({"do": "end"})

    def end(self) -> None:
        """Nothing more: its supervisor waits for its end before it starts another."""
        self.kill()

    def dismiss(self) -> None:
        """Let its supervisor go; `left` says that it did."""
        self._orders.put({"do": "dismiss"})

    @property
    def left(self) -> bool:
        """Whether its supervisor said that it goes."""
        self._left = self._left or self._gone.get() is not None
        return self._left

    def _hear(self) -> None:
        while (report := self._reports.get()) is not None:
            if report["life"] != self._life:
                continue  # of a worker that was replaced since
            if "lost" in report:
                self._loss = WorkerLost(*report["lost"], in_kernel=report["in_kernel"])
            self._answer = report.get("answer", self._answer)
            self._words = report.get("words", self._words)
        if self._loss is None and (why := "it ended" if self.left else self._silence.too_long()):
            self._loss = WorkerLost("crashed", f"lost its supervisor: {why}", "", in_kernel=False)


def _pause(seats: Iterable[Any], longest_s: float, since_s: float, *, remote: bool = False) -> None:
    """Return when a worker of this process may have something to say, or it is time to look at those that are elsewhere."""
    seats = list(seats)
    here = [seat for seat in seats if isinstance(seat, Worker)]
    poll_s = next((often_s for until_s, often_s in POLLS if since_s < until_s), IDLE_S)
    tick = poll_s if remote or len(here) < len(seats) else 0.5
    select.select(here, [], [], max(0.0, min(tick, longest_s)))


def _exit_on_sigterm() -> None:
    """SIGTERM ends this process in order, its worker first, unless somebody else handles it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank is: the frame that says most, and the collective that it waits in, if any."""

    frame: Frame | None
    collective: str
    stack: tuple[Frame, ...]
    wrote: str = dataclasses.field(compare=False)

    @classmethod
    def of(cls, wrote: str) -> "Place":
        """The place that the stacks show; in a collective, the frame is the caller's."""
        stack = tuple(frames(wrote))
        inner = list(stack)
        while inner and _in_torch(inner[0]) and not _communicates(inner[0]):
            inner.pop(0)  # a collective may wait in torch.cuda
        if not (inner and _communicates(inner[0])):
            return cls(stack[0] if stack else None, "", stack, wrote)
        caller = next((frame for frame in inner if not _communicates(frame) and not _in_torch(frame)), None)
        return cls(caller, inner[0].function, stack, wrote)

    @property
    def oracle(self) -> bool:
        """Whether it has bounds made: a process beside it may be at work while it stands still."""
        return any(frame.mark is Mark.ORACLE for frame in self.stack)

    def __str__(self) -> str:
        if self.collective:
            return f"in {self.collective}" + (f", called by {self.frame}" if self.frame else "")
        return f"in {self.frame}" if self.frame else "nobody knows where"


def _in_torch(frame: Frame) -> bool:
    return frame.file.startswith(_TORCH) or "/site-packages/torch/" in frame.file


def _communicates(frame: Frame) -> bool:
    return frame.mark is Mark.COLLECTIVE or (_in_torch(frame) and "/torch/distributed/" in frame.file)


def _waiting(places: Mapping[int, Place]) -> str:
    """What ranks do that have no answer: "ranks 0, 2 wait in all_to_all_single; rank 3 is in f (kernel.py:7)"."""
    waits: dict[str, list[int]] = {}
    for rank, place in places.items():
        if place.collective:
            waits.setdefault(place.collective, []).append(rank)
    words = [f"{rank_names(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {name}" for name, ranks in waits.items()]
    return "; ".join([*words, *(f"rank {rank} is {place}" for rank, place in places.items() if not place.collective)])


def _hung(places: Mapping[int, Place], answered: Sequence[int], deadline_s: float) -> WorkerLost:
    """The loss of ranks without an answer: those outside any collective are to blame, or all if there are none."""
    culprits = {rank: place for rank, place in places.items() if not place.collective} or places
    late = f"{rank_names(culprits)} hung: no answer within {deadline_s:g} s"
    if len(culprits) == 1:
        words = [f"{late}, {next(iter(culprits.values()))}"]
    else:
        words = [late, _each({rank: str(place) for rank, place in culprits.items()}, " ")]
    if victims := {rank: place for rank, place in places.items() if rank not in culprits}:
        words.append(_waiting(victims))
    if answered:
        words.append(f"{rank_names(answered)} {'have' if len(answered) > 1 else 'has'} answered")
    tail = "\n".join(f"rank {rank}:\n{place.wrote[-TAIL_CHARACTERS:]}" for rank, place in {**culprits, **places}.items())
    in_kernel = any(place.frame is None or in_implementation(place.wrote) for place in culprits.values())
    return WorkerLost("hung", "; ".join(words), tail, in_kernel=in_kernel)


def _crashed(lost: Mapping[int, WorkerLost]) -> WorkerLost:
    """The loss of ranks that were seen to die at the same moment."""
    if any(loss.how == "closed" for loss in lost.values()):
        return WorkerLost("closed", "by its supervisor", "")
    first = next(iter(lost.values()))
    detail = "; ".join(f"rank {rank} {loss.detail}" for rank, loss in lost.items())
    return WorkerLost(first.how, detail, first.tail, in_kernel=any(loss.in_kernel for loss in lost.values()))


def _not_started(detail: str) -> WorkerLost:
    return WorkerLost("failed to start", detail, "", in_kernel=False)


def _failed(answer: Answer) -> bool:
    """Whether a rank that answers so may have left others waiting."""
    if "outcomes" in answer:
        return any(map(_failed, answer["outcomes"]))
    return "error" in answer or answer.get("verdict", Verdict.HOLDS) != Verdict.HOLDS


def left(answer: Answer) -> bool:
    """Whether a rank that answers so may have left a case before its end: not where all of its findings are of comparisons."""
    return _failed(answer) and not (answer.get("findings") and all(finding["rows"] for finding in answer["findings"]))


def _parted(answers: Sequence[Answer]) -> bool:
    """Whether ranks may have left a case at different places: not where all were compared to the end, or all say the same."""
    if any("outcomes" in answer for answer in answers):
        lists = [answer.get("outcomes", []) for answer in answers]
        return len({len(one) for one in lists}) > 1 or any(_parted(each) for each in zip(*lists, strict=True))

    def said(answer: Answer) -> Any:
        return [answer.get(key) for key in ("error", "verdict", "reason", "findings")]

    return any(map(left, answers)) and any(said(answer) != said(answers[0]) for answer in answers)


def merge(answers: Mapping[int, Answer], waited: str = "") -> Answer:
    """The answers of ranks as one, findings with their ranks named; `waited` says what the ranks without an answer did.

    BROKEN if it is so on any rank; any other verdict if it is the same on all; otherwise UNKNOWN, with what each rank says.
    """
    answers = dict(sorted(answers.items()))
    first = next(iter(answers.values()))
    if any("outcomes" in answer for answer in answers.values()):
        lists = [answer.get("outcomes", []) for answer in answers.values()]
        whole = 0 if waited else min(map(len, lists))
        runs = zip(*(one[:whole] for one in lists), strict=True)
        return {
            "outcomes": [merge(dict(zip(answers, each, strict=True))) for each in runs],
            "spent": any(answer.get("spent") for answer in answers.values()),
        }
    if not any("verdict" in answer for answer in answers.values()):
        if all(answer == first for answer in answers.values()) and not waited:
            return first
        said = _each({rank: str(answer.get("error", answer)) for rank, answer in answers.items()})
        return {"error": "; ".join([f"ranks disagree: {said}" if len(answers) > 1 else said, *([waited] if waited else [])])}
    outcomes = {rank: _outcome(answer) for rank, answer in _busy(answers).items()}
    found: dict[str, tuple[Finding, list[int]]] = {}
    for rank, outcome in outcomes.items():
        for finding in outcome.findings:  # by its text: no two NaN are equal
            found.setdefault(json.dumps(finding.to_json()), (finding, []))[1].append(rank)
    while_waiting = f"; while {waited}" if waited else ""
    findings = [
        dataclasses.replace(finding, ranks=tuple(ranks), what=finding.what + while_waiting) for finding, ranks in found.values()
    ]
    verdicts = {outcome.verdict for outcome in outcomes.values()}
    reasons = {rank: outcome.reason for rank, outcome in outcomes.items()}
    if Verdict.BROKEN in verdicts:
        verdict, reason = Verdict.BROKEN, _each({rank: reason for rank, reason in reasons.items() if reason})
    elif len(verdicts) == 1 and not waited:
        verdict = verdicts.pop()
        reason = next(iter(reasons.values())) if len(set(reasons.values())) == 1 else _each(reasons)
    else:
        verdict = Verdict.UNKNOWN
        said = _each({rank: ": ".join(filter(None, [outcome.verdict, outcome.reason])) for rank, outcome in outcomes.items()})
        reason = f"ranks disagree: {said}" + (f"; {waited}" if waited else "")
    rows = sum(outcome.rows for outcome in outcomes.values())
    if verdict is Verdict.HOLDS and rows == 0:
        verdict, reason = Verdict.BLIND, "nothing to compare: no rank has a row"
    names = {name for outcome in outcomes.values() for name in outcome.ratios}
    return Outcome(
        verdict,
        findings,
        reason,
        rows,
        {name: max(outcome.ratios.get(name, 0.0) for outcome in outcomes.values()) for name in sorted(names)},
        max(outcome.kernel_s for outcome in outcomes.values()),
        max(outcome.oracle_s for outcome in outcomes.values()),
        spent=any(outcome.spent for outcome in outcomes.values()),
        tuned=next((outcome.tuned for outcome in outcomes.values() if outcome.tuned), {}),
        fault=next((outcome.fault for outcome in outcomes.values() if outcome.fault), ""),
    ).to_json()


def _busy(answers: Mapping[int, Answer]) -> Mapping[int, Answer]:
    """The answers of the ranks that had a part in the case, if any had."""
    return {rank: answer for rank, answer in answers.items() if answer.get("reason") != IDLE} or answers


def _outcome(answer: Answer) -> Outcome:
    return Outcome.from_json(answer) if "verdict" in answer else Outcome(Verdict.UNKNOWN, reason=str(answer.get("error", answer)))


def _each(said: Mapping[int, str], between: str = ": ") -> str:
    """What ranks say, those that say the same together: "ranks 0, 2: holds; rank 1: blind: no rows"."""
    ranks: dict[str, list[int]] = {}
    for rank, words in said.items():
        ranks.setdefault(words, []).append(rank)
    return "; ".join(f"{rank_names(who)}{between}{words}" for words, who in ranks.items())
