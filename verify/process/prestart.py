"""Starts the first worker before the command line is parsed, so that both import torch, which takes seconds, at the same time.

This module and what it imports use the standard library alone.
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
)  # with these options, the command needs other workers or other environments
Inherited = tuple[list[str], str | None]
_begun: list[tuple[dict[str, str], Inherited, Worker]] = []


def begin(words: Sequence[str]) -> None:
    """Start the worker that a command line will most likely need. Starts none for other commands or under torchrun."""
    options = {word.partition("=")[0] for word in words}
    if words[:1] and words[0] in COMMANDS and not options & {*ELSEWHERE} and "RANK" not in os.environ:
        environment = dict(NO_GPU) if "cpu" in _device(words) or not os.path.exists("/dev/nvidiactl") else _first_gpu()
        worker = Worker(environment=environment)
        worker.launch()
        _begun.append((environment, _inherited(), worker))
        atexit.register(worker.close)


def take(environment: Mapping[str, str], deadline_s: float) -> Worker | None:
    """Hand out the prestarted worker, once. None if a worker that starts now would get another environment or `sys.path`."""
    for index, (worker_environment, had, worker) in enumerate(_begun):
        if worker_environment == dict(environment) and had == _inherited():
            del _begun[index]
            worker.deadline_s = deadline_s
            return worker
    return None


def _inherited() -> Inherited:
    """What a worker inherits from the process that starts it and the command line may change."""
    return list(sys.path), os.environ.get("GDN_VERIFY_DENIED")  # DENIED of verify/execution/judging.py, which imports torch


def _device(words: Sequence[str]) -> set[str]:
    """The values of --device on the command line, in either form."""
    following = {after for word, after in itertools.pairwise(words) if word == "--device"}
    return following | {word.partition("=")[2] for word in words if word.startswith("--device=")}


def _first_gpu() -> dict[str, str]:
    """The environment that verify/gpu/device.py gives the first worker on a GPU, found without torch."""
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return {"CUDA_VISIBLE_DEVICES": (visible or ["0"])[0]}
