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
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

START_S = 300.0
TAIL_CHARACTERS = 2000


class WorkerLost(Exception):
    """The worker did not answer: it "crashed" or "hung"; `detail` says how, with the end of what it wrote to stderr."""

    def __init__(self, how: str, detail: str, tail: str) -> None:
        super().__init__(f"{how}: {detail}")
        self.how, self.detail, self.tail = how, detail, tail


class Worker:
    """The supervisor of one worker process. It owns no GPU, imports no kernel and holds the clock."""

    def __init__(self, deadline_s: float = 120.0) -> None:
        self.deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, question: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        """The worker's answer. WorkerLost if it died or was silent for `deadline_s` seconds, its start-up not counted."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            os.write(self._to, (json.dumps(question) + "\n").encode())
        except BrokenPipeError:
            raise self._lost("crashed") from None
        return self._answer(self.deadline_s if deadline_s is None else deadline_s)

    def close(self) -> None:
        """End the worker, whatever it is doing; safe from any thread."""
        with self._lock:
            self._closed = True
            self._kill()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise WorkerLost("crashed", "it was closed", "")
            self._kill()
            theirs_in, self._to = os.pipe()
            self._from, theirs_out = os.pipe()
            self._errors = tempfile.TemporaryFile()
            self._buffer = b""
            # Kernels are interpreted on the CPU; an implementation that saw a GPU would launch there.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verify.worker", str(theirs_in), str(theirs_out)],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,  # Ctrl-C is for the supervisor; and the whole group can be killed
                env={**environment, "PYTHONPATH": os.pathsep.join(path for path in (_ROOT, os.environ.get("PYTHONPATH")) if path)},
            )
            os.close(theirs_in)
            os.close(theirs_out)
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
            elif time.monotonic() >= end:
                raise self._lost("hung", deadline_s)
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self, how: str, deadline_s: float = 0.0) -> WorkerLost:
        process = self._process
        assert process is not None
        if how == "hung":
            detail = f"no answer within {deadline_s:g} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGUSR1)  # it writes its stack, see serve()
            time.sleep(0.3)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            code = process.poll()
            named = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
            detail = named
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - TAIL_CHARACTERS))
        tail = self._errors.read().decode(errors="replace")
        with self._lock:
            self._kill()
        return WorkerLost(how, detail, tail)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for descriptor in (self._to, self._from):
            os.close(descriptor)
        self._errors.close()


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
        reply = (json.dumps(answer(json.loads(questions.get()))) + "\n").encode()
        while reply:
            reply = reply[os.write(answers, reply) :]


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
