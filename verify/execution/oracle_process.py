"""The oracle beside a rank: other processes compute the bounds of cases while the rank runs its path.

Both start many small operations from Python, where a second thread would only be in the way. Such a process is forked before its
parent is a rank, and ends with it. Case lines go there and numbers come back, never objects. Where there is none, or it fails in
any way, the rank computes the bounds itself, and they are the same bit for bit.
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

from oracles import bound
from oracles.bound import Bound
from properties.cases.path_case import ParallelCase
from verify.process.stacks import Mark, mark_module

SWITCH = "GDN_VERIFY_AHEAD"  # in the environment: how many such processes a rank has; else as there are cores
MOST = 2  # on a GPU host the oracle of a layer's case takes about twice as long as the path
Bounds = dict[str, Bound]


@dataclasses.dataclass(frozen=True)
class Work:
    """A case, and whom its bounds are for: a class of implementation, how it multiplies float32, how long its chunks are."""

    case: ParallelCase
    algorithm: str
    products: str = "ieee"
    chunk: int | None = None

    def bounds(self) -> Bounds:
        """The bound of each output and gradient of the whole case, computed in this process."""
        cotangents = self.case.cotangents() if self.case.backward else None
        return bound.bounds(self.case.spec, self.case.inputs(), cotangents, self.algorithm, self.products, self.chunk)


class Later(Mapping[str, Bound]):
    """Bounds that are waited for when somebody looks at them."""

    def __init__(self, wait: Callable[[], Bounds]) -> None:
        self._wait = wait

    def __getitem__(self, name: str) -> Bound:
        return self._wait()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wait())

    def __len__(self) -> int:
        return len(self._wait())


class Beside:
    """A process that computes bounds for this one, in the order of the questions; answers that nobody wanted are passed over."""

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
        """What returns the bounds when it is called; the process begins with them now."""
        self._number += 1
        asked = [self._number, str(work.case), work.algorithm, work.products, work.chunk]
        with contextlib.suppress(OSError):  # it is gone, which is seen where its answer is read
            os.write(self._to, (json.dumps(asked) + "\n").encode())
        here = functools.cache(work.bounds)
        there = functools.partial(self._answer, self._number, here)
        return functools.cache(lambda: there() or here())

    def _answer(self, number: int, here: Callable[[], Bounds]) -> Bounds:
        """The bounds that a question asked for; none if a later one's were taken before, or there is no good answer."""
        if number <= self._read:
            return {}
        self._read = number
        try:
            while (header := json.loads(self._from.readline()))["number"] < number:
                self._from.read(header["bytes"])
            data = bytearray(header["bytes"])
            if header["number"] > number or self._from.readinto(data) < len(data):
                raise EOFError
            numbers = torch.frombuffer(data, dtype=torch.float64) if data else torch.empty(0, dtype=torch.float64)
            parts = iter(numbers.split([math.prod(shape) for _, _, *shapes in header["bounds"] for shape in shapes]))
            made = {}
            for name, origin, *shapes in header["bounds"]:
                value, allowed = (next(parts).view(shape) for shape in shapes)
                made[name] = Bound(value, allowed, origin, functools.partial(_finer, here, name))
            return made
        except Exception:  # it is gone, or what it wrote is no answer
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
    """The life of the process: it keeps nothing of its parent's open but two pipes, and goes when the parent is gone."""
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd would start a thread for a GPU
        for standard, descriptor in enumerate((requests, answers, os.open(os.devnull, os.O_WRONLY))):
            os.dup2(descriptor, standard)  # whoever asks the process group for stacks is to read the rank's alone
        for descriptor in map(int, os.listdir("/dev/fd")):
            if descriptor > 2:
                with contextlib.suppress(OSError):  # the list's own is gone
                    os.close(descriptor)
        questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def read() -> None:
            with open(0, "rb") as lines:
                for line in lines:
                    questions.put(line)
            os._exit(0)  # the rank is gone: nobody waits for what is being computed

        threading.Thread(target=read, daemon=True).start()
        with open(1, "wb") as replies:
            while True:
                header, data = _reply(*json.loads(questions.get()))
                replies.write((json.dumps(header) + "\n").encode() + data)
                replies.flush()
    finally:
        os._exit(1)


def _reply(number: int, case: str, *rest: Any) -> tuple[dict[str, Any], bytearray]:
    """The header of an answer and its numbers, float64; without bounds, the rank is to see for itself what is wrong."""
    try:
        made = Work(ParallelCase.parse(case), *rest).bounds()
    except Exception:
        made = {}
    tensors = [x.flatten() for each in made.values() for x in (each.value, each.allowed)]
    data = bytearray(8 * sum(map(len, tensors)))
    if data:
        torch.cat(tensors, out=torch.frombuffer(data, dtype=torch.float64))
    said = [(name, each.origin, each.value.shape, each.allowed.shape) for name, each in made.items()]
    return {"number": number, "bytes": len(data), "bounds": said}, data


_BESIDE: list[Beside] = []
_BEGUN: dict[Work, Callable[[], Bounds]] = {}


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Have processes beside this one as this host has cores left over for each of its ranks, or as SWITCH says.

    They are forked: no other thread may hold what a computation needs, and no GPU may be open.
    """
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "0"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0  # macOS: its BLAS does not survive a fork
    count = environment.get(SWITCH) or str(max(0, min(MOST, cores // ranks - 1)) if ranks else 0)
    if not (count.isdecimal() and int(count) <= 64):
        raise ValueError(f"{SWITCH} must be how many processes a rank has for its oracle, in 0..64, got {count!r}")
    _BESIDE[:] = [Beside() for _ in range(int(count))]


def begin(works: Iterable[Work]) -> None:
    """Have the processes beside this one begin with what will be asked for next, in this order."""
    _BEGUN.clear()
    for at, work in enumerate(works):
        if _BESIDE:
            _BEGUN[work] = _BESIDE[at % len(_BESIDE)].ask(work)


def ask(work: Work) -> Callable[[], Bounds]:
    """What returns the bounds when it is called. A process beside this one, if there is one, has begun with them, or does now."""
    if work in _BEGUN:
        return _BEGUN[work]
    return _BESIDE[0].ask(work) if _BESIDE else functools.cache(work.bounds)


mark_module(globals(), Mark.ORACLE)
