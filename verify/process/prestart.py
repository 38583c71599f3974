"""Starts the first worker before the command imports torch, which takes seconds, so that both import it at the same time.

This module and what it imports use the standard library alone.
"""

import argparse
import atexit
import os
import sys
from collections.abc import Mapping

from verify.process.environment import DENIED
from verify.process.worker import NO_GPU, Worker

VERBS = ("check", "soak")
ELSEWHERE = ("ranks", "deny", "sanitize")  # with these options, the command needs other workers or other environments
Inherited = tuple[list[str], str | None]
_begun: list[tuple[dict[str, str], Inherited, Worker]] = []


def begin(options: argparse.Namespace) -> None:
    """Start the worker that a command will most likely need. Starts none for other verbs or under torchrun."""
    if options.verb in VERBS and not any(getattr(options, name, None) for name in ELSEWHERE) and "RANK" not in os.environ:
        no_gpu = options.device == "cpu" or not os.path.exists("/dev/nvidiactl")
        environment = dict(NO_GPU) if no_gpu else _first_gpu()
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
    """What a worker inherits from the process that starts it and a command may change."""
    return list(sys.path), os.environ.get(DENIED)


def _first_gpu() -> dict[str, str]:
    """The environment that verify/gpu/device.py gives the first worker on a GPU, found without torch."""
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return {"CUDA_VISIBLE_DEVICES": (visible or ["0"])[0]}
