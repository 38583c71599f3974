"""The store: writes the runs that are under way, and every finding, to disk before anything else happens."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import threading
from typing import Any

FOLDER = ".gdn-verify"


class Store:
    """The files `findings.jsonl`, with one finding on each line, and `under-way-<pid>.txt`, with the runs that have not ended.

    A full or read-only disk does not stop a check: `trouble` then has one line about it, and the findings are only printed.
    """

    def __init__(self, folder: str | os.PathLike[str] = FOLDER) -> None:
        self.folder = pathlib.Path(folder)
        self.trouble: str | None = None
        self._lock = threading.Lock()
        self._under_way: dict[int, str] = {}
        self._begun = self.folder / f"under-way-{os.getpid()}.txt"
        self._file = -1  # its descriptor, which stays open: to open it for each run would take more time than short runs do

    def begin(self, line: str) -> None:
        """Write a run to disk before it starts."""
        with self._lock:
            self._under_way[threading.get_ident()] = line
            self._write_begun()

    def end(self) -> None:
        """Remove the run that this thread began."""
        with self._lock:
            self._under_way.pop(threading.get_ident(), None)
            self._write_begun()

    def keep(self, finding: dict[str, Any]) -> None:
        """Append a finding to `findings.jsonl` and flush it to disk."""
        line = (json.dumps(finding) + "\n").encode()
        with self._lock, self._trying():
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "findings.jsonl", "ab+", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # two checks may write to one folder
                if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    line = b"\n" + line  # an earlier write stopped in the middle of a line
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())

    def close(self) -> None:
        """Remove this process' file of runs under way."""
        with self._lock, contextlib.suppress(OSError):
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            self._begun.unlink(missing_ok=True)

    def left_behind(self) -> list[str]:
        """Lines of runs that were under way when an earlier check died. Each is returned once, then its file is deleted."""
        lines: list[str] = []
        for path in sorted(self.folder.glob("under-way-*.txt")):
            pid = path.stem.rpartition("-")[2]
            if not (pid.isdecimal() and len(pid) < 10) or _alive(int(pid)):
                continue
            with contextlib.suppress(OSError):
                lines += [line for line in path.read_text(errors="replace").splitlines()[:64] if line]
                path.unlink()
        return lines

    def _write_begun(self) -> None:
        with self._trying():
            if self._file < 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._begun, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._file, 0)
            lines = "".join(f"{line}\n" for line in self._under_way.values()).encode()
            if os.pwrite(self._file, lines, 0) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def _trying(self) -> Any:
        try:
            yield
        except OSError as error:
            if self.trouble is None:
                self.trouble = f"cannot write to {self.folder}: {error.strerror}; findings are printed and not stored"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
