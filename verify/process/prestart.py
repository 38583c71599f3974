"""Starts the first worker before the command imports the rest of what it needs, which takes seconds.

With a GPU both import torch at the same time. Without one this process imports it first, and forks the server of its workers.

This module and what it imports use the standard library alone.
"""

import atexit
import os
import sys
from collections.abc import Mapping

from verify.process.worker import NO_GPU, Worker

_begun: list[tuple[dict[str, str], list[str], Worker]] = []  # each with its environment and the sys.path that it inherits


def begin(device: str | None) -> None:
    """Start the first worker of a device; of a GPU, if there is one, for None. Starts none under torchrun."""
    if "RANK" not in os.environ:
        no_gpu = device == "cpu" or not os.path.exists("/dev/nvidiactl")
        environment = dict(NO_GPU) if no_gpu else _first_gpu()
        worker = Worker(environment=environment)
        if no_gpu and "torch" not in sys.modules:
            worker.share_imports()
        worker.launch()
        _begun.append((environment, list(sys.path), worker))
        atexit.register(worker.close)


def take(environment: Mapping[str, str], deadline_s: float, *, sequential: bool = False) -> Worker | None:
    """Hand out the prestarted worker, once. None if a worker that starts now would get another environment or `sys.path`."""
    for index, (worker_environment, path, worker) in enumerate(_begun):
        if worker_environment == dict(environment) and path == sys.path:
            del _begun[index]
            worker.deadline_s, worker.sequential = deadline_s, sequential
            return worker
    return None


def _first_gpu() -> dict[str, str]:
    """The environment that verify/gpu/device.py gives the first worker on a GPU, found without torch."""
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return {"CUDA_VISIBLE_DEVICES": (visible or ["0"])[0]}
