"""How much of a GPU's memory the oracle takes: the amount measured to be fast on an H200, in proportion on smaller GPUs."""

import functools

import torch

H200 = 139 * 2**30  # bytes of the GPU on which the numbers of oracles/ and verify/execution/shared_bounds.py were measured


def fitting(most: int, device: torch.device) -> int:
    """Return `most` (bytes or numbers, sized for an H200), reduced in proportion on a GPU with less memory; at least 1."""
    return most if device.type in ("cpu", "meta") else max(1, int(most * min(1.0, memory(device) / H200)))


@functools.cache
def memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, used or free."""
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
