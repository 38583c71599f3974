"""Workers: one persistent process that runs cases, and the supervisor that holds its clock.

A kernel that crashes, hangs or exits costs a worker and becomes a verdict; the next question starts a new worker. Questions and
answers are lines of JSON on two pipes of their own, so what a kernel prints disturbs nothing.
"""

import contextlib
import faulthandler
import importlib.util
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

START_S = 300.0
ALONE_S = 5.0  # how long after its deadline a worker that nobody ended ends itself
TAIL_CHARACTERS = 2000
STACK_BYTES = 1 << 16
_CALL = " in call_implementation\n"  # the frame of verify/bench.py under which an implementation runs


class WorkerLost(Exception):
    """No answer: the worker "crashed", "hung" or was "closed"; `detail` says how, `tail` is the end of what it wrote.

    `in_kernel` is False where its stack shows that it hung elsewhere than in a call of the implementation.
    """

    def __init__(self, how: str, detail: str, tail: str, *, in_kernel: bool = True) -> None:
        super().__init__(f"{how}: {detail}")
        self.how, self.detail, self.tail, self.in_kernel = how, detail, tail, in_kernel


class Worker:
    """The supervisor of one worker process. It owns no GPU, imports no kernel and holds the clock."""

    def __init__(self, deadline_s: float = 120.0) -> None:
        self.deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.RLock()  # held by who uses the pipes: nobody else may close them
        self._starting = threading.Lock()
        self._closed = False

    def ask(self, question: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        """The worker's answer. WorkerLost if it died or was silent for `deadline_s` seconds, its start-up not counted."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        with self._asking:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                os.ftruncate(self._errors.fileno(), 0)
                self._errors.seek(0)
                try:
                    os.write(self._to, (json.dumps({**question, "deadline_s": deadline_s}) + "\n").encode())
                except BrokenPipeError:
                    raise self._lost("crashed") from None
                return self._answer(deadline_s)
            except BaseException:  # an answer that comes too late must not be taken for the next one
                self._end()
                raise

    def close(self) -> None:
        """End the worker, whatever it is doing; safe from any thread."""
        with self._starting:
            self._closed = True
            self._kill()
        with self._asking:
            self._end()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._end()
        with self._starting:
            if self._closed:
                raise WorkerLost("closed", "by its supervisor", "")
            with contextlib.ExitStack() as undo:
                pipes = [*os.pipe(), *os.pipe()]
                for descriptor in pipes:
                    undo.callback(os.close, descriptor)
                theirs_in, to, from_, theirs_out = pipes
                errors = undo.enter_context(tempfile.TemporaryFile())
                # Kernels are interpreted on the CPU; an implementation that saw a GPU would launch there.
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
                # Modules are found where this process finds them, in the same order, or another kernel would be checked.
                paths = dict.fromkeys([*(path or os.getcwd() for path in sys.path), _ROOT])
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "verify.worker", str(theirs_in), str(theirs_out)],
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    pass_fds=(theirs_in, theirs_out),
                    start_new_session=True,  # Ctrl-C is for the supervisor; and the whole group can be killed
                    env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
                )
                undo.pop_all()
            os.close(theirs_in)
            os.close(theirs_out)
            self._to, self._from, self._errors, self._buffer = to, from_, errors, b""
            self._process = process
        self._answer(START_S)  # it says that it is ready

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, min(0.5, end - time.monotonic())))
            if ready:
                data = os.read(self._from, 1 << 16)
                if not data:
                    raise self._lost("crashed")
                self._buffer += data
            elif self._process is not None and self._process.poll() is not None:
                raise self._lost("crashed")  # though a process that it started still holds the pipe
            elif time.monotonic() >= end:
                raise self._lost("hung", deadline_s)
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._lost("crashed", said=line) from None
        return answer

    def _lost(self, how: str, deadline_s: float = 0.0, said: bytes = b"") -> WorkerLost:
        process = self._process
        assert process is not None
        if self._closed:
            how, detail = "closed", "by its supervisor"
        elif said:
            detail = f"wrote {said[:40]!r} where its answer belongs"
        elif how == "hung":
            detail = f"no answer within {deadline_s:g} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGUSR1)  # it writes its stack, see serve()
            time.sleep(0.3)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            detail = _ended(process.poll())
        errors = self._errors.fileno()
        size = os.fstat(errors).st_size
        wrote = os.pread(errors, STACK_BYTES, max(0, size - STACK_BYTES)).decode(errors="replace")
        place = "" if how == "closed" else _innermost(wrote)
        self._end()
        in_kernel = how != "hung" or not place or _CALL in wrote
        return WorkerLost(how, detail + (f", in {place}" if place else ""), wrote[-TAIL_CHARACTERS:], in_kernel=in_kernel)

    def _kill(self) -> None:
        """Kill the process and what it started; its pipes stay, so that who waits for an answer sees their end."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started may outlive it
        process.wait()
        self._process = None
        for descriptor in (self._to, self._from):
            os.close(descriptor)
        self._errors.close()


def _ended(code: int | None) -> str:
    if code is None:
        return "closed the pipe of its answers"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _innermost(wrote: str) -> str:
    """Where the main thread was, in words, if faulthandler wrote its stack: "run (kernel.py:12)"."""
    _, found, stack = wrote.rpartition("Current thread ")
    if not found:
        _, found, stack = wrote.rpartition("Thread ")
    place = re.search(r'^  File "(.*)", line (\d+) in (.*)$', stack, re.MULTILINE) if found else None
    return f"{place[3]} ({os.path.basename(place[1])}:{place[2]})" if place else ""


_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def serve(requests: int, answers: int) -> None:
    """The worker's life: make kernels runnable here, then answer one question at a time until the supervisor is gone."""
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    questions: queue.Queue[str] = queue.Queue()

    def read() -> None:
        with os.fdopen(requests) as lines:
            for line in lines:
                questions.put(line)
        os._exit(0)  # the supervisor is gone: whatever a kernel is doing, nobody waits for it

    threading.Thread(target=read, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    if importlib.util.find_spec("triton") is not None:
        from verify import interpreter

        interpreter.install()
    from verify.service import answer

    os.write(answers, b"{}\n")
    while True:
        question = json.loads(questions.get())
        # A kernel that hangs and holds the interpreter's lock stops the thread above; this clock does not need the lock.
        faulthandler.dump_traceback_later(question.pop("deadline_s") + ALONE_S, exit=True, file=sys.stderr)
        reply = (json.dumps(answer(question)) + "\n").encode()
        faulthandler.cancel_dump_traceback_later()
        while reply:
            reply = reply[os.write(answers, reply) :]


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
