"""A server process that imports what all workers need and then forks them, so that each starts in milliseconds.

`python -m verify.process.fork_server SOCKET MODULE...` imports the modules once for its supervisor (forking.py); after that it only
waits and forks. A supervisor that needs the same modules imports them itself and forks the server.

A forked child must behave like a new process. If anything could differ (a variable that is read when Python or a library starts, a
module that would be found in another place), the child replaces itself by a new process, with exec. So a forked process differs
from a new one in three ways only: it starts sooner; it has the hash seed of its server; and its limits, umask, priority, affinity
and signal mask are those that the supervisor had when the server started.
"""

import contextlib
import errno
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, NoReturn

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
FORK, RETIRE = b"f", b"r"  # messages of a supervisor
BEGAN, ENDED, FAILED = b"b", b"e", b"f"  # messages of a server about a child: its pid, its exit code, the errno of a failed fork


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


def early_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that may be read before a fork."""
    return {name: word for name, word in environment.items() if not name.startswith(_LATE) and name not in _HANDLED}


def ready(descriptors: Sequence[int], wait_s: float | None) -> list[int]:
    """The descriptors that become readable within `wait_s` seconds. select.select cannot take descriptors from 1024 on."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(None if wait_s is None else 1000 * wait_s)]


class _Missed:
    """An import finder that comes last and finds nothing. It records the modules that no other finder has found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - as finders are called
        self.names.add(name)


def main(control: int, imports: Sequence[str]) -> None:
    """Run a server that was started."""
    began = dict(os.environ)
    _run(control, began, imported(imports))


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


def imported(imports: Sequence[str]) -> Collection[str] | None:
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

    `own` is the environment that the server has imported in, and `missed` what `imported` returned.
    """
    began = early_variables(own)
    default = [entry for entry in sys.path if entry and entry not in _python_path(own)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard, file in ((1, sys.stdout), (2, sys.stderr)):
        file.flush()
        os.dup2(nowhere, standard)
    request, descriptors = _next_request(control)
    environment: dict[str, str] = request["environment"]
    words = [*request["arguments"], *map(str, descriptors)]
    if missed is None or request["executable"] != sys.executable or began != early_variables(environment):
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
            there = ready([control, woken], None)
            if woken in there:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                _reap(running)
            if control not in there:
                continue
            message, received, flags, _ = socket.recv_fds(asking, 1, 16)
            if not message:
                os._exit(0)
            if message == RETIRE:
                retired = True
                continue
            try:
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "there is no room for all descriptors")
                child = os.fork()
            except OSError as error:
                if received:
                    _send(received[0], FAILED, error.errno or 0)
                for descriptor in received:
                    os.close(descriptor)
                continue
            status, request, output, directory, *descriptors = received
            if child:
                with contextlib.suppress(OSError):  # the child has done it already
                    os.setpgid(child, child)  # before its supervisor can want to kill the group
                running[child] = status
                if not _send(status, BEGAN, child):
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
            _send(pipe, ENDED, os.waitstatus_to_exitcode(status))
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
