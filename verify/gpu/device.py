"""Devices: where implementations and oracles run, and whether a GPU can still be used after a kernel."""

import contextlib
import os
import time
from collections.abc import Iterator

import torch

from verify.process.worker import NO_GPU

KEPT = 2**32  # bytes
ROOM_S = 20.0  # other workers release what they cached after each case
CYCLES_PER_MS = 2e6  # no GPU's clock is much faster than 2 GHz


def gpus() -> int:
    """How many GPUs torch sees. Creates no context on any of them."""
    return torch.cuda.device_count()


def name() -> str:
    """The name of the GPU of this process, or "" if it has none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def memory() -> int:
    """The bytes of memory of the GPU of this process, or 0 if it has none."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if torch.cuda.is_available() else 0


def environment(device: str, worker: int = 0) -> dict[str, str]:
    """The environment of a worker process that runs cases on `device`.

    It shows the worker no GPU, or one of the GPUs that this process sees: worker number `worker` gets them in turn.
    """
    if device == "cpu":
        return dict(NO_GPU)
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    places = visible or [str(index) for index in range(max(1, gpus()))]
    return {"CUDA_VISIBLE_DEVICES": places[worker % len(places)]}


@contextlib.contextmanager
def default(device: str) -> Iterator[None]:
    """Make `device` torch's default device inside.

    For the CPU the default is removed, not set: torch checks a default device in every call, which takes time.
    """
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
    """Wait for all launches, so that their errors are raised here."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def hold(milliseconds: float) -> None:
    """Let the current stream of the GPU wait for this time or longer, and return at once."""
    torch.cuda._sleep(int(CYCLES_PER_MS * milliseconds))


def lost(device: str) -> str | None:
    """Why this process can no longer use the device, or None if it can. After an illegal access, the context is lost for good."""
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
    """If torch caches more than KEPT bytes and the GPU is crowded, release the cache for the other processes.

    Otherwise the cache stays: allocating the memory again takes longer than most computations on it.
    """
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT:
        with contextlib.suppress(RuntimeError):  # the GPU's context is gone, which `lost` reports
            if crowded("cuda"):
                torch.cuda.empty_cache()


def found_room(device: str) -> bool:
    """Whether a crowded GPU is crowded no longer, after other processes had ROOM_S seconds to release what they had cached."""
    end = time.monotonic() + ROOM_S
    while crowded(device) and time.monotonic() < end:
        torch.get_device_module(device).empty_cache()
        time.sleep(ROOM_S / 20)
    return not crowded(device)


def crowded(device: str) -> bool:
    """Whether less than half of a GPU's memory is free. What torch caches does not count as free.

    Other processes may have the memory, or the kernels of this one, for registers that they spill: the driver reserves that room
    for all threads that the device can run.
    """
    if device == "cpu":
        return False
    module = torch.get_device_module(device)
    free, whole = module.mem_get_info() if module.is_available() else (1, 1)
    return bool(free < whole / 2)


def free_bytes(device: str) -> int:
    """The bytes of free memory on the device. On a GPU, torch's cache is released first."""
    if device == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    module = torch.get_device_module(device)
    module.empty_cache()
    return int(module.mem_get_info()[0])
