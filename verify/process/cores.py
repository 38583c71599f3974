"""How many processes a machine runs side by side."""

import os


def cores() -> int:
    """How many cores this process may use: fewer than the machine has in a container or under taskset.

    Where the system does not say (macOS), all cores of the machine.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
