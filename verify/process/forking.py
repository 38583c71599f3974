"""The supervisor's side of processes that a server forks (fork_server.py): it starts servers, and asks them for children.

A worker that imports torch takes about a second to start, and a forked one milliseconds. This works on Linux alone: the libraries
of macOS do not survive a fork.
"""

import atexit
import contextlib
import errno
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from verify.process.fork_server import BEGAN, ENDED, FORK, RETIRE, early_variables, forked_server, imported, ready

HERE = sys.platform == "linux"
GONE_S = 2.0  # a server's end may be seen this long after the end of its pipes
_MOMENT_S = 0.05


class Forked:
    """A process that a server forks, with the part of subprocess.Popen that a supervisor needs. Any thread may call its methods.

    If the server could not fork, the first method that learns of it raises OSError, once.
    """

    def __init__(self, server: "subprocess.Popen[bytes] | _ForkedServer", status: int) -> None:
        self._server, self._status, self._received = server, status, b""
        self._lock = threading.RLock()  # held briefly; reentrant, since a signal handler may call a method in the middle of another
        self._number: int | None = None
        self._deserted = False  # its server is gone
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """The pid, which is also that of its process group. Waits while the server imports.

        ProcessLookupError if the process never started.
        """
        while self._number is None and self.returncode is None:
            self._read_messages(_MOMENT_S)
        if self._number is None:
            raise ProcessLookupError("the process never started")
        return self._number

    def poll(self) -> int | None:
        """The exit code, which is negative for a signal, or None while the process runs."""
        self._read_messages(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code. subprocess.TimeoutExpired after `timeout` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired("verify.process.fork_server", timeout or 0.0)
            self._read_messages(min(_MOMENT_S, max(0.0, end - time.monotonic())))
        assert self.returncode is not None
        return self.returncode

    def signal(self, number: int) -> None:
        """Send the process a signal, if it has started."""
        if self.poll() is None and self._number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._number, number)

    def kill(self) -> None:
        """Kill the process and every process that it started, which could outlive it. If it has not started, it never will."""
        with contextlib.suppress(OSError):
            self.poll()
        with self._lock:
            if self._number is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._number, signal.SIGKILL)
            elif self.returncode is None:
                self._end(-signal.SIGKILL)  # the server kills a child whose supervisor no longer reads

    def _read_messages(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for a message of the server, then read all that have arrived."""
        with self._lock:
            while self._read_message(wait_s):
                wait_s = 0.0

    def _read_message(self, wait_s: float) -> bool:
        """Read one message and store what it says. Returns whether there was one within `wait_s` seconds."""
        if self.returncode is not None:
            return False
        if self._deserted:
            time.sleep(wait_s)
            if not _runs(self._number):
                self._end(-signal.SIGKILL)  # without its server, nobody knows how it ended
            return False
        if not ready([self._status], wait_s):
            return False
        data = os.read(self._status, 64)
        self._received += data
        for line in self._received.split(b"\n")[:-1]:
            word, number = line[:1], int(line[1:])
            if word == BEGAN:
                self._number = number
            elif word == ENDED:
                self._end(number)
            else:
                self._fail(number)
            if self.returncode is not None:
                return True
        if not data and self._number is not None:
            self._deserted = True  # the process continues; the server was needed for its exit code alone
        elif not data:
            try:
                self._end(self._server.wait(GONE_S))
            except subprocess.TimeoutExpired:  # the server lives, but had no room for the descriptors that it was sent
                self._fail(errno.EMFILE)
        return True

    def _fail(self, number: int) -> NoReturn:
        self._end(os.EX_OSERR)
        raise OSError(number, f"no process could be forked: {os.strerror(number)}")

    def _end(self, code: int) -> None:
        self.returncode = code
        os.close(self._status)


def _runs(process: int | None) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


class _ForkedServer:
    """A fork of this process, with the part of subprocess.Popen that a supervisor needs. Any thread may call its methods."""

    def __init__(self, pid: int) -> None:
        self._pid, self._lock = pid, threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, which is negative for a signal, or None while the process runs."""
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self._pid, os.WNOHANG)
                except ChildProcessError:  # whoever started the supervisor had it ignore SIGCHLD, so nobody knows the code
                    pid, status = self._pid, 0
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for the end of the process and return its exit code. subprocess.TimeoutExpired after `timeout` seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(__name__, timeout)
            time.sleep(_MOMENT_S / 10)
        return code

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)


