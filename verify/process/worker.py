"""A worker: a persistent process that runs cases, and the supervisor that waits for its answers up to a deadline.

If a kernel crashes, hangs or exits, its worker process ends, the case gets a verdict, and the next question starts a new process.
Questions and answers are lines of JSON on two pipes of their own, so that what a kernel prints cannot mix with them.
"""

import contextlib
import faulthandler
import fcntl
import importlib
import importlib.util
import json
import os
import pathlib
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from verify.process import deadline, forking
from verify.process.environment import OUTER_PATH
from verify.process.fork_server import forked_server, importing
from verify.process.forking import Forked
from verify.process.messages import Data, Question, lines_of, plain
from verify.process.stacks import in_implementation, innermost

START_S = 300.0
DUMP_S = 2.0  # how long we wait until a worker has written its stacks
CLOSE_S = 3.0  # how long adapters may take to close before their worker is killed
TAIL_CHARACTERS = 2000
STACK_BYTES = 1 << 16
NOISE_BYTES = 1 << 26  # if a kernel prints more than this while it runs, the file is cut to nothing
LINES = 512  # of what a process ran, so many are known: a failure may need them
SERVICE = "verify.execution.service:answer"
IMPORTS = (
    "torch.fx.experimental.symbolic_shapes",  # torch's first backward pass imports it
    "verify.execution.prepared",  # the last, because it looks up the files of all modules
)
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # for interpreted kernels: an implementation that sees a GPU would launch its kernels there
# The outermost frame of the main thread, whose stack faulthandler writes last. Frames that may follow are those of a supervisor.
_LAST = tuple(f" in {name}\n" for name in ("_run_module_as_main", forked_server.__name__))


class WorkerLost(Exception):
    """The worker gave no answer: `how` is "crashed", "hung" or "closed".

    `detail` has the particulars in words, and `tail` the end of what the process wrote to stdout and stderr. `in_kernel` is False
    if the process hung and its stack shows no call of the implementation. `said` is the end of what a process that hung had written
    before its stack; None if nobody knows.
    """

    def __init__(self, how: str, detail: str, tail: str, *, in_kernel: bool = True, said: str | None = None) -> None:
        super().__init__(f"{how}: {detail}")
        self.how, self.detail, self.tail, self.in_kernel, self.said = how, detail, tail, in_kernel, said


