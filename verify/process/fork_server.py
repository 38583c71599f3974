"""A server process that imports what all workers need and then forks them, so that each starts in milliseconds.

A worker that imports torch takes about a second to start. `python -m verify.process.fork_server SOCKET MODULE...` imports the
modules once for its supervisor; after that it only waits and forks. A supervisor that needs the same modules imports them itself
and forks the server, with `share`.

A forked child must behave like a new process. If anything could differ (a variable that is read when Python or a library starts, a
module that would be found in another place), the child replaces itself by a new process, with exec. So a forked process differs
from a new one in three ways only: it starts sooner; it has the hash seed of its server; and its limits, umask, priority, affinity
and signal mask are those that the supervisor had when the server started.

This works on Linux alone: the libraries of macOS do not survive a fork.
"""

import atexit
import contextlib
import errno
import gc
import importlib
import io
import itertools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, NoReturn

HERE = sys.platform == "linux"
GONE_S = 2.0  # a server's end may be seen this long after the end of its pipes
_MOMENT_S = 0.05
# Prefixes of variables that nothing reads before the fork, so that a child may have other values than its server.
_LATE = (
    "FLA_",
    "GDN_VERIFY_",
    "GLOO_SOCKET_",
    "LOCAL_",
    "MASTER_",
    "NCCL_SOCKET_",
    "PYTEST_",
    "RANK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_",
    "WORLD_SIZE",
)
_HANDLED = ("PYTHONPATH", "PWD", "OLDPWD", "_")  # set in the child, or without effect
_FORK, _RETIRE = b"f", b"r"  # messages of a supervisor
_BEGAN, _ENDED, _FAILED = b"b", b"e", b"f"  # messages of a server about a child: its pid, its exit code, the errno of a failed fork


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Switch the garbage collector off while modules are imported. The objects that they create stay, so it need not visit them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def _early_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that may be read before a fork."""
    return {name: word for name, word in environment.items() if not name.startswith(_LATE) and name not in _HANDLED}


# The supervisor's side


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
        if not _ready([self._status], wait_s):
            return False
        data = os.read(self._status, 64)
        self._received += data
        for line in self._received.split(b"\n")[:-1]:
            word, number = line[:1], int(line[1:])
            if word == _BEGAN:
                self._number = number
            elif word == _ENDED:
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


def _ready(descriptors: Sequence[int], wait_s: float | None) -> list[int]:
    """The descriptors that become readable within `wait_s` seconds. select.select cannot take descriptors from 1024 on."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(None if wait_s is None else 1000 * wait_s)]


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
        return cls(process, ours, _early_variables(environment))

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
                socket.send_fds(self._socket, [_FORK], [theirs, request, output, directory, *descriptors])
                return Forked(self.process, status)
            except BaseException:
                os.close(status)
                raise

    def retire(self) -> None:
        """Let the server end once all its children have ended."""
        _retired.append(self)
        with contextlib.suppress(OSError):
            self._socket.send(_RETIRE)

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
        early, server = _early_variables(environment), _servers.get(place)
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
        missed = _imported(imports)
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
    _serve_at(place, _Server(_ForkedServer(pid), ours, _early_variables(environment)))


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


# The server's side


