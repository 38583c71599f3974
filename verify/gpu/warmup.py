"""Compiling the Triton kernels of a call without launching them, and each kernel in one process only."""

import contextlib
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

from verify.gpu.locks import lock, unlock


class Busy(Exception):
    """Another process compiles the kernel."""


_PASSING: list[bool] = []  # not empty while this process passes over kernels that another one compiles


@contextlib.contextmanager
def unlaunched(passed: list[str] | None = None) -> Iterator[None]:
    """Make every launch of a Triton kernel inside compile the kernel, load it, and go no further.

    A kernel that another process compiles is waited for, or passed over if there is a list `passed`, to which its name is added.
    A wrong kernel cannot cost this process its GPU, and the GPU reserves no memory for registers that a kernel spills. Errors of a
    launch about a kernel that the GPU cannot hold are raised here too. The memory that a kernel would write keeps what it held, so
    nobody may judge the results. Triton must not time configurations inside: it would time nothing.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import JITFunction

    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        try:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        except Busy:
            assert passed is not None
            passed.append(self.fn.__name__)
            return None
        if kernel is not None:
            _ = kernel.run  # loads the kernel, as a launch does first
        return kernel

    before = _PASSING[:]
    _PASSING[:] = [True] if passed is not None else []
    try:
        with mock.patch.object(JITFunction, "run", run):
            yield
    finally:
        _PASSING[:] = before


@functools.cache
def take_turns() -> None:
    """Make this process wait for a kernel that another process compiles, and take it from Triton's cache.

    Many cases of a check need the same kernels at the same time, and a kernel may take half a minute. Call it before the first
    launch: each kernel keeps the function that compiles it.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton import compiler

    plain = compiler.compile

    @functools.wraps(plain)
    def in_turn(src: Any, *args: Any, **kwargs: Any) -> Any:
        with _alone(hashlib.sha256(f"{src.hash()} {args} {sorted(kwargs.items())}".encode()).digest()):
            return plain(src, *args, **kwargs)

    compiler.compile = in_turn


@contextlib.contextmanager
def _alone(kernel: bytes) -> Iterator[None]:
    """Hold the lock of a kernel inside. Without one, go on.

    Busy if another process holds it and this one passes over such kernels.
    """
    place = int.from_bytes(kernel[:4], "big")
    try:
        lock(place, wait=not _PASSING)
    except BlockingIOError:
        raise Busy from None
    except OSError:  # two processes may compile the same kernel
        yield
        return
    try:
        yield
    finally:
        unlock(place)