class Started(subprocess.Popen[bytes]):
    """A subprocess that leads its own session. It is the worker, or a program, such as a sanitizer, that runs the worker."""

    run_by_another = False

    def signal(self, number: int) -> None:
        """Send a signal to the worker."""
        # The whole group gets the signal only if another program runs the worker, since that program may not pass a signal on.
        # Otherwise the worker alone gets it: a compiler that it has started would die of it.
        tell = os.killpg if self.run_by_another else os.kill
        with contextlib.suppress(ProcessLookupError):
            tell(self.pid, number)

    def kill(self) -> None:
        """Kill the process and every process that it started, which could outlive it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Worker:
    """The supervisor of one worker process. It uses no GPU, imports no kernel, and ends a process that is past its deadline.

    - `deadline_s`: seconds that a question may take, unless `ask` is given another deadline
    - `sequential`: whether the programs of an interpreted launch run one after another, which finds no races
    - `environment`: added to the environment of this process
    - `serves`: the module:function that answers questions in the worker
    - `python`: the interpreter of the process, by default that of this one. Another finds modules only where `environment` says
    - `under`: called each time a process is started; returns the words before its command, a program that runs the worker and
      passes its pipes on

    `ask` is all that the user of a single worker needs. Code that supervises several workers at a time uses the steps of `ask`:
    the methods from `launch` to `end`.
    """

    def __init__(
        self,
        deadline_s: float = 120.0,
        *,
        environment: Mapping[str, str] = NO_GPU,
        serves: str = SERVICE,
        under: Callable[[], Sequence[str]] = tuple,
        python: str | None = None,
        sequential: bool = False,
    ) -> None:
        self.deadline_s, self.sequential, self._under, self._python = deadline_s, sequential, under, python
        self._environment, self._serves = dict(environment), serves
        self._process: Started | Forked | None = None
        self._asking = threading.RLock()  # held while the pipes are used, so that no other thread closes them
        self._starting = threading.Lock()
        self._closed = self._starts = self._closes = False
        self.started, self.start_s = 0, 0.0  # processes that were started, and the seconds until they had answered once
        self.ran = deque[str](maxlen=LINES)  # the last lines that the last process was asked to run, in their order

    def ask(self, question: Question | Mapping[str, Any], deadline_s: float | None = None) -> Data:
        """Return the worker's answer. WorkerLost if it died, or did not answer within `deadline_s` seconds after its start-up."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        with self._asking:
            try:
                start = time.monotonic()
                if not self.alive:
                    self.launch()
                if new := self._starts:
                    self._answer(START_S)  # {}, which it sends when it is ready
                    self._starts = False
                    self.ran.clear()
                self.ran += lines_of(question)
                self.send(question, deadline_s)
                answer = self._answer(deadline_s)
                if new:  # a new process imports, and opens its GPU, while it answers for the first time
                    self.started, self.start_s = self.started + 1, self.start_s + time.monotonic() - start - _worked_s(answer)
                if answer.get("spent"):  # the process can run nothing more on its GPU
                    self.end()
                return answer
            except BaseException:  # an answer that comes too late must not be taken for the answer to the next question
                self.end()
                raise

    def close(self) -> None:
        """End the worker, whatever it is doing. Any thread may call this. Adapters of an idle worker are closed first."""
        if not self._asking.acquire(blocking=False):
            self.stop()
            self._asking.acquire()
        try:
            with self._starting:
                self._closed = True
            self.end()
        finally:
            self._asking.release()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether there is a process and it has not ended."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start a process in place of the last one. It sends {} when it is ready. WorkerLost if the worker has been closed."""
        self.end()
        with self._starting:
            if self._closed:
                raise WorkerLost("closed", "by its supervisor", "")
            with contextlib.ExitStack() as undo:
                pipes = [*os.pipe(), *os.pipe()]
                for descriptor in pipes:
                    undo.callback(os.close, descriptor)
                theirs_in, to, from_, theirs_out = pipes
                errors = undo.enter_context(tempfile.TemporaryFile())
                fcntl.fcntl(errors, fcntl.F_SETFL, os.O_APPEND)  # else a write after a truncation would fill the gap with zeros
                process = self._launched([theirs_in, theirs_out], errors.fileno())
                self._to, self._from, self._errors, self._buffer, self._mark = to, from_, errors, b"", -1
                self._process, self._starts, self._closes = process, True, False
                undo.pop_all()
            os.close(theirs_in)
            os.close(theirs_out)

    def share_imports(self) -> None:
        """Import here what the process of the worker will need, so that it is forked from here and imports nothing by itself."""
        forking.share(IMPORTS, self._whole_environment(), self._place)

    @property
    def _place(self) -> int:
        return int(self._environment.get("RANK", "0")) % 2  # neighbouring ranks get different hash seeds

    def _whole_environment(self) -> dict[str, str]:
        # The worker must find modules where this process finds them, or it might check another copy of a kernel.
        paths = dict.fromkeys([*(path or os.getcwd() for path in sys.path), _ROOT])
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # messages of torch's libraries would push a kernel's last output out of `tail`
            "PYTHONPATH": os.pathsep.join(paths),
            OUTER_PATH: os.environ.get("PYTHONPATH", ""),
            **self._environment,
        }

    def _launched(self, pipes: Sequence[int], output: int) -> Started | Forked:
        environment, before = self._whole_environment(), self._under()
        if forking.HERE and not before and self._python is None and environment.get("CUDA_VISIBLE_DEVICES") == "":
            return forking.start("verify.process.worker", [self._serves], pipes, environment, output, IMPORTS, self._place)
        process = Started(
            [*before, self._python or sys.executable, "-P", "-m", "verify.process.worker", self._serves, *map(str, pipes)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=pipes,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, and the whole group can be killed
            env=environment,
        )
        process.run_by_another = bool(before)
        return process

    def send(self, question: Question | Mapping[str, Any], deadline_s: float) -> None:
        """Send a question to a worker that is ready. WorkerLost if the process has ended."""
        os.ftruncate(self._errors.fileno(), 0)
        self._mark = -1
        try:
            words = {**plain(question), "deadline_s": deadline_s, "sequential": self.sequential}
            os.write(self._to, (json.dumps(words) + "\n").encode())
        except BrokenPipeError:
            raise self._crashed() from None

    def receive(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """Return the answer, or None if it is not complete after `wait_s` seconds.

        WorkerLost if the worker died, or wrote a line that is no JSON.
        """
        if b"\n" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], wait_s)
            if ready:
                data = os.read(self._from, 1 << 16)
                if not data:
                    raise self._crashed()
                self._buffer += data
            elif not self.alive:
                raise self._crashed()  # a process that the worker started may still hold the pipe open
        if b"\n" not in self._buffer:
            if os.fstat(self._errors.fileno()).st_size > NOISE_BYTES:
                os.ftruncate(self._errors.fileno(), 0)
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._lost("crashed", f"wrote {line[:40]!r} where its answer belongs") from None
        self._closes = self._closes or bool(answer.get("closes"))
        return answer

    def fileno(self) -> int:
        """The descriptor of the pipe of answers, for select."""
        return self._from

    def interrogate(self) -> None:
        """Make the worker write the stacks of all its threads. `words` returns them soon after; see serve()."""
        self._mark = os.fstat(self._errors.fileno()).st_size
        if self._process is not None and self.alive:
            self._process.signal(signal.SIGUSR1)

    def words(self) -> str:
        """The end of what the process wrote to stdout and stderr; after `interrogate`, what it wrote since then."""
        errors = self._errors.fileno()
        size = os.fstat(errors).st_size
        start = self._mark if 0 <= self._mark <= size else max(0, size - STACK_BYTES)
        return os.pread(errors, STACK_BYTES, start).decode(errors="replace")

    def stop(self) -> None:
        """Kill the process and let no other start. The pipes stay open: a thread that waits for an answer must see their end."""
        with self._starting:
            self._closed = True
            if self.alive:  # the pid of a process that has ended may belong to another by now
                self.kill()

    def kill(self) -> None:
        """Kill the process, if there is one, and every process that it started, which could outlive it."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Let adapters that want to be closed do so, kill the process, wait for its end and close its pipes."""
        process = self._process
        if process is None:
            return
        dismiss([self])
        self.kill()
        process.wait()
        self._process = None
        for descriptor in (self._to, self._from):
            if descriptor >= 0:
                os.close(descriptor)
        self._errors.close()

    def hang_up(self) -> bool:
        """Close the pipe of questions if an adapter in the worker wants to be closed, so that it is. Returns whether one does."""
        if not (self._closes and self.alive):
            return False
        if self._to >= 0:
            os.close(self._to)
            self._to = -1
        return True

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        while True:
            answer = self.receive(max(0.0, min(0.5, end - time.monotonic())))
            if answer is not None and deadline.MOVED in answer:
                end = time.monotonic() + float(answer[deadline.MOVED])
            elif answer is not None:
                return answer
            elif time.monotonic() >= end:
                said = self.words()[-TAIL_CHARACTERS:]
                interrogate([self])
                raise self._lost("hung", f"no answer within {deadline_s:g} s", said)

    def _crashed(self) -> WorkerLost:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        return self._lost("crashed", _ended(self._process.poll()))

    def _lost(self, how: str, detail: str, said: str | None = None) -> WorkerLost:
        wrote = self.words()
        place = innermost(wrote)
        self.end()
        if self._closed:
            return WorkerLost("closed", "by its supervisor", wrote[-TAIL_CHARACTERS:])
        in_kernel = how != "hung" or not place or in_implementation(wrote)
        detail += f", in {place}" if place else ""
        return WorkerLost(how, detail, wrote[-TAIL_CHARACTERS:], in_kernel=in_kernel, said=said)