class _Missed:
    """An import finder that comes last and finds nothing. It records the modules that no other finder has found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - as finders are called
        self.names.add(name)


def main(control: int, imports: Sequence[str]) -> None:
    """Run a server that was started."""
    began = dict(os.environ)
    _run(control, began, _imported(imports))


def forked_server(control: int, environment: Mapping[str, str], missed: Collection[str]) -> NoReturn:
    """Run a server in a fork of its supervisor. It closes the supervisor's files and leaves its terminal.

    The frames outside this function are those of the supervisor. So where its name stands, the stack of a worker ends (worker.py).
    """
    try:
        os.setsid()  # Ctrl-C reaches the supervisor alone
        sys.modules["__main__"] = sys.modules[__name__]  # what an adapter spawns runs the main module again
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _close_all_but([control])
        for name, standard in (("stdout", 1), ("stderr", 2)):  # unbuffered, as PYTHONUNBUFFERED makes them
            before = getattr(sys, f"__{name}__")
            raw = io.FileIO(standard, "w", closefd=False)
            stream = io.TextIOWrapper(raw, before.encoding, before.errors, write_through=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        _run(control, environment, missed)
    except Exception:  # it must not reach the supervisor's own handlers, which are further out on the stack
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    raise SystemExit(0)


def _imported(imports: Sequence[str]) -> Collection[str] | None:
    """Import modules. Returns the names of those modules that were looked for and not found; None if an import failed."""
    missed = _Missed()
    sys.meta_path.append(missed)
    try:
        with importing():
            for module in imports:
                importlib.import_module(module)
    except Exception:  # the child imports the module again and reports the error
        return None
    finally:
        sys.meta_path.remove(missed)
    return missed.names


def _run(control: int, own: Mapping[str, str], missed: Collection[str] | None) -> None:
    """Serve. `_next_request` returns only in a forked child, which runs the rest of this function.

    `own` is the environment that the server has imported in, and `missed` what `_imported` returned.
    """
    began = _early_variables(own)
    default = [entry for entry in sys.path if entry and entry not in _python_path(own)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard, file in ((1, sys.stdout), (2, sys.stderr)):
        file.flush()
        os.dup2(nowhere, standard)
    request, descriptors = _next_request(control)
    environment: dict[str, str] = request["environment"]
    words = [*request["arguments"], *map(str, descriptors)]
    if missed is None or request["executable"] != sys.executable or began != _early_variables(environment):
        _replace(request, words)
    os.environ.clear()
    os.environ.update(environment)
    path = list(dict.fromkeys([*_python_path(environment), *default]))
    importlib.invalidate_caches()
    if path != sys.path:
        names = {name for name in (*sys.modules, *missed, "sitecustomize", "usercustomize") if "." not in name}
        before = _places(names)
        sys.path[:] = path
        if _places(names) != before:
            _replace(request, words)
    sys.argv[1:] = words
    importlib.import_module(request["module"]).main(words)


def _next_request(control: int) -> tuple[dict[str, Any], list[int]]:
    """Fork a child for each request and reap children that have ended, until the server is retired or its supervisor is gone.

    Returns only in a child, with the request and the descriptors that the child keeps.
    """
    running: dict[int, int] = {}  # for each child, the pipe on which its supervisor reads what becomes of it
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    with socket.socket(fileno=control) as asking:
        retired = False
        while running or not retired:
            ready = _ready([control, woken], None)
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                _reap(running)
            if control not in ready:
                continue
            message, received, flags, _ = socket.recv_fds(asking, 1, 16)
            if not message:
                os._exit(0)
            if message == _RETIRE:
                retired = True
                continue
            try:
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "there is no room for all descriptors")
                child = os.fork()
            except OSError as error:
                if received:
                    _send(received[0], _FAILED, error.errno or 0)
                for descriptor in received:
                    os.close(descriptor)
                continue
            status, request, output, directory, *descriptors = received
            if child:
                with contextlib.suppress(OSError):  # the child has done it already
                    os.setpgid(child, child)  # before its supervisor can want to kill the group
                running[child] = status
                if not _send(status, _BEGAN, child):
                    os.killpg(child, signal.SIGKILL)
                for descriptor in (request, output, directory, *descriptors):
                    os.close(descriptor)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asking.detach()
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            os.fchdir(directory)
            for standard in (1, 2):
                os.dup2(output, standard)
            with open(request, closefd=False) as file:
                file.seek(0)
                asked = json.load(file)
            _close_all_but(descriptors)
            return asked, descriptors
    os._exit(0)


def _close_all_but(descriptors: Collection[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
                os.close(descriptor)


def _reap(running: dict[int, int]) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        if (pipe := running.pop(child, None)) is not None:
            _send(pipe, _ENDED, os.waitstatus_to_exitcode(status))
            os.close(pipe)


def _send(pipe: int, word: bytes, number: int) -> bool:
    """Send a message about a child. Returns whether its supervisor still reads."""
    try:
        os.write(pipe, b"%b%d\n" % (word, number))
    except BrokenPipeError:
        return False
    return True


def _python_path(environment: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH, absolute, as Python puts them on sys.path."""
    folders = environment.get("PYTHONPATH", "")
    return [os.path.abspath(folder) for folder in folders.split(os.pathsep)] if folders else []


def _places(names: Collection[str]) -> dict[str, str | None]:
    """The places of those modules that are found on the present sys.path."""
    found = {name: PathFinder.find_spec(name) for name in names}
    return {name: spec.origin for name, spec in found.items() if spec is not None}


def _replace(request: Mapping[str, Any], words: Sequence[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(request["executable"], [request["executable"], "-P", "-m", request["module"], *words], request["environment"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
