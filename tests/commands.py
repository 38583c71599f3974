"""Commands in processes of their own, forked from a server that has imported torch. A new interpreter would take two seconds.

A command leads its own process group. It differs from `python -m verify` in four ways: modules are already imported, it finds
modules where this process does, it sees no GPU, and torch uses one thread. For its own workers, it starts a fork server of its own.
The test that "module runs from any directory" starts a new interpreter.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from verify.process import forking, worker
from verify.process.worker import NO_GPU

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERIFY = "import runpy\nrunpy.run_module('verify', run_name='__main__', alter_sys=True)\n"
BUFFERED = "PYTHONUNBUFFERED"


class Command:
    """A process that runs a program with some words, in a folder, with variables besides those of this process."""

    def __init__(
        self,
        words: Sequence[str],
        folder: pathlib.Path,
        *,
        program: str = VERIFY,
        imports: Iterable[str] | None = None,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        """Start the command.

        - `imports`: the modules that the command's own fork server imports (default: `worker.IMPORTS`)
        - `stdout`: a descriptor for its output; without it, read `self.stdout`
        """
        request = {
            "words": list(words),
            "folder": str(folder),
            "program": program,
            "imports": None if imports is None else list(imports),
            "environment": dict(environment or {}),
        }
        # The environment of a worker. With any other, the server would start a new interpreter.
        settings = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            BUFFERED: "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([*(path or os.getcwd() for path in sys.path), str(ROOT)])),
            **NO_GPU,
        }
        with contextlib.ExitStack() as theirs:

            def pipe() -> tuple[TextIO, int]:
                read, write = os.pipe()
                theirs.callback(os.close, write)
                return open(read), write

            self.stderr, errors = pipe()
            self.stdout, out = pipe() if stdout is None else (None, stdout)
            self._process = forking.start(__name__, [json.dumps(request)], [out, errors], settings, errors, worker.IMPORTS)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it has started."""
        self._process.signal(number)

    def wait(self, timeout: float) -> int:
        """Wait for its end and return its exit code. It is killed after `timeout` seconds, with subprocess.TimeoutExpired."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def kill(self) -> None:
        """Kill it and what it has started."""
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """The rest of its stdout and its stderr, when it has ended: at most 64 KiB each, or it does not end.

        subprocess.TimeoutExpired after `timeout` seconds.
        """
        self.wait(timeout)
        out = self.stdout.read() if self.stdout is not None else ""
        err = self.stderr.read()
        self.close()
        return out, err

    def close(self) -> None:
        """End it, if it runs, and close its files."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(words: Sequence[str]) -> None:
    """In the forked process: the words are the request and the descriptors of stdout and stderr."""
    request = json.loads(words[0])
    for standard, descriptor in ((1, int(words[1])), (2, int(words[2]))):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.pop(BUFFERED)
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path.insert(0, request["folder"])
    sys.argv[1:] = request["words"]
    if request["imports"] is not None:
        worker.IMPORTS = tuple(request["imports"])
    exec(compile(request["program"], "<program>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(sys.argv[1:])
