"""Turns of large cases on a GPU that processes share, so that these cases fit into its memory together."""

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence

import torch

from verify.gpu import device as devices
from verify.gpu.locks import lock, unlock

LARGE = 2**25  # bytes of a case; with its reference it takes 18 to 130 times as much (measured on an H200)
EACH_BYTES = 2**35  # of a GPU's memory for each large case: 65,536 tokens in 16 narrow heads take 32 GiB with their reference
MOST = 16
WAIT_S = 30.0  # then a case goes on without a turn
_FIRST = 2**32  # the locks of kernels are below


@contextlib.contextmanager
def turn(device: str, need: int) -> Iterator[None]:
    """Let a case of `need` bytes run inside. A large one first waits until others on this GPU have ended."""
    place = None if device == "cpu" or need < LARGE else taken(_places(), WAIT_S)
    try:
        yield
    finally:
        if place is not None:
            unlock(place)


def taken(places: Sequence[int], wait_s: float) -> int | None:
    """The first of the places that this process could take within `wait_s` seconds; None if there is none, or no lock at all."""
    end = time.monotonic() + wait_s
    while True:
        for place in places:
            try:
                lock(place, wait=False)
            except BlockingIOError:
                continue
            except OSError:
                return None
            return place
        if time.monotonic() >= end:
            return None
        time.sleep(0.02)


def _places() -> range:
    """The places of the large cases that fit on this process' GPU together."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    first = _FIRST + MOST * zlib.crc32(str(getattr(properties, "uuid", properties.name)).encode())
    return range(first, first + min(MOST, max(1, devices.memory() // EACH_BYTES)))