class _Server:
    """The supervisor's side of a server: the process, the socket on which it is asked, and its early variables."""

    def __init__(self, process: "subprocess.Popen[bytes] | _ForkedServer", asking: socket.socket, early: Mapping[str, str]) -> None:
        self.process, self._socket, self.early = process, asking, early

    @classmethod
    def start(cls, imports: Sequence[str], environment: Mapping[str, str], output: int) -> "_Server":
        """Start a process that imports. What it prints meanwhile goes to `output`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "verify.process.fork_server", str(theirs.fileno()), *imports],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
                env=dict(environment),
            )
            undo.pop_all()
        return cls(process, ours, early_variables(environment))

    def fork(self, asked: Mapping[str, Any], output: int, descriptors: Sequence[int]) -> Forked:
        """Request a child. OSError if the server is gone."""
        with contextlib.ExitStack() as undo:

            def mine(descriptor: int) -> int:
                undo.callback(os.close, descriptor)
                return descriptor

            request = mine(os.memfd_create("asked"))
            with open(request, "w", closefd=False) as file:
                json.dump(asked, file)
            directory = mine(os.open(".", os.O_PATH))
            status, theirs = os.pipe()
            mine(theirs)
            try:
                socket.send_fds(self._socket, [FORK], [theirs, request, output, directory, *descriptors])
                return Forked(self.process, status)
            except BaseException:
                os.close(status)
                raise

    def retire(self) -> None:
        """Let the server end once all its children have ended."""
        _retired.append(self)
        with contextlib.suppress(OSError):
            self._socket.send(RETIRE)

    def end(self) -> None:
        """End the server. Its children continue, and their exit codes are lost."""
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def forget(self) -> None:
        """Close this process's connection to the server, which belongs to another process."""
        self._socket.close()


_lock = threading.Lock()
_servers: dict[int, _Server] = {}
_retired: list[_Server] = []
_odd: dict[str, str] = {}  # the environment of the last child that had to be replaced by exec


def start(
    module: str,
    arguments: Sequence[str],
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    output: int,
    imports: Sequence[str],
    place: int = 0,
) -> Forked:
    """Start a process as `python -P -m module arguments... descriptors...` would, in its own process group, with `environment`.

    `module` has a function `main` that takes these words. The process writes to `output` and has no other file open but
    `descriptors`; its last arguments are their numbers in that process. `imports` are the modules that a server imports when it
    starts. Each `place` has its own server. A child whose environment differs from the server's replaces itself with exec; if the
    next call has that same environment, a new server is started with it.
    """
    global _odd
    asked = {"executable": sys.executable, "module": module, "arguments": list(arguments), "environment": dict(environment)}
    with _lock:
        for retired in [candidate for candidate in _retired if candidate.process.poll() is not None]:
            _retired.remove(retired)
            retired.end()
        early, server = early_variables(environment), _servers.get(place)
        if server is not None and server.process.poll() is None and (server.early == early or _odd != early):
            _odd = {} if server.early == early else early
            with contextlib.suppress(BrokenPipeError, ConnectionError):  # the server died just now
                return server.fork(asked, output, descriptors)
        if (replaced := _servers.pop(place, None)) is not None:
            replaced.retire()
        server = _serve_at(place, _Server.start(imports, environment, output))
        return server.fork(asked, output, descriptors)


def share(imports: Sequence[str], environment: Mapping[str, str], place: int = 0) -> None:
    """Import modules here, as a server with `environment` would, and fork that server from this process.

    So the modules are imported once for both. Forks nothing where the server could differ from one that `start` starts: outside
    Linux, beside other threads, under options of the interpreter, and without stdout or stderr. Nor does it if an import or the
    fork fails. `start` then starts a server.
    """
    options = itertools.takewhile(lambda word: word.startswith("-") and word not in ("-c", "-m"), sys.orig_argv[1:])
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    if not HERE or threading.active_count() > 1 or {*options} - {"-P"} or None in standard:
        return
    own = dict(os.environ)
    os.environ.update(environment)
    try:
        missed = imported(imports)
    finally:
        os.environ.clear()
        os.environ.update(own)
    if missed is None:
        return  # the worker imports the module again and reports the error
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return
    if not pid:
        forked_server(theirs.detach(), dict(environment), missed)
    theirs.close()
    _serve_at(place, _Server(_ForkedServer(pid), ours, early_variables(environment)))


def _serve_at(place: int, server: _Server) -> _Server:
    atexit.unregister(_end)
    atexit.register(_end)
    _servers[place] = server
    return server


def _end() -> None:
    for server in (*_servers.values(), *_retired):
        server.end()


def _forget() -> None:
    """Forget all servers in a fork of the supervisor, which starts its own when it needs them."""
    global _lock
    for server in (*_servers.values(), *_retired):
        server.forget()
    _lock = threading.Lock()
    _servers.clear()
    _retired.clear()
    atexit.unregister(_end)


os.register_at_fork(after_in_child=_forget)
