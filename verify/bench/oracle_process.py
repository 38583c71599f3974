"""Processes beside a rank that compute the bounds of cases while the rank runs its path.

These are processes, not threads, because the oracle and the path both start many small operations from Python, and two threads
would slow each other down. Such a process is forked before its parent becomes a rank, and ends with its parent. The rank sends the
lines of cases and gets numbers back, never objects. If there is no such process, or if it fails in any way, the rank computes the
bounds itself; they are the same bit for bit.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from oracles.tolerance import bound
from oracles.tolerance.bound import Bound
from properties.paths.case import ParallelCase
from verify.process.environment import ORACLE_PROCESSES
from verify.process.stacks import Mark, mark_module

MOST = 4  # with 2, a rank on an H200 waited for them in more than half of its time
Bounds = dict[str, Bound]


@dataclasses.dataclass(frozen=True)
class Work:
    """A case, and what its bounds depend on: class of algorithm, products of float32 matrices, tokens in a chunk (or None)."""

    case: ParallelCase
    algorithm: str
    products: str = "ieee"
    chunk: int | None = None

    def bounds(self) -> Bounds:
        """The bound of each output and gradient of the whole case, computed in this process.

        An implementation may begin its chunks where a rank's tokens begin. What the tolerance of one call does not cover is judged
        by runs that do so too.
        """
        case = self.case
        cotangents = case.cotangents() if case.backward else None
        make = functools.partial(bound.bounds, case.spec, case.inputs(), cotangents, self.algorithm, self.products, self.chunk)
        bounds, restarts = make(), case.restarts
        if self.algorithm != "chunkwise" or not any(restarts):
            return bounds
        restarted = functools.cache(lambda: make(restarts=restarts))
        return {name: one.then(functools.partial(_of, restarted, name)) for name, one in bounds.items()}


def _of(make: Callable[[], Bounds], name: str) -> Bound:
    return make()[name]


class Later(Mapping[str, Bound]):
    """A mapping of bounds that waits for them when it is read."""

    def __init__(self, wait: Callable[[], Bounds]) -> None:
        self._wait = wait

    def __getitem__(self, name: str) -> Bound:
        return self._wait()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wait())

    def __len__(self) -> int:
        return len(self._wait())


class Beside:
    """A process that computes bounds for this one, in the order of the requests. Answers that nobody has taken are skipped."""

    def __init__(self) -> None:
        requests, self._to = os.pipe()
        source, answers = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _live(requests, answers)
        os.close(requests)
        os.close(answers)
        self._from = open(source, "rb")  # noqa: SIM115 - until `end`
        self._number = self._read = 0

    def ask(self, work: Work) -> Callable[[], Bounds]:
        """Let the process begin with some bounds. Returns a function that waits for them and returns them."""
        self._number += 1
        asked = [self._number, str(work.case), work.algorithm, work.products, work.chunk]
        with contextlib.suppress(OSError):  # the process is gone, which reading its answer will show
            os.write(self._to, (json.dumps(asked) + "\n").encode())
        here = functools.cache(work.bounds)
        beside = functools.partial(self._answer, self._number, here)
        return functools.cache(lambda: beside() or here())

    def _answer(self, number: int, here: Callable[[], Bounds]) -> Bounds:
        """The bounds of request `number`; empty if those of a later request were taken before, or if there is no valid answer."""
        if number <= self._read:
            return {}
        self._read = number
        try:
            while (header := json.loads(self._from.readline()))["number"] < number:
                self._from.read(header["bytes"])
            data = bytearray(header["bytes"])
            if header["number"] > number or self._from.readinto(data) < len(data):
                raise EOFError
            return decoded(header, data, lambda name: functools.partial(_finer, here, name))
        except Exception:  # the process is gone, or what it wrote is no answer
            self.end()
            return {}

    def end(self) -> None:
        """End the process, whatever it is doing."""
        if self._to >= 0:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            os.close(self._to)
            self._to = -1
            self._from.close()


def _finer(make: Callable[[], Bounds], name: str, over: Tensor | None = None) -> Bound:
    finer = make()[name].finer
    assert finer is not None, name
    return finer(over)


def _live(requests: int, answers: int) -> NoReturn:
    """Run the process, which ends when the parent is gone."""
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd would start a thread for a GPU
        keep_open(requests, answers)
        questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def read() -> None:
            with open(0, "rb") as lines:
                for line in lines:
                    questions.put(line)
            os._exit(0)  # the rank is gone, so nobody needs the result

        threading.Thread(target=read, daemon=True).start()
        with open(1, "wb") as replies:
            while True:
                header, data = _reply(*json.loads(questions.get()))
                replies.write((json.dumps(header) + "\n").encode() + data)
                replies.flush()
    finally:
        os._exit(1)


def _reply(number: int, case: str, *rest: Any) -> tuple[dict[str, Any], bytearray]:
    """The header of an answer and its float64 numbers. After an error there are no bounds, and the rank computes them itself."""
    try:
        bounds = Work(ParallelCase.parse(case), *rest).bounds()
    except Exception:
        bounds = {}
    header, data = encoded(bounds)
    return {"number": number, **header}, data


def keep_open(requests: int, answers: int) -> None:
    """Make two pipes the standard input and output of a process that was forked, and close every other file of its parent."""
    for standard, descriptor in enumerate((requests, answers, os.open(os.devnull, os.O_WRONLY))):
        os.dup2(descriptor, standard)  # a request for stacks to the process group must give those of the parent alone
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
                os.close(descriptor)


def encoded(bounds: Mapping[str, Bound]) -> tuple[dict[str, Any], bytearray]:
    """What describes some bounds, in plain data, and their float64 numbers."""
    tensors = [x.flatten() for entry in bounds.values() for x in (entry.value, entry.allowed)]
    data = bytearray(8 * sum(map(len, tensors)))
    if data:
        torch.cat(tensors, out=torch.frombuffer(data, dtype=torch.float64))
    descriptions = [(name, entry.origin, entry.clear, entry.value.shape, entry.allowed.shape) for name, entry in bounds.items()]
    return {"bytes": len(data), "bounds": descriptions}, data


def decoded(header: Mapping[str, Any], data: bytearray, finer: Callable[[str], Any] = lambda _: None) -> Bounds:
    """The bounds that `encoded` described. `finer(name)` is the `finer` of a bound."""
    numbers = torch.frombuffer(data, dtype=torch.float64) if data else torch.empty(0, dtype=torch.float64)
    parts = iter(numbers.split([math.prod(shape) for _, _, _, *shapes in header["bounds"] for shape in shapes]))
    bounds = {}
    for name, origin, clear, *shapes in header["bounds"]:
        value, allowed = (next(parts).view(shape) for shape in shapes)
        bounds[name] = Bound(value, allowed, origin, finer(name), clear=clear)
    return bounds


_BESIDE: list[Beside] = []
_BEGUN: dict[Work, Callable[[], Bounds]] = {}


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Start the processes beside this one: as many as ORACLE_PROCESSES says, or as there are cores left for each rank of this host.

    They are forked. At that time no GPU may be open, and no other thread may hold a lock that a computation needs. ValueError if
    ORACLE_PROCESSES is not in 0..64.
    """
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "0"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0  # macOS: its BLAS does not survive a fork
    count = environment.get(ORACLE_PROCESSES) or str(max(0, min(MOST, cores // ranks - 1)) if ranks else 0)
    if not (count.isdecimal() and int(count) <= 64):
        raise ValueError(f"{ORACLE_PROCESSES} must be how many processes a rank has for its oracle, in 0..64, got {count!r}")
    _BESIDE[:] = [Beside() for _ in range(int(count))]


def begin(works: Iterable[Work]) -> None:
    """Let the processes begin with the bounds that will be needed next, in this order."""
    _BEGUN.clear()
    for at, work in enumerate(works):
        if _BESIDE:
            _BEGUN[work] = _BESIDE[at % len(_BESIDE)].ask(work)


def ask(work: Work) -> Callable[[], Bounds]:
    """A function that returns the bounds. A process beside this one, if there is one, has begun with them or begins now."""
    if work in _BEGUN:
        return _BEGUN[work]
    return _BESIDE[0].ask(work) if _BESIDE else functools.cache(work.bounds)


mark_module(globals(), Mark.ORACLE)
