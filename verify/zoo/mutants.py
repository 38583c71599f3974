"""Mutants: kernels with one edit each, and the hunt that runs the laws on them.

Each case runs once on the unedited kernels, and its launches are recorded (verify/zoo/launch_edits.py). For each mutant, a forked
child process replaces one kernel by the edited one. For each case the child first repeats the launches that execute the edited
statement. If all of them write the same bits, everything after them is the same too, and the law need not run. If a launch differs,
accesses memory outside its tensors, or cannot be repeated, the law runs as in `check`. The first broken law has killed the mutant.
If the child dies or hangs, the law that it was running has killed the mutant.
"""

import collections
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict
from verify.zoo.edits import Edit
from verify.zoo.launch_edits import Kernel, Launch, Place, Watch, exchange

AT_ONCE = 32  # cases that are recorded at most before the mutants run them
HELD = 1 << 30  # bytes of recorded launches that are kept at most
MORE = 4 << 30  # bytes of memory that a child may use beyond its parent's
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
SLOWER = 20.0  # a mutant hangs if it takes longer than the deadline and so many times as long as the unedited kernels


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An edit of a kernel."""

    number: int
    kernel: Kernel
    edit: Edit

    @functools.cached_property
    def diff(self) -> str:
        """The edit as a unified diff."""
        return self.kernel.diff(self.edit)

    @property
    def id(self) -> str:
        """The id that `--id` takes: the number among all mutants of the adapter, and a digest that depends on the source."""
        return f"{self.number:04d}.{hashlib.sha256(self.diff.encode()).hexdigest()[:4]}"

    @property
    def place(self) -> Place:
        """The statement that the edit changes, or the branch of a conditional expression in it."""
        return self.kernel.place(self.edit)

    @property
    def changed(self) -> tuple[str, str]:
        """The changed lines before and after the edit, each joined to one line without indentation."""
        _, old, new = self.edit.lines(self.kernel.source)
        return " ".join(" ".join(old).split()), " ".join(" ".join(new).split())

    def __str__(self) -> str:
        return f"{self.kernel.file}:{self.place[1]} {self.kernel.name} {self.edit.operator}: {' -> '.join(self.changed)}"


@dataclasses.dataclass
class MutantFate:
    """The result of one mutant: "killed" by a law, "survived", "undecided" (gdn-verify failed), or "not asked".

    - `how`: how the law saw the mutant.
    - `cases`, `seconds`: what `check` would need until then, with all laws in their order on one worker.
    - `ran`: cases that execute the edited statement. In `differed` of them a launch writes other bits or raises, and `unknown` of
      them could not be judged.
    - `argued`, `reason`: the class of an argument that the edit is no defect, and the argument, if there is one.
    """

    mutant: Mutant
    state: str = "not asked"
    law: str = ""
    how: str = ""
    run: str = ""
    cases: int = 0
    seconds: float = 0.0
    ran: int = 0
    differed: int = 0
    unknown: int = 0
    argued: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        mutant = self.mutant
        data = {"id": mutant.id, "kernel": mutant.kernel.key, "line": mutant.place[1], "operator": mutant.edit.operator}
        data |= {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "mutant"}
        return data | {"diff": mutant.diff}


@dataclasses.dataclass
class Item:
    """A case that was recorded on the unedited kernels: its number among all cases, its run and its launches.

    `took_s` is the time of this case and `until_s` the time of all cases up to this one, in seconds.
    """

    number: int
    run: Run
    launches: list[Launch]
    took_s: float
    until_s: float

    def executing(self, place: Place) -> list[Launch]:
        """The launches that execute the statement at `place`."""
        return [launch for launch in self.launches if place in launch.executed]


class MutantHunt:
    """Runs the laws on mutants, `workers` mutants at a time. `say` is called with lines about the progress.

    `left_out` are runs that do not hold on the unedited kernels, so that they cannot judge a mutant.
    """

    def __init__(
        self,
        watch: Watch,
        runs: Sequence[Run],
        workers: int = 2,
        deadline_s: float = 30.0,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.watch, self.runs, self.workers, self.deadline_s, self.progress = watch, runs, workers, deadline_s, progress
        self.left_out: list[str] = []
        self._running: dict[int, _Child] = {}
        self._next, self._until_s = 0, 0.0

    def __call__(self, fates: Sequence[MutantFate]) -> None:
        """Fill in the fates. Call it once. However it ends, no child process is left."""
        size, alive = 1, list(fates)
        try:
            while alive and self._next < len(self.runs):
                items = self._watched(size, {fate.mutant.place for fate in alive})
                self._ask(alive, items)
                alive = [fate for fate in alive if fate.state == "not asked"]
                size = min(2 * size, AT_ONCE)
            for fate in alive:
                fate.state = "survived"
        finally:
            for child in self._running.values():
                child.kill()
                child.end()

    def _watched(self, size: int, wanted: set[Place]) -> list[Item]:
        items: list[Item] = []
        while self._next < len(self.runs) and len(items) < size and sum(map(_launch_bytes, items)) < HELD:
            run, start = self.runs[self._next], time.monotonic()
            with self.watch.watching(wanted):
                outcome = execute(run)
            self._next += 1
            took_s = time.monotonic() - start
            self._until_s += took_s
            if outcome.verdict in (Verdict.BROKEN, Verdict.UNKNOWN):
                self.left_out.append(str(run))
            else:
                items.append(Item(self._next, run, self.watch.launches, took_s, self._until_s))
            self.progress(f"{self._next} of {len(self.runs)} cases recorded")
        return items

    def _ask(self, fates: Sequence[MutantFate], items: list[Item]) -> None:
        waiting: collections.deque[_Child] = collections.deque()
        for fate in fates:
            those = [item for item in items if item.executing(fate.mutant.place)]
            fate.ran += len(those)
            if those:
                waiting.append(_Child(fate, those))
        while waiting or self._running:
            while waiting and len(self._running) < self.workers:
                child = waiting.popleft()
                child.start()
                self._running[child.pipe] = child
            ready, _, _ = select.select(list(self._running), [], [], 0.5)
            for child in [self._running[pipe] for pipe in ready]:
                if not child.read():
                    del self._running[child.pipe]
                    if child.end():
                        waiting.appendleft(child)
                    left = len(waiting) + len(self._running)
                    self.progress(
                        f"{self._next} of {len(self.runs)} cases recorded, {left} mutants still to be run on the last ones"
                    )
            for child in self._running.values():
                if child.silent_s > max(self.deadline_s, SLOWER * child.item.took_s):
                    child.hung = True
                    child.kill()


def _launch_bytes(item: Item) -> int:
    return sum(launch.bytes for launch in item.launches)


class _Child:
    """A forked process that runs one mutant on some cases. It writes a JSON line before each step, and one with its answer."""

    def __init__(self, fate: MutantFate, items: list[Item]) -> None:
        self.fate, self.items = fate, items
        self.at, self.step = 0, ""  # the index of the current case, and its step: "repeat" (launches) or "law"
        self.lost = False  # whether a process was lost on this case, so that the law runs at once
        self.pid, self.pipe, self.hung = 0, -1, False
        self._last_message, self._buffer = 0.0, b""
        self._answer: dict[str, Any] | None = None

    @property
    def item(self) -> Item:
        """The current case."""
        return self.items[self.at]

    @property
    def silent_s(self) -> float:
        """Seconds since the last output of the process."""
        return time.monotonic() - self._last_message

    def start(self) -> None:
        """Fork a process that begins with the current case."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pipe, theirs = os.pipe()
        self._last_message, self._buffer, self.hung = time.monotonic(), b"", False
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _serve(theirs, self)
        os.close(theirs)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def read(self) -> bool:
        """Read what the process wrote. False if it has ended."""
        data = os.read(self.pipe, 1 << 16)
        self._last_message = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "step" not in message:
                self._answer = message
                continue
            self.lost = self.lost and message["at"] == self.at
            self.fate.differed += message.get("differs", False)
            self.at, self.step = message["at"], message["step"]
        return bool(data)

    def end(self) -> bool:
        """Reap the process and fill in the mutant's fate. True if a new process should start with the current case."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if self._answer is not None:
            self.fate.unknown += self._answer["unknown"]
            if self._answer["failed"]:
                self.fate.state, self.fate.how = "undecided", self._answer["failed"]
            elif self._answer["killed"]:
                self._killed(self._answer["killed"])
            return False
        # A repeated launch decides nothing, and as in `check` a crash only counts if it happens again.
        if self.step == "repeat" or (self.step == "law" and not self.hung and not self.lost):
            self.fate.differed += self.step == "repeat"
            self.lost = True
            return True
        if self.hung:
            self._killed("hung")
        elif os.WIFSIGNALED(status):
            self._killed(f"crashed: {signal.Signals(os.WTERMSIG(status)).name}")
        else:
            self._killed(f"crashed: exit code {os.WEXITSTATUS(status)}")
        return False

    def _killed(self, how: str) -> None:
        fate, item = self.fate, self.item
        fate.state, fate.law, fate.how, fate.run = "killed", item.run.law, how, str(item.run)
        fate.cases, fate.seconds = item.number, item.until_s


def _serve(pipe: int, child: _Child) -> None:
    """Run in the child process. Never returns."""

    def send(message: dict[str, Any]) -> None:
        os.write(pipe, (json.dumps(message) + "\n").encode())

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + MORE, hard))
        send(_judged(child, send))
    except BaseException:  # an error of gdn-verify, no verdict
        send({"killed": "", "unknown": 0, "failed": traceback.format_exc()[-2000:]})
    finally:
        os._exit(0)


@contextlib.contextmanager
def _without_limit() -> Iterator[None]:
    """Lift the limit on memory, as far views reserve more than it allows. They touch little of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _judged(child: _Child, send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The answer of the child: how the mutant was seen, if a law killed it, and how many cases could not be judged."""
    mutant = child.fate.mutant
    answer: dict[str, Any] = {"killed": "", "unknown": 0, "failed": ""}
    exchange(mutant.kernel, mutant.edit)
    for at in range(child.at, len(child.items)):
        item, differs = child.items[at], False
        launches = item.executing(mutant.place)
        whole = all(launch.repeatable for launch in launches)
        if at > child.at or not child.lost:
            send({"at": at, "step": "repeat"})
            differs = any(launch.differs() for launch in launches if launch.repeatable)
            if not differs and whole:
                continue
        send({"at": at, "step": "law", "differs": differs})
        with contextlib.nullcontext() if whole else _without_limit():
            outcome = execute(item.run)
        if outcome.verdict is Verdict.BROKEN:
            return {**answer, "killed": outcome.way}
        answer["unknown"] += outcome.verdict is Verdict.UNKNOWN
    return answer
