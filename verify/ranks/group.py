"""Groups of ranks: persistent workers, joined in a process group, that answer a question as one.

On one host, RankGroup starts the workers; verify/ranks/torchrun.py does so under torchrun. Answers never travel by collective,
since a rank that has failed may not reach one. Workers join through a store, under a prefix that is new for each generation of
workers, so that a new group finds nothing that a lost group has left there.
"""

import dataclasses
import datetime
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from verify.process.choices import BACKENDS
from verify.process.messages import Data, Failure, Join, OfRank, Outcomes, Question, Reaction, answer_of, lines_of
from verify.process.outcome import Outcome
from verify.process.worker import LINES, SERVICE, START_S, Worker, WorkerLost, dismiss, interrogate
from verify.ranks.hangs import Standing, crashed, hung, waiting
from verify.ranks.merge import busy, failed, merge, parted

GRACE_S = 3.0  # after a rank has failed, how long the others may take to answer if they wait for it
# A rank whose stack has not changed for so long also counts as waiting: a collective on a GPU returns before it is done.
LOOK_S = 1.0
PATIENCE_S = 30.0  # after a rank has failed, how long the others may take to answer if they do not wait for it
# A store sends no notice of a message, so we poll it. In each pair: until so long after the last message, poll at this interval.
POLLS = ((0.02, 0.0002), (1.0, 0.001))
IDLE_S = 0.02  # the interval after that


def environment(backend: str, rank: int, size: int, local_rank: int, *, one_host: bool) -> dict[str, str]:
    """The environment of the process of a rank.

    With nccl the rank sees one GPU, the `local_rank`-th of this process, as device 0; with gloo it sees none. On one host it
    listens on loopback, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME say otherwise. ValueError for an unknown backend (the
    message names the choices), or if CUDA_VISIBLE_DEVICES has too few GPUs.
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
        raise ValueError(f"rank {rank} needs GPU {local_rank} of this host, but CUDA_VISIBLE_DEVICES has {len(seen)}")
    # NCCL's own timeouts would end a process with messages of their own; here the supervisor keeps the deadline.
    clocks = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    clocks["TORCH_FR_BUFFER_SIZE"] = "0"  # torch then keeps no record of each collective, which only such a dump would show
    clocks["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # torch then looks for a GPU without opening it, since verify/bench/oracle_process.py forks
    )
    return {**words, **clocks, "CUDA_VISIBLE_DEVICES": seen[local_rank] if seen else str(local_rank)}


def join(how: Join) -> None:
    """Make this process a rank of the default process group; with nccl, connect to the others. ValueError if it needs a GPU."""
    device = torch.device("cuda", 0) if how.backend == "nccl" else None
    if device is not None and not torch.cuda.is_available():
        raise ValueError(f"there is no GPU for this rank: CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
    store = TCPStore(how.host, how.port, is_master=False, wait_for_workers=False)
    torch.distributed.init_process_group(
        how.backend,
        store=PrefixStore(how.prefix, store),
        rank=how.rank,
        world_size=how.size,
        timeout=datetime.timedelta(days=1),  # the supervisor keeps the deadline
        device_id=device,
    )


def stand_in(rank: int, size: int) -> dict[str, str]:
    """The environment of a process that stands in for a rank while others are absent (see `join_alone`)."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}


def join_alone() -> None:
    """Make this process a rank of a group without other processes. Each collective returns at once, with numbers of no meaning.

    The rank and the size are those of the environment. A process that is a rank already stays what it is.
    """
    if torch.distributed.is_initialized():
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )


