"""Processes that begin at once: one that has imported what they all import forks them.

Importing torch takes longer than most questions to a worker. So `python -m verify.forks SOCKET MODULE...` imports for its
supervisor, and then only waits and forks. A child in which anything would differ from a process of its own (a variable that is
read when Python or a library starts, a module that would be found in another place) becomes such a process, by exec. So how a
process began shows in nothing but the time that it takes. Linux alone: the libraries of macOS do not survive a fork.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, NoReturn

HERE = sys.platform == "linux"
# What may differ: Python and torch do not read these when they start, nor does anything else before the fork.
_LATE = (
    "FLA_",
    "GDN_VERIFY_",
    "GLOO_SOCKET_",
    "LOCAL_",
    "MASTER_",
    "NCCL_SOCKET_",
    "PYTEST_",
    "RANK",
    "TORCHINDUCTOR_",
    "TRITON_",
    "WORLD_SIZE",
)
_FORK, _RETIRE = b"f", b"r"  # what a supervisor says
_HANDLED = ("PYTHONPATH", "PWD", "OLDPWD", "_")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """No garbage is looked for while modules are imported: what they make stays, and is not looked at afterwards either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment may be read before a fork."""
    return {name: word for name, word in environment.items() if not name.startswith(_LATE) and name not in _HANDLED}


# The supervisor's side


class Forked:
    """A process that the server forked: what a supervisor needs of subprocess.Popen. Its methods are safe from any thread."""

    def __init__(self, server: "subprocess.Popen[bytes]", status: int) -> None:
        self._server, self._status, self._said = server, status, b""
        self._lock = threading.Lock()
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Its number, and that of its process group; waits while the server imports. ProcessLookupError if it never began."""
        with self._lock:
            while self.returncode is None and b"\n" not in self._said:
                self._hear(None)
        if b"\n" not in self._said:
            raise ProcessLookupError("it never began")
        return int(self._said.split(b"\n")[0])

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        with self._lock:
            self._hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code once it ended. subprocess.TimeoutExpired if it does not in time."""
        with self._lock:
            while self.returncode is None and self._hear(timeout):
                pass
        if self.returncode is None:
            raise subprocess.TimeoutExpired("verify.forks", timeout or 0.0)
        return self.returncode

    def _hear(self, wait_s: float | None) -> bool:
        """Whether the server has said something in time, or is gone; see `_Server.bury` for what it says."""
        if self.returncode is not None or not select.select([self._status], [], [], wait_s)[0]:
            return False
        data = os.read(self._status, 64)
        self._said += data
        lines = self._said.split(b"\n")
        if len(lines) == 3:
            self.returncode = int(lines[1])
        elif not data:  # nobody can say how it ends: it ends now
            self.returncode = -signal.SIGKILL
            if len(lines) == 2:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(lines[0]), signal.SIGKILL)
            else:
                self.returncode = self._server.wait()
        if self.returncode is not None:
            os.close(self._status)
        return True


class _Server:
    """The process that forks. Its words while it imports go to `output`."""

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", "verify.forks", str(theirs.fileno()), *imports]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the supervisor
                env=dict(environment),
            )
        self._socket, self.early = ours, _early(environment)

    def fork(self, asked: Mapping[str, Any], output: int, descriptors: Sequence[int]) -> Forked:
        """Ask for a child. OSError if the server is gone."""
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
                socket.send_fds(self._socket, [_FORK], [request, output, directory, theirs, *descriptors])
            except OSError:
                os.close(status)
                raise
        return Forked(self.process, status)

    def retire(self) -> None:
        """Have it end once its children did."""
        with contextlib.suppress(OSError):
            self._socket.send(_RETIRE)
        _retired.append(self)
        for each in [each for each in _retired if each.process.poll() is not None]:
            _retired.remove(each)
            each.end()

    def end(self) -> None:
        """End it; its children go on, and nobody hears of them."""
        self.process.kill()
        self.process.wait()
        self._socket.close()


_lock = threading.Lock()
_server: _Server | None = None
_retired: list[_Server] = []
_odd: dict[str, str] = {}  # the environment of the last child that had to be a process of its own


def start(
    module: str,
    arguments: Sequence[str],
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    output: int,
    imports: Sequence[str],
) -> Forked:
    """Do as `python -P -m module arguments... descriptors...` does, in a process group of its own, with this environment.

    `module` has a function `main` that takes these words. It writes to `output`, and has nothing open besides but `descriptors`,
    whose numbers there are its last arguments. `imports` are the modules to be there already; the first call decides. A child that
    has to be a process of its own because of its environment is one; the next with that environment gets a server that has it.
    """
    global _server, _odd
    asked = {"executable": sys.executable, "module": module, "arguments": list(arguments), "environment": dict(environment)}
    with _lock:
        early = _early(environment)
        if _server is not None and _server.process.poll() is None and (_server.early == early or _odd != early):
            _odd = {} if _server.early == early else early
            with contextlib.suppress(OSError):  # it died this moment
                return _server.fork(asked, output, descriptors)
        if _server is None:
            atexit.register(_end)
        else:
            _server.retire()
        _server = _Server(imports, environment, output)
        return _server.fork(asked, output, descriptors)


def _end() -> None:
    for each in (_server, *_retired):
        if each is not None:
            each.end()


def _forget() -> None:
    """A child of the supervisor's own has its own server, or none."""
    global _lock, _server
    _lock, _server, _retired[:] = threading.Lock(), None, []
    atexit.unregister(_end)


