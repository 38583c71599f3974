"""The first worker, started before the command line is read: it imports torch for seconds, as the command does after this.

Only the standard library is imported here.
"""

import atexit
import itertools
import os
import sys
from collections.abc import Mapping, Sequence

from verify.process.worker import NO_GPU, Worker

COMMANDS = ("check", "soak")
ELSEWHERE = (
    "-h",
    "--help",
    "--ranks",
    "--deny",
    "--sanitize",
    "--path",
    "--interpreter",
)  # other workers, or another environment of them
Inherited = tuple[list[str], str | None]
_begun: list[tuple[dict[str, str], Inherited, Worker]] = []


def begin(words: Sequence[str]) -> None:
    """Start what a command line will most likely ask for; nothing if it is another command, or torchrun's."""
    given = {word.partition("=")[0] for word in words}
    if words[:1] and words[0] in COMMANDS and not given & {*ELSEWHERE} and "RANK" not in os.environ:
        environment = dict(NO_GPU) if "cpu" in _device(words) or not os.path.exists("/dev/nvidiactl") else _first_gpu()
        worker = Worker(environment=environment)
        worker.launch()
        _begun.append((environment, _inherited(), worker))
        atexit.register(worker.close)


def take(environment: Mapping[str, str], deadline_s: float) -> Worker | None:
    """The worker that was begun, if it has this environment and what one has that begins now; it is given away once."""
    for index, (own, had, worker) in enumerate(_begun):
        if own == dict(environment) and had == _inherited():
            del _begun[index]
            worker.deadline_s = deadline_s
            return worker
    return None


def _inherited() -> Inherited:
    """What the command line may change of what a worker has from the process that starts it."""
    return list(sys.path), os.environ.get("GDN_VERIFY_DENIED")  # DENIED of verify/execution/run.py, which imports torch


def _device(words: Sequence[str]) -> set[str]:
    """What is said of --device, in either form."""
    following = {after for word, after in itertools.pairwise(words) if word == "--device"}
    return following | {word.partition("=")[2] for word in words if word.startswith("--device=")}


def _first_gpu() -> dict[str, str]:
    """As verify/gpu/device.py gives the first worker its GPU, without asking torch."""
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return {"CUDA_VISIBLE_DEVICES": (visible or ["0"])[0]}
