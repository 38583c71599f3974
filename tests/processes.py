"""What a test may ask about processes: which live, and what this one has left."""

import contextlib
import os
import pathlib
import time
from collections.abc import Collection

SOON_S = 4.0  # a killed process has ended by then, on a busy machine too; one that nobody ends lives for ALONE_S or longer


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which only its parent can bury, does not."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids: Collection[int], within_s: float) -> bool:
    """Whether none of them runs, or ends in time."""
    end = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def opened() -> set[str]:
    """The files, pipes and sockets that this process has open.

    What a test leaves open is what was not open before; a number of them would count what an earlier test still closes.
    """
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found - {f"/proc/{os.getpid()}/fd"}


def children(of: int | str = "self") -> set[int]:
    """The processes that this one, or another, started and has not buried."""
    return {int(pid) for task in pathlib.Path(f"/proc/{of}/task").iterdir() for pid in (task / "children").read_text().split()}


def family(of: int) -> set[int]:
    """The processes that another started, and those that they started."""
    return children(of).union(*map(family, children(of)))
