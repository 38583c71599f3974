"""What a command runs on: the device, workers, ranks, a sanitizer."""

import argparse
import contextlib
import os
from collections.abc import Iterator

from verify.adapters.loader import check_requirements
from verify.cli.exits import NoGpu
from verify.engine.asking import Asked
from verify.execution import sanitizer as sanitize
from verify.execution.judging import DENIED
from verify.gpu import autotune as tuning
from verify.gpu import device as devices
from verify.process.worker import Worker
from verify.ranks.group import RankGroup
from verify.ranks.torchrun import Launch, TorchrunGroup

DEADLINE_S, SLOW_S = 120.0, 1200.0  # kernels take ten times as long under a sanitizer, or a hundred times
COMPILERS = 14  # each holds half a gigabyte of the GPU's memory


def read_deny_list(path: str | None, *, new: bool = False) -> None:
    """Workers are told of the deny-list by their environment. ValueError names the file and what is wrong with it."""
    os.environ.pop(DENIED, None)
    if path is None or (new and not os.path.exists(path)):
        return
    try:
        tuning.read_denied(path)
    except OSError as error:
        raise ValueError(f"--deny must name a file that can be read, got {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--deny {path}: {error}") from None
    os.environ[DENIED] = os.path.abspath(path)


def compilers_of(device: str) -> int:
    """How many processes compile ahead: as many as cores, less the supervisor's and the worker's."""
    return 0 if device == "cpu" else max(0, min(COMPILERS, (os.cpu_count() or 1) - 2))


def deadline_of(options: argparse.Namespace) -> float:
    """After how many seconds without an answer a run counts as a hang."""
    return float(options.deadline or (SLOW_S if getattr(options, "sanitize", None) else DEADLINE_S))


def sanitizer_of(options: argparse.Namespace) -> sanitize.Sanitizer | None:
    """The sanitizer that is asked for. NoSanitizer or NoGpu where there is none, or nothing to watch."""
    if not options.sanitize:
        return None
    program = sanitize.find()
    if not devices.gpus():
        raise NoGpu("--sanitize needs a GPU, and torch sees none")
    return sanitize.Sanitizer(options.sanitize, program)


def backend_of(options: argparse.Namespace, ranks: int, device: str | None) -> str:
    """What ranks of this host communicate over: as asked, else NCCL where `device` allows it and there is a GPU for each rank.

    ValueError for a backend that does not go with the device, NoGpu for GPUs that are not there.
    """
    if options.backend and device and (options.backend == "nccl") is not (device == "cuda"):
        raise ValueError(f"--backend must be {'nccl' if device == 'cuda' else 'gloo'} for ranks on {device}, got {options.backend}")
    if device == "cuda" and devices.gpus() < ranks:
        raise NoGpu(f"{ranks} ranks on cuda need a GPU each, and torch sees {devices.gpus() or 'none'}")
    if options.backend:
        return str(options.backend)
    return "nccl" if device != "cpu" and devices.gpus() >= ranks else "gloo"


def device_of(asked: str | None) -> str:
    """Where kernels run: as asked, or on a GPU if there is one. NoGpu where one is asked for in vain."""
    if asked == "cuda" and not devices.gpus():
        raise NoGpu("--device cuda needs a GPU, and torch sees none")
    return asked or ("cuda" if devices.gpus() else "cpu")


def workers_of(
    options: argparse.Namespace, launch: Launch | None, device: str, sanitizer: sanitize.Sanitizer | None = None
) -> int | list[Asked]:
    """How many processes to start, or those under a sanitizer, or the ranks that answer as one."""
    backend = "nccl" if device == "cuda" else "gloo"
    if launch is not None:
        if options.ranks not in (None, launch.size):
            raise ValueError(f"--ranks must be the {launch.size} that torchrun started, got {options.ranks}")
        return [TorchrunGroup(launch, backend, deadline_of(options))]
    if getattr(options, "ranks", None):
        return [RankGroup(options.ranks, backend, deadline_of(options))]
    count = count_of(options, device)
    return count if sanitizer is None else [sanitizer.worker(deadline_of(options), device, each) for each in range(count)]


def count_of(options: argparse.Namespace, device: str) -> int:
    """How many workers run cases: as asked, else one for each GPU, or one for each core and at most four."""
    return int(getattr(options, "workers", 1) or (devices.gpus() if device == "cuda" else min(os.cpu_count() or 1, 4)))


@contextlib.contextmanager
def ended(workers: int | list[Asked]) -> Iterator[None]:
    """Ranks end with the command, and those who follow are let go."""
    try:
        yield
    finally:
        for each in workers if isinstance(workers, list) else ():
            each.close()


def place_of(asked: Asked) -> str:
    """Whether the ranks of a path are simulated, or how they communicate, in words."""
    return "ranks simulated" if isinstance(asked, Worker) else f"{asked.size} ranks over {asked.backend}"


def check_installed(spec: str) -> None:
    """Refuse at once, before any worker starts, when what a built-in adapter needs is missing or too old."""
    if spec.startswith("fla/"):
        from verify.adapters.fla import REQUIRES

        check_requirements(spec, REQUIRES)