def _worked_s(answer: Data) -> float:
    """The seconds of an answer's outcomes that were spent in kernels and in the oracle."""
    outcomes = answer.get("outcomes", [answer])
    return sum(float(outcome.get(name, 0.0)) for outcome in outcomes for name in ("kernel_s", "oracle_s"))


def dismiss(several: Sequence[Worker]) -> None:
    """Let the adapters of several workers close at the same time. We wait CLOSE_S seconds at most, and kill nothing."""
    closing, end = [worker for worker in several if worker.hang_up()], time.monotonic() + CLOSE_S
    while any(worker.alive for worker in closing) and time.monotonic() < end:
        time.sleep(0.02)


class Interrogated(Protocol):
    """A process that can be made to write its stacks."""

    def interrogate(self) -> None:
        """Make it write its stacks."""

    def words(self) -> str:
        """What it wrote since `interrogate`."""


def interrogate(several: Sequence[Interrogated]) -> list[str]:
    """Make several processes write their stacks at the same time, and return what each wrote.

    We wait until the last is complete, for DUMP_S seconds at most. Some never are: the process is stopped, its stack is deeper than
    faulthandler shows, or other output is mixed with it.
    """
    for process in several:
        process.interrogate()
    end = time.monotonic() + DUMP_S
    while not all(_is_whole(subject.words()) for subject in several) and time.monotonic() < end:
        time.sleep(0.05)
    return [subject.words() for subject in several]


