"""What a command runs on: the device, the workers, the ranks, a sanitizer."""

import contextlib
import os
from collections.abc import Iterator

from verify.adapters.loader import check_requirements
from verify.cli.verb_options import CheckOptions, Limits, Processes, Ranks
from verify.execution import sanitizer as sanitize
from verify.gpu import device as devices
from verify.gpu import policies
from verify.process.choices import NoGpu
from verify.process.cores import cores
from verify.process.worker import Worker
from verify.ranks.group import Answering, RankGroup
from verify.ranks.torchrun import Launch, TorchrunGroup

DEADLINE_S, SLOW_S = 120.0, 1200.0  # under a sanitizer kernels take 10 to 100 times as long
COMPILERS = 16  # each holds half a gigabyte of the GPU's memory
SHARING = 6  # the most workers of a kernel for each GPU
ENGINES = 8  # the most workers of a serving engine: there are 8 laws of traces


def read_deny_list(path: str | None, *, new: bool = False) -> list[policies.Denied]:
    """The deny-list in a file; empty without a path, and if the file is `new` and need not exist.

    ValueError names the file and what is wrong with it.
    """
    if path is None or (new and not os.path.exists(path)):
        return []
    try:
        return policies.read_denied(path)
    except OSError as error:
        raise ValueError(f"--deny must name a file that can be read, got {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--deny {path}: {error}") from None


def compilers_of(device: str) -> int:
    """How many processes compile ahead: one for each core, at most COMPILERS; none on a CPU. They give way to the workers."""
    return 0 if device == "cpu" else min(COMPILERS, cores())


def deadline_of(options: Limits) -> float:
    """The seconds without an answer after which a run counts as a hang."""
    slow = isinstance(options, Processes) and options.sanitize
    return options.deadline or (SLOW_S if slow else DEADLINE_S)


def sanitizer_of(tool: str | None) -> sanitize.Sanitizer | None:
    """The sanitizer of `--sanitize`, or None without it. NoSanitizer if it is not installed, NoGpu if there is no GPU."""
    if not tool:
        return None
    program = sanitize.find()
    if not devices.gpus():
        raise NoGpu("--sanitize needs a GPU, and torch sees none")
    return sanitize.Sanitizer(tool, program)


def backend_of(options: Ranks, ranks: int, device: str | None) -> str:
    """The communication backend of ranks on this host: `--backend`, or NCCL if there is a GPU for each rank, or Gloo.

    ValueError if the backend does not fit the device, NoGpu if there are too few GPUs.
    """
    if options.backend and device and (options.backend == "nccl") is not (device == "cuda"):
        raise ValueError(f"--backend must be {'nccl' if device == 'cuda' else 'gloo'} for ranks on {device}, got {options.backend}")
    if device == "cuda" and devices.gpus() < ranks:
        raise NoGpu(f"{ranks} ranks on cuda need a GPU each, and torch sees {devices.gpus() or 'none'}")
    if options.backend:
        return options.backend
    return "nccl" if device != "cpu" and devices.gpus() >= ranks else "gloo"


def device_of(asked: str | None) -> str:
    """The device on which kernels run: the requested one, or a GPU if there is one. NoGpu if "cuda" is requested without a GPU."""
    if asked == "cuda" and not devices.gpus():
        raise NoGpu("--device cuda needs a GPU, and torch sees none")
    return asked or ("cuda" if devices.gpus() else "cpu")


def workers_of(
    options: Processes, launch: Launch | None, device: str, sanitizer: sanitize.Sanitizer | None = None
) -> int | list[Answering]:
    """The number of workers to start; or a list with the workers under a sanitizer, or with the group of ranks."""
    backend = "nccl" if device == "cuda" else "gloo"
    if launch is not None:
        if options.ranks not in (None, launch.size):
            raise ValueError(f"--ranks must be the {launch.size} that torchrun started, got {options.ranks}")
        return [TorchrunGroup(launch, backend, deadline_of(options), sequential=options.sequential)]
    if options.ranks:
        return [RankGroup(options.ranks, backend, deadline_of(options), sequential=options.sequential)]
    count = count_of(options.workers, device) if isinstance(options, CheckOptions) else 1
    return count if sanitizer is None else [sanitizer.worker(deadline_of(options), device, index) for index in range(count)]


def count_of(workers: int | None, device: str) -> int:
    """How many workers run cases: `--workers`, or one for each GPU, or on a CPU one for each core, at most four."""
    return workers or (devices.gpus() if device == "cuda" else min(cores(), 4))


def engine_workers_of(workers: int | None) -> int:
    """The least number of workers for a serving engine on GPUs: `--workers`, or one for every two cores, at most ENGINES."""
    return workers or min(ENGINES, cores() // 2)


def gpu_workers_of(workers: int | None) -> int:
    """The least number of workers for kernels on GPUs: `--workers`, or one for every two cores, at most SHARING for each GPU."""
    return workers or min(SHARING * devices.gpus(), cores() // 2)


@contextlib.contextmanager
def ended(workers: int | list[Answering]) -> Iterator[None]:
    """Close the given workers and ranks when the command ends. Under torchrun this also releases the other ranks."""
    try:
        yield
    finally:
        for worker in workers if isinstance(workers, list) else ():
            worker.close()


def tell_ranks(workers: int | list[Answering], code: int) -> None:
    """Under torchrun, let the other ranks end with the exit code of the command too, so that every host reports the same."""
    for worker in workers if isinstance(workers, list) else ():
        if isinstance(worker, TorchrunGroup):
            worker.code = code


def place_of(worker: Answering) -> str:
    """How the ranks of a path run, in words: simulated, or as processes over a backend."""
    return "ranks simulated" if isinstance(worker, Worker) else f"{worker.size} ranks over {worker.backend}"


def check_installed(spec: str) -> None:
    """Raise an error before any worker starts if a package that a built-in adapter needs is missing or too old."""
    if spec.startswith("fla/"):
        from verify.adapters.fla import REQUIRES

        check_requirements(spec, REQUIRES)
