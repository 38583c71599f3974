"""Locks that processes share: bytes of a file in Triton's cache, which the system releases when a process ends."""

import fcntl
import functools
from typing import Any

from verify.interpreter.self_test import triton_cache

NAME = "gdn-verify-locks"  # a file in Triton's cache


def lock(place: int, *, wait: bool = True) -> None:
    """Take a byte of the file, a whole number from 0 up. A process that has it may take it again; one `unlock` releases it.

    BlockingIOError if another process has it and `wait` is False; another OSError if the cache cannot be written or its file
    system has no locks.
    """
    fcntl.lockf(_file(), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)


def unlock(place: int) -> None:
    """Release a byte of the file."""
    fcntl.lockf(_file(), fcntl.LOCK_UN, 1, place)


@functools.cache
def _file() -> Any:
    """The open file of the locks. Closing any other one of it in this process would release them."""
    triton_cache().mkdir(parents=True, exist_ok=True)
    return (triton_cache() / NAME).open("ab")