os.register_at_fork(after_in_child=_forget)


# The server's side


def main(control: int, imports: Sequence[str]) -> None:
    """The server's life; and, where this returns from `_asked`, that of a child."""
    began, whole = _early(os.environ), False
    default = [each for each in sys.path if each not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with importing(), contextlib.suppress(Exception):  # who asks for it meets the same, and says so
        for each in imports:
            importlib.import_module(each)
        whole = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    request, descriptors = _asked(control)
    environment: dict[str, str] = request["environment"]
    words = [*request["arguments"], *map(str, descriptors)]
    if not whole or request["executable"] != sys.executable or began != _early(environment):
        _replace(request, words)
    os.environ.clear()
    os.environ.update(environment)
    path = list(dict.fromkeys([*map(os.path.abspath, environment.get("PYTHONPATH", "").split(os.pathsep)), *default]))
    importlib.invalidate_caches()
    if path != sys.path:
        sys.path[:] = path
        if _elsewhere():
            _replace(request, words)
    sys.argv[1:] = words
    importlib.import_module(request["module"]).main(words)


def _asked(control: int) -> tuple[dict[str, Any], list[int]]:
    """Fork for whoever asks, and bury who died, until nobody asks any more. Returns in a child alone: what it is to be."""
    running: dict[int, int] = {}  # the pipe on which its supervisor hears of each child
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    with socket.socket(fileno=control) as asking:
        retired = False
        while running or not retired:
            ready, _, _ = select.select([control, woken], [], [])
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                _bury(running)
            if control not in ready:
                continue
            message, given, _, _ = socket.recv_fds(asking, 1, 16)
            if not message:
                os._exit(0)
            if message == _RETIRE:
                retired = True
                continue
            request, output, directory, status, *descriptors = given
            if child := os.fork():
                with contextlib.suppress(OSError):  # the child did it
                    os.setpgid(child, child)  # before its supervisor can want to kill the group
                running[child] = status
                _say(status, child)
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
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in descriptors:
                    with contextlib.suppress(OSError):  # the list's own is gone
                        os.close(descriptor)
            return asked, descriptors
    os._exit(0)


def _bury(running: dict[int, int]) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        pipe = running.pop(child)
        _say(pipe, os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _say(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # its supervisor does not listen any more
        os.write(pipe, f"{number}\n".encode())


def _elsewhere() -> bool:
    """Whether a fresh process would find any module that is here in another place."""
    for name, module in list(sys.modules.items()):
        here = getattr(getattr(module, "__spec__", None), "origin", None)
        if "." not in name and here and os.path.isabs(here):  # not "built-in", not "frozen"
            found = PathFinder.find_spec(name)
            if found is not None and found.origin and found.origin != here:
                return True
    return False


def _replace(request: Mapping[str, Any], words: Sequence[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(request["executable"], [request["executable"], "-P", "-m", request["module"], *words], request["environment"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
