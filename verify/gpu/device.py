"""Devices: where implementations and oracles run, and whether a GPU still answers after what a kernel did to it."""

import contextlib
import os
from collections.abc import Iterator

import torch

from verify.process.worker import NO_GPU

DEVICES = ("cpu", "cuda")
KEPT = 2**32  # bytes


def gpus() -> int:
    """How many GPUs torch sees, asked without a context on any."""
    return torch.cuda.device_count()


def name() -> str:
    """The GPU of this process, a worker's, or "" where it has none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def environment(device: str, worker: int = 0) -> dict[str, str]:
    """What a worker process that runs cases on `device` is given: no GPU, or one of those that this process sees, in turn."""
    if device == "cpu":
        return dict(NO_GPU)
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    places = visible or [str(index) for index in range(max(1, gpus()))]
    return {"CUDA_VISIBLE_DEVICES": places[worker % len(places)]}


@contextlib.contextmanager
def default(device: str) -> Iterator[None]:
    """Tensors that name no device are made on `device`. On the CPU nothing changes: a default costs every call of torch's."""
    before = torch.get_default_device()
    if before.type == device:
        yield
        return
    torch.set_default_device(None if device == "cpu" else device)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


def settle(device: str) -> None:
    """Wait for all that was launched, so that what it did wrong is raised here."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def lost(device: str) -> str | None:
    """Why nothing runs on the device any more in this process, or None: an illegal access takes its context away for good."""
    if device == "cpu":
        return None
    try:
        settle(device)
        torch.zeros(1, device=device).add_(1).cpu()
    except torch.OutOfMemoryError:
        return None
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def tidy() -> None:
    """Give back what torch keeps of memory beyond KEPT, for processes that share the device, where it is crowded.

    To ask the driver for it again takes longer than most that is done with it.
    """
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT:
        with contextlib.suppress(RuntimeError):  # its context is gone: whoever asks for it is told so
            if crowded("cuda"):
                torch.cuda.empty_cache()


def crowded(device: str) -> bool:
    """Whether less than half of a GPU's memory is free, though torch gave back what it only kept: other processes have it.

    Or this one's kernels, for the registers that they spill: the driver keeps room for all threads that the device can have.
    """
    if device == "cpu":
        return False
    module = torch.get_device_module(device)
    free, whole = module.mem_get_info() if module.is_available() else (1, 1)
    return bool(free < whole / 2)


def free_bytes(device: str) -> int:
    """Bytes of memory that are free on the device, after torch gave back what it only kept."""
    if device == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    module = torch.get_device_module(device)
    module.empty_cache()
    return int(module.mem_get_info()[0])
