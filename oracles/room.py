"""What the oracle takes of a GPU's memory: as much as was measured to be fast on a large one, less in proportion on others."""

import functools

import torch

H200 = 139 * 2**30  # bytes of the GPU that the numbers of oracles/ and of verify/execution/shared_bounds.py were measured on


def fitting(most: int, device: torch.device) -> int:
    """`most`, of bytes or numbers, which an H200 has room for; on a GPU with less memory that part of it, 1 at least."""
    return most if device.type in ("cpu", "meta") else max(1, int(most * min(1.0, memory(device) / H200)))


@functools.cache
def memory(device: torch.device) -> int:
    """The bytes of a GPU's memory, whoever holds them."""
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