def _is_whole(wrote: str) -> bool:
    return any(frame in wrote for frame in _LAST)


def _ended(code: int | None) -> str:
    if code is None:
        return "closed the pipe of its answers"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


_ROOT = str(pathlib.Path(os.path.abspath(__file__)).parents[2])  # where the package is imported from


def serve(requests: int, answers: int, serves: str) -> None:
    """Run the worker: install the interpreter if there is no GPU, then answer one question at a time until the supervisor is gone.

    `requests` and `answers` are descriptors of pipes; `serves` is the module:function that answers.
    """
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    questions: queue.Queue[str | None] = queue.Queue()
    busy, close = threading.Event(), list[Callable[[], None]]()

    def leave() -> NoReturn:
        """Close the adapters, for CLOSE_S seconds at most, and end the process."""
        faulthandler.dump_traceback_later(CLOSE_S, exit=True, file=sys.stderr)
        for function in close:
            function()
        os._exit(0)

    def read() -> None:
        with os.fdopen(requests) as lines:
            for line in lines:
                questions.put(line)
        questions.put(None)
        if busy.is_set() or not close:
            leave()  # nobody waits for the kernel that may be running

    threading.Thread(target=read, daemon=True).start()
    with importing():
        import torch

        from verify import interpreter

        torch.set_num_threads(1)
        if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
            interpreter.install_with_triton()
        place, _, function = serves.partition(":")
        module = importlib.import_module(place)
        answer = getattr(module, function)
        close += [module.close] if hasattr(module, "close") else []

    os.write(answers, b"{}\n")
    while (line := questions.get()) is not None:
        busy.set()
        question = json.loads(line)
        deadline.begin(answers, question.pop("deadline_s"))
        interpreter.patches.sequential = question.pop("sequential")
        reply = (json.dumps(answer(question)) + "\n").encode()
        deadline.finish()
        while reply:
            reply = reply[os.write(answers, reply) :]
        busy.clear()
    leave()


def main(words: Sequence[str]) -> None:
    """Run a worker. `words` are the module:function that answers, and the numbers of its two pipes.

    What the function's module calls `close` is called, without arguments, when the supervisor is gone or wants no more answers.
    """
    path = os.environ.pop(OUTER_PATH, "")
    os.environ.pop("PYTHONPATH", None)
    os.environ.update({"PYTHONPATH": path} if path else {})
    serve(int(words[1]), int(words[2]), words[0])


if __name__ == "__main__":
    main(sys.argv[1:])