class Seat(Protocol):
    """The worker of one rank: a `Worker` of this process, or one under another supervisor (`_Remote`). See `Worker`."""

    @property
    def alive(self) -> bool: ...
    def launch(self) -> None: ...
    def send(self, question: Question | Mapping[str, Any], deadline_s: float) -> None: ...
    def receive(self) -> Data | None: ...
    def interrogate(self) -> None: ...
    def words(self) -> str: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def end(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where workers join: the address of a store, and the prefix of their keys in it."""

    host: str
    port: int
    prefix: str


class Group:
    """Ranks that answer as one: every rank gets the question, and the answers are merged."""

    def __init__(self, seats: Sequence[Seat], meeting: Meeting, backend: str, deadline_s: float) -> None:
        self.deadline_s, self.backend = deadline_s, backend
        self._seats, self._meeting = list(seats), meeting
        self._generation = 0
        self.started, self.start_s = 0, 0.0  # as those of a Worker, over all ranks
        self.ran = deque[str](maxlen=LINES)  # as that of a Worker
        self._asking = threading.RLock()
        self._closed = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._seats)

    @property
    def alive(self) -> bool:
        """Whether every rank has a process. If not, the next question starts new ones."""
        return all(seat.alive for seat in self._seats)

    def ask(self, question: Question | Mapping[str, Any], deadline_s: float | None = None) -> Data:
        """Send a question to all ranks and merge their answers (see `merge`).

        WorkerLost names the rank that died or did not answer. `deadline_s` counts from the time when all ranks are ready. If a rank
        fails while others wait for it in a collective, its answer counts, and the others are ended after GRACE_S seconds. If ranks
        may be at different places in their collectives afterwards, the group is ended and the next question starts new workers.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        with self._asking:
            try:
                if not self.alive:
                    self._start()
                    self.ran.clear()
                self.ran += lines_of(question)
                answers, waited = self._put([question] * self.size, deadline_s)
                merged = merge(answers, waited)
                if (
                    waited
                    or (isinstance(merged, Outcome | Outcomes | Reaction) and merged.spent)
                    or parted(list(busy(answers).values()))
                ):
                    self.end()
                return merged if isinstance(merged, dict) else merged.to_json()
            except BaseException:
                self.end()
                raise

    def close(self) -> None:
        """End every rank, whatever it is doing. Any thread may call this."""
        self._closed = True
        if not self._asking.acquire(blocking=False):
            for seat in self._seats:
                seat.stop()
            self._asking.acquire()
        try:
            self.end()
        finally:
            self._asking.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self.end()
        start = time.monotonic()
        self._generation += 1
        meeting, prefix = self._meeting, f"{self._meeting.prefix}/generation/{self._generation}"
        joins = [Join(meeting.host, meeting.port, prefix, self.size, rank, self.backend) for rank in range(self.size)]
        try:
            for seat in self._seats:
                seat.launch()
            answers, _ = self._gather(START_S)
            if not any(answers.values()):
                answers, _ = self._put(joins, START_S)
        except WorkerLost as lost:
            if lost.how == "closed":
                raise
            lines = [line for line in lost.tail.splitlines() if line.strip()]
            raise _not_started(lost.detail + (f": {lines[-1].strip()[:200]}" if lines and lost.how == "crashed" else "")) from None
        for rank, answer in answers.items():
            if answer:
                raise _not_started(f"rank {rank}: {answer.error if isinstance(answer, Failure) else answer}")
        self.started, self.start_s = self.started + self.size, self.start_s + time.monotonic() - start

    def end(self) -> None:
        """End every rank. The next question starts new ones."""
        dismiss([seat for seat in self._seats if isinstance(seat, Worker)])
        for seat in self._seats:
            seat.kill()  # all at once, since a process with a GPU takes long to end
        for seat in self._seats:
            seat.end()

    def _put(self, questions: Sequence[Question | Mapping[str, Any]], deadline_s: float) -> tuple[dict[int, OfRank], str]:
        lost = {}
        for rank, (seat, question) in enumerate(zip(self._seats, questions, strict=True)):
            try:
                seat.send(question, deadline_s)
            except WorkerLost as loss:
                lost[rank] = loss
        if lost:
            raise crashed(lost)
        return self._gather(deadline_s)

    def _gather(self, deadline_s: float) -> tuple[dict[int, OfRank], str]:
        """The answers of the ranks and, if some did not answer because one has failed, what those do instead, in words."""
        answers: dict[int, OfRank] = {}
        start = time.monotonic()
        end, look, patience = start + deadline_s, math.inf, math.inf
        places: dict[int, Standing] = {}
        while silent := {rank: seat for rank, seat in enumerate(self._seats) if rank not in answers}:
            pause(silent.values(), min(end, look) - time.monotonic(), time.monotonic() - start)
            answers |= self._arrived(silent)
            silent = {rank: seat for rank, seat in silent.items() if rank not in answers}
            now = time.monotonic()
            if look == math.inf and any(map(failed, answers.values())):
                look, patience = now + GRACE_S, now + PATIENCE_S
            if not silent or now < min(end, look):
                continue
            before, wrote = places, interrogate(list(silent.values()))
            places = {rank: Standing.of(text) for rank, text in zip(silent, wrote, strict=True)}
            wait = all(place.collective or (place == before.get(rank) and not place.oracle) for rank, place in places.items())
            if look < math.inf and (wait or now >= min(end, patience)):
                return answers, waiting(places)
            if now >= end:
                raise hung(places, list(answers), deadline_s)
            look = time.monotonic() + LOOK_S
        return answers, ""

    def _arrived(self, silent: Mapping[int, Seat]) -> dict[int, OfRank]:
        """The answers that have arrived. WorkerLost names the ranks that are lost."""
        answers, lost = {}, {}
        for rank, seat in silent.items():
            try:
                if (answer := seat.receive()) is not None:
                    answers[rank] = answer_of(answer)
            except WorkerLost as loss:
                lost[rank] = loss
        if self._closed:
            raise WorkerLost("closed", "by its supervisor", "")
        if lost:
            raise crashed(lost)
        return answers


Answering = Worker | Group  # what answers questions: one process, or ranks that answer as one


class RankGroup(Group):
    """`size` persistent workers on this host, joined over gloo or NCCL. It can be used in place of a `Worker`.

    The workers join through a store of this process, on loopback and a port that the system chooses. With nccl, rank r has the
    r-th GPU. `serves` and `sequential` are as for a Worker. ValueError for a size below 1 or an unknown backend.
    """

    def __init__(
        self, size: int, backend: str = "gloo", deadline_s: float = 120.0, *, serves: str = SERVICE, sequential: bool = False
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        words = [environment(backend, rank, size, rank, one_host=True) for rank in range(size)]
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
            port = int(listening.getsockname()[1])
            descriptor = listening.detach()
        self._store: Store | None = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        seats = [Worker(deadline_s, environment=variables, serves=serves, sequential=sequential) for variables in words]
        super().__init__(seats, Meeting("127.0.0.1", port, "ranks"), backend, deadline_s)

    def close(self) -> None:
        """End every rank, whatever it is doing. Any thread may call this."""
        super().close()
        self._store = None


def pause(seats: Iterable[Any], longest_s: float, since_s: float, *, remote: bool = False) -> None:
    """Wait until a worker of this process may have sent something, or until it is time to poll the workers elsewhere.

    At most `longest_s` seconds; `since_s` is the time since the last message, which decides how often we poll.
    """
    seats = list(seats)
    here = [seat for seat in seats if isinstance(seat, Worker)]
    poll_s = next((often_s for until_s, often_s in POLLS if since_s < until_s), IDLE_S)
    tick = poll_s if remote or len(here) < len(seats) else 0.5
    select.select(here, [], [], max(0.0, min(tick, longest_s)))


def _not_started(detail: str) -> WorkerLost:
    return WorkerLost("failed to start", detail, "", in_kernel=False)
